"""What torch.nn's layers accept, ours accept, with the same result; what they
refuse, ours refuse with a message that names the argument and says what is
expected. Each case asks PyTorch's layer, and judges ours by its answer.
"""

import functools
import re

import numpy as np
import pytest
import torch
from torch import nn

from normalnorm.layers import backends, core
from normalnorm.layers import functional as F
from normalnorm.layers.backends import get_backend, set_backend
from normalnorm.theory.newton import newton_lambda
from tests.peers import TORCH
from tests.refusals import refusals
from tests.state.record import exported
from tools.references import Reference
from tools.rows import trials

C = exported()
PLAIN, ROUNDING = dict(alpha=0.0, noise=0.0), dict(rtol=1e-5, atol=1e-5)
EXPECTED = "expect|must|known are|choose|did you mean|was made for"
ROWS = (6, 4)
# the rows that are made from a number of channels, or from the sizes of the
# last axes
MADE = [
    t
    if t.kind == "B C H W"
    else t._replace(kind="B C", shape=ROWS)  # of the last axes too
    for t in trials({"B": 3, "C": 4, "L": 2, "D": 2, "H": 5, "W": 6})
    if t.kind in ("B C", "B L C", "B C H W")
    and not t.row.maker
    and t.name != "layer2"
    and not isinstance(t.theirs(), Reference)
]
BOTH = pytest.mark.parametrize("trial", MADE, ids=str)


def makers(trial) -> tuple:
    "PyTorch's class, and ours without what plain layers do not have."
    given = dict(PLAIN, group_size=1)
    known = {k: v for k, v in given.items() if k in trial.known}
    return type(trial.theirs()), functools.partial(trial.row.layer, **known)


def outcome(make, *inputs):
    """What a layer gives in training and in evaluation, with its state; or the
    error.
    """
    try:
        layer = make()
        found = []
        for training in (True, False):
            layer.train(training)
            torch.manual_seed(0)
            out = [layer(x() if callable(x) else x) for x in inputs]
            found += [o.to_dense() if o.is_mkldnn else o for o in out]
        return found + [
            v.float()
            for k, v in layer.state_dict().items()
            if "lambda" not in k
        ]
    except Exception as error:
        return error


def judged(theirs, ours, words: str, easier: bool = False):
    "`easier`: of ours alone, a value whose meaning is plain."
    if not isinstance(theirs, Exception):
        assert not isinstance(ours, Exception), (
            f"PyTorch's layer accepts it, ours says: {ours!r}"
        )
        for a, b in zip(ours, theirs):
            if a.is_nested or a.shape == b.shape:  # a covariance is no variance
                assert_same(a, b)
        return
    if easier and not isinstance(ours, Exception):
        return
    assert isinstance(ours, (TypeError, ValueError)), (
        f"{ours!r}, where PyTorch's layer says: {theirs!r}"
    )
    assert re.search(words, str(ours)) and re.search(EXPECTED, str(ours)), str(
        ours
    )


def assert_same(a, b):
    assert a.is_nested == b.is_nested and a.dtype == b.dtype
    if a.is_nested:
        torch.testing.assert_close(a.unbind(), b.unbind(), **ROUNDING)
    else:
        torch.testing.assert_close(a, b, **ROUNDING)


# ---- inputs -----------------------------------------------------------------


def test_mkldnn_tensors():
    x = torch.randn(3, 4, 5, 6).to_mkldnn()
    for trial in MADE:
        if trial.name in ("batch2", "sync"):
            judged(*(outcome(lambda: make(4), x) for make in makers(trial)), "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "layout",
    [
        torch.strided,
        pytest.param(
            torch.jagged,
            marks=pytest.mark.skipif(
                TORCH < (2, 13),
                reason="PyTorch 2.4 does not differentiate unbind",
            ),
        ),
    ],
    ids=["strided", "jagged"],
)
def test_nested_tensors_are_differentiated(layout):
    parts, found = [torch.randn(n, 4) for n in (2, 5)], []
    for layer in (
        nn.LayerNorm(4),
        C["LayerNormalNorm"](4, **PLAIN),
        C["LayerNormalNorm"](4, noise=0.0),
    ):
        x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
        y = x + layer(x)  # the same offsets
        sum(
            (part.sin().sum() for part in y.unbind()), torch.tensor(0.0)
        ).backward()
        found.append(
            [
                torch.cat([p.flatten() for p in x.grad.unbind()]),
                layer.weight.grad,
            ]
        )
    torch.testing.assert_close(found[1], found[0], **ROUNDING)
    dense = torch.cat(parts).requires_grad_()
    (dense + layer(dense)).sin().sum().backward()
    torch.testing.assert_close(found[2][0], dense.grad.flatten(), **ROUNDING)


