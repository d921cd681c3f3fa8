"""Planning: what is cached and what stays live, decided once from a few real samples.

:mod:`hotset.dataset.planning.cut_search` decides where the chains are cut. The part before the cut is then
run twice on each of a few samples: if the source moves a random number generator, or returns another sample
the second time, a cache would repeat one draw in all epochs. If only some of the samples do that, these come
from the source for each use, as are others that are found later (:mod:`hotset.determinism.draws.draw_watch`).

If the part before the cut has transforms of unknown structure, these stay live after all; otherwise caching
is refused, with an error that says where to put the random part. A declaration by the user is believed.

The fingerprint is taken before any sample is read: reading changes some sources, and then ranks of one job
would not find their common cache. The rank that makes the cache stores its findings in the cache's metadata
(:meth:`Plan.about`); the others take these (:func:`joined_plan`) and read nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hotset.dataset.arguments import CacheOptions
from hotset.dataset.held_attributes import HeldAttributes, outer_code
from hotset.dataset.identity import Identity, NotShared, unshareable
from hotset.dataset.pipeline import Cuts, Pipeline, Source
from hotset.dataset.plan import Plan, Row
from hotset.dataset.planning.cut_search import CutChoice, choose
from hotset.dataset.planning.lost_threads import has_threads, polars_was_begun
from hotset.dataset.planning.memory_budget import held_by_others, memory_limit, window_sizes
from hotset.dataset.planning.remedies import file_bytes, remedies
from hotset.dataset.planning.source_judgement import (
    judge_source,
    refuse_if_in_order,
    refuse_if_of_worker,
)
from hotset.dataset.planning.stream_plan import plan_of_stream
from hotset.dataset.source_reader import seconds_in_groups, spread
from hotset.dataset.streams.source import StreamSource
from hotset.determinism.declare import declared
from hotset.determinism.draws.probe import Probe, probe
from hotset.determinism.equality import differs
from hotset.determinism.objects.held_values import Room
from hotset.determinism.timing import Timed
from hotset.determinism.verdict import name_of, verdict_of
from hotset.errors import HotsetError, NotCacheable, SegmentError
from hotset.session.session_definition import Session
from hotset.store import irregular_records as forms
from hotset.store import memory_limits as machine
from hotset.store.format import LINE
from hotset.store.leaves.leaf import SchemaMismatch
from hotset.store.leaves.schema import Schema
from hotset.store.torch_threads import one_thread
from hotset.store.verification import FULL_CHECK

__all__ = ["PlanResult", "found_plan", "joined_plan", "make_plan"]

_PROBED = 8
_PROBE_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0
_plans = threading.RLock()  # held by the thread that plans


class PlanResult(NamedTuple):
    """What :func:`make_plan` found out.

    Attributes:
        plan: the plan as shown to the user.
        source: the dataset and its chains, cut.
        cuts: where they are cut.
        schema: the schema of the samples at the cut; None if nothing can be cached.
        metadata: further metadata of the cache, besides :meth:`Plan.about`.
    """

    plan: Plan
    source: Source
    cuts: Cuts
    schema: Schema | None
    metadata: Mapping[str, Any]


def joined_plan(
    pipeline: Pipeline, options: CacheOptions, identity: Identity, about: dict[str, Any]
) -> PlanResult:
    """The plan of a rank that takes a cache which another rank has made; nothing is read.

    Args:
        pipeline: the dataset and its chains.
        options: the user's arguments; for ``memory``, those of the first rank are in effect.
        identity: the dataset's identity.
        about: the metadata of that cache: see :meth:`Plan.about`.

    Raises:
        SegmentError: the cache is of other samples or other transforms.
    """
    cuts = Cuts.from_json(about["cuts"])
    try:
        source = pipeline.cut(cuts)
    except ValueError as error:  # the numbers of transforms differ
        raise SegmentError("the cache is of another chain of transforms.") from error
    rows = _joined_rows(pipeline.steps(cuts), [Row(*row) for row in about["rows"]])
    found = identity.fingerprint(pipeline, cuts, source)
    if found.digest != about["fingerprint"]:
        raise SegmentError("the cache is of other samples.")
    whose = "this job" if options.session is None else f"a job in session {options.session.name!r}"
    notes = [f"process {about['pid']} of {whose} made the cache, and read the samples for this plan"]
    memory, used = options.given.memory, about["memory"]
    if memory not in ("auto", used):
        notes.append(f"memory={memory!r} has no effect: the cache was made with memory={used!r}")
    plan = Plan.joined(about, pipeline.name, rows, (*notes, *found.notes))
    return PlanResult(plan, source, cuts, None, {name: about[name] for name in ("moved", "believed")})


def _joined_rows(steps: list[Any], rows: list[Row]) -> tuple[Row, ...]:
    """The rows of a cache that another rank has made, with this rank's own live transforms.

    Raises:
        SegmentError: the cache is of other transforms.
    """
    kept = [row for row in rows[1:] if row.cached]
    names = [name_of(step) for step in steps]
    if names == [row.name for row in rows[1:]]:
        return tuple(rows)
    if [row.name for row in kept] != names[: len(kept)]:
        raise SegmentError("the cache is of other transforms.")
    found = map(verdict_of, steps[len(kept) :])
    return (*rows[:1], *kept, *(Row(v.name, v.kind, v.evidence, None, None, False) for v in found))


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """No other thread of this process plans meanwhile: it sets the states of generators that all share.

    It waits for half a minute at most: what another one reads may itself wait for this thread.
    """
    lock = _plans
    is_held = lock.acquire(timeout=_PATIENCE_SECONDS)
    try:
        yield
    finally:
        if is_held:
            lock.release()


def _after_fork_in_child() -> None:
    global _plans
    _plans = threading.RLock()  # the thread that held it is gone


os.register_at_fork(after_in_child=_after_fork_in_child)


@_one_at_a_time()
def make_plan(pipeline: Pipeline, options: CacheOptions, identity: Identity) -> PlanResult:
    """Read a few samples and decide.

    Raises:
        NotCacheable, ArgumentError, QuantityError: see :func:`hotset.cache`.
        NotShared: ``session`` was given, but no other process could recognise what is cached.
    """
    dataset, session = pipeline.dataset, options.session
    limit, warned = memory_limit(options)
    held = held_by_others(session, limit)
    steps = pipeline.steps()
    unread = HeldAttributes.of(dataset, steps, libraries=True, outside=outer_code(dataset, steps))
    try:
        # On a busy machine, a transform's time would be the time that torch's threads wait for each other.
        read = one_thread(lambda: _read(pipeline, options, limit - held))
    finally:
        unread.put_back()
    if read.schema is not None and not isinstance(dataset, StreamSource):
        refuse_if_of_worker(dataset, read.source, read.probed, unread.put_back)
    found = identity.fingerprint(pipeline, read.choice.cuts, read.source)
    if found.unknowns and session is not None:
        raise NotShared(unshareable(found.unknowns))
    sizes, limit, sentences = window_sizes(options, len(dataset), read.sample_bytes, limit)
    plan = Plan(
        name=pipeline.name,
        fingerprint=found.digest,
        rows=read.rows(),
        samples=len(dataset),
        sample_bytes=read.sample_bytes,
        sample_seconds=read.probed.seconds,
        refused=read.refused,
        limit=limit,
        window=sizes,
        spill=_spill_folder(options),
        audited=not read.believed and not read.source.batched,
        notes=(*read.notes, *found.notes, *([unshareable(found.unknowns)] if found.unknowns else [])),
        warnings=(*warned, *read.warnings, *sentences),
        held=held,
    )
    plan = _advised(plan, session, file_bytes(dataset, spread(len(dataset), _PROBED)))
    metadata: dict[str, Any] = {"moved": read.moved, "believed": read.believed}
    if isinstance(dataset, StreamSource):
        stride = read.schema.stride if read.schema is not None else 1
        plan, facts = plan_of_stream(dataset, plan, stride, alone=bool(identity.unknowns))
        metadata["stream"] = facts._asdict()
    return PlanResult(plan, read.source, read.choice.cuts, read.schema, metadata)


class _Read(NamedTuple):
    """What reading a few samples has shown.

    Attributes:
        choice, source: where the chains are cut, and the dataset cut so.
        probed: what the probe of that source saw.
        schema: the schema of the samples; None if none of them can be cached.
        sample_bytes: the mean bytes of their records.
        refused: the share of them that cannot be cached, 0 to 1.
        believed: whether a declaration is believed against what the probe saw.
        moved: the attributes that reading changes.
        notes, warnings: sentences for the plan.
    """

    choice: CutChoice
    source: Source
    probed: Probe
    schema: Schema | None
    sample_bytes: int
    refused: float
    believed: bool
    moved: list[str]
    notes: list[str]
    warnings: list[str]

    def rows(self) -> tuple[Row, ...]:
        """The plan's."""
        first, *steps = self.choice.rows
        if steps:
            return self.choice.rows
        # Without transforms, nothing was measured as they were cut.
        return (first._replace(seconds=self.probed.seconds, bytes=self.sample_bytes or None),)


