"""Runs spread over processes and over Ray: the same rows, killed workers,
failing runs, and what cannot be sent.
"""

import importlib
import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import types

import pytest

from normalnorm.experiments import results, spread
from normalnorm.experiments.results import Recipe
from tests.experiments.known import environment, printed

SOURCE = """
import os, signal, torch
from normalnorm.experiments.results import Recipe
from normalnorm.experiments.train import write_atomically

def run(config, seed, arm, device, checkpoint, progress):
    if arm == "fails":
        raise ArithmeticError("the loss is nan")
    begun = int(checkpoint.read_text()) if checkpoint.exists() else 0
    for epoch in range(begun + 1, 5):
        write_atomically(checkpoint,
                         lambda file: file.write(str(epoch).encode()))
        progress(f"epoch {epoch}/4")
        if arm == "dies always" or (arm, begun, epoch) == ("dies once", 0, 2):
            os.kill(os.getpid(), signal.SIGKILL)
    return {"metrics": {"test": 1.0}, "begun": begun, "process": os.getpid(),
            "threads": torch.get_num_threads()}

def recipe(*arms):
    return Recipe("spread", "", (),
                  {"smoke": {arm: {"data": "digits"} for arm in arms}}, run,
                  {"test": "test"})
"""


@pytest.fixture
def spreading(tmp_path, monkeypatch):
    module = tmp_path / "module"
    module.mkdir()
    (module / "spreading_recipe.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(module))
    paths = os.pathsep.join([str(module), environment()["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", paths)
    yield importlib.import_module("spreading_recipe")
    sys.modules.pop("spreading_recipe")


def are_continued(spreading, out, arms):
    """The rows by arm: those of "lives" and "dies once", by other processes
    than this. (That training continues to the same bits: test_train.py.)
    """
    found = results.rows(spreading.recipe(*arms), "smoke", out)
    begun = {row["arm"]: row["begun"] for row in found}
    assert begun == {"lives": 0, "dies once": 2}
    assert os.getpid() not in {row["process"] for row in found}
    return found


def test_killed_workers_job_is_taken_up_again_and_failures_are_reported(
    spreading, tmp_path, monkeypatch
):
    lines, arms = [], ("lives", "dies once", "fails", "dies always")
    monkeypatch.setattr(spread, "cores", lambda: 6)
    with pytest.raises(spread.SpreadError) as error:
        spread.spread(
            spreading.recipe(*arms),
            seeds=1,
            out=tmp_path,
            jobs=2,
            device="cpu",
            progress=lines.append,
            attempts=2,
        )
    died = "seed 0: its process ended with status -9"
    for said in (
        "2 of 4 runs failed, the others are finished",
        f"dies always {died}",
        "fails seed 0: ArithmeticError: the loss is nan",
    ):
        assert said in str(error.value)
    assert not re.search("lives|dies once", str(error.value))
    again = [line for line in lines if "taken up again" in line]
    assert sum(f"dies once {died}" in line for line in again) == 1
    assert any("lives seed 0: epoch 4/4" in line for line in lines)
    left = [path.suffix for path in (tmp_path / ".checkpoints").iterdir()]
    # of the job that dies always: its checkpoint waits for a cure
    assert sorted(left) == [".lock", ".pt"]
    found = are_continued(spreading, tmp_path, arms)
    assert {row["threads"] for row in found if row["arm"] == "lives"} == {3}


def test_failures_that_are_alike_are_said_once(
    spreading, tmp_path, monkeypatch
):
    names = ("a", "b", "c", "d")
    monkeypatch.setattr(
        spread,
        "_local",
        lambda left, *_: {
            job.label: "died" if job.arm in names else "lost" for job in left
        },
    )
    with pytest.raises(
        spread.SpreadError, match="a seed 0, .*b seed 0 and 2 others: died; .*e"
    ):
        spread.spread(
            spreading.recipe(*names, "e"),
            seeds=1,
            out=tmp_path,
            jobs=2,
            device="cpu",
        )


class Fake:
    """A worker without a process, whose pipe holds the answer as soon as it has
    a job. One that gets "dies" first dies, once.
    """

    exitcode = -9

    def __init__(self, *place):
        self.pipe, self.far = multiprocessing.Pipe()
        self.place, self.job, self.given, self.process = place, None, [], self
        self.made.append(self)

    def give(self, job, patient):
        assert self.job is None, "it has a job"
        self.job = job
        given = [label for worker in self.made for label, _ in worker.given]
        self.given.append((job.label, patient))
        if job.label == "dies" and "dies" not in given:
            return self.far.close()
        left = job.label == "held" and not patient
        self.far.send(("done", None if left else job.label))

    def join(self, timeout=None):
        return None

    terminate = join


def test_each_worker_has_a_job_and_one_that_dies_is_replaced(monkeypatch):
    """Both are at work at once; the replacement takes up the job, the other
    does not; what another process is at comes last.
    """
    jobs = [
        types.SimpleNamespace(label=label, hash=label, state="new")
        for label in ("a", "b", "held", "dies")
    ]
    lines, places = [], [("cpu", 1), ("cpu", 2)]
    monkeypatch.setattr(Fake, "made", [], raising=False)
    monkeypatch.setattr(spread, "_Worker", Fake)
    assert spread._local(jobs, places, lines.append, 2) == {}
    first, second, third = Fake.made
    assert [w.given[0] for w in (first, second)] == [("a", False), ("b", False)]
    (died,) = [w for w in (first, second) if ("dies", False) in w.given]
    assert third.place == died.place
    assert third.given[0] == ("dies", False)
    given = first.given + second.given + third.given
    assert sorted(given)[-2:] == [("held", False), ("held", True)]
    assert sum(patient for _, patient in given) == 1
    assert sum("taken up again" in line for line in lines) == 1


def local_recipe():
    "It cannot be sent to another process."
    scales = {"smoke": {"a": {"data": "digits"}}}
    run = lambda *_, **__: {"metrics": {"m": 1.0}}
    return Recipe("local", "", (), scales, run, {})


def test_finished_runs_start_no_process(spreading, tmp_path, monkeypatch):
    recipe, lines = spreading.recipe("lives"), []
    done = results.run_recipe(recipe, seeds=2, out=tmp_path)
    monkeypatch.delattr(spread, "_Worker")
    again = spread.spread(recipe, seeds=2, out=tmp_path, progress=lines.append)
    assert again == done
    assert lines == ["2 of 2 runs finished before"]
    with pytest.raises(
        ValueError, match="jobs=-1: expected a number of processes"
    ):
        spread.spread(spreading.recipe("other"), jobs=-1, out=tmp_path)


def test_rows_of_other_code_are_told_before_runs_are_added(
    tmp_path, monkeypatch
):
    "And what cannot be sent is said."
    lines = []
    with monkeypatch.context() as m:
        m.setattr(results, "source_hash", lambda: "0" * 12)
        results.run_recipe(local_recipe(), seeds=1, out=tmp_path)
    with pytest.raises(
        ValueError,
        match="the recipe local cannot be sent to another "
        "process.*define its function in a module",
    ):
        spread.spread(
            local_recipe(),
            seeds=2,
            out=tmp_path,
            device="cpu",
            progress=lines.append,
        )
    assert lines[0] == "1 of 2 runs finished before"
    assert "rows of other code (source 000000000000" in lines[1]
    assert len(lines) == 2


@pytest.mark.parametrize(
    "jobs, device, most, places",
    [
        (3, "cpu", None, [("cpu", 2)] * 3),
        (0, "cpu", None, [("cpu", 1)] * 8),
        (0, "cpu", 2, [("cpu", 4)] * 2),
        (20, "cpu", 30, [("cpu", 1)] * 20),
        (0, "cuda", None, [("cuda:0", 4), ("cuda:1", 4)]),
        (3, "cuda", None, [("cuda:0", 2), ("cuda:1", 2), ("cuda:0", 2)]),
        (0, "cuda:1", None, [("cuda:1", 8)]),
    ],
)
def test_threads_and_devices_are_divided(
    jobs, device, most, places, monkeypatch
):
    monkeypatch.setattr(spread, "cores", lambda: 8)
    monkeypatch.setattr(spread.torch.cuda, "device_count", lambda: 2)
    assert spread.allotment(jobs, device, most) == places


def test_command_line_spreads(tmp_path):
    command = "run first-experiment --seeds 2 --jobs 2 --device cpu --out"
    status, out, err = printed(*command.split(), tmp_path, "--arm", "ViT LN")
    assert status == 0 and "2 runs, seeds 0–1" in out
    assert "| ViT LN" in out
    assert "[0/2 finished]" in err
    assert len(list(tmp_path.rglob("smoke/*.json"))) == 2


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason='Ray is not installed: pip install ".[ray]"',
)
def test_ray_gives_the_same_rows_and_survives_a_killed_worker(
    spreading, tmp_path, monkeypatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # 15 waits for all else
    arms = "lives", "dies once", "fails"
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(
        spread.SpreadError,
        match="1 of 3 runs failed.*fails seed 0: ArithmeticError",
    ):
        spread.spread(
            spreading.recipe(*arms),
            seeds=1,
            out=tmp_path,
            jobs=1,
            device="cpu",
            ray=True,
        )
    assert signal.getsignal(signal.SIGTERM) == before  # not Ray's
    are_continued(spreading, tmp_path, arms)


def test_ray_that_is_missing_is_named(spreading, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r'pip install "\.\[ray\]" in the folder.*--jobs',
    ):
        spread.spread(
            spreading.recipe("lives"), out=tmp_path, device="cpu", ray=True
        )
