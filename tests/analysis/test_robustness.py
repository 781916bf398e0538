"""Noise and attacks beyond their chapters: against loops that share no code
with the library, on models of every kind, with bad input.
"""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from normalnorm.analysis.attenuation import noise_attenuation
from normalnorm.analysis.robustness import (
    adversarial_step,
    fgsm,
    margin,
    pgd,
    robust_accuracy,
)
from normalnorm.experiments import models
from normalnorm.layers.normality import BatchNormalNorm2d, LayerNormalNorm
from tests.refusals import refusals
from tests.toys import Of

MEAN, STD = (0.3, 0.5), (0.2, 0.4)
NETWORKS = {
    "batch": lambda: models.SmallResNet(5, 2, 4, stem_stride=1),
    "batch normality": lambda: models.SmallResNet(
        5, 2, 4, stem_stride=1, norm=BatchNormalNorm2d
    ),
    "layer normality": lambda: models.SmallViT(
        5, 2, 8, 4, 12, 2, 3, 7, norm=LayerNormalNorm
    ),
    "dropout": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(128, 9),
        nn.BatchNorm1d(9),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(9, 5),
    ),
}
each_network = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)


def pixels(count=7, seed=3):
    "Standardized images with black and white pixels, and their classes."
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, 8, 8, generator=draw).mul(1.6).sub(0.3).clamp(0, 1)
    mean, std = (torch.tensor(p).reshape(2, 1, 1) for p in (MEAN, STD))
    return ((x - mean) / std, torch.randint(5, (count,), generator=draw))


X, Y = pixels(3)


def network(make, seed=0):
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        model(pixels(31, 5)[0])  # running averages
    return model


# noise


def test_places_by_default_are_the_normalizers_that_are_called():
    model, (x, _) = network(NETWORKS["batch"]), pixels()
    model.unused = nn.BatchNorm2d(3)
    called = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d) and name != "unused"
    ]
    found = noise_attenuation(model, x)
    assert set(found) == {"input", *called, "output"}
    at = "stages.1.norm1"
    found = noise_attenuation(model, x, at=at)
    assert list(found)[0] == at and "stem_norm" not in found
    assert abs(found[at] / 0.01 - 1) < 0.1
    half = noise_attenuation(model, x, scale=0.05, at=at)[at]
    assert math.isclose(half, found[at] / 4, rel_tol=1e-4)


def test_a_module_that_is_called_twice_is_one_place():
    twice = lambda own, x: own.layer(own.layer(x))
    model, x = Of(twice, layer=nn.Linear(3, 3)), torch.randn(5, 3)
    found, about = (
        noise_attenuation(model, x, 0.1, places=["layer"], centered=centered)
        for centered in (False, True)
    )
    assert list(found) == ["input", "layer", "output"]
    assert noise_attenuation(model, x, 0.1, 1)["output"] != found["output"]
    z = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    noisy = x + 0.1 * x.square().mean().sqrt() * z
    with torch.no_grad():
        first, second = model.layer(x), model(x)
        errors = (model.layer(noisy) - first).square().sum() + (
            model(noisy) - second
        ).square().sum()
    torch.testing.assert_close(
        found["layer"],
        (errors / (first.square().sum() + second.square().sum())).item(),
        rtol=1e-5,
        atol=0,
    )
    error = (model(noisy) - second).square().sum()
    torch.testing.assert_close(
        about["output"],
        (error / (second - second.mean(0)).square().sum()).item(),
        rtol=1e-5,
        atol=0,
    )


def test_what_follows_in_place_does_not_reach_a_place():
    model = network(lambda: nn.Sequential(*[nn.LeakyReLU(0.5) for _ in "abc"]))
    x = pixels()[0]
    apart, kept = noise_attenuation(model, x, places=["0", "1"]), x.clone()
    for module in model:
        module.inplace = True
    assert noise_attenuation(model, x, places=["0", "1"]) == apart
    assert torch.equal(x, kept)


def test_words_take_noise_after_their_embedding():
    model = models.LanguageModel(
        vocabulary=11, length=6, width=8, depth=1, heads=2, hidden=16
    )
    words = torch.randint(11, (3, 6))
    with pytest.raises(TypeError, match="'input' is of type torch.int64"):
        noise_attenuation(model, words)
    at = next(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    )
    assert noise_attenuation(model, words, at=at)["output"] > 0


def test_no_signal_gives_nan():
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU())
    model[0].weight.data.fill_(-1.0)
    found = noise_attenuation(model, torch.ones(4, 2), 0.01, places=["0", "1"])
    assert found["0"] < 1e-3 and math.isnan(found["1"])


class Odd(models.SmallResNet):
    def __init__(self):
        super().__init__(5, 2, 4)
        self.unused, self.pair = nn.BatchNorm2d(3), Of(lambda own, x: (x, x))

    def forward(self, x):
        return super().forward(self.pair(x)[0])


