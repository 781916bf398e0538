"""Gradients measured, beyond the chapter: against autograd by hand, what is
left behind, losses of other kinds, bad input.
"""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normalnorm.analysis.gradients import (
    Confusion,
    gradient_confusion,
    gradient_correlations,
    gradient_norms,
    gradients,
    growth,
)
from normalnorm.analysis.propagation import disturbed
from normalnorm.layers.normality import BatchNormalNorm1d
from tests.refusals import refusals
from tests.toys import Of


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9),
        BatchNormalNorm1d(9),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Linear(9, 4),
    )


def batch(count=20):
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(count, 6, generator=generator), torch.arange(count) % 4)


def by_hand(model, x, y):
    "In training mode without noise and dropout, by backward()."
    quiet = copy.deepcopy(model).train()
    quiet[1].noise, quiet[2].p = 0.0, 0.0
    F.cross_entropy(quiet(x), y).backward()
    return {name: p.grad for name, p in quiet.named_parameters()}


def test_gradients_and_norms_by_hand():
    model, (x, y) = network(), batch()
    expected = by_hand(model, x, y)
    found, norms = gradients(model, x, y), gradient_norms(model, x, y)
    assert list(found) == list(norms) == list(expected)
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g)
        assert abs(norms[name] - np.linalg.norm(g.numpy())) < 1e-6


def test_correlations_by_hand():
    model, (x, y) = network(), batch()
    first, second = (by_hand(model, part, y) for part in disturbed(x, 0.3, 7))
    found = gradient_correlations(model, x, y, 0.3, 7)
    for name in ("0.weight", "4.weight", "4.bias"):
        expected = np.corrcoef(
            first[name].numpy().ravel(), second[name].numpy().ravel()
        )[0, 1]
        assert abs(found[name] - expected) < 1e-5, name
    near = gradient_correlations(model, x, y, 1e-4)
    assert near["0.weight"] > 0.999 > found["0.weight"]


def test_frozen_and_unused_parameters_are_left_out():
    model = network()
    model[0].weight.requires_grad_(False)
    model.extra = nn.Parameter(torch.ones(3))
    assert "0.weight" not in gradients(model, *batch())
    assert "extra" not in gradients(model, *batch())
    assert "0.bias" in gradients(model, *batch())


def test_growth():
    rates = np.exp(np.random.default_rng(0).normal(size=7))
    slope = np.polyfit(range(7), np.log(rates), 1)[0]
    assert abs(growth(rates.tolist()) - math.exp(-slope)) < 1e-9


def test_confusion_by_hand():
    model = nn.Linear(3, 1, bias=False).double()
    vectors = torch.tensor([[1.0, 0, 0], [2.0, 1, 0], [-1.0, 3, 1]]).double()
    found = gradient_confusion(
        model,
        [(v[None], torch.ones(1, 1).double()) for v in vectors],
        lambda y, t: (y * t).sum(),
    )
    lengths = vectors.norm(dim=1)
    cosines = (vectors @ vectors.T / (lengths[:, None] * lengths))[
        [0, 0, 1], [1, 2, 2]
    ]
    assert found == pytest.approx(
        Confusion(1.0, cosines.min().item(), cosines.mean().item())
    )
    agreeing = gradient_confusion(
        model,
        [(v.abs()[None], torch.ones(1, 1).double()) for v in vectors],
        lambda y, t: (y * t).sum(),
    )
    assert agreeing.bound == 0 < agreeing.least


def test_three_lines_on_a_model_of_ones_own():
    "Tokens, several outputs, a loss of its own."

    model = Of(
        lambda own, x: {"scores": own.map(own.table(x))},
        table=nn.Embedding(5, 8),
        map=nn.Linear(8, 5),
    )
    words = torch.arange(10).reshape(2, 5) % 5
    found = gradient_norms(
        model,
        words,
        words,
        lambda out, y: F.cross_entropy(
            out["scores"].flatten(0, 1), y.flatten()
        ),
    )
    assert list(found) == ["table.weight", "map.weight", "map.bias"]


test_bad_input = refusals(
    [
        (
            lambda m, x, y: gradients(m.requires_grad_(False), x, y),
            ValueError,
            "no trainable parameter: a frozen model",
        ),
        (
            lambda m, x, y: gradients(nn.ReLU(), x, y),
            ValueError,
            "ReLU has no trainable",
        ),
        (
            lambda m, x, y: gradients(m, x, y, lambda o, t: o),
            ValueError,
            r"tensor of shape \(20, 4\): expected one number",
        ),
        (
            lambda m, x, y: gradients(m, x, y, lambda o, t: 1.0),
            ValueError,
            "the loss is float",
        ),
        (
            lambda m, x, y: gradients(m, x * torch.nan, y),
            ValueError,
            "the loss is nan",
        ),
        (
            lambda m, x, y: gradients(m, x, y, lambda o, t: o.detach().sum()),
            ValueError,
            "depends on no trainable parameter",
        ),
        (
            lambda m, x, y: gradients(m, x[:1], y[:1]),
            ValueError,
            "more than one value",
        ),
        (
            lambda m, x, y: gradient_correlations(m, x, y, -1),
            ValueError,
            "sigma=-1",
        ),
        (
            lambda m, x, y: gradient_confusion(m, [(x, y)]),
            ValueError,
            "at least two",
        ),
        (lambda m, x, y: growth([1.0]), ValueError, "at least two positive"),
        (lambda m, x, y: growth([1.0, 0.0]), ValueError, "positive"),
        (lambda m, x, y: growth([1.0, math.nan]), ValueError, "finite"),
    ],
    lambda call: call(network(), *batch()),
)
