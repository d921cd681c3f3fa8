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
import difflib
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, Literal, TypeVar, cast, overload

from torch.utils.data import Dataset, IterableDataset

from hotset._warnings import printable, warn
from hotset.dataset.active_window import ActiveWindow
from hotset.dataset.attachment import Attachment, map_ahead
from hotset.dataset.audit import first_difference
from hotset.dataset.cached_dataset import CachedDataset, Current, Maker
from hotset.dataset.cached_stream import CachedStream
from hotset.dataset.cluster_setup import join_machines, planned_by_all, remote_cache, require_machines
from hotset.dataset.identity import Identity, NotShared, unshareable
from hotset.dataset.pipeline import Pipeline, chain_of
from hotset.dataset.planner import CacheOptions, PlanResult, found_plan, joined_plan, make_plan, own_memory
from hotset.dataset.sample_access import SampleAccess
from hotset.dataset.spill_folder import checked_folder, spill_to
from hotset.dataset.stream_source import StreamSource, is_stream
from hotset.dataset.unread import Unread
from hotset.dataset.window import Window
from hotset.determinism.batched import Batched
from hotset.determinism.chain import leaves
from hotset.determinism.declare import declared
from hotset.errors import ArgumentError, SegmentError, UnsupportedPlatform
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
from hotset.units import parse_bytes

__all__ = ["cache"]

T = TypeVar("T")
_MOST_THREADS = 1024
F = TypeVar("F", bound=Callable[..., Any])


def _explained(function: F) -> F:
    """Have a call with wrong arguments raise an error that says what to write."""
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
    """The error for these arguments: what is wrong, and what to write."""
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


@overload
def cache(  # type: ignore[overload-overlap]
    dataset: IterableDataset[T],
    *,
    transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    memory: int | str = "auto",
    spill: str | os.PathLike[str] | Literal[False] | None = None,
    session: str | int | None = None,
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
    session: str | int | None = None,
    key: str | None = None,
    window: Window | None = None,
    cluster: str | None = None,
    replicate: bool = False,
    concurrency: int = 1,
    strict: bool = False,
    cut: int | None = None,
) -> CachedDataset[T]: ...


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
        session: name or number of a session (``hotset session create``), whose caches outlive this job: a job
            that caches the same in it later finds the samples there. Without it the cache ends with the job.
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
    if memory != "auto":
        parse_bytes(memory, whole=lambda: 0)  # raises here also in a rank that takes another rank's cache
    _check_batched(transform, window)
    if window is not None and not isinstance(window, Window):
        raise ArgumentError(
            f"window= must be a hotset.Window, got {window!r}; write "
            f"window=hotset.Window(resident={window!r})."
        )
    _require_one(dataset)
    _check_arguments(session, window, spill, cluster, replicate)
    _check_concurrency(concurrency, window)
    spill = checked_folder(spill)
    arguments = {
        "transform": transform,
        "memory": memory,
        "spill": spill,
        "session": session,
        "key": key,
        "window": window,
        "cluster": cluster,
        "replicate": replicate,
        "concurrency": concurrency,
        "strict": strict,
        "cut": cut,
    }
    maker = Maker(_make, _lookup_key, arguments)
    if not is_stream(dataset):
        return CachedDataset(dataset, maker)
    _check_stream(arguments)
    return CachedStream(dataset, maker)


def _require_one(dataset: Any) -> None:
    """Refuse several datasets by name, as Hugging Face's ``load_dataset`` returns them without ``split=``."""
    names = list(itertools.islice(dataset, 4)) if isinstance(dataset, Mapping) else []
    if names and all(isinstance(name, str) for name in names):
        raise ArgumentError(
            f"dataset must be one dataset, got {type(dataset).__name__} with {', '.join(map(repr, names))}; "
            f"give one of them: hotset.cache(datasets[{names[0]!r}])."
        )


