"""Chapters as plain notebooks: numbers as in the rendered book, no dialect
left, code unchanged; without solutions; from a wheel into an empty folder.
"""

import ast
import os
import re
import zipfile
from contextlib import nullcontext

import lxml.html
import nbformat
import pytest

from normalnorm import cli, lab
from tests.book import toy
from tools import files, markup, plain
from tools.chapters import ROOT, Chapter, chapters, notebook
from tools.files import load, save
from tools.folding import fold_of, without_directives

HTML = ROOT / "_build" / "html" / "nbs"


# ---- the translation --------------------------------------------------------


@pytest.mark.parametrize(
    "text, made",
    [
        ("`@eq-safe` in code stays", "`@eq-safe` in code stays"),
        ("::: {.proof}\nEasy.\n:::", "> *Proof.* Easy. ∎"),
        (
            "::: {.solution}\nSix.\n:::",
            "<details>\n<summary>Solution</summary>\n\nSix.\n\n</details>",
        ),
        ("@yeo2000 say", "Yeo and Johnson (2000) say"),
        (
            "so [@yeo2000; @eftekhari2025, Eq. 3].",
            "so (Yeo and Johnson, 2000; Eftekhari and Papyan, 2025, Eq. 3).",
        ),
        (
            "[a](b.ipynb) [c](d.ipynb#e) [f](https://g.h) [i](#j)",
            "[a](b.ipynb) c [f](https://g.h) [i](#j)",
        ),
        # with the numbers of the book
        (
            "See @eq-safe:\n$$ a = b. $$ {#eq-safe}\nand $$ c $$",
            "See (eq-safe):\n\n$$\na = b. \\tag{eq-safe}\n$$\n\nand\n\n"
            "$$\nc\n$$",
        ),
        (
            "::: {#thm-curvature}\nFor every $x$.\n:::",
            "> **Theorem thm-curvature**\n>\n> For every $x$.",
        ),
    ],
)
def test_the_translation(text, made):
    for label in re.findall(r"#([\w-]+)\}", text):
        made = made.replace(label, plain.numbers(ROOT)[label])
    assert plain.Plain(ROOT, {"b.ipynb"}).markdown(markup.blocks(text)) == made


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


# ---- exercises without their solutions --------------------------------------


def test_a_notebook_to_fill_in(tmp_path, monkeypatch, capsys):
    "It is copied once, kept when it was filled in, and put aside if asked."
    shipped, mine = tmp_path / "shipped", tmp_path / "mine"
    shipped.mkdir()
    answer = "<details>\n<summary>Solution</summary>\n\nThree.\n\n</details>"
    code = "# folded: code\nroot = 3\nassert root**2 == 9"
    pairs = ("markdown", f"# Roots\n\nOf 9?\n\n{answer}"), ("code", code)
    save(shipped / "001_roots.ipynb", notebook(toy.cells(*pairs)))
    save(shipped / "002_none.ipynb", notebook(toy.cells(("markdown", "# No"))))
    monkeypatch.setattr(lab, "shipped_chapters", lambda: nullcontext(shipped))
    asked = lambda *words: cli.main(
        ["lab", "--exercises", "--copy", "--to", str(mine), *words]
    )
    for words, said in (
        ((), "exercises of which chapter"),
        (("none",), "has no exercises"),
        (("root of",), "no chapter is called"),
    ):
        assert asked(*words) == 2 and said in capsys.readouterr().err
    assert not mine.exists() and asked("roots") == 0
    path = mine / "001_roots.exercises.ipynb"
    assert f"without solutions: {path}" in capsys.readouterr().out
    made = load(path)
    assert [c["source"] for c in made["cells"]] == [
        "# Roots\n\nOf 9?",
        "root = ...  # your turn\nassert root**2 == 9",
    ]
    made["cells"][1]["source"] = "root = -3\nassert root**2 == 9"
    save(path, made)
    assert asked("roots") == 0 and load(path) == made
    assert asked("roots", "--fresh") == 0 and load(path) != made
    assert load(mine / "001_roots.exercises.mine.ipynb") == made


def has_solution(cell):
    words = "<summary>Solution</summary>"
    return cell["cell_type"] == "markdown" and words in cell["source"]


def test_blanks_and_judges():
    """Of each solution with code, in the whole book; the text of all is gone.

    A chapter where this fails has a solution whose last assertion stands before
    what it is to judge, or that computes nothing under a name.
    """
    found = 0
    with lab.shipped_chapters() as folder:
        wholes = [load(path) for path in sorted(folder.glob("*.ipynb"))]
    for whole in wholes:
        if not any(map(has_solution, whole["cells"])):
            continue
        made = lab.exercises_of(whole)
        nbformat.validate(nbformat.from_dict(made))
        assert not any(map(has_solution, made["cells"]))
        code = {}  # of each solution, by the cell in front of it
        for old, new in zip(whole["cells"], made["cells"]):
            if old["cell_type"] == "markdown":
                answers, place = has_solution(old), old["source"]
            elif answers:
                code[place] = code.get(place, "") + new["source"] + "\n"
        for place, text in code.items():
            ast.parse(text)
            _, blank, judge = text.rpartition("your turn")
            judged = blank and re.search(r"\bassert|\brefused\(", judge)
            assert judged, f"{place}\n{text}"
            found += 1
    assert found > 250


# every cell as it is, then each solution with blanks, from where it began
JUDGED = """
from __future__ import annotations
import json, linecache, os, sys
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot, torch
from normalnorm.lab import exercises_of

def run(text, name, space):
    "As a notebook does: who asks for the source of a function gets it."
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    exec(compile(text, name, "exec"), space)

def judge(whole, space):
    found = []
    for cell, blanks in zip(whole["cells"], exercises_of(whole)["cells"]):
        if cell["cell_type"] == "markdown":
            found.append((dict(space), [], []))
        else:
            run(cell["source"], cell["id"], space)
            found[-1][1].append(cell["source"])
            found[-1][2].append(blanks["source"])
    for before, code, blanks in found:
        if blanks == code:
            continue
        text = "\\n".join(blanks)
        try:
            run(text, "exercise", before)
        except NameError:
            raise
        except Exception:
            continue
        raise AssertionError("with blanks, nothing is refused: " + text)

# a fork for each: imports take longer
for path in sys.argv[1:]:
    if (child := os.fork()) == 0:
        with open(path, encoding="utf-8") as file:
            judge(json.load(file), globals())
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(path)
"""
SOME = [  # values, functions, a class, hidden cells, several of a solution
    "141_analysis.negentropy",
    "233_layers.backends",
    "330_normalizers_at_a_glance",
    "475_experiments.recipes.wide_nets",
    "515_printed_tables",
    "705_names",
]
if os.environ.get("NORMALNORM_EXERCISES") == "all":
    SOME = [
        chapter.name
        for chapter in plain.tutorials()
        if "::: {.solution}" in chapter.path.read_text(encoding="utf-8")
    ]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_blanks_are_refused():
    """And solutions are not. NORMALNORM_EXERCISES=all tries every chapter,
    which takes half an hour.
    """
    with lab.shipped_chapters() as folder:
        done = files.python(
            *("-c", JUDGED, *(str(folder / f"{name}.ipynb") for name in SOME)),
            cwd=ROOT / "nbs",
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr[-2000:]


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
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{len(book)} chapters copied" in done.stdout
    assert done.stdout.strip().splitlines()[-1] == str(
        site / "normalnorm" / "__init__.py"
    )
