"""Same sample, same bits: what a layer gives for a sample in evaluation, and in
training where no statistics are shared, with the gradient of its input, does
not depend on its neighbours in the batch, on its place there, or on threads.
"""

import itertools
import random
import zlib

import pytest
import torch

from normalnorm.layers.backends import set_backend
from normalnorm.layers.normality import BatchNormalNorm2d
from tests.layers.steps import threads
from tests.peers import VECTORS
from tools import rows

COMPANIONS = 0, 5, 16, 64, 1024
# on both sides of what decides how the kernel goes: 1, 16 and 32 elements a
# channel and image; blocks of 512 and 1024; units of 64 and 4096, of 4 channels
# too
IMAGES = (
    (1, 1),
    (3, 5),
    (4, 4),
    (7, 7),
    (31, 1),
    (4, 8),
    (14, 14),
    (3, 11),
    (33, 31),
    (63, 65),
    (64, 64),
)
DTYPES = torch.float32, torch.bfloat16, torch.float64
# What is not promised, and what of PyTorch's it is by: an operation whose last
# bit depends on where in the whole tensor an element lies
EXCEPT = {"EvoNorm2d": (torch, "sigmoid"), "BMLVNorm": (torch, "var")}


def cases():
    for image, dtype in itertools.product(IMAGES, DTYPES):
        sizes = rows.SIZES | dict(
            zip("HW", image, strict=True), D=1, L=image[0] * image[1]
        )
        for trial in rows.trials(sizes):
            images = "H W" in trial.kind
            for last, number, training in itertools.product(
                (False, True)[: 1 + images], (1, 2), (False, True)
            ):
                if (
                    training
                    and trial.row.over_batch()
                    or (image == (1, 1) and "instance" in trial.name)
                ):  # a unit of one value
                    continue
                for count in COMPANIONS:
                    if count * image[0] * image[1] <= 2**16:
                        yield trial, dtype, last, number, training, count


def name(case):
    trial, dtype, last, number, training, count = case
    return (
        f"{trial.name} {trial.kind} {trial.shape[1:]} "
        f"{str(dtype)[6:]}{' channels last' * last} {number} threads "
        f"{'training' if training else 'evaluation'} {count} companions"
    )


def results(layer, u, training):
    "Output, and the gradient of the input where it is asked for."
    u = u.detach().requires_grad_(training)
    out = layer(u)
    if not training:
        return [out]
    weight = torch.linspace(0.5, 1.5, out[0].numel()).to(out)
    out.backward(weight.view(out[:1].shape).expand_as(out))
    return [out, u.grad]


def differs(case):
    "What is not the same for a sample alone and in company; empty if all is."
    trial, dtype, last, number, training, count = case
    torch.manual_seed(zlib.crc32(name(case).encode()))
    layout = (
        {4: torch.channels_last, 5: torch.channels_last_3d}.get(
            len(trial.shape)
        )
        if last
        else torch.contiguous_format
    )
    with set_backend("native"), threads(number):
        layer = trial.ours(noise=0.0)
        batch = torch.randn(8, *trial.shape[1:]).exp()
        layer.train()(batch)  # averages that are none's
        layer.to(dtype).train(training)
        one = (2 * torch.randn(1, *trial.shape[1:]) + 1).to(dtype)
        others = torch.randn(count, *trial.shape[1:]) * random.Random(
            count
        ).choice([1, 30])  # beyond the table
        at = count // 3
        company = torch.cat([others[:at], one, others[at:]]).to(dtype)
        # a sample at the same place of another batch
        sides = [
            results(layer, u.contiguous(memory_format=layout), training)
            for u in (one, company)
        ]
    return [
        what
        for what, alone, found in zip(("output", "gradient"), *sides)
        if not torch.equal(alone[0], found[at])
    ]


def products_keep_bits():
    "Whether a column of PyTorch's matrix product does not notice the others."
    torch.manual_seed(0)
    w, c = torch.randn(4, 4), torch.randn(4, 2048)
    return all(
        torch.equal((w @ c[:, :n])[:, 0], (w @ c)[:, 0]) for n in range(1, 128)
    )


def test_a_sample_has_the_same_bits_in_any_company():
    "A share of all cases; whitening is a product, which some processors vary."
    draw, kept = random.Random(0), products_keep_bits()
    some = [
        case
        for case in cases()
        if draw.random() < 0.015
        and case[0].row.layer.__name__ not in EXCEPT
        and (kept or "Decorrelated" not in case[0].row.layer.__name__)
    ]
    found = {name(case): differs(case) for case in some}
    assert len(some) > 150 and not any(found.values()), found


@pytest.mark.parametrize("layer", EXCEPT)
def test_what_is_not_promised_is_an_operation_of_pytorchs(layer, monkeypatch):
    "Done for each sample by itself, it leaves no difference."
    where, what = EXCEPT[layer]
    theirs, apart = getattr(where, what), False

    def by_sample(x, dim=(), **how):
        if not apart or 0 in dim:  # an average over the batch
            return theirs(x, *[dim] * bool(dim), **how)
        return torch.cat(
            [
                theirs(x[i : i + 1].contiguous(), *[dim] * bool(dim), **how)
                for i in range(len(x))
            ]
        )

    monkeypatch.setattr(where, what, by_sample)
    of = [
        case
        for case in cases()
        if case[0].row.layer.__name__ == layer
        and not case[4]
        and case[0].shape[2:] in ((3, 5), (7, 7))
        and case[5] <= 64
    ]
    different = [case for case in of if differs(case)]
    assert different or not VECTORS  # without, sigmoid has one way
    apart = True
    assert not [name(case) for case in of if differs(case)]


def test_one_small_image_in_evaluation():
    """Beside another and beside many, of which some are beyond the table: the
    kernel chose by the number of elements of the batch."""
    for trial in rows.trials(rows.SIZES | {"H": 7, "W": 7}):
        if trial.name == "batch2":
            for dtype, count in itertools.product(DTYPES[:2], COMPANIONS):
                case = trial, dtype, False, 1, False, count
                assert not differs(case), name(case)


def test_beside_a_value_whose_power_overflows():
    "Which is computed by itself, and the values beside it as without it."
    layer = BatchNormalNorm2d(2, noise=0.0).eval()
    layer.running_lambda.fill_(3.7)  # no table
    u = torch.randn(3, 2, 8, 8)
    beside = u.clone()
    beside[1, :, 3, 4] = 1e12
    with set_backend("native"):
        alone, found = layer(u), layer(beside)
    found[1, :, 3, 4] = alone[1, :, 3, 4]
    assert torch.equal(alone, found)
