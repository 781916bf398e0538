"""State dicts as today's layers save them: what every later version must load.

`python -m tests.state.record` writes a file beside this one for each case
that has none, and changes none that is there: a file says what was saved then.
It is what `torch.save` writes of a dictionary of plain tensors and settings:

    class, arguments, options   how the layer was made
    state                       its state dict, in float32, after three batches
    input, output               in evaluation, of the layer in float64
    torch                       the release that wrote it
"""

import copy
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import normalnorm.layers
from normalnorm.layers import families
from normalnorm.layers.guards import Leaf
from normalnorm.layers.parametrizations import weight_standardization
from normalnorm.layers.weights import normality_weight
from normalnorm.theory.gaussianizers import Chain, Tail
from normalnorm.theory.gradient import Identity, Power

FOLDER = Path(__file__).parent
NORMALITY = dict(eps=1e-3, noise=0.3, alpha=0.7)
TRACKED = dict(affine=True, track_running_stats=True)
GROUPS = dict(eps=1e-3, group_size=2)  # of 5 channels: the last is smaller
SIZES = {"B": 7, "C": 5, "L": 3, "D": 2, "H": 2, "W": 3}
CHANNELS, IMAGE, VOLUME = (4, 5), (2, 5, 2, 3), (2, 5, 1, 2, 3)
# name of the file, up to a hyphen that of the class: arguments, options, shape
CASES = {
    "BatchNormalNorm1d": ((5,), NORMALITY, CHANNELS),
    "BatchNormalNorm2d": ((5,), dict(eps=1e-2, momentum=None), IMAGE),
    "BatchNormalNorm2d-bare": ((5,), dict(affine=False, alpha=0.0), IMAGE),
    "BatchNormalNorm3d": ((5,), dict(NORMALITY, bias=False), VOLUME),
    "InstanceNormalNorm1d": ((5,), dict(NORMALITY, **TRACKED), (2, 5, 7)),
    "InstanceNormalNorm2d": ((5,), dict(affine=True, steps=2), IMAGE),
    "InstanceNormalNorm3d": ((5,), TRACKED, VOLUME),
    "LayerNormalNorm": (((3, 7),), NORMALITY, (2, 3, 7)),
    "LayerNormalNorm-safe": ((7,), dict(steps=3, safeguard=True), (2, 3, 7)),
    "LayerNormalNorm2d": ((5,), NORMALITY, IMAGE),
    "GroupNormalNorm": ((2, 6), NORMALITY, (2, 6, 5)),
    "SyncBatchNormalNorm": ((5,), NORMALITY, IMAGE),
    "DecorrelatedBatchNorm1d": ((5,), GROUPS, (7, 5)),
    "DecorrelatedBatchNorm2d": (
        (5,),
        dict(GROUPS, method="newton_schulz"),
        IMAGE,
    ),
    "DecorrelatedBatchNormalNorm1d": ((5,), dict(NORMALITY, **GROUPS), (7, 5)),
    "DecorrelatedBatchNormalNorm2d": ((6,), dict(num_groups=2), (2, 6, 2, 3)),
    "SyncDecorrelatedBatchNorm": ((5,), GROUPS, IMAGE),
    "SyncDecorrelatedBatchNormalNorm": ((5,), GROUPS, IMAGE),
    "BatchNormalNorm2d-chain": ((5,), dict(gaussianizer="Chain"), IMAGE),
    "InstanceNormalNorm1d-tail": (
        (5,),
        dict(gaussianizer="Tail", **TRACKED),
        (2, 5, 7),
    ),
    "DecorrelatedBatchNormalNorm1d-chain": (
        (5,),
        dict(gaussianizer="Chain", **GROUPS),
        (7, 5),
    ),
    "SyncBatchNormalNorm-identity": (
        (5,),
        dict(gaussianizer="Identity"),
        IMAGE,
    ),
    "FoldedNormality": (("lmbda", "weight", "bias"), {}, IMAGE),
    "BMLVNorm": ((5,), dict(eps=1e-3, noise=0.3), IMAGE),
    "BMLVNorm-power": ((5,), dict(gaussianizer="Power"), CHANNELS),
    "LMBVNorm": ((5,), dict(eps=1e-3, affine=False), IMAGE),
    "LMBVNorm-power": (
        (5,),
        dict(gaussianizer="Power", momentum=None),
        CHANNELS,
    ),
    "RootMeanSquareNorm": (((3, 7),), {}, (2, 3, 7)),
    "RootMeanSquareNorm-tail": (
        (7,),
        dict(eps=1e-3, gaussianizer="Tail"),
        (2, 3, 7),
    ),
    "FilterResponseNorm": ((5,), dict(gaussianizer="Power"), IMAGE),
    "FilterResponseNorm-bare": ((5,), dict(apply_act=False), VOLUME),
    "BatchReNorm": ((5,), dict(eps=1e-3), IMAGE),
    "EvoNorm2d": ((6, 2), dict(eps=1e-3, noise=0.3), (2, 6, 2, 3)),
    "EvoNorm2d-power": ((6, 3), dict(gaussianizer="Power"), (2, 6, 2, 3)),
    "PropagatedNorm": ((5,), {}, CHANNELS),
    "ProxyNorm": ((5,), dict(activation="gelu", samples=None), IMAGE),
    "PreLayerNormLinear": ((5, 3), dict(eps=1e-3), CHANNELS),
    "PreLayerNormConv1d": ((5, 3, 3), dict(padding=1), (2, 5, 7)),
    "PreLayerNormConv2d": ((5, 3, 2), dict(gain=False), IMAGE),
    "PreLayerNormConv3d": ((5, 3, 1), dict(bias=False), VOLUME),
    "RegNormLinear": ((5, 3), dict(eps=1e-3), CHANNELS),
    "RegNormConv1d": ((5, 3, 3), dict(scale="std"), (2, 5, 7)),
    "RegNormConv2d": ((5, 3, 2), {}, IMAGE),
    "RegNormConv3d": ((5, 3, 1), {}, VOLUME),
    "PreRegNormLinear": ((5, 3), {}, CHANNELS),
    "PreRegNormConv1d": ((5, 3, 3), dict(padding=1), (2, 5, 7)),
    "PreRegNormConv2d": ((5, 3, 2), {}, IMAGE),
    "PreRegNormConv3d": ((5, 3, 1), {}, VOLUME),
    "StandardizedWeight": ((), dict(scaled=True, gain=True), CHANNELS),
    "NormalityWeight": ((0, "Tail"), dict(center=False), CHANNELS),
}
# a layer of the table that has none here: as it is made from its channels
CASES |= {
    name: ((5,), {}, tuple(map(SIZES.get, row.inputs()[0].split())))
    for row in families.rows()
    if (name := row.layer.__name__) not in CASES and name[0] != "_"
}


