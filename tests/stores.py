"""A store to play with: what the tests of the bytes share."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from helpers import difference

from hotset.dataset.dataset_proxy import current_of
from hotset.store.claims import Ids
from hotset.store.format import PRESENT, Live
from hotset.store.leaves.schema import Schema
from hotset.store.ring import attach_store
from hotset.store.segment import Address
from hotset.store.store import Store

Make = Callable[[int], Any]


def ids(*numbers: int | Iterable[int]) -> npt.NDArray[np.int64]:
    """Sample numbers as the store takes them: ``ids(3, range(5, 8))``."""
    found: list[int] = []
    for number in numbers:
        found += [number] if isinstance(number, int) else number
    return np.array(found, np.int64)


def store_of(cached: Any) -> Store:
    """The store behind a cached dataset, which has one."""
    store = current_of(cached).store
    assert store is not None
    return store


@contextlib.contextmanager
def opened(
    make: Make,
    n: int,
    limit: int = 1 << 24,
    *,
    first: Iterable[int] = (0, 1),
    path: Path | str | None = None,
    keep_order: bool = True,
) -> Iterator[Store]:
    """An empty store of ``n`` samples ``make(i)``, whose schema comes from the samples ``first``."""
    schema = Schema.infer([make(i) for i in first], keep_order=keep_order)
    where = None if path is None else str(path)
    with contextlib.closing(Store.create(schema, n, limit, about={"name": "test"}, path=where)) as store:
        yield store


@contextlib.contextmanager
def attached(where: Store | Address | Path | str) -> Iterator[Store]:
    """Another view of a store, with its own membership: what another process has."""
    if isinstance(where, Store):
        where = where.segment.address
    with contextlib.closing(attach_store(str(where) if isinstance(where, Path) else where)) as store:
        yield store


class _Telling(np.ndarray):  # type: ignore[type-arg]
    """Live words that tell when the clear generation is counted up."""

    tell: Callable[[], object] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)  # type: ignore[no-untyped-call]
        tell, self.tell = self.tell, None
        if key == Live.CLEAR_GENERATION and tell is not None:
            tell()


def clear_and_meanwhile(store: Store, act: Callable[[], object]) -> None:
    """Clear a store, and do something in its midst, with the clear generation new and the words still old."""
    before, live = store.segment.live, store.segment.live.view(_Telling)
    live.tell = act
    store.segment.live = live
    assert store.clear()
    store.segment.live = before


def stored(store: Store, wanted: Ids | None = None) -> dict[int, Any]:
    """The samples that the store holds, as it gives them out one by one."""
    found = {}
    for sample in (np.arange(len(store)) if wanted is None else wanted).tolist():
        if store.present(ids(sample)).all():
            samples = store.read(ids(sample))
            assert samples is not None
            found[sample] = samples[0]
    return found


def count(store: Store) -> int:
    """How many samples the store holds."""
    return int((store.segment.index >= PRESENT).sum())


def wrong(found: dict[int, Any], make: Make) -> dict[int, str]:
    """Of these samples, those that are not what ``make`` gives, and how they differ."""
    found = {sample: difference(value, make(sample)) for sample, value in found.items()}
    return {sample: sentence for sample, sentence in found.items() if sentence is not None}


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pause(seconds: float) -> None:
    """Let a time of the library's own go by, such as the half second after which it looks for room again."""
    time.sleep(seconds)
