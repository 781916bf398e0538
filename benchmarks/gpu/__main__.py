"""Measure what a GPU does with the layers, within a number of minutes, and keep
each part in a file of its own under results/gpu/CARD.

    make gpu MINUTES=9
    PYTHONPATH=. python -m benchmarks.gpu --minutes 9

A row is kept as soon as it is there, and what is there from this code, card,
PyTorch and Triton is not measured again: the same command goes on. Nothing is
fetched, nbdev is not needed. Without a GPU every part runs at a tiny size, with
the prototypes in Triton's interpreter; such rows are marked, say nothing of
speed, and go to _build/gpu.
"""

import argparse
import hashlib
import importlib
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

CUDA = torch.cuda.is_available()
if not CUDA:  # before anything imports Triton
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if CUDA else "cpu")
CARD = torch.cuda.get_device_name() if CUDA else "cpu, interpreted"

from torch import Tensor, nn  # noqa: E402

from benchmarks import files, measure  # noqa: E402
from normalnorm import BatchNormalNorm2d, LayerNormalNorm  # noqa: E402
from normalnorm.layers import core  # noqa: E402
from normalnorm.layers.backends import set_backend  # noqa: E402
from normalnorm.layers.engines import compiled  # noqa: E402

Row = dict[str, object]
Job = tuple[Row, Callable[[], Row]]
# of output and input gradient, of the parameters' gradients, relative to the
# largest value (Triton's interpreter cuts bfloat16 off), and of λ
LIMITS = {
    torch.float32: (4e-6, 4e-6, 2e-5),
    torch.bfloat16: (8.5e-3, 1e-4, 2e-5),
}
LAST = torch.channels_last


def code() -> str:
    "Of the layers, of what they use and of this folder: 12 digits of a hash."
    found = hashlib.sha256()
    for folder in ("benchmarks/gpu", "normalnorm/layers", "normalnorm/theory"):
        for path in sorted((files.ROOT / folder).rglob("*.py")):
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


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
        "code": code(),
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
        pairs if CUDA else 2,
        limit=2.0 if CUDA else 0.0,
        fewest=2,
        clock=clock,
        warm=3 if CUDA else 1,
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
    return torch.tensor(2**61 + 12345, device=DEVICE)


def prototype(
    name: str, x, w, b, dy, parts: int | None = None, **settings
) -> Callable:
    "Forward and backward pass by a prototype: output, gradients, numbers."
    module = kernel(name)
    settings["seed"] = seed()
    few = {} if parts is None else {"programs": parts}

    def run():
        if name == "rows":
            y, kept = module.forward(x, w, b, **settings)
            return (
                y,
                *module.backward(dy, x, kept, w, True, **settings, **few),
                kept,
            )
        y, kept = module.forward(x, w, b, **settings, **few)
        return y, *module.backward(dy, x, kept, w, **settings, **few), kept

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
        for shape in found[few]:
            for dtype in LIMITS:
                for rule in rules[few]:
                    for last in (False, True)[: 1 + (len(shape) == 4)]:
                        yield (
                            {
                                "kernel": kind,
                                "shape": list(shape),
                                "dtype": str(dtype)[6:],
                                "last": last,
                                "alpha, noise, kind": list(rule),
                            },
                            partial(errors, kind, shape, dtype, rule, last),
                        )


def errors(kind, shape, dtype, settings, last) -> Row:
    alpha, noise, how = settings
    x, dy = numbers(shape, dtype, last)
    w, b = parameters(shape, kind)
    y, *grads, kept = prototype(
        kind,
        x,
        w,
        b,
        dy,
        3 if kind == "rows" else 3 * shape[1],
        alpha=alpha,
        noise=noise,
        kind=how,
    )()
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    view = (-1,) if kind == "rows" else (-1, *(1,) * (len(shape) - 2))
    dims = (-1,) if kind == "rows" else (0, *range(2, len(shape)))
    out, used = core.by_autograd(
        wide[0],
        dims,
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
        "holds": all(
            e <= limit
            for e, limit in zip(
                far, (of_x, of_x, of_weight, of_weight, of_lmbda)
            )
        ),
    }


