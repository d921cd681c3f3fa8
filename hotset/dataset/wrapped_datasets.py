"""The datasets that a dataset wraps: in attributes, or in a list, tuple or dict of a few; at any depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from hotset.determinism.objects.safe_access import attributes_of, elements, is_a, length

__all__ = ["cached_in", "datasets_in"]

_WRAPPED = 64
_DEPTH = 8


def datasets_in(dataset: Any) -> Iterator[Any]:
    """The dataset and those that it wraps, but for a cached one, which looks after its own."""
    return (each for each in _datasets_in(dataset) if not _is_of_hotset(each))


def cached_in(dataset: Any) -> Iterator[Any]:
    """The cached datasets and streams among the dataset and those that it wraps."""
    return filter(_is_of_hotset, _datasets_in(dataset))


def _datasets_in(dataset: Any, depth: int = 0) -> Iterator[Any]:
    held = attributes_of(dataset)
    if held is None:
        return
    yield dataset
    for value in list(held.values()) if depth < _DEPTH and not _is_of_hotset(dataset) else ():
        several = issubclass(type(value), (dict, list, tuple)) and length(value) <= _WRAPPED
        for part in elements(value) if several else [value]:
            if is_a(part, Dataset):
                yield from _datasets_in(part, depth + 1)


def _is_of_hotset(dataset: Any) -> bool:
    return str(type(dataset).__module__).startswith("hotset.")
