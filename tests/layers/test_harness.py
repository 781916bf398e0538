"""Every layer of the library's table × mode × dtype × shape × property; what is
compared with Algorithm 1, the layers whose plain twin is PyTorch's.

The reference is NumPy and SciPy in float64, written here from Algorithm 1 and
the formulas of the paper's Appendix D; it imports nothing of the library.
"""

import itertools
import math
import re

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings

from normalnorm.layers.functional import batch_normal_norm, layer_normal_norm
from normalnorm.layers.normality import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    GroupNormalNorm,
    LayerNormalNorm,
)
from normalnorm.theory.gradient import Power
from tests.layers.steps import kept_bytes, refusals, uncut
from tests.layers.steps import step as gradients
from tests.peers import TORCH, VECTORS
from tools.hostile.situations import S
from tools.references import Reference
from tools.rows import MODES, Trial, trials

SIZES = {"B": 3, "L": 11, "D": 2, "H": 5, "W": 7}
BARE = MODES["no affine map"]


def prime(trial: Trial) -> Trial:
    "With few channels, or many where they make a unit, or two groups of them."
    size = (
        SIZES
        | {
            "C": {"B …": 13, "B H W": 13, "B G": 6, "G": 5}.get(
                trial.row.unit, 3
            )
        }
        | ({"B": 11} if trial.kind == "B C" else {})
    )
    return trial._replace(shape=tuple(map(size.get, trial.kind.split())))


# synchronized: one process; several: chapter 245, test_sync_decorrelated.py,
# test_fsdp.py
PRIME = {str(t): prime(t) for t in trials()}
# a momentum beyond 1 takes averages past the batch: both bounds are met
BOUND = PRIME["renorm B C H W"].having(
    "tightly bound", r_max=1.3, d_max=0.4, eps=0.01, momentum=1.5
)
# have other references
OTHERS = [*(t for t in PRIME.values() if not t.standard), BOUND]
LAYERS = {name: t for name, t in PRIME.items() if t.standard}
LAYERS["group B C"] = LAYERS["group B C H W"]._replace(
    kind="B C", shape=(5, 22)
)
LAYERS["layer3"] = LAYERS["layer B L C"]._replace(
    kind="B C", shape=(7, 3, 5, 2)
)
EVERY = {
    str(t): t
    for t in (
        *PRIME.values(),
        # without a transform unless it is asked for
        *(
            t.having("transformed", gaussianizer=Power())
            for t in OTHERS
            if "gaussianizer" in t.known and t.row.centre is not None
        ),
        PRIME["decorrelated2 B C H W"].having(
            "by products", method="newton_schulz"
        ),
        BOUND,
    )
} | LAYERS
RUNNING = [t for t in LAYERS.values() if "track_running_stats" in t.known]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CASES = [
    pytest.param(trial, options, id=f"{name}-{mode}")
    for name, trial in LAYERS.items()
    for mode, options in trial.modes().items()
]
every_row = pytest.mark.parametrize("trial", EVERY.values(), ids=EVERY)
every_layer = pytest.mark.parametrize("trial", LAYERS.values(), ids=LAYERS)
running_layers = pytest.mark.parametrize("trial", RUNNING, ids=str)


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
    a, s = np.abs(k), np.copysign(np.ones_like(k), k)
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


def reference(trial, module, u, given=None, eps=1e-5, alpha=1.0):
    """Output of a layer in float64, with its parameters, and the statistics of
    each unit.
    """
    rows = trial.units(u.detach().double().numpy())
    x, *statistics = algorithm_1(rows, eps, alpha, given)
    out = torch.from_numpy(trial.whole(x))
    if module.weight is not None:
        out = out * trial.wide(module.weight.detach().double())
    if module.bias is not None:
        out = out + trial.wide(module.bias.detach().double())
    return out, statistics


def channel_means(trial, u, values):
    "Per-unit values averaged over the images, one per channel."
    return (
        values
        if trial.row.unit == "C"
        else values.reshape(u.shape[0], -1).mean(0)
    )


# ---------------------------------------------------------------- equal to
# torch, equal to the reference


EXACT = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}