def _read(pipeline: Pipeline, options: CacheOptions, limit: int) -> _Read:
    """Read a few samples, whose attributes the caller puts back.

    Args:
        limit: the bytes that the cache may take now.

    Raises:
        NotCacheable, ArgumentError: see :func:`hotset.cache`.
    """
    dataset, name = pipeline.dataset, pipeline.name
    compared = HeldAttributes.of(dataset, pipeline.steps(), Room.larger())
    had_polars = has_threads("polars")
    choice, source, probed = _decide(pipeline, options, limit)
    warned: list[str] = []
    if not had_polars and has_threads("polars"):
        warned.append(polars_was_begun(name))
    # With a live part, samples are read one by one, otherwise in batches: see hotset.store.leaves.array_leaf.
    schema, sample_bytes, refused = _infer_schema(probed.samples, keep_order=bool(source.live))
    judged, believed = _judged(dataset, choice, source, probed, stored=schema is not None)
    notes = [*choice.notes, *judged, *_notes_on_checks(source)]
    share = 0.0
    if schema is None:
        warned.append(f"nothing of {name} can be cached, so samples come from the source: {refused[0]}.")
    elif refused:
        share = len(refused) / len(probed.samples)
        notes.append(
            f"{len(refused)} of the {len(probed.samples)} samples that were read cannot be cached, and come "
            f"from the source for each use: {refused[0]}"
        )
    moved = compared.moved()
    refuse_if_in_order(dataset, probed, moved)
    return _Read(choice, source, probed, schema, sample_bytes, share, believed, moved, notes, warned)


