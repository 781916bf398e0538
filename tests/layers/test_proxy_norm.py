"""The layer of proxy normalization: peers and references, layouts, precision,
statistics that are kept, tracing, second derivatives, and what it refuses.
"""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normalnorm
from normalnorm.layers import proxy_norm as module
from normalnorm.layers.backends import set_backend
from normalnorm.layers.proxy import ACTIVATIONS, proxy_statistics
from normalnorm.layers.proxy_norm import (
    ProxyNorm,
    check_activation,
    named_activation,
    proxy_norm,
)
from normalnorm.layers.weight_decay import groups_by_type, no_weight_decay
from tests.peers import FOLLOWS, TORCH, installed


def at_random(channels, activation="relu", seed=0, **options):
    torch.manual_seed(seed)
    layer = ProxyNorm(channels, activation, **options)
    with torch.no_grad():
        for name, p in layer.named_parameters(recurse=False):
            p.copy_(0.3 * torch.randn(channels) + (name == "weight"))
    return layer


# ---- against others ---------------------------------------------------------


@pytest.mark.parametrize(
    "name, ours, theirs",
    [
        ("relu", "relu", nn.ReLU()),
        ("gelu", nn.GELU(), nn.GELU()),
        ("hard swish", nn.Hardswish(), nn.Hardswish()),
    ],
)
def test_the_package_proxynorm(name, ours, theirs):
    """It draws as many samples as there are channels, at (i + ε)/n: with
    ε = ½ these are the quantiles of n samples, and its flag named `bias`
    asks for the biased variance.
    """
    peer = installed("proxynorm")
    for cls, shape in (
        (peer.ProxyNorm2d, (2, 7, 5, 3)),
        (peer.ProxyNorm1d, (4, 7)),
    ):
        layer = at_random(7, ours, eps=0.5, samples=7, learnable=False)
        other = cls(7, eps=0.5, act=theirs, bias=True)
        with torch.no_grad():
            other.gamma.copy_(layer.weight.view_as(other.gamma))
            other.beta.copy_(layer.bias.view_as(other.beta))
        y = torch.randn(shape)
        expected = other(y).reshape(shape)
        torch.testing.assert_close(layer(y), expected, rtol=1e-4, atol=1e-5)
        up = torch.randn(shape)
        mine = torch.autograd.grad(layer(y), layer.parameters(), up)
        others = torch.autograd.grad(expected, (other.gamma, other.beta), up)
        for a, b in zip(mine, others):
            torch.testing.assert_close(a, b.flatten(), rtol=1e-3, atol=1e-4)


# ---- layouts and dtypes -----------------------------------------------------


def test_any_number_of_axes_and_tokens():
    "The same numbers, wherever the channels are."
    layer, last = at_random(5), at_random(5, channel_dim=-1)
    for shape in ((3, 5), (3, 5, 7), (3, 5, 7, 2), (3, 5, 2, 3, 2), (0, 5, 2)):
        y = torch.randn(shape)
        z = layer(y)
        assert z.shape == shape
        torch.testing.assert_close(last(y.movedim(1, -1)).movedim(-1, 1), z)
    assert last(torch.randn(5)).shape == (5,)
    images = torch.randn(2, 5, 4, 4).to(memory_format=torch.channels_last)
    assert layer(images).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(images), layer(images.contiguous()))


