"""Make the text that normalnorm ships: one million characters of the Python
standard library's own sources.

    python -m tools.make_stdlib_text LIB    from the folder Lib of CPython
        3.11.7 (default: this Python's, if it is that version)

Which files: modules of the library proper (no tests, no tables, no third-party
packages), pure ASCII without control characters other than the line feed, 5 to
60 kB long, and free of the words copyright, license and permission, so that
nothing under terms of its own is copied. In which order: by the SHA-256 of
their path, a shuffle that never changes, so that the part for testing is not
simply the end of the alphabet. A file is left out if more than a tenth of its
sequences of 64 characters stand in files before it (ntpath.py repeats
posixpath.py).
The same sources give the same bytes. Prints the SHA-256 that
normalnorm.experiments.text records.
"""

import hashlib
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np

from tools.make_fashion_subset import archive, write

VERSION, LENGTH = "3.11.7", 1_000_000
SKIPPED = (
    "test",
    "idlelib",
    "lib2to3",
    "encodings",
    "site-packages",
    "dist-packages",
    "pydoc_data",
    "ensurepip",
    "distutils",
    "turtledemo",
    "tkinter",
    "config-",
    "__pycache__",
    "lib-dynload",
    "unittest",
)
NOTE = """One million characters of sources of the Python standard library, \
CPython {version}: whole files, each after a line `# ==== path`, the last one \
cut.
The first 900 000 characters are for training, the next 50 000 for validation, \
the last 50 000 for testing.
Source: https://www.python.org/ftp/python/{version}/, folder Lib; chosen and \
ordered by tools/make_stdlib_text.py.
Copyright (c) 2001-2023 Python Software Foundation. All Rights Reserved. \
Licence: PSF License Agreement (text in PSF-LICENSE.md beside this file).
Files: {files}
"""


def chosen(source: Path) -> list[Path]:
    "The files that may be copied, in their order."
    found = []
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).parts
        if any(part.startswith(SKIPPED) for part in parts) or parts[
            -1
        ].startswith("_sysconfigdata"):
            continue
        content = path.read_bytes()
        plain = all(byte == 10 or 32 <= byte < 127 for byte in content)
        if (
            plain
            and 5_000 <= len(content) <= 60_000
            and not re.search(
                rb"copyright|licen[cs]e|permission", content, re.I
            )
        ):
            found.append(path)
    return sorted(
        found,
        key=lambda path: hashlib.sha256(
            path.relative_to(source).as_posix().encode()
        ).digest(),
    )


def text(source: Path) -> bytes:
    "The archive: `text` (unsigned bytes) and `note`."
    files, pieces, length, seen = [], [], 0, set()
    for path in chosen(source):
        name, content = path.relative_to(source).as_posix(), path.read_bytes()
        sequences = [content[i : i + 64] for i in range(len(content) - 63)]
        if (
            sum(sequence in seen for sequence in sequences)
            > len(sequences) / 10
        ):
            continue
        seen.update(sequences)
        pieces.append(f"# ==== {name}\n".encode() + content)
        files.append(name)
        length += len(pieces[-1])
        if length >= LENGTH:
            break
    else:
        raise SystemExit(
            f"{source} holds {length} characters of suitable "
            f"sources, {LENGTH} are needed: is it the folder Lib "
            f"of CPython {VERSION}?"
        )
    note = NOTE.format(version=VERSION, files=", ".join(files))
    return archive(
        {
            "text": np.frombuffer(b"".join(pieces)[:LENGTH], np.uint8),
            "note": np.frombuffer(note.encode(), np.uint8),
        }
    )


def sources() -> Path:
    "The folder that is given, or this Python's."
    if sys.argv[1:]:
        return Path(sys.argv[1])
    if sys.version.split()[0] != VERSION:
        raise SystemExit(
            f"this is Python {sys.version.split()[0]}, and the text is of "
            f"{VERSION}: give that version's folder Lib"
        )
    return Path(sysconfig.get_path("stdlib"))


if __name__ == "__main__":
    write("stdlib.npz", text(sources()))
