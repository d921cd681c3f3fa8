"""Batches as trees: their tensors apart from the rest, so that these can be copied and compared.

A batch is a tensor, or tensors in dicts, lists, tuples, namedtuples and dataclasses, to any depth; whatever
else is in it (strings, numbers, objects) is a leaf that stays as it is. So do the sizes in a packed sequence,
a tensor that torch wants on the host.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = [
    "HostSizes",
    "Signature",
    "call",
    "difference",
    "map_tensors",
    "memory_of",
    "others",
    "signature_of",
    "tensors_of",
]

# The methods that give the tensors which hold the memory of a tensor of another layout than strided.
_PARTS = {
    torch.jagged: ("values", "offsets"),
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class Signature(NamedTuple):
    """Shape and dtype of a tensor of a batch, and where it is in it (``"[0]"``, ``"['image']"``)."""

    place: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class HostSizes:
    """The sizes in a packed sequence, as a leaf that is not a tensor."""


def _parts(node: Any) -> list[tuple[str, Any]] | None:
    """The parts of a container, each with what leads to it; None for a leaf."""
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, PackedSequence):
        parts = zip(node._fields, node, strict=True)
        given = ((name, HostSizes() if name == "batch_sizes" else part) for name, part in parts)
        return [(f".{name}", part) for name, part in given if part is not None]
    if isinstance(node, (list, tuple)):
        return [(f"[{number}]", value) for number, value in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def _leaves(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    parts = _parts(node)
    if parts is None:
        yield place, node
        return
    for step, part in parts:
        yield from _leaves(part, place + step)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in order."""
    return [leaf for _, leaf in _leaves(batch, "") if isinstance(leaf, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a tensor's memory: itself, or what a sparse or jagged one is made of.

    Example:
        >>> [one.shape for one in memory_of(torch.eye(3).to_sparse())]
        [torch.Size([2, 3]), torch.Size([3])]
    """
    names = _PARTS.get(tensor.layout)
    return [tensor] if names is None else [getattr(tensor, name)() for name in names]


def others(batch: Any) -> list[tuple[str, Any]]:
    """The values of a batch that are not tensors, each with its place."""
    return [(place, leaf) for place, leaf in _leaves(batch, "") if not isinstance(leaf, torch.Tensor)]


def signature_of(batch: Any) -> tuple[Signature, ...]:
    """Shapes and dtypes of a batch's tensors.

    Example:
        >>> signature_of((torch.zeros(2, 3), "a"))
        (Signature(place='[0]', shape=(2, 3), dtype=torch.float32),)
    """
    return tuple(
        Signature(place, tuple(leaf.shape), leaf.dtype)
        for place, leaf in _leaves(batch, "")
        if isinstance(leaf, torch.Tensor)
    )


def difference(expected: Sequence[Signature], batch: Any, *, shorter: bool = False) -> str | None:
    """How a batch differs from what is expected, in words; None if it does not.

    Args:
        expected: its signature.
        shorter: whether it may have fewer samples (first dimension), like the last one of a pass.
    """
    found = signature_of(batch)
    if len(found) != len(expected):
        return f"it has {len(found)} tensors, not {len(expected)}"
    for want, have in zip(expected, found, strict=True):
        fewer = () < have.shape[:1] < want.shape[:1] and have.shape[1:] == want.shape[1:]
        if have.dtype != want.dtype or (have.shape != want.shape and not (shorter and fewer)):
            where = f"at {have.place} " if have.place else ""
            return f"{where}it is {have.dtype} {have.shape}, not {want.dtype} {want.shape}"
    return None


def map_tensors(change: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """A batch of the same make, with ``change`` of each tensor in its place."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    kind: Any = type(batch)
    if isinstance(batch, PackedSequence):
        data, sizes, *indices = batch
        return kind._make([change(data), sizes, *(map_tensors(change, each) for each in indices)])
    if isinstance(batch, tuple):
        return getattr(kind, "_make", kind)(map_tensors(change, part) for part in batch)
    if isinstance(batch, Mapping):
        values = {key: map_tensors(change, part) for key, part in batch.items()}
        return values if kind is dict else _like(batch, values)
    if isinstance(batch, list):
        made: Any = copy.copy(batch)
        made[:] = [map_tensors(change, part) for part in batch]
        return made
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        made = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(made, field.name, map_tensors(change, getattr(batch, field.name)))
        return made
    return batch


def _like(mapping: Any, values: dict[Any, Any]) -> Any:
    """A mapping of the same class: an OrderedDict, a BatchEncoding, one of the user's."""
    if not isinstance(mapping, MutableMapping):
        try:
            return type(mapping)(values)
        except TypeError:  # it is made of something else
            return values
    made: Any = copy.copy(mapping)
    # A shallow copy may keep its values where the first one does, and those are not to change.
    for name, value in getattr(mapping, "__dict__", {}).items():
        if isinstance(value, MutableMapping) and made.__dict__.get(name) is value:
            made.__dict__[name] = copy.copy(value)
    for key, value in values.items():  # update() adds in a Counter, and some forbid it
        made[key] = value
    return made


def call(fn: Callable[..., Any], batch: Any) -> Any:
    """A step's result on a batch: its elements are the arguments, if it is a list or tuple."""
    return fn(*batch) if isinstance(batch, (list, tuple)) else fn(batch)
