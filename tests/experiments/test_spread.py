"""Runs spread over processes and over Ray: the same rows, killed workers,
failing runs, and what cannot be sent.
"""

import importlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from normalnorm.experiments import results, spread
from normalnorm.experiments.results import Recipe

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT), os.environ.get("PYTHONPATH", "")]
    ),
    "OMP_NUM_THREADS": "1",
}

SOURCE = """
import os, signal, torch
from normalnorm.experiments import data, models
from normalnorm.experiments.optimization import Settings
from normalnorm.experiments.results import Recipe
from normalnorm.experiments.train import seeded, train

def run(config, seed, arm, device, checkpoint, progress):
    if arm == "fails":
        raise ArithmeticError("the loss is nan")

    def tell(line):
        progress(line)
        if (arm == "dies always" and line.startswith("epoch")
                or arm == "dies once" and line.startswith("epoch 2/")):
            os.kill(os.getpid(), signal.SIGKILL)
        if line.startswith("continued after epoch 2"):
            continued.append(line)
    continued, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # more threads add in another order
    parts = {split: data.load("digits", split, 64) for split in data.SPLITS}
    with seeded("weights", seed):
        model = models.SmallResNet(width=2, stem_stride=1)
    outcome = train(model, parts, Settings(epochs=4, batch=16), seed, device,
                    checkpoint, tell)
    return {"metrics": {"test": outcome["last"]["test_accuracy"]},
            "losses": [epoch["train_loss"] for epoch in outcome["history"]],
            "continued": len(continued), "process": os.getpid(),
            "threads": threads}

def recipe(*arms):
    return Recipe("spread", "", (),
                  {"smoke": {arm: {"data": "digits"} for arm in arms}}, run,
                  {"test": "test"})
"""


@pytest.fixture
def spreading(tmp_path, monkeypatch):
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "spreading_recipe.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path / "module"))
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(tmp_path / "module"), ENVIRONMENT["PYTHONPATH"]]),
    )
    yield importlib.import_module("spreading_recipe")
    sys.modules.pop("spreading_recipe")


def test_killed_workers_job_is_taken_up_again_and_failures_are_reported(
    spreading, tmp_path, monkeypatch
):
    lines = []
    monkeypatch.setattr(spread, "cores", lambda: 6)
    with pytest.raises(spread.SpreadError) as error:
        spread.spread(
            spreading.recipe("lives", "dies once", "fails", "dies always"),
            seeds=1,
            out=tmp_path / "many",
            jobs=2,
            device="cpu",
            progress=lines.append,
            attempts=2,
        )
    message = str(error.value)
    assert (
        "2 of 4 runs failed, the others are finished" in message
        and "dies always seed 0: its process ended with status -9" in message
    )
    assert (
        "fails seed 0: ArithmeticError: the loss is nan" in message
        and "lives" not in message
        and "dies once" not in message
    )
    assert (
        sum(
            "dies once seed 0: its process ended with status -9" in line
            and "taken up again" in line
            for line in lines
        )
        == 1
    )
    assert any("lives seed 0: epoch 4/4" in line for line in lines)
    expected = results.run_recipe(
        spreading.recipe("lives"), seeds=1, out=tmp_path / "one", device="cpu"
    )[0]
    rows = {
        row["arm"]: row
        for row in results.rows(
            spreading.recipe("lives", "dies once", "fails", "dies always"),
            "smoke",
            tmp_path / "many",
        )
    }
    assert (
        rows.keys() == {"lives", "dies once"}
        and rows["dies once"]["continued"] == 1
        and rows["lives"]["continued"] == 0
    )
    assert (
        rows["lives"]["losses"]
        == rows["dies once"]["losses"]
        == expected["losses"]
        and rows["lives"]["process"] != os.getpid()
    )
    assert rows["lives"]["threads"] == 3
    left = sorted(
        p.suffix for p in (tmp_path / "many" / ".checkpoints").iterdir()
    )
    # of the job that dies always: its checkpoint waits for a cure
    assert left == [".lock", ".pt"]


class Threaded:
    """A worker whose process is a thread: what it is given is kept, and `does`
    says what comes of it.
    """

    made, does = [], []

    def __init__(self, *place):
        self.pipe, self.far = multiprocessing.Pipe()
        self.place, self.job, self.given, self.process = place, None, [], self
        self.exitcode = -9
        self.made.append(self)

    def give(self, job, patient):
        assert self.job is None, "it has a job"
        self.job = job
        self.given.append((job.label, patient))
        threading.Thread(
            target=self.does[0], args=(self, job, patient), daemon=True
        ).start()

    def join(self, timeout=None):
        return None

    terminate = join


def test_each_worker_has_a_job_and_one_that_dies_is_replaced(monkeypatch):
    """Two workers meet in the middle of their jobs, so both are at work; the
    replacement takes up the job, the other does not.
    """
    jobs = [
        types.SimpleNamespace(label=label, hash=label, state="new")
        for label in ("a", "b", "held", "dies")
    ]
    together, deaths = threading.Barrier(2), []

    def does(self, job, patient):
        if job.label in "ab":
            together.wait(20)
        if job.label == "dies" and not deaths:
            deaths.append(self)
            return self.far.close()
        self.far.send(
            ("done", None if job.label == "held" and not patient else job.label)
        )

    monkeypatch.setattr(Threaded, "made", [])
    monkeypatch.setattr(Threaded, "does", [does])
    monkeypatch.setattr(spread, "_Worker", Threaded)
    lines = []
    assert spread._local(jobs, [("cpu", 1), ("cpu", 2)], lines.append, 2) == {}
    first, second, third = Threaded.made
    assert [w.given[0][0] for w in (first, second)] == [
        "a",
        "b",
    ] and third.place == deaths[0].place
    assert (
        third.given[0] == ("dies", False)
        and sum(label == "held" for w in Threaded.made for label, _ in w.given)
        == 2
    )
    assert [
        label for w in Threaded.made for label, patient in w.given if patient
    ] == ["held"]
    assert sum("taken up again" in line for line in lines) == 1


