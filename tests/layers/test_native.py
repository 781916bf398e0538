"""The native kernel against float64 and against the definition: layouts, and
faults of the input.
"""

import copy
import ctypes
import itertools
import math
import random
import re
import struct
import sys
from pathlib import Path

import pytest
import torch

import normalnorm
from normalnorm.layers import core, proxy
from normalnorm.layers.backends import normality_norm, set_backend
from normalnorm.layers.core import Rule, Statistics
from normalnorm.layers.engines import native
from normalnorm.layers.functional import batch_normal_norm
from normalnorm.layers.noise import normal_noise
from normalnorm.theory.newton import newton_lambda
from normalnorm.theory.power_transform import power_transform_derivative
from tests.layers.steps import python, step, threads
from tools import processors, rows

COLUMN = (1, 3, 1, 1)
CASES = {
    "batch": ((8, 3, 5, 7), (0, 2, 3), COLUMN),
    "one image": ((1, 3, 5, 7), (0, 2, 3), COLUMN),
    "one channel": ((6, 1, 4, 4), (0, 2, 3), (1, 1, 1, 1)),
    "one position": ((5, 3, 1, 1), (0, 2, 3), COLUMN),
    "instance": ((8, 3, 5, 7), (2, 3), COLUMN),
    "layer": ((8, 3, 5, 7), (1, 2, 3), (3, 5, 7)),
    "last axis": ((4, 3, 131), (-1,), (131,)),
    "group": ((3, 2, 5, 4, 4), (2, 3, 4), (1, 2, 5, 1, 1)),
    "matrix": ((32, 37), (0,), (37,)),
    "volume": ((2, 3, 4, 5, 6), (0, 2, 3, 4), (1, 3, 1, 1, 1)),
    "whole": ((50,), (0,), None),
    "rows": ((7, 11), (1,), (7, 1)),
    "two values": ((2, 19), (0,), None),
    "long": ((3, 5000), (1,), None),
    "sixteen": ((37, 3, 4, 4), (0, 2, 3), COLUMN),
    "runs of 192": ((7, 3, 12, 16), (0, 2, 3), COLUMN),
    "large": ((24, 3, 14, 14), (0, 2, 3), COLUMN),
    "columns of four": ((70, 68), (0,), (68,)),
    "shared weight": ((4, 6, 9), (0, 2), (1, 1, 1)),
}


COVERED = ("BatchNormalNorm", "InstanceNormalNorm", "LayerN", "GroupN")


FORMATS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


def frozen(shape, low, high):
    "Statistics of channels, with λ between two numbers; weight and bias."
    column = (1, shape[1], *(1,) * (len(shape) - 2))
    given = statistics_from(
        torch.randn(column),
        torch.rand(column) + 0.1,
        low + (high - low) * torch.rand(column),
    )
    return given, torch.randn(2, *column).unbind(0)


def in_each_format(u):
    "Channels last, too."
    return (u, u.to(memory_format=torch.channels_last)) if u.ndim == 4 else (u,)


def both(u, dim, shape, dtype=torch.float64, **options):
    "By the kernel, and by the definition in float64."
    return (
        derivatives(normality_norm, u, dim, shape, **options),
        derivatives(core.normality_norm, u, dim, shape, dtype, **options),
    )


@pytest.fixture(autouse=True)
def native_backend():
    with set_backend("native"):
        yield


def values(statistics):
    "Mean, variance and λ, where there is one."
    return statistics.mean, statistics.var, *statistics.parameters


def statistics_from(mean, var, lmbda=None):
    return Statistics(mean, var, () if lmbda is None else (lmbda,))


def derivatives(function, u, dim, shape, dtype=None, **options):
    """Output, statistics and gradients; the weights, the upstream gradient and
    the seed are always the same.
    """
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(u.shape, generator=generator)
    leaves = [u.detach()] + (
        []
        if shape is None
        else [
            torch.rand(shape, generator=generator) + 0.5,
            torch.randn(shape, generator=generator),
        ]
    )
    leaves = [t.to(dtype or t.dtype).requires_grad_() for t in leaves]
    out, used = function(
        leaves[0], dim, *leaves[1:], seed=torch.tensor(2**40 + 5), **options
    )
    return [
        out.detach(),
        *(s.detach() for s in values(used)),
        *torch.autograd.grad(out, leaves, grad.to(out.dtype)),
    ]


