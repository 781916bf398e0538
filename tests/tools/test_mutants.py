"""Wrong versions of the library: what is made beside mutmut's own, and the
recorded outcome. (mutmut itself tries its tests without a mutant, and with one
that must fail.)
"""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tools.files import ROOT
from tools.mutants import __main__ as command
from tools.mutants import kernel, python

AVX2 = ["g++", "-march=x86-64-v3"]
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


def flat(pair):
    return tuple(" ".join(text.split()) for text in pair)


@pytest.fixture
def changes(monkeypatch):
    monkeypatch.chdir(ROOT)  # where mutmut's configuration is

    def made(file, source=None):
        source = source or (ROOT / file).read_text(encoding="utf-8")
        return [flat(pair) for pair in python.changes(file, source)]

    return made


# Wrong versions that a review found and no test noticed.
SURVIVORS = {
    "layers/folding.py": (
        "calls[node.target] > 1 or calls[before] > 1",
        "(calls[node.target] > 1)",
    ),
    "analysis/robustness.py": (
        "( clean & right( perturb(model, inputs, targets, e, batch=batch, "
        "**options) ) )",
        "(right( perturb(model, inputs, targets, e, batch=batch, **options) ))",
    ),
    "analysis/propagation.py": ("value.clone()", "value"),
    "theory/collapse.py": (  # in `before, z = x, activation(affine)`
        "x",
        "(F.conv2d( F.pad(z, (kernel // 2,) * 4, mode=padding), "
        "prepare(weight) ))",
    ),
    "layers/regnorm.py": ("count", "(rows.shape[0])"),
    "theory/newton.py": ('!= "mps"', '== "mps"'),  # mutmut's own
}


@pytest.mark.parametrize("file", SURVIVORS)
def test_the_survivors_of_the_review_are_made(changes, file):
    assert SURVIVORS[file] in changes(f"normalnorm/{file}")


@needs_compiler
def test_the_survivor_in_the_kernel_is_made():
    source = (ROOT / kernel.KERNEL).read_text(encoding="utf-8")
    before = "inline Ell distance(double rho) { return 1 - rho < 4e-3 ? "
    assert [
        m.after
        for m in kernel.mutants(source, AVX2)
        if m.before.startswith(before) and " < 0.04 ? " in m.after
    ] == ["inline Ell distance(double rho) { return 1 - rho < 0.04 ? NEAR : "
          "DISTANT; }"]  # fmt: skip


def test_mutants_of_a_function(changes):
    "Ours, each where it belongs: targets, texts, raised errors stay."
    found = Counter(
        changes(
            "toy.py",
            "def f(a: int, b: int, c: str):\n"
            "    g(c)\n"
            "    m, n = a.copy().k(a=b)\n"
            "    n = n\n"
            "    n += a and (b\n        + m)\n"
            '    t = f"{a}" + f"{n}"\n'
            "    if n:\n"
            "        raise ValueError(a + n)\n",
        )
    )
    ours = {
        ("a", "b"): 2,
        ("b", "a"): 2,
        ("m", "n"): 1,
        ("n", "m"): 2,
        ("g(c)", "None"): 1,
        ("a.copy()", "a"): 1,
        ("a and (b + m)", "a"): 1,
        ("a and (b + m)", "((b + m))"): 0,
        ("(b + m)", "b"): 1,
        ("(b + m)", "m"): 1,
    }
    assert {pair: found[pair] for pair in ours} == ours
    assert not any("ValueError" in before for before, _ in found)


@pytest.mark.parametrize(
    "file", ["layers/regnorm.py", "layers/engines/operators.py"]
)
def test_every_mutant_of_a_module_parses(monkeypatch, file):
    monkeypatch.chdir(ROOT)
    python.prepare()
    source = (ROOT / "normalnorm" / file).read_text(encoding="utf-8")
    made = python.file_mutation.mutate_file_contents(file, source)
    compile(made.code, file, "exec")
    assert len(made.mutant_names) > 100


@needs_compiler
def test_mutants_of_the_kernel():
    "By tokens: comments, headers and templates stay; so do lines for speed."
    source = (
        "#include <cmath>\ntemplate <int N>\nfloat f(float a) { // a + 1\n"
        "    a = a * 0x1p-1f;\n    __builtin_prefetch(p + 1);\n"
        "#if defined(WIDE) && !defined(NARROW)\n    a = a + b;\n#else\n"
        "    a = a - c;\n#endif\n    if (a < 2.5f) a += 1;\n}\n"
    )
    found = [
        (m.line, m.after) for m in kernel.mutants(source, ["g++", "-DWIDE"])
    ]
    assert sorted(found) == [
        (4, ";"),
        (4, "a = a * 0x1.0cccccccccccdp-1f;"),
        (4, "a = a / 0x1p-1f;"),
        (7, ";"),
        (7, "a = a - b;"),
        (11, "if (!(a < 2.5f)) a += 1;"),
        (11, "if (a < 2.5f) a += 0;"),
        (11, "if (a < 2.5f) a += 2;"),
        (11, "if (a < 2.5f) a -= 1;"),
        (11, "if (a < 25f) a += 1;"),
        (11, "if (a <= 2.5f) a += 1;"),
        (11, "if (a >= 2.5f) a += 1;"),
    ]
    other = kernel.mutants(source, ["g++", "-DWIDE", "-DNARROW"])
    assert {m.line for m in other} == {4, 9, 11}


def test_tests_of_a_module():
    found = command.tests_of("normalnorm/theory/newton.py")
    assert found[0] == "tests/theory/test_newton.py"
    assert "tests/book/test_claims.py::test_claim[nn-newton-safe]" in found


def test_the_summary_counts_by_package():
    of = lambda file, outcome: {"file": file, "outcome": outcome}
    assert command.summary(
        [
            of("normalnorm/theory/a.py", "killed"),
            of("normalnorm/theory/b.py", "timeout"),
            of("normalnorm/theory/b.py", "no tests"),
            of(kernel.KERNEL, "equivalent"),
        ]
    ) == {
        "theory": {"mutants": 3, "killed": 2, "survived": 1},
        "kernel": {"mutants": 1, "equivalent": 1},
    }


def test_a_mutant_of_the_kernel_has_a_compiler(tmp_path, monkeypatch):
    "Which is a file of the cache, of which only what was compiled is old."
    copy = kernel.Copy(tmp_path, "SSE2")

    def python(*words):
        assert Path(copy.env["CXX"].split()[0]).exists()
        made = tmp_path / "cache" / f"{len(list(tmp_path.rglob('*.so')))}.so"
        made.write_text((tmp_path / kernel.KERNEL).read_text("utf-8"))

    monkeypatch.setattr(copy, "python", python)
    one, other, again = map(copy.compiled, ("1", "2", "1"))
    assert one == again != other
