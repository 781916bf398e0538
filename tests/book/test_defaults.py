"""What a function or class does when nothing is said: the defaults of the
papers, of torch.nn and of the documentation, for the whole package.
"""

import importlib
import inspect
import math
import pkgutil

import pytest
import torch

import normalnorm.analysis
import normalnorm.layers
import normalnorm.layers.engines
import normalnorm.theory

# one Newton step, all of it, no safeguard, scaled noise
DEFAULTS = {
    "activation": "relu",
    "affine": True,
    "alpha": 1.0,
    "attack": "pgd",
    "axes": (2, 3, 4, 5),
    "batch": 500,
    "beta_std": 0.0,
    "bias": True,
    "biases": False,
    "budget": math.inf,
    "c": 0.375,
    "cells": 1024,
    "center": True,
    "centre": True,
    "channels_last": False,
    "coordinates": -1,
    "dim": 0,
    "dtype": torch.float64,
    "elementwise_affine": True,
    "eps": 1e-5,
    "factor": (1, 1),
    "gamma_std": 0.0,
    "group_size": 16,
    "inplace": True,
    "iterations": 5,
    "k": 3,
    "light": False,
    "m": 3,
    "max_products": 1000,
    "mean": 0.0,
    "method": "eigh",
    "momentum": 0.1,
    "noise": 0.0,
    "noise_kind": "scaled",
    "noise_power": 1.0,
    "offset": 0,
    "parameters": False,
    "points": 600,
    "power": 1.0,
    "probes": 10,
    "rate": 1.0,
    "return_report": False,
    "rotation": "random",
    "rounds": 10,
    "running": (),
    "safeguard": False,
    "samples": "auto",
    "seed": 0,
    "separation": 0.8,
    "shift": 0.0,
    "sigma": 0.1,
    "spend": 1.0,
    "split": 0.5,
    "start": "random",
    "step": 1e-3,
    "steps": 1,
    "straight_through": False,
    "t": (3768, 10000),
    "target": (1879, 10000),
    "temperature": 0.1,
    "through_parameters": True,
    "times": 1,
    "tol": 1e-4,
    "tolerance": 1e-6,
    "track_running_stats": True,
    "training": False,
    "unit_rows": False,
    "use_input_stats": True,
    "variance": 1.0,
    "variant": 1,
    "vectors": 24,
    "weight_decay": 0.0,
}
# of a module's package, of a module, of one thing
OTHERS = {
    "theory": {"dim": -1, "eps": 0.0},
    "analysis": {"dim": -1},
    "robustness": {"steps": 10},
    "tails": {"steps": 0},
    "shares_of": {"bias": 0.0, "weight": 1.0},
    "correlation_map": {"power": False},
    "pairs": {"power": False},
    "parametrizations": {"eps": 1e-6},
    "proxy_norm": {"eps": 0.03},
    "collapse": {"beta_std": 0.2, "gamma_std": 0.2, "activation": torch.relu},
    "report_card": {"activation": torch.relu},
    "backends": {"momentum": 0.0},
    "native": {"momentum": 0.0},
    "henze_zirkler": {"dim": -2},
    "bhep": {"beta": 1.0},
    "mutual_information": {"method": "auto", "step": 1.5e-3},
    "excess_mutual_information": {"method": "auto"},
    "power_transform_derivative": {"k": 1},
    "whitening_matrix": {"eps": 1e-5},
    "least_dependent": {"tolerance": 1e-10},
    "mirror_play": {"steps": 1000},
    "blahut_arimoto": {"iterations": 10_000},
    "require_positive": {"rounds": 30},
    "channel_rule": {"points": 12},
    "easy_curvature_bound": {"c": (6701, 10000)},
    "igmm": {"steps": 12},
    "Tail": {"steps": 0, "method": "deviation"},
    "hessian_density": {"steps": 80},
    "Family": {"axes": ""},
    "Statistics": {"parameters": ()},
    "normalize_and_track": {"momentum": 0.0},
    "groups_by_type": {"weight_decay": 0.01},
    "fold": {"tolerance": 0.0},
    "to_proxy_norm": {"eps": 0.03},
    "FilterResponseNorm": {"eps": 1e-6},
    "update_bn": {"noise": True},
    "derf": {"alpha": 0.5},
    "stream": {"cosine": 0.0, "gain": 1.0},
    **{
        f"InstanceNormalNorm{d}d": {
            "affine": False,
            "track_running_stats": False,
        }
        for d in (1, 2, 3)
    },
    **dict.fromkeys(("LayerNormalNorm", "LayerNormalNorm2d"), {"noise": 1.0}),
    **dict.fromkeys(
        (
            "BatchNormalNorm1d",
            "BatchNormalNorm2d",
            "BatchNormalNorm3d",
            "DecorrelatedBatchNormalNorm1d",
            "DecorrelatedBatchNormalNorm2d",
            "GroupNormalNorm",
            "batch_normal_norm",
            "decorrelated_batch_normal_norm",
        ),
        {"noise": 0.4},
    ),
}
MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (
        normalnorm.theory,
        normalnorm.analysis,
        normalnorm.layers,
        normalnorm.layers.engines,
    )
    for module in pkgutil.iter_modules(package.__path__)
    if not module.ispkg
]


@pytest.mark.parametrize("name", MODULES)
def test_defaults(name):
    module = importlib.import_module(name)
    _, package, *_, last = name.split(".")
    for thing in getattr(module, "__all__", []):
        made = getattr(module, thing)
        if not callable(made) or made.__module__ != name:
            continue
        if isinstance(made, type) and issubclass(made, Exception):
            continue
        expected = dict(DEFAULTS)
        for of in (package, last, thing):
            expected |= OTHERS.get(of, {})
        for word, parameter in inspect.signature(made).parameters.items():
            value = parameter.default
            if word in expected and value not in (inspect._empty, None):
                assert value == expected[word], (thing, word)
                assert type(value) is type(expected[word]), (thing, word)
