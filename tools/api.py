"""The API page, read from the package's source: nothing is imported.

Docstrings are plain text with `names` and indented examples.
"""

import ast
import inspect
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from tools import folding
from tools.chapters import chapters, homes

MARK = "% api: tools/api.py writes the entries here\n"
HIDDEN = ("_modidx.py",)


@dataclass(frozen=True)
class Entry:
    """One public function or class: its module, name, signature, docstring, and
    (for a class) its public methods.
    """

    module: str
    name: str
    kind: str
    signature: str
    doc: str
    methods: tuple[tuple[str, str], ...] = ()

    def target(self, prefix: str = "api") -> str:
        """Its anchor.

        Targets have no case, and a class and a function may differ in case
        only.
        """
        return (
            f"{prefix}-{'class-' if self.kind == 'class' else ''}"
            f"{self.module}.{self.name}".lower()
        )


def module_target(module: str) -> str:
    return f"api-module-{module}".lower()


def files(root: Path) -> list[Path]:
    "The modules of the package; the checks are the ledger's business."
    folder = root / "normalnorm"
    return [
        p
        for p in sorted(folder.rglob("*.py"))
        if "checks" not in p.relative_to(folder).parts and p.name not in HIDDEN
    ]


def dotted(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def call(name: str, arguments: list[str], returns: str = "") -> str:
    """A signature in one line, or in several where one would be too long to
    read.
    """
    line = f"{name}({', '.join(arguments)}){returns}"
    return (
        line
        if len(line) <= 80
        else f"{name}(\n"
        + "".join(f"    {a},\n" for a in arguments)
        + f"){returns}"
    )


def signature(name: str, node: ast.FunctionDef, method: bool = False) -> str:
    """The signature of a function as its source has it, without `self` for a
    method.
    """
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    show = lambda x, default: (
        ast.unparse(x)
        + (f" = {ast.unparse(default)}" if default is not None else "")
    )
    arguments = [show(x, d) for x, d in zip(plain, defaults)]
    if a.posonlyargs:
        arguments.insert(len(a.posonlyargs), "/")
    if a.vararg or a.kwonlyargs:
        arguments.append(f"*{ast.unparse(a.vararg)}" if a.vararg else "*")
    arguments += [show(x, d) for x, d in zip(a.kwonlyargs, a.kw_defaults)]
    if a.kwarg:
        arguments.append(f"**{ast.unparse(a.kwarg)}")
    if method and arguments and arguments[0] in ("self", "cls"):
        arguments = arguments[1:]
    return call(
        name,
        arguments,
        f" -> {ast.unparse(node.returns)}" if node.returns else "",
    )


def class_signature(node: ast.ClassDef) -> str:
    "The constructor's arguments, or the fields of a dataclass or named tuple."
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return signature(node.name, item, method=True).removesuffix(
                " -> None"
            )
    fields = [ast.unparse(n) for n in folding.given(node)]
    return call(node.name, fields or [ast.unparse(b) for b in node.bases])


def public(text: str, module: str) -> list[Entry]:
    "The public functions and classes that a module defines, in its order."

    def entry(node: ast.FunctionDef | ast.ClassDef) -> Entry:
        about = module, node.name
        doc = ast.get_docstring(node) or ""
        if isinstance(node, ast.FunctionDef):
            return Entry(*about, "function", signature(node.name, node), doc)
        methods = tuple(
            (signature(m.name, m, method=True), ast.get_docstring(m))
            for m in node.body
            if isinstance(m, ast.FunctionDef)
            and not m.name.startswith("_")
            and ast.get_docstring(m)
        )
        return Entry(*about, "class", class_signature(node), doc, methods)

    return [
        entry(node)
        for node in ast.parse(text).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
    ]


@lru_cache(maxsize=4)
def entries(root: Path) -> dict[str, list[Entry]]:
    """Module → its entries; modules that define nothing public are left out, as
    is the package's own `__init__`.
    """
    return {
        module: listed
        for path in files(root)
        if (module := dotted(path, root)) != "normalnorm"
        and (listed := public(path.read_text(encoding="utf-8"), module))
    }


def defined_names(source: str) -> set[str]:
    """The functions and classes that a cell defines; none for a cell that is no
    plain Python.
    """
    return {
        n.name
        for n in folding.body_of(source)
        if isinstance(n, (ast.FunctionDef, ast.ClassDef))
    }


def prose(text: str, links: dict[str, str]) -> str:
    """Plain text as markdown: special characters stay what they are, `names`
    that the API has become links, and so do equations of the book (@eq-…).
    """

    def piece(i: int, part: str) -> str:
        if not i % 2:
            return re.sub(r"([\\*_\[\]<>{}$#|~@^])", r"\\\1", part)
        if part.startswith("@"):
            return f"{{eq}}`{part[1:]}`"
        name = part[1:-1]
        return f"[{part}](#{links[name]})" if name in links else part

    parts = re.split(r"(`[^`\n]+`|@eq-\w+(?:-\w+)*)", text)
    return "".join(piece(i, part) for i, part in enumerate(parts))


def markdown(doc: str, links: dict[str, str]) -> str:
    "A docstring: paragraphs, lists, and indented blocks as code."
    blocks = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        lines = block.split("\n")
        if all(line.startswith("    ") for line in lines):
            code = "\n".join(line[4:] for line in lines)
            # an example with an empty line in it
            if blocks and blocks[-1].startswith("```python"):
                blocks[-1] = (
                    blocks[-1].removesuffix("\n```") + f"\n\n{code}\n```"
                )
            else:
                blocks.append(f"```python\n{code}\n```")
        else:
            blocks.append(
                prose(
                    "\n".join(
                        line if line.lstrip().startswith("- ") else line.strip()
                        for line in lines
                    ),
                    links,
                )
            )
    return "\n\n".join(blocks)


def page(root: Path) -> str:
    "The entries of the whole package, module by module, in markdown."
    known, out = entries(root), []
    visible, home = exported_names(root), homes(root)
    targets = lambda listed: {e.name: e.target() for e in listed}
    everywhere = targets(chain.from_iterable(known.values()))
    for path in files(root):
        module = dotted(path, root)
        if module not in known:
            continue
        text = path.read_text(encoding="utf-8")
        links = everywhere | targets(known[module])
        out += [
            f"({module_target(module)})=",
            "## " + prose(module.removeprefix("normalnorm."), {}),
            "",
            markdown(ast.get_docstring(ast.parse(text)) or "", links),
            "",
        ]
        if module in home:
            out += [f"Chapter: {{doc}}`{home[module]}`.", ""]
        for e in known[module]:
            out += [
                f"({e.target()})=",
                "### " + prose(e.name, {}),
                "",
                f"```python\n{e.signature}\n```",
                "",
                markdown(
                    e.doc, {k: v for k, v in links.items() if k != e.name}
                ),
                "",
            ]
            for method, doc in e.methods:
                out += [
                    f"```python\n.{method}\n```"
                    if "\n" in method
                    else f"`.{method}`",
                    "",
                    markdown(doc, links),
                    "",
                ]
            if (module, e.name) in visible:
                out += [f"→ [where it is derived](#{e.target('code')})", ""]
    return "\n".join(out)


def exported_names(root: Path) -> set[tuple[str, str]]:
    """(module, name) of what visible cells of the listed chapters export: these
    have a label to link to.
    """
    return {
        (f"normalnorm.{chapter.module}", name)
        for chapter in chapters(root)
        for cell in chapter.code_cells()
        if folding.shows_export(folding.directives(cell))
        for name in defined_names(folding.without_directives(cell))
    }


@lru_cache(maxsize=4)
def claims(root: Path) -> list[dict[str, str]]:
    """What each claim of the ledger says of itself, and its chapter, from the
    source of normalnorm/checks.
    """
    found = []
    for path in sorted((root / "normalnorm/checks").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        chapter = re.search(r'^__chapter__ = "(.+)"', text, re.M)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "claim":
                found.append(
                    {
                        "chapter": chapter[1],
                        "id": node.args[0].value,
                        "verdict": "holds",
                        "kind": "",
                        "source": "",
                    }
                    | {
                        k.arg: k.value.value
                        for k in node.keywords
                        if isinstance(k.value, ast.Constant)
                    }
                )
    return sorted(found, key=lambda said: said["chapter"])
