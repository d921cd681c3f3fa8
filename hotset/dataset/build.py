"""``hotset.cache``: a data set whose deterministic part is read once per machine.

The order of what happens in :func:`cache`: the data set gets its identity, a few real samples decide where
its chains are cut, and are read twice up to there (the probe: does the source draw random numbers, do two
readings agree?), the samples give the schema, and an empty segment is made. Nothing else is read. From then
on every process that has the object, by fork or by pickle, shares that segment: who needs an absent sample
reads it and leaves it there for all. Ranks of one job each call :func:`cache` themselves; by the identity
they find the segment that the first of them has made (:mod:`hotset.session.find_or_create`), and take it
without reading a sample. In a session all jobs do.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Literal, TypeVar, cast

from torch.utils.data import Dataset

from hotset._warnings import printable, warn
from hotset.dataset.active_window import ActiveWindow
from hotset.dataset.attachment import Attachment, map_ahead
from hotset.dataset.audit import first_difference
from hotset.dataset.cached_dataset import CachedDataset, Current, Maker
from hotset.dataset.cluster_setup import join_machines, neighbours_of, planned_by_all, require_machines
from hotset.dataset.identity import Identity, NotShared, unshareable
from hotset.dataset.pipeline import Pipeline
from hotset.dataset.planner import CacheOptions, PlanResult, found_plan, joined_plan, make_plan, own_memory
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.window import Window
from hotset.determinism.declare import declared
from hotset.errors import ArgumentError, FolderError, SegmentError, SessionError, UnsupportedPlatform
from hotset.session.find_or_create import (
    CacheLocation,
    Shared,
    find_or_create_in_job,
    find_or_create_in_session,
)
from hotset.session.job import is_rank, this_job
from hotset.session.session_cache import SessionCacheHandle
from hotset.session.sessions import find
from hotset.session.spill_dirs import open_spill, spill_path
from hotset.store.locks import can_reopen
from hotset.store.ring import Ring, attach_store
from hotset.store.segment import Address
from hotset.store.spill import SpillTo
from hotset.store.store import Store
from hotset.units import parse_bytes

__all__ = ["cache"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _explained(function: F) -> F:
    """Have a call that does not fit the arguments say which one to write."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            signature.bind(*given, **named)
        except TypeError as error:
            raise TypeError(_advice(given, named, list(signature.parameters), error)) from None
        return function(*given, **named)

    return cast(F, call)


def _advice(given: Sequence[Any], named: Mapping[str, Any], known: list[str], error: TypeError) -> str:
    """What is wrong with these arguments, and what to write."""
    if len(given) > 1:
        value = printable(repr(given[1]), 60)
        name = "memory" if isinstance(given[1], (int, str)) else "transform"
        return (
            f"hotset.cache takes nothing but the dataset by position, got {value} as well; "
            f"write {name}={value}."
        )
    for name in named:
        if name not in known:
            like = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            rest = f"write {like[0]}=" if like else f"its arguments are {', '.join(known)}"
            return f"hotset.cache has no argument {name}=; {rest}."
    return f"hotset.cache must be given a dataset: {error}."


