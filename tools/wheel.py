"""`make wheel`: what goes to an index, a source distribution and a wheel for
Linux on x86-64 that carries the kernel compiled, for machines without a
compiler.

    python -m tools.wheel [FOLDER]

Into dist/, or another folder. The wheel is made of the source distribution, as
by pip, with three files beside the kernel's source and another tag. The files
are made as at the kernel's first use
(`normalnorm.layers.engines.compiler.carry`), `$CXX` included. auditwheel says
which C and C++ libraries they need, and that is the tag; where the loader does
not find them, the kernel is compiled as ever. twine reads what an index would
show.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from tools.files import ROOT, python

KERNEL = Path("normalnorm/layers/engines/native.cpp")
# one step of building, with no more packages than pip has for it: those that
# pyproject.toml names, and what they need
ALONE = """
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from setuptools import build_meta
own = {"normalnorm", "setuptools", "wheel", "PyYAML", "pybtex", "latexcodec"}
vendored = Path(build_meta.__file__).with_name("_vendor").iterdir()
brought = {path.stem for path in vendored}
for name, of in packages_distributions().items():
    if not own & {*of} and name not in brought:
        sys.modules[name] = None
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""


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


def source(folder: Path) -> Path:
    """The source distribution. It is made of a copy: for a moment setuptools
    has all files twice, where tests that run meanwhile would find them.
    """
    no = ".* _build _docs build dist *.egg-info __pycache__ checks"
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(
            ROOT,
            Path(place, "copy"),
            ignore=shutil.ignore_patterns(*no.split()),
        )
        run("-c", ALONE, "build_sdist", str(folder), cwd=copy)
    (made,) = folder.glob("*.tar.gz")
    return made


def plain(folder: Path) -> Path:
    """The ordinary wheel, for any machine, in an empty folder, beside the
    source distribution that it is made of.
    """
    with tempfile.TemporaryDirectory() as place:
        shutil.unpack_archive(source(folder), place)
        (root,) = Path(place).iterdir()
        run("-c", ALONE, "build_wheel", str(folder), cwd=root)
    (made,) = folder.glob("*.whl")
    return made


def platform(wheel: Path) -> str:
    """The tag for what the files in a wheel ask of the system.

    Raises `Failed` where the wheel would have to bring a library: OpenMP's
    runtime comes with PyTorch, a second one would not share its threads.
    """
    found = json.loads(run(*"-m auditwheel show --json".split(), str(wheel)))
    if found["external_libs"]:
        raise Failed(f"it needs {', '.join(found['external_libs'])}")
    return found["overall_tag"]


def carrying(wheel: Path, folder: Path) -> Path:
    """A wheel that carries the compiled kernel, of one that does not.

    Raises `Failed` where nothing compiles, or the kernel is not found in it.
    """
    from normalnorm.layers.engines import compiler

    with tempfile.TemporaryDirectory() as place:
        run("-m", "wheel", "unpack", "--dest", place, str(wheel))
        (root,) = Path(place).iterdir()
        try:
            command, flags, _ = compiler._compiler()
            words = *command, *flags, "-include", str(ROOT / "tools/glibc.h")
            with patch.dict(os.environ, CXX=shlex.join(words)):
                compiler.carry(root / KERNEL)
        except compiler.CompilerError as error:
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
        text = about.read_text("utf-8")
        text = text.replace("Purelib: true", "Purelib: false")
        about.write_text(text, "utf-8")
        run("-m", "wheel", "pack", "--dest-dir", place, str(root))
        packed = Path(place, wheel.name)
        retag = "-m wheel tags --platform-tag".split()
        name = run(*retag, platform(packed), str(packed)).strip()
        return Path(shutil.move(Path(place, name), folder / name))


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
            wheel = plain(Path(place))
            made = [carrying(wheel, Path(place)), *wheel.parent.glob("*.gz")]
            print(run(*"-m twine check --strict".split(), *map(str, made)))
            made = [shutil.copy(path, folder) for path in made]
    except Failed as error:
        print(f"there is no wheel: {error}", file=sys.stderr)
        return 1
    print(*made, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
