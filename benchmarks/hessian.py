"""What chapter 460 shows of small networks' curvature, and what an estimate
needs in memory: results/hessian.json.

    python -m benchmarks.hessian            # about five minutes
    python -m benchmarks.hessian --missing  # what is not there, or after a stop
    python -m benchmarks.hessian --seeds 1 --steps 2 --out FILE     # a try

Each network has eight blocks of width 24 and learns 256 digits for 50 steps of
gradient descent with momentum, all of them in each step. Of the first seed the
density of all eigenvalues is kept too, as nodes and weights of its probes. A
network is written when it is measured.
"""

import argparse
import json
import math
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import files
from normalnorm.analysis.hessian import hessian_density, hessian_extremes
from normalnorm.experiments.data import load
from normalnorm.experiments.results import write_atomically
from normalnorm.experiments.train import seeded
from normalnorm.layers.normalizers import BMLVNorm, LMBVNorm
from normalnorm.layers.prelayer import PreLayerNormLinear
from normalnorm.layers.regnorm import RegNormLinear, regnorm_penalty

OUT = files.ROOT / "results" / "hessian.json"
KINDS = (
    "none",
    "weight",
    "layer",
    "prelayer",
    "bmlv",
    "batch",
    "frozen",
    "lmbv",
    "regnorm",
)
WIDTH, DEPTH, EXAMPLES, STEPS, RATE, MOMENTUM = 24, 8, 256, 50, 0.01, 0.9
CLASSES, TOLERANCE = 10, 1e-3
PROBES, NODES = 3, 40  # of a density: directions, products for each


