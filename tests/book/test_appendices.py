"""The appendices: ledger, coverage, errata, API; the labels and links that the
dialect adds for them.
"""

import ast
import csv
import html
import json
import re

import pytest

from normalnorm.claims import ledger
from tests.book import toy
from tools import api, dialect, folding, markup, papers
from tools.chapters import ROOT, chapter, chapters
from tools.files import load
from tools.run import ensure

PREFIXES = ("nn-", "rev-", "pn-", "bnu-", "uf-")
LINE = (
    '<p class="claim claim-holds"><code>{}</code> <span '
    'class="claim-verdict">holds</span></p>'
)


@pytest.fixture(scope="module")
def coverage():
    with (ROOT / "nbs" / "coverage.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        return list(csv.DictReader(file))


# ---- coverage ---------------------------------------------------------------


def test_every_statement_has_a_claim_or_a_reason(coverage):
    ids = [r["id"] for r in coverage]
    assert len(ids) == len(set(ids))
    for r in coverage:
        assert (
            bool(r["claim"]) != bool(r["reason"])
            and bool(r["sentence"]) == bool(r["reason"])
            and r["section"]
            and r["paper"] in papers.PAPERS
            and r["claim"] in ("", r["id"])
        ), r["id"]


@pytest.mark.parametrize("name", papers.PAPERS)
def test_a_source_has_a_page_with_each_of_its_statements(name, coverage):
    """Section by section, each section once; what is not right has its
    correction, and each claim the way to its check.
    """
    mine = [r for r in coverage if r["paper"] == name]
    sections = [*dict.fromkeys(r["section"] for r in mine)]
    lines = [*papers.lines(name)]
    heads = [line for line in lines if isinstance(line, str)]
    assert heads == [html.escape(section) for section in sections]
    rows = [line for line in lines if not isinstance(line, str)]
    claims, corrections = {c.id: c for c in ledger()}, papers.kept("errata.csv")
    assert len(rows) == len(mine)
    for row, (statement, _, where, _) in zip(mine, rows):
        if claim := claims.get(row["claim"]):
            assert html.escape(claim.statement) in statement
            assert f"#claim-here-{claim.id}" in where
        assert ("<em>Right:</em>" in statement) == (row["id"] in corrections)
    source = "".join(chapter(papers.PAPERS[name][0]).code_cells())
    assert f'papers.table("{name}")' in source


def test_the_ledger_and_the_coverage_table_agree(coverage):
    ours = {c.id for c in ledger() if c.id.startswith(PREFIXES)}
    marked = {r["claim"] for r in coverage if r["claim"]}
    assert marked == ours, (
        "nbs/coverage.csv must name the claim, not a reason, for "
        f"{sorted(ours - marked)}; the ledger lacks {sorted(marked - ours)}"
    )


def test_the_table_holds_the_whole_catalogue(coverage):
    """Where the catalogue lies beside the checkout: the table has its
    identifiers; beyond them only claims.
    """
    catalogue = ROOT.parent / "shared" / "claims.md"
    if not catalogue.exists():
        pytest.skip(
            "the catalogue, shared/claims.md, is not beside this checkout"
        )
    known = set(
        re.findall(
            r"^\| ((?:nn|rev|pn|bnu|uf)-[\w-]+) \|",
            catalogue.read_text(encoding="utf-8"),
            re.M,
        )
    )
    ids = {r["id"] for r in coverage}
    assert known - ids == set()
    assert [
        r["id"] for r in coverage if r["id"] not in known and not r["claim"]
    ] == []


# ---- verdict lines and their links ------------------------------------------


def test_verdict_lines_get_an_anchor_and_a_link():
    output = {
        "data": {
            "text/html": [
                LINE.format("a-b"),
                LINE.format("demo"),
                LINE.format("a-b"),
            ]
        }
    }
    dialect.link_claims(output, {"a-b"})
    text = output["data"]["text/html"]
    assert (
        text.count('id="claim-here-a-b"') == 1
        and 'href="910_what_was_checked.html#claim-a-b"' in text
    )
    assert LINE.format("demo") in text  # not in the ledger: no dead link


def test_claims_are_known_to_the_dialect_as_to_the_ledger():
    found = sorted((c["id"], c["chapter"]) for c in api.claims(ROOT))
    assert found == sorted((c.id, c.chapter) for c in ledger())


def test_the_ledger_page_has_each_claim_once_and_links_to_its_proof():
    run = ensure(chapter("910_what_was_checked"))
    text = run.notebook.read_text(encoding="utf-8").replace('\\"', '"')
    found = re.findall(r'<td[^>]*><a id="claim-([^"]+)" href="([^"]+)"', text)
    assert sorted(found) == sorted(
        (c.id, f"{c.chapter}.html#claim-here-{c.id}") for c in ledger()
    )


def test_links_to_chapters_show_titles(tmp_path):
    (tmp_path / "010_a.b.ipynb").write_text(
        json.dumps({"cells": [{"source": ["# A & B\n", "\n", "> Lead."]}]})
    )
    output = {
        "data": {
            "text/html": '<a href="010_a.b.html">010_a.b</a> <a '
            'href="020_c.html">020_c</a> <a '
            'href="010_a.b.html">here</a>'
        }
    }
    read = dialect.chapter_titles(output, tmp_path)
    assert (
        output["data"]["text/html"]
        == '<a href="010_a.b.html">A &amp; B</a> <a '
        'href="020_c.html">020_c</a> <a href="010_a.b.html">here</a>'
    )
    assert read == {tmp_path / "010_a.b.ipynb", tmp_path / "020_c.ipynb"}


# ---- notation ---------------------------------------------------------------


def notation_rows():
    for cell in chapter("905_notation").cells():
        for line in (
            cell["source"].split("\n")
            if cell["cell_type"] == "markdown"
            else ()
        ):
            if line.startswith("| ") and not line.startswith("| symbol"):
                yield [part.strip() for part in line.strip("|").split(" | ")]


@pytest.fixture(scope="module")
def sources():
    return {
        c.name: "\n".join(cell["source"] for cell in c.cells())
        for c in chapters()
        if c.name != "905_notation"
    }


def test_each_symbol_leads_to_an_existing_place_that_uses_it(sources):
    rows = list(notation_rows())
    assert len(rows) > 40
    for symbol, meaning, theirs, where in rows:
        label = re.fullmatch(r"@((?:eq|sec)-[\w-]+)", where)
        assert symbol and meaning and theirs and label, where
        home = [
            name
            for name, text in sources.items()
            if "{#" + label[1] + "}" in text
        ]
        assert len(home) == 1, f"{where} is defined in {home}"
        for tex in re.findall(r"\$(.+?)\$", symbol):
            for command in re.findall(
                r"\\[A-Za-z]+", re.split(r"=|\\le", tex)[0]
            ):
                assert command == r"\dots" or command in sources[home[0]], (
                    f"{symbol}: {command} is not in {home[0]}"
                )


def test_a_symbol_has_one_meaning_in_a_part(sources):
    """Of the rows of one part that define the same letter, at most one does not
    say where its meaning holds.
    """
    meanings = {}
    for symbol, meaning, _, where in notation_rows():
        part = next(
            name[0]
            for name, text in sources.items()
            if "{#" + where[1:] + "}" in text
        )
        for tex in re.findall(r"\$(.+?)\$", symbol):
            for defined in re.split(r"[,;]\\? ", tex):
                letter = re.split(r"=|\\le|:", defined)[0].strip()
                if re.fullmatch(r"\\?[A-Za-z]+", letter) and not re.search(
                    r"\bin (the chapter|\[)|\bthere: |"
                    r"\belsewhere\b|above\)",
                    meaning,
                ):
                    meanings.setdefault((part, letter), []).append(meaning)
    assert len(meanings) > 60
    twice = {
        letter: found for letter, found in meanings.items() if len(found) > 1
    }
    assert twice == {}


def test_the_page_of_symbols_is_complete():
    """The letters of the design's list, and whatever the first chapter's
    conventions use.
    """
    text = " ".join(row[0] for row in notation_rows())
    letters = (
        r"\lambda \hat\lambda \psi \eta \ell \xi \alpha \epsilon \mu \sigma^2"
        r" R^2 B C H W T N \gamma \beta"
    )
    assert [tex for tex in letters.split() if tex not in text] == []


SYMBOL = re.compile(
    r"(?:\\(?:hat|tilde|d?dot)\s?\{?)?\\(?:mathcal\{?\s?\w|(?:var)?(?i:alpha"
    r"|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|rho"
    r"|sigma|tau|upsilon|phi|chi|psi|omega)(?![A-Za-z]))"
)
# indices and arguments, and what a definition goes on with
DEFINES = re.compile(
    r"(?:[\s'}]|\\,|[_^](?:\{[^{}]*\}|\\?\w+|.)|\((?:[^()]|\([^()]*\))*\))*"
    r"(?P<how>$|[=<>:]|\\(?:le|ge|ne|in|to|sim|approx)\b)"
)


def plain(symbol: str) -> str:
    return re.sub(r"[\s{}]", "", symbol)


def defined(tex: str, displayed: bool = False):
    "What the parts of a formula begin with, as the left side of a relation."
    for part in re.split(
        r"[,;](?![^()]*\))|\\q?quad|\\\\(?:\[\w+\])?|:=",
        re.sub(r"&|\\(?:begin|end)\{\w+\}", "", tex),
    ):
        part = re.sub(r"^(?:\s|\\[,;! ])+", "", part)
        if found := SYMBOL.match(part):
            how = DEFINES.match(part, found.end())
            if how and (how["how"] or not displayed):
                yield plain(found[0])


def test_letters_of_equations_are_defined_before():
    """A Greek or calligraphic letter of a displayed equation begins a formula
    of the same cell or of one before, or stands in a row of the table whose
    place is not behind; a row that names its chapter holds there.
    """
    rows, missing, seen = {}, [], 0
    place = {
        label: i
        for i, c in enumerate(chapters())
        for cell in c.cells()
        for label in re.findall(r"\{#([\w-]+)", cell["source"])
    }
    for symbol, meaning, _, where in notation_rows():
        here, only = (
            place[where[1:]],
            re.search(r"\bin (?:\[|part)|\bthere: ", meaning),
        )
        for found in SYMBOL.findall(symbol):
            rows.setdefault(plain(found), set()).update(
                {here} if only else range(here, len(chapters()))
            )
    for i, c in enumerate(chapters()):
        known = {r"\pi"} | {s for s, where in rows.items() if i in where}
        for _, found in markup.cells(c.cells()):
            equations = [
                b for b in markup.walk(found) if isinstance(b, markup.Equation)
            ]
            for e in equations:
                known.update(defined(e.tex, True))
            for span in markup.spans(found):
                if isinstance(span, markup.Literal) and span.text[0] == "$":
                    known.update(defined(span.text.strip("$")))
            for e in equations:
                used = {plain(s) for s in SYMBOL.findall(e.tex)}
                seen += len(used)
                missing += [(c.name, e.label, s) for s in used - known]
    assert seen > 500 and missing == []


# ---- the API ----------------------------------------------------------------

SOURCE = '''"""A module."""

# AUTOGENERATED! DO NOT EDIT! File to edit: ../nbs/010_small.ipynb.

def double(x: float, /, by: int = 2, *rest, key: str = "a", **more) -> float:
    """Twice `x`, as in x_i * 2 < 3; see `Double`.

    Example:

        >>> double(2)

        4
    """

class Double(Base):
    "A class."
    def __init__(self, n: int = 1): ...
    def run(self, *, k: int) -> None:
        "Runs."
    def _hidden(self):
        "No."

def _private(): ...
'''


@pytest.fixture
def small(tmp_path):
    toy.checkout(
        tmp_path,
        {
            "index": [],
            "010_small": [
                ("markdown", "# Small"),
                ("code", "#| default_exp small"),
                ("code", "#| export\ndef double(): ..."),
                ("code", "#| export\n#| hide\nclass Double: ..."),
                ("code", "double()"),
            ],
        },
    )
    (tmp_path / "normalnorm" / "small.py").write_text(SOURCE)
    return tmp_path


def test_signatures_are_those_of_the_source(small):
    double, cls = api.entries(small)["normalnorm.small"]
    assert (
        double.signature == "double(x: float, /, by: int = 2, *rest, key: "
        "str = 'a', **more) -> float"
    )
    assert cls.signature == "Double(n: int = 1)" and cls.methods == (
        ("run(*, k: int) -> None", "Runs."),
    )
    assert (
        double.target() == "api-normalnorm.small.double"
        and cls.target() == "api-class-normalnorm.small.double"
    )


def test_fields_that_a_constructor_does_not_take_are_left_out():
    code = "class Kept:\n    n: int = 1\n    known: dict = field(init=False)\n"
    (node,) = ast.parse(code).body
    found = api.class_signature(node), folding.signature(node)
    assert found == ("Kept(n: int = 1)", "Kept(n)")


def test_the_api_page(small):
    page = api.page(small)
    assert "```python\n>>> double(2)\n\n4\n```" in page  # one example, not two
    assert (
        r"x\_i \* 2 \< 3" in page
        and "[`Double`](#api-class-normalnorm.small.double)" in page
    )
    assert (
        "{doc}`010_small`" in page
        and "_private" not in page
        and "_hidden" not in page
    )
    # the class's cell is hidden
    assert (
        page.count("where it is derived") == 1
        and "(#code-normalnorm.small.double)" in page
    )


def test_exported_cells_are_labelled(small):
    notebook = load(small / "nbs" / "010_small.ipynb")
    cells = dialect.translate_notebook(
        notebook, None, set(), api.entries(small)
    )["cells"]
    labels = [i for i, c in enumerate(cells) if "module-label" in c["source"]]
    assert labels == [2] and cells[3]["source"] == "def double(): ..."
    assert (
        cells[2]["source"].startswith("(code-normalnorm.small.double)=\n")
        and "[`normalnorm.small`](#api-module-normalnorm.small)"
        in cells[2]["source"]
    )


def test_every_public_name_of_the_package_is_on_the_page():
    page, entries = api.page(ROOT), api.entries(ROOT)
    assert page.count("Chapter: {doc}") == len(entries)
    for module, listed in entries.items():
        assert f"({api.module_target(module)})=" in page
        for entry in listed:
            assert page.count(f"({entry.target()})=") == 1, entry
