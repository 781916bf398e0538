"""Chapters as plain notebooks, for JupyterLab: the dialect of nbdev and Quarto
becomes Markdown that needs no extension.

`python -m tools.plain FOLDER` writes them all; setup.py puts the same files
into the wheel as normalnorm/book, from where `normalnorm lab` copies them.
Numbers of equations, figures, theorems and exercises are those of the rendered
book. The appendices stay out: they are pages about the book.
"""
import json
import re
import shutil
import sys
from functools import lru_cache
from pathlib import Path

from tools.chapters import ROOT, Chapter, table_of_contents
from tools.dialect import (
    CALLOUTS,
    KERNEL,
    THEOREMS,
    cell_tags,
    directives,
    fold_of,
    join_divs,
    outside_code,
    outside_inline,
    without_directives,
)

APPENDICES = "Appendices"
PROVED = "∎"


def numbered_chapters(root: Path) -> dict[str, str | None]:
    """Name → number in the book, that of the file, in reading order; the
    landing page has none.
    """
    toc = table_of_contents(root)
    names = [entry["file"].rsplit("/", 1)[-1] for part in toc["parts"]
             if part["caption"] != APPENDICES for entry in part["chapters"]]
    return {toc["root"].rsplit("/", 1)[-1]: None} | {
        name: name.split("_")[0] for name in names}


def text_of(cell: dict) -> str:
    return "".join(cell["source"])


# ---- numbers ----------------------------------------------------------------

def labels(chapter: Chapter) -> list[tuple[str, str]]:
    """(kind, label) of what the chapter numbers, in order: eq, fig, exr and the
    kinds of theorem; sections by their title.
    """
    found = []
    for cell in chapter.cells():
        if cell["cell_type"] == "markdown":
            found += [(m[1].split("-")[0], m[1])
                      for m in re.finditer(r"\{#([a-z]+-[\w-]+)", text_of(cell))
                      if not m[1].startswith("sec-")]
        elif cell["cell_type"] == "code" and (
            name := directives(text_of(cell)).get("label", "")
        ).startswith("fig-"):
            found.append(("fig", name))
    return found


@lru_cache(maxsize=8)
def numbers(root: Path) -> dict[str, str]:
    "Label → number, such as `eq-shift` → `11.3`."
    out = {}
    for name, number in numbered_chapters(root).items():
        counts: dict[str, int] = {}
        for kind, label in labels(Chapter(name, root)):
            counts[kind] = counts.get(kind, 0) + 1
            out[label] = (
                f"{number}.{counts[kind]}" if number else str(counts[kind]))
    return out


@lru_cache(maxsize=8)
def section_titles(root: Path) -> dict[str, str]:
    found = {}
    for name in numbered_chapters(root):
        for cell in Chapter(name, root).cells():
            if cell["cell_type"] == "markdown":
                found |= {m[2]: m[1] for m in re.finditer(
                              r"^#+ (.*?)[ \t]*\{#(sec-[\w-]+)\}",
                              text_of(cell), re.M)}
    return found


# ---- literature -------------------------------------------------------------

@lru_cache(maxsize=8)
def literature(root: Path) -> dict[str, tuple[str, str, str]]:
    "Key → (authors, year, the line for the list of references)."
    from pybtex.database import parse_file
    from pybtex.richtext import Text

    found = {}
    for key, entry in parse_file(str(root / "references.bib")).entries.items():
        plain = lambda value: str(Text.from_latex(value))
        people = (
            entry.persons.get("author", []) or entry.persons.get("editor", []))
        names = [plain(" ".join(p.prelast_names + p.last_names))
                 for p in people]
        short = (names[0] if len(names) == 1 else f"{names[0]} and {names[1]}"
                 if len(names) == 2 else f"{names[0]} et al.")
        field = {k.lower(): plain(v) for k, v in entry.fields.items()}
        venue = ", ".join(field[k] for k in ("journal", "booktitle",
                                             "publisher", "volume", "pages",
                                             "eprint", "url") if k in field)
        found[key] = (short, field.get("year", ""),
                      f"{', '.join(names)} ({field.get('year', '')}). "
                      f"{field.get('title', '')}. {venue}.")
    return found


# ---- markdown ---------------------------------------------------------------

def quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip()
                     for line in text.strip("\n").split("\n"))