def _check_stream(arguments: dict[str, Any]) -> None:
    """Refuse what does not go with an iterable dataset."""
    given = {name: arguments[name] for name in ("window", "cluster", "replicate") if arguments[name]}
    if arguments["concurrency"] > 1:
        given["concurrency"] = arguments["concurrency"]
    for name, value in given.items():
        raise ArgumentError(
            f"{name}= must be left out with an iterable dataset, got {value!r}: it is read in its own order, "
            "by a loader's workers; record it, and cache what was recorded again: cached.fill(), then "
            f"hotset.cache(cached, {name}=...)."
        )
    if any(isinstance(step, Batched) for step in leaves(chain_of(arguments["transform"]))):
        raise ArgumentError(
            "hotset.batched must not be used with an iterable dataset, whose samples come one by one; record "
            "it, and cache what was recorded again: cached.fill(), then hotset.cache(cached, transform=...)."
        )


def _make(dataset: Any, arguments: dict[str, Any]) -> Current:
    """Cache a dataset as it is now."""
    memory, session, cluster = arguments["memory"], arguments["session"], arguments["cluster"]
    with contextlib.ExitStack() as stack:
        joined, found = None, None
        if not can_reopen():
            pass  # neither a session nor a cluster can be used: _current warns
        elif cluster is not None and isinstance(session, str):
            joined = join_machines(cluster, session, memory)
            stack.callback(joined.leave)
            found = joined.here()
        elif session is not None:
            found = find(session)
        strict, cut, window = arguments["strict"], arguments["cut"], arguments["window"]
        options = CacheOptions(
            memory,
            strict,
            cut,
            window,
            arguments["spill"],
            found,
            joined,
            arguments["replicate"],
            arguments["concurrency"],
        )
        pipeline = Pipeline.of(dataset, arguments["transform"])
        identity = _identity(pipeline, arguments)
        try:
            return _current(pipeline, identity, options)
        except NotShared as why:
            assert found is not None
            name = type(dataset).__name__
            warn(f"{name} is cached for this job alone, and not in session {found.name!r}: {why}.")
            return _current(pipeline, identity, options._replace(session=None, joined=None))


def _lookup_key(dataset: Any, arguments: dict[str, Any]) -> str:
    """The text by which ranks and jobs find the cache of this dataset."""
    return _identity(Pipeline.of(dataset, arguments["transform"]), arguments).lookup_key


def _identity(pipeline: Pipeline, arguments: dict[str, Any]) -> Identity:
    window = arguments["window"]
    running = None if window is None else [str(field) for field in astuple(window)]
    return Identity.of(pipeline, arguments["key"], arguments["strict"], arguments["cut"], running)


def _current(pipeline: Pipeline, identity: Identity, options: CacheOptions) -> Current:
    """Find the cache, or make it.

    Raises:
        NotShared: ``session`` was given, but this job alone can use the cache.
        Exception: see :func:`cache`.
    """
    session = options.session
    search = _Search(pipeline, identity, options)
    unread = Unread(pipeline.dataset)
    try:
        shared = search.run()
        store, handle, result = shared.value, shared.handle, search.result
        if session is not None and shared.joined and isinstance(handle, SessionCacheHandle):
            _compare_with_source(result, shared)
            assert result is not None, "either made here or found"
            result = found_plan(result, session, handle.left())
    finally:
        unread.put_back()
    assert result is not None, "either made here or found"
    # Cut once more: a copy of the dataset that was read may have opened files.
    result = result._replace(source=pipeline.cut(result.cuts))
    _warn_of_source(pipeline.dataset, result, is_found=shared.joined)
    if shared.joined and store is not None:
        if store.invalidated:
            where = f"session {session.name!r}" if session is not None else "this job"
            warn(
                f"{search.name}: an audit has found that its cached samples in {where} differ from what the "
                "source returns, so samples come from the source; call clear() to cache them anew."
            )
        elif store.segment.trusted:
            map_ahead(store.segment)
    remote = remote_cache(options, identity, store)
    window = _active_window(result, options.window, store)
    attachment = Attachment(store, handle, result.plan.name)
    access = SampleAccess(result.source, result.plan, attachment, window, remote, options.concurrency)
    return Current(result.source, result.plan, access, window, remote, identity.lookup_key)


