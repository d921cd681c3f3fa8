"""The gather: from index words to a whole batch, one copy for each leaf, no Python for each sample.

A fixed leaf is a column of strided rows, and ``torch.index_select`` copies the rows of a batch straight to
where the batch will be (strided rows as fast as contiguous ones). Variable leaves come as runs of lines, one
more selection with an index that numpy builds.

What comes out must be exactly what the collate function makes of the same samples: tensors stacked, ints
int64, floats float64, text in lists, tuples as lists, namedtuples kept, tv_tensors plain. Where a schema
holds something that collating treats otherwise (None, PIL images, MetaTensors, a type that the user has
taught ``default_collate``), it is not gathered: :class:`NotGathered` says why, and the samples are read
one by one and collated as ever. To be sure, the first samples are collated both ways and compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hotset.store import format as fmt
from hotset.store.claims import Ids
from hotset.store.codecs import codec_named
from hotset.store.format import PRESENT, ROW_MASK
from hotset.store.leaves import ArrayLeaf, Leaf, NumberLeaf, TextLeaf
from hotset.store.ragged import Ragged
from hotset.store.schema import Group, Node, Schema
from hotset.store.segment import Words
from hotset.store.spill import Staged
from hotset.store.store import Store
from hotset.store.tails import Tails

__all__ = ["Column", "Copy", "Gather", "Memory", "NotGathered"]

_ALIGN = 64
_ALIGN_TAIL = 16


class Memory(Protocol):
    """Where a batch goes: gives a tensor of ``size`` bytes at ``offset``, each a storage of its own."""

    def tensor(self, offset: int, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor: ...


class Copy:
    """A batch looked up and ready to be copied: what to select, and where it goes.

    :meth:`run` needs the interpreter for a few microseconds only, so that a thread can run one copy after
    the other while the consumer's thread prepares and finishes them.
    """

    def __init__(self, gather: Gather, count: int, words: Words, era: int, block: Memory) -> None:
        self.gather = gather
        self.count = count
        self.block = block
        self.words = words
        self.era = era
        self.selections: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.columns: list[tuple[torch.Tensor, int]] = []
        self.lying: dict[int, torch.Tensor] = {}
        self.tails: Tails | None = None
        self.lines: torch.Tensor | None = None
        self.staged: Staged | None = None
        self.sound = True
        self.lines_at = 0
        self.line_numbers: Words | None = None

    def run(self) -> None:
        """Copy. The caller keeps torch to one thread."""
        if self.staged is not None and not self.gather.load(self.staged):
            self.sound = False
            return
        with self.gather.reading:
            self.sound = self.gather.is_current(self)
            if self.sound:
                self._copy()

    def _copy(self) -> None:
        for view, index, out in self.selections:
            torch.index_select(view, 0, index, out=out)
        if self.lines is not None and self.line_numbers is not None and len(self.line_numbers):
            # Lines are contiguous and short: numpy takes them twice as fast as torch.
            into = self.lines.numpy().reshape(-1, fmt.LINE)
            lines = self.gather.lines if self.staged is None else self.staged.lines
            lines.take(self.line_numbers, axis=0, out=into, mode="clip")


class NotGathered(Exception):
    """This schema's batches are not made by copying columns; the message says why."""


@dataclass(frozen=True)
class Column:
    """A fixed leaf in a batch.

    Attributes:
        offset: of the leaf in a row.
        width: bytes of the leaf.
        dtype: of the batch's tensor.
        shape: of one sample in it.
        lies: stored shape and the permutation back from it, where samples are not stored as they count.
    """

    offset: int
    width: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    lies: tuple[tuple[int, ...], tuple[int, ...]] | None


