"""Headless Chromium without a network: opens pages one after another and says
what a reader would find broken.

One wrapper page loads each page in a frame and prints its findings to the
console, from where they are read.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

from tools.files import ran

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--allow-file-access-from-files",
    "--hide-scrollbars",
)
WIDTH = 380
# of its natural size is the least at which the text of a figure can be read
LEGIBLE = 0.6
# of text and formulas: level AA of the Web Content Accessibility Guidelines;
# large text and the ink of figures need 3
CONTRAST = 4.5
MESSAGE = re.compile(
    r'CONSOLE[:(]\d+\)?\] "(.*?)", source: (\S*) \(\d+\)', re.S
)
# Chromium does not print a message's level: what the theme and the toggle
# buttons report of their doings is left out by its first words.
IGNORED = re.compile(
    r"Slow network is detected|\[PST\]: |\[togglebutton\]: "
    r"|Got invalid theme mode: \. "
)

SCRIPT = Path(__file__).with_suffix(".js")
WRAPPER = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">
<iframe id="frame" height="900" style="border:0"></iframe>
<script>const settings = %s, asked = %s;</script>
<script>%s</script></body>
"""


def chromium() -> str | None:
    "The browser of this machine, if it has one."
    return next(filter(None, map(shutil.which, NAMES)), None)


def version() -> str:
    "What this machine's browser says that it is."
    return ran([chromium(), "--version"]).stdout


def command(browser: str, folder: str, *arguments: str) -> list[str]:
    """The command line: an empty profile in `folder`, and no network; in a
    namespace of its own, where we may make one.
    """
    alone = ["unshare", "-n"]
    refused = not shutil.which("unshare") or ran([*alone, "true"]).returncode
    return [
        *([] if refused else alone),
        browser,
        *FLAGS,
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder}/profile",
        *arguments,
    ]


def console(log: str) -> list[tuple[str, str]]:
    """(message, source) of everything that pages wrote to the console, in
    order; Chromium's own pages are left out.
    """
    return [
        (text, source)
        for text, source in MESSAGE.findall(log)
        if not source.startswith("chrome://") and not IGNORED.match(text)
    ]


def findings(log: str) -> dict[str, dict]:
    """Page address → equations, figures, problems.

    A message on the console is a problem of the page that was open then.
    """
    found, page = {}, None
    for text, source in console(log):
        kind, _, rest = text.partition(" ")
        if kind == "@page":
            page = rest
            found[page] = {"equations": 0, "figures": 0, "problems": []}
        elif kind == "@found":
            report = json.loads(rest)
            found[page]["problems"] += report.pop("problems", [])
            found[page] |= report
        elif page and kind != "@done":
            found[page]["problems"].append(
                f"console: {text} ({source.rsplit('/', 1)[-1]})"
            )
    return found


def read_until_done(process: subprocess.Popen, seconds: float) -> str:
    """What Chromium logs until the wrapper says that it is done; then, or when
    the time is over, the browser is ended.
    """
    end = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    end.start()
    lines = []
    for line in process.stderr:
        lines.append(line)
        # the second: a mistake in our own script
        if '"@done"' in line or "Uncaught" in line and "wrapper.html" in line:
            break
    end.cancel()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return "".join(lines)


def expression(script: str | Path) -> str:
    """The function that a file of JavaScript is, as a part of a line.

    Such a file is one statement, so that `node --check` reads it.
    """
    if isinstance(script, Path):
        script = script.read_text(encoding="utf-8")
    return script.strip().removesuffix(";")


def visit(
    addresses: list[str],
    what: str,
    script: str | Path = "() => {}",
    widths: tuple[int, ...] = (WIDTH,),
    seconds: float = 300,
) -> dict[str, dict]:
    """Opens each address and does `what` there: `look` at it, or `ask` it by
    `script`.

    Address → what came out.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        wrapper = Path(folder, "wrapper.html")
        settings = {
            "pages": addresses,
            "widths": widths,
            "contrast": CONTRAST,
            "legible": LEGIBLE,
            "what": what,
        }
        wrapper.write_text(
            WRAPPER
            % (
                json.dumps(settings),
                expression(script),
                SCRIPT.read_text(encoding="utf-8"),
            ),
            encoding="utf-8",
        )
        line = command(
            chromium(),
            folder,
            "--enable-logging=stderr",
            f"--window-size={max(*widths, 800)},900",
            wrapper.as_uri(),
        )
        process = subprocess.Popen(
            line,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        log = read_until_done(process, seconds)
    found = findings(log)
    if '"@done"' not in log:
        raise TimeoutError(
            f"Chromium did not open all pages in {seconds:.0f} "
            f"s; the last was {next(reversed(found), None)}\n"
            f"{log[-2000:]}"
        )
    return found


def inspect(
    pages: list[Path],
    widths: tuple[int, ...] = (WIDTH,),
    script: str | Path = "() => {}",
    seconds: float = 300,
) -> dict[Path, dict]:
    """Opens each page once and looks at it as wide as each of `widths`;
    contrast is measured at the last, in both modes and on paper.

    A page → the number of its equations and figures, its problems in words, and
    what `script` returns at the last width (see `ask`).
    """
    addresses = {p.resolve().as_uri(): p for p in pages}
    return {
        addresses[a]: report
        for a, report in visit(
            list(addresses), "look", script, widths, seconds
        ).items()
    }


def ask(
    addresses: list[str],
    script: str | Path,
    width: int = 1280,
    seconds: float = 300,
) -> dict[str, object]:
    """Calls `script`, a function in JavaScript or a file that is one, on each
    page and returns what it returns, by address.

    It is given the page's window and document; `wait(ms)` is a pause and
    `name(e)` what to call an element. What the page writes to the console is an
    error here.
    """
    found = visit(addresses, "ask", script, (width,), seconds)
    problems = {
        a: report["problems"]
        for a, report in found.items()
        if report["problems"]
    }
    if problems:
        raise RuntimeError(f"a page does not work: {problems}")
    return {a: report["answer"] for a, report in found.items()}
