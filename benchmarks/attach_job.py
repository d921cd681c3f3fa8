"""What the second process does with a warm cache in the benchmark "attach".

It is spawned, not forked: nothing is mapped in it that it has not mapped itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from benchmarks.reader import Epoch, Mapping, Reader, map_ahead

__all__ = ["Answer", "second"]


class Answer(NamedTuple):
    """What the second process measured: the mapping, its first epoch and its second."""

    mapping: Mapping
    epochs: tuple[Epoch, Epoch]


def second(cached: Any, batch: int, ahead: bool, answers: Any) -> None:
    """Map the rows first if ``ahead``, run two epochs, and send an :class:`Answer` down the pipe ``answers``.

    What breaks it is sent instead.
    """
    torch.set_num_threads(1)
    try:
        mapping = map_ahead(cached, ahead)
        reader = Reader(cached, batch)
        answers.send(Answer(mapping, (reader.epoch(), reader.epoch())))
        cached.close()
    except Exception as error:
        answers.send(error)
