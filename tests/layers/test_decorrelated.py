"""Decorrelated batch norm and its normality form beyond their chapter:
precision, layouts, modes, faults, compilation, interchange.
"""

import copy
import functools

import pytest
import scipy.linalg
import torch
from torch import nn

from normalnorm.layers.decorrelated import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNormalNorm1d,
    DecorrelatedBatchNormalNorm2d,
    decorrelated_batch_norm,
    decorrelated_batch_normal_norm,
)
from normalnorm.layers.normality import BatchNormalNorm1d, BatchNormalNorm2d
from normalnorm.layers.sync_decorrelated import SyncDecorrelatedBatchNorm
from normalnorm.theory.gradient import Power
from normalnorm.theory.whitening import (
    covariance,
    matrix_roots,
    newton_schulz,
    newton_schulz_iterations,
    whitening_matrix,
)
from tests.layers.steps import refusals, step
from tests.peers import FOLLOWS

LAYERS = {
    "plain1d": (
        lambda **o: DecorrelatedBatchNorm1d(5, group_size=3, **o),
        (7, 5, 11),
    ),
    "plain1d-flat": (
        lambda **o: DecorrelatedBatchNorm1d(5, group_size=5, **o),
        (13, 5),
    ),
    "plain2d": (
        lambda **o: DecorrelatedBatchNorm2d(5, group_size=2, **o),
        (3, 5, 7, 2),
    ),
    "plain2d-products": (
        lambda **o: DecorrelatedBatchNorm2d(
            5, group_size=3, method="newton_schulz", **o
        ),
        (3, 5, 7, 2),
    ),
    "normality1d": (
        lambda **o: DecorrelatedBatchNormalNorm1d(
            5, group_size=3, **{"noise": 0.0, **o}
        ),
        (7, 5, 11),
    ),
    "normality2d": (
        lambda **o: DecorrelatedBatchNormalNorm2d(
            5, group_size=3, **{"noise": 0.0, **o}
        ),
        (3, 5, 7, 2),
    ),
    "normality2d-products": (
        lambda **o: DecorrelatedBatchNormalNorm2d(
            5,
            num_groups=1,
            method="newton_schulz",
            iterations=7,
            **{"noise": 0.0, **o},
        ),
        (3, 5, 7, 2),
    ),
}
NORMALITY = [name for name in LAYERS if name.startswith("normality")]


@pytest.fixture(params=LAYERS)
def case(request):
    torch.manual_seed(0)
    return LAYERS[request.param]


def skewed(shape, dtype=torch.float32):
    "Channels that are mixtures of log-normal sources."
    u = torch.randn(shape, dtype=dtype).exp()
    return torch.einsum(
        "bc...,cd->bd...", u, torch.randn(shape[1], shape[1], dtype=dtype)
    )


def rows(x):
    return x.transpose(0, 1).flatten(1)


# the matrices


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_newton_schulz_of_singular_matrices_stays_finite(dtype):
    x = torch.randn(8, 3, dtype=dtype)
    x = x * torch.logspace(0, -6, 8, dtype=dtype)[:, None]
    for a in (x @ x.T, torch.zeros(8, 8, dtype=dtype), 1e6 * x @ x.T):
        for how in ((1e-5, 60), (0.0, 40)):
            assert newton_schulz(a, *how).isfinite().all()
    nothing = torch.full((2, 2), torch.nan)
    assert whitening_matrix(nothing, method="newton_schulz").isnan().all()


def test_eigenvalues_that_rounding_has_made_negative():
    """Below zero by less than the rounding of the trace: as zero, by both
    methods.
    """
    a = torch.diag(torch.tensor([1.0, 0.5, -2e-8]))
    for b, eps in ((a, 0.0), (1e6 * a, 1e-5)):
        assert newton_schulz(b, eps, 60).isfinite().all()
    roots = [[1.0, 0.5**0.5, 0.0], [1.0, 2**0.5, 0.0]]
    torch.testing.assert_close(
        torch.stack(matrix_roots(a)), torch.diag_embed(torch.tensor(roots))
    )
    assert matrix_roots(a, 0.25)[1][2, 2] == 2.0


