"""The markdown of a chapter, read once: what is written in the dialect of
nbdev and Quarto, as pieces.

`parse` cuts a cell into blocks: text, headings, displayed equations, code, and
divisions (`::: {…}`), which hold blocks again. A text, a heading and a title
hold what stands in a line: words, literals (code, formulas, what is escaped),
citations, references and links. Lines are kept, so a writer that puts a newline
between blocks gives the cell back; only a displayed equation is set apart by
empty lines, which CommonMark wants.

`tools/dialect.py` writes the pieces for the book, `tools/plain.py` for
notebooks that leave it, `tools/export.py` for the README.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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
CALLOUTS = ("note", "tip", "warning", "important", "caution")
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
    """`::: {…}` to `:::`.

    `kind` is that of its label (thm, exr, …), or proof, solution, one of
    CALLOUTS, or "" for what is none of the dialect. A heading that it begins
    with is its title.
    """

    attributes: str
    pieces: tuple["Block", ...]
    title: Heading | None = None

    @property
    def label(self) -> str:
        found = re.search(r"#([\w-]+)", self.attributes)
        return found[1] if found else ""

    @property
    def kind(self) -> str:
        kind = self.label.split("-")[0]
        if kind in THEOREMS or kind == "exr":
            return kind
        classes = re.findall(r"\.([\w-]+)", self.attributes)
        known = ("proof", "solution", *(f"callout-{c}" for c in CALLOUTS))
        return next(
            (c.removeprefix("callout-") for c in known if c in classes), ""
        )

    @property
    def folded(self) -> bool:
        return self.kind == "solution" or 'collapse="true"' in self.attributes

    @property
    def depth(self) -> int:
        "How deep divisions lie in this one."
        return max(
            (1 + p.depth for p in self.pieces if isinstance(p, Division)),
            default=0,
        )


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
FENCE = re.compile(r"[ \t]*(`{3,}(?=[^`]*$)|~{3,})")
DIVISION = re.compile(r":{3,}\s*(?:\{([^}]*)\})?\s*")
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


class Reader:
    "Lines of one cell → blocks; `stack` has the divisions that are open."

    def __init__(self):
        self.equations: list[Equation] = []
        self.blocks: list[Block] = []
        self.stack: list[tuple[str, list[Block]]] = []
        self.lines: list[str] = []

    def end_text(self) -> None:
        if self.lines:
            self.blocks.append(Text(inline("\n".join(self.lines))))
            self.lines = []

    def add(self, block: Block) -> None:
        self.end_text()
        self.blocks.append(block)

    def open(self, attributes: str) -> None:
        self.end_text()
        self.stack.append((attributes, self.blocks))
        self.blocks = []

    def close(self) -> None:
        self.end_text()
        attributes, outer = self.stack.pop()
        pieces, title = self.blocks, None
        if pieces and isinstance(pieces[0], Heading):
            title, *pieces = pieces
        outer.append(Division(attributes, tuple(pieces), title))
        self.blocks = outer

    def text(self, source: str) -> None:
        for line in equations_apart(source, self.equations).split("\n"):
            if line == SET_APART:
                self.add(self.equations.pop(0))
            elif heading := HEADING.fullmatch(line):
                self.add(
                    Heading(
                        len(heading[1]), inline(heading[2]), heading[3] or ""
                    )
                )
            elif (mark := DIVISION.fullmatch(line)) and mark[1] is not None:
                self.open(mark[1])
            elif mark and self.stack:
                self.close()
            # a division does not begin with empty lines
            elif line.strip() or self.lines or self.blocks or not self.stack:
                self.lines.append(line)


def outside_code(source: str, text: Callable, code: Callable) -> None:
    "Calls `text` or `code` on the parts of a cell, in their order."
    buffer, fence = [], ""
    for line in source.split("\n"):
        mark = FENCE.match(line)
        if mark and not fence:
            if buffer:
                text("\n".join(buffer))
            buffer, fence = [line], mark[1]
        elif fence and re.fullmatch(rf"\s*{fence}{fence[0]}*\s*", line):
            code("\n".join([*buffer, line]))
            buffer, fence = [], ""
        else:
            buffer.append(line)
    if buffer:
        (code if fence else text)("\n".join(buffer))


@lru_cache(maxsize=None)
def parse(
    source: str, inside: tuple[str, ...] = ()
) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    """The blocks of a cell, and the attributes of the divisions that are open
    at its end; `inside` are those that an earlier cell has opened.
    """
    reader = Reader()
    for attributes in inside:
        reader.open(attributes)
    outside_code(source, reader.text, lambda code: reader.add(Code(code)))
    still = tuple(attributes for attributes, _ in reader.stack)
    while reader.stack:
        reader.close()
    reader.end_text()
    return tuple(reader.blocks), still


def blocks(source: str) -> tuple[Block, ...]:
    return parse(source)[0]


def cells(found: Sequence[dict]) -> Iterator[tuple[dict, tuple[Block, ...]]]:
    """The cells of a notebook, those of markdown with their blocks.

    A division that goes on in a later cell is one in each, without its label
    in all but the first: the code between them is seen.
    """
    still: tuple[str, ...] = ()
    for cell in found:
        made = ()
        if cell["cell_type"] == "markdown":
            made, still = parse(cell["source"], still)
            still = tuple(re.sub(r"#[\w-]+", "", open) for open in still)
        yield cell, made


def walk(found: Iterable[Block]) -> Iterator[Block]:
    "Every block, those of divisions too, in their order."
    for block in found:
        yield block
        if isinstance(block, Division):
            yield from walk([block.title] * bool(block.title))
            yield from walk(block.pieces)


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
        colons = ":" * (3 + block.depth)
        return "\n".join(
            [
                f"{colons} {{{block.attributes}}}",
                *([self.heading(block.title)] if block.title else []),
                *([self.write(block.pieces)] if block.pieces else []),
                colons,
            ]
        )

    def literal(self, piece: Literal) -> str:
        return piece.text

    def citation(self, piece: Citation) -> str:
        if piece.named:
            return f"@{piece.entries[0][0]}"
        return (
            "["
            + "; ".join(
                f"@{key}" + f", {remark}" * bool(remark)
                for key, remark in piece.entries
            )
            + "]"
        )

    def reference(self, piece: Reference) -> str:
        return f"@{piece.label}"

    def link(self, piece: Link) -> str:
        return f"[{self.inline(piece.words)}]({piece.target})"
