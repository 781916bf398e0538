"""Kernels that do nothing but multiply and add, or nothing but ask the unit for
special functions: what bounds any other kernel.
"""

import torch
import triton
import triton.language as tl

from normalnorm.layers.engines.gpu import FUSED
from normalnorm.layers.kernels import exp2_of, log2_of

EACH = tl.constexpr(16)  # operations of a thread's value in a round


@triton.jit
def multiply_add(Y, rounds, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = at.to(tl.float32) * 1e-9
    for _ in range(rounds):
        for _ in tl.static_range(EACH):
            a = a * 0.999 + 0.5
    tl.store(Y + at, a)


@triton.jit
def special(Y, rounds, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = at.to(tl.float32) * 1e-9 + 1.0
    for _ in range(rounds):
        for _ in tl.static_range(EACH // 2):
            a = log2_of(exp2_of(a))
    tl.store(Y + at, a)


def launch(kernel, programs: int, rounds: int, device):
    """A call of a kernel with 8 values a thread, for the latency of one to hide
    behind the others; and how many operations it makes.
    """
    block = 1024
    y = torch.empty(programs * block, device=device)
    return (
        lambda: kernel[(programs,)](
            y, rounds, BLOCK=block, num_warps=4, **FUSED
        ),
        y.numel() * rounds * EACH.value,
    )
