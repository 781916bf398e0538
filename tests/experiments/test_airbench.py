"""Airbench's network in arms that differ by the normalizer alone; which
parameters are trained, by which rates."""

import numpy as np
import pytest
import torch

from normalnorm.experiments import data
from normalnorm.experiments.optimization import Settings, make_optimizer
from normalnorm.experiments.recipes.airbench import (
    airbench,
    built,
    whitening,
)
from normalnorm.experiments.train import train
from normalnorm.layers.pointwise import DynamicErf

SMOKE = airbench.arms("smoke")


def test_patches_in_colour_become_white():
    torch.manual_seed(0)
    mix = torch.randn(3, 3, dtype=torch.float64)
    x = torch.einsum("ij,bjhw->bihw", mix, torch.rand(50, 3, 7, 9).double())
    patches = [
        x[:, :, i : i + 2, j : j + 2].flatten(1).numpy()
        for i in range(6)
        for j in range(8)
    ]
    seen = np.concatenate(patches) @ whitening(x, 0.0).flatten(1).numpy().T
    np.testing.assert_allclose(seen.T @ seen / len(seen), np.eye(12), atol=1e-9)


def test_arms_begin_alike_and_seeds_do_not():
    nets = [built(SMOKE[arm], 3) for arm in SMOKE]
    kernels = [
        [p for p in net.parameters() if p.ndim > 1]
        for net in (*nets, built(SMOKE["BN"], 4))
    ]
    for others in kernels[1:-1]:
        assert all(map(torch.equal, kernels[0], others))
    assert not torch.equal(kernels[0][-1], kernels[-1][-1])
    noisy = {arm: net.layers[3] for arm, net in zip(SMOKE, nets)}
    assert {
        arm: (getattr(layer, "alpha", 0.0), getattr(layer, "noise", 0.0))
        for arm, layer in noisy.items()
    } == {
        "BN": (0.0, 0.0),
        "BN with noise": (0.0, 0.4),
        "BNN without noise": (1.0, 0.0),
        "BNN": (1.0, 0.4),
        "GN+PN": (0.0, 0.0),
        "Derf": (0.0, 0.0),
    }
    points = [nets[-1].layers[i].point for i in range(3, 24, 4)]
    assert all(isinstance(m, DynamicErf) and m.alpha == 0.5 for m in points)
    assert noisy["GN+PN"].num_groups == 4
    for arm in [*SMOKE][:4]:
        assert (noisy[arm].eps, noisy[arm].momentum) == (1e-12, 0.4)


def test_channels_and_classes_are_those_of_the_data():
    net = built(SMOKE["BN"] | {"data": "glyphs"}, 0)
    assert net.whiten.weight.shape == (24, 3, 2, 2)
    assert len(net.head.weight) == len(data.info("glyphs").classes) == 100


@pytest.mark.parametrize("arm", SMOKE)
def test_a_step_moves_what_is_trained_and_nothing_else(arm):
    net, batch = built(SMOKE[arm], 0), SMOKE[arm]["train"]["batch"]
    settings = Settings(**SMOKE[arm]["train"])
    gamma = range(4, 25, 4) if arm == "GN+PN" else range(3, 24, 4)
    inner = "point." * (arm == "Derf")
    frozen = {"whiten.weight", *(f"layers.{i}.{inner}weight" for i in gamma)}
    names = {p: name for name, p in net.named_parameters()}
    rates = {
        names[p]: (
            pytest.approx(settings.lr * group.get("rate", 1.0) / batch),
            group["momentum"],
            group["weight_decay"],
        )
        for group in make_optimizer(net, settings).param_groups
        for p in group["params"]
    }
    assert rates == {
        name: (0.67 / 16, 0.85, 2e-6 / 0.67)
        if name == "head.weight"
        else (0.053, 0.85, 2e-6 / 0.053)
        if p.ndim < 2
        else (0.24 / batch, 0.6, 0.0)
        for p, name in names.items()
        if name not in frozen
    }
    before = {name: p.detach().clone() for p, name in names.items()}
    images, labels = data.load("fashion", "train", batch)
    parts = dict.fromkeys(("train", "validation", "test"), (images, labels))
    train(net, parts, settings)
    still = {name for p, name in names.items() if torch.equal(p, before[name])}
    assert still == frozen
    kernel = net.layers[9].weight  # began with 0.7
    assert 0.8 < kernel.norm() / len(kernel) ** 0.5 < 1.2
