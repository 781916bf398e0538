"""Every public name has an example, and every example gives what it says; every
argument and every error that a name refuses its arguments with is in its text,
and so are what comes back and, of formulas and methods, the source.

Public is what a module's `__all__` names, and in a class the methods and
properties that its body defines under a public name; not what it overrides
(the class above says what that is for), and not the fields of a tuple. The
example of a function is a `>>>` line that names it: in its own docstring or,
for a method, in that of its class. A class has one in its docstring, which may
get an object of it from a function.

A text speaks of an argument by its name, and may leave it to another text:
"`alpha` as for `newton_lambda`", "see `Parts`", "those of `fgsm`". The text of
a method is its own and its class's, of a class also those that it inherits.

What comes back is said by the first words, where they name it ("The entropy of
…"), or by a sentence with "returns"; for tensors and arrays that sentence gives
the shape, for dictionaries the names, and entropies, times and accuracies have
a unit. A source is a sentence "Source: …" of places in the book (@eq-newton),
papers of its bibliography (Ioffe & Szegedy (2015), §3) or a library's names
(`scipy.stats.norm`). Both may be left to another text: "as `BMLVNorm`".
"""

import ast
import builtins
import collections.abc
import dataclasses
import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import typing
import unicodedata
from pathlib import Path

import numpy
import pytest
import torch
from peers import installed

import normalnorm
from normalnorm.theory.gradient import Gaussianizer

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
    "lab.shipped_chapters": "in a checkout, writes all chapters: seconds",
    "lab.open_lab": "opens a program that stays",
}
# What the examples of a module use beyond the library's own requirements.
NEEDED = {
    "normalnorm.experiments.augmentation": "kornia",
    "normalnorm.experiments.hub": "datasets",
    "normalnorm.experiments.streams": "datasets",
    "normalnorm.analysis.pruning": "torch_pruning",
}


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


def members(cls):
    "The methods and properties that a class adds: names, docstrings."
    for name, value in vars(cls).items():
        function = (
            getattr(value, "fget", None)
            or getattr(value, "func", None)
            or getattr(value, "__func__", value)
        )
        if (
            inspect.isfunction(function)
            and not name.startswith("_")
            and not any(name in vars(b) for b in cls.__mro__[1:])
        ):
            yield name, function.__doc__


def without_example(module):
    "The public names of a module that no example shows."
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        is_class = inspect.isclass(thing)
        if (
            not (is_class or inspect.isroutine(thing))
            or thing.__module__ != module.__name__
            or thing.__name__ != name
        ):  # made by another function
            continue
        shown = examples(thing.__doc__)
        if not shown or not is_class and not re.search(rf"\b{name}\b", shown):
            yield name
        for member, docstring in members(thing) if is_class else ():
            if not (
                re.search(rf"\.{member}\b", shown)
                or re.search(rf"\b{member}\b", examples(docstring))
            ):
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
    found = {
        f"{name.removeprefix('normalnorm.')}.{missing}"
        for name in MODULES
        for missing in without_example(importlib.import_module(name))
    }
    assert found == set(EXEMPT)


def test_examples_are_set_as_code():
    """An example that stands at the margin of its docstring becomes a paragraph
    on the page.
    """
    flush = [
        path.name + ": " + line.strip()
        for path in (Path(normalnorm.__file__).parent).rglob("*.py")
        for docstring in map(
            ast.get_docstring,
            (
                node
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            ),
        )
        for line in (docstring or "").splitlines()
        if line.startswith(">>>")
    ]
    assert flush == []


def test_no_example_is_told_and_not_run():
    told = {
        f"{name.removeprefix('normalnorm.')}.{where}"
        for name in MODULES
        for where, docstring in docstrings(importlib.import_module(name))
        if re.search(r"^\s*Examples?:(?!\s*>>>)", docstring, re.M)
    }
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


