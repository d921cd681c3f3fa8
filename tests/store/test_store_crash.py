"""What must not happen to a store: torn, stale or damaged samples, and a process's death that others feel.

Deaths are real: a forked child sends itself SIGKILL at a point between two stores, and those who are left
must find nothing wrong, fill what is missing, and read what is right. Which points? The named ones of a
sample's way into the store, and besides, wherever a line of the store's code begins.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import difference, often, rarely, recorded
from kills import child, die, dying, ended, in_child
from stores import attached, clear_and_meanwhile, count, ids, opened, stored, wrong

import hotset.store
from hotset import HotsetWarning
from hotset.store.allocator import Allocator
from hotset.store.claims import Claims, Participant
from hotset.store.fill import Filler
from hotset.store.format import PRESENT, Live, Slot
from hotset.store.leaves.array_leaf import ArrayLeaf
from hotset.store.leaves.schema import Schema
from hotset.store.records import Records
from hotset.store.segment import Segment
from hotset.store.store import Store

N = 12
ROOT = Path(__file__).parents[2]


def sample(i: int) -> dict[str, Any]:
    """With two fixed leaves, and tails of one to six lines."""
    return {"image": torch.full((40,), i), "text": f"{i} " * (100 + i * 211 % 400), "label": i}


def survives(store: Store, other: Store) -> None:
    """Fail unless what is left is sound, and the others can make it whole."""
    assert store.check() == []
    assert wrong(stored(other), sample) == {}
    uncached = other.fill(np.arange(N), sample)
    assert wrong(uncached, sample) == {}
    assert count(other) == N
    for view in (store, other):
        assert view.check() == []
        assert stored(view).keys() == set(range(N))
        assert wrong(stored(view), sample) == {}


# Death at the named points of a sample's way


def _after(owner: Any, name: str) -> Callable[[], None]:
    def arm() -> None:
        real = getattr(owner, name)

        def then_die(*arguments: Any, **named: Any) -> None:
            real(*arguments, **named)
            die()

        setattr(owner, name, then_die)

    return arm


def _midway_through_the_write() -> None:
    real = ArrayLeaf.put

    def half(self: ArrayLeaf, buffer: Any, offset: int, checked: Any) -> None:
        real(self, buffer, offset, checked[: len(checked) // 2])
        die()

    ArrayLeaf.put = half  # type: ignore[method-assign]


class _Deadly(np.ndarray):  # type: ignore[type-arg]
    """Words of which one kills who stores to it."""

    deadly = -1

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, int) and key == self.deadly:
            die()
        super().__setitem__(key, value)  # type: ignore[no-untyped-call]


def _before_storing_to_its_slot(word: int) -> Callable[[], None]:
    def arm() -> None:
        real = Participant.row

        def deadly(self: Participant) -> Any:
            row = real.fget(self).view(_Deadly)  # type: ignore[attr-defined]
            row.deadly = word
            return row

        Participant.row = property(deadly)  # type: ignore[assignment, method-assign]

    return arm


POINTS: dict[str, Callable[[], None]] = {
    "after the claim": _after(Claims, "take"),
    "after memory was reserved for an extent": _after(Segment, "reserve"),
    "after the row was taken": _after(Allocator, "_take_rows"),
    "after the lines were taken": _after(Allocator, "take_lines"),
    "midway through the write": _midway_through_the_write,
    "after the write, before the record's header": _after(Schema, "write"),
    "after the record's header, before it is in the file": _after(Records, "_lay_out"),
    "after the row, before the tail": _after(Segment, "write"),
    "after the write, before the index word": _after(Records, "write"),
    "after the index word, before the counters": _before_storing_to_its_slot(Slot.STORED),
    "before its extent's begin is entered": _before_storing_to_its_slot(Slot.ROW_NEXT),
    "before its extent's end is entered": _before_storing_to_its_slot(Slot.ROW_END),
    "before its lines' extent's end is entered": _before_storing_to_its_slot(Slot.LINE_END),
    "after all, before the claims are released": _after(Filler, "_store"),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_at_any_point_is_not_felt(point: str) -> None:
    with opened(sample, N) as store, attached(store) as other:
        other.fill(ids(0, 1), sample)

        def fill_and_die() -> None:
            POINTS[point]()
            store.fill(ids(2, 3, 4, 5), sample)

        assert ended(child(fill_and_die)) == -9, "the point was passed"
        survives(store, other)


def _lines_of_the_store(body: Callable[[], object], until: int) -> int:
    """Run ``body``, and die at the ``until``-th line of the store's code; returns how many there were."""
    with dying((os.path.dirname(hotset.store.__file__),), until) as lines:
        body()
    return lines[0]