def _judged(
    dataset: Any, choice: CutChoice, source: Source, probed: Probe, *, stored: bool
) -> tuple[list[str], bool]:
    """As :func:`judge_source`, also of a stream."""
    if not isinstance(dataset, StreamSource):
        draws_live = any(not row.cached and row.kind != "deterministic" for row in choice.rows)
        return judge_source(dataset, source, probed, stored=stored, draws_live=draws_live)
    # It records what its workers have read, so how these seed generators does not matter.
    judged, believed = judge_source(dataset, source, probed, stored=stored, draws_live=False)
    # It keeps its first samples, so they are alike: the note of its own probe tells more.
    return judged if believed else [], believed


def _notes_on_checks(source: Source) -> list[str]:
    """Notes on how what the cache returns is checked."""
    notes = []
    if source.batched:
        notes.append(
            "cached samples are not compared with the source while training: the last bits of what "
            f"{source.batched[0]!r} returns may depend on how many samples it is given"
        )
    if FULL_CHECK:
        notes.append(
            "this processor may reorder stores, so each read of the cache is verified, which costs time"
        )
    return notes


def found_plan(result: PlanResult, session: Session, left: int) -> PlanResult:
    """The plan of a cache that was found in a session, with the memory that is available there now.

    Args:
        result: the plan of the cache.
        session: the session.
        left: bytes that the cache may hold, its present content included.
    """
    plan = replace(result.plan, held=max(result.plan.limit - left, 0))
    return result._replace(plan=_advised(plan, session, None))


def _advised(plan: Plan, session: Session | None, sample_file: float | None) -> Plan:
    """The plan, with what would help where not all samples fit."""
    advice = remedies(plan, session, machine.headroom().bytes, sample_file)
    return replace(plan, notes=(*plan.notes, *advice))


