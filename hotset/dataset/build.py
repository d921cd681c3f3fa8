"""``hotset.cache``: a dataset whose deterministic part is read once per machine.

:func:`cache` takes these steps: it computes the dataset's identity; it decides on a few real samples where
the chains are cut; it reads these samples twice up to the cut (the probe: does the source draw random
numbers, do two readings agree?); it infers the schema from them; and it makes an empty segment. It reads
nothing else. From then on every process that has the object, by fork or by pickle, shares that segment: a
process that needs a missing sample reads it and stores it there for all. Each rank of a job calls
:func:`cache` itself; by the identity it finds the segment that the first rank has made
(:mod:`hotset.session.find_or_create`), and takes it without reading a sample. In a session all jobs do so.
"""

from __future__ import annotations

import contextlib
import dis
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, overload

from torch.utils.data import Dataset, IterableDataset

from hotset._warnings import warn
from hotset.dataset.active_window import ActiveWindow
from hotset.dataset.arguments import CacheArguments, CacheOptions, check_arguments, explain_wrong_calls
from hotset.dataset.attachment import Attachment, map_ahead
from hotset.dataset.audit import first_difference
from hotset.dataset.cached_dataset import CachedDataset
from hotset.dataset.cluster_setup import join_machines, planned_by_all, remote_cache
from hotset.dataset.identity import Identity, NotShared, unshareable
from hotset.dataset.pipeline import Pipeline
from hotset.dataset.planning.memory_budget import own_memory
from hotset.dataset.planning.planner import PlanResult, found_plan, joined_plan, make_plan
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.spill_folder import checked_folder, spill_to
from hotset.dataset.streams.cached_stream import CachedStream
from hotset.dataset.streams.source import is_stream
from hotset.dataset.window import Window
from hotset.determinism.declare import declared
from hotset.determinism.draws.draw_watch import DrawWatch
from hotset.determinism.objects.safe_access import has
from hotset.errors import SegmentError
from hotset.session.find_or_create import (
    CacheLocation,
    Shared,
    find_or_create_in_job,
    find_or_create_in_session,
)
from hotset.session.job import is_rank, this_job
from hotset.session.session_cache import SessionCacheHandle
from hotset.session.session_definition import Session
from hotset.session.sessions import find
from hotset.store.locks import can_reopen
from hotset.store.ring import Ring, attach_store
from hotset.store.segment import Address
from hotset.store.store import Store
from hotset.store.stream_parts import StreamParts

__all__ = ["cache"]

T = TypeVar("T")

_OF_NO_STATEMENT = frozenset({"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"})


@overload
def cache(  # type: ignore[overload-overlap]
    dataset: IterableDataset[T],
    *,
    transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    memory: int | str = "auto",
    spill: str | os.PathLike[str] | Literal[False] | None = None,
    session: str | int | Session | None = None,
    key: str | None = None,
    strict: bool = False,
    cut: int | None = None,
) -> CachedStream[T]: ...


@overload
def cache(
    dataset: Dataset[T],
    *,
    transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    memory: int | str = "auto",
    spill: str | os.PathLike[str] | Literal[False] | None = None,
    session: str | int | Session | None = None,
    key: str | None = None,
    window: Window | None = None,
    cluster: str | None = None,
    replicate: bool = False,
    concurrency: int = 1,
    strict: bool = False,
    cut: int | None = None,
) -> CachedDataset[T]: ...