def test_a_variance_that_overflows_leaves_its_whole_group_alone():
    """In float64: the covariances with the other channels are finite, but a
    matrix of old and new entries need not be positive semidefinite. A variance
    of 1.6e5 is finite, but not in float16.
    """
    for dtype, scale in ((torch.float64, 1e200), (torch.float16, 400.0)):
        layer = DecorrelatedBatchNorm1d(4, group_size=2, dtype=dtype)
        u, kept = torch.randn(99, 4).to(dtype), torch.eye(2, dtype=dtype)
        u[:, 1] *= scale
        out = layer(u)
        assert out[:, 2:].isfinite().all()
        assert dtype is torch.float16 or out[:, :2].isnan().all()
        assert torch.equal(layer.running_covariance[:2], kept)
        assert not torch.equal(layer.running_covariance[2:], kept)
        assert not layer.running_mean[:2].any() and layer.running_mean[2:].all()


def of_scales(orders, seed):
    """500 samples in float32 of five channels that are correlated, with
    standard deviations from 10^-orders to 10^orders.
    """
    generator = torch.Generator().manual_seed(seed)
    mixed = (
        torch.randn(500, 5, dtype=torch.float64, generator=generator)
        @ (torch.eye(5) + 0.3).double()
    )
    return (
        mixed * torch.logspace(-orders, orders, 5, dtype=torch.float64)
    ).float()


def rounding_of(x):
    """What rounding may do to whitened values, and to their covariance,
    whatever the processor.

    Two parts. The covariance and its root are computed in float64, of a matrix
    with an error E of norm 4dε‖Σ‖ at most (sums and eigendecomposition are
    backward stable): W(Σ + E)W = I, so covariance − I = −W E W, at most 4dεκ.
    The product is in float32: a sum of d products, of a centred value that is
    rounded once, is off by (d + 2)u of the sum of their sizes.
    """
    c = (x.double() - x.double().mean(0)).T
    values, axes = torch.linalg.eigh(c @ c.T / c.shape[1])
    sizes = (axes * values.rsqrt() @ axes.T).abs() @ c.abs()
    d, of_root = len(c), 4 * len(c) * 2**-52 * (values[-1] / values[0]).item()
    one = (d + 2) * 2**-24
    return (
        one * sizes.max().item() + of_root * c.shape[1] ** 0.5,
        2 * one * sizes.square().mean(1).max().item() ** 0.5 + of_root,
    )


@pytest.mark.parametrize("orders", [0, 1, 2, 3])
def test_scales_of_channels_do_not_spoil_each_other(orders):
    """Standard deviations from 10⁻³ to 10³ at most, without ε.

    Beyond that the covariance has a condition number above 10¹², and with 10⁻⁴
    to 10⁴, at 10¹⁶, float64 cannot decompose it.
    """
    for seed in range(5):
        x = of_scales(orders, seed)
        y, exact = (
            decorrelated_batch_norm(z, training=True, eps=0.0).double()
            for z in (x, x.double())
        )
        of_values, of_covariance = rounding_of(x)
        assert orders == 3 or of_covariance < 1e-5  # the bound says something
        torch.testing.assert_close(
            y.T.cov(correction=0),
            torch.eye(5, dtype=torch.float64),
            rtol=0,
            atol=of_covariance,
        )
        torch.testing.assert_close(y, exact, rtol=0, atol=of_values)


@pytest.mark.parametrize(
    "method, iterations",
    [("eigh", 5), ("newton_schulz", 5), ("newton_schulz", 60)],
)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_condition_1e12_in_float32(method, iterations, eps):
    """Finite values and gradients; with the exact root and no ε, white up to √κ
    times the rounding.
    """
    q = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    x = q * torch.logspace(3, -3, 8, dtype=torch.float64)
    x = (x @ torch.randn(8, 500, dtype=torch.float64)).T.float()
    y, gradient = step(
        lambda x: decorrelated_batch_norm(
            x, training=True, eps=eps, method=method, iterations=iterations
        ),
        x,
        leaves=(),
    )
    assert y.isfinite().all() and gradient.isfinite().all()
    off = (y.double().T.cov(correction=0) - torch.eye(8)).abs().max()
    assert off < 1e6 * 6e-8 or method != "eigh" or eps


