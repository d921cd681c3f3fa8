"""The attributes of a dataset as they were: put back after reading, or compared later.

**Put back.** Many datasets open a file, a database or a connection when they read first, so that each worker
has its own: such a handle cannot be pickled, and is often not to be used after a fork. Others note what they
have read, and go by it: Ultralytics' draws the pictures of a mosaic from a list of those read last. With
torch's loader the main process of a program with workers reads nothing. Planning reads a few samples there,
and would leave an open handle behind, which a spawned worker could not get and forked ones would share, or
have other pictures drawn.

So the attributes of the dataset, of the datasets that it wraps, and of the objects of the user's classes that
these hold, are set to what they were; lists, dicts, sets and deques among them get the elements that they
had, and small arrays and tensors their numbers. So are those of its transforms, before the cache gets its
fingerprint: a transform that counts its calls, or loads a network when it is called first, would have another
one in the process that plans than in all others. An object is left alone if a container of another kind has
grown or shrunk meanwhile, as its attributes may describe the container.

**Compared.** A method of the dataset may set attributes on which samples depend (``close_mosaic()``). Values
are compared by identity, numbers and text by value, containers element by element at any depth, arrays and
what processes share by their bytes (:mod:`hotset.determinism.contents`). What a method seems to have computed
once, and kept, does not count.

Looking at all of a large dataset would take longer than reading it. So there is :class:`Room` for so many
elements and bytes: of what has no room only the identity counts, and the length of a container.
"""

from __future__ import annotations

import argparse
import functools
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from hotset.determinism.batch_transform import TakesBatches
from hotset.determinism.code_dependencies import is_users
from hotset.determinism.contents import content_of, put_content
from hotset.determinism.object_graph import held_objects

__all__ = ["HeldAttributes", "Room"]

_FILLED = (list, dict, set, deque, OrderedDict, defaultdict)  # and no subclasses: their methods may do more
_CONTAINERS = (list, dict, set, deque, bytearray)
_ENTERED = (list, tuple, dict, set, deque)
_PLAIN = (bool, int, float, complex, str, bytes)
_PLAIN_TYPES = frozenset({*_PLAIN, type(None)})
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_WRAPPED = 64
_DEPTH = 8


@dataclass
class Room:
    """How much is looked at.

    Attributes:
        elements: of containers.
        bytes: of arrays and tensors.
        outermost: whether the elements of a container that is itself an attribute count, however many.
    """

    elements: int = 50_000
    bytes: int = 4 << 20
    outermost: bool = True

    @classmethod
    def larger(cls) -> Room:
        """Room for all that another has room for, wherever that one begins to look."""
        return cls(4 * cls.elements, 4 * cls.bytes)


class _Seen(NamedTuple):
    """A value that can be changed in place, as it was.

    Attributes:
        value: the value.
        content: the bytes of an array; of a container its length, if there was no room, or else
        inner: its elements, and those of them that can be changed in place, by number.
    """

    value: Any
    content: bytes | int | None
    inner: tuple[list[Any], dict[int, _Seen]] | None = None

    @classmethod
    def of(cls, value: Any, room: Room, depth: int = 0) -> _Seen | None:
        """None for a value that cannot be changed in place, or not be seen to be."""
        if not isinstance(value, _ENTERED):
            content = content_of(value, room.bytes)
            room.bytes -= len(content or b"")
            return cls(value, content) if content is not None else None
        elements = _listed(value)
        has_room = len(elements) <= room.elements and depth <= _DEPTH
        if not has_room and not (room.outermost and depth == 0):
            return cls(value, len(elements))
        inner = {}
        if has_room:
            room.elements -= len(elements)
        if has_room and not _PLAIN_TYPES.issuperset(map(type, elements)):
            inner = {
                number: seen
                for number, each in enumerate(elements)
                if type(each) not in _PLAIN_TYPES and (seen := cls.of(each, room, depth + 1)) is not None
            }
        return cls(value, None, (elements, inner)) if inner or not isinstance(value, tuple) else None

    def is_as_it_was(self) -> bool:
        """Whether the value holds what it held."""
        if isinstance(self.content, int):
            return len(_listed(self.value)) == self.content
        if self.inner is None:
            return content_of(self.value, len(self.content or b"")) == self.content
        elements, inner = self.inner
        return _same_elements(_listed(self.value), elements) and all(
            each.is_as_it_was() for each in inner.values()
        )

    def put_back(self) -> None:
        """Have the value hold again what it held, as far as it can."""
        if isinstance(self.content, bytes):
            if not self.is_as_it_was():
                put_content(self.value, self.content)
        elif self.inner is not None:
            elements, inner = self.inner
            if type(self.value) in _FILLED and not _same_elements(_listed(self.value), elements):
                _fill(self.value, elements)
            for each in inner.values():
                each.put_back()


class _Owner(NamedTuple):
    """An object, and what it held.

    Attributes:
        owner: the object.
        held: its attributes.
        seen: of those that can be changed in place, by name.
        lengths: of its containers that cannot be filled again.
    """

    owner: Any
    held: dict[str, Any]
    seen: dict[str, _Seen]
    lengths: list[int]

    @classmethod
    def of(cls, owner: Any, room: Room) -> _Owner:
        held = {name: value for name, value in vars(owner).items() if not name.startswith("_hotset")}
        seen = {name: found for name, value in held.items() if (found := _Seen.of(value, room)) is not None}
        return cls(owner, held, seen, _lengths(held))


