"""The command line and what people mistype: one line that says what was given
and what is expected, exit status 2, no traceback, nothing written.
"""

import contextlib
import errno
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import hypothesis
import pytest
import torch
from hypothesis import strategies

import normalnorm
from normalnorm import claims, cli, lab
from normalnorm.experiments import results
from normalnorm.names import usable
from tests.experiments.known import environment, known_recipe, printed
from tests.peers import installed


@pytest.fixture
def known(listed):
    "A recipe that costs nothing, alone."
    return listed(known_recipe())


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


@pytest.mark.parametrize("module", ["normalnorm", "normalnorm.cli"])
def test_as_a_module(module, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["normalnorm", "--version"])
    monkeypatch.delitem(sys.modules, "normalnorm.cli")
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(module, run_name="__main__")
    assert capsys.readouterr().out == f"normalnorm {normalnorm.__version__}\n"


REFUSED = [
    (["report", "known", "--out", "file"], ["file is not a folder", "--out"]),
    (
        ["compare", "known/a", "known/b", "--out", "file"],
        ["file is not a folder"],
    ),
    (["run", "known", "--out", "file"], ["file is not a folder"]),
    (
        ["run", "known", "--out", "file/sub/deep"],
        ["file is not a folder", "file/sub/deep"],
    ),
    (["report", "known", "--out", "nowhere"], ["there is no folder nowhere"]),
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
        ["run", "known", "--device", "meta"],
        ["the device 'meta' cannot be used here"],
    ),
    (["verify", "--device", ""], ["the device '' cannot be used here"]),
    (["verify", "--device", "cuda:9999"], ["cannot be used here"]),
    (["verify", "--device", "xla"], ["cannot be used here"]),
    (["verify", ""], ["no claim is called ''"]),
    (["verify", "nn-yj-identiti"], ["nn-yj-identity"]),
    (["verify", "--id", "nn-yj-identiti"], ["nn-yj-identity"]),
    (["verify", "--part", "9"], ["part 9"]),
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
        ["compare", "no/such", "known/a"],
        [
            "'no/such' is neither a folder of results nor an arm",
            "no recipe is called 'no'",
        ],
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
    (["lab", "--to", "file"], ["file", "--to"]),
    (["lab", "--to", "file/sub"], ["file/sub", "--to"]),
    (["lab", "--jupyter", "'half"], ["--jupyter", "cannot be split"]),
    (["report"], ["recipe", "normalnorm report --help"]),
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


@pytest.mark.parametrize(
    "name, words",
    [("three steps", "no chapter is called"), ("", "the chapter is named ''")],
)
def test_a_wrong_chapter_is_found_out_before_anything_is_copied(
    place, name, words
):
    assert words in refused(place, "lab", name, "--to", "copy", "--copy")


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
        "001_chapter": "[" * 100_000,
        "text": '{"cells": [{"source": 3}]}',
    }.items():
        Path("copy", f"{name}.ipynb").write_text(content)
    status, out, err = printed("lab", "two steps", "--to", "copy")
    assert (status, err) == (0, "")
    assert "1 chapters copied" in out
    assert "001_chapter.ipynb" in out
    assert printed("lab", "two steps", "--to", "copy", "--fresh")[0] == 0
    assert Path("copy", "001_chapter.mine.ipynb").exists()
    with pytest.raises(lab.LabError, match="named ''"):
        lab.copy_chapters("")


@pytest.mark.parametrize(
    "damage, words",
    [("[" * 100_000, "nested too deeply"), (b"\xff\xfe", "row")],
    ids=["deep", "binary"],
)
def test_a_damaged_row_is_named(place, damage, words):
    """By each command that reads it; no traceback, no table with it; all
    count the others. (Each kind of damage: test_results.py.)
    """
    path = sorted(Path("rows").rglob("*-seed0-*.json"))[0]
    path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    one = "1 file is not counted"
    for command, ended, told in (
        ("compare known/a known/b --scale smoke", 1, [words, one]),
        ("compare rows rows", 1, [words, "not counted"]),
        ("list", 1, ["7 of 8", one]),
        ("report known", 1, [words, r"\| b +\| 4 +\|", r"\| a +\| 3 +\|"]),
        (
            "run known --dry-run",
            0,
            ["8 runs, 7 finished", "cannot be used"],
        ),
    ):
        status, out, err = printed(*command.split(), "--out", "rows")
        assert (status, err) == (ended, ""), command
        for said in (re.escape(str(path)), *told):
            assert re.search(said, out), (command, said)


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
        assert not Path("new").exists()
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


@pytest.mark.parametrize(
    "command", ["report known", "compare known/a known/b --scale smoke"]
)
def test_rows_of_different_code_need_a_word(place, command):
    arguments = *command.split(), "--out", "rows"
    status, before, _ = printed(*arguments)
    assert printed(*arguments, "--any-code") == (status, before, "")
    assert status == 0
    path = min(Path("rows").rglob("*-seed0-*.json"))
    row = results.read_row(path)
    row["source"] = "0" * len(row["source"])
    row["digest"] = results.digest(row)
    path.write_text(json.dumps(row))
    assert "--any-code" in refused(place, *arguments)
    assert printed(*arguments, "--any-code")[0] == 0


