"""The Sphinx extension: renders chapters written for nbdev and Quarto with
Jupyter Book.

When Sphinx reads a notebook, its outputs are swapped in from the executed copy,
nbdev's `#|` directives become cell tags, and Quarto's markdown becomes MyST.
Nothing is written back. SVG figures are inlined, with their ink in the colour
of the theme's text.
"""

import copy
import hashlib
import html
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from tools import api, folding, markup, records, typeset
from tools.chapters import Chapter
from tools.chapters import cell as cell_of
from tools.files import load
from tools.markup import THEOREMS

with suppress(ImportError):  # not there where a wheel is built
    from docutils import nodes

INK = "#101010"
REFERENCES = (
    {"eq": "eq", "exr": "ref"}
    | {k: "prf:ref" for k in THEOREMS}
    | dict.fromkeys(("fig", "tbl", "sec"), "numref")
)


# ---- markdown ---------------------------------------------------------------


class Myst(markup.Writer):
    "Pieces of a cell as the book's markdown."

    def heading(self, block: markup.Heading) -> str:
        target = f"({block.label})=\n" if block.label else ""
        return f"{target}{'#' * block.level} {self.inline(block.inline)}"

    def equation(self, block: markup.Equation) -> str:
        label = f" ({block.label})" if block.label else ""
        return f"$$\n{block.tex}\n$${label}"

    def division(self, block: markup.Division) -> str:
        if block.kind == "solution":
            head = "{admonition} Solution\n:class: dropdown"
        elif block.kind == "proof":
            head = "{prf:proof}"
        else:
            theorem = THEOREMS.get(block.kind)
            name = f"prf:{theorem}" if theorem else "exercise"
            head = f"{{{name}}}\n:label: {block.label}"
        return f"\n:::{head}\n\n{self.write(block.pieces)}\n:::\n"

    def citation(self, piece: markup.Citation) -> str:
        keys = ",".join(
            key + f"{{{remark}}}" * bool(remark)
            for key, remark in piece.entries
        )
        return f"{{cite:{'t' if piece.named else 'p'}}}`{keys}`"

    def reference(self, piece: markup.Reference) -> str:
        return f"{{{REFERENCES[piece.kind]}}}`{piece.label}`"

    def inline(self, found: markup.Inline) -> str:
        return super().inline(markup.bare_equations(found))


def markdown(source: str) -> str:
    "A text such as a caption, translated."
    return Myst().write(markup.blocks(source))


# ---- cells ------------------------------------------------------------------

FOLD = "fold:"  # marks our words among the prompts of myst_nb


def fold_cell(cell: dict, fold: folding.Fold | None) -> None:
    "The tag that folds a cell, and what the page says in its place."
    if fold:
        cell["metadata"].setdefault("tags", []).append("hide-input")
        cell["metadata"].setdefault("mystnb", {})["code_prompt_show"] = (
            f"{FOLD}{fold.kind} {fold.html()}"
        )


def code_cell(cell: dict) -> None:
    "Directives out, tags and figure metadata in."
    source = cell["source"]
    found = folding.directives(source)
    cell["source"] = folding.without_directives(source)
    # a hidden or folded cell that failed is shown
    failed = cell["metadata"].pop("failed", False)
    cell["metadata"]["tags"] = [] if failed else folding.cell_tags(found)
    if not cell["source"] and "remove-cell" not in cell["metadata"]["tags"]:
        cell["metadata"]["tags"].append("remove-cell")
    fold_cell(cell, None if failed else folding.fold_of(source))
    caption = found.get("fig-cap")
    if caption:
        figure = {"caption": markdown(caption)}
        if found.get("label", "").startswith("fig-"):
            figure["name"] = found["label"]
        cell["metadata"].setdefault("mystnb", {}).update(
            figure=figure,
            image={
                "alt": found.get("fig-alt") or re.sub(r"[$`@\\]", "", caption)
            },
        )


