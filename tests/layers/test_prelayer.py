"""PreLayerNorm beyond its chapter: torch's own layers, shapes, checkpoints,
precisions, compilers, copies, bad input.
"""

import pytest
import torch
from torch import nn

from normalnorm.layers.conversion import plain_state_dict, survey
from normalnorm.layers.prelayer import (
    PreLayerNormConv1d,
    PreLayerNormConv2d,
    PreLayerNormConv3d,
    PreLayerNormLinear,
    centred,
)
from normalnorm.theory.gradient import Identity, Power
from normalnorm.theory.newton import newton_lambda, standardized
from normalnorm.theory.power_transform import yeo_johnson
from tests.layers.steps import refusals

D = torch.float64
CONVS = {
    0: (PreLayerNormLinear, nn.Linear),
    1: (PreLayerNormConv1d, nn.Conv1d),
    2: (PreLayerNormConv2d, nn.Conv2d),
    3: (PreLayerNormConv3d, nn.Conv3d),
}


def given(layer):
    "With a gain and a bias that are not neutral."
    nn.init.uniform_(layer.gain, 0.5, 2)
    nn.init.normal_(layer.bias)
    return layer


def spread(z, axes, scale, eps):
    var = (
        z.var(axes, correction=0, keepdim=True)
        if scale == "std"
        else z.square().mean(axes, keepdim=True)
    )
    return (var + eps).sqrt()


@pytest.mark.parametrize("positions", [1, 2, 3])
@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"groups": 2, "dilation": 2},
        {"padding": "same", "padding_mode": "circular"},
    ],
)
def test_convolution_by_hand(positions, batch, options):
    ours, theirs = CONVS[positions]
    layer = given(ours(4, 6, 3, eps=0.01, dtype=D, **options))
    plain = theirs(4, 6, 3, bias=False, dtype=D, **options)
    plain.weight = layer.weight
    x = torch.randn(*[2] * batch, 4, *(7, 5, 6)[:positions], dtype=D).exp()
    axes = tuple(range(-positions - 1, 0))
    z = plain(x - x.mean(axes, keepdim=True))
    wide = (-1, *(1,) * positions)
    torch.testing.assert_close(
        layer(x),
        layer.gain.reshape(wide) * z / spread(z, axes, "std", 0.01)
        + layer.bias.reshape(wide),
    )


@pytest.mark.parametrize("scale", ["std", "rms"])
def test_power_transform_by_hand(scale):
    bare = dict(bias=False, gain=False, eps=0, scale=scale, dtype=D)
    layer = PreLayerNormLinear(9, 30, gaussianizer=Power(), **bare)
    x = torch.randn(3, 9, dtype=D).exp()
    z = (x - x.mean(-1, keepdim=True)) @ layer.weight.T
    lmbda = newton_lambda(standardized(z, -1), -1)
    torch.testing.assert_close(
        layer(x), yeo_johnson(z / spread(z, -1, scale, 0), lmbda[:, None])
    )


def test_noise_in_training_only():
    layer = PreLayerNormLinear(5, 400, noise=0.5, noise_kind="unscaled")
    x = torch.randn(50, 5)
    noise = layer(x) - layer.eval()(x)
    assert abs(noise.std() - 0.5 * (2 / torch.pi) ** 0.5) < 0.01
    torch.testing.assert_close(layer(x), layer(x))
    layer.train().noise = 0.0
    torch.testing.assert_close(layer(x), layer.eval()(x))


@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: PreLayerNormLinear(5, 3), (6, 5)),
        (lambda: PreLayerNormConv2d(3, 4, 3, padding=1), (6, 3, 5, 5)),
    ],
)
def test_elements_of_the_batch_do_not_meet(make, shape):
    layer, x = make().double(), torch.randn(shape, dtype=D)
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))