@pytest.mark.parametrize("out", [[], ["--out", "new/deep"], ["--out", "rows"]])
def test_a_run_that_cannot_begin_leaves_no_folder(place, listed, out):
    missing = ModuleNotFoundError(
        "training needs Lightning Fabric: pip install …",
        name="lightning_fabric",
    )
    listed(known_recipe(Mock(side_effect=missing)))
    next(Path("rows").rglob("*-seed0-*.json")).unlink()
    before = everything(place)
    status, _, err = printed("run", "known", *out)
    assert status == 2
    assert "pip install" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert everything(place) == before
    listed(known_recipe())
    assert printed("run", "known", *out)[0] == 0


@pytest.mark.parametrize("words", [["--dry-run"], ["--jobs", "0"]])
def test_a_missing_library_is_said_once(place, listed, monkeypatch, words):
    "In a dry run, too, and before any process is started."
    arms = {"a": {"data": "digits", "train": {}}}
    listed(known_recipe(scales={"smoke": arms, "book": arms}, compare=()))
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    status, out, err = printed("run", "known", "--out", "new", *words)
    assert status == 2 and (out + err).count("needs Lightning Fabric: pip") == 1


def test_a_folder_that_cannot_be_written(place, monkeypatch):
    error = OSError(errno.EROFS, "Read-only file system", "rows/.checkpoints")
    monkeypatch.setattr(results, "run_recipe", Mock(side_effect=error))
    said = refused(place, "run", "known", "--out", "rows")
    assert "rows/.checkpoints cannot be written (Read-only" in said
    assert said.endswith("give another folder with --out\n")


def test_a_terminal_without_marks():
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(terminal):
        assert cli.main(["verify", "log1p-lower-bound"]) == 0
    terminal.seek(0)
    assert terminal.read().startswith("? log1p-lower-bound")


def test_a_broken_pipe():
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", "normalnorm", "list"],
        stdout=writes,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    os.close(writes)
    assert done.returncode not in (0, 1)
    assert not done.stderr


COMMANDS = [*"verify run list report compare lab nonsense".split(), ""]
WORDS = [
    *"file file/sub rows new nowhere known known/a known/c / . ..".split(),
    *"-3 0 1 2 x cpu meta cuda:99 smoke book nn-yj-identity 001 steps".split(),
    *"%s {} ~ * ' -- -x --no-such --jobs=2=3 --out= --help --version".split(),
    *"--out --jobs --seeds --scale --arm --device --dry-run --part".split(),
    *"--id --json --mutants --to --copy --fresh --jupyter".split(),
    *("", " ", "é\u2028ß", "\udcff", "a\nb", "\0", "9" * 30, "n" * 300),
]


@hypothesis.settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    strategies.sampled_from(COMMANDS),
    strategies.lists(strategies.sampled_from(WORDS), max_size=6),
)
def test_random_arguments(place, monkeypatch, command, words):
    "Each ends with a status, at most a line of refusal, and no traceback."
    monkeypatch.setattr(claims, "verify", lambda *_, **__: iter(()))
    # no processes
    dry = ["--dry-run"] * (command == "run" and "--jobs" in words)
    status, out, err = printed(command, *words, *dry)
    assert status in (0, 2), err
    told = [line for line in err.split("\n") if line.startswith("normalnorm: ")]
    assert "Traceback" not in err
    assert status == 0 or told == [err.split("\n")[-2]], err


def test_a_device_that_fails_without_words(monkeypatch):
    monkeypatch.setattr(torch, "ones", Mock(side_effect=RuntimeError))
    with pytest.raises(ValueError, match="cannot be used here: RuntimeError"):
        usable("cpu")


@pytest.mark.parametrize(
    "library, name, line",
    [
        ("timm", "resnet18", r"bn1 +BatchNormAct2d|bn1 +BatchNorm2d"),
        ("transformers", "llama", r"norm +LlamaRMSNorm +→  RootMeanSquareNorm"),
    ],
)
def test_what_becomes_of_an_architecture(library, name, line):
    installed(library)
    status, out, err = printed("convert", name)
    assert (status, err) == (0, "") and re.search(line, out), out


def test_an_unknown_architecture_and_no_library(monkeypatch):
    installed("timm")
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, _, err = printed("convert", "resnet81")
    assert status == 2 and "known to timm: did you mean resnet18" in err
    monkeypatch.setitem(sys.modules, "timm", None)
    status, _, err = printed("convert", "resnet18")
    assert status == 2 and "neither is installed here: pip install" in err


def test_a_library_that_does_not_fit_is_said(monkeypatch):
    broken = RuntimeError("operator torchvision::nms does not exist")
    monkeypatch.setattr(
        cli.importlib, "import_module", Mock(side_effect=broken)
    )
    status, _, err = printed("convert", "resnet18")
    assert status == 2 and "timm is installed, but cannot be used with" in err
