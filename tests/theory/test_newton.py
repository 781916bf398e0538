"""The Newton step beyond its chapter: invariances over random samples, dtypes,
extreme scales, adversarial samples, bad input.
"""

import math

import pytest
import scipy.integrate
import torch

from normalnorm.theory.newton import (
    Over,
    guaranteed_gain,
    guaranteed_step,
    mle_bracket,
    newton_estimate,
    newton_lambda,
    standardized,
)
from tests.refusals import refusals


def test_the_guaranteed_gain_is_that_of_its_bound():
    "∫ of |L'| − L''(e^{Kτ} − 1)/K, up to where it is 0: the guarded step."
    for ratio, second, length in ((0.3, 2.0, 1.5), (-2.0, 0.4, 6.0)):
        given = torch.tensor([ratio, second, length], dtype=torch.float64)
        end = guaranteed_step(given[0], given[2])
        gain, _ = scipy.integrate.quad(
            lambda tau: (
                second * (abs(ratio) - math.expm1(length * tau) / length)
            ),
            0,
            abs(end.item()),
        )
        assert guaranteed_gain(*given).item() == pytest.approx(gain)


def test_a_short_step_is_compared_in_float64():
    """A step of 10⁻⁴ lowers the likelihood by 10⁻⁸, which float32 does not see
    beside its own rounding: whether the step is Newton's is asked of float64.
    """
    generator = torch.Generator().manual_seed(5)
    k = torch.randn(200, 256, generator=generator)
    k = torch.cat([k, -k + 1e-4 * k.square()], -1)  # hardly skewed
    k = standardized(k, -1)
    lmbda, newton = newton_estimate(k, Over(1), safeguard=True)
    assert 0 < (lmbda - 1).abs().max() < 1e-3 and newton.all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    h = torch.randn(500).exp().to(dtype)
    assert newton_lambda(h, -1).dtype == torch.float32
    torch.testing.assert_close(
        newton_lambda(h, -1), newton_lambda(h.float(), -1)
    )


def test_gradient_reaches_the_input_through_every_option():
    h = torch.randn(9, dtype=torch.float64).exp().requires_grad_()
    for options in (
        dict(alpha=0.5),
        dict(steps=4),
        dict(safeguard=True),
        dict(steps=3, safeguard=True),
    ):
        assert torch.autograd.gradgradcheck(
            lambda x: newton_lambda(x, -1, **options), h
        )


test_bad_input = refusals(
    [
        (
            lambda: newton_lambda(torch.arange(3), -1),
            TypeError,
            "floating-point",
        ),
        (lambda: newton_lambda([1.0, 2.0], -1), TypeError, "list"),
        (
            lambda: newton_lambda(torch.ones(2, 0), -1),
            ValueError,
            "at least one",
        ),
        (
            lambda: newton_lambda(torch.ones(3), -1, alpha=-0.1),
            ValueError,
            "alpha",
        ),
        (
            lambda: newton_lambda(torch.ones(3), -1, steps=0),
            ValueError,
            "steps",
        ),
        (
            lambda: newton_lambda(torch.ones(3), -1, steps=1.5),
            ValueError,
            "steps",
        ),
    ]
)


@pytest.mark.parametrize(
    "dim, size",
    [(0, 3), (-1, 7), ((0, 2), 21), ((1, -1), 35), ((0, 1, 2), 105)],
)
def test_size_of_a_unit_is_the_number_of_its_elements(dim, size):
    """Also where another axis is empty; and the averages are over these
    elements.
    """
    unit = Over(dim)
    x = torch.randn(3, 5, 7, dtype=torch.float64)
    assert unit.size(x) == size == x.numel() // unit.mean(x).numel()
    total = x.sum(unit.dim, keepdim=True)
    torch.testing.assert_close(unit.mean(x) * size, total)
    for mean, several in zip(unit.means(x, x.abs()), (x, x.abs())):
        assert torch.equal(mean, unit.mean(several))
    (variance, mean), _ = unit.var_means(x, x + 1)
    torch.testing.assert_close(variance, unit.mean((x - mean).square()))
    largest, smallest = unit.extremes(x)
    for one in (x - smallest, largest - x):
        assert one.min() == 0 and torch.equal(
            one.amin(unit.dim), torch.zeros_like(mean.squeeze(unit.dim))
        )


def test_a_constant_sample_among_others_has_the_identity_and_no_gradient():
    """With the safeguard too, whose step divides by the range of the sample;
    the bracket of its estimate is a point.
    """
    h = torch.tensor(
        [[0.1, 0.1, 0.1], [0.0, 1.0, 2.1]],
        dtype=torch.float64,
        requires_grad=True,
    )
    assert torch.equal(
        guaranteed_step(torch.zeros(2), torch.tensor([0.0, 1.0])),
        torch.zeros(2),
    )
    for lmbda in (
        newton_lambda(h, -1),
        newton_lambda(h, -1, safeguard=True),
        newton_lambda(h, -1, safeguard=True, steps=3),
        *mle_bracket(h, -1),
    ):
        (gradient,) = torch.autograd.grad(lmbda.sum(), h, retain_graph=True)
        assert lmbda[0] == 1 and lmbda[1] != 1
        assert not gradient[0].any()
        assert gradient[1].isfinite().all() and gradient[1].any()