def _deaths(body: Callable[[], object], points: int) -> Iterator[int]:
    """Have children die in ``body`` at so many of its lines, evenly spread; yields after each."""
    read, tell = os.pipe()
    in_child(lambda: os.write(tell, b"%d" % _lines_of_the_store(body, -1)))
    total = int(os.read(read, 20))
    os.close(read)
    os.close(tell)
    assert total > points
    for point in range(points):
        line = 1 + point * total // points
        # The last lines may not be reached: how often a lock is tried is not always the same.
        assert ended(child(lambda line=line: _lines_of_the_store(body, line))) in (-9, 0)  # type: ignore[misc]
        yield line


def test_a_process_killed_at_any_line_of_a_fill_is_not_felt() -> None:
    with opened(sample, N) as store, attached(store) as other:
        for _ in _deaths(lambda: store.fill(ids(2, 3), sample), often(30, 90)):
            survives(store, other)
            assert other.clear()


def test_a_process_killed_at_any_line_of_a_clear_is_not_felt() -> None:
    with opened(sample, N) as store, attached(store) as other:
        other.fill(np.arange(N), sample)
        for _ in _deaths(store.clear, often(16, 50)):
            survives(store, other)


def test_a_process_killed_with_an_exception_of_the_source_on_its_way_is_not_felt() -> None:
    def broken(i: int) -> Any:
        if i == 3:
            raise KeyError("sample 3 is broken")
        return sample(i)

    with opened(sample, N) as store, attached(store) as other:

        def fail() -> None:
            with pytest.raises(KeyError):
                store.fill(ids(2, 3, 4), broken)

        for _ in _deaths(fail, often(16, 50)):
            survives(store, other)
            assert other.clear()


# Readers beside writers


def row(i: int) -> torch.Tensor:
    """Half a kilobyte of one number: a torn or a stale sample shows."""
    return torch.full((64,), i)


def _check_rows(wanted: Any, found: list[torch.Tensor]) -> None:
    read = torch.stack(found)
    assert torch.equal(read, torch.from_numpy(wanted)[:, None].expand(read.shape)), "a torn or stale sample"


def _read_rows(store: Store, seed: int, reads: int, done: Any, total: Any) -> None:
    """Read random samples until there were so many; the sum goes into ``total``."""
    rng = np.random.default_rng(seed)
    mine = 0
    while mine < reads:
        there = np.flatnonzero(store.segment.index >= PRESENT)
        for _ in range(20):
            if len(there):
                wanted = rng.choice(there, 256)
                found = store.read(wanted)
                if found is not None:
                    _check_rows(wanted, found)
                    mine += len(found)
    with total.get_lock():
        total.value += mine
    done.wait(100)


def test_many_reads_beside_writers_are_all_whole() -> None:
    context = multiprocessing.get_context("fork")
    total, done = context.Value("q", 0), context.Barrier(2)
    n, reads = often(6_000, 60_000), often(50_000, 500_000)
    with opened(row, n, n * 640) as store:

        def fill(seed: int) -> None:
            order = np.random.default_rng(seed).permutation(n)
            for begin in range(0, n, 64):
                store.fill(order[begin : begin + 64], row, keep=False)

        writers = [child(lambda seed=seed: fill(seed)) for seed in range(2)]  # type: ignore[misc]
        readers = [
            child(lambda seed=seed: _read_rows(store, seed, reads, done, total))  # type: ignore[misc]
            for seed in range(2)
        ]
        assert [ended(pid) for pid in readers + writers] == [0] * 4
        assert total.value >= 2 * reads
        assert count(store) == n
        assert store.check() == []


