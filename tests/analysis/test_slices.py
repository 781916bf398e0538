"Slices and the statistic of Epps and Pulley, beyond their chapter."

import pytest
import torch

from normalnorm.analysis.joint_normality import bhep
from normalnorm.analysis.slices import epps_pulley, slices
from tests.peers import installed
from tests.refusals import refusals

PAIRS = (2 * torch.pi) ** 0.5


@pytest.mark.parametrize("scale, offset", [(1.0, 0.0), (0.3, 2.0)])
def test_a_peer(scale, offset):
    """Its sum ends at t = 3, what follows is below e^(-4.5) of the weight; with
    more knots, further out, it is ours.
    """
    peer = installed("jepa_science")
    points = scale * torch.randn(500, 20, dtype=torch.float64) + offset
    generator = lambda: torch.Generator().manual_seed(5)
    found = epps_pulley(slices(points, 64, generator()), dim=-2)
    asked = {"num_slices": 64, "generator": generator()}
    far = peer.sigreg_loss(points, n_knots=601, t_max=9.0, **asked)
    torch.testing.assert_close(found.mean(), far, rtol=1e-9, atol=0)


def test_axes_dtypes_and_sets():
    x = torch.randn(3, 50, 4)
    whole = epps_pulley(x, dim=1)
    assert whole.shape == (3, 4) and whole.dtype == torch.float64
    for i in range(3):
        for j in range(4):
            alone = epps_pulley(x[i, :, j].half())
            torch.testing.assert_close(alone, whole[i, j], rtol=1e-2, atol=1e-2)
            exact = PAIRS * bhep(x[i, :, j, None])
            torch.testing.assert_close(whole[i, j], exact, rtol=1e-9, atol=0)
    cut = slices(x, 7)
    assert cut.shape == (3, 50, 7) and cut.dtype == torch.float32
    # a direction has length 1, and its own in every coordinate
    lengths = slices(torch.eye(4), 5000).square()
    torch.testing.assert_close(lengths.sum(0), torch.ones(5000))
    assert abs(lengths.mean(1) - 0.25).max() < 0.02


@pytest.mark.parametrize("offset", [0.0, 10.0, 1e3, 1e7])
def test_far_values(offset):
    """The distance of two values does not cancel, and a range that asks for
    more values of t than there are points is a sum over pairs.
    """
    near = torch.randn(30, dtype=torch.float64)
    apart = torch.cat([near + offset, near - offset])
    expected = PAIRS * (
        2 * (-((near[:, None] - near) ** 2) / 2).exp().sum() / 60 + 60 / 3**0.5
    )
    if offset > 100:
        torch.testing.assert_close(
            epps_pulley(apart), expected, rtol=1e-8, atol=0
        )
    torch.testing.assert_close(
        epps_pulley(apart),
        PAIRS * bhep(apart[:, None]),
        rtol=1e-9,
        atol=0,
    )


@pytest.mark.parametrize("centre", [8.0, -8.0])
def test_values_off_centre(centre):
    x = 0.1 * torch.randn(100, dtype=torch.float64) + centre
    exact = PAIRS * bhep(x[:, None])
    torch.testing.assert_close(epps_pulley(x), exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("wide", [1.0, 100.0])
def test_gradients(wide):
    x = (wide * torch.randn(40, 2, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: epps_pulley(x, dim=0), x)
    assert torch.autograd.gradcheck(bhep, x)


def test_what_is_not_finite_is_a_set_of_its_own():
    x = torch.randn(4, 30)
    x[1, 3], x[2, 0] = torch.nan, torch.inf
    for found in (epps_pulley(x), bhep(x[..., None])):
        assert found.isnan().tolist() == [False, True, True, False]
    alone = epps_pulley(x[[0, 3]])
    torch.testing.assert_close(epps_pulley(x)[[0, 3]], alone)


def test_blocks_of_pairs():
    x = torch.randn(2, 101, 3)
    torch.testing.assert_close(bhep(x, 0.7, chunk=500), bhep(x, 0.7))


test_refused = refusals(
    [
        (lambda: epps_pulley(torch.arange(5)), TypeError, "floating-point"),
        (lambda: epps_pulley([1.0]), TypeError, "not list"),
        (lambda: epps_pulley(torch.tensor(1.0)), "at least one value"),
        (lambda: epps_pulley(torch.ones(3, 0)), "at least one value"),
        (lambda: bhep(torch.ones(3, 2).long()), TypeError, "bhep expects"),
        (lambda: bhep(torch.ones(3)), "last two axes"),
        (lambda: bhep(torch.ones(0, 2)), "last two axes"),
        (lambda: slices(torch.ones(3).long()), TypeError, "slices expects"),
        (lambda: slices(torch.ones(3)), "last two axes"),
        (lambda: slices(torch.ones(3, 0)), "last two axes"),
        (lambda: slices(torch.ones(3, 2), 0), "count=0"),
    ]
)
