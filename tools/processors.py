"""`make test-processors`: the kernel's tests for every instruction set, by gcc
and clang, whatever machine runs them; outcomes in results/processors.json.

    python -m tools.processors               all parts
    python -m tools.processors --only clang  with "clang" in the names
    python -m tools.processors --record      what the record lacks for this
                                             kernel, into the record
    python -m tools.processors --only whole  every chapter and every test, as on
                                             machines that have nothing beyond
                                             AVX2, and SSE2

tests: tests/layers/test_native.py and tests/theory/test_proxy.py whole, what
tests/layers/test_proxy_norm.py asks of the kernel, and the chapters that derive
it, with PyTorch's own kernels held to the same instruction set; `make
test-avx2` is such a part. driver: a C++ program (tests/kernel/) that links the
kernel and compares with recorded numbers, bfloat16 with float32, and work in
stages with the whole, compiled with -Wall -Wextra, of which no warning is
accepted; on ARM by an emulator. sanitizers: the driver under the sanitizers of
addresses, of undefined behaviour, and of threads.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tools.files import ROOT, load, python, ran, save

RECORD = ROOT / "results" / "processors.json"
KERNEL, DRIVER = (
    ROOT / "normalnorm/layers/engines/native.cpp",
    ROOT / "tests" / "kernel" / "driver.cpp",
)
RECORDED = DRIVER.with_name("recorded.bin")
# whole, and of the layer's tests those of its pass in the kernel
TESTS = (
    "tests/layers/test_native.py",
    "tests/theory/test_proxy.py",
    *(
        f"tests/layers/test_proxy_norm.py::test_grouped_{name}"
        for name in (
            "by_the_kernel",
            "is_group_norm_and_proxy_norm",
            "values_that_are_not_finite_or_far",
            "derivatives_and_threads",
            "without_an_epsilon",
            "memory_that_is_not_there",
            "settings_that_change",
        )
    ),
)
# those that assert what the kernel computes; the other chapters allow for more
CHAPTERS = tuple(
    f"tests/book/test_chapters.py::test_chapter[{name}]"
    for name in (
        "282_layers.engines.native",
        "283_layers.engines.compiled",
        "284_layers.engines.operators",
        "410_layers.proxy",
        "415_layers.proxy_norm",
    )
)


@dataclass(frozen=True)
class InstructionSet:
    """What a kernel is compiled for, and what holds PyTorch's own kernels to
    it.
    """

    level: str
    # what the kernel then says of itself: lanes, fused multiplication and
    # addition, tables; and PyTorch
    way: tuple[int, bool, bool]
    capability: str
    torch: tuple[tuple[str, str], ...] = ()

    @property
    def march(self) -> str:
        return f"-march={self.level}"


SETS = {
    "AVX-512": InstructionSet("x86-64-v4", (16, True, True), "AVX512"),
    "AVX2": InstructionSet(
        "x86-64-v3",
        (8, True, True),
        "AVX2",
        (
            ("ATEN_CPU_CAPABILITY", "avx2"),
            ("ONEDNN_MAX_CPU_ISA", "AVX2"),
            ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
        ),
    ),
    "SSE2": InstructionSet(
        "x86-64",
        (4, False, False),
        "DEFAULT",
        (
            ("ATEN_CPU_CAPABILITY", "default"),
            ("ONEDNN_MAX_CPU_ISA", "SSE41"),
            ("MKL_ENABLE_INSTRUCTIONS", "SSE4_2"),
        ),
    ),
}
NOT_HELD = (
    # compiles for each set itself, which the flags behind it would overrule
    "tests/book/test_packaging.py::test_no_compiler_and_the_same_bits",
)
COMPILERS = {"gcc": "g++", "clang": "clang++"}
ARM = {"gcc": "aarch64-linux-gnu-g++", "clang": "clang++"}
PACKAGES = {
    "g++": "g++",
    "clang++": "clang",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
    "libarcher.so": "libomp-dev",
    "git": "git",
}  # Debian's names


# ---- this machine ----


@cache
def cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    # of the first processor
    return dict(re.findall(r"(?m)^(\S.*?)\s*: ?(.*?)\s*$", text)[::-1])


def lacking(name: str) -> str:
    "Why code for this instruction set does not run here; empty where it does."
    from normalnorm.layers.engines import compiler

    has, level = compiler._levels(), SETS[name].level
    return (
        ""
        if level in has
        else f"this processor ({platform.machine()}) has no {level}: of the "
        f"levels of x86-64 it has {', '.join(has) or 'none'}"
    )


def find(tool: str) -> str | None:
    "The path of a command, or of a library that clang brings with it."
    program = shutil.which("clang++" if tool.endswith(".so") else tool)
    if program and tool.endswith(".so"):
        found = Path(program).resolve().parents[1] / "lib" / tool
        return str(found) if found.exists() else None
    return program


def first_line(*command: str) -> str | None:
    "Of what a command prints; None where it is not there."
    try:
        return next(iter(ran(list(command)).stdout.splitlines()), None)
    except OSError:
        return None


def missing(tools: Iterable[str]) -> str:
    "What to do for tools that are not here; nothing where all are."
    lacks = [t for t in dict.fromkeys(tools) if not find(t)]
    return (
        f"{', '.join(lacks)} cannot be found here: apt-get install "
        f"{' '.join(sorted({PACKAGES[t] for t in lacks}))} (Debian's names), "
        "or choose other parts with --only"
        if lacks
        else ""
    )


# ---- the parts ----


@dataclass(frozen=True)
class Part:
    """One thing to run: its name, the tools that it needs, the instruction set
    that it runs on this processor (or none), and what does it.
    """

    name: str
    tools: tuple[str, ...]
    instructions: str | None
    run: Callable[[Path], dict]


def compiling(folder: Path, command: str, march: str) -> str:
    """A program that compiles by `command` for an instruction set: inductor
    takes $CXX for one word. The flag comes last, so that it wins.
    """
    program = folder / "compiler"
    text = f'#!/bin/sh\nexec {command} "$@" {march}\n'
    # a new file would be another compiler, and the kernel compiled again
    if not program.exists() or program.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        new = program.with_suffix(f".{os.getpid()}")  # others may do the same
        new.write_text(text)
        new.chmod(0o755)
        os.replace(new, program)
    return str(program)


def environment(
    instructions: str, compiler: str, cache_folder: Path, threads: int = 1
) -> dict[str, str]:
    """For a process whose kernel and whose PyTorch are held to an instruction
    set.
    """
    held = {name for s in SETS.values() for name, _ in s.torch}
    return (
        {k: v for k, v in os.environ.items() if k not in held}
        | dict(SETS[instructions].torch)
        | {
            "CXX": compiling(
                cache_folder, COMPILERS[compiler], SETS[instructions].march
            ),
            "NORMALNORM_CACHE": str(cache_folder),
            "NORMALNORM_TEST_BUILD": str(cache_folder / "_build"),
            "NORMALNORM_TEST_THREADS": str(threads),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(threads),
        }
    )


def tested(text: str, code: int) -> dict:
    "What pytest has printed: its summary, and the failures."
    summary = (
        re.sub(r"^=+ | =+$", "", text.strip().splitlines()[-1])
        if text.strip()
        else ""
    )
    return {
        "passed": code == 0 and bool(re.search(r"\b[1-9]\d* passed", summary)),
        "summary": re.sub(r" in [\d.]+s.*", "", summary),
        "failures": [
            line[:300]
            for line in text.splitlines()
            if line.startswith(("FAILED", "ERROR"))
        ],
    }


def problem(instructions: str | None) -> str:
    """What this process uses instead of an instruction set, its kernel or
    PyTorch; empty where both are held to it. (Of none: is there a kernel?)
    """
    import torch

    from normalnorm.layers.engines import native

    if not native.available():
        return f"there is no kernel: {native._library()}"
    if instructions is None:
        return ""
    wanted, found = SETS[instructions], []
    # PyTorch 2.4 has a name of its own for none
    has = torch.backends.cpu.get_cpu_capability().replace("NO AVX", "DEFAULT")
    if has != wanted.capability:
        found.append(f"PyTorch has {has}")
    if (way := tuple(native.way())) != wanted.way:
        found.append(f"the kernel has lanes, fused, tables = {way}")
    if found:
        found.append(f"{wanted.capability} and {wanted.way} were asked for")
    return "; ".join(found)


def compiled(instructions: str, env: dict[str, str]) -> None:
    """Have the package compile its kernel in this environment.

    Raises `Failed` where that is impossible or makes another kernel than was
    asked for.
    """
    code = (
        f"from tools.processors import problem as p; print(p({instructions!r}))"
    )
    done = python("-c", code, cwd=ROOT, env=env)
    if why := (done.stderr if done.returncode else done.stdout).strip():
        raise Failed(why[-300:])
    print(f"held to {instructions}", flush=True)


def run_tests(
    instructions: str,
    compiler: str,
    threads: int,
    folder: Path,
    chosen: tuple[str, ...] = (*TESTS, *CHAPTERS),
) -> dict:
    # one compilation for all numbers of threads
    cache_folder = folder.parent / f"kernel-{compiler}-{instructions}"
    env = environment(instructions, compiler, cache_folder, threads)
    compiled(instructions, env)
    done = python(
        *"-m pytest --no-header --tb=short".split(),
        *chosen,
        cwd=ROOT,
        env=env,
    )
    (folder / "output.txt").write_text(done.stdout + done.stderr, "utf-8")
    return tested(done.stdout, done.returncode)


class Failed(Exception):
    pass


def build(
    folder: Path, command: list[str], options: list[str], link: list[str]
) -> tuple[Path, list[str]]:
    """Kernel and driver, compiled with all warnings and linked; the warnings'
    lines.
    """
    from normalnorm.layers.engines import compiler

    usual = [f for f in compiler._COMMON if f not in ("-w", "-fPIC")]
    program, warnings, objects = folder / "driver", [], []
    for source, own in ((KERNEL, usual), (DRIVER, ["-std=c++17", "-O1"])):
        objects.append(str(folder / source.stem) + ".o")
        all_of = [*own, *options, "-Wall", "-Wextra", "-c", str(source)]
        done = ran([*command, *all_of, "-o", objects[-1]])
        lines = done.stderr.replace(str(ROOT) + "/", "").splitlines()
        if done.returncode:
            errors = [line for line in lines if "error" in line]
            raise Failed(
                f"{source.name} does not compile: {'; '.join(errors[:3])}"
            )
        warnings += [line for line in lines if "warning:" in line]
    done = ran([*link, *objects, "-o", str(program)])
    if done.returncode:
        raise Failed(
            f"the driver could not be linked: {done.stderr.strip()[-300:]}"
        )
    return program, list(dict.fromkeys(warnings))


REPORT = re.compile(
    r"runtime error|ERROR: \w*Sanitizer|WARNING: ThreadSanitizer"
)


def run_driver(
    command: list[str],
    options: list[str],
    folder: Path,
    link: list[str] | None = None,
    by: tuple[str, ...] = (),
    extra: dict[str, str] | None = None,
    accept: bool = False,
    heard: str = "",
) -> dict:
    """Compile the driver by `command` with `options`, link it by `link`, by
    default the same, and run it, `by` an emulator, with `extra` settings.

    `accept`: warnings are those of a sanitizer. `heard`: what it must print.
    """
    program, warnings = build(
        folder, command, options, link or [*command, *options]
    )
    done = ran(
        [*by, str(program), str(RECORDED)],
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **(extra or {})},
    )
    text = done.stdout + done.stderr
    (folder / "output.txt").write_text(text, "utf-8")
    if heard not in text:
        raise Failed(f"without {heard!r} the sanitizer knows of no order")
    warnings = [] if accept else warnings
    lines = done.stderr.replace(f"{ROOT}/", "").splitlines()
    reports = list(dict.fromkeys(filter(REPORT.search, lines)))
    wrong = [x for x in done.stdout.splitlines() if x.startswith("WRONG")]
    said = done.stdout.strip() or done.stderr.strip() or "no output"
    return {
        "passed": done.returncode == 0 and not reports and not warnings,
        "summary": said.splitlines()[-1]
        + f"; {len(warnings)} warnings" * bool(warnings),
        "failures": [x[:300] for x in wrong[:20] + reports[:20]] + warnings,
    }


def run_sanitized(instructions: str, which: str, folder: Path) -> dict:
    """Threads: clang's OpenMP with archer, which tells the sanitizer what its
    barriers order; gcc's is unknown to it.
    """
    usual = ["-g", "-O1", "-fno-omit-frame-pointer", f"-fsanitize={which}"]
    threads = which == "thread"
    return run_driver(
        ["clang++", "-fopenmp=libomp"] if threads else ["g++", "-fopenmp"],
        [SETS[instructions].march, *usual],
        folder,
        extra={
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "ASAN_OPTIONS": "detect_leaks=1",
            "OMP_TOOL_LIBRARIES": str(find("libarcher.so")),
            "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
            "ARCHER_OPTIONS": "verbose=1",
        },
        accept=True,
        heard="Archer detected" if threads else "",
    )


def run_arm(compiler: str, folder: Path) -> dict:
    """Clang without OpenMP, as on macOS; linked by gcc, whose libraries for ARM
    are here.
    """
    threads = ["-fopenmp"] if compiler == "gcc" else []
    target = ["--target=aarch64-linux-gnu"] if compiler == "clang" else []
    return run_driver(
        [ARM[compiler], *target],
        threads,
        folder,
        link=[ARM["gcc"], "-static", *threads],
        by=("qemu-aarch64-static",),
    )


def run_whole(instructions: str, folder: Path) -> dict:
    "Every test, and every chapter among them, in a folder of their own."
    chosen = (
        *("-n", "2", "--dist", "worksteal", "tests"),
        *(word for test in NOT_HELD for word in ("--deselect", test)),
    )
    return run_tests(instructions, "gcc", 1, folder, chosen)


def parts() -> list[Part]:
    "In the order in which they are run; those of the end only when asked for."
    drivers = [
        Part(
            f"driver {compiler} {name}",
            (command,),
            name,
            partial(run_driver, [command, "-fopenmp"], [SETS[name].march]),
        )
        for name in SETS
        for compiler, command in COMPILERS.items()
    ]
    elsewhere = [
        Part(
            f"driver {compiler} aarch64, emulated",
            (ARM[compiler], ARM["gcc"], "qemu-aarch64-static"),
            None,
            partial(run_arm, compiler),
        )
        for compiler in COMPILERS
    ]
    sanitizers = [
        Part(
            f"sanitizers {which} {name}",
            needed,
            name,
            partial(run_sanitized, name, which.replace(" ", "")),
        )
        for name in SETS
        for which, needed in (
            ("address, undefined", ("g++",)),
            ("thread", ("clang++", "libarcher.so")),
        )
    ]
    tests = [
        Part(
            f"tests {compiler} {name} {threads} thread{'s' * (threads > 1)}",
            (command,),
            name,
            partial(run_tests, name, compiler, threads),
        )
        for compiler, command in COMPILERS.items()
        for name in SETS
        for threads in (1, 2, 4)
    ]
    whole = [
        Part(f"whole {name}", ("g++",), name, partial(run_whole, name))
        for name in ("AVX2", "SSE2")
    ]
    return [*drivers, *elsewhere, *sanitizers, *tests, *whole]


# ---- what has been done ----


@cache
def compilers() -> dict[str, str]:
    return {
        tool: first_line(tool, "--version") or "not found"
        for tool in (
            "g++",
            "clang++",
            "aarch64-linux-gnu-g++",
            "qemu-aarch64-static",
        )
    }


def perform(part: Part, folder: Path) -> dict:
    "The outcome of a part, run in a folder of its own."
    start, own = time.perf_counter(), folder / re.sub(r"\W+", "-", part.name)
    own.mkdir(parents=True, exist_ok=True)
    try:
        if part.instructions and (reason := lacking(part.instructions)):
            outcome = {"passed": None, "summary": f"skipped: {reason}"}
        else:
            outcome = part.run(own)
    except Failed as error:
        outcome = {"passed": False, "summary": str(error)[:300]}
    return {
        "failures": [],
        "seconds": round(time.perf_counter() - start, 1),
        "date": time.strftime("%Y-%m-%d"),
    } | outcome


WORDS = {True: "passed", False: "FAILED", None: "skipped"}


def table(outcomes: dict[str, dict]) -> str:
    wide = max(map(len, outcomes), default=0)
    return "\n".join(
        f"{name:<{wide}}  {WORDS[o['passed']]}  "
        f"{o['seconds']:6.1f} s  {o.get('summary', '')}"
        for name, o in outcomes.items()
    )


def about() -> dict:
    "Which machine, which code."
    from normalnorm.experiments.results import provenance

    return {
        "date": time.strftime("%Y-%m-%d"),
        **provenance(),
        "cores": os.cpu_count(),
        "instruction sets": [name for name in SETS if not lacking(name)],
        "compilers": compilers(),
        "native source": hashlib.sha256(KERNEL.read_bytes()).hexdigest(),
    }


def recorded() -> dict[str, dict]:
    """The outcomes of parts in the record; of another kernel, or by other
    compilers, none.
    """
    record, now = load(RECORD), about()
    same = all(record[k] == now[k] for k in ("native source", "compilers"))
    return record["parts"] if same else {}


def write_record(outcomes: dict[str, dict]) -> None:
    "What was known, and these."
    names, done = [p.name for p in parts()], recorded() | outcomes
    record = about() | {
        "parts": {name: done[name] for name in names if name in done},
        "not run": [name for name in names if name not in done],
    }
    save(RECORD, record)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.processors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="WORD",
        help="parts with this in their names; several: any of them",
    )
    parser.add_argument(
        "--record", action="store_true", help="write results/processors.json"
    )
    given = parser.parse_args(arguments)
    asked = [word.lower() for word in given.only or ()]
    chosen = [
        p
        for p in parts()
        if any(word in p.name.lower() for word in asked)
        or not asked
        and not p.name.startswith("whole")
    ]
    if not chosen:
        parser.error(
            f"no part has {' or '.join(given.only)} in its name; there are "
            + ", ".join(p.name for p in parts())
        )
    if problem := missing(
        tool
        for p in chosen
        if not (p.instructions and lacking(p.instructions))
        for tool in p.tools
    ):
        print(problem, file=sys.stderr)
        return 2
    known = recorded() if given.record else {}
    todo = [p for p in chosen if not known.get(p.name, {}).get("passed")]
    print(
        f"{len(todo)} of {len(chosen)} parts to run"
        + " (the others are recorded)" * (len(todo) < len(chosen)),
        flush=True,
    )
    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="normalnorm-processors-") as folder:
        for number, part in enumerate(todo, 1):
            outcomes[part.name] = outcome = perform(part, Path(folder))
            print(
                f"  [{number}/{len(todo)}] {table({part.name: outcome})}",
                *outcome["failures"],
                sep="\n      ",
                flush=True,
            )
            if given.record:  # an interrupted run goes on where it was
                write_record({part.name: outcome})
    failed = [n for n, o in outcomes.items() if o["passed"] is False]
    print(
        f"\n{table(outcomes)}\n\n{len(failed)} of {len(todo)} parts failed"
        + (f": {', '.join(failed)}" if failed else "")
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
