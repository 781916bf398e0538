"""`make wheel`: a wheel for Linux on x86-64 that carries the kernel compiled,
for machines without a compiler.

    python -m tools.wheel [FOLDER]

Into dist/, or another folder. It is the wheel that `pip wheel .` makes, with
three files beside the kernel's source and another tag. The files are made as at
the kernel's first use (`normalnorm.layers.engines.compiler.carry`), `$CXX`
included. They need the C and C++ libraries of this machine or newer ones; where
the loader does not find what it needs, the kernel is compiled as ever.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tools.files import ROOT, python

KERNEL = Path("normalnorm/layers/engines/native.cpp")
TAG = "py3-none-linux_x86_64"  # ctypes: any Python will do


class Failed(Exception):
    pass


def run(*arguments: str, cwd: Path = ROOT, **environment: str) -> str:
    "A Python module's output. Raises `Failed` with what it said."
    done = python(*arguments, cwd=cwd, env=os.environ | environment)
    if done.returncode:
        raise Failed(
            f"python {' '.join(arguments[:3])} …: "
            f"{(done.stderr or done.stdout).strip()[-2000:]}"
        )
    return done.stdout


def plain(folder: Path) -> Path:
    "The ordinary wheel, of the source, for any machine, in an empty folder."
    words = "-m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir"
    run(*words.split(), str(folder), str(ROOT))
    (made,) = folder.glob("*.whl")
    return made


def tagged(text: str) -> str:
    "The WHEEL file of a wheel for one platform."
    lines = [
        line
        for line in text.splitlines()
        if not line.startswith(("Tag:", "Root-Is-Purelib:")) and line
    ]
    return "\n".join([*lines, "Root-Is-Purelib: false", f"Tag: {TAG}"]) + "\n"


def carrying(wheel: Path, folder: Path) -> Path:
    """A wheel that carries the compiled kernel, of one that does not.

    Raises `Failed` where nothing compiles, or the kernel is not found in it.
    """
    from normalnorm.layers.engines.compiler import CompilerError, carry

    with tempfile.TemporaryDirectory() as place:
        run("-m", "wheel", "unpack", "--dest", place, str(wheel))
        (root,) = Path(place).iterdir()
        try:
            carry(root / KERNEL)
        except CompilerError as error:
            raise Failed(str(error)) from error
        # as on a machine without a compiler
        way = run(
            "-c",
            "from normalnorm.layers.engines import native; print(native.way())",
            cwd=root,
            PYTHONPATH=str(root),
            PATH=place,
            CXX="",
            NORMALNORM_CACHE=os.devnull,
        )
        print(f"here it computes with {way.strip()}")
        (about,) = root.glob("*.dist-info/WHEEL")
        about.write_text(tagged(about.read_text("utf-8")), "utf-8")
        run("-m", "wheel", "pack", "--dest-dir", str(folder), str(root))
    return folder / wheel.name.replace("py3-none-any", TAG)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.wheel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    folder = parser.parse_args(arguments).folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as place:
            made = carrying(plain(Path(place)), folder)
    except Failed as error:
        print(f"there is no wheel: {error}", file=sys.stderr)
        return 1
    print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
