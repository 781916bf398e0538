"""What a row of the table says, written down a second time: PyTorch operations
over the axes that its letters name, for layers that have no twin in torch.nn.

It takes nothing from a layer but the names and values of its state.
"""
import torch
from torch import Tensor, nn

from normalnorm.layers.families import Family


def beside(row: Family, kind: str) -> list[list[int]]:
    "The axes of an input that is not told apart by the unit's, by the mean's."
    letters = kind.split()

    def axes(kept: str) -> list[int]:
        told = set(kept.split())
        told |= set(letters) - {"B", "C"} if "…" in told else set()
        return [i for i, letter in enumerate(letters) if letter not in told]

    return [axes(row.unit),
            axes(row.unit if row.centre is None else row.centre)]


class Reference(nn.Module):
    "`layer`, of the table's `row`, for one kind of input."

    def __init__(self, layer: nn.Module, row: Family, kind: str):
        super().__init__()
        self.eps, self.momentum = layer.eps, getattr(layer, "momentum", None)
        self.axes, self.centred = beside(row, kind), row.centre != ""
        self.ndim, self.at = len(kind.split()), kind.split().index("C")
        self.own = [name for name, _ in layer.named_parameters()]
        for name in ("weight", "bias", "tau"):
            value = getattr(layer, name, None)
            self.register_parameter(name, None if value is None else
                                    nn.Parameter(value.detach().clone()))
        for name, value in layer.named_buffers():
            self.register_buffer(name, value.clone())

    def wide(self, value: Tensor, x: Tensor) -> Tensor:
        return value.reshape(
            [-1 if d == self.at else 1 for d in range(x.ndim)])

    def remembered(self, name: str, value: Tensor, x: Tensor) -> Tensor:
        "The running average in evaluation; in training `value`, followed."
        average = getattr(self, f"running_{name}", None)
        if average is None:
            return value
        if not self.training:
            return self.wide(average, x)
        n = x.numel() // average.numel()
        weight = (1 / self.num_batches_tracked if self.momentum is None
                  else self.momentum)
        average.lerp_(value.detach().flatten() * (
            n / (n - 1) if name == "var" else 1), weight)
        return value

    def check(self, x: Tensor) -> None:
        "As strict as PyTorch's layers are."
        state = [t for t in (*self.parameters(), *self.buffers()) if t.ndim]
        if not {type(self.eps), type(self.momentum)} <= {float, type(None)}:
            raise TypeError("ε or momentum is no number")
        if x.ndim != self.ndim or any(
                t.shape != x.shape[self.at:self.at + 1] for t in state):
            raise ValueError("sizes that do not fit")
        if not all(t.is_floating_point() and t.dtype in (
                x.dtype, torch.float32) for t in (x, *state)) or (
                    x.dtype is torch.float64
                    and any(t.dtype != x.dtype for t in state)):
            raise TypeError("types that do not fit")

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        if self.training and hasattr(self, "num_batches_tracked"):
            self.num_batches_tracked += 1
        of_scale, of_mean = self.axes
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        c = x
        if self.centred:
            c = x - self.remembered("mean", x.mean(of_mean, True), x)
        own = c.mean(of_scale, True) if self.centred else 0
        square = (c - own).square().mean(of_scale, True)
        out = c / (self.remembered("var", square, x) + eps).sqrt()
        if "weight" in self.own:
            out = out * self.wide(self.weight, x)
        if "bias" in self.own:
            out = out + self.wide(self.bias, x)
        return out if self.tau is None else torch.maximum(
            out, self.wide(self.tau, x))
