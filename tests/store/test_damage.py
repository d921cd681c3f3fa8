"""Damage under a running program: whatever happens to records and words, it reads what its source gives."""

from __future__ import annotations

import itertools
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from helpers import equal_batches, rarely, recorded
from sources import Counting, ReadLog, Samples
from stores import store_of
from torch.utils.data import DataLoader

import hotset
from hotset import HotsetWarning
from hotset.session import sessions
from hotset.store import fsck
from hotset.store.format import (
    LINE,
    ON_DISK,
    OWN_FORM,
    RECORD_HEADER,
    ROW_MASK,
    TAIL,
    TAIL_COUNT_MASK,
    Live,
    split_tail,
    tail_word,
)
from hotset.store.segment import Segment
from hotset.store.store import Store

N = 60
MIB = 1 << 20


def small(i: int) -> dict[str, Any]:
    return {"x": np.arange(20) + i, "y": i}


def optional(i: int) -> dict[str, Any]:
    """Some samples have a form of their own."""
    return {"x": np.arange(20) + i, **({"more": f"{i}" * i} if i % 5 == 0 else {})}


class Flipping:
    """Turns bytes of the records in a file over, now here, now there, for as long as the block runs."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path, self._random = path, random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._flip)

    def _flip(self) -> None:
        segment = Segment.attach(str(self._path))
        geometry, live = segment.geometry, segment.live
        try:
            while not self._over.wait(5e-3):
                rows, lines = int(live[Live.ROWS_NEXT]), int(live[Live.LINES_NEXT])
                at = geometry.rows_at + self._random.randrange(max(rows, 1) * geometry.stride)
                if lines and self._random.random() < 0.3:
                    at = geometry.lines_at + self._random.randrange(lines * LINE)
                (byte,) = os.pread(segment.fd, 1, at)
                os.pwrite(segment.fd, bytes([byte ^ 1 << self._random.randrange(8)]), at)
        finally:
            segment.close()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize(
    ("make", "workers"),
    rarely(
        itertools.product(
            [small, samples.text, samples.ragged, samples.big_image_and_label, optional], [0, 1]
        ),
        *((make, 1) for make in (samples.text, samples.big_image_and_label, optional)),
    ),
)
def test_records_on_a_disk_that_are_damaged_at_any_time_are_read_again(
    make: Callable[[int], Any], workers: int, runtime: Path, tmp_path: Path
) -> None:
    """Also long after they were first read, and right."""
    disk = tmp_path / "disk"
    disk.mkdir()
    session = sessions.create("a", memory=0, spill=str(disk))
    collate = list
    expected = list(DataLoader(Samples(make, N), batch_size=6, collate_fn=collate))
    with recorded() as told, hotset.cache(Samples(make, N), session="a") as cached:
        loader = hotset.DataLoader(
            cached, batch_size=6, num_workers=workers, persistent_workers=workers > 0, collate_fn=collate
        )
        for _ in range(2):
            equal_batches(list(loader), expected)
        assert told == []
        assert cached.stats().spilled == N
        [path] = disk.glob("*/*.spill")
        with Flipping(path, seed=workers):
            epochs = 0
            while epochs < 6 or (not told and not workers):  # a worker says it on its own stderr
                equal_batches(list(loader), expected)
                epochs += 1
        for _ in range(2):  # what was damaged last is found, and stored again
            equal_batches(list(loader), expected)
        said = {str(one.message) for one in told}
        assert all("damaged on the disk" in sentence for sentence in said), said
        assert cached.stats().spilled == N
        assert cached.check() == []
    sessions.destroy(session)


def word_of_a_row_beyond(store: Store, at: int) -> None:
    store.segment.index[at] |= ROW_MASK


def word_of_a_tier_that_there_is_not(store: Store, at: int) -> None:
    store.segment.index[at] |= ON_DISK


def tail_beyond(store: Store, at: int) -> None:
    head(store, at)[0] = tail_word(store.segment.geometry.lines, 1)


def tail_before(store: Store, at: int) -> None:
    head(store, at)[0] = -1


def tail_of_gigabytes(store: Store, at: int) -> None:
    head(store, at)[0] |= TAIL_COUNT_MASK


def dimensions_of_terabytes(store: Store, at: int) -> None:
    row = int(store.segment.index[at] & ROW_MASK)
    begin = RECORD_HEADER + 8
    store.rows[row, begin : begin + 4] = 255


def head(store: Store, at: int) -> Any:
    row = int(store.segment.index[at] & ROW_MASK)
    return store.rows[row, RECORD_HEADER : RECORD_HEADER + 8].view(np.int64)


@pytest.mark.parametrize("single", [False, True], ids=["batches", "samples"])
@pytest.mark.parametrize(
    ("make", "damage"),
    [
        (small, word_of_a_row_beyond),
        (small, word_of_a_tier_that_there_is_not),
        *(
            (samples.ragged, damage)
            for damage in (
                word_of_a_row_beyond, word_of_a_tier_that_there_is_not, tail_beyond, tail_before,
                tail_of_gigabytes,
            )
        ),
        (optional, word_of_a_row_beyond),
        (optional, tail_beyond),
    ],
)  # fmt: skip
def test_words_in_memory_that_name_nothing_are_damage(
    make: Callable[[int], Any], damage: Callable[[Store, int], None], single: bool
) -> None:
    expected = [make(i) for i in range(N)]
    with hotset.cache(Samples(make, N), memory=MIB) as cached:
        loader = hotset.DataLoader(cached, batch_size=6, collate_fn=list)

        def read() -> list[Any]:
            if single:
                return [cached[i] for i in range(N)]
            return [sample for batch in loader for sample in batch]

        for _ in range(2):
            equal_batches(read(), expected)
        assert cached.stats().cached == N
        damage(store_of(cached), 10)  # in `optional`, one of its own form
        assert bool(store_of(cached).segment.index[10] & OWN_FORM) is (make is optional)
        with pytest.warns(HotsetWarning, match="sample 10 is damaged in memory"):
            equal_batches(read(), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                equal_batches(read(), expected)
        assert cached.stats().cached == N
        assert cached.check() == []


@pytest.mark.parametrize("single", [False, True])
def test_a_form_in_memory_that_cannot_be_read_costs_no_sample(single: bool) -> None:
    """As one that names a class which this process cannot import."""
    expected = [optional(i) for i in range(N)]
    with hotset.cache(Samples(optional, N), memory=MIB) as cached:
        cached.fill()
        store = store_of(cached)
        word = int(store.segment.index[10])
        assert word & OWN_FORM
        body = RECORD_HEADER + TAIL.size
        store.rows[word & ROW_MASK][body : body + 16] = 255
        with pytest.warns(HotsetWarning, match="Such samples are read from the source"):
            found = [cached[i] for i in range(N)] if single else cached.__getitems__(list(range(N)))
        equal_batches(found, expected)


@pytest.fixture
def on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A session's cache whose own file is on a disk, as its runtime folder is."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "run"))
    session = sessions.create("a", memory=MIB)
    with hotset.cache(Samples(samples.ragged, N), session="a") as cached:
        if store_of(cached).segment.trusted:
            pytest.skip("temporary files are in memory here")
        yield cached
    sessions.destroy(session)


def test_dimensions_that_a_disk_has_damaged_allocate_nothing(on_a_disk: Any) -> None:
    expected = [samples.ragged(i) for i in range(N)]
    for _ in range(2):
        equal_batches([on_a_disk[i] for i in range(N)], expected)
    dimensions_of_terabytes(store_of(on_a_disk), 10)
    with pytest.warns(HotsetWarning, match="sample 10 is damaged on the disk"):
        equal_batches([on_a_disk[i] for i in range(N)], expected)
    equal_batches([on_a_disk[i] for i in range(N)], expected)
    assert on_a_disk.check() == []


def test_a_file_on_a_disk_is_verified_again_now_and_then(
    on_a_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [samples.ragged(i) for i in range(N)]
    for _ in range(2):
        equal_batches([on_a_disk[i] for i in range(N)], expected)
    row = int(store_of(on_a_disk).segment.index[10] & ROW_MASK)
    place = int(store_of(on_a_disk).rows[row, RECORD_HEADER : RECORD_HEADER + 8].view(np.int64)[0])
    store_of(on_a_disk).lines[split_tail(place)[0], 3] ^= 1
    monkeypatch.setattr("hotset.store.verification._BELIEVED_SECONDS", 0.0)
    with pytest.warns(HotsetWarning, match="sample 10"):
        equal_batches([on_a_disk[i] for i in range(N)], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            equal_batches([on_a_disk[i] for i in range(N)], expected)
    assert on_a_disk.stats().cached == N, "it was read again, and kept"
    assert on_a_disk.check() == []


def test_a_record_that_was_stored_anew_is_verified_anew(on_a_disk: Any) -> None:
    expected = [samples.ragged(i) for i in range(N)]
    for _ in range(2):
        equal_batches([on_a_disk[i] for i in range(N)], expected)
    on_a_disk.clear()
    equal_batches([on_a_disk[i] for i in range(N)], expected)
    row = int(store_of(on_a_disk).segment.index[10] & ROW_MASK)
    place = int(store_of(on_a_disk).rows[row, RECORD_HEADER : RECORD_HEADER + 8].view(np.int64)[0])
    store_of(on_a_disk).lines[split_tail(place)[0], 3] ^= 1
    with pytest.warns(HotsetWarning, match="sample 10"):
        equal_batches([on_a_disk[i] for i in range(N)], expected)
    assert on_a_disk.check() == []


def test_a_spilled_record_that_is_damaged_is_read_again_and_kept(runtime: Path, tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "log")
    (tmp_path / "disk").mkdir()
    expected = [samples.ragged(i) for i in range(N)]
    with hotset.cache(Counting(samples.ragged, N, log), memory=0, spill=tmp_path / "disk") as cached:
        for _ in range(2):
            equal_batches([cached[i] for i in range(N)], expected)
        log.reset()
        store = store_of(cached)
        spill = store.spill
        row = int(spill.segment.index[10] & ROW_MASK)
        at = spill.segment.geometry.rows_at + row * spill.segment.geometry.stride
        os.pwrite(spill.segment.fd, b"damaged", at)
        with pytest.warns(HotsetWarning, match="sample 10 is damaged on the disk"):
            equal_batches([cached[i] for i in range(N)], expected)
        for _ in range(2):
            equal_batches([cached[i] for i in range(N)], expected)
        assert log.order() in ([10], [10, 10]), "for the use that found it, and to keep it"
        assert (cached.stats().cached, cached.stats().spilled) == (N, N)
        assert cached.check() == []


def test_a_process_that_has_closed_all_descriptors_takes_nothing_for_damaged(tmp_path: Path) -> None:
    """As one that becomes a daemon does."""
    dataset = [np.full(100_000, i) for i in range(20)]
    with hotset.cache(dataset, memory="4MiB", spill=tmp_path) as cached:
        cached.fill()
        before = cached.stats()
        assert before.spilled > 10
        child = os.fork()
        if not child:
            status = 1
            try:
                os.closerange(3, 4096)
                warnings.simplefilter("error")
                status = 0 if all((cached[i] == i).all() for i in range(20)) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        after = cached.stats()
        assert (after.cached, after.spilled) == (before.cached, before.spilled)
        assert cached.check() == []


@pytest.mark.parametrize("refilled", [0, 3])
def test_a_check_takes_nothing_for_damaged_that_is_cleared_meanwhile(
    refilled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = fsck.record_problem
    with hotset.cache([text * 300 for text in "abcdefgh"], memory="1MiB") as cached:
        cached.fill()

        def looked(segment: Segment, sample: int, word: int) -> str | None:
            found = look(segment, sample, word)
            if sample == len(cached) - 2:
                cached.clear()
                for index in range(refilled):
                    cached[index]
            return found

        monkeypatch.setattr(fsck, "record_problem", looked)
        assert cached.check() == []
        assert cached.stats().cached == refilled


@pytest.mark.parametrize("used_again", [False, True])
def test_the_check_and_the_statistics_need_no_descriptor(used_again: bool) -> None:
    dataset = [np.full(1000, i) for i in range(20)]
    with hotset.memo(abs, key="abs", memory="1MiB") as kept, hotset.cache(dataset, memory="1MiB") as cached:
        kept(-1)
        cached.fill()
        child = os.fork()
        if not child:
            status = 1
            try:
                kept(-1)
                os.closerange(3, 4096)
                others = [os.open(os.devnull, os.O_RDONLY) for _ in range(60 * used_again)]
                status = 0 if kept.stats().computed == 1 and kept.check() == cached.check() == [] else 2
                del others
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
