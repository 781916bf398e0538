"""A small book in which chapters fail: each in its way, and the rest of the
book is there.
"""

import contextlib
import os
import re
import shutil
import sys
import time
from html import unescape

import psutil
import pytest

from tests.book import toy
from tools import build, kernels, links, run
from tools.chapters import ROOT, Chapter, chapters
from tools.files import load, python

FIGURE = (
    "from IPython.display import SVG\n"
    'SVG(\'<svg xmlns="http://www.w3.org/2000/svg" width="9pt" '
    'height="9pt"></svg>\')'
)
# name → the code of its third cell, and what its page and the last lines say
# about it
CHAPTERS = {
    "010_fails": (
        "import sys\nprint('before ' + sys.prefix + '/here')\n"
        "assert 1 + 1 == 3, '\\x1b[31mnot three\\x1b[0m in ' + "
        "sys.prefix + '/x'",
        "AssertionError: not three in",
    ),
    "020_silent": ("#| hide\nassert 2 < 1", "AssertionError: at assert 2 < 1"),
    "030_exits": (
        "import os\nos._exit(0)",
        "DeadKernel: the process that ran this cell ended",
    ),
    "040_crashes": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "DeadKernel: the process that ran this cell ended",
    ),
    "045_writes": (
        "from IPython.display import display\n"
        "display({'text/plain': 5}, raw=True)",
        "NotebookValidationError: ",
    ),
    "050_hangs": (
        "import signal, time\nsignal.signal(signal.SIGINT, lambda "
        "*_: None)\nwhile True: time.sleep(1)",
        "Timeout: the chapter was ended in this cell",
    ),
}
ODD = (
    "print('\\udcff \\x1b[1mbold\\x1b[0m')\n"
    "open(__import__('os').environ['BOOK_RECORD'], 'w').write('{')\n7"
)


def page(name, code):
    """A title, a cell that shows 41, the code, and a figure, a section, an
    equation and a theorem below it.
    """
    short = name[:3]
    return [
        ("markdown", f"# Chapter {name}\n\n> Lead."),
        ("code", "40 + 1"),
        ("code", code),
        ("code", f"#| label: fig-{short}\n#| fig-cap: A figure.\n{FIGURE}"),
        (
            "markdown",
            f"## Section {{#sec-{short}}}\n\n$$ x = 1. $$ {{#eq-{short}}}\n\n"
            f"::: {{#thm-{short}}}\nTrue.\n:::",
        ),
        ("code", "print('the ' + 'end')"),
    ]


def references(names):
    return " ".join(
        f"@fig-{n[:3]} @sec-{n[:3]} @eq-{n[:3]} @thm-{n[:3]}" for n in names
    )


def make(root, named, code="2 + 2", more=""):
    "A book of these chapters, whose landing page refers to everything in them."
    index = [*page("index", code), ("markdown", references(named) + more)]
    toy.checkout(root, {"index": index} | {n: page(n, named[n]) for n in named})
    (root / "_build").mkdir()
    for name in ("_config.yml", "references.bib"):
        shutil.copy(ROOT / name, root / name)
    for folder in ("tools", "_static"):
        (root / folder).symlink_to(ROOT / folder)
    return root


def text_of(html):
    return re.sub(
        r"\s+",
        " ",
        unescape(re.sub(r"<[^>]+>", "", html.read_text(encoding="utf-8"))),
    )


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    "Chapters that fail, run and rendered once."
    root = make(
        tmp_path_factory.mktemp("book"),
        {name: code for name, (code, _) in CHAPTERS.items()},
    )
    failures = run.run_all(chapters(root), limit=12)
    ended, clean, said = build.sphinx(root)
    return root, failures, ended, clean, said


def test_the_rest_of_the_book_is_there(book):
    """All pages, no warning: references to what is in the failed chapters
    arrive.
    """
    root, failures, ended, clean, said = book
    assert [f.chapter for f in failures] == [*CHAPTERS]
    assert ended and clean, said
    assert {p.stem for p in (root / "_build/html/nbs").glob("*.html")} == {
        c.name for c in chapters(root)
    }
    index = text_of(root / "_build/html/nbs/index.html")
    assert "the end" in index and "This page failed" not in index
    assert links.broken(root / "_build/html") == []


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_failed_page_says_so_in_place(book, name):
    words, page = CHAPTERS[name][1], book[0] / f"_build/html/nbs/{name}.html"
    html, text = page.read_text(encoding="utf-8"), text_of(page)
    # at the top, before what the first cell gave, and in place
    places = [
        "This page failed",
        "Cell 3 of 6",
        words,
        "41",
        "This cell failed.",
    ]
    found = [*map(text.index, places), text.rindex(words.split(":")[0])]
    assert found == sorted(found)
    assert "the end" not in text  # what stands below was not run
    for hidden in ("\x1b", str(book[0]), sys.prefix):
        assert hidden not in html


