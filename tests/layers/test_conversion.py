"""Conversion beyond its chapter: all that a layer has stays, what cannot be
converted says why, checkpoints go both ways; timm, transformers, torchvision
where they can be imported.
"""

import copy
import pickle
from functools import partial

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
from normalnorm.theory.gaussianizers import Chain, Tail
from normalnorm.theory.gradient import Identity, Power
from tests.layers.steps import refusals
from tests.peers import FOLLOWS, installed
from tools.homes import SMALL
from tools.rows import trials

# each row with a plain class: of torch.nn, of this library, of timm
ROWS = {
    t.row.layer: t
    for t in trials()
    if isinstance(t.row.plain, type) or t.row.plain and t.kind == "B C H W"
}
del ROWS[LayerNormalNorm2d]  # for subclasses of layer norm
KINDS = {
    f"{trial.name}-{mode}": (trial, {"eps": 1e-3, **options})
    for trial in ROWS.values()
    for mode, options in trial.modes().items()
    if mode == "default" or trial.kind in ("B C H W", "B L C")
}
KINDS["rms-usual ε"] = KINDS["rms-default"][0], {}
GAUSSIANIZERS = (Power(), Power(steps=2), Tail(), Chain(), Identity())
quiet = pytest.mark.filterwarnings("ignore:the transform is dropped")


EVENTS = {"before", "after", "state", "loaded", "backward"}


@pytest.fixture(params=KINDS)
def kind(request):
    trial, options = KINDS[request.param]
    if isinstance(trial.row.plain, str):
        installed("timm")
    layer = trial.twin(trial.row.twin(), **options)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -1, 1)
    layer(torch.randn(trial.shape).exp())
    made = trial.ours(gaussianizer=Power(), **options)
    return layer, trial.shape, made


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16]
)
@pytest.mark.parametrize("training", [True, False])
def test_everything_is_kept(kind, dtype, training):
    layer, shape, made = kind
    layer, made = layer.to(dtype).train(training), made.to(dtype)
    layer.mark, calls = "mine", set()
    said = lambda word: lambda *_: calls.add(word) or None
    handles = [
        layer.register_forward_pre_hook(said("before")),
        layer.register_forward_hook(said("after")),
        layer.register_full_backward_hook(said("backward")),
        layer._register_state_dict_hook(said("state")),
        layer.register_load_state_dict_post_hook(said("loaded")),
    ]
    for parameter in [*layer.parameters()][:1]:
        parameter.requires_grad_(False)

    def held():
        "What is the same before and after, by identity."
        return (
            [(id(p), p.requires_grad) for p in layer.parameters()],
            {k: id(v) for k, v in layer.named_buffers() if "lambda" not in k},
            names_of(layer.state_dict()),
            (layer.training, layer.mark, layer.eps),
        )

    before = held()
    assert to_normality(layer) is layer and held() == before
    assert type(layer) is type(made) and repr(layer) == repr(made)
    # the last is of timm's filter response norm
    assert vars(layer).keys() - vars(made).keys() <= {"mark", "rms"}
    assert list(layer.state_dict()) == list(made.state_dict())
    lmbda = getattr(layer, "running_lambda", None)
    assert lmbda is None or lmbda.dtype == dtype and (lmbda == 1).all()
    out = layer(torch.randn(shape, requires_grad=True).to(dtype))
    assert out.dtype == dtype
    if out.requires_grad:
        out.sum().backward()
    layer.load_state_dict(layer.state_dict())
    assert calls == (EVENTS if out.requires_grad else EVENTS - {"backward"})
    for handle in handles:
        handle.remove()
    calls.clear()
    layer.eval()(torch.randn(shape).to(dtype))
    assert not calls


def names_of(state):
    "The entries that plain layers have, too."
    return list(plain_state_dict(state))


def described(model):
    "Whatever there is, but for identities."
    return (
        repr(model),
        [(type(m), sorted(m.__dict__)) for m in model.modules()],
        [(k, v.tolist()) for k, v in model.state_dict().items()],
    )


