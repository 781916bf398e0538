"""`make records`: which committed outcomes are older than the code that they
vouch for.

    python -m tools.records             look, ask the witnesses, write it down
    python -m tools.records --list      what is older than its code, no more
    python -m tools.records --made NAME this record was made just now

A record vouches for the files that it loads, or, where nothing can be asked in
seconds, for those that it names. results/records.json keeps a hash of each: of
Python's syntax without docstrings, of other files byte for byte. Where one
differs, the witness, a few seconds of the same computation, says whether the
numbers would be others. Equal ones (in every bit on the same kind of processor,
to 1e-5 elsewhere) take the new hashes in. Otherwise the record is stale: the
list says what it takes to make it again, and a page that shows it of which day
it is.
"""
import argparse
import ast
import hashlib
import importlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
LEDGER = ROOT / "results" / "records.json"
NATIVE = "normalnorm/layers/engines/native.cpp"
TOLERANCE = 1e-5        # of a witness on another kind of processor


@dataclass(frozen=True)
class Record:
    """Outcomes at `path` below results/. `again`: what it takes to make them
    again; `module`: of the witness, which `ask` makes of it in seconds;
    `files`: patterns of what a record without a witness is about.
    """
    path: str
    again: str
    module: str = ""
    ask: Callable[[Any], Any] | None = None
    files: tuple[str, ...] = ()


# ---- witnesses ----

class _Enough(Exception):
    "The steps that a witness wants are done."


def five_steps(run: Callable, *arguments: Any) -> list[float]:
    "The first five losses of which `run` asks for gradients."
    import torch
    losses, backward = [], torch.Tensor.backward

    def counted(loss: Any, *how: Any, **other: Any) -> None:
        losses.append(loss.item())
        if len(losses) == 5:
            raise _Enough
        backward(loss, *how, **other)
    with patch.object(torch.Tensor, "backward", counted):
        try:
            run(*arguments)
        except _Enough:
            pass
    return losses


