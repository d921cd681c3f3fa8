"""Inference: the tree of one sample, or why it cannot be cached.

A list that occurs twice comes back as two lists that are equal. Two objects may not be, and programs ask
whether ``a.parent is b``. So no object may occur twice, nor a container that objects hold: a graph of objects
is no tree of values.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from hotset.store.leaves.codecs import codec_of
from hotset.store.leaves.find_leaf import leaf_of
from hotset.store.leaves.leaf import SchemaMismatch
from hotset.store.leaves.python_leaves import EnumLeaf, named_leaf
from hotset.store.leaves.tree import KEY_TYPES, UNCHANGING, Group, Node, parts_of

__all__ = ["infer"]


_DEEPEST = 64
# An object with more values is something that samples refer to: each record would hold a copy of it.
_MOST_PARTS = 1_000
# Each value of a list or dict takes some microseconds in each use; an array is one value.
_MOST_VALUES = 10_000


def infer(value: object, keep_order: bool) -> Node:
    """The tree of a sample.

    Raises:
        SchemaMismatch: it cannot be cached; says where and why.
    """
    return _Inference(keep_order).node(value, "")


class _Inference:
    """Infers the tree of one sample."""

    def __init__(self, keep_order: bool) -> None:
        self._keep_order = keep_order
        self._met: dict[int, object] = {}  # by id: containers and objects
        self._held = 0  # values in objects
        self._count = 0  # values in all

    def node(
        self, value: object, where: str, holder: _Holder | None = None, *, of_codec: bool = False
    ) -> Node:
        """The tree of a part of the sample, at ``where`` in it, that ``holder`` holds, if an object does.

        Of what a codec made of an object, the places in a list or tuple say nothing to the user.
        """
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
            flat = codec.taken_apart(value) if codec is not None else None
        except SchemaMismatch as mismatch:
            raise SchemaMismatch(f"{place}: {mismatch}") from None
        if codec is not None:
            if codec.holds:
                holder = holder or _Holder(value, where)
                self._enter(value, 0, place)
                self._met[id(value)] = value
            return Group("object", (), (self.node(flat, where, holder, of_codec=True),), None, codec.name)
        parts = parts_of(value)
        if parts is not None:
            return self._container(value, *parts, where, holder, of_codec)
        if isinstance(value, enum.Enum):
            leaf = EnumLeaf(type(value))
            leaf.check(value)
            return leaf
        named = named_leaf(value)
        if named is not None:
            return named
        raise SchemaMismatch(_unknown(value, where, holder))

    def _container(
        self,
        value: object,
        kind: str,
        keys: tuple[Any, ...],
        parts: list[Any],
        where: str,
        holder: _Holder | None,
        of_codec: bool,
    ) -> Group:
        place = where or "the sample"
        if not all(map(_is_key, keys)):
            raise SchemaMismatch(f"{place}: a dict with keys that are not text, numbers, or tuples of these")
        if any(map(_is_nan, keys)):
            raise SchemaMismatch(f"{place}: a dict with NaN as a key, which is equal to no other")
        if where.count("[") > _DEEPEST:
            raise SchemaMismatch("a sample that is nested too deeply, or contains itself")
        if holder is None and kind == "instance":
            holder = _Holder(value, where)
        if holder is not None:
            self._enter(value, len(parts), place)
        self._met[id(value)] = value
        places = [f"{where}[{key!r}]" for key in keys or range(len(parts))]
        if of_codec and kind in ("list", "tuple"):
            places = [where] * len(parts)
        children = tuple(self.node(part, at, holder) for at, part in zip(places, parts, strict=True))
        return Group(kind, keys, children, type(value) if kind in ("namedtuple", "instance") else None)

    def _enter(self, value: object, count: int, place: str) -> None:
        """Note an object, or a container that one holds.

        Raises:
            SchemaMismatch: it cannot be cached.
        """
        if id(value) in self._met and not isinstance(value, UNCHANGING):
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


def _unknown(value: object, where: str, holder: _Holder | None) -> str:
    """Why an object that is neither a leaf nor a container cannot be cached."""
    if holder is None:
        return f"{where or 'the sample'}: an object of {_full_name(value)}; {_way(value)}"
    return (
        f"{holder.where or 'the sample'}: an object of {_full_name(holder.value)}, whose "
        f"{where.removeprefix(holder.where)} is one of {_full_name(value)}; {_way(holder.value)}"
    )


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


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    if isinstance(key, enum.Enum):  # by whose name other processes find it: several flags together have none
        return type(key).__members__.get(key.name) is key
    return type(key) in KEY_TYPES


def _is_nan(key: Any) -> bool:
    return any(map(_is_nan, key)) if type(key) is tuple else key != key
