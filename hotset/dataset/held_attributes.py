"""The attributes of a dataset as they were: put back after reading, or compared later.

**Put back.** Many datasets open a file, a database or a connection when they read first, so that each worker
has its own: such a handle cannot be pickled, and is often not to be used after a fork. Others note what they
have read, and go by it: Ultralytics' draws the pictures of a mosaic from a list of those read last. With
torch's loader the main process of a program with workers reads nothing. Planning reads a few samples there,
and would leave an open handle behind, which a spawned worker could not get and forked ones would share, or
have other pictures drawn.

So the attributes of the dataset, of the datasets that it wraps, of the objects of the user's classes that
these hold, and of a library's objects that apply a list of transforms, in a ``__dict__`` or in slots, are set
to what they were; lists, dicts, sets and deques among them get the elements that they had, and small arrays
and tensors their numbers. So are those of its transforms, before the cache gets its fingerprint: a transform
that counts its calls, or loads a network when it is called first, would have another one in the process that
plans than in all others. MONAI's readers note the file that they read, so what transforms hold is put back
whoever has written its class. An object is left alone if a container in it cannot be put back and has changed
meanwhile, as its attributes may describe the container, or if it has a thread of its own that runs (MONAI's
``SmartCacheDataset``).

The audit reads a sample in the main process now and then, too, and puts back the attributes of the objects
that are near (:meth:`HeldAttributes.near`). All would take longer than reading.

**Compared.** A method of the dataset may set attributes on which samples depend (``close_mosaic()``), or the
user may: ``dataset.labels[3] = 5``, ``dataset.config.size = 64``, ``dataset.epoch.value += 1``. Values are
compared by identity, numbers and text by value, containers element by element at any depth (so another list
of the same numbers is no change), arrays and what processes share by their bytes
(:mod:`hotset.determinism.objects.mutable_content`). What a method seems to have computed once, and kept, is
told apart (:attr:`Difference.is_computed`). A dataset that is a list, a dict, an array or a tensor itself is
looked at as if it were the attribute ``elements``.

Looking at all of a large dataset would take longer than reading it. So there is :class:`Room` for so many
elements and bytes: of what has no room only the identity counts, and the length of a container.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import operator
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from hotset.determinism.batch_transform import TakesBatches
from hotset.determinism.objects.code_dependencies import is_users
from hotset.determinism.objects.mutable_content import content_of, is_shared, put_content, whole_content_of
from hotset.determinism.objects.near_attributes import near_objects
from hotset.determinism.objects.object_graph import held_objects
from hotset.determinism.objects.safe_access import (
    attributes_of,
    elements,
    is_a,
    is_opaque,
    length,
    set_attribute,
)

__all__ = ["Difference", "HeldAttributes", "Room", "cached_in", "datasets_in", "same_value"]

Counts = Callable[[Any, str], bool]

_FILLED = (list, dict, set, deque, OrderedDict, defaultdict)  # and no subclasses: their methods may do more
_ENTERED = (list, tuple, dict, set, deque)
_PLAIN = (bool, int, float, complex, str, bytes)
_PLAIN_TYPES = frozenset({*_PLAIN, type(None)})
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_EACH, _NESTED = 100, 6  # see Room
_WRAPPED = 64
_DEPTH = 8


@dataclass
class Room:
    """How much is looked at: about what is compared in two milliseconds.

    Attributes:
        elements: of containers; a container in another one, an array or a tensor takes the room of 100.
        bytes: of arrays and tensors; a byte of containers in a container takes the room of six.
        outermost: whether the elements of a container that is itself an attribute count, however many, and
            can be put back: what is compared by its bytes cannot, as a container of many containers is.
    """

    elements: int = 50_000
    bytes: int = 4 << 20
    outermost: bool = True

    def take(self, elements: int) -> bool:
        """Take room for so many elements; False if there is less."""
        has_room = elements <= self.elements
        self.elements -= elements if has_room else 0
        return has_room

    def holds_all_in(self, parts: list[Any]) -> bool:
        """Whether there is room for the containers among these and in them, and they hold nothing else."""
        left, queue = self.elements, list(parts)
        while queue and left >= 0:
            each = queue.pop()
            if type(each) not in _PLAIN_TYPES:
                if not issubclass(type(each), _ENTERED):
                    return False
                left -= length(each) + _EACH
                queue += elements(each) if left >= 0 else ()
        return left >= 0

    @classmethod
    def small(cls) -> Room:
        """Room for what is looked at for each of many readings."""
        return cls(900, 1 << 14, outermost=False)

    @classmethod
    def larger(cls) -> Room:
        """Room for all that is compared in another, wherever that one begins to look."""
        return cls(4 * cls.elements, 4 * cls.bytes, outermost=False)


class _Seen(NamedTuple):
    """A value that can be changed in place, as it was.

    Attributes:
        value: the value.
        content: the bytes of an array, or of a container with all in it; of a container or bytearray for
            which there was no room, its length; otherwise None, and
        inner: its elements, and those of them that can be changed in place, by number.
    """

    value: Any
    content: bytes | int | None
    inner: tuple[list[Any], dict[int, _Seen]] | None = None

    @classmethod
    def of(cls, value: Any, room: Room, depth: int = 0) -> _Seen | None:
        """None for a value that cannot be changed in place, or not be seen to be."""
        if not issubclass(type(value), _ENTERED):
            content = content_of(value, room.bytes) if room.elements >= _EACH else None
            if content is None or not room.take(_EACH):
                return cls(value, length(value)) if issubclass(type(value), bytearray) else None
            room.bytes -= len(content)
            return cls(value, content)
        has_room = depth <= _DEPTH and room.take(length(value) + (_EACH if depth else 0))
        if not has_room and not (room.outermost and depth == 0):
            return cls(value, length(value))
        parts = elements(value)
        inner = {}
        if has_room and not _PLAIN_TYPES.issuperset(map(type, parts)):
            whole = None if room.outermost or room.holds_all_in(parts) else _whole(value, room)
            if whole is not None:
                return cls(value, whole)
            inner = {
                number: seen
                for number, each in enumerate(parts)
                if type(each) not in _PLAIN_TYPES and (seen := cls.of(each, room, depth + 1)) is not None
            }
        return cls(value, None, (parts, inner)) if inner or not issubclass(type(value), tuple) else None

    def is_as_it_was(self) -> bool:
        """Whether the value holds what it held."""
        if isinstance(self.content, int):
            return length(self.value) == self.content
        if self.content is not None:
            look = whole_content_of if issubclass(type(self.value), _ENTERED) else content_of
            return look(self.value, len(self.content)) == self.content
        assert self.inner is not None
        return self._has_its_elements() and all(each.is_as_it_was() for each in self.inner[1].values())

    def _has_its_elements(self) -> bool:
        """Whether a container holds the same objects, or equal numbers and texts, as it did."""
        return self.inner is not None and _same_elements(elements(self.value), self.inner[0])

    def is_like(self, other: Any) -> bool:
        """Whether a list, dict or set holds the same objects, or equal numbers and texts."""
        if self.inner is None or self.inner[1] or type(other) is not type(self.value):
            return False
        return type(other) in _FILLED and _same_elements(elements(other), self.inner[0])

    def is_shared(self) -> bool:
        """Whether running workers see a change of the value, or of one that it contains."""
        if self.inner is None:
            return isinstance(self.content, bytes) and is_shared(self.value)
        return any(each.is_shared() for each in self.inner[1].values())

    def is_lost(self) -> bool:
        """Whether the value is a container that has changed, and cannot be put back.

        Of some only the length or the bytes are known; and a subclass's methods may do more than fill it.
        """
        if self.content is not None:
            may_be = isinstance(self.content, int) or issubclass(type(self.value), _ENTERED)
            return may_be and not self.is_as_it_was()
        return type(self.value) not in _FILLED and not self._has_its_elements()

    def put_back(self) -> None:
        """Have the value hold again what it held, as far as it can."""
        if isinstance(self.content, bytes):
            if not issubclass(type(self.value), _ENTERED) and not self.is_as_it_was():
                put_content(self.value, self.content)
        elif self.inner is not None:
            before, inner = self.inner
            if type(self.value) in _FILLED and not self._has_its_elements():
                _fill(self.value, before)
            for each in inner.values():
                each.put_back()


def _whole(value: Any, room: Room) -> bytes | None:
    """The bytes of a container with all in it, and the room for them is taken; None if there is none."""
    whole = whole_content_of(value, room.bytes // _NESTED)
    room.bytes -= len(whole) * _NESTED if whole is not None else 0
    return whole


class Difference(NamedTuple):
    """An attribute that is another now than it was.

    Attributes:
        kind, name: the class that has it, and its name.
        is_shared: whether running workers see that.
        is_computed: whether it seems to keep what follows from others.
    """

    kind: str
    name: str
    is_shared: bool
    is_computed: bool = False

    def __str__(self) -> str:
        return f"{self.kind}.{self.name}"


class _Owner(NamedTuple):
    """An object, and what it held.

    Attributes:
        owner: the object.
        held: its attributes.
        seen: of those that can be changed in place, by name.
    """

    owner: Any
    held: dict[str, Any]
    seen: dict[str, _Seen]

    @classmethod
    def of(cls, owner: Any, room: Room, counts: Counts) -> _Owner:
        held = {name: value for name, value in (attributes_of(owner) or {}).items() if counts(owner, name)}
        seen = {}
        for name, value in held.items():
            with contextlib.suppress(Exception):  # of a stranger's code: it cannot be looked into
                if (found := _Seen.of(value, room)) is not None:
                    seen[name] = found
        return cls(owner, held, seen)


def _is_its_own(owner: Any, name: str) -> bool:
    """Whether an attribute is the owner's: hotset keeps some in the user's objects."""
    return not name.startswith("_hotset")


class HeldAttributes:
    """The attributes of a dataset, and of what it holds, as they are when this is made.

    Args:
        dataset: the dataset, before it is read; None for none.
        transforms: its transforms, before they are called.
        room: how much is looked at; it is used up.
        counts: whether an attribute of an owner counts; all of its own do by default.
        libraries: whether the objects of libraries count as well that a transform holds.
        others: further objects, whose attributes count without the datasets that they hold.

    Example:
        >>> import types
        >>> dataset = types.SimpleNamespace(file=None, read=[], box={"size": [3, 4]})
        >>> held = HeldAttributes(dataset)
        >>> dataset.file = "an open file"
        >>> dataset.read.append(7)
        >>> dataset.box["size"][0] = 5
        >>> held.changed().name, held.moved()
        ('file', ['SimpleNamespace.file', 'SimpleNamespace.read', 'SimpleNamespace.box'])
        >>> held.put_back()
        >>> dataset
        namespace(file=None, read=[], box={'size': [3, 4]})
    """

    def __init__(
        self,
        dataset: Any,
        transforms: Iterable[Any] = (),
        room: Room | None = None,
        counts: Counts = _is_its_own,
        libraries: bool = False,
        others: Iterable[Any] = (),
    ) -> None:
        room = Room() if room is None else room
        self._counts = counts
        owners: dict[int, Any] = {}
        kinds_of_transforms: tuple[type, ...] = (object,) if libraries else _NAMESPACES
        holders = [(dataset, _NAMESPACES), *((_holder(each), kinds_of_transforms) for each in transforms)]
        found = [(each, kinds) for at, kinds in holders for each in (*datasets_in(at), *_itself(at))]
        for owner, kinds in (*found, *((each, _NAMESPACES) for each in others)):
            for each in (owner, *_objects_of(owner, self._counts, kinds)):
                owners.setdefault(id(each), each)
        self._hold(owners.values(), room)

    def _hold(self, owners: Iterable[Any], room: Room) -> None:
        self._held = [_Owner.of(owner, room, self._counts) for owner in owners]

    @classmethod
    def near(cls, dataset: Any, transforms: Iterable[Any] = ()) -> HeldAttributes:
        """The attributes of the objects that are near, with what small containers hold.

        It takes about 50 us, so it can be made for a reading of one sample.
        """
        held, holders = cls(None), [*datasets_in(dataset), *map(_holder, transforms)]
        own = set(map(id, holders))
        kinds = (Dataset, *_NAMESPACES)
        found = (
            each for each in near_objects(holders) if id(each) in own or is_a(each, kinds) or is_users(each)
        )
        held._hold(found, Room.small())
        return held

    def put_back(self) -> None:
        """Set all attributes to what they were, with the elements that they had."""
        for owner, held, seen in self._held:
            now = attributes_of(owner)
            if now is None or any(each.is_lost() for each in seen.values()):
                continue
            if any(issubclass(type(value), threading.Thread) and value.is_alive() for value in held.values()):
                continue  # that thread may have set them, and wait for what it has set
            for name in [name for name in now if name not in held and self._counts(owner, name)]:
                set_attribute(owner, name)
            for name, value in held.items():
                if name not in now or now[name] is not value:
                    set_attribute(owner, name, value)
            for each in seen.values():
                each.put_back()

    def changed(self, *, shared: bool = False, computed: bool = False) -> Difference | None:
        """An attribute that is another now; None if all are what they were.

        Args:
            shared: only one whose change running workers see.
            computed: also one that seems to keep what follows from others, if there is no other one.
        """
        kept = None
        for each in self._differing():
            if each.is_computed:
                kept = kept or each
            elif each.is_shared or not shared:
                return each
        return kept if computed and not shared else None

    def moved(self) -> list[str]:
        """All attributes that are others now, each as ``class.name``."""
        return [str(each) for each in self._differing()]

    def _differing(self) -> Iterator[Difference]:
        for owner, held, seen in self._held:
            kind, now = type(owner).__name__, attributes_of(owner)
            if now is None:  # it does not show them any more
                yield Difference(kind, "__dict__", False)
                continue
            for name in {**held, **now}:
                if name not in held and not self._counts(owner, name):
                    continue
                if name in seen and seen[name].is_like(now.get(name)):
                    continue
                is_set = not (name in held and name in now and same_value(now[name], held[name]))
                if is_set or (name in seen and not seen[name].is_as_it_was()):
                    is_computed = is_set and _is_computed(owner, name, held.get(name), now.get(name))
                    yield Difference(kind, name, name in seen and seen[name].is_shared(), is_computed)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal numbers or texts of one type, or tuples of such."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    kind = type(one)
    if issubclass(kind, tuple):
        return length(one) == length(other) and all(map(same_value, elements(one), elements(other)))
    plain: Any = next((base for base in _PLAIN if issubclass(kind, base)), None)
    return plain is not None and plain.__eq__(one, other) is True


def _same_elements(one: list[Any], other: list[Any]) -> bool:
    if len(one) != len(other):
        return False
    return all(map(operator.is_, one, other)) or all(map(same_value, one, other))


def _is_computed(owner: Any, name: str, before: Any, now: Any) -> bool:
    """Whether an attribute that had no value before seems to keep what follows from others.

    Such as ``_labels``, which ``labels()`` makes when it is called first. A method is set by somebody.
    """
    kept = name.startswith("_") or isinstance(getattr(type(owner), name, None), functools.cached_property)
    return before is None and kept and not issubclass(type(now), (types.FunctionType, types.MethodType))


def datasets_in(dataset: Any) -> Iterator[Any]:
    """The dataset and those that it wraps, but for a cached one, which looks after its own."""
    return (each for each in _datasets_in(dataset) if not _is_of_hotset(each))


def cached_in(dataset: Any) -> Iterator[Any]:
    """The cached datasets and streams among the dataset and those that it wraps."""
    return filter(_is_of_hotset, _datasets_in(dataset))


def _datasets_in(dataset: Any, depth: int = 0) -> Iterator[Any]:
    held = attributes_of(dataset)
    if held is None:
        return
    yield dataset
    for value in list(held.values()) if depth < _DEPTH and not _is_of_hotset(dataset) else ():
        several = issubclass(type(value), (dict, list, tuple)) and length(value) <= _WRAPPED
        for part in elements(value) if several else [value]:
            if is_a(part, Dataset):
                yield from _datasets_in(part, depth + 1)


def _is_of_hotset(dataset: Any) -> bool:
    return str(type(dataset).__module__).startswith("hotset.")


def _itself(dataset: Any) -> Iterator[Any]:
    """A dataset that is a container or an array, as ``elements`` of an object whose class has its name."""
    kind = type(dataset)
    if issubclass(kind, (*_ENTERED, np.ndarray, torch.Tensor)):
        yield type(kind.__name__, (types.SimpleNamespace,), {})(elements=dataset)


def _objects_of(owner: Any, counts: Counts, kinds: tuple[type, ...]) -> Iterator[Any]:
    """The objects of the user's classes, of these kinds, and chains that an owner holds; no datasets."""
    for name, value in list((attributes_of(owner) or {}).items()):
        if is_opaque(value) or type(value) in _PLAIN_TYPES or is_a(value, Dataset) or not counts(owner, name):
            continue
        if issubclass(type(value), _ENTERED) and length(value) > Room.elements:
            continue
        for each in held_objects(value, kinds):
            is_one = is_a(each, kinds) or is_users(each) or _is_chain(each)
            if is_one and not is_a(each, Dataset) and attributes_of(each) is not None:
                yield each


def _is_chain(value: Any) -> bool:
    """Whether an object can be called, and holds a list of what can be: a library's ``Compose``."""
    parts = [part for part in (attributes_of(value) or {}).values() if type(part) is list and part]
    return callable(value) and any(all(map(callable, part)) for part in parts)


def _holder(transform: Any) -> Any:
    """The object whose attributes a transform uses."""
    if issubclass(type(transform), TakesBatches):
        transform = transform.transform
    return transform.__self__ if issubclass(type(transform), types.MethodType) else transform


def _fill(container: Any, before: list[Any]) -> None:
    """Have a container hold these elements, which :func:`elements` gave."""
    container.clear()
    if isinstance(container, dict):
        half = len(before) // 2
        container.update(zip(before[:half], before[half:], strict=True))
    elif isinstance(container, set):
        container.update(before)
    else:
        container.extend(before)