@quiet
@pytest.mark.parametrize("gaussianizer", GAUSSIANIZERS, ids=str)
def test_there_and_back(kind, gaussianizer):
    """Nothing is left of it; in between the state of the plain layer is that of
    a neutral transform.
    """
    layer, shape, made = kind
    u, state = torch.randn(shape), copy.deepcopy(layer.state_dict())
    expected, before = layer.eval()(u), described(layer)
    _, report = to_normality(
        layer, gaussianizer=gaussianizer, noise=0.0, return_report=True
    )
    if "Sync" in type(layer).__name__ and not gaussianizer.closed(None):
        assert "processes" in report.left[0].reason
        assert described(layer) == before
        return
    assert type(layer) is type(made) and layer.gaussianizer == gaussianizer
    if any(name.startswith("running") for name in state):
        torch.testing.assert_close(layer(u), expected)
    assert layer.train()(u.exp()).isfinite().all()
    assert names_of(layer.state_dict()) == names_of(state)
    layer.load_state_dict(state)  # neutral again
    to_plain(layer.eval())
    assert described(layer) == before and torch.equal(layer(u), expected)
    # one that was made by its constructor becomes plain
    made.load_state_dict(state)
    assert type(to_plain(made)) is type(layer)
    assert torch.equal(made.eval()(u), expected)


class Negated(normalnorm.DecorrelatedBatchNorm1d):
    def forward(self, input):
        return -super().forward(input)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (Negated(3), "something of its own"),
        (normalnorm.DecorrelatedBatchNormalNorm1d(3, steps=3), "steps=3"),
        (normalnorm.BatchNormalNorm1d(3, steps=2), "steps=2"),
    ],
)
def test_synchronization_changes_all_or_nothing(wrong, words):
    model = nn.Sequential(
        normalnorm.DecorrelatedBatchNorm1d(3),
        normalnorm.BatchNormalNorm1d(3),
        wrong,
    )
    before = described(model)
    with pytest.raises(NotImplementedError, match=words):
        convert_sync(model)
    assert described(model) == before


def positive(layer):
    "With a parametrized weight."
    nn.utils.parametrize.register_parametrization(
        layer, "weight", nn.Softplus()
    )
    return layer


def test_all_names_of_a_shared_layer_are_skipped():
    model = nn.Module()
    model.a = model.b = nn.LayerNorm(4)
    left = to_normality(model, skip="b", return_report=True)[1].left
    assert [r.name for r in left] == ["a = b"]


@quiet
def test_parametrized_layers_stay_parametrized():
    layer, u = positive(nn.BatchNorm1d(3)), torch.randn(8, 3)
    expected = layer.eval()(u)
    to_normality(layer)
    assert isinstance(layer, normalnorm.BatchNormalNorm1d)
    torch.testing.assert_close(layer(u), expected)
    layer.parametrizations.weight.original.data.fill_(-30)
    assert (layer(u) - layer.bias).abs().max() < 1e-9
    assert isinstance(copy.deepcopy(layer), normalnorm.BatchNormalNorm1d)
    to_plain(layer)
    assert isinstance(layer, nn.BatchNorm1d)
    assert not isinstance(layer, normalnorm.BatchNormalNorm1d)
    nn.utils.parametrize.remove_parametrizations(to_normality(layer), "weight")
    assert type(layer) is normalnorm.BatchNormalNorm1d


class Whitened(normalnorm.DecorrelatedBatchNorm2d):
    def forward(self, input):
        return super().forward(input)


class Doubled(normalnorm.DecorrelatedBatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


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
        (lambda: Annotated(5), "BatchNormalNorm1d", (6, 5)),
        (lambda: Channels(2048), "LayerNormalNorm2d", (2, 2048, 1, 1)),
        (
            lambda: Whitened(4, group_size=3),
            "DecorrelatedBatchNormalNorm2d",
            (5, 4, 3, 3),
        ),
    ],
)
def test_subclasses_are_tried_out(make, after, shape):
    model, u = nn.Sequential(make()).eval(), torch.randn(shape)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    original, expected = type(model[0]), model(u)
    state, draw = names_of(model.state_dict()), torch.get_rng_state()
    _, report = to_normality(model, noise=0.0, alpha=0.0, return_report=True)
    assert report.replaced[0].after == after
    assert torch.equal(torch.get_rng_state(), draw)
    torch.testing.assert_close(model(u), expected, rtol=1e-5, atol=1e-5)
    assert names_of(model.state_dict()) == state
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(u), model(u))
    for layer in (model, loaded):
        to_plain(layer)
        assert type(layer[0]) is original and torch.equal(layer(u), expected)


