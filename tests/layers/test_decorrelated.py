"""Decorrelated batch norm and its normality form beyond their chapter:
precision, layouts, modes, faults, compilation, interchange.
"""

import copy
import pickle

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
    newton_schulz_residual,
    whitening_matrix,
)
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


def test_roots_are_scipys():
    torch.manual_seed(0)
    for condition in (1.0, 1e3, 1e6):
        q = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
        a = (
            q
            * torch.logspace(
                0,
                -torch.tensor(condition).log10().item(),
                6,
                dtype=torch.float64,
            )
            @ q.T
        )
        root, inverse = matrix_roots(a, 1e-9)
        expected = torch.from_numpy(
            scipy.linalg.sqrtm((a + 1e-9 * torch.eye(6)).numpy()).real
        )
        torch.testing.assert_close(root, expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(
            inverse @ expected,
            torch.eye(6, dtype=torch.float64),
            rtol=0,
            atol=1e-12 * condition + 1e-10,
        )


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_gradient_is_that_of_a_sylvester_equation(eps):
    """tr(C W) through the factors of a Lyapunov equation, at condition 1e4 and
    with a triple eigenvalue.
    """
    torch.manual_seed(0)
    q = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    a = (
        q * torch.tensor([1.0, 1.0, 1.0, 0.1, 1e-4], dtype=torch.float64) @ q.T
    ).requires_grad_()
    c = torch.randn(5, 5, dtype=torch.float64)
    (found,) = torch.autograd.grad((c * matrix_roots(a, eps)[1]).sum(), a)
    root = scipy.linalg.sqrtm((a.detach() + eps * torch.eye(5)).numpy()).real
    inverse = scipy.linalg.inv(root)
    middle = inverse @ ((c + c.T) / 2).numpy() @ inverse
    expected = torch.from_numpy(
        -scipy.linalg.solve_sylvester(root, root, middle)
    )
    torch.testing.assert_close(
        found, expected, rtol=0, atol=1e-7 * expected.abs().max().item()
    )


def test_the_naive_gradient_fails_where_ours_does_not():
    a = torch.eye(4, dtype=torch.float64, requires_grad=True)
    values, vectors = torch.linalg.eigh(a)
    c = torch.ones(4, 4, dtype=torch.float64)
    (naive,) = torch.autograd.grad(
        (c * (vectors * values.rsqrt() @ vectors.T)).sum(), a
    )
    (ours,) = torch.autograd.grad((c * matrix_roots(a)[1]).sum(), a)
    assert not naive.isfinite().all()
    torch.testing.assert_close(ours, -0.5 * c)


def test_newton_schulz_converges_in_the_number_of_iterations_that_is_said():
    torch.manual_seed(0)
    for condition in (1.0, 10.0, 1e4, 1e7):
        q = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64))[0]
        worst = torch.full((7,), condition, dtype=torch.float64)
        worst[0] = 1.0
        a, count = q * worst @ q.T, newton_schulz_iterations(condition, 7)
        error = lambda t: torch.linalg.matrix_norm(
            newton_schulz(a, 0.0, t) @ a @ newton_schulz(a, 0.0, t)
            - torch.eye(7),
            2,
        )
        assert error(count) < 1.1e-6 + 1e-15 * condition and (
            count == 0 or error(count - 1) > 1e-6
        )
        gain = newton_schulz(a, 0.0, 4) @ a @ newton_schulz(a, 0.0, 4)
        assert (
            abs(
                (1 - torch.linalg.eigvalsh(gain).min())
                - newton_schulz_residual(1 / (1 + 6 * condition), 4)
            )
            < 1e-9
        )
    with pytest.raises(ValueError, match="condition"):
        newton_schulz_iterations(0.5, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_newton_schulz_of_singular_matrices_stays_finite(dtype):
    torch.manual_seed(0)
    x = (
        torch.randn(8, 3, dtype=dtype)
        * torch.logspace(0, -6, 8, dtype=dtype)[:, None]
    )
    for a in (x @ x.T, torch.zeros(8, 8, dtype=dtype), 1e6 * x @ x.T):
        assert (
            newton_schulz(a, 1e-5, 60).isfinite().all()
            and newton_schulz(a, 0.0, 40).isfinite().all()
        )
    assert (
        whitening_matrix(torch.full((2, 2), torch.nan), method="newton_schulz")
        .isnan()
        .all()
    )
    with pytest.raises(ValueError, match="eigh, newton_schulz"):
        whitening_matrix(torch.eye(2), method="svd")


def test_eigenvalues_that_rounding_has_made_negative():
    """Below zero by less than the rounding of the trace: as zero, by both
    methods.
    """
    a = torch.diag(torch.tensor([1.0, 0.5, -2e-8]))
    assert (
        newton_schulz(a, 0.0, 60).isfinite().all()
        and newton_schulz(1e6 * a, 1e-5, 60).isfinite().all()
    )
    root, inverse = matrix_roots(a)
    torch.testing.assert_close(
        root, torch.diag(torch.tensor([1.0, 0.5**0.5, 0.0]))
    )
    torch.testing.assert_close(
        inverse, torch.diag(torch.tensor([1.0, 2**0.5, 0.0]))
    )
    torch.testing.assert_close(
        matrix_roots(a, 0.25)[1][2, 2], torch.tensor(2.0), rtol=0, atol=0
    )


def test_a_variance_that_overflows_leaves_its_whole_group_alone():
    """In float64: the covariances with the other channels are finite, but a
    matrix of old and new entries need not be positive semidefinite.
    """
    torch.manual_seed(0)
    layer, u = (
        DecorrelatedBatchNorm1d(4, group_size=2, dtype=torch.float64),
        torch.randn(9, 4, dtype=torch.float64),
    )
    u[:, 1] *= 1e200
    assert layer(u)[:, :2].isnan().all() and layer(u)[:, 2:].isfinite().all()
    half = DecorrelatedBatchNorm1d(4, group_size=2, dtype=torch.float16)
    # a variance of 1.6e5 is finite, but not in float16
    half(torch.randn(99, 4).mul(torch.tensor([1.0, 400.0, 1.0, 1.0])).half())
    assert torch.equal(
        half.running_covariance[:2], torch.eye(2).half()
    ) and not torch.equal(half.running_covariance[2:], torch.eye(2).half())
    assert (
        torch.equal(
            layer.running_covariance[:2], torch.eye(2, dtype=torch.float64)
        )
        and (layer.running_mean[:2] == 0).all()
        and (layer.running_mean[2:] != 0).all()
    )


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
def test_condition_1e12_in_float32(method, iterations):
    """Finite values and gradients; with the exact root and no ε, white up to √κ
    times the rounding.
    """
    torch.manual_seed(0)
    q = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    x = (
        (
            q
            * torch.logspace(3, -3, 8, dtype=torch.float64)
            @ torch.randn(8, 500, dtype=torch.float64)
        )
        .T.float()
        .requires_grad_()
    )
    for eps in (0.0, 1e-5):
        y = decorrelated_batch_norm(
            x, training=True, eps=eps, method=method, iterations=iterations
        )
        (gradient,) = torch.autograd.grad(
            y.square().mul(torch.randn_like(y)).sum(), x
        )
        assert y.isfinite().all() and gradient.isfinite().all()
        if method == "eigh" and not eps:
            assert (
                y.detach().double().T.cov(correction=0) - torch.eye(8)
            ).abs().max() < 1e6 * 6e-8


# the layers


def test_defaults_are_those_of_the_papers_in_functions_and_layers():
    """Groups of 16 channels (Huang et al. 2018), a noise factor of 0.4
    (Eftekhari & Papyan 2025); by what comes out, on 20 channels.
    """
    x = torch.randn(
        50, 20, generator=torch.Generator().manual_seed(0)
    ) @ torch.randn(20, 20, generator=torch.Generator().manual_seed(1))

    def out(function, **options):
        torch.manual_seed(2)
        return (
            function(x, training=True, **options)
            if not isinstance(function, type)
            else function(20, **options)(x).detach()
        )

    plain, normal = (
        out(decorrelated_batch_norm),
        out(decorrelated_batch_normal_norm),
    )
    assert torch.equal(
        plain, out(decorrelated_batch_norm, group_size=16)
    ) and not torch.allclose(
        plain, out(decorrelated_batch_norm, group_size=17), atol=1e-3
    )
    assert torch.equal(
        plain,
        out(decorrelated_batch_norm, eps=1e-5, momentum=0.1, method="eigh"),
    )
    assert torch.equal(
        normal,
        out(
            decorrelated_batch_normal_norm,
            group_size=16,
            noise=0.4,
            alpha=1.0,
            steps=1,
            safeguard=False,
            noise_kind="scaled",
        ),
    )
    for other in (
        {"group_size": 17},
        {"noise": 0.41},
        {"noise": 0.0},
        {"alpha": 0.0},
    ):
        assert not torch.allclose(
            normal, out(decorrelated_batch_normal_norm, **other), atol=1e-3
        ), other
    torch.testing.assert_close(out(DecorrelatedBatchNorm1d), plain)
    torch.testing.assert_close(out(DecorrelatedBatchNormalNorm1d), normal)


def test_groups_of_one_are_batch_norm_in_every_precision():
    torch.manual_seed(0)
    for dtype, tolerance in (
        (torch.float64, 1e-11),
        (torch.float32, 1e-5),
        (torch.bfloat16, 2e-2),
        (torch.float16, 3e-3),
    ):
        for ours, theirs, shape in (
            (DecorrelatedBatchNorm2d, nn.BatchNorm2d, (4, 3, 5, 2)),
            (DecorrelatedBatchNormalNorm2d, BatchNormalNorm2d, (4, 3, 5, 2)),
            (DecorrelatedBatchNormalNorm1d, BatchNormalNorm1d, (9, 3)),
        ):
            a, b = ours(3, group_size=1).to(dtype), theirs(3).to(dtype)
            for training in (True, True, False):
                u = torch.randn(shape).exp().to(dtype)
                out = []
                for layer in (a, b):
                    torch.manual_seed(7)
                    out.append(layer.train(training)(u))
                torch.testing.assert_close(*out, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(
                a.running_covariance[:, 0],
                b.running_var,
                rtol=tolerance,
                atol=tolerance,
            )


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


def test_plain_and_normality_form_agree_without_the_transform():
    torch.manual_seed(0)
    u = skewed((5, 7, 11), torch.float64)
    for method, iterations in (("eigh", 1), ("newton_schulz", 40)):
        options = dict(
            training=True, group_size=3, method=method, iterations=iterations
        )
        torch.testing.assert_close(
            decorrelated_batch_normal_norm(u, alpha=0.0, noise=0.0, **options),
            decorrelated_batch_norm(u, **options),
            rtol=1e-8,
            atol=1e-8,
        )


def test_rotation_equivariance():
    torch.manual_seed(0)
    u, q = (
        skewed((50, 6), torch.float64),
        torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0],
    )
    for method in ("eigh", "newton_schulz"):
        f = lambda x: decorrelated_batch_norm(
            x, training=True, group_size=6, method=method
        )
        torch.testing.assert_close(f(u @ q), f(u) @ q, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(f(u + 7), f(u), rtol=1e-8, atol=1e-8)


def test_more_iterations_approach_the_exact_root():
    torch.manual_seed(0)
    u = skewed((100, 6), torch.float64)
    exact = decorrelated_batch_norm(u, training=True)
    errors = [
        (
            decorrelated_batch_norm(
                u, training=True, method="newton_schulz", iterations=t
            )
            - exact
        )
        .abs()
        .max()
        .item()
        for t in (1, 3, 6, 40)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_rounded_float32_result(case, dtype):
    layer, shape = case
    layer, u = layer(), skewed(shape).to(dtype)
    for training in (True, False):
        layer.train(training)
        assert layer(u).dtype == dtype
        torch.testing.assert_close(
            layer(u), layer(u.float()).to(dtype), rtol=0, atol=0
        )


def test_autocast_leaves_the_statistics_alone(case):
    layer, shape = case
    layer, u = layer(), skewed(shape)
    expected = layer(u)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(u), expected, rtol=0, atol=0)


def test_channels_last_stays():
    torch.manual_seed(0)
    u = skewed((4, 5, 6, 7)).to(memory_format=torch.channels_last)
    for layer in (
        DecorrelatedBatchNorm2d(5, group_size=2),
        DecorrelatedBatchNormalNorm2d(5),
    ):
        found = []
        for x in (u, u.contiguous()):
            torch.manual_seed(1)
            found.append(layer(x))
        assert (
            found[0].is_contiguous(memory_format=torch.channels_last)
            and found[1].is_contiguous()
        )
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 11])
def test_positions_are_samples(length):
    """(B, C, L) is (B·L, C), above and below the length where the layout in
    memory changes; gradients too.
    """
    torch.manual_seed(0)
    u = skewed((6, 7, length), torch.float64).requires_grad_()
    grad = torch.randn(6, 7, length, dtype=torch.float64)
    for f in (
        decorrelated_batch_norm,
        lambda x, **o: decorrelated_batch_normal_norm(x, noise=0.0, **o),
    ):
        out = f(u, training=True, group_size=4)
        flat = (
            f(u.mT.flatten(0, 1), training=True, group_size=4)
            .unflatten(0, (6, length))
            .mT
        )
        torch.testing.assert_close(out, flat)
        torch.testing.assert_close(
            *(torch.autograd.grad(y, u, grad)[0] for y in (out, flat))
        )


