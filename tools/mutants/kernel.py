"""Wrong versions of the C++ kernel, one token each: what mutmut and
`tools.mutants.operators` are for Python.

A mutant is compiled in a copy of the checkout, at -O1 and for one instruction
set, and meets the kernel's tests that pass without it, until one fails. One
from which the compiler makes the kernel's own machine code is equivalent.
"""

import hashlib
import random
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.files import ROOT, python, ran
from tools.processors import SETS, environment, lacking

KERNEL = "normalnorm/layers/engines/native.cpp"
# Lines of the kernel that decide how fast it is and not what it gives.
FOR_SPEED = re.compile(
    # asks for memory in time, or room in it; when it is given back
    r"__builtin_prefetch|will_write|_ahead|Ahead|ahead\(|padded\(|i64 room"
    r"|size_t n|release\(\)|1 << 20"
    # how many threads share the work, and how
    r"|#pragma|int threads|wanted = 1|\bthreads\b|piece_size|slices|together"
    # from which size on a table pays, a sum moves to double
    r"|constexpr i64 (LARGE|SHORT) |constexpr int BATCH"
    # vector operations two by two
    r"|^\s*(inline )?\w+ operator"
)
_TOKEN = re.compile(
    r"""
    (?P<skip>//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'
        |^[ \t]*\#(?:\\\n|[^\n])*|template\s*<[^>]*>)
  | (?P<number>(?<![\w.])(?:0x[0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?(?:p[+-]?\d+)?
        |\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)[fFuUlL]*(?![\w.]))
  | (?P<name>[A-Za-z_]\w*)
  | (?P<operator>(?<=\ )(?:[-+*/]=|==|!=|<=|>=|&&|\|\||<<|>>|[-+*/%<>&|])
        (?=\ ))
  | (?P<sign>(?<=[(,=?:{ ])-(?=[\w(.]))
  | (?P<other>\S)""",
    re.X | re.M | re.S,
)
_OPERATORS = {
    pair[0]: pair[1:]
    for pair in (
        row.split()
        for row in """+ -, - +, * /, / *, % *, & |, | &, << >>, >> <<, && ||,
        || &&, == !=, != ==, < >= <=, >= < >, > <= >=, <= > <, += -=, -= +=,
        *= /=, /= *=""".split(",")
    )
}
_CALLS = dict(
    row.split()
    for row in """std::fmax std::fmin, std::fmin std::fmax, std::log std::log1p,
    std::log1p std::log, std::exp std::expm1, std::expm1 std::exp,
    std::sqrt std::fabs, log1p_of absolute""".split(",")
)
_STATEMENT = re.compile(
    r"(\s+)((?!return|for|if|else|case|using)"
    r"[\w\[\].>+*-]+ [-+*|&^]?= [^;{}]*;|[a-z_]\w*\([^;{}]*\);)(\s*//.*)?"
)


