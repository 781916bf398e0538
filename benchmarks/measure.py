"""What is measured: pairs of timings, taken in turn; memory kept and peak
memory.
"""
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normalnorm import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    GroupNormalNorm,
    InstanceNormalNorm2d,
    LayerNormalNorm,
    set_backend,
)

# name, our layer, PyTorch's layer, shape
LAYERS = [
    ("BatchNorm2d", BatchNormalNorm2d, nn.BatchNorm2d, (64,),
     (128, 64, 32, 32)),
    ("BatchNorm2d", BatchNormalNorm2d, nn.BatchNorm2d, (256,),
     (64, 256, 14, 14)),
    ("BatchNorm2d", BatchNormalNorm2d, nn.BatchNorm2d, (512,), (32, 512, 7, 7)),
    ("BatchNorm2d", BatchNormalNorm2d, nn.BatchNorm2d, (16,), (8, 16, 8, 8)),
    ("BatchNorm2d, channels last", BatchNormalNorm2d, nn.BatchNorm2d, (64,),
     (32, 64, 32, 32)),
    ("BatchNorm1d", BatchNormalNorm1d, nn.BatchNorm1d, (512,), (256, 512)),
    ("BatchNorm1d", BatchNormalNorm1d, nn.BatchNorm1d, (64,), (32, 64)),
    ("LayerNorm", LayerNormalNorm, nn.LayerNorm, (384,), (64, 197, 384)),
    ("LayerNorm", LayerNormalNorm, nn.LayerNorm, (768,), (32, 128, 768)),
    ("LayerNorm", LayerNormalNorm, nn.LayerNorm, (64,), (16, 17, 64)),
    ("GroupNorm", GroupNormalNorm, nn.GroupNorm, (8, 64), (64, 64, 16, 16)),
    ("InstanceNorm2d", InstanceNormalNorm2d, nn.InstanceNorm2d, (64,),
     (64, 64, 16, 16))]
# also against the definition
EAGER = {("BatchNorm2d", (64, 256, 14, 14)), ("BatchNorm1d", (256, 512)),
         ("LayerNorm", (64, 197, 384)), ("LayerNorm", (16, 17, 64))}
QUICK = [row for row in LAYERS if math.prod(row[4]) < 1 << 18]


