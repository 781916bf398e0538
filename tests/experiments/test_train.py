"Training: resumed, interrupted, diverged, averaged, on two processes."

import copy
import errno
import io
import json
import math
import os
import random
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from torch import nn

from normalnorm.experiments import models
from normalnorm.experiments import train as loop
from normalnorm.experiments.optimization import (
    Settings,
    groups_by_name,
    learning_rate,
    make_optimizer,
)
from normalnorm.experiments.train import (
    Bar,
    CheckpointError,
    TrainingDiverged,
    average_of,
    cross_entropy,
    evaluate,
    make_fabric,
    seed_for,
    seeded,
    take_terms,
    train,
    write_atomically,
)
from normalnorm.layers.normality import BatchNormalNorm2d
from tests.experiments.known import python
from tests.refusals import refusals

SMALL = {
    split: (
        torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(n)),
        torch.arange(n) % 10,
    )
    for split, n in (("train", 50), ("validation", 20), ("test", 30))
}
X, Y = SMALL["train"]
SHORT = Settings(epochs=4, batch=16, lr=0.05)


def _model(seed=0, width=3):
    with seeded("weights", seed):
        return models.SmallResNet(
            width=width, stem_stride=1, norm=BatchNormalNorm2d
        )


def _timeless(outcome):
    return {
        **outcome,
        "test_right": outcome["test_right"].tolist(),
        "seconds": 0,
        "history": [{**epoch, "seconds": 0} for epoch in outcome["history"]],
    }


class Shuffled:
    """An augmentation that draws numbers, and makes class probabilities of
    class numbers.
    """

    def __call__(self, x, y):
        other = torch.randperm(len(x))
        share = torch.rand(())
        one_hot = nn.functional.one_hot(y, 10).float()
        return (
            share * x + (1 - share) * x[other],
            share * one_hot + (1 - share) * one_hot[other],
        )


def shifted(model, x, y):
    assert model.training
    return x + torch.randn_like(x, requires_grad=True), y


def resumed(after, file, data=SMALL, model=None, **given):
    """What a run is that another one, ended after an epoch, or in a step of one
    after checkpoints within, left to a new model.
    """

    def interrupt(line):
        if line.startswith(f"epoch {after}/"):
            raise KeyboardInterrupt

    def within(epoch, epochs, step, *more):
        if (epoch, step) == after:
            raise KeyboardInterrupt

    interrupt.step, given["checkpoint"] = within, file
    lines, where = [], f"epoch {after} "
    if isinstance(after, tuple):
        given["minutes"], where = 0, f"step {after[1] - 1} of epoch {after[0]} "
    with pytest.raises(KeyboardInterrupt):
        train(_model(), copy.deepcopy(data), progress=interrupt, **given)
    torch.manual_seed(99)
    found = train(model or _model(), data, progress=lines.append, **given)
    assert lines[0].startswith(f"continued after {where}")
    return found


@pytest.mark.parametrize(
    "options, after, more",
    [
        ({"optimizer": "sgd", "nesterov": True}, 1, {}),
        ({"optimizer": "adamw"}, 3, {}),
        ({"optimizer": "rmsprop", "lr": 1e-3, "average": "ema"}, 2, {}),
        (
            {
                "average": "swa",
                "average_from": 2,
                "accumulate": 2,
                "schedule": "cosine",
                "warmup": 1,
            },
            3,
            {},
        ),
        ({"precision": "bf16-mixed", "no_decay": ("1d",)}, 2, {}),
        (
            {
                "optimizer": "rmsprop_tf",
                "lr": 1e-3,
                "eps": 1e-3,
                "clip_norm": 0.5,
                "validate_every": 3,
            },
            2,
            {},
        ),
        ({}, 1, {"perturb": shifted}),
        ({"channels_last": True, "average": "ema"}, 2, {}),
        (
            {
                "optimizer": "muon",
                "nesterov": True,
                "schedule": "linear",
                "groups": {"1d": {"rate": 0.5, "momentum": 0.8}},
            },
            2,
            {},
        ),
    ],
)
def test_interrupted_run_ends_as_an_uninterrupted_one(
    options, after, more, tmp_path
):
    """With the layers' noise, shuffling and an augmentation that draws numbers;
    after an epoch, and in the last step of the next one.
    """
    more = {
        "settings": Settings(
            **{"epochs": 4, "batch": 16, "lr": 0.01, "label_smoothing": 0.1}
            | options
        ),
        "seed": 3,
        "augment": Shuffled(),
        **more,
    }
    whole, state = _model(), torch.get_rng_state()
    expected = train(whole, SMALL, **more)
    assert torch.equal(torch.get_rng_state(), state)
    for when in (after, (after + 1, 3)):
        folder, continued = tmp_path / str(when), _model(seed=8)
        found = resumed(when, folder / "c.pt", model=continued, **more)
        assert _timeless(found) == _timeless(expected)
        assert ("averaged" in found) == ("average" in options)
        torch.testing.assert_close(
            continued.state_dict(), whole.state_dict(), rtol=0, atol=0
        )
        assert [p.name for p in folder.iterdir()] == ["c.pt"]


