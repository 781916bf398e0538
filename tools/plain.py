"""Chapters as plain notebooks, for JupyterLab: the dialect of nbdev and Quarto
becomes Markdown that needs no extension.

`python -m tools.plain FOLDER` writes them all; setup.py puts the same files
into the wheel as normalnorm/book, from where `normalnorm lab` copies them.
Numbers of equations, figures, theorems and exercises are those of the rendered
book. The appendices, which are pages about the book, can only be downloaded.
"""

import re
import shutil
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tools import chapters, markup
from tools.chapters import APPENDICES, ROOT, Chapter
from tools.dialect import KERNEL
from tools.files import save
from tools.folding import (
    cell_tags,
    directives,
    fold_of,
    without_directives,
)
from tools.markup import THEOREMS

PROVED = "∎"


def tutorials(root: Path = ROOT) -> list[Chapter]:
    "The chapters that are run elsewhere: all but the appendices."
    return [c for c in chapters.chapters(root) if c.part != APPENDICES]


def number_of(chapter: Chapter) -> str:
    """Its number in the book, that of the file; "" for the landing page and an
    appendix.
    """
    return "" if chapter.part in (None, APPENDICES) else chapter.name[:3]


# ---- numbers ----------------------------------------------------------------


def labels(chapter: Chapter) -> list[tuple[str, str]]:
    """(kind, label) of what the chapter numbers, in order: eq, fig, exr and the
    kinds of theorem; sections by their title.
    """
    found = []
    for cell, blocks in markup.cells(chapter.cells()):
        found += [
            label
            for label in markup.labels(blocks)
            if not label.startswith("sec-")
        ]
        if cell["cell_type"] == "code" and (
            name := directives(cell["source"]).get("label", "")
        ).startswith("fig-"):
            found.append(name)
    return [(label.split("-")[0], label) for label in found]


@lru_cache(maxsize=8)
def numbers(root: Path) -> dict[str, str]:
    "Label → number, such as `eq-shift` → `11.3`."
    out = {}
    for chapter in chapters.chapters(root):
        number, counts = number_of(chapter), {}
        for kind, label in labels(chapter):
            counts[kind] = counts.get(kind, 0) + 1
            out[label] = (
                f"{number}.{counts[kind]}" if number else str(counts[kind])
            )
    return out


@lru_cache(maxsize=8)
def section_titles(root: Path) -> dict[str, str]:
    return {
        block.label: markup.Writer().inline(block.inline)
        for chapter in chapters.chapters(root)
        for _, found in markup.cells(chapter.cells())
        for block in markup.walk(found)
        if isinstance(block, markup.Heading) and block.label
    }


# ---- literature -------------------------------------------------------------


@lru_cache(maxsize=8)
def literature(root: Path) -> dict[str, tuple[str, str, str]]:
    """Key → (authors, year, the line for the list of references), in the order
    of that list.
    """
    from pybtex.backends.plaintext import Backend
    from pybtex.database import parse_file
    from pybtex.richtext import Text
    from pybtex.style.formatting.plain import Style

    found, listed = {}, parse_file(str(root / "references.bib"))
    style = Style(sorting_style="author_year_title")
    for line in style.format_bibliography(listed):
        entry = listed.entries[line.key]
        people = entry.persons.get("author") or entry.persons.get("editor", [])
        names = [
            str(Text.from_latex(" ".join(p.prelast_names + p.last_names)))
            for p in people
        ]
        authors = (
            " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
        )
        year = entry.fields.get("year", "")
        found[line.key] = authors, year, line.text.render(Backend())
    return found


# ---- markdown ---------------------------------------------------------------


def quoted(text: str) -> str:
    return "\n".join(
        f"> {line}".rstrip() for line in text.strip("\n").split("\n")
    )


class Plain(markup.Writer):
    """Pieces of the cells of one chapter as markdown without extensions;
    remembers what it cites.
    """

    def __init__(self, root: Path, shipped: set[str]):
        self.root, self.shipped, self.cited = root, shipped, set()

    def markdown(self, found: Iterable[markup.Block]) -> str:
        "A cell."
        return re.sub(r"\n{3,}", "\n\n", self.write(found)).strip("\n")

    def heading(self, block: markup.Heading) -> str:
        return f"{'#' * block.level} {self.inline(block.inline)}"

    def equation(self, block: markup.Equation) -> str:
        tag = (
            f" \\tag{{{numbers(self.root)[block.label]}}}"
            if block.label
            else ""
        )
        return f"$$\n{block.tex}{tag}\n$$"

    def numbered(self, label: str) -> str:
        "What a reference to a label says."
        kind = label.split("-")[0]
        if kind == "sec":
            return f"*{section_titles(self.root)[label]}*"
        number = numbers(self.root)[label]
        names = {"fig": "Fig.", "tbl": "Table", "exr": "Exercise"} | {
            k: v.title() for k, v in THEOREMS.items()
        }
        return f"({number})" if kind == "eq" else f"{names[kind]} {number}"

    def reference(self, piece: markup.Reference) -> str:
        return self.numbered(piece.label)

    def inline(self, found: markup.Inline) -> str:
        return super().inline(markup.bare_equations(found))

    def citation(self, piece: markup.Citation) -> str:
        entries = []
        for key, remark in piece.entries:
            self.cited.add(key)
            authors, year, _ = literature(self.root)[key]
            if piece.named:
                return f"{authors} ({year})"
            entries.append(
                ", ".join([authors, year, *([remark] * bool(remark))])
            )
        return f"({'; '.join(entries)})"

    def link(self, piece: markup.Link) -> str:
        """A link to a page that is not among the copied chapters keeps its text
        only.
        """
        target = piece.target.split("#")[0]
        known = "://" in target or target in self.shipped or not target
        return super().link(piece) if known else self.inline(piece.words)

    def division(self, block: markup.Division) -> str:
        """A quotation with a heading; what is folded in the book is a
        `<details>`.
        """
        body = self.write(block.pieces).strip("\n")
        if block.kind == "solution":
            made = (
                "<details>\n<summary>Solution</summary>\n\n"
                f"{body}\n\n</details>"
            )
        elif block.kind == "proof":
            made = quoted(f"*Proof.* {body} {PROVED}")
        else:
            made = quoted(f"**{self.numbered(block.label)}**\n\n{body}")
        return f"\n{made}\n"


