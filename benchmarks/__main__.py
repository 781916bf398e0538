"""Measure everything, or the parts that are named, for each instruction set and
number of threads, and keep a file for each in results/benchmarks.

What is there from this code is not measured again, unless it is named or with
--again. Each part is kept when it is finished, so an interrupted run goes on
where it was.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import files, one, sets

PARTS = (
    "machine",
    "layers",
    "cached",
    "engines",
    "memory",
    "models",
    "compiled",
    "sync",
    "proxy",
)
WORK = files.ROOT / "_build" / "benchmarks"
PAIRS = 30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__
    )
    parser.add_argument(
        "parts", nargs="*", help=f"{', '.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--sets",
        nargs="+",
        choices=sets.SETS,
        default=sets.here(),
        help="instruction sets (default: those of avx512 and avx2 that the "
        "processor has; own: the best it has, whatever that is)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[1, os.cpu_count()],
        help="thread counts (default: 1 and the number of cores)",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=PAIRS,
        help="interleaved timings of a row at most; long ones have fewer "
        f"(default {PAIRS})",
    )
    parser.add_argument(
        "--out", type=Path, default=files.OUT, help="folder for the rows"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="measure also what is there from this code",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small shapes and few pairs, nothing is written: "
        "does everything run?",
    )
    # in a process that is held to one set already
    parser.add_argument("--held", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.held:
        return one.main(given)
    if unknown := set(given.parts) - set(PARTS):
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; there are "
            f"{', '.join(PARTS)}"
        )
    if reasons := [
        f"{name}: {reason}"
        for name in given.sets
        if (reason := sets.lacking(name))
    ]:
        parser.error("; ".join(reasons))
    begun = time.perf_counter()
    both = [
        (name, threads)
        for name in dict.fromkeys(given.sets)
        for threads in dict.fromkeys(given.threads)
    ]
    for number, (name, threads) in enumerate(both, 1):
        environment = sets.environment(name, threads, WORK)
        print(
            f"[{number}/{len(both)}] {name}, {threads} "
            f"thread{'s' * (threads > 1)}, after "
            f"{(time.perf_counter() - begun) / 60:.1f} min: "
            f"{sets.words(environment) or 'nothing to hold it to'}",
            flush=True,
        )
        held = ["--held", "--sets", name, "--threads", str(threads)]
        status = subprocess.call(
            [sys.executable, "-m", "benchmarks", *sys.argv[1:], *held],
            cwd=files.ROOT,
            env=environment,
        )
        if status:
            return status
    print(f"done in {(time.perf_counter() - begun) / 60:.1f} min")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(
            "interrupted: the parts that were finished are kept; the same "
            "command goes on"
        )
