"""The leaf that fits a value, and the one that a schema in a segment's metadata describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hotset.store.leaves.array_leaf import numpy_from_json, numpy_leaf
from hotset.store.leaves.leaf import LARGEST_DIMENSION, Leaf, is_tensor
from hotset.store.leaves.python_leaves import (
    EnumLeaf,
    NoneLeaf,
    NumberLeaf,
    NumbersLeaf,
    TextLeaf,
    named_from_json,
    number_kind,
    numbers_leaf,
)
from hotset.store.leaves.sparse_tensors import is_sparse

__all__ = ["leaf_from_json", "leaf_of"]


def leaf_of(value: object, *, keep_order: bool) -> Leaf | None:
    """Return the leaf that fits exactly this value, or None if no kind of leaf does.

    Raises:
        SchemaMismatch: its kind fits, but the value cannot come back as it was (a sparse tensor, say).
    """
    if value is None:
        return NoneLeaf()
    if type(value) in (str, bytes):
        return TextLeaf(type(value).__name__)
    if type(value) is np.ndarray:
        return numpy_leaf(value, keep_order=keep_order)
    if is_sparse(value):
        return None  # it has a codec
    if is_tensor(value):
        from hotset.store.leaves.tensor_leaf import tensor_leaf

        return tensor_leaf(value, keep_order=keep_order)
    if type(value) in (list, tuple):
        return numbers_leaf(value)  # type: ignore[arg-type]
    number = number_kind(value)
    return NumberLeaf(number) if number is not None else None


def leaf_from_json(described: Any, find: Callable[[str, str], type]) -> Leaf:
    """Return the leaf that ``to_json`` described.

    Raises:
        ValueError, KeyError, TypeError: :func:`leaf_of` cannot have made such a leaf.
    """
    kind = described["leaf"]
    if kind == "array" and described["library"] == "numpy":
        return numpy_from_json(described)
    if kind == "array" and described["library"] == "torch":
        from hotset.store.leaves.tensor_leaf import tensor_from_json

        return tensor_from_json(described)
    if kind == "number":
        number = described["kind"]
        if number not in ("bool", "int", "float", "complex") and np.dtype(number).kind not in "biufcmM":
            raise ValueError(f"the kind of a number must be a type of Python or numpy, got {number!r}")
        return NumberLeaf(number)
    if kind == "numbers":
        container, number, length = (described[key] for key in ("container", "kind", "length"))
        if container not in ("list", "tuple") or number not in ("bool", "int", "float"):
            raise ValueError(f"numbers must be bool, int or float in a list or tuple, got {described}")
        if length is not None and (type(length) is not int or not 0 < length <= LARGEST_DIMENSION):
            raise ValueError(f"the length of numbers must be positive, got {length!r}")
        return NumbersLeaf(container, number, length)
    if kind == "text":
        if described["kind"] not in ("str", "bytes"):
            raise ValueError(f"the kind of a text must be str or bytes, got {described['kind']!r}")
        return TextLeaf(described["kind"])
    if kind == "enum":
        return EnumLeaf(find(described["type"], "enum"))
    if kind == "named":
        return named_from_json(described["name"])
    if kind == "none":
        return NoneLeaf()
    raise ValueError(
        f"the kind of a leaf must be array, number, numbers, text, enum, named or none, got {kind!r}"
    )
