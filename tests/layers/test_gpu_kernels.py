"""The kernels for a GPU, without one: what they compute (in `on_gpu.py`), what
they are compiled to, and what the engine asks of a device, and when.
"""

import functools
import json
import re
import runpy
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from normalnorm.layers import backends, functional
from normalnorm.layers.backends import Normalization, Unavailable
from normalnorm.layers.core import Rule
from normalnorm.layers.engines import gpu, operators
from normalnorm.theory.newton import Over
from tests.layers.steps import python
from tools.files import ROOT

triton = pytest.importorskip("triton", "3.3")
from tools import cubins  # noqa: E402

RECORD = json.loads(cubins.RECORD.read_text(encoding="utf-8"))["triton"]


def test_the_interpreted_kernels_are_the_definition():
    cases = str(ROOT / "tests/layers/on_gpu.py")
    how = ["--noconftest", "-p", "no:cacheprovider", cases]
    said = python(
        f"import pytest; raise SystemExit(pytest.main({how}))",
        timeout=900,
        CUDA_VISIBLE_DEVICES="",
    )
    assert int(re.search(r"(\d+) passed", said)[1]) >= 70


def about(row):
    return {
        key: row[key] for key in ("layer", "shape", "last", "dtype", "noise")
    }


def test_the_record_is_of_what_the_dispatcher_launches():
    "Each launch of the twelve shapes, for two capabilities, by two releases."
    launched = [
        (of, job[0], job[2].get("STAGE"))
        for of, job in cubins.launches(cubins.problems())
        for _ in cubins.CAPABILITIES
    ]
    assert len(launched) > 300 and {v[:3] for v in RECORD} == {"3.6", "3.9"}
    for rows in RECORD.values():
        found = [(about(row), row["kernel"], row["stage"]) for row in rows]
        assert found == launched


def test_kernels_do_not_spill_much():
    "A thread's registers hold what it works on, but for a few bytes."
    stacks = [row["stack"] for rows in RECORD.values() for row in rows]
    assert max(stacks) <= 64 and sum(s > 0 for s in stacks) < len(stacks) / 50


def compiled_now():
    "The first launch of each kernel and stage, with and without noise."
    jobs, seen = [], set()
    for of, job in cubins.launches(cubins.problems()):
        key = job[0], job[2].get("STAGE"), job[2].get("NOISE", 0) > 0
        if of["dtype"] == "bfloat16" and key not in seen:
            seen.add(key)
            jobs.append((of, job))
    return jobs


@pytest.mark.parametrize("of, job", compiled_now())
def test_a_kernel_compiles_to_what_the_record_says(of, job):
    "The interpreter accepts what the compiler refuses; 3 % are left open."
    made = cubins.compiled(job, 90)
    same = about(of) | {"kernel": made["kernel"], "stage": made["stage"]}
    same["capability"] = 90
    (row,) = [
        row for row in RECORD[triton.__version__] if same.items() <= row.items()
    ]
    assert made["stack"] <= row["stack"]
    for key in ("registers", "instructions", "special", "exchanges", "fused"):
        assert made[key] <= 1.03 * row[key] + 1, key


def test_nothing_is_asked_of_the_device():
    "Seed and momentum stay tensors: these have no numbers that could be asked."
    momentum = torch.empty((), device="meta")
    cases = [
        (of, problem._replace(momentum=momentum))
        for of, problem in cubins.problems(rules=[(0.4, "scaled")])
        if problem.running
    ]
    jobs = list(cubins.launches(cases))
    with pytest.raises(RuntimeError):
        momentum.item()
    assert any(job[1].get("MOMENTUM") == "*fp32" for _, job in jobs)


def test_a_compiled_model_has_operators_of_it():
    "Shapes and devices of results and gradients, where there is no memory."
    make = lambda *of: torch.empty(of, device="cuda")
    plain = mock.patch.object(operators, "_PLAIN", (FakeTensor,))
    with FakeTensorMode(), torch.no_grad(), plain:
        u, w = make(4, 8, 3, 3), make(8)
        rule = Rule(noise=0.4)
        problem = Normalization(u, Over((0, 2, 3)), rule, w, w, 1)
        out = gpu.ENGINE.traced[Normalization](problem)
        how = None, (0, 2, 3), 1, 1e-5, 0.4, "scaled", 1.0, 0, 9, True, True
        grads = torch.ops.normalnorm.normalize_backward(
            out, u, w, w, make(72), *how
        )
    assert [(t.shape, t.device.type) for t in (out, *grads)] == [
        (t.shape, "cuda") for t in (u, u, w, w)
    ]


