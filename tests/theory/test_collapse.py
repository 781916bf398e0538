"""Random nets and their collapse: shapes, devices of chance, errors, and the
committed rows. What they compute is checked by the claims
of the chapter.
"""

import math

import pytest
import torch

from normalnorm.experiments.recipes import random_nets
from normalnorm.experiments.results import by_arm
from normalnorm.theory import collapse
from tests.refusals import refusals


def test_layers_are_those_of_the_definition():
    x = torch.randn(3, 2, 5, 7)
    made = list(collapse.random_net(x, 4, 6, activation=torch.tanh))
    assert len(made) == 4
    for layer in made:
        assert all(v.shape == (3, 6, 5, 7) for v in layer)
        torch.testing.assert_close(layer.z, layer.affine.tanh())
        torch.testing.assert_close(layer.y, collapse.layer_norm(layer.x))
        # one factor and one shift for each channel
        assert collapse.linear_residual(layer.affine, layer.y, True) < 1e-10


def test_options_of_a_net():
    x = torch.randn(3, 1, 4, 5)
    same = next(
        iter(
            collapse.random_net(
                x, 1, 6, lambda t: t, gamma_std=0.0, beta_std=0.0
            )
        )
    )
    assert (same.x == same.affine).all()
    torch.manual_seed(1)
    plain = list(collapse.random_net(x, 3, 6))
    torch.manual_seed(1)
    summed = list(collapse.random_net(x, 3, 6, residual=True))
    assert (plain[0].x == summed[0].x).all()
    torch.testing.assert_close(summed[1].x, plain[1].x + plain[0].x)
    # where the branches are 0, the sum of all before stays the first
    first, *rest = collapse.random_net(
        x, 4, 6, activation=torch.zeros_like, residual=True
    )
    assert all((layer.x == first.x).all() for layer in rest)
    none = next(
        iter(
            collapse.random_net(x, 1, 6, lambda t: t, prepare=torch.zeros_like)
        )
    )
    assert none.x.abs().max() == 0
    points = next(iter(collapse.random_net(x[..., :1, :1], 1, 6, kernel=1)))
    assert points.y.shape == (3, 6, 1, 1)


test_net_says_what_is_wrong = refusals(
    [
        (
            (1, 3, 3),
            {},
            ValueError,
            r"\(1, 3, 3\): expected images \(N, C, H, W",
        ),
        *(
            ((1, 1, 3, 3), {name: size}, ValueError, "sizes and an odd kernel")
            for name, size in (
                ("depth", 0),
                ("width", 0),
                ("kernel", 2),
                ("kernel", 0),
            )
        ),
        ((1, 1, 2, 2), {"kernel": 7}, ValueError, "of at least 3 positions"),
        ((1, 1, 3, 3), {"gamma_std": -1}, ValueError, "gamma_std=-1"),
        ((1, 1, 3, 3), {"beta_std": "a"}, TypeError, "beta_std=a is a str"),
        ((1, 1, 3, 3), {"width": 2.5}, TypeError, "width=2.5 is a float"),
    ],
    lambda shape, change: next(
        collapse.random_net(
            torch.ones(shape), **{"depth": 2, "width": 3, **change}
        )
    ),
)