def public():
    "Of each public function, class and method: name, itself, its class."
    for name in MODULES:
        module = importlib.import_module(name)
        for short in getattr(module, "__all__", ()):
            thing = getattr(module, short)
            if (inspect.isclass(thing) or inspect.isroutine(thing)) and (
                thing.__module__ == name and thing.__name__ == short
            ):
                where = f"{name.removeprefix('normalnorm.')}.{short}"
                yield where, thing, None
                for member, _ in (
                    members(thing) if inspect.isclass(thing) else ()
                ):
                    value = inspect.getattr_static(thing, member)
                    yield (
                        f"{where}.{member}",
                        getattr(value, "fget", None)
                        or getattr(value, "func", None)
                        or getattr(value, "__func__", value),
                        thing,
                    )


@functools.cache
def by_name():
    "Public things by their last name, and by class and method."
    found = {}
    for where, thing, _ in public():
        parts = where.split(".")
        found[parts[-1]] = found[".".join(parts[-2:])] = thing
    return found


REFERRAL = re.compile(
    r"\b(?:as|those\s+of|see|an?)\s+"
    r"(?:(?:for|in|of|with|an?)\s+)?`([\w.]+)`",
    re.I,
)


def meant(name, module, cls=None):
    "What a name in a docstring of `module` stands for, if it is public."
    for root in (cls, module, torch):
        thing = root
        for part in re.sub(r"^(torch|normalnorm)\.", "", name).split("."):
            thing = getattr(thing, part, None)
        if inspect.isclass(thing) or inspect.isroutine(thing):
            return thing
    return by_name().get(name) or by_name().get(".".join(name.split(".")[-2:]))


def texts(thing, cls=None, seen=None):
    "What is said of a thing, in its own docstrings and where they lead to."
    seen, found = set() if seen is None else seen, []
    sources = [thing, *([cls] if cls else ())]
    if inspect.isclass(thing):
        sources += [
            thing.__init__,
            *(
                base
                for base in thing.__mro__[1:]
                if base.__module__.startswith("normalnorm")
            ),
        ]
    for source in sources:
        if id(source) in seen:
            continue
        seen.add(id(source))
        prose = "".join(
            piece
            for piece in doctest.DocTestParser().parse(
                inspect.cleandoc(source.__doc__ or "")
            )
            if isinstance(piece, str)
        )
        found.append(prose)
        if not (getattr(source, "__module__", "") or "").startswith(
            "normalnorm"
        ):
            try:  # PyTorch's, say
                found.append(str(inspect.signature(source)))
            except (ValueError, TypeError):
                pass
            continue
        for name in REFERRAL.findall(prose):
            other = meant(name, importlib.import_module(source.__module__), cls)
            if other is not None:
                found += texts(other, seen=seen)
                if source is cls and inspect.isclass(other):
                    found += texts(
                        getattr(other, thing.__name__, other), seen=seen
                    )
    return found


def spoken_of(name, said):
    'Whether one of the texts has the name; of "a" only where it is marked.'
    if name == "a":
        said = [" ".join(re.findall("`([^`]+)`", text)) for text in said]
    return any(
        re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for text in said
    )


def arguments(thing):
    if inspect.isclass(thing) and not {"__init__", "__new__"} & set(
        vars(thing)
    ):
        return []  # inherited, said there
    try:
        names = inspect.signature(thing).parameters
    except (ValueError, TypeError):  # of an exception
        return []
    return [
        name
        for name in names
        if name not in ("self", "cls") and not name.startswith("_")
    ]


def unsaid(thing, cls=None):
    "The arguments that no text speaks of."
    said = texts(thing, cls)
    return [name for name in arguments(thing) if not spoken_of(name, said)]


def test_every_argument_is_in_the_text():
    missing = {
        where: names
        for where, thing, cls in public()
        if (names := unsaid(thing, cls))
    }
    assert missing == {}


@functools.cache
def raised(function):
    """The errors that a function raises in its own lines and does not catch,
    and the names of what it calls there.
    """
    found, called = set(), set()

    def walk(node, caught):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
                continue
            inside = caught
            if isinstance(node, ast.Try) and child in node.body:
                inside = caught | {
                    n.id
                    for handler in node.handlers
                    if handler.type
                    for n in ast.walk(handler.type)
                    if isinstance(n, ast.Name)
                }
            if isinstance(child, ast.Raise) and isinstance(
                child.exc, ast.Call | ast.Name
            ):
                name = getattr(child.exc, "func", child.exc)
                name = getattr(name, "id", getattr(name, "attr", ""))
                if name[:1].isupper() and name not in inside:
                    found.add(name)
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
                called.add(child.func.id)
            walk(child, inside)

    walk(
        ast.parse(textwrap.dedent(inspect.getsource(function))).body[0],
        frozenset(),
    )
    return found, called