@pytest.mark.parametrize(
    "trial, options, dtype, tolerance",
    [
        pytest.param(
            *case.values, dtype, tolerance, id=f"{case.id}-{str(dtype)[6:]}"
        )
        for case in CASES
        for dtype, tolerance in EXACT.items()
    ]
    + [  # their references are in float64
        pytest.param(t, options, torch.float64, 1e-5, id=f"{t}-{mode}")
        for t in OTHERS
        for mode, options in t.modes().items()
    ],
)
def test_without_transform_and_noise_it_is_the_plain_layer(
    trial, options, dtype, tolerance
):
    "Outputs, gradients, buffers: two training steps, one evaluation."
    cumulative = options.get("momentum", 1) is None
    if TORCH < (2, 13) and cumulative and "renorm" in trial.row.names:
        pytest.skip("the reference's averages need a later PyTorch in float64")
    ours = trial.ours(noise=0.0, alpha=0.0, **options).to(dtype)
    plain = trial.theirs(**options).to(dtype)
    set_affine(ours, plain)
    for i, training in enumerate((True, True, False)):
        u = 3 * skewed(trial.shape, dtype, i) - 1
        g = torch.randn(trial.shape).to(dtype)
        found, expected = (
            gradients(module.train(training), u, g) for module in (ours, plain)
        )
        for a, b in zip(found, expected):
            close = tolerance * max(1.0, b.abs().max().item())
            torch.testing.assert_close(a, b, rtol=tolerance, atol=close)
    for name, value in plain.named_buffers():
        if name != "running_var" or hasattr(ours, name):  # or a covariance
            torch.testing.assert_close(
                ours.get_buffer(name), value, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("trial, options", CASES)
def test_it_is_algorithm_1(trial, options):
    "Training, the running averages that it leaves, and evaluation with them."
    module = trial.ours(noise=0.0, dtype=torch.float64, **options)
    set_affine(module)
    # cumulative for batches, none for instances, as PyTorch has it
    cumulative = (1.0, 1 / 2, 1 / 3) if trial.row.unit == "C" else (0.0,) * 3
    momenta = cumulative if "momentum" in options else (0.1,) * 3
    running = [
        np.zeros(trial.shape[1]),
        np.ones(trial.shape[1]),
        np.ones(trial.shape[1]),
    ]
    for step, momentum in enumerate(momenta):
        u = skewed(trial.shape, seed=step)
        expected, (mean, var, lmbda) = reference(trial, module, u)
        torch.testing.assert_close(
            module.train()(u), expected, rtol=1e-9, atol=1e-10
        )
        count = trial.units(u.numpy()).shape[1]
        for i, value in enumerate((mean, var * count / (count - 1), lmbda)):
            if trial in RUNNING:
                running[i] = running[i] + momentum * (
                    channel_means(trial, u, value) - running[i]
                )
    tracked = trial in RUNNING and options.get("track_running_stats", True)
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
        repeats = 1 if trial.row.unit == "C" else u.shape[0]
        running = [np.tile(value, repeats) for value in running]
    expected, _ = reference(trial, module, u, running if tracked else None)
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
    trial = resized(LAYERS[name], sizes)
    eps, alpha = (
        data.draw(st.sampled_from([1e-5, 1e-3, 1.0])),
        data.draw(st.sampled_from([1.0, 0.5])),
    )
    scale, shift = (
        10.0 ** data.draw(st.integers(-6, 6)),
        data.draw(st.floats(-3, 3)),
    )
    count = math.prod(trial.shape)
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
        torch.tensor(values, dtype=torch.float64).reshape(trial.shape) + shift
    )
    module = trial.ours(noise=0.0, eps=eps, alpha=alpha, dtype=torch.float64)
    rows = trial.units(u.numpy())
    if rows.shape[1] == 1 and trial.row.unit not in ("B …", "B H W"):
        with pytest.raises(ValueError, match="more than one value"):
            module(u)
        return
    deviations = np.ptp(rows, axis=1)
    if ((deviations > 0) & (deviations < 1e-9 * np.abs(rows).max(1))).any():
        return  # the mean's rounding, not the unit, decides
    expected, _ = reference(trial, module, u, eps=eps, alpha=alpha)
    found = module(u.requires_grad_())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    (gradient,) = torch.autograd.grad(found.sin().sum(), u)
    assert gradient.isfinite().all()


