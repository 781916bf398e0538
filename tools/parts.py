"""A record that is measured in parts, with resumption: what the tools that make
`results/*.json` have in common.

A part has a name of one or more words and a function that measures it. It is
written as soon as it is measured, at that place below "parts" in the record,
with the processor time it took and a hash of the code that measured it. What is
there is not measured again, and what other code has measured is refused, so
that a record never mixes two.
"""
import argparse
import ast
import hashlib
import inspect
import json
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from normalnorm.experiments.results import provenance, write_atomically

Part = tuple[tuple[str, ...], Callable[[], Any]]


def _plain(source: str) -> str:
    """The syntax of `source` without docstrings, comments, layout, and the
    function `main`.
    """
    tree = ast.parse(textwrap.dedent(source))
    tree.body = [node for node in tree.body
                 if getattr(node, "name", "") != "main"]
    for node in ast.walk(tree):
        if (isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
                and ast.get_docstring(node) is not None):
            del node.body[0]
    return ast.dump(tree)


def code(*of: Any) -> str:
    "Hash of modules, classes and functions that numbers depend on."
    return hashlib.sha256("\n".join(
        _plain(inspect.getsource(item)) for item in of).encode()).hexdigest()


def run(text: str, record: Path, parts: Iterable[Part],
        about: Mapping[str, Any], made_by: str, name: str,
        arguments: list[str] | None = None) -> int:
    """The command line of a tool: `--only` parts, `--again`.

    `text`: the tool's docstring. `about`: what the record says of all parts.
    `made_by`: the hash of `code`. `name`: the tool's module.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.{name}",
        description=" ".join(text.split("\n\n")[0].split()))
    parser.add_argument("--only", action="append", metavar="PART",
                        help="a part, or the first words of several, with "
                             "slashes between (may be repeated)")
    parser.add_argument("--again", action="store_true",
                        help="also what is there")
    chosen = parser.parse_args(arguments)
    parts = list(parts)
    wanted = [tuple(only.split("/")) for only in chosen.only or ()]
    known = {path[:len(only)] for only in wanted for path, _ in parts}
    if missing := [only for only in wanted if only not in known]:
        names = dict.fromkeys(p[0] for p, _ in parts)
        parser.error(f"there is no part {'/'.join(missing[0])}: expected "
                     f"{', '.join(names)}, or what is below one of them")
    torch.set_num_threads(1)
    for path, measure in parts:
        if wanted and not any(path[:len(only)] == only for only in wanted):
            continue
        found = json.loads(record.read_text()) if record.exists() else {}
        place = found.setdefault("parts", {})
        for word in path[:-1]:
            place = place.setdefault(word, {})
        if path[-1] in place and not chosen.again:
            if place[path[-1]]["code"] != made_by:
                parser.error(f"{'/'.join(path)} was measured by other code: "
                             "measure it again with --again")
            continue
        start = time.process_time()
        result = measure()
        seconds = round(time.process_time() - start, 1)
        place[path[-1]] = {"code": made_by, "cpu_seconds": seconds,
                           "found": result}
        text = json.dumps(
            {"date": time.strftime("%Y-%m-%d"), **provenance(), **about,
             "parts": found["parts"]}, ensure_ascii=False) + "\n"
        write_atomically(record, lambda file, text=text: file.write(
            text.encode()))
        print(f"{'/'.join(path)}: {seconds:.0f} CPU seconds", flush=True)
    return 0
