"""`make test-oldest`: the library's tests with the lower bound of each core requirement; the outcome goes to results/test-oldest.json."""
import json
import platform
import re
import subprocess
import sys
import time
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ["pytest", "pytest-xdist", "hypothesis", "mpmath", "matplotlib"]


def lower_bounds() -> list[str]:
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return [re.sub(r">=([\d.]+)$", lambda m: f"=={m[1]}" + (".0" if m[1].count(".") == 1 else ""), r) for r in config["DEFAULT"]["requirements"].split()]


def main() -> int:
    bounds = lower_bounds()
    print(f"installing {' '.join(bounds)}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, *bounds, *TOOLS], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "2", "-m", "not book", "tests"], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-4000:] + done.stderr[-2000:])
    outcome = {"requirements": bounds, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
               "passed": done.returncode == 0, "summary": done.stdout.strip().splitlines()[-1:], "seconds": round(time.perf_counter() - start, 1)}
    (ROOT / "results").mkdir(exist_ok=True)
    (ROOT / "results" / "test-oldest.json").write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
