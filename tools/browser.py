"""Headless Chromium without a network: opens pages one after another and says what a reader would find broken.

One wrapper page loads each page in a frame and prints its findings to the console, from where they are read.
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

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--disable-dev-shm-usage", "--allow-file-access-from-files", "--hide-scrollbars")
WIDTH = 380
CONTRAST = 2.0      # below this ratio a text or a line is as good as not there; WCAG asks for 4.5, which is a matter of design
MESSAGE = re.compile(r'CONSOLE[:(]\d+\)?\] "(.*?)", source: (\S*) \(\d+\)', re.S)
# Chromium does not print a message's level: what the theme and the toggle buttons report of their doings is left out by its first words.
IGNORED = re.compile(r"Slow network is detected|\[PST\]: |\[togglebutton\]: |Got invalid theme mode: \. ")

WRAPPER = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0"><iframe id="frame" width="%(width)d" height="900" style="border:0"></iframe>
<script>
const pages = %(pages)s, frame = document.getElementById("frame"), wait = ms => new Promise(done => setTimeout(done, ms));
const luminance = c => { const [r, g, b] = c.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true}), known = new Map();

function rgba(colour) {     // whatever notation the style uses, as red, green, blue, alpha
  if (!known.has(colour)) {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const d = canvas.getImageData(0, 0, 1, 1).data; known.set(colour, [d[0], d[1], d[2], d[3] / 255]);
  }
  return known.get(colour);
}
function background(e) {
  if (!e) return [255, 255, 255];
  const own = rgba(getComputedStyle(e).backgroundColor);
  return own[3] == 1 ? own.slice(0, 3) : over(own, background(e.parentElement));
}
const shown = e => { const r = e.getBoundingClientRect(); return r.width > 0 && r.height > 0 && e.checkVisibility({visibilityProperty: true}); };
const name = e => e.tagName.toLowerCase() + (e.id ? "#" + e.id : "") + [...e.classList].map(c => "." + c).join("") + " " + JSON.stringify((e.textContent || "").trim().slice(0, 50));

function equations(d) {
  const all = [...d.querySelectorAll(".math")], bad = [];
  for (const e of all) if (!e.querySelector("mjx-container")) bad.push("not typeset: " + name(e));
  // MathJax shows an unknown command in red and calls it no error
  for (const e of d.querySelectorAll("mjx-merror, mjx-container [mathcolor=red], mjx-container [style*='color: red']"))
    bad.push("TeX error: " + name(e.closest(".math") || e) + " " + (e.getAttribute("data-mjx-error") || ""));
  return [all.length, bad];
}
function figures(d) {
  const all = [...d.querySelectorAll("svg.figure-svg, img")], bad = [];
  for (const e of all) {
    const r = e.getBoundingClientRect(), folded = e.closest("details:not([open]), .toggle-hidden");
    const there = e.tagName == "IMG" ? e.complete && e.naturalWidth : folded || r.width && r.height;
    if (!there) bad.push("figure missing: " + name(e) + " " + (e.getAttribute("src") || ""));
  }
  return [all.length, bad];
}
function wide(d) {          // what sticks out, unless a box around it scrolls or cuts it
  if (d.documentElement.scrollWidth <= %(width)d) return [];
  const cut = e => { for (let a = e.parentElement; a && a != d.body; a = a.parentElement) if (getComputedStyle(a).overflowX != "visible") return true; };
  const out = [...d.body.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > %(width)d + 1 && !cut(e));
  return ["scrolls sideways: " + d.documentElement.scrollWidth + " px: " + out.slice(-3).map(name).join("; ")];
}
function invisible(d, mode) {
  d.documentElement.dataset.mode = d.documentElement.dataset.theme = mode;
  const bad = [], tell = (e, what, colour, behind) => {
    const ratio = contrast(over(rgba(colour), behind), behind);
    if (ratio < %(contrast)s) bad.push(mode + " mode: " + what + " " + colour + " on rgb(" + behind.map(Math.round) + "), contrast " + ratio.toFixed(2) + ": " + name(e));
  };
  const walker = d.createTreeWalker(d.querySelector("article") || d.body, NodeFilter.SHOW_TEXT), seen = new Set();
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || seen.has(e) || e.closest("svg, script, style, mjx-assistive-mml, .headerlink") || !shown(e)) continue;
    seen.add(e);
    tell(e, "text", getComputedStyle(e).color, background(e));
  }
  for (const e of d.querySelectorAll("mjx-container")) if (shown(e)) tell(e.closest(".math") || e, "formula", getComputedStyle(e).color, background(e));
  for (const svg of d.querySelectorAll("svg.figure-svg")) {
    const behind = background(svg);
    for (const e of svg.querySelectorAll("[style*='--pst-color-text-base']")) {
      const s = getComputedStyle(e), ink = s.fill != "none" && e.getAttribute("style").includes("fill: var") ? s.fill : s.stroke;
      if (ink != "none") { tell(svg, "figure ink", ink, behind); break; }
    }
  }
  return bad;
}
async function look(page) {
  console.log("@page " + page);
  await new Promise(done => { frame.onload = done; frame.src = page; });
  const w = frame.contentWindow, d = frame.contentDocument;
  if (w.MathJax && w.MathJax.startup) await w.MathJax.startup.promise;
  await d.fonts.ready;
  d.head.insertAdjacentHTML("beforeend", "<style>* { transition: none !important; animation: none !important }</style>");
  await wait(50);
  const [maths, badMaths] = equations(d), [drawn, badFigures] = figures(d);
  const requested = w.performance.getEntriesByType("resource").map(r => r.name).filter(n => /^(https?|wss?):/.test(n)).map(n => "asks the network: " + n);
  const problems = [...badMaths, ...badFigures, ...wide(d), ...invisible(d, "light"), ...invisible(d, "dark"), ...requested];
  console.log("@found " + JSON.stringify({equations: maths, figures: drawn, problems}));
}
(async () => {
  for (const page of pages)
    await look(page).catch(e => console.log("@found " + JSON.stringify({equations: 0, figures: 0, problems: ["not inspected: " + e]})));
  console.log("@done");
})();
</script></body>
"""


