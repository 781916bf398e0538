"Measuring normality, and figures, beyond their chapters."
import math

import numpy as np
import pytest
import torch
from torch import nn

from normalnorm.analysis.gaussianity import normalizers, pre_affine, qq_r2
from normalnorm.experiments import models
from normalnorm.layers.normality import LayerNormalNorm


def test_pre_affine_of_trained_layers_is_noise_free_and_repeatable():
    model = models.SmallViT(width=12, depth=2, heads=3, hidden=7, norm=LayerNormalNorm)
    x = torch.randn(3, 1, 28, 28)
    first, second = pre_affine(model, x), pre_affine(model, x)
    assert list(first) == list(normalizers(model)) and all(torch.equal(first[name], second[name]) for name in first)
    assert all(v.shape == (3 * 49, 12) for v in first.values())
    assert not any(m._forward_hooks for m in model.modules()) and model.blocks[0].norm1.noise == 1.0
    with pytest.raises(ValueError, match="no batch or layer normalizer"):
        pre_affine(nn.Linear(3, 3), torch.zeros(2, 3))


def test_pre_affine_survives_layers_without_affine_map():
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.LayerNorm(4, elementwise_affine=False))
    found = pre_affine(model, torch.randn(9, 4))
    assert found["0"].shape == (4, 9) and found["1"].shape == (9, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_qq_r2_of_any_precision(dtype):
    x = torch.randn(5, 301, dtype=torch.float64).exp().to(dtype)
    expected = qq_r2(x.double())
    assert qq_r2(x).dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(qq_r2(x).double(), expected, rtol=1e-5, atol=0)


def test_figures_have_the_same_bytes_and_no_unknown_colours():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("svg")
    import re

    import matplotlib.pyplot as plt

    from normalnorm import plots
    plots.book_style()

    def draw():
        fig, axes = plt.subplots(1, 2, layout="constrained")
        r2 = plots.qq_plot(axes[0], np.arange(50.0) ** 2)
        plots.seed_dots(axes[1], {"a": [1.0, 2.0], "b": [2.0, 4.0]}, "accuracy (%)")
        content = plots.svg(fig)
        plt.close(fig)
        return content, r2
    (one, r2), (two, _) = draw(), draw()
    assert one == two and b"matplotlib" not in one.lower().split(b"<defs>")[0].replace(b"matplotlib.org", b"")
    assert {c.decode() for c in re.findall(rb"#[0-9a-f]{6}\b", one)} <= {plots.INK, *plots.PALETTE}
    assert abs(r2 - qq_r2(torch.arange(50.0, dtype=torch.float64) ** 2).item()) < 1e-12


def test_figures_of_impossible_data_are_refused():
    pytest.importorskip("matplotlib")
    import matplotlib.pyplot as plt

    from normalnorm import plots
    fig, ax = plt.subplots()
    with pytest.raises(ValueError, match="2 values, 0 of them NaN"):
        plots.qq_plot(ax, [1.0, 2.0])
    with pytest.raises(ValueError, match="1 of them NaN or infinite"):
        plots.qq_plot(ax, torch.tensor([1.0, 2.0, math.nan, 4.0]))
    with pytest.raises(ValueError, match="b: a standard error needs at least 2 seeds"):
        plots.seed_dots(ax, {"a": [1.0, 2.0], "b": [1.0]}, "x")
    plt.close(fig)
