"""The kernel's operators inside torch.compile: against PyTorch's own checks of
an operator, against the definition in float64, against the layers uncompiled.
"""

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from normalnorm.layers import backends, core
from normalnorm.layers.backends import set_backend
from normalnorm.layers.engines import compiler, native, operators
from normalnorm.layers.functional import batch_normal_norm, layer_normal_norm
from normalnorm.layers.normality import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    InstanceNormalNorm2d,
    LayerNormalNorm,
)
from normalnorm.theory.gaussianizers import Chain
from normalnorm.theory.gradient import Identity, Power
from normalnorm.theory.newton import Over
from tests.layers.steps import python, step
from tests.peers import FOLLOWS

pytestmark = [
    FOLLOWS,
    pytest.mark.skipif(
        not native.available(), reason="the kernel cannot be compiled here"
    ),
]
SEED = torch.tensor(7)
OPERATORS = getattr(torch.ops, operators._LIBRARY.ns)
CASES = {  # shape, axes, shape of the weight, axis
    "layer": ((3, 5, 8), (-1,), (8,), None),
    "batch": ((4, 3, 5), (0, 2), (3,), 1),
    "no weight": ((6, 3), (0,), None, 1),
    "a pattern without a traversal": ((3, 4, 5, 2), (0, 2), None, None),
}


@pytest.fixture(autouse=True)
def forget():
    "PyTorch compiles one function for at most eight cases."
    torch.compiler.reset()


def arguments(case, alpha=1.0, noise=0.4, kind="scaled", dtype=torch.float32):
    shape, dim, of, axis = CASES[case]
    torch.manual_seed(0)
    drawn = lambda shape: torch.randn(shape, dtype=torch.float64)
    u = drawn(shape).exp().to(dtype).requires_grad_()
    weight, bias = (
        None if of is None else drawn(of).to(dtype).requires_grad_()
        for _ in range(2)
    )
    return (
        u,
        weight,
        bias,
        SEED if noise else None,
        list(dim),
        axis,
        1e-5,
        noise,
        kind,
        alpha,
        3,
        native.KEPT,
    )


def detached(given):
    return [t.detach() if isinstance(t, torch.Tensor) else t for t in given]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "alpha, noise, kind",
    [(1.0, 0.4, "scaled"), (0.0, 0.0, "scaled"), (0.5, 0.4, "dropout")],
)
def test_pytorch_accepts_the_operator(case, alpha, noise, kind):
    """Schema, fake kernel, derivative, and what AOT autograd makes of it, by
    `torch.library.opcheck`.
    """
    given = arguments(case, alpha, noise, kind)
    torch.library.opcheck(OPERATORS.normalize_with_grad.default, given)
    # those without a derivative, which are what generated code calls
    u, weight, bias, *how = given = detached(given)
    torch.library.opcheck(OPERATORS.normalize.default, given)
    out, numbers = OPERATORS.normalize(*given)
    torch.library.opcheck(
        OPERATORS.normalize_backward.default,
        (out, u, weight, bias, numbers, *how, weight is not None, False),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "alpha, noise, kind",
    [(1.0, 0.4, "scaled"), (0.0, 0.0, "scaled"), (0.5, 0.4, "dropout")],
)
def test_the_operator_against_the_definition(case, alpha, noise, kind):
    "Result, statistics and gradients, in float64, from the same seed."
    single, double = (
        arguments(case, alpha, noise, kind, dtype)
        for dtype in (torch.float32, torch.float64)
    )
    out, numbers = OPERATORS.normalize_with_grad(*single)
    u, weight, bias, seed, dim, axis, eps, *_, offset, _ = double
    rule = core.Rule(eps, noise, kind, Power(alpha) if alpha else Identity())
    problem = backends.Normalization(
        *(u, Over(tuple(dim)), rule, weight, bias, axis),
        seed=seed,
        offset=offset,
    )
    reference, used = core.normalize(*problem.arguments())
    torch.testing.assert_close(out.double(), reference, rtol=2e-4, atol=2e-5)
    g, leaves = torch.randn_like(out), 3 if weight is not None else 1
    found = torch.autograd.grad(out, single[:leaves], g)
    expected = torch.autograd.grad(reference, double[:leaves], g.double())
    torch.testing.assert_close(
        found, expected, rtol=2e-3, atol=2e-4, check_dtype=False
    )
    n = used.mean.numel()
    for a, b in zip(numbers.split(n), (used.mean, used.var, *used.parameters)):
        torch.testing.assert_close(
            a.double(), b.flatten(), rtol=1e-4, atol=1e-5
        )


