"Measuring normality, and figures, beyond their chapters."

import math
import resource

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from normalnorm.analysis.gaussianity import (
    each_sample,
    normal_quantiles,
    normalizers,
    pre_affine,
    qq_r2,
)
from normalnorm.analysis.negentropy import negentropy
from normalnorm.analysis.normality_tests import (
    anderson_darling,
    dagostino,
    shapiro_weights,
    shapiro_wilk,
)
from normalnorm.analysis.power import model_power, power_decomposition
from normalnorm.experiments import models
from normalnorm.layers.normality import (
    BatchNormalNorm2d,
    GroupNormalNorm,
    InstanceNormalNorm2d,
    LayerNormalNorm,
)
from normalnorm.layers.pointwise import DynamicErf
from tests.peers import installed
from tests.refusals import refusals

# the smallest sample of each
INSTRUMENTS = {
    qq_r2: 3,
    shapiro_wilk: 3,
    anderson_darling: 8,
    dagostino: 20,
    negentropy: 7,
}


def test_pre_affine_has_every_normalizer():
    "What it leaves of the model: test_left_alone.py."
    model = models.SmallViT(
        width=12, depth=2, heads=3, hidden=7, norm=LayerNormalNorm
    )
    x = torch.randn(3, 1, 28, 28)
    found = pre_affine(model, x)
    assert list(found) == list(normalizers(model))
    assert all(v.shape == (3 * 49, 12) for v in found.values())
    with pytest.raises(ValueError, match="no batch or layer normalizer"):
        pre_affine(nn.Linear(3, 3), torch.zeros(2, 3))


def test_pre_affine_survives_layers_without_affine_map():
    model = nn.Sequential(
        nn.BatchNorm1d(4, affine=False),
        nn.LayerNorm(4, elementwise_affine=False),
    )
    found = pre_affine(model, torch.randn(9, 4))
    assert found["0"].shape == (4, 9) and found["1"].shape == (9, 4)


def test_no_other_parameter_than_weight_and_bias_is_set_aside():
    layer, x = DynamicErf(4), torch.randn(9, 4)
    for value, p in enumerate(layer.parameters(), 2):
        nn.init.constant_(p, value / 10)
    y = torch.special.erf(layer.alpha * x + layer.shift)
    model = nn.Sequential(layer)
    torch.testing.assert_close(pre_affine(model, x)["0"], y)
    torch.testing.assert_close(
        model_power(model, x)["0"], power_decomposition(y)
    )


# ---- one sample at a time ----


def values(result):
    "The statistic and, of a test, the p-value."
    return result if isinstance(result, tuple) else (result,)


def test_qq_r2_has_the_bits_of_the_committed_rows():
    """The rows in results/ were measured with whole tensors at once, sorted by
    torch; parts and NumPy's sort must not change a bit.
    """
    for x in (
        torch.randn(96, 3200),
        torch.randn(7, 50) * 1e3 + 1,
        torch.randn(300, 4900).relu() + 0.0,
        torch.randn(1, 700_000),
    ):
        ordered = x.sort(-1).values
        smallest, largest = ordered[..., :1], ordered[..., -1:]
        c = (ordered - smallest / 2 - largest / 2) / (
            largest / 2 - smallest / 2
        )
        c = c - c.mean(-1, keepdim=True)
        q = normal_quantiles(x.shape[-1]).to(x.dtype)
        assert torch.equal(
            qq_r2(x),
            ((c * (q / q.norm())).sum(-1) / c.norm(dim=-1))
            .square()
            .clamp(max=1),
        )


def memory_of(call):
    "What it returns, and the megabytes by which the most in use grew."
    most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    before = most()
    return call(), most() - before


