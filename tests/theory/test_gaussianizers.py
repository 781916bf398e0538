"""Other gaussianizers beyond their chapters: precision over the whole range,
random samples, axes, dtypes, edge values, compilation, layers, bad input.
"""

import math

import mpmath as mp
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from normalnorm.layers.core import normality_norm
from normalnorm.layers.normality import (
    BatchNormalNorm1d,
    LayerNormalNorm,
)
from normalnorm.layers.weights import gaussianized_direction
from normalnorm.theory.gaussianizers import Chain, Tail
from normalnorm.theory.gradient import Power
from normalnorm.theory.iterative import IterativeGaussianizer, random_rotation
from normalnorm.theory.lambert import igmm, lambert_w, tail_transform
from normalnorm.theory.newton import Over, newton_lambda, standardized
from normalnorm.theory.power_transform import yeo_johnson
from normalnorm.theory.ranks import rank_scores, ranks, soft_rank_scores
from normalnorm.theory.tails import (
    newton_delta,
    ratio_to_theta,
    tail_delta,
    tail_nll,
)
from tests.refusals import refusals

D = torch.float64
ALL = (
    Power(),
    Power(steps=3),
    Tail(),
    Tail(1),
    Tail(method="newton"),
    Chain(),
    Chain(Tail(), Power(steps=2)),
)


# -- Lambert's function and the tail transform


def test_lambert_w_at_the_ends():
    for near in (1e-14 - math.exp(-1), -0.338, 1e-38, 1e37):
        with mp.workdps(40):
            exact = float(mp.lambertw(mp.mpf(near)).real)
        assert lambert_w(torch.tensor(near, dtype=D)).item() == pytest.approx(
            exact, rel=1e-15, abs=0
        )
    # PyTorch 2.4 has no logarithm of 1 + 1.7e308
    x = torch.tensor([-0.5, -math.inf, math.nan, math.inf, 0.0, 1e306], dtype=D)
    w = lambert_w(x)
    assert (
        w[:3].isnan().all()
        and w[3] == math.inf
        and w[4] == 0
        and abs(w[5] - scipy.special.lambertw(1e306).real) < 1e-12
    )
    assert (
        lambert_w(torch.tensor(2.0, dtype=torch.bfloat16)).dtype
        == torch.bfloat16
    )


def test_lambert_w_derivatives_to_fourth_order():
    x0 = 0.7
    x = torch.tensor(x0, dtype=D, requires_grad=True)
    value = lambert_w(x)
    for order in range(1, 5):
        (value,) = torch.autograd.grad(value, x, create_graph=True)
        with mp.workdps(30):
            assert value.item() == pytest.approx(
                float(mp.diff(lambda t: mp.lambertw(t).real, x0, order)),
                rel=1e-10,
            )


@pytest.mark.parametrize(
    "dtype, large", [(torch.float32, [3e38]), (D, [1e200, 1e300, 1e160])]
)
def test_tail_transform_against_forty_digits(dtype, large):
    "Where the square overflows, too."
    rng = np.random.default_rng(0)
    z = np.append(10.0 ** rng.uniform(-30, 37, 200), large)
    delta = 10.0 ** rng.uniform(-37, 2, len(z))
    z, delta = (torch.tensor(v).to(dtype) for v in (z, delta))
    with mp.workdps(40):
        for a, d, x in zip(
            z.double().tolist(),
            delta.double().tolist(),
            tail_transform(z, delta),
        ):
            exact = mp.sqrt(
                mp.lambertw(mp.mpf(d) * mp.mpf(a) ** 2).real / mp.mpf(d)
            )
            assert abs(mp.mpf(x.item()) - exact) <= 4 * np.spacing(
                abs(x.numpy())
            ), (a, d)


def test_tail_transform_does_not_round_a_number_to_float32():
    z = torch.linspace(-3, 3, 13, dtype=D)
    assert torch.equal(
        tail_transform(z, 0.1), tail_transform(z, torch.tensor(0.1, dtype=D))
    )
    assert (
        tail_transform(z.float(), torch.tensor(0.1, dtype=D)).dtype
        == torch.float32
    )


def test_tail_transform_derivatives_of_every_kind():
    z, delta = (
        torch.tensor([-2.0, 0.0, 0.3, 5.0], dtype=D),
        torch.tensor([[0.4], [-0.05]], dtype=D),
    )
    z, delta = z.requires_grad_(), delta.requires_grad_()
    assert torch.autograd.gradcheck(
        tail_transform,
        (z, delta),
        check_forward_ad=True,
        check_batched_grad=True,
    )
    third = torch.func.grad(torch.func.grad(torch.func.grad(tail_transform)))(
        torch.tensor(0.7, dtype=D), 0.4
    )
    with mp.workdps(30):
        assert third.item() == pytest.approx(
            float(
                mp.diff(
                    lambda t: (
                        t * mp.exp(-mp.lambertw(mp.mpf("0.4") * t * t).real / 2)
                    ),
                    0.7,
                    3,
                )
            ),
            rel=1e-9,
        )
    many = torch.func.vmap(tail_transform, (None, 0))(z, delta)
    assert torch.equal(many, tail_transform(z, delta))


