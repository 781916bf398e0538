"""The rendered pages as a reader meets them: opened in a browser without a
network, at the width of a telephone, in light and dark mode.
"""

import csv
import fcntl
import os
import re
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode, urlsplit

import nbformat
import pikepdf
import pytest
from bs4 import BeautifulSoup

from tests.book import toy
from tools import browser, build, links, papers, pdf, plain, run
from tools.chapters import (
    ROOT,
    chapter,
    chapters,
    halves,
    handbook,
    pages,
    renamed,
)
from tools.files import load, ran, save

needs_browser = pytest.mark.skipif(
    not browser.chromium(),
    reason="no Chromium on this machine: pages are not opened",
)
HTML = ROOT / "_build" / "html"


@pytest.fixture(scope="session")
def html():
    """The rendered book.

    Rendered now where that is out of date, by one of the test workers; chapters
    are not run here.
    """
    stale = [c.name for c in chapters() if run.Run(c).stale()]
    if stale:
        pytest.skip(f"`make book` first: {', '.join(stale)} must run again")
    with open(ROOT / "_build" / "rendering.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert build.render(), "the book does not render"
    return HTML


# ---- the book ---------------------------------------------------------------


def pages_of(html):
    # these only forward: to the landing page, or from an old name to a new one
    forwarding = {
        html / "index.html",
        *(html / "nbs" / f"{old}.html" for old in renamed()),
    }
    return [p for p in links.pages(html) if p not in forwarding]


SCRIPTS = Path(__file__).parents[1] / "browser"


def digests(listed: list[Path], html: Path) -> dict[Path, str]:
    "Of each page, with the styles, scripts and browser that show it."
    files = [
        *sorted(p for p in (html / "_static").rglob("*") if p.is_file()),
        *(SCRIPTS / "page.js", browser.SCRIPT, Path(browser.__file__)),
    ]
    shown_by = browser.version().encode(), *(p.read_bytes() for p in files)
    shown_by = run.digest(b"\n".join(shown_by)).encode()
    return {page: run.digest(shown_by + page.read_bytes()) for page in listed}


def looked_at(listed: list[Path], html: Path, cache) -> dict[str, dict]:
    """Page → what a browser sees on it. What was whole stays in pytest's cache
    and is not looked at again while the page and what shows it are the same.
    """
    keys = digests(listed, html)
    known = {page: cache.get(f"seen/{page.stem}", {}) for page in listed}
    new = [page for page in listed if known[page].get("key") != keys[page]]
    how = (browser.WIDTH, 1280), SCRIPTS / "page.js"
    seen = browser.inspect(new, *how, seconds=900) if new else {}
    for page, report in seen.items():
        known[page] = {"key": keys[page], "report": report}
        if not report["problems"]:
            cache.set(f"seen/{page.stem}", known[page])
    return {page.stem: known[page]["report"] for page in listed}


@pytest.fixture(scope="session")
def seen(html, once, request):
    """Page, in the order of the table of contents, then those outside it → what
    a browser saw at both widths.

    Each page is opened once, by one of the workers: the second begins at the
    end.
    """
    listed = [html / f"{page}.html" for page in pages()]
    listed += [p for p in pages_of(html) if p not in listed]
    assert len({p.stem for p in listed}) == len(listed)
    cache, found = request.config.cache, {}
    parts = [listed[i : i + 20] for i in range(0, len(listed), 20)]
    order = 1 if os.environ.get("PYTEST_XDIST_WORKER") != "gw1" else -1
    for part in parts[::order]:
        folder = once(
            f"seen from {part[0].stem}",
            lambda folder, part=part: save(
                folder / "seen.json", looked_at(part, html, cache)
            ),
        )
        found |= load(folder / "seen.json")
    return {p.relative_to(html).as_posix(): found[p.stem] for p in listed}


@pytest.fixture
def asked(seen):
    """Page of the contents → what it says about its copy buttons and its
    navigation.
    """
    return {
        Path(page).name + ".html": seen[f"{page}.html"]["answer"]
        for page in pages()
    }


@needs_browser
def test_every_page_is_whole_without_a_network(seen):
    """On a telephone and on a wide screen: equations typeset, figures there and
    large enough, nothing on the console, no sideways scroll, nothing cut off;
    on a wide screen no code, output, table or formula wider than the column;
    contrast in both modes and on paper."""
    problems = {p: r["problems"] for p, r in seen.items() if r["problems"]}
    assert problems == {}
    assert sum(r["equations"] for r in seen.values()) > 100
    assert sum(r["figures"] for r in seen.values()) > 5


def test_a_page_is_looked_at_again_when_something_of_it_changed(
    tmp_path, monkeypatch
):
    "Itself, a style, or the browser; and as long as it has a problem."
    (tmp_path / "_static").mkdir()
    whole, broken = tmp_path / "whole.html", tmp_path / "broken.html"
    style = tmp_path / "_static" / "x.css"
    for path in (whole, broken, style):
        path.write_text("")
    found = {"whole": {"problems": []}, "broken": {"problems": ["cut off"]}}
    asked, kept = [], {}
    cache = SimpleNamespace(get=kept.get, set=kept.__setitem__)

    def inspect(listed, *_, **__):
        asked.append([page.stem for page in listed])
        return {page: found[page.stem] for page in listed}

    def look():
        assert looked_at([whole, broken], tmp_path, cache) == found
        return asked.pop()

    monkeypatch.setattr(browser, "inspect", inspect)
    monkeypatch.setattr(browser, "version", lambda: "Chromium 1")
    assert look() == ["whole", "broken"]
    assert look() == ["broken"]
    style.write_text("a {}")
    assert look() == ["whole", "broken"]
    whole.write_text("<p>")
    assert look() == ["whole", "broken"]
    monkeypatch.setattr(browser, "version", lambda: "Chromium 2")
    assert look() == ["whole", "broken"]
    assert look() == ["broken"]


@needs_browser
def test_copy_buttons_copy_the_code(asked):
    """Each block of code has one; examples are copied without their prompts and
    output.
    """
    wrong = {name: report["wrong"] for name, report in asked.items()}
    assert not any(wrong.values()), wrong
    assert sum(report["blocks"] for report in asked.values()) > 300


@needs_browser
def test_navigation(asked):
    """Previous and next follow the table of contents; each page has its
    sections beside it, search, and its notebook.
    """
    names = list(asked)
    assert [r["next"] for r in asked.values()] == [[n] for n in names[1:]] + [
        []
    ]
    assert [r["previous"] for r in asked.values()] == [[]] + [
        [n] for n in names[:-1]
    ]
    for name, r in asked.items():
        assert len(r["contents"]) >= r["sections"] and r["search"], name
        assert [Path(link).stem for link in r["downloads"]] == [
            Path(name).stem
        ], name


with Path(__file__).with_name("questions.csv").open(encoding="utf-8") as _file:
    QUESTIONS = list(csv.DictReader(_file))
SEARCHES = {
    "ProxyNorm": "415_layers.proxy_norm",
    "PreLayerNorm": "430_layers.prelayer",
    "RegNorm": "440_layers.regnorm",
    "EvoNorm": "312_layers.hybrids",
    "filter response": "310_layers.normalizers",
    "decorrelated": "252_layers.decorrelated",
    "whitening": "250_theory.whitening",
    "Lambert W": "262_theory.lambert",
    "Yeo-Johnson": "210_theory.power_transform",
    "gradient confusion": "455_analysis.gradients",
    "noise": "228_layers.noise",
    "Newton step": "220_theory.newton",
    "misprint": "920_errata",
    **{r["question"]: r["page"] for r in QUESTIONS if r["kind"] == "search"},
}


@needs_browser
def test_search_finds_the_page_of_a_name(html):
    "First, without a server and without a network."
    asked = urlencode([("q", words) for words in SEARCHES])
    address = f"{(html / 'search.html').as_uri()}?{asked}"
    first = browser.ask([address], SCRIPTS / "search.js")[address]
    assert (
        dict(zip(SEARCHES, (Path(urlsplit(to).path).stem for to in first)))
        == SEARCHES
    )


def test_questions_asked_beforehand_have_their_page():
    """The contents by question lead to it, and it says what an answer has to,
    by phrases between bars.
    """
    listed = (ROOT / "nbs/contents.md").read_text(encoding="utf-8")
    listed = listed.partition("## The five sources")[0]
    asked = [r for r in QUESTIONS if r["kind"] != "search"]
    assert len(asked) == 20
    for r in asked:
        assert f"`{r['page']}`" in listed, r
        cells = chapter(r["page"]).cells()
        text = "\n".join(cell["source"] for cell in cells)
        for phrase in r["phrases"].split("|"):
            assert phrase in text, (r["question"], phrase)


@pytest.mark.parametrize("half", halves())
def test_a_page_has_the_side_bar_of_its_half(html, half):
    """Its parts, folded but the present one, and one link to the other half's
    front page.
    """
    of = halves()[half]
    listed = [page for _, some in of for page in some if page != pages()[0]]
    other = handbook()[0] if half == "The book" else pages()[0]
    for at in (0, len(listed) // 2, -1):
        path = html / f"{listed[at]}.html"
        page = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        bar = page.select_one(".bd-sidebar-primary")
        links = [a["href"] for a in bar.select("li.toctree-l1 > a")]
        assert links[at] == "#"
        assert [Path(a).stem for a in links if a != "#"] == [
            Path(f"{p}.html").stem for p in listed if p != listed[at]
        ]
        (present,) = (caption for caption, some in of if listed[at] in some)
        (unfolded,) = bar.select("details[open]")
        assert unfolded.select_one(".caption").get_text() == present
        (there,) = bar.select(".halves a")
        assert Path(there["href"]).stem == Path(other).name


def test_each_notebook_can_be_downloaded_and_run(html):
    """The files that the pages offer: valid, without outputs and directives;
    code that Python can read.
    """
    for c in chapters():
        notebook = nbformat.reads(
            (html / "_sources" / "nbs" / f"{c.name}.ipynb").read_text(
                encoding="utf-8"
            ),
            as_version=4,
        )
        nbformat.validate(notebook)
        assert notebook == nbformat.from_dict(plain.notebook(c)), c.name
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(
            not cell.outputs and cell.execution_count is None for cell in code
        ), c.name
        for cell in code:
            assert not cell.source.startswith("#|"), c.name
            compile(
                re.sub(
                    r"^(\s*)[%!][%\w].*$", r"\1pass", cell.source, flags=re.M
                ),
                c.name,
                "exec",
            )


def test_folded_code_on_a_page(html):
    """The verdict, then the code behind a line that says what it is; what is
    exported behind its signature; nothing of a check is seen unfolded.
    """
    page = BeautifulSoup(
        (html / "nbs/220_theory.newton.html").read_text(encoding="utf-8"),
        "html.parser",
    ).article
    checks = page.select("details.fold-check")
    assert len(checks) > 5 and not page.select("details[open]")
    for fold in checks:
        assert fold.find_previous_sibling(class_="cell_output").select(
            "p.claim"
        )
        assert fold.summary.get_text().startswith("code of the ")
        assert "@claim" in fold.pre.get_text()
    assert any(
        "newton_lambda(" in code.get_text()
        for code in page.select("details.fold-export > summary > code")
    )
    for fold in page.select("details"):
        fold.decompose()
    assert "@claim" not in page.get_text()


def in_words(page: str) -> str:
    "A page without code, scripts and what is typeset."
    page = re.sub(r"<!--.*?-->", "", page, flags=re.S)
    for element in ("pre", "script", "style", "code", "span", "div"):
        which = (
            r' class="[^"]*\bmath\b[^"]*"'
            if element in ("span", "div")
            else r"\b"
        )
        page = re.sub(
            rf"<{element}{which}[^>]*>.*?</{element}>", "", page, flags=re.S
        )
    return page


def untypeset(page: str) -> list[str]:
    "Formulas between dollars that no writer has taken for formulas."
    return re.findall(
        r"\$(?! )[^$<>]*[A-Za-z\\][^$<>]*(?<! )\$", in_words(page)
    )


def unresolved(page: str) -> list[str]:
    "References and citations as they are typed: an output's are not followed."
    return re.findall(
        r"@(?:eq|fig|tbl|sec|thm|exr|prp|lem|cor|def)-[\w-]+"
        r"|\[@\w+",
        unescape(in_words(page)),
    )


def test_nothing_is_left_as_it_was_typed(html):
    assert untypeset("<td>$d^2$</td> <code>$PATH $HOME</code> 3 $ and $4") == [
        "$d^2$"
    ]
    assert unresolved(
        "<p>by &#64;eq-a-b [@welch1947] <code>@eq-c</code> a@b.c"
    ) == ["@eq-a-b", "[@welch1947"]
    found = {}
    for page in pages_of(html):
        text = page.read_text(encoding="utf-8")
        warned = re.findall(r"ipykernel_\d+\S*", text)
        found[page.name] = untypeset(text) + unresolved(text) + warned
    assert not any(found.values()), found


def test_internal_links_lead_somewhere_and_nothing_is_fetched(html):
    assert links.broken(html) == links.loaded_from_network(html) == []


def test_a_renamed_chapter_leaves_nothing(tmp_path):
    "One that is added, or still listed, takes no page away."
    page = tmp_path / "_build/html/nbs/230_layers.core.html"
    page.parent.mkdir(parents=True)
    page.write_text("")
    for names, stays in (
        (["230_layers.core"], True),
        (["230_layers.core", "api"], True),
        (["240_layers.core", "api"], False),
    ):
        (tmp_path / "_toc.yml").write_text(
            "root: nbs/index\nparts:\n" + toy.contents(*names)
        )
        build.forget_renamed(tmp_path)
        assert page.exists() == stays


def test_a_chapter_has_one_number(html):
    "That of its file: in headings, figures, theorems and equations."
    seen = 0
    for c in chapters():
        number = re.match(r"\d+(?=_)", c.name)
        if not number or number[0].startswith("9"):  # no numbered appendix
            continue
        page = (html / "nbs" / f"{c.name}.html").read_text(encoding="utf-8")
        article = page[page.index("<article") : page.index("</article>")]
        found = re.findall(
            r'class="(?:section-number|eqno|caption-number)">[^<\d]*(\d+)[.]',
            article,
        )
        assert found and set(found) == {number[0]}, (c.name, set(found))
        assert f">{number[0]}. " in page
        seen += len(found)
    assert seen > 1000


def test_the_book_has_the_pages_of_its_contents_only(html):
    listed = {Path(page).name for page in (*pages(), *renamed())}
    assert {p.stem for p in (html / "nbs").glob("*.html")} == listed


def test_a_page_under_an_old_name(tmp_path):
    """It is written over what an earlier build left there; it leads to the
    chapter with scripts and without.
    """
    (tmp_path / "nbs").mkdir()
    (tmp_path / "nbs" / "renamed.csv").write_text(
        "old,new\n230_layers.old,240_layers.core\n"
    )
    build.write_redirects(tmp_path)  # before the first build: nothing
    page = tmp_path / "_build/html/nbs/230_layers.old.html"
    assert not page.exists()
    page.parent.mkdir(parents=True)
    page.write_text("the chapter, as an earlier build rendered it")
    build.write_redirects(tmp_path)
    (page.parent / "240_layers.core.html").write_text("<i id='sec-a'></i>")
    assert links.broken(tmp_path / "_build/html") == []
    (page.parent / "240_layers.core.html").unlink()
    assert len(links.broken(tmp_path / "_build/html")) == 1


@needs_browser
def test_an_old_address_arrives_at_its_place(tmp_path):
    (tmp_path / "old.html").write_text(build.REDIRECT.format(new="new"))
    (tmp_path / "new.html").write_text(
        "<!DOCTYPE html><p>The new page</p><i id='sec-a'></i>"
        "<script>document.body.append(' at ' + location.hash)</script>"
    )
    address = (tmp_path / "old.html").as_uri() + "#sec-a"
    command = browser.command(
        browser.chromium(), tmp_path / "profile", "--dump-dom", address
    )
    found = ran(command, timeout=120).stdout
    assert "The new page" in found and " at #sec-a" in found


# ---- broken examples --------------------------------------------------------

MATHJAX = (
    Path(find_spec("sphinx-mathjax-offline").origin).parent
    / "static/mathjax/tex-chtml.js"
)
HEAD = f"""<!DOCTYPE html><html data-theme="light"><head><meta charset="utf-8">
<script>window.MathJax = {{options: {{processHtmlClass: "math"}}}}</script>
    <script defer src="{MATHJAX.as_uri()}"></script>
<style>:root {{ --pst-color-text-base: #111 }} body {{
    color: var(--pst-color-text-base) }}
[data-theme=dark] {{ background: #111;
    --pst-color-text-base: #eee }} @media print {{
    [data-theme] {{ background: none; --pst-color-text-base: #111 }} }}</style>
    </head>"""
SVG = (
    '<svg class="figure-svg" width="60" height="20"><path d="M0 0L60 20" '
    'style="stroke: {}"/><path d="M0 0" style="fill: none; stroke: '
    'var(--pst-color-text-base)"/></svg>'
)
GOOD = (
    "<p>Text and <span class='math'>\\(x^2\\)</span></p><div style='width: "
    "60px; overflow-x: auto; border: 1px solid'><p style='white-space: "
    "nowrap'>long, but it scrolls</p></div><h1 style='color: #888'>large "
    "text</h1>" + SVG.format("red")
)
# Boxes that reach out of what clips them, as the boxes of formulas do, with
# nothing painted there.
NOMINAL = (
    "<div style='overflow: hidden; height: 30px'><i style='float: left; "
    "height: 60px; width: 1px'></i><span "
    "class='math'>\\(x_2\\)</span></div><p><span class='math' "
    "style='display: inline-block; overflow: auto hidden; "
    "padding-block: 9px; margin-block: -9px; line-height: 9px; "
    "scrollbar-width: none'>\\(x^2\\)<i style='display: inline-block; "
    "height: 50px; margin-bottom: -30px; width: 1px; vertical-align: "
    "top'></i></span></p><div style='overflow: hidden; height: 16px; "
    "font: 20px/16px serif'>aceno</div>"
)
BROKEN = {
    "scrolls sideways: 908 px: div": "<div style='width: 900px'>wide</div>",
    "TeX error": "<span class='math'>\\(\\nosuchcommand\\)</span>",
    "Missing argument": "<span class='math'>\\(\\frac{1}\\)</span>",
    "not typeset": "<span class='math'>no formula</span>",
    "figure missing": "<img src='nowhere.png'>",
    "figure missing: svg": "<svg class='figure-svg' style='display: "
    "none'></svg>",
    "figure too small: 0.50 of its size": "<svg class='figure-svg' "
    "style='--natural: 90pt; width: "
    "60px; height: 20px'></svg>",
    "console: Uncaught Error: oops": "<script>setTimeout(() => { throw new "
    "Error('oops') })</script>",
    "dark mode: text": "<p style='color: #111'>ink on a dark page</p>",
    "light mode: text": "<p style='background: black'>ink on a black box</p>",
    "light mode: formula": "<p style='background: black'><span "
    "class='math'>\\(x\\)</span></p>",
    "light mode: figure ink": "<div style='background: black'>"
    + SVG.format("red")
    + "</div>",
    "light mode: text rgb(119, 119, 119)": "<p style='color: #777'>4.48 is not "
    "enough</p>",
    "dark mode: text rgb(255, 255, 255)": "<p style='color: #fff; opacity: "
    "0.4'>half transparent</p>",
    "print from dark mode: text": "<p style='color: #eee; background: "
    "#111'>pale ink</p>",
    "print from light mode: text": "<style>@media print { .pale { color: #ddd "
    "} }</style><p class='pale'>pale on paper "
    "only</p>",
    "cut off: p": "<div style='width: 60px; overflow: hidden'><p "
    "style='white-space: nowrap'>much longer than its "
    "box</p></div>",
    "cut below: div": "<div style='height: 12px; overflow: "
    "hidden'>one<br>two</div>",
    "cut below: mjx-math": "<p><span class='math' style='display: "
    "inline-block; overflow: auto "
    "hidden; height: 14px'>\\(\\displaystyle\\frac{x^2}{y_2}\\)</span></p>",
    "cut above: mjx-math": "<div style='overflow: hidden; height: 90px'><p "
    "style='margin-top: "
    "-12px'><span "
    "class='math'>\\(\\displaystyle\\sum_i^n\\)</span></p></div>",
    "cut below: p": "<div style='overflow: hidden; height: 22px; font: "
    "20px/30px serif'><p style='margin: 0'>gjpqy</p></div>",
    "a scrollbar within a line": "<p>a <span style='display: inline-block; "
    "width: 60px; overflow-x: auto; overflow-y: "
    "hidden; white-space: nowrap'>long "
    "formula</span>, b</p>",
    "a scrollbar for 3 px": "<div style='height: 60px; overflow: auto'><div "
    "style='height: 63px'>high</div></div>",
    "an empty line": "<h2 style='width: 60px'>wide<a class='headerlink' "
    "style='display: block'>#</a></h2>",
    "sticks out of its box": "<div style='width: 60px; border: 1px solid'><p "
    "style='white-space: nowrap'>much longer than its "
    "box</p></div>",
    "wider than the column by": "<pre style='overflow-x: auto'>"
    + "x" * 300
    + "</pre>",
    "wider than the column by 2": "<div class='math' style='overflow-x: auto; "
    "width: 60px'><i style='display: "
    "inline-block; width: 262px'></i>"
    "\\(x\\)</div>",
    "px: table": "<table style='display: block; overflow-x: auto; width: "
    "60px'><tr><td><p style='width: 99px'>x</table>",
    "asks the network": "<script>fetch('https://example.org/x').catch(() => "
    "0)</script>",
}


@needs_browser
def test_a_broken_page_is_noticed(tmp_path):
    examples = {
        tmp_path / "good.html": "",
        tmp_path / "nominal.html": NOMINAL,
    } | {tmp_path / f"broken{i}.html": words for i, words in enumerate(BROKEN)}
    for path, words in examples.items():
        path.write_text(
            f"{HEAD}<body><article>{GOOD}"
            f"{BROKEN.get(words, words)}</article></body></html>"
        )
    found = browser.inspect(list(examples), (browser.WIDTH, 1280))
    assert (
        found[tmp_path / "broken0.html"]["problems"][0].startswith(
            f"{browser.WIDTH} px: "
        )
        and len(found[tmp_path / "broken0.html"]["problems"]) == 1
    )
    good = found.pop(tmp_path / "good.html")
    assert good == {"equations": 1, "figures": 1, "problems": []}
    assert found.pop(tmp_path / "nominal.html") == {
        "equations": 3,
        "figures": 1,
        "problems": [],
    }
    for path, report in found.items():
        assert any(examples[path] in p for p in report["problems"]), (
            f"{examples[path]}: {report}"
        )


def test_broken_links_are_noticed(tmp_path):
    (tmp_path / "outside.html").write_text("")
    tmp_path = tmp_path / "book"
    (tmp_path / "_static").mkdir(parents=True)
    (tmp_path / "_static/page.html").write_text("<a href='{{ template }}'>")
    (tmp_path / "_static/a.css").write_text(
        "@import url('https://example.org/font.css'); a { background: "
        "url(here.png) } b { background: url(/_static/root.png) }"
    )
    (tmp_path / "b c.html").write_text("<h1 id='top'>B</h1><a name='old'></a>")
    (tmp_path / "a.html").write_text("""<link rel="next" href="b%20c.html">
    <link rel="stylesheet" href="_static/a.css"><p id="here">
        <a href="#here">1</a> <a href="b%20c.html#top">2</a>
            <a href="b%20c.html?q=1#old">3</a> <a href="#">4</a>
            <a href="mailto:x@example.org">5</a>
        <a href="https://example.org/">out</a>
            <a href="//example.org/cdn">out</a>
            <img src="data:image/png;base64,AA">
        <a href="gone.html">6</a> <a href="#gone">7</a>
            <a href="b%20c.html#gone">8</a>
            <a href="https://example.invalid/x">9</a>
        <a href="/nbs/b.html">10</a> <a href="../outside.html">11</a>
        <i style="background: url(/b.png)"></i>
        <img src="gone.png">
        <script src="https://example.org/x.js"></script>""")
    assert links.broken(tmp_path) == [
        "a.html: gone.html does not exist",
        "a.html: #gone has no such anchor",
        "a.html: b%20c.html#gone has no such anchor",
        "a.html: https://example.invalid/x is a placeholder",
        "a.html: /nbs/b.html begins at the root, and the book may lie in a "
        "folder",
        "a.html: ../outside.html leads out of the book",
        "a.html: gone.png does not exist",
    ]
    assert links.loaded_from_network(tmp_path) == [
        "a.html: /b.png",
        "a.html: https://example.org/x.js",
        "_static/a.css: https://example.org/font.css",
        "_static/a.css: /_static/root.png",
    ]


def test_outputs_are_sentences_tables_or_figures(html):
    "No cell shows a value as Python writes it, in quotes, braces or brackets."
    plain = 'class="output text_plain'
    found = [p.name for p in pages_of(html) if plain in p.read_text("utf-8")]
    assert found == [], "print it in words"


# ---- the print --------------------------------------------------------------


@pytest.mark.parametrize(
    "link, printed",
    [
        ("#top", "#220_theory-newton--top"),
        ("b.html", "#b"),
        ("b.html#x", "#b--x"),
        ("../nbs/b.html", "#b"),
        ("https://example.org/a", "https://example.org/a"),
        ("../_sources/nbs/b.ipynb", None),
        ("gone.html", None),
    ],
)
def test_links_of_the_print(link, printed):
    assert (
        pdf.relink(
            link, "nbs/220_theory.newton", {"nbs/220_theory.newton", "nbs/b"}
        )
        == printed
    )


def test_anchors_of_the_print_do_not_meet():
    soup = BeautifulSoup(
        "<svg><style>#s .a { fill: url(#g) }</style><g id='g' "
        "clip-path='url(#c)'/><use xlink:href='#g'/><image "
        "xlink:href='data:image/png;base64,AA'/></svg>",
        "html.parser",
    )
    pdf.rename_anchors(soup, "nbs/b")
    assert (
        str(soup) == "<svg><style>#b--s .a { fill: url(#b--g) }</style><g "
        'clip-path="url(#b--c)" id="b--g"></g><use '
        'xlink:href="#b--g"></use><image '
        'xlink:href="data:image/png;base64,AA"/></svg>'
    )


@needs_browser
def test_what_is_printed_leads_to_its_page(tmp_path, monkeypatch):
    """Two articles on pages of their own, printed: the contents say where each
    is, their links lead there, and so do the bookmarks. What is not printed is
    named.
    """
    monkeypatch.setattr(pdf, "BOOK", tmp_path / "book.html")
    monkeypatch.setattr(pdf, "CONTENTS", tmp_path / "contents.html")
    monkeypatch.setattr(pdf, "PDF", tmp_path / "out.pdf")
    monkeypatch.setattr(
        pdf,
        "head",
        lambda: "<style>article, nav { break-before: page }</style>",
    )
    listed = [
        ("", ["nbs/a"]),
        ("Part I", ["nbs/b"]),
        ("Handbook", ["nbs/710_c", "nbs/720_d"]),
    ]
    monkeypatch.setattr(pdf, "parts", lambda: listed)
    monkeypatch.setattr(pdf, "handbook", lambda: listed[-1][1])
    monkeypatch.setattr(pdf, "HTML", tmp_path)
    (tmp_path / "nbs").mkdir()
    for name, heading in ("710_c", "<code>C</code>"), ("720_d", "D"):
        (tmp_path / f"nbs/{name}.html").write_text(
            f'<h1 id="x">{heading}<a class="headerlink" href="#x">#</a></h1>'
        )
    articles = {
        f"nbs/{name}": BeautifulSoup(
            f'<article class="bd-article" id="{name}"><h1>{name.upper()}'
            "</h1><p>Words.</p></article>",
            "html.parser",
        ).article
        for name in "ab"
    }
    assert pdf.print_book(articles) == 4
    with pikepdf.open(tmp_path / "out.pdf") as made:
        assert pdf.page_numbers(made) == {"a": 3, "b": 4}
        assert pdf.scale(made) == pytest.approx(1, abs=1e-3)
        assert {str(a.Dest) for a in made.pages[1].Annots} == {"/a", "/b"}
        with made.open_outline() as outline:
            assert [x.title for x in outline.root] == ["A", "Part I"]
            assert outline.root[1].children[0].title == "B"
    numbers = re.findall(
        r'class="page">(\d+)<', (tmp_path / "contents.html").read_text()
    )
    assert numbers == ["3", "4"]
    assert (
        '<p class="unprinted">On the pages only: <code>C</code> · D</p>'
        in (tmp_path / "contents.html").read_text()
    )


def test_what_the_print_shows_of_folded_code():
    """A check is its verdict and its file, an export and a piece of C++ their
    line, any other code nothing.
    """
    fold = (
        "<details class='fold fold-{0}'><summary><code>{0}(x)</code> Words."
        "</summary><pre>code of {0}</pre></details>"
    ).format
    soup = BeautifulSoup(
        "<div class='cell'><p class='claim'>a holds</p>"
        f"<p class='claim'>b holds</p>{fold('check')}</div>"
        + "".join(
            f"<div class='cell'>{fold(kind)}</div>"
            for kind in ("check", "export", "cpp", "figure", "code")
        ),
        "html.parser",
    )
    pdf.replace_folds(soup, pdf.checks_of("nbs/220_theory.newton"))
    assert soup.get_text(" ", strip=True) == (
        "a holds b holds code: normalnorm/checks/theory/newton.py "
        "export(x) Words. cpp(x) Words."
    )
    assert len(soup.select("p.fold-line > code")) == 2


@pytest.mark.parametrize(
    "summary, printed",
    [
        ("<code>f(x)</code> What, of <code>_g</code>.", True),
        ("imports", False),
        ("<code>_f(x)</code> As <code>g</code>.", False),
    ],
)
def test_an_export_without_a_public_name_is_not_printed(summary, printed):
    soup = BeautifulSoup(
        "<div class='module-label'>m</div><div class='cell'><details "
        f"class='fold fold-export'><summary>{summary}</summary></details>"
        "</div>",
        "html.parser",
    )
    pdf.replace_folds(soup, "")
    assert (
        bool(soup.select(".fold-line"))
        == printed
        == bool(soup.select(".module-label"))
    )


def test_figures_and_tables_of_the_print():
    """A figure has the least legible size, one to drag its still form; only a
    long table is set smaller.
    """
    soup = BeautifulSoup(
        "<svg class='figure-svg' style='--natural: 500pt; width: 500pt; "
        "max-width: 100%'></svg><div class='live'>x</div><div class='still'>"
        "<svg style='width:300pt;max-width:100%'></svg></div>"
        + "".join(f"<table>{'<tr></tr>' * n}</table>" for n in (12, 13)),
        "html.parser",
    )
    pdf.size_for_paper(soup)
    assert [e["style"] for e in soup.find_all("svg")] == [
        "--natural: 500pt; width: 300.0pt; max-width: 100%",
        "width: 180.0pt;max-width:100%",
    ]
    assert not soup.select(".live")
    assert [e.get("class") for e in soup.find_all("table")] == [None, ["long"]]


def test_an_article_is_read_without_folded_code():
    page = (
        '<p>x</p><article class="bd-article"><p>y</p><details class="fold '
        'fold-code"><summary>s</summary>\n<pre>gone</pre></details>'
        '<details class="a"><pre><span class="n">a</span><span class="k">b'
        "</span></pre></details></article><p>x</p>"
    )
    assert pdf.lighten(page) == (
        '<article class="bd-article"><p>y</p><details class="fold fold-code">'
        '<summary>s</summary></details><details class="a"><pre>a<span '
        'class="k">b</span></pre></details></article>'
    )


def test_the_print_leaves_out_what_is_looked_up():
    """The handbook, the contents by name and the ledger's tables; every other
    page is in, in the book's order.
    """
    kept = [page for _, listed in pdf.printed() for page in listed]
    out = [page for page in pages() if page not in kept]
    assert kept == [page for page in pages() if page not in out]
    assert {*out} - {*handbook()} == {
        "nbs/910_what_was_checked",
        "nbs/915_coverage",
        "nbs/contents",
        *(f"nbs/{page}" for page, _ in papers.PAPERS.values()),
    }
    assert {*handbook()} < {*out}
    for c in chapters():
        if any("#| check" in source for source in c.code_cells()):
            assert (ROOT / pdf.checks_of(f"nbs/{c.name}")).exists(), c.name


def test_the_print_is_set_in_nine_and_a_half_points():
    size = re.search(
        r"^html \{ font-size: ([\d.]+)px; \}$",
        pdf.PRINT.read_text(encoding="utf-8"),
        re.M,
    )
    assert 0.75 * float(size[1]) >= 9.5


def test_the_print_has_at_most_350_pages():
    """The recorded print, which Chromium did not shrink, and the one that lies
    here.
    """
    made = load(pdf.RECORD)
    assert made["pages"] <= 350 and made["points"] >= 9.5, (
        "python -m tools.pdf --record prints and measures again",
        made,
    )
    assert made["front"] + sum(made["chapters"].values()) == made["pages"]
    if pdf.PDF.exists():
        with pikepdf.open(pdf.PDF) as here:
            assert len(here.pages) <= 350
