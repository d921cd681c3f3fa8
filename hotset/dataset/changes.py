"""What has changed of a dataset since it was cached, and whether that counts.

:class:`Changes` is the dataset as it was when it was cached. It is asked for a :class:`Change` at each use of
the cached dataset (an index, a batch), and as a pass begins (``len()``, pickling for workers, a pass of
hotset's loader, the first sample in one of torch's), where there is time to compare more:

==================================================  =======================  ================================
what has changed                                    is noticed by            and counts
==================================================  =======================  ================================
an attribute, set on, or deleted from, the cached   setting it               at once
dataset, its ``__dict__`` or ``__class__``
a transform, set on the dataset or what it wraps,   its identity             at the next use
or put into a container (timm does so)              (:class:`Snapshot`)
an attribute, set by a method of the dataset that   its value                at the next use, in mid-pass as
was looked up on the cached one                     (HeldAttributes)         the next pass begins
an element, set on the cached dataset by its index  setting it               the same
the length                                          ``len()``                as a pass begins
any other attribute, set on the dataset or changed  its value                as a pass begins
in place, that code which reads samples names       (:class:`ContentWatch`)
a cached dataset that this one reads, cached anew   what it is read by       at the next use
the same, by the dataset's ``set_epoch``            the same                 at once, in mid-pass as the next
                                                                             pass begins
==================================================  =======================  ================================

A loader's worker compares values once, at its first use: its dataset may have changed before it began. What
is set on the dataset also reaches the copy of it that is read, whether or not it counts, and what reading
sets on the copy reaches the dataset (:class:`CopiedAttributes`). What follows from a change,
:mod:`hotset.dataset.current_cache` decides.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch.utils.data import get_worker_info

from hotset.dataset.arguments import CacheArguments
from hotset.dataset.content_watch import ContentWatch
from hotset.dataset.held_attributes import Difference, HeldAttributes
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.transform_attributes import CopiedAttributes, Snapshot, names_transforms
from hotset.determinism.declare import declared

__all__ = ["Change", "Changes", "SetSince"]


class Inner(Protocol):
    """What reads the samples of a cached dataset that another one reads, and follows what changes of it."""

    access: SampleAccess

    def at_use(self) -> SampleAccess: ...

    def as_pass_begins(self) -> SampleAccess: ...


class Change(NamedTuple):
    """Something that is not as it was when the dataset was cached.

    Attributes:
        what, event: a phrase of a warning: ``Digits.scale``, ``was set``.
        advice: what to do if it should not count, for a warning; None: there is no warning.
        is_new: whether it has happened just now, and not some time before it was noticed.
        is_content: whether it may be in place, so that no fingerprint may cover it.
        is_shared: whether workers that run already see it.
    """

    what: str
    event: str
    advice: str | None
    is_new: bool = False
    is_content: bool = False
    is_shared: bool = False


class SetSince:
    """What is set on a dataset, or by its methods, from when this is made, or begins anew.

    It pickles, and begins anew: what it compares by identity is another object in each process.

    Args:
        transform: of :func:`hotset.cache`.
    """

    def __init__(self, dataset: Any, transform: Any) -> None:
        self.dataset, self._transform = dataset, transform
        self.begin()

    def begin(self) -> None:
        """Compare with what is held now."""
        self._transforms = Snapshot(self.dataset, self._transform)
        self._held: HeldAttributes | None = None  # since a method was looked up
        self._by_method: Difference | None = None  # that it has made

    def method_was_looked_up(self) -> None:
        """One of the dataset's methods is about to be called: what it sets counts."""
        if self._held is None:
            self._held = HeldAttributes.of(self.dataset)

    def elements_were_set(self) -> None:
        """What the dataset holds was set by index: that counts as if a method had set an attribute."""
        self._by_method = Difference(type(self.dataset).__name__, "elements", False)

    def name(self, *, in_pass: bool = False) -> str | None:
        """The name of an attribute that was set; None if none was, or only by a method in mid-pass."""
        if self._held is not None:
            held, self._held = self._held, None
            self._by_method = self._by_method or held.changed()
        if not self._transforms.is_current():
            return "transform"
        return None if in_pass or self._by_method is None else self._by_method.name

    def __reduce__(self) -> Any:
        return type(self), (self.dataset, self._transform)