def resized(trial, sizes):
    "The row with other sizes; all of them where channels have several axes."
    b, c, n, m = sizes
    size = dict(
        B=b, C=2 * c if trial.row.unit == "B G" else c, L=n, H=n, W=m, D=2
    )
    one = type(trial.channels) is int
    shape = map(size.get, trial.kind.split()) if one else sizes
    return trial._replace(shape=tuple(shape))


# ---------------------------------------------------------------- identities


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@running_layers
def test_at_lambda_1_it_is_the_plain_layer(trial, dtype):
    "Evaluation, to the bit, up to 1e6 deviations out."
    plain = trial.ours(noise=0.0, alpha=0.0).to(dtype)
    module = trial.ours().to(dtype).eval()
    set_affine(plain)
    plain(skewed(trial.shape, dtype))
    state = plain.eval().state_dict()
    del state["_extra_state"]  # the rule is another one
    module.load_state_dict(state)
    for scale in (1.0, 1e3, 1e6):
        v = (scale * skewed(trial.shape)).clamp(max=6e4).to(dtype)
        assert torch.equal(module(v), plain(v))


@running_layers
def test_no_scale_moves_lambda(trial):
    "From far below ε to far above it. (Values and gradients: the claims.)"
    u, lambdas = skewed(trial.shape), []
    for scale in (1e-12, 1e-6, 1.0, 1e3):
        module = trial.ours(noise=0.0, dtype=torch.float64, momentum=1.0)
        module(scale * u)
        lambdas.append(module.running_lambda)
    for lmbda in lambdas:
        torch.testing.assert_close(lmbda, lambdas[-1], rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------- gradients,
# memory


@pytest.mark.parametrize("training", (True, False))
@every_row
def test_gradients(trial, training):
    "In training through the statistics, in evaluation with λ ≠ 1."
    # the scale of the default noise is held constant
    module = trial.ours(dtype=torch.float64, noise_kind="dropout")
    set_affine(module)
    if "running_lambda" in trial.averages:
        module.running_lambda.copy_(torch.linspace(-0.5, 2.5, trial.channels))
    uncut(module).train(training)
    u = skewed(trial.shape)[:3].requires_grad_()
    names, leaves = zip(*module.named_parameters())

    def f(x, *parameters):
        torch.manual_seed(0)  # the same noise at each call
        return torch.func.functional_call(
            module, dict(zip(names, parameters)), x
        )

    assert torch.autograd.gradcheck(f, (u, *leaves), fast_mode=True)


@pytest.mark.parametrize("noise", (0.0, 0.7))
@every_layer
def test_the_input_is_kept_once(trial, noise):
    """Bytes that wait for the backward pass, each storage once: the input, the
    parameters, at most 64 bytes a unit.
    """
    positions = trial.kind.split()[trial.at + 1 :]
    trial = (
        trial._replace(shape=(*trial.shape[:-1], 211)) if positions else trial
    )
    module, u = trial.ours(noise=noise), skewed(trial.shape, torch.float32)
    units = len(trial.units(u.numpy()))
    parameters = 4 * sum(p.numel() for p in module.parameters())
    allowed = 4 * u.numel() + parameters + 64 * units + 16
    assert kept_bytes(module, u) <= allowed


# ---------------------------------------------------------------- layout,
# types, randomness


LAYOUTS = (
    "transposed",
    "flipped",
    "every second",
    "misaligned by one number",
    "channels last",
    "expanded over the batch",
)


@every_row
def test_layout_does_not_matter(trial):
    """Output, gradient, noise; channels_last comes out as channels_last
    wherever the plain layer keeps it.
    """
    module, plain, g = (
        uncut(trial.ours()),
        trial.theirs(),
        torch.randn(trial.shape),
    )

    def run(module, x):
        torch.manual_seed(0)
        x = x.detach().requires_grad_()
        out = module(x)
        # laid out as the next layer would have it
        upstream = torch.empty_like(out).copy_(g)
        return out, torch.autograd.grad(out, x, upstream)[0]

    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(g.ndim)
    for name in LAYOUTS:
        x = S[f"input: {name}"].prepare(skewed(trial.shape, torch.float32))
        found = run(module, x)
        for a, b in zip(found, run(module, x.contiguous())):
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}"
            )
        if name == "channels last" and form:
            # of layers that torch does not have, the output alone
            for a, c in zip(found[: 1 + trial.standard], run(plain, x)):
                assert a.is_contiguous(memory_format=form) or not (
                    c.is_contiguous(memory_format=form)
                )


