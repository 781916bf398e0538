"""What the harness (test_harness.py) does not reach: compilation, export, parts
of a batch, forms without parameters, several processes.
"""

import functools

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from torch import nn

import normalnorm
from normalnorm.layers.conversion import to_normality
from normalnorm.layers.core import normality_norm
from normalnorm.layers.functional import batch_normal_norm, layer_normal_norm
from normalnorm.layers.noise import add_noise
from normalnorm.layers.normality import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    BatchNormalNorm3d,
    InstanceNormalNorm2d,
    LayerNormalNorm,
)
from normalnorm.layers.sync import SyncBatchNormalNorm
from normalnorm.theory.newton import Over, newton_lambda
from normalnorm.theory.power_transform import yeo_johnson
from tests.layers.test_harness import LAYERS, skewed
from tests.peers import FOLLOWS


@FOLLOWS
@pytest.mark.parametrize(
    "name, options, sizes",
    [
        ("batch2 B C H W", {"momentum": None}, (7, 11, 13, 5)),
        ("layer B L C", {"safeguard": True}, (7,)),
        ("group B C H W", {"noise_kind": "dropout"}, (7,)),
    ],
)
def test_compiles_without_breaks(name, options, sizes):
    """aot_eager: traced as a whole, forward and backward, the same numbers as
    without; compiled for one batch size, then once more for all others.
    """
    row = LAYERS[name]
    layer = row.ours(**options)
    torch.compiler.reset()
    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for size in sizes:
        u, found = (
            skewed((size, *row.shape[1:]), torch.float32).requires_grad_(),
            [],
        )
        for f in (layer, compiled):
            torch.manual_seed(0)
            out = f(u)
            found.append((out, torch.autograd.grad(out.square().sum(), u)[0]))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert backend.frame_count == min(len(sizes), 2)


