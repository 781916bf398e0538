"""Joint normality and dependence, beyond their chapters: peers where they are
installed, plain loops and tables where not, what is refused, what is kept.
"""

import math
import sys

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normalnorm.analysis.dependence import (
    distance_correlation,
    excess_mutual_information,
    mutual_information,
    unbiased_distance_correlation,
)
from normalnorm.analysis.joint_normality import (
    henze_zirkler,
    henze_zirkler_null,
)
from normalnorm.checks.analysis.dependence import by_tables, dcor2_of_normal
from tests.analysis.test_analysis import memory_of
from tests.peers import installed
from tests.refusals import refusals

# the fewest observations of each
MEASURES = {
    mutual_information: 5,
    excess_mutual_information: 5,
    distance_correlation: 2,
    unbiased_distance_correlation: 4,
}


def with_matrix(x):
    "The statistic of Henze and Zirkler as it is printed, with an n×n matrix."
    n, d = x.shape
    c = x - x.mean(0)
    inverse = np.linalg.inv(np.cov(x.T, bias=True).reshape(d, d))
    own, cross = np.einsum("ij,jk,ik->i", c, inverse, c), c @ inverse @ c.T
    b = ((2 * d + 1) * n / 4) ** (1 / (d + 4)) / math.sqrt(2)
    return n * (
        np.exp(-(b**2) / 2 * (own[:, None] + own - 2 * cross)).mean()
        - 2
        * (1 + b**2) ** (-d / 2)
        * np.exp(-(b**2) / (2 * (1 + b**2)) * own).mean()
        + (1 + 2 * b**2) ** (-d / 2)
    )


# ---- joint normality ----


@pytest.mark.parametrize("n, d", [(30, 2), (200, 5), (1500, 16)])
def test_henze_zirkler_equals_pingouin(n, d):
    pingouin = installed("pingouin")
    for draw in (
        np.random.default_rng(0).normal,
        np.random.default_rng(1).exponential,
    ):
        x = draw(size=(n, d))
        expected, found = (
            pingouin.multivariate_normality(x),
            henze_zirkler(torch.tensor(x)),
        )
        assert abs(found.statistic.item() - expected.hz) < 1e-8
        assert found.p.item() == pytest.approx(expected.pval, 1e-6, 0)


def test_henze_zirkler_of_twenty_thousand_points_keeps_no_matrix():
    x = torch.randn(20_000, 16)
    found, grown = memory_of(lambda: henze_zirkler(x))
    assert grown < 400, f"{grown:.0f} MB more; a matrix of distances takes 3052"
    assert 0.9 < found.statistic.item() < 1.1 and 0 < found.p.item() < 1
    part = henze_zirkler(x[:700].half())
    # computed in float64, whatever comes in
    assert (
        abs(
            part.statistic.item() - with_matrix(x[:700].half().double().numpy())
        )
        < 1e-8
    )


def test_henze_zirkler_on_any_axes_and_of_many_sets():
    "The p-value by the log-normal law with the moments that are claimed."
    # sets, points, sets, coordinates
    x = torch.randn(3, 29, 2, 4, dtype=torch.float64).exp()
    found = henze_zirkler(x, dim=1, coordinates=3)
    assert found.statistic.shape == (3, 2)
    for i in range(3):
        for j in range(2):
            assert (
                abs(
                    found.statistic[i, j].item()
                    - with_matrix(x[i, :, j].numpy())
                )
                < 1e-9
            )
    _, mean, var = henze_zirkler_null(29, 4)
    spread = math.log1p(var / mean**2)
    law = scipy.stats.lognorm(spread**0.5, scale=mean * math.exp(-spread / 2))
    assert law.stats() == pytest.approx((mean, var))
    np.testing.assert_allclose(found.p, law.sf(found.statistic), rtol=1e-9)
    assert henze_zirkler(x[:0], dim=1, coordinates=3).p.shape == (0, 2)
    assert not henze_zirkler(x.requires_grad_(), dim=1).statistic.requires_grad


def test_points_on_a_plane_have_no_statistic():
    x = torch.randn(6, 60, 3)
    x[0, :, 2] = x[0, :, 0] + x[0, :, 1]  # on a plane, but for float32 rounding
    x[1, :, 1] = 0.1  # a constant that is not a binary fraction
    # on a plane that is nearly a line
    x[2, :, 2] = x[2, :, 0] + 1e-3 * x[2, :, 1]
    x[3, 5, 0], x[4, 0, 2] = math.nan, -math.inf
    assert (
        henze_zirkler(x).statistic.isnan().tolist()
        == henze_zirkler(x).p.isnan().tolist()
        == [True] * 5 + [False]
    )
    x[5] *= torch.tensor([1e-20, 1.0, 1e18])
    assert henze_zirkler(x[5]).p.isfinite()
    for wrong, error, words in (
        (torch.randn(9), ValueError, "two axes"),
        (torch.randn(4, 3), ValueError, "4 points with 3"),
        (torch.randn(2, 1), ValueError, "3 points"),
        (torch.ones(9, 2, dtype=torch.int64), TypeError, "int64"),
        (np.ones((9, 2)), TypeError, "ndarray"),
    ):
        with pytest.raises(error, match=words):
            henze_zirkler(wrong)
    for n, d in ((0, 1), (5, 0)):
        with pytest.raises(ValueError, match="counted from 1"):
            henze_zirkler_null(n, d)


