"""What the driver of the kernel (driver.cpp) computes again: inputs, and
outputs by the definition in float64, in one small file.

`python -m tests.kernel.record` writes tests/kernel/recorded.bin. The kernel
takes no part in it. Inputs are made of integers and of single operations in
float64, so that they are the same bits everywhere; the outputs differ by what a
processor's log and exp do.
"""

import struct
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from normalnorm.layers import core
from normalnorm.layers.core import Statistics
from normalnorm.layers.engines import native
from normalnorm.layers.noise import normal_noise
from normalnorm.layers.proxy import by_nodes, quantile_nodes
from normalnorm.theory.power_transform import representable, yeo_johnson

FILE = Path(__file__).with_name("recorded.bin")
MAGIC = b"normalnorm recorded 1\n"
ROUNDING = 2.0**-24

# The constants of tests/layers/test_native.py and tests/theory/test_proxy.py.
# A rule is (kind, numbers):
# share: |found − expected| ≤ a · (the largest |expected|, b at least); each: ≤
# a |expected| + b; bound: ≤ a · (what is recorded beside it) + b; ulp: in units
# in the last place of the expected number, ≤ a + b |t|, where exp(t) is what
# the transform needs
TOLERANCES = {
    "train": (0, 2e-5, 1e-3),  # test_like_float64
    "given": (1, 2e-5, 2e-5),  # test_given_statistics, and the lines below
    "given of input": (1, 5e-5, 1e-7),
    "given of weight": (0, 1e-5, 0),
    "given of bias": (1, 1e-5, 1e-4),
    "far": (1, 3e-5, 0),  # beyond 1e20
    "far of input": (1, 1e-4, 1e-37),
    "normals": (1, 2e-6, 2e-6),  # test_noise_of_any_index
    # two ways of the kernel to the same numbers: bfloat16 against float32, and
    # stages between exchanges, of one process and of two, against the whole
    "half": (0, 1e-5, 1e-3),
    "stages": (0, 1e-5, 1e-3),
    "stages of two": (0, 2e-5, 1e-3),
    # close_to_float64 of test_proxy, and the two lines below
    "proxy mean": (2, 8 * ROUNDING, 0),
    "proxy var": (2, 8 * ROUNDING, 1e-12),
    "proxy gradient": (2, 40 * ROUNDING, 0),
    "grouped": (0, 3e-5, 1),  # test_grouped_by_the_kernel
    "ulp by tables": (3, 4, 0),  # test_by_pieces
    "ulp by logarithms": (3, 4, 0.5),  # test_bound_of_the_logarithm
}

COLUMN = (1, 3, 1, 1)
# shape, axes of a unit, shape of weight and bias, every which output is kept
CASES = {
    "batch": ((8, 3, 5, 7), (0, 2, 3), COLUMN, 1),
    "runs": ((3, 2, 8, 10), (0, 2, 3), (1, 2, 1, 1), 1),
    "layer": ((5, 131), (1,), (131,), 1),
    "instance": ((3, 3, 6, 6), (2, 3), COLUMN, 1),
    "group": ((3, 2, 5, 4, 4), (2, 3, 4), (1, 2, 5, 1, 1), 1),
    "matrix": ((33, 19), (0,), (19,), 1),
    "long": ((2, 4200), (1,), None, 17),
}
LAYOUTS = {
    "batch": ("contiguous", "channels last"),
    "runs": ("contiguous", "channels last"),
}
NOISES = {
    "no noise": {},
    "noise": {"noise": 0.4},
    "dropout": {"noise": 0.3, "noise_kind": "dropout"},
}
SEED, OFFSET = 2**40 + 5, 2**34 + 12
LAMBDAS = (-1.0, -0.3, 0.0, 1e-3, 0.5, 0.99, 1.001, 1.7, 2.0, 3.0)
STARTS = (0, 1, 3, 2**31 - 3, 2**32 - 2, 2**34 + 1, 2**40)
FAR = (0.0, 1.0, -1.0, 1e6, -1e6, 1e20, -1e20, 3e38, -3e38)
NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
PROXIES = {
    "leaky_relu": lambda y: F.leaky_relu(y, 0.3),
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}  # in the kernel's order
SAMPLES = 200


