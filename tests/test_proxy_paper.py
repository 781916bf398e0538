"""The recipes of the paper's tables: each arm is what its name says, at the
size of the paper, and makes two steps on a folder of its data's schema.
"""
import importlib.util

import pytest
import torch
from test_real_folders import as_downloaded, made
from torch import nn

from normalnorm.experiments import hub, results
from normalnorm.experiments.optimization import Settings, groups_by_name
from normalnorm.experiments.recipes import proxy
from normalnorm.experiments.recipes import proxy_paper as module
from normalnorm.experiments.recipes.proxy_paper import (
    IMAGENET,
    KINDS,
    PUBLISHED,
    TRAINING,
    paper_model,
    paper_run,
    printed,
)
from normalnorm.layers.hybrids import EvoNorm2d
from normalnorm.layers.normalizers import FilterResponseNorm
from normalnorm.layers.parametrizations import StandardizedWeight
from normalnorm.layers.proxy_norm import ProxyNorm

KNOWN = results.recipes()
NAMES = {network: f"proxy-norm-{network.lower().replace(', ', '-')}"
         for network in IMAGENET}
SWEEPS = ("proxy-norm-eps", "proxy-norm-small-batch")
DEPTHS = [name for name in KNOWN if name.startswith("proxy-norm-cifar")]


def count(model, kind):
    return sum(isinstance(m, kind) for m in model.modules())


# On the meta device the conversion cannot try what an activation does, and
# names layers that it leaves alone anyway.
@pytest.mark.filterwarnings("ignore:left as they are")
@pytest.mark.parametrize("network", IMAGENET)
def test_each_arm_at_the_size_of_the_paper(network):
    "On the meta device, where nothing is computed."
    recipe = KNOWN[NAMES[network]]
    for name, config in recipe.scales["paper"].items():
        assert Settings(**config["train"]).epochs in (100, 350)
        if name not in IMAGENET[network][3]:
            continue                    # regularized: the same network
        with torch.device("meta"):
            model = paper_model(config, 0)
        assert bool(count(model, ProxyNorm)) == ("PN" in name), name
        assert bool(count(model, nn.BatchNorm2d)) == name.startswith("BN")
        assert bool(count(model, StandardizedWeight)) == ("WS" in name)
        assert bool(count(model, EvoNorm2d)) == name.startswith("Evo")
        assert bool(count(model, FilterResponseNorm)) == ("FRN" in name)
        groups = {m.num_groups for m in model.modules()
                  if isinstance(m, nn.GroupNorm)}
        wanted = {"LN": 1, "LN+PN": 1, "GN": 32, "GN32+PN": 32}.get(name, 8)
        assert groups <= {4 if "Efficient" in network else wanted}, name
        if "PN" in name:
            assert not model.get_submodule(
                "norm.1" if name == "BN+PN" else "act").scale
        decays = groups_by_name(model, Settings(**config["train"]))
        if "Efficient" in network:
            own = "PN" in name and "plain" not in name
            assert any(p.ndim == 1 for p in decays[0]["params"]) == own
        else:
            assert len(decays) == 1     # weight decay on everything


@pytest.mark.filterwarnings("ignore:left as they are")
def test_parameters_of_the_networks_by_hand():
    "PN adds β̃ and γ̃; without them and with BN there are as many as printed."
    for network, number in (("ResNet-50", 25_549_352),
                            ("EfficientNet-B0", 5_288_548)):
        arms = KNOWN[NAMES[network]].scales["paper"]
        with torch.device("meta"):
            found = {arm: sum(p.numel() for p in paper_model(
                arms[arm], 0).parameters())
                for arm in ("BN", "GN", "GN+PN, plain proxy", "GN+PN")}
        assert found["BN"] == found["GN"] == found[
            "GN+PN, plain proxy"] == number
        assert found["GN+PN"] > number


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "Folders of ImageNet's and CIFAR's schema, as the hub has them."
    pytest.importorskip("datasets")
    if importlib.util.find_spec("PIL") is None:
        pytest.skip("pip install normalnorm[experiments]")
    above = tmp_path_factory.mktemp("sets")
    for name, inside, config in (("imagenet", "data", None),
                                 ("cifar10", "plain_text", None),
                                 ("cifar100", "cifar100", "cifar100")):
        as_downloaded(made(name), above / name, inside, config)
    return above


def reduced(config, folders):
    "The arm's own data, changes, optimizer and layers; a smaller network."
    name = config["data"]
    part = {"folder": folders / name, "partial": True} | (
        {"size": 64} if name == "imagenet" else {})
    efficient = "efficient" in config["model"]
    arguments = config["model_arguments"] | (
        {"width": 0.5, "depth": 0.1, "head": 64} if efficient else
        {"blocks": [1, 1], "widths": [32, 32]} if name == "imagenet" else
        {"depth": 8})
    changes = ["resizedcrop 64" if "resizedcrop" in str(change) else change
               for change in config["augmentation"]]
    train = config["train"] | {"epochs": 1, "steps": 2, "warmup": 0,
                               "batch": 8, "milestones": []}
    train["accumulate"] = min(train.get("accumulate", 1), 2)
    norm = config["norm"]
    return config | {"model_arguments": arguments, "augmentation": changes,
                     "train": train, "norm": norm, "images": None,
                     "options": dict.fromkeys(
                         ("train", "validation", "test"), part)}


