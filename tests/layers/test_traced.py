"""What is done to torch.nn's layers by PyTorch's own tools, done to ours:
traced by `torch.jit` and `torch.fx`, prepared for quantization, mapped, fused.
"""

import copy
import io

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import fusion

from normalnorm.layers.folding import fold
from normalnorm.layers.guards import lies_last
from tests.layers.steps import refusals, step
from tests.state.record import exported
from tests.toys import Of
from tools.rows import trials

C = exported()
# every row of the table that takes images, or their last axis
LAYERS = {
    t.name: t._replace(shape=(3, 5, 6)) if t.kind == "B L C" else t
    for t in trials()
    if t.kind in ("B C H W", "B L C")
}
LAYERS |= {
    "safeguard": LAYERS["layer"].having(safeguard=True),
    "steps": LAYERS["batch2"].having(steps=2),
}
EACH = pytest.mark.parametrize("name", LAYERS)
AVERAGES = [name for name, trial in LAYERS.items() if trial.averages]
CLOSE = dict(rtol=1e-5, atol=1e-5)


def images(batch=3) -> torch.Tensor:
    return torch.randn(batch, 4, 5, 6).exp()


def network(name) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), LAYERS[name].ours(), nn.ReLU())
    model(images())
    return model


def again(function, *args):
    torch.manual_seed(7)
    return function(*args)


# ---- torch.jit --------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
@EACH
def test_a_network_is_traced(name):
    "In evaluation, for any batch; from a file, too."
    model = network(name).eval()
    traced, file = torch.jit.trace(model, (images(),)), io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    for batch in (3, 7):
        u = images(batch)
        with torch.no_grad():
            for f in (traced, loaded):
                torch.testing.assert_close(f(u), model(u), **CLOSE)
    found = [
        torch.autograd.grad(f(u).sin().sum(), model.parameters())
        for f in (traced, model)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in LAYERS if "decorrelated" not in n])
def test_a_layer_is_traced_in_training(name):
    """For any batch: noise, statistics and averages are those of the batch that
    comes, not of the one that was traced.
    """
    layer = LAYERS[name].ours()
    layer(images())
    traced = torch.jit.trace(
        copy.deepcopy(layer), (images(),), check_trace=False
    )
    traced.load_state_dict(layer.state_dict(), strict=False)
    for batch in (7, 2):
        found = []
        for module in (traced, layer):
            torch.manual_seed(batch)
            found.append(again(step, module, torch.rand(batch, 4, 5, 6)))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        dict(traced.named_buffers()), dict(layer.named_buffers()), **CLOSE
    )


test_a_trace_that_would_lose_its_gradient_is_refused = (
    pytest.mark.filterwarnings("ignore")(
        refusals(
            [
                (trial, r"gradient of the whitening.*\.eval\(\)")
                for name, trial in LAYERS.items()
                if "decorrelated" in name
            ],
            lambda trial: torch.jit.trace(trial.ours(), (images(),)),
            RuntimeError,
        )
    )
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "layer",
    {t.row.layer: t for t in trials()}.values(),
    ids=lambda t: t.row.layer.__name__,
)
@pytest.mark.parametrize(
    "where",
    [
        lambda ours: ours,
        lambda ours: nn.Sequential(
            nn.Linear(3, 3), nn.ModuleDict({"inner": ours})
        ),
    ],
    ids=["alone", "in a model"],
)
def test_scripting_is_refused_in_words(layer, where):
    model = where(layer.ours())
    with pytest.raises(
        RuntimeError,
        match=(
            f"^torch.jit.script was given a {layer.row.layer.__name__},.*not "
            r"supported.*torch\.export.*torch\.compile.*torch\.jit\.trace"
        ),
    ):
        torch.jit.script(model)


test_scripting_of_what_has_no_row_is_refused_too = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)(
    refusals(
        [
            (name, arguments, f"given a {name},.*torch.export")
            for name, arguments in (
                ("FoldedNormality", (torch.full((4,), 0.5),)),
                ("ProxyNorm", (4, nn.ReLU())),
                ("PreLayerNormLinear", (4, 3)),
                ("RegNormConv2d", (4, 3, 1)),
            )
        ],
        lambda name, of: torch.jit.script(nn.Sequential(C[name](*of))),
        RuntimeError,
    )
)


# ---- torch.fx ---------------------------------------------------------------


@EACH
def test_fx_takes_a_layer_as_one(name):
    model = network(name)
    traced = fx.symbolic_trace(model)
    calls = [
        node.target for node in traced.graph.nodes if node.op == "call_module"
    ]
    assert calls == ["0", "1", "2"] and type(traced.get_submodule("1")) is type(
        model[1]
    )
    for training in (True, False):
        u, other = images(), copy.deepcopy(model).train(training)
        traced.load_state_dict(model.state_dict())
        found = again(traced.train(training), u), again(other, u)
        torch.testing.assert_close(*found, rtol=0, atol=0)
        torch.testing.assert_close(
            traced.state_dict(), other.state_dict(), rtol=0, atol=0
        )


def test_fx_takes_names_of_arguments():
    norm = C["LayerNormalNorm"](6)
    model = Of(lambda own, x: own.norm(input=x), norm=norm).eval()
    u = images()
    torch.testing.assert_close(fx.symbolic_trace(model)(u), model(u))


