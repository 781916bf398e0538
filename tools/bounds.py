"""`make test-oldest`, `make test-newest`: the two ends of what the library
promises to work with; outcomes in results/test-{oldest,newest}.json.

oldest: the lower bound of each core requirement, the library's tests. newest:
the newest releases that the ranges allow, the whole book and every test.
"""

import platform
import re
import subprocess
import sys
import time
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

from tools.files import ROOT, python, save

TOOLS = [
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "mpmath",
    "matplotlib",
    "lightning-fabric",
    "kornia",
    "timm",
    "tqdm",
    "psutil",
    "python-flint",
]
# what `newest` takes without a pin; the book's tools keep theirs
FREE = ("torch", "torchvision", "numpy", "scipy", "matplotlib")


def requirements() -> list[str]:
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]["requirements"].split()


def lower_bounds(wanted: list[str]) -> list[str]:
    return [
        re.sub(
            r">=([\d.]+)$",
            lambda m: f"=={m[1]}" + (".0" if m[1].count(".") == 1 else ""),
            r,
        )
        for r in wanted
    ]


def without_pins(constraints: str) -> str:
    "The constraints without the lines of the packages in `FREE`."
    return (
        "\n".join(
            line
            for line in constraints.splitlines()
            if re.split(r"[=<>;\s]", line, maxsplit=1)[0] not in FREE
        )
        + "\n"
    )


def install(which: str) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--disable-pip-version-check",
    ]
    if which == "oldest":
        bounds = lower_bounds(requirements())
        print(f"installing {' '.join(bounds)}", flush=True)
        subprocess.run([*pip, *bounds, *TOOLS], check=True)
        subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    else:
        print(
            "installing the newest releases: with CUDA's libraries, several GB",
            flush=True,
        )
        loose = Path(sys.prefix) / "constraints.txt"
        loose.write_text(without_pins((ROOT / "constraints.txt").read_text()))
        subprocess.run(
            [
                *pip,
                "--upgrade",
                "--constraint",
                str(loose),
                "--editable",
                f"{ROOT}[dev,plots,experiments,ray]",
                *FREE,
            ],
            check=True,
        )
        subprocess.run(
            [sys.executable, "-m", "ipykernel", "install", "--sys-prefix"],
            check=True,
            capture_output=True,
        )


def main(which: str) -> int:
    install(which)
    start = time.perf_counter()
    tests = ["pytest", "-n", "2", "tests"]
    for words in (
        [[*tests, "-m", "not book"]]
        if which == "oldest"
        else [["tools.build"], tests]
    ):
        done = python("-m", *words, cwd=ROOT)
        print(done.stdout[-4000:] + done.stderr[-2000:], flush=True)
        if done.returncode:
            break
    outcome = {
        "versions": {
            r: version(r) for r in ("torch", "numpy", "scipy", "matplotlib")
        },
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "ran": "tests without the book"
        if which == "oldest"
        else "the book and every test",
        "passed": done.returncode == 0,
        "summary": done.stdout.strip().splitlines()[-1:],
        "seconds": round(time.perf_counter() - start, 1),
    }
    save(ROOT / "results" / f"test-{which}.json", outcome)
    return done.returncode


if __name__ == "__main__":
    if sys.argv[1:] not in (["oldest"], ["newest"]):
        sys.exit("usage: python -m tools.bounds oldest|newest")
    sys.exit(main(sys.argv[1]))
