"""An engine is one file in a folder: it is found, chosen by its name, asked for
what it covers, and second derivatives are the definition's.
"""

import ast
import copy
import json
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

import normalnorm
from normalnorm.layers import backends, functional
from normalnorm.layers.engines import compiled, gpu
from normalnorm.theory.newton import Over
from tests.layers.steps import python, step
from tests.peers import FOLLOWS, TORCH
from tools.files import ROOT

# Of rows of two axes: the plain normalizer, by hand.
TOY = """
import torch
from normalnorm.layers.backends import (
    Engine, Normalization, by_definition, register)
from normalnorm.theory.gradient import Identity
from normalnorm.theory.newton import Over

CALLS = []


class Rows:
    def forward(self, problem, keep):
        CALLS.append("forward")
        u = problem.u
        var, mean = torch.var_mean(u, 1, correction=0, keepdim=True)
        out = (u - mean) * (var + problem.rule.eps).rsqrt()
        results = (out, mean, var) if problem.wanted else out
        return results, (u,) if keep else (), problem.rule

    def backward(self, state, saved, grads, needs):
        if grads[0] is None or any(g is not None for g in grads[1:]):
            return None
        CALLS.append("backward")
        (u,), g = saved, grads[0]
        var, mean = torch.var_mean(u, 1, correction=0, keepdim=True)
        rate = (var + state.eps).rsqrt()
        h = (u - mean) * rate
        return (rate * (g - g.mean(1, keepdim=True)
                        - h * (g * h).mean(1, keepdim=True)), None, None)

    def definition(self, state, saved):
        CALLS.append("definition")
        problem = Normalization(saved[0], Over(1), state)
        return by_definition(problem, None)


class Toy(Engine):
    name = "toy"


def offer(problem):
    rule = problem.rule
    return Rows() if (
        problem.u.ndim == 2 and problem.unit.dim in ((1,), (-1,))
        and problem.weight is None and problem.bias is None
        and problem.statistics is None and not problem.running
        and not rule.noise
        and isinstance(rule.gaussianizer.reduced(), Identity)) else None


register(Toy()).offers[Normalization] = offer
"""

USED = """
    import json, sys, torch
    import normalnorm.layers.engines as engines
    engines.__path__.append(sys.argv[1])
    import normalnorm
    from normalnorm.layers.backends import (
        engines as known, get_backend, normality_norm, set_backend)

    def both(u, **options):
        "Results, statistics, first and second derivatives."
        found = []
        for backend in ("toy", "eager"):
            x = u.clone().requires_grad_()
            with set_backend(backend):
                out, used = normality_norm(x, (1,), **options)
                first, = torch.autograd.grad(
                    out.sin().sum(), x, retain_graph=True)
                again, = torch.autograd.grad(
                    out.sin().sum(), x, create_graph=True)
                second, = torch.autograd.grad(again.square().sum(), x,
                                              retain_graph=True)
                of_var, = torch.autograd.grad(used.var.sum(), x)
            found.append([out, used.mean, used.var, first, again, second,
                          of_var])
        return [(a - b).abs().max().item() for a, b in zip(*found)]

    torch.manual_seed(0)
    before = get_backend()
    set_backend("toy")
    calls = sys.modules["normalnorm.layers.engines.toy"].CALLS
    chosen, u = get_backend(), torch.randn(5, 40, dtype=torch.float64)
    answer = {"before": before, "chosen": chosen, "known": list(known()),
              "off": both(u, alpha=0.0)}
    answer["calls"] = list(calls)
    calls.clear()
    answer["covered"] = [
        max(both(u)), max(both(u, alpha=0.0, noise=0.4,
                               seed=torch.tensor(3))), list(calls)]
    with set_backend("toy"):
        layer = normalnorm.LayerNormalNorm(
            40, noise=0.0, alpha=0.0, elementwise_affine=False)
        layer(u.float())
    answer["layer"] = list(calls)
    calls.clear()
    with set_backend("auto"):
        layer(u.float())
        normality_norm(u, (1,), alpha=0.0)
    answer["auto"] = list(calls)
    print(json.dumps(answer))
"""


