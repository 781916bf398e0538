"""Every normality layer × mode × dtype × shape × property.

The layers are those of the library's table whose plain twin is PyTorch's.

The reference is NumPy and SciPy in float64, written here from Algorithm 1 and
the formulas of the paper's Appendix D; it imports nothing of the library.
"""

import copy
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from torch import nn

from normalnorm.layers.functional import batch_normal_norm, layer_normal_norm
from normalnorm.layers.normality import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    GroupNormalNorm,
    InstanceNormalNorm2d,
    LayerNormalNorm,
)
from normalnorm.layers.sync import SyncBatchNormalNorm
from tests.peers import VECTORS
from tools.rows import Trial, accepted, trials


@dataclass(frozen=True)
class Row:
    """A layer, PyTorch's plain one, an input shape of prime sizes, and which
    elements are normalized together.

    `units`: array → (units, elements of one), a permutation of the array;
    `channels`: the parameters belong to axis 1, otherwise to the last axes.
    `single`: whether one value may be a unit.
    """

    ours: Callable[..., nn.Module]
    plain: Callable[..., nn.Module]
    shape: tuple[int, ...]
    units: Callable[[np.ndarray], np.ndarray]
    channels: bool = True
    running: bool = False
    affine: str = "affine"
    single: bool = False
    options: dict = field(default_factory=dict)

    def make(self, **options) -> nn.Module:
        return self.ours(**{**self.options, **options})

    def make_plain(self, bias=True, **options) -> nn.Module:
        layer = self.plain(**{**self.options, **options})
        if not bias:
            layer.bias = None  # torch 2.4 has no such argument
        return layer

    def rows(
        self, u: np.ndarray
    ) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        "The units as rows, and the way back."
        where = self.units(np.arange(u.size).reshape(u.shape))

        def back(rows):
            out = np.empty(u.size, rows.dtype)
            out[where.ravel()] = rows.ravel()
            return out.reshape(u.shape)

        return u.ravel()[where], back

    def affine_shape(self, layer, ndim):
        return (
            (1, -1, *(1,) * (ndim - 2)) if self.channels else layer.weight.shape
        )


def per_channel(u):
    return np.moveaxis(u, 1, 0).reshape(u.shape[1], -1)


def per_instance(u):
    return u.reshape(u.shape[0] * u.shape[1], -1)


def per_group(u):
    return u.reshape(u.shape[0] * 2, -1)


def per_sample(axes):
    return lambda u: u.reshape(-1, math.prod(u.shape[-axes:]))


def per_position(u):
    return np.moveaxis(u, 1, -1).reshape(-1, u.shape[1])


UNITS = {
    "C": per_channel,
    "B C": per_instance,
    "B G": per_group,
    "B …": per_sample(1),
    "B H W": per_position,
}
SIZES = {"B": 3, "L": 11, "D": 2, "H": 5, "W": 7}


def prime(trial: Trial) -> Trial:
    "With few channels, or many where they make a unit, or two groups of them."
    size = (
        SIZES
        | {"C": {"B …": 13, "B H W": 13, "B G": 6}.get(trial.row.unit, 3)}
        | ({"B": 11} if trial.kind == "B C" else {})
    )
    return trial._replace(
        shape=tuple(size[letter] for letter in trial.kind.split())
    )


def tried(trial: Trial) -> Row:
    "A layer of the table; its axes and units in letters."
    known = accepted(trial.row.layer)
    within = trial.row.unit in ("B …", "B H W")
    return Row(
        trial.ours,
        trial.theirs,
        trial.shape,
        UNITS[trial.row.unit],
        channels=not trial.kind.endswith("C")
        or trial.kind == "B C"
        and not within,
        running="track_running_stats" in known,
        affine="affine" if "affine" in known else "elementwise_affine",
        single=within,
    )


def layer(sizes, shape):
    return Row(
        lambda **o: LayerNormalNorm(sizes, **o),
        lambda **o: nn.LayerNorm(sizes, **o),
        shape,
        per_sample(len(sizes)),
        channels=False,
        affine="elementwise_affine",
        single=True,
    )


