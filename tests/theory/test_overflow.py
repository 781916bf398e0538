"""No unit of up to 2³² elements overflows in training: the bound against
arbitrary precision, searches and the library's own code; beyond it values
saturate.
"""

import mpmath as mp
import numpy as np
import torch

from normalnorm.layers import core
from normalnorm.layers.core import closed, normality_norm
from normalnorm.theory import gradient
from normalnorm.theory.curvature import Interval
from normalnorm.theory.gradient import Power
from normalnorm.theory.newton import Over
from normalnorm.theory.overflow import (
    LARGEST_UNIT,
    WeightedPoints,
    _least_curvature,
    _phi_and_rho,
)


def test_enclosures_contain_the_functions():
    "φ and ρ in 50 digits."
    a = np.geomspace(1e-6, 1e12, 200)
    phi, rho = _phi_and_rho(a)
    with mp.workdps(50):
        for i, x in enumerate(map(mp.mpf, a.tolist())):
            ell = mp.log1p(x)
            assert (
                mp.mpf(float(phi.lo[i]))
                <= ((1 + x) * ell - x) / x
                <= mp.mpf(float(phi.hi[i]))
            )
            assert (
                mp.mpf(float(rho.lo[i]))
                <= 1 - (1 + x) * ell**2 / x**2
                <= mp.mpf(float(rho.hi[i]))
            )


def test_least_curvature_is_below_the_function_and_not_far():
    "Against a fine grid of a and of the slopes inside each cell."
    m = np.linspace(0, 11, 301)
    found = _least_curvature(m[:-1], m[1:], 1e6, 600, Interval.ratio(1, 1))
    a = np.geomspace(1e-5, 1e8, 100_000)
    phi, rho = (
        (1 + 1 / a) * np.log1p(a) - 1,
        1 - (1 + a) * np.log1p(a) ** 2 / a**2,
    )
    for i in range(0, 300, 13):
        exact = min(
            (rho + (phi - slope) ** 2).min()
            for slope in np.linspace(m[i], m[i + 1], 5)
        )
        assert exact - 0.06 < found[i] <= exact + 1e-12


def test_the_limit_changes_no_gradient(monkeypatch):
    "To rounding, of an ordinary unit. (Values: the claim.)"
    u, g = torch.randn(2, 40, 6, dtype=torch.float64)
    u, found = (100 * u**3).requires_grad_(), []
    for limit in (LARGEST_UNIT, 0):
        monkeypatch.setattr(gradient, "LARGEST_UNIT", limit)
        out, _ = normality_norm(u, (0,), noise=0.4, seed=torch.tensor(3))
        found.append(torch.autograd.grad(out, u, g)[0])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_who_may_overflow(monkeypatch):
    u = torch.randn(5, 3)
    law = WeightedPoints(torch.ones(3) / 3, LARGEST_UNIT + 1)
    assert closed(Power(), u, Over(0)) and closed(
        Power(), u, WeightedPoints(law.weights, LARGEST_UNIT)
    )
    assert not closed(Power(), u, law) and not closed(
        Power(steps=2), u, Over(0)
    )
    assert closed(Power(alpha=0.0).reduced(), u, law) and closed(
        Power(alpha=0.0, steps=2).reduced(), u, Over(0)
    )
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert closed(Power(), u, law) and not closed(Power(steps=2), u, Over(0))


def test_a_law_is_a_sample():
    """Weights in whole multiples of 1/n give what the sample with repeated
    values gives: statistics, λ̂, values.
    """
    counts, atoms = (
        torch.tensor([3, 1, 6]),
        torch.tensor([0.2, 5.0, -1.0], dtype=torch.float64),
    )
    law, sample = (
        WeightedPoints(counts.double() / 10, 10),
        atoms.repeat_interleave(counts),
    )
    x, of_law = normality_norm(atoms, law)
    y, of_sample = normality_norm(sample, (0,))
    torch.testing.assert_close(x.repeat_interleave(counts), y)
    torch.testing.assert_close([*of_law], [*of_sample])
    assert len(of_law.parameters) == 1


def test_units_over_several_processes_saturate_too():
    """Beyond the bound values stop where float32 does, though they are not
    differentiated operation by operation there.
    """

    class Elsewhere(WeightedPoints):
        apart = True

    law = Elsewhere(torch.tensor([1e-11, 1e-11, 1 - 2e-11]), 10**11)
    u = torch.tensor([-1e5, 1e7, 0.0], requires_grad=True)
    out, found = core.normality_norm(u, law)
    known, expected = core.normality_norm(
        u.detach(), WeightedPoints(law.weights, law.n)
    )
    assert torch.equal(out, known) and torch.equal(found.lmbda, expected.lmbda)
    assert out.isfinite().all() and out.abs().max() > 1e30
    assert "_Normalized" in type(out.grad_fn).__name__