class Masked(nn.GroupNorm):
    def forward(self, x, mask=None):
        return super().forward(x)


class Helper(nn.BatchNorm2d):
    "The same in evaluation, another estimate in training."

    def forward(self, x):
        return (
            super().forward(2 * x if self.training else x) if self.affine else x
        )


def adding(**more):
    "A subclass of batch norm with something more."
    return type("Adding", (nn.BatchNorm1d,), more)(3)


class Annotated(nn.BatchNorm1d):
    "Adds a plain value, which changes nothing."

    surprise = 3


def untracked_by_hand():
    layer = nn.BatchNorm1d(3)
    layer.running_mean = layer.running_var = None
    return layer


def wrapped():
    layer = nn.LayerNorm(3)
    inner = layer.forward
    layer.forward = lambda x: inner(x)
    return layer


def called(name):
    return type(name, (nn.Module,), {})()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: nn.LazyBatchNorm2d(), "lazy"),
        (lambda: called("Qwen2RMSNorm"), "root-mean-square"),
        (lambda: called("FrozenBatchNorm2d"), "constants"),
        (lambda: called("T5LayerNorm"), "knows"),
        (lambda: nn.LocalResponseNorm(2), "knows"),
        (untracked_by_hand, "taken away"),
        (wrapped, "replaced on the object"),
        (lambda: Masked(1, 2), "x, mask"),
        (lambda: adding(summary=lambda layer: "mine"), "summary"),
        # no method, and called though no function of the class
        (lambda: adding(size=property(lambda layer: layer.eps)), "size"),
        (lambda: adding(help=partial(print, "surprise")), "help"),
        (lambda: Helper(3), "something else"),
        (
            lambda: Doubled(4),
            "a subclass of DecorrelatedBatchNorm2d whose forward does "
            "something else, on random input",
        ),
        (lambda: normalnorm.DecorrelatedBatchNormalNorm2d(4), "already"),
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
    before, report = type(model[0]), survey(model)
    (row,) = report.left
    assert report.replaced == () and words in row.reason
    assert words in str(report) and "0 replaced, 1 left" in str(report)
    if words != "already":
        with pytest.warns(UserWarning, match="left as they are"):
            to_normality(model)
    assert type(model[0]) is before


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


def net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.Sequential(
            nn.Conv2d(4, 4, 3),
            normalnorm.DecorrelatedBatchNorm2d(4, group_size=2),
            nn.GroupNorm(2, 4),
        ),
        nn.Flatten(),
        nn.LayerNorm(16),
    )


@quiet
def test_newton_schulz_is_noted():
    "A root that is approximate is another layer than the exact one."
    options = dict(method="newton_schulz", iterations=2)
    model = nn.Sequential(normalnorm.DecorrelatedBatchNorm2d(4, **options))
    u = torch.randn(5, 4, 3, 3).exp()
    model(u)
    rough = model.eval()(u)
    _, report = to_normality(model, return_report=True)
    assert report.notes == (
        "0 whitens approximately, by Newton–Schulz: the normality layer "
        "standardizes each channel besides",
    )
    assert (model(u) - rough).abs().max() > 0.1 and model[0].noise == 0.4
    _, back = to_plain(model, return_report=True)
    assert torch.equal(model(u), rough) and "0" in back.notes[0]
    assert (model[0].noise, model[0].gaussianizer) == (0.0, Identity())


@pytest.mark.parametrize(
    "skip, left",
    [
        ("1", ["1"]),
        ("2", ["2.1", "2.2"]),
        ("2.*", ["2.1", "2.2"]),
        ("*.1", ["2.1"]),
        (nn.BatchNorm2d, ["1"]),
        (lambda name, module: name == "4", ["4"]),
        (["1", nn.GroupNorm], ["1", "2.2"]),
        (None, []),
    ],
)
def test_skip(skip, left):
    model = net()
    report = to_normality(model, skip=skip, return_report=True)[1]
    assert [r.name for r in report.left] == left
    assert len(report.replaced) == 4 - len(left)
    assert all(r.reason == "skipped, as asked" for r in report.left)


