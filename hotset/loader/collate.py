"""Collate functions for samples of variable shape.

:func:`pad` and :data:`ragged` are ordinary collate functions, which any DataLoader takes. Leaves that do not
vary in shape are collated as by ``default_collate``. ``hotset.DataLoader`` knows these functions, and gathers
such batches from the cache by lines, as it gathers default batches by rows.

Padding does not depend on which leaves vary: tensors of one shape pad to what stacking gives. A ragged batch
has another type than a stacked one, so it must not depend on which samples a batch happens to hold: over a
cache without live transforms, a leaf is ragged if its shape varied among the samples that gave the cache its
schema. Elsewhere, and where none of those happened to differ, it is if it varies in the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from hotset.store.gather import Variable
from hotset.store.leaves.array_leaf import ArrayLeaf
from hotset.store.leaves.schema import Schema
from hotset.store.leaves.tree import Group, Node
from hotset.store.ragged import Ragged

__all__ = ["Pad", "RaggedCollate", "as_in_workers", "bound", "is_known", "pad", "ragged"]

Path = tuple[Any, ...]

_SHORT = 4096  # elements
_TORCHS = default_collate.__module__  # where torch's functions for its types are
_ALIGN = 16  # bytes: every dtype's size divides it
# By size: torch selects and fills elements of these, and not those of all dtypes (uint16, float8).
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Pad:
    """Collates arrays of different shapes into one padded tensor. Made by :func:`pad`."""

    value: float

    def __call__(self, samples: list[Any]) -> Any:
        return _collate(samples, (), self._column)

    def _column(self, tensors: list[torch.Tensor], path: Path) -> Any:
        first = tensors[0]
        if all(tensor.shape == first.shape for tensor in tensors):
            return default_collate(tensors)
        return self.of_ragged(Ragged.of(tensors))

    def of_ragged(self, batch: Ragged) -> torch.Tensor:
        """The padded tensor, of shape (B, largest of each dimension)."""
        largest = batch.shapes.max(axis=0).tolist()
        tail = batch.shapes[0, 1:]
        width = largest[0] * int(tail.prod())
        if 0 < width <= _SHORT and (batch.shapes[:, 1:] == tail).all():
            return self._short(batch, width).view(len(batch), *largest)
        shape, device = (len(batch), *largest), batch.buffer.device
        padded = torch.full(shape, self.value, dtype=batch.dtype, device=device)
        for row, tensor in zip(padded, batch, strict=True):
            row[tuple(slice(size) for size in tensor.shape)] = tensor
        return padded

    def _short(self, batch: Ragged, width: int) -> torch.Tensor:
        """Short tensors that differ in their first dimension only: all elements in one selection.

        A loop over the tensors costs microseconds for each, this one nanosecond for each element.
        """
        bits = _BITS.get(batch.dtype.itemsize, batch.dtype)
        elements = batch.buffer[: len(batch.buffer) // _ALIGN * _ALIGN].view(bits)
        # Of a single element torch does not check that the dtype can hold the value.
        filling = torch.full((2,), self.value, dtype=batch.dtype, device=elements.device).view(bits)[0]
        along = np.arange(width)
        places = (batch.starts // batch.dtype.itemsize)[:, None] + along
        np.minimum(places, len(elements) - 1, out=places)
        padded = torch.take(elements, torch.from_numpy(places).to(elements.device))
        beyond = along >= batch.shapes.prod(axis=1)[:, None]
        padded.masked_fill_(torch.from_numpy(beyond).to(elements.device), filling)
        return padded.view(batch.dtype)


@dataclass(frozen=True)
class RaggedCollate:
    """Collates arrays of different shapes into a :class:`hotset.store.ragged.Ragged`."""

    varying: frozenset[Path] | None = None

    def __call__(self, samples: list[Any]) -> Any:
        return _collate(samples, (), self._column)

    def _column(self, tensors: list[torch.Tensor], path: Path) -> Any:
        varies = self.varying is not None and path in self.varying
        varies = varies or any(tensor.shape != tensors[0].shape for tensor in tensors)
        return Ragged.of(tensors) if varies else default_collate(tensors)


def pad(value: float = 0) -> Pad:
    """Return a collate function that pads arrays of different shapes with ``value``.

    Tensors and numpy arrays of one dtype and number of dimensions become one tensor of shape
    ``(batch, largest of each dimension)``, each in its upper left corner; everything else is collated as
    ``torch.utils.data.default_collate`` does.

    Raises:
        TypeError: (the function) arrays of one leaf differ in dtype or number of dimensions.

    Example:
        >>> pad(-1)([torch.ones(2), torch.zeros(1)]).tolist()
        [[1.0, 1.0], [0.0, -1.0]]
    """
    return Pad(value)


ragged = RaggedCollate()
"""A collate function that keeps arrays of different shapes: as a sequence of tensors over one buffer."""


def is_known(collate: Callable[..., Any]) -> bool:
    """Whether ``hotset.DataLoader`` makes such batches itself: default ones, padded ones, ragged ones.

    Not if the user has registered functions of their own for :func:`torch.utils.data.default_collate`.
    """
    if collate is not default_collate and not isinstance(collate, (Pad, RaggedCollate)):
        return False
    return all(function.__module__ == _TORCHS for function in default_collate_fn_map.values())


def as_in_workers(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The same batches, as a function that :func:`is_known` makes them in a worker.

    There ``default_collate`` stacks into shared memory, in C order. Elsewhere ``torch.stack`` makes of clips
    that lie as THWC, and are seen as TCHW, a batch that lies likewise.

    Example:
        >>> clips = [torch.zeros(2, 4, 5, 3).permute(0, 3, 1, 2)] * 2
        >>> default_collate(clips).is_contiguous(), as_in_workers(default_collate)(clips).is_contiguous()
        (False, True)
    """
    return lambda samples: tree_map_only(torch.Tensor, torch.Tensor.contiguous, collate(samples))