class WeightNormLinear(nn.Module):
    """W = g v/‖v‖ for each output, from operations whose second derivatives are
    right; g begins at √2, as He's law has it.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.v = nn.Parameter(torch.randn(outputs, inputs))
        self.g = nn.Parameter(torch.full((outputs, 1), math.sqrt(2)))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        length = self.v.square().sum(1, keepdim=True).sqrt()
        return F.linear(x, self.g * self.v / length, self.bias)


class Network(nn.Module):
    """A linear layer, `DEPTH` times linear layer, normalizer and ReLU, with a
    sum around them where `skip`, and a classifier.
    """

    def __init__(self, kind: str, skip: bool):
        super().__init__()
        self.skip = skip
        linear = {
            "weight": WeightNormLinear,
            "prelayer": PreLayerNormLinear,
            "regnorm": RegNormLinear,
        }.get(kind, nn.Linear)
        norm = {
            "layer": nn.LayerNorm,
            "bmlv": BMLVNorm,
            "lmbv": LMBVNorm,
            "batch": lambda n: nn.BatchNorm1d(n, momentum=1.0),
            "frozen": lambda n: nn.BatchNorm1d(n, momentum=1.0),
        }.get(kind, lambda n: nn.Identity())
        self.stem = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(linear(WIDTH, WIDTH), norm(WIDTH), nn.ReLU())
            for _ in range(DEPTH)
        )
        self.classifier = nn.Linear(WIDTH, CLASSES)
        for block in self.blocks:
            if isinstance(block[0], nn.Linear):
                nn.init.normal_(block[0].weight, std=math.sqrt(2 / WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for block in self.blocks:
            x = x + block(x) if self.skip else block(x)
        return self.classifier(x)


def population(model: nn.Module, x: Tensor) -> None:
    """Take batch norm's averages from `x`; afterwards they are constants, as in
    evaluation.
    """
    model.train()
    with torch.no_grad():
        model(x)
    model.eval()


class Trained:
    """One network on its way: `learn` so many steps, then `loss` is what the
    spectra are of, the cross-entropy also where a penalty is learned with it.
    """

    def __init__(self, kind: str, skip: bool, seed: int):
        self.kind = kind
        self.x, self.y = load("digits", "train", EXAMPLES)
        with seeded("hessian", seed):
            self.model = Network(kind, skip)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), RATE, MOMENTUM
        )

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def learn(self, steps: int) -> float:
        "The loss afterwards; not finite where it diverged."
        for _ in range(steps):
            self.settle()
            value = self.loss()
            if self.kind == "regnorm":  # 1 if all power were the batch's mean
                value = value + regnorm_penalty(
                    self.model, 1 / (2 * DEPTH * WIDTH)
                )
            self.optimizer.zero_grad()
            value.backward()
            self.optimizer.step()
        self.settle()
        return self.loss().item()

    def settle(self) -> None:
        if self.kind == "frozen":
            population(self.model, self.x)


def spectrum(kind: str, skip: bool, seed: int, steps: int) -> dict[str, Any]:
    """The extreme eigenvalues of one network before and after training; None
    where it diverged.
    """
    network = Trained(kind, skip, seed)
    row: dict[str, Any] = {"kind": kind, "skip": skip, "seed": seed}
    for when, count in (("before", 0), ("after", steps)):
        value = network.learn(count)
        if not math.isfinite(value):
            row[when] = None
            continue
        found = hessian_extremes(
            network.loss, network.model.parameters(), CLASSES, 1, tol=TOLERANCE
        )
        row[when] = {
            "loss": value,
            "largest": found.largest.tolist(),
            "smallest": found.smallest.item(),
            "error": found.largest_error.max().item(),
            "converged": found.converged,
        }
    return row


def density(kind: str, skip: bool, seed: int, steps: int) -> dict[str, Any]:
    """The density of one network's eigenvalues after training; None for both
    where it diverged.
    """
    network = Trained(kind, skip, seed)
    found: Any = None
    if math.isfinite(network.learn(steps)):
        found = hessian_density(
            network.loss, network.model.parameters(), PROBES, NODES
        )
    size = sum(p.numel() for p in network.model.parameters())
    return {
        "kind": kind,
        "skip": skip,
        "seed": seed,
        "size": size,
        "nodes": found and found.nodes.tolist(),
        "weights": found and found.weights.tolist(),
    }


# what is measured of a network: by which function, and of how many seeds
PARTS = {"rows": (spectrum, None), "densities": (density, 1)}


def missing(
    record: dict[str, Any], part: str, seeds: int
) -> list[tuple[int, bool, str]]:
    "The networks, as (seed, skip, kind), of which `record` has not `part`."
    there = {
        (row["seed"], row["skip"], row["kind"]) for row in record.get(part, ())
    }
    return [
        network
        for seed in range(min(seeds, PARTS[part][1] or seeds))
        for skip in (False, True)
        for kind in KINDS
        if (network := (seed, skip, kind)) not in there
    ]


def memory() -> list[dict[str, Any]]:
    """The most memory of the process above that before the call, MiB, for a
    network of ten million parameters.
    """
    layers = []
    for before in (784, 2048, 2048):
        layers += [nn.Linear(before, 2048), nn.LayerNorm(2048), nn.ReLU()]
    with seeded("hessian", 0):
        model = nn.Sequential(*layers, nn.Linear(2048, 10))
        x, y = torch.randn(64, 784), torch.randint(10, (64,))

    def loss() -> Tensor:
        return F.cross_entropy(model(x), y)

    loss().backward()
    model.zero_grad()
    count = sum(p.numel() for p in model.parameters())
    rows = []
    # the most so far never falls, so the smaller one is measured first
    for name, call in (
        ("density", lambda: hessian_density(loss, model.parameters(), 2, 6)),
        (
            "extremes",
            lambda: hessian_extremes(
                loss, model.parameters(), 10, 1, tol=TOLERANCE
            ),
        ),
    ):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        before = pages * resource.getpagesize() / 2**20
        start = time.perf_counter()
        found = call()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append(
            {
                "call": name,
                "parameters": count,
                "above": round(most - before),
                "products": getattr(found, "products", 12),
                "seconds": round(time.perf_counter() - start),
            }
        )
    return rows


def keep(
    path: Path, old: dict[str, Any], made: dict[str, Any], new: dict[str, list]
) -> None:
    """Write the old record with the new rows of each part. What made the later
    rows stands beside what made the first.
    """
    every = {part: old.get(part, []) + rows for part, rows in new.items()}
    if old:
        record = (
            old
            | every
            | {
                "added": [
                    *old.get("added", []),
                    made
                    | {
                        "parts": [part for part, rows in new.items() if rows],
                        "kinds": sorted(
                            {
                                row["kind"]
                                for rows in new.values()
                                for row in rows
                            }
                        ),
                    },
                ]
            }
        )
    else:
        record = made | every
    # six digits: the eigenvalues have four; a list of numbers is one line
    text = json.dumps(
        json.loads(
            json.dumps(record), parse_float=lambda v: float(f"{float(v):.6g}")
        ),
        indent=1,
        ensure_ascii=False,
    )
    text = re.sub(
        r"\[[-+.\de,\s]+\]",
        lambda m: " ".join(m[0].split()).replace("[ ", "[").replace(" ]", "]"),
        text,
    )
    write_atomically(path, lambda file: file.write((text + "\n").encode()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--missing", action="store_true", help="only what is not there"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start = time.perf_counter()
    settings = {
        "data": "digits",
        "examples": EXAMPLES,
        "steps": args.steps,
        "rate": RATE,
        "momentum": MOMENTUM,
        "width": WIDTH,
        "blocks": DEPTH,
    }
    old: dict[str, Any] = {}
    if args.missing:
        if not args.out.exists():
            parser.error(
                f"{args.out} is not there, so nothing can be added to "
                "it: leave out --missing"
            )
        old = json.loads(args.out.read_text(encoding="utf-8"))
        other = {
            name: old[name] for name in settings if old[name] != settings[name]
        }
        if other:
            parser.error(
                f"{args.out} was made with {other}, which make no "
                "table with the new ones: give another --out"
            )
    # before: the code that is measured is the one that was imported
    made, new = files.environment(1), {part: [] for part in PARTS}
    made |= {} if args.missing else {"memory": memory()}
    for part, (measure, _) in PARTS.items():
        for seed, skip, kind in missing(old, part, args.seeds):
            new[part].append(measure(kind, skip, seed, args.steps))
            seconds = time.perf_counter() - start
            keep(
                args.out,
                old,
                made
                | {"seconds": round(seconds), **settings, "seeds": args.seeds},
                new,
            )
            print(
                f"{part}: seed {seed}, {kind}, skip {skip}: {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    if not any(new.values()):
        print("nothing is missing")


if __name__ == "__main__":
    main()