def title(cells: list[dict]) -> None:
    """The description under the title, written as a quotation for nbdev,
    becomes the chapter's lead.
    """
    if cells and cells[0]["cell_type"] == "markdown":
        cells[0]["source"] = re.sub(
            r"\A((?:\([\w-]+\)=\n)?# .*\n+)> (.*)\Z",
            r"\1:::{div} lead\n\2\n:::\n",
            cells[0]["source"].strip(),
            flags=re.S,
        )


CHECKED = "910_what_was_checked.html"
CLAIM_LINE = re.compile(r'<p class="claim ([\w-]+)"><code>([^<]+)</code>')


# a formula of one line: nothing that costs money has a dollar on both sides
DOLLARS = re.compile(r"(?<![\\$\w])\$(?=[^\s$])([^$\n]*?[^\s$\\])\$(?![\w$])")
SPECIAL = re.compile(r"[^\w\s]")


def rewrite(output: dict, how: Callable[[str], str], *kinds: str) -> None:
    "What a cell gave, in these kinds of text, as `how` makes it."
    data = output.get("data", {})
    for kind in {*kinds} & {*data}:
        data[kind] = how("".join(data[kind]))


def typeset_output(output: dict) -> None:
    """Formulas in markdown that a cell makes, $…$, are set as those of the
    text. Within the mark they are spelt so that markdown finds nothing in them.
    """

    def formula(match):
        inside = SPECIAL.sub(lambda m: f"&#{ord(m[0])};", rf"\({match[1]}\)")
        inside = inside.replace("_", "&#95;")
        return f'<span class="math notranslate nohighlight">{inside}</span>'

    rewrite(output, lambda text: DOLLARS.sub(formula, text), "text/markdown")


def link_claims(output: dict, known: set[str]) -> None:
    """A verdict line gets an anchor, `claim-here-…`, and its identifier a link
    into the ledger; only for the ids in `known`, each once. Statements are
    typeset.
    """

    def line(match):
        kind, name = match.groups()
        if name not in known:
            return match[0]
        known.discard(name)
        return (
            f'<p class="claim {kind}" id="claim-here-{name}"><a '
            f'href="{CHECKED}#claim-{name}"><code>{name}</code></a>'
        )

    rewrite(
        output,
        lambda text: CLAIM_LINE.sub(line, typeset.in_output(text)),
        "text/html",
    )


CHAPTER_LINK = re.compile(r'<a href="(\d{3}_[\w.]+)\.html">\1</a>')


def title_of(path: Path) -> str:
    "The first heading of a notebook, or its name where there is none."
    cells = load(path)["cells"][:1] if path.exists() else []
    found = re.search(
        r"^# (.+)$",
        "".join(line for cell in cells for line in cell["source"]),
        re.M,
    )
    return found[1] if found else path.stem


def chapter_titles(output: dict, folder: Path) -> set[Path]:
    """Links to chapters that show the name of a file show the chapter's title.

    Returns the notebooks that were read for it.
    """
    read = set()

    def link(match):
        read.add(path := folder / f"{match[1]}.ipynb")
        return f'<a href="{match[1]}.html">{html.escape(title_of(path))}</a>'

    rewrite(
        output,
        lambda text: CHAPTER_LINK.sub(link, text),
        "text/html",
        "text/markdown",
    )
    return read


def export_label(
    source: str, module: str, entries: dict[str, list[api.Entry]]
) -> dict | None:
    """The small cell above exported code: its module, linked to the API; a
    target for each public name that the code defines.
    """
    full = f"normalnorm.{module}"
    if full not in entries:
        return None
    defined = api.defined_names(folding.without_directives(source))
    lines = [
        f"({e.target('code')})=" for e in entries[full] if e.name in defined
    ] + [
        ":::{div} module-label",
        f"[`{full}`](#{api.module_target(full)})",
        ":::",
    ]
    name = f"m{zlib.crc32((source + module).encode()):08x}"
    return cell_of("markdown", "\n".join(lines), name)


KERNEL = "normalnorm/layers/engines/native.cpp"


def native_cell(cell: dict) -> dict:
    """C++ as a code cell with a tag that says so, by which `colour_native`
    knows it.
    """
    code = folding.without_directives(cell["source"])
    made = cell_of("code", code, cell["id"], tags=["cpp"])
    fold_cell(made, folding.fold_of(cell["source"], raw=True))
    return made


