"""`python -m tools.pdf`: the rendered book as one PDF, printed by Chromium.

Contents, page numbers, bookmarks; solutions are opened. Code that the pages
fold is left out: a check is its verdict and the module that has its code, an
export its signature, a figure itself. The API's page is left out too.

The articles of the pages become one page, `_build/pdf/book.html`. Each anchor
gets the name of its page in front, so that links within the book stay links and
nothing meets. Scripts are left out, but for MathJax: what is interactive shows
its still picture.
"""
import html
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools import browser
from tools.chapters import ROOT, Chapter, table_of_contents

HTML = ROOT / "_build" / "html"
BOOK = ROOT / "_build" / "pdf" / "book.html"
PDF = ROOT / "_build" / "normalnorm.pdf"
SECONDS = 300
INNER = re.compile(r"url\((['\"]?)#([^)'\"]+)\1\)")

PRINT = """
@page { size: A4; margin: 14mm 13mm 16mm;
    @bottom-center { content: counter(page); font: 9pt sans-serif; color: #555;
    } }
@page :first { @bottom-center { content: none; } }
html { font-size: 11.8px; } body { background: none; line-height: 1.4; }
.bd-article :is(p, ul, ol, table, figure, div.math, .admonition) {
    margin-block: 0.5em; }
.bd-article :is(div.cell, div.highlight, .cell_output, [class*=highlight-]) {
    margin-block: 0.3em; }
.bd-article pre { padding: 0.4em 0.7em; margin: 0; line-height: 1.3; }
.bd-article h1 { font-size: 1.9em; margin: 0 0 0.5em; }
.bd-article :is(h2, h3) { margin: 1.1em 0 0.4em; font-size: 1.3em; }
.bd-article h3 { font-size: 1.1em; } .module-label { margin: 0.4em 0 0; }
p.fold-line { margin: 0.2em 0; padding-left: 0; font-size: 0.88em; }
p.fold-line code { background: none; border: none; padding: 0; }
.bd-article { padding: 0; max-width: none; margin-top: 4em; }
.bd-article.opens, nav.contents { break-before: page; margin-top: 0; }
h1, h2, h3, h4, summary, .module-label { break-after: avoid; }
figure, svg.figure-svg, img, div.math, p.claim, tr { break-inside: avoid;
    } .admonition-title { break-after: avoid; }
.bd-article pre { white-space: pre-wrap; overflow-wrap: break-word; }
/* boxes that scroll or flex are not broken across pages */
.bd-article :is(pre, .cell, .cell_input, .cell_output, .highlight,
    [class*=highlight-], .math, .math mjx-container, .admonition, table) {
  overflow: visible !important; break-inside: auto !important;
}
.bd-article :is(.cell, .highlight, [class*=highlight-]) { display: block; }
.bd-article table, .bd-article table.ledger { display: table; overflow: visible;
    overflow-wrap: break-word; } .bd-article table { font-size: 0.9em; }
.bd-article table.ledger code, .verdict { white-space: normal;
    } .bd-article table.ledger td:nth-child(2) { min-width: 0; }
.bd-article table.ledger.stacked { width: 100%; table-layout: fixed;
    } thead { break-after: avoid; } tr.chapter { break-after: avoid; }
.bd-article table.ledger.stacked th:nth-child(1) { width: 19%;
    } .bd-article table.ledger.stacked th:nth-child(2) { width: 36%; }
.bd-article table.ledger.stacked th:nth-child(3) { width: 17%;
    } .bd-article table.ledger.stacked th:nth-child(4) { width: 12%; }
svg.figure-svg { max-width: 100%; height: auto; max-height: 230mm; }
nav.contents { background: none; border: none; box-shadow: none; padding: 0; }
.front { text-align: center; padding-top: 80mm; } .front h1 { font-size: 3em; }
nav.contents ul { list-style: none; padding-left: 0; } nav.contents ul ul {
    padding-left: 1.5em; font-size: 0.92em; } nav.contents a { color: inherit;
text-decoration: none; }
nav.contents .page { float: right; font-variant-numeric: tabular-nums; }
nav.contents h2 { font-size: 1.1em; margin: 1em 0 0.2em; }
"""


LEFT_OUT = ("nbs/api",)     # a third of the pages; it is in the docstrings


def parts() -> list[tuple[str, list[str]]]:
    "(caption, pages) in reading order, the landing page first."
    toc = table_of_contents()
    return [("", [toc["root"]]),
            *((part["caption"], [entry["file"] for entry in part["chapters"]])
              for part in toc["parts"])]


def printed() -> list[tuple[str, list[str]]]:
    "The same without what stays out of the print."
    return [(caption, [page for page in listed if page not in LEFT_OUT])
            for caption, listed in parts()]