@explain_wrong_calls
def cache(
    dataset: Dataset[T],
    *,
    transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    memory: int | str = "auto",
    spill: str | os.PathLike[str] | Literal[False] | None = None,
    session: str | int | Session | None = None,
    key: str | None = None,
    window: Window | None = None,
    cluster: str | None = None,
    replicate: bool = False,
    concurrency: int = 1,
    strict: bool = False,
    cut: int | None = None,
) -> CachedDataset[T] | CachedStream[T]:
    """Cache the deterministic part of a dataset in memory that all processes of this job share.

    The chain of transforms (the dataset's own ``transform``, ``target_transform`` or ``transforms``, then
    ``transform=``) is cut after its leading deterministic transforms: those that are declared with
    :func:`hotset.deterministic`, that are known by the structure of torchvision, MONAI, albumentations,
    kornia or torch.nn (whose containers are cut in their middle), or that are of unknown structure and pass a
    trial. It is cut earlier where that is clearly cheaper, because samples are smaller there and more of them
    fit. The part before the cut is computed once per sample; the part after it runs for each use, on a copy
    of the cached sample. ``print(cached.plan)`` shows what was decided, and why.

    Ranks of one job on one machine (torchrun, Accelerate, Lightning, srun, mpirun) that call this with the
    same dataset share one cache: the first rank makes it, with its ``memory``, and the others take it. A
    dataset whose samples depend on the rank by something outside its state needs a ``key`` for each rank.

    Args:
        dataset: anything with ``len(dataset)`` and ``dataset[i]``; or an iterable dataset, which is recorded
            in its first pass: see :class:`hotset.CachedStream`. It is not changed.
        transform: one callable or a list of them, applied to whole samples after the dataset's own.
        memory: the most that the cached samples may take: bytes, a string such as ``"64GiB"``, or
            ``"auto"``: half of what is free under the machine's and every enclosing control group's limit, or
            what the session may hold. ``"80%"`` is a share of the same. Samples that do not fit come from the
            source, each time.
        spill: a folder on a disk of this machine, preferably a fast one, for samples that do not fit into
            memory. It is made if it does not exist; its parent must exist. Of the disk, 64 MiB or a
            hundredth, whichever is more, stay free. A session has a spill folder of its own; ``False`` keeps
            this cache in memory there.
        session: a session (``hotset session create``), or its name or number. Its caches outlive this job: a
            job that caches the same in it later finds the samples there. Without it the cache ends with the
            job.
        key: names the cached content, in place of the fingerprint of source and transforms. Ranks share a
            cache if they give the same key, the length is the same, and both or neither have a live part.
        window: keep only a part of the samples in memory, which runs over all of them: see
            :class:`hotset.Window`. An epoch uses just those, and ``len()`` is their number. If its
            ``resident`` is an amount of memory, ``memory`` does not count. Not with ``cluster``: there give
            each machine a window over its own :class:`torch.utils.data.Subset`.
        cluster: share the session with the other machines of a Ray cluster, so that their memories hold the
            data together, each sample once: the cluster's address, or ``"auto"`` for the one that this
            process or machine belongs to. Where a machine has no such session it is made there, with
            ``memory``.
        concurrency: how many samples a process reads from the source at once, in threads: for sources that
            wait (object stores, network file systems) and whose ``__getitem__`` may be called by several
            threads at once. 16 is a good number. Batches, their order, random draws and exceptions stay as
            they are. A dataset with ``__getitems__`` of its own is then read by ``__getitem__``.
        replicate: keep samples that other machines sent in the memory that this one has left over.
        strict: leave transforms live that only a trial shows to be deterministic.
        cut: how many transforms are cached, the dataset's own ``transform`` first; without it hotset chooses.

    Returns:
        A dataset of the same length and samples, unless there is a window; a :class:`hotset.CachedStream` if
        it is an iterable one.

    Raises:
        ArgumentError: the dataset is empty, several by name, or an iterator that ends for good; a transform
            cannot be called; ``cut`` is not between 0 and the number of transforms; the folder above
            ``spill`` does not exist; ``concurrency`` is below 1 or above 1,024; or two arguments are given
            that do not go together.
        SessionError: there is no such session.
        ClusterError: Ray is not installed, or no Ray cluster can be reached.
        QuantityError: ``memory`` is not an amount of memory.
        NotCacheable: the source returns other samples each time, and the random part cannot be cut off.
        UnsupportedPlatform: this is not Linux.
        Exception: what the dataset or a transform raises on the samples that are read to decide.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> cached = cache(TensorDataset(torch.arange(6).view(3, 2)), memory="1MiB")
        >>> cached[2][0], cached.stats().cached
        (tensor([4, 5]), 1)
    """
    given = CacheArguments(
        transform,
        memory,
        checked_folder(spill),
        Session.name_of(session),
        key,
        window,
        cluster,
        replicate,
        concurrency,
        strict,
        cut,
    )
    check_arguments(dataset, given)
    kind = CachedStream if is_stream(dataset) else CachedDataset
    return kind(dataset, given, _make)


def _make(dataset: Any, given: CacheArguments, again: bool) -> SampleAccess:
    """Cache a dataset as it is now; ``again`` if it has changed since it was cached first."""
    with contextlib.ExitStack() as stack:
        options = CacheOptions(given)
        if can_reopen():  # else neither a session nor a cluster can be used, of which _Search warns
            if given.cluster is not None and isinstance(given.session, str):
                joined = join_machines(given.cluster, given.session, given.memory)
                stack.callback(joined.leave)
                options = CacheOptions(given, joined.here(), joined)
            elif given.session is not None:
                options = CacheOptions(given, find(given.session))
        pipeline = Pipeline.of(dataset, given.transform)
        identity = Identity.of(pipeline, given)
        try:
            return _current(pipeline, identity, options, again)
        except NotShared as why:
            assert options.session is not None
            name, session = type(dataset).__name__, options.session.name
            warn(f"{name} is cached for this job alone, and not in session {session!r}: {why}.")
            return _current(pipeline, identity, CacheOptions(given), again)