def test_what_was_shown_before_the_error_stays(book):
    "Without the folders of the machine."
    text = text_of(book[0] / "_build/html/nbs/010_fails.html")
    assert "before …/here" in text and "not three in …/x" in text


def test_a_file_that_is_no_notebook_is_named(tmp_path):
    (tmp_path / "nbs").mkdir()
    broken = toy.write(tmp_path, "060_broken", ("markdown", "# A"))
    broken.write_text(broken.read_text()[:-30])
    with pytest.raises(ValueError, match="060_broken.ipynb is not a notebook"):
        Chapter("060_broken", tmp_path).cells()


def test_a_failed_chapter_is_never_fresh(book):
    root, _, *_ = book
    for c in chapters(root):
        assert bool(run.Run(c).stale()) == (c.name != "index"), c.name
    c = Chapter("010_fails", root)
    # and fails again
    words = "(?s)010_fails, cell 3 of 6 failed.*not three"
    with pytest.raises(run.ChapterFailed, match=words):
        run.ensure(c)


def test_the_last_lines_name_what_failed(book):
    root, failures, *_ = book
    lines = build.closing(
        failures, True, 7.0, root / "_build/html/index.html"
    ).split("\n")
    assert (
        lines[0] == "6 chapters failed; each page shows its error in place:"
        and lines[-1] == "(7 s)"
    )
    assert lines[-2] == f"The book: {root}/_build/html/index.html"
    for line, (name, (_, words)) in zip(lines[1:], CHAPTERS.items()):
        assert line.startswith(f"  {name}, cell 3: {words}")
    assert "There is no book." in build.closing([], False, 0, root / "nowhere")


def test_repaired(book, tmp_path):
    "The mark goes with the error."
    root = tmp_path / "book"
    shutil.copytree(book[0], root, symlinks=True)
    c = Chapter("010_fails", root)
    toy.write(root, "010_fails", *page("010_fails", "2 + 3"))
    run.execute(c)
    build.sphinx(root)
    text = text_of(root / "_build/html/nbs/010_fails.html")
    assert (
        "This page failed" not in text
        and "the end" in text
        and "not drawn" not in text
    )


def test_what_sphinx_warns_of_does_not_take_the_book_away(tmp_path):
    """The warning is printed, twice if the book is made twice; the page is
    there.
    """
    root = make(tmp_path, {"010_odd": ODD}, more=" @eq-nowhere")
    assert run.run_all(chapters(root)) == []
    for _ in range(2):
        ended, clean, said = build.sphinx(root)
        assert ended and not clean and "eq-nowhere" in said, said
    text = text_of(root / "_build/html/nbs/010_odd.html")
    assert "the end" in text and "bold" in text


def test_a_new_style_chapter_or_title_reaches_all_pages(tmp_path):
    """Sphinx alone would neither copy a changed style sheet nor write the pages
    again that refer to it, or that have a side bar of another day.
    """
    title = ("markdown", "# Title\n\n> Lead.")
    root = make(tmp_path, {"010_first": "1 + 1"})
    for name in ("index", "010_first"):
        toy.write(root, name, title)
    # a page whose executed copy is not there is read each time
    assert run.run_all(chapters(root)) == []
    styles, seen = root / "_static", []
    styles.unlink()
    shutil.copytree(ROOT / "_static", styles)
    page = root / "_build/html/nbs/010_first.html"

    def shown():
        ended, clean, said = build.sphinx(root)
        assert ended and clean, said
        seen.append(page.read_text(encoding="utf-8"))
        return re.findall(r"normalnorm\.css[^\"]*", seen[-1])

    before = shown()
    with (styles / "normalnorm.css").open("a") as style:
        style.write("a { color: red }")
    assert shown() != before
    with (root / "_toc.yml").open("a") as toc:
        toc.write(toy.contents("020_second", caption="More"))
    assert "020_second.html" not in seen[-1]
    for name in ("Second", "Another"):
        toy.write(root, "020_second", ("markdown", f"# {name}\n\n> Lead."))
        shown()
        assert "020_second.html" in seen[-1] and f" {name}" in seen[-1]


# ---- the command ------------------------------------------------------------


