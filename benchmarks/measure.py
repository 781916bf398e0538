"""What is measured: timings taken in turn, as ratios; memory kept and peak
memory; what the processor can do.

`torch.utils.benchmark` times one thing after the other; here what is compared
takes turns, so that a slow minute meets both.
"""

import copy
import math
import os
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from normalnorm import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    GroupNormalNorm,
    InstanceNormalNorm2d,
    LayerNormalNorm,
    ProxyNorm,
    SyncBatchNormalNorm,
    set_backend,
    to_proxy_norm,
)
from normalnorm.layers import core
from tools.files import load, python, save


class Layer(NamedTuple):
    "A layer of ours, PyTorch's, the arguments of both, and an input."

    name: str
    ours: type
    theirs: type
    arguments: tuple[int, ...]
    shape: tuple[int, ...]

    def make(self, ours: bool, **settings) -> nn.Module:
        if self.theirs is nn.InstanceNorm2d:
            settings["affine"] = True
        if "bfloat16" in self.name:
            settings["dtype"] = torch.bfloat16
        return (self.ours if ours else self.theirs)(*self.arguments, **settings)

    def input(self) -> tuple[Tensor, Tensor]:
        "Values and an upstream gradient."
        torch.manual_seed(0)
        u, grad = torch.randn(self.shape), torch.randn(self.shape)
        if "channels last" in self.name:
            u, grad = (
                t.to(memory_format=torch.channels_last) for t in (u, grad)
            )
        if "bfloat16" in self.name:
            u, grad = u.bfloat16(), grad.bfloat16()
        return u.requires_grad_(), grad

    @property
    def noise(self) -> float:
        "As much as the papers add."
        return 1.0 if self.ours is LayerNormalNorm else 0.4

    @property
    def row(self) -> dict:
        return {"layer": self.name, "shape": list(self.shape)}


BATCH, ROWS = (
    (BatchNormalNorm2d, nn.BatchNorm2d),
    (LayerNormalNorm, nn.LayerNorm),
)
LAYERS = [
    Layer("BatchNorm2d", *BATCH, (64,), (128, 64, 32, 32)),
    Layer("BatchNorm2d", *BATCH, (256,), (64, 256, 14, 14)),
    Layer("BatchNorm2d, channels last", *BATCH, (256,), (64, 256, 14, 14)),
    Layer("BatchNorm2d", *BATCH, (512,), (64, 512, 7, 7)),
    Layer("BatchNorm2d", *BATCH, (16,), (8, 16, 8, 8)),
    Layer("BatchNorm1d", BatchNormalNorm1d, nn.BatchNorm1d, (512,), (256, 512)),
    Layer("BatchNorm1d", BatchNormalNorm1d, nn.BatchNorm1d, (64,), (32, 64)),
    Layer("LayerNorm", *ROWS, (384,), (64, 197, 384)),
    Layer("LayerNorm", *ROWS, (768,), (32, 128, 768)),
    Layer("LayerNorm", *ROWS, (384,), (8, 197, 384)),
    Layer("LayerNorm", *ROWS, (64,), (16, 17, 64)),
    Layer("LayerNorm, bfloat16", *ROWS, (384,), (64, 197, 384)),
    Layer(
        "GroupNorm", GroupNormalNorm, nn.GroupNorm, (8, 64), (64, 64, 16, 16)
    ),
    Layer(
        "InstanceNorm2d",
        InstanceNormalNorm2d,
        nn.InstanceNorm2d,
        (64,),
        (64, 64, 16, 16),
    ),
]
QUICK = [layer for layer in LAYERS if math.prod(layer.shape) < 1 << 16]


def chosen(*wanted: tuple[str, tuple[int, ...]]) -> list[Layer]:
    "Layers by name and shape."
    return [
        next(layer for layer in LAYERS if (layer.name, layer.shape) == one)
        for one in wanted
    ]