def _current(pipeline: Pipeline, identity: Identity, options: CacheOptions, again: bool) -> SampleAccess:
    """Find the cache, or make it.

    Raises:
        NotShared: ``session`` was given, but this job alone can use the cache.
        Exception: see :func:`cache`.
    """
    shared, result = _Search(pipeline, identity, options).run()
    store = shared.value
    if not (shared.joined or again):
        _warn_of_epochs(pipeline.dataset, options.given.key)
    for note in result.plan.warnings:
        warn(note)
    if shared.joined and store is not None:
        _join(store, pipeline.name, options.session)
    remote = remote_cache(options, identity, store)
    attachment = Attachment(store, shared.handle, result.plan.name)
    believed = result.metadata["believed"] or declared(pipeline.dataset) == "deterministic"
    if not (believed or result.plan.stream):  # a stream's draws are watched as it is recorded
        attachment.watch(DrawWatch(result.source.read_parts))
    window = _active_window(result, options.given.window, attachment)
    moved = frozenset(result.metadata["moved"])
    key, concurrency = identity.lookup_key, options.given.concurrency
    return SampleAccess(result.source, result.plan, attachment, window, remote, key, moved, concurrency)


def _join(store: Store, name: str, session: Session | None) -> None:
    """Begin to use a cache that another process has made: map its pages ahead, or say that it is not used."""
    if store.invalidated:
        where = f"session {session.name!r}" if session is not None else "this job"
        warn(
            f"{name}: an audit has found that its cached samples in {where} differ from what the source "
            "returns, so samples come from the source; call clear() to cache them anew."
        )
    elif store.segment.trusted:
        map_ahead(store.segment)


def _warn_of_epochs(dataset: Any, key: str | None) -> None:
    """Warn of a dataset that knows epochs, unless no cached sample depends on them."""
    steady = isinstance(dataset, (CachedDataset, CachedStream)) or declared(dataset) == "deterministic"
    if steady or not has(dataset, "set_epoch") or _is_empty(dataset.set_epoch):
        return
    name = type(dataset).__name__
    then = (
        "and are then cached anew, or come from the source if they change in each epoch"
        if key is None
        else "but cached ones stay as they are, as key= says what they are"
    )
    warn(
        f"{name} has a set_epoch, so its samples may change from epoch to epoch, {then}: move what changes "
        "to transform=, or if no sample changes, declare it: hotset.deterministic(dataset)."
    )


def _is_empty(method: Any) -> bool:
    """Whether it has no statements, as fairseq's base class has a ``set_epoch`` for others to override."""
    code = getattr(method, "__code__", None)
    return code is not None and all(each.opname in _OF_NO_STATEMENT for each in dis.get_instructions(code))


