"""The normalizers of part 3 beside PyTorch's, timm's, and loops over elements;
in half precision, in memory's other orders, compiled, converted and back.
"""

import copy
import functools
import itertools

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
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_(
                torch.linspace(-0.4, 0.3 + i, p.numel(), dtype=p.dtype).view(
                    p.shape
                )
            )
    return layer


def looped(u, name, eps, mean=None, var=None):
    "Element by element; `mean`, `var`: of a batch before, one a channel."
    out = torch.empty_like(u)
    channels = range(u.shape[1])
    of_channel = [[float(v) for v in u[:, c].flatten()] for c in channels]
    average = lambda values: sum(values) / len(values)
    spread = lambda values: average(
        [(v - average(values)) ** 2 for v in values]
    )
    centred = torch.empty_like(u)
    for b, c in itertools.product(range(len(u)), channels):
        at = (
            average([float(v) for v in u[b].flatten()])
            if name == "lmbv"
            else average(of_channel[c])
            if mean is None
            else float(mean[c])
        )
        centred[b, c] = u[b, c] - at
    for b, c in itertools.product(range(len(u)), channels):
        share = centred[b] if name == "bmlv" else centred[:, c]
        square = (
            float(var[c])
            if var is not None
            else spread([float(v) for v in share.flatten()])
        )
        out[b, c] = centred[b, c] / (square + eps) ** 0.5
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["bmlv", "lmbv"])
def test_crosses_are_loops(name, shape):
    "In training, after two steps in evaluation, and without averages."
    layer = moved(made(name, eps=0.01).double())
    affine = lambda x: (
        x * layer.weight.view(-1, *(1,) * (len(shape) - 2))
        + layer.bias.view(-1, *(1,) * (len(shape) - 2))
    )
    average = 0.0 if name == "bmlv" else 1.0
    for seed in (1, 2):
        u = images(shape, seed)
        torch.testing.assert_close(
            layer(u), affine(looped(u, name, 0.01)), rtol=1e-10, atol=1e-10
        )
        by_channel = u.movedim(1, 0).flatten(1)
        if name == "lmbv":
            by_channel = (
                (u - u.flatten(1).mean(1).view(-1, *(1,) * (len(shape) - 1)))
                .movedim(1, 0)
                .flatten(1)
            )
        value = by_channel.mean(1) if name == "bmlv" else by_channel.var(1)
        average = 0.9 * average + 0.1 * value
    buffer = layer.running_mean if name == "bmlv" else layer.running_var
    torch.testing.assert_close(buffer, average)
    given = dict(mean=buffer) if name == "bmlv" else dict(var=buffer)
    torch.testing.assert_close(
        layer.eval()(u),
        affine(looped(u, name, 0.01, **given)),
        rtol=1e-10,
        atol=1e-10,
    )
    bare = made(name, eps=0.01, affine=False, track_running_stats=False)
    assert not list(bare.state_dict())
    for training in (True, False):
        torch.testing.assert_close(
            bare.train(training)(u),
            looped(u, name, 0.01),
            rtol=1e-10,
            atol=1e-10,
        )


@pytest.mark.parametrize(
    "options", [dict(momentum=None), dict(bias=False)], ids=str
)
@pytest.mark.parametrize("name", ["bmlv", "lmbv"])
def test_settings_of_a_cross(name, options):
    layer = made(name, **options)
    for seed in range(3):
        layer(images(seed=seed, dtype=torch.float32))
    if options.get("momentum", 0) is None:
        found = [
            v for n, v in layer.named_buffers() if n.startswith("running_")
        ][0]
        u = [images(seed=seed) for seed in range(3)]
        value = [
            x.transpose(0, 1).flatten(1).mean(1)
            if name == "bmlv"
            else (x - x.mean((1, 2, 3), True)).transpose(0, 1).flatten(1).var(1)
            for x in u
        ]
        torch.testing.assert_close(
            found.double(), sum(value) / 3, rtol=1e-5, atol=1e-5
        )
    assert (layer.bias is None) == ("bias" in options)