def test_what_is_kept_beside_a_large_layer_is_small():
    x = torch.randn(2000, 8192)  # 62 MB
    qq_r2(x[:40])
    for instrument in INSTRUMENTS:
        part = x[:400] if instrument is not qq_r2 else x
        _, grown = memory_of(lambda: instrument(part))
        assert grown < 45, instrument.__name__


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_what_has_no_answer_is_nan_and_what_makes_no_sense_is_refused(
    instrument,
):
    least = INSTRUMENTS[instrument]
    x = torch.randn(6, 40)
    x[0], x[1, 3], x[2, 0], x[3, 39], x[4] = (
        0.1,
        math.nan,
        math.inf,
        -math.inf,
        -7e30,
    )
    for result in values(instrument(x)):
        assert result.isnan().tolist() == [True] * 5 + [False]
    assert all(
        v.isfinite().all() for v in values(instrument(torch.randn(3, least)))
    )
    for wrong, error, words in (
        (torch.randn(3, least - 1), ValueError, f"at least {least}"),
        (torch.tensor(2.0), ValueError, "at least"),
        (torch.arange(50), TypeError, "int64"),
        (torch.randn(50) + 1j, TypeError, "complex64"),
        (np.ones(50), TypeError, "ndarray"),
    ):
        with pytest.raises(error, match=words):
            instrument(wrong)


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_shape_layout_scale_and_inputs(instrument):
    x = torch.randn(3, 41, 5, dtype=torch.float64).exp()
    kept, found = x.clone(), values(instrument(x, 1))
    for i in range(3):
        for j in range(5):
            one = values(instrument(x[i, :, j]))
            assert all(
                torch.allclose(a[i, j], b, rtol=1e-9, atol=1e-12)
                for a, b in zip(found, one)
            )
    for other in (
        x.flip(1),
        -2.5e-200 * x,
        3e290 * x,
        x.movedim(1, 0).contiguous().movedim(0, 1),
    ):
        torch.testing.assert_close(
            values(instrument(other, dim=-2)), found, rtol=1e-7, atol=1e-10
        )
    assert torch.equal(x, kept) and values(instrument(x[:0], 1))[0].shape == (
        0,
        5,
    )
    assert not any(
        v.requires_grad
        for v in values(instrument(x.clone().requires_grad_(), 1))
    )
    half = x.to(torch.bfloat16)
    coarse = values(instrument(half, 1))[0]
    assert coarse.dtype == (
        torch.float32 if instrument is qq_r2 else torch.float64
    )
    torch.testing.assert_close(
        coarse.double(),
        values(instrument(half.double(), 1))[0],
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_a_gpu_gives_the_same_numbers(instrument):
    x = torch.randn(7, 500, 3).exp()
    x[0, :, 0], x[1, 3, 1] = 1.5, math.nan
    for found, expected in zip(
        values(instrument(x.cuda(), 1)), values(instrument(x, 1))
    ):
        assert found.is_cuda
        torch.testing.assert_close(
            found.cpu(), expected, rtol=1e-5, atol=1e-6, equal_nan=True
        )


def test_samples_are_sorted_and_span_the_range():
    seen = []

    def look(rows):
        seen.append(rows)
        return (rows[:, 0],)

    x = torch.randn(4, 7, 30)
    parts = each_sample(look, x, 1, 2, "look", chunk=200)
    whole = each_sample(lambda rows: (rows[:, 0],), x, 1, 2, "look")
    assert torch.equal(*parts, *whole)
    rows = torch.cat(seen)
    assert (
        len(seen) == 5
        and rows.shape == (120, 7)
        and (rows.diff() >= 0).all()
        and (rows[:, 0] == -1).all()
        and (rows[:, -1] == 1).all()
    )


# ---- tests of normality ----


def test_anderson_far_from_normal():
    "Where the fit's polynomial has long turned up again."
    far = anderson_darling(
        torch.tensor([1e9] + [0.0] * 5000) + 1e-9 * torch.randn(5001)
    )
    assert far.statistic > 1000 and 0 < far.p < 4e-24


def test_anderson_equals_statsmodels():
    normal_ad = installed("statsmodels.stats.diagnostic").normal_ad
    for draw in (
        np.random.default_rng(0).normal,
        np.random.default_rng(1).exponential,
        np.random.default_rng(2).random,
    ):
        for n in (8, 50, 3000):
            x = draw(size=n)
            found, expected = anderson_darling(torch.tensor(x)), normal_ad(x)
            assert abs(found.statistic.item() - expected[0]) < 1e-9 and (
                abs(found.p.item() / expected[1] - 1) < 1e-9
                if expected[1] > 1e-20
                else found.p < 1e-20
            )


def test_shapiro_of_samples_on_its_own_line():
    """The weights themselves are the sample with W = 1; a NaN must not come out
    of log 0.
    """
    for n in (3, 7, 12, 200):
        found = shapiro_wilk(shapiro_weights(n))
        assert found.statistic > 1 - 1e-12 and found.p > 0.99
    with pytest.raises(ValueError, match="n=2"):
        shapiro_weights(2)


def test_shapiro_far_from_normal():
    """As scipy's, down to 1e-66: PyTorch's `ndtr` ends at 1e-16. Before 1.12
    scipy's is of single precision, and 0 at the end.
    """
    single = tuple(map(int, scipy.__version__.split(".")[:2])) < (1, 12)
    rel = 1e-4 if single else 1e-6
    for n in (8, 50) if single else (8, 50, 3000):
        x = ((torch.arange(n).double() + 0.5) / n) ** 9
        expected = scipy.stats.shapiro(x.numpy()).pvalue
        found = shapiro_wilk(x).p.item()
        assert found == pytest.approx(expected, rel=rel, abs=0)


def test_negentropy_of_atoms():
    x = torch.randn(100)
    # six equal values are seven too few in the middle, and enough at an end
    x[:6] = 0.5
    assert negentropy(x).isfinite()
    x[:7] = 0.5
    assert negentropy(x) == math.inf


test_places_of_negentropy = refusals(
    [
        (0, "at least one place"),
        (-1, "at least one place"),
        (50, "at least 101"),
    ],
    lambda m: negentropy(torch.randn(100), m=m),
)


# ---- what a normalizer computes ----


@pytest.mark.parametrize(
    "ours, plain",
    [
        (BatchNormalNorm2d(6, alpha=0.0), nn.BatchNorm2d(6)),
        (
            InstanceNormalNorm2d(6, affine=True, alpha=0.0),
            nn.InstanceNorm2d(6, affine=True),
        ),
        (GroupNormalNorm(2, 6, alpha=0.0), nn.GroupNorm(2, 6)),
        (LayerNormalNorm((6, 5, 5), alpha=0.0), nn.LayerNorm((6, 5, 5))),
    ],
)
def test_units_and_channels_are_those_of_the_plain_normalizer(ours, plain):
    """Without the transform; whatever γ and β are. (The plain ones' values and
    rows: the chapter.)
    """
    with torch.no_grad():
        for p in (*ours.parameters(), *plain.parameters()):
            p.normal_()
    x = torch.randn(7, 6, 5, 5) ** 3
    for by in ("unit", "channel"):
        found, expected = (
            pre_affine(nn.Sequential(layer), x, by=by)["0"]
            for layer in (ours, plain)
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="'unit' or 'channel'"):
        pre_affine(nn.Sequential(ours), x, by="sample")


def test_channels_of_tokens_are_features():
    x = torch.randn(3, 11, 8)
    model = nn.Sequential(nn.LayerNorm(8))
    rows, channels = (
        pre_affine(model, x)["0"],
        pre_affine(model, x, by="channel")["0"],
    )
    assert rows.shape == (33, 8) and torch.equal(rows.T, channels)


# ---- figures ----


def test_figures_of_impossible_data_are_refused():
    pytest.importorskip("matplotlib")
    import matplotlib.pyplot as plt

    from normalnorm import plots

    fig, ax = plt.subplots()
    x = torch.arange(50.0, dtype=torch.float64) ** 2
    assert abs(plots.qq_plot(ax, x) - qq_r2(x).item()) < 1e-12
    with pytest.raises(ValueError, match="2 values, 0 of them NaN"):
        plots.qq_plot(ax, [1.0, 2.0])
    with pytest.raises(ValueError, match="1 of them NaN or infinite"):
        plots.qq_plot(ax, torch.tensor([1.0, 2.0, math.nan, 4.0]))
    plt.close(fig)