# also against the definition, and the definition fused by torch.compile
ENGINES = chosen(
    ("BatchNorm2d", (64, 256, 14, 14)), ("LayerNorm", (8, 197, 384))
)
MEMORY = chosen(
    ("BatchNorm2d", (128, 64, 32, 32)), ("LayerNorm", (64, 197, 384))
)
# inside torch.compile
COMPILED = chosen(
    ("BatchNorm2d", (64, 256, 14, 14)),
    ("LayerNorm", (64, 197, 384)),
    ("BatchNorm1d", (32, 64)),
)
SHARED = chosen(("BatchNorm2d", (64, 256, 14, 14)))
# pairs that a row has at least, however long they take
FEWEST = 15


# ---- times ----


def seconds(
    function: Callable,
    clock: Callable[[], float] | None = None,
    number: int = 1,
) -> float:
    "Of a call, of `number` in a row."
    timer = clock or time.perf_counter
    return timeit.timeit(function, timer=timer, number=number) / number


def best(function: Callable, times: int, repeat: int = 0) -> float:
    """The shortest of some times of a call; of `repeat` calls in a row, which
    last 2 ms where their number is not given.
    """
    function()
    repeat = repeat or max(1, round(2e-3 / max(seconds(function), 1e-7)))
    return min(seconds(function, number=repeat) for _ in range(times))


class Busy:
    "What part of the processors' time other programs take while we measure."

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.before, self.began = self._elsewhere(), time.perf_counter()

    @staticmethod
    def _elsewhere() -> float | None:
        "Seconds of all processors so far, without our processes'."
        try:
            line = Path("/proc/stat").read_text().splitlines()[0].split()
        except OSError:
            return None
        ticks = [int(word) for word in line[1:9]]
        # all but idle and waiting; the last is what the machine's host took
        busy = (sum(ticks[:3]) + sum(ticks[5:])) / os.sysconf("SC_CLK_TCK")
        return busy - sum(os.times()[:4])

    def share(self) -> float | None:
        "None where the system does not tell, or no second has passed."
        lasted = time.perf_counter() - self.began
        if self.before is None or lasted < 1:
            return None
        others = self._elsewhere() - self.before
        return round(max(0.0, others / lasted / (os.cpu_count() or 1)), 3)


BUSY = Busy()


