"""What a leaf is: a value in a sample's tree, and how it becomes bytes and a value again.

A leaf is *fixed* (the same number of bytes in every sample, at one offset of the row) or *variable* (bytes
in the tail, dimensions in the row). Which of the two, the first samples decide: see
:mod:`hotset.store.schema`.

Whatever a leaf takes in comes out equal in type, dtype, shape, strides of dense arrays, and bytes; what it
could not give back so, it refuses with :class:`SchemaMismatch`, and that sample stays uncached.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Leaf", "SchemaMismatch", "Shape"]

Shape = tuple[int, ...]


class SchemaMismatch(Exception):
    """A sample that does not fit the schema; its message says where and why."""


class Leaf(Protocol):
    """One kind of value. ``fixed_bytes`` is None for a variable leaf, which has ``dims`` dimensions."""

    @property
    def fixed_bytes(self) -> int | None: ...
    @property
    def dims(self) -> int: ...
    def check(self, value: object) -> Any:
        """Return the value in the form that :meth:`put` wants.

        Raises:
            Misfit: the value is of another kind.
        """

    def measure(self, checked: Any) -> tuple[Shape, int]:
        """Dimensions and bytes of a checked value (variable leaves only)."""

    def put(self, buffer: Any, offset: int, checked: Any) -> None:
        """Write a checked value there."""

    def get(self, buffer: Any, offset: int, dims: Shape) -> Any:
        """Return the value that lies there; arrays share the buffer's memory."""

    def get_all(self, buffer: Any, offset: int, stride: int, count: int) -> list[Any]:
        """Return a fixed leaf's values in ``count`` rows, the first at ``offset``."""

    def widen(self, value: object) -> Leaf:
        """Return a leaf that fits this one's values and ``value`` too, or self if there is none."""

    def to_json(self) -> dict[str, Any]: ...
