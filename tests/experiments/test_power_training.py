"""The recipes of power in training, and their rows."""

import pytest
import torch
from torch import nn

from normalnorm.experiments.recipes import power_training as module
from normalnorm.experiments.results import by_arm
from normalnorm.layers.proxy_norm import ProxyNorm


def test_networks_are_what_their_arms_say():
    "And have the same weights at the start."
    arms = module.power_training.arms("book")
    nets = {arm: module.network(config, 1) for arm, config in arms.items()}
    for arm, net in nets.items():
        found = list(net.modules())
        assert any(isinstance(m, nn.BatchNorm2d) for m in found) == (
            arm == "BN"
        )
        groups = {
            "channels" if m.num_groups == m.num_channels else m.num_groups
            for m in found
            if isinstance(m, nn.GroupNorm)
        }
        wanted = {"L": {1}, "G": {4}, "I": {"channels"}, "B": set()}
        assert groups == wanted[arm[0]]
        assert any(isinstance(m, ProxyNorm) for m in found) == ("PN" in arm)
        weight = net.stem.weight
        standardized = abs(weight[0].mean().item()) < 1e-6
        assert standardized == (arm == "LN+WS")
        if not standardized:
            assert torch.equal(weight, nets["BN"].stem.weight)


@pytest.mark.book
def test_a_short_run_begins_as_the_rows_do():
    "The weights at the start depend on the seed alone."
    config = module.power_training.arms("book")["LN+WS"]
    short = {"images": 256, "train": config["train"] | {"epochs": 1}}
    found = module.run(config | short, seed=0)
    kept = by_arm("power-training")["LN+WS"][0]
    torch.testing.assert_close(
        torch.tensor(found["start"]),
        torch.tensor(kept["start"]),
        atol=2e-3,
        rtol=0,
    )
    assert found["vicinity"]["start"] == pytest.approx(
        kept["vicinity"]["start"], abs=5e-3
    )
