"""Which code a page folds, and the words that stand in its place.

A reader sees prose, formulas, results, and the code that is short enough to be
read in passing. Checks, and any cell of more than a dozen lines that is
exported, draws a figure or is C++, are folded behind a line that says what they
are; other cells are folded beyond two dozen lines, or where they only import.
Of what checks share a page has the names only, where they are many.
`#| code-fold: true` folds a cell and `#| code-fold: false` keeps it open,
whatever its length.
"""

import ast
import html
import re
from dataclasses import dataclass
from functools import lru_cache

SOME, FEW = 4, 12
LISTED = 3  # definitions of checks that are listed one by one
MANY = 24  # lines of a cell that is neither exported nor a figure


# A long value goes on in lines that are indented by two spaces or more, as in
# YAML: `#| fig-cap: "The curve`, `#|   of the estimates."`.
LEADING = re.compile(r"\A(?:\s*#\|.*(?:\n|\Z))+")


def directives(source: str) -> dict[str, str]:
    "A cell's leading `#|` directives; those without a value have ''."
    head = LEADING.match(source)
    text = re.sub(r"[ \t]*\n\s*#\|[ \t]{2,}", " ", head[0] if head else "")
    return {
        m[1]: m[2].strip().strip("\"'")
        for m in re.finditer(r"^\s*#\|\s*([\w-]+):?[ \t]*(.*)$", text, re.M)
    }


def without_directives(source: str) -> str:
    return LEADING.sub("", source).strip("\n")


def cell_tags(found: dict[str, str]) -> list[str]:
    """The tags of Jupyter Book that do what the directives of nbdev and Quarto
    ask for.
    """
    off = lambda name: found.get(name, "").lower() == "false"
    asked = {
        "remove-cell": "hide" in found or "default_exp" in found,
        "remove-input": off("echo"),
        "remove-output": off("output"),
    }
    return [tag for tag in asked if asked[tag]]


def shows_export(found: dict[str, str]) -> bool:
    "Whether the page shows a cell, perhaps folded, that the library contains."
    return "export" in found and "remove-cell" not in cell_tags(found)


@lru_cache(maxsize=None)
def tree_of(code: str) -> ast.Module | None:
    "Its syntax; None where it is not plain Python: %magic, a cell that fails."
    try:
        return ast.parse(code)
    except SyntaxError:
        return None


def body_of(code: str) -> list[ast.stmt]:
    tree = tree_of(code)
    return tree.body if tree else []


@lru_cache(maxsize=None)
def python_lines(code: str) -> int:
    "Lines with code: no empty ones, comments, docstrings."
    kept = {
        number
        for number, line in enumerate(code.split("\n"), 1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    lines, docstrings = set(), set()
    for node in ast.walk(tree_of(code) or ast.Module([], [])):
        if isinstance(node, (ast.Constant, ast.JoinedStr)):  # may have any line
            lines |= set(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, documented) and ast.get_docstring(node):
            first = node.body[0]
            docstrings |= set(range(first.lineno, first.end_lineno + 1))
    return len((kept | lines) - docstrings)


def native_lines(code: str) -> int:
    "The same of C++."
    bare = re.sub(
        r"/\*.*?\*/|//[^\n]*",
        lambda m: "\n" * m[0].count("\n"),
        code,
        flags=re.S,
    )
    return sum(bool(line.strip()) for line in bare.split("\n"))


@dataclass(frozen=True)
class Fold:
    """What stands for a folded cell: its kind, and lines of (code, words),
    either of which may be empty.
    """

    kind: str
    lines: tuple[tuple[str, str], ...]

    def html(self) -> str:
        "The inside of a `<summary>`."
        return "<br>".join(
            " ".join(
                [f"<code>{html.escape(code)}</code>"] * bool(code)
                + [inline(words)] * bool(words)
            )
            for code, words in self.lines
        )

    def text(self) -> str:
        "In one line, for a comment: names without their arguments."
        return ", ".join(
            code.split("(")[0] or words.replace("`", "")
            for code, words in self.lines
        )


def inline(words: str) -> str:
    "`names` in words as code."
    return "".join(
        f"<code>{html.escape(p[1:-1])}</code>" if i % 2 else html.escape(p)
        for i, p in enumerate(re.split(r"(`[^`\n]+`)", words))
    )


def first_sentence(doc: str) -> str:
    words = " ".join(doc.strip().split("\n\n")[0].split())
    found = re.match(r"(.*?[^.\s][.!?:])(?: (?=[A-ZΑ-Ω`])|$)", words)
    return (found[1] if found else words).rstrip(":")


def given(node: ast.ClassDef) -> list[ast.AnnAssign]:
    "The fields of a dataclass or named tuple that its constructor takes."
    return [
        n
        for n in node.body
        if isinstance(n, ast.AnnAssign)
        and "init=False" not in ast.unparse(n.value or n.target)
    ]


def signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    """As it is called: names and defaults, without annotations; those of the
    constructor for a class.
    """
    function = node
    if isinstance(node, ast.ClassDef):
        function = next(
            (
                n
                for n in node.body
                if isinstance(n, ast.FunctionDef) and n.name == "__init__"
            ),
            None,
        )
        if function is None:
            fields = [ast.unparse(n.target) for n in given(node)]
            return f"{node.name}({', '.join(fields)})" if fields else node.name
    a = function.args
    copy = ast.arguments(
        **{
            field: [ast.arg(x.arg) for x in getattr(a, field)]
            for field in ("posonlyargs", "args", "kwonlyargs")
        },
        vararg=a.vararg and ast.arg(a.vararg.arg),
        defaults=a.defaults,
        kwarg=a.kwarg and ast.arg(a.kwarg.arg),
        kw_defaults=a.kw_defaults,
    )
    if isinstance(node, ast.ClassDef):
        copy.args = copy.args[1:]
    return f"{node.name}({ast.unparse(copy)})"


def names(found: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in found)


def assigned(body: list[ast.stmt]) -> list[str]:
    "The names that a cell's own level sets."
    targets = [
        t
        for n in body
        if isinstance(n, (ast.Assign, ast.AnnAssign))
        for t in (n.targets if isinstance(n, ast.Assign) else [n.target])
    ]
    return list(dict.fromkeys(t.id for t in targets if isinstance(t, ast.Name)))


def definitions(code: str) -> list[tuple[str, str]]:
    """What a cell defines: signatures with the first sentence of their
    docstrings; other names in one line.
    """
    body = body_of(code)
    defined = [
        n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef))
    ]
    public = [n for n in defined if not n.name.startswith("_")]
    lines = [
        (signature(n), first_sentence(ast.get_docstring(n) or ""))
        for n in public or defined
    ]
    rest = [n.name for n in defined if public and n not in public]
    rest += [] if defined else assigned(body)
    if rest:
        lines.append(("", f"and {names(rest)}" if lines else names(rest)))
    return lines


