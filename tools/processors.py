"""`make test-processors`: the kernel's tests for every instruction set, by gcc
and clang, whatever machine runs them; outcomes in results/processors.json.

    python -m tools.processors               what is not done for this code
    python -m tools.processors --only clang  with "clang" in the names (--list)
    python -m tools.processors --record      and write results/processors.json
    python -m tools.processors --whole avx2  the book and every test in a clone,
                                             as on a machine that has nothing
                                             beyond AVX2 (or: default, SSE2)

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
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "results" / "processors.json"
STATE = ROOT / "_build" / "processors"
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
    # addition, tables
    way: tuple[int, bool, bool]
    torch: tuple[tuple[str, str], ...] = ()

    @property
    def march(self) -> str:
        return f"-march={self.level}"

    @property
    def needs(self) -> list[str]:
        "What the package asks of a processor, as /proc/cpuinfo names it."
        from normalnorm.layers.engines import compiler

        levels = list(compiler._LEVELS)
        return [
            feature
            for level in levels[: levels.index(self.level) + 1]
            for feature in compiler._LEVELS[level][1].split()
        ]


SETS = {
    "AVX-512": InstructionSet("x86-64-v4", (16, True, True)),
    "AVX2": InstructionSet(
        "x86-64-v3",
        (8, True, True),
        (
            ("ATEN_CPU_CAPABILITY", "avx2"),
            ("ONEDNN_MAX_CPU_ISA", "AVX2"),
            ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
        ),
    ),
    "SSE2": InstructionSet(
        "x86-64",
        (4, False, False),
        (
            ("ATEN_CPU_CAPABILITY", "default"),
            ("ONEDNN_MAX_CPU_ISA", "SSE41"),
            ("MKL_ENABLE_INSTRUCTIONS", "SSE4_2"),
        ),
    ),
}
WHOLE = {"avx2": "AVX2", "default": "SSE2"}
TESTING = ("-m", "pytest", "-n", "2", "--dist", "worksteal")
NOT_HELD = (
    # asks for the outcome of the very run that it would be in
    "tests/tools/test_processors.py::test_recorded_outcomes",
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
def _cpuinfo() -> dict[str, str]:
    try:
        lines = (
            Path("/proc/cpuinfo")
            .read_text(encoding="utf-8", errors="replace")
            .splitlines()
        )
    except OSError:
        return {}
    return {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in reversed(lines))
        if key.strip()
    }


def lacking(
    name: str, flags: Iterable[str] | None = None, machine: str | None = None
) -> str:
    "Why code for this instruction set does not run here; empty where it does."
    machine = machine or platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return f"this processor is {machine}, not x86-64"
    flags = set(_cpuinfo().get("flags", "").split() if flags is None else flags)
    missing = [f for f in SETS[name].needs if f not in flags]
    return f"this processor has no {', '.join(missing)}" if missing else ""


def find(tool: str) -> str | None:
    "The path of a command, or of a library that clang brings with it."
    if tool.endswith(".so"):
        program = shutil.which("clang++")
        found = (
            Path(program).resolve().parents[1] / "lib" / tool
            if program
            else None
        )
        return str(found) if found and found.exists() else None
    return shutil.which(tool)


def output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT
        ).stdout.strip()
    except OSError:
        return ""


def install(tools: Iterable[str]) -> str:
    """Install what is missing, where that is possible.

    Returns what to do by hand, or nothing.
    """
    missing = [t for t in dict.fromkeys(tools) if not find(t)]
    if not missing:
        return ""
    packages = sorted({PACKAGES[t] for t in missing})
    command = ["apt-get", "install", "-y", "-qq", *packages]
    if shutil.which("apt-get") and getattr(os, "geteuid", lambda: 1)() == 0:
        print(f"installing {' '.join(packages)}", flush=True)
        subprocess.run(
            command,
            capture_output=True,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        missing = [t for t in missing if not find(t)]
    return advice(missing)


def advice(missing: Iterable[str]) -> str:
    missing = list(missing)
    if not missing:
        return ""
    return (
        f"{', '.join(missing)} cannot be found here: apt-get install "
        f"{' '.join(sorted({PACKAGES[t] for t in missing}))} (Debian's "
        "names), or choose other parts with --only"
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
    usual = {
        k: v
        for k, v in os.environ.items()
        if k not in {name for s in SETS.values() for name, _ in s.torch}
    }
    return (
        usual
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
    counts = {
        word: int(n)
        for n, word in re.findall(
            r"(\d+) (passed|failed|skipped|error)", summary
        )
    }
    return {
        "passed": code == 0 and counts.get("passed", 0) > 0,
        "summary": re.sub(r" in [\d.]+s.*", "", summary),
        "failures": [
            line[:300]
            for line in text.splitlines()
            if line.startswith(("FAILED", "ERROR"))
        ],
    }


def compiled(instructions: str, env: dict[str, str]) -> None:
    """Have the package compile its kernel in this environment.

    Raises `Failed` where that is impossible or makes another kernel than was
    asked for.
    """
    code = (
        "import torch; from normalnorm.layers.engines import native; "
        "print(*map(int, native.way()), "
        "torch.backends.cpu.get_cpu_capability())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failed(
            "there is no kernel: "
            f"{(done.stderr.strip().splitlines() or ['?'])[-1][:300]}"
        )
    *way, torch_has = done.stdout.strip().split(maxsplit=3)
    torch_has = torch_has.replace("NO AVX", "DEFAULT")  # PyTorch 2.4
    wanted = (
        dict(SETS[instructions].torch)
        .get("ATEN_CPU_CAPABILITY", torch_has)
        .upper()
    )
    if tuple(map(int, way)) != SETS[instructions].way or torch_has != wanted:
        raise Failed(
            f"the kernel has lanes, fused, tables = {', '.join(way)} "
            f"and PyTorch {torch_has}, where {SETS[instructions].way} "
            f"and {wanted} were asked for"
        )
    print(
        f"held to {instructions}: lanes, fused, tables = {', '.join(way)}; "
        f"PyTorch {torch_has}",
        flush=True,
    )


def run_tests(
    instructions: str, compiler: str, threads: int
) -> Callable[[Path], dict]:
    def run(folder: Path) -> dict:
        # one compilation for all numbers of threads
        cache_folder = folder.parent / f"kernel-{compiler}-{instructions}"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--no-header",
            "--tb=short",
            *TESTS,
            *CHAPTERS,
        ]
        env = environment(instructions, compiler, cache_folder, threads)
        compiled(instructions, env)
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True
        )
        (folder / "output.txt").write_text(
            done.stdout + done.stderr, encoding="utf-8"
        )
        return tested(done.stdout, done.returncode)

    return run


def flags() -> list[str]:
    "The package's own, with its warnings."
    from normalnorm.layers.engines import compiler

    return [f for f in compiler._COMMON if f not in ("-w", "-fPIC")]


class Failed(Exception):
    pass


def build(
    folder: Path,
    command: list[str],
    options: list[str],
    link: list[str],
    linker: list[str] | None = None,
) -> tuple[Path, list[str]]:
    """Kernel and driver, compiled with all warnings and linked; the warnings'
    lines.
    """
    warnings = []
    objects = []
    for source, own in ((KERNEL, flags()), (DRIVER, ["-std=c++17", "-O1"])):
        objects.append(str(folder / source.stem) + ".o")
        step = [
            *command,
            *own,
            *options,
            "-Wall",
            "-Wextra",
            "-c",
            str(source),
            "-o",
            objects[-1],
        ]
        done = subprocess.run(step, capture_output=True, text=True)
        text = done.stderr.replace(str(ROOT) + "/", "")
        if done.returncode:
            raise Failed(
                f"{source.name} does not compile: "
                + "; ".join(
                    [line for line in text.splitlines() if "error" in line][:3]
                )
            )
        warnings += [line for line in text.splitlines() if "warning:" in line]
    program = folder / "driver"
    done = subprocess.run(
        [*(linker or command), *objects, *link, "-o", str(program)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failed(
            f"the driver could not be linked: {done.stderr.strip()[-300:]}"
        )
    return program, list(dict.fromkeys(warnings))


def driven(
    program: list[str],
    warnings: list[str],
    folder: Path,
    extra: dict[str, str] | None = None,
) -> dict:
    done = subprocess.run(
        [*program, str(RECORDED)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **(extra or {})},
    )
    (folder / "output.txt").write_text(
        done.stdout + done.stderr, encoding="utf-8"
    )
    errors = done.stderr.replace(f"{ROOT}/", "").splitlines()
    reports = list(
        dict.fromkeys(
            line
            for line in errors
            if re.search(
                r"runtime error|ERROR: \w*Sanitizer|WARNING: ThreadSanitizer",
                line,
            )
        )
    )
    wrong = [
        line[:300]
        for line in done.stdout.splitlines()
        if line.startswith("WRONG")
    ]
    last = (
        done.stdout.strip() or done.stderr.strip() or "no output"
    ).splitlines()[-1]
    return {
        "passed": done.returncode == 0 and not reports and not warnings,
        "summary": last + (f"; {len(warnings)} warnings" if warnings else ""),
        "failures": wrong[:20]
        + [line[:300] for line in reports[:20]]
        + warnings,
    }


def run_driver(instructions: str, compiler: str) -> Callable[[Path], dict]:
    def run(folder: Path) -> dict:
        march = SETS[instructions].march
        program, warnings = build(
            folder, [COMPILERS[compiler]], [march, "-fopenmp"], ["-fopenmp"]
        )
        return driven([str(program)], warnings, folder)

    return run


def run_arm(compiler: str) -> Callable[[Path], dict]:
    """Clang without OpenMP, as on macOS; linked by gcc, whose libraries for ARM
    are here.
    """

    def run(folder: Path) -> dict:
        threads = ["-fopenmp"] if compiler == "gcc" else []
        command = [
            ARM[compiler],
            *(["--target=aarch64-linux-gnu"] if compiler == "clang" else []),
        ]
        program, warnings = build(
            folder, command, threads, ["-static", *threads], [ARM["gcc"]]
        )
        return driven(["qemu-aarch64-static", str(program)], warnings, folder)

    return run


def run_compilation(march: str, compiler: str) -> Callable[[Path], dict]:
    """For a processor that is not here: AVX-512F alone, of which the kernel
    knows nothing.
    """

    def run(folder: Path) -> dict:
        _, warnings = build(
            folder, [COMPILERS[compiler]], [march, "-fopenmp"], ["-fopenmp"]
        )
        return {
            "passed": not warnings,
            "summary": "compiles"
            + (f"; {len(warnings)} warnings" if warnings else ""),
            "failures": warnings,
        }

    return run


def run_sanitized(instructions: str, which: str) -> Callable[[Path], dict]:
    """Threads: clang's OpenMP with archer, which tells the sanitizer what its
    barriers order; gcc's is unknown to it.
    """

    def run(folder: Path) -> dict:
        options = [
            SETS[instructions].march,
            "-g",
            "-O1",
            "-fno-omit-frame-pointer",
        ]
        if which == "thread":
            options, command, openmp = (
                [*options, "-fsanitize=thread"],
                "clang++",
                "-fopenmp=libomp",
            )
            extra = {
                "OMP_TOOL_LIBRARIES": str(find("libarcher.so")),
                "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
                "ARCHER_OPTIONS": "verbose=1",
            }
        else:
            options, command, openmp = (
                [*options, "-fsanitize=address,undefined"],
                "g++",
                "-fopenmp",
            )
            extra = {
                "UBSAN_OPTIONS": "print_stacktrace=1",
                "ASAN_OPTIONS": "detect_leaks=1",
            }
        program, _ = build(
            folder, [command], [*options, openmp], [*options, openmp]
        )
        outcome = driven([str(program)], [], folder, extra)
        if which == "thread" and "Archer detected" not in (
            folder / "output.txt"
        ).read_text(encoding="utf-8"):
            raise Failed(
                "archer was not loaded, so the sanitizer does not "
                "know what OpenMP orders"
            )
        return outcome

    return run


def parts() -> list[Part]:
    found = []
    for instructions in SETS:
        for compiler, command in COMPILERS.items():
            found.append(
                Part(
                    f"driver {compiler} {instructions}",
                    (command,),
                    instructions,
                    run_driver(instructions, compiler),
                )
            )
    for compiler in COMPILERS:
        found.append(
            Part(
                f"driver {compiler} aarch64, emulated",
                tuple(
                    dict.fromkeys(
                        (ARM[compiler], ARM["gcc"], "qemu-aarch64-static")
                    )
                ),
                None,
                run_arm(compiler),
            )
        )
        found.append(
            Part(
                f"compiles {compiler} AVX-512F alone",
                (COMPILERS[compiler],),
                None,
                run_compilation("-march=knl", compiler),
            )
        )
    for instructions in SETS:
        found.append(
            Part(
                f"sanitizers address, undefined {instructions}",
                ("g++",),
                instructions,
                run_sanitized(instructions, "address"),
            )
        )
        found.append(
            Part(
                f"sanitizers thread {instructions}",
                ("clang++", "libarcher.so"),
                instructions,
                run_sanitized(instructions, "thread"),
            )
        )
    for compiler, command in COMPILERS.items():
        for instructions in SETS:
            for threads in (1, 2, 4):
                found.append(
                    Part(
                        f"tests {compiler} {instructions} {threads} "
                        f"thread{'s' * (threads > 1)}",
                        (command,),
                        instructions,
                        run_tests(instructions, compiler, threads),
                    )
                )
    return found


# ---- what has been done ----


@cache
def key(name: str) -> str:
    """Of all that decides the outcome of a part: the kernel, the driver and its
    record, this file, the compilers, the processor; for tests, the package, the
    tests and PyTorch too.
    """
    h = hashlib.sha256()
    files = [KERNEL, DRIVER, RECORDED, Path(__file__)]
    if name.startswith("tests "):
        files += [
            *sorted((ROOT / "normalnorm").rglob("*.py")),
            ROOT / "tests" / "conftest.py",
            *sorted({ROOT / t.partition("::")[0] for t in TESTS}),
            *(
                ROOT / "nbs" / f"{t[:-1].partition('[')[2]}.ipynb"
                for t in CHAPTERS
            ),
        ]
    for file in files:
        h.update(
            file.relative_to(ROOT).as_posix().encode()
            + b"\0"
            + file.read_bytes()
        )
    h.update(
        json.dumps(
            [
                compilers(),
                version("torch"),
                sys.version,
                _cpuinfo().get("flags", ""),
            ]
        ).encode()
    )
    return h.hexdigest()[:16]


@cache
def compilers() -> dict[str, str]:
    return {
        tool: (output(tool, "--version").splitlines() or ["not found"])[0]
        for tool in (
            "g++",
            "clang++",
            "aarch64-linux-gnu-g++",
            "qemu-aarch64-static",
        )
    }


def slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def stored(name: str, wanted: str | None = None) -> dict | None:
    """The outcome of a part, of the state of the code called `wanted` (the
    present one).
    """
    try:
        outcome = json.loads(
            (STATE / f"{slug(name)}.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return None
    return (
        outcome["outcome"]
        if outcome.get("key") == (wanted or key(name))
        else None
    )


def store(name: str, outcome: dict, of: str | None = None) -> None:
    STATE.mkdir(parents=True, exist_ok=True)
    target = STATE / f"{slug(name)}.json"
    target.with_suffix(".new").write_text(
        json.dumps(
            {"key": of or key(name), "name": name, "outcome": outcome}, indent=1
        )
        + "\n",
        encoding="utf-8",
    )
    os.replace(target.with_suffix(".new"), target)


def perform(part: Part, folder: Path) -> dict:
    "Run a part in a folder of its own, and remember the outcome."
    start = time.perf_counter()
    if part.instructions and (reason := lacking(part.instructions)):
        outcome = {
            "passed": None,
            "summary": f"skipped: {reason}",
            "failures": [],
        }
    else:
        own = folder / slug(part.name)
        own.mkdir(parents=True, exist_ok=True)
        try:
            outcome = part.run(own)
        except Failed as error:
            outcome = {
                "passed": False,
                "summary": str(error)[:300],
                "failures": [str(error)],
            }
    outcome |= {
        "seconds": round(time.perf_counter() - start, 1),
        "date": time.strftime("%Y-%m-%d"),
    }
    store(part.name, outcome)
    return outcome


WORDS = {True: "passed", False: "FAILED", None: "skipped"}


def table(outcomes: dict[str, dict]) -> str:
    wide = max(map(len, outcomes), default=0)
    return "\n".join(
        f"{name:<{wide}}  {WORDS[o['passed']]}  "
        f"{o['seconds']:6.1f} s  {o['summary']}"
        for name, o in outcomes.items()
    )


def about() -> dict:
    "Which machine, which code."
    changed = [
        line[3:]
        for line in output("git", "status", "--porcelain").splitlines()
        if not line[3:].startswith("results/")
    ]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _cpuinfo().get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "instruction sets": [name for name in SETS if not lacking(name)],
        "compilers": compilers(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "commit": output("git", "rev-parse", "HEAD")
        + (" and changes" if changed else ""),
        "native source": hashlib.sha256(KERNEL.read_bytes()).hexdigest(),
    }


def write_record(outcomes: dict[str, dict]) -> None:
    """All that is known of this state of the code; what the file held of
    `--whole` stays until that is run again.
    """
    try:
        whole = json.loads(RECORD.read_text(encoding="utf-8")).get("whole", {})
    except (OSError, ValueError):
        whole = {}
    for name in WHOLE:
        whole |= (
            {name: found} if (found := stored(f"whole {name}", "any")) else {}
        )
    missing = [p.name for p in parts() if p.name not in outcomes]
    RECORD.write_text(
        json.dumps(
            about() | {"parts": outcomes, "not run": missing, "whole": whole},
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )


# ---- both commands whole ----


def run_whole(name: str, again: bool = False) -> dict:
    """`tools.build` and every test in a clone of the last commit, whose kernel
    and PyTorch are held to an instruction set; `again`: of the last such run
    the tests that failed, whose outcome stands beside the first.
    """
    start, commit = time.perf_counter(), output("git", "rev-parse", "HEAD")
    if dirty := output("git", "status", "--porcelain", "--untracked-files=no"):
        print(
            f"changes that are not committed are left out:\n{dirty}", flush=True
        )
    folder = Path(tempfile.mkdtemp(prefix="normalnorm-whole-"))
    clone = folder / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    (clone / ".venv").symlink_to(sys.prefix)
    env = environment(WHOLE[name], "gcc", folder / "cache", 1) | {
        "PYTHONPATH": str(clone)
    }
    # each process as it would be
    env.pop("OMP_NUM_THREADS"), env.pop("NORMALNORM_TEST_BUILD")
    env["COLUMNS"] = "300"  # names of tests whole
    outcome = {
        "passed": True,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "processor": _cpuinfo().get("model name", ""),
        "environment": {
            "CXX": f"{COMPILERS['gcc']} {SETS[WHOLE[name]].march}",
            **{k: env[k] for k in dict(SETS[WHOLE[name]].torch)},
        },
    }
    steps = [("book", ["-m", "tools.build"]), ("tests", [*TESTING, "tests"])]
    for test in NOT_HELD:
        steps[-1][1].extend(["--deselect", test])
    first = stored(f"whole {name}", "any") if again else None
    if first:
        failed = [
            line.split(" - ")[0].removeprefix("FAILED ")
            for line in first["tests"]["failures"]
        ]
        gone = [
            test
            for test in failed
            if test in NOT_HELD or not (clone / test.split("::")[0]).exists()
        ]
        outcome["no longer asked"] = gone
        steps = [("tests", [*TESTING, *(t for t in failed if t not in gone)])]
    for step, command in steps:
        print(
            f"{step}: python {shlex.join(command)}, output in "
            f"{folder / step}.txt",
            flush=True,
        )
        began = time.perf_counter()
        with open(folder / f"{step}.txt", "w", encoding="utf-8") as log:
            code = subprocess.run(
                [sys.executable, *command],
                cwd=clone,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
            ).returncode
        text = (folder / f"{step}.txt").read_text(
            encoding="utf-8", errors="replace"
        )
        run, failed = (
            re.findall(r"^ +\[", text, re.M),
            [line.strip() for line in text.splitlines() if "FAILED" in line],
        )
        result = (
            tested(text, code)
            if step == "tests"
            else {
                "passed": code == 0,
                "failures": failed,
                "summary": f"{len(run)} chapters run",
            }
        )
        outcome[step] = result | {"seconds": round(time.perf_counter() - began)}
        outcome["passed"] &= code == 0
        print(
            f"{step}: {WORDS[code == 0]} in "
            f"{time.perf_counter() - began:.0f} s: {result['summary']}",
            *result["failures"],
            sep="\n  ",
            flush=True,
        )
    outcome["seconds"] = round(time.perf_counter() - start)
    if first:
        outcome = first | {"passed": outcome["passed"], "again": outcome}
    store(f"whole {name}", outcome, "any")
    if outcome["passed"]:
        shutil.rmtree(folder)
    return outcome


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
        "--list", action="store_true", help="names of the parts"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="run also what has passed for this state of the code; of --whole "
        "the tests that failed",
    )
    parser.add_argument(
        "--record", action="store_true", help="write results/processors.json"
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="install missing compilers and emulators with apt-get, as root",
    )
    parser.add_argument(
        "--whole", choices=WHOLE, help="the book and every test instead"
    )
    given = parser.parse_args(arguments)
    if given.whole:
        if reason := lacking(WHOLE[given.whole]):
            parser.error(reason)
        outcome = run_whole(given.whole, given.again)
        if given.record:
            write_record({p.name: o for p in parts() if (o := stored(p.name))})
        return not outcome["passed"]
    chosen = [
        p
        for p in parts()
        if not given.only
        or any(word.lower() in p.name.lower() for word in given.only)
    ]
    if not chosen:
        parser.error(
            f"no part has {' or '.join(given.only)} in its name; "
            "--list shows the names"
        )
    if given.list:
        print(*(p.name for p in chosen), sep="\n")
        return 0
    tools = [
        t
        for p in chosen
        for t in p.tools
        if not (p.instructions and lacking(p.instructions))
    ]
    problem = (
        install(tools)
        if given.install
        else advice([t for t in dict.fromkeys(tools) if not find(t)])
    )
    if problem:
        print(problem, file=sys.stderr)
        return 2
    compilers.cache_clear()
    todo = [
        p
        for p in chosen
        if given.again
        or not (done := stored(p.name))
        or done["passed"] is False
    ]
    print(
        f"{len(todo)} of {len(chosen)} parts to run"
        + (
            " (the others are done for this state of the code)"
            if len(todo) < len(chosen)
            else ""
        ),
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="normalnorm-processors-") as folder:
        for number, part in enumerate(todo, 1):
            outcome = perform(part, Path(folder))
            print(
                f"  [{number}/{len(todo)}] {table({part.name: outcome})}",
                *outcome["failures"],
                sep="\n      ",
                flush=True,
            )
    outcomes = {p.name: o for p in parts() if (o := stored(p.name))}
    print(f"\n{table({p.name: outcomes[p.name] for p in chosen})}")
    if missing := [p.name for p in parts() if p.name not in outcomes]:
        print(
            f"\n{len(missing)} other parts were not run for this state of "
            "the code"
        )
    failed = [p.name for p in chosen if outcomes[p.name]["passed"] is False]
    print(
        f"\n{len(failed)} of {len(chosen)} parts failed"
        + (f": {', '.join(failed)}" if failed else "")
    )
    if given.record:
        write_record(outcomes)
        print(f"recorded in {os.path.relpath(RECORD, ROOT)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