@pytest.mark.parametrize("activation", ["relu", "gelu", nn.Hardswish()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(activation, dtype):
    """Half activations with float32 parameters, and a layer in half precision:
    the output is that of float64, rounded once.
    """
    layer = at_random(6, activation)
    y = torch.randn(50, 6).to(dtype)
    for chosen in (layer, copy.deepcopy(layer).to(dtype)):
        found = chosen(y)
        assert found.dtype is dtype
        exact = copy.deepcopy(chosen).double()(y.double())
        step = torch.finfo(dtype).eps
        assert (
            (found.double() - exact).abs() <= 0.51 * step * exact.abs() + 2e-5
        ).all()
        found.float().square().sum().backward()
        assert all(
            p.grad.isfinite().all() and p.grad.dtype is p.dtype
            for p in chosen.parameters()
        )


def test_float16_does_not_overflow_to_infinity():
    layer = ProxyNorm(2, "relu")
    y = torch.full((1, 2), 60000.0, dtype=torch.float16)
    assert layer(y).max() == torch.finfo(torch.float16).max
    assert layer(torch.full_like(y, float("inf"))).isinf().all()


def test_autocast():
    "Convolution and group norm by autocast, the statistics in float32."
    block = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8, affine=False),
        at_random(8, "gelu"),
        nn.Conv2d(8, 2, 3),
    )
    x = torch.randn(2, 3, 9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(x)
        assert block[2].statistics()[0].dtype is torch.float32
        out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())
    torch.testing.assert_close(out.float(), block(x), rtol=0.1, atol=0.1)


# ---- statistics that are kept -----------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    calls = []
    monkeypatch.setattr(
        module,
        "proxy_statistics",
        lambda *args: calls.append(1) or proxy_statistics(*args),
    )
    return calls


def test_statistics_are_kept_in_evaluation_and_only_there(counted):
    layer, y = at_random(4), torch.randn(3, 4)
    counted.clear()
    layer(y), layer(y)
    assert len(counted) == 2  # training
    layer.eval()
    layer(y), layer(y)
    assert len(counted) == 4  # with gradients
    with torch.no_grad():
        layer(y), layer(y)
    assert len(counted) == 5
    layer.requires_grad_(False)
    layer(y)
    assert len(counted) == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.weight.add_(0.5),
        lambda m: m.weight.data.mul_(2),
        lambda m: setattr(m.bias, "data", m.bias.data + 1),
        lambda m: m.proxy_mean.fill_(0.7),
        lambda m: m.proxy_scale.fill_(0.7),
        lambda m: setattr(m, "eps", 0.5),
        lambda m: setattr(m, "scale", False),
        lambda m: setattr(m, "samples", 11),
        lambda m: m.reset_parameters(),
        lambda m: setattr(m, "activation", "gelu"),
        lambda m: m.load_state_dict(at_random(4, seed=9).state_dict()),
        lambda m: m.double(),
        lambda m: m.bfloat16(),
    ],
)
def test_a_change_is_noticed(change):
    layer = at_random(4).eval()
    with torch.no_grad():
        layer(torch.randn(3, 4))
        change(layer)
        y = torch.randn(3, 4, dtype=layer.weight.dtype)
        fresh = copy.deepcopy(layer).train()
        torch.testing.assert_close(layer(y), fresh(y))


def test_a_change_of_the_activation_s_own_parameter_is_noticed():
    layer = ProxyNorm(4, nn.PReLU()).eval()
    y = torch.randn(3, 4)
    with torch.no_grad():
        before = layer(y)
        layer.activation.weight.fill_(-1)
        after = layer(y)
        torch.testing.assert_close(after, copy.deepcopy(layer).train()(y))
    assert not torch.allclose(before, after)


def test_no_comparison_where_it_would_wait():
    "Tensors of another device are never taken for unchanged."
    here, there = torch.ones(3), torch.ones(3, device="meta")
    assert module._unchanged([here], [here.clone()])
    assert not module._unchanged([here], [here.double()])
    for kept, now in (
        ([there], [there]),
        ([here], [there]),
        ([there], [here]),
        ([here], [here, here]),
    ):
        assert not module._unchanged(kept, now)


# ---- as a module ------------------------------------------------------------