@pytest.mark.filterwarnings("error")
def test_skipped_ways_back_are_no_warning():
    "What no conversion knows is one even so."
    model = nn.Sequential(
        nn.LocalResponseNorm(2), normalnorm.BatchNormalNorm1d(4)
    )
    model[1]._plain = "no_such_package:Norm"
    (row,) = to_plain(model, skip="1", return_report=True)[1].left
    assert to_plain(model, skip="1") is model
    assert (row.name, row.reason) == ("1", "skipped, as asked")
    with pytest.warns(UserWarning, match="LocalResponseNorm.*not a normalizer"):
        to_normality(model, skip=["0", "1"])


def unwrapped():
    "What DistributedDataParallel looks like, without processes."
    wrapper = nn.parallel.DistributedDataParallel.__new__(
        nn.parallel.DistributedDataParallel
    )
    nn.Module.__init__(wrapper)
    wrapper.module = net()
    return wrapper


def refused(**options):
    "The call must have changed nothing."
    model = net()
    before = described(model)
    try:
        to_normality(model, **options)
    finally:
        assert described(model) == before


test_wrong_arguments = refusals(
    [
        (partial(refused, skip="2.7"), ValueError, "did you mean|known are"),
        (partial(refused, skip=[3]), TypeError, "names, classes"),
        (partial(refused, alpha=2.0), ValueError, "alpha"),
        (partial(refused, noise=-1.0), ValueError, "noise"),
        (partial(refused, noise_kind="loud"), ValueError, "noise_kind"),
        (partial(refused, steps=0), ValueError, "steps"),
        (lambda: to_normality([nn.LayerNorm(3)]), TypeError, "Module"),
        (
            lambda: to_normality(unwrapped()),
            ValueError,
            "before it is wrapped",
        ),
    ]
)


def test_a_copy_leaves_the_model_alone():
    model = net()
    twin = to_normality(model, inplace=False)
    assert type(model[1]) is nn.BatchNorm2d
    assert type(twin[1]) is normalnorm.BatchNormalNorm2d
    assert twin[1].weight is not model[1].weight


def test_noise_defaults_by_kind_and_settings_reach_every_layer():
    def settings(**options):
        return [
            (m.noise, m.alpha, m.safeguard, m.noise_kind, m.steps)
            for m in to_normality(net(), **options).modules()
            if hasattr(m, "noise")
        ]

    given = dict(alpha=0.5, safeguard=True, noise_kind="dropout")
    assert settings(**given) == [
        (noise, 0.5, True, "dropout", 1) for noise in (0.4, 0.4, 0.4, 1.0)
    ]
    assert {noise for noise, *_ in settings(noise=0.0)} == {0.0}


def test_lazy_layers_after_their_first_batch():
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    lazy(torch.randn(4, 3))
    assert type(to_normality(lazy)[0]) is normalnorm.BatchNormalNorm1d
    _, report = to_normality(nn.BatchNorm1d(3), return_report=True)
    assert isinstance(report, Report) and "(the model)" in str(report)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@quiet
def test_the_fused_path_of_encoder_layers_is_switched_off_and_on_again(
    norm_first,
):
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, norm_first=norm_first
    )
    model, u = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8)
    mask = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    before = described(model)
    with torch.no_grad():
        plain = model(u)
        _, report = to_normality(model, return_report=True)
        assert len(report.replaced) == 4 and len(report.notes) >= 2
        without_gradients = model(u)
        for more in ({}, {"src_key_padding_mask": mask}):
            assert bypassed(model, u, **more) == []
    # the path that is never fused
    torch.testing.assert_close(without_gradients, model(u))
    assert (without_gradients - plain).abs().max() > 1e-2
    to_plain(model)
    assert described(model) == before
    assert all(m.activation_relu_or_gelu for m in model.layers)
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


