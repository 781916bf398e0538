"""Measure what a GPU does with the layers, within a number of minutes, and keep
it in results/gpu, a file for each card.

    make gpu MINUTES=9
    PYTHONPATH=. python -m benchmarks.gpu --minutes 9

A row is kept as soon as it is there, and what is there from this code, card,
PyTorch and Triton is not measured again: the same command goes on. Nothing is
fetched, nbdev is not needed. Without a GPU every part runs at a tiny size, with
the kernels in Triton's interpreter; such rows are marked, say nothing of speed,
and go to _build/gpu.
"""

import argparse
import copy
import importlib
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from unittest import mock

import torch

CUDA = torch.cuda.is_available()
if not CUDA:  # before anything imports Triton
    os.environ["TRITON_INTERPRET"] = "1"
# the processes that compile are ours
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
DEVICE = torch.device("cuda" if CUDA else "cpu")
CARD = torch.cuda.get_device_name() if CUDA else "cpu, interpreted"

from torch import Tensor, nn  # noqa: E402

from benchmarks import files, measure  # noqa: E402
from normalnorm import (  # noqa: E402
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    GroupNormalNorm,
    InstanceNormalNorm2d,
    LayerNormalNorm,
)
from normalnorm.layers import noise as of_noise  # noqa: E402
from normalnorm.layers.backends import Normalization, set_backend  # noqa: E402
from normalnorm.layers.engines import compiled, gpu  # noqa: E402
from tools.records import digest, hashes  # noqa: E402
from tools.rows import trials  # noqa: E402

Row = dict[str, object]
Job = tuple[Row, Callable[[], Row]]
# of output and input gradient, and of what is kept in float32, parameters'
# gradients and averages, relative to the largest value
LIMITS = {
    torch.float32: (4e-6, 2e-5),
    torch.bfloat16: (9e-3, 2e-5),
    torch.float16: (2e-3, 2e-5),
}
DTYPES = torch.float32, torch.bfloat16  # that are timed
LAST = torch.channels_last
# as many processes compile at a time; what is timed runs alone
SEVERAL = 14
SEED = 2**61 + 12345
brief = not CUDA  # nothing is to be timed


@cache
def code(part: str) -> str:
    "A hash of what a row is about: the layers, what they use, the ceilings."
    ceilings = ["benchmarks/gpu/ceilings.py"] * (part == "ceilings")
    layers = ["normalnorm/layers/**/*.py", "normalnorm/theory/**/*.py"]
    return digest(hashes(layers + ceilings))


def environment() -> Row:
    try:
        version = importlib.import_module("triton").__version__
    except ImportError:
        version = None
    about = torch.cuda.get_device_properties(0) if CUDA else None
    return {
        "device": CARD,
        "torch": torch.__version__,
        "triton": version,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
    } | (
        {}
        if about is None
        else {
            "capability": [about.major, about.minor],
            "multiprocessors": about.multi_processor_count,
            "memory": about.total_memory,
        }
    )


def clock() -> float:
    "The time when all that was asked of the device is done."
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def compared(ours: Callable, theirs: Callable, pairs: int = 30) -> Row:
    return measure.ratio(
        ours,
        theirs,
        2 if brief else pairs,
        limit=0.0 if brief else 1.0,
        fewest=2,
        clock=clock,
        warm=1 if brief else 3,
    )


def numbers(shape, dtype, last: bool = False) -> tuple[Tensor, Tensor]:
    "An input and a gradient, the same on each device."
    draw = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=draw) for _ in range(2))
    made = [t.to(DEVICE, dtype) for t in (x.exp() + 1, dy)]
    x, dy = (t.to(memory_format=LAST) for t in made) if last else made
    return x, dy


def seed(device=DEVICE) -> Tensor:
    return torch.tensor(SEED, device=device)


