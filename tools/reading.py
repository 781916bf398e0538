"""What a reader meets in a chapter before unfolding anything: words of prose,
visible lines of code, and how far down the first picture is.

A line of prose is twelve words, which is what a line of the page holds; a line
of code is one that has code, not a comment, a docstring or nothing. Above the
first picture a displayed formula, and the line of a folded cell, count as three
lines. `python -m tools.reading` prints the words of each page, of the book and
of the handbook.
"""

import re

from tools import folding, markup
from tools.chapters import Chapter, halves
from tools.folding import cell_tags, directives, fold_of, without_directives

WORDS = 12  # in a line of prose
TALL = 3  # lines of a displayed formula, and of a folded cell


class Prose(markup.Writer):
    "What is read as words."

    def heading(self, block: markup.Heading) -> str:
        return self.inline(block.inline)

    def equation(self, block: markup.Equation) -> str:
        return ""

    def code(self, block: markup.Code) -> str:
        return ""

    def division(self, block: markup.Division) -> str:
        return self.write(block.pieces)


def words(found: tuple[markup.Block, ...]) -> int:
    "Words of a markdown cell; displayed formulas and fenced code have none."
    return len(re.findall(r"\S*\w\S*", Prose().write(found)))


def visible_code(cell: dict) -> int:
    "Lines of code that are seen."
    source, raw = cell["source"], cell["cell_type"] == "raw"
    found, code = directives(source), without_directives(source)
    unseen = {"remove-cell", "remove-input"}
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
    prose = code = tall = 0
    picture = None
    for cell, blocks in markup.cells(chapter.cells()):
        source = cell["source"]
        found = directives(source)
        if cell["cell_type"] == "markdown":
            prose += words(blocks)
            tall += sum(
                isinstance(block, markup.Equation)
                for block in markup.walk(blocks)
            )
            pictured = re.search(r"!\[[^\]]*\]\(", source)
        else:
            code += visible_code(cell)
            hidden = "remove-cell" in cell_tags(found)
            pictured = "fig-cap" in found and not hidden
        if pictured and picture is None:
            picture = round(prose / WORDS + code + TALL * tall)
        tall += bool(fold_of(source, cell["cell_type"] == "raw"))
    return {"words": prose, "code": code, "lines_before_picture": picture}


if __name__ == "__main__":
    for half, found in halves().items():
        total = 0
        for caption, pages in found:
            print(caption)
            for chapter in (
                Chapter(page.removeprefix("nbs/")) for page in pages
            ):
                if chapter.path.exists():
                    count = row(chapter)["words"]
                    print(f"{count:7} {chapter.name}")
                    total += count
        print(f"{total:7} {half}")
