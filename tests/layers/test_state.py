"""What was saved loads: state dicts of this library's layers as they were
written at the time (tests/state, one file a layer, `tests.state.record`), and
checkpoints of PyTorch's layers.
"""

import copy
import pickle
from pathlib import Path

import pytest
import torch

from normalnorm.layers.conversion import plain_state_dict
from normalnorm.theory.gradient import Power
from tests.layers.steps import reloaded
from tests.state import record
from tools.references import Reference
from tools.rows import trials

FILES = sorted((Path(__file__).parents[1] / "state").glob("*.pt"))
# Outputs are below 10 and computed in float64 by some tens of operations, none
# of which cancels more than two digits: 1e-12 is about 5,000 roundings of 1.
ROUNDING = dict(rtol=1e-12, atol=1e-12)


def saved(file: Path) -> dict:
    return torch.load(file, weights_only=True)


def test_every_exported_layer_has_a_file():
    files = {saved(file)["class"] for file in FILES}
    assert files == set(record.exported()), "python -m tests.state.record"
    assert len(files) >= 20 and {file.stem for file in FILES} == set(
        record.CASES
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_saved_state_loads_and_computes_the_same(file):
    found = saved(file)
    layer = record.made(found["class"], found["arguments"], found["options"])
    state, fresh = found["state"], layer.state_dict()
    assert list(fresh) == list(state)
    assert any(not torch.equal(fresh[name], state[name]) for name in state)
    layer.load_state_dict(state, strict=True)
    torch.testing.assert_close(
        dict(layer.state_dict()), dict(state), rtol=0, atol=0
    )
    assert found["input"].dtype == found["output"].dtype == torch.float64
    out = record.evaluated(layer, found["input"])
    torch.testing.assert_close(out, found["output"], **ROUNDING)
    copies = [copy.deepcopy(layer)]
    if not hasattr(layer, "parametrizations"):  # a class that has no name
        copies.append(pickle.loads(pickle.dumps(layer)))
    for other in copies:
        assert str(other) == str(layer)
        assert torch.equal(record.evaluated(other, found["input"]), out)


# ---- PyTorch's checkpoints --------------------------------------------------

TWINS = [t for t in trials() if not isinstance(t.theirs(), Reference)]
TWINS += [
    t.having("half way", gaussianizer=Power(0.5))
    for t in TWINS
    if t.name in ("batch2", "layer")
]


@pytest.mark.parametrize("trial", TWINS, ids=str)
def test_a_plain_checkpoint_loads(trial):
    """Strictly, from a file, without the number of batches, as PyTorch wrote it
    before 0.4.1, and in the place of a layer without memory; and computes the
    same: with λ = 1, and where λ is that of the sample, without the transform.
    """
    for options in trial.modes().values():
        plain = trial.theirs(**options)
        with torch.no_grad():
            for p in plain.parameters():
                p.copy_(torch.rand_like(p) + 0.5)
            for seed in range(3):
                plain(record.skewed(trial.shape, seed).float())
        state = reloaded(plain.state_dict())
        old = {k: v for k, v in state.items() if k != "num_batches_tracked"}
        trial.ours(**options).load_state_dict(old, strict=True)
        layer = trial.ours(**options, noise=0.0, device="meta")
        layer.load_state_dict(state, strict=True, assign=True)
        u = record.skewed(trial.shape, 9)
        if getattr(plain, "running_mean", None) is None:
            layer = trial.ours(**options, alpha=0.0, noise=0.0)
            layer.load_state_dict(state)
        torch.testing.assert_close(
            record.evaluated(layer, u), record.evaluated(plain, u), **ROUNDING
        )
        if "decorrelated" in trial.name:  # a covariance is none of the plain's
            continue
        back = trial.theirs(**options)
        back.load_state_dict(
            plain_state_dict(layer.float().state_dict()), strict=True
        )
        for key, value in back.state_dict().items():
            assert torch.equal(value, state[key]), key
