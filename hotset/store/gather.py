"""The gather: copies a whole batch out of the store, one copy for each leaf, no Python for each sample.

A fixed leaf is a column of strided rows (:mod:`hotset.store.batch_layout`), and ``torch.index_select`` copies
the rows of a batch straight to where the batch will be (strided rows as fast as contiguous ones). Variable
leaves come as runs of lines, one more selection with an index that numpy builds.

::

    prepare    look the words up, lay the batch out, list the selections    the consumer's thread
    run        select: nothing but copies                                   any thread
    finish     compare the index words again, and put the columns           the consumer's thread
               together

A batch with a sample that has a form of its own (:mod:`hotset.store.irregular_records`) is not gathered: its
samples are read one by one, and collated.

Some of a batch's records may have come from other machines
(:class:`hotset.store.record_batch.RecordBatch`). They are copied from there to their places, and the
records of this machine around them.

The batch must equal what the collate function makes of the same samples. So one sample is collated both ways
and compared, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hotset.store import format as fmt
from hotset.store.batch_layout import BatchTree, Column, NotGathered, batch_dtype
from hotset.store.claims import Ids
from hotset.store.format import PRESENT, ROW_MASK
from hotset.store.leaves.array_leaf import ArrayLeaf
from hotset.store.leaves.leaf import Leaf
from hotset.store.leaves.python_leaves import TextLeaf
from hotset.store.leaves.schema import Schema
from hotset.store.ragged import Ragged
from hotset.store.record_batch import RecordBatch, VariableTails, heads_of, runs
from hotset.store.segment import Words
from hotset.store.spill import StagedBatch
from hotset.store.store import Store

__all__ = ["Copy", "Gather", "Memory", "MixedBatch"]

Heads = npt.NDArray[np.void]

_ALIGN_TAIL = 16


class Memory(Protocol):
    """The memory of a batch: returns a tensor of ``size`` bytes at ``offset``, with a storage of its own."""

    def tensor(self, offset: int, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor: ...


class Piece(NamedTuple):
    """A part of a column: these rows of a view (None: all, in order), and where in the batch they go."""

    view: Any
    rows: Words | None
    places: Ids
    out: Any


class MixedBatch(NamedTuple):
    """A batch of which some records are in the store, and the others were received from other machines.

    Attributes:
        here: positions in the batch of the records that are in the store.
        received: the other records.
        there: their positions in the batch, for each part of ``received``.
    """

    here: Ids
    received: Sequence[RecordBatch]
    there: list[Ids]

    @classmethod
    def of(cls, ids: Ids, words: Words, received: Sequence[RecordBatch]) -> MixedBatch | None:
        """Return the batch; None if a record is missing, or a received one occurs in it more than once.

        Args:
            words: of the index.
            received: records of different samples, all of this batch; the ids of each part ascending.
        """
        is_here = np.ones(len(ids), np.bool_)
        there = []
        for each in received:
            places = np.flatnonzero(np.isin(ids, each.ids))
            places = places[np.argsort(ids[places])]
            if not np.array_equal(ids[places], each.ids):
                return None
            is_here[places] = False
            there.append(places)
        here = np.flatnonzero(is_here)
        return cls(here, received, there) if (words[here] >= PRESENT).all() else None

    def heads(self, heads: Heads) -> Heads:
        """The heads of all rows, in the batch's order; takes those of the rows in the store."""
        head = heads.dtype
        whole = np.empty(sum(map(len, (self.here, *self.there))), head)
        whole[self.here] = heads
        for each, places in zip(self.received, self.there, strict=True):
            whole[places] = heads_of(each.rows, head)
        return whole

    def pieces(self, column: Column, view: Any, rows: Words, out: Any) -> list[Piece]:
        """The parts of one column; ``view`` and ``rows`` say where it lies in the store."""
        ends = column.offset + column.width
        pieces = [Piece(view, rows, self.here, out)] if len(rows) else []
        return pieces + [
            Piece(each.rows[:, column.offset : ends], None, places, out)
            for each, places in zip(self.received, self.there, strict=True)
        ]

    def lines(self, tails: VariableTails) -> tuple[Words, list[tuple[Any, Words]]]:
        """Where the store's lines go; and for each received part its lines, and where they go."""

        def places_of_lines(places: Ids) -> Words:
            return runs(tails.starts[places], tails.counts[places])

        pieces = [
            (each.tails, places_of_lines(places))
            for each, places in zip(self.received, self.there, strict=True)
            if len(each.tails)
        ]
        return places_of_lines(self.here), pieces


