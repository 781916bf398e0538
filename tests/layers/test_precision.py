"""One rule for all layers: what float16 cannot hold becomes its largest number,
in results, while a gradient beyond it is infinite, which loss scaling waits
for; and an input of float64 is refused by a layer of float32, as by PyTorch's.
"""

import copy

import pytest
import torch
from torch import nn

from normalnorm.layers import functional as F
from normalnorm.layers.backends import set_backend
from normalnorm.layers.families import family_of
from normalnorm.theory.gaussianizers import Chain, Tail
from tests.layers.test_traced import LAYERS, images
from tests.refusals import refusals
from tests.state.record import exported

C = exported()
LARGEST = torch.finfo(torch.float16).max
EVERY = {name: trial.ours for name, trial in LAYERS.items()}
EVERY |= {
    "chain": LAYERS["batch2"].having(gaussianizer=Chain()).ours,
    "tails": LAYERS["layer"].having(gaussianizer=Tail()).ours,
    "folded": lambda: C["FoldedNormality"](
        torch.full((4,), 0.9), torch.ones(4), torch.ones(4)
    ),
}
SYNCHRONIZED = [n for n in EVERY if n.startswith("sync")]


def large(name, dtype, training=True, bias=100.0) -> nn.Module:
    "Results of about ±10⁵, from parameters of `dtype`."
    layer = EVERY[name]().train(training)
    layer.noise = 0.0
    with torch.no_grad():
        layer.weight.fill_(6e4)
        if layer.bias is not None:
            layer.bias.fill_(bias)
    return layer.to(dtype)


def check(name, dtype, training):
    u = images(7).half()
    for bias in (100.0, 6e4):  # with which a bounded layer comes as far
        layer = large(name, dtype, training, bias)
        expected = copy.deepcopy(layer).double()(u.double())
        if (expected.abs() > 1.2 * LARGEST).any():
            break
    else:
        raise AssertionError("the case tries nothing")
    assert expected.isfinite().all()
    out = layer(u)
    assert out.dtype == torch.float16 and out.isfinite().all()
    beyond = expected.abs() > 1.01 * LARGEST
    assert torch.equal(out[beyond].double(), expected[beyond].sign() * LARGEST)
    inside = expected.abs() < 0.99 * LARGEST
    # two roundings of float16, at 6·10⁴
    torch.testing.assert_close(
        out[inside].double(), expected[inside], rtol=4e-3, atol=200
    )


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", EVERY)
def test_results_beyond_float16(name, dtype, training, backend):
    with set_backend(backend):
        check(name, dtype, training)


@pytest.mark.parametrize("name", SYNCHRONIZED)
def test_results_beyond_float16_across_processes(name, exchanging):
    for dtype in (torch.float16, torch.float32):
        check(name, dtype, True)


@pytest.mark.parametrize("name", EVERY)
def test_infinities_and_nan_stay(name):
    layer = large(name, torch.float32, False)
    with torch.no_grad():
        last = layer.weight if layer.bias is None else layer.bias
        last.copy_(torch.linspace(0, 1, last.numel()))
        last[0], last[1] = torch.inf, torch.nan
    u = images().half()
    out = layer(u)
    row = family_of(layer)
    axis = -1 if row is not None and row.axes.startswith("B … C") else 1
    assert (
        out.select(axis, 0).isinf().all()
        and out.select(axis, 1).isnan().all()
        and out.select(axis, 2).isfinite().all()
    )


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", EVERY)
def test_gradients_beyond_float16_are_infinite(name, backend):
    "As those of PyTorch's layers: GradScaler looks for infinities."
    layer, u = (
        large(name, torch.float32),
        (1e-2 * images()).half().requires_grad_(),
    )
    with set_backend(backend):
        out = layer(u)
        out.backward(torch.randn(out.shape).half() * 1e3)
    assert (
        u.grad.dtype == torch.float16
        and u.grad.isinf().any()
        and not u.grad.isnan().any()
    )


# ---- float64 ----------------------------------------------------------------


@pytest.mark.parametrize("name", SYNCHRONIZED)
def test_float64_across_processes(name, exchanging):
    with pytest.raises(TypeError, match="expected one precision"):
        EVERY[name]()(images().double())
    assert EVERY[name]().double()(images().double()).dtype == torch.float64


u, w = images().double(), torch.ones(4)
test_float64_in_functions = refusals(
    (
        (call, "expected one precision")
        for call in (
            lambda: F.batch_normal_norm(u, weight=w, training=True),
            lambda: F.group_normal_norm(u, 2, w),
            lambda: F.instance_normal_norm(u, weight=w),
            lambda: F.layer_normal_norm(u, (6,), torch.ones(6)),
        )
    ),
    error=TypeError,
)