def test_state_copies_and_pickles():
    layer = at_random(3, nn.GELU()).eval()
    y = torch.randn(2, 3)
    with torch.no_grad():
        expected = layer(y)  # something is kept
    assert list(layer.state_dict()) == [
        "weight",
        "bias",
        "proxy_mean",
        "proxy_scale",
    ]
    assert list(ProxyNorm(3, "relu", learnable=False).state_dict()) == [
        "weight",
        "bias",
    ]
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other = ProxyNorm(3, "gelu")
    other.load_state_dict(torch.load(stream))
    for same in (
        other,
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
    ):
        with torch.no_grad():
            torch.testing.assert_close(same.eval()(y), expected)
    assert repr(ProxyNorm(3, "gelu", scale=False)) == (
        "ProxyNorm(3, activation=gelu, eps=0.03, learnable=True, scale=False, "
        "samples=auto, channel_dim=1)"
    )


def test_public_name_and_weight_decay():
    assert normalnorm.ProxyNorm is ProxyNorm
    model = nn.Sequential(nn.Linear(3, 4), ProxyNorm(4, "relu"))
    assert no_weight_decay(model) == {"1.weight", "1.bias"}
    decayed, others = groups_by_type(model, 0.1)
    assert {id(p) for p in decayed["params"]} == {
        id(model[0].weight),
        id(model[1].proxy_mean),
        id(model[1].proxy_scale),
    }
    assert len(others["params"]) == 3


def test_devices_without_data():
    "On the meta device, and moved from there."
    with torch.device("meta"):
        ProxyNorm(4, nn.Hardswish())  # tried on the CPU
        with pytest.raises(ValueError, match="does not act element"):
            ProxyNorm(4, lambda y: y.sort().values)
        layer = ProxyNorm(4, nn.SiLU())
    assert layer.weight.is_meta
    assert layer(torch.empty(2, 4, device="meta")).shape == (2, 4)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    y = torch.randn(2, 4)
    torch.testing.assert_close(layer(y), ProxyNorm(4, "silu")(y))


@pytest.mark.parametrize(
    "given, name",
    [
        (nn.ReLU(inplace=True), "relu"),
        (F.relu, "relu"),
        (torch.relu, "relu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (F.silu, "silu"),
        (nn.Tanh(), "tanh"),
        (nn.LeakyReLU(0.3), "leaky_relu"),
        (nn.Identity(), "identity"),
    ],
)
def test_names(given, name):
    assert named_activation(given)[0] == name
    y = torch.randn(5, 3)
    layer = at_random(3, given, samples=200)
    same = at_random(3, lambda v: given(v.clone()), samples=200)  # has no name
    torch.testing.assert_close(layer(y), same(y), rtol=1e-4, atol=1e-5)


# ---- derivatives and tracing ------------------------------------------------


@pytest.mark.parametrize("samples", [200, None])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.PReLU()])
def test_first_and_second_derivatives(activation, samples):
    "Against differences, also of the activation's own parameter."
    layer = at_random(2, copy.deepcopy(activation), samples=samples).double()
    leaves = [p.detach().requires_grad_() for p in layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]
    y = torch.tensor(
        [[0.7, -0.4], [1.3, 0.2]], dtype=torch.float64, requires_grad=True
    )

    def run(y, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), y)

    assert torch.autograd.gradcheck(run, (y, *leaves), atol=1e-6)
    if samples is None:  # the rule of quantiles has kinks of its own
        assert torch.autograd.gradgradcheck(run, (y, *leaves), atol=1e-5)


def test_second_derivatives_by_the_kernel_s_road():
    layer, wide = at_random(3, "gelu"), at_random(3, "gelu").double()
    y = torch.randn(4, 3)
    found = []
    for chosen, input in ((layer, y), (wide, y.double())):
        with set_backend("auto"):
            grads = torch.autograd.grad(
                chosen(input).square().sum(),
                chosen.parameters(),
                create_graph=True,
            )
            found.append(
                torch.autograd.grad(
                    sum(g.square().sum() for g in grads), chosen.parameters()
                )
            )
    for a, b in zip(*found):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


