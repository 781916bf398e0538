"""How results are kept: killed, interrupted, doubled and starved of disk;
tables with known answers; the command line.
"""

import dataclasses
import errno
import functools
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.stats
import torch

from normalnorm.experiments import data, results, spread, tables
from normalnorm.experiments.idx import fashion_folder
from normalnorm.experiments.results import (
    Published,
    Recipe,
    ResultsError,
    UnknownName,
)
from normalnorm.experiments.statistics import contrast
from tests.experiments.known import (
    KNOWN,
    ROOT,
    best_at_two_first,
    known_numbers,
    known_recipe,
    missing,
    printed,
    python,
)
from tests.refusals import refusals
from tools.kills import timeless


def test_rows_are_read_without_their_recipe(tmp_path):
    "By arm, in the order of the seeds; what is missing or damaged is said."
    with pytest.raises(ResultsError, match="normalnorm run known --scale"):
        results.by_arm("known", "smoke", tmp_path)
    results.run_recipe(known_recipe(), "smoke", [3, 0, 1], out=tmp_path)
    assert {
        arm: [(row["seed"], row["metrics"]["score"]) for row in rows]
        for arm, rows in results.by_arm("known", "smoke", tmp_path).items()
    } == {arm: [(k, of[k]) for k in (0, 1, 3)] for arm, of in KNOWN.items()}
    min(tmp_path.rglob("*.json")).write_text("{")
    with pytest.raises(ResultsError, match="it is no JSON"):
        results.by_arm("known", "smoke", tmp_path)


def mean_and_error(values, sign=""):
    return f"{np.mean(values):{sign}.2f} ± {scipy.stats.sem(values):.2f}"


def told(recipe, out):
    "The report, with one space for each stretch of white."
    return " ".join(tables.report(recipe, out).split())


def test_what_a_report_says_beside_its_numbers(tmp_path):
    "Means, errors, intervals and p values: the chapter."
    results.run_recipe(known_recipe(), "smoke", out=tmp_path)
    text = told(known_recipe(), tmp_path)
    assert not missing(
        text,
        "Scale smoke: digits data, 8 runs, seeds 0–3",
        "No arm was tuned",
        # all differences positive: 2 of 16 choices of signs
        "| 0.125 |",
        # every seed is shown
        *(" | ".join(f"{v:.2f}" for v in of) for of in KNOWN.values()),
    )
    assert "Scale book" not in text
    tuned = "The rates are those of pilot runs"
    said = told(known_recipe(tuned=tuned), tmp_path)
    assert f"{tuned}." in said and "No arm was tuned" not in said


def test_arms_with_different_seeds_are_paired_by_those_that_both_have(tmp_path):
    """An arm with one seed has a sentence and no line; a seed that an arm lacks
    is an empty place.
    """
    known = KNOWN | {"c": [7.0, 8.0, 9.0, 10.0]}
    recipe = known_recipe(
        lambda config, seed, arm, **_: {"metrics": {"score": known[arm][seed]}},
        scales={"smoke": {arm: {"data": "digits"} for arm in known}},
        compare=(("a", "b"), ("a", "c")),
    )
    results.run_recipe(recipe, "smoke", out=tmp_path)
    for arm, seed in (("b", 0), ("c", 1), ("c", 2), ("c", 3)):
        next(tmp_path.rglob(f"{arm}-seed{seed}-*.json")).unlink()
    text = told(recipe, tmp_path)
    d = np.subtract(known["b"], known["a"])[1:]
    assert not missing(
        text,
        "one seed only, so no standard error and no line in the table: c ",
        "seeds 0–3 (a); 1–3 (b)",
        "| score | seed 0 | seed 1 | seed 2 | seed 3 |",
        "| a | 1.00 | 2.00 | 4.00 | 5.00 | | b | | 2.50 | 5.50 | 9.00 |",
        f"| a | 4 | {mean_and_error(known['a'])} |",
        f"| b | 3 | {mean_and_error(known['b'][1:])} |",
        f"| b − a | score | 3 | {mean_and_error(d, '+')} |",
    )
    assert "c − a" not in text
    asked = tables.effects(recipe, "smoke", tmp_path)
    assert (
        asked.values(("a", "b"), "score").tolist()
        == d.tolist()
        == [-v for v in asked.values(("b", "a"), "score")]
        == contrast(
            results.rows(recipe, "smoke", tmp_path), {"b": 1, "a": -1}, "score"
        ).tolist()
    )


test_printed_tables_that_are_not_kept = refusals(
    [
        ("labatie2020", "CIFAR", "labatie2020.*labatie2021"),
        (2021, "CIFAR", "2021.*labatie2021"),
        ("zz", "CIFAR", "known are eftekhari2025, labatie2021"),
        ("../labatie2021", "CIFAR", "no tables are kept"),
        ("labatie2021", "CIFER", "CIFER.*CIFAR"),
    ],
    tables.printed_table,
)


def test_a_printed_table_is_the_callers_own():
    tables.printed_table("labatie2021", "CIFAR")["cifar10, BN"].clear()
    assert len(tables.printed_table("labatie2021", "CIFAR")["cifar10, BN"]) == 5


def test_a_printed_number_without_an_error_has_none():
    ((mean, error),) = tables.printed_table("eftekhari2025", "single numbers")[
        "reviewer's script"
    ]["BN"]
    assert mean == 90.25 and np.isnan(error)


def test_the_device_that_the_environment_names(tmp_path, monkeypatch):
    "One that is not there is refused; a stand-in for one that is."
    run = Mock(return_value={"metrics": {"score": 1.0}})
    monkeypatch.setenv("NORMALNORM_DEVICE", "cuda:7")
    recipe, given = known_recipe(run), {"seeds": 2, "out": tmp_path}
    with pytest.raises(ValueError, match="DEVICE: the device 'cuda:7' cannot"):
        results.run_recipe(recipe, "smoke", **given)
    assert run.mock_calls == list(tmp_path.iterdir()) == []
    monkeypatch.setattr(torch, "ones", Mock())
    monkeypatch.setattr(torch.cuda, "get_device_name", "a GPU, {}".format)
    found = results.run_recipe(recipe, "smoke", **given)
    assert [call.kwargs["device"] for call in run.mock_calls] == ["cuda:7"] * 4
    assert "On a GPU, cuda:7 (" in tables.caption(recipe, "smoke", found)


