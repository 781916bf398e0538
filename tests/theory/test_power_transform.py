"""The power transform beyond its chapter: properties over random inputs,
dtypes, transformations of torch.func, bad input.
"""

import math

import mpmath as mp
import pytest
import torch

from normalnorm.checks.theory.power_transform import (
    worst_inverse_ulps,
    worst_ulps,
)
from normalnorm.layers.engines import native
from normalnorm.theory.power_transform import (
    _phi,
    power_transform_derivative,
    yeo_johnson,
    yeo_johnson_inverse,
    yeo_johnson_nll,
)
from tests.peers import FOLLOWS
from tests.refusals import refusals


def number(x):
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("function", [yeo_johnson, yeo_johnson_inverse])
@pytest.mark.parametrize("lmbda", [0.0, 0.4, 1.0, 2.0, 2.6])
def test_derivatives_of_every_kind(function, lmbda):
    "First and second, in reverse and forward mode, in batches."
    # within the range of the transform for each λ
    h = number([-0.3, -0.2, 0.1, 0.3]).requires_grad_()
    both = (h, number(lmbda).requires_grad_())
    assert torch.autograd.gradcheck(
        function, both, check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(
        function, both, check_fwd_over_rev=True, check_batched_grad=True
    )


def test_overflow_only_where_the_result_overflows():
    # exp(ηℓ) alone is above the largest float32
    h, lmbda = torch.tensor(5.0), 49.0
    assert yeo_johnson(h, lmbda).item() == pytest.approx(
        (6.0**49 - 1) / 49, rel=1e-4
    )


@pytest.mark.parametrize(
    "h, lmbda, expected",
    [
        (-math.inf, 1.0, -math.inf),
        (math.inf, 1.0, math.inf),
        (-math.inf, 0.0, -math.inf),
        (math.inf, 0.0, math.inf),
        (-math.inf, -0.5, -math.inf),
        (math.inf, -0.5, 2.0),
        (-math.inf, 4.0, -0.5),
        (math.inf, 4.0, math.inf),
        (math.nan, 0.5, math.nan),
        (1.0, math.nan, math.nan),
        (1e8, 6.0, math.inf),  # the result itself overflows
    ],
)
def test_infinities_and_nan(h, lmbda, expected):
    found = yeo_johnson(torch.tensor(h), lmbda).item()
    assert found == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_dtype_broadcast_layout(dtype):
    h = torch.randn(2, 5, 3).to(dtype).transpose(0, 2)
    lmbda = torch.rand(5, 1, dtype=dtype) * 2
    out = yeo_johnson(h, lmbda)
    assert out.dtype == dtype and out.shape == (3, 5, 2)
    torch.testing.assert_close(
        out[1, 2], yeo_johnson(h[1, 2], lmbda[2]), rtol=0, atol=0
    )
    assert yeo_johnson(h, 0.5).dtype == dtype
    assert (
        yeo_johnson(h.float(), torch.tensor([0.5], dtype=torch.float64)).dtype
        == torch.float64
    )


def test_nll_shapes():
    h = torch.randn(4, 5, 3, dtype=torch.float64)
    assert yeo_johnson_nll(h, 0.5).shape == (4, 5) and yeo_johnson_nll(
        h, 0.5, (0, 2)
    ).shape == (5,)
    assert yeo_johnson_nll(h[0, 0], torch.linspace(0, 1, 7)[:, None]).shape == (
        7,
    )
    per_channel = yeo_johnson_nll(h, torch.rand(1, 5, 1).double(), (0, 2))
    assert per_channel.shape == (5,)
    assert yeo_johnson_nll(torch.ones(3), 0.5) == -torch.inf


def test_nll_float32_is_computed_in_float64():
    h = torch.randn(1000) * 3
    assert yeo_johnson_nll(h, 5.5).item() == pytest.approx(
        yeo_johnson_nll(h.double(), 5.5).item(), rel=1e-6
    )


test_bad_input = refusals(
    [
        (
            lambda: yeo_johnson(torch.arange(3), 0.5),
            TypeError,
            "floating-point",
        ),
        (
            lambda: yeo_johnson(torch.ones(3, dtype=torch.complex64), 0.5),
            TypeError,
            "floating-point",
        ),
        (lambda: yeo_johnson([1.0], 0.5), TypeError, "list"),
        (
            lambda: yeo_johnson(torch.ones(3), torch.tensor(1j)),
            TypeError,
            "lmbda",
        ),
        (
            lambda: yeo_johnson_inverse(torch.arange(3), 0.5),
            TypeError,
            "yeo_johnson_inverse",
        ),
        (
            lambda: power_transform_derivative(torch.ones(1), 0.5, -1),
            ValueError,
            "order",
        ),
        (
            lambda: yeo_johnson_nll(torch.ones(0), 0.5),
            ValueError,
            "at least one",
        ),
        (
            lambda: yeo_johnson_nll(torch.ones(4), torch.rand(4)),
            ValueError,
            "must not vary",
        ),
    ]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", range(6))
def test_the_integrals_behind_the_derivatives_in_their_last_digits(k, dtype):
    """φ_k(t) = ∫uᵏeᵗᵘ over [0, 1], scaled, against 30 digits: on both sides of
    the change from series to recursion, which loses about a bit a step.
    """
    edge = (k + 1) / 2
    t = torch.cat(
        [
            torch.linspace(-2 * edge, 2 * edge, 41),
            torch.tensor(
                [
                    edge,
                    -edge,
                    0.999 * edge,
                    -0.999 * edge,
                    1.001 * edge,
                    -1.001 * edge,
                    1e-9,
                    -1e-3,
                    20.0,
                    -20.0,
                ]
            ),
        ]
    ).to(dtype)
    with mp.workdps(30):
        for x, found in zip(t.double().tolist(), _phi(k, t).double().tolist()):
            exact = mp.quad(
                lambda u, x=x: u**k * mp.exp(mp.mpf(x) * u), [0, 1]
            ) * mp.exp(-max(x, 0))
            assert (
                abs(mp.mpf(found) / exact - 1)
                <= 2 * 2**k * torch.finfo(dtype).eps
            ), x


@FOLLOWS
@pytest.mark.skipif(not native.available(), reason="no compiler")
@pytest.mark.parametrize(
    "function, worst, limit",
    [
        (yeo_johnson, worst_ulps, {torch.float64: 8, torch.float32: 8}),
        (
            yeo_johnson_inverse,
            worst_inverse_ulps,
            {torch.float64: 8, torch.float32: 1},
        ),
    ],
)
def test_compiled_functions_keep_their_digits(function, worst, limit):
    """What the chapter claims of both, for code by torch.compile, against 60
    digits: its loops over vectors take exp(t) − 1 for expm1.
    """
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True)
    with mp.workdps(60):
        for dtype, most in limit.items():
            assert worst(compiled, 600, dtype) <= most, dtype
    torch.compiler.reset()
