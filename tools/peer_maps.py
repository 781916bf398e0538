"""What neural-tangents says of layer norm's map: results/neural-tangents.json.

    python -m venv FOLDER
    FOLDER/bin/pip install neural-tangents==0.6.5
    FOLDER/bin/pip install "jax==0.4.30" "jaxlib==0.4.30" "numpy<2" "scipy<1.14"
    FOLDER/bin/python tools/peer_maps.py

In an environment of its own: the package is archived and needs a jax of 2024,
which its tf2jax, used for TensorFlow's models only, does not bear; a module of
nothing stands in for that. Nothing of normalnorm is imported. Seconds.
"""

import datetime
import importlib
import json
import math
import platform
import sys
import types
from pathlib import Path
from typing import Any

RECORD = (
    Path(__file__).resolve().parent.parent / "results" / "neural-tangents.json"
)
BETAS, START, DEPTH = (0.0, 0.2), 0.1, 12
CORRELATIONS = (-0.9, -0.5, 0.0, 0.3, 0.7, 0.95)


def correlations(
    stax: Any, phi: Any, beta_std: float, c: float, depth: int
) -> list[float]:
    """The correlation of two inputs of power 1 after 1, …, `depth` layers, each
    of layer norm, β, the activation and weights.
    """
    import numpy as np

    x = math.sqrt(2) * np.array([[1.0, 0.0], [c, math.sqrt(1 - c * c)]])
    layers, found = [stax.Dense(1)], []
    for _ in range(depth):
        # a dense layer without activation adds β's variance to a covariance
        layers += [
            stax.LayerNorm(),
            stax.Dense(1, 1.0, beta_std),
            phi,
            stax.Dense(1),
        ]
        kernel = np.asarray(stax.serial(*layers)[2](x, x, "nngp"))
        found.append(kernel[0, 1] / math.sqrt(kernel[0, 0] * kernel[1, 1]))
    return [float(v) for v in found]


def main() -> None:
    "Write the record."
    sys.modules.setdefault("tf2jax", types.ModuleType("tf2jax"))
    jax = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", True)
    peer = importlib.import_module("neural_tangents")
    stax = peer.stax
    kinds = {
        "relu": stax.Relu(),
        "leaky_relu": stax.LeakyRelu(0.01),
        "abs": stax.Abs(),
        "gelu": stax.Gelu(),
    }
    RECORD.write_text(
        json.dumps(
            {
                "date": datetime.date.today().isoformat(),
                "python": platform.python_version(),
                "processor": platform.machine(),
                "torch": None,
                "jax": jax.__version__,
                "neural-tangents": peer.__version__,
                "correlations": CORRELATIONS,
                "start": START,
                "found": {
                    name: {
                        str(beta): {
                            "one layer": [
                                correlations(stax, phi, beta, c, 1)[0]
                                for c in CORRELATIONS
                            ],
                            "layer by layer": correlations(
                                stax, phi, beta, START, DEPTH
                            ),
                        }
                        for beta in BETAS
                    }
                    for name, phi in kinds.items()
                },
            },
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
