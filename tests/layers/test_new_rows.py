"""A layer is one chapter and one row: a dynamic arctangent, which has no
statistics, and a norm by the mean absolute deviation, put into a copy of the
repository as CONTRIBUTING says. Nothing else is edited; the tests of every row
try them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.files import ROOT

notebook = pytest.importorskip("nbformat.v4", reason="the tools are missing")

DYNAMIC_ARCTAN = '''#| export
import torch
from torch import Tensor, nn

from normalnorm.layers.families import register
from normalnorm.layers.guards import (
    Leaf,
    check_input,
    check_precision,
    sizes,
)


class DynamicArctan(Leaf):
    """Dynamic arctangent over the last axes, of sizes `normalized_shape`: no
    statistics at all.

    y = γ·arctan(α·u) + β

    `alpha`: what α begins with. Source: chapter 311.

    Example:

        >>> DynamicArctan(2)(torch.zeros(1, 2)).tolist()
        [[0.0, 0.0]]
    """

    def __init__(self, normalized_shape, alpha=0.5, device=None, dtype=None):
        super().__init__()
        self.normalized_shape = sizes("normalized_shape", normalized_shape)
        made = dict(device=device, dtype=dtype)
        self.alpha = nn.Parameter(torch.full((), alpha, **made))
        self.weight = nn.Parameter(torch.ones(self.normalized_shape, **made))
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape, **made))

    def forward(self, input: Tensor) -> Tensor:
        "Squash `input`, then the affine map."
        check_input(input)
        check_precision(input, weight=self.weight, bias=self.bias)
        shape = self.normalized_shape
        if input.shape[-len(shape) :] != shape:
            raise ValueError(
                f"the input's last axes must be normalized_shape={shape}, "
                f"given a shape of {tuple(input.shape)}"
            )
        x = torch.atan(self.alpha * input) * self.weight + self.bias
        return x.to(input.dtype)


register(
    DynamicArctan,
    "dya",
    axes="B … C",
    unit=None,
    reference=lambda own, x: own.weight * torch.atan(own.alpha * x) + own.bias,
)'''
ABSOLUTE_DEVIATION = '''#| export
from torch import Tensor

from normalnorm.layers.backends import along_channels
from normalnorm.layers.core import Rule, affine, saturating_cast
from normalnorm.layers.families import register
from normalnorm.layers.functional import _single
from normalnorm.layers.guards import check_channels, size
from normalnorm.layers.normality import _NormalNorm
from normalnorm.theory.gradient import Identity
from normalnorm.theory.newton import upcast


class AbsoluteDeviation(_NormalNorm):
    """Each channel of (B, C, …) less its mean over the batch, by its mean
    absolute deviation; no running averages.

    y = γ·(u − μ)/(s + ε) + β

    `num_features`: channels; `eps`: ε. Source: chapter 238.

    Example:

        >>> from torch import tensor
        >>> AbsoluteDeviation(1, eps=0.0)(tensor([[1.0], [3.0]])).tolist()
        [[-1.0], [1.0]]
    """

    def __init__(self, num_features, eps=1e-5, device=None, dtype=None):
        super().__init__()
        self.num_features = size("num_features", num_features)
        rule = Rule.of(eps, gaussianizer=Identity())
        shape = (self.num_features,)
        self._set_up(shape, rule, device, dtype, weight=True, bias=True)
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        "Centre and divide."
        self._check_axes(input)
        check_channels(input, weight=self.weight, bias=self.bias)
        if input.numel() == self.num_features:
            raise _single(input.shape)
        u, dim = upcast(input), (0, *range(2, input.ndim))
        c = u - u.mean(dim, keepdim=True)
        h = c / (c.abs().mean(dim, keepdim=True) + self.eps)
        weight, bias = (
            along_channels(p, u.ndim) for p in (self.weight, self.bias)
        )
        return saturating_cast(affine(h, weight, bias), input.dtype)


def _by_rows(own, u: Tensor) -> Tensor:
    rows = u.movedim(1, 0)
    flat = rows.flatten(1)
    c = flat - flat.mean(1, keepdim=True)
    h = c / (c.abs().mean(1, keepdim=True) + own.eps)
    out = h * own.weight[:, None] + own.bias[:, None]
    return out.view(rows.shape).movedim(0, 1)


register(
    AbsoluteDeviation, "mad", axes="B C …", unit="C", reference=_by_rows
)'''
CHAPTERS = {
    "316_layers.dynamic_arctan": ("Dynamic arctangent", DYNAMIC_ARCTAN),
    "317_layers.absolute_deviation": ("By absolute values", ABSOLUTE_DEVIATION),
}
BEFORE = "      - file: nbs/320_theory.geometry\n"


def written(root: Path, *words: str) -> str:
    "What a command prints there; it must succeed."
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "The repository with both chapters, exported, and their states recorded."
    root = tmp_path_factory.mktemp("with new rows")
    for name in subprocess.check_output(
        ["git", "ls-files", "-z"], cwd=ROOT, text=True
    ).split("\0"):
        if name and not name.startswith("results/") and (ROOT / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    (root / "results").symlink_to(ROOT / "results")
    contents = root / "_toc.yml"
    for name, (title, code) in CHAPTERS.items():
        module = name.partition("_")[2]
        cells = [
            notebook.new_markdown_cell(f"# {title}\n\n> A layer."),
            notebook.new_code_cell(f"#| default_exp {module}"),
            notebook.new_code_cell(code),
        ]
        made = notebook.new_notebook(cells=cells)
        (root / f"nbs/{name}.ipynb").write_text(json.dumps(made, indent=1))
        text = contents.read_text()
        assert text.count(BEFORE) == 1
        line = f"      - file: nbs/{name}\n"
        contents.write_text(text.replace(BEFORE, line + BEFORE))
    written(root, "tools.export")
    written(root, "tests.state.record")
    return root


def test_they_are_public_and_tried_like_every_row(copy):
    "By name, in the table, and by the tests of rows."
    files = ("families", "accepted", "harness", "state", "modules", "traced")
    said = written(
        copy,
        *("pytest", "-vv", "-p", "no:cacheprovider", "-n", "0", "-k"),
        "dya or mad or Arctan or Absolute or exported or formula "
        "or gaussianizer or exports_are or each_name",
        *(f"tests/layers/test_{name}.py" for name in files),
    )
    assert min(said.count("[dya "), said.count("[mad ")) > 10
    for name in ("exports_are_the_rows", "each_name_makes_its_layer"):
        assert re.search(f"::test_{name}\\w* PASSED", said)
    assert "FAILED" not in said and "failed" not in said
