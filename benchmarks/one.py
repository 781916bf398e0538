"""One instruction set and one number of threads, in this process.

`python -m benchmarks` starts it with what holds both sides to the set.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import files, sets


def told(row: dict) -> str:
    "A row in one line."
    return ", ".join(
        f"{value}" if isinstance(value, str) else f"{key}: {value}"
        for key, value in row.items()
    )


def measure(
    parts: dict[str, Callable],
    asked: list[str],
    threads: int,
    pairs: int,
    out: Path,
    quick: bool,
    again: bool,
    tell: Callable[[str], None] = print,
) -> None:
    """Measure parts, one after another, each of which is written when it is
    finished.

    Quick: nothing is written, and nothing read.
    """
    from benchmarks.measure import BUSY

    here = files.environment(threads)
    path = out / files.name(here)
    record, todo = (
        (files.nothing(), asked or list(parts))
        if quick
        else files.begin(path, here, asked, list(parts), pairs, again)
    )
    if not todo:
        tell(
            f"{path.name} has all parts, of this code and {pairs} pairs; "
            "--again measures them anew"
        )
    for number, part in enumerate(todo, 1):
        tell(f"{path.stem}: {part}, part {number} of {len(todo)}")
        begun, rows = time.perf_counter(), []
        BUSY.forget()
        for row in parts[part](pairs, quick):
            rows.append({"part": part, **row})
            tell(f"  {told(row)}")
        lasted, others = time.perf_counter() - begun, BUSY.share()
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


def main(given: argparse.Namespace) -> int:
    "What `python -m benchmarks` was given, of one set and number of threads."
    import torch

    from benchmarks.measure import PARTS

    (name,), (threads,) = given.sets, given.threads
    torch.set_num_threads(threads)
    if problem := sets.problem(name):
        sys.exit(
            f"not measured, for this process is not held to {name}: {problem}"
        )
    measure(
        PARTS,
        given.parts,
        threads,
        3 if given.quick else given.pairs,
        given.out.resolve(),
        given.quick,
        given.again,
        tell=lambda line: print(line, flush=True),
    )
    return 0
