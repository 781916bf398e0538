"""A stream that needs no network, and what a forecast asks of one. (That wide
networks follow the recursions: the chapter.)
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
from tests.refusals import refusals
from tests.toys import Of


def test_a_forecast_is_of_what_runs():
    net = nn.Sequential(nn.Identity(), Of(lambda own, x: 2 * x))
    found = forecast(net, lambda: net(torch.tensor([[3.0, 4.0], [4.0, 3.0]])))
    assert found.power == [12.5, 12.5, 50.0] and found.gradient == [1, 1, 4]
    assert found.cosine == pytest.approx([0.96] * 3)


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
