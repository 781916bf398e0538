"""RegNorm's penalty under DistributedDataParallel (two gloo processes) and with
accumulated gradients: what two processes find is the mean over the two halves
of a batch, which is what accumulation finds. (What that is in the mean over
all halves: claim regnorm-unbiased.)
"""

from functools import partial

import pytest
import torch
from torch import nn

from normalnorm.layers.regnorm import (
    PreRegNormConv2d,
    RegNormLinear,
    regnorm_penalty,
)
from tests.layers.steps import together

B, K = 6, 2
HALVES = ([0, 2, 5], [1, 3, 4]), ([3, 4, 5], [0, 1, 2])


def network(distinct):
    "Two RegNorm layers; ε = 0, so that the power of a sample is constant."
    torch.manual_seed(0)
    made = {"distinct": distinct, "eps": 0.0, "dtype": torch.float64}
    return nn.Sequential(
        PreRegNormConv2d(2, 3, 2, **made),
        nn.Tanh(),
        nn.Flatten(),
        RegNormLinear(12, 5, **made),
        nn.Tanh(),
        nn.Linear(5, 1, dtype=torch.float64),
    )


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, 2, 3, 3, generator=g, dtype=torch.float64) + 0.5


def loss(model, x):
    "Of one forward pass, with the penalty."
    return model(x).square().mean() + 0.3 * regnorm_penalty(model)


def gradients(model):
    "All of them as one vector, which are zero afterwards."
    found = torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
            for p in model.parameters()
        ]
    )
    model.zero_grad()
    return found


def accumulated(distinct, parts, share=1 / K):
    model = network(distinct)
    for part in parts:
        (share * loss(model, batch()[part])).backward()
    return gradients(model)


def replicated(rank):
    "One process of two: the gradients of each halving, of either kind."
    found = {}
    for distinct in (False, True):
        model = nn.parallel.DistributedDataParallel(network(distinct))
        found[distinct] = []
        for halves in HALVES:
            loss(model, batch()[halves[rank]]).backward()
            found[distinct].append(gradients(model))
    return found


@pytest.fixture(scope="module")
def found():
    return together(K, replicated)


same = partial(torch.allclose, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("distinct", [False, True])
def test_processes_find_the_mean_over_their_parts(found, distinct):
    "To rounding, for each halving; so does accumulation, and both processes."
    for first, second, halves in zip(
        found[0][distinct], found[1][distinct], HALVES, strict=True
    ):
        assert torch.equal(first, second)
        assert same(first, accumulated(distinct, halves))
        # a sum in place of the mean is seen
        assert not same(first, accumulated(distinct, halves, share=1.0))