# the layers


def test_defaults_are_those_of_the_papers_in_functions_and_layers():
    """Groups of 16 channels (Huang et al. 2018), a noise factor of 0.4
    (Eftekhari & Papyan 2025); by what comes out, on 20 channels.
    """
    x = torch.randn(50, 20) @ torch.randn(20, 20)

    def out(function, **options):
        torch.manual_seed(2)
        if isinstance(function, type):
            return function(20, **options)(x).detach()
        return function(x, training=True, **options)

    of_both = dict(group_size=16, eps=1e-5, momentum=0.1, method="eigh")
    of_normality = dict(noise=0.4, alpha=1.0, steps=1, safeguard=False)
    for function, layer, more, others in (
        (decorrelated_batch_norm, DecorrelatedBatchNorm1d, {}, []),
        (
            decorrelated_batch_normal_norm,
            DecorrelatedBatchNormalNorm1d,
            of_normality | dict(noise_kind="scaled"),
            [{"noise": 0.41}, {"noise": 0.0}, {"alpha": 0.0}],
        ),
    ):
        found = out(function)
        torch.testing.assert_close(out(layer), found)
        for of in (function, layer):
            assert torch.equal(out(of, **of_both, **more), out(of))
        for other in ({"group_size": 17}, *others):
            assert not torch.allclose(
                found, out(function, **other), atol=1e-3
            ), other


@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float64, 1e-11),
        (torch.float32, 1e-5),
        (torch.bfloat16, 2e-2),
        (torch.float16, 3e-3),
    ],
)
@pytest.mark.parametrize(
    "ours, theirs, shape",
    [
        (DecorrelatedBatchNorm2d, nn.BatchNorm2d, (4, 3, 5, 2)),
        (DecorrelatedBatchNormalNorm2d, BatchNormalNorm2d, (4, 3, 5, 2)),
        (DecorrelatedBatchNormalNorm1d, BatchNormalNorm1d, (9, 3)),
    ],
)
def test_groups_of_one_are_batch_norm_in_every_precision(
    ours, theirs, shape, dtype, tolerance
):
    layers = ours(3, group_size=1).to(dtype), theirs(3).to(dtype)
    found = [[], []]
    for training in (True, True, False):
        u = torch.randn(shape).exp().to(dtype)
        for layer, outs in zip(layers, found):
            torch.manual_seed(7)
            outs.append(layer.train(training)(u))
    found[0].append(layers[0].running_covariance[:, 0])
    found[1].append(layers[1].running_var)
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


def test_gradients(case):
    layer, shape = case
    layer = layer(dtype=torch.float64)
    u = skewed(
        (shape[0], 5, *[2] * (len(shape) - 2)), torch.float64
    ).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, *_: layer(x), (u, *layer.parameters()), fast_mode=True
    )


@pytest.mark.parametrize(
    "build",
    [
        DecorrelatedBatchNorm1d,
        lambda *a, **o: DecorrelatedBatchNormalNorm1d(*a, noise=0.0, **o),
    ],
)
def test_gradients_at_equal_eigenvalues_and_deficient_rank(build):
    """Covariance exactly the identity; three samples of five channels; second
    order too.
    """
    torch.manual_seed(0)
    signs = torch.from_numpy(scipy.linalg.hadamard(8)[:, 1:5]).double()
    for u in (signs + 0.0, skewed((3, 4), torch.float64)):
        u.requires_grad_()
        layer = build(4, eps=0.1, dtype=torch.float64)
        assert torch.autograd.gradcheck(
            layer, (u,)
        ) and torch.autograd.gradgradcheck(layer, (u,), fast_mode=True)


@pytest.mark.parametrize(
    "method, iterations", [("eigh", 1), ("newton_schulz", 40)]
)
def test_plain_and_normality_form_agree_without_the_transform(
    method, iterations
):
    u = skewed((5, 7, 11), torch.float64)
    options = dict(
        training=True, group_size=3, method=method, iterations=iterations
    )
    torch.testing.assert_close(
        decorrelated_batch_normal_norm(u, alpha=0.0, noise=0.0, **options),
        decorrelated_batch_norm(u, **options),
        rtol=1e-8,
        atol=1e-8,
    )


