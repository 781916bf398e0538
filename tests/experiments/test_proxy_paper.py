"""The recipes of the paper's tables: each arm is what its name says, at the
size of the paper, and makes two steps on a folder of its data's schema.
"""

import functools
import importlib.util
import json

import pytest
import torch
from torch import nn

from normalnorm.experiments import results
from normalnorm.experiments.optimization import Settings, groups_by_name
from normalnorm.experiments.recipes import first, proxy
from normalnorm.experiments.recipes import proxy_paper as module
from normalnorm.experiments.recipes.proxy_paper import (
    IMAGENET,
    KINDS,
    PUBLISHED,
    TRAINING,
    paper_model,
    printed,
)
from normalnorm.layers.hybrids import EvoNorm2d
from normalnorm.layers.normalizers import FilterResponseNorm
from normalnorm.layers.parametrizations import StandardizedWeight
from normalnorm.layers.proxy_norm import ProxyNorm
from tests.experiments.test_proxy_recipe import of_kind
from tests.experiments.test_real_folders import as_downloaded

KNOWN = results.recipes()
NAMES = {
    network: f"proxy-norm-{network.lower().replace(', ', '-')}"
    for network in IMAGENET
}
# what is in the name of an arm, and in its network
MARKS = {
    "PN": ProxyNorm,
    "BN": nn.BatchNorm2d,
    "WS": StandardizedWeight,
    "Evo": EvoNorm2d,
    "FRN": FilterResponseNorm,
}
SWEEPS = ("proxy-norm-eps", "proxy-norm-small-batch")
DEPTHS = [name for name in KNOWN if name.startswith("proxy-norm-cifar")]
SMOKE = [
    (name, arm)
    for name in (*NAMES.values(), *SWEEPS)
    for arm in KNOWN[name].scales.get("smoke", ())
]


# On the meta device the conversion cannot try what an activation does, and
# names layers that it leaves alone anyway.
@pytest.mark.filterwarnings("ignore:left as they are")
@pytest.mark.usefixtures("nothing_is_drawn")
@pytest.mark.parametrize("network", IMAGENET)
def test_each_arm_at_the_size_of_the_paper(network):
    "On the meta device, where nothing is computed."
    recipe = KNOWN[NAMES[network]]
    for name, config in recipe.scales["paper"].items():
        assert Settings(**config["train"]).epochs in (100, 350)
        if name not in IMAGENET[network][3]:
            continue  # regularized: the same network
        with torch.device("meta"):
            model = paper_model(config, 0)
        kinds = {mark for mark, kind in MARKS.items() if of_kind(model, kind)}
        assert kinds == {mark for mark in MARKS if mark in name}, name
        groups = {m.num_groups for m in of_kind(model, nn.GroupNorm)}
        wanted = {"LN": 1, "LN+PN": 1, "GN": 32, "GN32+PN": 32}.get(name, 8)
        assert groups <= {4 if "Efficient" in network else wanted}, name
        if "PN" in name:
            assert not of_kind(model, ProxyNorm)[-1].scale
        decays = groups_by_name(model, Settings(**config["train"]))
        if "Efficient" in network:
            own = "PN" in name and "plain" not in name
            assert any(p.ndim == 1 for p in decays[0]["params"]) == own
        else:
            assert len(decays) == 1  # weight decay on everything