@pytest.mark.parametrize("name", ["bmlv", "lmbv"])
def test_a_cross_refuses_with_reasons(name):
    layer = made(name)
    for u, words in (
        (torch.ones(3, 4), "num_features=5"),
        (torch.ones(5), "expects an input of shape"),
        (torch.ones(1, 5), "more than one value per channel"),
        (torch.ones(3, 5).double(), "one precision"),
        (torch.ones(3, 5).long(), r"\.float\(\)"),
        ("text", "not str"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            layer(u)
    assert layer.eval()(torch.ones(1, 5)).shape == (1, 5)
    assert layer(torch.ones(0, 5)).shape == (0, 5)
    with pytest.raises(ValueError, match="negative"):
        made(name, eps=-1.0)
    before = copy.deepcopy(layer.state_dict())
    u = torch.ones(3, 5)
    u[0, 0] = torch.nan
    layer.train()(u)
    for key, value in layer.state_dict().items():  # what is finite moves
        if key.startswith("running_"):
            stays = value.isfinite() & (value == before[key])
            assert value.isfinite().all()
            assert stays[0] if name == "bmlv" else stays.all()


def test_about_a_point():
    "Values from a point, over a deviation about their own mean."
    u = images()
    for point in (0.0, 2.5, images((1, 5, 1, 1))):
        out, used = normality_norm(u, About((1, 2, 3), point), alpha=0, eps=0.1)
        c = u - point
        expected = (
            c / (c.var((1, 2, 3), correction=0, keepdim=True) + 0.1).sqrt()
        )
        torch.testing.assert_close(out, expected)
    assert torch.autograd.gradcheck(
        lambda x: normality_norm(x, About((0, 1), 0.5))[0],
        images((3, 2)).requires_grad_(),
    )


@pytest.mark.parametrize(
    "dim",
    [Over((2,), (0, 2)), Over((0, 2), (2,)), Over((2,), ()), About((2,), 0.3)],
    ids=["bmlv", "lmbv", "no mean", "about"],
)
def test_the_transform_is_that_of_the_scale_s_set(dim):
    """λ̂ and its safeguard as of the centred values of each set alone, whatever
    mean is subtracted.
    """
    # with long tails on both sides, where a step can do harm
    generator = torch.Generator().manual_seed(0)
    k, by = torch.randn(2, 60, 3, 999, dtype=torch.float64, generator=generator)
    k = k / by.square()
    for options in (
        dict(),
        dict(safeguard=True),
        dict(safeguard=True, steps=3),
    ):
        out, used = normality_norm(k, dim, eps=0.0, **options)
        mean = (
            k.mean(dim.centre, keepdim=True)
            if dim.centre
            else getattr(dim, "point", 0.0)
        )
        c = k - mean
        expected = newton_lambda(c, dim.dim, **options)
        torch.testing.assert_close(
            used.lmbda.squeeze(), expected.squeeze(), rtol=1e-9, atol=1e-9
        )
        h = c / used.var.sqrt()
        torch.testing.assert_close(out, yeo_johnson(h, used.lmbda))
    plain, safe = (
        normality_norm(k, dim, safeguard=s)[1].lmbda for s in (False, True)
    )
    assert dim.dim != (2,) or not torch.equal(plain, safe)


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
    u = (0.01 * images((5, 2, 3, 7))).to(dtype).requires_grad_()
    found = [f(u) for f in (ours, theirs)]
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
    g = torch.randn_like(found[0])
    grads = [
        torch.autograd.grad(y, (u, f.weight), g)
        for y, f in zip(found, (ours, theirs))
    ]
    for a, b in zip(*grads):
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


def test_a_root_mean_square_norm_takes_nested_tensors():
    parts = [images((n, 7), dtype=torch.float32) for n in (2, 5)]
    layer = RootMeanSquareNorm(7)
    for layout in (torch.strided, torch.jagged):
        found = layer(torch.nested.nested_tensor(parts, layout=layout))
        for a, b in zip(found.unbind(), parts):
            torch.testing.assert_close(a, layer(b))
    with pytest.raises(ValueError, match="last axes must be"):
        layer(torch.ones(3, 5))


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
    u = torch.randn(4, 3, requires_grad=True)
    losses = [again(layer, u).pow(3).sum() for _ in range(2)]
    with pytest.raises(RuntimeError, match="one of 2 pairs.*same batch"):
        losses[0].backward()
    losses = [
        again(layer, torch.randn(4, 3, requires_grad=True)).sum()
        for _ in range(33)
    ]
    losses[1].backward()
    with pytest.raises(RuntimeError, match="none of the layer's last 32"):
        losses[0].backward()
    u = torch.full((4, 3), torch.nan, requires_grad=True)  # is known, too
    again(layer, u).sum().backward()
    assert u.grad.isnan().all()


@pytest.mark.parametrize("apply_act", [True, False])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float64, 1e-6),
        (torch.float32, 2e-6),
        (torch.bfloat16, 4e-2),
        (torch.float16, 4e-3),
    ],
    ids=str,
)
def test_filter_response_norm_is_timm_s(dtype, tolerance, apply_act):
    layers = installed("timm.layers")
    theirs = moved(layers.FilterResponseNormTlu2d(5, apply_act).to(dtype))
    ours = FilterResponseNorm(5, apply_act, eps=1e-5).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    u = (images() - 1).to(dtype).requires_grad_()
    found = [f(u) for f in (ours, theirs)]
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
    grads = [
        torch.autograd.grad(y.sin().sum(), (u, *f.parameters()))
        for y, f in zip(found, (ours, theirs))
    ]
    if dtype is torch.float64:  # half precision ties elsewhere
        for a, b in zip(*grads):  # theirs is in float32 within
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_timm_s_filter_response_norm_is_converted_and_back():
    layers = installed("timm.layers")
    plain = nn.Sequential(
        nn.Conv2d(5, 5, 1), moved(layers.FilterResponseNormTlu2d(5))
    )
    u = images(dtype=torch.float32)
    expected, state = plain(u), plain.state_dict()
    assert [r.after for r in survey(plain).replaced] == ["FilterResponseNorm"]
    model = to_normality(plain, noise=0.4)
    assert type(model[1]) is FilterResponseNorm and model[1].eps == 1e-5
    assert model(u).isfinite().all()
    assert not torch.allclose(model.eval()(u), expected, atol=1e-2)
    assert list(model.state_dict()) == list(state)
    assert "FilterResponseNorm(5" in str(model)
    with pytest.warns(UserWarning, match="transform is dropped"):
        back = to_plain(model)
    assert type(back[1]) is layers.FilterResponseNormTlu2d
    assert torch.equal(back(u), expected)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 4)])