def test_noise_is_that_of_the_whole_batch_in_its_parts():
    u, seed = torch.randn(6, 5, dtype=torch.float64), torch.tensor(9)
    whole, _ = normality_norm(u, (1,), noise=0.7, seed=seed)
    parts = [
        normality_norm(u[i : i + 2], (1,), noise=0.7, seed=seed, offset=5 * i)[
            0
        ]
        for i in (0, 2, 4)
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


@FOLLOWS
@pytest.mark.parametrize("row", LAYERS.values(), ids=LAYERS)
def test_export_in_evaluation(row):
    layer, u = row.ours().eval(), torch.randn(row.shape)
    torch.testing.assert_close(
        torch.export.export(layer, (u,)).module()(u), layer(u)
    )


def test_meta_device_and_zero_argument_forms():
    assert BatchNormalNorm2d(3, device="meta").weight.is_meta
    assert nn.utils.skip_init(BatchNormalNorm2d, 3).running_lambda.shape == (3,)
    assert layer_normal_norm(torch.randn(2, 5), (5,)).shape == (2, 5)
    assert batch_normal_norm(torch.randn(4, 2), training=True).shape == (4, 2)


def test_top_level_names():
    assert (
        normalnorm.BatchNormalNorm2d is BatchNormalNorm2d
        and "LayerNormalNorm" in dir(normalnorm)
    )
    with pytest.raises(AttributeError, match="the layers are"):
        _ = normalnorm.NoSuchLayer


INDUCTOR = {
    "batch": (lambda: normalnorm.BatchNormalNorm2d(5), (7, 5, 4, 3)),
    "layer": (lambda: normalnorm.LayerNormalNorm(19), (3, 7, 19)),
    "group": (lambda: normalnorm.GroupNormalNorm(2, 6), (3, 6, 11)),
    "instance": (lambda: normalnorm.InstanceNormalNorm1d(3), (5, 3, 23)),
    "decorrelated": (
        lambda: normalnorm.DecorrelatedBatchNormalNorm1d(
            4, method="newton_schulz"
        ),
        (29, 4),
    ),
}


@FOLLOWS
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor(name):
    """torch.compile with its own code generator, in one graph: output and
    gradients as without it; noise too, where the seed is PyTorch's (inductor
    has a generator of its own).
    """
    make, shape = INDUCTOR[name]
    torch.compiler.reset()
    torch.manual_seed(0)
    layer, u, found = make(), torch.randn(shape).exp(), []
    for module in (layer, torch.compile(layer, fullgraph=True)):
        v = u.clone().requires_grad_()
        torch.manual_seed(5)
        with (
            normalnorm.set_backend("eager"),
            torch._inductor.config.patch(fallback_random=True),
        ):
            out = module(v)
        found.append(
            (
                out.detach(),
                *torch.autograd.grad(
                    out.square().sum() + out.sum(), [v, *layer.parameters()]
                ),
            )
        )
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_centre_over_one_set_and_scale_over_another():
    """Any pair, either of which may be empty: against PyTorch's root mean
    square norm and formulas written out, in value and gradient.
    """
    torch.manual_seed(0)
    u = torch.randn(8, 6, 5, 5, dtype=torch.float64).exp().requires_grad_()
    upstream = torch.randn(8, 6, 5, 5, dtype=torch.float64)
    layer, batch, eps = (1, 2, 3), (0, 2, 3), 1e-3
    mean = lambda x, dim: x.mean(dim, keepdim=True)
    std = lambda x, dim: (x.var(dim, correction=0, keepdim=True) + eps).sqrt()
    without = lambda x, dim: x - mean(x, dim)
    for pair, expected in (
        (Over(layer, batch), without(u, batch) / std(without(u, batch), layer)),
        (Over(batch, layer), without(u, layer) / std(without(u, layer), batch)),
        (Over(layer, ()), torch.nn.functional.rms_norm(u, (6, 5, 5), eps=eps)),
        (Over((2, 3), ()), u / (mean(u.square(), (2, 3)) + eps).sqrt()),
        (Over((), batch), without(u, batch)),
        (Over((), ()), u),
        (Over(batch, batch), normality_norm(u, batch, alpha=0, eps=eps)[0]),
        (Over(batch), normality_norm(u, batch, alpha=0, eps=eps)[0]),
    ):
        found, used = normality_norm(u, pair, alpha=0, eps=eps)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found, u, upstream, retain_graph=True),
            torch.autograd.grad(expected, u, upstream, retain_graph=True),
        )
        # the statistics serve another input as they served this one
        again, _ = normality_norm(
            u.detach(), pair, alpha=0, eps=eps, statistics=used
        )
        torch.testing.assert_close(again, expected.detach())
        half, _ = normality_norm(u.detach().half(), pair, alpha=0, eps=eps)
        assert half.dtype == torch.float16
        torch.testing.assert_close(
            half.double(), expected.detach(), rtol=4e-3, atol=4e-3
        )


def test_lambda_and_noise_belong_to_the_set_of_the_scale():
    torch.manual_seed(0)
    u = torch.randn(8, 6, 5, 5, dtype=torch.float64).exp()
    layer, batch = (1, 2, 3), (0, 2, 3)
    for pair, values in (
        (Over(layer, batch), u - u.mean(batch, keepdim=True)),
        (Over(layer, ()), u),
    ):
        out, used = normality_norm(u, pair, eps=0.0)
        torch.testing.assert_close(
            used.lmbda.flatten(), newton_lambda(values, layer)
        )
        bent = yeo_johnson((values / used.var.sqrt()), used.lmbda)
        torch.testing.assert_close(out, bent)
        seed = torch.tensor(5)
        noisy, _ = normality_norm(u, pair, eps=0.0, noise=0.5, seed=seed)
        torch.testing.assert_close(
            noisy, add_noise(bent, layer, 0.5, "scaled", seed)
        )
    # a unit of one element has no spread: neither transform nor noise
    plain, _ = normality_norm(u, Over((), batch), noise=0.5)
    torch.testing.assert_close(plain, u - u.mean(batch, keepdim=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"safeguard": True},
        {"alpha": 0.0},
        {"alpha": 0.5, "noise": 0.4, "noise_kind": "unscaled"},
        {"noise": 0.4, "noise_kind": "dropout"},
    ],
    ids=str,
)
def test_derivatives_of_result_and_statistics(options):
    """Against finite differences: the result and each statistic, with respect
    to input, weight and bias, in reverse and in forward mode.
    """
    torch.manual_seed(1)
    u = torch.randn(7, 3, dtype=torch.float64).exp().requires_grad_()
    weight, bias = torch.randn(2, 3, dtype=torch.float64).requires_grad_()

    def everything(u, weight, bias):
        out, used = normality_norm(
            u, (0,), weight, bias, seed=torch.tensor(9), **options
        )
        return out, used.mean, used.var, *used.parameters

    assert torch.autograd.gradcheck(
        everything,
        (u, weight, bias),
        check_forward_ad=True,
        eps=1e-6,
        atol=1e-6,
    )


