"""Chapters import only from chapters before them, and the rooms of the package
point one way.
"""
import ast
from pathlib import Path

from tools.chapters import ROOT, Chapter, chapters
from tools.run import Run

# These chapters find later modules by name, at run time.
BY_NAME = {"cli", "experiments.results", "experiments.spread",
           "experiments.tables"}
# A module of the room on the left may import modules of the rooms on the right
# (and of its own), claims and plots aside.
ROOMS = {"theory": set(), "layers": {"theory"},
         "analysis": {"theory", "layers"},
         "experiments": {"theory", "layers", "analysis"}}


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
                base = ".".join(filter(None, [
                    *package.split(".")[
                        :len(package.split(".")) - node.level + 1],
                    base]))
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found
            if name == "normalnorm" or name.startswith("normalnorm.")}


def code_of(chapter: Chapter) -> str:
    """All code of a chapter as one text; lines of shell or magic are no Python
    and import nothing.
    """
    lines = "\n".join(chapter.code_cells()).splitlines()
    return "\n".join("pass" if line.startswith(("%", "!")) else line
                     for line in lines)


def modules(root: Path = ROOT) -> dict[str, int]:
    "Module → position of the chapter that exports it."
    return {f"normalnorm.{c.module}": i for i, c in enumerate(chapters(root))
            if i}


def violations(root: Path = ROOT) -> list[str]:
    """Imports in the chapters' text of what only a later chapter exports, and
    imports between rooms against the arrows.
    """
    position, found = modules(root), []
    for i, c in enumerate(chapters(root)):
        if not i:
            continue                # the landing page is exempt
        names = imported_modules(code_of(c))
        found += [f"{c.name} imports {name} of a later chapter"
                  for name in sorted(names) if position.get(name, -1) > i]
        room = c.module.split(".")[0]
        if room in ROOMS:
            exported = "\n".join(s for s in c.code_cells() if "#| export" in s)
            for name in sorted(imported_modules(exported)):
                other = name.split(".")[1] if "." in name else ""
                if other in (set(ROOMS) | {"checks"}) - ROOMS[room] - {room}:
                    allowed = ", ".join(sorted(ROOMS[room]))
                    found.append(f"{c.module} imports {name}: {room} may "
                                 "import "
                                 f"{allowed or 'nothing of the package'}")
    return found


def recorded_violations(root: Path = ROOT) -> list[str]:
    """The same from the record of each chapter's last run: the modules that
    really were loaded.
    """
    position, found = modules(root), []
    for i, c in enumerate(chapters(root)):
        for file in Run(c).record().get("dependencies", {}):
            name = (file.removesuffix(".py")
                        .replace("/", ".").removesuffix(".__init__"))
            if i and position.get(name, -1) > i and c.module not in BY_NAME:
                found.append(f"{c.name} loaded {name} of a later chapter")
    return found
