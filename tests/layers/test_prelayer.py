"""PreLayerNorm beyond its chapter: torch's own layers, shapes, checkpoints,
precisions, compilers, copies, bad input.
"""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import normalnorm
from normalnorm.layers.conversion import survey
from normalnorm.layers.prelayer import (
    PreLayerNormConv1d,
    PreLayerNormConv2d,
    PreLayerNormConv3d,
    PreLayerNormLinear,
    centred,
)
from normalnorm.theory.gaussianizers import Chain
from normalnorm.theory.gradient import Identity, Power
from normalnorm.theory.newton import newton_lambda, standardized
from normalnorm.theory.power_transform import yeo_johnson
from tests.peers import FOLLOWS

D = torch.float64
CONVS = {
    1: (PreLayerNormConv1d, nn.Conv1d, F.conv1d),
    2: (PreLayerNormConv2d, nn.Conv2d, F.conv2d),
    3: (PreLayerNormConv3d, nn.Conv3d, F.conv3d),
}


def spread(z, axes, scale, eps):
    var = (
        z.var(axes, correction=0, keepdim=True)
        if scale == "std"
        else z.square().mean(axes, keepdim=True)
    )
    return (var + eps).sqrt()


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 5, 7)])
@pytest.mark.parametrize("scale", ["std", "rms"])
def test_linear_by_hand(shape, scale):
    layer = PreLayerNormLinear(7, 4, scale=scale, eps=0.1, dtype=D)
    with torch.no_grad():
        layer.gain.uniform_(0.5, 2)
        layer.bias.normal_()
    x = torch.randn(shape, dtype=D).exp()
    z = (x - x.mean(-1, keepdim=True)) @ layer.weight.T
    torch.testing.assert_close(
        layer(x), layer.gain * z / spread(z, -1, scale, 0.1) + layer.bias
    )


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
    ours, theirs, _ = CONVS[positions]
    layer = ours(4, 6, 3, eps=0.01, dtype=D, **options)
    plain = theirs(4, 6, 3, bias=False, dtype=D, **options)
    plain.weight = layer.weight
    with torch.no_grad():
        layer.gain.uniform_(0.5, 2)
        layer.bias.normal_()
    x = torch.randn(*[2] * batch, 4, *(7, 5, 6)[:positions], dtype=D).exp()
    axes = tuple(range(-positions - 1, 0))
    z = plain(x - x.mean(axes, keepdim=True))
    wide = (-1, *(1,) * positions)
    torch.testing.assert_close(
        layer(x),
        layer.gain.reshape(wide) * z / spread(z, axes, "std", 0.01)
        + layer.bias.reshape(wide),
    )


def test_power_transform_by_hand():
    for scale in ("std", "rms"):
        layer = PreLayerNormLinear(
            9,
            30,
            bias=False,
            gain=False,
            eps=0,
            scale=scale,
            gaussianizer=Power(),
            dtype=D,
        )
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
    layer = make().double()
    x = torch.randn(shape, dtype=D)
    whole = layer(x)
    torch.testing.assert_close(
        whole, torch.cat([layer(part) for part in x.split([1, 2, 3])])
    )
    torch.testing.assert_close(whole, layer.eval()(x))
    torch.testing.assert_close(torch.func.vmap(layer)(x), whole)
    x = x[:1] * 3 + 2  # contrast and brightness are not seen
    layer.eps = 0.0
    torch.testing.assert_close(layer(x), layer((x - 2) / 3))