class Translation:
    "Translates the markdown of one chapter; remembers what it cites."

    def __init__(self, root: Path, shipped: set[str]):
        self.root, self.shipped, self.cited = root, shipped, {}

    def equations(self, source: str) -> str:
        def block(match):
            tag = (
                f" \\tag{{{numbers(self.root)[match[2]]}}}" if match[2] else "")
            return f"\n\n$$\n{match[1].strip()}{tag}\n$$\n\n"
        text = re.sub(
            r"[ \t]*\n?[ \t]*\$\$(.+?)\$\$(?:[ \t]*\{#([\w-]+)\})?[ \t]*\n?",
            block, source, flags=re.S)
        return re.sub(r"\n{3,}", "\n\n", text)

    def reference(self, label: str) -> str:
        kind = label.split("-")[0]
        if kind == "sec":
            return f"*{section_titles(self.root)[label]}*"
        number = numbers(self.root)[label]
        names = {"fig": "Fig.", "tbl": "Table", "exr": "Exercise"} | {
            k: v.title() for k, v in THEOREMS.items()}
        return f"({number})" if kind == "eq" else f"{names[kind]} {number}"

    def citation(self, key: str) -> tuple[str, str]:
        authors, year, self.cited[key] = literature(self.root)[key]
        return authors, year

    def citations(self, source: str) -> str:
        def bracket(match):
            entries = [re.fullmatch(r"\s*-?@([\w:-]+)(?:,\s*(.*))?\s*", e,
                                    flags=re.S) for e in match[1].split(";")]
            if not all(entries):
                return match[0]
            return ("(" + "; ".join(", ".join([*self.citation(e[1]), *(
                                        [e[2].strip()] if e[2] else [])])
                                    for e in entries) + ")")
        source = re.sub(r"\[([^\[\]]*@[^\[\]]*)\](?!\()", bracket, source)
        return re.sub(r"(?<![\w`{@./])@([a-z]+\d{4}[a-z]?)\b",
                      lambda m: "{} ({})".format(*self.citation(m[1])), source)

    def links(self, source: str) -> str:
        """A link to a page that is not among the copied chapters keeps its text
        only.
        """
        def link(match):
            target = match[2].split("#")[0]
            known = "://" in target or target in self.shipped or not target
            return match[0] if known else match[1]
        return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", link, source)

    def opening(self, attributes: str) -> tuple[str, str, bool]:
        "Heading, what ends the block, and whether it is folded."
        label = re.search(r"#([\w-]+)", attributes)
        classes = re.findall(r"\.([\w-]+)", attributes)
        if label and (label[1].split("-")[0] in THEOREMS
                      or label[1].startswith("exr-")):
            return f"**{self.reference(label[1])}**", "", False
        if "proof" in classes:
            return "*Proof.*", f" {PROVED}", False
        if "solution" in classes:
            return "Solution", "", True
        kind = next((c[8:] for c in classes
                     if c.startswith("callout-") and c[8:] in CALLOUTS),
                    "")
        return ((f"**{kind.title()}**" if kind else ""), "",
                'collapse="true"' in attributes)

    def divs(self, source: str) -> str:
        """`::: {…}` … `:::` → a quotation with a heading; solutions → a folded
        `<details>`.
        """
        out, stack = [], []
        for line in source.split("\n"):
            match = re.match(r"^:{3,}\s*(?:\{([^}]*)\})?\s*$", line)
            if match and match[1] is not None:
                stack.append((match[1], out))
                out = []
            elif match and stack:
                (attributes, outer), body = (
                    stack.pop(), "\n".join(out).strip("\n"))
                head, end, folded = self.opening(attributes)
                named = re.match(r"#+\s+(.*)\n*", body)
                if named:
                    head, body = (
                        f"{head} ({named[1]})" if head and not folded
                        else head or f"**{named[1]}**"), body[named.end():]
                if folded:
                    block = ("<details>\n"
                             f"<summary>{head.strip('*')}</summary>\n\n"
                             f"{body}{end}\n\n</details>")
                else:
                    block = quoted(
                        f"{head} {body}{end}" if head.startswith("*Proof")
                        else f"{head}\n\n{body}{end}" if head else body)
                out = [*outer, "", block, ""]
            else:
                out.append(line)
        # a div that nothing closes is a mistake of the chapter; its text is not
        # lost
        for _, outer in reversed(stack):
            out = outer + out
        return "\n".join(out)

    def markdown(self, source: str) -> str:
        def inline(text):
            return self.citations(re.sub(r"(?<![\w`{])@((?:" + "|".join(
                                             ["eq", "fig", "tbl", "sec", "exr",
                                              *THEOREMS]) + r")-[\w-]*\w)",
                                         lambda m: self.reference(m[1]), text))

        def translate(text):
            text = re.sub(r"^(#+ .*?)[ \t]*\{#sec-[\w-]+\}[ \t]*$", r"\1",
                          self.equations(text), flags=re.M)
            return self.divs(self.links(outside_inline(text, inline)))
        return re.sub(r"\n{3,}", "\n\n",
                      outside_code(source, translate)).strip("\n")


