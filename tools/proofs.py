"""`make proofs`: the theorems in proofs/ through Coq's kernel, and what each of
them says and takes for granted into results/proofs/theorems.json.

A file of `FILES` proves theorems, refutes mutants of them, shows with `Fail`
what does not go through, and prints the assumptions of its theorems. These may
be the axioms of Coq's real numbers and the excluded middle, and no others.
"""

import json
import re
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.files import ROOT, ran, save

RECORD = ROOT / "results" / "proofs" / "theorems.json"
NEEDS = "coq libcoq-interval libcoq-coquelicot"  # Debian's packages
SHARED = ["sums", "yeo_johnson"]
FILES = ["curvature", "convexity", "shares", "regnorm"]
# of real numbers as Coq's library constructs them, and the excluded middle
REALS = {
    "ClassicalDedekindReals.sig_not_dec",
    "ClassicalDedekindReals.sig_forall_dec",
    "FunctionalExtensionality.functional_extensionality_dep",
    "Classical_Prop.classic",
}
# claims of the ledger, and the theorem that says the same
CLAIMS = {
    "nn-l2-simplified": "second_derivative",
    "curvature-identity": "identity",
    "nn-newton-sharp": "curvature_sharp",
    "nn-newton-well-posed": "curvature_well_posed",
    "nn-nll-convex": "nll_convex",
    "slope-shares": "shares",
    "bnu-reg-closed": "regnorm",
    "bnu-reg-min": "regnorm",
}


def source(file: str) -> str:
    return (ROOT / "proofs" / f"{file}.v").read_text(encoding="utf-8")


def statement(file: str, theorem: str) -> str:
    "A theorem as Coq reads it, behind the definitions that it speaks of."
    said = re.findall(
        r"(?ms)^((?:Definition|Record|Variables|Theorem|Corollary) .*?\.)$",
        "\n".join(map(source, [*SHARED, file])),
    )
    at = next(i for i, s in enumerate(said) if s.split()[1] == theorem)
    shown = [said[at]]
    for sentence in reversed(said[:at]):
        kind, name = re.match(r"(\w+) \(?([\w']+)", sentence).groups()
        spoken = re.findall(r"[\w']+", " ".join(shown))
        if kind == "Variables" or (kind[0] in "DR" and name in spoken):
            shown.insert(0, sentence)
    return "\n\n".join(shown)


def assumptions(printed: str) -> list[str]:
    "The axioms in what `Print Assumptions` prints."
    return sorted(set(re.findall(r"(?m)^(?!Axioms)([\w.]+)\s*:", printed)))


def proved(file: str, folder: Path) -> dict[str, Any]:
    "The row of one file; the end of the program where something is wrong."
    shutil.copy(ROOT / "proofs" / f"{file}.v", folder)
    words = f"coqc -w -ambiguous-paths -Q . normalnorm {file}.v"
    done, text = ran(words.split(), cwd=folder), source(file)
    axioms = assumptions(done.stdout)
    if done.returncode or not set(axioms) <= REALS:
        raise SystemExit(f"proofs/{file}.v: {done.stderr or axioms}")
    return {
        "theorems": re.findall(r"(?m)^Print Assumptions (\w+)\.$", text),
        "axioms": axioms,
        "refused": len(re.findall(r"\bFail\b", text.split("Mutants")[-1])),
    }


def main() -> int:
    if not shutil.which("coqc"):
        raise SystemExit(f"Coq is not there: apt-get install {NEEDS}")
    with tempfile.TemporaryDirectory() as folder:
        rows = {file: proved(file, Path(folder)) for file in [*SHARED, *FILES]}
    at = {name: file for file in rows for name in rows[file]["theorems"]}
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "coq": ran(["coqc", "--print-version"]).stdout.split()[0],
        "seconds": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime),
        "files": rows,
        "claims": {c: statement(at[name], name) for c, name in CLAIMS.items()},
    }
    RECORD.parent.mkdir(exist_ok=True)
    save(RECORD, found)
    print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
