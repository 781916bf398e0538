"""One instruction set and one number of threads, in this process:

    python -m benchmarks.one avx2 1 PAIRS FOLDER [parts]

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
    what = " ".join(
        str(part)
        for part in (
            row.get("layer") or row.get("model") or row.get("what"),
            tuple(row["shape"]) if "shape" in row else "",
            f"{row['processes']} processes" if "processes" in row else "",
            "compiled" if row.get("compiled") else "",
        )
        if part
    )
    if "value" in row:
        return f"{what}: {row['value']}"
    if "ns" in row:
        return f"{what}, {row['work']}: {row['ns']} ns an element"
    if "whose" in row:
        return f"{what}, {row['whose']}: " + ", ".join(
            f"{key}: {value}"
            for key, value in row.items()
            if key not in ("layer", "shape", "whose")
        )
    return (
        f"{what}, {row['work']}, against {row['against']}: "
        f"{row['p50']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
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
    record = files.read(path)
    todo = asked or list(parts)
    if not quick:
        todo = files.due(record, here, asked, list(parts), pairs, again)
        if not asked and files.differences(record["environment"], here):
            record = files.nothing()  # all is measured anew
        files.staying(path, record, here, todo)  # refuses a mixture
        out.mkdir(parents=True, exist_ok=True)
    if not todo:
        tell(
            f"{path.name} has all parts, of this code and {pairs} pairs; "
            "--again measures them anew"
        )
    order = {part: place for place, part in enumerate(parts)}
    for number, part in enumerate(todo, 1):
        tell(f"{path.stem}: {part}, part {number} of {len(todo)}")
        begun, rows = time.perf_counter(), []
        BUSY.forget()
        for row in parts[part](pairs, quick):
            rows.append({"part": part, **row})
            tell(f"  {told(row)}")
        lasted, others = time.perf_counter() - begun, BUSY.share()
        tell(
            f"  {lasted:.0f} s"
            + (
                f"; other programs took {100 * others:.0f} % of the "
                "processors' time meanwhile"
                if others is not None
                else ""
            )
        )
        if quick:
            continue
        # what other parts have left, unless it is of another environment
        stay = files.staying(
            path,
            record,
            here,
            todo if files.differences(record["environment"], here) else [part],
        )
        kept = {row["part"] for row in stay}
        record = {
            "environment": files.environment(threads),
            "parts": {
                key: value
                for key, value in record["parts"].items()
                if key in kept
            }
            | {
                part: {
                    "pairs": pairs,
                    "seconds": round(lasted),
                    "others": others,
                    "date": time.strftime("%Y-%m-%d"),
                }
            },
            "rows": sorted(
                stay + rows, key=lambda row: order.get(row["part"], len(order))
            ),
        }
        files.write(path, record)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one", description=__doc__
    )
    parser.add_argument("set", choices=sets.SETS)
    parser.add_argument("threads", type=int)
    parser.add_argument("pairs", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(given.threads)
    if problem := sets.problem(given.set):
        sys.exit(
            f"not measured, for this process is not held to {given.set}: "
            f"{problem}"
        )
    from benchmarks.measure import PARTS

    measure(
        PARTS,
        given.parts,
        given.threads,
        given.pairs,
        given.out,
        given.quick,
        given.again,
        tell=lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the parts that were finished are kept")