def test_one_seed_makes_no_table(tmp_path):
    results.run_recipe(known_recipe(), "smoke", seeds=1, out=tmp_path)
    text = tables.report(known_recipe(), tmp_path)
    assert "one seed only" in text and "±" not in text.split("over seeds")[1]
    with pytest.raises(ValueError, match="one seed"):
        tables.table(
            known_recipe(), results.rows(known_recipe(), "smoke", tmp_path)
        )
    assert "no finished runs" in tables.report(
        known_recipe(), tmp_path / "empty"
    )


def test_failed_runs_leave_nothing_and_are_made_by_the_next_command(tmp_path):
    outcome, cut = {"metrics": {"score": 0.0}}, RuntimeError("power cut")
    run = Mock(side_effect=[outcome, outcome, outcome, cut])
    with pytest.raises(RuntimeError, match="power cut"):
        results.run_recipe(known_recipe(run), "smoke", out=tmp_path)
    assert len(list(tmp_path.rglob("*.json"))) == 3
    found = results.run_recipe(known_recipe(), "smoke", out=tmp_path)
    assert [row["metrics"]["score"] for row in found].count(0.0) == 3


def test_rows_of_other_configurations_leave_the_table(tmp_path):
    results.run_recipe(known_recipe(), "smoke", out=tmp_path)
    changed = known_recipe(
        scales={
            "smoke": {
                arm: {"data": "digits", "arm": arm, "lr": 1} for arm in KNOWN
            }
        }
    )
    for files in (8, 0):  # by themselves, packed
        assert results.rows(changed, "smoke", tmp_path) == []
        assert "8 rows of other configurations are left out" in tables.report(
            changed, tmp_path
        )
        assert results.pack("known", "smoke", tmp_path) == files


def _edited(signed=False, **fields):
    """How the text of a row gets other fields; `...` takes one away; `signed`:
    its digest is right again.
    """

    def edit(text):
        row = {
            name: value
            for name, value in (json.loads(text) | fields).items()
            if value is not ...
        }
        if signed:
            row["digest"] = results.digest(row)
        return json.dumps(row)

    return edit


def _remake(file, **fields):
    file.write_text(_edited(signed=True, **fields)(file.read_text()))


