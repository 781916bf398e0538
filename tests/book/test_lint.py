"""Lint, by ruff: chapters, tools, tests, and the package as it is exported.

What is left out, and why, is in pyproject.toml.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def ruff(*arguments, text=None):
    "What ruff says, one line for each fault."
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--output-format",
            "concise",
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        input=text,
    )
    assert done.returncode in (0, 1), done.stderr
    return [
        line
        for line in done.stdout.splitlines()
        if " F" in line
        or " E" in line
        or " B" in line
        or " I" in line
        or " W" in line
        or " D" in line
    ]


def test_files_and_cells_are_formatted():
    "By `ruff format`, in lines of 80: a page's column holds no more."
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
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
        text="import os\n\n\ndef f(x=[]):\n    return y\n",
    )
    expected = {"F401", "F821", "B006"}
    if place.startswith("normalnorm"):
        expected.add("D103")  # f has no docstring
    assert {
        code
        for line in found
        for code in ("F401", "F821", "B006", "D103")
        if code in line
    } == expected
