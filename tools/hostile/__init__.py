"""`python -m tools.hostile`: every layer against every kind of tensor and mode
that breaks layers.

Right, refused as PyTorch refuses, or refused clearly; never a crash or a silent
number. A situation does something to a layer and its input. It is judged
against the layer in float64 by the definition (`plain`: PyTorch's own layer),
and, where it raises, against PyTorch's layer in the same situation. All that
happens in processes that have imported torch and started nothing parallel,
those that are prone to spoil one in a process of their own. (pytest-forked
would fork the process of the tests, in which PyTorch has threads.)
"""

import multiprocessing
import os
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normalnorm.layers import functional
from normalnorm.layers.backends import normality_norm, set_backend
from normalnorm.layers.engines import native
from normalnorm.theory.gaussianizers import Chain, Tail
from tools.hostile.situations import (
    EXPECTED_ERRORS,
    KNOWN,
    NOT_TRIED,
    NotHere,
    S,
    Situation,
    clean,
    difference,
    number,
)
from tools.rows import Trial, trials

PLAIN, SECONDS = dict(alpha=0.0, noise=0.0), 60
Case = tuple[str, str, str]  # layer, variant, situation

# ---- layers -----------------------------------------------------------------


class Function(nn.Module):
    "A functional form, with the parameters and averages of a layer."

    def __init__(self, layer: nn.Module, call: Callable, options: dict):
        super().__init__()
        self.call, self.options = call, options
        for name, t in layer.named_parameters():
            self.register_parameter(name, t)
        for name, t in layer.named_buffers():
            if name.startswith("running"):
                self.register_buffer(name, t)

    def forward(self, x):
        return self.call(self, x, **self.options)


def _over_batch(function: Callable) -> Callable:
    return lambda m, x, **o: function(
        x,
        m.running_mean,
        m.running_var,
        m.running_lambda,
        m.weight,
        m.bias,
        m.training,
        **o,
    )


class Row(NamedTuple):
    """A layer for the options of normality, PyTorch's layer, the shape of an
    input, and whether a kernel of ours reads its memory (or else PyTorch's
    operations do, which do not ask).
    """

    ours: Callable
    theirs: Callable
    shape: tuple
    own: bool = True


def _by_kernel(layer: nn.Module, shape: tuple) -> bool:
    "Whether only an engine keeps tensors for a layer's derivatives."
    # on one thread: processes are forked from the one that imports this
    used = torch.get_num_threads()
    torch.set_num_threads(1)
    out = layer(torch.ones(shape, requires_grad=True))
    torch.set_num_threads(used)
    todo, seen, own = [out.grad_fn], set(), False
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [parent for parent, _ in node.next_functions]
        if node.name() == "_ByEngineBackward":
            own = True
        elif any(
            isinstance(getattr(node, kept), Tensor)
            for kept in dir(node)
            if kept.startswith("_saved_")
        ):
            return False
    return own


def _tried(trial: Trial) -> Row:
    own = _by_kernel(trial.ours(), trial.shape)
    return Row(lambda o: trial.ours(**o), trial.theirs, trial.shape, own)


def layers() -> dict[str, Row]:
    """Every row of the table of layers, some of them with other settings, and
    the functional forms.
    """
    found = trials()
    number_of = Counter(t.name for t in found)
    of = {t.name: t for t in found}
    out = {
        str(t) if number_of[t.name] > 1 else t.name: _tried(t) for t in found
    }
    batch, layer = of["batch2"], of["layer"]
    for about, trial in {
        "batch2, no averages": batch.having(track_running_stats=False),
        "batch2, cumulative": batch.having(momentum=None),
        "batch2, safeguarded": batch.having(safeguard=True),
        "batch2, both transforms": batch.having(gaussianizer=Chain()),
        "layer, two steps": layer.having(steps=2),
        "layer, tails": layer.having(gaussianizer=Tail()),
        "layer over two axes": layer._replace(kind="B C", shape=(5, 3, 8)),
    }.items():
        out[about] = _tried(trial)
    for about, (trial, call) in {
        "batch, functional": (
            of["batch1"],
            _over_batch(functional.batch_normal_norm),
        ),
        "instance, functional": (
            of["instance1"],
            _over_batch(functional.instance_normal_norm),
        ),
        "layer, functional": (
            layer,
            lambda m, x, **o: functional.layer_normal_norm(
                x, m.weight.shape, m.weight, m.bias, **o
            ),
        ),
        "group, functional": (
            of["group"],
            lambda m, x, **o: functional.group_normal_norm(
                x, 2, m.weight, m.bias, **o
            ),
        ),
        "over axes": (
            layer,
            lambda m, x, **o: normality_norm(x, (-1,), m.weight, m.bias, **o)[
                0
            ],
        ),
    }.items():
        out[about] = Row(
            lambda o, trial=trial, call=call: Function(trial.ours(), call, o),
            trial.theirs,
            trial.shape,
        )
    return out


