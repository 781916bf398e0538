"Two workers share two cores: one thread each. The checkout's root is importable, for the tests of tools."
import os
import platform
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)
os.environ["NORMALNORM_QUIET"] = "1"                    # no line of the kernel's compilation among the results


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=[("-march=x86-64-v3",), ("-march=x86-64",)], ids=["AVX2", "no vector extensions"])
def older_processor(request, monkeypatch, tmp_path):
    "The kernel compiled anew for an older processor, which this one can be, too."
    from normalnorm.layers import compiler, native
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the flags are for x86-64")
    monkeypatch.setattr(compiler, "_PROCESSOR", (request.param,))
    monkeypatch.setenv("NORMALNORM_CACHE", str(tmp_path))
    native._library.cache_clear()
    yield
    native._library.cache_clear()
