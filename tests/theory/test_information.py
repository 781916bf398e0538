"""Part 1: the information engine against brute force, the game, estimation,
independence; faults.
"""

import math

import mpmath as mp
import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import torch

from normalnorm.theory import estimation, game, independence, information
from normalnorm.theory.information import (
    Law,
    _common_step,
    _linear_piece,
    bimodal,
    blahut_arimoto,
    differential_entropy,
    entropy,
    entropy_of_sum,
    exponential,
    gaussian_capacity,
    kl_divergence,
    laplace,
    mixture,
    mutual_information,
    normal,
    points,
    student,
    table_information,
    uniform,
)
from tests.refusals import refusals

# ---- the engine -------------------------------------------------------------


def test_the_error_bound_is_that_of_the_theorem():
    """Coarse cells; blurs by quadrature of p·log(p/p̄), S by loops over pairs
    of cells: the bound of chapter 110, term by term.
    """
    step, x, z = 0.25, normal(), laplace()
    cells, blurs = [], []
    for law in (x, z):
        k = np.arange(-100, 100) if law is x else np.arange(-120, 120)
        edges = step * np.append(k, k[-1] + 1)
        mass = np.array(
            [
                scipy.integrate.fixed_quad(law.pdf, a, b, n=12)[0]
                for a, b in zip(edges, edges[1:])
            ]
        )
        inner = [
            scipy.integrate.fixed_quad(
                lambda u: (
                    law.pdf(u)
                    * np.log(np.maximum(law.pdf(u), 1e-300) * step / m)
                ),
                a,
                b,
                n=12,
            )[0]
            if m > 1e-14
            else 0.0
            for a, b, m in zip(edges, edges[1:], mass)
        ]
        cells.append(mass)
        blurs.append(sum(inner))
    nodes = np.convolve(*cells)
    density = np.concatenate([[0], nodes / step, [0]]) + 1e-13
    spread = 0.0
    for k in range(1, len(density) - 1):
        slopes = [
            abs(density[k] - density[j]) / min(density[k], density[j]) / 2
            for j in (k - 1, k + 1)
        ]
        falls = sum(
            abs(math.log(density[k] / density[j])) for j in (k - 1, k + 1)
        )
        spread += nodes[k - 1] * min(max(slopes), falls) ** 2
    expected = sum(blurs) + sum(math.sqrt(2 * b * spread) for b in blurs)
    assert entropy_of_sum(x, z, step).error == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "law, low, high",
    [
        (exponential(), 0.0, 1.0),
        (exponential(), 0.0, 6.0),
        (normal(), -1.0, 9.0),
        (normal(), -9.0, 1.0),
        (laplace(), -2.0, 40.0),
        (student(6), -50.0, 0.5),
    ],
    ids=[
        "exponential",
        "exponential, little",
        "normal below",
        "normal above",
        "laplace below",
        "student above",
    ],
)
def test_what_lies_outside_of_the_window_is_in_the_bound(law, low, high):
    """Windows that cut off one side: the blur inside of them by quadrature is
    not above the bound, which exceeds it by the entropy that the outside can
    have.
    """
    (part,) = law.parts
    edges = np.linspace(
        low + part.mean() - (0 if low else part.mean()), high, 400
    )
    mass, bound = information._cells(law, edges)
    node, weight = np.polynomial.legendre.leggauss(12)
    u = (edges[1:] + edges[:-1])[:, None] / 2 + np.diff(edges)[
        :, None
    ] / 2 * node
    p = part.pdf(u)
    inside = float((np.diff(edges)[:, None] / 2 * weight * p * np.log(p)).sum())
    blur = inside - float((mass * np.log(mass / np.diff(edges))).sum())
    outside = float(part.entropy()) + inside
    tau = 1 - mass.sum()
    room = tau * (
        0.5 * abs(math.log(2 * math.pi * math.e * law.variance / tau))
        + math.log(1 / tau)
    )
    assert tau > 1e-3 and outside <= room
    assert blur <= bound + 1e-9 and bound == pytest.approx(
        blur - outside + room, rel=1e-6
    )


