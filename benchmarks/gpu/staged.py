"""Batch normality in Triton, NCHW and channels last: three (with scaled noise
five) passes forward, two backward, each one kernel; a pass begins by merging
what the pass before left of each channel.

A prototype, as `rows`.
"""

import torch
import triton
import triton.language as tl

from benchmarks.gpu.rows import (
    FUSED,
    KEPT,
    KIND,
    at_one_terms,
    estimate,
    four_normals,
    keep,
    kept,
    noisy,
    normal_of,
    rates,
    slopes,
    transform,
)

ROWS = 12  # of partial results: mean, M2, count; five sums; Σx; Σ|x−m|


@triton.jit
def total(x, LAST: tl.constexpr):
    "Over each unit's elements in a tile: (1, K) channels last, else (1, 1)."
    s = tl.sum(x, 0)
    if LAST:  # no early return: the interpreter takes one of another
        out = s[None, :]  # shape, the compiler does not
    else:
        out = tl.sum(s, 0) + tl.zeros((1, 1), tl.float32)
    return out


@triton.jit
def totals(tensors, LAST: tl.constexpr):
    found = ()
    for i in tl.static_range(len(tensors)):
        found = found + (total(tensors[i], LAST),)
    return found


@triton.jit
def of_parts(PART, channels, ok, C, P, first, WHICH: tl.constexpr):
    "What 32 programs left of row WHICH of some channels: (32, K)."
    p = first + tl.arange(0, 32)[:, None]
    return tl.load(
        PART + (WHICH * P + p) * C + channels, mask=ok & (p < P), other=0.0
    )


@triton.jit
def merged(PART, channels, ok, C, P, WHICH: tl.constexpr):
    "The sum over the programs of a channel of row WHICH: (1, K)."
    s = tl.zeros(channels.shape, tl.float32)
    for p in range(0, P, 32):
        s += tl.sum(of_parts(PART, channels, ok, C, P, p, WHICH), 0)[None, :]
    return s


@triton.jit
def moments(PART, channels, ok, C, P):
    "Mean and biased variance of all from those of the parts, without squares."
    count = tl.where(ok, merged(PART, channels, ok, C, P, 2), 1.0)
    mean = tl.zeros(channels.shape, tl.float32)
    for p in range(0, P, 32):
        m = of_parts(PART, channels, ok, C, P, p, 2)
        m *= of_parts(PART, channels, ok, C, P, p, 0)
        mean += tl.sum(m, 0)[None, :]
    mean = mean / count
    m2 = merged(PART, channels, ok, C, P, 1)
    for p in range(0, P, 32):
        d = of_parts(PART, channels, ok, C, P, p, 0) - mean
        m = of_parts(PART, channels, ok, C, P, p, 2)
        m2 += tl.sum(d * d * m, 0)[None, :]
    return mean, m2 / count


