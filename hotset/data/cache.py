"""``hotset.cache``: a data set whose deterministic part is read once per machine.

The order of what happens in :func:`cache`: the data set gets its identity, a few real samples decide where
its chains are cut, and are read twice up to there (the probe: does the source draw random numbers, do two
readings agree?), the samples give the schema, and an empty segment is made. Nothing else is read. From then
on every process that has the object, by fork or by pickle, shares that segment: who needs an absent sample
reads it and leaves it there for all. Ranks of one job each call :func:`cache` themselves; by the identity
they find the segment that the first of them has made (:mod:`hotset.session.share`), and take it without
reading a sample.
"""

from __future__ import annotations

import contextlib
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from hotset.data.identity import Identity
from hotset.data.plan import Made, Plan, Wanted, joined_plan, make_plan
from hotset.data.source import Source, Uncut
from hotset.data.stats import Stats
from hotset.determinism.declare import declared
from hotset.errors import HotsetWarning, SegmentError, UnsupportedPlatform
from hotset.session import registry
from hotset.session.share import attach_again, share
from hotset.store.claims import Ids
from hotset.store.format import PRESENT, Live, Slot
from hotset.store.segment import Address
from hotset.store.store import Store
from hotset.units import parse_bytes

__all__ = ["CachedDataset", "cache"]

T = TypeVar("T")

_MISFITS_WORTH_TELLING = 16


def cache(
    dataset: Dataset[T],
    *,
    transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    memory: int | str = "auto",
    key: str | None = None,
    strict: bool = False,
    cut: int | None = None,
) -> CachedDataset[T]:
    """Cache the deterministic part of a data set in memory that all processes of this job share.

    The chain of transforms (the data set's own ``transform``, ``target_transform`` or ``transforms``, then
    ``transform=``) is cut after its leading transforms that are deterministic: declared with
    :func:`hotset.deterministic`, known by the structure of torchvision, MONAI, albumentations, kornia and
    torch.nn, whose containers are cut in their middle, or of unknown structure and well-behaved in a trial.
    It is cut earlier where that is clearly cheaper, as smaller samples are stored and more of them fit. What
    comes before the cut is computed once per sample; what comes after runs for each use, on a copy of the
    cached sample. ``print(cached.plan)`` tells what was decided, and why.

    Ranks of one job on one machine (torchrun, Accelerate, Lightning, srun, mpirun) that call this with the
    same data set share one cache: the first makes it, with its ``memory``, and the others take it. A data set
    whose samples depend on the rank by something that is no part of its state needs a ``key`` for each.

    Args:
        dataset: anything with ``len(dataset)`` and ``dataset[i]``. It is not changed.
        transform: one callable or a list of them, applied to whole samples after the data set's own.
        memory: the most that the cached samples may take: bytes, a string such as ``"64GiB"``, or
            ``"auto"``, half of what is free under the machine's and every enclosing control group's limit.
            Samples for which there is no room come from the source, each time.
        key: names the cached content, instead of the fingerprint of source and transforms. Ranks share what
            has one key, one length, and a live part or none.
        strict: leave live what is known to be deterministic by its trial only.
        cut: how many transforms are cached, the data set's own ``transform`` first; instead of what hotset
            would choose.

    Returns:
        A data set of the same length and samples.

    Raises:
        ArgumentError: the data set is empty, iterable only, a transform cannot be called, or ``cut`` is not
            between 0 and the number of transforms.
        QuantityError: ``memory`` is no amount of memory.
        NotCacheable: the source gives other samples each time, and the part that does cannot be cut off.
        UnsupportedPlatform: this is not Linux.
        Exception: what the data set or a transform raises on the samples that are read to decide.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> cached = cache(TensorDataset(torch.arange(6).view(3, 2)), memory="1MiB")
        >>> cached[2][0], cached.stats().cached
        (tensor([4, 5]), 1)
    """
    if memory != "auto":
        parse_bytes(memory)  # an error here, also in a rank that takes another one's cache
    wanted = Wanted(memory, strict, cut)
    uncut = Uncut.of(dataset, transform)
    identity = Identity.of(uncut, key, strict, cut)
    made: Made | None = None

    def create() -> Store | None:
        nonlocal made
        made = make_plan(uncut, wanted, identity)
        return _create(made, wanted)

    def attach(address: Address) -> Store:
        nonlocal made
        store = Store.attach(address)
        try:
            made = joined_plan(uncut, wanted, identity, store.segment.metadata)
        except BaseException:
            store.close()
            raise
        return store

    name = type(dataset).__name__
    store, registration, joined = share(identity.meeting, name, create=create, attach=attach)
    assert made is not None, "either made here or found"
    if not joined and hasattr(dataset, "set_epoch") and not _is_steady(dataset):
        warnings.warn(
            f"{name} has a set_epoch, so its samples may change from epoch to epoch, and cached ones do not: "
            f"move what changes to transform=, or if nothing does, declare it: hotset.deterministic({name}).",
            HotsetWarning,
            stacklevel=2,
        )
    for note in made.plan.warnings:
        warnings.warn(note, HotsetWarning, stacklevel=2)
    return CachedDataset(dataset, made.source, made.plan, store, registration)


