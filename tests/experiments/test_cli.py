"""The command line and what people mistype: one line that says what was given
and what is expected, exit status 2, no traceback, nothing written.
"""

import contextlib
import dataclasses
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normalnorm
from normalnorm import claims, cli, lab
from normalnorm.experiments import results, tables
from normalnorm.experiments.results import Recipe

ROOT = Path(normalnorm.__file__).parents[1]
KNOWN = {"a": [1.0, 2.0, 4.0, 5.0], "b": [2.0, 2.5, 5.5, 9.0]}


@pytest.fixture
def known(monkeypatch):
    "A recipe that costs nothing, alone."
    configs = {arm: {"data": "digits", "arm": arm} for arm in KNOWN}
    recipe = Recipe(
        "known",
        "known numbers",
        (),
        {"smoke": configs, "book": configs},
        lambda config, seed, arm, **_: {
            "metrics": {"score": KNOWN[arm][seed % 4]}
        },
        {"score": "score"},
        (("a", "b"),),
        seeds={"smoke": 4},
    )
    for module in (results, tables):
        monkeypatch.setattr(module, "recipes", lambda: {"known": recipe})
    return recipe


@pytest.fixture
def place(tmp_path, monkeypatch, known):
    "A folder to stand in, with a file, results, and two chapters to copy."
    monkeypatch.delenv("NORMALNORM_RESULTS", raising=False)
    for name in ("here", "shipped"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("file").write_text("not a folder")
    results.run_recipe(known, "smoke", out="rows")
    for number, title in ((1, "One step"), (2, "Two steps")):
        (tmp_path / "shipped" / f"00{number}_chapter.ipynb").write_text(
            '{"cells": [{"cell_type": "markdown", "source": ["# %d · %s"]}]}'
            % (number, title)
        )
    monkeypatch.setattr(
        lab,
        "shipped_chapters",
        lambda: contextlib.nullcontext(tmp_path / "shipped"),
    )
    monkeypatch.setattr(lab, "open_lab", lambda *_: 0)
    return tmp_path / "here"


def printed(*arguments):
    "Exit status, standard output, error stream."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main([str(a) for a in arguments])
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), err.getvalue()


def everything(folder):
    return sorted(str(p) for p in folder.rglob("*"))


def refused(place, *arguments):
    "The line that refuses these arguments."
    before = everything(place)
    status, out, err = printed(*arguments)
    assert (
        status == 2
        and not out
        and err.startswith("normalnorm: ")
        and err.count("\n") == 1
        and err.endswith("\n")
    ), (arguments, status, out, err)
    assert everything(place) == before, arguments
    return err


def test_version(place):
    assert printed("--version") == (
        0,
        f"normalnorm {normalnorm.__version__}\n",
        "",
    )