class Copy:
    """A batch that was looked up and is ready to be copied: what to select, and where it goes.

    :meth:`run` holds the interpreter for a few microseconds only, so that a thread can run one copy after
    the other while the consumer's thread prepares and finishes them. In the batch's memory, ``block``, the
    lines of all tails come behind the columns.

    Attributes:
        columns: of the batch: the memory of each, and its offset in the block.
        to_reorder: by the number of its column: what is selected of a column whose axes are stored in another
            order, until :meth:`Gather.finish` copies it in the batch's.
        selections: rows to select with torch: from where, which, to where.
        pieces: the same, where records come from several places.
        lines, lines_at: memory for the lines of all tails, and its offset in the block.
        sound: whether the records have stayed the same until they were copied.
    """

    def __init__(self, store: Store, count: int, found: _Found, block: Memory, columns_bytes: int) -> None:
        self._store = store
        self.count = count
        self.found = found
        self.block = block
        self.selections: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.pieces: list[Piece] = []
        self.columns: list[tuple[torch.Tensor, int]] = []
        self.to_reorder: dict[int, torch.Tensor] = {}
        self.lines: torch.Tensor | None = None
        self.lines_at = columns_bytes
        self.sound = True
        if found.tails is not None:
            self.lines = block.tensor(columns_bytes, found.tails.total * fmt.LINE)

    def run(self) -> None:
        """Copy. The caller keeps torch to one thread."""
        staged = self.found.staged
        if staged is not None and not staged.is_loaded and not self._store.load(staged):
            self.sound = False
            return
        with self._store.participant.reading:
            self.sound = self._store.unchanged(self.found.words, self.found.clear_generation)
            if self.sound:
                self._copy()

    def _copy(self) -> None:
        for view, index, out in self.selections:
            torch.index_select(view, 0, index, out=out)
        for piece in self.pieces:
            # numpy copies rows to where they belong as fast as torch selects them; torch's index_copy_ takes
            # ten times as long where rows are strided.
            piece.out[piece.places] = piece.view if piece.rows is None else piece.view[piece.rows]
        if self.lines is not None:
            self._copy_lines(self.lines.numpy().reshape(-1, fmt.LINE))

    def _copy_lines(self, into: npt.NDArray[np.uint8]) -> None:
        found = self.found
        assert found.line_numbers is not None
        assert found.tails is not None
        # Lines are contiguous and short: numpy takes them twice as fast as torch.
        lines = self._store.lines if found.staged is None else found.staged.records.tails
        if found.mix is None:
            lines.take(found.line_numbers, axis=0, out=into, mode="clip")
            return
        here, pieces = found.mix.lines(found.tails)
        into[here] = lines.take(found.line_numbers, axis=0, mode="clip")
        for tails, places in pieces:
            into[places] = tails


