"""The table of layers: what each row says is what its layer does, and all that
is derived from a row works for a layer that is defined here, by one class and
one row.
"""

import copy

import pytest
import torch
from torch import nn

import normalnorm
from normalnorm.experiments.recipes.first import make_norm
from normalnorm.layers import families
from normalnorm.layers.conversion import (
    survey,
    to_normality,
    to_plain,
)
from normalnorm.layers.factory import norm_layer
from normalnorm.layers.families import family_of, is_layer, register
from normalnorm.layers.running_averages import freeze, unfreeze, update_bn
from normalnorm.layers.sync import convert_sync
from normalnorm.layers.weight_decay import (
    no_weight_decay,
    normalizer_types,
)
from normalnorm.theory.gaussianizers import Chain, Tail
from normalnorm.theory.gradient import Identity, Power
from normalnorm.theory.newton import Over
from tests.layers.steps import python, step, uncut
from tools import hostile
from tools.rows import trials

TRIALS = {str(t): t for t in trials()}
GAUSSIANIZED = {
    str(t): t
    for t in (
        TRIALS["batch2 B C H W"].having("chain", gaussianizer=Chain()),
        TRIALS["layer B L C"].having("tail", gaussianizer=Tail()),
    )
}


every_row = pytest.mark.parametrize(
    "trial",
    [*TRIALS.values(), *GAUSSIANIZED.values()],
    ids=[*TRIALS, *GAUSSIANIZED],
)


# ---- a layer that somebody else has written, and its normality form ---------


class Spread(nn.BatchNorm1d):
    "A normalizer that is not PyTorch's, …"


class SpreadNormalNorm(normalnorm.BatchNormalNorm1d):
    "… its normality form, …"


@pytest.fixture
def toy(monkeypatch):
    "… and one row."
    for table in ("_TABLE", "_ROWS", "_PLAIN"):
        monkeypatch.setattr(families, table, dict(getattr(families, table)))
    return register(SpreadNormalNorm, "spread", Spread, synchronized=None)


def batches(n=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(16, 3, generator=generator).exp() for _ in range(n)]


def test_a_toy_is_converted_and_back(toy):
    plain, x = nn.Sequential(Spread(3), nn.BatchNorm1d(3)), batches(1)[0]
    plain(x)
    state = copy.deepcopy(plain.state_dict())
    model, report = to_normality(copy.deepcopy(plain), return_report=True)
    assert [(r.before, r.after) for r in report.replaced] == [
        ("Spread", "SpreadNormalNorm"),
        ("BatchNorm1d", "BatchNormalNorm1d"),
    ]
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))
    back = to_plain(model)
    assert type(back[0]) is Spread and list(back.state_dict()) == list(state)


def test_a_toy_has_a_name_in_factories_and_networks(toy):
    layer = norm_layer("spread", noise=0.5)(4, eps=1e-3)
    assert (type(layer), layer.noise, layer.eps) == (
        SpreadNormalNorm,
        0.5,
        1e-3,
    )
    with pytest.raises(ValueError, match="did you mean spread"):
        norm_layer("spreed")
    assert type(make_norm("spread", True, 0.4)(4)) is SpreadNormalNorm
    assert make_norm("spread", False, 0.0) is Spread


def test_a_toy_without_a_synchronized_form_is_refused_as_a_whole(toy):
    model = nn.Sequential(normalnorm.BatchNormalNorm1d(3), SpreadNormalNorm(3))
    with pytest.raises(
        NotImplementedError,
        match="SpreadNormalNorm .*no synchronized form: give",
    ):
        convert_sync(model)
    assert type(model[0]) is normalnorm.BatchNormalNorm1d


def test_a_toy_is_among_what_is_tried(toy):
    "The hostile table has it, with the plain layer that its row names."
    tried = hostile.layers()
    mine = [name for name in tried if name.startswith("spread")]
    assert type(tried[mine[0]].theirs()) is Spread
    assert set(tried) - set(mine) == set(hostile.LAYERS)


# ---- rows that are not true -------------------------------------------------


class Bare(nn.Module):
    "Statistics within an element, no buffers."

    def __init__(self, num_channels):
        super().__init__()
        self.num_channels = num_channels