def test_transforms_of_torch_func():
    layer = at_random(3, "gelu").double()
    y = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(
        torch.func.vmap(layer)(y[:, None]).squeeze(1), layer(y)
    )
    parameters = dict(layer.named_parameters())
    by_func = torch.func.jacrev(
        lambda p: torch.func.functional_call(layer, p, y)
    )(parameters)
    forward = torch.func.jacfwd(
        lambda p: torch.func.functional_call(layer, p, y)
    )(parameters)
    for name in parameters:
        torch.testing.assert_close(by_func[name], forward[name])


@FOLLOWS
@pytest.mark.parametrize("activation", ["relu", nn.Hardswish()])
def test_compile_and_export(activation):
    "No break in the graph, by the compiler's front, and an exported program."
    block = nn.Sequential(
        nn.GroupNorm(2, 4, affine=False), at_random(4, activation)
    )
    x = torch.randn(3, 4, 5)
    for training in (True, False):
        block.train(training)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        out = compiled(x)
        torch.testing.assert_close(out, block(x), rtol=1e-4, atol=1e-5)
        up = torch.randn_like(out)
        torch.testing.assert_close(
            torch.autograd.grad(out, block.parameters(), up),
            torch.autograd.grad(block(x), block.parameters(), up),
            rtol=1e-3,
            atol=1e-4,
        )
    block.eval()
    program = torch.export.export(
        block, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
    )
    assert not any("ndtri" in str(node.target) for node in program.graph.nodes)
    larger = torch.randn(7, 4, 5)
    torch.testing.assert_close(
        program.module()(larger), block(larger), rtol=1e-4, atol=1e-5
    )


@FOLLOWS
def test_compiled_evaluation_follows_the_parameters():
    layer = at_random(3).eval()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    y = torch.randn(2, 3)
    with torch.no_grad():
        compiled(y)
        layer.weight.mul_(3)
        torch.testing.assert_close(compiled(y), layer(y), rtol=1e-4, atol=1e-5)


def test_onnx(tmp_path):
    installed("onnxscript")
    runtime = installed("onnxruntime")
    block = nn.Sequential(
        nn.GroupNorm(2, 4, affine=False), at_random(4, "relu")
    ).eval()
    x, path = torch.randn(3, 4, 5), tmp_path / "block.onnx"
    torch.onnx.export(block, (x,), path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(path)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    np.testing.assert_allclose(found, block(x).detach(), rtol=1e-3, atol=1e-4)


# ---- what is refused --------------------------------------------------------


@pytest.mark.parametrize(
    "activation, error, words",
    [
        (nn.Softmax(-1), ValueError, "does not act element by element"),
        (nn.Softmax(1), ValueError, "fails for an input of shape"),
        (lambda y: y / y.norm(), ValueError, "does not act element by element"),
        (lambda y: y - y.mean(), ValueError, "does not act element by element"),
        (
            lambda y: y.sort().values,
            ValueError,
            "does not act element by element",
        ),
        (
            lambda y: y.flatten().sort().values.view_as(y),
            ValueError,
            "does not act element by element",
        ),
        (nn.GLU(1), ValueError, "fails for an input of shape"),
        (lambda y: y.sum(), ValueError, "made shape"),
        (nn.PReLU(4), ValueError, "fails for an input|not act element"),
        (
            lambda y: torch.sqrt(y),
            ValueError,
            "is nan at -2.39, which is a quant",
        ),
        (lambda y: 1 / (y > 0).float(), ValueError, "is inf at"),
        (nn.Dropout(), ValueError, "something else each time"),
        (nn.RReLU(), ValueError, "something else each time"),
        (lambda y: y > 0, TypeError, "a tensor of torch.bool"),
        (lambda y: y.tolist(), TypeError, "a list"),
        ("rellu", ValueError, "relu"),
        (3, TypeError, "activation=3 is a int"),
        (nn.ReLU, TypeError, "gives a ReLU"),
    ],
)
def test_activations_that_are_refused(activation, error, words):
    with pytest.raises(error, match=words):
        ProxyNorm(4, activation)
    one = torch.ones(4)
    with pytest.raises(error, match=words):
        proxy_norm(torch.randn(2, 4), one, one, activation=activation)


def test_an_activation_that_is_infinite_at_one_quantile_more():
    "Sixty quantiles do not hold 0, nor do 1000; of 201 one is."
    assert ProxyNorm(4, torch.reciprocal).samples == "auto"
    with pytest.raises(ValueError, match="no finite mean and variance"):
        ProxyNorm(4, torch.reciprocal, samples=201)


def test_activations_that_are_taken():
    for name in ACTIVATIONS:
        check_activation(name)
    for activation in (
        torch.atan,
        F.softplus,
        nn.ELU(),
        nn.Hardtanh(),
        nn.Mish(),
        nn.PReLU(),
        lambda y: y**3,
        nn.Sequential(nn.SiLU(), nn.Tanh()),
    ):
        layer = ProxyNorm(3, activation)
        assert layer(torch.randn(4, 3)).isfinite().all()


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"num_channels": 0}, ValueError, "num_channels=0"),
        ({"num_channels": 2.5}, TypeError, "num_channels"),
        ({"eps": -1}, ValueError, "eps=-1"),
        ({"eps": float("inf")}, ValueError, "eps=inf"),
        ({"eps": "small"}, TypeError, "eps"),
        ({"learnable": "no"}, TypeError, "learnable"),
        ({"scale": 2}, TypeError, "scale"),
        ({"samples": 0}, ValueError, "samples"),
        ({"channel_dim": 1.0}, TypeError, "channel_dim"),
        ({"kinks": ["a"]}, TypeError, "kinks"),
    ],
)
def test_settings_that_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        ProxyNorm(**{"num_channels": 3, "activation": "relu", **options})


