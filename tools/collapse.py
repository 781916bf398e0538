"""How fast random nets, and nets in training, collapse: results/collapse.json.

    python -m tools.collapse                    what is not there yet
    python -m tools.collapse --only widths --again

Ten CPU minutes on one core. A part that is done is not repeated; one that other
code has measured is refused, unless `--again` is given.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normalnorm.analysis import power
from normalnorm.checks import rivals
from normalnorm.experiments.data import data_hash, load
from normalnorm.experiments.models import SmallResNet
from normalnorm.experiments.train import seeded
from normalnorm.layers.core import normality_norm
from normalnorm.layers.families import named
from normalnorm.theory import collapse
from tools import parts

RECORD = Path(__file__).resolve().parent.parent / "results" / "collapse.json"
DEPTH, IMAGES = 30, 16
NETS = {64: 256, 128: 128, 256: 64, 512: 32}  # of each width
VARIANTS = 16  # nets of width 128
CURES = ("LN", "LN+PN", "GN+PN", "IN")  # of chapter 425, width 512
EPOCHS, SEEDS = 6, 3


def identity(t: Tensor) -> Tensor:
    return t


def grouped(size: int, alpha: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Groups of `size` channels, with the power transform for `alpha` = 1;
    `size` = 0: all channels.
    """

    def normalize(x: Tensor) -> Tensor:
        split = x.reshape(len(x), -1, size or x.shape[1], *x.shape[2:])
        return normality_norm(split, (2, 3, 4), alpha=alpha, eps=1e-12)[
            0
        ].reshape(x.shape)

    return normalize


def over_batch(alpha: float) -> Callable[[Tensor], Tensor]:
    return lambda x: normality_norm(x, (0, 2, 3), alpha=alpha, eps=1e-12)[0]


def standardize(w: Tensor) -> Tensor:
    "Weight standardization: mean 0 and variance 1/fan-in for each unit."
    flat = w.flatten(1)
    flat = flat - flat.mean(1, keepdim=True)
    return (flat / flat.square().sum(1, keepdim=True).sqrt()).reshape(w.shape)


# name: arguments of `random_net` beside depth and width
KINDS = {
    "ReLU": {},
    "identity": {"activation": identity},
    "leaky ReLU, 0.1": {"activation": lambda t: F.leaky_relu(t, 0.1)},
    "absolute value": {"activation": torch.abs},
    "GELU": {"activation": F.gelu},
    "SiLU": {"activation": F.silu},
    "tanh": {"activation": torch.tanh},
    "ReLU, no β": {"beta_std": 0.0},
    "identity, no β": {"beta_std": 0.0, "activation": identity},
    "ReLU, γ = 1, no β": {"beta_std": 0.0, "gamma_std": 0.0},
    "residual": {"residual": True},
    **{
        f"groups of {size}": {"normalize": grouped(size)}
        for size in (1, 2, 4, 8, 16, 32, 64)
    },
    "batch": {"normalize": over_batch(0.0)},
    "weight standardization": {"prepare": standardize},
    "weight standardization, γ = 1, no β": {
        "prepare": standardize,
        "beta_std": 0.0,
        "gamma_std": 0.0,
    },
    "layer, normality": {"normalize": grouped(0, 1.0)},
    "groups of 16, normality": {"normalize": grouped(16, 1.0)},
    "batch, normality": {"normalize": over_batch(1.0)},
    "zero padding, identity": {"padding": "constant", "activation": identity},
    "weights of mean 0.3/√fan-in, identity": {
        "activation": identity,
        "prepare": lambda w: w + 0.3 * w[0].numel() ** -0.5,
    },
}
# name: channels → normalizer, for networks that are trained
TRAINED = {
    "layer": lambda c: nn.GroupNorm(1, c),
    "group": lambda c: nn.GroupNorm(4, c),
    "batch": nn.BatchNorm2d,
    "layer, normality": lambda c: named("group").layer(1, c, noise=0.4),
    "group, normality": lambda c: named("group").layer(4, c, noise=0.4),
    "batch, normality": lambda c: named("batch").make(c, noise=0.4),
}


