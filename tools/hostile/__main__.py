import argparse
import json
import time

import torch

from normalnorm.experiments.results import processor
from tools import hostile
from tools.files import ROOT, save

RECORD = ROOT / "results" / "hostile.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.hostile",
        description=hostile.__doc__.split("\n")[0],
    )
    parser.add_argument(
        "--every",
        action="store_true",
        help="all cases, not the selection of the tests",
    )
    parser.add_argument(
        "--only", default="", help="cases whose name contains this"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the outcome to results/hostile.json",
    )
    given, start = parser.parse_args(), time.perf_counter()
    found = hostile.run_cases(
        case
        for case in hostile.table(given.every)
        if given.only in " · ".join(case)
    )
    found |= {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - start, 1),
    }
    if given.record:
        save(RECORD, found)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    return bool(found["failures"])


if __name__ == "__main__":
    raise SystemExit(main())
