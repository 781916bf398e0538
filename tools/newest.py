"""`make test-sphinx`: the pages of the book under the newest Sphinx and its
newest extensions, which Jupyter Book 1 forbids; the outcome into
results/pages-newest.json.

    python -m tools.newest PYTHON    that of an environment of its own

Jupyter Book only says here what its settings are for Sphinx; another Python,
which neither has it nor PyTorch, writes the pages of `make book` again. The
record counts the warnings and the pages whose words are not those of the book.
"""

import html
import json
import re
import sys
import time

from tools.chapters import ROOT, pages
from tools.files import ran, save
from tools.pdf import ARTICLE, HTML

OUT = ROOT / "_build" / "newest"
PACKAGES = """sphinx myst-nb sphinx-book-theme sphinx-mathjax-offline
sphinx-proof sphinx-exercise sphinx-external-toc sphinx-design sphinx-comments
sphinx-copybutton sphinx-togglebutton sphinx-thebe sphinxcontrib-bibtex
sphinx-jupyterbook-latex sphinx-multitoc-numbering""".split()
# {settings, folders, packages} → {python, versions, warnings}; what Sphinx
# says goes to the errors
SPHINX = """
import json, platform, sys
from importlib.metadata import version
from sphinx.application import Sphinx
given = json.load(sys.stdin)
sys.path += given["paths"]
app = Sphinx(*given["folders"], "html", given["settings"], status=None,
             freshenv=True)
app.build()
print(json.dumps({
    "python": platform.python_version(),
    "versions": {name: version(name) for name in given["packages"]},
    "warnings": app._warncount}))
"""


def settings() -> dict:
    "What Jupyter Book tells Sphinx, without its own extension and its setting."
    from jupyter_book.config import get_final_config

    found, _ = get_final_config(
        user_yaml=ROOT / "_config.yml",
        sourcedir=ROOT,
        cli_config={"latex_individualpages": False},
    )
    found["extensions"].remove("jupyter_book")
    del found["use_jupyterbook_latex"]
    return found | {"nitpicky": True}


def words(page: str, below=HTML) -> str:
    "The text of a rendered page without white space."
    source = (below / f"{page}.html").read_text(encoding="utf-8")
    text = re.sub("<[^>]*>", "", ARTICLE.search(source)[0])
    return re.sub(r"\s+", "", html.unescape(text))


def main(python: str) -> int:
    pip = python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"
    ran([*pip, "--upgrade", *PACKAGES], check=True)
    start = time.perf_counter()
    given = {
        "settings": settings(),
        "folders": [str(ROOT), None, str(OUT), str(OUT / ".doctrees")],
        "paths": [str(ROOT), str(ROOT / "tools")],
        "packages": [*PACKAGES, "myst-parser", "docutils"],
    }
    done = ran([python, "-c", SPHINX], cwd=ROOT, input=json.dumps(given))
    print(done.stderr[-12000:])
    if done.returncode:
        return done.returncode
    found = json.loads(done.stdout.splitlines()[-1]) | {
        "date": time.strftime("%Y-%m-%d"),
        "pages": len(pages()),
        "other words": [p for p in pages() if words(p) != words(p, OUT)],
        "seconds": round(time.perf_counter() - start),
    }
    print(found)
    save(ROOT / "results" / "pages-newest.json", found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
