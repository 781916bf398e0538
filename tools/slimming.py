"""What pruning by γ costs, against pruning at random and by the size of the
output, before and after fine-tuning: results/pruning.json.

    python -m tools.slimming            what is not there yet
    python -m tools.slimming --again

Five CPU minutes on one core. Each network is written when it is done, and is
not trained again; rows of another state of chapter 370 are refused, unless
`--again` is given.
"""
import argparse
import hashlib
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from normalnorm.analysis import pruning
from normalnorm.analysis.power import evaluating
from normalnorm.experiments.data import SPLITS, data_hash, load
from normalnorm.experiments.models import macs
from normalnorm.experiments.optimization import Settings
from normalnorm.experiments.results import provenance, write_atomically
from normalnorm.experiments.train import seeded, train
from normalnorm.layers.families import named

RECORD = Path(__file__).resolve().parent.parent / "results" / "pruning.json"
WIDTH, SEEDS, STRENGTH = 8, 5, 0.01
SHARES = (0.3, 0.5, 0.7, 0.9)
NORMS = {"batch": nn.BatchNorm2d,
         "batch, normality": lambda c: named("batch").make(c, noise=0.4)}
TRAINING = Settings(epochs=15, batch=64, lr=0.2, validate_every=0)
TUNING = Settings(epochs=3, batch=64, lr=0.05, validate_every=0)
PAIRS = 15                                      # of timed forward passes


def network(norm, width: int = WIDTH) -> nn.Sequential:
    "Four convolutions with normalizer and ReLU, the mean, a linear map."
    parts, before = [], 1
    for i, after in enumerate((width, width, 2 * width, 2 * width)):
        parts += [nn.Conv2d(before, after, 3, padding=1, bias=False),
                  norm(after), nn.ReLU()]
        parts += [nn.MaxPool2d(2)] * (i == 1)
        before = after
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(before, 10))


def sparse(model: nn.Module) -> Tensor:
    return STRENGTH * pruning.gamma_penalty(model)


def output_sizes(model: nn.Module, names, x: Tensor) -> dict[str, Tensor]:
    "Root mean square of what each channel gives behind its ReLU."
    found, hooks = {}, []
    for name in names:
        hooks.append(model.get_submodule(name).register_forward_hook(
            lambda _, given, out, name=name: found.update(
                {name: out.relu().square().mean((0, 2, 3)).sqrt()})))
    with evaluating(model), torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


def accuracy(model: nn.Module, split: tuple[Tensor, Tensor]) -> float:
    with evaluating(model), torch.no_grad():
        right = model(split[0]).argmax(1) == split[1]
    return round(100 * right.double().mean().item(), 3)


def cost(model: nn.Module, x: Tensor) -> dict[str, int]:
    with evaluating(model):
        return {"parameters": sum(p.numel() for p in model.parameters()),
                "macs": macs(model, x)}


def one(norm: str, penalty: bool, seed: int) -> dict:
    "Train a network, prune it in twelve ways, fine-tune each."
    data = {split: load("digits", split) for split in SPLITS}
    example = data["test"][0][:1]
    with seeded("slimming", seed):
        model = network(NORMS[norm])
    train(model, data, TRAINING, seed, penalty=sparse if penalty else None)
    gammas = {row.name: row.gamma
              for row in pruning.gamma_report(model, example)}
    with seeded("slimming-random", seed):
        scores = {"γ": gammas,
                  "random": {n: torch.rand(len(g)) for n, g in gammas.items()},
                  "output": output_sizes(model, gammas, data["train"][0])}
    cuts = []
    for share in SHARES:
        for by, score in scores.items():
            smaller = pruning.remove_channels(
                model, example, pruning.smallest(score, share))
            row = {"share": share, "by": by, **cost(smaller, example),
                   "before": accuracy(smaller, data["test"])}
            train(smaller, data, TUNING, seed)
            cuts.append(row | {"after": accuracy(smaller, data["test"])})
    return {"norm": norm, "penalty": penalty, "seed": seed,
            "whole": accuracy(model, data["test"]), **{
                f"whole_{k}": v for k, v in cost(model, example).items()},
            "gamma": [round(v, 5) for v in torch.cat(
                [*gammas.values()]).sort().values.tolist()], "cuts": cuts}


def speed() -> list[dict]:
    """Time of a forward pass of a network of width 64 with a share of the
    channels of each layer less, relative to the whole one, in turns.
    """
    x, found = torch.randn(8, 1, 28, 28), []
    for norm, make in NORMS.items():
        whole = network(make, 64).eval()
        for share in SHARES:
            gone = {row.name: list(range(round(share * len(row.gamma))))
                    for row in pruning.gamma_report(whole, x[:1])}
            smaller = pruning.remove_channels(whole, x[:1], gone).eval()
            ratios = []
            with torch.no_grad():
                for _ in range(PAIRS + 2):
                    times = []
                    for model in (whole, smaller):
                        start = time.process_time()
                        model(x)
                        times.append(time.process_time() - start)
                    ratios.append(times[1] / times[0])
            ratios = sorted(ratios[2:])
            found.append({
                "norm": norm, "share": share,
                "time": round(statistics.median(ratios), 4),
                # 96 % interval of the median of 15, by order statistics
                "low": round(ratios[3], 4), "high": round(ratios[-4], 4),
                "macs": round(macs(smaller, x) / macs(whole, x), 5)})
    return found


def code() -> str:
    "Hash of what the numbers depend on."
    files = [Path(__file__), Path(pruning.__file__)]
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    parser = argparse.ArgumentParser(
        prog="python -m tools.slimming",
        description="Pruning by γ, at random and by output: "
                    "results/pruning.json.")
    parser.add_argument("--again", action="store_true",
                        help="also what is there")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if record and record["code"] != code():
        if not chosen.again:
            parser.error("results/pruning.json was measured by other code: "
                         "measure it again with --again")
        record = {}
    record = {} if chosen.again else record

    def keep(**new) -> None:
        record.update(new, date=time.strftime("%Y-%m-%d"), code=code(),
                      data=data_hash("digits"), **provenance())
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        write_atomically(RECORD, lambda file: file.write(text.encode()))

    for seed in range(SEEDS):
        for norm in NORMS:
            for penalty in (False, True):
                done = record.get("networks", [])
                if any((r["norm"], r["penalty"], r["seed"])
                       == (norm, penalty, seed) for r in done):
                    continue
                start = time.process_time()
                row = one(norm, penalty, seed)
                row["cpu_seconds"] = round(time.process_time() - start, 1)
                keep(networks=[*done, row])
                print(f"{norm}, penalty {penalty}, seed {seed}: "
                      f"{row['cpu_seconds']} CPU seconds", flush=True)
    if "speed" not in record:
        keep(speed=speed())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