# ---- sizes ------------------------------------------------------------------

SIZES = {
    "np.int64": np.int64(4),
    "np.int32": np.int32(4),
    "np.uint8": np.uint8(4),
    "tensor": torch.tensor(4),
    "array": np.array(4),
    "True": True,
    "negative": -1,
    "float": 4.0,
    "np.float64": np.float64(4.0),
    "str": "4",
    "None": None,
    "Size": torch.Size([4]),
    "list": [4],
    "tuple": (4,),
    "np in tuple": (np.int64(4),),
    "array of one": np.array([4]),
    "tensor of one": torch.tensor([4]),
    "empty": (),
    "bool in tuple": (True,),
    "float in tuple": (4.0,),
    "negative in tuple": (-1,),
    "str in tuple": ("4",),
    "tensor in list": [torch.tensor(4)],
    "word": "ab",
    "np.bool": np.bool_(True),
}
PLAINLY_ONE = {
    "tensor",
    "array",
    "tensor of one",
    "Size",
    "list",
    "tuple",
    "np in tuple",
    "array of one",
    "tensor in list",
}


@pytest.mark.parametrize("kind", SIZES)
@BOTH
def test_sizes(trial, kind):
    last, x = "normalized_shape" in trial.known, torch.randn(trial.shape)
    argument = "normalized_shape" if last else "num_features"
    theirs, ours = makers(trial)
    plain, found = (
        outcome(lambda: make(SIZES[kind], **options), x)
        for make in (theirs, ours)
        for options in [{} if last else {"affine": True}]
    )
    judged(plain, found, argument, kind in PLAINLY_ONE)
    if not isinstance(found, Exception):
        kept = getattr(ours(SIZES[kind]), argument)
        kept = kept if last else (kept,)
        assert kept == (4,) and type(kept[0]) is int


@pytest.mark.parametrize("kind", [k for k in SIZES if "negative" not in k])
@pytest.mark.parametrize("which", ["num_groups", "num_channels"])
def test_sizes_of_groups(which, kind):
    def options():
        return {"num_groups": 4, "num_channels": 4, which: SIZES[kind]}

    x = torch.randn(3, 4, 5)
    ours, plain = (
        outcome(lambda: make(**options()), x)
        for make in (
            functools.partial(C["GroupNormalNorm"], **PLAIN),
            nn.GroupNorm,
        )
    )
    # PyTorch took NumPy's flags as numbers later
    judged(plain, ours, which, kind in PLAINLY_ONE or kind == "np.bool")


@pytest.mark.parametrize("value", [0, -2, "4", None, 2.0, True, [2]], ids=str)
def test_sizes_that_torch_does_not_have(value):
    for options in (
        {"group_size": value},
        {"num_groups": value},
        {"iterations": value},
    ):
        if value is None and "iterations" not in options:
            continue  # the default
        with pytest.raises(
            (TypeError, ValueError),
            match=f"{next(iter(options))}=.*(expected|must be at least 1)",
        ):
            C["DecorrelatedBatchNorm1d"](4, **options)
    for call in (
        lambda: F.group_normal_norm(torch.randn(3, 4, 5), value),
        lambda: F.layer_normal_norm(torch.randn(3, 4), value),
    ):
        with pytest.raises(
            (TypeError, ValueError), match="num_groups|normalized_shape"
        ):
            call()
    assert (
        F.layer_normal_norm(torch.randn(3, 4), 4).shape
        == F.group_normal_norm(torch.randn(3, 4), np.int64(2)).shape
    )


# ---- numbers ----------------------------------------------------------------

