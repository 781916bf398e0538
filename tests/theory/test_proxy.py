"""The proxy's statistics: definition, closed form and kernel against float64,
quadrature and scipy; what the kernel leaves to the definition; errors.
"""

from functools import partial

import pytest
import scipy.integrate
import scipy.stats
import torch
import torch.nn.functional as F

from normalnorm.layers import proxy
from normalnorm.layers.backends import set_backend
from normalnorm.layers.engines import compiler, native
from normalnorm.layers.proxy import (
    ACTIVATIONS,
    by_nodes,
    by_pieces,
    proxy_statistics,
    quantile_nodes,
)
from tests.layers.steps import threads
from tests.refusals import refusals

BY_TORCH = {
    "identity": lambda y: y,
    "relu": torch.relu,
    "leaky_relu": partial(F.leaky_relu, negative_slope=0.3),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}
ROUNDING = 2.0**-24


@pytest.fixture(autouse=True)
def native_backend():
    with set_backend("native"):
        yield


def parameters(channels=240, dtype=torch.float32):
    """γ, β, β̃, γ̃: usual values, zero and negative γ, β far larger than γ and
    far smaller.
    """
    generator = torch.Generator().manual_seed(5)
    weight, bias, mean, scale = torch.randn(4, channels, generator=generator)
    weight[::3] = 1 + 0.2 * weight[::3]
    (weight[1::12], bias[2::12], bias[3::12], weight[4::12], bias[5::12]) = (
        0,
        0,
        1e4,
        1e-3,
        -30,
    )
    bias[7::12], weight[7::12] = 0, 0
    return [t.to(dtype) for t in (weight, bias, 0.3 * mean, 0.3 * scale)]


def derivatives(function, leaves, upstream):
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    outputs = function(*leaves)
    return [o.detach() for o in outputs], torch.autograd.grad(
        outputs, leaves, [u.to(leaves[0].dtype) for u in upstream]
    )


@pytest.mark.parametrize("samples", [1, 2, 200, 333, 3000])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kernel_is_the_definition(name, samples):
    leaves = parameters()
    upstream = torch.randn(2, 240, generator=torch.Generator().manual_seed(6))
    (mean, var), gradients = derivatives(
        partial(
            proxy_statistics,
            activation=name,
            samples=samples,
            negative_slope=0.3,
        ),
        leaves,
        upstream,
    )
    wide = [t.double() for t in leaves]

    def reference(w, b, shift, scale):
        return by_nodes(
            b + w * shift,
            w * (1 + scale),
            BY_TORCH[name],
            quantile_nodes(samples),
        )

    (exact_mean, exact_var), exact = derivatives(reference, wide, upstream)
    weight, bias, shift, scale = wide
    size = bias.abs() + (weight * shift).abs() + (weight * (1 + scale)).abs()
    assert ((mean - exact_mean).abs() <= 8 * ROUNDING * size).all()
    assert (
        (var - exact_var).abs()
        <= 8 * ROUNDING * (size * exact_var.sqrt() + exact_var) + 1e-12
    ).all()
    for g, e in zip(gradients, exact):
        assert (
            (g - e).abs()
            <= 40 * ROUNDING * (1 + size * (1 + size.clamp(max=30)))
        ).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_far_from_zero_and_saturated(name):
    """The variance keeps its digits where the mean is large against it, as long
    as the definition in float64 has any; and no value is too large.
    """
    location = torch.tensor([1e6, -1e6, 300.0, 8.0, -8.0, 5.0, -5.0, 1.0, -1.0])
    var = proxy_statistics(
        torch.ones(9),
        location,
        activation=name,
        samples=200,
        negative_slope=0.3,
    )[1].double()
    exact = by_nodes(
        location.double(),
        torch.ones(9).double(),
        BY_TORCH[name],
        quantile_nodes(200),
    )[1]
    some = exact > 1e-20
    assert some.sum() >= 3
    torch.testing.assert_close(var[some], exact[some], rtol=2e-5, atol=0)
    assert (var[~some] < 1e-12).all()
    huge = torch.tensor([1e33, -1e33, 3e38, -3e38])
    leaves = [torch.ones(4, requires_grad=True), huge.clone().requires_grad_()]
    mean, var = proxy_statistics(
        *leaves, activation=name, samples=200, negative_slope=0.3
    )
    torch.testing.assert_close(
        mean, BY_TORCH[name](huge.double()).float(), rtol=1e-6, atol=1e-12
    )
    (of_bias,) = torch.autograd.grad(mean.sum(), leaves[1])
    slope = {"identity": 1.0, "leaky_relu": 0.3}.get(name, 0.0)
    torch.testing.assert_close(
        of_bias,
        torch.tensor([0.0, 0.0] * 2 if name == "tanh" else [1.0, slope] * 2),
        rtol=1e-6,
        atol=1e-12,
    )


