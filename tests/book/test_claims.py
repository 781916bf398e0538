"""The ledger: registering, running, selecting; every claim comes out as
recorded and rejects its mutant; the command line.

A claim that the run of its chapter has checked, with the code as it is now, is
not run again; any other is run here.
"""

import pytest

from normalnorm import claims, cli
from tests.refusals import refusals

# beside the package alone, as in make test-oldest, every claim is run here
try:
    from tools.ledger import outcome_of
except ModuleNotFoundError:

    def outcome_of(claim):
        return claims.run_claim(claim, mutant=True)


def make(id="test-claim", check=lambda value: None, **changes):
    fields = dict(
        source="s",
        statement="t",
        kind="identity",
        verdict="holds",
        evidence="numerical",
        formula=1,
        mutant=2,
    )
    return claims.claim(id, **{**fields, **changes})(check)


@pytest.fixture
def ledger(monkeypatch):
    monkeypatch.setattr(claims, "_LEDGER", dict(claims._LEDGER))
    return claims._LEDGER


test_registering_refuses = refusals(
    [
        (dict(kind="rumour"), "kind"),
        (dict(verdict="maybe"), "verdict"),
        (dict(evidence="hearsay"), "evidence"),
        (dict(verdict="holds if"), "condition"),
        (dict(condition="on Sundays"), "condition"),
    ],
    lambda change: make(**change),
)


def test_registering_twice(ledger):
    make()
    with pytest.raises(ValueError, match="registered twice"):
        make()


def test_ledger_is_in_the_order_of_the_book_and_has_no_part_missing():
    chapters = [c.chapter for c in claims.ledger()]
    assert chapters == sorted(chapters) and all(chapters)
    assert {c.part for c in claims.ledger()} >= {1, 2, 7}


@pytest.mark.parametrize("claim", claims.ledger(), ids=lambda c: c.id)
def test_claim(claim):
    outcome = outcome_of(claim)
    assert outcome.outcome in ("as recorded", "skipped"), outcome.message
    assert outcome.mutant in ("rejected", "not run"), outcome.mutant


def test_every_check_says_how_it_checks():
    assert [c.id for c in claims.ledger() if len(c.statement) < 10] == []


def test_exit_status_one_when_a_claim_fails(ledger, capsys):
    def check(value):
        assert value == 0, "it is not"

    make("test-fails", check)
    assert cli.main(["verify", "test-fails"]) == 1
    assert "not as recorded: test-fails" in capsys.readouterr().out
    make("test-weak", lambda value: None)
    assert (
        cli.main(["verify", "test-weak"]) == 0
        and cli.main(["verify", "test-weak", "--mutants"]) == 1
    )


def test_identifier_as_an_option(capsys):
    assert cli.main(["verify", "--identifier", "nn-yj-identity"]) == 0
    assert "1 claims" in capsys.readouterr().out


def test_skipped_when_a_package_is_missing(ledger):
    make("test-needs", requires=("no_such_package",))
    outcome = claims.run_claim(ledger["test-needs"])
    assert (
        outcome.outcome == "skipped"
        and "pip install no_such_package" in outcome.message
        and outcome.ok
    )
