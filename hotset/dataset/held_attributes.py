"""The attributes of a dataset as they were: put back after reading, or compared later.

**Put back.** Many datasets open a file, a database or a connection when they read first, so that each worker
has its own: such a handle cannot be pickled, and is often not to be used after a fork. Others note what they
have read, and go by it: Ultralytics' draws the pictures of a mosaic from a list of those read last. With
torch's loader the main process of a program with workers reads nothing. Planning reads a few samples there,
and would leave an open handle behind, which a spawned worker could not get and forked ones would share, or
have other pictures drawn.

So the attributes of the dataset, of the datasets that it wraps, of the objects of the user's classes that
these hold, and of a library's objects that apply a list of transforms, in a ``__dict__`` or in slots, are set
to what they were; lists, dicts, sets and deques among them get the elements that they had, and small arrays
and tensors their numbers. So are those of its transforms, before the cache gets its fingerprint: a transform
that counts its calls, or loads a network when it is called first, would have another one in the process that
plans than in all others. MONAI's readers note the file that they read, so what transforms hold is put back
whoever has written its class. An object is left alone if a container in it cannot be put back and has changed
meanwhile, as its attributes may describe the container, if it holds an iterator, as they may be what it has
given, or if it has a thread of its own that runs (MONAI's ``SmartCacheDataset``).

What their code keeps elsewhere is put back as well: a file that is opened once for each process may be in a
global, in a class, in a dict of the module, or in what ``functools.lru_cache`` keeps. What the code of a
thread that runs names is left as it is: that thread may have written it.

The audit reads a sample in the main process now and then, too, and puts back the attributes of the objects
that are near (:meth:`HeldAttributes.near`). All would take longer than reading.

**Compared.** A method of the dataset may set attributes on which samples depend (``close_mosaic()``), or the
user may: ``dataset.labels[3] = 5``, ``dataset.config.size = 64``, ``dataset.epoch.value += 1``. Values are
compared as :mod:`hotset.determinism.objects.held_values` says. What a method seems to have computed once, and
kept, is told apart (:attr:`Difference.is_computed`). A dataset that is a list, a dict, an array or a tensor
itself is looked at as if it were the attribute ``elements``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import threading
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from hotset.dataset.wrapped_datasets import datasets_in
from hotset.determinism.batch_transform import TakesBatches
from hotset.determinism.objects.code_dependencies import is_users
from hotset.determinism.objects.held_values import ENTERED, PLAIN_TYPES, Room, holds_iterator, same_value
from hotset.determinism.objects.names import Counts, Names, is_its_own
from hotset.determinism.objects.near_attributes import near_objects
from hotset.determinism.objects.object_graph import held_objects, reached_by_code
from hotset.determinism.objects.safe_access import attributes_of, is_a, is_opaque, length
from hotset.determinism.objects.thread_names import named_by_threads

__all__ = ["Difference", "HeldAttributes", "outer_code", "with_objects"]

_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


class Difference(NamedTuple):
    """An attribute that is another now than it was.

    Attributes:
        kind, name: the class that has it, and its name.
        is_shared: whether running workers see that.
        is_computed: whether it seems to keep what follows from others.
    """

    kind: str
    name: str
    is_shared: bool
    is_computed: bool = False

    def __str__(self) -> str:
        return f"{self.kind}.{self.name}"


class HeldAttributes:
    """The attributes of some objects, as they are when this is made.

    Args:
        owners: the objects.
        room: how much of what they hold is looked at; it is used up.
        counts: whether an attribute of an owner counts; all of its own do by default.
        outside: functions and classes, from :func:`outer_code`: what they keep in globals, classes and
            closures, and by ``functools.lru_cache``, is put back as well.

    Example:
        >>> import types
        >>> dataset = types.SimpleNamespace(file=None, read=[], box={"size": [3, 4]})
        >>> held = HeldAttributes.of(dataset)
        >>> dataset.file = "an open file"
        >>> dataset.read.append(7)
        >>> dataset.box["size"][0] = 5
        >>> held.changed().name, held.moved()
        ('file', ['SimpleNamespace.file', 'SimpleNamespace.read', 'SimpleNamespace.box'])
        >>> held.put_back()
        >>> dataset
        namespace(file=None, read=[], box={'size': [3, 4]})
    """

    def __init__(
        self, owners: Iterable[Any], room: Room, counts: Counts = is_its_own, outside: Iterable[Any] = ()
    ) -> None:
        each_once = {id(owner): owner for owner in owners}.values()
        self._held = [Names(owner, room, counts) for owner in each_once]
        self._outside = [Names(each, Room.outside(), code=True) for each in outside]
        self._threads = named_by_threads() if self._outside else {}

    @classmethod
    def of(
        cls,
        dataset: Any,
        transforms: Iterable[Any] = (),
        room: Room | None = None,
        counts: Counts = is_its_own,
        *,
        libraries: bool = False,
        outside: Iterable[Any] = (),
    ) -> HeldAttributes:
        """The attributes of a dataset, of the datasets that it wraps, and of objects that these hold.

        Args:
            dataset: the dataset, before it is read.
            transforms: its transforms, before they are called; what they hold counts as well.
            room: see :class:`HeldAttributes`; by default for what is compared in two milliseconds.
            libraries: whether what a transform holds counts also where a library defines its class.
        """
        kinds = (object,) if libraries else _NAMESPACES
        theirs = (each for step in transforms for each in _datasets_at(_holder(step)))
        owners = [*with_objects(_datasets_at(dataset), counts), *with_objects(theirs, counts, kinds)]
        return cls(owners, Room() if room is None else room, counts, outside)

    @classmethod
    def near(cls, dataset: Any, transforms: Iterable[Any], outside: Iterable[Any]) -> HeldAttributes:
        """The attributes of the objects that are near, with what small containers hold.

        It takes about 50 us, and some microseconds for each part of the code ``outside``, so it can be made
        for a reading of one sample.
        """
        holders = [*datasets_in(dataset), *map(_holder, transforms)]
        own, kinds = set(map(id, holders)), (Dataset, *_NAMESPACES)
        near = near_objects(holders)
        owners = [each for each in near if id(each) in own or is_a(each, kinds) or is_users(each)]
        return cls(owners, Room.small(), outside=outside)

    def put_back(self) -> None:
        """Set all attributes to what they were, with the elements that they had."""
        threads = self._threads | named_by_threads() if self._outside else {}
        for names in (*self._held, *self._outside):
            with contextlib.suppress(Exception):  # of a stranger's code: then it stays as reading left it
                if names.code or not _is_left_alone(names):
                    names.put_back(threads)

    def changed(self, *, shared: bool = False, computed: bool = False) -> Difference | None:
        """An attribute that is another now; None if all are what they were.

        Args:
            shared: only one whose change running workers see.
            computed: also one that seems to keep what follows from others, if there is no other one.
        """
        kept = None
        for each in self._differing():
            if each.is_computed:
                kept = kept or each
            elif each.is_shared or not shared:
                return each
        return kept if computed and not shared else None

    def moved(self) -> list[str]:
        """All attributes that are others now, each as ``class.name``."""
        return [str(each) for each in self._differing()]

    def _differing(self) -> Iterator[Difference]:
        for names in self._held:
            owner, held, seen, now = names.owner, names.held, names.seen, names.now()
            kind = type(owner).__name__
            if now is None:  # it does not show them any more
                yield Difference(kind, "__dict__", False)
                continue
            for name in {**held, **now}:
                if name not in held and not names.counts(owner, name):
                    continue
                if name in seen and seen[name].is_like(now.get(name)):
                    continue
                is_set = not (name in held and name in now and same_value(now[name], held[name]))
                if is_set or (name in seen and not seen[name].is_as_it_was()):
                    is_computed = is_set and _is_computed(owner, name, held.get(name), now.get(name))
                    yield Difference(kind, name, name in seen and seen[name].is_shared(), is_computed)


def _is_left_alone(names: Names) -> bool:
    """Whether what an object holds is not put back: it would not go together any more, or be a thread's."""
    if any(each.is_lost() for each in names.seen.values()) or any(map(holds_iterator, names.held.values())):
        return True
    # Such a thread may have set attributes, and wait for what it has set.
    return any(issubclass(type(each), threading.Thread) and each.is_alive() for each in names.held.values())