def test_finished_runs_start_no_process_and_what_cannot_be_sent_is_said(
    spreading, tmp_path, monkeypatch
):
    results.run_recipe(spreading.recipe("lives"), seeds=2, out=tmp_path)
    monkeypatch.setattr(
        spread, "_Worker", lambda *place: pytest.fail("a process was started")
    )
    lines = []
    assert len(
        spread.spread(
            spreading.recipe("lives"),
            seeds=2,
            out=tmp_path,
            progress=lines.append,
        )
    ) == 2 and lines == ["2 of 2 runs finished before"]
    local = Recipe(
        "local",
        "",
        (),
        {"smoke": {"a": {"data": "digits"}}},
        lambda **_: {"metrics": {}},
        {},
    )
    with pytest.raises(
        ValueError,
        match="the recipe local cannot be sent to another "
        "process.*define its function in a module",
    ):
        spread.spread(local, out=tmp_path, device="cpu")
    with pytest.raises(
        ValueError, match="jobs=-1: expected a number of processes"
    ):
        spread.spread(spreading.recipe("other"), jobs=-1, out=tmp_path)


def test_rows_of_other_code_are_told_before_runs_are_added(
    tmp_path, monkeypatch
):
    local, lines = (
        Recipe(
            "local",
            "",
            (),
            {"smoke": {"a": {"data": "digits"}}},
            lambda *_, **__: {"metrics": {"m": 1.0}},
            {},
        ),
        [],
    )
    with monkeypatch.context() as m:
        m.setattr(results, "source_hash", lambda: "0" * 12)
        results.run_recipe(local, seeds=1, out=tmp_path)
    with pytest.raises(ValueError, match="cannot be sent"):
        spread.spread(
            local, seeds=2, out=tmp_path, device="cpu", progress=lines.append
        )
    assert (
        lines[0] == "1 of 2 runs finished before"
        and "rows of other code (source 000000000000" in lines[1]
        and len(lines) == 2
    )


def test_threads_and_devices_are_divided(monkeypatch):
    monkeypatch.setattr(spread, "cores", lambda: 8)
    monkeypatch.setattr(spread.torch.cuda, "device_count", lambda: 2)
    assert (
        spread.allotment(3, "cpu") == [("cpu", 2)] * 3
        and spread.allotment(0, "cpu") == [("cpu", 1)] * 8
    )
    assert (
        spread.allotment(0, "cpu", most=2) == [("cpu", 4)] * 2
        and spread.allotment(20, "cpu", most=30) == [("cpu", 1)] * 20
    )
    assert spread.allotment(0, "cuda") == [
        ("cuda:0", 4),
        ("cuda:1", 4),
    ] and spread.allotment(3, "cuda") == [
        ("cuda:0", 2),
        ("cuda:1", 2),
        ("cuda:0", 2),
    ]
    assert spread.allotment(0, "cuda:1") == [("cuda:1", 8)]


def test_command_line_spreads(tmp_path):
    arguments = [
        "run",
        "first-experiment",
        "--arm",
        "ResNet BN",
        "--arm",
        "ViT LN",
        "--seeds",
        "2",
        "--jobs",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\nif __name__ == '__main__':\n"
            " from normalnorm.cli import main; "
            f"sys.exit(main({arguments!r}))",
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        "4 runs, seeds 0–1" in done.stdout
        and "| ViT LN" in done.stdout
        and "[0/4 finished]" in done.stderr
    )
    assert (
        len(list((tmp_path / "first-experiment" / "smoke").glob("*.json"))) == 4
    )


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason='Ray is not installed: pip install ".[ray]"',
)
def test_ray_gives_the_same_rows_and_survives_a_killed_worker(
    spreading, tmp_path, monkeypatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    expected = results.run_recipe(
        spreading.recipe("lives"), seeds=1, out=tmp_path / "one", device="cpu"
    )[0]
    with pytest.raises(
        spread.SpreadError,
        match="1 of 3 runs failed.*fails seed 0: ArithmeticError",
    ):
        spread.spread(
            spreading.recipe("lives", "dies once", "fails"),
            seeds=1,
            out=tmp_path / "ray",
            jobs=1,
            device="cpu",
            ray=True,
        )
    rows = {
        row["arm"]: row
        for row in results.rows(
            spreading.recipe("lives", "dies once", "fails"),
            "smoke",
            tmp_path / "ray",
        )
    }
    assert (
        rows["lives"]["losses"]
        == rows["dies once"]["losses"]
        == expected["losses"]
        and rows["dies once"]["continued"] == 1
    )
    assert (
        json.loads(next((tmp_path / "ray").rglob("lives*.json")).read_text())[
            "process"
        ]
        != os.getpid()
    )


def test_ray_that_is_missing_is_named(spreading, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r'pip install "\.\[ray\]" in the folder.*--jobs',
    ):
        spread.spread(
            spreading.recipe("lives"), out=tmp_path, device="cpu", ray=True
        )
