"""The attributes of a dataset as they were: put back after reading, or compared after a method was called.

**Put back.** Many datasets open a file, a database or a connection when they read first, so that each worker
has its own: such a handle cannot be pickled, and is often not to be used after a fork. Others note what they
have read, and go by it: Ultralytics' draws the pictures of a mosaic from a list of those read last. With
torch's loader the main process of a program with workers reads nothing. Planning reads a few samples there,
and would leave an open handle behind, which a spawned worker could not get and forked ones would share, or
have other pictures drawn.

So the attributes of the dataset, and of the datasets that it wraps, are set to what they were, and lists,
dicts, sets and deques among them get the elements that they had. So are those of its transforms, before the
cache gets its fingerprint: a transform that counts its calls, or loads a network when it is called first,
would have another one in the process that plans than in all others. An object is left alone if a container
of another kind has grown or shrunk meanwhile, as its attributes may describe the container.

**Compared.** A method of the dataset may set attributes on which samples depend (``close_mosaic()``). Values
are compared by identity, numbers and text by value, containers element by element. What a method seems to
have computed once, and kept, does not count.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from hotset.determinism.batch_transform import TakesBatches

__all__ = ["HeldAttributes"]

_FILLED = (list, dict, set, deque, OrderedDict, defaultdict)  # and no subclasses: their methods may do more
_CONTAINERS = (list, dict, set, deque, bytearray)
_PLAIN = (bool, int, float, complex, str, bytes)
_WRAPPED = 64
_DEPTH = 8


class _Owner(NamedTuple):
    """An object, and what it held.

    Attributes:
        owner: the object.
        held: its attributes.
        elements: of its containers that can be filled again, by name.
        lengths: of its other containers.
    """

    owner: Any
    held: dict[str, Any]
    elements: dict[str, list[Any]]
    lengths: list[int]


class HeldAttributes:
    """The attributes of a dataset, and of those that it wraps, as they are when this is made.

    Args:
        dataset: the dataset, before it is read.
        transforms: its transforms, before they are called.

    Example:
        >>> import types
        >>> dataset = types.SimpleNamespace(file=None, read=[])
        >>> held = HeldAttributes(dataset)
        >>> dataset.file = "an open file"
        >>> dataset.read.append(7)
        >>> held.changed()
        'file'
        >>> held.put_back()
        >>> dataset
        namespace(file=None, read=[])
    """

    def __init__(self, dataset: Any, transforms: Iterable[Any] = ()) -> None:
        holders = [dataset, *map(_holder, transforms)]
        owners = {id(owner): owner for holder in holders for owner in _owners(holder, 0)}
        self._held = [
            _Owner(owner, dict(vars(owner)), _elements(vars(owner)), _lengths(vars(owner)))
            for owner in owners.values()
        ]

    def put_back(self) -> None:
        """Set all attributes to what they were, with the elements that they had."""
        for owner, held, elements, lengths in self._held:
            now = vars(owner)
            if _lengths(held) != lengths:
                continue
            for name in [name for name in now if name not in held]:
                del now[name]
            for name, value in held.items():
                if name not in now or now[name] is not value:
                    now[name] = value
            for name, before in elements.items():
                if not _same_elements(_listed(held[name]), before):
                    _fill(held[name], before)

    def changed(self) -> str | None:
        """The name of an attribute that is another now; None if all are what they were."""
        for owner, held, elements, lengths in self._held:
            now: dict[str, Any] = vars(owner)
            for name in {**held, **now}:
                alike = name in held and name in now and _same(now[name], held[name])
                if not alike and not _is_computed(owner, name, held.get(name)):
                    return name
            for name, before in elements.items():
                if not _same_elements(_listed(held[name]), before):
                    return name
            if _lengths(held) != lengths:
                return next(name for name, value in held.items() if isinstance(value, _CONTAINERS))
        return None


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _PLAIN) and bool(one == other)


def _same_elements(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(_same, one, other))


def _is_computed(owner: Any, name: str, before: Any) -> bool:
    """Whether an attribute that had no value before seems to keep what follows from others.

    Such as ``_labels``, which ``labels()`` makes when it is called first.
    """
    kept = name.startswith("_") or isinstance(getattr(type(owner), name, None), functools.cached_property)
    return before is None and kept


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


def _elements(attributes: dict[str, Any]) -> dict[str, list[Any]]:
    """What each container holds that can be filled again."""
    return {name: _listed(value) for name, value in attributes.items() if type(value) in _FILLED}


def _listed(container: Any) -> list[Any]:
    """The elements of a container; of a dict its keys, and then its values."""
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _fill(container: Any, elements: list[Any]) -> None:
    """Have a container hold these elements, which :func:`_listed` gave."""
    container.clear()
    if isinstance(container, dict):
        half = len(elements) // 2
        container.update(zip(elements[:half], elements[half:], strict=True))
    elif isinstance(container, set):
        container.update(elements)
    else:
        container.extend(elements)


def _lengths(attributes: dict[str, Any]) -> list[int]:
    """The length of each container that cannot be filled again."""
    return [
        len(value)
        for value in attributes.values()
        if isinstance(value, _CONTAINERS) and type(value) not in _FILLED
    ]
