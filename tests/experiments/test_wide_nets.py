"""The rows that put a field and a map beside layers, and beside another
package: some of them anew. What the chapters say of them their own cells check.
"""

import math

import numpy as np
import pytest

from normalnorm.experiments.recipes import wide_nets
from normalnorm.experiments.results import by_arm
from normalnorm.theory.correlation_map import correlation_map

PEER = by_arm("neural-tangents")


def rows(name):
    return {arm: row for arm, (row,) in by_arm(name).items()}


@pytest.mark.parametrize("name", ["layer norm", "layer norm and proxy"])
def test_the_computed_shares_are_of_this_theory(name):
    row = rows("covariance-field")[name]
    images = wide_nets.small_images(row["config"]["images"])
    norm, settings = wide_nets.FIELDS[name]
    np.testing.assert_allclose(
        wide_nets.computed_shares(images, norm, 4, **settings),
        row["computed"][:4],
        atol=2e-6,
    )


@pytest.mark.parametrize(
    "name", ["layer norm", "layer norm and proxy", "PreLayerNorm"]
)
def test_a_small_network_has_the_computed_shares(name):
    images, (norm, settings) = wide_nets.small_images(4), wide_nets.FIELDS[name]
    nets = [
        wide_nets.measured_shares(images, norm, 3, 192, seed)
        for seed in range(4)
    ]
    np.testing.assert_allclose(
        np.mean(nets, 0),
        wide_nets.computed_shares(images, norm, 3, **settings),
        atol=0.03,
    )


def test_the_settled_power_of_evonorm():
    "By mpmath: E silu(√q t)² = q²."
    import mpmath as mp

    root = math.sqrt(wide_nets.POWER)
    power = mp.quad(
        lambda t: (root * t / (1 + mp.exp(-root * t))) ** 2 * mp.npdf(t),
        [-12, 0, 12],
    )
    assert float(power) == pytest.approx(wide_nets.POWER**2, rel=1e-8)


@pytest.mark.parametrize("arm", PEER)
def test_layer_norm_s_map_is_that_of_neural_tangents(arm):
    (row,) = PEER[arm]
    config = row["config"]
    step = lambda c: correlation_map(
        c, config["activation"], "layer", beta_std=config["beta"]
    )
    np.testing.assert_allclose(
        [step(c) for c in config["c"]], row["one_layer"], rtol=0, atol=1e-9
    )
    walk = [config["start"]]
    for _ in range(config["depth"]):
        walk.append(step(walk[-1]))
    np.testing.assert_allclose(
        walk[1:], row["layer_by_layer"], rtol=0, atol=1e-7
    )
