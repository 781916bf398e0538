"""The rows of chapter 450's wide network, and the tool that makes them."""

import json
from pathlib import Path

import pytest
import torch

tool = pytest.importorskip(
    "tools.wide_propagation", reason="the book's tools are not installed"
)
pytestmark = pytest.mark.book
KEPT = json.loads(tool.RECORD.read_text())


def test_the_rows_are_complete():
    assert (KEPT["seeds"], KEPT["images"], KEPT["sigma"]) == (4, 64, 0.3)
    assert set(KEPT["parts"]) == set(KEPT["networks"]) == set(tool.NETWORKS)
    for own in KEPT["parts"].values():
        assert set(own) == set(tool.NORMS)
        assert all(
            torch.tensor(part["found"]).shape == (4, 25)
            for part in own.values()
        )


def test_networks_are_of_26_layers_with_the_same_weights():
    first, second = (
        tool.network("skips", norm, 1) for norm in ("None", "Weight")
    )
    convolutions = [
        m for m in first.modules() if isinstance(m, torch.nn.Conv2d)
    ]
    # 24 in the blocks and the stem; a shortcut where the shape changes
    assert len(convolutions) == 25 + 3
    for one, two in zip(
        convolutions,
        (m for m in second.modules() if isinstance(m, torch.nn.Conv2d)),
    ):
        torch.testing.assert_close(one.weight, two.weight)


def test_the_tool_measures_again_what_the_rows_have(monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "RECORD", Path(tmp_path / "rows.json"))
    monkeypatch.setattr(tool, "SEEDS", 1)
    threads = torch.get_num_threads()
    try:
        assert tool.main(["--only", "skipless/Layer"]) == 0
    finally:
        torch.set_num_threads(threads)
    made = json.loads(tool.RECORD.read_text())
    (run,), kept = (
        r["parts"]["skipless"]["Layer"]["found"] for r in (made, KEPT)
    )
    assert run == pytest.approx(kept[0], abs=2e-3)
