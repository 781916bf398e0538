"""Conversion beyond its chapter: all that a layer has stays, what cannot be
converted says why, checkpoints go both ways; timm, transformers, torchvision
where they can be imported.
"""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normalnorm
from normalnorm.layers.conversion import (
    LayerNormalNorm2d,
    Report,
    bypassed,
    plain_state_dict,
    survey,
    to_normality,
    to_plain,
)
from normalnorm.layers.sync import SyncBatchNormalNorm, convert_sync
from normalnorm.theory.gradient import Identity
from tests.peers import installed

KINDS = {
    "batch1d": (lambda: nn.BatchNorm1d(3), (7, 3, 5)),
    "batch2d": (
        lambda: nn.BatchNorm2d(3, eps=1e-3, momentum=None),
        (7, 3, 5, 2),
    ),
    "batch3d": (lambda: nn.BatchNorm3d(3, affine=False), (3, 3, 2, 5, 2)),
    "batch-untracked": (
        lambda: nn.BatchNorm2d(3, track_running_stats=False),
        (7, 3, 5, 2),
    ),
    "sync": (lambda: nn.SyncBatchNorm(3), (7, 3, 5, 2)),
    "instance1d": (lambda: nn.InstanceNorm1d(3), (7, 3, 5)),
    "instance2d": (
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        (7, 3, 5, 2),
    ),
    "instance3d": (lambda: nn.InstanceNorm3d(3), (2, 3, 5, 2, 2)),
    "layer": (lambda: nn.LayerNorm((3, 5), eps=1e-6), (7, 3, 5)),
    "layer-no-bias": (lambda: nn.LayerNorm(5, bias=False), (7, 3, 5)),
    "group": (lambda: nn.GroupNorm(3, 6), (5, 6, 7)),
    "decorrelated1d": (
        lambda: normalnorm.DecorrelatedBatchNorm1d(3, eps=1e-3, group_size=2),
        (7, 3, 5),
    ),
    "decorrelated2d": (
        lambda: normalnorm.DecorrelatedBatchNorm2d(
            3, momentum=None, affine=False
        ),
        (7, 3, 5, 2),
    ),
    "decorrelated-untracked": (
        lambda: normalnorm.DecorrelatedBatchNorm2d(
            3, track_running_stats=False, bias=False
        ),
        (7, 3, 5, 2),
    ),
    "decorrelated-sync": (
        lambda: normalnorm.SyncDecorrelatedBatchNorm(3),
        (7, 3),
    ),
}
quiet = pytest.mark.filterwarnings("ignore:the transform is dropped")


@pytest.fixture(params=KINDS)
def kind(request):
    make, shape = KINDS[request.param]
    layer = make()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -1, 1)
    layer(torch.randn(shape).exp())
    return layer, shape


def test_without_transform_and_noise_it_is_the_layer_that_it_was(kind):
    plain, shape = kind
    plain = plain.double()
    ours = to_normality(copy.deepcopy(plain), noise=0.0, alpha=0.0)
    for training in (True, False, True):
        u = torch.randn(shape, dtype=torch.float64).exp()
        found = []
        for layer in (plain.train(training), ours.train(training)):
            x = u.clone().requires_grad_()
            out = layer(x)
            found.append(
                (
                    out,
                    *torch.autograd.grad(
                        out.pow(3).sum(), [x, *layer.parameters()]
                    ),
                )
            )
        torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16]
)
@pytest.mark.parametrize("training", [True, False])
def test_everything_is_kept(kind, dtype, training):
    layer, shape = kind
    layer = layer.to(dtype).train(training)
    layer.mark = "mine"
    calls = []
    handles = [
        layer.register_forward_pre_hook(lambda *a: calls.append("before")),
        layer.register_forward_hook(lambda *a: calls.append("after")),
        layer.register_full_backward_hook(lambda *a: calls.append("backward")),
        layer._register_state_dict_hook(lambda *a: calls.append("state")),
        layer.register_load_state_dict_post_hook(
            lambda *a: calls.append("loaded")
        ),
    ]
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
        break
    held, buffers = (
        list(layer.parameters()),
        {k: id(v) for k, v in layer.named_buffers()},
    )
    flags, names, eps = (
        [p.requires_grad for p in held],
        list(layer.state_dict()),
        layer.eps,
    )
    assert to_normality(layer) is layer
    assert (
        type(layer).__module__.startswith("normalnorm")
        and "NormalNorm" in type(layer).__name__
    )
    assert (
        all(a is b for a, b in zip(layer.parameters(), held))
        and [p.requires_grad for p in layer.parameters()] == flags
    )
    assert {
        k: id(v) for k, v in layer.named_buffers() if k != "running_lambda"
    } == buffers
    assert (
        layer.training == training and layer.mark == "mine" and layer.eps == eps
    )
    assert [n for n in layer.state_dict() if "lambda" not in n] == names
    lmbda = getattr(layer, "running_lambda", None)
    assert lmbda is None or (
        lmbda.dtype == dtype
        and (lmbda == 1).all()
        and lmbda.device == layer.running_mean.device
    )
    out = layer(torch.randn(shape, requires_grad=True).to(dtype))
    assert out.dtype == dtype
    if out.requires_grad:
        out.sum().backward()
        assert "backward" in calls
    layer.load_state_dict(layer.state_dict())
    assert {"before", "after", "state", "loaded"} <= set(calls)
    for handle in handles:
        handle.remove()
    calls.clear()
    layer.eval()(torch.randn(shape).to(dtype))
    assert calls == []