def test_slope_in_delta_at_zero_is_that_of_both_sides():
    z = torch.tensor([0.5, -3.0], dtype=D)
    delta = torch.zeros(2, dtype=D, requires_grad=True)
    (slope,) = torch.autograd.grad(tail_transform(z, delta).sum(), delta)
    torch.testing.assert_close(slope, -(z**3) / 2)
    for side in (1e-9, -1e-9):
        torch.testing.assert_close(
            (tail_transform(z, side) - z) / side,
            -(z**3) / 2,
            rtol=1e-6,
            atol=1e-6,
        )


def test_forward_mode_of_lambert_w():
    "From near −1/e to 1e5, in batches too."
    x = torch.tensor([-0.36, -0.1, 0.0, 0.7, 3.0, 1e5], dtype=D)
    assert torch.autograd.gradcheck(
        lambert_w,
        x.requires_grad_(),
        check_forward_ad=True,
        check_batched_grad=True,
        rtol=1e-2,
    )


# -- estimates


def test_light_tails_are_left_alone_unless_asked():
    u = torch.linspace(-1, 1, 101)
    assert (
        newton_delta(u, -1) == 0
        and newton_delta(u, -1, light=True) < -0.2
        and tail_delta(u, -1, steps=3) == 0
    )


def test_a_step_that_would_lower_the_likelihood_is_refused():
    # found by search: the bare step raises it by 0.03
    odd = torch.tensor([[0.003, 0.001, 0.0, -0.113, -1.0]], dtype=D)
    heavy = torch.tensor(np.random.default_rng(0).standard_cauchy((20, 500)))
    for k in (standardized(odd, -1), standardized(heavy, -1)):
        values = torch.stack(
            [
                tail_nll(k, tail_delta(k, -1, steps=s)[:, None], Over(-1))
                for s in range(4)
            ]
        )
        assert (values.diff(dim=0) <= 1e-9).all()


def test_ratio_to_theta_at_the_ends():
    rho = torch.tensor([1e-12, 1e-6, 1.0, 1.2, math.nan], dtype=D)
    theta = ratio_to_theta(rho)
    assert (
        (theta[:2] < 0.5 + 1e-15).all()
        and theta[2] == theta[3] == 0
        and theta[4].isnan()
    )


# -- ranks


def test_rank_scores_against_scipy_over_two_axes():
    x = torch.randint(0, 9, (4, 5, 6)).to(D)
    whole = (
        scipy.stats.rankdata(x.permute(1, 0, 2).reshape(5, -1).numpy(), axis=-1)
        .reshape(5, 4, 6)
        .transpose(1, 0, 2)
    )
    np.testing.assert_allclose(ranks(x, (0, 2)).numpy(), whole)
    np.testing.assert_allclose(
        rank_scores(x, (0, 2), 0.0).numpy(),
        scipy.stats.norm.ppf(whole / 25),
        atol=1e-12,
    )


def test_rank_scores_of_odd_samples():
    x = torch.tensor(
        [[5.0, 5.0, 5.0], [1.0, math.inf, -math.inf], [1.0, math.nan, 2.0]]
    )
    y = rank_scores(x, -1)
    assert (
        torch.equal(y[0], torch.zeros(3))
        and y[1, 0] == 0
        and y[1, 1] == -y[1, 2] > 0
        and y[2].isnan().all()
    )
    assert (
        rank_scores(torch.tensor([[3.0]])) == 0
        and rank_scores(x.half()).dtype == torch.float16
    )
    v = torch.randn(9, requires_grad=True)
    rank_scores(v).sum().backward()
    assert torch.equal(v.grad, torch.zeros(9))


def test_straight_through_is_the_gradient_of_the_standardization():
    x, g = torch.randn(2, 3, 20, dtype=D)
    x.requires_grad_()
    (hard,) = torch.autograd.grad(
        (rank_scores(x, straight_through=True) * g).sum(), x
    )
    (plain,) = torch.autograd.grad((standardized(x, -1) * g).sum(), x)
    torch.testing.assert_close(hard, plain)
    torch.testing.assert_close(
        rank_scores(x, straight_through=True), rank_scores(x)
    )


