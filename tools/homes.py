"""`make homes`: architectures of timm, transformers and torchvision, converted,
saved, loaded, frozen and back; a row for each in results/homes.json.

    python -m tools.homes             all of them (six minutes)
    python -m tools.homes NAME …      these, printed and not recorded

A row says which normalizers became what and which were left, how far the
outputs are from those of before at identity settings, how far those of the
model that was saved and loaded are from those of the converted one, how many
buffers of frozen layers moved in training, which layers the model does not
call, and whether it is what it was after `to_plain`.
"""

import argparse
import copy
import tempfile
import time
import warnings
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normalnorm import load_converted, to_normality, to_plain
from normalnorm.experiments.results import processor
from normalnorm.layers.conversion import bypassed
from normalnorm.layers.running_averages import freeze
from tests.peers import installed
from tools.files import save

RECORD = Path(__file__).resolve().parent.parent / "results" / "homes.json"
TIMM = """
    resnet18 resnet26d resnetv2_50d_gn resnetv2_50d_evos legacy_seresnet18
    regnety_002 efficientnet_b0 efficientvit_b0 mobilenetv2_050
    mobilenetv3_small_050 mobilenetv4_conv_small_035 mnasnet_small ghostnet_050
    convnext_atto convnextv2_atto vit_tiny_patch16_224 deit_tiny_patch16_224
    swin_tiny_patch4_window7_224 poolformer_s12 mixer_s32_224 tinynet_e
    gmlp_ti16_224 xcit_nano_12_p16_224 cait_xxs24_224 levit_128s mobilevit_xxs
    edgenext_xx_small densenet121 dla34 repvgg_a0 pvt_v2_b0 lcnet_035
    visformer_tiny mambaout_femto starnet_s1 pit_ti_224
""".split()
TORCHVISION = """
    resnet18 convnext_tiny densenet121 mobilenet_v2 efficientnet_b0 vit_b_16
    swin_t mnasnet0_5 shufflenet_v2_x0_5 regnet_y_400mf
""".split()
_HEADS = {"head_dim": 8, "num_key_value_heads": 2}
_IMAGES = {"image_size": 32, "patch_size": 8}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {},
    "Electra": {},
    "Albert": {"embedding_size": 16},
    "Deberta": {},
    "DistilBert": {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 32},
    "GPT2": {"n_embd": 16, "n_head": 2, "n_layer": 2},
    "GPTNeoX": {},
    "OPT": {"word_embed_proj_dim": 16, "ffn_dim": 32},
    "Llama": {},
    "Mistral": {"num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": _HEADS,
    "Gemma": _HEADS,
    "Gemma2": _HEADS,
    "Mamba": {},
    "Olmo": {},
    "T5Encoder": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2},
    "ViT": _IMAGES,
    "ConvNext": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "Bit": {
        "embedding_size": 32,
        "hidden_sizes": [32, 64],
        "depths": [1, 1],
        "num_groups": 4,
    },
    "ResNet": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
    },
}
HOMES = [
    *(f"timm {name}" for name in TIMM),
    *(f"transformers {name}" for name in TRANSFORMERS),
    *(f"torchvision {name}" for name in TORCHVISION),
]
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def built(home: str) -> tuple[nn.Module, torch.Tensor]:
    "A model with random weights, in evaluation, and an input for it."
    package, name = home.split()
    library = installed(package)
    torch.manual_seed(0)
    if package == "timm":
        model = library.create_model(name, num_classes=5)
        size = model.default_cfg["input_size"][-1]
        u = torch.randn(2, 3, size, size)
    elif package == "torchvision":
        model = getattr(library.models, name)(weights=None)
        u = torch.randn(2, 3, 224, 224)
    else:
        options = TRANSFORMERS[name]
        options = options if "hidden_sizes" in options else SMALL | options
        if {"hidden_sizes", "image_size"}.isdisjoint(options):
            options = {"vocab_size": 50, "pad_token_id": 0} | options
            u = torch.randint(1, 50, (2, 9))
        else:
            u = torch.randn(2, 3, 32, 32)
        kind = name.removesuffix("Encoder")
        config = getattr(library, f"{kind}Config")(**options)
        model = getattr(library, f"{name}Model")(config)
    for parameter in model.parameters():
        if not parameter.any():  # a last layer that gives nothing but zeros
            nn.init.normal_(parameter, std=0.1)
    return model.eval(), u


def output(model: nn.Module, u: torch.Tensor) -> torch.Tensor:
    "The first result, without gradient."
    with torch.no_grad():
        out = model(u)
    return out if isinstance(out, torch.Tensor) else out[0]


def loaded(home: str, model: nn.Module) -> nn.Module:
    "The converted model again, from what was saved of it."
    with tempfile.TemporaryDirectory() as folder:
        if home.startswith("transformers"):
            model.save_pretrained(folder)
            return load_converted(type(model), folder).eval()
        torch.save(model.state_dict(), Path(folder, "model.pt"))
        other = built(home)[0]
        for parameter in other.parameters():
            nn.init.uniform_(parameter)
        return load_converted(other, Path(folder, "model.pt"))


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    "The largest difference, in parts of the largest value."
    return ((one - other).abs().max() / one.abs().max()).item()


def visit(home: str) -> dict[str, Any]:
    "The row of one architecture."
    model, u = built(home)
    described, expected = repr(model), output(model, u)
    _, report = to_normality(model, noise=0.0, alpha=0.0, return_report=True)
    found = output(model, u)
    row: dict[str, Any] = {
        "replaced": Counter(f"{r.before} → {r.after}" for r in report.replaced),
        "left": Counter(f"{r.before}: {r.reason}" for r in report.left),
        "difference": apart(expected, found),
        "loaded": apart(found, output(loaded(home, model), u)),
        "not called": bypassed(model, u),
    }
    still = copy.deepcopy(model)
    freeze(still)
    before = {name: b.clone() for name, b in still.named_buffers()}
    output(still.train(), u)
    row["moved"] = sum(
        not torch.equal(b, before[name]) for name, b in still.named_buffers()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a transform that does nothing
        to_plain(model)
    same = torch.equal(output(model, u), expected)
    row["back"] = same and repr(model) == described
    return row


def wrong(row: dict[str, Any]) -> bool:
    "Whether a row says that something is not as it should be."
    return "error" in row or not (
        row["replaced"]
        and row["difference"] <= 1e-5
        and row["loaded"] == row["moved"] == 0
        and not row["not called"]
        and row["back"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.homes")
    parser.add_argument("names", nargs="*", help="only these, not recorded")
    names, begun, rows = parser.parse_args().names, time.perf_counter(), {}
    for home in [h for h in HOMES if not names or h.split()[1] in names]:
        try:
            rows[home] = visit(home)
        except Exception as error:  # whatever it was: the others are visited
            rows[home] = {"error": f"{type(error).__name__}: {error}"[:400]}
        print("WRONG" if wrong(rows[home]) else "  ok ", home, rows[home])
    if not names:
        versions = {
            package: installed(package).__version__
            for package in ("timm", "transformers", "torchvision")
        }
        found = {
            "date": date.today().isoformat(),
            "processor": processor(),
            "torch": torch.__version__,
            **versions,
            "seconds": round(time.perf_counter() - begun),
            "rows": rows,
        }
        save(RECORD, found)
    return any(map(wrong, rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
