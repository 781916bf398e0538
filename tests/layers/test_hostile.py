"""Every layer against every kind of tensor and mode: `tools.hostile`, whose
table decides what is tried, and single guards, each of which has a test that
fails without it.
"""

import dataclasses
import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import normalnorm
from normalnorm.layers import core
from normalnorm.layers.backends import (
    Normalization,
    set_backend,
)
from normalnorm.layers.core import Rule
from normalnorm.layers.engines import native
from normalnorm.layers.folding import FoldedNormality
from normalnorm.layers.guards import are_concrete, check_memory
from normalnorm.layers.proxy import proxy_statistics
from normalnorm.theory.gaussianizers import Chain
from normalnorm.theory.newton import Over
from tests.layers.steps import python, refusals
from tools import hostile
from tools.hostile.situations import CHECKPOINTS, REFUSED, checkpointed
from tools.rows import SIZES, trials

ROOT = Path(__file__).resolve().parents[2]
PARTS = 2
AVERAGING = [
    name
    for name, row in hostile.LAYERS.items()
    if any(n.startswith("running") for n, _ in row.ours({}).named_buffers())
]


@pytest.mark.parametrize("part", range(PARTS))
def test_no_crash_and_no_silent_number(part):
    "A part of the table, in processes that have started nothing parallel."
    found = hostile.run_cases(hostile.table()[part::PARTS], together=True)
    assert not found["failures"], "\n".join(
        f"{name}: {text}" for name, text in found["failures"].items()
    )
    assert (
        found["cases"] >= 170
        and found["right"] > 0.4 * found["cases"]
        and found["refused"] > 10
    )


def test_the_table_is_large_enough_and_known_differences_are_few():
    chosen = hostile.table()
    assert len(chosen) == len(set(chosen)) >= 1000
    assert len(hostile.table(every=True)) > 5 * len(chosen)
    assert {name for name, _, _ in chosen} == set(hostile.LAYERS)
    assert {label for _, _, label in chosen} == set(hostile.S)
    assert len(hostile.KNOWN) <= 27


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", hostile.LAYERS)
def test_what_is_refused_is_refused_in_words(name, backend):
    "Or is not, as by PyTorch's layer, which a broken hook may crash."
    with set_backend(backend):
        for label, situation in hostile.S.items():
            case = (name, "full", label)
            if not situation.words or not hostile.applies(*case):
                continue
            if situation.composed:
                verdict = hostile.judged(case)
                assert verdict.word != "wrong", (label, verdict.text)
            elif backend == "native":  # which reads the memory itself
                text = hostile.tried(*case).text
                assert re.search(situation.words, text), (label, text)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folded_layer_refuses_in_words(kind):
    "Which has no row."
    layer = FoldedNormality(torch.ones(4))
    with pytest.raises((TypeError, ValueError)) as error:
        layer(hostile.S[f"input: {kind}"].prepare(torch.randn(3, 4)))
    said = f"{error.type.__name__}: {error.value}"
    assert re.search(REFUSED[kind], said.replace("\n", " "))


@pytest.mark.parametrize("name", AVERAGING)
def test_an_average_that_is_refused_changes_no_other(name):
    x = hostile.an_input(hostile.LAYERS[name].shape)
    averages = [n for n, _ in hostile.LAYERS[name].ours({}).named_buffers()]
    for wrong in averages[:-1]:  # the last is the number of batches
        layer = hostile.LAYERS[name].ours({})
        setattr(layer, wrong, getattr(layer, wrong).long())
        before = {n: t.clone() for n, t in layer.named_buffers()}
        with pytest.raises(TypeError, match=f"{wrong} is a tensor of .*int64"):
            layer(x)
        assert all(torch.equal(t, before[n]) for n, t in layer.named_buffers())


