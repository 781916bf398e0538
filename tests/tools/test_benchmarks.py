"""The benchmark's own arithmetic, where it keeps what, and the arithmetic of
the chapter that shows it; what it measures is in results/benchmarks.
"""

from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import files, measure, noise, sets, stable
from benchmarks.measure import PARTS
from normalnorm.experiments import results
from tests.layers.steps import step
from tests.peers import TORCH
from tools import processors
from tools.files import ROOT, load

HERE = {
    "source": "abc",
    "processor": "AMD EPYC",
    "family": 25,
    "model": 17,
    "vectors": "AVX2",
    "threads": 1,
    "torch": "2.13",
    "compiler": "g++",
}


# ---- times ----


def timed(clock, ours, theirs, pairs=9, **settings):
    "The row of two functions that take known times, in seconds or by call."
    as_function = lambda t: t if callable(t) else lambda _: t
    return measure.ratio(
        clock.work("ours", as_function(ours)),
        clock.work("theirs", as_function(theirs)),
        pairs,
        **settings,
    )


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


ORDER = ("p20", "p50", "p80", "low", "high")


class Clock:
    "Functions that take known times, by a clock of their own."

    def __init__(self, monkeypatch):
        self.now, self.called = 0.0, []
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def work(self, name, seconds):
        def run():
            self.now += seconds(self.called.count(name))
            self.called.append(name)

        return run


@pytest.mark.parametrize(
    "ours, theirs, ratios, ms",
    [
        (0.008, 0.004, [2.0] * 5, (8.0, 4.0, 9)),
        # slower from pair to pair; three calls to warm up and one to see how
        # long it takes
        (
            0.1,
            lambda n: 0.1 / (1 + max(n - 4, 0)),
            [3.0, 5.0, 7.0, 2.0, 8.0],
            (100.0, 20.0, 9),
        ),
    ],
)
def test_ratio_of_known_times(clock, ours, theirs, ratios, ms):
    row = timed(clock, ours, theirs)
    assert [row[k] for k in ORDER] == ratios
    assert (row["ms"], row["ms of the other"], row["pairs"]) == ms


def test_several_functions_take_turns(clock):
    a, b, c = (
        clock.work(name, lambda _, t=t: t)
        for name, t in (("a", 0.006), ("b", 0.009), ("c", 0.003))
    )
    found = measure.ratios({"a": a, "b": b}, c, 12)
    assert [row["p50"] for row in found.values()] == [2.0, 3.0]
    rounds = [clock.called[12 + 3 * k : 15 + 3 * k] for k in range(12)]
    assert len(clock.called) == 12 + 36
    for place in range(3):  # each of them as often in each place
        assert sorted(r[place] for r in rounds) == sorted("aaaabbbbcccc")


@pytest.mark.parametrize("limit, pairs", [(1.0, 40), (0.205, 20), (0.02, 15)])
def test_long_rows_have_fewer_pairs(clock, limit, pairs):
    row = timed(clock, 0.006, 0.004, 40, limit=limit)
    assert row["pairs"] == pairs


def test_small_work_is_repeated(clock):
    row = timed(clock, 0.0005, 0.004, 5)
    assert (row["ms"], clock.called.count("ours")) == (0.5, 4 + 5 * 4)
    assert clock.called.count("theirs") == 4 + 5
    drifting = clock.work("x", lambda n: 0.001 * (1 + n % 3))
    assert measure.best(drifting, 4, 3) == pytest.approx(0.002)


def test_others_are_told_from_us(monkeypatch, clock):
    """Two processors, two seconds: others take a quarter, and what this process
    takes is none of it.
    """
    told, busy = iter([100.0, 101.0, None]), measure.Busy()
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(busy, "_elsewhere", lambda: next(told))
    busy.forget()
    clock.now += 2
    assert busy.share() == 0.25
    busy.forget()
    assert busy.share() is None
    assert measure.Busy._elsewhere() > 0


