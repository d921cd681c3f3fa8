"""What a value held that can be changed in place: compared later, or put back.

Values are compared by identity, numbers and text by value, containers element by element at any depth (so
another list of the same numbers is no change), arrays and what processes share by their bytes
(:mod:`hotset.determinism.objects.mutable_content`).

Looking at all of a large dataset would take longer than reading it. So there is :class:`Room` for so many
elements and bytes: of what has no room only the identity counts, and the length of a container.

How far an iterator has come can neither be compared nor put back: see :func:`holds_iterator`.
"""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset.determinism.objects.code_dependencies import is_users
from hotset.determinism.objects.mutable_content import (
    Copy,
    content_of,
    copy_of,
    is_copy,
    is_shared,
    put_content,
    whole_content_of,
)
from hotset.determinism.objects.safe_access import attributes_of, elements, is_opaque, length
from hotset.store.leaves.instances import solid_base

__all__ = ["ENTERED", "PLAIN_TYPES", "PUT_BACK", "HeldValue", "Room", "holds_iterator", "same_value"]

ENTERED = (list, tuple, dict, set, deque)
"""Containers whose elements are looked at."""
PUT_BACK = (*ENTERED, bytearray, np.ndarray, torch.Tensor)
"""What can be put back; of other values it is only seen whether they have changed."""
_PLAIN = (bool, int, float, complex, str, bytes)
PLAIN_TYPES = frozenset({*_PLAIN, type(None)})
"""Types of values that cannot be changed, and hold nothing."""
_FILLED = (list, dict, set, deque, OrderedDict, defaultdict)
_EACH, _NESTED = 100, 6  # see Room
_ITERATORS = ("builtins", "itertools", "torch.utils.data", "hotset.loader")  # where their classes are
_DEPTH = 8


@dataclass
class Room:
    """How much is looked at: about what is compared in two milliseconds.

    Attributes:
        elements: of containers; a container in another one, an array or a tensor takes the room of 100.
        bytes: of arrays and tensors; a byte of containers in a container takes the room of six.
        outermost: of a container that is itself an attribute, so many elements count even if there is no room
            for them. If there are any, containers can be put back: what is compared by its bytes cannot, as a
            container of many containers is; and a copy is kept of what has no bytes.
    """

    elements: int = 50_000
    bytes: int = 4 << 20
    outermost: int = sys.maxsize

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
            if type(each) not in PLAIN_TYPES:
                if not issubclass(type(each), ENTERED):
                    return False
                left -= length(each) + _EACH
                queue += elements(each) if left >= 0 else ()
        return left >= 0

    @classmethod
    def small(cls) -> Room:
        """Room for what is looked at for each of many readings."""
        return cls(900, 1 << 14, outermost=0)

    @classmethod
    def outside(cls) -> Room:
        """Room for what one function or class keeps outside of a dataset; there may be many of them."""
        return cls(900, outermost=1 << 17)

    @classmethod
    def of_one(cls) -> Room:
        """Room for all that one object holds itself, and a little of what is in that."""
        return cls(900, sys.maxsize)

    @classmethod
    def larger(cls) -> Room:
        """Room for all that is compared in another, wherever that one begins to look."""
        return cls(4 * cls.elements, 4 * cls.bytes, outermost=0)


