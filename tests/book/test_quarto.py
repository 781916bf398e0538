"""What `_quarto.yml` promises, as far as it can be tested without Quarto: its
reader is pandoc's, and pandoc finds in each chapter what we find.

Compared are, in the order of the text: headings with their labels, displayed
equations with theirs, divisions with label, classes and title, citations and
references, formulas and code in a line, links, and fenced code.
"""

import json
import re
import subprocess

import pytest

pytestmark = pytest.mark.book
markup = pytest.importorskip(
    "tools.markup", reason="the book's tools are not installed"
)
pypandoc = pytest.importorskip("pypandoc", reason="pandoc is not installed")
from tools.chapters import chapters  # noqa: E402


def letters(text):
    "Both readers agree on these; on marks, quotes and spaces they need not."
    return re.sub(r"[\W_]", "", text)


def spaced(text):
    return " ".join(text.split())


# ---- what we find -----------------------------------------------------------


def found_in_line(inline):
    for piece in inline:
        if isinstance(piece, markup.Literal):
            if piece.text[0] != "\\":
                kind = "formula" if piece.text[0] == "$" else "code"
                yield kind, spaced(piece.text.strip(piece.text[0]))
        elif isinstance(piece, markup.Citation):
            yield (
                "cites",
                tuple((key, letters(remark)) for key, remark in piece.entries),
            )
        elif isinstance(piece, markup.Reference):
            yield "cites", ((piece.label, ""),)
        elif isinstance(piece, markup.Link):
            yield "link", piece.target
            yield from found_in_line(piece.words)


def found(blocks):
    for block in blocks:
        if isinstance(block, markup.Text):
            yield from found_in_line(block.inline)
        elif isinstance(block, markup.Heading):
            words = markup.Writer().inline(block.inline)
            yield "heading", block.level, letters(words), block.label
            yield from found_in_line(block.inline)
        elif isinstance(block, markup.Equation):
            yield "equation", spaced(block.tex), block.label
        elif isinstance(block, markup.Code):
            yield "block", block.text.split("\n", 1)[1].rpartition("\n")[0]
        else:
            yield (
                "division",
                block.label,
                tuple(re.findall(r"\.([\w-]+)", block.attributes)),
            )
            title = (block.title,) * bool(block.title)
            yield from found(title + block.pieces)
            yield "end", block.label


# ---- what pandoc finds ------------------------------------------------------


def words(tree):
    "The text of a part of pandoc's tree."
    if isinstance(tree, list):
        return "".join(map(words, tree))
    if not isinstance(tree, dict):
        return ""
    if tree["t"] in ("Str", "Code", "Math"):
        return tree["c"] if tree["t"] == "Str" else tree["c"][1]
    if tree["t"] == "Cite":  # as it is written
        return words(tree["c"][1])
    return words(tree.get("c"))


def read_by_pandoc(tree):
    """The same from pandoc's tree.

    The label of an equation is a word behind it, which a filter of Quarto takes
    for one.
    """
    if isinstance(tree, list):
        for i, part in enumerate(tree):
            if (
                isinstance(part, dict)
                and part.get("t") == "Math"
                and part["c"][0]["t"] == "DisplayMath"
            ):
                label = re.match(r"\{#([\w-]+)\}", words(tree[i + 1 : i + 3]))
                yield (
                    "equation",
                    spaced(part["c"][1]),
                    label[1] if label else "",
                )
            else:
                yield from read_by_pandoc(part)
        return
    if not isinstance(tree, dict):
        return
    kind, content = tree.get("t"), tree.get("c")
    if kind == "Header":
        level, (label, *_), inside = content
        yield (
            "heading",
            level,
            letters(words(inside)),
            label if label.startswith("sec-") else "",
        )
    elif kind == "Div":
        (label, classes, _), inside = content
        yield "division", label, tuple(classes)
        yield from read_by_pandoc(inside)
        yield "end", label
        return
    elif kind == "CodeBlock":
        if "cell" not in content[0][1]:
            yield "block", content[1]
    elif kind == "Math":
        yield "formula", spaced(content[1])
    elif kind == "Code":
        yield "code", spaced(content[1])
    elif kind == "Cite":
        yield (
            "cites",
            tuple(
                (one["citationId"], letters(words(one["citationSuffix"])))
                for one in content[0]
            ),
        )
        return
    elif kind == "Link" and "uri" not in content[0][1]:
        yield "link", content[2][0]
    yield from read_by_pandoc(list(tree.values()) if kind is None else content)


CHAPTER = "The chapter is "


def pandoc(sources):
    "Name → blocks of pandoc's tree; it is called once for all."
    text = "\n\n".join(
        f"{CHAPTER}`{name}`\n\n{source}" for name, source in sources.items()
    )
    done = subprocess.run(
        [pypandoc.get_pandoc_path(), "--from", "markdown", "--to", "json"],
        input=text.encode(),
        capture_output=True,
        check=True,
    )
    trees = {}
    for block in json.loads(done.stdout)["blocks"]:
        if (
            block["t"] == "Para"
            and len(block["c"]) == 7
            and words(block["c"]).startswith("Thechapteris")
        ):
            tree = trees[block["c"][6]["c"][1]] = []
        else:
            tree.append(block)
    return trees


def source_of(cells):
    "A notebook as Quarto reads it: its markdown, with the code in its place."
    return "\n\n".join(
        source if kind == "markdown" else f"`````` {{.cell}}\n{source}\n``````"
        for kind, source in cells
    )


@pytest.fixture(scope="module")
def book():
    "Name → (what we find, what pandoc finds)."
    ours, sources = {}, {}
    for c in chapters():
        cells = c.cells()
        sources[c.name] = source_of(
            [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
        )
        ours[c.name] = [
            event for _, made in markup.cells(cells) for event in found(made)
        ]
    trees = pandoc(sources)
    assert list(trees) == list(ours)
    return {
        name: (ours[name], list(read_by_pandoc(trees[name]))) for name in ours
    }


@pytest.mark.parametrize("name", [c.name for c in chapters()])
def test_pandoc_reads_what_we_read(book, name):
    ours, theirs = book[name]
    for i, (one, other) in enumerate(zip([*ours, None], [*theirs, None])):
        assert one == other, (
            f"piece {i}: we read {one}, pandoc {other}; "
            f"before it {ours[max(i - 3, 0) : i]}"
        )


def test_much_is_compared(book):
    counts = {}
    for ours, _ in book.values():
        for kind, *_ in ours:
            counts[kind] = counts.get(kind, 0) + 1
    least = {
        "heading": 600,
        "equation": 200,
        "division": 300,
        "cites": 300,
        "formula": 2000,
        "code": 600,
        "link": 200,
        "block": 4,
    }
    assert [kind for kind in least if counts[kind] < least[kind]] == [], counts


@pytest.mark.parametrize(
    "source",
    [
        "$$ x $$ {#eq-y}",
        "## A {#sec-b}",
        "::: {#thm-b}\nx\n:::",
        "[@b]",
        "::: {.proof}\nx\n\n$$ y $$\n:::",
        "see @eq-b",
        "$y$ and `x`",
        "[a](c)",
        "```\ny\n```",
        "::: {.callout-note}\n# B\nx\n:::",
    ],
)
def test_a_difference_is_seen(source):
    "Each kind of piece, against the same with another name in it."
    other = source.translate(str.maketrans("bycB", "zzdZ"))
    read = [list(found(markup.blocks(text))) for text in (source, other)]
    tree = list(read_by_pandoc(pandoc({"a": source})["a"]))
    assert read[0] == tree != read[1]