def test_the_width_of_cells_fits_the_supports():
    """Each length an even multiple of it, the bound then 10⁴ times smaller than
    for lengths without a common measure; the transform's rounding is no part of
    it.
    """
    for third in (2 / 3, 3 / 2, 7 / 5):
        width = _common_step((uniform(), uniform(variance=third**2)), 1e-2)
        for length in (math.sqrt(12), third * math.sqrt(12)):
            assert (
                width <= 1e-2
                and abs(length / (2 * width) - round(length / (2 * width)))
                < 1e-9
            )
    for step, most in ((0.9, 1e-5), (1e-3, 1e-8)):
        found = entropy_of_sum(uniform(), uniform(), step)
        assert abs(found.value - 0.5 - math.log(12) / 2) < found.error < most


def test_the_series_of_a_linear_piece():
    """Against its closed form in 50 digits, on both sides of where the series
    ends.
    """
    for t in (1e-6, 1e-3, 0.01, 0.0199, 0.0201, 0.3, 0.9):
        with mp.workdps(50):
            x = mp.mpf(t)
            exact = (
                (1 + x) ** 2 * (2 * mp.log1p(x) - 1)
                - (1 - x) ** 2 * (2 * mp.log1p(-x) - 1)
            ) / (8 * x)
        assert (
            _linear_piece(np.array(-t))
            == _linear_piece(np.array(t))
            == pytest.approx(float(exact), rel=1e-10)
        )


def test_information_does_not_depend_on_means_and_scale():
    for x, z in (
        (uniform(), laplace()),
        (points([-1, 0.5], [0.3, 0.7]), normal()),
        (bimodal(), exponential()),
    ):
        base = mutual_information(x, z, 1e-4, 5e-3)
        for scale in (1e-6, 1e5):
            moved = mutual_information(
                x.affine(scale, 0.7), z.affine(scale, -scale), 1e-4, 5e-3
            )
            assert abs(moved.value - base.value) <= moved.error + base.error


def test_points_with_points_are_summed_exactly():
    assert mutual_information(
        points([0, 1], [0.5, 0.5]), points([0, 2], [0.5, 0.5])
    ).value == pytest.approx(math.log(2))
    assert mutual_information(
        points([0, 1], [0.5, 0.5]), points([0, 1], [0.5, 0.5])
    ).value == pytest.approx(0.5 * math.log(2))
    # 0.1 + 0.2 and 0.3 are the same value
    assert mutual_information(
        points([0.1, 0.3], [0.5, 0.5]), points([0.2, 0.0], [0.5, 0.5])
    ).value == pytest.approx(0.5 * math.log(2))
    assert mutual_information(normal(), points([0], [1.0])).value == math.inf
    assert differential_entropy(points([0], [1.0])).value == -math.inf
    assert independence.negentropy(points([0, 1], [0.5, 0.5])).value == math.inf


def test_a_reported_bound_is_honest_where_the_grid_does_not_fit():
    "Uniform laws without a common divisor: the bound is large, and holds."
    for ratio in (math.sqrt(2), math.pi):
        value = mutual_information(
            uniform(), uniform(variance=ratio**2), 1e-3, 2e-2
        )
        assert abs(value.value - 0.5 / ratio) <= value.error


@pytest.mark.parametrize(
    "channel, capacity",
    [
        (np.eye(5), math.log(5)),
        ([[0.9, 0.1], [0.1, 0.9]], math.log(2) - entropy([0.9, 0.1])),
        ([[0.7, 0.3, 0.0], [0.0, 0.3, 0.7]], 0.7 * math.log(2)),
        ([[1.0, 0.0], [0.5, 0.5]], math.log(5 / 4)),
        ([[0.2, 0.8], [0.2, 0.8]], 0.0),
    ],
    ids=["clean", "symmetric", "erasure", "Z", "useless"],
)
def test_capacities_in_closed_form(channel, capacity):
    found = blahut_arimoto(channel, tolerance=1e-9, iterations=3000)
    assert (
        found.low - 1e-12 <= capacity <= found.high + 1e-12
        and found.high - found.low < 1e-6
    )


