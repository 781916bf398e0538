"""The correlation map of layer norm beside neural-tangents, an implementation
of somebody else's for infinite width. It needs a jax of its time, so that its
numbers are kept: results/neural-tangents.json, by tools/peer_maps.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from normalnorm.theory.correlation_map import correlation_map

ROW = json.loads(
    (
        Path(__file__).resolve().parents[2] / "results/neural-tangents.json"
    ).read_text()
)


@pytest.mark.parametrize("activation", ROW["found"])
def test_layer_norm_s_map_is_that_of_neural_tangents(activation):
    assert len(ROW["correlations"]) == 6 and set(ROW["found"]) == {
        "relu",
        "leaky_relu",
        "abs",
        "gelu",
    }
    for beta, found in ROW["found"][activation].items():
        step = lambda c, b=float(beta): correlation_map(
            c, activation, "layer", beta_std=b
        )
        np.testing.assert_allclose(
            [step(c) for c in ROW["correlations"]],
            found["one layer"],
            rtol=0,
            atol=1e-9,
        )
        c, walk = ROW["start"], []
        for _ in found["layer by layer"]:
            c = step(c)
            walk.append(c)
        assert len(walk) == 12
        np.testing.assert_allclose(
            walk, found["layer by layer"], rtol=0, atol=1e-7
        )
