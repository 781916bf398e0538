"""A chapter imports only from chapters before it or from the workshop, the
workshop only from itself, and the rooms of the package point one way.

So there are two orders: the reader's, which is the table of contents, and that
of building, which is the numbers', but that the workshop comes first. There
every import points backwards, within the workshop too. The landing page,
the pages in minutes behind it and the command line show what later chapters
build and are exempt.
"""

import ast
from importlib.util import resolve_name
from pathlib import Path

import normalnorm
from tools.chapters import ROOT, WORKSHOP, Chapter, build_order

# These show what later chapters build.
EXEMPT = {
    "index",
    "005_should_i_use_it",
    "010_in_ten_minutes",
    "011_proxy_norm_in_five_minutes",
    "012_centring_in_five_minutes",
    "013_one_map_in_five_minutes",
    "770_cli",
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


def used_names(chapter: Chapter) -> set[str]:
    "What its code imports of the package, or asks the package itself for."
    code = code_of(chapter)
    return imported_modules(code) | {
        ast.unparse(node)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute)
    }


def violations(root: Path = ROOT) -> list[str]:
    """Imports in the chapters' text against the order, and between rooms
    against the arrows. A public name of the package stands for its module.
    """
    order, found = listed(root), []
    position = {f"normalnorm.{c.module}": i for i, c in enumerate(order)}
    position |= {
        f"normalnorm.{name}": position.get(module, -1)
        for name, module in normalnorm._PUBLIC.items()
    }
    for i, c in enumerate(order):
        for name in sorted(used_names(c)):
            if (at := position.get(name, -1)) > i:
                outside = WORKSHOP == c.part != order[at].part
                of = (
                    "a chapter that is not of the workshop"
                    if outside
                    else "a later chapter"
                )
                found.append(f"{c.name} imports {name} of {of}")
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
