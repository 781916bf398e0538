"""The kernel held to AVX2, with PyTorch held to the same, whatever processor
runs this: all its tests and chapters. Held to SSE2: the driver without Python.

The tests on SSE2, other compilers, ARM and the sanitizers: `make
test-processors`.
"""

import shutil
import subprocess
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.kernel import compile_once, record
from tools import processors
from tools.files import load, python, ran, save

BOOK = find_spec("nbclient") is not None  # whether chapters run here


PLACES = {
    "batch/noise/of u": "batch/contiguous/noise/of u",
    "long/no noise/out": "long/contiguous/no noise/out",
    "matrix/dropout/of weight": "matrix/contiguous/dropout/of weight",
    "given/out": "given/channels last/out",
    "far/of u": "far/contiguous/of u",
    "proxy/gelu/var": "proxy/gelu/var",
    "values/out": "values/-1/",
    "normals/out": "normals/0/63",
}


@pytest.fixture
def held(monkeypatch):
    """The environment of a process held to an instruction set.

    Its kernel and its chapters lie where workers and later runs find them; who
    comes second waits for the compilation, and what is fresh is not run again.
    """

    def to(instructions: str) -> dict:
        if shutil.which("g++") is None:
            pytest.skip("there is no g++")
        if reason := processors.lacking(instructions):
            pytest.skip(reason)
        monkeypatch.setitem(processors.COMPILERS, "gcc", compile_once.COMMAND)
        folder = processors.ROOT / "_build" / f"held-{instructions}"
        return processors.environment(instructions, "gcc", folder, threads=2)

    return to


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")
def test_the_same_is_compiled_once(tmp_path, monkeypatch):
    """Wherever its source lies; again where a header or an option is another,
    or kernels would be tested that are no more.
    """
    monkeypatch.setattr(compile_once, "KEPT", tmp_path / "kept")
    header = tmp_path / "x.h"

    def kept(number, *options):
        header.write_text(f"#define X {number}\n")
        for name in "ab":
            source = tmp_path / name / "f.cpp"
            source.parent.mkdir(exist_ok=True)
            source.write_text('#include "../x.h"\nint f() { return X; }\n')
            made = str(source.with_suffix(".o"))
            words = ("g++", *options, "-c", str(source), "-o", made)
            assert not compile_once.main(*words)
        return len([*(tmp_path / "kept").glob("*")])

    assert kept(1) == kept(1) == 1
    assert kept(1, "-O2") == 2
    assert kept(2) == 3


def test_the_tests_of_the_kernel(held):
    "The same tests with the same tolerances, by two threads."
    environment = held("AVX2")
    processors.compiled("AVX2", environment)
    done = python(
        *"-m pytest -p no:cacheprovider -p no:xdist --tb=short".split(),
        *processors.TESTS,
        *BOOK * processors.CHAPTERS,
        cwd=processors.ROOT,
        env=environment,
    )
    outcome = processors.tested(done.stdout, done.returncode)
    assert outcome["passed"] and "skipped" not in outcome["summary"], "\n".join(
        [
            outcome["summary"],
            *outcome["failures"],
            done.stdout[-3000:],
            done.stderr[-1000:],
        ]
    )


def test_the_driver_notices_wrong_numbers(held, tmp_path):
    """Linked with the kernel that the package itself has compiled: the recorded
    numbers come out, and those that are changed are refused by name.
    """
    folder, changed = tmp_path / "kernel", tmp_path / "changed"
    environment = held("SSE2") | {"NORMALNORM_CACHE": str(folder)}
    with pytest.raises(processors.Failed, match="were asked for"):
        processors.compiled("AVX-512", environment)
    (kernel,) = folder.glob("native-*.so")
    program, compiled = tmp_path / "driver", str(tmp_path / "driver.o")
    strict = "g++ -std=c++17 -Wall -Wextra -Werror -c".split()
    source = str(processors.DRIVER)
    assert not compile_once.main(*strict, source, "-o", compiled)
    linked = [compiled, str(kernel), f"-Wl,-rpath,{folder}", "-fopenmp"]
    subprocess.run(["g++", *linked, "-o", str(program)], check=True)
    numbers = record.from_bytes(processors.RECORDED.read_bytes())
    done = ran([str(program), str(processors.RECORDED), "4"])
    assert done.returncode == 0 and " 0 wrong" in done.stdout, done.stdout
    for name in PLACES:
        numbers[name] = numbers[name].copy()
        numbers[name][6] *= 1 + 1e-3
    changed.write_bytes(record.to_bytes(numbers))
    done = ran([str(program), str(changed), "1"])
    found = done.stdout + done.stderr
    assert done.returncode == 1, found
    assert [p for p in PLACES.values() if f"WRONG {p}" not in found] == []


