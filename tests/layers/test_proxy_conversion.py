"""Models that become proxy-normalized: timm's, ours, and what is left or
refused, with its reason.
"""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normalnorm
from normalnorm.experiments import models
from normalnorm.layers import proxy_conversion
from normalnorm.layers.proxy_conversion import to_proxy_norm
from normalnorm.layers.proxy_norm import ProxyNorm
from tests.layers.steps import refusals
from tests.peers import installed
from tests.toys import Of
from tools.homes import SMALL

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


class Net(Of):
    "A convolution, a batch norm, and what a function does with them."

    def __init__(self, run, **parts):
        super().__init__(
            lambda own, x: run(own, own.norm(own.conv(x))),
            conv=nn.Conv2d(3, 8, 3),
            norm=nn.BatchNorm2d(8),
            **parts,
        )


def twice(net, y):
    return net.act(net.act(y))


@pytest.mark.parametrize(
    "run, module",
    [
        (lambda net, y: F.relu(y), "ReLU()"),
        (lambda net, y: F.relu(y, inplace=True), "ReLU()"),
        (lambda net, y: y.relu(), "ReLU()"),
        (lambda net, y: torch.relu_(y), "ReLU()"),
        (lambda net, y: F.gelu(y, approximate="tanh"), "gelu"),
        (lambda net, y: F.leaky_relu(y, 0.3), "leaky_relu"),
        (lambda net, y: F.elu(alpha=0.5, input=y), "elu"),
        (lambda net, y: torch.pow(0.5, y), "pow"),
        (lambda net, y: y.sigmoid_(), "sigmoid"),
        (lambda net, y: F.selu(y), "selu"),
        (lambda net, y: y.clamp(min=0), "clamp"),
        (lambda net, y: F.softplus(y, beta=2), "softplus"),
        (lambda net, y: net.act(net.other(net.act(y))), "ReLU()"),
        (lambda net, y: F.relu(net.none(y)), "ReLU()"),
    ],
)
def test_functions_and_shared_modules_are_set_apart(run, module):
    """In a block, and in the model itself, which becomes another object; with
    the same names beside the activation's own.
    """
    net = Net(run, act=nn.ReLU(), other=nn.Conv2d(8, 8, 1)).eval()
    net.more = 3
    if "none" in run.__code__.co_names:
        net.none = nn.Identity()
    if module != "ReLU()" or "act" not in run.__code__.co_names:
        del net.act, net.other
    x, words = torch.randn(2, 3, 5, 5), "take it from inplace=False"
    with pytest.raises(ValueError, match=words):
        to_proxy_norm(net, groups=4)
    apart = proxy_conversion._set_apart(net)
    assert torch.equal(apart(x), net(x)) and apart.more == 3
    assert not apart.training and not net.training
    assert apart.state_dict().keys() == net.state_dict().keys()
    for copied in (copy.deepcopy(apart), apart):
        assert torch.equal(copied(x), net(x))
    whole = to_proxy_norm(net, groups=4, inplace=False)
    inside = nn.Sequential(net)
    to_proxy_norm(inside, groups=4)
    for model in (whole, inside[0]):
        (proxy,) = of_kind(model, ProxyNorm)
        assert module in str(proxy.activation) + str(named(proxy))
        assert not of_kind(model, BATCH)
        expected = proxy(model.norm(model.conv(x)))
        found = model(x)
        if hasattr(net, "act"):
            expected = model.act_1(model.other(expected))
        torch.testing.assert_close(found, expected)
    assert type(net) is Net and isinstance(net.norm, nn.BatchNorm2d)


def named(proxy):
    return {"relu": "ReLU()"}.get(proxy.activation)


@pytest.mark.parametrize(
    "net, words",
    [
        (Net(lambda net, y: y * torch.sigmoid(y)), "the function sigmoid"),
        (
            Net(lambda net, y: F.dropout(F.relu(y), training=net.training)),
            "other things in training than in evaluation",
        ),
        (
            Net(lambda net, y: F.relu(y), unused=nn.Linear(2, 2)),
            "parts that its forward does not call",
        ),
        (Net(twice, act=nn.PReLU()), "several places, and act has parameters"),
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
        (
            Net(lambda net, y: net.act(y) if y.sum() > 0 else y, act=nn.ReLU()),
            "calls it, Net: TraceError",
        ),
    ],
)
def test_what_is_left_and_named(net, words):
    if not words.startswith("it follows"):
        with pytest.raises(ValueError, match=f"would stay(?s:.*){words}"):
            to_proxy_norm(net, groups=4, inplace=False)
    with pytest.warns(UserWarning, match=words):
        net = to_proxy_norm(net, groups=4, partial=True, inplace=False)
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