BAD = {
    "half": (lambda t: t[: len(t) // 2], "not a row.*no JSON.*delete it"),
    "binary": (lambda t: "\x00\x00", "not a row.*no JSON"),
    "list": (lambda t: "[]", "holds a list: expected a dictionary"),
    "deep": (lambda t: "[" * 200_000, "nested too deeply|no JSON"),
    "deep and closed": (
        lambda t: '{"schema":' + "[" * 200_000 + "]" * 200_000 + "}",
        "nested too deeply|no JSON|`schema`",
    ),
    "only a name": (
        lambda t: '{"schema":4,"recipe":"known"}',
        "metrics.*wall_seconds, digest missing",
    ),
    **{
        f"{name} missing": (_edited(**{name: ...}), f"{name} missing")
        for name in ("wall_seconds", "metrics", "backend", "digest")
    },
    "newer": (
        _edited(schema=results.SCHEMA + 1),
        "newer normalnorm .schema 5, this one knows 4.*install a newer",
    ),
    "calls itself old, without a digest": (
        _edited(schema=2, digest=..., metrics={"score": 77.0}),
        "`schema` is 2: expected 4, for older rows",
    ),
    "without what its recipe shows": (
        _edited(True, metrics={"other": 1.0}),
        "lacks the metrics score, which the recipe known shows: delete it",
    ),
    "other scale": (
        _edited(True, scale="book"),
        "folder called known/book: it was moved",
    ),
    **{
        f"{name} {value!r}": (_edited(signed, **{name: value}), words)
        for signed, name, value, words in (
            (False, "schema", ..., "`schema` is nothing"),
            (False, "schema", True, "`schema` is True"),
            (True, "schema", 3, "`schema` is 3: expected 4, for older rows"),
            (False, "wall_seconds", "20", "is '20': expected a finite number"),
            (False, "wall_seconds", math.nan, "`wall_seconds` is nan"),
            (False, "wall_seconds", -1, "`wall_seconds` is -1"),
            (
                False,
                "metrics",
                None,
                "`metrics` is None: expected a dictionary",
            ),
            (False, "metrics", {}, "`metrics` is empty"),
            (False, "seed", "0", "`seed` is '0': expected a whole number"),
            (False, "config", [], "`config` is ..: expected a dictionary"),
            (False, "config", {"arm": "a"}, "`data` in `config`"),
            (False, "digest", None, "`digest` is None: expected a text"),
            (True, "drawn_hash", 7, "is 7: expected a text or null"),
            (True, "processor", None, "`processor` is None: expected a text"),
            (True, "processes", 0, "is 0: expected a whole number above 0"),
        )
    },
    **{
        f"metric {value!r}": (
            _edited(metrics={"score": value}),
            "the metric `score` is .*: expected a finite number",
        )
        for value in (None, "1.0", True, math.nan, math.inf)
    },
    **{
        f"afterwards {value!r}": (
            _edited(True, afterwards=value),
            "`afterwards` is .*: expected, for fields of this row, how one",
        )
        for value in (["processor"], {"processor": None}, {"weather": "fine"})
    },
    **{
        f"edited: {fields}": (
            _edited("afterwards" in fields, **fields),
            f"`{what}` is .* something was edited",
        )
        for what, fields in (
            ("hash", {"config": {"data": "digits", "arm": "c"}}),
            ("hash", {"arm": "b"}),
            ("hash", {"seed": 5}),
            ("hash", {"seed": None, "afterwards": {"seed": "forgotten"}}),
            ("digest", {"metrics": {"score": 77.0}}),
            ("digest", {"wall_seconds": 7.5}),
            ("digest", {"note": ""}),
            ("digest", {"digest": "0" * 64}),
        )
    },
}


@pytest.fixture
def known(tmp_path, listed):
    "Eight rows, of a recipe that the package seems to have, in a folder."
    results.run_recipe(listed(known_recipe()), "smoke", out=tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", BAD)
def test_unusable_rows_are_said_and_hide_no_others(case, known):
    """Each kind of damage: file, field, given and expected; list, report,
    forecast and comparisons count the others, `run` refuses, nothing is
    overwritten.
    """
    damage, message = BAD[case]
    file = min(known.rglob("*.json"))
    content = damage(file.read_text())
    file.write_text(content)
    with pytest.raises(ResultsError, match=message) as error:
        results.rows("known", "smoke", known)
    assert str(file) in str(error.value)
    assert len(str(error.value)) < 600
    assert [*map(str, tables.problems(known))] == [str(error.value)]
    for text, left in (
        (tables.listing(known), "7 of 8"),
        (tables.report("known", known), "| a   | 3     |"),
        (tables.forecast("known", "smoke", out=known), "8 runs, 7 finished"),
        (tables.compare("known/a", "known/b", "smoke", known), "seeds 1–3"),
    ):
        assert "1 file is not counted" in text
        assert text.count(str(file)) == 1
        assert left in text
    if "lacks" not in message:  # a whole row, of a recipe that showed less
        with pytest.raises(ResultsError, match=message):
            results.run_recipe("known", "smoke", out=known)
        text = tables.compare(str(known), str(known))
        assert "2 files are not counted" in text
        assert ": 7 common runs" in text
    assert file.read_text() == content


def test_no_turned_bit_of_a_row_changes_what_is_read(known):
    """Of 400 bits, each turned alone: the row is refused, or what is read is
    the same (an exponent's e for an E). At least 9 of 10 are refused.
    """
    file = sorted(known.rglob("*.json"))[0]
    whole, row = file.read_bytes(), results.read_row(file)
    generator, refused = np.random.default_rng(0), 0
    for bit in generator.integers(0, 8 * len(whole), 400):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            assert results.read_row(file) == row, bit
        except ResultsError as error:
            refused += 1
            assert str(file) in str(error)
    assert refused > 360


def test_what_was_added_to_rows_afterwards_is_said(known):
    text = tables.report("known", known)
    for file in sorted(known.rglob("*.json"))[:3]:
        _remake(file, processor=None, afterwards={"processor": "not recorded"})
    said = tables.report("known", known)
    line = (
        "scale smoke: not written with the runs: processor (not "
        "recorded), 3 rows\n\n"
    )
    assert said.count(line) == 1
    assert (
        said.replace(line, "").replace(", unknown), torch", "), torch") == text
    )


def _drawing(run=known_numbers, **more):
    "Each seed draws its own 50 digits, and the arms of a seed the same."
    return known_recipe(
        run,
        scales={
            "smoke": {
                arm: {"data": "digits", "images": 50, **more} for arm in KNOWN
            }
        },
        seeds={"smoke": 3},
    )


def test_a_row_names_the_examples_that_were_drawn(tmp_path):
    """Rows of one seed that drew other examples make no pair. (That the hashes
    are those of committed rows: below.)
    """
    recipe = _drawing(draw=True)
    found = results.run_recipe(recipe, "smoke", out=tmp_path)
    assert len({row["drawn_hash"] for row in found}) == 3
    for drawn, words in (
        (None, "`drawn_hash` is None, and by its configuration it draws"),
        (
            "0" * 64,
            "have the seed 0 and drew different(.|\n)*no pair: delete the",
        ),
    ):
        _remake(min(tmp_path.rglob("*.json")), drawn_hash=drawn)
        with pytest.raises(ResultsError, match=words):
            results.rows(recipe, "smoke", tmp_path, any_code=True)


def test_a_recipe_that_draws_of_its_own_says_what(tmp_path):
    'Without a "draw" in the configuration, so in no identity either.'

    def run(config, seed, arm, **_):
        return {
            "metrics": {"score": 1.0},
            "drawn_hash": results.drawn_hash(config | {"draw": True}, seed),
        }

    ours, told = (
        results.run_recipe(recipe, "smoke", out=tmp_path / str(number))
        for number, recipe in enumerate((_drawing(run), _drawing(draw=True)))
    )
    for a, b in zip(ours, told, strict=True):
        assert a["drawn_hash"] == b["drawn_hash"]
        assert a["hash"] != b["hash"]
    _remake(min((tmp_path / "0").rglob("*.json")), drawn_hash="0" * 64)
    with pytest.raises(ResultsError, match="drew different"):
        results.rows(_drawing(run), "smoke", tmp_path / "0")


def test_what_may_differ_in_one_table(known):
    """Also what a kernel was made for that computed nothing. (What may not
    differ: the chapter.)
    """
    for number, file in enumerate(sorted(known.rglob("*.json"))):
        _remake(
            file,
            python=f"3.{number}",
            commit=f"{number}" * 40,
            processor=f"make {number}",
            backend="eager",
            kernel=f"vectors of {number}",
        )
    assert len(results.rows("known", "smoke", known)) == 8
    assert "make 7" in tables.report("known", known)


def test_all_bad_rows_are_named_at_once_and_a_copy_counts_once(known):
    a, b, *_ = sorted(known.rglob("*.json"))
    copy = a.with_name("a-seed4-0123456789ab.json")
    copy.write_text(a.read_text())
    b.write_text("{")
    with pytest.raises(ResultsError) as error:
        results.rows("known", "smoke", known)
    said = str(copy), str(b), f"belongs in a file called {a.name}"
    assert not missing(str(error.value), *said)
    assert "2 files are not counted" in tables.report("known", known)
    assert "7 of 8" in tables.listing(known)
    assert len(results.rows("known", "smoke", known, usable_only=True)) == 7


def test_rows_that_cannot_be_opened_and_folders_that_are_files(known):
    row, file = min(known.rglob("*.json")), known / "a-file"
    row.unlink()
    row.mkdir()
    file.touch()
    no_folder = "a-file is a file: expected the folder of results"
    for use, words in (
        (lambda: results.read_row(row), "cannot be read"),
        (lambda: tables.report("known", file), no_folder),
        (lambda: tables.listing(file), no_folder),
        (lambda: results.rows("known", "smoke", file), no_folder),
    ):
        with pytest.raises(ResultsError, match=words):
            use()


# ---- what made them ----


def test_hash_of_the_package_counts_native_sources(tmp_path, monkeypatch):
    """By hand, over the files of a package; another byte in the kernel is
    another code.
    """
    sources = {"a.py": "1", "experiments/results.py": "", "layers/b.cpp": "2"}
    by_hand = hashlib.sha256()
    for name, content in sources.items():
        by_hand.update(f"{name}\0{content}".encode())
    others = {"py.typed": "no source", "checks/a.py": "made", "_modidx.py": ""}
    for name, content in {**sources, **others}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(
        results, "__file__", str(tmp_path / "experiments/results.py")
    )
    anew = results.source_hash.__wrapped__
    assert anew() == by_hand.hexdigest()[:12]
    (tmp_path / "layers/b.cpp").write_text("3")
    assert anew() != by_hand.hexdigest()[:12]


def test_rows_say_what_computed_their_layers():
    """In a process of its own: no layers, the definition, the kernel where
    there is one; looking loads nothing.
    """
    program = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
import torch
from normalnorm.experiments import results
seen = [results.provenance()]
backends, native = (importlib.import_module(f"normalnorm.layers.{name}")
                    for name in ("backends", "engines.native"))
def look(device="cpu"):
    before = native._library.cache_info().currsize
    seen.append(results.provenance(device))
    assert native._library.cache_info().currsize == before
look()
# float64: the kernel is not asked
backends.normality_norm(torch.randn(5, 3, dtype=torch.float64), (0,))
look()
for chosen in ("eager", "compiled", "auto"):
    with backends.set_backend(chosen):
        if chosen != "compiled":
            backends.normality_norm(torch.randn(5, 3), (0,))
        look()
look("cuda")
print(json.dumps([[s["backend"] for s in seen], seen[-2]["kernel"],
                  native.available(), seen[-1]["instructions"],
                  seen[-1]["processor"], seen[-1]["source"]]))
"""
    backends, kernel, native, instructions, processor, source = json.loads(
        python("-c", program).stdout
    )
    assert (
        backends[:5] == [None, None, None, "eager", "compiled"]
        and (backends[5] == "native") == native
        and backends[6] == "compiled"
    )
    assert (
        re.fullmatch(
            r"vectors of (4|8|16)(, fused multiply-add)?(, tables)?", kernel
        )
        if native
        else kernel is None
    )
    assert (
        instructions == torch.backends.cpu.get_cpu_capability()
        and processor
        and source == results.source_hash()
    )
    information = Path("/proc/cpuinfo")
    if information.exists() and "model name" in information.read_text():
        assert f": {processor}\n" in information.read_text()


def _called(source, backend):
    "What `codes` says of rows of this process."
    way = " (some way)" if backend == "native" else ""
    return (
        f"source {source}, torch {torch.__version__}, CPU with "
        f"{torch.backends.cpu.get_cpu_capability()}, threads: "
        f"{torch.get_num_threads()}, backend {backend}{way}"
    )


def _made(monkeypatch, out, seeds, source, backend, arms=None):
    with monkeypatch.context() as m:
        m.setattr(results, "source_hash", lambda: source)
        m.setattr(results, "_computed", lambda device: (backend, "some way"))
        results.run_recipe("known", "smoke", seeds, out, arms=arms)


@pytest.mark.parametrize(
    "others", [("111111111111", "native"), ("000000000000", "eager")]
)
def test_rows_of_different_code_make_no_table_unless_asked(
    others, tmp_path, monkeypatch, listed
):
    listed(known_recipe())
    ours = "000000000000", "native"
    _made(monkeypatch, tmp_path, 2, *ours)
    assert "codes in one table" not in tables.report("known", tmp_path)
    _made(monkeypatch, tmp_path, 4, *others)
    arms = "known/a", "known/b", "smoke", tmp_path
    for use in (
        lambda: tables.compare(*arms),
        lambda: tables.report("known", tmp_path),
        lambda: results.by_arm("known", "smoke", tmp_path),
        lambda: results.rows("known", "smoke", tmp_path, every=True),
        lambda: results.rows("known", "smoke", tmp_path),
    ):
        with pytest.raises(ResultsError, match="different code") as error:
            use()
        assert not missing(
            str(error.value),
            f"{_called(*ours)}: 4 rows",
            f"{_called(*others)}: 4 rows",
            "any_code=True",
        )
    assert re.search(
        r"a-seed0-\w+\.json(.|\n)*another folder", str(error.value)
    )
    assert len(results.rows("known", "smoke", tmp_path, any_code=True)) == 8
    assert "8 of 8" in tables.listing(tmp_path)
    assert (
        f"rows of 2 codes in one table: {_called(*ours)} (4); "
        in tables.report("known", tmp_path, any_code=True)
    )
    assert "seeds 0–3" in tables.compare(*arms, any_code=True)


def test_arms_of_one_code_compare(tmp_path, monkeypatch, listed):
    """Rows of other arms do not keep two arms from being compared. Of two
    folders it is said what made their rows.
    """
    listed(known_recipe())
    one, two = tmp_path / "one", tmp_path / "two"
    native = [_called(digit * 12, "native") for digit in "01"]
    for out, arm, digit in (
        (one, "a", 0),
        (one, "b", 0),
        (two, "a", 0),
        (two, "b", 1),
    ):
        _made(monkeypatch, out, 4, str(digit) * 12, "native", [arm])
    assert "seeds 0–3" in tables.compare("known/a", "known/a", "smoke", two)
    with pytest.raises(
        ResultsError, match="the two arms were made by different code"
    ):
        tables.compare("known/a", "known/b", "smoke", two)
    text = tables.compare(str(one), str(two))
    assert f"{one}: {native[0]}\n" in text
    assert f"{two}: {native[0]}; {native[1]}\n" in text


def test_rows_are_found_when_they_are_packed(known):
    """Read, reported and not run again; a damaged line hides no other, and a
    row beside them counts.
    """
    before, told = (
        results.scan("known", "smoke", known).rows,
        tables.report("known", known),
    )
    files = {path: path.read_bytes() for path in before}
    assert results.pack("known", "smoke", known) == len(before) == 8
    assert results.pack("known", "smoke", known) == 0
    assert not any(path.exists() for path in files)
    assert results.scan("known", "smoke", known).rows == before
    assert tables.report("known", known) == told
    for path, content in files.items():
        assert results.recorded(path) and results.read_row(path) == before[path]
        assert (
            json.loads(results.packed(path.parent)[path.name])["sha256"]
            == hashlib.sha256(content).hexdigest()
        )
    results.run_recipe(known_recipe(), "smoke", out=known)
    assert not any(path.exists() for path in files)
    packed = min(files).with_name(results.PACKED)
    lines = packed.read_text().splitlines(keepends=True)
    for damaged, words in (
        ("something else\n", r"rows.jsonl, line 3 .*no JSON"),
        (lines[2][:-9] + "\n", r"rows.jsonl, a-seed2.* .*no JSON"),
        (lines[2].replace('"row"', '"raw"'), "no dictionary with a `row`"),
        (
            lines[2].replace('"seed":2', '"seed":7'),
            r"rows.jsonl, a-seed2.*something was edited",
        ),
    ):
        packed.write_text("".join([*lines[:2], damaged, *lines[3:]]))
        rows, problems = results.scan("known", "smoke", known)
        assert len(rows) == 7 and len(problems) == 1
        assert re.search(words, str(problems[0]))
        assert [*map(str, tables.problems(known))] == [*map(str, problems)]
    packed.write_text("".join([*lines[:2], *lines[3:]]))
    path = min(files).with_name(json.loads(lines[2])["name"])
    assert not results.recorded(path)
    path.write_bytes(files[path])
    assert results.scan("known", "smoke", known).rows == before


@pytest.mark.book
@pytest.mark.skipif(
    not fashion_folder().is_dir(),
    reason="Debian's dataset-fashion-mnist is not installed",
)
def test_the_data_of_committed_rows_are_those_of_today(monkeypatch):
    """The sets, and of every row whose images are drawn by its seed, these;
    the identities are those of the files' names and of the present
    configurations.
    """
    # rows come by recipe: not the whole set again for each seed
    monkeypatch.setattr(data, "dataset", functools.lru_cache(2)(data.dataset))
    data_hash = functools.lru_cache(data.data_hash)
    committed = {}
    for file in sorted((ROOT / "results").rglob(results.PACKED)):
        *_, recipe, scale = file.parent.parts
        rows, problems = results.scan(recipe, scale, file.parents[2])
        assert not problems
        committed |= rows
    assert len(committed) == 3628
    for path, row in committed.items():
        name = row["config"]["data"]
        draws = "draw" in row["config"] or row["recipe"][:10] == "proxy-norm"
        assert row["data_hash"] == (data_hash(name) if name else "")
        assert draws == (row["drawn_hash"] is not None), path
        if draws:
            drawn = {"first": row["config"]["images"], "draw": row["seed"]}
            assert row["drawn_hash"] == data_hash(name, **drawn), path


def _tuned(grid):
    "Arm b is better in validation at x = 2, and in test at x = 3."

    def run(config, seed, arm, **_):
        return {
            "metrics": {
                "score": float(config["x"] * 10 + seed),
                "validation_last": {1: 0.0, 2: 5.0, 3: 1.0}[config["x"]]
                + seed % 2,
            }
        }

    return known_recipe(
        run,
        scales={"smoke": {arm: {"data": "digits", "x": 1} for arm in "ab"}},
        grid=grid,
    )


test_what_is_unknown_or_makes_no_experiment_is_refused = refusals(
    [
        (
            lambda: results.run_recipe("first-experimnt"),
            "^no recipe is called 'first-experimnt': did you mean "
            "first-experiment.$",
        ),
        (
            lambda: results.run_recipe("first-experiment", "smok"),
            "did you mean smoke",
        ),
        (
            lambda: results.run_recipe("first-experiment", arms=["ResNet BNM"]),
            "did you mean.*ResNet BNN",
        ),
        (lambda: tables.report("experiment"), "first-experiment"),
        (
            lambda: tables.compare(
                "first-experiment/ResNet BNM", "first-experiment/ResNet BN"
            ),
            "did you mean ResNet BN, ResNet BNN.*two folders",
        ),
        (
            lambda: known_recipe(compare=(("a", "c"),)),
            "`compare` names the arm 'c', which no scale has: known are a, b",
        ),
        (
            lambda: results.run_recipe("first-experiment", seeds=0),
            "at least one run",
        ),
        *(
            (lambda grid=grid: _tuned(grid), "same grid, or none")
            for grid in (
                {"a": {"x": (1, 2)}},
                {"a": {"x": (1, 2)}, "b": {"x": (1, 2, 3)}},
                {"a": {"x": (1,)}, "b": {"y": (1,)}},
            )
        ),
        (lambda: _tuned({"c": {"x": (1,)}}), "`grid` names the arm 'c'"),
    ],
    error=(UnknownName, ValueError),
)


# ---- grids ----


def test_a_grid_that_comes_later_takes_in_what_was_run_before(tmp_path):
    """Rows from before the grid have no setting; their configuration says which
    point they are.
    """
    results.run_recipe(_tuned({}), "smoke", seeds=2, out=tmp_path)
    recipe = _tuned({arm: {"x": (1, 2)} for arm in "ab"})
    assert [
        job.state for job in results.plan(recipe, "smoke", 2, tmp_path)
    ].count("finished") == 4
    results.run_recipe(recipe, "smoke", seeds=2, out=tmp_path)
    settings = [
        [
            row["setting"]["x"]
            for row in results.rows(recipe, "smoke", tmp_path, every)
        ]
        for every in (False, True)
    ]
    assert set(settings[0]) == {2}
    assert settings[1].count(1) == 4


def test_how_settings_were_chosen_is_said(tmp_path):
    "By validation, which prefers another setting than the test images do."
    recipe = _tuned({arm: {"x": (1, 2, 3)} for arm in "ab"})
    results.run_recipe(recipe, "smoke", seeds=2, out=tmp_path)
    text = told(recipe, tmp_path)
    assert not missing(
        text,
        "over the same grid",
        '{"x": [1, 2, 3]}',
        'a: {"x": 2}',
        "| 20.50 ±",
    )
    assert "left out" not in text
    results.run_recipe(recipe, "smoke", seeds=[5], arms=["a"], out=tmp_path)
    # of arm b no seed has finished all settings
    for file in tmp_path.rglob("b-seed*.json"):
        if results.read_row(file)["config"]["x"] == 3:
            file.unlink()
    assert [
        (row["arm"], row["seed"])
        for row in results.rows(recipe, "smoke", tmp_path)
    ] == [
        ("a", 0),
        ("a", 1),
        ("a", 5),
    ]
    assert (
        "no seed has finished all settings of the grid, so nothing is "
        "chosen: b" in told(recipe, tmp_path)
    )


@pytest.mark.parametrize(
    "run", [results.run_recipe, functools.partial(spread.spread, jobs=1)]
)
def test_seeds_of_their_own_choose_the_setting(tmp_path, run):
    """All settings with them, then the chosen one alone with the others; it is
    best for the first of them, and would not be for the seeds that are shown.
    An arm without a grid has nothing to tune.
    """
    recipe = dataclasses.replace(
        known_recipe(best_at_two_first),
        scales={"smoke": {arm: {"data": "digits", "x": 1} for arm in "abc"}},
        grid={arm: {"x": (1, 2, 3)} for arm in "ab"},
        seeds={"smoke": range(10, 13)},
        tuning={"smoke": range(2)},
    )
    assert [recipe.runs("smoke", arm, 3) for arm in "ac"] == [9, 3]
    # what is chosen is not known yet
    assert len(results.plan(recipe, "smoke", out=tmp_path)) == 2 * 6 + 3
    assert len(run(recipe, "smoke", out=tmp_path)) == 21
    assert [
        (row["arm"], row["seed"], row["config"]["x"])
        for row in results.rows(recipe, "smoke", tmp_path)
    ] == [
        (arm, seed, x)
        for arm, x in (("a", 2), ("b", 2), ("c", 1))
        for seed in (10, 11, 12)
    ]
    assert "validation_last over seeds 0–1, which are not shown, over" in told(
        recipe, tmp_path
    )
    # what is to be done before anything chose, and all of it once it has
    for out, told_of in (
        ("elsewhere", "15 runs, 0"),
        (tmp_path, "21 runs, 21"),
    ):
        assert told_of in tables.forecast(recipe, "smoke", out=out)
    with pytest.raises(ValueError, match=r"seeds \[11\] tune scale smoke"):
        dataclasses.replace(recipe, tuning={"smoke": range(11, 12)})


# ---- the paper beside, two of anything, before it runs ----


def test_papers_numbers_stand_beside_with_their_source(tmp_path):
    none = Published(7.0, None, None, "no error given", "there")
    large = Published(90.41, 0.09, 6, "something large", "somebody, Table 2")
    recipe = known_recipe(paper={"b": large, "a": none})
    results.run_recipe(recipe, "smoke", out=tmp_path)
    text = told(recipe, tmp_path)
    assert not missing(
        text,
        "| 90.41 ± 0.09 (something large) |",
        "| 7.00 (no error given)",
        "| the paper's, of what it says |",
        "- b: something large, 6 seeds (somebody, Table 2)",
    )
    one = known_recipe(paper={"a": none, "b": none})
    assert "| the paper's: no error given |" in tables.table(
        one, results.rows(one, "smoke", tmp_path), paper=True
    )
    first = results.recipes()["first-experiment"].paper
    assert [
        (first[arm].mean, first[arm].se)
        for arm in ("ResNet BN", "ResNet BNN", "ViT LN", "ViT LNN")
    ] == [(88.89, 0.07), (90.41, 0.09), (94.61, 0.31), (95.78, 0.21)]
    assert re.search(
        r"\| normality-vit-svhn .*\| paper.*\(only: vit, svhn\)",
        tables.listing(tmp_path, "paper"),
    )


def test_compare_two_arms_and_two_folders(tmp_path, listed):
    more, one, two = 0.0, tmp_path / "one", tmp_path / "two"

    def run(config, seed, arm, **_):
        return {
            "metrics": {
                "score": KNOWN[arm][seed] + more * (arm == "b" and seed > 1),
                "always": 1.0,
            }
        }

    results.run_recipe(listed(known_recipe(run)), "smoke", out=one)
    d = np.subtract(KNOWN["b"], KNOWN["a"])
    for a, b, said in (
        ("a", "b", mean_and_error(d, "+")),
        ("a", "b", "seeds 0–3"),
        ("b", "a", f"{-d.mean():+.2f} ± "),
        ("a", "a", "+0.00 ± 0.00"),
    ):
        assert said in tables.compare(f"known/{a}", f"known/{b}", "smoke", one)
    with pytest.raises(ValueError, match="has the seeds none at scale book"):
        tables.compare("known/a", "known/b", "book", one)
    more = 0.5
    results.run_recipe(known_recipe(run), "smoke", seeds=3, out=two)
    assert "| b | 3 | 2 | score +0.167 ± 0.167 |" in " ".join(
        tables.compare(str(one), str(two)).split()
    )
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no run in common"):
        tables.compare(str(one), str(tmp_path / "none"))


def test_switches_corrected_and_equivalence_p_in_the_tables():
    """Against scipy: of main effects and interaction each the contrast of the
    four arms, with two one-sided tests for the last column.
    """
    names = ("o", "a", "b", "c")
    values = dict(
        zip(
            names,
            np.random.default_rng(5).normal(size=(4, 12))
            + 50
            + np.array([[0.0], [0.5], [1.0], [1.4]]),
        )
    )
    recipe = Recipe(
        "switches",
        "",
        (),
        {"book": {arm: {"data": "digits"} for arm in names}},
        print,
        {"score": "score"},
        (("b", "c"), ("o", "b")),
        switches=(results.Switches("bend", "shake", names),),
        negligible={"score": 1.5},
    )
    found = [
        {"arm": arm, "seed": seed, "metrics": {"score": value}}
        for arm in names
        for seed, value in enumerate(values[arm])
    ]
    assert recipe.comparisons == 5
    read = lambda table: [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()[2:]
    ]
    lines = read(tables.two_switches(recipe, found))
    assert [line[0] for line in lines] == [
        "main effect of bend",
        "main effect of shake",
        "interaction",
    ]
    o, a, b, c = values.values()
    three = tables.p_value
    for line, d in zip(
        lines, ((a - o + c - b) / 2, (b - o + c - a) / 2, c - b - a + o)
    ):
        p, above, below = (
            scipy.stats.ttest_1samp(d, mean, alternative=side).pvalue
            for mean, side in (
                (0, "two-sided"),
                (-1.5, "greater"),
                (1.5, "less"),
            )
        )
        assert line[3] == mean_and_error(d, "+")
        assert line[6] == three(p) and line[9] == three(min(1, 5 * p))
        assert line[10].startswith(three(max(above, below)))
    # without a seed in one arm it is not a quadruple
    assert read(tables.two_switches(recipe, found[:-1]))[0][2] == "11"
    assert (
        read(
            tables.two_switches(
                recipe, [row for row in found if row["arm"] != "o"]
            )
        )
        == []
    )


def test_forecast_and_listing_know_what_is_finished_and_what_it_cost(
    tmp_path, monkeypatch, listed
):
    recipe = listed(known_recipe(cost={"smoke": "a blink"}))
    assert (
        "no run has finished, so there is no measured time; the recipe's own "
        "estimate: a blink" in tables.forecast("known", "smoke", out=tmp_path)
    )
    results.run_recipe(recipe, "smoke", seeds=2, arms=["a"], out=tmp_path)
    for file in tmp_path.rglob("*.json"):
        _remake(file, wall_seconds=120.0)
    results.plan(recipe, "smoke", [3], tmp_path, ["b"])[0].checkpoint.touch()
    text = tables.forecast("known", "smoke", out=tmp_path)
    assert "8 runs, 2 finished, 1 begun" in text
    assert "about 4 min on one process for 2 of the 6 runs left" in text
    assert re.search(
        r"smoke.*a blink.*2 min a seed \(1 of 2 arms\).*2 of 8|"
        r"smoke.*2 of 8.*a blink.*2 min a seed \(1 of 2 arms\)",
        tables.listing(tmp_path),
    )
    # the runs that are left; elsewhere, as long as those of the book
    monkeypatch.setattr(tables, "book_results", lambda: tmp_path)
    for out, cost in (
        (tmp_path, "4 min for 2 of 6 runs left; a blink"),
        (tmp_path / "new", "8 min for 4 of 8 runs left; a blink"),
    ):
        out.mkdir(exist_ok=True)
        listing = printed("list", "--scale", "smoke", "--out", out)[1]
        line = listing.splitlines()[2].split("|")
        assert (line[2].strip(), line[4].strip()) == ("smoke", cost)
        assert "book" not in listing
    with pytest.raises(ValueError, match="at least one run"):
        tables.forecast("known", "smoke", seeds=0, out=tmp_path)
    monkeypatch.setattr(
        results,
        "data_hash",
        Mock(side_effect=data.DataError("digits lies elsewhere")),
    )
    status, out, err = printed("run", "known", "--dry-run", "--out", tmp_path)
    assert (status, err) == (2, "")
    assert "cannot be run here: digits lies elsewhere" in out
    assert "It would be 8 runs with 4 seeds of a; b." in out


def test_arms_whose_data_are_missing_are_named_and_the_others_run(
    tmp_path, monkeypatch, listed
):
    there, found = {"digits"}, data.data_hash("digits")
    recipe = listed(known_recipe())
    recipe.scales["smoke"]["b"] = {"data": "elsewhere", "arm": "b"}

    def find(name):
        if name not in there:
            raise data.DataError(f"{name} lies on no machine")
        return found

    monkeypatch.setattr(results, "data_hash", find)
    line = "left out: b: elsewhere lies on no machine"
    assert {job.arm for job in results.plan(recipe, "smoke")} == {"a"}
    assert line in tables.forecast("known", "smoke", out=tmp_path)
    for run in (results.run_recipe, spread.spread):
        lines = []
        assert (
            len(run("known", "smoke", out=tmp_path, progress=lines.append)) == 4
        )
        assert line in lines
    status, out, err = printed("run", "known", "--out", tmp_path)
    assert status == 0
    assert line in err
    for arms in (["b"], ["a", "b"]):
        with pytest.raises(data.DataError, match="elsewhere lies on no"):
            results.run_recipe("known", "smoke", out=tmp_path, arms=arms)
    there.clear()
    with pytest.raises(data.DataError, match="digits lies on no machine"):
        results.run_recipe("known", "smoke", out=tmp_path)
    there.update(("digits", "elsewhere"))
    assert len(results.run_recipe("known", "smoke", out=tmp_path)) == 8


# ---- killed, doubled, starved ----


@pytest.mark.skipif(os.name != "posix", reason="patches flock")
def test_a_row_that_is_there_is_not_overwritten_by_a_second_writer(
    tmp_path, monkeypatch
):
    "Where files cannot be locked: the first row stays."

    def run(*_, **__):
        results.perform(job)  # the other writer is faster
        return {"metrics": {"score": 99.0}}

    refused = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=refused))
    job = results.plan(known_recipe(), "smoke", 1, tmp_path, ["a"])[0]
    row = results.perform(job._replace(recipe=known_recipe(run)))
    assert row["metrics"] == {"score": 1.0}
    assert results.read_row(job.path) == row


HOLDER = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_that_another_process_holds_is_left_or_waited_for(tmp_path):
    "A holder that is killed holds nothing any more."
    job = results.plan(known_recipe(), "smoke", 1, tmp_path, ["a"])[0]
    lock = job.checkpoint.with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert results.perform(job, wait=False) is None
        killer = threading.Timer(0.3, holder.kill)
        killer.start()
        assert results.perform(job)["metrics"] and holder.wait() != 0
        killer.join()
    assert not list(lock.parent.iterdir())


@pytest.mark.parametrize("finished", [False, True])
def test_what_a_killed_writer_left_is_cleared_by_the_next(finished, tmp_path):
    "Half a file; of one that died after its row, the checkpoint and the lock."
    job = results.plan(known_recipe(), "smoke", 1, tmp_path, ["a"])[0]
    if finished:
        results.perform(job)
        left = [job.checkpoint, job.checkpoint.with_suffix(".lock")]
    else:
        left = [
            path.with_name(f".{path.name}.99-abcdef01")
            for path in (job.path, job.checkpoint)
        ]
    # of another job, which may be at work
    other = job.checkpoint.with_name(".0123456789ab.pt.99-abcdef01")
    for path in (*left, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    assert results.perform(job) == results.read_row(job.path)
    assert list(job.checkpoint.parent.iterdir()) == [other]
    assert list(job.path.parent.iterdir()) == [job.path]


def test_sigterm_ends_the_command_in_words(tmp_path, listed):
    "Afterwards SIGTERM is what it was. (What is kept: tools/kills.py.)"

    def ended(*_, **__):
        assert callable(signal.getsignal(signal.SIGTERM))  # or pytest is ended
        os.kill(os.getpid(), signal.SIGTERM)

    listed(known_recipe(ended))
    status, out, err = printed("run", "known", "--out", tmp_path)
    assert (status, out) == (143, "")
    assert err.endswith(
        "normalnorm: ended by SIGTERM; what was finished is kept, and the same "
        "command continues from it\n"
    )
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    "outcome, words",
    [
        *(
            (nothing, "without `metrics`")
            for nothing in (None, {}, {"metrics": 3}, {"metrics": {}})
        ),
        *(
            (
                {"metrics": {"score": value}},
                "for the metric `score`: expected a finite number",
            )
            for value in (math.nan, math.inf, "1.0", None, True, [1.0])
        ),
    ],
)
def test_runs_without_metrics_are_refused(outcome, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        results.run_recipe(
            known_recipe(lambda *_, **__: outcome), "smoke", 1, tmp_path
        )
    assert [path.name for path in tmp_path.rglob("*")] == [".checkpoints"]


FORKS = """
import os, time
from normalnorm.experiments import results

def run(config, seed, arm, **given):
    with open("performed", "a") as file:
        file.write(f"{arm}{seed} ")
    time.sleep(0.1)
    return {"metrics": {"test": 1.0}}

recipe = results.Recipe(
    "forks", "", (),
    {"smoke": {arm: {"data": "digits", "arm": arm} for arm in "ab"}}, run,
    {"test": "test"})
both = []
for _ in range(2):
    both.append(os.fork())
    if not both[-1]:
        try:
            results.run_recipe(recipe, "smoke", seeds=3, out="two",
                               device="cpu")
        finally:
            os._exit(0)
for pid in both:
    os.waitpid(pid, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_at_one_list_do_nothing_twice(tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    python("forks.py", cwd=tmp_path)
    assert sorted((tmp_path / "performed").read_text().split()) == [
        f"{arm}{seed}" for arm in "ab" for seed in range(3)
    ]
    assert len(results.scan("forks", "smoke", tmp_path / "two").rows) == 6
    assert not list((tmp_path / "two" / ".checkpoints").iterdir())


# ---- several processes at one run ----

TOGETHER = """
import contextlib, errno, json, os, random, signal, socket, sys
from pathlib import Path
import torch
import lightning_fabric
from normalnorm import cli
from normalnorm.experiments import results, train
from normalnorm.experiments.recipes import first

torch.set_num_threads(1)
COMMAND = ["run", "first-experiment", "--arm", "ResNet BNN", "--seeds", "1",
           "--device", "cpu"]

def die_after_a_checkpoint():
    write = train.write_atomically
    def dying(path, *given):
        write(path, *given)
        os.kill(os.getpid(), signal.SIGKILL)
    train.write_atomically = dying
    train.train.__kwdefaults__["minutes"] = 0  # after the first step

def full_disk():
    def full(path, *given, **more):
        raise OSError(errno.ENOSPC, f"no space left: {path}")
    results.write_atomically = full

def fail():
    def broken(*given, **more):
        raise ValueError("the second process cannot")
    object.__setattr__(first.first_experiment, "run", broken)

def nothing():
    pass

def together(name, out, sabotage=(nothing, nothing), more=((), ())):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        # as torchrun starts it; forked, for imports take longer than runs
        os.environ |= {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2",
                       "LOCAL_WORLD_SIZE": "2", "RANK": str(rank),
                       "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port)}
        status = 70
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}-{rank}.{kind}", os.O_WRONLY | os.O_CREAT),
                    number)
        try:
            sabotage[rank]()
            status = cli.main([*COMMAND, "--out", out, *more[rank]])
        finally:
            sys.stdout.flush()
            os._exit(status)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
             for pid in children]
    print(json.dumps([name, ended]), flush=True)

together("again", "whole")
together("killed", "killed", (die_after_a_checkpoint, nothing))
together("elsewhere", "killed", more=((), ("--out", "nowhere")))
together("full", "killed", (full_disk, nothing))
together("resumed", "killed")
together("one fails", "new", (nothing, fail))
together("jobs", "new", more=(("--jobs", "2"),) * 2)
row, = Path("whole").rglob("*.json")
row.write_text(row.read_text().replace('"seed":0', '"seed":1'))
together("damaged", "whole")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_command_under_torchrun(tmp_path):
    """`torchrun` itself once; then two processes as it starts them, of which
    one is killed, has a full disk or fails: the other ends, the same command
    continues, and there is one row.
    """
    (tmp_path / "together.py").write_text(TOGETHER)
    (tmp_path / "command.py").write_text(
        "import sys\nfrom normalnorm.cli import main\nsys.exit(main())"
    )
    command = (
        "-m torch.distributed.run --nproc-per-node 2 command.py "
        "run first-experiment --seeds 1 --device cpu --out whole --arm"
    )
    done = python(*command.split(), "ResNet BNN", cwd=tmp_path)
    # one of them reports
    assert done.stdout.count("results in whole") == 1
    assert done.stderr.count("epoch 2/2") == 1
    (file,) = (tmp_path / "whole").rglob("*.json")
    whole = results.read_row(file)
    assert whole["processes"] == 2
    assert not list(tmp_path.rglob("*.pt"))

    done = python("together.py", cwd=tmp_path)
    assert dict(map(json.loads, done.stdout.splitlines())) == {
        "again": [0, 0],
        "killed": [-9, 1],
        "elsewhere": [2, 2],
        "full": [2, 2],
        "resumed": [0, 0],
        "one fails": [1, 2],
        "jobs": [2, 2],
        "damaged": [2, 2],
    }
    of_two = "of 2 processes, some have read a checkpoint"
    for file, said in (
        ("again-0.err", "finished before"),
        ("again-0.out", "results in"),
        ("killed-1.err", "another process of this torchrun has ended"),
        ("one fails-0.err", "another process of this torchrun has ended"),
        ("one fails-1.err", "the second process cannot"),
        ("resumed-0.err", "continued after epoch 2"),
        ("jobs-0.err", "--jobs"),
        *(
            (f"{name}-{rank}.err", said)
            for rank in range(2)
            for name, said in (
                ("elsewhere", of_two),
                ("elsewhere", "(steps done: 1, 0)"),
                ("full", "normalnorm: "),
                ("full", "no space left"),
                ("damaged", "something was edited"),
            )
        ),
    ):
        assert said in (tmp_path / file).read_text(), file
    assert (tmp_path / "again-1.out").read_text() == ""
    assert not list((tmp_path / "new").rglob("*.json"))
    (file,) = (tmp_path / "killed").rglob("*.json")
    again, whole = timeless(results.read_row(file)), timeless(whole)
    for field in ("metrics", "history", "gaussianity", "test_right", "hash"):
        assert again[field] == whole[field], field


# ---- a run of book scale: a command of its own ----


def test_the_command_that_kills(tmp_path):
    """At scale "smoke", where runs take half a second: each part counts what
    it says, and comes to the row of an undisturbed run. (A killed worker:
    tests/experiments/test_spread.py.)
    """
    out = tmp_path / "kills.json"
    options = "-m tools.kills --scale smoke --kills 2 --flips 2 --skip worker"
    python(*options.split(), "--out", out, cwd=ROOT)
    found = json.loads(out.read_text())
    parts = found["parts"]
    assert found["failures"] == {}
    assert found["source"] == results.source_hash()
    assert parts["at_random_moments"]["kills"] == 2
    assert parts["in_a_write"]["kills"] == 1
    assert parts["sigterm"]["status"] == 143
    assert "start the same command again" in parts["full_disk"]["message"]
    assert [
        parts["turned_bits"][of]["bits"] for of in ("checkpoint", "row")
    ] == [2, 6]
