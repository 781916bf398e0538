"The rendered pages as a reader meets them: opened in a browser without a network, at the width of a telephone, in light and dark mode."
import fcntl
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.book
build = pytest.importorskip("tools.build", reason="the book's tools are not installed")
from tools import browser, links, pdf, run  # noqa: E402
from tools.chapters import ROOT, chapters  # noqa: E402

needs_browser = pytest.mark.skipif(not browser.chromium(), reason="no Chromium on this machine: pages are not opened")
HTML = ROOT / "_build" / "html"


@pytest.fixture(scope="session")
def html():
    "The rendered book. Rendered now where that is out of date, by one of the test workers; chapters are not run here."
    stale = [c.name for c in chapters() if run.Run(c).stale()]
    if stale:
        pytest.skip(f"`make book` first: {', '.join(stale)} must run again")
    with open(ROOT / "_build" / "rendering.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert build.render(), "the book does not render"
    return HTML


# ---- the book -------------------------------------------------------------------------------------------------

@needs_browser
def test_every_page_is_whole_without_a_network(html):
    "Equations typeset, figures there, nothing on the console, no sideways scroll, text and ink visible in both modes."
    pages = [p for p in links.pages(html) if p != html / "index.html"]        # that one only forwards to the landing page
    found = browser.inspect(pages)
    assert list(found) == pages
    assert {p.name: report["problems"] for p, report in found.items() if report["problems"]} == {}
    assert sum(r["equations"] for r in found.values()) > 100 and sum(r["figures"] for r in found.values()) > 5


def test_internal_links_lead_somewhere(html):
    assert links.broken(html) == []


def test_nothing_is_loaded_from_a_network(html):
    assert links.loaded_from_network(html) == []


# ---- broken examples ------------------------------------------------------------------------------------------

MATHJAX = Path(find_spec("sphinx-mathjax-offline").origin).parent / "static/mathjax/tex-chtml.js"
HEAD = f"""<!DOCTYPE html><html data-theme="light"><head><meta charset="utf-8">
<script>window.MathJax = {{options: {{processHtmlClass: "math"}}}}</script><script defer src="{MATHJAX.as_uri()}"></script>
<style>:root {{ --pst-color-text-base: #111 }} body {{ color: var(--pst-color-text-base) }} [data-theme=dark] {{ background: #111; --pst-color-text-base: #eee }}</style></head>"""
SVG = '<svg class="figure-svg" width="60" height="20"><path d="M0 0L60 20" style="stroke: {}"/><path d="M0 0" style="fill: none; stroke: var(--pst-color-text-base)"/></svg>'
GOOD = "<p>Text and <span class='math'>\\(x^2\\)</span></p>" + SVG.format("red")
BROKEN = {
    "scrolls sideways: 908 px: div": "<div style='width: 900px'>wide</div>",
    "TeX error": "<span class='math'>\\(\\nosuchcommand\\)</span>",
    "Missing argument": "<span class='math'>\\(\\frac{1}\\)</span>",
    "not typeset": "<span class='math'>no formula</span>",
    "figure missing": "<img src='nowhere.png'>",
    "figure missing: svg": "<svg class='figure-svg' style='display: none'></svg>",
    "console: Uncaught Error: oops": "<script>setTimeout(() => { throw new Error('oops') })</script>",
    "dark mode: text": "<p style='color: #111'>ink on a dark page</p>",
    "light mode: text": "<p style='background: black'>ink on a black box</p>",
    "light mode: formula": "<p style='background: black'><span class='math'>\\(x\\)</span></p>",
    "light mode: figure ink": "<div style='background: black'>" + SVG.format("red") + "</div>",
    "asks the network": "<script>fetch('https://example.org/x').catch(() => 0)</script>",
}


@needs_browser
def test_a_broken_page_is_noticed(tmp_path):
    examples = {tmp_path / "good.html": ""} | {tmp_path / f"broken{i}.html": words for i, words in enumerate(BROKEN)}
    for path, words in examples.items():
        path.write_text(f"{HEAD}<body><article>{GOOD}{BROKEN.get(words, '')}</article></body></html>")
    found = browser.inspect(list(examples))
    good = found.pop(tmp_path / "good.html")
    assert good == {"equations": 1, "figures": 1, "problems": []}
    for path, report in found.items():
        assert any(examples[path] in p for p in report["problems"]), f"{examples[path]}: {report}"


def test_broken_links_are_noticed(tmp_path):
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static/page.html").write_text("<a href='{{ template }}'>")
    (tmp_path / "_static/a.css").write_text("@import url('https://example.org/font.css'); a { background: url(here.png) }")
    (tmp_path / "b c.html").write_text("<h1 id='top'>B</h1><a name='old'></a>")
    (tmp_path / "a.html").write_text("""<link rel="next" href="b%20c.html"><link rel="stylesheet" href="_static/a.css"><p id="here">
        <a href="#here">1</a> <a href="b%20c.html#top">2</a> <a href="b%20c.html?q=1#old">3</a> <a href="#">4</a> <a href="mailto:x@example.org">5</a>
        <a href="https://example.org/">out</a> <a href="//example.org/cdn">out</a> <img src="data:image/png;base64,AA">
        <a href="gone.html">6</a> <a href="#gone">7</a> <a href="b%20c.html#gone">8</a> <a href="https://example.invalid/x">9</a>
        <img src="gone.png"> <script src="https://example.org/x.js"></script>""")
    assert links.broken(tmp_path) == ["a.html: gone.html does not exist", "a.html: #gone has no such anchor", "a.html: b%20c.html#gone has no such anchor",
                                      "a.html: https://example.invalid/x is a placeholder", "a.html: gone.png does not exist"]
    assert list(links.external(tmp_path)) == ["https://example.org/", "https://example.org/cdn", "https://example.invalid/x", "https://example.org/x.js"]
    assert links.loaded_from_network(tmp_path) == ["a.html: https://example.org/x.js", "_static/a.css: https://example.org/font.css"]


# ---- the print ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("link, printed", [
    ("#top", "#220_theory-newton--top"), ("b.html", "#b"), ("b.html#x", "#b--x"), ("../nbs/b.html", "#b"),
    ("https://example.org/a", "https://example.org/a"), ("../_sources/nbs/b.ipynb", None), ("gone.html", None),
])
def test_links_of_the_print(link, printed):
    assert pdf.relink(link, "nbs/220_theory.newton", {"nbs/220_theory.newton", "nbs/b"}) == printed


def test_anchors_of_the_print_do_not_meet():
    soup = pytest.importorskip("bs4").BeautifulSoup("<svg><style>#s .a { fill: url(#g) }</style><g id='g' clip-path='url(#c)'/><use xlink:href='#g'/></svg>", "html.parser")
    pdf.rename_anchors(soup, "nbs/b")
    assert str(soup) == '<svg><style>#b--s .a { fill: url(#b--g) }</style><g clip-path="url(#b--c)" id="b--g"></g><use xlink:href="#b--g"></use></svg>'


def test_page_numbers_are_read_from_the_print():
    printed = b"%PDF\n7 0 obj\n<</Type /Page\n>>\n9 0 obj\n<</Type /Page\n>>\n5 0 obj\n<</b [9 0 R /XYZ 0 1 0]\n/b--x [9 0 R /XYZ 0 2 0]\n/a [7 0 R /XYZ 0 1 0]>>"
    assert pdf.page_numbers(printed) == {"b": 2, "b--x": 2, "a": 1}
