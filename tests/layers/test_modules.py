"""Exported modules that have no row in the table of layers: maps with a
normalizer inside, an activation, what folding leaves, weights.

Their copies and files: test_state.py.
"""

import copy

import pytest
import torch
from torch import fx, nn

from normalnorm.layers.families import family_of
from tests.peers import FOLLOWS
from tests.state import record


def made(case):
    "A module, and an input."
    arguments, options, shape = record.CASES[case]
    torch.manual_seed(0)
    module = record.made(case.partition("-")[0], arguments, options)
    return module, record.skewed(shape, 7).float()


CASES = [case for case in record.CASES if family_of(made(case)[0]) is None]
EACH = pytest.mark.parametrize("case", CASES)


def term_of(module):
    "What RegNorm adds to a loss."
    return vars(module).pop("loss_term", torch.zeros(()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@EACH
def test_half_precision(case, dtype):
    "Under autocast, and of the module in half precision."
    module, u = made(case)
    exact, low = module(u).detach(), copy.deepcopy(module).to(dtype)
    with torch.autocast("cpu", dtype):
        mixed = module(u)
    assert term_of(module).dtype is torch.float32
    out = low(u.to(dtype).requires_grad_())
    assert out.dtype is dtype
    for found in (mixed, out):
        error = (found.float() - exact).abs().max()
        assert error < 12 * torch.finfo(dtype).eps * exact.abs().max()
    out.float().square().sum().backward()
    for p in low.parameters():
        assert p.grad.isfinite().all() and p.grad.dtype is dtype


@EACH
def test_an_empty_batch(case):
    module, u = made(case)
    out = module(u[:0].requires_grad_())
    assert out.shape == (0, *module(u).shape[1:])
    out.sum().backward()


@EACH
def test_fx_takes_it_as_one(case):
    traced = fx.symbolic_trace(nn.Sequential(made(case)[0]))
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == [
        "0"
    ]


@FOLLOWS
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case",
    [
        "ProxyNorm",
        "PreLayerNormConv2d",
        "RegNormConv2d",
        "PreRegNormLinear",
    ],
)
def test_compiled_and_exported(case):
    "With the penalty, which is left in a break of the graph."
    module, u = made(case)
    more, found = torch.cat([u, 2 * u, u]), []
    for f in (
        module,
        torch.compile(module, backend="aot_eager", fullgraph="Reg" not in case),
    ):
        loss = f(u).sin().sum() + term_of(module)
        found.append([loss, *torch.autograd.grad(loss, module.parameters())])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    program = torch.export.export(
        module.eval(),
        (u,),
        dynamic_shapes=({0: torch.export.Dim("batch", min=2)},),
    )
    torch.testing.assert_close(
        program.module()(more), module(more), rtol=1e-4, atol=1e-5
    )
