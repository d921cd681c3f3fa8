"""Names of numpy's dtypes: text, from which the very dtype is made again.

Of a plain dtype it is numpy's type string, which has the byte order, or, where two types share one (int64 and
longlong), byte order and letter of the second. Of a structured one (rows of a PLY file,
events of a camera) it is JSON with the fields' names, dtypes and offsets.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hotset.store.leaves.leaf import SchemaMismatch

__all__ = ["dtype_of", "name_of"]

_PLAIN_KINDS = "biufcmMSU"


def name_of(dtype: np.dtype[Any]) -> str:
    """The name of a dtype.

    Raises:
        SchemaMismatch: none could tell all of it.

    Example:
        >>> name_of(np.dtype(">f4"))
        '>f4'
        >>> dtype_of(name_of(np.dtype([("x", "<f4"), ("rgb", "u1", 3)])))
        dtype([('x', '<f4'), ('rgb', 'u1', (3,))])
    """
    described = _described(dtype)
    name = described if isinstance(described, str) else json.dumps(described)
    if dtype.names is not None:
        made = dtype_of(name)
        if made != dtype or made.isalignedstruct != dtype.isalignedstruct or made.type is not dtype.type:
            raise SchemaMismatch(f"a numpy array of {dtype!r}; return a dict of its fields to have it cached")
    return name


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of a name.

    Raises:
        ValueError, TypeError, KeyError: there is none.
    """
    if type(name) is not str:
        raise TypeError(f"the name of a dtype must be text, got {name!r}")
    dtype = _made(json.loads(name) if name.startswith("{") else name)
    if dtype.names is None and (dtype.kind not in _PLAIN_KINDS or _plain_name(dtype) != name):
        raise ValueError(f"the dtype of an array must be one that is cached, got {name}")
    return dtype


def _described(dtype: np.dtype[Any]) -> Any:
    """A dtype as JSON has it: its type string, its element and shape, or a dict of its fields."""
    if dtype.metadata is not None:
        raise SchemaMismatch(f"a numpy array whose dtype has metadata ({dict(dtype.metadata)})")
    if dtype.subdtype is not None:
        element, shape = dtype.subdtype
        return [_described(element), shape]
    if dtype.names is not None:
        assert dtype.fields is not None
        fields = [dtype.fields[name] for name in dtype.names]
        return {
            "names": dtype.names,
            "formats": [_described(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
            "record": dtype.type is np.record,
        }
    if dtype.kind not in _PLAIN_KINDS:
        parts = "a list" if dtype.hasobject else "a dict of its fields"
        raise SchemaMismatch(f"a numpy array of {dtype}; return {parts} to have it cached")
    return _plain_name(dtype)


def _plain_name(dtype: np.dtype[Any]) -> str:
    return dtype.str if np.dtype(dtype.str).type is dtype.type else dtype.str[0] + dtype.char


def _made(described: Any) -> np.dtype[Any]:
    if isinstance(described, str):
        return np.dtype(described)
    if isinstance(described, list):
        element, shape = described
        return np.dtype((_made(element), tuple(shape)))
    fields = {name: described[name] for name in ("names", "offsets", "itemsize")}
    formats = [_made(each) for each in described["formats"]]
    made: np.dtype[Any] = np.dtype({**fields, "formats": formats}, align=described["aligned"])  # type: ignore[call-overload]
    return np.dtype((np.record, made)) if described["record"] else made