def test_a_budget_is_kept():
    channel, cost = np.eye(3), np.array([0.0, 1.0, 2.0])
    found = blahut_arimoto(channel, cost, 0.5)
    tilted = np.exp(-found.multiplier * cost)
    assert -1e-12 <= found.high - found.low < 2e-6
    assert found.law @ cost <= 0.5 + 1e-9 and found.law == pytest.approx(
        tilted / tilted.sum(), abs=1e-6
    )
    assert (
        blahut_arimoto(channel, cost, 5.0).low == pytest.approx(math.log(3))
        and blahut_arimoto(channel, cost, 5.0).multiplier == 0
    )
    one = blahut_arimoto(channel, cost, 0.0)
    assert one.low == pytest.approx(0.0, abs=1e-9)


def test_measures_of_laws_that_have_zeros():
    assert (
        kl_divergence([1.0, 0.0], [0.5, 0.5]) == pytest.approx(math.log(2))
        and kl_divergence([0.5, 0.5], [1.0, 0.0]) == math.inf
    )
    assert table_information(np.eye(4) / 4) == pytest.approx(math.log(4))


test_wrong_arguments_are_named = refusals(
    (wrong, r".{20}")
    for wrong in (
        lambda: entropy([0.5, math.nan]),
        lambda: entropy([0.5, 0.6]),
        lambda: entropy([]),
        lambda: entropy([1.5, -0.5]),
        lambda: kl_divergence([1.0], [0.5, 0.5]),
        lambda: table_information([1.0]),
        lambda: table_information([0.5, 0.5]),
        lambda: gaussian_capacity(math.nan),
        lambda: gaussian_capacity(-1.0),
        lambda: normal(variance=0.0),
        lambda: normal(0.0, -1.0),
        lambda: normal(math.nan),
        lambda: normal(math.inf),
        lambda: student(4.9),
        lambda: student(math.nan),
        lambda: bimodal(-0.1),
        lambda: bimodal(1.0),
        lambda: points([1, 2], [1.0]),
        lambda: points([0, math.inf], [0.5, 0.5]),
        lambda: mixture([1.0], []),
        lambda: mixture([0.5, 0.5], [normal(), points([0], [1.0])]),
        lambda: points([math.nan], [1.0]),
        lambda: mixture([0.5, 0.6], [normal(), normal()]),
        lambda: Law((1.0,), (0.0, 1.0)),
        lambda: normal().affine(math.nan),
        lambda: normal().affine(-1.0),
        lambda: points([0], [1.0]).pdf(0.0),
        lambda: entropy_of_sum(normal(), normal(), 2.0),
        lambda: entropy_of_sum(points([0], [1.0]), normal()),
        lambda: entropy_of_sum(normal(), points([0], [1.0])),
        lambda: differential_entropy(normal(), math.nan),
        lambda: differential_entropy(bimodal(), 0.0),
        lambda: blahut_arimoto([[1.4, -0.4], [0.5, 0.5]]),
        lambda: blahut_arimoto([[0.5, 0.5]], [1.0, 2.0]),
        lambda: blahut_arimoto([[math.nan, 1.0]]),
        lambda: blahut_arimoto([[0.5, 0.6]]),
        lambda: blahut_arimoto([[1.0], [1.0]], [1.0, 2.0], 0.5),
        lambda: blahut_arimoto(np.eye(2), [1.0, 2.0], 0.9),
        lambda: game.lattice_game([0.5, 0.5], [1.0]),
        lambda: game.duality_gap([0.0], [0.5, 0.5], [0.5, 0.5]),
        lambda: game.duality_gap([0.0, 1.0], [1.0, 1.0], [0.5, 0.5]),
        lambda: game.duality_gap([0.0, 1.0], [0.5, 0.5], [1.0, 1.0]),
        lambda: game.mirror_play([0.0, 1.0], [1.0, 0.0], [1.0, 1.0]),
        lambda: game.mirror_play([0.0, 1.0], [1.0, 1.0], [1.0, 1.0], rate=0.0),
        lambda: game.mirror_play([2.0, 3.0], [1.0, 1.0], [1.0, 1.0]),
        lambda: estimation.mmse(normal(), math.inf),
        lambda: estimation.mmse(normal(), -1.0),
        lambda: estimation.mmse(normal(), math.nan),
        lambda: estimation.posterior(normal(), -1.0, [0.0]),
        lambda: estimation.posterior(normal(), 0.0, [0.0]),
        lambda: estimation.noisy_information(torch.randn(1, 3), 1.0),
        lambda: estimation.noisy_information(torch.randn(4, 3), math.nan),
        lambda: estimation.noisy_information(torch.randn(5), 1.0),
        lambda: estimation.noisy_information(torch.randn(5, 2), 0.0),
        lambda: independence.gaussian_information(-1.5),
        lambda: independence.gaussian_information(1.1),
        lambda: independence.gaussian_information(math.nan),
        lambda: independence.gaussian_information([[1.0, 2.0], [2.0, 1.0]]),
        lambda: independence.gaussian_information([[1.0, 0.2]]),
        lambda: independence.gaussian_information([[2.0, 0.0], [0.0, 2.0]]),
        lambda: independence.rare_coincidence(math.nan, 0.1),
        lambda: independence.rare_coincidence(0.5, 1.0),
        lambda: independence.rare_coincidence(0.5, 0.5),
        lambda: independence.rare_coincidence(1.0, 0.1),
        lambda: independence.moment_bound(0.5, math.nan),
        lambda: independence.moment_bound(0.5, 0.5),
        lambda: independence.least_dependent(
            [1, 1], [0.5, 0.5], [0, 1], [0.5, 0.5], 0.1
        ),
        lambda: independence.least_dependent(
            [0, 1], [0.5, 0.5], [0, 1], [0.5, 0.5], 1.0
        ),
        lambda: independence.least_dependent(
            [0, 1], [0.5, 0.5], [0, 1], [0.9, 0.1], 0.9
        ),
        lambda: independence.least_dependent(
            [0, 1], [0.5, 0.6], [0, 1], [0.5, 0.5], 0.1
        ),
    )
)