@triton.jit
def column_of(B, C, L, LAST: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """A program's column of tiles and its part of it; the channels there, and
    which there are; the number of tiles."""
    column, part = tl.program_id(0), tl.program_id(1)
    if LAST:
        channels = (column * K + tl.arange(0, K))[None, :]
        tiles = tl.cdiv(B * L, T)
    else:
        channels = tl.full((1, 1), 0, tl.int32) + column
        tiles = tl.cdiv(B, T) * tl.cdiv(L, K)
    return column, part, channels, channels < C, tiles


@triton.jit
def place(
    tile, column, B, C, L, LAST: tl.constexpr, T: tl.constexpr, K: tl.constexpr
):
    """Elements of a tile: where they lie, whether they are there, their index
    in logical order. Channels last: T positions × K channels; else T images × K
    positions of one channel (`column`)."""
    i, j = tl.arange(0, T).to(tl.int64), tl.arange(0, K).to(tl.int64)
    if LAST:
        n, c = tile * T + i, column * K + j
        at = n[:, None] * C + c[None, :]
        inside = (n < B * L)[:, None] & (c < C)[None, :]
        index = ((n // L) * C * L + n % L)[:, None] + (c * L)[None, :]
    else:
        blocks = tl.cdiv(L, K)
        b, q = (tile // blocks) * T + i, (tile % blocks) * K + j
        at = (b * C + column)[:, None] * L + q[None, :]
        inside = (b < B)[:, None] & (q < L)[None, :]
        index = at
    return at, inside, index


@triton.jit
def normals(
    index,
    seed,
    LAST: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    QUADS: tl.constexpr,
    FAST: tl.constexpr,
):
    "The numbers of a tile; QUADS: four elements of a channel are a counter's."
    if not QUADS:
        return normal_of(index, seed, FAST)
    if LAST:  # four rows: L % 4 == 0
        first = tl.reshape(index, (T // 4, 4, K))
        first = tl.min(first, 1)  # the first of the four
        z0, z1, z2, z3 = four_normals(first >> 2, seed, FAST)
        z = tl.join(tl.join(z0, z2), tl.join(z1, z3))  # (T/4, K, 2, 2)
        z = tl.permute(tl.reshape(z, (T // 4, K, 4)), (0, 2, 1))
        return tl.reshape(z, (T, K))
    first = tl.min(tl.reshape(index, (T, K // 4, 4)), 2)
    z0, z1, z2, z3 = four_normals(first >> 2, seed, FAST)
    return tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), (T, K))


@triton.jit
def batch_forward(
    X,
    Y,
    W,
    BIAS,
    NUM,
    PART,
    SEED,
    B,
    C,
    L,
    P,
    count,
    eps,
    alpha,
    noise,
    STAGE: tl.constexpr,
    LAST: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    TRANSFORM: tl.constexpr,
    NOISE: tl.constexpr,
    FAST: tl.constexpr,
    QUADS: tl.constexpr,
):
    """STAGE 0: moments; 1: five sums; 2: Σψ; 3: Σ|ψ − mean|; 4: output."""
    column, part, channels, ok, tiles = column_of(B, C, L, LAST, T, K)
    zero = tl.zeros(channels.shape, tl.float32)
    mean, var, lam, ratio, second = zero, zero, zero + 1.0, zero, zero + 1.0
    mean_d, slope, centre, scale = zero, zero, zero, zero
    rate, bare = zero, zero
    if STAGE > 0:
        mean, var = moments(PART, channels, ok, C, P)
        rate, bare = rates(var, eps)
    if STAGE > 1 and TRANSFORM:
        n = 1.0 / count
        mean_d = merged(PART, channels, ok, C, P, 3) * n
        slope = merged(PART, channels, ok, C, P, 4) * n
        lam, ratio, second = estimate(
            mean_d,
            slope,
            merged(PART, channels, ok, C, P, 5) * n * 0.6931471805599453,
            merged(PART, channels, ok, C, P, 6) * n * 0.4804530139182014,
            merged(PART, channels, ok, C, P, 7) * n,
            alpha,
        )
    if STAGE > 2 and NOISE == 1:
        centre = merged(PART, channels, ok, C, P, 8) / count
    if STAGE > 3 and NOISE == 1:
        scale = merged(PART, channels, ok, C, P, 9) / count * noise
    # moments are merged tile by tile; sums stay a tile until the loop has
    # ended: no exchange between threads inside it
    s0, s1, s2 = zero, zero, zero
    t0 = tl.zeros((T, K), tl.float32)
    t1, t2, t3, t4 = t0, t0, t0, t0
    if STAGE == 4:
        w = tl.load(W + channels, mask=ok, other=0.0).to(tl.float32)
        shift = tl.load(BIAS + channels, mask=ok, other=0.0).to(tl.float32)
        if NOISE:
            seed = tl.load(SEED)
    each = tl.cdiv(tiles, P)
    for step in range(each):
        # every second pass from the end: what L2 still holds comes first
        tile = part * each + (step if STAGE % 2 == 0 else each - 1 - step)
        at, inside, index = place(tile, column, B, C, L, LAST, T, K)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        if STAGE == 0:  # of the tile exactly, then merged
            m = total(inside.to(tl.float32), LAST)
            own = total(x, LAST) / tl.maximum(m, 1.0)
            d = tl.where(inside, x - own, 0.0)
            new = s2 + m
            delta = own - s0
            f = m / tl.maximum(new, 1.0)
            s1 += total(d * d, LAST) + delta * delta * s2 * f
            s0 += delta * f
            s2 = new
        else:
            c = tl.where(inside, x - mean, 0.0)
        if STAGE == 1:
            k = c * bare
            d, log, q = at_one_terms(k, FAST)
            t0 += d
            t1 += k * d
            t2 += log
            t3 += q
            t4 += d * d
        if STAGE > 1:
            h = c * rate
            if TRANSFORM:
                h = transform(h, lam, FAST)
            if STAGE == 2:
                t0 += tl.where(inside, h, 0.0)
            elif STAGE == 3:
                t0 += tl.where(inside, tl.abs(h - centre), 0.0)
            else:
                if NOISE:
                    z = normals(index, seed, LAST, T, K, QUADS, FAST)
                    h = noisy(h, z, scale, noise, NOISE)
                h = h * w + shift
                tl.store(Y + at, h.to(Y.dtype.element_ty), mask=inside)
    row, step = PART + part * C + channels, P * C
    if STAGE == 0:
        keep(row, step, ok, (s0, s1, s2))
    elif STAGE == 1:
        keep(row + 3 * step, step, ok, totals((t0, t1, t2, t3, t4), LAST))
    elif STAGE < 4:
        tl.store(row + (6 + STAGE) * step, total(t0, LAST), mask=ok)
    elif part == 0:
        numbers = mean, var, lam, ratio, second, mean_d, slope, scale
        keep(NUM + channels, C, ok, numbers)


@triton.jit
def batch_backward(
    X,
    DY,
    DX,
    W,
    NUM,
    PART,
    SEED,
    DW,
    DB,
    B,
    C,
    L,
    P,
    count,
    eps,
    alpha,
    noise,
    STAGE: tl.constexpr,
    LAST: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    TRANSFORM: tl.constexpr,
    NOISE: tl.constexpr,
    FAST: tl.constexpr,
    QUADS: tl.constexpr,
):
    "STAGE 0: seven sums; 1: the gradient."
    column, part, channels, ok, tiles = column_of(B, C, L, LAST, T, K)
    zero = tl.zeros(channels.shape, tl.float32)
    numbers = kept(NUM + channels, C, ok)
    mean, var, lam, ratio, second, mean_d, slope, scale = numbers
    rate, bare = rates(var, eps)
    v0, v1, v2, v3, v4 = zero, zero, zero, zero, zero
    t0 = tl.zeros((T, K), tl.float32)
    t1, t2, t3, t4, t5, t6 = t0, t0, t0, t0, t0, t0
    if STAGE == 1:
        n = 1.0 / count
        v0 = merged(PART, channels, ok, C, P, 0) * n
        v1 = merged(PART, channels, ok, C, P, 1) * n
        if TRANSFORM:
            v2 = merged(PART, channels, ok, C, P, 2) * n * bare
            v3 = merged(PART, channels, ok, C, P, 3) * n
            v4 = merged(PART, channels, ok, C, P, 4) * n
    w = tl.load(W + channels, mask=ok, other=0.0).to(tl.float32)
    each = tl.cdiv(tiles, P)
    for step in range(each):
        tile = part * each + (step if STAGE == 0 else each - 1 - step)
        at, inside, index = place(tile, column, B, C, L, LAST, T, K)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        c = tl.where(inside, x - mean, 0.0)
        g = grad * w
        if NOISE and (STAGE == 0 or NOISE == 3):
            z = normals(index, tl.load(SEED), LAST, T, K, QUADS, FAST)
            if NOISE == 3:
                g *= 1.0 + noise * z
        h, k, v, up, move, y = slopes(
            c,
            g,
            rate,
            bare,
            lam,
            ratio,
            second,
            mean_d,
            slope,
            alpha,
            TRANSFORM,
            STAGE == 0,
            FAST,
        )
        if STAGE == 0:
            t0 += v
            t1 += v * h
            if TRANSFORM:
                move = tl.where(inside, move, 0.0)
                t2 += up
                t3 += move
                t4 += move * k
            if NOISE:
                y = noisy(y, z, scale, noise, NOISE)
            t5 += grad * y
            t6 += grad
        else:
            out = (v - v0 - h * v1) * rate
            if TRANSFORM:
                out += v2 * (move - v3 - k * v4)
            tl.store(DX + at, out.to(DX.dtype.element_ty), mask=inside)
    if STAGE == 0:
        sums = t0, t1, t2, t3, t4, t5, t6
        keep(PART + part * C + channels, P * C, ok, totals(sums, LAST))
    elif part == 0:
        tl.store(DW + channels, merged(PART, channels, ok, C, P, 5), mask=ok)
        tl.store(DB + channels, merged(PART, channels, ok, C, P, 6), mask=ok)


# ---- host side
def plan(x, programs, channels):
    "Layout, tile, parts of a channel."
    b, c = x.shape[:2]
    length = x.numel() // (b * c)
    last = (
        x.ndim == 4
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=torch.channels_last)
    )
    if last:
        k = min(triton.next_power_of_2(c), channels)
        t, columns = max(1024 // k, 4), triton.cdiv(c, k)
        tiles = triton.cdiv(b * length, t)
    else:
        k = min(max(triton.next_power_of_2(length), 4), 1024)
        t, columns = max(1, min(1024 // k, triton.next_power_of_2(b))), c
        tiles = triton.cdiv(b, t) * triton.cdiv(length, k)
    parts = max(1, min(tiles, programs // columns))
    return b, c, length, last, t, k, columns, parts


def constants(x, last, t, k, alpha, noise, kind) -> dict:
    "What both passes are compiled for."
    return dict(
        LAST=last,
        T=t,
        K=k,
        TRANSFORM=alpha > 0,
        NOISE=KIND[kind] if noise else 0,
        FAST=x.dtype != torch.float32,
        QUADS=x[0, 0].numel() % 4 == 0,
        num_warps=4,
        **FUSED,
    )


def forward(
    x,
    w,
    bias,
    seed,
    eps=1e-5,
    alpha=1.0,
    noise=0.0,
    kind="scaled",
    programs=528,
    channels=32,
):
    b, c, length, last, t, k, columns, parts = plan(x, programs, channels)
    y, num = (
        torch.empty_like(x),
        x.new_empty(KEPT.value * c, dtype=torch.float32),
    )
    part = x.new_empty(ROWS * parts * c, dtype=torch.float32)
    how = constants(x, last, t, k, alpha, noise, kind)
    for stage in range(5):
        if stage == 1 and not alpha or stage in (2, 3) and how["NOISE"] != 1:
            continue
        batch_forward[(columns, parts)](
            *(x, y, w, bias, num, part, seed, b, c, length, parts),
            *(float(b * length), eps, alpha, noise),
            STAGE=stage,
            **how,
        )
    return y, num


def backward(
    dy,
    x,
    num,
    w,
    seed,
    eps=1e-5,
    alpha=1.0,
    noise=0.0,
    kind="scaled",
    programs=528,
    channels=32,
):
    b, c, length, last, t, k, columns, parts = plan(x, programs, channels)
    part = x.new_empty(ROWS * parts * c, dtype=torch.float32)
    dx, dw, db = map(torch.empty_like, (x, w, w))
    how = constants(x, last, t, k, alpha, noise, kind)
    for stage in range(2):
        batch_backward[(columns, parts)](
            *(x, dy, dx, w, num, part, seed, dw, db, b, c, length, parts),
            *(float(b * length), eps, alpha, noise),
            STAGE=stage,
            **how,
        )
    return dx, dw, db
