"""What a proxy and instance norm do in wide random nets: results/cures.json.

    python -m tools.cures

Two and a half CPU minutes on one core. What is done is not repeated; what was
measured by another state of the chapters 340 and 425 is refused, unless
`--again` is given.
"""
import sys
from functools import partial
from pathlib import Path

import torch

from normalnorm.analysis import power
from normalnorm.checks import rivals
from normalnorm.experiments.data import data_hash
from tools import collapse, parts

RECORD = Path(__file__).resolve().parent.parent / "results" / "cures.json"
NAMES = ("LN", "LN+PN", "GN+PN", "IN")          # of chapter 425
DEPTH, WIDTH, NETS = 30, 512, 32


def cure(name: str) -> dict:
    """The powers of each normalizer's output, mean and deviation over the nets,
    and of P1 the largest too, by layer.
    """
    nets = [[[p.item() for p in power.power_decomposition(y).layer()]
             for _, y, _ in rivals.layers(rivals.RIVALS[name], seed,
                                          collapse.images(), DEPTH, WIDTH)]
            for seed in range(NETS)]
    most = torch.tensor(nets)[:, :, 0].amax(0)
    return collapse.summary(nets) | {
        "p1_most": [float(f"{v:.5g}") for v in most.tolist()]}


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    return parts.run(
        __doc__, RECORD, [((name,), partial(cure, name)) for name in NAMES],
        {"depth": DEPTH, "width": WIDTH, "images": collapse.IMAGES,
         "data": data_hash("fashion")},
        parts.code(sys.modules[__name__], rivals.layers, rivals.Rival,
                   rivals.group, rivals.relu, rivals.proxied, collapse.images,
                   collapse.summary, power.power_decomposition,
                   power.PowerMeter), "cures", arguments)


if __name__ == "__main__":
    raise SystemExit(main())
