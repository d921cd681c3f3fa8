"""A job that uses a session: ``python -m benchmarks.session_job`` answers these questions.

========= ====================================================================================================
hello     nothing: it has started, and imported what it needs
second    attach to a cache that is full, map its pages first if so asked, and run epochs: how long each took
train     cache photographs, in a session or for this job alone or not at all, and run epochs: how long in all
========= ====================================================================================================
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import hotset
from benchmarks.data import Generated, Photographs, Sample
from benchmarks.harness import Unfit
from benchmarks.jobs import serve
from benchmarks.truth import WrongData
from hotset.session import sessions
from hotset.store.format import Live

__all__ = ["BATCH", "CountedPhotographs", "answer", "new_session"]

BATCH = 64


@contextlib.contextmanager
def new_session(memory: int | None = None, spill: Path | None = None) -> Iterator[str]:
    """The name of a session that is destroyed in the end; see :func:`hotset.session.sessions.create`."""
    name = f"bench-{secrets.token_hex(4)}"
    made = sessions.create(name, memory=memory, spill=None if spill is None else str(spill))
    try:
        yield name
    finally:
        sessions.destroy(made)


class CountedPhotographs(Photographs):
    """Photographs, each of whose readings adds a byte to a file."""

    def __init__(self, files: Sequence[Path], log: Path) -> None:
        super().__init__(files)
        # By this name it is no part of what the samples are: the file changes with every reading.
        self._hotset_log = str(log)

    def __getitem__(self, i: int) -> Sample:
        fd = os.open(self._hotset_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, b".")
        os.close(fd)
        return super().__getitem__(i)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Do what a question asks for; the kinds are in the module's table."""
    asked = question.pop("do")
    if asked == "hello":
        return {}
    return _second(**question) if asked == "second" else _train(**question)


def _second(session: str, count: int, ahead: bool, later: int) -> dict[str, Any]:
    dataset = Generated(count)
    start = time.perf_counter()
    cached = hotset.cache(dataset, session=session)
    attaching = time.perf_counter() - start
    misses = cached.stats().misses
    assert cached.store is not None
    segment = cached.store.segment
    geometry = segment.geometry
    mapped = int(segment.live[Live.ROWS_NEXT]) * geometry.stride
    start = time.perf_counter()
    if ahead:
        segment.populate(geometry.rows_at, mapped)
    mapping = time.perf_counter() - start if ahead else 0.0
    loader = hotset.DataLoader(cached, batch_size=BATCH, shuffle=True)
    faults = _faults()
    first, last = _epoch(loader)
    faults = _faults() - faults
    epochs = [_epoch(loader)[0] for _ in range(later)]
    if cached.stats().misses != misses:
        raise Unfit("samples came from the source")
    for picture, i in zip(last[0], last[1].tolist(), strict=True):
        if not torch.equal(picture, dataset[i][0]):
            raise WrongData(f"sample {i} differs from its original")
    cached.close()
    return {
        "attaching": attaching,
        "mapping": mapping,
        "mapped": mapped,
        "first": first,
        "later": epochs,
        "faults": faults,
    }


def _train(session: str | None, caches: bool, folder: str, log: str, epochs: int) -> dict[str, Any]:
    dataset: Any = CountedPhotographs(sorted(Path(folder).rglob("*.jpg")), Path(log))
    start = time.perf_counter()
    if caches:
        dataset = hotset.cache(dataset, session=session)
    loader = (hotset if caches else torch.utils.data).DataLoader(dataset, batch_size=BATCH, shuffle=True)
    last = None
    for _ in range(epochs):
        _, last = _epoch(loader)
    seconds = time.perf_counter() - start
    assert last is not None
    original = Photographs(sorted(Path(folder).rglob("*.jpg")))
    for picture, i in zip(last[0][:2], last[1][:2].tolist(), strict=True):
        if not torch.equal(picture, original[i][0]):
            raise WrongData(f"sample {i} differs from its original")
    if caches:
        dataset.close()
    return {"seconds": seconds}


def _epoch(loader: Any) -> tuple[float, Any]:
    """Seconds of an epoch, and its last batch."""
    count, batch = 0, None
    start = time.perf_counter()
    for batch in loader:
        count += len(batch[1])
    elapsed = time.perf_counter() - start
    if count != len(loader.dataset):
        raise WrongData(f"an epoch of {count} samples")
    return elapsed, batch


def _faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
