"""Recipes: what an arm is made of, at each scale.

The committed rows say what was run."""

import dataclasses
import json
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from normalnorm.experiments import data, results, tables
from normalnorm.experiments.idx import fashion_folder
from normalnorm.experiments.optimization import Settings
from normalnorm.experiments.recipes import (
    first,
    given_noise,
    growth,
    language,
    one_factor,
    proxy,
    rivals,
    together,
    unique,
    wide_nets,
)
from normalnorm.experiments.recipes.first import first_experiment, initial_model
from normalnorm.experiments.results import Contrast, Deviation
from normalnorm.experiments.statistics import contrast
from tests.experiments.known import ROOT
from tests.refusals import refusals

SCALES = [
    (scale, arm)
    for scale in first_experiment.scales
    for arm in first_experiment.scales[scale]
]


COMMITTED = sorted(
    name
    for name, recipe in results.recipes().items()
    if (ROOT / "results" / name / "book").is_dir() and not recipe.grid
)


@pytest.mark.parametrize("name", COMMITTED)
def test_all_runs_of_a_committed_recipe_are_there(name):
    """Each arm and seed of its present configuration, and none besides. One
    seed of it is its first.
    """
    recipe, out = results.find(name), ROOT / "results"
    of = {config["data"] for config in recipe.arms("book").values()}
    if "fashion-unseen" in of and not fashion_folder().is_dir():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    found = results.scan(recipe, "book", out)
    assert found.problems == []
    assert {job.path for job in results.plan(name, "book", out=out)} == set(
        found.rows
    )
    one = {job.seed for job in results.plan(name, "book", 1, out)}
    assert one == {recipe.seeds_at("book")[0]}


@pytest.mark.parametrize("scale, arm", SCALES)
def test_each_arm_builds_for_its_data(scale, arm):
    "And its training settings are accepted."
    config = first_experiment.scales[scale][arm]
    shape = data.info(config["data"]).shape
    model = initial_model(config, 0)
    with torch.no_grad():
        assert model(torch.randn(2, *shape)).shape == (2, 10)
    assert Settings(**config["train"]).epochs == config["train"]["epochs"]


def _acts(layer):
    "Of a normalizer: the dropout behind it, or ξ, kind and α of its noise."
    if isinstance(layer, torch.nn.Sequential):
        return layer[1].p
    return getattr(layer, "noise", None) and (
        layer.noise,
        layer.noise_kind,
        layer.alpha,
    )


@pytest.mark.parametrize(
    "kind, decay, smoothing, acts",
    [
        ("weight decay", 1e-3, 0, None),
        ("dropout", 5e-4, 0, 0.2),
        ("Gaussian dropout", 5e-4, 0, (0.6, "dropout", 0.0)),
        ("label smoothing", 5e-4, 0.2, None),
        ("noise", 5e-4, 0, (0.8, "scaled", 0.0)),
        ("noise and transform", 5e-4, 0, (0.8, "scaled", 1.0)),
    ],
)
def test_what_twice_the_strength_of_a_rival_is(
    kind, decay, smoothing, acts, monkeypatch
):
    ran = Mock()
    monkeypatch.setattr(rivals.first, "run", ran)
    config = rivals.rivals.arms("book")[kind]
    rivals.run(config | {"norm": {"kind": kind, "strength": 2.0}}, 3, arm=kind)
    (config, seed), how = ran.call_args
    assert (seed, how["arm"]) == (3, kind)
    assert config["train"]["weight_decay"] == decay
    assert config["train"].get("label_smoothing", 0) == smoothing
    assert _acts(how["norms"](**config["norm"])(8)) == acts


KINDS = {
    "GN + PN": {"GroupNorm", "ProxyNorm"},
    "GN + transform + PN": {"GroupNormalNorm", "ProxyNorm"},
    "BN + transform": {"BatchNormalNorm2d", "ReLU"},
    "BN + transform + PN": {"BatchNormalNorm2d", "ProxyNorm"},
    "PreLayerNorm": {"PreLayerNormConv2d", "ReLU"},
    "PreLayerNorm + transform": {"GroupNormalNorm", "ReLU"},
    "transform + PreLayerNorm": {
        "GroupNormalNorm",
        "PreLayerNormConv2d",
        "ReLU",
    },
    "RegNorm": {"RegNormConv2d", "ReLU"},
    "RegNorm + transform": {"RegNormConv2d", "Bend", "ReLU"},
    "WS + BN": {"StandardizedConv2d", "BatchNorm2d", "ReLU"},
    "WS + BN + transform": {"StandardizedConv2d", "BatchNormalNorm2d", "ReLU"},
}


