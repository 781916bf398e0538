"""The synchronized decorrelated layers beyond their chapter: precision, faults,
groups of processes, errors.

Three of them compute everything, and the tests look at what they return.
"""

import copy

import pytest
import torch
import torch.distributed as dist

import normalnorm
from normalnorm.layers import sync
from normalnorm.layers.normality import BatchNormalNorm1d
from normalnorm.layers.sync import SyncBatchNormalNorm, convert_sync
from normalnorm.theory.newton import Over
from tests.layers.steps import refusal, share, step, together

SINGLE = {
    "plain": normalnorm.DecorrelatedBatchNorm2d,
    "normality": normalnorm.DecorrelatedBatchNormalNorm2d,
}
SHARES = (4, 0, 3)


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
def test_every_number_of_axes_through_the_exchange(kind, shape, exchanging):
    """Output, gradients and averages are those of the same batch with its
    positions in a row, by the layer for one process.
    """
    u, g = torch.randn(2, *shape, dtype=torch.float64)
    plain = kind is normalnorm.DecorrelatedBatchNorm2d
    single = kind(5, dtype=torch.float64, **({} if plain else {"noise": 0.0}))
    several = convert_sync(copy.deepcopy(single))
    in_a_row = lambda x: (
        x.transpose(0, 1).reshape(5, -1).T.reshape(-1, 5, 1, 1).contiguous()
    )
    found = run(several, u, g)
    for wrong in (
        u.reshape(5, -1)[:, 0],
        u.reshape(*shape, *(1,) * (6 - u.ndim)),
    ):
        assert "batch, channels" in refusal(lambda: several(wrong))
    torch.testing.assert_close(
        [*map(in_a_row, found), *several.buffers()],
        [*run(single, in_a_row(u), in_a_row(g)), *single.buffers()],
        rtol=1e-9,
        atol=1e-11,
    )


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
    return step(layer, u, g, leaves=())


def error(a, b):
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def everything(name, rank):
    mine, wide = share(rank, SHARES), {"dtype": torch.float64}
    exact_u, g = (
        skewed(sum(SHARES), torch.float64),
        torch.linspace(-1, 1, sum(SHARES) * 60).reshape(-1, 5, 4, 3).double(),
    )
    u, h = exact_u[mine].float(), g[mine].float()
    several = lambda **options: layers(name, **options)[1]

    def in_float32(shift):
        "Far from zero: against float64, beside the error of one process."
        at = (exact_u + shift).float()
        truth = run(layers(name)[0].double(), at.double(), g)
        alone = run(layers(name)[0], at, g.float())
        ours = run(several(), at[mine], h)
        return [
            (error(o, t[mine]), error(a, t))
            for o, a, t in zip(ours, alone, truth)
        ]

    def under_autocast():
        "Nothing is changed."
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = run(several(), u, h)
        return [error(*both) for both in zip(inside, run(several(), u, h))]

    def in_half():
        "The rounded float32 result."
        out = several()(u.bfloat16())
        expected = several()(u.bfloat16().float()).bfloat16()
        return str(out.dtype), error(out, expected)

    def not_finite():
        """One value in the last process: its group, and only that, is lost
        everywhere.
        """
        spoilt, layer = exact_u.clone(), several(**wide)
        spoilt[-1, 1, 0, 0] = torch.nan
        out, clean = layer(spoilt[mine]), several(**wide)(exact_u[mine])
        return (
            bool(out[:, :3].isnan().all()),
            error(out[:, 3:], clean[:, 3:]),
            bool((layer.running_covariance[:3] == torch.eye(3)).all()),
            bool((layer.running_mean[3:] != 0).all()),
        )

    def twice():
        """The result can be changed in place; the backward pass can be taken
        again.
        """
        x = exact_u[mine].clone().requires_grad_()
        out = several(affine=False, **wide)(x).relu_()
        backward = lambda: torch.autograd.grad(
            out, x, g[mine], retain_graph=True
        )
        return torch.equal(*backward(), *backward())

    def second_derivative():
        x = exact_u[mine].clone().requires_grad_()
        (first,) = torch.autograd.grad(
            several(**wide)(x).square().sum(), x, create_graph=True
        )
        return refusal(lambda: first.sum().backward())

    def drawn(**noise):
        "Whether none are, by one process; and whether several draw as many."
        states = [torch.get_rng_state()]
        for layer, x in zip(layers(name, **noise), (exact_u.float(), u)):
            torch.set_rng_state(states[0])
            layer(x)
            states.append(torch.get_rng_state())
        return torch.equal(*states[:2]), torch.equal(*states[1:])

    def in_a_group(pair):
        "Of the first and the last process."
        layer = convert_sync(layers(name, **wide)[0], pair)
        mine_too, rows = (
            (x[mine][:3] for x in (exact_u, g)),
            (torch.cat([x[:3], x[4:]]) for x in (exact_u, g)),
        )
        part = slice(0, 3) if rank == 0 else slice(3, 6)
        expected = run(layers(name, **wide)[0], *rows)
        return max(
            error(a, b[part]) for a, b in zip(run(layer, *mine_too), expected)
        )

    single, of_several = layers(name)
    pair, flat = dist.new_group([0, 2]), convert_sync(COUNTED[name](5))
    return {
        "float32": [in_float32(0.0), in_float32(1e4)],
        "autocast": under_autocast(),
        "bfloat16": in_half(),
        "not finite": not_finite(),
        "twice": twice(),
        "second derivative": second_derivative(),
        "generator": [
            drawn(**noise)
            for noise in (
                ({"noise": 0.0}, {"noise": 0.3})
                if name == "normality"
                else ({},)
            )
        ],
        # exchanges nothing: the first process alone calls it
        "evaluation": rank or error(of_several.eval()(u), single.eval()(u)),
        "group": 0.0 if rank == 1 else in_a_group(pair),
        # in all processes alike
        "errors": [
            refusal(lambda: flat(x))
            for x in (
                torch.randn(1 if rank == 0 else 0, 5),
                torch.randn(0, 5),
                torch.randn(3),
                torch.ones(3, 5, dtype=torch.int64),
            )
        ],
        "counted": flat.num_batches_tracked.item(),
    }


