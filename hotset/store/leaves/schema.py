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

import dataclasses
import enum
import importlib
import itertools
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.errors import SegmentError
from hotset.store.format import LINE, RECORD_HEADER, TAIL, tail_word
from hotset.store.leaves.array_leaf import ArrayLeaf
from hotset.store.leaves.codecs import codec_named, codec_of
from hotset.store.leaves.find_leaf import leaf_from_json, leaf_of
from hotset.store.leaves.instances import is_plain, make_instance, plain_attributes
from hotset.store.leaves.leaf import Leaf, SchemaMismatch, Shape
from hotset.store.leaves.python_leaves import EnumLeaf, NumbersLeaf, TextLeaf, name_of_type

__all__ = [
    "LARGE",
    "LARGEST_RECORD",
    "Group",
    "Node",
    "Prepared",
    "Schema",
    "infer",
    "leaves_of",
    "to_json",
    "variable_bytes",
    "varied",
]

LARGE = 64 << 10  # bytes of an array that is not copied to be written
_ALIGN_TAIL = 16
LARGEST_RECORD = 2 << 30
_DEEPEST = 64
# An object with more values is something that samples refer to: each record would hold a copy of it.
_MOST_PARTS = 1_000
# Each value of a list or dict takes some microseconds in each use; an array is one value.
_MOST_VALUES = 10_000
# What a forged or foreign schema leads to.
_DAMAGE = (ArithmeticError, AttributeError, ImportError, LookupError, RecursionError, TypeError, ValueError)
_KEY_TYPES = (str, int, bool, float, type(None))
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}

# ---- the record layout ----------------------------------------------------------------------------------


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
        copies: whether :meth:`read` makes objects that do not share the buffer's memory but have their own.
    """

    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self.leaves: tuple[Leaf, ...] = tuple(leaves_of(tree))
        self.has_tail = any(leaf.fixed_bytes is None for leaf in self.leaves)
        self.variable = [place for place, leaf in enumerate(self.leaves) if leaf.fixed_bytes is None]
        self.copies = any(isinstance(leaf, TextLeaf) for leaf in self.leaves) or _has_codec(tree)
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
        step = 16 if widest == 16 else 8  # every row as aligned as the first
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
        flatten(self.tree, samples, "", columns)
        values = list(zip(*columns, strict=True)) if columns else [()] * len(samples)
        if not self.variable and self.stride <= LARGEST_RECORD:
            return [Prepared(each, (), 0) for each in values]
        return [self._measured(each) for each in values]

    def _measured(self, values: tuple[Any, ...]) -> Prepared:
        tail = 0
        dims: list[Shape] = []
        for place in self.variable:
            dims.append(self.leaves[place].shape_of(values[place]))
            tail += -(-variable_bytes(self.leaves[place], dims[-1]) // _ALIGN_TAIL) * _ALIGN_TAIL
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
            size = variable_bytes(self.leaves[place], dims)
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
            size = variable_bytes(leaf, dims)
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
                size = variable_bytes(leaf, dims)
                tails[place] = tail + -(-size // _ALIGN_TAIL) * _ALIGN_TAIL
            found.append(values)
        return build(self.tree, iter(found), len(tails))

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

        Everything in it is verified: a forged schema must not make a reader look outside a record, nor create
        anything but namedtuples, dataclasses and enums of modules that can be imported.

        Raises:
            SegmentError: it is not a schema, or names a type that is none of these.
        """
        try:
            return cls(from_json(described))
        except _DAMAGE as error:
            raise SegmentError(f"the segment's schema cannot be read: {error!r}.") from error


def variable_bytes(leaf: Leaf, dims: Shape) -> int:
    """Bytes that a variable leaf of these dimensions takes in the tail."""
    return math.prod(dims) * leaf.itemsize


# ---- the tree: containers above, leaves below -----------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """An inner node of the tree.

    Attributes:
        kind: ``dict``, ``OrderedDict``, ``list``, ``tuple``, ``namedtuple``, ``instance`` or ``object``.
        keys: a dict's keys, or the names of fields or attributes, in order; empty for lists and tuples.
        children: the nodes below, one for each key or position.
        type: the class of a namedtuple or instance; an object's codec is known by :attr:`codec`.
        codec: name of the codec (kind ``object``; then there is one child, the flattened tree).
    """

    kind: str
    keys: tuple[Any, ...]
    children: tuple[Node, ...]
    type: type | None = None
    codec: str | None = None

    @cached_property
    def has_text_keys(self) -> bool:
        return all(type(key) is str for key in self.keys)


Node = Group | Leaf


def leaves_of(node: Node) -> Iterator[Leaf]:
    """The leaves from this node on, in the tree's order."""
    if isinstance(node, Group):
        for child in node.children:
            yield from leaves_of(child)
    else:
        yield node


