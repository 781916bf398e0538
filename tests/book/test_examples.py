"What a stranger would write with the library runs, on files like CIFAR-10's."

import pickle
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_cifar.py"


@pytest.fixture
def example():
    if not EXAMPLE.exists():
        pytest.skip("examples/ is in a checkout only")
    return runpy.run_path(str(EXAMPLE))


def test_train_cifar(example, tmp_path, capsys):
    training, testing = example["generate"]()
    parts = zip(*(x.chunk(5) for x in training))
    for name, (images, labels) in {
        **{f"data_batch_{i}": part for i, part in enumerate(parts, 1)},
        "test_batch": testing,
    }.items():
        batch = {b"data": images.flatten(1).numpy(), b"labels": labels.tolist()}
        (tmp_path / name).write_bytes(pickle.dumps(batch))
    for read, made in zip(example["load"](tmp_path), (training, testing)):
        assert all(map(torch.equal, read, made))
    # one in ten without having learnt anything
    right = example["main"]([str(tmp_path), "--steps", "10", "--batch", "32"])
    assert right > 0.25
    assert "step 10: loss" in capsys.readouterr().out
    example["main"](["--generated", "--plain", "--steps", "1", "--batch", "8"])
    with pytest.raises(SystemExit):
        example["main"]([])