# a card that notes what it is to launch
LAUNCHED = """
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

found = []
seen = lambda a: a.data_ptr() % 16 if type(a) is torch.Tensor else a
note = lambda *of: found.append([of[:3], [*map(seen, of[9:])]])
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    launcher_cls=lambda source, metadata: note,
    utils=SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda *of: (None, None, 0, 0, 1024),
        unload_module=lambda module: None,
    ),
))

from unittest import mock
import normalnorm as nn
from normalnorm.layers.backends import set_backend
from normalnorm.layers.engines import gpu

def step(layer, x):
    y = layer(x.requires_grad_())
    torch.autograd.grad(y, [x, *layer.parameters()], y)
    told, found[:] = found[:], []
    return told

by_triton = mock.patch.object(
    triton.JITFunction, "run", autospec=True,
    side_effect=triton.JITFunction.run)
with mock.patch.object(gpu, "_device_type", lambda: "cpu"), set_backend("gpu"):
    for layer, shape in (
        (nn.LayerNormalNorm(8, noise=0.4), (6, 8)),
        (nn.BatchNormalNorm2d(3, noise=0.4, momentum=None), (2, 3, 4, 4)),
    ):
        x = torch.randn(shape)
        with by_triton as run:
            first, asked = step(layer, x), run.call_count
            again = step(layer, x)
            print(len(first), asked, run.call_count - asked, first == again)
            apart = torch.randn(x.numel() + 1)[1:].view(shape)
            other = step(layer, apart)
            print(run.call_count > asked, other != first)
"""


def test_a_launch_is_prepared_once():
    "The second time Triton is not asked, and gets the same arguments."
    said = python(LAUNCHED, timeout=300, CUDA_VISIBLE_DEVICES="")
    assert said.splitlines() == [
        "2 2 0 True",
        "True True",
        "7 7 0 True",
        "True True",
    ]


@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
@pytest.mark.parametrize("enabled", [False, True])
def test_dtypes_under_autocast_are_pytorch_s(name, enabled):
    "Without a device: PyTorch asks autocast for tensors without memory, too."
    theirs = getattr(torch.nn.functional, name)
    ours = getattr(functional, name.replace("_norm", "_normal_norm"))
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    try:
        with FakeTensorMode(), backends.set_backend("eager"):
            u = torch.empty(4, 6, 6, device="cuda", dtype=torch.float16)
            of = (6,) if name == "layer_norm" else 3
            found, wanted = ours(u, of).dtype, theirs(u, of).dtype
    finally:
        torch.set_autocast_enabled("cuda", before)
    assert found == wanted == (torch.float32 if enabled else torch.float16)


def test_large_tensors_have_wide_addresses():
    wide = {}
    for rows in (2**19 - 1, 2**19):
        case = [("layer", (rows, 4096), False)]
        for _, job in cubins.launches(cubins.problems(case)):
            wide.setdefault(rows, set()).add(job[2]["WIDE"])
    assert list(wide.values()) == [{False}, {True}]


def test_triton_is_not_imported_before_it_is_needed():
    said = python(
        """
        import sys, torch, normalnorm
        from normalnorm.layers.backends import engines
        normalnorm.LayerNormalNorm(4)(torch.ones(2, 4))
        print(sorted(engines()), "triton" in sys.modules)
        """,
        timeout=120,
    )
    assert "'gpu'" in said and said.strip().endswith("False")


def test_it_is_asked_before_the_compiler():
    with mock.patch.object(backends, "_asked", {}):
        names = [e.name for e in backends._engines_asked("cuda")]
        assert names == ["gpu", "compiled"]
        assert "gpu" not in [e.name for e in backends._engines_asked("cpu")]


@pytest.fixture
def on_the_cpu():
    "As if the kernels ran on this machine."
    trouble = gpu._trouble.__wrapped__
    with (
        mock.patch.object(gpu, "_trouble", functools.cache(trouble)),
        mock.patch.object(gpu, "_device_type", lambda: "cpu"),
        mock.patch.object(gpu.ENGINE, "automatic", ("cpu",)),
        # all are asked for first: they register once, not in this table
        mock.patch.object(
            backends, "_known", {"gpu": backends.engines()["gpu"]}
        ),
        mock.patch.object(backends, "_asked", {}),
        mock.patch.object(backends, "_instead", {}),
    ):
        yield Normalization(torch.randn(3, 4), Over(-1))


def test_without_triton_a_warning_says_so_once(on_the_cpu):
    broken = mock.Mock(side_effect=ImportError("No module named 'triton'"))
    with mock.patch.object(gpu, "_kernels", broken):
        with pytest.warns(UserWarning, match="gpu kernel is not.*No module"):
            out, _ = backends.normalize(on_the_cpu)
        assert out.isfinite().all() and broken.call_count == 1
        backends.normalize(on_the_cpu)
        with pytest.raises(Unavailable, match="do not run: Triton cannot"):
            gpu.ENGINE.require()


def test_an_old_triton_is_refused(monkeypatch):
    for known in ("3.10.0", "3.3.0"):
        monkeypatch.setattr(triton, "__version__", known)
        runpy.run_path(cubins.kernels.__file__)
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    with pytest.raises(ImportError, match="Triton 3.3.* 3.2.0"):
        runpy.run_path(cubins.kernels.__file__)


@pytest.mark.parametrize(
    "of, words",
    [
        ({"torch.version.hip": "6.0"}, "NVIDIA"),
        ({"torch.cuda.is_available": lambda: False}, "finds no GPU"),
        (
            {
                "torch.cuda.is_available": lambda: True,
                "torch.cuda.get_device_capability": lambda _: (7, 5),
            },
            "8.0, this one has 7.5",
        ),
    ],
)
def test_machines_that_it_is_not_for(of, words, monkeypatch):
    for name, value in of.items():
        monkeypatch.setattr(name, value)
    assert words in gpu._trouble.__wrapped__(torch.device("cuda"))
