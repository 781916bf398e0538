"""Layer normality in Triton: forward with Newton step, noise and affine map in
one kernel, the row on chip; backward in one kernel that leaves partial sums of
the affine gradients.

A prototype, not a module of the package: no engine calls it. `Kernels` of
`benchmarks.gpu.__main__` holds it to the definition. With TRITON_INTERPRET=1 it
runs without a GPU.
"""

import os

import torch
import triton
import triton.language as tl

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
TURN = tl.constexpr(1.4629180792671596e-09)  # 2π·2⁻³²
# inline PTX and a reduction of several tensors: not in the interpreter (nor on
# ROCm, where this must be False too)
PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")
# numbers kept of a unit: mean, variance, λ, L'/L'', L'', mean d, mean kd, scale
KEPT = tl.constexpr(8)


# ---- elementary functions in base 2: no branch, no libdevice
@triton.jit
def by_unit(x, INSTRUCTION: tl.constexpr):
    "What the unit for special functions makes of x, in one instruction."
    return tl.inline_asm_elementwise(
        INSTRUCTION + ".approx.ftz.f32 $0, $1;",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def log2_of(x):
    "log₂ x for x ≥ 2⁻³³: one MUFU.LG2, without tl.log2's care for subnormals."
    return by_unit(x, "lg2") if PTX else tl.log2(x)


@triton.jit
def exp2_of(x):
    return by_unit(x, "ex2") if PTX else tl.exp2(x)


@triton.jit
def horner(x, factors):
    "The polynomial of these factors, the highest first."
    p = factors[0]
    for i in tl.static_range(1, len(factors)):
        p = p * x + factors[i]
    return p


@triton.jit
def log2_1p(a, FAST: tl.constexpr):
    """log₂(1+a), a ≥ 0; absolute error 2⁻²³ if FAST (half precision), else a
    polynomial below 0.3, where the sum has lost digits of a."""
    far = log2_of(1.0 + a)
    if FAST:
        return far
    # (a + a²·P(a))/log 2 on [0, 0.3], relative error 1.5e-9 before rounding
    p = horner(
        a,
        (
            0.0629256085,
            -0.139683963,
            0.195091925,
            -0.249531182,
            0.333312347,
            -0.499999684,
        ),
    )
    return tl.where(a < 0.3, (p * a * a + a) * LOG2E, far)


@triton.jit
def expm1_over(t, ell, e, inverse, FAST: tl.constexpr):
    "ℓ·expm1(t)/t for t = ηℓ, e = exp t, inverse = 1/η: ψ without its sign."
    if FAST:  # relative error 2⁻¹⁶ at the seam
        return tl.where(
            tl.abs(t) < 0.00390625, 0.5 * t * ell + ell, e * inverse - inverse
        )
    p = horner(t, (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0))
    return tl.where(tl.abs(t) < 0.5, ell * p, e * inverse - inverse)


@triton.jit
def by_lambda(t, ell, e, inverse, FAST: tl.constexpr):
    "∂ψ/∂λ = ℓ²·(t eᵗ − expm1 t)/t², by its series Σ tʲ/(j!(j+2)) near 0."
    far = (t * e - e + 1.0) * (inverse * inverse)
    if FAST:
        p = horner(t, (1 / 30, 0.125, 1 / 3, 0.5))
        return tl.where(tl.abs(t) < 0.125, ell * ell * p, far)
    p = horner(
        t,
        (
            1 / 403200,
            1 / 45360,
            1 / 5760,
            1 / 840,
            1 / 144,
            1 / 30,
            0.125,
            1 / 3,
            0.5,
        ),
    )
    return tl.where(tl.abs(t) < 1.0, ell * ell * p, far)


@triton.jit
def _add5(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def sums5(a, b, c, d, e):
    "Five sums along axis 1, with one exchange between warps instead of five."
    if PTX:
        return tl.reduce((a, b, c, d, e), 1, _add5)
    return tl.sum(a, 1), tl.sum(b, 1), tl.sum(c, 1), tl.sum(d, 1), tl.sum(e, 1)


@triton.jit
def turn(b, FAST: tl.constexpr):
    "cos and sin of 2π·b·2⁻³², b a word: quadrant exactly, then polynomials."
    if FAST and PTX:  # MUFU: absolute error 2⁻²⁰
        r = b.to(tl.int32, bitcast=True).to(tl.float32) * TURN
        return by_unit(r, "cos"), by_unit(r, "sin")
    q = (b + 0x20000000) >> 30  # nearest quarter, 0…3 (mod 4)
    r = (b - (q << 30)).to(tl.int32, bitcast=True).to(tl.float32) * TURN
    s = r * r
    sin = r + r * s * (
        -1.6666654611e-1 + s * (8.3321608736e-3 - s * 1.9515295891e-4)
    )
    cos = (
        1.0
        - 0.5 * s
        + s
        * s
        * (
            4.166664568298827e-2
            + s * (-1.388731625493765e-3 + s * 2.443315711809948e-5)
        )
    )
    swap, c_minus, s_minus = (q & 1) == 1, ((q + 1) & 2) == 2, (q & 2) == 2
    c, d = tl.where(swap, sin, cos), tl.where(swap, cos, sin)
    return tl.where(c_minus, -c, c), tl.where(s_minus, -d, d)


@triton.jit
def radius_of(a):
    u = a.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return tl.sqrt(tl.maximum(log2_of(u) * (-2.0 * LN2), 0.0))


@triton.jit
def four_normals(counter, seed, FAST: tl.constexpr):
    "Philox 4×32-10 of 64-bit counters, Box–Muller: four numbers of each."
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox(seed, low, high, zero, zero)
    r = radius_of(a)  # Triton 3.6 knows no nested targets
    x, y = turn(b, FAST)
    z0, z1 = r * x, r * y
    r = radius_of(c)
    x, y = turn(d, FAST)
    return z0, z1, r * x, r * y


@triton.jit
def normal_of(index, seed, FAST: tl.constexpr):
    "The number of each element; four times the work of `four_normals`."
    z0, z1, z2, z3 = four_normals(index >> 2, seed, FAST)
    lane = index & 3
    return tl.where(
        lane < 2, tl.where(lane == 0, z0, z1), tl.where(lane == 2, z2, z3)
    )


@triton.jit
def row_normals(
    start,
    seed,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    QUADS: tl.constexpr,
    FAST: tl.constexpr,
):
    "(R, BLOCK) numbers of rows that begin at element `start` (R,)."
    if QUADS:  # start is a multiple of four
        q = tl.arange(0, BLOCK // 4)
        z0, z1, z2, z3 = four_normals(
            (start[:, None] >> 2) + q[None, :], seed, FAST
        )
        z = tl.join(tl.join(z0, z2), tl.join(z1, z3))
        return tl.reshape(z, (R, BLOCK))
    return normal_of(start[:, None] + tl.arange(0, BLOCK)[None, :], seed, FAST)


@triton.jit
def reciprocal(x):
    return by_unit(x, "rcp") if PTX else 1.0 / x


@triton.jit
def noisy(x, z, scale, noise, NOISE: tl.constexpr):
    "With noise from the numbers z; `scale` is that of a unit."
    if NOISE == 1:
        return x + z * scale
    if NOISE == 2:
        return x + z * (noise * 0.7978845608028654)
    return x * (1.0 + noise * z)


# ---- the unit
@triton.jit
def rates(var, eps):
    "1/√(σ²+ε), NaN where σ² overflowed; 1/σ, 0 for a constant unit."
    rate = tl.where(var < float("inf"), 1.0 / tl.sqrt(var + eps), float("nan"))
    rate = tl.where((var == 0.0) & (eps == 0.0), 0.0, rate)
    varies = var > 9.860761315262648e-32  # tiny / machine ε of float32
    bare = 1.0 / tl.sqrt(tl.where(varies, var, 1.0))
    return rate, tl.where(varies, bare, 0.0)


@triton.jit
def at_one_terms(k, FAST: tl.constexpr):
    "d, slog k and (1+a)·ℓ², the last two in units of log 2 and its square."
    a = tl.abs(k)
    ell = log2_1p(a, FAST)
    g = (1.0 + a) * ell
    return g * LN2 - a, tl.where(k < 0, -ell, ell), g * ell


@triton.jit
def estimate(mean_d, slope, mean_log, mean_q, square, alpha):
    "λ̂, L'/L'', L'' from five averages."
    residual = square - mean_d * mean_d - slope * slope
    first = slope - mean_log
    second = 1.0 - mean_q + mean_d * mean_d + 2.0 * residual
    varies = square > 0.0
    ratio = first / tl.where(varies, second, 1.0)
    return tl.where(varies, 1.0 - alpha * ratio, 1.0), ratio, second


@triton.jit
def transform(h, lam, FAST: tl.constexpr):
    left = h < 0
    eta = tl.where(left, 2.0 - lam, lam)
    # with the sign of h: one multiplication less
    inverse = tl.where(left, -_inverse(2.0 - lam), _inverse(lam))
    ell = log2_1p(tl.abs(h), FAST)
    t = eta * ell  # in units of log 2
    e = exp2_of(t)
    ell = tl.where(left, -LN2 * ell, LN2 * ell)
    x = expm1_over(t * LN2, ell, e, inverse, FAST)
    return x if FAST else tl.where(lam == 1.0, h, x)


@triton.jit
def _inverse(x):
    return 1.0 / tl.where(x == 0.0, 1.0, x)


@triton.jit
def place(tile, M, N, R: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """The rows of a tile and which are there; where their elements lie, and
    which are there."""
    rows = tile * R + tl.arange(0, R).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    ok = rows < M
    if EVEN:  # no masks, no selections
        inside = tl.full((R, BLOCK), True, tl.int1)
    else:
        inside = ok[:, None] & (cols < N)[None, :]
    return rows, ok, rows[:, None] * N + cols[None, :], inside


@triton.jit
def layer_forward(
    X,
    Y,
    W,
    B,
    NUM,
    SEED,
    M,
    N,
    eps,
    alpha,
    noise,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    TRANSFORM: tl.constexpr,
    NOISE: tl.constexpr,
    FAST: tl.constexpr,
    QUADS: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    rows, ok, at, inside = place(tl.program_id(0), M, N, R, BLOCK, EVEN)
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    n = 1.0 / N
    mean = tl.sum(x, 1) * n
    c = tl.where(inside, x - mean[:, None], 0.0)
    if not FAST:  # what rounding left: one more sum
        rest = tl.sum(c, 1) * n
        c = tl.where(inside, c - rest[:, None], 0.0)
        mean += rest
    var = tl.sum(c * c, 1) * n
    rate, bare = rates(var, eps)
    h = c * rate[:, None]
    lam, ratio, second = var * 0 + 1.0, var * 0, var * 0 + 1.0
    mean_d, slope, scale = var * 0, var * 0, var * 0
    if TRANSFORM:
        k = c * bare[:, None]
        d, log, q = at_one_terms(k, FAST)  # all 0 where k is: no mask
        mean_d, slope, log, q, square = sums5(d, k * d, log, q, d * d)
        mean_d, slope = mean_d * n, slope * n
        lam, ratio, second = estimate(
            mean_d,
            slope,
            log * (n * LN2),
            q * (n * LN2 * LN2),
            square * n,
            alpha,
        )
        h = transform(h, lam[:, None], FAST)
    if NOISE:
        seed = tl.load(SEED)
        z = row_normals(rows * N, seed, R, BLOCK, QUADS, FAST)
        if NOISE == 1:
            m = tl.sum(h, 1) * n
            away = tl.where(inside, tl.abs(h - m[:, None]), 0.0)
            scale = tl.sum(away, 1) * n * noise
        h = noisy(h, z, scale[:, None], noise, NOISE)
    h *= tl.load(W + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    h += tl.load(B + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(Y + at, h.to(Y.dtype.element_ty), mask=inside)
    keep(NUM + rows, M, ok, (mean, var, lam))
    if TRANSFORM:
        keep(NUM + 3 * M + rows, M, ok, (ratio, second, mean_d, slope))
    if NOISE == 1:
        tl.store(NUM + 7 * M + rows, scale, mask=ok)


@triton.jit
def keep(PLACE, step, ok, numbers):
    "Stores tensors, each a step behind the one before."
    for i in tl.static_range(len(numbers)):
        tl.store(PLACE + i * step, numbers[i], mask=ok)


@triton.jit
def kept(PLACE, step, ok):
    "What was kept of units."
    found = ()
    for i in tl.static_range(KEPT):
        found = found + (tl.load(PLACE + i * step, mask=ok, other=1.0),)
    return found


@triton.jit
def slopes(
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
    TRANSFORM: tl.constexpr,
    NOISY: tl.constexpr,
    FAST: tl.constexpr,
):
    "h, k, w = g·ψ', g·∂ψ/∂λ, move, ψ(h) (if NOISY)."
    h = c * rate
    k = c * bare
    if not TRANSFORM:
        return h, k, g, h * 0, h * 0, h
    left = h < 0
    eta = tl.where(left, 2.0 - lam, lam)
    inverse = tl.where(left, _inverse(2.0 - lam), _inverse(lam))
    a = tl.abs(h)
    ell = log2_1p(a, FAST)
    steep = exp2_of((eta - 1.0) * ell)
    e = steep * a + steep
    ell = ell * LN2
    t = eta * ell
    up = g * by_lambda(t, ell, e, inverse, FAST)
    x = h
    if NOISY:
        x = expm1_over(t, ell, e, inverse, FAST)
        x = tl.where(left, -x, x)
        if not FAST:
            x = tl.where(lam == 1.0, h, x)
    a = tl.abs(k)
    ell = log2_1p(a, FAST) * LN2
    product = (2.0 * a + 1.0) * ell - a  # d + aℓ
    # 4 log d − 2 (mean d + 1) log − log ℓ, log = ±ℓ, with
    # 4 d = 4 (1+a) ℓ − 4 a
    inner = (4.0 * a + 3.0) * ell - 4.0 * a - (2.0 * mean_d + 2.0)
    log = tl.where(k < 0, -ell, ell)
    move = (log * inner) * (alpha * ratio / second) + (
        reciprocal(1.0 + a) * (alpha / second)
        - product * ((1.0 + 4.0 * ratio * slope) * alpha / second)
    )
    return h, k, g * steep, up, move, x


@triton.jit
def layer_backward(
    X,
    DY,
    DX,
    W,
    NUM,
    SEED,
    DW,
    DB,
    M,
    N,
    eps,
    alpha,
    noise,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    TRANSFORM: tl.constexpr,
    NOISE: tl.constexpr,
    FAST: tl.constexpr,
    QUADS: tl.constexpr,
):
    "Rows strided over a grid of fixed size: a row of partial sums a program."
    cols = tl.arange(0, BLOCK)
    here = cols < N
    n = 1.0 / N
    of_w, of_b = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    w = tl.load(W + cols, mask=here, other=0.0).to(tl.float32)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(M, R), tl.num_programs(0)):
        rows, ok, at, inside = place(tile, M, N, R, BLOCK, EVEN)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        numbers = kept(NUM + rows, M, ok)
        mean, var, lam, ratio, second, mean_d, slope, scale = numbers
        rate, bare = rates(var, eps)
        c = tl.where(inside, x - mean[:, None], 0.0)
        g = grad * w
        if NOISE:
            z = row_normals(rows * N, tl.load(SEED), R, BLOCK, QUADS, FAST)
        if NOISE == 3:
            g *= 1.0 + noise * z
        h, k, v, up, move, y = slopes(
            c,
            g,
            rate[:, None],
            bare[:, None],
            lam[:, None],
            ratio[:, None],
            second[:, None],
            mean_d[:, None],
            slope[:, None],
            alpha,
            TRANSFORM,
            True,
            FAST,
        )
        if TRANSFORM:
            move = tl.where(inside, move, 0.0)  # 1 where k is 0
            v1, v2, u1, m1, m2 = sums5(v, v * h, up, move, move * k)
            u1 = u1 * (n * bare)
            out = v - (v1 * n)[:, None] - h * (v2 * n)[:, None]
            out = out * rate[:, None] + u1[:, None] * (
                move - (m1 * n)[:, None] - k * (m2 * n)[:, None]
            )
        else:
            out = (
                v
                - (tl.sum(v, 1) * n)[:, None]
                - h * (tl.sum(v * h, 1) * n)[:, None]
            ) * rate[:, None]
        tl.store(DX + at, out.to(DX.dtype.element_ty), mask=inside)
        if NOISE:
            y = noisy(y, z, scale[:, None], noise, NOISE)
        of_w += tl.sum(grad * y, 0)
        of_b += tl.sum(grad, 0)
    at = tl.program_id(0).to(tl.int64) * N + cols
    tl.store(DW + at, of_w, mask=here)
    tl.store(DB + at, of_b, mask=here)


# ---- host side
# a·b+c as one instruction, whatever the default (3.10 changes it)
FUSED = {"enable_fp_fusion": True}
KIND = {"scaled": 1, "unscaled": 2, "dropout": 3}


def constants(x, values: int, alpha, noise, kind) -> dict:
    """What both passes are compiled for: a tile, warps of as many `values` a
    thread, and what is computed.
    """
    n, m = x.shape[-1], x.numel() // x.shape[-1]
    block = max(triton.next_power_of_2(n), 4)
    r = max(1, min(1024 // block, triton.next_power_of_2(m)))
    return dict(
        R=r,
        BLOCK=block,
        EVEN=n == block and m % r == 0,
        TRANSFORM=alpha > 0,
        NOISE=KIND[kind] if noise else 0,
        FAST=x.dtype != torch.float32,
        QUADS=n % 4 == 0,
        num_warps=min(max(r * block // (32 * values), 1), 16),
        **FUSED,
    )


def forward(
    x, w, b, seed, eps=1e-5, alpha=1.0, noise=0.0, kind="scaled", values=32
):
    n, m = x.shape[-1], x.numel() // x.shape[-1]
    y, num = (
        torch.empty_like(x),
        x.new_empty(KEPT.value * m, dtype=torch.float32),
    )
    how = constants(x, values, alpha, noise, kind)
    layer_forward[(triton.cdiv(m, how["R"]),)](
        x, y, w, b, num, seed, m, n, eps, alpha, noise, **how
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
    programs=264,
    values=32,
):
    n, m = x.shape[-1], x.numel() // x.shape[-1]
    how = constants(x, values, alpha, noise, kind)
    p, dx = min(programs, triton.cdiv(m, how["R"])), torch.empty_like(x)
    dw, db = (w.new_empty(p, n) for _ in range(2))
    layer_backward[(p,)](
        x, dy, dx, w, num, seed, dw, db, m, n, eps, alpha, noise, **how
    )
    return dx, dw.sum(0), db.sum(0)