@pytest.mark.parametrize("given", DTYPES, ids=lambda d: str(d)[6:])
@every_row
def test_types_are_those_of_torch(trial, given):
    """Output and gradient in the input's dtype and shape, also for float32
    parameters; under autocast what torch's layer gives, where there is one.
    """
    for mode, training in itertools.product(trial.modes(), (True, False)):
        options = trial.modes()[mode]
        module = trial.ours(**options).train(training)
        plain = trial.theirs(**options).train(training)
        u = skewed(trial.shape, given).requires_grad_()
        held = [*module.parameters(), *module.buffers()]
        if given == torch.float64 and held:  # which are in float32
            with pytest.raises(
                TypeError,
                match=r"float64.*float32: expected one precision.*"
                r"\.to\(torch.float32\).*\.double\(\)",
            ):
                module(u)
            module, plain = module.double(), plain.double()
        out = module(u)
        out.sum().backward()
        assert out.dtype == given == u.grad.dtype
        assert out.shape == u.shape == u.grad.shape
        for low in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=low):
                assert module(u).isfinite().all()
                own = isinstance(plain, Reference)
                assert module(u).dtype == (given if own else plain(u).dtype)


@pytest.mark.parametrize(
    "trial", [t for t in EVERY.values() if "noise" in t.known], ids=str
)
def test_noise_depends_on_the_seed_alone(trial):
    module, silent = (uncut(trial.ours(noise=noise)) for noise in (0.5, 0.0))
    u = skewed(trial.shape, torch.float32)
    torch.manual_seed(3)
    first = module(u)
    torch.manual_seed(3)
    assert torch.equal(module(u), first) and not torch.equal(module(u), first)
    module.eval()
    assert torch.equal(module(u), module(u))
    assert torch.equal(silent(u), silent(u))


# ---------------------------------------------------------------- sizes at the
# edge


