"""Measure what a GPU does with the layers, within a number of minutes, and keep
it in results/gpu, a file for each card.

    make gpu MINUTES=9
    PYTHONPATH=. python -m benchmarks.gpu --minutes 9

A row is kept as soon as it is there, and what is there from this code, card,
PyTorch and Triton is not measured again: the same command goes on. Nothing is
fetched, nbdev is not needed. Without a GPU every part runs at a tiny size, with
the prototypes in Triton's interpreter; such rows are marked, say nothing of
speed, and go to _build/gpu.
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
from normalnorm import BatchNormalNorm2d, LayerNormalNorm  # noqa: E402
from normalnorm.layers import core  # noqa: E402
from normalnorm.layers import noise as of_noise  # noqa: E402
from normalnorm.layers.backends import set_backend  # noqa: E402
from normalnorm.layers.engines import compiled  # noqa: E402
from normalnorm.theory.newton import Over  # noqa: E402
from tools.records import digest, hashes  # noqa: E402
from tools.rows import trials  # noqa: E402

Row = dict[str, object]
Job = tuple[Row, Callable[[], Row]]
# of output and input gradient, of the parameters' gradients, relative to the
# largest value (Triton's interpreter cuts bfloat16 off), and of λ
LIMITS = {
    torch.float32: (4e-6, 4e-6, 2e-5),
    torch.bfloat16: (8.5e-3, 1e-4, 2e-5),
}
LAST = torch.channels_last
# as many processes compile at a time; what is timed runs alone
SEVERAL = 14
SEED = 2**61 + 12345
brief = not CUDA  # nothing is to be timed


@cache
def code(of: str) -> str:
    """A hash of what a row is about: the layers and what they use, and the
    prototypes, the ceilings or nothing more.
    """
    own = {"prototype": ["rows", "staged"], "ceilings": ["ceilings"]}
    return digest(
        hashes(
            [
                "normalnorm/layers/**/*.py",
                "normalnorm/theory/**/*.py",
                *(f"benchmarks/gpu/{name}.py" for name in own.get(of, [])),
            ]
        )
    )


def kernel(name: str):
    "A module of this folder that needs Triton."
    return importlib.import_module(f"benchmarks.gpu.{name}")


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


def parameters(shape, kind: str) -> tuple[Tensor, Tensor]:
    "Weight and bias, in float32: the prototypes take no other."
    n = shape[-1] if kind == "rows" else shape[1]
    draw = torch.Generator().manual_seed(1)
    w, b = (torch.randn(n, generator=draw).to(DEVICE) for _ in range(2))
    return w * 0.3 + 1, b


def seed() -> Tensor:
    return torch.tensor(SEED, device=DEVICE)


def prototype(
    name: str, x, w, b, dy, launch: dict | None = None, **settings
) -> Callable:
    "Forward and backward pass by a prototype: output, gradients, numbers."
    module, launch = kernel(name), launch or {}
    settings["seed"] = seed()
    # the forward pass of rows has a program for each tile
    first = {
        k: v for k, v in launch.items() if (name, k) != ("rows", "programs")
    }

    def run():
        y, kept = module.forward(x, w, b, **settings, **first)
        return y, *module.backward(dy, x, kept, w, **settings, **launch), kept

    return run


# ---- the parts: for each row what it is about, and a function that measures


def correctness() -> Iterator[Job]:
    "The prototypes against the definition in float64."
    shapes = {
        "rows": [(3, 197), (9, 64), (2, 1000), (33, 7), (64, 4096)],
        "staged": [(3, 6, 4, 4), (16, 3), (8, 5, 7, 7), (2, 3, 33, 40)],
    }
    rules = [
        (1.0, 0.5, "scaled"),
        (0.5, 0.3, "dropout"),
        (1.0, 0.0, "scaled"),
        (1.0, 0.4, "unscaled"),
        (0.0, 0.0, "scaled"),
    ]
    few = slice(None if CUDA else 2)
    for kind, found in shapes.items():
        for shape, dtype, rule in product(found[few], LIMITS, rules[few]):
            for last in (False, True)[: 1 + (len(shape) == 4)]:
                case = kind, shape, dtype, rule, last
                yield (
                    {
                        "kernel": kind,
                        "shape": list(shape),
                        "dtype": str(dtype)[6:],
                        "last": last,
                        "alpha, noise, kind": list(rule),
                    },
                    partial(errors, *case),
                )


def errors(kind, shape, dtype, settings, last) -> Row:
    alpha, noise, how = settings
    x, dy = numbers(shape, dtype, last)
    w, b = parameters(shape, kind)
    run = prototype(
        kind,
        x,
        w,
        b,
        dy,
        {"programs": 3 if kind == "rows" else 3 * shape[1]},
        alpha=alpha,
        noise=noise,
        kind=how,
    )
    y, *grads, kept = run()
    again = all(map(torch.equal, (y, *grads), run()))
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    view = (-1,) if kind == "rows" else (-1, *(1,) * (len(shape) - 2))
    dims = (-1,) if kind == "rows" else (0, *range(2, len(shape)))
    out, used = core.by_autograd(
        wide[0],
        Over(dims),
        core.Rule.of(noise=noise, alpha=alpha, noise_kind=how),
        *(t.view(view) for t in wide[1:]),
        seed(),
    )
    exact = [out, *torch.autograd.grad(out, wide, dy.double())]
    far = [
        ((a.double() - e).abs().max() / e.abs().max()).item()
        for a, e in zip((y, *grads), exact)
    ]
    far.append(
        (kept.view(8, -1)[2] - used.lmbda.flatten()).abs().max().item()
        if alpha
        else 0.0
    )
    of_x, of_weight, of_lmbda = LIMITS[dtype]
    return {
        "errors": [float(f"{e:.2g}") for e in far],
        "same bits again": again,
        "holds": again
        and all(
            e <= limit
            for e, limit in zip(
                far, (of_x, of_x, of_weight, of_weight, of_lmbda)
            )
        ),
    }


def copied() -> Row:
    count = 1 << (28 if CUDA else 12)
    a, b = torch.ones(2, count, device=DEVICE).unbind(0)
    ms = compared(lambda: b.copy_(a), lambda: b.copy_(a))["ms"]
    return {"ms": ms, "GB/s": round(8e-6 * count / max(ms, 1e-9), 1)}


def rate(name: str) -> Row:
    module = kernel("ceilings")
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
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay():
        graph.replay()
        return kept

    return replay


class Case:
    "A layer of PyTorch's and of ours on one input, and the prototype of ours."

    def __init__(self, kind: str, shape, dtype, noise: float, last: bool):
        self.kind, self.noise = kind, noise
        self.x, self.dy = numbers(shape, dtype, last)
        n = shape[-1] if kind == "rows" else shape[1]
        plain, ours = (
            (nn.LayerNorm, LayerNormalNorm)
            if kind == "rows"
            else (nn.BatchNorm2d, BatchNormalNorm2d)
        )
        self.plain = plain(n, device=DEVICE, dtype=dtype)
        self.ours = ours(n, noise=noise, device=DEVICE, dtype=dtype)
        self.leaf = self.x.clone().requires_grad_()

    def step(self, layer: nn.Module) -> Callable:
        return measure.step(layer, self.leaf, self.dy)

    def call(self, who: str, **launch) -> Callable:
        if who != "prototype":
            return self.step(self.plain if who == "plain" else self.ours)
        n = self.plain.weight.numel()
        w, b = (torch.full((n,), v, device=DEVICE) for v in (1.0, 0.0))
        return prototype(
            self.kind, self.x, w, b, self.dy, launch, noise=self.noise
        )

    def by(self, who: str, **launch) -> Row:
        who, _, graph = who.partition(", ")
        as_it_is = captured if graph else (lambda call: call)
        with only(who):
            return compared(
                as_it_is(self.call(who, **launch)),
                as_it_is(self.call("plain")),
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


@contextmanager
def only(who: str):
    "An engine computes, or it is an error."
    compiled._refused.clear()
    with set_backend(who if who in ("eager", "compiled") else "auto"):
        yield
    if who == "compiled" and (
        why := compiled._trouble(DEVICE) or compiled._refused
    ):
        raise RuntimeError(f"torch.compile did not compute this: {why}")


SHAPES = [
    ("rows", (8192, 4096)),
    ("rows", (64, 197, 384)),
    ("staged", (256, 64, 56, 56)),
    ("staged", (64, 256, 14, 14)),
]
SMALL = [
    ("rows", (16, 17, 64)),
    ("staged", (8, 16, 8, 8)),
    ("rows", (8, 197, 384)),
]
TINY = [("rows", (4, 8)), ("staged", (2, 3, 4, 4))]


Ways = Callable[[str, bool], list[Row]]


def named(*names: str) -> Ways:
    return lambda kind, last: [{"by": name} for name in names]


def launches(kind: str, last: bool) -> list[Row]:
    "By how many values a thread has, or channels a tile, and by programs."
    chips = environment().get("multiprocessors", 1)
    if kind == "rows":
        ways = [
            {"values": values, "programs": chips * each}
            for values in (32, 16, 8)
            for each in (2, 4, 8, 16)
        ]
    else:
        ways = [
            {"programs": 4 * chips * each, **more}
            for each in (1, 2, 4)
            for more in ([{"channels": 32}, {"channels": 64}] if last else [{}])
        ]
    return [{"by": "prototype, graph", **way} for way in ways]


def ratio(way: Row, *case: object) -> Row:
    way = dict(way)
    return Case(*case).by(way.pop("by"), **way)


def of_kernels(way: Row, *case: object) -> Row:
    return Case(*case).kernels(way["by"])


def against(
    ways: Ways, shapes: list, measured: Callable[..., Row] = ratio
) -> Iterator[Job]:
    "Forward and backward pass in times of PyTorch's layer, in one run."
    dtypes = LIMITS if CUDA else [torch.float32]
    for (kind, shape), dtype in product(shapes if CUDA else TINY, dtypes):
        both = (False, True)[: 1 + (kind == "staged" and CUDA)]
        for last, noise in product(both, (0.0, 0.4)):
            for way in ways(kind, last):
                about = {
                    "layer": "layer" if kind == "rows" else "batch",
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
        for dtype in LIMITS:
            for who, training in (
                ("eager", True),
                ("eager", False),
                ("compiled", True),
            )[: 3 if CUDA and dtype is torch.float32 else 2]:
                about = {
                    "layer": trial.name,
                    "input": trial.kind,
                    "dtype": str(dtype)[6:],
                    "by": who,
                    "training": training,
                }
                yield (
                    about,
                    partial(
                        there, trial.name, trial.kind, dtype, who, training
                    ),
                )


def there(name: str, kind: str, dtype, who: str, training: bool) -> Row:
    """Output, gradients and averages of two batches, the noise from the same
    seed on both sides.
    """
    (trial,) = (t for t in trials() if (t.name, t.kind) == (name, kind))
    torch.manual_seed(0)
    layer = trial.ours(noise=0.4)
    for p in layer.parameters():
        p.data += 0.3 * torch.randn_like(p)
    layer.to(dtype)
    batches = [(torch.randn(trial.shape).exp() + k).to(dtype) for k in (0, 1)]
    dy = torch.randn(trial.shape).to(dtype)

    def run(layer, device, kind):
        found = []
        for k, u in enumerate(batches):
            layer.train(training or not k)
            u = u.to(device, kind).requires_grad_()
            y = layer(u)
            wanted = [u, *layer.parameters()]
            found += [y, *torch.autograd.grad(y, wanted, dy.to(device, kind))]
        return found + list(layer.buffers())

    same = lambda *a, device=None, **k: torch.tensor(SEED, device=device)
    with mock.patch.object(torch, "randint", same):
        with set_backend("eager"):
            exact = run(copy.deepcopy(layer).double(), "cpu", torch.float64)
        with only(who):
            ours = run(layer.to(DEVICE), DEVICE, dtype)
    far = max(
        (
            (a.double().cpu() - e).abs().max() / e.abs().max().clamp(min=1e-3)
        ).item()
        for a, e in zip(ours, exact)
    )
    limit = 1e-4 if dtype is torch.float32 else 6e-2
    return {"error": float(f"{far:.2g}"), "holds": far <= limit}


def habits() -> Iterator[Job]:
    "What a layer asks of the device besides its numbers."
    shapes = {LayerNormalNorm: (64, 384), BatchNormalNorm2d: (8, 384, 7, 7)}
    for make, amount, who in product(shapes, (0.0, 0.4), ("eager", "compiled")):
        about = {"layer": make.__name__, "noise": amount, "by": who}
        yield about, partial(habit, make, shapes[make], amount, who)
    for offset in (0, 3, 2**33 + 1):
        yield {"what": "noise", "offset": offset}, partial(drawn, offset)


def habit(make, shape, amount, who) -> Row:
    layer = make(384, noise=amount, device=DEVICE)
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
        ways = product((0.0, network.noise), ("eager", "compiled"))
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


PROTOTYPE = "prototype", "prototype, graph"
PARTS: dict[str, Callable[[], Iterator[Job]]] = {
    "correctness": correctness,
    "ceilings": ceilings,
    "tuning": partial(
        against, launches, [*SHAPES[:2], ("rows", (32768, 768)), *SHAPES[2:]]
    ),
    "prototypes": partial(against, named(*PROTOTYPE), SHAPES),
    "kernels": partial(
        against, named("plain", "compiled", "prototype"), SHAPES, of_kernels
    ),
    "habits": habits,
    "small": partial(
        against,
        named("eager", "compiled", "compiled, graph", *PROTOTYPE),
        SMALL,
    ),
    "layers": partial(against, named("eager", "compiled"), SHAPES),
    "models": models,
    "table": table,
}
TIMED = PARTS.keys() - {"correctness", "habits", "table"}


def subject(part: str, about: Row) -> str:
    "What a row is about besides the layers."
    if part == "ceilings":
        return part
    if part == "correctness":
        return "prototype"
    return str(about.get("by")).split(", ")[0]


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
                "code": code(subject(part, about)),
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