def draws_of_the_batch_layer():
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
    single, mine = COUNTED[kind](5, **options), share(rank, SHARES)
    several, generator = convert_sync(copy.deepcopy(single)), torch.Generator()
    generator.manual_seed(0)
    batches = [
        torch.randn(sum(SHARES), 5, generator=generator).double().exp() + i
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


def worker(rank):
    return {
        **{name: everything(name, rank) for name in SINGLE},
        "batch": draws_of_the_batch_layer(),
        "counting": {
            (kind, momentum): counting(kind, momentum, rank)
            for kind in COUNTED
            for momentum in (None, 0.1)
        },
    }


# --- what pytest looks at


@pytest.fixture(scope="module")
def saved():
    return together(len(SHARES), worker)


@pytest.fixture(params=SINGLE)
def found(saved, request):
    return [part[request.param] for part in saved]


def test_float32_is_as_good_as_one_process(found):
    for part in found:
        for ours, alone in sum(part["float32"], []):
            assert ours <= 2 * alone + 1e-5, (ours, alone)


def test_in_one_process_as_in_all(found):
    """Autocast changes nothing, half precision is rounded, what is not finite
    stays in its group, derivatives are first ones, evaluation and a group of
    processes wait for nobody else.
    """
    for part in found:
        assert part["autocast"] == [0.0, 0.0]
        assert part["bfloat16"] == ("torch.bfloat16", 0.0)
        group_is_nan, others, kept, moved = part["not finite"]
        assert group_is_nan and others < 1e-9 and kept and moved
        assert (
            part["twice"] and "once_differentiable" in part["second derivative"]
        )
        assert part["group"] < 1e-9
    assert found[0]["evaluation"] == 0.0


def test_the_generator_moves_as_in_one_process(saved):
    for part in saved:
        assert part["plain"]["generator"] == [(True, True)] and part["batch"]
        assert part["normality"]["generator"] == [(True, True), (False, True)]


def test_errors_are_the_same_everywhere(found):
    for part in found:
        one, none, axes, integers = part["errors"]
        assert one.startswith(
            "ValueError: a batch statistic needs more than one value "
            "per channel when training, given 1 in all"
        )
        assert "given 0 in all" in none and "batch, channels" in axes
        assert part["counted"] == 0 and integers.startswith("TypeError")


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


def test_an_over_of_all_processes_tells_inputs_apart(exchanging):
    """Variance and mean are those of what is asked for, not of the input it was
    made of, unless that is asked for by name.
    """
    x = torch.randn(9, 3)
    unit = sync.Across(x, None, noise=False)
    for value, name in ((x, "input"), (x.exp(), ""), (3 * x + 1, "other")):
        torch.testing.assert_close(
            unit.var_mean(value, name=name), Over((0,)).var_mean(value)
        )
    assert unit.seed is None
    assert sync.Across(x, None, noise=True).seed.dtype is torch.int64
