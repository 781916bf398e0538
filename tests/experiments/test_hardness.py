"""The recipe of six models on the glyphs: the linear one against another
solver, what a seed draws, and a committed run again.
"""

import numpy as np
import pytest
import torch

from normalnorm.experiments import data
from normalnorm.experiments.recipes import hardness
from normalnorm.experiments.results import by_arm


def _squares(parts, penalty):
    """Accuracies in percent of the penalized least squares on one-hot labels:
    rows for the penalty below the images, and numpy's solver. No kernel matrix.
    """
    x, y = (part.numpy() for part in parts["train"])
    x = x.reshape(len(x), -1).astype(np.float64)
    middle = x.mean(0)
    below = np.sqrt(penalty) * np.eye(x.shape[1])
    target = np.concatenate([np.eye(4)[y], np.zeros((len(below), 4))])
    weights = np.linalg.lstsq(
        np.concatenate([x - middle, below]), target, rcond=None
    )[0]
    return {
        split: 100
        * np.mean(
            (
                (images.numpy().reshape(len(images), -1) - middle) @ weights
            ).argmax(1)
            == labels.numpy()
        )
        for split, (images, labels) in parts.items()
    }


def _blobs(noise):
    "Images of four classes about four middles."
    generator = torch.Generator().manual_seed(0)
    middles = torch.randn(4, 1, 3, 4, generator=generator)
    parts = {}
    for split, n in (("train", 60), ("validation", 200), ("test", 200)):
        y = torch.arange(n) % 4
        parts[split] = (
            middles[y] + noise * torch.randn(n, 1, 3, 4, generator=generator),
            y,
        )
    return parts


@pytest.mark.parametrize("noise, scale", [(1.0, 1.0), (2.0, 30.0)])
def test_the_linear_model_is_least_squares_with_the_best_penalty(noise, scale):
    """Against another solver, for the penalty that is best in validation; the
    images of the second case are brighter, and another penalty is.
    """
    parts = {split: (scale * x, y) for split, (x, y) in _blobs(noise).items()}
    found = hardness.ridge(parts, 4)
    tried = [_squares(parts, penalty) for penalty in hardness.PENALTIES]
    best = max(tried, key=lambda accuracy: accuracy["validation"])
    assert found == pytest.approx(best)
    assert found["validation"] > 50 and found != pytest.approx(
        min(tried, key=lambda accuracy: accuracy["validation"])
    )


def test_a_committed_run_again():
    """The linear model of one seed, on the images that the seed draws: to two
    images in a thousand, which rounding may move.
    """
    row = by_arm("glyphs-hardness")["linear"][1]
    found = hardness.run(row["config"], 1)["metrics"]
    assert found["parameters"] == row["metrics"]["parameters"]
    for split in data.SPLITS:
        name = f"{split}_last"
        assert found[name] == pytest.approx(row["metrics"][name], abs=0.2), name