@every_row
def test_empty_batch(trial):
    """As torch: an empty result, zero gradients of the parameters, running
    averages as they were.
    """
    for shape in (
        (0, *trial.shape[1:]),
        *[(*trial.shape[:-1], 0)]
        * (
            trial.standard
            and trial.row.unit in ("C", "B G")
            and trial.kind != "B C"
        ),
    ):
        for training in (True, False):
            module = trial.ours().train(training)
            before = {k: v.clone() for k, v in module.named_buffers()}
            out, of_u, *others = gradients(module, torch.zeros(shape))
            assert out.shape == of_u.shape == shape
            assert out.dtype == torch.float32
            assert not any(g.any() for g in others)
            assert all(
                torch.equal(v, before[k])
                for k, v in module.named_buffers()
                if k != "num_batches_tracked"
            )


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("value", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize(
    "trial", [t for t in EVERY.values() if t.row.centre is None], ids=str
)
def test_a_unit_that_is_not_finite_spoils_no_other(trial, value):
    "Output, gradient and running averages; in its own unit it is seen."
    u, g = skewed(trial.shape, torch.float32), torch.randn(trial.shape)
    first = trial.sets(trial.row.unit) == 0
    channels = first.movedim(trial.at, 0).flatten(1).any(1)
    found = []
    for spoilt in (False, True):
        module, x = uncut(trial.ours(noise=0.0)), u.clone()
        if spoilt:
            x[first.nonzero()[0].split(1)] = value
        before = {k: v.clone() for k, v in module.named_buffers()}
        found.append(gradients(module, x, g, ()))
    for a, b in zip(*found):
        assert (
            torch.equal(a[~first], b[~first]) and not b[first].isfinite().any()
        )
    for name, buffer in module.named_buffers():
        if name != "num_batches_tracked":
            same = buffer == before[name]
            assert same[channels].all(), f"{name} of the spoilt was changed"
            assert not same.view(len(same), -1)[~channels].all(1).any()


@every_layer
def test_mean_far_from_zero(trial):
    """Mean 1e4, deviation 1, float32: as near to float64 as torch's layer is,
    twice that at most.
    """
    u = (skewed(trial.shape) + 1e4).float()
    exact, _ = reference(trial, trial.ours(), u)
    plain = trial.theirs()(u)
    error = (plain - trial.theirs().double()(u.double())).abs().max()
    slope = (1 + plain.abs().max()) ** 2
    assert (
        trial.ours(noise=0.0)(u) - exact
    ).abs().max() <= 2 * slope * error + 1e-6


@every_layer
def test_denormal_and_tiny_inputs(trial):
    """Below the smallest variance that float32 resolves a unit counts as
    constant: output within rounding of h, finite gradient, no NaN.
    """
    for scale in (1e-45, 1e-40, 1e-30, 1e-20, 1e-10):
        u = (scale * skewed(trial.shape)).float().requires_grad_()
        out = trial.ours(noise=0.0)(u)
        h = trial.theirs().double()(u.detach().double())
        # u − μ is rounded before it is small
        torch.testing.assert_close(
            out.double(),
            h,
            rtol=1e-4,
            atol=max(1e-37, 1e-6 * h.abs().max().item()),
        )
        assert torch.autograd.grad(out.sum(), u)[0].isfinite().all()


# ---------------------------------------------------------------- low precision


def textbook(trial, u):
    """The printed formulas in float32, operation by operation, on the output of
    torch's own layer.
    """
    u = u.float()
    h = trial.units(trial.theirs(**BARE)(u).numpy())
    k = trial.units(trial.theirs(eps=1e-30, **BARE)(u).numpy())
    lmbda = np.array([[newton(row)] for row in k], np.float32)
    eta = np.where(h < 0, 2 - lmbda, lmbda)
    x = np.copysign(((1 + np.abs(h)) ** eta - 1) / eta, h)
    return torch.from_numpy(trial.whole(x)).double()


@every_layer
def test_error_in_single_precision(trial):
    """Against float64 from the same, already rounded input: at most twice the
    error of the printed formulas computed by PyTorch in float32, plus 1e-6, of
    the largest over ten samples, for three laws and scales. Half precision is
    the same, rounded.
    """
    module = trial.ours(noise=0.0, **BARE)
    laws = (
        lambda u: u.exp(),
        lambda u: -(2 * u).exp().clamp(max=200),
        lambda u: u + 3,
    )
    for law, scale in itertools.product(laws, (1.0, 1e-2, 1e2)):
        ours, theirs = [], []
        for seed in range(10):
            normal = skewed(trial.shape, seed=seed).log()
            u = (scale * law(normal)).float()
            exact, _ = reference(trial, module, u)
            ours.append((module(u).double() - exact).abs().max().item())
            theirs.append((textbook(trial, u) - exact).abs().max().item())
        # without fused products λ̂ has more of its rounding: 4.3
        assert max(ours) <= (2 if VECTORS else 5) * max(theirs) + 1e-6, scale


@pytest.mark.parametrize(
    "dtype",
    (torch.float32, torch.bfloat16, torch.float16),
    ids=lambda d: str(d)[6:],
)
@running_layers
def test_evaluation_is_finite_for_every_finite_input(trial, dtype):
    """Up to the largest number of the type and any λ within [−3, 5]; infinities
    are not hidden.
    """
    for lmbda in (-3.0, 0.0, 1.0, 3.0, 5.0):
        module = trial.ours().to(dtype).eval()
        module.running_lambda.fill_(lmbda)
        u = torch.finfo(dtype).max * torch.linspace(
            -1, 1, math.prod(trial.shape), dtype=torch.float64
        ).reshape(trial.shape).clamp(-1, 1).to(dtype)
        u.requires_grad_()
        out = module(u)
        gradient = torch.autograd.grad(out.double().sum(), u)[0]
        # gradients of half precision overflow to infinity, for a GradScaler
        assert out.isfinite().all() and not gradient.isnan().any()
        assert dtype == torch.float16 or gradient.isfinite().all()
    u = torch.full(trial.shape, torch.inf, dtype=dtype)
    assert module(u).isinf().all()


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=lambda d: str(d)[6:])
@every_row
def test_half_precision_is_the_rounded_float32_result(trial, dtype):
    "And autocast leaves the statistics alone."
    module, u = uncut(trial.ours(noise=0.0)), skewed(trial.shape, dtype)
    for training in (True, False):
        wide = module.train(training)(u.float())
        assert torch.equal(module(u), wide.to(dtype))
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(module(u.float()), wide)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@every_layer
def test_large_values_are_right_or_nan_never_zero(trial, dtype):
    """Right up to 1e18, whatever the size of the unit; where float32 cannot
    hold the variance, NaN, and the running averages stay.
    """
    base = skewed(trial.shape).clamp(max=3)
    for scale in (1e10, 1e17, 3e17):
        u = (scale * base).to(dtype)
        exact, _ = reference(trial, trial.ours(), u)
        torch.testing.assert_close(
            trial.ours(noise=0.0)(u).double(),
            exact,
            rtol=1e-2 if dtype == torch.bfloat16 else 1e-4,
            atol=1e-4,
        )
    for scale in (1e21, 1e30, 1e38):
        module = trial.ours()
        before = {k: v.clone() for k, v in module.named_buffers()}
        assert module((scale * base).to(dtype)).isnan().all()
        assert all(
            torch.equal(v, before[k])
            for k, v in module.named_buffers()
            if k != "num_batches_tracked"
        )