REFUSED = [
    (["report", "known", "--out", "file"], ["file is not a folder", "--out"]),
    (["list", "--out", "file"], ["file is not a folder", "--out"]),
    (
        ["compare", "known/a", "known/b", "--out", "file"],
        ["file is not a folder"],
    ),
    (["run", "known", "--out", "file"], ["file is not a folder"]),
    (
        ["run", "known", "--out", "file/sub/deep"],
        ["file is not a folder", "file/sub/deep"],
    ),
    (
        ["run", "known", "--dry-run", "--out", "file/sub"],
        ["file is not a folder"],
    ),
    (["report", "known", "--out", "file/sub"], ["file is not a folder"]),
    (["report", "known", "--out", "nowhere"], ["there is no folder nowhere"]),
    (["list", "--out", "nowhere"], ["there is no folder nowhere"]),
    (
        ["list", "--out", ""],
        ["argument --out: '' was given, expected a folder"],
    ),
    (
        ["run", "known", "--out", " "],
        ["argument --out: ' ' was given, expected a folder"],
    ),
    (
        ["run", "known", "--dry-run", "--jobs", "-3"],
        [
            "argument --jobs: '-3' was given, expected a number of processes, "
            "or 0"
        ],
    ),
    (
        ["run", "known", "--jobs", "two"],
        ["argument --jobs: 'two' was given, expected a number of processes"],
    ),
    (
        ["run", "known", "--seeds", "0"],
        ["argument --seeds: '0' was given, expected a number of seeds from 1"],
    ),
    (
        ["run", "known", "--seeds", "999999999999"],
        [
            "argument --seeds: '999999999999' was given, expected a number of "
            "seeds "
            "from 1 to 10000"
        ],
    ),
    (["run", "known", "--seeds", "9" * 5000], ["argument --seeds: '9999"]),
    (
        ["run", "known", "--scale", "huge"],
        [
            "argument --scale: invalid choice: 'huge'",
            "smoke",
            "normalnorm run --help",
        ],
    ),
    (["run", "known", "--arm", "c"], ["no arm 'c'", "known are a, b"]),
    (["run", "known", "--device", "nowhere"], ["'nowhere' is no device"]),
    (
        ["run", "known", "--device", "nowhere", "--dry-run"],
        ["'nowhere' is no device"],
    ),
    (
        ["run", "known", "--device", "meta"],
        ["the device 'meta' cannot be used here"],
    ),
    (["verify", "--device", ""], ["the device '' cannot be used here"]),
    (["verify", ""], ["no claim is called ''"]),
    (["verify", "--id", ""], ["no claim is called ''"]),
    (
        ["verify", "nn-yj-identity", "--id", "log1p-lower-bound"],
        ["two claims are named, 'nn-yj-identity' and 'log1p-lower-bound'"],
    ),
    (
        ["verify", "--part", "two"],
        ["argument --part: 'two' was given, expected the number of a part"],
    ),
    (
        ["compare", "nowhere", "nothing"],
        ["'nowhere' is neither a folder of results nor an arm", "RECIPE/ARM"],
    ),
    (
        ["compare", "", "known/a"],
        ["'' is neither a folder of results nor an arm"],
    ),
    (
        ["compare", "/no/such/folder", "known/a"],
        ["'/no/such/folder' is neither a folder of results nor an arm"],
    ),
    (
        ["compare", "no/such", "known/a"],
        [
            "'no/such' is neither a folder of results nor an arm",
            "no recipe is called 'no'",
        ],
    ),
    (
        ["compare", "file", "rows"],
        ["'file' is neither a folder of results nor an arm"],
    ),
    (
        ["compare", "rows", "known/a"],
        ["'rows' is a folder and 'known/a' an arm of a recipe: expected two"],
    ),
    (
        ["compare", "known/a", "known/c", "--scale", "smoke", "--out", "rows"],
        ["no arm 'c'", "known are a, b"],
    ),
    (["compare", "x" * 5000, "known/a"], ["xxx"]),
    (["lab", "--to", ""], ["the folder for the chapters is named ''"]),
    (["lab", "--to", " "], ["the folder for the chapters is named ' '"]),
    (["lab", "--to", "file"], ["file", "--to"]),
    (["lab", "--to", "file/sub"], ["file/sub", "--to"]),
    (["lab", "--jupyter", "'half"], ["--jupyter", "cannot be split"]),
    (["report"], ["recipe", "normalnorm report --help"]),
    (["report", ""], ["no recipe is called ''"]),
    (["nonsense"], ["'nonsense'", "normalnorm --help"]),
    ([], ["command"]),
    (["list", "--nonsense"], ["--nonsense"]),
]


