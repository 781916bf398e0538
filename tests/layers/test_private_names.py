"""Private names of PyTorch: which are used is written down here, and without
each of them the layers do what they did.
"""

import ast
import functools
import importlib.util
import json
import operator
import os
import re
from pathlib import Path

import torch
from torch import nn

from tests.layers.steps import python

ROOT = Path(__file__).resolve().parents[2]
PLACES = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
HIDDEN = [
    "_C._are_functorch_transforms_active",
    "_C._len_torch_dispatch_stack",
    "overrides._get_current_function_mode_stack",
    "autograd.forward_ad._current_level",
]

# ---- which there are --------------------------------------------------------

LIBRARY = {
    "layers/guards.py": set(HIDDEN),
    # without them there is no kernel (`native._ask`), which has a test
    "layers/engines/native.py": {"_C", "_cdata"},
    "layers/normality.py": {"_parameters", "_buffers", "_load_from_state_dict"},
    "layers/decorrelated.py": {"_load_from_state_dict"},
    "layers/conversion.py": {"_metadata"},
    "layers/hybrids.py": {"_C._current_graph_task_id"},
    "layers/prelayer.py": {"_load_from_state_dict"},
}


# names of this project that PyTorch has too
OWN = {"_values", "_sources", "_library"}


@functools.cache
def of_objects() -> set[str]:
    "Private attributes of tensors, modules and functions."
    made = (
        torch.ones(()),
        nn.Parameter(torch.ones(())),
        nn.BatchNorm1d(2),
        torch.optim.SGD([torch.ones(1)]),
    )
    return {
        "_metadata",
        *(
            n
            for one in made
            for n in (*dir(one), *dir(torch.autograd.Function))
            if n.startswith("_") and not n.startswith("__")
        ),
    } - OWN


def in_torch(path: str) -> bool:
    try:
        operator.attrgetter(path)(torch)
    except (AttributeError, ValueError):
        pass  # or a module that nobody has imported
    else:
        return True
    try:
        return importlib.util.find_spec(f"torch.{path}") is not None
    except (ImportError, ValueError):
        return False


def private_names(text: str) -> set[str]:
    """Those of PyTorch in Python code: after a module of torch (without
    `torch.`), of any object, in imports, in strings that name one.
    """
    found, tree, known = set(), ast.parse(text), of_objects()
    private = re.compile(r"(^|\.)_[A-Za-z]")
    modules, docs = {"torch": ""}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.split(".")[0] == "torch":
                    modules[a.asname or "torch"] = (
                        a.name.removeprefix("torch").removeprefix(".")
                        if a.asname
                        else ""
                    )
                    if private.search(a.name):
                        found.add(a.name.removeprefix("torch."))
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "torch"
            and not node.level
        ):
            for a in node.names:
                path = f"{node.module}.{a.name}".removeprefix("torch.")
                modules[a.asname or a.name] = path
                if private.search(path):
                    found.add(path)
        elif isinstance(node, ast.Expr) and isinstance(
            node.value, ast.Constant
        ):
            docs.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, at = [node.attr], node.value
            while isinstance(at, ast.Attribute):
                parts, at = [at.attr, *parts], at.value
            if node.attr in known:
                found.add(node.attr)
            elif (
                isinstance(at, ast.Name)
                and at.id in modules
                and re.match(r"_[A-Za-z]", node.attr)
            ):
                found.add(".".join(filter(None, [modules[at.id], *parts])))
        elif isinstance(node, ast.FunctionDef) and node.name in known:
            found.add(node.name)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in docs
            and private.search(node.value)
        ):
            path = node.value.removeprefix("torch.")
            if path in OWN:
                continue
            if (
                path in known
                or re.fullmatch(r"[\w.]+", path)
                and in_torch(path)
            ):
                found.add(path)
    # torch._C of torch._C.name
    return {a for a in found if not any(b.startswith(a + ".") for b in found)}


def code_of(path: Path) -> str:
    if path.suffix == ".py":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n".join(
        re.sub(r"(?m)^[%!][%\w].*$", "", "".join(c["source"]))
        for c in cells
        if c["cell_type"] == "code"
    )


