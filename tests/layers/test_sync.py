"""Synchronized batch layers on the kernel: in stages, with the exchanges of the
definition between them, in two and three processes that compute by either.

One run for each number of them computes everything, and the tests look at it.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from normalnorm.layers import backends, sync
from normalnorm.layers.engines import native
from normalnorm.layers.engines.compiler import CompilerError
from normalnorm.layers.normality import _BatchNormalNorm
from normalnorm.layers.sync import Across, SyncBatchNormalNorm
from normalnorm.theory.gradient import Identity
from tests.layers.steps import refusal, share, step, together
from tests.peers import FOLLOWS

SHARES = {2: (3, 5), 3: (4, 0, 1)}
# what follows the batch axis: short runs, long ones, none
SHAPES = {
    "matrix": (5,),
    "runs": (5, 3, 3),
    "images": (5, 40, 43),
    "channels last": (5, 6, 7),
}
OPTIONS = {
    "noise": {},
    "quiet": {"noise": 0.0},
    "unscaled": {"noise_kind": "unscaled"},
    "dropout": {"noise_kind": "dropout"},
    "half way": {"alpha": 0.5},
    "no affine": {"affine": False},
    "no bias": {"bias": False},
    "no epsilon": {"eps": 0.0},
    "all batches": {"momentum": None},
    "untracked": {"track_running_stats": False},
    "identity": {"gaussianizer": Identity()},
}
# exchanges forward and backward, stages of the kernel
EXPECTED = {
    "noise": (4, 1, 7),
    "quiet": (2, 1, 5),
    "unscaled": (2, 1, 5),
    "dropout": (2, 1, 5),
    "identity": (3, 1, 6),
}
FEW = [
    (shape, option)
    for shape in ("runs", "images")
    for option in ("noise", "quiet", "dropout", "identity")
]
CASES = [(shape, option) for shape in SHAPES for option in OPTIONS]


class Layer(_BatchNormalNorm):
    "For one process, of any number of axes."

    _axes = SyncBatchNormalNorm._axes
    _expected = SyncBatchNormalNorm._expected


def sample(shape, rows, far=1e4):
    """A batch and an upstream gradient, with a channel that is constant, one
    that is far from zero, and skewed ones.
    """
    torch.manual_seed(1)
    u, g = torch.randn(2, rows, *SHAPES[shape])
    u = u.exp()
    u[:, 0], u[:, 1] = 3.0, u[:, 1] + far
    return u, g


def far_of(world, shape):
    """How far from zero a channel lies: one element is no unit for the kernel,
    and the definition loses what the mean has too much.
    """
    return 0.0 if world == 3 and shape == "matrix" else 1e4


def one_step(
    kind,
    u,
    g,
    options,
    dtype=torch.float32,
    last=False,
    weight=True,
    learned=True,
):
    "Whatever can be compared, and the exchanges forward and backward."
    layer = kind(5, dtype=None if dtype.itemsize == 2 else dtype, **options)
    for p in layer.parameters():
        p.detach().copy_(torch.linspace(0.5, 1.5, 5))
    if layer.weight is not None:
        layer.weight.requires_grad_(weight)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(5 + rank)  # the first process's counts
    mine = u.to(dtype, copy=True)
    if last:
        mine = mine.contiguous(memory_format=torch.channels_last)
    mine.requires_grad_(learned)
    with mock.patch(
        "torch.distributed.all_gather", wraps=dist.all_gather
    ) as gathers:
        out = layer(mine)
        forward = gathers.call_count
        out.backward(g.to(dtype))
        counts = forward, gathers.call_count - forward
    found = {
        "output": out.detach(),
        "input": mine.grad,
        **{name: p.grad for name, p in layer.named_parameters()},
        **{name: b for name, b in layer.named_buffers()},
    }
    return {name: t for name, t in found.items() if t is not None}, counts


def by(road, rank):
    "How this process computes: by the kernel or by the definition."
    if road == "no compiler" and rank == 0:
        error = CompilerError("not here")
        return mock.patch.multiple(
            native, _library=lambda: error, available=lambda: False
        )
    eager = {
        "definition": True,
        "first by definition": rank == 0,
        "others by definition": rank > 0,
    }.get(road, False)
    return backends.set_backend("eager" if eager else "auto")


def changed(which):
    "A kernel that finds, at a stage, that it cannot."
    real = native._run

    def run(what, *rest, **more):
        if what == which:
            raise native.Different("not this time")
        real(what, *rest, **more)

    return mock.patch.object(native, "_run", run)


def twice():
    "A derivative of a derivative."
    u = torch.randn(4, 5, requires_grad=True)
    (g,) = torch.autograd.grad(
        SyncBatchNormalNorm(5, noise=0.0)(u).square().sum(),
        u,
        create_graph=True,
    )
    g.square().sum().backward()


ROADS = [
    "definition",
    "first by definition",
    "others by definition",
    "no compiler",
]


def worker(rank, shares):
    native.library()
    # the definition stands in at once: trying torch.compile takes a minute
    backends._instead["native", "cpu"] = None
    world, found = len(shares), {}

    def run(road, shape, option, far=1e4, **more):
        u, g = (t[share(rank, shares)] for t in sample(shape, sum(shares), far))
        with (
            by(road, rank),
            mock.patch.object(native, "_run", wraps=native._run) as stages,
        ):
            values, counts = one_step(
                SyncBatchNormalNorm,
                u,
                g,
                OPTIONS[option],
                last=shape == "channels last",
                **more,
            )
        found[(road, shape, option, *more.items())] = (
            values,
            (*counts, stages.call_count),
        )

    for shape, option in CASES:
        run("kernel", shape, option, far_of(world, shape))
    for road in ROADS:
        for case in FEW:
            run(road, *case, far=0.0)
    for dtype in (torch.bfloat16, torch.float16):
        for shape in SHAPES:
            run("kernel", shape, "noise", far=0.0, dtype=dtype)
    for shape in ("matrix", "images"):
        for more in ({"weight": False}, {"learned": False}):
            run("kernel", shape, "noise", far_of(world, shape), **more)
    for which in range(3, 8):
        with changed(which):
            run(f"declines at {which}", "images", "noise", far=0.0)
    return found | {"twice": refusal(twice)}


@pytest.fixture(scope="module", params=SHARES)
def saved(request):
    native.library()  # compiled once, before
    shares = SHARES[request.param]
    return request.param, together(request.param, worker, shares)


def error(a, b):
    "The largest difference, in parts of the channel's largest number."
    a, b = (
        t.double().reshape(-1, 1)
        if t.ndim < 2
        else t.double().transpose(0, 1).flatten(1)
        for t in (a, b)
    )
    return ((a - b).abs().amax(1) / b.abs().amax(1).clamp(min=1)).max().item()


def errors(saved, case, shape, option, far=1e4, dtype=None, **more):
    "Of all processes together, against one with everything, in float64."
    world, parts = saved
    u, g = (t.to(dtype) for t in sample(shape, sum(SHARES[world]), far))
    with backends.set_backend("eager"):
        truth, _ = one_step(Layer, u, g, OPTIONS[option], torch.float64, **more)
    found = {}
    for name, t in truth.items():
        of = [p[case][0][name] for p in parts]
        if name in ("output", "input"):
            of = [torch.cat(of)]
        elif name in ("weight", "bias"):
            of = [sum(of)]
        found[name] = max(error(x, t) for x in of)
    assert set(found) == set(parts[0][case][0])
    return found


def close(saved, case, far, **more):
    found = errors(saved, (*case, *more.items()), *case[1:], far, **more)
    return all(e < 2e-5 for e in found.values()), found


@pytest.mark.parametrize(("shape", "option"), CASES)
def test_the_kernel_in_several_processes_is_one_in_float64(
    saved, shape, option
):
    holds, found = close(
        saved, ("kernel", shape, option), far_of(saved[0], shape)
    )
    assert holds, found


@pytest.mark.parametrize(("shape", "option"), FEW)
@pytest.mark.parametrize("road", ROADS)
def test_each_process_by_its_own_road(saved, road, shape, option):
    "A process without the kernel neither waits nor is waited for."
    case, (_, parts) = (road, shape, option), saved
    holds, found = close(saved, case, 0.0)
    assert holds, found
    if road == "others by definition":
        assert parts[0][case][1] == EXPECTED[option]
        assert parts[1][case][1][2] == 0
    else:
        assert parts[0][case][1] == (*EXPECTED[option][:2], 0)


def test_exchanges_and_stages(saved):
    "As many exchanges by either road; an empty share has no stages."
    world, parts = saved
    for shape in SHAPES:
        for option, expected in EXPECTED.items():
            for rows, p in zip(SHARES[world], parts):
                one = rows == 0 or rows == 1 and shape == "matrix"
                assert p["kernel", shape, option][1] == (
                    (*expected[:2], 0) if one else expected
                ), (shape, option)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(saved, shape, dtype):
    case = "kernel", shape, "noise", ("dtype", dtype)
    found = errors(saved, case, shape, "noise", far=0.0, dtype=dtype)
    rough = 2 * torch.finfo(dtype).eps
    assert all(
        e < (rough if name in ("output", "input") else 3e-6)
        for name, e in found.items()
    ), found
    assert all(p[case][0]["output"].dtype is dtype for p in saved[1])
    assert saved[1][0][case][1][2] == 7


@pytest.mark.parametrize("shape", ["matrix", "images"])
@pytest.mark.parametrize(
    "what, counts", [("weight", (4, 1, 7)), ("learned", (4, 0, 6))]
)
def test_what_is_not_learned(saved, shape, what, counts):
    """A frozen weight has no gradient; a frozen input needs no exchange
    backward.
    """
    case = "kernel", shape, "noise"
    holds, found = close(saved, case, far_of(saved[0], shape), **{what: False})
    assert holds, found
    assert saved[1][0][(*case, (what, False))][1] == counts


@pytest.mark.parametrize("which", range(3, 8))
def test_a_kernel_that_declines_goes_on_by_the_definition(saved, which):
    "At whatever stage forward: the exchanges go on where they were."
    case = f"declines at {which}", "images", "noise"
    holds, found = close(saved, case, 0.0)
    assert holds, found
    # without the moments the other stages are the kernel's; else those before
    # the one that declines: it is asked once
    assert saved[1][0][case][1] == (4, 1, 7 if which == 3 else which - 2)


def test_refused_as_by_the_definition(saved):
    for p in saved[1]:
        assert "first derivatives only" in p["twice"]


@pytest.fixture
def alone(monkeypatch):
    "One process, which exchanges all the same; what it has told."
    told = []
    monkeypatch.setattr(sync.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(
        Across,
        "gather",
        lambda self, values: told.append(values.dtype) or values[None],
    )
    return told


def test_an_object_is_asked_twice(alone):
    "What is known by a name is not exchanged again, by either road."
    u = torch.randn(40, 3).exp()
    unit, seed = Across(u, None, noise=True), torch.tensor(7)
    assert alone == [torch.uint8]
    more = dict(noise=0.4, seed=seed, offset=3)
    found = []
    for name in ("auto", "eager", "auto"):
        with backends.set_backend(name):
            found.append(backends.normality_norm(u, unit, **more))
        assert alone == [torch.uint8] + [torch.float64] * 3
    for out, used in found[1:]:
        torch.testing.assert_close(out, found[0][0])
        torch.testing.assert_close(used.lmbda, found[0][1].lmbda)
    torch.testing.assert_close(
        found[0][0], backends.normality_norm(u, (0,), **more)[0]
    )


def test_memory_that_is_gone(alone):
    unit, gone = Across(torch.randn(40, 3), None, noise=False), torch.ones(40)
    gone = gone.expand(3, 40).contiguous().T
    gone.untyped_storage().resize_(0)
    for act in (
        lambda: Across(gone, None, noise=False),
        lambda: backends.normality_norm(gone, unit),
    ):
        assert "is not there" in refusal(act)


def compiled_worker(rank):
    "Eager and compiled, with noise: output, gradients, averages."
    found = []
    for compiled in (False, True):
        torch.manual_seed(rank)
        layer = SyncBatchNormalNorm(5)
        u = torch.randn(3 + 2 * rank, 5, 3)
        run = torch.compile(layer, fullgraph=True, backend="aot_eager")
        values = step(run if compiled else layer, u, leaves=[layer.weight])
        found.append([*values, *layer.buffers()])
    return found, refusal(lambda: torch.nn.SyncBatchNorm(5)(u))


@FOLLOWS
def test_compiled_as_one_graph():
    """Shares of 3 and 5 rows, so that the second share's noise begins at no
    multiple of four. PyTorch's own layer is no reference here: it refuses
    tensors on a CPU, and on GPUs it breaks the graph (pytorch#156680).
    """
    for (eager, compiled), theirs in together(
        2, compiled_worker, also="torch._dynamo"
    ):
        assert "expected input tensor to be on" in theirs
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=5e-6)
