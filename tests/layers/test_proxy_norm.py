"""The layer of proxy normalization: peers and references, layouts, precision,
statistics that are kept, tracing, second derivatives, and what it refuses.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
from tests.layers.steps import refusals, step, threads
from tests.peers import FOLLOWS, TORCH, installed, onnx_of


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
        other.gamma.data.copy_(layer.weight.view_as(other.gamma))
        other.beta.data.copy_(layer.bias.view_as(other.beta))
        y, up = torch.randn(2, *shape)
        found = step(layer, y, up)
        expected = step(
            lambda y: other(y).reshape(shape), y, up, [other.gamma, other.beta]
        )
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b.view(a.shape), rtol=1e-3, atol=1e-4)


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


def test_float16_does_not_overflow_to_infinity():
    ends = torch.tensor([[60000.0, float("inf")]]).half()
    found = ProxyNorm(2, "relu")(ends).tolist()
    assert found == [[torch.finfo(torch.float16).max, float("inf")]]


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


@torch.no_grad()
def test_a_change_of_the_activation_s_own_parameter_is_noticed():
    layer, y = ProxyNorm(4, nn.PReLU()).eval(), torch.randn(3, 4)
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


def test_weight_decay():
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


def test_transforms_of_torch_func():
    layer = at_random(3, "gelu").double()
    y, parameters = torch.randn(4, 3).double(), dict(layer.named_parameters())
    torch.testing.assert_close(
        torch.func.vmap(layer)(y[:, None]).squeeze(1), layer(y)
    )
    call = lambda p: torch.func.functional_call(layer, p, y)
    torch.testing.assert_close(
        torch.func.jacrev(call)(parameters), torch.func.jacfwd(call)(parameters)
    )


@FOLLOWS
@pytest.mark.parametrize("activation", ["relu", nn.Hardswish()])
def test_compiled_evaluation_follows_the_parameters(activation):
    "And an exported program has no quantile to compute."
    layer, y = at_random(4, activation).eval(), torch.randn(3, 4, 5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(y)
        layer.weight.mul_(3)
        torch.testing.assert_close(compiled(y), layer(y), rtol=1e-4, atol=1e-5)
    program = torch.export.export(layer, (y,))
    assert not any("ndtri" in str(node.target) for node in program.graph.nodes)


def test_onnx():
    block = nn.Sequential(
        nn.GroupNorm(2, 4, affine=False), at_random(4, "relu")
    ).eval()
    x = torch.randn(3, 4, 5)
    torch.testing.assert_close(
        onnx_of(block, x)(x), block(x).detach(), rtol=1e-3, atol=1e-4
    )


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
    one = torch.ones(4)
    for call in (
        lambda: ProxyNorm(4, activation),
        lambda: proxy_norm(torch.randn(2, 4), one, one, activation=activation),
    ):
        with pytest.raises(error, match=words):
            call()


def made(**options):
    return ProxyNorm(**{"num_channels": 3, "activation": "relu", **options})


def called(y=None, bias=None, **options):
    "The function; a layer does not look at its parameters' shapes."
    y = torch.randn(2, 3) if y is None else y
    one = torch.ones(3)
    return proxy_norm(y, one, one if bias is None else bias, **options)


test_what_is_refused = refusals(
    [
        (partial(made, num_channels=0), ValueError, "num_channels=0"),
        (partial(made, num_channels=2.5), TypeError, "num_channels"),
        (partial(made, eps=-1), ValueError, "eps=-1"),
        (partial(made, eps=float("inf")), ValueError, "eps=inf"),
        (partial(made, eps="small"), TypeError, "eps"),
        (partial(made, learnable="no"), TypeError, "learnable"),
        (partial(made, scale=2), TypeError, "scale"),
        (partial(made, samples=0), ValueError, "samples"),
        # of 201 quantiles one is 0
        (
            partial(made, activation=torch.reciprocal, samples=201),
            ValueError,
            "no finite mean and variance",
        ),
        (partial(made, channel_dim=1.0), TypeError, "channel_dim"),
        (partial(made, kinks=["a"]), TypeError, "kinks"),
        (partial(made, groups=2), ValueError, "groups=2 do not divide num_ch"),
        (partial(made, groups=3, channel_dim=-1), ValueError, "nn.LayerNorm"),
        (
            partial(made, groups=3, norm_eps=-1e-5),
            ValueError,
            "must not be negative",
        ),
        (partial(made, groups=0), ValueError, "groups=0"),
        *(
            (lambda y=y: made()(y), error, words)
            for y, error, words in (
                (
                    torch.randn(2, 5, 3),
                    ValueError,
                    r"3 channels was given 5 on axis 1.*"
                    r"did you mean channel_dim=2\?",
                ),
                (
                    torch.randn(2, 5),
                    ValueError,
                    "make it with the number of channels",
                ),
                (
                    torch.randn(3),
                    ValueError,
                    "channel_dim=1, and the input has 1 axes",
                ),
                (torch.ones(2, 3, dtype=torch.int64), TypeError, "int64"),
                (torch.randn(2, 3).double(), TypeError, "float64 and weight"),
                ([1.0, 2.0], TypeError, "list"),
            )
        ),
        (partial(called, bias=torch.ones(4)), ValueError, "bias has shape"),
        (
            lambda: called(torch.randn(2, 3).double()),
            TypeError,
            "float64 and weight",
        ),
        (
            partial(called, channel_dim=0),
            ValueError,
            "3 channels was given 2 on axis 0",
        ),
        (partial(called, eps=-1), ValueError, "eps=-1"),
        (partial(called, eps="a"), TypeError, "eps=a"),
        (partial(called, scale="no"), TypeError, "scale='no'"),
        (
            partial(called, channel_dim="last"),
            TypeError,
            "channel_dim='last'",
        ),
    ]
)


def test_activations_that_are_taken():
    for name in ACTIVATIONS:
        check_activation(name)
    for activation in (
        torch.atan,
        torch.reciprocal,  # sixty quantiles do not hold 0, nor do 1000
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


# ---- with the group norm in it ----------------------------------------------


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
    layer = at_random(shape[1], activation, groups=groups, **OPTIONS[which])
    twin = copy.deepcopy(layer).double()
    x, up = 3 * torch.randn(shape) + 20, torch.randn(shape)
    assert layer(x).grad_fn.name() == "_ByEngineBackward"
    found, exact = step(layer, x, up), step(twin, x.double(), up.double())
    with set_backend("eager"):
        eager = step(layer, x, up)
    for a, b, c in zip(found, exact, eager):
        # some sums are 0, and their rounding that of their terms
        scale = b.abs().max() + 1
        error, of_eager = ((t.double() - b).abs().max() / scale for t in (a, c))
        assert error < max(3e-5, 3 * of_eager)


@pytest.mark.parametrize("activation", ["relu", nn.Hardswish()])
def test_grouped_is_group_norm_and_proxy_norm(activation):
    "As modules, in any layout; with a function of no name, and in halves."
    joint = at_random(6, activation, groups=3, norm_eps=1e-3)
    apart = nn.Sequential(
        nn.GroupNorm(3, 6, 1e-3, affine=False), at_random(6, activation)
    )
    x, last = torch.randn(2, 6, 5, 7), torch.channels_last
    for u in (
        x,
        x.to(memory_format=last),
        x.transpose(2, 3),
        torch.randn(4, 6, 5, 7)[::2],
        x[:0],
    ):
        torch.testing.assert_close(
            step(joint, u), step(apart, u), rtol=1e-4, atol=1e-4
        )
    assert joint(x.to(memory_format=last)).is_contiguous(memory_format=last)
    half = x.bfloat16()
    assert torch.equal(joint(half), joint(half.float()).bfloat16())
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
    names = [name for name, _ in layer.named_parameters()]
    call = lambda x, *values: torch.func.functional_call(
        layer, dict(zip(names, values)), (x,)
    )
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, *layer.parameters()))
    assert torch.autograd.gradgradcheck(call, (x, *layer.parameters()))
    single, (x, up) = at_random(8, groups=4), torch.randn(2, 64, 8, 16, 16)
    first = step(single, x, up)
    with threads(3):
        assert all(map(torch.equal, first, step(single, x, up)))


def test_grouped_without_an_epsilon():
    "As PyTorch's group norm: a constant group is NaN, the others are usual."
    layer = at_random(4, groups=2, norm_eps=0.0)
    x = torch.randn(2, 4, 5)
    x[1, 2:] = 7.0
    plain = nn.Sequential(nn.GroupNorm(2, 4, 0.0, affine=False), at_random(4))
    found = layer(x)
    assert found.grad_fn.name() == "_ByEngineBackward"
    assert found[1, 2:].isnan().all() and found.isnan().sum() == 10
    torch.testing.assert_close(
        found, plain(x), rtol=1e-4, atol=1e-5, equal_nan=True
    )
    torch.testing.assert_close(
        step(layer, x[:1]), step(plain, x[:1]), rtol=1e-4, atol=1e-4
    )


NAMES = ("weight", "bias", "proxy_mean", "proxy_scale")


@pytest.mark.parametrize("name", [*NAMES, "input"])
def test_grouped_memory_that_is_not_there(name):
    """What was freed, cut or changed is refused in the forward and in the
    backward pass, whichever tensor it is; nothing beyond its end is read.
    """
    made = lambda: at_random(4, "gelu", groups=2, samples=200)
    x, layer, other = torch.randn(3, 4, 5, requires_grad=True), made(), made()
    if name != "input":
        setattr(other, name, nn.Parameter(torch.ones(3)))
        with pytest.raises((RuntimeError, ValueError), match="3"):
            other(x)
    out = layer(x)
    tensor = x if name == "input" else getattr(layer, name)
    tensor.untyped_storage().resize_(4)
    for call in (lambda: layer(x), out.sum().backward):
        with pytest.raises(RuntimeError, match="is not there"):
            call()


@pytest.mark.parametrize(
    "changed, words",
    [
        (lambda t: t[:, :2] if t.ndim == 3 else t, r"\(3, 2, 5"),
        # what the forward pass keeps: three numbers a group, six a channel
        (lambda t: t[:9] if t.numel() == 42 else t, r"\(9,"),
    ],
)
def test_grouped_memory_that_a_hook_changes(changed, words):
    layer = at_random(4, "gelu", groups=2, samples=200)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, changed):
        out = layer(torch.randn(3, 4, 5, requires_grad=True))
    with pytest.raises(RuntimeError, match="came back with shape " + words):
        out.sum().backward()


def test_a_gradient_whose_memory_is_not_there():
    out, grad = (
        at_random(4, groups=2)(torch.randn(3, 4, 5)),
        torch.ones(3, 4, 5),
    )
    grad.untyped_storage().resize_(4)
    with pytest.raises(RuntimeError, match="is not there"):
        out.backward(grad)


@pytest.mark.parametrize(
    "name, value",
    [
        ("samples", 11),
        ("eps", 0.5),
        ("scale", False),
        ("groups", 4),
        ("norm_eps", 0.3),
        ("activation", "tanh"),
        ("activation", nn.Hardswish()),
    ],
)
def test_grouped_settings_that_change(name, value):
    "Read at each call, and checked."
    layer, x = at_random(4, groups=2), torch.randn(3, 4, 5)
    before = layer(x)
    setattr(layer, name, value)
    found = layer(x)
    assert not torch.allclose(before, found)
    with set_backend("eager"):
        torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-5)
    layer.samples = 0
    with pytest.raises(ValueError, match="samples=0"):
        layer(x)
