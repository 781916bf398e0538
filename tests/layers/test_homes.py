"""Architectures of timm, transformers and torchvision: some visited again, and
the record of all of them.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.peers import installed
from tools import homes
from tools.files import load

PAGE = Path(__file__).parents[2] / "nbs" / "275_in_other_libraries.ipynb"

QUICK = (
    "timm efficientnet_b0",
    "timm convnext_atto",
    "timm resnetv2_50d_gn",
    "timm poolformer_s12",
    "timm resnetv2_50d_evos",
    "transformers Bert",
    "transformers ViT",
    "transformers ConvNext",
    "transformers Bit",
    "transformers Llama",
    "transformers Gemma2",
    "transformers Mamba",
    "transformers T5Encoder",
    "torchvision resnet18",
)


@pytest.mark.parametrize("home", QUICK)
def test_a_home(home):
    row = homes.visit(home)
    assert not homes.wrong(row), row
    known = load(homes.RECORD)["rows"][home]
    assert [row["replaced"], row["left"]] == [known["replaced"], known["left"]]


def test_the_record():
    rows = load(homes.RECORD)["rows"]
    assert list(rows) == homes.HOMES and len(rows) >= 60
    assert not [home for home, row in rows.items() if homes.wrong(row)]


@pytest.mark.parametrize(
    "changed",
    [
        {"difference": 2e-5},
        {"difference": float("nan")},
        {"loaded": 1e-9},
        {"moved": 1},
        {"back": False},
        {"replaced": {}},
        {"not called": ["norm"]},
        {"error": "of any kind"},
    ],
)
def test_what_is_wrong(changed):
    row = load(homes.RECORD)["rows"]["transformers Bert"]
    assert homes.wrong(row | changed)


def programs():
    "The programs that the handbook's page shows, by their library."
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    found = re.findall("^## (\\w+)\n\n```python\n(.*?)```", text, re.M | re.S)
    return dict(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["timm", "Lightning", "transformers"])
def test_a_program_runs_as_it_stands(library, tmp_path, monkeypatch):
    "What was loaded is what was trained, and not what it began with."
    package = {"Lightning": "pytorch_lightning"}.get(library, library)
    installed(package)
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "program"}
    torch.manual_seed(0)
    exec(programs()[library], space)
    trained = space["average"].module if library == "timm" else space["model"]
    again, kept = space["again"], trained.state_dict()
    assert str(again) == str(trained) and "NormalNorm" in str(again)
    assert again.state_dict().keys() == kept.keys()
    for name, value in again.state_dict().items():
        assert torch.equal(value, kept[name]), name
    if "running_lambda" in str(list(kept)):
        moved = [v for name, v in kept.items() if "running_lambda" in name]
        assert any((v != 1).any() for v in moved)
