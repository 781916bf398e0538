"""Spheres, Jacobians and scale invariance: shapes, dtypes, edges, errors. What
they compute is checked by the claims of their chapters.
"""

import pytest
import torch

from normalnorm.theory import geometry, scale_invariance
from normalnorm.theory.newton import Over, standardized
from normalnorm.theory.overflow import WeightedPoints
from tests.refusals import refusals


def test_radius_takes_tensors_and_numbers():
    var = torch.tensor([[0.0, 1.0, 4.0]])
    out = geometry.radius(var, 1.0, 8)
    assert out.dtype == torch.float32 and out.shape == (1, 3)
    torch.testing.assert_close(out, torch.tensor([[0.0, 2.0, 6.4**0.5]]))
    assert geometry.radius(3.0, 0.0, 5).dtype == torch.float64
    assert geometry.radius(3.0, 0.0, 5) ** 2 == pytest.approx(5)
    assert geometry.radius(3.0, 0.0, 5, times=0) ** 2 == pytest.approx(15)
    assert geometry.radius(0.0, 0.0, 5) == 0


@pytest.mark.parametrize(
    "dim", [1, (0, 2), Over((0, 2), ()), Over((0, 2), (2, 0))]
)
def test_distance_of_units_over_any_axes(dim):
    u = torch.randn(3, 5, 7, dtype=torch.float64).exp()
    axes = dim.dim if isinstance(dim, Over) else dim
    centred = not (isinstance(dim, Over) and dim.centre == ())
    h = (
        standardized(u, axes)
        if centred
        else (u / u.square().mean(axes, keepdim=True).sqrt())
    )
    distance = geometry.sphere_distance(u, dim)
    assert distance.shape == u.mean(axes, keepdim=True).shape
    torch.testing.assert_close(
        distance, (u - h).square().sum(axes, keepdim=True).sqrt()
    )


def test_weighted_points_are_a_unit_too():
    "Shares for elements: three quarters at 0, a quarter at 4."
    u, shares = torch.tensor([0.0, 4.0]), torch.tensor([0.75, 0.25])
    elements = torch.tensor([0.0, 0.0, 0.0, 4.0])
    torch.testing.assert_close(
        geometry.sphere_distance(u, WeightedPoints(shares, 4)),
        geometry.sphere_distance(elements, 0),
    )
    torch.testing.assert_close(
        geometry.direction_cosine(u, WeightedPoints(shares, 4)),
        geometry.direction_cosine(elements, 0),
    )


def test_a_constant_unit():
    u = torch.full((2, 5), 3.0)
    torch.testing.assert_close(
        geometry.sphere_distance(u, 1), torch.full((2, 1), 50.0**0.5)
    )
    assert (geometry.direction_cosine(u, 1) == 0).all()
    assert (geometry.direction_cosine(0 * u, Over(1, ())) == 0).all()
    assert (geometry.normalization_jacobian(u) == 0).all()
    along, across = geometry.jacobian_eigenvalues(torch.tensor([0.0, 4.0]), 0.0)
    assert along.tolist() == [0, 0] and across.tolist() == [0, 0.5]
    torch.testing.assert_close(
        geometry.normalization_jacobian(u, 0.25),
        (2 * (torch.eye(5) - 0.2)).expand(2, 5, 5),
    )


def test_the_jacobian_of_many_units():
    u = torch.randn(2, 3, 5)
    for eps in (0.0, 0.1):
        for centre in (True, False):
            out = geometry.normalization_jacobian(u, eps, centre)
            assert out.shape == (2, 3, 5, 5) and out.dtype == torch.float32
            torch.testing.assert_close(
                out[1, 2], geometry.normalization_jacobian(u[1, 2], eps, centre)
            )


