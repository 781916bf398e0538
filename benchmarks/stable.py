"""What a small layer could take if the kernel were operators that are
registered the standard way, in C++ by PyTorch's stable interface: the time of
a training step beside PyTorch's layer, results/stable-operators.json.

    python -m benchmarks.stable

The operators compute a batch norm of rows and nothing else: no transform, no
noise. The interface has no derivatives, so these go through a function of
Python, the cheapest way there is. `drawing` draws a seed at each step, as noise
would ask. So both rows are below what a layer of ours would take. The time is
that of the processor, on one thread.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from benchmarks import files
from benchmarks.measure import BUSY, ratios, step
from normalnorm import BatchNormalNorm1d
from tools.files import ran, save

OUT = files.ROOT / "results" / "stable-operators.json"
SHAPES, PAIRS = ((32, 64), (8, 16)), 200
NAMES = "stable operators", "stable operators, drawing"


def built(folder: Path) -> Path:
    "The operators, compiled."
    made = folder / "stable.so"
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    where = [f"-L{path}" for path in cpp_extension.library_paths()]
    how = "-O3 -march=native -fPIC -shared -std=c++20".split()
    source = str(Path(__file__).with_suffix(".cpp"))
    compiler = (os.environ.get("CXX") or "g++").split()
    line = [*compiler, *how, *include, source, "-o", str(made), *where]
    done = ran([*line, "-ltorch_cpu", "-lc10"])
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)}\n{done.stderr[-2000:]}")
    return made


class Normalized(torch.autograd.Function):
    "The operators with their derivative."

    @staticmethod
    def forward(ctx, u, weight, bias, *others):
        operator = torch.ops.stable_norm.forward.default
        out, kept = operator(u, weight, bias, *others)
        ctx.save_for_backward(u, weight, kept, others[2])
        return out

    @staticmethod
    def backward(ctx, grad):
        operator = torch.ops.stable_norm.backward.default
        return *operator(grad, *ctx.saved_tensors), *[None] * 5


class Layer(torch.nn.BatchNorm1d):
    """What every step needs: the counter, a seed, the call.

    `drawing`: the seed is a new one at each step.
    """

    def __init__(self, count: int, drawing: bool = False):
        super().__init__(count)
        self.drawing, self.seed = drawing, torch.tensor(0)

    def forward(self, u):
        self.num_batches_tracked.add_(1)
        seed = torch.randint(2**62, ()) if self.drawing else self.seed
        running = self.running_mean, self.running_var
        numbers = self.momentum, self.eps
        return Normalized.apply(
            u, self.weight, self.bias, *running, seed, *numbers
        )


def rows() -> list[dict[str, Any]]:
    "For each shape the layers' times beside that of PyTorch's."
    found = []
    for shape in SHAPES:
        count, u = shape[1], torch.randn(shape).requires_grad_()
        layers = {
            **{name: Layer(count, k == 1) for k, name in enumerate(NAMES)},
            "ours without noise": BatchNormalNorm1d(count, noise=0.0),
            "ours": BatchNormalNorm1d(count),
        }
        grad = torch.randn(shape)
        measured = ratios(
            {name: step(layer, u, grad) for name, layer in layers.items()},
            step(torch.nn.BatchNorm1d(count), u, grad),
            PAIRS,
            clock=time.process_time,
            warm=300,
        )
        for name, numbers in measured.items():
            found.append({"layer": name, "shape": shape, **numbers})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.ops.load_library(str(built(Path(folder))))
        BUSY.forget()
        found = {"clock": "processor time", "rows": rows()}
    save(OUT, files.environment(1) | found | {"others": BUSY.share()})
