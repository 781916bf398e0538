"""`python -m tools.reading`: what a reader meets in each chapter, before
unfolding anything.

Words of prose, visible lines of code, their ratio, figures, figures to drag,
exercises, and how far down the first picture is. A line of prose is twelve
words, which is what a line of the page holds; a line of code is one that has
code, not a comment, a docstring or nothing. Above the first picture a displayed
formula, and the line of a folded cell, count as three lines.
"""

import re

from tools import folding, markup
from tools.chapters import Chapter, chapters
from tools.dialect import cell_tags, directives, fold_of, without_directives

WORDS = 12  # in a line of prose
TALL = 3  # lines of a displayed formula, and of a folded cell
COLUMNS = {
    "words": "words",
    "code": "code",
    "ratio": "code/prose",
    "figures": "figures",
    "drag": "to drag",
    "exercises": "exercises",
    "lines_before_picture": "lines to picture",
}


class Prose(markup.Writer):
    "What is read as words."

    def heading(self, block: markup.Heading) -> str:
        return self.inline(block.inline)

    def equation(self, block: markup.Equation) -> str:
        return ""

    def code(self, block: markup.Code) -> str:
        return ""

    def division(self, block: markup.Division) -> str:
        return self.write((block.title,) * bool(block.title) + block.pieces)


def words(found: tuple[markup.Block, ...]) -> int:
    "Words of a markdown cell; displayed formulas and fenced code have none."
    return len(re.findall(r"\S*\w\S*", Prose().write(found)))


def visible_code(cell: dict) -> int:
    "Lines of code that are seen."
    source, raw = "".join(cell["source"]), cell["cell_type"] == "raw"
    found, code = directives(source), without_directives(source)
    unseen = {"remove-cell", "remove-input", "hide-input"}
    if (
        raw
        and "export-cpp" not in found
        or unseen & set(cell_tags(found))
        or fold_of(source, raw)
    ):
        return 0
    return (folding.native_lines if raw else folding.python_lines)(code)


def row(chapter: Chapter) -> dict:
    "What the source of a chapter says."
    out = dict.fromkeys(("words", "code", "figures", "drag", "exercises"), 0)
    out["lines_before_picture"], tall = None, 0
    for cell, blocks in markup.cells(chapter.cells()):
        source = "".join(cell["source"])
        found, pictures = directives(source), 0
        if cell["cell_type"] == "markdown":
            out["words"] += words(blocks)
            tall += sum(
                isinstance(block, markup.Equation)
                for block in markup.walk(blocks)
            )
            out["exercises"] += sum(
                label.startswith("exr-") for label in markup.labels(blocks)
            )
            pictures = len(re.findall(r"!\[[^\]]*\]\(", source))
        else:
            out["code"] += visible_code(cell)
            hidden = "remove-cell" in cell_tags(found)
            pictures = int("fig-cap" in found and not hidden)
            # a widget without a caption is an exercise's or a test's
            out["drag"] += pictures * bool(re.search(r"\bwidget\(", source))
        if pictures and not out["figures"]:
            out["lines_before_picture"] = round(
                out["words"] / WORDS + out["code"] + TALL * tall
            )
        tall += bool(fold_of(source, cell["cell_type"] == "raw"))
        out["figures"] += pictures
    return out | {"ratio": round(out["code"] * WORDS / max(out["words"], 1), 2)}


if __name__ == "__main__":
    print(("%-38s" + "%18s" * len(COLUMNS)) % ("chapter", *COLUMNS.values()))
    for one in chapters():
        found = row(one)
        cells = (found[key] for key in COLUMNS)
        print(("%-38s" + "%18s" * len(COLUMNS)) % (one.name, *cells))
