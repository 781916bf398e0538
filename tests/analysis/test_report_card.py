"""The report card: fifteen layers that are broken in one way each, what is no
layer, layers that nothing is wrong with, and numbers known in closed form.
"""

import gc
import itertools
import json
import math
import time
import weakref

import pytest
import torch
from torch import nn

import normalnorm
from normalnorm import cli
from normalnorm.analysis.report_card import (
    PROPERTIES,
    Card,
    Line,
    asks,
    draw,
    layer_of,
    report_card,
)
from normalnorm.checks.theory.collapse import arc_cosine as kappa
from normalnorm.claims import ledger
from normalnorm.experiments.results import book_results
from normalnorm.layers.prelayer import PreLayerNormConv2d
from normalnorm.theory.correlation_map import correlation_map
from tests.analysis.broken import BROKEN, STRANGE, Whole
from tests.peers import TORCH
from tests.refusals import refusals
from tools.cards import OWN


class Fold(nn.Module):
    def forward(self, x):
        return x.abs()


def line(make, question):
    return report_card(make, only=[question]).lines[question]


def test_a_layer_with_weights_is_the_map_and_an_activation_stands_once():
    """PreLayerNorm takes κ(c) − κ(0) over 1 − κ(0), from one normal value to
    the next; absolute values behind a layer norm have κ of both signs.
    """
    asked = ["map", "squared gradient"]
    pre = report_card(lambda c: PreLayerNormConv2d(c, c, 1), only=asked).lines
    for c, found in pre["map"].value.items():
        expected = (kappa(c) - kappa(0)) / (1 - kappa(0))
        assert abs(found - expected) < 0.04, c
    grown = pre["squared gradient"].value
    for which in ("measured", "predicted"):
        assert abs(grown[which] - math.pi / (math.pi - 1)) < 0.05

    def folded(channels):
        return nn.Sequential(nn.GroupNorm(1, channels), Fold())

    bare = report_card(folded, only=["map"], activation=nn.Identity())
    for c, found in bare.lines["map"].value.items():
        angle = c * math.asin(c) + math.sqrt(1 - c**2)
        assert abs(found - 2 / math.pi * angle) < 0.02, c
    # a ReLU behind absolute values has nothing to do
    assert report_card(folded, only=["map"]).lines == bare.lines
    tanh = report_card(nn.LayerNorm, only=["map"], activation=torch.tanh)
    assert abs(tanh.lines["map"].value[0.0]) < 0.02


@pytest.mark.parametrize(
    "named, at_zero", [("relu", 1 / math.pi), ("tanh", 0.0), ("none", 0.0)]
)
def test_the_command_takes_an_activation(capsys, named, at_zero):
    asked = ["--only", "map", "--activation", named, "--json"]
    assert cli.main(["card", "torch.nn.LayerNorm", *asked]) == 0
    found = json.loads(capsys.readouterr().out)["lines"]["map"]["value"]
    assert abs(found["0.0"] - at_zero) < 0.02
    assert (found["0.5"] > 0.57) == (named == "relu")


def test_the_command_draws(capsys, tmp_path):
    file = tmp_path / "card.svg"
    ask = ["card", "torch.nn.LayerNorm", "--figure", str(file), "--only", "map"]
    assert cli.main(ask) == 2 and not file.exists()
    assert "'cosine of two inputs' is missing" in capsys.readouterr().err
    assert cli.main([*ask, "cosine of two inputs", "power"]) == 0
    assert "torch.nn.LayerNorm" in file.read_text("utf-8")


def test_each_layer_of_a_network_draws_weights_of_its_own():
    drawn = set()

    class Drawn(nn.Conv2d):
        def __init__(self, channels):
            super().__init__(channels, channels, 1)
            drawn.add(self.weight[0, 0].item())

    report_card(Drawn, only=["cosine of two inputs"])
    assert len(drawn) >= 4 * 16


def test_a_card_keeps_no_layer_alive():
    make = lambda channels: nn.LayerNorm(channels)
    alive = weakref.ref(make)
    report_card(make, only=["map", "power"])
    del make
    gc.collect()
    assert alive() is None


