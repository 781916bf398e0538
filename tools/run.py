"""Executes chapters, and remembers what each one read.

An executed copy lies in _build/executed/. It is fresh while the chapter's code,
the pins, the Python version, and every file of the repository that the chapter
imported or opened in that run are what they were: Python by its syntax, unless
the chapter shows its text, and other chapters by their code and headings. So a
change in prose or in a docstring runs nothing.

A chapter that fails leaves its executed copy too, up to the cell that failed
and with the error there, and a record that says so: the book shows that page as
far as it came, and the chapter is run again the next time.
"""

import asyncio
import hashlib
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from tools import kernels, records
from tools.chapters import ROOT, Chapter, chapters
from tools.files import load, replace, save

HEADING = re.compile(r"^#+ .*$", re.M)
# a docstring that is asked for, not one that has an example
SHOWS = re.compile(r"\.__doc__|\bgetdoc\(|\bhelp\(|\bdoctest\.")
ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])"
)
BUDGET = 60.0  # seconds that a chapter may take
LIMIT = 600.0  # seconds after which a chapter is ended
FEW = 3  # chapters for which it does not pay to import everything once, ahead
# what the long chapters took on some machine: an order for the first run, no
# more
SECONDS = Path(__file__).with_name("seconds.json")
SKIPPED = (
    ".git",
    ".mypy_cache",
    ".ruff_cache",
    "_build",
    "_docs",
    "__pycache__",
    ".pytest_cache",
    ".hypothesis",
    "build",
    "dist",
)

# These choose the instructions that torch and our kernel use: another choice is
# another run. What the runner itself sets for a kernel, or the tests for
# themselves, is none.
SWITCHES = re.compile(
    r"ATEN_CPU_CAPABILITY|ONEDNN_MAX_CPU_ISA|MKL_ENABLE_INSTRUCTIONS|MKL_CBWR|"
    r"CXX|NORMALNORM_(?!CACHE|QUIET|TEST|WAIT)\w+"
)

# Runs inside the kernel before the first cell. An audit hook sees every open().
# Nothing is shown by those of imports, of the lines of a stack and of
# torch.compile, nor by those that only hash the text: that a result was made by
# it, that a run is up to date. Modules are read off at the end.
RECORD = """exec('''
import re, sys
sys._opened_files, sys._read_files = set(), set()
def _hook(event, arguments, opened=sys._opened_files, read=sys._read_files,
          shows_nothing=re.compile(
              r"importlib|traceback[.]py|_dynamo|"
              r"experiments.results[.]py:source_hash |"
              r"tools.run[.]py:stale |tools.ledger[.]py:exported ").search):
    if event == "open" and isinstance(arguments[0], str):
        opened.add(arguments[0])
        frame, by = sys._getframe(1), ""
        for _ in range(8):
            code, frame = frame.f_code, frame.f_back
            by += code.co_filename + ":" + code.co_name + " "
            if not frame:
                break
        if not shows_nothing(by):
            read.add(arguments[0])
sys.addaudithook(_hook)
''', {})"""
REPORT = """exec('''
import json, os, sys
try:
    import resource
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, \
resource.RUSAGE_CHILDREN)]
    cpu = sum(u.ru_utime + u.ru_stime for u in used)
except ImportError:         # Windows
    cpu = sum(os.times()[:4])
files = {getattr(m, "__file__", None) for m in list(sys.modules.values())} | \
sys._opened_files
shown = getattr(sys.modules.get("normalnorm.claims"), "_SHOWN", {})
claims = {name: {"outcome": o.outcome, "mutant": o.mutant, "seconds": \
round(o.seconds, 4)} for name, o in shown.items()}
with open(os.environ["BOOK_RECORD"], "w") as out:
    json.dump({"claims": claims, "files": sorted({os.path.realpath(f) for f in \
files if f}), "read": sorted(map(os.path.realpath, sys._read_files)), \
"cpu": cpu}, out)
''', {})"""


def skipped(folder: str) -> bool:
    "Whether a folder of this name holds nothing of the repository's own."
    return (
        folder in SKIPPED
        or folder.startswith(".venv")
        or folder.endswith(".egg-info")
    )


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
                found[path.relative_to(root).as_posix()] = digest(
                    path.read_bytes()
                )
    return found