def anchor(page: str, name: str = "") -> str:
    "The anchor in the print of a page, or of an anchor on it."
    slug = re.sub(r"\W", "-", page.rsplit("/", 1)[-1])
    return f"{slug}--{name}" if name else slug


def relink(link: str, page: str, known: set[str]) -> str | None:
    """A link of a page as a link of the print; none for what is not printed,
    such as a download.
    """
    if re.match(r"[a-z]+:|//", link):
        return link
    path, _, name = link.partition("#")
    target = (
        (Path("/", page).parent / path).resolve()
            .as_posix().lstrip("/").removesuffix(".html") if path else page)
    return f"#{anchor(target, name)}" if target in known else None


def checks_of(page: str) -> str:
    "The file that has a chapter's checks."
    chapter = Chapter(page.rsplit("/", 1)[-1])
    module = chapter.module.replace(".", "/") if chapter.path.exists() else ""
    return f"normalnorm/checks/{module}.py"


def rename_anchors(article, page: str) -> None:
    """Puts the page's name in front of every id and of what refers to one
    within a figure.
    """
    for e in article.find_all(True):
        for key, value in list(e.attrs.items()):
            if key in ("id", "for"):
                e[key] = anchor(page, value)
            elif (key in ("xlink:href", "aria-labelledby", "aria-describedby")
                  or (key == "href" and e.name == "use")):
                e[key] = re.sub(r"^(#?)",
                                lambda m: m[1] + anchor(page, "") + "--", value)
            elif isinstance(value, str) and "url(" in value:
                e[key] = INNER.sub(lambda m: f"url(#{anchor(page, m[2])})",
                                   value)
    for style in article.find_all("style"):
        style.string = re.sub(r"#([A-Za-z][\w-]*)(?=[^{}]*\{)",
                              lambda m: f"#{anchor(page, m[1])}",
                              INNER.sub(lambda m: f"url(#{anchor(page, m[2])})",
                                        style.string or ""))


def relink_article(article, page: str, known: set[str]) -> None:
    for a in article.find_all("a", href=True):
        target = relink(a["href"], page, known)
        if target is None:
            del a["href"]
        else:
            a["href"] = target
    for image in article.find_all("img", src=True):
        if not image["src"].startswith("data:"):
            image["src"] = (
                (HTML / page).parent.joinpath(image["src"]).resolve().as_uri())


def replace_folds(article, checks: str) -> None:
    """What stands in the print for folded code. The modules under `checks` have
    the code of the checks.
    """
    from bs4 import BeautifulSoup
    fresh = lambda text: BeautifulSoup(text, "html.parser")
    for fold in article.select("details.fold"):
        kind = next(c for c in fold["class"] if c.startswith("fold-"))
        verdicts = (fold.find_parent(class_="cell") or fold).select("p.claim")
        if kind == "fold-check" and verdicts:
            verdicts[-1].append(fresh(
                f' <span class="claim-source">code: {checks}</span>'))
        elif kind in ("fold-export", "fold-cpp"):
            line = fresh('<p class="fold-line"></p>')
            line.p.extend(list(fold.summary.contents))
            fold.insert_before(line)
        fold.decompose()


ARTICLE = re.compile(r'<article class="bd-article.*?</article>', re.S)
FOLDED = re.compile(r'(<details class="fold [^>]*><summary>.*?</summary>).*?'
                    '(?=</details>)', re.S)
# colourless pieces of code: each would be an object of the PDF
COLOURLESS = re.compile(r'<span class="(?:n|p|w|o|nn)">([^<]*)</span>')


def lighten(source: str) -> str:
    "The article of a page, without the folded code, of which most of it is."
    return COLOURLESS.sub(r"\1", FOLDED.sub(r"\1", ARTICLE.search(source)[0]))


def article_of(page: str, known: set[str]):
    "The article of a rendered page, ready to stand among the others."
    from bs4 import BeautifulSoup
    source = (HTML / f"{page}.html").read_text(encoding="utf-8")
    article = BeautifulSoup(lighten(source), "html.parser").article
    for e in article.select("script, .headerlink"):
        e.decompose()
    replace_folds(article, checks_of(page))
    for e in article.find_all("details"):
        e["open"] = ""
    relink_article(article, page, known)
    rename_anchors(article, page)
    article["id"] = anchor(page)
    return article


def title(heading) -> str:
    """The inside of a heading, as a line of the contents: formulas and code
    stay, anchors and links do not.
    """
    copy = re.sub(r' id="[^"]*"|</?a\b[^>]*>', "", heading.decode_contents())
    return copy.strip()


