"""The rows of chapter 457 and the tool that measures them; what the chapter
says of them is checked by its own cells.
"""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
KEPT = json.loads((ROOT / "results/early-training.json").read_text())

tool = pytest.importorskip(
    "tools.early_training", reason="the book's tools are not installed"
)
pytestmark = pytest.mark.book


def test_the_rows_are_complete():
    assert (KEPT["seeds"], KEPT["steps"], KEPT["batch"]) == (4, 300, 64)
    assert set(KEPT["parts"]) == set(tool.NETWORKS)
    seconds = 0.0
    for kind, found in KEPT["parts"].items():
        assert set(found) == set(tool.LAYERS)
        assert KEPT["sizes"][kind] == list(tool.NETWORKS[kind])
        for part in found.values():
            seconds += part["cpu_seconds"]
            part = part["found"]
            assert len(part["runs"]) == 4
            best = min(
                (v, float(r))
                for r, v in part["trials"].items()
                if v is not None
            )
            assert part["rate"] == best[1]
            for run in part["runs"]:
                assert tuple(m["step"] for m in run) == tool.MOMENTS[: len(run)]
    assert seconds < 1200


@pytest.fixture
def short(monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "RECORD", tmp_path / "rows.json")
    monkeypatch.setattr(tool, "SEEDS", 1)
    monkeypatch.setattr(tool, "STEPS", 3)
    monkeypatch.setattr(tool, "TRIAL", 4)
    monkeypatch.setattr(tool, "RATES", (0.01,))
    threads = torch.get_num_threads()
    yield ["--only", "dense/layer norm"]
    torch.set_num_threads(threads)


def test_the_tool_measures_again_what_the_rows_have(short, monkeypatch):
    assert tool.main(short) == 0
    made = json.loads(tool.RECORD.read_text())
    tool.main(short)  # nothing is done twice
    assert json.loads(tool.RECORD.read_text()) == made
    (run,) = made["parts"]["dense"]["layer norm"]["found"]["runs"]
    kept = KEPT["parts"]["dense"]["layer norm"]["found"]["runs"][0]
    assert [m["step"] for m in run] == [0, 1, 3]
    for mine, theirs in zip(run, kept):
        assert mine.keys() == theirs.keys()
        for name in ("alike", "common", "mean cosine"):
            assert abs(mine[name] - theirs[name]) < 0.02, name
    monkeypatch.setattr(tool.parts, "code", lambda *of: "other")
    with pytest.raises(SystemExit):
        tool.main(short)


@pytest.mark.parametrize("kind", tool.NETWORKS)
@pytest.mark.parametrize("norm", ["none", "PreRegNorm", "weight norm"])
def test_networks(kind, norm):
    "Names of layers, biases at 0, the penalty, and gradients everywhere."
    model = tool.network(kind, norm, 0)
    x, y = tool.load("digits", "train", 8)
    assert model(x).shape == (8, 10)
    term = tool.penalty(model, kind)
    # all samples alike: all power is the batch's mean
    model(x[:1].repeat(4, 1, 1, 1))
    alike = tool.penalty(model, kind)
    if norm == "PreRegNorm":
        assert 0 < term < alike
        assert abs(alike.item() - 1) < 0.01
    else:
        assert term == alike == 0
    found = tool.gradients.gradient_norms(model, x, y)
    for layer in range(1, tool.NETWORKS[kind][0] + 1):
        assert tool.of_layer(found, layer) > 0
    assert all(
        not p.any() for n, p in model.named_parameters() if n.endswith("bias")
    )


def test_a_run_that_diverges_ends():
    steps = [step for step, _, _ in tool.trained("dense", "none", 1e4, 0, 20)]
    assert 0 < len(steps) < 21
    assert tool.trial("dense", "none", 1e4) is None
    model = tool.network("dense", "none", 0)
    with torch.no_grad():
        model.classifier.weight.fill_(float("nan"))
    assert tool.measured(model, "dense", 0) is None
