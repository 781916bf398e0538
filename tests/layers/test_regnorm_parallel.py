"""RegNorm's penalty under DistributedDataParallel (two gloo processes) and with
accumulated gradients, against one process with the whole batch.

Exact: what two processes find is the mean over the two halves, which is what
accumulation finds. Only in the mean over all ways to halve the batch: the
gradient of the whole batch, for distinct pairs; for all pairs it times
(1 − K/B)/(1 − 1/B).
"""

from functools import partial
from itertools import combinations

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
HALVES = [
    (list(half), [i for i in range(B) if i not in half])
    for half in combinations(range(B), B // K)
]
FACTOR = (1 - K / B) / (1 - 1 / B)


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


def loss(model, x, penalty=regnorm_penalty, data=True):
    "Of one forward pass, with the penalty; without the data's part if asked."
    out = model(x).square().mean()
    return data * out + 0.3 * penalty(model)


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


def whole(distinct, data=True):
    model = network(distinct)
    loss(model, batch(), data=data).backward()
    return gradients(model)


def accumulated(distinct, parts, share=1 / K, **options):
    model = network(distinct)
    for part in parts:
        (share * loss(model, batch()[part], **options)).backward()
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
KINDS = pytest.mark.parametrize("distinct", [False, True])


@KINDS
def test_processes_find_the_mean_over_their_parts(found, distinct):
    "To rounding, for each halving; so does accumulation, and both processes."
    for first, second, halves in zip(
        found[0][distinct], found[1][distinct], HALVES, strict=True
    ):
        assert torch.equal(first, second)
        assert same(first, accumulated(distinct, halves))
        # a sum in place of the mean is seen
        assert not same(first, accumulated(distinct, halves, share=1.0))


@KINDS
def test_in_the_mean_over_halvings_it_is_the_whole_batch(found, distinct):
    """Distinct pairs: its gradient. All pairs: the data's gradient whole, and
    the penalty's weaker by a known factor.
    """
    mean = torch.stack(found[0][distinct]).mean(0)
    both, alone = whole(distinct), whole(distinct, data=False)
    wanted = both if distinct else both - (1 - FACTOR) * alone
    assert same(mean, wanted)
    # no single halving has it, and the other kind's answer is told apart
    assert not any(same(one, wanted) for one in found[0][distinct])
    assert not same(mean, both - (1 - FACTOR) * alone if distinct else both)


def test_both_kinds_ask_for_the_same_direction():
    "Of one batch they differ by a factor and a constant."
    every, distinct = (whole(kind, data=False) for kind in (False, True))
    assert same(distinct * (1 - 1 / B), every)