def test_order_noise_and_augmentation_have_numbers_of_their_own():
    """Whatever the layers draw, the batches are the same; whatever the
    augmentation draws, what the layers draw is.
    """
    seen, drawn = {}, {}

    class Spy(nn.Module):
        def __init__(self, draws):
            super().__init__()
            self.net, self.draws = nn.Linear(64, 10), draws

        def forward(self, x):
            if self.training:
                seen[case].append(x.clone())
                drawn[case].append(torch.rand(self.draws))
            return self.net(x.flatten(1))

    for case in ((0, None), (2, None), (2, Shuffled())):
        seen[case], drawn[case] = [], []
        draws, augment = case
        train(
            Spy(draws),
            SMALL,
            Settings(epochs=2, batch=16),
            seed=1,
            augment=augment,
        )
    none, noise, both = seen
    assert len(seen[none]) == 6
    assert all(map(torch.equal, seen[none], seen[noise]))
    assert not torch.equal(seen[none][0], seen[none][3])
    assert all(map(torch.equal, drawn[noise], drawn[both]))


def test_seeds_reach_other_devices_and_are_put_back(monkeypatch):
    "A stand-in for a device that this machine lacks; and `torch.manual_seed`."
    device = Mock(**{"get_rng_state.return_value": "before"})
    monkeypatch.setattr(torch, "mps", device)
    with pytest.raises(OSError), seeded("noise", 3, 1, "mps"):
        device.inside()
        raise OSError
    assert device.mock_calls == [
        call.get_rng_state(),
        call.manual_seed(seed_for("noise", 3, 1)),
        call.inside(),
        call.set_rng_state("before"),
    ]
    torch.manual_seed(seed_for("noise", 3, 1))
    expected = torch.randn(5)
    with seeded("noise", 3, 1):
        assert torch.equal(torch.randn(5), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_seeds_reach_the_gpu_and_are_put_back():
    torch.cuda.manual_seed(1)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(1)
    with seeded("noise", 3, 1, "cuda"):
        inside = torch.rand(3, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    torch.manual_seed(seed_for("noise", 3, 1))
    assert torch.equal(torch.rand(3, device="cuda"), inside)


@pytest.mark.parametrize(
    "minutes, callbacks, written",
    [
        (0, [], [1, 2, 3, 4, 5, 6]),
        (2, [], [2, 3, 5, 6]),
        (10, [], [3, 6]),
        (0, [print], [3, 6]),
    ],
)
def test_a_checkpoint_within_an_epoch_comes_when_it_is_time(
    minutes, callbacks, written, monkeypatch, capsys
):
    "Three steps an epoch, each of a minute; for an instrument at ends only."
    found, progress = [], Mock()
    steps = lambda: progress.step.call_count
    clock = SimpleNamespace(perf_counter=lambda: 60.0 * steps())
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(
        loop, "write_atomically", lambda *_: found.append(steps())
    )
    train(
        _linear(),
        SMALL,
        Settings(epochs=2, batch=16),
        checkpoint="nowhere",
        progress=progress,
        callbacks=callbacks,
        minutes=minutes,
    )
    assert found == written


def test_checkpoints_of_other_runs_are_refused(tmp_path):
    file = tmp_path / "c.pt"
    train(_model(), SMALL, SHORT, seed=1, checkpoint=file)
    for width, settings, seed, words in (
        (3, SHORT, 2, "seed=1 there, 2 here"),
        (3, replace(SHORT, lr=0.1), 1, "lr=0.05 there, 0.1 here"),
        (5, SHORT, 1, "belongs to another model"),
    ):
        with pytest.raises(CheckpointError, match=words):
            train(_model(width=width), SMALL, settings, seed, checkpoint=file)
    with pytest.raises(CheckpointError, match="cannot be read.*delete it"):
        train(_model(), SMALL, SHORT, checkpoint=tmp_path)


def test_no_damaged_checkpoint_is_continued(tmp_path):
    """Each of 200 flipped bits, of cuts anywhere and of lengthened files gives
    the same clear error; so does a whole file of an older version. The whole
    one is continued.
    """
    file = tmp_path / "c.pt"
    train(_model(), SMALL, SHORT, seed=1, checkpoint=file)
    whole = file.read_bytes()
    generator = random.Random(0)
    wrong = {
        "longer": whole + b"\0",
        "hello": b"hello",
        "no last line": whole[:-73],
    }
    for first in [8 * len(whole)] * 160 + [600] * 40:
        bit = 8 * len(whole) - 1 - generator.randrange(first)
        wrong[f"bit {bit}"] = bytearray(whole)
        wrong[f"bit {bit}"][bit // 8] ^= 1 << bit % 8
    for part in (range(200), range(200, len(whole), 997), range(-200, 0)):
        wrong |= {f"cut at {end}": whole[:end] for end in part}
    # both are as before where a checkpoint is refused, and making one of each
    # for every try takes ten times as long as the tries
    model, fabric = _model(), make_fabric()
    for name, content in wrong.items():
        file.write_bytes(content)
        with pytest.raises(CheckpointError) as error:
            train(model, SMALL, SHORT, seed=1, checkpoint=file, fabric=fabric)
        assert re.search(
            rf"{file} cannot be read .*(a bit was turned|it was cut off)"
            ".*: delete it to start the run again",
            str(error.value),
        ), (name, error.value)
        assert file.read_bytes() == content
    file.write_bytes(whole)
    assert (
        len(train(_model(), SMALL, SHORT, seed=1, checkpoint=file)["history"])
        == SHORT.epochs
    )


@pytest.mark.parametrize("every, batch", [(1, 500), (0, 7)])
def test_the_test_set_is_looked_at_in_the_end(every, batch, monkeypatch):
    """Validation (20) each epoch or never; test (30) and training only at the
    end, and for the chosen weights where they are others than the last.
    """
    looked = []

    def spy(model, part, batch, device):
        looked.append((len(part), batch))
        return evaluate(model, part, batch, device)

    monkeypatch.setattr(loop, "evaluate", spy)
    outcome = train(
        _model(),
        SMALL,
        replace(SHORT, validate_every=every, evaluation_batch=batch),
    )
    sizes = (
        [20] * (4 if every else 1)
        + [30, 50]
        + [30] * (every and outcome["chosen"]["epoch"] < 4)
    )
    assert looked == [(n, batch) for n in sizes]


@pytest.mark.parametrize(
    "every, epochs",
    [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (0, [5]), (9, [5])],
)
def test_validation_comes_when_it_should_and_changes_nothing(every, epochs):
    plain, found = (
        train(
            _model(),
            SMALL,
            Settings(epochs=5, batch=16, lr=0.05, **more),
        )
        for more in ({}, {"validate_every": every})
    )
    assert [
        e["epoch"] for e in found["history"] if "validation_loss" in e
    ] == epochs
    assert [e["train_loss"] for e in found["history"]] == [
        e["train_loss"] for e in plain["history"]
    ]
    assert found["last"] == plain["last"]
    assert ("chosen" in found) == (every > 0)
    if every:
        best = max(
            [plain["history"][epoch - 1] for epoch in epochs],
            key=lambda e: e["validation_accuracy"],
        )
        for key in ("epoch", "validation_accuracy", "validation_loss"):
            assert found["chosen"][key] == best[key]
        assert best["epoch"] < 5 or found["chosen"] == found["last"]


def test_outcome_has_accuracy_and_loss_and_which_images_were_right(tmp_path):
    """Recomputed from the weights: the model's last ones, those of the chosen
    epoch as a callback saw them, the averaged ones of the checkpoint. The last
    step forgets what was learned, so that an earlier epoch is chosen.
    """
    data = {
        "train": (X, Y),
        "validation": (X[:20], Y[:20]),
        "test": (X[10:40], Y[10:40]),
    }

    @torch.no_grad()
    def look(moment):
        if (moment.when, moment.step) == ("step", 12):
            moment.model[1].weight.zero_()
        if moment.when == "epoch":
            seen.append(copy.deepcopy(moment.model))

    seen, file = [], tmp_path / "c.pt"
    outcome = train(
        _linear(),
        data,
        replace(SHORT, average="ema", average_decay=0.5, evaluation_batch=7),
        checkpoint=file,
        callbacks=[look],
    )
    averaged = average_of(_linear())
    averaged.load_state_dict(torch.load(file, weights_only=True)["average"])
    chosen = outcome["chosen"]["epoch"]
    assert chosen < 4
    for which, epoch, model in (
        ("last", 4, seen[-1]),
        ("averaged", 4, averaged.module),
        ("chosen", chosen, seen[chosen - 1]),
    ):
        expected = {"epoch": epoch}
        for split in ("validation", "test"):
            found = evaluate(model, data[split])
            expected[f"{split}_accuracy"] = found.accuracy
            expected[f"{split}_loss"] = pytest.approx(found.loss, rel=1e-6)
        assert outcome[which] == expected
    assert torch.equal(
        outcome["test_right"], evaluate(seen[-1], data["test"]).right
    )


test_wrong_settings_are_refused = refusals(
    [
        (wrong, "did you mean|expected|is not a")
        for wrong in (
            {"optimizer": "sdg"},
            {"schedule": "one-cycle"},
            {"epochs": 0},
            {"lr": 0.0},
            {"lr": math.nan},
            {"lr": "0.1"},
            {"batch": 12.5},
            {"batch": 1},
            {"weight_decay": -1.0},
            {"batch": 10, "accumulate": 3},
            {"accumulate": 0},
            {"label_smoothing": 1.0},
            {"average": "sma"},
            {"warmup": 1.0},
            {"warmup": 0.5},
            {"schedule": "cosine", "floor": 1.0},
            {"schedule": "exponential", "every": 0},
            {"precision": "bf16"},
            {"average_decay": 1.0},
            {"schedule": "cosine", "restart_factor": 0.5},
            {"average_from": 2},
            {"validate_every": -1},
            {"evaluation_batch": 0},
            {"clip_norm": -1.0},
            {"clip_norm": math.inf},
            {"clip_value": math.nan},
            {"clip_norm": 1.0, "clip_value": 1.0},
            {"channels_last": "True"},
            {"groups": {"1d": {"lr": 1.0}}},
            {"groups": {"1d": {"rate": -1.0}}},
        )
    ],
    lambda wrong: Settings(**{"epochs": 1, **wrong}),
)


@pytest.mark.parametrize(
    "least",
    [
        {"batch": 2},
        {"steps": 0},
        {"batch": 10, "accumulate": 10},
        {"label_smoothing": 0.0},
        {"average_decay": 0.0},
        {"average_from": 1},
        {"warmup": 0.0},
        {"weight_decay": 0.0},
        {"schedule": "cosine", "restart_factor": 1.0},
        {"schedule": "cosine", "floor": 0.1, "lr": 0.1},
        {"warmup_from": 1.0},
        {"validate_every": 0},
        {"evaluation_batch": 1},
        {"clip_norm": 0.0},
        {"clip_value": 0.0},
        {"groups": {"1d": {"rate": 0.0, "momentum": 0.0}}},
    ],
)
def test_settings_at_the_end_of_their_range_are_accepted(least):
    made = Settings(**{"epochs": 1, **least})
    assert {key: getattr(made, key) for key in least} == least


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 100])
def test_one_cycle_is_finite_for_any_length(steps):
    assert all(
        0
        < learning_rate(Settings(epochs=1, lr=0.1), step, steps)
        <= 0.1 + 1e-15
        for step in range(steps)
    )


def test_evaluate_is_exact_and_keeps_the_mode():
    model = nn.Sequential(
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)
    ).train()
    images, labels = SMALL["test"]
    accuracy, loss, right = evaluate(model, (images, labels), batch=7)
    scores = model[2](images.flatten(1))
    assert model.training and torch.equal(right, scores.argmax(1) == labels)
    assert accuracy == right.double().mean().item()
    assert abs(loss - nn.functional.cross_entropy(scores, labels).item()) < 1e-6
    # statistics of the batch in evaluation mode: the test batch counts
    free = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), model)
    found = {
        batch: evaluate(free, (images, labels), batch).loss
        for batch in (30, 10)
    }
    by_hand = torch.cat([free.eval()(part) for part in images.split(10)])
    assert (
        abs(found[10] - nn.functional.cross_entropy(by_hand, labels).item())
        < 1e-6
        < abs(found[30] - found[10])
    )
    # a text: three positions in each of two windows, one after the other
    scores = torch.eye(4)[torch.tensor([[0, 1, 2], [3, 0, 1]])]
    found = evaluate(
        nn.Identity(), (scores, torch.tensor([[0, 1, 1], [3, 2, 1]])), batch=1
    )
    assert found.right.tolist() == [True, True, False, True, False, True]


