"""What a word says of a page, for the search: BM25. Sphinx's own index knows
on which pages a word stands, and not how often.

A word weighs the more, the fewer pages have it, the oftener it stands on this
one and the shorter this one is; it counts ten times in the title, three times
in another heading, not at all in code. tools/scorer.js adds the weights up.
"""

import html
import json
import re
from collections import Counter, defaultdict
from functools import lru_cache
from math import log
from pathlib import Path

from tools.pdf import ARTICLE

K1, B = 1.2, 0.75  # where frequency saturates; how much length counts
TITLE, HEADING = 10, 3
MOST = 30  # pages of a word, the heaviest
UNREAD = re.compile(
    r"<(svg|script|style|pre)\b.*?</\1>"
    '|<span class="section-number">.*?</span>|<a class="headerlink".*?</a>',
    re.S,
)
HEADINGS = re.compile(r"<h(\d)\b.*?</h\1>", re.S)


@lru_cache(maxsize=None)
def stem(language, word: str) -> str:
    "As in Sphinx's index; empty for what it does not have, or nobody asks for."
    word = language.stem(word).lower()
    return word if language.word_filter(word) and not word.isdigit() else ""


def counted(page: str, language) -> Counter:
    "The words of a rendered page, and how often it has them."
    text, found = UNREAD.sub("", ARTICLE.search(page)[0]), Counter()
    parts = [(text, 1)] + [
        (m[0], TITLE if m[1] == "1" else HEADING)
        for m in HEADINGS.finditer(text)
    ]
    for part, times in parts:
        plain = html.unescape(re.sub("<[^>]*>", " ", part))
        for word in language.split(plain):
            found[stem(language, word)] += times
    del found[""]
    return found


def weights(pages: list[Counter]) -> dict[str, dict[int, float]]:
    "Word → page → weight."
    mean = sum(page.total() for page in pages) / len(pages)
    having = Counter(word for page in pages for word in page)
    found = defaultdict(dict)
    for at, page in enumerate(pages):
        damping = K1 * (1 - B + B * page.total() / mean)
        for word, n in page.items():
            m = having[word]
            rarity = log(1 + (len(pages) - m + 0.5) / (m + 0.5))
            found[word][at] = rarity * n * (K1 + 1) / (n + damping)
    return found


def packed(on: dict[int, float]) -> list[str]:
    "Pages and their weights in hundredths, a letter each, from 0 as zero."
    pages = sorted(on, key=on.get, reverse=True)[:MOST]
    return [
        "".join(chr(48 + round(n)) for n in numbers)
        for numbers in (pages, [100 * on[at] for at in pages])
    ]


def write(app) -> list:
    """The weights of words that stand on several pages, for the page of the
    search. Sphinx asks for more pages here, when it has written its own: none.
    """
    builder = app.builder
    pages = [
        counted(
            Path(builder.get_outfilename(name)).read_text("utf-8"),
            builder.indexer.lang,
        )
        for name in sorted(app.env.all_docs)  # as in Sphinx's index
    ]
    kept = {w: packed(on) for w, on in weights(pages).items() if len(on) > 1}
    (Path(app.outdir) / "_static" / "ranking.js").write_text(
        f"var ranking = {json.dumps(kept, ensure_ascii=False)};\n", "utf-8"
    )
    return []


def on_the_search_page(app, pagename, templatename, context, doctree):
    if pagename == "search":
        app.add_js_file("ranking.js")
