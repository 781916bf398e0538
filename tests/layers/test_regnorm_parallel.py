"""RegNorm's penalty under DistributedDataParallel (two gloo processes): what
they find is the mean over the two halves, which is what accumulation finds.
"""

import torch
from torch import nn

from normalnorm.layers.regnorm import (
    PreRegNormConv2d,
    RegNormLinear,
    regnorm_penalty,
)
from tests.layers.steps import together

HALVES = [0, 3, 4], [1, 2, 5]


def network(distinct):
    torch.manual_seed(0)
    made = {"distinct": distinct, "dtype": torch.float64}
    return nn.Sequential(
        PreRegNormConv2d(2, 3, 2, **made),
        nn.Tanh(),
        nn.Flatten(),
        RegNormLinear(12, 5, **made),
        nn.Tanh(),
        nn.Linear(5, 1, dtype=torch.float64),
    )


def gradients(model, *parts):
    "Of one forward pass for each part of the batch, divided by their number."
    g = torch.Generator().manual_seed(1)
    batch = torch.randn(6, 2, 3, 3, generator=g, dtype=torch.float64) + 0.5
    for part in parts:
        loss = model(batch[part]).square().mean() + 0.3 * regnorm_penalty(model)
        (loss / len(parts)).backward()
    return [p.grad for p in model.parameters()]


def replicated(rank):
    "One process of two: the gradients of either kind."
    wrap = nn.parallel.DistributedDataParallel
    return [
        gradients(wrap(network(distinct)), HALVES[rank])
        for distinct in (False, True)
    ]


def test_processes_find_the_mean_over_their_parts():
    expected = [
        gradients(network(distinct), *HALVES) for distinct in (False, True)
    ]
    for found in together(2, replicated):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