# synchronized: one process; several: chapter 245, test_sync_decorrelated.py,
# test_fsdp.py
TRIALS = {
    f"{t.name} {t.kind}": prime(t)
    for t in trials()
    if isinstance(t.row.plain, type)
    and t.row.centre is None
    and t.row.plain.__module__.startswith("torch.nn")
}
TRIALS["group B C"] = TRIALS["group B C H W"]._replace(
    kind="B C", shape=(5, 22)
)
LAYERS = {name: tried(trial) for name, trial in TRIALS.items()}
LAYERS["layer3"] = layer((3, 5, 2), (7, 3, 5, 2))
MODES = {
    "default": {},
    "momentum None": dict(momentum=None),
    "no running averages": dict(track_running_stats=False),
    "no affine map": dict(affine=False),
    "no bias": dict(bias=False),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def options_of(row: Row, mode: str) -> dict | None:
    "The arguments of a mode for a row, None where it has no such mode."
    options = dict(MODES[mode])
    if (
        "momentum" in options or "track_running_stats" in options
    ) and not row.running:
        return None
    return {row.affine: options["affine"]} if "affine" in options else options


CASES = [
    pytest.param(
        LAYERS[name], options_of(LAYERS[name], mode), id=f"{name}-{mode}"
    )
    for name in LAYERS
    for mode in MODES
    if options_of(LAYERS[name], mode) is not None
]
every_layer = pytest.mark.parametrize("row", LAYERS.values(), ids=LAYERS)
every_case = pytest.mark.parametrize("row, options", CASES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


def skewed(shape, dtype=torch.float64, seed=0):
    """Log-normal values, the first ones small, as activations of a trained
    network are not symmetric either.
    """
    return (
        torch.randn(
            shape,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
        .exp()
        .to(dtype)
    )


def set_affine(*layers):
    "The same weights, away from 1 and 0."
    for module in layers:
        for i, parameter in enumerate(module.parameters()):
            with torch.no_grad():
                parameter.copy_(
                    torch.linspace(0.5, 1.5, parameter.numel()).reshape(
                        parameter.shape
                    )
                    - i
                )


# ---------------------------------------------------------------- the reference


def newton(k: np.ndarray) -> float:
    """1 − L'(1)/L''(1) for a standardized sample, in the long form of Appendix
    D.
    """
    a, s = np.abs(k), np.where(k < 0, -1.0, 1.0)
    ell = np.log1p(a)
    d = (1 + a) * ell - a
    d2 = s * ((1 + a) * ell**2 - 2 * d)
    first = np.mean(k * d) - np.mean(s * ell)
    second = (
        np.mean(k * d2) + np.mean((d - d.mean()) ** 2) - 2 * np.mean(k * d) ** 2
    )
    return 1 - first / second


def algorithm_1(rows, eps=1e-5, alpha=1.0, given=None):
    """Units in rows: transformed values, means, biased variances, λ̂ (estimated
    without ε).

    `given`: such statistics instead.
    """
    if given is None:
        mean, var = rows.mean(1), rows.var(1)
        lmbda = np.array(
            [
                1 + alpha * (newton((r - m) / v**0.5) - 1) if v > 0 else 1.0
                for r, m, v in zip(rows, mean, var)
            ]
        )
    else:
        mean, var, lmbda = given
    h = (rows - mean[:, None]) / np.sqrt(var + eps)[:, None]
    x = (
        np.stack(
            [
                scipy.stats.yeojohnson(r, l) if l != 1 else r
                for r, l in zip(h, lmbda)
            ]
        )
        if rows.size
        else h
    )
    return x, mean, var, lmbda


def reference(row, module, u, given=None, eps=1e-5, alpha=1.0):
    """Output of a layer in float64, with its parameters, and the statistics of
    each unit.
    """
    rows, back = row.rows(u.detach().double().numpy())
    x, *statistics = algorithm_1(rows, eps, alpha, given)
    out = back(x)
    for parameter, apply in (
        (module.weight, np.multiply),
        (module.bias, np.add),
    ):
        if parameter is not None:
            out = apply(
                out,
                parameter.detach()
                .double()
                .numpy()
                .reshape(row.affine_shape(module, u.ndim)),
            )
    return torch.from_numpy(out), statistics


def channel_means(row, u, values):
    "Per-unit values averaged over the images, one per channel."
    return (
        values
        if row.units is per_channel
        else values.reshape(u.shape[0], -1).mean(0)
    )


def test_the_reference_itself():
    "Its Newton step against second differences of SciPy's likelihood."
    k = np.exp(np.random.default_rng(0).standard_normal(50))
    k = (k - k.mean()) / k.std()
    e = 1e-4
    low, mid, high = (
        -scipy.stats.yeojohnson_llf(1 + t, k) / 50 for t in (-e, 0, e)
    )
    assert (
        abs(
            newton(k)
            - (1 - (high - low) / (2 * e) / ((high - 2 * mid + low) / e**2))
        )
        < 1e-5
    )


# ---------------------------------------------------------------- equal to
# torch, equal to the reference


@every_dtype
@every_case
def test_without_transform_and_noise_it_is_torch(row, options, dtype):
    "Outputs, gradients, buffers: two training steps, one evaluation."
    tolerance = {
        torch.float64: 1e-10,
        torch.float32: 1e-5,
        torch.bfloat16: 3e-2,
        torch.float16: 4e-3,
    }[dtype]
    ours, plain = (
        row.make(noise=0.0, alpha=0.0, **options).to(dtype),
        row.make_plain(**options).to(dtype),
    )
    set_affine(ours, plain)
    for i, training in enumerate((True, True, False)):
        u, g = (
            3 * skewed(row.shape, dtype, i) - 1,
            torch.randn(row.shape).to(dtype),
        )
        found = []
        for module in (ours, plain):
            module.train(training).zero_grad()
            x = u.clone().requires_grad_()
            out = module(x)
            out.backward(g)
            found.append(
                [out.detach(), x.grad, *(p.grad for p in module.parameters())]
            )
        for a, b in zip(*found):
            torch.testing.assert_close(
                a,
                b,
                rtol=tolerance,
                atol=tolerance * max(1.0, b.abs().max().item()),
            )
    for name, value in plain.named_buffers():
        torch.testing.assert_close(
            ours.get_buffer(name), value, rtol=tolerance, atol=tolerance
        )


@every_case
def test_it_is_algorithm_1(row, options):
    "Training, the running averages that it leaves, and evaluation with them."
    module = row.make(noise=0.0, dtype=torch.float64, **options)
    set_affine(module)
    momenta = (0.1, 0.1, 0.1)
    # cumulative for batches, none for instances, as PyTorch has it
    if "momentum" in options:
        momenta = (
            (1.0, 1 / 2, 1 / 3) if row.units is per_channel else (0.0, 0.0, 0.0)
        )
    running = [
        np.zeros(row.shape[1]),
        np.ones(row.shape[1]),
        np.ones(row.shape[1]),
    ]
    for step, momentum in enumerate(momenta):
        u = skewed(row.shape, seed=step)
        expected, (mean, var, lmbda) = reference(row, module, u)
        torch.testing.assert_close(
            module.train()(u), expected, rtol=1e-9, atol=1e-10
        )
        count = row.rows(u.numpy())[0].shape[1]
        for i, value in enumerate((mean, var * count / (count - 1), lmbda)):
            if row.running:
                running[i] = running[i] + momentum * (
                    channel_means(row, u, value) - running[i]
                )
    tracked = row.running and options.get("track_running_stats", True)
    if tracked:
        for name, value in zip(
            ("running_mean", "running_var", "running_lambda"), running
        ):
            torch.testing.assert_close(
                module.get_buffer(name),
                torch.from_numpy(value),
                rtol=1e-9,
                atol=1e-10,
            )
        repeats = 1 if row.units is per_channel else u.shape[0]
        running = [np.tile(value, repeats) for value in running]
    expected, _ = reference(row, module, u, running if tracked else None)
    torch.testing.assert_close(
        module.eval()(u), expected, rtol=1e-9, atol=1e-10
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_is_algorithm_1_for_drawn_shapes_and_values(data):
    """Sizes from 1, values with ties, outliers, all scales; part of the way;
    any ε.
    """
    name = data.draw(st.sampled_from(sorted(LAYERS)))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=4, max_size=4))
    row = resized(name, sizes)
    eps, alpha = (
        data.draw(st.sampled_from([1e-5, 1e-3, 1.0])),
        data.draw(st.sampled_from([1.0, 0.5])),
    )
    scale, shift = (
        10.0 ** data.draw(st.integers(-6, 6)),
        data.draw(st.floats(-3, 3)),
    )
    count = math.prod(row.shape)
    values = data.draw(
        st.lists(
            st.one_of(
                st.integers(-3, 3).map(float), st.floats(-100, 100, width=16)
            ),
            min_size=count,
            max_size=count,
        )
    )
    u = scale * (
        torch.tensor(values, dtype=torch.float64).reshape(row.shape) + shift
    )
    module = row.make(noise=0.0, eps=eps, alpha=alpha, dtype=torch.float64)
    rows, _ = row.rows(u.numpy())
    if rows.shape[1] == 1 and not row.single:
        with pytest.raises(ValueError, match="more than one value"):
            module(u)
        return
    deviations = np.ptp(rows, axis=1)
    if ((deviations > 0) & (deviations < 1e-9 * np.abs(rows).max(1))).any():
        return  # the mean's rounding, not the unit, decides
    expected, _ = reference(row, module, u, eps=eps, alpha=alpha)
    torch.testing.assert_close(module(u), expected, rtol=1e-6, atol=1e-7)


def resized(name, sizes):
    "The row with other sizes."
    b, c, n, m = sizes
    if name == "layer3":
        return layer(tuple(sizes[1:]), tuple(sizes))
    trial, (b, c, n, m) = TRIALS[name], sizes
    size = dict(
        B=b, C=2 * c if "G" in trial.row.unit else c, L=n, H=n, W=m, D=2
    )
    return tried(
        trial._replace(
            shape=tuple(size[letter] for letter in trial.kind.split())
        )
    )


def test_every_row_can_be_resized():
    assert all(
        len(resized(name, (2, 3, 2, 3)).shape) == len(row.shape)
        for name, row in LAYERS.items()
    )


# ---------------------------------------------------------------- identities


def quiet(row, **options):
    return row.make(
        **{"noise": 0.0, "eps": 0.0, "dtype": torch.float64, **options}
    )


@every_layer
def test_elements_of_a_unit_may_be_permuted(row):
    u = skewed(row.shape)
    rows, back = row.rows(u.numpy())
    # another one for each unit
    order = np.argsort(np.random.default_rng(1).random(rows.shape), axis=1)
    module = row.make(noise=0.0, dtype=torch.float64, **{row.affine: False})
    out = row.rows(module(u).numpy())[0]
    permuted = module(
        torch.from_numpy(back(np.take_along_axis(rows, order, 1)))
    )
    torch.testing.assert_close(
        permuted,
        torch.from_numpy(back(np.take_along_axis(out, order, 1))),
        rtol=1e-10,
        atol=1e-11,
    )


@every_layer
def test_shift_scale_reflection(row):
    u, module = skewed(row.shape), quiet(row)
    out = module(u)
    torch.testing.assert_close(module(u + 7), out, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(module(3e-3 * u), out, rtol=1e-9, atol=1e-9)
    # weight 1, bias 0
    torch.testing.assert_close(module(-u), -out, rtol=1e-9, atol=1e-9)
    if row.running:  # λ̂(−u) = 2 − λ̂(u)
        found = []
        for sign in (1, -1):
            fresh = quiet(row, momentum=1.0)
            fresh(sign * u)
            found.append(fresh.running_lambda)
        torch.testing.assert_close(
            found[1], 2 - found[0], rtol=1e-10, atol=1e-10
        )
        assert (found[0] - 1).abs().min() > 0.01


@every_layer
def test_scale_and_eps_go_together(row):
    """The layer of cu with ε is that of u with ε/c², exactly; hence scale
    invariance up to O(ε/σ²).
    """
    u, eps = skewed(row.shape), 1e-5
    for c in (1e-3, 30.0):
        torch.testing.assert_close(
            quiet(row, eps=eps)(c * u),
            quiet(row, eps=eps / c**2)(u),
            rtol=1e-9,
            atol=1e-9,
        )
    smallest = row.rows(u.numpy())[0].var(1).min()
    exact, close = quiet(row)(u), quiet(row, eps=eps)(u)
    slope = (2 + exact.abs().max()) ** 5  # ψ' ≤ (1+|h|)^|λ−1|, |λ−1| ≤ 4 here
    assert 0 < (exact - close).abs().max() < eps / smallest * slope


def test_relations_between_the_layers():
    """Group with one group is layer over (C, H, W) before the affine map; with
    C groups it is instance; one image: batch is instance; sync alone is batch.
    """
    u, plain = skewed((3, 6, 5, 7)), dict(noise=0.0, dtype=torch.float64)
    same = lambda a, b, x=u: torch.testing.assert_close(
        a(x), b(x), rtol=1e-11, atol=1e-12
    )
    same(
        GroupNormalNorm(1, 6, affine=False, **plain),
        LayerNormalNorm((6, 5, 7), elementwise_affine=False, **plain),
    )
    same(GroupNormalNorm(6, 6, **plain), InstanceNormalNorm2d(6, **plain))
    same(BatchNormalNorm2d(6, **plain), InstanceNormalNorm2d(6, **plain), u[:1])
    same(SyncBatchNormalNorm(6, **plain), BatchNormalNorm2d(6, **plain))
    torch.testing.assert_close(
        BatchNormalNorm1d(6, **plain)(u.flatten(2)),
        BatchNormalNorm2d(6, **plain)(u).flatten(2),
    )
    torch.testing.assert_close(
        BatchNormalNorm1d(5, **plain)(u[0, :, :, 0]),
        LayerNormalNorm(6, **plain)(u[0, :, :, 0].T).T,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@every_layer
def test_at_lambda_1_it_is_the_plain_layer(row, dtype):
    """Evaluation with λ = 1, up to 1e6 deviations out; in training, to
    rounding, units symmetric about 0.
    """
    plain, module = (
        row.make(noise=0.0, alpha=0.0).to(dtype),
        row.make(noise=0.0).to(dtype),
    )
    set_affine(plain, module)
    count = row.rows(np.zeros(row.shape))[0].shape[1]
    pattern = np.resize([1.0, -1.0, 2.0, -2.0], count // 4 * 4)
    rows, back = row.rows(np.zeros(row.shape))
    u = torch.from_numpy(
        back(
            np.tile(np.pad(pattern, (0, count - len(pattern))), (len(rows), 1))
        )
    ).to(dtype)
    torch.testing.assert_close(
        module(u),
        plain(u),
        rtol=0,
        atol=1e-15 if dtype == torch.float64 else 5e-7,
    )
    if row.running:
        with torch.no_grad():
            module.running_lambda.fill_(1)
            for name in ("running_mean", "running_var"):
                getattr(plain, name).copy_(getattr(module, name))
        for scale in (1.0, 1e3, 1e6):
            v = (scale * skewed(row.shape)).clamp(max=6e4).to(dtype)
            assert torch.equal(module.eval()(v), plain.eval()(v))


@every_layer
def test_far_outside_the_training_range(row):
    """Evaluation 1e6 deviations out: ψ, and nothing else; it grows like the
    power η (chapter 210).
    """
    if not row.running:
        return
    for lmbda in (-3.0, 0.0, 0.5, 2.0, 3.0, 5.0):
        module = row.make(affine=False, eps=0.0, dtype=torch.float64).eval()
        module.running_lambda.fill_(lmbda)
        u = 1e6 * torch.randn(row.shape, dtype=torch.float64)
        expected = torch.from_numpy(
            np.reshape(
                [
                    scipy.stats.yeojohnson(np.array([v]), lmbda)[0]
                    for v in u.flatten().tolist()
                ],
                row.shape,
            )
        )
        torch.testing.assert_close(module(u), expected, rtol=1e-12, atol=1e-12)
        single = row.make(affine=False, eps=0.0).eval()
        single.running_lambda.fill_(lmbda)
        torch.testing.assert_close(
            single(u.float()).double(), expected, rtol=1e-4, atol=1e-5
        )


@every_layer
def test_no_scale_makes_a_unit_run_away(row):
    """The ε trap: from scales far below ε to far above it λ̂ does not move, the
    output goes to h, the gradient stays below a constant over √ε.
    """
    u, g = skewed(row.shape), torch.randn(row.shape, dtype=torch.float64)
    lambdas, norms = [], []
    for scale in 10.0 ** np.arange(-12, 4, 2):
        module = row.make(
            noise=0.0,
            dtype=torch.float64,
            **(dict(momentum=1.0) if row.running else {}),
        )
        x = (scale * u).requires_grad_()
        out = module(x)
        norms.append(torch.autograd.grad(out, x, g)[0].norm().item())
        if row.running:
            lambdas.append(module.running_lambda)
        if scale < 1e-6:
            torch.testing.assert_close(
                out,
                row.make(noise=0.0, alpha=0.0, dtype=torch.float64)(x),
                rtol=1e-2,
                atol=1e-12,
            )
    for lmbda in lambdas:
        torch.testing.assert_close(lmbda, lambdas[-1], rtol=1e-6, atol=1e-8)
    assert max(norms) <= 3 * g.norm().item() / 1e-5**0.5


# ---------------------------------------------------------------- gradients,
# memory


@pytest.mark.parametrize("training", (True, False))
@every_layer
def test_gradients(row, training):
    "In training through the statistics, in evaluation with λ ≠ 1."
    # the scale of the default noise is held constant
    module = row.make(dtype=torch.float64, noise_kind="dropout").train(training)
    set_affine(module)
    if row.running:
        with torch.no_grad():
            module.running_lambda.copy_(torch.linspace(-0.5, 2.5, row.shape[1]))
    u = skewed(row.shape)[:3].requires_grad_()

    def f(x, *parameters):
        torch.manual_seed(0)  # the same noise at each call
        return torch.func.functional_call(
            module, dict(zip(("weight", "bias"), parameters)), x
        )

    assert torch.autograd.gradcheck(
        f,
        (
            u,
            *(p.detach().clone().requires_grad_() for p in module.parameters()),
        ),
        fast_mode=True,
    )


@pytest.mark.parametrize("noise", (0.0, 0.7))
@every_layer
def test_the_input_is_kept_once(row, noise):
    """Bytes that wait for the backward pass, each storage once: the input, the
    parameters, at most 64 bytes a unit.
    """
    shape = (
        (*row.shape[:-1], 211) if row.shape[2:] and row.channels else row.shape
    )
    module, u, found = (
        row.make(noise=noise),
        skewed(shape, torch.float32).requires_grad_(),
        {},
    )

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = (
            tensor.untyped_storage().nbytes()
        )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(u)
    units = row.rows(u.detach().numpy())[0].shape[0]
    parameters = 4 * sum(p.numel() for p in module.parameters())
    assert (
        out.requires_grad
        and sum(found.values()) <= 4 * u.numel() + parameters + 64 * units + 16
    )


# ---------------------------------------------------------------- layout,
# types, randomness


def layouts(u):
    "The same values, differently laid out."
    yield (
        "reversed strides",
        u.permute(*reversed(range(u.ndim)))
        .contiguous()
        .permute(*reversed(range(u.ndim))),
    )
    padded = torch.full(
        (*u.shape[:-1], 2 * u.shape[-1] + 1), torch.nan, dtype=u.dtype
    )
    padded[..., 1::2] = u
    yield "every second element", padded[..., 1::2]
    (
        yield (
            "misaligned",
            torch.cat([u.new_zeros(1), u.flatten()])[1:].reshape(u.shape),
        )
    )
    if u.ndim == 4:
        yield "channels_last", u.to(memory_format=torch.channels_last)
    if u.ndim == 5:
        yield "channels_last_3d", u.to(memory_format=torch.channels_last_3d)


@every_layer
def test_layout_does_not_matter(row):
    """Output, gradient, noise; channels_last comes out as channels_last
    wherever torch's layer keeps it.
    """
    module, plain = row.make(), row.make_plain()
    u, g = skewed(row.shape, torch.float32), torch.randn(row.shape)

    def run(module, x):
        torch.manual_seed(0)
        x = x.detach().requires_grad_()
        out = module(x)
        # laid out as the next layer would have it
        upstream = torch.empty_like(out).copy_(g)
        return out, torch.autograd.grad(out, x, upstream)[0]

    expected = run(module, u)
    for name, x in layouts(u):
        found, theirs = run(module, x), run(plain, x)
        for a, b, c in zip(found, expected, theirs):
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}"
            )
            for form, ndim in (
                (torch.channels_last, 4),
                (torch.channels_last_3d, 5),
            ):
                if (
                    name.startswith("channels_last")
                    and u.ndim == ndim
                    and c.is_contiguous(memory_format=form)
                ):
                    assert a.is_contiguous(memory_format=form), name
    broadcast = u[:1].expand(row.shape)  # stride 0
    torch.testing.assert_close(
        run(module, broadcast),
        run(module, broadcast.contiguous()),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("given", DTYPES, ids=lambda d: str(d)[6:])
@every_layer
def test_types_are_those_of_torch(row, given):
    """Output and gradient in the input's dtype and shape, also for float32
    parameters; under autocast what torch's layer gives.
    """
    for training in (True, False):
        module, plain = (
            row.make().train(training),
            row.make_plain().train(training),
        )
        if given == torch.float64:  # as torch's: refused by a float32 layer
            module, plain = module.double(), plain.double()
        u = skewed(row.shape, given).requires_grad_()
        out = module(u)
        out.sum().backward()
        assert (
            out.dtype == given == u.grad.dtype
            and out.shape == u.shape == u.grad.shape
        )
        for low in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=low):
                try:
                    expected = plain(u).dtype
                except RuntimeError:
                    # torch's layer refuses float64 input with float32
                    # parameters
                    continue
                out = module(u)
            assert out.dtype == expected and out.isfinite().all()


@every_layer
def test_noise_depends_on_the_seed_alone(row):
    module, u = row.make(), skewed(row.shape, torch.float32)
    torch.manual_seed(3)
    first = module(u)
    torch.manual_seed(3)
    assert torch.equal(module(u), first) and not torch.equal(module(u), first)
    module.eval()
    assert torch.equal(module(u), module(u))
    silent = row.make(noise=0.0)
    assert torch.equal(silent(u), silent(u))


@every_layer
def test_copies_and_checkpoints(row):
    module, plain, u = (
        row.make(),
        row.make_plain(),
        skewed(row.shape, torch.float32),
    )
    module(u), plain(u), set_affine(module)
    module.eval()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    again = row.make().eval()
    again.load_state_dict(torch.load(file, weights_only=True))
    for clone in (
        again,
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
    ):
        assert torch.equal(clone(u), module(u))
    missing, unexpected = plain.load_state_dict(
        module.state_dict(), strict=False
    )
    assert not missing and set(unexpected) <= {"running_lambda"}
    twin = row.make().eval()
    assert twin.load_state_dict(plain.state_dict())
    torch.testing.assert_close(
        row.make(alpha=0.0).eval()(u),
        row.make_plain().eval()(u),
        rtol=1e-5,
        atol=1e-5,
    )
    # as torch < 0.4.1 wrote them
    old = {
        k: v
        for k, v in plain.state_dict().items()
        if k != "num_batches_tracked"
    }
    assert twin.load_state_dict(old)
    with torch.device("meta"):
        empty = row.make()
    empty.load_state_dict(plain.state_dict(), assign=True)
    assert not any(t.is_meta for t in empty.state_dict().values())


def test_wrong_checkpoints_are_refused():
    for target, source, words in (
        (BatchNormalNorm1d(3), nn.BatchNorm1d(4), "size mismatch"),
        (BatchNormalNorm1d(3), nn.LayerNorm(3), "Missing key"),
        (LayerNormalNorm(3), nn.BatchNorm1d(3), "Unexpected key"),
        (BatchNormalNorm1d(3), nn.Linear(3, 3), "size mismatch"),
    ):
        with pytest.raises(RuntimeError, match=words):
            target.load_state_dict(source.state_dict())


# ---------------------------------------------------------------- sizes at the
# edge


@every_layer
def test_empty_batch(row):
    """As torch: an empty result, zero gradients of the parameters, running
    averages as they were.
    """
    for shape in (
        (0, *row.shape[1:]),
        *(
            ((*row.shape[:-1], 0),)
            if len(row.shape) > 2
            and row.channels
            and row.units is not per_instance
            else ()
        ),
    ):
        for training in (True, False):
            module = row.make().train(training)
            before = {k: v.clone() for k, v in module.named_buffers()}
            u = torch.zeros(shape, requires_grad=True)
            out = module(u)
            assert out.shape == shape and out.dtype == u.dtype
            out.sum().backward()
            assert u.grad.shape == shape and all(
                p.grad is not None and not p.grad.any()
                for p in module.parameters()
            )
            assert all(
                torch.equal(v, before[k])
                for k, v in module.named_buffers()
                if k != "num_batches_tracked"
            )


@every_layer
def test_two_elements_and_constant_units(row):
    """N = 2 gives λ̂ = 1, a constant unit exactly β with a finite gradient, one
    element an error or β, as torch has it.
    """
    module = row.make(noise=0.0)
    set_affine(module)
    constant = torch.full(row.shape, 0.1, requires_grad=True)
    out = module(constant)
    assert torch.equal(
        out,
        module.bias.reshape(row.affine_shape(module, out.ndim)).expand(
            row.shape
        ),
    )
    out.square().sum().backward()
    assert constant.grad.isfinite().all()
    if row.units is per_channel:
        two = row.make(noise=0.0, momentum=1.0, dtype=torch.float64)
        two(
            skewed((2, *row.shape[1:]))[
                (
                    slice(None),
                    slice(None),
                    *(slice(0, 1),) * (len(row.shape) - 2),
                )
            ]
        )
        torch.testing.assert_close(
            two.running_lambda,
            torch.ones(row.shape[1], dtype=torch.float64),
            rtol=0,
            atol=1e-10,
        )


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("value", (torch.nan, torch.inf, -torch.inf))
@every_layer
def test_a_unit_that_is_not_finite_spoils_no_other(row, value):
    "Output, gradient and running averages; in its own unit it is seen."
    u, g = skewed(row.shape, torch.float32), torch.randn(row.shape)
    first = (
        torch.from_numpy(
            row.rows(u.numpy())[1](
                np.arange(row.rows(u.numpy())[0].shape[0])[:, None]
                + np.zeros(row.rows(u.numpy())[0].shape)
            )
        )
        == 0
    )
    found = []
    for spoilt in (False, True):
        module, x = row.make(noise=0.0), u.clone()
        if spoilt:
            x[first.nonzero()[0].split(1)] = value
        x.requires_grad_()
        before = {k: v.clone() for k, v in module.named_buffers()}
        out = module(x)
        found.append(
            (out, torch.autograd.grad(out, x, g, retain_graph=True)[0])
        )
    for a, b in zip(*found):
        assert (
            torch.equal(a[~first], b[~first]) and not b[first].isfinite().any()
        )
    for name, buffer in module.named_buffers():
        if name != "num_batches_tracked":
            assert torch.equal(buffer[0], before[name][0]), (
                f"{name} of the spoilt channel was changed"
            )
            assert (buffer[1:] != before[name][1:]).all()


def test_evaluation_spoils_no_other_element():
    module, u = BatchNormalNorm1d(2).eval(), skewed((5, 2), torch.float32)
    with torch.no_grad():
        module.running_lambda.copy_(torch.tensor([0.5, -0.5]))
    out = module(u)
    u[0, 0], u[1, 1], u[2, 1] = torch.nan, torch.inf, -torch.inf
    after = module(u)
    # the limit 1/|λ|
    assert (
        after[0, 0].isnan()
        and torch.equal(after[3:], out[3:])
        and after[1, 1] == 2
        and after[2, 1] == -torch.inf
    )


@every_layer
def test_mean_far_from_zero(row):
    """Mean 1e4, deviation 1, float32: as near to float64 as torch's layer is,
    twice that at most.
    """
    u = (skewed(row.shape) + 1e4).float()
    exact, _ = reference(row, row.make(), u)
    plain = row.make_plain()(u)
    error = (plain - row.make_plain().double()(u.double())).abs().max()
    slope = (1 + plain.abs().max()) ** 2
    assert (
        row.make(noise=0.0)(u) - exact
    ).abs().max() <= 2 * slope * error + 1e-6


@every_layer
def test_denormal_and_tiny_inputs(row):
    """Below the smallest variance that float32 resolves a unit counts as
    constant: output within rounding of h, finite gradient, no NaN.
    """
    for scale in (1e-45, 1e-40, 1e-30, 1e-20, 1e-10):
        u = (scale * skewed(row.shape)).float().requires_grad_()
        out = row.make(noise=0.0)(u)
        h = row.make_plain().double()(u.detach().double())
        # u − μ is rounded before it is small
        torch.testing.assert_close(
            out.double(),
            h,
            rtol=1e-4,
            atol=max(1e-37, 1e-6 * h.abs().max().item()),
        )
        assert torch.autograd.grad(out.sum(), u)[0].isfinite().all()


# ---------------------------------------------------------------- low precision


def textbook(row, u):
    """The printed formulas in float32, operation by operation, on the output of
    torch's own layer.
    """
    u = u.float()
    h, back = row.rows(row.make_plain(**{row.affine: False})(u).numpy())
    k, _ = row.rows(row.make_plain(eps=1e-30, **{row.affine: False})(u).numpy())
    h, k = torch.from_numpy(h), torch.from_numpy(k)
    a, s = k.abs(), torch.where(k < 0, -1.0, 1.0)
    mean = lambda w: w.mean(1, keepdim=True)
    ell = a.log1p()
    d = (1 + a) * ell - a
    d2 = s * ((1 + a) * ell**2 - 2 * d)
    second = mean(k * d2) + mean((d - mean(d)) ** 2) - 2 * mean(k * d) ** 2
    eta = (
        1
        - torch.where(h < 0, -1.0, 1.0) * (mean(k * d) - mean(s * ell)) / second
    )
    return torch.from_numpy(
        back(
            (
                torch.where(h < 0, -1.0, 1.0) * ((1 + h.abs()) ** eta - 1) / eta
            ).numpy()
        )
    ).double()


@every_dtype
@every_layer
def test_error_in_low_precision(row, dtype):
    """Against float64 from the same, already rounded input: what remains is the
    layer's own arithmetic.

    Half precision: at most twice the error of rounding the exact result, which
    no layer can avoid, plus 1e-6. Float32 (and 64, trivially): at most twice
    the error of the printed formulas computed by PyTorch in float32, plus 1e-6.
    The largest over ten samples, for three laws and scales.
    """
    module = row.make(noise=0.0, **{row.affine: False}).to(dtype)
    for law in (
        lambda u: u.exp(),
        lambda u: -(2 * u).exp().clamp(max=200),
        lambda u: u + 3,
    ):
        for scale in (1.0, 1e-2, 1e2):
            ours, theirs = 0.0, 0.0
            for seed in range(10):
                u = (
                    scale
                    * law(
                        torch.randn(
                            row.shape,
                            generator=torch.Generator().manual_seed(seed),
                            dtype=torch.float64,
                        )
                    )
                ).to(dtype)
                exact, _ = reference(row, module, u)
                other = (
                    textbook(row, u)
                    if dtype.itemsize > 2
                    else exact.to(dtype).double()
                )
                ours, theirs = (
                    max(worst, (x - exact).abs().max().item())
                    for worst, x in (
                        (ours, module(u).double()),
                        (theirs, other),
                    )
                )
            # without fused products λ̂ has more of its rounding: 4.3
            assert ours <= (2 if VECTORS else 5) * theirs + 1e-6, scale


@pytest.mark.parametrize(
    "dtype",
    (torch.float32, torch.bfloat16, torch.float16),
    ids=lambda d: str(d)[6:],
)
@every_layer
def test_evaluation_is_finite_for_every_finite_input(row, dtype):
    """Up to the largest number of the type and any λ within [−3, 5]; infinities
    are not hidden.
    """
    if not row.running:
        return
    for lmbda in (-3.0, 0.0, 1.0, 3.0, 5.0):
        module = row.make().to(dtype).eval()
        module.running_lambda.fill_(lmbda)
        u = torch.finfo(dtype).max * torch.linspace(
            -1, 1, math.prod(row.shape), dtype=torch.float64
        ).reshape(row.shape).clamp(-1, 1).to(dtype)
        u.requires_grad_()
        out = module(u)
        gradient = torch.autograd.grad(out.double().sum(), u)[0]
        # gradients of half precision overflow to infinity, for a GradScaler
        assert out.isfinite().all() and not gradient.isnan().any()
        assert dtype == torch.float16 or gradient.isfinite().all()
    u = torch.full(row.shape, torch.inf, dtype=dtype)
    assert module(u).isinf().all()


def test_float16_saturates_in_training():
    """A unit whose exact output exceeds 65504: two outliers, the smaller one on
    the side that is stretched.
    """
    u = torch.zeros(100_000, 1)
    u[0], u[1] = 14.0, -316.0
    exact = BatchNormalNorm1d(1, noise=0.0)(u)
    half = BatchNormalNorm1d(1, noise=0.0)(u.half())
    assert exact.max() > 1e5 and half.max() == 65504 and half.isfinite().all()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(LAYERS)),
    st.sampled_from((torch.float16, torch.bfloat16)),
    st.data(),
)
def test_half_precision_of_drawn_values(name, dtype, data):
    """Finite for finite input, up to the largest number of float16; the rounded
    float32 result, to the last bit.
    """
    row = LAYERS[name]
    top = 65504.0 if dtype == torch.float16 else 1e18
    pool = data.draw(
        st.lists(
            st.one_of(
                st.floats(-1, 1, width=16).map(lambda x: x * top),
                st.sampled_from([top, -top, 0.0, 6e-8, 1.0]),
            ),
            min_size=5,
            max_size=5,
        )
    )
    order = np.random.default_rng(data.draw(st.integers(0, 99))).integers(
        0, 5, math.prod(row.shape)
    )
    u = torch.tensor(pool)[order].reshape(row.shape).to(dtype).requires_grad_()
    module = row.make(noise=0.0)
    out = module(u)
    assert out.isfinite().all() and torch.equal(
        out, row.make(noise=0.0)(u.float()).to(dtype)
    )
    assert torch.autograd.grad(out.sum(), u)[0].isfinite().all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@every_layer
def test_large_values_are_right_or_nan_never_zero(row, dtype):
    """Right up to 1e18, whatever the size of the unit; where float32 cannot
    hold the variance, NaN, and the running averages stay.
    """
    base = skewed(row.shape).clamp(max=3)
    for scale in (1e10, 1e17, 3e17):
        u = (scale * base).to(dtype)
        exact, _ = reference(row, row.make(), u)
        torch.testing.assert_close(
            row.make(noise=0.0)(u).double(),
            exact,
            rtol=1e-2 if dtype == torch.bfloat16 else 1e-4,
            atol=1e-4,
        )
    for scale in (1e21, 1e30, 1e38):
        module = row.make()
        before = {k: v.clone() for k, v in module.named_buffers()}
        assert module((scale * base).to(dtype)).isnan().all()
        assert all(
            torch.equal(v, before[k])
            for k, v in module.named_buffers()
            if k != "num_batches_tracked"
        )


# ---------------------------------------------------------------- wrong
# arguments


@pytest.mark.parametrize(
    "bad, error, words",
    [
        (
            lambda: BatchNormalNorm2d(3)(torch.randn(4, 3, 5)),
            ValueError,
            "batch, channels, height, width",
        ),
        (
            lambda: BatchNormalNorm1d(3)(torch.randn(4, 3, 5, 2)),
            ValueError,
            r"given a shape of \(4, 3, 5, 2\)",
        ),
        (
            lambda: BatchNormalNorm1d(3)(torch.randn(4, 2)),
            ValueError,
            "num_features=3",
        ),
        (
            lambda: BatchNormalNorm1d(3)(torch.randn(1, 3)),
            ValueError,
            "more than one value",
        ),
        (
            lambda: SyncBatchNormalNorm(3)(torch.randn(3)),
            ValueError,
            "batch, channels",
        ),
        (
            lambda: InstanceNormalNorm2d(3)(torch.randn(2, 3, 1, 1)),
            ValueError,
            "more than one value",
        ),
        (
            lambda: InstanceNormalNorm2d(3)(torch.randn(2, 3, 4)),
            ValueError,
            "num_features=3",
        ),
        (
            lambda: BatchNormalNorm1d(3)(torch.ones(4, 3, dtype=torch.int64)),
            TypeError,
            "floating-point",
        ),
        (
            lambda: LayerNormalNorm(3)(torch.ones(4, 3, dtype=torch.complex64)),
            TypeError,
            "floating-point",
        ),
        (
            lambda: LayerNormalNorm(3)(torch.randn(4, 5)),
            ValueError,
            "normalized_shape",
        ),
        (lambda: LayerNormalNorm(()), ValueError, "normalized_shape"),
        (lambda: GroupNormalNorm(2, 3), ValueError, "num_groups=2"),
        (
            lambda: GroupNormalNorm(2, 4)(torch.randn(3, 5)),
            ValueError,
            "num_channels=4",
        ),
        (
            lambda: GroupNormalNorm(2, 2)(torch.randn(3, 2)),
            ValueError,
            "more than one value",
        ),
        (lambda: BatchNormalNorm1d(0), ValueError, "num_features"),
        (lambda: BatchNormalNorm1d(3, eps=-1.0), ValueError, "eps"),
        (lambda: BatchNormalNorm1d(3, eps=float("nan")), ValueError, "eps"),
        (lambda: BatchNormalNorm1d(3, noise=-0.1), ValueError, "noise"),
        (lambda: BatchNormalNorm1d(3, noise=float("nan")), ValueError, "noise"),
        (lambda: BatchNormalNorm1d(3, noise_kind="loud"), ValueError, "scaled"),
        (lambda: BatchNormalNorm1d(3, alpha=2.0), ValueError, "alpha"),
        (lambda: BatchNormalNorm1d(3, steps=0), ValueError, "steps"),
        (
            lambda: batch_normal_norm(torch.randn(4, 3)),
            ValueError,
            "running_mean",
        ),
        (
            lambda: batch_normal_norm(
                torch.randn(4, 3), weight=torch.ones(2), training=True
            ),
            ValueError,
            "weight",
        ),
        (
            lambda: batch_normal_norm(torch.randn(4), training=True),
            ValueError,
            "batch, channels",
        ),
        (
            lambda: layer_normal_norm(
                torch.randn(4, 3), (3,), weight=torch.ones(2)
            ),
            ValueError,
            "weight",
        ),
    ],
)
def test_wrong_arguments_are_explained(bad, error, words):
    with pytest.raises(error, match=words):
        bad()