# An abstract method's, an end of an iterator, and those that no caller who does
# what the text says can see.
QUIET = {
    "NotImplementedError",
    "StopIteration",
    "AssertionError",
    "AttributeError",
}


def refusals(function):
    """The errors of a function and of the checkers that it calls directly, of
    these `TypeError` and `ValueError` only: what it asks of its arguments.
    """
    function = inspect.unwrap(function)
    if (
        not inspect.isfunction(function)
        or not (function.__module__ or "").startswith("normalnorm")
        or function.__code__.co_filename.startswith("<")
    ):
        return set()
    found, called = raised(function)
    found = set(found)
    for name in called:
        checker = function.__globals__.get(name)
        if (
            name.startswith(("_", "check"))
            and inspect.isfunction(checker)
            and checker.__module__.startswith("normalnorm")
        ):
            found |= raised(inspect.unwrap(checker))[0] & {
                "TypeError",
                "ValueError",
            }
    return found - QUIET


def not_announced(thing, cls=None):
    "The errors that no text speaks of."
    functions = [thing]
    if inspect.isclass(thing):
        functions = [
            value
            for name in (
                "__init__",
                "__post_init__",
                "__new__",
                "forward",
                "__call__",
            )
            if (value := vars(thing).get(name))
        ]
    said = texts(thing, cls)
    return sorted(
        name
        for name in set().union(*map(refusals, functions))
        if not spoken_of(name, said)
    )


def test_every_refusal_is_in_the_text():
    missing = {
        where: names
        for where, thing, cls in public()
        if (names := not_announced(thing, cls))
    }
    assert missing == {}


def _positive(x):
    if x <= 0:
        raise ValueError(x)


def test_what_counts_as_said():
    def root(x, places=3):
        "The root of `x`."
        _positive(x)
        try:
            raise KeyError(x)
        except KeyError:
            return round(x**0.5, places)

    def power(x, exponent):
        "`x` to the `exponent`; raises `ValueError` for a negative `x`."
        _positive(x)
        raise TypeError

    class Both:
        "Arguments as for `torch.nn.LayerNorm`."

        def __init__(self, normalized_shape, eps, grit):
            "With a number."

    for thing in (root, power, _positive):
        thing.__module__ = "normalnorm.claims"
    assert unsaid(root) == ["places"] and unsaid(power) == []
    power.__globals__["_positive"].__module__ = "normalnorm.claims"
    assert not_announced(root) == ["ValueError"]
    assert not_announced(power) == ["TypeError"]
    Both.__module__ = Both.__init__.__module__ = "normalnorm.claims"
    assert unsaid(Both) == ["grit"]


class Names(dict):
    "What is imported for type checkers only counts as an object."

    def __missing__(self, name):
        return object


def evaluated(kind, names):
    "A type that is written as text; `names`: what its module knows."
    kind = getattr(kind, "__forward_arg__", kind)
    return (
        eval(kind, {}, Names(vars(builtins) | names))
        if isinstance(kind, str)
        else kind
    )


def leaves(kind):
    "The types within a type: `Tensor` and `float` of a tuple of both."
    inner = typing.get_args(kind)
    if not inner or typing.get_origin(kind) is collections.abc.Callable:
        return {kind}
    return set().union(*map(leaves, inner)) - {...}


def returned(function):
    "What a function says it returns, as a type."
    given = inspect.signature(function).return_annotation
    return (
        None
        if given is inspect.Signature.empty
        else evaluated(given, inspect.unwrap(function).__globals__)
    )


def parts(kind):
    "The types within a type, and within named tuples and dataclasses of ours."
    kinds = leaves(kind)
    for kind in list(kinds):
        if getattr(kind, "__module__", "").startswith("normalnorm") and (
            dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
        ):
            names = vars(sys.modules[kind.__module__])
            for part in kind.__annotations__.values():
                kinds |= leaves(evaluated(part, names))
    return kinds