def test_more_iterations_approach_the_exact_root():
    u = skewed((100, 6), torch.float64)
    of = functools.partial(decorrelated_batch_norm, u, training=True)
    errors = [
        (of(method="newton_schulz", iterations=t) - of()).abs().max().item()
        for t in (1, 3, 6, 40)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_rounded_float32_result(case, dtype):
    "And autocast leaves the statistics alone."
    layer, shape = case
    layer, u = layer(), skewed(shape)
    for training in (True, False):
        found = layer.train(training)(u.to(dtype))
        expected = layer(u.to(dtype).float()).to(dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        plain = copy.deepcopy(layer)(u)
        with torch.autocast("cpu", dtype=dtype):
            torch.testing.assert_close(layer(u), plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    "layer",
    [
        DecorrelatedBatchNorm2d(5, group_size=2),
        DecorrelatedBatchNormalNorm2d(5, noise=0.0),
    ],
)
def test_channels_last_stays(layer):
    u = skewed((4, 5, 6, 7)).to(memory_format=torch.channels_last)
    found = layer(u)
    assert found.is_contiguous(memory_format=torch.channels_last)
    expected = layer(u.contiguous())
    assert expected.is_contiguous()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 11])
@pytest.mark.parametrize(
    "function",
    [
        decorrelated_batch_norm,
        functools.partial(decorrelated_batch_normal_norm, noise=0.0),
    ],
)
def test_positions_are_samples(function, length):
    """(B, C, L) is (B·L, C), above and below the length where the layout in
    memory changes; gradients too.
    """
    u = skewed((6, 7, length), torch.float64)
    f = functools.partial(function, training=True, group_size=4)
    flat = lambda x: f(x.mT.flatten(0, 1)).unflatten(0, (6, length)).mT
    torch.testing.assert_close(step(f, u, leaves=()), step(flat, u, leaves=()))


@FOLLOWS
@pytest.mark.parametrize(
    "name, training", [("plain2d-products", False), ("normality2d", True)]
)
def test_compiles_without_breaks(name, training):
    """The decomposition and the products; forward, backward and the running
    averages.
    """
    layer, shape = LAYERS[name]
    torch.compiler.reset()
    plain, u = layer(momentum=None).train(training), skewed(shape)
    twin = copy.deepcopy(plain)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    found = [
        [*step(f, u), *of.buffers()]
        for f, of in ((plain, plain), (compiled, twin))
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "u",
    [
        torch.randn(6, 3, dtype=torch.float64),
        torch.from_numpy(scipy.linalg.hadamard(4)[:, 1:]).double(),
    ],
    ids=["drawn", "equal eigenvalues"],
)
@pytest.mark.parametrize(
    "function",
    [
        decorrelated_batch_norm,
        functools.partial(decorrelated_batch_normal_norm, noise=0.0),
    ],
)
def test_transforms_of_torch_func(function, u):
    """jvp and the Hessian by forward over reverse, against reverse mode; vmap
    over models.
    """
    tangent, weight = torch.randn(2, *u.shape, dtype=u.dtype)
    loss = lambda x: (weight * function(x, training=True, eps=0.1)).sum()
    slope = torch.func.grad(loss)
    torch.testing.assert_close(
        torch.func.jvp(loss, (u,), (tangent,))[1], (slope(u) * tangent).sum()
    )
    torch.testing.assert_close(
        torch.func.hessian(loss)(u),
        torch.func.jacrev(torch.func.jacrev(loss))(u),
        rtol=1e-7,
        atol=1e-9,
    )
    several = torch.stack([u, tangent])
    torch.testing.assert_close(
        torch.func.vmap(slope)(several), torch.stack([*map(slope, several)])
    )