test_noise_refuses_what_makes_no_sense = refusals(
    [
        ({"scale": 0.0}, "positive, finite"),
        ({"scale": math.nan}, "positive, finite"),
        ({"scale": -1.0}, "positive, finite"),
        ({"at": "stem_nor"}, "did you mean stem_norm"),
        ({"places": ["stages.9"]}, "no module 'stages.9'"),
        ({"at": "unused"}, "does not call 'unused'"),
        ({"places": ["unused"]}, "does not call 'unused'"),
        ({"inputs": torch.full((2, 2, 8, 8), math.nan)}, "NaN"),
        ({"places": ["pair"]}, TypeError, "'pair' is of type tuple"),
    ],
    lambda change: noise_attenuation(Odd(), **{"inputs": X} | change),
)


# attacks


def loop(model, x, y, eps, step, steps, mean, std, start):
    """Projected sign steps on pixels, image by image, with gradients of the
    parameters too and projections written as minimum and maximum: no code of
    the library's.
    """
    model = copy.deepcopy(model).eval()
    mean, std = (torch.tensor(p).reshape(2, 1, 1) for p in (mean, std))
    found = []
    for image, target, first in zip(x, y, start):
        pixel = image * std + mean
        moved = torch.minimum(
            torch.maximum(pixel + first, torch.zeros(())), torch.ones(())
        )
        for _ in range(steps):
            moved = moved.detach().requires_grad_()
            scores = model(((moved - mean) / std).unsqueeze(0))[0]
            (scores.logsumexp(0) - scores[target]).backward()
            with torch.no_grad():
                moved = moved + step * moved.grad.sign()
                moved = torch.minimum(
                    torch.maximum(moved, pixel - eps), pixel + eps
                )
                moved = torch.minimum(
                    torch.maximum(moved, torch.zeros(())), torch.ones(())
                )
        found.append(((moved - mean) / std).detach())
    return torch.stack(found)


@each_network
def test_attacks_are_those_of_a_loop(make):
    model, (x, y) = network(make), pixels()
    model, x = model.double(), x.double()
    settings = dict(mean=MEAN, std=STD)
    zero = torch.zeros_like(x)
    torch.testing.assert_close(
        fgsm(model, x, y, 0.1, **settings),
        loop(model, x, y, 0.1, 0.1, 1, MEAN, STD, zero),
    )
    torch.testing.assert_close(
        pgd(model, x, y, 0.1, 0.03, 5, start="inputs", **settings),
        loop(model, x, y, 0.1, 0.03, 5, MEAN, STD, zero),
    )
    u = torch.rand(x.shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        pgd(model, x, y, 0.1, 0.03, 5, seed=2, **settings),
        loop(model, x, y, 0.1, 0.03, 5, MEAN, STD, 0.1 * (2 * u.double() - 1)),
    )


@each_network
def test_nothing_leaves_ball_and_range(make):
    model, (x, y) = network(make), pixels()
    clamped = x.clamp(-1, 1)
    moved = fgsm(model, clamped, y, 0.2, bounds=(-1.0, 1.0))
    assert moved.abs().max() <= 1 and (moved - clamped).abs().max() > 0.1
    assert torch.equal(pgd(model, x, y, 0.0), x)
    assert torch.equal(fgsm(model, x, y, 0.0), x)


def test_parts_and_company_change_nothing():
    model, (x, y) = network(NETWORKS["batch normality"]).double(), pixels(7)
    x = x.double()
    whole = pgd(model, x, y, 0.1)
    torch.testing.assert_close(pgd(model, x, y, 0.1, batch=3), whole)
    alone = fgsm(model, x[2:3], y[2:3], 0.1)
    torch.testing.assert_close(alone, fgsm(model, x, y, 0.1)[2:3])
    assert not torch.equal(pgd(model, x, y, 0.1, seed=1), whole)
    torch.manual_seed(0)
    first = pgd(model, x, y, 0.1, seed=None)
    assert not torch.equal(pgd(model, x, y, 0.1, seed=None), first)
    torch.manual_seed(0)
    assert torch.equal(pgd(model, x, y, 0.1, seed=None), first)


def test_accuracy_counts_what_withstands():
    model, (x, y) = network(NETWORKS["layer normality"]), pixels(23)
    y = model.eval()(x).argmax(1)
    y[:4] = (y[:4] + 1) % 5  # four that are wrong from the beginning
    for attack, options in (("fgsm", {}), ("pgd", {"steps": 3})):
        found = robust_accuracy(model, x, y, (0.0, 0.3), attack, **options)
        method = {"fgsm": fgsm, "pgd": pgd}[attack]
        right = model(x).argmax(1) == y
        kept = model(method(model, x, y, 0.3, **options)).argmax(1) == y
        assert found == {
            0.0: 100 * 19 / 23,
            0.3: 100 * (right & kept).double().mean().item(),
        }
    assert robust_accuracy(
        model, x, y, (0.3,), "pgd", 0, batch=5
    ) == robust_accuracy(model, x, y, (0.3,), "pgd", 0)


