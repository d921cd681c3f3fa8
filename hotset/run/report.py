"""What ``hotset run`` says in the end, to stderr.

::

    hotset: python train.py ran for 132 s
      function     calls   hits  time saved      kept
      cv2.imread  12,000  9,000      45.2 s  2.30 GiB
      left alone: numpy.load, at least 12 times: its file is an archive
      DataLoader: the loop waited 12.1 s of its 124 s for 1,200 batches
      ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hotset.run.loader_wait import Waits
from hotset.units import format_bytes, format_seconds

__all__ = ["Outcome", "report"]

_SHOWN = 6  # lines of what was left alone
_LITTLE = 0.05  # of the loop's time: if it waits less than that for batches, no loader gains much


class Outcome(NamedTuple):
    """What is known when the program has ended.

    Attributes:
        command: the program.
        seconds: how long it ran.
        functions: name and statistics of each memo.
        left: function and reason, with the least number of calls.
        waits: of each process that had loaders, the one that waited most first.
        unreached: interpreters that have no hotset.
        reached: whether any Python process below was reached.
    """

    command: str
    seconds: float
    functions: Sequence[tuple[str, Mapping[str, Any]]]
    left: Mapping[tuple[str, str], int]
    waits: Sequence[Waits]
    unreached: Sequence[str]
    reached: bool


def report(outcome: Outcome) -> list[str]:
    """The lines of the report."""
    lines = [f"hotset: {outcome.command} ran for {format_seconds(outcome.seconds)}"]
    called = [(name, stats) for name, stats in outcome.functions if stats.get("calls")]
    if called:
        lines += _table(called)
    lines += _left_lines(outcome.left)
    if outcome.waits:
        lines.append("  " + _waited(outcome))
    lines += [f"  {sentence}" for sentence in _advice(outcome, called)]
    return lines


def _table(called: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    rows = [("function", "calls", "hits", "time saved", "kept")]
    for name, stats in sorted(called, key=lambda one: -float(one[1].get("seconds_saved", 0))):
        rows.append(
            (
                name,
                f"{stats['calls']:,}",
                f"{stats['hits']:,}",
                format_seconds(stats.get("seconds_saved", 0.0)),
                format_bytes(stats.get("bytes", 0)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def _left_lines(left: Mapping[tuple[str, str], int]) -> list[str]:
    ordered = sorted(left.items(), key=lambda one: -one[1])
    lines = [
        f"  left alone: {name}, {'once' if count == 1 else f'at least {count:,} times'}: {reason}"
        for (name, reason), count in ordered[:_SHOWN]
    ]
    if len(ordered) > _SHOWN:
        lines.append(f"  left alone: {len(ordered) - _SHOWN} more kinds of calls")
    return lines


def _waited(outcome: Outcome) -> str:
    most = outcome.waits[0]
    who = (
        "the loop"
        if len(outcome.waits) == 1
        else f"the one of {len(outcome.waits)} processes that waited most"
    )
    return (
        f"DataLoader: {who} waited {format_seconds(most.waited)} of its {format_seconds(most.seconds)} "
        f"for {most.batches:,.0f} batches"
    )


def _advice(outcome: Outcome, called: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """What would help more: at most two sentences, each of which follows from a figure above."""
    if outcome.unreached:
        found = ", ".join(sorted(set(outcome.unreached)))
        return [f"hotset is not installed for {found}: what runs there ran as without it."]
    if not outcome.reached:
        return [
            "No Python process was reached: it is not a Python program, or it ignores PYTHONPATH "
            "(python -I, -E or -S)."
        ]
    share = outcome.waits[0].waited / max(outcome.waits[0].seconds, 1e-9) if outcome.waits else None
    if not called:
        if any("no memory can be had" in reason for _, reason in outcome.left):
            return ["There was no memory to keep anything in: less --memory, or a higher `ulimit`, may help."]
        return [_nothing_decoded(share)]
    sentences = []
    hits = sum(stats["hits"] for _, stats in called)
    calls = sum(stats["calls"] for _, stats in called)
    uncached = sum(stats.get("uncached", 0) for _, stats in called)
    if uncached > calls // 100:
        sentences.append(
            f"{uncached:,} calls computed a value that was not kept, for a reason that is above or in the "
            "program's own warnings; where there was no room, more --memory, or --spill DIR, helps."
        )
    elif hits < calls // 10:
        sentences.append(
            "Nearly every file was decoded for the first time: what helps is a second epoch, "
            "or --session NAME, which keeps the pictures for the next job."
        )
    if share is not None and share < _LITTLE:
        sentences.append("Training hardly waited for data: a faster loader would change little.")
    elif share is not None and hits >= calls // 2 and share > 0.2:
        sentences.append(
            "Most was decoded already, so what the loop waits for is other work on the samples: "
            "hotset.cache(dataset) keeps the transforms before the first random one as well."
        )
    return sentences[:2]


def _nothing_decoded(share: float | None) -> str:
    """``share`` of its time that the loop waited for batches."""
    nothing = "Nothing was decoded by functions that hotset knows"
    if share is not None and share < _LITTLE:
        return f"{nothing}, and training hardly waited for data: a faster loader would change little."
    named = f"{nothing}; name the function that reads or decodes your files with --memo module:function."
    if share is None:
        return named
    return f"{named} If none does, `hotset doctor` says what hotset.cache(dataset) would give."