def rows(folder: str, of: Any) -> dict[str, list[float]]:
    "Of each arm in a folder of rows the first steps of one run."
    known = {getattr(r, "name", ""): r for r in vars(of).values()}
    found: dict[str, list[float]] = {}
    for path in sorted((ROOT / "results" / folder).glob("*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        if row["arm"] not in found:
            found[row["arm"]] = five_steps(
                known[row["recipe"]].run, row["config"], row["seed"],
                row["arm"])
    return found


def _defined(folder: str, of: Any) -> dict[str, list[float]]:
    from normalnorm.layers.backends import set_backend
    set_backend("eager")
    return rows(folder, of)


def _field(of: Any) -> list[float]:
    pictures = of.small_images(4)
    return [float(share) for norm, how in of.CASES.values()
            for layer in of.measured(pictures, norm, 2, 64, 0, how.get("group"))
            for share in layer]


def _grown(of: Any) -> list:
    with patch.object(of, "EPOCHS", 1):
        return [of.run(norm, "everything", 0)["loss"] for norm in of.NORMS]


def _spread(of: Any) -> list:
    with patch.object(of, "SEEDS", 1):
        return [of.curves("skips", norm) for norm in ("None", "LMBV", "Batch")]


def _attacked(of: Any) -> list[float]:
    x, y = of.growth.images("train", 100)
    return [of.fgsm(of.trained(norm, x, y), x, y, 0.03).sum().item()
            for norm in of.growth.NORMS]


RECIPES, QUIET = "normalnorm.experiments.recipes.", "nothing else running"
LAYERS = ("normalnorm/layers/**/*.py", NATIVE)
ALL = ("normalnorm/**/*.py", NATIVE, "tests/*.py")
RECORDS = {
    **{path.removesuffix("/book"): Record(
        path, again, RECIPES + module, partial(
            _defined if path.startswith("by-definition") else rows, path))
       for path, module, again in (
           ("first-experiment/book", "first", "an hour"),
           ("by-definition/first-experiment/book", "first", "ten minutes"),
           ("transform-given-noise/book", "given_noise", "25 minutes"),
           ("transform-given-noise-500/book", "given_noise", "five minutes"),
           ("transform-given-noise-glyphs/book", "given_noise", "15 minutes"),
           ("pilot/transform-given-noise-500/book", "given_noise", "a minute"),
           ("pilot/transform-given-noise-glyphs/book", "given_noise",
            "a minute"),
           ("proxy-norm/book", "proxy", "an hour"),
           ("language-recurrent/book", "language", "ten minutes"),
           ("language-transformer/book", "language", "ten minutes"),
           ("language-transformer/smoke", "language", "ten minutes"),
           ("one-factor-batch/book", "one_factor", "15 minutes"),
           ("one-factor-rate/book", "one_factor", "15 minutes"),
           ("one-factor-scale/book", "one_factor", "15 minutes"))},
    "collapse": Record(
        "collapse.json", "ten minutes", "tools.collapse",
        lambda of: [of.one_net(0, 64), of.one_net(
            0, 64, normalize=of.grouped(8, 1.0))]),
    "covariance field": Record(
        "covariance-field.json", "five minutes", "tests.test_correlation_map",
        _field),
    "early training": Record(
        "early-training.json", "15 minutes", "tools.early_training",
        lambda of: [loss for norm in of.LAYERS for _, loss, _ in of.trained(
            "residual", norm, 1e-2, 0, 5)]),
    "glyphs": Record(
        "glyphs.json", "five minutes", "tools.hardness",
        lambda of: [five_steps(of.measure, name, 0)
                    for name in of.MODELS if name != "linear"]),
    "layer maps": Record(
        "layer-maps.json", "two minutes", "tests.test_layer_maps",
        lambda of: [of.deep(case, 0, 64, 3).tolist()
                    for case in of.chapter()["CASES"] if case.deep]),
    "power in training": Record(
        "power-training.json", "half an hour", "tools.power_training",
        lambda of: [five_steps(of.training_run, arm, 0)
                    for arm in of.ARMS if arm not in of.STEEP]),
    "pruning": Record(
        "pruning.json", "20 minutes", "tools.slimming",
        lambda of: [five_steps(of.one, kind, norm, True, 0)
                    for kind in of.NETWORKS for norm in of.NORMS]),
    "torchattacks": Record(
        "torchattacks.json", "a minute", "tools.peer_attacks", _attacked),
    "weight growth": Record(
        "weight-growth.json", "five minutes", "tools.growth", _grown),
    "wide propagation": Record(
        "wide-propagation.json", "two minutes", "tools.wide_propagation",
        _spread),
    "neural-tangents": Record(
        "neural-tangents.json", "a minute", files=("tools/peer_maps.py",)),
    "benchmarks": Record("benchmarks", f"two hours, {QUIET}",
                         files=(*LAYERS, "benchmarks/*.py")),
    "benchmarks of the Hessian": Record(
        "hessian.json", f"five minutes, {QUIET}",
        files=("normalnorm/analysis/hessian.py", "benchmarks/hessian.py")),
    "benchmarks of the loop": Record(
        "training-loop.json", f"five minutes, {QUIET}",
        files=("normalnorm/experiments/train.py", "benchmarks/loop.py")),
    "kills": Record("kills.json", "half an hour", files=(
        "normalnorm/experiments/train.py", "normalnorm/experiments/results.py",
        "tools/kills.py")),
    "hostile": Record("hostile.json", "ten minutes",
                      files=(*LAYERS, "tools/hostile.py")),
    "processors": Record(
        "processors.json", "two hours", files=(*ALL, "tests/kernel/*")),
    "mutation": Record("mutation", "an hour", files=ALL),
    "lower bounds": Record("test-oldest.json", "half an hour", files=ALL),
    "newest releases": Record("test-newest.json", "an hour", files=ALL),
    "reading": Record("reading", "two minutes of a built book",
                      files=("nbs/*.ipynb", "tools/reading.py", "tools/pdf.py"))
}


# ---- hashes ----

def _plain(node: Any) -> Any:
    """A syntax tree as lists, without positions, docstrings, and what is empty
    (releases of Python write that in their own ways).
    """
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if (isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node, clean=False) is not None):
        fields["body"] = fields["body"][1:]
    return [type(node).__name__, *([key, _plain(value)] for key, value in
                                   fields.items() if value not in (None, []))]


@cache
def _hash(name: str) -> str:
    path = ROOT / name
    content = path.read_bytes() if path.exists() else b""
    if path.suffix == ".py":
        return digest(_plain(ast.parse(content)))
    return digest(content.decode("latin-1"))


def hashes(patterns: Iterable[str] = ()) -> dict[str, str]:
    """The hash of each file that matches one of the patterns; without any, of
    each that this process has loaded.
    """
    names = {path for pattern in patterns for path in ROOT.glob(pattern)}
    if not patterns:
        names = {Path(m.__file__).resolve() for m in list(sys.modules.values())
                 if getattr(m, "__file__", None)} - {Path(__file__).resolve()}
        if "normalnorm.layers.engines.native" in sys.modules:
            names.add(ROOT / NATIVE)
    inside = sorted(path.relative_to(ROOT).as_posix() for path in names
                    if path.is_relative_to(ROOT) and path.exists()
                    and ".venv" not in path.parts
                    and path.name != "_modidx.py")      # an index, made anew
    return {name: _hash(name) for name in inside}


def digest(found: Any) -> str:
    "Of JSON values."
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:10]


def content(record: Record) -> str:
    "A hash of what is recorded."
    place = ROOT / "results" / record.path
    files = sorted(place.rglob("*.json*")) if place.is_dir() else [place]
    return digest([path.read_text(encoding="utf-8") for path in files])


# ---- the ledger ----

