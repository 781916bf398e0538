"The mutation tool on a toy whose mutants are known; and the recorded outcome."

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.book
mutate = pytest.importorskip("tools.mutate")

ROOT = Path(__file__).resolve().parent.parent
TOY = """"A text: 1 + 1 is not changed."
__all__ = ["shift"]
LIMIT = 3


def shift(x: int = 2, *, up: bool = True) -> int:
    "x and one, or none above the limit: 2 > 1."
    if x > LIMIT:
        raise ValueError(f"{x + 1} is more than {LIMIT - 0}")
    return x + 1 if up else -x


def endless(n):
    while n > 0:
        n -= 1
    return n


def unused(y):
    return y * 7
"""
TESTS = """import subprocess
import sys

import pytest
from toy.sums import endless, shift


@pytest.mark.parametrize("x", [0, 1, 2])
def test_up(x):
    assert shift(x) == x + 1


def test_default():
    assert shift() == 3


def test_down():
    assert shift(2, up=False) == -2


def test_refused():
    with pytest.raises(ValueError):
        shift(4)


def test_end():
    assert endless(3) == 0


def test_fails():
    assert shift(1) == 5


def test_in_another_process():
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert shift(1) == 2
"""


@pytest.fixture
def toy(tmp_path):
    for name, text in (
        ("toy/__init__.py", ""),
        ("toy/sums.py", TOY),
        ("tests/test_sums.py", TESTS),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def command(root, *arguments):
    return [
        sys.executable,
        "-m",
        "tools.mutate",
        "--root",
        str(root),
        "--package",
        "toy=toy/*.py",
        "--jobs",
        "1",
        "--grace",
        "1",
        *arguments,
    ]


def run(root, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command(root, *arguments),
        cwd=ROOT,
        text=True,
        env=environment,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def changes(source, kind=mutate.python_mutants):
    return [(m.operator, m.after) for m in kind("toy/sums.py", source)]


def test_mutants_of_a_line():
    "Each change once; texts, messages, types and public names are left alone."
    assert changes("def f(a, b):\n    return a + 2.0 * -b\n") == [
        ("arithmetic", "return (a - 2.0 * -b)"),
        ("constant", "return a + 2.1 * -b"),
        ("arithmetic", "return a + (2.0 / -b)"),
        ("sign", "return a + 2.0 * (b)"),
    ]
    assert changes("def f(a):\n    return a if 0 < a < 2 else exp(a)\n") == [
        ("integer + 1", "return a if 1 < a < 2 else exp(a)"),
        ("integer - 1", "return a if (-1) < a < 2 else exp(a)"),
        ("boundary", "return a if (0 <= a < 2) else exp(a)"),
        ("boundary", "return a if (0 < a <= 2) else exp(a)"),
        ("comparison", "return a if (0 >= a < 2) else exp(a)"),
        ("comparison", "return a if (0 < a >= 2) else exp(a)"),
        ("negation", "return a if (not (0 < a < 2)) else exp(a)"),
        ("integer + 1", "return a if 0 < a < 3 else exp(a)"),
        ("integer - 1", "return a if 0 < a < 1 else exp(a)"),
        ("call", "return a if 0 < a < 2 else (expm1(a))"),
    ]
    assert changes("class A:\n    b: int | None = None\n") == []
    assert changes("A = int | str\n__all__ = ['a'] + ['b']\n") == []
    assert changes("def f(x):\n    'one + 1'\n    g(x)\n    x += h\n") == [
        ("statement", "pass"),
        ("arithmetic", "x -= h"),
        ("statement", "pass"),
    ]
    assert changes("x = a and not b\n") == [
        ("and, or", "x = (a or not b)"),
        ("negation", "x = a and (b)"),
    ]
    letters = "def f(é):\n    return 'ééé', é - 1\n"
    assert ("arithmetic", "return 'ééé', (é + 1)") in changes(letters)


def test_every_mutant_of_the_library_parses():
    project = mutate.Project(ROOT, {"x": ["normalnorm/theory/newton.py"]})
    mutants = project.mutants("x")
    source = (ROOT / "normalnorm/theory/newton.py").read_text()
    assert len(mutants) > 100 and len({m.id for m in mutants}) == len(mutants)
    for mutant in mutants:
        compile(mutant.of(source), "x", "exec")


def test_mutants_of_the_kernel():
    "By tokens: comments, headers and templates stay; so do lines for speed."
    source = (
        "#include <x>\ntemplate <int N>\nfloat f(float a) { // a + 1\n"
        "    a = a * 0x1p-1f;\n    __builtin_prefetch(p + 1);\n"
        "#if defined(WIDE) && !defined(NARROW)\n    a = a + b;\n#else\n"
        "    a = a - c;\n#endif\n    if (a < 2) a += 1;\n}\n"
    )
    found = [
        (m.lines[0], m.operator, m.after)
        for m in mutate.kernel_mutants("k.cpp", source, {"WIDE"})
    ]
    assert found == [
        (4, "statement", ";"),
        (4, "arithmetic", "a = a / 0x1p-1f;"),
        (4, "constant", "a = a * 0x1.0cccccccccccdp-1f;"),
        (7, "statement", ";"),
        (7, "arithmetic", "a = a - b;"),
        (11, "negation", "if (!(a < 2)) a += 1;"),
        (11, "boundary", "if (a <= 2) a += 1;"),
        (11, "comparison", "if (a >= 2) a += 1;"),
        (11, "integer + 1", "if (a < 3) a += 1;"),
        (11, "integer - 1", "if (a < 1) a += 1;"),
        (11, "arithmetic", "if (a < 2) a -= 1;"),
        (11, "integer + 1", "if (a < 2) a += 2;"),
        (11, "integer - 1", "if (a < 2) a += 0;"),
    ]
    other = mutate.kernel_mutants("k.cpp", source, {"WIDE", "NARROW"})
    assert {m.lines[0] for m in other} == {4, 9, 11}
    assert {m.function for m in other} == {"f"}


def test_the_draw_is_decided_by_the_seed():
    mutants = mutate.python_mutants("a.py", TOY) + mutate.python_mutants(
        "b.py", "def g(x):\n    return x + 1\n"
    )
    ids = lambda seed, n: [m.id for m in mutate.draw(mutants, n, seed)]
    assert ids(1, 9) == ids(1, 9) != ids(2, 9)
    assert set(ids(1, 6)) <= set(ids(1, 9)) and len(ids(1, 9)) == 9
    assert {m.file for m in mutate.draw(mutants, 5, 1)} == {"a.py", "b.py"}
    assert len(ids(1, 999)) == len(mutants)
    assert mutate.shares({"a": 90, "b": 9, "c": 1}, 10) == {
        "a": 8,
        "b": 1,
        "c": 1,
    }


def test_a_change_elsewhere_keeps_the_draw():
    before = mutate.python_mutants("a.py", TOY)
    after = mutate.python_mutants("a.py", TOY.replace("y * 7", "y") + "# end")
    keys = lambda mutants: {m.key for m in mutate.draw(mutants, 8, 3)}
    lost = {m.key for m in before} - {m.key for m in after}
    assert keys(before) - lost <= keys(after)
    assert not {m.id for m in before} & {m.id for m in after}


def test_killed_survived_timed_out_and_recorded(toy):
    "The outcome of each mutant of the toy, as it was worked out by hand."
    known = toy / "results" / "mutation" / "equivalents.json"
    known.parent.mkdir(parents=True)
    known.write_text(
        json.dumps(
            [
                dict(
                    file="toy/sums.py",
                    function="shift",
                    before="if x > LIMIT:",
                    after="if (x >= LIMIT):",
                    argument="for the test's sake",
                )
            ]
        )
    )
    run(toy, "--record")
    rows = [
        json.loads(line)
        for line in (known.parent / "mutants.jsonl").read_text().splitlines()
    ]
    found = {(r["before"], r["after"]): r["outcome"] for r in rows}
    returned = "return x + 1 if up else -x"
    for after in (
        "return (x - 1) if up else -x",
        "return x + 2 if up else -x",
        "return x + 1 if up else (x)",
        "return x + 1 if (not (up)) else -x",
    ):
        assert found[returned, after] == "killed"
    assert found["LIMIT = 3", "LIMIT = 4"] == "killed"
    assert found["LIMIT = 3", "LIMIT = 2"] == "survived"
    assert found["if x > LIMIT:", "if (x <= LIMIT):"] == "killed"
    assert found["if x > LIMIT:", "if (x >= LIMIT):"] == "survived"
    assert found["return y * 7", "return (y / 7)"] == "survived"
    assert found["n -= 1", "pass"] == "timed out"
    assert (
        found[
            "def shift(x: int = 2, *, up: bool = True) -> int:",
            "def shift(x: int = 3, *, up: bool = True) -> int:",
        ]
        == "killed"
    )
    # a test that fails by itself, or starts a process, kills nothing
    assert not {r.get("by") for r in rows} & {
        "tests/test_sums.py::test_fails",
        "tests/test_sums.py::test_in_another_process",
    }
    summary = json.loads((known.parent / "summary.json").read_text())
    toys = summary["packages"]["toy"]
    assert toys["equivalent"] == 1 and toys["mutants"] == len(rows)
    assert toys["equivalents"][0]["argument"] == "for the test's sake"
    assert toys["killed"] + toys["survived"] + 1 == len(rows)
    assert toys["score"] == round(toys["killed"] / (len(rows) - 1), 4) < 0.95
    assert {s["after"] for s in toys["survivors"]} >= {"return (y / 7)"}


def test_an_interrupted_run_goes_on(toy):
    log = toy / "_build" / "mutation" / "mutants.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(8):  # on a busy machine it may end too early
        process = subprocess.Popen(
            command(toy), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + 120
        while not log.exists() or log.read_text().count("\n") < 3:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        if process.wait(60):
            break
        log.unlink()
    before = log.read_text().splitlines()
    with log.open("a") as file:  # as if cut off in writing
        file.write('{"id": "half')
    printed = run(toy)
    after = log.read_text().splitlines()
    assert after[: len(before)] == before
    ids = [json.loads(r)["id"] for r in after if not r.endswith("half")]
    assert len(set(ids)) == len(ids) > len(before)
    assert f"/{len(ids) - len(before)} " in printed


def test_survivors_meet_new_tests(toy):
    survived = lambda: run(toy, "--survivors").count("survived in toy")
    run(toy)
    many = survived()
    assert many
    tests = toy / "tests" / "test_sums.py"
    tests.write_text(
        tests.read_text() + "\n\ndef test_unused():\n"
        "    from toy.sums import unused\n"
        "    assert unused(2) == 14\n"
    )
    run(toy)
    assert survived() == many - 3


def test_recorded_outcome():
    """What the summary says is what the rows say; survivors are named,
    equivalents argued; 300 mutants, 95 of 100 killed in each package."""
    folder = ROOT / "results" / "mutation"
    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rows = [
        json.loads(line)
        for line in (folder / "mutants.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    packages = found["packages"]
    assert set(packages) == {
        "theory",
        "layers",
        "analysis",
        "experiments",
        "kernel",
    }
    assert len({r["id"] for r in rows}) == len(rows)
    known = mutate.equivalents(ROOT)
    for name, package in packages.items():
        mine = [r for r in rows if r["package"] == name]
        equal = [r for r in mine if mutate.argument_of(r, known)]
        killed = [r for r in mine if r["outcome"] in ("killed", "timed out")]
        assert package["mutants"] == len(mine)
        assert package["killed"] == len(killed)
        assert package["equivalent"] == len(equal)
        named = {s["id"] for s in package["survivors"]}
        assert named == {r["id"] for r in mine} - {r["id"] for r in killed} - {
            r["id"] for r in equal
        }
        assert all(r["by"] for r in killed)
        assert len(mine) >= 60 and package["score"] >= 0.95, name
        assert package["score"] == round(
            len(killed) / (len(mine) - len(equal)), 4
        )
    assert len(rows) >= 300 and found["limit"] == mutate.SECONDS
    assert all(len(e["argument"]) > 20 for e in known)