class Gather:
    """Batches of one store, for one way of collating.

    Args:
        store: where the samples are.
        variable: what a variable array becomes: ``None`` (not gathered), ``"ragged"`` or a pad value.
        collate: the function whose batches these must equal.
        sample: a number of a sample that is present, to compare with.

    Raises:
        NotGathered: the batches of this schema are not columns.
    """

    def __init__(
        self, store: Store, collate: Callable[[list[Any]], Any], variable: Variable | None = None
    ) -> None:
        self._store = store
        self._schema: Schema = store.schema
        self._variable = variable
        self._collate = collate
        self._compared = False
        self._layouts: dict[int, tuple[list[int], int]] = {}
        self.columns: list[Column] = []
        self._texts = False
        found = iter(range(len(self._schema.leaves)))
        self._assemble = self._compile(self._schema.tree, found)
        self.lines = store.lines
        self.reading = store.member.reading
        self._views = self._views_of(store.rows)

    # ---- compiling the tree --------------------------------------------------------------------------

    def _compile(self, node: Node, places: Iterator[int]) -> Callable[[list[Any], list[Any]], Any]:
        """Return a function from (columns, variable leaves) to this node's part of the batch."""
        if isinstance(node, Group):
            return self._compile_group(node, places)
        place = next(places)
        offset = self._schema.offsets[place]
        if isinstance(node, TextLeaf) or (isinstance(node, ArrayLeaf) and node.shape is None):
            number = self._schema.variable.index(place)
            if isinstance(node, ArrayLeaf) and (self._variable is None or not node.is_plain):
                raise NotGathered("its shapes vary")
            return lambda columns, variables: variables[number]
        if isinstance(node, ArrayLeaf):
            dtype = node.torch_dtype if node.library == "torch" else _torch_dtype(node.dtype)
            shape: tuple[int, ...] = node.shape or ()
            lies = None
            if node.as_lies and not node.is_plain:
                inverse = np.argsort(node.order).tolist()
                lies = (node.stored_shape(shape), tuple(1 + axis for axis in inverse))
            column = Column(offset, node.fixed_bytes or 0, dtype, shape, lies)
        elif isinstance(node, NumberLeaf):
            names = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
            column = Column(
                offset, node.fixed_bytes, names.get(node.kind) or _torch_dtype(node.kind), (), None
            )
        else:
            raise NotGathered(f"it holds {type(node).__name__}")
        number = len(self.columns)
        self.columns.append(column)
        return lambda columns, variables: columns[number]

    def _compile_group(self, group: Group, places: Iterator[int]) -> Callable[[list[Any], list[Any]], Any]:
        if group.kind == "object":
            codec = codec_named(group.codec or "")
            if codec is None or codec.stacks is None or not isinstance(group.children[0], Group):
                raise NotGathered(f"it holds {group.codec}")
            parts = [self._compile_part(child, places) for child in group.children[0].children]
            stacked = parts[codec.stacks]
            if stacked is None:
                raise NotGathered(f"its {group.codec} vary in shape")
            return stacked
        parts_of: list[Callable[[list[Any], list[Any]], Any]] = [
            self._compile(child, places) for child in group.children
        ]
        if group.kind in ("list", "tuple", "namedtuple"):
            # Columns of text in a sequence are what ``zip`` made of it: tuples, and lists everywhere else.
            parts_of = [
                _as_tuple(part) if isinstance(child, TextLeaf) else part
                for child, part in zip(group.children, parts_of, strict=True)
            ]
        if group.kind in ("dict", "OrderedDict"):
            make = dict if group.kind == "dict" else OrderedDict
            return lambda c, v: make(
                (key, part(c, v)) for key, part in zip(group.keys, parts_of, strict=True)
            )
        if group.kind in ("list", "tuple"):
            return lambda c, v: [part(c, v) for part in parts_of]
        if group.kind == "namedtuple":
            cls: Any = group.type
            return lambda c, v: cls(*(part(c, v) for part in parts_of))
        raise NotGathered(f"it holds a {group.kind}")

    def _compile_part(
        self, node: Node, places: Iterator[int]
    ) -> Callable[[list[Any], list[Any]], Any] | None:
        """As :meth:`_compile`, for parts of an object of which only one is stacked."""
        before = len(self.columns)
        own = [next(places) for _ in range(_count_leaves(node))]
        try:
            return self._compile(node, iter(own))
        except NotGathered:
            del self.columns[before:]
            return None

    # ---- gathering -----------------------------------------------------------------------------------

    def layout(self, count: int) -> tuple[list[int], int]:
        """Offsets of the columns in the block of a batch of ``count``, and the bytes of them all."""
        known = self._layouts.get(count)
        if known is None:
            offsets, at = [], 0
            for column in self.columns:
                offsets.append(at)
                at += -(-column.width * count // _ALIGN) * _ALIGN
            known = self._layouts[count] = (offsets, at)
        return known

    def prepare(self, ids: Ids, memory: Callable[[int], Memory | None]) -> Copy | None:
        """Look up a batch and say what has to be copied where.

        Args:
            ids: sample numbers.
            memory: gives memory for that many bytes, or None if it has not so much.

        Returns:
            The copy to be made; None if a sample is not in the store (any more), or there is no memory.
        """
        store = self._store
        era = store.era()
        words = store.words(ids)
        if era is None or not len(ids) or int(np.minimum.reduce(words)) < PRESENT or not self._sound(ids):
            return None
        rows = words & ROW_MASK
        count = len(ids)
        offsets, size = self.layout(count)
        tails, views, staged = None, self._views, None
        if store.on_disk(words):
            staged = store.stage(ids, words)
            # Without tails the disk is read when the copy is run, which may be in a thread.
            if self._schema.has_tail and not store.load(staged):
                return None
            tails, rows = staged.tails, np.arange(count)
            views = self._views_of(staged.rows)
        elif self._schema.has_tail:
            with self.reading:
                if not store.unchanged(words, era):
                    return None
                tails = store.tails(rows)
            if not store.unchanged(words, era):
                return None  # their places may be half of one record and half of another
        block = memory(size + tails.total * fmt.LINE if tails is not None else size)
        if block is None:
            return None
        copy = Copy(self, count, words, era, block)
        copy.staged = staged
        index = torch.from_numpy(rows)
        for column, view, offset in zip(self.columns, views, offsets, strict=True):
            out = block.tensor(offset, count * column.width)
            copy.columns.append((out, offset))
            if column.lies is not None:
                # Stored as samples lie: selected to memory of its own, laid out as batches count after that.
                out = torch.empty_like(out)
                copy.lying[len(copy.columns) - 1] = out
            if column.width:
                copy.selections.append((view, index, out.view(count, column.width)))
        if tails is not None:
            copy.tails, copy.lines = tails, block.tensor(size, tails.total * fmt.LINE)
            copy.lines_at = size
            copy.line_numbers = tails.lines() if staged is None else np.arange(tails.total)
        return copy

    def finish(
        self, copy: Copy, place: Callable[[torch.Tensor, int], Any], start: int = 0, stop: int | None = None
    ) -> Any | None:
        """Return the batch once its bytes are there; None if a sample left the store meanwhile.

        Several small batches can be copied as one. Each is then finished by itself, with tensors that have
        storages of their own, though in one block.

        Args:
            copy: that was run.
            place: what becomes of a finished column, and its offset in the block.
            start, stop: which of the copy's samples the batch has.
        """
        if not copy.sound or not self._store.unchanged(copy.words, copy.era):
            return None
        stop = copy.count if stop is None else stop
        count, whole = stop - start, stop - start == copy.count
        columns = []
        for number, (column, (out, offset)) in enumerate(zip(self.columns, copy.columns, strict=True)):
            if whole:
                done = out.view(column.dtype).view(count, *column.shape)
            else:
                offset += start * column.width
                done = copy.block.tensor(offset, count * column.width, column.dtype)
                done = done.view(count, *column.shape) if column.shape else done
            if column.lies is not None and column.width:
                stored, back = column.lies
                lying = copy.lying[number].view(column.dtype).view(copy.count, *stored)
                done.copy_(lying[start:stop].permute(0, *back))
            columns.append(place(done, offset))
        variables = self._variables(copy, start, stop) if copy.tails is not None else []
        return self._assemble(columns, variables)

    def _views_of(self, rows: Any) -> list[torch.Tensor]:
        whole = torch.from_numpy(rows)
        return [whole[:, c.offset : c.offset + c.width] for c in self.columns]

    def is_current(self, copy: Copy) -> bool:
        """Whether the records that a copy is to be made of are still there."""
        return self._store.unchanged(copy.words, copy.era)

    def load(self, staged: Staged) -> bool:
        """Copy staged records, if that was not done yet; False if one is damaged."""
        return staged.is_loaded or self._store.load(staged)

    def _sound(self, ids: Ids) -> bool:
        return self._store.verified is None or bool(self._store.present(ids).all())

    def _variables(self, copy: Copy, start: int, stop: int) -> list[Any]:
        """The variable leaves of a batch: text as lists, arrays ragged or padded."""
        schema, tails, lines = self._schema, copy.tails, copy.lines
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
            if isinstance(leaf, ArrayLeaf):
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
        dtype = leaf.torch_dtype if leaf.library == "torch" else _torch_dtype(leaf.dtype)
        return self._variable(Ragged(lines, starts, shapes, dtype))

    # ---- being sure ----------------------------------------------------------------------------------

    def compare(self, sample: int) -> None:
        """Collate a sample that is present both ways, once.

        Raises:
            NotGathered: the two ways differ in types, dtypes, shapes or values.
        """
        if self._compared:
            return
        ids = np.array([sample, sample])
        samples = self._store.read(ids)
        if samples is None:
            return
        try:
            wanted = self._collate(samples)
        except Exception as error:  # what collating raises, the user must see raised by collating
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
        self._compared = True


# What becomes of a variable array's ragged batch: itself, or a padded tensor.
Variable = Callable[[Ragged], Any]


class _Fresh:
    def tensor(self, offset: int, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(size // dtype.itemsize, dtype=dtype)


def _as_tuple(part: Callable[[list[Any], list[Any]], Any]) -> Callable[[list[Any], list[Any]], Any]:
    return lambda columns, variables: tuple(part(columns, variables))


def _count_leaves(node: Node) -> int:
    return sum(_count_leaves(child) for child in node.children) if isinstance(node, Group) else 1


def _torch_dtype(name: str) -> torch.dtype:
    """The dtype that collating gives to numpy's of that name.

    Raises:
        NotGathered: torch has none (text, dates, another byte order).
    """
    try:
        return torch.from_numpy(np.empty(1, np.dtype(name))).dtype
    except (TypeError, ValueError) as error:
        raise NotGathered(f"it holds numpy's {name}") from error


def _alike(a: Any, b: Any) -> bool:
    """Whether two batches are equal in types, dtypes, shapes, strides and bytes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
            return False
        return bool(
            (a.contiguous().view(-1).view(torch.uint8) == b.contiguous().view(-1).view(torch.uint8)).all()
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, Ragged)):
        return len(a) == len(b) and all(_alike(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