@pytest.mark.parametrize("positions", [0, 1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_checkpoints_of_torch(positions, bias):
    args = (4, 6) if not positions else (4, 6, 3)
    ours, theirs = (
        (PreLayerNormLinear, nn.Linear)
        if not positions
        else CONVS[positions][:2]
    )
    plain, layer = theirs(*args, bias=bias), ours(*args, bias=bias)
    with torch.no_grad():
        layer.gain.fill_(3)
    layer.load_state_dict(plain.state_dict())
    assert isinstance(layer, theirs) and (layer.gain == 1).all()
    torch.testing.assert_close(layer.weight, plain.weight)
    bare = ours(*args, bias=bias, gain=False)
    assert list(bare.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(bare.state_dict())
    again = ours(*args, bias=bias)
    with torch.no_grad():
        layer.gain.uniform_()
    again.load_state_dict(layer.state_dict())
    torch.testing.assert_close(again.gain, layer.gain)
    broken = layer.state_dict()
    del broken["weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        again.load_state_dict(broken)


def test_new_parameters():
    torch.manual_seed(3)
    layer = PreLayerNormLinear(5, 3)
    torch.manual_seed(3)
    torch.testing.assert_close(layer.weight, nn.Linear(5, 3).weight)
    assert (layer.bias == 0).all() and (layer.gain == 1).all()
    with torch.no_grad():
        layer.gain.zero_()
        layer.bias.fill_(2)
    layer.reset_parameters()
    assert (layer.bias == 0).all() and (layer.gain == 1).all()
    made = PreLayerNormConv2d(2, 3, 1, device="meta", dtype=torch.float16)
    assert made.gain.is_meta and made.gain.dtype == torch.float16
    assert "gain=True" in repr(made) and "kernel_size=(1, 1)" in repr(made)
    assert "Power" in repr(PreLayerNormLinear(3, 3, gaussianizer=Power()))
    assert "noise=0.5" in repr(PreLayerNormLinear(3, 3, noise=0.5))


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)]
)
def test_half_precision(dtype, tolerance):
    for layer, x in (
        (PreLayerNormLinear(64, 48), torch.randn(8, 64)),
        (PreLayerNormConv2d(3, 8, 3), torch.randn(2, 3, 6, 6)),
    ):
        exact = layer(x + 3)
        with torch.autocast("cpu", dtype):
            mixed = layer(x + 3)
        half = copy.deepcopy(layer).to(dtype)((x + 3).to(dtype))
        assert mixed.dtype == half.dtype == dtype
        for found in (mixed, half):
            assert (found.float() - exact).abs().max() < 3 * tolerance
            assert (found.float() - exact).abs().mean() < tolerance / 4
    # the mean is taken in float32: 65504 is float16's largest number
    big = torch.full((1, 64), 3e4, dtype=torch.float16)
    big[0, 0] = 2e4
    assert centred(big, (-1,))[0, 1] == torch.tensor(156.25).half()


@FOLLOWS
def test_compiled_exported_and_traced():
    net = nn.Sequential(
        PreLayerNormConv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        PreLayerNormLinear(100, 6),
    ).double()
    x = torch.randn(3, 3, 5, 5, dtype=D, requires_grad=True)
    expected = net(x)
    grads = torch.autograd.grad(expected.sin().sum(), (x, *net.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        found = compiled(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found.sin().sum(), (x, *net.parameters())),
            grads,
        )
        batch = torch.export.Dim("batch", min=2)
        exported = torch.export.export(
            net.eval(), (x.detach(),), dynamic_shapes=({0: batch},)
        )
        more = torch.randn(5, 3, 5, 5, dtype=D)
        torch.testing.assert_close(exported.module()(more), net(more))
    traced = fx.symbolic_trace(net)
    assert [n.op for n in traced.graph.nodes].count("call_module") == 4
    torch.testing.assert_close(traced(x), expected)


def test_second_derivatives_and_double_backward():
    layer = PreLayerNormLinear(4, 3, dtype=D)
    x = torch.randn(2, 4, dtype=D, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_copies():
    layer = PreLayerNormConv1d(2, 3, 3, noise=0.3, gaussianizer=Chain())
    layer.eval()
    x = torch.randn(2, 2, 8)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ):
        assert other.noise == 0.3 and other.gaussianizer == Chain()
        torch.testing.assert_close(other(x), layer(x))


def test_empty_batch_and_constant_samples():
    layer = PreLayerNormLinear(4, 3)
    out = layer(torch.zeros(0, 4))
    assert out.shape == (0, 3)
    out.sum().backward()
    assert (layer(torch.full((2, 4), 7.0)) == 0).all()
    assert PreLayerNormConv2d(2, 3, 1)(torch.zeros(0, 2, 3, 3)).shape == (
        0,
        3,
        3,
        3,
    )
    assert layer(torch.tensor([[1.0, 2.0, torch.nan, 0.0]])).isnan().all()


@pytest.mark.parametrize(
    "call, error, message",
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
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_gain_and_bias_are_spared_weight_decay():
    from normalnorm.layers.weight_decay import no_weight_decay

    assert no_weight_decay(PreLayerNormLinear(3, 2)) == {"gain", "bias"}


def test_is_public_and_no_normalizer_of_the_survey():
    model = nn.Sequential(
        normalnorm.PreLayerNormLinear(4, 3),
        normalnorm.PreLayerNormConv2d(3, 4, 1),
        nn.ReLU(),
    )
    report = survey(model)
    assert not report.replaced and not report.left
    assert normalnorm.PreLayerNormConv3d is PreLayerNormConv3d
    assert isinstance(model[0].gaussianizer, Identity)
