"""What a value held that can be changed in place: compared later, or put back.

Values are compared by identity, numbers and text by value, containers element by element at any depth (so
another list of the same numbers is no change), arrays and what processes share by their bytes
(:mod:`hotset.determinism.objects.mutable_content`).

Looking at all of a large dataset would take longer than reading it. So there is :class:`Room` for so many
elements and bytes: of what has no room only the identity counts, and the length of a container.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from hotset.determinism.objects.mutable_content import content_of, is_shared, put_content, whole_content_of
from hotset.determinism.objects.safe_access import elements, length

__all__ = ["ENTERED", "PLAIN_TYPES", "HeldValue", "Room", "same_value"]

ENTERED = (list, tuple, dict, set, deque)
"""Containers whose elements are looked at."""
_PLAIN = (bool, int, float, complex, str, bytes)
PLAIN_TYPES = frozenset({*_PLAIN, type(None)})
"""Types of values that cannot be changed, and hold nothing."""
_FILLED = (list, dict, set, deque, OrderedDict, defaultdict)  # and no subclasses: their methods may do more
_EACH, _NESTED = 100, 6  # see Room
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
            if type(each) not in PLAIN_TYPES:
                if not issubclass(type(each), ENTERED):
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


class HeldValue(NamedTuple):
    """A value that can be changed in place, as it was.

    Attributes:
        value: the value.
        content: the bytes of an array, or of a container with all in it; of a container or bytearray for
            which there was no room, its length; otherwise None, and
        inner: its elements, and those of them that can be changed in place, by number.
    """

    value: Any
    content: bytes | int | None
    inner: tuple[list[Any], dict[int, HeldValue]] | None = None

    @classmethod
    def of(cls, value: Any, room: Room, depth: int = 0) -> HeldValue | None:
        """None for a value that cannot be changed in place, or not be seen to be."""
        if not issubclass(type(value), ENTERED):
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

    def is_as_it_was(self) -> bool:
        """Whether the value holds what it held."""
        if isinstance(self.content, int):
            return length(self.value) == self.content
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
            return isinstance(self.content, bytes) and is_shared(self.value)
        return any(each.is_shared() for each in self.inner[1].values())

    def is_lost(self) -> bool:
        """Whether the value is a container that has changed, and cannot be put back.

        Of some only the length or the bytes are known; and a subclass's methods may do more than fill it.
        """
        if self.content is not None:
            may_be = isinstance(self.content, int) or issubclass(type(self.value), ENTERED)
            return may_be and not self.is_as_it_was()
        return type(self.value) not in _FILLED and not self._has_its_elements()

    def put_back(self) -> None:
        """Have the value hold again what it held, as far as it can."""
        if isinstance(self.content, bytes):
            if not issubclass(type(self.value), ENTERED) and not self.is_as_it_was():
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
