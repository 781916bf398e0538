"""The dialect is read once: what each piece is, and what is none."""

import re

import pytest

from tools import markup
from tools.chapters import chapters
from tools.markup import (
    Citation,
    Code,
    Division,
    Equation,
    Heading,
    Link,
    Literal,
    Reference,
    Text,
)


def spans(source):
    "What stands in the lines of a source, without its words."
    return [
        s for s in markup.spans(markup.blocks(source)) if not isinstance(s, str)
    ]


def shape(found):
    "Divisions and what they hold, as nested lists of names."
    return [
        [block.kind, *shape(block.pieces)]
        if isinstance(block, Division)
        else type(block).__name__
        for block in found
        if not (
            isinstance(block, Text)
            and not "".join(map(str, block.inline)).strip()
        )
    ]


# ---- blocks -----------------------------------------------------------------


@pytest.mark.parametrize(
    "source, tex, label",
    [
        ("$$ x = 1. $$", "x = 1.", ""),
        ("$$\nx\n$$", "x", ""),
        ("$$ x $$ {#eq-a-b}", "x", "eq-a-b"),
        ("$$ x $${#eq-a}", "x", "eq-a"),
        ("$$\na \\\\\n b\n$$\t{#eq-a}", "a \\\\\n b", "eq-a"),
    ],
)
def test_an_equation_and_its_label(source, tex, label):
    for around in ("{}", "before\n{}\nafter", "before {} after"):
        found = [
            b
            for b in markup.blocks(around.format(source))
            if isinstance(b, Equation)
        ]
        assert found == [Equation(tex, label)]


LONGER = "````\n```\n::: {.proof}\n```\n$$ x $$\n````"


@pytest.mark.parametrize(
    "source, found",
    [
        pytest.param(
            "a\n$$ x $$ {#eq-a}\nb",
            (Text(("a\n",)), Equation("x", "eq-a"), Text(("\nb",))),
            id="an equation is set apart",
        ),
        pytest.param(
            LONGER,
            (Code(LONGER),),
            id="code ends at a fence as long as its own",
        ),
        pytest.param(
            "```\na\n``` b\n```\n::: {.proof}\nc\n:::",
            (
                Code("```\na\n``` b\n```"),
                Division("proof", "", (Text(("c",)),)),
            ),
            id="a fence with words behind it ends no code",
        ),
        pytest.param(
            "# A\n\n### B $x$ {#sec-b}\n#c\n",
            (
                Heading(1, ("A",)),
                Text(()),
                Heading(3, ("B ", Literal("$x$")), "sec-b"),
                Text(("#c\n",)),
            ),
            id="headings",
        ),
        pytest.param(
            "a\n:::\nb",
            (Text(("a\n:::\nb",)),),
            id="colons that close nothing are text",
        ),
    ],
)
def test_blocks(source, found):
    assert markup.blocks(source) == found


@pytest.mark.parametrize(
    "source, found",
    [
        pytest.param(
            "```x``` is code\n$$ y $$",
            ["Text", "Equation"],
            id="a line of inline code opens no fence",
        ),
        pytest.param(
            "::: {.solution}\n```\n:::\n```\n$$ x $$\n::::\nAfter.",
            [["solution", "Code", "Equation"], "Text"],
            id="a division ends at colons that are no code",
        ),
        pytest.param(
            "::: {.proof}\nnever closed",
            [["proof", "Text"]],
            id="one may never be closed",
        ),
    ],
)
def test_what_begins_and_ends(source, found):
    assert shape(markup.blocks(source)) == found


def test_a_written_equation_is_set_apart():
    assert markup.Writer().write(markup.blocks("a $$ x $$ b")) == (
        "a\n\n$$\nx\n$$\n\nb"
    )


def test_two_equations_keep_their_order():
    found = markup.blocks(
        "$$ a $$ {#eq-a}\n$$ b $$\n::: {.proof}\n$$ c $$\n:::\n$$ d $$"
    )
    assert [b.tex for b in markup.walk(found) if isinstance(b, Equation)] == [
        *"abcd"
    ]
    assert markup.labels(found) == ["eq-a"]


@pytest.mark.parametrize(
    "source",
    ["`$$ x $$`", "``a ` $$ x $$``", r"\$\$ x \$\$", "```\n$$ x $$\n```"],
)
def test_what_is_no_equation(source):
    assert not any(isinstance(b, Equation) for b in markup.blocks(source))


@pytest.mark.parametrize("fence", ["```", "~~~", "````", "```python", "  ```"])
def test_nothing_is_read_within_code(fence):
    inside = "$$ x $$ {#eq-x}\n::: {#thm-x}\n# Title {#sec-x}\n@eq-x [@a; @b]"
    closing = re.match(r" *[`~]+", fence)[0]
    source = f"{fence}\n{inside}\n{closing}"
    assert markup.blocks(f"a\n{source}\nb") == (
        Text(("a",)),
        Code(source),
        Text(("b",)),
    )


