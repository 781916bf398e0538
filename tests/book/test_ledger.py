"""One run of a claim serves: the chapter's, for as long as nothing that it
depends on has changed.
"""

import os
import shutil

import pytest

from normalnorm import claims
from tests.book import toy
from tools import export, ledger, run
from tools.chapters import ROOT, Chapter

CHECK = """#| check
from normalnorm.claims import claim
from normalnorm.sums import triangle

@claim("toy-triangle", source="toy", statement="1 + 2 + ... + n is n(n+1)/2",
       kind="identity", verdict="holds", evidence="numerical", formula=triangle,
       mutant=lambda n: n * n)
def _(f):
    assert f(7) == sum(range(8))"""


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    "A chapter with a formula and its claim, run once."
    root = tmp_path_factory.mktemp("ledger")
    toy.checkout(
        root,
        {
            "index": [("markdown", "# Toy"), ("code", "1")],
            "010_sums": [
                ("markdown", "# Sums"),
                ("code", "#| default_exp sums"),
                (
                    "code",
                    "#| export\ndef triangle(n):\n    'The sum to n.'\n"
                    "    return n * (n + 1) // 2",
                ),
                ("code", CHECK),
            ],
        },
    )
    export.generate(root)
    export.write_checks(root)
    (root / "normalnorm" / "__init__.py").touch()
    for module in ("claims.py", "names.py"):
        shutil.copy(ROOT / "normalnorm" / module, root / "normalnorm" / module)
    run.execute(Chapter("010_sums", root))
    return root


def known(root):
    ledger.recorded.cache_clear()
    return ledger.recorded(root)


def test_the_run_of_a_chapter_is_the_run_of_its_claims(book):
    assert {
        name: (c["outcome"], c["mutant"]) for name, c in known(book).items()
    } == {"toy-triangle": ("as recorded", "rejected")}


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("normalnorm/sums.py", "n + 1", "n + 2"),  # the formula
        # what runs the check
        ("normalnorm/claims.py", "AssertionError", "Exception"),
        (
            "normalnorm/checks/sums.py",
            "f(7) ==",
            "f(7) !=",
        ),  # the exported check
        ("nbs/010_sums.ipynb", "f(7) ==", "f(8) =="),  # the check
        ("nbs/010_sums.ipynb", "lambda n: n * n", "lambda n: n"),  # the mutant
        ("constraints.txt", "==", "==1."),  # the versions
        # a run that failed
        ("_build/executed/010_sums.json", '"key"', '"failed": {}, "key"'),
    ],
)
def test_what_changed_is_run_again(book, tmp_path, file, old, new):
    root = tmp_path / "book"
    shutil.copytree(book, root)
    assert set(known(root)) == {"toy-triangle"}
    run.environment.cache_clear()
    path = root / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert known(root) == {}


def test_who_runs_a_claim(monkeypatch):
    """Without a record it is run, with one it is not; `normalnorm verify` knows
    nothing of records.
    """
    calls, known = [], {}
    claim = claims.Claim(
        "toy", "s", "t", "identity", "holds", "numerical", calls.append, 1, 2
    )
    monkeypatch.setattr(ledger, "recorded", lambda root: known)
    assert ledger.outcome_of(claim).mutant == "survived" and calls == [1, 2]
    known["toy"] = {"outcome": "as recorded", "mutant": "rejected"}
    known["toy"]["seconds"] = 0.1
    assert ledger.outcome_of(claim).ok and calls == [1, 2]
    (outcome,) = claims.verify([claim], mutants=True)
    assert outcome.mutant == "survived" and calls == [1, 2, 1, 2]


def test_a_chapter_and_the_tests_see_the_same_environment(monkeypatch):
    """What the runner sets for a kernel, and conftest for the tests, is no
    other choice of instructions: or every record would look old from there, and
    all would be run again.
    """
    monkeypatch.delenv("NORMALNORM_QUIET", raising=False)
    assert not [
        name
        for name in run.kernel_environment(run.ROOT)
        if name not in os.environ and run.SWITCHES.fullmatch(name)
    ]
    names = (
        "CXX",
        "ATEN_CPU_CAPABILITY",
        "NORMALNORM_QUIET",
        "NORMALNORM_CACHE",
        "NORMALNORM_TEST_THREADS",
        "NORMALNORM_WAIT",
    )
    switches = [name for name in names if run.SWITCHES.fullmatch(name)]
    assert switches == ["CXX", "ATEN_CPU_CAPABILITY"]