def test_the_state_has_the_order_of_a_layer_made_by_its_constructor():
    for plain, ours in (
        (nn.BatchNorm2d(3), normalnorm.BatchNormalNorm2d(3)),
        (
            nn.InstanceNorm1d(3, track_running_stats=True),
            normalnorm.InstanceNormalNorm1d(3, track_running_stats=True),
        ),
        (
            normalnorm.DecorrelatedBatchNorm2d(3, num_groups=3),
            normalnorm.DecorrelatedBatchNormalNorm2d(3, num_groups=3),
        ),
        (
            normalnorm.SyncDecorrelatedBatchNorm(3),
            normalnorm.SyncDecorrelatedBatchNormalNorm(3),
        ),
    ):
        converted = to_normality(plain)
        assert list(converted.state_dict()) == list(ours.state_dict()) and repr(
            converted
        ) == repr(ours)
        assert set(converted.__dict__) == set(ours.__dict__)


@quiet
def test_there_and_back(kind):
    layer, shape = kind
    u = torch.randn(shape)
    expected = layer.eval()(u)
    before, fields, text, cls = (
        {k: v.clone() for k, v in layer.state_dict().items()},
        sorted(layer.__dict__),
        repr(layer),
        type(layer),
    )
    assert type(to_normality(layer)) is not cls
    to_plain(layer)
    assert (
        sorted(layer.__dict__) == fields
        and repr(layer) == text
        and type(layer) is cls
    )
    assert list(layer.state_dict()) == list(before) and all(
        torch.equal(v, before[k]) for k, v in layer.state_dict().items()
    )
    assert torch.equal(layer(u), expected)


@quiet
@pytest.mark.parametrize(
    "made",
    [
        normalnorm.BatchNormalNorm1d(3),
        normalnorm.GroupNormalNorm(1, 3),
        normalnorm.LayerNormalNorm(3, bias=False),
        normalnorm.SyncBatchNormalNorm(3),
        normalnorm.DecorrelatedBatchNormalNorm1d(3, group_size=2),
        normalnorm.DecorrelatedBatchNormalNorm2d(3),
        normalnorm.SyncDecorrelatedBatchNormalNorm(3, bias=False),
        normalnorm.BatchNormalNorm2d(3, bias=False),
    ],
)
def test_a_layer_made_by_its_constructor_becomes_plain(made):
    plain = to_plain(copy.deepcopy(made))
    name = type(made).__name__.replace("NormalNorm", "Norm")
    assert type(plain) is getattr(
        normalnorm if "Decorrelated" in name else nn, name
    )
    u = torch.randn(4, 3, 2, 3)[
        (...,)
        if isinstance(
            plain,
            (nn.BatchNorm2d, nn.LayerNorm, normalnorm.DecorrelatedBatchNorm2d),
        )
        else (..., 0)
    ]
    made.alpha = 0.0
    torch.testing.assert_close(
        plain.eval()(u), made.eval()(u), rtol=1e-5, atol=1e-5
    )