@_explained
def cache(
    dataset: Dataset[T],
    *,
    transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    memory: int | str = "auto",
    spill: str | os.PathLike[str] | Literal[False] | None = None,
    session: str | int | None = None,
    key: str | None = None,
    window: Window | None = None,
    cluster: str | None = None,
    replicate: bool = False,
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
            ``"auto"``: half of what is free under the machine's and every enclosing control group's limit, or
            what the session may hold. ``"80%"`` is a share of the same. Samples for which there is no room
            come from the source, each time.
        spill: a folder on a disk of this machine, for samples that memory has no room for; better a fast
            one. It is made if it is not there, in a folder that is. Of the disk, 64 MiB or a hundredth,
            whichever is more, stay free. A session spills where it says; ``False`` keeps this cache of it in
            memory.
        session: name or number of a session (``hotset session create``), whose caches outlive this job: who
            caches the same in it, now or later, finds what is there. Without it the cache ends with the job.
        key: names the cached content, instead of the fingerprint of source and transforms. Ranks share what
            has one key, one length, and a live part or none.
        window: keep only a part of the samples in memory, which runs over all of them: see
            :class:`hotset.Window`. An epoch uses just those, and ``len()`` is their number. Where that is
            given as an amount of memory, ``memory`` is not looked at. Not with ``cluster``: there give each
            machine a window over its own :class:`torch.utils.data.Subset`.
        cluster: share the session with the other machines of a Ray cluster, so that their memories hold the
            data together, each sample once: its address, or ``"auto"`` for the one that this process or
            machine belongs to. Where a machine has no such session it is made there, with ``memory``.
        replicate: keep samples that other machines sent in the memory that this one has left over.
        strict: leave live what is known to be deterministic by its trial only.
        cut: how many transforms are cached, the data set's own ``transform`` first; instead of what hotset
            would choose.

    Returns:
        A data set of the same length and samples, unless there is a window.

    Raises:
        ArgumentError: the data set is empty, iterable only, a transform cannot be called, ``cut`` is not
            between 0 and the number of transforms, or of ``session``, ``window`` and ``spill`` two are
            given that do not go together, or ``spill`` is in a folder that is not there.
        SessionError: there is no such session.
        ClusterError: Ray is not installed, or no Ray cluster can be reached.
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
        parse_bytes(memory, whole=lambda: 0)  # an error here, also in a rank that takes another one's cache
    if window is not None and not isinstance(window, Window):
        raise ArgumentError(
            f"window={window!r} is no window; write window=hotset.Window(resident={window!r})."
        )
    _require_sense(session, window, spill, cluster, replicate)
    spill = _folder(spill)
    asked = {
        "transform": transform,
        "memory": memory,
        "spill": spill,
        "session": session,
        "key": key,
        "window": window,
        "cluster": cluster,
        "replicate": replicate,
        "strict": strict,
        "cut": cut,
    }
    return CachedDataset(dataset, Maker(_make, _lookup_key, asked))


def _make(dataset: Any, asked: dict[str, Any]) -> Current:
    """Cache a dataset as it is now."""
    memory, session, cluster = asked["memory"], asked["session"], asked["cluster"]
    with contextlib.ExitStack() as stack:
        joined, found = None, None
        if not can_reopen():
            pass  # neither is to be had: _cached says so
        elif cluster is not None and isinstance(session, str):
            joined = join_machines(cluster, session, memory)
            stack.callback(joined.leave)
            found = joined.here()
        elif session is not None:
            found = find(session)
        strict, cut, window = asked["strict"], asked["cut"], asked["window"]
        wanted = CacheOptions(memory, strict, cut, window, asked["spill"], found, joined, asked["replicate"])
        uncut = Pipeline.of(dataset, asked["transform"])
        identity = _identity(uncut, asked)
        try:
            return _current(uncut, identity, wanted)
        except NotShared as why:
            assert found is not None
            name = type(dataset).__name__
            warn(f"{name} is cached for this job alone, and not in session {found.name!r}: {why}.")
            return _current(uncut, identity, wanted._replace(session=None, joined=None))


def _lookup_key(dataset: Any, asked: dict[str, Any]) -> str:
    """What ranks find the cache of this by."""
    return _identity(Pipeline.of(dataset, asked["transform"]), asked).lookup_key


def _identity(uncut: Pipeline, asked: dict[str, Any]) -> Identity:
    window = asked["window"]
    running = None if window is None else [str(field) for field in astuple(window)]
    return Identity.of(uncut, asked["key"], asked["strict"], asked["cut"], running)


def _current(uncut: Pipeline, identity: Identity, wanted: CacheOptions) -> Current:
    """Find the cache, or make it.

    Raises:
        NotShared: what is wanted in a session is for this job alone.
        Exception: see :func:`cache`.
    """
    dataset, found, joined = uncut.dataset, wanted.session, wanted.joined
    made: PlanResult | None = None
    theirs: OSError | None = None  # what the data set raised, and no session

    def create(place: CacheLocation | None = None) -> Store | None:
        nonlocal made, theirs
        try:
            if joined is not None:
                made, store = planned_by_all(
                    joined, uncut, wanted, identity, lambda made: _create(made, wanted, place)
                )
                return store
            made = make_plan(uncut, wanted, identity)
        except SegmentError:  # the cluster has something else under that name
            raise
        except OSError as error:
            theirs = error
            raise
        return _create(made, wanted, place)

    def attach(address: Address | str) -> Store:
        nonlocal made
        store = attach_store(address)
        try:
            made = joined_plan(uncut, wanted, identity, store.segment.metadata)
        except BaseException:
            store.close()
            raise
        return store

    name = type(dataset).__name__
    shared: Shared[Store] | None = None
    if not can_reopen():
        warn(
            f"{name} is not cached, and its samples come from the source: /proc is not mounted here, and "
            "by it processes reach what they share; mount it (`mount -t proc proc /proc`)."
        )
        made, shared = make_plan(uncut, wanted, identity), Shared(None, None, joined=False)
    elif found is not None:
        try:
            if identity.unknowns:
                raise NotShared(unshareable(identity.unknowns))
            shared = find_or_create_in_session(found, identity.lookup_key, name, create=create, attach=attach)
        except OSError as error:
            if error is theirs:
                raise
            warn(f"{name} is cached for this job alone, as session {found.name!r} cannot be used: {error}")
    if shared is None:
        if identity.unknowns and is_rank():
            warn(
                f"{name} is cached for this process alone, and not for all ranks: "
                f"{unshareable(identity.unknowns)}."
            )
        shared = find_or_create_in_job(identity.lookup_key, name, create=create, attach=attach)
    store, registration, is_found = shared.value, shared.registration, shared.joined
    if found is not None and is_found and isinstance(registration, SessionCacheHandle):
        _compare_with_source(made, shared)
    assert made is not None, "either made here or found"
    if is_found and found is not None and isinstance(registration, SessionCacheHandle):
        made = found_plan(made, found, registration.left())
    if not is_found and hasattr(dataset, "set_epoch") and not _is_steady(dataset):
        warn(
            f"{name} has a set_epoch, so its samples may change from epoch to epoch, and cached ones do not: "
            f"move what changes to transform=, or if nothing does, declare it: hotset.deterministic({name})."
        )
    for note in made.plan.warnings:
        warn(note)
    if is_found and store is not None:
        if store.invalidated:
            where = f"session {found.name!r}" if found is not None else "this job"
            warn(
                f"{name}: an audit has found that what is cached of it in {where} is not what the source "
                "gives, so samples come from the source; call clear() to cache them anew."
            )
        elif store.segment.trusted:
            map_ahead(store.segment)
    neighbours = neighbours_of(wanted, identity, store)
    residents = _residents(made, wanted.window, store)
    attachment = Attachment(store, registration, made.plan.name)
    supply = SampleAccess(made.source, made.plan, attachment, residents, neighbours)
    return Current(made.source, made.plan, supply, residents, neighbours, identity.lookup_key)


def _compare_with_source(made: PlanResult | None, shared: Shared[Store]) -> None:
    """Look at a few samples of a cache that another job has made.

    Raises:
        NotShared: the source gives another here. Which of the two is right nobody can tell: the other job may
            run where its own is. So that cache stays as it is, and is not used here.
    """
    store, registration = shared.value, shared.registration
    if made is None or store is None or registration is None or store.invalidated or not made.plan.audited:
        return
    if made.plan.window is not None or set(this_job().offers) & set(store.segment.metadata.get("job", ())):
        return
    differs = first_difference(made.source, store)
    if differs is not None:
        store.close()
        registration.close()
        raise NotShared(
            f"{differs} is not what another job has cached of the same data set there, so something differs "
            "between the two that no fingerprint sees; give each its key=, or destroy the session's cache if "
            "it is out of date"
        )


def _is_steady(dataset: object) -> bool:
    """Whether nothing that is cached of a data set with a ``set_epoch`` depends on the epoch."""
    return isinstance(dataset, CachedDataset) or declared(dataset) == "deterministic"


def _folder(spill: Any) -> str | Literal[False] | None:
    """A spill folder's path; None and False stay.

    Raises:
        ArgumentError: it is no path.
    """
    if spill is None or spill is False:
        return spill
    path = os.fspath(spill) if isinstance(spill, (str, os.PathLike)) else b""
    if not isinstance(path, str) or not path:
        raise ArgumentError(f"spill={spill!r} is no folder; give the path of one on a disk of this machine.")
    if not os.path.isdir(above := os.path.dirname(os.path.abspath(path))):
        raise ArgumentError(
            f"spill={spill!r} cannot be made, as there is no folder {above}; mend the name, mount the disk, "
            "or make that folder."
        )
    return path


def _require_sense(
    session: str | int | None, window: Window | None, spill: object, cluster: object, replicate: bool
) -> None:
    """Refuse arguments that do not go together.

    Raises:
        ArgumentError: see :func:`cache`.
    """
    if cluster is not None:
        require_machines(cluster, session, window)
    elif replicate:
        raise ArgumentError("replicate= is for cluster=, and there are no other machines; leave it out.")
    if window is not None and spill is not None:
        raise ArgumentError(
            "a window keeps in memory what an epoch uses, and has nothing to spill; leave out spill= or "
            "window=."
        )
    if session is None:
        if spill is False:
            raise ArgumentError("spill=False is for a session that spills; leave it out.")
        return
    if window is not None:
        raise ArgumentError(
            "a window belongs to one job, which moves it, and a session to all; leave out session= or "
            "window=."
        )
    if spill is not None and spill is not False:
        raise ArgumentError(
            f"session {session!r} spills to where it was created to; leave out spill=, or create the session "
            f"with `--spill {spill}`."
        )


def _create(made: PlanResult, wanted: CacheOptions, place: CacheLocation | None) -> Store | None:
    plan, schema = made.plan, made.schema
    if schema is None:
        return None
    about = {**plan.about(wanted.memory, made.cuts), **made.metadata}
    try:
        if plan.window is not None:
            where = place.path if place is not None else None
            ring = Ring.create(schema, plan.window.slots, plan.limit, about=about, path=where)
            ring.path = place.name if place is not None else None
            ring.room.knob = "`resident=`"
            return ring
        path, spill = place.path if place is not None else None, _spill_to(plan.name, wanted, place)
        store = Store.create(
            schema, plan.samples, _limit(made, wanted, place), about=about, path=path, spill=spill
        )
        store.path = place.name if place is not None else None
        return store
    except UnsupportedPlatform:
        raise
    except (OSError, MemoryError, ValueError, OverflowError) as error:
        warn(
            f"{plan.name}: no cache can be made, samples come from the source: {error}. Look at the "
            "limits of this shell (`ulimit -a`), or lower `memory=`."
        )
    return None


def _limit(made: PlanResult, wanted: CacheOptions, place: CacheLocation | None) -> int:
    """Bytes that the cache may ever take; a session may be resized, and its ledger bounds it besides."""
    if place is None:
        return made.plan.limit
    return place.limit if wanted.memory == "auto" else min(own_memory(wanted), place.limit)


def _spill_to(name: str, wanted: CacheOptions, place: CacheLocation | None) -> SpillTo | None:
    if place is not None:
        if place.spill is None or wanted.spill is False:
            return None
        return SpillTo(place.folder, place.spill, keeps_all=place.persist)
    if not isinstance(wanted.spill, str):
        return None
    folder = os.path.abspath(wanted.spill)
    try:
        os.close(open_spill(folder, make=True))
    except (SessionError, FolderError) as error:
        warn(f"{name}: nothing is spilled, and what memory has no room for comes from the source: {error}")
        return None
    return SpillTo(str(spill_path(folder)))


def _residents(made: PlanResult, window: Window | None, store: Store | None) -> ActiveWindow | None:
    plan = made.plan
    if plan.window is None or window is None:
        return None
    ring = store if isinstance(store, Ring) else None
    return ActiveWindow(
        plan.window, ring, made.source.read, plan.name, wait=window.wait, prefill=window.prefill
    )