def test_soft_ranks_tend_to_hard_ones_and_take_axes():
    x = torch.randn(3, 40, 2, dtype=D)
    torch.testing.assert_close(
        soft_rank_scores(x, 1, 1e-6),
        rank_scores(x, 1, 0.5),
        rtol=1e-6,
        atol=1e-6,
    )
    torch.testing.assert_close(
        soft_rank_scores(x, (0, 1))[:, :, 0].flatten(),
        soft_rank_scores(x[:, :, 0].flatten()),
    )
    assert (
        torch.equal(soft_rank_scores(torch.ones(2, 4)), torch.zeros(2, 4))
        and soft_rank_scores(torch.tensor([1.0, math.inf, 2.0])).isnan().all()
    )
    assert soft_rank_scores(x.bfloat16(), 1).dtype == torch.bfloat16


# -- gaussianizers and layers


@pytest.mark.parametrize("g", ALL, ids=lambda g: type(g).__name__)
def test_gaussianizers_over_axes_shift_scale_dtype_and_edges(g):
    u = torch.randn(4, 30, 3, dtype=D).exp()
    x = g(u, (0, 1))
    torch.testing.assert_close(x[:, :, 1].flatten(), g(u[:, :, 1].flatten(), 0))
    torch.testing.assert_close(g(3 * u - 7, (0, 1)), x, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(
        g(u.float(), (0, 1)).double(), x, rtol=1e-4, atol=1e-4
    )
    assert torch.equal(
        g(torch.full((5, 2), 3.0), 0), torch.zeros(5, 2)
    ) and torch.equal(g(torch.ones(1, 2), 0), torch.zeros(1, 2))
    bad = u.clone()
    bad[0, 0, 0] = math.inf
    out = g(bad, (0, 1))
    assert out[..., 0].isnan().all() and torch.equal(out[..., 1:], x[..., 1:])
    parts = (u - u.mean((0, 1), keepdim=True)) / u.std(
        (0, 1), correction=0, keepdim=True
    )
    for a, b in zip(
        g.estimate(parts, Over((0, 1))), g.estimate(parts, Over((0, 1)))
    ):
        assert torch.equal(a, b) and a.shape == (1, 1, 3)
    v = u[0, :8].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: g(v, 0), v, fast_mode=True)
    with pytest.raises(TypeError, match="float"):
        g(torch.ones(3, dtype=torch.long), 0)


@pytest.mark.parametrize("g", ALL, ids=lambda g: type(g).__name__)
def test_a_constant_unit_has_a_finite_gradient(g):
    u = torch.cat(
        [torch.full((6, 1), 2.0), torch.randn(6, 1)], 1
    ).requires_grad_()
    g(u, 0).square().sum().backward()
    assert u.grad.isfinite().all()


def test_power_and_chain_by_hand():
    u = torch.randn(2, 200, dtype=D).exp() * torch.randn(2, 200, dtype=D)
    x = yeo_johnson(standardized(u, -1), newton_lambda(u, -1)[:, None])
    torch.testing.assert_close(Power()(u, -1), x)
    torch.testing.assert_close(
        Chain()(u, -1),
        tail_transform(standardized(x, -1), tail_delta(x, -1)[:, None]),
    )


@pytest.mark.parametrize("delta", [-0.7, -0.05, -1e-9, 0.0, 1e-9, 0.3, 5.0])
def test_log_slope_of_the_tail_transform_is_the_logarithm_of_its_derivative(
    delta,
):
    "For either sign of δ, by autodiff."
    h = torch.linspace(-3, 3, 25, dtype=D, requires_grad=True)
    parameters = (torch.tensor([delta], dtype=D),)
    (slope,) = torch.autograd.grad(Tail().apply(h, parameters).sum(), h)
    torch.testing.assert_close(
        Tail().log_slope(h.detach(), parameters),
        slope.log(),
        rtol=1e-12,
        atol=1e-14,
    )


test_wrong_arguments_say_what_is_expected = refusals(
    [
        (lambda: rank_scores(torch.randn(3), c=1.0), "c=1.0"),
        (lambda: rank_scores(torch.empty(2, 0)), "at least one element"),
        (
            lambda: soft_rank_scores(torch.randn(3), temperature=0.0),
            "temperature",
        ),
        (lambda: tail_delta(torch.randn(3), 0, steps=-1), "steps=-1"),
        (lambda: tail_delta(torch.empty(0, 2), 0), "at least one element"),
        (lambda: Tail(1, "newton"), "steps=1"),
        (lambda: Tail(method="x"), "method='x'"),
        (lambda: IterativeGaussianizer(0), "rounds=0"),
        (lambda: IterativeGaussianizer(rotation="ica"), "rotation='ica'"),
        (
            lambda: IterativeGaussianizer().transform(torch.randn(3, 2)),
            "not fitted",
        ),
        (lambda: IterativeGaussianizer().fit(torch.randn(3)), r"\(3,\)"),
        (
            lambda: BatchNormalNorm1d(3, gaussianizer=Tail())(
                torch.randn(4, 2)
            ),
            "num_features=3",
        ),
        (lambda: BatchNormalNorm1d(0, gaussianizer=Tail()), "num_features=0"),
        (
            lambda: LayerNormalNorm(3, gaussianizer=Tail())(torch.randn(4, 2)),
            "normalized_shape",
        ),
        (
            lambda: BatchNormalNorm1d(3, noise=-1.0, gaussianizer=Tail()),
            "noise",
        ),
        (
            lambda: BatchNormalNorm1d(3, alpha=0.5, gaussianizer=Tail()),
            "alpha=0.5.*gaussianizer=Tail was given too: set them there",
        ),
        (
            lambda: LayerNormalNorm(3, steps=2, gaussianizer=Power()),
            "steps=2.*gaussianizer=Power was given too",
        ),
        (
            lambda: normality_norm(
                torch.randn(4, 2), (0,), safeguard=True, gaussianizer=Chain()
            ),
            "safeguard=True.*gaussianizer=Chain",
        ),
    ]
)