def _warn_of_source(dataset: Any, result: PlanResult, *, is_found: bool) -> None:
    """Give the plan's warnings; if the cache is new, also one about a dataset that knows epochs."""
    if not is_found and hasattr(dataset, "set_epoch") and not _is_steady(dataset):
        name = type(dataset).__name__
        warn(
            f"{name} has a set_epoch, so its samples may change from epoch to epoch, but cached ones do not: "
            "move what changes to transform=, or if nothing changes, declare it: "
            f"hotset.deterministic({name})."
        )
    for note in result.plan.warnings:
        warn(note)


class _Search:
    """Finds the cache of a pipeline in the session or job, or makes it.

    Attributes:
        name: of the dataset's class, for messages.
        result: the plan, made here or found with the cache; None before :meth:`run`.
    """

    def __init__(self, pipeline: Pipeline, identity: Identity, options: CacheOptions) -> None:
        self._pipeline = pipeline
        self._identity = identity
        self._options = options
        self._source_error: OSError | None = None  # raised by the dataset, not by the session
        self.name = pipeline.name
        self.result: PlanResult | None = None

    def run(self) -> Shared[Store]:
        """Return the store, if there can be one, and how it is registered.

        Raises:
            as :func:`_current`.
        """
        if not can_reopen():
            warn(
                f"{self.name} is not cached, and its samples come from the source: /proc is not mounted "
                "here, through which processes reach shared memory; mount it (`mount -t proc proc /proc`)."
            )
            self.result = make_plan(self._pipeline, self._options, self._identity)
            return Shared(None, None, joined=False)
        shared = self._in_session(self._options.session) if self._options.session is not None else None
        return shared if shared is not None else self._in_job()

    def _in_session(self, session: Session) -> Shared[Store] | None:
        """None, with a warning, if the session cannot be used."""
        identity = self._identity
        try:
            if identity.unknowns:
                raise NotShared(unshareable(identity.unknowns))
            return find_or_create_in_session(
                session, identity.lookup_key, self.name, create=self._create, attach=self._attach
            )
        except OSError as error:
            if error is self._source_error:
                raise
            warn(
                f"{self.name} is cached for this job alone, as session {session.name!r} cannot be used: "
                f"{error}"
            )
            return None

    def _in_job(self) -> Shared[Store]:
        identity = self._identity
        if identity.unknowns and is_rank():
            warn(
                f"{self.name} is cached for this process alone, and not for all ranks: "
                f"{unshareable(identity.unknowns)}."
            )
        return find_or_create_in_job(identity.lookup_key, self.name, create=self._create, attach=self._attach)

    def _create(self, location: CacheLocation | None = None) -> Store | None:
        options, joined = self._options, self._options.joined
        try:
            if joined is not None:
                self.result, store = planned_by_all(
                    joined,
                    self._pipeline,
                    options,
                    self._identity,
                    lambda result: _create(result, options, location),
                )
                return store
            self.result = make_plan(self._pipeline, self._options, self._identity)
        except SegmentError:  # the cluster has another cache under that name
            raise
        except OSError as error:
            self._source_error = error
            raise
        return _create(self.result, options, location)

    def _attach(self, address: Address | str) -> Store:
        store = attach_store(address)
        try:
            self.result = joined_plan(self._pipeline, self._options, self._identity, store.segment.metadata)
            if isinstance(self._pipeline.dataset, StreamSource):
                self._pipeline.dataset.divided(1, 1)
                plan = replace(self.result.plan, samples=len(store), stream=True)
                self.result = self.result._replace(plan=plan)
        except BaseException:
            store.close()
            raise
        return store


