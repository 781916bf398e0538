"""A PyTorch in which private names are called otherwise: gone, or another
value, for normalnorm's code; PyTorch's own finds them where they were.

Import before normalnorm. `python tests/hidden.py '[[names, cases], …]'` hides
names, runs cases of `tools.hostile` and prints what came out.
"""

import json
import operator
import os
import sys
import types

import torch
from torch import nn

GONE = object()
CORE = {
    "_C._are_functorch_transforms_active": "in_transform",
    "_C._len_torch_dispatch_stack": "dispatch_modes",
    "overrides._get_current_function_mode_stack": "foreign_mode",
    "autograd.forward_ad._current_level": "in_dual_level",
}
MODULE = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_non_persistent_buffers_set",
)
NAMES = (*CORE, "autograd.Function", "nn.Module")


def _asked_by_us() -> bool:
    return (
        sys._getframe(2).f_globals.get("__name__", "").startswith("normalnorm")
    )


class _Watched(types.ModuleType):
    def __getattribute__(self, name):
        hidden = object.__getattribute__(self, "__dict__").get("__hidden__", {})
        if name in hidden and _asked_by_us():
            if hidden[name] is GONE:
                raise AttributeError(name)
            return hidden[name]
        return super().__getattribute__(name)


def _of_module(self, name):
    if name in MODULE and _asked_by_us():
        raise AttributeError(name)
    return object.__getattribute__(self, name)


class _Nothing:
    def __get__(self, *_):
        raise AttributeError("apply")


def hide(name: str, value=GONE) -> None:
    "`name`, a path from torch: its last part is `value`, or gone."
    if name == "nn.Module":  # its dictionaries
        nn.Module.__getattribute__ = _of_module
    elif name == "autograd.Function":  # what stands under its `apply`
        old = torch.autograd.Function
        between = type(old)("Between", (old,), {"apply": _Nothing()})
        torch.autograd.Function = type(old)(
            "Function", (between,), {"apply": vars(old)["apply"]}
        )
    else:
        owner, _, last = name.rpartition(".")
        module = operator.attrgetter(owner)(torch)
        module.__dict__.setdefault("__hidden__", {})[last] = value
        module.__class__ = _Watched


def show() -> None:
    "What is in torch's modules is seen again."
    for name in CORE:
        vars(operator.attrgetter(name.rpartition(".")[0])(torch)).pop(
            "__hidden__", None
        )


def is_public(guards: types.ModuleType, ours: str) -> bool:
    "Whether `guards` has bound the public form of a question."
    public = {
        "in_transform": "_refused",
        "dispatch_modes": "_seen",
        "foreign_mode": "<lambda>",
        "in_dual_level": "_tangents",
    }
    return getattr(guards, ours).__qualname__ == public[ours]


def converted() -> list:
    """A model to normality layers and back, folded, and one with a hook, which
    cannot be folded.
    """
    import normalnorm
    from normalnorm.layers.folding import fold

    x, model = (
        torch.randn(4, 2, 3, 3),
        nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)),
    )
    model(x)
    before, expected = list(model.state_dict()), model.eval()(x)
    normalnorm.to_normality(model)
    keys = [key.partition(".")[2] for key in model.state_dict()][4:]
    normalnorm.to_plain(model)
    same = [
        torch.allclose(f(x), expected, atol=1e-5) for f in (model, fold(model))
    ]
    model[1].register_forward_hook(lambda *_: None)
    left = fold(model, return_report=True)[1].left
    whitened = list(
        dict(
            normalnorm.DecorrelatedBatchNorm1d(4, group_size=2).named_buffers()
        )
    )
    return [
        keys,
        list(model.state_dict()) == before,
        *same,
        [row.reason for row in left],
        whitened,
    ]


def concrete_where() -> list:
    """What `are_concrete` says outside; in a transform, in two modes, with a
    tangent; and what a layer gives for a tensor in a mode that knows shapes
    only.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd import forward_ad

    import normalnorm
    from normalnorm.layers.backends import are_concrete

    x, layer = torch.randn(8, 3), normalnorm.BatchNormalNorm1d(3)
    found = [are_concrete(x, None)]
    torch.func.vmap(lambda y: found.append(are_concrete(x)) or y)(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found += [are_concrete(x), type(layer(x)).__name__]
    with torch.overrides.TorchFunctionMode():
        found.append(are_concrete(x))
    with forward_ad.dual_level():
        found.append(are_concrete(x, forward_ad.make_dual(x, x)))
    return found


def without(names: list[str], cases: list[list[str]]) -> dict:
    "What normalnorm does where it does not find these names."
    for name in names:
        hide(name)
    from normalnorm.layers import backends, guards
    from normalnorm.theory.newton import Over
    from tools import hostile

    x = torch.randn(8, 3)
    verdicts = {case: hostile.judged(case) for case in map(tuple, cases)}
    return {
        "public": [
            one for one, ours in CORE.items() if is_public(guards, ours)
        ],
        "short": getattr(backends._apply, "__func__", None) is None,
        "kernel": backends.compute(backends.Normalization(x, Over(0)))
        is not None,
        "converted": converted(),
        "concrete": concrete_where(),
        "right": sum(v.word == "right" for v in verdicts.values()),
        "failures": {
            " · ".join(case): verdict.text
            for case, verdict in verdicts.items()
            if verdict.word == "wrong"
        },
    }


if __name__ == "__main__":
    # a process for each: torch is imported once, normalnorm by none before
    for names, cases in json.loads(sys.argv[1]):
        if (child := os.fork()) == 0:
            print(json.dumps([names, without(names, cases)]), flush=True)
            os._exit(0)
        _, ended = os.waitpid(child, 0)
        assert ended == 0, (names, ended)