def far(found, reference):
    """The largest difference of each pair, relative to the largest value of the
    reference.
    """
    assert [f.shape for f in found] == [r.shape for r in reference]
    return max(
        ((f.double() - r).abs().max() / r.abs().max().clamp(min=1e-3)).item()
        for f, r in zip(found, reference)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"noise": 0.4},
        {"noise": 0.3, "noise_kind": "dropout"},
        {"noise": 0.3, "noise_kind": "unscaled"},
        {"alpha": 0.0, "noise": 0.2},
        {"alpha": 0.5},
        {"eps": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", CASES)
def test_like_float64(case, options):
    shape, dim, weight = CASES[case]
    u, of = torch.randn(shape).exp(), weight and torch.ones(weight)
    assert native.prepare(u, dim, of, of, Rule.of(**options)) is not None
    found, reference = both(u, dim, weight, **options)
    # of two values h is ±1 but for ε, so next to no gradient is left
    last = -1 if case == "two values" else None
    assert far(found[:last], reference[:last]) < 2e-5


def with_one(value, u):
    "Each unit with one element that is far away."
    u[0].view(-1)[:: u[0, 0].numel()] += value
    return u


EXTREME = {
    **{
        f"scale {scale}": (
            lambda scale=scale: torch.randn(16, 3, 5, 5).exp() * scale,
            COLUMN,
            1e-5,
        )
        for scale in (1e-15, 1e-4, 1e3, 1e17)
    },
    # at the border of the table, of a large unit
    **{
        f"{value} σ": (
            lambda value=value: with_one(value, torch.randn(20000, 1)),
            None,
            1e-5,
        )
        for value in (14.0, 14.9, 15.3, 15.9, 16.5)
    },
    # beyond the table; a first element far from the mean; a far mean
    "40 σ": (
        lambda: with_one(40.0, torch.randn(5, 2, 40, 40)),
        (1, 2, 1, 1),
        2e-5,
    ),
    "10⁴ σ": (
        lambda: with_one(1e4, torch.randn(5, 2, 40, 40)),
        (1, 2, 1, 1),
        2e-4,
    ),
    "mean 10⁴": (
        lambda: torch.randn(5, 2, 40, 40) + 1e4,
        (1, 2, 1, 1),
        2e-5,
    ),
    # λ̂ far outside [0, 2], small η, and beyond the fast exponential
    **{
        f"exp(z)^{power}": (
            lambda power=power: (
                torch.randn(2000, 1).double().exp() ** power
            ).float(),
            (1,),
            2e-4,
        )
        for power in (1, 2, 3, 4, 6, 8)
    },
    "−exp(z)³": (
        lambda: -(torch.randn(2000, 1).exp() ** 3),
        (1,),
        2e-4,
    ),
}


@pytest.mark.parametrize("case", EXTREME)
def test_extreme_units(case):
    made, weight, tolerance = EXTREME[case]
    u = made()
    for f, r in zip(*both(u, (0, *range(2, u.ndim)), weight)):
        assert (f - r).abs().max() <= tolerance * r.abs().max() + 1e-6 * (
            tolerance == 2e-4
        )


@pytest.mark.parametrize("sampled, unit", [(16, (0,)), (4, (1,))])
def test_first_guess_of_the_mean_far_from_it(sampled, unit):
    """The elements whose mean the moments are taken about, 16 of a column and 4
    of a row, are far from the others: the moments are taken again.
    """
    u = torch.randn(1 << 14, 3)
    u[:: (1 << 14) // sampled] += 1e3
    u = u if unit == (0,) else u.T.contiguous()
    out = normality_norm(u, unit, alpha=0.0)[0]
    exact = core.normality_norm(u.double(), unit, alpha=0.0)[0]
    assert (out - exact).abs().max() < 2e-7 * exact.abs().max()


# shape, axes of a unit, shape of weight and bias, channels last
LYING = {
    "rows": ((16, 7, 384), (2,), (384,), False),
    "rows of 49": ((4, 7, 49), (2,), (49,), False),
    "runs": ((8, 20, 14, 14), (0, 2, 3), (20, 1, 1), False),
    "short runs": ((16, 20, 7, 7), (0, 2, 3), (20, 1, 1), False),
    "one long unit": ((2, 3, 70, 70), (0, 2, 3), (3, 1, 1), False),
    "columns": ((64, 30), (0,), (30,), False),
    "channels last": ((33, 37, 9, 5), (0, 2, 3), (37, 1, 1), True),
    "parts": ((9, 8, 16, 16), (2, 3), (8, 1, 1), False),
}


def _bits(x):
    "Numbers of bfloat16 in order: neighbours differ by 1."
    n = x.view(torch.int16).int()
    return torch.where(n < 0, -32768 - n, n)


@pytest.mark.parametrize(
    "where, noise, given",
    [
        (where, *how)
        for where, (_, dim, _, _) in LYING.items()
        # statistics are given one a channel, and without noise
        for how in ((0.0, False), (0.4, False), *[(0.0, True)] * (0 in dim))
    ],
)
def test_bfloat16_is_read_where_it_lies(monkeypatch, where, noise, given):
    """No tensor of the input's size is converted, and everything is what the
    same kernel makes of the widened input, rounded: the same number, or its
    neighbour where sums are taken in another order.
    """
    shape, dim, of, last = LYING[where]
    layout = torch.channels_last if last else torch.contiguous_format
    u, grad = (
        torch.randn(shape).bfloat16().contiguous(memory_format=layout)
        for _ in range(2)
    )
    column = (1,) * (len(shape) - len(of)) + of
    weight, bias, mean = torch.rand(of) + 0.5, torch.randn(of), torch.zeros(1)
    statistics = (
        core.Statistics(
            mean.expand(column),
            torch.rand(column) + 0.5,
            (2 * torch.rand(column),),
        )
        if given
        else None
    )
    if given:
        weight, bias = weight.view(column), bias.view(column)
    results, convert = [], torch.Tensor.to

    def small(t, *to):
        assert t.numel() < u.numel()
        return convert(t, *to)

    for x, g in ((u, grad), (u.float(), grad.float())):
        call = native.prepare(
            x, dim, weight, bias, Rule(noise=noise), None, statistics
        )
        assert call is not None and call.dtype == x.dtype
        with monkeypatch.context() as within:
            if x is u:
                within.setattr(torch.Tensor, "to", small)
            out, numbers = native.forward(
                call, x, weight, bias, seed=3, statistics=statistics
            )
            saved = (
                x,
                weight,
                *(native.triple(statistics) if given else (numbers,)),
            )
            results.append([out, *native.backward(call, g, saved, seed=3)])
    (out, of_u, *ours), (wide, wide_of_u, *theirs) = results
    for found, expected in ((out, wide), (of_u, wide_of_u)):
        assert found.dtype == torch.bfloat16
        assert found.stride() == u.stride()
        off = (_bits(found) - _bits(expected.bfloat16())).abs()
        assert off.max() <= 1 and off.float().mean() < 1e-3
    for found, expected in zip(ours, theirs):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_rounding_to_bfloat16():
    "As PyTorch's: ties to even, beyond the largest to infinity, NaN stays."
    words = torch.randint(-(2**31), 2**31, (4, 4096), dtype=torch.int64).int()
    words[0] = words[0] & ~0xFFFF | 0x8000  # ties
    words[1, :8] = torch.tensor(
        [
            0x7F7FFFFF,
            0x7F7F8000,
            0x7F7F7FFF,
            0,
            -(2**31),
            1,
            0x7F800000,
            0x7FC00001,
        ]
    )
    floats = words.view(torch.float32)
    # a weight of 0 leaves the bias; of 1 and each element
    u = torch.ones(4, 4096).bfloat16()
    call = native.prepare(u, (1,), floats[0] * 0, floats[0], Rule())
    for row in floats:
        out, _ = native.forward(call, u, row * 0, row)
        expected = (row * 0 + row).bfloat16()
        torch.testing.assert_close(
            out, expected.expand_as(out), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize(
    "shape, dim, weight",
    [CASES["batch"], ((300, 17), (1,), (17,)), ((300, 17), (0,), (17,))],
)
def test_same_bits(shape, dim, weight):
    "For one seed, whatever the number of threads."
    u, found = torch.randn(shape), []
    for n in (1, 2, 3, 1):
        with threads(n):
            found.append(derivatives(normality_norm, u, dim, weight, noise=0.4))
    torch.testing.assert_close(found[1:], found[:1] * 3, rtol=0, atol=0)


def normals(start, count, key):
    "The generator's numbers."
    z = torch.empty(count)
    native.library().normalnorm_normals(
        ctypes.c_uint64(start),
        ctypes.c_int64(count),
        ctypes.c_uint64(key),
        ctypes.c_void_p(z.data_ptr()),
    )
    torch.testing.assert_close(
        z,
        normal_noise((count,), torch.tensor(key), start),
        rtol=2e-6,
        atol=2e-6,
    )
    return z


@pytest.mark.parametrize(
    "start",
    [
        *(0, 1, 2, 3, 5, 2**31 - 3, 2**32 - 2),
        *(2**34 - 8, 2**34 + 1, 2**35, 2**40),
    ],
)
def test_noise_of_any_index(start):
    "From any first index, 2³² and beyond included."
    for count in (1, 3, 63, 64, 65, 517, 1500):
        normals(start, count, 987654321987654321)


@pytest.mark.parametrize(
    "counter, place, word", [(1_201_279_956, 2, 0), (1_836_782_499, 0, 1)]
)
def test_the_largest_noise(counter, place, word):
    "Of 2³¹ words the smallest: no logarithm of 0."
    z = normals(4 * counter + place, 2, 5)
    assert z.square().sum().sqrt().item() == pytest.approx(
        math.sqrt(-2 * math.log((word + 0.5) * 2.0**-32)), rel=1e-6
    )


@pytest.mark.parametrize(
    "shape, dim",
    [
        ((64, 8), (0,)),
        ((64, 8), (1,)),
        ((7, 4, 8), (0, 2)),
        ((7, 4, 80), (0, 2)),
        ((3, 4, 400), (0, 2)),
    ],
)
def test_noise_of_a_layer_far_on(shape, dim):
    "Counters have 32 bits below element 2³⁴."
    u, offsets = (
        torch.randn(shape),
        (2**33 + 4, 2**33 + 6, 2**34 - 64, 2**34 + 4, 2**35, 2**35 + 8),
    )
    whole, again = (
        [
            f(u, dim, noise=0.5, seed=torch.tensor(5), offset=offset)[0]
            for offset in (*offsets, 2**36 + 4)
        ]
        for f in (normality_norm, core.normality_norm)
    )
    torch.testing.assert_close(whole, again, rtol=1e-5, atol=1e-5)
    assert not any(torch.equal(a, b) for a, b in zip(whole, whole[1:]))


def test_more_than_two_to_the_31_elements():
    """Two units of 64 elements, the second from element 2³¹ on; of the memory
    between them nothing is touched, so it is only asked for.
    """
    half = 2**30 + 32
    try:
        u, grad = torch.empty(2, half), torch.empty(2, half)
    except RuntimeError:
        pytest.skip("17 GB of addresses are not to be had")
    small = native.prepare(
        torch.empty(2, 64), (1,), None, None, Rule(noise=0.4)
    )
    traversal = native.Traversal(2, 2, 0, 2**31, 1, 64, 0)
    small = small._replace(
        saved=((u.shape, torch.float32), *small.saved[1:]),
        kinds=(*[native._expected(u.shape)] * 2, *small.kinds[2:]),
    )
    call = small._replace(
        traversal=traversal,
        fixed=small.fixed.replace(
            native._FIXED.pack(*small.traversal, *(0,) * 7)[
                : 8 * len(traversal)
            ],
            native._FIXED.pack(*traversal, *(0,) * 7)[: 8 * len(traversal)],
        ),
    )
    torch.manual_seed(0)
    for x in (u, grad):
        x.view(-1)[:64], x.view(-1)[2**31 :] = torch.randn(2, 64).exp()
    out, numbers = native.forward(call, u, seed=3)
    of_u, *_ = native.backward(call, grad, (u, None, numbers), seed=3)
    for start in (0, 2**31):
        part = u.view(-1)[start : start + 64].clone().requires_grad_()
        expected, _ = core.normality_norm(
            part, (0,), noise=0.4, seed=torch.tensor(3), offset=start
        )
        torch.testing.assert_close(
            out.view(-1)[start : start + 64], expected, rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            of_u.view(-1)[start : start + 64],
            torch.autograd.grad(
                expected, part, grad.view(-1)[start : start + 64]
            )[0],
            rtol=1e-4,
            atol=1e-5,
        )


def evaluated(u, lmbda):
    """The kernel's transform of standardized values whose λ, one or one for
    each index of axis 1, is given: with a table, or for matrices by logarithm
    and exponential on every processor.
    """
    lmbda = torch.as_tensor(lmbda).view(1, -1, *(1,) * (u.ndim - 2))
    given = statistics_from(
        torch.zeros_like(lmbda), torch.ones_like(lmbda), lmbda
    )
    call = native.prepare(u, (0,), None, None, Rule(eps=0.0), statistics=given)
    return native.forward(call, u, statistics=given)[0]


@pytest.mark.parametrize(
    "shape",
    [
        *((8, 3, 5, 7), (32, 37), (4, 6, 9), (40, 3, 16, 16)),
        *((2, 3, 1, 1), (2, 3, 2, 3)),
    ],
)
@pytest.mark.parametrize("scale", [3.0, 1e4, 1e25])
def test_given_statistics(shape, scale):
    """A frozen layer: result and first derivatives by the kernel, for λ = 1,
    far values and values that `representable` moves too.
    """
    given, affine = frozen(shape, -1, 3)
    given.lmbda[:, 0] = 1
    u, grad = torch.randn(shape) * scale, torch.randn(shape)

    def run(x, of=normality_norm, dtype=torch.float32):
        leaves = [t.to(dtype).requires_grad_() for t in affine]
        wide = statistics_from(*(s.to(dtype) for s in values(given)))
        function = lambda x: of(x, (0,), *leaves, statistics=wide)[0]
        found = step(function, x.to(dtype), grad.to(dtype), leaves)
        assert found[0].stride() == torch.empty_like(x).stride()
        return [g.double() for g in found]

    exact = run(u, core.normality_norm, torch.float64)
    with set_backend("eager"):
        eager = run(u)
    for x in in_each_format(u):
        out, of_u, of_weight, of_bias = run(x)
        torch.testing.assert_close(of_bias, exact[3], rtol=1e-5, atol=1e-4)
        if scale < 1e20:
            torch.testing.assert_close(out, exact[0], rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(of_u, exact[1], rtol=5e-5, atol=1e-7)
            error = (of_weight - exact[2]).abs()
            assert (error <= 1e-5 * exact[2].abs().max()).all()
        else:  # 0 where the value was moved, else as the definition
            torch.testing.assert_close(out, eager[0], rtol=3e-5, atol=0)
            torch.testing.assert_close(of_u, eager[1], rtol=1e-4, atol=1e-37)
    wrong = given._replace(var=given.var[:, :1])
    assert native.prepare(u, (0,), None, None, Rule(), statistics=wrong) is None


def test_a_gradient_that_the_kernel_does_not_have():
    "Of statistics that are given."
    given, (weight, _) = frozen((8, 3, 5, 7), -1, 3)
    given.var.requires_grad_()
    u = torch.randn(8, 3, 5, 7)
    out, _ = normality_norm(u, (0,), weight, None, statistics=given)
    (of_var,) = torch.autograd.grad(out.sum(), given.var)
    assert of_var.abs().min() > 0


def transformed(h, lmbda):
    "ψ(h; λ) and t = ηℓ in float64."
    x, l = h.double(), lmbda.double()
    eta, ell = torch.where(x < 0, 2 - l, l), x.abs().log1p()
    t = eta * ell
    return torch.copysign(
        torch.where(
            eta == 0, ell, torch.expm1(t) / torch.where(eta == 0, 1.0, eta)
        ),
        x,
    ), t


def in_ulp(error, exact):
    "In units in the last place of a float32 number of that size."
    return error / 2.0 ** (exact.abs().clamp(min=2.0**-126).log2().floor() - 23)


def test_way():
    """What the compiled kernel says of itself is one of the ways that the
    chapter lists.
    """
    lanes, fused, tables = native.way()
    assert (
        lanes in (4, 8, 16) and tables == (lanes >= 8) and (fused or lanes < 16)
    )


def test_bounds_are_those_of_the_instruction_sets():
    """Each set has a bound of its own, whatever processor this is; others are
    held to the largest."""
    assert {name: of for name, (of, _) in native.BOUNDS.items()} == {
        name: found.way for name, found in processors.SETS.items()
    }
    for of, bound in native.BOUNDS.values():
        assert native.bounds(native.Way(*of)) == bound
    assert native.bounds(native.Way(4, True, False)) == (4.0, 4.5)


def searched(over, h):
    """The largest `over(h)` of each column of h, which has a λ of its own: on
    the grid, then twice among the 1000 floats on either side of the worst.
    """
    error = over(h)
    for _ in range(2):
        worst = h.gather(0, error.argmax(0, keepdim=True))
        near = (
            worst.view(torch.int32)
            + torch.arange(-1000, 1001, dtype=torch.int32)[:, None]
        ).view(torch.float32)
        again = over(near.contiguous())
        h, error = torch.cat([h, near]), torch.cat([error, again])
    return error.max(0).values


def test_bound_of_the_logarithm():
    """Each way has its bound beyond |t|/2, t = ηℓ: random and regular h, usual
    and extreme λ, and the neighbours of the worst.

    The worst found for each: 3.6 for |t| < 2, and 0.43 |t| at t = 77."""
    generator = torch.Generator().manual_seed(11)
    size = torch.cat(
        [
            torch.logspace(-29, 4, 3000),
            8 * torch.rand(2000, generator=generator),
            torch.rand(1000, generator=generator),
        ]
    )
    lmbda = torch.tensor(
        [
            -12,
            -5,
            -3,
            -1.0,
            -0.5,
            -1e-9,
            0,
            1e-10,
            1e-3,
            0.1,
            0.5,
            0.9,
            0.99,
            1.001,
            1.2,
            1.7,
            1.999,
            2,
            2.1,
            3,
            5,
            14,
            *(4 * torch.rand(40, generator=generator) - 1),
        ]
    )

    def over(h):
        exact, t = transformed(h, lmbda)
        error = in_ulp(evaluated(h, lmbda) - exact, exact).abs()
        return torch.where(t < 80, error - t.abs() / 2, 0)

    for sign in (1, -1):
        h = (sign * size)[:, None].expand(-1, len(lmbda)).contiguous()
        assert (
            searched(over, h) <= native.bounds(native.way()).logarithm
        ).all()


@pytest.mark.parametrize("columns", [False, True])
def test_each_way_to_the_transform_and_its_gradient(columns):
    """Units whose λ̂ is so near 1 that |δ| ≤ 0.7 (the short form), farther, and
    more than 0.75 away (the gradient by the general exponential): each like the
    definition in float64. Worst found, of the largest value of a unit: 3e-6
    where λ̂ = −0.7, which multiplies what is rounded off k; 3e-7 where |δ| is
    small.

    The kernel before these ways had the same errors."""
    generator = torch.Generator().manual_seed(17)
    spread = torch.logspace(-1.2, 0.2, 64)[:, None]
    u = (spread * torch.randn(64, 700, generator=generator)).exp()
    grad, unit = torch.randn(64, 700, generator=generator), 1
    layer = normalnorm.LayerNormalNorm(700, noise=0.0)
    if columns:
        layer, unit = normalnorm.BatchNormalNorm1d(64, noise=0.0), 0
        u, grad = u.T.contiguous(), grad.T.contiguous()
    found = step(layer, u, grad)
    exact = step(layer.double(), u.double(), grad.double())
    k = u.double() - u.double().mean(unit, keepdim=True)
    k = k / k.square().mean(unit, keepdim=True).sqrt()
    beyond = (newton_lambda(u.double(), unit) - 1).abs()
    delta = beyond * k.abs().amax(unit).log1p()
    near = (delta < 0.6).unsqueeze(unit)
    for some in (delta < 0.6, beyond > 0.8, (delta > 0.8) & (beyond < 0.7)):
        assert some.sum() > 3
    for of, e in zip(found, exact):
        error = (of.double() - e).abs()
        if e.ndim == 2:
            scale = e.abs().amax(unit, keepdim=True)
            assert (error <= torch.where(near, 8e-7, 8e-6) * scale).all()
        else:
            assert (error <= 2e-6 * e.abs().max()).all()


def test_floor_of_tiny_values():
    """Where η = 0 is replaced by 10⁻⁹, t = 10⁻⁹h is below the normal numbers
    for |h| < 8·10⁻³⁰, and has an absolute error of half their distance:
    2⁻¹⁵⁰/(10⁻⁹ log₂e), 5·10⁻³⁷, twice that with both roundings.

    Others have no such floor."""
    h = torch.logspace(-38, -28, 2000)[:, None].expand(-1, 6).contiguous()
    lmbda = torch.tensor([0.0, 1e-10, 1e-6, 0.5, 1.5, 3.0])
    exact, _ = transformed(h, lmbda)
    error, ulp = (
        (evaluated(h, lmbda) - exact).abs(),
        2.0 ** (exact.log2().floor().clamp(min=-126) - 23),
    )
    floor = 2.0**-149 / lmbda.double().clamp(min=1e-9)
    assert (error <= 4 * ulp + floor).all()
    assert (error[h[:, 0] > 8e-30] <= 4 * ulp[h[:, 0] > 8e-30]).all()


UNIT = 2.0**-24


def test_no_bias_of_the_polynomials():
    """Roundings average out over neighbouring h; a wrong digit of a coefficient
    or of a table does not.

    In 400 windows of h, the mean relative error is what the polynomials
    themselves leave: about one unit of 2⁻²⁴ in the logarithm (η → 0), and with
    the exponential for η = ½, 2, −1, −2, where 1/η is exact, a little more or
    less. An entry of the table is the same in a whole window, and so is what is
    rounded off its product with η/log 2: half a unit in the last place of an
    r near ¼ is one of these units. Hence limits for each table, a tenth above
    the worst found."""
    eight = native.way().lanes == 8
    generator = torch.Generator().manual_seed(0)
    window = torch.exp(torch.linspace(math.log(1e-3), math.log(2700), 400))
    h = window * (1 + 0.02 * torch.rand(400, 400, generator=generator))
    for lmbda, sixteen, of_eight in (
        (0.0, 1.25, 1.3),
        (0.5, 1.0, 1.0),
        (2.0, 1.6, 2.0),
        (-1.0, 0.95, 0.95),
        (-2.0, 1.25, 1.1),
    ):
        l = torch.full((400,), lmbda)
        exact, _ = transformed(h, l)
        bias = ((evaluated(h, l) / exact - 1).mean(0).abs() / UNIT).max()
        assert bias < (of_eight if eight else sixteen), lmbda


def test_correction_for_the_rounded_inverse():
    """1/η is rounded by a relative `off`, for which t is given the opposite
    error times a factor, 0.58 or 1.05.

    Where the exponential's derivative is taken to be what it is (2^r = ¾) the
    relative error of ψ is then off·(1 − factor · t eᵗ/expm1 t): regressed on
    4000 λ."""
    generator = torch.Generator().manual_seed(1)
    for sign, t, factor in (
        (1, 1.5849625 * math.log(2), 0.58),
        (-1, -0.4150375 * math.log(2), 1.05),
    ):
        eta = sign * (0.3 + 2.6 * torch.rand(4000, generator=generator))
        inverse = (1 / eta.double()).float()
        word = inverse.view(torch.int32)
        usual = ~(((word & 0x7FFFFF) > 0x124924) & ((word & 7) == 4))
        off = inverse.double() * eta.double() - 1
        h = torch.expm1(
            (t + 0.02 * (torch.rand(200, 4000, generator=generator) - 0.5))
            / eta
        )
        error = (evaluated(h, eta) / transformed(h, eta)[0] - 1).mean(0)
        error = error - error[usual].mean()
        slope = (off * error)[usual].sum() / off[usual].square().sum()
        assert (
            abs(slope - (1 - factor * t * math.exp(t) / math.expm1(t))) < 0.04
        )


def slopes(lmbda, extreme, at, n):
    """∂ψ/∂λ at elements of a unit by the kernel's backward pass and in float64.

    With a huge α the gradient of the other elements is this slope times a
    vector that is the same for all: divided by that of a reference element,
    where the slope is known."""
    generator = torch.Generator().manual_seed(2)
    u = torch.randn(1, n, generator=generator)
    u[0, : len(extreme)] = torch.tensor(extreme)
    numbers = native.forward(
        native.prepare(u, (1,), None, None, Rule(eps=0.0)), u
    )[1].clone()
    numbers[2] = lmbda
    call, found = native.prepare(u, (1,), None, None, Rule(eps=0.0)), []
    call = call._replace(
        fixed=call.fixed[:-16] + struct.pack("d", 1e9) + call.fixed[-8:]
    )
    for j in at:
        grad = torch.zeros(1, n)
        grad[0, j] = 1
        found.append(
            native.backward(call, grad, (u, None, numbers))[0][
                0, len(extreme) :
            ].double()
        )
    x = u[0].double()
    k = (x - x.mean()) / x.std(correction=0)
    expected = power_transform_derivative(k[list(at)], numbers[2].double(), 1)
    biggest = found[0].abs().argmax()
    return (
        torch.stack([f[biggest] / found[0][biggest] for f in found]),
        expected / expected[0],
        k[list(at)],
    )


@pytest.mark.parametrize("lmbda", [0.03, 1.97, -0.03, 0.2, 1.8])
def test_slope_in_lambda_of_one_element(lmbda):
    """By its series where η is small and |t| < 1, without which 2⁻²⁴/t is lost;
    by the formula where t is larger, up to which the series holds.
    """
    side = -1.0 if lmbda > 1 else 1.0
    found, expected, k = slopes(
        lmbda, [side * x for x in (0.7, 0.3, 0.5, 1.1, 1.9)], range(5), 64
    )
    assert (k * side > 0).all()
    assert ((found / expected - 1).abs() < 12 * UNIT).all()


def test_slope_in_lambda_beyond_its_series():
    """An element at 700 σ of a million, with |t| = ηℓ up to 1.6: where ten
    terms of the series are not enough.
    """
    for lmbda, side in ((0.24, 1.0), (-0.24, 1.0), (1.76, -1.0)):
        found, expected, k = slopes(
            lmbda, [side * x for x in (2e3, 7e3, 3e3)], range(3), 10**6
        )
        assert (k * side)[1] > 600
        assert ((found / expected - 1).abs() < 16 * UNIT).all()


def test_logarithm_of_the_nearby_value():
    """ℓ of h from ℓ of k by one term of a series, by two, or by a logarithm of
    its own: no bias of more than a unit and a half on either side of each
    border.
    """
    u = (
        torch.arange(-31, 33).float()[None] / 16
        + torch.tensor([0.0, 0.25]).repeat(32)[None]
    )
    u = torch.cat([u, 2 * u], 1)
    x = u.double()
    var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    for gap in (1.1e-4, 1.3e-4, 1e-3, 3.9e-3, 4.1e-3, 1e-2, 3e-2):
        eps = (var / (1 - gap) ** 2 - var).item()
        out, numbers = native.forward(
            native.prepare(u, (1,), None, None, Rule(eps=eps)), u
        )
        h = (x - mean) / (var + eps).sqrt()
        exact = transformed(h, numbers[2])[0]
        assert (out / exact - 1)[h.abs() > 0.3].mean().abs() < 1.5 * UNIT, gap


def test_gradient_where_a_logarithm_is_near():
    """As above for the gradient of half the sum of squares of the output, which
    is nearly 0: its error is no larger on one side of the border than on the
    other.
    """
    u = torch.randn(64, 512) + 2 * (torch.arange(512) % 5 == 0)
    u /= u.std(1, keepdim=True, correction=0)
    for layout in (u[None], u.T):
        for gap in (1e-4, 3.9e-3, 4.1e-3, 1e-2, 3.8e-2):
            layer = normalnorm.BatchNormalNorm1d(
                64, eps=1 / (1 - gap) ** 2 - 1, noise=0.0
            )
            exact_layer = copy.deepcopy(layer).double()
            x = layout.clone().requires_grad_()
            y = layout.double().requires_grad_()
            grad = exact_layer(y).detach()
            exact_layer(y).backward(grad)
            layer(x).backward(grad.float())
            error = (x.grad - y.grad).abs().mean() / y.grad.abs().max()
            assert error < 3 * UNIT, (gap, error)


@pytest.mark.parametrize("lmbda", [0.0, 0.5])
def test_identity_among_others(lmbda):
    """In a matrix, a column with λ = 1 keeps its values exactly though its
    neighbours are transformed.
    """
    h, l = torch.randn(50, 5), torch.tensor([1.0, lmbda, 1.0, lmbda, 1.0])
    assert torch.equal(evaluated(h, l)[:, ::2], h[:, ::2])


@pytest.mark.parametrize("lmbda", [-12.0, -14.0, 14.0, 11.0, 30.0])
def test_large_exponents(lmbda):
    """|η| > 10, where t passes what the fast exponential covers long before ℓ
    does: up to the largest numbers, then as `representable`.
    """
    t = torch.cat([torch.linspace(1, 79, 200), torch.linspace(79, 90, 300)])
    eta = max(lmbda, 2 - lmbda)
    h = torch.copysign(torch.expm1(t / eta), torch.tensor(lmbda))[:, None]
    exact, _ = transformed(h, torch.tensor(lmbda))
    top = math.log(torch.finfo(torch.float32).max) - 0.7
    limit = math.copysign(math.expm1(top) / eta, lmbda)
    exact = torch.where(exact.abs() > abs(limit), limit, exact)[:, 0]
    for u in (h, h.t()[None], h.repeat(4, 1).t()[None]):
        out = evaluated(u.contiguous(), lmbda).flatten()[:500]
        # and h has a rounding, of which ηh/(1+h) arrives
        assert (in_ulp(out - exact, exact).abs() <= 4 + t / 2 + 2 * eta).all()


@pytest.mark.parametrize(
    "scale, constant",
    [
        (1e-15, False),
        (4e-16, False),
        (1e-16, False),
        (5e-17, True),
        (1e-17, True),
        (1e-18, True),
        (3e-20, True),
    ],
)
def test_tiny_variances(scale, constant):
    """Without ε: variances down to the smallest normal number are computed in
    double, and λ̂ is 1 below 10⁻³¹ as in the definition (in float32: a
    variance's own terms could not be represented there; in float64 the limit is
    10⁻²⁹²)."""
    u = torch.randn(64, 1).exp() * scale
    found, reference = both(u, (0,), None, None, eps=0.0)
    var = u.double().var(correction=0).item()
    assert (var < 2.0**-126 / 2.0**-23) == constant
    for side in (found, reference):
        assert (side[3].item() == 1) == constant
    assert found[2].double().item() == pytest.approx(var, rel=1e-6, abs=0)
    for f, r in zip(found, reference):
        assert (f - r).abs().max() <= 2e-5 * r.abs().max()


@pytest.mark.parametrize("s", [1.3e-22, 1.21e-20, 1.7e-20, 2.9e-20])
def test_tiny_squares(s):
    "The square in float would have an error of up to 5 %."
    u = torch.tensor([s, -s] * 32)[:, None]
    out = normality_norm(u, (0,), eps=0.0)[0]
    torch.testing.assert_close(out, u.sign(), rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    "layout", ["long", "matrix", "channels last", "mixed matrix"]
)
def test_frozen_layer_with_values_that_are_not_finite(layout):
    """Given statistics: output and gradients are those of the definition, in
    NaN and infinities too, wherever one stands.
    """
    shape = {"long": (4, 3, 20, 20), "channels last": (4, 3, 5, 5)}.get(
        layout, (40, 3)
    )
    memory = (
        torch.channels_last
        if layout == "channels last"
        else torch.contiguous_format
    )
    column = (1, 3, *(1,) * (len(shape) - 2))
    at = (0, 1, *(0,) * (len(shape) - 2))
    for lmbda, value, place in itertools.product(
        (None, -12.0, 0.0, 0.5, 1.0, 2.0, 3.0),
        (torch.nan, torch.inf, -torch.inf),
        ("u", "grad", "mean", "var", "weight", "bias"),
    ):
        torch.manual_seed(0)
        tensors = {
            "u": torch.randn(shape).to(memory_format=memory),
            "grad": torch.randn(shape).to(memory_format=memory),
            "mean": torch.randn(column) / 10,
            "var": torch.rand(column) + 0.5,
            "weight": torch.rand(column) + 0.5,
            "bias": torch.randn(column),
        }
        l = None if lmbda is None else torch.full(column, lmbda)
        if layout == "mixed matrix" and l is not None:
            l[:, 0], l[:, 2] = 1, 0.3
        tensors[place][at] = value
        u, grad, mean, var, *affine = tensors.values()
        leaves = [t.requires_grad_() for t in affine]
        run = lambda x: normality_norm(
            x, (0,), *leaves, statistics=statistics_from(mean, var, l)
        )[0]
        found = step(run, u, grad, leaves)
        with set_backend("eager"):
            expected = step(run, u, grad, leaves)
        for f, e in zip(found, expected):
            usual = e.isfinite()
            assert f[usual].isfinite().all(), (lmbda, value, place)
            torch.testing.assert_close(
                torch.where(usual, 0, f),
                torch.where(usual, 0, e),
                rtol=0,
                atol=0,
                equal_nan=True,
            )
            torch.testing.assert_close(f[usual], e[usual], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("weight", [0.0, 1e-30, 1e30, 3e38, -1e-38])
def test_weights_of_any_size(weight):
    """A table holds coefficients times the weight: not where these could not be
    represented.
    """
    u, w = torch.randn(2, 1, 600), torch.full((1, 1, 1), weight)
    statistics = statistics_from(
        *(x * torch.ones(1, 1, 1) for x in (0, 1, 0.5))
    )
    found, expected = (
        f(u, (0, 2), w, None, statistics=statistics)[0]
        for f in (normality_norm, core.normality_norm)
    )
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-45)


def test_addresses_of_freed_memory():
    """Each of the kernel's functions refuses an address of nothing that it
    needs, and 1, which marks an optional tensor without memory; then it has
    written nothing.
    """
    u, out = torch.randn(4, 3), torch.full((4, 3), 7.0)
    call = native.prepare(u, (0,), None, None, Rule())
    given = Statistics(torch.zeros(1, 3), torch.ones(1, 3), (torch.ones(1, 3),))
    frozen = native.prepare(u, (0,), None, None, Rule(), statistics=given)
    numbers, many = native.forward(call, u)[1], torch.zeros(64)
    spots = [
        u.data_ptr(),
        u.data_ptr(),
        out.data_ptr(),
        0,
        0,
        *(numbers.data_ptr() + 12 * i for i in range(4)),
        *(0,) * 5,
    ]

    def job(which, spots):
        return (
            native._ADDRESSES.pack(*spots)
            + which.fixed
            + native._VARYING.pack(1, 0, 0, 0.5)
        )

    library, freed = native.library(), "its storage was freed"
    for function, which, needed in (
        (library.normalnorm_forward, call, (0, 2)),
        (library.normalnorm_backward, call, (0, 1, 2, 5, 6, 7, 8)),
        (library.normalnorm_forward, frozen, (0, 2, 5, 6, 7)),
        (library.normalnorm_given_backward, frozen, (0, 1, 2, 5, 6, 7)),
    ):
        good = [
            many.data_ptr() if i >= 5 and which is frozen and i < 8 else x
            for i, x in enumerate(spots)
        ]
        function(job(which, good))
        optional = (
            (3, 4, 11, 12, 13)
            if function is library.normalnorm_forward
            else (3, 9, 10)
        )
        for i, address in [(i, a) for i in needed for a in (0, 1)] + [
            (i, 1) for i in optional
        ]:
            out.fill_(7)
            with pytest.raises(RuntimeError, match=freed):
                function(
                    job(
                        which,
                        [address if k == i else x for k, x in enumerate(good)],
                    )
                )
            assert (out == 7).all()
    for function, needed in (
        (library.normalnorm_proxy_forward, (0, 1, 4, 5, 6)),
        (library.normalnorm_proxy_backward, (0, 7, 8, 9)),
    ):
        for i in needed:
            with pytest.raises(RuntimeError, match=freed):
                function(
                    proxy._FIELDS.pack(
                        *[0 if k == i else many.data_ptr() for k in range(14)],
                        1,
                        1,
                        0,
                        1,
                        0.0,
                    )
                )
    with pytest.raises(RuntimeError, match=freed):
        library.normalnorm_normals(0, 4, 1, None)


MEMORY = """
    import resource, sys, torch, normalnorm
    from normalnorm.layers.engines import native
    native.library()
    def used():
        return next(int(line.split()[1]) for line in open("/proc/self/status")
                    if line.startswith("VmSize")) * 1024
    def limit(room):
        resource.setrlimit(resource.RLIMIT_AS,
                           (used() + room if room else resource.RLIM_INFINITY,
                            resource.RLIM_INFINITY))
    torch.set_num_threads(int(sys.argv[1]))
    x = torch.randn(2000, 64).matmul(torch.randn(64, 64)).requires_grad_()
    # threads and modules are there before the limit
    out = normalnorm.LayerNormalNorm(64)(x)
    torch.autograd.grad(out, x, torch.ones_like(out))
    n = 2_000_000
    refused = 0
    for make, shape in (
        (lambda: normalnorm.LayerNormalNorm(n), (1, n)),
        (lambda: normalnorm.BatchNormalNorm1d(1), (n, 1)),
        (lambda: normalnorm.BatchNormalNorm2d(2), (2, 2, 1, n // 4)),
        (lambda: normalnorm.BatchNormalNorm1d(n).eval(), (1, n))
    ):
        layer, u = make(), torch.randn(shape, requires_grad=True)
        grad = torch.ones(shape)
        for step in ("forward", "backward"):
            buffers = [b.clone() for b in layer.buffers()]
            out = layer(u) if step == "backward" else None
            if step == "backward":
                buffers = [b.clone() for b in layer.buffers()]
            for room in (10_000_000, 19_000_000, 30_000_000, 60_000_000):
                limit(room)
                try:
                    found = (layer(u.detach()) if step == "forward"
                             else torch.autograd.grad(
                                 out, u, grad, retain_graph=True))
                except (RuntimeError, MemoryError) as error:
                    # the second is Python's own
                    limit(0)
                    assert (isinstance(error, MemoryError)
                            or "allocate" in str(error)), error
                    refused += "native kernel could not allocate" in str(error)
                    own = [b for name, b in layer.named_buffers()
                           if "tracked" not in name]
                    assert all(torch.equal(a, b) for a, b in zip(own, [
                                   b for (name, _), b in zip(
                                       layer.named_buffers(), buffers)
                                   if "tracked" not in name])), "moved"
                else:
                    limit(0)
                    break
            layer.zero_grad()
        assert torch.isfinite(layer(u.detach())).all()
    print("refused", refused)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="limits the address space as Linux does",
)
def test_out_of_memory():
    """With little memory left: an exception, no crash; no running average has
    moved; and the next call works.
    """
    said = python(MEMORY, 2, MALLOC_ARENA_MAX="1", OMP_NUM_THREADS="2")
    # how often memory was refused depends on what the process has mapped before
    assert int(said.split()[-1]) >= 2, said


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(),
    reason="no list of the files that a process has mapped",
)
def test_nothing_is_thrown_across_c():
    "The compiled kernel does not call `operator new`, nor throw."
    # a file that was loaded when it had just been compiled has another name by
    # now
    native.library()
    mapped = {
        row.split(maxsplit=5)[-1]
        for row in Path("/proc/self/maps").read_text().splitlines()
        if re.search(r"/native-[^/]*\.so$", row)
    }
    assert mapped
    for file in mapped:
        assert not {
            symbol
            for symbol in (
                b"_Znwm",
                b"_Znam",
                b"__cxa_throw",
                b"__cxa_allocate_exception",
            )
            if symbol in Path(file).read_bytes()
        }


@pytest.mark.parametrize(
    "lmbda",
    [-1.1, -1.0, -0.3, 0.0, 1e-3, 0.5, 0.99, 1.7, 2.0, 2.7, 3.0, 3.1, 8.0],
)
def test_by_pieces(lmbda):
    """The table of polynomials keeps its bound, at the borders of its pieces
    and among the neighbours of the worst too.

    Values beyond it, NaN and infinity go by the logarithm, and so does
    everything where there is no table or |η| > 3, with the bound of that
    way."""
    by_table = native.way().tables and -1 <= lmbda <= 3
    most, one = native.bounds(native.way()), torch.tensor(lmbda)
    # at 2.7, 4.4 where the roundings of coefficients are not handed on
    limit = 3.5 if lmbda == 2.7 else most.table
    borders = torch.cat(
        [2.0**o * (1 + torch.arange(4) / 4) - 1 for o in range(4)]
    )
    h = torch.cat(
        [
            torch.randn(4000).abs(),
            torch.logspace(-30, 1.2, 4000),
            borders,
            torch.nextafter(borders, torch.tensor(0.0)),
            torch.nextafter(borders, torch.tensor(9e9)),
        ]
    )

    def errors(h):
        exact, t = transformed(h, one)
        out = evaluated(h.view(1, 1, -1), lmbda).view(h.shape)
        return in_ulp(out - exact, exact).abs(), t.abs() / 2

    def over(h):
        error, part = errors(h)
        return torch.where(h.abs() < 15, error - (0 if by_table else part), 0)

    inside = h[(h < 15) & (h > 1e-29)][:, None]
    for half in (inside, -inside):
        assert searched(over, half) < (limit if by_table else most.logarithm)
    beyond = torch.linspace(14.9, 40, 600)
    error, part = errors(torch.cat([beyond, -beyond]))
    assert (error < most.logarithm + part).all()
    mixed = torch.randn(3, 1, 700)
    mixed[1, 0, 5:9] = torch.tensor([torch.nan, torch.inf, 16.5, -1e9])
    out, usual = evaluated(mixed, lmbda), mixed.abs() < 1e10
    given = statistics_from(*(x * torch.ones(1, 1, 1) for x in (0, 1, lmbda)))
    expected = core.normality_norm(mixed, (0, 2), eps=0.0, statistics=given)[0]
    torch.testing.assert_close(
        out[usual], expected[usual], rtol=3e-5, atol=1e-7
    )
    assert torch.equal(out.isfinite() | mixed.isinf(), usual | mixed.isinf())


@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.float64, {}),
        (torch.float32, {"safeguard": True}),
        (torch.float32, {"steps": 2}),
    ],
)
def test_what_is_left_to_the_definition(dtype, options):
    u = torch.randn(8, 3, dtype=dtype)
    found, expected = (
        f(u, (0,), **options)[0] for f in (normality_norm, core.normality_norm)
    )
    assert torch.equal(found, expected)
    assert normality_norm(u[:0], (1,))[0].shape == (0, 3)


def random_case(seed):
    """A layer of the table, made anew at each call, and an input: any shape,
    layout and dtypes; some are refused. Whether it trains, what is learned, the
    number of elements of a unit, and the precision of its results.
    """
    choose = random.Random(seed)
    sizes = {
        k: choose.choice([1, 2, 3, 4, 5, 7, 8, 16, 17]) for k in rows.SIZES
    }
    trial = choose.choice(
        [
            t
            for t in rows.trials(sizes)
            if t.row.layer.__name__.startswith(COVERED)
        ]
    )
    dtype = choose.choice(
        [torch.float32] * 4 + [torch.bfloat16, torch.float16, torch.float64]
    )
    groups = [d for d in range(1, trial.channels + 1) if not trial.channels % d]
    options = dict(
        noise=choose.choice([0.0, 0.3]),
        noise_kind=choose.choice(["scaled", "unscaled", "dropout"]),
        alpha=choose.choice([1.0, 0.0, 0.5]),
        eps=choose.choice([1e-5, 0.0, 1e-2]),
        affine=choose.random() < 0.7,
        elementwise_affine=choose.random() < 0.7,
        track_running_stats=choose.random() < 0.7,
        momentum=choose.choice([0.1, 1.0, 0.0, None]),
        num_groups=choose.choice(groups),
        dtype=dtype
        if dtype == torch.float64
        else choose.choice([dtype, torch.float32]),
    )
    size = dict(zip(trial.kind.split(), trial.shape)) | {
        "G": options["num_groups"]
    }
    unit = trial.kind[:-1] if "…" in trial.row.unit else trial.row.unit
    units = math.prod(size[letter] for letter in unit.split())
    u = torch.randn(trial.shape, generator=torch.Generator().manual_seed(seed))
    u = FORMATS[choose.choice([*FORMATS])](u.exp().to(dtype))
    usual = 1e-12 if dtype == torch.float64 else 3e-4
    return (
        lambda: trial.ours(**options),
        u,
        choose.random() < 0.7,
        choose.choice(["all", "input", "parameters", "nothing"]),
        u.numel() // units,
        max(
            usual, *(4 * torch.finfo(d).eps for d in (dtype, options["dtype"]))
        ),
    )


def test_random_layers(monkeypatch):
    "What nobody thought of: 400 random cases by both backends."
    calls, forward = [], native.forward
    monkeypatch.setattr(
        native,
        "forward",
        lambda *args, **options: calls.append(1) or forward(*args, **options),
    )

    def outcome(seed, backend):
        make, base, training, wanted, elements, _ = random_case(seed)
        torch.manual_seed(seed)
        layer = make().train(training)
        u = base.detach().requires_grad_(wanted in ("all", "input"))
        for parameter in layer.parameters():
            torch.nn.init.uniform_(parameter, 0.5, 1.5).requires_grad_(
                wanted in ("all", "parameters")
            )
        if getattr(layer, "running_lambda", None) is not None:
            layer.running_lambda.uniform_(0.2, 1.7)
        leaves = [t for t in (u, *layer.parameters()) if t.requires_grad]
        with set_backend(backend):
            try:
                out = layer(u)
            except ValueError as error:
                return str(error)
            found = [out.detach(), *layer.buffers(), torch.rand(1)]
            # of two or three values next to no gradient is left
            if leaves and elements > 3:
                torch.manual_seed(3)
                grad = torch.randn(out.shape).to(out.dtype)
                found += torch.autograd.grad(out, leaves, grad)
        return found

    for seed in range(400):
        found, expected = (outcome(seed, b) for b in ("native", "eager"))
        precision = random_case(seed)[-1]
        if isinstance(expected, str):
            assert found == expected, seed
            continue
        for f, e in zip(found, expected, strict=True):
            assert f.dtype == e.dtype and f.shape == e.shape, seed
            if e.isnan().any():
                assert torch.equal(f.isnan(), e.isnan()), seed
            elif e.numel():
                error = (f.double() - e.double()).abs().max()
                largest = e.double().abs().max().clamp(min=0.1)
                assert error <= precision * largest, seed
    assert len(calls) > 200


def newton_and_condition(x):
    """λ̂ = 1 − first/second of each row in float64, and how much of an error of
    its terms arrives: where each term of these sums, which cancel, has a
    relative error of c, that of λ̂ is at most c times (Σ|terms of first| +
    |first/second| Σ|terms of second|)/second."""
    k = (x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True)
    a, log = k.abs(), k.abs().log1p().copysign(k)
    q = (1 + a) * log.abs()
    d = q - a
    mean_d, mean_dd, mean_kd, mean_q = (
        v.mean(1) for v in (d, d * d, k * d, q * log.abs())
    )
    first, second = (
        mean_kd - log.mean(1),
        1 - mean_q + mean_d**2 + 2 * (mean_dd - mean_d**2 - mean_kd**2),
    )
    terms = (
        (k * d).abs().mean(1)
        + log.abs().mean(1)
        + (first / second).abs()
        * (1 + mean_q + 3 * mean_d**2 + 2 * mean_dd + 2 * mean_kd**2)
    )
    return 1 - first / second, terms / second


@pytest.mark.parametrize("n", [20, 150, 1000])
@pytest.mark.parametrize("kind", ["normal", "lognormal", "cubed"])
def test_error_of_lambda(kind, n):
    """Terms are off by less than 8 units of 2⁻²⁴, in the kernel and in the
    definition, and their errors have both signs.
    """
    z = torch.randn(400, n, generator=torch.Generator().manual_seed(3))
    u = {"normal": z, "lognormal": z.exp(), "cubed": z**3}[kind]
    lmbda, condition = newton_and_condition(u.double())
    for function in (normality_norm, core.normality_norm):
        error = (
            (function(u, (1,))[1].lmbda[:, 0].double() - lmbda)
            / condition
            / UNIT
        )
        assert error.abs().max() < 8 and error.mean().abs() < 0.6


def test_averages_that_the_kernel_does_not_move():
    """In half precision, in a part of a larger tensor, made in inference mode;
    and without a mean or a λ.
    """
    u, fresh = torch.randn(32, 3).exp(), lambda: [torch.zeros(3), torch.ones(3)]
    moved = lambda *running: (
        batch_normal_norm(u, *running, training=True, noise=0.0) is None
        or running
    )
    start = lambda: [*fresh(), torch.ones(3)]
    reference = moved(*start())
    with torch.inference_mode():
        made = moved(*start())
    half = moved(*(r.half() for r in start()))
    wide = moved(*torch.stack([t.repeat(2) for t in start()])[:, ::2])
    for running, tolerance in ((made, 1e-6), (half, 1e-3), (wide, 1e-6)):
        torch.testing.assert_close(
            [r.float() for r in running],
            list(reference),
            rtol=tolerance,
            atol=tolerance,
        )
    for missing in range(3):
        running = moved(
            *(None if k == missing else r for k, r in enumerate(start()))
        )
        for mine, r in zip(running, reference):
            assert mine is None or torch.equal(mine, r)


def test_averages_written_by_the_kernel_are_seen_to_change():
    """A graph that needs the old averages must not take the new ones: an error
    where they were given to a function, which does not copy them.
    """
    u = torch.randn(8, 3, requires_grad=True)
    averages = torch.zeros(3), torch.ones(3), torch.full((3,), 0.7)
    statistics = statistics_from(*(a[None] for a in averages))
    out = normality_norm(u, (0,), statistics=statistics)[0]
    batch_normal_norm(u.detach(), *averages, training=True, noise=0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_kernel_asks_the_tensors():
    "Shape, strides, dtype, storage: one thing wrong, and nothing is written."
    u, weight = torch.randn(4, 3, 5, 6), torch.ones(3)
    running = [torch.zeros(3) for _ in range(3)]
    call = native.prepare(u, (0, 2, 3), weight, weight, Rule(), 1)

    def ask(x=u, weight=weight, running=running):
        return native.forward(
            call, x, weight, torch.ones(3), running=running, momentum=0.5
        )

    numbers = ask()[1]
    before, short = [r.clone() for r in running], u.clone()
    short.untyped_storage().resize_(4 * u.numel() - 1)
    last = u.contiguous(memory_format=torch.channels_last)
    for wrong in (
        last,
        u.double(),
        u[:3],
        u.view(-1),
        u[..., :5],
        u[:, :1].expand(4, 3, 5, 6),
        u.transpose(2, 3),
        u.to("meta"),
    ):
        with pytest.raises(native.Different):
            ask(wrong)
    later = torch.randn(u.numel() + 1)[1:].view(u.shape)
    later.untyped_storage().resize_(4 * u.numel())
    for cut in (short, later):
        with pytest.raises(RuntimeError, match="not there"):
            ask(cut)
    for wrong in (
        torch.zeros(4),
        torch.zeros(3).double(),
        torch.zeros(6)[::2],
        torch.zeros(1).expand(3),
        torch.zeros(3, 1),
    ):
        for place in range(3):
            with pytest.raises(native.Different):
                ask(running=[*running[:place], wrong, *running[place + 1 :]])
        with pytest.raises(native.Different):
            ask(weight=wrong)
    assert all(map(torch.equal, running, before))
    # where channels come last; what is given otherwise is brought into form
    of_last = native.prepare(last, (0, 2, 3), None, None, Rule(), 1)
    outs = [native.forward(of_last, x)[0] for x in (last, u)]
    assert torch.equal(*outs)
    for wrong in (last[:3], last[..., :5], last[:, :2], last.transpose(2, 3)):
        with pytest.raises(native.Different):
            native.forward(of_last, wrong)
    short = last.clone()
    short.untyped_storage().resize_(4 * u.numel() - 1)
    with pytest.raises(RuntimeError, match="not there"):
        native.forward(of_last, short)
    # a part of a larger storage is right
    ask(torch.randn(361)[1:].view(u.shape))
    # a backward pass brings into form what it finds
    grad = torch.randn_like(u)
    expected = native.backward(call, grad, (u, weight, numbers))
    with pytest.raises(native.Different):
        native.backward(call, grad[:3], (u, weight, numbers))
    for x in (last, -torch._neg_view(u), torch._neg_view(-u)):
        found = native.backward(call, grad, (x, weight, numbers))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "table, job",
    [
        ("_JOB", "Job"),
        ("_PROXY_JOB", "ProxyJob"),
        ("_GROUPED_JOB", "GroupedJob"),
    ],
)
def test_each_field_of_a_job_is_compared(monkeypatch, table, job):
    """Left out of Python's table, in another place or of another kind: with
    each field and each pair of neighbours, there is no kernel.
    """
    groups = getattr(native, table)
    for number, group in enumerate(groups):
        fields = list(group.items())
        others = [fields[:i] + fields[i + 1 :] for i in range(len(fields))]
        others += [
            fields[:i] + fields[i : i + 2][::-1] + fields[i + 2 :]
            for i in range(len(fields) - 1)
        ]
        others += [
            fields[:i] + [(name, other)] + fields[i + 1 :]
            for i, (name, kind) in enumerate(fields)
            for other in native._LETTERS
            if other != kind
        ]
        others.append([*fields, ("more", "double")])
        for other in map(dict, others):
            monkeypatch.setattr(
                native, table, (*groups[:number], other, *groups[number + 1 :])
            )
            error = native._library.__wrapped__()
            assert isinstance(error, native.CompilerError) and re.match(
                rf"{job}\.\w+: Python packs .*; the compiled kernel has ",
                str(error),
            ), (other, error)
    monkeypatch.undo()
    assert native.bound(native.library())


def test_a_kernel_that_keeps_other_numbers(monkeypatch):
    monkeypatch.setattr(native, "KEPT", 10)
    with pytest.raises(
        native.CompilerError, match="keeps 9 numbers of a unit, where .* for 10"
    ):
        native.bound(native.library())


@pytest.mark.skipif(not native.available(), reason="no compiler")
@pytest.mark.parametrize("seed", [0, 5, -1, -(2**63), 2**63 - 1])
def test_every_seed_of_64_bits_is_told_apart(seed):
    "The definition's noise for each; 0 where none is given."
    u, rule = torch.randn(40, 6), Rule(noise=0.7)
    call = native.prepare(u, (0,), None, None, rule)
    expected = core.normality_norm(u, (0,), noise=0.7, seed=torch.tensor(seed))
    found = native.forward(call, u, seed=seed)[0]
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
    if seed == 0:
        assert torch.equal(native.forward(call, u)[0], found)