# ---- the game ---------------------------------------------------------------


def test_mirror_play_keeps_its_powers_and_finds_the_value():
    lattice = np.arange(-7.0, 8)
    play = game.mirror_play(
        lattice,
        1.0 + (lattice > 0),
        1 / (1 + lattice**2),
        power=2.0,
        noise_power=1.0,
        steps=1200,
        rate=1.0,
    )
    for law, power in (
        (play.signal, 2.0),
        (play.noise, 1.0),
        (play.average_signal, 2.0),
        (play.average_noise, 1.0),
    ):
        assert law.sum() == pytest.approx(
            1
        ) and law @ lattice**2 == pytest.approx(power, abs=1e-9)
    assert (
        play.history[-1, 1] - 1e-6
        <= gaussian_capacity(2.0)
        <= play.history[-1, 2] + 1e-6
    )
    gaps = play.history[:, 2] - play.history[:, 1]
    assert gaps[-1] < 1e-2 < gaps[0]


def test_the_first_law_of_a_play_is_the_one_that_was_proposed():
    """Weights within the budget are only divided by their sum; the history
    begins with their gap.
    """
    x = np.arange(-3.0, 4)
    signal, noise = np.exp(-np.abs(x)), np.exp(-(np.abs(x) ** 1.5) / 2)
    signal, noise = signal / signal.sum(), noise / noise.sum()
    power, noise_power = signal @ x**2, noise @ x**2
    step, *gaps = game.mirror_play(
        x, 5 * signal, 3 * noise, power, noise_power, steps=1
    ).history[0]
    assert step == 1 and gaps == pytest.approx(
        [*game.duality_gap(x, signal, noise, power, noise_power)] * 2, rel=1e-9
    )