def paragraphs(thing):
    "A docstring without its examples, each paragraph on one line."
    text = "".join(
        piece
        for piece in doctest.DocTestParser().parse(
            inspect.cleandoc(thing.__doc__ or "")
        )
        if isinstance(piece, str)
    )
    return [" ".join(p.split()) for p in text.split("\n\n") if p.strip()]


# "As `X`" says that a thing does what another does, and a text that begins with
# "`X`, but …" too; "`alpha` as for `X`" speaks of an argument only.
SAME = re.compile(r"(?:\A|\b[Aa]s )`([\w.]+)`")


def told(thing, cls=None, seen=()):
    "The paragraphs of a thing and of those that its text says it is like."
    found = paragraphs(thing)
    module = getattr(thing, "__module__", None) or ""
    if module.startswith("normalnorm"):
        for name in SAME.findall("\n".join(found)):
            other = meant(name, importlib.import_module(module), cls)
            if (
                other is not None
                and other not in (*seen, thing)
                and (getattr(other, "__module__", None) or "").startswith(
                    "normalnorm"
                )
            ):
                found += told(other, None, (*seen, thing))
    return found


# How a sentence speaks of what comes back, and of its shape.
BACK = re.compile(
    r"\b(?:return(?:s|ed)?|yields?|results?)\b|\bkept\b|→|"
    r"^(?:Broadcast s|S)hapes?\b|"
    r"\b(?:float\d*|u?int\d+|bool)\b.* shape \(",
    re.I,
)
SHAPE = re.compile(
    r"\b(?:shape|size)s?\b|\bscalars?\b|\bkept\b|"
    r"\b(?:for|of|per|a) each\b|\bone (?:number|for)\b|"
    r"\(…[,)]|\([A-Za-z]\w*(?:, [A-Za-z0-9]\w*)*,?\)|×|"
    r"\bas (?:for |the )?`\w+`"
)
# A text that begins with a noun or a formula says what comes back; one that
# begins with a verb says what is done.
NOUN = re.compile(
    r"(?:The|An?|How|Whether|What|Which|Where|When|That|Each|"
    r"Every|All|Both|One|Two|Twice|Half|Its|For|True|Enough)\b|"
    r"[`(\"\W\d]|\w\b|\w*[^A-Za-z ,.;:'’-]"
)
# Quantities that have a unit, and the units.
UNITS = {
    r"\b(?:neg)?entropy\b|\bentropies\b|\bmutual information\b|"
    r"\bdivergence\b|\blog.likelihood\b": r"\bnats?\b|\bbits?\b",
    r"\bseconds?\b|\bduration\b": r"\bseconds?\b|\bms\b",
    r"\baccurac(?:y|ies)\b": r"\bper ?cent\b|\bshare\b|%",
}
# What says which names a dictionary has.
KEYS = re.compile(r"→|\bby\b|\bkeys?\b|\bnames?\b|\"\w+\"|\b(?:of|for) each\b")


def result_unsaid(thing, cls=None):
    "What a text leaves open of what a function returns; empty: nothing."
    if inspect.isclass(thing):
        return ""
    kind = returned(thing)
    kinds = leaves(kind)
    if kinds <= {None, type(None), typing.Self, typing.NoReturn}:
        return ""
    text = told(thing, cls)
    said = [
        sentence
        for paragraph in text
        for sentence in re.split(r"(?<=[.;:]) ", paragraph)
        if BACK.search(sentence)
    ]
    if not said and not NOUN.match(text[0] if text else "Nothing"):
        return "what comes back"
    if kinds & {torch.Tensor, numpy.ndarray} and not any(
        map(SHAPE.search, said)
    ):
        return "its shape"
    if parts(kind) & {float, torch.Tensor} and any(
        re.search(quantity, text[0], re.I)
        and not re.search(unit, " ".join(text), re.I)
        for quantity, unit in UNITS.items()
    ):
        return "its unit"
    if typing.get_origin(kind) is dict and not KEYS.search(" ".join(text)):
        return "its names"
    return ""


