"""The markdown of a chapter, read once: what is written in the dialect of
nbdev and Quarto, as pieces.

`parse` cuts a cell into blocks: text, headings, displayed equations, code, and
divisions (`::: {…}`), which hold blocks but no divisions. A text and a heading
hold what stands in a line: words, literals (code, formulas, what is escaped),
citations, references and links. Lines are kept, so a writer that puts a newline
between blocks gives the cell back; only a displayed equation is set apart by
empty lines, which CommonMark wants.

`tools/dialect.py` writes the pieces for the book, `tools/plain.py` for
notebooks that leave it, `tools/export.py` for the README. The cells stay in
this dialect, and not in MyST, because nbdev exports it and `_quarto.yml`, which
the project keeps, is its configuration.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

THEOREMS = {
    "thm": "theorem",
    "lem": "lemma",
    "prp": "proposition",
    "cor": "corollary",
    "def": "definition",
    "cnj": "conjecture",
    "exm": "example",
}
NUMBERED = ("eq", "fig", "tbl", "exr", *THEOREMS)
KINDS = (*NUMBERED, "sec")  # what a reference leads to


# ---- what stands in a line --------------------------------------------------


@dataclass(frozen=True)
class Literal:
    "Code, a formula or an escaped character, with its marks: never translated."

    text: str


@dataclass(frozen=True)
class Citation:
    """Keys, each with a remark such as "p. 3" or ""; whether the authors' names
    are a part of the sentence.
    """

    entries: tuple[tuple[str, str], ...]
    named: bool = False


@dataclass(frozen=True)
class Reference:
    "To what has a label, anywhere in the book."

    label: str

    @property
    def kind(self) -> str:
        return self.label.split("-")[0]


@dataclass(frozen=True)
class Link:
    words: "Inline"
    target: str


Inline = tuple[str | Literal | Citation | Reference | Link, ...]


# ---- blocks -----------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    "Lines of paragraphs, lists, tables, with the empty ones between."

    inline: Inline


@dataclass(frozen=True)
class Heading:
    level: int
    inline: Inline
    label: str = ""


@dataclass(frozen=True)
class Equation:
    tex: str
    label: str = ""


@dataclass(frozen=True)
class Code:
    "Between fences, which are kept."

    text: str


@dataclass(frozen=True)
class Division:
    """`::: {#thm-x}`, `::: {.proof}` or `::: {.solution}` to `:::`; `kind` is
    that of its label (thm, exr, …), proof or solution.
    """

    kind: str
    label: str
    pieces: tuple["Block", ...]


Block = Text | Heading | Equation | Code | Division


# ---- reading ----------------------------------------------------------------

LITERAL = (
    r"\\[^\w\s]|(?P<ticks>(?<!`)`+)(?!`)(?:(?!\n[ \t]*\n).)+?(?<!`)"
    r"(?P=ticks)(?!`)"
)
FORMULA = r"\$(?![\s$])(?:\\.|[^\\$\n])*?(?<![\s\\])\$(?!\d)"
DISPLAYED = re.compile(
    rf"(?P<literal>{LITERAL})|[ \t]*\n?[ \t]*\$\$(?P<tex>.+?)\$\$"
    r"(?:[ \t]*\{#(?P<label>[\w-]+)\})?[ \t]*\n?|(?P<formula>" + FORMULA + ")",
    re.S,
)
LABEL = rf"(?:{'|'.join(KINDS)})-[\w-]*\w"
INLINE = re.compile(
    rf"(?P<literal>{LITERAL}|{FORMULA})|"
    r"\[(?P<bracket>[^\[\]]*@[^\[\]]*)\](?!\()|"
    r"(?<!!)\[(?P<words>[^\]]+)\]\((?P<target>[^)\s]+)\)|"
    rf"(?<![\w@./])@(?:(?P<label>{LABEL})|(?P<key>[a-z]+\d{{4}}[a-z]?)\b)",
    re.S,
)
ENTRY = re.compile(rf"\s*-?@(?!{LABEL})([\w:-]+)(?:,\s*(.*?))?\s*", re.S)
HEADING = re.compile(r"(#{1,6}) (.*?)(?:[ \t]*\{#(sec-[\w-]+)\}[ \t]*)?")
FENCED = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[^`\n]*$.*?"
    r"(?:^[ \t]*(?P=fence)[`~]*[ \t]*$|\Z)",
    re.M | re.S,
)
OPENING = re.compile(
    r":{3,}\s*\{(?:#(?P<label>(?P<named>%s)-[\w-]+)|\.(?P<kind>proof|solution))\}"
    r"\s*" % "|".join(("exr", *THEOREMS))
)
CLOSING = re.compile(r":{3,}\s*")
SET_APART = "\ue000"  # where a displayed equation was


def inline(source: str) -> Inline:
    "The pieces of a line or a paragraph."
    out, start, at = [], 0, 0
    while found := INLINE.search(source, at):
        at = found.end()
        if found["literal"]:
            piece = Literal(found[0])
        elif found["bracket"]:
            entries = [ENTRY.fullmatch(e) for e in found["bracket"].split(";")]
            if not all(entries):  # brackets, with something to read in them
                at = found.start() + 1
                continue
            piece = Citation(tuple((e[1], e[2] or "") for e in entries))
        elif found["words"]:
            piece = Link(inline(found["words"]), found["target"])
        elif found["label"]:
            piece = Reference(found["label"])
        else:
            piece = Citation(((found["key"], ""),), named=True)
        out += [source[start : found.start()]] * (start < found.start()) + [
            piece
        ]
        start = at
    return tuple(out + [source[start:]] * (start < len(source)))


def bare_equations(found: Inline) -> Inline:
    """The pieces without parentheses around a reference to an equation, whose
    number has its own.
    """
    out = list(found)
    for i, (before, piece, after) in enumerate(
        zip(found, found[1:], found[2:])
    ):
        if (
            isinstance(piece, Reference)
            and piece.kind == "eq"
            and isinstance(before, str)
            and before.endswith("(")
            and isinstance(after, str)
            and after.startswith(")")
        ):
            out[i], out[i + 2] = out[i][:-1], out[i + 2][1:]
    return tuple(out)


def equations_apart(source: str, found: list[Equation]) -> str:
    """The source with each displayed equation, which is added to `found`, as
    one mark between empty lines.
    """

    def apart(match):
        if match["tex"] is None:
            return match[0]
        found.append(Equation(match["tex"].strip(), match["label"] or ""))
        return f"\n\n{SET_APART}\n\n"

    return re.sub(r"\n{3,}", "\n\n", DISPLAYED.sub(apart, source))


def parts(source: str) -> Iterator[tuple[bool, str]]:
    "The parts of a cell in their order, and whether each is code."
    at = 0
    for found in FENCED.finditer(source):
        if at < found.start():
            yield False, source[at : found.start() - 1]
        yield True, found[0]
        at = found.end() + 1
    if at <= len(source):
        yield False, source[at:]


@lru_cache(maxsize=None)
def blocks(source: str) -> tuple[Block, ...]:
    "The blocks of a cell."
    found, within, lines = [], [], []
    opened = None  # the line of the division that `within` is of

    def add(block: Block | None = None) -> None:
        into = within if opened else found
        if lines:
            into.append(Text(inline("\n".join(lines))))
            lines.clear()
        if block:
            into.append(block)

    def close() -> None:
        add()
        kind = opened["named"] or opened["kind"]
        found.append(Division(kind, opened["label"] or "", tuple(within)))
        within.clear()

    for code, part in parts(source):
        if code:
            add(Code(part))
            continue
        equations: list[Equation] = []
        for line in equations_apart(part, equations).split("\n"):
            if line == SET_APART:
                add(equations.pop(0))
            elif heading := HEADING.fullmatch(line):
                level, words, label = heading.groups("")
                add(Heading(len(level), inline(words), label))
            elif not opened and (mark := OPENING.fullmatch(line)):
                add()
                opened = mark
            elif opened and CLOSING.fullmatch(line):
                close()
                opened = None
            # a division does not begin with empty lines
            elif line.strip() or lines or within or not opened:
                lines.append(line)
    if opened:
        close()
    else:
        add()
    return tuple(found)


def cells(found: Sequence[dict]) -> Iterator[tuple[dict, tuple[Block, ...]]]:
    "The cells of a notebook, those of markdown with their blocks."
    for cell in found:
        text = cell["cell_type"] == "markdown"
        yield cell, blocks(cell["source"]) if text else ()


def walk(found: Iterable[Block]) -> Iterator[Block]:
    "Every block, those of divisions too, in their order."
    for block in found:
        yield block
        if isinstance(block, Division):
            yield from block.pieces


def labels(found: Iterable[Block]) -> list[str]:
    return [block.label for block in walk(found) if getattr(block, "label", "")]


def spans(found: Iterable[Block]) -> Iterator:
    "What stands in lines, in its order."

    def inner(pieces):
        for piece in pieces:
            yield piece
            if isinstance(piece, Link):
                yield from inner(piece.words)

    for block in walk(found):
        if isinstance(block, (Text, Heading)):
            yield from inner(block.inline)


# ---- writing ----------------------------------------------------------------


class Writer:
    """Gives the source back; a writer overrides what it writes otherwise, a
    method for each kind of piece.
    """

    def write(self, found: Iterable[Block]) -> str:
        return "\n".join(map(self.block, found))

    def block(self, block: Block) -> str:
        return getattr(self, type(block).__name__.lower())(block)

    def inline(self, found: Inline) -> str:
        return "".join(
            p
            if isinstance(p, str)
            else getattr(self, type(p).__name__.lower())(p)
            for p in found
        )

    def text(self, block: Text) -> str:
        return self.inline(block.inline)

    def heading(self, block: Heading) -> str:
        label = f" {{#{block.label}}}" if block.label else ""
        return f"{'#' * block.level} {self.inline(block.inline)}{label}"

    def equation(self, block: Equation) -> str:
        label = f" {{#{block.label}}}" if block.label else ""
        return f"$$\n{block.tex}\n$${label}"

    def code(self, block: Code) -> str:
        return block.text

    def division(self, block: Division) -> str:
        mark = f"#{block.label}" if block.label else f".{block.kind}"
        return f"::: {{{mark}}}\n{self.write(block.pieces)}\n:::"

    def literal(self, piece: Literal) -> str:
        return piece.text

    def citation(self, piece: Citation) -> str:
        entries = "; ".join(
            f"@{key}" + f", {remark}" * bool(remark)
            for key, remark in piece.entries
        )
        return entries if piece.named else f"[{entries}]"

    def reference(self, piece: Reference) -> str:
        return f"@{piece.label}"

    def link(self, piece: Link) -> str:
        return f"[{self.inline(piece.words)}]({piece.target})"