test_what_is_refused = refusals(
    [
        (lambda: collapse.chi([1.0]), TypeError, "y is list"),
        (lambda: collapse.chi(torch.ones(3)), ValueError, r"\(3,\): expected"),
        (lambda: collapse.chi(torch.ones(0, 3)), ValueError, "at least one"),
        (lambda: collapse.chi(torch.ones(2, 3) * 1j), TypeError, "complex"),
        (
            lambda: collapse.linear_residual(
                torch.ones(3, 2), torch.ones(3, 3)
            ),
            ValueError,
            "z has shape .*, affine",
        ),
        (
            lambda: collapse.linear_residual(torch.ones(3, 2), 1.0),
            TypeError,
            "affine is float",
        ),
        (lambda: collapse.equalized("images"), TypeError, "images are a str"),
        (lambda: collapse.equalized(torch.ones(0, 1, 5)), ValueError, "N, 1"),
        (lambda: collapse.equalized(torch.rand(3, 2, 5)), ValueError, "one ch"),
        (lambda: collapse.equalized(torch.rand(3, 5)), ValueError, "one chan"),
        (
            lambda: collapse.equalized(torch.tensor([[[0.1, 1]], [[1, 1]]])),
            ValueError,
            "constant",
        ),
        (
            lambda: collapse.collapse_rate(1.0, -0.1),
            ValueError,
            "gamma_std=-0.1",
        ),
        (
            lambda: collapse.collapse_rate(1.0, 0.2, math.nan),
            ValueError,
            "beta_std=nan",
        ),
        (
            lambda: collapse.collapse_rate(math.nan),
            ValueError,
            "gamma_mean=nan",
        ),
        (
            lambda: collapse.collapse_rate(0.0, 0.0),
            ValueError,
            "γ = 0 everywhere",
        ),
        (
            lambda: collapse.collapse_rate("a"),
            TypeError,
            "gamma_mean=a is a str",
        ),
        (
            lambda: collapse.collapse_rate(1.0, None),
            TypeError,
            "gamma_std=None",
        ),
    ]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equalized_images(dtype):
    x = (5 * torch.rand(7, 1, 3, 5) ** 3).to(dtype)
    out = collapse.equalized(x)
    assert out.dtype == dtype and out.shape == x.shape
    assert abs(out.double().mean()) < 1e-7
    torch.testing.assert_close(
        out.square().mean((1, 2, 3)), torch.ones(7, dtype=dtype)
    )
    # each image is what it was, shifted and scaled
    flat, before = out.flatten(1).double(), x.flatten(1).double()
    order = before.argsort(1)
    assert (flat.gather(1, order).diff(dim=1) >= 0).all()


def test_shares_of_nothing_and_of_constants():
    zero = torch.zeros(2, 3, 5)
    for about in (False, True):
        assert collapse.linear_residual(zero, zero, about) == 0
    line = torch.randn(2, 3, 5)
    assert collapse.linear_residual(2 * line + 1, line, True) < 1e-12
    assert collapse.linear_residual(2 * line + 1, line) > 0.1
    assert collapse.chi(line).dtype == torch.float64


def test_the_rows_are_of_the_size_that_the_text_says():
    made = {
        arm: row
        for name in ("collapse", "collapse-cures")
        for arm, (row,) in by_arm(name).items()
    }
    for width, nets in {64: 256, 128: 128, 256: 64, 512: 32}.items():
        for kind in ("ReLU", "identity"):
            assert made[f"{kind}, width {width}"]["nets"] == nets
    for row in made.values():
        assert row["nets"] == row["config"]["nets"] >= 16
        assert len(row["p1"]) == row["config"]["depth"] == 30
        assert row["config"]["images"] == 16
    seconds = [
        row["wall_seconds"]
        for row in (
            *made.values(),
            *sum(by_arm("collapse-training").values(), []),
        )
    ]
    assert sum(seconds) < 900
    for arm in random_nets.KINDS:
        total = [
            sum(p) for p in zip(*(made[arm][f"p{k}"] for k in range(1, 5)))
        ]
        assert all(t < 1.01 for t in total)


def test_rows_of_the_cures():
    found = {cure: row for cure, (row,) in by_arm("collapse-cures").items()}
    for row in found.values():
        for parts in zip(*(row[f"p{k}"] for k in range(1, 5))):
            assert abs(sum(parts) - 1) < 1e-3
    # Theorem 2
    assert min(found["IN"]["p3"]) > 1 - 1e-5


@pytest.mark.book
def test_each_variant_runs_at_the_smallest_scale():
    for config in random_nets.collapse_nets.arms("smoke").values():
        found = random_nets.run(config, 0)
        assert 0 <= found["p1"][-1] <= 1.001