def test_every_public_layer_has_a_card():
    made = {type(layer_of(target)(12)) for target in OWN}
    public = (getattr(normalnorm, name) for name in normalnorm._PUBLIC)
    assert {c for c in public if isinstance(c, type)} <= made


def test_cards_agree_with_the_ledger():
    """What the recorded cards of PyTorch's layers measured, and claims about
    the same that hold.
    """
    record = json.loads((book_results() / "cards.json").read_text("utf-8"))
    value = {
        name: {line: v["value"] for line, v in lines.items()}
        for name, lines in record["rows"].items()
    }
    by = {
        "batch": value["torch.nn.BatchNorm2d"],
        "layer": value["torch.nn.GroupNorm(1,C)"],
        "instance": value["torch.nn.InstanceNorm2d"],
        "rms": value["torch.nn.RMSNorm"],
        "pre-layer": value["normalnorm.PreLayerNormConv2d(C,C,1)"],
    }
    near = lambda a, b, by=0.05: abs(a - b) < by
    behind = lambda of: of["cosine of two inputs"]["measured"][-1]
    grows = lambda of: of["squared gradient"]["measured"]
    sees = lambda of, what: of["sees in training"][what]
    agree = {
        "uf-ln": not sees(by["layer"], "samples"),
        "bnu-bn-train-test": by["batch"]["training and test"] > 1e-3
        and by["pre-layer"]["training and test"] < 1e-5,
        "pn-scale-invariance": all(
            "all ×2" in v["blind to"] for v in by.values()
        ),
        "glance-scale": "a sample ×2" in by["rms"]["blind to"]
        and "a channel ×2" in by["batch"]["blind to"],
        "glance-shift": "a sample +30" in by["layer"]["blind to"]
        and not any("+30" in what for what in by["rms"]["blind to"]),
        "uf-sphere": by["layer"]["sphere"] == {"each sample": 1.0},
        "uf-projection-idempotent": by["layer"]["applied twice"] < 1e-4,
        "pn-ln-expressivity": by["layer"]["lost"] == 2,
        "pn-residual-control": near(by["batch"]["residual stream"], 9 / 5, 0.3),
        "pn-collapse-bn": near(behind(by["batch"]), 1 / math.pi),
        "bnu-explosion-theory": near(
            grows(by["batch"]), math.pi / (math.pi - 1)
        ),
        "bnu-fig1a": behind(by["pre-layer"]) < 0.1 < 0.8 < behind(by["layer"]),
        "map-wide": all(
            near(found, correlation_map(float(c), "relu", norm), 0.04)
            for norm, of in by.items()
            if norm not in ("batch", "instance")
            for c, found in of["map"].items()
        ),
    }
    claims = {claim.id: claim for claim in ledger()}
    fails = {"pn-ln-expressivity"}  # and so says the card
    for name, met in agree.items():
        assert met, name
        assert (claims[name].verdict == "fails") == (name in fails), name


@pytest.mark.parametrize("layer", BROKEN, ids=lambda c: c.__name__)
def test_a_broken_layer_gets_its_line(layer):
    "And the layer that it was made of does not."
    line = BROKEN[layer]
    assert line in report_card(layer, only=[line]).faults
    assert not report_card(Whole, only=[line]).faults


@pytest.mark.parametrize("made", STRANGE, ids=lambda c: c.__name__)
def test_what_is_no_layer_is_said(made):
    assert STRANGE[made] in report_card(made, only=["mirror"]).faults


