"""The plan: what is cached of a dataset, what stays live, and why, as text for users.

:mod:`hotset.dataset.planning.planner` makes it.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hotset.dataset.pipeline import Cuts
from hotset.dataset.window import Sizes
from hotset.session.job import this_job
from hotset.units import format_bytes, format_ms, format_seconds

__all__ = ["Plan", "Row", "table"]

# How much of a disk :mod:`hotset.store.spill` leaves free.
_DISK_RESERVE = "64 MiB or a hundredth of the disk, whichever is more,"
# A hit of a small sample takes 5 to 15 us in torch's DataLoader, and 1 us in hotset's, which copies batches.
_HIT_SECONDS = 1.5e-5
# What a rank that joins takes from the metadata as it is.
_SHARED = (
    *("fingerprint", "samples", "sample_bytes", "sample_seconds"),
    *("refused", "limit", "audited", "stream"),
)


class Row(NamedTuple):
    """A line of the plan: a transform, or the dataset itself.

    Attributes:
        name: the transform's name.
        kind: ``"deterministic"``, ``"random"``, ``"unknown"``; ``"source"`` for the dataset.
        evidence: how that is known.
        seconds: what it takes for one sample; None if it was not run.
        bytes: the size of a sample after it; None if it was not run.
        cached: whether it runs once per sample, before the cut.
    """

    name: str
    kind: str
    evidence: str
    seconds: float | None
    bytes: int | None
    cached: bool


@dataclass(frozen=True, repr=False)
class Plan:
    """What :func:`hotset.cache` decided; ``print(plan)`` shows it, and so do a prompt and a notebook.

    Attributes:
        name: the name of the dataset's class.
        fingerprint: 32 hexadecimal digits that identify the source and its cached transforms, or the key.
        rows: the dataset and its transforms, in the order in which they are applied: see
            :class:`Row`.
        samples: the length of the dataset.
        sample_bytes: mean bytes of a record, measured on the samples that were read; 0 if none can be cached.
        sample_seconds: typical time to read one, cached transforms included, in one thread.
        refused: the share of samples that cannot be cached, 0 to 1, estimated from those that were read.
        limit: the bytes that the cache may take.
        window: the sizes of the running window; None if all samples are used in each epoch.
        spill: the folder for samples that do not fit into memory; None if there is none.
        audited: whether hits are compared with the source now and then: not where a declaration is believed
            against the evidence, nor with a ``hotset.batched``.
        notes: sentences about how this was decided.
        warnings: sentences that the user is warned with at once.
        held: the bytes of ``limit`` that other caches of the session hold, or the machine does not have now.
        stream: whether the dataset is an iterable one, whose length is known once it was read: ``samples``
            is 0 before.
    """

    name: str
    fingerprint: str
    rows: tuple[Row, ...]
    samples: int
    sample_bytes: int
    sample_seconds: float
    refused: float
    limit: int
    window: Sizes | None
    spill: str | None
    audited: bool
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    held: int = 0
    stream: bool = False

    @property
    def cached(self) -> tuple[str, ...]:
        """The names of the transforms that run once per sample, in order."""
        return tuple(row.name for row in self.rows if row.cached)

    @property
    def live(self) -> tuple[str, ...]:
        """The names of the transforms that run for each use, in order."""
        return tuple(row.name for row in self.rows if not row.cached)

    @property
    def live_seconds(self) -> float:
        """The typical seconds of the live transforms for a sample, as far as they were run."""
        return sum(row.seconds or 0.0 for row in self.rows if not row.cached)

    @property
    def used(self) -> int:
        """How many samples an epoch uses: all, or a window's residents."""
        return self.window.resident if self.window is not None else self.samples

    @property
    def total_bytes(self) -> int:
        """Bytes of all samples that can be cached; of a window, those that are prepared included."""
        count = self.window.slots if self.window is not None else self.samples
        return round(count * (1.0 - self.refused)) * self.sample_bytes

    @property
    def fits(self) -> float:
        """The share of all samples, or of a window's, that can be cached and fit, 0 to 1."""
        if not self.total_bytes:
            return 0.0
        return min(1.0, self.room / self.total_bytes) * (1.0 - self.refused)

    @property
    def room(self) -> int:
        """The bytes that the cache may take now."""
        return max(self.limit - self.held, 0)

    def epoch_seconds(self, *, cached: bool = True) -> float:
        """The seconds that the source and the transforms take in an epoch, in one process with one thread.

        Args:
            cached: from the second epoch on, with as much cached as fits; otherwise without a cache. Samples
                on a disk count as cached: the disk's speed is not measured.
        """
        misses = 1.0 if not cached else self.refused if self.spill is not None else 1.0 - self.fits
        return self.used * (misses * self.sample_seconds + self.live_seconds)

    def steps_per_epoch(self, batch_size: int) -> int:
        """The number of batches in an epoch, a smaller last one included.

        Raises:
            TypeError: a stream has no length before it was read once.
        """
        if self.stream and not self.samples:
            raise TypeError(f"{self.name} has no length before it was read once; call fill() first.")
        return math.ceil(self.used / batch_size)

    def epochs_for(self, steps: int, batch_size: int) -> float:
        """The number of epochs that this many steps take: see :meth:`steps_per_epoch`."""
        return steps / self.steps_per_epoch(batch_size)

    def about(self, memory: int | str, cuts: Cuts) -> dict[str, Any]:
        """The plan as the cache's metadata hold it for the ranks that join, as JSON types.

        Args:
            memory: the user's ``memory=``.
            cuts: where the chains are cut.
        """
        return {
            "job": this_job().offers,
            "pid": os.getpid(),
            "memory": memory,
            "cuts": cuts,
            "name": self.name,
            "rows": self.rows,
            "window": self.window,
            "spills_to": self.spill,
            **{field: getattr(self, field) for field in _SHARED},
        }

    @classmethod
    def joined(cls, about: Mapping[str, Any], name: str, rows: tuple[Row, ...], notes: Sequence[str]) -> Plan:
        """The plan that :meth:`about` has put into a cache's metadata, with a joining rank's own words."""
        shared = {field: about[field] for field in _SHARED}
        window = Sizes(*about["window"]) if about["window"] is not None else None
        spill, notes = about["spills_to"], tuple(notes)
        return cls(name=name, rows=rows, window=window, spill=spill, notes=notes, warnings=(), **shared)

    def to_dict(self) -> dict[str, Any]:
        """All of the plan, as JSON types. The keys are stable.

        Returns:
            ``name, fingerprint, samples, used, sample_bytes, sample_seconds, limit, held, room, total_bytes,
            fits, spill, audited, notes, warnings`` are the attributes and properties. ``window`` is a
            dictionary of :class:`~hotset.dataset.window.Sizes`, or None, and ``transforms`` a list of
            dictionaries of :class:`Row`, the dataset first. Times are in
            seconds, sizes in bytes.

        Example:
            >>> import hotset, json, torch
            >>> from torch.utils.data import TensorDataset
            >>> plan = hotset.cache(TensorDataset(torch.arange(4)), memory="1MiB").plan
            >>> json.loads(json.dumps(plan.to_dict()))["transforms"][0]["name"]
            'TensorDataset'
        """
        plain = "name fingerprint samples used sample_bytes sample_seconds limit held room total_bytes fits"
        return {
            **{name: getattr(self, name) for name in (*plain.split(), "spill", "audited")},
            "window": self.window._asdict() if self.window is not None else None,
            "transforms": [row._asdict() for row in self.rows],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def _facts(self) -> list[tuple[str, str]]:
        """The lines below the table of transforms, each with its label."""
        if self.stream:
            return self._stream_facts()
        share = "all of them fit" if self.fits >= 1 else f"{self.fits:.0%} of them fit"
        room = format_bytes(self.room)
        if self.held:
            room += f" ({format_bytes(self.limit)} less what others hold)"
        if self.spill is not None and self.room < self.total_bytes:
            share += f", the others go to {self.spill}, where {_DISK_RESERVE} stay free"
        reads = f"{format_ms(max(self.sample_seconds, 1e-6))} ms to read"
        if self.sample_seconds < _HIT_SECONDS:
            reads += ", about as long as a hit takes in torch's DataLoader: use hotset.DataLoader"
        after, without = (format_seconds(self.epoch_seconds(cached=cached)) for cached in (True, False))
        epochs = f"{after} of reading and transforming, {without} without the cache (one process, one thread)"
        return [
            ("dataset", f"{self.name}, {self.samples:,} samples"),
            ("a sample", f"{format_bytes(self.sample_bytes)}, {reads}"),
            *([("window", _window_text(self.window))] if self.window is not None else []),
            ("memory", f"{room} for {format_bytes(self.total_bytes)}: {share}"),
            ("an epoch", epochs),
            ("fingerprint", self.fingerprint),
            *(("note", note) for note in (*self.notes, *self.warnings)),
        ]

    def _stream_facts(self) -> list[tuple[str, str]]:
        """As :meth:`_facts`, for a stream."""
        read = (
            f"{self.samples:,} samples, all recorded"
            if self.samples
            else "its length is known once it was read"
        )
        reads = f"{format_ms(max(self.sample_seconds, 1e-6))} ms to read"
        count = self.room // max(self.sample_bytes, 1)
        beyond = f", the others go to {self.spill}, where {_DISK_RESERVE} stay free" if self.spill else ""
        return [
            ("dataset", f"{self.name}, a stream: {read}"),
            ("a sample", f"{format_bytes(self.sample_bytes)}, {reads}"),
            ("memory", f"{format_bytes(self.room)}, for about {count:,} samples{beyond}"),
            ("fingerprint", self.fingerprint),
            *(("note", note) for note in (*self.notes, *self.warnings)),
        ]

    def __str__(self) -> str:
        return "\n".join([table(self.rows), *(f"{label:<12} {text}" for label, text in self._facts())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        steps = [_html_row(cells, "td" if number else "th") for number, cells in enumerate(_cells(self.rows))]
        facts = [_html_row(fact, "td") for fact in self._facts()]
        return f"<table>{''.join(steps)}</table><table>{''.join(facts)}</table>"


def _window_text(window: Sizes) -> str:
    seen = window.epochs_until_all_seen
    rate = f"{window.replaced:,} {'is' if window.replaced == 1 else 'are'} replaced after each epoch"
    if window.auto:
        rate = f"as many as are ready, up to {window.replaced:,}, are replaced after each epoch"
    when = "the others are never used" if seen is None else f"all are seen after {seen:,} epochs"
    return f"{window.resident:,} of {window.samples:,} samples are resident, {rate}, and {when}"


def _html_row(cells: Sequence[str], tag: str) -> str:
    shown = "".join(f'<{tag} style="text-align: left">{html.escape(cell)}</{tag}>' for cell in cells)
    return f"<tr>{shown}</tr>"


def _cells(rows: tuple[Row, ...]) -> list[tuple[str, str, str, str, str]]:
    """The transforms, one line each, under a heading."""
    lines = [("", "", "ms", "bytes", "")]
    for row in rows:
        seconds = "" if row.seconds is None else format_ms(row.seconds)
        size = "" if row.bytes is None else format_bytes(row.bytes)
        where = "cached" if row.cached else "live"
        lines.append((where, row.name, seconds, size, f"{row.kind}: {row.evidence}"))
    return lines


def table(rows: tuple[Row, ...]) -> str:
    """The transforms as text, one line each."""
    lines = _cells(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        f"{where:<{widths[0]}}  {name:<{widths[1]}}  {ms:>{widths[2]}}  {size:>{widths[3]}}  {why}".rstrip()
        for where, name, ms, size, why in lines
    )