def bound(
    collate: Callable[..., Any], schema: Schema | None
) -> tuple[Callable[[list[Any]], Any], Variable | None]:
    """The collate function for samples of this schema, and what it makes of a gathered variable leaf.

    The schema is None where it is not that of the samples to be collated: live transforms come in between.
    """
    if isinstance(collate, Pad):
        return collate, collate.of_ragged
    if isinstance(collate, RaggedCollate) and schema is not None:
        return replace(collate, varying=frozenset(_varying(schema.tree, ()))), lambda batch: batch
    return collate, None


def _varying(node: Node, path: Path) -> Iterator[Path]:
    if isinstance(node, Group):
        for key, child in zip(node.keys or range(len(node.children)), node.children, strict=True):
            # Fields of a namedtuple are columns by position, like those of any tuple.
            step = node.keys.index(key) if node.kind == "namedtuple" else key
            yield from _varying(child, (*path, step))
    elif isinstance(node, ArrayLeaf) and node.shape is None:
        yield path


def _collate(samples: Sequence[Any], path: Path, column: Callable[[list[torch.Tensor], Path], Any]) -> Any:
    """Collate like ``default_collate``, but for columns of arrays, which ``column`` makes."""
    first = samples[0]
    kind = type(first)
    if isinstance(first, Mapping):
        made = {key: _collate([s[key] for s in samples], (*path, key), column) for key in first}
        return made if kind is dict else _like(first, made)
    if isinstance(first, (list, tuple)):
        if any(len(sample) != len(first) for sample in samples):
            raise RuntimeError("each element in list of batch should be of equal size")
        parts = [
            _collate(values, (*path, place), column)
            for place, values in enumerate(zip(*samples, strict=True))
        ]
        if hasattr(first, "_fields"):
            return kind(*parts)
        return parts if kind is list or isinstance(first, tuple) else _like(first, parts)
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc":
        samples = [torch.as_tensor(sample, device="cpu") for sample in samples]
    if all(isinstance(sample, torch.Tensor) for sample in samples) and samples[0].ndim:
        return column(list(samples), path)
    return default_collate(samples)  # type: ignore[arg-type]


def _like(first: Any, made: Any) -> Any:
    """A mapping or list of the samples' own class, with what else the first one holds, as torch makes it."""
    try:
        if not isinstance(first, (MutableMapping, list)):
            return type(first)(made)
        batch: Any = copy.copy(first)
        if isinstance(first, list):
            for place, part in enumerate(made):
                batch[place] = part
        else:
            batch.update(made)
        return batch
    except TypeError:  # its class can do neither
        return made