def two_steps(recipe, arm, folders, seed=0):
    config = reduced(recipe.scales["paper"][arm], folders)
    row = recipe.run(config, seed)
    assert len(row["history"]) == 1 and set(recipe.columns) <= set(
        row["metrics"]), arm
    assert 0 <= row["metrics"]["collapse_after"] <= 1
    return config


def chosen(network):
    """Each normalizer once in the first network of its kind, otherwise group
    norm with PN; regularization in turn.
    """
    recipe = KNOWN[NAMES[network]]
    first = network in ("ResNet-50", "EfficientNet-B0")
    names = list(IMAGENET[network][3]) if first else ["GN+PN"]
    return [next(name + kind for kind in (KINDS[k % 3], "")
                 if name + kind in recipe.scales["paper"])
            for k, name in enumerate(names, 1)]


@pytest.mark.parametrize("network", IMAGENET)
def test_two_steps_on_a_folder_of_imagenet(network, folders):
    for arm in chosen(network):
        two_steps(KNOWN[NAMES[network]], arm, folders)


@pytest.mark.parametrize("name", [*DEPTHS, *SWEEPS])
def test_two_steps_of_depths_and_sweeps(name, folders):
    recipe = KNOWN[name]
    for arm in list(recipe.scales["paper"])[:None if name in SWEEPS else 1]:
        two_steps(recipe, arm, folders)


def test_the_smallest_scale_of_each_makes_a_step():
    for name in [*list(NAMES.values())[::2], *SWEEPS]:
        arm, config = list(KNOWN[name].scales["smoke"].items())[-1]
        train = config["train"] | {"steps": 1}
        row = KNOWN[name].run(config | {"train": train}, 0)
        assert row["metrics"].keys() >= KNOWN[name].columns.keys(), (name, arm)


def test_batch_norm_sees_what_its_arm_says():
    for scale, arms in KNOWN["proxy-norm-small-batch"].scales.items():
        for part in module.PARTS:
            train = arms[f"BN over {part}"]["train"]
            assert train["batch"] // train["accumulate"] == part, scale
    for network, name in NAMES.items():
        train = KNOWN[name].scales["paper"]["BN"]["train"]
        assert train["batch"] / train["accumulate"] == (
            64 if "Efficient" in network else 32)


def test_the_numbers_are_whole_and_agree_with_those_of_the_other_chapters():
    from normalnorm.checks.experiments.recipes import proxy as other
    from normalnorm.checks.rivals import TABLE_2
    for network in IMAGENET:
        assert set(PUBLISHED[network]) == set(IMAGENET[network][3])
        for arm in TRAINING[network]:
            assert len(printed(network, arm, True)) == 2
        recipe = KNOWN[NAMES[network]]
        assert recipe.paper["GN+PN"].mean == printed(network, "GN+PN")[0][0]
    means = lambda network, arm, training=False: tuple(
        mean for mean, _ in printed(network, arm, training))[:2]
    for row, plain, cured in (("BN", "BN", "BN+PN"), ("LN", "LN", "LN+PN"),
                              ("GN8", "GN8", "GN+PN"),
                              ("GN32", "GN", "GN32+PN"),
                              ("GN8+WS", "GN8+WS", "GN8+WS+PN")):
        both = means("ResNet-50", plain), means("ResNet-50", cured)
        assert other.VALIDATION[row] == both[0] + both[1]
        if row != "BN":
            assert other.TRAINING[row] == means(
                "ResNet-50", plain, True) + means("ResNet-50", cured, True)
        named = row if row in TABLE_2 else {
            "GN8": "GN, 8 groups", "GN32": "GN, 32 groups",
            "GN8+WS": "GN+WS, 8 groups"}[row]
        assert TABLE_2[named] == both
    for k, network in enumerate(IMAGENET):
        assert other.GROUP[k] == means(network, "GN")
        assert other.PROXY[k] == means(network, "GN+PN")
        assert other.OMITTED[k] == means(network, "GN+PN, plain proxy")


def test_depths_are_those_of_the_tables():
    for name, depth in ((n, int(n.rpartition("-")[2])) for n in DEPTHS
                        if n.count("-") == 3):
        arms = KNOWN[name].scales["paper"]
        assert {c["model_arguments"]["depth"] for c in arms.values()} == {depth}
        data = arms["BN"]["data"]
        assert KNOWN[name].paper["GN"].mean == proxy.published(
            data, "GN")[proxy.DEPTHS.index(depth)][0]


def test_entries_of_the_hub_are_untouched():
    assert hub.ENTRIES["imagenet"].examples["train"] == 1_281_167
    assert paper_run.keywords == {"build": paper_model}