def test_memory_counts_the_input_once():
    for row, whose in zip(measure.memory(1, quick=True), ("ours", "PyTorch's")):
        assert row["whose"] == whose
        assert 1 <= row["kept for backward, in inputs"] < 1.2


@pytest.mark.parametrize("layer", [torch.nn.BatchNorm1d(3), measure.Nothing(3)])
def test_step_is_a_whole_step(layer):
    u = torch.randn(8, 3, requires_grad=True)
    found = measure.step(layer, u, torch.ones(8, 3))()
    assert [g.shape for g in found] == [(8, 3), (3,), (3,)]


@pytest.mark.parametrize("layer", measure.LAYERS, ids=lambda row: str(row[::4]))
def test_both_sides_get_the_same_input(layer):
    layer = layer._replace(shape=(2, *layer.shape[1:]))
    u, grad = layer.input()
    ours, theirs = (layer.make(whose) for whose in (True, False))
    assert u.dtype == grad.dtype == ours.weight.dtype == theirs.weight.dtype
    assert ("bfloat16" in layer.name) == (u.dtype == torch.bfloat16)
    assert ("last" in layer.name) == (
        u.ndim == 4 and u.is_contiguous(memory_format=torch.channels_last)
    )
    assert ours(u).dtype == theirs(u).dtype and ours(u).shape == u.shape


def test_proxy_norm_against_the_same_block_without():
    "Two rows; both networks have the same layers but for the normalizers'."
    rows = list(measure.proxy(1, quick=True))
    assert [row.get("model", row.get("layer")) for row in rows] == [
        "GroupNorm with PN",
        "ResNet-20 (CIFAR), batch 32",
    ]
    assert all(row["low"] > 0 and "ReLU" in row["against"] for row in rows)
    network = measure.PROXIED_NETWORK
    ours = measure.to_proxy_norm(network.make(torch.nn.BatchNorm2d), fused=True)
    theirs = network.make(lambda c: torch.nn.GroupNorm(8, c))
    count = lambda model, of: sum(isinstance(m, of) for m in model.modules())
    for of, others in (
        (measure.ProxyNorm, torch.nn.GroupNorm),
        (torch.nn.Conv2d, torch.nn.Conv2d),
    ):
        assert count(ours, of) == count(theirs, others) == 19
    assert not count(ours, torch.nn.BatchNorm2d)


def test_processes_measure_together(monkeypatch):
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 2)
    rows = list(measure.sync(2, quick=True))
    assert [(row["processes"], row["shape"][0]) for row in rows] == (
        [(1, 8)] * 4 + [(2, 4)] * 4
    )
    assert all(
        row["low"] > 0 and "not synchronized" in row["against"] for row in rows
    )


# ---- instruction sets ----


def test_what_holds_a_process_to_avx2(monkeypatch, tmp_path):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("CXX", "clang++ -O2")
    found = sets.environment("avx2", 2, tmp_path)
    assert (
        found.items()
        >= {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "OMP_NUM_THREADS": "2",
            **sets.KEEP_PAGES,
        }.items()
    )
    program = Path(found["CXX"])  # one word, for inductor
    command = program.read_text().splitlines()[-1]
    assert command == 'exec clang++ -O2 "$@" -march=x86-64-v3'
    found = sets.environment("avx512", 1, tmp_path)
    assert "ATEN_CPU_CAPABILITY" not in found and found["CXX"] == "clang++ -O2"


@pytest.mark.parametrize(
    "name, capability, lanes, problem",
    [
        ("avx2", "AVX2", 8, ""),
        ("avx512", "AVX512", 16, ""),
        ("own", "DEFAULT", 4, ""),
        ("avx2", "AVX512", 8, "PyTorch has AVX512"),
        ("avx2", "AVX2", 16, "the kernel has lanes, fused, tables = (16"),
        ("avx512", "AVX2", 8, "PyTorch has AVX2; the kernel has lanes"),
    ],
)
def test_both_sides_use_the_set(monkeypatch, name, capability, lanes, problem):
    from normalnorm.layers.engines import native

    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(native, "way", lambda: native.Way(lanes, True, True))
    monkeypatch.setattr(
        torch.backends.cpu, "get_cpu_capability", lambda: capability
    )
    assert processors.problem(sets.SETS[name]).startswith(problem)
    assert bool(processors.problem(sets.SETS[name])) == bool(problem)
    monkeypatch.setattr(native, "available", lambda: False)
    assert processors.problem(sets.SETS[name]).startswith("there is no kernel")


