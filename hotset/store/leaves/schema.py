"""Schema: the tree that most samples of a cache share, and where each leaf lies in a record.

It is inferred from a few samples: the form that most of them have is the common one. A leaf whose shape is
the same in all of these is fixed, a leaf whose shape varies is variable; text always is. A sample that does
not fit (another tree, dtype, number of dimensions, or shape of a fixed leaf) is stored in a form of its own
(:mod:`hotset.store.irregular_records`).

A record's row holds, after its header, the *head* (the tail's place, then the dimensions of each variable
leaf as u32: together, so that one look at a row finds all that is needed to copy its tail), then the fixed
leaves in order of falling item size. The tail holds the variable leaves in the tree's order, each on a
multiple of 16.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.errors import SegmentError
from hotset.store.format import LINE, RECORD_HEADER, TAIL, tail_word
from hotset.store.leaves.array_leaf import ArrayLeaf
from hotset.store.leaves.leaf import Leaf, SchemaMismatch, Shape
from hotset.store.leaves.python_leaves import NumbersLeaf, TextLeaf
from hotset.store.leaves.tree import Node, build, flatten, has_codec, has_holder, leaves_of, widen
from hotset.store.leaves.tree_inference import infer
from hotset.store.leaves.tree_json import DAMAGE, from_json, to_json

__all__ = ["LARGE", "LARGEST_RECORD", "Prepared", "Schema"]

LARGE = 64 << 10  # bytes of an array that is not copied to be written
_ALIGN_TAIL = 16
LARGEST_RECORD = 2 << 30


class Prepared(NamedTuple):
    """A sample that fits, taken apart: what :meth:`Schema.write` writes.

    Attributes:
        values: one checked value for each leaf.
        dims: dimensions of each variable leaf.
        tail_bytes: bytes of the tail.
    """

    values: Sequence[Any]
    dims: Sequence[Shape]
    tail_bytes: int

    @property
    def tail_lines(self) -> int:
        return -(-self.tail_bytes // LINE)


class Schema:
    """A tree of leaves and the record layout that follows from it.

    Attributes:
        tree: the root node.
        leaves: all leaves, in the tree's order.
        offsets: for each leaf its offset in the row: of its bytes if fixed, of its dimensions if variable.
        stride: bytes of a row.
        variable: places of the variable leaves among ``leaves``.
        head: numpy's dtype of what a row begins with, behind its record header.
        has_tail: whether there are variable leaves, so that records of this form may have tails.
        has_codec: whether a codec makes objects of parts of it.
        copies: whether :meth:`read` makes objects that do not share the buffer's memory but have their own.
    """

    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self.leaves: tuple[Leaf, ...] = tuple(leaves_of(tree))
        self.has_tail = any(leaf.fixed_bytes is None for leaf in self.leaves)
        self.variable = [place for place, leaf in enumerate(self.leaves) if leaf.fixed_bytes is None]
        self.has_codec = has_codec(tree)
        self.copies = any(isinstance(leaf, TextLeaf) for leaf in self.leaves) or self.has_codec
        self.offsets, self.stride = self._lay_out()
        self.head = self._head()

    def _lay_out(self) -> tuple[list[int], int]:
        def alignment(place: int) -> int:
            leaf = self.leaves[place]
            if isinstance(leaf, (ArrayLeaf, NumbersLeaf)):
                return leaf.itemsize
            return min(leaf.fixed_bytes or 0, 8)

        offsets = [0] * len(self.leaves)
        at = RECORD_HEADER + TAIL.size
        for place in self.variable:
            offsets[place] = at
            at += 4 * self.leaves[place].dims
        at = -(-at // 8) * 8  # so that gathered heads are aligned to words
        fixed = [place for place, leaf in enumerate(self.leaves) if leaf.fixed_bytes is not None]
        for place in sorted(fixed, key=alignment, reverse=True):
            step = min(alignment(place), 16) or 1
            at = -(-at // step) * step
            offsets[place] = at
            at += self.leaves[place].fixed_bytes or 0
        widest = max(map(alignment, fixed), default=0)
        step = 16 if widest >= 16 else 8  # every row as aligned as the first
        return offsets, -(-at // step) * step

    def _head(self) -> np.dtype[Any]:
        """The head of a row: ``tail`` and, under each variable leaf's place in the tree, its dimensions."""
        places = [str(place) for place in self.variable]
        dims = [self.leaves[place].dims for place in self.variable]
        offsets = [self.offsets[place] - RECORD_HEADER for place in self.variable]
        return np.dtype(
            {
                "names": ["tail", *places],
                "formats": ["<i8", *(("<u4", (count,)) for count in dims)],
                "offsets": [0, *offsets],
                "itemsize": -(-(TAIL.size + 4 * sum(dims)) // 8) * 8,
            }
        )

    @cached_property
    def _has_holder(self) -> bool:
        return has_holder(self.tree)

    @classmethod
    def infer(cls, samples: Sequence[object], *, keep_order: bool) -> Schema:
        """Return the schema that fits most of these samples; of several such, the one that comes first.

        Args:
            samples: at least one.
            keep_order: store arrays in the order that they have in memory: for single samples.

        Raises:
            SchemaMismatch: no sample can be cached; says what the first one holds, and where.
        """
        best: Schema | None = None
        most, refused = 0, None
        for sample in samples:
            if best is not None and best._fits(sample):
                continue  # its form would be the same
            try:
                tree = infer(sample, keep_order)
            except SchemaMismatch as mismatch:
                refused = refused or mismatch
                continue
            for other in samples:
                tree = widen(tree, other)
            schema = cls(tree)
            fitting = sum(map(schema._fits, samples))
            if best is None or fitting > most:
                best, most = schema, fitting
        if best is None:
            assert refused is not None
            raise refused
        return best

    def _fits(self, sample: object) -> bool:
        try:
            self.prepare(sample)
        except SchemaMismatch:
            return False
        return True

    def prepare(self, sample: object) -> Prepared:
        """Take a sample apart and measure it.

        Raises:
            SchemaMismatch: it does not fit, or is larger than 2 GiB; says where and why.
        """
        return self.prepare_all([sample])[0]

    def prepare_all(self, samples: Sequence[object]) -> list[Prepared]:
        """As :meth:`prepare`, for several samples, of which each must fit: leaf by leaf, which is faster."""
        columns: list[list[Any]] = []
        met: list[dict[int, object]] | None = [{} for _ in samples] if self._has_holder else None
        flatten(self.tree, samples, "", columns, met)
        values = list(zip(*columns, strict=True)) if columns else [()] * len(samples)
        if not self.variable and self.stride <= LARGEST_RECORD:
            return [Prepared(each, (), 0) for each in values]
        return [self._measured(each) for each in values]

    def _measured(self, values: tuple[Any, ...]) -> Prepared:
        tail = 0
        dims: list[Shape] = []
        for place in self.variable:
            dims.append(self.leaves[place].shape_of(values[place]))
            tail += -(-_variable_bytes(self.leaves[place], dims[-1]) // _ALIGN_TAIL) * _ALIGN_TAIL
        if tail + self.stride > LARGEST_RECORD:
            raise SchemaMismatch("more than 2 GiB in one sample")
        return Prepared(values, dims, tail)

    def write_rows(self, buffer: Any, row_at: int, prepared: Sequence[Prepared]) -> None:
        """As :meth:`write`, for samples without tails, into rows that follow each other."""
        tails: npt.NDArray[np.uint64]
        tails = np.ndarray((len(prepared),), "<u8", buffer, row_at + RECORD_HEADER, (self.stride,))
        tails[:] = 0
        for place, leaf in enumerate(self.leaves):
            if leaf.fixed_bytes:
                values = [one.values[place] for one in prepared]
                leaf.put_all(buffer, row_at + self.offsets[place], self.stride, values)

    def write(self, buffer: Any, row_at: int, prepared: Prepared, line: int = 0, tail_at: int = 0) -> None:
        """Write a sample's row, from the end of the record header on, and its tail, at these offsets.

        ``line`` is the number of the tail's first line; it is ignored without a tail.
        """
        self.write_row(buffer, row_at, prepared, line)
        for place, dims in zip(self.variable, prepared.dims, strict=True):
            size = _variable_bytes(self.leaves[place], dims)
            if size:
                self.leaves[place].put(buffer, tail_at, prepared.values[place])
            padding = -size % _ALIGN_TAIL
            buffer[tail_at + size : tail_at + size + padding] = bytes(padding)
            tail_at += size + padding

    def write_row(self, buffer: Any, row_at: int, prepared: Prepared, line: int = 0) -> None:
        """As :meth:`write`, without the tail."""
        for place, leaf in enumerate(self.leaves):
            if leaf.fixed_bytes:
                leaf.put(buffer, row_at + self.offsets[place], prepared.values[place])
        TAIL.pack_into(buffer, row_at + RECORD_HEADER, tail_word(line, prepared.tail_lines))
        for place, dims in zip(self.variable, prepared.dims, strict=True):
            struct.pack_into(f"<{len(dims)}I", buffer, row_at + self.offsets[place], *dims)

    def tail_pieces(self, prepared: Prepared) -> Iterator[memoryview]:
        """The bytes of a sample's tail, one leaf after the other; of a large array as it lies in memory."""
        for place, dims in zip(self.variable, prepared.dims, strict=True):
            leaf, value = self.leaves[place], prepared.values[place]
            size = _variable_bytes(leaf, dims)
            if size >= LARGE and isinstance(leaf, ArrayLeaf) and value.flags.c_contiguous:
                yield value.reshape(-1).view(np.uint8).data
            else:
                copied = bytearray(size)
                if size:
                    leaf.put(copied, 0, value)
                yield memoryview(copied)
            yield memoryview(bytes(-size % _ALIGN_TAIL))

    def read(self, buffer: Any, rows_at: int, tails_at: Sequence[int]) -> list[Any]:
        """Put samples together again, leaf by leaf; their arrays share the buffer's memory.

        Args:
            buffer: writable memory that holds copies of rows and tails.
            rows_at: offset of the first row; the others follow, with their record headers.
            tails_at: offset of each sample's tail (ignored without variable leaves).
        """
        tails = list(tails_at)
        found: list[list[Any]] = []
        for leaf, offset in zip(self.leaves, self.offsets, strict=True):
            at = rows_at + offset
            if leaf.fixed_bytes is not None:
                found.append(leaf.get_all(buffer, at, self.stride, len(tails)))
                continue
            values = []
            for place, tail in enumerate(tails):
                dims = struct.unpack_from(f"<{leaf.dims}I", buffer, at + place * self.stride)
                values.append(leaf.get(buffer, tail, dims))
                size = _variable_bytes(leaf, dims)
                tails[place] = tail + -(-size // _ALIGN_TAIL) * _ALIGN_TAIL
            found.append(values)
        return build(self.tree, iter(found), len(tails))

    def reread(self, sample: object) -> Any:
        """The sample as it comes out of a record that was written of it.

        Raises:
            SchemaMismatch: it does not fit.

        Example:
            >>> Schema.infer([{"x": 1.5}], keep_order=True).reread({"x": 2.5})
            {'x': 2.5}
        """
        prepared = self.prepare(sample)
        tail = -(-self.stride // _ALIGN_TAIL) * _ALIGN_TAIL
        record = bytearray(tail + prepared.tail_bytes)
        self.write(record, 0, prepared, 0, tail)
        return self.read(record, 0, [tail])[0]

    def outgrown(self, heads: npt.NDArray[np.void], lines: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
        """Which records have leaves that, by their heads, end beyond their tails; None if none have."""
        end: Any = 0
        for place in self.variable:
            leaf = self.leaves[place]
            # In floats, which do not overflow: four dimensions of 32 bits are 128.
            size = np.multiply.reduce(heads[str(place)], 1, np.float64)
            if leaf.itemsize > 1:
                size *= leaf.itemsize
            end = size if place == self.variable[0] else np.ceil(end / _ALIGN_TAIL) * _ALIGN_TAIL + size
        beyond: npt.NDArray[np.bool_] = end > lines * LINE
        return beyond if np.logical_or.reduce(beyond) else None

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON's types, to be kept in a segment's metadata."""
        return to_json(self.tree)

    @classmethod
    def from_json(cls, described: Any) -> Schema:
        """Return the schema that :meth:`to_json` described.

        Everything in it is verified: see :mod:`hotset.store.leaves.tree_json`.

        Raises:
            SegmentError: it is not a schema, or names a type that is none of these.
        """
        try:
            return cls(from_json(described))
        except DAMAGE as error:
            raise SegmentError(f"the segment's schema cannot be read: {error!r}.") from error


def _variable_bytes(leaf: Leaf, dims: Shape) -> int:
    """Bytes that a variable leaf of these dimensions takes in the tail."""
    return math.prod(dims) * leaf.itemsize