@EACH
def test_fx_of_a_layer_alone_says_what_to_do(name):
    with pytest.raises(
        TypeError,
        match="torch.fx takes a layer of this library as one "
        "module.*Sequential",
    ):
        fx.symbolic_trace(LAYERS[name].ours())


@pytest.mark.filterwarnings("ignore")
@EACH
def test_quantization_prepares_a_network(name):
    """Observers come round the layer, which stays what it is, and
    quantized-aware training reaches what is before it.
    """
    quantize = pytest.importorskip("torch.ao.quantization.quantize_fx")
    from torch.ao.quantization import (
        get_default_qat_qconfig_mapping,
        get_default_qconfig_mapping,
    )

    u, model = images(), network(name)
    ready = quantize.prepare_fx(
        copy.deepcopy(model).eval(), get_default_qconfig_mapping(), (u,)
    )
    torch.testing.assert_close(ready(u), model.eval()(u), **CLOSE)
    aware = quantize.prepare_qat_fx(
        copy.deepcopy(model).train(), get_default_qat_qconfig_mapping(), (u,)
    )
    aware(u).square().sum().backward()
    weights = [p for n, p in aware.named_parameters() if n == "0.weight"]
    assert len(weights) == 1 and weights[0].grad.abs().sum() > 0
    for prepared in (ready, aware):
        assert type(prepared.get_submodule("1")) is type(model[1])


# ---- evaluation, then training, then the backward passes --------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EACH
def test_a_training_step_does_not_change_an_earlier_gradient(name, dtype):
    layer = LAYERS[name].ours().to(dtype)
    layer.noise = 0.0
    layer(images().to(dtype))
    found = []
    for between in (False, True):
        twin, u = copy.deepcopy(layer), images().to(dtype).requires_grad_()
        u.data.copy_(torch.linspace(-1, 2, u.numel()).view_as(u).sin())
        out = twin.eval()(u)
        if between:
            twin.train()(3 * images().to(dtype))
        found.append(
            torch.autograd.grad(out.sin().sum(), [u, *twin.parameters()])
        )
    torch.testing.assert_close(*found, rtol=0, atol=0)


# ---- vmap -------------------------------------------------------------------


@EACH
def test_vmap_where_channels_lie_last(name):
    """In evaluation, over several batches: as one after the other. (Where they
    do not, and in training: tools.hostile.)
    """
    layer = LAYERS[name].ours()
    layer(images())
    several = torch.stack([images(), images() ** 2])
    several = several.movedim(2, -1).contiguous().movedim(-1, 2)
    expected = torch.stack([layer.eval()(u) for u in several])
    torch.testing.assert_close(
        torch.func.vmap(layer)(several), expected, **CLOSE
    )


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_inside_vmap_are_refused(name):
    "PyTorch's layers refuse them, too."
    layer, several = (
        LAYERS[name].ours().train(),
        torch.stack([images(), images()]),
    )
    layer.noise = 0.0
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match="track_running_stats"):
        torch.func.vmap(nn.BatchNorm2d(4))(several)
    with pytest.raises(RuntimeError, match="vmap.*track_running_stats=False"):
        torch.func.vmap(layer)(several)
    for key, value in layer.state_dict().items():
        if "running" in key:
            assert torch.equal(value, before[key])


def test_where_channels_lie():
    x = torch.randn(2, 3, 4, 5)
    assert not lies_last(x) and lies_last(
        x.contiguous(memory_format=torch.channels_last)
    )
    assert (
        not lies_last(x[:, :, ::2])
        and not lies_last(x[0])
        and not lies_last(x[:, :1].contiguous())
    )


# ---- fusing -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv", "linear"])
def test_what_would_drop_the_transform_is_refused(name):
    "And allowed where there is none; `fold` is right everywhere."
    fuse = getattr(fusion, f"fuse_{name}_bn_eval")
    first = nn.Conv2d(4, 4, 1) if name == "conv" else nn.Linear(4, 4)
    layer = "BatchNormalNorm2d" if name == "conv" else "BatchNormalNorm1d"
    u = images()[:, :4] if name == "conv" else torch.randn(8, 4)
    for alpha in (0.0, 1.0):
        model = nn.Sequential(first, C[layer](4, alpha=alpha))
        model(u.exp())
        model.eval()
        torch.testing.assert_close(fold(model)(u), model(u), **CLOSE)
        if alpha:
            with pytest.raises(TypeError, match=f"{fuse.__name__}.*fold"):
                fuse(*model)
        else:
            torch.testing.assert_close(fuse(*model)(u), model(u), **CLOSE)
    assert model[1].eps == 1e-5


@pytest.mark.filterwarnings("ignore")
def test_other_fusions_leave_the_layers_alone():
    from torch.fx.experimental.optimization import fuse

    quantization = pytest.importorskip("torch.ao.quantization")
    model, u = network("batch2").eval(), images()
    fused = fuse(model)
    assert type(fused.get_submodule("1")) is C["BatchNormalNorm2d"]
    torch.testing.assert_close(fused(u), model(u), **CLOSE)
    with pytest.raises(
        (NotImplementedError, AssertionError), match="BatchNormalNorm2d"
    ):
        quantization.fuse_modules(model, [["0", "1"]])
