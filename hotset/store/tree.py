"""The tree that all samples of a cache share: containers above, leaves below.

The functions here walk it: :func:`infer` makes it from a sample, :func:`widen` lets it fit another one too,
:func:`varied` any that differs in shapes only,
:func:`flatten` takes a sample apart along it, :func:`build` puts samples together, and :func:`to_json` and
:func:`from_json` keep it in a segment's metadata.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hotset.errors import SegmentError
from hotset.store.codecs import codec_named, codec_of
from hotset.store.leaves import (
    ArrayLeaf,
    EnumLeaf,
    Leaf,
    SchemaMismatch,
    leaf_from_json,
    leaf_of,
    name_of_type,
)

__all__ = [
    "Group",
    "Node",
    "build",
    "flatten",
    "from_json",
    "infer",
    "leaves_of",
    "to_json",
    "varied",
    "widen",
]

_DEEPEST = 64
_KEY_TYPES = (str, int, bool, float, type(None))


@dataclass(frozen=True)
class Group:
    """An inner node of the tree.

    Attributes:
        kind: ``dict``, ``OrderedDict``, ``list``, ``tuple``, ``namedtuple``, ``dataclass`` or ``object``.
        keys: a dict's keys or the fields' names, in order; empty for lists and tuples.
        children: the nodes below, one for each key or position.
        type: the class of a namedtuple or dataclass; an object's codec is known by :attr:`codec`.
        codec: name of the codec (kind ``object``; then there is one child, the flattened tree).
    """

    kind: str
    keys: tuple[Any, ...]
    children: tuple[Node, ...]
    type: type | None = None
    codec: str | None = None


Node = Group | Leaf


def leaves_of(node: Node) -> Iterator[Leaf]:
    if isinstance(node, Group):
        for child in node.children:
            yield from leaves_of(child)
    else:
        yield node


# How containers of each kind are made, given an iterator over the values of their parts.

_MAKERS: dict[str, Callable[[Group, Iterable[tuple[Any, ...]]], Iterable[Any]]] = {
    "dict": lambda group, parts: [dict(zip(group.keys, values, strict=True)) for values in parts],
    "OrderedDict": lambda group, parts: [OrderedDict(zip(group.keys, v, strict=True)) for v in parts],
    "list": lambda group, parts: map(list, parts),
    "tuple": lambda group, parts: parts,
    "namedtuple": lambda group, parts: map(group.type._make, parts),  # type: ignore[union-attr]
    "dataclass": lambda group, parts: [_make_dataclass(group, values) for values in parts],
    "object": lambda group, parts: [_codec(group).unflatten(value) for (value,) in parts],
}


def _make_dataclass(group: Group, values: tuple[Any, ...]) -> Any:
    # Not the constructor: fields with init=False and __post_init__ would change what was stored.
    assert group.type is not None
    made: Any = object.__new__(group.type)
    for key, value in zip(group.keys, values, strict=True):
        object.__setattr__(made, key, value)
    return made


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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        if kind.__new__ is object.__new__ and _state(value) == set(names):
            return "dataclass", names, [getattr(value, name) for name in names]
    return None


def _state(value: object) -> set[str]:
    """Names of all that an object keeps, in its ``__dict__`` or in slots."""
    slots = {
        name
        for cls in type(value).__mro__
        for name in _as_tuple(cls.__dict__.get("__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    }
    return set(getattr(value, "__dict__", ())) | slots


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def infer(value: object, as_lies: bool, where: str) -> Node:
    try:
        leaf = leaf_of(value, as_lies=as_lies)
        if leaf is not None:
            leaf.check(value)  # what a kind cannot hold (an int of 100 bits) shows here
            return leaf
        codec = codec_of(value)
        if codec is not None:
            return Group("object", (), (infer(codec.flatten(value), as_lies, where),), None, codec.name)
    except SchemaMismatch as misfit:
        raise SchemaMismatch(f"{where or 'the sample'}: {misfit}") from None
    parts = _kind_of(value)
    if parts is None:
        if isinstance(value, enum.Enum):
            leaf = EnumLeaf(type(value))
            leaf.check(value)
            return leaf
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise SchemaMismatch(
            f"{where or 'the sample'}: an object of {name}; hotset.register_codec makes it cacheable"
        )
    kind, keys, values = parts
    if any(type(key) not in _KEY_TYPES and not isinstance(key, enum.Enum) for key in keys):
        raise SchemaMismatch(f"{where or 'the sample'}: a dict with keys that are neither text nor numbers")
    if where.count("[") > _DEEPEST:
        raise SchemaMismatch("a sample that is nested too deeply, or contains itself")
    children = tuple(
        infer(part, as_lies, f"{where}[{key!r}]")
        for key, part in zip(keys or range(len(values)), values, strict=True)
    )
    return Group(kind, keys, children, type(value) if kind in ("namedtuple", "dataclass") else None)


def _parts(group: Group, value: object, where: str) -> list[Any]:
    """The children's values of a container that fits this group.

    Raises:
        Misfit: it is of another kind, or has other keys or another length.
    """
    if group.kind == "object":
        codec = codec_of(value)
        if codec is None or codec.name != group.codec:
            raise SchemaMismatch(f"{where or 'the sample'}: {type(value).__name__} instead of {group.codec}")
        try:
            return [codec.flatten(value)]
        except SchemaMismatch as misfit:
            raise SchemaMismatch(f"{where or 'the sample'}: {misfit}") from None
    parts = _kind_of(value)
    if parts is None or parts[0] != group.kind or (group.type is not None and type(value) is not group.type):
        raise SchemaMismatch(f"{where or 'the sample'}: {type(value).__name__} instead of {group.kind}")
    # Keys may be equal and yet not the same: True, 1 and 1.0 are.
    same_keys = parts[1] == group.keys and list(map(type, parts[1])) == list(map(type, group.keys))
    if not same_keys or len(parts[2]) != len(group.children):
        raise SchemaMismatch(
            f"{where or 'the sample'}: other keys or another length than in the first samples"
        )
    return parts[2]


def flatten(node: Node, value: object, where: str, found: list[Any]) -> None:
    if isinstance(node, Group):
        names: Any = node.keys or range(len(node.children))
        for name, child, part in zip(names, node.children, _parts(node, value, where), strict=True):
            flatten(child, part, f"{where}[{name!r}]" if node.kind != "object" else where, found)
        return
    try:
        found.append(node.check(value))
    except SchemaMismatch as misfit:
        raise SchemaMismatch(f"{where or 'the sample'}: {misfit}") from None


def widen(node: Node, value: object) -> Node:
    """The node, with leaves made variable where this value asks for it; unchanged where it cannot fit."""
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
    return {"enum": name_of_type(type(key)), "member": key.name} if isinstance(key, enum.Enum) else key


def _key_from_json(described: Any) -> Any:
    if isinstance(described, dict):
        return _import(described["enum"], "enum")[described["member"]]  # type: ignore[index]
    _require(type(described) in _KEY_TYPES, "a key of another type")
    return described


def from_json(described: Any) -> Node:
    if "group" not in described:
        return leaf_from_json(described, _import)
    kind, name, codec = described["group"], described["type"], described["codec"]
    _require(kind in _MAKERS, f"no such kind: {kind!r}")
    children = tuple(from_json(child) for child in described["children"])
    keys = tuple(_key_from_json(key) for key in described["keys"])
    cls = None
    if kind in ("namedtuple", "dataclass"):
        cls = _import(name, kind)
        _require(keys == _fields(cls, kind), f"{name} has other fields")
    if kind in ("dict", "OrderedDict"):
        _require(len(set(keys)) == len(keys), "a key twice")
    if kind == "object":
        _require(isinstance(codec, str) and not keys and len(children) == 1, "an object is one tree")
    elif kind in ("list", "tuple"):
        _require(not keys, "a sequence has no keys")
    else:
        _require(len(keys) == len(children), "as many keys as children")
    return Group(kind, keys, children, cls, codec if kind == "object" else None)


def _fields(cls: Any, kind: str) -> tuple[str, ...]:
    return tuple(cls._fields) if kind == "namedtuple" else tuple(f.name for f in dataclasses.fields(cls))


def _require(fits: bool, why: str) -> None:
    if not fits:
        raise ValueError(why)


def _import(name: str, kind: str) -> type:
    """The class of that name, if it is of that kind: a schema must not be a way to call anything else.

    Importing a module is calling it. So it must be imported already, or lie in a package of which a part is:
    whoever asks for the samples of a data set has the data set, whose own package that is, and which may
    import the part that its samples are of only when it reads one. A module that stands alone, and that
    nothing here has imported, is refused, as is a package's program (``__main__``).
    """
    module, _, qualname = name.partition(":")
    if module not in sys.modules:
        known = module.partition(".")[0] in sys.modules and not module.endswith(".__main__")
        _require(known, f"{name} is of a module that this program has not imported")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    fits = isinstance(found, type) and (
        (kind == "namedtuple" and issubclass(found, tuple) and hasattr(found, "_make"))
        or (kind == "dataclass" and dataclasses.is_dataclass(found))
        or (kind == "enum" and issubclass(found, enum.Enum))
    )
    _require(fits, f"{name} is no {kind}")
    return found  # type: ignore[no-any-return]
