"""The normalizers of part 3 beside PyTorch's, timm's, and loops over elements;
in half precision, in memory's other orders, compiled, converted and back.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normalnorm.layers import hybrids
from normalnorm.layers.conversion import survey, to_normality, to_plain
from normalnorm.layers.core import normality_norm
from normalnorm.layers.families import rows
from normalnorm.layers.hybrids import (
    NORMALIZERS,
    BatchReNorm,
    EvoNorm2d,
    PropagatedNorm,
)
from normalnorm.layers.normalizers import (
    About,
    FilterResponseNorm,
    RootMeanSquareNorm,
)
from normalnorm.theory.gaussianizers import Chain
from normalnorm.theory.gradient import Identity, Power
from normalnorm.theory.newton import Over, newton_lambda
from normalnorm.theory.power_transform import yeo_johnson
from tests.layers.steps import refusals, step
from tests.peers import FOLLOWS, TORCH, installed
from tools.rows import accepted

SHAPES = [(7, 5), (7, 5, 3), (3, 5, 2, 7), (3, 5, 2, 3, 7)]
HERE = {"normalnorm.layers.normalizers", "normalnorm.layers.hybrids"}
MINE = {row.names[0]: row for row in rows() if row.layer.__module__ in HERE}
EACH = pytest.mark.parametrize("name", MINE)
# with values standardized over one set, which can be transformed
SETS = {"bmlv": (1, 2, 3), "lmbv": (0, 2, 3), "rms": (2,), "frn": (2, 3)}
STANDARDIZED = pytest.mark.parametrize("name", SETS)


def made(name, channels=5, **options):
    """Without what a layer does not take; EvoNorm with one group, unless it
    divides.
    """
    known = accepted(MINE[name].layer)
    if "num_groups" in known:
        options = {"num_groups": 1} | options
    return MINE[name].make(
        channels, **{k: v for k, v in options.items() if k in known}
    )


def quiet(layer):
    "No output is cut."
    for name, value in (("tau", -1e9), ("bias", 9.0)):
        if (value < 0 or type(layer) is PropagatedNorm) and getattr(
            layer, name, None
        ) is not None:
            nn.init.constant_(getattr(layer, name), value)
    return layer


def images(shape=(3, 5, 2, 7), seed=0, dtype=torch.float64):
    return (
        torch.randn(
            shape,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )
        .exp()
        .to(dtype)
    )


def moved(layer):
    "Weights that are not neutral."
    for i, p in enumerate(layer.parameters()):
        p.data += torch.linspace(-0.4, 0.3 + i, p.numel()).to(p).view(p.shape)
    return layer


@pytest.mark.parametrize("name", ["bmlv", "lmbv"])
def test_settings_of_a_cross(name):
    "A plain mean over all batches, no averages, no bias."
    layer = made(name, momentum=None, bias=False).double()
    batches = [images(seed=seed) for seed in range(3)]
    for u in batches:
        layer(u)
    rows = lambda x: x.transpose(0, 1).flatten(1)
    kind, value = {
        "bmlv": ("mean", lambda u: rows(u).mean(1)),
        "lmbv": ("var", lambda u: rows(u - u.mean((1, 2, 3), True)).var(1)),
    }[name]
    torch.testing.assert_close(
        layer.get_buffer(f"running_{kind}"), sum(map(value, batches)) / 3
    )
    bare = made(name, affine=False, track_running_stats=False).double()
    assert layer.bias is None and not list(bare.state_dict())
    found = bare(u)
    torch.testing.assert_close(found, bare.eval()(u), rtol=0, atol=0)
    torch.testing.assert_close(found, made(name).double()(u))


CROSSES = [(name, functools.partial(made, name)) for name in ("bmlv", "lmbv")]


test_a_cross_refuses_with_reasons = refusals(
    [
        (lambda make=make, u=u: make()(u), error, words)
        for _, make in CROSSES
        for u, error, words in (
            (torch.ones(3, 4), ValueError, "num_features=5"),
            (torch.ones(5), ValueError, "expects an input of shape"),
            (torch.ones(1, 5), ValueError, "more than one value per channel"),
            (torch.ones(3, 5).double(), TypeError, "one precision"),
            (torch.ones(3, 5).long(), TypeError, r"\.float\(\)"),
            ("text", TypeError, "not str"),
        )
    ]
    + [
        (functools.partial(make, eps=-1.0), ValueError, "negative")
        for _, make in CROSSES
    ]
)


@pytest.mark.parametrize("name, make", CROSSES)
def test_batches_at_the_edge_of_a_cross(name, make):
    "One sample and none; of averages what is finite moves."
    layer = make()
    assert layer.eval()(torch.ones(1, 5)).shape == (1, 5)
    assert layer(torch.ones(0, 5)).shape == (0, 5)
    before, u = copy.deepcopy(layer.state_dict()), torch.ones(3, 5)
    u[0, 0] = torch.nan
    layer.train()(u)
    for key, value in layer.state_dict().items():
        if key.startswith("running_"):
            stays = value.isfinite() & (value == before[key])
            assert value.isfinite().all()
            assert stays[0] if name == "bmlv" else stays.all()


@pytest.mark.parametrize("point", [0.0, 2.5, images((1, 5, 1, 1))], ids=str)
def test_about_a_point(point):
    "Values from a point, over a deviation about their own mean."
    u = images()
    out, _ = normality_norm(u, About((1, 2, 3), point), alpha=0, eps=0.1)
    c = u - point
    torch.testing.assert_close(
        out, c / (c.var((1, 2, 3), correction=0, keepdim=True) + 0.1).sqrt()
    )
    assert torch.autograd.gradcheck(
        lambda x: normality_norm(x, About((0, 1), 0.5))[0],
        images((3, 2)).requires_grad_(),
    )


@pytest.mark.parametrize(
    "dim",
    [Over((2,), (0, 2)), Over((0, 2), (2,)), Over((2,), ()), About((2,), 0.3)],
    ids=["bmlv", "lmbv", "no mean", "about"],
)
@pytest.mark.parametrize(
    "options",
    [dict(), dict(safeguard=True), dict(safeguard=True, steps=3)],
    ids=str,
)
def test_the_transform_is_that_of_the_scale_s_set(dim, options):
    """λ̂ and its safeguard as of the centred values of each set alone, whatever
    mean is subtracted.
    """
    # with long tails on both sides, where a step can do harm
    k, by = torch.randn(2, 60, 3, 999, dtype=torch.float64)
    k = k / by.square()
    out, used = normality_norm(k, dim, eps=0.0, **options)
    c = k - (
        k.mean(dim.centre, keepdim=True)
        if dim.centre
        else getattr(dim, "point", 0.0)
    )
    torch.testing.assert_close(
        used.lmbda.squeeze(),
        newton_lambda(c, dim.dim, **options).squeeze(),
        rtol=1e-9,
        atol=1e-9,
    )
    torch.testing.assert_close(
        out, yeo_johnson(c / used.var.sqrt(), used.lmbda)
    )
    plain = normality_norm(k, dim)[1].lmbda
    assert dim.dim != (2,) or torch.equal(plain, used.lmbda) == (not options)


# ---- beside torch and timm --------------------------------------------------


@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float64, 1e-12),
        (torch.float32, 2e-6),
        (torch.bfloat16, 1.6e-2),
        (torch.float16, 2e-3),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(7,), (3, 7)], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_the_root_mean_square_norm_is_pytorch_s(eps, shape, dtype, tolerance):
    if eps is None and dtype.itemsize == 2 and TORCH < (2, 13):
        pytest.skip("PyTorch's ε was that of half precision once")
    theirs = moved(nn.RMSNorm(shape, eps).to(dtype))
    ours = RootMeanSquareNorm(shape, eps).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    u = (0.01 * images((5, 2, 3, 7))).to(dtype)
    g = torch.randn_like(u)
    found, *expected = (step(f, u, g) for f in (ours, theirs))
    for a, b in zip(found, *expected):
        scale = b.abs().max()
        torch.testing.assert_close(
            a / scale, b / scale, rtol=10 * tolerance, atol=10 * tolerance
        )


def test_a_converted_root_mean_square_norm_and_back():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(7, 7), moved(nn.RMSNorm(7)), moved(nn.RMSNorm((7,), 1e-3))
    )
    u = images((5, 7), dtype=torch.float32)
    expected, text = plain(u), str(plain)
    model = to_normality(copy.deepcopy(plain))
    assert [type(m) for m in model[1:]] == [RootMeanSquareNorm] * 2
    assert [m.eps for m in model[1:]] == [None, 1e-3]
    assert all(
        m.noise == 0 and type(m.gaussianizer) is Power for m in model[1:]
    )
    h = torch.nn.functional.rms_norm(model[0](u), (7,))
    lmbda = newton_lambda(model[0](u), 1)[:, None]
    torch.testing.assert_close(
        model[1](model[0](u)),
        yeo_johnson(h, lmbda) * model[1].weight,
        rtol=1e-4,
        atol=1e-4,
    )
    off = to_normality(copy.deepcopy(plain), alpha=0.0)
    torch.testing.assert_close(off(u), expected)
    back, report = to_plain(model, return_report=True)
    assert len(report.replaced) == 2 and str(back) == text
    assert torch.equal(back(u), expected)
    assert not any("eps" in k for m in back[1:] for k in vars(m) if k != "eps")


RECOGNIZED = pytest.mark.parametrize(
    "recognized",
    [hybrids._in_backward, hybrids._backward_above],
    ids=["number", "name"],
)


@RECOGNIZED
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "order", [(0, 1, 2), (2, 1, 0), None, "nested"], ids=str
)
def test_renormalization_computed_again(
    order, reentrant, recognized, monkeypatch
):
    """Several passes before their backward passes, in either order, all at
    once, and checkpoints within checkpoints: gradients and averages as without.
    """
    monkeypatch.setattr(hybrids, "_in_backward", recognized)

    def step(checkpointed):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(5, 5, 1),
            BatchReNorm(5),
            nn.ReLU(),
            nn.Conv2d(5, 5, 1),
            BatchReNorm(5, affine=False),
            nn.Tanh(),
        )
        again = functools.partial(checkpoint, use_reentrant=reentrant)
        run = (
            net
            if not checkpointed
            else functools.partial(
                again,
                net
                if order != "nested"
                else lambda x: again(net[3:], again(net[:3], x)),
            )
        )
        us = [
            images((3, 5, 2, 7), seed, torch.float32).requires_grad_()
            for seed in range(3)
        ]
        for _ in range(2):  # the same batches, other averages
            losses = [run(u).pow(3).sum() for u in us]
            for i in order if isinstance(order, tuple) else ():
                losses[i].backward()
            if not isinstance(order, tuple):
                sum(losses).backward()
        return [*(t.grad for t in (*us, *net.parameters())), *net.buffers()]

    for a, b in zip(step(True), step(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@RECOGNIZED
def test_renormalization_refuses_what_it_cannot_tell(recognized, monkeypatch):
    monkeypatch.setattr(hybrids, "_in_backward", recognized)
    layer, again = (
        BatchReNorm(3),
        functools.partial(checkpoint, use_reentrant=False),
    )
    drawn = lambda: torch.randn(4, 3, requires_grad=True)
    u = drawn()
    losses = [again(layer, u).pow(3).sum() for _ in range(2)]
    with pytest.raises(RuntimeError, match="one of 2 pairs.*same batch"):
        losses[0].backward()
    losses = [again(layer, drawn()).sum() for _ in range(33)]
    losses[1].backward()
    with pytest.raises(RuntimeError, match="none of the layer's last 32"):
        losses[0].backward()
    u = torch.full((4, 3), torch.nan, requires_grad=True)  # is known, too
    again(layer, u).sum().backward()
    assert u.grad.isnan().all()


HALF = pytest.mark.parametrize(
    "dtype, rounding",
    [
        (torch.float64, 0),
        (torch.float32, 0),
        (torch.bfloat16, 2**-8),
        (torch.float16, 2**-11),
    ],
    ids=str,
)


ACTED = pytest.mark.parametrize("apply_act", [True, False])


TIMM = pytest.mark.parametrize(
    "ours, theirs, channels",
    [
        (
            lambda act: FilterResponseNorm(5, act, eps=1e-5),
            lambda layers, act: layers.FilterResponseNormTlu2d(5, act),
            5,
        ),
        (
            lambda act: EvoNorm2d(6, 3, act),
            lambda layers, act: layers.EvoNorm2dS0(6, groups=3, apply_act=act),
            6,
        ),
    ],
    ids=["filter response", "evonorm"],
)


@TIMM
@ACTED
@HALF
def test_it_is_timm_s(ours, theirs, channels, apply_act, dtype, rounding):
    theirs = moved(theirs(installed("timm.layers"), apply_act).to(dtype))
    ours = ours(apply_act).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    u = (images((3, channels, 2, 7)) - 1).to(dtype)
    found, expected = (step(f, u) for f in (ours, theirs))
    close = 2e-6 + 15 * rounding
    torch.testing.assert_close(found[0], expected[0], rtol=close, atol=close)
    if not rounding:  # half precision ties elsewhere; theirs is in float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@TIMM
def test_timm_s_layers_are_converted_and_back(ours, theirs, channels):
    plain = nn.Sequential(
        nn.Conv2d(channels, channels, 1),
        moved(theirs(installed("timm.layers"), True)),
    )
    u = images((3, channels, 2, 7), dtype=torch.float32)
    expected, state, cls = plain(u), plain.state_dict(), type(plain[1])
    name = type(ours(True)).__name__
    assert [r.after for r in survey(plain).replaced] == [name]
    off = to_normality(copy.deepcopy(plain), alpha=0.0)
    torch.testing.assert_close(off(u), expected)
    assert not to_plain(off, return_report=True)[1].notes
    model = to_normality(plain, noise=0.4)
    assert type(model[1]) is type(ours(True)) and model[1].eps == 1e-5
    assert not torch.allclose(model.eval()(u), expected, atol=1e-2)
    assert list(model.state_dict()) == list(state) and f"{name}(" in str(model)
    with pytest.warns(UserWarning, match="transform is dropped"):
        back = to_plain(model)
    assert type(back[1]) is cls and torch.equal(back(u), expected)


# ---- what they share --------------------------------------------------------


@pytest.mark.parametrize("gaussianizer", [Power(), Chain()], ids=str)
@STANDARDIZED
def test_a_transform_comes_after_the_normalizer(name, gaussianizer):
    """Composed by hand: plain values, then the transform with parameters of the
    standardized set, then γ and β and what follows.
    """
    last = name == "rms"
    u = images((7, 3, 5) if last else (3, 5, 2, 7))
    layer = moved(made(name, gaussianizer=gaussianizer, eps=1e-3).double())
    plain = made(name, eps=1e-3).double()
    h, unit = quiet(plain)(u), SETS[name]
    k = h - h.mean(unit, keepdim=True)
    k = k / k.square().mean(unit, keepdim=True).sqrt()
    x = gaussianizer.apply(h, gaussianizer.estimate(k, unit))
    wide = (lambda p: p) if last else lambda p: p.view(-1, 1, 1)
    x = x * wide(layer.weight)
    x = x if layer.bias is None else x + wide(layer.bias)
    if name == "frn":
        x = torch.maximum(x, wide(layer.tau))
    torch.testing.assert_close(layer(u), x, rtol=1e-7, atol=1e-7)


@STANDARDIZED
def test_noise_is_scaled_by_the_set_and_only_in_training(name):
    layer = quiet(made(name, noise=0.5, gaussianizer=Identity()))
    plain, unit = quiet(made(name)), SETS[name]
    u = images(
        (64, 20, 5) if name == "rms" else (16, 5, 20, 20), dtype=torch.float32
    )
    torch.manual_seed(0)
    added = layer(u) - plain(u)
    h = plain(u).detach()
    scale = 0.5 * (h - h.mean(unit, keepdim=True)).abs().mean(unit, True)
    assert abs((added / scale).std().item() - 1) < 0.05
    assert torch.equal(layer.eval()(u), layer(u))


@EACH
@pytest.mark.parametrize("options", [{}, {"gaussianizer": Power()}], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_of_finite_differences(name, options, training):
    shape = {"rms": (3, 2, 5), "evonorm": (2, 5, 3, 1)}.get(name, (2, 5, 3))
    layer = quiet(made(name, **options).double()).train(training)
    if name == "renorm":  # what is constant to its gradient
        layer.r_max, layer.d_max = 1.0, 0.0
    names = [n for n, _ in layer.named_parameters()]
    f = lambda u, *p: torch.func.functional_call(layer, dict(zip(names, p)), u)
    assert torch.autograd.gradcheck(
        f, (images(shape).requires_grad_(), *layer.parameters())
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EACH
def test_under_autocast_a_model_runs_and_statistics_are_wide(name, dtype):
    """The error is that of rounding input and output: at most three times that
    of PyTorch's batch norm or layer norm, there.
    """
    last = name == "rms"
    layer = quiet(made(name, gaussianizer=Power()))
    beside = nn.RMSNorm(5) if last else nn.BatchNorm2d(5)
    first = nn.Linear(5, 5) if last else nn.Conv2d(5, 5, 1)
    u = images((5, 3, 5) if last else (3, 5, 2, 7), dtype=torch.float32)
    errors, u = [], u.requires_grad_()
    for of in (layer, beside):
        exact = copy.deepcopy(of).double()
        with torch.autocast("cpu", dtype=dtype):
            x = first(u)
            out = of(x)
        assert x.dtype is dtype
        wide = exact(x.detach().double())
        errors.append((out.double() - wide).abs().max() / wide.abs().max())
        out.float().square().sum().backward()
        assert out.dtype is dtype or of is beside
    assert errors[0] < 3 * errors[1] + 1e-6
    assert u.grad.isfinite().all() and layer.weight.grad.dtype is torch.float32


@EACH
def test_channels_last_stays_and_changes_nothing(name):
    if name == "rms":
        pytest.skip("its channels are last already")
    layer = moved(made(name, gaussianizer=Power()))
    u = images((3, 5, 4, 7), dtype=torch.float32)
    out = copy.deepcopy(layer)(u)
    last = u.to(memory_format=torch.channels_last)
    found = layer(last)
    torch.testing.assert_close(found, out, rtol=1e-5, atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)


@FOLLOWS
@EACH
def test_it_compiles(name):
    layer = moved(made(name, gaussianizer=Power()))
    shape = (3, 2, 5) if name == "rms" else (3, 5, 2, 7)
    u, twin = images(shape, dtype=torch.float32), copy.deepcopy(layer)
    # averages that a gradient depends on are read between two graphs
    compiled = torch.compile(
        twin, fullgraph=name != "renorm", backend="aot_eager"
    )
    for training in (True, False):
        layer.train(training), twin.train(training)
        found = [step(f, u, leaves=()) for f in (layer, compiled)]
        torch.testing.assert_close(*found, rtol=2e-4, atol=2e-4)
    torch.compiler.reset()


# ---- one part more ----------------------------------------------------------


def renormalized(u, mean, std, r_max, d_max, eps):
    "Ioffe's Algorithm 1, channel by channel; and the averages' new values."
    out, now = torch.empty_like(u), []
    for c in range(u.shape[1]):
        values = [float(v) for v in u[:, c].flatten()]
        own = sum(values) / len(values)
        root = (sum((v - own) ** 2 for v in values) / len(values) + eps) ** 0.5
        r = min(max(root / std[c], 1 / r_max), r_max)
        d = min(max((own - mean[c]) / std[c], -d_max), d_max)
        out[:, c] = (u[:, c] - own) / root * r + d
        now.append((own, root))
    return out, now


@pytest.mark.parametrize(
    "bounds", [(1.0, 0.0), (1.3, 0.4), (3.0, 5.0)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_renormalization_is_its_algorithm(shape, bounds):
    layer = BatchReNorm(5, 0.01, 0.2, r_max=bounds[0], d_max=bounds[1]).double()
    moved(layer)
    wide = lambda p: torch.as_tensor(p).view(-1, *(1,) * (len(shape) - 2))
    affine = lambda x: x * wide(layer.weight) + wide(layer.bias)
    mean, std = [0.0] * 5, [1.0] * 5
    for seed in range(3):
        u = images(shape, seed)
        expected, now = renormalized(u, mean, std, *bounds, 0.01)
        torch.testing.assert_close(layer(u), affine(expected))
        mean, std = (
            [0.8 * a + 0.2 * n[i] for a, n in zip(old, now)]
            for i, old in enumerate((mean, std))
        )
    torch.testing.assert_close(layer.running_mean.tolist(), mean)
    torch.testing.assert_close(layer.running_std.tolist(), std)
    assert layer.num_batches_tracked == 3
    torch.testing.assert_close(
        layer.eval()(u), affine((u - wide(mean)) / wide(std))
    )


def renormalizing(u, **changed):
    layer = BatchReNorm(3)
    for name, value in changed.items():
        setattr(layer, name, value)
    return layer(u)


test_renormalization_refuses = refusals(
    [
        (lambda: BatchReNorm(3, r_max=0.5), ValueError, "expected r_max of at"),
        (lambda: BatchReNorm(3, d_max=-1), ValueError, "expected r_max of at"),
        # found out when it is used
        (
            lambda: renormalizing(torch.randn(4, 3), r_max=0.2),
            ValueError,
            "r_max=0.2",
        ),
        (
            lambda: renormalizing(torch.randn(1, 3)),
            ValueError,
            "more than one value per channel",
        ),
    ]
)


def test_renormalization_averages_and_forgets():
    layer = BatchReNorm(3, momentum=None)
    batches = [images((4, 3), seed, torch.float32) for seed in range(2)]
    for u in batches:
        layer(u)
    roots = [(u.var(0, correction=0) + 1e-5).sqrt() for u in batches]
    torch.testing.assert_close(layer.running_std, sum(roots) / 2)
    before, bad = layer.running_std.clone(), torch.randn(4, 3)
    bad[0, 1], layer.momentum = torch.inf, 0.1
    layer(bad)
    assert layer.running_std.isfinite().all()
    assert layer.running_std[1] == before[1]
    layer.reset_running_stats()
    assert (layer.running_std == 1).all() and layer.num_batches_tracked == 0


def test_evonorm_transforms_before_its_gate():
    layer = EvoNorm2d(6, 2, eps=1e-3, gaussianizer=Power()).double()
    u = images((3, 6, 2, 7))
    parts = u.reshape(3, 2, -1)
    h = parts / (parts.var(2, correction=0, keepdim=True) + 1e-3).sqrt()
    x = yeo_johnson(h, newton_lambda(parts, 2)[..., None]).reshape(u.shape)
    torch.testing.assert_close(layer(u), x * torch.sigmoid(u))
    with pytest.raises(ValueError, match="choose a divisor"):
        EvoNorm2d(6, 4)
    with pytest.raises(ValueError, match="given a shape of"):
        layer(u[0])


# ---- the map ----------------------------------------------------------------


@pytest.mark.parametrize("name", NORMALIZERS)
def test_the_axes_of_a_point_are_those_of_its_layer(name):
    """One element is moved: its mean set moves, and every deviation in which
    there is one of these.
    """
    point, shape = NORMALIZERS[name], (3, 6, 2, 5)
    layer = point.make(shape[1:]).double()
    quiet(layer)
    if name == "renorm":  # else the batch's statistics cancel
        layer.r_max, layer.d_max = 1.0, 0.0
    u = images(shape)
    bumped = u.clone()
    bumped[0, 0, 0, 0] += 1
    changed = layer(u) != layer(bumped)
    if name == "IterNorm":  # a matrix: the channels of a group
        assert changed.all()
        return

    def number(letters):
        "Of the set that each element belongs to."
        if letters == "–":
            return torch.arange(u.numel()).view(shape)
        of = [
            torch.arange(n).view([-1 if d == i else 1 for d in range(4)])
            for i, n in enumerate(shape)
        ]
        found = torch.zeros(shape, dtype=torch.long)
        for letter, part, n in zip("NCHW", of, shape):
            if letter == "C" and "C/G" in letters:
                part = part // (
                    6
                    // getattr(layer, "num_groups", getattr(layer, "groups", 0))
                )
            elif letter in letters.split():
                continue
            found = found * n + part
        return found

    mean, scale = number(point.mean), number(point.deviation)
    assert torch.equal(
        changed, torch.isin(scale, scale[mean == mean[0, 0, 0, 0]])
    )
