"""The tools of the book, each with an example that is right and one that is
broken.
"""

import json
import re
import shutil

import pytest

pytestmark = pytest.mark.book
dialect = pytest.importorskip(
    "tools.dialect", reason="the book's tools are not installed"
)
export = pytest.importorskip(
    "tools.export", reason="the book's tools are not installed"
)
from tools import api, markup, order, run  # noqa: E402
from tools.chapters import ROOT, build_order, chapter, chapters  # noqa: E402

# ---- a small checkout -------------------------------------------------------


def notebook(*cells):
    made = [
        {
            "cell_type": kind,
            "id": f"c{i}",
            "metadata": {},
            "source": source,
            **(
                {"outputs": [], "execution_count": None}
                if kind == "code"
                else {}
            ),
        }
        for i, (kind, source) in enumerate(cells)
    ]
    return {
        "cells": made,
        "metadata": {
            "kernelspec": {
                "display_name": "python3",
                "language": "python",
                "name": "python3",
            }
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


@pytest.fixture
def checkout(tmp_path):
    """Three chapters: a landing page, a module, a chapter that uses it and has
    a check.
    """
    (tmp_path / "nbs").mkdir()
    (tmp_path / "normalnorm").mkdir()
    for name in ("settings.ini", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: nbs/index\nparts:\n  - caption: One\n"
        "    chapters:\n      - file: nbs/010_first\n"
        "      - file: nbs/020_theory.second\n"
    )
    books = {
        "index": notebook(
            ("markdown", "# Title\n\n> Lead."),
            ("code", "#| default_exp __init__"),
            ("code", "#| hide\n#| export\nx = 1"),
            ("code", "2 + 2"),
        ),
        "010_first": notebook(
            ("markdown", "# First\n\n> Lead."),
            ("code", "#| default_exp first"),
            ("code", "#| export\ndef f():\n    'One.'\n    return 1"),
        ),
        "020_theory.second": notebook(
            ("markdown", "# Second\n\n> Lead."),
            ("code", "#| default_exp theory.second"),
            (
                "code",
                "#| export\nfrom normalnorm.first import f\n\ndef g():\n"
                "    'Two.'\n    return f() + 1",
            ),
            ("code", "#| check\nassert 1 + 1 == 2"),
        ),
    }
    for name, book in books.items():
        (tmp_path / "nbs" / f"{name}.ipynb").write_text(
            json.dumps(book, indent=1)
        )
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
    assert (
        '__chapter__ = "020_theory.second"' in checks
        and "#|" not in checks
        and "assert 1 + 1 == 2" in checks
    )
    assert not (checkout / "normalnorm/checks/first.py").exists()
    assert (checkout / "README.md").read_text().count(
        "2 + 2"
    ) == 1 and "x = 1" not in (checkout / "README.md").read_text()


def test_checks_are_what_the_chapters_say(checkout):
    checks = checkout / "normalnorm/checks"
    before = {p: p.read_text() for p in checks.rglob("*.py")}
    (checks / "theory/second.py").write_text("")
    (checks / "stray.py").write_text("x = 1")
    (checks / "theory/__init__.py").unlink()
    export.write_checks(checkout)
    assert {p: p.read_text() for p in checks.rglob("*.py")} == before
    edit(checkout, "020_theory.second", "assert 1 + 1 == 2", "assert 3 > 2")
    export.write_checks(checkout)
    assert "assert 3 > 2" in (checks / "theory/second.py").read_text()


def test_an_edited_module_goes_back_into_its_cell(checkout):
    module = checkout / "normalnorm/theory/second.py"
    text = module.read_text()
    assert text.count("return f() + 1") == 1
    module.write_text(text.replace("return f() + 1", "return f() + 2"))
    assert export.update(checkout) == []
    chapter = (checkout / "nbs/020_theory.second.ipynb").read_text()
    assert "return f() + 2" in chapter and "return f() + 1" not in chapter
    assert "#| export" in chapter
    assert export.differences(checkout) == []


@pytest.mark.parametrize(
    "spoil, words",
    [
        (
            lambda root: (root / "normalnorm/first.py").write_text("edited"),
            "differs",
        ),
        (lambda root: (root / "normalnorm/first.py").unlink(), "missing"),
        (
            lambda root: (root / "normalnorm/stray.py").write_text("x = 1"),
            "not generated",
        ),
        (lambda root: (root / "README.md").write_text("old"), "README.md"),
        (lambda root: (root / "_quarto.yml").write_text("old"), "_quarto.yml"),
        (
            lambda root: edit(root, "010_first", "return 1", "return 3"),
            "differs",
        ),
    ],
)
def test_differences_are_found_and_healed(checkout, spoil, words):
    spoil(checkout)
    assert any(words in line for line in export.differences(checkout))
    export.export(checkout)
    assert export.differences(checkout) == []


def test_what_nbdev_writes_is_brought_to_80_columns():
    long = (
        "A module that says in one sentence of more than eighty columns "
        "what it is for, and no more than that."
    )
    place = "../../nbs/270_layers.a_chapter_with_a_long_name.ipynb."
    said = f"# AUTOGENERATED! DO NOT EDIT! File to edit: {place}"
    made = export.narrow(f'"""{long}"""\n\n{said}\n\nx = 1\n')
    assert max(map(len, made.split("\n"))) <= 80
    found: dict = {}
    exec(made, found)
    assert " ".join(found["__doc__"].split()) == long
    assert found["x"] == 1
    assert (
        api.chapter_of(made)
        == api.chapter_of(said)
        == ("270_layers.a_chapter_with_a_long_name")
    )
    assert export.narrow(made) == made
    after = export.narrow(f'__version__ = "1"\n"""{long}"""\n')
    assert max(map(len, after.split("\n"))) <= 80
    short = '"""A module."""\n\n__all__ = []\nx = "' + "y" * 90 + '"\n'
    assert export.narrow(short) == short
    assert (
        export.narrow(
            "# %% ../nbs/a.ipynb #1\n#| output: false\n#| x: y\nf()\n#| z: 1\n"
        )
        == "# %% ../nbs/a.ipynb #1\nf()\n#| z: 1\n"
    )


def test_noise_is_found(checkout):
    edit(
        checkout, "010_first", '"execution_count": null', '"execution_count": 7'
    )
    edit(
        checkout,
        "010_first",
        '"metadata": {}',
        '"metadata": {"collapsed": true}',
    )
    assert len(export.noise(checkout)) == 3


# ---- C++ --------------------------------------------------------------------

NATIVE = "normalnorm/layers/engines/native.cpp"
PIECES = {
    "010_first": [
        "#| export-cpp\nint one() { return 1; }",
        "#| export-cpp: last\n// the last\nint four();",
        "#| export-cpp\n#| code-fold: true\n\nint two();\n",
    ],
    "020_theory.second": ["#| export-cpp\n#if 1\nint three();\n\n#endif"],
}


@pytest.fixture
def native(checkout):
    "The small checkout with C++ in two chapters, and what stands in its file."
    for name, parts in PIECES.items():
        path = checkout / "nbs" / f"{name}.ipynb"
        book = json.loads(path.read_text())
        book["cells"] += [
            {"cell_type": "raw", "id": f"r{i}", "metadata": {}, "source": part}
            for i, part in enumerate(parts)
        ]
        path.write_text(json.dumps(book, indent=1))
    assert any(
        f"{NATIVE}: is missing" in line for line in export.differences(checkout)
    )
    export.export(checkout)
    return checkout


def test_the_kernel_is_its_cells(native):
    """As they stand there, in the order of chapters and cells, an empty line
    between; what nbdev exports and what is run is not touched.
    """
    assert (native / NATIVE).read_text() == (
        "int one() { return 1; }\n\n\nint two();\n\n\n#if 1\nint three();\n\n"
        "#endif\n\n// the last\nint four();\n"
    )
    assert export.differences(native) == [] and export.noise(native) == []
    assert "int" not in (native / "normalnorm/first.py").read_text()
    assert not any(
        "int one" in code for code in chapter("010_first", native).code_cells()
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda root: (root / NATIVE).open("a").write("int five();\n"),
        lambda root: (root / NATIVE).write_text(
            (root / NATIVE).read_text().replace("return 1", "return 2")
        ),
        lambda root: edit(root, "010_first", "return 1; }", "return 3; }"),
        lambda root: edit(root, "020_theory.second", "#| export-cpp", "#| cpp"),
    ],
)
def test_a_kernel_that_is_not_its_cells_is_noticed(native, spoil):
    spoil(native)
    assert export.differences(native) == [f"{NATIVE}: differs from its chapter"]
    export.export(native)
    assert export.differences(native) == []


def test_a_source_that_no_cell_has_is_noticed(native):
    (native / "normalnorm/layers/other.cpp").write_text("int five();")
    assert export.differences(native) == [
        "normalnorm/layers/other.cpp: is not generated by any chapter"
    ]


def test_cells_of_another_type_are_noticed(native):
    "Python would run them, or nobody would export them."
    edit(native, "020_theory.second", "#| export-cpp", "#| cpp")
    edit(native, "010_first", '"cell_type": "raw"', '"cell_type": "code"')
    found = export.noise(native)
    assert len(found) == 4 and "020_theory.second" in found[-1]
    assert "raw text that is not exported" in found[-1]
    assert all("in a cell that is not raw" in line for line in found[:3])


def test_changes_of_the_file_go_into_the_cells(native):
    path = native / NATIVE
    before = path.read_text()
    assert export.kernel_to_cells(native) == []
    changed = (
        before.replace("return 1", "return 11")
        .replace("int three();", "int three();\nint more();")
        .replace("// the last\n", "")
        + "int five();\n"
    )
    path.write_text(changed)
    assert export.kernel_to_cells(native) == [
        "010_first, cell 4",
        "020_theory.second, cell 5",
        "010_first, cell 5",
    ]
    assert export.differences(native) == [] and path.read_text() == changed
    assert "#| code-fold: true" in (native / "nbs/010_first.ipynb").read_text()
    # two cells that grow together, another file: nobody knows what is meant
    for wrong in (
        changed.replace("#endif\n\nint four", "#endif\nint four"),
        "int something();\n\nint else_();\n",
    ):
        assert wrong != changed
        path.write_text(wrong)
        with pytest.raises(ValueError, match="in the chapters"):
            export.kernel_to_cells(native)


def test_the_page_shows_a_piece_as_a_cell_of_cpp(native):
    from docutils import nodes
    from docutils.utils import new_document

    read = json.loads((native / "nbs/010_first.ipynb").read_text())
    name, short, *_, long = dialect.translate_notebook(read, None)["cells"][-6:]
    assert NATIVE in name["source"] and "module-label" in name["source"]
    assert short["cell_type"] == long["cell_type"] == "code"
    assert short["source"] == "int one() { return 1; }"
    assert short["metadata"] == {"tags": ["cpp"]}
    assert long["metadata"]["tags"] == ["cpp", "hide-input"]
    assert long["metadata"]["mystnb"]["code_prompt_show"].startswith(
        "fold:cpp "
    )
    page, blocks = new_document("page"), {}
    for kind, cell in (("cpp", "cell tag_cpp"), ("python", "cell")):
        blocks[kind] = nodes.literal_block("x", "x", language="python")
        page += nodes.container(
            "", nodes.container("", blocks[kind]), classes=cell.split()
        )
    dialect.colour_native(None, page)
    assert {kind: block["language"] for kind, block in blocks.items()} == {
        "cpp": "cpp",
        "python": "python",
    }


def test_a_plain_notebook_has_a_piece_as_text(native):
    plain = pytest.importorskip("tools.plain")
    cells = plain.notebook(chapter("010_first", native))["cells"]
    short, _, long = cells[-3:]
    assert {c["cell_type"] for c in cells[-3:]} == {"markdown"}
    assert short["source"] == "```cpp\nint one() { return 1; }\n```"
    assert long["source"].startswith("<details>\n<summary>")
    assert "```cpp\nint two();\n```" in long["source"]


# ---- names and order --------------------------------------------------------


def test_a_chapter_that_does_not_exist_is_named(checkout):
    (checkout / "nbs/010_first.ipynb").unlink()
    with pytest.raises(FileNotFoundError, match="010_first"):
        chapters(checkout)
    with pytest.raises(KeyError, match="no chapter is called 'nine'"):
        chapter("nine")


def test_order(checkout):
    assert order.violations(checkout) == []
    edit(
        checkout,
        "010_first",
        "def f():",
        "from normalnorm.theory.second import g\\ndef f():",
    )
    assert order.violations(checkout) == [
        "010_first imports normalnorm.theory.second of a later chapter"
    ]
    edit(
        checkout,
        "020_theory.second",
        "from normalnorm.first import f",
        "from normalnorm.layers.x import f",
    )
    assert any(
        "theory may import nothing" in v for v in order.violations(checkout)
    )
    edit(
        checkout,
        "020_theory.second",
        "from normalnorm.layers.x import f",
        "from normalnorm.claims import f",
    )
    assert (
        "theory.second imports normalnorm.claims: theory may import "
        "nothing of the package"
    ) in order.violations(checkout)


@pytest.fixture
def workshop(checkout):
    "The same with two chapters of the workshop behind them, and an appendix."
    with (checkout / "_toc.yml").open("a") as toc:
        toc.write(
            "  - caption: Part 7\n    chapters:\n"
            "      - file: nbs/710_bench\n      - file: nbs/720_vice\n"
            "  - caption: Appendices\n    chapters:\n"
            "      - file: nbs/905_end\n"
        )
    for name, module in (
        ("710_bench", "bench"),
        ("720_vice", "vice"),
        ("905_end", "end"),
    ):
        (checkout / "nbs" / f"{name}.ipynb").write_text(
            json.dumps(
                notebook(
                    ("markdown", "# Title\n\n> Lead."),
                    ("code", f"#| default_exp {module}"),
                    ("code", "#| export\nfound = 1"),
                ),
                indent=1,
            )
        )
    return checkout


def test_the_workshop_is_built_first_and_read_late(workshop):
    assert [c.name for c in chapters(workshop)] == [
        "index",
        "010_first",
        "020_theory.second",
        "710_bench",
        "720_vice",
        "905_end",
    ]
    assert [c.name for c in build_order(workshop)] == [
        "index",
        "710_bench",
        "720_vice",
        "010_first",
        "020_theory.second",
        "905_end",
    ]
    assert [c.part for c in chapters(workshop)] == [None, 0, 0, 7, 7, 9]


@pytest.mark.parametrize(
    "importer, module, wrong",
    [
        # what the order allows: the workshop everywhere, and what came before
        ("010_first", "vice", ""),
        ("020_theory.second", "bench", ""),
        ("905_end", "vice", ""),
        ("905_end", "first", ""),
        ("720_vice", "bench", ""),
        # and what it refuses
        ("010_first", "theory.second", "a later chapter"),
        ("020_theory.second", "end", "a later chapter"),
        ("710_bench", "first", "a chapter that is not of the workshop"),
        ("720_vice", "theory.second", "a chapter that is not of the workshop"),
        ("710_bench", "end", "a chapter that is not of the workshop"),
        ("710_bench", "vice", "a later chapter"),
    ],
)
def test_who_imports_whom(workshop, importer, module, wrong):
    """As the text says it and, apart from that, as the run recorded it: a
    chapter imports from earlier chapters or from the workshop, the workshop
    only from itself.
    """
    record = workshop / "_build" / "executed" / f"{importer}.json"
    record.parent.mkdir(parents=True)
    file = f"normalnorm/{module.replace('.', '/')}.py"
    record.write_text(json.dumps({"dependencies": {file: "0"}}))
    assert order.violations(workshop) == []
    loaded = order.recorded_violations(workshop)
    record.unlink()
    edit(
        workshop,
        importer,
        "#| export\\n",
        f"#| export\\nimport normalnorm.{module}\\n",
    )
    imported = order.violations(workshop)
    assert order.recorded_violations(workshop) == []
    if not wrong:
        assert loaded == imported == []
        return
    assert loaded == [f"{importer} loaded normalnorm.{module} of {wrong}"]
    assert imported == [f"{importer} imports normalnorm.{module} of {wrong}"]


def test_relative_imports_are_resolved():
    assert "normalnorm.theory.newton" in order.imported_modules(
        "from ..theory.newton import f", "normalnorm.layers"
    )
    assert order.imported_modules("import numpy, os.path") == set()


# ---- the runner -------------------------------------------------------------


READS = "open(normalnorm.first.__file__).read()"
COMPILED = (
    "exec(compile('def h(x): return x + 1', normalnorm.first.__file__, 'exec'))"
    "\\ntorch.compile(h, backend='eager')(torch.ones(2))"
)
STALE = "Run(Chapter('020_theory.second', Path.cwd().parent)).stale()"


@pytest.mark.parametrize(
    "shows, docstring",
    [
        ("g()  # doctest: +ELLIPSIS, '__doc__'", ""),
        ("from experiments.results import source_hash\\nsource_hash()", ""),
        (f"import normalnorm, torch\\n{COMPILED}", ""),
        (
            f"import sys\\nsys.path.append('{ROOT}')\\n"
            "from pathlib import Path\\nfrom tools.chapters import Chapter\\n"
            f"from tools.run import Run\\n{STALE}",
            "",
        ),
        ("import inspect\\ninspect.getsource(f)", "changed"),
        ("f.__doc__", "changed"),
        (
            f"import normalnorm\\ndef source_hash(): return {READS}\\n"
            "source_hash()",
            "changed",
        ),
    ],
    ids=[
        *("calls", "hashes", "compiles", "asks", "shows", "shows-docstring"),
        "shows by a function of its own",
    ],
)
def test_a_docstring_makes_only_stale_what_shows_it(checkout, shows, docstring):
    second = chapter("020_theory.second", checkout)
    edit(checkout, "020_theory.second", "assert 1 + 1 == 2", shows)
    (checkout / "nbs/experiments").mkdir()
    (checkout / "nbs/experiments/results.py").write_text(
        "import normalnorm.first\n\n\ndef source_hash():\n"
        f"    return hash({READS})\n"
    )
    module = checkout / "normalnorm/first.py"
    text = module.read_text()
    run.execute(second)
    if STALE in shows:  # reads files once there is a record
        run.execute(second)
    for old, new, reason in (
        ("One.", "One!", docstring),
        ("return 1", "return  1  # one", docstring),
        ("return 1", "return 2", "changed"),
    ):
        assert text.count(old) == 1
        module.write_text(text.replace(old, new))
        found = run.Run(second).stale()
        assert found == reason or (reason and found.endswith(reason)), new


def test_another_chapters_prose_makes_nothing_stale(checkout):
    second = chapter("020_theory.second", checkout)
    edit(
        checkout,
        "020_theory.second",
        "assert 1 + 1 == 2",
        "open('../nbs/010_first.ipynb').read()",
    )
    run.execute(second)
    for old, new, reason in (
        ("> Lead.", "> Another lead.", ""),
        ("# First", "# Title", "nbs/010_first.ipynb changed"),
        ("return 1", "return 2", "nbs/010_first.ipynb changed"),
    ):
        path = checkout / "nbs/010_first.ipynb"
        text = path.read_text()
        edit(checkout, "010_first", old, new)
        assert run.Run(second).stale() == reason
        path.write_text(text)


def test_run_again_only_when_something_changed(checkout):
    second = chapter("020_theory.second", checkout)
    edit(
        checkout,
        "020_theory.second",
        "return f() + 1",
        "return open('../data.txt').read()",
    )
    edit(checkout, "020_theory.second", "assert 1 + 1 == 2", "assert g()")
    (checkout / "data.txt").write_text("five")
    assert run.Run(second).stale() == "never run"
    run.execute(second)
    record = run.Run(second).record()
    assert (
        run.Run(second).stale() == "" and "data.txt" in record["dependencies"]
    )
    edit(checkout, "020_theory.second", "# Second", "# Another title")
    assert run.Run(second).stale() == ""  # prose
    (checkout / "data.txt").write_text("six")
    assert run.Run(second).stale() == "data.txt changed"
    (checkout / "data.txt").write_text("five")
    edit(checkout, "020_theory.second", "assert g()", "assert g() == 'five'")
    assert run.Run(second).stale() == "code or environment changed"


def test_a_failing_cell_is_named(checkout):
    edit(
        checkout,
        "020_theory.second",
        "assert 1 + 1 == 2",
        "assert 1 + 1 == 3, 'not three'",
    )
    with pytest.raises(
        run.ChapterFailed,
        match=r"(?s)020_theory.second, cell 4 of 4 failed.*not "
        r"three",
    ):
        run.execute(chapter("020_theory.second", checkout))


# ---- the dialect ------------------------------------------------------------


@pytest.mark.parametrize(
    "quarto, myst",
    [
        ("a\n$$ x = 1. $$ {#eq-x}\nb", "a\n\n$$\nx = 1.\n$$ (eq-x)\n\nb"),
        ("$$ x $$", "$$\nx\n$$"),
        ("see @eq-x and @fig-y-z.", "see {eq}`eq-x` and {numref}`fig-y-z`."),
        (
            "so (@eq-x). (@eq-x)(@eq-y); (@eq-x, @fig-y)",
            "so {eq}`eq-x`. {eq}`eq-x`{eq}`eq-y`; ({eq}`eq-x`, "
            "{numref}`fig-y`)",
        ),
        (
            "by @thm-a, @lem-b, @exr-c, @sec-d",
            "by {prf:ref}`thm-a`, {prf:ref}`lem-b`, {ref}`exr-c`, "
            "{numref}`sec-d`",
        ),
        (
            "[@yeo2000] and [@yeo2000; @boxcox1964]",
            "{cite:p}`yeo2000` and {cite:p}`yeo2000,boxcox1964`",
        ),
        ("@yeo2000 say", "{cite:t}`yeo2000` say"),
        ("`@eq-x` $a@b$ me@yeo2000.org", "`@eq-x` $a@b$ me@yeo2000.org"),
        (
            "```\n$$ x $$ {#eq-x}\n@eq-x\n```",
            "```\n$$ x $$ {#eq-x}\n@eq-x\n```",
        ),
        ("## Title {#sec-t}", "(sec-t)=\n## Title"),
        ("::: {.callout-note}\nText.\n:::", ":::{note}\n\nText.\n:::"),
        (
            "::: {.callout-tip}\n## Why\nText.\n:::",
            ":::{admonition} Why\n:class: tip\n\nText.\n:::",
        ),
        (
            "::: {#thm-a}\n## Name\nText.\n:::",
            ":::{prf:theorem} Name\n:label: thm-a\n\nText.\n:::",
        ),
        ("::: {.proof}\nText.\n:::", ":::{prf:proof}\n\nText.\n:::"),
        ("::: {#exr-a}\nDo.\n:::", ":::{exercise}\n:label: exr-a\n\nDo.\n:::"),
        (
            "::: {.solution}\nDone.\n:::",
            ":::{admonition} Solution\n:class: dropdown\n\nDone.\n:::",
        ),
        (
            "::: {#thm-a}\nText.\n::: {.callout-note}\nInner.\n:::\n:::",
            "::::{prf:theorem}\n:label: "
            "thm-a\n\nText.\n\n:::{note}\n\nInner.\n:::\n\n"
            "::::",
        ),
    ],
)
def test_markdown(quarto, myst):
    assert dialect.markdown(quarto).strip() == myst


def test_a_citation_keeps_its_remark():
    assert (
        dialect.markdown("[@yeo2000, section 4.1]")
        == "{cite:p}`yeo2000{section 4.1}`"
    )


def test_a_div_across_cells_is_fenced_in_each():
    cells = [
        {"cell_type": "markdown", "source": "::: {.solution}\nFirst."},
        {"cell_type": "code", "source": "1"},
        {"cell_type": "markdown", "source": "Last.\n:::"},
    ]
    first, _, last = (
        dialect.Myst().write(found) for _, found in markup.cells(cells)
    )
    for made, words in ((first, "First."), (last, "Last.")):
        assert made == (
            f":::{{admonition}} Solution\n:class: dropdown\n\n{words}\n:::"
        ).join("\n\n")


@pytest.mark.parametrize(
    "source, tags",
    [
        ("#| hide\nx", ["remove-cell"]),
        ("#| default_exp a.b", ["remove-cell"]),
        ("#| include: false\nx", ["remove-cell"]),
        ("#| echo: false\nx", ["remove-input"]),
        ("#| output: false\nx", ["remove-output"]),
        ("#| code-fold: true\nx", ["hide-input"]),
        ("#| export\nx", []),
        ("#| check\nx", ["hide-input"]),
        ("#| export\n" + "x\n" * 12, []),
        ("#| export\n" + "x\n" * 13, ["hide-input"]),
        ("#| hide\n" + "x\n" * 30, ["remove-cell"]),
        ("x = '''\n#| hide\n'''", []),
        ("x", []),
    ],
)
def test_cell_tags(source, tags):
    cell = {"source": source, "metadata": {}}
    dialect.code_cell(cell)
    assert cell["metadata"]["tags"] == tags and not cell["source"].startswith(
        "#|"
    )


@pytest.mark.parametrize(
    "text, columns",
    [
        ("a  b  c\n" * 5, 10),
        ("a b c\n" * 5, 0),
        ("x" * 90 + "\n" + "word " * 30, 0),
        ("name   value  other\n" * 3 + "a" * 70 + "  " + "b" * 10, 90),
        ("name   value  other\n" * 3 + "a" * 70 + "  " + "b" * 60, 0),
    ],
)
def test_a_printed_table_keeps_its_lines(text, columns):
    from docutils import nodes
    from docutils.utils import new_document

    assert dialect.columns_of(text) == columns
    page, block = new_document("page"), nodes.literal_block(text, text)
    page += nodes.container("", block, classes=["cell_output"])
    dialect.size_tables(page)
    assert block["classes"] == (
        ["columns", f"columns-{columns}"] if columns else []
    )


@pytest.mark.parametrize(
    "text, made",
    [
        ("-0.5 … -.3", "−0.5 … −.3"),
        ("(-1, 2)", "(−1, 2)"),
        ("2e-05", "2·10⁻⁵"),
        ("-1.5e+12 ± 3e+00", "−1.5·10¹² ± 3"),
        ("1e-100", "1·10⁻¹⁰⁰"),
        ("2026-11-23", "2026-11-23"),
        ("3-5", "3-5"),
        ("BN-2", "BN-2"),
        ("c46ffd2e-1", "c46ffd2e-1"),
        ("1e5", "1e5"),
    ],
)
def test_numbers_as_in_books(text, made):
    assert dialect.numbers(text) == made


def test_numbers_in_printed_tables():
    from docutils import nodes
    from docutils.utils import new_document

    page = new_document("page")
    cells = ["-0.5", "2026-11-23"]
    row = nodes.row(
        "",
        *(nodes.entry("", nodes.paragraph("", text)) for text in cells),
        nodes.entry("", nodes.literal("", "-1")),
    )
    page += nodes.container("", row, classes=["cell_output"])
    page += nodes.row("", nodes.entry("", nodes.paragraph("", "-1")))
    dialect.printed_numbers(page)
    assert [entry.astext() for entry in page.findall(nodes.entry)] == [
        "−0.5",
        "2026-11-23",
        "-1",
        "-1",
    ]


def test_figures_get_number_caption_and_alternative_text():
    cell = {
        "source": '#| label: fig-a\n#| fig-cap: "The curve of $x$, see '
        '@eq-b."\nplot()',
        "metadata": {},
    }
    dialect.code_cell(cell)
    made = cell["metadata"]["mystnb"]
    assert (
        made["figure"]
        == {"caption": "The curve of $x$, see {eq}`eq-b`.", "name": "fig-a"}
        and "curve" in made["image"]["alt"]
    )
    assert cell["source"] == "plot()"


def test_a_long_caption_goes_on_in_indented_lines():
    cell = {
        "source": '#| label: fig-a\n#| fig-cap: "The curve of $x$,\n'
        '#|   see @eq-b."\n#| code-fold: true\nplot()',
        "metadata": {},
    }
    found = dialect.directives(cell["source"])
    assert found == {
        "label": "fig-a",
        "code-fold": "true",
        "fig-cap": "The curve of $x$, see @eq-b.",
    }
    dialect.code_cell(cell)
    caption = cell["metadata"]["mystnb"]["figure"]["caption"]
    assert caption == "The curve of $x$, see {eq}`eq-b`."
    assert cell["source"] == "plot()"


def test_outputs_come_from_the_executed_copy():
    source = notebook(
        ("markdown", "# T\n\n> Lead."), ("code", "1"), ("code", "2")
    )
    executed = notebook(("code", "1"), ("code", "2"))
    for cell, text in zip(executed["cells"], "ab"):
        cell["outputs"] = [
            {"output_type": "stream", "name": "stdout", "text": text}
        ]
    made = dialect.translate_notebook(source, executed)
    assert [c["outputs"][0]["text"] for c in made["cells"][1:]] == ["a", "b"]
    assert ":::{div} lead\nLead." in made["cells"][0]["source"]
    assert all(
        c["outputs"] == []
        for c in dialect.translate_notebook(notebook(("code", "1")), None)[
            "cells"
        ]
    )


def test_svg_takes_the_colour_of_the_text():
    svg = (
        '<?xml version="1.0"?>\n'
        '<svg width="100pt" height="50pt"><metadata>who</metadata><path '
        'style="stroke: #101010"/></svg>'
    )
    made = dialect.inline_svg(svg, 'a "curve"')
    assert (
        "#101010" not in made
        and "var(--pst-color-text-base)" in made
        and "metadata" not in made
    )
    assert (
        'aria-label="a &quot;curve&quot;"' in made
        and "--natural: 100pt" in made
        and "max-width: 100%" in made
        and made.startswith("<svg")
    )


def test_svgs_of_one_page_do_not_share_names_or_styles():
    svg = (
        '<svg width="1pt" height="1pt"><style>*{stroke-linecap: '
        'butt}</style><path id="p1" d="%s"/><use xlink:href="#p1" '
        'clip-path="url(#p1)"/></svg>'
    )
    one, two = (dialect.inline_svg(svg % d, "") for d in "ab")
    names = [
        re.findall(r'(?:id="|href="#|url\(#)([\w-]+)', s) for s in (one, two)
    ]
    assert (
        all(len(set(n)) == 1 and len(n) == 3 for n in names)
        and names[0] != names[1]
    )
    assert "<style>.figure-svg *{" in one


def test_a_formula_keeps_its_punctuation():
    nodes = pytest.importorskip("docutils.nodes")
    text, math = nodes.Text, lambda x: nodes.math("", x)
    page = nodes.paragraph(
        "",
        "",
        text("see ("),
        math("a"),
        text("), then "),
        math("b"),
        text(", "),
        math("c"),
        text(" and "),
        math("d"),
        text("."),
    )
    for _ in range(2):
        dialect.keep_punctuation(page)
        assert page.astext() == "see (a), then b, c and d."
        assert [n.astext() for n in page.findall(nodes.inline)] == [
            "(a),",
            "b,",
            "d.",
        ]


def test_show_doc_output_loses_its_rule():
    output = {"data": {"text/markdown": "---\n\n### f"}}
    dialect.show_doc(output)
    assert output["data"]["text/markdown"] == "### f"


def test_a_chapter_over_its_budget_is_named(monkeypatch):
    seconds = {c.name: 1.0 for c in chapters()} | {"710_claims": run.BUDGET + 1}
    monkeypatch.setattr(
        run.Run, "record", lambda self: {"seconds": seconds[self.chapter.name]}
    )
    assert (
        run.timetable().splitlines()[-1]
        == f"over the budget of {run.BUDGET:.0f} s a chapter: 710_claims "
        f"({run.BUDGET + 1:.0f} s)"
    )
    monkeypatch.setitem(seconds, "710_claims", 1.0)
    assert "budget" not in run.timetable()


def test_the_newest_versions_are_without_pins():
    from tools import bounds

    loose = bounds.without_pins((ROOT / "constraints.txt").read_text())
    assert not re.search(
        r"^(torch|torchvision|numpy|scipy|matplotlib)==", loose, re.M
    ) and re.search(r"^nbdev==", loose, re.M)
    assert bounds.lower_bounds(["torch>=2.4", "scipy>=1.11.1"]) == [
        "torch==2.4.0",
        "scipy==1.11.1",
    ]


def test_a_page_is_loaded_once_for_the_references_to_it(monkeypatch):
    std = pytest.importorskip("sphinx.domains.std")
    loaded, env = [], type("Environment", (), {"config": "numfig"})()
    env.get_doctree = lambda name: loaded.append(name) or name
    monkeypatch.setattr(
        std.StandardDomain,
        "_resolve_numref_xref",
        lambda self, env, page: (env.get_doctree(page), env.config),
    )
    dialect.one_tree_for_many_references()
    dialect.one_tree_for_many_references()  # of a second book
    find = std.StandardDomain._resolve_numref_xref
    found = [find(None, env, page) for page in "aba"]
    assert found == [(page, "numfig") for page in "aba"]
    assert loaded == ["a", "b"]
