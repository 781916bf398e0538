"""The contents by name, nbs/contents.md: layers, instruments, theorems and
papers, each with the chapters that have it. Read from the package's source, the
checks and the chapters; the questions above are written there.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import normalnorm
from tools import api, markup, order, plain, typeset
from tools.chapters import ROOT, chapters, homes

MARK = re.compile(r"^% names: (\w+)$", re.M)
ROOMS = {
    "instruments": "normalnorm.analysis",
    "formulas": "normalnorm.theory",
    "modules": "normalnorm.layers",
}


def table(heads: str, rows: Iterable[Iterable[str]]) -> str:
    "A table in Markdown; `heads` with a bar between two."
    lines = [heads.split(" | "), ["---"] * (heads.count("|") + 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def numbers(names: Iterable[str]) -> str:
    "Links to chapters, short: a number, or the name of a page without one."
    return ", ".join(
        f"{{doc}}`{re.match(r'[0-9]*', name)[0] or name} <{name}>`"
        for name in sorted(names)
    )


@lru_cache(maxsize=1)
def imports(root: Path) -> dict[str, set[str]]:
    "Chapter → what its code imports of the package."
    return {
        c.name: order.imported_modules(order.code_of(c))
        for c in chapters(root)[1:]
    }


def users(root: Path, home: str, *names: str) -> str:
    "The other chapters that import one of these."
    return numbers(
        chapter
        for chapter, found in imports(root).items()
        if chapter != home and found & {*names}
    )


def linked(entry: api.Entry) -> str:
    return f"[`{entry.name}`](#{entry.target()})"


def first_sentence(entry: api.Entry) -> str:
    text = re.split(r"(?<=[^.…])\.(?:\s|$)|;|\n\n", entry.doc)[0]
    return api.prose(" ".join(text.split()), {})


def layers(root: Path) -> str:
    """The public names of the package. Layers that differ in what they are
    given, as 1d and 2d do, share a line.
    """
    where, entries = homes(root), api.entries(root)
    public = sorted(normalnorm._PUBLIC.items(), key=lambda item: where[item[1]])
    groups: dict[str, list[api.Entry]] = {}
    for name, module in public:
        stem = re.sub(r"(?<=Norm)(Conv\dd|\dd|Linear)$", "", name)
        (entry,) = (e for e in entries[module] if e.name == name)
        groups.setdefault(stem, []).append(entry)
    lines = []
    for group in groups.values():
        home = where[group[0].module]
        names = [
            f"{m}.{e.name}" for e in group for m in ("normalnorm", e.module)
        ]
        lines.append(
            (
                ", ".join(map(linked, group)),
                first_sentence(group[0]),
                f"{{doc}}`{home}`",
                users(root, home, *names),
            )
        )
    return table("name | what it is | chapter | used in", lines)


def functions(root: Path, room: str) -> str:
    "What the modules of a part of the package export, chapter by chapter."
    entries = api.entries(root)
    lines = [
        (
            f"{{doc}}`{home}`",
            ", ".join(map(linked, entries[module])),
            users(root, home, module),
        )
        for module, home in sorted(
            homes(root).items(), key=lambda pair: pair[1]
        )
        if module.startswith(f"{room}.") and module in entries
    ]
    return table("chapter | names | used in", lines)


def theorems(root: Path) -> str:
    place = '{verdict}, <a href="{chapter}.html#claim-here-{id}">{chapter}</a>'
    lines = [
        (
            re.sub(
                r"@(eq-[\w-]*\w)",
                r"{eq}`\1`",
                typeset.statement(said["statement"]).replace("|", "&#124;"),
            ),
            api.prose(said["source"], {}),
            re.sub(r"(?<=>)(\d{3})_[\w.]+", r"\1", place.format(**said)),
        )
        for said in api.claims(root)
        if said["kind"] == "theorem"
    ]
    return table("statement | source | verdict, chapter", lines)


@lru_cache(maxsize=1)
def cited(root: Path) -> dict[str, set[str]]:
    "Key of a reference → the chapters whose text or claims cite it."
    found: dict[str, set[str]] = {key: set() for key in plain.literature(root)}
    for c in chapters(root):
        for _, blocks in markup.cells(c.cells()):
            for span in markup.spans(blocks):
                for key, _ in getattr(span, "entries", ()):
                    found[key].add(c.name)
    for said in api.claims(root):
        for key in found.keys() & {*re.findall(r"\w+", said["source"])}:
            found[key].add(said["chapter"])
    return found


def papers(root: Path) -> str:
    lines = [
        (api.prose(line, {}), numbers(cited(root)[key]))
        for key, (*_, line) in plain.literature(root).items()
    ]
    return table("paper | chapters", lines)


def tables(root: Path = ROOT) -> dict[str, str]:
    "What stands in the places of the page."
    return {
        "layers": layers(root),
        **{name: functions(root, room) for name, room in ROOMS.items()},
        "theorems": theorems(root),
        "papers": papers(root),
    }


def source_read(app, docname, source):
    if docname == "nbs/contents":
        app.env.note_reread()
        made = tables(Path(app.srcdir))
        source[0] = MARK.sub(lambda mark: made[mark[1]], source[0])
