"""What a wrong version of the library would change and no other test would see.

Found by `make mutants`; one group for each module. Each compares with something
independent: a literal of the paper or of the documentation, another
implementation, or a closed form.
"""

import functools
import importlib
import inspect
import pkgutil

import pytest
import torch
from torch import nn

import normalnorm.layers
from normalnorm.layers import (
    conversion,
    core,
    decorrelated,
    engines,
)
from normalnorm.layers.core import Rule
from normalnorm.layers.engines import native
from normalnorm.layers.normality import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    BatchNormalNorm3d,
    InstanceNormalNorm2d,
    LayerNormalNorm,
)
from normalnorm.layers.sync import SyncBatchNormalNorm
from normalnorm.theory.gaussianizers import Tail
from normalnorm.theory.gradient import Power

# ---- layers: defaults ----

# As in the papers (one Newton step, all of it, no safeguard, scaled noise) and
# in torch.nn; `None`: by the kind of layer, below.
DEFAULTS = {
    "eps": 1e-5,
    "alpha": 1.0,
    "steps": 1,
    "safeguard": False,
    "noise_kind": "scaled",
    "offset": 0,
    "running": (),
    "bias": True,
    "elementwise_affine": True,
    "inplace": True,
    "return_report": False,
    "method": "eigh",
    "iterations": 5,
    "unit_rows": False,
    "training": False,
    "group_size": 16,
    "parameters": False,
    "weight_decay": 0.01,
    "biases": False,
    "tolerance": 0.0,
    "use_input_stats": True,
    "seed": 0,
    "samples": "auto",
    "activation": "relu",
    "dim": 0,
    "center": True,
    "axes": (2, 3, 4, 5),
    "channels_last": False,
}
# a row's cells, what a unit has; the ε of other papers
OWN = {
    ("Family", "axes"),
    ("Statistics", "parameters"),
    *(
        (name, "eps")
        for name in (
            "StandardizedWeight",
            "weight_standardization",
            "ProxyNorm",
            "proxy_norm",
            "to_proxy_norm",
            "FilterResponseNorm",
        )
    ),
}
# normalizers that have noise only where it is asked for
QUIET = ("normalizers", "hybrids", "prelayer", "regnorm")
TWINS = {"momentum", "affine", "track_running_stats"}  # as in torch.nn


def public(module):
    for name in getattr(module, "__all__", []):
        thing = getattr(module, name)
        if callable(thing) and thing.__module__ == module.__name__:
            yield name, thing


@pytest.mark.parametrize(
    "name",
    [
        m.name
        for m in pkgutil.iter_modules(normalnorm.layers.__path__)
        if not m.ispkg
    ]
    + [f"engines.{m.name}" for m in pkgutil.iter_modules(engines.__path__)],
)
def test_defaults(name):
    "Of every public function and class; noise 0.4, over features 1, else 0."
    module = importlib.import_module(f"normalnorm.layers.{name}")
    for thing, made in public(module):
        try:
            found = inspect.signature(made).parameters
        except ValueError:
            continue
        given = {
            n: p.default
            for n, p in found.items()
            if p.default not in (p.empty, None)
        }
        for word, value in given.items():
            if word in DEFAULTS and (thing, word) not in OWN:
                assert value == DEFAULTS[word], (thing, word)
                assert type(value) is type(DEFAULTS[word]), (thing, word)
        if "noise" in given and thing != "update_bn":
            layer = isinstance(made, type)
            kinds = {
                "Layer": 1.0 * layer,
                "layer": 0.0,
                "Group": 0.4,
                "Batch": 0.4,
                "batch": 0.4,
            }
            wanted = next(
                (
                    v
                    for k, v in kinds.items()
                    if k in thing and name not in QUIET
                ),
                0.0,
            )
            assert given["noise"] == wanted, thing
        if (
            TWINS & set(given)
            and isinstance(made, type)
            and issubclass(made, nn.Module)
        ):
            twin = nn.InstanceNorm1d if "Instance" in thing else nn.BatchNorm1d
            of_twin = inspect.signature(twin).parameters
            for word in TWINS & set(given):
                assert given[word] == of_twin[word].default, (thing, word)
        elif "momentum" in given:
            # nothing is moved by a step that is not told to
            wanted = 0.0 if "running" in given else 0.1
            assert given["momentum"] == wanted, thing


# ---- layers with another gaussianizer ----


@pytest.mark.parametrize("gaussianizer", [Tail(), Power(alpha=0.5), None])
def test_layer_form_uses_the_gaussianizer_that_it_is_given(gaussianizer):
    "By hand: standardize, estimate, apply; Power() where none is given."
    torch.manual_seed(0)
    u = torch.randn(5, 4, 30, dtype=torch.float64).exp()
    layer = LayerNormalNorm(
        30, eps=0.0, noise=0.0, dtype=torch.float64, gaussianizer=gaussianizer
    )
    k = (u - u.mean(-1, keepdim=True)) / u.var(
        -1, correction=0, keepdim=True
    ).sqrt()
    used = gaussianizer or Power()
    expected = used.apply(k, used.estimate(k, -1))
    torch.testing.assert_close(layer(u), expected, rtol=1e-9, atol=1e-9)
    other = Power() if isinstance(used, Tail) else Tail()
    assert (other(u, -1) - layer(u)).abs().max() > 0.1


# ---- layers.sync ----


