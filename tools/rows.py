"""The table of layers as things to try: each row with an input, made in the
same way for all, and the plain layer beside it that it is compared with.

`tools.hostile` and the tests take their layers from here: a new row is tried
without another word.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normalnorm.layers import families
from normalnorm.layers.families import Family
from normalnorm.theory.gradient import Identity
from tools.references import reference

SIZES = {"B": 3, "C": 4, "L": 6, "D": 3, "H": 5, "W": 6}


def accepted(cls: type) -> set[str]:
    """The names of the arguments that a class takes, and those of a parent to
    which it passes on what it does not name.
    """
    found = set()
    for c in cls.__mro__:
        if "__init__" in vars(c):
            own = inspect.signature(c.__init__).parameters
            found |= set(own)
            if not any(p.kind is p.VAR_KEYWORD for p in own.values()):
                break
    return found


class Last(nn.Module):
    "PyTorch's layer norm over the channels of images."

    def __init__(self, plain: nn.LayerNorm):
        super().__init__()
        self.weight, self.bias, self.eps = plain.weight, plain.bias, plain.eps
        self.normalized_shape = plain.normalized_shape

    def forward(self, x):
        return nn.functional.layer_norm(
            x.permute(0, 2, 3, 1),
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
        ).permute(0, 3, 1, 2)


MODES = {
    "default": {},
    "momentum None": dict(momentum=None),
    "no running averages": dict(track_running_stats=False),
    "no affine map": dict(affine=False, elementwise_affine=False),
    "no bias": dict(bias=False),
}


class Trial(NamedTuple):
    """A row with one kind of its inputs, such as "B C L"; an input may have
    several axes of channels in the place of C. `settings`: what all its layers
    are made with, `about` them in words.

    `ours` and `theirs` make the layer and the plain one with the same options;
    what one of them does not have is left out.
    """

    row: Family
    kind: str
    shape: tuple[int, ...]
    settings: dict = {}
    about: str = ""

    @property
    def name(self) -> str:
        row = self.row
        return (
            row.names[0]
            if row.names
            else families.twins(row.layer)[0].names[0] + ", plain"
            if families.twins(row.layer)
            else row.layer.__name__
        )

    def __str__(self) -> str:
        return f"{self.name} {self.kind}" + f", {self.about}" * bool(self.about)

    def having(self, about: str = "", **settings) -> "Trial":
        "The same with more settings."
        return self._replace(settings=self.settings | settings, about=about)

    @property
    def at(self) -> int:
        "The axis of the channels, the first if they have several."
        return self.kind.split().index("C")

    @property
    def channels(self) -> int | tuple[int, ...]:
        several = len(self.shape) - len(self.kind.split()) + 1
        found = self.shape[self.at : self.at + several]
        return found if several > 1 else found[0]

    @property
    def known(self) -> set[str]:
        "The arguments of the layer."
        return accepted(self.row.layer)

    @property
    def averages(self) -> list[str]:
        return [
            name
            for name, _ in self.ours().named_buffers()
            if name.startswith("running_")
        ]

    @property
    def standard(self) -> bool:
        "Whether the plain layer is PyTorch's, over one set of axes."
        plain = self.row.plain
        return (
            isinstance(plain, type)
            and plain.__module__.startswith("torch.nn")
            and self.row.centre is None
        )

    def modes(self) -> dict[str, dict]:
        "The settings of `MODES` that the layer has, by their names."
        return {
            name: options
            for name, options in MODES.items()
            if not options or self.known & set(options)
        }

    def wide(self, values):
        "Parameters, or averages, of the channels so that they broadcast."
        after = len(self.shape) - self.at - values.ndim
        return values.reshape(*values.shape, *(1,) * after)

    def sets(self, letters: str) -> Tensor:
        """Of each element of an input the number of the set that it belongs to,
        where there is one for each element of the axes `letters`.
        """
        told, kinds = set(letters.split()), self.kind.split()
        told |= set(kinds) - {"B", "C"} if "…" in told else set()
        found = torch.zeros(self.shape, dtype=torch.long)
        several = len(self.shape) - len(kinds)
        axes = [*range(self.at + 1), *range(self.at + 1 + several, found.ndim)]
        for letter, i in zip(kinds, axes):
            part = torch.arange(n := self.shape[i])
            if letter == "C" and "G" in told:
                part = part // (n // 2)
            elif letter not in told:
                continue
            found = found * n + part.view(-1, *(1,) * (found.ndim - 1 - i))
        return found

    def units(self, values):
        "Of an array the elements that share statistics, as rows."
        return values.reshape(-1)[self.places()]

    def places(self):
        "Where the elements of each unit lie in a flat array."
        found = self.sets(self.row.unit).flatten()
        return found.argsort(stable=True).view(len(found.unique()), -1).numpy()

    def whole(self, rows):
        "The array of which `units` gave the rows."
        return rows.ravel()[self.places().ravel().argsort()].reshape(self.shape)

    def ours(self, **options) -> nn.Module:
        return _made(
            self.row.make,
            self.row.layer,
            self.channels,
            {**self.settings, **options},
        )

    def theirs(self, **options) -> nn.Module:
        """The twin, if somebody else has written it; otherwise that of the
        first row with the same kind of input and units, of which groups of one
        channel are channels. Where more than one set has a part in it: what
        the row says, by axes.
        """
        options = {**self.settings, **options}
        known = {"gaussianizer": Identity()} | {
            k: v
            for k, v in options.items()
            if k not in ("noise", "alpha", "steps", "safeguard", "gaussianizer")
        }
        bare = self._replace(settings={}).ours(**known)
        if (found := reference(bare, self.row, self.kind)) is not None:
            return found
        unit = (
            self.row.unit.replace("G", "C")
            if self.row.over_batch()
            else (self.row.unit)
        )
        row = next(
            row
            for row in (
                *(families.twins(self.row.plain)[:1] if self.row.plain else ()),
                *families.rows(),
            )
            if isinstance(row.plain, type)
            and not row.plain.__module__.startswith("normalnorm")
            and row.synchronized is not row.layer
            and (
                row is self.row
                or row.unit == unit
                and row.centre is None
                and self.kind in row.inputs()
                or row.plain is self.row.plain
            )
        )
        plain = self.twin(row.plain, **options)
        return plain if self.kind in row.inputs() else Last(plain)

    def twin(self, cls: type, **options) -> nn.Module:
        "A plain class, such as the row's, with the channels of the input."
        plain = _made(
            lambda n, **o: (
                cls(o.pop("num_groups"), n, **o)
                if "num_groups" in o
                else cls(n, **o)
            ),
            cls,
            self.channels,
            {k: v for k, v in options.items() if k != "noise"},
        )
        if options.get("bias") is False:
            plain.bias = None  # torch 2.4 has no such argument
        return plain


def _made(make: Callable, cls: type, channels: int, options: dict) -> nn.Module:
    known, given = accepted(cls), dict(options)
    plain = given.get("alpha") == 0 and given.get("noise") == 0
    given = {
        "affine": True,
        "track_running_stats": True,
        "num_groups": 2,
        "group_size": 1 if plain else 2,
        **given,
    }
    if "gaussianizer" in given and "alpha" in given:
        if not given.pop("alpha"):
            given["gaussianizer"] = Identity()
    if "group_size" in known:
        del given["num_groups"]
    return make(channels, **{k: v for k, v in given.items() if k in known})


def trials(sizes: dict[str, int] = SIZES) -> list[Trial]:
    """Every public row with each kind of its inputs, or, where it takes any
    number of axes, with images, and with sequences where channels come last.
    """
    found = []
    for row in families.rows():
        if row.layer.__name__.startswith("_"):
            continue
        for kind in (
            row.inputs()
            if "…" not in row.axes
            else ["B L C" if row.axes.endswith("C") else "B C H W"]
        ):
            letters = kind.split()
            if "B" in letters:
                size = sizes | ({"B": 3 * sizes["B"]} if kind == "B C" else {})
                found.append(Trial(row, kind, tuple(map(size.get, letters))))
    return found
