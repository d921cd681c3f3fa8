"""The report of ``hotset doctor`` as lines for a terminal.

::

    hotset doctor: python train.py, 1,180 steps of 64 samples with 2 workers
      now             1,320 samples/s; training waits for data 62% of the time
      a step          30.1 ms of waiting for the loader, 18.4 ms of its own
      at most         about 3,480 samples/s, whatever the loader: the steps alone take that long, unless ...
      a sample        1.51 ms of processor time in its worker, 0 ms of waiting for a disk, a network or ...
      of that         PIL.Image.Image.load 0.92 ms, collate 0.03 ms
      what would help, the best first:
        samples/s    gain    memory
            3,300    2.5x  1.20 GiB  hotset.cache(dataset, memory="1.23GiB"), hotset.DataLoader(...)
"""

from __future__ import annotations

from hotset.run.doctor.advice import WORTH, Prediction, Report
from hotset.run.doctor.observed import Observed
from hotset.units import format_bytes, format_ms, format_seconds

__all__ = ["lines"]

_LITTLE = 0.03  # less waiting than this share changes nothing


def lines(report: Report, command: str) -> list[str]:
    """The report on a program that was started by this command."""
    seen = report.seen
    ranks = f" in each of {seen.ranks} processes" if seen.ranks > 1 else ""
    workers = "1 worker" if seen.workers == 1 else f"{seen.workers} workers"
    return [
        f"hotset doctor: {command}, {seen.steps:,} steps of {seen.batch_size:,.0f} samples with "
        f"{workers}{ranks}",
        *(f"  {label:<14}  {text}" for label, text in _facts(seen, report.predicted)),
        *_table(report),
        *(f"  {sentence}" for sentence in report.unknown),
    ]


def _ms(seconds: float) -> str:
    return f"{format_ms(seconds)} ms" if seconds >= 1e-5 or seconds < 5e-8 else f"{seconds * 1e6:.2g} us"


def _facts(seen: Observed, predicted: Prediction) -> list[tuple[str, str]]:
    facts = [
        (
            "now",
            f"{seen.rate:,.0f} samples/s; training waits for data {seen.waited:.0%} of the time, "
            f"and {format_seconds(seen.first_wait)} for the first batch of an epoch",
        ),
        (
            "a step",
            f"{_ms(seen.wait)} of waiting for the loader, {_ms(seen.step_beside)} of its own"
            + _less_alone(seen)
            + (f", {_ms(seen.gpu)} on the GPU" if seen.gpu is not None else ""),
        ),
        (
            "at most",
            f"about {predicted.limit:,.0f} samples/s, whatever the loader: the steps alone take that long, "
            "unless they are faster where none waits",
        ),
        ("a sample", _of_sample(seen)),
    ]
    parts = _parts(seen)
    if parts:
        facts.append(("of that", ", ".join(parts)))
    if seen.elsewhere > _LITTLE:
        text = (
            f"{seen.elsewhere:.0%} of the time goes to other loaders, such as validation's: they gain nothing"
        )
        facts.append(("elsewhere", text + " here"))
    if seen.read_bytes:
        facts.append(("reads", f"{format_bytes(seen.read_bytes)} a sample{_of_disk(seen)}"))
    if seen.memory is not None:
        growth = ""
        if seen.growth is not None and seen.growth > (1 << 20):
            growth = f"; it grows by {format_bytes(60 * seen.growth)} a minute"
        facts.append(("memory", f"{format_bytes(seen.memory)} in each worker{growth}"))
    return facts


def _of_disk(seen: Observed) -> str:
    if seen.disk_bytes is None:
        return ""
    if seen.disk_bytes > (seen.read_bytes or 0.0):
        return (
            f" by calls of the system; {format_bytes(seen.disk_bytes)} come from a disk, as mapped files do"
        )
    return f", {format_bytes(seen.disk_bytes)} of them from a disk"


def _less_alone(seen: Observed) -> str:
    alone = seen.step.seconds * seen.batch_size
    if seen.gpu is not None and alone <= seen.gpu:
        return ""
    if seen.step_drops or alone >= 0.9 * seen.step_beside:
        return ""
    return f", {_ms(alone)} with {'workers at rest and ' if seen.workers else ''}no batch to free"


def _of_sample(seen: Observed) -> str:
    place = "in its worker" if seen.workers else "in the training process"
    waits = f", {_ms(seen.fetch.blocked)} of waiting for a disk, a network or another process"
    sends = f", {_ms(seen.fetch.send + seen.fetch.receive)} to hand it over" if seen.workers else ""
    return f"{_ms(seen.fetch.cpu)} of processor time {place}{waits}{sends}"


def _parts(seen: Observed) -> list[str]:
    """What is known of its processor time, the decoders first."""
    transforms = (seen.trial.get("plan") or {}).get("transforms", ())[1:]
    return [
        *(f"{one.name} {_ms(one.cpu)}" for one in seen.decoders),
        *([f"collate {_ms(seen.collate)}"] if seen.collate else []),
        # Their clock is one on the wall: one that has waited says nothing of the processor.
        *(
            f"{row['name']} {_ms(row['seconds'])}"
            for row in transforms
            if row["seconds"] and row["seconds"] <= seen.fetch.cpu
        ),
    ]


def _table(report: Report) -> list[str]:
    worth = [one for one in report.advised if one.gain >= WORTH]
    if not worth:
        return [f"  {_why_leave(report)}"]
    rows = [("samples/s", "gain", "memory", "")]
    rows += [
        (
            f"{one.samples_per_second:,.0f}",
            f"{one.gain:.2f}x",
            "?" if one.bytes is None else format_bytes(one.bytes),
            one.line,
        )
        for one in worth
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  what would help, the best first:"]
    for number, row in enumerate(rows):
        cells = [cell.rjust(width) for cell, width in zip(row[:3], widths, strict=False)]
        text.append("    " + "  ".join([*cells, row[3]]).rstrip())
        if number and worth[number - 1].note:
            text.append(" " * (4 + sum(widths[:3]) + 6) + f"({worth[number - 1].note})")
    return text


def _why_leave(report: Report) -> str:
    if report.seen.waited < _LITTLE:
        return "leave it as it is: training hardly waits for data."
    if report.in_doubt:
        return "nothing that is known here gives a twentieth more, but too little is known:"
    return "leave it as it is: nothing that is known here gives a twentieth more."