def test_what_is_wrong_and_where():
    found = {
        layer: report_card(layer, only=[line]).lines[line].found
        for layer, line in BROKEN.items()
        if line in ("derivatives", "dtype")
    }
    words = {layer.__name__: said for layer, said in found.items()}
    assert words["ConstantDeviation"].startswith("order 1 is ")
    assert words["OrderOne"].startswith("order 2 is ")
    assert "float16 becomes float32" in words["ReturnsFloat32"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ("torch.nn.GroupNorm(4, C)", "batch", "layer", "torch.nn.Tanh()")
)
def test_no_false_alarm(target):
    """Every line is answered, and nothing is wrong; but for the graph breaks of
    a compiler that is too old for our layers.
    """
    make = layer_of(target)
    if target.endswith("Tanh()"):
        make = lambda channels: nn.Tanh()
    card = report_card(make, target)
    assert set(PROPERTIES) < set(card.lines)
    old = TORCH < (2, 13) and target in ("batch", "layer")
    assert card.faults.keys() <= ({"compile"} if old else set()), str(card)
    assert not any("not answered" in v.found for v in card.lines.values())


def test_what_is_known_of_plain_layers():
    "Axes, spheres and invariances of PyTorch's; the map's values of theory."
    of = {
        "batch": nn.BatchNorm2d,
        "instance": nn.InstanceNorm2d,
        "group": lambda c: nn.GroupNorm(3, c),
        "layer": nn.LayerNorm,
        "none": lambda c: nn.Identity(),
    }
    asked = [q for q in PROPERTIES if q not in ("compile", "time")]
    cards = {k: report_card(make, only=asked) for k, make in of.items()}
    found = {
        name: {line: v.value for line, v in card.lines.items()}
        for name, card in cards.items()
    }
    seen = {name: v["sees in training"] for name, v in found.items()}
    whole = {"samples": 0, "channels": 0, "positions": 0}
    assert seen == {
        "batch": whole | {"samples": 1, "positions": 1},
        "instance": whole | {"positions": 1},
        "group": whole | {"channels": 3, "positions": 1},
        "layer": whole | {"channels": 11},
        "none": whole,
    }
    assert found["batch"]["sees in evaluation"] == whole
    assert found["batch"]["parameters"] == {
        "parameters": 2,
        "buffers": ["running_mean", "running_var", "num_batches_tracked"],
    }
    assert found["batch"]["training and test"] < 0.05
    assert found["batch"]["state"] and found["layer"]["checkpoint"]
    assert cards["batch"].faults["checkpoint"] == "averages move twice"
    takes = cards["group"].lines["takes"].found
    assert [kind.split()[0] for kind in takes.split("; ")] == [
        "images",
        "sequences",
        "vectors",
        "volumes",
    ]
    assert found["batch"]["sphere"] == {"each channel": 1.0}
    assert found["instance"]["sphere"].keys() == {
        "each sample",
        "each channel",
        "each channel of a sample",
    }
    assert found["none"]["sphere"] == {} and found["none"]["blind to"] == []
    assert "a channel ×2" in found["batch"]["blind to"]
    assert "a sample ×2" in found["group"]["blind to"]
    assert found["group"]["applied twice"] < 1e-3
    # a mean and a size of each of what is normalized by itself
    lost = {name: v["lost"] for name, v in found.items()}
    assert lost == {
        "batch": 0,
        "instance": 24,
        "group": 6,
        "layer": 14,
        "none": 0,
    }
    # ReLU halves a power: the stream has 1 + 16/2 behind the last block and
    # 1 + 8/2 behind the eighth, and 1.5^8 more where nothing is normalized
    for name, v in found.items():
        grown = 1.5**8 if name == "none" else 9 / 5
        assert abs(v["residual stream"] / grown - 1) < 0.2, name
    # cosines behind one layer: κ(0) = 1/π; the batch forgets what was common
    assert abs(found["layer"]["map"][0.0] - 1 / math.pi) < 0.01
    assert abs(found["batch"]["map"][0.95] - 1 / math.pi) < 0.01
    growth = {k: v["squared gradient"] for k, v in found.items()}
    assert abs(growth["batch"]["measured"] - math.pi / (math.pi - 1)) < 0.06
    assert abs(growth["none"]["measured"] - 0.5) < 0.03
    for name, v in growth.items():
        assert abs(v["measured"] / v["predicted"] - 1) < 0.15, name
    for c, cosine in found["none"]["map"].items():
        assert abs(cosine - kappa(c)) < 0.025
    cosine, c = found["none"]["cosine of two inputs"], 0.5
    assert abs(cosine["measured"][0] - kappa(0.5)) < 0.03
    for _ in cosine["measured"]:
        c = kappa(c)
    assert abs(cosine["predicted"][-1] - c) < 0.04  # of 96 channels
    # shares: the batch has no mean, and an instance nothing but its deviation
    for v in found.values():
        assert all(abs(sum(shares) - 1) < 1e-9 for shares in v["power"])
    assert found["batch"]["power"][-1][0] < 1e-9
    assert found["instance"]["power"][-1][2] > 1 - 1e-9
    first = f"P1 {100 * found['none']['power'][-1][0]:.0f} %, "
    assert cards["none"].lines["power"].found.startswith(first)
    # a tenth of the root of 0.7² + 1.8², of a deviation of 1.8
    expected = 0.1 * math.hypot(0.7, 1.8) / 1.8
    assert abs(found["none"]["noise"] - expected) < 0.002
    assert abs(found["batch"]["bias and skew"]["slope"] - 0.5) < 0.02
    x, y = found["batch"]["gaussianity"]
    assert abs(x - y) < 1e-4


