"""Curvature: any model and loss, batches, errors, interruption, peers. What it
computes on networks and matrices is checked by the claims of its chapter.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from normalnorm.analysis.hessian import (
    hessian_density,
    hessian_extremes,
    hessian_vector_product,
)
from tests.refusals import refusals


def network(norm=nn.LayerNorm, dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 7), norm(7), nn.Tanh(), nn.Linear(7, 3)
    ).to(dtype)
    x, y = torch.randn(24, 5, dtype=dtype), torch.randint(3, (24,))
    return model, x, y


def quadratic(values, dtype=torch.float64):
    scale = torch.tensor(values, dtype=dtype)
    w = torch.zeros(len(values), dtype=dtype, requires_grad=True)
    return lambda: (scale * w.square()).sum() / 2, [w]


def test_batches_are_summed():
    model, x, y = network()
    parameters = list(model.parameters())
    whole = lambda: nn.functional.cross_entropy(model(x), y)
    part = lambda batch: (
        nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        / len(x)
    )
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), 7, shuffle=True
    )
    v = torch.randn(sum(p.numel() for p in parameters), dtype=torch.float64)
    torch.testing.assert_close(
        hessian_vector_product(part, parameters, v, loader),
        hessian_vector_product(whole, parameters, v),
    )
    one = hessian_extremes(whole, parameters, 2)
    two = hessian_extremes(part, parameters, 2, batches=loader)
    torch.testing.assert_close(one.largest, two.largest)
    ours = hessian_density(whole, parameters, 2, 10)
    theirs = hessian_density(part, parameters, 2, 10, batches=loader)
    torch.testing.assert_close(ours.nodes, theirs.nodes)


def test_nothing_is_left_behind():
    model, x, y = network(nn.BatchNorm1d)
    loss = lambda: nn.functional.cross_entropy(model(x), y)
    before = {name: v.clone() for name, v in model.named_parameters()}
    random = torch.get_rng_state()
    with torch.no_grad():  # as in an evaluation loop
        hessian_extremes(loss, model.parameters())
        hessian_density(loss, model.parameters(), 1, 5)
    assert all(p.grad is None for p in model.parameters())
    assert all(
        torch.equal(before[name], p) for name, p in model.named_parameters()
    )
    assert torch.equal(random, torch.get_rng_state())
    assert model[1].num_batches_tracked == 2


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16]
)
def test_dtypes(dtype):
    loss, w = quadratic([3.0, 1.0, -2.0, 0.5, 0.25, 0.125, 0.0], dtype)
    found = hessian_extremes(loss, w, 2, tol=0.05)
    assert found.converged
    np.testing.assert_allclose(found.largest, [3, 1], rtol=1e-2)
    assert found.largest.dtype == torch.float64
    product = hessian_vector_product(loss, w, torch.ones(7))
    assert product.dtype == (dtype if dtype == torch.float64 else torch.float32)


def test_extremes_of_small_and_of_linear_losses():
    loss, w = quadratic([4.0])
    found = hessian_extremes(loss, w, 1, 0)
    assert found.largest.tolist() == pytest.approx([4])
    assert found.smallest.numel() == 0 and found.products <= 2
    assert found.stable_lr == pytest.approx(0.5)
    w = torch.zeros(50, requires_grad=True)
    found = hessian_extremes(lambda: w.sum(), w, 2, 2)
    assert found.largest.abs().max() == 0 and found.converged
    assert found.stable_lr == math.inf and math.isnan(found.ratio)
    assert hessian_density(lambda: w.sum(), w, 2, 4).moment(2)[0] == 0


def test_more_eigenvalues_than_fit_and_slow_ones():
    values = [float(v) for v in torch.linspace(-1, 1, 400)]
    loss, w = quadratic(values)
    with pytest.warns(UserWarning, match="max_products=40 are not enough"):
        found = hessian_extremes(loss, w, 5, 5, max_products=40)
    assert not found.converged and found.products <= 40
    true = torch.tensor(values, dtype=torch.float64)
    for value, error in zip(
        torch.cat([found.largest, found.smallest]),
        torch.cat([found.largest_error, found.smallest_error]),
    ):
        assert (true - value).abs().min() <= error + 1e-12
    found = hessian_extremes(loss, w, 5, 5)
    np.testing.assert_allclose(found.largest, values[:-6:-1], atol=1e-4)
    np.testing.assert_allclose(found.smallest, values[:5], atol=1e-4)


def test_seeds_and_moments():
    loss, w = quadratic(torch.randn(300).tolist())
    one, two = (hessian_density(loss, w, 4, 20, seed=s) for s in (0, 2))
    assert torch.equal(one.nodes[2:], two.nodes[:2])
    mean, error = hessian_density(loss, w, 1, 20).moment(1)
    assert math.isnan(error)
    points = torch.linspace(-9, 9, 2000).view(40, 50)
    mean, error = one.at(points, 0.3)
    assert mean.shape == error.shape == points.shape
    assert torch.trapezoid(mean.flatten(), points.flatten()) == pytest.approx(1)


class Stop:
    "Presses Ctrl-C at a product; a bar, as tqdm's."

    def __init__(self, at):
        self.at, self.count, self.lines, self.total = at, 0, [], None

    def update(self, step):
        self.count += step
        if self.count == self.at:
            raise KeyboardInterrupt

    def reset(self, total):
        self.total = total

    def set_postfix_str(self, line):
        self.lines.append(line)


def test_interrupted():
    loss, w = quadratic([float(v) for v in torch.linspace(-1, 1, 400)])
    with pytest.raises(KeyboardInterrupt):
        hessian_extremes(loss, w, progress=Stop(3))
    with pytest.warns(UserWarning, match="interrupted"):
        found = hessian_extremes(loss, w, progress=Stop(30))
    assert not found.converged and abs(found.largest[0] - 1) < 0.1
    with pytest.raises(KeyboardInterrupt):
        hessian_density(loss, w, 3, 10, progress=Stop(3))
    bar = Stop(25)
    with pytest.warns(UserWarning, match="2 of 3 probes"):
        assert len(hessian_density(loss, w, 3, 10, progress=bar).nodes) == 2
    assert bar.total == 30 and bar.lines == ["1 of 3 probes", "2 of 3 probes"]


def test_progress_by_lines():
    loss, w = quadratic([float(v) for v in torch.linspace(-1, 1, 60)])
    lines = []
    hessian_extremes(loss, w, progress=lines.append)
    assert lines and "products, error" in lines[-1]
    from tqdm import tqdm

    with tqdm(disable=False, file=open("/dev/null", "w")) as bar:
        hessian_density(loss, w, 2, 5, progress=bar)
        assert bar.total == bar.n == 10


def along_ones(loss, parameters):
    n = sum(p.numel() for p in parameters)
    return hessian_vector_product(loss, parameters, torch.ones(n))


def asked(ask, case):
    model, x, y = network(nn.Identity, torch.float32)
    return ask(
        *case(
            lambda **how: nn.functional.cross_entropy(model(x), y, **how),
            list(model.parameters()),
        )
    )


test_what_has_no_hessian = refusals(
    [
        (ask, *case)
        for ask in (hessian_extremes, hessian_density, along_ones)
        for case in (
            (lambda loss, p: (loss, []), "no parameters are given"),
            (
                lambda loss, p: (loss, [p[0], p[1].requires_grad_(False)]),
                r"parameter 1 of shape \(7,\) is frozen",
            ),
            (
                lambda loss, p: (loss, [*p, nn.Parameter(torch.ones(2))]),
                r"not depend on parameter 4 of shape \(2,\)",
            ),
            (
                lambda loss, p: (lambda: loss(reduction="none"), p),
                r"the loss is a tensor of shape \(24,\)",
            ),
            (
                lambda loss, p: (lambda: loss().item(), p),
                "the loss is float",
            ),
            (
                lambda loss, p: (lambda: loss().detach(), p),
                "does not depend on any parameter",
            ),
            (
                lambda loss, p: (lambda: loss() * math.nan, p),
                "the loss is nan",
            ),
            (
                lambda loss, p: (loss, [torch.ones(2, dtype=torch.int64)]),
                TypeError,
                "int64",
            ),
            (
                lambda loss, p: (loss().detach(), p),
                TypeError,
                "loss is of type Tensor",
            ),
            (
                lambda loss, p: (loss, [nn.Parameter(torch.ones(0))]),
                "no elements",
            ),
            (
                lambda loss, p: (
                    lambda: ((p[0] - p[0].detach()) ** 1.5).sum(),
                    p[:1],
                ),
                "no second derivative here",
            ),
        )
    ],
    asked,
)


test_unusable_requests = refusals(
    [
        (
            lambda: hessian_vector_product(
                *quadratic([1, 2, 3]), torch.ones(2)
            ),
            r"shape \(2,\): .* 3 elements",
        ),
        *(
            (
                lambda wanted=wanted: hessian_extremes(
                    *quadratic([1, 2, 3]), *wanted
                ),
                "at most the 3 eigenvalues",
            )
            for wanted in ((0, 0), (4, 0), (-1, 2))
        ),
        (
            lambda: hessian_extremes(*quadratic([1] * 40), 10, 11),
            "raise vectors",
        ),
        (
            lambda: hessian_density(*quadratic([1] * 40), 0),
            "at least one of each",
        ),
        (
            lambda: hessian_density(*quadratic([1] * 40), 1, 2).at(
                torch.zeros(1), 0.0
            ),
            "positive width",
        ),
    ]
)


def of_batches(through, batches):
    model, x, _ = network()
    loss = lambda batch: through(model, batch).square().mean()
    return hessian_extremes(loss, model.parameters(), batches=batches([x]))


test_batches_that_cannot_be_used = refusals(
    [
        (lambda m, b: m(b), iter, TypeError, "empty after one product"),
        (lambda m, b: m(b), lambda of: [], "batches is empty"),
        (
            lambda m, b: nn.functional.dropout(m(b)),
            list,
            "must meet the same function",
        ),
        (
            lambda m, b: m[-1](b[:, [0, 1, 2, 3, 4, 0, 1]]),
            list,
            "does not depend on parameter 0",
        ),
    ],
    of_batches,
)


class Skewed(torch.autograd.Function):
    "x² with a wrong second derivative in one direction."

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * grad * (x + (x - x.detach()).roll(1))


def test_wrong_second_derivatives_are_noticed():
    "A function whose second derivative is not symmetric."
    w = torch.randn(50, requires_grad=True)
    for ask in (hessian_extremes, hessian_density):
        with pytest.raises(ValueError, match="wrong second derivative"):
            ask(lambda: Skewed.apply(w), w)
