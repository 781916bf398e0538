"""The rows of chapter 457 and the recipe that measures them; what the chapter
says of them is checked by its own cells.
"""

import pytest
import torch

from normalnorm.analysis import gradients
from normalnorm.experiments.data import load
from normalnorm.experiments.recipes import early_training as module
from normalnorm.experiments.results import by_arm

pytestmark = pytest.mark.book
BOOK = module.early_training.arms("book")


def test_a_short_run_begins_as_the_rows_do():
    arm = "dense, layer norm"
    short = {"moments": [0, 1, 3], "trial": 4, "rates": [0.01]}
    run = module.run(BOOK[arm] | short, 0)
    kept = by_arm("early-training")[arm][0]["moments"]
    assert [m["step"] for m in run["moments"]] == [0, 1, 3]
    for mine, theirs in zip(run["moments"], kept):
        assert mine.keys() == theirs.keys()
        for name in ("alike", "common", "mean cosine"):
            assert abs(mine[name] - theirs[name]) < 0.02, name


@pytest.mark.parametrize("kind", ["dense", "convolutional", "residual"])
@pytest.mark.parametrize("norm", ["none", "PreRegNorm", "weight norm"])
def test_networks(kind, norm):
    "Names of layers, biases at 0, the penalty, and gradients everywhere."
    depth, width = (BOOK[f"{kind}, none"][name] for name in ("depth", "width"))
    units = depth * width * (1 if kind == "dense" else 64)
    model = module.network(kind, norm, depth, width, 0)
    x, y = load("digits", "train", 8)
    assert model(x).shape == (8, 10)
    term = module.penalty(model, units)
    # all samples alike: all power is the batch's mean
    model(x[:1].repeat(4, 1, 1, 1))
    alike = module.penalty(model, units)
    if norm == "PreRegNorm":
        assert 0 < term < alike
        assert abs(alike.item() - 1) < 0.01
    else:
        assert term == alike == 0
    found = gradients.gradient_norms(model, x, y)
    for layer in range(1, depth + 1):
        assert module.of_layer(found, layer) > 0
    assert all(
        not p.any() for n, p in model.named_parameters() if n.endswith("bias")
    )


def test_a_run_that_diverges_ends():
    config = BOOK["dense, none"]
    steps = [step for step, _, _ in module.trained(config, 1e4, 0, 20)]
    assert 0 < len(steps) < 21
    assert module.trial(config, 1e4) is None
    model = module.network("dense", "none", 20, 128, 0)
    with torch.no_grad():
        model.classifier.weight.fill_(float("nan"))
    assert module.measured(model, config, 0) is None
