"The correlation map and the covariance field: types, edges, errors."

import math

import numpy as np
import pytest
import torch
from torch import nn

from normalnorm.checks.theory.collapse import arc_cosine
from normalnorm.theory import covariance_field as fields
from normalnorm.theory import pairs
from normalnorm.theory.correlation_map import (
    NORMS,
    correlation_map,
    fixed_point,
    hermite_shares,
    slope,
)
from tests.refusals import refusals

# ---- types, shapes, settings ------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_number_in_number_out_tensor_in_tensor_out(norm):
    here = {"instance": {"group": 9}, "lmbv": {"batch": 5}}.get(norm, {})
    value = correlation_map(0.3, "relu", norm, **here)
    assert type(value) is float and 0 <= value < 1
    c = torch.tensor([0.3, 0.5, 0.1], dtype=torch.float32)
    out = correlation_map(c, "relu", norm, **here)
    assert out.shape == c.shape and out.dtype == torch.float32
    assert out[0].item() == pytest.approx(value, abs=1e-6)
    assert type(correlation_map(np.float64(0.3), "relu", norm, **here)) is float


@pytest.mark.parametrize("norm", ["batch", "bmlv", "lmbv"])
def test_a_matrix_is_mapped_whole(norm):
    mixed = torch.randn(6, 9, dtype=torch.float64)
    cov = mixed @ mixed.T
    out = correlation_map(cov, "relu", norm)
    assert out.shape == (6, 6) and torch.allclose(out, out.T)
    assert out.diagonal().mean().item() == pytest.approx(1)
    # a common factor does not matter, the order of the samples does not either
    torch.testing.assert_close(correlation_map(7 * cov, "relu", norm), out)
    turn = torch.tensor([3, 0, 5, 1, 2, 4])
    torch.testing.assert_close(
        correlation_map(cov[turn][:, turn], "relu", norm), out[turn][:, turn]
    )


def test_sampled_and_exact_batches_agree():
    mixed = torch.randn(5, 9, dtype=torch.float64)
    cov = mixed @ mixed.T
    for norm in ("batch", "lmbv"):
        for eps in (0.0, 0.2):
            exact = correlation_map(cov, "relu", norm, eps=eps)
            drawn = correlation_map(cov, torch.relu, norm, eps=eps)
            assert (exact - drawn).abs().max() < 0.02, norm


@pytest.mark.parametrize(
    "phi, norm, keywords",
    [
        ("tanh", "batch", {"eps": 0.5}),
        ("tanh", "bmlv", {"eps": 0.5}),
        ("relu", "bmlv", {"eps": 0.5, "noise": 0.5}),
        ("gelu", "batch", {"noise": 0.5}),
    ],
)
def test_large_batches_are_infinite_ones(phi, norm, keywords):
    "By other ways: normal values there, finite units drawn here."
    assert slope(phi, norm, 0.2, 0.3, batch=200, **keywords) == pytest.approx(
        slope(phi, norm, 0.2, 0.3, **keywords), rel=0.012
    )


def test_the_lmbv_noise_is_of_the_batch_s_size():
    "As drawn batches have it: not of the size of what the samples share."
    assert correlation_map(0.5, "relu", "lmbv", noise=1.0) == pytest.approx(
        correlation_map(0.5, "relu", "lmbv", noise=1.0, batch=200), abs=0.012
    )


def test_the_transform_is_the_identity_in_large_units():
    assert slope(
        "tanh", "group", 0.2, 0.2, group=2000, power=True
    ) == pytest.approx(slope("tanh", "layer", 0.2, 0.2), rel=0.02)
    assert slope("gelu", "bmlv", batch=9, power=True) == slope(
        "gelu", "bmlv", batch=9
    )


def test_bmlv_of_unequal_samples_with_epsilon():
    mixed = torch.randn(5, 9, dtype=torch.float64)
    cov = mixed @ mixed.T
    cov = cov / cov.diagonal().mean()
    found = correlation_map(cov, "relu", "bmlv", 0.2, 0.3, 0.5)
    x = torch.randn(400_000, 5).double() @ torch.linalg.cholesky(cov).T
    x = x - x.mean(1, keepdim=True)
    y = x / (x.square().mean(0) + 0.5).sqrt()
    z = (
        (1 + 0.2 * torch.randn(len(x), 1)) * y + 0.3 * torch.randn(len(x), 1)
    ).relu()
    torch.testing.assert_close(
        found, z.T @ z / z.square().sum() * 5, atol=0.01, rtol=0
    )
    equal = torch.full((4, 4), 0.3, dtype=torch.float64).fill_diagonal_(1)
    for phi, here in (("tanh", (0.0, 0.0, 0.2)), ("relu", (0.0, 0.5, 0.5))):
        assert correlation_map(equal, phi, "bmlv", *here)[
            0, 1
        ].item() == pytest.approx(
            correlation_map(0.3, phi, "bmlv", *here, batch=4), abs=5e-3
        )


