"""The kernels for a GPU against the definition in float64 on a CPU.

    python -m pytest --noconftest tests/layers/on_gpu.py

On a machine with a GPU they run there; without one this sets TRITON_INTERPRET,
and Triton's interpreter runs them on the CPU. It must be set before Triton is
imported, so `test_gpu_kernels.py` runs this file in a process of its own.
"""

import copy
import os
from unittest import mock

import numpy as np
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if CUDA else "cpu"

import pytest  # noqa: E402

import normalnorm as nn  # noqa: E402
from normalnorm.layers import core  # noqa: E402
from normalnorm.layers.backends import (  # noqa: E402
    Normalization,
    compute,
    normalize,
    set_backend,
)
from normalnorm.layers.core import Rule  # noqa: E402
from normalnorm.layers.engines import gpu  # noqa: E402
from normalnorm.theory.newton import Over  # noqa: E402

if not CUDA:
    from triton.runtime import interpreter as triton_interpreter

    # It patches `triton.language` anew in each call of a function within a
    # kernel, a third of its time; once a launch and module is the same.
    patched: set[int] = set()
    launch = triton_interpreter.GridExecutor.__call__

    def of_a_kernel(self, *arguments, **named):
        patched.clear()
        return launch(self, *arguments, **named)

    def within_a_kernel(self, *arguments, **named):
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            triton_interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    triton_interpreter.GridExecutor.__call__ = of_a_kernel
    triton_interpreter.InterpretedFunction.__call__ = within_a_kernel

# of output, input gradient, and all else, relative to the largest value;
# Triton's interpreter cuts half precision off where a GPU rounds
LIMITS = {
    torch.float32: (4e-6, 4e-6, 2e-5),
    torch.bfloat16: (9e-3, 9e-3, 2e-2),
    torch.float16: (2e-3, 2e-3, 4e-3),
}
FLOAT, BFLOAT, HALF = LIMITS
EXACT = torch.float64
LAST = torch.channels_last
SEED = 2**61 + 12345


@pytest.fixture(autouse=True)
def by_the_kernels():
    with set_backend("gpu"):
        yield


def same_seed(*_, device=None, **__):
    return torch.tensor(SEED, device=device)


def made(make, shape, dtype=FLOAT, last=False, train=True, **settings):
    "A layer with parameters of its own, an input and a gradient."
    torch.manual_seed(0)
    layer = make(**settings).train(train)
    for p in layer.parameters():
        p.data += 0.3 * torch.randn_like(p)
    for b in layer.buffers():
        if b.dtype.is_floating_point:
            b.data += 0.2 * torch.rand_like(b)
    x, dy = torch.randn(shape).exp() + 1, torch.randn(shape)
    x, dy = x.to(dtype), dy.to(dtype)
    return layer, x.to(memory_format=LAST) if last else x, dy


def results(layer, x, dy):
    "Output, gradients, averages; and what computed them."
    u = x.detach().requires_grad_()
    with mock.patch.object(torch, "randint", same_seed):
        y = layer(u)
    learned = [p for p in layer.parameters() if p.requires_grad]
    grads = torch.autograd.grad(y, [u, *learned], dy)
    averages = [b for b in layer.buffers() if b.dtype.is_floating_point]
    return [y.detach(), *grads, *averages]


def close(layer, x, dy, again=False):
    exact = copy.deepcopy(layer).double()
    with set_backend("eager"):
        exact = results(exact, x.double(), dy.double())
    ours = layer.to(DEVICE)
    twin = copy.deepcopy(ours)
    forward = gpu.Launch.forward
    with mock.patch.object(gpu.Launch, "forward", autospec=True) as called:
        called.side_effect = forward
        found = results(ours, x.to(DEVICE), dy.to(DEVICE))
    assert called.call_count == 1
    first, second, others = LIMITS[x.dtype]
    for k, (a, e) in enumerate(zip(found, exact, strict=True)):
        far = (a.double().cpu() - e).abs().max() / e.abs().max().clamp(min=1e-3)
        assert far <= (first, second, *[others] * 9)[k], (k, far)
    if again:
        for a, b in zip(found, results(twin, x.to(DEVICE), dy.to(DEVICE))):
            assert torch.equal(a, b)


