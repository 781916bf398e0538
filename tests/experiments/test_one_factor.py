"""Batch size, initial scale, learning rate: what a network of the sweeps is,
what its curve comes to, and what a criterion says of made-up rows.
"""

import math

import pytest
import torch
from torch import nn

from normalnorm.experiments.recipes import one_factor
from normalnorm.experiments.recipes.one_factor import (
    CRITERIA,
    NORMS,
    Verdict,
    batch_size_sweep,
    chosen,
    initial_scale_sweep,
    input_shift,
    judge,
    learning_rate_sweep,
    moments,
    of_batches,
    of_rates,
    of_scales,
    plain_network,
    points,
    ruling,
)
from normalnorm.experiments.statistics import Summary


@pytest.mark.parametrize("norm", NORMS)
def test_first_weights_do_not_depend_on_the_normalizer(norm):
    ours, none = (
        [
            m.weight
            for m in plain_network(kind, 2.0, seed=3).modules()
            if isinstance(m, nn.Conv2d)
        ]
        for kind in (norm, "none")
    )
    halves = [
        m.weight
        for m in plain_network("none", seed=3).modules()
        if isinstance(m, nn.Conv2d)
    ]
    assert len(ours) == 6
    for w, v, half in zip(ours, none, halves):
        torch.testing.assert_close(w, v)
        torch.testing.assert_close(v, 2 * half)


def test_groups_of_the_normalizers():
    groups = {
        norm: [
            m.num_groups
            for m in plain_network(norm)
            if isinstance(m, nn.GroupNorm)
        ]
        for norm in NORMS
    }
    assert groups == {
        "BN": [],
        "LN": [1] * 6,
        "GN": [4] * 6,
        "WN": [],
        "none": [],
    }


def test_looking_changes_nothing_and_takes_the_statistics_of_the_images():
    model = plain_network("BN").eval()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    images = torch.randn(7, 1, 28, 28)
    found = moments(model, images)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not any(m.training for m in model.modules())
    inner = model.train()[:3](images)
    torch.testing.assert_close(found[0][0], inner.mean((0, 2, 3)))
    torch.testing.assert_close(found[0][1], inner.std((0, 2, 3), correction=0))


def test_a_shift_is_in_deviations_and_leaves_out_constants():
    mean, deviation = torch.zeros(3), torch.tensor([1.0, 2.0, 0.0])
    after = (torch.tensor([3.0, 8.0, 5.0]), deviation)
    assert input_shift([(mean, deviation)], [after]) == pytest.approx(
        math.sqrt((9 + 16) / 2)
    )
    assert math.isnan(input_shift([(mean, 0 * deviation)], [after]))


def test_points_move_one_factor():
    for recipe, moved in (
        (learning_rate_sweep, {"lr"}),
        (initial_scale_sweep, {"scale"}),
        (batch_size_sweep, {"lr", "batch", "steps"}),
    ):
        config = recipe.arms("book")["BN"]
        for point in points(config):
            assert {k for k in point if point[k] != config[k]} <= moved
    config = batch_size_sweep.arms("book")["BN"]
    assert {p["batch"] for p in points(config)} == {2**k for k in range(1, 9)}
    epochs = {
        (p["batch"], p["steps"]): p["batch"] * p["steps"] / 512
        for p in points(config)
    }
    assert epochs[256, 32] == epochs[32, 256] == 16


def test_what_a_curve_comes_to():
    curve = [
        {
            "lr": lr,
            "loss": loss,
            "validation_loss": loss,
            "error": 10 * lr,
            "steps": steps,
            "shift": shift,
        }
        for lr, loss, steps, shift in (
            (0.01, 1.2, 256, 0.1),
            (0.03, 0.5, 128, 0.2),
            (0.1, 0.9, 64, 0.3),
            (1.0, 9.0, 256, None),
        )
    ]
    config = {"values": [0.01, 0.03, 0.1, 1.0], "lr": 0.03}
    assert of_rates(config, curve) == pytest.approx(
        {
            "highest": -1,
            "error": 0.3,
            "best": math.log10(0.03),
            "steps": 6,
            "shift": 0.2,
            "shift_tuned": 0.2,
        }
    )
    assert of_rates(config, [p | {"loss": 2.0} for p in curve])[
        "highest"
    ] == pytest.approx(-2.5)
    assert of_scales({}, curve) == {"trains": 1.0, "worst": 9.0}
    curve = [
        {"batch": b, "steps": s, "lr": 0.1, "validation_loss": 1.0, "error": e}
        for b, s, e in (
            (2, 256, 60.0),
            (32, 256, 30.0),
            (256, 256, 31.0),
            (256, 32, 35.0),
        )
    ]
    found = of_batches(
        {"batch": 32, "steps": 256, "values": [2, 32, 256]}, curve
    )
    assert (found["small"], found["large"], found["epochs"]) == (30, 1, 5)
    assert chosen(curve, batch=2)["error"] == 60


@pytest.mark.parametrize(
    "effect, noise, outcome",
    [
        (-2.0, 0.1, "met"),
        (2.0, 0.1, "opposite"),
        (0.0, 0.1, "no difference"),
        (0.0, 3.0, "open"),
    ],
)
def test_outcomes_of_a_criterion(effect, noise, outcome):
    rows = [
        {
            "arm": arm,
            "seed": s,
            "metrics": {
                "steps": s
                + (effect + noise * (-1) ** s * (1 + s / 9)) * (arm != "none")
            },
        }
        for arm in NORMS
        for s in range(6)
    ]
    assert {
        v.outcome for v in judge(CRITERIA["uf-faster"], lambda _: rows)
    } == {outcome}


def test_a_general_statement_holds_or_is_open():
    flat = Verdict("met", Summary(1.0, 0.1, 5, 0.7, 1.3))
    assert ruling([flat, flat]) == "holds"
    for outcome in ("opposite", "no difference", "open"):
        assert ruling([flat, flat._replace(outcome=outcome)]) == "open"


def test_a_run_that_overflows_counts_as_a_guess():
    config = learning_rate_sweep.arms("smoke")["none"]
    found = one_factor.train_once(config, 0, 1e9, 32, 1.0, 8, shifts=True)
    assert (found["error"], found["loss"], found["shift"]) == (90, 9, None)