@pytest.mark.parametrize(
    "input, error, words",
    [
        (
            torch.randn(2, 5, 3),
            ValueError,
            r"3 channels was given 5 on axis 1.*"
            r"did you mean channel_dim=2\?",
        ),
        (torch.randn(2, 5), ValueError, "make it with the number of channels"),
        (torch.randn(3), ValueError, "channel_dim=1, and the input has 1 axes"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, "int64"),
        (torch.randn(2, 3).double(), TypeError, "float64 and weight"),
        ([1.0, 2.0], TypeError, "list"),
    ],
)
def test_inputs_that_are_refused(input, error, words):
    with pytest.raises(error, match=words):
        ProxyNorm(3, "relu")(input)


def test_the_function_checks_its_parameters():
    y, one = torch.randn(2, 3), torch.ones(3)
    with pytest.raises(ValueError, match="bias has shape"):
        proxy_norm(y, one, torch.ones(4))
    with pytest.raises(TypeError, match="float64 and weight"):
        proxy_norm(y.double(), one, one)
    with pytest.raises(ValueError, match="3 channels was given 2 on axis 0"):
        proxy_norm(y, one, one, channel_dim=0)
    for options, error, words in (
        ({"eps": -1}, ValueError, "eps=-1"),
        ({"eps": "a"}, TypeError, "eps=a"),
        ({"scale": "no"}, TypeError, "scale='no'"),
        ({"channel_dim": "last"}, TypeError, "channel_dim='last'"),
    ):
        with pytest.raises(error, match=words):
            proxy_norm(y, one, one, **options)


# ---- with the group norm in it ----------------------------------------------


def of_all(layer, x, up):
    "Output and gradients of the input and of the parameters."
    x = x.detach().requires_grad_()
    out = layer(x)
    return out, *torch.autograd.grad(out, [x, *layer.parameters()], up)