def ceilings() -> Iterator[Job]:
    "Bytes copied, multiplications with addition, special functions a second."
    count = 1 << (28 if CUDA else 12)

    def copied() -> Row:
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

    yield {"what": "copy"}, copied
    yield {"what": "multiply_add"}, partial(rate, "multiply_add")
    yield {"what": "special"}, partial(rate, "special")


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

    def by(self, who: str) -> Row:
        if who == "prototype":
            n = self.plain.weight.numel()
            w, b = (torch.full((n,), v, device=DEVICE) for v in (1.0, 0.0))
            return compared(
                prototype(self.kind, self.x, w, b, self.dy, noise=self.noise),
                self.step(self.plain),
            )
        compiled._refused.clear()
        with set_backend(who):
            row = compared(self.step(self.ours), self.step(self.plain))
        if who == "compiled" and (
            why := compiled._trouble(DEVICE) or compiled._refused
        ):
            raise RuntimeError(f"torch.compile did not compute this: {why}")
        return row


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


def by(who: str, *case: object) -> Row:
    return Case(*case).by(who)


def against(who: tuple[str, ...], shapes: list) -> Iterator[Job]:
    "Forward and backward pass in times of PyTorch's layer, in one run."
    for kind, shape in shapes if CUDA else TINY:
        for dtype in LIMITS if CUDA else [torch.float32]:
            for last in (False, True)[: 1 + (kind == "staged" and CUDA)]:
                for noise in (0.0, 0.4):
                    for name in who:
                        yield (
                            {
                                "layer": "layer" if kind == "rows" else "batch",
                                "shape": list(shape),
                                "dtype": str(dtype)[6:],
                                "last": last,
                                "noise": noise,
                                "by": name,
                            },
                            partial(by, name, kind, shape, dtype, noise, last),
                        )


PARTS: dict[str, Callable[[], Iterator[Job]]] = {
    "correctness": correctness,
    "ceilings": ceilings,
    "layers": partial(against, ("eager", "compiled"), SHAPES),
    "prototypes": partial(against, ("prototype",), SHAPES),
    "small": partial(against, ("eager", "compiled", "prototype"), SMALL),
}


def tried(work: Callable[[], Row]) -> Row:
    "Its result; where it cannot be had, why."
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an engine stands in
            return work()
    except Exception as error:  # a row that fails takes no other along
        return {"left out": f"{type(error).__name__}: {error}"[:300]}


def run(part: str, here: Row, folder: Path, until: float) -> bool:
    "Go on with a part until the time is over; whether all its rows are there."
    path = folder / f"{part}.json"
    record = files.read(path)
    same = ("device", "code", "torch", "triton")
    if any(record["environment"].get(key) != here[key] for key in same):
        record = files.nothing()
    record["environment"] = here | record["environment"]
    jobs = list(PARTS[part]())
    for about, work in jobs:
        about = {"part": part, "device": CARD, **about}
        if any(about.items() <= row.items() for row in record["rows"]):
            continue
        if time.monotonic() > until:
            return False
        record["rows"].append(about | tried(work))
        record["parts"] = {part: {"rows": len(record["rows"]), "of": len(jobs)}}
        files.write(path, record)
        shown = {**record["rows"][-1]}
        del shown["part"], shown["device"]
        print(part, *(f"{k}: {v};" for k, v in shown.items()), flush=True)
    return True


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
    folder = given.out / re.sub(r"[^a-z0-9]+", "-", CARD.lower())
    folder.mkdir(parents=True, exist_ok=True)
    todo = [part for part in PARTS if part in (given.parts or PARTS)]
    missing = [p for p in todo if not run(p, here, folder, until)]
    wrong = [
        row
        for p in todo
        for row in files.read(folder / f"{p}.json")["rows"]
        if row.get("holds") is False
    ]
    print(
        f"{folder}: "
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
    sys.exit(main())
