"""The Newton step beyond its chapter: invariances over random samples, dtypes,
extreme scales, adversarial samples, bad input.
"""

import math

import hypothesis.strategies as st
import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from normalnorm.theory.newton import (
    Over,
    guaranteed_step,
    mle_bracket,
    newton_estimate,
    newton_lambda,
    nll_derivatives,
    nll_derivatives_at_one,
    range_of_s,
    standardized,
)
from normalnorm.theory.power_transform import yeo_johnson_nll

samples = arrays(
    "float64", st.integers(2, 12), elements=st.floats(-100, 100)
).map(torch.tensor)


def spread(h):
    return (h.max() - h.min()).item() > 1e-6 * h.abs().max().item() + 1e-9


@settings(max_examples=300, deadline=None)
@given(samples, st.floats(1e-3, 1e3), st.floats(-10, 10))
def test_shift_scale_reflection(h, scale, shift):
    if not spread(h):
        return
    lmbda = newton_lambda(h, -1)
    torch.testing.assert_close(
        newton_lambda(scale * h, -1), lmbda, rtol=1e-8, atol=1e-8
    )
    torch.testing.assert_close(
        newton_lambda(-h, -1), 2 - lmbda, rtol=1e-8, atol=1e-8
    )
    torch.testing.assert_close(
        newton_lambda(h.flip(0), -1), lmbda, rtol=1e-9, atol=1e-9
    )
    if h.std() > 1e-2:
        torch.testing.assert_close(
            newton_lambda(h + shift, -1), lmbda, rtol=1e-6, atol=1e-6
        )


@settings(max_examples=300, deadline=None)
@given(samples)
def test_well_posed_and_safe(h):
    k = standardized(h, -1)
    first, second = nll_derivatives_at_one(k, -1)
    if k.abs().max() == 0:
        assert newton_lambda(h, -1) == 1
        return
    assert second > 0.18831
    safe = newton_lambda(h, -1, safeguard=True)
    assert yeo_johnson_nll(k, safe) <= yeo_johnson_nll(k, 1.0) + 1e-12


@settings(max_examples=40, deadline=None)
@given(samples)
def test_safeguarded_steps_reach_the_minimum(h):
    if not spread(h):
        return
    lmbda = newton_lambda(h, -1, steps=40, safeguard=True)
    first, second = nll_derivatives(standardized(h, -1), lmbda, -1)
    # two-valued samples can have their minimum far out
    assert abs(first / second) < 1e-6 or lmbda.abs() > 20
    near, far = mle_bracket(h, -1)
    low, high = min(near, far), max(near, far)
    assert low - 1e-6 <= lmbda <= high + 1e-6


def test_a_short_step_is_compared_in_float64():
    """A step of 10⁻⁴ lowers the likelihood by 10⁻⁸, which float32 does not see
    beside its own rounding: whether the step is Newton's is asked of float64.
    """
    generator = torch.Generator().manual_seed(5)
    k = torch.randn(200, 256, generator=generator)
    k = torch.cat([k, -k + 1e-4 * k.square()], -1)  # hardly skewed
    k = standardized(k, -1)
    lmbda, newton = newton_estimate(k, (1,), safeguard=True)
    assert 0 < (lmbda - 1).abs().max() < 1e-3 and newton.all()


def test_each_step_is_newtons_where_that_lowers_the_likelihood_enough():
    """The first: at all; the later ones: by half of the guaranteed gain.
    scipy's likelihood on both sides of each step, λ from one step less; the
    guaranteed gain by integrating the likelihood's bound.
    """
    torch.manual_seed(5)
    decided, between = set(), False
    heavy = (
        torch.distributions.StudentT(torch.tensor(1.5, dtype=torch.float64))
        .sample((40, 30))
        .pow(3)
    )
    for h in (
        *heavy,
        *(
            torch.tensor([a, -1.0, *[0.0] * 998], dtype=torch.float64)
            for a in (2.0, 5.0, 10.0)
        ),
    ):
        k = standardized(h, -1)
        value = lambda lmbda: (
            -scipy.stats.yeojohnson_llf(float(lmbda), k.numpy()) / len(k)
        )
        for step in range(1, 5):
            before = (
                newton_estimate(k, (0,), steps=step - 1, safeguard=True)[0]
                if step > 1
                else torch.ones(1, dtype=torch.float64)
            )
            first, second = nll_derivatives(k, before, 0)
            gain = value(before) - value(before - first / second)
            least, range_ = 0.0, range_of_s(k, 0).item()
            if step > 1:  # ∫ of L' + L''(e^{Kτ} − 1)/K up to where it is 0
                least = (
                    0.5
                    * scipy.integrate.quad(
                        lambda tau: (
                            abs(first.item())
                            - second.item() * math.expm1(range_ * tau) / range_
                        ),
                        0,
                        abs(
                            guaranteed_step(
                                first / second, range_of_s(k, 0)
                            ).item()
                        ),
                    )[0]
                )
            if abs(gain - least) > 1e-9:
                after, newton = newton_estimate(
                    k, (0,), steps=step, safeguard=True
                )
                assert newton.item() == (gain > least)
                between |= 0 < gain < least - 1e-9
                move = (
                    -first / second
                    if newton
                    else guaranteed_step(first / second, range_of_s(k, 0))
                )
                torch.testing.assert_close(
                    after - before, move, rtol=1e-9, atol=1e-9
                )
                decided.add((step > 1, newton.item()))
    assert len(decided) == 4 and between


