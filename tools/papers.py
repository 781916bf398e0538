"""What the appendices show of the papers' statements: each with its verdict,
its evidence and the place of its check, in the paper's order.

Read from the ledger and from nbs/coverage.csv, which has each statement's
section, and a sentence where there is no claim; the correction of a statement
that is not right as it stands is in nbs/errata.csv.
"""

import csv
import html
import re
from collections.abc import Iterator

from IPython.display import HTML

from normalnorm import plots
from normalnorm.claims import Claim, ledger
from tools.chapters import ROOT

# a source, as nbs/coverage.csv names it: its page, and its name in the ledger
PAPERS = {
    "eftekhari2025": ("931_paper_normality", "eftekhari2025"),
    "reviews of eftekhari2025": (
        "932_paper_reviews",
        "reviews of eftekhari2025",
    ),
    "proxy normalization": ("933_paper_proxy_norm", "labatie2021"),
    "is batch norm unique": ("934_paper_unique", "rao2020"),
    "unified framework": ("935_paper_geometry", "salina"),
}


def read(name: str) -> list[dict[str, str]]:
    "The rows of a file of nbs."
    with (ROOT / "nbs" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def kept(name: str) -> dict[str, str]:
    "The second column of a file of nbs by its first."
    return dict(map(dict.values, read(name)))


def title(name: str) -> str:
    "A source's name, with a link to its page."
    return f'<a href="{PAPERS[name][0]}.html">{name}</a>'


def sources() -> dict[str, str]:
    "Identifier of a claim → what states it."
    return {r["claim"]: title(r["paper"]) for r in read("coverage.csv")}


def place(claim: Claim) -> str:
    "The address of the line where a claim is checked."
    return f"{claim.chapter}.html#claim-here-{claim.id}"


def badge(verdict: str) -> str:
    "A verdict with its colour."
    kind = verdict.replace(" ", "-")
    return f'<span class="verdict verdict-{kind}">{verdict}</span>'


def cells(claim: Claim, cited: str = "", right: str = "") -> list:
    """A claim in columns: in words, its verdict, its evidence. `cited`: what
    the source need not say again; `right`: the correction.
    """
    e, source = html.escape, claim.source.removeprefix(f"{cited}, ")
    source = re.sub(r"^new\b", "this book", source)
    return [
        e(claim.statement)
        + (f"<br><em>Right:</em> {e(right)}" if right else "")
        + f' <span class="claim-source">{e(source)}</span>',
        (f"{badge(claim.verdict)} {e(claim.condition)}", claim.verdict),
        claim.evidence,
    ]


def lines(name: str) -> Iterator[str | list]:
    """The lines of a source's table: its sections, and its statements with the
    number of the chapter in which each is checked.
    """
    claims, section = {c.id: c for c in ledger()}, ""
    right, (_, cited) = kept("errata.csv"), PAPERS[name]
    for row in read("coverage.csv"):
        if row["paper"] != name:
            continue
        if row["section"] != section:
            section = row["section"]
            yield html.escape(section)
        if claim := claims.get(row["claim"]):
            *said, evidence = cells(claim, cited, right.get(claim.id, ""))
            chapter = f'<a href="{place(claim)}">{claim.chapter[:3]}</a>'
            yield [*said, chapter, evidence]
        else:
            said, why = map(html.escape, (row["sentence"], row["reason"]))
            yield [said, "not checked", "–", (why, "none")]


def table(name: str) -> HTML:
    "A source's statements, in its order."
    heads = "statement and source", "verdict", "chapter", "evidence"
    return plots.sortable(
        heads, lines(name), choices=heads[1::2], kind="ledger stacked"
    )
