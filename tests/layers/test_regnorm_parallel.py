"""RegNorm's penalty under DistributedDataParallel (two gloo processes) and with
accumulated gradients: what two processes find is the mean over the two halves
of a batch, which is what accumulation finds. (What that is in the mean over
all halves: claim regnorm-unbiased.)
"""

import torch
from torch import nn

from normalnorm.layers.regnorm import (
    PreRegNormConv2d,
    RegNormLinear,
    regnorm_penalty,
)
from tests.layers.steps import together

HALVES = [0, 2, 5], [1, 3, 4]


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


def gradients(model, *parts):
    "Of the mean loss, with the penalty, over parts of a batch, as one vector."
    g = torch.Generator().manual_seed(1)
    x = torch.randn(6, 2, 3, 3, generator=g, dtype=torch.float64) + 0.5
    for part in parts:
        loss = model(x[part]).square().mean() + 0.3 * regnorm_penalty(model)
        (loss / len(parts)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def replicated(rank):
    "In one process of two, of either kind."
    parallel = nn.parallel.DistributedDataParallel
    return {
        distinct: gradients(parallel(network(distinct)), HALVES[rank])
        for distinct in (False, True)
    }


def test_processes_find_the_mean_over_their_parts():
    "To rounding; so does accumulation, and both processes."
    first, second = together(2, replicated)
    for distinct, found in first.items():
        assert torch.equal(found, second[distinct])
        expected = gradients(network(distinct), *HALVES)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