class Numbers:
    "Numbers that look normal, the same bits everywhere."

    def __init__(self, seed: int):
        self.bits = np.random.PCG64(seed)

    def uniform(self, *shape) -> np.ndarray:
        return (self.bits.random_raw(int(np.prod(shape))) >> 40).astype(
            np.float64
        ).reshape(shape) * 2.0**-24

    def normal(self, *shape) -> np.ndarray:
        "The sum of twelve uniform numbers, of variance 1."
        return self.uniform(12, *shape).sum(0) - 6

    def skewed(self, *shape) -> np.ndarray:
        t = self.normal(*shape)
        return t + t * t * 0.5 + t * t * t * 0.125


def single(x) -> torch.Tensor:
    "The nearest float32."
    return torch.from_numpy(np.asarray(x, dtype=np.float64).astype(np.float32))


def flat(x) -> np.ndarray:
    return x.detach().numpy().ravel()


def whole(record: dict, numbers: Numbers) -> None:
    """Statistics of the input itself: forward and backward, with and without
    noise.
    """
    for name, (shape, dim, weight, every) in CASES.items():
        u, grad = single(numbers.skewed(*shape)), single(numbers.normal(*shape))
        leaves = (
            [u]
            if weight is None
            else [
                u,
                single(numbers.uniform(*weight) + 0.5),
                single(numbers.normal(*weight)),
            ]
        )
        record |= {
            f"{name}/{k}": flat(x)
            for k, x in zip(("u", "weight", "bias"), leaves)
        } | {f"{name}/grad": flat(grad)}
        record[f"{name}/every"] = np.array([every])
        for layout in LAYOUTS.get(name, ("contiguous",)):
            visit = native.traversal(shape, dim, weight, layout != "contiguous")
            record[f"{name}/traversal/{layout}"] = np.array(
                [
                    *visit,
                    *(
                        (shape[0], shape[1], shape[2] * shape[3])
                        if layout != "contiguous"
                        else (0, 0, 0)
                    ),
                ]
            )
        for kind, options in NOISES.items():
            wide = [t.double().requires_grad_() for t in leaves]
            out, used = core.normality_norm(
                wide[0],
                dim,
                *wide[1:],
                seed=torch.tensor(SEED),
                offset=OFFSET,
                **options,
            )
            found = torch.autograd.grad(out, wide, grad.double())
            if kind == "no noise":
                record |= {
                    f"{name}/{k}": flat(s).astype(np.float32)
                    for k, s in (
                        ("mean", used.mean),
                        ("var", used.var),
                        ("lmbda", used.lmbda),
                    )
                }
            record[f"{name}/{kind}/out"] = flat(out)[::every].astype(np.float32)
            record |= {
                f"{name}/{kind}/of {k}": flat(g)[
                    :: every if k == "u" else 1
                ].astype(np.float32)
                for k, g in zip(("u", "weight", "bias"), found)
            }


def evaluated(
    u: torch.Tensor, weight, bias, given: Statistics, eps: float
) -> torch.Tensor:
    """The definition for given statistics in float64, with float32's idea of
    what can be represented.
    """

    def definition(dtype):
        return (u.to(dtype) - given.mean.to(dtype)) * core.inverse_stds(
            given.var.to(dtype), eps
        )[0]

    h, narrow = definition(torch.float64), definition(torch.float32).detach()
    moved = representable(narrow, given.lmbda)
    x = yeo_johnson(
        torch.where((moved == narrow) | narrow.isnan(), h, moved.double()),
        given.lmbda.double(),
    )
    return x * weight + bias


