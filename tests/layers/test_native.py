"""The native kernel against float64 and against the definition: layouts, and
faults of the input.
"""

import copy
import ctypes.util
import math
import os
import random
import re
import struct
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import normalnorm
from normalnorm.layers import core, proxy
from normalnorm.layers.backends import get_backend, normality_norm, set_backend
from normalnorm.layers.core import Rule, Statistics
from normalnorm.layers.engines import compiler, native
from normalnorm.layers.functional import batch_normal_norm
from normalnorm.layers.noise import normal_noise
from normalnorm.theory.newton import newton_lambda
from normalnorm.theory.power_transform import power_transform_derivative
from tools import processors

ROOT = Path(normalnorm.__file__).parents[1]
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
    torch.manual_seed(0)
    u = torch.randn(shape).exp()
    assert (
        native.prepare(
            u,
            dim,
            *([None] * 2 if weight is None else [torch.ones(weight)] * 2),
            Rule.of(**options),
        )
        is not None
    )
    found, reference = (
        derivatives(normality_norm, u, dim, weight, **options),
        derivatives(
            core.normality_norm, u, dim, weight, torch.float64, **options
        ),
    )
    # h is ±1 but for ε, so next to no gradient is left
    if case == "two values":
        found, reference = found[:-1], reference[:-1]
    assert far(found, reference) < 2e-5


@pytest.mark.parametrize("scale", [1e-15, 1e-4, 1e3, 1e17])
def test_any_scale(scale):
    torch.manual_seed(0)
    u = torch.randn(16, 3, 5, 5).exp() * scale
    found, reference = (
        derivatives(f, u, (0, 2, 3), COLUMN, dtype)
        for f, dtype in (
            (normality_norm, None),
            (core.normality_norm, torch.float64),
        )
    )
    for f, r in zip(found, reference):
        assert (f - r).abs().max() <= 1e-5 * r.abs().max()


def test_mean_far_from_zero():
    """Mean 1e4, deviation 1: as good as the same values without the mean, up to
    the rounding of the input.
    """
    torch.manual_seed(0)
    u = torch.randn(4096, 3).exp() + 1e4
    out, native_layer = (
        normality_norm(u, (0,), alpha=0.0)[0],
        torch.nn.functional.batch_norm(u, None, None, training=True),
    )
    exact = core.normality_norm(u.double(), (0,), alpha=0.0)[0]
    assert (out - exact).abs().max() <= (
        native_layer - exact
    ).abs().max() + 1e-6 and (out - exact).abs().max() < 1e-5


@pytest.mark.parametrize(
    "layout",
    ["channels last", "transposed", "every second", "misaligned", "expanded"],
)
def test_layouts(layout):
    """Any strides: the same numbers as for a contiguous copy; channels-last
    output for channels-last input.
    """
    torch.manual_seed(0)
    base = torch.randn(8, 3, 10, 14).exp()
    u = {
        "channels last": base.to(memory_format=torch.channels_last),
        "transposed": base.transpose(2, 3),
        "every second": base[:, :, ::2, ::2],
        "misaligned": base.flatten()[3 : 3 + 8 * 3 * 9].view(8, 3, 3, 3),
        "expanded": base[:1].expand(4, 3, 10, 14),
    }[layout]
    for dim, shape in (
        ((0, 2, 3), COLUMN),
        ((2, 3), COLUMN),
        ((1, 2, 3), u.shape[1:]),
    ):
        found, reference = (
            derivatives(normality_norm, x, dim, shape, noise=0.4)
            for x in (u, u.contiguous())
        )
        assert far(found, [r.double() for r in reference]) < 1e-5
        assert (
            found[0].is_contiguous(memory_format=torch.channels_last)
            or layout != "channels last"
        )
        assert found[4].shape == u.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half(dtype):
    torch.manual_seed(0)
    u = torch.randn(8, 3, 5, 7).exp().to(dtype)
    for shape in (COLUMN, None):
        found, reference = (
            derivatives(f, x, (0, 2, 3), shape, d)
            for f, x, d in (
                (normality_norm, u, None),
                (core.normality_norm, u.float(), torch.float64),
            )
        )
        assert (
            found[0].dtype == dtype
            and found[4].dtype == dtype
            and found[1].dtype == torch.float32
        )
        assert (
            far([found[0], found[4]], [reference[0], reference[4]])
            < 4 * torch.finfo(dtype).eps
        )


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
    torch.manual_seed(0)
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
                *(native._triple(statistics) if given else (numbers,)),
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
    torch.manual_seed(0)
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


def test_same_bits():
    "For one seed, whatever the number of threads."
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    try:
        for shape, dim, weight in (
            (CASES["batch"]),
            ((300, 17), (1,), (17,)),
            ((300, 17), (0,), (17,)),
        ):
            u = torch.randn(shape)
            found = []
            for n in (1, 2, 3, 1):
                torch.set_num_threads(n)
                found.append(
                    derivatives(normality_norm, u, dim, weight, noise=0.4)
                )
            assert all(
                torch.equal(a, b)
                for other in found[1:]
                for a, b in zip(found[0], other)
            )
    finally:
        torch.set_num_threads(threads)


