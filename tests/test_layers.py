"The layers beyond their chapters: precision, layouts, modes, faults, interchange with PyTorch's layers."
import copy
import pickle

import pytest
import torch
from torch import nn

import normalnorm
from normalnorm.layers.core import normality_norm
from normalnorm.layers.functional import batch_normal_norm, layer_normal_norm
from normalnorm.layers.normality import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    BatchNormalNorm3d,
    GroupNormalNorm,
    InstanceNormalNorm1d,
    InstanceNormalNorm2d,
    InstanceNormalNorm3d,
    LayerNormalNorm,
)

LAYERS = {
    "batch1d": (lambda **o: BatchNormalNorm1d(3, **o), lambda **o: nn.BatchNorm1d(3, **o), (7, 3, 5)),
    "batch1d-flat": (lambda **o: BatchNormalNorm1d(3, **o), lambda **o: nn.BatchNorm1d(3, **o), (7, 3)),
    "batch2d": (lambda **o: BatchNormalNorm2d(3, **o), lambda **o: nn.BatchNorm2d(3, **o), (7, 3, 5, 2)),
    "batch3d": (lambda **o: BatchNormalNorm3d(3, **o), lambda **o: nn.BatchNorm3d(3, **o), (3, 3, 2, 5, 2)),
    "instance1d": (lambda **o: InstanceNormalNorm1d(3, **o), lambda **o: nn.InstanceNorm1d(3, **o), (7, 3, 5)),
    "instance2d": (lambda **o: InstanceNormalNorm2d(3, affine=True, track_running_stats=True, **o),
                   lambda **o: nn.InstanceNorm2d(3, affine=True, track_running_stats=True, **o), (7, 3, 5, 2)),
    "instance3d": (lambda **o: InstanceNormalNorm3d(3, **o), lambda **o: nn.InstanceNorm3d(3, **o), (2, 3, 5, 2, 2)),
    "group": (lambda **o: GroupNormalNorm(3, 6, **o), lambda **o: nn.GroupNorm(3, 6, **o), (5, 6, 7)),
    "layer": (lambda **o: LayerNormalNorm(5, **o), lambda **o: nn.LayerNorm(5, **o), (7, 3, 5)),
    "layer2": (lambda **o: LayerNormalNorm((3, 5), **o), lambda **o: nn.LayerNorm((3, 5), **o), (7, 3, 5)),
}


@pytest.fixture(params=LAYERS)
def case(request):
    return LAYERS[request.param]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 5e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_plain_is_torch(case, dtype, tolerance):
    ours, theirs, shape = case
    ours, theirs = ours(noise=0.0, alpha=0.0), theirs()
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    torch.manual_seed(0)
    for training in (True, True, False):
        ours.train(training), theirs.train(training)
        u = torch.randn(shape).mul(3).add(1).to(dtype)
        torch.testing.assert_close(ours(u), theirs(u), rtol=tolerance, atol=tolerance)
    for name, value in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), value, rtol=tolerance, atol=tolerance)


