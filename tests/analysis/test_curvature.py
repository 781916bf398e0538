"""The proof that the curvature is bounded below: what must not verify, beyond
the chapter.
"""

import sys

import pytest

from normalnorm.theory.curvature import (
    Interval,
    easy_curvature_bound,
    sharp_curvature_bound,
)
from tests.refusals import refusals

test_mutants_of_the_proofs = refusals(
    [
        (sharp_curvature_bound, {"spend": 1.01}, "at most one ω"),
        (sharp_curvature_bound, {"spend": -0.01}, "at most one ω"),
        (easy_curvature_bound, {"t": (45, 100)}, "not positive"),
        (easy_curvature_bound, {"c": (60, 100)}, "not positive"),
    ],
    lambda prove, settings: prove(**settings),
    AssertionError,
)
test_no_logarithm_of_negative_numbers = refusals(
    [(Interval(-0.5).log1p, "nonnegative")]
)


def test_without_arb(monkeypatch):
    monkeypatch.setitem(sys.modules, "flint", None)
    with pytest.raises(ImportError, match="python-flint: .*analysis"):
        Interval(1.0).log1p()
