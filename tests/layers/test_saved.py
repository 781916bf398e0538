"""A converted model that was saved: plain → converted, converted → plain,
converted → converted, and models of transformers in another process.
"""

import copy
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from normalnorm import load_converted, to_normality, to_plain
from normalnorm.layers.conversion import bypassed, plain_state_dict
from normalnorm.layers.core import Rule
from normalnorm.theory.gaussianizers import Chain, Tail
from normalnorm.theory.gradient import Gaussianizer, Identity, Power
from tests.peers import installed
from tests.refusals import refusals
from tools.homes import SMALL


def network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, eps=1e-3),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4),
        nn.Flatten(),
        nn.LayerNorm(36, elementwise_affine=False),
        nn.RMSNorm(36),
    )


def converted(**settings):
    model = to_normality(network(), **settings)
    for _ in range(3):
        model(torch.randn(8, 3, 5, 5).exp())
    return model.eval()


U = torch.randn(5, 3, 5, 5)
SETTINGS = [
    {},
    dict(noise=0.3, alpha=0.5, steps=2, safeguard=True, noise_kind="unscaled"),
    dict(gaussianizer=Chain(Power(alpha=0.3), Tail()), skip="2"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("how", ["state", "torch", "safetensors", "half"])
def test_what_is_rebuilt_is_what_was_saved(settings, how, tmp_path):
    model = converted(**settings)
    state = model.state_dict()
    if how == "torch":
        torch.save(state, tmp_path / "model.pt")
        state = tmp_path / "model.pt"
    elif how == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        state = str(tmp_path / "model.safetensors")
        safetensors.save_file(model.state_dict(), state)
    elif how == "half":  # no rule is rounded
        state = model.half().state_dict()
    again = load_converted(network(), state)
    assert str(again) == str(model)
    assert torch.equal(again.eval()(U), model.float()(U))
    other = to_normality(network(), alpha=0.1)
    if "gaussianizer" in settings:
        with pytest.raises(ValueError, match="a normality layer already"):
            load_converted(other, state)
    else:  # what is converted already takes the rules
        assert str(load_converted(other, state)) == str(model)
        assert torch.equal(other.eval()(U), model(U))


@pytest.mark.filterwarnings("error")
def test_plain_and_converted_states():
    plain, model = network().eval(), converted()
    loaded = to_normality(network()).eval()
    loaded.load_state_dict(plain.state_dict())
    assert (loaded[1].running_lambda == 1).all()
    with pytest.raises(RuntimeError, match=r'key\(s\).*"5._extra_state"'):
        plain.load_state_dict(model.state_dict())
    found = plain.load_state_dict(model.state_dict(), strict=False)
    assert set(found.unexpected_keys) == {
        "1.running_lambda",
        *(f"{i}._extra_state" for i in (1, 2, 3, 5, 6)),
    }
    plain.load_state_dict(plain_state_dict(model.state_dict()))
    assert torch.equal(
        plain(U), to_plain(copy.deepcopy(model), return_report=True)[0](U)
    )


@pytest.mark.parametrize(
    "changed, differs",
    [
        (dict(noise=0.0), False),
        (dict(noise_kind="unscaled"), False),
        (dict(safeguard=True), True),
        (dict(alpha=0.99), True),
        (dict(steps=2), True),
        (dict(gaussianizer=Power()), False),
    ],
    ids=str,
)
def test_a_layer_keeps_its_rule_and_says_so(changed, differs, recwarn):
    layer = to_normality(nn.LayerNorm(4), **changed)
    state, before = to_normality(nn.LayerNorm(4)).state_dict(), str(layer)
    layer.load_state_dict(state)
    assert str(layer) == before
    assert [("keeps its rule" in str(w.message)) for w in recwarn] == [
        True
    ] * differs


@pytest.mark.filterwarnings("error")
def test_what_computes_the_same_is_no_other_rule():
    state = to_normality(nn.LayerNorm(4), alpha=0.0).state_dict()
    layer = to_normality(nn.LayerNorm(4), gaussianizer=Identity())
    layer.load_state_dict(state)
    assert layer.gaussianizer == Identity()


def test_bytes_of_others_are_no_rule():
    "Of a mask, of quantized weights, of the extra state of another library."
    others = {
        "mask": torch.ones(2, 3, dtype=torch.uint8),
        "a._extra_state": torch.full((9,), 200, dtype=torch.uint8),
        "b._extra_state": torch.tensor(list(b"Rule"), dtype=torch.uint8),
    }
    assert plain_state_dict(others) == others
    with pytest.raises(ValueError, match="no normality layer in it"):
        load_converted(network(), others)


def test_one_layer_in_two_places():
    "Parametrized, so that its class is its own."

    def made():
        norm = nn.LayerNorm(4)
        parametrize.register_parametrization(norm, "weight", nn.Softplus())
        return nn.Sequential(norm, nn.Linear(4, 4), norm)

    saved = to_normality(made(), alpha=0.5).eval()
    again, u = load_converted(made(), saved.state_dict()).eval(), U[0, 0, :, :4]
    assert again[0] is again[2] and torch.equal(again(u), saved(u))
    assert isinstance(to_plain(again, return_report=True)[0][0], nn.LayerNorm)


def test_an_encoder_calls_its_norms():
    make = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    state, u = to_normality(make()).state_dict(), torch.randn(2, 5, 8)
    assert bypassed(load_converted(make(), state).eval(), u) == []


class MakesATensor(nn.Module):
    "A norm of a stranger, which is tried out on the CPU."

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight * nn.functional.rms_norm(x, (4,), eps=1e-5) + (
            torch.zeros(())
        )


MakesATensor.__name__ = "ItsNorm"


def test_built_where_there_is_no_memory():
    state = to_normality(MakesATensor(), alpha=0.5).state_dict()
    with torch.device("meta"):
        model = load_converted(MakesATensor(), state)
    assert model.weight.is_meta and model.alpha == 0.5


@dataclass(frozen=True)
class Longer(Tail):
    "A gaussianizer of a user, two classes below ours."


def test_a_gaussianizer_of_ones_own():
    made = to_normality(nn.LayerNorm(4), gaussianizer=Longer(steps=2))
    again = load_converted(nn.LayerNorm(4), made.state_dict())
    assert again.gaussianizer == Longer(steps=2)


class Anything:
    pass


def test_a_file_runs_nothing(tmp_path):
    torch.save({"a": Anything()}, tmp_path / "model.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_converted(network(), tmp_path / "model.pt")


class Foreign(Gaussianizer):
    "Prints as nothing that could be built again."

    def reduced(self):
        return self


def test_what_does_not_fit():
    state = converted().state_dict()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = str(model)
    for words, wrong, given in (
        ("no module of that name", model, state),
        (
            "is a Linear: no normalizer",
            nn.Sequential(*[nn.Linear(4, 4)] * 7),
            state,
        ),
        ("no normality layer in it", model, model.state_dict()),
        ("expected a torch.nn.Module", "model", state),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            load_converted(wrong, given)
    assert str(model) == before
    load_converted(model, state, strict=False)
    assert model[1].noise == 0.4 and len(model) == 2
    with pytest.raises(TypeError, match="device_map: options are for"):
        load_converted(network(), state, device_map="auto")
    made = to_normality(nn.LayerNorm(4), gaussianizer=Foreign())
    with pytest.raises(ValueError, match="Foreign.*is not a rule"):
        load_converted(nn.LayerNorm(4), made.state_dict())
    with pytest.warns(UserWarning, match="Foreign.*is not a rule"):
        to_normality(nn.LayerNorm(4)).load_state_dict(made.state_dict())


test_a_text_that_is_no_rule_runs_nothing = refusals(
    [
        ("Rule(", "is not a rule"),
        ("Power()", "is not a rule"),
        ("Rule(open('x'))", "is not a rule"),
        ("Rule(eps=Gaussianizer)", "is not a rule"),
        ("Rule(3, d=1)", "is not a rule"),
    ],
    Rule.parse,
)


ANOTHER_PROCESS = """
import sys, torch
from tests.peers import installed
t, normalnorm = installed("transformers"), __import__("normalnorm")
for name, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    model = normalnorm.load_converted(getattr(t, name), folder).eval()
    assert "Converted" not in str(type(model)), name
    with torch.no_grad():
        found = model(torch.arange(12).reshape(2, 6))[0]
    kept = torch.load(folder + "/found.pt")
    assert torch.equal(found, kept[..., :found.shape[-1]]), name
"""


@pytest.mark.processes
def test_models_of_transformers(tmp_path):
    """Saved in two files, built by its class, by an Auto class, without its
    head, with layers left out; the configuration of another model says nothing.
    """
    t = installed("transformers")
    small = SMALL | {"vocab_size": 50}
    bert = t.BertConfig(**small)
    llama = t.LlamaConfig(**small, tie_word_embeddings=True)
    given = []
    for config, cls, builder, skip, size in (
        (bert, "BertForMaskedLM", "BertForMaskedLM", "*.0.*", "20KB"),
        (bert, "BertModel", "AutoModel", None, "1GB"),
        (llama, "LlamaForCausalLM", "AutoModelForCausalLM", None, "1GB"),
    ):
        model = getattr(t, cls)(config).eval()
        to_normality(model, skip=skip, alpha=0.7, return_report=True)
        assert not hasattr(config, "normality")
        assert all(
            getattr(part, "config", model.config) is model.config
            for part in model.modules()
        )
        folder = tmp_path / cls
        model.save_pretrained(folder, max_shard_size=size)
        with torch.no_grad():
            out = model(torch.arange(12).reshape(2, 6))[0]
        torch.save(out, folder / "found.pt")
        given += [builder, str(folder)]
        plain = to_plain(copy.deepcopy(model), return_report=True)[0]
        assert model.config.normality and plain.config.normality == {}
        plain.save_pretrained(tmp_path / "plain")
        with pytest.raises(ValueError, match="names no normality layers"):
            load_converted(type(plain), tmp_path / "plain")
    subprocess.run([sys.executable, "-c", ANOTHER_PROCESS, *given], check=True)
    # the masked language model without its head: names begin with "bert."
    body = load_converted(t.BertModel, tmp_path / "BertForMaskedLM")
    assert type(body.encoder.layer[1].output.LayerNorm).__name__ == (
        "LayerNormalNorm"
    )
    assert type(body.encoder.layer[0].output.LayerNorm) is nn.LayerNorm


def trained(model, inputs, labels):
    "Three steps of an adapter."
    torch.manual_seed(3)
    learned = [p for p in model.train().parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs, labels=labels).loss.backward()
        optimizer.step()
    with torch.no_grad():
        return model.eval()(inputs).logits


ADAPTED = {
    "bert": ("BertForSequenceClassification", ["query", "value"], "LayerNorm"),
    "resnet": (
        "ResNetForImageClassification",
        ["convolution"],
        "normalization",
    ),
}


@pytest.mark.parametrize("architecture", ADAPTED)
def test_low_rank_adapters(architecture, tmp_path):
    """At settings that change nothing an adapter learns what it learns on the
    plain model; merged, saved and loaded it computes the same, averages and all
    where the norms are named.
    """
    t, peft = installed("transformers"), installed("peft")
    name, targets, norms = ADAPTED[architecture]
    labels = torch.tensor([0, 1, 0, 1])
    if architecture == "bert":
        config = t.BertConfig(**SMALL | {"vocab_size": 50})
        inputs = torch.randint(0, 50, (4, 8))
    else:
        config = t.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=2
        )
        inputs = torch.randn(4, 3, 32, 32)
    plain = getattr(t, name)(config)

    def adapted(model):
        torch.manual_seed(1)
        lora = peft.LoraConfig(
            r=2, target_modules=targets, modules_to_save=[norms]
        )
        return peft.get_peft_model(copy.deepcopy(model), lora)

    unchanged = to_normality(copy.deepcopy(plain), alpha=0.0, noise=0.0)
    torch.testing.assert_close(
        trained(adapted(unchanged), inputs, labels),
        trained(adapted(plain), inputs, labels),
        rtol=1e-4,
        atol=1e-5,
    )
    converted = to_normality(copy.deepcopy(plain), noise=0.3)
    model = adapted(converted)
    out = trained(model, inputs, labels)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(converted, tmp_path / "adapter")
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    rebuilt = load_converted(type(plain), tmp_path / "merged")
    with torch.no_grad():
        assert torch.equal(again.eval()(inputs).logits, out)
        torch.testing.assert_close(merged(inputs).logits, out)
        assert torch.equal(rebuilt.eval()(inputs).logits, merged(inputs).logits)