def test_noise_of_any_index():
    """The generator's numbers, from any first index, 2³² and beyond included;
    in a layer too.
    """
    import ctypes

    key = 987654321987654321
    for start in (
        0,
        1,
        2,
        3,
        5,
        2**31 - 3,
        2**32 - 2,
        2**34 - 8,
        2**34 + 1,
        2**35,
        2**40,
    ):
        for count in (1, 3, 63, 64, 65, 517, 1500):
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
    # of 2³¹ words the smallest: the largest numbers, and no logarithm of 0
    for counter, place, word in ((1_201_279_956, 2, 0), (1_836_782_499, 0, 1)):
        z = torch.empty(2)
        native.library().normalnorm_normals(
            ctypes.c_uint64(4 * counter + place),
            ctypes.c_int64(2),
            ctypes.c_uint64(5),
            ctypes.c_void_p(z.data_ptr()),
        )
        assert z.square().sum().sqrt().item() == pytest.approx(
            math.sqrt(-2 * math.log((word + 0.5) * 2.0**-32)), rel=1e-6
        )
        torch.testing.assert_close(
            z,
            normal_noise((2,), torch.tensor(5), 4 * counter + place),
            rtol=2e-6,
            atol=2e-6,
        )
    seed = torch.tensor(5)  # counters have 32 bits below element 2³⁴
    for shape, dim in (
        ((64, 8), (0,)),
        ((64, 8), (1,)),
        ((7, 4, 8), (0, 2)),
        ((7, 4, 80), (0, 2)),
        ((3, 4, 400), (0, 2)),
    ):
        u, offsets = (
            torch.randn(shape),
            (
                2**33 + 4,
                2**33 + 6,
                2**34 - 64,
                2**34 + 4,
                2**35,
                2**35 + 8,
                2**36 + 4,
            ),
        )
        whole, again = (
            [
                f(u, dim, noise=0.5, seed=seed, offset=offset)[0]
                for offset in offsets
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
        kinds=small.kinds.replace(
            struct.pack("4q", 2, 0, 2, 64), struct.pack("4q", 2, 0, 2, half)
        ),
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


def test_units_that_are_not_finite():
    """A NaN, an infinity or an overflow spoils its own unit, forward and
    backward, and no other; as the definition.
    """
    for bad in (torch.nan, torch.inf, 1e38):
        torch.manual_seed(0)
        u = torch.randn(8, 5)
        u[2, 3], u[4, 3] = bad, -bad
        found, reference = (
            derivatives(f, u, (0,), (5,), noise=0.4)
            for f in (normality_norm, core.normality_norm)
        )
        for i in (0, 4, 5, 6):
            column = (
                found[i]
                if found[i].ndim == 1
                else found[i][0]
                if i
                else found[i].isfinite().all(0)
            )
            assert (
                i not in (0, 4)
                or (
                    found[i].isfinite().all(0)
                    == torch.tensor([True, True, True, False, True])
                ).all()
            ), column
        for f, r in zip(found, reference):
            assert torch.equal(f.isfinite(), r.isfinite())
        torch.testing.assert_close(found[0][:, :3], reference[0][:, :3])


def test_constant_units_and_tiny_ones():
    "A constant unit gives exactly the bias; two values; denormals."
    u = torch.full((16, 3), 7.25, requires_grad=True)
    bias = torch.tensor([0.1, -2.0, 3.0])
    out, used = normality_norm(u, (0,), torch.ones(3), bias, noise=0.5)
    assert torch.equal(out, bias.expand(16, 3)) and torch.equal(
        used.lmbda, torch.ones(1, 3)
    )
    (grad,) = torch.autograd.grad(out.sum(), u)
    assert torch.equal(grad, torch.zeros_like(grad))
    tiny = torch.randn(8, 3) * 1e-41
    assert normality_norm(tiny, (0,))[0].isfinite().all()
    assert torch.equal(
        normality_norm(torch.zeros(4, 2), (0,), eps=0.0)[0], torch.zeros(4, 2)
    )


def test_identity_at_one():
    """A symmetric unit has λ̂ = 1, and its values are those of the plain
    normalizer to the last bit; so in evaluation.
    """
    u = torch.linspace(-1, 1, 64)[:, None].repeat(1, 2)
    out, used = normality_norm(u, (0,))
    one = used.lmbda.flatten() == 1
    given = Statistics(
        torch.zeros(1, 2), torch.full((1, 2), 0.5), (torch.ones(1, 2),)
    )
    assert torch.equal(
        normality_norm(u, (0,), statistics=given)[0],
        normality_norm(u, (0,), statistics=given._replace(parameters=()))[0],
    )
    if one.any():
        assert torch.equal(
            out[:, one], normality_norm(u, (0,), alpha=0.0)[0][:, one]
        )


@pytest.mark.parametrize(
    "shape", [(8, 3, 5, 7), (32, 37), (4, 6, 9), (2, 3, 1, 1)]
)
def test_given_statistics(shape):
    torch.manual_seed(0)
    per_channel = (1, shape[1], *(1,) * (len(shape) - 2))
    statistics = statistics_from(
        torch.randn(per_channel),
        torch.rand(per_channel) + 0.1,
        torch.rand(per_channel) * 6 - 2,
    )
    u, (weight, bias) = torch.randn(shape) * 3, torch.randn(2, *per_channel)
    exact = core.normality_norm(
        u.double(),
        (0,),
        weight.double(),
        bias.double(),
        statistics=statistics_from(*(s.double() for s in values(statistics))),
    )[0]
    for x in (
        (u, u.to(memory_format=torch.channels_last))
        if len(shape) == 4
        else (u,)
    ):
        call = native.prepare(
            x, (0,), weight, bias, Rule(), statistics=statistics
        )
        out, _ = native.forward(call, x, weight, bias, statistics=statistics)
        assert out.stride() == torch.empty_like(x).stride()
        torch.testing.assert_close(out, exact.float(), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(
            normality_norm(x, (0,), weight, bias, statistics=statistics)[0], out
        )
    if statistics.lmbda.numel() > 1:
        assert (
            native.prepare(
                u,
                (0,),
                None,
                None,
                Rule(),
                statistics=statistics._replace(var=statistics.var[:, :1]),
            )
            is None
        )


@pytest.mark.parametrize(
    "shape", [(8, 3, 5, 7), (32, 37), (4, 6, 9), (40, 3, 16, 16)]
)
def test_gradient_for_given_statistics(shape):
    """A frozen layer: first derivatives by the kernel, for λ = 1, far values
    and values that `representable` moves too; second derivatives by the
    definition.
    """
    torch.manual_seed(0)
    per_channel = (1, shape[1], *(1,) * (len(shape) - 2))
    statistics = statistics_from(
        torch.randn(per_channel),
        torch.rand(per_channel) + 0.1,
        torch.rand(per_channel) * 4 - 1,
    )
    statistics.lmbda[:, 0] = 1
    for scale in (1.0, 1e4, 1e25):
        leaves = [
            torch.randn(shape) * scale,
            torch.randn(per_channel),
            torch.randn(per_channel),
        ]
        grad, found = torch.randn(shape), []
        for function, dtype in (
            (normality_norm, torch.float32),
            (core.normality_norm, torch.float64),
        ):
            for memory in (
                (torch.contiguous_format, torch.channels_last)
                if len(shape) == 4 and dtype == torch.float32
                else (torch.contiguous_format,)
            ):
                u, weight, bias = (t.to(dtype).requires_grad_() for t in leaves)
                out = function(
                    u.to(memory_format=memory),
                    (0,),
                    weight,
                    bias,
                    statistics=statistics_from(
                        *(t.to(dtype) for t in values(statistics))
                    ),
                )[0]
                found.append(
                    [
                        g.double()
                        for g in torch.autograd.grad(
                            out, (u, weight, bias), grad.to(dtype)
                        )
                    ]
                )
        *mine, exact = found
        for of_u, of_weight, of_bias in mine:
            torch.testing.assert_close(of_bias, exact[2], rtol=1e-5, atol=1e-4)
            if scale < 1e20:
                torch.testing.assert_close(of_u, exact[0], rtol=5e-5, atol=1e-7)
                assert (
                    (of_weight - exact[1]).abs() <= 1e-5 * exact[1].abs().max()
                ).all()
            else:  # 0 where the value was moved, else as the definition
                with set_backend("eager"):
                    u = leaves[0].clone().requires_grad_()
                    (of_eager,) = torch.autograd.grad(
                        normality_norm(
                            u, (0,), leaves[1], leaves[2], statistics=statistics
                        )[0],
                        u,
                        grad,
                    )
                torch.testing.assert_close(
                    of_u.float(), of_eager, rtol=1e-4, atol=1e-37
                )
    u = torch.randn(shape, requires_grad=True)
    (first,) = torch.autograd.grad(
        normality_norm(u, (0,), leaves[1], None, statistics=statistics)[0]
        .square()
        .sum(),
        u,
        create_graph=True,
    )
    (second,) = torch.autograd.grad(first.square().sum(), u)
    with set_backend("eager"):
        (expected,) = torch.autograd.grad(
            normality_norm(u, (0,), leaves[1], None, statistics=statistics)[0]
            .square()
            .sum(),
            u,
            create_graph=True,
        )
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            second,
            torch.autograd.grad(expected.square().sum(), u)[0],
            rtol=1e-3,
            atol=1e-3,
        )
    # a derivative that the kernel does not have
    var = statistics.var.clone().requires_grad_()
    assert (
        torch.autograd.grad(
            normality_norm(u, (0,), statistics=statistics._replace(var=var))[
                0
            ].sum(),
            var,
        )[0]
        .abs()
        .min()
        > 0
    )


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


def by_logarithm(h, lmbda):
    """The kernel's transform of the columns of a matrix, each with a λ of its
    own: by logarithm and exponential on every processor.
    """
    given = Statistics(
        torch.zeros(1, h.shape[1]), torch.ones(1, h.shape[1]), (lmbda[None],)
    )
    return native.forward(
        native.prepare(h, (0,), None, None, Rule(eps=0.0), statistics=given),
        h,
        statistics=given,
    )[0]


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
        error = in_ulp(by_logarithm(h, lmbda) - exact, exact).abs()
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
    grad = torch.randn(64, 700, generator=generator)
    if columns:
        make = lambda: normalnorm.BatchNormalNorm1d(64, noise=0.0)
        u, grad = u.T.contiguous(), grad.T.contiguous()
    else:
        make = lambda: normalnorm.LayerNormalNorm(700, noise=0.0)
    results = []
    for dtype in (torch.float32, torch.float64):
        layer, at = make().to(dtype), u.to(dtype).requires_grad_()
        out = layer(at)
        results.append(
            [
                out,
                *torch.autograd.grad(
                    out, [at, layer.weight, layer.bias], grad.to(dtype)
                ),
            ]
        )
    unit = 0 if columns else 1
    k = u.double()
    k = (k - k.mean(unit, keepdim=True)) / k.std(
        unit, keepdim=True, correction=0
    )
    lmbda = newton_lambda(u.double(), unit)
    delta = (lmbda - 1).abs() * k.abs().amax(unit).log1p()
    beyond = (lmbda - 1).abs()
    assert (
        (delta < 0.6).sum() > 3
        and (beyond > 0.8).sum() > 3
        and ((delta > 0.8) & (beyond < 0.7)).sum() > 3
    )
    near = (delta < 0.6).unsqueeze(unit)
    for found, exact in zip(*results):
        error = (found.double() - exact).abs()
        if exact.ndim == 2:
            scale = exact.detach().abs().amax(unit, keepdim=True)
            assert (error <= torch.where(near, 8e-7, 8e-6) * scale).all()
        else:
            assert (error <= 2e-6 * exact.abs().max()).all()


def test_a_logarithm_of_its_own():
    """Where ε is a sixteenth of σ², ℓ of h is no longer near that of k: by the
    quotient the error of ℓ would be larger by up to (1−ρ)³/12, that of the
    output 1.4e-6 of the largest value instead of 2e-7."""
    torch.manual_seed(0)
    u = torch.randn(64, 700)
    u = (u - u.mean(1, keepdim=True)) / u.std(1, keepdim=True, correction=0)
    u[:, 0] += 5
    layer = normalnorm.LayerNormalNorm(700, eps=0.063, noise=0.0)
    exact = copy.deepcopy(layer).double()(u.double())
    assert (layer(u) - exact).abs().max() < 7e-7 * exact.abs().max()


def test_floor_of_tiny_values():
    """Where η = 0 is replaced by 10⁻⁹, t = 10⁻⁹h is below the normal numbers
    for |h| < 8·10⁻³⁰, and has an absolute error of half their distance:
    2⁻¹⁵⁰/(10⁻⁹ log₂e), 5·10⁻³⁷, twice that with both roundings.

    Others have no such floor."""
    h = torch.logspace(-38, -28, 2000)[:, None].expand(-1, 6).contiguous()
    lmbda = torch.tensor([0.0, 1e-10, 1e-6, 0.5, 1.5, 3.0])
    exact, _ = transformed(h, lmbda)
    error, ulp = (
        (by_logarithm(h, lmbda) - exact).abs(),
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
        bias = ((by_logarithm(h, l) / exact - 1).mean(0).abs() / UNIT).max()
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
        error = (by_logarithm(h, eta) / transformed(h, eta)[0] - 1).mean(0)
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


@pytest.mark.parametrize("lmbda", [0.0, 0.5])
def test_identity_among_others(lmbda):
    """In a matrix, a column with λ = 1 keeps its values exactly though its
    neighbours are transformed.
    """
    h = torch.randn(50, 5)
    l = torch.tensor([1.0, lmbda, 1.0, lmbda, 1.0])
    assert torch.equal(by_logarithm(h, l)[:, ::2], h[:, ::2])


@pytest.mark.parametrize("lmbda", [-12.0, -14.0, 14.0, 11.0, 30.0])
def test_large_exponents(lmbda):
    """|η| > 10, where t passes what the fast exponential covers long before ℓ
    does: up to the largest numbers, then as `representable`.
    """
    t = torch.cat([torch.linspace(1, 79, 200), torch.linspace(79, 90, 300)])
    eta = max(lmbda, 2 - lmbda)
    h = torch.copysign(torch.expm1(t / eta), torch.tensor(lmbda))[:, None]
    for u in (
        h,
        h.t()[None].contiguous(),
        h.repeat(4, 1).t()[None].contiguous(),
    ):
        given = statistics_from(
            *(torch.full((1,) * u.ndim, x) for x in (0.0, 1.0, lmbda))
        )
        out = native.forward(
            native.prepare(
                u, (0,), None, None, Rule(eps=0.0), statistics=given
            ),
            u,
            statistics=given,
        )[0].flatten()[:500]
        exact = core.normality_norm(
            h.double(),
            (0,),
            eps=0.0,
            statistics=statistics_from(
                *(torch.full((1, 1), x).double() for x in (0.0, 1.0, lmbda))
            ),
        )[0][:, 0]
        top = math.log(torch.finfo(torch.float32).max) - 0.7
        limit = math.copysign(math.expm1(top) / eta, lmbda)
        exact = torch.where(exact.abs() > abs(limit), limit, exact)
        # and h has a rounding, of which ηh/(1+h) arrives
        assert (in_ulp(out - exact, exact).abs() <= 4 + t / 2 + 2 * eta).all()


def test_tiny_variances():
    """Without ε: variances down to the smallest normal number are computed in
    double, and λ̂ is 1 below 10⁻³¹ as in the definition (in float32: a
    variance's own terms could not be represented there; in float64 the limit is
    10⁻²⁹²)."""
    torch.manual_seed(0)
    unit = torch.randn(64, 1).exp()
    for scale, constant in (
        (1e-15, False),
        (4e-16, False),
        (1e-16, False),
        (5e-17, True),
        (1e-17, True),
        (1e-18, True),
        (3e-20, True),
    ):
        u = unit * scale
        found, reference = (
            derivatives(f, u / 1, (0,), None, eps=0.0)
            for f in (normality_norm, core.normality_norm)
        )
        var = u.double().var(correction=0).item()
        assert (var < 2.0**-126 / 2.0**-23) == constant
        assert (
            (found[3].item() == 1) == (reference[3].item() == 1) == constant
        ), scale
        torch.testing.assert_close(
            found[2].double().item(), var, rtol=1e-6, atol=0
        )
        for f, r in zip(found, reference):
            assert (f - r).abs().max() <= 2e-5 * r.abs().max(), scale
    # the square in float would have an error of up to 5 %
    for s in (1.3e-22, 1.21e-20, 1.7e-20, 2.9e-20):
        u = torch.tensor([s, -s] * 32)[:, None]
        out = normality_norm(u, (0,), eps=0.0)[0]
        torch.testing.assert_close(out, u.sign(), rtol=3e-7, atol=0)


def test_outlier_at_the_border_of_the_table():
    "A large unit with one element between 15 and 17 σ."
    for value in (14.0, 14.9, 15.3, 15.9, 16.5):
        u = torch.randn(1, 20000, generator=torch.Generator().manual_seed(4))
        u[0, 0] = value * 1.0
        found, reference = (
            derivatives(f, u, (1,), None, d)
            for f, d in (
                (normality_norm, None),
                (core.normality_norm, torch.float64),
            )
        )
        for f, r in zip(found, reference):
            assert (f - r).abs().max() <= 1e-5 * r.abs().max()


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
    for lmbda in (None, -12.0, 0.0, 0.5, 1.0, 2.0, 3.0):
        for value in (torch.nan, torch.inf, -torch.inf):
            for place in ("u", "grad", "mean", "var", "weight", "bias"):
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
                both = []
                for backend in ("native", "eager"):
                    leaves = [
                        tensors[name]
                        .clone(memory_format=torch.preserve_format)
                        .requires_grad_()
                        for name in ("u", "weight", "bias")
                    ]
                    with set_backend(backend):
                        out = normality_norm(
                            leaves[0],
                            (0,),
                            *leaves[1:],
                            statistics=statistics_from(
                                tensors["mean"], tensors["var"], l
                            ),
                        )[0]
                    both.append(
                        [
                            out.detach(),
                            *torch.autograd.grad(out, leaves, tensors["grad"]),
                        ]
                    )
                for f, e in zip(*both):
                    usual = e.isfinite()
                    assert (
                        torch.equal(
                            torch.where(usual, 0, f).nan_to_num(9),
                            torch.where(usual, 0, e).nan_to_num(9),
                        )
                        and f[usual].isfinite().all()
                    ), (lmbda, value, place)
                    torch.testing.assert_close(
                        f[usual], e[usual], rtol=1e-3, atol=1e-4
                    )


@pytest.mark.parametrize("weight", [0.0, 1e-30, 1e30, 3e38, -1e-38])
def test_weights_of_any_size(weight):
    """A table holds coefficients times the weight: not where these could not be
    represented.
    """
    u, statistics = (
        torch.randn(2, 1, 600),
        statistics_from(
            torch.zeros(1, 1, 1),
            torch.ones(1, 1, 1),
            torch.full((1, 1, 1), 0.5),
        ),
    )
    w = torch.full((1, 1, 1), weight)
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
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {
        "PYTHONPATH": str(ROOT),
        "MALLOC_ARENA_MAX": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), "2"],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (
        done.returncode,
        done.stdout,
        done.stderr[-2000:],
    )
    # how often memory was refused depends on what the process has mapped before
    assert int(done.stdout.split()[-1]) >= 2, done.stdout


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
    # at 2.7, 4.4 where the roundings of coefficients are not handed on
    limit = 3.5 if lmbda == 2.7 else native.bounds(native.way()).table
    borders = torch.cat(
        [2.0**o * (1 + torch.arange(4) / 4) - 1 for o in range(4)]
    )
    h = torch.cat(
        [
            torch.randn(4000),
            torch.logspace(-30, 1.2, 4000),
            borders,
            torch.nextafter(borders, torch.tensor(0.0)),
            torch.nextafter(borders, torch.tensor(9e9)),
        ]
    )
    h = torch.cat([h, -h])
    given = Statistics(
        torch.zeros(1, 1, 1),
        torch.ones(1, 1, 1),
        (torch.full((1, 1, 1), lmbda),),
    )

    def evaluated(u):
        return native.forward(
            native.prepare(
                u, (0,), None, None, Rule(eps=0.0), statistics=given
            ),
            u,
            statistics=given,
        )[0]

    most = native.bounds(native.way())

    def over(h):
        exact, t = transformed(h, torch.tensor(lmbda))
        error = in_ulp(evaluated(h.view(1, 1, -1)).view(-1, 1) - exact, exact)
        return torch.where(
            h.abs() < 15,
            error.abs() - (0 if by_table else t.abs() / 2),
            0,
        )

    inside = h[(h.abs() < 15) & (h.abs() > 1e-29)]
    for half in (inside[inside > 0], inside[inside < 0]):
        assert searched(over, half[:, None]) < (
            limit if by_table else most.logarithm
        )
    beyond = torch.cat(
        [torch.linspace(14.9, 40, 600), -torch.linspace(14.9, 40, 600)]
    )
    exact, t = transformed(beyond, torch.tensor(lmbda))
    assert (
        in_ulp(evaluated(beyond[None, None])[0, 0] - exact, exact).abs()
        < most.logarithm + t.abs() / 2
    ).all()
    mixed = torch.randn(3, 1, 700)
    mixed[1, 0, 5:9] = torch.tensor([torch.nan, torch.inf, 16.5, -1e9])
    out, usual = evaluated(mixed), mixed.abs() < 1e10
    expected = core.normality_norm(mixed, (0, 2), eps=0.0, statistics=given)[0]
    torch.testing.assert_close(
        out[usual], expected[usual], rtol=3e-5, atol=1e-7
    )
    assert torch.equal(out.isfinite() | mixed.isinf(), usual | mixed.isinf())


def test_large_unit_with_an_outlier():
    """Beyond the table; and a first element far from the mean, or the mean far
    from the deviation.
    """
    for first, shift in ((40.0, 0.0), (1e4, 0.0), (0.0, 1e4)):
        torch.manual_seed(0)
        u = torch.randn(5, 2, 40, 40) + shift
        u[0, :, 0, 0] += first
        found, reference = (
            derivatives(f, u, (0, 2, 3), (1, 2, 1, 1), d)
            for f, d in (
                (normality_norm, None),
                (core.normality_norm, torch.float64),
            )
        )
        for f, r in zip(found, reference):
            assert (f - r).abs().max() <= (
                2e-4 if first > 100 else 2e-5
            ) * r.abs().max()


def test_evaluation_far_outside():
    """Values beyond what the fast exponential covers are computed number by
    number: as the definition, also NaN and infinity.
    """
    u = torch.tensor(
        [
            0.0,
            1.0,
            -1.0,
            1e6,
            -1e6,
            1e20,
            -1e20,
            3e38,
            -3e38,
            torch.inf,
            -torch.inf,
            torch.nan,
        ]
        * 4
    )
    for lmbda in (-3.0, 0.0, 0.5, 1.0, 2.0, 3.0, 5.0):
        given = Statistics(
            torch.zeros(1, 1), torch.ones(1, 1), (torch.full((1, 1), lmbda),)
        )
        out = native.forward(
            native.prepare(
                u[:, None], (0,), None, None, Rule(eps=0.0), statistics=given
            ),
            u[:, None],
            statistics=given,
        )[0][:, 0]
        usual = u.abs() <= 1e6
        exact = core.normality_norm(
            u[usual][:, None].double(),
            (0,),
            eps=0.0,
            statistics=statistics_from(*(s.double() for s in values(given))),
        )[0][:, 0]
        torch.testing.assert_close(out[usual], exact.float(), rtol=3e-5, atol=0)
        assert (
            out[u.isnan()].isnan().all()
            and (out[~u.isnan()].sign() == u[~u.isnan()].sign()).all()
        )
        ordered = out[u.isfinite()][u[u.isfinite()].argsort()]
        assert ordered.isfinite().all() and (ordered.diff() >= 0).all()


def test_heavy_tails():
    """λ̂ far outside [0, 2], small η, and a unit whose λ̂ leaves the fast
    exponential.
    """
    torch.manual_seed(0)
    u = torch.cat(
        [
            torch.randn(2000, 6).double().exp()
            ** torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0, 8.0]),
            -(torch.randn(2000, 2).double().exp() ** 3),
        ],
        1,
    ).float()
    found, reference = (
        derivatives(f, u, (0,), (8,), d)
        for f, d in (
            (normality_norm, None),
            (core.normality_norm, torch.float64),
        )
    )
    assert reference[3].min() < -1 and reference[3].max() > 2
    for f, r in zip(found, reference):
        assert ((f - r).abs().amax(0) <= 2e-4 * r.abs().amax(0) + 1e-6).all()


