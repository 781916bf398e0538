"""What can be said of a GPU without one: how many operations a layer with noise
makes, the bits of the generator in compiled code, and that the measurements of
`benchmarks.gpu` run, go on and are marked.
"""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import normalnorm
from normalnorm.checks.theory.newton import Operations
from normalnorm.layers import noise
from tests.layers.steps import python, step
from tests.peers import FOLLOWS
from tools.files import ROOT


@pytest.mark.parametrize(
    "make, shape",
    [
        (normalnorm.LayerNormalNorm, lambda n: (n, 64)),
        (normalnorm.BatchNormalNorm2d, lambda n: (n, 64, 2, 2)),
    ],
)
def test_the_number_of_operations_does_not_grow_with_the_batch(make, shape):
    "On a device where one costs as much as another; on a CPU noise is chunked."
    layer = make(64, noise=0.4, device="meta")
    counts = []
    for n in (16, 1 << 22):
        with Operations() as calls:
            step(layer, torch.empty(shape(n), device="meta"))
        counts.append(len(calls.names))
    assert counts[0] == counts[1] < 1500


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**40),
    st.integers(1, 99),
    st.integers(1, 9),
    st.integers(-(2**62), 2**62),
)
def test_one_piece_and_many_give_the_same_bits(offset, count, piece, key):
    found = []
    for chunk in (1 << 40, piece):
        with mock.patch.object(noise, "_CHUNK", chunk):
            found.append(
                noise.normal_noise((count,), torch.tensor(key), offset)
            )
    assert torch.equal(*found)


EDGES = [
    0,
    1,
    3,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**33 + 1,
    2**62 - 1,
    2**63 - 1,
    -1,
    -(2**31),
    -(2**63),
]


@FOLLOWS
def test_words_are_the_same_in_compiled_code():
    counters, key = torch.tensor(EDGES + list(range(50))), torch.tensor(-7)
    for a, b in zip(
        torch.compile(noise.philox)(counters, key), noise.philox(counters, key)
    ):
        assert torch.equal(a, b)


@FOLLOWS
def test_compiled_noise_is_the_noise():
    "To the rounding of an angle, 2⁻²² of a turn's length, times the radius."
    seed = torch.tensor(2**61 + 12345)
    made = torch.compile(noise.normal_noise, backend="aot_eager")
    for offset in (0, 3):
        torch.testing.assert_close(
            made((5, 999), seed, offset),
            noise.normal_noise((5, 999), seed, offset),
            rtol=0,
            atol=3e-6,
        )


# PyTorch, Triton and what the library requires are all that is there
MEASURED = """
import contextlib, io, json, sys
lacking = "psutil lxml yaml nbformat IPython matplotlib pytest".split()
sys.modules.update(dict.fromkeys(lacking))
from functools import partial
from pathlib import Path
from benchmarks.gpu import __main__ as gpu

gpu.PARTS["layers"] = partial(
    gpu.against, gpu.named("eager"), gpu.TINY
)
for part, step in (("correctness", 5), ("engine", 3), ("table", 5)):
    jobs = list(gpu.PARTS[part]())[::step]
    gpu.PARTS[part] = lambda jobs=jobs: jobs
gpu.PARTS["habits"] = lambda: [
    job for job in gpu.habits() if job[0].get("by") != "compiled"
]
out, found = Path(sys.argv[1]), []

def read():
    (path,) = out.glob("*.json")
    return path, json.loads(path.read_text())

def measure(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = gpu.main(["--out", str(out), *arguments])
    found.append([status, said.getvalue().splitlines()[-1], read()[1]])

measure("--minutes", "0", *sys.argv[2:])
measure(*sys.argv[2:])
path, record = read()
mine = [row for row in record["rows"] if row["part"] == "layers"]
others = [row for row in record["rows"] if row["part"] != "layers"]
lost = mine.pop(1)
mine[0]["ms"] = -1.0
path.write_text(json.dumps(record | {"rows": mine + others}))
measure("layers")
record["rows"] = [row | {"code": "0" * 10} for row in mine] + others
path.write_text(json.dumps(record))
measure("layers")
gpu.compared = lambda *calls: dict(gpu.gpu.CHOSEN)
tuned = [[about, work()] for about, work in gpu.PARTS["tuning"]()]
named = {name for case in (("layer", False), ("batch", False), ("batch", True))
         for way in gpu.launches(*case) for name in way} - {"by"}
print(json.dumps([lost, *found, tuned, sorted(named)]))
"""