def shown_cells(
    cells: list[dict], entries: dict[str, list[api.Entry]]
) -> Iterator[dict]:
    """The cells as pages show them, with a label above each that the library
    contains.
    """
    module = ""
    for cell in cells:
        found = folding.directives(cell["source"])
        if cell["cell_type"] == "code":
            module = found.get("default_exp", module)
            if folding.shows_export(found) and (
                label := export_label(cell["source"], module, entries)
            ):
                yield label
            code_cell(cell)
        elif cell["cell_type"] == "raw" and "export-cpp" in found:
            label = f":::{{div}} module-label\n`{KERNEL}`\n:::"
            yield cell_of("markdown", label, f"{cell['id']}-f")
            cell = native_cell(cell)
        yield cell


# ---- a chapter that failed --------------------------------------------------

NOT_DRAWN = (
    '<svg width="300pt" height="40pt" viewBox="0 0 300 40" '
    'xmlns="http://www.w3.org/2000/svg"><text x="0" y="24" '
    f'style="font: 12px sans-serif; fill: {INK}">not drawn: the cell '
    "did not come to its end</text></svg>"
)


def has_image(cell: dict) -> bool:
    return any(
        kind.startswith("image/")
        for output in cell["outputs"]
        for kind in output.get("data", {})
    )


def mark_older(cells: list[dict], shown: list[str]) -> list[dict]:
    "Below the title, which of the records on a page are older than their code."
    if not (lines := records.older(shown)):
        return cells
    note = "\n\n".join([":::{note}", *lines, ":::"])
    return [cells[0], cell_of("markdown", note, "older-records"), *cells[1:]]


def mark_failure(cells: list[dict], failed: dict, name: str) -> list[dict]:
    """The cells of a chapter that failed, with what happened at the top, a mark
    above the cell, and a stand-in for each figure that others may refer to.
    """
    number = failed.get("cell", 0)
    where = (
        f"[Cell {number} of {failed.get('of')}](#failed-{name}) failed"
        if number
        else "It could not be run"
    )
    rest = (
        " The cells above it show what they gave; those below were not run."
        if number
        else ""
    )
    top = (
        f":::{{admonition}} This page failed\n:class: danger\n\n"
        f"{where} when this book was made:\n\n~~~~~~~~text\n"
        f"{failed.get('error', '')}\n~~~~~~~~\n{rest}\n:::"
    )
    made = []
    for i, cell in enumerate(cells, 1):
        if cell["cell_type"] == "code":
            found = folding.directives(cell["source"])
            if i == number:
                mark = (
                    f"(failed-{name})=\n"
                    ":::{div} failed-cell\nThis cell failed.\n:::"
                )
                made.append(cell_of("markdown", mark, "failed-here"))
                cell["metadata"]["failed"] = True
            if (
                "fig-cap" in found
                or "figure" in cell["metadata"].get("mystnb", {})
            ) and not has_image(cell):
                cell["outputs"] = [
                    *cell["outputs"],
                    {
                        "output_type": "display_data",
                        "metadata": {},
                        "data": {"image/svg+xml": NOT_DRAWN},
                    },
                ]
        made.append(cell)
        if i == 1:
            made.append(cell_of("markdown", top, "failed-page"))
    return made


def translate_notebook(
    notebook: dict,
    executed: dict | None,
    claims: set[str] = frozenset(),
    entries: dict | None = None,
    failed: dict | None = None,
    name: str = "",
) -> dict:
    """The notebook as Jupyter Book should see it: outputs from the executed
    copy, dialect translated.

    `claims`: identifiers of the ledger that this chapter proves; `entries`: the
    API, by module; `failed`: what the record of the chapter `name` says where
    its last run failed.
    """
    claims, outputs = set(claims), {}
    run = executed["cells"] if executed else []
    for cell in (*notebook["cells"], *run):
        cell["source"] = "".join(cell["source"])
    for cell in run:
        if cell["cell_type"] == "code":
            outputs.setdefault(cell["source"], []).append(cell["outputs"])
    for cell, found in markup.cells(notebook["cells"]):
        if cell["cell_type"] == "markdown":
            cell["source"] = Myst().write(found)
        elif cell["cell_type"] == "code":
            known = outputs.get(cell["source"])
            cell["outputs"] = known.pop(0) if known else []
            for output in cell["outputs"]:
                typeset_output(output)
                link_claims(output, claims)
    title(notebook["cells"])
    if failed:
        notebook["cells"] = mark_failure(notebook["cells"], failed, name)
    notebook["cells"] = [*shown_cells(notebook["cells"], entries or {})]
    return notebook