@pytest.mark.filterwarnings("error")
def test_to_plain_says_that_lambda_is_lost():
    model = to_normality(nn.Sequential(nn.BatchNorm1d(3)))
    _, report = to_plain(copy.deepcopy(model), return_report=True)
    assert report.notes == ()  # λ is 1: nothing is lost
    model(torch.randn(9, 3).exp())
    for layer in (copy.deepcopy(model), normalnorm.LayerNormalNorm(3)):
        with pytest.warns(UserWarning, match="dropped"):
            to_plain(layer)
    model[0].alpha = 0.0
    to_plain(model)


def test_to_plain_says_what_has_no_way_back():
    class Own(normalnorm.LayerNormalNorm):
        pass

    gone = to_normality(Channels(3))
    gone._plain = "no_such_package:Layer"
    for layer, words in ((Own(3), "twin"), (gone, "not installed")):
        before = type(layer)
        with pytest.warns(UserWarning, match=words):
            assert type(to_plain(nn.Sequential(layer))[0]) is before


def test_a_state_of_other_number_types():
    ours = to_normality(net())
    state = ours.state_dict()
    assert plain_state_dict(state)._metadata == state._metadata
    for dtype in (torch.float64, torch.float16, torch.int64):
        lmbda = torch.full((4,), 2, dtype=dtype)
        ours.load_state_dict({**state, "1.running_lambda": lmbda})
        assert ours[1].running_lambda.tolist() == [2.0] * 4
        assert ours[1].running_lambda.dtype == torch.float32


def test_averages_of_others_stay_in_a_plain_state():
    names = [
        "running_lambda",
        "a.running_lambda",
        "b.running_lambda",
        "b.running_mean",
    ]
    state = dict.fromkeys(names, torch.ones(2))
    assert list(plain_state_dict(state)) == [*names[:2], names[3]]


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"1.running_lambda": None}, "running_lambda"),
        (
            {"1.running_lambda": ..., "1.running_mean": ...},
            "1.running_mean.*1.running_lambda",
        ),
    ],
)
def test_broken_checkpoints(changed, words):
    ours = to_normality(net())
    state = {**ours.state_dict(), **changed}
    with pytest.raises((RuntimeError, AttributeError, TypeError), match=words):
        ours.load_state_dict({k: v for k, v in state.items() if v is not ...})


class MakesATensor(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + torch.zeros(())


def test_meta_and_uninitialized():
    made = lambda: to_normality(nn.Sequential(net(), Channels(4), Act(3)))
    with torch.device("meta"):
        model = made()
        # tried out on the CPU, also what it makes itself
        assert survey(MakesATensor(3)).replaced
    assert all(v.is_meta for v in (*model.parameters(), *model.buffers()))
    assert type(model[1]) is LayerNormalNorm2d
    source, u = made(), torch.ones(2, 1, 6, 6)
    model.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(model[0].eval()(u), source[0].eval()(u))


def test_synchronization_keeps_parametrized_and_fused_layers():
    model, u = nn.Module(), torch.randn(8, 3)
    model.c = positive(normalnorm.BatchNormalNorm1d(3))
    model.d = to_normality(Act(3), noise=0.0)
    images = torch.randn(4, 3, 2, 2)
    expected = model.c.eval()(u), model.d.eval()(images)
    convert_sync(model)
    for layer in (model.c, model.d):
        assert isinstance(layer, SyncBatchNormalNorm)
    torch.testing.assert_close(
        (model.c(u), model.d(images)), expected, rtol=0, atol=0
    )


@FOLLOWS
def test_a_compiled_model_notices_the_conversion():
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5)).eval()
    compiled = torch.compile(model, backend="aot_eager")
    u = torch.randn(3, 4).exp()
    before = compiled(u)
    to_normality(model)
    torch.testing.assert_close(compiled(u), model(u))
    assert (compiled(u) - before).abs().max() > 1e-3


def test_what_is_no_rms_norm_is_left():
    t = installed("transformers")
    config = t.NemotronConfig(**SMALL, num_key_value_heads=2, vocab_size=50)
    report = survey(t.NemotronModel(config))
    assert [r.before for r in report.left] == ["NemotronLayerNorm1P"] * 5
    assert not report.replaced
