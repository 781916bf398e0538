"""Links of the rendered book: internal ones must lead somewhere, in whichever
folder of a host it lies, and nothing is loaded from a network.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import lxml.html

LOADING_RELATIONS = {
    "stylesheet",
    "preload",
    "modulepreload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "icon",
    "manifest",
}
REMOTE = re.compile(r"\s*(?:https?:)?//", re.I)
# of a host, or of its root, which is not that of a book in a folder
OUTSIDE = re.compile(r"\s*(?:https?:/)?/", re.I)
STYLE_ADDRESS = re.compile(
    r"""(?:url\(|@import)\s*["']?((?:https?:/)?/[^"')\s]+)""", re.I
)


@dataclass
class Page:
    "What a page links to, what it loads, and the anchors that it has."

    anchors: set[str]
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


def pages(html: Path) -> list[Path]:
    "The rendered pages; the theme's templates in `_static` are none."
    return [
        p
        for p in sorted(html.rglob("*.html"))
        if "_static" not in p.relative_to(html).parts
    ]


@lru_cache(maxsize=None)
def read(path: Path) -> Page:
    parser = lxml.html.HTMLParser(encoding="utf-8", huge_tree=True)
    root = lxml.html.parse(str(path), parser).getroot()
    page = Page({*root.xpath("//@id | //a/@name")})
    for element, attribute, link, _ in root.iterlinks():
        relations = {*element.get("rel", "").lower().split()}
        if attribute in ("href", "src", "content"):  # of a refresh
            page.links.append(link)
        if attribute in ("src", "style", None) or (
            element.tag == "link" and relations & LOADING_RELATIONS
        ):
            page.loaded.append(link)
    return page


def is_internal(link: str) -> bool:
    return not REMOTE.match(link) and not urlsplit(link).scheme


def broken(html: Path) -> list[str]:
    """Internal links to a file or an anchor that does not exist, and links to
    the placeholder host.
    """
    wrong = []
    for path in pages(html):
        for link in dict.fromkeys(read(path).links):
            if "example.invalid" in link:
                wrong.append(
                    f"{path.relative_to(html)}: {link} is a placeholder"
                )
            elif is_internal(link) and (why := missing(html, path, link)):
                wrong.append(f"{path.relative_to(html)}: {link} {why}")
    return wrong


def missing(html: Path, path: Path, link: str) -> str:
    """Why a relative link from the page at `path` leads nowhere in the book, or
    an empty string.
    """
    parts = urlsplit(link)
    target = (
        (path.parent / unquote(parts.path)).resolve()
        if parts.path
        else path.resolve()
    )
    if parts.path.startswith("/"):
        return "begins at the root, and the book may lie in a folder"
    if not target.is_file():
        return "does not exist"
    if not target.is_relative_to(html.resolve()):
        return "leads out of the book"
    if (
        parts.fragment
        and target.suffix == ".html"
        and unquote(parts.fragment) not in read(target).anchors
    ):
        return "has no such anchor"
    return ""


def loaded_from_network(html: Path) -> list[str]:
    """Scripts, styles, fonts, images that a page or a style sheet would fetch
    from elsewhere.
    """
    found = [
        f"{p.relative_to(html)}: {address}"
        for p in pages(html)
        for address in read(p).loaded
        if OUTSIDE.match(address)
    ]
    for sheet in sorted(html.rglob("*.css")):
        found += [
            f"{sheet.relative_to(html)}: {a}"
            for a in STYLE_ADDRESS.findall(
                sheet.read_text(encoding="utf-8", errors="replace")
            )
        ]
    return found
