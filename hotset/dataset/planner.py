"""Planning: what is cached and what stays live, decided once from a few real samples.

:mod:`hotset.dataset.cut_search` decides where the chains are cut. What is before the cut is then read twice:
a source that moves a random number generator, or gives another sample the second time, would have that one
draw frozen for all epochs. Where only some of the samples do that, these come from the source in each use, as
do others that are found later (:mod:`hotset.determinism.draw_watch`).

If transforms are cached of which nothing was known, these are left live after all; else it is refused, with a
sentence that says where to put the random part. What the user has declared deterministic is believed.

What the plan is *for*, the fingerprint, is taken before any of that: some sources are changed by being read,
and ranks of one job would not recognise their common cache. The rank that makes the cache puts what it found
out beside it (:meth:`Plan.about`); the others take that (:func:`joined_plan`) and read nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch.utils.data import Subset

from hotset.dataset.cut_search import CutChoice, Row, choose
from hotset.dataset.identity import Identity, NotShared, unshareable
from hotset.dataset.pipeline import Cuts, Pipeline, Source
from hotset.dataset.plan import Plan, file_bytes, remedies
from hotset.dataset.window import Sizes, Window
from hotset.determinism.declare import declared
from hotset.determinism.equality import same
from hotset.determinism.probe import Probe, probe
from hotset.determinism.rng import Generators
from hotset.determinism.trial import Timed
from hotset.determinism.verdict import name_of, verdict_of
from hotset.errors import NotCacheable, SegmentError
from hotset.session.reclaim import room_of
from hotset.session.session_definition import Session
from hotset.store import irregular_records as forms
from hotset.store import memory_limits as machine
from hotset.store.format import LINE
from hotset.store.leaves import SchemaMismatch
from hotset.store.schema import Schema
from hotset.store.torch_threads import one_thread
from hotset.store.verification import FULL_CHECK
from hotset.units import format_bytes, parse_bytes

if TYPE_CHECKING:  # what it needs is an extra
    from hotset.cluster.ray_join import Joined

__all__ = ["CacheOptions", "PlanResult", "found_plan", "joined_plan", "make_plan"]

_PROBED = 8
_PROBE_SECONDS = 1.0


class CacheOptions(NamedTuple):
    """What the user asked :func:`hotset.cache` for."""

    memory: int | str = "auto"
    strict: bool = False
    cut: int | None = None
    window: Window | None = None
    spill: str | Literal[False] | None = None
    session: Session | None = None
    joined: Joined | None = None
    replicate: bool = False


class PlanResult(NamedTuple):
    """What :func:`make_plan` found out.

    Attributes:
        plan: for people.
        source: the data set and its chains, cut.
        cuts: where.
        schema: of the samples at the cut; None when nothing can be cached.
        said: what the cache's metadata say besides :meth:`Plan.about`.
    """

    plan: Plan
    source: Source
    cuts: Cuts
    schema: Schema | None
    metadata: Mapping[str, Any] = MappingProxyType({})


def joined_plan(
    pipeline: Pipeline, options: CacheOptions, identity: Identity, about: dict[str, Any]
) -> PlanResult:
    """The plan of a rank that takes a cache which another rank has made; nothing is read.

    Args:
        uncut: the data set and its chains.
        wanted: what the user asked for; of the memory it is the first rank's word that holds.
        identity: of the data set.
        about: the metadata of that cache: see :meth:`Plan.about`.

    Raises:
        SegmentError: what is cached there is something else.
    """
    cuts = Cuts.from_json(about["cuts"])
    try:
        source = pipeline.cut(cuts)
    except ValueError as error:  # another number of transforms
        raise SegmentError("another chain of transforms is cached there.") from error
    rows = _joined_rows(pipeline, [Row(*row) for row in about["rows"]])
    found = identity.fingerprint(pipeline, cuts, source)
    plan = Plan(
        name=type(pipeline.dataset).__name__,
        fingerprint=found.digest,
        rows=rows,
        samples=len(pipeline.dataset),
        sample_bytes=about["sample_bytes"],
        sample_seconds=about["sample_seconds"],
        refused=about["refused"],
        limit=about["limit"],
        window=Sizes(*about["window"]) if about["window"] is not None else None,
        spill=about["spills_to"],
        audited=about["audited"],
        notes=(),
        warnings=(),
    )
    if plan.fingerprint != about["fingerprint"]:
        raise SegmentError("other samples are cached there.")
    whose = "this job" if options.session is None else f"a job in session {options.session.name!r}"
    notes = [f"process {about['pid']} of {whose} made the cache, and read the samples that decided about it"]
    if options.memory not in ("auto", about["memory"]):
        notes.append(
            f"memory={options.memory!r} is not looked at: it was made with memory={about['memory']!r}"
        )
    return PlanResult(replace(plan, notes=(*notes, *found.notes)), source, cuts, None)


def _joined_rows(pipeline: Pipeline, rows: list[Row]) -> tuple[Row, ...]:
    """The rows of a cache that another rank has made, with this rank's own live transforms.

    Raises:
        SegmentError: other transforms are cached there.
    """
    live = [
        step for step, row in itertools.zip_longest(pipeline.steps, rows[1:]) if row is None or not row.cached
    ]
    kept = [row for row in rows[1:] if row.cached]
    names = [name_of(step) for step in pipeline.steps]
    if names == [row.name for row in rows[1:]]:
        return tuple(rows)
    if [row.name for row in kept] != names[: len(kept)]:
        raise SegmentError("other transforms are cached there.")
    found = map(verdict_of, live)
    return (*rows[:1], *kept, *(Row(v.name, v.kind, v.evidence, None, None, False) for v in found))


def make_plan(pipeline: Pipeline, options: CacheOptions, identity: Identity) -> PlanResult:
    """Read a few samples and decide.

    Raises:
        NotCacheable, ArgumentError, QuantityError: see :func:`hotset.cache`.
        NotShared: nobody can tell what is cached from anything else, and it is wanted in a session.
    """
    # Or what a transform takes is what torch's threads wait for each other, on a busy machine.
    return one_thread(lambda: _make_plan(pipeline, options, identity))


def _make_plan(pipeline: Pipeline, options: CacheOptions, identity: Identity) -> PlanResult:
    dataset = pipeline.dataset
    name = type(dataset).__name__
    limit, warned = _limit(options)
    if declared(dataset) == "nondeterministic":
        raise NotCacheable(
            f"{name} is declared @hotset.nondeterministic, so nothing of it may be cached; "
            "move its random part to transform=, after the part that may."
        )
    held = _held_by_others(options.session, limit)
    choice, source, probed = _decide(pipeline, options, limit - held)
    judged, believed = _judge(dataset, source, probed)
    if not believed and not probed.drawing:
        _judge_batches(dataset, source)
    notes = [*choice.notes, *judged]
    if FULL_CHECK:
        notes.append("this processor may reorder stores, so every read of the cache is verified, which costs")
    schema = None
    sample_bytes, share = 0, 0.0
    try:
        # Where a live part follows, samples are read one by one, else gathered: see hotset.store.leaves.
        schema = Schema.infer(probed.samples, as_lies=bool(source.live))
        sample_bytes, refused = _measure(schema, probed.samples)
        if refused:
            share = len(refused) / len(probed.samples)
            notes.append(
                f"{len(refused)} of the {len(probed.samples)} samples that were read cannot be cached, and "
                f"come from the source: {refused[0]}"
            )
    except SchemaMismatch as misfit:
        warned.append(f"nothing of {name} can be cached, samples come from the source: {misfit}.")
    sizes = None
    if options.window is not None:
        sizes, limit, told = _window(options, len(dataset), sample_bytes, limit)
        warned += told
    rows = choice.rows
    if len(rows) == 1:  # no transforms, so nothing was measured yet
        rows = (rows[0]._replace(seconds=probed.seconds, bytes=sample_bytes or None),)
    found = identity.fingerprint(pipeline, choice.cuts, source)
    if found.unknowns and options.session is not None:
        raise NotShared(unshareable(found.unknowns))
    plan = Plan(
        name=name,
        fingerprint=found.digest,
        rows=rows,
        samples=len(dataset),
        sample_bytes=sample_bytes,
        sample_seconds=probed.seconds,
        refused=share,
        limit=limit,
        window=sizes,
        spill=_spill_folder(options),
        audited=not believed,
        notes=(*notes, *found.notes, *([unshareable(found.unknowns)] if found.unknowns else [])),
        warnings=tuple(warned),
        held=held,
    )
    free = machine.headroom().bytes
    told = remedies(plan, options.session, free, file_bytes(dataset, _spread(len(dataset))))
    return PlanResult(replace(plan, notes=(*plan.notes, *told)), source, choice.cuts, schema)


def _limit(options: CacheOptions) -> tuple[int, list[str]]:
    """Bytes that the cache may take, and what the user should know about it."""
    room, memory = machine.headroom(), options.memory
    if options.session is not None:
        # What is free now says nothing of what is when later jobs fill it: that is looked at as they do.
        most = options.session.memory
        return (most if memory == "auto" else min(own_memory(options), most)), []
    if memory == "auto":
        return room.bytes // 2, []
    limit = own_memory(options)
    if limit <= room.bytes:
        return limit, []
    return room.bytes, [
        f"memory={memory!r} is more than {room.what} has to give, and the machine would swap or kill; the "
        f"cache takes {format_bytes(room.bytes)} at most. Lower `memory=` or free some."
    ]


def _held_by_others(session: Session | None, limit: int) -> int:
    """Bytes of a cache's limit in a session that are not to be had now; 0 without a session.

    What caches hold that nobody uses is to be had: they make room.
    """
    if session is None:
        return 0
    with contextlib.suppress(OSError):
        there = room_of(session)
        return max(limit - min(there.free, machine.headroom().bytes) - there.unused, 0)
    return 0


def found_plan(result: PlanResult, session: Session, left: int) -> PlanResult:
    """The plan of a cache that was found in a session, as things stand there now.

    Args:
        made: of the cache.
        session: it.
        left: bytes that the cache may hold, with what it has.
    """
    plan = replace(result.plan, held=max(result.plan.limit - left, 0))
    told = remedies(plan, session, machine.headroom().bytes, None)
    return result._replace(plan=replace(plan, notes=(*plan.notes, *told)))


def own_memory(options: CacheOptions) -> int:
    """Bytes that the user gave as ``memory``, which is not ``"auto"``; a share is of what that looks at."""
    session = options.session
    whole = machine.headroom().bytes if session is None else session.memory
    return parse_bytes(options.memory, whole=lambda: whole)


def _resident_bytes(resident: str) -> str:
    """A window's amount of memory as bytes; a share is of what ``memory`` is of."""
    return f"{parse_bytes(resident, name='resident', whole=lambda: machine.headroom().bytes)}B"