def test_the_harness_sees_what_is_wrong(monkeypatch):
    "A crash, a wrong number, a missing error, a hang."
    ones, wrong = {"output": torch.ones(3)}, hostile.difference
    assert "off by" in wrong({"output": torch.ones(3) * 1.001}, ones, False)
    assert wrong(ones, ones, False) is None
    assert "NaN" in wrong({"output": torch.full((3,), torch.nan)}, ones, False)
    assert "no gradient" in wrong({}, {"gradient of input": ones}, False)
    silent = hostile.Situation(raises=True)
    twice = hostile.Situation(
        lambda layer, x: hostile.clean(layer, x + x.square())
    )
    unsaid = dataclasses.replace(hostile.S["input: bool"], words="no such word")
    for situation, text in (
        (silent, "no error"),
        (twice, "off by"),
        (unsaid, "without no such word"),
    ):
        monkeypatch.setitem(hostile.S, "new", situation)
        verdict = hostile.judged(("layer", "plain", "new"))
        assert verdict.word == "wrong" and text in verdict.text
    with hostile.Isolated() as call:
        assert "SIGSEGV" in call(signal.raise_signal, signal.SIGSEGV).text
        with monkeypatch.context() as patch:
            patch.setattr(hostile, "SECONDS", 1)
            assert "no answer" in call(time.sleep, 90).text
        case = ("layer", "plain", "input: as it should be")
        assert call(hostile.tried, *case).word == "right"


# ---- activation checkpointing ----------------------------------------------


@pytest.mark.parametrize(
    "kind", ["reentrant False", "reentrant True", "selective"]
)
@pytest.mark.parametrize("name", AVERAGING)
def test_a_checkpoint_changes_no_gradient(name, kind):
    """After three ordinary batches, with noise: as without a checkpoint. The
    averages move twice, as PyTorch's batch norm's do; those that the gradient
    depends on move once.
    """
    if kind not in CHECKPOINTS:
        pytest.skip("PyTorch has it since 2.5")
    row = hostile.LAYERS[name]
    x = hostile.an_input(row.shape)
    layer, twin = (hostile.made(row, dict(noise=0.3), True) for _ in range(2))
    # what keeps something after the layer: without, a recomputation may end
    # before the averages
    checkpointed(nn.Sequential(layer, nn.Tanh()), x, CHECKPOINTS[kind])
    with torch.no_grad():
        for shift in range(3):
            twin(1.5 * x + shift)
        for _ in range(2 - (name == "renorm")):
            twin(x)
    for buffer, expected in twin.named_buffers():
        # a second move is computed from products that this one has kept
        if kind != "selective" or name == "renorm" or buffer.startswith("num"):
            torch.testing.assert_close(layer.get_buffer(buffer), expected)


# ---- batches that count -----------------------------------------------------

NARROW = {str(t): t for t in trials(SIZES | {"C": 3})}
COUNTING = {
    "batch": NARROW["batch1 B C"],
    "synchronized": NARROW["sync B C H W"],
    "decorrelated": NARROW["decorrelated1 B C"],
    "decorrelated, plain": NARROW["decorrelated1, plain B C"],
    "gaussianized": NARROW["batch1 B C"].having(gaussianizer=Chain()),
}


@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", COUNTING)
def test_batches_that_count(name, backend, momentum):
    """Refused and empty ones leave no trace; a cumulative average is the mean
    in float64 of those that are finite in all channels.
    """
    layer, batches = (
        COUNTING[name].ours(noise=0.0, momentum=momentum),
        [torch.randn(8, 3).exp() + i for i in range(6)],
    )
    batches[0][0, 1], batches[3][2, 0] = torch.nan, torch.inf
    bad = [
        torch.ones(8, 3, dtype=torch.int64),
        torch.randn(8, 4),
        torch.randn(1, 3),
    ]
    with set_backend(backend):
        for i, x in enumerate(batches):
            layer(x)
            layer(x[:0])
            with pytest.raises((TypeError, ValueError)):
                layer(bad[i % 3])
    if momentum is not None:
        assert layer.num_batches_tracked == 6
        return
    assert layer.num_batches_tracked == 4
    counted = torch.stack([batches[i] for i in (1, 2, 4, 5)]).double()
    torch.testing.assert_close(
        layer.running_mean.double(), counted.mean((0, 1)), rtol=1e-6, atol=1e-6
    )
    if hasattr(layer, "running_var"):
        torch.testing.assert_close(
            layer.running_var.double(),
            counted.var(1).mean(0),
            rtol=1e-5,
            atol=1e-6,
        )


