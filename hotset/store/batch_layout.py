"""The layout of batches, computed once from the schema.

Samples that share a tree are collated to batches that share one too. Each fixed leaf becomes one tensor, a
*column*, which lies as strided bytes in the rows. So making a batch means copying its columns, and putting
them into the containers that collating would make.

The rules are those of ``default_collate``: tensors stacked, ints int64, floats float64, text in lists, tuples
as lists, namedtuples kept, tv_tensors plain. Where a schema holds something that collating treats otherwise
(None, PIL images, MetaTensors, a type that the user has registered with ``default_collate``),
:class:`NotGathered` says why, and the samples are read one by one and collated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotset.store.leaves.array_leaf import ArrayLeaf
from hotset.store.leaves.codecs import codec_named
from hotset.store.leaves.python_leaves import NumberLeaf, NumbersLeaf, TextLeaf
from hotset.store.leaves.schema import Schema
from hotset.store.leaves.tensor_leaf import TensorLeaf
from hotset.store.leaves.tree import Group, Node, leaves_of

__all__ = ["BatchTree", "Column", "NotGathered", "batch_dtype"]

# Makes a part of the batch of its columns and its variable leaves.
Part = Callable[[list[Any], list[Any]], Any]

_ALIGN = 64
_DTYPES = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}


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
        permuted: the stored shape, and the permutation back from it, if samples are stored in the order that
            they have in memory (:mod:`hotset.store.leaves.array_leaf`); otherwise None.
        numbers: whether it is a list of numbers, of which collating makes a list: a tensor for each position.
            The column of a batch is that of shape (positions, samples).
    """

    offset: int
    width: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    permuted: tuple[tuple[int, ...], tuple[int, ...]] | None
    numbers: bool = False

    @property
    def is_reordered(self) -> bool:
        """Whether its elements are copied once more, in another order, after they were gathered."""
        return self.numbers or self.permuted is not None

    def reordered(self, gathered: torch.Tensor) -> torch.Tensor:
        """Gathered samples, whose bytes these are, as a view in the batch's order."""
        values = gathered.view(self.dtype)
        if self.numbers:
            return values.t()
        assert self.permuted is not None
        stored, back = self.permuted
        return values.view(len(values), *stored).permute(0, *back)

    def batched(self, count: int) -> tuple[int, ...]:
        """The shape of a batch of so many samples."""
        return (*self.shape, count) if self.numbers else (count, *self.shape)


