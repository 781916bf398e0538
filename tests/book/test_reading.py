"""What a reader meets: code that is folded, the words in its place, and how
much code is left.
"""

import re

import pytest

from tests.book import toy
from tools import folding, markup, reading
from tools.chapters import ROOT, Chapter, chapters
from tools.dialect import translate_notebook
from tools.folding import fold_of

# Chapters that show more than two lines of code for a line of prose, and why.
MORE_CODE: dict[str, str] = {}
# How far down a first picture may be: 30 lines, as `tools.reading` counts them,
# are 1.5 screens of 1280 × 900 pixels (measured: 020, 30 lines, 1.4 screens;
# 238 before it had a diagram, 42 lines, 1.9 screens).
FAR = 30
# Chapters without a picture that early, and what they open with.
NO_PICTURE = {
    "005_should_i_use_it": "one table",
    "598_what_was_stated": "one table of all experiments",
    "599_how_do_i_reproduce": "the count of all items",
    "285_proxy_in_the_kernel": "C++ of 410 and 415, which have the figures",
    "705_names": "four slips and what is like them",
    "710_claims": "a table of a statement and its mutant",
    "423_experiments.recipes.random_nets": "a program; its figures are in 345",
    "462_experiments.recipes.spectra": "a program; its figures are in 460",
    "475_experiments.recipes.wide_nets": "a program; its figures: 355, 480",
    "592_experiments.recipes.growth": "a program; its figures are in 365",
    "593_experiments.recipes.slimming": "a program; its figures are in 370",
    "594_experiments.recipes.power_training": "a program; its figures: 427",
    "595_experiments.recipes.early_training": "a program; its figures: 457",
    "733_experiments.idx": "what a reader makes of a file cut short",
    "750_experiments.train": "five demands, in words",
    "760_experiments.results": "the table of what a row answers",
    "762_experiments.tables": "a whole report",
    "764_experiments.recipes.hardness": "the table of six models",
    "905_notation": "a table",
    "910_what_was_checked": "a table",
    "915_coverage": "a table",
    "920_errata": "a table",
    "931_paper_normality": "a table",
    "932_paper_reviews": "a table",
    "933_paper_proxy_norm": "a table",
    "934_paper_unique": "a table",
    "935_paper_geometry": "a table",
}


def lines(n, line="x = 1"):
    return "\n".join([line] * n)


# ---- how much is seen -------------------------------------------------------


@pytest.mark.parametrize("name", [c.name for c in chapters()])
def test_code_is_not_more_than_twice_the_prose(name):
    row = reading.row(Chapter(name, ROOT))
    assert (row["code"] * reading.WORDS <= 2 * row["words"]) != (
        name in MORE_CODE
    ), row


@pytest.mark.parametrize("name", [c.name for c in chapters()])
def test_the_first_picture_is_within_a_screen_and_a_half(name):
    lines = reading.row(Chapter(name, ROOT))["lines_before_picture"]
    near = lines is not None and lines <= FAR
    assert near or name in NO_PICTURE, (
        f"{lines} lines before the first picture: move a figure up, or draw "
        "how the data flow (plots.flow)"
    )
    assert not near or name not in NO_PICTURE, "it needs no exemption any more"


def test_lines_of_code():
    code = (
        '"""A docstring\n\nof the cell."""\n\n# a comment\ndef f(x):\n'
        '    "What it does."\n    # why\n    return (x\n\n            + 1)'
        '\n\ntext = """a\n# no comment\n"""  # but this\n'
    )
    assert folding.python_lines(code) == 6
    assert folding.python_lines("%matplotlib inline\n# x\n\ny = f(") == 2
    assert (
        folding.native_lines(
            "// what\nint f() { /* a\nb */ return 1; // c\n\n}"
        )
        == 3
    )


@pytest.mark.parametrize(
    "cell, seen",
    [
        (lines(5), 5),
        (f"#| hide\n{lines(5)}", 0),
        (f"#| check\n{lines(5)}", 0),
        (f"#| code-fold: true\n{lines(5)}", 0),
        (f"#| export\n{lines(13)}", 0),
        (f"#| code-fold: false\n#| export\n{lines(13)}", 13),
        (f"#| export\n{lines(12)}", 12),
        (lines(24), 24),
        (lines(25), 0),
        (f'#| fig-cap: "c"\n{lines(13)}', 0),
        (f'#| fig-cap: "c"\n{lines(12)}', 12),
        ("#| default_exp a", 0),
    ],
)
def test_what_is_seen_of_a_cell(cell, seen):
    made = {"cell_type": "code", "source": cell}
    assert reading.visible_code(made) == seen


def test_words_and_pictures(tmp_path):
    cells = [
        (
            "markdown",
            "# Two words\n\n$$ x = y $$ {#eq-x}\n\n::: {#exr-a}\n"
            "And *three* more.\n:::\n\n```sh\nnot these\n```",
        ),
        ("code", lines(2)),
        ("code", '#| hide\n#| fig-cap: "c"\nx'),
        ("code", '#| label: fig-x\n#| fig-cap: "c"\nwidget(1)'),
        ("markdown", "![A picture](a.png)"),
    ]
    (tmp_path / "nbs").mkdir()
    toy.write(tmp_path, "010_a", *cells)
    assert reading.row(Chapter("010_a", tmp_path)) == {
        "words": 7,
        "code": 3,
        "lines_before_picture": 6,
    }


# ---- what stands in its place -----------------------------------------------

FUNCTION = '''
def curvature(h: Tensor, dim: int = -1, *, eps=0.1, **more) -> Tensor:
    """The second derivative at 1, in `float64`. It is
    positive.

    More.
    """
    return h


def _helper(x):
    return x


class Step(nn.Module):
    "One step."
    def __init__(self, size: int = 3):
        pass


class Pair(NamedTuple):
    "Two numbers"
    first: float
    second: float = 0.0
'''


