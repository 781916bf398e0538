"The experiments package beyond its chapters: damaged data, killed runs, other versions, known answers."
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from normalnorm.analysis.gaussianity import normalizers, pre_affine, qq_r2
from normalnorm.experiments import data, models, results
from normalnorm.experiments.results import Recipe, ResultsError, UnknownName
from normalnorm.experiments.train import (
    CheckpointError,
    Settings,
    TrainingDiverged,
    detection_power,
    evaluate,
    learning_rate,
    seeded,
    seeds_needed,
    stream,
    summarize,
    train,
    write_atomically,
)
from normalnorm.layers.normality import BatchNormalNorm2d, LayerNormalNorm

ROOT = Path(__file__).resolve().parents[1]


# ---- training ----

SMALL = {split: (torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(n)), torch.arange(n) % 10) for split, n in
         (("train", 50), ("validation", 20), ("test", 30))}
SHORT = Settings(epochs=4, batch=16, lr=0.05)


def _model(seed=0):
    with seeded("weights", seed):
        return models.SmallResNet(width=3, stem_stride=1, norm=BatchNormalNorm2d)


def _timeless(outcome):
    return {**outcome, "seconds": 0, "history": [{**epoch, "seconds": 0} for epoch in outcome["history"]]}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("after", [1, 3])
def test_interrupted_run_ends_as_an_uninterrupted_one(optimizer, after, tmp_path):
    settings = Settings(epochs=4, batch=16, lr=0.01, optimizer=optimizer)

    def interrupt(line):
        if line.startswith(f"epoch {after}/"):
            raise KeyboardInterrupt

    whole = _model()
    expected = train(whole, SMALL, settings, seed=3)
    with pytest.raises(KeyboardInterrupt):
        train(_model(), SMALL, settings, seed=3, checkpoint=tmp_path / "c.pt", progress=interrupt)
    torch.manual_seed(99)
    continued = _model(seed=8)
    found = train(continued, SMALL, settings, seed=3, checkpoint=tmp_path / "c.pt")
    assert _timeless(found) == _timeless(expected)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), continued.state_dict().values(), strict=True))
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_training_leaves_the_callers_randomness_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(_model(), SMALL, Settings(epochs=1, batch=16))
    assert torch.equal(torch.rand(3), expected)


def test_arms_see_the_same_batches():
    seen = []

    class Spy(nn.Module):
        def __init__(self, noise):
            super().__init__()
            self.net, self.noise = nn.Linear(64, 10), noise

        def forward(self, x):
            if self.training:
                seen[-1].append(x.clone())
            return self.net(x.flatten(1)) + (torch.randn(len(x), 10) if self.noise else 0)

    for noise in (False, True):
        seen.append([])
        train(Spy(noise), SMALL, Settings(epochs=2, batch=16), seed=1)
    assert len(seen[0]) == 6 and all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert not torch.equal(seen[0][0], seen[0][3])