class Stuck(Bare):
    "Averages that cannot begin anew."

    def __init__(self, num_channels):
        super().__init__(num_channels)
        self.register_buffer("running_mean", torch.zeros(num_channels))


GOOD = dict(axes="B C L", unit="B C")


@pytest.mark.parametrize(
    "layer, cells, words",
    [
        (Bare, dict(GOOD, axes="B X L"), "axes='B X L': expected .*letters"),
        (Bare, dict(GOOD, axes="B L"), "each with C, such as"),
        (Bare, dict(axes="", unit="C"), "axes='': expected"),
        (Bare, dict(GOOD, unit=""), "unit='': expected axes of 'B C L'"),
        (Bare, dict(GOOD, unit="B H"), "unit='B H': expected axes"),
        (
            Bare,
            dict(GOOD, synchronized=Bare),
            "synchronized form and unit='B C'",
        ),
        (
            Bare,
            dict(GOOD, names="mine batch"),
            "'batch'.*BatchNormalNorm2d has .*choose another",
        ),
        (
            Bare,
            dict(GOOD, beyond={"running_lambda": 1.0}),
            r"beyond=\['running_lambda'\], but a new layer has \[\]",
        ),
        (
            Bare,
            dict(axes="B C", unit=None, plain=nn.LayerNorm),
            "unit=None, no statistics, and plain=.*leave it out",
        ),
        (
            Stuck,
            dict(axes="B C", unit="C"),
            "no reset_running_stats.*give it one",
        ),
        (
            SpreadNormalNorm,
            dict(plain=Spread, beyond={}),
            r"beyond=\[\], but a new layer has \['running_lambda'\] beyond",
        ),
        (
            SpreadNormalNorm,
            dict(plain=Spread, beyond={"running_mean": 0.0}),
            r"has beyond=\['running_mean'\].*name these",
        ),
        (
            type(
                "BatchNormalNorm2d",
                (Bare,),
                {
                    "__qualname__": "BatchNormalNorm2d",
                    "__module__": "elsewhere",
                },
            ),
            GOOD,
            "beside that of normalnorm.*another name",
        ),
    ],
)
def test_a_row_that_is_not_true_is_refused(monkeypatch, layer, cells, words):
    tables = [dict(getattr(families, t)) for t in ("_TABLE", "_ROWS", "_PLAIN")]
    with pytest.raises(ValueError, match=f"the row of .*{words}"):
        register(
            layer,
            cells.get("names", ""),
            cells.get("plain"),
            **{k: v for k, v in cells.items() if k not in ("names", "plain")},
        )
    assert tables == [
        getattr(families, t) for t in ("_TABLE", "_ROWS", "_PLAIN")
    ]


def test_a_class_that_is_defined_again_replaces_its_row(toy):
    again = type(
        "SpreadNormalNorm",
        (SpreadNormalNorm,),
        dict(__qualname__="SpreadNormalNorm", __module__=__name__),
    )
    before = list(families._TABLE)
    register(again, "spread", Spread)
    assert list(families._TABLE) == before
    assert families.named("spread").layer is again
    assert is_layer(SpreadNormalNorm(3))  # an object of the old one


def test_a_subclass_has_the_row_of_its_layer(toy):
    class Mine(SpreadNormalNorm):
        pass

    assert family_of(Mine(3)) is toy and is_layer(Mine(3))
    assert family_of(Spread(3)) is toy and not is_layer(Spread(3))
    assert family_of(nn.Linear(3, 3)) is None


# ---- every row is true ------------------------------------------------------


@every_row
def test_a_unit_is_what_shares_statistics(trial):
    """One element changes, with it a mean, and with what this mean centres some
    deviations: which outputs change?
    """
    layer = uncut(trial.ours(noise=0.0)).double()
    u = torch.randn(trial.shape, dtype=torch.float64)
    bumped, first = u.clone(), (0,) * u.ndim
    bumped[first] += 1
    changed = copy.deepcopy(layer)(u) != layer(bumped)
    scale, centre = trial.sets(trial.row.unit), trial.row.centre
    mean = scale if centre is None else trial.sets(centre)
    if centre == "":  # none: each element by itself
        mean = torch.arange(u.numel()).view(u.shape)
    assert torch.equal(changed, torch.isin(scale, scale[mean == mean[first]]))


