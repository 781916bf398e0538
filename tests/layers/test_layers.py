"""What the harness (test_harness.py) does not reach: compilation, export, parts
of a batch, forms without parameters, several processes.
"""

import copy

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config

from normalnorm.layers.core import normality_norm
from normalnorm.layers.noise import add_noise
from normalnorm.theory.newton import Over
from tests.layers.steps import step
from tests.layers.test_harness import EVERY, LAYERS, set_affine, skewed
from tests.peers import FOLLOWS

# what has a loop or a matrix of its own, and what no other test compiles
TRACED = [
    "decorrelated2 B C H W, by products",
    "renorm B C H W",
    "propagated B C H W",
    *(
        f"{name}, transformed"
        for name in (
            "bmlv B C H W",
            "rms B L C",
            "frn B C H W",
            "evonorm B C H W",
        )
    ),
]


@FOLLOWS
@pytest.mark.parametrize(
    "name, options, sizes",
    [
        ("batch2 B C H W", {"momentum": None}, (7, 11, 13, 5)),
        ("decorrelated2, plain B C H W", {"momentum": None}, (7, 11, 5)),
        ("layer B L C", {"safeguard": True}, (7,)),
        ("group B C H W", {"noise_kind": "dropout"}, (7,)),
        *((name, {"noise": 0.0}, (7,)) for name in TRACED),
    ],
)
def test_compiles_without_breaks(name, options, sizes):
    """aot_eager: traced as a whole, forward and backward, in training and in
    evaluation, the same numbers as without; compiled for one batch size, then
    once more for all others.
    """
    row = EVERY[name]
    layer = row.ours(**options)
    set_affine(layer)
    torch.compiler.reset()
    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    # averages that a gradient depends on are read between two graphs
    whole, twin = row.name != "renorm", copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=whole, backend=backend)
    for training, size in (*((True, size) for size in sizes), (False, 7)):
        u, found = skewed((size, *row.shape[1:]), torch.float32), []
        for f, module in ((layer, layer), (compiled, twin)):
            module.train(training)
            torch.manual_seed(0)
            found.append([*step(f, u), *module.buffers()])
        torch.testing.assert_close(*found, rtol=2e-4, atol=2e-4)
    assert backend.frame_count <= min(len(sizes), 2) + 1 or not whole


@FOLLOWS
@pytest.mark.parametrize(
    "row", [*LAYERS.values(), EVERY["decorrelated2 B C H W"]], ids=str
)
def test_export_in_evaluation(row):
    layer, u = row.ours().eval(), torch.randn(row.shape)
    torch.testing.assert_close(
        torch.export.export(layer, (u,)).module()(u), layer(u)
    )


def test_centre_over_one_set_and_scale_over_another():
    """Either may be empty, or both may be the same, in value and gradient;
    others are those of layers, in the harness.
    """
    u = torch.randn(8, 6, 5, 5, dtype=torch.float64).exp().requires_grad_()
    upstream = torch.randn(8, 6, 5, 5, dtype=torch.float64)
    batch, eps = (0, 2, 3), 1e-3
    for pair, expected in (
        (Over((), batch), u - u.mean(batch, keepdim=True)),
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


def test_noise_belongs_to_the_set_of_the_scale():
    u = torch.randn(8, 6, 5, 5, dtype=torch.float64).exp()
    layer, batch = (1, 2, 3), (0, 2, 3)
    for pair in (Over(layer, batch), Over(layer, ())):
        bent, _ = normality_norm(u, pair, eps=0.0)
        seed = torch.tensor(5)
        noisy, _ = normality_norm(u, pair, eps=0.0, noise=0.5, seed=seed)
        torch.testing.assert_close(
            noisy, add_noise(bent, Over(layer), 0.5, "scaled", seed)
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