# ---- mutual information ----


def test_mutual_information_equals_scikit_learn():
    mutual_info_regression = installed(
        "sklearn.feature_selection"
    ).mutual_info_regression
    x, z = np.random.default_rng(0).normal(size=(2, 1500))
    for y in (x + z, np.sin(3 * x) + 0.1 * z):
        # it adds noise of 1e-10, which may move a count
        expected = mutual_info_regression(
            x[:, None], y, n_neighbors=4, random_state=0
        )[0]
        assert (
            abs(
                mutual_information(torch.tensor(x), torch.tensor(y), k=4).item()
                - expected
            )
            < 1e-5
        )


@given(
    st.integers(5, 40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.integers(0, 10**6),
)
@settings(max_examples=25, deadline=None)
def test_both_ways_of_finding_neighbours_agree(n, p, q, variant, k, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(2, n, p, generator=generator).double(),
        torch.randn(2, n, q, generator=generator).double(),
    )
    y = y + x[..., :1]
    found = [
        mutual_information(
            x, y, dim=1, coordinates=2, k=k, variant=variant, method=m, chunk=c
        )
        for m, c in (("tree", 1), ("direct", 1), ("direct", 2**20))
    ]
    assert (
        all(torch.allclose(f, found[0], rtol=0, atol=1e-12) for f in found)
        and found[0].isfinite().all()
    )


def test_beyond_a_correlation_of_one_there_is_no_information():
    x = torch.randn(10, 1000, dtype=torch.float64)
    assert excess_mutual_information(x, 3 - x).isnan().all()


@pytest.mark.parametrize("k", [1, 3])
def test_a_value_may_occur_k_times_and_no_more(k):
    for d in (1, 2):
        x, y = torch.randn(2, 40, d), torch.randn(2, 40, d)
        x[0, 5 : 5 + k], x[1, 5 : 6 + k] = 0.25, 0.25
        for sides in ((x, y), (y, x)):
            for method in ("tree", "direct"):
                assert mutual_information(
                    *sides, dim=1, coordinates=2, k=k, method=method
                ).isnan().tolist() == [False, True]


# ---- distance correlation ----


@given(st.integers(4, 70), st.integers(1, 30), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_fast_sum_equals_tables_whatever_the_ties(n, values, seed):
    generator = np.random.default_rng(seed)
    x, y = generator.integers(0, values + 1, (2, n)).astype(float)
    x[0], y[-1] = -1, values + 3  # neither is constant
    expected = by_tables(x[:, None], y[:, None])
    assert (
        abs(
            distance_correlation(torch.tensor(x), torch.tensor(y)).item()
            - expected[0]
        )
        < 1e-7
    )
    found = unbiased_distance_correlation(
        torch.tensor(x), torch.tensor(y)
    ).item()
    # the tables' own variance may be 0 but for rounding
    assert math.isnan(found) or abs(found - expected[1]) < 1e-7 * max(
        1, abs(expected[1])
    )


def test_distance_correlation_equals_dcor(monkeypatch):
    # as plain Python: to compile what is called four times takes 17 seconds
    if "dcor" not in sys.modules:
        monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
        # that switch forgets this one
        monkeypatch.setattr(
            installed("numba"),
            "guvectorize",
            lambda *signature, **options: lambda function: function,
        )
    dcor = installed("dcor")
    x, z = np.random.default_rng(0).normal(size=(2, 500))
    for y in (z, x**2 + z):
        assert (
            abs(
                distance_correlation(torch.tensor(x), torch.tensor(y)).item()
                - dcor.distance_correlation(x, y)
            )
            < 1e-10
        )
        assert (
            abs(
                unbiased_distance_correlation(
                    torch.tensor(x), torch.tensor(y)
                ).item()
                - dcor.u_distance_correlation_sqr(x, y)
            )
            < 1e-10
        )


def test_distance_correlation_of_many_points_keeps_no_table():
    x, z = torch.randn(2, 100_001)
    y = 0.4 * x + math.sqrt(0.84) * z
    found, grown = memory_of(lambda: unbiased_distance_correlation(x, y))
    assert grown < 400
    assert abs(found.item() - dcor2_of_normal(0.4)) < 0.01


def test_where_n_to_the_fourth_is_beyond_64_bits():
    """Of numbers with two values it is the size of the ordinary correlation; n⁴
    of 70 000 points is no 64-bit integer.
    """
    n = 70_000
    place = torch.arange(n)
    x = (place == 5).double()
    y = torch.stack([(place < 9).double(), (place % 3 == 0).double(), x])
    r = torch.corrcoef(torch.cat([x[None], y]))[0, 1:]
    torch.testing.assert_close(
        distance_correlation(x, y), r.abs(), rtol=1e-6, atol=1e-9
    )


def test_an_estimated_distance_variance_of_zero_gives_nan():
    x = torch.zeros(3, 37)
    x[0, 4], x[1, 0], x[2, :2] = 0.1, -7.0, 0.3
    assert unbiased_distance_correlation(
        x, torch.randn(3, 37)
    ).isnan().tolist() == [True, True, False]
    assert distance_correlation(x, torch.randn(3, 37)).isfinite().all()


def test_vectors_equal_numbers_where_they_have_one_coordinate_and_broadcast():
    x = torch.randn(5, 1, 3, 40, dtype=torch.float64)
    y = torch.randn(4, 3, 40, dtype=torch.float64) + x[0].square()
    for measure in (
        distance_correlation,
        unbiased_distance_correlation,
        mutual_information,
    ):
        numbers = measure(x[:, :, 0], y[:, 0])
        vectors = measure(x[:, :, :1], y[:, :1], dim=-1, coordinates=-2)
        assert numbers.shape == (5, 4)
        torch.testing.assert_close(vectors, numbers, rtol=0, atol=1e-12)
        assert measure(x, y, dim=-1, coordinates=-2).shape == (5, 4)
    three = distance_correlation(x, y, dim=-1, coordinates=-2, chunk=60)
    expected = by_tables(x[3, 0].T.numpy(), y[2].T.numpy())[0]
    assert abs(three[3, 2].item() - expected) < 1e-10


# ---- all of them ----


@pytest.mark.parametrize("measure", MEASURES)
def test_what_has_no_answer_is_nan_and_what_makes_no_sense_is_refused(measure):
    x = torch.randn(5, 30, dtype=torch.float64)
    x[0], x[1, 3], x[2, 7] = 0.1, math.nan, math.inf
    least = MEASURES[measure]
    assert measure(x[3:, :least], x[3:, :least]).shape == (2,)
    for pairs in (measure(x, torch.randn(30)), measure(torch.randn(30), x)):
        assert pairs.isnan().tolist() == [True] * 3 + [False] * 2
    rectified = measure(torch.randn(3, 60).relu(), torch.randn(60))
    assert rectified.isnan().all() == ("mutual" in measure.__name__)
    for arguments, error, words in (
        ((x, x[:, :29]), ValueError, "30 and 29"),
        ((x[:, : least - 1], x[:, : least - 1]), ValueError, "at least"),
        ((x.int(), x), TypeError, "int32"),
        ((x.numpy(), x), TypeError, "ndarray"),
        ((torch.tensor(1.0), x), ValueError, "axis of observations"),
    ):
        with pytest.raises(error, match=words):
            measure(*arguments)
    assert measure(x[3:].clone().requires_grad_(), x[3:]).requires_grad is False
    assert measure(x[:0], x[:0]).shape == (0,)


@pytest.mark.parametrize("measure", MEASURES)
def test_inputs_stay_and_layout_does_not_matter(measure):
    x, y = torch.randn(2, 6, 50)
    kept = x.clone(), y.clone()
    found = measure(x, y)
    torch.testing.assert_close(
        measure(x.T, y.T, dim=0), found, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        measure(x[:, None].expand(6, 2, 50)[:, 1], y), found, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(measure(y, x), found, rtol=0, atol=1e-12)
    # rounding may move a count
    far = measure(1e200 * x.double() + 1e201, -1e-170 * y.double())
    torch.testing.assert_close(far, found, rtol=0, atol=1e-3)
    assert (
        torch.equal(x, kept[0])
        and torch.equal(y, kept[1])
        and found.dtype == torch.float64
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "measure",
    [*MEASURES, lambda x, y: henze_zirkler(torch.stack([x, y], -1)).statistic],
)
def test_a_gpu_gives_the_same_numbers(measure):
    x = torch.randn(6, 300)
    y = torch.randn(6, 300) + x.square()
    x[0] = 2.0
    found = measure(x.cuda(), y.cuda())
    assert found.is_cuda
    torch.testing.assert_close(
        found.cpu(), measure(x, y), rtol=1e-9, atol=1e-9, equal_nan=True
    )


test_unknown_options_are_named = refusals(
    [
        (dict(k=0), "expected k ≥ 1"),
        (dict(variant=3), "expected k ≥ 1"),
        (dict(method="trees"), "expected k ≥ 1"),
    ],
    lambda options: mutual_information(
        torch.randn(9), torch.randn(9), **options
    ),
)