# ---- Sphinx -----------------------------------------------------------------


def source_read(app, docname, source):
    path, root = Path(app.env.doc2path(docname)), Path(app.srcdir)
    if path.name == "api.md":
        for file in api.files(root):
            app.env.note_dependency(str(file))
        source[0] = source[0].replace(api.MARK, api.page(root))
    if path.suffix != ".ipynb":
        return
    from tools.run import Run  # psutil, which who builds a wheel has not

    run = Run(Chapter(path.stem, root))
    for file in (run.notebook, run.record_file, records.LEDGER):
        app.env.note_dependency(str(file))
    notebook = translate_notebook(
        json.loads(source[0]),
        load(run.notebook) if run.notebook.exists() else None,
        {c["id"] for c in api.claims(root) if c["chapter"] == path.stem},
        api.entries(root),
        run.record().get("failed"),
        path.stem,
    )
    notebook["cells"] = mark_older(
        notebook["cells"], run.record().get("dependencies", [])
    )
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            for named in chapter_titles(output, path.parent):
                app.env.note_dependency(str(named))
    source[0] = json.dumps(notebook)


def inline_svg(text: str, alt: str) -> str:
    """An SVG as part of the page: its ink takes the colour of the text, in
    light and dark mode.
    """
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S).replace(
        INK, "var(--pst-color-text-base)"
    )
    # two figures of a page must not share names
    own = "f" + hashlib.sha256(svg.encode()).hexdigest()[:8]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", svg).replace(
        ">*{", ">.figure-svg *{"
    )
    svg = re.sub(
        r'(<svg\b[^>]*?) width="([\d.]+)pt" height="([\d.]+)pt"',
        r'\1 style="--natural: \2pt; width: \2pt; max-width: 100%; '
        r'height: auto"',
        svg,
        count=1,
    )
    return svg.replace(
        "<svg",
        '<svg class="figure-svg" role="img" '
        f'aria-label="{html.escape(alt, quote=True)}"',
        1,
    )


def verdicts_first(doctree) -> None:
    "The code of a check is behind the line that says what came out."
    from myst_nb.sphinx_ import HideCodeCellNode

    for node in list(doctree.findall(HideCodeCellNode)):
        if node["prompt_show"].startswith(f"{FOLD}check "):
            cell = node.parent
            cell.remove(node)
            cell.append(node)


SMALLEST = 120  # columns of text that a page holds in the smallest type


