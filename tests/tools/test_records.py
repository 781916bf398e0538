"""Records and the code that they vouch for: see tools/records.py."""

import copy
import warnings

import pytest

from tests.peers import VECTORS
from tools import dialect, records

KEPT = {"records.json"}  # the ledger itself
NEWTON = "normalnorm/theory/newton.py"


def test_each_result_belongs_to_a_record():
    folder = records.ROOT / "results"
    found = {
        p.relative_to(folder).as_posix()
        for p in folder.rglob("*.json*")
        if ".checkpoints" not in p.parts
    }
    paths = [entry["path"] for entry in records.ledger().values()]
    known = {
        file
        for file in found
        for path in paths
        if file == path or file.startswith(f"{path}/")
    }
    assert found - known == KEPT


def test_each_record_names_code_that_is_there():
    for name, entry in records.ledger().items():
        for pattern in entry.get("files", ()):
            of = records.hashes([pattern.removeprefix("!")])
            assert of, f"{name}: no file is {pattern}"
    of = "normalnorm/layers/*.py", "!normalnorm/layers/k*.py"
    less = records.hashes(of[:1]).keys() - records.hashes(of).keys()
    assert less == {"normalnorm/layers/kernels.py"}


def test_each_entry_is_of_the_record_that_is_there():
    for name, entry in records.ledger().items():
        assert entry["content"] == records.content(entry["path"]), (
            f"{name} was made again: python -m tools.records --made '{name}'"
        )


def test_what_is_older_than_its_code_is_known():
    """Stale records are listed in the summary. Where a witness says otherwise
    than when its record was made, and nobody has written that down, this fails.
    """
    if not VECTORS:
        pytest.skip("without AVX2 rounding takes the first steps too far")
    entries = records.ledger()
    known = {name for name, entry in entries.items() if "stale" in entry}
    said = list(
        records.look(
            entries,
            lambda names: records.asked(
                [name for name in names if name not in known]
            ),
        )
    )
    new = {name for name, entry in entries.items() if "stale" in entry} - known
    assert not new, "\n".join(["run `make records`:", *said])
    if said:
        warnings.warn(
            "\n".join(["older than their code:", *said]), stacklevel=1
        )


@pytest.fixture
def syntax(tmp_path, monkeypatch):
    "The hash of a text as a Python file."
    monkeypatch.setattr(records, "ROOT", tmp_path)

    def of(text: str) -> str:
        (tmp_path / "a.py").write_text(text)
        return records._hash.__wrapped__("a.py")

    return of


@pytest.mark.parametrize(
    "old, new, equal",
    [
        ("x + 1", "(x+1)   # one more", True),
        ('"It adds."', '"Adds."', True),
        ('    "It adds."\n', "", True),
        ("x + 1", "x + 1.0000001", False),
        ("x + 1", "x - 1", False),
        ("text = 'a'", "text = 'b'", False),
        ("def f(x)", "async def f(x)", False),
    ],
)
def test_a_hash_is_of_the_syntax(syntax, old, new, equal):
    text = "text = 'a'\ndef f(x):\n    \"It adds.\"\n    return x + 1\n"
    assert text.count(old) == 1
    assert (syntax(text) == syntax(text.replace(old, new))) is equal


def test_a_constant_lists_exactly_the_records_that_use_it(monkeypatch):
    of, entries = records._hash, copy.deepcopy(records.ledger())
    monkeypatch.setattr(
        records, "_hash", lambda name: "other" if name == NEWTON else of(name)
    )
    after = {
        name
        for name, entry in entries.items()
        if NEWTON in records.changed(entry)
    }
    assert after == {
        name for name, entry in entries.items() if NEWTON in entry["code"]
    }
    assert {"transform-given-noise", "proxy-norm", "mutation"} <= after
    assert not {"neural-tangents", "glyphs-hardness"} & after


@pytest.mark.parametrize(
    "off, here, elsewhere",
    [
        (0.0, True, True),
        (1e-15, False, True),
        (8e-6, False, True),
        (2e-5, False, False),
    ],
)
def test_a_witness(off, here, elsewhere):
    entry = {"machine": ["a"], "witness": {"BN": [1.0, 2.0], "BNN": [3.0]}}
    said = {"BN": [1.0, 2.0 * (1 + off)], "BNN": [3.0]}
    for machine, expected in (("a", here), ("b", elsewhere)):
        how = records.apart(entry, {"machine": [machine], "witness": said})
        assert (how == "") is expected
        assert ("rounding" in how) == (0 < off < 1e-5 and not expected)
    assert records.apart(
        entry, {"machine": ["a"], "witness": {"BN": [1.0, 2.0]}}
    )


def test_what_becomes_of_a_record_whose_code_has_changed(monkeypatch):
    name, said = "torchattacks", [1.0]
    entry = {
        "path": "torchattacks/book",
        "again": "five minutes",
        "made": "2026-11-23",
        "machine": ["a"],
        "witness": [1.0],
        "code": {NEWTON: "of another day"},
    }
    ask = lambda names: {
        name: {"machine": ["a"], "witness": said, "code": {NEWTON: "today's"}}
        for name in names
    }
    entries = {name: dict(entry)}
    (line,) = records.look(entries, ask)
    assert "the witness says the same" in line
    assert entries[name]["code"] == {NEWTON: "today's"}
    said[0] += 1e-9
    entries = {name: dict(entry)}
    (line,) = records.look(entries, ask)
    assert (
        "the first steps differ by rounding: made on 2026-11-23, again in "
        "five minutes" in line
    )
    assert entries[name]["code"] == entry["code"] and entries[name]["stale"]
    monkeypatch.setattr(records, "ledger", lambda: entries)
    page = records.older(["nbs/x", "results/torchattacks/book/rows.jsonl"])
    assert page[0].endswith("by rounding): `results/torchattacks/book`.")
    assert len(page) == 1 and "2026-11-23" in page[0]
    assert not records.older(["results/pruning/book/rows.jsonl"])
    for key, off, stale in ((NEWTON, 0, 0), (NEWTON, 1e-9, 1), ("new", 0, 1)):
        here = {"machine": ["a"], "witness": [said[0] + off]}
        here["code"] = {key: "of another day"}
        monkeypatch.setattr(records, "before", lambda names: {name: here})
        entries = {name: entry | {"machine": ["b"], "witness": [2.0]}}
        (line,) = records.look(entries, ask)
        assert ("stale" in entries[name]) == stale, line


def test_a_page_says_of_which_day_its_record_is(monkeypatch):
    cells = [{"source": "# Title"}, {"source": "text"}]
    monkeypatch.setattr(
        records,
        "ledger",
        lambda: {
            "pruning": {
                "path": "pruning/book",
                "made": "2026-11-23",
                "stale": "its first steps differ",
            }
        },
    )
    marked = dialect.mark_older(cells, ["results/pruning/book/rows.jsonl"])
    assert len(marked) == 3
    assert "on 2026-11-23 with code" in marked[1]["source"]
    assert (
        dialect.mark_older(cells, ["results/collapse/book/rows.jsonl"]) is cells
    )


def test_five_steps_are_five():
    import torch

    from normalnorm.experiments.optimization import Settings
    from normalnorm.experiments.train import train

    data = {
        split: (torch.randn(40, 3), torch.arange(40) % 2)
        for split in ("train", "validation", "test")
    }
    found = records.five_steps(
        lambda: train(
            torch.nn.Linear(3, 2), data, Settings(epochs=3, batch=4), 0
        )
    )
    assert len(found) == len(set(found)) == 5
