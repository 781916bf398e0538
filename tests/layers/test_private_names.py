"""Private names of PyTorch: which are used is written down here, and without
each of them the layers do what they did.
"""

import ast
import json
import os
import re
from collections.abc import Iterator

import torch
from torch import nn

from tests.hidden import CORE
from tests.layers.steps import python
from tools.files import ROOT

PLACES = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"

# ---- which there are --------------------------------------------------------

LIBRARY = {
    "guards.py": {"_C", *(name.rpartition(".")[2] for name in CORE)},
    "normality.py": {
        "_parameters",
        "_buffers",
        "_load_from_state_dict",
        "_BatchNorm",
    },
    "decorrelated.py": {"_load_from_state_dict"},
    "conversion.py": {"_metadata"},
    "proxy_conversion.py": {"_modules"},
    "hybrids.py": {"_C", "_current_graph_task_id"},
    "prelayer.py": {"_load_from_state_dict", "_conv_forward"},
}
PYTHON = {"_replace", "_fields", "_getframe"}  # documented


def of_objects() -> set[str]:
    "Names of tensors, modules, their states, optimizers and functions."
    layer = nn.BatchNorm1d(2)
    made = (
        *(torch.ones(()), layer.weight, layer, layer.state_dict()),
        *(torch.optim.SGD([layer.weight]), torch.autograd.Function),
    )
    return {name for one in made for name in dir(one)}


def used(tree: ast.AST) -> Iterator[str]:
    "After a dot, in imports, overridden, in strings that name one."
    known = of_objects()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(path)):
                if path in known or re.fullmatch(r"[\w.]+\._\w+", path):
                    yield from path.split(".")
            case (
                ast.Attribute(attr=path)
                | ast.alias(name=path)
                | ast.ImportFrom(module=str(path), level=0)
                | ast.FunctionDef(name=path)
            ):
                yield from path.split(".")