# ---- estimation -------------------------------------------------------------


def test_errors_and_posteriors_at_the_ends():
    assert estimation.mmse(points([3.0], [1.0]), 1.0) == pytest.approx(
        0, abs=1e-12
    ) and estimation.mmse(laplace(variance=2.0), 0.0) == pytest.approx(2)
    # a law cut off on both sides, given what is far more precise than it is
    # wide
    y = np.array([-180.0, -120.0, 3.0, 173.0, 176.0])
    mean, width = y / 100, 1 / 100
    ends = [(s * math.sqrt(3) - mean) / width for s in (-1, 1)]
    cut = scipy.stats.truncnorm(*ends, mean, width)
    _, found, variance = estimation.posterior(uniform(), 1e4, y)
    np.testing.assert_allclose(found, cut.mean(), rtol=1e-9)
    np.testing.assert_allclose(variance, cut.var(), rtol=1e-6)
    x, mass = estimation._nodes(uniform(), 0.3)
    # twelve nodes in a panel
    assert (
        x[12:] - x[:-12]
    ).max() <= 0.3 + 1e-12 and mass.sum() == pytest.approx(1)
    errors = [estimation.mmse(uniform(), snr) for snr in (0.1, 1, 10, 100)]
    assert errors == sorted(errors, reverse=True)


def test_noisy_information_of_samples():
    x = torch.cat(
        [
            torch.randn(2000, 2),
            torch.randn(2000, 1).exp(),
            1e6 + torch.randn(2000, 1),
        ],
        1,
    )
    values = estimation.noisy_information(x, 0.5)
    assert (
        values.dtype == torch.float64
        and not values.requires_grad
        and values.shape == (4,)
    )
    for k in range(4):
        torch.testing.assert_close(
            estimation.noisy_information(x[:, k : k + 1], 0.5),
            values[k : k + 1],
            rtol=0,
            atol=2e-4,
        )
    # the definition: the entropy of the mixture of normals at the sample
    sample = x[:200, 0].double().numpy()
    law = mixture(
        np.full(200, 1 / 200), [normal(float(v), 0.25) for v in sample]
    )
    exact = differential_entropy(law, 0.05).value - 0.5 * math.log(
        2 * math.pi * math.e * 0.25
    )
    assert estimation.noisy_information(
        x[:200, :1], 0.5
    ).item() == pytest.approx(exact, abs=1e-3)
    bad = x.clone()
    bad[5, 1] = math.inf
    assert estimation.noisy_information(bad, 0.5).isnan().tolist() == [
        False,
        True,
        False,
        False,
    ]
    torch.testing.assert_close(
        estimation.noisy_information(bad, 0.5)[[0, 2, 3]],
        values[[0, 2, 3]],
        rtol=0,
        atol=2e-4,
    )
    assert estimation.noisy_information(torch.ones(50, 1), 0.5).item() < 1e-3


# ---- independence -----------------------------------------------------------


def test_gaussian_information():
    assert (
        independence.gaussian_information(0.0) == 0
        and independence.gaussian_information(-1.0) == math.inf
    )
    # no cancellation
    assert independence.gaussian_information(1e-9) == pytest.approx(
        0.5e-18, rel=1e-9, abs=0
    )
    assert (
        independence.gaussian_information(np.eye(3)) == 0
        and independence.gaussian_information(np.ones((2, 2))) == math.inf
    )
