"""The synchronized decorrelated layers beyond their chapter: four processes,
precision, faults, groups of processes, errors.

Processes are slow to start: three of them compute everything (this file run as
a script), and the tests look at what they saved.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import normalnorm
from normalnorm.checks.layers.sync_decorrelated import (
    CASES,
    compare_decorrelated,
)
from normalnorm.layers import sync
from normalnorm.layers.normality import BatchNormalNorm1d
from normalnorm.layers.sync import SyncBatchNormalNorm, convert_sync
from normalnorm.theory.newton import Over

SINGLE = {
    "plain": normalnorm.DecorrelatedBatchNorm2d,
    "normality": normalnorm.DecorrelatedBatchNormalNorm2d,
}
HERE = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [
            str(Path(normalnorm.__file__).parents[1]),
            os.environ.get("PYTHONPATH", ""),
        ]
    ),
}
SHARES = (4, 0, 3)


def test_four_processes_one_of_them_empty_are_one():
    """All cases of the chapter, other shares: outputs, gradients, buffers,
    noise.
    """
    checked = 0
    for case, found in compare_decorrelated([3, 0, 2, 1]):
        assert all(v < 1e-6 for v in found.values()), (case, found)
        checked += len(found)
    assert checked > 6 * len(CASES)


@pytest.mark.parametrize(
    "shape",
    [(11, 5), (4, 5, 7), (3, 5, 4, 3), (2, 5, 3, 2, 3)],
    ids=["(B, C)", "(B, C, L)", "(B, C, H, W)", "(B, C, D, H, W)"],
)
@pytest.mark.parametrize(
    "kind",
    [
        normalnorm.BatchNormalNorm2d,
        normalnorm.DecorrelatedBatchNorm2d,
        normalnorm.DecorrelatedBatchNormalNorm2d,
    ],
)
def test_every_number_of_axes_through_the_exchange(
    kind, shape, tmp_path, monkeypatch
):
    """A group of one process that exchanges all the same: output, gradients and
    averages are those of the same batch with its positions in a row, by the
    layer for one process.
    """
    u, g = torch.randn(
        2,
        *shape,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(4),
    )
    single = kind(
        5,
        dtype=torch.float64,
        **(
            {} if kind is normalnorm.DecorrelatedBatchNorm2d else {"noise": 0.0}
        ),
    )
    several = convert_sync(copy.deepcopy(single))
    monkeypatch.setattr(type(several), "_exchanges", lambda self: True)
    in_a_row = lambda x: (
        x.transpose(0, 1).reshape(5, -1).T.reshape(-1, 5, 1, 1).contiguous()
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        found = run(several, u, g)
        for wrong in (
            u.reshape(5, -1)[:, 0],
            u.reshape(*shape, *(1,) * (6 - u.ndim)),
        ):
            with pytest.raises(ValueError, match="batch, channels"):
                several(wrong)
    finally:
        dist.destroy_process_group()
    for mine, one in zip(found, run(single, in_a_row(u), in_a_row(g))):
        torch.testing.assert_close(in_a_row(mine), one, rtol=1e-9, atol=1e-11)
    for (name, mine), one in zip(several.named_buffers(), single.buffers()):
        torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-11, msg=name)


# --- what each of three processes does


def skewed(rows, dtype=torch.float32):
    torch.manual_seed(3)
    u = torch.randn(rows, 5, 4, 3, dtype=torch.float64).exp()
    return torch.einsum(
        "bchw,cd->bdhw", u, torch.randn(5, 5, dtype=torch.float64)
    ).to(dtype)


def layers(name, **options):
    """The layer for one process and its synchronized form, with parameters that
    are not those of fresh ones.
    """
    options = {
        "group_size": 3,
        **({"noise": 0.0} if name == "normality" else {}),
        **options,
    }
    single = SINGLE[name](5, **options)
    with torch.no_grad():
        for p in single.parameters():
            p.copy_(torch.linspace(0.5, 1.5, 5))
    return single, convert_sync(
        copy.deepcopy(single), options.pop("process_group", None)
    )


def run(layer, u, g):
    u = u.clone().requires_grad_()
    out = layer(u)
    (out * g).sum().backward()
    return out.detach(), u.grad


def error(a, b):
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def refusal(act):
    try:
        act()
    except Exception as reason:
        return f"{type(reason).__name__}: {reason}"
    return "accepted"


def everything(name, rank):
    mine, found = slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1])), {}
    exact_u, g = (
        skewed(sum(SHARES), torch.float64),
        torch.linspace(-1, 1, sum(SHARES) * 60).reshape(-1, 5, 4, 3).double(),
    )

    # float32, far from zero: against float64, beside the error of one process
    for shift in (0.0, 1e4):
        u = (exact_u + shift).float()
        truth = run(layers(name)[0].double(), u.double(), g)
        alone, ours = (
            run(layer, x, y)
            for layer, x, y in zip(
                layers(name), (u, u[mine]), (g.float(), g[mine].float())
            )
        )
        found["float32", shift] = [
            (error(o, t[mine]), error(a, t))
            for o, a, t in zip(ours, alone, truth)
        ]

    # autocast changes nothing; half precision is the rounded float32 result
    u, h = exact_u[mine].float(), g[mine].float()
    plain = layers(name)[1](u)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(layers(name)[1], u, h)
    found["autocast"] = (
        error(inside[0], plain),
        error(inside[1], run(layers(name)[1], u, h)[1]),
    )
    half = u.bfloat16()
    out = layers(name)[1](half)
    found["bfloat16"] = (
        str(out.dtype),
        error(out, layers(name)[1](half.float()).bfloat16()),
    )

    # one value that is not finite, in the last process: its group, and only
    # that, everywhere
    spoilt = skewed(sum(SHARES), torch.float64)
    spoilt[-1, 1, 0, 0] = torch.nan
    layer = layers(name, dtype=torch.float64)[1]
    out = layer(spoilt[mine])
    clean = layers(name, dtype=torch.float64)[1](exact_u[mine])
    kept, moved = (
        bool((layer.running_covariance[:3] == torch.eye(3)).all()),
        bool((layer.running_mean[3:] != 0).all()),
    )
    found["not finite"] = (
        bool(out[:, :3].isnan().all()),
        error(out[:, 3:], clean[:, 3:]),
        kept,
        moved,
    )

    # the result can be changed in place; the backward pass can be taken twice;
    # second derivatives are refused
    layer = nn.Sequential(
        layers(name, affine=False, dtype=torch.float64)[1],
        nn.ReLU(inplace=True),
    )
    x = exact_u[mine].clone().requires_grad_()
    out = layer(x)
    twice = [
        torch.autograd.grad(out, x, g[mine], retain_graph=True)[0]
        for _ in range(2)
    ]
    found["twice"] = torch.equal(*twice)
    (first,) = torch.autograd.grad(
        layers(name, dtype=torch.float64)[1](x).square().sum(),
        x,
        create_graph=True,
    )
    found["second derivative"] = refusal(lambda: first.sum().backward())

    # without noise no random number is drawn; with it, as many as in one
    # process
    drawn = []
    for noise in (0.0, 0.3) if name == "normality" else (None,):
        after = []
        for layer, x in zip(
            layers(name, **({} if noise is None else {"noise": noise})),
            (exact_u.float(), exact_u[mine].float()),
        ):
            torch.manual_seed(1)
            before = torch.get_rng_state()
            layer(x)
            after.append(torch.get_rng_state())
        drawn.append((torch.equal(before, after[0]), torch.equal(*after)))
    found["generator"] = drawn

    # evaluation exchanges nothing: the first process alone calls it
    single, several = layers(name)
    if rank == 0:
        found["evaluation"] = error(several.eval()(u), single.eval()(u))

    # a group of the first and the last process
    pair = dist.new_group([0, 2])
    if rank != 1:
        layer = convert_sync(layers(name, dtype=torch.float64)[0], pair)
        out, grad = run(layer, exact_u[mine][:3], g[mine][:3])
        rows = torch.cat([exact_u[:3], exact_u[4:]]), torch.cat([g[:3], g[4:]])
        expected = run(layers(name, dtype=torch.float64)[0], *rows)
        part = slice(0, 3) if rank == 0 else slice(3, 6)
        found["group"] = max(
            error(out, expected[0][part]), error(grad, expected[1][part])
        )

    # errors, in all processes alike
    flat = convert_sync(
        nn.Sequential(
            {
                "plain": normalnorm.DecorrelatedBatchNorm1d,
                "normality": normalnorm.DecorrelatedBatchNormalNorm1d,
            }[name](5)
        )
    )
    found["one value"] = refusal(
        lambda: flat(torch.randn(1 if rank == 0 else 0, 5))
    )
    found["no value"] = refusal(lambda: flat(torch.randn(0, 5)))
    found["counted"] = flat[0].num_batches_tracked.item()
    found["axes"] = refusal(lambda: flat(torch.randn(3)))
    found["integers"] = refusal(
        lambda: flat(torch.ones(3, 5, dtype=torch.int64))
    )
    return found


def draws_of_the_batch_layer(rank):
    "The same promise for SyncBatchNormalNorm."
    after = []
    for layer in (
        SyncBatchNormalNorm(3, noise=0.0),
        BatchNormalNorm1d(3, noise=0.0),
    ):
        torch.manual_seed(2)
        layer(torch.arange(12.0).reshape(4, 3))
        after.append(torch.get_rng_state())
    return torch.equal(*after)


COUNTED = {
    "batch": BatchNormalNorm1d,
    "plain": normalnorm.DecorrelatedBatchNorm1d,
    "normality": normalnorm.DecorrelatedBatchNormalNorm1d,
}


def counting(kind, momentum, rank):
    """Four batches, of which the second has a NaN in the last process's share;
    each followed by one that is refused, in the number of channels, and one
    that is empty.

    The number of batches that counted; how far the mean is from that of the
    finite batches, and all averages from those of a layer for one process that
    is given whole batches.
    """
    options = {
        "momentum": momentum,
        "dtype": torch.float64,
        **({} if kind == "plain" else {"noise": 0.0}),
        **({} if kind == "batch" else {"group_size": 3}),
    }
    single, mine = (
        COUNTED[kind](5, **options),
        slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1])),
    )
    several = convert_sync(copy.deepcopy(single))
    batches = [
        torch.randn(
            sum(SHARES),
            5,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(i),
        ).exp()
        + i
        for i in range(4)
    ]
    batches[1][-1, 2] = torch.nan
    for batch in batches:
        several(batch[mine]), single(batch)
        refused = (
            refusal(lambda: several(torch.zeros(4, 6, dtype=torch.float64))),
            refusal(lambda: several(batch[:0])),
        )
    mean = torch.stack([batches[i] for i in (0, 2, 3)]).mean((0, 1))
    return {
        "count": several.num_batches_tracked.item(),
        "refused": refused,
        "mean": error(several.running_mean, mean),
        "one process": max(
            error(a, b) for a, b in zip(several.buffers(), single.buffers())
        ),
    }


def main(rank, folder):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=len(SHARES),
    )
    torch.set_num_threads(1)
    torch.save(
        {
            **{name: everything(name, rank) for name in SINGLE},
            "batch": draws_of_the_batch_layer(rank),
            "counting": {
                (kind, momentum): counting(kind, momentum, rank)
                for kind in COUNTED
                for momentum in (None, 0.1)
            },
        },
        f"{folder}/{rank}.pt",
    )
    dist.destroy_process_group()


# --- what pytest looks at


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(rank), str(folder)],
            env=HERE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(len(SHARES))
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(SHARES), (
        errors
    )
    return [
        torch.load(folder / f"{rank}.pt", weights_only=True)
        for rank in range(len(SHARES))
    ]


@pytest.fixture(params=SINGLE)
def found(saved, request):
    return [part[request.param] for part in saved]


def test_float32_is_as_good_as_one_process(found):
    for part in found:
        for shift in (0.0, 1e4):
            for ours, alone in part["float32", shift]:
                assert ours <= 2 * alone + 1e-5, (shift, ours, alone)


def test_autocast_and_half_precision(found):
    for part in found:
        assert part["autocast"] == (0.0, 0.0) and part["bfloat16"] == (
            "torch.bfloat16",
            0.0,
        )


def test_what_is_not_finite_stays_in_its_group_in_all_processes(found):
    for part in found:
        group_is_nan, others, kept, moved = part["not finite"]
        assert group_is_nan and others < 1e-9 and kept and moved


def test_in_place_and_derivatives(found):
    for part in found:
        assert (
            part["twice"] and "once_differentiable" in part["second derivative"]
        )


def test_the_generator_moves_as_in_one_process(saved):
    for part in saved:
        assert (
            part["plain"]["generator"] == [(True, True)]
            and part["normality"]["generator"] == [(True, True), (False, True)]
            and part["batch"]
        )


def test_evaluation_exchanges_nothing(found):
    assert found[0]["evaluation"] == 0.0


def test_a_group_of_processes(found):
    assert (
        "group" not in found[1]
        and max(found[0]["group"], found[2]["group"]) < 1e-9
    )


def test_errors_are_the_same_everywhere(found):
    for part in found:
        assert (
            part["one value"].startswith(
                "ValueError: a batch statistic needs more than one value "
                "per channel when training, given 1 in all"
            )
            and "given 0 in all" in part["no value"]
        )
        assert (
            part["counted"] == 0
            and "batch, channels" in part["axes"]
            and part["integers"].startswith("TypeError")
        )


def test_batches_that_count_in_all_processes(saved):
    """With momentum=None the average is that of the batches that are finite
    everywhere, and their number is the same in each process; with a number, all
    that were normalized count.
    """
    for part in saved:
        for (kind, momentum), found in part["counting"].items():
            assert found["one process"] < 1e-12 and found["count"] == (
                3 if momentum is None else 4
            ), (kind, momentum, found)
            assert all(
                text.startswith("ValueError") for text in found["refused"]
            ), found
            assert momentum is not None or found["mean"] < 1e-12, (kind, found)


def test_alone_it_is_the_layer_for_one_process():
    torch.manual_seed(0)
    u = torch.randn(6, 5, 4).exp()
    for ours, theirs in (
        (
            normalnorm.SyncDecorrelatedBatchNorm,
            normalnorm.DecorrelatedBatchNorm1d,
        ),
        (
            normalnorm.SyncDecorrelatedBatchNormalNorm,
            normalnorm.DecorrelatedBatchNormalNorm1d,
        ),
    ):
        found = []
        for layer in (ours(5, num_groups=1), theirs(5, num_groups=1)):
            torch.manual_seed(1)
            found.append((layer(u), layer.running_covariance))
        torch.testing.assert_close(*found, rtol=0, atol=0)
        assert list(ours(5).state_dict()) == list(theirs(5).state_dict())
        for size in ((4, 5), (4, 5, 3, 2), (4, 5, 3, 2, 2)):
            assert ours(5)(torch.randn(size)).shape == size
    with pytest.raises(NotImplementedError, match="steps=2"):
        normalnorm.SyncDecorrelatedBatchNormalNorm(5, steps=2)


@pytest.mark.parametrize(
    "shape", [(7, 3), (7, 3, 5), (7, 3, 5, 2), (4, 3, 2, 2, 3)]
)
def test_synchronized_batch_norm_alone_takes_every_number_of_axes(shape):
    """What the layer for one process gives, for (B, C), (B, C, L) and more; one
    axis or six are refused.
    """
    u = torch.randn(shape).exp()
    ours, theirs = (
        SyncBatchNormalNorm(3, noise=0.0),
        BatchNormalNorm1d(3, noise=0.0),
    )
    torch.testing.assert_close(
        ours(u), theirs(u.reshape(*shape[:2], -1)).reshape(shape)
    )
    torch.testing.assert_close(ours.running_lambda, theirs.running_lambda)
    for wrong in (torch.randn(3), torch.randn(2, 3, 1, 1, 1, 2)):
        with pytest.raises(ValueError, match="batch, channels"):
            ours(wrong)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])


def test_an_over_of_all_processes_tells_inputs_apart(monkeypatch):
    """Variance and mean are those of what is asked for, not of the input it was
    made of, unless that is asked for by name; one process, without exchange.
    """
    monkeypatch.setattr(sync.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(
        sync.Across, "gather", lambda self, values: values[None]
    )
    torch.manual_seed(0)
    x = torch.randn(9, 3)
    unit = sync.Across(x, None, noise=False)
    for value, name in ((x, "input"), (x.exp(), ""), (3 * x + 1, "other")):
        for found, expected in zip(
            unit.var_mean(value, name=name), Over((0,)).var_mean(value)
        ):
            torch.testing.assert_close(found, expected)
    assert (
        unit.seed is None
        and sync.Across(x, None, noise=True).seed.dtype is torch.int64
    )
