"""Statistics of seeds beyond their chapter: other people's programs, and the
edges.
"""

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from normalnorm.experiments.statistics import (
    crossed_interval,
    detection_power,
    holm,
    p_equivalent,
    paired_test,
    satterthwaite,
    seeds_needed,
    share,
    summarize,
    verdict,
    verdicts,
)
from tests.refusals import refusals

test_what_has_no_answer_is_refused = refusals(
    [
        (lambda: summarize([]), "given none"),
        (lambda: detection_power(1, 1.0), "2 seeds"),
        (lambda: seeds_needed(0.0), "100 000"),
        (lambda: paired_test([1.0] * 2, [1.0] * 3), "given 2 and 3"),
        *(
            (
                lambda bound=bound: p_equivalent(summarize([0.0] * 2), bound),
                "would count as none, above 0",
            )
            for bound in (0.0, -1.0, math.nan)
        ),
        *(
            (
                lambda shape=shape: crossed_interval(np.zeros(shape)),
                "two seeds and two images",
            )
            for shape in ((1, 4), (4, 1), (4,))
        ),
    ]
)


EDGES = [
    (lambda: summarize([1.0])[:2], [1, math.nan]),
    (lambda: [detection_power(4, 0.0)], [0.05]),
    (lambda: [seeds_needed(0.5), seeds_needed(1.0)], [34, 10]),
    (lambda: paired_test([1.0, 1.0], [2.0, 2.0])[1:3], [0, 0.5]),
    (lambda: paired_test([1.0, 1.0], [1.0, 1.0])[1:3], [1, 1]),
    (lambda: [paired_test([1.0], [2.0]).p_signs], [math.nan]),
    (lambda: [p_equivalent(summarize([0.0, 0.0]), 0.1)], [0]),
    # all differences are 0.5
    (lambda: [p_equivalent(summarize([0.5, 0.5]), 0.4)], [1]),
    (lambda: [p_equivalent(summarize([0.5, 0.5]), 0.6)], [0]),
    (lambda: [p_equivalent(summarize([1.0]), 1.0)], [math.nan]),
    (lambda: [crossed_interval(np.ones((3, 4))).p], [0]),
    (lambda: crossed_interval(np.zeros((3, 4)))[1::2], [0, 0, 1]),
]


@pytest.mark.parametrize("ask, expected", EDGES, ids=range(len(EDGES)))
def test_at_the_edges(ask, expected):
    np.testing.assert_allclose(ask(), expected, atol=1e-9)


def test_signs_of_many_pairs_are_drawn_and_always_the_same_ones():
    many = np.random.default_rng(0).normal(1, 1, size=20)
    found = paired_test(np.zeros(20), many)
    assert found.p_signs < 0.01
    assert found == paired_test(np.zeros(20), many)


def crossed_table(components, seed, shape=(6, 9)):
    "Differences by seed and image with these variances, and a mean of 1."
    rng = np.random.default_rng(seed)
    return 1 + sum(
        np.sqrt(v) * rng.normal(size=size)
        for v, size in zip(components, ((shape[0], 1), (1, shape[1]), shape))
    )


@pytest.mark.parametrize(
    "components, seed, left_out",
    [
        ((0.5, 1.5, 1.0), 3, ()),
        ((1.0, 0.0, 1.0), 1, ("image",)),
        ((0.0, 1.0, 1.0), 1, ("seed",)),
        ((0.0, 0.0, 1.0), 20, ("seed", "image")),
    ],
)
def test_crossed_interval_by_hand(components, seed, left_out):
    """Mean squares as sums over cells, Satterthwaite's degrees of freedom; what
    is below 0 is left out, and what remains is a one-way interval.
    """
    d = crossed_table(components, seed)
    (seeds, images), mean = d.shape, d.mean()
    of = {
        "seed": sum(images * (line.mean() - mean) ** 2 for line in d)
        / (seeds - 1),
        "image": sum(seeds * (line.mean() - mean) ** 2 for line in d.T)
        / (images - 1),
    }
    rest = sum(
        (d[s, i] - d[s].mean() - d[:, i].mean() + mean) ** 2
        for s in range(seeds)
        for i in range(images)
    ) / ((seeds - 1) * (images - 1))
    df = {"seed": seeds - 1, "image": images - 1}
    assert tuple(name for name in of if of[name] <= rest) == left_out
    parts = [(of[name], df[name]) for name in of if name not in left_out]
    parts.append(((1 - len(parts)) * rest, (seeds - 1) * (images - 1)))
    total = sum(v for v, _ in parts)
    nu = total**2 / sum(v * v / k for v, k in parts)
    error = (total / d.size) ** 0.5
    t = scipy.stats.t(nu)
    assert tuple(crossed_interval(d, 0.9)) == pytest.approx(
        (
            mean,
            error,
            nu,
            mean - t.ppf(0.95) * error,
            mean + t.ppf(0.95) * error,
            2 * t.sf(mean / error),
        )
    )
    if len(left_out) == 1:
        one = scipy.stats.ttest_1samp(
            d.mean(1 if "image" in left_out else 0), 0
        )
        assert crossed_interval(d).p == pytest.approx(one.pvalue)
        assert crossed_interval(d)[3:5] == pytest.approx(
            tuple(one.confidence_interval())
        )


