"""`make cubins`: what the kernels for a GPU are compiled to, into
results/cubins.json; it takes no GPU.

The dispatcher runs on tensors without memory, each launch that it would make is
noted instead, and Triton compiles it for compute capability 8.0 and 9.0. A row:
the kernel and what it was compiled for, registers of a thread, bytes that it
spills, instructions, those of the largest loop (all, where there is none), and
of all special functions, exchanges between threads, barriers, fused products
and accesses of 16 bytes; the elements of a thread in one tile.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from normalnorm.layers import kernels
from normalnorm.layers.backends import Normalization
from normalnorm.layers.core import Rule, Statistics
from normalnorm.layers.engines import gpu
from normalnorm.theory.newton import Over
from tools.files import ROOT

RECORD = ROOT / "results" / "cubins.json"
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
}
CAPABILITIES = 80, 90
MULTIPROCESSORS = 132  # of an H100 and of an H200
# what the dispatcher reaches: layer, shape, channels last
SHAPES = [
    ("layer", (8192, 4096), False),
    ("layer", (64, 197, 384), False),
    ("layer", (4096, 197), False),
    ("batch", (256, 64, 56, 56), False),
    ("batch", (256, 64, 56, 56), True),
    ("batch", (64, 512, 7, 7), False),
    ("batch", (64, 512, 7, 7), True),
    ("batch", (512, 384), False),
    ("group", (32, 256, 28, 28), False),
    ("group", (32, 256, 56, 56), False),
    ("instance", (32, 64, 56, 56), False),
    ("evaluation", (256, 64, 56, 56), True),
]
RULES = [(0.0, "scaled"), (0.4, "scaled"), (0.4, "dropout")]
Job = tuple[str, dict, dict, dict, dict]


def problems(
    shapes: list = SHAPES, dtypes=(torch.float32, torch.bfloat16), rules=RULES
) -> Iterator[tuple[dict, Normalization]]:
    "Each with what it is about; its tensors have no memory."
    of = lambda *shape: torch.empty(shape, device="meta")
    for (layer, shape, last), dtype, (noise, kind) in product(
        shapes, dtypes, rules
    ):
        few = (layer, shape, last) not in shapes[:4:3]
        if noise and (layer == "evaluation" or kind == "dropout" and few):
            continue
        u = torch.empty(shape, device="meta", dtype=dtype)
        if last:
            u = u.contiguous(memory_format=torch.channels_last)
        rule, c = Rule.of(noise=noise, noise_kind=kind), shape[1]
        inner, across = tuple(range(2, len(shape))), (0, *range(2, len(shape)))
        if layer == "layer":
            c = shape[-1]
            problem = Normalization(u, Over(-1), rule, of(c), of(c))
        elif layer == "group":
            u, w = u.unflatten(1, (32, c // 32)), of(1, 32, c // 32, 1, 1)
            problem = Normalization(u, Over((2, 3, 4)), rule, w, w)
        elif layer == "instance":
            problem = Normalization(u, Over(inner), rule, of(c), of(c), 1)
        else:
            three = of(c), of(c), of(c)
            given = Statistics(*three[:2], three[2:])
            problem = Normalization(
                u, Over(across), rule, of(c), of(c), 1, running=three
            )
            if layer == "evaluation":
                problem = problem._replace(running=(), statistics=given)
        about = {
            "layer": layer,
            "shape": list(shape),
            "last": last,
            "dtype": str(dtype)[6:],
            "noise": kind if noise else "",
        }
        yield about, problem


class Noted:
    "In the place of the kernels: what they are called with."

    def __init__(self):
        self.jobs: list[Job] = []

    def __getattr__(self, name: str):
        function = getattr(kernels, name)

        class Kernel:
            def __getitem__(_, grid):
                return lambda *given, **named: self.jobs.append(
                    job_of(name, function, given, named)
                )

        return Kernel()


def job_of(name: str, function: Any, given: tuple, named: dict) -> Job:
    "The types, constants and alignments that Triton would have found."
    values = dict(zip(function.arg_names, given)) | named
    options = {k: v for k, v in named.items() if k not in function.arg_names}
    types, constants, aligned = {}, {}, {}
    for i, (key, parameter) in enumerate(
        zip(function.arg_names, function.params)
    ):
        value = values[key]
        if (
            parameter.is_constexpr
            or value is None
            or type(value) is int
            and value == 1
        ):
            types[key], constants[key] = "constexpr", value
        elif type(value) is float:
            types[key] = "fp32"
        else:
            if isinstance(value, torch.Tensor):
                types[key] = TYPES[value.dtype]
            else:
                types[key] = "i32" if abs(value) < 2**31 else "i64"
            if isinstance(value, torch.Tensor) or value and value % 16 == 0:
                aligned[(i,)] = [["tt.divisibility", 16]]
    return name, types, constants, aligned, options


def launches(cases) -> Iterator[tuple[dict, Job]]:
    "What the dispatcher launches, forward and backward, each once."
    seen = set()
    for about, problem in cases:
        noted = Noted()
        with (
            mock.patch.object(gpu, "_kernels", lambda: noted),
            mock.patch.object(gpu, "_device_type", lambda: "meta"),
            mock.patch.object(gpu, "check_memory", lambda *of: None),
            mock.patch.object(gpu, "check_saved", lambda *of: None),
            mock.patch.object(gpu, "increment_versions", lambda of: None),
            mock.patch.object(
                gpu, "_multiprocessors", lambda of: MULTIPROCESSORS
            ),
        ):
            work = gpu.prepare(problem)
            _, saved, state = work.forward(problem, True)
            grad = torch.empty_like(problem.u)
            work.backward(state, saved, (grad,), (True, True, True))
        for job in noted.jobs:
            if (key := str(job)) not in seen:
                seen.add(key)
                yield about, job


def compiled(job: Job, capability: int) -> dict[str, Any]:
    "A row: what the compiler made of it."
    name, types, constants, aligned, options = job
    function = getattr(kernels, name)
    place = function.arg_names.index
    source = ASTSource(
        function,
        types,
        constexprs={(place(k),): v for k, v in constants.items()},
        attrs=aligned,
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=options
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        used, code = (
            subprocess.run(
                [tools / tool, option, file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for tool, option in (
                ("cuobjdump", "-res-usage"),
                ("nvdisasm", "-c"),
            )
        )
    found, loops, places = [], [0], {}
    for label, operation, rest in re.findall(
        r"^(\.L_x_\d+):|"
        r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)(.*)",
        code,
        re.M,
    ):
        if label:
            places[label] = len(found)
            continue
        found.append(operation)
        to = re.search(r"\.L_x_\d+", rest)
        if operation.startswith("BRA") and to:
            loops.append(len(found) - places.get(to[0], len(found)))
    count = lambda *of: sum(line.startswith(of) for line in found)
    registers, stack = map(
        int, re.search(r"REG:(\d+) STACK:(\d+)", used).groups()
    )
    rows, columns = (
        constants.get(key, constants.get(other, 1))
        for key, other in (("R", "T"), ("BLOCK", "K"))
    )
    return {
        "kernel": name,
        "stage": constants.get("STAGE"),
        "capability": capability,
        "registers": registers,
        "stack": stack,
        "shared": made.metadata.shared,
        "instructions": len(found),
        # the last instruction jumps to itself
        "loop": max(loops) if max(loops) > 1 else len(found),
        "special": count("MUFU"),
        "exchanges": count("SHFL"),
        "barriers": count("BAR"),
        "fused": count("FFMA"),
        "wide": sum(
            one.startswith(("LDG", "STG")) and ".128" in one for one in found
        ),
        "elements": max(rows * columns // (32 * made.metadata.num_warps), 1),
        "constants": {
            k: v
            for k, v in constants.items()
            if k in ("BLOCK", "K", "T", "NOISE", "FAST", "LAST", "EVEN")
        },
    }


def main() -> int:
    jobs = [
        (about, job, capability)
        for about, job in launches(problems())
        for capability in CAPABILITIES
    ]
    with ProcessPoolExecutor() as pool:
        made = pool.map(compiled, *zip(*[job[1:] for job in jobs]))
        rows = [about | row for (about, *_), row in zip(jobs, made)]
    old = json.loads(RECORD.read_text())["triton"] if RECORD.exists() else {}
    old[triton.__version__] = rows
    made = [
        f'"{version}": [\n' + ",\n".join(map(json.dumps, of)) + "\n]"
        for version, of in sorted(old.items())
    ]
    RECORD.write_text(
        f'{{"date": "{time.strftime("%Y-%m-%d")}",\n'
        f'"torch": "{torch.__version__}",\n'
        '"triton": {' + ",\n".join(made) + "}}\n",
        encoding="utf-8",
    )
    print(
        f"Triton {triton.__version__}: {len(rows)} kernels compiled, "
        f"{sum(row['stack'] > 0 for row in rows)} of them spill registers"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
