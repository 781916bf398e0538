"""What a function of theory or analysis does when nothing is said: the value
with its documented defaults written out, and another value with other ones.
"""

import math

import numpy as np
import pytest
import torch

from normalnorm.analysis import (
    dependence,
    gaussianity,
    joint_normality,
    negentropy,
    normality_tests,
)
from normalnorm.theory import (
    curvature,
    game,
    gaussianizers,
    geometry,
    gradient,
    independence,
    information,
    iterative,
    lambert,
    newton,
    overflow,
    power_transform,
    ranks,
    scale_invariance,
    tails,
    whitening,
)

torch.manual_seed(0)
U = torch.randn(40, 3, dtype=torch.float64).exp()
K = newton.standardized(U, (0,))
HEAVY = torch.distributions.StudentT(
    torch.tensor(3.0, dtype=torch.float64)
).sample((300, 2))
COV = whitening.covariance(torch.randn(3, 50, dtype=torch.float64))
CHANNEL = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])
LATTICE = np.arange(-2.0, 3)
P, Q = np.array([0.1, 0.2, 0.3, 0.2, 0.2]), np.array([0.2, 0.2, 0.2, 0.3, 0.1])
X, Y = torch.randn(2, 90, dtype=torch.float64)
WIDE, SQUARE = (
    torch.randn(60, 3, dtype=torch.float64).exp(),
    torch.randn(24, 25, dtype=torch.float64).exp(),
)

