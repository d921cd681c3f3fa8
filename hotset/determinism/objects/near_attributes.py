"""The attributes of a dataset, of its transforms, and of objects that these hold directly, as they were.

Many datasets make a generator when they first need it: ``if self.rng is None: self.rng = ...``. A reading
that makes one and draws from it leaves a state behind, and the one in which the generator began cannot be
known. So the objects get back what they had: None, or nothing, and with it what else they had noted of that
(``self.is_ready = False``). Only values of simple types are kept, so that nothing large stays alive.

That is noted with every few samples that are read. So :mod:`hotset.determinism.objects.names` does not do it:
it keeps all values, and looks at what they hold, for readings that are rare.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hotset.determinism.objects.object_graph import attributes, parts_of_chains, within_reach
from hotset.determinism.objects.safe_access import attributes_of, dict_of, set_attribute
from hotset.store.leaves.instances import slots_of

__all__ = ["Changed", "NearAttributes", "near_objects", "put_back"]

_NEAR, _LEVELS = 64, 3
# By id: a class of the user's may have no hash.
_SIMPLE = frozenset(map(id, (type(None), bool, int, float, str, bytes)))
_OTHER = object()  # in place of a value that is not kept

Changed = tuple[object, dict[str, Any]]
"""An object, and the attributes that it had when they were noted."""


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
        self._objects = [(each, bool(slots_of(each))) for each in near_objects(self._holders)]
        self._types = self._types_now()
        self.note()

    def note(self) -> None:
        """From here on, compare with the present attributes."""
        self._noted = [
            {name: value if id(type(value)) in _SIMPLE else _OTHER for name, value in held.items()}
            for held in self._now()
        ]

    @property
    def have_other_types(self) -> bool:
        """Whether an attribute has another type than at the last look: a generator may have been made."""
        return self._types_now() != self._types

    def _types_now(self) -> list[tuple[type, ...]]:
        return [tuple(map(type, held.values())) for held in self._now()]

    def _now(self) -> Iterator[dict[str, Any]]:
        """The attributes of each object; it is asked for with each sample that is read."""
        for each, has_slots in self._objects:
            yield (attributes_of(each) or {}) if has_slots else vars(each)

    def with_new(self, kinds: tuple[type, ...]) -> list[Changed]:
        """The objects in which an attribute that was None or absent reaches an object of these kinds."""
        return [
            (each, noted)
            for (each, _), held, noted in zip(self._objects, self._now(), self._noted, strict=True)
            if any(
                value is not None and noted.get(name) is None and any(within_reach([value], kinds))
                for name, value in list(held.items())
            )
        ]


def put_back(objects: Sequence[Changed]) -> None:
    """Give the objects the simple values that were noted, and take away attributes that were not there."""
    for owner, noted in objects:  # never without an attribute in between: an interrupt may come
        for name, value in noted.items():
            if value is not _OTHER:
                set_attribute(owner, name, value)
        for name in (attributes_of(owner) or {}).keys() - noted.keys():
            set_attribute(owner, name)


def _has_attributes(obj: object) -> bool:
    if type(dict_of(obj)) is dict:
        return not issubclass(type(obj), types.ModuleType)
    # Where hotset has slots and no dict, what looks through a dataset must not find the store.
    return bool(slots_of(obj)) and not str(type(obj).__module__).startswith("hotset.")


def near_objects(holders: Iterable[object]) -> Iterator[object]:
    """The holders, and the objects with attributes that they hold, two levels down; at most 64 in all."""
    level = list(parts_of_chains(holders))
    seen: dict[int, object] = {}
    for _ in range(_LEVELS):
        level = [each for each in level if _has_attributes(each) and id(each) not in seen]
        for each in level[: _NEAR - len(seen)]:
            seen[id(each)] = each
            yield each
        level = [value for each in level[:_NEAR] for value in attributes(each).values()]
