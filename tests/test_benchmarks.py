"The benchmark's own arithmetic; what it measures is in results/benchmarks."
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import measure

ROOT = Path(__file__).resolve().parents[1]


def test_ratio_of_known_times(monkeypatch):
    """By a clock of its own: twice as long is a ratio of two; the second
    function slows down from pair to pair, so that the quantiles are known.
    """
    clock, taken = [0.0], {"ours": 0, "theirs": 0}

    def work(name, seconds):
        def run():
            clock[0] += seconds(taken[name])
            taken[name] += 1
        return run
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    row = measure.ratio(work("ours", lambda _: 0.008),
                        work("theirs", lambda _: 0.004), 9)
    assert {row[k] for k in ("p20", "p50", "p80", "low", "high")} == {2.0} and (
        row["ms"], row["ms of the other"], row["pairs"]) == (8.0, 4.0, 9)
    # three calls to warm up and one to see how long it takes
    taken["theirs"] = -4
    row = measure.ratio(work("ours", lambda _: 0.1),
                        work("theirs", lambda n: 0.1 / (1 + max(n, 0))), 9)
    assert [row[k] for k in ("p20", "p50", "p80", "low", "high")] == [
        3.0, 5.0, 7.0, 2.0, 8.0] and row["ms of the other"] == 20.0


def test_memory_counts_the_input_once():
    rows = list(measure.memory(1, quick=True))
    assert [r["whose"] for r in rows] == ["ours", "PyTorch's"] and all(
        1 <= r["kept for backward, in inputs"] < 1.2 for r in rows)


def test_step_is_a_whole_step():
    layer, u = torch.nn.BatchNorm1d(3), torch.randn(8, 3, requires_grad=True)
    assert ([g.shape for g in measure.step(layer, u, torch.ones(8, 3))()]
            == [(8, 3), (3,), (3,)])


def test_environment_says_what_measured():
    """Processor, instruction set of PyTorch and of our kernel, backend, and a
    hash that counts native sources.
    """
    from benchmarks.__main__ import environment
    from normalnorm.experiments import results
    from normalnorm.layers.backends import normality_norm
    from normalnorm.layers.engines import native
    normality_norm(torch.randn(5, 3), (0,))
    found, made = environment(1), results.provenance()
    assert (found["source"] == results.source_hash()
            and found["processor"] == results.processor()
            and found["vectors"] == torch.backends.cpu.get_cpu_capability())
    assert ((found["backend"] == "native") == native.available()
            == bool(found["kernel"]) and found["kernel"] == made["kernel"])


def test_parts_measured_elsewhere_do_not_stay_under_one_environment(tmp_path):
    from benchmarks.__main__ import environment, kept
    target, rows = (tmp_path / "cpu-1-thread.json",
                    [{"part": "machine"}, {"part": "layers"}])
    assert kept(target, ["layers"]) == []
    target.write_text(json.dumps({"environment": environment(1), "rows": rows}))
    assert kept(target, ["layers"]) == [{"part": "machine"}] and kept(
        target, ["machine", "layers"]) == []
    for key in ("source", "processor", "vectors", "torch"):
        target.write_text(json.dumps(
            {"environment": environment(1) | {key: "another"}, "rows": rows}))
        assert kept(target, ["machine", "layers"]) == []
        with pytest.raises(
            SystemExit, match=f"would stay .machine. .*{key}: another there"
        ):
            kept(target, ["layers"])
    target.write_text(json.dumps({"environment": {}, "rows": rows}))
    with pytest.raises(SystemExit, match="source: not recorded there"):
        kept(target, ["layers"])


def test_unknown_part():
    done = subprocess.run([sys.executable, "-m", "benchmarks", "layer"],
                          cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 2 and "unknown: layer; there are machine, "
                                     "layers, memory, models" in done.stderr)


def test_committed_rows_are_complete():
    """Each shape has its three kinds of work against PyTorch's layer, batch
    norms a fourth (frozen), and two against compiled code, from at least thirty
    pairs.
    """
    for path in (ROOT / "results" / "benchmarks").glob("cpu-*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = [r for r in record["rows"]
                if r["part"] == "layers" and r["against"] == "PyTorch's layer"]
        compiled = {(r["layer"], tuple(r["shape"]), r["work"])
                    for r in record["rows"]
                    if r["part"] == "layers" and r["against"] == "compiled"}
        kinds = {(r["layer"], tuple(r["shape"])): set() for r in rows}
        for r in rows:
            kinds[r["layer"], tuple(r["shape"])].add(r["work"])
            assert r["pairs"] >= 30 and 0 < r["low"] <= r["p50"] <= r["high"]
        assert (len(kinds) >= 8
                and all(len(k) == 3 + name.startswith("BatchNorm")
                        for (name, _), k in kinds.items())
                and len(compiled) == 2 * len(kinds))
        assert record["environment"]["pages kept"]
        assert {r["part"] for r in record["rows"]} == {
            "machine", "layers", "memory", "models"}