def wrong_at(order):
    "A sine, whose derivative of this order is 1, 2 or 6 too large."
    return lambda channels: lambda x: x.sin() + (x - x.detach()) ** order


def of_dtype(given, returned):
    "What turns one type into another, and no other type."
    return lambda channels: (
        lambda x: x.to(returned if x.dtype == given else x.dtype)
    )


def drawn(channels):
    weight = torch.randn(channels, 1, 1, dtype=torch.float64)
    return lambda x: x * weight.to(x.dtype)


def function(called):
    return lambda channels: called


class Scales(nn.Module):
    "Its parameters' type wins."

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x):
        return x * self.weight


class InOrder(Scales):
    "Only in training."

    def forward(self, x):
        return x.cumsum(0).cumsum(1) if self.training else x


class Swaps(Scales):
    "Random in training; in evaluation of averages that changed places."

    def forward(self, x):
        if self.training:
            self.swapped = x.mean((0, 2, 3), keepdim=True).flip(1).cumsum(1)
            return x + torch.rand(())
        return x - self.swapped


class Jitters(Scales):
    "A second derivative that is wrong in training, which is random."

    def forward(self, x):
        wrong = (x - x.detach()).square() + torch.rand(())
        return x.sin() + (wrong if self.training else 0)


class JittersAlways(Jitters):
    def forward(self, x):
        return super().forward(x) + (x - x.detach()).square()