def _compare_with_source(result: PlanResult | None, shared: Shared[Store]) -> None:
    """Compare a few samples of a cache that another job has made with the source.

    Raises:
        NotShared: the source returns another sample here. Neither is known to be wrong: the other job's
            source may differ. So that cache is left unchanged, and not used here.
    """
    store, handle = shared.value, shared.handle
    if result is None or store is None or handle is None or store.invalidated or not result.plan.audited:
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


def _is_steady(dataset: object) -> bool:
    """Whether no cached sample of a dataset with a ``set_epoch`` depends on the epoch."""
    return isinstance(dataset, (CachedDataset, CachedStream)) or declared(dataset) == "deterministic"


def _check_concurrency(concurrency: object, window: Window | None) -> None:
    if type(concurrency) is not int or not 1 <= concurrency <= _MOST_THREADS:
        raise ArgumentError(
            f"concurrency= must be a whole number from 1 to {_MOST_THREADS}, got {concurrency!r}; 16 suits "
            "most sources that wait."
        )
    if concurrency > 1 and window is not None:
        raise ArgumentError(
            "concurrency= must be left out with window=: a window is filled by processes, of which a loader "
            "starts as many as it has workers."
        )


def _check_batched(transform: Any, window: Window | None) -> None:
    if window is None or not any(isinstance(step, Batched) for step in leaves(chain_of(transform))):
        return
    raise ArgumentError(
        "hotset.batched must not be used with window=: a window is filled sample by sample, each when its "
        "turn comes; leave out window=, and give memory= or spill= for all results."
    )


def _check_arguments(
    session: str | int | None, window: Window | None, spill: object, cluster: object, replicate: bool
) -> None:
    """Refuse arguments that do not go together.

    Raises:
        ArgumentError: see :func:`cache`.
    """
    if cluster is not None:
        require_machines(cluster, session, window)
    elif replicate:
        raise ArgumentError("replicate= is for cluster=, which was not given; leave it out.")
    if window is not None and spill is not None:
        raise ArgumentError(
            "window= and spill= cannot be combined: a window keeps all samples of an epoch in memory; leave "
            "out one of them."
        )
    if session is None:
        if spill is False:
            raise ArgumentError(
                "spill=False is for a session that spills, and session= was not given; leave it out."
            )
        return
    if window is not None:
        raise ArgumentError(
            "window= and session= cannot be combined: a window belongs to one job, which moves it; leave out "
            "one of them."
        )
    if spill is not None and spill is not False:
        raise ArgumentError(
            f"session {session!r} has its own spill folder, set at its creation; leave out spill=, or create "
            f"the session with `--spill {spill}`."
        )


def _create(result: PlanResult, options: CacheOptions, location: CacheLocation | None) -> Store | None:
    plan, schema = result.plan, result.schema
    if schema is None:
        return None
    about = {**plan.about(options.memory, result.cuts), **result.metadata}
    try:
        if plan.window is not None:
            where = location.path if location is not None else None
            ring = Ring.create(schema, plan.window.slots, plan.limit, about=about, path=where)
            ring.path = location.name if location is not None else None
            ring.room.knob = "`resident=`"
            return ring
        path, spill = (
            location.path if location is not None else None,
            spill_to(plan.name, options.spill, location),
        )
        store = Store.create(
            schema, plan.samples, _limit(result, options, location), about=about, path=path, spill=spill
        )
        store.path = location.name if location is not None else None
        if plan.stream:
            StreamParts(store).use(1)
        return store
    except UnsupportedPlatform:
        raise
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
    return location.limit if options.memory == "auto" else min(own_memory(options), location.limit)


def _active_window(result: PlanResult, window: Window | None, store: Store | None) -> ActiveWindow | None:
    plan = result.plan
    if plan.window is None or window is None:
        return None
    ring = store if isinstance(store, Ring) else None
    return ActiveWindow(
        plan.window, ring, result.source.read, plan.name, wait=window.wait, prefill=window.prefill
    )