def test_decay_is_excluded_by_name_and_by_shape():
    model = _model()
    groups = groups_by_name(
        model,
        Settings(
            epochs=1, weight_decay=0.3, no_decay=("1d", "!*.norm2.weight")
        ),
    )
    names = {id(p): name for name, p in model.named_parameters()}
    decaying, rest = (
        [names[id(p)] for p in group["params"]] for group in groups
    )
    assert [g["weight_decay"] for g in groups] == [0.3, 0.0] and sorted(
        decaying + rest
    ) == sorted(names.values())
    assert all(
        ("norm" in n or "shortcut.1" in n or "bias" in n)
        and not n.endswith("norm2.weight")
        for n in rest
    ) and any(n.endswith("norm2.weight") for n in decaying)
    assert len(groups_by_name(model, Settings(epochs=1))) == 1
    model.stem.weight.requires_grad_(False)
    assert all(
        names[id(p)] != "stem.weight"
        for g in groups_by_name(model, Settings(epochs=1))
        for p in g["params"]
    )


def test_groups_have_rates_of_their_own():
    own = {"*.bias": {"weight_decay": 0.0}, "1.*": {"rate": 3.0}}
    first, other = (_linear() for _ in range(2))
    for model, groups, lr in ((first, own, 0.01), (other, {}, 0.03)):
        settings = Settings(
            epochs=1, batch=16, weight_decay=0.0, lr=lr, groups=groups
        )
        train(model, SMALL, settings)
    torch.testing.assert_close(first.state_dict(), other.state_dict())
    groups = groups_by_name(
        _linear(), Settings(epochs=1, weight_decay=0.1, groups=own)
    )
    assert [
        (len(g["params"]), g["weight_decay"], g["rate"]) for g in groups
    ] == [(1, 0.1, 3.0), (1, 0.0, 3.0)]


