"""The networks beyond their chapters: every name on the meta device, every kind
in small, the same weights for every normalizer.
"""

import copy
import itertools
import sys

import pytest
import torch
from torch import nn

from normalnorm.analysis.gaussianity import normalizers, pre_affine
from normalnorm.experiments import models
from normalnorm.experiments.networks import (
    efficient,
    residual,
    simple,
    transformer,
)
from normalnorm.layers.normality import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    LayerNormalNorm,
)
from tests.refusals import refusals
from tests.toys import Of

# One network of each kind, small: name, arguments, shape of a batch.
SMALL = {
    "resnet18": ({"widths": [4, 4, 8, 8], "classes": 7}, (3, 3, 33, 35)),
    "resnet50_v2": ({"widths": [4, 4, 8, 8], "classes": 7}, (3, 3, 33, 35)),
    "resnext50": (
        {"widths": [16] * 4, "classes": 7, "blocks": [1] * 4},
        (3, 3, 33, 35),
    ),
    "cifar_resnet20": ({"widths": [3, 5, 7]}, (3, 3, 17, 13)),
    "cifar_resnet20_v2": ({"widths": [3, 5, 7]}, (3, 3, 17, 13)),
    "wrn28-2": ({"widths": [4, 6, 8]}, (3, 3, 17, 13)),
    "wrn28-2_skipless": ({"widths": [4, 6, 8]}, (3, 3, 17, 13)),
    "efficientnet_b0": (
        {"width": 0.25, "depth": 0.4, "classes": 7, "dropout": 0.0},
        (3, 3, 33, 35),
    ),
    "efficientnet_b0_grouped": (
        {"width": 0.5, "depth": 0.4, "classes": 7, "dropout": 0.0},
        (3, 3, 33, 35),
    ),
    "resnet9": ({"width": 3}, (3, 3, 17, 13)),
    "vit": (
        {"width": 24, "depth": 2, "hidden": 7, "image": 12},
        (3, 3, 12, 12),
    ),
    "mlp": ({"widths": [5, 7], "inputs": 42}, (3, 2, 7, 3)),
    "gpt": (
        {"vocabulary": 11, "width": 12, "depth": 2, "heads": 3, "length": 9},
        (3, 7),
    ),
    "rnn": ({"vocabulary": 11, "width": 6, "depth": 2}, (3, 7)),
    "SmallResNet": ({"width": 5}, (3, 1, 28, 28)),
    "SmallViT": (
        {"width": 12, "depth": 2, "heads": 3, "hidden": 7},
        (3, 1, 28, 28),
    ),
}
CONVOLUTIONAL = [
    name
    for name, (_, shape) in SMALL.items()
    if len(shape) == 4 and models.architecture(name).norm is nn.BatchNorm2d
]
NORMALITY = {
    nn.BatchNorm1d: BatchNormalNorm1d,
    nn.BatchNorm2d: BatchNormalNorm2d,
    nn.LayerNorm: LayerNormalNorm,
}


def small(name, seed=0, **arguments):
    torch.manual_seed(seed)
    return models.build(name, **{**SMALL[name][0], **arguments})


def batch(name):
    shape = SMALL[name][1]
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(11, shape, generator=generator)
        if len(shape) == 2
        else torch.randn(shape, generator=generator)
    )


class Probe(nn.Module):
    """Stands for a normalizer; notes with which size it was made, and what it
    is given.
    """

    def __init__(self, size):
        super().__init__()
        self.size, self.shapes = size, []

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        return x


