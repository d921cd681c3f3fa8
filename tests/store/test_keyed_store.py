"""The keyed store: each key finds its own value or none, whatever is added, replaced, given up, or killed."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import eventually, often
from kills import child, ended, kill

from hotset.errors import SegmentError
from hotset.store.body_writer import Unfilled
from hotset.store.key_table import EVICTABLE
from hotset.store.keyed_store import MISSING, KeyedStore
from hotset.store.spill import SpillTo
from hotset.store.store import Store


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") + (number * 0x9E3779B97F4A7C15 & (1 << 64) - 1).to_bytes(8, "little")


@contextlib.contextmanager
def keyed(limit: int = 1 << 20, **options: Any) -> Iterator[KeyedStore]:
    store = KeyedStore.make(limit, about={"name": "results"}, **options)
    try:
        yield store
        assert store.check() == []
    finally:
        store.close()


def value_of(number: int, version: int = 0) -> np.ndarray[Any, Any]:
    """A value whose every byte says whose it is; of a size that depends on it."""
    return np.full(500 + 700 * (number % 13), (31 * number + version) % 251, np.uint8)


def keep(store: KeyedStore, number: int, function: int, version: int = 0) -> bool:
    sample = store.keys.add(key(number), function)
    return store.claim(sample, version) and store.put(sample, version, function, value_of(number, version))


def test_keys_are_found_through_all_levels_of_the_table() -> None:
    with keyed(64 << 20) as store:
        function = store.keys.enter("f", bytes(16), 0)
        for number in range(often(3000, 60_000)):
            assert store.keys.add(key(number), function) == number
            assert store.keys.add(key(number), function) == number
            assert store.keys.find(key(number // 2)) == number // 2
            assert store.keys.find(key(number + 1)) == -1


def test_keys_that_begin_alike_are_told_apart() -> None:
    """All in one chain of the hash table: its low half decides where a key is looked for."""
    with keyed() as store:
        function = store.keys.enter("f", bytes(16), 0)
        same_low = [number.to_bytes(8, "little") + bytes(8) for number in range(200)]
        assert [store.keys.add(one, function) for one in same_low] == list(range(200))
        assert [store.keys.find(one) for one in same_low] == list(range(200))


def test_when_all_places_for_keys_are_taken_further_keys_have_none() -> None:
    with keyed(1 << 16) as store:
        function = store.keys.enter("f", bytes(16), 0)
        count = len(store)
        rows = store.keys.rows()
        # As if so many had come: adding them one by one takes half a second.
        for number in range(count):
            assert store.keys.add(key(number), function) == number
        assert store.keys.add(key(count), function) == -1
        assert store.keys.find(key(count - 1)) == count - 1
        assert len(rows) == count


def test_a_version_is_served_to_those_who_ask_for_it() -> None:
    with keyed() as store:
        function = store.keys.enter("f", bytes(16), 0)
        assert keep(store, 5, function, 1)
        assert store.get(0, 2) is MISSING
        assert (store.get(0, 1) == value_of(5, 1)).all()
        assert not keep(store, 5, function, 1), "it is there"
        assert keep(store, 5, function, 2)
        assert store.get(0, 1) is MISSING
        assert (store.get(0, 2) == value_of(5, 2)).all()


def test_functions_are_entered_once_with_their_flags_and_counters() -> None:
    with keyed() as store:
        one, other = store.keys.enter("f", b"1" * 16, 0), store.keys.enter("f" * 500, b"2" * 16, EVICTABLE)
        assert store.keys.enter("f", b"1" * 16, EVICTABLE) == one
        assert [(each.name, each.flags) for each in store.keys.functions()] == [
            ("f", EVICTABLE),
            ("f" * 224, EVICTABLE),
        ]
        counters = store.keys.counters(other)
        assert counters is not None
        counters[0] += 3
        assert (store.keys.counted(one)[0], store.keys.counted(other)[0]) == (0, 3)
        assert store.keys.set_flag(one, 1 << 8)
        assert not store.keys.set_flag(one, 1 << 8)
        for number in range(1100):
            store.keys.enter(f"g{number}", number.to_bytes(16, "little"), 0)
        assert len(store.keys.functions()) == 1024


def test_flags_never_look_as_if_they_were_not_set() -> None:
    ends = 1 << 8
    with keyed() as store:
        number = store.keys.enter("f", b"1" * 16, EVICTABLE)

        def watch() -> None:
            while not (flags := store.keys.flags(number)) & ends:
                assert flags == EVICTABLE

        pid = child(watch)
        for _ in range(often(20_000, 200_000)):
            store.keys.enter("f", b"1" * 16, EVICTABLE)
        store.keys.set_flag(number, ends)
        assert ended(pid) == 0


def test_a_cleared_store_is_empty_and_can_be_used_again() -> None:
    with keyed() as store:
        function = store.keys.enter("f", bytes(16), 0)
        for number in range(600):
            keep(store, number, function)
        assert store.clear()
        assert store.keys.find(key(3)) == -1
        assert store.keys.functions() == []
        function = store.keys.enter("f", bytes(16), 0)
        for number in range(600, 700):
            assert keep(store, number, function)
        assert store.keys.find(key(3)) == -1
        assert (store.get(store.keys.find(key(650)), 0) == value_of(650)).all()


def test_a_datasets_cache_and_functions_results_are_not_taken_for_each_other(tmp_path: Path) -> None:
    to = SpillTo(str(tmp_path))
    with (
        keyed() as store,
        contextlib.closing(Store.create(store.schema, 10, 1 << 20, about={}, spill=to)) as other,
    ):
        files = set(os.listdir("/proc/self/fd"))
        with pytest.raises(SegmentError, match="holds a dataset"):
            KeyedStore.attach(other.segment.address)
        gc.collect()  # the error's traceback, which refers to the mappings
        assert set(os.listdir("/proc/self/fd")) <= files  # neither tier of it stays open


@pytest.mark.parametrize("size", [0, 100, 64 << 10, 300_000])
def test_a_value_is_kept_whose_bytes_come_in_strips(size: int, tmp_path: Path) -> None:
    content = np.random.default_rng(size).bytes(size)

    def unfilled(*, more: bytes = b"") -> Unfilled:
        array, given = np.empty(size, np.uint8), content + more
        return Unfilled((array, 7), array, lambda: (given[i : i + 9999] for i in range(0, len(given), 9999)))

    for limit, options in ((4 << 20, {}), (4096, {"spill": SpillTo(str(tmp_path))})):
        with keyed(limit, **options) as store:
            function = store.keys.enter("strips", bytes(16), 0)
            sample, other = (store.keys.add(key(number), function) for number in (1, 2))
            assert store.claim(sample, 0)
            assert store.put(sample, 0, function, unfilled())
            found = store.get(sample, 0)
            assert found[0].tobytes() == content
            assert found[1] == 7
            assert store.claim(other, 0)
            with pytest.raises(ValueError, match="bytes was given"):
                store.put(other, 0, function, unfilled(more=b"more"))
            store.release(other)
            assert store.get(other, 0) is MISSING
    assert unfilled().filled()[0].tobytes() == content


def test_random_work_with_too_little_room_never_returns_another_value() -> None:
    """Values of many sizes are added, replaced and given up; each that is found is the wanted one."""
    draw = random.Random(7)
    with keyed(200_000) as store:
        function = store.keys.enter("f", bytes(16), EVICTABLE)
        versions: dict[int, int] = {}
        found = 0
        for _ in range(often(3000, 50_000)):
            number = draw.randrange(120)
            if draw.random() < 0.05:
                versions[number] = versions.get(number, 0) + 1
            version = versions.get(number, 0)
            sample = store.keys.find(key(number))
            value = store.get(sample, version) if sample >= 0 else MISSING
            if value is MISSING:
                keep(store, number, function, version)
            else:
                found += 1
                assert (value == value_of(number, version)).all()
                assert len(value) == len(value_of(number))
        assert found > 100
        assert store.held(function)[1] <= 200_000


def test_the_room_of_one_large_value_among_thousands_that_stay_is_found_once_it_is_free() -> None:
    with keyed(4 << 20) as store:
        small, large = (store.keys.enter(name, name.encode() * 16, 0) for name in "sl")

        def keep_of(function: int, number: int, size: int) -> bool:
            sample = store.keys.add(key(number), function)
            return store.claim(sample, 0) and store.put(sample, 0, function, np.zeros(size, np.uint8))

        numbers = iter(range(1 << 20))
        for _ in range(1001):
            keep_of(small, next(numbers), 700)
        assert keep_of(large, next(numbers), 1 << 20)
        while keep_of(small, next(numbers), 700):
            pass
        assert store.forget(large) == 1
        store.allocator.reopen()
        assert keep_of(large, next(numbers), 1 << 20)


def test_readers_never_see_a_value_that_is_half_given_up() -> None:
    with keyed(100_000) as store:
        function = store.keys.enter("f", bytes(16), EVICTABLE)
        wrong: list[int] = []
        done = threading.Event()
        other = KeyedStore.attach(store.segment.address)

        def read() -> None:
            while not done.is_set():
                for number in range(60):
                    sample = other.keys.find(key(number))
                    value = other.get(sample, 0) if sample >= 0 else MISSING
                    if value is not MISSING and not np.array_equal(value, value_of(number)):
                        wrong.append(number)

        reader = threading.Thread(target=read)
        reader.start()
        end = time.monotonic() + often(1, 20)
        while time.monotonic() < end:
            for number in range(60):
                keep(store, number, function)
        done.set()
        reader.join()
        other.close()
        assert wrong == []


def _work(store: KeyedStore, function: int, seed: int) -> None:
    draw = random.Random(seed)
    while True:
        number = draw.randrange(80)
        sample = store.keys.find(key(number))
        value = store.get(sample, 0) if sample >= 0 else MISSING
        if value is MISSING:
            keep(store, number, function)
        elif not np.array_equal(value, value_of(number)):
            raise AssertionError(f"{number} is not its own value")


def test_killed_processes_leave_nothing_wrong_and_hold_nobody_up() -> None:
    with keyed(300_000) as store:
        function = store.keys.enter("f", bytes(16), EVICTABLE)
        draw = random.Random(3)
        workers = [child(lambda seed=seed: _work(store, function, seed)) for seed in range(3)]  # type: ignore[misc]
        for round_ in range(often(30, 500)):
            time.sleep(draw.random() * 0.02)
            kill(workers[0])
            workers = [*workers[1:], child(lambda seed=round_: _work(store, function, 100 + seed))]  # type: ignore[misc]
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        for number in range(80):
            assert eventually(
                lambda number=number: (  # type: ignore[misc]
                    keep(store, number, function),
                    np.array_equal(store.get(store.keys.find(key(number)), 0), value_of(number)),
                )[1],
                within=10,
            )


def test_a_worker_that_meets_a_wrong_value_is_noticed() -> None:
    """The loop above finds what it is there to find."""
    with keyed() as store:
        function = store.keys.enter("f", bytes(16), 0)
        sample = store.keys.add(key(1), function)
        assert store.claim(sample, 0)
        assert store.put(sample, 0, function, value_of(2))

        def once() -> None:
            _work(store, function, 1)

        assert ended(child(once)) == 1
        store.forget(function)