def test_callbacks_come_when_they_should_and_change_nothing(tmp_path):
    "What they add to the record is there for the next process, too."
    settings, seen = Settings(epochs=2, batch=16), []

    def callback(moment):
        seen.append((moment.when, moment.epoch, moment.step))
        moment.model.eval()
        torch.rand(5)
        if moment.when == "gradient":
            assert all(p.grad is not None for p in moment.model.parameters())
            assert moment.loss.isfinite()
        if moment.when == "epoch":
            moment.record["extra"] = moment.epoch * 10

    steps = [
        [("gradient", epoch, k - 1), ("step", epoch, k)]
        for epoch, ks in ((1, (1, 2, 3)), (2, (4, 5, 6)))
        for k in ks
    ]
    plain = train(_model(), SMALL, settings)
    for callbacks in ([callback], []):
        found = train(
            _model(),
            SMALL,
            settings,
            callbacks=callbacks,
            checkpoint=tmp_path / "c.pt",
        )
        assert [e.pop("extra") for e in found["history"]] == [10, 20]
        assert _timeless(found) == _timeless(plain)
    assert seen == [
        ("start", 1, 0),
        *sum(steps[:3], []),
        ("epoch", 1, 3),
        *sum(steps[3:], []),
        ("epoch", 2, 6),
        ("end", 2, 6),
    ]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, BatchNormalNorm2d])