LAYERS = layers()
VARIANTS = {
    "plain": (PLAIN, True),
    "full": (dict(noise=0.0), True),
    "in evaluation": (dict(noise=0.0), False),
    "with noise": (dict(noise=0.3), True),
}


def made(row: Row, options: dict | None, training: bool) -> nn.Module:
    """A layer with weights and averages that are not neutral; PyTorch's for
    None.
    """
    layer = row.theirs() if options is None else row.ours(options)
    with torch.no_grad():
        for name, t in [*layer.named_parameters(), *layer.named_buffers()]:
            if t.is_floating_point() and name != "running_covariance":
                t.add_(
                    0.3
                    * torch.sin(torch.arange(1.0, t.numel() + 1).view(t.shape))
                )
                if name == "tau":  # a threshold apart from the bias
                    t.sub_(0.1)
    return layer.train(training)


def an_input(shape: tuple) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=draw).mul(0.7).exp()


# ---- one case ---------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What a run came to, "result" with what was `found`, "error" and
    "internal", one of PyTorch's own, with type and text, "not applicable"; and
    a comparison: "right", "refused", "known", "wrong".
    """

    word: str
    text: str = ""
    error: str = ""
    found: dict | None = None

    @property
    def raised(self) -> bool:
        return self.word in ("error", "internal")


def outcome(run: Callable, layer: nn.Module, x) -> Verdict:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(5)
            return Verdict("result", found=run(layer, x))
    except NotHere as error:
        return Verdict("not applicable", str(error))
    except Exception as error:
        text = " ".join(str(error).split())
        own = isinstance(error, EXPECTED_ERRORS)
        word = "error" if own and "INTERNAL ASSERT" not in text else "internal"
        return Verdict(word, text[:1500], type(error).__name__)


def theirs_in(name: str, variant: str, label: str) -> Verdict:
    "What PyTorch's layer does in a situation."
    row, situation = LAYERS[name], S[label]
    theirs = made(row, None, VARIANTS[variant][1])
    found = outcome(
        situation.run, theirs, situation.prepare(an_input(row.shape))
    )
    return Verdict(found.word, found.text, found.error)


def with_eps_of(given, layer: nn.Module) -> nn.Module:
    """A reference with the ε that a layer takes of the dtype that it is given,
    where it takes it from there.
    """
    if getattr(layer, "eps", 0.0) is None:
        wide = getattr(given, "dtype", None) is torch.float64
        layer.eps = torch.finfo(torch.float64 if wide else torch.float32).eps
    return layer


def expected_of(
    row: Row, variant: str, situation: Situation, run: Callable, x, given
) -> Verdict:
    """The result in float64: PyTorch's layer where the transform is off, the
    definition elsewhere.
    """
    options, training = VARIANTS[variant]
    if options == PLAIN and not situation.loud and not situation.definition:
        theirs = made(row, None, training).double()
        known = outcome(run, with_eps_of(given, theirs), x)
        if known.word == "result":
            return known
    single = isinstance(x, Tensor) and x.dtype == torch.float32
    ours = made(row, options, training)
    ours = ours.to(torch.float32 if single else torch.float64)
    with set_backend("eager"):
        return outcome(run, with_eps_of(given, ours), x)


def compared(
    ours: Verdict, row: Row, variant: str, situation: Situation, x
) -> Verdict:
    "What a result is worth, beside the one in float64."
    values = number(x)
    if situation.raises:
        return Verdict("wrong", "no error")
    if values is None:
        return Verdict("right")
    expected = expected_of(
        row,
        variant,
        situation,
        situation.run if situation.same else clean,
        values.float() if situation.single else values,
        x,
    )
    if expected.word != "result":
        text = f"a result where float64 gives {expected.error}: {expected.text}"
        return Verdict("wrong", text)
    known = {
        name: value
        for name, value in expected.found.items()
        if not name.startswith(situation.ignored)
    }
    wrong = difference(ours.found, known, situation.loud)
    return Verdict("wrong", wrong) if wrong else Verdict("right")


@lru_cache(maxsize=None)
def as_usual(row: Row, variant: str) -> Verdict:
    "What is expected outside any situation; of a process, asked once."
    x = an_input(row.shape)
    return expected_of(row, variant, Situation(), clean, x.double(), x)


def left_behind(row: Row, variant: str) -> str | None:
    "What is wrong with the next call, or None."
    x = an_input(row.shape)
    after = outcome(clean, made(row, *VARIANTS[variant]), x)
    if after.raised:
        return after.text
    return difference(after.found, as_usual(row, variant).found, False)


def tried(name: str, variant: str, label: str) -> Verdict:
    "Without PyTorch's layer, of which `judged` asks where this one has raised."
    row, situation = LAYERS[name], S[label]
    try:
        x = situation.prepare(an_input(row.shape))
    except EXPECTED_ERRORS as error:
        return Verdict("not applicable", str(error))
    verdict = outcome(situation.run, made(row, *VARIANTS[variant]), x)
    if verdict.word == "result":
        verdict = compared(verdict, row, variant, situation, x)
    if verdict.word != "wrong" and (left := left_behind(row, variant)):
        return Verdict("wrong", f"the next call: {left}")
    return verdict


def judged(
    case: Case, call: Callable = lambda function, *given: function(*given)
) -> Verdict:
    "The verdict on a case. `call`: how functions are called, in which process."
    name, variant, label = case
    ours = verdict = call(tried, *case)
    if ours.raised:
        theirs, said = call(theirs_in, *case), f"{ours.error}: {ours.text}"
        if ours.word == "internal":
            alike = (theirs.word, theirs.error) == (ours.word, ours.error)
            verdict = Verdict("refused" if alike else "wrong", said)
        elif theirs.word == "result":
            text = f"refused ({said}) where PyTorch's layer is not"
            verdict = Verdict("wrong", text)
        elif not re.search(S[label].words, said):
            verdict = Verdict("wrong", f"without {S[label].words}: {said}")
        else:
            verdict = Verdict("refused", said)
    if verdict.word == "wrong":
        where = f"{name}, {variant}"
        if any(known.fits(where, label, verdict.text) for known in KNOWN):
            return Verdict("known", verdict.text)
    return verdict


def applies(name: str, variant: str, label: str) -> bool:
    row, situation = LAYERS[name], S[label]
    return not (
        variant == "with noise"
        and situation.forwards > 1
        or not situation.composed
        and not row.own
        or any(known.fits(f"{name}, {variant}", label) for known in NOT_TRIED)
    )


# ---- processes --------------------------------------------------------------


def ready() -> None:
    "A process computes on one thread, by the kernel."
    torch.set_num_threads(1)
    native.available()


class Isolated:
    """Calls in one other process, and after a crash or a silence in the next
    one; both are wrong.
    """

    context = multiprocessing.get_context("forkserver")
    # what PyTorch imports late takes seconds, and each process would do it
    preload = [__name__, "torch._dynamo"]
    context.set_forkserver_preload(preload)

    def __enter__(self):
        self.pool = None
        return self

    def __call__(self, function: Callable, *arguments) -> Verdict:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, self.context, ready)
            pid = self.pool.submit(os.getpid).result()
            (self.process,) = (
                p for p in multiprocessing.active_children() if p.pid == pid
            )
        try:
            return self.pool.submit(function, *arguments).result(SECONDS)
        except TimeoutError:
            text = f"no answer after {SECONDS} s"
            self.process.kill()
        except BrokenProcessPool:
            # the pool's thread asks how the process ended; of two that ask at
            # once one may find nothing, which counts as 255
            self.pool.shutdown()
            code = self.process.exitcode
            text = f"crash, {signal.Signals(-code).name if code < 0 else code}"
        self.__exit__()
        return Verdict("wrong", text)

    def __exit__(self, *error) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        self.pool = None


def run_cases(cases: Iterable[Case], together: bool = False) -> dict:
    """Outcomes: numbers of what was right, refused, not applicable, known; and
    the failures by name.

    `together`: a process is not of one layer. Where a situation may have
    spoiled it, what goes wrong is judged again in a new one.
    """
    counts, failures = Counter(), {}
    group = lambda case: (
        "" if together else case[0],
        case[2] if S[case[2]].alone else "",
    )
    for _, some in groupby(sorted(cases, key=group), group):
        with Isolated() as call:
            for case in some:
                verdict = judged(case, call)
                if together and verdict.word == "wrong" and S[case[2]].alone:
                    with Isolated() as anew:
                        verdict = judged(case, anew)
                counts[verdict.word] += 1
                if verdict.word == "wrong":
                    failures[" · ".join(case)] = verdict.text
                    print(f"{' · '.join(case)}: {verdict.text}", flush=True)
    words = ("right", "refused", "not applicable", "known")
    return {
        "cases": counts.total(),
        **{word: counts[word] for word in words},
        "failures": failures,
    }


def table(every: bool = False) -> list[Case]:
    """Layers, variants and situations.

    `every`: all; otherwise each layer in every second situation, and in every
    sixth of those that take a process, with variants in turn.
    """
    out = []
    for i, name in enumerate(LAYERS):
        for j, label in enumerate(S):
            fitting = [v for v in VARIANTS if applies(name, v, label)]
            if every:
                out += [(name, v, label) for v in fitting]
            elif fitting and (i + j) % (6 if S[label].alone else 2) == 0:
                out.append((name, fitting[(i + j) % len(fitting)], label))
    return out