def _spill_folder(options: CacheOptions) -> str | None:
    if options.session is not None:
        return options.session.spill if options.spill is not False else None
    return options.spill or None


def _window(
    options: CacheOptions, samples: int, sample_bytes: int, limit: int
) -> tuple[Sizes | None, int, list[str]]:
    """A window's sizes, the bytes that it may take here, and what the user should know about them."""
    window = options.window
    assert window is not None
    if isinstance(window.resident, str):
        window = replace(window, resident=_resident_bytes(window.resident))
    sizes = Sizes.of(window, samples, sample_bytes or 1)
    if sizes.resident == samples:
        larger = isinstance(window.resident, int) and window.resident > samples
        note = f"resident={window.resident!r} is more than the {samples:,} samples there are"
        told = f"{note}, so all are cached and none is replaced; lower it, or leave out window=."
        return None, limit, [told] if larger else []
    room = machine.headroom()
    needed = sizes.slots * sample_bytes
    if isinstance(window.resident, str):
        limit = min(max(parse_bytes(window.resident, name="resident"), needed), room.bytes)
    if needed <= limit:
        return sizes, limit, []
    return sizes, limit, [_too_small(sizes, needed, limit)]


def _too_small(sizes: Sizes, needed: int, there: int) -> str:
    return (
        f"a window of {sizes.resident:,} samples, and {sizes.ahead:,} beside them, takes "
        f"{format_bytes(needed)}, and there are {format_bytes(there)} for it: what has no room comes from "
        f"the source, as the machine would swap. Lower `resident=`, or raise `memory=` if there is more."
    )