class _Search:
    """Finds the cache of a pipeline in the session or job, or makes it."""

    def __init__(self, pipeline: Pipeline, identity: Identity, options: CacheOptions) -> None:
        self._pipeline = pipeline
        self._identity = identity
        self._options = options
        self._source_error: OSError | None = None  # raised by the dataset, not by the session
        self._result: PlanResult | None = None  # made here, or found with the cache
        self._name = pipeline.name

    def run(self) -> tuple[Shared[Store], PlanResult]:
        """Return the store, if there can be one, how it is registered, and the plan.

        The dataset is as it was before, and the plan's source reads it as it is.

        Raises:
            as :func:`_current`.
        """
        shared, result = self._find_or_make()
        session, handle = self._options.session, shared.handle
        if session is not None and shared.joined and isinstance(handle, SessionCacheHandle):
            _compare_with_source(result, shared)
            result = found_plan(result, session, handle.left())
        # Cut once more: a copy of the dataset that was read may have opened files.
        source = replace(self._pipeline.cut(result.cuts), stores=shared.value is not None)
        return shared, result._replace(source=source)

    def _find_or_make(self) -> tuple[Shared[Store], PlanResult]:
        if not can_reopen():
            warn(
                f"{self._name} is not cached, and its samples come from the source: /proc is not mounted "
                "here, through which processes reach shared memory; mount it (`mount -t proc proc /proc`)."
            )
            return Shared(None, None, joined=False), make_plan(self._pipeline, self._options, self._identity)
        shared = self._in_session(self._options.session) if self._options.session is not None else None
        shared = shared if shared is not None else self._in_job()
        assert self._result is not None, "a cache was either created, or attached to"
        return shared, self._result

    def _in_session(self, session: Session) -> Shared[Store] | None:
        """None, with a warning, if the session cannot be used."""
        identity = self._identity
        try:
            if identity.unknowns:
                raise NotShared(unshareable(identity.unknowns))
            return find_or_create_in_session(
                session, identity.lookup_key, self._name, create=self._create, attach=self._attach
            )
        except OSError as error:
            if error is self._source_error:
                raise
            warn(
                f"{self._name} is cached for this job alone, as session {session.name!r} cannot be used: "
                f"{error}"
            )
            return None

    def _in_job(self) -> Shared[Store]:
        identity = self._identity
        if identity.unknowns and is_rank():
            warn(
                f"{self._name} is cached for this process alone, and not for all ranks: "
                f"{unshareable(identity.unknowns)}."
            )
        return find_or_create_in_job(
            identity.lookup_key, self._name, create=self._create, attach=self._attach
        )

    def _create(self, location: CacheLocation | None = None) -> Store | None:
        options, joined = self._options, self._options.joined
        try:
            if joined is not None:
                self._result, store = planned_by_all(
                    joined,
                    self._pipeline,
                    options,
                    self._identity,
                    lambda result: _empty_store(result, options, location),
                )
                return store
            self._result = make_plan(self._pipeline, self._options, self._identity)
        except SegmentError:  # the cluster has another cache under that name
            raise
        except OSError as error:
            self._source_error = error
            raise
        return _empty_store(self._result, options, location)

    def _attach(self, address: Address | str) -> Store:
        store = attach_store(address)
        try:
            self._result = joined_plan(self._pipeline, self._options, self._identity, store.segment.metadata)
        except BaseException:
            store.close()
            raise
        return store


def _compare_with_source(result: PlanResult, shared: Shared[Store]) -> None:
    """Compare a few samples of a cache that another job has made with the source.

    Raises:
        NotShared: the source returns another sample here. Neither is known to be wrong: the other job's
            source may differ. So that cache is left unchanged, and not used here.
    """
    store, handle = shared.value, shared.handle
    if store is None or handle is None or store.invalidated or not result.plan.audited:
        return
    if result.plan.window is not None or set(this_job().offers) & set(store.segment.metadata.get("job", ())):
        return
    differs = first_difference(result.source, store)
    if differs is not None:
        store.close()
        handle.close()
        raise NotShared(
            f"{differs} is not what another job has cached of the same dataset there, so something differs "
            "between the two jobs that no fingerprint covers; give each its key=, or destroy the session's "
            "cache if it is out of date"
        )


def _empty_store(result: PlanResult, options: CacheOptions, location: CacheLocation | None) -> Store | None:
    plan, schema = result.plan, result.schema
    if schema is None:
        return None
    about = {**plan.about(options.given.memory, result.cuts), **result.metadata}
    path = location.path if location is not None else None
    try:
        if plan.window is not None:
            ring = Ring.create(schema, plan.window.slots, plan.limit, about=about, path=path)
            ring.allocator.knob = "`resident=`"
            return ring
        limit, spill = _limit(result, options, location), spill_to(plan.name, options.given.spill, location)
        store = Store.create(schema, plan.samples, limit, about=about, path=path, spill=spill)
        if plan.stream:
            StreamParts(store).use(1)
        return store
    except (OSError, MemoryError, ValueError, OverflowError) as error:
        warn(
            f"{plan.name}: no cache can be made, so samples come from the source: {error}. Check the limits "
            "of this shell (`ulimit -a`), or lower `memory=`."
        )
    return None


def _limit(result: PlanResult, options: CacheOptions, location: CacheLocation | None) -> int:
    """The most bytes that the cache may ever take. A session may be resized; its quota applies as well."""
    if location is None:
        return result.plan.limit
    return location.limit if options.given.memory == "auto" else min(own_memory(options), location.limit)


def _active_window(result: PlanResult, window: Window | None, attachment: Attachment) -> ActiveWindow | None:
    plan = result.plan
    if plan.window is None or window is None:
        return None
    return ActiveWindow(
        plan.window, attachment, result.source.read, plan.name, wait=window.wait, prefill=window.prefill
    )