def test_decorrelated_layers_are_reported_and_newton_schulz_is_noted():
    class Calm(normalnorm.DecorrelatedBatchNorm2d):
        pass

    class Centred(normalnorm.DecorrelatedBatchNorm2d):
        def forward(self, input):
            return super().forward(input)

    class Doubled(normalnorm.DecorrelatedBatchNorm2d):
        def forward(self, input):
            return 2 * super().forward(input)

    model = nn.Sequential(
        normalnorm.DecorrelatedBatchNorm2d(4),
        normalnorm.DecorrelatedBatchNorm2d(
            4, method="newton_schulz", iterations=2
        ),
        normalnorm.DecorrelatedBatchNormalNorm2d(4),
        Calm(4),
        Centred(4, group_size=3),
        Doubled(4),
    )
    u = torch.randn(5, 4, 3, 3).exp()
    model(u)
    odd = (
        "a subclass of DecorrelatedBatchNorm2d whose forward does something "
        "else, on random input"
    )
    assert {r.name: r.reason for r in survey(model).left} == {
        "2": "a normality layer already",
        "5": odd,
    }
    exact = nn.Sequential(model[0], model[3]).eval()
    expected, rough = exact(u), model[1].eval()(u)
    _, report = to_normality(model, return_report=True)
    assert [(r.name, r.after) for r in report.replaced] == [
        (n, "DecorrelatedBatchNormalNorm2d") for n in "0134"
    ]
    assert report.notes == (
        "1 whitens approximately, by Newton–Schulz: the normality layer "
        "standardizes each channel besides",
    )
    torch.testing.assert_close(exact(u), expected)  # λ is 1
    assert (model[1](u) - rough).abs().max() > 0.1 and model[0].noise == 0.4
    _, back = to_plain(model, return_report=True)
    assert [(r.name, r.after) for r in back.replaced] == [
        (n, "DecorrelatedBatchNorm2d") for n in "012"
    ]
    # classes inside a function cannot be imported
    assert all("is not installed" in r.reason for r in back.left) and [
        r.name for r in back.left
    ] == ["3", "4"]
    assert (
        torch.equal(model[1](u), rough)
        and "1" in back.notes[0]
        and model[0].noise == 0.0
        and model[0].gaussianizer == Identity()
    )


def test_decorrelated_states_both_ways():
    torch.manual_seed(0)
    plain, u = (
        nn.Sequential(normalnorm.DecorrelatedBatchNorm1d(4, group_size=2)),
        torch.randn(9, 4).exp(),
    )
    plain(u)
    ours = to_normality(copy.deepcopy(plain))
    fresh = to_normality(
        nn.Sequential(normalnorm.DecorrelatedBatchNorm1d(4, group_size=2))
    )
    fresh.load_state_dict(plain.state_dict())
    assert (
        torch.equal(fresh.eval()(u), ours.eval()(u))
        and (fresh[0].running_lambda == 1).all()
    )
    ours.train()(u)
    other = nn.Sequential(normalnorm.DecorrelatedBatchNorm1d(4, group_size=2))
    with pytest.raises(RuntimeError, match="running_lambda"):
        other.load_state_dict(ours.state_dict())
    other.load_state_dict(plain_state_dict(ours.state_dict()))
    assert torch.equal(
        other[0].running_covariance, ours[0].running_covariance
    ) and list(plain_state_dict(ours.state_dict())) == list(plain.state_dict())


def test_synchronization_knows_decorrelated_layers():
    class Own(normalnorm.DecorrelatedBatchNorm1d):
        def forward(self, input):
            return -super().forward(input)

    model = nn.Sequential(
        normalnorm.DecorrelatedBatchNorm1d(3),
        normalnorm.DecorrelatedBatchNormalNorm2d(3, noise=0.1),
        nn.LayerNorm(3),
        normalnorm.SyncDecorrelatedBatchNorm(3),
    )
    kept = list(model.state_dict())
    convert_sync(model, "group")
    assert [type(m).__name__ for m in model] == [
        "SyncDecorrelatedBatchNorm",
        "SyncDecorrelatedBatchNormalNorm",
        "LayerNorm",
        "SyncDecorrelatedBatchNorm",
    ]
    assert (
        list(model.state_dict()) == kept
        and model[0].process_group == "group"
        and model[3].process_group is None
        and model[1].noise == 0.1
    )
    for wrong, words in (
        (Own(3), "something of its own"),
        (normalnorm.DecorrelatedBatchNormalNorm1d(3, steps=3), "steps=3"),
    ):
        model = nn.Sequential(normalnorm.DecorrelatedBatchNorm1d(3), wrong)
        with pytest.raises(NotImplementedError, match=words):
            convert_sync(model)
        assert type(model[0]) is normalnorm.DecorrelatedBatchNorm1d


def test_optimizers_go_on():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    to_normality(model)
    before = model[1].bias.clone()
    optimizer.zero_grad()
    (model(torch.randn(8, 3)) - 1).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].bias, before)


