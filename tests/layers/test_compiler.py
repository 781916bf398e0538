"""The cache of compiled kernels, the compilers behind it, and what is said
where there is none: damage, kills, full disks, foreign flags.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import normalnorm
from normalnorm.layers import backends
from normalnorm.layers.backends import normality_norm, set_backend
from normalnorm.layers.engines import compiled, compiler, native
from normalnorm.layers.functional import layer_normal_norm
from tests.layers.steps import python

ROOT = Path(normalnorm.__file__).parents[1]
USUAL = next(
    (
        path
        for name in ("g++", "clang++", "c++")
        if (path := shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(
    os.name != "posix" or USUAL is None,
    reason="scripts stand in for compilers, processes are forked, and a "
    "compiler compiles",
)
SEVEN = """
extern "C" int seven() { return 7; }
extern "C" int threads(int n) { int count = 0;
#pragma omp parallel num_threads(n) reduction(+:count)
count++;
return count; }
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    "A folder with a small source, and the cache in it."
    monkeypatch.setenv("NORMALNORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler, "_for_this_process", {})
    compiler._warn_once.cache_clear()
    (tmp_path / "seven.cpp").write_text(SEVEN)
    return tmp_path


def kernels(place):
    return sorted((place / "cache").glob("*.so"))


def program(place, name, before=""):
    """A compiler that writes its arguments down, does `before`, and then what
    the usual one does.
    """
    path = place / name
    path.write_text(
        f'#!/bin/sh\necho "$@" >> "{place}/{name}.log"\n{before}\n'
        f'exec {USUAL} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def calls(place, name, word="seven.cpp"):
    log = place / f"{name}.log"
    return (
        [line for line in log.read_text().splitlines() if word in line]
        if log.exists()
        else []
    )


BEGINS = """
import sys
from pathlib import Path
from normalnorm.layers.engines import compiler
for _ in range(2):
    try:
        compiler.load(Path(sys.argv[1]), ["seven"], wait=False)
    except compiler.Building:
        continue
    print("it was compiled", file=sys.stderr)
"""


def load(place, *functions):
    return compiler.load(place / "seven.cpp", functions or ("seven",))


def failure(place):
    with pytest.raises(compiler.CompilerError) as caught:
        load(place)
    return str(caught.value)


def forked(function, *arguments):
    "The exit status of a child, which has what this process has imported."
    child = os.fork()
    if not child:
        status = 99
        try:
            status = function(*arguments) or 0
        finally:
            os._exit(status)
    return child


def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def seven(place):
    return load(place).seven() != 7


# ---- $CXX -------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, command, flags",
    [
        ("{spaced}", ["{spaced}"], []),
        (
            "env '{spaced}' -O1 -DA='b c'",
            ["/usr/bin/env", "{spaced}"],
            ["-O1", "-DA=b c"],
        ),
        ("-O1", None, ["-O1"]),
        (
            "{spy} -O1 -Dseven=eight -Useven",
            ["{spy}"],
            ["-O1", "-Dseven=eight", "-Useven"],
        ),
    ],
)
def test_command_and_flags(place, monkeypatch, given, command, flags):
    names = {"spy": program(place, "spy"), "spaced": program(place, "a spy")}
    monkeypatch.setenv("CXX", given.format(**names))
    found = compiler._compiler()
    assert list(found.flags) == flags
    if command:
        assert [Path(c).name for c in found.command] == [
            Path(c.format(**names)).name for c in command
        ]
    assert load(place).seven() == 7
    for line in calls(place, "spy") + calls(place, "a spy"):
        assert not flags or line.index("-O3") < line.index(
            "-march="
        ) < line.index("-fopenmp") < line.index("-O1")


@pytest.mark.parametrize(
    "given, words",
    [
        (
            "no-such-compiler -O1",
            "no C++ compiler was found (looked for no-such-compiler)",
        ),
        ("g++ 'half", "cannot be split into words"),
        ("{spy} -fno-such-flag", "-fno-such-flag"),
        ("env no-such-compiler", "no-such-compiler"),
    ],
)
def test_cxx_that_does_not_work(place, monkeypatch, given, words):
    monkeypatch.setenv("CXX", given.format(spy=program(place, "spy")))
    assert words in failure(place)
    assert not calls(place, "spy")  # found out by the empty function


def test_without_a_compiler_what_is_kept_is_used(place, monkeypatch):
    load(place)
    monkeypatch.setenv("PATH", str(place))
    assert load(place).seven() == 7
    (place / "seven.cpp").write_text(SEVEN + "\n")
    assert (
        "no C++ compiler was found (looked for g++, clang++, c++): install "
        "one, e.g." in failure(place)
    )


# ---- foreign compilers ------------------------------------------------------


def test_unknown_flags_do_not_cost_a_compilation(place, monkeypatch):
    "The source is compiled once, whichever flags are refused."
    for name, refused in {
        "wide": "-mprefer*",
        "levels": "-march=x86-64*",
        "march": "-march=*",
        "threads": "-fopenmp",
        "all": "-fopenmp|-m*",
    }.items():
        monkeypatch.setenv(
            "CXX",
            program(
                place,
                name,
                f'for a in "$@"; do case $a in {refused}) echo "error: unknown '
                'option $a"; exit 1;; esac; done',
            ),
        )
        assert load(place).seven() == 7
        (line,) = (line for line in calls(place, name) if " -c " in line)
        assert (
            ("-fopenmp" in line) == ("fopenmp" not in refused)
            and ("-march" in line) == (name not in ("march", "all"))
            and ("-march=native" in line or name != "levels")
        )


@pytest.mark.filterwarnings("error")
def test_without_threads_there_is_one_warning(place, monkeypatch):
    monkeypatch.setenv(
        "CXX",
        program(
            place,
            "spy",
            'for a in "$@"; do case $a in -fopenmp) echo "error: unknown '
            'option $a"; exit 1;; esac; done',
        ),
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for _ in range(2):  # made, and kept
        compiler._warn_once.cache_clear()
        with pytest.warns(UserWarning) as seen:
            for _ in range(2):
                assert load(place, "threads").threads(2) == 1
        (warning,) = seen
        assert "runs on one thread" in str(warning.message)
        assert warning.filename == __file__
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    compiler._warn_once.cache_clear()
    load(place)


@pytest.mark.parametrize(
    "what, attempts",
    [
        ("internal compiler error: in vect_transform_reduction", 1),
        ("fatal error: Killed signal terminated program cc1plus", 1),
        ("seven.cpp:2:1: error: expected unqualified-id", 2),
    ],
)
def test_a_breakdown_is_not_repeated(place, monkeypatch, what, attempts):
    refuse = (
        f'case "$*" in *seven*) echo "seven.cpp: note"; echo "{what}"; '
        "exit 1;; esac"
    )
    monkeypatch.setenv("CXX", program(place, "spy", refuse))
    told = failure(place)
    assert len(calls(place, "spy")) == attempts and what in told
    assert "seven.cpp could not be compiled with" in told


def test_the_second_attempt_names_no_processor(place, monkeypatch):
    monkeypatch.setenv(
        "CXX",
        program(
            place,
            "spy",
            'case "$*" in *march*seven*) echo "seven.cpp:3:1: error: no such '
            'intrinsic"; exit 1;; esac',
        ),
    )
    assert load(place).seven() == 7
    assert [
        "-march=" in line for line in calls(place, "spy") if " -c " in line
    ] == [True, False]


@pytest.mark.parametrize("hangs", ["*empty*", "*seven*"])
def test_a_compiler_that_hangs_is_ended(place, monkeypatch, hangs):
    monkeypatch.setattr(compiler, "_PROBE", 1.0 if "empty" in hangs else 30.0)
    monkeypatch.setattr(compiler, "_LIMIT", 2.0)
    monkeypatch.setenv(
        "CXX",
        program(
            place,
            "slow",
            f'case "$*" in {hangs}) (sleep 4; touch '
            f'"{place}/alive") & wait; exit 1;; esac',
        ),
    )
    began = time.monotonic()
    told = failure(place)
    assert "took longer than" in told and time.monotonic() - began < 30
    time.sleep(4)
    assert not (place / "alive").exists()  # what it had started is ended, too


# ---- what is kept -----------------------------------------------------------


def test_a_failure_is_remembered(place, monkeypatch):
    refuse = (
        'case "$*" in *seven*) [ -e "$0.fixed" ] || { echo "seven.cpp:1: '
        'error: no"; exit 1; };; esac'
    )
    monkeypatch.setenv("CXX", program(place, "spy", refuse))
    first = failure(place)
    asked = len(calls(place, "spy", ""))
    second = failure(place)
    (note,) = (place / "cache").glob("*.failed")
    assert second.startswith(first) and "delete" in second
    assert str(note) in second and len(calls(place, "spy", "")) == asked

    def tried_again():
        nonlocal asked
        before, asked = asked, (failure(place), len(calls(place, "spy", "")))[1]
        return asked > before

    changes = (
        lambda: note.write_text(""),
        lambda: note.write_text("\n \n"),
        lambda: (place / "seven.cpp").write_text(SEVEN + "\n"),
        lambda: program(place, "spy", refuse + " # the next release"),
        lambda: monkeypatch.setenv("CXX", os.environ["CXX"] + " -O1"),
    )
    for change in changes:
        assert not tried_again()
        change()
        assert tried_again()
    (place / "spy.fixed").touch()
    assert not tried_again()
    for note in (place / "cache").glob("*.failed"):
        note.unlink()
    assert load(place).seven() == 7


def damages(content):
    yield from (
        content[:size]
        for size in (0, 1, 100, 4096, len(content) * 3 // 4, len(content) - 1)
    )
    yield from (
        b"damaged",
        bytes(len(content)),
        content + b"\0",
        content.replace(b"seven", b"eight"),
    )
    for place in range(1, 8):
        at = len(content) * place // 8
        yield content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "hours, remembered",
    [(0.01, True), (23.9, True), (24.1, False), (-1.0, False)],
)
def test_a_note_of_a_failure_counts_for_a_day(tmp_path, hours, remembered):
    note = tmp_path / "note"
    note.write_text("error: no such thing\n\nall that was said\n")
    written = note.stat().st_mtime - 3600 * hours
    os.utime(note, (written, written))
    if remembered:
        with pytest.raises(
            compiler.CompilerError,
            match=rf"no such thing. That was {60 * hours:.0f} "
            rf"min ago",
        ):
            compiler._recall(note)
    else:
        compiler._recall(note)


def test_a_damaged_file_is_made_anew(place, monkeypatch):
    "In children, which would die of it; what they make is whole again."
    load(place)
    (kernel,) = kernels(place)
    content = kernel.read_bytes()
    found = list(damages(content))
    assert len(set(found)) == len(found) == 17
    for damage in found:
        for path in kernels(place):
            path.unlink()
        kernel.write_bytes(damage)
        assert ended(forked(seven, place)) == 0, (
            f"{len(damage)} of {len(content)} bytes"
        )
        (kept,) = kernels(place)
        assert (
            compiler._digest(kept) == kept.stem[-32:]
            and b"seven" in kept.read_bytes()
        )
    # none of these reaches the loader
    monkeypatch.setattr(compiler.ctypes, "CDLL", None)
    for damage in found:
        kernel.write_bytes(damage)
        key = kernel.name.split("-")[1]
        of = compiler._kept(place / "cache", "seven", key, None, ())
        assert of is None


def test_a_source_without_the_functions(place):
    with pytest.raises(
        compiler.CompilerError, match="has no function eight, nine"
    ):
        load(place, "eight", "seven", "nine")


def test_a_file_for_another_loader_stays(place):
    "What cannot be loaded here may be good for somebody who shares the folder."
    load(place)
    (kernel,) = kernels(place)
    foreign = kernel.with_name(
        f"{kernel.stem[:-34]}0-"
        f"{compiler.hashlib.sha256(b'foreign').hexdigest()[:32]}.so"
    )
    foreign.write_bytes(b"foreign")
    assert load(place).seven() == 7 and foreign.exists() and kernel.exists()
    kernel.unlink()
    assert (
        ended(forked(seven, place)) == 0
        and foreign.exists()
        and kernel.exists()
    )


def killed_once_kept(place):
    kept = os.replace
    os.replace = lambda *names: (
        kept(*names),
        os.kill(os.getpid(), signal.SIGKILL),
    )
    seven(place)


def test_killed_at_any_moment(place, monkeypatch):
    """16 times during a compilation, and when the kernel is kept but the lock
    not yet removed: the next process has a whole kernel, and an hour later
    nothing of the others is left but an empty lock.
    """
    monkeypatch.setenv("CXX", program(place, "spy"))
    began = time.monotonic()
    assert ended(forked(seven, place)) == 0
    whole, died = time.monotonic() - began, 0
    for number in range(16):
        for path in kernels(place):
            path.unlink()
        child, wait = forked(seven, place), whole * (number + 0.5) / 15
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
        if ended(child) == -signal.SIGKILL:
            died += 1
        else:  # a quieter moment than the first one: it takes less than that
            whole = wait
        for path in kernels(place):
            assert compiler._digest(path) == path.stem[-32:]
        assert ended(forked(seven, place)) == 0
        assert len(kernels(place)) == 1
    kernels(place)[0].unlink()
    assert ended(forked(killed_once_kept, place)) == -signal.SIGKILL
    assert ended(forked(seven, place)) == 0
    left = list((place / "cache").glob("making-*"))
    assert died >= 6 and left  # some had begun
    for folder in left:
        os.utime(folder, (time.time() - 3700,) * 2)
    (place / "seven.cpp").write_text(SEVEN + "\n")
    load(place)
    assert {p.suffix for p in (place / "cache").iterdir()} == {".so", ".lock"}


def test_two_at_once_compile_once(place, monkeypatch):
    monkeypatch.setenv(
        "CXX", program(place, "spy", 'case "$*" in *seven*) sleep 1;; esac')
    )
    children = [forked(seven, place) for _ in range(4)]
    assert [ended(child) for child in children] == [0] * 4
    assert len([line for line in calls(place, "spy") if " -c " in line]) == 1
    assert [p.suffix for p in (place / "cache").iterdir()] == [".so"]


def test_full_disk(place):
    """Files may not grow beyond a limit, from nothing to enough: an error or a
    kernel, which is whole, and the failure is not kept.
    """
    resource = pytest.importorskip("resource")
    load(place)
    size = kernels(place)[0].stat().st_size

    def limited(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            return seven(place)
        except compiler.CompilerError as error:
            return 3 if "seven.cpp could not be compiled" in str(error) else 4

    outcomes = []
    for limit in (0, 20, 700, 3000, size // 2, size - 100, 4 * size):
        for path in kernels(place):
            path.unlink()
        outcomes.append(ended(forked(limited, limit)))
        assert all(
            compiler._digest(path) == path.stem[-32:] for path in kernels(place)
        )
        assert not list((place / "cache").glob("*.failed")), outcomes
        assert ended(forked(seven, place)) == 0
    assert (
        outcomes[0] in (0, 3)
        and outcomes[3:] == [3, 3, 3, 0]
        and set(outcomes) <= {0, 3}
    )


# ---- what is carried --------------------------------------------------------

V3 = (
    "fpu cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3 abm avx avx2 bmi1 bmi2 "
    "f16c fma movbe"
).split()
V4 = V3 + "avx512f avx512bw avx512cd avx512dq avx512vl".split()
LEVELS = ["x86-64", "x86-64-v3", "x86-64-v4"]


@pytest.mark.parametrize(
    "number, lines",
    [
        (1, [["fpu", "sse2"]]),
        (1, [V3[:7]]),
        (2, [V3]),
        (3, [V4]),
        (3, [V4, V4]),
        (2, [V4, V3]),
        (1, [V3 + V4[-5:-1], ["fpu"]]),
        *((1, [[f for f in V4 if f != lacking]]) for lacking in V3[1:]),
        *((2, [[f for f in V4 if f != lacking]]) for lacking in V4[-5:]),
    ],
)
def test_levels(monkeypatch, number, lines):
    "By all that a level has; of several kinds of cores, what each has."
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(
        compiler,
        "_processor",
        lambda: "\n".join(
            [
                "model name\t: avx512f",
                *(f"flags\t\t: {' '.join(x)}" for x in lines),
            ]
        ),
    )
    assert compiler._levels() == LEVELS[:number]
    assert compiler._options()[0] == compiler._flags(LEVELS[number - 1])
    for patch in (
        (sys, "platform", "darwin"),
        (compiler.platform, "machine", lambda: "aarch64"),
        (sys, "maxsize", 2**31 - 1),
        (compiler, "_processor", lambda: "Features : fp asimd"),
    ):
        with pytest.MonkeyPatch.context() as other:
            other.setattr(*patch)
            assert (
                compiler._levels() == []
                and compiler._options() == compiler._PROCESSOR
            )


def test_levels_of_this_processor_are_the_loaders():
    "As the C library's loader names them, which asks the processor itself."
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    if not loader.exists():
        pytest.skip("no loader of the C library for x86-64")
    told = subprocess.run([loader, "--help"], capture_output=True, text=True)
    if "x86-64-v4" not in told.stdout:
        pytest.skip("this loader knows no levels")
    assert [
        level for level in LEVELS[1:] if f"{level} (supported" in told.stdout
    ] == compiler._levels()[1:]


CARRIED = pytest.mark.skipif(
    not compiler._levels() or "clang" in Path(USUAL or "").resolve().name,
    reason="what is carried is made by g++, on Linux on x86-64",
)


@CARRIED
def test_carried_flags_are_those_of_load(place, monkeypatch):
    "Compiled with the same words, but for the names of files."
    words = {}
    run = compiler._command
    for which in ("carry", *compiler._levels()):
        told = words.setdefault(which, [])
        monkeypatch.setattr(
            compiler,
            "_command",
            lambda w, limit: (
                told.append([x for x in w if str(place) not in x]),
                run(w, limit),
            ),
        )
        if which == "carry":
            compiler.carry(place / "seven.cpp")
            shutil.rmtree(place / "carried")
        else:
            monkeypatch.setattr(compiler, "_levels", lambda: [which])
            load(place)
            # all but the two that try the flags
            assert told[-2:] == [
                t for t in words["carry"] if f"-march={which}" in t
            ] + [[w for w in words["carry"] if "-shared" in w][0]]
    assert len(words["carry"]) == 6


@CARRIED
@pytest.mark.parametrize(
    "what",
    ["changed", "foreign", "flags", "function", "unreadable"],
)
def test_carried_that_does_not_fit(place, monkeypatch, what):
    "The compiler is looked for as if there was nothing, and nothing is said."
    files = compiler.carry(place / "seven.cpp", ["seven", "threads"])
    monkeypatch.delenv("NORMALNORM_QUIET")
    monkeypatch.setenv("PATH", str(place))
    best = files[len(compiler._levels()) - 1]
    content, functions = best.read_bytes(), ["seven"]
    # a new file: the old one is loaded here, and its end is run with Python's
    best.unlink()
    if what == "unreadable":
        best.mkdir()
    else:
        best.write_bytes(
            {
                "changed": content.replace(b"seven", b"eight"),
                "foreign": b"foreign",
            }.get(what, content)
        )
    if what == "foreign":
        best = best.rename(
            best.with_name(f"{best.stem[:-32]}{compiler._digest(best)}.so")
        )
    elif what == "flags":
        monkeypatch.setattr(compiler, "_COMMON", (*compiler._COMMON, "-w"))
    elif what == "function":
        functions.append("eight")
    with pytest.raises(
        compiler.CompilerError, match="no C\\+\\+ compiler was found"
    ):
        load(place, *functions)
    assert best.exists()  # the wheel's files stay
    if what != "function":
        monkeypatch.setenv("PATH", os.path.dirname(USUAL))
        monkeypatch.setenv("NORMALNORM_QUIET", "1")
        assert load(place).seven() == 7 and len(kernels(place)) == 1


def test_nothing_to_carry(place, monkeypatch):
    monkeypatch.setattr(compiler, "_levels", lambda: [])
    with pytest.raises(compiler.CompilerError, match="Linux on x86-64"):
        compiler.carry(place / "seven.cpp")
    monkeypatch.setattr(compiler, "_levels", lambda: LEVELS)
    monkeypatch.setenv(
        "CXX",
        program(
            place,
            "old",
            'for a in "$@"; do case $a in -march=x86-64-v*) echo '
            '"error: bad value for $a"; exit 1;; esac; done',
        ),
    )
    with pytest.raises(compiler.CompilerError, match="bad value"):
        compiler.carry(place / "seven.cpp")
    assert not list((place / "carried").iterdir())


# ---- where nothing can be kept ----------------------------------------------


def test_a_folder_that_cannot_be_written(place, monkeypatch):
    """One warning, one compilation, no folder left; a child that is forked
    meanwhile does not remove its parent's.
    """
    (place / "file").touch()
    (place / "tmp").mkdir()
    monkeypatch.setenv("NORMALNORM_CACHE", str(place / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(place / "tmp"))
    monkeypatch.setenv("CXX", program(place, "spy"))
    with pytest.warns(UserWarning, match="cannot be written") as seen:
        assert load(place).seven() == load(place).seven() == 7
    (warning,) = seen
    assert "set NORMALNORM_CACHE" in str(warning.message)
    assert warning.filename == __file__
    assert len([line for line in calls(place, "spy") if " -c " in line]) == 1
    code = """
        import os, sys
        from normalnorm.layers.engines import compiler
        for leave in (False, True):
            if not os.fork():
                with compiler._scratch(None) as place:
                    if not os.fork():
                        sys.exit()  # runs what is registered for the end
                    os.wait()
                    print(place.exists(), flush=True)
                    if leave:
                        sys.exit()
                print(place.exists(), flush=True)
                sys.exit()
            os.wait()
    """
    out = python(code, TMPDIR=str(place / "tmp"))
    assert out.split() == ["True", "False", "True"]
    assert not list((place / "tmp").iterdir())


def test_read_only_with_a_kernel(place, monkeypatch):
    "Used, and a damaged one is left alone."
    shared = Path(tempfile.mkdtemp())
    try:
        monkeypatch.setenv("NORMALNORM_CACHE", str(shared / "cache"))
        monkeypatch.setattr(compiler, "_for_this_process", {})
        source = shared / "seven.cpp"
        source.write_text(SEVEN)
        compiler.load(source)
        (kernel,) = (shared / "cache").iterdir()
        shared.chmod(0o755)
        (shared / "cache").chmod(0o555)

        def as_another(expected):
            if os.getuid() == 0:
                os.setgroups([])
                os.setuid(65534)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                assert compiler.load(source).seven() == 7
            return len(seen) != expected

        assert ended(forked(as_another, 0)) == 0
        content = kernel.read_bytes()
        kernel.unlink()
        kernel.write_bytes(content[:4096])
        kernel.chmod(0o444)
        assert (
            ended(forked(as_another, 1)) == 0
            and len(kernel.read_bytes()) == 4096
        )
    finally:
        (shared / "cache").chmod(0o755)
        subprocess.run(["rm", "-r", str(shared)], check=True)


def test_without_a_home(place, monkeypatch):
    monkeypatch.delenv("NORMALNORM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert load(place).seven() == 7
    monkeypatch.setattr(compiler, "_for_this_process", {})
    nowhere = FileNotFoundError(errno.ENOENT, "No usable temporary directory")
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=nowhere))
    assert "No usable temporary directory" in failure(place)


WITHOUT = """
    import sys, warnings, torch
    from normalnorm import BatchNormalNorm1d, set_backend
    from normalnorm.layers import core
    torch.manual_seed(0)
    model, u = (torch.nn.Sequential(BatchNormalNorm1d(3, noise=0.0)),
                torch.randn(8, 3))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            out = model(u)
            torch.testing.assert_close(
                out, core.normality_norm(u, (0,))[0], rtol=1e-4, atol=1e-5)
            out.sum().backward()
    # torch.compile would not work either; older ones: see layers.core
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    assert release < (2, 13) or not {
        "torch._dynamo", "torch._inductor"} & {*sys.modules}
    warning, = (w for w in seen if "normalnorm" in str(w.message))
    print(warning.filename, warning.lineno, warning.message)
    try:
        set_backend("native")
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
"""


# ---- what is said -----------------------------------------------------------


def test_one_line_says_that_it_compiles(place, monkeypatch, capsys):
    monkeypatch.delenv("NORMALNORM_QUIET")
    load(place)
    out, err = capsys.readouterr()
    assert not out and re.fullmatch(
        r"normalnorm: compiling seven\.cpp for this processor with \S+, about "
        r"1 s or longer on a busy machine, once; kept in \S+/cache\n",
        err,
    )
    for stream in (None, open(os.devnull, "w")):
        for path in kernels(place):
            path.unlink()
        if stream:
            stream.close()
        monkeypatch.setattr(sys, "stderr", stream)
        assert load(place).seven() == 7
    assert capsys.readouterr() == ("", "")  # and not on the output instead


# ---- in the background -------------------------------------------------------


def begun(place, functions=("seven",)):
    "What `load` answers at once."
    try:
        return compiler.load(place / "seven.cpp", functions, wait=False)
    except compiler.CompilerError as error:
        return error


@pytest.fixture
def builders(monkeypatch):
    found = {}
    monkeypatch.setattr(compiler, "_builders", found)
    return found


def test_it_is_there_when_who_began_it_has_ended(place):
    "One line says what is done until then; who comes next finds the file."
    began = subprocess.Popen(
        [sys.executable, "-c", BEGINS, str(place / "seven.cpp")],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("NORMALN")}
        | {"NORMALNORM_CACHE": str(place / "cache")},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said = began.communicate()[1].splitlines()
    with contextlib.suppress(ProcessLookupError):  # as a terminal does
        os.killpg(began.pid, signal.SIGKILL)
    assert len(said) == 1 and "in the background" in said[0], said
    assert "until then layers are computed by PyTorch's operations" in said[0]
    end = time.monotonic() + 60
    while not kernels(place) and time.monotonic() < end:
        time.sleep(0.05)
    assert begun(place).seven() == 7


def test_one_process_compiles(place, builders, monkeypatch):
    """Another, where it is at it already; else one that is begun here, however
    often this one asks. Who is killed at it is followed by this one.
    """
    slow = program(place, "slow", 'case "$*" in *seven*) sleep 1;; esac')
    monkeypatch.setenv("CXX", slow)
    other = forked(seven, place)
    while not calls(place, "slow"):
        time.sleep(0.01)
    assert isinstance(begun(place), compiler.Building) and not builders
    assert not ended(other) and begun(place).seven() == 7
    monkeypatch.delenv("CXX")
    for _ in range(2):
        assert isinstance(begun(place), compiler.Building)
    (builder,) = builders.values()
    compiler._end(builder)
    assert begun(place).seven() == 7 and len(kernels(place)) == 2


def test_what_fails_there_is_told_here(place, builders):
    (place / "seven.cpp").write_text("int seven() { return missing; }")
    assert isinstance(begun(place), compiler.Building)
    next(iter(builders.values())).wait(60)
    assert "missing" in str(begun(place)) and not isinstance(
        begun(place), compiler.Building
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cannot", ("write", "start"))
def test_where_no_other_process_helps_it_is_compiled_here(
    place, builders, monkeypatch, cannot
):
    if cannot == "write":
        monkeypatch.setattr(compiler, "_writable", lambda folder: False)
    else:
        monkeypatch.setattr(sys, "executable", "")
    assert begun(place).seven() == 7 and not builders


def test_no_compiler(tmp_path):
    """One warning that names the user's line and what to do; the right numbers;
    an error only where the kernel was asked for by name.
    """
    said, asked = python(
        WITHOUT,
        CXX="",
        PATH=str(tmp_path),
        NORMALNORM_CACHE=str(tmp_path / "empty"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
    ).splitlines()
    assert said.startswith(
        "<string> 11 normalnorm's native kernel is not available here; its "
        "layers are computed by"
    )
    looked = "no C++ compiler was found (looked for g++, clang++, c++)"
    assert f"{looked}: install one, e.g. " in said
    assert "apt-get install g++" in said
    assert asked.startswith(f"CompilerError: {looked}")


def test_the_warning_names_the_users_line(monkeypatch):
    """Through a layer, a function, a model of PyTorch's, a checkpointed one:
    never a line of ours or of PyTorch's.
    """
    error = compiler.CompilerError("no C++ compiler was found")
    monkeypatch.setattr(native, "_library", lambda: error)
    monkeypatch.setattr(
        compiled, "_compiled", Mock(side_effect=RuntimeError("no"))
    )
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())
    converted, layer, u = (
        normalnorm.to_normality(plain),
        normalnorm.BatchNormalNorm1d(3),
        torch.randn(8, 3),
    )
    ways = [
        lambda: layer(u),
        lambda: layer_normal_norm(u, (3,)),
        lambda: converted(u),
        lambda: torch.utils.checkpoint.checkpoint(
            converted, u.requires_grad_(), use_reentrant=False
        ),
        lambda: normality_norm(u, (0,)),
    ]
    low, high = backends._SLOWER
    for way in ways:
        monkeypatch.setattr(backends, "_instead", {})
        with (
            set_backend("auto"),
            pytest.warns(UserWarning, match="native kernel") as seen,
        ):
            way(), way()
        (warning,) = (w for w in seen if "native kernel" in str(w.message))
        assert (warning.filename, warning.lineno) == (
            __file__,
            way.__code__.co_firstlineno,
        )
        text = str(warning.message)
        assert text.endswith("The reason: no C++ compiler was found")
        assert (
            "PyTorch operations one by one instead, which takes about "
            f"{low} to {high} times as long in training" in text
        )


def test_what_it_costs_is_what_was_measured():
    "The numbers of the warning, from the committed rows, to one digit."
    taken = [
        row["ms of the other"] / row["ms"]
        for path in (ROOT / "results" / "benchmarks").glob("*.json")
        for row in json.loads(path.read_text(encoding="utf-8")).get("rows", [])
        if row.get("against") == "eager"
        and row["part"] in ("layers", "engines")
        and row["work"].startswith("forward and backward")
    ]
    assert taken and backends._SLOWER == tuple(
        int(float(f"{extreme:.0e}")) for extreme in (min(taken), max(taken))
    )
