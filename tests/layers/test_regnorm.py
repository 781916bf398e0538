"""RegNorm beyond its chapter: convolutions by hand, gradients, masks,
precisions, compilers, copies, the training loop, accumulation, bad input.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normalnorm.checks.layers.regnorm import double_loop
from normalnorm.layers.prelayer import PreLayerNormLinear
from normalnorm.layers.regnorm import (
    PreRegNormConv1d,
    PreRegNormConv2d,
    PreRegNormConv3d,
    PreRegNormLinear,
    RegNormConv1d,
    RegNormConv2d,
    RegNormConv3d,
    RegNormLinear,
    regnorm_mask,
    regnorm_penalty,
    regnorm_term,
)
from normalnorm.theory.gradient import Power
from tests.layers.steps import refusals

D = torch.float64
CONVS = {
    1: (RegNormConv1d, PreRegNormConv1d, F.conv1d),
    2: (RegNormConv2d, PreRegNormConv2d, F.conv2d),
    3: (RegNormConv3d, PreRegNormConv3d, F.conv3d),
}


@pytest.mark.parametrize("positions", [1, 2, 3])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("scale", ["rms", "std"])
@pytest.mark.parametrize("distinct", [False, True])
def test_convolutions_by_hand(positions, centred, scale, distinct):
    plain, pre, conv = CONVS[positions]
    layer = (pre if centred else plain)(
        3, 4, 2, padding=1, eps=0, scale=scale, distinct=distinct, dtype=D
    )
    nn.init.uniform_(layer.gain, 0.5, 2)
    nn.init.normal_(layer.bias)
    x = torch.randn(3, 3, *(3, 4, 2)[:positions], dtype=D).exp()
    axes = tuple(range(1, x.ndim))
    mean = lambda t: t.mean(axes, keepdim=True)
    z = conv(x - mean(x) if centred else x, layer.weight, padding=1)
    about = mean(z) if scale == "std" else 0
    z = z / mean((z - about).square()).sqrt()
    wide = (-1, *(1,) * positions)
    torch.testing.assert_close(
        layer(x), layer.gain.reshape(wide) * z + layer.bias.reshape(wide)
    )
    term = double_loop(z.flatten(1), not distinct)
    torch.testing.assert_close(layer.loss_term, term)
    torch.testing.assert_close(regnorm_penalty(layer, 0.5), 0.5 * term)
    layer.eval()(x)
    with pytest.raises(ValueError, match="left a term"):
        regnorm_penalty(layer)


@pytest.mark.parametrize("scale", ["rms", "std"])
@pytest.mark.parametrize("distinct", [False, True])
def test_gradients(scale, distinct):
    def both(x, weight):
        layer = RegNormLinear(
            4,
            3,
            gain=False,
            bias=False,
            scale=scale,
            distinct=distinct,
            dtype=D,
        )
        del layer.weight
        layer.weight = weight
        return layer(x), regnorm_penalty(layer)

    x, weight = torch.randn(3, 4, dtype=D), torch.randn(3, 4, dtype=D)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(both, leaves)
    assert torch.autograd.gradgradcheck(both, leaves)


@pytest.mark.parametrize(
    "scale, distinct", [("rms", False), ("rms", True), ("std", False)]
)
def test_masks(scale, distinct):
    layer = PreRegNormLinear(4, 6, scale=scale, distinct=distinct, dtype=D)
    x = torch.randn(2, 5, 4, dtype=D)
    mask = torch.arange(5) < torch.tensor([[2], [4]])
    net = nn.Sequential(layer, nn.Identity())
    x[0, 4] = torch.nan  # what is masked may be anything

    def masked(mask):
        with regnorm_mask(net, mask):
            net(x)
        return regnorm_penalty(net)

    found = masked(mask)
    layer(x[mask])
    torch.testing.assert_close(found, regnorm_penalty(layer))
    for wrong, words in (
        (mask[:, :4], r"expected bool, .* \(2, 5\)"),
        (mask.float(), "bool"),
        (mask & (torch.arange(10).view(2, 5) < 1), "given 1"),
    ):
        with pytest.raises(ValueError, match=words):
            masked(wrong)
        assert layer.mask is None


def test_noise_and_transform_come_after_the_penalty():
    x, first = torch.randn(6, 5), RegNormLinear(5, 40)
    expected, term = first(x), regnorm_penalty(first)
    for options in ({"noise": 0.5}, {"gaussianizer": Power()}):
        layer = RegNormLinear(5, 40, **options)
        layer.load_state_dict(first.state_dict())
        out = layer(x)
        torch.testing.assert_close(regnorm_penalty(layer), term)
        assert (out - expected).abs().max() > 1e-3
        torch.testing.assert_close(
            layer.eval()(x), expected if "noise" in options else out
        )


def test_copies_and_checkpoints():
    layer = RegNormLinear(4, 6, distinct=True)
    layer(torch.randn(3, 4))
    assert "loss_term" not in vars(copy.deepcopy(layer))
    layer.load_state_dict(nn.Linear(4, 6).state_dict())
    PreLayerNormLinear(4, 6).load_state_dict(layer.state_dict())
    assert "distinct=True" in repr(layer) and "scale=rms" in repr(layer)


def test_several_layers_are_summed_and_taken():
    net = nn.Sequential(
        RegNormLinear(1, 6),  # nothing is centred: one feature is enough
        nn.Linear(6, 6),
        RegNormLinear(6, 3),
        RegNormLinear(3, 3),
    )
    assert net[:3](torch.randn(5, 1)).shape == (5, 3)
    terms = [net[0].loss_term, net[2].loss_term]  # the last was not called
    torch.testing.assert_close(regnorm_penalty(net, 2.0), 2 * sum(terms))
    assert not any("loss_term" in vars(m) for m in net.modules())
    assert net[2](torch.zeros(0, 6)).shape == (0, 3)
    assert regnorm_penalty(net) == 0


test_bad_input = refusals(
    [
        (
            lambda: RegNormLinear(4, 3)(torch.zeros(1, 4)),
            ValueError,
            "at least two samples, given 1",
        ),
        (
            lambda: RegNormConv2d(2, 3, 1)(torch.zeros(2, 4, 4)),
            ValueError,
            "at least two samples, given 1",
        ),
        (lambda: RegNormLinear(4, 3, distinct=2), TypeError, "distinct=2"),
        (
            lambda: RegNormConv2d(4, 3, 1, distinct=None),
            TypeError,
            "distinct=None",
        ),
        (lambda: RegNormLinear(4, 3, scale="max"), ValueError, "scale='max'"),
        (lambda: RegNormLinear(4, 3, strength=1), TypeError, "strength"),
        (
            lambda: regnorm_term(torch.ones(3, 3), scale="l2"),
            ValueError,
            "expected 'rms' or 'std'",
        ),
        (
            lambda: regnorm_penalty(nn.Linear(2, 2)),
            ValueError,
            "Linear has no RegNorm layer",
        ),
        (
            lambda: regnorm_penalty(RegNormLinear(4, 3), -1),
            ValueError,
            "strength=-1",
        ),
        (
            lambda: regnorm_penalty(RegNormLinear(4, 3)),
            ValueError,
            "training mode first",
        ),
        (
            lambda: regnorm_mask(nn.ReLU(), None).__enter__(),
            ValueError,
            "ReLU has no RegNorm layer",
        ),
        (
            lambda: PreRegNormLinear(1, 3),
            ValueError,
            "one input feature",
        ),
    ]
)
