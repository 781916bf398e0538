"A small checkout: a landing page and a few chapters."

import shutil

from tools.chapters import ROOT, cell, notebook
from tools.files import save


def cells(*pairs, called="c"):
    "Cells of these kinds and sources, called c0, c1, …"
    return [cell(*pair, f"{called}{i}") for i, pair in enumerate(pairs)]


def write(root, name, *pairs):
    path = root / "nbs" / f"{name}.ipynb"
    save(path, notebook(cells(*pairs)))
    return path


def contents(*names, caption="One"):
    "A part of a table of contents."
    return (
        f"  - caption: {caption}\n    numbered: true\n    chapters:\n"
        + "".join(f"      - file: nbs/{name}\n" for name in names)
    )


def checkout(root, books):
    "Names of chapters, the landing page's first → pairs as for `cells`."
    for folder in ("nbs", "normalnorm"):
        (root / folder).mkdir()
    for name in ("settings.ini", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: nbs/index\nparts:\n" + contents(*[*books][1:])
    )
    for name, pairs in books.items():
        write(root, name, *pairs)
    return root
