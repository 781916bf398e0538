"""The recipes of "Is batch norm unique?" and of text: each arm is what its name
says, and each paper scale takes two steps on a folder of its data's schema.
"""

import dataclasses

import pytest
import torch
from torch import nn

from normalnorm.experiments import data, hub, models, results
from normalnorm.experiments.recipes import language, unique
from normalnorm.layers.normality import LayerNormalNorm
from normalnorm.layers.prelayer import PreLayerNormConv2d, PreLayerNormLinear
from normalnorm.layers.regnorm import PreRegNormConv2d, RegNormConv2d
from tests.experiments.test_real_folders import COUNT, as_downloaded
from tests.refusals import refusals

IMAGES = (unique.unique, unique.unique_resnet50, unique.unique_resnet101)
TEXTS = (language.language_recurrent, language.language_transformer)
SMALL = {
    "wrn28-10": {"depth": 10, "widths": [4, 4, 4]},
    "resnet50": {"widths": [4, 4, 4, 4]},
    "resnet101": {"widths": [4, 4, 4, 4]},
    "gpt": {"width": 16, "heads": 2, "depth": 1},
}
datasets = pytest.importorskip("datasets")


def kinds(model):
    return {type(module) for module in model.modules()}


@pytest.mark.parametrize("recipe", IMAGES, ids=lambda r: r.name)
def test_arms_at_paper_scale_are_what_their_names_say(recipe):
    wanted = {
        "Batch": nn.BatchNorm2d,
        "Batch-Train": nn.BatchNorm2d,
        "Layer": nn.GroupNorm,
        "PreLayerNorm": PreLayerNormConv2d,
        "RegNorm": RegNormConv2d,
        "PreRegNorm": PreRegNormConv2d,
        "BMLV": unique.BMLVNorm,
        "LMBV": unique.LMBVNorm,
    }
    assert tuple(recipe.scales["paper"]) == unique.ARMS
    plain = models.cost(recipe.scales["paper"]["None"]["model"])
    for name, config in recipe.scales["paper"].items():
        with torch.device("meta"):
            parts = dict(unique._MADE[config["norm"]["kind"]])
            found = models.build(config["model"], **parts)
        assert kinds(found) & set(wanted.values()) == (
            {wanted[name]} if name in wanted else set()
        )
        assert ("strength" in config["norm"]) == ("RegNorm" in name)
        count = sum(p.numel() for p in found.parameters())
        assert 0.995 < count / plain.parameters < 1.005
    assert (
        recipe.paper["PreLayerNorm"].mean
        == (unique.TABLE["PreLayerNorm"][IMAGES.index(recipe)])
    )


def test_weights_are_those_of_the_seed_for_all_normalizers():
    arms = unique.unique.scales["smoke"]
    first, *others = (
        dict(unique.unique_model(config, 3).named_parameters())
        for config in arms.values()
    )
    for other in others:
        for name in (
            "stem.weight",
            "stages.1.conv2.weight",
            "classifier.weight",
        ):
            assert torch.equal(first[name], other[name])
    for recipe in TEXTS:
        first, *others = (
            dict(language.language_model(config, 3).named_parameters())
            for config in recipe.scales["smoke"].values()
        )
        assert all(
            torch.equal(first[name], other[name])
            for other in others
            for name in first
            if name.endswith("weight")
            and "norm" not in name
            and not name.startswith("steps")
        )


def test_arms_of_text():
    arms = language.language_transformer.scales["paper"]
    found = {
        name: kinds(
            language.language_model(
                {
                    **config,
                    "model_arguments": {
                        **config["model_arguments"],
                        **SMALL["gpt"],
                    },
                },
                0,
            )
        )
        for name, config in arms.items()
    }
    marks = {
        "LN": nn.LayerNorm,
        "PreLN": PreLayerNormLinear,
        "RMS": nn.RMSNorm,
        "LNN": LayerNormalNorm,
    }
    for name, seen in found.items():
        assert {n for n, mark in marks.items() if mark in seen} == (
            {name} - {"none"}
        )


def test_without_averages_the_batch_in_evaluation_counts():
    arms = unique.unique_batches.scales["smoke"]
    spread = {}
    for name in ("Batch-Train, 32", "Layer, 32"):
        config = {**arms[name], "train": {"epochs": 1, "batch": 32, "steps": 4}}
        found = unique.run(config, seed=0)["metrics"]
        spread[name] = {
            found[f"test_batch_{size}"] for size in config["test_batches"]
        }
    assert len(spread["Batch-Train, 32"]) > 1 == len(spread["Layer, 32"])