@every_row
def test_every_layer_is_seen(trial):
    """By freezing, averages, weight decay, survey, synchronization; and by the
    first three its plain twin, if that is here.
    """
    tried, plain = [trial.ours(noise=0.1)], trial.row.plain
    if isinstance(plain, type) and family_of(plain) is trial.row:
        tried.append(trial.twin(plain))
    for one in tried:
        model, noise = nn.Sequential(one), getattr(one, "noise", None)
        averages = [n for n, _ in one.named_buffers() if n[:8] == "running_"]
        assert freeze(model) == ["0"] * bool(averages)
        before = copy.deepcopy(model.state_dict())
        x = torch.randn(trial.shape) + 5
        update_bn([x], model.train())
        model(x)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert unfreeze(model) == ["0"] * bool(averages) and one.training
        assert isinstance(one, normalizer_types())
        assert no_weight_decay(model) == {
            f"0.{name}" for name, _ in one.named_parameters()
        }
        update_bn([x, x + 2], model, noise=False)
        assert getattr(one, "noise", None) == noise
        if trial.row.over_batch() and averages:
            assert one.num_batches_tracked == 2 and one.momentum == 0.1
    layer = tried[0]
    model = nn.Sequential(layer)
    report, taken = survey(model), bool(families.twins(type(layer)))
    assert len(report.replaced) == taken
    assert [row.name for row in report.left] == ["0"] * (not taken)
    if not trial.row.over_batch():
        assert type(convert_sync(model)[0]) is trial.row.layer
    elif trial.row.synchronized is None or "gaussianizer" in trial.settings:
        with pytest.raises(
            (NotImplementedError, ValueError), match="no synchronized|Chain"
        ):
            convert_sync(model)
    else:
        assert type(convert_sync(model)[0]) is trial.row.across()


def test_exports_are_the_rows():
    found = {
        row.layer.__name__
        for row in families.rows()
        if row.layer.__module__.startswith("normalnorm.")
        and not row.layer.__name__.startswith("_")
    }
    others = {
        "load_converted",
        "to_normality",
        "to_plain",
        "set_backend",
        "to_proxy_norm",
        "regnorm_penalty",
        "report_card",
        "ProxyNorm",
    }  # the last is an activation
    # maps with a normalizer inside: no row, for their weights are not γ and β
    maps = {
        f"{kind}Norm{form}"
        for kind in ("PreLayer", "Reg", "PreReg")
        for form in ("Linear", "Conv1d", "Conv2d", "Conv3d")
    }
    assert set(normalnorm.__all__) == found | others | maps
    assert set(normalnorm.__all__) <= set(dir(normalnorm))
    space = {}
    exec("from normalnorm import *", space)
    assert set(normalnorm.__all__) <= set(space)
    assert space["BatchNormalNorm2d"] is normalnorm.BatchNormalNorm2d
    with pytest.raises(AttributeError, match="the layers are"):
        _ = normalnorm.NoSuchLayer
    assert not any("Gaussianized" in name for name in dir(normalnorm))


ALONE = {
    "running_averages": "m.update_bn([x], bn); assert bn.running_mean.any()",
    "running_averages, standing still": "assert m.freeze(bn) == ['']",
    "families, classes": "assert nn.BatchNorm2d in m.classes()",
    "families, twins": "assert m.twins(nn.BatchNorm2d)",
    "families, named": "assert m.named('decorrelated')",
    "conversion": "assert 'BatchNormalNorm2d' in str(m.survey(net))",
    "weight_decay": "assert len(m.no_weight_decay(net)) == 2",
}


def test_the_table_is_whole_for_whoever_reads_it_first():
    "Whichever module is imported first, and alone, by a process."
    script = """
import importlib, os, sys, torch
from torch import nn
for module, line in eval(sys.argv[1]).items():
    if not (child := os.fork()):
        bn, x = nn.BatchNorm2d(2), torch.randn(4, 2, 3, 3)
        net = nn.Sequential(bn, nn.ReLU())
        m = importlib.import_module(f"normalnorm.layers.{module.split(',')[0]}")
        exec(line)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(module)
"""
    assert python(script, repr(ALONE)) == ""