# Sides of what the normalizers see, in their order, without repetitions, for
# images of the side that stands first. He et al. 2016, Table 1 and §4.2; Xie et
# al. 2017, Table 1; Zagoruyko & Komodakis 2016, Table 1; Tan & Le 2019, Table 1
# (B0; B2 has the side of its publication, 260, and the same strides: halved
# five times, rounded up).
RESOLUTIONS = {
    **dict.fromkeys(
        [
            "resnet18",
            "resnet34",
            "resnet50",
            "resnet101",
            "resnext50",
            "resnext101",
        ],
        [224, 112, 56, 28, 14, 7],
    ),
    **dict.fromkeys(
        [
            "resnet18_v2",
            "resnet34_v2",
            "resnet50_v2",
            "resnet101_v2",
            "resnext50_v2",
            "resnext101_v2",
        ],
        [224, 56, 28, 14, 7],
    ),
    **dict.fromkeys(
        [
            f"cifar_resnet{depth}{order}"
            for depth in (18, 34, 50, 101)
            for order in ("", "_v2")
        ],
        [32, 32, 16, 8, 4],
    ),
    **dict.fromkeys(
        [
            f"cifar_resnet{depth}{order}"
            for depth in (20, 32, 44, 56, 110)
            for order in ("", "_v2")
        ],
        [32, 32, 16, 8],
    ),
    **dict.fromkeys(
        [
            f"wrn{name}{kind}"
            for name in ("28-2", "28-10")
            for kind in ("", "_skipless")
        ],
        [32, 32, 16, 8],
    ),
    **dict.fromkeys(
        ["efficientnet_b0", "efficientnet_b0_grouped"],
        [224, 112, 56, 28, 14, 7],
    ),
    **dict.fromkeys(
        ["efficientnet_b2", "efficientnet_b2_grouped"],
        [260, 130, 65, 33, 17, 9],
    ),
    "resnet9": [32, 32, 16, 8, 4],
    "small_resnet9": [28, 28, 14, 7, 3],
    **dict.fromkeys(
        [
            "small_resnet",
            "small_resnet_v2",
            "small_resnext",
            "small_wrn",
            "small_wrn_skipless",
        ],
        [28, 14, 7, 4],
    ),
    "small_efficientnet": [28, 14, 7, 4],
}
# Positions that attention sees: patches, and one more for the class where there
# is a token. Dosovitskiy et al. 2021: 224/16 = 14, 14² + 1.
POSITIONS = {
    "vit_b16": (224, 197),
    "vit": (32, 65),
    "small_vit": (28, 49),
    "gpt2": (1024, 1024),
    "gpt": (128, 128),
    "rnn": (128, 128),
    "mlp": (28, None),
    "small_mlp": (28, None),
    "mlp20": (28, None),
}


@pytest.mark.parametrize("name", models.model_names())
def test_every_name_builds_and_runs_at_the_published_sizes(name):
    """Sizes of inputs, and strides, which numbers of parameters do not see.
    (These numbers: the chapter.)
    """
    entry = models.architecture(name)
    text = len(entry.inputs) == 1
    with torch.device("meta"):
        plain, probed = models.build(name), models.build(name, norm=Probe)
        kind = torch.int64 if text else torch.float32
        scores = probed(torch.zeros(2, *entry.inputs, dtype=kind))
    classes = plain.classifier.out_features
    assert scores.shape == (2, *(entry.inputs if text else ()), classes)
    probes = [m for m in probed.modules() if isinstance(m, Probe)]
    channels = -1 if entry.norm is nn.LayerNorm else 1
    for probe in probes:
        assert {shape[channels] for shape in probe.shapes} == {probe.size}
    assert [p.size for p in probes] == [
        m.num_features if hasattr(m, "num_features") else m.normalized_shape[0]
        for m in plain.modules()
        if isinstance(m, entry.norm)
    ]
    for block in plain.modules():
        if isinstance(block, residual.Block):
            assert block.preactivation == ("_v2" in name or "wrn" in name)
            assert (block.shortcut is None) == ("skipless" in name)
    shapes = [shape for probe in probes for shape in probe.shapes]
    if name in POSITIONS:
        size, positions = POSITIONS[name]
        assert entry.inputs[-1] == size
        seen = {shape[1] for shape in shapes}
        assert positions is None or seen <= {positions, 1}
        assert positions in seen or name == "rnn" or positions is None
    else:
        _, height, width = entry.inputs
        sides = dict.fromkeys(shape[2] for shape in shapes)
        assert [width, *sides] == RESOLUTIONS[name]
        assert height == width
        assert all(shape[2] == shape[3] for shape in shapes)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_forward_backward_and_state_round_trip(name, ours):
    x, norm = batch(name), models.architecture(name).norm
    norm = NORMALITY[norm] if ours else norm
    model, other = (small(name, seed, norm=norm) for seed in (0, 9))
    # the authors' vision transformer begins with zeros here, and without
    # gradients
    nn.init.normal_(model.classifier.weight, std=0.1)
    model.train()(x).square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g.isfinite().all() for g in gradients)
    assert sum(bool(g.any()) for g in gradients) > 0.8 * len(gradients)
    other.load_state_dict(model.state_dict())
    for copied in (other, copy.deepcopy(model)):
        assert torch.equal(copied.eval()(x), model.eval()(x))


@pytest.mark.parametrize("name", ["SmallResNet", "wrn28-2_skipless", "gpt"])
def test_compiles_as_one_graph(name):
    model, x = small(name).eval(), batch(name)
    torch.compiler.reset()
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend="eager")(x), model(x)
    )


