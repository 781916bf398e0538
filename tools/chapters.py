"The list of chapters, read from _toc.yml: the only place where it is written."

import csv
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from tools.files import ROOT, load

WORKSHOP = 7  # the part whose chapters every other chapter may import
APPENDICES = 9  # pages about the book: they are not run elsewhere
HANDBOOK = "Handbook · "  # so begin the captions of its parts


@dataclass(frozen=True)
class Chapter:
    "One notebook of the book."

    name: str
    root: Path = ROOT

    @property
    def path(self) -> Path:
        return self.root / "nbs" / f"{self.name}.ipynb"

    @property
    def module(self) -> str:
        "The dotted module that it exports, or its slug where it exports none."
        match = re.search(
            r"^#\|\s*default_exp\s+(\S+)", "\n".join(self.code_cells()), re.M
        )
        return match.group(1) if match else self.name.split("_", 1)[-1]

    @property
    def part(self) -> int | None:
        "The first digit of its number; None for the landing page."
        return int(self.name[0]) if self.name[:1].isdigit() else None

    def cells(self) -> list[dict]:
        """Its cells, each with its source as one text.

        Raises `ValueError` where the file is no notebook.
        """
        try:
            cells = load(self.path)["cells"]
        except ValueError as error:
            raise ValueError(
                f"{self.path.name} is not a notebook: {error}"
            ) from error
        for cell in cells:
            cell["source"] = "".join(cell["source"])
        return cells

    def code_cells(self) -> list[str]:
        return [c["source"] for c in self.cells() if c["cell_type"] == "code"]


def cell(kind: str, source: str, name: str, **metadata) -> dict:
    "A cell as nbformat 4.5 has it."
    run = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {
        "cell_type": kind,
        "id": name,
        "metadata": metadata,
        "source": source,
        **run,
    }


def notebook(cells: list[dict]) -> dict:
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            }
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


_contents = lru_cache(maxsize=8)(yaml.safe_load)  # asked for on every page


def parts(root: Path = ROOT) -> list[tuple[str, list[str]]]:
    """(caption, pages) in reading order, the landing page first; a page is its
    file without an ending, `nbs/…`.
    """
    toc = _contents((root / "_toc.yml").read_text(encoding="utf-8"))
    return [("", [toc["root"]])] + [
        (part.get("caption", ""), [entry["file"] for entry in part["chapters"]])
        for part in toc["parts"]
    ]


def pages(root: Path = ROOT) -> list[str]:
    return [page for _, listed in parts(root) for page in listed]


def halves(root: Path = ROOT) -> dict[str, list[tuple[str, list[str]]]]:
    "The parts of the book, and those of the handbook without that word."
    found: dict[str, list] = {"The book": [], "The handbook": []}
    for caption, listed in parts(root):
        half = "The handbook" if caption.startswith(HANDBOOK) else "The book"
        found[half].append((caption.removeprefix(HANDBOOK), listed))
    return found


def handbook(root: Path = ROOT) -> list[str]:
    "The pages of the handbook, its front page first; all others are the book."
    return [
        page for _, listed in halves(root)["The handbook"] for page in listed
    ]


def chapters(root: Path = ROOT) -> list[Chapter]:
    """Every notebook of the table of contents, in reading order, the landing
    page first.

    Pages that are no notebooks are left out.
    """
    found = [
        Chapter(page.rsplit("/", 1)[-1], root)
        for page in pages(root)
        if not (root / f"{page}.md").exists()
    ]
    if missing := [c.name for c in found if not c.path.exists()]:
        raise FileNotFoundError(
            f"_toc.yml names chapters that do not exist: {', '.join(missing)}"
        )
    return found


def homes(root: Path = ROOT) -> dict[str, str]:
    "Module of the package → the chapter that exports it."
    return {f"normalnorm.{c.module}": c.name for c in chapters(root)}


def build_order(root: Path = ROOT) -> list[Chapter]:
    """The chapters in the order in which one builds on another, which is that
    of their numbers, wherever they are read: the landing page, the workshop,
    then the others.
    """
    return sorted(
        chapters(root),
        key=lambda c: (c.part is not None, c.part != WORKSHOP, c.name),
    )


def renamed(root: Path = ROOT) -> dict[str, str]:
    "Old name → new name of the chapters that once had another number."
    table = root / "nbs" / "renamed.csv"
    if not table.exists():
        return {}
    with table.open(encoding="utf-8", newline="") as file:
        return {row["old"]: row["new"] for row in csv.DictReader(file)}


def chapter(name: str, root: Path = ROOT) -> Chapter:
    by_name = {c.name: c for c in chapters(root)}
    if name not in by_name:
        raise KeyError(
            f"no chapter is called {name!r}; _toc.yml has {', '.join(by_name)}"
        )
    return by_name[name]