def images() -> Tensor:
    "Clothes of 7 × 7 pixels, centred and of power 1 each."
    return collapse.equalized(
        F.avg_pool2d(load("fashion", "train", IMAGES)[0], 4)
    )


def summary(nets: list[list[list[float]]]) -> dict[str, list]:
    "Mean and standard deviation over nets, for each layer and quantity."
    found = torch.tensor(nets, dtype=torch.float64)  # nets, layers, 4 or 6
    rounded = lambda t: [float(f"{v:.5g}") for v in t.tolist()]
    out = {"nets": len(found)}
    for name, values in zip(
        ("p1", "p2", "p3", "p4", "left", "left_about_mean"), found.unbind(-1)
    ):
        out[name] = rounded(values.mean(0))
        out[f"{name}_sd"] = rounded(values.std(0))
    return out


@torch.no_grad()
def one_net(seed: int, width: int, **arguments) -> list[list[float]]:
    "Four parts of the power and two residuals of linear fits, by layer."
    with seeded("collapse", seed):
        return [
            [p.item() for p in power.power_decomposition(layer.y).layer()]
            + [
                collapse.linear_residual(layer.z, layer.affine, about).item()
                for about in (False, True)
            ]
            for layer in collapse.random_net(
                images(), DEPTH, width, **arguments
            )
        ]


def widths() -> dict:
    return {
        name: {
            str(width): summary(
                [one_net(seed, width, **KINDS[name]) for seed in range(count)]
            )
            for width, count in NETS.items()
        }
        for name in ("ReLU", "identity")
    }


def cures() -> dict:
    "Means over the nets, and of P1 the largest of them too, by layer."
    found = {}
    for name in CURES:
        nets = [
            [
                [p.item() for p in power.power_decomposition(y).layer()]
                for _, y, _ in rivals.layers(
                    rivals.RIVALS[name], seed, images(), DEPTH, 512
                )
            ]
            for seed in range(NETS[512])
        ]
        most = torch.tensor(nets)[:, :, 0].amax(0)
        found[name] = summary(nets) | {
            "p1_most": [float(f"{v:.5g}") for v in most.tolist()]
        }
    return found


def kinds() -> dict:
    return {
        name: summary(
            [one_net(seed, 128, **arguments) for seed in range(VARIANTS)]
        )
        for name, arguments in KINDS.items()
    }


def training_run(norm: str, shortcut: str, seed: int) -> dict:
    """P1 of each normalizer's output before training and after each epoch, on
    300 test images of digits, and the test accuracy at the end.
    """
    (x, y), (x_test, y_test) = load("digits", "train"), load("digits", "test")
    history = []
    with seeded("collapse-training", seed):
        model = SmallResNet(
            stem_stride=1,
            blocks=2,
            norm=TRAINED[norm],
            shortcut=shortcut,
            preactivation=True,
        )
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)

        def measure() -> None:
            history.append(
                [
                    round(p.layer().p1.item(), 5)
                    for p in power.model_power(
                        model, x_test, batch_statistics=True
                    ).values()
                ]
            )

        measure()
        for _ in range(EPOCHS):
            for pick in torch.randperm(len(x)).split(64):
                loss = F.cross_entropy(model(x[pick]), y[pick])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            measure()
        model.eval()
        with torch.no_grad():
            right = (model(x_test).argmax(1) == y_test).double().mean().item()
    return {"p1": history, "accuracy": round(100 * right, 2)}


def training() -> dict:
    return {
        shortcut: {
            norm: [training_run(norm, shortcut, seed) for seed in range(SEEDS)]
            for norm in TRAINED
        }
        for shortcut in ("none", "projection")
    }


PARTS = {"kinds": kinds, "widths": widths, "cures": cures, "training": training}


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    return parts.run(
        __doc__,
        RECORD,
        [((name,), part) for name, part in PARTS.items()],
        {
            "depth": DEPTH,
            "images": IMAGES,
            "data": {name: data_hash(name) for name in ("fashion", "digits")},
        },
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