@pytest.mark.parametrize(
    "arguments, words",
    REFUSED,
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_refused(place, arguments, words):
    said = refused(place, *arguments)
    assert all(word in said for word in words), said


def test_a_results_folder_of_the_environment_is_checked_too(place, monkeypatch):
    monkeypatch.setenv("NORMALNORM_RESULTS", "file")
    assert "file is not a folder" in refused(place, "list")
    monkeypatch.setenv("NORMALNORM_RESULTS", "rows")
    assert printed("report", "known")[0] == 0
    monkeypatch.setenv("NORMALNORM_RESULTS", "nothing yet")
    status, out, err = printed("report", "known")
    assert status == 0 and "no finished runs: normalnorm run known" in out


def test_the_empty_chapter(place):
    status, out, err = printed("lab", "", "--to", "copy", "--copy")
    assert (
        status == 2
        and "the chapter is named ''" in err
        and err.count("\n") == 1
    )


def test_a_wrong_chapter_is_found_out_before_anything_is_copied(place):
    before = everything(place)
    status, out, err = printed("lab", "three steps", "--to", "copy", "--copy")
    assert status == 2 and not out and "no chapter is called" in err
    assert everything(place) == before


def test_a_copy_that_was_put_aside_does_not_answer_to_the_name(
    place, monkeypatch
):
    opened = []
    monkeypatch.setattr(lab, "open_lab", lambda *a: opened.append(a) or 0)
    Path("copy").mkdir()
    Path("copy", "001_chapter.ipynb").write_text(
        '{"cells": [{"cell_type": "markdown", "source": ["# 1 · One step!"]}]}'
    )
    for _ in range(2):
        assert printed("lab", "one", "--to", "copy", "--fresh")[0] == 0
    assert Path("copy", "001_chapter.mine.ipynb").exists()
    assert opened == [(Path("copy"), "001_chapter.ipynb", [])] * 2


def test_what_is_no_notebook_does_not_stop_the_others(place):
    Path("copy").mkdir()
    for name, content in {
        "mine": "{",
        "list": "[]",
        "empty": '{"cells": []}',
        "deep": "[" * 100_000,
        "text": '{"cells": [{"source": 3}]}',
    }.items():
        Path("copy", f"{name}.ipynb").write_text(content)
    Path("copy", "001_chapter.ipynb").write_text("[" * 100_000)
    status, out, err = printed("lab", "two steps", "--to", "copy")
    assert (
        status == 0
        and not err
        and "1 chapters copied" in out
        and "001_chapter.ipynb" in out
    )
    assert (
        printed("lab", "two steps", "--to", "copy", "--fresh")[0] == 0
        and Path("copy", "001_chapter.mine.ipynb").exists()
    )
    with pytest.raises(lab.LabError, match="named ''"):
        lab.copy_chapters("")


def without(name):
    return lambda row: {key: value for key, value in row.items() if key != name}


DAMAGES = [
    (without("wall_seconds"), "wall_seconds"),
    (without("metrics"), "metrics"),
    (lambda row: row | {"metrics": []}, "metrics"),
    *(
        (lambda row, value=value: row | {"metrics": {"score": value}}, "score")
        for value in ("high", None, [1.0], {}, float("nan"), float("inf"), True)
    ),
    (lambda row: [row], "row"),
    (lambda row: None, "row"),
    ("{", "JSON"),
    ("", "JSON"),
    (b"\xff\xfe", "row"),
    ("[" * 100_000, "nested too deeply"),
    ('{"metrics":' * 50_000, "nested too deeply"),
]


@pytest.mark.parametrize("damage, words", DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_row_is_named(place, damage, words):
    """By each command that reads it; no traceback, no table with it; all
    count the others.
    """
    path = sorted(Path("rows").rglob("*-seed0-*.json"))[0]
    path.write_bytes(
        damage
        if isinstance(damage, bytes)
        else damage.encode()
        if isinstance(damage, str)
        else json.dumps(damage(json.loads(path.read_text()))).encode()
    )
    for arguments in (
        ("known/a", "known/b", "--scale", "smoke"),
        ("rows", "rows"),
    ):
        status, out, err = printed("compare", *arguments, "--out", "rows")
        assert (
            status == 1
            and not err
            and str(path) in out
            and words in out
            and "not counted" in out
        ), out
    status, out, err = printed("list", "--out", "rows")
    assert (
        status == 1
        and not err
        and "7 of 8" in out
        and "1 file is not counted" in out
        and str(path) in out
    )
    status, out, err = printed("report", "known", "--out", "rows")
    assert status == 1 and not err and str(path) in out and words in out
    assert re.search(r"\| b +\| 4 +\|", out) and re.search(
        r"\| a +\| 3 +\|", out
    ), "the others are shown"
    status, out, err = printed("run", "known", "--dry-run", "--out", "rows")
    assert (
        status == 0
        and not err
        and str(path) in out
        and "8 runs, 7 finished" in out
        and "cannot be used" in out
    )


def test_the_recipe_says_how_many_seeds(place):
    """The recipe has four at the scale smoke and says nothing of book, where
    three are usual; the option goes before both.
    """
    for arguments, runs in (
        (["--scale", "smoke"], 8),
        (["--scale", "book"], 6),
        (["--scale", "book", "--seeds", "5"], 10),
    ):
        status, out, _ = printed(
            "run", "known", "--dry-run", "--out", "new", *arguments
        )
        assert status == 0 and f"{runs} runs, 0 finished" in out, out
    status, _, err = printed("run", "known", "--out", "new")
    assert status == 0 and "[8/8] known smoke b seed 3" in err


def test_an_ambiguous_chapter_is_answered_with_numbers():
    titles = {
        "220_theory.newton.ipynb": "12 · One Newton step",
        "225_theory.curvature.ipynb": "13 · Can the Newton step fail?",
    }
    with pytest.raises(
        lab.LabError,
        match=re.escape(
            "'newton' names several chapters, take one by its number: 220 (One "
            "Newton step); 225 (Can the Newton step fail?)"
        ),
    ):
        lab.find_chapter("newton", titles)
    for number, file in (
        ("220", "220_theory.newton.ipynb"),
        ("13", "225_theory.curvature.ipynb"),
    ):
        assert lab.find_chapter(number, titles) == file


def test_rows_of_different_code_need_a_word(place):
    for arguments in (
        ["report", "known"],
        ["compare", "known/a", "known/b", "--scale", "smoke"],
    ):
        assert (
            printed(*arguments, "--out", "rows", "--any-code")[:2]
            == printed(*arguments, "--out", "rows")[:2]
        )
        assert printed(*arguments, "--out", "rows")[0] == 0
    path = sorted(Path("rows").rglob("*-seed0-*.json"))[0]
    row = json.loads(path.read_text())
    row |= {"source": "0" * len(row["source"])}
    path.write_text(json.dumps(row | {"digest": results.digest(row)}))
    for arguments in (
        ["report", "known"],
        ["compare", "known/a", "known/b", "--scale", "smoke"],
    ):
        assert (
            "--any-code" in refused(place, *arguments, "--out", "rows")
            and printed(*arguments, "--out", "rows", "--any-code")[0] == 0
        )


def test_a_run_that_cannot_begin_leaves_no_folder(place, known, monkeypatch):
    def run(*_, **__):
        raise ModuleNotFoundError(
            "training needs Lightning Fabric: pip install …",
            name="lightning_fabric",
        )

    monkeypatch.setattr(
        results,
        "recipes",
        lambda: {"known": dataclasses.replace(known, run=run)},
    )
    for out in ([], ["--out", "new/deep"], ["--out", "rows"]):
        if out[-1:] == ["rows"]:
            next(Path("rows").rglob("*-seed0-*.json")).unlink()
        before = everything(place)
        status, printed_out, err = printed("run", "known", *out)
        assert (
            status == 2
            and "pip install" in err.splitlines()[-1]
            and "Traceback" not in err
        )
        assert everything(place) == before
    monkeypatch.setattr(results, "recipes", lambda: {"known": known})
    assert (
        printed("run", "known", "--out", "new/deep")[0] == 0
        and Path("new/deep/known/smoke").is_dir()
    )


def test_a_broken_pipe_and_a_terminal_without_marks(place):
    code = (
        "import sys; from normalnorm.cli import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", "log1p-lower-bound"],
        env=env,
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 0
        and done.stdout.startswith("? log1p-lower-bound")
        and "Traceback" not in done.stderr
    ), done.stderr
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-c", code, "list"],
        env=env,
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writes)
    assert done.returncode not in (0, 1) and not done.stderr, done.stderr


