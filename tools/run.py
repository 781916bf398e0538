"""Executes chapters, and remembers what each one read.

An executed copy lies in _build/executed/. It is fresh while the chapter's code, the pins, the Python version, and every
file of the repository that the chapter imported or opened in that run are what they were. A change in prose runs nothing.
"""
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path

from tools.chapters import Chapter, chapters

ANSI = re.compile(r"\x1b\[[0-9;]*m")
BUDGET = 60.0           # seconds that a chapter may take
SKIPPED = (".git", ".ruff_cache", "_build", "_docs", "__pycache__", ".pytest_cache", ".hypothesis", "build", "dist")

# Runs inside the kernel before the first cell. An audit hook sees every open(); modules are read off at the end.
RECORD = """exec('''
import sys
sys._opened_files = set()
def _hook(event, arguments, add=sys._opened_files.add):
    if event == "open" and isinstance(arguments[0], str):
        add(arguments[0])
sys.addaudithook(_hook)
''', {})"""
REPORT = """exec('''
import json, os, sys
files = {getattr(m, "__file__", None) for m in list(sys.modules.values())} | sys._opened_files
with open(os.environ["BOOK_RECORD"], "w") as out:
    json.dump(sorted({os.path.realpath(f) for f in files if f}), out)
''', {})"""


def skipped(folder: str) -> bool:
    "Whether a folder of this name holds nothing of the repository's own."
    return folder in SKIPPED or folder.startswith(".venv") or folder.endswith(".egg-info")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def snapshot(root: Path) -> dict[str, str]:
    "Hashes of the repository's files, by relative path."
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not skipped(f)]
        for name in names:
            path = Path(folder, name)
            if path.suffix != ".pyc" and path.is_file():
                found[path.relative_to(root).as_posix()] = digest(path.read_bytes())
    return found


@lru_cache(maxsize=None)
def environment(root: Path) -> str:
    "What every chapter depends on: pins, requirements, Python, the runner itself."
    texts = [(root / name).read_text() for name in ("constraints.txt", "settings.ini")] + [RECORD, REPORT, sys.version]
    return digest("\0".join(texts).encode())


class Run:
    "The executed copy of one chapter and the record of what it depended on."

    def __init__(self, chapter: Chapter):
        self.chapter = chapter
        folder = chapter.root / "_build" / "executed"
        self.notebook, self.record_file = folder / f"{chapter.name}.ipynb", folder / f"{chapter.name}.json"

    @property
    def key(self) -> str:
        return digest("\0".join([environment(self.chapter.root), *self.chapter.code_cells()]).encode())

    def record(self) -> dict:
        "What is known of the last run: key, dependencies, seconds; empty where there is none."
        try:
            return json.loads(self.record_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def stale(self) -> str:
        "Why the chapter must be run again, or an empty string."
        record = self.record()
        if not record or not self.notebook.exists():
            return "never run"
        if record["key"] != self.key:
            return "code or environment changed"
        for name, known in record["dependencies"].items():
            path = self.chapter.root / name
            if not path.is_file() or digest(path.read_bytes()) != known:
                return f"{name} changed"
        return ""


class ChapterFailed(Exception):
    "A cell of a chapter raised; the message names both and ends with the traceback."


def execute(chapter: Chapter, threads: int = 1) -> Run:
    "Run a chapter in a fresh kernel; write its executed copy and record. Raises `ChapterFailed`."
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    run = Run(chapter)
    key, before = run.key, snapshot(chapter.root)       # hashed before the run: a file edited meanwhile makes it stale
    notebook = nbformat.read(chapter.path, as_version=4)
    count = len(notebook.cells)
    skipped = [c for c in notebook.cells if c.cell_type == "code" and "#| eval: false" in c.source]
    for cell in skipped:
        cell.metadata["tags"] = ["skip-execution"]
    notebook.cells = [nbformat.v4.new_code_cell(RECORD), *notebook.cells, nbformat.v4.new_code_cell(REPORT)]
    run.notebook.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "record.json"
        client = NotebookClient(notebook, timeout=600, kernel_name="python3", skip_cells_with_tag="skip-execution", allow_errors=False)
        client.create_kernel_manager()
        client.km.transport, client.km.ip = "ipc", f"{folder}/k"    # no open ports, and no notice about them in the outputs
        env = {**os.environ, "BOOK_RECORD": str(report), "OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": "0",
               "PYTHONWARNINGS": "ignore:IProgress not found",          # tqdm, imported by a library: of no use on a page
               "NORMALNORM_QUIET": "1",                                 # the line that the kernel is being compiled: the same
               "PYTHONPATH": os.pathsep.join(filter(None, [str(chapter.root), os.environ.get("PYTHONPATH")]))}
        env.pop("MPLBACKEND", None)                     # figures vanish with it
        start = time.perf_counter()
        try:
            client.execute(cwd=str(chapter.root / "nbs"), env=env)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            number = next((i for i, c in enumerate(notebook.cells) if c.cell_type == "code" and any(o.output_type == "error" for o in c.outputs)), 0)
            raise ChapterFailed(f"chapter {chapter.name}, cell {number} of {count} failed:\n{ANSI.sub('', str(error))}") from None
        seconds = time.perf_counter() - start
        touched = json.loads(report.read_text())
    notebook.cells = notebook.cells[1:-1]
    root = f"{chapter.root.resolve()}{os.sep}"
    names = {os.path.relpath(f, root).replace(os.sep, "/") for f in touched if f.startswith(root)} - {f"nbs/{chapter.name}.ipynb"}
    record = {"key": key, "seconds": round(seconds, 2), "dependencies": {n: before[n] for n in sorted(names & set(before))}}
    nbformat.write(notebook, run.notebook)
    run.record_file.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return run


def ensure(chapter: Chapter) -> Run:
    "The chapter's run, executed now if it is stale."
    run = Run(chapter)
    return execute(chapter) if run.stale() else run


def run_all(todo: list[Chapter], workers: int = 2) -> list[str]:
    "Run chapters side by side, saying what happens; returns the failures."
    failures, done = [], 0
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(execute, c): c for c in todo}
        for future in as_completed(futures):
            done += 1
            name = futures[future].name
            try:
                print(f"  [{done}/{len(todo)}] {name} ({future.result().record()['seconds']:.1f} s)", flush=True)
            except ChapterFailed as error:
                failures.append(str(error))
                print(f"  [{done}/{len(todo)}] {name} FAILED", flush=True)
    return failures


def timetable() -> str:
    "A table of the chapters with the time that each took when it was last run; those over their budget once more by name."
    rows = [(c.name, Run(c).record().get("seconds")) for c in chapters()]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}s} {seconds:7.1f} s" for name, seconds in rows if seconds is not None]
    late = [f"{name} ({seconds:.0f} s)" for name, seconds in rows if (seconds or 0) > BUDGET]
    lines.append(f"  {'all':{width}s} {sum(s or 0 for _, s in rows):7.1f} s")
    if late:
        lines.append(f"over the budget of {BUDGET:.0f} s a chapter: {', '.join(late)}")
    return "\n".join(lines)