SHAPES = (
    ((3, 6, 5, 7), 2),
    ((2, 8, 16, 16), 8),
    ((2, 4, 70, 71), 1),
    ((5, 24), 2),
    ((1, 6, 11), 1),
    ((2, 6, 2, 3, 4), 6),
    ((7, 4, 3, 3), 4),
)
OPTIONS = (
    {"samples": 200},
    {"scale": False, "samples": 200},
    {"learnable": False, "samples": 200},
    {},
)
GROUPED = (*ACTIVATIONS, nn.LeakyReLU(0.2))


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("activation", GROUPED)
def test_grouped_by_the_kernel(activation, which):
    "Output and all gradients against float64; odd sizes and a far mean."
    shape, groups = SHAPES[(GROUPED.index(activation) + 2 * which) % 7]
    options = OPTIONS[which]
    layer = at_random(shape[1], activation, groups=groups, **options)
    twin = copy.deepcopy(layer).double()
    x, up = 3 * torch.randn(shape) + 20, torch.randn(shape)
    found, exact = of_all(layer, x, up), of_all(twin, x.double(), up.double())
    assert found[0].grad_fn.name() == "_ByEngineBackward"
    with set_backend("eager"):
        eager = of_all(layer, x, up)
    for a, b, c in zip(found, exact, eager):
        # some sums are 0, and their rounding that of their terms
        scale = b.abs().max() + 1
        error = (a.double() - b).abs().max() / scale
        assert error < max(3e-5, 3 * ((c.double() - b).abs().max() / scale))


def test_grouped_is_group_norm_and_proxy_norm():
    "As modules, in any layout; with a function of no name, and in halves."
    for activation in ("relu", nn.Hardswish()):
        joint = at_random(6, activation, groups=3, norm_eps=1e-3)
        apart = nn.Sequential(
            nn.GroupNorm(3, 6, 1e-3, affine=False), at_random(6, activation)
        )
        x, up = torch.randn(2, 6, 5, 7), torch.randn(2, 6, 5, 7)
        last = torch.channels_last
        for u in (
            x,
            x.to(memory_format=last),
            x.transpose(2, 3),
            torch.randn(4, 6, 5, 7)[::2],
            x[:0],
        ):
            g = up.view_as(u) if u.shape == up.shape else torch.randn_like(u)
            for a, b in zip(of_all(joint, u, g), of_all(apart, u, g)):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert joint(x.to(memory_format=last)).is_contiguous(memory_format=last)
        half = joint(x.bfloat16())
        assert half.dtype is torch.bfloat16
        torch.testing.assert_close(half, joint(x.bfloat16().float()).bfloat16())
    assert joint.state_dict().keys() == apart[1].state_dict().keys()
    joint.load_state_dict(apart[1].state_dict())


def test_grouped_values_that_are_not_finite_or_far():
    "They stay in their group; a constant group is 0 before the affine map."
    layer = at_random(4, groups=2)
    x = torch.randn(3, 4, 5)
    # the square of 1e30 is infinite in PyTorch 2.4's group norm
    far = 1e30 if TORCH >= (2, 13) else 1e15
    for row, value in enumerate((float("nan"), float("inf"), far)):
        x[row, 0, row] = value
    x[2, 2:] = -7.0
    found = layer(x)
    with set_backend("eager"):
        expected = layer(x)
    # of a constant PyTorch's group norm leaves a rounding of its size
    torch.testing.assert_close(
        found, expected, rtol=1e-3, atol=1e-3, equal_nan=True
    )
    assert found[:2, :2].isnan().all() and found[:2, 2:].isfinite().all()
    assert found[2].isfinite().all()
    zero = at_random(4)(torch.zeros(1, 2 + 2, 5))
    torch.testing.assert_close(found[2:, 2:], zero[:, 2:])