@pytest.mark.parametrize("seed", range(8))
def test_random_arguments(place, monkeypatch, seed):
    """Each of 400 random commands ends with a status, at most one line of
    refusal, and no traceback.
    """
    monkeypatch.setattr(claims, "verify", lambda *_, **__: iter(()))
    monkeypatch.setattr(
        cli,
        "_usable",
        lambda device: device if device == "cpu" else cli_usable(device),
    )
    choose = random.Random(seed)
    values = [
        "",
        " ",
        "file",
        "file/sub",
        "rows",
        "new",
        "nowhere",
        "known",
        "known/a",
        "known/b",
        "known/c",
        "known/",
        "/a",
        "/",
        ".",
        "..",
        "-3",
        "0",
        "1",
        "2",
        "x",
        "cpu",
        "meta",
        "cuda:99",
        "smoke",
        "book",
        "paper",
        "nn-yj-identity",
        "é\u2028ß",
        "\udcff",
        "a\nb",
        "\0",
        "%s",
        "{}",
        "~",
        "*",
        "9" * 30,
        "n" * 300,
        "'",
        "001",
        "steps",
    ]
    options = [
        "--out",
        "--jobs",
        "--seeds",
        "--scale",
        "--arm",
        "--device",
        "--dry-run",
        "--part",
        "--id",
        "--json",
        "--mutants",
        "--to",
        "--copy",
        "--fresh",
        "--jupyter",
        "--version",
        "--help",
        "--",
        "-x",
        "--no-such",
        "--jobs=2=3",
        "--out=",
    ]
    commands = [
        "verify",
        "run",
        "list",
        "report",
        "compare",
        "lab",
        "",
        "nonsense",
    ]
    statuses = set()
    for _ in range(50):
        arguments = [
            choose.choice(commands),
            *choose.choices(values, k=choose.choice((0, 1, 1, 2))),
        ]
        for _ in range(choose.randrange(4)):
            arguments += [choose.choice(options), choose.choice(values)]
        if "run" in arguments and "--jobs" in arguments:
            arguments.append("--dry-run")  # no processes
        try:
            status, out, err = printed(*arguments)
        except BaseException as error:
            raise AssertionError(f"{arguments} raised {error!r}") from error
        statuses.add(status)
        assert status in (0, 2), (arguments, status, err)
        told = [
            line for line in err.split("\n") if line.startswith("normalnorm: ")
        ]
        assert "Traceback" not in err and (
            status == 0 or told == [err.split("\n")[-2]]
        ), (arguments, status, err)
    assert statuses == {0, 2}


cli_usable = cli._usable


def test_devices_that_cannot_be_used(monkeypatch):
    for device in ("meta", "nowhere", "", "cuda:9999", "xla"):
        with pytest.raises(ValueError, match="cannot be used here: ."):
            cli._usable(device)
    monkeypatch.setattr(
        torch, "ones", lambda *_, **__: (_ for _ in ()).throw(RuntimeError())
    )
    with pytest.raises(ValueError, match="cannot be used here: RuntimeError"):
        cli._usable("cpu")
