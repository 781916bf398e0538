"""Other people's packages: pinned and installed in the environment of `make`,
skipped where missing, never where broken. (That no module of the library
imports one: ruff.)
"""

import re
import sys
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests import peers

ROOT = Path(__file__).resolve().parents[2]
PEERS = {
    "sklearn": "scikit-learn",
    "statsmodels": "statsmodels",
    "pingouin": "pingouin",
    "dcor": "dcor",
    "transformers": "transformers",
    "timm": "timm",
    "torchvision": "torchvision",
    "curvlinops": "curvlinops-for-pytorch",
    "proxynorm": "proxynorm",
    "pytorch_lightning": "pytorch-lightning",
}


def pins() -> dict[str, str]:
    "Package and pinned version, for this Python."
    found = {}
    for line in (
        (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    ):
        if match := re.fullmatch(
            r'([\w.-]+)==([\w.]+)(?:; python_version (>=|<) "3\.11")?', line
        ):
            name, number, sign = match.groups()
            if sign is None or (sign == ">=") == (sys.version_info >= (3, 11)):
                assert name not in found, f"{name} is pinned twice"
                found[name] = number
        else:
            assert not line or line.startswith("#"), line
    return found


def development() -> list[str]:
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]["dev_requirements"].split()


def test_each_development_requirement_has_a_pin():
    assert set(development()) <= set(pins()) and set(PEERS.values()) <= set(
        development()
    )


def test_no_peer_is_missing_where_the_tools_are():
    """A skip in CI would go unnoticed.

    The newest versions are tested with a torchvision of their own: there the
    pin does not hold.
    """
    try:
        version("nbdev")
    except PackageNotFoundError:
        pytest.skip("the development tools are not installed")
    wanted, missing = pins(), []
    for package in PEERS.values():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "missing"
        if found != wanted[package] and (
            package != "torchvision"
            or version("torch").split("+")[0] == wanted["torch"]
        ):
            missing.append(f"{package}: {found}, expected {wanted[package]}")
    assert not missing, missing


def test_a_missing_package_skips_and_a_broken_one_fails(tmp_path, monkeypatch):
    (tmp_path / "package_that_is_broken.py").write_text(
        "raise RuntimeError('built for another torch')"
    )
    (tmp_path / "package_that_works.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        pytest.skip.Exception,
        match="package_that_is_not_there is not installed",
    ):
        peers.installed("package_that_is_not_there.part")
    with pytest.raises(RuntimeError, match="another torch"):
        peers.installed("package_that_is_broken")
    assert peers.installed("package_that_works").answer == 42


def test_torchvision_is_whole_or_declared():
    """After the helper, torchvision and what imports it are usable in one
    process, in any order; a second call declares nothing again.
    """
    peers.installed("torchvision")
    models, kept = peers.installed("torchvision.models"), len(peers.DECLARED)
    peers.installed("timm"), peers.installed("transformers")
    assert (
        len(peers.DECLARED) == kept <= 1
        and peers.installed("torchvision.models") is models
    )