def test_grouped_derivatives_and_threads():
    "By the definition in float64; the same bits for any number of threads."
    layer = at_random(4, "silu", groups=2).double()
    parameters = tuple(layer.parameters())
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)

    def call(x, *values):
        names = [name for name, _ in layer.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

    assert torch.autograd.gradcheck(call, (x, *parameters))
    assert torch.autograd.gradgradcheck(call, (x, *parameters))
    single = at_random(8, groups=4)
    x, up = torch.randn(64, 8, 16, 16), torch.randn(64, 8, 16, 16)
    first, threads = of_all(single, x, up), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, first, of_all(single, x, up)))
    finally:
        torch.set_num_threads(threads)
    # the second derivative of the kernel's road is the definition's
    x = x[:1, :, :2, :2].clone().requires_grad_()
    (g,) = torch.autograd.grad(single(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(g.square().sum(), x)
    with set_backend("eager"):
        (g,) = torch.autograd.grad(
            single(x).square().sum(), x, create_graph=True
        )
        (expected,) = torch.autograd.grad(g.square().sum(), x)
    torch.testing.assert_close(second, expected, rtol=1e-3, atol=1e-3)


def test_grouped_without_an_epsilon():
    "As PyTorch's group norm: a constant group is NaN, the others are usual."
    layer = at_random(4, groups=2, norm_eps=0.0)
    x = torch.randn(2, 4, 5)
    x[1, 2:] = 7.0
    plain = nn.Sequential(nn.GroupNorm(2, 4, 0.0, affine=False), at_random(4))
    found, expected = layer(x), plain(x)
    assert found.grad_fn.name() == "_ByEngineBackward"
    assert found[1, 2:].isnan().all() and found.isnan().sum() == 10
    torch.testing.assert_close(
        found, expected, rtol=1e-4, atol=1e-5, equal_nan=True
    )
    up = torch.randn(2, 4, 5)
    for a, b in zip(of_all(layer, x[:1], up[:1]), of_all(plain, x[:1], up[:1])):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_grouped_memory_that_is_not_there():
    """What was freed, cut or changed is refused in the forward and in the
    backward pass, whichever tensor it is; nothing beyond its end is read.
    """

    def made():
        return (
            at_random(4, "gelu", groups=2),
            torch.randn(3, 4, 5, requires_grad=True),
        )

    names = ("weight", "bias", "proxy_mean", "proxy_scale")
    for name in names:
        layer, x = made()
        setattr(layer, name, nn.Parameter(torch.ones(3)))
        with pytest.raises((RuntimeError, ValueError), match="3"):
            layer(x)
    for name in (*names, "input"):
        layer, x = made()
        tensor = x if name == "input" else getattr(layer, name)
        out = layer(x)
        tensor.untyped_storage().resize_(4)
        for call in (layer.forward, lambda _, out=out: out.sum().backward()):
            with pytest.raises(RuntimeError, match="is not there"):
                call(x)
    layer, x = made()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t[:, :2] if t.ndim == 3 else t
    ):
        out = layer(x)
    with pytest.raises(RuntimeError, match="came back with shape .3, 2, 5"):
        out.sum().backward()


def test_grouped_settings_that_change():
    "Read at each call, and checked."
    layer, x = at_random(4, groups=2), torch.randn(3, 4, 5)
    for name, value in (
        ("samples", 11),
        ("eps", 0.5),
        ("scale", False),
        ("groups", 4),
        ("norm_eps", 0.3),
        ("activation", "tanh"),
        ("activation", nn.Hardswish()),
    ):
        before = layer(x)
        setattr(layer, name, value)
        found = layer(x)
        assert not torch.allclose(before, found)
        with set_backend("eager"):
            torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-5)
    layer = at_random(4, groups=2)
    layer.samples = 0
    with pytest.raises(ValueError, match="samples=0"):
        layer(x)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"groups": 4}, "groups=4 do not divide num_channels=6"),
        ({"groups": 2, "channel_dim": -1}, "nn.LayerNorm"),
        ({"groups": 2, "norm_eps": -1e-5}, "must not be negative"),
        ({"groups": 0}, "groups=0"),
    ],
)
def test_groups_that_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ProxyNorm(6, "relu", **options)
