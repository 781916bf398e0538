"""Measure everything, or the parts that are named, for each instruction set and
number of threads, and keep a file for each in results/benchmarks.

What is there from this code is not measured again, unless it is named. Each
part is kept when it is finished, so an interrupted run goes on where it was.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks import files, measure, sets
from benchmarks.measure import PARTS
from tools import processors

WORK = files.ROOT / "_build" / "benchmarks"
PAIRS = 30


def told(row: dict) -> str:
    "A row in one line."
    return ", ".join(
        f"{value}" if isinstance(value, str) else f"{key}: {value}"
        for key, value in row.items()
    )


def kept(
    parts: dict[str, Callable],
    asked: list[str],
    threads: int,
    pairs: int,
    out: Path,
    quick: bool,
    tell: Callable[[str], None] = print,
) -> None:
    """Measure parts in this process, one after another, each of which is
    written when it is finished.

    Quick: nothing is written, and nothing read.
    """
    here = files.environment(threads)
    path = out / files.name(here)
    record, todo = (
        (files.nothing(), asked or list(parts))
        if quick
        else files.begin(path, here, asked, list(parts), pairs)
    )
    if not todo:
        tell(
            f"{path.name} has all parts, of this code and {pairs} pairs; "
            "who names parts has them measured anew"
        )
    for number, part in enumerate(todo, 1):
        tell(f"{path.stem}: {part}, part {number} of {len(todo)}")
        begun, rows = time.perf_counter(), []
        measure.BUSY.forget()
        for row in parts[part](pairs, quick):
            rows.append({"part": part, **row})
            tell(f"  {told(row)}")
        lasted, others = time.perf_counter() - begun, measure.BUSY.share()
        busy = (
            f"; other programs took {100 * others:.0f} % of the time of the "
            "processors meanwhile"
            if others is not None
            else ""
        )
        tell(f"  {lasted:.0f} s{busy}")
        if quick:
            continue
        about = {
            "pairs": pairs,
            "seconds": round(lasted),
            "others": others,
            "date": time.strftime("%Y-%m-%d"),
        }
        rows += [row for row in record["rows"] if row["part"] != part]
        places = {name: place for place, name in enumerate(parts)}
        record = {
            "environment": files.environment(threads),
            "parts": {k: v for k, v in record["parts"].items() if k != part}
            | {part: about},
            "rows": sorted(
                rows, key=lambda row: places.get(row["part"], len(places))
            ),
        }
        out.mkdir(parents=True, exist_ok=True)
        files.write(path, record)


def in_this_process(given: argparse.Namespace) -> int:
    "One instruction set and one number of threads, in this process."
    (name,), (threads,) = given.sets, given.threads
    torch.set_num_threads(threads)
    if problem := processors.problem(sets.SETS[name]):
        sys.exit(
            f"not measured, for this process is not held to {name}: {problem}"
        )
    kept(
        measure.PARTS,
        given.parts,
        threads,
        3 if given.quick else given.pairs,
        given.out.resolve(),
        given.quick,
        tell=partial(print, flush=True),
    )
    return 0


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
        "--quick",
        action="store_true",
        help="small shapes and few pairs, nothing is written: "
        "does everything run?",
    )
    # in a process that is held to one set already
    parser.add_argument("--held", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.held:
        return in_this_process(given)
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
            f"{(time.perf_counter() - begun) / 60:.1f} min",
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
