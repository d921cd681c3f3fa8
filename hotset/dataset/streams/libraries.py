"""What hotset knows of streams of libraries: how one is begun, and what orders it besides its content.

======================  ==================================================================================
torchdata's nodes       iterators that ``reset()`` begins anew; they do not divide themselves among workers
WebDataset              its stages are a list, and its shuffles may be left out of a copy
Hugging Face            a stream may hold one rank's share; an epoch changes the order alone
MosaicML's streaming    counts its epochs, by which it shuffles, in memory that all of its processes share
======================  ==================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from hotset.determinism.objects.code_dependencies import package_of

__all__ = [
    "batch_size_of",
    "draws_from_clock",
    "epoch_kept",
    "has_shuffle",
    "is_hugging_face",
    "is_node",
    "may_reorder",
    "run",
    "without_order",
]


def run(stream: Any) -> Iterator[Any]:
    """Begin the stream once more, as torch's loader would; a node of torchdata from its beginning."""
    if is_node(stream):
        stream.reset()
    return iter(stream)


def is_node(stream: Any) -> bool:
    """Whether a stream is an iterator that ``reset()`` begins anew, as the nodes of torchdata are.

    An ``IterableDataset`` with such a method is none: torch's loader begins it by ``iter`` alone.
    """
    return (
        isinstance(stream, Iterator) and hasattr(stream, "reset") and not isinstance(stream, IterableDataset)
    )


@contextlib.contextmanager
def epoch_kept(stream: Any) -> Iterator[None]:
    """Let runs of MosaicML's stream count for nothing; a copy of it would share its count of epochs."""
    if not _is_of("streaming", stream) or not hasattr(stream, "next_epoch"):
        yield
        return
    epoch = stream.next_epoch
    try:
        yield
    finally:
        stream.next_epoch = epoch


def without_order(stream: Any) -> Any:
    """A stream's content: a copy without WebDataset's shuffles, and without one rank's share of it."""
    stages = getattr(stream, "pipeline", None)
    if isinstance(stages, list) and _is_of("webdataset", stream):
        plain = _shallow(stream)
        plain.pipeline = [stage for stage in stages if not _is_shuffle(stage)]
        if hasattr(plain, "seed"):
            plain.seed = 0
        return plain
    if _is_of("datasets", stream) and hasattr(stream, "_distributed"):
        plain = _shallow(stream)
        plain._distributed = None
        plain._epoch = 0
        for attribute in vars(plain):
            if attribute.endswith("_hffs_cache"):  # file systems, which each process names otherwise
                setattr(plain, attribute, {})
        return plain
    return stream


def _shallow(stream: Any) -> Any:
    """A shallow copy. Not by ``copy.copy``: a ``__setstate__`` may have two objects share their
    attributes.
    """
    plain = object.__new__(type(stream))
    plain.__dict__.update(stream.__dict__)
    return plain


def has_shuffle(stream: Any) -> bool:
    """Whether WebDataset shuffles it, which the copy that is looked at does not.

    ``shardshuffle=False`` makes a shuffle, too, of one shard at a time.
    """
    stages = getattr(stream, "pipeline", None)
    return isinstance(stages, list) and any(
        _is_shuffle(stage) and _buffer_size(stage) > 1 for stage in stages
    )


def draws_from_clock(stream: Any) -> bool:
    """Whether a shuffle of WebDataset's has no seed: it draws each run's order from the time."""
    stages = getattr(stream, "pipeline", None)
    given = [getattr(stage, "kw", {}) for stage in stages or () if _is_shuffle(stage) and hasattr(stage, "f")]
    return isinstance(stages, list) and any(each.get("seed") is None for each in given)


def batch_size_of(stream: Any) -> int:
    """How many samples the stream says that it puts into each item; 0 if it says nothing.

    Its items do not tell: tokens and their labels, or the steps of a trajectory, have one length, too.
    """
    stages = getattr(stream, "pipeline", None)
    for each in (*(stages if isinstance(stages, list) else ()), stream):
        if getattr(getattr(each, "f", None), "__name__", "") == "_batched":
            return int(each.args[0])
        said = getattr(each, "batch_size", 0)  # a loader may be a stage, too
        if said and isinstance(said, int):
            return said
    return 0


def _buffer_size(stage: Any) -> int:
    """How many samples or shards one of WebDataset's shuffles draws from."""
    given = {**vars(stage), **getattr(stage, "kw", {})}
    return int((*getattr(stage, "args", ()), given.get("bufsize", 1000))[0] or 0)


def may_reorder(stream: Any) -> bool:
    """Whether ``set_epoch`` may give the samples another order.

    Not in Hugging Face's, if nothing there shuffles; but newer versions (5) shuffle shards in each epoch.
    """
    if not is_hugging_face(stream):
        return hasattr(stream, "set_epoch")
    if getattr(stream, "num_shards", 1) > 1 and not hasattr(stream, "_shuffling"):
        return True
    left = [getattr(stream, "_ex_iterable", None)]
    while left:
        node = left.pop()
        if "Shuffled" in type(node).__name__ or "Random" in type(node).__name__:
            return True
        parts = [getattr(node, "ex_iterable", None), *(getattr(node, "ex_iterables", None) or ())]
        left.extend(part for part in parts if part is not None)
    return False


def is_hugging_face(stream: Any) -> bool:
    """Whether it is a stream of Hugging Face's ``datasets``, in which an epoch changes the order alone."""
    return _is_of("datasets", stream)


def _is_shuffle(stage: Any) -> bool:
    function: Callable[..., Any] | None = getattr(stage, "f", None)
    return type(stage).__name__ == "detshuffle" or getattr(function, "__name__", "") == "_shuffle"


def _is_of(package: str, thing: object) -> bool:
    return package in map(package_of, type(thing).__mro__)
