"""The ring: a store whose rows are used again, for a window that runs over more samples than it can hold.

Samples enter the window in an endless sequence of *entries* 0, 1, 2, ... (:mod:`hotset.policy.window`), and
here an entry's number is the sample's. The live word ``CURSOR`` says how many have left; it only ever rises.
Any M entries in a row are different samples, so entry ``k`` has its place in slot ``k mod M``, in *lap*
``k div M``, and rows need no allocator::

    entry   ... cursor-1 │ cursor ............ cursor+N-1 │ ... cursor+M-1 │ ...
                  left   │         resident               │    incoming    │ to come
    slot             ────┴── each of the M slots once ────┴────────────────┴─ again from here

The index has a word for each slot. A record's word holds its lap in the place of the generation, so that a
reader knows the one word that means its entry; every other means "absent"::

    absent or left ── claim ──> claimed ── publish ──> present in lap l ── cursor passes ──> left
        ^                          │                                                          │
        └── refused in lap l <─────┴── no room, or cannot be kept              its lines, or its slot,
                                                                               are wanted by another entry

**Readers** take no lock: they load the words, copy, and load the words again. Equal words mean that nobody
wrote there meanwhile, because a word never comes back once it was gone: what is resident is never replaced
and what has left is never claimed again. (The lap's 20 bits repeat after a million laps, which no reader
sleeps through. A *clear* lets words come back, and counts the era up.) The tail's place in a row that was
being written is garbage, so the words are looked at before it is used, too.

**Who may claim**: one of the M entries from the cursor on, in a slot with no record of another of them. So a
slow process never writes an old entry over a newer one, nor a fast one over what others still use. Claims do
not carry the lap: that of another lap keeps the slot busy, and the entry absent, while its claimant lives.

**Refused** is a word of its own (``lap + 1``, as small as that). To readers it is absent, and who needs the
entry may claim it; but it was tried, and the window need not wait for it: :meth:`Ring.settled`. Nor does it
for one whose word says that it draws random numbers, which nobody may claim.

**Room** is :mod:`hotset.store.ring_allocator`'s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import SegmentError
from hotset.store.claims import Ids
from hotset.store.format import DRAWS, LINE, PRESENT, ROW_MASK
from hotset.store.ring_allocator import RingAllocator
from hotset.store.ring_index import RingIndex
from hotset.store.schema import Schema
from hotset.store.segment import Address, Words
from hotset.store.store import Store

__all__ = ["Ring", "attach_store"]

Mask = npt.NDArray[np.bool_]


class Ring(Store):
    """Entries of a running window in one segment, as this process sees them.

    Where ``about`` says ``"shared"``, other machines hold the rest of it.

    Wherever :class:`Store` speaks of samples and their numbers, these are entries, of any size from 0 on
    (int64); ``create`` is told the number of slots, and ``len`` returns it. What its readers get, and what
    :meth:`fill` stores, is the store's, and of entries that have left nothing is stored any more.

    The live word ``CURSOR`` is whoever's who moves the window. To move it back, :meth:`clear` the ring.

    Example:
        >>> import torch
        >>> from hotset.store.format import Live
        >>> schema = Schema.infer([torch.zeros(2)], as_lies=True)
        >>> ring = Ring.create(schema, 4, 1 << 20, about={})
        >>> _ = ring.fill(np.arange(4), lambda entry: torch.tensor([entry, 0.0]))
        >>> ring.segment.live[Live.CURSOR] = 2
        >>> _ = ring.fill(np.arange(4, 6), lambda entry: torch.tensor([entry, 0.0]))
        >>> ring.read(np.array([5, 2]))
        [tensor([5., 0.]), tensor([2., 0.])]
        >>> ring.present(np.arange(6)).tolist()
        [False, False, True, True, True, True]
        >>> ring.close()
    """

    _index_type = RingIndex
    _room_type = RingAllocator
    _is_ring = True

    @staticmethod
    def _address_space(schema: Schema, samples: int, limit: int, about: dict[str, Any]) -> tuple[int, int]:
        if about.get("shared"):
            return samples, max(limit // LINE, 1)
        # Rows come first, so that rows and lines together never pass the limit.
        rows = min(samples, limit // schema.stride)
        return rows, max((limit - rows * schema.stride) // LINE, 1)

    def unchanged(self, words: Words, era: int) -> bool:
        same: Mask = self.segment.index[words & ROW_MASK] == words
        return bool(np.logical_and.reduce(same)) and self.era() == era

    def holds(self, ids: Ids | None = None) -> bool:
        return ids is not None and super().holds(ids)  # all entries are more than there is room for

    @property
    def stored_bytes(self) -> int:
        slots, _ = RingIndex(self.segment).records()
        lines = int(self.tails(slots).counts.sum())
        return self.segment.geometry.taken(len(slots), lines)

    def settled(self, entries: Ids) -> Mask:
        """Which of these entries are in the store, were refused, or draw: nobody needs to wait for those."""
        words = self.words(entries)
        settled: Mask = (words >= PRESENT) | ((words & ~DRAWS) == self.index.refusals(entries))
        # Where the limit has room for fewer rows than there are slots, some entries are never stored.
        settled |= self.index.places(entries) >= self.segment.geometry.rows
        return settled & (self.era() is not None)

    def refuse(self, entries: Ids) -> None:
        """Note that these entries were tried in vain, as far as they are absent and nobody is reading them.

        For who fills ahead of those who need the entries, and whose reading of the source failed.
        """
        self.filler.claims.refuse(entries)


def attach_store(where: Address | str) -> Store:
    """Attach to a store, a ring or not.

    Raises:
        SegmentError: it is gone, or damaged.
    """
    try:
        return Store.attach(where)
    except SegmentError:
        return Ring.attach(where)
