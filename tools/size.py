"""How heavy the code is: statements, and characters without comments,
docstrings and layout, of Python files and of the code cells that export
nothing. `python -m tools.size` prints them by folder.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

from tools.chapters import ROOT
from tools.files import load

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
FOLDERS = "benchmarks examples nbs normalnorm tests tools".split()
MADE = {"checks", "book", "_modidx.py"}  # from the chapters
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def weight(source: str) -> Counter:
    "Of one piece of code."
    nodes = [*ast.walk(ast.parse(source))]
    docs = [
        node.body[0]
        for node in nodes
        if isinstance(node, DOCUMENTED)
        and ast.get_docstring(node, clean=False) is not None
    ]
    lines = {n for d in docs for n in range(d.lineno, d.end_lineno + 1)}
    size = sum(
        len(token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in lines)
    )
    statements = sum(isinstance(node, ast.stmt) for node in nodes) - len(docs)
    return Counter(statements=statements, characters=size)


def pieces(path: Path) -> list[str]:
    "The code of a file; of a notebook, of the cells that export nothing."
    if path.suffix == ".py":
        return [path.read_text(encoding="utf-8")]
    exported = re.compile(r"^#\|\s*(?:export|exporti|default_exp)\b", re.M)
    code = [
        "".join(cell["source"])
        for cell in load(path)["cells"]
        if cell["cell_type"] == "code"
    ]
    magic = re.compile(r"^\s*[%!].*$", re.M)
    return [magic.sub("", c) for c in code if not exported.search(c)]


def sizes(root: Path = ROOT) -> dict[str, Counter]:
    "By folder; what is made of chapters when a wheel is built is left out."
    found: dict[str, Counter] = {".": Counter()}
    for folder in FOLDERS:
        found[folder] = Counter()
        for path in sorted((root / folder).rglob("*")):
            inside = path.relative_to(root).parts[1:]
            made = folder == "normalnorm" and MADE & {*inside}
            if path.suffix in (".py", ".ipynb") and not made:
                for piece in pieces(path):
                    found[folder] += weight(piece)
    for path in root.glob("*.py"):
        found["."] += weight(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    found = sizes()
    for name, of in [*found.items(), ("all", sum(found.values(), Counter()))]:
        print(f"{name:12} {of['statements']:7} {of['characters']:9}")
