"""Writes the bodies of large records from where they lie, piece by piece, with their checksum.

To lay out a record of a decoded picture in memory of its own costs as much as to write it: fresh memory is
faulted in page by page, and all of it goes through the processor's cache once more. So the pieces of a body
(:func:`hotset.store.irregular_records.pieces`) go to the file in spans of whole pages, each summed up and
written while it is in the cache. Only what lies across the border of two pieces is copied, into a buffer that
is used again. An array that its maker gives in strips (:class:`Unfilled`) is never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hotset.store.format import PAGE, Checksum
from hotset.store.leaves.schema import LARGE
from hotset.store.segment import Segment

__all__ = ["BodyWriter", "Unfilled"]

_SPAN = 64 * PAGE


class Unfilled:
    """A value with one large array whose memory holds nothing yet.

    Args:
        value: with the array in it, and no other that is large.
        array: of one dimension, uint8.
        strips: gives the bytes that belong there, in order; each is valid until the next.
    """

    def __init__(self, value: Any, array: Any, strips: Callable[[], Iterable[bytes]]) -> None:
        self.value, self._array, self._strips = value, array, strips

    def filled(self) -> Any:
        """The value, its array filled.

        Raises:
            ValueError: there are more or fewer bytes than the array has.
        """
        at = 0
        for strip in self._checked():
            self._array.data[at : at + len(strip)] = strip
            at += len(strip)
        return self.value

    @property
    def is_large(self) -> bool:
        """Whether it can be stored without being filled."""
        return len(self._array) >= LARGE

    def pieces(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """The pieces of the value's body, the array's bytes in strips.

        Raises:
            ValueError: as :meth:`filled`.
        """
        for piece in pieces:
            if len(piece) == len(self._array):
                yield from self._checked()
            else:
                yield piece

    def _checked(self) -> Iterator[memoryview]:
        left = len(self._array)
        for strip in self._strips():
            left -= len(strip)
            if left < 0:
                break  # what lies behind the array belongs to another record
            yield memoryview(strip)
        if left:
            raise ValueError(f"an array of {len(self._array):,} bytes was given {-left:,} more")


class BodyWriter:
    """Writes bodies into one segment; the caller keeps other threads out."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._buffer = memoryview(bytearray(_SPAN))

    def write(self, offset: int, pieces: Iterable[memoryview], checksum: Checksum) -> None:
        """Write pieces one after the other, beginning at ``offset``; adds them to the checksum.

        Raises:
            OSError: the file cannot be written.
        """
        for span in self._spans(pieces):
            checksum.add(span)
            self._segment.write(span, offset)
            offset += len(span)

    def _spans(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same bytes in spans of whole pages, but for the last one; each is valid until the next."""
        buffer, filled = self._buffer, 0
        for piece in pieces:
            while len(piece):
                if len(piece) < _SPAN:
                    room = _SPAN - filled
                elif filled % PAGE:
                    room = -filled % PAGE
                else:
                    if filled:
                        yield buffer[:filled]
                        filled = 0
                    yield piece[:_SPAN]
                    piece = piece[_SPAN:]
                    continue
                part, piece = piece[:room], piece[room:]
                buffer[filled : filled + len(part)] = part
                filled += len(part)
                if filled == _SPAN:
                    yield buffer
                    filled = 0
        if filled:
            yield buffer[:filled]
