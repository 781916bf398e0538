"""Until the kernel is built layers are the definition, and nothing shows when
it came to be there: the seed, the averages, what a checkpoint compares.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import normalnorm
import normalnorm.layers.backends
from normalnorm.layers.backends import set_backend
from normalnorm.layers.engines import compiled, native
from normalnorm.layers.engines.compiler import Building, CompilerError
from normalnorm.layers.proxy import proxy_statistics
from tools.rows import trials

ROWS = {str(trial): trial for trial in trials()}


@pytest.fixture
def there(monkeypatch):
    "Whether the kernel has been built: as a test says, once."
    answer = []
    monkeypatch.setattr(native, "_is_awaited", True)
    monkeypatch.setattr(native, "_is_built", lambda: bool(answer))
    return answer


def made(trial, noise):
    torch.manual_seed(1)
    layer = trial.ours(noise=noise)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer, torch.randn(trial.shape).exp()


def results(layer, u, between=lambda: None, evaluated=False):
    "Of a step under a checkpoint, which repeats it after `between`."
    # what keeps something after the layer: without, a repetition may end before
    # the averages
    layer = nn.Sequential(copy.deepcopy(layer), nn.Tanh())
    x = u.clone().requires_grad_()
    layer.train(not evaluated)
    torch.manual_seed(2)
    out = checkpoint(layer, x, use_reentrant=False)
    between()
    out.sin().sum().backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    return out.detach(), gradients, [b.clone() for b in layer.buffers()]


@pytest.mark.parametrize("evaluated", (False, True))
@pytest.mark.parametrize("trial", ROWS.values(), ids=ROWS)
def test_each_layer(trial, evaluated, there):
    """The output and the averages of the definition; and its gradients, where
    the kernel repeats a forward pass that it has not done.
    """
    layer, u = made(trial, 0.3)
    with set_backend("eager"):
        out, gradients, buffers = results(layer, u, evaluated=evaluated)
    for between in (lambda: None, lambda: there.append("now")):
        found = results(layer, u, between, evaluated)
        assert torch.equal(found[0], out)
        torch.testing.assert_close(found[1], gradients, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[2], buffers, rtol=1e-5, atol=1e-6)


def batch_norm(u, **options):
    layer = normalnorm.BatchNormalNorm2d(3, **options)
    return layer, layer(u)


def moments(weight, bias):
    return proxy_statistics(weight, bias, samples=200)


PROBLEMS = {
    "batch": lambda u: batch_norm(u, noise=0.4)[1],
    "frozen": lambda u: batch_norm(u)[0].eval()(u),
    "plain": lambda u: batch_norm(u, alpha=0.0, noise=0.0)[1],
    "statistics": lambda u: normalnorm.layers.backends.normality_norm(
        u, (1, 2, 3)
    ),
    "half": lambda u: batch_norm(u.bfloat16())[1],
    "moments": lambda u: moments(*u[:2, :, 0, 0].requires_grad_()),
    "grouped": lambda u: normalnorm.ProxyNorm(3, "relu", groups=3, samples=200)(
        u
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_is_saved_has_the_kernels_shapes(problem, there, monkeypatch):
    "Which a checkpoint compares; and the results have them."
    found = []

    def forward(work, problem, keep):
        ours = work.work.meanwhile(problem)
        theirs = work.work.forward(problem, True)
        found.append((ours, theirs))
        return ours

    monkeypatch.setattr(native.Meanwhile, "forward", forward)
    PROBLEMS[problem](torch.randn(4, 3, 5, 5))
    kinds = lambda tensors: normalnorm.layers.backends.kinds(
        tensors if isinstance(tensors, tuple) else (tensors,)
    )
    assert found
    for (ours, saved, state), (theirs, expected, other) in found:
        assert kinds(ours) == kinds(theirs) and kinds(saved) == kinds(expected)
        assert (state is None) == (other is None)


@pytest.fixture
def asked(monkeypatch):
    "What the compiler answers, and how often it has been asked, at what time."
    calls, clock = [], [0.0]

    def load(source, functions, wait):
        calls.append(wait)
        if isinstance(load.answer, Exception):
            raise load.answer

    load.answer = Building("not yet")
    monkeypatch.delenv("NORMALNORM_WAIT", raising=False)
    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(native, "_looked", -1.0)
    monkeypatch.setattr(native.time, "monotonic", lambda: clock[0])
    return load, calls, clock


@pytest.mark.parametrize("answer", (None, CompilerError("broken")))
def test_it_is_looked_for_now_and_then(asked, answer):
    load, calls, clock = asked
    assert not native._is_built() and not native._is_built()
    assert calls == [False]
    clock[0] += 2 * native._LOOK
    load.answer = answer
    assert native._is_built() and calls == [False, False]


def test_bits_that_must_not_depend_on_the_clock_wait(asked, monkeypatch):
    _, calls, _ = asked
    monkeypatch.setenv("NORMALNORM_WAIT", "1")
    assert native._is_built()
    monkeypatch.delenv("NORMALNORM_WAIT")
    torch.use_deterministic_algorithms(True)
    try:
        assert native._is_built()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not calls and not native._is_built()


def test_one_that_cannot_be_built_is_said_as_ever(there, monkeypatch):
    "By the layers with a warning, once it is known; by a proxy without."
    monkeypatch.setattr(
        native, "_library", lambda: CompilerError("it is broken")
    )
    monkeypatch.setattr(normalnorm.layers.backends, "_instead", {})
    monkeypatch.setattr(compiled, "_compiled", lambda *_: 1 / 0)
    u = torch.randn(8, 3)
    layer = normalnorm.BatchNormalNorm1d(3)
    layer(u)
    there.append("failed")
    with pytest.warns(UserWarning, match="The reason: it is broken"):
        layer(u)
    assert not native._is_awaited  # nor looked for again
    found = moments(torch.ones(3), torch.zeros(3))
    with set_backend("eager"):
        expected = moments(torch.ones(3), torch.zeros(3))
    torch.testing.assert_close(found, expected)
