"""The side bar: the parts of the half that a page belongs to, the book or the
handbook, and a link to the other one.

The theme folds the parts but the present one (`show_navbar_depth: 0`).
"""

import html
from pathlib import Path

from bs4 import BeautifulSoup

from tools.chapters import HANDBOOK, halves, handbook, pages


def switch(here: str, root: Path, address) -> str:
    "The names of the halves; the other one is a link to its front page."
    fronts = pages(root)[:1] + handbook(root)[:1]
    names = [
        f"<strong>{half}</strong>"
        if half == here
        else f'<a href="{html.escape(address(front))}">{half}</a>'
        for half, front in zip(halves(root), fronts)
    ]
    return f'<p class="halves">{" ".join(names)}</p>'


def one_half(app, pagename, templatename, context, doctree):
    "The theme makes the side bar of all parts; those of one half stay."
    whole, root = context["generate_toctree_html"], Path(app.srcdir)
    here = [*halves(root)][pagename in handbook(root)]

    def half(*given, **options):
        soup = whole(*given, **options)
        for part in soup.select("li.toctree-l0"):
            caption = part.find(class_="caption-text")
            if (here == "The handbook") != caption.text.startswith(HANDBOOK):
                part.decompose()
            else:
                caption.string = caption.text.removeprefix(HANDBOOK)
        made = switch(here, root, context["pathto"])
        soup.insert(0, BeautifulSoup(made, "html.parser"))
        return soup

    context["generate_toctree_html"] = half