def test_nodes():
    for samples in (1, 2, 17, 200):
        nodes = quantile_nodes(samples)
        assert torch.equal(nodes, -nodes.flip(0))
        # the kernel reads whole vectors of up to 16
        padded = proxy._kernel_nodes(samples)
        assert padded.numel() % 16 == 0 and torch.equal(
            padded[:samples], nodes.float()
        )


def test_no_spread():
    "γ = 0: the mean is φ(β), the variance 0, and gradients are finite."
    bias = torch.tensor([-2.0, -1e-3, 0.0, 0.5, 3.0])
    for name in ACTIVATIONS:
        for samples in (
            (200, None)
            if name in ("relu", "identity", "leaky_relu")
            else (200,)
        ):
            leaves = [
                torch.zeros(5, requires_grad=True),
                bias.clone().requires_grad_(),
            ]
            mean, var = proxy_statistics(
                *leaves, activation=name, samples=samples, negative_slope=0.3
            )
            torch.testing.assert_close(mean, BY_TORCH[name](bias))
            assert var.max() < 1e-12
            gradients = torch.autograd.grad((mean + var).sum(), leaves)
            assert all(g.isfinite().all() for g in gradients) and gradients[
                0
            ].abs().max() < (1e-5 if samples else 0.5)


def test_values_that_are_not_finite():
    weight, bias = (
        torch.tensor([1.0, torch.nan, torch.inf, 1.0, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, torch.nan, 0.5]),
    )
    for name in ACTIVATIONS:
        mean, var = proxy_statistics(weight, bias, activation=name, samples=200)
        assert (
            mean.isfinite().tolist()
            == var.isfinite().tolist()
            == [True, False, False, False, True]
        ), name


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
@pytest.mark.parametrize("name", ["relu", "gelu", "tanh"])
def test_what_is_left_to_the_definition(name):
    """Second derivatives, functional transforms, forward mode, gradients in
    batches, tracing: the numbers of the definition.
    """
    function = partial(proxy_statistics, activation=name, samples=200)
    weight, bias, shift, scale = (t[:5] for t in parameters(60))
    bias = bias.clamp(-2, 2)

    def both(run):
        found = run()
        with set_backend("eager"):
            expected = run()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        return found

    def penalty():
        leaves = [
            t.clone().requires_grad_() for t in (weight, bias, shift, scale)
        ]
        first = torch.autograd.grad(
            sum(f.square().sum() for f in function(*leaves)),
            leaves,
            create_graph=True,
        )
        return torch.autograd.grad(sum(f.square().sum() for f in first), leaves)

    def twice_the_same():
        both_at_once = weight.clone().requires_grad_()
        (first,) = torch.autograd.grad(
            function(both_at_once, both_at_once)[1].sum(),
            both_at_once,
            create_graph=True,
        )
        return (
            first.detach(),
            torch.autograd.grad(first.square().sum(), both_at_once)[0],
        )

    def batched():
        leaves = [t.clone().requires_grad_() for t in (weight, bias)]
        grads = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
        return torch.autograd.grad(
            function(*leaves)[1], leaves, grads, is_grads_batched=True
        )

    def one_output_only():
        leaf = weight.clone().requires_grad_()
        return torch.autograd.grad(function(leaf, bias)[0].sum(), leaf)[0]

    both(penalty), both(twice_the_same), both(batched), both(one_output_only)
    both(lambda: torch.func.jacrev(lambda w: function(w, bias))(weight))
    both(
        lambda: torch.func.vmap(lambda b: function(weight, b))(
            torch.stack([bias, bias + 1])
        )
    )
    both(
        lambda: torch.func.jvp(
            lambda w: function(w, bias), (weight,), (torch.ones(5),)
        )
    )
    both(
        lambda: torch.jit.trace(
            lambda w: function(w, bias), (weight,), check_trace=False
        )(weight)
    )
    assert function(weight.to("meta"), bias.to("meta"))[0].device.type == "meta"


