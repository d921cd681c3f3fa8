"""Scratch memory: buffers that are used again, so that large values do not fault in fresh pages each time.

malloc gives memory of this size back to the kernel as it is freed, and the next allocation faults it in
again, page by page: for a decoded picture that took a third as long as decoding it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["Scratch"]

_LARGEST = 16 << 20  # bytes of a buffer that is kept: nobody should miss its memory
_MOST = 2  # buffers that are kept


class Scratch:
    """Lends buffers, each to one user at a time; any thread may ask.

    Example:
        >>> scratch = Scratch()
        >>> with scratch.borrow(3) as buffer:
        ...     buffer[:] = b"abc"
        ...     len(buffer)
        3
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    @contextlib.contextmanager
    def borrow(self, size: int) -> Iterator[memoryview]:
        """Writable memory of so many bytes, which hold anything."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = bytearray()
        if len(buffer) < size:
            buffer = bytearray(size)
        try:
            yield memoryview(buffer)[:size]
        finally:
            if len(buffer) <= _LARGEST and len(self._free) < _MOST:
                self._free.append(buffer)
