"""`make cards`: report cards of this library's layers and of others', without
times, into results/cards.json.

    python -m tools.cards             all of them (two minutes)
    python -m tools.cards TARGET …    these, printed and not recorded
"""

import argparse
import contextlib
import json
import re
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn

from normalnorm.analysis.report_card import PROPERTIES, layer_of, report_card
from normalnorm.experiments.results import processor
from tests import peers
from tools.files import save

RECORD = Path(__file__).resolve().parent.parent / "results" / "cards.json"
OWN = """
    batch batch1 batch3 sync decorrelated decorrelated1 sync_decorrelated
    normalnorm.DecorrelatedBatchNorm1d normalnorm.DecorrelatedBatchNorm2d
    normalnorm.SyncDecorrelatedBatchNorm instance instance1 instance3 layer
    layer2 group(num_groups=4) rms frn bmlv lmbv renorm evonorm(num_groups=4)
    dyt derf propagated normalnorm.ProxyNorm(C,'relu')
""".split()
OWN += [
    f"normalnorm.{name}{kind}"
    for name in ("PreLayerNorm", "RegNorm", "PreRegNorm")
    for kind in (
        "Conv2d(C,C,1)",
        "Conv1d(C,C,1)",
        "Conv3d(C,C,1)",
        "Linear(C,C)",
    )
]
TORCH = """
    BatchNorm1d BatchNorm2d BatchNorm2d(C,track_running_stats=False) LayerNorm
    GroupNorm(4,C) GroupNorm(1,C) InstanceNorm1d InstanceNorm2d
    InstanceNorm2d(C,track_running_stats=True) RMSNorm
""".split()
TIMM = """
    BatchNormAct2d EvoNorm2dB0 EvoNorm2dS0(C,4) EvoNorm2dS0a(C,4)
    FilterResponseNormTlu2d GroupNorm(C,4) GroupNorm1 LayerNorm2d LayerNormAct2d
    LayerNormFp32 RmsNorm RmsNorm2d SimpleNorm SimpleNorm2d
""".split()
TRANSFORMERS = """
    convnext.modeling_convnext.ConvNextLayerNorm
    gemma.modeling_gemma.GemmaRMSNorm
    llama.modeling_llama.LlamaRMSNorm
    t5.modeling_t5.T5LayerNorm
""".split()
TARGETS = [
    *OWN,
    *(f"torch.nn.{name}" for name in TORCH),
    *(f"timm.layers.{name}" for name in TIMM),
    *(f"transformers.models.{name}" for name in TRANSFORMERS),
]
ASKED = [name for name in PROPERTIES if name != "time"]


def card_of(target: str) -> dict:
    "Its lines."
    torch.set_num_threads(1)
    if target.startswith(("timm", "transformers")):
        peers.import_torchvision()
    own = re.search("evonorm|proxynorm", target.lower())
    activation = nn.Identity() if own else torch.relu
    card = report_card(layer_of(target), target, ASKED, activation)
    lines = card.as_dict()["lines"]
    if lines.get("power", {}).get("value"):  # of sixteen layers: the last
        lines["power"]["value"] = lines["power"]["value"][-1]
    for line in lines.values():
        line.pop("how", None)
    four_digits = lambda number: float(f"{float(number):.4g}")
    return json.loads(json.dumps(lines), parse_float=four_digits)


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.cards")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    wanted = parser.parse_args().targets
    rows = {}
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        with contextlib.closing(pool.map(card_of, wanted or TARGETS)) as made:
            for target, lines in zip(wanted or TARGETS, made):
                rows[target] = lines
                faults = [k for k, v in lines.items() if v["fault"]]
                print(f"{target:50} {', '.join(faults) or 'no fault'}")
    if not wanted:
        about = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "processor": processor(),
        }
        save(RECORD, about | {"rows": rows})


if __name__ == "__main__":
    main()
