"""`make records`: which committed outcomes are older than the code that they
vouch for.

    python -m tools.records             look, ask the witnesses, write it down
    python -m tools.records --list      what is older than its code, no more
    python -m tools.records --made NAME this record was made just now

A line of results/records.json for each record: its `path` below results/, what
it takes to make it `again`, the day when it was `made`, a hash of its
`content`, and one of each file of its `code`: those that its witness loads or,
where nothing can be asked in seconds, those of the patterns `files`. A hash is
of Python's syntax without docstrings, of other files byte for byte. Where one
differs, the witness, a few seconds of the same computation, says whether the
numbers would be others. Equal ones (in every bit on the same kind of processor,
to 1e-5 elsewhere, of rows in two steps) take the new hashes in. Where this is
another kind of processor, so does what the last code that the ledger knew says
here, in every bit. Otherwise the record is stale: the list says so, and a page
that shows it says of which day it is.
"""

import argparse
import ast
import hashlib
import importlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tools.files import ROOT, load, python, ran, replace

LEDGER = ROOT / "results" / "records.json"
NATIVE = "normalnorm/layers/engines/native.cpp"
TOLERANCE = 1e-5  # of a witness on another kind of processor


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


def first_rows(of: Any, path: str) -> dict[str, list[float]]:
    "Of each arm in a folder of rows the first steps of one run."
    from normalnorm.experiments.results import scan

    known = {getattr(r, "name", ""): r for r in vars(of).values()}
    found: dict[str, list[float]] = {}
    *_, recipe, scale = (ROOT / "results" / path).parts
    rows = scan(recipe, scale, (ROOT / "results" / path).parents[1]).rows
    for row in rows.values():
        if row["arm"] not in found:
            found[row["arm"]] = five_steps(
                partial(known[row["recipe"]].run, arm=row["arm"]),
                row["config"],
                row["seed"],
            )
    return found


# by the name of a record; others with a module are rows
WITNESSES: dict[str, Callable[[Any], Any]] = {
    "collapse": lambda of: [
        of.one_net(
            of._images(of.collapse_nets.arms("book")["ReLU"]), 0, 30, 64, **how
        )
        for how in ({}, {"normalize": of._grouped(8, 1.0)})
    ],
    "collapse-cures": lambda of: {
        cure: of.run(config, 0)["p1"]
        for cure, config in of.collapse_cures.arms("smoke").items()
    },
    "covariance-field": lambda of: [
        share
        for norm, how in of.FIELDS.values()
        for layer in of.measured_shares(
            of.small_images(4), norm, 2, 64, 0, how.get("group")
        )
        for share in layer
    ],
    "drawn-units": lambda of: [
        of.correlation_map(0.35, "relu", norm, power=True, **how)
        for norm, how in of._DRAWN.values()
    ],
    "early-training": lambda of: {
        norm: [
            loss
            for step, loss, _ in of.trained(
                of.early_training.arms("book")[f"residual, {norm}"], 1e-2, 0, 5
            )
            if step
        ]
        for norm in of.LAYERS
    },
    "hessian": lambda of: {
        arm: of.run(config, 0)["after"]["largest"]
        for arm, config in of.hessians.arms("smoke").items()
    },
    "layer-maps": lambda of: [
        of.deep(case, 0, 64, 3) for case in of.CASES if case.deep
    ],
    # without those that take the curvature, for a minute, before they begin
    "power-training": lambda of: {
        arm: five_steps(of.run, config, 0)
        for arm, config in of.power_training.arms("book").items()
        if not config["leading"]
    },
    "torchattacks": lambda of: [
        of.fgsm(*of.attacked(config, 0), 0.03).sum().item()
        for config in of.peer_attacks.arms("smoke").values()
    ],
    "wide-propagation": lambda of: [
        of.wide_run(of.wide_propagation.arms("book")[f"skips, {norm}"], 0)[
            "correlations"
        ]
        for norm in ("None", "LMBV", "Batch")
    ],
}


