import importlib
import importlib.util

import pytest
import torch

from normalnorm.experiments import hub, idx, mnist1d, results, tables


@pytest.fixture
def listed(monkeypatch):
    "Makes a recipe the only one that the package seems to have."

    def alone(recipe):
        for module in (results, tables):
            monkeypatch.setattr(module, "recipes", lambda: {"known": recipe})
        return recipe

    return alone


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    "No hub, no cache of an earlier test, no folder of the user."
    monkeypatch.delenv("NORMALNORM_DATASETS", raising=False)
    if importlib.util.find_spec("datasets"):
        datasets = importlib.import_module("datasets")
        datasets.disable_progress_bars()
        datasets.utils.logging.set_verbosity(50)
        cache = tmp_path / "cache"
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        monkeypatch.setattr(hub, "_reachable", lambda library: False)
    for cached in (hub._small, hub._fingerprint, mnist1d._whole, idx._fashion):
        cached.cache_clear()


@pytest.fixture
def nothing_is_drawn(monkeypatch):
    "On the meta device, where PyTorch takes its time over each of a thousand."
    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, **k: self)