def test_strided_input(case):
    layer, shape = case
    layer, u = (
        layer(),
        torch.randn(*shape[::-1]).permute(*range(len(shape))[::-1]),
    )
    torch.testing.assert_close(layer(u), layer(u.contiguous()))


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
    plain = layer(momentum=None).train(training)
    compiled = torch.compile(
        copy.deepcopy(plain), fullgraph=True, backend="aot_eager"
    )
    u = skewed(shape).requires_grad_()
    outs = [f(u) for f in (plain, compiled)]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        *(torch.autograd.grad(out.square().sum(), u)[0] for out in outs),
        rtol=1e-4,
        atol=1e-4,
    )
    torch.testing.assert_close(
        compiled.running_covariance, plain.running_covariance
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


def test_vmap_over_models():
    torch.manual_seed(0)
    u = torch.randn(3, 20, 4, dtype=torch.float64)
    loss = lambda x: decorrelated_batch_norm(x, training=True).pow(3).sum()
    together = torch.func.vmap(torch.func.grad(loss))(u)
    torch.testing.assert_close(
        together, torch.stack([torch.func.grad(loss)(x) for x in u])
    )


def test_forward_mode():
    """jvp and the Hessian by forward over reverse, against reverse mode, at
    equal eigenvalues too.
    """
    torch.manual_seed(0)
    signs = torch.from_numpy(scipy.linalg.hadamard(4)[:, 1:]).double()
    for u in (torch.randn(6, 3, dtype=torch.float64), signs):
        for f in (
            lambda x: decorrelated_batch_norm(x, training=True, eps=0.1),
            lambda x: decorrelated_batch_normal_norm(
                x, training=True, noise=0.0, eps=0.1
            ),
        ):
            tangent, weight = torch.randn_like(u), torch.randn_like(u)
            loss = lambda x: (weight * f(x)).sum()
            torch.testing.assert_close(
                torch.func.jvp(loss, (u,), (tangent,))[1],
                (torch.func.grad(loss)(u) * tangent).sum(),
            )
            torch.testing.assert_close(
                torch.func.hessian(loss)(u),
                torch.func.jacrev(torch.func.jacrev(loss))(u),
                rtol=1e-7,
                atol=1e-9,
            )


def test_running_averages_by_hand():
    torch.manual_seed(0)
    layer = DecorrelatedBatchNormalNorm2d(
        5, group_size=3, momentum=None, noise=0.0
    )
    batches = [skewed((3, 5, 7, 2)) for _ in range(3)]
    for u in batches:
        layer(u)
    mean = torch.stack([rows(u).mean(1) for u in batches]).mean(0)
    cov = torch.stack([rows(u).cov() for u in batches]).mean(0)
    torch.testing.assert_close(layer.running_mean, mean)
    torch.testing.assert_close(
        layer.running_covariance[:3], cov[:3, :3], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        layer.running_covariance[3:],
        torch.nn.functional.pad(cov[3:, 3:], (0, 1)),
        rtol=1e-4,
        atol=1e-4,
    )
    assert layer.num_batches_tracked == 3 and (layer.running_lambda != 1).all()


def test_evaluation_uses_the_running_averages():
    torch.manual_seed(0)
    mean, cov = torch.zeros(3), torch.eye(3)
    # fewer channels than the group's size
    decorrelated_batch_norm(torch.randn(9, 3) + 5, mean, cov, training=True)
    assert (mean > 0.3).all() and (cov != torch.eye(3)).all()
    layer = DecorrelatedBatchNorm1d(4, momentum=1.0, dtype=torch.float64)
    u = skewed((30, 4), torch.float64)
    layer(u)
    y = layer.eval()(u)
    # unbiased, so exactly white but for ε
    torch.testing.assert_close(
        y.T.cov(), torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-3
    )
    torch.testing.assert_close(layer(u[:1]), y[:1])
    normality = DecorrelatedBatchNormalNorm1d(
        4, momentum=1.0, noise=0.0, dtype=torch.float64
    )
    normality(u)
    with torch.no_grad():
        normality.running_lambda.fill_(1.0)
    torch.testing.assert_close(normality.eval()(u), y, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
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
    size = layer.group_size
    clean = layer(u)
    before = copy.deepcopy(layer)
    spoilt = u.clone()
    spoilt[0, 1] = value
    out = layer(spoilt)
    assert out[:, :size].isnan().all() and torch.equal(
        out[:, size:], clean[:, size:]
    )
    for name in ("running_mean", "running_covariance", "running_lambda"):
        if hasattr(layer, name):
            now, then = layer.get_buffer(name), before.get_buffer(name)
            assert now.isfinite().all() and torch.equal(now[:size], then[:size])
            assert size == 5 or not torch.equal(now[size:], then[size:])
    leaf = spoilt.requires_grad_()
    (gradient,) = torch.autograd.grad(
        layer(leaf)[:, size:].sum() + layer(leaf)[:, :size].sum(), leaf
    )
    assert gradient[:, size:].isfinite().all()


def test_running_covariance_stays_positive_semidefinite():
    torch.manual_seed(0)
    layer = DecorrelatedBatchNorm1d(
        6, group_size=6, momentum=0.5, dtype=torch.float64
    )
    for step in range(20):
        u = skewed((4, 6), torch.float64)
        if step % 3 == 0:
            u[0, step % 6] = torch.nan
        layer(u)
    assert torch.linalg.eigvalsh(layer.running_covariance).min() > 0


def test_a_constant_channel(case):
    layer, shape = case
    layer, u = layer(), skewed(shape)
    u[:, 1] = 0.1
    u.requires_grad_()
    out = layer(u)
    assert out[:, 1].abs().max() < 1e-3 and out.isfinite().all()
    assert torch.autograd.grad(out.square().sum(), u)[0].isfinite().all()
    constant = layer(torch.full(shape, 0.1))
    assert constant.abs().max() == 0


def test_fewer_values_than_channels():
    torch.manual_seed(0)
    for layer in (
        DecorrelatedBatchNorm1d(8),
        DecorrelatedBatchNormalNorm1d(8),
        DecorrelatedBatchNorm1d(8, method="newton_schulz"),
    ):
        u = torch.randn(3, 8, requires_grad=True)
        out = layer(u)
        assert (
            out.isfinite().all()
            and torch.autograd.grad(out.pow(3).sum(), u)[0].isfinite().all()
        )
        assert layer.eval()(u).isfinite().all()


def test_large_values_and_large_means():
    torch.manual_seed(0)
    u = torch.randn(200, 4)
    plain = decorrelated_batch_norm(u, training=True)
    # a float32 variance of 1e54 would be inf
    torch.testing.assert_close(
        decorrelated_batch_norm(u * 2.0**90, training=True),
        plain,
        rtol=1e-4,
        atol=1e-4,
    )
    torch.testing.assert_close(
        decorrelated_batch_norm(u + 1e4, training=True),
        plain,
        rtol=0,
        atol=5e-3,
    )
    torch.testing.assert_close(
        decorrelated_batch_norm(torch.tensor([[3e38], [-3e38]]), training=True),
        torch.tensor([[1.0], [-1.0]]),
    )
    # u − μ is not a float32
    assert (
        decorrelated_batch_norm(
            torch.tensor([[3e38], [3e38], [3e38], [-3e38]]), training=True
        )
        .isnan()
        .all()
    )
    # the core computes a float32 variance: NaN, not 0
    assert (
        not decorrelated_batch_normal_norm(u * 2.0**90, training=True)
        .isfinite()
        .any()
    )


def test_empty_batch(case):
    layer, shape = case
    layer = layer()
    out = layer(torch.empty(0, *shape[1:]))
    assert out.shape == (0, *shape[1:]) and all(
        b.isfinite().all() for b in layer.buffers()
    )
    assert layer.eval()(torch.empty(0, *shape[1:])).shape == (0, *shape[1:])


def test_copies_and_checkpoints(case):
    layer, shape = case
    layer, u = layer(), skewed(shape)
    layer(u)
    layer.eval()
    fresh = LAYERS[next(name for name, c in LAYERS.items() if c is case)][0]()
    fresh.load_state_dict(layer.state_dict())
    for clone in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        fresh.eval(),
    ):
        assert torch.equal(clone(u), layer(u))


def test_checkpoints_of_batch_norm_load_and_others_are_refused():
    torch.manual_seed(0)
    plain, u = nn.BatchNorm2d(5), skewed((4, 5, 6, 7))
    plain(u)
    state = plain.state_dict()
    for layer in (
        DecorrelatedBatchNorm2d(5, group_size=2),
        DecorrelatedBatchNormalNorm2d(5),
        DecorrelatedBatchNorm2d(5, group_size=3),
    ):
        layer.load_state_dict(state)
        torch.testing.assert_close(
            layer.eval()(u), plain.eval()(u), rtol=1e-4, atol=1e-4
        )
    assert "running_var" in state
    other = DecorrelatedBatchNormalNorm2d(5)
    other.load_state_dict(DecorrelatedBatchNorm2d(5).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch|Missing key"):
        DecorrelatedBatchNorm2d(5).load_state_dict(
            nn.BatchNorm2d(4).state_dict()
        )
    with pytest.raises(RuntimeError, match="size mismatch"):
        DecorrelatedBatchNorm2d(5, group_size=5).load_state_dict(
            DecorrelatedBatchNorm2d(5, group_size=2).state_dict()
        )


def test_old_checkpoints_and_the_order_of_the_state():
    """A checkpoint older than PyTorch 0.4.1 has counted no batches; the state
    is in the order of the other layers'.
    """
    plain = nn.BatchNorm1d(3)
    plain(torch.randn(9, 3))
    state = {
        k: v
        for k, v in plain.state_dict().items()
        if k != "num_batches_tracked"
    }
    for layer, more in (
        (DecorrelatedBatchNorm1d(3), []),
        (DecorrelatedBatchNormalNorm1d(3), ["running_lambda"]),
    ):
        layer(torch.randn(9, 3))
        layer.load_state_dict(state)
        assert layer.num_batches_tracked == 0 and torch.equal(
            layer.running_covariance.diagonal(), plain.running_var
        )
        assert list(layer.state_dict()) == [
            "weight",
            "bias",
            "running_mean",
            "running_covariance",
            *more,
            "num_batches_tracked",
        ]


def test_noise_only_in_training_and_reproducible():
    torch.manual_seed(0)
    layer, u = DecorrelatedBatchNormalNorm2d(5), skewed((3, 5, 7, 2))
    torch.manual_seed(3)
    first = layer(u)
    torch.manual_seed(3)
    assert torch.equal(layer(u), first) and not torch.equal(layer(u), first)
    assert torch.equal(layer.eval()(u), layer(u))
    given = (u, torch.zeros(5), torch.eye(5), torch.ones(5))
    assert torch.equal(
        decorrelated_batch_normal_norm(*given, noise=0.4),
        decorrelated_batch_normal_norm(*given, noise=0.0),
    )


def test_meta_device_and_description():
    layer = DecorrelatedBatchNormalNorm2d(6, num_groups=2, device="meta")
    assert (
        layer.running_covariance.is_meta
        and layer.running_covariance.shape == (6, 3)
        and layer.group_size == 3
    )
    assert layer(torch.empty(2, 6, 4, 4, device="meta")).shape == (2, 6, 4, 4)
    assert (
        "group_size=3" in repr(layer)
        and "noise=0.4" in repr(layer)
        and "noise" not in repr(DecorrelatedBatchNorm2d(6))
    )
    assert torch.nn.utils.skip_init(
        DecorrelatedBatchNorm1d, 4
    ).weight.shape == (4,)
    assert (
        DecorrelatedBatchNorm1d(4, bias=False).bias is None
        and DecorrelatedBatchNorm1d(4, affine=False).weight is None
    )


@pytest.mark.parametrize(
    "bad, error, words",
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
    ],
)
def test_bad_input(bad, error, words):
    with pytest.raises(error, match=words):
        bad()


def test_memory_kept_for_the_backward_pass():
    """Of the input's size: the centred input for the plain layer; the normality
    layer's own input in addition.
    """
    torch.manual_seed(0)
    u = skewed((64, 8, 4, 4)).requires_grad_()
    for layer, allowed in (
        (DecorrelatedBatchNorm2d(8, affine=False), 1),
        (DecorrelatedBatchNormalNorm2d(8), 2),
    ):
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (
                kept.setdefault(
                    t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
                )
                and t
            ),
            lambda t: t,
        ):
            layer(u)
        assert sum(kept.values()) < (allowed + 0.35) * u.numel() * 4, (
            sum(kept.values()) / u.numel() / 4
        )
    assert covariance(u.flatten(1)).dtype == torch.float64