def line(heading, name: str, numbers: dict[str, int]) -> str:
    """A line of the contents.

    Where the number of the page is not known yet, it has the width of one.
    """
    return (
        f'<a href="#{name}"><span '
        f'class="page">{numbers.get(name, "000")}</span>{title(heading)}</a>')


def contents(articles: dict, numbers: dict[str, int]) -> str:
    """The table of contents: parts, chapters, their sections, each a link with
    the number of its page.
    """
    out = ['<nav class="contents"><h1>Contents</h1>']
    for caption, pages in parts():
        out.append(
            f"<h2>{html.escape(caption)}</h2><ul>" if caption else "<ul>")
        for article in map(articles.get, filter(articles.get, pages)):
            sections = [(h, h.find_parent("section")["id"])
                        for h in article.find_all("h2")
                        if h.find_parent("section")]
            inner = "".join(f"<li>{line(h, name, numbers)}</li>"
                            for h, name in sections)
            out.append(f'<li>{line(article.find("h1"), article["id"], numbers)}'
                       f'<ul>{inner}</ul></li>')
        out.append("</ul>")
    return "\n".join([*out, "</nav>"])


def head() -> str:
    """The style sheets of the rendered book, the print's own, and MathJax with
    the book's settings.
    """
    page = (HTML / f"{table_of_contents()['root']}.html").read_text(
        encoding="utf-8")
    sheets = dict.fromkeys(
        re.findall(r'<link[^>]*href="\.\./(_static/[^"?]*\.css)[^"]*"', page))
    settings = re.search(r"<script>(window\.MathJax = .*?)</script>", page)
    return "\n".join(
        ['<meta charset="utf-8"><title>normalnorm</title>',
         *(f'<link rel="stylesheet" href="../html/{s}">' for s in sheets),
         f"<style>{PRINT}</style>",
         f"<script>{settings[1] if settings else 'window.MathJax = {}'};"
         "MathJax.options = {...MathJax.options, enableMenu: false, "
         "enableAssistiveMml: false}</script>",
         '<script defer src="../html/_static/mathjax/tex-chtml.js"></script>'])


def write_book(articles: dict, numbers: dict[str, int]) -> None:
    "Writes `_build/pdf/book.html`."
    front = ('<div class="front"><h1>normalnorm</h1><p>The book of the '
             'package, as it was rendered</p><p>Folded code and the API are '
             'not printed: they are on its pages, in the package '
             '<code>normalnorm</code> and in its docstrings. <code>normalnorm '
             'verify</code> runs the checks.</p></div>')
    for _, pages in printed():          # a part begins on a page of its own
        if pages:
            articles[pages[0]]["class"] = [*articles[pages[0]]["class"],
                                           "opens"]
    body = "\n".join([front, contents(articles, numbers),
                      *map(str, articles.values())])
    BOOK.parent.mkdir(parents=True, exist_ok=True)
    BOOK.write_text(
        '<!DOCTYPE html><html lang="en" data-theme="light" '
        f'data-mode="light"><head>{head()}</head><body>{body}</body></html>',
        encoding="utf-8")


def page_numbers(pdf: bytes) -> dict[str, int]:
    """Anchor → page, from the named destinations; Chromium writes these, and
    the pages in their order, as plain objects.
    """
    pages = {number: i for i, number in enumerate(
                 re.findall(rb"\n(\d+) 0 obj\n<</Type /Page\n", pdf), 1)}
    return {name.decode(): pages[page] for name, page in re.findall(
                rb"/([\w-]+) \[(\d+) 0 R /XYZ", pdf) if page in pages}


def print_book() -> None:
    """Chromium prints `book.html`.

    Virtual time stands still while scripts work, so that every formula is set
    before the page is printed.
    """
    PDF.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        line = browser.command(
            browser.chromium(), folder, "--virtual-time-budget=60000",
            "--no-pdf-header-footer", "--generate-pdf-document-outline",
            f"--print-to-pdf={PDF}", BOOK.as_uri())
        done = subprocess.run(line, capture_output=True, text=True,
                              errors="replace", timeout=SECONDS)
    if not PDF.exists():
        raise RuntimeError(f"Chromium printed nothing\n{done.stderr[-2000:]}")


def main() -> int:
    start = time.perf_counter()
    if not browser.chromium():
        print("make pdf needs Chromium or Chrome; none was found")
        return 1
    pages = [page for _, listed in printed() for page in listed]
    articles = {page: article_of(page, set(pages)) for page in pages}
    numbers = {}
    for _ in range(3):  # first without the numbers of the pages, then with them
        write_book(articles, numbers)
        print_book()
        before, numbers = numbers, page_numbers(PDF.read_bytes())
        if numbers == before:
            break
    print(f"The PDF: {PDF} ({PDF.stat().st_size / 1e6:.1f} MB, "
          f"{time.perf_counter() - start:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
