"""How hard the generated glyphs are for which model: results/glyphs.json.

    python -m tools.hardness            all runs that are not there yet
    python -m tools.hardness --only mlp --seeds 2

Each seed draws its own training images, initial weights and order of batches.
Five CPU minutes on one core; a run that is done is never repeated.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from normalnorm.experiments import models
from normalnorm.experiments.data import SPLITS, data_hash, load
from normalnorm.experiments.optimization import Settings
from normalnorm.experiments.results import provenance, write_atomically
from normalnorm.experiments.train import seeded, train

RECORD = Path(__file__).resolve().parent.parent / "results" / "glyphs.json"
IMAGES, CLASSES = 3000, 100
SGD = {"epochs": 20, "batch": 128, "lr": 0.1, "weight_decay": 5e-4}
RESNET = {"channels": 3, "stem_stride": 2}
# name: model, its arguments, training. Nothing was tuned for this set: rates
# and batches are those of the Fashion-MNIST experiment
MODELS = {
    "linear": ("ridge", {}, {}),
    "mlp": ("small_mlp", {"inputs": 3 * 32 * 32}, SGD),
    "vit": (
        "small_vit",
        {
            "channels": 3,
            "image": 32,
            "patch": 8,
            "width": 48,
            "depth": 3,
            "heads": 4,
            "hidden": 96,
        },
        {
            "epochs": 20,
            "batch": 64,
            "optimizer": "adamw",
            "lr": 3e-3,
            "weight_decay": 0.05,
        },
    ),
    "resnet, width 8": ("small_resnet", RESNET | {"width": 8}, SGD),
    "resnet, width 16": ("small_resnet", RESNET | {"width": 16}, SGD),
    "resnet, width 16, two blocks": (
        "small_resnet",
        RESNET | {"width": 16, "blocks": 2},
        SGD,
    ),
}


def ridge(data: dict) -> dict[str, float]:
    """Least squares on one-hot labels with the penalty, of five, that is best
    on validation images; accuracies in percent.
    """
    x, y = data["train"]
    middle = x.flatten(1).mean(0)
    flat = {
        split: inputs.flatten(1) - middle for split, (inputs, _) in data.items()
    }
    products = flat["train"] @ flat["train"].T
    found = []
    for penalty in (1e3, 1e4, 1e5, 1e6, 1e7):
        weights = flat["train"].T @ torch.linalg.solve(
            products + penalty * torch.eye(len(x)),
            torch.nn.functional.one_hot(y, CLASSES).float(),
        )
        found.append(
            {
                split: 100
                * ((flat[split] @ weights).argmax(1) == data[split][1])
                .double()
                .mean()
                .item()
                for split in SPLITS
            }
        )
    return max(found, key=lambda accuracy: accuracy["validation"])


def measure(name: str, seed: int) -> dict:
    "One run: accuracies at the last epoch, in percent."
    model, arguments, settings = MODELS[name]
    start = time.process_time()
    data = {
        split: load("glyphs", split, IMAGES, draw=seed)
        if split == "train"
        else load("glyphs", split)
        for split in SPLITS
    }
    if model == "ridge":
        found, parameters = ridge(data), CLASSES * data["train"][0][0].numel()
    else:
        with seeded("weights", seed):
            net = models.build(model, classes=CLASSES, **arguments)
        parameters = sum(p.numel() for p in net.parameters())
        outcome = train(net, data, Settings(**settings), seed)
        found = {
            split: 100 * outcome["last"][f"{split}_accuracy"]
            for split in ("validation", "test")
        }
        found["train"] = 100 * outcome["train_accuracy"]
    return {
        "model": name,
        "seed": seed,
        "parameters": parameters,
        **{split: round(value, 3) for split, value in found.items()},
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def read() -> dict:
    "The record, empty where there is none or where it is of other images."
    identity = data_hash("glyphs")
    if RECORD.exists():
        found = json.loads(RECORD.read_text(encoding="utf-8"))
        if found["data_hash"] == identity:
            return found
    return {"data_hash": identity, "images": IMAGES, "runs": []}


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    parser = argparse.ArgumentParser(
        prog="python -m tools.hardness",
        description="How hard the glyphs are for which model: "
        "results/glyphs.json.",
    )
    parser.add_argument(
        "--only",
        choices=MODELS,
        action="append",
        help="a model of the list (may be repeated)",
    )
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for seed in range(chosen.seeds):
        for name in chosen.only or MODELS:
            if any(
                (run["model"], run["seed"]) == (name, seed)
                for run in read()["runs"]
            ):
                continue
            run = measure(name, seed)
            print(run, flush=True)
            record = read()  # as it is now, after the minute that this took
            record["settings"] = {
                key: list(value) for key, value in MODELS.items()
            }
            record |= {"date": time.strftime("%Y-%m-%d"), **provenance()}
            record["runs"].append(run)
            text = json.dumps(record, indent=1) + "\n"
            write_atomically(RECORD, lambda file: file.write(text.encode()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
