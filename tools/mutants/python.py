"Wrong versions of a Python module, made and run by mutmut."

import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
from libcst.metadata import ExpressionContext, ExpressionContextProvider
from mutmut.configuration import config
from mutmut.mutation import file_mutation
from mutmut.mutation.mutators import mutation_operators
from mutmut.utils.format_utils import get_mutant_name

from tools.files import ROOT
from tools.mutants.operators import OURS, code

# Around these mutmut may put its switch between a function and its mutants; it
# leaves every other decorated function out, properties and contexts among them.
PLAIN = ("torch.no_grad()", "left_alone", "guards.left_alone")


ATOMS = (cst.Name, cst.BaseString)


def bracketed(node: cst.CSTNode) -> cst.CSTNode:
    if not isinstance(node, cst.BaseExpression) or isinstance(node, ATOMS):
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


class _Visitor(file_mutation.MutationVisitor):
    "Not what is raised, but functions under plain decorators; in brackets."

    METADATA_DEPENDENCIES = (
        *file_mutation.MutationVisitor.METADATA_DEPENDENCIES,
        ExpressionContextProvider,
    )

    def _create_mutations(self, node: cst.CSTNode) -> None:
        how = self.get_metadata(ExpressionContextProvider, node, None)
        written = how in (ExpressionContext.STORE, ExpressionContext.DEL)
        if not (isinstance(node, cst.Name) and written):
            known = len(self.mutations)
            super()._create_mutations(node)
            for mutation in self.mutations[known:]:
                mutation.mutated_node = bracketed(mutation.mutated_node)

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            if all(code(d.decorator) in PLAIN for d in node.decorators):
                node = node.with_changes(decorators=())
        raised = isinstance(node, cst.Raise)
        return raised or super()._skip_node_and_children(node)


def changes(file: str, source: str) -> list[tuple[str, str]]:
    "Of each mutant of a module what is changed, and into what."
    prepare()
    _, found, *_ = file_mutation.create_mutations(file, source)
    return [
        (code(c.original_node), code(c.mutated_node))
        for c in found
        if c.contained_by_top_level_function
    ]


def prepare() -> None:
    "From now on mutmut makes our changes, too."
    file_mutation.MutationVisitor = _Visitor
    if OURS[0] not in mutation_operators:
        mutation_operators.extend(OURS)


def run(
    file: str, count: int, seed: int, tests: list[str], jobs: int
) -> Iterator[dict]:
    """A row for each of `count` mutants of a module, drawn by the seed; in a
    process of its own, because mutmut keeps what it knows.
    """
    from mutmut import __main__ as mutmut  # says how processes are started

    prepare()
    folder = ROOT / "_build" / "mutants" / "checkout"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("normalnorm", "tests", "results", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    os.chdir(folder)
    # what the chapters found of the claims, without a mutant
    sys.modules["tools.ledger"] = None  # type: ignore[assignment]
    os.environ |= {  # for processes that tests start; and no checks are written
        "PYTHONPATH": str(folder / "mutants"),
        "PYTEST_XDIST_WORKER": "mutant",
        "NORMALNORM_QUIET": "1",
        "OMP_NUM_THREADS": "1",
    }
    config().only_mutate = [file]
    config().pytest_add_cli_args_test_selection = tests
    source = (ROOT / file).read_text(encoding="utf-8")
    made = file_mutation.mutate_file_contents(file, source).mutant_names
    names = sorted(get_mutant_name(Path(file), name) for name in made)
    drawn = random.Random(f"{seed} {file}").sample(
        names, min(count, len(names))
    )
    mutmut._run(drawn, jobs)
    data = mutmut.SourceFileMutationData(path=Path(file))
    data.load()
    for name in drawn:
        diff = mutmut.get_diff_for_mutant(name, path=Path(file)).splitlines()
        before, after = (
            "\n".join(
                row[1:].strip()
                for row in diff
                if row.startswith(sign) and row[:3] != 3 * sign
            )
            for sign in "-+"
        )
        status = mutmut.status_by_exit_code[data.exit_code_by_key[name]]
        yield {
            "file": file,
            "mutant": name,
            "before": before,
            "after": after,
            "outcome": status,
        }