def test_one_file_is_an_engine(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    found = json.loads(python(USED, tmp_path).splitlines()[-1])
    assert (found["before"], found["chosen"]) == ("auto", "toy")
    assert {"native", "compiled", "toy"} <= set(found["known"])
    assert len(found["off"]) == 7 and max(found["off"]) < 1e-12
    # its own are the first pass, and what a second one sends back through the
    # output; with a graph, and of a statistic, they are the definition's
    assert found["calls"] == [
        "forward",
        "backward",
        "definition",
        "backward",
        "definition",
    ]
    assert found["covered"] == [0, 0, []]  # what it does not cover
    assert found["layer"] == ["forward"]
    assert found["auto"] == []  # it is not automatic


@pytest.fixture
def named(monkeypatch):
    "An engine that covers nothing, to be registered for this test alone."
    monkeypatch.setattr(backends, "_known", dict(backends.engines()))

    def made(name, automatic=()):
        engine = backends.Engine()
        engine.name, engine.automatic = name, automatic
        return engine

    return made


def test_an_engine_has_a_name_of_its_own(named):
    for name in ("", "auto", "eager"):
        with pytest.raises(ValueError, match="a name of its own"):
            backends.register(named(name))
    for engine in (named("nothing"), named("nothing")):
        assert backends.register(engine) is engine
        assert backends.engines()["nothing"] is engine
    problem = backends.Normalization(torch.randn(4, 3), Over(0))
    with backends.set_backend("nothing"):  # it covers nothing
        assert backends.compute(problem) is None
    with pytest.raises(ValueError, match="'anything' is not known"):
        backends.set_backend("anything")


def test_who_is_asked_on_which_device(named):
    'By "auto", kernels on a CPU and on CUDA, there torch.compile behind them.'

    def asked(choice):
        with backends.set_backend(choice):
            return {
                device: [e.name for e in backends._engines_asked(device)]
                for device in ("cpu", "cuda", "mps", "xpu", "meta")
            }

    usual = {"cpu": ["native"], "cuda": ["gpu", "compiled"]}
    nobody = dict.fromkeys(("mps", "xpu", "meta"), [])
    assert asked("auto") == usual | nobody
    for chosen in ("eager", "native", "compiled"):
        names = [chosen] * (chosen != "eager")
        assert asked(chosen)["cpu"] == asked(chosen)["cuda"] == names
    with pytest.raises(TypeError, match="a tuple of device types"):
        backends.register(named("toy", True))
    backends.register(named("toy", ("mps", "cuda")))
    # in their order, but last what can stand in for others
    more = {"cuda": ["gpu", "toy", "compiled"], "mps": ["toy"]}
    assert asked("auto") == usual | nobody | more


@pytest.fixture
def fakes(monkeypatch):
    """Tensors on a CUDA device that is not there, as far as to the engine: its
    first trial of the device, and what it is to compute, are written down.
    """
    log = []

    def run(function, case, *choices):
        log.append(
            (
                "tried" if case[0] == "tried out" else "computed",
                case[-1].type if case[0] == "tried out" else case[0],
            )
        )
        dim = () if case[0] == "tried out" else case[0]
        return lambda u, *_: (u, *(u.mean(dim, keepdim=True),) * 3)

    monkeypatch.setattr(gpu.ENGINE, "offers", {})  # nothing is for it
    monkeypatch.setattr(backends, "are_concrete", lambda *_: True)
    monkeypatch.setattr(backends, "_instead", {})
    monkeypatch.setattr(compiled, "_compiled", run)
    monkeypatch.setattr(
        compiled,
        "update_running",  # copies, which PyTorch must be built for CUDA for
        lambda running, *_: log.append(("moved", len(running))),
    )
    # a slice of a tensor asks PyTorch whether it was built for CUDA
    monkeypatch.setattr(compiled.core, "closed", lambda *_: True)
    compiled._trouble.cache_clear()
    with FakeTensorMode(), torch.no_grad(), backends.set_backend("auto"):
        yield log
    compiled._trouble.cache_clear()


def test_auto_asks_for_compiled_layers_on_cuda(fakes):
    layer = normalnorm.LayerNormalNorm(4, noise=0.0, device="cuda")
    batch = normalnorm.BatchNormalNorm1d(4, noise=0.0, device="cuda")
    u = torch.ones(3, 4, device="cuda")
    for _ in range(2):
        assert layer(u).device.type == "cuda"
    assert fakes == [("tried", "cuda"), *[("computed", (-1,))] * 2]
    batch(u)
    assert fakes[-2:] == [("computed", (0,)), ("moved", 3)]
    fakes.clear()
    for wrong in (u.int(), u.double()):  # the definition's words
        with pytest.raises(TypeError):
            layer(wrong)
    with pytest.raises(RuntimeError, match="device"):
        backends.normalize(
            backends.Normalization(u, Over(1), weight=torch.ones(4))
        )
    assert fakes == []
    # a meta tensor has no values, whatever the choice
    assert (
        backends.compute(
            backends.Normalization(torch.ones(3, 4, device="meta"), Over(1))
        )
        is None
    )


def test_what_does_not_compile_on_cuda_is_the_definition(fakes, monkeypatch):
    "With one warning; a trial on a CPU does not speak for CUDA."
    compiled._ENGINE.try_out(torch.device("cpu"))

    def fails(function, case, *choices):
        fakes.append(case[-1].type)
        raise RuntimeError("no Triton\nand more")

    monkeypatch.setattr(compiled, "_compiled", fails)
    problem = backends.Normalization(torch.ones(3, 4, device="cuda"), Over(1))
    with pytest.warns(UserWarning) as seen:
        for _ in range(3):
            assert backends.compute(problem) is None
    assert fakes == [("tried", "cpu"), "cuda"]
    (text,) = [str(w.message) for w in seen]
    assert "compiled kernel is not available on cuda:0" in text
    assert text.endswith(
        "one by one instead. The reason: RuntimeError: no Triton"
    )
    assert backends._instead == {("compiled", "cuda"): None}


@pytest.mark.parametrize("room", ["forward", "backward"])
def test_a_case_that_the_compiler_gives_up_is_the_definitions(
    monkeypatch, room
):
    "With one warning for a case, forward or backward; others are compiled."
    tries, failing = (
        [],
        {
            "forward": compiled._forward_pass,
            "backward": compiled._backward_pass,
        }[room],
    )

    def run(function, case, *choices):
        tries.append(function)
        if function is failing:
            raise torch._dynamo.exc.TorchDynamoException("too large")
        return function

    monkeypatch.setattr(compiled, "_compiled", run)
    monkeypatch.setattr(compiled, "_refused", set())
    u = torch.randn(5, 8).exp()
    exact = step(lambda u: backends.core.normalize(u, Over(1))[0], u, leaves=())
    with backends.set_backend("compiled"), pytest.warns(UserWarning) as seen:
        for _ in range(2):
            torch.testing.assert_close(
                step(
                    lambda u: backends.normality_norm(u, (1,))[0], u, leaves=()
                ),
                exact,
            )
        assert tries.count(failing) == 1
        backends.normality_norm(u, (0,))  # another case
        assert tries[-1] is compiled._forward_pass
    first, *more = [str(w.message) for w in seen]
    assert "too large" in first and len(more) == (room == "forward")


TRAINED = {
    "batch": normalnorm.BatchNormalNorm2d(6, noise=0.3, momentum=0.3),
    "cumulative": normalnorm.BatchNormalNorm2d(6, momentum=None),
    "bare": normalnorm.BatchNormalNorm2d(6, alpha=0.0, noise=0.0, affine=False),
    "instance": normalnorm.InstanceNormalNorm2d(
        6, affine=True, track_running_stats=True, noise=0.0
    ),
    "group": normalnorm.GroupNormalNorm(3, 6),
    "layer": normalnorm.LayerNormalNorm((6, 3, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TRAINED)
def test_compiled_layers_do_not_fall_back_on_the_definition(
    monkeypatch, kind, dtype
):
    """In training: the same outputs, gradients and averages, and the definition
    is not called, but for nothing, for second derivatives and evaluation.
    (Nothing is compiled here: the two functions are.)
    """
    monkeypatch.setattr(compiled, "_compiled", lambda function, *_: function)
    u, found = torch.randn(9, 6, 3, 4).exp().to(dtype), []
    for name in ("eager", "compiled"):
        layer, asked = (
            copy.deepcopy(TRAINED[kind]),
            Mock(side_effect=backends.core.normalize),
        )
        for average in layer.buffers():
            average.fill_(3)
        torch.manual_seed(5)
        with backends.set_backend(name), monkeypatch.context() as patch:
            patch.setattr(backends.core, "normalize", asked)
            found.append([*step(layer, u), *layer.buffers()])
            assert bool(asked.call_count) == (name == "eager")
            found[-1] += layer(u[:0]), layer.eval()(u)
            if dtype is torch.float32:
                x = u.detach().requires_grad_()
                (slope,) = torch.autograd.grad(
                    layer.train()(x).sin().sum(), x, create_graph=True
                )
                found[-1] += torch.autograd.grad(slope.square().sum(), x)
    torch.testing.assert_close(*found)


def test_compiled_layers_refuse_what_the_definition_refuses():
    for name in ("eager", "compiled"):
        with (
            backends.set_backend(name),
            pytest.raises(ValueError, match="running_var"),
        ):
            functional.batch_normal_norm(
                torch.randn(9, 6), torch.zeros(6), torch.ones(5), training=True
            )


@FOLLOWS
def test_a_layer_is_compiled_before_any_other_call():
    "In a process in which no engine has been asked for yet."
    python("""
        import torch, normalnorm
        torch.manual_seed(0)
        u = torch.randn(8, 4)
        layer = normalnorm.LayerNormalNorm(4, noise=0.0)
        found = torch.compile(layer, fullgraph=True, backend="eager")(u)
        torch.testing.assert_close(found, layer(u))
    """)


FUNCTIONS = {  # of autograd in the layer room, each with its reason
    "core.py": {
        "_Normalized",  # the operation
        "_NormalizedBothModes",  # torch.compile refuses its jvp
    },
    "guards.py": {"_Old"},  # asks whether torch.func is active
    "backends.py": {
        "_ByEngine",  # torch.func's form costs too much
        "Twice",
    },  # tries that out
    # of generated code, which holds the operators that it calls
    "engines/operators.py": {"_Differentiated"},
    "sync.py": {"_Exchange"},  # refuses to be differentiated
    "sync_decorrelated.py": {"_Whitened"},
}  # whitening of all processes


def test_one_autograd_function_for_the_operation_and_one_for_engines():
    found = {}
    room = ROOT / "normalnorm" / "layers"
    for path in room.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(
                name in ast.unparse(base)
                for base in node.bases
                for name in ("Function", "_Normalized")
            ):
                found.setdefault(str(path.relative_to(room)), set()).add(
                    node.name
                )
    assert found == FUNCTIONS


@pytest.mark.skipif(TORCH >= (2, 13), reason="its compiler reads the layers")
@pytest.mark.parametrize(
    "layer",
    [
        normalnorm.BatchNormalNorm1d(6, noise=0.0),
        normalnorm.LayerNormalNorm(6, noise=0.0),
        normalnorm.DecorrelatedBatchNormalNorm1d(6, noise=0.0),
        normalnorm.ProxyNorm(6, "relu"),
        lambda x: functional.layer_normal_norm(x, (6,)),
    ],
)
def test_an_old_compiler_leaves_layers_alone(layer):
    "Compiled with breaks: the numbers of the model that is not."
    block = lambda x: layer(2 * x).relu() + 1
    torch.compiler.reset()
    compiled, u = torch.compile(block, backend="aot_eager"), torch.randn(20, 6)
    torch.testing.assert_close(
        *(step(f, u.exp(), leaves=()) for f in (block, compiled))
    )
    torch.compiler.reset()
