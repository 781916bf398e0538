"""Chapters as plain notebooks: numbers as in the rendered book, no dialect
left, code unchanged; from a wheel into an empty folder.
"""

import os
import re
import zipfile

import lxml.html
import pytest

from tools import files, markup, plain
from tools.chapters import ROOT, Chapter, chapters
from tools.dialect import fold_of, without_directives

HTML = ROOT / "_build" / "html" / "nbs"


def translated(text, shipped=frozenset()):
    return plain.Plain(ROOT, set(shipped)).markdown(markup.blocks(text))


# ---- the translation --------------------------------------------------------


def test_equations_carry_their_numbers():
    number = plain.numbers(ROOT)["eq-safe"]
    assert (
        translated("See @eq-safe:\n$$ a = b. $$ {#eq-safe}\nand $$ c $$")
        == f"See ({number}):\n\n$$\na = b. \\tag{{{number}}}\n$$\n\nand\n\n"
        "$$\nc\n$$"
    )
    assert "`@eq-safe`" in translated("`@eq-safe` in code stays")


def test_blocks():
    assert (
        translated("::: {#thm-curvature}\nFor every $x$.\n:::")
        == f"> **Theorem {plain.numbers(ROOT)['thm-curvature']}**\n>\n"
        "> For every $x$."
    )
    assert translated("::: {.proof}\nEasy.\n:::") == "> *Proof.* Easy. ∎"
    assert (
        translated("::: {.solution}\nSix.\n:::")
        == "<details>\n<summary>Solution</summary>\n\nSix.\n\n</details>"
    )


def test_citations_and_links():
    assert translated("@yeo2000 say") == "Yeo and Johnson (2000) say"
    assert (
        translated("so [@yeo2000; @eftekhari2025, Eq. 3].")
        == "so (Yeo and Johnson, 2000; Eftekhari and Papyan, 2025, Eq. 3)."
    )
    assert (
        translated(
            "[a](b.ipynb) [c](d.ipynb#e) [f](https://g.h) [i](#j)",
            shipped={"b.ipynb"},
        )
        == "[a](b.ipynb) c "
        "[f](https://g.h) [i](#j)"
    )


def test_code_cells():
    """Their code; that of folded ones is hidden in JupyterLab, whose first line
    says what it is; captions are cells of their own.
    """
    chapter = Chapter("220_theory.newton", ROOT)
    cells = plain.notebook(chapter)["cells"]
    code = {c["id"]: c for c in cells if c["cell_type"] == "code"}
    folded = 0
    for cell in chapter.cells():
        source = without_directives(cell["source"])
        if cell["cell_type"] != "code" or not source:
            continue
        made = code.pop(cell["id"])
        first, _, rest = made["source"].partition("\n")
        named = first.startswith(("# in the library: ", "# folded: "))
        assert source == (rest if named else made["source"])
        if fold := fold_of(cell["source"]):
            folded += 1
            assert fold.text() in first
            assert made["metadata"] == {"jupyter": {"source_hidden": True}}
    assert folded > 10 and not code
    captions = sum(c["source"].startswith("**Fig. ") for c in cells)
    assert captions == sum("fig-cap" in s for s in chapter.code_cells()) > 0


def test_numbers_are_those_of_the_rendered_book():
    if not (ROOT / "_build" / "rendered").exists():
        pytest.skip("the book is not rendered: make book")
    numbers, checked = plain.numbers(ROOT), 0
    for chapter in plain.tutorials():
        page = lxml.html.parse(str(HTML / f"{chapter.name}.html")).getroot()
        for kind, label in plain.labels(chapter):
            name = f"equation-{label}" if kind == "eq" else label
            (place,) = page.xpath("//*[@id=$name]", name=name)
            if kind == "fig" and place.tag != "figure":
                place = place.xpath("following::figure")[0]
            of = "eqno" if kind == "eq" else "caption-number"
            shown = place.find_class(of)[0].text_content()
            assert numbers[label] in re.findall(r"\d+(?:\.\d+)?", shown), (
                f"{label}: {shown!r} in the book, {numbers[label]} in the "
                "notebook"
            )
            checked += 1
    assert checked > 50


# ---- from a wheel into an empty folder --------------------------------------


# a folder, the wheel's files and nothing else
LEARNER = """
import json, os, sys
import matplotlib
matplotlib.use("agg")
import normalnorm
from normalnorm import cli
assert cli.main(["lab", "curvature", "--copy", "--to", "here"]) == 0
os.chdir("here")
for name in sys.argv[1:]:
    with open(f"{name}.ipynb", encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    exec(compile("\\n\\n".join(code), name, "exec"), {"__name__": "__main__"})
print(normalnorm.__file__)
"""


def test_chapters_run_from_the_wheel(plain_wheel, tmp_path):
    """What a learner does, short of opening JupyterLab: the wheel's files
    alone, an empty folder, a chapter and one that shows committed results.
    """
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(plain_wheel) as wheel:
        wheel.extractall(site)
    book = {p.name for p in (site / "normalnorm" / "book").glob("*.ipynb")}
    assert book == {c.path.name for c in chapters() if c.part != 9}
    done = files.python(
        *("-c", LEARNER),
        *("225_theory.curvature", "510_experiments.recipes.first"),
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{len(book)} chapters copied" in done.stdout
    assert done.stdout.strip().splitlines()[-1] == str(
        site / "normalnorm" / "__init__.py"
    )
