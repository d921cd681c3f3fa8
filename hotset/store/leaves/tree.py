"""A sample's tree: containers above, leaves below; how samples are taken apart and put together again.

Samples that have one tree are taken apart together, leaf by leaf: one call for many values takes less time
than many calls. No container is made by its constructor: a ``__new__`` of the user may change what was
stored.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hotset.errors import SegmentError
from hotset.store.leaves.array_leaf import ArrayLeaf
from hotset.store.leaves.codecs import codec_named, codec_of
from hotset.store.leaves.instances import make_instance, plain_attributes
from hotset.store.leaves.leaf import Leaf, SchemaMismatch
from hotset.store.leaves.python_leaves import NumbersLeaf

__all__ = [
    "KEY_TYPES",
    "MAKERS",
    "UNCHANGING",
    "Group",
    "Node",
    "build",
    "flatten",
    "has_codec",
    "has_holder",
    "leaves_of",
    "parts_of",
    "varied",
    "widen",
]


# Of a dict's keys, beside members of enums and tuples of keys.
KEY_TYPES = (str, int, bool, float, type(None))
UNCHANGING = (tuple, str, bytes, int, float)  # of which several are as good as one
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}


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


def has_codec(node: Node) -> bool:
    """Whether a codec makes one of the objects in the tree."""
    return isinstance(node, Group) and (node.codec is not None or any(map(has_codec, node.children)))


def _holds(group: Group) -> bool:
    """Whether it is an object that may hold any others."""
    codec = codec_named(group.codec) if group.codec is not None else None
    return group.kind == "instance" or (codec is not None and codec.holds)


def has_holder(node: Node) -> bool:
    """Whether one of the objects in the tree may hold any others."""
    return isinstance(node, Group) and (_holds(node) or any(map(has_holder, node.children)))


# How containers of each kind are made, given an iterator over the values of their parts.
MAKERS: dict[str, Callable[[Group, Iterable[tuple[Any, ...]]], Iterable[Any]]] = {
    "dict": lambda group, parts: [dict(zip(group.keys, values, strict=True)) for values in parts],
    "OrderedDict": lambda group, parts: [OrderedDict(zip(group.keys, v, strict=True)) for v in parts],
    "list": lambda group, parts: map(list, parts),
    "tuple": lambda group, parts: parts,
    "namedtuple": lambda group, parts: [tuple.__new__(_type(group), values) for values in parts],
    "instance": lambda group, parts: [make_instance(_type(group), group.keys, values) for values in parts],
    "object": lambda group, parts: [_codec(group).put_together(value) for (value,) in parts],
}


def _type(group: Group) -> type[Any]:
    assert group.type is not None
    return group.type


def _codec(group: Group) -> Any:
    codec = codec_named(group.codec or "")
    if codec is None:
        raise SegmentError(f"no codec is registered for {group.codec}; call hotset.register_codec first.")
    return codec


def parts_of(value: object) -> tuple[str, tuple[Any, ...], list[Any]] | None:
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


def flatten(
    node: Node,
    values: Sequence[Any],
    where: str,
    found: list[list[Any]],
    met: Sequence[dict[int, object]] | None = None,
    held: bool = False,
) -> None:
    """Append, for each leaf of the tree, its checked values in all of these samples.

    Args:
        met: takes the containers of each sample, by id; None if the tree has no object that may hold others.
        held: whether such an object holds these values.

    Raises:
        SchemaMismatch: one of them does not fit; says where and why.
    """
    if isinstance(node, Group):
        if met is not None and (node.kind != "object" or _holds(node)):
            held = held or _holds(node)
            for containers, value in zip(met, values, strict=True):
                # As of the sample of which the tree was inferred: see tree_inference.
                if held and id(value) in containers and not isinstance(value, UNCHANGING):
                    raise SchemaMismatch(f"{where or 'the sample'}: the same object again")
                containers[id(value)] = value
        names: Any = node.keys or range(len(node.children))
        columns = list(_columns(node, values, where))
        for name, child, column in zip(names, node.children, columns, strict=True):
            place = f"{where}[{name!r}]" if node.kind != "object" else where
            flatten(child, column, place, found, met, held)
        return
    try:
        found.append(node.check_all(values))
    except SchemaMismatch as mismatch:
        raise SchemaMismatch(f"{where or 'the sample'}: {mismatch}") from None


def _columns(group: Group, values: Sequence[Any], where: str) -> Iterable[Sequence[Any]]:
    """For each child its values in all of these containers; raises as :func:`_fitting_parts`."""
    kinds, width = set(map(type, values)), len(group.children)
    if (kinds == {tuple} or kinds == {list}) and kinds == {_SEQUENCES.get(group.kind)}:
        if set(map(len, values)) == {width}:
            return zip(*values, strict=True)
    elif kinds == {dict} and group.kind == "dict" and group.has_text_keys:
        keys = set(map(tuple, values))
        if keys == {group.keys} and set(map(type, itertools.chain.from_iterable(values))) <= {str}:
            return [[value[key] for value in values] for key in group.keys]
    parts = [_fitting_parts(group, value, where) for value in values]
    return zip(*parts, strict=True)


def _fitting_parts(group: Group, value: object, where: str) -> list[Any]:
    """The children's values of a container that fits this group.

    Raises:
        SchemaMismatch: it is of another kind, or has other keys or another length.
    """
    if group.kind == "object":
        codec = codec_of(value)
        if codec is None or codec.name != group.codec:
            raise SchemaMismatch(f"{where or 'the sample'}: {type(value).__name__} instead of {group.codec}")
        try:
            return [codec.taken_apart(value)]
        except SchemaMismatch as mismatch:
            raise SchemaMismatch(f"{where or 'the sample'}: {mismatch}") from None
    parts = parts_of(value)
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


def widen(node: Node, value: object) -> Node:
    """The node, with leaves made variable where this value needs it; unchanged where the value cannot fit."""
    if not isinstance(node, Group):
        return node.widen(value)
    try:
        parts = _fitting_parts(node, value, "")
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
    return list(MAKERS[node.kind](node, parts))