def test_reads_beside_clears_are_whole_or_nothing() -> None:
    context = multiprocessing.get_context("fork")
    total, done = context.Value("q", 0), context.Barrier(2)
    stop = context.Event()
    with opened(row, 512, 512 * 640) as store:

        def fill_and_clear(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while not stop.is_set():
                store.fill(rng.permutation(512), row, keep=False)
                if seed == 0:
                    assert store.clear(60.0)

        writers = [child(lambda seed=seed: fill_and_clear(seed)) for seed in range(2)]  # type: ignore[misc]
        readers = [
            child(lambda seed=seed: _read_rows(store, seed, often(40_000, 200_000), done, total))  # type: ignore[misc]
            for seed in range(2)
        ]
        codes = [ended(pid) for pid in readers]
        stop.set()
        codes += [ended(pid) for pid in writers]
        assert codes == [0] * 4
        assert store.check() == []


def _overtaken(store: Store, reader: Store, begun: Callable[[Callable[[], None]], None]) -> Any:
    """Read sample 1 by a reader that stands still between its look at the index and its copy.

    Meanwhile the store is cleared, and sample 2 written to where sample 1 was. ``begun(start)`` clears, and
    calls ``start`` at the moment at which the reader is to begin.
    """
    looked, go = threading.Event(), threading.Event()
    found: list[Any] = []
    block = reader._block

    def slow_block(size: int) -> Any:
        looked.set()
        assert go.wait(60)
        return block(size)

    reader._block = slow_block  # type: ignore[method-assign]

    def read() -> None:
        found.append(reader.read(ids(1)))
        looked.set()

    thread = threading.Thread(target=read)

    def start() -> None:
        thread.start()
        assert looked.wait(60)

    begun(start)
    store.fill(ids(2), row)
    go.set()
    thread.join(60)
    return found[0]


def test_a_reader_that_is_overtaken_by_a_clear_gets_nothing() -> None:
    with opened(row, 4) as store, attached(store) as reader:
        store.fill(ids(1), row)

        def begun(start: Callable[[], None]) -> None:
            start()
            assert store.clear()

        assert _overtaken(store, reader, begun) is None


def test_a_reader_that_begins_in_the_midst_of_a_clear_gets_nothing() -> None:
    """It finds the new clear generation and, still, the old words."""
    with opened(row, 4) as store, attached(store) as reader:
        store.fill(ids(1), row)

        found = _overtaken(store, reader, lambda start: clear_and_meanwhile(store, start))
        assert found is None, f"sample 1 was given as {found[0][:3]}"


# Damage


def _file(path: Path, n: int, filled: int) -> bytes:
    with opened(sample, n, path=path) as store:
        store.fill(np.arange(filled), sample)
        assert store.check() == []
        regions = store.segment.geometry
        path.with_suffix(".json").write_text(
            json.dumps(
                {
                    "live words": (512, 48),
                    "slots": (regions.slots_at, 3 * 128),
                    "index": (regions.index_at, 8 * n),
                    "rows": (regions.rows_at, filled * regions.stride),
                    "lines": (regions.lines_at, int(store.segment.live[Live.LINES_NEXT]) * 256),
                }
            )
        )
    return path.read_bytes()


def _use(path: Path, n: int) -> None:
    """Do all that a reader does, and fail if anything is wrong or raised."""
    with attached(path) as store:
        for _ in range(2):
            assert wrong(stored(store), sample) == {}
            uncached = store.fill(np.arange(n), sample)
            assert wrong(uncached, sample) == {}
        assert wrong(stored(store), sample) == {}
        store.check()


def _flips(draw: random.Random, size: int, words: bool) -> list[int]:
    """A few bits of a region. Words mostly hold small numbers: there it is their low bits that matter."""
    count = draw.choice([1, 1, 2, 30])
    if words and draw.random() < 0.7:
        return [64 * draw.randrange(size // 8) + draw.randrange(10) for _ in range(count)]
    return [draw.randrange(8 * size) for _ in range(count)]


@pytest.mark.parametrize(
    "region", rarely(["rows", "lines", "index", "live words", "slots"], "lines", "slots")
)
def test_flipped_bits_in_a_file_are_misses_and_never_wrong_samples(tmp_path: Path, region: str) -> None:
    n, filled = 16, N
    path = tmp_path / "segment"
    sound = _file(path, n, filled)
    at, size = json.loads(path.with_suffix(".json").read_text())[region]

    def damage_and_use() -> None:
        draw = random.Random(region)
        for trial in range(often(12, 160)):
            damaged = bytearray(sound)
            bits = _flips(draw, size, region in ("index", "live words", "slots"))
            for bit in bits:
                damaged[at + bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            print(f"trial {trial}: bits {bits} of the {region}", file=sys.stderr, flush=True)
            with recorded() as caught:
                _use(path, n)
            assert [str(w.message) for w in caught if w.category is not HotsetWarning] == []

    in_child(damage_and_use)


WORDS = [4, 1 << 40, (1 << 61) - 1, -1, -(1 << 63), (1 << 62) - 1, (1 << 63) - 1]


def test_an_index_word_that_means_nothing_is_a_miss() -> None:
    with opened(sample, N) as store:

        def fill() -> None:
            store.fill(ids(1, 2), sample)
            for word in WORDS:
                print(f"word {word:#x}", file=sys.stderr, flush=True)
                store.segment.index[3] = word
                if word < PRESENT:
                    assert wrong(store.fill(ids(2, 3, 4), sample), sample) == {}
                    assert stored(store).keys() == {1, 2, 3, 4}
                    assert wrong(stored(store), sample) == {}
                else:
                    assert store.verification.problem(3, word) is not None

        in_child(fill)


def test_a_damaged_record_is_a_miss_with_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    _file(path, N, N)
    with opened(sample, N, path=tmp_path / "other") as store:
        store.fill(np.arange(N), sample)
        at = store.segment.geometry.rows_at + 5 * store.schema.stride + 40
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    with attached(path) as store, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            there = store.present(np.arange(N))
            assert np.flatnonzero(~there).tolist() == [5]
            assert difference(store.read(ids(4)), [sample(4)]) is None
        assert store.check() == [], "it is forgotten"
        assert wrong(store.fill(ids(5), sample), sample) == {}
        assert store.present(np.arange(N)).all(), "and stored again"
        assert store.check() == []
        assert len(caught) == 1
        assert issubclass(caught[0].category, HotsetWarning)
        assert "sample 5" in str(caught[0].message)


def test_a_file_damaged_after_it_was_looked_at_by_one_is_a_miss_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    _file(path, N, N)
    with attached(path) as first:
        assert first.present(np.arange(N)).all()
        first.segment.buffer[first.segment.geometry.rows_at + 40] ^= 1
        with attached(path) as second, pytest.warns(HotsetWarning, match="sample 0"):
            assert not second.present(ids(0))[0]


def test_an_index_word_that_changes_after_its_record_was_verified_is_looked_at_again(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    _file(path, N, N)
    with attached(path) as store:
        assert store.present(np.arange(N)).all()
        store.segment.index[3] = store.segment.index[4]
        with pytest.warns(HotsetWarning, match="sample 3"):
            assert not store.present(ids(3))[0]


def test_an_extent_that_changes_behind_its_holders_back_is_not_used(tmp_path: Path) -> None:
    with opened(sample, N, path=tmp_path / "segment") as store:
        store.fill(np.arange(6), sample)
        store.segment.slots[store.participant.slot, [Slot.ROW_NEXT, Slot.LINE_NEXT]] = 0
        store.fill(np.arange(N), sample)
        assert store.check() == []
        assert wrong(stored(store), sample) == {}


def test_the_check_names_what_is_wrong() -> None:
    def found(damage: Callable[[Store], object]) -> str:
        with opened(sample, N) as store:
            store.fill(np.arange(6), sample)
            assert store.check() == []
            damage(store)
            return " | ".join(store.check())

    def set_word(i: int, word: int | None = None) -> Callable[[Store], None]:
        def damage(store: Store) -> None:
            store.segment.index[i] = int(store.segment.index[3]) if word is None else word

        return damage

    def set_live(place: int, value: int) -> Callable[[Store], None]:
        def damage(store: Store) -> None:
            store.segment.live[place] = value

        return damage

    assert "sample 2: its index word names row" in found(set_word(2, PRESENT | 1 << 39))
    assert "sample 9: its index word is damaged" in found(set_word(9, 4))
    assert "samples 3 and 4 share row" in found(set_word(4))
    assert "extents add up to" in found(set_live(Live.LIMIT, 100))
    # Rows and lines in use that would be handed out again.
    assert found(set_live(Live.ROWS_NEXT, 2)) != ""
    assert found(set_live(Live.ROWS_NEXT, -1)) != ""
    assert found(set_live(Live.LINES_NEXT, 2)) != ""


# The stress run


@pytest.mark.chaos
def test_the_stress_run_ends_well() -> None:
    command = [sys.executable, "-m", "tests.stress", "--seed", "7", "--seconds", str(often(2, 20))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 7" in done.stdout


def test_a_clear_is_not_finished_over_a_store_that_was_condemned_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(sample, N) as store:
        store.segment.live[Live.CLEAR_GENERATION] += 1  # whoever began to clear has died
        take = store.participant.short_lock

        @contextlib.contextmanager
        def condemned_first() -> Iterator[bool]:
            store.segment.live[Live.INVALIDATED] = 1
            with take() as held:
                yield held

        monkeypatch.setattr(store.participant, "short_lock", condemned_first)
        store.fill(ids(0), sample)
        assert store.invalidated
        assert store.segment.live[Live.CLEAR_GENERATION] % 2 == 1
