"""Notebooks that leave the book: what a page offers for download, and what
Colab and Binder open.

Colab and Binder buttons exist when `git_url` in settings.ini names a repository
on GitHub, and only then. They open a branch of that repository, `notebooks`,
which holds what `python -m tools.launch FOLDER` writes: the chapters, each with
a cell that installs the package, and Binder's requirements. The hosted workflow
publishes it; it could not be run where the project was made.
"""

import configparser
import json
import re
import sys
from pathlib import Path

from tools.chapters import ROOT, Chapter, chapters
from tools.dialect import directives, without_directives
from tools.plain import notebook, numbered_chapters

BRANCH = "notebooks"
BINDER, COLAB = "https://mybinder.org", "https://colab.research.google.com"


def settings(root: Path = ROOT) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(root / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


def repository(root: Path = ROOT) -> str | None:
    """`owner/name` of the public repository that settings.ini names; None where
    it names no repository on GitHub.
    """
    found = re.fullmatch(
        r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?",
        settings(root).get("git_url", "").strip(),
    )
    return found[1] if found else None


def tutorials(root: Path = ROOT) -> list[Chapter]:
    "The chapters that are run elsewhere: all but the appendices."
    return [Chapter(name, root) for name in numbered_chapters(root)]


# ---- notebooks --------------------------------------------------------------


def download(chapter: Chapter) -> dict:
    """The notebook that a page offers, without outputs: a chapter in plain
    Markdown, an appendix as it is written, but for the directives of nbdev and
    Quarto.
    """
    if chapter.name in numbered_chapters(chapter.root):
        return notebook(chapter)
    cells = []
    for cell in chapter.cells():
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = (
                ""
                if "default_exp" in directives(source)
                else without_directives(source)
            )
            cell = {**cell, "outputs": [], "execution_count": None}
        if source:
            cells.append({**cell, "source": source})
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            }
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def text(content: dict) -> str:
    return (
        json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    )


def requirement(repo: str, ref: str) -> str:
    """The package of this repository at a tag or commit, with what the chapters
    need, for pip.
    """
    return f"normalnorm[book] @ git+https://github.com/{repo}@{ref}"


def with_install_cell(content: dict, repo: str, ref: str) -> dict:
    """A first cell that installs the package where it is missing: on Colab it
    is, on Binder and at home it is not.
    """
    source = (
        "import importlib.util\n\n"
        'if importlib.util.find_spec("normalnorm") is None:\n'
        f'    %pip install --quiet "{requirement(repo, ref)}"'
    )
    cell = {
        "cell_type": "code",
        "id": "install",
        "metadata": {},
        "source": source,
        "outputs": [],
        "execution_count": None,
    }
    return {**content, "cells": [cell, *content["cells"]]}


# ---- the branch that Colab and Binder open ----------------------------------


def write(folder: Path, ref: str = "", root: Path = ROOT) -> list[Path]:
    """Everything of the branch, into `folder`, with the committed results that
    the chapters show; the version's tag unless another `ref` is given.
    """
    repo = repository(root)
    if not repo:
        raise ValueError(
            "git_url in settings.ini names no repository on "
            "GitHub: there is nothing that Colab or Binder could "
            "open"
        )
    ref = ref or f"v{settings(root)['version']}"
    files = {
        f"nbs/{c.name}.ipynb": text(with_install_cell(download(c), repo, ref))
        for c in tutorials(root)
    }
    files["binder/requirements.txt"] = (
        "--extra-index-url https://download.pytorch.org/whl/cpu\njupyterlab\n"
        f"{requirement(repo, ref)}\n"
    )
    files["binder/runtime.txt"] = "python-3.11\n"
    files["README.md"] = (
        "Written by tools/launch.py from "
        f"https://github.com/{repo} at {ref}: the chapters "
        "as Colab and Binder open them. Changes are made "
        "there.\n"
    )
    files |= {
        f"nbs/{p.relative_to(root).as_posix()}": p.read_text(encoding="utf-8")
        for p in sorted((root / "results").glob("**/book/**/*"))
        if p.is_file()
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return [folder / name for name in files]


# ---- the rendered pages -----------------------------------------------------


def theme_options(root: Path = ROOT) -> dict:
    """What the theme needs for its launch buttons; nothing where there is no
    public repository.
    """
    repo = repository(root)
    if not repo:
        return {}
    return {
        "repository_url": f"https://github.com/{repo}",
        "repository_branch": BRANCH,
        "path_to_docs": "",
        "launch_buttons": {
            "binderhub_url": BINDER,
            "colab_url": COLAB,
            "notebook_interface": "jupyterlab",
        },
    }


def configure(app, config):
    config.html_theme_options = {
        **config.html_theme_options,
        **theme_options(Path(app.srcdir)),
    }


def page_buttons(app, pagename, templatename, context, doctree):
    """No launch button on a page that the branch does not have; a download says
    what it is.
    """
    kept = []
    for button in context.get("header_buttons", []):
        if button.get("label") == "launch-buttons" and pagename.rsplit("/", 1)[
            -1
        ] not in {c.name for c in tutorials(Path(app.srcdir))}:
            continue
        for inner in button.get("buttons", []):
            if (
                inner.get("label") == "download-source-button"
                and str(inner.get("text")) == ".ipynb"
            ):
                inner["tooltip"] = "Download this page as a notebook"
        kept.append(button)
    context["header_buttons"] = kept


def write_downloads(app, exception):
    """Sphinx copies the sources of the pages beside the book; notebooks are put
    there as a learner can run them.
    """
    if exception or app.builder.format != "html":
        return
    for chapter in chapters(Path(app.srcdir)):
        path = Path(app.outdir, "_sources", "nbs", f"{chapter.name}.ipynb")
        if path.exists():
            path.write_text(text(download(chapter)), encoding="utf-8")


def setup(app):
    app.connect("config-inited", configure)
    # after the theme has made its buttons
    app.connect("html-page-context", page_buttons, priority=950)
    app.connect("build-finished", write_downloads)
    return {
        "version": "1",
        "parallel_read_safe": True,
        "parallel_write_safe": True,
    }


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m tools.launch FOLDER [TAG OR COMMIT]")
    print(
        f"{len(write(Path(sys.argv[1]), *sys.argv[2:]))} files in {sys.argv[1]}"
    )
