"""The power decomposition: shapes, dtypes, pieces, hooks, errors. What it
computes is checked by the claims of its chapter.
"""

import pytest
import torch
from torch import nn

from normalnorm.analysis import power
from normalnorm.layers.normality import BatchNormalNorm2d, LayerNormalNorm
from tests.refusals import refusals
from tests.toys import Of


@pytest.mark.parametrize(
    "shape", [(5, 3), (5, 3, 7), (2, 3, 5, 7), (2, 3, 2, 5, 7), (1, 1, 1)]
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16]
)
def test_shapes_and_dtypes(shape, dtype):
    y = torch.randn(shape).to(dtype).requires_grad_()
    found = power.power_decomposition(y)
    assert all(
        p.shape == (shape[1],)
        and p.dtype == torch.float64
        and not p.requires_grad
        for p in found
    )
    flat = y.detach().double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(found.total, flat.square().mean(1))
    if len(shape) == 2:
        assert found.p3.max() == found.p4.max() == 0


test_what_has_no_power = refusals(
    [
        ([1.0], TypeError, "given list"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, "int64"),
        (torch.ones(2, 3, dtype=torch.complex64), TypeError, "complex64"),
        (torch.ones(3), ValueError, r"\(3,\): expected \(N, C"),
        (torch.ones(0, 3, 2), ValueError, "at least one"),
        (torch.ones(2, 3, 0), ValueError, "at least one"),
        (torch.tensor([[1.0, float("nan")]]), ValueError, "NaN or an infinity"),
    ],
    power.power_decomposition,
)


def test_meter_refuses_another_layer_and_an_empty_set():
    meter = power.PowerMeter()
    with pytest.raises(ValueError, match="call update"):
        meter.compute()
    meter.update(torch.ones(2, 3, 5))
    with pytest.raises(ValueError, match="4 channels after 2 images of 3"):
        meter.update(torch.ones(2, 4, 5))
    meter.update(torch.zeros(2, 3, 2))  # another size of image is fine
    assert meter.images == 4
    assert meter.compute().p2.tolist() == [0.25] * 3


def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Conv2d(6, 4, 3),
        BatchNormalNorm2d(4, noise=1.0),
        nn.Flatten(2),
        LayerNormalNorm(16),
        nn.Flatten(),
        nn.Linear(64, 2),
    )
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def test_batch_statistics_and_evaluation():
    model, x = net(), 3 + torch.randn(10, 1, 8, 8)
    own = power.model_power(model, x, batch_statistics=True)["1"]
    torch.testing.assert_close(
        own.total, torch.ones(6, dtype=torch.float64), rtol=1e-3, atol=0
    )
    assert own.p1.max() < 1e-9
    # averages of no data
    assert power.model_power(model, x)["1"].p1.max() > 0.1
    again = power.model_power(model, x, batch_statistics=True)
    # no noise, no dropout
    assert all(map(torch.equal, own, again["1"]))


def test_places_are_measured_by_what_they_return():
    model, x = net().eval(), torch.randn(5, 1, 8, 8)
    pairs = [(x[:2], None), (x[2:], None)]  # with targets
    found = power.model_power(model, pairs, places=["4", "0", "0"])
    assert list(found) == ["0", "4"]
    torch.testing.assert_close(
        torch.stack(found["0"]),
        torch.stack(power.power_decomposition(model[0](x))),
    )


test_what_cannot_be_measured = refusals(
    [
        (nn.ReLU(), [], None, ValueError, "no normalizer: name"),
        (nn.Sequential(nn.ReLU()), [], ["1"], ValueError, "no module '1'"),
        (nn.Sequential(nn.ReLU()), [], ["0"], ValueError, "inputs are empty"),
        ("net", [], None, TypeError, "model is a str"),
        (nn.BatchNorm1d(3), 5, None, TypeError, "inputs are a int"),
        (
            nn.Sequential(nn.BatchNorm1d(3)),
            [],
            ["x"],
            ValueError,
            "'x': known are 0$",
        ),
        (
            Of(lambda own, x: own.used(x), used=nn.ReLU(), idle=nn.ReLU()),
            torch.ones(2, 3),
            ["used", "idle"],
            ValueError,
            "'idle' was not called: choose",
        ),
    ],
    lambda model, inputs, places: power.model_power(
        model, inputs, places=places
    ),
)
