"""A store as a shelf: records copied out of it as they lie, and others' records brought into it.

A record goes out with its row and its lines as they are. It comes in by way of the sample: taken apart anew,
as it gets another row, other lines, and so another checksum, and as only :meth:`Store.fill` knows who claims
what and where there is room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hotset.cluster.messages import ABSENT, LEFT, Bytes, Cache, Longs, Records
from hotset.store.format import GENERATION_MASK, GENERATION_SHIFT, LINE, ROW_MASK

if TYPE_CHECKING:  # the store brings torch along
    from hotset.store.store import Store

__all__ = ["StoreShelf"]


class StoreShelf:
    """One store, to be served (:class:`hotset.cluster.serving.Shelf`).

    Args:
        store: whose records are written once; no ring.
        fingerprint: of its cache, 16 bytes.

    Attributes:
        cache: what other machines must agree on.
    """

    def __init__(self, store: Store, fingerprint: bytes) -> None:
        self._store = store
        schema = store.schema
        self.cache = Cache.of(
            fingerprint,
            samples=len(store),
            stride=schema.stride,
            has_tail=schema.has_tail,
            schema=schema.to_json(),
        )

    def take(self, ids: Longs, memory: Bytes) -> Records:
        """Copy the records that are there now; those that ``memory`` has no room for are ``LEFT``."""
        store = self._store
        era = store.era()
        words = store.words(ids)
        here = np.flatnonzero(store.present(ids)) if era is not None else np.empty(0, np.int64)
        most = len(memory) // self.cache.stride
        some, later = here[:most], here[most:]
        # Their places are looked at after the words: a clear in between shows in the era.
        if era is None or not len(some):
            return self._records(len(ids))
        if store.on_disk(words[some]):
            staged = store.stage(ids[some], words[some])
            if not store.load(staged):
                return self._records(len(ids))
            lines = staged.tails.counts if staged.tails is not None else np.zeros(len(some), np.int64)
            fits = self._fitting(lines, memory)
            rows, tails = staged.rows[:fits], staged.lines[: int(lines[:fits].sum())]
        else:
            copied = self._copy(words[some] & ROW_MASK, memory)
            if copied is None:
                return self._records(len(ids))
            lines, rows, tails = copied
            fits = len(rows)
        if not store.unchanged(words, era):
            return self._records(len(ids))
        generations = words >> GENERATION_SHIFT & GENERATION_MASK
        found = self._records(len(ids))._replace(rows=rows, tails=tails)
        found.generations[some[:fits]] = generations[some[:fits]]
        found.generations[some[fits:]] = LEFT
        found.generations[later] = LEFT
        if not fits:
            found.generations[some[0]] = (
                ABSENT  # it alone is too large, and would be asked for again for ever
            )
        found.lines[some[:fits]] = lines[:fits]
        return found

    def _copy(self, rows: Longs, memory: Bytes) -> tuple[Longs, Bytes, Bytes] | None:
        """Copy rows and tails, as many as there is room for; None if they make no sense (any more)."""
        store, stride = self._store, self.cache.stride
        with store.member.reading:
            if store.era() is None:
                return None
            lines = store.tails(rows).counts if self.cache.has_tail else np.zeros(len(rows), np.int64)
            fits = self._fitting(lines, memory)
            rows, at = rows[:fits], fits * stride
            out = memory[:at].reshape(fits, stride)
            np.take(store.rows, rows, axis=0, out=out, mode="clip")
            total = int(lines[:fits].sum())
            tails = memory[at : at + total * LINE].reshape(total, LINE)
            if total:
                np.take(store.lines, store.tails(rows).lines(), axis=0, out=tails, mode="clip")
        return lines, out, tails

    def _fitting(self, lines: Longs, memory: Bytes) -> int:
        """How many of the first of these records fit into the memory."""
        ends = np.cumsum(self.cache.stride + lines * LINE)
        return int(np.searchsorted(ends, len(memory), side="right"))

    def _records(self, count: int) -> Records:
        rows, tails = np.empty((0, self.cache.stride), np.uint8), np.empty((0, LINE), np.uint8)
        return Records(np.full(count, ABSENT, np.int64), np.zeros(count, np.int64), rows, tails)

    def put(self, ids: Longs, records: Records) -> npt.NDArray[np.bool_]:
        """Store what another machine brings; returns which samples are there now."""
        store = self._store
        there = records.generations >= 0
        if not there.any():
            return there
        tails_at = records.rows.size
        ends = np.cumsum(records.lines[there])
        starts = tails_at + (ends - records.lines[there]) * LINE
        # Samples are views of this memory, which must be writable, and is theirs.
        memory = bytearray(records.rows.nbytes + records.tails.nbytes)
        memory[:tails_at] = records.rows.reshape(-1).data
        memory[tails_at:] = records.tails.reshape(-1).data
        samples = dict(zip(ids[there].tolist(), store.schema.read(memory, 0, starts.tolist()), strict=True))
        store.fill(ids[there], samples.__getitem__, keep=False)
        return store.present(ids) & there