@dataclass(frozen=True)
class Mutant:
    "`text` in place of the characters start … end of the kernel."

    line: int
    start: int
    end: int
    text: str
    before: str  # the line, without indentation and comment
    after: str

    def of(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def compiled_lines(source: str, compiler: list[str]) -> set[int]:
    "The numbers of the lines that the preprocessor leaves in, for OpenMP."
    # with -fopenmp in place of the macro gcc 12 ends at a pragma
    how = "-D_OPENMP -E -fdirectives-only -x c++ -"
    done = ran([*compiler, *how.split()], input=source, check=True)
    kept, line, inside = set(), 0, False
    for text in done.stdout.split("\n"):
        if marker := re.match(r'# (\d+) "(.*?)"', text):
            line, inside = int(marker[1]), marker[2] == "<stdin>"
        else:
            if inside and text:
                kept.add(line)
            line += 1
    return kept


def numbers(text: str, compared: bool) -> list[str]:
    """Other numbers for a constant: ±1 of an integer, 5 % more of others; ten
    times as much for a threshold.
    """
    hexadecimal = text.startswith("0x")
    tail = re.search(
        "[uUlL]*$" if hexadecimal and "p" not in text else "[fFuUlL]*$", text
    )[0]
    digits = text.removesuffix(tail)
    if re.fullmatch(r"\d+|0x[0-9a-fA-F]+", digits):
        value = int(digits, 0)
        show = hex if hexadecimal else str
        return [show(value + d) + tail for d in (1, -1) if value + d >= 0]
    value = float.fromhex(digits) if hexadecimal else float(digits)
    value = value * (10 if compared else 1.05) if value else 0.01
    return [(value.hex() if hexadecimal else f"{value:.10g}") + tail]


def _changes(source: str) -> Iterator[tuple[int, int, str]]:
    "Start, end and text of each change of a token or a statement."
    tokens = [t for t in _TOKEN.finditer(source) if t.lastgroup != "skip"]
    for before, token in zip([None, *tokens], tokens):
        kind, text = token.lastgroup, token[0]
        start, end = token.span()
        if kind == "number":
            compared = before and before[0] in ("<", ">", "<=", ">=")
            for other in numbers(text, bool(compared)):
                yield start, end, other
        elif kind == "operator":
            for other in _OPERATORS[text]:
                yield start, end, other
        elif kind == "sign":
            yield start, end, ""
        elif kind == "name" and source[end : end + 1] == "(":
            for name in (text, f"std::{text}"):
                if source.endswith(name, 0, end) and name in _CALLS:
                    yield end - len(name), end, _CALLS[name]
        elif kind == "name" and text == "if" and source[end : end + 2] == " (":
            close, depth = end + 2, 1
            while depth:
                depth += {"(": 1, ")": -1}.get(source[close], 0)
                close += 1
            yield end + 1, close, f"(!{source[end + 1 : close]})"
    at = 0
    for row in source.split("\n"):
        if whole := _STATEMENT.fullmatch(row):
            yield at + whole.start(2), at + whole.end(2), ";"
        at += len(row) + 1


def mutants(source: str, compiler: list[str]) -> list[Mutant]:
    "All changes in the lines that this command compiles."
    compiled, rows = compiled_lines(source, compiler), source.split("\n")
    found = []

    def flat(text: str) -> str:
        return " ".join(re.sub(r"\s//.*", "", text).split())

    for start, end, text in sorted(set(_changes(source))):
        line = source.count("\n", 0, start)
        if line + 1 not in compiled or FOR_SPEED.search(rows[line]):
            continue
        left = source.rfind("\n", 0, start) + 1
        right = source.find("\n", end)
        right = len(source) if right < 0 else right
        after = source[left:start] + text + source[end:right]
        before = flat(source[left:right])
        found.append(Mutant(line + 1, start, end, text, before, flat(after)))
    return found


class Copy:
    "A copy of what the kernel's tests need, for one instruction set."

    def __init__(self, folder: Path, instructions: str):
        self.folder = folder
        for name in ("normalnorm", "tests", "tools", "pyproject.toml"):
            place = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            place(ROOT / name, folder / name)
        self.env = environment(instructions, "gcc", folder / "cache") | {
            "PYTHONPATH": str(folder),
            "PYTEST_XDIST_WORKER": "mutant",  # no checks are written
            "NORMALNORM_QUIET": "1",
        }
        self.env["CXX"] += " -O1"
        self.patience: float | None = None  # seconds for a run of the tests

    def python(self, *words: str) -> subprocess.CompletedProcess:
        return python(
            *words, cwd=self.folder, env=self.env, timeout=self.patience
        )

    def compiled(self, source: str) -> str:
        "A digest of the machine code; empty where there is none."
        (self.folder / KERNEL).write_text(source, encoding="utf-8")
        for old in (self.folder / "cache").rglob("*.so"):
            old.unlink()
        self.python("-c", "from normalnorm.layers.engines import native; "
                    "native.library()")  # fmt: skip
        made = sorted((self.folder / "cache").rglob("*.so"))
        text = b"".join(path.read_bytes() for path in made)
        return hashlib.sha256(text).hexdigest() if made else ""

    def tested(self, tests: list[str], *options: str) -> list[str]:
        "The tests that fail."
        done = self.python("-m", "pytest", "-q", "--tb=no", "-rfE", "-p",
                           "no:xdist", "-p", "no:cacheprovider", "-m",
                           "not book", *options, *tests)  # fmt: skip
        if done.returncode not in (0, 1) and self.patience is None:
            raise RuntimeError(f"without a mutant: {done.stdout}{done.stderr}")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        return failed or ["pytest itself"] * bool(done.returncode)


def run(
    folder: Path,
    instructions: str,
    count: int,
    seed: int,
    tests: list[str] | None = None,
) -> Iterator[dict]:
    """A row for each of `count` mutants that compile, drawn by the seed.

    `folder`: an empty one. `tests`: in place of the kernel's own.
    """
    source = (ROOT / KERNEL).read_text(encoding="utf-8")
    proxy = source.find("struct ProxyJob")
    copy = Copy(folder, instructions)
    plain = copy.compiled(source)
    if not plain:
        raise RuntimeError(f"the kernel does not compile for {instructions}")
    ours = tests or [
        "tests/layers/test_native.py",
        "tests/theory/test_proxy.py",
    ]
    start = time.monotonic()
    without = [f"--deselect={test}" for test in copy.tested(ours)]
    copy.patience = 300 + 3 * (time.monotonic() - start)
    print(f"{instructions}: {len(without)} tests fail without a mutant")
    every = mutants(source, shlex.split(copy.env["CXX"]))
    random.Random(f"{seed} {instructions}").shuffle(every)
    while count and every:
        mutant, start = every.pop(), time.monotonic()
        made = copy.compiled(mutant.of(source))
        if not made:
            continue
        row = {"file": KERNEL, "line": mutant.line, "before": mutant.before,
               "after": mutant.after, "processor": instructions}  # fmt: skip
        if made == plain:
            row["outcome"] = "equivalent"
            row["argument"] = "the compiler makes the same machine code"
        else:
            order = -1 if mutant.start > proxy > 0 else 1
            try:
                failed = copy.tested(ours[::order], "-x", *without)
            except subprocess.TimeoutExpired:
                failed = ["its time"]
            row["outcome"] = "killed" if failed else "survived"
            row["by"] = "".join(failed[:1])
        yield row | {"seconds": round(time.monotonic() - start)}
        count -= 1


def instruction_sets() -> list[str]:
    "The best that this machine has, and AVX2."
    known = [name for name in SETS if not lacking(name)]
    return list(dict.fromkeys([*known[:1], *(n for n in known if n == "AVX2")]))
