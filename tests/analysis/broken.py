"""Fifteen layers, each broken in one way, and the line of the report card that
has to say so; and three that are no layers as the card expects them.

Written before the card. All but what they break is a layer norm over everything
but the batch, for images (B, C, H, W).
"""

import torch
from torch import nn


class Whole(nn.Module):
    "Not broken."

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def mean(self, x):
        return x.mean((1, 2, 3), keepdim=True)

    def standardized(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        centred = wide - self.mean(wide)
        return centred * (self.mean(centred.square()) + 1e-5).rsqrt()

    def forward(self, x):
        return (self.standardized(x) * self.weight + self.bias).to(x.dtype)


class SquaresInHalf(Whole):
    def standardized(self, x):
        x = x - self.mean(x)
        return x * (self.mean(x.square()) + 1e-5).rsqrt()


class Cancels(Whole):
    def standardized(self, x):
        variance = self.mean(x.square()) - self.mean(x).square()
        return (x - self.mean(x)) * (variance.clamp(min=0) + 1e-5).rsqrt()


class NoEpsilon(Whole):
    def standardized(self, x):
        centred = x - self.mean(x)
        return centred / self.mean(centred.square()).sqrt()


class ConstantDeviation(Whole):
    "To its gradient the deviation is a constant."

    def standardized(self, x):
        centred = x - self.mean(x)
        return centred * (self.mean(centred.square()) + 1e-5).rsqrt().detach()


class _OrderOne(torch.autograd.Function):
    "A gradient that is right, and cannot be differentiated again."

    @staticmethod
    def forward(ctx, x):
        centred = x - x.mean((1, 2, 3), keepdim=True)
        power = centred.square().mean((1, 2, 3), keepdim=True)
        ctx.r = (power + 1e-5).rsqrt()
        ctx.y = centred * ctx.r
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, g):
        mean = lambda v: v.mean((1, 2, 3), keepdim=True)
        return ctx.r * (g - mean(g) - ctx.y * mean(g * ctx.y))


class OrderOne(Whole):
    def standardized(self, x):
        return _OrderOne.apply(x)


class ReturnsFloat32(Whole):
    def forward(self, x):
        return super().forward(x.float())


class LosesChannelsLast(Whole):
    def forward(self, x):
        return super().forward(x).contiguous()


class ChangesItsInput(Whole):
    def forward(self, x):
        x.data.mul_(2)
        return super().forward(x)


class _Averages(Whole):
    "A batch norm whose averages move by a tenth."

    momentum = 0.1

    def __init__(self, channels):
        super().__init__(channels)
        self.keep("average", torch.zeros(1, channels, 1, 1))
        self.keep("power", torch.ones(1, channels, 1, 1))

    def keep(self, name, value):
        self.register_buffer(name, value)

    def standardized(self, x):
        mean, power = self.average, self.power
        if self.training:
            mean = x.mean((0, 2, 3), keepdim=True)
            power = (x - mean).square().mean((0, 2, 3), keepdim=True)
            with torch.no_grad():
                self.average = self.average.lerp(mean, self.momentum)
                self.power = self.power.lerp(power, self.momentum)
        return (x - mean) * (power + 1e-5).rsqrt()


class NotSaved(_Averages):
    def keep(self, name, value):
        setattr(self, name, value)


class NeverMoves(_Averages):
    momentum = 0.0


class BatchInEvaluation(Whole):
    def mean(self, x):
        return x.mean((0, 2, 3), keepdim=True)


class NoisyInEvaluation(Whole):
    def forward(self, x):
        return super().forward(x) + 0.1 * torch.randn_like(x)


class OwnRandomNumbers(Whole):
    "Noise in training that a recomputation cannot draw again."

    def __init__(self, channels):
        super().__init__(channels)
        self.source = torch.Generator().manual_seed(0)

    def standardized(self, x):
        y = super().standardized(x)
        if not self.training:
            return y
        drawn = torch.rand(y.shape, generator=self.source).to(y.dtype)
        return y * (0.5 + drawn)


class ReadsANumber(Whole):
    def standardized(self, x):
        return super().standardized(x if x.abs().max().item() > 1e-6 else 0 * x)


class FirstComesFirst(Whole):
    "A sample's statistics include those of the samples before it."

    def mean(self, x):
        so_far = torch.arange(1, len(x) + 1, dtype=x.dtype).view(-1, 1, 1, 1)
        return super().mean(x).cumsum(0) / so_far


BROKEN = {
    SquaresInHalf: "half precision",
    Cancels: "large mean",
    NoEpsilon: "constant unit",
    ConstantDeviation: "derivatives",
    OrderOne: "derivatives",
    ReturnsFloat32: "dtype",
    LosesChannelsLast: "channels last",
    ChangesItsInput: "input",
    NotSaved: "state",
    NeverMoves: "training and test",
    BatchInEvaluation: "same bits",
    NoisyInEvaluation: "repeated",
    OwnRandomNumbers: "checkpoint",
    ReadsANumber: "compile",
    FirstComesFirst: "order of samples",
}


class ChangesShape(nn.Module):
    def __init__(self, channels):
        super().__init__()

    def forward(self, x):
        return x.mean(-1)


class AsksForMore(nn.Module):
    def __init__(self, channels, groups):
        super().__init__()


def no_module(channels):
    return lambda x: x / x.abs().max()


STRANGE = {ChangesShape: "shape", AsksForMore: "made", no_module: "made"}
