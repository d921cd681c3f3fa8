"""The plan of a stream: one that was made with its first samples, and what the stream's own probe adds."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace

from hotset.dataset.plan import Plan
from hotset.dataset.streams.libraries import draws_from_clock, has_shuffle
from hotset.dataset.streams.probe import StreamFacts
from hotset.dataset.streams.source import StreamSource
from hotset.store import memory_limits

__all__ = ["plan_of_stream"]

_SPARE_IDS = 4096
_SHUFFLES_LEFT_OUT = "; its shuffles were left out of these runs"
_BYTES_PER_ID = 128  # of a stream's room, and of what memory has left, a sixteenth at most is index
_PARTS = 64  # of which one may have all samples


def plan_of_stream(stream: StreamSource, plan: Plan, stride: int, *, alone: bool) -> tuple[Plan, StreamFacts]:
    """The plan of a stream, from one that was made with its first samples; and what its passes need to know.

    The cache has room for more sample ids than records fit, as ids count through all parts, and one part may
    have all samples (a stream of one file). Of records that fit on a disk it has twice as many, if memory
    has room for their index.

    Args:
        stream: the stream.
        plan: the plan.
        stride: bytes of the fixed part of a record.
        alone: whether no other process can use the cache.
    """
    probed = stream.probe()
    shuffles = has_shuffle(stream.stream)
    room = plan.limit
    if plan.spill is not None:
        with contextlib.suppress(OSError):
            room += shutil.disk_usage(os.path.dirname(plan.spill) or "/").free
    size = max(plan.sample_bytes, stride)
    ids = max(2 * room // size, min(_PARTS * plan.limit // size, plan.limit // _BYTES_PER_ID))
    most = min(room, memory_limits.headroom().bytes) // _BYTES_PER_ID
    first, *steps = plan.rows
    plan = replace(
        plan,
        samples=min(ids, most) + _SPARE_IDS,
        sample_seconds=plan.sample_seconds + probed.seconds,
        rows=(first._replace(name=stream.name, seconds=probed.seconds), *steps),
        audited=False,
        stream=True,
        notes=(probed.note + (_SHUFFLES_LEFT_OUT if shuffles else ""), *plan.notes),
        warnings=(*plan.warnings, *((probed.warning,) if probed.warning is not None else ())),
    )
    facts = probed.facts
    repeats = facts.repeats and not draws_from_clock(stream.stream)
    return plan, facts._replace(shuffled=facts.shuffled or shuffles, repeats=repeats, alone=alone)