def columns_of(text: str) -> int:
    """How many columns, in tens, a printed table needs, whose lines must stay
    whole; 0 for text that can be wrapped.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    wide = max(map(len, lines), default=0)
    aligned = sum(bool(re.search(r"\S {2,}\S", line)) for line in lines)
    table = len(lines) > 2 and 2 * aligned >= len(lines)
    return -(-wide // 10) * 10 if table and wide <= SMALLEST else 0


def within(doctree, kind: str, node: type) -> list:
    "The nodes of a type in the containers of a class, such as cell_output."
    return [
        found
        for container in doctree.findall(nodes.container)
        if kind in container["classes"]
        for found in container.findall(node)
    ]


def size_tables(doctree) -> None:
    for block in within(doctree, "cell_output", nodes.literal_block):
        if wide := columns_of(block.astext()):
            block["classes"] += ["columns", f"columns-{wide}"]


HYPHEN = re.compile(r"(?<![\w.,:/–-])-(?=\.?\d)")
POWER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)e([+-])0*(\d*)(?![\w.])")
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def numbers(text: str) -> str:
    """As they are printed in books: a minus sign for a hyphen, and 2·10⁻⁵ for
    2e-05.
    """

    def power(match):
        value, sign, exponent = match.groups()
        raised = (sign.strip("+") + exponent).translate(RAISED)
        return f"{value}·10{raised}" if exponent else value

    return HYPHEN.sub("−", POWER.sub(power, text))


def printed_numbers(doctree) -> None:
    "The numbers in tables that cells make."
    for entry in within(doctree, "cell_output", nodes.entry):
        for text in list(entry.findall(nodes.Text)):
            if not isinstance(text.parent, (nodes.literal, nodes.math)):
                text.parent.replace(text, nodes.Text(numbers(text)))


def inline_figures(app, doctree, docname):
    if app.builder.format != "html":
        return
    keep_punctuation(doctree)
    verdicts_first(doctree)
    size_tables(doctree)
    printed_numbers(doctree)
    for image in list(doctree.findall(nodes.image)):
        path = Path(app.srcdir) / image["uri"]
        if path.suffix == ".svg" and path.exists():
            svg = inline_svg(
                path.read_text(encoding="utf-8"), image.get("alt", "")
            )
            image.replace_self(
                nodes.raw(
                    "", f'<div class="figure-box">{svg}</div>', format="html"
                )
            )


def colour_native(app, doctree):
    "Cells of C++ are coloured as such, not as the notebook's Python."
    for block in within(doctree, "tag_cpp", nodes.literal_block):
        block["language"] = "cpp"


def open_fold(self, node) -> None:
    "A folded cell: a disclosure of HTML, which needs no script and no mouse."
    words, kind = html.escape(node["prompt_show"]), "code"
    if node["prompt_show"].startswith(FOLD):
        kind, words = node["prompt_show"].removeprefix(FOLD).split(" ", 1)
    self.body.append(
        f'<details class="fold fold-{kind}"><summary>{words}</summary>\n'
    )


def close_fold(self, node) -> None:
    self.body.append("</details>\n")


OPENING, CLOSING = re.compile(r"[(\[“‘]+$"), re.compile(r"^[,.;:!?)\]”’%]+")


def keep_punctuation(doctree) -> None:
    """A browser may break a line between a formula and the comma behind it.

    So both go into a span that it does not break.
    """

    def taken(beside, pattern) -> list:
        "What a text beside a formula ends or begins with; it loses that."
        found = isinstance(beside, nodes.Text) and pattern.search(beside)
        if not found:
            return []
        beside.parent.replace(beside, nodes.Text(pattern.sub("", beside)))
        return [nodes.Text(found[0])]

    for math in list(doctree.findall(nodes.math)):
        parent, place = math.parent, math.parent.index(math)
        before, after = parent[:place][-1:], parent[place + 1 :][:1]
        opens = taken(*before, OPENING) if before else []
        closes = taken(*after, CLOSING) if after else []
        if opens or closes:
            kept = nodes.inline("", "", classes=["kept"])
            parent.replace(math, kept)
            kept += [*opens, math, *closes]


def finished(app, exception):
    """Tells tools/build.py that Sphinx came to its end, with warnings or
    without.
    """
    if exception is None:
        (Path(app.srcdir) / "_build" / "finished").write_text("")


def no_network(app, pagename, templatename, context, doctree):
    """sphinx-thebe writes the address of a network into every page, used or
    not; and twice, which is an error in the page.
    """
    if "script_files" in context:
        context["script_files"] = [
            f
            for f in context["script_files"]
            if "thebe"
            not in (str(f) + str(getattr(f, "attributes", ""))).lower()
        ]


def number_equations(app, pagename, templatename, context, doctree):
    """A docstring points to an equation by its label, `@eq-x`; on the page it
    is a link with the number.
    """
    body, math = context.get("body") or "", app.env.get_domain("math")

    def link(match):
        label = match["label"]
        where = math.equations.get(label, (None,))[0]
        number = (
            app.env.toc_fignumbers.get(where, {})
            .get("displaymath", {})
            .get(f"equation-{label}")
        )
        if not number:
            return match[0]
        uri = app.builder.get_relative_uri(pagename, where)
        return (
            f'<a class="reference internal" href="{uri}#equation-{label}'
            f'">({".".join(map(str, number))})</a>'
        )

    if "@eq-" in body:
        context["body"] = re.sub(
            r"(\()?@(?P<label>eq-[\w-]*\w)(?(1)\))", link, body
        )


def number_as_files() -> None:
    """A chapter's number is that of its file, on the page, in the side bar, in
    figures and equations; Sphinx would count the chapters, and pages that have
    no number.
    """
    from sphinx_external_toc.collectors import TocTreeCollectorWithStyles

    counted = TocTreeCollectorWithStyles.assign_section_numbers

    def assign(self, env):
        before = env.toc_secnumbers
        counted(self, env)
        for page, found in env.toc_secnumbers.items():
            file = re.match(r"\d+(?=_)", page.rsplit("/", 1)[-1])
            own = lambda number: (
                (file[0], *number[1:]) if file and number else None
            )
            env.toc_secnumbers[page] = {
                anchor: own(number) for anchor, number in found.items()
            }
            for node in (
                env.titles[page],
                *env.tocs[page].findall(nodes.reference),
            ):
                if node.get("secnumber"):
                    node["secnumber"] = own(node["secnumber"])
        return [
            page
            for page, found in env.toc_secnumbers.items()
            if found != before.get(page)
        ]

    TocTreeCollectorWithStyles.assign_section_numbers = assign


def one_tree_for_many_references() -> None:
    """For each reference to a figure or a section Sphinx loads the whole page
    that it leads to; the last ones are kept.
    """
    from sphinx.domains.std import StandardDomain

    resolve = StandardDomain._resolve_numref_xref

    @lru_cache(1)
    def kept(env):
        "An environment whose pages are looked at, not changed."
        looks = copy.copy(env)
        looks.get_doctree = lru_cache(maxsize=8)(env.get_doctree)
        return looks

    StandardDomain._resolve_numref_xref = lambda self, env, *given: resolve(
        self, kept(env), *given
    )


def write_in_parallel(app, env):
    """One process reads, since what sphinx-proof collects cannot be merged; as
    many as there are cores write.
    """
    app.parallel = os.cpu_count() or 1


def on_all_pages(root: Path) -> int:
    """A hash of what every page shows of others: the styles, and in the side
    bar the table of contents and the titles. Sphinx notices no change in them.
    """
    files = [root / "_toc.yml", *sorted((root / "_static").glob("*.*"))]
    titles = map(title_of, sorted((root / "nbs").glob("*.ipynb")))
    return zlib.crc32(
        b"".join(path.read_bytes() for path in files)
        + "\n".join(titles).encode()
    )


def setup(app):
    from tools import names, plain, ranking, sidebar

    # all pages are written again when this changes
    app.add_config_value("on_all_pages", on_all_pages(Path(app.srcdir)), "html")
    app.connect("source-read", source_read)
    app.connect("env-check-consistency", write_in_parallel)
    app.connect("doctree-read", colour_native)
    app.connect("doctree-resolved", inline_figures)
    # after the extensions that add scripts
    app.connect("html-page-context", no_network, priority=900)
    app.connect("html-page-context", number_equations)
    app.connect("html-collect-pages", ranking.write)
    app.connect("html-page-context", ranking.on_the_search_page)
    app.connect("build-finished", finished)
    app.setup_extension("myst_nb")
    from myst_nb.sphinx_ import HideCodeCellNode

    app.add_node(HideCodeCellNode, override=True, html=(open_fold, close_fold))
    app.connect("source-read", names.source_read)
    # after the theme has put its side bar and its buttons there
    app.connect("html-page-context", sidebar.one_half, priority=900)
    app.connect("html-page-context", plain.say_what_it_is, priority=950)
    app.connect("build-finished", plain.write_downloads)
    number_as_files()
    one_tree_for_many_references()
    own = b"".join(
        Path(__file__).with_name(f"{name}.py").read_bytes()
        for name in "dialect api folding markup plain ranking typeset".split()
    )
    # all pages are read again when this changes
    return {
        "version": "1",
        "env_version": zlib.crc32(own),
        "parallel_read_safe": True,
        "parallel_write_safe": True,
    }
