"""Other people's packages: pinned and installed in the environment of `make`,
skipped where missing, never where broken. (That no module of the library
imports one: ruff.)
"""

from configparser import ConfigParser
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from tests import peers
from tools.files import ROOT

PEERS = {
    "scikit-learn",
    "statsmodels",
    "pingouin",
    "dcor",
    "jepa-science",
    "transformers",
    "timm",
    "torchvision",
    "curvlinops-for-pytorch",
    "proxynorm",
    "pytorch-lightning",
}


def pins() -> dict[str, str]:
    "Package and pinned version, for this Python."
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    known = [Requirement(x) for x in lines if x and not x.startswith("#")]
    here = [r for r in known if r.marker is None or r.marker.evaluate()]
    found = {r.name: str(r.specifier).removeprefix("==") for r in here}
    assert len(found) == len(here), "a package is pinned twice"
    return found


def development() -> set[str]:
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    wanted = config["DEFAULT"]["dev_requirements"].split()
    return {name.split(";")[0] for name in wanted}


def test_each_development_requirement_has_a_pin():
    assert PEERS <= development() <= set(pins())


def test_no_peer_is_missing_where_the_tools_are():
    """A skip in CI would go unnoticed.

    The newest versions are tested with a torchvision of their own: there the
    pin does not hold.
    """
    pytest.importorskip("nbdev", reason="the development tools are missing")
    wanted = pins()
    if version("torch").split("+")[0] != wanted["torch"]:
        wanted["torchvision"] = version("torchvision")
    assert {p: version(p) for p in PEERS} == {p: wanted[p] for p in PEERS}


def test_a_broken_package_fails_and_is_not_skipped(tmp_path, monkeypatch):
    text = "raise ImportError('built for another torch')"
    (tmp_path / "package_that_is_broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="another torch"):
        peers.installed("package_that_is_broken")


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
