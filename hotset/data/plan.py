"""The plan: what is cached, what stays live, and why, decided once from a few real samples.

Where the chains are cut is :mod:`hotset.data.choice`'s. What is before the cut is then read twice: a source
that moves a random number generator, or gives another sample the second time, would have that one draw
frozen for all epochs. If transforms are cached of which nothing was known, these are left live after all;
else it is refused, with a sentence that says where to put the random part. What the user has declared
deterministic is believed.

What the plan is *for*, the fingerprint, is taken before any of that: some sources are changed by being read,
and ranks of one job would not recognise their common cache. The rank that makes the cache puts what it found
out beside it (:meth:`Plan.about`); the others take that (:func:`joined_plan`) and read nothing.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hotset.data.choice import Choice, Row, choose
from hotset.data.identity import Identity
from hotset.data.source import Cuts, Source, Uncut
from hotset.determinism.declare import declared
from hotset.determinism.probe import Probe, probe
from hotset.determinism.verdict import name_of, verdict_of
from hotset.errors import NotCacheable, SegmentError
from hotset.store import memory as machine
from hotset.store.leaves import Misfit
from hotset.store.schema import Schema
from hotset.store.store import FULL_CHECK
from hotset.units import format_bytes, parse_bytes

__all__ = ["Made", "Plan", "Wanted", "joined_plan", "make_plan"]

_PROBED = 8
_PROBE_SECONDS = 2.0


class Wanted(NamedTuple):
    """What the user asked :func:`hotset.cache` for."""

    memory: int | str = "auto"
    strict: bool = False
    cut: int | None = None


@dataclass(frozen=True)
class Plan:
    """What :func:`hotset.cache` decided; ``print(plan)`` shows it.

    Attributes:
        name: the data set's class, for people.
        fingerprint: 32 hexadecimal digits that tell source and cached transforms from any other, or the key.
        rows: the data set and its transforms, in the order in which they are applied: see
            :class:`~hotset.data.choice.Row`.
        samples: length of the data set.
        sample_bytes: mean bytes of a record, measured on the samples that were read; 0 if none can be cached.
        sample_seconds: mean seconds that reading one took, cached transforms included.
        limit: bytes that the cache may take.
        notes: sentences about how this was decided.
        warnings: sentences about what the user should know at once.
    """

    name: str
    fingerprint: str
    rows: tuple[Row, ...]
    samples: int
    sample_bytes: int
    sample_seconds: float
    limit: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def cached(self) -> tuple[str, ...]:
        """Names of what runs once per sample, in order."""
        return tuple(row.name for row in self.rows if row.cached)

    @property
    def live(self) -> tuple[str, ...]:
        """Names of what runs for each use, in order."""
        return tuple(row.name for row in self.rows if not row.cached)

    @property
    def live_seconds(self) -> float:
        """Mean seconds that the live transforms took for a sample, as far as they were run."""
        return sum(row.seconds or 0.0 for row in self.rows if not row.cached)

    @property
    def total_bytes(self) -> int:
        """What all samples would take."""
        return self.samples * self.sample_bytes

    @property
    def fits(self) -> float:
        """Share of the samples for which there is room, 0 to 1."""
        if not self.sample_bytes:
            return 0.0
        return min(1.0, self.limit / self.total_bytes)

    def epoch_seconds(self, *, cached: bool = True) -> float:
        """What the source and the transforms take in one epoch, in one process.

        Args:
            cached: from the second epoch on, with as much cached as fits; else without any cache.
        """
        misses = 1.0 - self.fits if cached else 1.0
        return self.samples * (misses * self.sample_seconds + self.live_seconds)

    def steps_per_epoch(self, batch_size: int) -> int:
        """How many batches an epoch has, the last one counted if it is smaller."""
        return math.ceil(self.samples / batch_size)

    def epochs_for(self, steps: int, batch_size: int) -> float:
        """How many epochs that many steps take."""
        return steps / self.steps_per_epoch(batch_size)

    def about(self, wanted: Wanted, cuts: Cuts) -> dict[str, Any]:
        """What the cache's metadata say of it, as JSON's types, for :func:`joined_plan`."""
        found = ("name", "fingerprint", "rows", "sample_bytes", "sample_seconds", "limit")
        said = {"pid": os.getpid(), "memory": wanted.memory, "cuts": cuts.to_json()}
        return {**said, **{field: getattr(self, field) for field in found}}

    def __str__(self) -> str:
        share = "all of them fit" if self.fits >= 1 else f"{self.fits:.0%} of them fit"
        reads = f"{self.sample_seconds * 1e3:.3g} ms to read"
        without = self.epoch_seconds(cached=False)
        epochs = f"{self.epoch_seconds():.3g} s of one process, and {without:.3g} s without the cache"
        rows = [
            ("data set", f"{self.name}, {self.samples:,} samples"),
            ("a sample", f"{format_bytes(self.sample_bytes)}, {reads}"),
            ("memory", f"{format_bytes(self.limit)} for {format_bytes(self.total_bytes)}: {share}"),
            ("an epoch", epochs),
            ("fingerprint", self.fingerprint),
            *(("note", note) for note in (*self.notes, *self.warnings)),
        ]
        return "\n".join([_table(self.rows), *(f"{label:<12} {text}" for label, text in rows)])


def _table(rows: tuple[Row, ...]) -> str:
    """The transforms, a line each, with the cut between two of them."""
    lines = [("", "", "ms", "bytes", "")]
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds * 1e3:.3g}"
        size = "" if row.bytes is None else format_bytes(row.bytes)
        where = "cached" if row.cached else "live"
        lines.append((where, row.name, seconds, size, f"{row.kind}: {row.evidence}"))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        f"{where:<{widths[0]}}  {name:<{widths[1]}}  {ms:>{widths[2]}}  {size:>{widths[3]}}  {why}".rstrip()
        for where, name, ms, size, why in lines
    )


class Made(NamedTuple):
    """What :func:`make_plan` found out.

    Attributes:
        plan: for people.
        source: the data set and its chains, cut.
        cuts: where.
        schema: of the samples at the cut; None when nothing can be cached.
    """

    plan: Plan
    source: Source
    cuts: Cuts
    schema: Schema | None


def joined_plan(uncut: Uncut, wanted: Wanted, identity: Identity, about: dict[str, Any]) -> Made:
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
        source = uncut.cut(cuts)
    except ValueError as error:  # another number of transforms
        raise SegmentError("another chain of transforms is cached there.") from error
    rows = _joined_rows(uncut, [Row(*row) for row in about["rows"]])
    plan = Plan(
        name=type(uncut.dataset).__name__,
        fingerprint=identity.fingerprint(uncut, cuts, source),
        rows=rows,
        samples=len(uncut.dataset),
        sample_bytes=about["sample_bytes"],
        sample_seconds=about["sample_seconds"],
        limit=about["limit"],
        notes=(),
        warnings=(),
    )
    if plan.fingerprint != about["fingerprint"]:
        raise SegmentError("other samples are cached there.")
    notes = [f"process {about['pid']} of this job made the cache, and read the samples that decided about it"]
    if wanted.memory not in ("auto", about["memory"]):
        notes.append(
            f"memory={wanted.memory!r} is not looked at: it was made with memory={about['memory']!r}"
        )
    return Made(replace(plan, notes=(*notes, *identity.notes)), source, cuts, None)


def _joined_rows(uncut: Uncut, rows: list[Row]) -> tuple[Row, ...]:
    """The rows of a cache that another rank has made, with this rank's own live transforms.

    Raises:
        SegmentError: other transforms are cached there.
    """
    live = [
        step for step, row in itertools.zip_longest(uncut.steps, rows[1:]) if row is None or not row.cached
    ]
    kept = [row for row in rows[1:] if row.cached]
    names = [name_of(step) for step in uncut.steps]
    if names == [row.name for row in rows[1:]]:
        return tuple(rows)
    if [row.name for row in kept] != names[: len(kept)]:
        raise SegmentError("other transforms are cached there.")
    found = map(verdict_of, live)
    return (*rows[:1], *kept, *(Row(v.name, v.kind, v.evidence, None, None, False) for v in found))


def make_plan(uncut: Uncut, wanted: Wanted, identity: Identity) -> Made:
    """Read a few samples and decide.

    Raises:
        NotCacheable, ArgumentError, QuantityError: see :func:`hotset.cache`.
    """
    dataset = uncut.dataset
    name = type(dataset).__name__
    limit, warned = _limit(wanted.memory)
    if declared(dataset) == "nondeterministic":
        raise NotCacheable(
            f"{name} is declared @hotset.nondeterministic, so nothing of it may be cached; "
            "move its random part to transform=, after the part that may."
        )
    choice, source, probed = _decide(uncut, wanted, limit)
    notes = [*choice.notes, *_judge(dataset, source, probed)]
    if FULL_CHECK:
        notes.append("this processor may reorder stores, so every read of the cache is verified, which costs")
    schema = None
    sample_bytes = 0
    try:
        # Where a live part follows, samples are read one by one, else gathered: see hotset.store.leaves.
        schema = Schema.infer(probed.samples, as_lies=bool(source.live))
        sample_bytes = _mean_bytes(schema, probed.samples)
    except Misfit as misfit:
        warned.append(f"nothing of {name} can be cached, samples come from the source: {misfit}.")
    rows = choice.rows
    if len(rows) == 1:  # no transforms, so nothing was measured yet
        rows = (rows[0]._replace(seconds=probed.seconds, bytes=sample_bytes or None),)
    plan = Plan(
        name=name,
        fingerprint=identity.fingerprint(uncut, choice.cuts, source),
        rows=rows,
        samples=len(dataset),
        sample_bytes=sample_bytes,
        sample_seconds=probed.seconds,
        limit=limit,
        notes=(*notes, *identity.notes),
        warnings=tuple(warned),
    )
    return Made(plan, source, choice.cuts, schema)


def _limit(memory: int | str) -> tuple[int, list[str]]:
    """Bytes that the cache may take, and what the user should know about it."""
    room = machine.headroom()
    if memory == "auto":
        return room.bytes // 2, []
    limit = parse_bytes(memory)
    if limit <= room.bytes:
        return limit, []
    return room.bytes, [
        f"memory={memory!r} is more than {room.what} has to give, and the machine would swap or kill; the "
        f"cache takes {format_bytes(room.bytes)} at most. Lower `memory=` or free some."
    ]


def _decide(uncut: Uncut, wanted: Wanted, limit: int) -> tuple[Choice, Source, Probe]:
    """Cut, and read what is before the cut; anew without what was only probed, if that shows to be random."""
    choice = choose(uncut, limit, wanted.strict, wanted.cut)
    source = uncut.cut(choice.cuts)
    probed = _probe(source, len(uncut.dataset))
    if (probed.moved or probed.differs) and choice.probed and wanted.cut is None:
        choice = choose(uncut, limit, True, None)
        note = f"what is only known by its trial stays live, as {(*probed.moved, *probed.differs)[0]}"
        choice = replace(choice, notes=(*choice.notes, note))
        source = uncut.cut(choice.cuts)
        probed = _probe(source, len(uncut.dataset))
    return choice, source, probed


def _probe(source: Source, length: int) -> Probe:
    """Read samples spread over the data set twice each, as many as two seconds allow, at least two.

    A sample that cannot be read is left out: training may never ask for it. If none can be, the data set's
    own exception is raised.
    """
    spread = sorted({place * (length - 1) // max(_PROBED - 1, 1) for place in range(_PROBED)})
    held = (source.dataset, source.prefix)
    readable: list[Probe] = []
    error: Exception | None = None
    begin = time.perf_counter()
    # From both ends inwards: lengths and shapes differ most often there, in sorted data sets.
    for index in sorted(spread, key=lambda place: min(place, length - 1 - place)):
        if readable and time.perf_counter() - begin > _PROBE_SECONDS / 2 and len(readable) >= 2:
            break
        try:
            found = probe(source.read, [index], held)
        except Exception as raised:
            error = error or raised
            continue
        readable.append(found)
    if not readable:
        assert error is not None
        raise error
    return Probe(
        samples=[found.samples[0] for found in readable],
        seconds=sum(found.seconds for found in readable) / len(readable),
        moved=tuple(dict.fromkeys(text for found in readable for text in found.moved)),
        differs=tuple(dict.fromkeys(text for found in readable for text in found.differs)),
    )


def _judge(dataset: Any, source: Source, probed: Probe) -> list[str]:
    """Refuse what is random and not declared otherwise; return notes about what is believed.

    Raises:
        NotCacheable: with what was seen, and what to do.
    """
    kind = type(dataset).__name__
    seen = (*probed.moved, *probed.differs[:2])  # one sample that differs tells as much as eight
    if not seen:
        return ["the samples that were read twice were alike, and no random number generator moved"]
    if declared(dataset) == "deterministic":
        return [
            f"declared deterministic, although {text}: draws differ from an uncached run" for text in seen
        ]
    if source.prefix and not _is_random(source.dataset):
        return [
            f"the cached transforms are declared, although {text}: draws differ from an uncached run"
            for text in seen
        ]
    raise NotCacheable(
        f"{kind} gives another sample each time ({'; '.join(seen)}), and caching it would freeze one draw "
        "for ever. Move the random part to transform=[...], after the part to be cached; or, if the samples "
        f"are alike in all that matters, declare it: hotset.deterministic({kind})."
    )


def _is_random(dataset: Any) -> bool:
    read: Callable[[int], Any] = dataset.__getitem__
    alone = probe(read, [0], (dataset,))
    return bool(alone.moved or alone.differs)


def _mean_bytes(schema: Schema, samples: list[Any]) -> int:
    sizes = []
    for sample in samples:
        try:
            sizes.append(schema.stride + 256 * schema.prepare(sample).tail_lines)
        except Misfit:
            continue
    return sum(sizes) // max(len(sizes), 1)