@pytest.mark.parametrize("name", SMALL)
def test_no_parameter_is_shared_by_accident(name):
    model = small(name)
    places = [key for key, _ in model.named_parameters(remove_duplicate=False)]
    assert len(places) - len(list(model.parameters())) == (name == "gpt")
    assert len({id(m) for m in model.modules()}) == len(
        [key for key, _ in model.named_modules(remove_duplicate=False)]
    )


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_channels_last_is_kept_and_changes_nothing(name):
    def look(module, args, output):
        assert output.is_contiguous(memory_format=torch.channels_last)

    model, x = small(name).double().eval(), batch(name).double()
    expected = model(x)
    model.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(look)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_a_joint_part_takes_the_place_of_normalizer_and_activation(name):
    "How often: the chapters of the families."

    joint = lambda channels: Of(
        lambda own, x: own.act(own.norm(x)),
        norm=nn.BatchNorm2d(channels),
        act=nn.SiLU(),
    )
    x = batch(name).double()
    parts = {"activation": nn.SiLU, "norm": nn.BatchNorm2d}
    apart = small(name, **parts).double()
    together = small(name, joint=joint, **parts).double()
    torch.testing.assert_close(apart(x), together(x))
    assert any(isinstance(m, Of) for m in together.modules())
    assert len(normalizers(apart)) == len(normalizers(together))


@pytest.mark.parametrize(
    "name", [name for name in CONVOLUTIONAL if "efficient" not in name]
)
def test_convolutions_are_made_by_the_part(name):
    class Mine(nn.Conv2d):
        pass

    kinds = {
        key: isinstance(m, Mine)
        for key, m in small(name, conv=Mine).named_modules()
        if isinstance(m, nn.Conv2d)
    }
    assert all(kinds.values()) and len(kinds) > 5


class Centred(nn.Linear):
    "A linear map as PreLayerNorm has it is a subclass, too."


@pytest.mark.parametrize(
    "name, maps",
    [("vit", 8), ("gpt", 8), ("rnn", 4), ("mlp", 2), ("SmallViT", 8)],
)
def test_linear_maps_are_made_by_the_part(name, maps):
    """All but the classifier, with the weights that the seed gives. (That the
    part is at work: the chapter of transformers.)
    """
    plain, model = small(name), small(name, linear=Centred)
    kinds = {
        key: isinstance(m, Centred)
        for key, m in model.named_modules()
        if isinstance(m, nn.Linear)
    }
    assert [key for key, mine in kinds.items() if not mine] == ["classifier"]
    assert sum(kinds.values()) == maps
    torch.testing.assert_close(
        model.state_dict(), plain.state_dict(), rtol=0, atol=0
    )
    with pytest.raises(TypeError, match="subclass of it.*made a Sequential"):
        small(name, linear=lambda *a, **o: nn.Sequential(nn.Linear(*a, **o)))


# ---- residual networks ----


def test_names_of_normalizers_are_those_in_committed_rows():
    "Their initial weights: tools/records.py, by the first steps of each row."
    assert list(normalizers(models.SmallResNet())) == [
        "stem_norm",
        "stages.0.norm1",
        "stages.0.norm2",
        "stages.1.norm1",
        "stages.1.norm2",
        "stages.1.shortcut.1",
        "stages.2.norm1",
        "stages.2.norm2",
        "stages.2.shortcut.1",
    ]


def test_laws_of_the_weights():
    model = residual.ResNet(
        [1], [96], bottleneck=True, groups=4, group_width=16
    )
    kernel = model.stages[0].conv2.weight
    assert kernel.shape == (96, 24, 3, 3)
    assert abs(kernel.std().item() / (2 / (96 * 9)) ** 0.5 - 1) < 0.03
    residual.fan_in_truncated(model, gain=2.0)
    assert (
        abs(kernel.std().item() / (2 / (24 * 9)) ** 0.5 - 1) < 0.03
        and kernel.abs().max() / (2 / (24 * 9)) ** 0.5 < 2 / 0.8796 + 1e-3
    )
    torch.manual_seed(0)
    gpt = transformer.LanguageModel(50, 20, 64, 8, 4)
    assert (
        abs(gpt.blocks[3].attention.qkv.weight.std().item() / 0.02 - 1) < 0.03
        and abs(gpt.blocks[3].mlp[2].weight.std().item() / (0.02 / 4) - 1)
        < 0.03
    )
    assert abs(gpt.position.std().item() / 0.02 - 1) < 0.1 and not any(
        p.any() for key, p in gpt.named_parameters() if key.endswith("bias")
    )


def test_a_large_stem_without_its_pool():
    "The others: RESOLUTIONS."
    model = residual.ResNet([1], [4], stem="large", stem_pool=False)
    seen = []
    model.stages[0].register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[2:])
    )
    model(torch.randn(2, 3, 16, 32))
    assert seen == [(8, 16)]


