"""Weight normalization with normality beyond its chapter: torch's own
parametrization, checkpoints, copies, scales, dtypes, training, bad input.
"""
import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from normalnorm.layers.weights import (
    NormalityWeight,
    gaussianized_direction,
    normality_weight,
)
from normalnorm.theory.gaussianizers import Chain, Tail
from normalnorm.theory.gradient import Power
from normalnorm.theory.newton import newton_lambda, standardized
from normalnorm.theory.power_transform import yeo_johnson

D = torch.float64


@pytest.mark.parametrize("shape, dim, axes", [
    ((5, 7), 0, (1,)), ((4, 3, 2, 2), 0, (1, 2, 3)), ((4, 3, 5), 1, (0, 2)),
    ((4, 3, 5), -1, (0, 1)), ((4, 5), None, (0, 1))])
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
            axes, correction=0, keepdim=True)
    torch.testing.assert_close(gaussianized_direction(v, dim, center=center),
                               x / x.square().sum(axes, keepdim=True).sqrt())


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("scale", [1e-25, 1e-3, 1e25])
def test_scale_does_not_matter(center, scale):
    v = torch.rand(3, 17) + 0.1
    torch.testing.assert_close(
        gaussianized_direction(scale * v, center=center),
        gaussianized_direction(v, center=center), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("center", [True, False])
def test_gradients(center):
    v = torch.randn(3, 8, dtype=D).exp().requires_grad_()
    for g in (Power(), Power(steps=2), Tail(), Chain()):
        assert torch.autograd.gradcheck(
            lambda v: gaussianized_direction(v, 0, g, center), v)
    assert torch.autograd.gradgradcheck(
        lambda v: gaussianized_direction(v, 0, Power(), center), v)


def test_constant_zero_and_non_finite_vectors():
    v = torch.stack([torch.full((6,), 2.0), torch.zeros(6), torch.randn(6),
                     torch.tensor([1.0, math.nan, 0, 0, 0, 0])])
    for center, first in ((True, 0.0), (False, 6**-0.5)):
        w = v.clone().requires_grad_()
        out = gaussianized_direction(w, center=center)
        torch.testing.assert_close(out[0], torch.full((6,), first))
        assert (torch.equal(out[1], torch.zeros(6))
                and abs(out[2].norm() - 1) < 1e-6 and out[3].isnan().all())
        out[:3].square().sum().backward()
        assert w.grad[:3].isfinite().all()


def test_it_takes_the_place_of_weight_norm():
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3)
    before = layer.weight.detach().clone()
    assert normality_weight(layer) is layer
    lengths, direction = (layer.parametrizations.weight.original0,
                          layer.parametrizations.weight.original1)
    reference = parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    assert (lengths.shape == reference.parametrizations.weight.original0.shape
            and torch.equal(direction, before))
    torch.testing.assert_close(
        layer.weight.flatten(1).norm(dim=1), before.flatten(1).norm(dim=1))
    with torch.no_grad():
        lengths.mul_(2)
    torch.testing.assert_close(
        layer.weight.flatten(1).norm(dim=1), 2 * before.flatten(1).norm(dim=1))


def test_checkpoint_copy_and_removal():
    layer, twin = (normality_weight(nn.Linear(7, 5)),
                   normality_weight(nn.Linear(7, 5)))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(3, 7)
    assert torch.equal(twin(x), layer(x)) and torch.equal(
        copy.deepcopy(layer)(x), layer(x))
    expected = layer(x)
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer(x), expected) and isinstance(
        layer.weight, nn.Parameter)


def test_other_parameters_and_names():
    layer = normality_weight(
        nn.LSTM(4, 5), "weight_hh_l0", gaussianizer=Chain())
    assert layer(torch.randn(2, 3, 4))[0].shape == (2, 3, 5)
    assert ("Chain" in repr(layer.parametrizations)
            and "dim=0" in repr(NormalityWeight()))


def test_low_precision_is_computed_in_float32():
    v = torch.randn(4, 33).bfloat16()
    assert torch.equal(gaussianized_direction(v),
                       gaussianized_direction(v.float()).bfloat16())


def test_the_norm_of_v_does_not_fall_in_training():
    torch.manual_seed(0)
    layer = normality_weight(nn.Linear(6, 3, bias=False)).double()
    x, y = torch.randn(40, 6, dtype=D), torch.randn(40, 3, dtype=D)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses, norms = [], []
    for _ in range(40):
        loss = (layer(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        norms.append(
            layer.parametrizations.weight.original1.norm(dim=1).detach())
    assert losses[-1] < losses[0] and all(
        (b >= a - 1e-12).all() for a, b in zip(norms, norms[1:]))


@pytest.mark.parametrize("call, words", [
    (lambda: normality_weight(nn.Linear(3, 2), "wait"), "no parameter 'wait'"),
    (lambda: normality_weight(nn.Linear(3, 2), "bias"), "at least two axes"),
    (lambda: normality_weight(nn.Linear(3, 2), dim=2), "dim=2"),
    (lambda: normality_weight(nn.ReLU()), "no parameter")])
def test_wrong_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_integers():
    with pytest.raises(TypeError, match="int64"):
        gaussianized_direction(torch.ones(2, 3, dtype=torch.long))
