"""`make mutants`: wrong versions of the library, one change each, of which the
tests must notice nearly all. The outcome is in results/mutation.

A mutant is one change of an operator, a sign, a constant, a comparison, a
condition, a call or a statement, in `theory`, `layers`, `analysis`,
`experiments` or the C++ kernel. A fixed seed draws them, in proportion from
every file. Each is loaded in a process forked from one that has imported the
large libraries (and nothing of ours), and meets the claims of the ledger and
the tests that run its line, the cheapest first, 30 seconds of them at most,
until one fails. What ran which line is measured once, and again when the
library or the tests change.

    python -m tools.mutate --package theory --count 20
    python -m tools.mutate --survivors
    python -m tools.mutate --only 1f9c2ab0d3e4      # with the tests' output
    python -m tools.mutate --record                 # results/mutation

Outcomes are appended to _build/mutation/mutants.jsonl, a line each; a run that
was interrupted goes on from there. Survivors are tried again when the tests
have changed. A mutant that no test can notice is named, with the argument, in
results/mutation/equivalents.json.
"""

import argparse
import ast
import copy
import difflib
import fnmatch
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import platform
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "normalnorm/layers/engines/native.cpp"
PACKAGES = {
    name: [f"normalnorm/{name}/*.py", f"normalnorm/{name}/**/*.py"]
    for name in ("theory", "layers", "analysis", "experiments")
}
PACKAGES["kernel"] = [KERNEL]
COUNTS = {"kernel": 60}  # and a third as many for AVX2
COUNT = 60
SEED = 15
SECONDS = 30.0  # of tests, for one mutant
PROCESSORS = {
    "native": ["-march=native", "-mprefer-vector-width=512"],
    "AVX-512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "AVX2": ["-march=x86-64-v3"],
    "SSE2": ["-march=x86-64"],
}
# Imported before anything is forked; none of them starts a thread.
PRELOAD = """numpy scipy.stats scipy.special scipy.optimize scipy.integrate
    scipy.linalg mpmath hypothesis hypothesis.strategies
    hypothesis.extra.numpy pytest doctest torch torch.func
    torch._dynamo torch._inductor.config torch.distributed
    torch.utils.data lightning.fabric lightning_fabric tqdm""".split()
# What runs the book, a browser, other processes or other installations.
UNUSED = """test_appendices test_benchmarks test_book test_chapters test_figures
    test_fsdp test_lab test_mutate test_packaging test_pages test_peers
    test_cli test_processors test_spelling test_tools test_widget""".split()
# These, and claims, may start processes, which load the mutant, too. What
# those run is not seen: every line of the file of the same name is taken for
# it, `sync_decorrelated` of this one.
SEVERAL = ["tests/test_sync_decorrelated.py", "tests/test_compiler.py"]
# Written for mutants that other tests let through.
PINNED = ["tests/test_pinned.py", "tests/test_theory_defaults.py"]
# Of a test with more parameters than this, every so many are used.
PARAMETERS = 60
# A test that measures time or memory says nothing on a loaded machine.
MEASURES = re.compile(
    r"perf_counter|monotonic\(|time\.time|process_time"
    r"|getrusage|tracemalloc|ru_maxrss|time\.sleep"
)


# ---- mutants ----


@dataclass(frozen=True)
class Mutant:
    "One change of one file: `text` in place of the characters start … end."

    file: str
    function: str  # qualified name; "" at the top of the module
    lines: tuple[int, int]  # that are changed
    start: int
    end: int
    operator: str
    text: str
    before: str  # the lines that change, without indentation
    after: str
    # where a test must have been to notice it: lines, or else those around
    around: tuple[tuple[int, int], ...] = ()
    names: tuple[str, ...] = ()  # what a statement outside functions binds
    processor: str = "native"  # for which the kernel is compiled
    content: str = ""  # digest of the file

    @property
    def key(self) -> str:
        "What stays the same while the rest of the file changes."
        return digest(
            "\0".join(
                (
                    self.file,
                    self.function,
                    self.operator,
                    self.before,
                    self.after,
                    self.processor,
                )
            )
        )

    @property
    def id(self) -> str:
        return digest("\0".join((self.content, self.key, str(self.start))))

    def of(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def __str__(self) -> str:
        where = f"{self.file}:{self.lines[0]} {self.function}".rstrip()
        return f"{where} [{self.operator}] {self.before} → {self.after}"


def digest(data: str | bytes) -> str:
    data = data.encode() if isinstance(data, str) else data
    return hashlib.sha256(data).hexdigest()[:12]


ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
OPPOSITE = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
PAIRS = """exp expm1, log log1p, max min, amax amin, argmax argmin, sum mean,
    maximum minimum, fmax fmin, sqrt square, rsqrt sqrt, sin cos, floor ceil,
    any all, ones zeros, ones_like zeros_like, sinh cosh, abs neg"""
SWAPS = dict(p.split() for p in PAIRS.split(","))
SWAPS = {**{b: a for a, b in SWAPS.items()}, **SWAPS}
TYPES = (ast.AnnAssign, ast.arg, ast.FunctionDef, ast.AsyncFunctionDef)


def changed_number(value: int | float) -> list[tuple[str, int | float]]:
    """Other numbers for a constant: ±1, or 5 % more; a thousand times as much
    for a threshold that only means "next to nothing"."""
    if isinstance(value, int):
        return [("integer + 1", value + 1), ("integer - 1", value - 1)]
    factor = 1000 if abs(value) < 1e-6 else 1.05
    return [("constant", value * factor if value else 0.01)]


def header(node: ast.stmt) -> tuple[int, int]:
    "The lines of a statement, without the block that belongs to it."
    first = min(
        [node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]
    )
    body = getattr(node, "body", None)
    return first, max(body[0].lineno - 1, first) if body else node.end_lineno


def bound(statement: ast.stmt) -> tuple[str, ...]:
    "The names that a statement binds; not those within a comprehension."
    inner = {
        id(n)
        for c in ast.walk(statement)
        if isinstance(c, ast.comprehension)
        for n in ast.walk(c.target)
    }
    return tuple(
        sorted(
            {
                n.id
                for n in ast.walk(statement)
                if isinstance(n, ast.Name)
                and id(n) not in inner
                and isinstance(n.ctx, ast.Store)
            }
        )
    )


class _Sites(ast.NodeVisitor):
    "All mutants of a module, in the order of its text."

    def __init__(self, file: str, source: str):
        self.file, self.source, self.content = file, source, digest(source)
        self.scope, self.statements, self.found = [], [], []
        self.functions, self.lambdas = [], 0
        data = source.split("\n")
        self.rows, self.starts = data, [0]
        for row in data:
            self.starts.append(self.starts[-1] + len(row) + 1)

    def place(self, line: int, column: int) -> int:
        row = self.rows[line - 1].encode()[:column]
        return self.starts[line - 1] + len(row.decode())

    def add(self, node: ast.AST, operator: str, text: str) -> None:
        start = self.place(node.lineno, node.col_offset)
        end = self.place(node.end_lineno, node.end_col_offset)
        if not text.startswith("(") and not isinstance(node, ast.stmt):
            text = f"({text})" if re.search(r"[^\w.]", text) else text
        if self.source[start:end] == text:
            return
        first, last = node.lineno, node.end_lineno
        left, right = self.starts[first - 1], self.starts[last] - 1
        before = self.source[left:right]
        after = self.source[left:start] + text + self.source[end:right]
        flat = (" ".join(s.split()) for s in (before, after))
        statement = self.statements[-1] if self.statements else node
        names, around = (), ()
        if self.functions:
            function = self.functions[-1]
            if function is statement:  # a default
                around = (header(function),)
            else:
                around = (first, last), header(statement)
            around += ((header(function)[0], function.end_lineno),)
        else:
            names = bound(statement)
            around = ((first, last),) * bool(self.lambdas)
        self.found.append(
            Mutant(
                self.file,
                ".".join(self.scope),
                (first, last),
                start,
                end,
                operator,
                text,
                *flat,
                around,
                names,
                content=self.content,
            )
        )

    def inside(self) -> bool:
        "Whether this is run by a call, not by an import."
        return bool(self.functions)

    def variant(self, node: ast.AST, operator: str, **changes) -> None:
        other = copy.copy(node)
        for name, value in changes.items():
            setattr(other, name, value)
        self.add(node, operator, ast.unparse(other))

    def visit(self, node):
        statement = isinstance(node, ast.stmt)
        self.statements += [node] if statement else []
        super().visit(node)
        if statement:
            self.statements.pop()

    def body(self, node) -> None:
        for child in node.body:
            self.visit(child)

    # what is left alone: texts, types, messages, the list of public names
    def visit_JoinedStr(self, node):
        pass

    def visit_Raise(self, node):
        pass

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_Assign(self, node):
        if isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == "__all__":
                return
        if not self.inside() and isinstance(node.value, ast.BinOp):
            if isinstance(node.value.op, ast.BitOr):  # a type
                return
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_Lambda(self, node):
        self.lambdas += 1
        self.generic_visit(node)
        self.lambdas -= 1

    def visit_FunctionDef(self, node):
        for decorator in node.decorator_list:
            self.visit(decorator)
        self.scope.append(node.name)
        self.functions.append(node)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self.body(node)
        self.functions.pop()
        self.scope.pop()

    def visit_ClassDef(self, node):
        for decorator in node.decorator_list:
            self.visit(decorator)
        self.scope.append(node.name)
        self.body(node)
        self.scope.pop()

    # what is changed
    def visit_BinOp(self, node):
        texts = any(
            isinstance(s, ast.JoinedStr)
            or isinstance(s, ast.Constant)
            and isinstance(s.value, (str, bytes))
            for s in (node.left, node.right)
        )
        if type(node.op) in ARITHMETIC and not texts:
            self.variant(node, "arithmetic", op=ARITHMETIC[type(node.op)]())
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        if type(node.op) in ARITHMETIC:
            self.variant(node, "arithmetic", op=ARITHMETIC[type(node.op)]())
        self.add(node, "statement", "pass")
        self.visit(node.value)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.USub):
            self.add(node, "sign", f"({ast.unparse(node.operand)})")
        elif isinstance(node.op, ast.Not):
            self.add(node, "negation", f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.add(node, "truth", str(not node.value))
        elif isinstance(node.value, (int, float)):
            for operator, value in changed_number(node.value):
                self.add(
                    node, operator, f"({value!r})" if value < 0 else repr(value)
                )

    def visit_Compare(self, node):
        for k, op in enumerate(node.ops):
            for operator, table in (
                ("comparison", OPPOSITE),
                ("boundary", BOUNDARY),
            ):
                if type(op) in table:
                    ops = list(node.ops)
                    ops[k] = table[type(op)]()
                    self.variant(node, operator, ops=ops)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        self.variant(node, "and, or", op=other())
        self.generic_visit(node)

    def condition(self, test: ast.expr) -> None:
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self.add(test, "negation", f"(not ({ast.unparse(test)}))")

    def visit_If(self, node):
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        self.condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self.condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node):
        for test in node.ifs:
            self.condition(test)
        self.generic_visit(node)

    def visit_Call(self, node):
        name = node.func
        if isinstance(name, ast.Name) and name.id in SWAPS:
            self.variant(node, "call", func=ast.Name(SWAPS[name.id]))
        elif isinstance(name, ast.Attribute) and name.attr in SWAPS:
            func = ast.Attribute(name.value, SWAPS[name.attr])
            self.variant(node, "call", func=func)
        elif isinstance(name, ast.Attribute) and name.attr.startswith("clamp"):
            for k, word in enumerate(node.keywords):
                if word.arg in ("min", "max"):
                    words = list(node.keywords)
                    other = {"min": "max", "max": "min"}[word.arg]
                    words[k] = ast.keyword(other, word.value)
                    self.variant(node, "call", keywords=words)
        self.generic_visit(node)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call) and self.inside():
            if ast.unparse(node.value.func) != "super().__init__":
                self.add(node, "statement", "pass")
        self.generic_visit(node)


