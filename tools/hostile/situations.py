"""What is done to a layer and its input, each with what is to come out: kinds
of tensors, modes, saved-tensor hooks, freed memory, derivatives, parameters,
settings. What is known to differ stands in tables at the end.
"""

import contextlib
import copy
import functools
import io
import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from normalnorm.layers.backends import set_backend

# what PyTorch's layers raise, and ours
EXPECTED_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    NotImplementedError,
    IndexError,
)


class NotHere(Exception):
    "A layer lacks what a situation is about."


# ---- what a run leaves ------------------------------------------------------


def upstream(out: Tensor) -> Tensor:
    count = torch.arange(out.numel(), dtype=torch.float64, device="cpu")
    return torch.cos(count + 1).view(out.shape).to(out.dtype)


def leaf(x):
    learns = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().requires_grad_() if learns else x


def gathered(
    layer: nn.Module,
    x,
    out: Tensor,
    between: Callable = lambda layer, x, out: None,
    gradient: Callable = lambda grad: grad,
) -> dict:
    "Output, gradients and buffers."
    found, names = (
        {"output": out.detach().clone()},
        {"input": x, **dict(layer.named_parameters())},
    )
    wanted = {
        name: t
        for name, t in names.items()
        if isinstance(t, Tensor) and t.requires_grad
    }
    if out.requires_grad and wanted:
        between(layer, x, out)
        grads = torch.autograd.grad(
            out,
            list(wanted.values()),
            gradient(upstream(out)),
            allow_unused=True,
        )
        found |= {
            f"gradient of {name}": g.detach()
            for name, g in zip(wanted, grads)
            if g is not None
        }

    # a clone of memory that was freed or cut is a crash of PyTorch's own
    def whole(b):
        return (
            type(b) is not Tensor
            or b.is_meta
            or b.layout is not torch.strided
            or not b.is_contiguous()
            or b.untyped_storage().nbytes() >= b.nbytes
        )

    return found | {
        name: b.detach().clone()
        for name, b in layer.named_buffers()
        if whole(b)
    }


def number(x):
    "As float64, dense; None for what has no numbers."
    try:
        if not isinstance(x, Tensor) or (
            x.is_meta or x.is_complex() or isinstance(x, FakeTensor)
        ):
            return None
        x = x.detach()
        if x.is_quantized:
            x = x.dequantize()
        elif x.layout is not torch.strided:
            x = x.to_dense()
        return x.as_subclass(Tensor).resolve_neg().double().contiguous()
    except EXPECTED_ERRORS:
        return None


def tolerance(t: Tensor, name: str) -> float:
    half = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(t.dtype)
    return 2e-4 if half is None else half * (1 if name == "output" else 3)


def difference(found: dict, expected: dict, loud: bool) -> str | None:
    """What is wrong, or None.

    Errors are relative to the largest number of a tensor. `loud`: a NaN is no
    silent number, and float32 ends at its largest number.
    """
    widest = max(
        (found[name] for name in found if isinstance(found[name], Tensor)),
        key=lambda t: tolerance(t, "output"),
        default=None,
    )
    for name, b in expected.items():
        if name not in found:
            if name.startswith("gradient"):
                return f"no {name}"
            continue
        a, b = number(found[name]), number(b)
        if a is None or b is None:
            continue
        if a.shape != b.shape:
            return (
                f"{name} has the shape {tuple(a.shape)}, expected "
                f"{tuple(b.shape)}"
            )
        if not a.numel():
            continue
        if not loud and not a.isnan().equal(b.isnan()):
            return f"{name} has NaN in other places"
        both = ~a.isnan() & ~b.isnan()
        # what the float64 of the reference has beyond is infinite here
        wide = found[name].dtype == torch.float64 and not loud
        end = 1e300 if wide else 1e37
        if loud and found[name].dtype == torch.float16:
            end = 6e4
        a, b = a[both].clamp(-end, end), b[both].clamp(-end, end)
        if a.numel() and not (
            error := (a - b).abs().max() / max(b.abs().max().item(), 1e-3)
        ) <= tolerance(widest, name):
            return f"{name} is off by {error:.1e}"
    return None


