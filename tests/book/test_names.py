"The contents by name, and what the front page of the book says is proved."

import re

import normalnorm
from normalnorm.claims import ledger
from normalnorm.layers.families import rows
from tools import names
from tools.chapters import ROOT, chapter, chapters


def test_every_name_is_in_the_contents():
    """Public layers, instruments, theorems and papers, as the package, the
    ledger and the list of references have them; each mark of the page has its
    table.
    """
    made = names.tables()
    marks = names.MARK.findall((ROOT / "nbs/contents.md").read_text("utf-8"))
    assert marks == [*made]
    layers = made["layers"] + made["modules"]
    for name in normalnorm._PUBLIC:
        assert made["layers"].count(f"[`{name}`]") == 1, name
    for row in rows():
        name = row.layer.__name__
        assert name.startswith("_") or f"[`{name}`]" in layers, name
    for c in chapters():
        if c.module.startswith(("analysis.", "theory.")):
            of = made["instruments" if c.module[0] == "a" else "formulas"]
            assert of.count(f"| {{doc}}`{c.name}` |") == 1, c.name
    there = re.findall('#claim-here-([^"]+)"', made["theorems"])
    assert sorted(there) == sorted(
        c.id for c in ledger() if c.kind == "theorem"
    )
    known = re.findall(
        r"^@\w+\{(\w+),", (ROOT / "references.bib").read_text(), re.M
    )
    assert {*known} == {k for k, of in names.cited(ROOT).items() if of}
    assert made["papers"].count("\n") == len(known) + 1


def test_what_shares_a_line_and_who_uses_it():
    lines = names.layers(ROOT).splitlines()
    (of,) = (line for line in lines if "[`RegNormLinear`]" in line)
    assert "[`RegNormConv3d`]" in of and "PreRegNorm" not in of
    assert "{doc}`440_layers.regnorm` |" in of
    (of,) = (line for line in lines if "[`ProxyNorm`]" in line)
    assert "{doc}`420 <420_layers.proxy_conversion>`" in of
    assert "{doc}`415 <" not in of and "{doc}`005 <" not in of


def test_what_is_said_to_be_proved():
    "By claims of these chapters."
    of = {c.id: c for c in ledger()}
    source = "\n".join(chapter("005_should_i_use_it").code_cells())
    found = re.findall(r'\("(\d{3}_[\w.]+)", "([\w-]+)"\)', source)
    assert len(found) >= 3
    for page, name in found:
        c = of[name]
        assert c.chapter == page, name
        assert c.evidence in ("proof", "kernel-checked"), name
        assert c.verdict == "holds", name