def test_what_is_wrong_without_attack_stays_so():
    "The step goes through the range that is wrong and out on the other side."

    outside = Of(lambda own, x: torch.cat([0 * x, x.square() - 1], 1))
    x, y = torch.tensor([[0.9], [3.5]]), torch.tensor([1, 1])
    assert outside(fgsm(outside, x, y, 2.0)).argmax(1).tolist() == [1, 1]
    assert robust_accuracy(outside, x, y, (0.0, 2.0), "fgsm") == {
        0.0: 50.0,
        2.0: 50.0,
    }


def test_training_on_attacked_inputs():
    model, (x, y) = network(NETWORKS["batch normality"]), pixels()
    model.train()
    for step in (adversarial_step(0.1), adversarial_step(0.1, "fgsm")):
        moved, targets = step(model, x, y)
        assert targets is y and not moved.requires_grad and model.training
        assert (moved - x).abs().max() <= 0.1 + 1e-6
        assert all(p.grad is None for p in model.parameters())
        nn.functional.cross_entropy(model(moved), targets).backward()
        model.zero_grad()


def test_margin_is_the_largest_of_the_others_less_the_right_one():
    scores = torch.randn(20, 4, dtype=torch.float64)
    targets = torch.randint(4, (20,))
    expected = [
        max(v for k, v in enumerate(row) if k != t) - row[t]
        for row, t in zip(scores.tolist(), targets.tolist())
    ]
    np.testing.assert_allclose(margin(scores, targets), expected)


class Cut(nn.Flatten):
    "Scores without a gradient."

    def forward(self, x):
        return super().forward(x.detach())


test_attacks_refuse_what_makes_no_sense = refusals(
    [
        *(
            (attack, *case)
            for attack in (fgsm, pgd)
            for case in (
                ({"eps": -0.1}, "eps=-0.1"),
                ({"eps": math.nan}, "eps=nan"),
                ({"eps": math.inf}, "eps=inf"),
                (
                    {"targets": torch.tensor([0, 1, 5])},
                    "go from 0 to 5, scores are there for 5",
                ),
                ({"targets": torch.tensor([0, 1, -1])}, "from -1 to 1"),
                ({"targets": torch.tensor([0, 1])}, r"shape \(2,\)"),
                ({"targets": torch.rand(3)}, "float32 for 3 inputs"),
                (
                    {"inputs": torch.full((3, 2, 8, 8), math.inf)},
                    "infinity",
                ),
                (
                    {"inputs": torch.zeros((3, 2, 8, 8), dtype=torch.int64)},
                    TypeError,
                    "int64",
                ),
                ({"mean": MEAN}, "mean= and std="),
                ({"mean": MEAN, "std": STD, "bounds": (0, 1)}, "bounds="),
                ({"mean": 0.5, "std": 10.0}, "must be those by which"),
                ({"bounds": (1.0, -1.0)}, "must be those by which"),
                ({"bounds": (-0.5, 0.5)}, "must be those by which"),
                ({"loss": "hinge"}, "'hinge' is not known"),
                ({"batch": 0}, "batch=0"),
                (
                    {"model": nn.Sequential(nn.Flatten(), nn.Linear(128, 1))},
                    r"\(3, 1\)",
                ),
                ({"model": nn.Conv2d(2, 2, 1)}, r"\(N, classes\)"),
                (
                    {"model": nn.LSTM(8, 3), "inputs": X[:, 0]},
                    "expected",
                ),
                (
                    {
                        "model": nn.Sequential(
                            nn.Flatten(),
                            nn.Linear(128, 5),
                            nn.Threshold(1e9, math.inf),
                        )
                    },
                    "not finite",
                ),
            )
        ),
        (pgd, {"steps": 0}, "steps=0"),
        (pgd, {"steps": 1.5}, "steps"),
        (pgd, {"step": 0.0}, "step=0.0"),
        (pgd, {"start": "mid"}, "mid"),
        (pgd, {"step": -1.0}, "step=-1.0"),
        (fgsm, {"model": Cut()}, "do not depend on its inputs"),
        (
            fgsm,
            {"model": nn.Sequential(Cut(), nn.Linear(128, 5))},
            "do not depend on its inputs",
        ),
        (
            robust_accuracy,
            {"eps": (0.1,), "attack": "deepfool"},
            "'deepfool' is not known",
        ),
        (
            robust_accuracy,
            {"inputs": X[:0], "targets": Y[:0], "eps": (0.1,)},
            "no inputs",
        ),
        (lambda eps, **_: adversarial_step(eps), {"eps": -1}, "eps=-1"),
        (
            lambda eps, **_: adversarial_step(eps, "cw"),
            {},
            "'cw' is not known",
        ),
    ],
    lambda attack, change: attack(
        **{
            "model": network(NETWORKS["batch"]),
            "inputs": X,
            "targets": Y,
            "eps": 0.1,
            **change,
        }
    ),
)