def test_an_export_shows_what_it_defines():
    found = folding.fold({"export": "", "code-fold": "true"}, FUNCTION)
    assert found.kind == "export" and found.lines == (
        (
            "curvature(h, dim=-1, *, eps=0.1, **more)",
            "The second derivative at 1, in `float64`.",
        ),
        ("Step(size=3)", "One step."),
        ("Pair(first, second)", "Two numbers"),
        ("", "and `_helper`"),
    )
    assert found.html().startswith(
        "<code>curvature(h, dim=-1, *, eps=0.1, **more)</code> The second "
        "derivative at 1, in <code>float64</code>.<br><code>Step"
    )
    assert found.text() == "curvature, Step, Pair, and _helper"
    constants = folding.fold(
        {"export": ""}, lines(9, "A = 1") + "\n" + lines(9, "B: int = {1: '<'}")
    )
    assert constants.lines == (("", "`A`, `B`"),)


@pytest.mark.parametrize(
    "found, code, kind, words",
    [
        (
            {"check": ""},
            "@claim('a')\ndef _(x): pass",
            "check",
            "code of the check",
        ),
        (
            {"check": ""},
            "@claim(\n'a')\n@claim('b')",
            "check",
            "code of the 2 checks",
        ),
        (
            {"check": ""},
            "def helper(a): pass",
            "check",
            "<code>helper(a)</code>",
        ),
        (
            {"check": ""},
            "\n".join(f"def f{i}(): pass" for i in range(4)),
            "check",
            "what checks of this page use: <code>f0</code>, <code>f1</code>, "
            "<code>f2</code>, <code>f3</code>",
        ),
        ({"fig-cap": "c"}, lines(13), "figure", "code of the figure"),
        ({}, "\n".join(f"import a{i}" for i in range(5)), "code", "imports"),
        (
            {"export": ""},
            "\n".join(f"import a{i}" for i in range(5)),
            "export",
            "imports",
        ),
        ({}, lines(25, "print(1)"), "code", "code"),
        ({}, lines(25) + "\n%magic", "code", "code"),
    ],
)
def test_what_stands_for_a_cell(found, code, kind, words):
    fold = folding.fold(found, code)
    assert (fold.kind, fold.html()) == (kind, words)


@pytest.mark.parametrize(
    "code, words",
    [
        ("// Adds `a` and b. Slowly.\nint add() {\n", "Adds `a` and b."),
        ("\n// ---- Sums.\nint add() {\n", "Sums."),
        (
            "template <class V> struct Sum {\n};\nstatic inline int add(int "
            "a,\n"
            "    int b) {\n  if (a) {\n  }\n}\n#define X(y) {",
            "`Sum`, `add`",
        ),
    ],
)
def test_what_stands_for_a_piece_of_cpp(code, words):
    found = folding.fold({}, code + "\n".join(["x;"] * 13), raw=True)
    assert found.lines == (("", words),)
    assert folding.fold({}, "int x;", raw=True) is None


def test_a_hidden_cell_stays_hidden():
    for hidden in ("hide", "echo: false"):
        assert fold_of(f"#| {hidden}\n#| check\n{lines(30)}") is None


def test_a_folded_cell_that_failed_is_shown():
    pairs = ("markdown", "# A"), ("code", f"#| check\n{lines(30)}")
    notebook = {"cells": toy.cells(*pairs)}
    made = translate_notebook(
        notebook, None, failed={"cell": 2, "of": 2, "error": "x"}
    )
    assert made["cells"][-1]["metadata"]["tags"] == []


def markdown(name):
    cells = Chapter(name, ROOT).cells()
    return [c["source"] for c in cells if c["cell_type"] == "markdown"]


def paths():
    "Of each line of the tour's last table: name, chapters, time."
    text = "\n".join(markdown("010_in_ten_minutes"))
    line = r"^\| \*\*(\w+)\*\*.*? \| (.*) \| (.*?) \|$"
    for name, where, time in re.findall(line, text, re.M):
        yield name, re.findall(r"\(([\w.]+)\.ipynb\)", where), time


def test_the_first_reading_stops_at_marks_that_lead_on():
    "An hour with the formulas, which are not counted."
    _, stops, _ = next(paths())
    mark = "> **First reading: stop here.** Next: "
    count, then = 0, []
    for name in stops:
        before, _, after = "\n\n".join(markdown(name)).partition(mark)
        count += reading.words(markup.blocks(before))
        then += re.findall(r"^\[[^]]+\]\(([\w.]+)\.ipynb\)", after)
    assert then == stops[1:] and stops[-1] == "596_does_it_help"
    assert 3000 < count <= 4500, count


def test_paths_of_the_tour_take_the_time_they_say():
    """At 200 words a minute, formulas and figures left out: more than a third
    of the time named, and not much more than it.
    """
    minutes = {"an hour": 60, "half an hour": 30, "a quarter of an hour": 15}
    (first, *_), *others = paths()
    assert [first, *(name for name, *_ in others)] == [
        *("learn", "use", "check", "measure")
    ]
    for name, linked, time in others:
        read = sum(reading.row(Chapter(c, ROOT))["words"] for c in linked) / 200
        assert minutes[time] / 3 < read < 1.2 * minutes[time], (name, read)
    # the tour itself: ten minutes
    assert (
        5 < reading.row(Chapter("010_in_ten_minutes", ROOT))["words"] / 200 < 10
    )
    # and the pages beside it: five
    short = [c for c in chapters() if c.name.endswith("_in_five_minutes")]
    assert len(short) == 3
    for c in short:
        assert 2 < reading.row(c)["words"] / 200 < 5, c.name