def test_rows_have_one_order_in_every_process():
    """Sets of names have another order in each process; what is drawn from the
    table, as `tools.hostile` does, must not.
    """
    code = """
        from normalnorm.layers.families import rows
        print([row.layer.__name__ for row in rows()])
    """
    said = {python(code, PYTHONHASHSEED=seed) for seed in "12"}
    assert len(said) == 1


def test_each_name_makes_its_layer_from_a_number_of_channels():
    for row in families.rows():
        for name in row.names:
            assert type(norm_layer(name)(32)) is row.layer
            assert type(norm_layer(row.layer)(32)) is row.layer


# ---- with another gaussianizer ----------------------------------------------


def gaussianized():
    return nn.Sequential(
        normalnorm.BatchNormalNorm1d(3, gaussianizer=Chain()),
        nn.Linear(3, 4),
        normalnorm.LayerNormalNorm(4, gaussianizer=Tail()),
    )


def test_gaussianized_layers_get_new_averages():
    model, data = gaussianized(), batches()
    update_bn(data, model)
    own = model[0].gaussianizer
    for i, name in enumerate(own.names):
        values = [
            own.estimate((x - x.mean(0)) / x.std(0, correction=0), Over(0))[i][
                0
            ]
            for x in data
        ]
        torch.testing.assert_close(
            getattr(model[0], f"running_{name}"), torch.stack(values).mean(0)
        )


GAUSSIANIZERS = (Power(steps=2), Tail(), Chain(), Identity())
# layers of the plain kind have neither transform nor noise
NORMALITY = [t for t in TRIALS.values() if "gaussianizer" in t.known]


def test_every_normality_layer_takes_a_gaussianizer():
    "Those of another formula may not, nor may plain ones."
    plain = {row.plain for row in families.rows()}
    for trial in TRIALS.values():
        row, takes = trial.row, "gaussianizer" in trial.known
        assert takes or row.reference or row.layer in plain, trial


@pytest.mark.parametrize("gaussianizer", GAUSSIANIZERS, ids=str)
@pytest.mark.parametrize("trial", NORMALITY, ids=str)
def test_each_layer_with_each_gaussianizer(trial, gaussianizer):
    """It trains, evaluates and is described; synchronized ones refuse what has
    no closed form.
    """
    trial = trial.having(gaussianizer=gaussianizer, noise=0.3)
    if "Sync" in trial.row.layer.__name__ and not gaussianizer.closed(None):
        with pytest.raises(NotImplementedError, match="across processes"):
            trial.ours()
        return
    layer = trial.ours()
    assert layer.gaussianizer == gaussianizer
    assert str(gaussianizer) in str(layer) or type(gaussianizer) is Power
    # not where only the mean is the batch's
    averaged = trial.averages and (
        trial.row.centre is None or "B" not in trial.row.unit.split()
    )
    names = [f"running_{name}" for name in gaussianizer.names if averaged]
    assert set(names) == set(trial.averages) - {
        f"running_{name}" for name in ("mean", "var", "covariance")
    }
    fresh = copy.deepcopy(layer.state_dict())
    u = torch.randn(trial.shape).pow(5)  # of long tails
    found = step(layer, u, torch.rand(trial.shape))
    assert found[0].shape == u.shape
    assert all(t.isfinite().all() and t.any() for t in found)
    for name in names:
        moved = layer.get_buffer(name)
        assert moved.isfinite().all() and not torch.equal(moved, fresh[name])
    x = torch.randn(trial.shape).exp()
    expected = layer.eval()(x)
    assert torch.equal(layer(x), expected)  # no noise
    if not trial.averages:
        layer.noise = 0.0
        torch.testing.assert_close(layer.train()(x), expected)
        layer.eval()
    # of the whole batch in float64, by the definition
    wide = copy.deepcopy(layer).double()(x.double()).float()
    torch.testing.assert_close(wide, expected, rtol=1e-3, atol=1e-4)


def test_what_stands_in_for_a_subclass_has_no_twin_of_its_own():
    "A layer for images, made as such, is no plain layer norm."
    layer = normalnorm.LayerNormalNorm2d(3, alpha=0.0)
    _, report = to_plain(layer, return_report=True)
    assert report.left[0].reason == "no plain normalizer is its twin"
    assert type(layer) is normalnorm.LayerNormalNorm2d
