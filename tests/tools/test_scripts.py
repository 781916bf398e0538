"JavaScript of the tools and tests: files that an engine of it can read."

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("tools", "tests")
    for path in (ROOT / folder).rglob("*.js")
)
NODE = shutil.which("node")


def refused(path):
    "What node says against a script; empty where it can be read."
    return subprocess.run(
        [NODE, "--check", path], capture_output=True, text=True
    ).stderr


@pytest.mark.skipif(
    not NODE,
    reason="no node on this machine: scripts of the "
    "tools and tests are not read before use",
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_can_be_read(script):
    assert refused(ROOT / script) == ""


@pytest.mark.skipif(not NODE, reason="no node on this machine")
@pytest.mark.parametrize("source", ["(a) => { return b; ", "const = 1;"])
def test_a_broken_script_is_refused(source, tmp_path):
    (tmp_path / "a.js").write_text(source)
    assert "SyntaxError" in refused(tmp_path / "a.js")


def test_the_scripts_are_found():
    assert {"tools/browser.js", "tests/browser/drag.js"} < set(SCRIPTS)
