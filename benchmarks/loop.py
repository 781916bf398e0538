"""What the training loop costs beside a bare one, on a network and images of
the book's experiments: results/training-loop.json.

    python -m benchmarks.loop

The time is that of the processor in this process, on one thread, so that what
other programs do meanwhile counts only as far as they share its caches. All
are measured in turn. A run here has three epochs; what it costs once weighs
ten times as much as in the thirty of the book.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import files
from benchmarks.measure import BUSY, interval, ratios, seconds
from normalnorm.experiments.data import SPLITS, load
from normalnorm.experiments.models import SmallResNet
from normalnorm.experiments.optimization import Settings
from normalnorm.experiments.train import evaluate, seeded, train
from tools.files import save

OUT = files.ROOT / "results" / "training-loop.json"
ROUNDS = 20
Data = dict[str, tuple[torch.Tensor, torch.Tensor]]


def bare(
    model: torch.nn.Module, data: Data, settings: Settings, tests: int
) -> None:
    """What one writes in a hurry: the same steps and the same looks at the
    data, `tests` of them at the test set, without seeds, checks, checkpoints or
    a rate that moves.
    """
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    x, y = data["train"]
    for _ in range(settings.epochs):
        model.train()
        order = torch.randperm(len(y))
        for index in order.split(settings.batch)[: len(y) // settings.batch]:
            loss = F.cross_entropy(model(x[index]), y[index])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        evaluate(model, data["validation"])
    for split in ("train", *["test"] * tests):
        evaluate(model, data[split])


def work(folder: Path) -> tuple[dict[str, Callable], Callable]:
    """What is measured, by name, and what it is measured against: `train` with
    its defaults.

    All begin with the same weights. Where the last epoch is the chosen one,
    `train` looks at the test set once, otherwise twice; so does the bare loop.
    """
    data: Data = {
        split: load("fashion", split, 2000 if split == "train" else 1000)
        for split in SPLITS
    }
    settings: dict[str, Any] = {"epochs": 3, "batch": 128}

    def made() -> torch.nn.Module:
        with seeded("weights", 0):
            return SmallResNet(width=16, stem_stride=2)

    def run(checkpoint: bool = False, callbacks=(), **changed: Any) -> dict:
        file = folder / "run.pt"
        file.unlink(missing_ok=True)
        return train(
            made(),
            data,
            Settings(**settings, **changed),
            checkpoint=file if checkpoint else None,
            callbacks=callbacks,
        )

    tests = 1 + (run()["chosen"]["epoch"] < settings["epochs"])
    return {
        "a bare loop": lambda: bare(made(), data, Settings(**settings), tests),
        "with a callback that does nothing": lambda: run(
            callbacks=[lambda moment: None]
        ),
        "with a checkpoint after each epoch": lambda: run(checkpoint=True),
        "with validation after the last epoch only": lambda: run(
            validate_every=0
        ),
    }, run


def idle() -> dict[str, Any]:
    """What a callback that does nothing adds to a step, in microseconds: the
    median over pairs of runs of a network of 40 modules that do nothing, beside
    which it is not lost, and an interval as that of `measure.summary`.
    """
    data: Data = {split: load("digits", split, 256) for split in SPLITS}
    settings = Settings(epochs=20, batch=32)
    steps, found = settings.epochs * 256 // settings.batch, []

    def run(callbacks: tuple[Callable, ...]) -> float:
        model = torch.nn.Sequential(
            *(torch.nn.Identity() for _ in range(38)),
            torch.nn.Flatten(),
            torch.nn.Linear(64, 10),
        )
        return seconds(
            lambda: train(model, data, settings, callbacks=callbacks),
            time.process_time,
        )

    run(())
    for k in range(ROUNDS):
        order = ((), (lambda moment: None,))[:: (-1) ** k]
        taken = {bool(callbacks): run(callbacks) for callbacks in order}
        found.append(1e6 * (taken[True] - taken[False]) / steps)
    found.sort()
    low, high = interval(found)
    return {
        "work": "a callback that does nothing",
        "against": "no callback",
        "µs a step": round(found[ROUNDS // 2], 1),
        "low": round(low, 1),
        "high": round(high, 1),
        "pairs": ROUNDS,
    }


def rows() -> Iterator[dict[str, Any]]:
    """The ratio of each one's time to that of `train`, with an interval; and
    what an idle callback adds to a step.
    """
    with tempfile.TemporaryDirectory() as folder:
        ours, plain = work(Path(folder))
        found = ratios(ours, plain, ROUNDS, clock=time.process_time, warm=1)
    for name, row in found.items():
        yield {"work": name, "against": "train", **row}
    yield idle()


def main() -> None:
    torch.set_num_threads(1)
    BUSY.forget()
    # before: the code that is measured is the one that was imported
    made, begun, found = files.environment(1), time.perf_counter(), []
    for row in rows():
        print(
            f"{row['work']}: {row['p50']:.3f} of the time of train "
            f"[{row['low']:.3f}, {row['high']:.3f}]"
            if "p50" in row
            else f"{row['work']}: {row['µs a step']} µs a step "
            f"[{row['low']}, {row['high']}]",
            flush=True,
        )
        found.append(row)
    record = made | {
        "clock": "processor time of the process",
        "others": BUSY.share(),
        "seconds": round(time.perf_counter() - begun),
        "rows": found,
    }
    save(OUT, record)


if __name__ == "__main__":
    main()
