import pytest
import torch.distributed as dist

from normalnorm.layers.sync import _AllProcesses


@pytest.fixture
def exchanging(tmp_path, monkeypatch):
    "Synchronized layers go through their exchanges, in a group of one process."
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    monkeypatch.setattr(_AllProcesses, "_exchanges", lambda self: self.training)
    yield
    dist.destroy_process_group()