def test_a_filter_response_norm_refuses_other_inputs(shape):
    with pytest.raises(ValueError, match="expects an input|channels"):
        FilterResponseNorm(2)(torch.ones(shape))


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
def test_gradients_are_those_of_finite_differences(name):
    shape = {"rms": (3, 2, 5), "evonorm": (2, 5, 3, 1)}.get(name, (2, 5, 3))
    for options in ({}, {"gaussianizer": Power()}):
        layer = quiet(made(name, **options).double())
        if name == "renorm":  # what is constant to its gradient
            layer.r_max, layer.d_max = 1.0, 0.0
        for training in (True, False):
            layer.train(training)

            def f(u, *p):
                return torch.func.functional_call(
                    layer,
                    dict(zip([n for n, _ in layer.named_parameters()], p)),
                    (u,),
                )

            assert torch.autograd.gradcheck(
                f, (images(shape).requires_grad_(), *layer.parameters())
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EACH
def test_under_autocast_a_model_runs_and_statistics_are_wide(name, dtype):
    """The error is that of rounding input and output: at most three times that
    of PyTorch's batch norm or layer norm, there.
    """
    torch.manual_seed(0)
    layer = quiet(made(name, gaussianizer=Power()))
    beside = nn.RMSNorm(5) if name == "rms" else nn.BatchNorm2d(5)
    u = images(
        (5, 3, 5) if name == "rms" else (3, 5, 2, 7), dtype=torch.float32
    ).requires_grad_()
    first = nn.Linear(5, 5) if name == "rms" else nn.Conv2d(5, 5, 1)
    with torch.autocast("cpu", dtype=dtype):
        x = first(u)
        assert x.dtype is dtype
        before = copy.deepcopy(layer)
        outs = [m(x) for m in (layer, beside)]
        assert outs[0].dtype is dtype or outs[0].dtype is outs[1].dtype
        outs[0].float().square().sum().backward()
    assert u.grad.isfinite().all() and layer.weight.grad.dtype is torch.float32
    wide = before.double()(x.detach().double())
    error = (outs[0].double() - wide).abs().max() / wide.abs().max()
    exact = copy.deepcopy(beside).double()(x.detach().double())
    theirs = (outs[1].double() - exact).abs().max() / exact.abs().max()
    assert error < 3 * theirs + 1e-6


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
    u = images(shape, dtype=torch.float32).requires_grad_()
    twin = copy.deepcopy(layer)
    # averages that a gradient depends on are read between two graphs
    compiled = torch.compile(
        twin, fullgraph=name != "renorm", backend="aot_eager"
    )
    for training in (True, False):
        layer.train(training), twin.train(training)
        found = []
        for f in (layer, compiled):
            out = f(u)
            found.append((out, torch.autograd.grad(out.sin().sum(), u)[0]))
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
    wide = lambda p: p.view(-1, *(1,) * (len(shape) - 2))
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
    center, root = (wide(torch.tensor(v, dtype=u.dtype)) for v in (mean, std))
    torch.testing.assert_close(layer.eval()(u), affine((u - center) / root))


def test_renormalization_refuses_and_forgets():
    for options in (dict(r_max=0.5), dict(d_max=-1)):
        with pytest.raises(ValueError, match="expected r_max of at least 1"):
            BatchReNorm(3, **options)
    layer = BatchReNorm(3, momentum=None)
    layer.r_max = 0.2  # found out when it is used
    with pytest.raises(ValueError, match="r_max=0.2"):
        layer(torch.randn(4, 3))
    layer.r_max = 3.0
    with pytest.raises(ValueError, match="more than one value per channel"):
        layer(torch.randn(1, 3))
    for seed in range(2):
        layer(images((4, 3), seed, torch.float32))
    torch.testing.assert_close(
        layer.running_std,
        sum(
            (
                images((4, 3), seed, torch.float32).var(0, correction=0) + 1e-5
            ).sqrt()
            for seed in range(2)
        )
        / 2,
    )
    before = layer.running_std.clone()
    bad = torch.randn(4, 3)
    bad[0, 1] = torch.inf
    layer.momentum = 0.1
    layer(bad)
    assert layer.running_std.isfinite().all()
    assert layer.running_std[1] == before[1]
    layer.reset_running_stats()
    assert (layer.running_std == 1).all() and layer.num_batches_tracked == 0


@pytest.mark.parametrize("apply_act", [True, False])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float64, 1e-5),
        (torch.float32, 2e-6),
        (torch.bfloat16, 6e-2),
        (torch.float16, 6e-3),
    ],
    ids=str,
)
def test_evonorm_is_timm_s(dtype, tolerance, apply_act):
    layers = installed("timm.layers")
    theirs = moved(
        layers.EvoNorm2dS0(6, groups=3, apply_act=apply_act).to(dtype)
    )
    ours = EvoNorm2d(6, 3, apply_act).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    u = (images((3, 6, 2, 7)) - 1).to(dtype).requires_grad_()
    found = [f(u) for f in (ours, theirs)]
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
    if dtype is torch.float32:
        grads = [
            torch.autograd.grad(y.sin().sum(), (u, *f.parameters()))
            for y, f in zip(found, (ours, theirs))
        ]
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_timm_s_evonorm_is_converted_and_back():
    layers = installed("timm.layers")
    plain = nn.Sequential(moved(layers.EvoNorm2dS0(6, groups=3)))
    u = images((3, 6, 2, 7), dtype=torch.float32)
    expected, state = plain(u), plain.state_dict()
    model = to_normality(plain, alpha=0.0)
    assert type(model[0]) is EvoNorm2d and model[0].groups == 3
    torch.testing.assert_close(model(u), expected)
    assert list(model.state_dict()) == list(state)
    back, report = to_plain(model, return_report=True)
    assert type(back[0]) is layers.EvoNorm2dS0 and not report.notes
    assert torch.equal(back(u), expected)
    bent = to_normality(plain)
    assert not torch.allclose(bent(u), expected, atol=1e-2)


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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_propagation_is_its_formula(shape):
    layer = moved(PropagatedNorm(5).double())
    u = images(shape) - 1
    wide = lambda p: p.view(-1, *(1,) * (len(shape) - 2))
    y = (u * wide(layer.weight) + wide(layer.bias)).clamp(min=0)
    torch.testing.assert_close(
        layer(u),
        (y - 0.3989422804014327) / (0.5 - 0.3989422804014327**2) ** 0.5,
    )
    assert torch.equal(layer.eval()(u), layer(u))
    with pytest.raises(ValueError, match="num_features=5"):
        layer(images((3, 4)))


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
