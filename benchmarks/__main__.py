"""Measure everything, or what is named, and write one row a line to
results/benchmarks.
"""
import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Large results in fresh pages cost more than computing them. Both sides of a
# pair get memory that has been touched: glibc keeps what is freed.
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32),
              "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
              "MALLOC_TOP_PAD_": str(1 << 28)}


def environment(threads: int) -> dict:
    """Where and with what.

    `kernel` and `backend` are what computed the layers so far, so this is asked
    when the measuring is done."""
    import torch

    import normalnorm
    from normalnorm.experiments.results import provenance
    made = provenance()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT,
                            capture_output=True, text=True).stdout.strip()
    return {"processor": made["processor"], "cores": os.cpu_count(),
            "threads": threads, "vectors": made["instructions"],
            "kernel": made["kernel"], "backend": made["backend"],
            "source": made["source"], "python": made["python"],
            "torch": torch.__version__, "normalnorm": normalnorm.__version__,
            "commit": commit, "date": time.strftime("%Y-%m-%d"),
            "load": round(os.getloadavg()[0], 1),
            "pages kept": "MALLOC_TOP_PAD_" in os.environ}


def kept(target: Path, parts: list[str]) -> list[dict]:
    """The rows of a file that stay when `parts` are measured again.

    One file has one environment: `SystemExit` where they were made by other
    code or on another processor than these."""
    old = (json.loads(target.read_text(encoding="utf-8")) if target.exists()
           else {"environment": {}, "rows": []})
    stay, here = ([r for r in old["rows"] if r["part"] not in parts],
                  environment(0))
    different = [f"{k}: {old['environment'].get(k, 'not recorded')} there, "
                 f"{here[k]} here"
                 for k in ("source", "processor", "vectors", "torch")
                 if old["environment"].get(k) != here[k]]
    if stay and different:
        raise SystemExit(f"{target} has rows that would stay "
                         f"({', '.join(sorted({r['part'] for r in stay}))}) "
                         "beside new ones, and another environment "
                         f"({'; '.join(different)}): measure all parts, or "
                         "give another --out")
    return stay


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*",
                        help="machine, layers, memory, models (default: all)")
    parser.add_argument(
        "--threads", type=int, nargs="*", default=[1, os.cpu_count()],
        help="thread counts (default: 1 and the number of cores)")
    parser.add_argument(
        "--pairs", type=int, default=40,
        help="interleaved pairs of timings for each row (default 40)")
    parser.add_argument("--out", type=Path,
                        default=ROOT / "results" / "benchmarks",
                        help="folder for the rows")
    parser.add_argument("--quick", action="store_true",
                        help="small shapes and few pairs: does everything run?")
    arguments = parser.parse_args()
    from benchmarks import measure
    parts = {"machine": measure.machine, "layers": measure.layers,
             "memory": measure.memory, "models": measure.models}
    if unknown := set(arguments.parts) - set(parts):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are "
                     f"{', '.join(parts)}")
    if not any(k in os.environ for k in KEEP_PAGES):
        os.execve(sys.executable,
                  [sys.executable, "-m", "benchmarks", *sys.argv[1:]],
                  os.environ | KEEP_PAGES)
    import torch
    arguments.out.mkdir(parents=True, exist_ok=True)
    for threads in dict.fromkeys(arguments.threads):
        torch.set_num_threads(threads)
        target, rows = (
            arguments.out / f"cpu-{threads}-thread{'s' * (threads > 1)}.json",
            [])
        before = [] if arguments.quick else kept(
            target, arguments.parts or list(parts))
        for name in arguments.parts or parts:
            for row in parts[name](3 if arguments.quick else arguments.pairs,
                                   arguments.quick):
                rows.append({"part": name, **row})
                print(json.dumps(rows[-1]), flush=True)
        if not arguments.quick:
            text = json.dumps(
                {"environment": environment(threads), "rows": before + rows},
                indent=1) + "\n"
            target.with_suffix(".new").write_text(text)
            os.replace(target.with_suffix(".new"), target)


if __name__ == "__main__":
    main()