@contextmanager
def only(who: str, whole: bool = True):
    """An engine computes, or it is an error; unless `whole`, the definition
    what the kernels do not cover.
    """

    def offer(problem):
        if (work := gpu._offer(problem)) is None:
            raise RuntimeError("the kernels do not cover this")
        return work

    compiled._refused.clear()
    name = who if who in ("eager", "compiled", "gpu") else "auto"
    strict = {Normalization: offer} if whole else {}
    with mock.patch.dict(gpu.ENGINE.offers, strict), set_backend(name):
        yield
    if who == "compiled" and (
        why := compiled._trouble(DEVICE) or compiled._refused
    ):
        raise RuntimeError(f"torch.compile did not compute this: {why}")


@contextmanager
def poisoned():
    "What is allocated and not written holds NaN."
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def compare(
    layer: nn.Module, batches: list, dy: Tensor, who: str, whole: bool = True
) -> tuple[list[float], bool]:
    """How far output, gradients and averages, batch after batch, lie from the
    definition in float64 on the CPU, relative to the largest value of each,
    with noise from the same seed; and whether they have the same bits again.

    `batches`: inputs, each with whether the layer trains.
    """

    def run(layer, device, dtype):
        found = []
        for u, training in batches:
            layer.train(training)
            u = u.to(device, dtype).requires_grad_()
            y = layer(u)
            wanted = [u, *layer.parameters()]
            found += [y, *torch.autograd.grad(y, wanted, dy.to(device, dtype))]
        return found + [b for b in layer.buffers() if b.is_floating_point()]

    same = lambda *a, device=None, **k: seed(device)
    with mock.patch.object(torch, "randint", same):
        with set_backend("eager"):
            exact = run(copy.deepcopy(layer).double(), "cpu", torch.float64)
        with only(who, whole):
            ours, again = (
                run(copy.deepcopy(layer).to(DEVICE), DEVICE, dy.dtype)
                for _ in range(2)
            )
    far = [
        ((a.double().cpu() - e).abs().max() / e.abs().max().clamp(min=1e-3))
        .nan_to_num(torch.inf)
        .item()
        for a, e in zip(ours, exact)
    ]
    return far, all(map(torch.equal, ours, again))


def moved(layer: nn.Module) -> nn.Module:
    "With parameters and averages that are none of those it begins with."
    for p in layer.parameters():
        p.data += 0.3 * torch.randn_like(p)
    for b in layer.buffers():
        if b.is_floating_point():
            b += 0.2 * torch.rand_like(b)
    return layer


# ---- the parts: for each row what it is about, and a function that measures


# layer, shape, channels last, whether it trains; the last two have units of
# several warps, and of so many programs that one merges their parts
CASES = [
    (partial(LayerNormalNorm, 197), (3, 5, 197), False, True),
    (partial(LayerNormalNorm, 64), (9, 64), False, True),
    (partial(BatchNormalNorm2d, 6), (3, 6, 4, 4), False, True),
    (partial(BatchNormalNorm1d, 33), (16, 33), False, True),
    (partial(BatchNormalNorm2d, 5), (8, 5, 7, 7), False, True),
    (partial(BatchNormalNorm2d, 6), (3, 6, 4, 4), True, True),
    (partial(BatchNormalNorm2d, 40), (2, 40, 7, 7), True, True),
    (partial(GroupNormalNorm, 3, 12), (3, 12, 5, 4), False, True),
    (
        partial(InstanceNormalNorm2d, 5, affine=True),
        (3, 5, 6, 6),
        False,
        True,
    ),
    (partial(BatchNormalNorm2d, 6), (3, 6, 4, 4), False, False),
    (partial(BatchNormalNorm2d, 6), (3, 6, 4, 4), True, False),
    (partial(LayerNormalNorm, 4096), (64, 4096), False, True),
    (partial(BatchNormalNorm2d, 4), (64, 4, 56, 56), False, True),
]
RULES = [
    {"noise": 0.4},
    {"noise": 0.3, "noise_kind": "dropout", "alpha": 0.5},
    {"noise": 0.0},
    {"noise": 0.4, "noise_kind": "unscaled"},
    {"noise": 0.4, "alpha": 0.0},
]


def correctness() -> Iterator[Job]:
    "The engine against the definition in float64, the worst of five rules."
    for case, dtype in product(CASES if CUDA else CASES[:-2], LIMITS):
        make, shape, last, training = case
        about = {
            "layer": make.func.__name__,
            "shape": list(shape),
            "dtype": str(dtype)[6:],
            "last": last,
            "training": training,
        }
        yield about, partial(errors, *case, dtype)


