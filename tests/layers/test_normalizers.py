"""The normalizers of part 3 beside PyTorch's, timm's, and loops over elements;
in half precision, in memory's other orders, compiled, converted and back.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normalnorm.layers import hybrids
from normalnorm.layers.conversion import to_normality
from normalnorm.layers.core import normality_norm
from normalnorm.layers.families import family_of, rows
from normalnorm.layers.hybrids import (
    NORMALIZERS,
    BatchReNorm,
    EvoNorm2d,
)
from normalnorm.layers.normalizers import (
    About,
    RootMeanSquareNorm,
)
from normalnorm.theory.gaussianizers import Chain
from normalnorm.theory.gradient import Power
from normalnorm.theory.newton import Over, newton_lambda
from normalnorm.theory.power_transform import yeo_johnson
from tests.layers.steps import refusals, step, uncut
from tests.peers import TORCH, installed
from tools.rows import accepted

HERE = {"normalnorm.layers.normalizers", "normalnorm.layers.hybrids"}
MINE = {row.names[0]: row for row in rows() if row.layer.__module__ in HERE}
# with values standardized over one set, which can be transformed
SETS = {"bmlv": (1, 2, 3), "lmbv": (0, 2, 3), "rms": (2,), "frn": (2, 3)}


def made(name, channels=5, **options):
    """Without what a layer does not take; EvoNorm with one group, unless it
    divides.
    """
    known = accepted(MINE[name].layer)
    if "num_groups" in known:
        options = {"num_groups": 1} | options
    return MINE[name].make(
        channels, **{k: v for k, v in options.items() if k in known}
    )


def images(shape=(3, 5, 2, 7), seed=0, dtype=torch.float64):
    return (
        torch.randn(
            shape,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )
        .exp()
        .to(dtype)
    )


def moved(layer):
    "Weights that are not neutral."
    for i, p in enumerate(layer.parameters()):
        p.data += torch.linspace(-0.4, 0.3 + i, p.numel()).to(p).view(p.shape)
    return layer


@pytest.mark.parametrize("name", ["bmlv", "lmbv"])
def test_of_averages_what_is_finite_moves(name):
    layer, u = made(name), torch.ones(3, 5)
    before = copy.deepcopy(layer.state_dict())
    u[0, 0] = torch.nan
    layer(u)
    for key, value in layer.state_dict().items():
        if key.startswith("running_"):
            stays = value.isfinite() & (value == before[key])
            assert value.isfinite().all()
            assert stays[0] if name == "bmlv" else stays.all()


@pytest.mark.parametrize("point", [0.0, 2.5, images((1, 5, 1, 1))], ids=str)
def test_about_a_point(point):
    "Values from a point, over a deviation about their own mean."
    u = images()
    out, _ = normality_norm(u, About((1, 2, 3), point), alpha=0, eps=0.1)
    c = u - point
    torch.testing.assert_close(
        out, c / (c.var((1, 2, 3), correction=0, keepdim=True) + 0.1).sqrt()
    )
    assert torch.autograd.gradcheck(
        lambda x: normality_norm(x, About((0, 1), 0.5))[0],
        images((3, 2)).requires_grad_(),
    )


@pytest.mark.parametrize(
    "dim",
    [Over((2,), (0, 2)), Over((0, 2), (2,)), Over((2,), ()), About((2,), 0.3)],
    ids=["bmlv", "lmbv", "no mean", "about"],
)
@pytest.mark.parametrize(
    "options",
    [dict(), dict(safeguard=True), dict(safeguard=True, steps=3)],
    ids=str,
)
def test_the_transform_is_that_of_the_scale_s_set(dim, options):
    """λ̂ and its safeguard as of the centred values of each set alone, whatever
    mean is subtracted.
    """
    # with long tails on both sides, where a step can do harm
    k, by = torch.randn(2, 60, 3, 999, dtype=torch.float64)
    k = k / by.square()
    out, used = normality_norm(k, dim, eps=0.0, **options)
    c = k - (
        k.mean(dim.centre, keepdim=True)
        if dim.centre
        else getattr(dim, "point", 0.0)
    )
    torch.testing.assert_close(
        used.lmbda.squeeze(),
        newton_lambda(c, dim.dim, **options).squeeze(),
        rtol=1e-9,
        atol=1e-9,
    )
    torch.testing.assert_close(
        out, yeo_johnson(c / used.var.sqrt(), used.lmbda)
    )
    plain = normality_norm(k, dim)[1].lmbda
    assert dim.dim != (2,) or torch.equal(plain, used.lmbda) == (not options)


# ---- beside torch and timm --------------------------------------------------


@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float64, 1e-12),
        (torch.float32, 2e-6),
        (torch.bfloat16, 1.6e-2),
        (torch.float16, 2e-3),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(7,), (3, 7)], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_the_root_mean_square_norm_is_pytorch_s(eps, shape, dtype, tolerance):
    if eps is None and dtype.itemsize == 2 and TORCH < (2, 13):
        pytest.skip("PyTorch's ε was that of half precision once")
    theirs = moved(nn.RMSNorm(shape, eps).to(dtype))
    ours = RootMeanSquareNorm(shape, eps).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    u = (0.01 * images((5, 2, 3, 7))).to(dtype)
    g = torch.randn_like(u)
    found, *expected = (step(f, u, g) for f in (ours, theirs))
    for a, b in zip(found, *expected):
        scale = b.abs().max()
        torch.testing.assert_close(
            a / scale, b / scale, rtol=10 * tolerance, atol=10 * tolerance
        )


RECOGNIZED = pytest.mark.parametrize(
    "recognized",
    [hybrids._in_backward, hybrids._backward_above],
    ids=["number", "name"],
)


@RECOGNIZED
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "order", [(0, 1, 2), (2, 1, 0), None, "nested"], ids=str
)
def test_renormalization_computed_again(
    order, reentrant, recognized, monkeypatch
):
    """Several passes before their backward passes, in either order, all at
    once, and checkpoints within checkpoints: gradients and averages as without.
    """
    monkeypatch.setattr(hybrids, "_in_backward", recognized)

    def step(checkpointed):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(5, 5, 1),
            BatchReNorm(5),
            nn.ReLU(),
            nn.Conv2d(5, 5, 1),
            BatchReNorm(5, affine=False),
            nn.Tanh(),
        )
        again = partial(checkpoint, use_reentrant=reentrant)
        run = (
            net
            if not checkpointed
            else partial(
                again,
                net
                if order != "nested"
                else lambda x: again(net[3:], again(net[:3], x)),
            )
        )
        us = [
            images((3, 5, 2, 7), seed, torch.float32).requires_grad_()
            for seed in range(3)
        ]
        for _ in range(2):  # the same batches, other averages
            losses = [run(u).pow(3).sum() for u in us]
            for i in order if isinstance(order, tuple) else ():
                losses[i].backward()
            if not isinstance(order, tuple):
                sum(losses).backward()
        return [*(t.grad for t in (*us, *net.parameters())), *net.buffers()]

    torch.testing.assert_close(step(True), step(False), rtol=1e-5, atol=1e-5)


@RECOGNIZED
def test_renormalization_refuses_what_it_cannot_tell(recognized, monkeypatch):
    monkeypatch.setattr(hybrids, "_in_backward", recognized)
    layer, again = (
        BatchReNorm(3),
        partial(checkpoint, use_reentrant=False),
    )
    drawn = lambda: torch.randn(4, 3, requires_grad=True)
    u = drawn()
    losses = [again(layer, u).pow(3).sum() for _ in range(2)]
    with pytest.raises(RuntimeError, match="one of 2 pairs.*same batch"):
        losses[0].backward()
    losses = [again(layer, drawn()).sum() for _ in range(33)]
    losses[1].backward()
    with pytest.raises(RuntimeError, match="none of the layer's last 32"):
        losses[0].backward()
    u = torch.full((4, 3), torch.nan, requires_grad=True)  # is known, too
    again(layer, u).sum().backward()
    assert u.grad.isnan().all()


def of_timm(name, *args):
    return lambda act: getattr(installed("timm.layers"), name)(
        6, *args, apply_act=act
    )


TIMM = {
    "filter response": of_timm("FilterResponseNormTlu2d"),
    "evonorm": of_timm("EvoNorm2dS0", 3),
}


@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize("apply_act", [True, False])
@pytest.mark.parametrize(
    "dtype, rounding",
    [
        (torch.float64, 0),
        (torch.float32, 0),
        (torch.bfloat16, 2**-8),
        (torch.float16, 2**-11),
    ],
    ids=str,
)
def test_it_is_timm_s(name, apply_act, dtype, rounding):
    theirs = moved(TIMM[name](apply_act).to(dtype))
    ours = to_normality(copy.deepcopy(theirs), alpha=0.0)
    u = (images((3, 6, 2, 7)) - 1).to(dtype)
    found, expected = (step(f, u) for f in (ours, theirs))
    close = 2e-6 + 15 * rounding
    torch.testing.assert_close(found[0], expected[0], rtol=close, atol=close)
    if not rounding:  # half precision ties elsewhere; theirs is in float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---- what they share --------------------------------------------------------


@pytest.mark.parametrize("gaussianizer", [Power(), Chain()], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_a_transform_comes_after_the_normalizer(name, gaussianizer):
    """Composed by hand: plain values, then the transform with parameters of the
    standardized set, then γ and β and what follows.
    """
    last = name == "rms"
    u = images((7, 3, 5) if last else (3, 5, 2, 7))
    layer = moved(made(name, gaussianizer=gaussianizer, eps=1e-3).double())
    plain = made(name, eps=1e-3).double()
    h, unit = uncut(plain)(u), SETS[name]
    k = h - h.mean(unit, keepdim=True)
    k = k / k.square().mean(unit, keepdim=True).sqrt()
    x = gaussianizer.apply(h, gaussianizer.estimate(k, Over(unit)))
    wide = (lambda p: p) if last else lambda p: p.view(-1, 1, 1)
    x = x * wide(layer.weight)
    x = x if layer.bias is None else x + wide(layer.bias)
    if name == "frn":
        x = torch.maximum(x, wide(layer.tau))
    torch.testing.assert_close(layer(u), x, rtol=1e-7, atol=1e-7)


# ---- one part more ----------------------------------------------------------


test_renormalization_refuses = refusals(
    [
        (partial(BatchReNorm, 3, r_max=0.5), ValueError, "expected r_max of"),
        (partial(BatchReNorm, 3, d_max=-1), ValueError, "expected r_max of"),
    ]
)


def test_bounds_that_are_changed_later_are_found_out():
    layer = BatchReNorm(3)
    layer.r_max = 0.2
    with pytest.raises(ValueError, match="r_max=0.2"):
        layer(torch.randn(4, 3))


def test_evonorm_transforms_before_its_gate():
    layer = EvoNorm2d(6, 2, eps=1e-3, gaussianizer=Power()).double()
    u = images((3, 6, 2, 7))
    parts = u.reshape(3, 2, -1)
    h = parts / (parts.var(2, correction=0, keepdim=True) + 1e-3).sqrt()
    x = yeo_johnson(h, newton_lambda(parts, 2)[..., None]).reshape(u.shape)
    torch.testing.assert_close(layer(u), x * torch.sigmoid(u))
    with pytest.raises(ValueError, match="choose a divisor"):
        EvoNorm2d(6, 4)
    with pytest.raises(ValueError, match="given a shape of"):
        layer(u[0])


# ---- the map ----------------------------------------------------------------


@pytest.mark.parametrize("name", NORMALIZERS)
def test_the_axes_of_a_point_are_those_of_its_row(name):
    "Of which test_families.py finds out whether they are true."
    point = NORMALIZERS[name]
    row = family_of(point.make((6, 2, 5)))
    over = {
        "": "–",
        **dict.fromkeys(("B C …", "B … C"), "–"),
        "B C": "H W",
        "B G": "H W C/G",
        **dict.fromkeys(("B", "B …"), "H W C"),
        **dict.fromkeys(("C", "G"), "N H W"),
    }
    centre = row.unit if row.centre is None else row.centre
    assert (point.mean, point.deviation) == (over[centre], over[row.unit])
