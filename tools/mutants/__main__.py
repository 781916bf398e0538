"Command line of `tools.mutants`."

import argparse
import hashlib
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import tools.mutants
from tools.files import ROOT, load, save
from tools.mutants import kernel, python
from tools.mutants.kernel import KERNEL

PACKAGES = ("theory", "layers", "analysis", "experiments")
FOLDER = ROOT / "_build" / "mutants"
RECORD = ROOT / "results" / "mutation"
COUNT = 5  # mutants of a module
KERNELS = 40  # and of the kernel, for each instruction set
TESTS = 4  # files of tests that a module's mutants meet
SEED = 15
KILLED = ("killed", "timeout", "segfault")  # of the words of mutmut


def modules() -> list[str]:
    "What has functions."
    found = (
        path
        for name in PACKAGES
        for path in sorted((ROOT / "normalnorm" / name).rglob("*.py"))
        if "def " in path.read_text(encoding="utf-8")
    )
    return [path.relative_to(ROOT).as_posix() for path in found] + [KERNEL]


def tests_of(file: str) -> list[str]:
    "Those that name most of the module's public names, and its claims."
    module = importlib.import_module(file[:-3].replace("/", "."))
    names = getattr(module, "__all__", [])
    word = re.compile(rf"\b(?:{'|'.join(names)})\b")
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        named = len(set(word.findall(text))) if names else 0
        own = path.stem == f"test_{Path(file).stem}"
        of_library = path.parent.name not in ("book", "tools")
        if (own or named > 1) and of_library:
            found.append((own, named, path.relative_to(ROOT).as_posix()))
    chosen = [name for _, _, name in sorted(found)[::-1][:TESTS]]
    checks = ROOT / file.replace("normalnorm/", "normalnorm/checks/", 1)
    text = checks.read_text(encoding="utf-8") if checks.exists() else ""
    claims = re.findall(r'@claim\(\s*"([^"]+)"', text)
    return chosen + [
        f"tests/book/test_claims.py::test_claim[{c}]" for c in claims
    ]


def place(file: str, given: argparse.Namespace) -> Path:
    "Where the outcomes of a module are kept: named after what they depend on."
    tests = given.tests or ([] if file == KERNEL else tests_of(file))
    about = repr([given.count, given.seed, tests]).encode()
    for name in (file, *tests):
        about += (ROOT / name.split("::")[0]).read_bytes()
    digest = hashlib.sha256(about).hexdigest()[:10]
    return FOLDER / f"{file.replace('/', '.')}-{digest}.jsonl"


def outcomes(file: str, given: argparse.Namespace) -> Iterator[dict]:
    if file != KERNEL:
        tests = given.tests or tests_of(file)
        yield from python.run(
            file, given.count or COUNT, given.seed, tests, given.jobs
        )
        return
    for instructions in kernel.instruction_sets():
        with tempfile.TemporaryDirectory() as folder:
            yield from kernel.run(
                Path(folder),
                instructions,
                given.count or KERNELS,
                given.seed,
                given.tests,
            )


def argued(row: dict, known: list[dict]) -> dict:
    "The row, as equivalent where that has been argued."
    for entry in known:
        same = all(entry[k] == row[k] for k in ("file", "before", "after"))
        if same and row["outcome"] not in KILLED:
            return row | {
                "outcome": "equivalent",
                "argument": entry["argument"],
            }
    return row


def summary(rows: list[dict]) -> dict[str, dict[str, int]]:
    "Of each package how many mutants had which outcome."
    found: dict[str, Counter] = defaultdict(Counter)
    for row in rows:
        name = "kernel" if row["file"] == KERNEL else row["file"].split("/")[1]
        how = row["outcome"]
        if how != "equivalent":
            how = "killed" if how in KILLED else "survived"
        found[name].update(("mutants", how))
    return {name: dict(counts) for name, counts in found.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.mutants",
        description=tools.mutants.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--count", type=int, help=f"of a module ({COUNT}; "
                        f"of the kernel {KERNELS})")  # fmt: skip
    parser.add_argument("--tests", nargs="+", metavar="TEST")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    known = modules()
    files = [
        next((m for m in known if m.endswith(name)), name)
        for name in given.files
    ] or known
    if wrong := set(files) - set(known):
        parser.error(f"{', '.join(sorted(wrong))}: no such module")
    if given.record and given.files:
        parser.error("--record is for every module: leave out FILE")
    if given.into:  # a process for one module
        with given.into.with_suffix(".part").open("w") as part:
            for row in outcomes(files[0], given):
                print(
                    json.dumps(row, ensure_ascii=False), file=part, flush=True
                )
        given.into.with_suffix(".part").rename(given.into)
        return 0
    from normalnorm.experiments.results import provenance
    from tools.export import write_checks

    write_checks()
    FOLDER.mkdir(parents=True, exist_ok=True)
    equal = load(RECORD / "equivalents.json")
    rows, missing = [], []
    words = sys.argv[1:] if arguments is None else arguments
    for file in files:
        into = place(file, given)
        if not into.exists():
            options = [w for w in words if w not in (*given.files, "--record")]
            subprocess.run([sys.executable, "-m", "tools.mutants", file,
                            "--into", into, *options], cwd=ROOT)  # fmt: skip
        if not into.exists():
            missing.append(file)
            continue
        found = [
            argued(json.loads(line), equal)
            for line in into.read_text(encoding="utf-8").splitlines()
        ]
        rows += found
        killed = sum(row["outcome"] in KILLED for row in found)
        print(f"{file}: {killed} of {len(found)} killed", flush=True)
        for row in found:
            if row["outcome"] not in (*KILLED, "equivalent"):
                name = row.get("mutant", row.get("line"))
                print(f"  {row['outcome']}: {name}")
                print(f"  - {row['before']}\n  + {row['after']}")
    print(json.dumps(summary(rows), indent=1))
    if missing:
        print("the tests fail without a mutant:", *missing)
    if given.record:
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": provenance()["commit"],
            "seed": given.seed,
            "not run": missing,
            "packages": summary(rows),
        }
        save(RECORD / "summary.json", about)
        (RECORD / "mutants.jsonl").write_text(
            "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows),
            encoding="utf-8",
        )
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