@pytest.mark.filterwarnings("ignore:left as they are")
@pytest.mark.usefixtures("nothing_is_drawn")
def test_parameters_of_the_networks_by_hand():
    "PN adds β̃ and γ̃; without them and with BN there are as many as printed."
    for network, number in (
        ("ResNet-50", 25_549_352),
        ("EfficientNet-B0", 5_288_548),
    ):
        arms = KNOWN[NAMES[network]].scales["paper"]
        with torch.device("meta"):
            found = {
                arm: sum(
                    p.numel() for p in paper_model(arms[arm], 0).parameters()
                )
                for arm in ("BN", "GN", "GN+PN, plain proxy", "GN+PN")
            }
        assert (
            found["BN"] == found["GN"] == found["GN+PN, plain proxy"] == number
        )
        assert found["GN+PN"] > number


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of ImageNet's and CIFAR's schema, as the hub has them; each split
    is opened once for all arms that read it.
    """
    pytest.importorskip("datasets")
    if importlib.util.find_spec("PIL") is None:
        pytest.skip('pip install ".[experiments]"')
    above = tmp_path_factory.mktemp("sets")
    for name in ("imagenet", "cifar10", "cifar100"):
        as_downloaded(name, above / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first, "dataset", functools.cache(first.dataset))
        yield above


def reduced(config, folders):
    "The arm's own data, changes, optimizer and layers; a smaller network."
    name = config["data"]
    efficient = "efficient" in config["model"]
    side = 48 if efficient else 32  # a batch norm of one image needs 2 × 2
    part = {"folder": folders / name, "partial": True} | (
        {"size": side} if name == "imagenet" else {}
    )
    arguments = config["model_arguments"] | (
        {"width": 0.5, "depth": 0.1, "head": 64}
        if efficient
        else {"blocks": [1, 1], "widths": [32, 32]}
        if name == "imagenet"
        else {"depth": 8}
    )
    changes = [
        f"resizedcrop {side}" if "resizedcrop" in str(change) else change
        for change in config["augmentation"]
    ]
    train = config["train"] | {
        "epochs": 1,
        "steps": 2,
        "warmup": 0,
        "batch": 8,
        "milestones": [],
    }
    train["accumulate"] = min(train.get("accumulate", 1), 2)
    norm = config["norm"]
    return config | {
        "model_arguments": arguments,
        "augmentation": changes,
        "train": train,
        "norm": norm,
        "images": None,
        "options": dict.fromkeys(("train", "validation", "test"), part),
    }


def two_steps(recipe, arm, folders):
    config = reduced(recipe.scales["paper"][arm], folders)
    row = recipe.run(config, 0)
    assert len(row["history"]) == 1 and set(recipe.columns) <= set(
        row["metrics"]
    ), arm
    assert 0 <= row["metrics"]["collapse_after"] <= 1
    return config


def chosen(network):
    """Group norm with PN, in the first network of its kind batch norm too, by
    parts of a step; regularization in turn. Others are at the smallest scale.
    """
    names = ["GN+PN", "BN"][: 1 + (network in ("ResNet-50", "EfficientNet-B0"))]
    return [
        next(
            name + kind
            for kind in (KINDS[k % 3], "")
            if name + kind in KNOWN[NAMES[network]].scales["paper"]
        )
        for k, name in enumerate(names, 1)
    ]


# the other four differ in depth and width, which `reduced` replaces
@pytest.mark.parametrize(
    "network",
    ["ResNet-50", "ResNeXt-101", "EfficientNet-B0", "EfficientNet-B2, groups"],
)
def test_two_steps_on_a_folder_of_imagenet(network, folders):
    for arm in chosen(network):
        two_steps(KNOWN[NAMES[network]], arm, folders)


@pytest.mark.parametrize(
    "name, arm",
    [
        ("proxy-norm-cifar10-32", "BN"),
        ("proxy-norm-cifar100-32", "GN+PN and transform, regularized"),
        ("proxy-norm-eps", "ε = 0.1"),
        ("proxy-norm-small-batch", "BN over 2"),
    ],
)
def test_two_steps_of_depths_and_sweeps(name, arm, folders):
    two_steps(KNOWN[name], arm, folders)


@pytest.mark.parametrize("name, arm", SMOKE)
def test_the_smallest_scale_of_each_way_makes_a_step(name, arm):
    config = KNOWN[name].scales["smoke"][arm]
    train = config["train"] | {"steps": 1}
    row = KNOWN[name].run(config | {"train": train}, 0)
    assert row["metrics"].keys() >= KNOWN[name].columns.keys()


def test_no_way_has_two_runs():
    "Normalizer, family, regularization and changes, whatever the network."
    seen = [
        json.dumps(KNOWN[name].scales["smoke"][arm], sort_keys=True)
        for name, arm in SMOKE
    ]
    assert len(set(seen)) == len(seen) == 26


def test_batch_norm_sees_what_its_arm_says():
    for scale, arms in KNOWN["proxy-norm-small-batch"].scales.items():
        for part in module.PARTS:
            if f"BN over {part}" in arms:
                train = arms[f"BN over {part}"]["train"]
                assert train["batch"] // train["accumulate"] == part, scale
    for network, name in NAMES.items():
        train = KNOWN[name].scales["paper"]["BN"]["train"]
        assert train["batch"] / train["accumulate"] == (
            64 if "Efficient" in network else 32
        )


def test_the_numbers_are_whole_and_those_of_the_catalogue():
    "Of every arm a number; Tables 2 and 3 as they were copied apart from ours."
    for network in IMAGENET:
        assert set(PUBLISHED[network]) == set(IMAGENET[network][3])
        assert set(TRAINING[network]) <= set(PUBLISHED[network])
        assert all(
            len(printed(network, arm, True)) == 2 for arm in TRAINING[network]
        )
        assert all(
            70 < mean < 90 and 0 <= sd <= 0.3
            for kept in (PUBLISHED, TRAINING)
            for entry in kept[network].values()
            for mean, sd in entry
            if kept is PUBLISHED or mean > 70
        )
        recipe = KNOWN[NAMES[network]]
        assert recipe.paper["GN+PN"].mean == printed(network, "GN+PN")[0][0]
    means = lambda *where: " ".join(f"{v:.1f}" for v, _ in printed(*where)[:2])
    for arm, numbers in {
        "BN": "76.3 75.8",
        "BN+PN": "76.2 76.0",
        "LN": "74.5 74.6",
        "LN+PN": "75.9 76.5",
        "GN8": "75.4 75.4",
        "GN+PN": "76.3 76.7",
        "GN": "75.4 75.3",
        "GN32+PN": "75.8 76.1",
        "GN8+WS": "76.6 76.7",
        "GN8+WS+PN": "76.8 77.1",
    }.items():
        assert means("ResNet-50", arm) == numbers
    for arm, numbers in {
        "BN": ("77.9 78.0", "77.6 77.2", "78.7 78.9"),
        "GN": ("77.0 77.4", "76.2 76.6", "77.4 78.1"),
        "GN+PN": ("77.6 78.6", "76.7 77.8", "77.7 79.0"),
    }.items():
        assert numbers == tuple(
            means(network, arm)
            for network in ("ResNet-101", "ResNeXt-50", "ResNeXt-101")
        )
    assert means("ResNet-50", "GN8", True) == "77.2 73.3"
    assert means("ResNet-50", "GN8+WS+PN", True) == "80.4 76.3"


def test_depths_are_those_of_the_tables():
    for name, depth in (
        (n, int(n.rpartition("-")[2])) for n in DEPTHS if n.count("-") == 3
    ):
        arms = KNOWN[name].scales["paper"]
        assert {c["model_arguments"]["depth"] for c in arms.values()} == {depth}
        data = arms["BN"]["data"]
        assert (
            KNOWN[name].paper["GN"].mean
            == proxy.published(data, "GN")[proxy.DEPTHS.index(depth)][0]
        )
