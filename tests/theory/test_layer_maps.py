"""The layers of chapter 480: its record, and what it says of theirs.
`python -m tests.theory.test_layer_maps` makes results/layer-maps.json anew.
"""

import datetime
import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from normalnorm.theory.correlation_map import correlation_map, slope
from tests.peers import installed

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "results" / "layer-maps.json"
CHAPTER = "480_map_of_the_layers"
NETS, WIDTH, DEPTH, START = 8, 512, 40, 0.2
LAYERS = (1, 2, 5, 10, 20, 40)
DRAWN = {
    "GroupNormalNorm, 8 values": ("group", {"group": 8, "noise": 0.4}),
    "InstanceNormalNorm, 16 positions": (
        "instance",
        {"group": 16, "noise": 0.4},
    ),
    "BatchNormalNorm1d": ("batch", {"batch": 16, "noise": 0.4}),
}
CORRELATIONS = (0.0, 0.15, 0.35, 0.6, 0.8, 0.98)


@cache
def chapter():
    "What the chapter's first three cells of code define: they read no record."
    installed("IPython")
    cells = json.loads((ROOT / "nbs" / f"{CHAPTER}.ipynb").read_text("utf-8"))[
        "cells"
    ]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    names = {}
    exec("\n".join(code[:3]), names)
    return names


def deep(case, seed, width=WIDTH, depth=DEPTH):
    "Correlation, layer by layer, in a network of one layer again and again."
    of, found = chapter(), []
    torch.manual_seed(seed)
    with torch.no_grad():
        z = of["samples"](case, width, START)
        for _ in range(depth):
            z = case.make(width)(z)
            found.append(of["correlation"](case, z))
    return np.array(found)


@pytest.fixture(scope="module")
def row():
    return json.loads(RECORD.read_text("utf-8"))


def test_the_record_has_each_layer(row):
    cases = chapter()["CASES"]
    summary = row["summary"]
    assert {c.name for c in cases if c.deep} == set(summary["deep"])
    assert (
        {c.name for c in cases if not c.predicted}
        == set(summary["drawn"])
        == set(DRAWN)
    )
    assert row["nets"] >= 8 and row["layers"][-1] == DEPTH


def test_the_drawn_units_are_of_this_theory(row):
    for name in list(DRAWN)[::2]:
        (norm, settings), entry = DRAWN[name], row["summary"]["drawn"][name]
        assert correlation_map(
            entry["c"][2], "relu", norm, power=True, **settings
        ) == pytest.approx(entry["F"][2], abs=1e-6)
    norm, settings = DRAWN["GroupNormalNorm, 8 values"]
    assert slope("relu", norm, power=True, **settings) == pytest.approx(
        row["summary"]["drawn"]["GroupNormalNorm, 8 values"]["slope"], rel=1e-4
    )


@pytest.mark.parametrize(
    "name",
    [
        "LayerNorm",
        "BatchNorm1d",
        "PreLayerNormLinear",
        "GroupNorm, 8 values, ProxyNorm",
    ],
)
def test_a_small_network_does_what_the_record_says(name, row):
    case = next(c for c in chapter()["CASES"] if c.name == name)
    nets = np.mean([deep(case, seed, 200, 5)[4] for seed in range(4)])
    entry = row["summary"]["deep"][name]
    assert abs(nets - entry["mean"][LAYERS.index(5)]) < 0.05


def test_the_settled_power_of_evonorm():
    "By mpmath: E silu(√q t)² = q²."
    import mpmath as mp

    of = chapter()
    power = mp.quad(
        lambda t: (
            (
                math.sqrt(of["POWER"])
                * t
                / (1 + mp.exp(-math.sqrt(of["POWER"]) * t))
            )
            ** 2
            * mp.npdf(t)
        ),
        [-12, 0, 12],
    )
    assert float(power) == pytest.approx(of["POWER"] ** 2, rel=1e-8)


def record():
    from normalnorm.experiments.results import provenance

    of, drawn, found = chapter(), {}, {}
    for name, (norm, settings) in DRAWN.items():
        drawn[name] = {
            "c": CORRELATIONS,
            "F": [
                round(
                    correlation_map(c, "relu", norm, power=True, **settings), 7
                )
                for c in CORRELATIONS
            ],
            "slope": round(slope("relu", norm, power=True, **settings), 6),
        }
        print(name, drawn[name], flush=True)
    for k, case in enumerate(c for c in of["CASES"] if c.deep):
        nets = np.array([deep(case, 100 * k + seed) for seed in range(NETS)])[
            :, np.array(LAYERS) - 1
        ]
        found[case.name] = {
            "mean": np.round(nets.mean(0), 6).tolist(),
            "error": np.round(nets.std(0, ddof=1) / NETS**0.5, 6).tolist(),
        }
        print(case.name, found[case.name], flush=True)
    row = {
        "what": "mean correlation of sixteen inputs, of 0.2 at first, in "
        "networks of layers of chapter 480, ReLU, as initialized; "
        "drawn: F and F'(1) of finite units with transform and "
        "noise, a mean over two million and a million values",
        "ran": "python -m tests.theory.test_layer_maps",
        "date": str(datetime.date.today()),
        "width": WIDTH,
        "nets": NETS,
        "layers": LAYERS,
        "versions": {"torch": torch.__version__},
        **provenance(),
        "summary": {"drawn": drawn, "deep": found},
    }
    RECORD.write_text(
        json.dumps(row, indent=1, ensure_ascii=False) + "\n", "utf-8"
    )


if __name__ == "__main__":
    record()