# ---- notebooks --------------------------------------------------------------


def code_cell(cell: dict, module: str, writer: Plain) -> list[dict]:
    """The cell without its directives, folded where the book hides it; its
    caption as a cell of its own.
    """
    found = directives(cell["source"])
    source = without_directives(cell["source"])
    if not source:
        return []
    if found.get("eval", "").lower() == "false":
        return [
            chapters.cell("markdown", f"```python\n{source}\n```", cell["id"])
        ]
    fold = fold_of(cell["source"])
    # JupyterLab shows the first line of a folded cell
    words = fold.text() if fold else ""
    if "export" in found and module:
        source = "\n".join(
            [
                f"# in the library: normalnorm.{module}"
                + f" · {words}" * bool(fold),
                source,
            ]
        )
    elif fold and not source.startswith("%"):
        source = f"# folded: {words}\n{source}"
    folded = fold or set(cell_tags(found)) & {"remove-cell", "remove-input"}
    hidden = {"jupyter": {"source_hidden": True}} if folded else {}
    new = chapters.cell("code", source, cell["id"], **hidden)
    caption = found.get("fig-cap")
    label = found.get("label", "")
    if not caption:
        return [new]
    number = (
        f"**{writer.numbered(label)}** " if label.startswith("fig-") else ""
    )
    return [
        new,
        chapters.cell(
            "markdown",
            number + writer.markdown(markup.blocks(caption)),
            f"{cell['id']}-c",
        ),
    ]


def native_cell(cell: dict) -> dict:
    "C++, which a notebook of Python does not run: folded where the book does."
    source = cell["source"]
    block = f"```cpp\n{without_directives(source)}\n```"
    if fold := fold_of(source, raw=True):
        block = (
            "<details>\n"
            f"<summary><code>{KERNEL}</code>: {fold.html()}</summary>\n\n"
            f"{block}\n\n</details>"
        )
    return chapters.cell("markdown", block, cell["id"])


def notebook(chapter: Chapter) -> dict:
    "One chapter, translated; the dictionary of a notebook in format 4.5."
    root = chapter.root
    writer = Plain(root, {c.path.name for c in tutorials(root)})
    exports = [directives(s).get("default_exp") for s in chapter.code_cells()]
    module = next((m for m in exports if m and m != "__init__"), "")
    cells = []
    for cell, found in markup.cells(chapter.cells()):
        if cell["cell_type"] == "markdown":
            cells.append(
                chapters.cell("markdown", writer.markdown(found), cell["id"])
            )
        elif cell["cell_type"] == "code":
            cells += code_cell(cell, module, writer)
        elif "export-cpp" in directives(cell["source"]):
            cells.append(native_cell(cell))
    if number := number_of(chapter):
        cells[0]["source"] = re.sub(
            r"\A# ", f"# {number} · ", cells[0]["source"]
        )
    if writer.cited:
        lines = "\n".join(
            f"- {line}"
            for key, (*_, line) in literature(root).items()
            if key in writer.cited
        )
        cells.append(
            chapters.cell("markdown", f"## References\n\n{lines}", "references")
        )
    made = chapters.notebook(cells)
    made["metadata"]["language_info"] = {"name": "python"}
    return made


def write(folder: Path, root: Path = ROOT) -> list[Path]:
    """All chapters, and the committed results that they show, into `folder`;
    returns the notebooks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chapter in tutorials(root):
        written.append(folder / chapter.path.name)
        save(written[-1], notebook(chapter))
    for pattern in "**/book", "benchmarks", "proofs":
        for rows in sorted((root / "results").glob(pattern)):
            shutil.copytree(
                rows, folder / rows.relative_to(root), dirs_exist_ok=True
            )
    return written


# ---- what a page offers for download ----------------------------------------


def write_downloads(app, exception):
    """Sphinx copies the sources of the pages that it writes; each copy becomes
    the notebook that a learner can run.
    """
    if exception or app.builder.format != "html":
        return
    for chapter in chapters.chapters(Path(app.srcdir)):
        path = Path(app.outdir, "_sources", "nbs", chapter.path.name)
        if path.exists() and path.read_bytes() == chapter.path.read_bytes():
            save(path, notebook(chapter))


def say_what_it_is(app, pagename, templatename, context, doctree):
    "The theme's button for it only says what kind of file there is."
    for button in context.get("header_buttons", []):
        for inner in button.get("buttons", []):
            if (
                inner.get("label") == "download-source-button"
                and str(inner.get("text")) == ".ipynb"
            ):
                inner["tooltip"] = "Download this page as a notebook"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.plain FOLDER")
    print(f"{len(write(Path(sys.argv[1])))} chapters in {sys.argv[1]}")