def test_epsilon_noise_and_skip():
    assert correlation_map(0.4, "relu", "layer", eps=0.5) == pytest.approx(
        arc_cosine(0.4)
    )
    y = 1 / 1.5  # ε makes β larger beside y
    assert correlation_map(
        0.4, "relu", "layer", 0.0, 0.3, 0.5
    ) == pytest.approx(arc_cosine((0.4 * y + 0.09) / (y + 0.09)))
    assert correlation_map(0.4, "relu", "rms", noise=0.7) == pytest.approx(
        arc_cosine(0.4 / (1 + 2 / math.pi * 0.49))
    )
    assert correlation_map(0.4, "relu", "layer", skip=2.0) == pytest.approx(
        (arc_cosine(0.4) + 1.6) / 5
    )
    assert slope("relu", "proxy", skip=2.0) == pytest.approx(
        (math.pi / (math.pi - 1) + 4) / 5
    )
    assert correlation_map(0.4, "tanh", "layer", power=True) == correlation_map(
        0.4, "tanh", "layer"
    )
    # ε lets a batch remember c in part, unless φ is homogeneous
    for phi, same in (("relu", True), ("gelu", False)):
        far, near = (
            correlation_map(c, phi, "batch", eps=1.0, batch=8)
            for c in (0.1, 0.9)
        )
        assert (abs(far - near) < 1e-9) == same, phi


test_what_is_wrong_is_said = refusals(
    [
        ((0.1, "rele", "layer"), {}, "did you mean relu"),
        ((0.1, "relu", "layr"), {}, "did you mean layer"),
        ((1.1, "relu", "layer"), {}, r"from 1\.1 to 1\.1"),
        ((float("nan"), "relu", "layer"), {}, "expected correlations"),
        ((0.1, "relu", "layer"), {"gamma_std": -1}, "gamma_std=-1"),
        ((0.1, "relu", "layer"), {"noise": float("inf")}, "noise=inf"),
        (
            (0.1, "relu", "layer"),
            {"batch": 8},
            "only batch, bmlv, lmbv know it",
        ),
        ((0.1, "relu", "batch"), {"group": 8}, "only group, instance know it"),
        ((0.1, "relu", "batch"), {"batch": 1}, "at least 2"),
        ((0.1, "relu", "group"), {"group": 2.5}, "whole number"),
        ((0.1, "relu", "instance"), {}, "needs group="),
        ((0.1, "relu", "lmbv"), {"batch": 3}, "take 4 at least"),
        ((-0.5, "relu", "batch"), {"batch": 5}, r"in \[-0.25, 1\]"),
        ((1.0, "relu", "batch"), {"batch": 5}, "nothing to normalize"),
        ((torch.eye(3), "relu", "batch"), {"batch": 4}, "N = batch"),
        ((torch.ones(2, 3), "relu", "batch"), {}, "covariance matrix"),
        (
            (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "relu", "batch"),
            {},
            "without negative eigenvalues",
        ),
        ((0.1, lambda y: y.sum(), "layer"), {}, "element by element"),
        ((0.1, lambda y: 1 / y, "layer"), {}, "must be finite"),
        (
            (torch.ones(3, 3), "relu", "batch"),
            {},
            "samples .* equal",
        ),
        (
            (torch.ones(4, 4), "relu", "lmbv"),
            {},
            "samples .* equal",
        ),
        ((torch.tensor(0), "relu", "layer"), {}, TypeError, "torch.int64"),
        (("a", "relu", "layer"), {}, TypeError, "c=a is a str"),
        (([0.1], "relu", "layer"), {}, TypeError, "is a list"),
        (
            (0.1, "relu", "layer"),
            {"gamma_std": "a"},
            TypeError,
            "gamma_std=a is",
        ),
        ((0.1, "relu", "group"), {"group": "a"}, TypeError, "group=a is a str"),
        ((0.1, torch.log, "layer"), {}, "must be finite"),
        (
            (0.1, lambda y: y.sort().values, "layer"),
            {},
            "element by",
        ),
    ],
    lambda arguments, keywords: correlation_map(*arguments, **keywords),
)


test_what_has_no_slope_is_said = refusals(
    [
        (
            lambda: slope("tanh", "lmbv", batch=8),
            ValueError,
            "linear on both sides of 0",
        ),
        (
            lambda: slope("relu", "lmbv", batch=8, power=True),
            ValueError,
            "λ̂ of its own",
        ),
        (
            lambda: slope(lambda y: (y > 0).to(y), "layer"),
            ValueError,
            "jumps at 0",
        ),
        (lambda: slope(3, "layer"), TypeError, "a name or a function"),
        (lambda: fixed_point("relu", "batch"), ValueError, "whole batch"),
        *(
            (
                lambda count=count: hermite_shares(
                    "relu", "layer", count=count
                ),
                ValueError,
                f"count={count}",
            )
            for count in (0, 101)
        ),
    ]
)