def test_choices():
    assert get_backend() == "native"
    with set_backend("eager"):
        assert get_backend() == "eager"
        with pytest.raises(RuntimeError), set_backend("compiled"):
            raise RuntimeError
        assert get_backend() == "eager"
    assert get_backend() == "native"
    with pytest.raises(ValueError, match="did you mean 'native'|native"):
        set_backend("nativ")
    assert normalnorm.set_backend is set_backend


def test_what_is_left_to_the_definition():
    u = torch.randn(8, 3)
    for dtype, options in (
        (torch.float64, {}),
        (torch.float32, {"safeguard": True}),
        (torch.float32, {"steps": 2}),
    ):
        x = u.to(dtype)
        assert torch.equal(
            normality_norm(x, (0,), **options)[0],
            core.normality_norm(x, (0,), **options)[0],
        )
    assert torch.func.vmap(lambda x: normality_norm(x, (0,))[0])(
        torch.randn(4, 8, 3)
    ).shape == (4, 8, 3)
    by_func, x = (
        torch.func.grad(lambda x: normality_norm(x, (0,))[0].pow(3).sum())(u),
        u.clone().requires_grad_(),
    )
    torch.testing.assert_close(
        by_func,
        torch.autograd.grad(normality_norm(x, (0,))[0].pow(3).sum(), x)[0],
        rtol=1e-4,
        atol=1e-4,
    )
    assert normality_norm(u[:0], (1,))[0].shape == (0, 3)