class Gather:
    """Batches of one store, for one way of collating.

    Args:
        store: where the samples are.
        collate: the function whose batches these must equal.
        variable: makes of a variable array's ragged batch what the collate function makes of its samples;
            None: such arrays are not gathered.

    Raises:
        NotGathered: the batches of this schema are not columns.
    """

    def __init__(
        self, store: Store, collate: Callable[[list[Any]], Any], variable: Variable | None = None
    ) -> None:
        self.store = store
        self._schema: Schema = store.schema
        self._variable = variable
        self._collate = collate
        self._tree = BatchTree(self._schema, variable=variable is not None)
        self._views = self._tree.views(store.rows)

    def prepare(
        self, ids: Ids, memory: Callable[[int], Memory | None], received: Sequence[RecordBatch] = ()
    ) -> Copy | None:
        """Look up a batch and say what has to be copied where.

        Args:
            memory: returns memory for that many bytes, or None if there is not enough.
            received: records that the store lacks; the caller leaves them as they are until the copy was run.

        Returns:
            The copy to be made; None if a sample is not in the store, or has a form of its own, or if
            there is no memory.
        """
        found = self._look_up(ids, received)
        if found is None:
            return None
        # In inference mode, which is that of this thread alone, tensors are made that no other may write to.
        with torch.inference_mode(False):
            return self._planned(len(ids), found, memory)

    def _planned(self, count: int, found: _Found, memory: Callable[[int], Memory | None]) -> Copy | None:
        """The copy of the records that were found; None if there is no memory."""
        offsets, size = self._tree.layout(count)
        block = memory(size + found.tails.total * fmt.LINE if found.tails is not None else size)
        if block is None:
            return None
        copy = Copy(self.store, count, found, block, size)
        index = torch.from_numpy(found.rows)
        for column, view, offset in zip(self._tree.columns, found.views, offsets, strict=True):
            out = block.tensor(offset, count * column.width)
            copy.columns.append((out, offset))
            if column.is_reordered:
                # Stored in another order: selected to memory of its own, then copied in the batch's.
                out = torch.empty_like(out)
                copy.to_reorder[len(copy.columns) - 1] = out
            if column.width:
                out = out.view(count, column.width)
                if found.mix is None:
                    copy.selections.append((view, index, out))
                else:
                    copy.pieces += found.mix.pieces(column, view.numpy(), found.rows, out.numpy())
        return copy

    def _look_up(self, ids: Ids, received: Sequence[RecordBatch]) -> _Found | None:
        """Where the records of a batch lie; None if one is missing, irregular, or changes just now."""
        store = self.store
        clear_generation = store.clear_generation()
        words = store.words(ids)
        if clear_generation is None or not len(ids):
            return None
        mix = None
        if int(np.minimum.reduce(words)) < PRESENT:
            mix = MixedBatch.of(ids, words, received)
            if mix is None:
                return None
            ids, words = ids[mix.here], words[mix.here]
        if not store.are_common(words) or not all(each.are_common for each in received):
            return None  # irregular records have no columns
        if not store.verification.rows_exist(ids, words):
            return None
        if store.verification.verified is not None and not store.present(ids).all():
            return None
        tails, views, staged = None, self._views, None
        if store.on_disk(words):
            staged = store.stage(ids, words)
            # Without tails the disk is read when the copy is run, which may be in a thread.
            if self._schema.has_tail and not store.load(staged):
                return None
            tails, rows = staged.tails, np.arange(len(ids))
            views = self._tree.views(staged.records.rows)
        elif self._schema.has_tail:
            with store.participant.reading:
                found = store.locate(ids, words, clear_generation)
            if found is None:
                return None
            rows, tails = found
        else:
            rows = words & ROW_MASK
        lines = None
        if tails is not None:
            lines = tails.lines() if staged is None else np.arange(tails.total)
            tails = tails if mix is None else VariableTails(mix.heads(tails.heads))
        return _Found(clear_generation, words, rows, views, staged, lines, tails, mix)

    def finish(
        self, copy: Copy, place: Callable[[torch.Tensor, int], Any], start: int = 0, stop: int | None = None
    ) -> Any | None:
        """Return the batch once its bytes are there; None if a sample left the store meanwhile.

        Several small batches can be copied as one. Each is then finished by itself, with tensors that have
        storages of their own, though in one block.

        Args:
            place: what becomes of a finished column, and its offset in the block: the tensor, or an object
                with a method ``unbind`` that stands for it.
            start, stop: which of the copy's samples the batch has.
        """
        if not copy.sound or not self.store.unchanged(copy.found.words, copy.found.clear_generation):
            return None
        tree = self._tree
        stop = copy.count if stop is None else stop
        count, whole = stop - start, stop - start == copy.count
        columns = []
        for number, (column, (out, offset)) in enumerate(zip(tree.columns, copy.columns, strict=True)):
            if whole:
                # In inference mode an inference tensor, whatever the mode was as the batch was prepared.
                done = out.view(column.dtype).view(column.batched(count))
            else:
                offset += start * column.width
                done = copy.block.tensor(offset, count * column.width, column.dtype)
                done = done.view(column.batched(count)) if column.shape else done
            if column.is_reordered and column.width:
                gathered = copy.to_reorder[number].view(copy.count, column.width)[start:stop]
                done.copy_(column.reordered(gathered))
            placed = place(done, offset)
            columns.append(_positions(placed) if column.numbers else placed)
        variables = self._variables(copy, start, stop) if copy.lines is not None else []
        return tree.assemble(columns, variables)

    def _variables(self, copy: Copy, start: int, stop: int) -> list[Any]:
        """The variable leaves of a batch: text as lists, arrays ragged or padded."""
        schema, tails, lines = self._schema, copy.found.tails, copy.lines
        assert tails is not None
        assert lines is not None
        first = 0
        if stop - start < copy.count:
            first = int(tails.starts[start])
            end = tails.total if stop == copy.count else int(tails.starts[stop])
            lines = copy.block.tensor(copy.lines_at + first * fmt.LINE, (end - first) * fmt.LINE)
        starts = (tails.starts[start:stop] - first) * fmt.LINE
        found: list[Any] = []
        for place in schema.variable:
            leaf = schema.leaves[place]
            shapes = tails.heads[str(place)][start:stop].astype(np.int64)
            sizes = np.multiply.reduce(shapes, axis=1)
            if leaf.itemsize > 1:
                sizes *= leaf.itemsize
            found.append(self._variable_column(leaf, lines, starts, sizes, shapes))
            if place != schema.variable[-1]:
                starts = starts + -(-sizes // _ALIGN_TAIL) * _ALIGN_TAIL
        return found

    def _variable_column(
        self, leaf: Leaf, lines: torch.Tensor, starts: Words, sizes: Words, shapes: Words
    ) -> Any:
        if isinstance(leaf, TextLeaf):
            raw = memoryview(lines.numpy().data)
            ends = (starts + sizes).tolist()
            parts = [bytes(raw[start:end]) for start, end in zip(starts.tolist(), ends, strict=True)]
            if leaf.kind == "bytes":
                return parts
            return [part.decode("utf-8", "surrogatepass") for part in parts]
        assert isinstance(leaf, ArrayLeaf)
        assert self._variable is not None
        dtype = batch_dtype(leaf)
        return self._variable(Ragged(lines, starts, shapes, dtype))

    # ---- comparing with collate ------------------------------------------------------------------------

    def compare(self, sample: int) -> None:
        """Make a batch of one present sample both ways and compare the two.

        Raises:
            NotGathered: the two ways differ in types, dtypes, shapes or values.
        """
        ids = np.array([sample, sample])
        samples = self.store.read(ids)
        if samples is None:
            return
        try:
            wanted = self._collate(samples)
        except Exception as error:  # the user sees it when the samples are collated
            raise NotGathered(f"collating raises {type(error).__name__}") from error
        copy = self.prepare(ids, lambda size: _Fresh())
        if copy is None:
            return
        copy.run()
        gathered = self.finish(copy, lambda done, offset: done)
        if gathered is None:
            return
        if not _alike(gathered, wanted):
            raise NotGathered("its collate function makes other batches")


class _Found(NamedTuple):
    """Where the records of a batch lie.

    Attributes:
        clear_generation, words: of those in the store; :meth:`Gather.finish` sees by them whether they are
            still there.
        rows, views: their rows, and the columns that these are rows of.
        staged: what they are copied to first, if some are on a disk.
        line_numbers: the lines of their tails, one run behind the other.
        tails: of the whole batch.
        mix: which records are in the store, and which were received; None if all are in the store.
    """

    clear_generation: int
    words: Words
    rows: Words
    views: list[torch.Tensor]
    staged: StagedBatch | None
    line_numbers: Words | None
    tails: VariableTails | None
    mix: MixedBatch | None


# What becomes of a variable array's ragged batch: itself, or a padded tensor.
Variable = Callable[[Ragged], Any]


def _positions(placed: Any) -> Any:
    """A list with a tensor for each position, or what becomes that: ``placed`` has a row for each."""
    return list(placed.unbind()) if isinstance(placed, torch.Tensor) else placed.unbind()


class _Fresh:
    def tensor(self, offset: int, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(size // dtype.itemsize, dtype=dtype, device="cpu")


def _alike(a: Any, b: Any) -> bool:
    """Whether two batches are equal in types, dtypes, devices, shapes, strides and bytes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.device, a.shape, a.stride()) != (b.dtype, b.device, b.shape, b.stride()):
            return False
        return bool(
            (a.contiguous().view(-1).view(torch.uint8) == b.contiguous().view(-1).view(torch.uint8)).all()
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, Ragged)):
        return len(a) == len(b) and all(_alike(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