SAID = [
    (drawn, "order of samples", "makes no difference"),
    (lambda c: nn.Dropout(), "order of samples", "makes no difference"),
    (InOrder, "order of samples", "✗ matters"),
    (function(lambda x: x * (1 + 1e-7 * len(x))), "same bits", "a sample's"),
    (function(lambda x: x * (1 + 1e-3 * len(x))), "same bits", "✗ a sample's"),
    (lambda c: nn.Dropout(), "mirror", "odd"),
    (function(torch.abs), "mirror", "even"),
    (function(torch.relu), "mirror", "neither"),
    (Swaps, "permutations", "of channels lost, of positions kept"),
    (InOrder, "permutations", "of channels lost, of positions kept"),
    (lambda c: nn.GroupNorm(3, c), "permutations", "of channels lost"),
    (lambda c: nn.Dropout(), "permutations", "of channels kept, of posi"),
    (nn.LayerNorm, "permutations", "of channels kept, of positions kept"),
    (
        function(lambda x: x.cumsum(-1)),
        "permutations",
        "of channels kept, of positions lost",
    ),
    (lambda c: nn.GroupNorm(1, c, eps=5e3), "sphere", "no"),
    (function(lambda x: (2 * x).sin()), "derivatives", "right to order 3"),
    (Scales, "derivatives", "right to order 3"),
    (wrong_at(1), "derivatives", "✗ order 1 is"),
    (wrong_at(2), "derivatives", "✗ order 2 is"),
    (wrong_at(3), "derivatives", "✗ order 3 is"),
    (Jitters, "derivatives", "right to order 3 in evaluation; in training"),
    (JittersAlways, "derivatives", "✗ order 2 is"),
    (function(lambda x: x**3 / x**2), "half precision", "✗ wrong at 400"),
    (of_dtype(torch.float64, torch.float32), "dtype", "✗ float64 becomes"),
    (of_dtype(torch.float32, torch.float64), "dtype", "✗ float32 becomes"),
    (of_dtype(torch.bfloat16, torch.float32), "dtype", "✗ bfloat16 becomes"),
    (of_dtype(torch.float16, torch.float32), "dtype", "✗ float16 becomes"),
    (Scales, "dtype", "✗ bfloat16 becomes float32; float16 becomes float32"),
    (
        function(lambda x: x / x.abs().amax()),
        "constant unit",
        "✗ output of all 0 is not finite",
    ),
    (
        function(lambda x: x / (x - 2).abs().amax()),
        "constant unit",
        "✗ output of all 2 is not finite",
    ),
    (
        function(lambda x: x * x.square().mean().sqrt()),
        "constant unit",
        "✗ gradient of all 0 is not finite",
    ),
    (
        function(lambda x: x * (1 + x.is_contiguous())),
        "channels last",
        "✗ other values",
    ),
    (lambda c: nn.Identity(), "derivatives", "right to order 3"),
    (lambda c: nn.ReLU(inplace=True), "input", "✗ changed"),
    (lambda c: nn.ReLU(inplace=True), "noise", "10 % becomes"),
    (function(lambda x: x * float("nan")), "same bits", "✗ a sample's"),
    (function(lambda x: x * float("nan")), "training and test", "✗ differ"),
    (function(lambda x: x * float("nan")), "checkpoint", "✗ the gradient"),
    (lambda c: nn.Dropout(), "repeated", "the same in evaluation; random"),
    (
        function(lambda x: x * (1 + torch.compiler.is_compiling())),
        "compile",
        "✗ one graph, other values",
    ),
    (function(lambda x: 0 * x), "squared gradient", "vanishes"),
]


@pytest.mark.parametrize("make, question, words", SAID, ids=range(len(SAID)))
def test_what_is_said(make, question, words):
    "Of layers written for a line; a cross stands for a fault."
    found = line(make, question)
    assert f"{'✗ ' * found.fault}{found.found}".startswith(words)


def straightened(x):
    "Exponential values of mean 0 become normal."
    return torch.special.ndtri(-torch.expm1(-(1 + x.double()))).to(x.dtype)


@pytest.mark.parametrize(
    "make, question, value, within",
    [
        # dropout of a half: sixteen means of variance 1/16, over their size
        (lambda c: nn.Dropout(), "training and test", 17**-0.5, 0.01),
        (function(lambda x: x / 2), "applied twice", 0.5, 1e-9),
        (wrong_at(3), "derivatives", 2, 0),
        (Scales, "bytes kept", 1, 0),
        (function(lambda x: x.square() * x), "bytes kept", 2, 0),
    ],
)
def test_values_in_closed_form(make, question, value, within):
    assert abs(line(make, question).value - value) <= within


def test_skew_in_closed_form():
    "Of exponential units turned round; and of such as were made normal."
    found = line(function(torch.neg), "bias and skew").value
    expected = (1 - 1 / math.e) / (1 - 2 / math.e)
    assert abs(found["slope"] / expected - 1) < 0.06
    before, behind = line(function(straightened), "gaussianity").value
    assert before < 0.82 and behind > 0.999


def test_time_is_the_layers_over_that_of_the_other(monkeypatch):
    """By a clock that counts its calls, and 3 and 4 for the layer's passes; one
    is interrupted.
    """
    now, runs = [0], itertools.count()

    def later(by):
        now[0] += by
        return now[0]

    def slow(x):
        later(1000 if next(runs) == 20 else 3)
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda grad: later(4) and grad)
        return y

    monkeypatch.setattr(time, "perf_counter", lambda: later(1))
    assert line(function(slow), "time").value == 8


