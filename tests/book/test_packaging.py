"The package that users install: what is in the wheel, what an import loads."

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

from normalnorm.layers.engines import compiler
from tests.kernel import compile_once
from tests.layers.steps import python
from tools import files
from tools import wheel as packing
from tools.files import ROOT


@pytest.fixture(scope="session")
def carrying(once, plain_wheel):
    "The wheel of `make wheel`."
    if not compiler._levels() or not shutil.which("g++"):
        pytest.skip("the kernel is carried for Linux on x86-64, made by g++")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", compile_once.COMMAND)
        folder = once(
            "carrying wheel",
            lambda making: packing.carrying(plain_wheel, making),
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_hints_name_an_extra_that_there_is_and_no_package_of_an_index():
    "`normalnorm[…]` would be looked up where the name is not ours."
    known = set(
        re.findall(
            r"(?m)^(\w+)_requirements =",
            (ROOT / "settings.ini").read_text(encoding="utf-8"),
        )
    )
    asked = set()
    for path in (ROOT / "normalnorm").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"normalnorm\[\w|pip install normalnorm", text), (
            path
        )
        asked |= set(re.findall(r"to_install\([\"'](\w+)", text))
    assert {"book", "experiments", "plots", "ray", "timm"} <= asked <= known


def source_of(wheel):
    "The source distribution that a wheel was made of."
    (made,) = wheel.parent.glob("*.tar.gz")
    return made


