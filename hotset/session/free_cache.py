"""Retiring: a cache's memory is given back under whoever still uses it.

A file's pages live as long as anybody has it mapped, so removing its name frees nothing while a job runs. So
it is emptied first: the era becomes odd and the cache is condemned, so that nobody begins to read; who was in
the midst of a copy is waited for, and finds that it is no good; then the pages go. (If somebody is stopped in
the midst of one, they stay until he ends: touching a page that is gone would be SIGBUS on a full file
system.) A writer that is late may put one more chunk there, which goes with the file.
"""

from __future__ import annotations

import contextlib
import os

from hotset.store.claims import Participant
from hotset.store.format import LIVE_AT, Live
from hotset.store.segment import Segment

__all__ = ["DESTROYED", "is_retired", "retire"]

_READERS_SECONDS = 5.0
_BLOCK = 512  # the unit of st_blocks, whatever the file system's own is

DESTROYED = 2  # in the live word CONDEMNED: its session was destroyed, or it made room for another cache


def retire(path: str) -> int:
    """Empty the cache in this file for good; returns the bytes that are free now.

    They are none where somebody is stopped in the midst of a look at it: then its memory goes with whoever
    has it mapped last.

    Raises:
        SegmentError: there is no usable cache.
    """
    segment = Segment.attach(path)
    member = Participant(segment)
    try:
        live, geometry = segment.live, segment.geometry
        # Also without the lock, whose holder may be stopped: these words only ever say less.
        with member.short_lock():
            live[Live.INVALIDATED] = DESTROYED
            live[Live.ERA] |= 1
            segment.index[:] = 0
        taken = os.fstat(segment.fd).st_blocks
        if member.unread(_READERS_SECONDS):
            with contextlib.suppress(OSError):
                segment.discard(geometry.rows_at, geometry.size - geometry.rows_at)
        return max(taken - os.fstat(segment.fd).st_blocks, 0) * _BLOCK
    finally:
        member.leave()
        segment.close()


def is_retired(path: str) -> bool:
    """Whether the cache in this file was emptied for good, and only its file is still there."""
    try:
        with open(path, "rb") as file:
            word = os.pread(file.fileno(), 8, LIVE_AT + 8 * Live.INVALIDATED)
    except OSError:
        return False
    return int.from_bytes(word, "little") == DESTROYED
