"""`python -m tools.pdf [--record]`: the rendered book as one PDF, printed by
Chromium; with `--record`, how many pages it has goes to results/print.json.

Contents, page numbers, bookmarks; solutions are opened. Code that the pages
fold is left out: a check is its verdict and the module that has its code, an
export its signature, a figure itself. What is looked up rather than read stays
on its pages: the handbook, the contents by name, the tables of all claims, of
their coverage and of each paper. The contents name it.

The articles of the pages become one page, `_build/pdf/book.html`. Each anchor
gets the name of its page in front, so that links within the book stay links and
nothing meets. Scripts are left out, but for MathJax: what is interactive shows
its still picture.

The whole is printed once, with three zeros for each number of a page in the
contents. Then it is known where everything lies; the contents are printed
alone, which is quick, and put over the zeros.
"""

import html
import re
import sys
import tempfile
import time
from pathlib import Path

from tools import browser
from tools.chapters import ROOT, Chapter, handbook, parts
from tools.files import ran, save

HTML = ROOT / "_build" / "html"
BOOK = ROOT / "_build" / "pdf" / "book.html"
CONTENTS = BOOK.with_name("contents.html")
PDF = ROOT / "_build" / "normalnorm.pdf"
SECONDS = 900  # a minute and a half on two quiet cores
INNER = re.compile(r"url\((['\"]?)#([^)'\"]+)\1\)")

PRINT = Path(__file__).with_name("print.css")
RECORD = ROOT / "results" / "print.json"
# looked up, not read: `normalnorm verify` has most of it
LEFT_OUT = ("nbs/910_what_was_checked", "nbs/915_coverage", "nbs/contents")


def printed() -> list[tuple[str, list[str]]]:
    "The same without what stays out of the print."
    return [
        (caption, [page for page in listed if is_printed(page)])
        for caption, listed in parts()
    ]


def is_printed(page: str) -> bool:
    return "_paper_" not in page and page not in (*LEFT_OUT, *handbook())


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
        (Path("/", page).parent / path)
        .resolve()
        .as_posix()
        .lstrip("/")
        .removesuffix(".html")
        if path
        else page
    )
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
            elif (
                key in ("aria-labelledby", "aria-describedby")
                or key == "xlink:href"
                and value.startswith("#")
                or key == "href"
                and e.name == "use"
            ):
                e[key] = re.sub(
                    r"^(#?)", lambda m: m[1] + anchor(page, "") + "--", value
                )
            elif isinstance(value, str) and "url(" in value:
                e[key] = INNER.sub(
                    lambda m: f"url(#{anchor(page, m[2])})", value
                )
    for style in article.find_all("style"):
        style.string = re.sub(
            r"#([A-Za-z][\w-]*)(?=[^{}]*\{)",
            lambda m: f"#{anchor(page, m[1])}",
            INNER.sub(
                lambda m: f"url(#{anchor(page, m[2])})", style.string or ""
            ),
        )


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
                (HTML / page).parent.joinpath(image["src"]).resolve().as_uri()
            )


def is_public(fold) -> bool:
    "Whether the line of an export begins with a name for users."
    name = fold.summary.find("code")
    return name is not None and not name.get_text().startswith("_")


def replace_folds(article, checks: str) -> None:
    """What stands in the print for folded code. The modules under `checks` have
    the code of the checks; of an export without a public name nothing stands.
    """
    from bs4 import BeautifulSoup

    fresh = lambda text: BeautifulSoup(text, "html.parser")
    for fold in article.select("details.fold"):
        kind = next(c for c in fold["class"] if c.startswith("fold-"))
        verdicts = (fold.find_parent(class_="cell") or fold).select("p.claim")
        if kind == "fold-check" and verdicts:
            verdicts[-1].append(
                fresh(f' <span class="claim-source">code: {checks}</span>')
            )
        elif kind == "fold-cpp" or kind == "fold-export" and is_public(fold):
            line = fresh('<p class="fold-line"></p>')
            line.p.extend(list(fold.summary.contents))
            fold.insert_before(line)
        elif (
            kind == "fold-export"
            and (cell := fold.find_parent(class_="cell"))
            and (label := cell.find_previous_sibling())
        ):
            if "module-label" in label.get("class", []):
                label.decompose()  # of what module, nobody asks
        fold.decompose()


LONG = 12  # rows of a table; a longer one is set in smaller type


def size_for_paper(article) -> None:
    """Figures as small as their text can be read, long tables in smaller type;
    of a figure to drag the still one only.
    """
    for e in article.select(".live"):
        e.decompose()
    for e in article.select("svg.figure-svg, .still > svg"):
        e["style"] = re.sub(
            r"(?<![\w-])width: ?([\d.]+)pt",
            lambda m: f"width: {browser.LEGIBLE * float(m[1]):.1f}pt",
            e["style"],
        )
    for e in article.find_all("table"):
        if len(e.find_all("tr")) > LONG:
            e["class"] = [*e.get("class", []), "long"]


