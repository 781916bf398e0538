"""What pruning by γ costs, against pruning at random and by the size of the
output, before and after fine-tuning: results/pruning.json.

    python -m tools.slimming                        what is not there yet
    python -m tools.slimming --only speed --again

Fifteen CPU minutes on one core. Each network is written when it is done, and is
not trained again; what other code has measured is refused, unless `--again` is
given.
"""

import itertools
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from normalnorm.analysis import pruning
from normalnorm.analysis.power import evaluating
from normalnorm.experiments.data import SPLITS, data_hash, load
from normalnorm.experiments.models import SmallResNet, macs
from normalnorm.experiments.optimization import Settings
from normalnorm.experiments.train import seeded, train
from normalnorm.layers.families import named
from tools import parts

RECORD = Path(__file__).resolve().parent.parent / "results" / "pruning.json"
WIDTH, SEEDS, STRENGTH = 8, 5, 0.01
SHARES = (0.3, 0.5, 0.7, 0.9)
NORMS = {
    "batch": nn.BatchNorm2d,
    "batch, normality": lambda c: named("batch").make(c, noise=0.4),
    "group": lambda c: nn.GroupNorm(2, c),
    "layer": lambda c: nn.GroupNorm(1, c),
}
TRAINING = Settings(epochs=15, batch=64, lr=0.2, validate_every=0)
TUNING = Settings(epochs=3, batch=64, lr=0.05, validate_every=0)
PAIRS = 15  # of timed forward passes


def chain(norm, width: int = WIDTH) -> nn.Sequential:
    "Four convolutions with normalizer and ReLU, the mean, a linear map."
    stack, before = [], 1
    for i, after in enumerate((width, width, 2 * width, 2 * width)):
        stack += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            norm(after),
            nn.ReLU(),
        ]
        stack += [nn.MaxPool2d(2)] * (i == 1)
        before = after
    return nn.Sequential(
        *stack, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)
    )


def residual(norm, width: int = WIDTH) -> nn.Module:
    "Three blocks; channels can go between the two convolutions of each."
    return SmallResNet(width=width, stem_stride=1, norm=norm)


NETWORKS = {"chain": chain, "residual": residual}


def sparse(model: nn.Module) -> Tensor:
    return STRENGTH * pruning.gamma_penalty(model)


def output_sizes(model: nn.Module, names, x: Tensor) -> dict[str, Tensor]:
    "Root mean square of what each channel gives behind its ReLU."
    found, hooks = {}, []
    for name in names:
        hooks.append(
            model.get_submodule(name).register_forward_hook(
                lambda _, given, out, name=name: found.update(
                    {name: out.relu().square().mean((0, 2, 3)).sqrt()}
                )
            )
        )
    with evaluating(model), torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


def accuracy(model: nn.Module, split: tuple[Tensor, Tensor]) -> float:
    with evaluating(model), torch.no_grad():
        right = model(split[0]).argmax(1) == split[1]
    return round(100 * right.double().mean().item(), 3)


def cost(model: nn.Module, x: Tensor) -> dict[str, int]:
    with evaluating(model):
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "macs": macs(model, x),
        }


def timed(whole: nn.Module, smaller: nn.Module, x: Tensor) -> dict[str, float]:
    """Processor time of `smaller` relative to `whole`, in evaluation: the
    median over pairs that alternate, so that other work meets both, and its
    interval by order statistics (96 % for 15).
    """
    ratios = []
    with evaluating(whole), evaluating(smaller), torch.no_grad():
        for _ in range(PAIRS + 2):
            times = []
            for model in (whole, smaller):
                start = time.process_time()
                model(x)
                times.append(time.process_time() - start)
            ratios.append(times[1] / times[0])
    ratios = sorted(ratios[2:])
    return {
        "time": round(statistics.median(ratios), 4),
        "low": round(ratios[3], 4),
        "high": round(ratios[-4], 4),
    }


def one(kind: str, norm: str, penalty: bool, seed: int) -> dict:
    "Train a network, prune it in twelve ways, fine-tune each."
    data = {split: load("digits", split) for split in SPLITS}
    example = data["test"][0][:1]
    with seeded("slimming", seed):
        model = NETWORKS[kind](NORMS[norm])
    train(model, data, TRAINING, seed, penalty=sparse if penalty else None)
    report = [
        row for row in pruning.gamma_report(model, example) if not row.obstacle
    ]
    gammas = {row.name: row.gamma for row in report}
    groups = {row.name: row.groups for row in report}
    with seeded("slimming-random", seed):
        scores = {
            "γ": gammas,
            "random": {n: torch.rand(len(g)) for n, g in gammas.items()},
            "output": output_sizes(model, gammas, data["train"][0]),
        }
    cuts = []
    for share in SHARES:
        for by, score in scores.items():
            gone = pruning.smallest(score, share, groups=groups)
            smaller = pruning.remove_channels(model, example, gone, True)
            row = {
                "share": share,
                "by": by,
                **cost(smaller, example),
                **(timed(model, smaller, data["test"][0]) if by == "γ" else {}),
                "masked": accuracy(
                    pruning.mask_channels(model, gone), data["test"]
                ),
                "before": accuracy(smaller, data["test"]),
            }
            train(smaller, data, TUNING, seed)
            cuts.append(row | {"after": accuracy(smaller, data["test"])})
    return {
        "whole": accuracy(model, data["test"]),
        **{f"whole_{k}": v for k, v in cost(model, example).items()},
        "gamma": [
            round(v, 5)
            for v in torch.cat([*gammas.values()]).sort().values.tolist()
        ],
        "cuts": cuts,
    }


def speed() -> list[dict]:
    """Time of a forward pass of wider networks, 64 and 32 channels at first,
    with a share of the channels of each layer less, relative to the whole one.
    """
    x, found = torch.randn(8, 1, 28, 28), []
    for kind, make in NETWORKS.items():
        for norm, layer in NORMS.items():
            whole = make(layer, 64 if kind == "chain" else 32)
            report = [
                row
                for row in pruning.gamma_report(whole, x[:1])
                if not row.obstacle
            ]
            for share in SHARES:
                gone = {}
                for row in report:
                    size = len(row.gamma) // row.groups
                    gone[row.name] = [
                        g * size + i
                        for g in range(row.groups)
                        for i in range(round(share * size))
                    ]
                smaller = pruning.remove_channels(whole, x[:1], gone, True)
                with evaluating(whole), evaluating(smaller):
                    part = macs(smaller, x) / macs(whole, x)
                found.append(
                    {
                        "network": kind,
                        "norm": norm,
                        "share": share,
                        **timed(whole, smaller, x),
                        "macs": round(part, 5),
                    }
                )
    return found


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    networks = [
        (
            (kind, norm, penalty, str(seed)),
            partial(one, kind, norm, penalty == "penalty", seed),
        )
        for seed in range(SEEDS)
        for kind, norm, penalty in itertools.product(
            NETWORKS, NORMS, ("no penalty", "penalty")
        )
    ]
    return parts.run(
        __doc__,
        RECORD,
        [*networks, (("speed",), speed)],
        {"data": data_hash("digits")},
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