def given_statistics(record: dict, numbers: Numbers) -> None:
    """Given statistics, forward and backward: ordinary values; values that are
    moved; NaN and infinity, forward.
    """
    far = np.repeat(np.array(FAR)[:, None], 7, 1)
    cases = {
        "given": (
            single(numbers.normal(2, 3, 16, 17) * 3),
            numbers.uniform(3) * 4 - 1,
        ),
        "given matrix": (
            single(numbers.normal(37, 19) * 3),
            numbers.uniform(19) * 6 - 2,
        ),
        "far": (single(far), np.array([-3, 0, 0.5, 1, 2, 3, 5])),
        "not finite": (
            single(np.repeat(np.array(NOT_FINITE)[:, None], 7, 1)),
            np.array([-3, 0, 0.5, 1, 2, 3, 5]),
        ),
    }
    for name, (u, lmbda) in cases.items():
        channels, plain = u.shape[1], name in ("far", "not finite")
        shape = (1, channels, *(1,) * (u.ndim - 2))
        lmbda[:1] = 1 if not plain else lmbda[:1]
        mean, var = (
            (np.zeros(channels), np.ones(channels))
            if plain
            else (numbers.normal(channels), numbers.uniform(channels) + 0.1)
        )
        mean, var, lmbda = (single(s).view(shape) for s in (mean, var, lmbda))
        given = Statistics(mean, var, (lmbda,))
        weight, bias = (
            (single(np.ones(channels)), single(np.zeros(channels)))
            if plain
            else (
                single(numbers.normal(channels)),
                single(numbers.normal(channels)),
            )
        )
        grad = single(numbers.normal(*u.shape))
        leaves = [
            u.clone().requires_grad_(),
            *(t.double().view(shape).requires_grad_() for t in (weight, bias)),
        ]
        wide = leaves[0].double()
        out = evaluated(wide, *leaves[1:], given, 0.0 if plain else 1e-5)
        record |= {
            f"{name}/{k}": flat(t)
            for k, t in (
                ("u", u),
                ("grad", grad),
                ("mean", given.mean),
                ("var", given.var),
                ("lmbda", given.lmbda),
                ("weight", weight),
                ("bias", bias),
            )
        }
        record[f"{name}/shape"] = np.array(
            [u.shape[0], channels, u[0, 0].numel()]
        )
        record[f"{name}/eps"] = np.array([0.0 if plain else 1e-5])
        record[f"{name}/out"] = flat(out).astype(np.float32)
        if name != "not finite":
            of_u, of_weight, of_bias = torch.autograd.grad(
                out, [wide, *leaves[1:]], grad.double()
            )
            record |= {
                f"{name}/of {k}": flat(g).astype(np.float32)
                for k, g in (
                    ("u", of_u),
                    ("weight", of_weight),
                    ("bias", of_bias),
                )
            }


def single_values(record: dict, numbers: Numbers) -> None:
    """ψ(h; λ) to units in the last place: normal numbers, tiny ones, and the
    borders of the pieces of the table.
    """
    borders = single(
        np.concatenate([2.0**o * (1 + np.arange(4) / 4) - 1 for o in range(4)])
    )
    near = torch.cat(
        [
            borders,
            *(torch.nextafter(borders, torch.tensor(x)) for x in (0.0, 9e9)),
        ]
    )
    tiny = single(numbers.uniform(48) + 0.5) * torch.tensor(
        [2.0**-k for k in range(0, 96, 2)]
    )
    h = torch.cat(
        [single(numbers.normal(80)), single(numbers.normal(80) * 4), tiny, near]
    )
    h = torch.cat([h, -h]).clamp(-14.5, 14.5)
    record["values/h"], record["values/lmbda"] = (
        flat(h),
        np.array(LAMBDAS, np.float32),
    )
    rows = [
        flat(yeo_johnson(h.double(), torch.tensor(lmbda, dtype=torch.float64)))
        for lmbda in record["values/lmbda"].astype(np.float64)
    ]
    # a third of each row
    record["values/out"] = np.concatenate(
        [row[k % 3 :: 3] for k, row in enumerate(rows)]
    )
    record["values/counts"] = np.array(
        [len(row[k % 3 :: 3]) for k, row in enumerate(rows)]
    )


def normals(record: dict) -> None:
    record["normals/key"], record["normals/starts"] = (
        np.array([987654321987654321]),
        np.array(STARTS),
    )
    record["normals/out"] = np.concatenate(
        [
            normal_noise(
                (131,), torch.tensor(987654321987654321), start
            ).numpy()
            for start in STARTS
        ]
    )