class HeldValue(NamedTuple):
    """A value that can be changed in place, as it was.

    Attributes:
        value: the value.
        content: the bytes of an array, or a copy, or the bytes of a container with all in it; of a container
            or bytearray for which there was no room, its length; otherwise None, and
        inner: its elements, and those of them that can be changed in place, by number.
    """

    value: Any
    content: bytes | int | Copy | None
    inner: tuple[list[Any], dict[int, HeldValue]] | None = None

    @classmethod
    def of(cls, value: Any, room: Room, depth: int = 0) -> HeldValue | None:
        """None for a value that cannot be changed in place, or not be seen to be."""
        if type(value) in PLAIN_TYPES:
            return None
        if not issubclass(type(value), ENTERED):
            return cls._of_bytes(value, room, room.outermost if depth == 0 else 0)
        has_room = depth <= _DEPTH and room.take(length(value) + (_EACH if depth else 0))
        if not has_room and (depth or length(value) > room.outermost):
            return cls(value, length(value))
        parts = elements(value)
        inner = {}
        if has_room and not PLAIN_TYPES.issuperset(map(type, parts)):
            whole = None if room.outermost or room.holds_all_in(parts) else _whole(value, room)
            if whole is not None:
                return cls(value, whole)
            inner = {
                number: seen
                for number, each in enumerate(parts)
                if type(each) not in PLAIN_TYPES and (seen := cls.of(each, room, depth + 1)) is not None
            }
        return cls(value, None, (parts, inner)) if inner or not issubclass(type(value), tuple) else None

    @classmethod
    def _of_bytes(cls, value: Any, room: Room, outermost: int) -> HeldValue | None:
        content: Any = None
        if outermost or room.elements >= _EACH:
            content = content_of(value, room.bytes)
            content = copy_of(value, room.bytes) if content is None and outermost else content
        if content is None:
            return cls(value, length(value)) if issubclass(type(value), bytearray) else None
        room.take(_EACH)
        room.bytes -= len(content) if isinstance(content, bytes) else content.nbytes
        return cls(value, content)

    def is_as_it_was(self) -> bool:
        """Whether the value holds what it held."""
        if isinstance(self.content, int):
            return length(self.value) == self.content
        if isinstance(self.content, (np.ndarray, torch.Tensor)):
            return is_copy(self.content, self.value)
        if self.content is not None:
            look = whole_content_of if issubclass(type(self.value), ENTERED) else content_of
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
            return self.content is not None and not isinstance(self.content, int) and is_shared(self.value)
        return any(each.is_shared() for each in self.inner[1].values())

    def is_lost(self) -> bool:
        """Whether the value is a container that has changed, and cannot be put back.

        Of some only the length or the bytes are known; and a subclass's methods may do more than fill it.
        """
        if self.content is not None:
            may_be = isinstance(self.content, int) or issubclass(type(self.value), ENTERED)
            return may_be and not self.is_as_it_was()
        return type(self.value) not in _FILLED and not self._has_its_elements()

    def put_back(self, but: Container[int] = (), *, shared: bool = False) -> None:
        """Have the value hold again what it held, as far as it can.

        Args:
            but: ids of values that are left as they are, with all in them.
            shared: whether that is done also with memory that other processes may write to.
        """
        if id(self.value) in but or isinstance(self.content, int):
            return
        if self.inner is not None:
            before, inner = self.inner
            if _can_be_filled(self.value) and not self._has_its_elements():
                _fill(self.value, before)
            for each in inner.values():
                each.put_back(but, shared=shared)
        elif not (issubclass(type(self.value), ENTERED) or self.is_as_it_was()) and (
            shared or not is_shared(self.value)
        ):
            put_content(self.value, self.content)


def _whole(value: Any, room: Room) -> bytes | None:
    """The bytes of a container with all in it, and the room for them is taken; None if there is none."""
    whole = whole_content_of(value, room.bytes // _NESTED)
    room.bytes -= len(whole) * _NESTED if whole is not None else 0
    return whole


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


def _can_be_filled(container: Any) -> bool:
    """Whether a container's elements can be put back.

    A library's class may keep in attributes what goes with them: the order of the keys, for example.
    """
    if type(container) in _FILLED:
        return True
    return issubclass(type(container), _FILLED) and (is_users(container) or not attributes_of(container))


def _fill(container: Any, before: list[Any]) -> None:
    """Have a container hold these elements, which :func:`elements` gave.

    By the methods of the class that was written in C: a user's own may refuse, and leave it empty.
    """
    base: Any = solid_base(type(container))
    if issubclass(base, list):
        base.__setitem__(container, slice(None), before)
        return
    base.clear(container)
    if issubclass(base, dict):
        half = len(before) // 2
        for key, value in zip(before[:half], before[half:], strict=True):
            base.__setitem__(container, key, value)
    else:
        fill = base.update if issubclass(base, set) else base.extend
        fill(container, before)


def holds_iterator(value: Any) -> bool:
    """Whether a value is a generator, an iterator of Python's or of a loader, or a small container of some.

    Of other classes with a ``__next__`` many can go back: files, and cursors of databases.

    Example:
        >>> holds_iterator(iter([3])), holds_iterator([map(str, [3])]), holds_iterator([3])
        (True, True, False)
    """
    if issubclass(type(value), ENTERED):
        return length(value) <= _EACH and any(_is_iterator(each) for each in elements(value))
    return _is_iterator(value)


def _is_iterator(value: Any) -> bool:
    kind = type(value)
    return not is_opaque(value) and hasattr(kind, "__next__") and kind.__module__.startswith(_ITERATORS)
