"""Normalized weights beyond their chapters: torch's and timm's own forms,
checkpoints, copies, scales, dtypes, training, bad input.
"""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from normalnorm.layers.parametrizations import (
    PARAMETRIZATIONS,
    degrees,
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
from tests.peers import installed

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


def test_constant_zero_and_non_finite_vectors():
    v = torch.stack(
        [
            torch.full((6,), 2.0),
            torch.zeros(6),
            torch.randn(6),
            torch.tensor([1.0, math.nan, 0, 0, 0, 0]),
        ]
    )
    for center, first in ((True, 0.0), (False, 6**-0.5)):
        w = v.clone().requires_grad_()
        out = gaussianized_direction(w, center=center)
        torch.testing.assert_close(out[0], torch.full((6,), first))
        assert (
            torch.equal(out[1], torch.zeros(6))
            and abs(out[2].norm() - 1) < 1e-6
            and out[3].isnan().all()
        )
        out[:3].square().sum().backward()
        assert w.grad[:3].isfinite().all()


def test_it_takes_the_place_of_weight_norm():
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3)
    before = layer.weight.detach().clone()
    assert normality_weight(layer) is layer
    lengths, direction = (
        layer.parametrizations.weight.original0,
        layer.parametrizations.weight.original1,
    )
    reference = parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    assert (
        lengths.shape == reference.parametrizations.weight.original0.shape
        and torch.equal(direction, before)
    )
    torch.testing.assert_close(
        layer.weight.flatten(1).norm(dim=1), before.flatten(1).norm(dim=1)
    )
    with torch.no_grad():
        lengths.mul_(2)
    torch.testing.assert_close(
        layer.weight.flatten(1).norm(dim=1), 2 * before.flatten(1).norm(dim=1)
    )


def test_checkpoint_copy_and_removal():
    layer, twin = (
        normality_weight(nn.Linear(7, 5)),
        normality_weight(nn.Linear(7, 5)),
    )
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(3, 7)
    assert torch.equal(twin(x), layer(x)) and torch.equal(
        copy.deepcopy(layer)(x), layer(x)
    )
    expected = layer(x)
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer(x), expected) and isinstance(
        layer.weight, nn.Parameter
    )


def test_other_parameters_and_names():
    layer = normality_weight(
        nn.LSTM(4, 5), "weight_hh_l0", gaussianizer=Chain()
    )
    assert layer(torch.randn(2, 3, 4))[0].shape == (2, 3, 5)
    assert "Chain" in repr(layer.parametrizations) and "dim=0" in repr(
        NormalityWeight()
    )


def test_low_precision_is_computed_in_float32():
    v = torch.randn(4, 33).bfloat16()
    assert torch.equal(
        gaussianized_direction(v), gaussianized_direction(v.float()).bfloat16()
    )


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda: normality_weight(nn.Linear(3, 2), "wait"),
            "no parameter 'wait'",
        ),
        (
            lambda: normality_weight(nn.Linear(3, 2), "bias"),
            "at least two axes",
        ),
        (lambda: normality_weight(nn.Linear(3, 2), dim=2), "dim=2"),
        (lambda: normality_weight(nn.ReLU()), "no parameter"),
    ],
)
def test_wrong_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_integers():
    with pytest.raises(TypeError, match="int64"):
        gaussianized_direction(torch.ones(2, 3, dtype=torch.long))


