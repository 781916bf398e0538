"""Notebooks that leave the book: what a page offers for download, and what
Colab and Binder open.

Colab and Binder buttons exist when `git_url` in settings.ini names a repository
on GitHub, and only then. They open a branch of that repository, `notebooks`,
which holds what `python -m tools.launch FOLDER` writes: the chapters, each with
a cell that installs the package, and Binder's requirements. The hosted workflow
publishes it; it could not be run where the project was made.
"""

import configparser
import re
import sys
from pathlib import Path

from tools import plain
from tools.chapters import ROOT, cell, chapters
from tools.files import save

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


def requirement(repo: str, ref: str) -> str:
    """The package of this repository at a tag or commit, with what the chapters
    need, for pip.
    """
    return f"normalnorm[book] @ git+https://github.com/{repo}@{ref}"


def install_cell(repo: str, ref: str) -> dict:
    """It installs the package where it is missing: on Colab it is, on Binder
    and at home it is not.
    """
    source = (
        "import importlib.util\n\n"
        'if importlib.util.find_spec("normalnorm") is None:\n'
        f'    %pip install --quiet "{requirement(repo, ref)}"'
    )
    return cell("code", source, "install")


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
    plain.write(folder / "nbs", root, [install_cell(repo, ref)])
    for name, content in {
        "binder/requirements.txt": "--extra-index-url "
        "https://download.pytorch.org/whl/cpu\njupyterlab\n"
        f"{requirement(repo, ref)}\n",
        "binder/runtime.txt": "python-3.11\n",
        "README.md": "Written by tools/launch.py from "
        f"https://github.com/{repo} at {ref}: the chapters "
        "as Colab and Binder open them. Changes are made "
        "there.\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return [path for path in folder.rglob("*") if path.is_file()]


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
        ] not in {c.name for c in plain.tutorials(Path(app.srcdir))}:
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
    """Sphinx copies the sources of the pages that it writes; each copy becomes
    the notebook that a learner can run.
    """
    if exception or app.builder.format != "html":
        return
    for chapter in chapters(Path(app.srcdir)):
        path = Path(app.outdir, "_sources", "nbs", chapter.path.name)
        if path.exists() and path.read_bytes() == chapter.path.read_bytes():
            save(path, plain.notebook(chapter))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m tools.launch FOLDER [TAG OR COMMIT]")
    print(
        f"{len(write(Path(sys.argv[1]), *sys.argv[2:]))} files in {sys.argv[1]}"
    )
