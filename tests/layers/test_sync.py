"""Synchronized batch layers on the kernel: in stages, with the exchanges of the
definition between them, in two and three processes that compute by either.

Processes are slow to start: one run for each number of them computes everything
and saves it, and the tests look at what they find.
"""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from normalnorm.checks.layers.sync import in_processes
from normalnorm.layers import backends, sync
from normalnorm.layers.engines import native
from normalnorm.layers.engines.compiler import CompilerError
from normalnorm.layers.normality import _BatchNormalNorm
from normalnorm.layers.sync import Across, SyncBatchNormalNorm
from normalnorm.theory.gradient import Identity
from tests.peers import FOLLOWS

ROOT = Path(__file__).parents[2]
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


def step(
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


def refusal(act):
    try:
        act()
    except Exception as reason:
        return str(reason)
    return "accepted"


def twice():
    "A derivative of a derivative."
    u = torch.randn(4, 5, requires_grad=True)
    (g,) = torch.autograd.grad(
        SyncBatchNormalNorm(5, noise=0.0)(u).square().sum(),
        u,
        create_graph=True,
    )
    g.square().sum().backward()


def worker(rank, folder, world):
    shares = SHARES[world]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
    )
    torch.set_num_threads(1)
    native.library()
    # the definition stands in at once: trying torch.compile takes a minute
    backends._instead["native", "cpu"] = None
    mine, found = slice(sum(shares[:rank]), sum(shares[: rank + 1])), {}

    def run(road, shape, option, far=1e4, **more):
        u, g = (t[mine] for t in sample(shape, sum(shares), far))
        with (
            by(road, rank),
            mock.patch.object(native, "_run", wraps=native._run) as stages,
        ):
            values, counts = step(
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
    for road in (
        "definition",
        "first by definition",
        "others by definition",
        "no compiler",
    ):
        for case in FEW:
            run(road, *case, far=0.0)
    for dtype in (torch.bfloat16, torch.float16):
        for shape in SHAPES:
            run("kernel", shape, "noise", far=0.0, dtype=dtype)
    for shape in ("matrix", "images"):
        far = far_of(world, shape)
        run("kernel", shape, "noise", far, weight=False)
        run("kernel", shape, "noise", far, learned=False)
    for which in range(3, 8):
        with changed(which):
            run(f"declines at {which}", "images", "noise", far=0.0)
    found["twice"] = refusal(twice)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def saved(request):
    native.library()  # compiled once, before
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        return request.param, in_processes(
            request.param,
            "from tests.layers.test_sync import worker; "
            f"worker({{rank}}, '{{folder}}', {request.param})",
        )


def error(a, b):
    "The largest difference, in parts of the channel's largest number."
    a, b = (
        t.double().movedim(min(1, t.ndim - 1), 0).reshape(len(t), -1)
        if t.ndim == 1
        else t.double().transpose(0, 1).flatten(1)
        if t.ndim
        else t.double().view(1, 1)
        for t in (a, b)
    )
    return ((a - b).abs().amax(1) / b.abs().amax(1).clamp(min=1)).max().item()


def errors(world, parts, case, shape, option, far=1e4, **more):
    "Of all processes together, against one with everything, in float64."
    u, g = sample(shape, sum(SHARES[world]), far)
    dtype = more.pop("dtype", None)
    if dtype is not None:
        u, g = u.to(dtype), g.to(dtype)
    with backends.set_backend("eager"):
        truth, _ = step(Layer, u, g, OPTIONS[option], torch.float64, **more)
    found = {}
    for name, t in truth.items():
        of = [p[case][0][name] for p in parts]
        if name in ("output", "input"):
            found[name] = error(torch.cat(of), t)
        elif name in ("weight", "bias"):
            found[name] = error(sum(of), t)
        else:
            found[name] = max(error(x, t) for x in of)
    assert set(found) == set(parts[0][case][0])
    return found


@pytest.mark.parametrize(("shape", "option"), CASES)
def test_the_kernel_in_several_processes_is_one_in_float64(
    saved, shape, option
):
    world, parts = saved
    found = errors(
        world,
        parts,
        ("kernel", shape, option),
        shape,
        option,
        far_of(world, shape),
    )
    assert all(e < 2e-5 for e in found.values()), found


@pytest.mark.parametrize(("shape", "option"), FEW)
@pytest.mark.parametrize(
    "road",
    [
        "definition",
        "first by definition",
        "others by definition",
        "no compiler",
    ],
)
def test_each_process_by_its_own_road(saved, road, shape, option):
    "A process without the kernel neither waits nor is waited for."
    world, parts = saved
    found = errors(world, parts, (road, shape, option), shape, option, far=0.0)
    assert all(e < 2e-5 for e in found.values()), found
    if road == "others by definition":
        assert parts[0][road, shape, option][1] == EXPECTED[option]
        assert parts[1][road, shape, option][1][2] == 0
    else:
        assert parts[0][road, shape, option][1] == (*EXPECTED[option][:2], 0)


def test_exchanges_and_stages(saved):
    "As many exchanges by either road; an empty share has no stages."
    world, parts = saved
    for shape in SHAPES:
        for option, expected in EXPECTED.items():
            for share, p in zip(SHARES[world], parts):
                one = share == 0 or share == 1 and shape == "matrix"
                assert p["kernel", shape, option][1] == (
                    (*expected[:2], 0) if one else expected
                ), (shape, option)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(saved, shape, dtype):
    world, parts = saved
    case = "kernel", shape, "noise", ("dtype", dtype)
    found = errors(world, parts, case, shape, "noise", far=0.0, dtype=dtype)
    rough = 2 * torch.finfo(dtype).eps
    assert all(
        e < (rough if name in ("output", "input") else 3e-6)
        for name, e in found.items()
    ), found
    assert all(p[case][0]["output"].dtype is dtype for p in parts)
    assert parts[0][case][1][2] == 7


@pytest.mark.parametrize("shape", ["matrix", "images"])
def test_what_is_not_learned(saved, shape):
    """A frozen weight has no gradient; a frozen input needs no exchange
    backward.
    """
    world, parts = saved
    for more, counts in (
        ({"weight": False}, (4, 1, 7)),
        ({"learned": False}, (4, 0, 6)),
    ):
        case = "kernel", shape, "noise", *more.items()
        found = errors(
            world, parts, case, shape, "noise", far_of(world, shape), **more
        )
        assert all(e < 2e-5 for e in found.values()), found
        assert parts[0][case][1] == counts


@pytest.mark.parametrize("which", range(3, 8))
def test_a_kernel_that_declines_goes_on_by_the_definition(saved, which):
    "At whatever stage forward: the exchanges go on where they were."
    world, parts = saved
    case = f"declines at {which}", "images", "noise"
    found = errors(world, parts, case, *case[1:], far=0.0)
    assert all(e < 2e-5 for e in found.values()), found
    # without the moments the other stages are the kernel's; else it is asked
    # once more, for the statistics too, and declines where it did
    assert parts[0][case][1] == (4, 1, 7 if which == 3 else which - 1)


def test_refused_as_by_the_definition(saved):
    for p in saved[1]:
        assert "first derivatives only" in p["twice"]


def test_an_object_is_asked_twice(monkeypatch):
    "What is known by a name is not exchanged again, by either road."
    monkeypatch.setattr(sync.dist, "get_rank", lambda group=None: 0)
    exchanges = []
    monkeypatch.setattr(
        Across,
        "gather",
        lambda self, values: exchanges.append(values.dtype) or values[None],
    )
    u = torch.randn(40, 3).exp()
    unit, seed = Across(u, None, noise=True), torch.tensor(7)
    assert exchanges == [torch.uint8]
    found = []
    for name in ("auto", "eager", "auto"):
        with backends.set_backend(name):
            found.append(
                backends.normality_norm(u, unit, noise=0.4, seed=seed, offset=3)
            )
        assert exchanges == [torch.uint8] + [torch.float64] * 3
    for out, used in found[1:]:
        torch.testing.assert_close(out, found[0][0])
        torch.testing.assert_close(used.lmbda, found[0][1].lmbda)
    alone, _ = backends.normality_norm(u, (0,), noise=0.4, seed=seed, offset=3)
    torch.testing.assert_close(found[0][0], alone)


def test_memory_that_is_gone(monkeypatch):
    monkeypatch.setattr(sync.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(Across, "gather", lambda self, values: values[None])
    u = torch.randn(40, 3)
    unit = Across(u, None, noise=False)
    gone = torch.randn(40, 3)
    gone.untyped_storage().resize_(0)
    for act in (
        lambda: Across(gone, None, noise=False),
        lambda: backends.normality_norm(gone, unit),
    ):
        with pytest.raises(RuntimeError, match="is not there"):
            act()


def compiled_worker(rank, folder):
    "Eager and compiled, with noise: output, gradients, averages."
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    found = []
    for compiled in (False, True):
        torch.manual_seed(rank)
        layer = SyncBatchNormalNorm(5)
        u = torch.randn(3 + 2 * rank, 5, 3, requires_grad=True)
        out = (
            torch.compile(layer, fullgraph=True, backend="aot_eager")
            if compiled
            else layer
        )(u)
        out.sin().sum().backward()
        found.append(
            [out.detach(), u.grad, layer.weight.grad, *layer.buffers()]
        )
    theirs = refusal(lambda: torch.nn.SyncBatchNorm(5)(u))
    torch.save((found, theirs), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@FOLLOWS
def test_compiled_as_one_graph():
    """Shares of 3 and 5 rows, so that the second share's noise begins at no
    multiple of four. PyTorch's own layer is no reference here: it refuses
    tensors on a CPU, and on GPUs it breaks the graph (pytorch#156680).
    """
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        parts = in_processes(
            2,
            "import torch._dynamo, tests.layers.test_sync as t; "
            "t.compiled_worker({rank}, '{folder}')",
        )
    for (eager, compiled), theirs in parts:
        assert "expected input tensor to be on" in theirs
        for a, b in zip(compiled, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-6)