def _decide(pipeline: Pipeline, options: CacheOptions, limit: int) -> tuple[CutChoice, Source, Probe]:
    """Cut, and read what is before the cut; anew without what was only probed, if that shows to be random."""
    if options.window is not None:
        limit = sys.maxsize  # as many as the user says are resident: smaller samples would not make it more
    choice = choose(pipeline, limit, options.strict, options.cut)
    source = pipeline.cut(choice.cuts)
    probed = _probe(source, len(pipeline.dataset))
    if (probed.moved or probed.differs) and choice.probed and options.cut is None:
        choice = choose(pipeline, limit, True, None)
        note = f"what is only known by its trial stays live, as {(*probed.moved, *probed.differs)[0]}"
        choice = replace(choice, notes=(*choice.notes, note))
        source = pipeline.cut(choice.cuts)
        probed = _probe(source, len(pipeline.dataset))
    return choice, source, probed


def _probe(source: Source, length: int) -> Probe:
    """Read samples spread over the data set twice each, as many as the time allows, at least two.

    A sample that cannot be read is left out: training may never ask for it. If none can be, the data set's
    own exception is raised.
    """
    spread = _spread(length)
    # From both ends inwards: lengths and shapes differ most often there, in sorted data sets.
    inwards = sorted(spread, key=lambda place: min(place, length - 1 - place))
    held = (source.dataset, source.prefix)
    timed = Timed(source.read)
    found = probe(timed, inwards, held, seconds=_PROBE_SECONDS, forgive=(Exception,))
    return replace(found, seconds=timed.seconds)


