"""Arrow tables, and Hugging Face datasets made of them: described by content, or by the file that is mapped.

======================  ===========================================================================
what                    is described by
======================  ===========================================================================
table, column, batch    what Arrow would write of it to a stream: schema, and the values of its rows;
                        the files that texts in them name
table over large files  schema, the files (path, size, date), where in them each buffer lies, and the
                        first and the last row
dataset of `datasets`   the table, the indices that select from it, features, format, own attributes
======================  ===========================================================================

Pickling does not serve: it writes the memory behind a slice instead of the slice, and counts of missing
values that Arrow fills in once a program asks for them. The ``_fingerprint`` of a Hugging Face dataset does
not serve either: it is random where `datasets` could not hash a function, and two different fingerprints may
stand for the same rows.

This module imports neither library: a handler runs only for an object of theirs.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hotset.determinism.fingerprint.content_hash import READ_WHOLE, digest_of_bytes, mapped_files
from hotset.determinism.fingerprint.data_files import OfArrow
from hotset.determinism.fingerprint.describe import Describer, Handler, by_parts
from hotset.determinism.objects.object_graph import attributes

__all__ = ["OF_ARROW"]

# Attributes of a Hugging Face dataset that do not decide what a sample is. Its features are part of `_info`.
_NO_CONTENT = frozenset({"_data", "_indices", "_info", "_split", "_fingerprint"})
_SMALL = 1 << 16


class _Described:
    """A file for Arrow to write to, which describes the bytes and keeps none of them."""

    closed = False

    def __init__(self, to: Describer) -> None:
        self._to = to

    def write(self, data: Any) -> int:
        size = len(data)
        self._to.count(size)
        self._to.put(data if size <= _SMALL else digest_of_bytes(np.frombuffer(data, np.uint8)))
        return size

    def flush(self) -> None:
        pass


def _table(to: Describer, table: Any) -> None:
    to.put(b"R")
    to.add(type(table))
    types = sys.modules["pyarrow"].types
    for column in table.flatten().columns:  # also the paths in `datasets`' columns of images
        if types.is_string(column.type) or types.is_large_string(column.type):
            to.files.add_column(OfArrow(column))
    files = _files_behind(table)
    if files is None:
        _write(to, table)
    else:
        to.put(b"f")
        to.add(files, [(chunk.offset, len(chunk)) for column in table.columns for chunk in column.chunks])
        _write(to, table.slice(0, 1))
        _write(to, table.slice(max(table.num_rows - 1, 0), 1))


def _write(to: Describer, table: Any) -> None:
    arrow = sys.modules["pyarrow"]
    sink = arrow.PythonFile(_Described(to), mode="w")
    with arrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)


def _files_behind(table: Any) -> list[tuple[Any, ...]] | None:
    """For each buffer the range of the file that it maps; None if the table is small, or not mapped."""
    buffers = [
        buffer
        for column in table.columns
        for chunk in column.chunks
        for buffer in chunk.buffers()
        if buffer is not None and buffer.size
    ]
    if sum(buffer.size for buffer in buffers) <= READ_WHOLE:
        return None
    found = mapped_files([(buffer.address, buffer.size) for buffer in buffers])
    if found is None:
        return None
    return [(*file, buffer.size) for file, buffer in zip(found, buffers, strict=True)]


def _column(to: Describer, column: Any) -> None:
    to.put(b"c")
    to.add(type(column))
    _table(to, sys.modules["pyarrow"].Table.from_arrays([column], names=["column"]))


def _batch(to: Describer, batch: Any) -> None:
    to.put(b"b")
    to.add(type(batch))
    _table(to, sys.modules["pyarrow"].Table.from_batches([batch]))


def _dataset(to: Describer, dataset: Any) -> None:
    to.put(b"H")
    to.add(type(dataset), dataset._data, dataset._indices, dataset._info.features)
    to.add({name: part for name, part in attributes(dataset).items() if name not in _NO_CONTENT})


OF_ARROW: dict[type | str, Handler] = {
    "pyarrow.lib.Table": _table,
    "pyarrow.lib.RecordBatch": _batch,
    "pyarrow.lib.Array": _column,
    "pyarrow.lib.ChunkedArray": _column,
    "datasets.table.Table": by_parts(b"h", lambda table: [table.table]),
    "datasets.arrow_dataset.Dataset": _dataset,
}
