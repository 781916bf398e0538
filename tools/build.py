"""`python -m tools.build`: compare notebooks and package, run stale chapters,
render the book, say where it is.

A chapter that fails, and a page that Sphinx warns of, do not take the book
away: everything is rendered, the last lines say what is wrong, and the command
ends with status 1.
"""

import os
import re
import sys
import time
from pathlib import Path

from tools import export, run
from tools.chapters import ROOT, chapters, pages, renamed
from tools.files import python

HTML = ROOT / "_build" / "html" / "index.html"


def unchanged(stamp: Path, key: str) -> bool:
    return stamp.exists() and stamp.read_text() == key


def state(*parts: str) -> str:
    "One hash of the files below these paths of the repository."
    files = run.snapshot(ROOT)
    return run.digest(
        "\0".join(
            f"{n} {h}" for n, h in sorted(files.items()) if n.startswith(parts)
        ).encode()
    )


def generated_from() -> str:
    """One hash of what the generated files are made from: of a chapter its
    code, its headings and its first cell, which is its module's docstring; of
    the landing page, which is README.md, all.
    """
    texts = [
        state(
            *("nbs/index", "normalnorm", "results", "tools"),
            *("settings.ini", "_toc.yml", "_quarto.yml", "README."),
        )
    ]
    for c in chapters():
        texts += [
            c.name,
            run.meaning(c.path.name, c.path.read_bytes()),
            *(cell["source"] for cell in c.cells()[:1]),
        ]
    return run.digest("\0".join(texts).encode())


def check_sync() -> bool:
    """Notebooks and generated files agree.

    Remembered, so that a change in prose exports nothing.
    """
    stamp = ROOT / "_build" / "synced"
    if unchanged(stamp, generated_from()):
        return export.agree(export.noise())
    export.write_checks()
    print(
        "comparing the notebooks with what is generated from them", flush=True
    )
    if not export.agree(export.differences() + export.noise()):
        return False
    stamp.parent.mkdir(exist_ok=True)
    stamp.write_text(generated_from())
    return True


REDIRECT = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{new}</title>
<link rel="canonical" href="{new}.html"><meta name="robots" content="noindex">
<script>location.replace("{new}.html" + location.hash)</script>
<noscript><meta http-equiv="refresh" content="0; url={new}.html"></noscript>
</head><body><p>This page is now <a href="{new}.html">{new}</a>.</p></body>
</html>
"""


def write_redirects(root: Path = ROOT) -> None:
    """Pages under old names, each of which leads to where its chapter is now:
    links of readers do not break.
    """
    folder = root / "_build" / "html" / "nbs"
    if folder.is_dir():
        for old, new in renamed(root).items():
            page = folder / f"{old}.html"
            page.write_text(REDIRECT.format(new=new), encoding="utf-8")


def forget_renamed(root: Path = ROOT) -> None:
    "The page of a chapter that is renamed or deleted would still be found."
    for page in (root / "_build" / "html" / "nbs").glob("*.html"):
        if f"nbs/{page.stem}" not in pages(root):
            page.unlink()


LEVEL = re.compile(r"\b(WARNING|ERROR|CRITICAL|SEVERE)\b")


# Without the parsers that jsonschema makes for seconds when it is imported, of
# formats that nobody checks.
JUPYTER_BOOK = """
import sys
sys.modules["rfc3987_syntax"] = None
from jupyter_book.cli.main import main
main()
"""


def sphinx(root: Path = ROOT) -> tuple[bool, bool, str]:
    """Render with Jupyter Book.

    Whether it came to its end, whether it warned of nothing, and what it said.
    """
    finished = root / "_build" / "finished"
    finished.unlink(missing_ok=True)
    command = [
        "-c",
        JUPYTER_BOOK,
        "build",
        ".",
        "--warningiserror",
        "--nitpick",
        "--keep-going",
        "--quiet",
    ]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(root), str(ROOT)])),
    }
    done = python(*command, cwd=root, env=env)
    ended, said = finished.exists(), run.ANSI.sub("", done.stdout + done.stderr)
    if done.returncode:
        # Sphinx says a warning once and keeps the page: it must read it again
        environment = root / "_build" / ".doctrees" / "environment.pickle"
        environment.unlink(missing_ok=True)
    if ended and (
        warnings := [line for line in said.splitlines() if LEVEL.search(line)]
    ):
        # and not that jupyter-book ended with an error
        said = "\n".join(warnings)
    return ended, not done.returncode, said[-12000:]


def render() -> bool:
    """Render the book, or find that nothing changed since it was last rendered.

    Prints the warnings and returns False where there are any; the pages are
    there then, too.
    """
    forget_renamed()
    executed = "".join(f"{c.name}{run.Run(c).record()}" for c in chapters())
    stamp = ROOT / "_build" / "rendered"
    key = run.digest(
        (
            state(
                "nbs",
                "_config.yml",
                "settings.ini",
                "_toc.yml",
                "_static",
                "references.bib",
                "results/records.json",
                "tools",
                "normalnorm",
            )
            + executed
        ).encode()
    )
    if HTML.exists() and unchanged(stamp, key):
        write_redirects()
        print("rendering: nothing changed", flush=True)
        return True
    print("rendering", flush=True)
    stamp.unlink(missing_ok=True)
    ended, clean, said = sphinx()
    write_redirects()
    if not clean:
        print(said)
        print(
            "Sphinx warned; the pages are there."
            if ended
            else "Sphinx did not come to its end: the pages are missing, or "
            "those of an earlier build."
        )
        return False
    stamp.write_text(key)
    return True


def closing(
    failures: list[run.ChapterFailed],
    clean: bool,
    seconds: float,
    page: Path = HTML,
) -> str:
    "The last lines: what failed, and where the book is."
    lines = []
    if failures:
        lines += [
            f"{len(failures)} "
            f"{'chapter' if len(failures) == 1 else 'chapters'} failed; "
            "each page shows its error in place:",
            *(f"  {f.summary()}" for f in failures),
        ]
    if not clean:
        lines.append("Rendering found something wrong: the messages are above.")
    return "\n".join(
        [
            *lines,
            f"The book: {page}" if page.exists() else "There is no book.",
            f"({seconds:.0f} s)",
        ]
    )


def main() -> int:
    start = time.perf_counter()
    if not check_sync():
        return 1
    reasons = {c: run.Run(c).stale() for c in chapters()}
    todo = [c for c, reason in reasons.items() if reason]
    print(
        f"running {len(todo)} of {len(reasons)} chapters"
        + (" (the others are unchanged)" if len(todo) < len(reasons) else ""),
        flush=True,
    )
    failures = run.run_all(todo)
    clean = render()
    print(
        "\nchapters and the time that each took when it was last run\n"
        f"{run.timetable()}\n"
    )
    for failure in failures:
        print(f"{failure}\n")
    print(closing(failures, clean, time.perf_counter() - start))
    return 0 if clean and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
