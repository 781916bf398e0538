"Statements of the ledger as mathematics: what is marked, and what is left."

import html
import re
import unicodedata

import pytest

from normalnorm.claims import Claim, Outcome, ledger
from tools import typeset
from tools.dialect import link_claims, typeset_output


def short(text):
    "`x` for a variable, ^{2} and _{i} for powers and indices."
    made = re.sub("</?var>", "`", typeset.statement(text))
    made = made.replace("<sup>", "^{").replace("<sub>", "_{")
    return html.unescape(re.sub("</su[bp]>", "}", made))


@pytest.mark.parametrize(
    "text, made",
    [
        ("λ̂ = 1 − L'(1)/L''(1)", "`λ̂` = 1 − `L`′(1)/`L`″(1)"),
        ("ψ(h; 1) = h", "`ψ`(`h`; 1) = `h`"),
        ("½ℓ², σ³·φ_k(ηℓ)", "½`ℓ`^{2}, `σ`^{3}·`φ`_{`k`}(`η``ℓ`)"),
        ("L⁽³⁾(λ) and x₁", "`L`^{(3)}(`λ`) and `x`_{1}"),
        (
            "A^{-1/2}, V^T(w), ε^¼, z^(−1/2)",
            "`A`^{−1/2}, `V`^{`T`}(`w`), `ε`^{¼}, `z`^{−1/2}",
        ),
        (
            "λ_MLE, B_xS, A_ij, x_(n+1−i)",
            "`λ`_{MLE}, `B`_{`x`}`S`, `A`_{`ij`}, `x`_{(`n`+1−`i`)}",
        ),
        ("I(X*; X*+Z*)", "`I`(`X`^{∗}; `X`^{∗}+`Z`^{∗})"),
        ("(1+a)ℓ ≥ |a| for d(a)", "(1+`a`)`ℓ` ≥ |`a`| for `d`(`a`)"),
        ("f''² at 2L''", "`f`″^{2} at 2`L`″"),
        ("x < y & z", "`x` < `y` & `z`"),
        ("scale `x_1`: x", "scale <code>x_1</code>: `x`"),
    ],
)
def test_what_is_marked(text, made):
    assert short(text) == made


@pytest.mark.parametrize(
    "text",
    [
        "a unit of a layer",
        "the noise's scale, Taylor's and Cox's",
        "a Q–Q plot",
        "1e-6 nats, 1.8e−2, from 1e−12 to 1e8",
        "log1p(2), expm1, yeo_johnson",
        "lambert_w is within 4 ulp",
        "to_normality(model, noise=0)",
        "EfficientNet-B0, B2",
        "scipy.stats.probplot",
        "a t-test, e.g. this",
        "A layer",
        "on both sides it's so",
    ],
)
def test_what_is_left(text):
    assert short(text) == text


def test_every_statement_keeps_its_characters():
    "But for marks, primes, minus signs and braces; and no tag is left open."

    plain = lambda text: re.sub(
        r"[\s_^*∗'′″‴(){}`-]|−",
        "",
        unicodedata.normalize("NFKC", text).replace("′", "").replace("″", ""),
    )
    for claim in ledger():
        for text in (claim.statement, claim.condition):
            made = typeset.statement(text)
            assert plain(
                html.unescape(re.sub(r"</?(?:var|sup|sub|code)>", "", made))
            ) == plain(text), claim.id
            assert "\ue000" not in made
            for tag in ("var", "sup", "sub", "code"):
                assert made.count(f"<{tag}>") == made.count(f"</{tag}>")


def test_outputs_of_checks_and_appendices():

    claim = Claim(
        "a-b",
        "b2020, §x",
        "x² < L'(1)",
        "identity",
        "holds if",
        "proof",
        None,
        1,
        2,
        condition="|h| > 1",
    )
    output = {
        "data": {
            "text/html": Outcome(
                claim, "as recorded", 0.0, mutant="rejected"
            )._repr_html_()
        }
    }
    link_claims(output, {"a-b"})
    made = output["data"]["text/html"]
    assert (
        "<var>x</var><sup>2</sup> &lt; <var>L</var>′(1)" in made
        and "§x" in made
        and 'id="claim-here-a-b"' in made
    )
    row = (
        '<td data-head="statement and source">x² <span>x</span></td><td>'
        '<span class="verdict verdict-holds-if">holds if</span> |h| &gt; 1'
        "</td><p><em>Right:</em> x &amp; y</p>"
    )
    assert typeset.in_output(row) == (
        '<td data-head="statement and source"><var>x</var><sup>2</sup> '
        '<span>x</span></td><td><span class="verdict verdict-holds-if">holds if'
        "</span> |<var>h</var>| &gt; 1</td><p><em>Right:</em> <var>x</var> "
        "&amp; <var>y</var></p>"
    )
    assert typeset.in_output("<p>x² = y</p>") == "<p>x² = y</p>"


@pytest.mark.parametrize(
    "text, tex",
    [
        (r"| $\frac{a_b}{c*d}$ |", r"\frac{a_b}{c*d}"),
        ("so $P_1$ is", "P_1"),
        ("$x|y$", "x|y"),
        ("costs $5 and $6", None),
        ("a $x = 1 b", None),
    ],
)
def test_formulas_in_what_cells_print(text, tex):
    """Markdown finds neither emphasis nor cells nor escapes in them, and the
    browser the same characters.
    """
    output = {"data": {"text/markdown": text}}
    typeset_output(output)
    made = output["data"]["text/markdown"]
    inside = re.search('<span class="math[^>]*>([^<]*)</span>', made)
    if tex is None:
        assert made == text
    else:
        assert html.unescape(inside[1]) == rf"\({tex}\)"
        assert not re.search(r"[\\_*|$]", inside[1])