def test_shared_layers_tied_parameters_and_references_stay():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.LayerNorm(4)
            self.b = self.a
            self.c = nn.LayerNorm(4)
            self.c.weight = self.a.weight
            self.plain_list = [self.a]

    model, report = to_normality(Twice(), return_report=True)
    assert (
        model.a is model.b is model.plain_list[0]
        and model.c.weight is model.a.weight
    )
    assert [r.name for r in report.replaced] == ["a = b", "c"]
    left = to_normality(Twice(), skip="b", return_report=True)[1].left
    # one object: all of its names are skipped
    assert [r.name for r in left] == ["a = b"]


@quiet
def test_parametrized_layers_stay_parametrized():
    class Positive(nn.Module):
        def forward(self, x):
            return F.softplus(x)

        def right_inverse(self, y):
            return y.expm1().log()

    layer = nn.BatchNorm1d(3)
    nn.utils.parametrize.register_parametrization(layer, "weight", Positive())
    u = torch.randn(8, 3)
    expected = layer.eval()(u)
    to_normality(layer)
    assert isinstance(layer, normalnorm.BatchNormalNorm1d) and torch.equal(
        layer(u), expected
    )
    with torch.no_grad():
        layer.parametrizations.weight.original.fill_(-30)
    assert (layer(u) - layer.bias).abs().max() < 1e-9
    assert isinstance(copy.deepcopy(layer), normalnorm.BatchNormalNorm1d)
    to_plain(layer)
    assert isinstance(layer, nn.BatchNorm1d) and not isinstance(
        layer, normalnorm.BatchNormalNorm1d
    )
    nn.utils.parametrize.remove_parametrizations(to_normality(layer), "weight")
    assert type(layer) is normalnorm.BatchNormalNorm1d


class Act(nn.BatchNorm2d):
    def __init__(self, c):
        super().__init__(c)
        self.drop, self.act = nn.Dropout(0.0), nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class Channels(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Either(nn.LayerNorm):
    def __init__(self, c, data_format):
        super().__init__(c)
        self.data_format = data_format

    def forward(self, features):
        if self.data_format == "channels_first":
            return (
                super()
                .forward(features.permute(0, 2, 3, 1))
                .permute(0, 3, 1, 2)
            )
        return super().forward(features)


class ActLast(nn.GroupNorm):
    def __init__(self, groups, c):
        super().__init__(groups, c)
        self.activation = nn.Tanh()

    def forward(self, x):
        return self.activation(
            F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        )


class Named(nn.BatchNorm1d):
    "A subclass that only has another constructor."

    def __init__(self, c):
        super().__init__(c, eps=1e-2)


@quiet
@pytest.mark.parametrize(
    "make, after, shape",
    [
        (lambda: Act(5), "BatchNormalNorm2d, drop, act", (4, 5, 3, 2)),
        (lambda: Channels(5), "LayerNormalNorm2d", (4, 5, 3, 2)),
        (
            lambda: Either(5, "channels_first"),
            "LayerNormalNorm2d",
            (4, 5, 3, 2),
        ),
        (lambda: Either(5, "channels_last"), "LayerNormalNorm", (4, 3, 5)),
        (lambda: ActLast(2, 4), "GroupNormalNorm, activation", (3, 4, 5)),
        (lambda: Named(5), "BatchNormalNorm1d", (6, 5)),
        (lambda: Channels(2048), "LayerNormalNorm2d", (2, 2048, 1, 1)),
    ],
)
def test_subclasses_are_tried_out(make, after, shape):
    model = nn.Sequential(make())
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
    u, original, state = (
        torch.randn(shape),
        type(model[0]),
        list(model.state_dict()),
    )
    torch.manual_seed(1)
    draw = torch.get_rng_state()
    model.eval()
    expected = model(u)
    _, report = to_normality(model, noise=0.0, alpha=0.0, return_report=True)
    assert report.replaced[0].after == after and torch.equal(
        torch.get_rng_state(), draw
    )
    torch.testing.assert_close(model(u), expected, rtol=1e-5, atol=1e-5)
    assert [k for k in model.state_dict() if "lambda" not in k] == state
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(u), model(u))
    for layer in (model, loaded):
        to_plain(layer)
        assert type(layer[0]) is original and torch.equal(layer(u), expected)


class Masked(nn.GroupNorm):
    def forward(self, x, mask=None):
        return super().forward(x)


