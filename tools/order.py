"""A chapter imports only from chapters before it or from the workshop, the
workshop only from itself, and the rooms of the package point one way.

So there are two orders: the reader's, which is the table of contents, and that
of building, which is the numbers', but that the workshop comes first. There
every import points backwards, within the workshop too. The landing page and
two pages behind it show what later chapters build and are exempt.
"""

import ast
from importlib.util import resolve_name
from pathlib import Path

import normalnorm
from tools.chapters import ROOT, WORKSHOP, Chapter, build_order
from tools.run import Run

# These show what later chapters build.
EXEMPT = {"index", "005_should_i_use_it", "010_in_ten_minutes"}
# These chapters find later modules by name, at run time.
BY_NAME = {
    "cli",
    "experiments.results",
    "experiments.spread",
    "experiments.tables",
    "layers.backends",
}
# A module of the room on the left may import modules of the rooms on the right
# (and of its own), and what lies in no room, but for the ledger and its checks:
# only checks import those.
ROOMS = {
    "theory": set(),
    "layers": {"theory"},
    "analysis": {"theory", "layers"},
    "experiments": {"theory", "layers", "analysis"},
}


def imported_modules(source: str, package: str = "") -> set[str]:
    """The dotted names under normalnorm that a piece of code imports; `package`
    resolves relative imports.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = resolve_name("." * node.level + base, package)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {
        name
        for name in found
        if name == "normalnorm" or name.startswith("normalnorm.")
    }


def code_of(chapter: Chapter) -> str:
    """All code of a chapter as one text; lines of shell or magic are no Python
    and import nothing.
    """
    lines = "\n".join(chapter.code_cells()).splitlines()
    return "\n".join(
        "pass" if line.startswith(("%", "!")) else line for line in lines
    )


def listed(root: Path = ROOT) -> list[Chapter]:
    "The chapters that the order binds, in the order of building."
    return [c for c in build_order(root) if c.name not in EXEMPT]


def against_the_order(
    names: dict[str, set[str]], verb: str, root: Path = ROOT
) -> list[str]:
    """What is wrong with the imports of chapters, `names` by the chapter's
    name, where each may import what comes before it in the order of building.
    """
    order = listed(root)
    position = {f"normalnorm.{c.module}": i for i, c in enumerate(order)}
    found = []
    for i, c in enumerate(order):
        for name in sorted(names.get(c.name, ())):
            if (at := position.get(name, -1)) > i:
                outside = WORKSHOP == c.part != order[at].part
                found.append(
                    f"{c.name} {verb} {name} of "
                    + (
                        "a chapter that is not of the workshop"
                        if outside
                        else "a later chapter"
                    )
                )
    return found


def violations(root: Path = ROOT) -> list[str]:
    """Imports in the chapters' text against the order, and between rooms
    against the arrows.
    """
    found = against_the_order(
        {c.name: imported_modules(code_of(c)) for c in listed(root)},
        "imports",
        root,
    )
    for c in listed(root):
        room = c.module.split(".")[0]
        if room in ROOMS:
            exported = "\n".join(s for s in c.code_cells() if "#| export" in s)
            for name in sorted(imported_modules(exported)):
                other = name.split(".")[1] if "." in name else ""
                if other in (set(ROOMS) | {"checks", "claims"}) - ROOMS[
                    room
                ] - {room}:
                    allowed = ", ".join(sorted(ROOMS[room]))
                    found.append(
                        f"{c.module} imports {name}: {room} may "
                        "import "
                        f"{allowed or 'nothing of the package'}"
                    )
    return found


def recorded_violations(root: Path = ROOT) -> list[str]:
    """The same from the record of each chapter's last run: the modules that
    really were loaded. Engines and recipes are found by searching a folder, at
    the first computation and the first run, and are left out; so are modules of
    layers, and what these import, for the chapters after the table of layers,
    which asks all of them for a class or a name that it does not know.
    """
    needs = {
        f"normalnorm.{c.module}": imported_modules(
            "\n".join(s for s in c.code_cells() if "#| export" in s),
            f"normalnorm.{c.module}".rpartition(".")[0],
        )
        for c in listed(root)
    }
    by_table, new = set(), set(normalnorm._PUBLIC.values())
    while new:
        by_table |= new
        new = set().union(*(needs.get(name, ()) for name in new)) - by_table
    names = [c.module for c in listed(root)]
    asking = (
        names[names.index("layers.families") + 1 :]
        if "layers.families" in names
        else []
    )
    loaded = {
        c.name: {
            name
            for file in Run(c).record().get("dependencies", {})
            if not (
                name := file.removesuffix(".py")
                .replace("/", ".")
                .removesuffix(".__init__")
            ).startswith(
                ("normalnorm.layers.engines", "normalnorm.experiments.recipes.")
            )
            and not (c.module in asking and name in by_table)
        }
        for c in listed(root)
        if c.module not in BY_NAME
    }
    return against_the_order(loaded, "loaded", root)
