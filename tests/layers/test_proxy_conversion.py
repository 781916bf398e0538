"""Models that become proxy-normalized: timm's, ours, and what is left or
refused, with its reason.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normalnorm
from normalnorm.experiments import models
from normalnorm.layers.proxy_conversion import to_proxy_norm
from normalnorm.layers.proxy_norm import ProxyNorm
from tests.layers.steps import refusals
from tests.peers import installed

BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def of_kind(model, kind):
    return [m for m in model.modules() if isinstance(m, kind)]


def by_hand(model):
    "Group norms and proxies in the place of timm's batch norms."
    last = of_kind(model, BATCH)[-1]
    for parent in list(model.modules()):
        for child, m in list(parent.named_children()):
            if isinstance(m, BATCH):
                acts = not isinstance(m.act, nn.Identity)
                group = nn.GroupNorm(8, m.num_features, m.eps, affine=not acts)
                group.bias = group.bias if acts else None
                proxy = ProxyNorm(m.num_features, m.act, scale=m is not last)
                new = nn.Sequential(group, proxy) if acts else group
                setattr(parent, child, new)
    return model.eval()


@pytest.mark.parametrize(
    "name, norms, inside", [("resnetv2_18", 17, 0), ("efficientnet_b0", 49, 2)]
)
def test_timm(name, norms, inside):
    """All batch norms go, squeeze-excite stays, scaling is off once; the twin
    built by hand of the same parts gives the same.
    """
    timm = installed("timm")
    torch.manual_seed(0)
    before = timm.create_model(name, pretrained=False, num_classes=5).eval()
    model, report = to_proxy_norm(before, inplace=False, return_report=True)
    assert len(of_kind(before, BATCH)) == len(report.replaced) >= norms
    assert not of_kind(model, BATCH) and not model.training
    *scaled, last = [p.scale for p in of_kind(model, ProxyNorm)]
    assert all(scaled) and not last
    assert {row.reason for row in report.left} == (
        {"SqueezeExcite has no normalizer"} if inside else set()
    )
    hand, x = by_hand(copy.deepcopy(before)), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), hand(x), rtol=1e-4, atol=1e-4)
        # of the batch nothing is left
        torch.testing.assert_close(
            model.train()(x)[:1], model(x[:1]), rtol=1e-3, atol=1e-3
        )


def test_parameters_keep_their_identity_and_everything_is_checked_first():
    net = models.build("small_resnet_v2").double()
    gamma, eps = net.norm.weight, net.norm.eps
    with pytest.raises(ValueError, match="5 groups do not divide the 16 chann"):
        to_proxy_norm(net, groups=5)
    for norm, groups in (("layer", lambda c: 1), ("instance", lambda c: c)):
        copied = to_proxy_norm(net, norm=norm, inplace=False)
        assert len(of_kind(net, BATCH)) == 7 and not of_kind(copied, BATCH)
        for m in of_kind(copied, nn.GroupNorm):
            assert m.num_groups == groups(m.num_channels)
    assert to_proxy_norm(net, groups=4, eps=0.1, learnable=False) is net
    assert net.act.weight is gamma and net.norm.eps == eps
    assert net.norm.weight is None and net.act.eps == 0.1
    assert net.act.proxy_mean is None
    assert all(p.dtype is torch.float64 for p in net.parameters())


class Net(nn.Module):
    "A convolution, a batch norm, and what a function does with them."

    def __init__(self, run, **parts):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.run(self, self.norm(self.conv(x)))


def twice(net, y):
    return net.act(net.act(y))


def branching(net, y):
    return net.act(y) if y.sum() > 0 else y


@pytest.mark.parametrize(
    "net, words",
    [
        (Net(lambda net, y: F.relu(y)), "the function relu"),
        (Net(lambda net, y: y.relu()), "the function relu"),
        (Net(lambda net, y: F.selu(y)), "the function selu"),
        (Net(lambda net, y: torch.relu_(y)), "the function relu_"),
        (Net(lambda net, y: y.clamp(min=0)), "the function clamp"),
        (Net(lambda net, y: F.softplus(y, beta=2)), "the function softplus"),
        (Net(lambda net, y: y * torch.sigmoid(y)), "the function sigmoid"),
        (Net(twice, act=nn.ReLU()), "act is called in several places"),
        (
            Net(lambda net, y: net.act(net.norm(y)), act=nn.ReLU()),
            "called 2 times",
        ),
        (
            Net(lambda net, y: net.act(y) + y, act=nn.ReLU()),
            "it follows BatchNorm",
        ),
        (Net(lambda net, y: net.act(y + 1), act=nn.ReLU()), "it follows add"),
        (
            Net(
                lambda net, y: net.act(net.more(y)),
                act=nn.ReLU(),
                more=nn.Conv2d(8, 8, 1),
            ),
            "it follows Conv2d",
        ),
    ],
)
def test_what_is_left_and_named(net, words):
    if not words.startswith("it follows"):
        with pytest.raises(ValueError, match=f"would stay(?s:.*){words}"):
            to_proxy_norm(net, groups=4)
    with pytest.warns(UserWarning, match=words):
        to_proxy_norm(net, groups=4, partial=True)
    assert not of_kind(net, ProxyNorm)
    net(torch.randn(2, 3, 5, 5))


class Block(nn.Module):
    "torchvision's: one ReLU serves behind the first norm and behind the sum."

    def __init__(self, act):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.act = act

    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        return self.act(self.bn2(self.conv2(y)) + x)


@pytest.mark.parametrize(
    "act, reason",
    [
        (
            nn.ReLU,
            "its activation {0}.act is called in several places: give each "
            "one of its own",
        ),
        (
            lambda: F.relu,
            "its activation is the function relu, which cannot be "
            "replaced: make it a module, such as nn.ReLU()",
        ),
    ],
)
def test_batch_norms_do_not_stay_unasked(act, reason):
    """As in torchvision's ResNet-18: what, why and what to do, for each block;
    nothing is changed. With `partial` the rest is replaced, skip is a wish.
    """
    made = lambda: nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Block(act()),
        Block(act()),
    )
    model = made()
    with pytest.raises(ValueError, match="partial=True") as refused:
        to_proxy_norm(model, groups=4, return_report=True)
    assert len(of_kind(model, BATCH)) == 5
    with pytest.warns(UserWarning) as told:
        to_proxy_norm(model, groups=4, partial=True)
    said = [f"  {i}.bn1 (BatchNorm2d): {reason.format(i)}" for i in (3, 4)]
    for text in (refused.value, told[0].message):
        assert str(text).splitlines()[1:3] == said
    assert [type(b.bn1) for b in model[3:]] == 2 * [nn.BatchNorm2d]
    assert len(of_kind(model, nn.GroupNorm)) == 3
    assert len(of_kind(model, ProxyNorm)) == 1
    to_proxy_norm(made(), groups=4, skip=["3.bn1", "4.bn1"], return_report=True)


def test_a_batch_norm_of_another_making_would_stay_too():
    class Own(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    net = nn.Sequential(nn.Conv2d(3, 8, 1), Own(8), nn.ReLU())
    with pytest.raises(ValueError, match=r"1 \(Own\): a subclass of BatchNorm"):
        to_proxy_norm(net)
    _, report = to_proxy_norm(net, skip=Own, return_report=True)
    assert type(net[1]) is Own and report.left


@pytest.mark.parametrize(
    "run",
    [
        lambda net, y: 2 * y + 1,
        lambda net, y: F.max_pool2d(y, 2),
        lambda net, y: F.dropout(y, 0.1),
        lambda net, y: y.flatten(1),
        lambda net, y: y + y.mean((2, 3), keepdim=True),
    ],
)
def test_functions_that_are_no_activation(run):
    _, report = to_proxy_norm(Net(run), groups=4, return_report=True)
    assert [row.after for row in report.replaced] == ["GroupNorm(4), γ only"]
    assert not report.left


def test_functions_are_tried_without_data_too():
    with torch.device("meta"):
        net = Net(lambda net, y: F.selu(y))
        _, report = to_proxy_norm(
            net, groups=4, partial=True, return_report=True
        )
    assert "the function selu" in report.left[0].reason


test_what_is_refused = refusals(
    [
        (
            lambda: to_proxy_norm(Net(branching, act=nn.ReLU())),
            ValueError,
            "torch.fx says TraceError",
        ),
        *(
            (
                partial(to_proxy_norm, nn.Sequential(), **options),
                ValueError,
                words,
            )
            for options, words in (
                ({"norm": "groop"}, "norm='groop'.*group"),
                ({"groups": 0}, "groups=0"),
                ({"samples": 0}, "samples"),
            )
        ),
        (
            lambda: to_proxy_norm(nn.BatchNorm2d(8)),
            ValueError,
            "itself a BatchNorm2d",
        ),
        (lambda: to_proxy_norm("resnet"), TypeError, "torch.nn.Module"),
        (
            lambda: to_proxy_norm(Net(lambda net, y: y), skip="nurm"),
            ValueError,
            "matches no module",
        ),
    ]
)


def test_a_model_without_batch_norms():
    assert normalnorm.to_proxy_norm is to_proxy_norm
    with pytest.warns(UserWarning, match="has no batch norm"):
        to_proxy_norm(nn.Sequential(nn.Linear(2, 2)))


def test_skip_and_other_normalizers():
    net = models.build("small_resnet_v2")
    net.stages[0].norm1 = nn.GroupNorm(2, 16)
    _, report = to_proxy_norm(
        net, groups=4, skip=["stages.1", "norm"], return_report=True
    )
    left = {row.name: row.reason for row in report.left}
    assert left["norm"] == left["stages.1.norm1"] == "skipped, as asked"
    assert left["stages.0.norm1"] == "no batch norm"
    kept = {type(m) for m in (net.norm, net.stages[1].norm1)}
    assert kept == {nn.BatchNorm2d} and isinstance(net.act, nn.ReLU)
    assert isinstance(net.stages[2].act1, ProxyNorm)


@pytest.mark.parametrize(
    "norm, conv, shape",
    [
        (nn.BatchNorm1d, nn.Linear, (4, 6)),
        (nn.BatchNorm3d, None, (2, 8, 2, 3, 2)),
    ],
)
def test_other_numbers_of_axes(norm, conv, shape):
    first = nn.Linear(6, 8) if conv else nn.Identity()
    net = nn.Sequential(
        first, norm(8, affine=False), nn.Dropout(0.5), nn.Identity(), nn.GELU()
    )
    _, report = to_proxy_norm(net, groups=2, return_report=True)
    assert [r.after for r in report.replaced] == ["GroupNorm(2)"]
    assert "it follows Dropout" in report.left[0].reason
    net = nn.Sequential(first, norm(8, affine=False), nn.Identity(), nn.GELU())
    to_proxy_norm(net, groups=2)
    assert (
        isinstance(net[3], ProxyNorm)
        and net(torch.randn(shape)).isfinite().all()
    )


@pytest.mark.parametrize("name", ["small_resnet_v2", "small_efficientnet"])
def test_fused(name):
    "The same network, with the same names, and no group norms."
    net, x = models.build(name), torch.randn(3, 1, 28, 28)
    (apart, report), (fused, other) = (
        to_proxy_norm(
            net, groups=4, inplace=False, fused=fused, return_report=True
        )
        for fused in (False, True)
    )
    assert apart.state_dict().keys() == fused.state_dict().keys()
    assert len(report.replaced) == len(other.replaced)
    assert {m.groups for m in of_kind(fused, ProxyNorm)} == {4}
    assert all(m.affine for m in of_kind(fused, nn.GroupNorm))
    torch.testing.assert_close(fused(x), apart(x), rtol=1e-4, atol=1e-4)