def errors(make, shape, last, training, dtype) -> Row:
    torch.manual_seed(0)
    x, dy = torch.randn(shape).exp() + 1, torch.randn(shape)
    x = x.to(dtype, memory_format=LAST if last else torch.preserve_format)
    rules, worst, same = RULES if CUDA else RULES[:2], [], True
    for rule in rules:
        layer = moved(make(**rule))
        with poisoned():
            far, again = compare(layer, [(x, training)], dy.to(dtype), "gpu")
        # the averages as one
        far[4:] = [max(far[4:])] if far[4:] else []
        worst = [*map(max, far, worst or far)]
        same = same and again
    of_x, of_others = LIMITS[dtype]
    return {
        "cases": len(rules),
        "errors": [float(f"{e:.2g}") for e in worst],
        "same bits again": same,
        "holds": same
        and max(worst[:2]) <= of_x
        and max(worst[2:]) <= of_others,
    }


def copied() -> Row:
    count = 1 << (28 if CUDA else 12)
    a, b = torch.ones(2, count, device=DEVICE).unbind(0)
    ms = compared(lambda: b.copy_(a), lambda: b.copy_(a))["ms"]
    return {"ms": ms, "GB/s": round(8e-6 * count / max(ms, 1e-9), 1)}


def rate(name: str) -> Row:
    module = importlib.import_module("benchmarks.gpu.ceilings")
    about = environment()
    call, operations = module.launch(
        getattr(module, name),
        64 * about.get("multiprocessors", 1) if CUDA else 1,
        256 if CUDA else 1,
        DEVICE,
    )
    ms = compared(call, call)["ms"]
    return {
        "ms": ms,
        "10^12 a second": float(f"{operations / max(ms, 1e-9) / 1e9:.4g}"),
    }


def ceilings() -> Iterator[Job]:
    "Bytes copied, multiplications with addition, special functions a second."
    yield {"what": "copy"}, copied
    yield {"what": "multiply_add"}, partial(rate, "multiply_add")
    yield {"what": "special"}, partial(rate, "special")


def captured(call: Callable) -> Callable:
    "A call as a CUDA graph, which costs Python nothing; elsewhere itself."
    if not CUDA:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay(call=call):  # whose tensors the graph reads
        graph.replay()
        return kept

    return replay


