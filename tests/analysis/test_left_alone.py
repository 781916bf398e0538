"""What every instrument leaves of a model: parameters, gradients, buffers, the
mode of each module, hooks, and PyTorch's random numbers.
"""

from functools import partial

import pytest
import torch
from torch import nn

from normalnorm.analysis.attenuation import noise_attenuation
from normalnorm.analysis.gaussianity import pre_affine
from normalnorm.analysis.gradients import gradient_confusion, gradients
from normalnorm.analysis.power import model_power
from normalnorm.analysis.propagation import layer_correlations
from normalnorm.analysis.robustness import fgsm, pgd, robust_accuracy
from normalnorm.analysis.slope_shares import slope_shares
from normalnorm.layers.regnorm import RegNormLinear
from tests.analysis.test_robustness import each_network, network, pixels

MEASURES = {
    "noise": lambda model, x, y: noise_attenuation(model, x),
    "fgsm": lambda model, x, y: fgsm(model, x, y, 0.1),
    "pgd": lambda model, x, y: pgd(model, x, y, 0.1, steps=2),
    "accuracy": lambda model, x, y: robust_accuracy(model, x, y, (0, 0.1)),
    "correlations": lambda model, x, y: layer_correlations(model, x),
    "gradients": gradients,
    "confusion": lambda model, x, y: gradient_confusion(
        model, [(x, y), (x + 1, y)]
    ),
    "power": lambda model, x, y: model_power(model, x),
    "before affine": lambda model, x, y: pre_affine(model, x),
    "slope shares": lambda model, x, y: slope_shares(model, x),
}


def state(model):
    "All that a measurement might change."
    return {
        **{name: v.clone() for name, v in model.state_dict().items()},
        "training": [m.training for m in model.modules()],
        **{
            f"gradient of {name}": p.grad if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        },
        "trainable": [p.requires_grad for p in model.parameters()],
        "noise": [getattr(m, "noise", None) for m in model.modules()],
        "hooks": [len(m._forward_hooks) for m in model.modules()],
        "terms": [hasattr(m, "loss_term") for m in model.modules()],
        "random numbers": torch.get_rng_state(),
    }


same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
@each_network
def test_a_model_is_left_as_it_was(make, measure):
    model, (x, y) = network(make), pixels()
    # some modules in training mode, one in evaluation mode, old gradients
    model.train()
    list(model.modules())[-1].eval()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    next(model.parameters()).requires_grad_(False)
    before, inputs = state(model), x.clone()
    first = measure(model, x, y)
    same([state(model), x], [before, inputs])
    same(measure(model, x, y), first)
    with torch.no_grad():
        same(measure(model, x, y), first)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_what_a_model_raises_leaves_it_as_it_was(measure, training):
    "Of layers that leave a term for the loss in training, too."

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.map = nn.BatchNorm2d(2), RegNormLinear(8, 3)

        def forward(self, x):
            self.map(self.norm(x))
            raise RuntimeError("broken")

    model, (x, y) = Broken().train(training), pixels()
    before = state(model)
    with pytest.raises(RuntimeError, match="broken"):
        measure(model, x, y)
    same(state(model), before)


def test_attacks_in_inference_mode():
    model, (x, y) = (
        network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 5))),
        pixels(),
    )
    for name in ("noise", "fgsm", "pgd", "accuracy"):
        expected = MEASURES[name](model, x, y)
        with torch.inference_mode():
            same(MEASURES[name](model, x, y), expected)