def test_what_is_asked_and_the_name():
    card = report_card(nn.LayerNorm, only=["mirror"])
    assert list(card.lines) == ["takes", "mirror"]
    assert card.name == "LayerNorm"
    assert report_card(nn.LayerNorm, "mine", only=[]).name == "mine"


@pytest.mark.parametrize(
    "target, groups",
    [
        ("torch.nn.GroupNorm(4, C)", 4),
        ("torch.nn.GroupNorm(num_channels=C, num_groups=2)", 2),
        ("group(num_groups=3)", 3),
    ],
)
def test_targets_with_arguments(target, groups):
    made = layer_of(target)(12)
    assert (made.num_groups, made.num_channels) == (groups, 12)


def test_a_drawn_card():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots(1, 3)
    cosine = {"measured": [0.5, 0.4, 0.3], "predicted": [0.6, 0.7, 0.8]}
    power = [[0.1, 0.2, 0.3, 0.4], [0.2, 0.2, 0.2, 0.4], [0.7, 0.1, 0.1, 0.1]]
    values = ({0.0: 0.3, 0.5: 0.6}, cosine, power)
    names = ("map", "cosine of two inputs", "power")
    draw(
        Card("mine", dict(zip(names, (Line("", value=v) for v in values)))),
        axes,
    )
    curves = [[(x, y) for x, y in v.get_xydata()] for v in axes[1].lines]
    assert curves == [
        list(zip((1, 2, 3), cosine[kind])) for kind in ("measured", "predicted")
    ]
    assert axes[0].lines[1].get_xydata().tolist() == [[0, 0.3], [0.5, 0.6]]
    (first,) = axes[2].collections[0].get_paths()
    assert {(1, 0.1), (2, 0.2), (3, 0.7)} < {(x, y) for x, y in first.vertices}


def test_a_card_as_text_and_for_a_program():
    card = Card("mine", {"mirror": Line("odd: −y"), "input": Line("no", True)})
    assert str(card) == "mine\n  mirror  odd: −y\n✗ input   no"
    lines = json.loads(json.dumps(card.as_dict()))["lines"]
    assert lines["input"]["fault"] and "passes" not in lines["mirror"]["how"]
    assert "−x" in lines["mirror"]["how"]
    how = Card("", {"noise": Line(""), "time": Line("")}).as_dict()["lines"]
    assert all(v["how"] and "\n" not in v["how"] for v in how.values())


def test_a_question_that_fails_is_a_line_and_randomness_is_left_alone():
    @asks("of no use")
    def _(subject):
        "Raises."
        raise RuntimeError("of\nno use")

    try:
        torch.manual_seed(5)
        expected = torch.rand(2)
        torch.manual_seed(5)
        card = report_card(nn.LayerNorm, only=["of no use"])
        assert torch.equal(torch.rand(2), expected)
    finally:
        del PROPERTIES["of no use"]
    found = card.lines["of no use"]
    assert found.found == "not answered: RuntimeError: of no use"
    assert not found.fault


test_targets_that_name_nothing = refusals(
    [
        (report_card, {"norm_layer": nn.ReLU()}, TypeError, "what makes"),
        (report_card, {"norm_layer": "batch"}, TypeError, "layer_of"),
        (
            lambda only: report_card(nn.LayerNorm, only=only),
            {"only": "mirr"},
            "did you mean mirror",
        ),
        (layer_of, {"target": "bach"}, "did you mean"),
        (layer_of, {"target": "torch.nn.Nix"}, "names no layer"),
        (layer_of, {"target": "torch.nn.GroupNorm(4,"}, "names no layer"),
        (layer_of, {"target": "torch.nn.GroupNorm(4, 2*C)"}, "neither C nor"),
        (layer_of, {"target": "torch.nn"}, "it is a module"),
        (layer_of, {"target": ""}, "no name"),
        (
            lambda only: report_card(nn.LayerNorm, only=only),
            {"only": ["sphre"]},
            "did you mean sphere",
        ),
    ],
    lambda ask, settings: ask(**settings),
    ValueError,
)