class BatchTree:
    """The tree that all batches of a schema share.

    Args:
        schema: of the samples.
        variable: whether arrays whose shapes vary are gathered.

    Attributes:
        columns: the fixed leaves, in the schema's order.
        assemble: makes a batch of a tensor for each column and a value for each variable leaf.

    Raises:
        NotGathered: the batches of this schema are not columns.
    """

    def __init__(self, schema: Schema, *, variable: bool) -> None:
        self.columns: list[Column] = []
        self._schema = schema
        self._variable = variable
        self._layouts: dict[int, tuple[list[int], int]] = {}
        self.assemble: Part = self._compile(schema.tree, iter(range(len(schema.leaves))))

    def views(self, rows: Any) -> list[torch.Tensor]:
        """Each column as it lies in these rows, which are uint8 of shape (n, stride): ``[n, width]``."""
        whole = torch.from_numpy(rows)
        return [whole[:, c.offset : c.offset + c.width] for c in self.columns]

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

    # ---- compiling -----------------------------------------------------------------------------------

    def _compile(self, node: Node, places: Iterator[int]) -> Part:
        """Return the function that makes this node's part of a batch; enter its columns.

        ``places`` gives those of the leaves from this node on, among the schema's.
        """
        if isinstance(node, Group):
            return self._compile_group(node, places)
        place = next(places)
        offset = self._schema.offsets[place]
        if isinstance(node, TextLeaf) or (isinstance(node, ArrayLeaf) and node.shape is None):
            number = self._schema.variable.index(place)
            if isinstance(node, ArrayLeaf) and not (self._variable and node.is_plain):
                raise NotGathered("its shapes vary")
            return lambda columns, variables: variables[number]
        if isinstance(node, ArrayLeaf):
            dtype = batch_dtype(node)
            shape: tuple[int, ...] = node.shape or ()
            permuted = None
            if node.keep_order and not node.is_plain:
                inverse = np.argsort(node.order).tolist()
                permuted = (node.stored_shape(shape), tuple(1 + axis for axis in inverse))
            column = Column(offset, node.fixed_bytes or 0, dtype, shape, permuted)
        elif isinstance(node, NumberLeaf):
            dtype = _DTYPES.get(node.kind) or _torch_dtype(node.kind)
            column = Column(offset, node.fixed_bytes, dtype, (), None)
        elif isinstance(node, NumbersLeaf):
            if node.length is None:
                raise NotGathered("the lengths of its lists vary")
            # Collating makes a list of a tensor for each position.
            dtype, shape = _DTYPES[node.kind], (node.length,)
            column = Column(offset, node.fixed_bytes or 0, dtype, shape, None, numbers=True)
        else:
            raise NotGathered(f"it holds {type(node).__name__}")
        number = len(self.columns)
        self.columns.append(column)
        return lambda columns, variables: columns[number]

    def _compile_group(self, group: Group, places: Iterator[int]) -> Part:
        if group.kind == "object":
            return self._compile_object(group, places)
        parts = [self._compile(child, places) for child in group.children]
        if group.kind in ("list", "tuple", "namedtuple"):
            # default_collate zips sequences: text in them becomes tuples, and lists everywhere else.
            parts = [
                _as_tuple(part) if isinstance(child, TextLeaf) else part
                for child, part in zip(group.children, parts, strict=True)
            ]
        if group.kind in ("dict", "OrderedDict"):
            make = dict if group.kind == "dict" else OrderedDict
            return lambda c, v: make((key, part(c, v)) for key, part in zip(group.keys, parts, strict=True))
        if group.kind in ("list", "tuple"):
            return lambda c, v: [part(c, v) for part in parts]
        cls: Any = group.type
        if group.kind == "namedtuple":
            return lambda c, v: cls(*(part(c, v) for part in parts))
        raise NotGathered(f"it holds an object of {cls.__qualname__}")

    def _compile_object(self, group: Group, places: Iterator[int]) -> Part:
        """An object of which collating stacks one part, and drops the others."""
        codec = codec_named(group.codec or "")
        if codec is None or codec.stacks is None or not isinstance(group.children[0], Group):
            raise NotGathered(f"it holds {group.codec}")
        parts = [self._compile_if_gathered(child, places) for child in group.children[0].children]
        stacked = parts[codec.stacks]
        if stacked is None:
            raise NotGathered(f"its {group.codec} vary in shape")
        return stacked

    def _compile_if_gathered(self, node: Node, places: Iterator[int]) -> Part | None:
        """As :meth:`_compile`; None if it is not gathered, with its leaves passed over."""
        before = len(self.columns)
        own = [next(places) for _ in leaves_of(node)]
        try:
            return self._compile(node, iter(own))
        except NotGathered:
            del self.columns[before:]
            return None


def _as_tuple(part: Part) -> Part:
    return lambda columns, variables: tuple(part(columns, variables))


def batch_dtype(leaf: ArrayLeaf) -> torch.dtype:
    """The dtype of a batch's tensor that is made of this leaf's arrays or tensors.

    Raises:
        NotGathered: torch has none for these arrays.
    """
    return leaf.torch_dtype if isinstance(leaf, TensorLeaf) else _torch_dtype(leaf.dtype)


def _torch_dtype(name: str) -> torch.dtype:
    """The dtype to which collating turns numpy's of that name.

    Raises:
        NotGathered: torch has no such dtype (text, dates, fields, another byte order).

    Example:
        >>> _torch_dtype("float32")
        torch.float32
    """
    try:
        return torch.from_numpy(np.empty(1, np.dtype(name))).dtype
    except (TypeError, ValueError) as error:
        raise NotGathered(f"it holds numpy's {name}") from error