LAYERS = {
    "layer": (lambda **k: nn.LayerNormalNorm(197, **k), (3, 5, 197), False),
    "layer, even": (lambda **k: nn.LayerNormalNorm(64, **k), (9, 64), False),
    "layer, long": (
        lambda **k: nn.LayerNormalNorm(1500, **k),
        (5, 1500),
        False,
    ),
    "long, even": (lambda **k: nn.LayerNormalNorm(2048, **k), (5, 2048), False),
    "three of a row": (lambda **k: nn.LayerNormalNorm(3, **k), (5, 3), False),
    "batch": (lambda **k: nn.BatchNormalNorm2d(6, **k), (3, 6, 4, 4), False),
    "batch, 7": (lambda **k: nn.BatchNormalNorm2d(5, **k), (8, 5, 7, 7), False),
    "batch, wide": (
        lambda **k: nn.BatchNormalNorm2d(3, **k),
        (2, 3, 33, 40),
        False,
    ),
    "columns": (lambda **k: nn.BatchNormalNorm1d(33, **k), (16, 33), False),
    "last": (lambda **k: nn.BatchNormalNorm2d(6, **k), (3, 6, 4, 4), True),
    "last, 7": (lambda **k: nn.BatchNormalNorm2d(40, **k), (2, 40, 7, 7), True),
    "group": (lambda **k: nn.GroupNormalNorm(3, 12, **k), (3, 12, 5, 4), False),
    "instance": (
        lambda **k: nn.InstanceNormalNorm2d(5, affine=True, **k),
        (3, 5, 6, 6),
        False,
    ),
    "instance, followed": (
        lambda **k: nn.InstanceNormalNorm2d(5, track_running_stats=True, **k),
        (3, 5, 6, 6),
        False,
    ),
}
RULES = [
    (0.0, "scaled", 1.0),
    (0.4, "scaled", 1.0),
    (0.3, "dropout", 0.5),
    (0.4, "unscaled", 1.0),
    (0.4, "scaled", 0.0),
]


CASES = [
    (name, rule)
    for name in LAYERS
    for rule in (RULES if name in ("layer", "batch", "last") else RULES[1:2])
]


@pytest.mark.parametrize("name, rule", CASES)
def test_as_the_definition(name, rule):
    "And the same bits again."
    make, shape, last = LAYERS[name]
    rule = dict(zip(("noise", "noise_kind", "alpha"), rule))
    close(*made(make, shape, last=last, **rule), again=rule["alpha"] == 1.0)


@pytest.mark.parametrize("dtype", [BFLOAT, HALF])
@pytest.mark.parametrize("name", ["layer", "columns", "last", "group"])
def test_half_precision(name, dtype):
    make, shape, last = LAYERS[name]
    close(*made(make, shape, dtype, last, noise=0.4))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_evaluation(last, alpha):
    make, shape, _ = LAYERS["batch"]
    close(*made(make, shape, last=last, train=False, alpha=alpha, noise=0.4))


@pytest.mark.parametrize("name", ["group", "instance", "layer, even"])
@pytest.mark.parametrize("longest", [(4, 4), (1 << 20, 4)])
def test_units_too_long_for_one_program(name, longest):
    "Only a layer's weights, one an element, keep it in rows."
    make, shape, last = LAYERS[name]
    names = mock.patch.multiple(gpu, FORWARD=longest[0], BACKWARD=longest[1])
    gpu._prepared.cache_clear()
    with names:
        if name.startswith("layer") and longest[0] == 4:
            u = torch.ones(shape, device=DEVICE)
            w = torch.ones(shape[-1:], device=DEVICE)
            assert compute(Normalization(u, Over(-1), weight=w)) is None
        else:
            close(*made(make, shape, last=last, noise=0.4))
    gpu._prepared.cache_clear()


@pytest.mark.parametrize("last", [False, True])
def test_many_programs_of_a_unit(last):
    "Their parts are merged once for all; the last has fewer tiles, or none."
    layer, x, dy = made(
        lambda **k: nn.BatchNormalNorm2d(4, **k),
        (2, 4, 8, 9),
        last=last,
        noise=0.4,
    )
    programs = 6 if last else 16
    more = mock.patch.dict(gpu.CHOSEN, programs=programs, elements=16, units=4)
    with more, mock.patch.object(gpu, "MANY", 2):
        close(layer, x, dy)


@pytest.mark.parametrize("offset", [0, 3, 4, 2**33 + 1])
@pytest.mark.parametrize("length", [8, 7])
def test_noise_is_the_library_s(offset, length):
    u = torch.randn(5, length)
    rule, seed = Rule(noise=0.4), torch.tensor(SEED)
    exact, _ = core.normalize(
        u.double(), Over(-1), rule, seed=seed, offset=offset
    )
    found = compute(
        Normalization(
            u.to(DEVICE), Over(-1), rule, seed=seed.to(DEVICE), offset=offset
        )
    )
    assert (found.cpu() - exact).abs().max() < 1e-5