ARTICLE = re.compile(r'<article class="bd-article.*?</article>', re.S)
FOLDED = re.compile(
    r'(<details class="fold [^>]*><summary>.*?</summary>).*?'
    "(?=</details>)",
    re.S,
)
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
    size_for_paper(article)
    for e in article.find_all("details"):
        e["open"] = ""
    relink_article(article, page, known)
    rename_anchors(article, page)
    article["id"] = anchor(page)
    return article


def title(inside: str) -> str:
    """The inside of a heading, as a line of the contents: formulas and code
    stay, anchors, links and the mark of a link to the heading do not.
    """
    return re.sub(
        r'<a class="headerlink".*?</a>| id="[^"]*"|</?a\b[^>]*>',
        "",
        inside,
        flags=re.S,
    ).strip()


def title_of(page: str) -> str:
    "The title of a rendered page."
    source = (HTML / f"{page}.html").read_text(encoding="utf-8")
    return title(re.search(r"<h1\b[^>]*>(.*?)</h1>", source, re.S)[1])


def sections(article) -> list[tuple]:
    """(heading, anchor) of the sections of an article; each ends with a summary
    and exercises, which go without saying.
    """
    return [
        (h, h.find_parent("section")["id"])
        for h in article.find_all("h2")
        if h.find_parent("section")
        and not plain(h).endswith(("Summary", "Exercises"))
    ]


def contents(articles: dict, numbers: dict[str, int]) -> str:
    """The table of contents: parts, chapters with their page, and on the lines
    below the titles of their sections. Each is a link. A part ends with the
    titles of what is not printed.

    Where the number of a page is not known yet, zeros have its width.
    """
    out = ['<nav class="contents"><h1>Contents</h1>']
    for caption, pages in parts():
        out.append(
            f"<h2>{html.escape(caption)}</h2><ul>" if caption else "<ul>"
        )
        for article in map(articles.get, filter(articles.get, pages)):
            name = article["id"]
            inner = "".join(
                f'<li><a href="#{at}">{title(h.decode_contents())}</a></li>'
                for h, at in sections(article)
            )
            out.append(
                f'<li><a href="#{name}"><span class="page">'
                f"{numbers.get(name, '000')}</span>"
                f"{title(article.find('h1').decode_contents())}</a> "
                f"<ul>{inner}</ul></li>"
            )
        out.append("</ul>")
        if unprinted := " · ".join(
            title_of(page) for page in pages if not is_printed(page)
        ):
            out.append(
                f'<p class="unprinted">On the pages only: {unprinted}</p>'
            )
    return "\n".join([*out, "</nav>"])


def head() -> str:
    """The style sheets of the rendered book, the print's own, and MathJax with
    the book's settings.
    """
    (_, landing), *_ = parts()
    page = (HTML / f"{landing[0]}.html").read_text(encoding="utf-8")
    sheets = dict.fromkeys(
        re.findall(r'<link[^>]*href="\.\./(_static/[^"?]*\.css)[^"]*"', page)
    )
    settings = re.search(r"<script>(window\.MathJax = .*?)</script>", page)
    return "\n".join(
        [
            '<meta charset="utf-8"><title>normalnorm</title>',
            *(f'<link rel="stylesheet" href="../html/{s}">' for s in sheets),
            f"<style>{PRINT.read_text(encoding='utf-8')}</style>",
            f"<script>{settings[1] if settings else 'window.MathJax = {}'};"
            "MathJax.options = {...MathJax.options, enableMenu: false, "
            # what a screen reader is told of a formula is wider than a page
            "menuOptions: {settings: {assistiveMml: false}}}</script>",
            '<script defer src="../html/_static/mathjax/tex-chtml.js">'
            "</script>",
        ]
    )


FRONT = """<div class="front"><h1>normalnorm</h1><p>The book of the package, as
it was rendered</p><p>Not printed are folded code, the handbook, the contents by
name, and the tables of all claims, of their coverage and of each paper. They
are on the book's pages; the code is in the package <code>normalnorm</code>,
too, and <code>normalnorm verify</code> runs every check and prints the
claims.</p></div>"""


def write(file: Path, *body: str) -> None:
    "A page of HTML with the book's head."
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        '<!DOCTYPE html><html lang="en" data-theme="light" '
        f'data-mode="light"><head>{head()}</head><body>'
        + "\n".join(body)
        + "</body></html>",
        encoding="utf-8",
    )


def printed_as_pdf(file: Path, to: Path) -> Path:
    """Chromium prints a file.

    Virtual time stands still while scripts work, so that every formula is set
    before the page is printed. Without tags, which are half of the bytes: who
    listens to the book has its pages.
    """
    to.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        line = browser.command(
            browser.chromium(),
            folder,
            "--virtual-time-budget=60000",
            "--no-pdf-header-footer",
            "--disable-pdf-tagging",
            f"--print-to-pdf={to}",
            file.as_uri(),
        )
        done = ran(line, errors="replace", timeout=SECONDS)
    if not to.exists():
        raise RuntimeError(f"Chromium printed nothing\n{done.stderr[-2000:]}")
    return to