def exported() -> dict[str, type]:
    "The classes of modules that the package exports, by name."
    found = {}
    for place in pkgutil.iter_modules(normalnorm.layers.__path__):
        module = importlib.import_module(f"normalnorm.layers.{place.name}")
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if (
                inspect.isclass(value)
                and issubclass(value, nn.Module)
                and value is not Leaf
            ):
                found[name] = value
    return found


def made(name: str, arguments: tuple, options: dict) -> nn.Module:
    """A new layer of the class `name`; a name among the arguments, or as
    `gaussianizer`, is that of a gaussianizer, or of a tensor of 5.
    """
    known = {"Power": Power, "Identity": Identity, "Tail": Tail, "Chain": Chain}
    known |= dict.fromkeys(("lmbda", "weight", "bias"), lambda: torch.ones(5))
    arguments = [known[a]() if isinstance(a, str) else a for a in arguments]
    options = {
        k: known[v]() if k == "gaussianizer" else v for k, v in options.items()
    }
    if name == "StandardizedWeight":  # a part of another layer
        return weight_standardization(nn.Linear(5, 3), **options)
    if name == "NormalityWeight":
        dim, gaussianizer = arguments
        return normality_weight(
            nn.Linear(5, 3), "weight", dim, gaussianizer, **options
        )
    return exported()[name](*arguments, **options)


def skewed(shape: tuple, seed: int) -> Tensor:
    "Float64, from the same seed the same."
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).exp()


def evaluated(layer: nn.Module, u: Tensor) -> Tensor:
    with torch.no_grad():
        return layer.double().eval()(u)


def record(case: str) -> dict:
    "What the file of a case holds."
    arguments, options, shape = CASES[case]
    name = case.partition("-")[0]
    torch.manual_seed(0)
    layer = made(name, arguments, options)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_(0.3 * skewed(p.shape, i).sin().float())
        if getattr(layer, "tau", None) is not None:
            layer.tau.add_(1)  # where it cuts
        if name == "FoldedNormality":
            for i, b in enumerate(layer.buffers()):
                b.mul_(0.3 * skewed(b.shape, 9 + i).sin().float() + 1)
        for seed in range(100, 103):
            layer.train()(skewed(shape, seed).float())
    u = skewed(shape, 7)
    state = copy.deepcopy(layer.state_dict())
    return {
        "class": name,
        "arguments": arguments,
        "options": options,
        "state": state,
        "input": u,
        "output": evaluated(layer, u),
        "torch": str(torch.__version__),
    }


def main() -> int:
    missing = set(exported()) - {case.partition("-")[0] for case in CASES}
    if missing:
        print(
            f"no case for {', '.join(sorted(missing))}: give one in CASES",
            file=sys.stderr,
        )
        return 1
    for case in CASES:
        file = FOLDER / f"{case}.pt"
        if not file.exists():
            torch.save(record(case), file)
            print(f"{file.name}: {file.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