@pytest.mark.book
def test_wheel(plain_wheel):
    """What is in it; it was made of the source distribution, which has nothing
    that was built, without the tools of the book.
    """
    assert plain_wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(plain_wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(
            next(n for n in names if n.endswith("METADATA"))
        ).decode()
        scripts = archive.read(
            next(n for n in names if n.endswith("entry_points.txt"))
        ).decode()
    assert {
        "normalnorm/py.typed",
        "normalnorm/claims.py",
        "normalnorm/checks/theory/newton.py",
    } <= set(names)
    assert any(n.endswith(".npz") for n in names)
    assert not any(
        n.startswith(("tests/", "tools/", "nbs/")) or n.endswith(".so")
        for n in names
    )
    with tarfile.open(source_of(plain_wheel)) as archive:
        sources = archive.getnames()
    assert not any(
        re.search(r"/(checks|tests|_build)/|\.(so|pyc)$|/\.", n)
        for n in sources
    )
    assert "normalnorm = normalnorm.cli:main" in scripts
    required = [
        line
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert sorted(
        line.split(":")[1].split(">")[0].strip() for line in required
    ) == ["numpy", "scipy", "torch"]


@pytest.mark.book
def test_wheel_that_carries(plain_wheel, carrying):
    """The same and three files, each for a level and of this very source, with
    the names of an OpenMP runtime left open; the tag is that of the platform,
    no newer than PyTorch's own; an index would take it, and the sources.
    """
    with (
        zipfile.ZipFile(plain_wheel) as before,
        zipfile.ZipFile(carrying) as after,
    ):
        own = "normalnorm/layers/engines/carried/"
        files = {n: after.read(n) for n in after.namelist() if own in n}
        about = {
            n for n in before.namelist() if n.endswith(("/WHEEL", "/RECORD"))
        }
        assert {
            n: before.read(n) for n in before.namelist() if n not in about
        } == {
            n: after.read(n)
            for n in after.namelist()
            if n not in {*files, *about}
        }
        text = after.read(next(n for n in about if "WHEEL" in n)).decode()
        record = after.read(next(n for n in about if "RECORD" in n)).decode()
    source = ROOT / packing.KERNEL
    _, tag = carrying.stem.split("-py3-none-")
    assert re.fullmatch(r"manylinux_2_(1[7-9]|2[0-8])_x86_64", tag)
    assert packing.platform(carrying) == tag
    check = *"-m twine check --strict".split(), str(source_of(plain_wheel))
    assert packing.run(*check, str(carrying)).count("PASSED") == 2
    assert (
        f"Tag: py3-none-{tag}\n" in text
        and text.count("Tag:") == 1
        and "Root-Is-Purelib: false\n" in text
    )
    assert len(files) == 3 and all(name in record for name in files)
    found = {
        re.fullmatch(
            rf"{own}native-{compiler._carried_key(source.read_bytes(), level)}-"
            rf"{level}-0-[0-9a-f]{{32}}\.so",
            name,
        )
        and level
        for name in files
        for level in compiler._LEVELS
    } - {None}
    assert found == {*compiler._LEVELS}
    for content in files.values():
        assert b"GOMP_parallel" in content and not re.search(
            rb"lib(gomp|omp|iomp5)\.so", content
        )


LAYERS = r"""
    import hashlib, re, sys, warnings
    from pathlib import Path
    import torch
    import normalnorm
    from normalnorm.layers.engines import compiler, native
    from normalnorm.layers.functional import layer_normal_norm

    level, installed = sys.argv[1:]
    assert normalnorm.__file__.startswith(installed + "/"), normalnorm.__file__
    levels = compiler._levels()
    compiler._levels = lambda: levels[:levels.index(level) + 1]
    warnings.simplefilter("error")
    maps = Path("/proc/self/maps")
    runtimes = lambda: set(re.findall(r"/\S*/lib\w*omp\S*", maps.read_text()))
    before = runtimes()
    print(level, native.way())
    assert before and runtimes() == before
    torch.set_num_threads(1)  # two might differ at a first exp: PyTorch #188792
    torch.manual_seed(0)
    small, long = torch.randn(8, 6, 7, 5), torch.randn(16, 3, 32, 32).exp()
    torch.set_num_threads(2)
    for name, layer, u in (
        ("long", normalnorm.BatchNormalNorm2d(3), long),
        ("last", normalnorm.BatchNormalNorm2d(6),
         small.to(memory_format=torch.channels_last)),
        ("group", normalnorm.GroupNormalNorm(2, 6), small)):
        for noise, kind in ((0.0, "scaled"), (0.4, "scaled"), (0.3, "dropout")):
            layer.noise, layer.noise_kind = noise, kind
            for training in (True, False):
                torch.manual_seed(1)
                out = layer.train(training)(u.requires_grad_())
                found = [out, *torch.autograd.grad(
                    out, [u, *layer.parameters()], torch.randn_like(out)),
                    *layer.buffers()]
                digest = hashlib.sha256()
                for t in found:
                    assert t.isfinite().all()
                    digest.update(t.detach().contiguous().numpy().tobytes())
                print(name, noise, kind, training, digest.hexdigest())
"""


@pytest.mark.book
def test_no_compiler_and_the_same_bits(carrying, once, tmp_path):
    """From the wheel without a compiler, a cache or a word on the error stream,
    for each level that this processor has; for the highest, which is in the
    cache already, the very bits that the source gives.
    """
    levels = compiler._levels()
    usual = {
        k: v
        for k, v in os.environ.items()
        if k not in ("CXX", "NORMALNORM_QUIET", "NORMALNORM_CACHE")
    }

    def start(level, folder, **environment):
        script = [sys.executable, "-c", textwrap.dedent(LAYERS)]
        return subprocess.Popen(
            [*script, level, str(folder)],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=usual | {"PYTHONPATH": str(folder)} | environment,
        )

    source = start(levels[-1], ROOT, NORMALNORM_QUIET="1")
    target = once(
        "installed wheel",
        lambda folder: files.python(
            *"-m pip install --quiet --no-deps --no-index".split(),
            *("--disable-pip-version-check", "--target", folder, carrying),
            check=True,
        ),
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    for level in levels:
        done = start(
            level,
            target,
            PATH=str(empty),
            NORMALNORM_CACHE=str(empty / "cache"),
        )
        out, err = done.communicate(timeout=300)
        assert done.returncode == 0 and err == "", err
        assert not list(empty.iterdir()) and out.count("\n") == 19
        assert out.startswith(level)
    wanted, err = source.communicate(timeout=600)
    assert source.returncode == 0, err
    assert out == wanted


def test_addresses(monkeypatch, tmp_path):
    """An index shows none that leads nowhere; with the two of settings.ini it
    has links, those of the README too.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("settings.ini", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    made = []
    monkeypatch.setattr("setuptools.setup", lambda **words: made.append(words))
    run = lambda: runpy.run_path(str(ROOT / "setup.py")) and made.pop()
    assert ".invalid" not in str(run())
    settings = Path("settings.ini")
    settings.write_text(
        re.sub(
            r"https://[\w.]*\.invalid",
            "https://example.org/us",
            settings.read_text("utf-8"),
        ),
        "utf-8",
    )
    words = run()
    assert set(words["project_urls"]) == {"Source", "Documentation"}
    for there in ("blob/main/nbs/010_", "raw/main/README.svg)"):
        assert (
            f"](https://example.org/us/normalnorm/{there}"
            in words["long_description"]
        )
    assert not re.search(r"\]\((?!https?:)", words["long_description"])


@pytest.mark.book
def test_make_wheel(monkeypatch, tmp_path, plain_wheel, capsys):
    "What it says where it cannot be made; `make help` knows it."
    monkeypatch.setattr(packing, "plain", lambda folder: plain_wheel)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert packing.main([str(tmp_path / "dist")]) == 1
    assert "there is no wheel: " in capsys.readouterr().err
    assert not list((tmp_path / "dist").iterdir())
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^wheel: .*  ## .*\n\t.*-m tools\.wheel$", text, re.M)


def test_imports_are_light_and_what_they_give_works():
    """`import normalnorm` loads neither torch nor anything heavy; weight decay
    knows layers that nothing has imported; using a layer loads no development
    tool and no plotting; the example of the README runs.
    """
    unwanted = (
        "nbdev",
        "fastcore",
        "matplotlib",
        "IPython",
        "nbformat",
        "pandas",
        "sklearn",
        "scipy",
        "torchvision",
        "transformers",
        "timm",
        "statsmodels",
        "numba",
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = readme.split("```python\n")[1].split("```")[0]
    code = f"""
        import sys, normalnorm
        print({{"torch", "numpy"}} & {{*sys.modules}})
        import torch
        before = {{*sys.modules}}
        from normalnorm.layers.weight_decay import no_weight_decay
        print(*sorted(no_weight_decay(torch.nn.BatchNorm1d(3))))
        from normalnorm import BatchNormalNorm2d
        print({{*{unwanted}}} & ({{*sys.modules}} - before))
        names = {{}}
        exec({example!r}, names)
        print(*names["out"].shape, type(names["model"][1]).__name__)
    """
    assert python(code).splitlines() == [
        "set()",
        "bias weight",
        "set()",
        "32 64 14 14 BatchNormalNorm2d",
    ]


def test_command():
    words = "-m normalnorm verify nn-yj-identity --mutants".split()
    done = files.python(*words)
    assert done.returncode == 0 and "mutant rejected" in done.stdout