def scanned(folder: str, pattern: str) -> dict[str, set[str]]:
    found = {
        str(p.relative_to(ROOT / folder)): private_names(code_of(p))
        for p in sorted((ROOT / folder).rglob(pattern))
        if "checks" not in p.parts
        and p.name not in ("_modidx.py", "hidden.py", "test_private_names.py")
        and ".ipynb_checkpoints" not in p.parts
    }
    return {name: names for name, names in found.items() if names}


def test_the_scan_sees_private_names():
    code = """
import torch, torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad as ad
from torch.utils._device import DeviceContext
import torch._dynamo
(torch._C._functorch.is_batched(x), nn.modules.conv._ConvNd, ad._current_level,
 x.y._version, F._in_projection)
getattr(m, "_forward_hooks"), "_C._is_tracing", "torch._neg_view"
def _load_from_state_dict(self): "_buffers"
self._mine, "_mine", x._replace()
"""
    assert private_names(code) == {
        "utils._device.DeviceContext",
        "_dynamo",
        "nn.modules.conv._ConvNd",
        "autograd.forward_ad._current_level",
        "_version",
        "nn.functional._in_projection",
        "_forward_hooks",
        "_C._is_tracing",
        "_neg_view",
        "_load_from_state_dict",
        "_C._functorch",
    }


def test_private_names_of_the_library():
    """In one place, with a public form; beside them what PyTorch's own layers
    override or keep in a dictionary.

    A new name is to be public, or to be bound by `guards.bound`.
    """
    assert scanned("normalnorm", "*.py") == LIBRARY


def test_private_names_of_tools_tests_and_chapters():
    """They are run with the pinned PyTorch; what makes modes, fake tensors and
    broken tensors, and looks into compilation, has no public name.
    """
    assert scanned("tools", "*.py") == {
        "hostile/__init__.py": {"_dynamo"},
        "hostile/situations.py": {
            "_make_wrapper_subclass",
            "utils._python_dispatch.TorchDispatchMode",
            "_subclasses.fake_tensor.FakeTensorMode",
            "_to_functional_tensor",
            "_parameters",
            "utils._pytree.tree_map",
            "_buffers",
            "_neg_view",
        },
        "kernels.py": {"_dynamo", "_inductor.compile_fx"},
    }
    assert scanned("tests", "*.py") == {
        "layers/test_conversion.py": {"_metadata", "_register_state_dict_hook"},
        "layers/test_engines.py": {"_dynamo", "_subclasses.FakeTensorMode"},
        "layers/test_gpu.py": {"utils._python_dispatch.TorchDispatchMode"},
        "layers/test_hostile.py": {"_subclasses.fake_tensor.FakeTensorMode"},
        "layers/test_layers.py": {"_dynamo.testing", "_inductor.config"},
        "layers/test_native.py": {"_C", "_cdata", "_neg_view"},
        "analysis/test_left_alone.py": {"_forward_hooks"},
        "layers/test_sync.py": {"_dynamo"},
        "layers/test_traced.py": {"_buffers"},
    }
    assert not scanned("benchmarks", "*.py")
    chapters = scanned("nbs", "*.ipynb")
    for name, own in {
        "220_theory.newton.ipynb": {"utils._python_dispatch.TorchDispatchMode"},
        "228_layers.noise.ipynb": {"utils._python_dispatch.TorchDispatchMode"},
        "282_layers.engines.native.ipynb": {
            "utils._python_dispatch.TorchDispatchMode",
            "utils._pytree.tree_leaves",
        },
        "270_layers.conversion.ipynb": {"_forward_hooks"},
        "430_layers.prelayer.ipynb": {
            "utils._python_dispatch.TorchDispatchMode"
        },
        "460_analysis.hessian.ipynb": {"_weight_norm"},
    }.items():
        assert own <= chapters[name]
        chapters[name] -= own
    assert sorted(map(sorted, filter(None, chapters.values()))) == sorted(
        map(sorted, LIBRARY.values())
    )


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


HIDINGS = [(), *((name,) for name in WHERE), tuple(WHERE)]


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
        assert set(found["public"]) == set(names) & set(HIDDEN)
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
    assert not private.foreign_mode()
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