@pytest.mark.parametrize(
    "failures, clean, status",
    [(0, True, 0), (1, True, 1), (0, False, 1), (1, False, 1)],
)
def test_the_command_ends_with_one_where_anything_failed(
    monkeypatch, capsys, failures, clean, status
):
    "And renders in any case."
    rendered = []
    failed = run.ChapterFailed(
        "220_theory.newton",
        7,
        62,
        "AssertionError: at assert x",
        "Traceback of it",
    )
    monkeypatch.setattr(build, "check_sync", lambda: True)
    monkeypatch.setattr(run, "run_all", lambda todo: [failed] * failures)
    monkeypatch.setattr(build, "render", lambda: rendered.append(1) or clean)
    assert build.main() == status and rendered
    out = capsys.readouterr().out
    assert (
        "1 chapter failed" in out
        and "  220_theory.newton, cell 7: AssertionError: at assert x" in out
        and "Traceback of it" in out
    ) == bool(failures)


# ---- kernels ----------------------------------------------------------------


def test_forked_kernels_show_what_fresh_ones_show(tmp_path):
    "Outputs and dependencies are the same; torch is not imported again."
    root = make(
        tmp_path,
        {
            "010_torch": "import sys, torch, normalnorm.own\n"
            "(torch.ones(1), __name__, sys.argv[0][-21:], "
            "'normalnorm.own' in sys.modules, "
            "__import__('os').getcwd())"
        },
    )
    (root / "normalnorm/__init__.py").write_text("")
    (root / "normalnorm/own.py").write_text("x = 1")
    c, seen = Chapter("010_torch", root), []
    with kernels.nursery(run.kernel_environment(ROOT)) as nursery:
        if nursery is None:
            pytest.skip("no kernels can be forked here")
        for parent in (None, nursery, nursery):
            done = run.execute(c, nursery=parent)
            cells = load(done.notebook)["cells"]
            seen.append(
                (
                    [x.get("outputs") for x in cells],
                    done.record()["dependencies"],
                )
            )
        nursery.process.kill()
        nursery.process.wait()
        # started on its own, then
        run.execute(Chapter("index", root), nursery=nursery)
    assert seen[0] == seen[1] == seen[2] and "normalnorm/own.py" in seen[0][1]


def test_kernels_end_with_the_process_that_made_them():
    code = (
        "import os, sys, time\nfrom tools import kernels, run\n"
        "from tools.chapters import ROOT\n"
        "with kernels.nursery(run.kernel_environment(ROOT)) as n:\n"
        "    print(n.process.pid if n else 0, flush=True)\n"
        "    os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = python("-c", code, cwd=ROOT, env=env)
    pid = int(done.stdout or 0)
    if not pid:
        pytest.skip("no kernels can be forked here")
    with contextlib.suppress(psutil.NoSuchProcess):
        forking, end = psutil.Process(pid), time.monotonic() + 10
        while forking.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "it outlived the one that asked"
            time.sleep(0.1)


# ---- small parts ------------------------------------------------------------


@pytest.mark.parametrize(
    "text, plain",
    [
        ("\x1b[0;31mred\x1b[0m \x1b]8;;file\x07x", "red x"),
        ("File {root}/nbs/a.py, line 3", "File nbs/a.py, line 3"),
        ("in /var/folders/x/y/a.txt: no", "in …/a.txt: no"),
        (
            "https://example.org/a/b and 3/4/5",
            "https://example.org/a/b and 3/4/5",
        ),
        (r"at C:\Users\me\x.py", "at …/x.py"),
        ("/var/x/ipykernel_12/345.py:3", "<cell>:3"),
    ],
)
def test_no_machine_in_a_message(tmp_path, text, plain):
    assert (
        run.without_machine(text.replace("{root}", str(tmp_path)), tmp_path)
        == plain
    )


def test_longest_first_and_collectors_last(tmp_path, monkeypatch):
    root = make(
        tmp_path,
        {
            "010_a": "1",
            "020_b": "from tools.ledger import outcomes",
            "030_c": "1",
        },
    )
    (root / "_build/executed").mkdir()
    run.Run(Chapter("030_c", root)).record_file.write_text('{"seconds": 50}')
    known = tmp_path / "seconds.json"
    known.write_text('{"010_a": 20, "020_b": 90}')
    monkeypatch.setattr(run, "SECONDS", known)
    assert [[c.name for c in part] for part in run.rounds(chapters(root))] == [
        ["030_c", "010_a", "index"],
        ["020_b"],
    ]


def test_the_hints_are_about_chapters_of_the_book():
    assert set(load(run.SECONDS)) <= {c.name for c in chapters()}