@pytest.mark.parametrize("training", [True, False])
def test_batched_gradients(training):
    """All rows of a Jacobian at once: `is_grads_batched`,
    `jacobian(vectorize=True)`, `jacrev`.
    """
    torch.manual_seed(0)
    layer = normalnorm.BatchNormalNorm1d(
        3, noise=0.0, track_running_stats=not training
    ).train(training)
    if not training:
        layer.running_lambda.fill_(0.4)
    u = torch.randn(5, 3)
    rows = torch.autograd.functional.jacobian(layer, u)
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(layer, u, vectorize=True),
        rows,
        rtol=1e-4,
        atol=1e-6,
    )
    torch.testing.assert_close(
        torch.func.jacrev(layer)(u), rows, rtol=1e-4, atol=1e-6
    )
    x, weight = u.clone().requires_grad_(), layer.weight
    grads = torch.randn(4, 5, 3)
    for together, g in zip(
        zip(
            *torch.autograd.grad(
                layer(x), (x, weight), grads, is_grads_batched=True
            )
        ),
        grads,
    ):
        for found, expected in zip(
            together, torch.autograd.grad(layer(x), (x, weight), g)
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


LAYERS = {
    "batch": (lambda **o: normalnorm.BatchNormalNorm2d(3, **o), (8, 3, 5, 7)),
    "batch of vectors": (
        lambda **o: normalnorm.BatchNormalNorm1d(3, **o),
        (16, 3),
    ),
    "instance": (
        lambda **o: normalnorm.InstanceNormalNorm2d(3, affine=True, **o),
        (4, 3, 5, 7),
    ),
    "instance with averages": (
        lambda **o: normalnorm.InstanceNormalNorm2d(
            3, affine=True, track_running_stats=True, **o
        ),
        (4, 3, 5, 7),
    ),
    "layer": (
        lambda **o: normalnorm.LayerNormalNorm((5, 7), **o),
        (4, 3, 5, 7),
    ),
    "group": (lambda **o: normalnorm.GroupNormalNorm(2, 6, **o), (4, 6, 5)),
}


def layer_results(
    name, backend, training, dtype=torch.float32, second=False, **options
):
    """Output, gradients and buffers of a layer; `second`: gradients of a
    function of its gradients instead.
    """
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, u = make(**options), torch.randn(shape).exp().requires_grad_()
    for parameter in layer.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if getattr(layer, "running_lambda", None) is not None:
        layer.running_lambda.fill_(0.6)
    layer.train(training)
    with set_backend(backend):
        torch.manual_seed(1)
        out = layer(u)
        leaves = [u, *layer.parameters()]
        grads = torch.autograd.grad(
            out.sin().sum(), leaves, create_graph=second
        )
        if second:
            grads = torch.autograd.grad(
                sum(g.square().sum() for g in grads), leaves
            )
    return [out.detach(), *grads, *(b.double() for b in layer.buffers())]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"noise": 0.0},
        {"alpha": 0.0, "noise": 0.0},
        {"noise": 0.3, "noise_kind": "dropout"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, options, training):
    """A layer's own way to the kernel: output, gradients, running averages, and
    second derivatives, as by the definition.
    """
    for second in (False, True):
        found, expected = (
            layer_results(name, backend, training, second=second, **options)
            for backend in ("native", "eager")
        )
        assert len(found) == len(expected)
        for f, e in zip(found, expected):
            assert (
                f.dtype == e.dtype
                and f.shape == e.shape
                and f.stride() == e.stride()
            )
            assert (f - e).abs().max() <= (
                2e-3 if second else 2e-5
            ) * e.abs().max().clamp(min=1e-2)


