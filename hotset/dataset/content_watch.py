"""What cached samples may depend on: compared, as a pass begins, with what it was.

A user changes in place what a dataset holds: ``dataset.labels[3] = 5``, ``dataset.epoch.value += 1``. Without
a cache each pass reads samples with it. So what the cached part of a sample may depend on is remembered when
the cache is made, and compared as a pass begins:

===================================  =======================================================================
an attribute of the dataset, or of   compared if code that reads samples names it
one that it wraps                    (:mod:`hotset.determinism.objects.reading_names`)
what such an attribute holds         compared, at any depth (:class:`HeldAttributes`), within :class:`Room`
one of them that seems to keep what  counts if one of a few cached samples, read again, is another now
follows from others
the parameters of cached transforms  compared
of live transforms                   not: they run for each use
torch's default dtype and device     compared: tensors are made with them
globals of the user's modules,       compared if that code uses them; a change counts if one of a few cached
attributes of the user's classes,    samples, read again, is another now, or if none was read yet
variables of closures, those of the
environment, what a ``ContextVar`` or
``threading.local`` stands for here
what reading samples changes itself  not: neither what planning has seen to change (a counter of reads), nor
                                     what has changed while this process has read a pass, if a few samples
                                     are still what was cached of them
===================================  =======================================================================

A dataset that is declared, or has a ``key=``, is not compared: its user says what samples depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from hotset._warnings import warn
from hotset.dataset.held_attributes import Difference, HeldAttributes, with_objects
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.transform_attributes import (
    TRANSFORM_NAMES,
    owners_of_transforms,
    transform_attributes_of,
)
from hotset.dataset.wrapped_datasets import datasets_in
from hotset.determinism.batched import Batched
from hotset.determinism.objects.code_dependencies import is_users
from hotset.determinism.objects.held_values import Room
from hotset.determinism.objects.object_graph import loaded_by, reached_by_code
from hotset.determinism.objects.outer_names import outer_names
from hotset.determinism.objects.reading_names import reading_code
from hotset.determinism.objects.safe_access import attributes_of, is_a, is_opaque

__all__ = ["Comparing", "ContentWatch"]

T = TypeVar("T")

_WRAPPERS = (Subset, ConcatDataset, StackDataset)  # they read what they wrap by index alone


class Comparing:
    """Runs what compares the user's objects, until that raises: then it says so, and runs nothing more.

    Args:
        name: of the class of the dataset, or stream, that holds them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_failed = False

    def run(self, compare: Callable[[], T]) -> T | None:
        """Return what ``compare`` returns; None if it raises, or something has raised before."""
        if self._has_failed:
            return None
        try:
            return compare()
        except Exception as error:  # of a stranger's code
            self._has_failed = True
            warn(
                f"what {self._name} holds cannot be compared any more ({type(error).__name__}: {error}), so "
                "a change of it in place will not be noticed; call clear() after one."
            )
            return None


class ContentWatch:
    """Compares what samples may depend on with what it was."""

    def __init__(self, dataset: Any, access: SampleAccess) -> None:
        self._dataset = dataset
        self._access = access
        self._comparing = Comparing(type(dataset).__name__)
        self._comparing.run(self._find)
        self.look()

    def _find(self) -> None:
        """Find what may change, and what of it counts."""
        dataset, source = self._dataset, self._access.source
        # A Batched looks at its network itself.
        self._cached = [step for step in source.cached_steps if not isinstance(step, Batched)]
        chains = {attribute.name for attribute in transform_attributes_of(dataset)}
        # Their cached steps are compared one by one. torchvision holds its two transforms in a third, too.
        chains |= set(TRANSFORM_NAMES) if chains else set()
        self._chains = {id(owner): chains for owner in owners_of_transforms(dataset)}
        readers = [each for each in datasets_in(dataset) if type(each) not in _WRAPPERS]
        code = [reading_code(each, self._chains.get(id(each), ())) for each in readers]
        names = [each.names for each in code]
        held = (value for each in readers for value in (attributes_of(each) or {}).values())
        held = (value for value in held if not is_opaque(value) and is_users(value))
        objects = [*self._cached, *(value for value in held if not is_a(value, Dataset))]
        reached = [one for each in objects for one in reached_by_code(each)]
        functions = [one for each in code for one in each.functions]
        loaded = [value for one in functions if is_users(one) for value in loaded_by(one)]
        reached += functions
        reached += [value if issubclass(type(value), type) else type(value) for value in loaded]
        self._outer = outer_names(reached, (*readers, *objects))
        self._readers = set(map(id, readers))
        self._names = None if None in names else frozenset[str]().union(*filter(None, names))

    def look(self) -> None:
        """From here on, compare with what is held now."""
        self._read_before = self._access.read_here
        self._is_held = False
        self._defaults = _torch_defaults()
        self._comparing.run(self._look)

    def _look(self) -> None:
        self._inside = HeldAttributes.of(self._dataset, self._cached, Room(outermost=0), self._counts)
        # What its code uses besides.
        self._around = HeldAttributes(with_objects(self._outer), Room(outermost=0))

    def hold(self) -> None:
        """What has changed up to now counts, even if a pass ends before it is asked for."""
        self._is_held = self.change() is not None

    def pass_ended(self) -> None:
        """Compare with what is held now, if reading samples in this process may have changed it."""
        has_read = self._access.read_here > self._read_before and not self._is_held
        # The user's code has run between batches, too.
        if has_read and not (self.change(computed=False) is not None and self._access.differs_from_source()):
            self.look()

    def change(self, *, shared: bool = False, computed: bool = True) -> Difference | None:
        """An attribute that is another now; None if there is none.

        Args:
            shared: only one whose change running workers see.
            computed: also one that seems to keep what follows from others, which reading sets as well.
        """
        for name, now in _torch_defaults().items() if not shared else ():
            if now != self._defaults[name]:
                return Difference("torch", name, is_shared=False)
        return self._comparing.run(lambda: self._change_here(shared, computed))

    def _change_here(self, shared: bool, computed: bool) -> Difference | None:
        found = self._inside.changed(shared=shared, computed=computed)
        if shared or (found is not None and not found.is_computed):
            return found
        # What was computed from others, a global, or an attribute of a class counts if it changes samples.
        found = found or self._around.changed()
        if found is None or self._access.differs_from_source():
            return found
        self._find()  # what is compared may belong to code that is used no more
        self._look()
        return None

    def _counts(self, owner: Any, name: str) -> bool:
        if f"{type(owner).__name__}.{name}" in self._access.moved or name.startswith("_hotset"):
            return False
        if id(owner) not in self._readers:
            return True
        return name not in self._chains.get(id(owner), ()) and (self._names is None or name in self._names)


def _torch_defaults() -> dict[str, object]:
    """What tensors are made with for which no dtype or device is given."""
    return {
        "get_default_dtype()": torch.get_default_dtype(),
        "get_default_device()": torch.get_default_device(),
    }