def test_gradients_in_float64(case):
    layer, _, shape = case
    layer = layer(noise=0.0, dtype=torch.float64)
    u = torch.randn(shape, dtype=torch.float64).exp().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (u, *layer.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_rounded_float32_result(case, dtype):
    layer, _, shape = case
    layer = layer(noise=0.0)
    u = torch.randn(shape).exp().to(dtype)
    assert layer(u).dtype == dtype
    torch.testing.assert_close(layer(u), layer(u.float()).to(dtype), rtol=0, atol=0)


def test_invariances(case):
    layer, _, shape = case
    layer = layer(noise=0.0, eps=0.0, dtype=torch.float64)
    u = torch.randn(shape, dtype=torch.float64).exp()
    torch.testing.assert_close(layer(3 * u + 7), layer(u), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(layer(-u), -layer(u), rtol=1e-8, atol=1e-8)          # weight 1, bias 0


FOLLOWS = pytest.mark.skipif(tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 13), reason="torch 2.4 cannot follow these functions; tried with 2.13 and 2.15")


@FOLLOWS
@pytest.mark.parametrize("name, options", [("batch2d", {}), ("layer", {"safeguard": True}), ("group", {"noise_kind": "dropout"})])
def test_compiles_without_breaks(name, options):
    "aot_eager: traced as a whole, forward and backward, and the same numbers as without."
    layer, _, shape = LAYERS[name]
    layer = layer(**options)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    u = torch.randn(shape).exp().requires_grad_()
    found = []
    for f in (layer, compiled):
        torch.manual_seed(0)
        out = f(u)
        found.append((out, torch.autograd.grad(out.square().sum(), u)[0]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_channels_last_stays():
    u = torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last)
    for layer in (BatchNormalNorm2d(3), InstanceNormalNorm2d(3)):
        torch.manual_seed(0)
        out = layer(u)
        assert out.is_contiguous(memory_format=torch.channels_last)
        torch.manual_seed(0)
        torch.testing.assert_close(layer(u.contiguous()), out)          # the noise does not depend on the layout


def test_a_batch_that_is_not_finite_does_not_reach_the_running_averages():
    layer = BatchNormalNorm2d(3)
    u = torch.randn(4, 3, 5, 7)
    u[0, 1, 0, 0] = torch.nan
    assert layer(u)[:, 1].isnan().all()
    assert all(b.isfinite().all() for b in layer.buffers()) and layer.running_mean[1] == 0 and layer.running_mean[0] != 0


def test_noise_is_that_of_the_whole_batch_in_its_parts():
    u, seed = torch.randn(6, 5, dtype=torch.float64), torch.tensor(9)
    whole, _ = normality_norm(u, (1,), noise=0.7, seed=seed)
    parts = [normality_norm(u[i:i + 2], (1,), noise=0.7, seed=seed, offset=5 * i)[0] for i in (0, 2, 4)]
    torch.testing.assert_close(torch.cat(parts), whole)


@FOLLOWS
def test_export_in_evaluation(case):
    layer, _, shape = case
    layer, u = layer().eval(), torch.randn(shape)
    torch.testing.assert_close(torch.export.export(layer, (u,)).module()(u), layer(u))


def test_channels_are_independent():
    layer, u = BatchNormalNorm2d(3, noise=0.0), torch.randn(4, 3, 5, 7).exp()
    out = layer(u)
    spoilt = u.clone()
    spoilt[:, 1] = torch.nan
    after = layer(spoilt)
    assert torch.equal(after[:, ::2], out[:, ::2]) and after[:, 1].isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_input_gives_non_finite_output(case, value):
    layer, plain, shape = case
    u = torch.randn(shape)
    u.view(-1)[0] = value
    assert not layer(noise=0.0)(u).isfinite().all() and not plain()(u).isfinite().all()


def test_large_values_are_right_or_nan_never_zero():
    u = torch.tensor([[-1e19], [1e19], [3e19]])
    torch.testing.assert_close(BatchNormalNorm1d(1, noise=0.0)(u), BatchNormalNorm1d(1, noise=0.0)(u / 1e19), rtol=1e-4, atol=1e-4)
    assert BatchNormalNorm1d(1)(10 * u).isnan().all()


def test_empty_batch_as_torch(case):
    layer, plain, shape = case
    u = torch.randn(0, *shape[1:])
    ours, theirs = layer(), plain()
    assert ours(u).shape == u.shape
    for (name, value) in theirs.named_buffers():
        if name != "num_batches_tracked":
            assert torch.equal(ours.get_buffer(name), value) or not torch.equal(theirs(u), theirs(u))
    assert all(b.isfinite().all() for b in ours.buffers())


def test_noise_only_in_training_and_reproducible(case):
    layer, _, shape = case
    layer, u = layer(), torch.randn(shape)
    torch.manual_seed(3)
    first = layer(u)
    torch.manual_seed(3)
    assert torch.equal(layer(u), first) and not torch.equal(layer(u), first)
    layer.eval()
    assert torch.equal(layer(u), layer(u))


def test_strided_input(case):
    layer, _, shape = case
    layer = layer(noise=0.0)
    u = torch.randn(*shape[::-1]).permute(*range(len(shape))[::-1])
    torch.testing.assert_close(layer(u), layer(u.contiguous()))


def test_copies_and_checkpoints(case):
    layer, plain, shape = case
    layer, u = layer(), torch.randn(shape).exp()
    layer(u)
    layer.eval()
    for clone in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(clone(u), layer(u))
    other = plain()
    missing, unexpected = other.load_state_dict(layer.state_dict(), strict=False)
    assert not missing and set(unexpected) <= {"running_lambda"}
    layer.load_state_dict(plain().state_dict())


def test_checkpoint_of_wrong_shape_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch"):
        BatchNormalNorm1d(3).load_state_dict(nn.BatchNorm1d(4).state_dict())


def test_without_running_statistics_evaluation_uses_the_batch():
    layer, u = BatchNormalNorm1d(3, track_running_stats=False, noise=0.0), torch.randn(8, 3).exp()
    assert torch.equal(layer.train()(u), layer.eval()(u))


def test_evaluation_applies_running_lambda():
    layer = BatchNormalNorm1d(1)
    with torch.no_grad():
        layer.running_lambda.fill_(0.0)
    u = torch.tensor([[1.0], [-1.0]])
    torch.testing.assert_close(layer.eval()(u), torch.tensor([[0.6931], [-1.5]]), rtol=1e-4, atol=1e-4)


def test_meta_device_and_zero_argument_forms():
    assert BatchNormalNorm2d(3, device="meta").weight.is_meta
    assert layer_normal_norm(torch.randn(2, 5), (5,)).shape == (2, 5)
    assert batch_normal_norm(torch.randn(4, 2), training=True).shape == (4, 2)


def test_autocast():
    layer, u = LayerNormalNorm(16, noise=0.0), torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(nn.Linear(16, 16)(u))
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


def test_top_level_names():
    assert normalnorm.BatchNormalNorm2d is BatchNormalNorm2d and "LayerNormalNorm" in dir(normalnorm)
    with pytest.raises(AttributeError, match="the layers are"):
        _ = normalnorm.NoSuchLayer


@pytest.mark.parametrize("bad, error, words", [
    (lambda: BatchNormalNorm2d(3)(torch.randn(4, 3, 5)), ValueError, "batch, channels, height, width"),
    (lambda: BatchNormalNorm1d(3)(torch.randn(4, 3, 5, 2)), ValueError, "4 axes"),
    (lambda: BatchNormalNorm1d(3)(torch.randn(4, 2)), ValueError, "num_features=3"),
    (lambda: BatchNormalNorm1d(3)(torch.randn(1, 3)), ValueError, "more than one value"),
    (lambda: BatchNormalNorm1d(3)(torch.ones(4, 3, dtype=torch.int64)), TypeError, "floating-point"),
    (lambda: LayerNormalNorm(3)(torch.ones(4, 3, dtype=torch.complex64)), TypeError, "floating-point"),
    (lambda: LayerNormalNorm(3)(torch.randn(4, 5)), ValueError, "normalized_shape"),
    (lambda: LayerNormalNorm(()), ValueError, "normalized_shape"),
    (lambda: BatchNormalNorm1d(0), ValueError, "num_features"),
    (lambda: BatchNormalNorm1d(3, eps=-1.0), ValueError, "eps"),
    (lambda: BatchNormalNorm1d(3, noise=-0.1), ValueError, "noise"),
    (lambda: BatchNormalNorm1d(3, noise=float("nan")), ValueError, "noise"),
    (lambda: BatchNormalNorm1d(3, alpha=2.0), ValueError, "alpha"),
    (lambda: batch_normal_norm(torch.randn(4, 3)), ValueError, "running_mean"),
    (lambda: batch_normal_norm(torch.randn(4, 3), weight=torch.ones(2), training=True), ValueError, "weight"),
    (lambda: batch_normal_norm(torch.randn(4), training=True), ValueError, "batch, channels"),
    (lambda: layer_normal_norm(torch.randn(4, 3), (3,), weight=torch.ones(2)), ValueError, "weight"),
    (lambda: normality_norm(torch.randn(4, 3), (0,), noise=-1.0), ValueError, "noise"),
])
def test_bad_input(bad, error, words):
    with pytest.raises(error, match=words):
        bad()


def test_a_single_process_needs_no_group():
    from normalnorm.layers.sync import SyncBatchNormalNorm
    u = torch.randn(4, 3, 5, 7)
    sync, plain = SyncBatchNormalNorm(3), BatchNormalNorm2d(3)
    for layer in (sync, plain):
        torch.manual_seed(0)
        layer.out = layer(u)
    assert torch.equal(sync.out, plain.out) and torch.equal(sync.running_lambda, plain.running_lambda)
    with pytest.raises(NotImplementedError, match="steps=2"):
        SyncBatchNormalNorm(3, steps=2)


def test_processes_agree_with_one():
    from normalnorm.layers.sync import compare_processes
    assert max(compare_processes([1, 4], {"noise": 0.4, "noise_kind": "dropout"}, (2, 3)).values()) < 1e-9
