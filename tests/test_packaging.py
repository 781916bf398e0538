"The package that users install: what is in the wheel, what an import loads."
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.book
def test_wheel(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
               "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wheel, = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(
            next(n for n in names if n.endswith("METADATA"))).decode()
        scripts = archive.read(
            next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {"normalnorm/py.typed", "normalnorm/claims.py",
            "normalnorm/checks/theory/newton.py"} <= set(names)
    assert any(n.endswith(".npz") for n in names)
    assert not any(n.startswith(("tests/", "tools/", "nbs/")) for n in names)
    assert "normalnorm = normalnorm.cli:main" in scripts
    required = [line for line in metadata.splitlines()
                if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert (sorted(line.split(":")[1].split(">")[0].strip()
                   for line in required) == ["numpy", "scipy", "torch"])


def test_import_is_light():
    """`import normalnorm` loads neither torch nor anything heavy; using a layer
    loads torch, but no development tool and no plotting.
    """
    assert python("import sys, normalnorm; print('torch' in sys.modules, "
                  "'numpy' in sys.modules)") == "False False"
    unwanted = ("nbdev", "fastcore", "matplotlib", "IPython", "nbformat",
                "pandas", "sklearn", "scipy", "torchvision", "transformers",
                "timm", "statsmodels", "numba")
    loaded = python("import sys, torch; before = set(sys.modules); from "
                    "normalnorm import BatchNormalNorm2d; print([m for m in "
                    f"{unwanted} if m in set(sys.modules) - before])")
    assert loaded == "[]"


def test_version():
    assert python("import normalnorm; print(normalnorm.__version__)") == "0.1.0"


def test_command():
    done = subprocess.run([sys.executable, "-c",
                           "import sys; from normalnorm.cli import main; "
                           "sys.exit(main(['verify', 'nn-yj-identity', "
                           "'--mutants']))"],
                          capture_output=True, text=True)
    assert done.returncode == 0 and "mutant rejected" in done.stdout


def test_the_readme_example_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = readme.split("```python\n")[1].split("```")[0]
    assert python(code + "\nprint(tuple(bent.shape))") == "(64, 1, 14, 14)"
