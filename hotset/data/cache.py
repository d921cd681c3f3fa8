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

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, TypeVar

from torch.utils.data import Dataset

from hotset.data.cached import CachedDataset, attach_store
from hotset.data.identity import Identity
from hotset.data.planning import Made, Wanted, joined_plan, make_plan
from hotset.data.residents import Residents
from hotset.data.source import Uncut
from hotset.data.window import Window
from hotset.determinism.declare import declared
from hotset.errors import ArgumentError, UnsupportedPlatform
from hotset.session.share import share
from hotset.store.ring import Ring
from hotset.store.segment import Address
from hotset.store.store import Store
from hotset.told import tell
from hotset.units import parse_bytes

__all__ = ["cache"]

T = TypeVar("T")


def cache(
    dataset: Dataset[T],
    *,
    transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    memory: int | str = "auto",
    key: str | None = None,
    window: Window | None = None,
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
        window: keep only a part of the samples in memory, which runs over all of them: see
            :class:`hotset.Window`. An epoch uses just those, and ``len()`` is their number. Where that is
            given as an amount of memory, ``memory`` is not looked at.
        strict: leave live what is known to be deterministic by its trial only.
        cut: how many transforms are cached, the data set's own ``transform`` first; instead of what hotset
            would choose.

    Returns:
        A data set of the same length and samples, unless there is a window.

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
    if window is not None and not isinstance(window, Window):
        raise ArgumentError(
            f"window={window!r} is no window; write window=hotset.Window(resident={window!r})."
        )
    wanted = Wanted(memory, strict, cut, window)
    uncut = Uncut.of(dataset, transform)
    running = None if window is None else [str(field) for field in astuple(window)]
    identity = Identity.of(uncut, key, strict, cut, running)
    made: Made | None = None

    def create() -> Store | None:
        nonlocal made
        made = make_plan(uncut, wanted, identity)
        return _create(made, wanted)

    def attach(address: Address) -> Store:
        nonlocal made
        store = attach_store(address)
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
        tell(
            f"{name} has a set_epoch, so its samples may change from epoch to epoch, and cached ones do not: "
            f"move what changes to transform=, or if nothing does, declare it: hotset.deterministic({name})."
        )
    for note in made.plan.warnings:
        tell(note)
    residents = _residents(made, window, store)
    return CachedDataset(dataset, made.source, made.plan, store, registration, residents)


def _is_steady(dataset: object) -> bool:
    """Whether nothing that is cached of a data set with a ``set_epoch`` depends on the epoch."""
    return isinstance(dataset, CachedDataset) or declared(dataset) == "deterministic"


def _create(made: Made, wanted: Wanted) -> Store | None:
    plan, schema = made.plan, made.schema
    if schema is None:
        return None
    about = plan.about(wanted.memory, made.cuts)
    try:
        if plan.window is not None:
            ring = Ring.create(schema, plan.window.slots, plan.limit, about=about)
            ring.room.knob = "resident"
            return ring
        return Store.create(schema, plan.samples, plan.limit, about=about)
    except UnsupportedPlatform:
        raise
    except (OSError, MemoryError, ValueError, OverflowError) as error:
        tell(
            f"{plan.name}: no cache can be made, samples come from the source: {error}. Look at the "
            "limits of this shell (`ulimit -a`), or lower `memory=`."
        )
    return None


def _residents(made: Made, window: Window | None, store: Store | None) -> Residents | None:
    plan = made.plan
    if plan.window is None or window is None:
        return None
    ring = store if isinstance(store, Ring) else None
    return Residents(plan.window, ring, made.source.read, plan.name, wait=window.wait, prefill=window.prefill)
