"""`python -m tools.hardness`: the measurements on a small scale, against
something else, and the committed ones by their own code.
"""

import json

import numpy as np
import pytest
import torch

from normalnorm.experiments import data

pytestmark = pytest.mark.book
hardness = pytest.importorskip(
    "tools.hardness", reason="the book's tools are not installed"
)
RECORD = hardness.RECORD


def _squares(parts, penalty):
    """Accuracies in percent of the penalized least squares on one-hot labels:
    rows for the penalty below the images, and numpy's solver. No kernel matrix.
    """
    x, y = (part.numpy() for part in parts["train"])
    x = x.reshape(len(x), -1).astype(np.float64)
    middle = x.mean(0)
    below = np.sqrt(penalty) * np.eye(x.shape[1])
    target = np.concatenate(
        [np.eye(hardness.CLASSES)[y], np.zeros((len(below), hardness.CLASSES))]
    )
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
    found = hardness.ridge(parts)
    tried = [_squares(parts, penalty) for penalty in (1e3, 1e4, 1e5, 1e6, 1e7)]
    best = max(tried, key=lambda accuracy: accuracy["validation"])
    assert found == pytest.approx(best)
    assert found["validation"] > 50 and found != pytest.approx(
        min(tried, key=lambda accuracy: accuracy["validation"])
    )


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    "Two models in one epoch of 200 images, and a record elsewhere."
    monkeypatch.setattr(hardness, "RECORD", tmp_path / "glyphs.json")
    monkeypatch.setattr(hardness, "IMAGES", 200)
    monkeypatch.setattr(
        hardness,
        "MODELS",
        {
            "linear": hardness.MODELS["linear"],
            "mlp": (*hardness.MODELS["mlp"][:2], hardness.SGD | {"epochs": 1}),
        },
    )
    real, loaded = hardness.load, []

    def load(name, split, first=None, draw=None):
        loaded.append((split, first, draw))
        return real(name, split, 200 if first is None else first, draw=draw)

    monkeypatch.setattr(hardness, "load", load)
    threads = torch.get_num_threads()
    yield loaded
    torch.set_num_threads(threads)


def test_each_run_is_done_once_and_says_what_made_it(tiny, capsys):
    assert hardness.main(["--seeds", "1", "--only", "linear"]) == 0
    one = json.loads(hardness.RECORD.read_text())["runs"]
    assert hardness.main(["--seeds", "2"]) == 0
    record = json.loads(hardness.RECORD.read_text())
    assert record["runs"][0] == one[0]
    assert [(run["model"], run["seed"]) for run in record["runs"]] == [
        ("linear", 0),
        ("mlp", 0),
        ("linear", 1),
        ("mlp", 1),
    ]
    assert capsys.readouterr().out.count("cpu_seconds") == 4
    # each seed draws the training images, and nothing draws the others
    assert [seen for seen in tiny if seen[0] == "train"] == [
        ("train", 200, seed) for seed in (0, 0, 1, 1)
    ]
    assert {seen[1:] for seen in tiny if seen[0] != "train"} == {(None, None)}
    assert {
        "date",
        "processor",
        "torch",
        "commit",
        "source",
        "settings",
        "data_hash",
    } <= set(record) and record["images"] == 200
    for run in record["runs"]:
        assert all(0 <= run[split] <= 100 for split in data.SPLITS)
    assert [run["parameters"] for run in record["runs"][:2]] == [
        100 * 3 * 32 * 32,
        sum(
            p.numel()
            for p in hardness.models.build(
                "small_mlp", classes=100, inputs=3 * 32 * 32
            ).parameters()
        ),
    ]
    number = len(tiny)
    assert hardness.main(["--seeds", "2"]) == 0 and len(tiny) == number
    # a record of other images is not gone on with
    hardness.RECORD.write_text(json.dumps(record | {"data_hash": "other"}))
    assert hardness.read()["runs"] == []


def test_the_committed_record_is_of_these_models_and_images():
    record = json.loads(RECORD.read_text())
    assert record["data_hash"] == data.data_hash("glyphs")
    assert record["images"] == hardness.IMAGES
    assert record["settings"] == json.loads(json.dumps(hardness.MODELS))
    assert sorted((run["model"], run["seed"]) for run in record["runs"]) == [
        (name, seed) for name in sorted(hardness.MODELS) for seed in range(3)
    ]


def test_a_committed_run_again():
    """The linear model of one seed, on the images that the seed draws: to two
    images in a thousand, which rounding may move.
    """
    found = hardness.measure("linear", 1)
    kept = next(
        run
        for run in json.loads(RECORD.read_text())["runs"]
        if (run["model"], run["seed"]) == ("linear", 1)
    )
    assert found["parameters"] == kept["parameters"]
    for split in data.SPLITS:
        assert found[split] == pytest.approx(kept[split], abs=0.2), split