class HeldAttributes:
    """The attributes of a dataset, and of what it holds, as they are when this is made.

    Args:
        dataset: the dataset, before it is read.
        transforms: its transforms, before they are called.
        room: how much is looked at; it is used up.

    Example:
        >>> import types
        >>> dataset = types.SimpleNamespace(file=None, read=[], box={"size": [3, 4]})
        >>> held = HeldAttributes(dataset)
        >>> dataset.file = "an open file"
        >>> dataset.read.append(7)
        >>> dataset.box["size"][0] = 5
        >>> held.changed()
        'file'
        >>> held.put_back()
        >>> dataset
        namespace(file=None, read=[], box={'size': [3, 4]})
    """

    def __init__(
        self,
        dataset: Any,
        transforms: Iterable[Any] = (),
        room: Room | None = None,
    ) -> None:
        room = Room() if room is None else room
        owners: dict[int, Any] = {}
        for holder in [dataset, *map(_holder, transforms)]:
            for owner in _owners(holder, 0):
                for each in (owner, *_users_objects(owner)):
                    owners.setdefault(id(each), each)
        self._held = [_Owner.of(owner, room) for owner in owners.values()]

    def put_back(self) -> None:
        """Set all attributes to what they were, with the elements that they had."""
        for owner, held, seen, lengths in self._held:
            now = vars(owner)
            if _lengths(held) != lengths:
                continue
            for name in [name for name in now if name not in held and not name.startswith("_hotset")]:
                del now[name]
            for name, value in held.items():
                if name not in now or now[name] is not value:
                    now[name] = value
            for each in seen.values():
                each.put_back()

    def changed(self) -> str | None:
        """The name of an attribute that is another now; None if all are what they were."""
        for owner, held, seen, _ in self._held:
            now: dict[str, Any] = vars(owner)
            for name in {**held, **now}:
                if name.startswith("_hotset"):
                    continue
                if not (name in held and name in now and _same(now[name], held[name])):
                    if not _is_computed(owner, name, held.get(name)):
                        return name
                elif name in seen and not seen[name].is_as_it_was():
                    return name
        return None


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _PLAIN) and bool(one == other)


def _same_elements(one: list[Any], other: list[Any]) -> bool:
    if len(one) != len(other):
        return False
    return all(map(operator.is_, one, other)) or all(map(_same, one, other))


def _is_computed(owner: Any, name: str, before: Any) -> bool:
    """Whether an attribute that had no value before seems to keep what follows from others.

    Such as ``_labels``, which ``labels()`` makes when it is called first.
    """
    kept = name.startswith("_") or isinstance(getattr(type(owner), name, None), functools.cached_property)
    return before is None and kept


def _owners(dataset: Any, depth: int) -> Iterator[Any]:
    """The dataset and those that it wraps, but for a cached one, which looks after its own."""
    if type(dataset).__module__.startswith("hotset.") or not isinstance(
        getattr(dataset, "__dict__", None), dict
    ):
        return
    yield dataset
    for value in list(vars(dataset).values()) if depth < _DEPTH else ():
        several = value.values() if isinstance(value, dict) else value
        parts = (
            list(several) if isinstance(value, (dict, list, tuple)) and len(value) <= _WRAPPED else [value]
        )
        for part in parts:
            if isinstance(part, Dataset):
                yield from _owners(part, depth + 1)


def _users_objects(owner: Any) -> Iterator[Any]:
    """The objects of the user's classes that an owner holds; but datasets are owners themselves."""
    for value in list(vars(owner).values()):
        if type(value) in _PLAIN_TYPES or isinstance(value, Dataset):
            continue
        if isinstance(value, _ENTERED) and len(value) > Room.elements:
            continue
        for each in held_objects(value, _NAMESPACES):
            counts = isinstance(each, _NAMESPACES) or (is_users(each) and not isinstance(each, Dataset))
            if counts and isinstance(getattr(each, "__dict__", None), dict):
                yield each


def _holder(transform: Any) -> Any:
    """The object whose attributes a transform uses."""
    if isinstance(transform, TakesBatches):
        transform = transform.transform
    return getattr(transform, "__self__", transform)


def _listed(container: Any) -> list[Any]:
    """The elements of a container; of a dict its keys, and then its values.

    By the methods of the built-in type, as those of a subclass may compute what they return.
    """
    if isinstance(container, dict):
        return [*dict.keys(container), *dict.values(container)]
    base = next(kind for kind in _ENTERED if isinstance(container, kind))
    return list(base.__iter__(container))


def _fill(container: Any, elements: list[Any]) -> None:
    """Have a container hold these elements, which :func:`_listed` gave."""
    container.clear()
    if isinstance(container, dict):
        half = len(elements) // 2
        container.update(zip(elements[:half], elements[half:], strict=True))
    elif isinstance(container, set):
        container.update(elements)
    else:
        container.extend(elements)


def _lengths(attributes: dict[str, Any]) -> list[int]:
    """The length of each container that cannot be filled again."""
    return [
        len(value)
        for value in attributes.values()
        if isinstance(value, _CONTAINERS) and type(value) not in _FILLED
    ]
