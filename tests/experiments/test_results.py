"""How results are kept: killed, interrupted, doubled and starved of disk;
tables with known answers; the command line.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from normalnorm import cli
from normalnorm.experiments import data, models, results, spread, tables
from normalnorm.experiments.optimization import Settings
from normalnorm.experiments.results import (
    Published,
    Recipe,
    ResultsError,
    UnknownName,
)
from normalnorm.experiments.statistics import contrast
from normalnorm.experiments.train import seeded, train
from tests.peers import installed

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT), os.environ.get("PYTHONPATH", "")]
    ),
    "OMP_NUM_THREADS": "1",
}

KNOWN = {"a": [1.0, 2.0, 4.0, 5.0], "b": [2.0, 2.5, 5.5, 9.0]}


def _recipe(run=None, **more):
    configs = {arm: {"data": "digits", "arm": arm} for arm in KNOWN}
    return Recipe(
        "known",
        "known numbers",
        (),
        {"smoke": configs, "book": configs},
        run
        or (
            lambda config, seed, arm, **_: {
                "metrics": {"score": KNOWN[arm][seed]}
            }
        ),
        {"score": "score"},
        (("a", "b"),),
        seeds={"smoke": 4},
        **more,
    )


def test_rows_are_read_without_their_recipe(tmp_path):
    "By arm, in the order of the seeds; what is missing or damaged is said."
    with pytest.raises(ResultsError, match="normalnorm run known --scale"):
        results.by_arm("known", "smoke", tmp_path)
    results.run_recipe(_recipe(), "smoke", [3, 0, 1], out=tmp_path)
    found = results.by_arm("known", "smoke", tmp_path)
    assert {
        arm: [(row["seed"], row["metrics"]["score"]) for row in rows]
        for arm, rows in found.items()
    } == {arm: [(k, of[k]) for k in (0, 1, 3)] for arm, of in KNOWN.items()}
    min((tmp_path / "known" / "smoke").glob("*.json")).write_text("{")
    with pytest.raises(ResultsError, match="it is no JSON"):
        results.by_arm("known", "smoke", tmp_path)


def test_report_equals_known_answer(tmp_path):
    results.run_recipe(_recipe(), "smoke", out=tmp_path)
    text = tables.report(_recipe(), tmp_path)
    for arm, values in KNOWN.items():
        assert (
            f"{np.mean(values):.2f} ± {scipy.stats.sem(values):.2f}" in text
        ), arm
    d = np.subtract(KNOWN["b"], KNOWN["a"])
    low, high = scipy.stats.ttest_rel(
        KNOWN["b"], KNOWN["a"]
    ).confidence_interval()
    assert (
        f"| {d.mean():+.2f} ± {scipy.stats.sem(d):.2f} | {low:+.2f} … "
        f"{high:+.2f} | no" in " ".join(text.split())
    )
    assert (
        "Scale smoke: digits data, 8 runs, seeds 0–3" in text
        and "Scale book" not in text
        and "No arm was tuned" in text
    )
    said = tables.report(
        _recipe(tuned="The rates are those of pilot runs"), tmp_path
    )
    assert "The rates are those of pilot runs." in said and (
        "No arm was tuned" not in said
    )
    test = scipy.stats.ttest_rel(KNOWN["b"], KNOWN["a"])
    # all differences positive: 2 of 16 choices of signs
    assert f"| {test.pvalue:.3f} | 0.125 |" in " ".join(text.split())
    for values in KNOWN.values():  # every seed is shown
        assert " | ".join(f"{v:.2f}" for v in values) in " ".join(
            text.split()
        ).replace("  ", " ")


def test_arms_with_different_seeds_are_paired_by_those_that_both_have(tmp_path):
    """An arm with one seed has a sentence and no line; a seed that an arm lacks
    is an empty place.
    """
    known = KNOWN | {"c": [7.0, 8.0, 9.0, 10.0]}
    configs = {arm: {"data": "digits", "arm": arm} for arm in known}
    recipe = Recipe(
        "known",
        "known numbers",
        (),
        {"smoke": configs},
        lambda config, seed, arm, **_: {"metrics": {"score": known[arm][seed]}},
        {"score": "score"},
        (("a", "b"), ("a", "c")),
        seeds={"smoke": 4},
    )
    results.run_recipe(recipe, "smoke", out=tmp_path)
    for path in tmp_path.rglob("*.json"):
        row = json.loads(path.read_text())
        if (row["arm"], row["seed"]) in {
            ("b", 0),
            ("c", 1),
            ("c", 2),
            ("c", 3),
        }:
            path.unlink()
    text = " ".join(tables.report(recipe, tmp_path).split())
    assert (
        "one seed only, so no standard error and no line in the table: c "
        in text
        and "seeds 0–3 (a); 1–3 (b)" in text
    )
    assert (
        "| score | seed 0 | seed 1 | seed 2 | seed 3 |" in text
        and "| a | 1.00 | 2.00 | 4.00 | 5.00 | | b | | 2.50 | 5.50 | 9.00 |"
        in text
    )
    for arm, values in (("a", known["a"]), ("b", known["b"][1:])):
        assert (
            f"| {arm} | {len(values)} | {np.mean(values):.2f} ± "
            f"{scipy.stats.sem(values):.2f} |" in text
        )
    d = np.subtract(known["b"], known["a"])[1:]
    assert (
        f"| b − a | score | 3 | {d.mean():+.2f} ± {scipy.stats.sem(d):.2f} |"
        in text
        and "c − a" not in text
    )
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
    results.run_recipe(_recipe(), "smoke", seeds=1, out=tmp_path)
    text = tables.report(_recipe(), tmp_path)
    assert "one seed only" in text and "±" not in text.split("over seeds")[1]
    with pytest.raises(ValueError, match="one seed"):
        tables.table(_recipe(), results.rows(_recipe(), "smoke", tmp_path))
    assert "no finished runs" in tables.report(_recipe(), tmp_path / "empty")


def test_finished_runs_are_not_repeated_and_failed_ones_leave_nothing(tmp_path):
    done = []

    def run(config, seed, arm, **_):
        if len(done) == 3:
            raise RuntimeError("power cut")
        done.append((arm, seed))
        return {"metrics": {"score": KNOWN[arm][seed]}}

    with pytest.raises(RuntimeError, match="power cut"):
        results.run_recipe(_recipe(run), "smoke", out=tmp_path)
    assert len(list(tmp_path.rglob("*.json"))) == 3
    results.run_recipe(_recipe(), "smoke", out=tmp_path)
    assert len(list(tmp_path.rglob("*.json"))) == 8 and len(done) == 3


def test_rows_of_other_configurations_leave_the_table(tmp_path):
    results.run_recipe(_recipe(), "smoke", out=tmp_path)
    changed = _recipe()
    changed = Recipe(
        **{
            **changed.__dict__,
            "scales": {
                "smoke": {
                    arm: {**config, "lr": 1}
                    for arm, config in changed.scales["smoke"].items()
                }
            },
        }
    )
    assert results.rows(changed, "smoke", tmp_path) == []
    assert "8 rows of other configurations are left out" in tables.report(
        changed, tmp_path
    )


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
def known(tmp_path, monkeypatch):
    "Eight rows, of a recipe that the package seems to have, in a folder."
    for module in (results, tables):
        monkeypatch.setattr(module, "recipes", lambda: {"known": _recipe()})
    results.run_recipe(_recipe(), "smoke", out=tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", BAD)
def test_unusable_rows_are_said_and_hide_no_others(case, known):
    """Each kind of damage: file, field, given and expected; list, report,
    forecast and comparisons count the others, `run` refuses, nothing is
    overwritten.
    """
    damage, message = BAD[case]
    file = sorted(known.rglob("*.json"))[0]
    content = damage(file.read_text())
    file.write_text(content)
    with pytest.raises(ResultsError, match=message) as error:
        results.rows("known", "smoke", known)
    assert str(file) in str(error.value) and len(str(error.value)) < 600
    assert [str(problem) for problem in tables.problems(known)] == [
        str(error.value)
    ]
    text = tables.listing(known)
    assert (
        "7 of 8" in text
        and "1 file is not counted" in text
        and text.count(str(file)) == 1
    )
    for text, left in (
        (tables.report("known", known), "| a   | 3     |"),
        (tables.forecast("known", "smoke", out=known), "8 runs, 7 finished"),
    ):
        assert (
            "1 file is not counted" in text
            and text.count(str(file)) == 1
            and left in text
        ), text
    if "lacks" not in message:  # a whole row, of a recipe that showed less
        with pytest.raises(ResultsError, match=message):
            results.run_recipe("known", "smoke", out=known)
    text = tables.compare("known/a", "known/b", "smoke", known)
    assert (
        "1 file is not counted" in text
        and text.count(str(file)) == 1
        and "seeds 1–3" in text
    )
    if "lacks" not in message:
        text = tables.compare(str(known), str(known))
        assert "2 files are not counted" in text and ": 7 common runs" in text
    assert file.read_text() == content and len(list(known.rglob("*.json"))) == 8


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
    import hashlib

    for file in sorted(known.rglob("*.json")):
        row = results.read_row(file)
        rest = {k: row[k] for k in sorted(row) if k != "digest"}
        by_hand = hashlib.sha256(
            json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()
        assert row["schema"] == 4 and row["digest"] == by_hand


def test_what_was_added_to_rows_afterwards_is_said(known):
    text = tables.report("known", known)
    for file in sorted(known.rglob("*.json"))[:3]:
        file.write_text(
            _remade(
                file.read_text(),
                processor=None,
                afterwards={"processor": "not recorded"},
            )
        )
    said = tables.report("known", known)
    line = (
        "scale smoke: not written with the runs: processor (not "
        "recorded), 3 rows\n\n"
    )
    assert said.count(line) == 1 and "(processor: " in text
    assert (
        said.replace(line, "").replace(", unknown), torch", "), torch") == text
    )


def _drawing():
    "Each seed draws its own 50 digits, and the arms of a seed the same."
    configs = {
        arm: {"data": "digits", "arm": arm, "images": 50, "draw": True}
        for arm in KNOWN
    }
    return Recipe(
        "known",
        "",
        (),
        {"smoke": configs},
        lambda config, seed, arm, **_: {"metrics": {"score": KNOWN[arm][seed]}},
        {"score": "score"},
        (("a", "b"),),
        seeds={"smoke": 3},
    )


def test_a_row_names_the_examples_that_were_drawn(tmp_path, monkeypatch):
    """By hand, from the positions; the identity does not know of it; rows of
    one seed that drew other examples make no pair.
    """
    import hashlib

    recipe = _drawing()
    results.run_recipe(recipe, "smoke", out=tmp_path)
    for row in (found := results.rows(recipe, "smoke", tmp_path)):
        positions = (
            data.drawn(data.dataset("digits", "train"), 50, row["seed"])
            .numpy()
            .astype("<i8")
        )
        assert (
            row["drawn_hash"]
            == hashlib.sha256(
                data.data_hash("digits").encode() + positions.tobytes()
            ).hexdigest()
            == results.drawn_hash(row["config"], row["seed"])
        )
        assert row["hash"] == results.identity(
            "known",
            row["arm"],
            row["config"],
            row["seed"],
            data.data_hash("digits"),
        )
    assert len({row["drawn_hash"] for row in found}) == 3
    files = sorted(tmp_path.rglob("*.json"))
    text = files[0].read_text()
    files[0].write_text(_remade(text, drawn_hash=None))
    with pytest.raises(
        ResultsError,
        match="`drawn_hash` is None, and by its "
        "configuration it draws training",
    ):
        results.read_row(files[0])
    files[0].write_text(_remade(text, drawn_hash="0" * 64))
    with pytest.raises(
        ResultsError,
        match="have the seed 0 and drew different"
        "(.|\n)*no pair: delete the older",
    ):
        results.rows(recipe, "smoke", tmp_path, any_code=True)


def test_a_recipe_that_draws_of_its_own_says_what(tmp_path):
    'Without a "draw" in the configuration, so in no identity either.'
    recipe = _drawing()
    configs = {
        arm: {k: v for k, v in config.items() if k != "draw"}
        for arm, config in recipe.scales["smoke"].items()
    }
    own = Recipe(
        **vars(recipe)
        | {
            "scales": {"smoke": configs},
            "run": lambda config, seed, arm, **_: {
                "metrics": {"score": KNOWN[arm][seed]},
                "drawn_hash": results.drawn_hash(config | {"draw": True}, seed),
            },
        }
    )
    ours = results.run_recipe(own, "smoke", out=tmp_path / "own")
    told = results.run_recipe(recipe, "smoke", out=tmp_path / "told")
    for a, b in zip(ours, told):
        assert a["drawn_hash"] == b["drawn_hash"] and a["hash"] != b["hash"]
    file = sorted((tmp_path / "own").rglob("*.json"))[0]
    file.write_text(_remade(file.read_text(), drawn_hash="0" * 64))
    with pytest.raises(ResultsError, match="drew different"):
        results.rows(own, "smoke", tmp_path / "own")


def test_rows_of_several_processes_are_another_code(known):
    assert len(results.rows("known", "smoke", known)) == 8
    file = sorted(known.rglob("*.json"))[0]
    file.write_text(_remade(file.read_text(), processes=2))
    with pytest.raises(
        ResultsError,
        match="different code(.|\n)*2 processes together(, "
        "backend .*)?: 1 rows",
    ):
        results.rows("known", "smoke", known)


OTHERWISE = {
    "torch": "2.4.0",
    "instructions": "AVX2",
    "threads": 2,
    "processes": 2,
    "device": "NVIDIA H100",
    "source": "0" * 12,
    "backend": "eager",
    "kernel": "vectors of 4",
}


@pytest.mark.parametrize("field", [*OTHERWISE, "processor", "python", "commit"])
def test_what_may_stand_in_one_table(field, known):
    """Rows of our kernel on an AVX-512 processor, and one of them that differs
    in one thing. A table by wrong rows must not be shown, alone or compared.
    """
    same = {
        "torch": "2.13.0+cpu",
        "instructions": "AVX512",
        "threads": 1,
        "backend": "native",
        "kernel": "vectors of 16",
    }
    files = sorted(known.rglob("*.json"))
    for file in files:
        file.write_text(_remade(file.read_text(), **same))
    files[3].write_text(
        _remade(
            files[3].read_text(), **{field: OTHERWISE.get(field, "another")}
        )
    )
    if field not in OTHERWISE:
        assert len(results.rows("known", "smoke", known)) == 8
        assert ("another" in tables.report("known", known)) == (
            field == "processor"
        )
        return
    for use in (
        lambda: results.rows("known", "smoke", known),
        lambda: tables.report("known", known),
        lambda: tables.compare("known/a", "known/b", "smoke", known),
    ):
        with pytest.raises(ResultsError, match="different code"):
            use()
    assert len(results.rows("known", "smoke", known, any_code=True)) == 8
    assert "rows of 2 codes in one table" in tables.report(
        "known", known, any_code=True
    )


def test_the_way_of_a_kernel_that_computed_nothing_does_not_count(known):
    for number, file in enumerate(sorted(known.rglob("*.json"))):
        file.write_text(
            _remade(
                file.read_text(), backend="eager", kernel=f"vectors of {number}"
            )
        )
    assert len(results.rows("known", "smoke", known)) == 8


def test_all_bad_rows_are_named_at_once_and_a_copy_counts_once(known):
    a, b, *_ = sorted(known.rglob("*.json"))
    copy = a.with_name("a-seed4-0123456789ab.json")
    copy.write_text(a.read_text())
    b.write_text("{")
    with pytest.raises(ResultsError) as error:
        results.rows("known", "smoke", known)
    assert "2 files are not counted" in tables.report("known", known)
    assert len(results.rows("known", "smoke", known, usable_only=True)) == 7
    assert (
        str(copy) in str(error.value)
        and str(b) in str(error.value)
        and f"belongs in a file called {a.name}" in str(error.value)
    )
    found = results.scan("known", "smoke", known)
    assert (
        len(found.rows) == 7
        and len(found.problems) == 2
        and "7 of 8" in tables.listing(known)
    )


def test_rows_that_cannot_be_opened_and_folders_that_are_files(known, tmp_path):
    file = sorted(known.rglob("*.json"))[0]
    file.unlink()
    file.mkdir()
    with pytest.raises(ResultsError, match="cannot be read"):
        results.read_row(file)
    (tmp_path / "a-file").touch()
    for use in (
        lambda: tables.report("known", tmp_path / "a-file"),
        lambda: tables.listing(tmp_path / "a-file"),
        lambda: results.rows("known", "smoke", tmp_path / "a-file"),
    ):
        with pytest.raises(
            ResultsError,
            match="a-file is a file: expected the folder of results",
        ):
            use()
    for first in (
        "/nonexistent",
        "nowhere/",
        "",
        str(tmp_path / "a-file"),
        str(known),
    ):
        with pytest.raises(
            UnknownName, match="two folders of results, or two arms"
        ):
            tables.compare(first, "known/b", "smoke", known)


# ---- what made them ----


def test_hash_of_the_package_counts_native_sources(tmp_path, monkeypatch):
    """By hand, over the files of the package; another byte in the kernel is
    another code.
    """
    import hashlib
    import shutil

    package = tmp_path / "normalnorm"
    shutil.copytree(
        ROOT / "normalnorm",
        package,
        ignore=shutil.ignore_patterns("__pycache__", "data_files"),
    )
    monkeypatch.setattr(
        results, "__file__", str(package / "experiments" / "results.py")
    )

    def now():
        results.source_hash.cache_clear()
        return results.source_hash()

    by_hand = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.cpp")]):
        by_hand.update(
            str(path.relative_to(package)).replace(os.sep, "/").encode()
            + b"\0"
            + path.read_bytes()
        )
    try:
        first = now()
        assert first == by_hand.hexdigest()[:12]
        for name in ("layers/engines/native.cpp", "layers/core.py"):
            with open(package / name, "a") as file:
                file.write("\n")
            first, before = now(), first
            assert first != before, name
        (package / "py.typed").write_text("no source")
        assert now() == first
    finally:
        monkeypatch.undo()
        results.source_hash.cache_clear()


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
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
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


def _called(source, backend=None):
    "What `codes` says of rows of this process."
    return (
        f"source {source}, torch {torch.__version__}, CPU with "
        f"{torch.backends.cpu.get_cpu_capability()}, threads: "
        f"{torch.get_num_threads()}"
        + (
            ", backend native (some way)"
            if backend == "native"
            else f", backend {backend}"
            if backend
            else ""
        )
    )


def _made(
    monkeypatch, recipe, out, seeds, source, backend, arms=None, lines=None
):
    with monkeypatch.context() as m:
        m.setattr(results, "source_hash", lambda: source)
        m.setattr(results, "_computed", lambda device: (backend, "some way"))
        results.run_recipe(
            recipe,
            "smoke",
            seeds=seeds,
            out=out,
            arms=arms,
            progress=(lines if lines is not None else []).append,
        )


@pytest.mark.parametrize(
    "others", [("111111111111", "native"), ("000000000000", "eager")]
)
def test_rows_of_different_code_make_no_table_unless_asked(
    others, tmp_path, monkeypatch
):
    recipe, lines = _recipe(), []
    for module in (results, tables):
        monkeypatch.setattr(module, "recipes", lambda: {"known": recipe})
    _made(
        monkeypatch, recipe, tmp_path, 2, "000000000000", "native", lines=lines
    )
    assert not any("other code" in line for line in lines)
    text = tables.report("known", tmp_path)
    _made(monkeypatch, recipe, tmp_path, 4, *others, lines=lines)
    assert (
        others[0] == "000000000000"
        or sum(
            f"rows of other code ({_called('0' * 12, 'native')}: 4 rows)"
            in line
            for line in lines
        )
        == 1
    )
    for use in (
        lambda: results.rows("known", "smoke", tmp_path),
        lambda: results.rows("known", "smoke", tmp_path, every=True),
        lambda: results.by_arm("known", "smoke", tmp_path),
        lambda: tables.report("known", tmp_path),
        lambda: tables.compare("known/a", "known/b", "smoke", tmp_path),
    ):
        with pytest.raises(ResultsError, match="different code") as error:
            use()
        assert f"{_called('0' * 12, 'native')}: 4 rows" in str(error.value)
        assert f"{_called(*others)}: 4 rows" in str(
            error.value
        ) and "any_code=True" in str(error.value)
    with pytest.raises(
        ResultsError, match=r"a-seed0-\w+\.json(.|\n)*another folder"
    ):
        results.rows("known", "smoke", tmp_path)
    assert len(
        results.rows("known", "smoke", tmp_path, any_code=True)
    ) == 8 and "8 of 8" in tables.listing(tmp_path)
    mixed = tables.report("known", tmp_path, any_code=True)
    assert (
        f"rows of 2 codes in one table: {_called('0' * 12, 'native')} (4); "
        in mixed
        and "codes in one table" not in text
    )
    assert "seeds 0–3" in tables.compare(
        "known/a", "known/b", "smoke", tmp_path, any_code=True
    )


def test_rows_without_a_backend_go_with_any_and_arms_of_one_code_compare(
    tmp_path, monkeypatch
):
    """A run that used no layer of ours cannot depend on the backend.

    Rows of other arms do not keep two arms from being compared.
    """
    recipe = _recipe()
    for module in (results, tables):
        monkeypatch.setattr(module, "recipes", lambda: {"known": recipe})
    _made(monkeypatch, recipe, tmp_path / "one", 4, "0" * 12, None, arms=["a"])
    _made(
        monkeypatch, recipe, tmp_path / "one", 4, "0" * 12, "native", arms=["b"]
    )
    assert len(results.rows("known", "smoke", tmp_path / "one")) == 8
    assert list(
        results.codes(results.scan("known", "smoke", tmp_path / "one").rows)
    ) == [_called("0" * 12, "native")]
    _made(
        monkeypatch, recipe, tmp_path / "two", 4, "0" * 12, "native", arms=["a"]
    )
    _made(
        monkeypatch, recipe, tmp_path / "two", 4, "1" * 12, "native", arms=["b"]
    )
    assert "seeds 0–3" in tables.compare(
        "known/a", "known/a", "smoke", tmp_path / "two"
    )
    with pytest.raises(
        ResultsError, match="the two arms were made by different code"
    ):
        tables.compare("known/a", "known/b", "smoke", tmp_path / "two")
    text = tables.compare(str(tmp_path / "one"), str(tmp_path / "two"))
    native = [_called(digit * 12, "native") for digit in "01"]
    assert f"{tmp_path / 'one'}: {native[0]}\n" in text
    assert f"{tmp_path / 'two'}: {native[0]}; {native[1]}\n" in text


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
    assert len(found) == 911
    return found


# measured before they were recipes: rows were made of their numbers
CARRIED = {
    "glyphs-hardness": 18,
    "weight-growth": 105,
    "pruning": 80,
    "pruning-time": 8,
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
    results.run_recipe(_recipe(), "smoke", out=known)
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
def test_the_drawn_images_of_committed_rows_are_those_of_their_seeds():
    """And every row whose images are drawn names them; the identities are
    those of the files' names and of the present configurations.
    """
    count = {}
    for path, row in committed().items():
        draws = "draw" in row["config"] or row["recipe"] == "proxy-norm"
        assert draws == (row["drawn_hash"] is not None), path
        if draws:
            count[row["recipe"]] = count.get(row["recipe"], 0) + 1
            key = row["config"]["data"], row["config"]["images"], row["seed"]
            assert row["drawn_hash"] == _drawn(*key), path
    assert count == {
        "transform-given-noise": 96,
        "transform-given-noise-500": 48 + 8,
        "transform-given-noise-glyphs": 48 + 2,
        "proxy-norm": 120,
        "glyphs-hardness": 18,
        **{f"one-factor-{factor}": 25 for factor in ("batch", "rate", "scale")},
    }


@functools.lru_cache
def _drawn(name, images, seed):
    return data.data_hash(name, first=images, draw=seed)


def test_unknown_names_list_near_matches(tmp_path):
    with pytest.raises(UnknownName) as error:
        results.run_recipe("first-experimnt", out=tmp_path)
    assert (
        str(error.value) == "no recipe is called 'first-experimnt': did "
        "you mean first-experiment?"
    )
    with pytest.raises(UnknownName, match="did you mean smoke"):
        results.run_recipe("first-experiment", scale="smok", out=tmp_path)
    with pytest.raises(UnknownName, match="did you mean.*ResNet BNN"):
        results.run_recipe(
            "first-experiment", arms=["ResNet BNM"], out=tmp_path
        )
    with pytest.raises(UnknownName, match="first-experiment"):
        tables.report("experiment", tmp_path)
    with pytest.raises(
        UnknownName, match="did you mean ResNet BN, ResNet BNN.*two folders"
    ):
        tables.compare(
            "first-experiment/ResNet BNM",
            "first-experiment/ResNet BN",
            out=tmp_path,
        )
    with pytest.raises(
        ValueError,
        match="`compare` names the arm 'c', which no scale has: known are a, b",
    ):
        Recipe(
            "r", "", (), {"book": {"a": {}, "b": {}}}, print, {}, (("a", "c"),)
        )
    with pytest.raises(ValueError, match="at least one run"):
        results.run_recipe("first-experiment", seeds=0, out=tmp_path)


def test_results_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMALNORM_RESULTS", str(tmp_path / "here"))
    results.run_recipe(_recipe(), "smoke", seeds=1)
    assert len(list((tmp_path / "here").rglob("*.json"))) == 2
    assert (
        "first-experiment" in tables.listing() and "smoke" in tables.listing()
    )


# ---- grids ----


def _tuned(grid, **more):
    "Arm b is better in validation at x = 2, and in test at x = 3."

    def run(config, seed, arm, **_):
        return {
            "metrics": {
                "score": float(config["x"] * 10 + seed),
                "validation_last": {1: 0.0, 2: 5.0, 3: 1.0}[config["x"]]
                + seed % 2,
            }
        }

    scales = {"smoke": {arm: {"data": "digits", "x": 1} for arm in "ab"}}
    return Recipe(
        "tuned",
        "",
        (),
        scales,
        run,
        {"score": "score"},
        (("a", "b"),),
        grid=grid,
        **more,
    )


def test_compared_arms_have_the_same_grid_or_none():
    _tuned({"a": {"x": (1, 2)}, "b": {"x": [1, 2]}})
    for grid in (
        {"a": {"x": (1, 2)}},
        {"a": {"x": (1, 2)}, "b": {"x": (1, 2, 3)}},
        {"a": {"x": (1,)}, "b": {"y": (1,)}},
    ):
        with pytest.raises(ValueError, match="same grid, or none"):
            _tuned(grid)
    with pytest.raises(ValueError, match="`grid` names the arm 'c'"):
        _tuned({"c": {"x": (1,)}})


def test_a_grid_that_comes_later_takes_in_what_was_run_before(tmp_path):
    """Rows from before the grid have no setting; their configuration says which
    point they are.
    """
    results.run_recipe(_tuned({}), "smoke", seeds=2, out=tmp_path)
    recipe = _tuned({arm: {"x": (1, 2)} for arm in "ab"})
    assert (
        len(
            [
                job
                for job in results.plan(recipe, "smoke", 2, tmp_path)
                if job.state == "finished"
            ]
        )
        == 4
    )
    results.run_recipe(recipe, "smoke", seeds=2, out=tmp_path)
    assert {
        json.dumps(row["setting"])
        for row in results.rows(recipe, "smoke", tmp_path)
    } == {'{"x": 2}'}
    assert [
        row["setting"]["x"]
        for row in results.rows(recipe, "smoke", tmp_path, every=True)
    ].count(1) == 4


def test_settings_are_chosen_on_validation_and_the_table_says_so(tmp_path):
    recipe = _tuned({arm: {"x": (1, 2, 3)} for arm in "ab"})
    assert len(results.run_recipe(recipe, "smoke", seeds=2, out=tmp_path)) == 12
    shown = results.rows(recipe, "smoke", tmp_path)
    assert [
        (row["arm"], row["seed"], row["setting"], row["metrics"]["score"])
        for row in shown
    ] == [(arm, seed, {"x": 2}, 20.0 + seed) for arm in "ab" for seed in (0, 1)]
    text = tables.report(recipe, tmp_path)
    assert (
        "over the same grid" in text
        and '{"x": [1, 2, 3]}' in text
        and 'a: {"x": 2}' in text
        and "left out" not in text
        and "| 20.50 ±" in " ".join(text.split())
    )
    next(tmp_path.rglob("b-seed*.json")).unlink()
    results.run_recipe(recipe, "smoke", seeds=[5], arms=["a"], out=tmp_path)
    by_arm = {
        arm: [
            row["seed"]
            for row in results.rows(recipe, "smoke", tmp_path)
            if row["arm"] == arm
        ]
        for arm in "ab"
    }
    assert by_arm["a"] == [0, 1, 5] and len(by_arm["b"]) in (1, 2)
    for file in tmp_path.rglob("b-seed*.json"):
        file.unlink()
    results.run_recipe(
        _tuned({arm: {"x": (1, 2)} for arm in "ab"}),
        "smoke",
        seeds=2,
        arms=["b"],
        out=tmp_path,
    )
    assert (
        "no seed has finished all settings of the grid, so nothing is "
        "chosen: b" in tables.report(recipe, tmp_path)
    )


# ---- the paper beside, two of anything, before it runs ----


def test_papers_numbers_stand_beside_with_their_source(tmp_path):
    recipe = _recipe(
        paper={
            "b": Published(
                90.41, 0.09, 6, "something large", "somebody, Table 2"
            ),
            "a": Published(7.0, None, None, "no error given", "there"),
        }
    )
    results.run_recipe(recipe, "smoke", out=tmp_path)
    text = " ".join(tables.report(recipe, tmp_path).split())
    assert (
        "| 90.41 ± 0.09 (something large) |" in text
        and "| 7.00 (no error given)" in text
        and "| the paper's, of what it says |" in text
        and "- b: something large, 6 seeds (somebody, Table 2)" in text
    )
    one = _recipe(
        paper={
            arm: Published(9.0, None, None, "a set", "there") for arm in "ab"
        }
    )
    assert "| the paper's: a set |" in tables.table(
        one, results.rows(one, "smoke", tmp_path), paper=True
    )
    (line,) = (
        line
        for line in tables.listing(tmp_path).splitlines()
        if line.startswith("| first-experiment ") and "| paper" in line
    )
    assert "(only: ResNet-18, CIFAR-10, no augmentation; ViT, SVHN, a" in line
    first = results.recipes()["first-experiment"].paper
    assert [
        (first[arm].mean, first[arm].se)
        for arm in ("ResNet BN", "ResNet BNN", "ViT LN", "ViT LNN")
    ] == [(88.89, 0.07), (90.41, 0.09), (94.61, 0.31), (95.78, 0.21)]


def test_compare_two_arms_and_two_folders(tmp_path, monkeypatch):
    recipe = _recipe(
        lambda config, seed, arm, **_: {
            "metrics": {"score": KNOWN[arm][seed], "always": 1.0}
        }
    )
    for module in (results, tables):
        monkeypatch.setattr(module, "recipes", lambda: {"known": recipe})
    results.run_recipe(recipe, "smoke", out=tmp_path / "one")
    text = tables.compare("known/a", "known/b", "smoke", tmp_path / "one")
    d = np.subtract(KNOWN["b"], KNOWN["a"])
    assert (
        f"{d.mean():+.2f} ± {scipy.stats.sem(d):.2f}" in text
        and "seeds 0–3" in text
        and "Not among" not in text
    )
    assert f"{-d.mean():+.2f} ± " in tables.compare(
        "known/b", "known/a", "smoke", tmp_path / "one"
    )
    assert "+0.00 ± 0.00" in tables.compare(
        "known/a", "known/a", "smoke", tmp_path / "one"
    )
    with pytest.raises(ValueError, match="has the seeds none at scale book"):
        tables.compare("known/a", "known/b", "book", tmp_path / "one")
    other = _recipe(
        lambda config, seed, arm, **_: {
            "metrics": {
                "score": KNOWN[arm][seed] + 0.5 * (arm == "b" and seed > 1),
                "always": 1.0,
            }
        }
    )
    results.run_recipe(other, "smoke", seeds=3, out=tmp_path / "two")
    text = " ".join(
        tables.compare(str(tmp_path / "one"), str(tmp_path / "two")).split()
    )
    assert (
        "6 common runs; only in one of them: 2 and 0" in text
        and "| a | 3 | 3 | score +0.000 ± 0.000 |" in text
        and "| b | 3 | 2 | score +0.167 ± 0.167 |" in text
    )
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no run in common"):
        tables.compare(str(tmp_path / "one"), str(tmp_path / "none"))


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


def test_no_p_value_is_zero():
    """Twenty pairs that agree closely: p of the t test is 1e-20 and smaller,
    that of the signs 2e-5.
    """
    assert (
        scipy.stats.ttest_1samp([1.0 + i / 100 for i in range(20)], 0).pvalue
        < 1e-20
    )
    found = [
        {
            "arm": arm,
            "seed": seed,
            "metrics": {"score": 10.0 + (arm == "b") * (1 + seed / 100)},
        }
        for arm in "ab"
        for seed in range(20)
    ]
    line = tables.comparison(_recipe(), found).splitlines()[-1]
    assert line.count("| < 0.001 ") == 3 and "0.000" not in line
    assert tables.p_value(0.001) == "0.001"


def test_forecast_and_listing_know_what_is_finished_and_what_it_cost(
    tmp_path, monkeypatch
):
    recipe = _recipe(cost={"smoke": "a blink"})
    for module in (results, tables):
        monkeypatch.setattr(module, "recipes", lambda: {"known": recipe})
    assert (
        "no run has finished, so there is no measured time; the recipe's own "
        "estimate: a blink" in tables.forecast("known", "smoke", out=tmp_path)
    )
    results.run_recipe(recipe, "smoke", seeds=2, arms=["a"], out=tmp_path)
    for file in tmp_path.rglob("*.json"):
        file.write_text(_remade(file.read_text(), wall_seconds=120.0))
    job = results.plan(recipe, "smoke", [3], tmp_path, ["b"])[0]
    job.checkpoint.parent.mkdir(exist_ok=True)
    job.checkpoint.touch()
    text = tables.forecast("known", "smoke", out=tmp_path)
    assert (
        "8 runs, 2 finished, 1 begun" in text
        and "about 4 min on one process for 2 of the 6 runs left" in text
    )
    line = next(
        line
        for line in tables.listing(tmp_path).splitlines()
        if "smoke" in line
    )
    assert (
        "a blink" in line
        and "2 min a seed (1 of 2 arms)" in line
        and "2 of 8" in line
    )
    monkeypatch.setattr(
        results,
        "data_hash",
        lambda name: (_ for _ in ()).throw(
            data.DataError(f"{name} lies elsewhere")
        ),
    )
    assert "cannot be run here: digits lies elsewhere" in tables.forecast(
        "known", "smoke", out=tmp_path
    )
    status, out, err = _printed("run", "known", "--dry-run", "--out", tmp_path)
    assert status == 1 and "cannot be run here" in out and not err
    with pytest.raises(ValueError, match="at least one run"):
        tables.forecast("known", "smoke", seeds=0, out=tmp_path)


def test_arms_whose_data_are_missing_are_named_and_the_others_run(
    tmp_path, monkeypatch
):
    recipe = _recipe()
    recipe.scales["smoke"]["b"] = {"data": "elsewhere", "arm": "b"}
    for module in (results, tables):
        monkeypatch.setattr(module, "recipes", lambda: {"known": recipe})
    known, there = results.data_hash, {"digits"}

    def find(name):
        if name not in there:
            raise data.DataError(f"{name} lies on no machine")
        return known("digits")

    monkeypatch.setattr(results, "data_hash", find)
    line = "left out: b: elsewhere lies on no machine"
    assert {job.arm for job in results.plan(recipe, "smoke")} == {"a"}
    assert line in tables.forecast("known", "smoke", out=tmp_path)
    for jobs in (1, 2):
        lines = []
        run = (
            results.run_recipe
            if jobs == 1
            else functools.partial(spread.spread, jobs=2)
        )
        rows = run("known", "smoke", out=tmp_path, progress=lines.append)
        assert len(rows) == 4 and line in lines
    status, out, err = _printed("run", "known", "--out", tmp_path)
    assert status == 0 and line in err and "| a " in out
    for arms in (["b"], ["a", "b"]):
        with pytest.raises(data.DataError, match="elsewhere lies on no"):
            results.run_recipe("known", "smoke", out=tmp_path, arms=arms)
    there.clear()
    with pytest.raises(data.DataError, match="digits lies on no machine"):
        results.run_recipe("known", "smoke", out=tmp_path)
    there.update(("digits", "elsewhere"))
    assert results.left_out(recipe, "smoke") == []
    assert len(results.run_recipe("known", "smoke", out=tmp_path)) == 8


def _printed(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main([str(a) for a in arguments])
    return status, out.getvalue(), err.getvalue()


def test_command_line(tmp_path, monkeypatch):
    recipe = _recipe()
    for module in (results, tables):
        monkeypatch.setattr(module, "recipes", lambda: {"known": recipe})
    status, out, err = _printed(
        "run", "known", "--seeds", 2, "--dry-run", "--out", tmp_path
    )
    assert (
        status == 0
        and "4 runs, 0 finished" in out
        and not err
        and not list(tmp_path.iterdir())
    )
    status, out, err = _printed("run", "known", "--seeds", 2, "--out", tmp_path)
    assert status == 0 and "| a " in out and "[4/4] known smoke b seed 1" in err
    assert _printed("report", "known", "--out", tmp_path)[1] == out
    assert "4 of 8" in _printed("list", "--out", tmp_path)[1]
    assert (
        _printed(
            "compare",
            "known/a",
            "known/b",
            "--scale",
            "smoke",
            "--out",
            tmp_path,
        )[0]
        == 0
    )
    status, out, err = _printed(
        "compare", "known/a", "known/c", "--out", tmp_path
    )
    assert status == 2 and not out and "known are a, b" in err
    assert (
        "[1/1] known smoke b seed 0: finished before"
        in _printed(
            "run", "known", "--seeds", 1, "--arm", "b", "--out", tmp_path
        )[2]
    )
    (tmp_path / "file").touch()
    status, out, err = _printed("run", "known", "--out", tmp_path / "file")
    assert (
        status == 2
        and "normalnorm: " in err
        and "file" in err
        and "Traceback" not in err
    )


# ---- killed, doubled, starved ----


def _networks(epochs=4):
    def run(config, seed, arm, device, checkpoint, progress):
        parts = {split: data.load("digits", split, 64) for split in data.SPLITS}
        with seeded("weights", seed):
            model = models.SmallResNet(width=2, stem_stride=1)
        outcome = train(
            model,
            parts,
            Settings(epochs=epochs, batch=16, lr=0.02),
            seed,
            device,
            checkpoint,
            progress,
        )
        return {
            "metrics": {"test": outcome["last"]["test_accuracy"]},
            "losses": [epoch["train_loss"] for epoch in outcome["history"]],
        }

    return Recipe(
        "networks",
        "",
        (),
        {"smoke": {arm: {"data": "digits", "arm": arm} for arm in "ab"}},
        run,
        {"test": "test"},
    )


def test_full_disk_keeps_what_was_there_and_the_run_continues(tmp_path):
    """Files may not grow beyond a size that a row fits into and a checkpoint
    does not, after the second epoch.
    """
    resource = pytest.importorskip(
        "resource", reason="no limits on this system"
    )
    expected = results.run_recipe(
        _networks(), "smoke", seeds=1, arms=["a"], out=tmp_path / "whole"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def starve(line):
        if line.startswith("epoch 2/"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))

    try:
        with pytest.raises(
            OSError,
            match="was not written, and what was there before "
            "is untouched.*start the same command again",
        ):
            results.run_recipe(
                _networks(),
                "smoke",
                seeds=1,
                arms=["a"],
                out=tmp_path / "full",
                progress=starve,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (kept,) = (tmp_path / "full" / ".checkpoints").iterdir()
    assert len(torch.load(kept, weights_only=True)["history"]) == 2
    lines = []
    found = results.run_recipe(
        _networks(),
        "smoke",
        seeds=1,
        arms=["a"],
        out=tmp_path / "full",
        progress=lines.append,
    )
    assert (
        "continued after epoch 2" in " ".join(lines)
        and found[0]["losses"] == expected[0]["losses"]
        and found[0]["metrics"] == expected[0]["metrics"]
    )


def test_truncated_checkpoint_is_reported_and_stays(tmp_path):
    job = results.plan(_networks(), "smoke", 1, tmp_path, ["a"])[0]
    job.checkpoint.parent.mkdir(parents=True)
    job.checkpoint.write_bytes(b"PK\x03\x04 half")
    with pytest.raises(
        ValueError, match="cannot be read.*delete it to start the run again"
    ):
        results.run_recipe(_networks(), "smoke", 1, tmp_path, arms=["a"])
    assert (
        job.checkpoint.read_bytes() == b"PK\x03\x04 half"
        and not job.path.exists()
    )


@pytest.mark.skipif(os.name != "posix", reason="patches flock")
def test_a_row_that_is_there_is_not_overwritten_by_a_second_writer(
    tmp_path, monkeypatch
):
    "Where files cannot be locked: the first row stays."
    import errno
    import fcntl

    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    job = results.plan(_recipe(), "smoke", 1, tmp_path, ["a"])[0]

    def run(config, seed, arm, **_):
        results.perform(job)  # the other writer is faster
        return {"metrics": {"score": 99.0}}

    row = results.perform(job._replace(recipe=_recipe(run)))
    assert row["metrics"] == {"score": 1.0} and json.loads(
        job.path.read_text()
    )["metrics"] == {"score": 1.0}


HOLDER = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_that_another_process_holds_is_left_or_waited_for(tmp_path):
    "A holder that is killed holds nothing any more."
    job = results.plan(_recipe(), "smoke", 1, tmp_path, ["a"])[0]
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


def test_what_a_killed_writer_left_is_cleared_by_the_next(tmp_path):
    job = results.plan(_recipe(), "smoke", 1, tmp_path, ["a"])[0]
    left = [
        path.with_name(f".{path.name}.99-abcdef01")
        for path in (job.path, job.checkpoint)
    ]
    # of another job, which may be at work
    other = job.checkpoint.with_name(".0123456789ab.pt.99-abcdef01")
    for path in (*left, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    results.perform(job)
    assert (
        not any(path.exists() for path in left)
        and other.exists()
        and job.path.exists()
    )


def test_sigterm_ends_the_command_in_words(tmp_path, monkeypatch):
    "In the middle of a run; status 143; afterwards SIGTERM is what it was."
    import signal

    def run(config, seed, arm, **_):
        if seed == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"metrics": {"score": KNOWN[arm][seed]}}

    for module in (results, tables):
        monkeypatch.setattr(module, "recipes", lambda: {"known": _recipe(run)})
    before = signal.getsignal(signal.SIGTERM)
    status, out, err = _printed("run", "known", "--out", tmp_path)
    assert (
        status == 143
        and not out
        and err.endswith(
            "normalnorm: ended by SIGTERM; what was finished is kept, and the "
            "same "
            "command continues from it\n"
        )
    )
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(list(tmp_path.rglob("*.json"))) == 4
    assert not list(tmp_path.rglob("*.lock"))


def test_runs_without_metrics_are_refused(tmp_path):
    for nothing in (None, {}, {"metrics": 3}, {"metrics": {}}):
        with pytest.raises(ValueError, match="without `metrics`"):
            results.run_recipe(
                _recipe(lambda *_, **__: nothing), "smoke", 1, tmp_path
            )
    for value in (float("nan"), float("inf"), "1.0", None, True, [1.0]):
        with pytest.raises(
            ValueError, match="for the metric `score`: expected a finite number"
        ):
            results.run_recipe(
                _recipe(lambda *_, **__: {"metrics": {"score": value}}),
                "smoke",
                1,
                tmp_path,
            )
    assert not list(tmp_path.rglob("*.json")) and not list(
        (tmp_path / ".checkpoints").iterdir()
    )


FORKS = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from normalnorm.experiments import data, models, results
from normalnorm.experiments.optimization import Settings
from normalnorm.experiments.train import seeded, train

class NoisyNorm(torch.nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + (
            0.3 * torch.randn_like(x) if self.training else 0)

def run(config, seed, arm, device, checkpoint, progress):
    parts = {split: data.load("digits", split, 96) for split in data.SPLITS}
    with seeded("weights", seed):
        model = models.SmallResNet(width=4, stem_stride=1, norm=NoisyNorm)
    outcome = train(model, parts, Settings(epochs=8, batch=16, lr=0.02), seed,
                    device, checkpoint, progress,
                    augment=lambda x, y: (x + 0.1 * torch.randn(()), y))
    with open(checkpoint.parents[1] / "performed", "a") as file:
        file.write(f"{arm}{seed} ")
    return {"metrics": {"test": outcome["last"]["test_accuracy"],
                        "chosen": outcome["chosen"]["epoch"]},
            "losses": [epoch["train_loss"] for epoch in outcome["history"]]}

recipe = results.Recipe(
    "forks", "", (),
    {"smoke": {arm: {"data": "digits", "arm": arm} for arm in "ab"}}, run,
    {"test": "test"})
# imports what is imported late
train(models.SmallResNet(width=2, stem_stride=1),
      {s: data.load("digits", s, 32) for s in data.SPLITS},
      Settings(epochs=1, batch=16))

def child(out):
    pid = os.fork()
    if not pid:
        try:
            results.run_recipe(recipe, "smoke", seeds=3, out=out, device="cpu")
        finally:
            os._exit(0)
    return pid

start = time.perf_counter()
os.waitpid(child(Path("whole")), 0)
# each kill also costs a start and a part of an epoch
longest = (time.perf_counter() - start) / 11
generator = random.Random(0)
# on a machine that has become faster the runs end before twenty kills: again,
# with half the time between them
for attempt in range(8):
    kills, out = 0, Path(f"kills{attempt}")
    while kills < 20:
        pid = child(out)
        time.sleep(generator.uniform(0.0, longest))
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        kills += 1
        for file in out.rglob("*.json"):
            json.loads(file.read_text())  # complete at any time
        for file in out.rglob("*.pt"):
            torch.load(file, weights_only=True)
    unfinished = sum(job.state != "finished"
                     for job in results.plan(recipe, "smoke", 3, out))
    if kills == 20 and unfinished:
        break
    longest /= 2
os.waitpid(child(out), 0)
for pid in [child(Path("two")), child(Path("two"))]:
    os.waitpid(pid, 0)
out.rename("kills")
print(kills, unfinished)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_twenty_kills_and_two_at_once_change_nothing(tmp_path):
    """kill −9 at random moments; two processes at one list.

    Both end with the rows of an undisturbed run, and nothing is done twice.
    """
    (tmp_path / "forks.py").write_text(FORKS)
    done = subprocess.run(
        [sys.executable, "forks.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kills, unfinished = map(int, done.stdout.split())
    assert kills == 20 and unfinished > 0  # every kill met a run
    found = {
        mode: {
            p.name: json.loads(p.read_text())
            for p in (tmp_path / mode).rglob("*.json")
        }
        for mode in ("whole", "kills", "two")
    }
    assert len(found["whole"]) == 6
    for mode in ("kills", "two"):
        assert found[mode].keys() == found["whole"].keys()
        for name, row in found[mode].items():
            assert (
                row["metrics"] == found["whole"][name]["metrics"]
                and row["losses"] == found["whole"][name]["losses"]
            )
        assert not [
            p.name for p in (tmp_path / mode / ".checkpoints").iterdir()
        ], "leftovers"
    assert sorted(
        (tmp_path / "two" / "performed").read_text().split()
    ) == sorted(f"{arm}{seed}" for arm in "ab" for seed in range(3))


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
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "command.py",
            "run",
            "first-experiment",
            "--arm",
            "ResNet BNN",
            "--seeds",
            "1",
            "--device",
            "cpu",
            "--out",
            "whole",
        ],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # one of them reports
    assert done.stdout.count("results in whole") == 1
    assert done.stderr.count("epoch 2/2") == 1
    (file,) = (tmp_path / "whole").rglob("*.json")
    whole = results.read_row(file)
    assert whole["processes"] == 2
    assert not list(tmp_path.rglob("*.pt"))

    done = subprocess.run(
        [sys.executable, "together.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ended = dict(map(json.loads, done.stdout.splitlines()))

    def told(name, rank=0, kind="err"):
        return (tmp_path / f"{name}-{rank}.{kind}").read_text()

    assert ended["again"] == [0, 0] and "finished before" in told("again")
    assert told("again", 1, "out") == "" and "results in" in told(
        "again", 0, "out"
    )
    assert ended["killed"] == [-9, 1] and ended["one fails"] == [1, 2]
    assert all(
        "another process of this torchrun has ended" in said
        for said in (told("killed", 1), told("one fails"))
    )
    assert ended["elsewhere"] == [2, 2]
    for rank in range(2):
        assert (
            "of 2 processes, some have read a checkpoint"
            in (said := told("elsewhere", rank))
            and "(epochs done: 1, 0)" in said
        ), said
    assert ended["full"] == [2, 2]
    for rank in range(2):
        assert "normalnorm: " in told("full", rank) and (
            "no space left" in told("full", rank)
        )
    assert ended["resumed"] == [0, 0]
    assert "continued after epoch 2" in told("resumed")
    (again,) = (
        results.read_row(path) for path in (tmp_path / "killed").rglob("*.json")
    )
    for row in (whole, again):
        row["metrics"].pop("seconds")
        for epoch in row["history"]:
            epoch.pop("seconds")
    for field in ("metrics", "history", "gaussianity", "test_right", "hash"):
        assert again[field] == whole[field], field
    assert "the second process cannot" in told("one fails", 1)
    assert not list((tmp_path / "new").rglob("*.json"))
    assert ended["jobs"] == [2, 2] and "--jobs" in told("jobs")
    assert ended["damaged"] == [2, 2] and all(
        "something was edited" in told("damaged", rank) for rank in range(2)
    )


# ---- a run of book scale: a command of its own ----


def test_the_command_that_kills(tmp_path):
    """At scale "smoke", where runs take half a second: each part counts what
    it says, and comes to the row of an undisturbed run. (A killed worker:
    tests/experiments/test_spread.py.)
    """
    out = tmp_path / "kills.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tools.kills",
            "--scale",
            "smoke",
            "--kills",
            "2",
            "--flips",
            "2",
            "--skip",
            "worker",
            "--out",
            out,
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    parts = found["parts"]
    assert found["failures"] == {} and found["source"] == results.source_hash()
    assert parts["at_random_moments"]["kills"] == 2
    assert parts["in_a_write"]["kills"] == 1
    assert parts["sigterm"]["status"] == 143
    assert "start the same command again" in parts["full_disk"]["message"]
    assert parts["turned_bits"]["checkpoint"]["bits"] == 2
    assert parts["turned_bits"]["row"]["bits"] == 6


def test_the_command_that_kills_sees_a_wrong_row(tmp_path):
    """A row with another number, one that is missing, one that is there twice
    under another name, a checkpoint that stays: `settle` refuses each.
    """
    from tools import kills

    (row,) = results.run_recipe(
        kills.RECIPE,
        "smoke",
        1,
        tmp_path / "1",
        arms=[kills.OTHER],
        device="cpu",
    )
    expected = {kills.OTHER: kills.timeless(row)}
    trial = kills.Trial("smoke", tmp_path / "1", (kills.OTHER,))
    trial.start = lambda: _ended()

    def _ended():
        process = subprocess.Popen([sys.executable, "-c", ""])
        return process.pid

    trial.settle(expected)
    (path,) = trial.folder.rglob("*.json")
    text = path.read_text()
    for damage in (
        lambda: path.write_text(
            _remade(text, metrics=row["metrics"] | {"test_last": 12.5})
        ),
        lambda: path.write_text(text[:-30]),
        path.unlink,
        lambda: path.with_name(f"copy-{path.name}").write_text(text),
        lambda: (tmp_path / "1" / ".checkpoints" / "0.pt").touch(),
    ):
        (tmp_path / "1" / ".checkpoints").mkdir(exist_ok=True)
        damage()
        with pytest.raises(AssertionError):
            trial.settle(expected)
        for other in path.parent.glob("copy-*"):
            other.unlink()
        path.write_text(text)
    assert kills.timeless({"seconds": 1, "a": [{"seconds": 2, "b": 3}]}) == {
        "a": [{"b": 3}]
    }


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


def test_paper_scale_says_what_is_missing(tmp_path, monkeypatch):
    hub = pytest.importorskip("normalnorm.experiments.hub")
    pytest.importorskip(
        "datasets",
        reason="without it the error says how to install it: "
        "tests/experiments/test_data.py",
    )
    monkeypatch.setattr(hub, "_reachable", lambda library: False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.delenv("NORMALNORM_DATASETS", raising=False)
    with pytest.raises(
        data.DataError, match="cifar10 is not on this machine.*hf download"
    ):
        results.run_recipe("first-experiment", "paper", seeds=1, out=tmp_path)


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
    again = json.loads(next(tmp_path.rglob("*.json")).read_text())
    assert (
        again == json.loads(json.dumps(row))
        and row["seed"] == 7
        and row["data_hash"] == data.data_hash("digits")
    )
    for key in (
        "schema",
        "config",
        "history",
        "metrics",
        "device",
        "torch",
        "python",
        "commit",
        "source",
        "wall_seconds",
        "threads",
        "processor",
        "instructions",
        "kernel",
        "backend",
    ):
        assert key in row
    assert (
        row["schema"] == results.SCHEMA == 4
        and row["source"] == results.source_hash()
    )
    assert len(row["history"]) == row["config"]["train"]["epochs"] and any(
        "epoch 2/2" in line for line in lines
    )
    assert not list((tmp_path / ".checkpoints").iterdir())
    assert (
        row["gaussianity"]["before"].keys()
        == row["gaussianity"]["after"].keys()
        and "stem_norm" in row["gaussianity"]["after"]
    )


def test_leftovers_of_a_process_that_died_after_its_row(tmp_path):
    """Killed between writing the row and tidying up: the next pass over the
    list removes the lock and the checkpoint.
    """
    recipe = results.find("first-experiment")
    job = results.plan(recipe, "smoke", 1, tmp_path)[0]
    job.path.parent.mkdir(parents=True)
    job.path.write_text('{"metrics": {}}')
    job.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    job.checkpoint.write_text("left")
    job.checkpoint.with_suffix(".lock").write_text("")
    with contextlib.suppress(Exception):
        results.perform(job)
    assert not list(job.checkpoint.parent.iterdir()) and job.path.exists()
