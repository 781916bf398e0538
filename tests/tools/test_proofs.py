"The record of the theorems that Coq has checked: see tools/proofs.py."

import re

from normalnorm.claims import ledger
from tools import proofs
from tools.files import load


def test_the_record_is_of_these_files():
    found = load(proofs.RECORD)
    assert list(found["files"]) == [*proofs.SHARED, *proofs.FILES]
    at = {t: f for f, row in found["files"].items() for t in row["theorems"]}
    for claim, theorem in proofs.CLAIMS.items():
        said = proofs.statement(at[theorem], theorem)
        assert said == found["claims"][claim]
    for file in proofs.FILES:
        row, text = found["files"][file], proofs.source(file)
        assert set(row["axioms"]) <= proofs.REALS, file
        assert row["refused"] > 0, file
        assert any("mutant" in name for name in row["theorems"]), file
        assert not re.search(r"\b(Admitted|Axiom|Parameter|admit)\b", text)


def test_the_ledger_has_these_claims():
    found = {c.id for c in ledger() if c.evidence == "kernel-checked"}
    assert found == set(proofs.CLAIMS)


def test_what_coq_prints():
    printed = "Axioms:\nReals.a : nat\nadmitted\n  : forall x : R,\n    x = x\n"
    assert proofs.assumptions(printed) == ["Reals.a", "admitted"]
    assert proofs.assumptions("Closed under the global context\n") == []
