"""How results are kept: killed, interrupted, doubled and starved of disk;
tables with known answers; the command line.
"""

import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from normalnorm.experiments import data, results, spread, tables
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
    known_numbers,
    known_recipe,
    printed,
    python,
)
from tests.peers import installed
from tools import kills
from tools.kills import timeless


def test_rows_are_read_without_their_recipe(tmp_path):
    "By arm, in the order of the seeds; what is missing or damaged is said."
    with pytest.raises(ResultsError, match="normalnorm run known --scale"):
        results.by_arm("known", "smoke", tmp_path)
    results.run_recipe(known_recipe(), "smoke", [3, 0, 1], out=tmp_path)
    found = results.by_arm("known", "smoke", tmp_path)
    assert {
        arm: [(row["seed"], row["metrics"]["score"]) for row in rows]
        for arm, rows in found.items()
    } == {arm: [(k, of[k]) for k in (0, 1, 3)] for arm, of in KNOWN.items()}
    min(tmp_path.rglob("*.json")).write_text("{")
    with pytest.raises(ResultsError, match="it is no JSON"):
        results.by_arm("known", "smoke", tmp_path)


def mean_and_error(values, sign=""):
    return f"{np.mean(values):{sign}.2f} ± {scipy.stats.sem(values):.2f}"


def told(recipe, out):
    "The report, with one space for each stretch of white."
    return " ".join(tables.report(recipe, out).split())


def test_report_equals_known_answer(tmp_path):
    results.run_recipe(known_recipe(), "smoke", out=tmp_path)
    text = told(known_recipe(), tmp_path)
    test = scipy.stats.ttest_rel(KNOWN["b"], KNOWN["a"])
    low, high = test.confidence_interval()
    for part in (
        *map(mean_and_error, KNOWN.values()),
        f"| {mean_and_error(np.subtract(KNOWN['b'], KNOWN['a']), '+')} | "
        f"{low:+.2f} … {high:+.2f} | no",
        "Scale smoke: digits data, 8 runs, seeds 0–3",
        "No arm was tuned",
        # all differences positive: 2 of 16 choices of signs
        f"| {test.pvalue:.3f} | 0.125 |",
        # every seed is shown
        *(" | ".join(f"{v:.2f}" for v in of) for of in KNOWN.values()),
    ):
        assert part in text, part
    assert "Scale book" not in text
    tuned = "The rates are those of pilot runs"
    said = told(known_recipe(tuned=tuned), tmp_path)
    assert f"{tuned}." in said
    assert "No arm was tuned" not in said


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
    for part in (
        "one seed only, so no standard error and no line in the table: c ",
        "seeds 0–3 (a); 1–3 (b)",
        "| score | seed 0 | seed 1 | seed 2 | seed 3 |",
        "| a | 1.00 | 2.00 | 4.00 | 5.00 | | b | | 2.50 | 5.50 | 9.00 |",
        f"| a | 4 | {mean_and_error(known['a'])} |",
        f"| b | 3 | {mean_and_error(known['b'][1:])} |",
        f"| b − a | score | 3 | {mean_and_error(d, '+')} |",
    ):
        assert part in text, part
    assert "c − a" not in text
    rows = results.rows(recipe, "smoke", tmp_path)
    asked = tables.effects(recipe, "smoke", tmp_path)
    assert (
        asked.values(("a", "b"), "score").tolist()
        == d.tolist()
        == [-v for v in asked.values(("b", "a"), "score")]
        == contrast(rows, {"b": 1, "a": -1}, "score").tolist()
    )


@pytest.mark.parametrize(
    "paper, table, words",
    [
        ("labatie2020", "CIFAR", "labatie2020.*labatie2021"),
        (2021, "CIFAR", "2021.*labatie2021"),
        ("zz", "CIFAR", "known are eftekhari2025, labatie2021"),
        ("../labatie2021", "CIFAR", "no tables are kept"),
        ("labatie2021", "CIFER", "CIFER.*CIFAR"),
    ],
)
def test_printed_tables_that_are_not_kept(paper, table, words):
    with pytest.raises(ValueError, match=words):
        tables.printed_table(paper, table)


def test_a_printed_table_is_the_callers_own():
    tables.printed_table("labatie2021", "CIFAR")["cifar10, BN"].clear()
    assert len(tables.printed_table("labatie2021", "CIFAR")["cifar10, BN"]) == 5