@FOLLOWS
def test_one_compilation_serves_all_batch_sizes_and_evaluation_exports():
    from torch._dynamo.testing import CompileCounterWithBackend

    layer = DecorrelatedBatchNorm2d(5, group_size=2)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    with torch.no_grad():
        for batch in (3, 4, 5, 8):
            compiled(torch.randn(batch, 5, 7, 2))
    # the second batch size makes the size a variable
    assert counter.frame_count <= 2
    u, layer = torch.randn(3, 5, 7, 2), DecorrelatedBatchNormalNorm2d(5).eval()
    torch.testing.assert_close(
        torch.export.export(layer, (u,)).module()(u), layer(u)
    )


def test_running_averages_by_hand():
    layer = DecorrelatedBatchNormalNorm2d(
        5, group_size=3, momentum=None, noise=0.0
    )
    batches = [skewed((3, 5, 7, 2)) for _ in range(3)]
    for u in batches:
        layer(u)
    average = lambda of: torch.stack([of(rows(u)) for u in batches]).mean(0)
    torch.testing.assert_close(layer.running_mean, average(lambda x: x.mean(1)))
    cov = average(torch.cov)
    torch.testing.assert_close(
        layer.running_covariance,
        torch.cat([cov[:3, :3], nn.functional.pad(cov[3:, 3:], (0, 1))]),
        rtol=1e-4,
        atol=1e-4,
    )
    assert layer.num_batches_tracked == 3 and (layer.running_lambda != 1).all()


def test_evaluation_uses_the_running_averages():
    mean, cov = torch.zeros(3), torch.eye(3)
    # fewer channels than the group's size
    decorrelated_batch_norm(torch.randn(9, 3) + 5, mean, cov, training=True)
    assert (mean > 0.3).all() and (cov != torch.eye(3)).all()
    layer, normality = (
        cls(4, momentum=1.0, dtype=torch.float64, **options)
        for cls, options in (
            (DecorrelatedBatchNorm1d, {}),
            (DecorrelatedBatchNormalNorm1d, {"noise": 0.0}),
        )
    )
    u = skewed((30, 4), torch.float64)
    layer(u), normality(u)
    y = layer.eval()(u)
    # unbiased, so exactly white but for ε
    torch.testing.assert_close(
        y.T.cov(), torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-3
    )
    torch.testing.assert_close(layer(u[:1]), y[:1])
    normality.running_lambda.fill_(1.0)
    torch.testing.assert_close(normality.eval()(u), y, rtol=1e-9, atol=1e-9)
    normality.running_lambda.fill_(0.5)
    assert (normality(u) - y).abs().max() > 0.01