class _Poisoned(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.net, self.at, self.steps = _model(), at, 0

    def forward(self, x):
        self.steps += self.training
        return self.net(x) * (math.nan if self.steps > self.at else 1)


def test_nan_stops_the_run_and_keeps_the_checkpoint(tmp_path):
    with pytest.raises(TrainingDiverged, match="step 2 of epoch 3.*epoch 2 is kept"):
        train(_Poisoned(7), SMALL, SHORT, checkpoint=tmp_path / "c.pt")
    kept = torch.load(tmp_path / "c.pt", weights_only=True)
    assert len(kept["history"]) == 2 and all(torch.isfinite(v).all() for v in kept["model"].values())
    with pytest.raises(TrainingDiverged, match="no checkpoint"):
        train(_Poisoned(0), SMALL, SHORT)


def test_checkpoints_of_other_runs_and_damaged_ones_are_refused(tmp_path):
    file = tmp_path / "c.pt"
    train(_model(), SMALL, SHORT, seed=1, checkpoint=file)
    with pytest.raises(CheckpointError, match="seed=1 there, 2 here"):
        train(_model(), SMALL, SHORT, seed=2, checkpoint=file)
    with pytest.raises(CheckpointError, match="lr=0.05 there, 0.1 here"):
        train(_model(), SMALL, Settings(epochs=4, batch=16, lr=0.1), seed=1, checkpoint=file)
    for content in (file.read_bytes()[:1000], b"", b"hello"):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read.*delete it"):
            train(_model(), SMALL, SHORT, seed=1, checkpoint=file)


def test_validation_chooses_the_first_best_epoch_and_the_test_set_is_not_looked_at(monkeypatch):
    looked = []
    import normalnorm.experiments.train as module
    real = module.evaluate
    monkeypatch.setattr(module, "evaluate", lambda model, part, batch=500: looked.append(len(part[1])) or real(model, part, batch))
    outcome = train(_model(), SMALL, SHORT)
    accuracies = [epoch["validation_accuracy"] for epoch in outcome["history"]]
    assert outcome["chosen"]["epoch"] == accuracies.index(max(accuracies)) + 1
    assert looked == [20] * 4 + [30, 50, 30]                       # validation each epoch; test (30) only at the end, twice


@pytest.mark.parametrize("wrong", [{"optimizer": "sdg"}, {"schedule": "one-cycle"}, {"epochs": 0}, {"lr": 0.0}, {"lr": math.nan}, {"batch": 1}, {"weight_decay": -1.0}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="did you mean|expected"):
        Settings(**{"epochs": 1, **wrong})


def test_too_few_images_for_a_batch():
    with pytest.raises(ValueError, match="50 training images do not fill one batch of 64"):
        train(_model(), SMALL, Settings(epochs=1, batch=64))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 100])
def test_one_cycle_is_finite_for_any_length(steps):
    rates = [learning_rate(Settings(epochs=1, lr=0.1), step, steps) for step in range(steps)]
    assert all(0 < rate <= 0.1 + 1e-15 for rate in rates)


def test_evaluate_is_exact_and_keeps_the_mode():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)).train()
    images, labels = SMALL["test"]
    accuracy, loss = evaluate(model, (images, labels), batch=7)
    scores = model[2](images.flatten(1))
    assert model.training and accuracy == (scores.argmax(1) == labels).double().mean().item()
    assert abs(loss - nn.functional.cross_entropy(scores, labels).item()) < 1e-6


def test_failed_write_leaves_the_old_file(tmp_path):
    file = tmp_path / "deep" / "f"
    write_atomically(file, lambda f: f.write(b"old"))

    def fails(f):
        f.write(b"half")
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, fails)
    assert file.read_bytes() == b"old" and list(file.parent.iterdir()) == [file]


# ---- statistics ----

def test_summary_against_scipy():
    values = [88.1, 88.9, 87.6, 88.4, 89.2]
    s = summarize(values)
    interval = scipy.stats.ttest_1samp(values, 0).confidence_interval()
    np.testing.assert_allclose([s.mean, s.se, s.low, s.high], [np.mean(values), scipy.stats.sem(values), interval.low, interval.high], rtol=1e-12)
    assert math.isnan(summarize([1.0]).se) and summarize([1.0]).mean == 1.0
    with pytest.raises(ValueError, match="given none"):
        summarize([])


def test_power_against_published_values():
    """Cohen's tables for paired t tests at a level of 5 %, two-sided: effect 0.5 and n = 33 give 0.80, 0.8 and 15 give 0.82."""
    assert abs(detection_power(34, 0.5) - 0.80) < 0.015 and abs(detection_power(15, 0.8) - 0.82) < 0.015
    assert abs(detection_power(4, 0.0) - 0.05) < 1e-9 and detection_power(5, -1.0) == pytest.approx(detection_power(5, 1.0), rel=1e-9)
    assert seeds_needed(0.5) == 34 and seeds_needed(1.0) == 10
    with pytest.raises(ValueError, match="2 seeds"):
        detection_power(1, 1.0)
    with pytest.raises(ValueError, match="100 000"):
        seeds_needed(0.0)


def test_streams_differ():
    assert stream("order", 1, 12) != stream("order", 11, 2) and stream("order", 1, 1) != stream("noise", 1, 1)