def test_a_stack_of_tables_has_an_interval_each():
    tables = np.stack([crossed_table((1, 1, 1), k) for k in range(5)])
    found = crossed_interval(tables)
    for k, table in enumerate(tables):
        assert [v[k] for v in found] == pytest.approx(
            [*crossed_interval(table)]
        )


def test_holm_is_the_closed_test_of_bonferroni():
    rng = np.random.default_rng(4)
    for count in (1, 2, 3, 9):
        p = rng.random(count) ** 3
        of_sets = {
            some: min(1, len(some) * p[[*some]].min())
            for size in range(1, count + 1)
            for some in itertools.combinations(range(count), size)
        }
        assert holm(p) == pytest.approx(
            [
                max(q for some, q in of_sets.items() if one in some)
                for one in range(count)
            ]
        )


@pytest.mark.parametrize(
    "mean, p, bound, lower, word",
    [
        (1.0, 0.049, 0.5, False, "better"),
        (-1.0, 0.049, 0.5, False, "worse"),
        (1.0, 0.049, 0.5, True, "worse"),
        (-1.0, 0.049, None, True, "better"),
        (0.1, 0.049, 0.5, False, "better, by less than 0.5"),
        (0.1, 0.051, 0.5, False, "no difference beyond ±0.5"),
        (0.1, 0.051, None, False, "open"),
        (0.4, 0.051, 0.5, False, "open"),
        (-0.4, 0.051, 0.5, False, "open"),
        (1.0, 0.051, 0.5, False, "open"),
        # the borders of both tests: t with 9 degrees of freedom
        (0.2262, None, None, False, "open"),
        (0.2263, None, None, False, "better"),
        (0.3166, 0.1, 0.5, False, "no difference beyond ±0.5"),
        (0.3168, 0.1, 0.5, False, "open"),
    ],
)
def test_words_of_a_verdict(mean, p, bound, lower, word):
    found = satterthwaite(mean, [0.01], [9])
    assert verdict(found, bound, p, lower) == word


def test_verdicts_are_corrected_together_but_for_one_that_stands_alone():
    found = {
        name: satterthwaite(mean, [0.01], [9])
        for name, mean in (("a", 0.25), ("b", 0.3), ("c", 0.05))
    }
    p = dict(zip(found, holm([of.p for of in found.values()])))
    every = verdicts(found, {"c": 0.5})
    assert {name: of.p for name, of in every.items()} == p
    assert [of.word for of in every.values()] == [
        "open",
        "better",
        "no difference beyond ±0.5",
    ]
    apart = verdicts(found, {}, lower=True, alone="a")
    assert [of.p for of in apart.values()] == [
        found["a"].p,
        *holm([found["b"].p, found["c"].p]),
    ]
    assert [of.word for of in apart.values()] == ["worse", "worse", "open"]


@pytest.mark.parametrize(
    "scale, word",
    [(0.9, "most"), (0.2, "less than half"), (0.5, "an open part")],
)
def test_share_of_a_whole(scale, word):
    """Half of it is inside just where the interval of the part less half of the
    whole holds 0; the same for losses, whose whole is below 0.
    """
    whole = crossed_table((0.1, 0.1, 0.1), 1, (12, 20)) + 1
    part = scale * whole + crossed_table((0.05, 0.05, 0.05), 2, (12, 20)) - 1
    found = share(part, whole)
    half = crossed_interval(part - 0.5 * whole)
    assert found.word == word and found.low < found.value < found.high
    assert (found.low < 0.5 < found.high) == (half.low < 0 < half.high)
    for end in found[1:]:
        at = crossed_interval(part - end * whole)
        assert min(abs(at.low), abs(at.high)) < 1e-6
    assert share(-part, -whole) == pytest.approx(found)
    assert math.isnan(share(part, whole - whole.mean()).low)
