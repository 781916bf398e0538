"""What a wrong version of the library would change and no other test would see.

Found by `make mutants`; one group for each module. Each compares with something
independent: a literal of the paper or of the documentation, another
implementation, or a closed form.
"""
import inspect

import pytest
import torch

from normalnorm.layers import decorrelated, gaussianized
from normalnorm.layers.normality import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    BatchNormalNorm3d,
)
from normalnorm.layers.sync import SyncBatchNormalNorm
from normalnorm.theory.gaussianizers import Power, Tail

# ---- layers.gaussianized ----


@pytest.mark.parametrize("gaussianizer", [Tail(), Power(alpha=0.5), None])
def test_layer_form_uses_the_gaussianizer_that_it_is_given(gaussianizer):
    "By hand: standardize, estimate, apply; Power() where none is given."
    torch.manual_seed(0)
    u = torch.randn(5, 4, 30, dtype=torch.float64).exp()
    layer = gaussianized.GaussianizedLayerNorm(
        30, gaussianizer, eps=0.0, noise=0.0, dtype=torch.float64)
    k = (u - u.mean(-1, keepdim=True)) / u.var(-1, correction=0,
                                              keepdim=True).sqrt()
    used = gaussianizer or Power()
    expected = used.apply(k, used.estimate(k, -1))
    torch.testing.assert_close(layer(u), expected, rtol=1e-9, atol=1e-9)
    other = Power() if isinstance(used, Tail) else Tail()
    assert (other(u, -1) - layer(u)).abs().max() > 0.1


# ---- layers.sync ----

@pytest.mark.parametrize("shape, layer", [
    ((6, 3), BatchNormalNorm1d), ((6, 3, 5), BatchNormalNorm1d),
    ((6, 3, 5, 2), BatchNormalNorm2d), ((6, 3, 5, 2, 2), BatchNormalNorm3d)])
def test_synchronized_layer_takes_all_shapes(shape, layer):
    "With one process: what the batch layer of this shape gives."
    torch.manual_seed(0)
    u = torch.randn(shape)
    torch.manual_seed(1)
    expected = layer(3)(u)
    torch.manual_seed(1)
    torch.testing.assert_close(SyncBatchNormalNorm(3)(u), expected)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 1, 1, 1, 2)])
def test_synchronized_layer_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match="shape"):
        SyncBatchNormalNorm(3)(torch.ones(shape))


# ---- layers.decorrelated ----

def test_defaults_of_the_functional_forms_are_those_of_the_layers():
    "As documented; 20 channels are a group of 16 and one of 4."
    plain, normal = (inspect.signature(f).parameters for f in (
        decorrelated.decorrelated_batch_norm,
        decorrelated.decorrelated_batch_normal_norm))
    documented = {"momentum": 0.1, "eps": 1e-5, "group_size": 16,
                  "method": "eigh", "iterations": 5, "training": False}
    for found in (plain, normal):
        assert {n: found[n].default for n in documented} == documented
    of_normality = {"noise": 0.4, "alpha": 1.0, "steps": 1, "safeguard": False,
                    "noise_kind": "scaled"}
    assert {n: normal[n].default for n in of_normality} == of_normality
    torch.manual_seed(0)
    u = torch.randn(64, 20) @ torch.randn(20, 20)
    for kind, function in (
            (decorrelated.DecorrelatedBatchNorm1d,
             decorrelated.decorrelated_batch_norm),
            (decorrelated.DecorrelatedBatchNormalNorm1d,
             decorrelated.decorrelated_batch_normal_norm)):
        torch.manual_seed(1)
        of_layer = kind(20)(u)
        torch.manual_seed(1)
        torch.testing.assert_close(function(u, training=True), of_layer)
    white = decorrelated.decorrelated_batch_norm(u, training=True)
    inside = torch.cov(white.T, correction=0)[:16, :16]
    torch.testing.assert_close(inside, torch.eye(16), rtol=0, atol=2e-3)
    assert torch.cov(white.T, correction=0)[:16, 16:].abs().max() > 0.1