def ratios(
    ours: dict[str, Callable],
    theirs: Callable,
    pairs: int,
    limit: float = math.inf,
    fewest: int = FEWEST,
    meet: Callable[[], None] = lambda: None,
    agreed: Callable[[list[int]], list[int]] = list,
    clock: Callable[[], float] | None = None,
    warm: int = 3,
) -> dict[str, dict]:
    """For each of `ours` the quantiles of the ratio of its time to that of
    `theirs`, all taken in turn, an interval for the median that covers it 19
    times in 20 (order statistics), and the median times.

    Rounds beyond `fewest` that would take longer than `limit` seconds are left
    out. Where several processes measure, `meet` has them begin each timing
    together, and `agreed` gives the numbers that all of them use. `clock`: what
    tells the time, by default that on the wall; `warm`: calls before the first
    timing.
    """
    work = [*ours.values(), theirs]
    for function in work * warm:
        function()
    once = [seconds(function, clock) for function in work]
    # small work is repeated: at least 2 ms a timing
    repeats = [max(1, round(2e-3 / max(t, 1e-7))) for t in once]
    lasts = sum(t * n for t, n in zip(once, repeats))
    affordable = math.floor(min(pairs, limit / max(lasts, 1e-9)))
    rounds, *repeats = agreed([max(min(pairs, fewest), affordable), *repeats])
    times = [[0.0] * len(work) for _ in range(rounds)]
    for k, taken in enumerate(times):
        order = [(k // 2 + i) % len(work) for i in range(len(work))]
        for i in order if k % 2 else order[::-1]:
            meet()
            taken[i] = seconds(work[i], clock, repeats[i])
    return {
        name: summary([(t[i], t[-1]) for t in times])
        for i, name in enumerate(ours)
    }


def interval(found: list[float]) -> tuple[float, float]:
    "About the median of ordered numbers, 19 times in 20."
    pairs = len(found)
    outside = max(0, math.floor(pairs / 2 - 0.98 * math.sqrt(pairs)))
    return found[outside], found[-1 - outside]


def summary(times: list[tuple[float, float]]) -> dict:
    "Of pairs of times."
    found = sorted(a / b for a, b in times)
    low, high = interval(found)
    numbers = {
        f"p{q}": found[round(q / 100 * (len(found) - 1))] for q in (20, 50, 80)
    } | {"low": low, "high": high}
    ours, theirs = map(statistics.median_high, zip(*times))
    return {k: round(v, 3) for k, v in numbers.items()} | {
        "ms": round(1e3 * ours, 4),
        "ms of the other": round(1e3 * theirs, 4),
        "pairs": len(found),
    }


def ratio(ours: Callable, theirs: Callable, pairs: int, **settings) -> dict:
    "Of two functions alone."
    return ratios({"": ours}, theirs, pairs, **settings)[""]


def step(layer: nn.Module, u: Tensor, grad: Tensor) -> Callable:
    wanted = [u, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(u), wanted, grad)


def evaluation(layer: nn.Module, u: Tensor) -> Callable:
    return torch.inference_mode()(lambda: layer(u))


def pretended(of: Callable, back: Callable) -> Callable:
    "A layer's function of Python, which keeps its tensors, and other work."

    class Pretended(torch.autograd.Function):
        @staticmethod
        def forward(ctx, u, weight, bias):
            ctx.save_for_backward(u, weight)
            return of(u)

        @staticmethod
        def backward(ctx, grad):
            return back(grad, *ctx.saved_tensors)

    return Pretended.apply


_nothing = pretended(
    torch.empty_like,
    lambda grad, u, weight: tuple(map(torch.empty_like, (u, weight, weight))),
)


def settled(model: nn.Module) -> nn.Module:
    "In evaluation, with averages as training leaves them: none of λ is 1."
    for layer in model.modules():
        if getattr(layer, "running_lambda", None) is not None:
            layer.running_lambda.uniform_(0.3, 1.7)
    return model.eval()


# ---- the processor ----


class Nothing(nn.LayerNorm):
    "What a layer costs whose work is done by a function of Python."

    def forward(self, u):
        if self.training:
            return _nothing(u, self.weight, self.bias)
        return torch.empty_like(u)


def machine(pairs: int, quick: bool) -> Iterator[dict]:
    """What the processor can do: bytes a second from memory and from the cache;
    and what a layer takes that does nothing.
    """
    pairs, threads = max(pairs, 10), torch.get_num_threads()
    of = lambda function, count: best(function, pairs) / count * 1e9
    row = lambda what, value, digits: {
        "what": what,
        "value": round(value, digits),
    }
    # PyTorch gives a thread 2^15 numbers at least
    for what, count in ("memory", 1 << 25), ("cache", threads << 15):
        source, target = torch.ones(2, count).unbind(0)
        copying = lambda s=source, t=target: t.copy_(s)
        yield row(f"copy in {what}, GB/s", 8 / of(copying, count), 1)
    u, layer = torch.randn(2, 8, requires_grad=True), Nothing(8)
    for what, call in (
        ("forward and backward", step(layer, u, torch.ones(2, 8))),
        ("evaluation", evaluation(copy.deepcopy(layer).eval(), u)),
    ):
        yield row(f"a layer that does nothing, {what}, µs", of(call, 1000), 2)


# ---- layers ----


def layers(pairs: int, quick: bool) -> Iterator[dict]:
    """Forward and backward pass with and without noise, evaluation, and forward
    and backward pass in evaluation: against PyTorch's layer; and a copy.
    """
    for layer in QUICK if quick else LAYERS:
        u, grad = layer.input()
        plain, target = layer.make(False), torch.empty_like(u)
        copying = lambda u=u, target=target: target.copy_(u.detach())
        noisy = layer.make(True, noise=layer.noise)
        training = {
            0.0: step(layer.make(True, noise=0.0), u, grad),
            layer.noise: step(noisy, u, grad),
        }
        works = {
            f"forward and backward, noise {noise}": work
            for noise, work in training.items()
        }
        of = "PyTorch's layer"
        for work, row in ratios(
            works, step(plain, u, grad), pairs, limit=4
        ).items():
            yield {**layer.row, "work": work, "against": of, **row}
        yield {
            **layer.row,
            "work": work,
            "against": "a copy of the input",
            **ratio(training[layer.noise], copying, pairs, limit=1),
            "ms of a copy alone": round(1e3 * best(copying, pairs), 4),
        }
        settled(noisy), plain.eval()
        yield {
            **layer.row,
            "work": "evaluation",
            "against": of,
            **ratio(evaluation(noisy, u), evaluation(plain, u), pairs, limit=2),
        }
        if getattr(noisy, "running_lambda", None) is not None:
            yield {
                **layer.row,
                "work": "frozen: forward and backward in evaluation",
                "against": of,
                **ratio(
                    step(noisy, u, grad), step(plain, u, grad), pairs, limit=2
                ),
            }


def _few(layer: Layer, threads: int) -> list[Layer]:
    """The layer with few units, and with three times as many: so few that they
    lie in the caches, and as many for each thread.
    """
    axis = int(layer.name.startswith("Batch"))
    rows = layer.name.startswith("Layer")
    shape = (
        (math.prod(layer.shape[:-1]), layer.shape[-1]) if rows else layer.shape
    )
    of_unit = math.prod(shape) // shape[axis]
    # channels that lie last fill a vector
    least = 16 if "last" in layer.name else threads
    count = least * max(1, round((threads << 13) / of_unit / least))
    return [
        layer._replace(
            arguments=(n,) if axis else layer.arguments,
            shape=(*shape[:axis], n, *shape[axis + 1 :]),
        )
        for n in (count, 3 * count)
    ]


def cached(pairs: int, quick: bool) -> Iterator[dict]:
    """What an element takes when its data come from the caches: the difference
    of a layer with three times as many units, over the difference in elements.
    """
    threads = torch.get_num_threads()
    for layer in QUICK if quick else LAYERS:
        if math.prod(layer.shape) < 1 << 17 and not quick:
            continue
        works: dict[str, list[Callable]] = {}
        few = _few(layer, threads)
        for one in few:
            u, grad = one.input()
            for noise in (0.0, layer.noise):
                works.setdefault(
                    f"forward and backward, noise {noise}", []
                ).append(step(one.make(True, noise=noise), u, grad))
            works.setdefault("evaluation", []).append(
                evaluation(settled(one.make(True, noise=0.0)), u)
            )
        elements = math.prod(few[1].shape) - math.prod(few[0].shape)
        for work, (fewer, more) in works.items():
            # in turn, so that a slow spell of the machine is not all of one
            turns = [[best(f, pairs) for f in (fewer, more)] for _ in range(9)]
            times = [min(took) for took in zip(*turns)]
            yield {
                **layer.row,
                "work": work,
                "ns": round(1e9 * (times[1] - times[0]) / elements, 3),
            }


def engines(pairs: int, quick: bool) -> Iterator[dict]:
    """The native kernel against torch.compile of the definition, without noise,
    and against the definition itself.
    """
    for layer in chosen(("LayerNorm", (16, 17, 64))) if quick else ENGINES:
        u, grad = layer.input()
        for noise in (0.0, layer.noise):
            fast = layer.make(True, noise=noise)
            # it takes half a minute to compile a case
            for backend in (
                ("eager",) if quick or noise else ("compiled", "eager")
            ):

                def slow(layer=fast, backend=backend):
                    with set_backend(backend):
                        torch.autograd.grad(
                            layer(u), [u, *layer.parameters()], grad
                        )

                with mock.patch.object(
                    core, "normalize", wraps=core.normalize
                ) as definition:
                    slow()
                if definition.called != (backend == "eager"):
                    raise RuntimeError(f"{backend} did not compute {layer}")
                yield {
                    **layer.row,
                    "work": f"forward and backward, noise {noise}",
                    "against": backend,
                    **ratio(
                        step(fast, u, grad), slow, pairs, limit=2, fewest=6
                    ),
                }


# ---- memory ----


def _peak(ours: bool, layer: int) -> int:
    """Bytes by which one step on a new input raises the largest resident memory
    of a process (Linux).
    """
    code = f"""
import re
from pathlib import Path
import torch
from benchmarks import measure
torch.set_num_threads(1)
status = lambda what: 1024 * int(re.search(what + r":\\s+(\\d+)", \
Path("/proc/self/status").read_text())[1])
layer = measure.MEMORY[{layer}]
made = layer.make({ours})
small = torch.randn(2, *layer.shape[1:], requires_grad=True)
measure.step(made, small, torch.ones_like(small))()
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
u, grad = layer.input()
measure.step(made, u, grad)()
print(status("VmHWM") - before)
"""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    return int(python("-c", code, check=True, env=plain).stdout.split()[-1])


def memory(pairs: int, quick: bool) -> Iterator[dict]:
    """Bytes kept for the backward pass, and by how much a step raises the
    largest memory of a process, in units of the input (which is one of them,
    the upstream gradient another).
    """
    for index, layer in enumerate(
        chosen(("BatchNorm2d", (8, 16, 8, 8))) if quick else MEMORY
    ):
        u, _ = layer.input()
        size = u.numel() * u.element_size()
        for ours in (True, False):
            made, kept = layer.make(ours), {}

            def keep(t, kept=kept):
                storage = t.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                made(u)
            row = {
                **layer.row,
                "whose": "ours" if ours else "PyTorch's",
                "kept for backward, in inputs": round(
                    sum(kept.values()) / size, 4
                ),
            }
            if not quick and sys.platform == "linux":
                row["peak memory of a step, in inputs"] = round(
                    _peak(ours, index) / size, 2
                )
            yield row


# ---- whole networks ----


class Network(NamedTuple):
    "A network by name, the shape of a batch, and its normalizers."

    name: str
    batch: tuple[int, ...]
    architecture: str
    settings: dict
    ours: type
    theirs: type
    noise: float

    def make(self, norm: Callable[..., nn.Module]) -> nn.Module:
        from normalnorm.experiments.models import build

        torch.manual_seed(0)
        return build(self.architecture, norm=norm, **self.settings)

    def ours_with(self, noise: float) -> nn.Module:
        return self.make(lambda *a, **k: self.ours(*a, **{"noise": noise, **k}))

    def step(self, model: nn.Module) -> Callable:
        "The gradients of a loss."
        torch.manual_seed(1)
        x, y = torch.randn(self.batch), torch.randint(10, self.batch[:1])
        parameters = list(model.parameters())
        return lambda: torch.autograd.grad(
            F.cross_entropy(model(x), y), parameters
        )


NETWORKS = [
    Network(
        "ResNet-18 (CIFAR), batch 32",
        (32, 3, 32, 32),
        "cifar_resnet18",
        {},
        *BATCH,
        0.4,
    ),
    Network(
        "ViT 6×384, batch 8",
        (8, 3, 64, 64),
        "vit",
        {
            "image": 64,
            "patch": 8,
            "width": 384,
            "depth": 6,
            "heads": 6,
            "hidden": 1536,
        },
        *ROWS,
        1.0,
    ),
]
TINY = Network(
    "ViT 1×32, batch 2",
    (2, 3, 16, 16),
    "vit",
    {
        "image": 16,
        "patch": 8,
        "width": 32,
        "depth": 1,
        "heads": 2,
        "hidden": 64,
    },
    *ROWS,
    1.0,
)


def models(pairs: int, quick: bool) -> Iterator[dict]:
    """A training step and an evaluation of a ResNet-18 (CIFAR) and of a ViT of
    6 layers of width 384, with our layers and with PyTorch's; and a training
    step without any normalizer.
    """
    for network in [TINY] if quick else NETWORKS:
        steps = {
            f"training step, noise {noise}": network.step(
                network.ours_with(noise)
            )
            for noise in (0.0, network.noise)
        }
        steps["training step, no normalizer"] = network.step(
            network.make(lambda *a, **k: nn.Identity())
        )
        plain = network.make(network.theirs)
        base = {"model": network.name, "against": "PyTorch's layers"}
        for work, row in ratios(
            steps, network.step(plain), pairs, limit=20
        ).items():
            yield {**base, "work": work, **row}
        x = torch.randn(network.batch)
        # short, so more of them
        yield {
            **base,
            "work": "evaluation",
            **ratio(
                evaluation(settled(network.ours_with(0.0)), x),
                evaluation(plain.eval(), x),
                3 * pairs,
                limit=8,
            ),
        }


def _copied(grad: Tensor, u: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return grad.clone(), torch.zeros_like(weight), torch.zeros_like(weight)


# declared as those of our layers are (chapter 284)
_COPIES = torch.library.Library("normalnorm_benchmarks", "FRAGMENT")


OPERATORS = torch.ops.normalnorm_benchmarks


_copy = pretended(Tensor.clone, _copied)
for _name, _schema, _function, _fake in (
    ("copy", "(Tensor u) -> Tensor", Tensor.clone, torch.empty_like),
    (
        "copied",
        "(Tensor grad, Tensor u, Tensor weight) -> (Tensor, Tensor, Tensor)",
        _copied,
        lambda *tensors: tuple(
            map(torch.empty_like, (tensors[0], tensors[2], tensors[2]))
        ),
    ),
):
    _COPIES.define(_name + _schema)
    _COPIES.impl(_name, _function, "CPU")
    torch.library.register_fake(
        f"normalnorm_benchmarks::{_name}", _fake, lib=_COPIES
    )
_COPIES.define("layer(Tensor u, Tensor weight, Tensor bias) -> Tensor")
_COPIES.impl(
    "layer",
    pretended(
        lambda u: OPERATORS.copy(u), lambda *kept: OPERATORS.copied(*kept)
    ),
    "CompositeImplicitAutograd",
)


class Copy(nn.BatchNorm1d):
    "What a layer costs that copies its tensors, compiled or not."

    def forward(self, u):
        inside = torch.compiler.is_compiling()
        if self.training:
            run = OPERATORS.layer if inside else _copy
            return run(u, self.weight, self.bias)
        return OPERATORS.copy(u) if inside else u.clone()


def compiled(pairs: int, quick: bool) -> Iterator[dict]:
    """Inside torch.compile: a layer against the same layer outside, and the
    same of a layer that copies the same tensors; and, with a thread for each
    core, the training steps of `models`, both sides compiled, and of networks
    whose normalizers only copy.

    The time of compilation is left out. For the networks it is minutes, the
    first time; what was compiled is kept.
    """

    def inside(module: nn.Module) -> nn.Module:
        # the compiler counts how many variants of a function it has made
        torch.compiler.reset()
        return torch.compile(module, dynamic=False)

    for layer in chosen(("BatchNorm1d", (32, 64))) if quick else COMPILED:
        u, grad = layer.input()

        def against(work, one, call, limit=2.0, layer=layer):
            return {
                **layer.row,
                "compiled": True,
                "against": "the same layer, not compiled",
                "work": work,
                **ratio(call(inside(one)), call(one), pairs, limit=limit),
            }

        both = lambda of, u=u, grad=grad: step(of, u, grad)
        alone = lambda of, u=u: evaluation(of, u)
        copies = Copy(*layer.arguments)
        yield against("a copy: forward and backward", copies, both)
        yield against("a copy: evaluation", copies.eval(), alone)
        for noise in (0.0,) if quick else (0.0, layer.noise):
            one = layer.make(True, noise=noise)
            work = f"forward and backward, noise {noise}"
            yield against(work, one, both, 3.0)
        if not quick:
            yield against("evaluation", settled(one), alone)
    if quick or torch.get_num_threads() < (os.cpu_count() or 1):
        return
    for network in NETWORKS:
        plain = network.step(inside(network.make(network.theirs)))
        models = {
            f"training step, noise {noise}": network.ours_with(noise)
            for noise in (0.0, network.noise)
        }
        models["training step, copies"] = network.make(
            lambda size, *a, **k: Copy(size)
        )
        steps = {
            work: network.step(torch.compile(model, dynamic=False))
            for work, model in models.items()
        }
        for work, row in ratios(steps, plain, pairs, limit=20).items():
            yield {
                "model": network.name,
                "compiled": True,
                "work": work,
                "against": "PyTorch's layers",
                **row,
            }


# ---- several processes ----


def of_the_first(numbers: list[int]) -> list[int]:
    "Those of the first process of a group."
    told = torch.tensor(numbers)
    dist.broadcast(told, 0)
    return told.tolist()


def share(
    rank: int, count: int, threads: int, folder: str, pairs: int, quick: bool
) -> None:
    """One process of `sync`: its rows of the batch, forward and backward, by
    the synchronized layer and by two that do not exchange anything. The first
    one writes down what it has measured.
    """
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=60),
    )
    found = []
    for layer in chosen(("BatchNorm2d", (8, 16, 8, 8))) if quick else SHARED:
        layer = layer._replace(
            shape=(layer.shape[0] // count, *layer.shape[1:])
        )
        u, grad = layer.input()
        for noise in (0.0, layer.noise):
            synchronized = SyncBatchNormalNorm(*layer.arguments, noise=noise)
            others = {
                "PyTorch's layer, not synchronized": layer.make(False),
                "our layer, not synchronized": layer.make(True, noise=noise),
            }
            found += [
                {
                    "layer": "SyncBatchNorm",
                    "processes": count,
                    "shape": list(layer.shape),
                    "work": f"forward and backward, noise {noise}",
                    "against": against,
                    **ratio(
                        step(synchronized, u, grad),
                        step(other, u, grad),
                        pairs,
                        limit=2,
                        fewest=6,
                        meet=dist.barrier,
                        agreed=of_the_first,
                    ),
                }
                for against, other in others.items()
            ]
    dist.destroy_process_group()
    if not rank:
        save(Path(folder, "rows"), found)


def sync(pairs: int, quick: bool) -> Iterator[dict]:
    """A batch that is shared out over one process and, where each has as many
    threads of its own, over two (gloo): the synchronized layer against layers
    that normalize each share by itself. `shape` is that of a share; the time
    is the first process's, which waits for the others.
    """
    threads = torch.get_num_threads()
    for count in (1, 2):
        if count == 1 or count * threads <= os.cpu_count():
            with tempfile.TemporaryDirectory() as folder:
                given = count, threads, folder, pairs, quick
                torch.multiprocessing.spawn(share, given, count)
                rows = load(Path(folder, "rows"))
            yield from rows


# ---- proxy normalization ----

# channels, groups, and a network whose normalizers stand before activations
PROXIED = Layer(
    "GroupNorm with PN", ProxyNorm, nn.GroupNorm, (8, 64), (64, 64, 16, 16)
)
PROXIED_NETWORK = Network(
    "ResNet-20 (CIFAR), batch 32",
    (32, 3, 32, 32),
    "cifar_resnet20",
    {"preactivation": True},
    ProxyNorm,
    nn.GroupNorm,
    0.0,
)


def proxy(pairs: int, quick: bool) -> Iterator[dict]:
    """Group norm with PN in one visit, against PyTorch's group norm with an
    affine map and ReLU: forward and backward pass of the layer, and a training
    step of a ResNet-20 in 8 groups.
    """
    layer, network = PROXIED, PROXIED_NETWORK
    if quick:
        layer = layer._replace(shape=(2, *layer.shape[1:2], 4, 4))
        network = network._replace(batch=(2, 3, 8, 8))
    groups, channels = layer.arguments
    u, grad = layer.input()
    of, rule = "PyTorch's group norm and ReLU", dict(samples=200)
    yield {
        **layer.row,
        "work": "forward and backward, noise 0.0",
        "against": of,
        **ratio(
            step(ProxyNorm(channels, "relu", groups=groups, **rule), u, grad),
            step(
                nn.Sequential(nn.GroupNorm(*layer.arguments), nn.ReLU()),
                u,
                grad,
            ),
            pairs,
            limit=4,
        ),
    }
    ours = to_proxy_norm(
        network.make(nn.BatchNorm2d), groups=groups, fused=True, **rule
    )
    theirs = network.make(lambda c: nn.GroupNorm(groups, c))
    yield {
        "model": network.name,
        "work": "training step, noise 0.0",
        "against": of,
        **ratio(network.step(ours), network.step(theirs), pairs, limit=20),
    }


PARTS = {
    part.__name__: part
    for part in (
        machine,
        layers,
        cached,
        engines,
        memory,
        models,
        compiled,
        sync,
        proxy,
    )
}
