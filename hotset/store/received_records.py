"""Loose records: sound ones that lie in no segment of this machine, as another one has sent them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.store import irregular_records as forms
from hotset.store.batch_layout import Column
from hotset.store.claims import Ids
from hotset.store.format import LINE, OWN_STAMP, PRESENT, RECORD_HEADER
from hotset.store.schema import Schema
from hotset.store.segment import Words
from hotset.store.varlen import VariableTails, runs

__all__ = ["MixedBatch", "Piece", "ReceivedRecords"]

Heads = npt.NDArray[np.void]


class ReceivedRecords(NamedTuple):
    """Records side by side in memory that nobody else writes to.

    Attributes:
        ids: of their samples, each once, ascending.
        lines: of each record's tail.
        rows: uint8 of shape (records, stride).
        tails: uint8 of shape (sum of lines, 256).
    """

    ids: Ids
    lines: Words
    rows: npt.NDArray[np.uint8]
    tails: npt.NDArray[np.uint8]

    @property
    def are_common(self) -> bool:
        """Whether all of them have the common form."""
        return not (self.rows[:, 4:8].copy().view("<u4") & OWN_STAMP).any()

    def samples(self, schema: Schema, *, decode: bool = True) -> dict[int, Any]:
        """Put the samples together, by number, in memory of their own, all in one piece.

        Args:
            schema: of the store's.
            decode: see :func:`hotset.store.irregular_records.read`.

        Raises:
            SegmentError: a form of its own cannot be read here.
        """
        if not len(self.ids):
            return {}
        memory = np.empty(self.rows.nbytes + self.tails.nbytes, np.uint8)
        memory[: self.rows.nbytes] = self.rows.reshape(-1)
        memory[self.rows.nbytes :] = self.tails.reshape(-1)
        starts = self.rows.nbytes + (np.cumsum(self.lines) - self.lines) * LINE
        found = forms.read(schema, memory.data, 0, starts.tolist(), decode=decode)
        return dict(zip(self.ids.tolist(), found, strict=True))


class Piece(NamedTuple):
    """A part of a column: these rows of a view (None: all, in order), and where in the batch they go."""

    view: Any
    rows: Words | None
    places: Ids
    out: Any


class MixedBatch(NamedTuple):
    """A batch of which some records are in the store, at these places, and the others are loose, at those."""

    here: Ids
    loose: Sequence[ReceivedRecords]
    there: list[Ids]

    @classmethod
    def of(cls, ids: Ids, words: Words, loose: Sequence[ReceivedRecords]) -> MixedBatch | None:
        """Put a batch together; None if a record is missing, or a loose one is asked for more than once.

        Args:
            ids: of the batch.
            words: of the index.
            loose: records of different samples, all of this batch.
        """
        is_here = np.ones(len(ids), np.bool_)
        there = []
        for each in loose:
            places = np.flatnonzero(np.isin(ids, each.ids))
            places = places[np.argsort(ids[places])]
            if not np.array_equal(ids[places], each.ids):
                return None
            is_here[places] = False
            there.append(places)
        here = np.flatnonzero(is_here)
        return cls(here, loose, there) if (words[here] >= PRESENT).all() else None

    def heads(self, heads: Heads) -> Heads:
        """The heads of all rows, in the batch's order; given those of the store's."""
        head = heads.dtype
        whole = np.empty(sum(map(len, (self.here, *self.there))), head)
        whole[self.here] = heads
        for loose, places in zip(self.loose, self.there, strict=True):
            width = loose.rows[:, RECORD_HEADER : RECORD_HEADER + head.itemsize]
            whole[places] = np.ascontiguousarray(width).view(head)[:, 0]
        return whole

    def pieces(self, column: Column, view: Any, rows: Words, out: Any) -> list[Piece]:
        """What is copied for one column; ``view`` and ``rows`` say where the store has it."""
        ends = column.offset + column.width
        pieces = [Piece(view, rows, self.here, out)] if len(rows) else []
        return pieces + [
            Piece(loose.rows[:, column.offset : ends], None, places, out)
            for loose, places in zip(self.loose, self.there, strict=True)
        ]

    def lines(self, tails: VariableTails) -> tuple[Words, list[tuple[Any, Words]]]:
        """Where the lines go that the store has, and those of each loose part, which are given as well."""

        def places_of_lines(places: Ids) -> Words:
            return runs(tails.starts[places], tails.counts[places])

        pieces = [
            (each.tails, places_of_lines(places))
            for each, places in zip(self.loose, self.there, strict=True)
            if len(each.tails)
        ]
        return places_of_lines(self.here), pieces