def _spill_folder(options: CacheOptions) -> str | None:
    if options.session is not None:
        return options.session.spill if options.given.spill is not False else None
    return options.given.spill or None


def _decide(pipeline: Pipeline, options: CacheOptions, limit: int) -> tuple[CutChoice, Source, Probe]:
    """Cut and probe. If the probe finds randomness, do so again with transforms of unknown structure live."""
    if declared(pipeline.dataset) == "nondeterministic":
        raise NotCacheable(
            f"{pipeline.name} is declared @hotset.nondeterministic, so nothing of it may be cached; move its "
            "random part to transform=, after the part that may be cached."
        )
    if isinstance(pipeline.dataset, StreamSource):
        pipeline.dataset.probe()  # what refuses the stream is raised here, not by each sample that is read
    if options.given.window is not None:
        limit = sys.maxsize  # the user gives the number of residents: smaller samples do not raise it
    choice = choose(pipeline, limit, options.given.strict, options.given.cut)
    source = pipeline.cut(choice.cuts)
    probed = _probe(source, len(pipeline.dataset))
    if (probed.moved or probed.differs) and choice.probed and options.given.cut is None:
        choice = choose(pipeline, limit, True, None)
        reason = (*probed.moved, *probed.differs)[0]
        note = f"transforms that are deterministic only by their trial stay live, as {reason}"
        choice = replace(choice, notes=(*choice.notes, note))
        source = pipeline.cut(choice.cuts)
        probed = _probe(source, len(pipeline.dataset))
    return choice, source, probed


_NONE_READ = (
    "hotset.cache reads samples here by indices 0 to {:,}, and none of those that it tried could be read. "
    "Let the dataset itself open what a worker_init_fn opens, when it reads first. A dataset that takes "
    "other indices (names, pairs) cannot be cached: memoise what reads a sample, with hotset.memo."
)


def _probe(source: Source, length: int) -> Probe:
    """Read samples spread over the dataset twice each, as many as the time allows, at least two.

    A sample that cannot be read is left out: training may never ask for it. If none can be read, the
    dataset's own exception is raised.
    """
    held = (source.dataset, source.prefix)
    timed = Timed(source.read_cut)
    try:
        found = probe(timed, spread(length, _PROBED), held, seconds=_PROBE_SECONDS, forgive=(Exception,))
    except (LookupError, TypeError, AttributeError) as error:  # of another index, or of what is not open
        numbered_here = isinstance(source.dataset, StreamSource)  # not by the user's dataset
        ours = numbered_here or isinstance(error, HotsetError)
        if not ours and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(_NONE_READ.format(length - 1))
        raise
    seconds = timed.seconds
    if getattr(source.dataset, "__getitems__", None) and not found.moved:
        seconds = seconds_in_groups(lambda indices: list(source.read_many(indices)), seconds, length)
    return replace(found, seconds=seconds)


def _infer_schema(samples: list[Any], *, keep_order: bool) -> tuple[Schema | None, int, list[SchemaMismatch]]:
    """The schema of samples, the mean bytes of their records, and a reason for each that cannot be cached.

    Without a schema none of them can be, for one reason.
    """
    try:
        schema = Schema.infer(samples, keep_order=keep_order)
    except SchemaMismatch as mismatch:
        return None, 0, [mismatch]
    if schema.has_codec and (altered := _altered(schema, samples)):
        return None, 0, [SchemaMismatch(altered)]
    sizes, refused = [], []
    for sample in samples:
        try:
            sizes.append(schema.stride + LINE * forms.prepare(schema, sample).tail_lines)
        except SchemaMismatch as mismatch:
            refused.append(mismatch)
    return schema, sum(sizes) // max(len(sizes), 1), refused


def _altered(schema: Schema, samples: list[Any]) -> str | None:
    """How a codec alters the first of these samples that has the schema's form; None if it does not.

    A codec of the user's may forget a part of its objects, and what a class keeps for pickle may be a part.
    """
    for sample in samples:
        try:
            found = differs(sample, schema.reread(sample))
        except SchemaMismatch:
            continue
        except Exception as error:  # of the codec's function
            found = f"{type(error).__name__}: {error}"
        return found and f"a sample would not come back from the cache as it was ({found})"
    return None
