"""Codecs: how objects are flattened to leaves and built again.

A codec is two functions for one exact type: ``flatten(obj)`` gives a tree of dicts, lists, tuples and leaves;
``unflatten(tree)`` the object again. The built-in ones cover PIL images and image files
(:mod:`hotset.store.leaves.pictures`), subclasses of both (torchvision's tv_tensors, fastai's types, a user's
own), sparse tensors, MONAI's MetaTensor, PyTorch Geometric's graphs (:mod:`hotset.store.leaves.graphs`),
numpy's memmap and masked arrays, ordinary types of the standard library (sets, dates, paths, ...), what is
derived from a container (:mod:`hotset.store.leaves.derived`), and objects of classes written in C of which
pickle keeps a state (a fast tokenizer's ``Encoding``). They are looked up by the type's module, so that
hotset imports no library that the user has not imported already. Users add codecs with
:func:`register_codec`.

Nothing is pickled, unless a codec of the user's does so.
"""

from __future__ import annotations

import datetime
import decimal
import secrets
import sys
import uuid
import zoneinfo
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from hotset._interrupts import own_errors
from hotset.errors import ArgumentError, SegmentError
from hotset.store.leaves import pictures
from hotset.store.leaves.derived import derived_from
from hotset.store.leaves.graphs import graphs_of
from hotset.store.leaves.instances import state_of
from hotset.store.leaves.leaf import SchemaMismatch
from hotset.store.leaves.python_leaves import name_of_type, type_named
from hotset.store.leaves.sparse_tensors import flatten_sparse, unflatten_sparse

__all__ = ["Codec", "codec_named", "codec_of", "given_codec", "register_codec"]

# This process and those that are forked from it: an address means one object in all of them.
_ADDRESS_SPACE = secrets.randbits(63)


@dataclass(frozen=True)
class Codec:
    """How objects of one type are taken apart and put together.

    Attributes:
        name: ``module:qualname`` of the type.
        flatten: object to tree; may raise SchemaMismatch for an object that could not come back as it was.
        unflatten: tree to object; the arrays in it are the object's own.
        stacks: which part of the tree ``default_collate`` stacks to a plain tensor; None if it needs objects.
        holds: whether its objects may hold any others, as those of Python's classes do.
    """

    name: str
    flatten: Callable[[Any], Any]
    unflatten: Callable[[Any], Any]
    stacks: int | None = None
    holds: bool = False

    def taken_apart(self, value: Any) -> Any:
        """The tree of an object.

        Raises:
            SchemaMismatch: it could not come back as it was, or ``flatten`` raises an error, as a user's
                function may, and Pillow does for a closed file. Without a cache nobody would call it.
        """
        try:
            return self.flatten(value)
        except SchemaMismatch:
            raise
        except own_errors() as error:
            raise SchemaMismatch(
                f"an object of {self.name} that cannot be taken apart ({type(error).__name__}: {error})"
            ) from error

    def put_together(self, tree: Any) -> Any:
        """The object again.

        Raises:
            SegmentError: ``unflatten`` raises an error: such samples are read from the source.
        """
        try:
            return self.unflatten(tree)
        except own_errors() as error:
            raise SegmentError(
                f"an object of {self.name} cannot be put together again ({type(error).__name__}: {error})."
            ) from error


_registered: dict[str, Codec] = {}
_given: set[str] = set()  # those of them that are the user's


def register_codec(cls: type, flatten: Callable[[Any], Any], unflatten: Callable[[Any], Any]) -> None:
    """Make objects of exactly this type cacheable.

    Args:
        cls: the type; subclasses need a codec of their own.
        flatten: takes an object, returns a tree of dicts, lists, tuples, namedtuples and dataclasses over
            tensors, numpy arrays, numbers, str, bytes and None that describes it completely.
        unflatten: takes such a tree, returns an equal object. It may keep the arrays: they are copies.

    Raises:
        ArgumentError: ``cls`` is not a type, or one of the two cannot be called.

    Example:
        >>> from fractions import Fraction
        >>> register_codec(Fraction, lambda f: (f.numerator, f.denominator), lambda t: Fraction(*t))
    """
    if not isinstance(cls, type) or not callable(flatten) or not callable(unflatten):
        raise ArgumentError(
            "register_codec(cls, flatten, unflatten): cls must be a type, and the other two callable."
        )
    name = name_of_type(cls)
    _registered[name] = Codec(name, flatten, unflatten)
    _given.add(name)


