"""Wide networks by PyTorch follow the recursions of a stream; what a forecast
asks of a network.
"""

import math

import numpy as np
import pytest
import scipy.special
import torch
from torch import nn

from normalnorm.analysis.stream import (
    bounded,
    derf,
    forecast,
    layer_norm,
    stream,
)
from normalnorm.layers.pointwise import DynamicErf
from tests.refusals import refusals


class Block(nn.Module):
    def __init__(self, place, norm, n):
        super().__init__()
        first, second = (nn.Linear(n, n, bias=False) for _ in range(2))
        nn.init.normal_(first.weight, std=n**-0.5)
        nn.init.normal_(second.weight, std=(2 / n) ** 0.5)
        there = {"pre": "f", "peri": "fb", "post": "a"}[place]
        self.first, behind, self.around = (
            norm(n) if letter in there else nn.Identity() for letter in "fba"
        )
        self.branch = nn.Sequential(first, nn.ReLU(), second, behind)

    def forward(self, x):
        return self.around(x + self.branch(self.first(x)))


@pytest.mark.parametrize(
    "place, norm, of",
    [
        ("pre", nn.LayerNorm, layer_norm()),
        ("peri", nn.RMSNorm, layer_norm()),
        ("post", nn.LayerNorm, layer_norm()),
        ("pre", lambda n: DynamicErf(n, 1.0), derf(1.0)),
    ],
)
def test_networks_of_drawn_matrices_follow_the_recursions(place, norm, of):
    "Within the interval and a constant over the width, at two widths."
    torch.manual_seed(0)
    for n, nets in ((128, 40), (512, 6)):
        found = []
        for _ in range(nets):
            net = nn.Sequential(*(Block(place, norm, n) for _ in range(6)))
            x = torch.randn(32, n, requires_grad=True)
            last = net(x)
            up = torch.randn_like(last)
            (back,) = torch.autograd.grad(last, x, up)
            growth = back.square().mean() / up.square().mean()
            seen = forecast(net, lambda net=net, x=x: net(x))
            found.append((seen.power[-1], seen.cosine[-1], growth.item()))
        wanted = np.array([v[-1] for v in stream(place, of, 6)])
        error = 3 * np.std(found, 0) / math.sqrt(nets) + 8 * wanted / n
        assert (abs(np.mean(found, 0) - wanted) < error).all(), (n, found)


def test_quadrature_finds_what_has_a_closed_form():
    """At other powers than 1; and of a line, which is a layer norm but for its
    size.
    """
    slope = lambda u: 2 / math.sqrt(math.pi) * np.exp(-(u**2))
    for q, k in ((0.3, 0.1), (2.0, -1.5), (4.0, 4.0)):
        for found, known in (
            (bounded(scipy.special.erf, slope), derf(1.0)),
            (bounded(lambda u: 3 * u, lambda u: 3 + 0 * u), None),
        ):
            wanted = (
                (known.product(q, k), known.power(q), known.slope(q))
                if known
                else (9 * k, 9 * q, 9.0)
            )
            made = found.product(q, k), found.power(q), found.slope(q)
            np.testing.assert_allclose(made, wanted, rtol=1e-6)


def test_places_and_gains_that_need_no_network():
    one = stream("none", derf(), 3, gain=2.0)
    assert one.power == one.gradient == [1.0, 5.0, 25.0, 125.0]
    noisy = stream("peri", layer_norm(noise=1.0), 3)  # of power 1 behind
    assert noisy.power == pytest.approx([1.0, 2.0, 3.0, 4.0])
    start = stream("pre", layer_norm(), 0, cosine=0.3)
    assert start == ([1.0], [0.3], [1.0])
    shifted = stream("pre", layer_norm(), 1, gain=3.0, cosine=1.0)
    assert shifted.cosine[-1] == pytest.approx(1.0)


BLOCKS = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
test_wrong_streams_are_refused = refusals(
    [
        ({"place": "before"}, "no place is called 'before': did you mean"),
        ({"place": "post", "of": derf()}, "expected a layer norm"),
        ({"samples": 1}, "2 blocks were called 2 times with 1 samples"),
        ({"calls": 2}, "2 blocks were called 5 times with 4 samples"),
        ({"calls": 0}, "2 blocks were called -1 times with 0 samples"),
    ],
    lambda wrong: (
        stream(wrong["place"], wrong.get("of", layer_norm()), 1)
        if "place" in wrong
        else forecast(
            BLOCKS,
            lambda: [
                BLOCKS(torch.ones(wrong.get("samples", 4), 3))
                for _ in range(wrong.get("calls", 1))
            ],
        )
    ),
)


def test_a_forecast_leaves_nothing_behind():
    def fails():
        BLOCKS(torch.ones(2, 3))
        raise KeyError("stop")

    with pytest.raises(KeyError):
        forecast(BLOCKS, fails)
    for block in BLOCKS:
        assert not block._forward_hooks and not block._forward_pre_hooks