def test_an_efficientnet_gets_its_options_and_draws_by_groups():
    "Its sizes and strides: RESOLUTIONS; its parameters: the chapter."
    model = small("efficientnet_b0_grouped", dropout=0.4)
    assert model.drop_rate == 0.4
    conv = model.blocks[5][0].conv_dw
    assert conv.groups == conv.in_channels / 16
    assert abs(conv.weight.std().item() / (2 / (16 * 25)) ** 0.5 - 1) < 0.03


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_stochastic_depth_grows_and_instruments_switch_it_off(name):
    "What it does to a block: the chapter."
    model = small(name, drop_path=0.3)
    rates = [m.p for m in model.modules() if isinstance(m, residual.DropPath)]
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.3)
    assert all(a < b for a, b in itertools.pairwise(rates))
    x = torch.randn(6, 3, 33, 35)
    torch.testing.assert_close(
        pre_affine(model, x), pre_affine(model, x), rtol=0, atol=0
    )


# ---- arguments ----


test_wrong_arguments_are_refused_with_a_reason = refusals(
    [
        (lambda: models.SmallViT(patch=5), "multiple of patch=5"),
        (
            lambda: models.SmallResNet(width=0),
            "SmallResNet needs positive sizes",
        ),
        (
            lambda: models.SmallViT()(torch.zeros(1, 1, 32, 32)),
            "made for 49 patches, and the image has 64",
        ),
        (
            lambda: transformer.VisionTransformer(width=8, depth=1, hidden=4)(
                torch.zeros(1, 3, 16, 16)
            ),
            "made for 64 patches, and the image has 16",
        ),
        (lambda: residual.ResNet([1, 1], [4]), "one width a stage"),
        (lambda: residual.ResNet([], []), "one width a stage"),
        (
            lambda: residual.ResNet([1], [4], shortcut="projektion"),
            "did you mean projection",
        ),
        (lambda: residual.ResNet([1], [4], stem="big"), "large"),
        (
            lambda: residual.ResNet([1], [4], shortcut="none", drop_path=0.1),
            "without shortcuts",
        ),
        (lambda: residual.resnet(20), "known are 18"),
        (lambda: residual.cifar_resnet(18), "6n \\+ 2"),
        (lambda: residual.wide_resnet(27, 2), "6n \\+ 4"),
        (lambda: residual.wide_resnet(26, 2), "give 2 more"),
        (lambda: residual.resnext(18), "50, 101 or 152"),
        (lambda: efficient.efficientnet(width=0), "positive sizes"),
        (lambda: efficient.efficientnet(group_size=7), "group_size=7 must"),
        (
            lambda: transformer.LanguageModel(width=10, heads=4),
            "width=10 a multiple of heads=4",
        ),
        (
            lambda: transformer.LanguageModel(9, 4, 8, 1, 2)(
                torch.zeros(1, 5, dtype=torch.int64)
            ),
            "at most 4 positions, and the input has 5",
        ),
        (lambda: simple.MLP(widths=[0]), "positive sizes"),
        (lambda: simple.ResNet9(width=0), "positive sizes"),
        (lambda: simple.RecurrentNet(depth=0), "positive sizes"),
        (lambda: models.build("resnet_18"), "did you mean resnet18"),
        (lambda: models.build("resnet18", colour=3), TypeError, "colour"),
        (
            lambda: models.cost("nothing-like-it"),
            "no model is called 'nothing-like-it'",
        ),
    ]
)


def test_without_timm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[timm\]"'):
        models.build("small_efficientnet")


def test_arguments_replace_those_of_the_list_and_leave_it_as_it_is():
    before = copy.deepcopy(models.architecture("small_resnext").arguments)
    assert models.build("cifar_resnet20", classes=3, channels=1)(
        torch.zeros(2, 1, 8, 8)
    ).shape == (2, 3)
    assert (
        models.build("small_resnext", classes=3).classifier.out_features
        == models.build(
            "cifar_resnet18", classes=3, widths=[2] * 4
        ).classifier.out_features
        == 3
    )
    assert models.architecture(
        "small_resnext"
    ).arguments == before and models.model_names() == sorted(
        models.model_names()
    )
    assert (
        isinstance(models.build("SmallResNet"), models.SmallResNet)
        and "SmallResNet" not in models.model_names()
    )


def test_cost_computes_nothing_and_draws_nothing():
    assert models.macs(nn.Linear(3, 5), torch.zeros(2, 3)) == 30
    state = torch.get_rng_state()
    found = models.cost(
        "resnet18",
        (3, 64, 32),
        classes=10,
        norm=lambda channels: nn.GroupNorm(2, channels),
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert found.parameters == 11_689_512 - 513 * 990
    with torch.device("meta"):
        model = models.build("resnet18", classes=10)
        assert models.macs(model, torch.zeros(3, 3, 64, 32)) == 3 * found.macs
