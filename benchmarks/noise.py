"""What a cheaper noise would save: results/noise-cost.json.

    python -m benchmarks.noise

A training step of a layer, on one thread of each instruction set, in times of
its own with a piece of the kernel exchanged or left out. What is left out
altogether bounds what any replacement could save.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks import files, sets
from benchmarks.measure import BUSY, ENGINES, ratios, step
from normalnorm.layers.engines import native
from tools.files import save

OUT = files.ROOT / "results" / "noise-cost.json"
KERNEL = native._SOURCE
PAIRS = 60
# what is exchanged in the kernel's text: a pattern and what takes its place
VARIANTS = {
    "seven rounds of ten": [(r"round < 10", "round < 7")],
    "words for normal numbers": [
        (r"radius_of(?=\(\{words)", "floats"),
        (
            r"box_muller\(\{\(V\)words.*?second\)",
            "first = signed_numbers({words[b][0], words[b][2]}) * 4e-10f, "
            "second = signed_numbers({words[b][1], words[b][3]}) * 4e-10f",
        ),
    ],
}


def exchanged(text: str, pieces: list[tuple[str, str]]) -> str:
    "The kernel's text with pieces of it exchanged; none may be missing."
    for pattern, piece in pieces:
        text, found = re.subn(pattern, piece, text, flags=re.DOTALL)
        if not found:
            raise LookupError(f"native.cpp has no {pattern!r} to exchange")
    return text


def kernels() -> dict:
    "The compiled variants."
    text, found = KERNEL.read_text(encoding="utf-8"), {}
    for name, pieces in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, KERNEL.name)
            copy.write_text(exchanged(text, pieces), encoding="utf-8")
            with patch.object(native, "_SOURCE", copy):
                found[name] = native._library.__wrapped__()
    return found


def of_kernel(library, work: Callable) -> Callable:
    def run() -> None:
        native._library = lambda: library
        work()

    return run


def rows(pairs: int, quick: bool = False) -> Iterator[dict]:
    "The ratio of each variant's time to that of the layer's own step."
    own, compiled = native.library(), kernels()
    for name, kernel in compiled.items():
        if kernel._handle == own._handle:
            raise RuntimeError(f"the kernel with {name} is the kernel itself")
    for layer in ENGINES:
        if quick:
            layer = layer._replace(shape=(4, *layer.shape[1:]))
        u, grad = layer.input()
        noisy, held, still = (
            layer.make(True, noise=noise) for noise in (1.0, 1.0, 0.0)
        )
        held.weight.requires_grad_(False)
        work = step(noisy, u, grad)
        variants = {
            name: of_kernel(kernel, work) for name, kernel in compiled.items()
        } | {
            "no gradient of the weight": of_kernel(
                own,
                lambda: torch.autograd.grad(held(u), [u, held.bias], grad),  # noqa: B023
            ),
            "no noise": of_kernel(own, step(still, u, grad)),
        }
        found = ratios(variants, of_kernel(own, work), pairs)
        for name, row in found.items():
            yield {**layer.row, "work": name, "against": "training step"} | row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noise")
    parser.add_argument("--set", choices=sets.SETS, help="in this process")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small, and nothing is written: does it run?",
    )
    given = parser.parse_args()
    if given.set:
        torch.set_num_threads(1)
        made, begun = files.environment(1), time.perf_counter()
        BUSY.forget()
        found = list(rows(3 if given.quick else PAIRS, given.quick))
        took = {
            "others": BUSY.share(),
            "seconds": round(time.perf_counter() - begun),
        }
        print(json.dumps(made | took | {"rows": found}))
        return
    runs = []
    for name in sets.here():
        folder = files.ROOT / "_build" / "benchmarks"
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.noise", "--set", name]
            + ["--quick"] * given.quick,
            env=sets.environment(name, 1, folder) | {"NORMALNORM_QUIET": "1"},
            cwd=files.ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        for row in runs[-1]["rows"]:
            print(
                f"{name}, {row['layer']}: {row['work']} takes {row['p50']:.3f} "
                f"[{row['low']:.3f}, {row['high']:.3f}] of the time",
                flush=True,
            )
    if not given.quick:
        kept = ("processor", "family", "model", "torch", "commit", "date")
        about = {key: runs[0][key] for key in kept}
        save(OUT, {"environment": about, "runs": runs})


if __name__ == "__main__":
    main()