def test_channels_last_is_the_same_run_in_another_layout(norm):
    "Of images and weights, at each convolution of three by three."
    colour = {
        split: (x.repeat(1, 3, 1, 1), y) for split, (x, y) in SMALL.items()
    }
    losses = []

    def look(module, args):
        for of in (*args, module.weight):
            assert of.is_contiguous(memory_format=torch.channels_last) == last
            assert of.is_contiguous() != last

    for last in (False, True):
        with seeded("weights", 0):
            model = models.SmallResNet(channels=3, stem_stride=1, norm=norm)
        for module in model.modules():
            if getattr(module, "kernel_size", 0) == (3, 3):
                module.register_forward_pre_hook(look)
        outcome = train(model, colour, replace(SHORT, channels_last=last))
        losses.append([e["train_loss"] for e in outcome["history"]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def _linear():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


PLAIN = {
    "epochs": 3,
    "batch": 16,
    "lr": 0.05,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "schedule": "constant",
}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"accumulate": 4},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
    ],
    ids=str,
)
def test_half_the_squared_weights_as_a_penalty_are_weight_decay(changed):
    """λ/2 · Σθ² added to the loss has the gradient λθ, which is what weight
    decay adds; whatever the parts of a batch and the arithmetic.
    """

    def half_of_squares(model):
        return 0.15 * sum(p.square().sum() for p in model.parameters())

    model, expected = _linear(), _linear()
    found = train(
        model, SMALL, Settings(**PLAIN | changed), penalty=half_of_squares
    )
    plain = train(
        expected, SMALL, Settings(**PLAIN | changed | {"weight_decay": 0.3})
    )
    rough = 1e-2 if "bf16" in changed.get("precision", "") else 1e-5
    torch.testing.assert_close(
        [*model.parameters()],
        [*expected.parameters()],
        rtol=rough,
        atol=rough * 1e-2,
    )
    # the recorded loss is that without the penalty, which has its own entry
    for ours, theirs in zip(found["history"], plain["history"], strict=True):
        assert ours["train_loss"] == pytest.approx(
            theirs["train_loss"], rel=rough
        )
        assert ours["train_penalty"] > 0 and "train_penalty" not in theirs
    # the last entry: the penalties before each of the epoch's three steps
    assert found["history"][0]["train_penalty"] == pytest.approx(
        half_of_squares(_linear()).item(), rel=0.1
    )


class Leaves(nn.BatchNorm2d):
    "Leaves a term of what it sees for the loss, as often as it is called."

    def forward(self, x):
        if self.training:
            self.loss_term = x.mean((0, 2, 3)).square().sum()
        return super().forward(x)


def _leaving():
    with seeded("weights", 0):
        return models.SmallResNet(width=3, stem_stride=1, norm=Leaves)


def test_terms_of_modules_are_taken_away_in_a_compiled_model_too():
    "By hand, of a model that is not compiled: the chapter."
    found = {}
    for compiled in ("", "eager"):
        model, settings = _leaving(), PLAIN | {"epochs": 1, "compile": compiled}
        found[compiled] = train(
            model,
            SMALL,
            Settings(**settings),
            penalty=lambda model: 0.7 * take_terms(model),
        )["history"][0]["train_penalty"]
        copy.deepcopy(model)  # nothing is left of a graph
    assert found["eager"] == pytest.approx(found[""], rel=1e-4)


