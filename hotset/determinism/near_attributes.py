"""The attributes of a dataset, of its transforms, and of objects that these hold directly, as they were.

Many datasets make a generator when they first need it: ``if self.rng is None: self.rng = ...``. A reading
that makes one and draws from it leaves a state behind, and the one in which the generator began cannot be
known. So the objects get back what they had: None, or nothing, and with it what else they had noted of that
(``self.is_ready = False``). Only values of simple types are kept, so that nothing large stays alive.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any

from hotset.determinism.object_graph import attributes, within_reach
from hotset.determinism.outside import dict_of

__all__ = ["Changed", "NearAttributes", "put_back"]

_NEAR, _LEVELS = 64, 3
# By id: a class of the user's may have no hash.
_SIMPLE = frozenset(map(id, (type(None), bool, int, float, str, bytes)))
_OTHER = object()  # in place of a value that is not kept

Changed = tuple[dict[str, Any], dict[str, Any]]
"""The attributes of an object, and those that it had when they were noted."""


class NearAttributes:
    """Notes the attributes of the objects that are near.

    Args:
        holders: the dataset, its transforms.

    Example:
        >>> import random
        >>> holder = types.SimpleNamespace(rng=None, is_ready=False)
        >>> near = NearAttributes([holder])
        >>> holder.rng, holder.is_ready = random.Random(1), True
        >>> near.have_other_types
        True
        >>> put_back(near.with_new((random.Random,)))
        >>> holder
        namespace(rng=None, is_ready=False)
    """

    def __init__(self, holders: Sequence[object]) -> None:
        self._holders = holders
        self.look()

    def look(self) -> None:
        """Find the objects that are near now, and note their attributes."""
        self._objects = list(_near(self._holders))
        self._types = self._types_now()
        self.note()

    def note(self) -> None:
        """From here on, compare with the present attributes."""
        self._noted = [
            {name: value if id(type(value)) in _SIMPLE else _OTHER for name, value in vars(each).items()}
            for each in self._objects
        ]

    @property
    def have_other_types(self) -> bool:
        """Whether an attribute has another type than at the last look: a generator may have been made."""
        return self._types_now() != self._types

    def _types_now(self) -> list[tuple[type, ...]]:
        return [tuple(map(type, vars(each).values())) for each in self._objects]

    def with_new(self, kinds: tuple[type, ...]) -> list[Changed]:
        """The objects in which an attribute that was None or absent reaches an object of these kinds."""
        return [
            (vars(each), noted)
            for each, noted in zip(self._objects, self._noted, strict=True)
            if any(
                value is not None and noted.get(name) is None and any(within_reach([value], kinds))
                for name, value in list(vars(each).items())
            )
        ]


def put_back(objects: Sequence[Changed]) -> None:
    """Give the objects the simple values that were noted, and take away attributes that were not there."""
    for held, noted in objects:
        for name in list(held):
            if name not in noted:
                del held[name]
            elif noted[name] is not _OTHER:
                held[name] = noted[name]


def _has_attributes(obj: object) -> bool:
    return type(dict_of(obj)) is dict and not issubclass(type(obj), types.ModuleType)


def _near(holders: Sequence[object]) -> Iterator[object]:
    """The holders, and the objects with attributes that they hold, two levels down; at most 64 in all."""
    chains: Iterator[Any] = (each if type(each) in (list, tuple) else (each,) for each in holders)
    level = list(itertools.chain.from_iterable(chains))
    seen: dict[int, object] = {}
    for _ in range(_LEVELS):
        level = [each for each in level if _has_attributes(each) and id(each) not in seen]
        for each in level[: _NEAR - len(seen)]:
            seen[id(each)] = each
            yield each
        level = [value for each in level[:_NEAR] for value in attributes(each).values()]