# ---- situations -------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """What happens to a layer, its input and what lies between the passes.

    - `prepare`: what the input becomes; `remake`: what the layer becomes;
    - `before`, of both, ahead of the forward pass; `between`, of both and the
      output, ahead of the backward pass, whose gradient `gradient` changes;
    - `around`: a context of all that, `forward` of the forward pass alone;
    - `does`: something else instead, which gives what `gathered` gives.

    What comes out is compared with the same in float64, `same`, or else with an
    ordinary step on the values of `prepare(x)`, in float32 where `single`; but
    for what `ignored` names begin with. `loud`: NaN may stand for what float32
    cannot hold. `definition`: PyTorch's layer is no reference, as it is wrong
    here. `raises`: must not give a result. `words`: of the message where it is
    refused. `composed`: False for a broken hook or memory, which PyTorch's own
    operations do not notice.

    `alone`: in a process of its own, as it may spoil one; `forwards`: how often
    the layer draws noise.
    """

    does: Callable | None = None
    prepare: Callable = lambda x: x
    remake: Callable = lambda layer: layer
    before: Callable = lambda layer, x: None
    between: Callable = lambda layer, x, out: None
    gradient: Callable = lambda grad: grad
    around: Callable = contextlib.nullcontext
    forward: Callable = contextlib.nullcontext
    same: bool = False
    single: bool = False
    ignored: tuple[str, ...] = ()
    loud: bool = False
    definition: bool = False
    raises: bool = False
    words: str = ""
    composed: bool = True
    alone: bool = False
    forwards: int = 1

    def run(self, layer: nn.Module, x) -> dict:
        if self.does is not None:
            return self.does(layer, x)
        with self.around():
            layer, x = self.remake(layer), leaf(x)
            self.before(layer, x)
            with self.forward():
                out = layer(x)
            return gathered(layer, x, out, self.between, self.gradient)


clean = Situation().run
S: dict[str, Situation] = {}


# what a message says of an input that is refused
REFUSED = {
    "None": "NoneType.*make one",
    "list": "list.*make one",
    "NumPy": "ndarray.*make one",
    "complex": "complex64.*expects a real|expects a real.*complex64",
    "conjugate": "complex64",
    "sparse": "sparse_coo.*to_dense",
    "compressed sparse": "sparse_csr.*to_dense|axes|shape",
    "mkldnn": "mkldnn.*to_dense",
    "nested": "nested.*unbind",
    "nested, jagged": "nested.*unbind",
    "quantized": "quint8",
    **{
        kind: rf"torch\.{kind}.*\.float\(\)"
        for kind in (
            "int8 uint8 int16 int32 int64 bool float8_e4m3fn float8_e5m2"
        ).split()
    },
}


def _inputs(functions: dict, **how) -> None:
    for name, prepare in functions.items():
        S[f"input: {name}"] = Situation(
            prepare=prepare, words=REFUSED.get(name, ""), **how
        )


class Sub(Tensor):
    pass


class Wrapped(Tensor):
    "A subclass whose numbers are elsewhere."

    @staticmethod
    def __new__(cls, inner):
        out = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            requires_grad=inner.requires_grad,
        )
        out.inner = inner
        return out

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inside = tree_map(
            lambda t: t.inner if isinstance(t, cls) else t, (args, kwargs or {})
        )
        return tree_map(
            lambda t: cls(t) if type(t) is Tensor else t,
            func(*inside[0], **inside[1]),
        )


def _into(x: Tensor, big: Tensor) -> Tensor:
    return big.copy_(x)


def _misaligned(x: Tensor) -> Tensor:
    return (
        torch.frombuffer(
            bytearray(x.element_size() * x.numel() + 1), dtype=x.dtype, offset=1
        )
        .view(x.shape)
        .copy_(x)
    )


DTYPES: dict[str, Callable] = {
    str(dtype).removeprefix("torch."): lambda t, dtype=dtype: t.to(dtype)
    for dtype in (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}


def _with(value: float) -> Callable:
    def change(x):
        x = x.clone()
        x.view(-1)[x.numel() // 2] = value
        return x

    return change


_inputs(
    {
        "as it should be": lambda x: x,
        **DTYPES,
        "complex": lambda x: torch.complex(x, x),
        "conjugate": lambda x: torch.complex(x, x).conj(),
        "None": lambda x: None,
        "list": lambda x: x.tolist(),
        "NumPy": lambda x: x.numpy(),
    }
)
_inputs(
    {
        "channels last": lambda x: x.to(
            memory_format={
                4: torch.channels_last,
                5: torch.channels_last_3d,
            }.get(x.ndim, torch.contiguous_format)
        ),
        "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "transposed at the end": lambda x: x.mT.contiguous().mT,
        "channels last in float16": lambda x: (
            x.movedim(1, -1).contiguous().movedim(-1, 1).half()
        ),
        "expanded over the batch": lambda x: x[:1].expand_as(x),
        "expanded over the last axis": lambda x: x[..., :1].expand_as(x),
        "flipped": lambda x: x.flip(-1),
        "every second": lambda x: _into(
            x, torch.zeros(*x.shape[:-1], 2 * x.shape[-1])[..., ::2]
        ),
        "every third of the batch": lambda x: _into(
            x, torch.zeros(3 * x.shape[0], *x.shape[1:])[::3]
        ),
        "misaligned": _misaligned,
        "misaligned by one number": lambda x: _into(
            x, torch.zeros(x.numel() + 1)[1:].view(x.shape)
        ),
        "overlapping": lambda x: x.contiguous().as_strided(
            x.shape, (1,) * x.ndim
        ),
        "negated by a bit": lambda x: torch._neg_view(-x),
        "imaginary part of a conjugate": lambda x: (
            torch.complex(x, -x).conj().imag
        ),
        "real part": lambda x: torch.complex(x, x).real,
    },
    alone=True,
)
_inputs(
    {
        "sparse": lambda x: x.to_sparse(),
        "compressed sparse": lambda x: x.flatten(1).to_sparse_csr(),
        "mkldnn": lambda x: x.to_mkldnn(),
        "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
        "nested, jagged": lambda x: torch.nested.nested_tensor(
            [x[0], x[0]], layout=torch.jagged
        ),
        "quantized": lambda x: torch.quantize_per_tensor(
            x, 0.1, 0, torch.quint8
        ),
        "meta": lambda x: x.to("meta"),
        "fake": lambda x: FakeTensorMode().from_tensor(x),
        "functional": lambda x: torch._to_functional_tensor(x),
        "subclass": lambda x: x.as_subclass(Sub),
        "wrapper": Wrapped,
        "parameter": nn.Parameter,
    },
    alone=True,
)
_inputs(
    {
        "no image": lambda x: x[:0],
        "nothing in an image": lambda x: x[..., :0],
        "no channels": lambda x: x[:, :0],
    },
    # PyTorch's layers count an empty batch
    ignored=("num_batches_tracked",),
)
_inputs(
    {
        "one image": lambda x: x[:1],
        "one number an image": lambda x: x[..., :1],
        "one number": lambda x: x.flatten()[:1].view((1,) * x.ndim),
        "no axes": lambda x: x.flatten()[0],
        "flat": lambda x: x.flatten(),
        "twice the channels": lambda x: torch.cat([x, x], 1),
        "twice the end": lambda x: torch.cat([x, x], -1),
        "six axes": lambda x: x.view(*x.shape, *(1,) * (6 - x.ndim)),
        "constant": lambda x: torch.full_like(x, 2.5),
        "zero": torch.zeros_like,
    }
)
_inputs(
    {
        "NaN": _with(torch.nan),
        "infinite": _with(torch.inf),
        "minus infinity": _with(-torch.inf),
        "1e30": lambda x: x * 1e30,
        "1e-18": lambda x: x * 1e-18,
        "1e-30": lambda x: x * 1e-30,
        "subnormal": lambda x: x * 1e-42,
    },
    loud=True,
    single=True,  # beyond what float32 can square
)
_inputs(
    {
        "1e18": lambda x: x * 1e18,
        "an outlier": _with(1e4),
        "far from zero": lambda x: x + 1000,
        "1e30 in float16": lambda x: (x * 6e4).clamp(max=6.5e4).half(),
    },
    loud=True,
)


# modes
class Doubling(TorchFunctionMode):
    "In float64: an allocation of another size than was asked for."

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        allocates = func in (torch.empty, torch.empty_like, Tensor.new_empty)
        wide = allocates and out.dtype == torch.float32
        return out.double() if wide else out


@contextlib.contextmanager
def _switched(switch: Callable, on, off):
    switch(on)
    try:
        yield
    finally:
        switch(off)


def _default(dtype: torch.dtype):
    return _switched(torch.set_default_dtype, dtype, torch.get_default_dtype())


MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": lambda: _switched(
        torch.use_deterministic_algorithms, True, False
    ),
    "default float64": lambda: _default(torch.float64),
    "default float16": lambda: _default(torch.float16),
    "default device": lambda: _switched(torch.set_default_device, "cpu", None),
    "device meta": lambda: torch.device("meta"),
    "device cpu": lambda: torch.device("cpu"),
    "function mode": BaseTorchFunctionMode,
    "function mode that doubles": Doubling,
    "dispatch mode": BaseTorchDispatchMode,
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "counting operations": lambda: FlopCounterMode(display=False),
    "bfloat16 autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16 autocast": lambda: torch.autocast("cpu", torch.float16),
    "save on cpu": torch.autograd.graph.save_on_cpu,
    "no saved tensors": lambda: (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks")
    ),
    "eager": lambda: set_backend("eager"),
    "multithreading off": lambda: torch.autograd.set_multithreading_enabled(
        False
    ),
}


IGNORED = {
    "no_grad": ("gradient",),
    "inference": ("gradient",),
    "fake": ("running", "num"),
}
for _name, _mode in MODES.items():
    _how = dict(ignored=IGNORED.get(_name, ()), alone=True)
    S[f"mode: {_name}"] = Situation(around=_mode, **_how)
    S[f"mode, forward only: {_name}"] = Situation(forward=_mode, **_how)


# saved-tensor hooks
def _hooked(unpack: Callable, **how) -> Situation:
    return Situation(
        forward=lambda: torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach().clone(),
            lambda t: (
                unpack(t) if t.is_floating_point() and t.numel() > 1 else t
            ),
        ),
        alone=True,
        **how,
    )


def _cut(t: Tensor, size: float = 0.0) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(int(size * t.untyped_storage().nbytes()))
    return t


def _cut_in_place(t: Tensor) -> Tensor:
    t.untyped_storage().resize_(0)
    return t


def _inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


KEPT = {
    "as it was": lambda t: t,
    "through NumPy": lambda t: torch.from_numpy(t.numpy().copy()),
    "strides reversed": lambda t: (
        t.permute(*range(t.ndim)[::-1])
        .contiguous()
        .permute(*range(t.ndim)[::-1])
    ),
    "channels last": lambda t: (
        t.movedim(1, -1).contiguous().movedim(-1, 1) if t.ndim > 1 else t
    ),
    "every second": lambda t: _into(
        t, torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)[..., ::2]
    ),
    "with an offset": lambda t: _into(
        t, torch.zeros(t.numel() + 5, dtype=t.dtype)[5:].view(t.shape)
    ),
    "negated by a bit": lambda t: torch._neg_view(-t),
    "a parameter": nn.Parameter,
    "a subclass": lambda t: t.as_subclass(Sub),
    "a wrapper": Wrapped,
    "of inference": _inference,
    "misaligned": _misaligned,
    "with a gradient": lambda t: t.requires_grad_(),
}
BROKEN = {
    **{name: DTYPES[name] for name in ("float64", "bfloat16", "int64")},
    "the first number": lambda t: t.flatten()[:1],
    "flat": lambda t: t.flatten(),
    "fewer": lambda t: t[:-1],
    "nothing": lambda t: t[:0],
    "transposed": lambda t: t.transpose(0, -1),
    "one more axis": lambda t: t[None],
    "scalar": lambda t: t.sum(),
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "freed": _cut,
    "cut": lambda t: _cut(t, 0.5),
    "complex": lambda t: torch.complex(t, t),
    "None": lambda t: None,
}
# of another shape, dtype or device
OTHER = (
    "float64",
    "bfloat16",
    "the first number",
    "fewer",
    "nothing",
    "one more axis",
    "scalar",
    "meta",
)
for _name, _unpack in KEPT.items():
    S[f"hook: {_name}"] = _hooked(_unpack)
for _name, _unpack in BROKEN.items():
    S[f"broken hook: {_name}"] = _hooked(
        _unpack, composed=False, words="came back with.*hook" * (_name in OTHER)
    )


# freed memory
def _freed(which: str, share: float) -> Callable:
    def free(layer, x, out=None):
        named = (*layer.named_parameters(), *layer.named_buffers())
        t = dict(named, input=x).get(which)
        if t is None:
            raise NotHere(f"no {which}")
        storage = t.untyped_storage()
        storage.resize_(int(share * storage.nbytes()))

    return free


for _which in (
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "running_lambda",
    "running_covariance",
):
    for _how, _share in {"freed": 0.0, "cut": 0.5}.items():
        S[f"memory: {_which} {_how} before forward"] = Situation(
            before=_freed(_which, _share),
            raises=_which == "input",
            alone=True,
        )
        S[f"memory: {_which} {_how} before backward"] = Situation(
            between=_freed(_which, _share), alone=True, composed=False
        )
S["memory: gradient freed"] = Situation(
    gradient=_cut_in_place, raises=True, alone=True, composed=False
)


# derivatives and lives
def _run(name: str, **how) -> Callable:
    def keep(function):
        S[name] = Situation(function, **{"same": True, "forwards": 2, **how})
        return function

    return keep


@_run("double backward", forwards=1)
def _double(layer, x):
    x = leaf(x)
    out = layer(x)
    first = torch.autograd.grad(out, x, upstream(out), create_graph=True)[0]
    second = torch.autograd.grad(
        first.square().sum(), [x, layer.weight], allow_unused=True
    )
    return {
        "first": first.detach(),
        **{f"second {i}": g for i, g in enumerate(second) if g is not None},
    }


@_run("backward twice", forwards=1)
def _twice(layer, x):
    x = leaf(x)
    out = layer(x)
    for _ in range(2):
        out.backward(upstream(out), retain_graph=True)
    return {
        "output": out.detach(),
        "input": x.grad,
        "weight": layer.weight.grad,
        "bias": layer.bias.grad,
    }


def _functional(does: Callable, layer, x) -> dict:
    state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    call = lambda v: torch.func.functional_call(layer, state, (v,))
    return {"result": does(call, x).detach()}


for _name, _does in {
    "vmap": lambda call, x: torch.func.vmap(call, randomness="same")(
        torch.stack([x, 2 * x + x.square()])
    ),
    "torch.func.grad": lambda call, x: torch.func.grad(
        lambda v: (call(v) * upstream(v)).sum()
    )(x),
    "gradient under vmap": lambda call, x: torch.func.vmap(
        torch.func.grad(lambda v: call(v).atan().sum()), randomness="same"
    )(torch.stack([x, 2 * x])),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (torch.cos(x),))[1],
}.items():
    S[_name] = Situation(
        functools.partial(_functional, _does), same=True, forwards=2
    )


@_run("forward mode")
def _dual(layer, x):
    with forward_ad.dual_level():
        return {
            "tangent": forward_ad.unpack_dual(
                layer(forward_ad.make_dual(x, torch.cos(x)))
            )
            .tangent.detach()
            .clone()
        }


@_run("many gradients at once", forwards=1)
def _batched(layer, x):
    x = leaf(x)
    out = layer(x)
    return {
        "gradients": torch.autograd.grad(
            out,
            x,
            torch.stack([upstream(out), upstream(out).square()]),
            is_grads_batched=True,
        )[0]
    }


CHECKPOINTS = {
    "reentrant False": dict(use_reentrant=False),
    "reentrant True": dict(use_reentrant=True),
}
if hasattr(checkpoints, "create_selective_checkpoint_contexts"):  # since 2.5
    CHECKPOINTS["selective"] = dict(
        use_reentrant=False,
        context_fn=functools.partial(
            checkpoints.create_selective_checkpoint_contexts,
            [torch.ops.aten.mul.Tensor, torch.ops.aten.mm.default],
        ),
    )


def checkpointed(layer, x, how: dict) -> dict:
    """A step under a checkpoint, of a layer that has seen a few batches;
    gradients must be those of its copy without a checkpoint.
    """
    for shift in range(3):
        layer(1.5 * x.detach() + shift)
    found = []
    for one in (copy.deepcopy(layer), layer):
        with torch.random.fork_rng():
            v = leaf(x)
            out = checkpoint(one, v, **how) if one is layer else one(v)
        if out.requires_grad:  # reentrant: nothing but a whole backward
            out.backward(upstream(out))
        leaves = {"input": v, **dict(one.named_parameters())}
        found.append(
            {
                "output": out.detach(),
                **{
                    f"gradient of {name}": t.grad
                    for name, t in leaves.items()
                    if t.grad is not None
                },
            }
        )
    if wrong := difference(*found[::-1], False):
        raise AssertionError(f"with a checkpoint {wrong}")
    return found[1]


for _name, _how in CHECKPOINTS.items():
    S[f"checkpoint, {_name}"] = Situation(
        functools.partial(checkpointed, how=_how),
        same=True,
        ignored=("running", "num"),
        forwards=2,
    )


@_run("backward in another thread", same=False, forwards=1)
def _thread(layer, x):
    x = leaf(x)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(gathered, layer, x, layer(x)).result()


@_run("four threads", same=False, alone=True, forwards=1)
def _threads(layer, x):
    start = threading.Barrier(4)

    def work(layer):
        start.wait()
        return [clean(copy.deepcopy(layer), x.clone()) for _ in range(4)]

    with ThreadPoolExecutor(4) as pool:
        first, *others = sum(
            pool.map(work, map(copy.deepcopy, [layer] * 4)), []
        )
    for other in others:
        if wrong := difference(other, first, False):
            raise AssertionError(f"threads disagree: {wrong}")
    return first


S["two threads of the kernel"] = Situation(
    before=lambda layer, x: torch.set_num_threads(2), alone=True
)


def _doubled(t: Tensor) -> None:
    with torch.no_grad():
        t.mul_(2)


@_run("input changed before backward", forwards=1)
def _input_changed(layer, x):
    x = leaf(x) * 1  # in memory of its own
    out = layer(x)
    _doubled(x)
    return gathered(layer, x, out)


S["weight changed before backward"] = Situation(
    between=lambda layer, x, out: _doubled(layer.weight), same=True
)


@_run("result changed in place", forwards=1)
def _relu(layer, x):
    x = leaf(x)
    return gathered(layer, x, torch.relu_(layer(x)))


GRADIENTS = {
    "expanded": lambda g: g[:1].expand_as(g),
    "strides reversed": KEPT["strides reversed"],
    "channels last": KEPT["channels last"],
    "every second": KEPT["every second"],
    "negated by a bit": KEPT["negated by a bit"],
    "misaligned": lambda g: _misaligned(g) if g.dtype == torch.float32 else g,
    "a subclass": KEPT["a subclass"],
    "float64": DTYPES["float64"],
    "NaN": lambda g: torch.full_like(g, torch.nan),
    "wrong shape": lambda g: g[:1],
    "meta": BROKEN["meta"],
    "sparse": BROKEN["sparse"],
}


for _name, _change in GRADIENTS.items():
    S[f"gradient: {_name}"] = Situation(
        gradient=_change,
        same=_name not in ("wrong shape", "meta", "sparse"),
        alone=True,
    )


def _learning(layer, x, names: tuple[str, ...]) -> None:
    for name, t in {"input": x, **dict(layer.named_parameters())}.items():
        t.requires_grad_(name in names)


for _names in (
    (),
    ("input",),
    ("weight",),
    ("bias",),
    ("input", "bias"),
    ("weight", "bias"),
    ("input", "weight"),
):
    S[f"learns: {', '.join(_names) or 'nothing'}"] = Situation(
        before=functools.partial(_learning, names=_names), same=True
    )


PARAMETERS = {
    "float64": DTYPES["float64"],
    "bfloat16": DTYPES["bfloat16"],
    "strided": KEPT["every second"],
    "expanded": lambda t: t.flatten()[:1].expand(t.numel()).view(t.shape),
    "overlapping": lambda t: t.as_strided(t.shape, (0,) * t.ndim),
    "fewer": lambda t: t[:1].clone(),
    "more": lambda t: torch.cat([t, t]),
    "one more axis": lambda t: t[None].clone(),
    "int64": DTYPES["int64"],
    "meta": BROKEN["meta"],
    "sparse": BROKEN["sparse"],
    "subclass": KEPT["a subclass"],
    "negated by a bit": KEPT["negated by a bit"],
    "of inference": _inference,
    "misaligned": _misaligned,
    "complex": BROKEN["complex"],
}


def _parameter(layer, x, which: str, change: Callable) -> None:
    where = layer._parameters if which in layer._parameters else layer._buffers
    if where.get(which) is None:
        raise NotHere(f"no {which}")
    t = where[which] = change(where[which].detach())
    if (
        where is layer._parameters
        and t.is_floating_point()
        and not t.is_inference()
        and t.is_leaf
    ):
        t.requires_grad_()


for _which in (
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "running_lambda",
):
    for _name, _change in PARAMETERS.items():
        _shared_memory = _name in ("expanded", "overlapping")
        S[f"{_which}: {_name}"] = Situation(
            before=functools.partial(_parameter, which=_which, change=_change),
            same=_shared_memory,
            words={"int64": "int64.*real", "complex": "complex64.*real"}.get(
                _name, ""
            ),
            alone=True,
            definition=_shared_memory,
        )


def _loaded(layer):
    file, twin = io.BytesIO(), copy.deepcopy(layer)
    torch.save(layer.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    return twin


S["weight is bias"] = Situation(
    before=lambda layer, x: setattr(layer, "bias", layer.weight), same=True
)
S["deepcopy between the passes"] = Situation(
    between=lambda layer, x, out: copy.deepcopy(layer)(x.detach()), forwards=2
)
S["saved and loaded"] = Situation(remake=_loaded)
S["pickled"] = Situation(remake=lambda layer: pickle.loads(pickle.dumps(layer)))
S["in shared memory"] = Situation(
    prepare=lambda x: x.clone().share_memory_(), remake=nn.Module.share_memory
)


@_run("called three times")
def _thrice(layer, x):
    x = leaf(x)
    return gathered(layer, x, sum(layer(v) for v in (x, 2 * x + 1, x.square())))


@_run("an input as its own weight", forwards=1)
def _own(layer, x):
    if x.shape[-1:] == layer.weight.shape:
        x = layer.weight.detach().expand(x.shape)
    return clean(layer, x)


def _setting(layer, x, name: str, value) -> None:
    if hasattr(layer, name):
        setattr(layer, name, value)


def _moving_eps(layer, x):
    if hasattr(layer, "eps"):
        eps = torch.tensor(1e-5, dtype=torch.float64)
        layer.eps = eps
        layer(x)
        layer.eps = eps.fill_(2.0)  # ours take the value when they are told


S["ε: a tensor that changes"] = Situation(
    before=_moving_eps, same=True, forwards=2
)
for _name, _value in {
    "0": 0.0,
    "an integer": 1,
    "huge": 1e30,
    "np.float32": np.float32(1e-3),
    "np.float64": np.float64(1e-3),
    "a tensor": torch.tensor(1e-3),
    "negative": -1.0,
    "NaN": float("nan"),
    "text": "1e-5",
    "None": None,
    "an array": np.array(1e-3),
    "a vector": torch.ones(3),
    "complex": 1j,
    "a tensor with gradient": torch.tensor(1e-3, requires_grad=True),
}.items():
    S[f"ε: {_name}"] = Situation(
        before=functools.partial(_setting, name="eps", value=_value),
        same=_name
        in ("0", "an integer", "huge", "np.float32", "np.float64", "a tensor"),
    )
for _name, _value in {
    "None": None,
    "0": 0.0,
    "1": 1.0,
    "np.float32": np.float32(0.1),
    "a tensor": torch.tensor(0.1),
}.items():
    S[f"momentum: {_name}"] = Situation(
        before=functools.partial(_setting, name="momentum", value=_value),
        same=True,
    )

# ---- what is known -----------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """Layers in their variants, "batch2, in evaluation", and situations that
    these expressions find are left out or, with a message, may differ.
    """

    layer: str
    situation: str
    says: str = ""

    def fits(self, layer: str, situation: str, says: str = "") -> bool:
        return all(
            re.search(*pair)
            for pair in (
                (self.layer, layer),
                (self.situation, situation),
                (self.says, says),
            )
        )


NOT_TRIED = [
    # no attributes
    Known("functional|over axes", "^(ε|momentum)"),
    # a weight (1, 8), or (1,), is one that broadcasts
    Known("over axes", "^(weight|bias): (one more axis|fewer)"),
    # the plain layer has none
    Known(", plain.*, ", "^running_lambda"),
    # a constant one, of which whitening and centring leave rounding only
    Known("decorrelated|^batch1 B C, plain", "^gradient: expanded"),
    # the order of seeds is not determined
    Known("with noise", "^four threads"),
    # made of a lambda
    Known("functional|over axes", "^pickled"),
    # without averages it is what it is in training
    Known("^(?!.*(batch|averag)).*in evaluation", "^(?!mode|ε)"),
]
# refused where PyTorch's layer is right, or different from float64
KNOWN = [
    # those over the last axes take its parts, but no gradient is made here as
    # for others; the function of batches leaves it to PyTorch to refuse
    Known(
        "layer|rms|over axes|batch, functional",
        "input: nested",
        "NestedTensorImpl|concrete integers|last axes must",
    ),
    # taken, but PyTorch has no gradient of it
    Known("^batch|^sync", "input: mkldnn", "layout Mkldnn"),
    # a wrong number of channels is refused, of an empty input too
    Known("", "input: no channels", "channels"),
    # of (N, C, 0) nothing is left but a wrong number of channels, as above
    Known("decorrelated1", "nothing in an image", "channels"),
    # of no elements PyTorch's layer gives a gradient of NaN, ours 0
    Known("group", "nothing in an image", "has NaN in other places"),
    # what comes back must be what was saved; PyTorch's layer takes the data
    Known("group", "broken hook: one more axis", "came back with shape"),
    # a complex average is refused; PyTorch's layer drops a part of it
    Known("instance", "complex", "a real floating-point tensor is expected"),
    # running averages that are no functional tensors cannot be written: an
    # assertion of PyTorch's
    Known("", "input: functional", "RegisterFunctionalization"),
    # an integer average is refused; PyTorch's layer reads and rounds it
    Known("", "int64", "a real floating-point tensor is expected"),
    # an average of another shape is refused, with what is given and what is
    # expected
    Known("", "one more axis", r"expected \(4,\)"),
    # ε = NaN is refused, with what was given and what is expected
    Known("", "ε: NaN", "must not be negative"),
    # running averages cannot be written under torch.func; PyTorch's fused layer
    # writes them unseen
    Known("", "torch.func.grad|jvp", "would mutate a captured Tensor"),
    # PyTorch's layer works on a copy of the weight
    Known(
        "instance",
        "weight changed before backward",
        "modified by an inplace operation",
    ),
    # the squares of a unit are summed in its own precision, as timm's
    Known("frn", "input: 1e18", "gradient of tau"),
    # PyTorch does not say within vmap how a tensor lies
    Known("layer2|decorrelated", "vmap", "is_contiguous inside of vmap"),
    # PyTorch's products of matrices take half precision in a backward pass that
    # runs inside autocast, which PyTorch advises against
    Known("decorrelated", "autocast", "gradient of"),
    # PyTorch's layer reads beyond the end of a storage that was cut
    Known("", "hook: cut", "the memory of a tensor"),
    # the definition needs the bias for second derivatives, so it is saved;
    # PyTorch says what to do
    Known("", "of inference", "Inference tensors cannot be saved"),
    # a tensor made in inference mode asks for none
    Known("", "bias: of inference", "no gradient of bias"),
    # as above; what is saved is its product with r
    Known("renorm", "weight: of inference", "no gradient of weight"),
    # PyTorch's layer reads beyond the end of a storage that was cut, or does
    # not need the tensor
    Known("", "memory:", "the memory of a tensor"),
    # averages whose elements share their memory cannot be written; PyTorch's
    # layer writes them all the same
    Known("", "expanded|overlapping", "single memory location"),
    # a negative ε is refused
    Known("", "ε: negative", "must not be negative"),
    # an empty input with another number of channels is refused
    Known("batch", "nothing in an image", "given 0 on axis 1"),
    # of issue 16: where float16 saturates, the gradient is 0
    Known("propagated", "1e30 in float16", "gradient of input is off"),
    # of issue 16: where float16 saturates, the definition's gradient is 0 and
    # the kernel's is not
    Known(
        "safeguarded, in evaluation",
        "1e30 in float16",
        "gradient of input is off",
    ),
]