# ---- notebooks --------------------------------------------------------------

def markdown_cell(source: str, name: str) -> dict:
    return {"cell_type": "markdown", "id": name, "metadata": {},
            "source": source}


def code_cell(cell: dict, module: str, translation: Translation) -> list[dict]:
    """The cell without its directives, folded where the book hides it; its
    caption as a cell of its own.
    """
    found = directives(text_of(cell))
    source = without_directives(text_of(cell))
    if not source:
        return []
    if found.get("eval", "").lower() == "false":
        return [markdown_cell(f"```python\n{source}\n```", cell["id"])]
    fold = fold_of(text_of(cell))
    # JupyterLab shows the first line of a folded cell
    words = fold.text() if fold else ""
    if "export" in found and module:
        source = "\n".join([f"# in the library: normalnorm.{module}"
                            + f" · {words}" * bool(fold), source])
    elif fold and not source.startswith("%"):
        source = f"# folded: {words}\n{source}"
    folded = fold or set(cell_tags(found)) & {"remove-cell", "remove-input"}
    new = {"cell_type": "code", "id": cell["id"],
           "metadata": {"jupyter": {"source_hidden": True}} if folded else {},
           "source": source, "outputs": [], "execution_count": None}
    caption = found.get("fig-cap")
    label = found.get("label", "")
    if not caption:
        return [new]
    number = (f"**{translation.reference(label)}** " if label.startswith("fig-")
              else "")
    return [new, markdown_cell(
        number + translation.markdown(caption), f"{cell['id']}-c")]


def native_cell(cell: dict) -> dict:
    "C++, which a notebook of Python does not run: folded where the book does."
    source = text_of(cell)
    block = f"```cpp\n{without_directives(source)}\n```"
    if fold := fold_of(source, raw=True):
        block = ("<details>\n"
                 f"<summary><code>{KERNEL}</code>: {fold.html()}</summary>\n\n"
                 f"{block}\n\n</details>")
    return markdown_cell(block, cell["id"])


def notebook(chapter: Chapter) -> dict:
    "One chapter, translated; the dictionary of a notebook in format 4.5."
    root = chapter.root
    known = numbered_chapters(root)
    if chapter.name not in known:
        raise KeyError(f"{chapter.name} is not a chapter that can be run as a "
                       f"tutorial; those are {', '.join(known)}")
    translation = Translation(root, {f"{name}.ipynb" for name in known})
    source = chapter.cells()
    exports = [directives(s).get("default_exp") for s in chapter.code_cells()]
    module = next((m for m in exports if m and m != "__init__"), "")
    cells = []
    for cell in join_divs(source):
        if cell["cell_type"] == "markdown":
            cells.append(
                markdown_cell(translation.markdown(text_of(cell)), cell["id"]))
        elif cell["cell_type"] == "code":
            cells += code_cell(cell, module, translation)
        elif "export-cpp" in directives(text_of(cell)):
            cells.append(native_cell(cell))
    if number := known[chapter.name]:
        cells[0]["source"] = re.sub(
            r"\A# ", f"# {number} · ", cells[0]["source"])
    if translation.cited:
        lines = "\n".join(
            f"- {line}" for line in sorted(translation.cited.values()))
        cells.append(markdown_cell(f"## References\n\n{lines}", "references"))
    return {"cells": cells,
            "metadata": {"kernelspec": {"display_name": "Python 3",
                                        "language": "python",
                                        "name": "python3"},
                         "language_info": {"name": "python"}},
            "nbformat": 4, "nbformat_minor": 5}


def write(folder: Path, root: Path = ROOT) -> list[Path]:
    """All chapters, and the committed results that they show, into `folder`;
    returns the notebooks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in numbered_chapters(root):
        path = folder / f"{name}.ipynb"
        path.write_text(json.dumps(notebook(Chapter(name, root)), indent=1,
                                   ensure_ascii=False) + "\n",
                        encoding="utf-8")
        written.append(path)
    for rows in sorted([*(root / "results").glob("**/book"),
                        *(root / "results").glob("benchmarks")]):
        shutil.copytree(rows,
                        folder / "results" / rows.relative_to(root / "results"),
                        dirs_exist_ok=True)
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.plain FOLDER")
    print(f"{len(write(Path(sys.argv[1])))} chapters in {sys.argv[1]}")
