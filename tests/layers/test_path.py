"""The way of a batch through the definition: how often it is asked, and into
which rooms. `python -m tests.layers.test_path` prints it, call by call.
"""

import sys
from typing import NamedTuple

import pytest
import torch

import normalnorm

# from the layer down to the formulas; who asks what a tensor is stands apart
FLOORS = (
    ("layers.normality",),
    ("layers.functional",),
    ("layers.backends",),
    ("layers.core",),
    ("layers.noise",),
    ("theory.gradient",),
    ("theory.newton", "theory.power_transform"),
)
APART = "layers.guards"


class Call(NamedTuple):
    depth: int
    caller: str  # module of this package, the nearest in the stack
    module: str
    name: str


def way(layer, x) -> list[Call]:
    """The calls of this package's Python functions, lambdas and comprehensions,
    in order; the constructors of tuples are not Python.
    """
    found, stack = [], []

    def note(frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if event == "call":
            if module.startswith("normalnorm."):
                module = module.removeprefix("normalnorm.")
                caller = next((m for m in reversed(stack) if m), "")
                name = frame.f_code.co_qualname
                found.append(Call(len(stack), caller, module, name))
                stack.append(module)
            else:
                stack.append("")
        elif event == "return" and stack:
            stack.pop()

    with normalnorm.set_backend("eager"):
        layer(x)  # what is made once is made now
        sys.setprofile(note)
        try:
            layer(x)
        finally:
            sys.setprofile(None)
    return found


def example() -> list[Call]:
    "Of a layer in training, with noise."
    return way(normalnorm.BatchNormalNorm2d(8), torch.randn(4, 8, 3, 3))


def changes(calls: list[Call]) -> int:
    "How often the next call is in another module."
    modules = [call.module for call in calls]
    return sum(a != b for a, b in zip(modules, modules[1:]))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="co_qualname is missing")
def test_the_definition_asks_once():
    calls = example()
    assert len(calls) <= 90 and changes(calls) <= 30
    assert sum(call.name == "Over.__init__" for call in calls) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="co_qualname is missing")
def test_a_batch_goes_down_and_back_once():
    "No room calls one above it, and each of the upper ones is entered once."
    floor = {m: i for i, floor in enumerate(FLOORS) for m in floor}
    calls = [c for c in example() if APART not in (c.module, c.caller)]
    assert all(floor[c.caller] <= floor[c.module] for c in calls if c.caller)
    entered = [
        c.module
        for c in calls
        if c.caller != c.module
        and c.module in ("layers.functional", "layers.backends")
    ]
    assert entered == ["layers.functional", "layers.backends"]
    (way_in,) = {
        c.name
        for c in calls
        if c.module == "layers.core" and c.caller == "layers.backends"
    }
    assert way_in == "normalize"


if __name__ == "__main__":
    steps = example()
    for step in steps:
        print("  " * step.depth + f"{step.module}: {step.name}")
    print(f"{len(steps)} calls, {changes(steps)} changes of module")
