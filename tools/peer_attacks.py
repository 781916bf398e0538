"""FGSM and PGD compared with torchattacks: results/torchattacks.json.

    python -m venv --system-site-packages FOLDER
    FOLDER/bin/pip install --no-deps torchattacks==3.5.1 requests==2.25.1
    FOLDER/bin/python -m tools.peer_attacks

In an environment of its own, because torchattacks pins an old `requests`; the
environment must find PyTorch and what normalnorm needs. A minute on one core.
"""

import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normalnorm.analysis.robustness import fgsm, pgd
from normalnorm.experiments.data import info
from normalnorm.experiments.recipes import growth
from normalnorm.experiments.results import provenance, write_atomically
from normalnorm.experiments.train import seeded

RECORD = (
    Path(__file__).resolve().parent.parent / "results" / "torchattacks.json"
)
CONFIG = growth.weight_growth.arms("book")["none, nothing"]
SIZES, STEPS, EPOCHS = (0.01, 0.03, 0.1), 7, 2


def trained(norm: str, x: Tensor, y: Tensor) -> nn.Module:
    "Two epochs on pixels between 0 and 1."
    with seeded("peer-attacks", 0):
        model = growth.network(norm)
        optimizer = torch.optim.SGD(
            model.parameters(), CONFIG["lr"], CONFIG["momentum"]
        )
        for _ in range(EPOCHS):
            for pick in torch.randperm(len(x)).split(CONFIG["batch"]):
                optimizer.zero_grad()
                F.cross_entropy(model(x[pick]), y[pick]).backward()
                optimizer.step()
    return model.eval()


def compared(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """For each attack and size: the largest difference of two perturbed pixels,
    the share of pixels that differ by more than rounding, and both accuracies.
    """
    import torchattacks

    found = []
    for eps in SIZES:
        step = 2.5 * eps / STEPS
        for name, ours, theirs in (
            (
                "fgsm",
                fgsm(model, x, y, eps, bounds=(0, 1)),
                torchattacks.FGSM(model, eps),
            ),
            (
                "pgd",
                pgd(
                    model, x, y, eps, step, STEPS, start="inputs", bounds=(0, 1)
                ),
                torchattacks.PGD(model, eps, step, STEPS, random_start=False),
            ),
        ):
            other = theirs(x, y)
            apart = (ours - other).abs()
            with torch.no_grad():
                right = [
                    100 * (model(v).argmax(1) == y).double().mean().item()
                    for v in (ours, other)
                ]
            found.append(
                {
                    "attack": name,
                    "eps": eps,
                    "largest": apart.max().item(),
                    "pixels": (apart > 1e-6).double().mean().item(),
                    "ours": round(right[0], 2),
                    "theirs": round(right[1], 2),
                }
            )
    return found


def main() -> int:
    "Compare and write; see the module's text."
    torch.set_num_threads(1)
    about = info("fashion")
    pixels = lambda split, first: (
        lambda x, y: ((x * about.std[0] + about.mean[0]).clamp(0, 1), y)
    )(*growth.images(split, first))
    found = {
        norm: compared(
            trained(norm, *pixels("train", CONFIG["images"])),
            *pixels("test", CONFIG["attacked"]),
        )
        for norm in growth.NORMS
    }
    row = {
        "date": time.strftime("%Y-%m-%d"),
        **provenance(),
        "torchattacks": importlib.metadata.version("torchattacks"),
        "images": CONFIG["attacked"],
        "steps": STEPS,
        "found": found,
    }
    text = json.dumps(row, indent=1, ensure_ascii=False) + "\n"
    write_atomically(RECORD, lambda file: file.write(text.encode()))
    for norm, rows in found.items():
        for r in rows:
            print(norm, *r.values())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
