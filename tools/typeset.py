"""Statements of the ledger, which are lines of plain text, as mathematics in
HTML: variables in italics, powers raised, indices lowered.

The words stay what they are, in their order; nothing is parsed, so nothing can
be misread. Where a letter may be a word, or underscores belong to the name of a
function, the text is left alone.
"""

import html
import re
import unicodedata

# Letters that are words as well: variables only beside an operator.
WORDS = "aAI"
TAKEN = "\ue000"  # where a mark was taken out
OPERATORS = "=<>≤≥≈·+−±/|√→←∈" + TAKEN
HATS = "\u0302\u0303\u0304"  # hat, tilde, bar, behind their letter
RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ᵏᵗʳⁿᵀ"
LOWERED = "₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢⱼₖ"
GREEK = f"[α-ωϕϵℓ][{HATS}]*"
# alone: not in a word, a number such as 1e-6, a name such as B2, Q–Q, log1p
LATIN = (
    r"(?<![A-Za-z]['’])(?<![A-Za-z_])(?<![A-Za-z][-–.])(?<![A-Za-z]\d)"
    r"(?!\d)(?:(?<!\d)|(?!e[-+−\d]))[A-Za-z](?![A-Za-z\d])"
    rf"(?![-–.][A-Za-z])(?!['’][a-z]{{1,2}}\b)[{HATS}]*"
)
INDEX = (
    rf"\{{[^{{}}]*\}}|\([^()\s]*\)|{GREEK}|[¼½¾]|−?\d+|"
    r"[a-z]{1,2}(?![a-z])|[A-Z]{1,3}"
)
BASE = rf"(?<![A-Za-ce-z_][A-Za-z])(?<=[A-Za-zα-ωϕℓΓΔΛΣΦΨΩ∂∇{HATS}"
MARK = re.compile(
    rf"(?P<code>`[^`]+`)|(?P<raised>[{RAISED}]+)|(?P<lowered>[{LOWERED}]+)|"
    rf"{BASE})}}|])\^(?P<power>{INDEX})|{BASE}])_(?P<index>{INDEX})|"
    rf"{BASE})])(?P<star>\*)(?![\w*])|{BASE})])(?P<primes>'{{1,3}})"
    r"(?![A-Za-z\d'])"
)


def escape(text: str) -> str:
    return html.escape(text, quote=False)


def is_word(text: str, start: int, end: int) -> bool:
    "Whether a letter that may be a word stands like one."
    return not (
        text[start] not in WORDS
        or text[:start].rstrip()[-1:] in tuple(OPERATORS)
        or text[end:].lstrip()[:1] in tuple(OPERATORS)
        or text[start - 1 : end + 1] == f"({text[start]})"
        or text[end : end + 1] in ("(", ";", "'")
    )


def variables(text: str) -> str:
    "Letters that stand for something in `<var>`."
    out, end = [], 0
    for found in re.finditer(f"{GREEK}|{LATIN}", text):
        if found[0][0] in WORDS and is_word(text, *found.span()):
            continue
        out += [escape(text[end : found.start()]), f"<var>{found[0]}</var>"]
        end = found.end()
    return "".join([*out, escape(text[end:])])


def mark(kind: str, content: str) -> str:
    "A power, an index, a star, primes, or code."
    if kind == "code":
        return f"<code>{escape(content[1:-1])}</code>"
    if kind == "primes":
        return "′″‴"[len(content) - 1]
    if kind == "star":
        return "<sup>∗</sup>"
    if content[0] == "{" or (kind, content[0]) == ("power", "("):
        content = content[1:-1]
    if kind in ("raised", "lowered"):
        content = unicodedata.normalize("NFKC", content)
    tag = "sup" if kind in ("raised", "power") else "sub"
    inner = (
        f"<var>{content}</var>"
        if re.fullmatch("[a-z]{2}", content)
        else statement(content.replace("-", "−"))
    )
    return f"<{tag}>{inner}</{tag}>"


def statement(text: str) -> str:
    "A statement as HTML."
    marks = [
        mark(found.lastgroup, found[found.lastgroup])
        for found in MARK.finditer(text)
    ]
    done = variables(MARK.sub(TAKEN, text))
    for made in marks:
        done = done.replace(TAKEN, made, 1)
    return done


# Where the outputs of checks and of the appendices have statements.
PLACES = re.compile(
    r'(?P<before><span class="claim-verdict">[^<]*</span>|'
    r'<td data-head="statement and source">|<em>(?:Stated|Right):</em>|'
    r'(?P<verdict><span class="verdict[^"]*">[^<]*</span>))(?P<text>[^<]+)'
)


def in_output(source: str) -> str:
    "The HTML of a cell's output with its statements typeset."
    return PLACES.sub(
        lambda m: m["before"] + statement(html.unescape(m["text"])), source
    )
