"""The recipe of proxy normalization: each arm is what its name says, at each
scale; rows of the smallest.
"""

import pytest
import torch
from torch import nn

from normalnorm.experiments import data
from normalnorm.experiments.optimization import Settings
from normalnorm.experiments.recipes import proxy as module
from normalnorm.experiments.recipes import proxy_paper
from normalnorm.experiments.recipes.proxy import (
    NORMS,
    collapse,
    proxy,
    proxy_deep,
    proxy_model,
)
from normalnorm.layers.families import is_layer
from normalnorm.layers.proxy_norm import ProxyNorm

RECIPES = (proxy, proxy_deep, module.proxy_cifar100)


def of_kind(model, kind):
    return [m for m in model.modules() if isinstance(m, kind)]


@pytest.mark.parametrize(
    "recipe, scale",
    [(recipe, scale) for recipe in RECIPES for scale in recipe.scales],
)
def test_each_arm_is_what_its_name_says(recipe, scale):
    arms = recipe.scales[scale]
    assert set(arms) == {
        name + extra
        for extra in ("", ", regularized")
        for name in (*NORMS, "GN+PN and transform")
    }
    for name, config in arms.items():
        if recipe is proxy_deep and name not in ("BN", "GN+PN, regularized"):
            continue
        model = proxy_model(config, 0)
        shape, extra = data.info(config["data"]).shape, "regular" in name
        with torch.no_grad():
            out = model.eval()(torch.randn(2, *shape))
        assert out.shape == (2, len(data.info(config["data"]).classes))
        assert bool(of_kind(model, nn.BatchNorm2d)) == name.startswith("BN")
        assert bool(of_kind(model, ProxyNorm)) == ("PN" in name)
        transformed = any(is_layer(m) for m in model.modules())
        assert transformed == ("transform" in name)
        if name.startswith("LN"):
            assert {m.num_groups for m in of_kind(model, nn.GroupNorm)} == {1}
        settings = Settings(**config["train"])
        assert (settings.label_smoothing > 0) == extra == (model.dropout.p > 0)


def test_committed_rows_are_of_200_quantiles():
    "The rule is in none of their configurations: it must stay what it was."
    models = [
        *(
            make(config, 0)
            for recipe, make in (
                (proxy, proxy_model),
                *(
                    (one, proxy_paper.paper_model)
                    for one in (
                        proxy_paper.resnet50,
                        proxy_paper.efficientnet_b0,
                    )
                ),
            )
            for config in recipe.scales["smoke"].values()
            if config["norm"]["proxy"]
        ),
    ]
    found = [m.samples for model in models for m in of_kind(model, ProxyNorm)]
    assert len(found) > 50 and set(found) == {200}


def test_collapse_is_one_for_constants():
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.GroupNorm(1, 4))
    nn.init.zeros_(net[0].weight)
    assert collapse(net, torch.randn(3, 1, 2, 2)) == pytest.approx(1)


def test_what_the_paper_reports_stands_beside_the_arms():
    assert proxy.paper["GN+PN"].mean == 91.4
    assert proxy_deep.paper["GN, regularized"].mean == 92.9
    assert module.proxy_cifar100.paper["BN, regularized"].se == pytest.approx(
        0.2 / 10**0.5, abs=1e-3
    )