def test_axes():
    h = torch.randn(3, 5, 7, dtype=torch.float64).exp()
    whole = newton_lambda(h, (0, 2))
    assert whole.shape == (5,)
    for j in range(5):
        torch.testing.assert_close(
            whole[j], newton_lambda(h[:, j].flatten(), 0)
        )


@pytest.mark.parametrize("scale", [1e-35, 1e-20, 1.0, 1e20, 1e35])
def test_any_scale_in_float32(scale):
    h = torch.randn(200).exp()
    torch.testing.assert_close(
        newton_lambda(scale * h, -1), newton_lambda(h, -1), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    h = torch.randn(500).exp().to(dtype)
    assert newton_lambda(h, -1).dtype == torch.float32
    torch.testing.assert_close(
        newton_lambda(h, -1), newton_lambda(h.float(), -1)
    )


def test_mean_much_larger_than_deviation():
    h = torch.randn(4096).exp()
    torch.testing.assert_close(
        newton_lambda(h + 1e4, -1),
        newton_lambda((h + 1e4).double(), -1).float(),
        rtol=1e-3,
        atol=1e-3,
    )


def test_the_mle_of_random_samples_by_scipy():
    torch.manual_seed(0)
    for draw in (
        lambda: torch.randn(40).double().exp(),
        lambda: torch.rand(40).double() ** 4,
        lambda: torch.randn(40).double() ** 3,
    ):
        h = standardized(draw(), -1)
        expected = scipy.stats.yeojohnson_normmax(h.numpy())
        assert newton_lambda(
            h, -1, steps=50, safeguard=True
        ).item() == pytest.approx(expected, abs=1e-5)


def test_gradient_reaches_the_input_through_every_option():
    h = torch.randn(9, dtype=torch.float64).exp().requires_grad_()
    for options in (
        dict(alpha=0.5),
        dict(steps=4),
        dict(safeguard=True),
        dict(steps=3, safeguard=True),
    ):
        assert torch.autograd.gradcheck(
            lambda x: newton_lambda(x, -1, **options), h
        )
        assert torch.autograd.gradgradcheck(
            lambda x: newton_lambda(x, -1, **options), h
        )


@pytest.mark.parametrize(
    "bad, error, words",
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
    ],
)
def test_bad_input(bad, error, words):
    with pytest.raises(error, match=words):
        bad()


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


def test_the_bracket_of_a_constant_sample_has_no_gradient():
    h = torch.tensor(
        [[1.0, 1.0, 1.0], [0.0, 1.0, 2.1]],
        dtype=torch.float64,
        requires_grad=True,
    )
    grad = torch.autograd.grad(sum(x.sum() for x in mle_bracket(h, -1)), h)[0]
    assert (
        (grad[0] == 0).all()
        and grad[1].isfinite().all()
        and grad[1].abs().max() > 0
    )


def test_a_constant_sample_among_others_has_the_identity_and_no_gradient():
    """With the safeguard too, whose step divides by the range of the sample;
    the bracket of its estimate is a point.
    """
    h = torch.tensor(
        [[0.1, 0.1, 0.1], [0.0, 0.0, 9.0]],
        dtype=torch.float64,
        requires_grad=True,
    )
    assert torch.equal(
        guaranteed_step(torch.zeros(2), torch.tensor([0.0, 1.0])),
        torch.zeros(2),
    )
    for options in ({}, {"safeguard": True}, {"safeguard": True, "steps": 3}):
        lmbda = newton_lambda(h, -1, **options)
        (gradient,) = torch.autograd.grad(lmbda.sum(), h)
        assert (
            lmbda[0] == 1
            and lmbda[1] != 1
            and torch.equal(gradient[0], torch.zeros(3, dtype=torch.float64))
            and gradient.isfinite().all()
        )
    assert [end[0].item() for end in mle_bracket(h.detach(), -1)] == [1.0, 1.0]