# ---- results ----

KNOWN = {"a": [1.0, 2.0, 4.0, 5.0], "b": [2.0, 2.5, 5.5, 9.0]}


def _recipe(run=None):
    configs = {arm: {"data": "digits", "arm": arm} for arm in KNOWN}
    return Recipe("known", "known numbers", (), {"smoke": configs, "book": configs},
                  run or (lambda config, seed, arm, **_: {"metrics": {"score": KNOWN[arm][seed]}}), {"score": "score"}, (("a", "b"),), seeds={"smoke": 4})


def test_report_equals_known_answer(tmp_path):
    results.run_recipe(_recipe(), "smoke", out=tmp_path)
    text = results.report(_recipe(), tmp_path)
    for arm, values in KNOWN.items():
        assert f"{np.mean(values):.2f} ± {scipy.stats.sem(values):.2f}" in text, arm
    d = np.subtract(KNOWN["b"], KNOWN["a"])
    low, high = scipy.stats.ttest_rel(KNOWN["b"], KNOWN["a"]).confidence_interval()
    assert f"| {d.mean():+.2f} ± {scipy.stats.sem(d):.2f} | {low:+.2f} … {high:+.2f} | no" in " ".join(text.split())
    assert "scale smoke" in text and "scale book" not in text


def test_one_seed_makes_no_table(tmp_path):
    results.run_recipe(_recipe(), "smoke", seeds=1, out=tmp_path)
    text = results.report(_recipe(), tmp_path)
    assert "one seed only" in text and "±" not in text.split("over seeds")[1]
    with pytest.raises(ValueError, match="one seed"):
        results.table(_recipe(), results.rows(_recipe(), "smoke", tmp_path))
    assert "no finished runs" in results.report(_recipe(), tmp_path / "empty")


def test_finished_runs_are_not_repeated_and_failed_ones_leave_nothing(tmp_path):
    done = []

    def run(config, seed, arm, **_):
        if len(done) == 3:
            raise RuntimeError("power cut")
        done.append((arm, seed))
        return {"metrics": {"score": KNOWN[arm][seed]}}
    with pytest.raises(RuntimeError, match="power cut"):
        results.run_recipe(_recipe(run), "smoke", out=tmp_path)
    assert len(list(tmp_path.rglob("*.json"))) == 3
    results.run_recipe(_recipe(), "smoke", out=tmp_path)
    assert len(list(tmp_path.rglob("*.json"))) == 8 and len(done) == 3


def test_rows_of_other_configurations_leave_the_table(tmp_path):
    results.run_recipe(_recipe(), "smoke", out=tmp_path)
    changed = _recipe()
    changed = Recipe(**{**changed.__dict__, "scales": {"smoke": {arm: {**config, "lr": 1} for arm, config in changed.scales["smoke"].items()}}})
    assert results.rows(changed, "smoke", tmp_path) == []
    assert "8 rows of other configurations are left out" in results.report(changed, tmp_path)


@pytest.mark.parametrize("content, message", [('{"schema":1,"recipe":"kn', "not a row.*delete it"), ("", "not a row"), ("[]", "not a row"),
                                              ('{"schema":2}', "newer normalnorm .schema 2, this one knows 1.*upgrade")])
def test_unreadable_rows_are_reported(content, message, tmp_path):
    results.run_recipe(_recipe(), "smoke", out=tmp_path)
    file = sorted(tmp_path.rglob("*.json"))[0]
    file.write_text(content)
    with pytest.raises(ResultsError, match=message) as error:
        results.report(_recipe(), tmp_path)
    assert str(file) in str(error.value)


def test_unknown_names_list_near_matches(tmp_path):
    with pytest.raises(UnknownName) as error:
        results.run_recipe("first-experimnt", out=tmp_path)
    assert str(error.value) == "no recipe is called 'first-experimnt': did you mean first-experiment?"
    with pytest.raises(UnknownName, match="did you mean smoke"):
        results.run_recipe("first-experiment", scale="smok", out=tmp_path)
    with pytest.raises(UnknownName, match="did you mean.*ResNet BNN"):
        results.run_recipe("first-experiment", arms=["ResNet BNM"], out=tmp_path)
    with pytest.raises(UnknownName, match="first-experiment"):
        results.report("experiment", tmp_path)
    with pytest.raises(ValueError, match="at least one run"):
        results.run_recipe("first-experiment", seeds=0, out=tmp_path)