def proxies(record: dict, numbers: Numbers) -> None:
    """As test_proxy: usual parameters, γ = 0, β far larger than γ and far
    smaller.
    """
    channels = 36
    weight, bias, shift, scale = numbers.normal(4, channels)
    weight[::3] = 1 + 0.2 * weight[::3]
    (weight[1::12], bias[2::12], bias[3::12], weight[4::12], bias[5::12]) = (
        0,
        0,
        1e4,
        1e-3,
        -30,
    )
    bias[7::12], weight[7::12] = 0, 0
    leaves = [single(x) for x in (weight, bias, 0.3 * shift, 0.3 * scale)]
    upstream = single(numbers.normal(2, channels))
    nodes = quantile_nodes(SAMPLES)
    record |= {
        f"proxy/{k}": flat(x)
        for k, x in zip(("weight", "bias", "shift", "scale"), leaves)
    }
    record |= {
        "proxy/nodes": np.pad(
            flat(nodes).astype(np.float32), (0, -SAMPLES % 16)
        ),
        "proxy/samples": np.array([SAMPLES]),
        "proxy/slope": np.array([0.3]),
        "proxy/upstream": flat(upstream),
    }
    wide = [t.double().requires_grad_() for t in leaves]
    w, b, m, s = wide
    size = flat(b.abs() + (w * m).abs() + (w * (1 + s)).abs())
    for name, function in PROXIES.items():
        mean, var = by_nodes(b + w * m, w * (1 + s), function, nodes)
        found = torch.autograd.grad((mean, var), wide, tuple(upstream.double()))
        record |= {
            f"proxy/{name}/{k}": flat(x).astype(np.float32)
            for k, x in (("mean", mean), ("var", var))
        }
        record |= {
            f"proxy/{name}/of {k}": flat(g).astype(np.float32)
            for k, g in zip(("weight", "bias", "shift", "scale"), found)
        }
        record[f"proxy/{name}/bound of var"] = (
            size * np.sqrt(flat(var)) + flat(var)
        ).astype(np.float32)
    record["proxy/bound of mean"] = size.astype(np.float32)
    record["proxy/bound of gradient"] = (
        1 + size * (1 + np.minimum(size, 30))
    ).astype(np.float32)


def made() -> dict[str, np.ndarray]:
    """All that is recorded, by name: one-dimensional arrays of float32, float64
    or int64.
    """
    record = {
        f"tolerance/{name}": np.array(rule, np.float64)
        for name, rule in TOLERANCES.items()
    }
    record["noise"] = np.array([SEED, OFFSET])
    for number, part in enumerate(
        (whole, given_statistics, single_values, proxies)
    ):
        part(record, Numbers(15 + number))
    normals(record)
    return record


def to_bytes(record: dict[str, np.ndarray]) -> bytes:
    """Per array: length of the name, the name, a letter for the type, the
    number of elements, the elements; little-endian.
    """
    parts = [MAGIC, struct.pack("<q", len(record))]
    for name, x in record.items():
        letter = {"f4": b"f", "f8": b"d", "i8": b"q"}[x.dtype.str[1:]]
        parts += [
            struct.pack("<q", len(name.encode())),
            name.encode(),
            letter,
            struct.pack("<q", x.size),
            x.astype(x.dtype.newbyteorder("<")).tobytes(),
        ]
    return b"".join(parts)


def from_bytes(data: bytes) -> dict[str, np.ndarray]:
    at, record = len(MAGIC), {}
    if data[:at] != MAGIC:
        raise ValueError(
            "this is no record for the kernel's driver: it "
            f"begins with {data[:at]!r}; `python -m "
            "tests.kernel.record` makes one"
        )

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        return data[at - count : at]

    for _ in range(struct.unpack("<q", take(8))[0]):
        name = take(struct.unpack("<q", take(8))[0]).decode()
        letter, count = take(1).decode(), struct.unpack("<q", take(8))[0]
        record[name] = np.frombuffer(
            take(count * {"f": 4, "d": 8, "q": 8}[letter]),
            {"f": "<f4", "d": "<f8", "q": "<i8"}[letter],
        )
    return record


if __name__ == "__main__":
    FILE.write_bytes(to_bytes(made()))
    print(f"{FILE.name}: {FILE.stat().st_size / 1000:.0f} kB")