def testify(names: list[str]) -> dict[str, dict[str, Any]]:
    "What the witnesses of one module say in this process, on which machine."
    import torch

    torch.set_num_threads(1)
    entries, said = ledger(), {}
    for name in names:
        of = importlib.import_module(entries[name]["module"])
        said[name] = (
            WITNESSES[name](of)
            if name in WITNESSES
            else first_rows(of, entries[name]["path"])
        )
    code = hashes()
    from tools.processors import cpuinfo  # what is no part of a witness

    machine = [
        *map(cpuinfo().get, ("model name", "cpu family", "model")),
        torch.backends.cpu.get_cpu_capability(),
    ]
    return {
        name: {"machine": machine, "witness": witness, "code": code}
        for name, witness in said.items()
    }


def asked(names: Iterable[str], root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """What these records have to say of the code below `root`: a process for
    each module, so that no witness vouches for what another has loaded.
    """
    entries, found = ledger(), {}
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(entries[name].get("module", ""), []).append(name)
    for name in modules.pop("", ()):
        found[name] = {"code": hashes(entries[name]["files"])}
    for module, of in modules.items():
        words = "-m", "tools.records", "--witness", *of
        done = python(*words, cwd=root)
        if done.returncode:
            raise RuntimeError(f"a witness in {module} failed:\n{done.stderr}")
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def before(names: list[str]) -> dict[str, dict[str, Any]]:
    "What they have to say, here, of the code that the ledger was written with."
    git = lambda words: ran(["git", *words.split()], cwd=ROOT, check=True)
    known = git("log -1 --format=%h -- results/records.json").stdout
    with tempfile.TemporaryDirectory() as place:
        git(f"worktree add {place} {known}")
        found = asked(names, Path(place))
    git("worktree prune")
    return found


def same(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    "Two witnesses say the same, numbers to a relative `tolerance`."
    if isinstance(one, dict):
        one, other = sorted(one.items()), sorted(other.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            same(a, b, tolerance) for a, b in zip(one, other)
        )
    return (
        one == other
        or (one != one and other != other)
        or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    )


def _start(witness: Any) -> Any:
    "Of rows the first two steps: in each, rounding grows about tenfold."
    if not isinstance(witness, dict):
        return witness
    return {arm: losses[:2] for arm, losses in witness.items()}


def apart(entry: dict[str, Any], now: dict[str, Any]) -> str:
    """How what a witness says now differs from what it said when its record was
    made; empty where it does not.
    """
    one, other = entry["witness"], now["witness"]
    near = same(_start(one), _start(other), TOLERANCE)
    if near if entry["machine"] != now["machine"] else same(one, other):
        return ""
    return "the first steps differ " + ("by rounding" if near else "from then")


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
    if (
        isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and ast.get_docstring(node, clean=False) is not None
    ):
        fields["body"] = fields["body"][1:]
    return [
        type(node).__name__,
        *(
            [key, _plain(value)]
            for key, value in fields.items()
            if value not in (None, [])
        ),
    ]


def syntax(code: str | bytes) -> str:
    "A hash of Python code without layout, comments and docstrings."
    return digest(_plain(ast.parse(code)))


@cache
def _hash(name: str) -> str:
    path = ROOT / name
    content = path.read_bytes() if path.exists() else b""
    if path.suffix == ".py":
        return syntax(content)
    return digest(content.decode("latin-1"))


def hashes(patterns: Iterable[str] = ()) -> dict[str, str]:
    """The hash of each file that matches one of the patterns and none of those
    behind "!"; without any, of each that this process has loaded.
    """
    names: set[Path] = set()
    for pattern in sorted(patterns, reverse=True):
        of = {*ROOT.glob(pattern.removeprefix("!"))}
        names = names - of if pattern[0] == "!" else names | of
    if not patterns:
        names = {
            Path(m.__file__).resolve()
            for m in list(sys.modules.values())
            if getattr(m, "__file__", None)
        } - {Path(__file__).resolve(), ROOT / "tools" / "files.py"}
        if "normalnorm.layers.engines.native" in sys.modules:
            names.add(ROOT / NATIVE)
    inside = sorted(
        path.relative_to(ROOT).as_posix()
        for path in names
        if path.is_relative_to(ROOT)
        and path.exists()
        and ".venv" not in path.parts
        and path.name != "_modidx.py"
    )  # an index, made anew
    return {name: _hash(name) for name in inside}


def digest(found: Any) -> str:
    "Of JSON values."
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:10]


def content(path: str) -> str:
    "A hash of what is recorded at a path below results/."
    place = ROOT / "results" / path
    files = sorted(place.rglob("*.json*")) if place.is_dir() else [place]
    return digest([file.read_text(encoding="utf-8") for file in files])


# ---- the ledger ----


def ledger() -> dict[str, dict[str, Any]]:
    "What results/records.json says of each record."
    return load(LEDGER)


def write(entries: dict[str, dict[str, Any]]) -> None:
    "A line for each record."
    lines = (f"{json.dumps(n)}: {json.dumps(e)}" for n, e in entries.items())
    replace(LEDGER, "{\n" + ",\n".join(lines) + "\n}\n")


def changed(entry: dict[str, Any]) -> list[str]:
    "The files whose code is no longer what the entry of a record vouches for."
    known, files = entry["code"], entry.get("files")
    now = {name: _hash(name) for name in known} | (
        hashes(files) if files else {}
    )
    return sorted(f for f in now if now[f] != known.get(f))


def older(shown: Iterable[str]) -> list[str]:
    "What to say of the stale records among the files that a page shows."
    found: dict[str, list[str]] = {}
    shown = list(shown)
    for entry in ledger().values():
        path = f"results/{entry['path']}"
        if "stale" in entry and any(file.startswith(path) for file in shown):
            found.setdefault(
                f"Measured on {entry['made']} with code that has changed since "
                f"({entry['stale']})",
                [],
            ).append(f"`{path}`")
    return [f"{how}: {', '.join(paths)}." for how, paths in found.items()]


def look(
    entries: dict[str, dict[str, Any]],
    ask: Callable[[list[str]], dict[str, Any]] | None = None,
) -> Iterator[str]:
    """Brings the entries up to date; says of each record that is older than its
    code what became of it. `ask`: gives what the witnesses of records say.
    """
    old = {
        name: files
        for name, entry in entries.items()
        if (files := changed(entry))
    }
    said = (
        ask([name for name in old if "witness" in entries[name]]) if ask else {}
    )
    elsewhere = [
        name
        for name, now in said.items()
        if entries[name]["machine"] != now["machine"]
        and apart(entries[name], now)
    ]
    here = {
        name: of
        for name, of in (before(elsewhere) if elsewhere else {}).items()
        if of["code"].items() <= entries[name]["code"].items()
    }
    for name, entry in entries.items():
        how = ""
        if name in old:
            now = said.get(name)
            how = (
                apart(here.get(name, entry), now)
                if now
                else entry.get("stale", "the numbers may be others now")
            )
            told = (
                f"{name}: {', '.join(old[name][:3])}"
                f"{', …' * (len(old[name]) > 3)} changed"
            )
            yield (
                f"{told}; {how}: made on {entry['made']}, again in "
                f"{entry['again']}"
                if how
                else f"{told}, the witness says the same"
            )
            if not how:
                entry |= {"code": now["code"]}
        entry.pop("stale", None)
        entry |= {"stale": how} if how else {}


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    parser = argparse.ArgumentParser(
        prog="python -m tools.records", description=__doc__.split("\n\n")[0]
    )
    entries, began = ledger(), time.monotonic()
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--made", choices=entries, action="append", default=[])
    parser.add_argument("--witness", choices=entries, nargs="+")
    chosen = parser.parse_args(arguments)
    if chosen.witness:
        print(json.dumps(testify(chosen.witness)))
        return 0
    for name, now in (asked(chosen.made) if chosen.made else {}).items():
        entries[name].pop("stale", None)
        entries[name] |= {
            "made": time.strftime("%Y-%m-%d"),
            "content": content(entries[name]["path"]),
        } | now
    for line in (
        () if chosen.made else look(entries, None if chosen.list else asked)
    ):
        print(line, flush=True)
    stale = sum("stale" in entry for entry in entries.values())
    print(
        f"{stale} of {len(entries)} are stale, asked in "
        f"{time.monotonic() - began:.0f} s"
    )
    if not chosen.list:
        write(entries)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