@pytest.mark.parametrize("act", [nn.ReLU, lambda: F.relu])
def test_an_activation_of_several_places(act):
    """As in torchvision's ResNet-18: each block gets one for each place, and is
    what it was where another block is an error. One of several is copied.
    """
    one = act()
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        *map(Block, (one, one)),
    )
    blocks, x = list(model[3:]), torch.randn(2, 3, 5, 5)
    more = nn.Sequential(model, Net(twice, act=nn.PReLU()))
    with pytest.raises(ValueError, match="and act has parameters"):
        to_proxy_norm(more, groups=4)
    assert list(model[3:]) == blocks and len(of_kind(model, BATCH)) == 5
    _, report = to_proxy_norm(model, groups=4, return_report=True)
    assert not of_kind(model, BATCH) and len(of_kind(model, ProxyNorm)) == 3
    assert {row.reason for row in report.left} == {
        "it follows add, no normalizer: PN needs one right before it"
    }
    y = model[:3](x)
    for block, old in zip(model[3:], blocks, strict=True):
        first = block.act if act is nn.ReLU else block.relu
        z = block.bn2(block.conv2(first(block.bn1(block.conv1(y)))))
        torch.testing.assert_close(block(y), F.relu(z + y))
        assert block.conv1 is old.conv1
        y = block(y)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(x), y)


def test_nothing_else_is_set_apart():
    """A convolution that is called twice is one; a function that follows no
    batch norm stays, and so does the block of a norm that is to be left.
    """

    def run(net, y):
        y = net.act(net.more(net.act(y)))
        return F.relu(net.more(y))

    made = lambda: Net(run, act=nn.ReLU(), more=nn.Conv2d(8, 8, 1))
    model, skipped = nn.Sequential(made()), nn.Sequential(made())
    to_proxy_norm(model, groups=4, return_report=True)
    assert [name for name, _ in model[0].named_children()] == [
        "conv",
        "norm",
        "act",
        "more",
        "act_1",
    ]
    to_proxy_norm(skipped, groups=4, skip="0.norm", return_report=True)
    assert type(skipped[0]) is Net


class Watched(nn.Module):
    "A forward that torch.fx cannot read, around blocks that it can."

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.block = Block(nn.ReLU())
        self.norms = nn.ModuleList([nn.BatchNorm2d(8)])
        self.conv = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))

    def forward(self, x):
        y = self.block(self.stem(x))
        return self.conv(self.norms[0](y) if y.sum() > 0 else y)


def test_the_parts_that_can_be_read():
    model = Watched()
    with pytest.raises(ValueError) as refused:
        to_proxy_norm(model, groups=4)
    assert [line for line in str(refused.value).splitlines()[1:3]] == [
        "  norms.0 (BatchNorm2d): torch.fx cannot read what calls it, Watched: "
        "TraceError: symbolically traced variables cannot be used as inputs "
        "to control flow",
        "  conv.1 (BatchNorm2d): what follows it is outside of Sequential, of "
        "which torch.fx cannot read the whole",
    ]
    to_proxy_norm(model, groups=4, skip=["norms", "conv"], return_report=True)
    assert model.norms[0].num_batches_tracked == 0  # none was run
    assert len(of_kind(model, BATCH)) == 2
    assert len(of_kind(model, ProxyNorm)) == 2
    model(torch.randn(2, 3, 5, 5))


def test_transformers():
    "A convolutional network is read in parts; others have no batch norm."
    t = installed("transformers")
    config = t.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=3,
    )
    model, x = t.ResNetForImageClassification(config), torch.randn(2, 3, 32, 32)
    to_proxy_norm(model, groups=4, return_report=True)
    assert not of_kind(model, BATCH) and len(of_kind(model, ProxyNorm)) == 3
    with torch.no_grad():
        both, first = model(x).logits, model(x[:1]).logits
    torch.testing.assert_close(both[:1], first, rtol=1e-3, atol=1e-4)
    bert = t.BertConfig(**SMALL, vocab_size=50)
    with pytest.warns(UserWarning, match="the model has no batch norm"):
        to_proxy_norm(t.BertModel(bert))


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


def test_what_does_nothing_in_evaluation_is_no_activation():
    "Stochastic depth that drops so rarely that it looks like a factor."
    scaled = Of(lambda own, x: 1.1 * x if own.training else x)
    net = Net(lambda net, y: net.act(net.drop(y)), act=nn.ReLU(), drop=scaled)
    _, report = to_proxy_norm(net, groups=4, return_report=True)
    assert [row.after for row in report.replaced] == ["GroupNorm(4), γ only"]


def test_functions_are_tried_without_data_too():
    with torch.device("meta"):
        net = Net(lambda net, y: F.selu(y))
        net = to_proxy_norm(net, groups=4, inplace=False)
    assert isinstance(net.selu, ProxyNorm)


test_what_is_refused = refusals(
    [
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


def test_a_group_norm_has_the_epsilon_of_the_batch_norm():
    "In a proxy norm that is fused with it, and where no activation follows."
    norm = nn.BatchNorm2d(8, 0.5)
    net = nn.Sequential(norm, nn.ReLU(), copy.deepcopy(norm))
    apart, fused = (
        to_proxy_norm(net, groups=4, inplace=False, fused=joint)
        for joint in (False, True)
    )
    assert apart[0].eps == apart[2].eps == fused[1].norm_eps == 0.5
    x = torch.randn(2, 8, 3, 5)
    torch.testing.assert_close(fused(x), apart(x), rtol=1e-4, atol=1e-4)


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