def test_measurements_run_without_a_gpu_and_say_so(tmp_path):
    "Each row is kept, marked, and not made twice."
    pytest.importorskip("triton", "3.3")
    parts = ["correctness", "ceilings", "layers", "table", "habits", "engine"]
    said = python(
        MEASURED, tmp_path, *parts, timeout=600, CUDA_VISIBLE_DEVICES=""
    )
    lost, late, first, again, other, *told = json.loads(said.splitlines()[-1])
    assert "goes on with correctness" in late[1] and late[2]["rows"] == []
    status, line, record = first
    assert status == 0 and "all is there" in line
    assert record["environment"]["device"] == "cpu, interpreted"
    found = {part: [] for part in parts}
    for row in record["rows"]:
        assert row["device"] == "cpu, interpreted" and len(row["code"]) == 10
        found[row["part"]].append(row)
    for part, rows in found.items():
        count = record["parts"][part]
        assert count["rows"] == count["of"] == len(rows) > 1
    for part in ("layers", "engine"):
        assert all("p50" in row for row in found[part])
    checks = found["correctness"]
    assert all(row["holds"] and row["same bits again"] for row in checks)
    # the averages of a batch norm come fifth
    assert {len(row["errors"]) for row in checks} == {4, 5}
    assert all(row["holds"] for row in found["table"] + found["habits"])
    # what is there stays; a row that is lost is made again
    of = lambda at: [r for r in at[2]["rows"] if r["part"] == "layers"]
    assert len(again[2]["rows"]) == len(record["rows"])
    kept = of(again)
    assert kept[0]["ms"] == -1.0 and kept[-1]["noise"] == lost["noise"]
    # rows of other code are not gone on with
    assert min(row["ms"] for row in of(other)) > 0
    assert len(of(other)) == len(found["layers"])
    tuned, named = told
    # what is tried is what the engine then looks up
    assert all(chosen and chosen.items() <= of.items() for of, chosen in tuned)
    engine = Path(normalnorm.__file__).parent / "layers" / "engines" / "gpu.py"
    asked = re.findall(r'CHOSEN.get\("(\w+)"', engine.read_text("utf-8"))
    assert named == sorted({*asked})


def test_the_target_takes_this_environment():
    "`make gpu` sets up no environment: a GPU machine has its own PyTorch."
    rule = re.search(
        r"^gpu:(.*)##.*\n\t(.*)$",
        (ROOT / "Makefile").read_text(encoding="utf-8"),
        re.M,
    )
    assert rule and not rule[1].strip() and "PYTHONPATH=." in rule[2]


RUN = """
import json
from functools import partial
from benchmarks.gpu import __main__ as gpu

if __name__ == "__main__":
    ended = ({"by": "x"}, partial(gpu.os._exit, 3))
    copied = ({"by": "compiled"}, gpu.copied)
    workers = gpu.Workers()
    found = [list(workers.rows(part, [ended, copied]))
             for part in ("ceilings", "habits")]
    left = sorted(workers.pools)
    workers.end(left)
    print(json.dumps([*found, left]))
"""


def test_a_process_that_ends_takes_no_other_along(tmp_path):
    "What is timed is then timed without haste; its process goes when it is."
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    said = python(tmp_path / "run.py", timeout=120, CUDA_VISIBLE_DEVICES="")
    timed, tried, left = json.loads(said.splitlines()[-1])
    for ended, copied in (timed, tried):
        assert "its process ended" in ended["left out"] and copied["ms"] > 0
    assert left == [0, 1]