def python_mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of a Python source.

    Example: `x + 1` has three: `x - 1`, `x + 2`, `x + 0`.
    """
    sites = _Sites(file, source)
    sites.visit(ast.parse(source))
    seen = {}
    for mutant in sites.found:
        seen.setdefault((mutant.start, mutant.end, mutant.text), mutant)
    return sorted(seen.values(), key=lambda m: (m.start, m.end, m.operator))


# ---- the kernel: tokens instead of a syntax tree ----

# Lines of the kernel that decide how fast it is and not what it gives.
FOR_SPEED = {
    r"__builtin_prefetch|will_write|_ahead|Ahead|ahead\(": "asks for memory "
    "in time",
    r"struct Ahead|segment\b.*segments|next = nullptr": "where the next "
    "request for memory goes",
    r"num_threads|#pragma|int threads|wanted = 1|\bthreads\b": "how many "
    "threads share the work; results do not depend on it",
    r"constexpr i64 (BLOCK|LARGE|SHORT|MOST) |constexpr int BATCH": "sizes of "
    "blocks: how often a sum moves to double, which table pays",
    r"pitch_of|padded\(|i64 room|size_t n|1023": "room in memory",
    r"release\(\)|1 << 20": "when memory is given back",
    r"group_of|piece_size|slices|together|constexpr i64 rows|i64 step = "
    "16384": "how units are shared out",
    r"images \* length|images \* job.length >= 512": "from which size on a "
    "table pays",
    r"^\s*(inline )?\w+ operator": "vector operations two by two",
    r"in_order": "how pieces are shared out",
}
_TOKEN = re.compile(
    r"""
    (?P<skip>//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'
        |^[ \t]*\#(?:\\\n|[^\n])*|template\s*<[^>]*>)
  | (?P<number>(?<![\w.])(?:0x[0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?(?:p[+-]?\d+)?
        |\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)[fFuUlL]*(?![\w.]))
  | (?P<name>[A-Za-z_]\w*)
  | (?P<assign>(?<=\ )(?:\+=|-=|\*=|/=)(?=\ ))
  | (?P<binary>(?<=\ )(?:==|!=|<=|>=|&&|\|\||<<|>>|[-+*/%<>&|])(?=\ ))
  | (?P<sign>(?<=[(,=?:{ ])-(?=[\w(.]))
  | (?P<other>\S)""",
    re.X | re.M | re.S,
)
_BINARY = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "%": "*",
    "&": "|",
    "|": "&",
    "<<": ">>",
    ">>": "<<",
    "&&": "||",
    "||": "&&",
    "==": "!=",
    "!=": "==",
    "<": ">=",
    ">=": "<",
    ">": "<=",
    "<=": ">",
}
_EDGE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_CALLS = {
    "fmax": "fmin",
    "fmin": "fmax",
    "log1p": "log",
    "expm1": "exp",
    "log": "log1p",
    "exp": "expm1",
    "sqrt": "fabs",
    "log1p_of": "absolute",
}
_DEFINES = re.compile(
    r"^(?: {4})?(?! |if|for|else|while|switch)"
    r"(?:[\w:<>,&*]+ [&*]*)*(\w+|operator\S+)\("
    r"[^;{}]*\)[^;{}]*\{",
    re.M,
)


def compiled_lines(source: str, macros: set[str]) -> list[bool]:
    "Of each line, whether it is compiled where `macros` are defined."

    def holds(text: str) -> bool:
        text = re.sub(r"//.*", "", text)
        text = re.sub(
            r"defined\s*\(?\s*(\w+)\s*\)?", lambda m: str(m[1] in macros), text
        )
        text = re.sub(r"!(?!=)", " not ", text)
        text = text.replace("&&", " and ").replace("||", " or ")
        text = re.sub(r"\b(?!True|False|and|or|not)[A-Za-z_]\w*", "0", text)
        return bool(eval(text.strip(), {}))

    kept, stack = [], []  # of [now, has one of the branches held]
    for line in source.split("\n"):
        words = re.match(
            r"\s*#\s*(ifdef|ifndef|if|elif|else|endif)\b(.*)", line
        )
        if words:
            word, rest = words.groups()
            if word.startswith("if"):
                now = (
                    holds(rest)
                    if word == "if"
                    else (rest.strip() in macros) == (word == "ifdef")
                )
                stack.append([now, now])
            elif word == "endif":
                stack.pop()
            else:
                now = not stack[-1][1] and (word == "else" or holds(rest))
                stack[-1] = [now, stack[-1][1] or now]
        kept.append(not words and all(now for now, _ in stack))
    return kept


def number_variants(text: str) -> list[tuple[str, str]]:
    digits = (
        text.rstrip("fFuUlL")
        if not text.startswith("0x")
        else text.rstrip("uUlL")
        if "p" not in text
        else text.rstrip("fFlL")
    )
    tail = text[len(digits) :]
    if re.fullmatch(r"\d+", digits):
        return [(o, f"{v}{tail}") for o, v in changed_number(int(digits))]
    if re.fullmatch(r"0x[0-9a-fA-F]+", digits):
        return [("integer - 1", f"{hex(int(digits, 16) - 1)}{tail}")]
    value = float.fromhex(digits) if "p" in digits else float(digits)
    ((operator, value),) = changed_number(value)
    return [(operator, (value.hex() if "p" in digits else repr(value)) + tail)]


def kernel_mutants(
    file: str, source: str, macros: set[str], processor: str = "native"
) -> list[Mutant]:
    "All mutants of a C++ source in the lines compiled with `macros`."
    rows, content = source.split("\n"), digest(source)
    compiled = compiled_lines(source, macros)
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row) + 1)
    heads = [(m.start(), m[1]) for m in _DEFINES.finditer(source)]
    found = []

    def add(start: int, end: int, operator: str, text: str) -> None:
        line = source.count("\n", 0, start)
        if not compiled[line]:
            return
        row = rows[line]
        if any(re.search(p, row) for p in FOR_SPEED):
            return
        left, right = starts[line], starts[line + 1] - 1
        after = source[left:start] + text + source[end:right]
        function = next((n for at, n in reversed(heads) if at <= start), "")
        flat = (
            " ".join(re.sub(r"\s//.*", "", s).split()) for s in (row, after)
        )
        found.append(
            Mutant(
                file,
                function,
                (line + 1, line + 1),
                start,
                end,
                operator,
                text,
                *flat,
                processor=processor,
                content=content,
            )
        )

    for token in _TOKEN.finditer(source):
        kind, text, at = token.lastgroup, token[0], token.start()
        end = token.end()
        if kind == "number":
            for operator, other in number_variants(text):
                add(at, end, operator, other)
        elif kind == "binary":
            operator = (
                "comparison"
                if text in "== != <= >= < >".split()
                else "and, or"
                if text in ("&&", "||")
                else "arithmetic"
            )
            add(at, end, operator, _BINARY[text])
            if text in _EDGE:
                add(at, end, "boundary", _EDGE[text])
        elif kind == "assign":
            add(
                at,
                end,
                "arithmetic",
                {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*="}[text],
            )
        elif kind == "sign":
            add(at, end, "sign", "")
        elif kind == "name" and text in _CALLS and source[end] == "(":
            if source[at - 5 : at] == "std::" or text == "log1p_of":
                add(at, end, "call", _CALLS[text])
        elif kind == "name" and text == "if" and source[end : end + 2] == " (":
            depth, close = 0, end + 1
            while True:
                depth += {"(": 1, ")": -1}.get(source[close], 0)
                if not depth:
                    break
                close += 1
            inner = source[end + 2 : close]
            if "\n" not in inner:
                add(end + 1, close + 1, "negation", f"(!({inner}))")
    for line, row in enumerate(rows):
        whole = re.fullmatch(
            r"(\s+)((?!return|for|if|else|case|using)"
            r"[\w\[\].>+*-]+ [-+*|&^]?= [^;{}]*;|"
            r"[a-z_]\w*\([^;{}]*\);)(\s*//.*)?",
            row,
        )
        if whole:
            at = starts[line] + len(whole[1])
            add(at, at + len(whole[2]), "statement", ";")
    return sorted(found, key=lambda m: (m.start, m.end, m.operator, m.text))


def macros_of(flags: list[str]) -> set[str]:
    "What the compiler defines for a processor."
    command = [
        *shlex.split(os.environ.get("CXX", "g++")),
        *flags,
        "-fopenmp",
        "-dM",
        "-E",
        "-x",
        "c++",
        os.devnull,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.split()[1].split("(")[0] for line in done.stdout.splitlines()}


# ---- the draw ----


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    "`count` in proportion to `sizes`: one at least, not more than there are."
    count = min(count, sum(sizes.values()))
    found = {name: min(1, size) for name, size in sizes.items()}
    while sum(found.values()) < count:
        total = sum(sizes.values())
        name = max(
            (n for n in sizes if found[n] < sizes[n]),
            key=lambda n: (sizes[n] / total * count - found[n], n),
        )
        found[name] += 1
    return found


def draw(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of the mutants, from every file in proportion to its number.

    The same seed gives the same list; a change in one function leaves the
    order of the mutants of others as it was.
    """
    files: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        files.setdefault(mutant.file, []).append(mutant)
    chosen = []
    for file, n in shares({f: len(m) for f, m in files.items()}, count).items():
        order = sorted(
            files[file], key=lambda m: (digest(f"{seed} {m.key}"), m.start)
        )
        chosen += order[:n]
    return chosen


# ---- a mutant in place of the module ----


class _Mutated(SourceFileLoader):
    text = ""

    def get_code(self, fullname):
        return compile(self.text, self.path, "exec", dont_inherit=True)


class _Finder:
    "Loads one module from another text than its file's."

    def __init__(self, name: str, path: Path, text: str):
        self.name, self.path, self.text = name, path, text

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        loader = _Mutated(name, str(self.path))
        loader.text = self.text
        return importlib.util.spec_from_file_location(
            name, self.path, loader=loader
        )


_CUSTOMIZE = """
import json, os
from tools.mutate import install
with open(os.path.join(os.path.dirname(__file__), "mutant.json")) as file:
    install(*json.load(file))
"""


def install(name: str, path: str | Path, text: str) -> None:
    "From now on the module `name` is imported from this text."
    sys.meta_path.insert(0, _Finder(name, Path(path), text))


def put_in_place(root: Path, mutant: Mutant, folder: Path) -> None:
    "From now on this process imports, or compiles, the mutant."
    source = (root / mutant.file).read_text(encoding="utf-8")
    if mutant.file.endswith(".py"):
        name = mutant.file.removesuffix(".py").replace("/", ".")
        path = root / mutant.file
        install(name, path, mutant.of(source))
        text = json.dumps([name, str(path), mutant.of(source)])
        (folder / "mutant.json").write_text(text)
        (folder / "sitecustomize.py").write_text(_CUSTOMIZE)
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{root}"
        return
    changed = folder / Path(mutant.file).name
    changed.write_text(mutant.of(source), encoding="utf-8")
    kernel_from(changed, mutant.processor, folder / "cache")


def kernel_from(source: Path, processor: str, cache: Path) -> None:
    "The package's compiler makes the kernel from `source`, for `processor`."
    os.environ["NORMALNORM_CACHE"] = str(cache)
    from normalnorm.layers.engines import compiler

    load = compiler.load
    compiler.load = lambda path, *a, **k: load(
        source if Path(path).name == source.name else path, *a, **k
    )
    compiler._COMMON = tuple(
        "-O1" if f == "-O3" else f for f in compiler._COMMON
    )
    compiler._options = lambda: (tuple(PROCESSORS[processor]),)
    compiler._THREADS = compiler._THREADS[:1]
    run = compiler._command

    def for_this_processor(words, limit):
        "Not without its flags, which is what the compiler tries next."
        if str(source) in words and not {*PROCESSORS[processor]} <= {*words}:
            raise compiler.CompilerError("error: not for this processor")
        return run(words, limit)

    compiler._command = for_this_processor


# ---- tests in this process ----


class _Time(BaseException):
    "A test took too long."


def alarm(seconds: float) -> None:
    "The process ends when it has computed for so long; 0: it does not."
    signal.setitimer(signal.ITIMER_PROF, seconds)


GRACE = 5.0


def patience(seconds: float) -> float:
    "How long a test may compute that took so long without a change."
    return 10 * seconds + GRACE


def quiet_hypothesis() -> None:
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "mutants",
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutants")


def run_pytest(
    root: Path, files: Iterable[str], plugin: object, stop: bool = True
) -> int:
    import pytest

    quiet_hypothesis()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    stop = stop and isinstance(plugin, _Killer)
    return pytest.main(
        [
            "-x" if stop else "-q",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(root),
            "-m",
            "not book",
            *[str(root / f) for f in files],
        ],
        plugins=[plugin],
    )


class _Killer:
    "Runs the chosen tests only, in the given order, and says which fails."

    def __init__(self, chosen: dict[str, float], say: Callable):
        self.chosen, self.say, self.killed = chosen, say, ""

    def pytest_collection_modifyitems(self, items):
        order = {name: k for k, name in enumerate(self.chosen)}
        items[:] = sorted(
            (i for i in items if i.nodeid in order),
            key=lambda i: order[i.nodeid],
        )

    def pytest_runtest_logstart(self, nodeid, location):
        self.say("trying", nodeid)
        alarm(patience(self.chosen[nodeid]))

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.killed:
            self.killed = report.nodeid
            alarm(0)
            self.say("killed", report.nodeid, brief(report.longreprtext))

    def pytest_collectreport(self, report):
        if report.failed and not self.killed:
            self.killed = report.nodeid
            self.say(
                "killed",
                report.nodeid,
                "it cannot be imported: " + brief(report.longreprtext),
            )


def brief(text: str) -> str:
    "The last line of a traceback that says what was wrong."
    rows = [r[2:].strip() for r in text.splitlines() if r.startswith("E ")]
    return (rows or [r for r in text.splitlines() if r] or [""])[0][:200]


def meet(root: Path, chosen: list[tuple[str, float]], say: Callable) -> None:
    "Let claims and tests run in this order until one fails."
    claims = [(n[6:], s) for n, s in chosen if n.startswith("claim:")]
    tests = {n: s for n, s in chosen if not n.startswith("claim:")}
    alarm(patience(SECONDS))
    if claims:
        from normalnorm import claims as book

        try:
            modules = json.loads(os.environ["MUTANTS_CLAIMS"])
            for name, _ in claims:
                importlib.import_module(modules[name])
        except Exception as error:
            return say("killed", "the import of the claims", repr(error)[:200])
        for name, seconds in claims:
            say("trying", f"claim {name}")
            alarm(patience(seconds))
            outcome = book.run_claim(book._LEDGER[name], mutant=seconds < 5)
            if not outcome.ok:
                return say(
                    "killed",
                    f"claim {name}",
                    (outcome.message or f"mutant {outcome.mutant}")[:200],
                )
    files = list(dict.fromkeys(n.split("::")[0] for n in tests))
    for file in files:
        alarm(patience(SECONDS))
        say("trying", file)
        killer = _Killer(
            {n: s for n, s in tests.items() if n.split("::")[0] == file}, say
        )
        status = run_pytest(root, [file], killer)
        if killer.killed:
            return None
        if status not in (0, 5):
            return say("killed", file, f"pytest ended with {status}")
    alarm(0)
    return say("survived")


# ---- which test runs which line ----


class _Spawned(OSError):
    "A test that starts a process is of no use here."


def computed() -> float:
    "Seconds of computing by this process and those that it waited for."
    times = os.times()
    return sum(times[:4])


class _Observer:
    "Of each test: seconds, whether it can be used, and the lines that it ran."

    def __init__(self, root: Path, prefix: str, several: bool = False):
        self.prefix, self.root = prefix, str(root) + "/"
        self.several = several
        self.tests, self.hit, self.spawned = {}, {}, False
        sys.addaudithook(self.audit)
        signal.signal(signal.SIGPROF, self.late)
        self.on = False

    def audit(self, event, arguments):
        if self.on and event in (
            "subprocess.Popen",
            "os.fork",
            "os.system",
            "os.posix_spawn",
            "os.exec",
            "os.forkpty",
        ):
            if Path(str(arguments[0])).name == "git":  # loads no mutant
                return
            self.spawned = True
            if not self.several:
                raise _Spawned(event)

    def late(self, *_):
        raise _Time(f"more than {SECONDS} s")

    def trace(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(self.prefix):
            return None
        lines = self.hit.setdefault(code.co_filename, set())
        lines.add(code.co_firstlineno)

        def local(frame, event, argument, add=lines.add):
            if event == "line":
                add(frame.f_lineno)
            return local

        return local

    def watch(self, name: str, run: Callable) -> None:
        self.hit, self.spawned, self.on = {}, False, True
        start = computed()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        alarm(SECONDS)
        good = True
        try:
            run()
        except _Time:
            good = False
        finally:
            sys.settrace(None)
            threading.settrace(None)
            alarm(0)
            self.on = False
        self.tests[name] = {
            "seconds": round(computed() - start, 4),
            "spawned": self.spawned,
            "good": good and (self.several or not self.spawned),
            "lines": {
                path.removeprefix(self.root): sorted(lines)
                for path, lines in self.hit.items()
            },
        }

    def pytest_collection_modifyitems(self, items):
        functions: dict[str, list] = {}
        for item in items:
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
        kept = set()
        for found in functions.values():
            step = max(1.0, len(found) / PARAMETERS)
            kept |= {
                found[int(k * step)].nodeid
                for k in range(min(PARAMETERS, len(found)))
            }
        items[:] = [item for item in items if item.nodeid in kept]

    def pytest_collection_finish(self, session):
        self.tests[""] = {"seconds": round(time.process_time(), 2)}

    def pytest_runtest_protocol(self, item, nextitem):
        from _pytest.runner import runtestprotocol

        measures = (
            MEASURES.search(inspect.getsource(item.function))
            if hasattr(item, "function")
            else None
        )
        if measures:
            self.tests[item.nodeid] = {"seconds": 0, "good": False, "lines": {}}
            return True
        reports = []
        self.watch(
            item.nodeid,
            lambda: reports.extend(
                runtestprotocol(item, nextitem=nextitem, log=False)
            ),
        )
        passed = any(r.when == "call" and r.passed for r in reports)
        if not passed or any(r.failed for r in reports):
            self.tests[item.nodeid]["good"] = False
        return True


def observe_claims(file: str, observer: _Observer) -> None:
    from normalnorm import claims

    start = time.process_time()
    name = file.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name.removesuffix(".__init__"))
    observer.tests[""] = {"seconds": round(time.process_time() - start, 2)}
    for entry in list(claims._LEDGER.values()):
        if entry.check.__module__ != module.__name__:
            continue
        outcomes, name = [], f"claim:{entry.id}"
        observer.watch(
            name, lambda: outcomes.append(claims.run_claim(entry, mutant=True))
        )
        found = observer.tests[name]
        found["module"] = entry.check.__module__
        found["good"] &= (
            bool(outcomes)
            and outcomes[0].ok
            and outcomes[0].outcome == "as recorded"
        )


# ---- forked processes ----


@dataclass
class Child:
    pid: int
    pipe: int
    until: float
    folder: Path
    job: object
    data: bytes = b""
    said: list = field(default_factory=list)


class Farm:
    "Runs jobs in forked children, a few at a time; kills what it leaves."

    def __init__(self, jobs: int, loud: bool = False):
        self.jobs, self.loud, self.children = jobs, loud, []

    def start(self, job, work: Callable, wall: float) -> None:
        folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        sys.stdout.flush()
        read, write = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write)
            self.children.append(
                Child(pid, read, time.monotonic() + wall, folder, job)
            )
            return
        try:
            os.setsid()
            os.close(read)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if not self.loud:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1), os.dup2(null, 2)

            def say(*words):
                os.write(write, (json.dumps(words) + "\n").encode())

            os.environ["TMPDIR"] = str(folder)
            tempfile.tempdir = str(folder)
            try:
                work(job, folder, say)
            except BaseException as error:
                say("broken", repr(error)[:300], traceback.format_exc()[-900:])
            sys.stdout.flush()
        finally:
            os._exit(0)

    def wait(self) -> Iterator[tuple[object, list, str]]:
        "Of each child that has ended: its job, what it said, how it ended."
        ready, _, _ = select.select([c.pipe for c in self.children], [], [], 1)
        for child in list(self.children):
            if child.pipe in ready:
                data = os.read(child.pipe, 65536)
                child.data += data
                if data:
                    continue
            elif time.monotonic() < child.until:
                continue
            late = time.monotonic() >= child.until
            self.end(child)
            _, status, used = os.wait4(child.pid, 0)
            self.seconds = used.ru_utime + used.ru_stime
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status)
            how = (
                "too long"
                if late or killed == signal.SIGPROF
                else signal.Signals(killed).name
                if killed
                else ""
            )
            said = [json.loads(r) for r in child.data.decode().splitlines()]
            yield child.job, said, how

    def end(self, child: Child) -> None:
        self.children.remove(child)
        try:
            # what it started, too; itself only where it is still computing
            if time.monotonic() >= child.until:
                os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.close(child.pipe)
        shutil.rmtree(child.folder, ignore_errors=True)

    def map(self, jobs: Iterable, work: Callable, wall: float):
        jobs = iter(jobs)
        try:
            while True:
                while len(self.children) < self.jobs:
                    job = next(jobs, None)
                    if job is None:
                        break
                    self.start(job, work, wall)
                if not self.children:
                    return
                yield from self.wait()
        finally:
            for child in list(self.children):  # after an interrupt
                child.until = 0
                self.end(child)
                os.waitpid(child.pid, 0)


# ---- the whole ----


class Project:
    "A checkout: its mutants, its tests, what is known of both."

    def __init__(
        self,
        root: Path,
        packages: dict[str, list[str]],
        jobs: int = 2,
        seed: int = SEED,
        loud: bool = False,
    ):
        self.root, self.packages, self.seed = root, packages, seed
        self.folder = root / "_build" / "mutation"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "mutants.jsonl"
        self.farm, self.loud = Farm(jobs, loud), loud
        self.tests, self.texts = None, {}
        self.known = self.read()

    # mutants
    def files(self, package: str) -> list[Path]:
        found = {
            p for glob in self.packages[package] for p in self.root.glob(glob)
        }
        return sorted(p for p in found if p.is_file())

    def mutants(self, package: str) -> list[Mutant]:
        found = []
        for path in self.files(package):
            name = path.relative_to(self.root).as_posix()
            source = path.read_text(encoding="utf-8")
            if path.suffix == ".py":
                found += python_mutants(name, source)
                continue
            native = kernel_mutants(
                name, source, macros_of(PROCESSORS["native"])
            )
            found += native
        return found

    def drawn(self, package: str, count: int) -> list[Mutant]:
        "The draw, without those that do not compile."
        unfit = {i for i, r in self.known.items() if r["outcome"] == "unfit"}
        found = draw(
            (m for m in self.mutants(package) if m.id not in unfit),
            count,
            self.seed,
        )
        for path in self.files(package):
            if path.suffix == ".cpp":  # lines of their own first
                name = path.relative_to(self.root).as_posix()
                source = path.read_text(encoding="utf-8")
                every = kernel_mutants(
                    name, source, macros_of(PROCESSORS["AVX2"]), "AVX2"
                )
                native = compiled_lines(source, macros_of(PROCESSORS["native"]))
                every = [m for m in every if m.id not in unfit]
                own = [m for m in every if not native[m.lines[0] - 1]]
                half = draw(own, count // 6, self.seed)
                rest = draw(
                    (m for m in every if m not in own),
                    count // 3 - len(half),
                    self.seed,
                )
                found += half + rest
        return found

    # the log
    def read(self) -> dict[str, dict]:
        found = {}
        if self.log.exists():
            for line in self.log.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # cut off by an interrupt
                    continue
                found[row["id"]] = row
        return found

    def append(self, row: dict) -> None:
        text = self.log.read_text(encoding="utf-8") if self.log.exists() else ""
        start = "\n" if text and not text.endswith("\n") else ""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(start + json.dumps(row, ensure_ascii=False) + "\n")
        self.known[row["id"]] = row

    # what runs what
    def state(self) -> str:
        "Digest of the library and of the tests."
        names = [*self.root.glob("tests/*.py")]
        for package in self.packages:
            names += self.files(package)
        names += self.root.glob("normalnorm/checks/**/*.py")
        names = sorted({p for p in names if p.stem not in UNUSED})
        return digest(b"".join(p.read_bytes() for p in names))

    def test_files(self) -> list[str]:
        "Files of tests, and of claims."
        claims = (
            p
            for p in self.root.glob("normalnorm/checks/**/*.py")
            if "@claim(" in p.read_text(encoding="utf-8")
        )
        tests = (
            p
            for p in self.root.glob("tests/test_*.py")
            if p.stem not in UNUSED and p.stem != "test_claims"
        )
        return [
            p.relative_to(self.root).as_posix()
            for group in (claims, tests)
            for p in sorted(group)
        ]

    def identity(self, name: str) -> str:
        "Digest of a file of tests and of what it takes from others."
        text = (self.root / name).read_text(encoding="utf-8")
        near = re.findall(r"^\s*from (\w+) import", text, re.M)
        others = (self.root / "tests" / f"{n}.py" for n in near)
        return digest(
            text
            + "".join(
                p.read_text(encoding="utf-8") for p in others if p.exists()
            )
        )

    def observe(self, quick: bool = False) -> None:
        """Measure, or read, which tests run which lines.

        What is known of a file of tests holds until that file changes: lines
        of the library that have moved since are followed. `quick`: with what
        is known now.
        """
        if self.tests is not None:
            return
        kept, sources = self.folder / "observed", self.folder / "sources"
        kept.mkdir(exist_ok=True), sources.mkdir(exist_ok=True)
        here = {}
        for path in self.root.rglob("*.py"):
            name = path.relative_to(self.root).as_posix()
            if name.startswith(self.prefix()) and "_build" not in path.parts:
                text = path.read_text(encoding="utf-8")
                here[name] = digest(text)
                if not (sources / here[name]).exists():
                    (sources / here[name]).write_text(text, encoding="utf-8")
        places = {
            name: kept / f"{Path(name).stem}-{digest(name)[:4]}-"
            f"{self.identity(name)}.json"
            for name in self.test_files()
        }
        wanted = [(n, p) for n, p in places.items() if not p.exists()]
        if wanted and not quick:
            print(
                f"which test runs which line: {len(wanted)} files", flush=True
            )
            self.measure(wanted, here)
        self.tests, self.lines, self.modules, self.cost = {}, {}, {}, {}
        for name, path in places.items():
            if path.exists():
                self.load(name, json.loads(path.read_text()), here)
        os.environ["MUTANTS_CLAIMS"] = json.dumps(self.modules)
        bad = self.folder / f"bad-{self.state()}.json"
        if bad.exists():
            for name in json.loads(bad.read_text()):
                self.tests.pop(name, None)

    def prefix(self) -> str:
        return "normalnorm/" if "theory" in self.packages else ""

    def measure(self, wanted: list[tuple[str, Path]], here: dict) -> None:
        self.precompile("native")

        def work(job, folder, say):
            name, path = job
            claims = name.startswith("normalnorm/checks/")
            observer = _Observer(
                self.root,
                str(self.root / self.prefix()) + "/",
                claims or name in SEVERAL,
            )
            os.environ["NORMALNORM_CACHE"] = str(self.folder / "cache")
            if claims:
                observe_claims(name, observer)
            else:
                run_pytest(self.root, [name], observer)
            part = path.with_suffix(".part")
            part.write_text(
                json.dumps({"tests": observer.tests, "sources": here})
            )
            os.replace(part, path)
            say("done", len(observer.tests) - 1)

        for (name, _), said, how in self.farm.map(wanted, work, 3600):
            words = said[-1][1] if said else f"ended by {how}"
            print(f"  {name}: {words}", flush=True)

    def load(self, name: str, found: dict, here: dict) -> None:
        moved, tests = {}, found["tests"]
        for file, old in found["sources"].items():
            if here.get(file, old) != old:
                texts = [
                    (self.folder / "sources" / d)
                    .read_text(encoding="utf-8")
                    .split("\n")
                    for d in (old, here[file])
                ]
                blocks = difflib.SequenceMatcher(
                    None, *texts, autojunk=False
                ).get_matching_blocks()
                moved[file] = {
                    a + k + 1: b + k + 1 for a, b, n in blocks for k in range(n)
                }
        self.cost[name] = tests.pop("", {"seconds": 1})["seconds"]
        for test, row in tests.items():
            if not row["good"]:
                continue
            self.tests[test] = row["seconds"]
            if "module" in row:
                self.modules[test.removeprefix("claim:")] = row["module"]
            if row.get("spawned"):
                own = Path(name).stem.removeprefix("test_") + ".py"
                for file in here:
                    if Path(file).name == own and "/checks/" not in file:
                        for line in range(len(self.text(file))):
                            self.lines.setdefault((file, line + 1), set()).add(
                                test
                            )
            for file, lines in row["lines"].items():
                for line in lines:
                    if file in moved:
                        line = moved[file].get(line)
                    self.lines.setdefault((file, line), set()).add(test)

    def confirm(self, rows: list[dict]) -> set[str]:
        "Those of the tests that killed which fail without a mutant, too."
        names = {
            r["by"].replace("claim ", "claim:")
            for r in rows
            if r["outcome"] == "killed" and not r["file"].endswith(".cpp")
        }
        names &= {*self.tests, *self.cost}
        groups: dict[str, list[str]] = {}
        for name in sorted(names):
            group = "claims" if name.startswith("claim:") else name
            groups.setdefault(group.split("::")[0], []).append(name)

        def work(job, folder, say):
            os.environ["NORMALNORM_CACHE"] = str(self.folder / "cache")
            chosen = {n: self.tests.get(n, 0) for n in groups[job]}
            if job != "claims":

                class Plugin(_Killer):
                    def pytest_runtest_logreport(self, report):
                        if report.failed:
                            say("bad", report.nodeid)

                    def pytest_collectreport(self, report):
                        if report.failed:
                            say("bad", job)

                plugin = Plugin(chosen, lambda *words: None)
                run_pytest(self.root, [job], plugin, stop=False)
                return say("done")
            from normalnorm import claims

            for name in chosen:
                importlib.import_module(self.modules[name[6:]])
                if not claims.run_claim(claims._LEDGER[name[6:]], True).ok:
                    say("bad", name)
            return say("done")

        bad = set()
        for job, said, _ in self.farm.map(groups, work, 1800):
            bad |= {words[1] for words in said if words[0] == "bad"}
            if ["done"] not in said:
                bad |= set(groups[job])
        if bad:
            path = self.folder / f"bad-{self.state()}.json"
            known = json.loads(path.read_text()) if path.exists() else []
            path.write_text(json.dumps(sorted({*known, *bad})))
            for name in bad:
                self.tests.pop(name, None)
        return bad

    def precompile(self, processor: str) -> None:
        "The unchanged kernel, as the children make theirs."
        if not (self.root / KERNEL).exists():
            return

        def work(job, folder, say):
            cache = self.folder / "cache"
            if job != "package":
                cache = self.folder / "plain" / job
                kernel_from(self.root / KERNEL, job, cache)
            os.environ["NORMALNORM_CACHE"] = str(cache)
            from normalnorm.layers.engines import native

            native.library()
            say("done")

        for job, said, how in self.farm.map(["package", processor], work, 900):
            if not said or said[-1][0] != "done":
                raise RuntimeError(f"the kernel for {job}: {said} {how}")

    def touching(self, mutant: Mutant) -> set[str]:
        "The tests that run a line of the mutant."
        if mutant.file.endswith(".cpp"):
            return self.touching_kernel(mutant)
        for first, last in mutant.around:
            found = set()
            for line in range(first, last + 1):
                found |= self.lines.get((mutant.file, line), set())
            if found:
                return found
        if mutant.around and not mutant.names:
            return set()
        # run by an import: the tests that use what is bound, or the module
        found = set()
        pattern = (
            re.compile(r"\b(" + "|".join(mutant.names) + r")\b")
            if mutant.names
            else None
        )
        first = mutant.lines[0]
        for (file, line), tests in self.lines.items():
            if (
                pattern
                and pattern.search(self.row(file, line))
                and (file, line) != (mutant.file, first)
            ):
                found |= tests
        if pattern:  # tests that look at it themselves
            using = {
                name
                for name in self.cost
                if name.startswith("tests/")
                and any(map(pattern.search, self.text(name)))
            }
            found |= {
                test for test in self.tests if test.split("::")[0] in using
            }
        if len(found) < 20:  # used by what an import runs, perhaps
            found |= {
                test
                for (file, _), tests in self.lines.items()
                if file == mutant.file
                for test in tests
            }
        return found

    def text(self, file: str) -> list[str]:
        if file not in self.texts:
            path = self.root / file
            self.texts[file] = path.read_text(encoding="utf-8").split("\n")
        return self.texts[file]

    def row(self, file: str, line: int) -> str:
        rows = self.text(file)
        return rows[line - 1] if line and line <= len(rows) else ""

    def touching_kernel(self, mutant: Mutant) -> set[str]:
        "The tests that call the kernel, or its proxies."
        source = (self.root / mutant.file).read_text(encoding="utf-8")
        place = source.find("struct ProxyJob")
        proxy = 0 <= place <= mutant.start
        only = self.passing(mutant.processor)
        found = set()
        for (file, line), tests in self.lines.items():
            if fnmatch.fnmatch(file, "normalnorm/layers/*.py"):
                row = self.row(file, line)
                if re.search(
                    r"normalnorm_proxy_\w+" if proxy else r"normalnorm_\w+", row
                ):
                    found |= tests
        named = (
            {t for t in self.tests if "/test_proxy.py" in t}
            if proxy
            else {t for t in self.tests if "/test_native.py" in t}
        )
        return (found | named) & only

    def file_of(self, test: str) -> str:
        "Where a test, or the check of a claim, is written."
        if "::" in test:
            return test.split("::")[0]
        file = self.modules[test.removeprefix("claim:")].replace(".", "/")
        module = self.root / f"{file}.py"
        return f"{file}.py" if module.exists() else f"{file}/__init__.py"

    def passing(self, processor: str) -> set[str]:
        """The tests that pass with the kernel for this processor, unchanged.

        What is known of a file of tests holds until it or the kernel changes.
        """
        callers = {
            t
            for (file, line), tests in self.lines.items()
            if file.startswith("normalnorm/layers/")
            and "normalnorm_" in self.row(file, line)
            for t in tests
        }
        callers |= {
            t
            for t in self.tests
            if "/test_native.py" in t or "/test_proxy.py" in t
        }
        kernel = digest((self.root / KERNEL).read_bytes())
        kept = self.folder / "passing" / f"{processor}-{kernel}"
        kept.mkdir(parents=True, exist_ok=True)
        groups: dict[str, list[str]] = {}
        for test in sorted(callers):
            groups.setdefault(self.file_of(test), []).append(test)
        places = {
            file: kept / f"{digest(file + self.identity(file))}.json"
            for file in groups
        }
        wanted = [job for job, path in places.items() if not path.exists()]
        if wanted:
            self.precompile(processor)

        def work(job, folder, say):
            kernel_from(
                self.root / KERNEL, processor, self.folder / "plain" / processor
            )
            if not job.startswith("tests/"):
                from normalnorm import claims

                for name in groups[job]:
                    importlib.import_module(self.modules[name[6:]])
                    if claims.run_claim(claims._LEDGER[name[6:]], True).ok:
                        say("good", name)
                return say("done")

            class Plugin(_Killer):
                def pytest_runtest_logreport(self, report):
                    if report.when == "call" and report.passed:
                        say("good", report.nodeid)

            chosen = {t: self.tests[t] for t in groups[job]}
            run_pytest(self.root, [job], Plugin(chosen, say), stop=False)
            return say("done")

        for job, said, how in self.farm.map(wanted, work, 1800):
            if ["done"] not in said:
                print(f"  {processor}, {job}: ended by {how or 'itself'}")
                continue
            good = sorted(words[1] for words in said if words[0] == "good")
            places[job].write_text(json.dumps(good))
        return callers & {
            t
            for path in places.values()
            if path.exists()
            for t in json.loads(path.read_text())
        }

    def chosen(self, mutant: Mutant) -> list[tuple[str, float]]:
        """Claims and tests for a mutant, with their seconds: claims first,
        then files of tests in which many run it; in a file the cheapest of
        each function before the next one of any. 30 s in all."""
        touching = self.touching(mutant)
        stem = Path(mutant.file).stem
        groups: dict[str, list[str]] = {}
        for test in touching:
            groups.setdefault(
                test.split("::")[0] if "::" in test else "claims", []
            ).append(test)
        total: dict[str, int] = {}
        for test in self.tests:
            name = test.split("::")[0] if "::" in test else "claims"
            total[name] = total.get(name, 0) + 1

        def rank(name: str):
            own = name in (f"tests/test_{stem}.py", *PINNED)
            return (
                name != "claims",
                not own,
                name == "tests/test_harness.py",
                -len(groups[name]) / total[name],
                name,
            )

        found, left = [], SECONDS
        for name in sorted(groups, key=rank):
            cost = 0 if name == "claims" else min(self.cost[name], 3)
            if cost >= left:
                continue
            left -= cost
            rounds: dict[str, int] = {}
            order = []
            for test in sorted(groups[name], key=lambda t: self.tests[t]):
                function = test.split("[")[0]
                if name == "claims":
                    module = self.modules[test[6:]]
                    far = not module.endswith(f".{stem}")
                    order.append((far, self.tests[test], test))
                    continue
                rounds[function] = rounds.get(function, 0) + 1
                order.append((rounds[function], self.tests[test], test))
            share = left if name != "claims" else 0.6 * left
            for _, seconds, test in sorted(order):
                if seconds <= share:
                    found.append((test, seconds))
                    share, left = share - seconds, left - seconds
        return found

    # runs
    def judge(self, mutants: list[Mutant], quick: bool = False) -> None:
        "Run those of the mutants whose outcome is not known."
        state = "" if quick else self.state()

        def old(mutant: Mutant) -> bool:
            row = self.known.get(mutant.id)
            return (
                row is None
                or row["outcome"] == "void"
                or (row["outcome"] == "survived" and row["state"] != state)
                or self.loud
            )

        todo = [m for m in mutants if old(m)]
        if not todo:
            return
        self.observe(quick)
        plans = {}
        for mutant in todo:
            plans[mutant.id] = self.chosen(mutant)

        def work(mutant, folder, say):
            put_in_place(self.root, mutant, folder)
            if mutant.file.endswith(".cpp"):
                from normalnorm.layers.engines import native

                say("trying", "the compiler")
                if not native.available():
                    return say("unfit", str(native._library())[-200:])
                made, plain = (
                    {digest(p.read_bytes()) for p in sorted(f.rglob("*.so"))}
                    for f in (
                        folder / "cache",
                        self.folder / "plain" / mutant.processor,
                    )
                )
                if made & plain:
                    return say("same", "")
                say("compiled")
            return meet(self.root, plans[mutant.id], say)

        done, start, tally = 0, time.monotonic(), {}
        for mutant, said, how in self.farm.map(todo, work, 900):
            row = self.outcome(mutant, said, how, plans[mutant.id])
            row["seconds"] = round(self.farm.seconds, 1)
            self.append({**row, "state": state})
            done += 1
            tally[row["outcome"]] = tally.get(row["outcome"], 0) + 1
            counts = ", ".join(f"{n} {o}" for o, n in sorted(tally.items()))
            words = f"{row.get('by', '')} {row['seconds']} s"
            if row["outcome"] in ("survived", "unfit") or self.loud:
                words = f"{mutant.id} {mutant}"
            print(
                f"{done}/{len(todo)} {time.monotonic() - start:.0f} s "
                f"({counts}) {row['outcome']} {words}",
                flush=True,
            )

    def outcome(self, mutant: Mutant, said: list, how: str, plan) -> dict:
        row = {
            k: v
            for k, v in asdict(mutant).items()
            if k
            in ("file", "function", "operator", "before", "after", "processor")
        }
        if not mutant.file.endswith(".cpp"):
            del row["processor"]
        row.update(id=mutant.id, line=mutant.lines[0], tests=len(plan))
        last = said[-1] if said else ["", ""]
        trying = next((w[1] for w in reversed(said) if w[0] == "trying"), "")
        verdict = next(
            (
                w
                for w in said
                if w[0] in ("killed", "survived", "same", "unfit", "broken")
            ),
            None,
        )
        if verdict and verdict[0] == "killed":
            row.update(outcome="killed", by=verdict[1], message=verdict[2])
        elif verdict and verdict[0] == "same":
            row.update(
                outcome="equivalent",
                argument="the compiler makes the same machine code",
            )
        elif verdict and verdict[0] == "unfit":
            row.update(outcome="unfit", message=verdict[1])
        elif verdict and verdict[0] == "broken":  # by the mutated import
            row.update(
                outcome="killed", by=trying or "its import", message=verdict[1]
            )
        elif verdict:
            row.update(outcome="survived")
        elif how == "too long" and trying != "the compiler":
            row.update(outcome="timed out", by=trying)
        elif how:
            row.update(outcome="killed", by=trying, message=f"ended by {how}")
        else:
            row.update(
                outcome="killed",
                by=trying,
                message=f"the process ended in {last[0]}",
            )
        return row


# ---- the outcome that is committed ----


def equivalents(root: Path) -> list[dict]:
    path = root / "results" / "mutation" / "equivalents.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def argument_of(row: dict, known: list[dict]) -> str:
    "Why no test can notice this mutant; empty where that is not said."
    if row["outcome"] == "equivalent":
        return row["argument"]
    for entry in known:
        if all(
            entry[k] == row[k] for k in ("file", "function", "before", "after")
        ):
            return entry["argument"]
    return ""


def summary(
    project: Project, rows: dict[str, list[dict]], seconds: float
) -> dict:
    "Counts, survivors and equivalents of each package."
    known = equivalents(project.root)
    found = {}
    for package, outcomes in rows.items():
        left = [
            r for r in outcomes if r["outcome"] in ("survived", "equivalent")
        ]
        equal = [r for r in left if argument_of(r, known)]
        survivors = [r for r in left if r not in equal]
        killed = len(outcomes) - len(left)
        counted = len(outcomes) - len(equal)
        found[package] = {
            "files": len({r["file"] for r in outcomes}),
            "mutants": len(outcomes),
            "killed": killed,
            "of which by time": sum(
                r["outcome"] == "timed out" for r in outcomes
            ),
            "equivalent": len(equal),
            "survived": len(survivors),
            "score": round(killed / counted, 4) if counted else 1.0,
            "survivors": [describe(r) for r in survivors],
            "equivalents": [
                {**describe(r), "argument": argument_of(r, known)}
                for r in equal
            ],
        }
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=project.root,
        capture_output=True,
        text=True,
    ).stdout.strip()
    source = [p for name in project.packages for p in project.files(name)]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git,
        "source": digest(b"".join(p.read_bytes() for p in source)),
        "tests": project.state(),
        "processor": processor_name(),
        "seed": project.seed,
        "seconds": round(seconds),
        "limit": SECONDS,
        "packages": found,
    }


def committed(row: dict, root: Path) -> dict:
    "A row without what only this machine knows."
    places = "|".join(map(re.escape, (tempfile.gettempdir(), str(root))))
    return {
        k: re.sub(rf"({places})(/mutant-\w+)?", "…", v) if k == "message" else v
        for k, v in row.items()
        if k != "state"
    }


def describe(row: dict) -> dict:
    names = (
        "id",
        "file",
        "line",
        "function",
        "operator",
        "processor",
        "before",
        "after",
    )
    return {k: row[k] for k in names if k in row}


def processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    model = re.search(r"model name\s*: (.*)", text)
    flags = re.search(r"flags\s*: (.*)", text)
    have = set(flags[1].split()) if flags else set()
    best = next(
        (
            name
            for name, flag in (("AVX-512", "avx512f"), ("AVX2", "avx2"))
            if flag in have
        ),
        "no vector extensions known",
    )
    return f"{model[1] if model else platform.machine()}, {best}"


def report(found: dict) -> str:
    rows = [f"{'package':12} mutants killed equivalent survived  score"]
    for name, p in found["packages"].items():
        rows.append(
            f"{name:12} {p['mutants']:7} {p['killed']:6} "
            f"{p['equivalent']:10} {p['survived']:8} "
            f"{p['score']:6.1%}"
        )
    for name, p in found["packages"].items():
        for s in p["survivors"]:
            rows.append(
                f"survived in {name}: {s['id']} {s['file']}:"
                f"{s['line']} {s['function']} [{s['operator']}"
                + (f", {s['processor']}" if "processor" in s else "")
                + f"]\n    {s['before']}\n  → {s['after']}"
            )
    return "\n".join(rows)


def preload(names: Iterable[str]) -> None:
    from _pytest.config import builtin_plugins

    for name in [*names, *(f"_pytest.{n}" for n in builtin_plugins)]:
        try:
            importlib.import_module(name)
        except ImportError:
            pass
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(
            "an imported library has started a thread: a "
            "forked process would wait for it for ever"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "tools.mutate", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--package",
        action="append",
        metavar="NAME",
        help="of " + ", ".join(PACKAGES) + "; or name=glob",
    )
    parser.add_argument(
        "--count",
        type=int,
        help=f"mutants of a package "
        f"({COUNT}; of the kernel {COUNTS['kernel']}, and a "
        "third as many for AVX2)",
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--only", metavar="ID", help="one mutant, with the output of the tests"
    )
    parser.add_argument(
        "--survivors", action="store_true", help="print them, run nothing"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the draw, run nothing"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="forget the outcomes of earlier runs",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="with the tests that were observed before; survivors come again",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE,
        help="seconds "
        "that any test may compute for longer than ten times "
        "its usual time (%(default)s)",
    )
    parser.add_argument(
        "--record", action="store_true", help="write results/mutation"
    )
    parser.add_argument("--root", type=Path, default=ROOT)
    given = parser.parse_args(arguments)
    globals()["GRACE"] = given.grace
    packages = dict(PACKAGES)
    for name in given.package or []:
        if "=" in name:
            packages[name.split("=")[0]] = [name.split("=")[1]]
        elif name not in packages:
            parser.error(f"--package {name}: known are {', '.join(PACKAGES)}")
    wanted = [n.split("=")[0] for n in given.package or PACKAGES]
    if given.package and any("=" in n for n in given.package):
        packages = {n: packages[n] for n in wanted}
    root = given.root.resolve()
    os.chdir(root)
    sys.path[:] = [str(root), *(p for p in sys.path if p != str(root))]
    os.environ["PYTHONPATH"] = str(root)
    os.environ["NORMALNORM_QUIET"] = "1"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    project = Project(root, packages, given.jobs, given.seed, bool(given.only))
    if given.fresh and project.log.exists():
        project.log.unlink()
        project.known = {}

    def count(name: str) -> int:
        return given.count or COUNTS.get(name, COUNT)

    if given.list:
        for name in wanted:
            for mutant in project.drawn(name, count(name)):
                print(mutant.id, mutant)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    if not given.survivors:
        preload(PRELOAD if "theory" in packages else ["pytest", "hypothesis"])
        for name in wanted:
            if given.only:
                mutants = [
                    m
                    for m in project.drawn(name, 10**6)
                    if m.id.startswith(given.only)
                ]
                project.judge(mutants)
                continue
            print(f"-- {name}", flush=True)
            for _ in range(10):  # what does not compile is drawn anew
                drawn = project.drawn(name, count(name))
                project.judge(drawn, given.quick)
                rows = [project.known[m.id] for m in drawn]
                bad = project.confirm(rows) if project.tests else set()
                for row in rows:
                    if row.get("by", "").replace("claim ", "claim:") in bad:
                        project.append({**row, "outcome": "void"})
                if not bad and all(r["outcome"] != "unfit" for r in rows):
                    break
    if given.only:
        return 0
    rows = {
        name: [
            project.known[m.id]
            for m in project.drawn(name, count(name))
            if m.id in project.known
        ]
        for name in wanted
    }
    used = sum(r["seconds"] for found in rows.values() for r in found)
    found = summary(project, rows, used)
    print(report(found))
    if given.record:
        folder = root / "results" / "mutation"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(
            json.dumps(found, indent=1, ensure_ascii=False) + "\n",
            encoding="utf-8",
        )
        (folder / "mutants.jsonl").write_text(
            "".join(
                json.dumps(
                    {"package": name, **committed(row, root)},
                    ensure_ascii=False,
                )
                + "\n"
                for name, outcomes in rows.items()
                for row in outcomes
            ),
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
