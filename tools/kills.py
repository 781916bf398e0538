"""`python -m tools.kills`: what a run of book scale loses when it is ended.

Killed (`kill -9`) at random moments and while it writes a checkpoint; one of
two workers killed; SIGTERM; a full disk; a turned bit in a checkpoint or a row.
Each time the same command is given again, and its row must be that of an
undisturbed run to the last bit, times aside. Twenty minutes, one of them on two
cores; the outcome is results/kills.json. The commands run in processes forked
from this one, which has imported what they need.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path

import lightning_fabric  # noqa: F401  so that no child has to
import psutil
import torch

from normalnorm import cli
from normalnorm.experiments import results
from normalnorm.experiments.train import CheckpointError
from tools.files import save

RECORD = Path(__file__).resolve().parent.parent / "results" / "kills.json"
# AdamW keeps two numbers for each weight, the chosen weights come to it: of the
# first experiment's arms this one has most to put into a checkpoint
RECIPE, ARM, OTHER = "first-experiment", "ViT LNN", "ResNet BNN"


def timeless(value):
    "A row without what no run repeats: times, and the digest that counts them."
    if isinstance(value, dict):
        return {
            k: timeless(v)
            for k, v in value.items()
            if k not in ("seconds", "wall_seconds", "digest")
        }
    return [timeless(v) for v in value] if isinstance(value, list) else value


def worker_of(parent: int) -> int:
    "A process that multiprocessing has spawned there; 0 where there is none."
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(child.cmdline()):
                return child.pid
    return 0


class Trial:
    "A folder of results and the command that fills it, started many times."

    def __init__(self, scale: str, folder: Path, arms=(ARM,), jobs: int = 1):
        self.scale, self.folder, self.arms = scale, folder, arms
        self.log = folder.with_suffix(".txt")
        options = f"--scale {scale} --device cpu --seeds 1 --jobs {jobs} --out"
        self.command = ["run", RECIPE, *options.split(), str(folder)]
        self.command += [word for arm in arms for word in ("--arm", arm)]

    def run(self) -> None:
        for stream in (1, 2):
            os.dup2(os.open(self.log, os.O_WRONLY | os.O_APPEND), stream)
        sys.exit(cli.main(self.command))

    def start(self) -> BaseProcess:
        "A process that is at the command."
        self.log.write_text("")
        process = multiprocessing.get_context("fork").Process(target=self.run)
        process.start()
        return process

    def ended(self, process: BaseProcess) -> int:
        process.join()
        return process.exitcode

    def said(self) -> str:
        return self.log.read_text()

    def found(self, pattern: str) -> list[Path]:
        return list((self.folder / ".checkpoints").glob(pattern))

    def disturb(self, ready, act) -> int | None:
        """Start, act on the process when it is `ready`, and return how it
        ended; None where that was before.
        """
        process = self.start()
        while not ready():
            if not process.is_alive():
                assert self.ended(process) == 0, self.said()[-2000:]
                return None
            time.sleep(0.0005)
        act(process.pid)
        return self.ended(process)

    def settle(self, expected: dict) -> None:
        """Give the command once more; raises `AssertionError` unless there is
        one row of each arm, the expected one, and nothing else.
        """
        assert self.ended(self.start()) == 0, self.said()[-2000:]
        found = results.scan(results.find(RECIPE), self.scale, self.folder)
        assert not found.problems and len(found.rows) == len(self.arms)
        for row in found.rows.values():
            assert timeless(row) == expected[row["arm"]], row["arm"]
        assert not self.found("*"), "something was left beside the row"


class Kills:
    "The parts, in the order in which they are tried."

    def __init__(self, scale: str, folder: Path, kills: int, flips: int):
        self.scale, self.folder, self.count = scale, folder, 0
        self.kills, self.flips = kills, flips
        self.random, self.expected = random.Random(0), {}

    def trial(self, arms=(ARM,), jobs: int = 1) -> Trial:
        self.count += 1
        return Trial(self.scale, self.folder / str(self.count), arms, jobs)

    def undisturbed(self) -> dict:
        for arm in (OTHER, ARM):
            trial, start = self.trial((arm,)), time.perf_counter()
            trial.ended(trial.start())
            (self.row,) = trial.folder.rglob("*.json")
            self.expected[arm] = timeless(results.read_row(self.row))
            self.seconds = time.perf_counter() - start
        self.epochs = self.expected[ARM]["config"]["train"]["epochs"]
        return {"seconds of a run": round(self.seconds, 1)}

    def killed(self, moment, times: int) -> dict:
        "Runs, each carried to its end, until `times` kills have met one."
        done, runs, half = [], 0, 0
        while len(done) < times:
            trial, runs, status = self.trial(), runs + 1, -signal.SIGKILL
            while len(done) < times and status == -signal.SIGKILL:
                status = trial.disturb(
                    moment(trial), lambda pid: os.kill(pid, signal.SIGKILL)
                )
                if status is None:
                    break
                half += bool(trial.found(".*"))
                done.append(0)
                for whole in trial.found("*.pt"):
                    self.checkpoint = whole.read_bytes()
                    kept = torch.load(whole, weights_only=True)
                    done[-1] = len(kept["history"])
            trial.settle(self.expected)
        return {
            "kills": len(done),
            "runs that they met": runs,
            "epochs done at each": done,
            "left a half-written file": half,
        }

    def at_random_moments(self) -> dict:
        # each start takes half a second, which the kills must not eat up
        longest = 1.8 * self.seconds / self.kills + 0.5

        def moment(trial: Trial):
            end = time.perf_counter() + self.random.uniform(0, longest)
            return lambda: time.perf_counter() > end

        return self.killed(moment, self.kills)

    def in_a_write(self) -> dict:
        def moment(trial: Trial):
            seen, which = set(), self.random.randint(2, 2 + self.epochs // 10)
            return lambda: (
                seen.update(trial.found(".*.pt.*")) or (len(seen) >= which)
            )

        return self.killed(moment, max(1, self.kills // 4))

    def worker(self) -> dict:
        trial, status, said = self.trial((ARM, OTHER), jobs=2), None, ""
        while "taken up again" not in said:
            shutil.rmtree(trial.folder, ignore_errors=True)
            status = trial.disturb(
                lambda: trial.found("*.pt"),
                lambda pid: os.kill(worker_of(pid), signal.SIGKILL),
            )
            said = trial.said()
        assert status == 0 and said.count("ended with status -9") == 1, said
        trial.settle(self.expected)
        return {"workers": 2, "killed": 1}

    def sigterm(self) -> dict:
        status = None
        while status is None:
            trial = self.trial()
            status = trial.disturb(
                lambda: "epoch 1/" in trial.said(),
                lambda pid: os.kill(pid, signal.SIGTERM),
            )
        message = trial.said().splitlines()[-1]
        assert status == 143 and "ended by SIGTERM" in message, message
        trial.settle(self.expected)
        return {"status": status, "message": message}

    def full_disk(self) -> dict:
        "A disk of its own where one may be made, a limit for files elsewhere."
        trial, size = self.trial(), len(self.checkpoint)
        where = trial.folder
        where.mkdir()
        mount = ["mount", "-t", "tmpfs", "none", str(where), "-o"]
        mounted = not subprocess.run(
            [*mount, f"size={3 * size // 2}"], capture_output=True
        ).returncode

        def starve(pid: int) -> None:
            if not mounted:
                limits = size // 2, resource.RLIM_INFINITY
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

        try:
            status = trial.disturb(lambda: "epoch 1/" in trial.said(), starve)
            message = trial.said().splitlines()[-1]
            assert status == 2 and "was not written, and what" in message
            (kept,) = trial.found("*")
            assert kept.suffix == ".pt", kept
            if mounted:
                subprocess.run(
                    [*mount, f"remount,size={30 * size}"], check=True
                )
            trial.settle(self.expected)
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(where)], check=True)
        return {
            "how": "a file system with room for one checkpoint"
            if mounted
            else "files may be half as long as a checkpoint",
            "message": message.replace(str(self.folder), "…"),
        }

    def turned_bits(self) -> dict:
        trial, outcome = self.trial(), {}
        (job,) = results.plan(RECIPE, self.scale, 1, trial.folder, [ARM])
        row = self.row.read_bytes()
        for what, target, whole, times in (
            ("checkpoint", job.checkpoint, self.checkpoint, self.flips),
            ("row", job.path, row, 3 * self.flips),
        ):
            target.parent.mkdir(parents=True, exist_ok=True)
            refused = 0
            for _ in range(times):
                bit = self.random.randrange(8 * len(whole))
                damaged = bytearray(whole)
                damaged[bit // 8] ^= 1 << bit % 8
                target.write_bytes(damaged)
                try:
                    found = results.perform(job)
                    assert timeless(found) == self.expected[ARM], bit
                    job.path.unlink()
                except (CheckpointError, results.ResultsError) as error:
                    assert str(target) in str(error) and "delete" in str(error)
                    assert target.read_bytes() == damaged
                    refused += 1
            target.unlink(missing_ok=True)
            outcome[what] = {
                "bytes": len(whole),
                "bits": times,
                "refused": refused,
                "came to the same": times - refused,
            }
        job.checkpoint.write_bytes(self.checkpoint)
        trial.settle(self.expected)
        return outcome


PARTS = (
    "undisturbed",
    "at_random_moments",
    "in_a_write",
    "worker",
    "sigterm",
    "full_disk",
    "turned_bits",
)


def main(arguments: list[str] | None = None) -> int:
    "Command line; see the module's text."
    parser = argparse.ArgumentParser(
        prog="python -m tools.kills", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--scale", choices=("smoke", "book"), default="book")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--flips", type=int, default=150)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument(
        "--skip", choices=PARTS[3:], action="append", default=[]
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, found, failures = time.perf_counter(), {}, {}
    folder = Path(tempfile.mkdtemp(prefix="normalnorm-kills-"))
    tried = Kills(given.scale, folder, given.kills, given.flips)
    for part in (part for part in PARTS if part not in given.skip):
        try:
            found[part] = getattr(tried, part)()
        except AssertionError as error:
            traceback.print_exc()
            failures[part] = str(error)
        print(part, found.get(part, "FAILED"), flush=True)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        **results.provenance(),
        "recipe": RECIPE,
        "scale": given.scale,
        "arms": [ARM, OTHER],
        "seconds": round(time.perf_counter() - start),
        "parts": found,
        "failures": failures,
    }
    save(given.out, record)
    if not failures:
        shutil.rmtree(folder)
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