def _part(x, y):
    return {"data": {**SMALL, "train": (x, y)}}


def _refused(settings, given):
    given = {"model": _linear(), "data": SMALL} | given
    if given["model"] == "leaving":
        given["model"] = _leaving()
    if given["data"] == "stream":
        given["data"] = {**SMALL, "train": Endless()}
    train(settings=Settings(**PLAIN | settings), **given)


test_what_cannot_be_trained_is_refused = refusals(
    [
        ({"batch": 64}, {}, "50 training images do not fill one batch of 64"),
        ({"steps": 4}, {}, "do not fill steps=4 batches of 16"),
        ({}, _part(X, Y + 3), "with 10 classes: give the model classes=13"),
        ({}, _part(X, Y[1:]), "50 inputs and 49 targets"),
        ({"channels_last": True}, _part(X[:, 0], Y), r"shape \(16, 8, 8\)"),
        ({}, {"model": "leaving"}, "no penalty takes it .stem_norm, "),
        (
            {},
            {
                "model": "leaving",
                "penalty": lambda m: m.stem.weight.abs().sum(),
            },
            "no penalty takes it",
        ),
        ({}, {"penalty": take_terms}, "no module of Sequential left a term"),
        ({}, {"penalty": lambda model: 0.3}, "returned 0.3"),
        ({}, {"penalty": lambda model: model[1].weight}, r"shape \(10, 64\)"),
        (
            {},
            {"penalty": lambda model: model[1].weight.sum().detach()},
            "without a gradient",
        ),
        (
            {},
            {"penalty": lambda model: math.nan * model[1].weight.sum()},
            TrainingDiverged,
            "the loss is nan at step 1.*no checkpoint",
        ),
        *(
            (
                {},
                {"perturb": wrong},
                "pair of inputs and targets, as many as it got .16",
            )
            for wrong in (lambda model, x, y: x, lambda model, x, y: (x[:3], y))
        ),
        (
            {"precision": "bf16-true"},
            {"perturb": lambda model, x, y: (x, y)},
            "perturb= with precision='bf16-true'",
        ),
        ({}, {"data": "stream"}, "give the steps of an epoch"),
        (
            {"steps": 3, "batch": 8},
            {"data": "stream"},
            "yields batches of 16, and the settings say 8",
        ),
    ],
    _refused,
)


def test_a_perturbation_leaves_no_trace_but_its_minibatch():
    """One that returns what it got, but draws numbers, goes forward and back in
    another mode and moves buffers: the run is the same, bit for bit.
    """

    def rude(model, x, y):
        model.eval()
        model.stem_norm.train()
        torch.rand(3)
        nn.functional.cross_entropy(model(x + 1), y).backward()
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.add_(1)
        return x + torch.zeros_like(x, requires_grad=True), y

    def without_its_graph(module, args):
        assert not args[0].requires_grad

    settings = Settings(epochs=2, batch=16, accumulate=2, lr=0.05)
    plain, ours = _model(), _model()
    ours.register_forward_pre_hook(without_its_graph)
    assert _timeless(
        train(ours, SMALL, settings, seed=3, perturb=rude)
    ) == _timeless(train(plain, SMALL, settings, seed=3))
    torch.testing.assert_close(
        ours.state_dict(), plain.state_dict(), rtol=0, atol=0
    )


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "clip, clipped",
    [
        ({"clip_norm": 0.05}, lambda g, whole: g * 0.05 / whole.norm()),
        ({"clip_value": 0.01}, lambda g, whole: g.clamp(-0.01, 0.01)),
        # a limit that nothing reaches
        ({"clip_norm": 1e6}, lambda g, whole: g),
    ],
)
def test_clipped_gradients_by_hand(clip, clipped, accumulate):
    model, by_hand = _linear(), _linear()

    def look(moment):
        if moment.when == "gradient":
            parameters = list(moment.model.parameters())
            whole = torch.cat([p.grad.flatten() for p in parameters])
            assert whole.norm() > 0.05
            assert whole.abs().max() > 0.01
            for p, q in zip(by_hand.parameters(), parameters, strict=True):
                p.data -= 0.05 * clipped(q.grad, whole)

    train(
        model,
        SMALL,
        Settings(**PLAIN, **clip, accumulate=accumulate),
        callbacks=[look],
    )
    torch.testing.assert_close(
        model.state_dict(), by_hand.state_dict(), rtol=1e-4, atol=1e-7
    )


test_what_cannot_be_measured_or_left_alone = refusals(
    [
        (lambda: evaluate(_linear(), (X[:0], Y[:0])), "nothing to evaluate"),
        (
            lambda: make_optimizer(
                _linear(), Settings(epochs=1, no_decay=("*.gamma",))
            ),
            r"'\*.gamma' matches no parameter",
        ),
    ]
)


