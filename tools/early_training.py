"""What the instruments show in the first steps of training:
results/early-training.json.

    python -m tools.early_training              what is not there yet
    python -m tools.early_training --only dense --again

A quarter of an hour on one core. A network with one normalizer is a part; a
part that is done is not repeated; one that other code has measured is
refused, unless `--again` is given.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from normalnorm.analysis import gradients, propagation
from normalnorm.checks.analysis.propagation import Added, draw
from normalnorm.experiments.data import data_hash, load
from normalnorm.experiments.train import seeded
from normalnorm.layers.normalizers import BMLVNorm, LMBVNorm
from normalnorm.layers.prelayer import PreLayerNormConv2d, PreLayerNormLinear
from normalnorm.layers.regnorm import (
    PreRegNormConv2d,
    PreRegNormLinear,
    RegNormConv2d,
    RegNormLinear,
    regnorm_penalty,
)
from tools import parts

RECORD = (
    Path(__file__).resolve().parent.parent / "results" / "early-training.json"
)
SEEDS, STEPS, BATCH, MINIBATCHES = 4, 300, 64, 8
MOMENTS = (0, 1, 3, 10, 20, 40, 75, 150, 300)  # steps after which is measured
RATES, TRIAL = (1e-3, 1e-2, 1e-1, 1.0), 100  # tried with a seed of its own
# layers, units or channels, deviation of the noise
NETWORKS = {
    "dense": (20, 128, 0.1),
    "convolutional": (25, 8, 0.3),
    "residual": (25, 8, 0.3),
}
# name: a dense layer and a convolution with the normalizer in it
LAYERS: dict[str, tuple[Callable, Callable]] = {
    "none": (nn.Linear, nn.Conv2d),
    "weight norm": (
        lambda *size, **how: weight_norm(nn.Linear(*size, **how)),
        lambda *size, **how: weight_norm(nn.Conv2d(*size, **how)),
    ),
    "RegNorm": (RegNormLinear, RegNormConv2d),
    "PreRegNorm": (PreRegNormLinear, PreRegNormConv2d),
    "PreLayerNorm": (PreLayerNormLinear, PreLayerNormConv2d),
}


def _behind(linear: type, norm: Callable) -> Callable:
    # a bias before these is taken off again; β is the norm's
    return lambda n, m, *size, **how: nn.Sequential(
        linear(n, m, *size, **how, bias=False), norm(m)
    )


for _name, _dense, _images in (
    ("layer norm", nn.LayerNorm, partial(nn.GroupNorm, 1)),
    ("LMBV", LMBVNorm, LMBVNorm),
    ("BMLV", BMLVNorm, BMLVNorm),
    ("batch norm", nn.BatchNorm1d, nn.BatchNorm2d),
):
    LAYERS[_name] = (_behind(nn.Linear, _dense), _behind(nn.Conv2d, _images))


def network(kind: str, norm: str, seed: int) -> nn.Sequential:
    """Layers called layer1, layer2, …, each but the last with ReLU behind it,
    ReLU and a linear classifier; weights by He's law, biases 0.
    """
    depth, width, _ = NETWORKS[kind]
    dense, convolution = LAYERS[norm]
    parts = OrderedDict(flat=nn.Flatten()) if kind == "dense" else OrderedDict()
    for i in range(1, depth + 1):
        layer = (
            dense(64 if i == 1 else width, width)
            if kind == "dense"
            else convolution(1 if i == 1 else width, width, 3, padding=1)
        )
        if kind == "residual" and i > 1:
            layer = Added(layer)  # has its ReLU before it
        elif i > 1:
            parts[f"relu{i - 1}"] = nn.ReLU()
        parts[f"layer{i}"] = layer
    parts["last_relu"], parts["flat_again"] = nn.ReLU(), nn.Flatten()
    features = width if kind == "dense" else 64 * width
    parts["classifier"] = nn.Linear(features, 10)
    model = draw(nn.Sequential(parts), seed)
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(value)
    return model


def penalty(model: nn.Module, kind: str) -> Tensor | float:
    """RegNorm's term, 1 if all power were that of the batch's mean; 0 for other
    normalizers.
    """
    if not any(hasattr(m, "distinct") for m in model.modules()):
        return 0.0
    depth, width, _ = NETWORKS[kind]
    units = depth * width * (1 if kind == "dense" else 64)
    return regnorm_penalty(model, 1 / (2 * units))


def trained(
    kind: str, norm: str, rate: float, seed: int, steps: int
) -> Iterator[tuple[int, float, nn.Module]]:
    """The number of steps done, the loss of the last and the model, before and
    after each step of gradient descent; it ends where a loss is not finite.
    """
    x, y = load("digits", "train")
    model = network(kind, norm, seed)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    yield 0, math.nan, model
    with seeded("early-training", seed):
        picks = [torch.randint(len(x), (BATCH,)) for _ in range(steps)]
    for step, pick in enumerate(picks, 1):
        model.train()
        loss = F.cross_entropy(model(x[pick]), y[pick])
        total = loss + penalty(model, kind)
        if not total.isfinite():
            return
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        yield step, loss.item(), model


def trial(kind: str, norm: str, rate: float) -> float | None:
    "Mean loss of the last quarter of a trial; None where it diverged."
    losses = [loss for _, loss, _ in trained(kind, norm, rate, SEEDS, TRIAL)]
    late = losses[-(TRIAL // 4) :]
    return (
        sum(late) / len(late)
        if len(losses) == TRIAL + 1 and math.isfinite(sum(late))
        else None
    )


def of_layer(found: dict[str, float], layer: int) -> float:
    "The value of the map's weights in one layer."
    names = [
        name
        for name in found
        if name.startswith(f"layer{layer}.")
        and not name.endswith(("bias", "gain"))
    ]
    # weight norm: the direction, not its length
    return found[next((n for n in names if n.endswith("original1")), names[0])]


def measured(model: nn.Module, kind: str, seed: int) -> dict[str, float] | None:
    """What the instruments say of a model, in the statistics of the batch: of
    64 training images (accuracy: of the test images; confusion: eight times
    64). None where an output is not finite.
    """
    depth, _, sigma = NETWORKS[kind]
    x, y = load("digits", "train", BATCH * MINIBATCHES)
    batches = [
        (x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)
    ]
    one, labels = batches[0]
    last = f"layer{depth}"
    with propagation.batch_statistics(model), torch.no_grad():
        if not all(model(images).isfinite().all() for images, _ in batches):
            return None
    alike = propagation.layer_correlations(model, one, sigma, seed, [last])
    with propagation.batch_statistics(model), torch.no_grad():
        images, targets = load("digits", "test")
        right = (model(images).argmax(1) == targets).double().mean().item()
        z = model[: list(dict(model.named_children())).index(last) + 1](
            one
        ).double()
    correlations = gradients.gradient_correlations(
        model, one, labels, sigma, seed
    )
    norms = gradients.gradient_norms(model, one, labels)
    confusion = gradients.gradient_confusion(model, batches)
    return {
        "accuracy": 100 * right,
        "alike": alike[last],
        # the share of the power that all samples have in common
        "common": (
            z.mean(0).square().sum() / z.square().sum().mul(1 / len(z))
        ).item(),
        "gradient, first": of_layer(correlations, 2),
        "gradient, middle": of_layer(correlations, depth // 2),
        "gradient, last": of_layer(correlations, depth),
        # not the first, whose inputs are of another kind
        "ratio": of_layer(norms, 2) / (of_layer(norms, depth) or math.nan),
        "confusion": confusion.bound,
        "least cosine": confusion.least,
        "mean cosine": confusion.mean,
    }


def rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def part(kind: str, norm: str) -> dict:
    "The rate that does best in a trial, and with it the runs."
    trials = {str(rate): trial(kind, norm, rate) for rate in RATES}
    done = {rate: loss for rate, loss in trials.items() if loss is not None}
    best = float(min(done, key=done.__getitem__))
    runs = []
    for seed in range(SEEDS):
        found: list[dict] = []
        losses = []
        for step, loss, model in trained(kind, norm, best, seed, STEPS):
            losses.append(loss)
            if step not in MOMENTS:
                continue
            values = measured(model, kind, seed)
            if values is None:
                break
            late = losses[1:][-10:] or [math.nan]
            values["loss"] = sum(late) / len(late)
            found.append(
                {"step": step}
                | {name: rounded(value) for name, value in values.items()}
            )
        runs.append(found)
    return {
        "rate": best,
        "runs": runs,
        "trials": {
            rate: None if loss is None else rounded(loss)
            for rate, loss in trials.items()
        },
    }


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    return parts.run(
        __doc__,
        RECORD,
        [
            ((kind, norm), partial(part, kind, norm))
            for kind in NETWORKS
            for norm in LAYERS
        ],
        {
            "data": {"digits": data_hash("digits")},
            "seeds": SEEDS,
            "steps": STEPS,
            "batch": BATCH,
            "minibatches": MINIBATCHES,
            "trial": TRIAL,
            "sizes": {name: list(size) for name, size in NETWORKS.items()},
        },
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