# ---------------------------------------------------------------- wrong
# arguments


@every_row
def test_wrong_shapes_and_settings_are_explained(trial):
    "With what was given: another number of channels or of axes, one value."
    u, unit = torch.randn(trial.shape), trial.row.unit
    wrong = [torch.cat([u, u], trial.at)]
    if not trial.row.axes.startswith("B …"):  # of the last axes alone
        wrong.append(u.flatten())
    if trial.row.over_batch() or trial.standard and unit == "B C":
        one = [slice(None if d == trial.at else 1) for d in range(u.ndim)]
        wrong.append(u[tuple(one)])
    for x in wrong:
        said = re.escape(str(tuple(x.shape)))
        with pytest.raises(ValueError, match=said):
            trial.ours()(x)
    for name, value in {
        "eps": -1.0,
        "noise": -0.1,
        "noise_kind": "loud",
        "alpha": 2.0,
        "steps": 0,
    }.items():
        # another formula may have an α of its own
        if name in trial.known and (name != "alpha" or "steps" in trial.known):
            layer = trial.ours()
            before = getattr(layer, name)
            with pytest.raises(ValueError, match=f"{name}=.*{value}"):
                trial.ours(**{name: value})
            with pytest.raises(ValueError, match=f"{name}=.*{value}"):
                setattr(layer, name, value)
            assert getattr(layer, name) == before


test_wrong_arguments_are_explained = refusals(
    [
        (
            lambda: BatchNormalNorm2d(3)(torch.randn(4, 3, 5)),
            ValueError,
            "batch, channels, height, width",
        ),
        (lambda: GroupNormalNorm(2, 3), ValueError, "num_groups=2"),
        (lambda: LayerNormalNorm((4, 0)), ValueError, "positive sizes"),
        (
            lambda: GroupNormalNorm(2, 2)(torch.randn(3, 2)),
            ValueError,
            "more than one value",
        ),
        (lambda: BatchNormalNorm1d(0), ValueError, "num_features"),
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
            lambda: batch_normal_norm(
                torch.randn(4, 3),
                torch.zeros(3),
                torch.ones(3),
                training=True,
                momentum=None,
            ),
            ValueError,
            "how many",
        ),
        (
            lambda: layer_normal_norm(
                torch.randn(4, 3), (3,), weight=torch.ones(2)
            ),
            ValueError,
            "weight",
        ),
    ]
)
