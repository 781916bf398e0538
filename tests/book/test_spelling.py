"""Spelling, by codespell: the prose of notebooks and pages, docstrings,
comments.

The words to be left alone are in pyproject.toml.
"""

import re

from tools.files import ROOT, python, save

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
    check = "-m codespell_lib --toml pyproject.toml".split()
    done = python(*check, *paths, cwd=ROOT)
    assert done.returncode in (0, 65) and not re.search(
        r"^(ERROR|usage)", done.stderr, re.M
    ), done.stderr
    return done.stdout.splitlines()


def test_spelling():
    assert misspelled(*(p for p in CHECKED if (ROOT / p).exists())) == []


def test_a_misspelled_word_is_noticed(tmp_path):
    "In a notebook too, whatever pyproject.toml leaves out of it."
    line = "We rec-ieve a sample."
    line = line.replace("-", "")  # written apart, or this file would not pass
    cell = {"cell_type": "markdown", "source": ["A line.\n", line, "Last."]}
    save(tmp_path / "a.ipynb", {"cells": [cell]})
    assert len(misspelled(tmp_path / "a.ipynb")) == 1