def test_every_text_says_what_comes_back():
    missing = {
        where: unsaid
        for where, thing, cls in public()
        if (unsaid := result_unsaid(thing, cls))
    }
    assert missing == {}


def test_what_counts_as_said_of_a_result():
    def bare(x) -> torch.Tensor:
        "Square `x`."

    def shapeless(x) -> torch.Tensor:
        "Square `x`, of any shape; returns the squares."

    def whole(x) -> torch.Tensor:
        "Square `x`; returns its shape."

    def like(x) -> tuple[torch.Tensor, float]:
        "The square, as `project`."

    def entropy(p) -> float:
        "The entropy of `p`."

    def table() -> dict[str, float]:
        "The numbers."

    def itself(x) -> None:
        "Square `x` in place."

    like.__module__ = "normalnorm.theory.gradient"
    assert [
        result_unsaid(f)
        for f in (bare, shapeless, whole, like, entropy, table, itself)
    ] == ["what comes back", "its shape", "", "", "its unit", "its names", ""]


# Modules of which nothing is a formula or a paper's method, by what they are
# for: figures, the command line, the ledger; engines, which compute what the
# definition says, and the table of layers; files, texts and images, the
# training loop, and results with their tables.
WITHOUT_SOURCE = re.compile(
    r"normalnorm\.(?:plots|cli|lab|names|claims"
    r"|layers\.(?:backends|engines\..*|families|factory)"
    r"|experiments\.(?:data|hub|idx|text|streams|glyphs|train|results|tables"
    r"|spread|recipes\..*))"
)


@functools.cache
def places():
    "The labels of the book's equations, and its chapters' numbers."
    found = set()
    for path in Path(__file__).parents[1].glob("nbs/*.ipynb"):
        found |= {
            path.name[:3],
            *re.findall(r"\{#(eq-[\w-]+)", path.read_text(encoding="utf-8")),
        }
    return found


@functools.cache
def bibliography():
    "First author and year of each entry."
    text = (Path(__file__).parents[1] / "references.bib").read_text(
        encoding="utf-8"
    )
    return re.findall(r"^@\w+\{([a-z]+)(\d{4})", text, re.M)


def plain(name):
    "In lower case, without accents and apostrophes: as in the bibliography."
    return re.sub(r"[^a-z]", "", unicodedata.normalize("NFKD", name).lower())


def leads_nowhere(source):
    """What is wrong with a source: an equation or a chapter that the book does
    not have, another label (which no page makes a link), a paper that its
    bibliography does not have or whose year is not "(2021)", or none of these
    and no name in backticks.
    """
    inside = re.findall(r"@([a-z]+-[\w-]*\w)", source) + re.findall(
        r"\bchapter (\d{3})\b", source
    )
    papers = re.findall(r"([^;()]*) \(((?:1[89]|20)\d\d)\)", source)
    wrong = [
        *set(inside) - places(),
        *re.findall(r"(?:\.|[a-zé]) (?:1[89]|20)\d\d\b", source),
        *(
            f"{authors} ({year})"
            for authors, year in papers
            if not any(
                key.endswith(plain(name)) and year == of
                for name in re.findall(r"[A-ZÀ-Þ][\w'’-]+", authors)
                for key, of in bibliography()
            )
        ),
    ]
    return wrong or not (inside or papers or "`" in source)


# Methods and functions of PyTorch that change the form of a value, or tell of
# it, and compute nothing.
CONVERSIONS = {
    "as_tensor",
    "asarray",
    "cat",
    "clone",
    "detach",
    "device",
    "double",
    "empty",
    "flatten",
    "float",
    "from_numpy",
    "full",
    "full_like",
    "isfinite",
    "item",
    "movedim",
    "numel",
    "ones",
    "ones_like",
    "promote_types",
    "reshape",
    "set_",
    "split",
    "squeeze",
    "stack",
    "tensor",
    "to",
    "type",
    "unbind",
    "unsqueeze",
    "view",
    "zeros",
    "zeros_like",
}


def of_numbers(node):
    "Whether an operation is not one of texts or of sequences."
    if isinstance(node, ast.BinOp):
        return of_numbers(node.left) and of_numbers(node.right)
    return not (
        isinstance(node, ast.JoinedStr | ast.Tuple | ast.List)
        or isinstance(getattr(node, "value", None), str)
    )