def test_a_printed_number_without_an_error_has_none():
    script = tables.printed_table("eftekhari2025", "single numbers")[
        "reviewer's script"
    ]
    ((mean, error),) = script["BN"]
    assert mean == 90.25 and np.isnan(error)


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
    done = []

    def run(config, seed, arm, **_):
        if len(done) == 3:
            raise RuntimeError("power cut")
        done.append(seed)
        return {"metrics": {"score": 0.0}}

    with pytest.raises(RuntimeError, match="power cut"):
        results.run_recipe(known_recipe(run), "smoke", out=tmp_path)
    assert len(list(tmp_path.rglob("*.json"))) == 3
    found = results.run_recipe(known_recipe(), "smoke", out=tmp_path)
    assert [row["metrics"]["score"] for row in found].count(0.0) == 3


def test_rows_of_other_configurations_leave_the_table(tmp_path):
    results.run_recipe(known_recipe(), "smoke", out=tmp_path)
    configs = {arm: {"data": "digits", "arm": arm, "lr": 1} for arm in KNOWN}
    changed = known_recipe(scales={"smoke": configs})
    for files in (8, 0):  # by themselves, packed
        assert results.rows(changed, "smoke", tmp_path) == []
        assert "8 rows of other configurations are left out" in tables.report(
            changed, tmp_path
        )
        assert results.pack("known", "smoke", tmp_path) == files


def _changed(text, **fields):
    "A row with other fields; None takes one away."
    row = json.loads(text)
    for name, value in fields.items():
        row.pop(name) if value is None else row.__setitem__(name, value)
    return json.dumps(row)


def _remade(text, **fields):
    "A row with other fields, whose digest is right again."
    row = json.loads(text) | fields
    return json.dumps(row | {"digest": results.digest(row)})


def _remake(file, **fields):
    file.write_text(_remade(file.read_text(), **fields))