def random_case(seed):
    """A layer, made anew at each call, and an input: any shape, layout and
    dtypes; some are refused.
    """
    choose = random.Random(seed)
    ndim = choose.choice([2, 3, 4, 5])
    shape = [choose.choice([1, 2, 3, 4, 5, 7, 8, 16, 17]) for _ in range(ndim)]
    dtype = choose.choice(
        [torch.float32] * 4 + [torch.bfloat16, torch.float16, torch.float64]
    )
    options = dict(
        noise=choose.choice([0.0, 0.3]),
        noise_kind=choose.choice(["scaled", "unscaled", "dropout"]),
        alpha=choose.choice([1.0, 0.0, 0.5]),
        eps=choose.choice([1e-5, 0.0, 1e-2]),
        dtype=choose.choice([dtype, torch.float32])
        if dtype != torch.float64
        else dtype,
    )
    affine, track, momentum = (
        choose.random() < 0.7,
        choose.random() < 0.7,
        choose.choice([0.1, None]),
    )
    axes, groups = (
        choose.randrange(1, ndim),
        choose.choice([d for d in range(1, shape[1] + 1) if shape[1] % d == 0]),
    )
    kind = choose.choice(
        ["Batch", "Instance", "Layer", "Group"]
        if ndim > 2
        else ["Batch", "Layer", "Group"]
    )
    layout = choose.choice(
        [
            "contiguous",
            "contiguous",
            "channels last",
            "transposed",
            "every second",
        ]
    )
    training, wanted = (
        choose.random() < 0.7,
        choose.choice(["all", "input", "parameters", "nothing"]),
    )
    elements = {
        "Batch": shape[:1] + shape[2:],
        "Instance": shape[2:],
        "Layer": shape[-axes:],
        "Group": [shape[1] // groups, *shape[2:]],
    }[kind]

    def layer():
        if kind == "Layer":
            return normalnorm.LayerNormalNorm(
                shape[-axes:], elementwise_affine=affine, **options
            )
        if kind == "Group":
            return normalnorm.GroupNormalNorm(
                groups, shape[1], affine=affine, **options
            )
        cls = getattr(normalnorm, f"{kind}NormalNorm{max(ndim - 2, 1)}d")
        return cls(
            shape[1],
            affine=affine,
            track_running_stats=track,
            **({"momentum": momentum} if kind == "Batch" else {}),
            **options,
        )

    u = (
        torch.randn(
            shape[:-1] + [2 * shape[-1]]
            if layout == "every second"
            else shape[:-2] + shape[:-3:-1]
            if layout == "transposed" and ndim > 2
            else shape,
            generator=torch.Generator().manual_seed(seed),
        )
        .exp()
        .to(dtype)
    )
    if layout == "every second":
        u = u[..., ::2]
    elif layout == "transposed" and ndim > 2:
        u = u.transpose(-1, -2)
    elif layout == "channels last" and ndim > 3:
        u = u.to(
            memory_format=torch.channels_last
            if ndim == 4
            else torch.channels_last_3d
        )
    precision = max(
        1e-12 if dtype == torch.float64 else 3e-4,
        *(
            4 * torch.finfo(d).eps
            for d in (dtype, options["dtype"])
            if d.itemsize == 2
        ),
        0,
    )
    return layer, u, training, wanted, math.prod(elements), precision


def test_random_layers(monkeypatch):
    "What nobody thought of: 400 random cases by both backends."
    calls, forward = [], native.forward
    monkeypatch.setattr(
        native,
        "forward",
        lambda *args, **options: calls.append(1) or forward(*args, **options),
    )
    for seed in range(400):
        make, base, training, wanted, elements, precision = random_case(seed)
        both = []
        for backend in ("native", "eager"):
            torch.manual_seed(seed)
            layer, u = (
                make().train(training),
                base.detach().requires_grad_(wanted in ("all", "input")),
            )
            for parameter in layer.parameters():
                torch.nn.init.uniform_(parameter, 0.5, 1.5).requires_grad_(
                    wanted in ("all", "parameters")
                )
            if getattr(layer, "running_lambda", None) is not None:
                layer.running_lambda.uniform_(0.2, 1.7)
            with set_backend(backend):
                try:
                    out = layer(u)
                except ValueError as error:
                    both.append(str(error))
                    continue
                leaves = [
                    t for t in (u, *layer.parameters()) if t.requires_grad
                ]
                grad = torch.randn(
                    out.shape, generator=torch.Generator().manual_seed(3)
                ).to(out.dtype)
                grads = torch.autograd.grad(out, leaves, grad) if leaves else []
            # of two or three values next to no gradient is left
            both.append(
                [
                    out.detach(),
                    *layer.buffers(),
                    torch.rand(1),
                    *(grads if elements > 3 else []),
                ]
            )
        found, expected = both
        if isinstance(expected, str):
            assert found == expected, seed
            continue
        assert len(found) == len(expected)
        for f, e in zip(found, expected):
            assert f.dtype == e.dtype and f.shape == e.shape, seed
            same = (
                (f.double() - e.double()).abs().max()
                <= precision * e.double().abs().max().clamp(min=0.1)
                if e.numel()
                else True
            )
            assert (
                same or torch.equal(f.isnan(), e.isnan()) and e.isnan().any()
            ), (seed, make())
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


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
def test_running_averages(momentum):
    """Moved by the kernel: a channel that is not finite stays as it was, all
    three averages of it; without a momentum, where all channels share one
    number of batches, all do.
    """
    layers = [
        normalnorm.BatchNormalNorm2d(4, momentum=momentum, noise=0.0)
        for _ in range(2)
    ]
    means, variances, lambdas, errors = (
        torch.full((2,), x, dtype=torch.float64) for x in (0.0, 1.0, 1.0, 0.0)
    )
    for batch in range(3):
        torch.manual_seed(batch)
        u = torch.randn(6, 4, 5, 5).exp()
        u[0, 1, 0, 0], u[1, 2, 3, 3] = torch.nan, 1e30
        for layer, backend in zip(layers, ("native", "eager")):
            with set_backend(backend):
                layer(u)
        # the channels that are finite
        x = u[:, ::3].double().transpose(0, 1).flatten(1)
        lmbda, condition = newton_and_condition(x)
        share = momentum or 0.0
        for average, value in (
            (means, x.mean(1)),
            (variances, x.var(1)),
            (lambdas, lmbda),
            (errors, 8 * UNIT * condition),
        ):
            average += share * (value - average)
    for layer in layers:
        torch.testing.assert_close(
            layer.running_mean[::3].double(), means, rtol=2e-6, atol=1e-7
        )
        torch.testing.assert_close(
            layer.running_var[::3].double(), variances, rtol=2e-6, atol=1e-7
        )
        assert (
            (layer.running_lambda[::3].double() - lambdas).abs()
            <= errors + 4 * UNIT * (1 + lambdas.abs())
        ).all()
        for average, start in (
            (layer.running_mean, 0),
            (layer.running_var, 1),
            (layer.running_lambda, 1),
        ):
            assert average[1] == average[2] == start and (
                average[0] != start
            ) == bool(momentum)
    assert (
        layers[0].num_batches_tracked
        == layers[1].num_batches_tracked
        == (0 if momentum is None else 3)
    )


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
    torch.manual_seed(0)
    u, reference = (
        torch.randn(32, 3).exp(),
        [torch.zeros(3), torch.ones(3), torch.ones(3)],
    )
    batch_normal_norm(u, *reference, training=True, noise=0.0)
    with torch.inference_mode():
        made = [torch.zeros(3), torch.ones(3), torch.ones(3)]
        batch_normal_norm(u, *made, training=True, noise=0.0)
    half, wide = (
        [r.half() for r in (torch.zeros(3), torch.ones(3), torch.ones(3))],
        list(
            torch.tensor([[0.0, 9], [1, 9], [1, 9]])[:, :1]
            .expand(3, 3)
            .contiguous()
            .repeat(1, 2)[:, ::2]
        ),
    )
    for running in (half, wide):
        batch_normal_norm(u, *running, training=True, noise=0.0)
    for running, tolerance in ((made, 1e-6), (half, 1e-3), (wide, 1e-6)):
        for mine, r in zip(running, reference):
            torch.testing.assert_close(
                mine.float(), r, rtol=tolerance, atol=tolerance
            )
    for missing in range(3):
        running = [
            None if k == missing else r
            for k, r in enumerate(
                (torch.zeros(3), torch.ones(3), torch.ones(3))
            )
        ]
        batch_normal_norm(u, *running, training=True, noise=0.0)
        assert all(
            mine is None or torch.equal(mine, r)
            for mine, r in zip(running, reference)
        )


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


def test_other_default_dtype():
    "The kernel's own tensors are float32 whatever new tensors are by default."
    expected = [
        layer_results(name, "native", training)
        for name in LAYERS
        for training in (True, False)
    ]
    u = torch.randn(4, 5)
    statistics = normality_norm(u, (1,))[1]
    given = Statistics(torch.zeros(1, 5), torch.ones(1, 5), (torch.ones(1, 5),))
    evaluated = normality_norm(u, (0,), statistics=given)[0]
    torch.set_default_dtype(torch.float64)
    try:
        for name in ("batch", "layer"):
            make, shape = LAYERS[name]
            layer, x = (
                make(noise=0.0).float(),
                torch.randn(shape, dtype=torch.float32).requires_grad_(),
            )
            with set_backend("eager"):
                reference = torch.autograd.grad(
                    layer(x).sin().sum(), [x, *layer.parameters()]
                )
            for mine, r in zip(
                torch.autograd.grad(
                    layer(x).sin().sum(), [x, *layer.parameters()]
                ),
                reference,
            ):
                assert mine.dtype == torch.float32
                torch.testing.assert_close(mine, r, rtol=1e-3, atol=2e-5)
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                values(normality_norm(u, (1,))[1]), values(statistics)
            )
        ) and torch.equal(
            normality_norm(u, (0,), statistics=given)[0], evaluated
        )
    finally:
        torch.set_default_dtype(torch.float32)
    again = [
        layer_results(name, "native", training)
        for name in LAYERS
        for training in (True, False)
    ]
    assert all(
        torch.equal(a, b) for x, y in zip(expected, again) for a, b in zip(x, y)
    )