def computes(function, seen=()):
    """Whether a function's lines have arithmetic, or call an argument, an own
    method, what has a name of arithmetic in PyTorch, or a function of the
    package, for its result, of which the same can be said.
    """
    function = inspect.unwrap(function)
    given = inspect.signature(function).parameters
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    for node in (n for part in tree.body for n in ast.walk(part)):
        if (
            isinstance(node, ast.BinOp | ast.AugAssign)
            and not isinstance(node.op, ast.BitOr | ast.BitAnd)
            and of_numbers(node)
        ):
            return True
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", "")
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if (
            name == "apply"
            or not name.startswith(("_", "is_"))
            and (name not in CONVERSIONS)
            and (
                hasattr(torch, name)
                or hasattr(torch.nn.functional, name)
                or owner in ("self", "np", "math", "scipy", "special")
            )
        ):
            return True
        name = getattr(node.func, "id", "")
        called = function.__globals__.get(name)
        if (
            name in given
            and name != "cls"
            and not seen
            or (
                inspect.isfunction(called)
                and called not in (*seen, function)
                and called.__module__.startswith("normalnorm")
                and returned(called) is not None
                and computes(called, (*seen, function))
            )
        ):
            return True
    return False


def needs_source(thing, cls=None):
    """Layers and gaussianizers, and what computes tensors or numbers, outside
    of the modules above.
    """
    if WITHOUT_SOURCE.fullmatch((cls or thing).__module__):
        return False
    if inspect.isclass(thing):
        return issubclass(thing, torch.nn.Module | Gaussianizer)
    return bool(
        parts(returned(thing)) & {torch.Tensor, numpy.ndarray, float}
    ) and computes(thing)


def sources(thing, cls=None):
    "Where a text says that it comes from; a method's class may say it."
    text = told(thing, cls)
    for owner in cls.__mro__ if cls else ():
        if owner.__module__.startswith("normalnorm"):
            text += told(owner)
    return re.findall(r"\bSource: (.+?)(?=$| Raises )", "\n".join(text), re.M)


def test_every_formula_and_method_says_where_it_comes_from():
    missing = [
        where
        for where, thing, cls in public()
        if needs_source(thing, cls) and not sources(thing, cls)
    ]
    assert missing == []


def test_every_source_leads_somewhere():
    wrong = {
        where: found
        for where, thing, _ in public()
        for source in re.findall(
            r"\bSource: (.+?)(?=$| Raises )", "\n".join(paragraphs(thing)), re.M
        )
        if (found := leads_nowhere(source))
    }
    assert wrong == {}


def test_what_counts_as_a_source():
    for source in (
        "@eq-newton.",
        "Labatie et al. (2021), Eq. 5; @eq-power.",
        "D'Agostino & Pearson (1973).",
        "Székely et al. (2007).",
        "van Laarhoven (2017).",
        "`scipy.stats.norm`.",
        "an exercise of chapter 325.",
    ):
        assert not leads_nowhere(source), source
    for source in (
        "@eq-nowhere.",
        "@eq-newton; @sec-axes.",
        "chapter 999.",
        "Labatie et al. 2021, Eq. 5; @eq-power.",
        "Labatie et al. (2020).",
        "Nobody (2021); @eq-power.",
        "this book.",
        "the papers.",
    ):
        assert leads_nowhere(source), source

    def half(x) -> float:
        "Half of `x`."
        return x / 2

    def taken(x) -> float:
        "The number."
        return float(x.item())

    class Layer(torch.nn.Module):
        "A layer. Source: Ba et al. (2016)."

        def mean(self, x) -> torch.Tensor:
            return x.mean()

    for thing in (half, taken, Layer):
        thing.__module__ = "normalnorm.theory.newton"
    assert needs_source(half) and not sources(half)
    assert not needs_source(taken) and needs_source(Layer)
    assert needs_source(Layer.mean, Layer) and sources(
        Layer.mean, Layer
    ) == sources(Layer) == ["Ba et al. (2016)."]
    half.__module__ = "normalnorm.experiments.results"
    assert not needs_source(half)