def rows_of():
    draw = torch.Generator().manual_seed(3)
    some = torch.randn(64, generator=draw)
    return {
        "far from 0": some + 1e4,
        "one-hot": torch.eye(64)[5],
        "tiny": some * 1e-20,
        "outlier": torch.cat([some[:63], torch.tensor([1e6])]),
        "lognormal": (2 * some).exp(),
        "symmetric": torch.cat([some[:32], -some[:32]]),
    }


@pytest.mark.parametrize("name", rows_of())
def test_hard_rows(name):
    "Not much farther from float64 than the definition in float32."
    u = rows_of()[name].repeat(2, 1)
    exact, _ = core.normalize(u.double(), Over(-1), Rule())
    plain, _ = core.normalize(u, Over(-1), Rule())
    found = compute(Normalization(u.to(DEVICE), Over(-1))).cpu()
    bound = 4 * (plain - exact).abs().max() + 4e-6 * exact.abs().max()
    assert (found - exact).abs().max() <= bound


def test_rows_that_have_no_answer():
    u = torch.randn(3, 8)
    u[0], u[1, 2], u[2] = 5.0, torch.nan, torch.tensor([3e38, -3e38] * 4)
    bias = torch.arange(8.0)
    found = compute(
        Normalization(u.to(DEVICE), Over(-1), bias=bias.to(DEVICE))
    ).cpu()
    assert torch.equal(found[0], bias)
    assert found[1:].isnan().all()


def test_averages_stay_where_a_value_is_not_finite():
    layer, x, dy = made(*LAYERS["batch"][:2])
    x[0, 1, 0, 0], x[1, 2, 0, 0] = torch.inf, torch.nan
    before = layer.running_mean.clone()
    found = results(layer.to(DEVICE), x.to(DEVICE), dy.to(DEVICE))
    same = (found[-3].cpu() == before).tolist()
    assert same == [False, True, True, False, False, False]


@pytest.mark.parametrize("momentum", [None, 0.25])
@pytest.mark.parametrize("buffers", [FLOAT, BFLOAT])
def test_averages_of_other_kinds(momentum, buffers):
    "Cumulative ones, and those that the kernel does not move itself."
    found = []
    for name, device in (("eager", "cpu"), ("gpu", DEVICE)):
        layer, x, _ = made(*LAYERS["batch"][:2], momentum=momentum)
        for key, b in layer.named_buffers():
            if b.dtype.is_floating_point:
                setattr(layer, key, b.to(buffers))
        with set_backend(name):
            for k in range(2):
                layer.to(device)(x.to(device) + k)
        found.append([b.cpu().float() for b in layer.buffers()])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)


def test_momentum_as_a_tensor():
    found = []
    for momentum in (0.25, torch.tensor(0.25, device=DEVICE)):
        x = made(*LAYERS["batch"][:2])[1].to(DEVICE)
        running = torch.zeros(6, device=DEVICE), torch.ones(6, device=DEVICE)
        compute(
            Normalization(
                x,
                Over((0, 2, 3)),
                axis=1,
                running=(*running, None),
                momentum=momentum,
            )
        )
        found.append(torch.cat(running))
    assert torch.equal(*found) and not found[0].eq(0).any()


def test_strides():
    layer, x, dy = made(*LAYERS["layer"][:2], noise=0.4)
    wide = torch.stack([x, x], -1)[..., 0]
    assert not wide.is_contiguous()
    close(layer, wide, dy.transpose(0, 1).contiguous().transpose(0, 1))


def test_float32_weights_beside_half_precision():
    layer, x, dy = made(*LAYERS["layer"][:2])
    close(layer, x.bfloat16(), dy.bfloat16())
    assert layer.weight.dtype == FLOAT


