"""A dataset as it was before it was read: attributes that reading sets are put back after planning.

Many datasets open a file, a database or a connection when they read first, so that each worker has its own:
such a handle cannot be pickled, and is often not to be used after a fork. With torch's loader the main
process of a program with workers reads nothing. Planning reads a few samples there, and would leave an open
handle behind: a spawned worker could not be started, and a forked one would share it with all others.

The attributes of the dataset, and of the datasets that it wraps, are set to what they were. So are those of
its transforms, before the cache gets its fingerprint: a transform that counts its calls, or loads a network
when it is called first, would have another one in the process that plans than in all others. An object is
left alone if one of its containers has grown or shrunk meanwhile, as its attributes may describe the
container.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset

from hotset.determinism.batch_transform import TakesBatches

__all__ = ["Unread"]

_CONTAINERS = (list, dict, set, bytearray)
_WRAPPED = 64
_DEPTH = 8


class Unread:
    """The attributes of a dataset, and of those that it wraps.

    Args:
        dataset: the dataset, before it is read.
        transforms: its transforms, before they are called.

    Example:
        >>> import types
        >>> dataset = types.SimpleNamespace(file=None)
        >>> held = Unread(dataset)
        >>> dataset.file = "an open file"
        >>> held.put_back()
        >>> dataset
        namespace(file=None)
    """

    def __init__(self, dataset: Any, transforms: Iterable[Any] = ()) -> None:
        holders = [dataset, *map(_holder, transforms)]
        owners = {id(owner): owner for holder in holders for owner in _owners(holder, 0)}
        self._held = [(owner, dict(vars(owner)), _lengths(vars(owner))) for owner in owners.values()]

    def put_back(self) -> None:
        """Set all attributes to what they were."""
        for owner, held, lengths in self._held:
            now = vars(owner)
            if _lengths(held) != lengths:
                continue
            for name in [name for name in now if name not in held]:
                del now[name]
            for name, value in held.items():
                if name not in now or now[name] is not value:
                    now[name] = value


def _owners(dataset: Any, depth: int) -> Iterator[Any]:
    """The dataset and those that it wraps, but for a cached one, which looks after its own."""
    if type(dataset).__module__.startswith("hotset.") or not isinstance(
        getattr(dataset, "__dict__", None), dict
    ):
        return
    yield dataset
    for value in list(vars(dataset).values()) if depth < _DEPTH else ():
        several = value.values() if isinstance(value, dict) else value
        parts = (
            list(several) if isinstance(value, (dict, list, tuple)) and len(value) <= _WRAPPED else [value]
        )
        for part in parts:
            if isinstance(part, Dataset):
                yield from _owners(part, depth + 1)


def _holder(transform: Any) -> Any:
    """The object whose attributes a transform uses."""
    if isinstance(transform, TakesBatches):
        transform = transform.transform
    return getattr(transform, "__self__", transform)


def _lengths(attributes: dict[str, Any]) -> list[int]:
    return [len(value) for value in attributes.values() if isinstance(value, _CONTAINERS)]