def test_tensorflows_rmsprop_without_timm_says_what_to_install(monkeypatch):
    settings = Settings(epochs=1, optimizer="rmsprop_tf")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[timm\]"'):
        make_optimizer(_linear(), settings)


test_wrong_targets_are_refused = refusals(
    [
        (Y[:6] + 5, "class numbers from 5 to 10, and a model with 5 classes"),
        (
            Y[:6].view(3, 2),
            r"scores of shape \(6, 5\) and class numbers of shape \(3, 2\)",
        ),
        (torch.rand(6, 4), "class probabilities of shape"),
    ],
    lambda targets: cross_entropy(torch.randn(6, 5), targets),
)


class OnDisk:
    "A set that is not in memory: made batch by batch."

    def __init__(self, part):
        self.part, self.indices = part, []

    def __len__(self):
        return len(self.part[1])

    def __getitem__(self, index):
        self.indices.append(index)
        return self.part[0][index], self.part[1][index]


def test_sets_outside_the_memory_give_the_same_run():
    sets = {split: OnDisk(part) for split, part in SMALL.items()}
    assert _timeless(train(_model(), sets, SHORT, seed=2)) == _timeless(
        train(_model(), SMALL, SHORT, seed=2)
    )
    assert {len(index) for index in sets["train"].indices[:12]} == {16}


class Endless:
    """A stream: passes of five batches; its state is the number of batches
    handed out, and that of passes begun.
    """

    def __init__(self, batch=16):
        self.done, self.passes, self.batch, self.seen = 0, 1, batch, []

    def __iter__(self):
        while self.done < 5 * self.passes:
            x = torch.randn(
                self.batch,
                1,
                8,
                8,
                generator=torch.Generator().manual_seed(self.done),
            )
            self.seen.append(self.done)
            self.done += 1
            yield x, torch.arange(self.batch) % 10
        self.passes += 1

    def state_dict(self):
        return {"done": self.done, "passes": self.passes}

    def load_state_dict(self, state):
        self.done, self.passes = state["done"], state["passes"]


@pytest.mark.parametrize("after, first", [(2, 6), ((2, 3), 5), ((3, 3), 8)])
def test_streams_go_on_where_they_were(after, first, tmp_path):
    "Also where one of their passes has just ended."
    given = {"settings": Settings(epochs=4, batch=16, steps=3, accumulate=2)}
    whole, rest = Endless(), Endless()
    expected = train(_model(), {**SMALL, "train": whole}, **given)
    assert whole.seen == list(range(12))
    assert (
        expected["train_accuracy"] == expected["history"][-1]["train_accuracy"]
    )
    found = resumed(after, tmp_path / "c.pt", {**SMALL, "train": rest}, **given)
    assert rest.seen == list(range(first, 12))
    assert _timeless(found) == _timeless(expected)
    model = _model().eval()
    parts = tuple(torch.cat(part) for part in zip(*Endless()))
    assert evaluate(model, Endless())[0] == evaluate(model, parts)[0]


@pytest.mark.parametrize(
    "kind, when, first, decay",
    [("ema", "step", 0, 0.7), ("swa", "epoch", 1, None)],
)
def test_averaged_weights_against_their_definition(
    kind, when, first, decay, tmp_path
):
    "After each step, or after each epoch from the second on."

    def keep(moment):
        if moment.when == when:
            path.append(copy.deepcopy(moment.model))

    path, file = [], tmp_path / "c.pt"
    with seeded("weights", 0):
        model = models.SmallResNet(width=3, stem_stride=1)
    outcome = train(
        model,
        SMALL,
        replace(SHORT, average=kind, average_decay=0.7, average_from=2),
        callbacks=[keep],
        checkpoint=file,
    )
    found, expected = average_of(model), average_of(model, decay)
    found.load_state_dict(torch.load(file, weights_only=True)["average"])
    for state in path[first:]:
        expected.update_parameters(state)
    assert found.n_averaged == len(path[first:])
    torch.testing.assert_close(
        found.module.state_dict(), expected.module.state_dict()
    )
    model = expected.module.train()
    with seeded("order", 0, 0):
        order = torch.randperm(50)
    for index in order[:48].split(16) if kind == "swa" else ():
        model(SMALL["train"][0][index])  # the buffers are estimated again
    assert outcome["averaged"]["test_loss"] == pytest.approx(
        evaluate(model, SMALL["test"]).loss, rel=1e-5
    )


