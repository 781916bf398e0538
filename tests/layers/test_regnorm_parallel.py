"""RegNorm's penalty under DistributedDataParallel (two gloo processes) and with
accumulated gradients, against one process with the whole batch.

Exact: what two processes find is the mean over the two halves, which is what
accumulation finds. Only in the mean over all ways to halve the batch: the
gradient of the whole batch, for distinct pairs; for all pairs it times
(1 − K/B)/(1 − 1/B).
"""

import os
import subprocess
import sys
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import normalnorm
from normalnorm.layers.regnorm import (
    PreRegNormConv2d,
    RegNormLinear,
    regnorm_penalty,
)

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


def replicated(rank, folder):
    "One process of two: the gradients of each halving, of either kind."
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=K
    )
    torch.set_num_threads(1)
    found = {}
    for distinct in (False, True):
        model = nn.parallel.DistributedDataParallel(network(distinct))
        found[distinct] = []
        for halves in HALVES:
            loss(model, batch()[halves[rank]]).backward()
            found[distinct].append(gradients(model))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    path = os.pathsep.join(
        [
            str(Path(normalnorm.__file__).parents[1]),
            os.environ.get("PYTHONPATH", ""),
        ]
    )
    # one interpreter that forks: the imports take longer than the runs
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        torch.load(folder / f"{rank}.pt", weights_only=True)
        for rank in range(K)
    ]


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


if __name__ == "__main__":
    torch.multiprocessing.start_processes(
        replicated, (sys.argv[1],), K, start_method="fork"
    )