CASES = {
    "require_positive": (
        lambda **o: curvature.require_positive(
            lambda x: x.square() + 0.1, -1, 1, **o
        ),
        dict(cells=1024),
        dict(cells=512),
    ),
    "easy_curvature_bound": (
        curvature.easy_curvature_bound,
        dict(target=(1879, 10000), t=(3768, 10000), c=(6701, 10000)),
        dict(target=(1870, 10000)),
    ),
    "sharp_curvature_bound": (
        curvature.sharp_curvature_bound,
        dict(shift=0.0, spend=1.0, split=0.5),
        dict(shift=-1e-3),
    ),
    "duality_gap": (
        lambda **o: game.duality_gap(LATTICE, P, Q, **o),
        dict(power=1.0, noise_power=1.0),
        dict(power=1.5),
        dict(noise_power=1.5),
    ),
    "mirror_play": (
        lambda **o: game.mirror_play(LATTICE, P, Q, **o).history,
        dict(power=1.0, noise_power=1.0, steps=1000, rate=1.0),
        dict(steps=900),
        dict(rate=0.5),
        dict(power=1.2),
        dict(noise_power=1.2),
    ),
    "Power": (
        lambda **o: gaussianizers.Power(**o)(U, 0),
        dict(alpha=1.0, steps=1, safeguard=False),
        dict(alpha=0.9),
        dict(steps=2),
    ),
    "Tail": (
        lambda **o: gaussianizers.Tail(**o)(HEAVY, 0),
        dict(steps=0, method="deviation"),
        dict(steps=1),
        dict(method="newton"),
    ),
    "radius": (
        lambda **o: geometry.radius(torch.tensor(2.0), 0.3, 5, **o),
        dict(times=1),
        dict(times=2),
    ),
    "normalization_jacobian": (
        lambda **o: geometry.normalization_jacobian(U, **o),
        dict(eps=0.0, centre=True),
        dict(eps=0.1),
        dict(centre=False),
    ),
    "next_norm": (
        lambda **o: scale_invariance.next_norm(2.0, 3.0, 0.1, **o),
        dict(weight_decay=0.0),
        dict(weight_decay=0.1),
    ),
    "weight_norm_gradient": (
        lambda **o: scale_invariance.weight_norm_gradient(
            SQUARE[:, :24],
            torch.ones((), dtype=torch.float64),
            SQUARE[:, 1:],
            **o,
        )[0],
        dict(dim=-1),
        dict(dim=0),
    ),
    "newton_lambda_gradient": (
        lambda **o: gradient.newton_lambda_gradient(K, (0,), **o),
        dict(alpha=1.0),
        dict(alpha=0.5),
    ),
    "least_dependent": (
        lambda **o: independence.least_dependent(
            [0, 1, 3], [0.5, 0.3, 0.2], [0, 1], [0.6, 0.4], 0.5, **o
        ),
        dict(tolerance=1e-10),
        dict(tolerance=1e-3),
    ),
    "bimodal": (
        lambda **o: np.array(
            [information.bimodal(**o).mean, information.bimodal(**o).pdf(0.3)]
        ),
        dict(separation=0.8, mean=0.0, variance=1.0),
        dict(separation=0.7),
        dict(mean=1.0),
        dict(variance=2.0),
    ),
    **{
        law.__name__: (
            lambda law=law, **o: np.array([law(**o).mean, law(**o).variance]),
            dict(mean=0.0, variance=1.0),
            dict(mean=1.0),
            dict(variance=2.0),
        )
        for law in (
            information.normal,
            information.uniform,
            information.laplace,
            information.exponential,
        )
    },
    "affine": (
        lambda **o: np.array(
            [(law := information.uniform(2.0).affine(**o)).mean, law.variance]
        ),
        dict(scale=1.0, shift=0.0),
        dict(scale=2.0),
        dict(shift=1.0),
    ),
    "differential_entropy": (
        lambda **o: information.differential_entropy(
            information.bimodal(), **o
        ),
        dict(step=1e-3),
        dict(step=2e-3),
    ),
    "entropy_of_sum": (
        lambda **o: information.entropy_of_sum(
            information.laplace(), information.normal(), **o
        ),
        dict(step=1e-3),
        dict(step=2e-3),
    ),
    "mutual_information": (
        lambda **o: information.mutual_information(
            information.laplace(), information.normal(), **o
        ),
        dict(tolerance=1e-6, step=1.5e-3),
        dict(step=9e-3, tolerance=1.0),
    ),
    "blahut_arimoto": (
        lambda **o: information.blahut_arimoto(CHANNEL, **o)[:2],
        dict(budget=math.inf, tolerance=1e-6, iterations=10_000),
        dict(tolerance=1e-2),
        dict(iterations=2),
    ),
    "random_rotation": (
        lambda **o: iterative.random_rotation(
            3, torch.Generator().manual_seed(1), **o
        ),
        dict(dtype=torch.float64),
        dict(dtype=torch.float32),
    ),
    "IterativeGaussianizer": (
        lambda **o: iterative.IterativeGaussianizer(**o).fit_transform(WIDE),
        dict(
            rounds=10,
            rotation="random",
            seed=0,
            gaussianizer=gaussianizers.Chain(),
        ),
        dict(rounds=9),
        dict(rotation="pca"),
        dict(seed=1),
    ),
    "igmm": (
        lambda **o: torch.stack(tuple(lambert.igmm(HEAVY, 0, **o))),
        dict(steps=12),
        dict(steps=1),
    ),
    "newton_lambda": (
        lambda **o: newton.newton_lambda(U, 0, **o),
        dict(alpha=1.0, steps=1, safeguard=False),
        dict(alpha=0.9),
        dict(steps=2),
    ),
    "newton_lambda_standardized": (
        lambda **o: newton.newton_lambda_standardized(K, (0,), **o),
        dict(alpha=1.0, steps=1, safeguard=False),
        dict(alpha=0.9),
        dict(steps=2),
    ),
    "exponent_bound": (
        lambda **o: overflow.exponent_bound(10_000, **o),
        dict(points=600, factor=(1, 1)),
        dict(points=500),
        dict(factor=(2, 3)),
    ),
    "power_transform_derivative": (
        lambda **o: power_transform.power_transform_derivative(U, 0.5, **o),
        dict(k=1),
        dict(k=0),
        dict(k=2),
    ),
    "yeo_johnson_nll": (
        lambda **o: power_transform.yeo_johnson_nll(U, 0.5, **o),
        dict(dim=-1),
        dict(dim=0),
    ),
    "rank_scores": (
        lambda **o: ranks.rank_scores(U, **o),
        dict(dim=-1, c=0.375),
        dict(dim=0),
        dict(c=0.5),
    ),
    "soft_rank_scores": (
        lambda **o: ranks.soft_rank_scores(U, **o),
        dict(dim=-1, temperature=0.1),
        dict(dim=0),
        dict(temperature=0.2),
    ),
    "newton_delta": (
        lambda **o: tails.newton_delta(torch.linspace(0, 1, 9), 0, **o),
        dict(light=False),
        dict(light=True),
    ),
    "tail_delta": (
        lambda **o: tails.tail_delta(HEAVY, 0, **o),
        dict(steps=0),
        dict(steps=1),
    ),
    "matrix_roots": (
        lambda **o: torch.stack(whitening.matrix_roots(COV, **o)),
        dict(eps=0.0),
        dict(eps=1e-3),
    ),
    "newton_schulz": (
        lambda **o: whitening.newton_schulz(COV, **o),
        dict(eps=0.0, iterations=5),
        dict(eps=1e-3),
        dict(iterations=3),
    ),
    "newton_schulz_iterations": (
        lambda **o: whitening.newton_schulz_iterations(50.0, 8, **o),
        dict(tolerance=1e-6),
        dict(tolerance=1e-1),
    ),
    "whitening_matrix": (
        lambda **o: whitening.whitening_matrix(COV, **o),
        dict(eps=1e-5, method="eigh", iterations=5),
        dict(eps=1e-3),
        dict(method="newton_schulz", iterations=2),
    ),
    "knn information": (
        lambda **o: dependence.mutual_information(X, X + Y, **o),
        dict(dim=-1, k=3, variant=1),
        dict(k=4),
        dict(variant=2),
    ),
    "excess_mutual_information": (
        lambda **o: dependence.excess_mutual_information(X, X + Y, **o),
        dict(dim=-1, k=3, variant=1),
        dict(k=4),
        dict(variant=2),
    ),
    "distance_correlation": (
        lambda **o: dependence.distance_correlation(U, U.flip(0), **o),
        dict(dim=-1),
        dict(dim=0),
    ),
    "unbiased_distance_correlation": (
        lambda **o: dependence.unbiased_distance_correlation(
            U.T, U.T.flip(0), **o
        ),
        dict(dim=-1),
    ),
    "qq_r2": (lambda **o: gaussianity.qq_r2(U, **o), dict(dim=-1), dict(dim=0)),
    "henze_zirkler": (
        lambda **o: joint_normality.henze_zirkler(U, **o).statistic,
        dict(dim=-2, coordinates=-1),
    ),
    "negentropy": (
        lambda **o: negentropy.negentropy(U.T, **o),
        dict(dim=-1, m=3),
        dict(m=2),
    ),
    **{
        test.__name__: (
            lambda test=test, **o: test(SQUARE, **o).statistic,
            dict(dim=-1),
            dict(dim=0),
        )
        for test in (
            normality_tests.shapiro_wilk,
            normality_tests.dagostino,
            normality_tests.anderson_darling,
        )
    },
}