def test_slopes_that_are_infinite():
    assert fixed_point("tanh", "layer") == 0
    assert slope("relu", "batch", batch=3) == math.inf
    assert slope("relu", "group", group=3) == math.inf
    assert slope("relu", "group", group=3, power=True, noise=0.5) == math.inf
    assert 1 < slope("relu", "group", eps=1e-3, group=3) < math.inf


def test_quadrature_keeps_the_variance_of_a_dead_channel():
    "ReLU far below 0: tiny, positive, and by mpmath."
    one = torch.ones(1, dtype=torch.float64)
    relu = pairs.activation_of("relu")
    mean = pairs.smoothed(relu, -5 * one, one)
    var = pairs.joint_mean(relu, -5 * one, one, one, mean)
    import mpmath as mp

    first, second = (
        mp.quad(lambda y, k=k: y**k * mp.npdf(y + 5), [0, 2, 12])
        for k in (1, 2)
    )
    assert var.item() == pytest.approx(float(second - first**2), rel=1e-8)


# ---- the library's layers ---------------------------------------------------


def test_a_leaky_relu_of_any_slope_is_known():
    leaky = nn.LeakyReLU(0.3)
    for n in (6, 12):
        assert slope(leaky, "lmbv", batch=n) == (n - 3) / (n - 1)
    assert correlation_map(0.4, leaky, "layer") == pytest.approx(
        correlation_map(0.4, lambda y: leaky(y), "layer"), abs=1e-9
    )
    eye = torch.eye(4).double()
    assert fields.next_field(eye, 2, "layer", leaky)[1][0, 1] == pytest.approx(
        0.35**2 * 2 / np.pi
    )


# ---- the field --------------------------------------------------------------


test_the_field_says_what_is_wrong = refusals(
    [
        (lambda k: fields.next_field(k, 2, "layr"), "did you mean layer"),
        (lambda k: fields.next_field(k, 2, "layer", "gelu"), "both sides of 0"),
        (
            lambda k: fields.next_field(k, 2, "proxy", beta_std=0.1),
            "beta_std=0.1",
        ),
        (lambda k: fields.next_field(k, 2, "group"), "number of channels"),
        (lambda k: fields.next_field(k, 2, "layer", group=3), "it alone"),
        (lambda k: fields.convolved(k, (2, 1, 1, 3), 2), "odd kernel"),
        (lambda k: fields.convolved(k, (2, 1, 1, 5)), "each position"),
        (lambda k: fields.power_shares(k, 4), "equally many"),
        (fields.image_field, r"\(N, C, H, W\)"),
    ],
    lambda call: call(torch.eye(6, dtype=torch.float64)),
)


def test_correlations_may_be_off_by_a_rounding():
    c = torch.tensor([1 + 2**-52, 1.0, -1 - 2**-52, -1.0], dtype=torch.float64)
    found = correlation_map(c, "relu", "layer")
    assert found[0] == found[1] and found[2] == found[3]
    with pytest.raises(ValueError, match="c from 1 to 1.00001: expected"):
        correlation_map(torch.tensor([1.0, 1.00001]).double(), "relu", "layer")


@pytest.mark.parametrize(
    "norm, group",
    [("layer", None), ("pre-layer", None), ("batch", None), ("group", 4)],
)
def test_the_field_of_unequal_images_with_epsilon(norm, group):
    "Drawn channels; one image has most of the power, at one of its positions."
    mixed = torch.randn(6, 8, dtype=torch.float64)
    mixed[0] *= 4
    mixed[3:] /= 2
    x = torch.randn(200_000, 8).double() @ mixed.T / 8**0.5
    units = x.reshape(-1, group or 1, 2, 3)
    if norm == "batch":
        over, units = (1, 2, 3), units - units.mean((2, 3), keepdim=True)
    else:
        over = (1, 3) if group else (0, 1, 3)
    if group:
        units = units - units.mean(over, keepdim=True)
    y = units / (units.square().mean(over, keepdim=True) + 0.4).sqrt()
    z = y.relu()
    if norm == "pre-layer":
        z = z - z.mean(over, keepdim=True)
    found = fields.next_field(
        mixed @ mixed.T / 8, 2, norm, eps=0.4, group=group, drawn=200_000
    )
    for values, field in zip((y.reshape(x.shape), z.reshape(x.shape)), found):
        root = field.diagonal().sqrt()
        apart = values.T @ values / len(x) - field
        assert (apart / torch.outer(root, root)).abs().max() < 0.02
