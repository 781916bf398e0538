"""The report card: fifteen layers that are broken in one way each, what is no
layer, layers that nothing is wrong with, and numbers known in closed form.
"""

import json
import math

import pytest
import torch
from torch import nn

from normalnorm.analysis.report_card import (
    PROPERTIES,
    Card,
    Line,
    asks,
    layer_of,
    report_card,
)
from tests.analysis.broken import BROKEN, STRANGE, Whole
from tests.refusals import refusals


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
    "Every line is answered, and nothing is wrong."
    make = layer_of(target)
    if target.endswith("Tanh()"):
        make = lambda channels: nn.Tanh()
    card = report_card(make, target)
    assert set(PROPERTIES) < set(card.lines)
    assert not card.faults, str(card)
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
    found = {
        name: {
            line: v.value
            for line, v in report_card(make).lines.items()
            if line not in ("compile", "time")
        }
        for name, make in of.items()
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
    # cosines behind one layer: κ(0) = 1/π; the batch forgets what was common
    assert abs(found["layer"]["map"][0.0] - 1 / math.pi) < 0.01
    assert abs(found["batch"]["map"][0.95] - 1 / math.pi) < 0.01
    growth = {k: v["squared gradient"] for k, v in found.items()}
    assert abs(growth["batch"]["measured"] - math.pi / (math.pi - 1)) < 0.06
    assert abs(growth["none"]["measured"] - 0.5) < 0.03
    for name, v in growth.items():
        assert abs(v["measured"] / v["predicted"] - 1) < 0.15, name
    assert found["none"]["noise"] < 0.12
    assert abs(found["batch"]["bias and skew"]["slope"] - 0.5) < 0.02
    x, y = found["batch"]["gaussianity"]
    assert abs(x - y) < 1e-4


def test_a_card_as_text_and_for_a_program():
    card = Card("mine", {"mirror": Line("odd: −y"), "input": Line("no", True)})
    assert str(card) == "mine\n  mirror  odd: −y\n✗ input   no"
    lines = json.loads(json.dumps(card.as_dict()))["lines"]
    assert lines["input"]["fault"] and "passes" not in lines["mirror"]["how"]
    assert "−x" in lines["mirror"]["how"]


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
        (layer_of, {"target": "bach"}, "did you mean"),
        (layer_of, {"target": "torch.nn.Nix"}, "names no layer"),
        (layer_of, {"target": "torch.nn.GroupNorm(4,"}, "names no layer"),
        (
            lambda only: report_card(nn.LayerNorm, only=only),
            {"only": ["sphre"]},
            "did you mean sphere",
        ),
    ],
    lambda ask, settings: ask(**settings),
    ValueError,
)