TWO = """
import json, sys, torch
from torch import nn
from normalnorm.experiments.models import SmallViT
from normalnorm.experiments.optimization import Settings
from normalnorm.experiments.train import make_fabric, seeded, train

def run(fabric, folder):
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    data = {split: (torch.randn(n, 1, 8, 8, generator=g), torch.arange(n) % 10)
            for split, n in (("train", 48), ("validation", 20), ("test", 30))}
    with seeded("weights", 0):
        model = SmallViT(image=8, patch=4, width=8, depth=1, heads=2, hidden=16)
    drawn, seen = [], []

    def look(module, args, output):
        if module.training:
            drawn.append(torch.rand(()).item())
            seen.append(args[0][:, 0, 0, 0].tolist())
    model.register_forward_hook(look)
    outcome = train(
        model, data, Settings(epochs=3, batch=16, lr=0.05, accumulate=2),
        seed=4, checkpoint=f"{folder}/c{fabric.world_size}.pt", fabric=fabric)
    json.dump(
        [[e["train_loss"] for e in outcome["history"]], outcome["last"], drawn,
         seen],
        open(f"{folder}/{fabric.world_size}-{fabric.global_rank}.json", "w"))

if __name__ == "__main__":
    # forked: the imports above take longer than the runs
    make_fabric("cpu", devices=2, strategy="ddp_fork").launch(run, sys.argv[1])
    make_fabric("cpu").launch(run, sys.argv[1])
"""


def test_two_processes_give_the_losses_of_one(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    python("two.py", tmp_path, cwd=tmp_path)
    one, first, second = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("1-0", "2-0", "2-1")
    )
    assert first[0] == pytest.approx(one[0], rel=1e-5)
    assert first[:2] == second[:2]
    assert first[1]["test_accuracy"] == pytest.approx(
        one[1]["test_accuracy"], abs=0.04
    )
    # noise: the first device's is that of one, the second's is its own
    assert first[2] == one[2]
    assert not set(first[2]) & set(second[2])
    # each of 16 examples, two parts
    whole, *shared = (
        [{*a, *b} for a, b in zip(of[3][::2], of[3][1::2], strict=True)]
        for of in (one, first, second)
    )
    for a, b, both in zip(*shared, whole, strict=True):
        assert len(a) == len(b) == 8
        assert a | b == both
    assert (
        len(torch.load(tmp_path / "c2.pt", weights_only=True)["history"]) == 3
    )


def test_one_of_several_processes_has_no_device_by_number(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        ValueError,
        match="one of 2 processes of torchrun.*'cud"
        "a:1' is one device: give 'cuda'",
    ):
        make_fabric("cuda:1")
    # started alone, it is as without torchrun
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert make_fabric("cpu").world_size == 1


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r'pip install "\.\[experiments\]" in the folder',
    ):
        train(_model(), SMALL, SHORT)


def test_lines_and_bar_say_how_it_goes():
    lines = []
    train(_model(), SMALL, SHORT, progress=lines.append)
    assert len(lines) == 4 and all(
        word in lines[0]
        for word in (
            "epoch 1/4",
            "loss",
            "accuracy",
            "validation",
            "examples/s",
            "s left",
        )
    )
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    drawn = io.StringIO()
    train(_model(), SMALL, SHORT, progress=Bar(file=drawn, interval=0.0))
    text = drawn.getvalue()
    assert (
        "epoch 4/4, loss" in text
        and "12/12" in text
        and "examples/s" in text
        and "epoch 2/4  loss" in text
    )


def test_the_rate_of_a_continued_run_counts_what_this_process_did(monkeypatch):
    """One step of 16 examples a second, from step 21 on: 16 examples/s.

    Neither the steps of the process before count, nor the first one here, whose
    time is not known.
    """
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    clock, drawn = [100.0], io.StringIO()
    monkeypatch.setattr(
        loop, "time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    bar = Bar(file=drawn, interval=0.0)
    for step in range(1, 6):
        clock[0] += 1.0
        bar.step(
            3,
            4,
            step,
            10,
            torch.tensor(2.0 * step),
            torch.tensor(8.0 * step),
            16 * step,
        )
        assert step > 1 or "examples/s" not in drawn.getvalue()
    text = drawn.getvalue()
    assert (
        "epoch 3/4, loss 2.0000, accuracy 50.00%, 16 examples/s" in text
        and "25/40" in text
    )


@pytest.mark.parametrize("number", [None, "EPERM", "ENOTSUP", "EMLINK"])
def test_a_row_that_is_there_stays(number, tmp_path, monkeypatch):
    "Also without hard links: some network drives and exFAT know none."
    if number:
        refused = OSError(getattr(errno, number), "no links here")
        monkeypatch.setattr(os, "link", Mock(side_effect=refused))
    file = tmp_path / "row.json"
    for content, replaced, left in (
        (b"first", False, b"first"),
        (b"second", False, b"first"),
        (b"third", True, b"third"),
    ):
        assert write_atomically(
            file, lambda out: out.write(content), replaced
        ) is (left == content)
        assert file.read_bytes() == left
    assert [p.name for p in tmp_path.iterdir()] == ["row.json"]