def test_results_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMALNORM_RESULTS", str(tmp_path / "here"))
    results.run_recipe(_recipe(), "smoke", seeds=1)
    assert len(list((tmp_path / "here").rglob("*.json"))) == 2
    assert "first-experiment" in results.listing() and "smoke" in results.listing()


# ---- the first experiment ----

def test_paper_scale_says_what_is_missing(tmp_path, monkeypatch):
    hub = pytest.importorskip("normalnorm.experiments.hub")
    pytest.importorskip("datasets", reason="without it the error says how to install it: tests/test_data.py")
    monkeypatch.setattr(hub, "_reachable", lambda library: False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.delenv("NORMALNORM_DATASETS", raising=False)
    with pytest.raises(data.DataError, match="cifar10 is not on this machine.*hf download"):
        results.run_recipe("first-experiment", "paper", seeds=1, out=tmp_path)


def test_smoke_scale_runs_and_rows_say_where_they_come_from(tmp_path):
    lines = []
    row, = results.run_recipe("first-experiment", "smoke", seeds=[7], arms=["ResNet BNN"], out=tmp_path, device="cpu", progress=lines.append)
    again = json.loads(next(tmp_path.rglob("*.json")).read_text())
    assert again == json.loads(json.dumps(row)) and row["seed"] == 7 and row["data_hash"] == data.data_hash("digits")
    for key in ("schema", "config", "history", "metrics", "device", "torch", "python", "commit", "source", "wall_seconds", "threads"):
        assert key in row
    assert len(row["history"]) == row["config"]["train"]["epochs"] and any("epoch 2/2" in line for line in lines)
    assert not list((tmp_path / ".checkpoints").iterdir())
    assert row["gaussianity"]["before"].keys() == row["gaussianity"]["after"].keys() and "stem_norm" in row["gaussianity"]["after"]


CHILD = """
import sys, torch
torch.set_num_threads(1)
from normalnorm.experiments import results
results.run_recipe("first-experiment", "smoke", seeds=1, arms=["ResNet BNN", "ViT LNN"], out=sys.argv[1], device="cpu", progress=lambda line: print(line, flush=True))
"""


def test_killed_run_ends_as_an_undisturbed_one(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", CHILD]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, env=environment, stdout=subprocess.DEVNULL)
    for stop in ("epoch 1/", "[2/2]"):
        with subprocess.Popen([*command, str(tmp_path / "killed")], env=environment, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout:
                if line.startswith(stop):
                    time.sleep(0.02)
                    child.send_signal(signal.SIGKILL)
                    break
    subprocess.run([*command, str(tmp_path / "killed")], check=True, env=environment, stdout=subprocess.DEVNULL)
    whole, killed = ({p.name: json.loads(p.read_text()) for p in (tmp_path / name).rglob("*.json")} for name in ("whole", "killed"))
    assert whole.keys() == killed.keys() and len(whole) == 2
    for name, row in whole.items():
        for metric, value in row["metrics"].items():
            assert metric == "seconds" or value == killed[name]["metrics"][metric], (name, metric)


@pytest.mark.book
def test_committed_rows_belong_to_the_present_recipe():
    recipe = results.recipes()["first-experiment"]
    files = sorted((ROOT / "results" / recipe.name / "book").glob("*.json"))
    found = results.rows(recipe, "book", ROOT / "results")
    assert files and len(found) == len(files)
    for arm in recipe.scales["book"]:
        assert sum(row["arm"] == arm for row in found) >= 3, arm
    for row in found:
        assert row["data_hash"] == data.data_hash("fashion") and row["schema"] == 1 and row["history"][-1]["epoch"] == row["config"]["train"]["epochs"]


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
