"""A record that is measured in parts, with resumption: what the tools that make
`results/*.json` have in common.

A part has a name of one or more words and a function that measures it. It is
written as soon as it is measured, at that place below "parts" in the record,
with the day, the commit, the processor time it took, and a hash of the code
that measured it; what stands above the parts is of the last one. What is there
is not measured again, and what other code has measured is refused, so that a
record never mixes two.
"""
import argparse
import ast
import hashlib
import inspect
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from normalnorm.experiments.results import provenance, write_atomically

Part = tuple[tuple[str, ...], Callable[[], Any]]


def _bare(tree: ast.AST) -> ast.AST:
    "Without docstrings; comments and layout are no part of a tree."
    for node in ast.walk(tree):
        if (isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
                and ast.get_docstring(node) is not None):
            del node.body[0]
    return tree


@cache
def _syntax(item: Any) -> str:
    return ast.dump(_bare(ast.parse(textwrap.dedent(inspect.getsource(item)))))


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _behind(name: str, source: str) -> str:
    """The syntax of all statements of a module that what it calls `name` needs,
    through others of its names too; imports are none.
    """
    statements = [node for node in _bare(ast.parse(source)).body
                  if not isinstance(node, (ast.Import, ast.ImportFrom))]
    # a definition is needed by its name, another statement by those that it
    # sets or, as a loop that fills a table, mentions
    makes = [{node.name} if isinstance(node, (ast.FunctionDef, ast.ClassDef))
             else {n.id for target in getattr(node, "targets", [
                 getattr(node, "target", node)]) for n in ast.walk(target)
                 if isinstance(n, ast.Name)} for node in statements]
    known = set().union(*makes)
    makes = [made if not isinstance(node, ast.For) else _names(node) & known
             for made, node in zip(makes, statements)]
    needed, new = set(), {name}
    while new:
        needed |= new
        new = {other for made, node in zip(makes, statements) if made & new
               for other in _names(node) & known} - needed
    return "\n".join(ast.dump(node) for made, node in zip(makes, statements)
                     if made & needed)


def code(measure: Callable, *instruments: Any) -> str:
    """Hash of what numbers depend on: of the function that measures with all
    that it needs of its module, and of modules, classes and functions.
    """
    while isinstance(measure, partial):
        measure = measure.func
    source = inspect.getsource(sys.modules[measure.__module__])
    return hashlib.sha256("\n".join(
        [_behind(measure.__name__, source), *map(_syntax, instruments)]
        ).encode()).hexdigest()


def run(text: str, record: Path, parts: Iterable[Part],
        about: Mapping[str, Any], instruments: Iterable[Any],
        arguments: list[str] | None = None) -> int:
    """The command line of a tool: `--only` parts, `--again`.

    `text`: the tool's docstring, which names its command in its second
    paragraph. `about`: what the record says of all parts. `instruments`: see
    `code`.
    """
    parser = argparse.ArgumentParser(
        prog=" ".join(text.split("\n\n")[1].split()[:3]),
        description=" ".join(text.split("\n\n")[0].split()))
    parser.add_argument("--only", action="append", metavar="PART",
                        help="a part, or the first words of several, with "
                             "slashes between (may be repeated)")
    parser.add_argument("--again", action="store_true",
                        help="also what is there")
    chosen = parser.parse_args(arguments)
    parts, instruments = list(parts), tuple(instruments)
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
        made_by = code(measure, *instruments)
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
        now = {"date": time.strftime("%Y-%m-%d"), **provenance()}
        place[path[-1]] = {"code": made_by, "date": now["date"],
                           "commit": now["commit"], "cpu_seconds": seconds,
                           "found": result}
        text = json.dumps(found | now | about, ensure_ascii=False) + "\n"
        write_atomically(record, lambda file, text=text: file.write(
            text.encode()))
        print(f"{'/'.join(path)}: {seconds:.0f} CPU seconds", flush=True)
    return 0