class Plus(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(
            x, self.normalized_shape, self.weight + 1, self.bias, self.eps
        )


class Chatty(nn.BatchNorm1d):
    def summary(self):
        return "mine"


class Helper(nn.BatchNorm2d):
    "The same in evaluation, another estimate in training."

    def forward(self, x):
        return (
            super().forward(2 * x if self.training else x) if self.affine else x
        )


def untracked_by_hand():
    layer = nn.BatchNorm1d(3)
    layer.running_mean = layer.running_var = None
    return layer


def wrapped():
    layer = nn.LayerNorm(3)
    inner = layer.forward
    layer.forward = lambda x: inner(x)
    return layer


class FrozenBatchNorm2d(nn.Module):
    pass


class Qwen2RMSNorm(nn.Module):
    pass


class T5LayerNorm(nn.Module):
    pass


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: nn.LazyBatchNorm2d(), "lazy"),
        (Qwen2RMSNorm, "root-mean-square"),
        (FrozenBatchNorm2d, "constants"),
        (T5LayerNorm, "knows"),
        (lambda: nn.LocalResponseNorm(2), "knows"),
        (untracked_by_hand, "taken away"),
        (wrapped, "replaced on the object"),
        (lambda: Masked(1, 2), "x, mask"),
        (lambda: Plus(3), "something else"),
        (lambda: Chatty(3), "summary"),
        (lambda: Helper(3), "something else"),
        (lambda: normalnorm.LayerNormalNorm(3), "already"),
        pytest.param(
            lambda: torch.jit.script(nn.BatchNorm1d(3)),
            "scripted",
            marks=pytest.mark.filterwarnings("ignore::DeprecationWarning"),
        ),
    ],
)
def test_what_is_left_says_why(make, words):
    model = nn.Sequential(make())
    cls = type(model[0])
    report = survey(model)
    assert (
        report.replaced == ()
        and len(report.left) == 1
        and words in report.left[0].reason
    )
    assert words in str(report) and "0 replaced, 1 left" in str(report)
    if words != "already":
        with pytest.warns(UserWarning, match="left as they are"):
            to_normality(model)
    assert type(model[0]) is cls


def test_blocks_that_contain_norms_are_not_norms():
    class ConvNormAct(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)

    report = survey(
        nn.Sequential(
            ConvNormAct(),
            nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            nn.Linear(2, 2),
        )
    )
    assert [r.name for r in report.replaced] == ["0.norm"] and report.left == ()


def test_layers_across_processes_take_one_step_only():
    report = to_normality(
        nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm1d(3)),
        steps=2,
        return_report=True,
    )[1]
    assert "processes" in report.left[0].reason and [
        r.name for r in report.replaced
    ] == ["1"]


def test_lazy_layers_after_their_first_batch():
    model = nn.Sequential(nn.LazyBatchNorm1d())
    model(torch.randn(4, 3))
    assert type(to_normality(model)[0]) is normalnorm.BatchNormalNorm1d


def net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        ),
        nn.Flatten(),
        nn.LayerNorm(16),
    )


@pytest.mark.parametrize(
    "skip, left",
    [
        ("1", ["1"]),
        ("2", ["2.1", "2.2"]),
        ("2.*", ["2.1", "2.2"]),
        ("*.1", ["2.1"]),
        (nn.BatchNorm2d, ["1", "2.1"]),
        (lambda name, module: name == "4", ["4"]),
        (["1", nn.GroupNorm], ["1", "2.2"]),
        (None, []),
    ],
)
def test_skip(skip, left):
    report = to_normality(net(), skip=skip, return_report=True)[1]
    assert [r.name for r in report.left] == left and len(
        report.replaced
    ) == 4 - len(left)
    assert all(r.reason == "skipped, as asked" for r in report.left)


def test_a_layer_without_a_way_back_can_be_skipped():
    "Then it is no warning; what no conversion knows is one even so."
    model = nn.Sequential(
        nn.LocalResponseNorm(2), normalnorm.BatchNormalNorm1d(4)
    )
    model[1]._plain = "no_such_package:Norm"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_plain(model, skip="1") is model
    (row,) = to_plain(model, skip="1", return_report=True)[1].left
    assert (row.name, row.reason) == ("1", "skipped, as asked")
    with pytest.warns(UserWarning, match="LocalResponseNorm.*not a normalizer"):
        to_normality(model, skip=["0", "1"])


def test_wrong_arguments_change_nothing_and_say_what_is_wrong():
    model = net()
    before = repr(model)
    for error, words, options in (
        (ValueError, "did you mean|known are", {"skip": "2.7"}),
        (TypeError, "names, classes", {"skip": [3]}),
        (ValueError, "alpha", {"alpha": 2.0}),
        (ValueError, "noise", {"noise": -1.0}),
        (ValueError, "noise_kind", {"noise_kind": "loud"}),
        (ValueError, "steps", {"steps": 0}),
    ):
        with pytest.raises(error, match=words):
            to_normality(model, **options)
    with pytest.raises(TypeError, match="Module"):
        to_normality([nn.LayerNorm(3)])
    assert repr(model) == before


