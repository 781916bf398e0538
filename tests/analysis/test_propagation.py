"""How alike two disturbed copies stay, beyond the chapter: what the instrument
computes, against NumPy; what it leaves behind; places; bad input.
"""

import numpy as np
import pytest
import torch
from torch import nn

from normalnorm.analysis.propagation import (
    correlation,
    disturbed,
    layer_correlations,
    places_of,
)
from normalnorm.layers.normality import LayerNormalNorm
from tests.analysis.test_gradients import network as shorter
from tests.refusals import refusals
from tests.toys import Of


def network():
    return nn.Sequential(*shorter(), LayerNormalNorm(4))


def test_correlation_is_that_of_numpy():
    a, b = torch.randn(2, 5, 7, 3)
    assert (
        abs(
            correlation(a, b)
            - np.corrcoef(a.numpy().ravel(), b.numpy().ravel())[0, 1]
        )
        < 1e-6
    )
    assert np.isnan(correlation(a, torch.ones(5, 7, 3)))
    assert abs(correlation(a.half() + 100, 3 * a.half() + 300) - 1) < 1e-3


def test_values_by_hand():
    "The two copies, made and sent through again, in training mode."
    model, x, sigma = network(), torch.randn(300, 6), 0.4
    found = layer_correlations(model, x, sigma, seed=3)
    assert list(found) == ["input", "0", "1", "4", "5", "output"]
    model[1].noise, model[2].p = 0.0, 0.0
    pair = disturbed(x, sigma, 3)
    assert abs((pair[0] - pair[1]).std() / (2**0.5 * sigma) - 1) < 0.1
    for name, until in (("input", 0), ("0", 1), ("1", 2), ("4", 5)):
        values = [model[:until](z).detach().numpy().ravel() for z in pair]
        expected = np.corrcoef(*values)[0, 1]
        assert abs(found[name] - expected) < 1e-5, name


def test_equal_seeds_and_their_noise():
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(5))
    model = network()
    one, again, other = (
        layer_correlations(model, x, 0.5, seed=s) for s in (5, 5, 6)
    )
    assert one == again != other
    # inputs drawn with that seed are not disturbed by themselves
    assert abs(one["input"] - 0.8) < 0.03


def test_places():
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.GroupNorm(1, 3), nn.ReLU())
    assert list(places_of(model)) == ["0", "1"]
    assert list(places_of(model, ["2"])) == ["2"]
    x = torch.randn(4, 2, 5)
    assert list(layer_correlations(model, x, places=["2", "0"])) == [
        "input",
        "0",
        "2",
        "output",
    ]
    twice = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    twice.forward = lambda x: twice["a"](torch.tanh(twice["a"](x)))
    found = layer_correlations(twice, torch.randn(50, 3), 0.5)
    assert list(found) == ["input", "a", "output"]  # b is not called
    assert found["a"] == found["output"]  # the last call
    with pytest.raises(ValueError, match="does not call 'b'"):
        layer_correlations(twice, torch.randn(50, 3), places=["b"])


def test_what_follows_in_place_does_not_reach_a_place():
    model, x = nn.Sequential(nn.Linear(5, 7), nn.ReLU()), torch.randn(40, 5)
    apart = layer_correlations(model, x, places=["0"])
    model[1].inplace = True
    assert layer_correlations(model, x, places=["0"]) == apart
    assert apart["0"] != apart["output"]


def test_in_half_precision_and_with_a_tuple_as_output():
    two, x = Of(lambda own, x: (x, x)), torch.randn(500, 2).bfloat16()
    found = layer_correlations(nn.Sequential(nn.Identity(), two), x, 1.0)
    assert list(found) == ["input"] and abs(found["input"] - 0.5) < 0.1


test_bad_input = refusals(
    [
        ({"sigma": 0}, ValueError, "sigma=0 is the deviation"),
        ({"sigma": float("nan")}, ValueError, "sigma=nan"),
        (
            {"inputs": torch.zeros(2, 6, dtype=torch.int64)},
            TypeError,
            "after their embedding",
        ),
        ({"inputs": [1.0]}, TypeError, "floating-point tensor"),
        ({"inputs": torch.full((2, 6), torch.inf)}, ValueError, "infinity"),
        (
            {"inputs": torch.zeros(0, 6)},
            ValueError,
            r"\(0, 6\): there is nothing",
        ),
        ({"places": ["7"]}, ValueError, "has no module '7'"),
    ],
    lambda change: layer_correlations(
        network(), **{"inputs": torch.zeros(2, 6), **change}
    ),
)
