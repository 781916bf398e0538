"""Around a converted model: running averages, freezing, weight decay, folding,
factories, export; against hand computations, torch, timm, transformers and
onnxruntime.
"""

import contextlib
import copy
import pickle
import re
from functools import partial

import pytest
import torch
from torch import nn

import normalnorm
from normalnorm.layers.backends import set_backend
from normalnorm.layers.conversion import to_normality
from normalnorm.layers.factory import norm_layer
from normalnorm.layers.folding import FoldedNormality, fold
from normalnorm.layers.running_averages import freeze, unfreeze, update_bn
from normalnorm.layers.weight_decay import (
    groups_by_type,
    no_weight_decay,
    normalizer_types,
)
from normalnorm.theory.gaussianizers import Chain
from tests.layers.steps import refusals
from tests.layers.test_conversion import Act
from tests.peers import FOLLOWS, installed, onnx_of
from tools.rows import trials


def net(second=nn.BatchNorm2d, **options):
    torch.manual_seed(0)
    return to_normality(
        nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 3, 2),
            second(3),
            nn.Flatten(),
            nn.Linear(27, 5),
            nn.LayerNorm(5),
        ),
        **options,
    )


def seen(model, shape=(9, 2, 6, 6), batches=3):
    """The model in evaluation, after some batches, with parameters that are not
    those of a fresh one.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.rand_like(parameter))
        for _ in range(batches):
            model(
                torch.randn(shape, dtype=next(model.parameters()).dtype).exp()
            )
    return model.eval()


# --- running averages


def test_update_bn_puts_modes_and_settings_back_also_after_an_error():
    model = net()
    model[1].eval()
    held = lambda: [
        (m.training, getattr(m, "momentum", 0), getattr(m, "noise", 0))
        for m in model.modules()
    ]
    before, batch = held(), torch.randn(4, 2, 6, 6)
    for batches in ([batch], [batch, torch.randn(4, 3, 6, 6)]):
        with contextlib.suppress(RuntimeError):
            update_bn(batches, model, "cpu", noise=False)
        assert held() == before
    mean = model[1].running_mean.clone()
    with pytest.raises(ValueError, match="empty"):
        update_bn([], model)
    assert torch.equal(model[1].running_mean, mean)
    update_bn(iter([torch.randn(2, 3)]), nn.Linear(3, 2))  # nothing to do


# --- freezing


def test_frozen_layers_stand_still_through_training():
    model = seen(net(normalnorm.DecorrelatedBatchNorm2d)).train()
    model[4].weight.requires_grad_(False)
    assert freeze(model, parameters=True) == ["1", "4"]
    state = copy.deepcopy(model.state_dict())
    for other in (
        model,
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
    ):
        other.eval()
        other.train()
        still = [i for i, m in enumerate(other) if not m.training]
        assert still == [1, 4]
        other(torch.randn(5, 2, 6, 6)).sum().backward()
        update_bn([torch.randn(5, 2, 6, 6)], other)
        torch.testing.assert_close(other.state_dict(), state, rtol=0, atol=0)
        assert other[1].weight.grad is None and other[0].weight.grad is not None
        assert not other[1].training
    assert copy.deepcopy(model)[1].train.args[0] is not model[1]
    assert unfreeze(model) == ["1", "4"] and unfreeze(model) == []
    # that one was somebody else's
    learned = [model[i].weight.requires_grad for i in (1, 4)]
    assert learned == [True, False] and model[1].training
    model.eval()
    assert not model[1].training


def test_freezing_survives_conversion():
    model = nn.Sequential(
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.LayerNorm(4),
    )
    assert freeze(model) == ["0"]
    to_normality(model).train()
    assert not model[0].training and model[2].training
    assert freeze(model) == ["0"] and unfreeze(model) == ["0"]


# --- weight decay


def test_groups_by_type():
    model = net(normalnorm.DecorrelatedBatchNorm2d)
    model[6].weight.requires_grad_(False)
    tied = nn.Sequential(model, nn.LayerNorm(5))
    tied[1].weight = model[7].weight
    groups = groups_by_type(tied, 0.1)
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert {*map(id, groups[0]["params"])} == {
        id(model[i].weight) for i in (0, 3)
    }
    assert sum(len(g["params"]) for g in groups) == len(
        [p for p in tied.parameters() if p.requires_grad]
    )
    spared = no_weight_decay(tied)
    assert {"0.7.weight", "1.weight", "0.1.weight", "0.4.bias"} <= spared
    assert "0.0.bias" not in spared
    assert len(groups_by_type(tied, 0.1, biases=True)[0]["params"]) == 5
    assert [len(g["params"]) for g in groups_by_type(nn.LayerNorm(3))] == [2]
    with pytest.raises(ValueError, match="negative"):
        groups_by_type(tied, -0.1)


def of(shape, *layers):
    return (lambda: [make() for make in layers]), shape


IMAGES = (5, 3, 7, 6)


def test_weight_decay_with_timm():
    groups = installed("timm.optim").param_groups_weight_decay
    # a normalizer with two axes: timm's rule of one axis misses it
    model = nn.Sequential(nn.Linear(3, 4), normalnorm.LayerNormalNorm((2, 4)))
    missed = groups(model, 0.1)
    assert any(p is model[1].weight for p in missed[1]["params"])
    found = groups(model, 0.1, no_weight_decay_list=no_weight_decay(model))
    assert [id(p) for p in found[1]["params"]] == [
        id(model[0].weight)
    ] and found[1]["weight_decay"] == 0.1


def test_weight_decay_with_transformers():
    t = installed("transformers")
    names = installed("transformers.trainer_pt_utils").get_parameter_names
    model = t.GPT2Model(
        t.GPT2Config(
            vocab_size=50,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=16,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    patterns = [
        r"bias",
        r"layernorm",
        r"rmsnorm",
        r"(?:^|\.)norm(?:$|\.)",
        r"_norm(?:$|\.)",
    ]
    expected = names(model, [nn.LayerNorm], patterns)
    to_normality(model)
    # what the trainer would decay
    assert set(names(model, [nn.LayerNorm], patterns)) - set(expected) == {
        n for n in no_weight_decay(model) if n.endswith("weight")
    }
    assert names(model, normalizer_types(), patterns) == expected


# --- folding

CASES = {
    "conv2d": of(
        IMAGES,
        partial(nn.Conv2d, 3, 4, 3, stride=2, padding=1),
        partial(nn.BatchNorm2d, 4),
    ),
    "no bias": of(
        IMAGES,
        partial(nn.Conv2d, 3, 4, 3, bias=False),
        partial(nn.BatchNorm2d, 4),
    ),
    "groups": of(
        (5, 4, 7, 6),
        partial(nn.Conv2d, 4, 6, 3, groups=2),
        partial(nn.BatchNorm2d, 6),
    ),
    "depthwise": of(
        (5, 4, 7, 6),
        partial(nn.Conv2d, 4, 4, 3, groups=4),
        partial(nn.BatchNorm2d, 4, affine=False),
    ),
    "conv1d": of(
        (5, 3, 9),
        partial(nn.Conv1d, 3, 4, 3, dilation=2),
        partial(nn.BatchNorm1d, 4),
    ),
    "conv3d": of(
        (5, 2, 3, 4, 5),
        partial(nn.Conv3d, 2, 4, 2),
        partial(nn.BatchNorm3d, 4),
    ),
    "linear": of((9, 3), partial(nn.Linear, 3, 4), partial(nn.BatchNorm1d, 4)),
    "sync": of(
        IMAGES, partial(nn.Conv2d, 3, 4, 3), partial(nn.SyncBatchNorm, 4)
    ),
    "whitened": of(
        IMAGES,
        partial(nn.Conv2d, 3, 6, 3),
        partial(normalnorm.DecorrelatedBatchNorm2d, 6, group_size=4),
    ),
    "whitened by products": of(
        IMAGES,
        partial(nn.Conv2d, 3, 6, 3, bias=False),
        partial(normalnorm.DecorrelatedBatchNorm2d, 6, method="newton_schulz"),
    ),
    "whitened by two products": of(
        IMAGES,
        partial(nn.Conv2d, 3, 6, 3),
        partial(
            normalnorm.DecorrelatedBatchNorm2d,
            6,
            group_size=4,
            method="newton_schulz",
            iterations=2,
        ),
    ),
    "whitened in the convolution's groups": of(
        IMAGES,
        partial(nn.Conv2d, 3, 6, 3, groups=3),
        partial(normalnorm.DecorrelatedBatchNorm2d, 6, group_size=2),
    ),
    "whitened by several processes": of(
        IMAGES,
        partial(nn.Conv2d, 3, 6, 3),
        partial(normalnorm.SyncDecorrelatedBatchNorm, 6, affine=False),
    ),
    "whitened features": of(
        IMAGES,
        nn.Flatten,
        partial(nn.Linear, 126, 5),
        partial(normalnorm.DecorrelatedBatchNorm1d, 5, group_size=2),
    ),
    "whitened sequences": of(
        IMAGES,
        partial(nn.Flatten, 2),
        partial(nn.Conv1d, 3, 5, 4),
        partial(normalnorm.DecorrelatedBatchNorm1d, 5, affine=False),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gaussian", [True, False])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 4e-6)]
)
def test_folded_is_equal(case, gaussian, dtype, tolerance):
    make, shape = CASES[case]
    model = nn.Sequential(*make()).to(dtype)
    model = seen(
        to_normality(model, noise=0.0) if gaussian else model, (9, *shape[1:])
    )
    u, kept = torch.randn(shape, dtype=dtype).exp(), repr(model)
    folded, report = fold(model, return_report=True)
    assert len(report.replaced) == 1 and not report.left
    assert isinstance(folded[-1], FoldedNormality) and repr(model) == kept
    assert (folded[-1].lmbda is not None) == gaussian
    assert not any(p.requires_grad for p in folded[-2].parameters())
    expected = model(u).detach()
    tolerance *= expected.abs().max().item()
    torch.testing.assert_close(folded(u), expected, rtol=0, atol=tolerance)
    assert torch.equal(pickle.loads(pickle.dumps(folded))(u), folded(u))
    without = fold(model, tolerance=float("inf"))[-1]
    assert without.lmbda is without.weight is None


class Halved(normalnorm.BatchNormalNorm2d):
    def forward(self, x):
        return super().forward(x) / 2


def hooked(at, kind="forward_hook"):
    return lambda model: getattr(model[at], f"register_{kind}")(lambda *_: None)


CONV, NORM = (
    partial(nn.Conv2d, 3, 3, 1),
    partial(normalnorm.BatchNormalNorm2d, 3),
)


@pytest.mark.parametrize(
    "first, second, change, words",
    [
        (CONV, NORM, hooked(0), "hooks"),
        (CONV, NORM, hooked(1, "forward_pre_hook"), "hooks"),
        (
            CONV,
            partial(NORM, track_running_stats=False),
            None,
            "statistics of the batch",
        ),
        (CONV, NORM, lambda m: m[1].train(), "statistics of the batch"),
        (CONV, partial(nn.InstanceNorm2d, 3), None, ""),
        (partial(nn.ConvTranspose2d, 3, 3, 1), NORM, None, "directly before"),
        (
            lambda: nn.utils.parametrizations.weight_norm(CONV()),
            NORM,
            None,
            "directly before",
        ),
        (CONV, partial(Halved, 3), None, "forward is not known"),
        (CONV, partial(NORM, gaussianizer=Chain()), None, "no affine map"),
        (
            partial(nn.Conv2d, 3, 6, 1, groups=3),
            partial(normalnorm.DecorrelatedBatchNorm2d, 6, group_size=4),
            None,
            r"keeps apart \(groups=3\)",
        ),
    ],
)
def test_what_cannot_be_folded_says_why(first, second, change, words):
    model = seen(nn.Sequential(first(), second()), (5, 3, 4, 4))
    (change or (lambda model: None))(model)
    folded, report = fold(model, return_report=True)
    assert not any(isinstance(m, FoldedNormality) for m in folded.modules())
    assert re.search(words, " ".join(r.reason for r in report.left))
    assert bool(report.left) == bool(words)


class Forked(nn.Module):
    """The first convolution's result is also used elsewhere; the second one is
    used twice, and so is the map alone that follows; the others would be fine.
    """

    def __init__(self, untraceable=False):
        super().__init__()
        made = lambda: nn.Sequential(
            nn.Conv2d(2, 2, 1), normalnorm.BatchNormalNorm2d(2)
        )
        self.a, self.norm_a = made()
        self.b, self.norm_b = made()
        self.c, self.norm_c = made()
        self.d, self.norm_d = made()
        self.tail = made().append(nn.ReLU())
        self.never = normalnorm.BatchNormalNorm2d(2)
        self.untraceable = untraceable

    def forward(self, x):
        if self.untraceable and x.sum() > 1e9:
            return x
        u = self.a(x)
        v = self.norm_a(u) + u
        v = self.norm_b(self.b(self.norm_b(self.b(v))))
        return self.tail(self.norm_d(self.d(self.norm_c(self.c(self.c(v))))))


@pytest.mark.parametrize(
    "untraceable, replaced", [(True, ["tail.1"]), (False, ["norm_d", "tail.1"])]
)
def test_only_pairs_that_belong_together_are_folded(untraceable, replaced):
    model = seen(Forked(untraceable).double(), (5, 2, 4, 4))
    u = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    folded, report = fold(model, return_report=True)
    assert [r.name for r in report.replaced] == replaced
    torch.testing.assert_close(folded(u), model(u), rtol=1e-9, atol=1e-9)
    if not untraceable:
        assert {r.name: r.reason.split(", too")[0] for r in report.left} == {
            "norm_a": "the result of a is used elsewhere",
            "norm_b": "it, or the map before it, is called several times",
            "norm_c": "it, or the map before it, is called several times",
            "never": "there is no convolution or linear map directly before it",
        }


def dense():
    norm = normalnorm.BatchNormalNorm1d(4)
    return nn.Sequential(nn.Linear(3, 4), norm).eval()


def test_fused_layers_fold_and_keep_their_activation():
    model = seen(
        to_normality(nn.Sequential(nn.Conv2d(3, 4, 3), Act(4)).double()),
        (5, 3, 6, 6),
    )
    u = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    folded = fold(model)
    assert isinstance(folded[1], nn.Sequential) and isinstance(
        folded[1][0], FoldedNormality
    )
    torch.testing.assert_close(folded(u), model(u), rtol=1e-10, atol=1e-10)


test_folding_says_what_is_wrong = refusals(
    [
        (lambda: fold(net()), ValueError, "eval"),
        (lambda: fold(net().eval(), tolerance=-1), ValueError, "tolerance"),
        # the batch layer would have taken axis 1, the linear map the last
        (
            lambda: fold(seen(dense(), (9, 3)))(torch.randn(2, 4, 3)),
            ValueError,
            "2 axes",
        ),
    ]
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folded_in_half_precision_rounds_once(dtype):
    rest = fold(seen(nn.Sequential(CONV(), NORM()), (8, 3, 4, 4)))[1]
    u = torch.randn(8, 3, 4, 4).to(dtype)
    assert torch.equal(rest(u), rest(u.float()).to(dtype))


# --- factories


@pytest.mark.parametrize(
    "kind, args, cls, noise",
    [
        ("batch", {}, "BatchNormalNorm2d", 0.4),
        ("batch1", {"noise": 0.6}, "BatchNormalNorm1d", 0.6),
        ("instance3", {}, "InstanceNormalNorm3d", 0.4),
        ("layer", {}, "LayerNormalNorm", 1.0),
        ("layer2", {}, "LayerNormalNorm2d", 1.0),
        ("sync", {}, "SyncBatchNormalNorm", 0.4),
        ("group", {"num_groups": 4}, "GroupNormalNorm", 0.4),
        ("BatchNormalNorm3d", {}, "BatchNormalNorm3d", 0.4),
        (normalnorm.LayerNormalNorm, {"noise": 0.1}, "LayerNormalNorm", 0.1),
        (normalnorm.GroupNormalNorm, {"num_groups": 2}, "GroupNormalNorm", 0.4),
        (
            partial(normalnorm.BatchNormalNorm2d, noise=0.3),
            {"alpha": 0.5},
            "BatchNormalNorm2d",
            0.3,
        ),
        *(
            (kind, {"group_size": 2}, cls, noise)
            for kind, cls, noise in (
                ("decorrelated", "DecorrelatedBatchNormalNorm2d", 0.4),
                ("decorrelated1", "DecorrelatedBatchNormalNorm1d", 0.4),
                ("sync_decorrelated", "SyncDecorrelatedBatchNormalNorm", 0.4),
                (
                    normalnorm.DecorrelatedBatchNorm2d,
                    "DecorrelatedBatchNorm2d",
                    0.0,
                ),
            )
        ),
    ],
)
def test_factories(kind, args, cls, noise):
    make = pickle.loads(pickle.dumps(norm_layer(kind, **args)))
    layer = make(8, eps=1e-3)
    assert type(layer).__name__ == cls and isinstance(make, partial)
    found = {k: getattr(layer, k) for k in args | {"noise": 0, "eps": 0}}
    assert found == args | {"noise": noise, "eps": 1e-3}
    assert getattr(layer.weight, "shape", (8,)) == (8,)
    assert (layer.weight is None) == ("Instance" in cls)


test_factories_say_what_is_wrong = refusals(
    [
        (lambda: norm_layer("bacth"), ValueError, "did you mean batch"),
        (lambda: norm_layer("_group"), ValueError, "group"),
        (lambda: norm_layer(3), TypeError, "not int"),
        (lambda: norm_layer(int), TypeError, "not type"),
        (lambda: norm_layer("group")(8), ValueError, "divisor"),
        (lambda: norm_layer("batch", nois=0.4)(8), TypeError, ""),
    ]
)


def test_factories_in_timm_and_torchvision():
    timm = installed("timm")
    models = installed("torchvision.models")
    u = torch.randn(2, 3, 32, 32)
    for model in (
        models.resnet18(norm_layer=norm_layer("batch", noise=0.2)),
        timm.create_model(
            "resnet18", norm_layer=norm_layer("batch", noise=0.2)
        ),
        models.mobilenet_v3_small(norm_layer=norm_layer("batch", eps=1e-3)),
        timm.create_model(
            "vit_tiny_patch16_224",
            img_size=32,
            norm_layer=norm_layer("layer", eps=1e-6),
        ),
        timm.create_model("convnext_atto", norm_layer=norm_layer("layer2")),
    ):
        assert any(
            type(m).__module__.startswith("normalnorm") for m in model.modules()
        ) and model(u).shape == (2, 1000)
        assert not any(
            isinstance(m, (nn.BatchNorm2d, nn.LayerNorm))
            for m in model.modules()
        )
    # said in the chapter: fused models translate the norm by its name, and have
    # none for ours
    with pytest.raises(AssertionError):
        timm.create_model("efficientnet_b0", norm_layer=norm_layer("batch"))


# --- export

LAYERS = {
    # those of one or three axes, and synchronized ones, evaluate by these
    **{
        t.name: (t.ours, t.shape)
        for t in trials()
        if t.standard and t.kind in ("B C H W", "B L C") and t.name != "sync"
    },
    "safeguard": (
        lambda: normalnorm.LayerNormalNorm(7, safeguard=True),
        (4, 5, 7),
    ),
    "fused": (
        lambda: fold(
            seen(
                nn.Sequential(
                    nn.Conv2d(2, 3, 1),
                    normalnorm.BatchNormalNorm2d(3),
                    nn.Conv2d(3, 4, 1),
                    normalnorm.DecorrelatedBatchNormalNorm2d(4, group_size=3),
                ),
                (4, 2, 5, 7),
            )
        ),
        (4, 2, 5, 7),
    ),
    "network": (net, (4, 2, 6, 6)),
}


@FOLLOWS
@pytest.mark.parametrize("name", ["layer", "fused", "network"])
def test_exported_for_any_batch_size(name):
    make, shape = LAYERS[name]
    model = seen(make(), shape)
    program = torch.export.export(
        model,
        (torch.randn(shape).exp(),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)},),
    )
    for size in (2, 4, 11):
        u = torch.randn(size, *shape[1:]).exp()
        # what is exported; the kernel's rounding is its own
        with set_backend("eager"):
            torch.testing.assert_close(
                program.module()(u), model(u), rtol=1e-6, atol=1e-6
            )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore")
def test_onnx(name):
    "Evaluation within 1e-5, relative to the largest output."
    make, shape = LAYERS[name]
    model, u = seen(make(), shape), torch.randn(shape).exp()
    run = onnx_of(model, u)
    for scale in (1.0, 30.0):
        expected = model(scale * u).detach()
        torch.testing.assert_close(
            run(scale * u),
            expected,
            rtol=0,
            atol=1e-5 * expected.abs().max().item(),
        )


@pytest.mark.filterwarnings("ignore")
def test_onnx_near_a_logarithm():
    "ONNX has no expm1: written as exp(t) − 1 it lost digits at λ near 0 and 2."
    layer, u = normalnorm.BatchNormalNorm1d(4).eval(), torch.randn(50, 4)
    layer.running_lambda.copy_(torch.tensor([3e-4, -1e-4, 1.9997, 2.0001]))
    found = onnx_of(layer, u)(u).double()
    expected = layer.double()(u.double())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