def test_a_copy_leaves_the_model_alone():
    model = net()
    seen = []
    model[1].register_forward_hook(lambda *a: seen.append(1))
    twin = to_normality(model, inplace=False)
    assert (
        type(model[1]) is nn.BatchNorm2d
        and type(twin[1]) is normalnorm.BatchNormalNorm2d
        and twin[1].weight is not model[1].weight
    )
    twin(torch.randn(2, 1, 6, 6))
    assert seen == [1]


def test_noise_defaults_by_kind_and_settings_reach_every_layer():
    model = to_normality(net(), alpha=0.5, safeguard=True, noise_kind="dropout")
    assert [m.noise for m in model.modules() if hasattr(m, "noise")] == [
        0.4,
        0.4,
        0.4,
        1.0,
    ]
    assert all(
        (m.alpha, m.safeguard, m.noise_kind, m.steps)
        == (0.5, True, "dropout", 1)
        for m in model.modules()
        if hasattr(m, "noise")
    )
    assert {
        m.noise
        for m in to_normality(net(), noise=0.0).modules()
        if hasattr(m, "noise")
    } == {0.0}


def test_the_model_itself_may_be_a_norm():
    layer = nn.BatchNorm1d(3)
    model, report = to_normality(layer, return_report=True)
    assert (
        model is layer
        and isinstance(report, Report)
        and "(the model)" in str(report)
    )


def test_distributed_wrappers_are_refused():
    wrapper = nn.parallel.DistributedDataParallel.__new__(
        nn.parallel.DistributedDataParallel
    )
    nn.Module.__init__(wrapper)
    wrapper.module = net()
    with pytest.raises(ValueError, match="before it is wrapped"):
        to_normality(wrapper)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@quiet
def test_the_fused_path_of_encoder_layers_is_switched_off_and_on_again(
    norm_first,
):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, norm_first=norm_first
    )
    model = nn.TransformerEncoder(layer, 2).eval()
    u, mask = (
        torch.randn(3, 5, 8),
        torch.tensor(
            [[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]]
        ),
    )
    fields = [sorted(m.__dict__) for m in model.modules()]
    with torch.no_grad():
        plain = model(u)
        _, report = to_normality(model, return_report=True)
        assert len(report.replaced) == 4 and len(report.notes) >= 2
        without_gradients = model(u)
        assert (
            bypassed(model, u) == []
            and bypassed(model, u, src_key_padding_mask=mask) == []
        )
    # the path that is never fused
    torch.testing.assert_close(without_gradients, model(u))
    assert (without_gradients - plain).abs().max() > 1e-2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        to_plain(model)
    assert [sorted(m.__dict__) for m in model.modules()] == fields and all(
        m.activation_relu_or_gelu for m in model.layers
    )
    with torch.no_grad():
        assert torch.equal(model(u), plain)


def test_bypassed_finds_what_was_exchanged_by_hand_and_leaves_no_trace():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    layer.norm2 = normalnorm.LayerNormalNorm(8).eval()
    assert (
        bypassed(layer, torch.randn(1, 3, 8)) == ["norm2"]
        and "forward" not in layer.norm2.__dict__
    )
    with pytest.raises(RuntimeError):
        bypassed(layer, torch.randn(1, 3, 9))
    assert "forward" not in layer.norm2.__dict__


@quiet
def test_to_plain_says_that_lambda_is_lost():
    model = to_normality(nn.Sequential(nn.BatchNorm1d(3)))
    _, report = to_plain(copy.deepcopy(model), return_report=True)
    assert report.notes == ()  # λ is 1: nothing is lost
    model(torch.randn(9, 3).exp())
    with pytest.warns(UserWarning, match="dropped"):
        to_plain(copy.deepcopy(model))
    model[0].alpha = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_plain(model)

    class Own(normalnorm.LayerNormalNorm):
        pass

    with pytest.warns(UserWarning, match="twin"):
        assert type(to_plain(nn.Sequential(Own(3)))[0]) is Own
    gone = to_normality(nn.Sequential(Channels(3)))
    gone[0]._plain = "no_such_package:Layer"
    with pytest.warns(UserWarning, match="not installed"):
        to_plain(gone)