# ---- parameters that are no real numbers ------------------------------------


def normalized(*given):
    of = core.Statistics(*given[:2], given[2:])
    x, unit = torch.randn(6, 4), Over(0)
    Normalization(x, unit, axis=1, statistics=of).check()


REAL, WHOLE = torch.ones(4), torch.ones(4).long()
test_given_statistics_must_be_real = refusals(
    [
        (WHOLE, REAL, REAL, "running_mean is a tensor of torch.int64"),
        (REAL, WHOLE, REAL, "running_var is a tensor of torch.int64"),
        (REAL, REAL, WHOLE, "running_lambda is a tensor of torch.int64"),
    ],
    normalized,
    TypeError,
)


# ---- modes, memory, hooks ---------------------------------------------------


def test_nothing_of_a_mode_is_kept():
    """Calls of shapes that no other test has, first in a mode and then without;
    the proxy's nodes too.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer, x = (
        normalnorm.BatchNormalNorm2d(13),
        torch.randn(3, 13, 2, 7, requires_grad=True),
    )
    weight = torch.rand(13, requires_grad=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(layer(x)).__name__ == "FakeTensor" and not are_concrete(x)
        proxy_statistics(weight, torch.zeros(13), activation="gelu", samples=37)
    layer(x).sum().backward()
    assert x.grad.isfinite().all() and type(x.grad) is torch.Tensor
    assert all(
        v.isfinite().all()
        for v in proxy_statistics(
            weight, torch.zeros(13), activation="gelu", samples=37
        )
    )
    assert not any(
        isinstance(value, torch.Tensor)
        for value in native.prepare(x, (0, 2, 3), None, None, Rule())
    )


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize(
    "change",
    [lambda t: t.double(), lambda t: t[:1], lambda t: t.to("meta")],
    ids=["dtype", "shape", "device"],
)
def test_each_tensor_that_the_proxy_saves_is_looked_at(place, change):
    """One of weight, bias, mean, scale and the kernel's derivatives comes back
    as another tensor.
    """
    leaves = [torch.rand(7, requires_grad=True) for _ in range(4)]
    unpacked = []

    def unpack(t):
        unpacked.append(t)
        return change(t) if len(unpacked) == place + 1 else t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        mean, var = proxy_statistics(*leaves, activation="gelu", samples=200)
    with pytest.raises(RuntimeError, match="came back"):
        torch.autograd.grad((mean + var).sum(), leaves)
    assert len(unpacked) == 5


@pytest.mark.parametrize("rest", [0, 8])
def test_memory_that_is_not_there(rest):
    x = torch.randn(4, 3)
    check_memory(
        x,
        x.T,
        x[:, 1:],
        x[:0],
        None,
        x.expand(5, 4, 3),
        x.to_sparse(),
        x.to("meta"),
    )
    part, turned = x[2:], x.T
    x.untyped_storage().resize_(rest)
    for t in (x, turned, part):
        with pytest.raises(RuntimeError, match="not there.*bring it back"):
            check_memory(t)
        with pytest.raises(RuntimeError, match="not there"):
            native.forward(
                native.prepare(torch.randn(t.shape), (0,), None, None, Rule()),
                t,
            )


TRIED = """if True:
    import torch

    def freed(t):
        t.untyped_storage().resize_(0)

    def tried(name, act):
        print(name, end=": ", flush=True)
        try:
            act()
            print("no error")
        except RuntimeError as error:
            print("refused" if "bring it back" in str(error) else error,
                  flush=True)