@pytest.mark.parametrize(
    "shape, layer",
    [
        ((6, 3), BatchNormalNorm1d),
        ((6, 3, 5), BatchNormalNorm1d),
        ((6, 3, 5, 2), BatchNormalNorm2d),
        ((6, 3, 5, 2, 2), BatchNormalNorm3d),
    ],
)
def test_synchronized_layer_takes_all_shapes(shape, layer):
    "With one process: what the batch layer of this shape gives."
    torch.manual_seed(0)
    u = torch.randn(shape)
    torch.manual_seed(1)
    expected = layer(3)(u)
    torch.manual_seed(1)
    torch.testing.assert_close(SyncBatchNormalNorm(3)(u), expected)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 1, 1, 1, 2)])
def test_synchronized_layer_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match="shape"):
        SyncBatchNormalNorm(3)(torch.ones(shape))


# ---- layers.decorrelated ----


def test_defaults_of_the_functional_forms_are_those_of_the_layers():
    "As documented; 20 channels are a group of 16 and one of 4."
    plain, normal = (
        inspect.signature(f).parameters
        for f in (
            decorrelated.decorrelated_batch_norm,
            decorrelated.decorrelated_batch_normal_norm,
        )
    )
    documented = {
        "momentum": 0.1,
        "eps": 1e-5,
        "group_size": 16,
        "method": "eigh",
        "iterations": 5,
        "training": False,
    }
    for found in (plain, normal):
        assert {n: found[n].default for n in documented} == documented
    of_normality = {
        "noise": 0.4,
        "alpha": 1.0,
        "steps": 1,
        "safeguard": False,
        "noise_kind": "scaled",
    }
    assert {n: normal[n].default for n in of_normality} == of_normality
    torch.manual_seed(0)
    u = torch.randn(64, 20) @ torch.randn(20, 20)
    for kind, function in (
        (
            decorrelated.DecorrelatedBatchNorm1d,
            decorrelated.decorrelated_batch_norm,
        ),
        (
            decorrelated.DecorrelatedBatchNormalNorm1d,
            decorrelated.decorrelated_batch_normal_norm,
        ),
    ):
        torch.manual_seed(1)
        of_layer = kind(20)(u)
        torch.manual_seed(1)
        torch.testing.assert_close(function(u, training=True), of_layer)
    white = decorrelated.decorrelated_batch_norm(u, training=True)
    inside = torch.cov(white.T, correction=0)[:16, :16]
    torch.testing.assert_close(inside, torch.eye(16), rtol=0, atol=2e-3)
    assert torch.cov(white.T, correction=0)[:16, 16:].abs().max() > 0.1


# ---- layers.normality ----


def test_axes_of_size_one_are_axes():
    "As in torch.nn: of one feature each value is its own mean."
    torch.manual_seed(0)
    u = torch.randn(5, 1, 4)
    whole, last = (
        LayerNormalNorm((1, 4), noise=0.0),
        LayerNormalNorm(4, noise=0.0),
    )
    torch.testing.assert_close(whole(u), last(u))
    torch.testing.assert_close(
        LayerNormalNorm(1, noise=0.0)(u[..., :1]),
        torch.nn.LayerNorm(1)(u[..., :1]),
    )
    for wrong in (0, (4, 0), ()):
        with pytest.raises(ValueError, match="positive sizes"):
            LayerNormalNorm(wrong)


@pytest.mark.parametrize(
    "name, value",
    [
        ("alpha", 1.5),
        ("alpha", -0.5),
        ("steps", 0),
        ("eps", -1.0),
        ("noise", -1.0),
        ("noise_kind", "loud"),
    ],
)
@pytest.mark.parametrize(
    "layer, shape",
    [
        (BatchNormalNorm2d, (4, 3, 2, 2)),
        (LayerNormalNorm, (4, 3)),
        (InstanceNormalNorm2d, (4, 3, 5, 5)),
    ],
)
def test_settings_that_are_changed_later_are_checked(layer, shape, name, value):
    made = layer(3)
    before = getattr(made, name)
    with pytest.raises(ValueError, match=name):
        setattr(made, name, value)
    assert getattr(made, name) == before
    made(torch.randn(shape))


# ---- layers.engines.native ----


@pytest.mark.skipif(not native.available(), reason="no compiler")
@pytest.mark.parametrize("seed", [0, 5, -1, -(2**63), 2**63 - 1])
def test_every_seed_of_64_bits_is_told_apart(seed):
    "The definition's noise for each; 0 where none is given."
    torch.manual_seed(0)
    u, rule = torch.randn(40, 6), Rule(noise=0.7)
    call = native.prepare(u, (0,), None, None, rule)
    expected = core.normality_norm(u, (0,), noise=0.7, seed=torch.tensor(seed))
    found = native.forward(call, u, seed=seed)[0]
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
    if seed == 0:
        assert torch.equal(native.forward(call, u)[0], found)


# ---- layers.conversion ----


class Described(nn.BatchNorm1d):
    "Adds what is no method."

    @property
    def surprise(self):
        return self.eps


class Helped(nn.BatchNorm1d):
    "Adds what is called, though no function of the class."

    surprise = functools.partial(print, "surprise")


class Annotated(nn.BatchNorm1d):
    "Adds a plain value, which changes nothing."

    surprise = 3


@pytest.mark.parametrize(
    "kind, refused", [(Described, True), (Helped, True), (Annotated, False)]
)
def test_what_a_subclass_adds_is_seen(kind, refused):
    model, report = conversion.to_normality(
        nn.Sequential(kind(3)), return_report=True
    )
    assert (type(model[0]) is kind) == refused
    assert ("surprise" in str(report)) == refused