def _is_computed(owner: Any, name: str, before: Any, now: Any) -> bool:
    """Whether an attribute that had no value before seems to keep what follows from others.

    Such as ``_labels``, which ``labels()`` makes when it is called first. A method is set by somebody.
    """
    kept = name.startswith("_") or isinstance(getattr(type(owner), name, None), functools.cached_property)
    return before is None and kept and not issubclass(type(now), (types.FunctionType, types.MethodType))


def outer_code(dataset: Any, transforms: Iterable[Any]) -> list[Any]:
    """The functions and classes by which a dataset and its transforms may keep something outside of them."""
    holders = (*datasets_in(dataset), *transforms)
    found = [each for holder in holders for each in reached_by_code(holder)]
    torchs = set(map(id, Dataset.__mro__))
    found += [cls for each in datasets_in(dataset) for cls in type(each).__mro__ if id(cls) not in torchs]
    kinds = (type, types.FunctionType)
    return list({id(each): each for each in found if issubclass(type(each), kinds)}.values())


def with_objects(
    owners: Iterable[Any], counts: Counts = is_its_own, kinds: tuple[type, ...] = _NAMESPACES
) -> list[Any]:
    """Owners, each with the objects of the user's classes, of these kinds, and chains that it holds."""
    return [each for owner in owners for each in (owner, *_objects_of(owner, counts, kinds))]


def _datasets_at(holder: Any) -> Iterator[Any]:
    """An object, and the datasets that it wraps.

    One that is a container or an array comes also as ``elements`` of an object whose class has its name.
    """
    yield from datasets_in(holder)
    kind = type(holder)
    if issubclass(kind, (*ENTERED, np.ndarray, torch.Tensor)):
        yield type(kind.__name__, (types.SimpleNamespace,), {})(elements=holder)


def _objects_of(owner: Any, counts: Counts, kinds: tuple[type, ...]) -> Iterator[Any]:
    """What :func:`with_objects` adds to an owner; no datasets."""
    for name, value in list((attributes_of(owner) or {}).items()):
        if is_opaque(value) or type(value) in PLAIN_TYPES or is_a(value, Dataset) or not counts(owner, name):
            continue
        if issubclass(type(value), ENTERED) and length(value) > Room.elements:
            continue
        for each in held_objects(value, kinds):
            is_one = is_a(each, kinds) or is_users(each) or _is_chain(each)
            if is_one and not is_a(each, Dataset) and attributes_of(each) is not None:
                yield each


def _is_chain(value: Any) -> bool:
    """Whether an object can be called, and holds a list of what can be: a library's ``Compose``."""
    parts = [part for part in (attributes_of(value) or {}).values() if type(part) is list and part]
    return callable(value) and any(all(map(callable, part)) for part in parts)


def _holder(transform: Any) -> Any:
    """The object whose attributes a transform uses."""
    if issubclass(type(transform), TakesBatches):
        transform = transform.transform
    return transform.__self__ if issubclass(type(transform), types.MethodType) else transform