def test_statistics_are_results():
    u = (torch.randn(4, 9).exp()).to(DEVICE)
    out, mean, var, lmbda = compute(Normalization(u, Over(-1), wanted=True))
    exact, used = core.normalize(u.double().cpu(), Over(-1), Rule())
    for a, e in ((mean, used.mean), (var, used.var), (lmbda, used.lmbda)):
        assert a.shape == e.shape
        torch.testing.assert_close(a.double().cpu(), e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("train", [True, False])
def test_second_derivatives_are_the_definition_s(train):
    found = []
    for name, device in (("eager", "cpu"), ("gpu", DEVICE)):
        layer, x, dy = made(*LAYERS["batch"][:2], train=train, noise=0.0)
        layer, u = layer.to(device), x.to(device).requires_grad_()
        with set_backend(name):
            y = layer(u)
            (g,) = torch.autograd.grad(y.sin().sum(), u, create_graph=True)
            found.append(torch.autograd.grad(g.square().sum(), u)[0].cpu())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_a_frozen_part_gets_no_gradient():
    layer, x, dy = made(*LAYERS["group"][:2], noise=0.4)
    layer.weight.requires_grad_(False)
    close(layer, x, dy)
    layer.bias.requires_grad_(False)
    close(layer, x, dy)


def test_without_an_affine_map():
    close(
        *made(
            lambda **k: nn.LayerNormalNorm(197, elementwise_affine=False, **k),
            (4, 197),
            noise=0.4,
        )
    )
    close(
        *made(
            lambda **k: nn.BatchNormalNorm2d(5, affine=False, **k), (4, 5, 3, 3)
        )
    )


def test_what_is_not_covered_is_declined():
    u = torch.randn(4, 8, device=DEVICE)
    for problem in (
        Normalization(u.double(), Over(-1)),
        Normalization(u, Over(-1), Rule.of(steps=2)),
        Normalization(u, Over(-1), Rule.of(safeguard=True)),
        Normalization(u[:0], Over(-1)),
    ):
        assert compute(problem) is None


def test_saved_tensors_are_looked_at():
    layer, x, dy = made(*LAYERS["layer"][:2])
    u = x.to(DEVICE).requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: t, lambda t: t.double()):
        y = layer.to(DEVICE)(u)
    with pytest.raises(RuntimeError, match="came back with"):
        y.sum().backward()


def test_float16_does_not_overflow():
    layer, x, dy = made(*LAYERS["layer"][:2], HALF)
    layer.weight.data *= 1e6
    y = layer.to(DEVICE)(x.to(DEVICE))
    assert y.isfinite().all() and y.abs().max() == 65504


@pytest.mark.parametrize("name", ["layer", "batch"])
def test_an_output_of_another_dtype(name):
    "As under autocast: half precision is read, float32 written."
    _, x, dy = made(*LAYERS[name][:2], dtype=BFLOAT)
    found = []
    for device, dtype, to in ((DEVICE, BFLOAT, FLOAT), ("cpu", *[EXACT] * 2)):
        u = x.to(device, dtype).requires_grad_()
        seed = torch.tensor(SEED, device=device)
        problem = Normalization(
            u, Over(-1 if name == "layer" else (0, 2, 3)), Rule(noise=0.4)
        )._replace(seed=seed, out_dtype=to)
        with set_backend("gpu" if to == FLOAT else "eager"):
            out = normalize(problem)[0]
        assert out.dtype == to
        v = dy.to(out).requires_grad_()
        (first,) = torch.autograd.grad(out, u, v, create_graph=True)
        found.append((out, first, *torch.autograd.grad(first, v, dy.to(first))))
    for a, e, limit in zip(*found, (4e-6, 9e-3, 4e-6)):
        assert (a.double().cpu() - e).abs().max() / e.abs().max() < limit
    assert found[0][1].dtype == BFLOAT


@pytest.fixture
def interpreter():
    if CUDA:
        pytest.skip("a GPU has neither its counters nor its errors")
    return pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder


@pytest.mark.parametrize(
    "name, noise, reads",
    [
        ("layer", 0.4, (1, 2)),
        ("long, even", 0.4, (1, 2)),  # a row that is not there is not read
        ("batch", 0.0, (3, 4)),
        ("batch", 0.4, (5, 4)),
        ("last", 0.0, (3, 4)),
        ("last", 0.4, (5, 4)),
    ],
)
def test_passes_over_the_memory(name, noise, reads, interpreter, monkeypatch):
    "As derived: elements of input and gradient; each result is written once."
    make, shape, last = LAYERS[name]
    layer, x, dy = made(make, shape, last=last, noise=noise)
    at = {"load": [], "store": []}
    for kind, places in at.items():
        own = getattr(interpreter, f"create_masked_{kind}")

        def noted(self, to, *rest, own=own, places=places, **named):
            mask = next(r for r in rest if r.data.dtype == bool)
            places.append(to.data[mask.data])
            return own(self, to, *rest, **named)

        monkeypatch.setattr(interpreter, f"create_masked_{kind}", noted)
    passes = lambda kind, t: (
        sum(
            ((t.data_ptr() <= p) & (p < t.data_ptr() + t.nbytes)).sum()
            for p in at[kind]
        )
        / len(x.view(-1) if x.is_contiguous() else x.flatten())
    )
    u = x.requires_grad_()
    y = layer(u)
    assert (passes("load", u), passes("store", y)) == (reads[0], 1)
    dy = dy.to(memory_format=LAST) if last else dy
    (dx,) = torch.autograd.grad(y, u, dy)
    assert passes("load", u) - reads[0] + passes("load", dy) == reads[1]
    assert passes("store", dx) == 1