@pytest.mark.parametrize("training", [True, False])
def test_one_tensor_as_weight_and_bias(training):
    """Each role has its own share of the gradient, by the kernel and by the
    definition that second derivatives take.
    """
    u, w, running = (
        torch.randn(8, 3),
        torch.rand(3).requires_grad_(),
        (torch.zeros(3), torch.ones(3), torch.full((3,), 0.4)),
    )
    norm = batch_normal_norm
    parts = [w.detach().clone().requires_grad_() for _ in range(2)]
    expected = sum(
        torch.autograd.grad(
            norm(u, *running, *parts, training, noise=0.0).exp().sum(), parts
        )
    )
    for again in (False, True):
        (found,) = torch.autograd.grad(
            norm(u, *running, w, w, training, noise=0.0).exp().sum(),
            w,
            create_graph=again,
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_kept_for_backward():
    "The input once, and a few numbers a unit."
    u = torch.randn(16, 4, 12, 12, requires_grad=True)
    weight = torch.ones(1, 4, 1, 1, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        normality_norm(u, (0, 2, 3), weight, weight, noise=0.4)
    large = {t.data_ptr() for t in kept if t.numel() > 100}
    assert (
        large == {u.data_ptr()}
        and sum(t.numel() for t in kept if t.numel() <= 100) < 20 * 4 + 10
    )


def test_the_kernel_asks_the_tensors():
    "Shape, strides, dtype, storage: one thing wrong, and nothing is written."
    torch.manual_seed(0)
    u, weight = torch.randn(4, 3, 5, 6), torch.ones(3)
    running = [torch.zeros(3) for _ in range(3)]
    call = native.prepare(u, (0, 2, 3), weight, weight, Rule(), 1)
    numbers = native.forward(
        call, u, weight, weight, running=running, momentum=0.5
    )[1]
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
        short,
    ):
        with pytest.raises(RuntimeError) as raised:
            native.forward(
                call, wrong, weight, weight, running=running, momentum=0.5
            )
        assert (type(raised.value) is native.Different) == (
            wrong is not short
        ), str(raised.value)
    for wrong in (
        torch.zeros(4),
        torch.zeros(3).double(),
        torch.zeros(6)[::2],
        torch.zeros(1).expand(3),
        torch.zeros(3, 1),
    ):
        for place in range(3):
            averages = [*running[:place], wrong, *running[place + 1 :]]
            with pytest.raises(native.Different):
                native.forward(
                    call, u, weight, weight, momentum=0.5, running=averages
                )
        with pytest.raises(native.Different):
            native.forward(call, u, wrong, weight)
    assert all(map(torch.equal, running, before))
    # a part of a larger storage is right
    native.forward(call, torch.randn(361)[1:].view(u.shape), weight, weight)
    # a backward pass brings into form what it finds
    grad = torch.randn_like(u)
    expected = native.backward(call, grad, (u, weight, numbers))
    for found in (
        native.backward(call, grad, (last, weight, numbers)),
        native.backward(call, grad, (-torch._neg_view(u), weight, numbers)),
        native.backward(call, grad, (torch._neg_view(-u), weight, numbers)),
    ):
        assert all(map(torch.equal, found, expected))


def test_the_kernel_asks_tensors_with_channels_last():
    torch.manual_seed(0)
    u = torch.randn(4, 3, 5, 6).contiguous(memory_format=torch.channels_last)
    call = native.prepare(u, (0, 2, 3), None, None, Rule(), 1)
    expected = native.forward(call, u)[0]
    # given otherwise, it is brought into form
    torch.testing.assert_close(
        native.forward(call, u.contiguous())[0], expected, rtol=0, atol=0
    )
    for wrong in (u[:3], u[..., :5], u[:, :2], u.transpose(2, 3)):
        with pytest.raises(native.Different):
            native.forward(call, wrong)
    short = u.clone()
    short.untyped_storage().resize_(4 * u.numel() - 1)
    with pytest.raises(RuntimeError, match="not there"):
        native.forward(call, short)


@pytest.mark.parametrize("what", ["no interface", "no place", "other tensors"])
def test_a_pytorch_that_the_kernel_does_not_know(what, monkeypatch):
    compiled = native.library()
    if what == "no interface":
        monkeypatch.setattr(torch._C, "__file__", ctypes.util.find_library("m"))
    else:
        x = torch.arange(6.0)
        made = types.SimpleNamespace(_cdata=x._cdata)
        if what == "no place":
            del made._cdata
        call = native.prepare(x.view(2, 3), (0,), None, None, Rule())
        monkeypatch.setattr(native, "prepare", lambda *_: call)
        x.view = x.double = lambda *_: made
        made.view, made.T, made.double = lambda *_: made, made, lambda: made
        monkeypatch.setattr(torch, "arange", lambda *_, **__: x)
    try:
        with pytest.raises(native.CompilerError, match="this PyTorch"):
            native._ask(compiled)
    finally:
        monkeypatch.undo()
        native._ask(compiled)


# what is changed in native.cpp; which structure and field are named, what
# Python packs, and what the kernel has
APART = {
    "swapped": (
        {"*mean, *var, *lmbda": "*var, *mean, *lmbda"},
        "Job.mean",
        "address, 8 bytes at 40",
        "address, 8 bytes at 48",
    ),
    "another sign": (
        {"uint64_t seed, offset": "i64 seed, offset"},
        "Job.seed",
        "uint64, 8 bytes at 264",
        "int64, 8 bytes at 264",
    ),
    "another size": (
        {"double momentum": "float momentum"},
        "Job.momentum",
        "double, 8 bytes at 280",
        "double, 4 bytes at 280",
    ),
    "one more": (
        {
            "double momentum": "double more, momentum",
            " FIELD(momentum)": " FIELD(more) FIELD(momentum)",
        },
        "Job.momentum",
        "double, 8 bytes at 280",
        "double, 8 bytes at 288",
    ),
    "one more that is not told": (
        {"double momentum;": "double momentum, more;"},
        "Job.sizeof",
        "288 bytes",
        "296 bytes",
    ),
    "one less": (
        {" FIELD(momentum)": ""},
        "Job.momentum",
        "double, 8 bytes at 280",
        "nothing",
    ),
    "of a proxy": (
        {"*of_shift, *of_scale;": "*of_scale, *of_shift;"},
        "ProxyJob.of_shift",
        "address, 8 bytes at 96",
        "address, 8 bytes at 104",
    ),
}


@pytest.fixture
def changed(tmp_path, monkeypatch):
    "A kernel of its own from a changed source, not optimized."
    monkeypatch.setenv("NORMALNORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", f"{os.environ.get('CXX', '')} -O0")

    def built(changes):
        text = Path(native.__file__).with_name("native.cpp").read_text("utf-8")
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        source = tmp_path / "native.cpp"
        source.write_text(text, "utf-8")
        return compiler.load(source)

    return built


def test_a_kernel_that_agrees(changed):
    "Compiled as the others below: it is bound, and computes."
    kernel = native.bound(changed({}))
    x = torch.randn(4, 3)
    call, outs = native.prepare(x, (0,), None, None, Rule()), []
    for one in (kernel, native.library()):
        outs.append(torch.zeros(4, 3))
        native._run(
            0,
            call,
            (x, None, outs[-1], *(None,) * (len(native._JOB[0]) - 3)),
            kernel=one,
        )
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("what", APART)
def test_a_kernel_that_reads_a_job_otherwise(changed, what):
    "It is refused; the message names the field and both layouts."
    changes, field, packed, has = APART[what]
    with pytest.raises(native.CompilerError) as raised:
        native.bound(changed(changes))
    assert str(raised.value).startswith(
        f"{field}: Python packs {packed}; the compiled kernel has {has}. "
    )


def test_a_kernel_that_keeps_other_numbers(changed):
    with pytest.raises(
        native.CompilerError, match="keeps 10 numbers of a unit, where .* for 9"
    ):
        native.bound(changed({"BESIDE = 6": "BESIDE = 7"}))


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
                rf"{job}\.\w+: Python packs ", str(error)
            ), (other, error)
    monkeypatch.undo()
    assert native.bound(native.library())


@pytest.mark.skipif(not native.available(), reason="no compiler")
@pytest.mark.parametrize("seed", [0, 5, -1, -(2**63), 2**63 - 1])
def test_every_seed_of_64_bits_is_told_apart(seed):
    "The definition's noise for each; 0 where none is given."
    torch.manual_seed(0)
    u, rule = torch.randn(40, 6), Rule(noise=0.7)
    call = native.prepare(u, (0,), None, None, rule)
    expected = core.normality_norm(u, (0,), noise=0.7, seed=torch.tensor(seed))
    found = native.forward(call, u, seed=seed)[0]
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
    if seed == 0:
        assert torch.equal(native.forward(call, u)[0], found)
