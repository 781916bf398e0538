"""The links of the rendered book: internal ones must lead somewhere, external
ones are listed, and nothing is loaded from a network.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

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
STYLE_ADDRESS = re.compile(
    r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""", re.I
)


@dataclass
class Page:
    "What a page links to, what it loads, and the anchors that it has."

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


class Reader(HTMLParser):
    "Fills a `Page` from its source."

    def __init__(self):
        super().__init__()
        self.page, self.in_style = Page(), False

    def handle_starttag(self, tag, attributes):
        a = {k: v or "" for k, v in attributes}
        self.in_style = tag == "style"
        self.page.anchors |= {
            a[k] for k in ("id", "name") if k in a and (k == "id" or tag == "a")
        }
        self.page.links += [a[k] for k in ("href", "src") if k in a]
        if a.get("http-equiv", "").lower() == "refresh" and "url=" in a.get(
            "content", ""
        ):
            self.page.links.append(a["content"].split("url=", 1)[1])
        if "src" in a or (
            tag == "link"
            and set(a.get("rel", "").lower().split()) & LOADING_RELATIONS
        ):
            self.page.loaded.append(a.get("src", a.get("href", "")))
        self.page.loaded += STYLE_ADDRESS.findall(a.get("style", ""))

    def handle_data(self, data):
        if self.in_style:
            self.page.loaded += STYLE_ADDRESS.findall(data)

    def handle_endtag(self, tag):
        self.in_style = False


def pages(html: Path) -> list[Path]:
    "The rendered pages; the theme's templates in `_static` are none."
    return [
        p
        for p in sorted(html.rglob("*.html"))
        if "_static" not in p.relative_to(html).parts
    ]


@lru_cache(maxsize=None)
def read(path: Path) -> Page:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    return reader.page


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
            elif is_internal(link) and (why := missing(path, link)):
                wrong.append(f"{path.relative_to(html)}: {link} {why}")
    return wrong


def missing(path: Path, link: str) -> str:
    """Why a relative link from the page at `path` leads nowhere, or an empty
    string.
    """
    parts = urlsplit(link)
    target = (
        (path.parent / unquote(parts.path)).resolve()
        if parts.path
        else path.resolve()
    )
    if not target.is_file():
        return "does not exist"
    if (
        parts.fragment
        and target.suffix == ".html"
        and unquote(parts.fragment) not in read(target).anchors
    ):
        return "has no such anchor"
    return ""


def external(html: Path) -> dict[str, list[str]]:
    """Address → the pages that link to it.

    Listed only: nothing here asks a network.
    """
    found = {}
    for path in pages(html):
        for link in dict.fromkeys(read(path).links):
            if REMOTE.match(link):
                found.setdefault(urljoin("https:", link), []).append(
                    path.relative_to(html).as_posix()
                )
    return found


def loaded_from_network(html: Path) -> list[str]:
    """Scripts, styles, fonts, images that a page or a style sheet would fetch
    from elsewhere.
    """
    found = [
        f"{p.relative_to(html)}: {address}"
        for p in pages(html)
        for address in read(p).loaded
        if REMOTE.match(address)
    ]
    for sheet in sorted(html.rglob("*.css")):
        found += [
            f"{sheet.relative_to(html)}: {a}"
            for a in STYLE_ADDRESS.findall(
                sheet.read_text(encoding="utf-8", errors="replace")
            )
        ]
    return found


if __name__ == "__main__":
    from tools.chapters import ROOT

    built = ROOT / "_build" / "html"
    print(
        "\n".join([*broken(built), *loaded_from_network(built)])
        or "no broken internal link"
    )
    for address, where in sorted(external(built).items()):
        print(f"  {address}  ({', '.join(where)})")