@pytest.mark.parametrize("samples", [200, "auto"])
def test_compiled(samples):
    torch.compiler.reset()
    weight, bias = parameters(48)[:2]
    bias = bias.clamp(-3, 3)
    function = partial(proxy_statistics, activation="silu", samples=samples)
    torch.testing.assert_close(
        torch.compile(function, fullgraph=True)(weight, bias),
        function(weight, bias),
        rtol=1e-4,
        atol=1e-5,
    )


test_numbers_of_nodes_that_are_refused = refusals(
    [
        *(
            (quantile_nodes, samples, "give a positive number of quantiles")
            for samples in (0, -3, 2.5, True, "200", None)
        ),
        (
            lambda samples: proxy_statistics(
                *parameters(48, torch.float64), "relu", samples=samples
            ),
            "automatic",
            'samples=.automatic.*or "auto"',
        ),
    ],
    lambda ask, samples: ask(samples),
)


@pytest.mark.filterwarnings("ignore:var_mean")
def test_which_way(monkeypatch):
    """The kernel for float32 on a CPU where it is chosen; the definition for
    float64, functions, and other backends.
    """
    calls, call = [], proxy._call
    monkeypatch.setattr(
        proxy, "_call", lambda *arguments: calls.append(1) or call(*arguments)
    )
    weight, bias = parameters()[:2]
    of_nodes = partial(proxy_statistics, samples=200)
    (
        of_nodes(weight, bias),
        of_nodes(weight.half(), bias.half(), activation="tanh"),
    )
    assert len(calls) == 2
    for leave in (
        lambda: of_nodes(weight.double(), bias),
        lambda: of_nodes(weight, bias, activation=torch.relu),
        lambda: proxy_statistics(weight, bias),
        lambda: of_nodes(weight[:0], bias[:0]),
    ):
        leave()
    for backend in ("eager", "compiled"):
        with set_backend(backend):
            of_nodes(weight, bias)
    assert len(calls) == 2
    monkeypatch.setattr(
        native,
        "_library",
        lambda: compiler.CompilerError("no C++ compiler was found"),
    )
    with set_backend("auto"):
        of_nodes(weight, bias)
    assert len(calls) == 2


def test_layouts_and_dtypes():
    """Strided and expanded parameters, any shape; half precision in float32,
    also the gradients' way back; float64 in float64.
    """
    statistics = partial(proxy_statistics, samples=200)
    weight, bias = parameters()[:2]
    expected = statistics(weight[::2].clone(), bias[::2].clone())
    assert torch.equal(statistics(weight[::2], bias[::2])[1], expected[1])
    leaf = weight[:1].clone().requires_grad_()
    spread = statistics(leaf.expand(6), bias[:6])
    torch.testing.assert_close(
        torch.autograd.grad(spread[0].sum(), leaf)[0],
        sum(
            torch.autograd.grad(statistics(leaf, b[None])[0].sum(), leaf)[0]
            for b in bias[:6]
        ),
    )
    assert (
        statistics(weight.view(4, 60), bias.view(4, 60))[0].shape == (4, 60)
        and statistics(weight[0], bias[0])[0].shape == ()
    )
    for dtype in (torch.float16, torch.bfloat16):
        half = weight[:10].to(dtype).requires_grad_()
        mean, var = statistics(
            half, bias[:10].clamp(-5, 5).to(dtype), activation="gelu"
        )
        assert mean.dtype == var.dtype == torch.float32
        torch.testing.assert_close(
            var,
            statistics(
                half.float(),
                bias[:10].clamp(-5, 5).to(dtype).float(),
                activation="gelu",
            )[1],
        )
        assert torch.autograd.grad(var.sum(), half)[0].dtype == dtype
    assert statistics(weight.double(), bias.double())[0].dtype == torch.float64


