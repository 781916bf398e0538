"""What a layer loses: on models with each kind of affine map, against numpy.
The identity itself is a claim of its chapter.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from normalnorm.analysis.slope_shares import shares_of, slope_shares
from tests.refusals import refusals

LAYERS = {
    "channels": (nn.GroupNorm(2, 6), (5, 6, 3, 4), (6, 1, 1)),
    "batch": (nn.BatchNorm2d(6), (5, 6, 3, 4), (6, 1, 1)),
    "features": (nn.LayerNorm(6), (5, 4, 6), (6,)),
    "image": (nn.LayerNorm((6, 3, 4)), (5, 6, 3, 4), (6, 3, 4)),
    "no map": (nn.LayerNorm(6, elementwise_affine=False), (5, 6), ()),
    "no bias": (nn.LayerNorm(6, bias=False), (5, 6), (6,)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_shares_of_a_layer(kind):
    "γ and β stand where the layer has them."
    layer, shape, broadcast = LAYERS[kind]
    layer = copy.deepcopy(layer).double()
    for p in layer.parameters():
        nn.init.normal_(p)
    x = torch.randn(shape).double()
    (found,) = slope_shares(nn.Sequential(layer, nn.ReLU()), x).values()
    gamma, beta = (
        0.0 + other if p is None else p.detach().numpy().reshape(broadcast)
        for p, other in ((layer.weight, 1), (layer.bias, 0))
    )
    v = layer.train()(x).detach().numpy()
    y, z = (v - beta) / gamma, np.maximum(v, 0)
    power, q = (z * z).sum(), (y * y).mean()
    moved = q * (gamma**2 * (v > 0)).sum()
    np.testing.assert_allclose(found.slope, moved / power, rtol=1e-9)
    np.testing.assert_allclose(found.bias, (beta * z).sum() / power, atol=1e-9)
    assert abs(sum(found) - 1) < 1e-9 and abs(found.rest) < 1e-9


def test_an_activation_with_a_rest():
    "tanh by differences of numpy."
    y = torch.randn(1000).double()
    found = shares_of(y, 1.5, 0.2, "tanh")
    v, h = 1.5 * y.numpy() + 0.2, 1e-6
    d = (np.tanh(v + h) - np.tanh(v - h)) / (2 * h)
    power = (np.tanh(v) ** 2).sum()
    rest = 1 - (np.tanh(v) * d * v).sum() / power
    np.testing.assert_allclose(found.rest, rest, rtol=1e-6)
    np.testing.assert_allclose(
        found.slope, y.square().mean().item() * ((1.5 * d) ** 2).sum() / power
    )
    assert abs(sum(found) - 1) < 1e-12


test_refusals = refusals(
    [
        (
            lambda: slope_shares(nn.Linear(2, 2), torch.ones(1, 2)),
            "no batch or",
        ),
        (lambda: shares_of(-torch.ones(3)), "is 0 everywhere"),
        (lambda: shares_of(torch.ones(3), activation="rel"), "relu"),
    ],
    error=ValueError,
)