def as_arrays(value):
    return np.asarray(
        value.detach() if isinstance(value, torch.Tensor) else value, dtype=None
    )


@pytest.mark.parametrize("name", CASES)
def test_default(name):
    function, documented, *others = CASES[name]
    default = as_arrays(function())
    np.testing.assert_array_equal(as_arrays(function(**documented)), default)
    for other in others:
        changed = as_arrays(function(**other))
        assert (
            changed.dtype != default.dtype
            or changed.shape != default.shape
            or not np.array_equal(changed, default)
        ), other


def test_gradients_of_the_transform_go_through_lambda_unless_it_is_given():
    "Against autodiff of the whole, and with λ̂ held."
    u = torch.randn(30, 2, dtype=torch.float64).exp().requires_grad_()
    g = torch.randn(30, 2, dtype=torch.float64)
    mean, var = u.mean(0, keepdim=True), u.var(0, correction=0, keepdim=True)
    rate, bare = (var + 1e-3).rsqrt(), var.rsqrt()
    lmbda = newton.newton_lambda(u, 0)[None]
    for options, through in (
        ({}, True),
        (
            dict(
                gaussianizer=gradient.Power(),
                fitted=None,
                through_parameters=True,
            ),
            True,
        ),
        (dict(through_parameters=False), False),
    ):
        (expected,) = torch.autograd.grad(
            power_transform.yeo_johnson(
                (u - mean) * rate, lmbda if through else lmbda.detach()
            ),
            u,
            g,
            retain_graph=True,
        )
        found = gradient.gaussianized_gradient(
            *(x.detach() for x in (u, g, mean, rate, bare)),
            (lmbda.detach(),),
            (0,),
            **options,
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_play_is_reported_at_the_first_steps_and_then_more_rarely():
    steps = (
        game.mirror_play(LATTICE, P, Q, steps=100)
        .history[:, 0]
        .astype(int)
        .tolist()
    )
    assert (
        steps[:6] == [1, 2, 3, 4, 5, 6]
        and steps[-1] == 100
        and len(steps) < 25
        and all(b - a <= max(1, 0.3 * a) for a, b in zip(steps, steps[1:]))
    )
