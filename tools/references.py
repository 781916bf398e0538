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

    return [
        axes(row.unit),
        axes(row.unit if row.centre is None else row.centre),
    ]


class Reference(nn.Module):
    """`layer`, of the table's `row`, for one kind of input: mean and deviation
    over the row's axes.
    """

    def __init__(self, layer: nn.Module, row: Family, kind: str):
        super().__init__()
        self.eps = getattr(layer, "eps", 0.0)
        self.momentum = getattr(layer, "momentum", None)
        self.axes, self.centred = beside(row, kind), row.centre != ""
        self.ndim, self.at = len(kind.split()), kind.split().index("C")
        self.of_eps = type(self.eps)
        self.own = [name for name, _ in layer.named_parameters()]
        for name in dict.fromkeys((*self.own, "weight", "bias", "tau", "v")):
            value = getattr(layer, name, None)
            self.register_parameter(
                name,
                None if value is None else nn.Parameter(value.detach().clone()),
            )
        for name, value in layer._buffers.items():
            self.register_buffer(name, None if value is None else value.clone())

    def wide(self, value: Tensor, x: Tensor) -> Tensor:
        return value.reshape([-1 if d == self.at else 1 for d in range(x.ndim)])

    def remembered(self, name: str, value: Tensor, x: Tensor) -> Tensor:
        "The running average in evaluation; in training `value`, followed."
        average = getattr(self, f"running_{name}", None)
        if average is None:
            return value
        if not self.training:
            return self.wide(average, x)
        n = x.numel() // average.numel()
        weight = (
            1 / self.num_batches_tracked.item()
            if self.momentum is None
            else self.momentum
        )
        if n:  # of nothing nothing is remembered
            average.lerp_(
                value.detach().flatten()
                * (n / (n - 1) if name == "var" else 1),
                weight,
            )
        return value

    def normalized(self, x: Tensor, eps: float) -> Tensor:
        of_scale, of_mean = self.axes
        c = x
        if self.centred:
            c = x - self.remembered("mean", x.mean(of_mean, True), x)
        own = c.mean(of_scale, True) if self.centred else 0
        square = (c - own).square().mean(of_scale, True)
        return c / (self.remembered("var", square, x) + eps).sqrt()

    def mapped(self, x: Tensor) -> Tensor:
        if "weight" in self.own:
            x = x * self.wide(self.weight, x)
        return x + self.wide(self.bias, x) if "bias" in self.own else x

    def check(self, x: Tensor) -> None:
        "As strict as PyTorch's layers are."
        named = {
            name: t
            for name, t in (*self.named_parameters(), *self.named_buffers())
            if t.ndim
        }
        state = named.values()
        if type(self.eps) is not self.of_eps or type(self.momentum) not in (
            float,
            type(None),
        ):
            raise TypeError("ε or momentum is no number")
        if x.ndim != self.ndim:
            raise ValueError(f"{x.ndim} axes, expected {self.ndim}")
        for name, t in named.items():
            if t.shape != x.shape[self.at : self.at + 1]:
                raise ValueError(
                    f"{name} has the shape {tuple(t.shape)}, expected one "
                    "number a channel, or ()"
                )
        if not all(
            t.is_floating_point() and t.dtype in (x.dtype, torch.float32)
            for t in (x, *state)
        ) or (
            x.dtype is torch.float64 and any(t.dtype != x.dtype for t in state)
        ):
            raise TypeError("types that do not fit")

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        counted = getattr(self, "num_batches_tracked", None)
        if self.training and counted is not None:
            counted += 1
        return self.computed(x)

    def computed(self, x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        out = self.mapped(self.normalized(x, eps))
        if self.tau is not None:
            out = torch.maximum(out, self.wide(self.tau, x))
        return out


class _Kept(torch.autograd.Function):
    "The input, which is asked for again in the backward pass."

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.view_as(x)


class ByFormula(Reference):
    """A layer whose row brings its formula; keeps its input, as PyTorch's fused
    layers do.
    """

    def __init__(self, layer: nn.Module, row: Family, kind: str):
        super().__init__(layer, row, kind)
        self.formula = row.reference
        for name, value in vars(layer).items():
            if name[0] != "_" and not hasattr(self, name):
                setattr(self, name, value)

    def computed(self, x: Tensor) -> Tensor:
        return self.formula(self, _Kept.apply(x))


def reference(layer: nn.Module, row: Family, kind: str) -> Reference | None:
    "None for layers that are compared with those of torch.nn."
    if row.reference is not None:
        return ByFormula(layer, row, kind)
    return None if row.centre is None else Reference(layer, row, kind)