def codec_of(value: object) -> Codec | None:
    """Return the codec for this object's type, or None."""
    return codec_named(name_of_type(type(value)))


def given_codec(value: object) -> Codec | None:
    """Return the codec that the user has registered for this object's type, or None."""
    name = name_of_type(type(value))
    return _registered[name] if name in _given else None


def codec_named(name: str) -> Codec | None:
    """Return the codec for the type of that name, or None."""
    if name not in _registered:
        builtin = _BUILTIN.get(name)
        if builtin is None and (found := pictures.image_file(name)) is not None:
            builtin = Codec(name, *found)
        if builtin is None:
            builtin = _subclass(name)
        if builtin is None:
            return None
        _registered[name] = builtin
    return _registered[name]


def _flatten_meta(value: Any) -> Any:
    return {"array": value.as_tensor(), "attributes": {**vars(value)}, "addresses_of": _ADDRESS_SPACE}


def _unflatten_meta(tree: Any) -> Any:
    """A MetaTensor knows its transforms by their addresses, which say nothing in another process.

    There they are replaced as in MONAI's own caches on disk, so that transforms can be inverted.
    """
    from monai.data.meta_tensor import MetaTensor

    attributes = tree["attributes"]
    if tree["addresses_of"] != _ADDRESS_SPACE:
        for name in ("_applied_operations", "_pending_operations"):
            attributes[name] = _without_addresses(attributes[name])
    value: Any = tree["array"].as_subclass(MetaTensor)
    vars(value).update(attributes)
    return value


def _without_addresses(part: Any) -> Any:
    if type(part) is dict:
        return {
            name: "none" if name == "id" and "class" in part else _without_addresses(value)
            for name, value in part.items()
        }
    return type(part)(map(_without_addresses, part)) if type(part) in (list, tuple) else part


def _subclass(name: str) -> Codec | None:
    """A codec for a class that was not registered: a derived one, or one in C with a state.

    An object of a class of tensors, pictures, containers, ... that was made by a ``class`` statement is the
    tensor, the picture, the container, ... and its attributes.
    """
    try:
        cls = type_named(name)
    except (AttributeError, ImportError, ValueError):
        return None
    loaded = sys.modules.get("torch")
    if loaded is not None and issubclass(cls, loaded.Tensor) and cls is not loaded.Tensor:
        from hotset.store.leaves.tensor_subclasses import tensors_of

        # Collating makes a plain tensor of torchvision's.
        stacks = 0 if name.startswith("torchvision.tv_tensors.") else None
        return Codec(name, *tensors_of(cls), stacks)
    holding = graphs_of(cls) or derived_from(cls)
    found = holding or pictures.image_subclass(cls) or state_of(cls)
    return Codec(name, *found, holds=holding is not None) if found is not None else None


# ---- numpy and the standard library ---------------------------------------------------------------------

_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str, bytes)}


def _flatten_memmap(value: Any) -> Any:
    # A copy of a memmap is a memmap in memory, without a file. That is what comes back.
    return (np.asarray(value),)


def _flatten_masked(value: Any) -> Any:
    others = vars(value).keys() - _OF_MASKED
    if others or value._optinfo or value._basedict or value._baseclass is not np.ndarray or value._isfield:
        raise SchemaMismatch("a masked array that is more than data, a mask and a value to fill it with")
    mask = None if value._mask is np.ma.nomask else np.asarray(value._mask)
    filled = value.view()
    filled.fill_value = filled.fill_value  # numpy sets it when it is first asked for
    return value.view(np.ndarray), mask, filled._fill_value, value._hardmask, value._sharedmask


def _unflatten_masked(tree: Any) -> Any:
    data, mask, fill_value, hard, shared = tree
    value: Any = data.view(np.ma.MaskedArray)
    value._mask = np.ma.nomask if mask is None else mask
    value._fill_value, value._hardmask, value._sharedmask = fill_value, hard, shared
    return value


_OF_MASKED = vars(np.ma.MaskedArray([0])).keys()  # type: ignore[no-untyped-call]


def _flatten_defaultdict(value: Any) -> Any:
    factory = value.default_factory
    if factory is not None and factory is not _FACTORIES.get(getattr(factory, "__name__", "")):
        raise SchemaMismatch(f"a defaultdict that makes {factory!r}; only {', '.join(_FACTORIES)} are stored")
    return ("" if factory is None else factory.__name__, dict(value))


def _unflatten_defaultdict(tree: Any) -> Any:
    factory, items = tree
    return defaultdict(_FACTORIES[factory] if factory else None, items)