class Case:
    "A layer of PyTorch's and of ours on one input."

    def __init__(self, kind: str, shape, dtype, noise: float, last: bool):
        x, self.dy = numbers(shape, dtype, last)
        n = shape[-1] if kind == "layer" else shape[1]
        plain, ours = (
            (nn.LayerNorm, LayerNormalNorm)
            if kind == "layer"
            else (nn.BatchNorm2d, BatchNormalNorm2d)
        )
        self.plain = plain(n, device=DEVICE, dtype=dtype)
        self.ours = ours(n, noise=noise, device=DEVICE, dtype=dtype)
        self.leaf = x.requires_grad_()

    def call(self, who: str) -> Callable:
        layer = self.plain if who == "plain" else self.ours
        return measure.step(layer, self.leaf, self.dy)

    def by(self, who: str, **launch) -> Row:
        who, _, graph = who.partition(", ")
        as_it_is = captured if graph else (lambda call: call)
        with only(who), mock.patch.dict(gpu.CHOSEN, launch):
            return compared(
                as_it_is(self.call(who)), as_it_is(self.call("plain"))
            )

    def kernels(self, who: str, times: int = 11) -> Row:
        "The kernels of a step in their order, each with its microseconds."
        with only(who):
            call = self.call(who)
            for _ in range(3):
                call()
            with torch.profiler.profile() as seen:
                for _ in range(times):
                    call()
                clock()
        on_device = torch.autograd.DeviceType.CUDA
        found = sorted(
            (e for e in seen.events() if e.device_type == on_device),
            key=lambda e: e.time_range.start,
        )
        each = len(found) // times
        us = lambda e: e.time_range.elapsed_us()
        return {
            "kernels": [
                [
                    found[k].name[:60],
                    round(sorted(map(us, found[k::each]))[times // 2], 2),
                ]
                for k in range(each)
            ],
            "launches": len(found) / times,
        }


SHAPES = [
    ("layer", (8192, 4096)),
    ("layer", (64, 197, 384)),
    ("layer", (32768, 768)),
    ("batch", (256, 64, 56, 56)),
    ("batch", (64, 256, 14, 14)),
]
SMALL = [
    ("layer", (16, 17, 64)),
    ("batch", (8, 16, 8, 8)),
    ("layer", (8, 197, 384)),
]
TINY = [("layer", (4, 8)), ("batch", (2, 3, 4, 4))]


Ways = Callable[[str, bool], list[Row]]


def named(*names: str) -> Ways:
    return lambda kind, last: [{"by": name} for name in names]


def launches(kind: str, last: bool) -> list[Row]:
    "What `gpu.CHOSEN` may hold: of rows, of stages, of these channels last."
    tried = (
        {"values": (8, 16, 32), "programs": (1, 2, 4, 8)}
        if kind == "layer"
        else {
            "elements": (1024, 2048),
            "units": (32, 64),
            "warps": (4, 8),
            "programs": (2, 4, 8),
        }
        if last
        else {"elements": (1024, 2048), "programs": (4, 8, 16)}
    )
    return [
        {"by": "gpu, graph", **dict(zip(tried, way))}
        for way in product(*tried.values())
    ]


def ratio(way: Row, *case: object) -> Row:
    way = dict(way)
    return Case(*case).by(way.pop("by"), **way)


def of_kernels(way: Row, *case: object) -> Row:
    return Case(*case).kernels(way["by"])


def against(
    ways: Ways, shapes: list, measured: Callable[..., Row] = ratio
) -> Iterator[Job]:
    "Forward and backward pass in times of PyTorch's layer, in one run."
    for (kind, shape), dtype in product(
        shapes if CUDA else TINY, DTYPES[: 2 if CUDA else 1]
    ):
        both = (False, True)[: 1 + (kind == "batch" and CUDA)]
        for last, noise in product(both, (0.0, 0.4)):
            for way in ways(kind, last):
                about = {
                    "layer": kind,
                    "shape": list(shape),
                    "dtype": str(dtype)[6:],
                    "last": last,
                    "noise": noise,
                    **way,
                }
                case = kind, shape, dtype, noise, last
                yield about, partial(measured, way, *case)


def table() -> Iterator[Job]:
    "Every layer of the library on the device against float64 on the CPU."
    for trial in trials()[:: 1 if CUDA else 9]:
        for dtype, who, training in product(
            DTYPES, ("gpu", "eager", "compiled"), (True, False)
        ):
            if who == "compiled" and not (
                CUDA and training and dtype is torch.float32
            ):
                continue
            about = {
                "layer": trial.name,
                "input": trial.kind,
                "dtype": str(dtype)[6:],
                "by": who,
                "training": training,
            }
            case = trial.name, trial.kind, dtype, who, training
            yield about, partial(there, *case)


def there(name: str, kind: str, dtype, who: str, training: bool) -> Row:
    "Two batches, the second perhaps in evaluation."
    (trial,) = (t for t in trials() if (t.name, t.kind) == (name, kind))
    torch.manual_seed(0)
    layer = trial.ours(noise=0.4)
    for p in layer.parameters():
        p.data += 0.3 * torch.randn_like(p)
    layer.to(dtype)
    batches = [
        ((torch.randn(trial.shape).exp() + k).to(dtype), training or not k)
        for k in (0, 1)
    ]
    dy = torch.randn(trial.shape).to(dtype)
    far = max(compare(layer, batches, dy, who, whole=False)[0])
    limit = 1e-4 if dtype is torch.float32 else 6e-2
    return {"error": float(f"{far:.2g}"), "holds": far <= limit}


def habits() -> Iterator[Job]:
    "What a layer asks of the device besides its numbers."
    n = 384 if CUDA else 8
    shapes = {LayerNormalNorm: (64, n), BatchNormalNorm2d: (8, n, 7, 7)}
    ways = "gpu", "compiled", "eager"
    for make, amount, who in product(shapes, (0.0, 0.4), ways):
        about = {"layer": make.__name__, "noise": amount, "by": who}
        yield about, partial(habit, make, shapes[make], amount, who)
    for offset in (0, 3, 2**33 + 1):
        yield {"what": "noise", "offset": offset}, partial(drawn, offset)


def habit(make, shape, amount, who) -> Row:
    layer = make(shape[1], noise=amount, device=DEVICE)
    u = torch.randn(shape, device=DEVICE).requires_grad_()
    step = measure.step(layer, u, torch.randn(shape, device=DEVICE))
    with only(who):
        expected, wait = step(), "none"
        if CUDA:
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            except RuntimeError as error:
                wait = str(error)[:200]
            finally:
                torch.cuda.set_sync_debug_mode("default")
        replay = captured(step)
        first = [t.clone() for t in replay()]
        same = all(map(torch.equal, first, replay()))
    equal = all(map(torch.equal, first, expected))
    return {
        "waits": wait,
        "replays alike": same,
        "as without a graph": equal,
        "holds": wait == "none" and (not same if amount else same and equal),
    }


def drawn(offset: int) -> Row:
    here = of_noise.normal_noise((1 << 16,), torch.tensor(SEED), offset)
    made = of_noise.normal_noise((1 << 16,), seed(), offset).cpu()
    far = (here - made).abs().max().item()
    return {
        "error": far,
        "the same bits": (here == made).double().mean().item(),
        "holds": far < 3e-6,
    }


def models() -> Iterator[Job]:
    "A training step of a network in bfloat16, to that of the plain network."
    found = zip(measure.NETWORKS, (512, 256)) if CUDA else [(measure.TINY, 2)]
    for network, count in found:
        network = network._replace(batch=(count, *network.batch[1:]))
        ways = [*product((0.0, network.noise), ("gpu", "compiled"))]
        if count > 256:  # a step takes a quarter of a second: once
            ways.append((0.0, "eager"))
        for noise, who in ways:
            about = {
                "network": network.architecture,
                "batch": list(network.batch),
                "noise": noise,
                "by": who,
            }
            yield about, partial(stepped, network, noise, who)


def stepped(network: measure.Network, noise: float, who: str) -> Row:
    def step(model):
        model = model.to(DEVICE, memory_format=LAST)
        torch.manual_seed(1)
        x = torch.randn(network.batch).to(DEVICE, memory_format=LAST)
        y = torch.randint(10, network.batch[:1]).to(DEVICE)
        parameters = list(model.parameters())

        def run():
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            return torch.autograd.grad(loss, parameters)

        return run

    plain = step(network.make(network.theirs))
    with only(who):
        return compared(step(network.ours_with(noise)), plain)


ENGINE = "gpu", "gpu, graph"
# in an order in which the first minutes bring the most
PARTS: dict[str, Callable[[], Iterator[Job]]] = {
    "correctness": correctness,
    "ceilings": ceilings,
    "engine": partial(against, named(*ENGINE), SHAPES),
    "kernels": partial(
        against, named("plain", "gpu", "compiled"), SHAPES, of_kernels
    ),
    "tuning": partial(against, launches, SHAPES),
    "small": partial(
        against, named(*ENGINE, "compiled", "compiled, graph"), SMALL
    ),
    "habits": habits,
    "models": models,
    "table": table,
    "layers": partial(against, named("compiled", "eager"), SHAPES),
}
TIMED = PARTS.keys() - {"correctness", "habits", "table"}


def tried(work: Callable[[], Row], yes: bool) -> Row:
    "Its result; where it cannot be had, why."
    global brief
    brief = yes
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an engine stands in
            return work()
    except Exception as error:  # a row that fails takes no other along
        return {"left out": f"{type(error).__name__}: {error}"[:300]}
    finally:
        if CUDA:
            torch.cuda.empty_cache()


class Workers:
    """Processes in which the jobs of a part are compiled at the same time; what
    is timed then runs alone. What torch.compile makes has a process to itself
    there: a second shape of a layer would be taken for one of many.
    """

    def __init__(self):
        self.pools: dict[object, ProcessPoolExecutor] = {}

    def ask(self, key: object, work: Callable[[], Row], yes: bool):
        if key not in self.pools:
            self.pools[key] = ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn")
            )
        try:
            return self.pools[key].submit(tried, work, yes).result
        except BrokenProcessPool:  # an earlier job has ended its process
            del self.pools[key]
            return self.ask(key, work, yes)

    def rows(self, part: str, jobs: list[Job]) -> Iterator[Row]:
        "Of the jobs of a part, in their order."
        timed = part in TIMED
        by = [str(about.get("by")) for about, _ in jobs]
        keys = [
            (part, k) if timed and by[k].startswith("compiled") else k % SEVERAL
            for k in range(len(jobs))
        ]
        first = [
            self.ask(key, work, timed)
            for key, (_, work), who in zip(keys, jobs, by)
            if not timed or who != "eager"
        ]
        if timed:
            for one in first:
                answer(one)
        for k, (_, work) in enumerate(jobs):
            yield answer(self.ask(keys[k], work, False) if timed else first[k])
        self.end(k for k in self.pools if isinstance(k, tuple))

    def end(self, keys) -> None:
        for key in [*keys]:
            self.pools.pop(key).shutdown(cancel_futures=True)


def answer(of: Callable[[], Row]) -> Row:
    try:
        return of()
    except BrokenProcessPool as error:
        return {"left out": f"its process ended: {error}"}


def run(part: str, path: Path, until: float, workers: Workers) -> bool:
    "Go on with a part until the time is over; whether all its rows are there."
    record = files.read(path)
    jobs = [
        (
            {
                "part": part,
                "device": CARD,
                "code": code(part),
                **about,
            },
            work,
        )
        for about, work in PARTS[part]()
    ]
    wanted = [about.items() for about, _ in jobs]
    record["rows"] = [
        row
        for row in record["rows"]
        if row["part"] != part or any(of <= row.items() for of in wanted)
    ]
    todo = [
        (about, work)
        for about, work in jobs
        if not any(about.items() <= row.items() for row in record["rows"])
    ]
    if todo and time.monotonic() > until:
        return False
    began = time.monotonic()
    made = (
        workers.rows(part, todo)
        if CUDA
        else (tried(work, True) for _, work in todo)
    )
    there = len(jobs) - len(todo)
    for row, (about, _) in zip(made, todo):
        there += 1
        record["rows"].append(about | row)
        record["parts"][part] = {"rows": there, "of": len(jobs)}
        files.write(path, record)
        shown = {**about, **row}
        for key in ("part", "device", "code"):
            del shown[key]
        print(part, *(f"{k}: {v};" for k, v in shown.items()), flush=True)
        if there < len(jobs) and time.monotonic() > until:
            break
    print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    return there == len(jobs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument(
        "--out",
        type=Path,
        default=files.ROOT / ("results/gpu" if CUDA else "_build/gpu"),
    )
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(PARTS):
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; there are "
            f"{', '.join(PARTS)}"
        )
    until, here = time.monotonic() + 60 * given.minutes, environment()
    name = re.sub(r"[^a-z0-9]+", "-", CARD.lower())
    path = given.out / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = files.read(path)
    same = ("device", "torch", "triton")
    if any(record["environment"].get(key) != here[key] for key in same):
        record = files.nothing()
    files.write(path, record | {"environment": record["environment"] | here})
    todo = given.parts or list(PARTS)
    workers = Workers()
    missing = [p for p in todo if not run(p, path, until, workers)]
    workers.end(workers.pools)
    wrong = [
        row for row in files.read(path)["rows"] if row.get("holds") is False
    ]
    print(
        f"{path}: "
        + (
            "all is there"
            if not missing
            else f"the time is over, the same command goes on with {missing[0]}"
        )
    )
    for row in wrong:
        print("DOES NOT HOLD:", row)
    return 1 if wrong else 0


if __name__ == "__main__":
    # under its own name, by which other processes find its functions
    sys.exit(importlib.import_module("benchmarks.gpu.__main__").main())