def test_without_running_statistics_evaluation_uses_the_batch(case):
    layer, shape = case
    layer, u = layer(track_running_stats=False), skewed(shape)
    assert torch.equal(layer.train()(u), layer.eval()(u)) and not list(
        layer.buffers()
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_group(case, value):
    layer, shape = case
    layer, u = layer(), skewed(shape)
    size, clean = layer.group_size, layer(u)
    before, spoilt = copy.deepcopy(layer), u.clone()
    spoilt[0, 1] = value
    out, gradient, *_ = step(layer, spoilt)
    assert out[:, :size].isnan().all() and torch.equal(
        out[:, size:], clean[:, size:]
    )
    assert gradient[:, size:].isfinite().all()
    for name, then in before.named_buffers():
        now = layer.get_buffer(name)
        if name.startswith("running"):
            assert now.isfinite().all() and torch.equal(now[:size], then[:size])
            assert size == 5 or not torch.equal(now[size:], then[size:])


def test_running_covariance_stays_positive_semidefinite():
    layer = DecorrelatedBatchNorm1d(
        6, group_size=6, momentum=0.5, dtype=torch.float64
    )
    for number in range(20):
        u = skewed((4, 6), torch.float64)
        u[0, number % 6] *= torch.nan if number % 3 == 0 else 1
        layer(u)
    assert torch.linalg.eigvalsh(layer.running_covariance).min() > 0


def test_sizes_at_the_edge(case):
    "A constant channel, a constant batch, an empty one; fewer values, too."
    layer, shape = case
    layer, u = layer(), skewed(shape)
    u[:, 1] = 0.1
    out, *gradients = step(layer, u)
    assert out[:, 1].abs().max() < 1e-3
    few = step(layer, torch.randn(2, *shape[1:2], *[1] * (len(shape) - 2)))
    assert all(t.isfinite().all() for t in (out, *gradients, *few))
    assert layer(torch.full(shape, 0.1)).abs().max() == 0
    for training in (True, False):
        empty = layer.train(training)(torch.empty(0, *shape[1:]))
        assert empty.shape == (0, *shape[1:])
    assert all(b.isfinite().all() for b in layer.buffers())


def test_large_values_and_large_means():
    u = torch.randn(200, 4)
    of = functools.partial(decorrelated_batch_norm, training=True)
    # a float32 variance of 1e54 would be inf
    torch.testing.assert_close(of(u * 2.0**90), of(u), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of(u + 1e4), of(u), rtol=0, atol=5e-3)
    ends = torch.tensor([[3e38], [3e38], [3e38], [-3e38]])
    torch.testing.assert_close(of(ends[2:]), torch.tensor([[1.0], [-1.0]]))
    assert of(ends).isnan().all()  # u − μ is not a float32
    # the core computes a float32 variance: NaN, not 0
    wide = decorrelated_batch_normal_norm(u * 2.0**90, training=True)
    assert not wide.isfinite().any()


@pytest.mark.parametrize(
    "layer",
    [
        DecorrelatedBatchNorm2d(5, group_size=2),
        DecorrelatedBatchNormalNorm2d(5),
        DecorrelatedBatchNorm2d(5, group_size=3),
    ],
)
def test_checkpoints_of_batch_norm_load(layer):
    """Also those older than PyTorch 0.4.1, which have counted no batches; the
    state is in the order of the other layers'.
    """
    plain, u = nn.BatchNorm2d(5), skewed((4, 5, 6, 7))
    plain(u)
    state = plain.state_dict()
    layer.load_state_dict(state)
    torch.testing.assert_close(
        layer.eval()(u), plain.eval()(u), rtol=1e-4, atol=1e-4
    )
    assert "running_var" in state
    layer.train()(u)
    del state["num_batches_tracked"]
    layer.load_state_dict(state)
    assert layer.num_batches_tracked == 0
    assert list(layer.state_dict()) == [
        "weight",
        "bias",
        "running_mean",
        "running_covariance",
        *["running_lambda"] * hasattr(layer, "running_lambda"),
        "num_batches_tracked",
    ]


def test_checkpoints_of_the_plain_layer_load_into_its_normality_form():
    other = DecorrelatedBatchNormalNorm2d(5)
    other.load_state_dict(DecorrelatedBatchNorm2d(5).state_dict())


def test_noise_only_in_training_and_reproducible():
    layer, u = DecorrelatedBatchNormalNorm2d(5), skewed((3, 5, 7, 2))
    first, again = (torch.manual_seed(3) and layer(u) for _ in range(2))
    assert torch.equal(again, first) and not torch.equal(layer(u), first)
    assert torch.equal(layer.eval()(u), layer(u))
    given = (u, torch.zeros(5), torch.eye(5), torch.ones(5))
    assert torch.equal(
        decorrelated_batch_normal_norm(*given, noise=0.4),
        decorrelated_batch_normal_norm(*given, noise=0.0),
    )


def test_meta_device_and_description():
    layer = DecorrelatedBatchNormalNorm2d(6, num_groups=2, device="meta")
    assert layer.running_covariance.is_meta and layer.group_size == 3
    assert layer.running_covariance.shape == (6, 3)
    assert layer(torch.empty(2, 6, 4, 4, device="meta")).shape == (2, 6, 4, 4)
    assert "group_size=3" in repr(layer) and "noise=0.4" in repr(layer)
    assert "noise" not in repr(DecorrelatedBatchNorm2d(6))
    made = nn.utils.skip_init(DecorrelatedBatchNorm1d, 4)
    assert made.weight.shape == (4,)
    bare = DecorrelatedBatchNorm1d(4, bias=False)
    assert bare.bias is DecorrelatedBatchNorm1d(4, affine=False).weight is None


test_bad_input = refusals(
    [
        (
            lambda: DecorrelatedBatchNorm2d(5)(torch.randn(4, 5, 3)),
            ValueError,
            "batch, channels, height, width",
        ),
        (
            lambda: DecorrelatedBatchNorm1d(5)(torch.randn(4, 3)),
            ValueError,
            "num_features=5",
        ),
        (
            lambda: DecorrelatedBatchNorm1d(5)(torch.randn(1, 5)),
            ValueError,
            "more than one value",
        ),
        (
            lambda: DecorrelatedBatchNorm1d(5)(
                torch.ones(4, 5, dtype=torch.int64)
            ),
            TypeError,
            "floating-point",
        ),
        (
            lambda: DecorrelatedBatchNorm1d(5, group_size=2, num_groups=5),
            ValueError,
            "give one of them",
        ),
        (
            lambda: DecorrelatedBatchNorm1d(5, num_groups=2),
            ValueError,
            "do not divide",
        ),
        (
            lambda: DecorrelatedBatchNorm1d(5, group_size=0),
            ValueError,
            "at least 1",
        ),
        (
            lambda: DecorrelatedBatchNorm1d(5, iterations=0),
            ValueError,
            "at least 1",
        ),
        (
            lambda: DecorrelatedBatchNorm1d(5, method="qr"),
            ValueError,
            "newton_schulz",
        ),
        (lambda: DecorrelatedBatchNorm1d(5, eps=-1.0), ValueError, "eps"),
        (
            lambda: DecorrelatedBatchNormalNorm1d(5, noise=-1.0),
            ValueError,
            "noise",
        ),
        (
            lambda: decorrelated_batch_norm(torch.randn(4, 5)),
            ValueError,
            "running_covariance",
        ),
        (
            lambda: decorrelated_batch_norm(
                torch.randn(4, 5), torch.zeros(5), torch.eye(5), group_size=2
            ),
            ValueError,
            "row for each channel",
        ),
        (
            lambda: decorrelated_batch_norm(
                torch.randn(4, 5), weight=torch.ones(3), training=True
            ),
            ValueError,
            "weight",
        ),
        (
            lambda: decorrelated_batch_norm(
                torch.randn(4, 5), training=True, iterations=0
            ),
            ValueError,
            "iterations",
        ),
        (lambda: newton_schulz_iterations(0.5, 3), ValueError, "condition"),
        (
            lambda: whitening_matrix(torch.eye(2), method="svd"),
            ValueError,
            "eigh, newton_schulz",
        ),
        (
            lambda: DecorrelatedBatchNorm2d(5).load_state_dict(
                nn.BatchNorm2d(4).state_dict()
            ),
            RuntimeError,
            "size mismatch|Missing key",
        ),
        (
            lambda: DecorrelatedBatchNorm2d(5, group_size=5).load_state_dict(
                DecorrelatedBatchNorm2d(5, group_size=2).state_dict()
            ),
            RuntimeError,
            "size mismatch",
        ),
        # neither transform nor noise, whatever the value
        *(
            (
                functools.partial(layer, 4, group_size=2, **setting),
                TypeError,
                next(iter(setting)),
            )
            for layer in (
                DecorrelatedBatchNorm1d,
                DecorrelatedBatchNorm2d,
                SyncDecorrelatedBatchNorm,
            )
            for setting in (
                {"noise": 0.4},
                {"noise": 0.0},
                {"alpha": 0.0},
                {"steps": 1},
                {"safeguard": False},
                {"noise_kind": "scaled"},
                {"gaussianizer": Power()},
            )
        ),
    ]
)


@pytest.mark.parametrize(
    "layer, allowed",
    [
        (DecorrelatedBatchNorm2d(8, affine=False), 1),
        (DecorrelatedBatchNormalNorm2d(8), 2),
    ],
)
def test_memory_kept_for_the_backward_pass(layer, allowed):
    """Of the input's size: the centred input for the plain layer; the normality
    layer's own input in addition.
    """
    u, kept = skewed((64, 8, 4, 4)).requires_grad_(), {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(u)
    assert sum(kept.values()) / u.numel() / 4 < allowed + 0.35
    assert covariance(u.flatten(1)).dtype == torch.float64
