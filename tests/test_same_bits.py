"""Same sample, same bits: what a layer gives for a sample in evaluation, and in
training where no statistics are shared, with the gradient of its input, does
not depend on its neighbours in the batch, on its place there, or on threads.

    python -m tests.test_same_bits          every case (minutes)
"""
import itertools
import random
import sys
import zlib

import pytest
import torch

from normalnorm.layers.backends import get_backend, set_backend
from tools import rows

COMPANIONS = 0, 5, 16, 64, 1024
# on both sides of what decides how the kernel goes: 1 and 32 elements a channel
# and image; blocks of 512 and 1024; units of 64 and 4096, of 4 channels too
IMAGES = ((1, 1), (7, 7), (31, 1), (4, 8), (14, 14), (3, 11), (33, 31),
          (63, 65), (64, 64))
DTYPES = torch.float32, torch.bfloat16, torch.float64
# what is not promised, and why
EXCEPT = {}


def cases(engines=("native", "eager")):
    for image, dtype, engine in itertools.product(IMAGES, DTYPES, engines):
        sizes = rows.SIZES | dict(zip("HW", image, strict=True), D=1,
                                  L=image[0] * image[1])
        for trial in rows.trials(sizes):
            images = "H W" in trial.kind
            for last, threads, training in itertools.product(
                (False, True)[:1 + images], (1, 2), (False, True)
            ):
                if training and trial.row.over_batch() or (
                    image == (1, 1) and "instance" in trial.name
                ):                                  # a unit of one value
                    continue
                for count in COMPANIONS:
                    if count * image[0] * image[1] <= 2**16:
                        yield (trial, engine, dtype, last, threads, training,
                               count)


def name(case):
    trial, engine, dtype, last, threads, training, count = case
    return (f"{trial.name} {trial.kind} {trial.shape[1:]} {engine} "
            f"{str(dtype)[6:]}{' channels last' * last} {threads} threads "
            f"{'training' if training else 'evaluation'} {count} companions")


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
    trial, engine, dtype, last, threads, training, count = case
    torch.manual_seed(zlib.crc32(name(case).encode()))
    before, number = get_backend(), torch.get_num_threads()
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(
        len(trial.shape)) if last else torch.contiguous_format
    try:
        set_backend(engine)
        torch.set_num_threads(threads)
        layer = trial.ours(noise=0.0)
        batch = torch.randn(8, *trial.shape[1:]).exp()
        layer.train()(batch)                        # averages that are none's
        layer.to(dtype).train(training)
        one = (2 * torch.randn(1, *trial.shape[1:]) + 1).to(dtype)
        others = torch.randn(count, *trial.shape[1:]) * random.Random(
            count).choice([1, 30])                  # beyond the table
        at = count // 3
        company = torch.cat([others[:at], one, others[at:]]).to(dtype)
        # a sample at the same place of another batch
        sides = [results(layer, u.contiguous(memory_format=layout), training)
                 for u in (one, company)]
        return [what for what, alone, found in zip(
                    ("output", "gradient"), *sides)
                if not torch.equal(alone[0], found[at])]
    finally:
        set_backend(before)
        torch.set_num_threads(number)


def reason(case):
    trial, engine, dtype, *_ = case
    return EXCEPT.get(trial.row.layer.__name__) or EXCEPT.get(engine)


def main(chosen, share=1.0):
    draw, tried, wrong = random.Random(0), 0, []
    for case in cases():
        if draw.random() < share and not chosen - {*name(case).split()}:
            tried += 1
            if found := differs(case):
                wrong.append((case, found))
    return tried, wrong


def test_a_sample_has_the_same_bits_in_any_company():
    tried, wrong = main(set(), 0.02)
    assert tried > 200 and not wrong, [name(c) for c, _ in wrong]


if __name__ == "__main__":
    tried, wrong = main(set(sys.argv[1:]))
    for case, found in wrong:
        print(name(case), *found)
    print(f"{tried} cases, {len(wrong)} with other bits")
    sys.exit(bool(wrong))