def test_record_is_reproduced():
    """By the definition, from the script: inputs to the last bit, outputs but
    for the rounding of another processor's float64.
    """
    recorded, made = record.from_bytes(record.FILE.read_bytes()), record.made()
    assert (
        recorded.keys() == made.keys()
        and len(record.FILE.read_bytes()) < 300_000
    )
    for name, x in made.items():
        y = recorded[name]
        assert x.dtype == y.dtype and x.shape == y.shape, name
        last = name.split("/")[-1]
        if (
            x.dtype.kind == "i"
            or last
            in (
                "u",
                "grad",
                "weight",
                "bias",
                "shift",
                "scale",
                "h",
                "upstream",
            )
            or name.startswith("tolerance")
        ):
            assert np.array_equal(x, y, equal_nan=True), name
        elif x.dtype == np.float64:
            np.testing.assert_allclose(x, y, rtol=1e-12, err_msg=name)
        else:
            # rounded to float32 at the end; noise is float32 from the beginning
            largest = np.abs(y[np.isfinite(y)]).max(initial=0)
            # far out values end where the definition has its limit, whose
            # exponent, near 88, has a rounding of its own
            np.testing.assert_allclose(
                x,
                y,
                rtol=2.0**-23 * (88 if name.startswith("far/") else 1),
                atol=(
                    1e-6
                    if {"normals", "noise", "dropout"} & set(name.split("/"))
                    else 1e-12
                )
                * largest,
                err_msg=name,
            )


def test_what_a_processor_lacks(monkeypatch):
    "By the package's own judgement (tests/layers/test_compiler.py has that)."
    from normalnorm.layers.engines import compiler

    has = ["x86-64", "x86-64-v3"]
    monkeypatch.setattr(compiler, "_levels", lambda: has)
    assert processors.lacking("SSE2") == processors.lacking("AVX2") == ""
    said = processors.lacking("AVX-512")
    assert "has no x86-64-v4" in said and said.endswith(", ".join(has))


def test_missing_tools(monkeypatch, capsys):
    "The command says what to install, and stops before it runs anything."
    monkeypatch.setattr(
        processors,
        "find",
        lambda tool: None if "aarch64" in tool else "/usr/bin/" + tool,
    )
    monkeypatch.setattr(
        processors, "perform", lambda *_: pytest.fail("nothing runs")
    )
    assert processors.main(["--only", "aarch64"]) == 2
    assert (
        "apt-get install g++-aarch64-linux-gnu qemu-user-static"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        processors.main(["--only", "pdp-11"])
    assert "no part has pdp-11" in capsys.readouterr().err


def test_recorded_and_gone_on_with(monkeypatch, tmp_path, capsys):
    """What has passed is not run again, what has failed is; a skipped part says
    why; the record keeps nothing of another kernel.
    """
    ran, outcomes = [], {"good": True, "bad": False, "worse": None}

    def perform(name, folder):
        ran.append(name)
        if outcomes[name] is None:
            raise processors.Failed("no such flag")
        return {"passed": outcomes[name], "summary": "some"}

    made = [
        processors.Part(name, (), None, partial(perform, name))
        for name in outcomes
    ]
    made.append(processors.Part("other", (), "AVX-512", perform))
    no_avx = "this processor has no avx512f"
    monkeypatch.setattr(processors, "parts", lambda: made)
    monkeypatch.setattr(processors, "lacking", lambda name: no_avx)
    monkeypatch.setattr(processors, "RECORD", tmp_path / "record.json")
    old = processors.about() | {"native source": "another"}
    save(processors.RECORD, old | {"parts": {"good": {"passed": True}}})
    for expected in ([*outcomes], ["bad", "worse"]):
        assert processors.main(["--record"]) == 1 and ran == expected
        ran.clear()
    shown = capsys.readouterr().out
    for said in ("2 of 4 parts failed: bad, worse", no_avx, "no such flag"):
        assert said in shown
    recorded = load(processors.RECORD)
    passed = [o["passed"] for o in recorded["parts"].values()]
    assert passed == [True, False, False, None]
    assert recorded["not run"] == []
    processors.main(["--only", "good"])
    assert ran == ["good"]


def test_every_test_held_to_a_set(monkeypatch, tmp_path):
    "But those that cannot be; chapters are run in a folder of their own."
    words, held = [], {}

    def python(*given, env, cwd):
        words.extend(given)
        held.update(env)
        return subprocess.CompletedProcess(given, 0, "1 passed in 1.00s\n", "")

    monkeypatch.setattr(processors, "python", python)
    monkeypatch.setattr(processors, "compiled", lambda *_: None)
    (tmp_path / "own").mkdir()
    assert processors.run_whole("SSE2", tmp_path / "own")["passed"]
    assert "tests" in words and {*processors.NOT_HELD} < {*words}
    assert held["ATEN_CPU_CAPABILITY"] == "default"
    assert Path(held["CXX"]).read_text().endswith('"$@" -march=x86-64\n')
    assert Path(held["NORMALNORM_TEST_BUILD"]).is_relative_to(tmp_path)