def _has_codec(node: Node) -> bool:
    return isinstance(node, Group) and (node.codec is not None or any(map(_has_codec, node.children)))


# How containers of each kind are made, given an iterator over the values of their parts.

_MAKERS: dict[str, Callable[[Group, Iterable[tuple[Any, ...]]], Iterable[Any]]] = {
    "dict": lambda group, parts: [dict(zip(group.keys, values, strict=True)) for values in parts],
    "OrderedDict": lambda group, parts: [OrderedDict(zip(group.keys, v, strict=True)) for v in parts],
    "list": lambda group, parts: map(list, parts),
    "tuple": lambda group, parts: parts,
    # Not the constructor, as for instances: a __new__ of the user may change what was stored.
    "namedtuple": lambda group, parts: [tuple.__new__(_type(group), values) for values in parts],
    "instance": lambda group, parts: [make_instance(_type(group), group.keys, values) for values in parts],
    "object": lambda group, parts: [_codec(group).unflatten(value) for (value,) in parts],
}


def _type(group: Group) -> type[Any]:
    assert group.type is not None
    return group.type


def _codec(group: Group) -> Any:
    codec = codec_named(group.codec or "")
    if codec is None:
        raise SegmentError(f"no codec is registered for {group.codec}; call hotset.register_codec first.")
    return codec