# ---- standardized weights ---------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_standardized_convolutions_are_timm_s(scaled, groups):
    "Values, gradients of input, weight and gain, in float64 and float32."
    layers = installed("timm.layers")
    make = layers.ScaledStdConv2d if scaled else layers.StdConv2d
    for dtype in (torch.float64, torch.float32):
        theirs = make(
            4, 6, 3, padding=1, groups=groups, bias=True, eps=1e-4
        ).to(dtype)
        ours = nn.Conv2d(4, 6, 3, padding=1, groups=groups).to(dtype)
        ours.load_state_dict(theirs.state_dict(), strict=False)
        weight_standardization(ours, eps=1e-4, scaled=scaled, gain=scaled)
        form = ours.parametrizations.weight
        if scaled:
            with torch.no_grad():
                theirs.gain.mul_(torch.linspace(0.5, 2, 6).view(-1, 1, 1, 1))
                form[0].gain.copy_(theirs.gain)
        x = torch.randn(5, 4, 7, 3, dtype=dtype, requires_grad=True)
        outs = [f(x) for f in (ours, theirs)]
        torch.testing.assert_close(*outs)
        of = (
            [x, form.original, ours.bias, *([form[0].gain] if scaled else [])],
            [x, theirs.weight, theirs.bias, *([theirs.gain] if scaled else [])],
        )
        grads = [
            torch.autograd.grad(out.sin().sum(), p) for out, p in zip(outs, of)
        ]
        for a, b in zip(*grads):
            close = 1e-9 if dtype is torch.float64 else 1e-4
            torch.testing.assert_close(a, b, rtol=close, atol=close)


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
def test_each_form_is_saved_copied_taken_off_and_trained(name):
    torch.manual_seed(0)
    wrap = PARAMETRIZATIONS[name].wrap
    layer, x = wrap(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 5, 7)
    optimizer = torch.optim.SGD(layer.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
    layer.eval()
    expected = layer(x)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = wrap(nn.Conv2d(3, 4, 3)).eval()
    other.load_state_dict(torch.load(file, weights_only=True))
    for module in (other, copy.deepcopy(layer)):
        torch.testing.assert_close(module(x), expected)
    last = copy.deepcopy(layer)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer(x)
    assert low.dtype is torch.bfloat16
    torch.testing.assert_close(low.float(), expected, rtol=0.05, atol=0.05)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    if name != "none":
        parametrize.remove_parametrizations(layer, "weight")
        assert list(dict(layer.named_parameters())) == ["bias", "weight"]
        torch.testing.assert_close(layer(x), expected)


def test_degrees_of_freedom_by_hand():
    "Of 4 units with 5 inputs; and of one unit a spectral norm is a length."
    found = {
        name: degrees(form.wrap, 5, 4)
        for name, form in PARAMETRIZATIONS.items()
    }
    assert found == {
        "none": (20, 20),
        "weight norm": (20, 20),
        "weight norm of the tensor": (20, 20),
        "centred weight norm": (16, 16),
        "weight standardization": (12, 16),
        "scaled, with gain": (16, 16),
        "spectral norm": (19, 20),
        "normality": (16, 16),
    }
    assert degrees(PARAMETRIZATIONS["spectral norm"].wrap, 5, 1) == (4, 5)


def test_standardized_weights_in_half_precision_and_at_the_edges():
    layer = weight_standardization(nn.Linear(64, 3).bfloat16())
    v = layer.parametrizations.weight.original
    assert layer.weight.dtype is torch.bfloat16
    torch.testing.assert_close(
        layer.weight.float(),
        standardized(v.float(), (1,)),
        rtol=1e-2,
        atol=1e-2,
    )
    constant = nn.Linear(5, 2)
    with torch.no_grad():
        constant.weight.fill_(3.0)
    weight_standardization(constant)
    assert not constant.weight.any()
    constant.weight.sum().backward()
    assert constant.parametrizations.weight.original.grad.isfinite().all()
    for module, name, words in (
        (nn.Linear(3, 2), "wait", "has no parameter 'wait'"),
        (nn.BatchNorm1d(3), "weight", "at least two axes"),
        (nn.Linear(1, 3), "weight", "at least two"),
    ):
        with pytest.raises(ValueError, match=words):
            weight_standardization(module, name)
    with pytest.raises(ValueError, match="negative"):
        weight_standardization(nn.Linear(3, 2), eps=-1.0)
    text = str(weight_standardization(nn.Linear(3, 2), scaled=True, gain=True))
    assert "scaled=True, gain=True" in text
