"""Every public name has an example, and every example gives what it says.

Public is what a module's `__all__` names, and in a class the methods and
properties that its body defines under a public name; not what it overrides
(the class above says what that is for), and not the fields of a tuple. The
example of a function is a `>>>` line that names it: in its own docstring or,
for a method, in that of its class. A class has one in its docstring, which may
get an object of it from a function.
"""
import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import normalnorm

MODULES = [m.name
           for m in pkgutil.walk_packages(normalnorm.__path__, "normalnorm.")
           if ".checks" not in m.name and not m.name.endswith("_modidx")]

# What no example can show, and why.
EXEMPT = {
    "layers.engines.compiled.Fused.forward": "compiles for seconds",
    "layers.engines.compiled.Fused.backward": "compiles for seconds",
    "layers.engines.compiler.carry": "compiles for seconds",
    "lab.shipped_chapters": "in a checkout, writes all chapters: seconds",
    "lab.open_lab": "opens a program that stays",
}


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


def members(cls):
    "The methods and properties that a class adds: names, docstrings."
    for name, value in vars(cls).items():
        function = (getattr(value, "fget", None)
                    or getattr(value, "func", None)
                    or getattr(value, "__func__", value))
        if (inspect.isfunction(function) and not name.startswith("_")
                and not any(name in vars(b) for b in cls.__mro__[1:])):
            yield name, function.__doc__


def without_example(module):
    "The public names of a module that no example shows."
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        is_class = inspect.isclass(thing)
        if (not (is_class or inspect.isroutine(thing))
                or thing.__module__ != module.__name__
                or thing.__name__ != name):     # made by another function
            continue
        shown = examples(thing.__doc__)
        if not shown or not is_class and not re.search(rf"\b{name}\b", shown):
            yield name
        for member, docstring in members(thing) if is_class else ():
            if not (re.search(rf"\.{member}\b", shown)
                    or re.search(rf"\b{member}\b", examples(docstring))):
                yield f"{name}.{member}"


def docstrings(module):
    "Every docstring in a module's file, with the names that lead to it."
    def within(node, path):
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
                place = [*path, child.name]
                yield ".".join(place), ast.get_docstring(child) or ""
                yield from within(child, place)
    source = Path(module.__file__).read_text(encoding="utf-8")
    return within(ast.parse(source), [])


def test_everything_public_has_an_example():
    found = {f"{name.removeprefix('normalnorm.')}.{missing}"
             for name in MODULES
             for missing in without_example(importlib.import_module(name))}
    assert found == set(EXEMPT)


def test_examples_are_set_as_code():
    """An example that stands at the margin of its docstring becomes a paragraph
    on the page.
    """
    flush = [path.name + ": " + line.strip()
             for path in (Path(normalnorm.__file__).parent).rglob("*.py")
             for docstring in map(ast.get_docstring, (
                 node for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Module | ast.ClassDef
                               | ast.FunctionDef)))
             for line in (docstring or "").splitlines()
             if line.startswith(">>>")]
    assert flush == []


def test_no_example_is_told_and_not_run():
    told = {f"{name.removeprefix('normalnorm.')}.{where}"
            for name in MODULES
            for where, docstring in docstrings(importlib.import_module(name))
            if re.search(r"^\s*Examples?:(?!\s*>>>)", docstring, re.M)}
    assert told <= set(EXEMPT)


def test_what_counts_as_an_example():
    class Shape:
        """A shape.

        >>> Shape().area()
        0
        """
        def area(self):
            return 0

        def name(self):
            """Not shown.

            >>> len("circle")
            6
            """

        def _hidden(self):
            pass

    class Square(Shape):
        "No example, and none is wanted of what it overrides."
        def area(self):
            return 1

    module = type(inspect)("shapes")
    for cls in (Shape, Square):
        cls.__module__ = "shapes"
        setattr(module, cls.__name__, cls)
    module.__all__ = ["Shape", "Square"]
    assert list(without_example(module)) == ["Shape.name", "Square"]
