"""The rows of chapter 460 and the program that measures them: what it takes for
missing, and that it adds without touching what is there.
"""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import hessian

ROOT = Path(__file__).resolve().parents[2]
KEPT = json.loads((ROOT / "results/hessian.json").read_text())


def networks(rows):
    return [(row["seed"], row["skip"], row["kind"]) for row in rows]


def test_the_rows_are_complete():
    every = networks(KEPT["rows"])
    assert (
        sorted(every)
        == sorted(set(every))
        == sorted(
            (seed, skip, kind)
            for seed in range(6)
            for skip in (False, True)
            for kind in hessian.KINDS
        )
    )
    assert not any(hessian.missing(KEPT, part, 6) for part in hessian.PARTS)
    for row in KEPT["rows"]:
        for part in (row["before"], row["after"]):
            assert part is None or part["converged"]


def test_densities_are_those_of_the_networks_of_the_rows():
    """The ends of a density against the extremes of the same network, which
    another process has found; no node beyond them.
    """
    rows = dict(zip(networks(KEPT["rows"]), KEPT["rows"]))
    assert len(KEPT["densities"]) == 2 * len(hessian.KINDS)
    for found, place in zip(KEPT["densities"], networks(KEPT["densities"])):
        ends = rows[place]["after"]
        nodes, weights = (
            torch.tensor(found[name]).double() for name in ("nodes", "weights")
        )
        assert nodes.shape == (hessian.PROBES, hessian.NODES)
        assert (weights.sum(1) - 1).abs().max() < 1e-4
        top, slack = ends["largest"][0], 1e-3 * ends["largest"][0]
        assert (nodes.amax(1) - top).abs().max() < slack, place
        assert ends["smallest"] - slack < nodes.min(), place


def test_what_is_missing():
    nothing = hessian.missing({}, "rows", 2)
    assert nothing[0] == (0, False, hessian.KINDS[0])
    assert len(nothing) == len(set(nothing)) == 4 * len(hessian.KINDS)
    # of densities the first seed only, however many there are of rows
    assert {seed for seed, _, _ in hessian.missing({}, "densities", 6)} == {0}
    some = {
        "rows": [
            {"seed": 1, "skip": True, "kind": "lmbv"},
            {"seed": 0, "skip": False, "kind": "none"},
        ]
    }
    assert hessian.missing(some, "rows", 2) == [
        one for one in nothing if one not in networks(some["rows"])
    ]
    assert hessian.missing(some, "densities", 1) == [
        one for one in nothing if one[0] == 0
    ]


@pytest.fixture
def small(monkeypatch, tmp_path):
    "Two networks, few steps and products; how often each is measured."
    monkeypatch.setattr(hessian, "KINDS", ("none", "lmbv"))
    monkeypatch.setattr(hessian, "EXAMPLES", 32)
    monkeypatch.setattr(hessian, "DEPTH", 2)
    monkeypatch.setattr(hessian, "NODES", 4)
    monkeypatch.setattr(hessian, "PROBES", 2)
    monkeypatch.setattr(hessian, "memory", lambda: [{"above": 1}])
    made = []
    for part, (measure, seeds) in hessian.PARTS.items():

        def counted(*network, measure=measure, part=part):
            made.append((part, *network[:3]))
            return measure(*network)

        monkeypatch.setitem(hessian.PARTS, part, (counted, seeds))
    threads = torch.get_num_threads()
    yield tmp_path / "rows.json", made
    torch.set_num_threads(threads)


def call(path, *more):
    hessian.main(["--seeds", "1", "--steps", "2", "--out", str(path), *more])
    return json.loads(path.read_text())


def test_what_is_measured_outlives_an_interruption(small, monkeypatch):
    path, made = small
    measure, seeds = hessian.PARTS["rows"]

    def stopped(*network):
        if len(made) == 3:
            raise KeyboardInterrupt
        return measure(*network)

    with monkeypatch.context() as context:
        context.setitem(hessian.PARTS, "rows", (stopped, seeds))
        with pytest.raises(KeyboardInterrupt):
            call(path)
    short = json.loads(path.read_text())
    assert len(short["rows"]) == 3 and short["memory"]
    made.clear()
    assert call(path, "--missing")["rows"][:3] == short["rows"]
    assert [part for part, *_ in made].count("rows") == 1


def test_it_measures_what_is_missing_and_leaves_the_rest(small, capsys):
    path, made = small
    whole = call(path)
    assert len(made) == 8 and "added" not in whole and whole["memory"]
    # as if interrupted before networks with skips, and made before densities
    short = {**whole, "date": "once", "rows": whole["rows"][:2]}
    del short["densities"]
    path.write_text(json.dumps(short))
    made.clear()
    again = call(path, "--missing")
    assert made == [("rows", kind, True, 0) for kind in hessian.KINDS] + [
        ("densities", kind, skip, 0)
        for skip in (False, True)
        for kind in hessian.KINDS
    ]
    assert again["rows"] == whole["rows"]  # a seed is a seed
    assert again["densities"] == whole["densities"]
    # what made the first rows stays said, and what made the others is added
    assert again["date"] == "once" and again["memory"] == whole["memory"]
    (added,) = again["added"]
    assert added["parts"] == ["rows", "densities"]
    assert added["kinds"] == ["lmbv", "none"] and added["steps"] == 2
    assert {"source", "commit", "date", "torch", "processor"} <= set(added)
    # with more seeds only they are made, rows and no densities
    made.clear()
    more = call(path, "--missing", "--seeds", "2")
    assert {(part, seed) for part, _, _, seed in made} == {("rows", 1)}
    assert more["rows"][:4] == again["rows"] and len(more["added"]) == 2
    # and then there is nothing to do
    made.clear()
    before = path.read_bytes()
    capsys.readouterr()
    call(path, "--missing", "--seeds", "2")
    assert not made and path.read_bytes() == before
    assert "nothing is missing" in capsys.readouterr().out


def test_it_mixes_no_rows_of_other_settings(small, capsys):
    path, made = small
    with pytest.raises(SystemExit):
        call(path, "--missing")
    assert "leave out --missing" in capsys.readouterr().err
    call(path)
    made.clear()
    before = path.read_bytes()
    with pytest.raises(SystemExit):
        call(path, "--missing", "--steps", "3")
    assert "'steps': 2" in capsys.readouterr().err
    assert not made and path.read_bytes() == before


def test_a_network_that_diverged_has_no_spectrum(small, monkeypatch):
    monkeypatch.setattr(hessian, "RATE", 1e6)
    row = hessian.spectrum("none", True, 0, 3)
    assert row["before"] and row["after"] is None
    found = hessian.density("none", True, 0, 3)
    assert found["nodes"] is None and found["weights"] is None


def test_a_kept_row_is_measured_again():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        mine = hessian.spectrum("lmbv", True, 0, hessian.STEPS)
    finally:
        torch.set_num_threads(threads)
    kept = next(
        row
        for row in KEPT["rows"]
        if (row["seed"], row["skip"], row["kind"]) == (0, True, "lmbv")
    )
    for when in ("before", "after"):
        for name in ("loss", "smallest"):
            # 0.058 on SSE2
            assert abs(mine[when][name] / kept[when][name] - 1) < 0.08
        torch.testing.assert_close(
            torch.tensor(mine[when]["largest"]),
            torch.tensor(kept[when]["largest"]),
            rtol=0.05,
            atol=0,
        )