def _is_steady(dataset: object) -> bool:
    """Whether nothing that is cached of a data set with a ``set_epoch`` depends on the epoch."""
    return isinstance(dataset, CachedDataset) or declared(dataset) == "deterministic"


def _create(made: Made, wanted: Wanted) -> Store | None:
    plan, schema = made.plan, made.schema
    if schema is None:
        return None
    try:
        return Store.create(schema, plan.samples, plan.limit, about=plan.about(wanted, made.cuts))
    except UnsupportedPlatform:
        raise
    except (OSError, MemoryError, ValueError, OverflowError) as error:
        warnings.warn(
            f"{plan.name}: no cache can be made, samples come from the source: {error}. Look at the "
            "limits of this shell (`ulimit -a`), or lower `memory=`.",
            HotsetWarning,
            stacklevel=5,
        )
    return None


class CachedDataset(Dataset[T], Generic[T]):
    """A data set whose samples are cached; made by :func:`cache`.

    It can be used wherever the data set itself could: with any DataLoader, in ``Subset`` and
    ``ConcatDataset``, in forked and spawned workers. Attributes that it does not have itself are the data
    set's (``cached.classes``).

    Attributes:
        dataset: the data set that was given to :func:`cache`.
        source: the data set and its chain, cut in two.
        plan: what is cached, what stays live, and why; print it.
        tell: gets the sentence when samples stay uncached; warns. A loader's worker hands it on instead.
        epoch: what :meth:`set_epoch` was told last; 0 before.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> with cache(TensorDataset(torch.arange(4)), memory="1MiB") as cached:
        ...     samples = [cached[i] for i in (0, 3, 0)]
        ...     print(samples[1], cached.stats().hits, cached.check())
        (tensor(3),) 1 []
    """

    def __init__(
        self,
        dataset: Dataset[T],
        source: Source,
        plan: Plan,
        store: Store | None,
        registration: registry.Registration | None,
    ) -> None:
        self.dataset = dataset
        self.source = source
        self.plan = plan
        self._store: Store | Address | None = store
        self._length = len(dataset)  # type: ignore[arg-type]
        self._own_misses = 0
        self.tell: Callable[[str], None] = _warn
        self.epoch = 0
        self._registration = registration
        self._joined = os.getpid()

    # ---- the data set --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> T:
        number = operator.index(index)
        if not -self._length <= number < self._length:
            # Out of range: whatever the data set itself says to that.
            return self.source.finish(self.source.read(number))  # type: ignore[no-any-return]
        return self.__getitems__([number])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[T]:
        """The samples of a batch, as DataLoader asks for them."""
        ids = np.array([operator.index(index) for index in indices], np.int64)
        if len(ids) and not (-self._length <= ids.min() and ids.max() < self._length):
            return [self[index] for index in ids.tolist()]
        ids[ids < 0] += self._length
        return [self.source.finish(sample) for sample in self.records(ids)]

    def records(self, ids: Ids, in_hand: dict[int, Any] | None = None) -> list[Any]:
        """Samples as they are at the cut, each the caller's own.

        Args:
            ids: sample numbers, not negative.
            in_hand: what :meth:`fill` has just returned for them, if it was called.
        """
        store = self.store
        if store is None:
            return [self._uncached(sample) for sample in ids.tolist()]
        if in_hand is None:
            in_hand = self.fill(ids)
        numbers = ids.tolist()
        stored = [place for place, sample in enumerate(numbers) if sample not in in_hand]
        found: dict[int, Any] = {}
        if stored:
            there = ids[stored]
            copies = store.read(there) if store.present(there).all() else None
            if copies is not None:
                found = dict(zip(stored, copies, strict=True))
                store.count_hits(len(stored))
        samples = []
        for place, sample in enumerate(numbers):
            if place in found:
                samples.append(found[place])
            elif sample in in_hand:
                # Given out once: who asks for it again, in the same batch too, must not share the object.
                samples.append(in_hand.pop(sample))
            else:
                samples.append(self._again(sample))
        return samples

    def fill(self, ids: Ids, *, keep: bool = True) -> dict[int, Any]:
        """Bring these samples into the cache where there is room: see :meth:`Store.fill`."""
        store = self.store
        if store is None:
            return {}
        in_hand = store.fill(ids, self.source.read, keep=keep)
        if in_hand:
            self._tell(store)
        return in_hand

    def _again(self, sample: int) -> Any:
        """A sample that was in the cache or in hand a moment ago: from there, else from the source."""
        store = self.store
        ids = np.array([sample])
        if store is not None and store.present(ids).all():
            copies = store.read(ids)
            if copies is not None:
                store.count_hits(1)
                return copies[0]
        return self._uncached(sample)

    def _uncached(self, sample: int) -> Any:
        self._own_misses += 1
        return self.source.read(sample)

    def _tell(self, store: Store) -> None:
        """Tell the user, once for all processes, that samples stay uncached, and which knob to turn.

        A few samples of another form are nobody's worry; a hundredth of them is.
        """
        live = store.segment.live
        if live[Live.TOLD]:
            return
        if store.room.why_full is not None:
            cached = int((store.segment.index >= PRESENT).sum())
            why = f"{cached:,} of {len(self):,} samples are cached, and no more fit: {store.room.why_full}"
        elif store.filler.misfits >= max(_MISFITS_WORTH_TELLING, len(self) // 100):
            why = f"{store.filler.misfits:,} samples and more stay uncached: {store.filler.misfit}"
        else:
            return
        with store.member.short_lock():  # workers run out of room at the same moment, and one is to say so
            told, live[Live.TOLD] = int(live[Live.TOLD]), 1
        if told:
            return
        self.tell(f"{self.plan.name}: {why}.")

    # ---- the store -----------------------------------------------------------------------------------

    @property
    def store(self) -> Store | None:
        """The store as this process sees it; None when nothing can be cached, or after :meth:`close`."""
        if isinstance(self._store, Address):
            self._store = self._attach(self._store)
            self._joined = 0
        if self._store is not None and self._joined != os.getpid():
            self._join()
        return self._store

    def _join(self) -> None:
        """List this process as one more that keeps the cache alive; a loader's worker does not outlive it."""
        self._joined = os.getpid()
        if self._registration is not None and get_worker_info() is None:
            assert isinstance(self._store, Store)
            self._registration.join(self._store.segment.fd)

    def _attach(self, address: Address) -> Store | None:
        try:
            store = attach_again(address, Store.attach)
        except (SegmentError, OSError) as error:
            warnings.warn(
                f"the cache of {self.plan.name} is out of reach, so samples come from the source: {error} "
                "Unpickle it on the same machine, while a process that has it lives.",
                HotsetWarning,
                stacklevel=4,
            )
            return None
        return store

    def stats(self) -> Stats:
        """What the cache holds and has served, over all processes."""
        store = self.store
        if store is None:
            return Stats(0, len(self), 0, 0, 0, self._own_misses, 0.0)
        cached = int((store.segment.index >= PRESENT).sum())
        sums = store.segment.slots.sum(axis=0).tolist()
        return Stats(
            cached=cached,
            uncached=len(self) - cached,
            spilled=0,
            bytes=sums[Slot.STORED_BYTES],
            hits=sums[Slot.HITS],
            misses=sums[Slot.MISSES],
            fill_seconds=sums[Slot.FILL_NS] / 1e9,
        )

    def served(self) -> tuple[int, int]:
        """Hits and misses of :meth:`stats`, without counting what is cached."""
        store = self.store
        if store is None:
            return 0, self._own_misses
        hits, misses = store.segment.slots[:, Slot.HITS : Slot.MISSES + 1].sum(axis=0).tolist()
        return hits, misses

    def check(self) -> list[str]:
        """Verify every record; a sentence for each problem, an empty list if there is none."""
        store = self.store
        return store.check() if store is not None else []

    def clear(self) -> None:
        """Forget every cached sample, in all processes.

        Raises:
            SegmentError: another process went on writing samples for five seconds.
        """
        store = self.store
        if store is not None and not store.clear():
            raise SegmentError(
                f"{self.plan.name} cannot be cleared while other processes fill it; stop them."
            )

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; the data set is told as well, if it has a ``set_epoch``.

        The order of samples is the sampler's: call ``loader.sampler.set_epoch(epoch)`` as ever. A cached
        sample does not change with the epoch.
        """
        self.epoch = epoch
        # Two, where the chain was cut: what is read is a copy then.
        for dataset in {id(known): known for known in (self.dataset, self.source.dataset)}.values():
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)

    def close(self) -> None:
        """Detach from the cache; samples come from the source from then on. Batches in hand stay valid."""
        store = self._store
        self._store = None
        if isinstance(store, Store):
            store.close()
        if self._registration is not None:
            self._registration.close()
            self._registration = None

    def __enter__(self) -> CachedDataset[T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end anything may be gone already
            self.close()

    # ---- the rest ------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        store = self.store
        state["tell"] = _warn
        state["_store"] = store.segment.address if store is not None else None
        return state

    def __repr__(self) -> str:
        return f"CachedDataset({self.dataset!r})"


def _warn(sentence: str) -> None:
    warnings.warn(sentence, HotsetWarning, stacklevel=6)
