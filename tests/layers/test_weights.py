"""Normalized weights beyond their chapters: by hand, checkpoints, copies,
scales, dtypes, compilers, bad input.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from normalnorm.layers.parametrizations import (
    PARAMETRIZATIONS,
    weight_standardization,
)
from normalnorm.layers.weights import (
    NormalityWeight,
    gaussianized_direction,
    normality_weight,
)
from normalnorm.theory.gaussianizers import Chain, Tail
from normalnorm.theory.gradient import Power
from normalnorm.theory.newton import newton_lambda, standardized
from normalnorm.theory.power_transform import yeo_johnson
from tests.layers.steps import refusals, reloaded, step

D = torch.float64


@pytest.mark.parametrize(
    "shape, dim, axes",
    [
        ((5, 7), 0, (1,)),
        ((4, 3, 2, 2), 0, (1, 2, 3)),
        ((4, 3, 5), 1, (0, 2)),
        ((4, 3, 5), -1, (0, 1)),
        ((4, 5), None, (0, 1)),
    ],
)
@pytest.mark.parametrize("center", [True, False])
def test_direction_by_hand(shape, dim, axes, center):
    v = torch.randn(shape, dtype=D).exp()
    k = standardized(v, axes)
    lmbda = newton_lambda(v, axes)
    for d in sorted(axes):
        lmbda = lmbda.unsqueeze(d)
    x = yeo_johnson(k, lmbda)
    if not center:
        x = x + v.mean(axes, keepdim=True) / v.std(
            axes, correction=0, keepdim=True
        )
    torch.testing.assert_close(
        gaussianized_direction(v, dim, center=center),
        x / x.square().sum(axes, keepdim=True).sqrt(),
    )


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("scale", [1e-25, 1e-3, 1e25])
def test_scale_does_not_matter(center, scale):
    v = torch.rand(3, 17) + 0.1
    torch.testing.assert_close(
        gaussianized_direction(scale * v, center=center),
        gaussianized_direction(v, center=center),
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("center", [True, False])
def test_gradients(center):
    v = torch.randn(3, 8, dtype=D).exp().requires_grad_()
    for g in (Power(), Power(steps=2), Tail(), Chain()):
        assert torch.autograd.gradcheck(
            lambda v: gaussianized_direction(v, 0, g, center), v
        )
    assert torch.autograd.gradgradcheck(
        lambda v: gaussianized_direction(v, 0, Power(), center), v
    )


@pytest.mark.parametrize("center, first", [(True, 0.0), (False, 6**-0.5)])
def test_constant_zero_and_non_finite_vectors(center, first):
    v = torch.randn(4, 6)
    v[0], v[1], v[3, 1] = 2.0, 0.0, math.nan
    direction = lambda v: gaussianized_direction(v, center=center)
    out, grad = step(direction, v, leaves=())
    torch.testing.assert_close(out[0], torch.full((6,), first))
    assert not out[1].any() and abs(out[2].norm() - 1) < 1e-6
    assert out[3].isnan().all() and grad[:3].isfinite().all()
    half = v[:3].bfloat16()
    assert torch.equal(direction(half), direction(half.float()).bfloat16())


def test_other_parameters_and_names():
    layer = normality_weight(
        nn.LSTM(4, 5), "weight_hh_l0", gaussianizer=Chain()
    )
    assert layer(torch.randn(2, 3, 4))[0].shape == (2, 3, 5)
    assert "Chain" in repr(layer.parametrizations) and "dim=0" in repr(
        NormalityWeight()
    )
    text = str(weight_standardization(nn.Linear(3, 2), scaled=True, gain=True))
    assert "scaled=True, gain=True" in text


test_wrong_arguments = refusals(
    [
        (
            lambda: normality_weight(nn.Linear(3, 2), "wait"),
            ValueError,
            "no parameter 'wait'",
        ),
        (
            lambda: normality_weight(nn.Linear(3, 2), "bias"),
            ValueError,
            "at least two axes",
        ),
        (
            lambda: normality_weight(nn.Linear(3, 2), dim=2),
            ValueError,
            "dim=2",
        ),
        (lambda: normality_weight(nn.ReLU()), ValueError, "no parameter"),
        (
            lambda: gaussianized_direction(torch.ones(2, 3, dtype=torch.long)),
            TypeError,
            "int64",
        ),
        (
            lambda: weight_standardization(nn.Linear(3, 2), "wait"),
            ValueError,
            "has no parameter 'wait'",
        ),
        (
            lambda: weight_standardization(nn.BatchNorm1d(3)),
            ValueError,
            "at least two axes",
        ),
        (
            lambda: weight_standardization(nn.Linear(1, 3)),
            ValueError,
            "at least two",
        ),
        (
            lambda: weight_standardization(nn.Linear(3, 2), eps=-1.0),
            ValueError,
            "negative",
        ),
    ]
)


# ---- standardized weights ---------------------------------------------------


@pytest.mark.parametrize(
    "make, dim, axes",
    [
        (lambda: nn.Linear(7, 5), 0, (1,)),
        (lambda: nn.Linear(7, 5), 1, (0,)),
        (lambda: nn.Conv1d(3, 4, 5), 0, (1, 2)),
        (lambda: nn.ConvTranspose2d(3, 4, 5), 1, (0, 2, 3)),
        (lambda: nn.Linear(7, 5), -1, (0,)),
    ],
)
def test_standardized_weights_by_hand(make, dim, axes):
    layer = make().double()
    v = layer.weight.detach().clone()
    weight_standardization(layer, dim=dim, eps=0.0)
    torch.testing.assert_close(layer.weight, standardized(v, axes))
    (gradient,) = torch.autograd.grad(
        layer.weight.sin().sum(), layer.parametrizations.weight.original
    )
    assert gradient.sum(axes).abs().max() < 1e-10  # blind to the mean,
    assert (gradient * v).sum(axes).abs().max() < 1e-10  # and to the length


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_each_form_is_saved_compiled_copied_and_taken_off(name):
    wrap = PARAMETRIZATIONS[name].wrap
    layer, x = wrap(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 5, 7)
    layer.eval()
    expected, other = layer(x), wrap(nn.Conv2d(3, 4, 3)).eval()
    other.load_state_dict(reloaded(layer.state_dict()))
    compiled = torch.compile(layer, backend="aot_eager")
    for module in (other, compiled):
        torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    last = copy.deepcopy(layer)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected)
    if name != "none":
        parametrize.remove_parametrizations(layer, "weight")
        assert list(dict(layer.named_parameters())) == ["bias", "weight"]
        torch.testing.assert_close(layer(x), expected)


def test_constant_standardized_weights():
    constant = nn.Linear(5, 2)
    nn.init.constant_(constant.weight, 3.0)
    weight_standardization(constant)
    assert not constant.weight.any()
    constant.weight.sum().backward()
    assert constant.parametrizations.weight.original.grad.isfinite().all()
