"""Every public name has an example, and every example gives what it says.

Public is what a module's `__all__` names, and in a class the methods and
properties that its body defines under a public name; not what it overrides
(the class above says what that is for), and not the fields of a tuple. An
example is a `>>>` line that names the thing: in its own docstring or, for a
method, in that of its class.
"""
import doctest
import importlib
import inspect
import pkgutil
import re

import pytest
import torch

import normalnorm

MODULES = [m.name
           for m in pkgutil.walk_packages(normalnorm.__path__, "normalnorm.")
           if ".checks" not in m.name and not m.name.endswith("_modidx")]

# What no example can show, and why.
EXEMPT = {}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    if name.endswith("engines.native") and not module.available():
        pytest.skip("the kernel cannot be compiled here")
    result = doctest.testmod(
        module, extraglobs={"torch": torch},
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def examples(docstring):
    "The code of a docstring's examples, as one text."
    parsed = doctest.DocTestParser().get_examples(docstring or "")
    return "".join(e.source for e in parsed)


def members(thing):
    "The methods and properties that the class defines itself, by name."
    for name, value in vars(thing).items():
        above = any(name in vars(base) for base in thing.__mro__[1:])
        function = getattr(value, "fget", None) or getattr(
            value, "func", None) or getattr(value, "__func__", value)
        if inspect.isfunction(function) and not (
                name.startswith("_") or above):
            yield name, function.__doc__


def public(module):
    "Each public name of a module, with the docstrings where its example is."
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        documented = inspect.isclass(thing) or inspect.isroutine(thing)
        if not documented or thing.__module__ != module.__name__:
            continue
        yield name, name, thing.__doc__, ""
        for member, docstring in (
                members(thing) if inspect.isclass(thing) else ()):
            yield f"{name}.{member}", member, docstring, thing.__doc__


def without_example(module):
    "The public names of a module that no example in their docstrings shows."
    return [whole for whole, name, own, of_class in public(module)
            if not re.search(rf"\b{name}\b", examples(own))
            and not re.search(rf"\.{name}\b", examples(of_class))]


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_has_an_example(name):
    missing = without_example(importlib.import_module(name))
    short = name.removeprefix("normalnorm.")
    assert {f"{short}.{m}" for m in missing} == {
        e for e in EXEMPT if e.rpartition(".")[0] == short
        or e.startswith(f"{short}.") and e[len(short) + 1].isupper()}
