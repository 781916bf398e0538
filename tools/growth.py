"""Weights' lengths in training, and attacks: results/weight-growth.json.

    python -m tools.growth                      what is not there yet
    python -m tools.growth --only batch --again

Five CPU minutes on one core. A normalizer that is done is not repeated; one
that other code has measured is refused, unless `--again` is given.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normalnorm.analysis.robustness import margin, robust_accuracy
from normalnorm.experiments.data import data_hash, info, load
from normalnorm.experiments.train import seeded
from normalnorm.layers.running_averages import update_bn
from tools import parts

RECORD = (
    Path(__file__).resolve().parent.parent / "results" / "weight-growth.json"
)
IMAGES, TESTED, ATTACKED, WIDTHS = 2000, 1000, 300, (16, 32, 32)
LR, MOMENTUM, DECAY, BATCH, EPOCHS = 0.05, 0.9, 5e-3, 50, 10
SEEDS, SCALED = 5, 2  # networks; those whose weights are multiplied
SIZES = (0.01, 0.03)  # of attacks, black to white being 1
FACTORS = (2.0**-6, 2.0**-4, 0.25, 1.0, 4.0, 16.0)


class WholeRMS(nn.Module):
    "Root mean square norm of an image's channels and positions, with γ and β."

    def __init__(self, channels: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        "(B, C, H, W) → the same."
        power = x.square().mean((1, 2, 3), keepdim=True)
        along = (-1, 1, 1)
        return x * (power + self.eps).rsqrt() * self.weight.reshape(
            along
        ) + self.bias.reshape(along)


# channels → normalizer; None: the convolution has a bias instead
NORMS = {
    "none": None,
    "weight": None,
    "batch": nn.BatchNorm2d,
    "instance": lambda c: nn.GroupNorm(c, c),
    "group": lambda c: nn.GroupNorm(4, c),
    "layer": lambda c: nn.GroupNorm(1, c),
    "rms": WholeRMS,
}
# which weights decay
ARMS = ("nothing", "convolutions", "everything")


def network(norm: str) -> nn.Sequential:
    "Three convolutions, each with its normalizer and ReLU; mean; classifier."
    layers: list[nn.Module] = []
    for before, after, stride in zip((1, *WIDTHS), WIDTHS, (1, 2, 2)):
        make = NORMS[norm]
        conv = nn.Conv2d(before, after, 3, stride, 1, bias=make is None)
        if norm == "weight":
            conv = nn.utils.parametrizations.weight_norm(conv)
        layers += [conv, *([make(after)] if make else []), nn.ReLU()]
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTHS[-1], 10),
    )


def weights(model: nn.Module) -> list[nn.Parameter]:
    "What each convolution's normalizer makes invariant, and the classifier's."
    return [
        m.parametrizations.weight.original1
        if nn.utils.parametrize.is_parametrized(m)
        else m.weight
        for m in model.modules()
        if isinstance(m, (nn.Conv2d, nn.Linear))
    ]


def images(split: str, first: int) -> tuple[Tensor, Tensor]:
    "Clothes of 14 × 14 pixels."
    x, y = load("fashion", split, first)
    return F.avg_pool2d(x, 2), y


def rounded(values: Any) -> Any:
    "Five digits."
    if isinstance(values, (list, tuple)):
        return [rounded(v) for v in values]
    return float(f"{float(values):.5g}")


def attacked(
    model: nn.Module, x: Tensor, y: Tensor, sizes: tuple = SIZES, **options: Any
) -> dict[str, dict[str, float]]:
    "Accuracy under FGSM and PGD, in percent."
    about = info("fashion")
    return {
        attack: {
            str(e): round(v, 2)
            for e, v in robust_accuracy(
                model,
                x,
                y,
                sizes,
                attack,
                mean=about.mean,
                std=about.std,
                **({"steps": 7} if attack == "pgd" else {}),
                **options,
            ).items()
        }
        for attack in ("fgsm", "pgd")
    }


def slope(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    "Mean over images of the gradient's length: of the margin, of the loss."
    found = []
    for loss in (margin, lambda s, t: F.cross_entropy(s, t, reduction="none")):
        given = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(model(given), y).sum(), given)
        found.append(gradient.flatten(1).norm(dim=1).mean().item())
    return found[0], found[1]


@torch.no_grad()
def multiply(model: nn.Module, place: str, factor: float) -> None:
    "The weights at a place, times a factor."
    *convolutions, last = weights(model)
    if place == "convolutions":
        for w in convolutions:
            w.mul_(factor)
    else:
        last.mul_(factor)
        model[-1].bias.mul_(factor)


def scaled(
    model: nn.Module, norm: str, train: Tensor, x: Tensor, y: Tensor
) -> dict[str, dict[str, list[float]]]:
    """For places and factors: accuracy, PGD by cross-entropy and by the margin,
    slopes of margin and loss.
    """
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    places = ["convolutions", "classifier"]
    if norm == "batch":
        places.append("convolutions, old averages")
    out: dict[str, dict[str, list[float]]] = {}
    for place in places:
        for factor in FACTORS:
            model.load_state_dict(kept)
            update_bn([train], model)
            multiply(model, place.split(",")[0], factor)
            if "old" not in place:
                update_bn([train], model)
            about = info("fashion")
            pgd = [
                robust_accuracy(
                    model,
                    x,
                    y,
                    (0.0, SIZES[-1]),
                    "pgd",
                    mean=about.mean,
                    std=about.std,
                    steps=7,
                    loss=loss,
                )
                for loss in ("cross-entropy", "margin")
            ]
            out.setdefault(place, {})[str(factor)] = rounded(
                [pgd[0][0.0], *(p[SIZES[-1]] for p in pgd), *slope(model, x, y)]
            )
    model.load_state_dict(kept)
    return out


def run(norm: str, arm: str, seed: int) -> dict[str, Any]:
    "One training, with lengths by layer, and what attacks do at its end."
    (x, y), (x_test, y_test) = images("train", IMAGES), images("test", TESTED)
    with seeded("weight-growth", seed):
        model = network(norm)
        measured = weights(model)
        decaying = {
            "nothing": [],
            "convolutions": measured[:-1],
            "everything": list(model.parameters()),
        }[arm]
        chosen = {id(p) for p in decaying}
        optimizer = torch.optim.SGD(
            [
                {
                    "params": [
                        p
                        for p in model.parameters()
                        if (id(p) in chosen) == decays
                    ],
                    "weight_decay": DECAY * decays,
                }
                for decays in (False, True)
            ],
            LR,
            MOMENTUM,
        )
        sums, losses = [], []
        for _ in range(EPOCHS):
            for pick in torch.randperm(len(x)).split(BATCH):
                loss = F.cross_entropy(model(x[pick]), y[pick])
                optimizer.zero_grad()
                loss.backward()
                before = [w.detach().clone() for w in measured]
                row = []
                for w in measured:
                    v = optimizer.state[w].get("momentum_buffer")
                    row.append(
                        [
                            w.square().sum().item(),
                            w.grad.square().sum().item(),
                            0.0 if v is None else (v * w.grad).sum().item(),
                            (w * w.grad).sum().item(),
                        ]
                    )
                optimizer.step()
                for numbers, w, old in zip(row, measured, before):
                    numbers.append(
                        F.cosine_similarity(
                            w.detach().flatten().double(),
                            old.flatten().double(),
                            0,
                        ).item()
                    )
                sums.append(row)
                losses.append(loss.item())
        # (steps, layers, ‖w‖², ‖∇f‖², ⟨v, ∇f⟩, ⟨w, ∇f⟩, cosine of the turn)
        table = torch.tensor(sums, dtype=torch.float64)
        path = table[::20, :, 0].T
        along = (
            table[..., 3].abs() / (table[..., 0] * table[..., 1]).sqrt()
        ).nan_to_num()
        late = table[len(table) // 2 :]
        update_bn([x], model)
        model.eval()
        with torch.no_grad():
            right = (model(x_test).argmax(1) == y_test).double().mean().item()
        images_, labels = x_test[:ATTACKED], y_test[:ATTACKED]
        found = {
            "path": rounded(path.tolist()),
            "end": rounded([w.detach().square().sum() for w in measured]),
            "half": rounded(late[0, :, 0].tolist()),
            "late": rounded(late.mean(0).tolist()),
            "along": rounded(along.amax(0).tolist()),
            "loss": rounded(sum(losses[-40:]) / 40),
            "early": rounded(sum(losses[:40]) / 40),
            "accuracy": round(100 * right, 2),
            "margin": attacked(
                model, images_, labels, (0.0, *SIZES), loss="margin"
            ),
            "slopes": rounded(slope(model, images_, labels)),
        }
        if arm == "nothing" and seed < SCALED:
            found["scaled"] = scaled(model, norm, x, images_, labels)
    return found


def arms(norm: str) -> dict[str, list[dict[str, Any]]]:
    return {
        arm: [run(norm, arm, seed) for seed in range(SEEDS)] for arm in ARMS
    }


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    return parts.run(
        __doc__,
        RECORD,
        [((norm,), partial(arms, norm)) for norm in NORMS],
        {
            "setting": {
                "lr": LR,
                "momentum": MOMENTUM,
                "decay": DECAY,
                "batch": BATCH,
                "epochs": EPOCHS,
                "images": IMAGES,
                "tested": TESTED,
                "attacked": ATTACKED,
                "widths": WIDTHS,
                "seeds": SEEDS,
                "scaled": SCALED,
            },
            "data": data_hash("fashion"),
        },
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