def made(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield name


def private_names(texts: dict[str, str]) -> dict[str, set[str]]:
    "Those that each uses and none of them makes, or makes for PyTorch."
    trees = {name: ast.parse(text) for name, text in texts.items()}
    own = {name for tree in trees.values() for name in made(tree)}
    own = own - of_objects() | PYTHON
    found = {
        place: {n for n in used(tree) if re.match("_[A-Za-z]", n)} - own
        for place, tree in trees.items()
    }
    return {place: names for place, names in found.items() if names}


def test_the_scan_sees_private_names():
    code = """
import torch._dynamo
from torch.utils._device import DeviceContext
(torch._C._functorch.is_batched(x), nn.modules.conv._ConvNd, x.y._version)
getattr(m, "_forward_hooks"), "_C._is_tracing", "_v2", "a _word"
def _load_from_state_dict(self): self._mine = self._mine, x._replace()
self._other
"""
    assert private_names({"one": code, "other": "_other = 1"}) == {
        "one": {
            *("_dynamo", "_device", "_C", "_functorch", "_ConvNd", "_version"),
            *("_forward_hooks", "_is_tracing", "_load_from_state_dict"),
        }
    }


def test_private_names_of_the_library():
    """In one place, with a public form; beside them what PyTorch's own layers
    override or keep in a dictionary.

    A new name is to be public, or to be bound by `guards.bound`.
    """
    folder = ROOT / "normalnorm"
    texts = {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.py")
        if "checks" not in path.parts and path.name != "_modidx.py"
    }
    assert private_names(texts) == {
        f"layers/{name}": names for name, names in LIBRARY.items()
    }


# ---- without them -----------------------------------------------------------

LAYERS = ("batch2", "layer")
WHERE = {
    # what asks for each name
    "_C._are_functorch_transforms_active": (
        "vmap",
        "torch.func.grad",
        "gradient under vmap",
        "jvp",
    ),
    "_C._len_torch_dispatch_stack": (
        "mode: fake",
        "mode: dispatch mode",
        "mode: counting operations",
        "memory: input freed before forward",
    ),
    "overrides._get_current_function_mode_stack": (
        "mode: function mode that doubles",
        "mode: device meta",
        "mode: device cpu",
        "mode: default device",
    ),
    "autograd.forward_ad._current_level": ("forward mode", "double backward"),
    "autograd.Function": (
        "input: as it should be",
        "many gradients at once",
        "hook: as it was",
        "hook: of inference",
        "broken hook: float64",
        "memory: weight freed before backward",
        "backward twice",
    ),
    "nn.Module": (
        "input: as it should be",
        "called three times",
        "weight is bias",
        "running_mean: bfloat16",
        "pickled",
    ),
}


def cases_of(names: tuple[str, ...]) -> list[tuple[str, str, str]]:
    every = [label for name in names for label in WHERE[name]] or [
        "input: as it should be"
    ]
    return [
        (layer, "full", label)
        for label in every
        for layer in LAYERS
        if layer == "batch2" or not label.startswith("running")
    ]


# each alone is asked below whether it answers as its public form
HIDINGS = [
    (),
    tuple(CORE),
    *((name,) for name in WHERE if name not in CORE),
    tuple(WHERE),
]


def test_without():
    """In processes in which normalnorm does not find the names: it is imported,
    the kernel is used, and situations that concern them come out as they
    should.
    """
    said = python(
        ROOT / "tests" / "hidden.py",
        json.dumps([(names, cases_of(names)) for names in HIDINGS]),
        timeout=600,
        PYTHONPATH=PLACES,
    )
    lines = [json.loads(x) for x in said.splitlines() if x.startswith("[")]
    assert [tuple(names) for names, _ in lines] == HIDINGS
    for names, found in lines:
        assert not found["failures"], (names, found["failures"])
        assert found["right"] >= len(cases_of(names)) / 2
        assert set(found["public"]) == set(names) & set(CORE)
        assert found["short"] == ("autograd.Function" not in names)
        assert found["kernel"]
        assert found["concrete"] == [
            True,
            False,
            False,
            "FakeTensor",
            *[False] * 2,
        ]
        assert found["converted"] == [
            [
                "running_mean",
                "running_var",
                "running_lambda",
                "num_batches_tracked",
                "_extra_state",
            ],
            True,
            True,
            True,
            ["it, or the map before it, has hooks"],
            ["running_mean", "running_covariance", "num_batches_tracked"],
        ]


OTHERWISE = """
import gc, sys, torch
from torch import nn
import hidden

def same(*_): return 0

def fresh():
    for name in [name for name in sys.modules
                 if name.split(".")[0] == "normalnorm"]:
        del sys.modules[name]
    gc.collect()
    from normalnorm.layers import guards
    return guards

def answers(guards):
    "Of the four questions, outside and inside."
    x, seen = torch.ones(()), []
    ask = lambda x=None: seen.append(
        (bool(guards.in_transform()), bool(guards.dispatch_modes()))) or x
    ask()
    torch.func.vjp(ask, x)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        ask()
    with torch.autograd.forward_ad.dual_level():
        y = torch.autograd.forward_ad.make_dual(x, x)
        seen.append((guards.in_dual_level((y, None)),))
    seen.append((guards.in_dual_level((x, None)),))
    with torch.overrides.TorchFunctionMode():
        seen.append((guards.foreign_mode(),))
    return seen

expected = [(False, False), (True, False), (False, True), (True,), (False,),
            (True,)]
private = fresh()
assert (private.in_transform is torch._C._are_functorch_transforms_active
        and private.dispatch_modes is torch._C._len_torch_dispatch_stack)
assert answers(private) == expected, answers(private)
with torch.device("cpu"):
    assert not private.foreign_mode() and private.are_concrete(torch.ones(()))
for name, ours in hidden.CORE.items():
    for value in (hidden.GONE, None, 0, -1, "text", len, lambda: None,
                  lambda: True, lambda: [], lambda: [0], same):
        hidden.hide(name, value)
        guards = fresh()
        hidden.show()
        chosen = [n for n in hidden.CORE.values()
                  if hidden.is_public(guards, n)]
        assert chosen == [ours], (name, value, chosen)
        assert answers(guards) == expected, (name, value, answers(guards))

# imported where something is active: decided as elsewhere
class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, f, types, args=(), kwargs=None):
        return None
from torch._subclasses.fake_tensor import FakeTensorMode
found = []
with Mode(): found.append(fresh())
with FakeTensorMode(): found.append(fresh())
with torch.device("meta"): found.append(fresh())
torch.func.vmap(lambda x: found.append(fresh()) or x)(torch.ones(2))
for guards in found:
    assert (not any(hidden.is_public(guards, n) for n in hidden.CORE.values())
            and answers(guards) == expected)

# and where nothing can be known of modes: the definition
hidden.hide("_C._len_torch_dispatch_stack")
torch.library.Library = None
import normalnorm
guards = fresh()
import normalnorm
from normalnorm.layers.guards import are_concrete
x = torch.randn(8, 3)
assert guards.dispatch_modes() and not are_concrete(x)
layer, plain = (normalnorm.BatchNormalNorm1d(3, noise=0.0, alpha=0.0),
                nn.BatchNorm1d(3))
torch.testing.assert_close(layer(x), plain(x))
print("all")
"""


def test_names_that_do_something_else():
    """Whatever stands under a name, it is found out at import, wherever that
    happens; and the private ones are taken where they are right.
    """
    assert python(OTHERWISE, PYTHONPATH=PLACES).strip() == "all"


def test_families():
    from normalnorm.layers.guards import family
    from normalnorm.layers.weight_decay import normalizer_types

    (batch,) = family(
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    )
    own = type("Own", (batch,), {})
    assert (
        batch is not nn.Module
        and isinstance(own(3), batch)
        and not isinstance(nn.InstanceNorm1d(3), batch)
    )
    assert (
        isinstance(nn.InstanceNorm2d(3), normalizer_types())
        and isinstance(own(3), normalizer_types())
        and not isinstance(nn.Linear(2, 2), normalizer_types())
    )
    assert family(nn.Linear, nn.LayerNorm) == (
        nn.Linear,
        nn.LayerNorm,
    ) and family(nn.Linear) == (nn.Linear,)