def is_setup(code: str) -> bool:
    "Whether a cell does little else than import."
    body = body_of(code)
    imports = sum(isinstance(n, (ast.Import, ast.ImportFrom)) for n in body)
    return bool(body) and imports >= 2 * (len(body) - imports)


NATIVE_NAME = re.compile(
    r"^(?!return|typedef|using|namespace|else)[A-Za-z_][\w:<>,&*\s]*?"
    r"\b([A-Za-z_]\w*)\([^;]*?\)\s*(?:const\s*)?\{",
    re.M,
)
NATIVE_TYPE = re.compile(
    r"^(?:template\s*<[^>]*>\s*)?(?:struct|class|enum)\s+"
    r"(\w+)[^;{]*\{",
    re.M,
)


def native(code: str) -> list[tuple[str, str]]:
    "The first sentence of the comment that opens it, or the names it defines."
    comment = re.match(r"\s*((?://[^\n]*(?:\n|$))+|/\*.*?\*/)", code, re.S)
    if comment:
        words = re.sub(
            r"^\s*(?://|/\*+|\*/?)|\*/\s*$", "", comment[1], flags=re.M
        )
        return [("", first_sentence(words.strip("- \n")))]  # // ---- Words
    bare = re.sub(r"/\*.*?\*/|//[^\n]*", "", code, flags=re.S)
    found = list(
        dict.fromkeys(NATIVE_TYPE.findall(bare) + NATIVE_NAME.findall(bare))
    )
    return [("", names(found) if found else "C++")]


def fold(found: dict[str, str], code: str, raw: bool = False) -> Fold | None:
    """What stands for a cell with these directives, or None where its code is
    shown (or is not there at all: hidden cells are not our business).
    """
    asked = found.get("code-fold", "").lower()
    if asked == "false" or not code.strip():
        return None
    length, most = (native_lines if raw else python_lines)(code), FEW
    if raw:
        kind, lines = "cpp", native(code)
    elif "check" in found:
        claims = len(re.findall(r"^@claim\b", code, re.M))
        words = (
            f"code of the {claims} checks"
            if claims > 1
            else "code of the check"
        )
        known = [] if claims else definitions(code)
        if len(known) > LISTED:
            called = names([line.split("(")[0] for line, _ in known if line])
            known = [("", f"what checks of this page use: {called}")]
        kind, lines, most = "check", known or [("", words)], -1
    elif "export" in found:
        most = SOME if is_setup(code) else FEW
        kind, lines = "export", definitions(code) or [("", "imports")]
    elif "fig-cap" in found or found.get("label", "").startswith("fig-"):
        kind, lines = "figure", [("", "code of the figure")]
    elif is_setup(code):
        kind, lines, most = "code", [("", "imports")], SOME
    else:
        named = [line for line in definitions(code) if line[0]]
        kind, lines, most = "code", named or [("", "code")], MANY
    folded = asked == "true" or length > most
    return Fold(kind, tuple(lines)) if folded else None


def fold_of(source: str, raw: bool = False) -> Fold | None:
    "What stands for a cell on the page; None where its code is seen or hidden."
    found = directives(source)
    hidden = {"remove-cell", "remove-input"} & set(cell_tags(found))
    return None if hidden else fold(found, without_directives(source), raw)