def test_checkpoints_both_ways():
    torch.manual_seed(0)
    plain, ours = net(), to_normality(net())
    plain(torch.randn(5, 1, 6, 6))
    assert ours.load_state_dict(plain.state_dict()).missing_keys == []
    assert all(
        (v == 1).all()
        for k, v in ours.state_dict().items()
        if k.endswith("running_lambda")
    )
    ours(torch.randn(5, 1, 6, 6))
    state = ours.state_dict()
    with pytest.raises(RuntimeError, match="running_lambda"):
        plain.load_state_dict(state)
    stripped = plain_state_dict(state)
    assert (
        stripped._metadata == state._metadata
        and len(state) == len(stripped) + 2
    )
    plain.load_state_dict(stripped)
    assert torch.equal(plain[1].running_var, ours[1].running_var)
    other = {
        "running_lambda": torch.ones(2),
        "a.running_lambda": torch.ones(2),
        "b.running_lambda": torch.ones(2),
        "b.running_mean": torch.ones(2),
    }
    # the others are somebody else's
    assert list(plain_state_dict(other)) == [
        "running_lambda",
        "a.running_lambda",
        "b.running_mean",
    ]

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    fresh = to_normality(net())
    fresh.load_state_dict(torch.load(file, weights_only=True), assign=True)
    u = torch.randn(5, 1, 6, 6)
    assert (
        torch.equal(fresh.eval()(u), ours.eval()(u))
        and torch.equal(pickle.loads(pickle.dumps(ours))(u), ours(u))
        and torch.equal(copy.deepcopy(ours)(u), ours(u))
    )


@pytest.mark.parametrize(
    "value, words",
    [
        (torch.ones(7), "size mismatch for 1.running_lambda"),
        ("one", "running_lambda"),
        (None, "running_lambda"),
    ],
)
def test_broken_checkpoints(value, words):
    ours = to_normality(net())
    state = {**ours.state_dict(), "1.running_lambda": value}
    with pytest.raises((RuntimeError, AttributeError, TypeError), match=words):
        ours.load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_lambda_of_another_number_type_is_converted(dtype):
    ours = to_normality(net())
    ours.load_state_dict(
        {
            **ours.state_dict(),
            "1.running_lambda": torch.full((4,), 2, dtype=dtype),
        }
    )
    assert (
        ours[1].running_lambda.dtype == torch.float32
        and (ours[1].running_lambda == 2).all()
    )


def test_without_running_lambda_but_without_a_running_mean_too():
    ours = to_normality(net())
    state = {
        k: v
        for k, v in ours.state_dict().items()
        if not k.startswith("1.running")
    }
    with pytest.raises(RuntimeError, match="1.running_mean.*1.running_lambda"):
        ours.load_state_dict(state)


class MakesATensor(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + torch.zeros(())


def test_meta_and_uninitialized():
    with torch.device("meta"):
        model = to_normality(nn.Sequential(net(), Channels(4), Act(3)))
        # tried out on the CPU, also what it makes itself
        assert survey(MakesATensor(3)).replaced
    assert (
        all(v.is_meta for v in model.state_dict().values())
        and type(model[1]) is LayerNormalNorm2d
    )
    source = to_normality(nn.Sequential(net(), Channels(4), Act(3)))
    model.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(
        model[0].eval()(torch.ones(2, 1, 6, 6)),
        source[0].eval()(torch.ones(2, 1, 6, 6)),
    )
    for cls, args in (
        (normalnorm.BatchNormalNorm2d, (3,)),
        (normalnorm.LayerNormalNorm, (3,)),
        (normalnorm.GroupNormalNorm, (1, 3)),
    ):
        layer = nn.utils.skip_init(cls, *args)
        assert not any(v.is_meta for v in layer.state_dict().values())
        layer.reset_parameters()
        assert (layer.weight == 1).all() and (layer.bias == 0).all()


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 13),
    reason="torch 2.4 cannot follow these functions",
)
def test_a_compiled_model_notices_the_conversion():
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5)).eval()
    compiled = torch.compile(model, backend="aot_eager")
    u = torch.randn(3, 4).exp()
    before = compiled(u)
    to_normality(model)
    torch.testing.assert_close(compiled(u), model(u))
    assert (compiled(u) - before).abs().max() > 1e-3


def test_synchronization_keeps_what_fused_layers_do():
    model = to_normality(nn.Sequential(Act(3), nn.BatchNorm2d(3)), noise=0.0)
    u = torch.randn(4, 3, 2, 2)
    expected = model.eval()(u)
    convert_sync(model)
    assert (
        isinstance(model[0], SyncBatchNormalNorm)
        and type(model[1]) is SyncBatchNormalNorm
        and torch.equal(model(u), expected)
    )