def _flatten_set(value: Any) -> Any:
    # Numbers as one array, so that sets of different sizes share a form.
    if all(type(each) is int and -(1 << 63) <= each < 1 << 63 for each in value):
        return np.fromiter(value, np.int64, len(value))
    return sorted(value, key=lambda each: type(each).__qualname__)  # so that more of them share a form


def _elements(tree: Any) -> Any:
    return tree.tolist() if isinstance(tree, np.ndarray) else tree


def _flatten_datetime(value: Any) -> Any:
    zone = _flatten_zone(value.tzinfo)
    return (value.year, value.month, value.day, *_clock(value), zone)


def _flatten_time(value: Any) -> Any:
    return (*_clock(value), _flatten_zone(value.tzinfo))


def _clock(value: Any) -> tuple[int, ...]:
    return (value.hour, value.minute, value.second, value.microsecond, value.fold)


def _flatten_zone(zone: Any) -> Any:
    """None, the seconds, microseconds and name of a fixed offset, or the key of a time zone."""
    if zone is None:
        return None
    if type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
        return zone.key
    if type(zone) is datetime.timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return (_flatten_timedelta(offset), *name)
    raise SchemaMismatch(f"a time in {zone!r}, which is neither a fixed offset nor a ZoneInfo with a key")


def _unflatten_zone(tree: Any) -> Any:
    if tree is None:
        return None
    if isinstance(tree, str):
        return zoneinfo.ZoneInfo(tree)
    offset, *name = tree
    return datetime.timezone(datetime.timedelta(*offset), *name)


def _unflatten_datetime(tree: Any) -> Any:
    *date, hour, minute, second, microsecond, fold, zone = tree
    time = _unflatten_time((hour, minute, second, microsecond, fold, zone))
    return datetime.datetime.combine(datetime.date(*date), time)


def _unflatten_time(tree: Any) -> Any:
    hour, minute, second, microsecond, fold, zone = tree
    return datetime.time(hour, minute, second, microsecond, _unflatten_zone(zone), fold=fold)


def _flatten_timedelta(value: Any) -> Any:
    return (value.days, value.seconds, value.microseconds)


def _flatten_range(value: Any) -> Any:
    return (value.start, value.stop, value.step)


def _unflatten_size(tree: Any) -> Any:
    import torch

    return torch.Size(tree)


_PLAIN: tuple[tuple[type, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (set, _flatten_set, lambda tree: set(_elements(tree))),
    (frozenset, _flatten_set, lambda tree: frozenset(_elements(tree))),
    (deque, lambda value: (value.maxlen, list(value)), lambda tree: deque(tree[1], tree[0])),
    (defaultdict, _flatten_defaultdict, _unflatten_defaultdict),
    (Counter, dict, Counter),
    (range, _flatten_range, lambda tree: range(*tree)),
    (slice, _flatten_range, lambda tree: slice(*tree)),
    (bytearray, bytes, bytearray),
    (datetime.datetime, _flatten_datetime, _unflatten_datetime),
    (datetime.date, lambda value: (value.year, value.month, value.day), lambda tree: datetime.date(*tree)),
    (datetime.time, _flatten_time, _unflatten_time),
    (datetime.timedelta, _flatten_timedelta, lambda tree: datetime.timedelta(*tree)),
    (decimal.Decimal, str, decimal.Decimal),
    (np.str_, str, np.str_),
    (np.bytes_, bytes, np.bytes_),
    (
        uuid.UUID,
        lambda value: (value.bytes, value.is_safe),
        lambda tree: uuid.UUID(bytes=tree[0], is_safe=tree[1]),
    ),
    *((kind, str, kind) for kind in (PurePosixPath, PureWindowsPath, PosixPath)),
)

_BUILTIN = {
    codec.name: codec
    for codec in (
        *(Codec(name_of_type(kind), flatten, unflatten) for kind, flatten, unflatten in _PLAIN),
        Codec("torch:Size", list, _unflatten_size),
        Codec("torch:Tensor", flatten_sparse, unflatten_sparse),
        Codec(name_of_type(np.memmap), _flatten_memmap, lambda tree: tree[0].view(np.memmap), stacks=0),
        Codec(name_of_type(np.ma.MaskedArray), _flatten_masked, _unflatten_masked),
        Codec("PIL.Image:Image", pictures.flatten_image, pictures.unflatten_image),
        Codec("monai.data.meta_tensor:MetaTensor", _flatten_meta, _unflatten_meta),
    )
}
