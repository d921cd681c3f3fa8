"""The attachment: how each process of a job reaches a cache's store.

::

    made or found here     the store itself
    forked                 the same mapping; listed as a further process that keeps the cache alive
    unpickled              an address, attached to at first use; if that fails, samples come from the source
    closed                 nothing

A process that attaches to a cache which is full already maps its pages before they are used
(:func:`map_ahead`). The memory is there, but each page has yet to be entered in this process's page table, by
a fault at its first touch, which halves the speed of the first epoch. The kernel enters them all in one call,
in a twelfth of the time (84 ms for a GiB on two cores), from a thread that needs the interpreter for
microseconds. Only what was handed out already is mapped: touching a hole of a tmpfs would allocate it.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from typing import Any

from hotset._warnings import warn
from hotset.errors import SegmentError
from hotset.session.find_or_create import CacheHandle, attach_again
from hotset.session.session_cache import SessionCacheHandle
from hotset.store.fill import DrawWatch
from hotset.store.format import LINE, Live
from hotset.store.ring import attach_store
from hotset.store.segment import Address, Segment
from hotset.store.store import Store
from hotset.units import format_bytes

__all__ = ["Attachment", "map_ahead"]

_log = logging.getLogger("hotset")

_AT_ONCE = 8 << 20
_WORTH_MAPPING = 1 << 20


class Attachment:
    """How this process reaches a store. It pickles.

    Args:
        store: the store; None if nothing can be cached.
        handle: this process's entry among those that keep the store alive; None without a store.
        name: the dataset's name, for warnings.
    """

    def __init__(self, store: Store | None, handle: CacheHandle | None, name: str) -> None:
        self._store = store
        self._address: Address | str | None = None  # of a store that is not attached to yet
        self._watch: DrawWatch | None = None
        self._handle = handle
        self._name = name
        self._process = os.getpid()  # in which the store can be used as it is
        self._set_allowance(store)

    def store(self) -> Store | None:
        """The store, attached to if needed; None if none can be reached, or after :meth:`close`."""
        if self._process != os.getpid():
            self._join()
        return self._store

    @property
    def attached(self) -> Store | None:
        """The store, if this process has attached to it."""
        return self._store if self._process == os.getpid() else None

    def watch(self, watch: DrawWatch) -> None:
        """Watch the reads for the store."""
        self._watch = watch
        if self._store is not None:
            self._store.filler.watch = watch

    def attach(self) -> Store | None:
        """Attach before the first use, without listing this process as one that keeps the cache alive.

        Raises:
            SegmentError, OSError: no process within reach has it.
        """
        if self._address is not None:
            store = attach_again(self._address, attach_store)
            self._set_allowance(store)
            if self._watch is not None:
                store.filler.watch = self._watch
            self._store, self._address = store, None
        return self._store

    def _join(self) -> None:
        """Attach, and list this process as one that keeps the cache alive."""
        try:
            store = self.attach()
        except (SegmentError, OSError) as error:
            store = self._address = None
            warn(
                f"the cache of {self._name} cannot be attached to, so samples come from the source: {error} "
                "Unpickle it on the same machine, while a process that has it lives."
            )
        self._process = os.getpid()
        from torch.utils.data import get_worker_info  # a process that only holds a store needs no torch

        # A loader's worker ends before its parent, which is listed.
        if store is not None and self._handle is not None and get_worker_info() is None:
            self._handle.join(store.segment.fd)

    def _set_allowance(self, store: Store | None) -> None:
        """Limit the store to what its session has left."""
        if store is not None and isinstance(self._handle, SessionCacheHandle):
            store.allocator.allowance = self._handle
            store.allocator.knob = "the session's `--memory`"
            if store.spill is not None:
                store.spill.allocator.knob = "a new session's `--spill`"

    def close(self) -> None:
        """Detach."""
        store, self._store, self._address = self._store, None, None
        if store is not None:
            store.close()
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def __getstate__(self) -> dict[str, Any]:
        where = self._address
        if self._store is not None:
            try:
                where = self._store.address
            except OSError as error:
                warn(
                    f"the cache of {self._name} cannot be sent to another process, so there samples come "
                    f"from the source: {error}. Close no descriptors that your program has not opened."
                )
        handle = copy.copy(self._handle)  # which has no share yet: a copy's is its own, in one process, too
        return {**self.__dict__, "_store": None, "_address": where, "_process": 0, "_handle": handle}


def map_ahead(segment: Segment) -> threading.Thread | None:
    """Start to map what a segment holds, in a thread; None if that is next to nothing, or no thread starts.

    The thread ends by itself, also if the segment is closed meanwhile; until then it keeps the mapping.
    """
    geometry, live = segment.geometry, segment.live
    parts = [
        (geometry.rows_at, int(live[Live.ROWS_NEXT]) * geometry.stride),
        (geometry.lines_at, int(live[Live.LINES_NEXT]) * LINE),
    ]
    total = sum(length for _, length in parts)
    if total < _WORTH_MAPPING:
        return None
    thread = threading.Thread(target=_map, args=(segment, parts, total), name="hotset-map", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads: pages are mapped as they are used
        return None
    return thread


def _map(segment: Segment, parts: list[tuple[int, int]], total: int) -> None:
    start, generation = time.perf_counter(), segment.clear_generation
    for begin, length in parts:
        for offset in range(begin, begin + length, _AT_ONCE):
            # After a clear nothing is there, and each page would be allocated again.
            if segment.fd < 0 or generation is None or segment.clear_generation != generation:
                return
            part = min(_AT_ONCE, begin + length - offset)
            segment.populate(offset, part)
            if segment.live[Live.INVALIDATED]:  # its memory was freed, and this call has allocated some again
                segment.discard(offset, part)
                return
    seconds = time.perf_counter() - start
    _log.info("mapped %s of an existing cache in %.2f s", format_bytes(total), seconds)
