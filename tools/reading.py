"""`python -m tools.reading`: what a reader meets in each chapter, before
unfolding anything.

Words of prose, visible lines of code, their ratio, figures, figures to drag,
exercises, and how far down the first picture is. A line of prose is twelve
words, which is what a line of the page holds; a line of code is one that has
code, not a comment, a docstring or nothing. Above the first picture a displayed
formula, and the line of a folded cell, count as three lines. `--root` looks at
another checkout, `--record FILE` keeps the outcome, `--kept FILE` takes a kept
one instead of looking, `--against FILE` shows one beside it, under the names
that its chapters have now. The last line sums up; its ratio is that of the
sums, its picture the farthest.
"""

import argparse
import datetime
import json
import re
import subprocess
from pathlib import Path

from tools import browser, folding, markup
from tools.chapters import ROOT, Chapter, chapters, renamed
from tools.dialect import cell_tags, directives, fold_of, without_directives

WORDS = 12  # in a line of prose
TALL = 3  # lines of a displayed formula, and of a folded cell
PICTURE = Path(__file__).with_name("picture.js")
COLUMNS = {
    "words": "words",
    "code": "code",
    "ratio": "code/prose",
    "figures": "figures",
    "drag": "to drag",
    "exercises": "exercises",
    "lines_before_picture": "lines to picture",
    "screens_before_picture": "screens",
}
SUMMED = ("words", "code", "figures", "drag", "exercises")


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


def visible_code(cell: dict, folds: bool = True) -> int:
    "Lines of code that are seen; in a checkout without folding, more."
    source, raw = "".join(cell["source"]), cell["cell_type"] == "raw"
    found, code = directives(source), without_directives(source)
    unseen = {"remove-cell", "remove-input", "hide-input"}
    if (
        raw
        and "export-cpp" not in found
        or unseen & set(cell_tags(found))
        or folds
        and fold_of(source, raw)
    ):
        return 0
    return (folding.native_lines if raw else folding.python_lines)(code)


def row(chapter: Chapter, folds: bool = True) -> dict:
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
            out["code"] += visible_code(cell, folds)
            hidden = "remove-cell" in cell_tags(found)
            pictures = int("fig-cap" in found and not hidden)
            # a widget without a caption is an exercise's or a test's
            out["drag"] += pictures * bool(re.search(r"\bwidget\(", source))
        if pictures and not out["figures"]:
            out["lines_before_picture"] = round(
                out["words"] / WORDS + out["code"] + TALL * tall
            )
        tall += folds and bool(fold_of(source, cell["cell_type"] == "raw"))
        out["figures"] += pictures
    return out | {"ratio": round(out["code"] * WORDS / max(out["words"], 1), 2)}


def measure(root: Path = ROOT) -> dict[str, dict]:
    """Chapter → its row; with the screens (900 pixels) before the first picture
    where the book is rendered and there is a browser.
    """
    folds = (root / "tools" / "folding.py").exists()
    rows = {c.name: row(c, folds) for c in chapters(root)}
    html = (root / "_build/html/nbs").resolve()
    pages = [
        p.as_uri()
        for p in (
            html / f"{name}.html" for name in rows if rows[name]["figures"]
        )
        if p.exists() and browser.chromium()
    ]
    tops = browser.ask(pages, PICTURE, seconds=900) if pages else {}
    for name, found in rows.items():
        top = tops.get((html / f"{name}.html").as_uri())
        found["screens_before_picture"] = top and round(top / 900, 1)
    return rows


def whole(rows: dict[str, dict]) -> dict:
    "All chapters in one row."
    have = lambda key: [r[key] for r in rows.values() if r.get(key) is not None]
    out = {
        key: sum(have(key)) if key in SUMMED else max(have(key), default=None)
        for key in COLUMNS
    }
    return out | {"ratio": round(out["code"] * WORDS / max(out["words"], 1), 2)}


def table(rows: dict[str, dict], before: dict[str, dict] | None = None) -> str:
    "A line for each chapter, one for all; `before → now` where they differ."
    now = rows | {f"all {len(rows)}": whole(rows)}
    if before:
        names = renamed()
        before = {names.get(name, name): r for name, r in before.items()} | {
            f"all {len(rows)}": whole(before)
        }

    def entry(name, key):
        pair = [str(r.get(name, {}).get(key)) for r in (before, now) if r]
        return " → ".join(dict.fromkeys(pair)).replace("None", "–")

    lines = [
        ["chapter", *COLUMNS.values()],
        *([name, *(entry(name, key) for key in COLUMNS)] for name in now),
    ]
    wide = [-max(map(len, column)) for column in zip(*lines)]
    wide[1:] = map(abs, wide[1:])
    return "\n".join(
        "  ".join(f"%{w}s" % text for text, w in zip(line, wide))
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.reading")
    for name in "--root", "--record", "--kept", "--against":
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    kept, before = (
        json.loads(file.read_text())["chapters"] if file else None
        for file in (given.kept, given.against)
    )
    rows = kept or measure(given.root or ROOT)
    print(table(rows, before))
    if given.record:  # one chapter a line
        commit = subprocess.run(
            "git rev-parse --short HEAD".split(),
            cwd=given.root,
            capture_output=True,
            text=True,
        )
        listed = ",\n".join(f'"{n}": {json.dumps(r)}' for n, r in rows.items())
        given.record.write_text(
            f'{{"date": "{datetime.date.today()}", '
            f'"commit": "{commit.stdout.strip()}", "chapters": {{\n'
            + listed
            + "\n}}\n"
        )


if __name__ == "__main__":
    main()
