"""A record that is measured in parts, with resumption: what the tools that make
`results/*.json` have in common.

A part has a name of one or more words and a function that measures it. It is
written as soon as it is measured, at that place below "parts" in the record,
with the day, the commit, the processor time it took, and a hash of the code
that was loaded; what stands above the parts is of the last one. What is there
is not measured again. What other code has measured is refused, unless a witness
says that it is the same (tools/records.py), so a record never mixes two.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from normalnorm.experiments.results import provenance, write_atomically
from tools import records

Part = tuple[tuple[str, ...], Callable[[], Any]]


def code() -> str:
    "Hash of all code of this repository that this process has loaded."
    return records.digest(records.hashes())


def run(
    text: str,
    record: Path,
    parts: Iterable[Part],
    about: Mapping[str, Any],
    arguments: list[str] | None = None,
) -> int:
    """The command line of a tool: `--only` parts, `--again`.

    `text`: the tool's docstring, which names its command in its second
    paragraph. `about`: what the record says of all parts.
    """
    parser = argparse.ArgumentParser(
        prog=" ".join(text.split("\n\n")[1].split()[:3]),
        description=" ".join(text.split("\n\n")[0].split()),
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PART",
        help="a part, or the first words of several, with "
        "slashes between (may be repeated)",
    )
    parser.add_argument(
        "--again", action="store_true", help="also what is there"
    )
    chosen = parser.parse_args(arguments)
    parts = list(parts)
    wanted = [tuple(only.split("/")) for only in chosen.only or ()]
    known = {path[: len(only)] for only in wanted for path, _ in parts}
    if missing := [only for only in wanted if only not in known]:
        names = dict.fromkeys(p[0] for p, _ in parts)
        parser.error(
            f"there is no part {'/'.join(missing[0])}: expected "
            f"{', '.join(names)}, or what is below one of them"
        )
    torch.set_num_threads(1)
    for path, measure in parts:
        if wanted and not any(path[: len(only)] == only for only in wanted):
            continue
        found = json.loads(record.read_text()) if record.exists() else {}
        place = found.setdefault("parts", {})
        for word in path[:-1]:
            place = place.setdefault(word, {})
        if path[-1] in place and not chosen.again:
            if place[path[-1]]["code"] != code() and not records.vouched(
                record
            ):
                parser.error(
                    f"{'/'.join(path)} was measured by other code: "
                    "measure it again with --again"
                )
            continue
        start = time.process_time()
        result = measure()
        seconds = round(time.process_time() - start, 1)
        now = {"date": time.strftime("%Y-%m-%d"), **provenance()}
        place[path[-1]] = {
            "code": code(),
            "date": now["date"],
            "commit": now["commit"],
            "cpu_seconds": seconds,
            "found": result,
        }
        text = json.dumps(found | now | about, ensure_ascii=False) + "\n"
        write_atomically(
            record, lambda file, text=text: file.write(text.encode())
        )
        print(f"{'/'.join(path)}: {seconds:.0f} CPU seconds", flush=True)
    return 0
