"""A compiler that compiles the same text by the same options once, whichever
run of the tests asked first: `python tests/kernel/compile_once.py g++ …`.

What it compiled lies in `_build/compiled`; of the kernel it takes half a
minute. A name is the hash of what the preprocessor says: the text with its
headers, the compiler, and what the options mean on this processor.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

KEPT = Path(__file__).resolve().parents[2] / "_build" / "compiled"
COMMAND = f"{shlex.quote(sys.executable)} {shlex.quote(__file__)} g++"
MANY = 60


def main(*command: str) -> int:
    compile_now = lambda: subprocess.run(command).returncode
    if "-c" not in command:  # it links
        return compile_now()
    source, made = (
        command[command.index(option) + 1] for option in ("-c", "-o")
    )
    options = [word for word in command if word not in ("-o", made)]
    asked = [*options, "-E", "-P", "-v"]
    said = subprocess.run(asked, capture_output=True)
    if said.returncode:
        return compile_now()
    text = said.stdout + said.stderr.replace(source.encode(), b"")
    kept = KEPT / f"{hashlib.sha256(text).hexdigest()}.o"
    if kept.exists():
        kept.touch()
        shutil.copyfile(kept, made)
        return 0
    if code := compile_now():
        return code
    KEPT.mkdir(parents=True, exist_ok=True)
    making = kept.with_suffix(f".{os.getpid()}")  # others may do the same
    shutil.copyfile(made, making)
    making.replace(kept)
    by_age = sorted(KEPT.glob("*.o"), key=os.path.getmtime)
    for older in by_age[:-MANY]:
        older.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