def test_axes_of_size_one_are_axes():
    "As in torch.nn: of one feature each value is its own mean."
    torch.manual_seed(0)
    u = torch.randn(5, 1, 4)
    whole, last = (
        LayerNormalNorm((1, 4), noise=0.0),
        LayerNormalNorm(4, noise=0.0),
    )
    torch.testing.assert_close(whole(u), last(u))
    torch.testing.assert_close(
        LayerNormalNorm(1, noise=0.0)(u[..., :1]),
        torch.nn.LayerNorm(1)(u[..., :1]),
    )
    for wrong in (0, (4, 0), ()):
        with pytest.raises(ValueError, match="positive sizes"):
            LayerNormalNorm(wrong)


@pytest.mark.parametrize(
    "name, value",
    [
        ("alpha", 1.5),
        ("alpha", -0.5),
        ("steps", 0),
        ("eps", -1.0),
        ("noise", -1.0),
        ("noise_kind", "loud"),
    ],
)
@pytest.mark.parametrize(
    "layer, shape",
    [
        (BatchNormalNorm2d, (4, 3, 2, 2)),
        (LayerNormalNorm, (4, 3)),
        (InstanceNormalNorm2d, (4, 3, 5, 5)),
    ],
)
def test_settings_that_are_changed_later_are_checked(layer, shape, name, value):
    made = layer(3)
    before = getattr(made, name)
    with pytest.raises(ValueError, match=name):
        setattr(made, name, value)
    assert getattr(made, name) == before
    made(torch.randn(shape))


@pytest.mark.parametrize(
    "shape, layer",
    [
        ((6, 3), BatchNormalNorm1d),
        ((6, 3, 5), BatchNormalNorm1d),
        ((6, 3, 5, 2), BatchNormalNorm2d),
        ((6, 3, 5, 2, 2), BatchNormalNorm3d),
    ],
)
def test_synchronized_layer_takes_all_shapes(shape, layer):
    "With one process: what the batch layer of this shape gives."
    torch.manual_seed(0)
    u = torch.randn(shape)
    torch.manual_seed(1)
    expected = layer(3)(u)
    torch.manual_seed(1)
    torch.testing.assert_close(SyncBatchNormalNorm(3)(u), expected)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 1, 1, 1, 2)])
def test_synchronized_layer_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match="shape"):
        SyncBatchNormalNorm(3)(torch.ones(shape))


class Described(nn.BatchNorm1d):
    "Adds what is no method."

    @property
    def surprise(self):
        return self.eps


class Helped(nn.BatchNorm1d):
    "Adds what is called, though no function of the class."

    surprise = functools.partial(print, "surprise")


class Annotated(nn.BatchNorm1d):
    "Adds a plain value, which changes nothing."

    surprise = 3


@pytest.mark.parametrize(
    "kind, refused", [(Described, True), (Helped, True), (Annotated, False)]
)
def test_what_a_subclass_adds_is_seen(kind, refused):
    model, report = to_normality(nn.Sequential(kind(3)), return_report=True)
    assert (type(model[0]) is kind) == refused
    assert ("surprise" in str(report)) == refused