def ledger() -> dict[str, dict[str, Any]]:
    "What results/records.json says of each record."
    return json.loads(LEDGER.read_text(encoding="utf-8"))


def changed(record: Record, entry: dict[str, Any]) -> list[str]:
    "The files whose code is no longer what the entry of a record vouches for."
    known = entry["code"]
    now = {name: _hash(name) for name in known} | (
        hashes(record.files) if record.files else {})
    return sorted(f for f in now if now[f] != known.get(f))


def vouched(path: Path) -> bool:
    "Whether nothing has changed since the record in a file was vouched for."
    return any(path == ROOT / "results" / record.path and not changed(
        record, ledger()[name]) for name, record in RECORDS.items())


def older(shown: Iterable[str]) -> list[str]:
    "What to say of the stale records among the files that a page shows."
    found: dict[str, list[str]] = {}
    for name, entry in ledger().items():
        path, shown = f"results/{RECORDS[name].path}", list(shown)
        if "stale" in entry and any(file.startswith(path) for file in shown):
            found.setdefault(
                f"Measured on {entry['made']} with code that has changed since "
                f"({entry['stale']})", []).append(f"`{path}`")
    return [f"{how}: {', '.join(paths)}." for how, paths in found.items()]


def testify(name: str) -> dict[str, Any]:
    "What the witness of a record says in this process, on which machine."
    import torch

    from tools.processors import _cpuinfo
    sys.path.append(str(ROOT / "tests"))
    torch.set_num_threads(1)
    record = RECORDS[name]
    said = record.ask(importlib.import_module(record.module))
    return {"machine": [*map(_cpuinfo().get, (
        "model name", "cpu family", "model")),
        torch.backends.cpu.get_cpu_capability()],
        "witness": said, "code": hashes()}


def asked(name: str) -> dict[str, Any]:
    """What a record's witness says in a process of its own; without a witness,
    the code alone.
    """
    if not RECORDS[name].ask:
        return {"code": hashes(RECORDS[name].files)}
    done = subprocess.run([sys.executable, "-m", "tools.records", "--witness",
                           name], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the witness of {name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def same(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    "Two witnesses say the same, numbers to a relative `tolerance`."
    if isinstance(one, dict):
        one, other = sorted(one.items()), sorted(other.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            same(a, b, tolerance) for a, b in zip(one, other))
    return one == other or (one != one and other != other) or math.isclose(
        one, other, rel_tol=tolerance, abs_tol=tolerance)


def apart(entry: dict[str, Any], now: dict[str, Any]) -> str:
    """How what a witness says now differs from what it said when its record was
    made; empty where it does not.
    """
    if "witness" not in entry:
        return "the code of that day is not known"
    if same(entry["witness"], now["witness"], 0.0 if entry[
            "machine"] == now["machine"] else TOLERANCE):
        return ""
    near = same(entry["witness"], now["witness"], TOLERANCE)
    return "the first steps differ " + ("by rounding" if near else "from then")


def look(entries: dict[str, dict[str, Any]],
         ask: Callable[[str], Any] | None = None) -> Iterator[str]:
    """Brings the entries up to date, one by one; says of each record that is
    older than its code what became of it. `ask`: gives what the witness of a
    record says.
    """
    for name, record in RECORDS.items():
        entry = entries[name]
        files = changed(record, entry)
        if not files:
            entry.pop("stale", None)
            continue
        now = ask(name) if ask and record.ask else {}
        told = (f"{name}: {', '.join(files[:3])}{', …' * (len(files) > 3)} "
                "changed")
        how = apart(entry, now) if now else "the numbers may be others now"
        if not how:
            entry.pop("stale", None)
            entry |= {"code": now["code"]}
            yield f"{told}, the witness says the same"
            continue
        entry["stale"] = how if now else entry.get("stale", how)
        yield (f"{told}; {entry['stale']}: made on {entry['made']}, again in "
               f"{record.again}")


def write(entries: dict[str, dict[str, Any]]) -> None:
    "A line for each record."
    LEDGER.write_text("{\n" + ",\n".join(
        f"{json.dumps(name)}: {json.dumps(entries[name])}"
        for name in RECORDS if name in entries) + "\n}\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    parser = argparse.ArgumentParser(prog="python -m tools.records",
                                     description=__doc__.split("\n\n")[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--made", choices=RECORDS, action="append", default=[])
    parser.add_argument("--witness", choices=RECORDS)
    chosen = parser.parse_args(arguments)
    if chosen.witness:
        print(json.dumps(testify(chosen.witness)))
        return 0
    entries = ledger() if LEDGER.exists() else {}
    for name in chosen.made:
        entries[name] = {"made": time.strftime("%Y-%m-%d"), "content": content(
            RECORDS[name])} | asked(name)
        write(entries)
    for line in () if chosen.made else look(
            entries, None if chosen.list else asked):
        print(line, flush=True)
        if not chosen.list:
            write(entries)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