def _kind_of(value: object) -> tuple[str, tuple[Any, ...], list[Any]] | None:
    """Kind, keys and parts of a container; None for anything else."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        assert isinstance(value, dict)
        return kind.__name__, tuple(value), list(value.values())
    if kind in (list, tuple):
        return kind.__name__, (), list(value)  # type: ignore[call-overload]
    if isinstance(value, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
        if getattr(value, "__dict__", None) or len(kind._fields) != len(value):
            return None  # a subclass that keeps more than its fields
        return "namedtuple", kind._fields, list(value)
    held = plain_attributes(value)
    return ("instance", tuple(held), list(held.values())) if held is not None else None


def infer(value: object, keep_order: bool) -> Node:
    """The tree of a sample.

    Raises:
        SchemaMismatch: it cannot be cached; says where and why.
    """
    return _Inference(keep_order).node(value, "")


class _Inference:
    """Infers the tree of one sample.

    A list that occurs twice comes back as two lists that are equal. Two objects may not be, and programs
    ask whether ``a.parent is b``. So none may occur twice, nor a container that objects hold: a graph of
    objects is no tree of values.
    """

    def __init__(self, keep_order: bool) -> None:
        self._keep_order = keep_order
        self._met: dict[int, object] = {}  # by id: containers and objects
        self._held = 0  # values in objects
        self._count = 0  # values in all

    def node(self, value: object, where: str, holder: _Holder | None = None) -> Node:
        """The tree of a part of the sample, at ``where`` in it, that ``holder`` holds, if an object does."""
        place = where or "the sample"
        self._count += 1
        if self._count > _MOST_VALUES:
            raise SchemaMismatch(
                f"{place} is one of more than {_MOST_VALUES:,} values in one sample, which would take some "
                "50 ms to put together in each use; make arrays of them, or leave them out of the sample"
            )
        try:
            leaf = leaf_of(value, keep_order=self._keep_order)
            if leaf is not None:
                leaf.check(value)  # what a kind cannot hold (an int of 100 bits) shows here
                return leaf
            codec = codec_of(value)
            if codec is not None:
                child = self.node(codec.flatten(value), where, holder)
                return Group("object", (), (child,), None, codec.name)
        except SchemaMismatch as mismatch:
            raise SchemaMismatch(f"{place}: {mismatch}") from None
        parts = _kind_of(value)
        if parts is None:
            if isinstance(value, enum.Enum):
                leaf = EnumLeaf(type(value))
                leaf.check(value)
                return leaf
            if holder is None:
                raise SchemaMismatch(f"{place}: an object of {_full_name(value)}; {_way(value)}")
            at = where.removeprefix(holder.where)
            raise SchemaMismatch(
                f"{holder.where or 'the sample'}: an object of {_full_name(holder.value)}, whose {at} is one "
                f"of {_full_name(value)}; {_way(holder.value)}"
            )
        kind, keys, values = parts
        if not all(map(_is_key, keys)):
            raise SchemaMismatch(f"{place}: a dict with keys that are not text, numbers, or tuples of these")
        if any(map(_is_nan, keys)):
            raise SchemaMismatch(f"{place}: a dict with NaN as a key, which is equal to no other")
        if where.count("[") > _DEEPEST:
            raise SchemaMismatch("a sample that is nested too deeply, or contains itself")
        if holder is None and kind == "instance":
            holder = _Holder(value, where)
        if holder is not None:
            self._enter(value, len(values), place)
        self._met[id(value)] = value
        children = tuple(
            self.node(part, f"{where}[{key!r}]", holder)
            for key, part in zip(keys or range(len(values)), values, strict=True)
        )
        return Group(kind, keys, children, type(value) if kind in ("namedtuple", "instance") else None)

    def _enter(self, value: object, count: int, place: str) -> None:
        """Note an object, or a container that one holds.

        Raises:
            SchemaMismatch: it cannot be cached.
        """
        if id(value) in self._met and not isinstance(value, tuple):
            raise SchemaMismatch(
                f"{place}: the same object of {_full_name(value)} again, which a copy could not be; "
                "hotset.register_codec makes objects that refer to it cacheable"
            )
        self._held += count
        if self._held > _MOST_PARTS:
            raise SchemaMismatch(
                f"{place}: more than {_MOST_PARTS:,} values in objects, as a vocabulary has; leave them out "
                "of the sample"
            )


class _Holder(NamedTuple):
    """The outermost object around a part of a sample, and where it is."""

    value: object
    where: str


def _way(value: object) -> str:
    """What to do so that an object can be cached."""
    cls = type(value)
    codec = "hotset.register_codec"
    if issubclass(cls, Mapping):
        return f"{codec} makes it cacheable, or return a dict of it: dict(...)"
    if hasattr(cls, "to_dict") and hasattr(cls, "from_dict"):
        name = cls.__name__
        way = f"{codec}({name}, {name}.to_dict, {name}.from_dict) makes it cacheable"
        return f"{way}, if what these make of it is equal to it"
    return f"{codec} makes it cacheable" + (", or return its to_dict()" if hasattr(cls, "to_dict") else "")


def _full_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _parts(group: Group, value: object, where: str) -> list[Any]:
    """The children's values of a container that fits this group.

    Raises:
        SchemaMismatch: it is of another kind, or has other keys or another length.
    """
    if group.kind == "object":
        codec = codec_of(value)
        if codec is None or codec.name != group.codec:
            raise SchemaMismatch(f"{where or 'the sample'}: {type(value).__name__} instead of {group.codec}")
        try:
            return [codec.flatten(value)]
        except SchemaMismatch as mismatch:
            raise SchemaMismatch(f"{where or 'the sample'}: {mismatch}") from None
    parts = _kind_of(value)
    if parts is None or parts[0] != group.kind or (group.type is not None and type(value) is not group.type):
        raise SchemaMismatch(f"{where or 'the sample'}: {type(value).__name__} instead of {group.kind}")
    # Keys may be equal and yet not the same: True, 1 and 1.0 are, and 0.0 and -0.0.
    same_keys = list(map(_exactly, parts[1])) == list(map(_exactly, group.keys)) and parts[1] == group.keys
    if not same_keys or len(parts[2]) != len(group.children):
        raise SchemaMismatch(
            f"{where or 'the sample'}: other keys or another length than in the first samples"
        )
    return parts[2]


def _exactly(key: Any) -> Any:
    if type(key) is tuple:
        return tuple(map(_exactly, key))
    return str(key) if type(key) is float else type(key)


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return type(key) in _KEY_TYPES or isinstance(key, enum.Enum)


def _is_nan(key: Any) -> bool:
    return any(map(_is_nan, key)) if type(key) is tuple else key != key


def _columns(group: Group, values: Sequence[Any], where: str) -> Iterable[Sequence[Any]]:
    """For each child its values in all of these containers; raises as :func:`_parts`."""
    kinds, width = set(map(type, values)), len(group.children)
    if (kinds == {tuple} or kinds == {list}) and kinds == {_SEQUENCES.get(group.kind)}:
        if set(map(len, values)) == {width}:
            return zip(*values, strict=True)
    elif kinds == {dict} and group.kind == "dict" and group.has_text_keys:
        keys = set(map(tuple, values))
        if keys == {group.keys} and set(map(type, itertools.chain.from_iterable(values))) <= {str}:
            return [[value[key] for value in values] for key in group.keys]
    parts = [_parts(group, value, where) for value in values]
    return zip(*parts, strict=True)


def flatten(node: Node, values: Sequence[Any], where: str, found: list[list[Any]]) -> None:
    """Append, for each leaf of the tree, its checked values in all of these samples.

    Raises:
        SchemaMismatch: one of them does not fit; says where and why.
    """
    if isinstance(node, Group):
        names: Any = node.keys or range(len(node.children))
        columns = list(_columns(node, values, where))
        for name, child, column in zip(names, node.children, columns, strict=True):
            flatten(child, column, f"{where}[{name!r}]" if node.kind != "object" else where, found)
        return
    try:
        found.append(node.check_all(values))
    except SchemaMismatch as mismatch:
        raise SchemaMismatch(f"{where or 'the sample'}: {mismatch}") from None


def widen(node: Node, value: object) -> Node:
    """The node, with leaves made variable where this value needs it; unchanged where the value cannot fit."""
    if not isinstance(node, Group):
        return node.widen(value)
    try:
        parts = _parts(node, value, "")
    except SchemaMismatch:
        return node
    children = tuple(widen(child, part) for child, part in zip(node.children, parts, strict=True))
    return dataclasses.replace(node, children=children)


def varied(node: Node) -> Node:
    """The node, with the shapes of all arrays left open."""
    if isinstance(node, Group):
        return dataclasses.replace(node, children=tuple(map(varied, node.children)))
    if isinstance(node, NumbersLeaf):
        return dataclasses.replace(node, length=None)
    return dataclasses.replace(node, shape=None) if isinstance(node, ArrayLeaf) else node


def build(node: Node, found: Iterator[list[Any]], count: int) -> list[Any]:
    """The node's value in each of ``count`` samples, from the values of all leaves in the tree's order."""
    if not isinstance(node, Group):
        return next(found)
    children = [build(child, found, count) for child in node.children]
    parts: Iterable[tuple[Any, ...]] = zip(*children, strict=True) if children else [()] * count
    return list(_MAKERS[node.kind](node, parts))


def to_json(node: Node) -> dict[str, Any]:
    if not isinstance(node, Group):
        return node.to_json()
    return {
        "group": node.kind,
        "keys": [_key_to_json(key) for key in node.keys],
        "children": [to_json(child) for child in node.children],
        "type": name_of_type(node.type) if node.type is not None else None,
        "codec": node.codec,
    }


def _key_to_json(key: Any) -> Any:
    if type(key) is tuple:
        return list(map(_key_to_json, key))
    return {"enum": name_of_type(type(key)), "member": key.name} if isinstance(key, enum.Enum) else key


def _key_from_json(described: Any) -> Any:
    if isinstance(described, list):
        return tuple(map(_key_from_json, described))
    if isinstance(described, dict):
        return _import(described["enum"], "enum")[described["member"]]  # type: ignore[index]
    _require(type(described) in _KEY_TYPES, "a key must be text, a number or a tuple of them")
    return described


def from_json(described: Any) -> Node:
    if "group" not in described:
        return leaf_from_json(described, _import)
    kind, name, codec = described["group"], described["type"], described["codec"]
    _require(kind in _MAKERS, f"the kind of a group must be one of {sorted(_MAKERS)}, got {kind!r}")
    children = tuple(from_json(child) for child in described["children"])
    keys = tuple(_key_from_json(key) for key in described["keys"])
    cls = None
    if kind in ("namedtuple", "instance"):
        cls = _import(name, kind)
        agree = all(type(key) is str for key in keys) if kind == "instance" else keys == _fields(cls)
        _require(agree, f"{name} has other fields than the schema")
        if kind == "instance":
            make_instance(cls, keys, keys)  # raises if the class has other slots by now
    if kind in ("dict", "OrderedDict", "instance"):
        _require(len(set(keys)) == len(keys), "a dict has a key twice, or an object an attribute")
    if kind == "object":
        _require(isinstance(codec, str) and not keys and len(children) == 1, "an object must have one tree")
    elif kind in ("list", "tuple"):
        _require(not keys, "a sequence must have no keys")
    else:
        _require(len(keys) == len(children), "a container must have as many keys as children")
    return Group(kind, keys, children, cls, codec if kind == "object" else None)


def _fields(cls: Any) -> tuple[str, ...]:
    return tuple(cls._fields)


def _require(fits: bool, why: str) -> None:
    if not fits:
        raise ValueError(why)


def _import(name: str, kind: str) -> type:
    """The class of that name, if it is of that kind: a schema must not be a way to run other code.

    Importing a module runs it. So the module must be imported already, or lie in a package of which a part
    is: a process that reads a dataset's samples has imported the dataset's package, which may import the
    module of its samples only when it reads one. A top-level module that this process has not imported is
    refused, and so is a package's program (``__main__``).
    """
    module, _, qualname = name.partition(":")
    if module not in sys.modules:
        known = module.partition(".")[0] in sys.modules and not module.endswith(".__main__")
        _require(known, f"the module of {name} must be imported by this program first")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    fits = isinstance(found, type) and (
        (kind == "namedtuple" and issubclass(found, tuple) and hasattr(found, "_make"))
        or (kind == "instance" and is_plain(found))
        or (kind == "enum" and issubclass(found, enum.Enum))
    )
    _require(fits, f"{name} must be a class of kind {kind}")
    return found  # type: ignore[no-any-return]
