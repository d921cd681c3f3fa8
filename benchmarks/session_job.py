"""A job that uses a session: ``python -m benchmarks.session_job`` answers these questions.

========= ====================================================================================================
hello     nothing: it has started, and imported what it needs
second    attach to a cache that is full, map its pages first if so asked, and run epochs: how long each took
train     cache photographs, in a session or for this job alone or not at all, and run epochs: how long in all
========= ====================================================================================================
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hotset
from benchmarks.data import Counted, Generated, Photographs
from benchmarks.jobs import serve
from benchmarks.reader import Reader, map_ahead
from benchmarks.truth import WrongData
from hotset.session import sessions

__all__ = ["BATCH", "answer", "new_session"]

BATCH = 64


@contextlib.contextmanager
def new_session(memory: int | None = None, spill: Path | None = None) -> Iterator[str]:
    """The name of a session that is destroyed in the end; see :func:`hotset.session.sessions.create`."""
    name = f"bench-{secrets.token_hex(4)}"
    # It expires also where this process is killed.
    made = sessions.create(name, ttl=3600.0, memory=memory, spill=None if spill is None else str(spill))
    try:
        yield name
    finally:
        sessions.destroy(made)


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
    mapping = map_ahead(cached, ahead)
    reader = Reader(cached, BATCH)
    first, *rest = (reader.epoch() for _ in range(1 + later))
    cached.close()
    return {
        "attaching": attaching,
        "mapping": mapping.seconds,
        "mapped": mapping.size,
        "first": first.seconds,
        "later": [epoch.seconds for epoch in rest],
        "faults": first.faults,
    }


def _train(session: str | None, caches: bool, folder: str, log: str, epochs: int) -> dict[str, Any]:
    original = Photographs(sorted(Path(folder).rglob("*.jpg")))
    dataset: Any = Counted(original, Path(log))
    start = time.perf_counter()
    if caches:
        dataset = hotset.cache(dataset, session=session)
    loader = (hotset if caches else torch.utils.data).DataLoader(dataset, batch_size=BATCH, shuffle=True)
    last: Any = None
    for _ in range(epochs):
        count = 0
        for last in loader:
            count += len(last[1])
        if count != len(dataset):
            raise WrongData(f"an epoch of {count} samples")
    seconds = time.perf_counter() - start
    for picture, i in zip(last[0][:2], last[1][:2].tolist(), strict=True):
        if not torch.equal(picture, original[i][0]):
            raise WrongData(f"sample {i} differs from its original")
    if caches:
        dataset.close()
    return {"seconds": seconds}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