def test_same_bits_for_any_number_of_threads():
    weight, bias = torch.randn(
        2, 700, generator=torch.Generator().manual_seed(0)
    )
    found = []
    for n in (1, 2, 3):
        with threads(n):
            found.append(
                derivatives(
                    partial(proxy_statistics, activation="gelu", samples=200),
                    (weight, bias),
                    torch.ones(2, 700),
                )
            )
    for outputs, gradients in found[1:]:
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                (*outputs, *gradients), (*found[0][0], *found[0][1])
            )
        )


def test_parameters_that_need_no_gradient():
    weight, bias, shift, scale = parameters()
    for needed in range(4):
        leaves = [
            t.clone().requires_grad_(k == needed)
            for k, t in enumerate((weight, bias, shift, scale))
        ]
        mean, var = proxy_statistics(*leaves, samples=200)
        (mean.sum() + var.clamp(max=10).sum()).backward()
        assert [leaf.grad is not None for leaf in leaves] == [
            k == needed for k in range(4)
        ]


test_errors = refusals(
    [
        (
            {"bias": torch.ones(4)},
            ValueError,
            r"bias has shape \(4,\), weight \(3,\)",
        ),
        ({"proxy_mean": torch.ones(2)}, ValueError, "proxy_mean has shape"),
        (
            {"bias": torch.ones(3, dtype=torch.int64)},
            TypeError,
            "bias is a tensor of torch.int64",
        ),
        ({"bias": None}, TypeError, "bias is None"),
        ({"activation": "rellu"}, ValueError, "relu"),
        ({"samples": 0}, ValueError, "samples=0"),
        (
            {"activation": lambda y: y.sum(-1)},
            ValueError,
            "element by element",
        ),
        (
            {"activation": lambda y: y.sum(-1), "samples": None},
            ValueError,
            "element by element",
        ),
    ],
    lambda wrong: proxy_statistics(
        **{"weight": torch.ones(3), "bias": torch.ones(3)} | wrong
    ),
)


def test_other_default_dtype():
    "The kernel's nodes are float32 whatever new tensors are by default."
    leaves = parameters(7)
    expected = proxy_statistics(*leaves, "gelu", 33)
    proxy._kernel_nodes.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert all(
            torch.equal(a, b)
            for a, b in zip(proxy_statistics(*leaves, "gelu", 33), expected)
        )
    finally:
        torch.set_default_dtype(torch.float32)
        proxy._kernel_nodes.cache_clear()


def test_pieces_at_a_spread_of_zero_and_far_from_the_kink():
    """A constant; the derivatives there; and a kink beyond the reach, on which
    nothing depends.
    """
    m = torch.tensor([0.7, 0.0, -20.0], dtype=torch.float64).requires_grad_()
    t = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).requires_grad_()
    mean, var = by_pieces(m, t, F.silu)
    torch.testing.assert_close(mean[:2], F.silu(m[:2]))
    assert (var[:2] < 1e-30).all()
    (by_m, by_t) = torch.autograd.grad(mean.sum(), (m, t))
    slope = torch.autograd.grad(F.silu(m).sum(), m)[0]
    torch.testing.assert_close(by_m[:2], slope[:2])
    torch.testing.assert_close(by_t[:2], torch.zeros_like(by_t[:2]))
    plain = by_pieces(m, t, F.silu, ())
    torch.testing.assert_close(mean[2], plain[0][2])
    torch.testing.assert_close(var[2], plain[1][2])


def test_a_jump_of_the_function():
    "Mean and derivative of a step: Φ(m/t) and ϕ(m/t)/t."
    m, t = (
        torch.tensor([v], dtype=torch.float64, requires_grad=True)
        for v in (0.5, 1.5)
    )
    mean, _ = by_pieces(m, t, lambda y: (y > 2).double(), (2.0,))
    x = (0.5 - 2) / 1.5
    assert abs(mean.item() - scipy.stats.norm.cdf(x)) < 1e-12
    assert (
        abs(
            torch.autograd.grad(mean, m)[0].item()
            - scipy.stats.norm.pdf(x) / 1.5
        )
        < 1e-12
    )
