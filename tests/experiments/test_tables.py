"""Rows with planted effects, and what is said of them: words of the stated
contrasts, networks that have not fitted, experiments that are run again.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch

from normalnorm.cli import main
from normalnorm.experiments import results, tables
from normalnorm.experiments.recipes.dose import noise_dose, norms
from normalnorm.experiments.recipes.length import glyphs_length
from normalnorm.experiments.results import (
    Contrast,
    Recipe,
    ResultsError,
    book_results,
    losses_by_image,
    pack_bits,
    pack_losses,
    recipes,
    rows,
    scan,
)
from normalnorm.experiments.statistics import crossed_interval, summarize
from normalnorm.layers.backends import set_backend
from normalnorm.theory.gradient import Power
from normalnorm.theory.newton import Over
from normalnorm.theory.power_transform import yeo_johnson
from tests.experiments.known import best_at_two_first, known_recipe, printed

BOUNDS = {"test_last": 3.0, "loss_last": 0.05}
PAIRS = (("a", "b"), ("a", "c"))
PLANTED = Recipe(
    "planted",
    "does the word fit what was planted?",
    (),
    {"book": dict.fromkeys("abc", {"data": None})},
    lambda config, seed, **_: {},
    {metric: metric for metric in BOUNDS},
    compare=PAIRS,
    primary=tuple(
        Contrast(*pair, metric) for pair in PAIRS for metric in BOUNDS
    ),
    negligible=BOUNDS,
)


def planted(effect, generator, seeds=16, images=400, fit=100.0):
    """Rows of three arms: b and c are so many bounds above a in accuracy, and
    below it in loss.
    """
    hard = generator.normal(0.8, 0.05, images)
    found = []
    for seed in range(seeds):
        luck = generator.normal(0, 0.01)
        for arm in "abc":
            gain = effect * (arm != "a")
            chance = hard + luck + gain * BOUNDS["test_last"] / 100
            right = torch.from_numpy(generator.random(images) < chance)
            loss = generator.normal(0.6 - gain * BOUNDS["loss_last"], 0.035)
            metrics = {
                "test_last": 100 * right.double().mean().item(),
                "loss_last": loss,
                "train_last": fit,
            }
            found.append(
                {
                    "arm": arm,
                    "seed": seed,
                    "metrics": metrics,
                    "test_right": pack_bits(right),
                }
            )
    return tables.Effects(found, PLANTED)


@pytest.mark.parametrize(
    "effect, allowed",
    [
        (0, ("open", "no difference")),
        (0.5, ("open", "no difference", "better")),
        (2, ("better",)),
    ],
)
def test_words_of_planted_effects(effect, allowed):
    "All four stated contrasts at once, in 93 of 100 experiments at least."
    generator = np.random.default_rng(7)
    right, found = 0, 0
    for _ in range(1000):
        words = [
            one.word for one in planted(effect, generator).primary().values()
        ]
        right += all(word.startswith(allowed) for word in words)
        found += sum(word != "open" for word in words)
    assert right >= 930, right
    assert found > (2000 if effect != 0.5 else 0), found


def test_stated_contrasts_share_the_five_percent():
    found = planted(1, np.random.default_rng(1), fit=98.0)
    for contrast, one in found.primary().items():
        pair = contrast[:2]
        if contrast.metric == "loss_last":
            alone = summarize(found.values(pair, "loss_last").tolist(), 0.9875)
        else:
            d = found.values(pair, tables.points_by_image)
            alone = crossed_interval(d, 0.9875)
        assert one.found == alone
        assert one.p == min(1, 4 * alone.p)
        assert one.word.endswith(", not fitted")


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_stated_contrast_needs_two_seeds(seeds):
    found = planted(1, np.random.default_rng(1), seeds).primary()
    assert len(found) == (4 if seeds == 2 else 0)


@pytest.mark.parametrize(
    "fit, said", [(99.0, ""), (98.99, "not fitted"), (None, "fit unknown")]
)
def test_fitted(fit, said):
    found = planted(0, np.random.default_rng(2), seeds=2, images=8, fit=fit)
    if fit is None:
        for row in found.rows:
            del row["metrics"]["train_last"]
    assert found.fitted("b") == said


def test_losses_count_the_draw_of_images():
    "Half precision, and the interval of both draws."
    losses = torch.rand(3, 50) ** 4 * 9
    packed = [pack_losses(one) for one in losses]
    read = np.stack([losses_by_image({"test_losses": one}) for one in packed])
    assert np.array_equal(read, losses.half().double().numpy())
    found = tables.Effects(
        [
            {"arm": arm, "seed": seed, "test_losses": packed[i], "metrics": {}}
            for seed, of in enumerate(([0, 1], [1, 2]))
            for arm, i in zip("ab", of)
        ]
    )
    d = np.stack([read[1] - read[0], read[2] - read[1]])
    assert found.estimate(("a", "b"), "loss_last") == crossed_interval(d)
    # where one row keeps none, for other seeds alone
    del found.rows[0]["test_losses"]
    for row, value in zip(found.rows, (1.0, 2.0, 4.0, 7.0)):
        row["metrics"]["loss_last"] = value
    assert found.estimate(("a", "b"), "loss_last") == summarize([1.0, 3.0])


def test_rows_that_read_other_data_make_no_table(tmp_path, monkeypatch):
    coins = Recipe(
        "coins",
        "",
        (),
        {"book": {"fair": {"data": "digits"}}},
        lambda config, seed, **_: {"metrics": {"heads": 50.0 + seed}},
        {"heads": "heads"},
    )
    results.run_recipe(coins, "book", [0], out=tmp_path, device="cpu")
    monkeypatch.setattr(results, "data_hash", lambda name, **_: "other")
    results.run_recipe(coins, "book", [1], out=tmp_path, device="cpu")
    assert len(scan(coins, "book", tmp_path).rows) == 2
    with pytest.raises(ResultsError, match="different data under the name dig"):
        rows(coins, "book", tmp_path)


def test_run_again_with_fresh_seeds(tmp_path, capsys):
    "By the command; and what it says is by hand what the rows say."
    name, out = "transform-given-noise-500", ["--out", str(tmp_path)]
    assert main(["run", name, *out]) == 0
    assert main(["rerun", name, "--fresh", *out]) == 0
    said = capsys.readouterr().out
    recorded, fresh = (
        tables.effects(tables.find(name), "smoke", place)
        for place in (tmp_path, tmp_path / tables.FRESH)
    )
    assert {row["seed"] for row in fresh.rows} == {1000, 1001}
    found = tables.reruns(recorded, fresh)
    assert len(found) == 5 * 4
    for one in found:
        old, new = (
            of.values(one.contrast[:2], one.contrast.metric)
            for of in (recorded, fresh)
        )
        torch.testing.assert_close(one.change.mean, new.mean() - old.mean())
        se = (old.var(ddof=1) / 2 + new.var(ddof=1) / 2) ** 0.5
        torch.testing.assert_close(one.change.se, se)
        assert one.held == (one.change.low <= 0 <= one.change.high)
        digits = 2 if abs(one.old.mean) > 0.2 else 3
        for each in (one.old, one.fresh, one.change):
            assert tables.spelled(each, digits) in said
    held = sum(one.held for one in found)
    assert f"{name}, scale smoke: {held} of 20 held" in said
    # the recorded rows are those of before, and count alone
    assert len(recorded.rows) == 8


def test_fresh_seeds_choose_nothing(tmp_path, listed):
    """They take what the recorded rows chose, here for seeds for which another
    value is best; where nothing is chosen yet, they are refused.
    """
    recipe = listed(
        known_recipe(
            best_at_two_first,
            scales={"smoke": {arm: {"data": "digits", "x": 1} for arm in "ab"}},
            grid={arm: {"x": (1, 2, 3)} for arm in "ab"},
            seeds={"smoke": range(10, 12)},
            tuning={"smoke": range(2)},
            primary=(Contrast("a", "b", "score"),),
        )
    )
    command = ["known", "--scale", "smoke", "--out", tmp_path]
    status, _, said = printed("rerun", *command, "--fresh")
    assert status == 2 and "known, scale smoke, has chosen no settings" in said
    assert printed("run", *command)[0] == 0
    assert printed("rerun", *command, "--fresh", "--dry-run")[0] == 0
    status, said, _ = printed("rerun", *command, "--fresh")
    assert status == 0 and "known, scale smoke: 1 of 1 held" in said
    again = results.settled(recipe, "smoke", tmp_path)
    assert [
        (row["arm"], row["seed"], row["config"]["x"])
        for row in rows(again, "smoke", tmp_path / tables.FRESH, every=True)
    ] == [(arm, seed, 2) for arm in "ab" for seed in (1000, 1001)]
    recorded = rows(recipe, "smoke", tmp_path)
    assert {row["seed"] for row in recorded} == {10, 11}
    (line,) = tables._one_line_each(recipe, "smoke", tmp_path)
    assert (line[2], line[-1]) == ("4 of 4", "held")


@pytest.mark.parametrize("shift, held", [(-0.2, 0), (0.0, 1), (0.2, 0)])
def test_a_contrast_held_where_the_change_may_be_none(shift, held):
    change = summarize([shift])._replace(low=shift - 0.1, high=shift + 0.1)
    assert tables.Rerun(PLANTED.primary[0], change, change, change).held == held


@pytest.mark.filterwarnings("error:.*keeps its rule")
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_the_mirrored_control_is_the_transform_of_minus_h(backend):
    "ψ(h; 2 − λ̂) = −ψ(−h; λ̂): result, gradient, average, and after loading."
    u = torch.randn(40, 3).exp().requires_grad_()
    layers = [norms("batch", "mirrored", 0.0)(3) for _ in range(2)]
    assert isinstance(norms("batch", True, 0.4)(3).gaussianizer, Power)
    k = (u - u.mean(0)) / (u.var(0, correction=0) + 1e-5).sqrt()
    (lmbda,) = Power().estimate(k.detach(), Over(0))
    with set_backend(backend):
        out = layers[0](u[..., None, None]).flatten(1)
        torch.testing.assert_close(
            out, -yeo_johnson(-k, lmbda), rtol=1e-3, atol=1e-4
        )
        torch.testing.assert_close(
            layers[0].running_lambda,
            0.9 + 0.1 * (2 - lmbda[0]),
            rtol=1e-4,
            atol=0,
        )
        layers[1].load_state_dict(layers[0].state_dict())
        (grad,) = torch.autograd.grad(out.square().sum(), u)
    definition = yeo_johnson(k, 2 - Power().estimate(k, Over(0))[0])
    (expected,) = torch.autograd.grad(definition.square().sum(), u)
    torch.testing.assert_close(grad, expected, rtol=2e-3, atol=2e-3)


def test_the_length_of_training_is_all_that_differs():
    for of in glyphs_length.scales["book"].values():
        assert of["train"]["validate_every"] == 0
    for first, second in glyphs_length.compare:
        one, two = (
            dict(glyphs_length.scales["book"][arm]) for arm in (first, second)
        )
        assert one.pop("norm") != two.pop("norm") and one == two
    assert len(glyphs_length.compare) == 3 * 7
    assert {c.first.split(", ")[2] for c in glyphs_length.primary} == {
        "120 epochs"
    }


def test_other_settings_are_other_runs(tmp_path, capsys):
    "In the hash and in the row, and alone in the report."
    out, arm = ["--out", str(tmp_path)], ["--arm", "none, ξ = 0"]
    run = ["run", "noise-dose", *arm, *out]
    assert main(run) == 0
    more = ["--set", "train.lr=0.05", "--set", "train.channels_last=true"]
    assert main([*run, "--dry-run", *more]) == 0
    assert "1 runs, 0 finished" in capsys.readouterr().out
    assert main([*run, "--set", "train.compile=true", "--dry-run"]) == 0
    changed = noise_dose.changed(
        {"train.lr": 0.05, "train.channels_last": True}
    )
    assert main([*run, *more]) == 0
    both = scan("noise-dose", "smoke", tmp_path).rows.values()
    assert len({row["hash"] for row in both}) == 2
    (row,) = rows(changed, "smoke", tmp_path)
    assert row["config"]["train"]["lr"] == 0.05
    assert row["config"]["train"]["channels_last"] is True
    (old,) = rows(noise_dose, "smoke", tmp_path)
    assert "lr" not in old["config"]["train"]
    told = capsys.readouterr().out
    assert "1 rows of other configurations are left out" in told


@pytest.mark.parametrize(
    "given, said",
    [
        ("train.lrr=1", "have no 'train.lrr': did you mean lr"),
        ("trains.lr=1", "have no 'trains.lr': did you mean train"),
        ("images.few=1", "have no 'images.few'"),
        ("train.lr=-1", "expected lr > 0; given lr=-1"),
        ("train.lr", "'train.lr' was given, expected PLACE=VALUE"),
        ("=1", "'=1' was given, expected PLACE=VALUE"),
    ],
)
def test_settings_that_are_none(given, said, tmp_path, capsys):
    try:
        status = main(
            ["run", "noise-dose", "--set", given, "--out", str(tmp_path / "o")]
        )
    except SystemExit as end:
        status = end.code
    assert status == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_what_a_grid_tries_has_no_one_value():
    tuned = tables.find("batch-norm-unique")
    with pytest.raises(ValueError, match="train.lr is tried by the grid of b"):
        tuned.changed({"train.lr": 0.1})
    # the recipe itself keeps its configurations
    before = str(noise_dose.scales)
    noise_dose.changed({"train.lr": 0.05, "train.compile": True})
    assert str(noise_dose.scales) == before


def test_every_recipe_has_its_line_in_the_overview(capsys):
    assert main(["report", "all", "--out", str(book_results())]) == 0
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.strip().splitlines()[2:]
    ]
    every = recipes()
    assert {line[0] for line in lines} == {
        name for name, of in every.items() if set(of.scales) != {"smoke"}
    }
    for name, scale, runs, stated, difference, word, _ in lines:
        primary = every[name].primary
        assert (not primary) == stated.startswith("none: "), name
        assert (runs == "not run yet") <= (word == difference == ""), name
        if primary and runs != "not run yet":
            judged = tables.effects(every[name], scale).primary()
            assert word in {one.word for one in judged.values()}


def test_time_by_steps(tmp_path, capsys, monkeypatch):
    "The second epoch counts; steps, points of the grid and seeds by hand."
    tuned, seen = tables.find("batch-norm-unique"), []

    def run(config, **how):
        seen.append((config["train"]["epochs"], config["train"]["steps"]))
        return {"history": [{"seconds": 99.0}, {"seconds": 0.5}]}

    monkeypatch.setattr(
        tables, "find", lambda name: dataclasses.replace(tuned, run=run)
    )
    said = tables.timed(tuned, "book", 5, arms=["None"])
    config = tuned.arms("book")["None"]
    runs = tuned.runs("book", "None", len(tuned.seeds_at("book")))
    steps = config["train"]["epochs"] * (
        config["images"] // config["train"]["batch"]
    )
    minutes = 0.1 * steps * runs / 60
    assert seen == [(2, 5)]
    line = [cell.strip() for cell in said.splitlines()[2].split("|")[1:-1]]
    assert line[1:4] == ["100.0", str(steps), str(runs)]
    assert line[4] == f"{minutes:.0f} min"
    assert f"about {line[4]} for all" in said


def test_time_of_real_steps_writes_nothing(tmp_path, capsys):
    run = ["run", "noise-dose", "--out", str(tmp_path / "o"), "--time", "2"]
    assert main([*run, "--arm", "none, ξ = 0"]) == 0
    assert "on " in capsys.readouterr().out and not (tmp_path / "o").exists()
    of = ["language-recurrent", "--arm", "none", "--time", "2"]
    assert main(["run", *of]) == 0  # 2 epochs of 256 windows, 16 at a time
    assert "| 32 " in capsys.readouterr().out
    assert main(["run", "collapse", *run[2:]]) == 2
    assert "has no training settings" in capsys.readouterr().err


def test_rows_of_another_device_stand_beside_the_books(tmp_path, monkeypatch):
    "The book's own, ten points further, as if a GPU had made them."
    recipe = tables.find("noise-dose")

    def drawn():
        (panel, other) = tables.stated_figure(recipe).axes
        assert other.get_xlabel().startswith("difference,\n")
        return {
            dots.get_label(): dots[0].get_xydata().T
            for dots in panel.containers
        }, panel

    monkeypatch.setenv("NORMALNORM_RESULTS", str(tmp_path))
    alone, panel = drawn()
    assert [*alone] == ["the book"] and panel.get_legend() is None
    judged = tables.effects(recipe).primary()
    accuracy = [c for c in judged if c.metric == "test_last"]
    assert [*alone["the book"][0]] == [judged[c].found.mean for c in accuracy]
    folder = tmp_path / recipe.name / "book"
    folder.mkdir(parents=True)
    for path, row in scan(recipe, "book", book_results()).rows.items():
        row["metrics"]["test_last"] += 10.0 * (row["arm"] == accuracy[0].second)
        row["device"] = "GPU"
        del row["test_right"]  # its accuracy is then the metric
        row["digest"] = results.digest(row)
        (folder / path.name).write_text(json.dumps(row))
    both, panel = drawn()
    assert [*both] == ["the book", "GPU"] and panel.get_legend()
    (means, lines), (moved, beside) = both.values()
    np.testing.assert_allclose(moved, means + 10.0, atol=1e-3)
    np.testing.assert_allclose(beside, lines + 0.2)
    monkeypatch.setenv("NORMALNORM_RESULTS", str(book_results()))
    assert [*drawn()[0]] == ["the book"]