# ---- divisions --------------------------------------------------------------


@pytest.mark.parametrize(
    "attributes, kind, label",
    [
        ("#thm-a", "thm", "thm-a"),
        ("#exr-a-b", "exr", "exr-a-b"),
        (".proof", "proof", ""),
        (".solution", "solution", ""),
    ],
)
def test_the_kinds_of_divisions(attributes, kind, label):
    found = markup.blocks(f"a\n::: {{{attributes}}}\n\nx\n:::\nb")
    inside = Division(kind, label, (Text(("x",)),))
    assert found == (Text(("a",)), inside, Text(("b",)))


@pytest.mark.parametrize(
    "source", ["::: {.proof}\n::: {.solution}\nx", "::: {.note}\nx"]
)
def test_no_division_in_another_and_no_other_than_those_above(source):
    assert ":::" in str(markup.blocks(source)[0])


# ---- lines ------------------------------------------------------------------


@pytest.mark.parametrize(
    "source, found",
    [
        *(
            (f"so {source}.", [Citation(tuple(entries))])
            for source, entries in (
                ("[@yeo2000]", [("yeo2000", "")]),
                ("[@yeo2000, p. 3]", [("yeo2000", "p. 3")]),
                ("[@a; @b]", [("a", ""), ("b", "")]),
                (
                    "[@a, §6; @b-c; @d, Eqs. 1, 2]",
                    [("a", "§6"), ("b-c", ""), ("d", "Eqs. 1, 2")],
                ),
                ("[-@yeo2000]", [("yeo2000", "")]),
            )
        ),
        ("@yeo2000 say", [Citation((("yeo2000", ""),), named=True)]),
        ("@eq-a, @fig-b-c.", [Reference("eq-a"), Reference("fig-b-c")]),
        ("[see @thm-a]", [Reference("thm-a")]),
        ("[@eq-a]", [Reference("eq-a")]),
        ("[see @yeo2000]", [Citation((("yeo2000", ""),), named=True)]),
        ("me@yeo2000.org", []),
        ("@someone", []),
        (r"\@yeo2000", [Literal(r"\@")]),
        (r"[\@yeo2000]", [Literal(r"\@")]),
        ("`@eq-a`", [Literal("`@eq-a`")]),
        ("``a ` @eq-a``", [Literal("``a ` @eq-a``")]),
        ("$a@b$ and $\\$@eq-a$", [Literal("$a@b$"), Literal("$\\$@eq-a$")]),
        ("costs 5$ and @eq-a is 6$", [Reference("eq-a")]),
        (r"\$5 @eq-a \$6", [Literal(r"\$"), Reference("eq-a"), Literal(r"\$")]),
        ("$(@eq-a)$6", [Reference("eq-a")]),
        ("`open @eq-a\n\nclosed`", [Reference("eq-a")]),
        (
            "[a `b` @eq-c](d.ipynb#e) ![no](f.png) [g]",
            [
                Link(
                    ("a ", Literal("`b`"), " ", Reference("eq-c")), "d.ipynb#e"
                ),
                Literal("`b`"),
                Reference("eq-c"),
            ],
        ),
        # headings and divisions have them, too
        (
            "## On @thm-a\n::: {#thm-a}\nof @yeo2000\nx @eq-b\n:::",
            [
                Reference("thm-a"),
                Citation((("yeo2000", ""),), named=True),
                Reference("eq-b"),
            ],
        ),
    ],
)
def test_citations_references_links_and_what_is_none(source, found):
    assert spans(source) == found


# ---- writing ----------------------------------------------------------------


def test_nothing_of_a_chapter_is_lost():
    """The pieces, written as they were read, are the cell again, but for the
    room around displayed equations; every division is known.
    """
    read = 0
    for c in chapters():
        for cell, found in markup.cells(c.cells()):
            if cell["cell_type"] == "markdown":
                source = cell["source"]
                made = markup.Writer().write(found)
                assert (
                    made.split()
                    == re.sub(
                        r"\$\$(.+?)\$\$", r"$$ \1 $$", source, flags=re.S
                    ).split()
                ), f"{c.name}: {source[:60]}"
                assert markup.blocks(made) == found
                assert ":::" not in str(list(markup.spans(found)))
                read += 1
    assert read > 500


def test_an_unknown_piece_is_refused():
    class Unknown:
        pass

    with pytest.raises(AttributeError, match="unknown"):
        markup.Writer().write([Unknown()])
