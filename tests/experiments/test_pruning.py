"""Channels taken out: against a mask, for each layer that has a factor for each
channel; what is refused, and in which words.
"""

import math
import sys

import pytest
import torch
from torch import nn

import normalnorm as nm
from normalnorm.analysis import pruning
from normalnorm.experiments.models import SmallResNet
from normalnorm.experiments.recipes import slimming
from tests.peers import installed
from tests.refusals import refusals
from tests.toys import Of

GONE = {"1": [0, 3], "4": [1, 2, 7]}
EXACT = {
    "batch": nn.BatchNorm2d,
    "batch normality": nm.BatchNormalNorm2d,
    "instance": lambda c: nn.InstanceNorm2d(c, affine=True),
    "instance normality": lambda c: nm.InstanceNormalNorm2d(c, affine=True),
    "synchronized": nm.SyncBatchNormalNorm,
    "renorm": nm.BatchReNorm,
    "filter response": nm.FilterResponseNorm,
}


def net(norm, activation=nn.GELU, mode="circular"):
    conv = {"kernel_size": 3, "padding": 1, "padding_mode": mode}
    model = nn.Sequential(
        nn.Conv2d(1, 6, bias=False, **conv),
        norm(6),
        activation(),
        nn.Conv2d(6, 8, **conv),
        norm(8),
        activation(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )
    for layer in (model[1], model[4]):
        for p in layer.parameters():
            nn.init.uniform_(p, 0.2, 1.5)
        for name, buffer in layer.named_buffers():
            if name.startswith("running") and buffer is not None:
                nn.init.uniform_(buffer, 0.5, 1.5)
    return model.double()


X = torch.randn(3, 1, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_removal_is_the_mask(name, activation):
    installed("torch_pruning")
    model = net(EXACT[name], activation)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    small = pruning.remove_channels(model, X, GONE)
    assert small.training and small[3].weight.shape[:2] == (5, 4)
    assert small[8].weight.shape == (5, 5 * 16)
    mask = pruning.mask_channels(model, GONE).eval()
    torch.testing.assert_close(small.eval()(X), mask(X))
    # folding is what makes it so
    small[8].bias.data.copy_(model[8].bias)
    assert (small(X) - mask(X)).abs().max() > 1e-3
    assert all((v == before[k]).all() for k, v in model.state_dict().items())
    small.train()(X).sum().backward()
    torch.optim.SGD(small.parameters(), 0.1).step()
    again = net(EXACT[name], activation)
    assert set(small.state_dict()) >= set(again.state_dict())


@pytest.mark.parametrize("norm", [nn.GroupNorm, nm.GroupNormalNorm])
def test_shared_statistics_are_asked_for(norm):
    installed("torch_pruning")
    model = net(lambda c: norm(1, c))
    with pytest.raises(ValueError, match="inexact=True"):
        pruning.remove_channels(model, X, GONE)
    with pytest.raises(ValueError, match="share their statistics"):
        pruning.prune_by_gamma(model, X, 0.3)
    small = pruning.remove_channels(model, X, GONE, inexact=True).eval()
    assert small[1].num_channels == 4 and small[4].num_channels == 5
    mask = pruning.mask_channels(model, GONE).eval()
    assert (small(X) - mask(X)).abs().max() > 1e-4


@pytest.mark.parametrize("norm", [nn.GroupNorm, nm.GroupNormalNorm])
def test_groups_lose_equally_many(norm):
    """What is left of each group is normalized by itself: compared with a
    network in which the channels that stay were always alone.
    """
    installed("torch_pruning")
    model = net(lambda c: norm(2, c))
    assert [row.groups for row in pruning.gamma_report(model, X)] == [2, 2]
    gone = {"1": [0, 5], "4": [1, 3, 6, 4]}
    small = pruning.remove_channels(model, X, gone, inexact=True).eval()
    kept = [1, 2, 3, 4]
    assert (small[1].num_groups, small[1].num_channels) == (2, 4)
    after = model[:1](X)[:, kept]
    half = norm(1, 2).double().eval()
    for g, part in enumerate(after.split(2, 1)):
        stay = slice(2 * g, 2 * g + 2)
        half.weight.data = model[1].weight.data[kept][stay]
        half.bias.data = model[1].bias.data[kept][stay]
        torch.testing.assert_close(small[:2](X)[:, stay], half(part))
    with pytest.raises(ValueError, match=r"lose \[2, 0\] channels"):
        pruning.remove_channels(model, X, {"1": [0, 1]}, inexact=True)
    assert pruning.prune_by_gamma(model, X, 0.6, inexact=True)(X).shape == (
        3,
        5,
    )
    (single,) = {
        row.obstacle
        for row in pruning.gamma_report(net(lambda c: norm(c, c)), X)
    }
    assert "single channel" in single
    rows = pruning.gamma_report(net(lambda c: nm.FilterResponseNorm(c)), X)
    assert {row.groups for row in rows} == {1}


def test_residual_networks_keep_their_stream():
    installed("torch_pruning")
    model = SmallResNet(width=4, stem_stride=1, norm=nm.BatchNormalNorm2d)
    report = {
        row.name: row
        for row in pruning.gamma_report(model, torch.zeros(1, 1, 8, 8))
    }
    free = [name for name, row in report.items() if not row.obstacle]
    assert free == [f"stages.{i}.norm1" for i in range(3)]
    assert report["stages.1.norm1"].takers == ("stages.1.conv2",)
    assert "added to others" in report["stem_norm"].obstacle
    small = pruning.prune_by_gamma(model, torch.zeros(1, 1, 8, 8), 0.5)
    assert small(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert len(small.stages[0].norm1.running_lambda) == (
        small.stages[0].conv1.out_channels
    )
    with pytest.raises(ValueError, match="'stem_norm' can be removed"):
        pruning.remove_channels(
            model, torch.zeros(1, 1, 8, 8), {"stem_norm": [0]}
        )


def test_what_mixes_is_refused():
    installed("torch_pruning")

    less_mean = Of(
        lambda own, x: x - x.mean(1, keepdim=True) * torch.arange(8)[:, None]
    )
    model = nn.Sequential(
        nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), less_mean, nn.Conv2d(3, 2, 1)
    )
    with pytest.raises(ValueError, match="different values"):
        pruning.remove_channels(model, torch.randn(2, 1, 8, 8), {"1": [0]})


def test_smallest():
    scores = {"a": torch.tensor([3.0, 1.0, 2.0]), "b": torch.tensor([9.0, 8])}
    assert pruning.smallest(scores, 0.0) == {}
    assert pruning.smallest(scores, 0.4) == {"a": [1, 2]}
    assert pruning.smallest(scores, 0.8) == {"a": [1, 2], "b": [1]}
    assert pruning.smallest(scores, 0.8, keep=2) == {"a": [1]}
    six = {"a": torch.tensor([1.0, 2, 3, 9, 8, 7]), "b": torch.ones(2) * 5}
    for share, groups, gone in (
        (3 / 8, {"a": 1}, {"a": [0, 1, 2]}),
        (3 / 8, {"a": 2}, {"a": [0, 5]}),
        (1 / 8, {"a": 2}, {}),
        (0.99, {"a": 3, "b": 2}, {"a": [0, 2, 5]}),
    ):
        assert pruning.smallest(six, share, groups=groups) == gone


test_what_cannot_be_pruned = refusals(
    [
        *(
            (
                lambda how=how: pruning.smallest({"a": torch.ones(6)}, **how),
                says,
            )
            for how, says in (
                ({"share": 0.5, "groups": {"a": 4}}, "cannot be 4 groups"),
                ({"share": 1.0}, "share=1.0"),
                ({"share": -0.1}, "share=-0.1"),
                ({"share": 0.5, "keep": 0}, "keep=0"),
            )
        ),
        (
            lambda: pruning.smallest({"a": torch.tensor([math.nan])}, 0.5),
            "one finite number",
        ),
        (
            lambda: pruning.gamma_penalty(nn.Sequential(nn.Linear(2, 2))),
            "affine=False",
        ),
        (
            lambda: (
                installed("torch_pruning")
                and pruning.remove_channels(
                    net(nn.BatchNorm2d), X, {"1": range(6)}
                )
            ),
            "at least one must stay",
        ),
    ]
)


test_mask_says_what_is_wrong = refusals(
    [
        ({"9": [0]}, "there are 1, 4"),
        ({"1": [6]}, "from 0 to 5"),
        ({"1": [0, 0]}, "different numbers"),
        ({"1": [-1]}, "from 0 to 5"),
    ],
    lambda channels: pruning.mask_channels(net(nn.BatchNorm2d), channels),
)


def test_penalty():
    model = net(nn.BatchNorm2d)
    expected = model[1].weight.abs().sum() + model[4].weight.abs().sum()
    torch.testing.assert_close(pruning.gamma_penalty(model), expected)


def test_without_the_package(monkeypatch):
    pruning._torch_pruning.cache_clear()
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(ImportError, match="pip install torch-pruning"):
        pruning.gamma_report(net(nn.BatchNorm2d), X)
    pruning._torch_pruning.cache_clear()


def test_time_is_that_of_the_smaller_network_over_the_whole():
    "Of two networks one of which does nothing."
    wide = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])
    x = torch.randn(300, 300)
    of = slimming._timed(wide, nn.Identity(), x, 15)
    assert of["low"] <= of["time"] <= of["high"] < 0.5
