"""A peer in an interpreter of its own: measures itself once for each line that it reads.

Started by :mod:`benchmarks.outside` as ``python -m benchmarks.outside_child PEER ROWS.npy BATCH SECONDS``;
answers each line with one line of JSON, ``{"figure": samples a second, "holds": bool}`` or
``{"unfit": why}``, and ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Epochs
from benchmarks.truth import RowTruth, WrongData

Epoch = Callable[[], Iterable[Any]]
Array = npt.NDArray[Any]

# Its Loader's own: three batches ahead, and a worker thread for every core.
_FFCV_DEFAULTS = ("3", "-1")


def ffcv(rows: Array, file: Path, batch_size: int, ahead: int, workers: int) -> Epoch:
    """FFCV over raw arrays, its file in the page cache."""
    import torch
    from ffcv.fields import IntField, NDArrayField  # type: ignore[import-not-found]
    from ffcv.fields.decoders import IntDecoder, NDArrayDecoder  # type: ignore[import-not-found]
    from ffcv.loader import Loader, OrderOption  # type: ignore[import-not-found]
    from ffcv.transforms import ToTensor  # type: ignore[import-not-found]
    from ffcv.writer import DatasetWriter  # type: ignore[import-not-found]

    class Rows:
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, i: int) -> tuple[Array, int]:
            return rows[i], i

    torch.set_num_threads(1)
    fields = {"x": NDArrayField(rows.dtype, rows.shape[1:]), "y": IntField()}
    DatasetWriter(str(file), fields, num_workers=1).from_indexed_dataset(Rows())
    made = Loader(
        str(file),
        batch_size=batch_size,
        num_workers=workers,
        batches_ahead=ahead,
        os_cache=True,
        order=OrderOption.RANDOM,
        drop_last=False,
        pipelines={"x": [NDArrayDecoder(), ToTensor()], "y": [IntDecoder(), ToTensor()]},
    )
    return lambda: made


def tf_data(rows: Array, batch_size: int) -> Epoch:
    """tf.data over rows in memory, cached, shuffled whole, and prefetched."""
    import tensorflow as tf  # type: ignore[import-untyped]

    samples = tf.data.Dataset.from_tensor_slices((rows, np.arange(len(rows))))
    batched = samples.cache().shuffle(len(rows)).batch(batch_size).prefetch(tf.data.AUTOTUNE)
    return lambda: batched


def open_peer(peer: str, path: Path, batch_size: int) -> tuple[Epoch, Array]:
    """Return how ``peer`` begins an epoch, and the rows.

    ``peer`` is ``tf.data``, ``ffcv`` with its defaults, or ``ffcv:BATCHES_AHEAD:WORKERS``.
    """
    rows = np.load(path)
    if peer == "tf.data":
        return tf_data(rows, batch_size), rows
    ahead, workers = map(int, peer.split(":")[1:] or _FFCV_DEFAULTS)
    return ffcv(rows, path.with_name(f"{peer}.beton"), batch_size, ahead, workers), rows


def main() -> None:
    peer, path, batch_size, seconds = sys.argv[1:5]
    # The libraries print what they like; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**content: object) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        epoch, rows = open_peer(peer, Path(path), int(batch_size))
    except ImportError as missing:
        sys.stdin.readline()
        answer(unfit=f"not installed ({missing.name}; see --peer-python)")
        return
    measure = Epochs(epoch, RowTruth(rows), float(seconds))
    for _ in sys.stdin:
        try:
            answer(figure=measure(), holds=measure.holds)
        except WrongData as wrong:
            answer(unfit=str(wrong))


if __name__ == "__main__":
    main()