@pytest.mark.parametrize("of", ["normal", "lognormal", "rectified"])
def test_errors_of_the_unit_for_special_functions(of, interpreter, monkeypatch):
    "PTX's bounds: 2⁻²² for lg2, of the result beyond 2; 2⁻²² of ex2's result."
    draw = np.random.default_rng(0)
    error = lambda x: (draw.integers(0, 2, x.shape) * 2 - 1) * 2.0**-22
    far = {
        "log2": lambda x: error(x) * np.maximum(np.abs(np.log2(x)), 1),
        "exp2": lambda x: error(x) * np.exp2(x),
    }
    for name, more in far.items():
        monkeypatch.setattr(
            interpreter,
            f"create_{name}",
            lambda self, t, name=name, more=more: self.unary_op(
                t, lambda x: (getattr(np, name)(x) + more(x)).astype(x.dtype)
            ),
        )
    torch.manual_seed(0)
    u = torch.randn(16, 197)
    u = {"normal": u, "lognormal": u.exp(), "rectified": u.relu()}[of]
    exact = u.double()
    leaves = u.requires_grad_(), exact.requires_grad_()
    g = torch.randn_like(u)
    outs = (
        compute(Normalization(u, Over(-1))),
        core.normalize(exact, Over(-1))[0],
    )
    grads = [
        torch.autograd.grad(o, t, g.to(o))[0] for o, t in zip(outs, leaves)
    ]
    for a, e in (outs, grads):
        apart = (a.double() - e) / e.abs().max()
        assert apart.abs().max() < 2e-6 and apart.mean().abs() < 1e-7


OPERATORS = torch.ops.normalnorm


@pytest.mark.parametrize("dims", [(-1,), (0,)])
@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_operators_are_the_definition(dims, noise):
    torch.manual_seed(1)
    u, g = torch.randn(2, 6, 5)
    w, b, seed = torch.rand(5) + 0.5, torch.randn(5), torch.tensor(SEED)
    axis = None if dims == (-1,) else 1
    how = (seed, dims, axis, 1e-5, noise, "scaled", 1.0, 0)
    found = []
    for device, dtype in ((DEVICE, FLOAT), ("cpu", torch.float64)):
        leaves = [t.to(device, dtype).requires_grad_() for t in (u, w, b)]
        if dtype == FLOAT:
            given = (how[0].to(device), *how[1:], 9)
            out, _ = OPERATORS.normalize_with_grad(*leaves, *given)
        else:
            rule = Rule(noise=noise)
            out, _ = core.by_autograd(
                leaves[0], Over(dims), rule, *leaves[1:], seed
            )
        of = torch.autograd.grad(out, leaves, g.to(out))
        found.append([t.detach().cpu().double() for t in (out, *of)])
    for a, e in zip(*found):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_operators_of_frozen_layers():
    layer, x, dy = made(*LAYERS["batch"][:2], train=False)
    averages = layer.running_mean, layer.running_var, layer.running_lambda
    layer, given = layer.to(DEVICE), [t.to(DEVICE) for t in averages]
    u = x.to(DEVICE).requires_grad_()
    leaves = u, layer.weight, layer.bias
    out = OPERATORS.evaluate_with_grad(*leaves, *given, layer.eps)
    found = torch.autograd.grad(out, leaves, dy.to(DEVICE))
    with set_backend("eager"):
        exact = torch.autograd.grad(layer(u), leaves, dy.to(DEVICE))
    for a, e in zip(found, exact):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(CUDA, reason="the card's PyTorch leaves layers alone")
def test_a_compiled_layer_has_them():
    layer, x, _ = made(*LAYERS["layer"][:2], noise=0.0)
    graphs = []

    def seen(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    out = torch.compile(layer, backend=seen, fullgraph=True)(x)
    torch.testing.assert_close(out, layer(x), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1 and "normalize_with_grad" in graphs[0]