@lru_cache(maxsize=None)
def meaning(name: str, data: bytes) -> str:
    """A hash of what counts of a file: Python's syntax, a chapter's code and
    headings; "" for other files.
    """
    try:
        if name.endswith(".py"):
            return records.syntax(data)
        if name.endswith(".ipynb"):
            return records.digest(
                [
                    HEADING.findall("".join(cell["source"]))
                    if cell["cell_type"] == "markdown"
                    else "".join(cell["source"])
                    for cell in json.loads(data)["cells"]
                ]
            )
    except (KeyError, ValueError, SyntaxError):
        pass
    return ""


@lru_cache(maxsize=None)
def environment(root: Path) -> str:
    """What every chapter depends on: pins, requirements, Python, the versions
    that are there, what chooses the processor's instructions, the runner
    itself.
    """
    texts = [
        *((root / f).read_text() for f in ("constraints.txt", "settings.ini")),
        *(RECORD, REPORT, sys.version),
        *(
            f"{name} {version(name)}"
            for name in ("torch", "numpy", "scipy", "matplotlib")
        ),
        *(
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if SWITCHES.fullmatch(name)
        ),
    ]
    return digest("\0".join(texts).encode())


class Run:
    "The executed copy of one chapter and the record of what it depended on."

    def __init__(self, chapter: Chapter):
        self.chapter = chapter
        # a run held to another processor's instructions has a place of its own
        folder = (
            chapter.root
            / os.environ.get("NORMALNORM_TEST_BUILD", "_build")
            / "executed"
        )
        self.notebook, self.record_file = (
            folder / f"{chapter.name}.ipynb",
            folder / f"{chapter.name}.json",
        )

    @property
    def key(self) -> str:
        return digest(
            "\0".join(
                [environment(self.chapter.root), *self.chapter.code_cells()]
            ).encode()
        )

    def record(self) -> dict:
        """What is known of the last run: key, dependencies, seconds, cpu; or
        `failed`: cell, of, error; empty where there is none.
        """
        try:
            return load(self.record_file)
        except (FileNotFoundError, ValueError):
            return {}

    def stale(self) -> str:
        "Why the chapter must be run again, or an empty string."
        record = self.record()
        if "failed" in record:
            return "failed when it was last run"
        if not record or not self.notebook.exists():
            return "never run"
        if record["key"] != self.key:
            return "code or environment changed"
        for name, known in record["dependencies"].items():
            path = self.chapter.root / name
            if not path.is_file():
                return f"{name} changed"
            data, meant = path.read_bytes(), record["meanings"].get(name)
            if digest(data) != known and meaning(name, data) != meant:
                return f"{name} changed"
        return ""

    def meanings(self, before: dict[str, str], names: set[str]) -> dict:
        "Of the files that are as they were before the run."
        found = {}
        for name in sorted(names & set(before)):
            path = self.chapter.root / name
            if path.suffix in (".py", ".ipynb") and path.is_file():
                data = path.read_bytes()
                if digest(data) == before[name] and (
                    hashed := meaning(name, data)
                ):
                    found[name] = hashed
        return found


class ChapterFailed(Exception):
    """A chapter did not come to its end.

    The message names chapter and cell and ends with the traceback; `line` is
    the error in one line.
    """

    def __init__(
        self, chapter: str, cell: int, count: int, line: str, details: str
    ):
        where = f", cell {cell} of {count}" if cell else ""
        super().__init__(f"chapter {chapter}{where} failed:\n{details}")
        self.chapter, self.cell, self.count, self.line = (
            chapter,
            cell,
            count,
            line,
        )

    def summary(self) -> str:
        "One line: chapter, cell, error."
        return (
            f"{self.chapter}{f', cell {self.cell}' if self.cell else ''}: "
            f"{self.line}"
        )


PLACES = re.compile(
    r"(?<![\w.:/~…])(?:/(?:[\w.+@~-]+/)+"
    r"|[A-Za-z]:(?:\\[\w.+@~ -]+)+\\)([\w.+@~-]+)"
)


def without_machine(text: str, root: Path) -> str:
    """A text without the codes of a terminal and without the folders of this
    machine, for a page or a report.
    """
    text = ANSI.sub("", text)
    libraries = {
        sysconfig.get_paths()[k] for k in ("purelib", "platlib", "stdlib")
    }
    for folder, name in [
        (root, ""),
        (root.resolve(), ""),
        *(
            (folder, f"{Path(folder).name}/")
            for folder in sorted(libraries, key=len, reverse=True)
        ),
    ]:
        text = text.replace(f"{folder}{os.sep}", name)
    text = re.sub(r"\S*ipykernel_\d+[/\\]\d+\.py", "<cell>", text)
    return PLACES.sub(r"…/\1", text)


