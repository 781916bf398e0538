"""Every public name has an example, every example gives what it says, every
argument is in the text, and a layer's text has its formula.

Public is what a module's `__all__` names, and in a class the methods and
properties that its body defines under a public name; not what it overrides
(the class above says what that is for), and not the fields of a tuple. The
example of a function is a `>>>` line that names it: in its own docstring or,
for a method, in that of its class. A class has one in its docstring, which may
get an object of it from a function.

A text speaks of an argument by its name, and may leave it to another text:
"`alpha` as for `newton_lambda`", "see `Parts`", "those of `fgsm`". The text of
a method is its own and its class's, of a class also those that it inherits.
"""

import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import sys

import pytest
import torch

import normalnorm
from tests.peers import installed

MODULES = [
    m.name
    for m in pkgutil.walk_packages(normalnorm.__path__, "normalnorm.")
    if ".checks" not in m.name and not m.name.endswith("_modidx")
]

# What no example can show, and why.
EXEMPT = {
    "layers.engines.compiled.Fused.forward": "compiles for seconds",
    "layers.engines.compiled.Fused.backward": "compiles for seconds",
    "layers.engines.compiler.carry": "compiles for seconds",
    "layers.engines.gpu.Launch.forward": "takes a GPU",
    "layers.engines.gpu.Launch.backward": "takes a GPU",
    "lab.shipped_chapters": "in a checkout, writes all chapters: seconds",
    "lab.open_lab": "opens a program that stays",
}
# What the examples of a module use beyond the library's own requirements.
NEEDED = {
    "normalnorm.experiments.augmentation": "kornia",
    "normalnorm.experiments.hub": "datasets",
    "normalnorm.experiments.networks.efficient": "timm",
    "normalnorm.experiments.streams": "datasets",
    "normalnorm.experiments.recipes.slimming": "torch_pruning",
    "normalnorm.analysis.pruning": "torch_pruning",
    "normalnorm.plots": "IPython",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    if name in NEEDED:
        installed(NEEDED[name])
    if name.endswith("engines.native") and not module.available():
        pytest.skip("the kernel cannot be compiled here")
    result = doctest.testmod(
        module,
        extraglobs={"torch": torch},
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert result.failed == 0


def examples(docstring):
    "The code of a docstring's examples, as one text."
    parsed = doctest.DocTestParser().get_examples(docstring or "")
    return "".join(e.source for e in parsed)


def public_of(module):
    """Of each public function, class, and method or property that a class adds:
    its name, itself, its class.
    """
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name, None)
        made_here = getattr(thing, "__module__", "") == module.__name__
        if not (inspect.isclass(thing) or inspect.isroutine(thing)) or (
            not made_here or thing.__name__ != name
        ):  # made by another function
            continue
        yield name, thing, None
        for member, value in (
            vars(thing).items() if inspect.isclass(thing) else ()
        ):
            function = (
                getattr(value, "fget", None)
                or getattr(value, "func", None)
                or getattr(value, "__func__", value)
            )
            if (
                inspect.isfunction(function)
                and not member.startswith("_")
                and not any(member in vars(b) for b in thing.__mro__[1:])
            ):
                yield f"{name}.{member}", function, thing


def without_example(module):
    "The public names of a module that no example shows."
    for where, thing, cls in public_of(module):
        shown, name = examples(thing.__doc__), where.split(".")[-1]
        found = shown and inspect.isclass(thing)
        of_class = examples(cls.__doc__) if cls else ""
        if not found and not (
            re.search(rf"\b{name}\b", shown)
            or re.search(rf"\.{name}\b", of_class)
        ):
            yield where


def test_everything_public_has_an_example():
    found = {
        f"{name.removeprefix('normalnorm.')}.{missing}"
        for name in MODULES
        for missing in without_example(importlib.import_module(name))
    }
    assert found == set(EXEMPT)


def public():
    "The same of the whole package."
    for module in MODULES:
        for where, *found in public_of(importlib.import_module(module)):
            yield f"{module.removeprefix('normalnorm.')}.{where}", *found


@functools.cache
def named(name):
    "What a name in a docstring stands for: public, or PyTorch's."
    for where, thing, _ in public():
        if f".{where}".endswith("." + name.removeprefix("normalnorm.")):
            return thing
    return pkgutil.resolve_name(name) if name.startswith("torch.") else None


REFERRAL = re.compile(
    r"\b(?:as|those of|see|an?) (?:(?:for|in|of|with|an?) )?`([\w.]+)`", re.I
)


def said(thing, seen):
    "What is said of a thing, in its own docstring and where that leads to."
    if thing is None or thing in seen:
        return ""
    seen.append(thing)
    text = " ".join(
        re.sub(r"(?ms)^ *>>>.*?(\n\n|\Z)", "", thing.__doc__ or "").split()
    )
    if not inspect.isclass(thing) and not inspect.isfunction(thing):
        return text  # PyTorch's builtins say their arguments
    if not thing.__module__.startswith("normalnorm"):
        return text + str(inspect.signature(thing))
    own = vars(sys.modules[thing.__module__])
    others = [own.get(n) or named(n) for n in REFERRAL.findall(text)]
    if inspect.isclass(thing):
        ours = [
            c for c in thing.__mro__ if c.__module__.startswith("normalnorm")
        ]
        others += [*ours, *(vars(c).get("__init__") for c in ours)]
    return text + " ".join(said(other, seen) for other in others)


def unsaid(thing, cls=None):
    "The arguments that no text speaks of."
    if (
        inspect.isclass(thing)
        and "__init__" not in vars(thing)
        and "__new__" not in vars(thing)
    ):
        return []  # inherited, said there
    try:
        names = inspect.signature(thing).parameters
    except (ValueError, TypeError):  # of an exception
        return []
    seen = []
    text = said(thing, seen) + said(cls, seen)
    for other in [c for c in seen if inspect.isclass(c)]:  # "as `Work`"
        text += said(getattr(other, thing.__name__, None), seen)
    return [
        name
        for name in names
        if name not in ("self", "cls")
        and not name.startswith("_")
        and not re.search(rf"\b{name}\b" if name != "a" else "`a`", text)
    ]


def test_every_argument_is_in_the_text():
    missing = {
        where: names
        for where, thing, cls in public()
        if (names := unsaid(thing, cls))
    }
    assert missing == {}


def test_what_counts_as_said():
    def root(x, places=3):
        "The root of `x`."

    class Both:
        "Arguments as for `torch.nn.LayerNorm`."

        def __init__(self, normalized_shape, eps, grit):
            "With a number."

    for thing in (root, Both, Both.__init__):
        thing.__module__ = "normalnorm.claims"
    assert unsaid(root) == ["places"] and unsaid(Both) == ["grit"]


def test_a_layer_says_its_formula():
    layers = {
        name: inspect.getdoc(thing)
        for name in normalnorm.__all__
        if inspect.isclass(thing := getattr(normalnorm, name))
    }
    assert len(layers) > 30
    assert [
        name
        for name, text in layers.items()
        if not re.search(r"^y = .*[√(]", text, re.M)
    ] == []
