"The experiments package beyond its chapters: damaged data, killed runs, other versions, known answers."
import hashlib
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from normalnorm.analysis.gaussianity import normalizers, pre_affine, qq_r2
from normalnorm.experiments import data, models
from normalnorm.layers.normality import LayerNormalNorm

ROOT = Path(__file__).resolve().parents[1]
FASHION_SOURCE = Path("/usr/share/datasets/fashion-mnist")


# ---- data ----

@pytest.mark.parametrize("name", data.names())
def test_shipped_files_are_the_recorded_ones(name):
    about = data.info(name)
    content = (data.data_folder() / about.file).read_bytes()
    assert hashlib.sha256(content).hexdigest() == about.sha256 == data.data_hash(name)
    assert len(content) <= 4_000_000
    for split, size in about.sizes.items():
        images, labels = data.load(name, split)
        assert images.shape == (size, *about.shape) and images.dtype == torch.float32 and labels.dtype == torch.int64
        assert labels.min() == 0 and labels.max() == len(about.classes) - 1


def test_licence_and_source_lie_beside_the_data():
    note = (data.data_folder() / "SOURCES.md").read_text(encoding="utf-8")
    assert "Zalando" in note and "MIT" in note and "Alpaydin" in note and "CC" in data.info("digits").licence
    for name in data.names():
        inside = bytes(data.read_archive(data.data_folder() / data.info(name).file, data.data_hash(name))["note"]).decode()
        assert "Licence" in inside and "Source" in inside


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty", "missing", "text"])
def test_damaged_files_are_refused(damage, tmp_path, monkeypatch):
    content = (data.data_folder() / "digits.npz").read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    broken = {"truncated": content[:9000], "one bit": bytes(flipped), "empty": b"", "text": b"<html>404</html>"}
    if damage != "missing":
        (tmp_path / "digits.npz").write_bytes(broken[damage])
    monkeypatch.setenv("NORMALNORM_DATA", str(tmp_path))
    with pytest.raises(data.DataError, match="does not exist" if damage == "missing" else "damaged") as error:
        data.load("digits", "train")
    assert "make_fashion_subset" in str(error.value) and str(tmp_path) in str(error.value)


def test_splits_do_not_change_with_first():
    whole, part = data.load("fashion", "train"), data.load("fashion", "train", first=10)
    assert torch.equal(whole[0][:10], part[0]) and torch.equal(whole[1][:10], part[1])
    part[0].zero_()
    assert data.load("fashion", "train", first=10)[0].abs().sum() > 0         # callers cannot spoil each other's images


@pytest.mark.parametrize("name, hint", [("fashon", "did you mean fashion"), ("digit", "did you mean digits"), ("cifar10", "next version")])
def test_unknown_data_names_say_what_is_known(name, hint):
    with pytest.raises(data.DataError, match=hint):
        data.load(name, "train")
    with pytest.raises(ValueError, match="did you mean validation"):
        data.load("digits", "validaton")


def _script():
    spec = importlib.util.spec_from_file_location("make_fashion_subset", ROOT / "tools" / "make_fashion_subset.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.book
@pytest.mark.skipif(not FASHION_SOURCE.exists(), reason="Debian's package is not installed: apt-get install dataset-fashion-mnist")
def test_script_makes_the_fashion_file_byte_for_byte():
    assert hashlib.sha256(_script().fashion()).hexdigest() == data.data_hash("fashion")


@pytest.mark.book
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed: pip install scikit-learn")
def test_script_makes_the_digits_file_byte_for_byte():
    assert hashlib.sha256(_script().digits()).hexdigest() == data.data_hash("digits")


@pytest.mark.book
def test_script_says_what_is_missing(tmp_path):
    script = _script()
    with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist"):
        script.fashion(tmp_path)
    import gzip
    (tmp_path / "wrong.gz").write_bytes(gzip.compress(b"\0\0\x0d\1\0\0\0\1\0"))
    with pytest.raises(SystemExit, match="not an IDX file"):
        script.read_idx(tmp_path / "wrong.gz")


# ---- models ----

@pytest.mark.parametrize("make", [lambda norm: models.SmallResNet(width=5, norm=norm), lambda norm: models.SmallViT(width=12, depth=2, heads=3, hidden=7, norm=norm)])
def test_models_take_any_normalizer(make):
    made = []
    norm = lambda size: made.append(size) or nn.Identity()          # noqa: E731
    model = make(norm)
    assert made and model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert not normalizers(model)


def test_models_refuse_impossible_sizes():
    with pytest.raises(ValueError, match="multiple of patch=5"):
        models.SmallViT(patch=5)
    with pytest.raises(ValueError, match="positive sizes"):
        models.SmallResNet(width=0)
    with pytest.raises(ValueError, match="made for 49 patches, and the image has 64"):
        models.SmallViT()(torch.zeros(1, 1, 32, 32))


# ---- Gaussianity inside a network ----

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


# ---- figures ----

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
