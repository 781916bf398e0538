"""The proof that the curvature is bounded below: a second interval arithmetic,
mutants, random laws.
"""

import pytest

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


def test_sweep_reports_the_place():
    with pytest.raises(AssertionError, match="not positive"):
        require_positive(lambda x: x - 0.5, 0, 1)
    assert require_positive(lambda x: x.square() + 0.1, -1, 1) >= 1024


def test_interval_log1p_refuses_negative_numbers():
    with pytest.raises(ValueError, match="nonnegative"):
        Interval(-0.5).log1p()