def test_a_run_that_diverges_is_a_guess():
    config = unique.unique_rates.scales["smoke"]["None, 1.0"]
    found = unique.run(
        {
            **config,
            "train": {
                "epochs": 1,
                "batch": 32,
                "lr": 1e30,
                "schedule": "constant",
            },
        },
        seed=0,
    )
    assert found["metrics"]["diverged"] == 1 and "lr" not in found
    assert found["metrics"]["train_last"] == 10 and "at step" in found["why"]
    # of its test images those of the first class
    right = results.unpack_bits(found["test_right"])
    assert found["metrics"]["test_last"] == 100 * right.double().mean() == 9


# ---- two steps at paper scale ----


def images(folder, name):
    "A folder as the hub has it; returns the entry, of so many examples."
    entry = hub.ENTRIES[name]
    as_downloaded(name, folder / name)
    return dataclasses.replace(
        entry, examples=dict.fromkeys(entry.examples, COUNT)
    )


@pytest.mark.parametrize(
    "recipe, arm",
    [
        (unique.unique, "PreRegNorm"),
        (unique.unique_resnet50, "PreLayerNorm"),
        (unique.unique_resnet101, "BMLV"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_two_steps_on_a_folder_of_images(recipe, arm, tmp_path, monkeypatch):
    config = recipe.scales["paper"][arm]
    monkeypatch.setenv("NORMALNORM_DATASETS", str(tmp_path))
    monkeypatch.setitem(
        hub.ENTRIES, config["data"], images(tmp_path, config["data"])
    )
    found = unique.run(
        {
            **config,
            "model_arguments": SMALL[config["model"]],
            "train": {
                **config["train"],
                "epochs": 1,
                "steps": 2,
                "batch": 4,
                "warmup": 0,
            },
        },
        seed=0,
    )
    assert len(found["history"]) == 1 and found["test_right"]["count"] == COUNT
    assert ("train_penalty" in found["history"][0]) == ("RegNorm" in arm)


def test_two_steps_on_a_folder_of_text(tmp_path, monkeypatch):
    config = language.language_transformer.scales["paper"]["PreLN"]
    inside = tmp_path / "lm1b" / hub.ENTRIES["lm1b"].config
    inside.mkdir(parents=True)
    for source in hub.ENTRIES["lm1b"].examples:
        datasets.Dataset.from_dict(
            {
                "text": [
                    f"{source} {n} says something about the weather ü"
                    for n in range(1200)
                ]
            }
        ).to_parquet(inside / f"{source}-00000-of-00001.parquet")
    monkeypatch.setenv("NORMALNORM_DATASETS", str(tmp_path))
    found = language.run(
        {
            **config,
            "length": 16,
            "model_arguments": {**config["model_arguments"], **SMALL["gpt"]},
            "train": {
                **config["train"],
                "epochs": 1,
                "steps": 2,
                "batch": 4,
                "warmup": 0.0,
            },
        },
        seed=0,
    )
    assert 4 < found["metrics"]["loss_last"] < 7
    assert data.info("lm1b").classes == data.info(config["data"]).classes


def test_the_wide_network_before_training(monkeypatch):
    "26 layers, of which its committed rows are, with weight norm or without."
    seen, measure = [], unique.layer_correlations

    def watched(model, *how):
        seen.append(model)
        return measure(model, *how)

    monkeypatch.setattr(unique, "layer_correlations", watched)
    for norm in ("Layer", "Weight"):
        arm = f"skipless, {norm}"
        found = unique.wide_run(unique.wide_propagation.arms("book")[arm], 0)
        kept = results.by_arm("wide-propagation")[arm][0]["correlations"]
        assert len(kept) == 25
        assert found["correlations"] == pytest.approx(kept, abs=2e-3)
        convolutions = [
            m for m in seen.pop().modules() if isinstance(m, nn.Conv2d)
        ]
        assert len(convolutions) == 25  # 24 in the blocks and the stem
        assert all(
            nn.utils.parametrize.is_parametrized(m) == (norm == "Weight")
            for m in convolutions
        )


test_a_kind_that_is_not_known_is_refused = refusals(
    [
        (
            unique.unique_model,
            unique.unique.scales["smoke"]["Layer"],
            "'other'.*expected one of",
        ),
        (
            language.language_model,
            language.language_recurrent.scales["smoke"]["LN"],
            "'other'.*expected one of",
        ),
    ],
    lambda build, config: build({**config, "norm": {"kind": "other"}}, 0),
)