LAYERS = {
    "layer": (lambda **o: LayerNormalNorm(8, **o), (4, 5, 8)),
    "batch": (lambda **o: BatchNormalNorm2d(3, **o), (4, 3, 5, 5)),
    "instance": (
        lambda **o: InstanceNormalNorm2d(
            3, affine=True, track_running_stats=True, **o
        ),
        (4, 3, 5, 5),
    ),
    "chain": (
        lambda **o: LayerNormalNorm(8, gaussianizer=Chain(), **o),
        (4, 8),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_layer_is_the_layer(name):
    """Output, gradients and buffers, in training, then in evaluation, without
    a graph break, by the default back end. (By another: test_layers.py.)
    """
    make, shape = LAYERS[name]
    u, found = torch.randn(shape).exp(), []
    for compiled in (False, True):
        layer = make(noise=0.0)
        run = torch.compile(layer, fullgraph=True) if compiled else layer
        values = step(run, u)
        layer.eval()
        found.append([*values, run(u).detach(), *layer.state_dict().values()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def graph_of(function, *inputs):
    "What torch.compile reads, as text."
    read = []

    def keep(module, _):
        read.append(str(module.graph))
        return module.forward

    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    return "\n".join(read)


def test_who_gets_the_operator():
    """What the kernel covers; not the eager backend, transforms of torch.func,
    float64, other settings, layers in evaluation, or who inherits from Power.
    """

    class Half(Power):
        def apply(self, h, parameters):
            return super().apply(h, parameters) / 2

    u, layer = torch.randn(4, 8), LayerNormalNorm(8)

    def asked(layer, u=u):
        torch.compiler.reset()  # it keeps eight programs of one code
        return "normalnorm.normalize" in graph_of(layer, u)

    assert asked(layer)
    for chosen in ("eager", "compiled"):
        with set_backend(chosen):
            assert not asked(layer)
    for other in (
        dict(steps=2),
        dict(safeguard=True),
        dict(gaussianizer=Chain()),
        dict(gaussianizer=Half()),
    ):
        assert not asked(LayerNormalNorm(8, **other))
    assert not asked(layer.double(), u.double())
    assert not asked(BatchNormalNorm2d(8).eval(), u[..., None, None])
    plain = LayerNormalNorm(8, noise=0.0)
    slope = lambda v: torch.func.grad(lambda w: plain(w).sin().sum())(v)
    torch.testing.assert_close(
        torch.compile(slope, fullgraph=True, backend="eager")(u), slope(u)
    )


@pytest.mark.parametrize("devices", [("cpu",), ("cuda",)])
@pytest.mark.parametrize("error", [RuntimeError, ImportError])
def test_an_engine_that_cannot_be_had_takes_nothing_away(
    monkeypatch, devices, error
):
    "Automatic ones, of this device or of another, before and after the kernel."
    require = Mock(side_effect=error("not on this machine"))
    known = backends.engines()
    for names in (("toy", *known), (*known, "toy")):
        toy = backends.Engine()
        toy.name, toy.automatic, toy.require = "toy", devices, require
        monkeypatch.setattr(
            backends, "_known", {name: known.get(name, toy) for name in names}
        )
        torch.compiler.reset()
        with set_backend("auto"):
            assert "normalnorm.normalize" in graph_of(
                LayerNormalNorm(8), torch.randn(4, 8)
            )


@pytest.mark.parametrize("name", ["weight", "bias", "running_var"])
@pytest.mark.parametrize("wrong", [torch.ones(4), torch.ones(3).int()])
def test_what_does_not_fit_is_refused_by_name(name, wrong):
    "No operator takes it; the checks of the layer that is not compiled do."
    given = {name: wrong} | (
        {"running_mean": torch.zeros(3)} if name == "running_var" else {}
    )
    run = torch.compile(
        lambda u: batch_normal_norm(u, training=True, **given), backend="eager"
    )
    for function in (run, run.__wrapped__):
        with pytest.raises((ValueError, TypeError), match=f"{name} (has|is)"):
            function(torch.randn(4, 3, 2))


def test_no_operator_leaves_in_an_exported_program():
    for strict in (True, False):
        program = torch.export.export(
            nn.Sequential(nn.Linear(8, 8), LayerNormalNorm(8)).eval(),
            (torch.randn(4, 8),),
            strict=strict,
        )
        assert "normalnorm" not in str(program.graph)


def test_the_noise_of_a_compiled_layer():
    """Repeats after the same seed, differs from step to step, and from that of
    the uncompiled layer.
    """
    layer, u = LayerNormalNorm(64), torch.randn(32, 64)
    run, found = torch.compile(layer, fullgraph=True), []
    for call in (run, run, layer):
        torch.manual_seed(3)
        found.append(call(u))
    first, again, eager = found
    assert torch.equal(first, again) and not torch.equal(first, run(u))
    assert (first - eager).abs().max() > 1
    noise = (first - layer.eval()(u)).detach()
    scale = layer(u).sub(layer(u).mean(-1, keepdim=True)).abs().mean(-1)
    assert 0.9 < (noise / scale[:, None]).std() < 1.1


def test_any_number_of_rows():
    "One program for several sizes, and shapes that the kernel refuses."
    run = torch.compile(
        lambda x: layer_normal_norm(x, (8,)), dynamic=True, fullgraph=True
    )
    for rows in (4, 5, 19):
        u = torch.randn(rows, 8)
        torch.testing.assert_close(run(u), layer_normal_norm(u, (8,)))
    layer = torch.compile(BatchNormalNorm2d(3))
    layer(torch.randn(4, 3, 2, 2))
    with pytest.raises(Exception, match="num_features=3"):
        layer(torch.randn(4, 5, 2, 2))


def test_channels_last_and_half_precision():
    "The result lies as the input, whatever the compiler was told of it."
    for u in (
        torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6, 5, 5, dtype=torch.bfloat16),
        torch.randn(6, 4, 5, 5).transpose(0, 1),
    ):
        layer = BatchNormalNorm2d(6, noise=0.0).to(u.dtype)
        out = torch.compile(layer, fullgraph=True)(u)
        expected = layer(u)
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


def test_without_a_compiler_the_definition_is_read(monkeypatch):
    "A layer is compiled where the kernel cannot be had."
    error = compiler.CompilerError("none")
    monkeypatch.setattr(native, "_library", lambda: error)
    monkeypatch.setattr(backends, "_instead", {("native", "cpu"): None})
    layer, u = LayerNormalNorm(8, noise=0.0), torch.randn(4, 8)
    assert "normalnorm" not in graph_of(layer, u)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(u), layer(u))


FROZEN = {
    "batch": (lambda: BatchNormalNorm2d(3), (4, 3, 5, 5)),
    "columns": (lambda: BatchNormalNorm1d(3), (7, 3)),
    "channels last": (lambda: BatchNormalNorm2d(3), (4, 3, 5, 6)),
    "no affine": (lambda: BatchNormalNorm2d(3, affine=False), (4, 3, 5, 5)),
    "identity": (
        lambda: BatchNormalNorm2d(3, gaussianizer=Identity()),
        (4, 3, 5, 5),
    ),
    "instance": (
        lambda: InstanceNormalNorm2d(3, affine=True, track_running_stats=True),
        (4, 3, 5, 5),
    ),
}


@pytest.mark.parametrize(
    "case, dtype",
    [
        *((case, torch.float32) for case in FROZEN),
        ("batch", torch.bfloat16),
        ("channels last", torch.bfloat16),
    ],
)
def test_a_compiled_frozen_layer(case, dtype):
    """In evaluation: one operator, and the very numbers of the layer that is
    not compiled, with gradients of input, weight and bias.
    """
    make, shape = FROZEN[case]
    layer = make().to(dtype).eval()
    if getattr(layer, "running_lambda", None) is not None:
        layer.running_lambda.uniform_(0.3, 1.7)
    layer.running_var.uniform_(0.5, 2.0)
    u = torch.randn(shape).exp().to(dtype)
    if case == "channels last":
        u = u.contiguous(memory_format=torch.channels_last)
    assert "normalnorm.evaluate" in graph_of(layer, u)
    grad = torch.randn_like(layer(u))
    found, expected = (
        step(f, u, grad) for f in (torch.compile(layer, fullgraph=True), layer)
    )
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with set_backend("eager"):
        assert "normalnorm" not in graph_of(layer, u)


def test_frozen_layers_by_the_definition():
    "In float64, and where a statistic is learned."
    u = torch.randn(4, 3, 5, 5)
    mean, var, lmbda = torch.zeros(3), torch.ones(3), torch.full((3,), 1.3)

    def graph(u, *statistics):
        return graph_of(
            lambda u: batch_normal_norm(u, *statistics, training=False), u
        )

    assert "normalnorm.evaluate" in graph(u, mean, var, lmbda)
    assert "normalnorm" not in graph(
        u.double(), mean.double(), var.double(), lmbda.double()
    )
    for learned in range(3):
        statistics = [mean.clone(), var.clone(), lmbda.clone()]
        statistics[learned].requires_grad_()
        assert "normalnorm" not in graph(u, *statistics)


@pytest.mark.parametrize("weight", [False, True])
def test_pytorch_accepts_the_operator_of_evaluation(weight):
    u = torch.randn(4, 3, 5, requires_grad=True)
    of = [
        torch.randn(3, requires_grad=True) if weight else None for _ in range(2)
    ]
    statistics = torch.randn(3), torch.rand(3) + 0.5, torch.rand(3) + 0.5
    for lmbda in (statistics[2], None):
        given = (u, *of, *statistics[:2], lmbda, 1e-5)
        torch.library.opcheck(OPERATORS.evaluate_with_grad.default, given)
        torch.library.opcheck(OPERATORS.evaluate.default, detached(given))
        torch.library.opcheck(
            OPERATORS.evaluate_backward.default,
            detached((u, *given, weight, False)),
        )


def test_evaluation_of_nothing():
    "An empty batch: no number, and gradients of zero."
    layer, u = BatchNormalNorm2d(3).eval(), torch.empty(0, 3, 4, 4)
    run = torch.compile(layer, fullgraph=True, dynamic=False)
    out, of_u, *others = step(run, u)
    assert out.shape == of_u.shape == u.shape
    assert len(others) == 2 and not any(g.any() for g in others)


def test_second_derivatives_of_an_operator_are_refused():
    "Inside the compiler there is a program for first ones alone."
    given = arguments("batch")
    out, _ = OPERATORS.normalize_with_grad(*given)
    (first,) = torch.autograd.grad(out.sin().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_module_loaded_again_replaces_its_operators():
    python("""
        import importlib, warnings
        import torch
        from normalnorm.layers.engines import native, operators
        u = torch.tensor([[1.0, 3.0]])
        how = (None, None, None, [1], None, 1e-5, 0.0, "scaled", 1.0, 0,
               native.KEPT)
        warnings.simplefilter("error")
        for _ in range(2):
            out, numbers = torch.ops.normalnorm.normalize_with_grad(u, *how)
            assert numbers[:3].tolist() == [2.0, 1.0, 1.0], numbers
            importlib.reload(operators)
    """)
