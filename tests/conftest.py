"""Two workers share two cores: one thread each, or as many as
NORMALNORM_TEST_THREADS says.

The checkout's root is importable, for the tests of tools.
"""
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(int(os.environ.get("NORMALNORM_TEST_THREADS", "1")))
# no line of the kernel's compilation among the results
os.environ["NORMALNORM_QUIET"] = "1"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """One folder for all workers of this run; what several of them need is made
    under a lock in it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = ((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
              / "shared")
    folder.mkdir(exist_ok=True)
    return folder