def test_defaults_of_the_functional_forms_are_those_of_the_layers():
    """Groups of 16 channels, ε = 1e-5, the exact root; noise of 0.4: by values,
    not by names.
    """
    u = torch.randn(60, 40, dtype=torch.float64).exp()
    torch.testing.assert_close(
        decorrelated_batch_norm(u, training=True),
        DecorrelatedBatchNorm1d(
            40, group_size=16, eps=1e-5, dtype=torch.float64
        )(u),
    )
    found = []
    for function in (
        lambda: decorrelated_batch_normal_norm(u, training=True),
        lambda: decorrelated_batch_normal_norm(
            u, training=True, group_size=16, noise=0.4
        ),
        lambda: DecorrelatedBatchNormalNorm1d(
            40, group_size=16, noise=0.4, dtype=torch.float64
        )(u),
        lambda: DecorrelatedBatchNormalNorm1d(40, dtype=torch.float64)(u),
    ):
        torch.manual_seed(0)
        found.append(function())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "layer",
    [
        DecorrelatedBatchNorm1d,
        DecorrelatedBatchNorm2d,
        SyncDecorrelatedBatchNorm,
    ],
    ids=lambda layer: layer.__name__,
)
@pytest.mark.parametrize(
    "setting",
    [
        {"noise": 0.4},
        {"noise": 0.0},
        {"alpha": 0.0},
        {"steps": 1},
        {"safeguard": False},
        {"noise_kind": "scaled"},
        {"gaussianizer": Power()},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_the_plain_layer_has_no_settings_of_normality(layer, setting):
    "Neither transform nor noise: refused, whatever the value."
    with pytest.raises(TypeError, match=next(iter(setting))):
        layer(4, group_size=2, **setting)