def _spread(length: int) -> list[int]:
    return sorted({place * (length - 1) // max(_PROBED - 1, 1) for place in range(_PROBED)})


def _judge(dataset: Any, source: Source, probed: Probe) -> tuple[list[str], bool]:
    """Refuse what is random and not declared otherwise.

    Returns:
        Notes, and whether the user is believed against what was seen.

    Raises:
        NotCacheable: with what was seen, and what to do.
    """
    kind = type(dataset).__name__
    seen = (*probed.moved, *probed.differs[:2])  # one sample that differs tells as much as eight
    read, drawing = len(probed.samples), probed.drawing
    if not seen:
        some = f"the {read} samples that were read twice were" if read > 1 else "the sample that was read was"
        return [f"{some} alike, and no random number generator moved"], False
    if declared(dataset) == "deterministic":
        told = "declared deterministic, although {}: draws differ from an uncached run"
        return [told.format(text) for text in seen], True
    is_random = _is_random(source.dataset, drawing or (0,))
    if source.prefix and not is_random:
        told = "the cached transforms are declared, although {}: draws differ from an uncached run"
        return [told.format(text) for text in seen], True
    if is_random and 0 < len(drawing) < read and not probed.frozen:
        return [
            f"{len(drawing)} of the {read} samples that were read draw random numbers "
            f"(sample {drawing[0]}, say: {probed.moved[0]}): such samples come from the source in each use, "
            "and the others are cached"
        ], False
    raise NotCacheable(
        f"{kind} gives another sample each time ({'; '.join(seen)}), and caching it would freeze one draw "
        "for ever. Move the random part to transform=[...], after the part to be cached; or, if the samples "
        f"are alike in all that matters, declare it: hotset.deterministic({kind})."
    )


def _judge_batches(dataset: Any, source: Source) -> None:
    """Refuse a data set whose ``__getitems__``, which torch's loader prefers, gives other samples.

    The cache reads samples one by one. Two at once are compared, as what is worked out of a whole batch is
    the same for a batch of one.

    Raises:
        NotCacheable: with what to do.
    """
    inner = source.dataset
    while type(inner) is Subset:  # it has one, which asks the data set's, where there is one
        inner = inner.dataset
    if declared(dataset) == "deterministic" or not getattr(inner, "__getitems__", None):
        return
    read = source.dataset.__getitems__
    indices = sorted({0, len(dataset) - 1})
    generators = Generators((source.dataset,))
    try:
        alone = [source.dataset[index] for index in indices]
        generators.restore()
        together = read(indices)
        alike = not generators.moved() and same(alone, list(together)) is None
    except Exception:  # one that cannot be read may never be asked for
        return
    finally:
        generators.restore()
    if not alike:
        kind = type(dataset).__name__
        raise NotCacheable(
            f"{kind}.__getitems__ gives other samples than {kind}.__getitem__, or draws random numbers; "
            "torch's loader reads by the first, the cache by the second. Let both give the same, and move "
            "what is made of a whole batch to collate_fn; or, if the samples are alike in all that matters, "
            f"declare it: hotset.deterministic({kind})."
        )


def _is_random(dataset: Any, indices: Sequence[int]) -> bool:
    """Whether the data set itself, without the cached transforms, is random for these samples."""
    read: Callable[[int], Any] = dataset.__getitem__
    alone = probe(read, indices, (dataset,))
    return bool(alone.moved or alone.differs)


def _measure(schema: Schema, samples: list[Any]) -> tuple[int, list[SchemaMismatch]]:
    """Mean bytes of these samples' records, and why those cannot be cached that cannot."""
    sizes, refused = [], []
    for sample in samples:
        try:
            sizes.append(schema.stride + LINE * forms.prepare(schema, sample).tail_lines)
        except SchemaMismatch as misfit:
            refused.append(misfit)
    return sum(sizes) // max(len(sizes), 1), refused
