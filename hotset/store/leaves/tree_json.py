"""A tree as JSON's types, as a segment's metadata and records of an own form keep it.

What is read is verified: a forged tree must not make a reader look outside a record, nor create anything but
namedtuples, dataclasses and enums of modules that can be imported.
"""

from __future__ import annotations

import enum
from typing import Any

from hotset.store.leaves.find_leaf import leaf_from_json
from hotset.store.leaves.instances import is_plain, make_instance
from hotset.store.leaves.python_leaves import name_of_type, type_named
from hotset.store.leaves.tree import KEY_TYPES, MAKERS, Group, Node

__all__ = ["DAMAGE", "from_json", "to_json"]

# What a forged or foreign description leads to.
DAMAGE = (ArithmeticError, AttributeError, ImportError, LookupError, RecursionError, TypeError, ValueError)


def to_json(node: Node) -> dict[str, Any]:
    """The tree from this node on, as JSON's types."""
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
    _require(type(described) in KEY_TYPES, "a key must be text, a number or a tuple of them")
    return described


def from_json(described: Any) -> Node:
    """The tree that :func:`to_json` described; raises an exception of :data:`DAMAGE` if it is none."""
    if "group" not in described:
        return leaf_from_json(described, _import)
    kind, name, codec = described["group"], described["type"], described["codec"]
    _require(kind in MAKERS, f"the kind of a group must be one of {sorted(MAKERS)}, got {kind!r}")
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
    """The class of that name, if it is of that kind."""
    found: Any = type_named(name)
    fits = (
        (kind == "namedtuple" and issubclass(found, tuple) and hasattr(found, "_make"))
        or (kind == "instance" and is_plain(found))
        or (kind == "enum" and issubclass(found, enum.Enum))
    )
    _require(fits, f"{name} must be a class of kind {kind}")
    return found  # type: ignore[no-any-return]
