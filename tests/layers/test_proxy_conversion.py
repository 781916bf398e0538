"""Models that become proxy-normalized: timm's, ours, and what is left or
refused, with its reason.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normalnorm
from normalnorm.experiments import models
from normalnorm.layers.proxy_conversion import to_proxy_norm
from normalnorm.layers.proxy_norm import ProxyNorm
from tests.peers import installed

BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def of_kind(model, kind):
    return [m for m in model.modules() if isinstance(m, kind)]


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
    proxies = of_kind(model, ProxyNorm)
    assert [p.scale for p in proxies].count(False) == 1
    assert not proxies[-1].scale
    assert {row.reason for row in report.left} == (
        {"SqueezeExcite has no normalizer"} if inside else set()
    )
    hand = copy.deepcopy(before)
    last = of_kind(hand, BATCH)[-1]
    for parent in list(hand.modules()):
        for child, m in list(parent.named_children()):
            if isinstance(m, BATCH):
                acts = not isinstance(m.act, nn.Identity)
                group = nn.GroupNorm(8, m.num_features, m.eps, affine=not acts)
                proxy = ProxyNorm(m.num_features, m.act, scale=m is not last)
                if not acts:
                    group.bias = None
                setattr(
                    parent,
                    child,
                    nn.Sequential(group, proxy) if acts else group,
                )
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            model(x), hand.eval()(x), rtol=1e-4, atol=1e-4
        )
        # of the batch nothing is left
        torch.testing.assert_close(
            model.train()(x)[:1], model(x[:1]), rtol=1e-3, atol=1e-3
        )


def test_parameters_keep_their_identity_and_everything_is_checked_first():
    net = models.build("small_resnet_v2").double()
    gamma, eps = net.norm.weight, net.norm.eps
    with pytest.raises(ValueError, match="5 groups do not divide the 16 chann"):
        to_proxy_norm(net, groups=5)
    assert len(of_kind(net, BATCH)) == 7
    copied = to_proxy_norm(net, norm="layer", inplace=False)
    assert len(of_kind(net, BATCH)) == 7 and not of_kind(copied, BATCH)
    assert {m.num_groups for m in of_kind(copied, nn.GroupNorm)} == {1}
    assert to_proxy_norm(net, groups=4, eps=0.1, learnable=False) is net
    assert net.act.weight is gamma and net.norm.eps == eps
    assert net.norm.weight is None and net.act.eps == 0.1
    assert net.act.proxy_mean is None
    assert all(p.dtype is torch.float64 for p in net.parameters())
    instance = to_proxy_norm(models.build("small_resnet_v2"), norm="instance")
    assert all(
        m.num_groups == m.num_channels for m in of_kind(instance, nn.GroupNorm)
    )


def test_training_works_and_saves():
    torch.manual_seed(0)
    net = to_proxy_norm(models.build("small_efficientnet"), groups=4)
    x, labels = torch.randn(8, 1, 28, 28), torch.arange(8)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, weight_decay=1e-4)
    losses = []
    for _ in range(6):
        loss = F.cross_entropy(net(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in net.parameters())
    assert any(m.proxy_mean.abs().max() > 0 for m in of_kind(net, ProxyNorm))
    other = to_proxy_norm(models.build("small_efficientnet"), groups=4)
    other.load_state_dict(net.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(x), net.eval()(x))


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

    def net():
        return nn.Sequential(
            nn.Conv2d(3, 8, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            Block(act()),
            Block(act()),
        )

    model = net()
    with pytest.raises(ValueError) as refused:
        to_proxy_norm(model, groups=4, return_report=True)
    said = [f"  {i}.bn1 (BatchNorm2d): {reason.format(i)}" for i in (3, 4)]
    assert str(refused.value).splitlines()[1:3] == said
    assert "partial=True" in str(refused.value)
    assert len(of_kind(model, BATCH)) == 5
    with pytest.warns(UserWarning) as told:
        to_proxy_norm(model, groups=4, partial=True)
    assert str(told[0].message).splitlines()[1:3] == said
    assert [type(b.bn1) for b in model[3:]] == 2 * [nn.BatchNorm2d]
    assert len(of_kind(model, nn.GroupNorm)) == 3
    assert len(of_kind(model, ProxyNorm)) == 1
    to_proxy_norm(net(), groups=4, skip=["3.bn1", "4.bn1"], return_report=True)


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


def test_what_is_refused():
    with pytest.raises(ValueError, match="torch.fx says TraceError"):
        to_proxy_norm(Net(branching, act=nn.ReLU()))
    with pytest.raises(ValueError, match="norm='groop'.*group"):
        to_proxy_norm(nn.Sequential(), norm="groop")
    with pytest.raises(ValueError, match="groups=0"):
        to_proxy_norm(nn.Sequential(), groups=0)
    with pytest.raises(ValueError, match="samples"):
        to_proxy_norm(nn.Sequential(), samples=0)
    with pytest.raises(ValueError, match="itself a BatchNorm2d"):
        to_proxy_norm(nn.BatchNorm2d(8))
    with pytest.raises(TypeError, match="torch.nn.Module"):
        to_proxy_norm("resnet")
    with pytest.raises(ValueError, match="matches no module"):
        to_proxy_norm(Net(lambda net, y: y), skip="nurm")
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
    assert {type(m) for m in (net.norm, net.stages[1].norm1)} == {
        nn.BatchNorm2d
    }
    assert isinstance(net.stages[2].act1, ProxyNorm)
    assert isinstance(net.act, nn.ReLU)


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


def test_public_name():
    assert normalnorm.to_proxy_norm is to_proxy_norm


def test_fused():
    "The same network, with the same names, and no group norms."
    for name in ("small_resnet_v2", "small_efficientnet"):
        torch.manual_seed(0)
        net = models.build(name)
        apart, report = to_proxy_norm(
            net, groups=4, inplace=False, return_report=True
        )
        fused, other = to_proxy_norm(
            net, groups=4, inplace=False, fused=True, return_report=True
        )
        assert apart.state_dict().keys() == fused.state_dict().keys()
        assert len(report.replaced) == len(other.replaced)
        assert {m.groups for m in of_kind(fused, ProxyNorm)} == {4}
        assert all(m.affine for m in of_kind(fused, nn.GroupNorm))
        x = torch.randn(3, 1, 28, 28)
        torch.testing.assert_close(fused(x), apart(x), rtol=1e-4, atol=1e-4)
