"""Writes the bodies of large records from where they lie, piece by piece, with their checksum.

To lay out a record of a decoded picture in memory of its own costs as much as to write it: fresh memory is
faulted in page by page, and all of it goes through the processor's cache once more. So the pieces of a body
(:func:`hotset.store.irregular_records.pieces`) go to the file in spans of whole pages, each summed up and
written while it is in the cache. Only what lies across the border of two pieces is copied, into a buffer that
is used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hotset.store.format import PAGE, Checksum
from hotset.store.segment import Segment

__all__ = ["BodyWriter"]

_SPAN = 64 * PAGE


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
