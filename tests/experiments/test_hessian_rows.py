"The rows of chapter 460 and the recipe that measures them."

import pytest
import torch

from normalnorm.experiments.recipes import spectra
from normalnorm.experiments.results import by_arm

ROWS = by_arm("hessian")


def test_all_eigenvalues_converged():
    for row in sum(ROWS.values(), []):
        assert row["before"]["converged"]
        assert not row["after"] or row["after"]["converged"]


@pytest.mark.parametrize("arm", ROWS)
def test_a_density_is_that_of_its_network(arm):
    "Its ends against the extremes, found another way; no node beyond them."
    row = ROWS[arm][0]
    nodes, weights = (
        torch.tensor(row[name]).double() for name in ("nodes", "weights")
    )
    assert nodes.shape == (row["config"]["probes"], row["config"]["nodes"])
    assert (weights.sum(1) - 1).abs().max() < 1e-4
    top = row["after"]["largest"][0]
    slack = 1e-3 * top
    assert (nodes.amax(1) - top).abs().max() < slack
    assert row["after"]["smallest"] - slack < nodes.min()


def test_a_network_that_diverged_has_no_spectrum():
    config = spectra.hessians.arms("smoke")["none, skips"]
    found = spectra.run(config | {"lr": 1e6, "steps": 3}, 0)
    assert found["before"] and found["after"] is None and "nodes" not in found
    assert found["metrics"]["diverged"] == 1
