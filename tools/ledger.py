"""The ledger's outcomes, each made once: by the run of the chapter in which the
claim stands.

A chapter that is executed runs each of its checks, and its mutant; the record
of the run keeps what came out. It holds as long as the run does: while the
chapter's code and every file of the repository that it imported or read are
what they were, and the module of `normalnorm.checks` is what the chapter
exports. The appendix and the tests take the outcomes from here and run what is
missing. `normalnorm verify` always runs everything.
"""

from functools import lru_cache
from pathlib import Path

from tools.chapters import ROOT, chapters
from tools.run import Run


def exported(chapter) -> bool:
    """Whether normalnorm/checks holds what the chapter says, so that the run of
    the chapter was a run of the module.
    """
    from tools.export import check_module

    file = chapter.root / "normalnorm" / "checks"
    file = file.joinpath(*chapter.module.split(".")).with_suffix(".py")
    return file.exists() and file.read_text(encoding="utf-8") == check_module(
        chapter
    )


@lru_cache(maxsize=4)
def recorded(root: Path = ROOT) -> dict[str, dict]:
    """Identifier of a claim → outcome, mutant, seconds, from all chapters whose
    run is up to date.
    """
    found = {}
    for chapter in chapters(root):
        run = Run(chapter)
        claims = run.record().get("claims")
        if claims and not run.stale() and exported(chapter):
            found |= claims
    return found


def outcome_of(claim, root: Path = ROOT):
    "What was recorded about a claim with its mutant; run now where nothing is."
    from normalnorm.claims import Outcome, run_claim

    known = recorded(root).get(claim.id)
    if known is None:
        return run_claim(claim, mutant=True)
    return Outcome(
        claim, known["outcome"], known["seconds"], "", known["mutant"]
    )


def outcomes(root: Path = ROOT) -> list:
    "The whole ledger, in the order of the book."
    from normalnorm.claims import ledger

    return [outcome_of(claim, root) for claim in ledger()]
