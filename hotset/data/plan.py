"""The plan: what is cached, what stays live, and why, decided once from a few real samples.

The samples are read twice. A source that moves a random number generator, or gives another sample the
second time, would have that one draw frozen for all epochs: it is refused, with a sentence that says where
to put the random part. What the user has declared deterministic is believed.

What the plan is *for*, the fingerprint, is taken before any of that: some sources are changed by being read,
and ranks of one job would not recognise their common cache. The rank that makes the cache puts what it found
out beside it (:meth:`Plan.about`); the others take that (:func:`joined_plan`) and read nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotset.data.source import Source
from hotset.determinism.chain import leaves
from hotset.determinism.declare import declared
from hotset.determinism.fingerprint import Fingerprint, fingerprint
from hotset.determinism.probe import Probe, probe
from hotset.determinism.verdict import name_of
from hotset.errors import NotCacheable
from hotset.store import memory as machine
from hotset.store.leaves import Misfit
from hotset.store.schema import Schema
from hotset.store.store import FULL_CHECK
from hotset.units import format_bytes, parse_bytes

__all__ = ["Plan", "identify", "joined_plan", "make_plan"]

_PROBED = 8
_PROBE_SECONDS = 2.0


@dataclass(frozen=True)
class Plan:
    """What :func:`hotset.cache` decided; ``print(plan)`` shows it.

    Attributes:
        name: the data set's class, for people.
        fingerprint: 32 hexadecimal digits that tell source and cached transforms from any other, or the key.
        cached: names of what runs once per sample, in order.
        live: names of what runs for each use, in order.
        samples: length of the data set.
        sample_bytes: mean bytes of a record, measured on the samples that were read.
        sample_seconds: mean seconds that reading one took.
        limit: bytes that the cache may take.
        notes: sentences about how this was decided.
        warnings: sentences about what the user should know at once.
    """

    name: str
    fingerprint: str
    cached: tuple[str, ...]
    live: tuple[str, ...]
    samples: int
    sample_bytes: int
    sample_seconds: float
    limit: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """What all samples would take."""
        return self.samples * self.sample_bytes

    def about(self, memory: int | str) -> dict[str, Any]:
        """What the cache's metadata say of it, as JSON's types, for :func:`joined_plan`.

        Args:
            memory: what the user asked for.
        """
        found = ("name", "fingerprint", "sample_bytes", "sample_seconds", "limit")
        return {"pid": os.getpid(), "memory": memory, **{field: getattr(self, field) for field in found}}

    def __str__(self) -> str:
        fits = self.limit / self.total_bytes if self.total_bytes else 0.0
        share = "all of them fit" if fits >= 1 else f"{fits:.0%} of them fit"
        rows = [
            ("data set", f"{self.name}, {self.samples:,} samples"),
            ("cached", " -> ".join(self.cached) if self.sample_bytes else "nothing"),
            ("live", " -> ".join(self.live) or "nothing"),
            ("a sample", f"{format_bytes(self.sample_bytes)}, {self.sample_seconds * 1e3:.3g} ms to read"),
            ("memory", f"{format_bytes(self.limit)} for {format_bytes(self.total_bytes)}: {share}"),
            ("fingerprint", self.fingerprint),
            *(("note", note) for note in (*self.notes, *self.warnings)),
        ]
        return "\n".join(f"{label:<12} {text}" for label, text in rows)


def identify(source: Source, key: str | None) -> Fingerprint:
    """What the cached samples are, without reading one: the fingerprint of source and prefix, or the key.

    Raises:
        OSError: see :func:`hotset.determinism.fingerprint.fingerprint`.
    """
    return fingerprint(source.dataset, source.prefix) if key is None else Fingerprint(key, ())


def joined_plan(
    dataset: Any, source: Source, memory: int | str, identity: Fingerprint, about: dict[str, Any]
) -> Plan:
    """The plan of a rank that takes a cache which another rank has made; nothing is read.

    Args:
        dataset: what the user gave.
        source: its chain, cut.
        memory: what the user asked for; it is the first rank's that holds.
        identity: what is cached.
        about: the metadata of that cache: see :meth:`Plan.about`.
    """
    notes = [f"process {about['pid']} of this job made the cache, and read the samples that decided about it"]
    if memory not in ("auto", about["memory"]):
        notes.append(f"memory={memory!r} is not looked at: it was made with memory={about['memory']!r}")
    return _plan(
        dataset,
        source,
        identity,
        sample_bytes=about["sample_bytes"],
        sample_seconds=about["sample_seconds"],
        limit=about["limit"],
        notes=(*source.notes, *notes, *identity.notes),
        warnings=(),
    )


def make_plan(
    dataset: Any, source: Source, memory: int | str, identity: Fingerprint
) -> tuple[Plan, Schema | None]:
    """Read a few samples and decide; the schema is None when nothing can be cached.

    Raises:
        NotCacheable, QuantityError: see :func:`hotset.cache`.
    """
    limit = None if memory == "auto" else parse_bytes(memory)
    notes, warned = list(source.notes), []
    probed = _probe(source, len(dataset))
    notes += _judge(dataset, source, probed)
    if FULL_CHECK:
        notes.append("this processor may reorder stores, so every read of the cache is verified, which costs")
    schema = None
    sample_bytes = 0
    try:
        # Where a live part follows, samples are read one by one, else gathered: see hotset.store.leaves.
        schema = Schema.infer(probed.samples, as_lies=bool(source.live))
        sample_bytes = _mean_bytes(schema, probed.samples)
    except Misfit as misfit:
        warned.append(
            f"nothing of {type(dataset).__name__} can be cached, samples come from the source: {misfit}."
        )
    room = machine.headroom()
    if limit is None:
        limit = room.bytes // 2
    elif limit > room.bytes:
        warned.append(
            f"memory={memory!r} is more than {room.what} has to give; the cache takes "
            f"{format_bytes(room.bytes)} at most. Lower `memory=` or free some."
        )
        limit = room.bytes
    plan = _plan(
        dataset,
        source,
        identity,
        sample_bytes=sample_bytes,
        sample_seconds=probed.seconds,
        limit=limit,
        notes=(*notes, *identity.notes),
        warnings=tuple(warned),
    )
    return plan, schema


def _plan(dataset: Any, source: Source, identity: Fingerprint, **found: Any) -> Plan:
    """A plan, of what is known without reading a sample and what was found by reading some."""
    name = type(dataset).__name__
    return Plan(
        name=name,
        fingerprint=identity.digest,
        cached=(name, *(name_of(step) for step in leaves((*source.inner, *source.prefix)))),
        live=tuple(name_of(step) for step in leaves(source.live)),
        samples=len(dataset),
        **found,
    )


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
    if declared(dataset) == "nondeterministic":
        raise NotCacheable(
            f"{kind} is declared @hotset.nondeterministic, so nothing of it may be cached; "
            "move its random part to transform=, after the part that may."
        )
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