"""
FREED = """
    from torch import nn
    import normalnorm
    from normalnorm.theory.gaussianizers import Chain
    from normalnorm.layers.weights import gaussianized_direction

    class Direction(nn.Module):
        def forward(self, v):
            return gaussianized_direction(v)

    made = {
        "given statistics": lambda:
                                normalnorm.BatchNormalNorm1d(6).double().eval(),
        "two steps": lambda: normalnorm.LayerNormalNorm(6, steps=2).double(),
        "decorrelated, plain": lambda: normalnorm.DecorrelatedBatchNorm1d(
            6, group_size=2).double(),
        "decorrelated": lambda: normalnorm.DecorrelatedBatchNormalNorm1d(
            6, group_size=2).double(),
        "decorrelated, in evaluation":
            lambda: normalnorm.DecorrelatedBatchNormalNorm1d(6, group_size=2)
                        .double().eval(),
        "gaussianized": lambda: normalnorm.BatchNormalNorm1d(
            6, gaussianizer=Chain()).double(),
        "gaussianized, in evaluation": lambda: normalnorm.BatchNormalNorm1d(
            6, gaussianizer=Chain()).double().eval(),
        "weights": Direction}
    for name, make in made.items():
        for which in ("input", "weight", "running_mean", "running_lambda"):
            layer, x = make(), torch.randn(40, 6, dtype=torch.float64)
            lost = x if which == "input" else getattr(layer, which, None)
            if lost is not None:
                freed(lost)
                tried(f"{name}, {which}", lambda: layer(x))
"""
FREED_FOR_THE_PROXY = """
    from normalnorm.layers.backends import set_backend
    from normalnorm.layers.proxy import proxy_statistics

    ways = {"kernel": dict(samples=200), "definition": dict(backend="eager"),
            "closed form": dict(samples=None, activation="relu"),
            "function": dict(activation=torch.sin),
            "half": dict(dtype=torch.bfloat16),
            "strided": dict(step=2, samples=200),
            "float64": dict(dtype=torch.float64)}
    for name, how in ways.items():
        how = dict(how)
        backend, dtype, step = how.pop("backend", "native"), how.pop(
            "dtype", torch.float32), how.pop("step", 1)
        how = {"activation": "gelu", **how}
        for which in range(4):
            # in a backward pass, where the kernel reads what was given
            for before in (("forward", "backward")
                           if name in ("kernel", "strided") else ("forward",)):
                leaves = [torch.rand(64, dtype=dtype)[::step].requires_grad_()
                          for _ in range(4)]
                with set_backend(backend):
                    if before == "forward":
                        freed(leaves[which])
                        tried(f"{name}, {which}, {before}",
                              lambda: proxy_statistics(*leaves, **how))
                    else:
                        mean, var = proxy_statistics(*leaves, **how)
                        freed(leaves[which])
                        tried(f"{name}, {which}, {before}",
                              lambda: (mean + var).sum().backward())
    leaves = [torch.rand(4, requires_grad=True) for _ in range(2)]
    for strided in (False, True):
        for which in range(2):
            results, upstream = proxy_statistics(
                    *leaves, activation="gelu", samples=200), [
                torch.ones(8)[::2] if strided else torch.ones(4)
                for _ in range(2)]
            freed(upstream[which])
            tried(f"gradient {which}, {strided}",
                  lambda: torch.autograd.grad(results, leaves, upstream))
"""


def test_memory_freed_before_it_is_read():
    """By a layer that is computed by PyTorch's operations; and of the proxy,
    each parameter before each pass, on each way, and upstream gradients. In a
    process of their own, which may crash without the checks.
    """
    lines = python(TRIED + FREED + FREED_FOR_THE_PROXY).splitlines()
    assert len(lines) == 26 + 40
    assert all(line.endswith(": refused") for line in lines), lines


def test_committed_outcome():
    "At least three minutes, no failure."
    found = json.loads((ROOT / "results" / "hostile.json").read_text())
    assert (
        found["failures"] == {}
        and found["cases"] > 100
        and found["seconds"] >= 175
        and found["processor"]
    )