@pytest.mark.parametrize("arm", together.MADE)
def test_two_methods_in_one_network(arm):
    "Those of the name and no other; kernels are those of the seed."
    arms = together.together.arms("book")
    model, first = (
        unique.unique_model(arms[name], 3, together.MADE)
        for name in (arm, "GN + PN")
    )
    there = {type(module).__name__ for module in model.modules()}
    assert there & set.union(*KINDS.values()) == KINDS[arm]
    maps = [
        [m for m in net.modules() if isinstance(m, nn.Conv2d)]
        for net in (model, first)
    ]
    for own, other in zip(*maps, strict=True):
        assert torch.equal(own.weight, other.weight)
        assert (own.bias is None) == (
            "RegNorm" not in arm and "PreL" not in arm
        )
    text = repr(model)
    assert ("activation=relu" in text) == (" PN" in arm)
    # γ and β are those of the proxy, and of PreLayerNorm
    assert (
        not {"PN", "PreLayerNorm"} & {*arm.split()} or "affine=True" not in text
    )
    groups = 4 if "GN" in arm else 1
    for module in model.modules():
        assert getattr(module, "num_groups", groups) == groups
        assert getattr(module, "noise", 0) == 0
        assert getattr(module, "alpha", 1) == 1
    model(torch.randn(8, 1, 28, 28)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert ("strength" in arms[arm]["norm"]) == ("RegNorm" in arm)


def test_a_bend_is_the_transform_alone():
    "By scipy's likelihood; evaluation takes the average."
    torch.manual_seed(0)
    x = torch.randn(6, 2, 5, 5).double().exp()
    bend = together.Bend(2).double()
    step, bent = 1e-3, bend(x)
    plain = bend.eval()(x)
    for channel in range(2):
        h = x[:, channel].flatten().numpy()
        k = (h - h.mean()) / h.std()
        below, here, above = (
            -stats.yeojohnson_llf(1 + of, k) for of in (-step, 0, step)
        )
        curve = (above - 2 * here + below) / step**2
        lmbda = 1 - (above - below) / (2 * step) / curve
        average = 0.9 + 0.1 * lmbda
        for found, of in ((bent, lmbda), (plain, average)):
            np.testing.assert_allclose(
                found[:, channel].flatten().detach(),
                stats.yeojohnson(h, of),
                rtol=1e-5,
            )


def test_standardized_kernels():
    conv = together.StandardizedConv2d(3, 4, 3, bias=True).double()
    x = torch.randn(2, 3, 6, 6).double()
    v = conv.weight.detach().flatten(1)
    v = (v - v.mean(1, keepdim=True)) / v.std(1, False, True) / 27**0.5
    expected = nn.functional.conv2d(x, v.view_as(conv.weight))
    torch.testing.assert_close(conv(x), expected, rtol=1e-3, atol=1e-4)
    conv.stride, conv.padding = (2, 2), (1, 1)
    assert conv(x).shape == (2, 4, 3, 3)
    with pytest.raises(ValueError, match="'circular'.*zeros only"):
        together.StandardizedConv2d(3, 4, 3, padding_mode="circular")


# ---- what is stated before the runs ----

RECIPES = list(results.recipes().values())
GIVEN_NOISE = [
    recipe
    for recipe in RECIPES
    if recipe.name.startswith("transform-given-noise")
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_recipe_states_what_it_is_for(recipe):
    assert recipe.unstated() == []
    text = tables.stated(recipe, "book")
    assert bool(text) == bool(recipe.comparisons) and "missing" not in text
    assert not text or str(recipe.comparisons) in text
    # made for a contrast, or exploratory
    assert bool(recipe.primary) != bool(recipe.exploratory)
    for primary, count, difference in recipe.detectable("book"):
        assert count == len(recipe.seeds_at("book"))
        assert f"{difference:.2g} in" in text
        assert recipe.deviation[primary.metric].source in text


METRIC = given_noise.given_noise.primary[0].metric


@pytest.mark.parametrize(
    "gap, fields",
    [
        ("no primary contrast", {"primary": ()}),
        ("no deviation of test_last", {"deviation": {}}),
        (
            "deviation of test_last is not above 0",
            {"deviation": {METRIC: Deviation(0.0, "a pilot")}},
        ),
        (
            "its source is not named",
            {"deviation": {METRIC: Deviation(1.0, "")}},
        ),
        ("would count as none", {"negligible": {METRIC: 0.5}}),
        ("no seeds at scale book", {"seeds": {"smoke": 2}}),
        ("which split judged", {"tuned_on": ""}),
        ("is unknown", {"tuned_on": "unknown", "tuned": ""}),
        (
            "a grid is tuned",
            {
                "tuned_on": "nothing",
                "grid": {
                    arm: {"train.lr": (0.1, 0.2)} for arm in given_noise.ARMS
                },
            },
        ),
    ],
)
def test_what_a_recipe_leaves_open_is_said(gap, fields):
    recipe = dataclasses.replace(given_noise.given_noise, **fields)
    assert gap in "; ".join(recipe.unstated())


test_recipes_that_contradict_themselves_are_refused = refusals(
    [
        *(
            ({"primary": (Contrast(*contrast),)}, "none of the comparisons")
            for contrast in (
                ("BN", "BNN", "train_last"),
                ("BNN", "BN", "test_last"),
            )
        ),
        ({"tuned_on": "test"}, "tuned_on='test', expected one of nothing"),
        (
            {"switches": (results.Switches("a", "b", ("BN", "x", "y", "z")),)},
            "`switches` names the arm 'x'",
        ),
    ],
    lambda fields: dataclasses.replace(given_noise.given_noise, **fields),
)


@pytest.mark.parametrize(
    "recipe, missing",
    [(growth.peer_attacks, "torchattacks"), (wide_nets.peer_maps, "jax")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_recipe_says_which_package_it_needs(recipe, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    config = next(iter(recipe.arms("smoke").values()))
    with pytest.raises(ImportError, match=f"{recipe.name}, which is not inst"):
        recipe.run(config, 0)


def test_pilot_seeds_are_none_of_the_experiment():
    "And the deviation that is said of them is in their rows."
    recipe = given_noise.given_noise_500
    rows = results.rows(recipe, "book", ROOT / "results" / "pilot")
    (primary,) = recipe.primary
    d = torch.tensor(contrast(rows, primary[:2], primary.metric))
    assert {row["seed"] for row in rows} == set(range(100, 104))
    assert len(d) == 4 and len(rows) == 8
    said = recipe.deviation[primary.metric].source
    assert f"{d.std().item():.2f}" in said
    assert not {row["seed"] for row in rows} & set(recipe.seeds_at("book"))


# ---- the first experiment made anew ----


@pytest.mark.parametrize(
    "recipe", [r for r in RECIPES if r.switches], ids=lambda r: r.name
)
def test_four_arms_differ_by_the_two_switches_only(recipe):
    "Without either, with one, with both; noise as published."
    for arms in recipe.scales.values():
        pairs = [pair.arms for pair in recipe.switches]
        if "normality" not in recipe.name:  # it has further arms
            assert sorted(arms) == sorted(arm for four in pairs for arm in four)
        for four in pairs:
            if not arms.keys() >= set(four):
                continue
            configs = [dict(arms[arm]) for arm in four]
            norms = [config.pop("norm") for config in configs]
            xi = 1.0 if "LNN" in four[3] else 0.4
            assert [tuple(norm.values())[:3] for norm in norms] == [
                (norms[0]["kind"], *switches)
                for switches in (
                    (False, 0.0),
                    (True, 0.0),
                    (False, xi),
                    (True, xi),
                )
            ]
            assert all(config == configs[0] for config in configs)


@pytest.mark.parametrize("recipe", GIVEN_NOISE, ids=lambda r: r.name)
def test_fresh_seeds_draw_their_images_for_one_contrast(recipe):
    assert {other.name for other in GIVEN_NOISE} == {
        f"transform-given-noise{what}" for what in ("", "-500")
    }
    for arms in recipe.scales.values():
        config = arms["BNN"]
        assert config["draw"]
        assert Settings(**config["train"]).validate_every == 1
    assert not set(recipe.seeds_at("book")) & set(
        first_experiment.seeds_at("book")
    )
    assert recipe.switches[0].arms == given_noise.ARMS
    assert recipe.primary == (("BN with noise", "BNN", "test_last"),)


def test_images_are_drawn_by_the_seed_and_are_the_same_for_all_arms(
    monkeypatch,
):
    seen = []

    def look(model, parts, settings, seed, *args, **options):
        seen.append(parts)
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "train", look)
    for seed in (10, 11):
        for arm in given_noise.ARMS:
            with pytest.raises(KeyboardInterrupt):
                first.run(given_noise.given_noise.scales["smoke"][arm], seed)
    for parts, seed in zip(seen, [10] * 4 + [11] * 4, strict=True):
        expected = {
            split: data.load("digits", split)
            for split in ("validation", "test")
        }
        expected["train"] = data.load("digits", "train", 256, draw=seed)
        for split, pair in expected.items():
            assert all(map(torch.equal, parts[split], pair))


def test_a_run_records_what_the_chapter_will_ask(tmp_path):
    recipe = given_noise.given_noise
    (row,) = results.run_recipe(
        recipe, "smoke", seeds=[3], arms=["BNN"], out=tmp_path, device="cpu"
    )
    metrics, config = row["metrics"], row["config"]
    assert set(recipe.columns) <= set(metrics)
    assert row.items() >= results.provenance().items()
    right = results.unpack_bits(row["test_right"])
    assert len(right) == data.info("digits").sizes["test"]
    assert 100 * right.double().mean().item() == pytest.approx(
        metrics["test_last"], abs=1e-4
    )
    measured = config["measure"]
    assert row["attenuation"].keys() == {"input", "stem_norm"}
    for at, places in row["attenuation"].items():
        assert places[at] == pytest.approx(measured["noise"] ** 2, rel=0.1)
        assert "output" in places and "stages.2.norm2" in places
    for attack in ("fgsm", "pgd"):
        under = row["robust"][attack]
        assert list(under) == ["4", "8"]
        clean = 100 * right[: measured["images"]].double().mean().item()
        assert all(accuracy <= clean + 1e-3 for accuracy in under.values())
    assert row["gamma"].keys() == row["gaussianity"]["after"].keys()
    assert all(
        of["least"] <= of["mean"] <= of["largest"]
        for of in row["gamma"].values()
    )
    assert all(
        len(layer["qq"]) == 21 for layer in row["gaussianity"]["after"].values()
    )
    # the weights that were measured are the last ones, on a second reading too
    assert results.run_recipe(
        recipe, "smoke", seeds=[3], arms=["BNN"], out=tmp_path, device="cpu"
    ) == [row]


@pytest.mark.parametrize(
    "recipe, arm",
    [(first_experiment, "ResNet BNN"), (proxy.proxy, "GN")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_run_that_validates_at_the_end_only_has_no_chosen_epoch(recipe, arm):
    config = recipe.scales["smoke"][arm]
    whole, short = (
        recipe.run(config | {"train": config["train"] | more}, 0)["metrics"]
        for more in ({}, {"validate_every": 0})
    )
    for metrics in (whole, short):
        metrics.pop("seconds")
    left = {k: v for k, v in whole.items() if "chosen" not in k}
    assert short == left and len(left) < len(whole)


def test_a_run_of_proxy_norm_says_what_it_drew(tmp_path):
    "Its configuration does not, and keeps its hash: it is a committed row's."
    config = proxy.proxy.scales["smoke"]["BN"]
    (row,) = results.run_recipe(
        "proxy-norm", "smoke", [3], tmp_path, "cpu", arms=["BN"]
    )
    assert "draw" not in config and row["drawn_hash"] == data.data_hash(
        "digits", first=config["images"], draw=3
    )


@pytest.mark.parametrize(
    "recipe, arm",
    [
        (proxy.proxy, "GN+PN and transform, regularized"),
        (unique.unique_depths, "PreLayerNorm, 10"),
        (language.language_recurrent, "LNN"),
        (together.together, "RegNorm + transform"),
        *((recipe, "BN") for recipe in one_factor.SWEEPS),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_row_and_the_same_again(recipe, arm, tmp_path):
    results.run_recipe(recipe, "smoke", 1, tmp_path, "cpu", arms=[arm])
    row, *_ = results.rows(recipe, "smoke", tmp_path, every=True)
    again = json.loads(json.dumps(recipe.run(row["config"], 0)))
    for found in (row, again):
        for numbers in (found["metrics"], *found.get("history", ())):
            numbers.pop("seconds", None)
    assert {key: row[key] for key in again} == again
    assert set(recipe.columns) <= set(row["metrics"])


def test_the_smoke_scale_runs_and_is_reported(tmp_path):
    "Two seeds of four arms; primary, factors and equivalence in the report."
    recipe = given_noise.given_noise_500
    rows = results.run_recipe(recipe, "smoke", out=tmp_path, device="cpu")
    assert len(rows) == 8
    text = tables.report(recipe, tmp_path)
    for part in (
        "primary: BNN − BN with noise, test accuracy, last epoch (%)",
        "main effect of transform",
        "main effect of noise",
        "interaction",
        "Comparisons: 32",
        f"tuned on: {recipe.tuned_on}",
        *(f"(±{bound:g})" for bound in recipe.negligible.values()),
    ):
        assert part in text, part