def kernel_environment(root: Path) -> dict[str, str]:
    """The environment variables of a chapter's kernel, but for the ones of one
    run.
    """
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        # tqdm, imported by a library: of no use on a page
        "PYTHONWARNINGS": "ignore:IProgress not found",
        # the line that the kernel is being compiled: the same
        "NORMALNORM_QUIET": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(root), os.environ.get("PYTHONPATH")])
        ),
    }
    env.pop("MPLBACKEND", None)  # figures vanish with it
    return env


def execute(
    chapter: Chapter,
    nursery: kernels.Nursery | None = None,
    limit: float = LIMIT,
) -> Run:
    """Run a chapter in a kernel of its own; write its executed copy and record.

    Raises `ChapterFailed`, whatever went wrong.

    The kernel is forked from `nursery` where one is given. Before the exception
    is raised, what the chapter had shown until then is written, with the error
    as the output of the cell that failed, and a record that is never fresh.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import (
        CellExecutionError,
        CellTimeoutError,
        DeadKernelError,
    )

    run, start, notebook, at = (
        Run(chapter),
        time.perf_counter(),
        None,
        {"cell": 0},
    )
    run.notebook.parent.mkdir(parents=True, exist_ok=True)
    try:
        # hashed before the run: a file edited meanwhile makes it stale
        key, before = run.key, snapshot(chapter.root)
        notebook = nbformat.read(chapter.path, as_version=4)
        count = len(notebook.cells)
        for cell in notebook.cells:
            if cell.cell_type == "code" and "#| eval: false" in cell.source:
                cell.metadata["tags"] = ["skip-execution"]
        notebook.cells = [
            nbformat.v4.new_code_cell(RECORD),
            *notebook.cells,
            nbformat.v4.new_code_cell(REPORT),
        ]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "record.json"
            client = NotebookClient(
                notebook,
                kernel_name="python3",
                skip_cells_with_tag="skip-execution",
                allow_errors=False,
                timeout_func=lambda cell: max(
                    1, int(start + limit - time.perf_counter())
                ),
                on_cell_execute=lambda cell, cell_index: at.update(
                    cell=cell_index
                ),
            )
            client.km = kernels.manager(nursery)
            client.owns_km = True  # so that nbclient ends the kernel
            # no open ports, and no notice about them in the outputs
            client.km.transport, client.km.ip = "ipc", f"{folder}/k"
            asyncio.run(
                client.async_execute(
                    cwd=str(chapter.root / "nbs"),
                    env={
                        **kernel_environment(chapter.root),
                        "BOOK_RECORD": str(report),
                    },
                )
            )
            known = load(report)
        notebook.cells = notebook.cells[1:-1]
        root = f"{chapter.root.resolve()}{os.sep}"
        names = {
            os.path.relpath(f, root).replace(os.sep, "/")
            for f in known["files"]
            if f.startswith(root)
        } - {f"nbs/{chapter.name}.ipynb"}
        # whose text the chapter may show
        all_shown = any(map(SHOWS.search, chapter.code_cells()))
        shown = {
            name
            for name in names
            if name.endswith(".py")
            and (all_shown or root + name in known["read"])
        }
        record = {
            "key": key,
            "seconds": round(time.perf_counter() - start, 2),
            "cpu": round(known["cpu"], 2),
            **({"claims": known["claims"]} if known["claims"] else {}),
            "dependencies": {n: before[n] for n in sorted(names & set(before))},
            "meanings": run.meanings(before, names - shown),
        }
        text = nbformat.writes(notebook)
    except Exception as error:
        # also what nobody thought of: the other chapters must go on
        number = (
            at["cell"] if notebook is not None and at["cell"] <= count else 0
        )
        clean = lambda words: without_machine(words, chapter.root)
        if isinstance(error, CellExecutionError):
            name, words, details = error.ename, error.evalue, str(error)
            if (
                arrow := re.search(
                    r"^-+> ?\d+ +(.*)$", ANSI.sub("", details), re.M
                )
                if not words
                else None
            ):
                words = f"at {arrow[1]}"  # an assertion without a message
        elif isinstance(error, CellTimeoutError):
            name, words = (
                "Timeout",
                f"the chapter was ended in this cell, {limit:.0f} s "
                "after its start",
            )
            details = words
        elif isinstance(error, DeadKernelError):
            name, words = (
                "DeadKernel",
                "the process that ran this cell ended: os._exit, a "
                "signal as of an invalid access to memory, or no "
                "memory left",
            )
            details = words
        else:
            name, words, details = (
                type(error).__name__,
                str(error),
                f"{type(error).__name__}: {error}",
            )
        line = clean(f"{name}: {words}".split("\n")[0])
        if notebook is not None and number:
            cell = notebook.cells[number]
            if not any(o.output_type == "error" for o in cell.outputs):
                cell.outputs = [
                    *cell.outputs,
                    nbformat.v4.new_output(
                        "error", ename=name, evalue=words, traceback=[line]
                    ),
                ]
            for output in (
                o
                for c in notebook.cells
                if c.cell_type == "code"
                for o in c.outputs
            ):
                if output.output_type == "error":
                    output |= {
                        "evalue": clean(output.evalue),
                        "traceback": [clean(t) for t in output.traceback],
                    }
                elif output.output_type == "stream":
                    output["text"] = clean(output["text"])
            notebook.cells = notebook.cells[1 : count + 1]
            replace(run.notebook, nbformat.writes(notebook))
        else:
            run.notebook.unlink(missing_ok=True)
        of = count if number else 0
        save(
            run.record_file,
            {
                "failed": {"cell": number, "of": of, "error": line},
                "seconds": round(time.perf_counter() - start, 2),
            },
        )
        raise ChapterFailed(
            chapter.name, number, of, line, clean(details)
        ) from None
    replace(run.notebook, text)
    save(run.record_file, record)
    return run


def ensure(chapter: Chapter) -> Run:
    "The chapter's run, executed now if it is stale."
    run = Run(chapter)
    return execute(chapter) if run.stale() else run


def expected_seconds(chapter: Chapter) -> float:
    """What the chapter took when it was last run, or on the machine of the
    committed list, or a guess.
    """
    return Run(chapter).record().get("seconds") or load(SECONDS).get(
        chapter.name, 5.0
    )


def rounds(todo: list[Chapter]) -> list[list[Chapter]]:
    """The longest chapters first, so that no worker is left alone with a long
    one; in a second round those that show what the others said.
    """
    order = sorted(todo, key=expected_seconds, reverse=True)
    collects = lambda c: any("tools.ledger" in cell for cell in c.code_cells())
    return [
        [c for c in order if not collects(c)],
        [c for c in order if collects(c)],
    ]


def run_all(todo: list[Chapter], limit: float = LIMIT) -> list[ChapterFailed]:
    """Run chapters two by two, saying what happens; returns the failures in
    the order of the book.
    """
    failures, done = {}, 0
    with (
        kernels.nursery(kernel_environment(ROOT))
        if len(todo) > FEW
        else nullcontext() as nursery,
        ThreadPoolExecutor(2) as pool,
    ):
        for listed in rounds(todo):
            futures = {
                pool.submit(execute, c, nursery=nursery, limit=limit): c
                for c in listed
            }
            for future in as_completed(futures):
                done += 1
                name = futures[future].name
                try:
                    print(
                        f"  [{done}/{len(todo)}] {name} "
                        f"({future.result().record()['seconds']:.1f} s)",
                        flush=True,
                    )
                except ChapterFailed as error:
                    failures[futures[future]] = error
                    print(f"  [{done}/{len(todo)}] {name} FAILED", flush=True)
    return [failures[c] for c in todo if c in failures]


def timetable() -> str:
    """A table of the chapters with the time that each took when it was last
    run; those over their budget once more by name.
    """
    rows = [(c.name, Run(c).record().get("seconds")) for c in chapters()]
    width = max(len(name) for name, _ in rows)
    lines = [
        f"  {name:{width}s} {seconds:7.1f} s"
        for name, seconds in rows
        if seconds is not None
    ]
    late = [
        f"{name} ({seconds:.0f} s)"
        for name, seconds in rows
        if (seconds or 0) > BUDGET
    ]
    lines.append(f"  {'all':{width}s} {sum(s or 0 for _, s in rows):7.1f} s")
    if late:
        lines.append(
            f"over the budget of {BUDGET:.0f} s a chapter: {', '.join(late)}"
        )
    return "\n".join(lines)
