"""Where rows are kept: a file for each processor, instruction set and number of
threads, which says what made it.
"""

import json
import os
import re
import time
from pathlib import Path

from tools import processors
from tools.files import ROOT, load, replace

OUT = ROOT / "results" / "benchmarks"
# Rows of one file agree in these.
ONE = (
    "source",
    "processor",
    "family",
    "model",
    "vectors",
    "threads",
    "torch",
    "compiler",
)


def cpuid() -> dict:
    """Family and model of an x86 processor, by which two of the same name are
    told apart; nothing elsewhere.
    """
    known = processors.cpuinfo()
    return {
        key: int(known[name])
        for key, name in (("family", "cpu family"), ("model", "model"))
        if known.get(name, "").isdigit()
    }


def environment(threads: int) -> dict:
    """Where and with what.

    `kernel` and `backend` are what computed the layers so far, so this is asked
    when something has been measured."""
    import normalnorm
    from normalnorm.experiments.results import provenance

    made = provenance()
    return {
        "vectors": made.pop("instructions"),
        **made,
        **cpuid(),
        "cores": os.cpu_count(),
        "threads": threads,
        "compiler": processors.first_line(
            *(os.environ.get("CXX") or "g++").split(), "--version"
        ),
        "normalnorm": normalnorm.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "pages kept": "MALLOC_TOP_PAD_" in os.environ,
    }


def name(environment: dict) -> str:
    """The name of a file, of what its environment knows.

    Example: "amd-epyc-25-17_avx2_1-thread.json".
    """
    words = re.sub(
        r"\((r|tm|c)\)|\bprocessor\b|\bcpu\b|@.*",
        " ",
        environment["processor"].lower(),
    )
    parts = [word for word in re.split(r"[^a-z0-9]+", words) if word]
    parts += [
        str(environment[key])
        for key in ("family", "model")
        if environment.get(key) is not None
    ]
    threads = environment["threads"]
    return (
        f"{'-'.join(parts)}_{environment['vectors'].lower()}_"
        f"{threads}-thread{'s' * (threads > 1)}.json"
    )


def nothing() -> dict:
    return {"environment": {}, "parts": {}, "rows": []}


def read(path: Path) -> dict:
    "What a file holds; of one that is not there, nothing."
    return load(path) if path.exists() else nothing()


def differences(old: dict, here: dict) -> list[str]:
    "In what two environments differ that rows of one file must agree in."
    return [
        f"{key}: {old.get(key, 'not recorded')} there, "
        f"{here.get(key, 'not recorded')} here"
        for key in ONE
        if old.get(key) != here.get(key)
    ]


def begin(
    path: Path,
    here: dict,
    asked: list[str],
    known: list[str],
    pairs: int,
) -> tuple[dict, list[str]]:
    """What a file holds of this environment, and the parts to measure: those
    that were asked for; where none was, all that it does not have, of as many
    pairs.

    One file has one environment: `SystemExit` where rows of another one would
    stay beside new ones.
    """
    record = read(path)
    different = differences(record["environment"], here)
    stay = sorted({row["part"] for row in record["rows"]} - set(asked))
    if different and asked and stay:
        raise SystemExit(
            f"{path} has rows that would stay ({', '.join(stay)}) beside new "
            f"ones, and another environment ({'; '.join(different)}): measure "
            "all parts, or give another --out"
        )
    if different:
        record = nothing()
    return record, asked or [
        part
        for part in known
        if record["parts"].get(part, {}).get("pairs") != pairs
    ]


def write(path: Path, record: dict) -> None:
    "The whole file at once, or the old one stays."
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
    head = json.dumps(
        {key: record[key] for key in ("environment", "parts")}, indent=1
    )
    replace(path, f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n')