def chromium() -> str | None:
    "The browser of this machine, if it has one."
    return next(filter(None, map(shutil.which, NAMES)), None)


def command(browser: str, folder: str, *arguments: str) -> list[str]:
    "The command line: an empty profile in `folder`, and no network; in a namespace of its own, where we may make one."
    alone = ["unshare", "-n"]
    allowed = shutil.which("unshare") and subprocess.run([*alone, "true"], capture_output=True).returncode == 0
    return [*(alone if allowed else []), browser, *FLAGS, "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}/profile", *arguments]


def console(log: str) -> list[tuple[str, str]]:
    "(message, source) of everything that pages wrote to the console, in order; Chromium's own pages are left out."
    return [(text, source) for text, source in MESSAGE.findall(log) if not source.startswith("chrome://") and not IGNORED.match(text)]


def findings(log: str) -> dict[str, dict]:
    "Page address → equations, figures, problems. A message on the console is a problem of the page that was open then."
    found, page = {}, None
    for text, source in console(log):
        kind, _, rest = text.partition(" ")
        if kind == "@page":
            page = rest
            found[page] = {"equations": 0, "figures": 0, "problems": []}
        elif kind == "@found":
            report = json.loads(rest)
            found[page] |= {"equations": report["equations"], "figures": report["figures"]}
            found[page]["problems"] += report["problems"]
        elif page and kind != "@done":
            found[page]["problems"].append(f"console: {text} ({source.rsplit('/', 1)[-1]})")
    return found


def read_until_done(process: subprocess.Popen, seconds: float) -> str:
    "What Chromium logs until the wrapper says that it is done; then, or when the time is over, the browser is ended."
    end = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    end.start()
    lines = []
    for line in process.stderr:
        lines.append(line)
        if '"@done"' in line:
            break
    end.cancel()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return "".join(lines)


def inspect(pages: list[Path], seconds: float = 120) -> dict[Path, dict]:
    "Opens each page, 380 px wide. A page → the number of its equations and figures, and its problems in words."
    addresses = {p.resolve().as_uri(): p for p in pages}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        wrapper = Path(folder, "wrapper.html")
        wrapper.write_text(WRAPPER % {"pages": json.dumps(list(addresses)), "width": WIDTH, "contrast": CONTRAST}, encoding="utf-8")
        line = command(chromium(), folder, "--enable-logging=stderr", wrapper.as_uri())
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
        log = read_until_done(process, seconds)
    found = {addresses[a]: report for a, report in findings(log).items()}
    if '"@done"' not in log:
        raise TimeoutError(f"Chromium did not open all pages in {seconds:.0f} s; the last was {next(reversed(found), None)}\n{log[-2000:]}")
    return found
