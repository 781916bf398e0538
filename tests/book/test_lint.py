"""Lint, by ruff: chapters, tools, tests, and the package as it is exported.

What is left out, and why, is in pyproject.toml.
"""

import re

import pytest

from tools.files import ROOT, python


def ruff(*arguments, text=None):
    "What ruff says, one line for each fault."
    check = "-m ruff check --output-format concise".split()
    done = python(*check, *arguments, cwd=ROOT, input=text)
    assert done.returncode in (0, 1), done.stderr
    return re.findall(r"(?m)^.*: [A-Z]+\d+ .*$", done.stdout)


def test_files_and_cells_are_formatted():
    "By `ruff format`, in lines of 80: a page's column holds no more."
    done = python(*"-m ruff format --check".split(), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_to_find():
    assert ruff() == []


@pytest.mark.parametrize(
    "place",
    ["normalnorm/layers/x.py", "normalnorm/x.py", "tools/x.py", "tests/x.py"],
)
def test_a_fault_is_found_in_every_room(place):
    found = ruff(
        "--stdin-filename",
        place,
        "-",
        text="import os\n\nimport timm\n\n\ndef f(x=[]):\n    return y(timm)\n",
    )
    expected = {"F401", "F821", "B006"}
    if place.startswith("normalnorm"):
        # f has no docstring; a package that is none of the library's
        expected |= {"D103", "TID251"}
    assert {re.search(r": ([A-Z]+\d+) ", line)[1] for line in found} == expected


def test_checks_need_nothing_that_only_their_notebook_has():
    """A chapter's run finds every name that its cells define; the exported
    check has only its own module.
    """
    undefined = "--select F821 --no-respect-gitignore normalnorm/checks"
    assert ruff(*undefined.split()) == []
