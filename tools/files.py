"What all tools do with files and with processes."

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def load(path: Path) -> Any:
    "What a file of JSON holds."
    return json.loads(path.read_text(encoding="utf-8"))


def replace(path: Path, text: str) -> None:
    "Whole or not at all: others may read or write it at the same time."
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text, "utf-8", "backslashreplace")
    os.replace(fresh, path)


def save(path: Path, found: Any) -> None:
    "As a file of JSON."
    replace(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def ran(command: list, **how) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, **how)


def python(*words, **how) -> subprocess.CompletedProcess:
    return ran([sys.executable, *words], **how)