test_what_is_refused = refusals(
    [
        (
            lambda u: geometry.sphere_distance(u, Over((0,), (1,))),
            ValueError,
            r"one set .* mean over \(1,\) and a deviation over \(0,\)",
        ),
        (
            lambda u: geometry.direction_cosine(u, Over((0,), (1,))),
            ValueError,
            "one set",
        ),
        (lambda u: geometry.sphere_distance(u.long(), 0), TypeError, "int64"),
        (lambda u: geometry.direction_cosine(u.long(), 0), TypeError, "int64"),
        (
            lambda u: geometry.normalization_jacobian(u.long()),
            TypeError,
            "int64",
        ),
        (
            lambda u: geometry.normalization_jacobian(u, -1.0),
            ValueError,
            "eps=-1",
        ),
        (
            lambda u: geometry.jacobian_eigenvalues(u, -1.0),
            ValueError,
            "eps=-1",
        ),
        (
            lambda u: geometry.radius(u, -1e-5, 3),
            ValueError,
            "eps=-1e-05 .* not be negative",
        ),
        (lambda u: geometry.radius(u, float("nan"), 3), ValueError, "eps=nan"),
        (lambda u: geometry.radius(u, 0.0, 0), ValueError, "n=0 values"),
        (lambda u: geometry.radius(u, 0.0, 3, -1), ValueError, "times=-1"),
        (
            lambda u: scale_invariance.equilibrium_norm(u, 0.1, 0.0),
            ValueError,
            "weight_decay=0.0 must be positive",
        ),
        (
            lambda u: scale_invariance.equilibrium_norm(u, -0.1, 1.0),
            ValueError,
            "lr=-0.1",
        ),
        (
            lambda u: scale_invariance.equilibrium_norm(u, 2.0, 1.0),
            ValueError,
            "at least 2",
        ),
        (
            lambda u: scale_invariance.equilibrium_angle(0.0, 1.0),
            ValueError,
            "lr=0.0",
        ),
        (
            lambda u: scale_invariance.equilibrium_angle(2.0, 0.7),
            ValueError,
            "above 1",
        ),
        (
            lambda u: scale_invariance.absorbed_bias(u, torch.ones(3)),
            ValueError,
            r"\(3, 5\) and constants of shape \(3,\)",
        ),
        (
            lambda u: scale_invariance.absorbed_bias(u[0], u[0]),
            ValueError,
            "expected",
        ),
    ],
    lambda call: call(torch.ones(3, 5)),
)


# ---- scale invariance -------------------------------------------------------


def test_norms_take_tensors_and_numbers():
    norm = torch.tensor([[0.5], [2.0]])
    out = scale_invariance.next_norm(norm, torch.tensor([1.0, 3.0]), 0.1, 0.5)
    assert out.shape == (2, 2) and out.dtype == torch.float32
    assert scale_invariance.next_norm(1, 0, 0.1, 0.5) == pytest.approx(0.95)
    still = scale_invariance.equilibrium_norm(
        torch.tensor([1.0, 3.0]), 0.1, 0.5
    )
    torch.testing.assert_close(
        scale_invariance.next_norm(still, torch.tensor([1.0, 3.0]), 0.1, 0.5),
        still,
    )


def test_gradients_of_weight_norm_along_any_axes():
    v = torch.randn(3, 5, 2, 7, dtype=torch.float64, requires_grad=True)
    g = torch.rand(1, 5, 1, 1, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(v)
    w = g * v / v.square().sum((0, 2, 3), keepdim=True).sqrt()
    expected = torch.autograd.grad((w * grad).sum(), (v, g))
    torch.testing.assert_close(
        scale_invariance.weight_norm_gradient(
            v.detach(), g.detach(), grad, (0, 2, 3)
        ),
        expected,
    )


@pytest.mark.parametrize("kernel", [(), (3,), (3, 2), (1, 2, 3)])
def test_constants_go_into_a_bias(kernel):
    weight, value = torch.randn(2, 5, *kernel), torch.randn(5)
    x = value.reshape(1, 5, *(1 for _ in kernel)).expand(1, 5, *kernel)
    torch.testing.assert_close(
        scale_invariance.absorbed_bias(weight, value),
        (weight * x).flatten(1).sum(1),
    )
