"""The recipe behind the chapter on weights' lengths, and attacks by a peer on
its networks.
"""

import pytest
import torch

from normalnorm.experiments.recipes import growth
from normalnorm.experiments.results import by_arm


@pytest.mark.parametrize("norm", growth.NORMS)
def test_which_weights_are_invariant(norm):
    model = growth.network(norm).double()
    x = torch.randn(5, 1, 14, 14, dtype=torch.float64)
    before = model(x)
    growth.multiply(model, "convolutions", 4.0)
    apart = (model(x) - before).abs().max()
    assert (apart < 1e-3) == (norm != "none")
    growth.multiply(model, "convolutions", 0.25)
    growth.multiply(model, "classifier", 4.0)
    torch.testing.assert_close(model(x), 4 * before)


def test_root_mean_square_of_a_whole_image():
    x = torch.randn(3, 4, 5, 7)
    ours = growth.WholeRMS(4, eps=1e-5)
    theirs = torch.nn.RMSNorm((4, 5, 7), eps=1e-5)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("norm", growth.NORMS)
def test_attacks_are_those_of_torchattacks(norm):
    (row,) = by_arm("torchattacks")[norm]
    assert {r["attack"] for r in row["found"]} == {"fgsm", "pgd"}
    for r in row["found"]:
        assert r["largest"] < 1e-6 and r["pixels"] == 0
        assert r["ours"] == r["theirs"]
    # an attack that does nothing would agree as well
    pgd = [r["ours"] for r in row["found"] if r["attack"] == "pgd"]
    assert pgd[-1] < pgd[0] - 5
