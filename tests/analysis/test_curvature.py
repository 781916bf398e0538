"""The proof that the curvature is bounded below: a second interval arithmetic,
mutants, random laws.
"""

import mpmath as mp
import numpy as np
import pytest

from normalnorm import claims
from normalnorm.theory.curvature import (
    Interval,
    easy_curvature_bound,
    require_positive,
    sharp_curvature_bound,
)


@pytest.mark.parametrize(
    "settings",
    [
        dict(shift=1e-3),
        dict(shift=1e-9),
        dict(spend=0.0),
        dict(spend=1.01),
        dict(spend=-0.01),
        dict(split=0.7),
        dict(split=0.4),
    ],
)
def test_mutants_of_the_sharp_proof(settings):
    with pytest.raises(AssertionError):
        sharp_curvature_bound(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        dict(target=(1884, 10000)),
        dict(target=(188, 1000)),
        dict(t=(45, 100)),
        dict(c=(60, 100)),
    ],
)
def test_mutants_of_the_easy_proof(settings):
    with pytest.raises(AssertionError):
        easy_curvature_bound(**settings)


def test_both_sweeps_in_another_interval_arithmetic():
    """mpmath.iv has its own logarithm and its own rounding; cells of fixed
    width, halved where undecided.
    """
    iv = mp.iv
    L = iv.log(2)

    def certificate(T, t, c, square):
        def f(a):
            log = iv.log(1 + a)
            d = (1 + a) * log - a
            gap = square(d, t, a)
            gap = iv.mpf([max(gap.a, 0), max(gap.b, 0)])
            return (
                1
                - T
                - t**2
                - c
                - (1 + a) * log**2
                + 2 * t * d
                + c * a**2
                + gap**2
            )

        return f

    T = 2 * (1 - L) ** 2
    size = lambda x: iv.mpf([max(0, max(x.a, -x.b)), max(-x.a, x.b)])
    near = certificate(
        T,
        2 * L - 1,
        2 * L - iv.mpf(3) / 2 * L**2,
        lambda d, t, a: size(d - t) - a / 2,
    )
    far = certificate(
        T, iv.mpf(7) / 20, iv.mpf(17) / 25, lambda d, t, a: a / 2 - size(d - t)
    )
    for f, end in ((near, mp.mpf(7) / 8), (far, mp.mpf(3))):
        cells = [(end * i / 64, end * (i + 1) / 64) for i in range(64)]
        while cells:
            low, high = cells.pop()
            value = f(iv.mpf([low, high]))
            assert value.b > 0
            if not value.a > 0:
                middle = (low + high) / 2
                cells += [(low, middle), (middle, high)]


def test_sweep_reports_the_place():
    with pytest.raises(AssertionError, match="not positive"):
        require_positive(lambda x: x - 0.5, 0, 1)
    assert require_positive(lambda x: x.square() + 0.1, -1, 1) >= 1024


def test_interval_log1p_refuses_negative_numbers():
    with pytest.raises(ValueError, match="nonnegative"):
        Interval(-0.5).log1p()


class NoRounding(Interval):
    @staticmethod
    def ratio(p, q):
        return Interval(p / q)


class SquareOfEnds(Interval):
    def square(self):
        return Interval.outward(
            np.minimum(self.lo**2, self.hi**2),
            np.maximum(self.lo**2, self.hi**2),
        )


class SizeOfEnds(Interval):
    def __abs__(self):
        return Interval(
            np.minimum(abs(self.lo), abs(self.hi)),
            np.maximum(abs(self.lo), abs(self.hi)),
        )


class Turned(Interval):
    def __rsub__(self, other):
        return self - other


class NotCut(Interval):
    def positive_part(self):
        return Interval(self.lo, np.maximum(self.hi, 0.0))


class LikeDifference(Interval):
    def __sub__(self, other):
        return Interval.outward(self.lo - other.lo, self.hi - other.hi)


class TrustingLogarithm(Interval):
    def log1p(self):
        return Interval(np.log1p(self.lo), np.log1p(self.hi))


class Everything(Interval):
    def __add__(self, other):
        return Interval(
            np.full_like(self.lo, -np.inf), np.full_like(self.hi, np.inf)
        )


@pytest.mark.parametrize(
    "wrong",
    [
        NoRounding,
        SquareOfEnds,
        SizeOfEnds,
        Turned,
        NotCut,
        LikeDifference,
        TrustingLogarithm,
        Everything,
    ],
)
def test_the_check_of_the_intervals_rejects_each_wrong_operation(wrong):
    """Each differs from the right class in one operation, some on wide
    intervals only.
    """
    check = claims.select(identifier="interval-sound")[0].check
    np.random.seed(0)
    check(Interval)
    with pytest.raises(AssertionError):
        check(wrong)
