"""Packing: samples to records that travel, and back.

A record on its way is laid out as it would be in a segment, but for two places of which only a segment knows:
its tail's first line is zero, and so is its generation. Who stores it writes its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotset.cluster.messages import LARGEST, Bytes, Longs, Records
from hotset.store import format as fmt
from hotset.store.check import RECORD
from hotset.store.format import LINE, RECORD_HEADER
from hotset.store.leaves import Misfit
from hotset.store.schema import Prepared, Schema

__all__ = ["pack", "unpack"]


def pack(schema: Schema, samples: dict[int, Any]) -> tuple[Longs, Records]:
    """Lay samples out side by side.

    Args:
        schema: of the cache.
        samples: by number. Those that do not fit it are left out, and those beyond one message's size.

    Returns:
        The numbers of those that are there, and their records.
    """
    fitting: list[tuple[int, Prepared]] = []
    rows_left, lines_left = LARGEST // schema.stride, LARGEST // LINE
    for sample, value in samples.items():
        try:
            prepared = schema.prepare(value)
        except Misfit:
            continue
        if rows_left and prepared.tail_lines <= lines_left:
            rows_left, lines_left = rows_left - 1, lines_left - prepared.tail_lines
            fitting.append((sample, prepared))
    lines = np.array([prepared.tail_lines for _, prepared in fitting], np.int64)
    tails_at = len(fitting) * schema.stride
    memory = bytearray(tails_at + int(lines.sum()) * LINE)
    view = memoryview(memory)
    row_at, tail_at = 0, tails_at
    for sample, prepared in fitting:
        schema.write(memory, row_at, prepared, 0, tail_at)
        length = schema.stride - RECORD_HEADER + prepared.tail_bytes
        tail = view[tail_at : tail_at + prepared.tail_bytes] if prepared.tail_bytes else None
        crc = fmt.checksum(sample, length, 0, view[row_at + RECORD_HEADER : row_at + schema.stride], tail)
        RECORD.pack_into(memory, row_at, length, 0, crc)
        row_at += schema.stride
        tail_at += prepared.tail_lines * LINE
    ids = np.array([sample for sample, _ in fitting], np.int64)
    rows: Bytes = np.ndarray((len(fitting), schema.stride), np.uint8, memory)
    tails: Bytes = np.ndarray((int(lines.sum()), LINE), np.uint8, memory, tails_at)
    return ids, Records(np.zeros(len(ids), np.int64), lines, rows, tails)


def unpack(schema: Schema, lines: Longs, rows: Bytes, tails: Bytes) -> list[Any]:
    """Put samples together again, in memory of their own, all of one call in one piece.

    Args:
        schema: of the cache.
        lines: int64, of each record's tail.
        rows: uint8 of shape (records, stride).
        tails: uint8 of shape (sum of lines, 256).
    """
    memory = np.empty(rows.nbytes + tails.nbytes, np.uint8)
    memory[: rows.nbytes] = rows.reshape(-1)
    memory[rows.nbytes :] = tails.reshape(-1)
    if not len(rows):
        return []
    starts = rows.nbytes + (np.cumsum(lines) - lines) * LINE
    return schema.read(memory.data, 0, starts.tolist())
