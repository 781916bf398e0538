"The tools of the book, each with an example that is right and one that is broken."
import json
import re
import shutil

import pytest

pytestmark = pytest.mark.book
dialect = pytest.importorskip("tools.dialect", reason="the book's tools are not installed")
export = pytest.importorskip("tools.export", reason="the book's tools are not installed")
from tools import order, run  # noqa: E402
from tools.chapters import ROOT, chapter, chapters  # noqa: E402

# ---- a small checkout -----------------------------------------------------------------------------------------

def notebook(*cells):
    made = [{"cell_type": kind, "id": f"c{i}", "metadata": {}, "source": source, **({"outputs": [], "execution_count": None} if kind == "code" else {})}
            for i, (kind, source) in enumerate(cells)]
    return {"cells": made, "metadata": {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture
def checkout(tmp_path):
    "Three chapters: a landing page, a module, a chapter that uses it and has a check."
    (tmp_path / "nbs").mkdir()
    (tmp_path / "normalnorm").mkdir()
    for name in ("settings.ini", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: nbs/index\nparts:\n  - caption: One\n    chapters:\n      - file: nbs/010_first\n      - file: nbs/020_theory.second\n")
    books = {
        "index": notebook(("markdown", "# Title\n\n> Lead."), ("code", "#| default_exp __init__"), ("code", "#| hide\n#| export\nx = 1"), ("code", "2 + 2")),
        "010_first": notebook(("markdown", "# First\n\n> Lead."), ("code", "#| default_exp first"), ("code", "#| export\ndef f():\n    'One.'\n    return 1")),
        "020_theory.second": notebook(("markdown", "# Second\n\n> Lead."), ("code", "#| default_exp theory.second"),
                                      ("code", "#| export\nfrom normalnorm.first import f\n\ndef g():\n    'Two.'\n    return f() + 1"),
                                      ("code", "#| check\nassert 1 + 1 == 2")),
    }
    for name, book in books.items():
        (tmp_path / "nbs" / f"{name}.ipynb").write_text(json.dumps(book, indent=1))
    export.export(tmp_path)
    return tmp_path


def edit(root, name, old, new):
    path = root / "nbs" / f"{name}.ipynb"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_export_is_idempotent_and_complete(checkout):
    assert export.differences(checkout) == [] and export.noise(checkout) == []
    before = export.tree(checkout)
    export.export(checkout)
    assert export.tree(checkout) == before
    checks = (checkout / "normalnorm/checks/theory/second.py").read_text()
    assert '__chapter__ = "020_theory.second"' in checks and "#|" not in checks and "assert 1 + 1 == 2" in checks
    assert not (checkout / "normalnorm/checks/first.py").exists()
    assert (checkout / "README.md").read_text().count("2 + 2") == 1 and "x = 1" not in (checkout / "README.md").read_text()


@pytest.mark.parametrize("spoil, words", [
    (lambda root: (root / "normalnorm/first.py").write_text("edited"), "differs"),
    (lambda root: (root / "normalnorm/first.py").unlink(), "missing"),
    (lambda root: (root / "normalnorm/stray.py").write_text("x = 1"), "not generated"),
    (lambda root: (root / "normalnorm/checks/theory/second.py").write_text(""), "differs"),
    (lambda root: (root / "README.md").write_text("old"), "README.md"),
    (lambda root: (root / "_quarto.yml").write_text("old"), "_quarto.yml"),
    (lambda root: edit(root, "010_first", "return 1", "return 3"), "differs"),
])
def test_differences_are_found_and_healed(checkout, spoil, words):
    spoil(checkout)
    assert any(words in line for line in export.differences(checkout))
    export.export(checkout)
    assert export.differences(checkout) == []


def test_noise_is_found(checkout):
    edit(checkout, "010_first", '"execution_count": null', '"execution_count": 7')
    edit(checkout, "010_first", '"metadata": {}', '"metadata": {"collapsed": true}')
    assert len(export.noise(checkout)) == 3


def test_a_chapter_that_does_not_exist_is_named(checkout):
    (checkout / "nbs/010_first.ipynb").unlink()
    with pytest.raises(FileNotFoundError, match="010_first"):
        chapters(checkout)
    with pytest.raises(KeyError, match="no chapter is called 'nine'"):
        chapter("nine")


def test_order(checkout):
    assert order.violations(checkout) == []
    edit(checkout, "010_first", "def f():", "from normalnorm.theory.second import g\\ndef f():")
    assert order.violations(checkout) == ["010_first imports normalnorm.theory.second of a later chapter"]
    edit(checkout, "020_theory.second", "from normalnorm.first import f", "from normalnorm.layers.x import f")
    assert any("theory may import nothing" in v for v in order.violations(checkout))


def test_relative_imports_are_resolved():
    assert "normalnorm.theory.newton" in order.imported_modules("from ..theory.newton import f", "normalnorm.layers")
    assert order.imported_modules("import numpy, os.path") == set()


# ---- the runner -----------------------------------------------------------------------------------------------

def test_run_again_only_when_something_changed(checkout):
    second = chapter("020_theory.second", checkout)
    edit(checkout, "020_theory.second", "return f() + 1", "return open('../data.txt').read()")
    edit(checkout, "020_theory.second", "assert 1 + 1 == 2", "assert g()")
    (checkout / "data.txt").write_text("five")
    assert run.Run(second).stale() == "never run"
    run.execute(second)
    record = run.Run(second).record()
    assert run.Run(second).stale() == "" and "data.txt" in record["dependencies"]
    edit(checkout, "020_theory.second", "# Second", "# Another title")
    assert run.Run(second).stale() == ""                                     # prose
    (checkout / "data.txt").write_text("six")
    assert run.Run(second).stale() == "data.txt changed"
    (checkout / "data.txt").write_text("five")
    edit(checkout, "020_theory.second", "assert g()", "assert g() == 'five'")
    assert run.Run(second).stale() == "code or environment changed"


def test_a_failing_cell_is_named(checkout):
    edit(checkout, "020_theory.second", "assert 1 + 1 == 2", "assert 1 + 1 == 3, 'not three'")
    with pytest.raises(run.ChapterFailed, match=r"(?s)020_theory.second, cell 4 of 4 failed.*not three"):
        run.execute(chapter("020_theory.second", checkout))


# ---- the dialect ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("quarto, myst", [
    ("a\n$$ x = 1. $$ {#eq-x}\nb", "a\n\n$$\nx = 1.\n$$ (eq-x)\n\nb"),
    ("$$ x $$", "$$\nx\n$$"),
    ("see @eq-x and @fig-y-z.", "see {eq}`eq-x` and {numref}`fig-y-z`."),
    ("by @thm-a, @lem-b, @exr-c, @sec-d", "by {prf:ref}`thm-a`, {prf:ref}`lem-b`, {ref}`exr-c`, {numref}`sec-d`"),
    ("[@yeo2000] and [@yeo2000; @boxcox1964]", "{cite:p}`yeo2000` and {cite:p}`yeo2000,boxcox1964`"),
    ("@yeo2000 say", "{cite:t}`yeo2000` say"),
    ("`@eq-x` $a@b$ me@yeo2000.org", "`@eq-x` $a@b$ me@yeo2000.org"),
    ("```\n$$ x $$ {#eq-x}\n@eq-x\n```", "```\n$$ x $$ {#eq-x}\n@eq-x\n```"),
    ("## Title {#sec-t}", "(sec-t)=\n## Title"),
    ("::: {.callout-note}\nText.\n:::", ":::{note}\n\nText.\n:::"),
    ("::: {.callout-tip}\n## Why\nText.\n:::", ":::{admonition} Why\n:class: tip\n\nText.\n:::"),
    ("::: {#thm-a}\n## Name\nText.\n:::", ":::{prf:theorem} Name\n:label: thm-a\n\nText.\n:::"),
    ("::: {.proof}\nText.\n:::", ":::{prf:proof}\n\nText.\n:::"),
    ("::: {#exr-a}\nDo.\n:::", ":::{exercise}\n:label: exr-a\n\nDo.\n:::"),
    ("::: {.solution}\nDone.\n:::", ":::{admonition} Solution\n:class: dropdown\n\nDone.\n:::"),
    ("::: {#thm-a}\nText.\n::: {.callout-note}\nInner.\n:::\n:::",
     "::::{prf:theorem}\n:label: thm-a\n\nText.\n\n:::{note}\n\nInner.\n:::\n\n::::"),
])
def test_markdown(quarto, myst):
    assert dialect.markdown(quarto).strip() == myst


def test_a_citation_keeps_its_remark():
    assert dialect.markdown("[@yeo2000, section 4.1]") == "{cite:p}`yeo2000{section 4.1}`"


def test_a_div_across_cells_is_fenced_in_each():
    cells = [{"cell_type": "markdown", "source": "::: {.solution}\nFirst."}, {"cell_type": "code", "source": "1"},
             {"cell_type": "markdown", "source": "Last.\n:::"}]
    first, _, last = dialect.join_divs(cells)
    for cell in (first, last):
        assert dialect.markdown(cell["source"]).count(":class: dropdown") == 1


@pytest.mark.parametrize("source, tags", [
    ("#| hide\nx", ["remove-cell"]), ("#| default_exp a.b", ["remove-cell"]), ("#| include: false\nx", ["remove-cell"]),
    ("#| echo: false\nx", ["remove-input"]), ("#| output: false\nx", ["remove-output"]), ("#| code-fold: true\nx", ["hide-input"]),
    ("#| export\nx", []), ("#| check\nx", []), ("x = '''\n#| hide\n'''", []), ("x", []),
])
def test_cell_tags(source, tags):
    cell = {"source": source, "metadata": {}}
    dialect.code_cell(cell)
    assert cell["metadata"]["tags"] == tags and not cell["source"].startswith("#|")


def test_figures_get_number_caption_and_alternative_text():
    cell = {"source": '#| label: fig-a\n#| fig-cap: "The curve of $x$, see @eq-b."\nplot()', "metadata": {}}
    dialect.code_cell(cell)
    made = cell["metadata"]["mystnb"]
    assert made["figure"] == {"caption": "The curve of $x$, see {eq}`eq-b`.", "name": "fig-a"} and "curve" in made["image"]["alt"]
    assert cell["source"] == "plot()"


def test_a_long_caption_goes_on_in_indented_lines():
    cell = {"source": '#| label: fig-a\n#| fig-cap: "The curve of $x$,\n'
            '#|   see @eq-b."\n#| code-fold: true\nplot()', "metadata": {}}
    found = dialect.directives(cell["source"])
    assert found == {"label": "fig-a", "code-fold": "true",
                     "fig-cap": "The curve of $x$, see @eq-b."}
    dialect.code_cell(cell)
    caption = cell["metadata"]["mystnb"]["figure"]["caption"]
    assert caption == "The curve of $x$, see {eq}`eq-b`."
    assert cell["source"] == "plot()"


def test_outputs_come_from_the_executed_copy():
    source = notebook(("markdown", "# T\n\n> Lead."), ("code", "1"), ("code", "2"))
    executed = notebook(("code", "1"), ("code", "2"))
    for cell, text in zip(executed["cells"], "ab"):
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": text}]
    made = dialect.translate_notebook(source, executed)
    assert [c["outputs"][0]["text"] for c in made["cells"][1:]] == ["a", "b"]
    assert ":::{div} lead\nLead." in made["cells"][0]["source"]
    assert all(c["outputs"] == [] for c in dialect.translate_notebook(notebook(("code", "1")), None)["cells"])


def test_svg_takes_the_colour_of_the_text():
    svg = '<?xml version="1.0"?>\n<svg width="100pt" height="50pt"><metadata>who</metadata><path style="stroke: #101010"/></svg>'
    made = dialect.inline_svg(svg, 'a "curve"')
    assert "#101010" not in made and "var(--pst-color-text-base)" in made and "metadata" not in made
    assert 'aria-label="a &quot;curve&quot;"' in made and "--natural: 100pt" in made and "max-width: 100%" in made and made.startswith("<svg")


def test_svgs_of_one_page_do_not_share_names_or_styles():
    svg = '<svg width="1pt" height="1pt"><style>*{stroke-linecap: butt}</style><path id="p1" d="%s"/><use xlink:href="#p1" clip-path="url(#p1)"/></svg>'
    one, two = (dialect.inline_svg(svg % d, "") for d in "ab")
    names = [re.findall(r'(?:id="|href="#|url\(#)([\w-]+)', s) for s in (one, two)]
    assert all(len(set(n)) == 1 and len(n) == 3 for n in names) and names[0] != names[1]
    assert "<style>.figure-svg *{" in one


def test_a_formula_keeps_its_punctuation():
    nodes = pytest.importorskip("docutils.nodes")
    text, math = nodes.Text, lambda x: nodes.math("", x)
    page = nodes.paragraph("", "", text("see ("), math("a"), text("), then "), math("b"), text(", "), math("c"), text(" and "), math("d"), text("."))
    for _ in range(2):
        dialect.keep_punctuation(page)
        assert page.astext() == "see (a), then b, c and d."
        assert [n.astext() for n in page.findall(nodes.inline)] == ["(a),", "b,", "d."]


def test_show_doc_output_loses_its_rule():
    output = {"data": {"text/markdown": "---\n\n### f"}}
    dialect.show_doc(output)
    assert output["data"]["text/markdown"] == "### f"


def test_a_chapter_over_its_budget_is_named(monkeypatch):
    seconds = {c.name: 1.0 for c in chapters()} | {"010_claims": run.BUDGET + 1}
    monkeypatch.setattr(run.Run, "record", lambda self: {"seconds": seconds[self.chapter.name]})
    assert run.timetable().splitlines()[-1] == f"over the budget of {run.BUDGET:.0f} s a chapter: 010_claims ({run.BUDGET + 1:.0f} s)"
    monkeypatch.setitem(seconds, "010_claims", 1.0)
    assert "budget" not in run.timetable()


def test_the_newest_versions_are_without_pins():
    from tools import bounds
    loose = bounds.without_pins((ROOT / "constraints.txt").read_text())
    assert not re.search(r"^(torch|torchvision|numpy|scipy|matplotlib)\b", loose, re.M) and re.search(r"^nbdev==", loose, re.M)
    assert bounds.lower_bounds(["torch>=2.4", "scipy>=1.11.1"]) == ["torch==2.4.0", "scipy==1.11.1"]
