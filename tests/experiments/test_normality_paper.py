"""The recipes of the first paper's tables: each arm is what its name says, at
the size of the paper, and makes two steps on a folder of its data's schema.
"""

import importlib.util

import numpy as np
import pytest
import torch

from normalnorm.experiments import data
from normalnorm.experiments.optimization import Settings, learning_rate
from normalnorm.experiments.recipes import first
from normalnorm.experiments.recipes.first import initial_model
from normalnorm.experiments.recipes.normality_paper import KINDS, PAPER
from normalnorm.experiments.tables import printed_table
from normalnorm.layers.families import named
from tests.experiments.test_real_folders import as_downloaded


@pytest.mark.usefixtures("nothing_is_drawn")
@pytest.mark.parametrize("name", PAPER)
def test_each_arm_at_the_size_of_the_paper(name):
    "On the meta device; a network is run with its first arm's normalizer."
    sizes, networks = set(), []
    for arm, config in PAPER[name].arms("paper").items():
        known, norm = data.info(config["data"]), config["norm"]
        plain, full, xi = KINDS[norm["kind"]]
        with torch.device("meta"):
            model = initial_model(config, 0).eval()
        if config["model_arguments"] not in networks:
            networks.append(config["model_arguments"])
            scores = model(torch.empty(1, *known.shape, device="meta"))
            assert scores.shape == (1, len(known.classes))
        if "widening" not in arm and "depth" not in arm:
            sizes.add(sum(p.numel() for p in model.parameters()))
        layers = [m for m in model.modules() if hasattr(m, "noise")]
        if arm.split(",")[0] == plain:
            twin = named(norm["kind"]).twin()
            assert set(map(type, layers)) <= {twin}
            assert twin in map(type, model.modules())
            continue
        first_word = arm.split(",")[0].split()[0]
        assert first_word in (plain, full) and layers
        kind = arm.split(", ")[-1]
        kind = kind if kind in ("unscaled", "dropout") else "scaled"
        degree = float(first_word == full)
        if "α" in arm:
            degree = float(arm.rpartition("α = ")[2])
        said = (
            f"noise={0.0 if 'without' in arm else xi}, noise_kind={kind}, "
            f"alpha={degree},"
        )
        assert all(said in repr(layer) for layer in layers), (arm, said)
    assert len(sizes) == 1


def test_every_printed_row_of_one_best_class_has_its_recipe():
    "And the numbers are those of the file."
    there = {
        (published.source.split(", ")[1], published.mean, published.se)
        for recipe in PAPER.values()
        for published in recipe.paper.values()
        if "reviews" not in published.source
    }
    printed = {
        (table, *entry)
        for table in ("Table 1", "Table 2", "Table 3")
        for row, arms in printed_table("eftekhari2025", table).items()
        if "top-5" not in row
        for (entry,) in arms.values()
    }
    assert there == printed and len(printed) == 28
    assert PAPER["resnet18-cifar10"].paper["BNN, augmented"].mean == 94.93
    assert PAPER["resnet9-cifar10"].paper["BN"].se is None


def test_rates_of_a_transformer_by_hand():
    "Up in 10 epochs, down a cosine for 50, again for 100, begun a third time."
    config = PAPER["vit-cifar10"].arms("paper")["LNN"]
    settings = Settings(**config["train"])
    rate = lambda epoch: learning_rate(settings, 10 * epoch, 2000)
    cosine = lambda part: 1e-6 + (1e-3 - 1e-6) * (1 + np.cos(np.pi * part)) / 2
    for epoch, wanted in (
        (0, 1e-4),
        (5, 5.5e-4),
        (10, 1e-3),
        (35, cosine(0.5)),
        (60, 1e-3),
        (110, cosine(0.5)),
        (160, 1e-3),
        (180, cosine(0.1)),
    ):
        assert rate(epoch) == pytest.approx(wanted), epoch


SMALL = {
    "vit": {"width": 16, "depth": 1, "heads": 2, "hidden": 16},
    "resnet": {"widths": [32] * 4, "blocks": [1] * 4},
    "wrn": {"depth": 10, "widening": 1},
}


# resnet50-food101: the network of caltech101, the data of vit-food101
@pytest.mark.parametrize(
    "name", [n for n in PAPER if "b16" not in n and n != "resnet50-food101"]
)
def test_two_steps_on_a_folder(name, tmp_path, no_hub):
    pytest.importorskip("datasets")
    if importlib.util.find_spec("PIL") is None:
        pytest.skip('pip install ".[experiments]"')
    network, of = name.rsplit("-", 1)
    as_downloaded(of, tmp_path / of)
    arms = PAPER[name].arms("paper")
    full = next(arm for arm in arms if arm in ("LNN", "BNN"))
    config = arms[full]
    options = config.get("options", dict.fromkeys(data.SPLITS, {}))
    small = next(
        (s for start, s in SMALL.items() if network.startswith(start)), {}
    )
    row = first.run(
        config
        | {
            "options": {
                split: one | {"folder": tmp_path / of, "partial": True}
                for split, one in options.items()
            },
            "model_arguments": config["model_arguments"]
            | ({"width": 8} if network == "resnet9" else small),
            "train": config["train"]
            | {"epochs": 1, "steps": 2, "batch": 4, "warmup": 0},
            "measure": config["measure"] | {"images": 8, "steps": 1}
            if "eps" in config["measure"]
            else {"images": 8},
        },
        0,
    )
    assert len(row["history"]) == 1
    assert set(PAPER[name].columns) <= set(row["metrics"])
    assert ("top5_last" in row["metrics"]) == (
        len(data.info(of).classes) >= 100
    )
    assert ("attenuation" in row) == ("eps" in config["measure"])