def page_numbers(pdf) -> dict[str, int]:
    "Anchor → page, from the named destinations of a PDF of Chromium's."
    pages = {page.objgen: i for i, page in enumerate(pdf.pages, 1)}
    return {
        str(name).lstrip("/"): pages[there[0].objgen]
        for name, there in pdf.Root.Dests.items()
    }


def scale(pdf) -> float:
    """Where something is wider than a page, Chromium prints all pages smaller,
    without a word; this is how much. A pixel is 3.125 of its units.
    """
    drawn = pdf.pages[0].Contents.read_bytes()
    return float(re.search(rb"\n([\d.]+) 0 0 \1 ", drawn)[1]) / 3.125


def measured(pages: list[str]) -> dict:
    """Of the PDF: its pages, how many of them begin in each chapter, the size
    of its type.
    """
    import pikepdf

    with pikepdf.open(PDF) as pdf:
        numbers, count, shrunk = page_numbers(pdf), len(pdf.pages), scale(pdf)
    begins = [*(numbers[anchor(page)] for page in pages), count + 1]
    size = re.search(r"^html .*?([\d.]+)px", PRINT.read_text("utf-8"), re.M)
    return {
        "pages": count,
        "points": round(0.75 * float(size[1]) * shrunk, 2),
        "megabytes": round(PDF.stat().st_size / 1e6, 1),
        "front": begins[0] - 1,
        "chapters": {
            page: end - begin
            for page, begin, end in zip(pages, begins, begins[1:])
        },
    }


def put_over(pdf, contents) -> None:
    """The second and later pages of `contents` take the place of what is seen
    on these pages of `pdf`, whose links stay.
    """
    for old, new in zip(pdf.pages[1 : len(contents.pages)], contents.pages[1:]):
        fresh = pdf.copy_foreign(new.obj)
        old.obj.Contents, old.obj.Resources = fresh.Contents, fresh.Resources


def plain(heading) -> str:
    "A heading without marks, as bookmarks have it."
    return re.sub(r"\\[()]|\s+", " ", heading.get_text()).strip()


def bookmarks(articles: dict, numbers: dict[str, int]) -> list:
    "Parts, chapters, sections, for the outline of the PDF."
    from pikepdf import OutlineItem

    top = []
    for caption, pages in parts():
        listed = []
        for article in map(articles.get, filter(articles.get, pages)):
            listed.append(
                OutlineItem(
                    plain(article.find("h1")), numbers[article["id"]] - 1
                )
            )
            listed[-1].children.extend(
                OutlineItem(plain(h), numbers[name] - 1)
                for h, name in sections(article)
                if name in numbers
            )
            listed[-1].is_closed = True
        if caption and listed:
            part = OutlineItem(
                caption,
                numbers[articles[next(filter(articles.get, pages))]["id"]] - 1,
            )
            part.children.extend(listed)
            listed = [part]
        top += listed
    return top


def print_book(articles: dict) -> int:
    "Writes the PDF; how many pages it has."
    import pikepdf

    for _, pages in printed():  # a part begins on a page of its own
        if pages:
            articles[pages[0]]["class"] = [
                *articles[pages[0]]["class"],
                "opens",
            ]
    write(BOOK, FRONT, contents(articles, {}), *map(str, articles.values()))
    whole = printed_as_pdf(BOOK, BOOK.with_suffix(".pdf"))
    with pikepdf.open(whole) as pdf:
        numbers = page_numbers(pdf)
        write(CONTENTS, FRONT, contents(articles, numbers))
        first = printed_as_pdf(CONTENTS, CONTENTS.with_suffix(".pdf"))
        with pikepdf.open(first) as alone:
            put_over(pdf, alone)
        with pdf.open_outline() as outline:
            outline.root.extend(bookmarks(articles, numbers))
        pdf.save(
            PDF,
            object_stream_mode=pikepdf.ObjectStreamMode.generate,
            recompress_flate=True,
        )
        return len(pdf.pages)


def main() -> int:
    if not browser.chromium():
        print("make pdf needs Chromium or Chrome; none was found")
        return 1
    start = time.perf_counter()
    pages = [page for _, listed in printed() for page in listed]
    print_book({page: article_of(page, set(pages)) for page in pages})
    took, made = time.perf_counter() - start, measured(pages)
    print(
        f"The PDF: {PDF} ({made['pages']} pages in {made['points']} points, "
        f"{made['megabytes']} MB, {took:.0f} s)"
    )
    if "--record" in sys.argv[1:]:
        when = {
            "date": time.strftime("%Y-%m-%d"),
            "browser": browser.version().strip(),
        }
        save(RECORD, when | made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