@pytest.mark.parametrize("positions", [0, 1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_checkpoints_of_torch(positions, bias):
    ours, theirs = CONVS[positions]
    args = (4, 6, 3)[: 2 + bool(positions)]
    plain, layer = (of(*args, bias=bias) for of in (theirs, ours))
    nn.init.constant_(layer.gain, 3)
    layer.load_state_dict(plain.state_dict())
    assert isinstance(layer, theirs) and (layer.gain == 1).all()
    torch.testing.assert_close(layer.weight, plain.weight)
    bare = ours(*args, bias=bias, gain=False)
    with pytest.raises(RuntimeError, match="_extra_state"):
        plain.load_state_dict(bare.state_dict())
    plain.load_state_dict(plain_state_dict(bare.state_dict()))
    broken = layer.state_dict()
    del broken["weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict(broken)


def test_new_parameters():
    torch.manual_seed(3)
    layer = PreLayerNormLinear(5, 3)
    torch.manual_seed(3)
    torch.testing.assert_close(layer.weight, nn.Linear(5, 3).weight)
    for _ in range(2):
        assert (layer.bias == 0).all() and (layer.gain == 1).all()
        given(layer).reset_parameters()
    made = PreLayerNormConv2d(2, 3, 1, device="meta", dtype=torch.float16)
    assert made.gain.is_meta and made.gain.dtype == torch.float16
    assert "gain=True" in repr(made) and "kernel_size=(1, 1)" in repr(made)
    text = repr(PreLayerNormLinear(3, 3, gaussianizer=Power(), noise=0.5))
    assert "Power" in text and "noise=0.5" in text


def test_the_mean_is_taken_in_float32():
    "65504 is float16's largest number."
    big = torch.full((1, 64), 3e4, dtype=torch.float16)
    big[0, 0] = 2e4
    assert centred(big, (-1,))[0, 1] == torch.tensor(156.25).half()


def test_second_derivatives_and_double_backward():
    layer = PreLayerNormLinear(4, 3, dtype=D)
    x = torch.randn(2, 4, dtype=D, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_constant_samples():
    layer = PreLayerNormLinear(4, 3)
    assert (layer(torch.full((2, 4), 7.0)) == 0).all()
    assert layer(torch.tensor([[1.0, 2.0, torch.nan, 0.0]])).isnan().all()


test_bad_input = refusals(
    [
        (
            lambda: PreLayerNormLinear(1, 4),
            ValueError,
            "mean of one input feature",
        ),
        (lambda: PreLayerNormLinear(4, 1), ValueError, "two output features"),
        (
            lambda: PreLayerNormLinear(4, 3, scale="var"),
            ValueError,
            "expected 'std'.* or 'rms'",
        ),
        (lambda: PreLayerNormLinear(4, 3, gain=2), TypeError, "gain=2"),
        (lambda: PreLayerNormLinear(4, 3, eps=-1), ValueError, "eps=-1"),
        (
            lambda: PreLayerNormLinear(4, 3, gaussianizer="power"),
            TypeError,
            "a Gaussianizer is expected",
        ),
        (
            lambda: PreLayerNormLinear(4, 3)(torch.zeros(2, 5)),
            ValueError,
            r"made for 4 features on axis -1, given a shape of \(2, 5\)",
        ),
        (
            lambda: PreLayerNormLinear(4, 3)(torch.zeros(())),
            ValueError,
            "made for 4 features",
        ),
        (
            lambda: PreLayerNormLinear(4, 3)(
                torch.zeros(2, 4, dtype=torch.int64)
            ),
            TypeError,
            "real floating-point",
        ),
        (
            lambda: PreLayerNormLinear(4, 3)(torch.zeros(2, 4, dtype=D)),
            TypeError,
            "weight torch.float32",
        ),
        (
            lambda: PreLayerNormConv2d(2, 3, 1)(torch.zeros(2, 4)),
            ValueError,
            "expects 3 or 4 axes",
        ),
        (
            lambda: PreLayerNormConv2d(2, 3, 1)(torch.zeros(2, 3, 4, 4)),
            ValueError,
            "made for 2 features on axis -3",
        ),
        (
            lambda: PreLayerNormConv2d(1, 3, 1)(torch.zeros(2, 1, 1, 1)),
            ValueError,
            "nothing is left",
        ),
        (
            lambda: PreLayerNormConv2d(2, 1, 3)(torch.zeros(2, 2, 3, 3)),
            ValueError,
            "by its own scale",
        ),
    ]
)


def test_gain_and_bias_are_spared_weight_decay():
    from normalnorm.layers.weight_decay import no_weight_decay

    assert no_weight_decay(PreLayerNormLinear(3, 2)) == {"gain", "bias"}


def test_is_no_normalizer_of_the_survey():
    model = nn.Sequential(PreLayerNormLinear(4, 3), PreLayerNormConv2d(3, 4, 1))
    report = survey(model)
    assert not report.replaced and not report.left
    assert isinstance(model[0].gaussianizer, Identity)
