"""Decorrelated batch norm and its normality form beyond their chapter:
precision, layouts, modes, faults, compilation, interchange.
"""

import functools

import pytest
import scipy.linalg
import torch
from torch import nn

import normalnorm
from normalnorm.layers.decorrelated import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNormalNorm1d,
    DecorrelatedBatchNormalNorm2d,
    decorrelated_batch_norm,
    decorrelated_batch_normal_norm,
)
from normalnorm.layers.sync_decorrelated import SyncDecorrelatedBatchNorm
from normalnorm.theory.gradient import Power
from normalnorm.theory.whitening import (
    covariance,
    matrix_roots,
    newton_schulz,
    newton_schulz_iterations,
    whitening_matrix,
)
from tests.layers.steps import kept_bytes, refusals, step


def skewed(shape, dtype=torch.float32):
    "Channels that are mixtures of log-normal sources."
    u = torch.randn(shape, dtype=dtype).exp()
    return torch.einsum(
        "bc...,cd->bd...", u, torch.randn(shape[1], shape[1], dtype=dtype)
    )


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


def test_running_averages_by_hand():
    layer = DecorrelatedBatchNormalNorm2d(
        5, group_size=3, momentum=None, noise=0.0
    )
    batches = [skewed((3, 5, 7, 2)) for _ in range(3)]
    for u in batches:
        layer(u)
    average = lambda of: torch.stack(
        [of(u.transpose(0, 1).flatten(1)) for u in batches]
    ).mean(0)
    torch.testing.assert_close(layer.running_mean, average(lambda x: x.mean(1)))
    cov = average(torch.cov)
    torch.testing.assert_close(
        layer.running_covariance,
        torch.cat([cov[:3, :3], nn.functional.pad(cov[3:, 3:], (0, 1))]),
        rtol=1e-4,
        atol=1e-4,
    )
    assert layer.num_batches_tracked == 3 and (layer.running_lambda != 1).all()


def test_averages_of_fewer_channels_than_a_group_has():
    mean, cov = torch.zeros(3), torch.eye(3)
    decorrelated_batch_norm(torch.randn(9, 3) + 5, mean, cov, training=True)
    assert (mean > 0.3).all() and (cov != torch.eye(3)).all()


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


def test_the_function_adds_no_noise_in_evaluation():
    given = skewed((3, 5, 7)), torch.zeros(5), torch.eye(5), torch.ones(5)
    assert torch.equal(
        decorrelated_batch_normal_norm(*given, noise=0.4),
        decorrelated_batch_normal_norm(*given, noise=0.0),
    )


def test_groups_by_their_number():
    layer = DecorrelatedBatchNormalNorm2d(6, num_groups=2)
    assert layer.running_covariance.shape == (6, layer.group_size) == (6, 3)
    assert "group_size=3" in repr(layer)
    assert DecorrelatedBatchNorm1d(20).group_size == 16


test_bad_input = refusals(
    [
        (
            lambda: normalnorm.SyncDecorrelatedBatchNormalNorm(5, steps=2),
            NotImplementedError,
            "steps=2",
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
    u = skewed((64, 8, 4, 4))
    assert kept_bytes(layer, u) / u.nbytes < allowed + 0.35
    assert covariance(u.flatten(1)).dtype == torch.float64
