"""The book as a whole: package and notebooks agree, imports point backwards,
notebooks are clean, lists are equal.
"""

import ast
import base64
import csv
import json
import re
import shutil
from collections import Counter

from normalnorm.experiments import results
from normalnorm.plots import INK
from tools import export, markup, order
from tools.chapters import (
    APPENDICES,
    ROOT,
    WORKSHOP,
    chapter,
    chapters,
    halves,
    handbook,
    pages,
    renamed,
)
from tools.files import load, ran
from tools.folding import directives


def grep(pattern: str, but: str) -> str:
    "The lines, of files that git does not ignore, but one, with a pattern."
    words = "git grep --untracked --perl-regexp --line-number".split()
    done = ran([*words, pattern, "--", f":!{but}"], cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_package_and_generated_files_agree_with_the_notebooks():
    assert export.differences() == []


def test_each_piece_of_cpp_follows_what_it_does():
    "In words, and in the handbook; a long one is folded."
    seen = 0
    for c in chapters():
        cells = c.cells()
        for i, cell in enumerate(cells):
            if cell["cell_type"] == "raw":
                source, seen = cell["source"], seen + 1
                lines = source.count("\n")
                assert f"nbs/{c.name}" in handbook(), c.name
                assert cells[i - 1]["cell_type"] == "markdown", (c.name, i + 1)
                assert lines <= 120, (c.name, i + 1, lines)
                assert ("#| code-fold: true" in source) == (lines > 41), (
                    c.name,
                    i + 1,
                    lines,
                )
    assert seen > 35


def test_notebooks_are_clean():
    assert export.noise() == []


def test_every_notebook_is_in_the_table_of_contents_and_names_its_module():
    listed = [c.name for c in chapters()]
    assert sorted(listed) == sorted(
        p.stem for p in (ROOT / "nbs").glob("*.ipynb")
    )
    assert listed[0] == "index"
    for c in chapters()[1:]:
        exports = any("#| export" in s for s in c.code_cells())
        assert re.fullmatch(r"\d{3}_[a-z_.0-9]+", c.name)
        assert not exports or c.name.split("_", 1)[1] == c.module, (
            f"{c.name} exports {c.module}"
        )


def test_the_numbers_of_a_part():
    "They ascend; in the book they begin with the part's."
    listed = {f"nbs/{c.name}": c for c in chapters()}
    for half, of in halves().items():
        for caption, some in of[1:] if half == "The book" else of:
            found = [listed[page] for page in some if page in listed]
            assert [c.name for c in found] == sorted(c.name for c in found)
            number = re.match(r"Part (\d) · ", caption)
            if half == "The book":
                assert {c.part for c in found} == {
                    int(number[1]) if number else APPENDICES
                }


def test_the_handbook_comes_last_and_has_the_workshop():
    listed, last = pages(), handbook()
    assert listed[-len(last) :] == last and last[0] == "nbs/handbook"
    assert {f"nbs/{c.name}" for c in chapters() if c.part == WORKSHOP} < {*last}


def test_the_table_of_renamed_chapters():
    """Each old name once, no chapter under one, none of them named anywhere
    else; each new one is a chapter.
    """
    with (ROOT / "nbs" / "renamed.csv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["old", "new"] and len(renamed()) == len(rows) - 1 > 20
    names = {c.name for c in chapters()}
    for old, new in renamed().items():
        assert old not in names and new in names
    old = "|".join(map(re.escape, renamed()))
    assert grep(rf"(?<![\w.])(?:{old})(?!\w)", "nbs/renamed.csv") == ""


def test_a_changed_row_changes_the_readme(tmp_path):
    """The images of the first row of the estimated transform with noise, of
    which accuracy is made, and its loss, signed anew. (Without a change it is
    what the notebooks generate.)
    """
    for name in ("nbs", "normalnorm", "settings.ini", "_toc.yml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for made in ("glyphs-length", "noise-dose", "rivals"):
        shutil.copytree(ROOT / "results" / made, tmp_path / "results" / made)
    place = tmp_path / "results" / "noise-dose" / "book"
    path, row = next(
        (path, row)
        for name in sorted(results.packed(place))
        for path in [place / name]
        for row in [results.read_row(path)]
        if row["arm"] == "λ̂, ξ = 0.4"
    )
    none = bytes(-(-row["test_right"]["count"] // 8))
    row["test_right"]["bits"] = base64.b64encode(none).decode()
    losses = results.unpack_losses(row["test_losses"])
    row["test_losses"] = results.pack_losses(losses + 1)
    path.write_text(  # in place of the one that is packed
        json.dumps(row | {"digest": results.digest(row)}), encoding="utf-8"
    )
    kept, found = (
        re.search(r"against a fixed one *\|(.*?),.*\|(.*?),", text).groups()
        for text in (
            (ROOT / "README.md").read_text(encoding="utf-8"),
            export.readme(tmp_path)["README.md"],
        )
    )
    assert all(new != old for new, old in zip(found, kept))


def test_the_picture_of_the_readme():
    "Another processor's last digits make no other; another ink does."
    text = (ROOT / export.PICTURE).read_text(encoding="utf-8")
    moved = lambda by: re.sub(
        r"\d+\.\d{3,}", lambda m: f"{float(m[0]) + by:.6f}", text
    )
    assert export.alike(text, moved(0.01)) and not export.alike(text, moved(1))
    assert not export.alike(text, text.replace(export.GREY, INK))


COMPARING = re.compile(
    r"\b(most|better|worse|best|nothing|higher|lower|more "
    r"accurate|improve\w*|outperform\w*)\b|[+−]\d+\.\d",
    re.I,
)


def test_comparing_words_of_the_landing_page_come_from_a_verdict():
    """Neither its prose nor the texts in its cells have one; what a cell says
    is made by `verdict` and `share`.
    """
    for cell in chapter("index").cells():
        source = cell["source"]
        if cell["cell_type"] == "code":
            if "echo" not in directives(source):
                continue
            source = "\n".join(
                node.value
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
            )
        assert not COMPARING.search(source), COMPARING.search(source)
    assert COMPARING.search("It is most of it") and COMPARING.search("(−0.5)")


def test_imports_point_backwards():
    "Into earlier chapters or the workshop; those of the workshop, into itself."
    assert order.violations() == []


def test_each_cell_has_an_identity_of_its_own():
    "Who reads a notebook with two of one name would give one another name."
    for c in chapters():
        names = [cell["id"] for cell in c.cells()]
        assert len(set(names)) == len(names), c.name


def test_every_equation_label_and_reference_is_unique_and_known():
    labels, references = Counter(), {}
    for c in chapters():
        for cell, found in markup.cells(c.cells()):
            labels.update(markup.labels(found))
            if cell["cell_type"] == "code":
                label = r"(?m)^#\| label: ([\w-]+)"
                labels.update(re.findall(label, cell["source"]))
            for span in markup.spans(found):
                if isinstance(span, markup.Reference):
                    references.setdefault(span.label, c.name)
    assert [label for label, times in labels.items() if times > 1] == []
    assert len(references) > 200
    unknown = {r: at for r, at in references.items() if r not in labels}
    assert unknown == {}


def test_no_equation_without_a_check_nearby():
    "After a numbered equation, code follows within three cells."
    for c in chapters():
        cells = list(markup.cells(c.cells()))
        for i, (_, found) in enumerate(cells):
            if any(label.startswith("eq-") for label in markup.labels(found)):
                assert any(
                    cell["cell_type"] == "code"
                    for cell, _ in cells[i + 1 : i + 4]
                ), f"{c.name}, cell {i + 1}"


def test_no_machine_path_or_registry_host_in_any_file():
    pattern = (
        r"(?:^|[^A-Za-z0-9_.~])/(?:home|root|tmp|mnt|srv|opt|work|Users)/"
        r"[A-Za-z._-]|pypi\.org|registry\.npmjs|files\.pythonhosted"
    )
    assert grep(pattern, "tests/book/test_book.py") == ""


def test_the_version_is_in_one_place():
    """settings.ini; the package has it from there, and the changelog begins
    with it.
    """
    said = lambda pattern, name: re.search(
        rf"(?m)^{pattern} (\S+)", (ROOT / name).read_text(encoding="utf-8")
    )[1]
    version = said("version =", "settings.ini")
    assert said("##", "CHANGELOG.md") == version
    named = grep(rf"(?<![=\d.]){re.escape(version)}(?![\d.])", "results")
    files = {line.split(":")[0] for line in named.splitlines()}
    assert files == {"settings.ini", "CHANGELOG.md", "normalnorm/__init__.py"}


def test_committed_results_say_what_they_are():
    "Rows do where they are read."
    for path in (ROOT / "results").rglob("*.json"):
        if path.name in (
            *("goals.json", "records.json"),
            *("print.json", "pages-newest.json"),  # of no network
            "cubins.json",  # compiled, for a card that is not there
        ) or (
            path.parent.name in ("mutation", "proofs")
            or path.name.startswith("test-")
        ):
            continue
        found = load(path)
        about = found.get("environment", found)
        assert {"date", "torch"} <= set(about), path.name
        made_on = {about.get("processor"), about.get("device")} - {None}
        assert made_on - {"cpu, interpreted"}, path.name


def test_every_exercise_has_its_grade():
    "★ to ★★★, where the exercise begins."
    exercises = [
        (c.name, block)
        for c in chapters()
        for _, found in markup.cells(c.cells())
        for block in markup.walk(found)
        if isinstance(block, markup.Division) and block.kind == "exr"
    ]
    assert len(exercises) > 100
    found = [
        f"{name}: {e.label}"
        for name, e in exercises
        if not re.match("★{1,3} ", markup.Writer().write(e.pieces))
    ]
    assert found == [], (
        "exercises that do not begin with ★, ★★ or ★★★: " + ", ".join(found)
    )


def test_chapters_are_named_by_links():
    """No "last chapter", "chapter on …" without a link, and a link whose text
    is written like a title has the title of its chapter.
    """
    titles = {
        c.name: re.sub(
            r" *\{#.*\}$",
            "",
            "".join(c.cells()[0]["source"]).splitlines()[0].removeprefix("# "),
        )
        for c in chapters()
    }
    vague = re.compile(
        r"\b(?:last|next|previous|earlier|later|following) chapters?\b"
        r"|\bchapters? (?:after next|before)\b"
        r"|(?:\bthe |\()chapters? (?:on|about|after|\*)",
        re.I,
    )
    found = []
    for c in chapters():
        for i, cell in enumerate(c.cells()):
            if cell["cell_type"] != "markdown":
                continue
            text = cell["source"]
            bare = re.sub(r"\[[^\]]*\]\([^)]*\)", "", text)
            found += [
                f"{c.name}, cell {i}: {m[0]!r} is no link"
                for m in vague.finditer(bare)
            ]
            found += [
                f"{c.name}, cell {i}: [{link[1]}] leads to {titles[link[2]]!r}"
                for link in re.finditer(
                    r"\[([^\]]+)\]\((\d\w*[\w.]*?)\.ipynb\)", text
                )
                if link[1][0].isupper()
                and link[2] in titles
                and link[1]
                not in (titles[link[2]], titles[link[2]].split(":")[0])
            ]
    assert found == [], "\n".join(found)