def test_a_process_with_another_set_measures_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(processors, "problem", lambda of: "PyTorch has AVX512")
    held = ["--held", "--sets", "avx2", "--threads", "1"]
    with pytest.raises(SystemExit, match="not held to avx2: PyTorch has"):
        command.main([*held, "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


# ---- files ----


@pytest.mark.parametrize(
    "changed, name",
    [
        (
            {
                "processor": "Intel(R) Core(TM) i7-9700K CPU @ 3.60GHz",
                "family": 6,
                "model": 158,
                "vectors": "AVX512",
            },
            "intel-core-i7-9700k-6-158_avx512_1-thread.json",
        ),
        (
            {
                "processor": "Apple M2",
                "family": None,
                "model": None,
                "vectors": "DEFAULT",
            },
            "apple-m2_default_1-thread.json",
        ),
    ],
)
def test_names_of_files(changed, name):
    assert files.name(HERE | changed) == name


def test_environment_says_what_measured():
    "Beside what rows of recipes say: the instruction set, and the model."
    found = files.environment(1)
    assert found["vectors"] == torch.backends.cpu.get_cpu_capability()
    assert found["source"] == results.source_hash()
    if Path("/proc/cpuinfo").exists() and found["vectors"].startswith("AVX"):
        assert found["family"] > 0 and found["model"] >= 0


@pytest.fixture
def run(monkeypatch, tmp_path):
    "Measure parts that only count, in an environment that can be changed."
    calls, here = [], dict(HERE)
    monkeypatch.setattr(files, "environment", lambda threads: dict(here))

    def part(name):
        def rows(pairs, quick):
            calls.append(name)
            yield {"what": name, "value": len(calls)}
            if name == "stopped":
                raise KeyboardInterrupt

        return rows

    def go(*asked, parts=("machine", "layers"), pairs=9, quick=False):
        calls.clear()
        command.kept(
            {name: part(name) for name in parts},
            list(asked),
            1,
            pairs,
            tmp_path,
            quick,
            tell=lambda line: None,
        )
        return list(calls)

    go.here, go.path = here, tmp_path / files.name(HERE)
    go.rows = lambda: {
        row["part"]: row["value"] for row in files.read(go.path)["rows"]
    }
    return go


def test_an_interrupted_run_goes_on(run):
    with pytest.raises(KeyboardInterrupt):
        run(parts=("machine", "stopped", "layers"))
    assert run.rows() == {"machine": 1}  # what was finished is kept
    assert run(parts=("machine", "layers")) == ["layers"]
    assert run() == [] and set(run.rows()) == {"machine", "layers"}
    assert run(pairs=10) == ["machine", "layers"]  # not of that many yet
    assert run(quick=True) == ["machine", "layers"]  # reads nothing


def test_only_what_was_asked_is_measured_again(run):
    run(parts=("machine", "layers", "memory"))
    assert run("layers") == ["layers"]
    assert list(run.rows().items()) == [
        ("machine", 1),
        ("layers", 1),
        ("memory", 3),
    ]
    record = files.read(run.path)
    assert set(record["parts"]) == {"machine", "layers", "memory"}
    assert record["parts"]["layers"]["pairs"] == 9


@pytest.mark.parametrize("key", files.ONE)
def test_one_file_has_one_environment(run, key):
    run()
    before = run.path.read_text()
    # threads, vectors and processor name the file
    record = files.read(run.path)
    record["environment"][key] = "another"
    files.write(run.path, record)
    with pytest.raises(
        SystemExit, match=f"would stay .machine. .*{key}: another there"
    ):
        run("layers")
    assert run() == ["machine", "layers"]  # all: nothing would stay
    assert run.path.read_text() == before
    del record["environment"][key]
    files.write(run.path, record)
    with pytest.raises(SystemExit, match=f"{key}: not recorded there"):
        run("layers")


def test_unknown_part(capsys):
    with pytest.raises(SystemExit):
        command.main(["layer"])
    said = " ".join(capsys.readouterr().err.split())
    assert f"unknown: layer; there are {', '.join(PARTS)}" in said


# ---- what is committed ----


def committed():
    for path in sorted((ROOT / "results" / "benchmarks").glob("*.json")):
        if path.name != "goals.json":
            yield path, load(path)


def test_committed_rows_are_complete():
    """Each shape has its three kinds of work against PyTorch's layer, batch
    norms a fourth (frozen), from at least fifteen pairs; the file has the name
    that its environment asks for.
    """
    for path, record in committed():
        assert path.name == files.name(record["environment"])
        rows = [
            r
            for r in record["rows"]
            if r["part"] == "layers" and r["against"] == "PyTorch's layer"
        ]
        kinds = {(r["layer"], tuple(r["shape"])): set() for r in rows}
        for r in rows:
            kinds[r["layer"], tuple(r["shape"])].add(r["work"])
            assert r["pairs"] >= 15 and 0 < r["low"] <= r["p50"] <= r["high"]
        assert len(kinds) >= 8 and all(
            len(k) == 3 + name.startswith("BatchNorm")
            for (name, _), k in kinds.items()
        )
        assert record["environment"]["pages kept"]
        assert {r["part"] for r in record["rows"]} >= {
            "machine",
            "layers",
            "memory",
            "models",
        }
        # files of older code, until all is measured again
        assert (
            PARTS.keys() - {"proxy", "cached"}
            <= set(record["parts"])
            <= PARTS.keys()
        )
        assert set(kinds) == {(l.name, l.shape) for l in measure.LAYERS}


def goals():
    path = ROOT / "results" / "benchmarks" / "goals.json"
    return load(path)["goals"]


def test_goals_speak_of_what_is_measured():
    "By the same names; each with limits for kinds of work."
    layers = {f"{l.name} {l.shape}" for l in (*measure.LAYERS, measure.PROXIED)}
    networks = {n.name for n in (*measure.NETWORKS, measure.PROXIED_NETWORK)}
    for goal in goals():
        assert goal["part"] in PARTS
        known = networks if "network" in goal["goal"] else layers
        assert set(goal["of"]) <= known, goal["goal"]
        assert set(goal["vectors"]) <= {"AVX2", "AVX512"}
        assert set(goal["at most"]) <= {"no noise", "noise", "evaluation"}
        assert all(0.9 < limit < 5 for limit in goal["at most"].values())


# ---- the chapter's arithmetic ----


@pytest.fixture(scope="module")
def cells():
    """The names that the cells of the chapter define, up to the table of what
    was missed.
    """
    pytest.importorskip("matplotlib")
    pytest.importorskip("IPython")
    path = ROOT / "nbs" / "290_what_it_costs.ipynb"
    names = {}
    for cell in load(path)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "#| label" not in source:
            exec(source, names)
        if "def in_short" in source:
            return names


def row(low, middle, high, **more):
    return {
        "part": "layers",
        "layer": "LayerNorm",
        "shape": [8, 197, 384],
        "work": "forward and backward, noise 0.0",
        "p50": middle,
        "against": "PyTorch's layer",
        "low": low,
        "high": high,
        "ms": 1.0,
        "ms of the other": 0.5,
    } | more


@pytest.mark.parametrize("training", [True, False])
def test_a_copy_is_the_same_inside_a_compiled_model(training):
    copy, u = measure.Copy(3).train(training), torch.randn(4, 3, 2)
    operators = torch.ops.normalnorm_benchmarks
    torch.library.opcheck(operators.copy.default, (u,))
    torch.library.opcheck(
        operators.copied.default, (u, u, copy.weight.detach())
    )
    read = []
    inside = torch.compile(
        copy, backend=lambda of, _: read.append(str(of.graph)) or of.forward
    )
    with torch.set_grad_enabled(training):
        assert torch.equal(inside(u), u) and torch.equal(copy(u), u)
    name = "layer" if training else "copy"
    assert f"normalnorm_benchmarks.{name}" in read[0]
    for function in (copy, inside) if training else ():
        _, *found = step(function, u, 2 * torch.ones_like(u))
        assert [g.unique().tolist() for g in found] == [[2.0], [0.0], [0.0]]


@pytest.mark.book
def test_verdicts(cells):
    ends = (1.8, 1.9), (1.8, 2.0), (1.8, 2.1), (2.0, 2.1), (2.01, 2.1)
    found = [cells["verdict"](row(low, 2.0, high), 2.0) for low, high in ends]
    assert found == ["met", "met", "open", "open", "missed"]


def toy(vectors, threads, rows, **rates):
    "A file, with `rates` of the processor beside those of its copies."
    values = {"copy in memory, GB/s": 8.0, "copy in cache, GB/s": 80.0} | rates
    return {
        "environment": {"vectors": vectors, "threads": threads},
        "rows": [
            {"part": "machine", "what": what, "value": value}
            for what, value in values.items()
        ]
        + rows,
    }


@pytest.mark.book
@pytest.mark.parametrize(
    "vectors, threads, limits",
    [
        ("AVX2", 1, [2.2]),
        ("AVX2", 2, [2.2]),
        ("AVX512", 2, [1.4]),
        ("AVX512", 1, []),
        ("DEFAULT", 1, []),
    ],
)
def test_goals_meet_rows_of_their_set_and_threads(
    cells, vectors, threads, limits
):
    "The goals of layer norm."
    others = {"against": COPY}, {"shape": [5, 6]}, {"part": "engines"}
    rows = [row(1, 1, 1, **more) for more in ({}, *others)]
    found = list(cells["aims"](toy(vectors, threads, rows)))
    assert [(name, limit) for name, _, limit, _ in found] == [
        ("layer norm", limit) for limit in limits
    ]


COPY, SIZE = "a copy of the input", 8 * 197 * 384
SLOW_COPY = row(
    1, 1, 1, against=COPY, **{"ms of a copy alone": 1e-6 * SIZE * 1000}
)
# inside torch.compile: what compilation adds to a copy, and the time outside
INSIDE = row(
    1.4,
    1.5,
    1.6,
    part="compiled",
    compiled=True,
    against="the same layer, not compiled",
    **{"ms": 7.5, "ms of the other": 5.0},
)
FROZEN = INSIDE | {"work": "evaluation", "ms of the other": 2.0}
COPIES = [
    INSIDE | {"work": f"a copy: {work}", "ms": ms, "ms of the other": 1.0}
    for work, ms in (("forward and backward", 1.5), ("evaluation", 1.25))
]
# the step of a network, without normalizers, and with some that copy
STEP = {
    "part": "models",
    "model": "ViT 6×384, batch 8",
    "against": "PyTorch's layers",
    "work": "training step, noise 0.0",
    "p50": 1.0,
    "ms of the other": 200.0,
}
BARE = STEP | {"work": "training step, no normalizer", "p50": 0.875}
COMPILED = STEP | {"compiled": True, "part": "compiled"}
COPYING = COMPILED | {"work": "training step, copies", "p50": 1.0625}
# rows beside it, rates, the row, its bound
BOUNDS = [
    # 20 bytes, of which the cache gives 80 a nanosecond
    ([], {}, row(1, 1, 1), (0.25 * SIZE * 2e-6, "bytes")),
    # 20 bytes move where a copy moves 8
    ([SLOW_COPY], {}, row(1, 1, 1), (2500 * SIZE * 2e-6, "bytes")),
    (
        [SLOW_COPY],
        {"a layer that does nothing, forward and backward, µs": 9e0 * SIZE},
        row(1, 1, 1),
        (11500 * SIZE * 2e-6, "the call"),
    ),
    (COPIES, {}, INSIDE, (1.1, "the call")),
    (COPIES, {}, FROZEN, (1.125, "the call")),
    (COPIES, {}, INSIDE | {"shape": [5, 6]}, None),
    ([], {}, INSIDE, None),
    ([COPIES[0] | {"ms": 0.5}], {}, INSIDE, (1, "the call")),
    ([STEP], {}, STEP, None),
    ([STEP, BARE], {}, STEP, (0.875, "the rest")),
    ([STEP, BARE], {}, COMPILED, None),
    ([STEP, COPYING], {}, COMPILED, (1.0625, "the call")),
]


@pytest.mark.book
@pytest.mark.parametrize(
    "beside, rates, one, bound", BOUNDS, ids=range(len(BOUNDS))
)
def test_bounds_by_hand(cells, beside, rates, one, bound):
    found = cells["bound_of"](toy("AVX2", 1, beside, **rates), one)
    assert found == (bound and (pytest.approx(bound[0]), bound[1]))


@pytest.mark.book
def test_missed_goals_are_listed_with_their_bound(cells):
    missed, met = row(3.0, 3.1, 3.2), row(1.0, 1.1, 1.2, shape=[64, 197, 384])
    key = "AVX2", 1
    run = toy(*key, [missed, met], **{"copy in cache, GB/s": 8.0})
    ((what, words),) = cells["missed"](run)
    least, by = cells["bound_of"](run, missed)
    assert what == ("LayerNorm (8, 197, 384)", "no noise")
    assert words == f"missed: 3.10, goal 2.2; least {least:.2f}, {by}"
    told = dict(cells["by_goal"](run))
    assert told.pop(("layer norm", "no noise")) == (
        "≤ 2.2; met 1, missed 1: 3.10 [3.00, 3.20]"
    )
    assert all(words.endswith("; not measured") for words in told.values())
    assert cells["in_short"]("X", {key: run}) == (
        "X: of 2 rows with a goal, 1 miss it or are open; for 1 of them the "
        f"bound is above the goal, and they take {3.1 / least:.1f} to "
        f"{3.1 / least:.1f} times the bound."
    )
    assert cells["told"]([(2.2, met)]) == "met: 1.10 [1.00, 1.20]"
    assert cells["in_short"]("X", {key: toy(*key, [met])}) == (
        "X: of 1 rows with a goal, 0 miss it or are open."
    )


# ---- the noise ----


def test_the_pieces_that_are_exchanged_are_in_the_kernel():
    text = noise.KERNEL.read_text(encoding="utf-8")
    for name, pieces in noise.VARIANTS.items():
        other = noise.exchanged(text, pieces)
        assert other != text, name
        with pytest.raises(LookupError, match="to exchange"):
            noise.exchanged(other, pieces)


# ---- operators by the stable interface ----


@pytest.mark.skipif(TORCH < (2, 10), reason="its headers are of PyTorch 2.10")
def test_what_is_measured_of_stable_operators_is_batch_norm(tmp_path):
    "And what a layer's step reads and moves is all there."
    torch.ops.load_library(str(stable.built(tmp_path)))
    u, grad, found = torch.randn(32, 64), torch.randn(32, 64), []
    for make in (torch.nn.BatchNorm1d, partial(stable.Layer, drawing=True)):
        torch.manual_seed(0)
        layer = make(64)
        layer.weight.data.uniform_(0.5, 2)
        x = u.clone().requires_grad_()
        grads = measure.step(layer, x, grad)()
        found.append([*grads, layer(x), *layer.buffers()])
    torch.testing.assert_close(*found)
