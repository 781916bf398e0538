"""Types, by mypy: the whole package, as its annotations say.

How strict, and what is taken for untyped, is in pyproject.toml.
"""

import re
import subprocess
import sys

import pytest

from tools.files import ROOT

pytestmark = pytest.mark.book
pytest.importorskip("mypy", reason="mypy is not installed")


def mypy(*arguments):
    "What mypy says, one line for each fault."
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line]


def test_nothing_to_find():
    assert mypy("normalnorm") == []


def test_layers_and_formulas_by_torchs_own_types(tmp_path):
    """A tensor is no Any there; in the rest torch is taken for untyped, because
    each attribute of somebody's module would be a tensor or a module.
    """
    skipped = 'module = ["torch.*", '
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert settings.count(skipped) == 1
    config = tmp_path / "mypy.toml"
    # report_card leads there from the names of the package
    analysis = 'module = "normalnorm.analysis.*"\nfollow_imports = "silent"'
    config.write_text(
        settings.replace(skipped, "module = [")
        + f"\n[[tool.mypy.overrides]]\n{analysis}\n",
        encoding="utf-8",
    )
    typed = f"--config-file={config}", f"--cache-dir={ROOT}/_build/mypy-torch"
    assert (
        mypy(*typed, "-p", "normalnorm.layers", "-p", "normalnorm.theory") == []
    )
    (wrong,) = mypy(
        *typed,
        "-c",
        "from normalnorm import LayerNormalNorm\n"
        "LayerNormalNorm(3).forward([1.0, 2.0, 3.0])",
    )
    assert 'expected "Tensor"' in wrong


FAULTS = """
from normalnorm.layers.core import Rule
Rule().quiet()  # attr-defined
from normalnorm.layers.weight_decay import groups_by_type
groups_by_type(None, decay=0.1)  # call-arg
from normalnorm.experiments.data import info
info(3)  # arg-type
from normalnorm.layers.folding import unfold  # attr-defined
"""


def test_faults_are_found():
    found = mypy("-c", FAULTS)
    kinds = [re.search(r"\[([\w-]+)\]$", line)[1] for line in found]
    assert kinds == re.findall("# (.*)", FAULTS), found
