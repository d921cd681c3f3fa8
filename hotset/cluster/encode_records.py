"""Packing: samples to records that travel.

A record on its way is laid out as it would be in a segment, but for two places of which only a segment knows:
its tail's first line is zero, and so is its generation. The store that takes it in writes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hotset.cluster.protocol import LARGEST
from hotset.cluster.wire_records import ABSENT, Bytes, CacheIdentity, Longs, WireRecords
from hotset.store import format as fmt
from hotset.store import irregular_records as forms
from hotset.store.format import LINE, RECORD, RECORD_HEADER
from hotset.store.leaves import SchemaMismatch
from hotset.store.schema import Schema

__all__ = ["pack"]


def pack(
    cache: CacheIdentity, schema: Schema, samples: dict[int, Any], absent: Sequence[int] = ()
) -> tuple[Longs, WireRecords]:
    """Lay samples out side by side.

    Args:
        cache: whose samples they are.
        schema: of its samples.
        samples: by number. Those that cannot be kept are absent, and those beyond one message's size.
        absent: numbers of others that are.

    Returns:
        The numbers, those of absent ones last, and the records.
    """
    fitting: list[tuple[int, forms.Taken]] = []
    missing = list(absent)
    rows_left, lines_left = LARGEST // schema.stride, LARGEST // LINE
    for sample, value in samples.items():
        try:
            prepared = forms.prepare(schema, value)
        except SchemaMismatch:
            missing.append(sample)
            continue
        if rows_left and prepared.tail_lines <= lines_left:
            rows_left, lines_left = rows_left - 1, lines_left - prepared.tail_lines
            fitting.append((sample, prepared))
        else:
            missing.append(sample)
    lines = np.array([prepared.tail_lines for _, prepared in fitting], np.int64)
    tails_at = len(fitting) * schema.stride
    memory = bytearray(tails_at + int(lines.sum()) * LINE)
    view = memoryview(memory)
    row_at, tail_at = 0, tails_at
    there = np.array([sample for sample, _ in fitting], np.int64)
    for sample, prepared in fitting:
        stamp = forms.stamp(prepared, 0)
        forms.write(schema, memory, row_at, prepared, 0, tail_at)
        length = schema.stride - RECORD_HEADER + prepared.tail_bytes
        tail = view[tail_at : tail_at + prepared.tail_bytes] if prepared.tail_bytes else None
        crc = fmt.checksum(sample, length, stamp, view[row_at + RECORD_HEADER : row_at + schema.stride], tail)
        RECORD.pack_into(memory, row_at, length, stamp, crc)
        row_at += schema.stride
        tail_at += prepared.tail_lines * LINE
    ids = np.concatenate([there, np.array(missing, np.int64)])
    generations = np.concatenate([np.zeros(len(there), np.int64), np.full(len(missing), ABSENT)])
    rows: Bytes = np.ndarray((len(fitting), schema.stride), np.uint8, memory)
    tails: Bytes = np.ndarray((int(lines.sum()), LINE), np.uint8, memory, tails_at)
    return ids, WireRecords(generations, np.pad(lines, (0, len(missing))), rows, tails)
