"""What tests of layers do again and again: a step, a file and back, a table of
refusals, another process, several that exchange.
"""

import contextlib
import importlib
import io
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from normalnorm.checks.layers import core
from normalnorm.checks.layers.sync import in_processes
from normalnorm.layers.hybrids import BatchReNorm, PropagatedNorm
from tests.refusals import refusals as refusals
from tools.files import ROOT


def step(function, u, upstream=None, leaves=None, **how):
    """The result, and the gradients of the input and of `leaves`, by default
    the function's parameters: of a sum of sines unless `upstream` is given.
    """
    x = u.detach().requires_grad_()
    out = function(x)
    leaves = function.parameters() if leaves is None else leaves
    top, grad = (out.sin().sum(), None) if upstream is None else (out, upstream)
    return [out.detach(), *torch.autograd.grad(top, [x, *leaves], grad, **how)]


def kept_bytes(layer, u) -> int:
    "What waits for the backward pass, each storage once."
    return core.kept_bytes(lambda x, *_, **__: (layer(x),), u)


@contextlib.contextmanager
def threads(number: int):
    "So many of them inside a `with` statement."
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def uncut(layer):
    """Without what cuts its results: a threshold, a ReLU, the bounds of what
    batch renormalization corrects by.
    """
    if getattr(layer, "tau", None) is not None:
        nn.init.constant_(layer.tau, -9)
    if type(layer) is PropagatedNorm:
        nn.init.constant_(layer.bias, 9)
    if type(layer) is BatchReNorm:
        layer.r_max, layer.d_max = 1.0, 0.0
    return layer


def reloaded(saved):
    "Through a file."
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def refusal(act: Callable) -> str:
    "What it raises, or that it was accepted."
    try:
        act()
    except Exception as reason:
        return f"{type(reason).__name__}: {reason}"
    return "accepted"


def python(
    code: str | Path, *arguments, timeout: int = 300, **environment
) -> str:
    "What a program, or a file with one, prints in a process of its own."
    inline = isinstance(code, str)
    program = ["-c", textwrap.dedent(code)] if inline else [code]
    done = subprocess.run(
        [sys.executable, *map(str, (*program, *arguments))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def together(count: int, worker: Callable, *arguments, also: str = "") -> list:
    """What `worker(rank, *arguments)`, a function of a test's module, returns
    in each of `count` processes of one group.

    Processes are slow to start: let a worker compute everything that a module's
    tests look at. `also`: a module that is imported before they part.
    """
    module = f"tests.layers.{worker.__module__.rpartition('.')[2]}"
    before = ", ".join(filter(None, ["tests.layers.steps", also, module]))
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        return in_processes(
            count,
            f"import {before}; tests.layers.steps.member({module!r}, "
            f"{worker.__name__!r}, {{rank}}, '{{folder}}', {count}, "
            f"{arguments!r})",
        )


def member(module, name, rank, folder, count, arguments) -> None:
    "One of these processes."
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=count,
    )
    torch.set_num_threads(1)
    worker = getattr(importlib.import_module(module), name)
    torch.save(worker(rank, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def share(rank: int, shares: tuple[int, ...]) -> slice:
    "The rows of one of these processes, of which each has a number."
    return slice(sum(shares[:rank]), sum(shares[: rank + 1]))