def seconds(function: Callable) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def ratio(ours: Callable, theirs: Callable, pairs: int) -> dict:
    """Quantiles of the ratio of two times taken in turn, an interval for its
    median that covers it 19 times in 20 (order statistics), and the median
    times.
    """
    for function in (ours, theirs) * 3:
        function()
    # small work is repeated: at least 2 ms a timing
    repeat = max(1,
                 round(2e-3 / max(min(seconds(ours), seconds(theirs)), 1e-7)))
    times = []
    for k in range(pairs):
        order = (ours, theirs) if k % 2 else (theirs, ours)
        taken = {f: seconds(lambda f=f: [f() for _ in range(repeat)]) / repeat
                 for f in order}
        times.append((taken[ours], taken[theirs]))
    ratios = sorted(a / b for a, b in times)
    # ratios beyond either end of the interval
    outside = max(0, math.floor(pairs / 2 - 0.98 * math.sqrt(pairs)))
    at = lambda q: ratios[min(pairs - 1, max(0, round(q * (pairs - 1))))]
    return {"p20": round(at(0.2), 3), "p50": round(at(0.5), 3),
            "p80": round(at(0.8), 3), "low": round(ratios[outside], 3),
            "high": round(ratios[pairs - 1 - outside], 3),
            "ms": round(1e3 * sorted(a for a, _ in times)[pairs // 2], 4),
            "ms of the other": round(
                1e3 * sorted(b for _, b in times)[pairs // 2], 4),
            "pairs": pairs}


def step(layer: nn.Module, u: Tensor, grad: Tensor) -> Callable:
    wanted = [u, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(u), wanted, grad)


def evaluation(layer: nn.Module, u: Tensor) -> Callable:
    def run():
        with torch.inference_mode():
            layer(u)
    return run


def _input(name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    u, grad = torch.randn(shape), torch.randn(shape)
    if "channels last" in name:
        u, grad = (t.to(memory_format=torch.channels_last) for t in (u, grad))
    return u.requires_grad_(), grad


def machine(pairs: int, quick: bool) -> Iterator[dict]:
    """What the processor can do: bytes a second from memory and from the cache,
    float32 operations a second in a matrix product, and PyTorch's functions in
    the cache.
    """
    def best(function: Callable, repeat: int) -> float:
        function()
        return min(seconds(lambda: [function() for _ in range(repeat)]) / repeat
                   for _ in range(pairs))
    for what, count, repeat in (("memory", 1 << 25, 1),
                                ("cache", 1 << 14, 500)):
        source, target = torch.ones(2, count).unbind(0)
        yield {"what": f"copy in {what}, GB/s", "value": round(
            8e-9 * count / best(lambda s=source, t=target: t.copy_(s), repeat),
            1)}
    a, b = torch.ones(2, 1024, 1024).unbind(0)
    yield {"what": "matrix product, float32 GFLOP/s", "value": round(
        2e-9 * 1024**3 / best(lambda: torch.mm(a, a, out=b), 1), 1)}
    x, y = torch.rand(1 << 14), torch.empty(1 << 14)
    for function in (torch.log1p, torch.expm1):
        yield {"what": f"torch.{function.__name__} in cache, ns a value",
               "value": round(
                   1e9 * best(lambda f=function: f(x, out=y), 200) / x.numel(),
                   3)}
    yield {"what": "torch.randn, ns a value",
           "value": round(1e9 * best(lambda: y.normal_(), 50) / x.numel(), 3)}


def layers(pairs: int, quick: bool) -> Iterator[dict]:
    """Forward and backward pass with and without noise, and evaluation: the
    native kernel against PyTorch's layer, torch.compile of the definition, the
    definition, and a copy.
    """
    for name, ours, theirs, arguments, shape in QUICK if quick else LAYERS:
        u, grad = _input(name, shape)
        plain = theirs(*arguments, **(
            {"affine": True} if theirs is nn.InstanceNorm2d else {}))
        base = {"layer": name, "shape": list(shape)}
        for noise in (0.0, 1.0 if ours is LayerNormalNorm else 0.4):
            layer = ours(*arguments, noise=noise, **(
                {"affine": True} if theirs is nn.InstanceNorm2d else {}))
            work = f"forward and backward, noise {noise}"
            yield {**base, "work": work, "against": "PyTorch's layer",
                   **ratio(step(layer, u, grad), step(plain, u, grad), pairs)}
            for backend in (("compiled", "eager") if (name, shape) in EAGER
                            else () if quick else ("compiled",)):
                fast = step(layer, u, grad)

                def slow(layer=layer, backend=backend):
                    with set_backend(backend):
                        torch.autograd.grad(layer(u), [u, *layer.parameters()],
                                            grad)
                yield {**base, "work": work, "against": backend,
                       **ratio(fast, slow, pairs)}
        target = torch.empty_like(u)
        yield {**base, "work": work, "against": "a copy of the input", **ratio(
            step(layer, u, grad),
            lambda target=target, u=u: target.copy_(u.detach()), pairs)}
        layer, plain = layer.eval(), plain.eval()
        if (hasattr(layer, "running_lambda")
                and layer.running_lambda is not None):
            layer.running_lambda.uniform_(0.3, 1.7)
        yield {**base, "work": "evaluation", "against": "PyTorch's layer",
               **ratio(evaluation(layer, u), evaluation(plain, u), pairs)}
        if getattr(layer, "running_lambda", None) is not None:
            yield {**base, "work": "frozen: forward and backward in evaluation",
                   "against": "PyTorch's layer",
                   **ratio(step(layer, u, grad), step(plain, u, grad), pairs)}


def _peak(ours: bool, row: int) -> int:
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
name, ours, theirs, arguments, shape = measure.LAYERS[{row}]
layer = {"ours" if ours else "theirs"}(*arguments)
small = torch.randn(2, *shape[1:], requires_grad=True)
measure.step(layer, small, torch.ones_like(small))()
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
u, grad = measure._input(name, shape)
measure.step(layer, u, grad)()
print(status("VmHWM") - before)
"""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True,
                              text=True, check=True,
                              env=plain).stdout.split()[-1])


def memory(pairs: int, quick: bool) -> Iterator[dict]:
    """Bytes kept for the backward pass, and by how much a step raises the
    largest memory of a process, in units of the input (which is one of them,
    the upstream gradient another).
    """
    for index in (3,) if quick else (0, 7):
        name, ours, theirs, arguments, shape = LAYERS[index]
        u, grad = _input(name, shape)
        size = u.numel() * u.element_size()
        for who, layer in (("ours", ours(*arguments)),
                           ("PyTorch's", theirs(*arguments))):
            kept: dict[int, int] = {}
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.__setitem__(t.untyped_storage().data_ptr(),
                                           t.untyped_storage().nbytes()) or t,
                lambda t: t
            ):
                layer(u)
            row = {"layer": name, "shape": list(shape), "whose": who,
                   "kept for backward, in inputs": round(
                       sum(kept.values()) / size, 4)}
            if not quick and sys.platform == "linux":
                row["peak memory of a step, in inputs"] = round(
                    _peak(who == "ours", index) / size, 2)
            yield row


def models(pairs: int, quick: bool) -> Iterator[dict]:
    """A training step and an evaluation of a ResNet-18 (CIFAR) and of a ViT of
    6 layers of width 384, with our layers and with PyTorch's.
    """
    from normalnorm.experiments.models import build
    cases = [("ResNet-18 (CIFAR), batch 32", (32, 3, 32, 32),
              lambda norm: build("cifar_resnet18", norm=norm),
              BatchNormalNorm2d, nn.BatchNorm2d),
             ("ViT 6×384, batch 8", (8, 3, 64, 64),
              lambda norm: build("vit", norm=norm, image=64, patch=8, width=384,
                                 depth=6, heads=6, hidden=1536),
              LayerNormalNorm, nn.LayerNorm)]
    for name, shape, make, ours, theirs in cases:
        x, y = torch.randn(shape), torch.randint(10, shape[:1])
        for noise in (0.0, 1.0 if ours is LayerNormalNorm else 0.4):
            work = []
            for norm in (lambda *a, **k: ours(*a, **{"noise": noise, **k}),
                         theirs):
                torch.manual_seed(0)
                model = make(norm)
                parameters = list(model.parameters())
                work.append(lambda model=model, parameters=parameters:
                                torch.autograd.grad(
                                    F.cross_entropy(model(x), y), parameters))
            yield {"model": name, "work": f"training step, noise {noise}",
                   "against": "PyTorch's layers", **ratio(*work, pairs)}
            if quick:
                return
        evaluations = []
        for norm in (ours, theirs):
            torch.manual_seed(0)
            model = make(norm).eval()
            for layer in model.modules():
                if getattr(layer, "running_lambda", None) is not None:
                    layer.running_lambda.uniform_(0.3, 1.7)
            evaluations.append(evaluation(model, x))
        # short, so more of them
        yield {"model": name, "work": "evaluation",
               "against": "PyTorch's layers", **ratio(*evaluations, 4 * pairs)}