class Changes:
    """A dataset as it was when it was cached.

    Args:
        access: what was cached of it.
        set_since: of it; begins anew now.
        inner: the cached datasets that it reads.
    """

    def __init__(
        self, arguments: CacheArguments, access: SampleAccess, set_since: SetSince, inner: Sequence[Inner]
    ) -> None:
        set_since.begin()
        self._inner = [(each, each.access) for each in inner]
        dataset = set_since.dataset
        self._dataset, self._access, self._name = dataset, access, type(dataset).__name__
        self._set_since = set_since
        self._copied = CopiedAttributes(dataset, access.source.dataset)
        self._read = CopiedAttributes(access.source.dataset, dataset)
        # Its user says what samples depend on, so that nothing is compared.
        self._is_believed = declared(dataset) == "deterministic" or arguments.key is not None
        is_compared = access.any_store is not None and not self._is_believed
        self._content: ContentWatch | None = None
        if is_compared and get_worker_info() is None:
            self._content = ContentWatch(dataset, access)

    def at_use(self, *, in_pass: bool = False) -> Change | None:
        """A change that counts at any use of the cached dataset.

        Args:
            in_pass: whether that is in the midst of a loader's pass: what a method sets counts from the next
                pass on.
        """
        name = self._set_since.name(in_pass=in_pass)
        self._give_and_take()
        if name is not None:
            return self.was_set(name)
        if self._content is not None and get_worker_info() is not None:
            for inner, _ in self._inner:
                inner.at_use()
            change = self._of_inner() or self._of_content(workers_keep=False)
            self.ignore_content()
            return change
        return self._of_inner()

    def _give_and_take(self) -> None:
        """Give the copy that is read what was set on the dataset, and the dataset what reading has set there.

        A database that the copy has opened may not be opened once more in this process.
        """
        self._copied.follow()
        self._read.follow()

    def as_pass_begins(self, *, in_pass: bool, workers_keep: bool) -> Change | None:
        """A change that counts where a pass begins.

        Args:
            in_pass: whether another pass is not over yet, until whose end a new length does not count.
            workers_keep: whether workers read it that run already, and have the dataset as it was.
        """
        for inner, _ in self._inner:
            inner.as_pass_begins()
        found = self.at_use() or (None if in_pass else self._of_length())
        return found or self._of_content(workers_keep=workers_keep)

    def by_set_epoch(self, held: HeldAttributes, *, in_pass: bool, workers_keep: bool) -> Change | None:
        """A change that the dataset's ``set_epoch`` has made since its attributes were ``held``."""
        in_worker, length = get_worker_info() is not None, self._of_length()
        if length is not None or (in_worker and not self._is_believed):
            found = held.changed()
            return length if found is None else self.was_set(found.name, is_new=length is None)
        if not in_pass:
            return self._of_content(workers_keep=workers_keep)
        if self._content is not None:
            self._content.hold()
        return None

    def was_set(self, name: str, *, is_new: bool = False) -> Change:
        """An attribute of this name was set."""
        advice = None if names_transforms(name) else f"{self._if_independent()}, and set it on `.dataset`"
        return Change(f"{self._name}.{name}", "was set", advice, is_new)

    def _of_length(self) -> Change | None:
        """The length, unless there is a window, whose length is that of its residents."""
        if self._access.window is not None:
            return None
        before, now = self._access.plan.samples, len(self._dataset)
        event = f"changed from {before:,} to {now:,}"
        return Change(f"the length of {self._name}", event, "") if now != before else None

    def _of_content(self, *, workers_keep: bool) -> Change | None:
        content = self._content
        if content is None or (found := content.change()) is None:
            return None
        # Whether workers run, torch's loader does not tell.
        may_run = workers_keep or bool(multiprocessing.active_children())
        shared = content.change(shared=True) if may_run else None
        what, is_shared = str(shared if workers_keep and shared is not None else found), shared is not None
        return Change(what, "has changed", self._if_independent(), is_content=True, is_shared=is_shared)

    def _of_inner(self) -> Change | None:
        """A cached dataset that is read by something else than when samples were cached of it."""
        for inner, access in self._inner:
            if inner.access is not access:
                what = f"the cached {inner.access.plan.name} in {self._name}"
                return Change(what, "has changed", "cache only one of the two", is_content=True)
        return None

    def _if_independent(self) -> str:
        return "if no sample depends on it, declare it: hotset.deterministic(dataset)"

    def pass_ended(self) -> None:
        """A pass was read here: what reading samples in this process has changed does not count."""
        self._give_and_take()
        if self._content is not None:
            self._content.pass_ended()

    def ignore_content(self) -> None:
        """From now on neither the content nor what code uses besides counts."""
        self._content = None