# -- iterative gaussianization


def test_rotations_are_orthogonal_and_uniform():
    g = torch.Generator().manual_seed(0)
    many = torch.stack([random_rotation(3, g) for _ in range(3000)])
    torch.testing.assert_close(
        many @ many.mT, torch.eye(3, dtype=D).expand(3000, 3, 3)
    )
    assert (
        many.mean(0).abs().max() < 0.05
        and (many.square().mean(0) - 1 / 3).abs().max() < 0.03
        and (torch.linalg.det(many) > 0).double().mean().sub(0.5).abs() < 0.05
    )


@pytest.mark.parametrize("rotation", ["random", "pca"])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_log_density_is_the_normal_one_moved_by_the_map(rotation, d):
    """At the transformed points: log of the normal density, with its constant,
    and of the determinant of the Jacobian by autodiff. The map that is stored
    gives the same values again, and so does another of the same seed.
    """
    x = (
        torch.randn(200, d, dtype=D) @ torch.randn(d, d, dtype=D)
        + 0.3 * torch.randn(200, d, dtype=D) ** 3
    )
    for g in (None, Power(safeguard=True), Tail()):
        flow, again = (
            IterativeGaussianizer(3, g, rotation, seed=1) for _ in "ab"
        )
        y = flow.fit_transform(x)
        torch.testing.assert_close(flow.inverse(y), x, rtol=1e-7, atol=1e-7)
        for fitted in (flow, again.fit(x)):
            torch.testing.assert_close(fitted.transform(x), y)
        points = torch.cat([x[:5], x[:2] * 1.5 + 1])
        jacobian = torch.func.vmap(
            torch.func.jacrev(lambda p: flow.transform(p[None])[0])
        )(points)
        expected = (
            torch.distributions.Normal(0.0, 1.0)
            .log_prob(flow.transform(points))
            .sum(-1)
            + torch.linalg.slogdet(jacobian)[1]
        )
        torch.testing.assert_close(
            flow.log_density(points), expected, rtol=1e-10, atol=1e-10
        )


def test_constant_coordinate_and_nan():
    x = torch.randn(50, 3)
    x[:, 1] = 2.0
    assert IterativeGaussianizer(3).fit_transform(x).isfinite().all()
    x[0, 0] = math.nan
    assert IterativeGaussianizer(3).fit_transform(x).isnan().any()


def test_a_chain_names_its_parameters_part_by_part():
    chain = Chain(Tail(), Power(), Tail())
    assert chain.names == (
        "delta",
        "mean1",
        "deviation1",
        "lambda1",
        "mean2",
        "deviation2",
        "delta2",
    ) and chain.neutral == (0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0)


# each function asks by itself, and names itself; a number of Python's is no
# tensor
test_only_real_numbers = refusals(
    (
        (
            lambda function=function, bad=bad: function(bad),
            TypeError,
            f"^{name} expects a real floating-point tensor, not {what}",
        )
        for name, function in {
            "lambert_w": lambert_w,
            "tail_transform": lambda v: tail_transform(v, torch.tensor(0.1)),
            "igmm": lambda v: igmm(v, 0),
            "newton_delta": lambda v: newton_delta(v, 0),
            "tail_delta": lambda v: tail_delta(v, 0),
            "Power": lambda v: Power()(v, 0),
            "Tail": lambda v: Tail()(v, 0),
            "Chain": lambda v: Chain()(v, 0),
            "IterativeGaussianizer": lambda v: IterativeGaussianizer(1).fit(v),
            "gaussianized_direction": gaussianized_direction,
        }.items()
        for bad, what in (
            (torch.ones(6, 3, dtype=torch.int64), "torch.int64"),
            (torch.ones(6, 3, dtype=torch.complex64), "torch.complex64"),
            (torch.ones(6, 3, dtype=torch.bool), "torch.bool"),
            (2.0, "float"),
        )
    )
)