BAD = {
    "half": (lambda t: t[: len(t) // 2], "not a row.*no JSON.*delete it"),
    "empty": (lambda t: "", "not a row.*no JSON"),
    "binary": (lambda t: "\x00\x00", "not a row.*no JSON"),
    "list": (lambda t: "[]", "holds a list: expected a dictionary"),
    "deep": (lambda t: "[" * 200_000, "nested too deeply|no JSON"),
    "deep and closed": (
        lambda t: '{"schema":' + "[" * 200_000 + "]" * 200_000 + "}",
        "nested too deeply|no JSON|`schema`",
    ),
    "no schema": (lambda t: _changed(t, schema=None), "`schema` is nothing"),
    "schema true": (lambda t: _changed(t, schema=True), "`schema` is True"),
    "newer": (
        lambda t: _changed(t, schema=results.SCHEMA + 1),
        "newer normalnorm .schema 5, this one knows 4.*install a newer",
    ),
    **{
        f"of schema {schema}": (
            lambda t, schema=schema: _remade(t, schema=schema),
            f"`schema` is {schema}: expected 4, for older rows",
        )
        for schema in (0, 1, 2, 3)
    },
    "calls itself old, without a digest": (
        lambda t: _changed(t, schema=2, digest=None, metrics={"score": 77.0}),
        "`schema` is 2: expected 4, for older rows",
    ),
    "only a name": (
        lambda t: '{"schema":4,"recipe":"known"}',
        "metrics.*wall_seconds, digest missing",
    ),
    "no wall_seconds": (
        lambda t: _changed(t, wall_seconds=None),
        "wall_seconds missing",
    ),
    "no metrics": (lambda t: _changed(t, metrics=None), "metrics missing"),
    "no backend": (
        lambda t: _changed(t, backend="remove").replace(
            ', "backend": "remove"', ""
        ),
        "backend missing",
    ),
    "wall_seconds as text": (
        lambda t: _changed(t, wall_seconds="20"),
        "`wall_seconds` is '20': expected a finite number",
    ),
    "wall_seconds nan": (
        lambda t: _changed(t, wall_seconds=float("nan")),
        "`wall_seconds` is nan",
    ),
    "wall_seconds below 0": (
        lambda t: _changed(t, wall_seconds=-1),
        "`wall_seconds` is -1",
    ),
    "metrics null": (
        lambda t: _changed(t, metrics=0).replace(
            '"metrics": 0', '"metrics": null'
        ),
        "`metrics` is None: expected a dictionary",
    ),
    "metrics a list": (
        lambda t: _changed(t, metrics=[1.0]),
        "`metrics` is .1.0.: expected a dictionary",
    ),
    "metrics empty": (lambda t: _changed(t, metrics={}), "`metrics` is empty"),
    **{
        f"metric {value!r}": (
            lambda t, value=value: _changed(t, metrics={"score": value}),
            "the metric `score` is .*: expected a finite number",
        )
        for value in (None, "1.0", [1.0], True, float("nan"), float("inf"))
    },
    "seed as text": (
        lambda t: _changed(t, seed="0"),
        "`seed` is '0': expected a whole number",
    ),
    "config a list": (
        lambda t: _changed(t, config=[]),
        "`config` is ..: expected a dictionary",
    ),
    "config without data": (
        lambda t: _changed(t, config={"arm": "a"}),
        "`data` in `config`",
    ),
    "other config": (
        lambda t: _changed(t, config={"data": "digits", "arm": "c"}),
        "`hash` is .* something was edited",
    ),
    "other arm": (
        lambda t: _changed(t, arm="b"),
        "`hash` is .* something was edited",
    ),
    "other seed": (
        lambda t: _changed(t, seed=5),
        "`hash` is .* something was edited",
    ),
    "other scale": (
        lambda t: _remade(t, scale="book"),
        "folder called known/book: it was moved",
    ),
    "other number": (
        lambda t: _changed(t, metrics={"score": 77.0}),
        "`digest` is .* something was edited, or a bit",
    ),
    "other time": (
        lambda t: _changed(t, wall_seconds=7.5),
        "`digest` is .* something was edited",
    ),
    "one field more": (
        lambda t: _changed(t, note=""),
        "`digest` is .* something was edited",
    ),
    "digest of another": (
        lambda t: _changed(t, digest="0" * 64),
        "`digest` is '0000.* something was edited",
    ),
    "digest null": (
        lambda t: _changed(t, digest="").replace(
            '"digest": ""', '"digest": null'
        ),
        "`digest` is None: expected a text",
    ),
    "no digest": (lambda t: _changed(t, digest=None), "digest missing"),
    "drawn_hash of a number": (
        lambda t: _remade(t, drawn_hash=7),
        "`drawn_hash` is 7: expected a text or null",
    ),
    "of no known processor": (
        lambda t: _remade(t, processor=None),
        "`processor` is None: expected a text",
    ),
    "the seed afterwards": (
        lambda t: _remade(t, seed=None, afterwards={"seed": "forgotten"}),
        "`hash` is .* something was edited",
    ),
    **{
        f"afterwards {value!r}": (
            lambda t, value=value: _remade(t, afterwards=value),
            "`afterwards` is .*: expected, for fields of this row, how one",
        )
        for value in (["processor"], {"processor": None}, {"weather": "fine"})
    },
    "no processes": (
        lambda t: _remade(t, processes=0),
        "`processes` is 0: expected a whole number above 0",
    ),
    "without what its recipe shows": (
        lambda t: _remade(t, metrics={"other": 1.0}),
        "lacks the metrics score, which the recipe known shows: delete it",
    ),
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
    arms = "known/a", "known/b"
    for text, left in (
        (tables.listing(known), "7 of 8"),
        (tables.report("known", known), "| a   | 3     |"),
        (tables.forecast("known", "smoke", out=known), "8 runs, 7 finished"),
        (tables.compare(*arms, "smoke", known), "seeds 1–3"),
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


def test_a_digest_is_of_the_content(known):
    "By hand."
    for file in known.rglob("*.json"):
        row = results.read_row(file)
        given = row.pop("digest")
        text = json.dumps(row, sort_keys=True, separators=(",", ":"))
        assert given == hashlib.sha256(text.encode()).hexdigest()


def test_what_was_added_to_rows_afterwards_is_said(known):
    text = tables.report("known", known)
    later = {"processor": "not recorded"}
    for file in sorted(known.rglob("*.json"))[:3]:
        _remake(file, processor=None, afterwards=later)
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
    config = {"data": "digits", "images": 50, **more}
    scales = {"smoke": {arm: config for arm in KNOWN}}
    return known_recipe(run, scales=scales, seeds={"smoke": 3})


def test_a_row_names_the_examples_that_were_drawn(tmp_path):
    """By hand, from the positions; the identity does not know of it; rows of
    one seed that drew other examples make no pair.
    """
    recipe, digits = _drawing(draw=True), data.data_hash("digits")
    found = results.run_recipe(recipe, "smoke", out=tmp_path)
    for row in found:
        drawn = data.drawn(data.dataset("digits", "train"), 50, row["seed"])
        places = drawn.numpy().astype("<i8").tobytes()
        by_hand = hashlib.sha256(digits.encode() + places).hexdigest()
        assert row["drawn_hash"] == by_hand
        assert row["hash"] == results.identity(
            "known", row["arm"], row["config"], row["seed"], digits
        )
    assert len({row["drawn_hash"] for row in found}) == 3
    file = min(tmp_path.rglob("*.json"))
    for drawn, words in (
        (None, "`drawn_hash` is None, and by its configuration it draws"),
        (
            "0" * 64,
            "have the seed 0 and drew different(.|\n)*no pair: delete the",
        ),
    ):
        _remake(file, drawn_hash=drawn)
        with pytest.raises(ResultsError, match=words):
            results.rows(recipe, "smoke", tmp_path, any_code=True)


def test_a_recipe_that_draws_of_its_own_says_what(tmp_path):
    'Without a "draw" in the configuration, so in no identity either.'

    def run(config, seed, arm, **_):
        drawn = results.drawn_hash(config | {"draw": True}, seed)
        return {"metrics": {"score": 1.0}, "drawn_hash": drawn}

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
    for said in (copy, b, f"belongs in a file called {a.name}"):
        assert str(said) in str(error.value)
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
    for name, content in {**sources, "py.typed": "no source"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    file = tmp_path / "experiments/results.py"
    monkeypatch.setattr(results, "__file__", str(file))
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
    done = python("-c", program)
    backends, kernel, native, instructions, processor, source = json.loads(
        done.stdout
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
        for said in (
            f"{_called(*ours)}: 4 rows",
            f"{_called(*others)}: 4 rows",
            "any_code=True",
        ):
            assert said in str(error.value)
    assert re.search(
        r"a-seed0-\w+\.json(.|\n)*another folder", str(error.value)
    )
    assert len(results.rows("known", "smoke", tmp_path, any_code=True)) == 8
    assert "8 of 8" in tables.listing(tmp_path)
    mixed = tables.report("known", tmp_path, any_code=True)
    assert f"rows of 2 codes in one table: {_called(*ours)} (4); " in mixed
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


def _package(commit, suffixes):
    """The hash of the package at a commit: files of these endings, as
    `source_hash` takes it.

    None without that commit (a shallow clone).
    """
    import hashlib
    from pathlib import PurePosixPath

    listed = subprocess.run(
        [
            "git",
            "-C",
            str(ROOT),
            "ls-tree",
            "-r",
            "--name-only",
            commit,
            "normalnorm",
        ],
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        return None
    found = hashlib.sha256()
    for path in sorted(
        PurePosixPath(name)
        for name in listed.stdout.split("\n")
        if name.endswith(suffixes)
    ):
        content = subprocess.run(
            ["git", "-C", str(ROOT), "show", f"{commit}:{path}"],
            capture_output=True,
            check=True,
        ).stdout
        found.update(
            path.relative_to("normalnorm").as_posix().encode() + b"\0" + content
        )
    return found.hexdigest()[:12]


BEFORE = "b8df18e"  # rows as they were written


@functools.lru_cache
def committed():
    "All rows of the repository, by the files that they were."
    found = {}
    for file in sorted((ROOT / "results").rglob(results.PACKED)):
        *_, recipe, scale = file.parent.parts
        rows, problems = results.scan(recipe, scale, file.parents[2])
        assert not problems
        found |= rows
    assert len(found) == 1373
    return found


# measured before they were recipes: rows were made of their numbers
CARRIED = {
    "glyphs-hardness": 18,
    "weight-growth": 105,
    "pruning": 80,
    "pruning-time": 8,
    "collapse": 34,
    "collapse-cures": 4,
    "early-training": 108,
    "power-training": 35,
    "power-rates": 21,
    "wide-propagation": 64,
    "torchattacks": 7,
    "covariance-field": 7,
    "layer-maps": 25,
    "drawn-units": 3,
    "neural-tangents": 8,
    "hessian": 108,
    "hessian-memory": 2,
}


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
        line = json.loads(results.packed(path.parent)[path.name])
        assert line["sha256"] == hashlib.sha256(content).hexdigest()
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
def test_the_rows_that_were_rewritten_are_those_that_were_written():
    """All that differs from the file of then is what `afterwards` names; the
    package of a commit gives the `source` that is said; the rows of the
    definition lie in commits without a kernel.
    """
    if _package(BEFORE, (".py",)) is None:
        pytest.skip("a clone without the history")
    later = {
        p: row
        for p, row in committed().items()
        if "afterwards" in row and row["recipe"] not in CARRIED
    }
    assert len(later) == 140
    git = ["git", "-C", str(ROOT)]
    listed = "\n".join(
        f"{BEFORE}:{path.relative_to(ROOT).as_posix()}" for path in later
    )
    then = iter(
        subprocess.run(
            [*git, "cat-file", "--batch"],
            input=listed,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
    )
    packages = {}
    for path, row in later.items():
        next(then)
        old = json.loads(next(then))
        next(then, None)
        differs = {
            name
            for name in {*old, *row}
            if old.get(name, ...) != row.get(name, ...)
        }
        assert differs - {"schema", "digest", "afterwards", "drawn_hash"} <= (
            set(row["afterwards"])
        ), path
        assert ("drawn_hash" in row["afterwards"]) == (
            row["drawn_hash"] is not None
        )
        if row["commit"] and old["schema"] == 1:
            said = packages.setdefault(
                row["commit"],
                [
                    _package(row["commit"], endings)
                    for endings in ((".py",), (".py", *results.NATIVE))
                ],
            )
            assert said == [old["source"], row["source"]]
    for commit in ("a7b0ff1", "6dd0b09"):
        names = subprocess.run(
            [
                *git,
                "ls-tree",
                "-r",
                "--name-only",
                commit,
                "normalnorm",
                "results",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert names and ".cpp" not in names and "backends" not in names
    for path in committed():
        if "by-definition" in path.parts:
            assert path.name in names


@pytest.mark.book
def test_the_data_of_committed_rows_are_those_of_today():
    """The sets, and of every row whose images are drawn by its seed, these;
    the identities are those of the files' names and of the present
    configurations.
    """
    count = Counter()
    for path, row in committed().items():
        name = row["config"]["data"]
        draws = "draw" in row["config"] or row["recipe"] == "proxy-norm"
        assert row["data_hash"] == (data.data_hash(name) if name else "")
        assert draws == (row["drawn_hash"] is not None), path
        if draws:
            count[row["recipe"]] += 1
            drawn = _drawn(name, row["config"]["images"], row["seed"])
            assert row["drawn_hash"] == drawn, path
    assert count == {
        "transform-given-noise": 96,
        "transform-given-noise-500": 48 + 8,
        "transform-given-noise-glyphs": 48 + 2,
        "proxy-norm": 120,
        "glyphs-hardness": 18,
        "wide-propagation": 64,
        "power-training": 35,
        "power-rates": 21,
        **{f"one-factor-{factor}": 25 for factor in ("batch", "rate", "scale")},
    }


@functools.lru_cache
def _drawn(name, images, seed):
    return data.data_hash(name, first=images, draw=seed)


def _tuned(grid):
    "Arm b is better in validation at x = 2, and in test at x = 3."

    def run(config, seed, arm, **_):
        judged = {1: 0.0, 2: 5.0, 3: 1.0}[config["x"]] + seed % 2
        score = float(config["x"] * 10 + seed)
        return {"metrics": {"score": score, "validation_last": judged}}

    scales = {"smoke": {arm: {"data": "digits", "x": 1} for arm in "ab"}}
    return known_recipe(run, scales=scales, grid=grid)


@pytest.mark.parametrize(
    "ask, words",
    [
        (
            lambda out: results.run_recipe("first-experimnt", out=out),
            "^no recipe is called 'first-experimnt': did you mean "
            "first-experiment.$",
        ),
        (
            lambda out: results.run_recipe("first-experiment", "smok", out=out),
            "did you mean smoke",
        ),
        (
            lambda out: results.run_recipe(
                "first-experiment", arms=["ResNet BNM"], out=out
            ),
            "did you mean.*ResNet BNN",
        ),
        (lambda out: tables.report("experiment", out), "first-experiment"),
        (
            lambda out: tables.compare(
                "first-experiment/ResNet BNM",
                "first-experiment/ResNet BN",
                out=out,
            ),
            "did you mean ResNet BN, ResNet BNN.*two folders",
        ),
        (
            lambda out: known_recipe(compare=(("a", "c"),)),
            "`compare` names the arm 'c', which no scale has: known are a, b",
        ),
        (
            lambda out: results.run_recipe("first-experiment", seeds=0),
            "at least one run",
        ),
        *(
            (lambda out, grid=grid: _tuned(grid), "same grid, or none")
            for grid in (
                {"a": {"x": (1, 2)}},
                {"a": {"x": (1, 2)}, "b": {"x": (1, 2, 3)}},
                {"a": {"x": (1,)}, "b": {"y": (1,)}},
            )
        ),
        (
            lambda out: _tuned({"c": {"x": (1,)}}),
            "`grid` names the arm 'c'",
        ),
    ],
)
def test_what_is_unknown_or_makes_no_experiment_is_refused(
    ask, words, tmp_path
):
    with pytest.raises((UnknownName, ValueError)) as error:
        ask(tmp_path)
    assert re.search(words, str(error.value))


# ---- grids ----


def test_a_grid_that_comes_later_takes_in_what_was_run_before(tmp_path):
    """Rows from before the grid have no setting; their configuration says which
    point they are.
    """
    results.run_recipe(_tuned({}), "smoke", seeds=2, out=tmp_path)
    recipe = _tuned({arm: {"x": (1, 2)} for arm in "ab"})
    states = [job.state for job in results.plan(recipe, "smoke", 2, tmp_path)]
    assert states.count("finished") == 4
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


def test_settings_are_chosen_on_validation_and_the_table_says_so(tmp_path):
    recipe = _tuned({arm: {"x": (1, 2, 3)} for arm in "ab"})
    results.run_recipe(recipe, "smoke", seeds=2, out=tmp_path)
    shown = results.rows(recipe, "smoke", tmp_path)
    assert [
        (row["arm"], row["seed"], row["setting"], row["metrics"]["score"])
        for row in shown
    ] == [(arm, seed, {"x": 2}, 20.0 + seed) for arm in "ab" for seed in (0, 1)]
    text = told(recipe, tmp_path)
    for part in (
        "over the same grid",
        '{"x": [1, 2, 3]}',
        'a: {"x": 2}',
        "| 20.50 ±",
    ):
        assert part in text, part
    assert "left out" not in text
    results.run_recipe(recipe, "smoke", seeds=[5], arms=["a"], out=tmp_path)
    # of arm b no seed has finished all settings
    for file in tmp_path.rglob("b-seed*.json"):
        if results.read_row(file)["config"]["x"] == 3:
            file.unlink()
    found = results.rows(recipe, "smoke", tmp_path)
    assert [(row["arm"], row["seed"]) for row in found] == [
        ("a", 0),
        ("a", 1),
        ("a", 5),
    ]
    assert (
        "no seed has finished all settings of the grid, so nothing is "
        "chosen: b" in told(recipe, tmp_path)
    )


# ---- the paper beside, two of anything, before it runs ----


def test_papers_numbers_stand_beside_with_their_source(tmp_path):
    large = Published(90.41, 0.09, 6, "something large", "somebody, Table 2")
    none = Published(7.0, None, None, "no error given", "there")
    recipe = known_recipe(paper={"b": large, "a": none})
    results.run_recipe(recipe, "smoke", out=tmp_path)
    text = told(recipe, tmp_path)
    for part in (
        "| 90.41 ± 0.09 (something large) |",
        "| 7.00 (no error given)",
        "| the paper's, of what it says |",
        "- b: something large, 6 seeds (somebody, Table 2)",
    ):
        assert part in text, part
    one = known_recipe(paper={"a": none, "b": none})
    found = results.rows(one, "smoke", tmp_path)
    assert "| the paper's: no error given |" in tables.table(
        one, found, paper=True
    )
    first = results.recipes()["first-experiment"].paper
    assert [
        (first[arm].mean, first[arm].se)
        for arm in ("ResNet BN", "ResNet BNN", "ViT LN", "ViT LNN")
    ] == [(88.89, 0.07), (90.41, 0.09), (94.61, 0.31), (95.78, 0.21)]
    assert re.search(
        r"\| first-experiment .*\| paper.*\(only: ResNet-18, CIFAR-10, no "
        "augmentation; ViT, SVHN, a",
        tables.listing(tmp_path),
    )


def test_compare_two_arms_and_two_folders(tmp_path, listed):
    more, one, two = 0.0, tmp_path / "one", tmp_path / "two"

    def run(config, seed, arm, **_):
        score = KNOWN[arm][seed] + more * (arm == "b" and seed > 1)
        return {"metrics": {"score": score, "always": 1.0}}

    results.run_recipe(listed(known_recipe(run)), "smoke", out=one)
    d = np.subtract(KNOWN["b"], KNOWN["a"])
    for arms, said in (
        ("ab", mean_and_error(d, "+")),
        ("ab", "seeds 0–3"),
        ("ba", f"{-d.mean():+.2f} ± "),
        ("aa", "+0.00 ± 0.00"),
    ):
        arms = [f"known/{arm}" for arm in arms]
        assert said in tables.compare(*arms, "smoke", one)
    with pytest.raises(ValueError, match="has the seeds none at scale book"):
        tables.compare("known/a", "known/b", "book", one)
    more = 0.5
    results.run_recipe(known_recipe(run), "smoke", seeds=3, out=two)
    text = " ".join(tables.compare(str(one), str(two)).split())
    for part in (
        "6 common runs; only in one of them: 2 and 0",
        "| a | 3 | 3 | score +0.000 ± 0.000 |",
        "| b | 3 | 2 | score +0.167 ± 0.167 |",
    ):
        assert part in text, part
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no run in common"):
        tables.compare(str(one), str(tmp_path / "none"))


def test_switches_corrected_and_equivalence_p_in_the_tables():
    """Against statsmodels: an analysis of variance for main effects and
    interaction, two one-sided tests for the last column.
    """
    ttost = installed("statsmodels.stats.weightstats").ttost_paired
    anova = installed("statsmodels.stats.anova").AnovaRM
    import pandas  # comes with statsmodels

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
    three = lambda p: "< 0.001" if p < 0.001 else f"{p:.3f}"
    for first, second in recipe.compare:
        line = next(
            line
            for line in read(tables.comparison(recipe, found))
            if line[0] == f"{second} − {first}"
        )
        a, b = values[first], values[second]
        p = scipy.stats.ttest_rel(b, a).pvalue
        assert line[6] == three(p) and line[9] == three(min(1, 5 * p))
        assert line[10] == f"{three(ttost(b, a, -1.5, 1.5)[0])} (±1.5)"
    lines = read(tables.two_switches(recipe, found))
    assert [line[0] for line in lines] == [
        "main effect of bend",
        "main effect of shake",
        "interaction",
    ]
    table = (
        anova(
            pandas.DataFrame(
                [
                    {
                        "seed": row["seed"],
                        "bend": names.index(row["arm"]) % 2,
                        "shake": names.index(row["arm"]) // 2,
                        "y": row["metrics"]["score"],
                    }
                    for row in found
                ]
            ),
            "y",
            "seed",
            within=["bend", "shake"],
        )
        .fit()
        .anova_table["Pr > F"]
    )
    o, a, b, c = values.values()
    for line, p, d in zip(
        lines,
        (table["bend"], table["shake"], table["bend:shake"]),
        ((a - o + c - b) / 2, (b - o + c - a) / 2, c - b - a + o),
    ):
        assert line[3] == f"{d.mean():+.2f} ± {scipy.stats.sem(d):.2f}"
        assert line[6] == three(p) and line[9] == three(min(1, 5 * p))
        assert line[10].startswith(three(ttost(d, 0 * d, -1.5, 1.5)[0]))
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
    with pytest.raises(ValueError, match="at least one run"):
        tables.forecast("known", "smoke", seeds=0, out=tmp_path)

    def elsewhere(name):
        raise data.DataError(f"{name} lies elsewhere")

    monkeypatch.setattr(results, "data_hash", elsewhere)
    status, out, err = printed("run", "known", "--dry-run", "--out", tmp_path)
    assert (status, err) == (1, "")
    assert "cannot be run here: digits lies elsewhere" in out


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
        rows = run("known", "smoke", out=tmp_path, progress=lines.append)
        assert len(rows) == 4
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


def test_command_line(tmp_path, listed):
    "What it says while it works; what it refuses: test_cli.py."
    listed(known_recipe())
    here = "--out", tmp_path
    status, out, err = printed("run", "known", "--seeds", 2, "--dry-run", *here)
    assert (status, err) == (0, "")
    assert "4 runs, 0 finished" in out
    assert not list(tmp_path.iterdir())
    status, out, err = printed("run", "known", "--seeds", 2, *here)
    assert status == 0
    assert "[4/4] known smoke b seed 1" in err
    assert printed("report", "known", *here) == (0, out, "")
    again = printed("run", "known", "--seeds", 1, "--arm", "b", *here)[2]
    assert "[1/1] known smoke b seed 0: finished before" in again


# ---- killed, doubled, starved ----


@pytest.mark.skipif(os.name != "posix", reason="patches flock")
def test_a_row_that_is_there_is_not_overwritten_by_a_second_writer(
    tmp_path, monkeypatch
):
    "Where files cannot be locked: the first row stays."
    import fcntl

    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    def run(**_):
        results.perform(job)  # the other writer is faster
        return {"metrics": {"score": 99.0}}

    monkeypatch.setattr(fcntl, "flock", refuse)
    job = results.plan(known_recipe(), "smoke", 1, tmp_path, ["a"])[0]
    slow = known_recipe(lambda config, **given: run(**given))
    row = results.perform(job._replace(recipe=slow))
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
        row = results.perform(job)
        assert row["metrics"] and holder.wait() != 0
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

    def run(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)

    listed(known_recipe(run))
    before = signal.getsignal(signal.SIGTERM)
    status, out, err = printed("run", "known", "--out", tmp_path)
    assert (status, out) == (143, "")
    assert err.endswith(
        "normalnorm: ended by SIGTERM; what was finished is kept, and the same "
        "command continues from it\n"
    )
    assert signal.getsignal(signal.SIGTERM) is before


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
    recipe = known_recipe(lambda *_, **__: outcome)
    with pytest.raises(ValueError, match=words):
        results.run_recipe(recipe, "smoke", 1, tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == [".checkpoints"]


FORKS = """
import os
from pathlib import Path
import torch
torch.set_num_threads(1)
from normalnorm.experiments import data, models, results
from normalnorm.experiments.optimization import Settings
from normalnorm.experiments.train import seeded, train

def run(config, seed, arm, device, checkpoint, progress):
    parts = {split: data.load("digits", split, 96) for split in data.SPLITS}
    with seeded("weights", seed):
        model = models.SmallResNet(width=4, stem_stride=1)
    train(model, parts, Settings(epochs=8, batch=16, lr=0.02), seed, device,
          checkpoint, progress)
    with open("performed", "a") as file:
        file.write(f"{arm}{seed} ")
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
    runs = [f"{arm}{seed}" for arm in "ab" for seed in range(3)]
    assert sorted((tmp_path / "performed").read_text().split()) == runs
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
    program = "import sys\nfrom normalnorm.cli import main\nsys.exit(main())"
    (tmp_path / "command.py").write_text(program)
    torchrun = "-m torch.distributed.run --nproc-per-node 2 command.py"
    run = "run first-experiment --seeds 1 --device cpu --out whole --arm"
    command = *torchrun.split(), *run.split(), "ResNet BNN"
    done = python(*command, cwd=tmp_path)
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
                ("elsewhere", "(epochs done: 1, 0)"),
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
    options = "-m tools.kills --scale smoke --kills 6 --flips 2 --skip worker"
    python(*options.split(), "--out", out, cwd=ROOT)
    found = json.loads(out.read_text())
    parts = found["parts"]
    assert found["failures"] == {}
    assert found["source"] == results.source_hash()
    assert parts["at_random_moments"]["kills"] == 6
    assert parts["in_a_write"]["kills"] == 1
    assert parts["sigterm"]["status"] == 143
    assert "start the same command again" in parts["full_disk"]["message"]
    bits = parts["turned_bits"]
    assert [bits[of]["bits"] for of in ("checkpoint", "row")] == [2, 6]


def _with_another_number(path):
    metrics = results.read_row(path)["metrics"] | {"test_last": 12.5}
    _remake(path, metrics=metrics)


@pytest.mark.parametrize(
    "damage",
    [
        _with_another_number,
        lambda path: path.write_text(path.read_text()[:-30]),
        Path.unlink,
        lambda path: shutil.copy(path, path.with_name(f"copy-{path.name}")),
        lambda path: (path.parents[2] / ".checkpoints" / "0.pt").touch(),
    ],
)
def test_the_command_that_kills_sees_a_wrong_row(damage, tmp_path, once):
    """A row with another number, one that is cut or missing, one that is there
    twice under another name, a checkpoint that stays: `settle` refuses each.
    """

    def make(folder):
        results.run_recipe(
            kills.RECIPE, "smoke", 1, folder, "cpu", arms=[kills.OTHER]
        )

    shutil.copytree(once("a row of smoke scale", make), tmp_path / "1")
    (path,) = tmp_path.rglob("*.json")
    expected = {kills.OTHER: kills.timeless(results.read_row(path))}
    trial = kills.Trial("smoke", tmp_path / "1", (kills.OTHER,))
    trial.start = lambda: subprocess.Popen([sys.executable, "-c", ""]).pid
    trial.settle(expected)
    damage(path)
    with pytest.raises(AssertionError):
        trial.settle(expected)


@pytest.mark.book
def test_what_came_out_of_the_kills():
    """The committed outcome: twenty kills of runs of book scale, and no
    failure, by the code of a commit of this repository.
    """
    found = json.loads((ROOT / "results" / "kills.json").read_text())
    parts = found["parts"]
    assert found["scale"] == "book" and found["failures"] == {}
    assert parts["at_random_moments"]["kills"] >= 20
    assert len(set(parts["at_random_moments"]["epochs done at each"])) > 10
    assert parts["in_a_write"]["left a half-written file"] > 0
    assert (
        parts["worker"]["killed"] == 1
        and "SIGTERM" in (parts["sigterm"]["message"])
    )
    assert parts["turned_bits"]["checkpoint"]["bits"] >= 100
    assert parts["turned_bits"]["row"]["bits"] >= 100
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["seconds"] > 20 * parts["undisturbed"]["seconds of a run"] / 2
    there = _package(found["commit"], (".py", *results.NATIVE))
    assert there in (None, found["source"])  # None: without the history


# ---- the first experiment ----


def test_smoke_scale_runs_and_rows_say_where_they_come_from(tmp_path):
    lines = []
    (row,) = results.run_recipe(
        "first-experiment",
        "smoke",
        seeds=[7],
        arms=["ResNet BNN"],
        out=tmp_path,
        device="cpu",
        progress=lines.append,
    )
    (file,) = tmp_path.rglob("*.json")
    assert results.read_row(file) == row
    assert (row["seed"], row["schema"]) == (7, results.SCHEMA)
    assert row.items() >= results.provenance().items()
    assert len(row["history"]) == row["config"]["train"]["epochs"]
    assert any("epoch 2/2" in line for line in lines)
    assert not list((tmp_path / ".checkpoints").iterdir())
    measured = row["gaussianity"]
    assert "stem_norm" in measured["after"]
    assert measured["before"].keys() == measured["after"].keys()
