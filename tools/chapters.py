"The list of chapters, read from _toc.yml: the only place where it is written."
import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent


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
        match = re.search(r"^#\|\s*default_exp\s+(\S+)", "\n".join(self.code_cells()), re.M)
        return match.group(1) if match else self.name.split("_", 1)[-1]

    def cells(self) -> list[dict]:
        return json.loads(self.path.read_text(encoding="utf-8"))["cells"]

    def code_cells(self) -> list[str]:
        return ["".join(c["source"]) for c in self.cells() if c["cell_type"] == "code"]


def table_of_contents(root: Path = ROOT) -> dict:
    return yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))


def chapters(root: Path = ROOT) -> list[Chapter]:
    "Every notebook of the table of contents, in reading order, the landing page first. Pages that are no notebooks are left out."
    toc = table_of_contents(root)
    files = [toc["root"], *(entry["file"] for part in toc["parts"] for entry in part["chapters"])]
    found = [Chapter(file.rsplit("/", 1)[-1], root) for file in files
             if not (root / f"{file}.md").exists()]
    missing = [c.name for c in found if not c.path.exists()]
    if missing:
        raise FileNotFoundError(f"_toc.yml names chapters that do not exist: {', '.join(missing)}")
    return found


def chapter(name: str, root: Path = ROOT) -> Chapter:
    by_name = {c.name: c for c in chapters(root)}
    if name not in by_name:
        raise KeyError(f"no chapter is called {name!r}; _toc.yml has {', '.join(by_name)}")
    return by_name[name]
