"""Where the power goes in networks in training: results/power-training.json.

    python -m tools.power_training              what is not there yet
    python -m tools.power_training --only rates --again

Twenty CPU minutes on one core. Each run is written when it is done and not
repeated; runs of other code are refused, unless `--again` is given.
"""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from normalnorm.analysis import hessian, power
from normalnorm.experiments import models, train
from normalnorm.experiments.data import data_hash, load
from normalnorm.experiments.optimization import Settings
from normalnorm.layers.parametrizations import weight_standardization
from normalnorm.layers.proxy_conversion import to_proxy_norm
from tools import parts

RECORD = (
    Path(__file__).resolve().parent.parent / "results" / "power-training.json"
)
# a proxy's group norms are made from batch norms
ARMS = {
    "BN": nn.BatchNorm2d,
    "IN": lambda c: nn.GroupNorm(c, c),
    "LN": lambda c: nn.GroupNorm(1, c),
    "GN": lambda c: nn.GroupNorm(4, c),
    "LN+PN": nn.BatchNorm2d,
    "GN+PN": nn.BatchNorm2d,
    "LN+WS": lambda c: nn.GroupNorm(1, c),
}
MODEL = {"channels": 1, "stem_stride": 2, "preactivation": True}
TRAIN = {
    "epochs": 12,
    "batch": 128,
    "lr": 0.1,
    "weight_decay": 5e-4,
    "validate_every": 0,
}
IMAGES, PROBES, SEEDS = 2048, 256, 5
AROUND = (0.25, 0.5, 1.0)  # distances, in norms of each parameter
STEEP, BATCH, LEADING = ("BN", "LN", "LN+PN"), 128, 5
RATES, RATE_EPOCHS, RATE_SEEDS = (0.05, 0.2, 0.8, 3.2, 12.8), 2, 3


def network(arm: str, seed: int) -> nn.Module:
    "ResNet-20 v2, with weights that are the same for all arms of a seed."
    with train.seeded("weights", seed):
        net = models.build("cifar_resnet20", norm=ARMS[arm], **MODEL)
    if arm.endswith("PN"):
        to_proxy_norm(
            net,
            "layer" if arm.startswith("L") else "group",
            4,
            samples=200,
            return_report=True,
        )
    if arm.endswith("WS"):
        for module in list(net.modules()):
            if isinstance(module, nn.Conv2d):
                weight_standardization(module)
    return net


def splits(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    "Training images drawn by the seed; 1000 images for each of the others."
    return {
        "train": load("fashion", "train", IMAGES, draw=seed),
        "validation": load("fashion", "validation"),
        "test": load("fashion", "test", 1000),
    }


def powers(net: nn.Module, images: Tensor) -> Tensor:
    "The four parts of each normalizer's output, (layers, 4)."
    return torch.stack(
        [
            torch.stack(p.layer())
            for p in power.model_power(
                net, images, batch_statistics=True
            ).values()
        ]
    )


def rounded(values: Tensor) -> list:
    return (
        [round(v, 4) if isinstance(v, float) else rounded(v) for v in values]
        if isinstance(values, list)
        else rounded(values.tolist())
    )


@torch.no_grad()
def vicinity(net: nn.Module, images: Tensor, seed: int) -> list[float]:
    """Mean P1 over layers where each parameter is moved in a random direction,
    by `AROUND` times its norm; means of three directions.
    """
    found = torch.zeros(len(AROUND))
    for draw in range(3):
        with train.seeded("direction", seed, draw):
            steps = [torch.randn_like(p) for p in net.parameters()]
        for i, distance in enumerate(AROUND):
            moved = copy.deepcopy(net)
            for p, step in zip(moved.parameters(), steps):
                p += distance * p.norm() / step.norm() * step
            found[i] += powers(moved, images)[:, 0].mean().item() / 3
    return rounded(found)


def steepness(net: nn.Module, data: dict) -> dict:
    """Leading eigenvalues of the Hessian of the loss of 128 training images, in
    training mode, and the one at the other end.
    """
    net = copy.deepcopy(net).train()
    x, y = (t[:BATCH] for t in data["train"])
    found = hessian.hessian_extremes(
        lambda: train.cross_entropy(net(x), y),
        net.parameters(),
        LEADING,
        tol=0.02,
        max_products=100,
    )
    return {
        "largest": rounded(found.largest),
        "smallest": rounded(found.smallest),
        "error": rounded(found.largest_error),
        "converged": found.converged,
    }


def training_run(arm: str, seed: int) -> dict:
    "The powers at the start, their mean over epochs, the last; the vicinity."
    net, data = network(arm, seed), splits(seed)
    probes = data["test"][0][:PROBES]
    found = {"start": powers(net, probes)}
    around = {"start": vicinity(net, probes, seed)}
    steep = {"start": steepness(net, data)} if arm in STEEP else {}
    history: list[Tensor] = []

    def measure(moment) -> None:
        if moment.when == "epoch":
            history.append(powers(moment.model, probes))

    outcome = train.train(
        net, data, Settings(**TRAIN), seed, callbacks=[measure]
    )
    found |= {"epochs": torch.stack(history).mean(0), "last": history[-1]}
    around["last"] = vicinity(net, probes, seed)
    if arm in STEEP:
        steep["last"] = steepness(net, data)
    return {
        **{name: rounded(values) for name, values in found.items()},
        "p1": rounded(torch.stack([found["start"], *history])[..., 0].mean(1)),
        "vicinity": around,
        "hessian": steep,
        "loss": round(outcome["history"][-1]["train_loss"], 4),
        "accuracy": round(100 * outcome["last"]["test_accuracy"], 2),
    }


def rate_run(arm: str, seed: int) -> dict:
    """For each constant learning rate the loss as met in the last epoch, and
    the test accuracy; nothing where the run diverged.
    """
    data, found = splits(seed), {}
    for lr in RATES:
        settings = Settings(
            **TRAIN | {"epochs": RATE_EPOCHS, "lr": lr, "schedule": "constant"}
        )
        try:
            outcome = train.train(network(arm, seed), data, settings, seed)
            found[str(lr)] = [
                round(outcome["history"][-1]["train_loss"], 4),
                round(100 * outcome["last"]["test_accuracy"], 2),
            ]
        except train.TrainingDiverged:
            found[str(lr)] = []
    return found


def runs() -> Iterator[parts.Part]:
    "Seed by seed, so that an interrupted record is balanced."
    for name, run, seeds in (
        ("training", training_run, SEEDS),
        ("rates", rate_run, RATE_SEEDS),
    ):
        for seed in range(seeds):
            for arm in ARMS:
                yield (name, arm, str(seed)), partial(run, arm, seed)


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    return parts.run(
        __doc__,
        RECORD,
        runs(),
        {
            "model": MODEL,
            "train": TRAIN,
            "images": IMAGES,
            "probes": PROBES,
            "around": AROUND,
            "data": data_hash("fashion"),
        },
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
