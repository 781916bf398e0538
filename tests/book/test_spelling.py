"""Spelling, by codespell: the prose of notebooks and pages, docstrings,
comments.

The words to be left alone are in pyproject.toml.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKED = (
    "nbs",
    "normalnorm",
    "tools",
    "tests",
    "benchmarks",
    "examples",
    "_static",
    ".github",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "CITATION.cff",
    "settings.ini",
    "Makefile",
)


def misspelled(*paths):
    """One line for each word that codespell does not like: file, line, word,
    what it proposes.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "codespell_lib",
            "--toml",
            str(ROOT / "pyproject.toml"),
            *map(str, paths),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 65) and not re.search(
        r"^(ERROR|usage)", done.stderr, re.M
    ), done.stderr
    return done.stdout.splitlines()


def test_spelling():
    assert misspelled(*(p for p in CHECKED if (ROOT / p).exists())) == []


@pytest.mark.parametrize(
    "name, line",
    [
        ("a.ipynb", "We rec-ieve a sample."),
        ("a.md", "The par-amter."),
        ("a.py", "x = 1  # t-eh sum"),
    ],
)
def test_a_misspelled_word_is_noticed(tmp_path, name, line):
    line = line.replace("-", "")  # written apart, or this file would not pass
    text = (
        json.dumps(
            {
                "cells": [
                    {
                        "cell_type": "markdown",
                        "source": ["A line.\n", line + "\n", "Last."],
                    }
                ]
            },
            indent=1,
        )
        if name.endswith("ipynb")
        else line
    )
    (tmp_path / name).write_text(text)
    assert len(misspelled(tmp_path / name)) == 1
