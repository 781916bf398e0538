"""The rows on power in training, and the tool that makes them."""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def test_the_rows_are_of_the_size_that_the_text_says():
    record = json.loads((ROOT / "results/power-training.json").read_text())
    parts = record["parts"]
    training, rates = (
        {
            arm: [run["found"] for run in seeds.values()]
            for arm, seeds in parts[name].items()
        }
        for name in ("training", "rates")
    )
    assert set(training) == set(rates) and len(training) == 7
    assert all(len(seeds) == 5 for seeds in training.values())
    assert all(len(seeds) == 3 for seeds in rates.values())
    assert (
        sum(
            run["cpu_seconds"]
            for part in parts.values()
            for seeds in part.values()
            for run in seeds.values()
        )
        < 1800
    )
    for seeds in training.values():
        for run in seeds:
            for key in ("start", "epochs", "last"):
                assert torch.tensor(run[key]).shape == (19, 4)
            assert len(run["p1"]) == 1 + record["train"]["epochs"]
            # each mean over layers is that of the parts
            for key, at in (("start", 0), ("last", -1)):
                mean = torch.tensor(run[key])[:, 0].mean().item()
                assert mean == pytest.approx(run["p1"][at], abs=2e-4)


@pytest.mark.book
def test_the_tool_measures_again_what_the_rows_have(monkeypatch, tmp_path):
    tool = pytest.importorskip(
        "tools.power_training", reason="the book's tools are not installed"
    )
    threads = torch.get_num_threads()
    monkeypatch.setattr(tool, "RECORD", tmp_path / "power-training.json")
    monkeypatch.setattr(tool, "ARMS", {"LN+WS": tool.ARMS["LN+WS"]})
    monkeypatch.setattr(tool, "TRAIN", tool.TRAIN | {"epochs": 1})
    monkeypatch.setattr(tool, "IMAGES", 256)
    monkeypatch.setattr(tool, "SEEDS", 1)
    try:
        assert tool.main(["--only", "training"]) == 0
        made = json.loads(tool.RECORD.read_text())
        tool.main(["--only", "training"])  # nothing is done twice
        assert json.loads(tool.RECORD.read_text()) == made
        monkeypatch.setattr(tool.parts, "code", lambda *of: "other")
        with pytest.raises(SystemExit):
            tool.main(["--only", "training"])
    finally:
        torch.set_num_threads(threads)
    found = made["parts"]["training"]["LN+WS"]["0"]["found"]
    kept = json.loads((ROOT / "results/power-training.json").read_text())
    kept = kept["parts"]["training"]["LN+WS"]["0"]["found"]
    # the weights at the start depend on the seed alone
    torch.testing.assert_close(
        torch.tensor(found["start"]),
        torch.tensor(kept["start"]),
        atol=2e-3,
        rtol=0,
    )
    assert found["vicinity"]["start"] == pytest.approx(
        kept["vicinity"]["start"], abs=5e-3
    )
