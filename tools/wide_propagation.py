"""Two disturbed minibatches in the paper's wide network:
results/wide-propagation.json.

    python -m tools.wide_propagation            what is not there yet
    python -m tools.wide_propagation --only skipless/Batch --again

Two CPU minutes on one core. A network with one normalizer is a part.
"""

from functools import partial
from pathlib import Path

from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from normalnorm.analysis import propagation
from normalnorm.experiments.data import data_hash, load
from normalnorm.experiments.recipes.unique import unique_model
from tools import parts

RECORD = (
    Path(__file__).resolve().parent.parent / "results" / "wide-propagation.json"
)
SEEDS, IMAGES, SIGMA = 4, 64, 0.3
NETWORKS = {"skipless": "wrn28-2_skipless", "skips": "wrn28-2"}
NORMS = (
    "None",
    "Weight",
    "Layer",
    "RegNorm",
    "LMBV",
    "PreLayerNorm",
    "BMLV",
    "Batch",
)


def network(kind: str, norm: str, seed: int) -> nn.Module:
    "With the initial weights of `seed`, the same for all normalizers."
    net = unique_model(
        {
            "model": NETWORKS[kind],
            "model_arguments": {"channels": 1},
            "norm": {"kind": "None" if norm == "Weight" else norm},
        },
        seed,
    )
    if norm == "Weight":
        for module in list(net.modules()):
            if isinstance(module, nn.Conv2d):
                weight_norm(module)
    return net


def curves(kind: str, norm: str) -> list[list[float]]:
    """For each seed the correlation before each of the 25 activations: behind
    the normalizer that stands there, or where one could.
    """
    found = []
    for seed in range(SEEDS):
        net = network(kind, norm, seed)
        places = [f"stages.{i}.norm{k}" for i in range(12) for k in (1, 2)]
        x, _ = load("fashion", "train", IMAGES, draw=seed)
        seen = propagation.layer_correlations(
            net, x, SIGMA, seed, [*places, "norm"]
        )
        found.append([round(seen[name], 5) for name in (*places, "norm")])
    return found


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    return parts.run(
        __doc__,
        RECORD,
        [
            ((kind, norm), partial(curves, kind, norm))
            for kind in NETWORKS
            for norm in NORMS
        ],
        {
            "seeds": SEEDS,
            "images": IMAGES,
            "sigma": SIGMA,
            "networks": NETWORKS,
            "data": data_hash("fashion"),
        },
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