NUMBERS = {
    "np.float32": np.float32(0.125),
    "np.float64": np.float64(0.125),
    "np.float16": np.float16(0.125),
    "tensor": torch.tensor(0.125),
    "tensor of ints": torch.tensor(1),
    "int": 1,
    "True": True,
    "np.int64": np.int64(1),
    "array": np.array(0.1),
    "tensor of one": torch.tensor([0.1]),
    "str": "x",
    "number as str": "0.1",
    "list": [0.1],
    "complex": 1j,
    "inf": float("inf"),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("argument", ["eps", "momentum"])
@BOTH
def test_numbers(trial, argument, kind):
    # averages that are infinite or NaN
    if argument not in trial.known or (argument, kind) == ("momentum", "inf"):
        return
    options, x = {argument: NUMBERS[kind]}, torch.randn(trial.shape)
    if "track_running_stats" in trial.known:
        options["track_running_stats"] = True
    plain, ours = (
        outcome(lambda: make(4, **options), x) for make in makers(trial)
    )
    judged(plain, ours, f"{argument}=")


@pytest.mark.parametrize("value", ["x", "0.1", [0.1], 1j], ids=str)
@BOTH
def test_a_momentum_changed_later(trial, value):
    if "momentum" in trial.known:
        layer = trial.ours(**PLAIN)
        layer.momentum = value
        with pytest.raises(TypeError, match="momentum=.*expected"):
            layer(torch.randn(trial.shape))


SETTINGS = [
    "BatchNormalNorm1d",
    "LayerNormalNorm",
    "DecorrelatedBatchNormalNorm1d",
    "SyncBatchNormalNorm",
    "InstanceNormalNorm1d",
]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("argument", ["noise", "alpha"])
@pytest.mark.parametrize("kind", [k for k in NUMBERS if k != "inf"])
def test_numbers_that_torch_does_not_have(name, argument, kind):
    "As eps, which PyTorch judges."
    accepted = not isinstance(
        outcome(lambda: nn.LayerNorm(4, eps=NUMBERS[kind]), torch.randn(ROWS)),
        Exception,
    )
    if not accepted:
        with pytest.raises(
            TypeError, match=f"{argument}=.*a number is expected"
        ):
            C[name](4, **{argument: NUMBERS[kind]})
        return
    found = []
    for value in (NUMBERS[kind], float(NUMBERS[kind])):
        torch.manual_seed(3)
        found.append(
            C[name](4, **{argument: value})(
                torch.randn(6, 4, 5)
                if "Layer" not in name
                else torch.randn(ROWS)
            )
        )
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "options",
    [
        {"noise": "x"},
        {"noise": float("nan")},
        {"noise_kind": None},
        {"noise_kind": 1},
        {"noise_kind": ["scaled"]},
        {"noise_kind": "scalde"},
        {"alpha": "x"},
        {"alpha": None},
        {"steps": 1.5},
        {"steps": 2.0},
        {"steps": "2"},
        {"steps": None},
        {"steps": float("inf")},
        {"steps": float("nan")},
        {"safeguard": "no"},
        {"safeguard": None},
        {"safeguard": 0.5},
        {"safeguard": []},
    ],
    ids=str,
)
def test_settings_that_no_layer_has(name, options):
    (argument,) = options
    with pytest.raises(
        (TypeError, ValueError), match=f"{argument}=.*({EXPECTED}|positive)"
    ):
        C[name](4, **options)


@pytest.mark.parametrize("value", [True, np.bool_(True), 1])
def test_flags_that_are_flags(value):
    x = torch.randn(6, 4)
    found = [
        C["BatchNormalNorm1d"](4, noise=0.0, safeguard=v)(x)
        for v in (value, True)
    ]
    assert torch.equal(*found)


def test_integers_as_steps():
    x = torch.randn(6, 4)
    for steps in (np.int64(2), torch.tensor(2)):
        assert torch.equal(
            C["LayerNormalNorm"](4, noise=0.0, steps=steps)(x),
            C["LayerNormalNorm"](4, noise=0.0, steps=2)(x),
        )


test_the_estimate_says_what_it_expects = refusals(
    [(alpha, "alpha=.*expected") for alpha in ("x", None, [1.0])],
    lambda alpha: newton_lambda(torch.randn(5), 0, alpha=alpha),
    TypeError,
)


@pytest.mark.parametrize(
    "name", [None, "x", 3, [], b"native", nn, "Native"], ids=str
)
def test_backends_that_are_none(name):
    before = get_backend()
    with pytest.raises(ValueError, match="backend .* is not known: .*native"):
        set_backend(name)
    assert get_backend() == before


# λ as a tensor, where a tuple of parameters is expected, by every road
test_statistics_of_the_form_before = refusals(
    [
        (function, r"\(mean, var, \(lmbda,\)\)")
        for function in (core.normality_norm, backends.normality_norm)
    ],
    lambda function: function(
        torch.randn(4, 3),
        (0,),
        statistics=core.Statistics(*torch.ones(3, 3)),
    ),
    TypeError,
)
