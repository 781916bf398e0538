"Every `>>>` example in a docstring gives what it says."
import doctest
import importlib
import pkgutil

import pytest
import torch

import normalnorm

MODULES = [m.name
           for m in pkgutil.walk_packages(normalnorm.__path__, "normalnorm.")
           if ".checks" not in m.name and not m.name.endswith("_modidx")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(
        importlib.import_module(name), extraglobs={"torch": torch})
    assert result.failed == 0