def test_synchronization_keeps_shared_layers_and_changes_all_or_nothing():
    class Positive(nn.Module):
        def forward(self, x):
            return F.softplus(x)

    model = nn.Module()
    model.a = model.b = normalnorm.BatchNormalNorm1d(3)
    model.c = normalnorm.BatchNormalNorm1d(3)
    nn.utils.parametrize.register_parametrization(model.c, "weight", Positive())
    u = torch.randn(8, 3)
    expected = model.c.eval()(u)
    model.d = normalnorm.BatchNormalNorm1d(3, steps=2)
    with pytest.raises(NotImplementedError, match="steps=2"):
        convert_sync(model)
    assert type(model.a) is normalnorm.BatchNormalNorm1d
    del model.d
    convert_sync(model)
    assert (
        model.a is model.b
        and isinstance(model.a, SyncBatchNormalNorm)
        and isinstance(model.c, SyncBatchNormalNorm)
        and torch.equal(model.c(u), expected)
    )


def same_function(model, *inputs, replaced, **named):
    model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        take = lambda out: out if isinstance(out, torch.Tensor) else out[0]
        expected, state = (
            take(model(*inputs, **named)),
            list(model.state_dict()),
        )
        _, report = to_normality(
            model, noise=0.0, alpha=0.0, return_report=True
        )
        torch.testing.assert_close(
            take(model(*inputs, **named)), expected, rtol=1e-4, atol=1e-4
        )
        assert (
            bypassed(model, *inputs, **named) == []
            and [
                k
                for k in model.state_dict()
                if not k.endswith("running_lambda")
            ]
            == state
        )
        to_plain(model)
        assert torch.equal(take(model(*inputs, **named)), expected)
    assert {(r.before, r.after) for r in report.replaced} == replaced
    return report


@pytest.mark.parametrize(
    "name, replaced",
    [
        ("resnet18", {("BatchNorm2d", "BatchNormalNorm2d")}),
        (
            "efficientnet_b0",
            {("BatchNormAct2d", "BatchNormalNorm2d, drop, act")},
        ),
        ("convnext_atto", {("LayerNorm2d", "LayerNormalNorm2d")}),
        ("resnetv2_50d_gn", {("GroupNormAct", "GroupNormalNorm, drop, act")}),
        (
            "poolformer_s12",
            {
                ("GroupNorm1", "GroupNormalNorm"),
                ("LayerNorm2d", "LayerNormalNorm2d"),
            },
        ),
        ("resnetv2_50d_evos", {("EvoNorm2dS0", "EvoNorm2d")}),
    ],
)
def test_timm(name, replaced):
    timm = installed("timm")
    report = same_function(
        timm.create_model(name), torch.randn(2, 3, 64, 64), replaced=replaced
    )
    assert not report.left


def test_transformers():
    t = installed("transformers")
    small = dict(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    ids, images = torch.randint(0, 50, (2, 9)), torch.randn(2, 3, 32, 32)
    same_function(
        t.BertModel(t.BertConfig(vocab_size=50, **small)),
        input_ids=ids,
        replaced={("LayerNorm", "LayerNormalNorm")},
    )
    same_function(
        t.ViTModel(t.ViTConfig(image_size=32, patch_size=8, **small)),
        pixel_values=images,
        replaced={("LayerNorm", "LayerNormalNorm")},
    )
    same_function(
        t.ConvNextModel(
            t.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])
        ),
        pixel_values=images,
        replaced={
            ("ConvNextLayerNorm", "LayerNormalNorm2d"),
            ("ConvNextLayerNorm", "LayerNormalNorm"),
            ("LayerNorm", "LayerNormalNorm"),
        },
    )
    same_function(
        t.BitModel(
            t.BitConfig(
                embedding_size=32,
                hidden_sizes=[32, 64],
                depths=[1, 1],
                num_groups=4,
            )
        ),
        pixel_values=images,
        replaced={("BitGroupNormActivation", "GroupNormalNorm, activation")},
    )
    report = same_function(
        t.LlamaModel(t.LlamaConfig(vocab_size=50, **small)),
        input_ids=ids,
        replaced=set(),
    )
    assert len(report.left) == 5
    report = same_function(
        t.NemotronModel(
            t.NemotronConfig(vocab_size=50, num_key_value_heads=2, **small)
        ),
        input_ids=ids,
        replaced=set(),
    )
    assert {r.before for r in report.left} == {"NemotronLayerNorm1P"}


def test_torchvision():
    models = installed("torchvision.models")
    same_function(
        models.resnet18(),
        torch.randn(2, 3, 32, 32),
        replaced={("BatchNorm2d", "BatchNormalNorm2d")},
    )
    same_function(
        models.convnext_tiny(),
        torch.randn(2, 3, 32, 32),
        replaced={
            ("LayerNorm2d", "LayerNormalNorm2d"),
            ("LayerNorm", "LayerNormalNorm"),
        },
    )
