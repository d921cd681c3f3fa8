"""The second tier: what comes back from a disk is what was put there, or comes from the source."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import pickle
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import torch
from helpers import (
    Walkers,
    difference,
    equal_batches,
    is_a_sentence,
    often,
    rarely,
    recorded,
    seed_everything,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from kills import child, ended, in_child, lingering
from live import draw_all
from sources import Counting, ReadLog, Samples
from stores import attached, count, ids, store_of, stored, wrong
from test_store_machine import N as MACHINE_N
from test_store_machine import StoreMachine, fits, used, version
from torch.utils.data import DataLoader, Dataset

import hotset
from hotset import HotsetWarning
from hotset.dataset.dataset_proxy import current_of
from hotset.session import spill_dirs as spills
from hotset.store import segment as segment_module
from hotset.store.format import LINE, ON_DISK, PRESENT, RECORD, RECORD_HEADER, ROW_MASK, Live, Slot
from hotset.store.leaves.schema import Schema
from hotset.store.memory_limits import Headroom
from hotset.store.spill import Spill, SpillTo
from hotset.store.store import Store

Make = Callable[[int], Any]
N = 24
ALL = np.arange(N)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spill folder; nothing of these tests is listed among the caches of the others."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "spill").mkdir()
    return tmp_path / "spill"


@contextlib.contextmanager
def spilling(
    make: Make, folder: Path, limit: int = 0, *, n: int = N, keep_order: bool = True, keeps_all: bool = False
) -> Iterator[Store]:
    """An empty store with a spill; without ``limit`` everything goes to the disk."""
    schema = Schema.infer([make(i) for i in (0, 1, n - 1)], keep_order=keep_order)
    to = SpillTo(str(folder), keeps_all=keeps_all)
    with contextlib.closing(Store.create(schema, n, limit, about={"name": "test"}, spill=to)) as store:
        yield store


def on_disk(store: Store) -> list[int]:
    words = store.segment.index
    return [int(i) for i in np.flatnonzero((words >= PRESENT) & (words & ON_DISK != 0))]


def row_at(store: Store, sample: int) -> int:
    """Where a sample's row lies in the file on the disk."""
    assert store.spill is not None
    geometry = store.spill.segment.geometry
    return geometry.rows_at + int(store.segment.index[sample] & ROW_MASK) * geometry.stride


def fill_memory(store: Store) -> None:
    """Let memory have room for nothing more, not even in what was reserved."""
    store.participant.row[Slot.ROW_NEXT : Slot.LINE_END + 1] = 0
    store.allocator._refused_until = float("inf")


def no_room(*_: object) -> Headroom:
    return Headroom(0, 1, "the file system of the spill folder")


# What comes back


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        samples.mapping, samples.ordered_mapping, samples.named, samples.nested, samples.text,
        samples.scalars, samples.numpy_scalars, samples.bfloat_and_half, samples.zero_d_and_empty,
        samples.permuted, samples.arrays, samples.ragged,
        samples.ragged_two_ways, samples.jpeg_like, samples.every_dtype, samples.number,
        samples.of_many_forms,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_every_kind_of_leaf_comes_back_from_the_disk(make: Make, keep_order: bool, folder: Path) -> None:
    with spilling(make, folder, keep_order=keep_order) as store:
        assert store.fill(ALL, make, keep=False) == {}
        assert on_disk(store) == ALL.tolist()
        assert wrong(stored(store), make) == {}
        together = store.read(ALL[::-1])
        assert together is not None
        assert wrong(dict(zip(ALL[::-1].tolist(), together, strict=True)), make) == {}
        assert store.check() == []


@pytest.mark.parametrize("make", [samples.constant_row, samples.big_image_and_label, samples.jpeg_like])
def test_a_batch_mixes_the_tiers_in_every_proportion(make: Make, folder: Path) -> None:
    order = np.random.default_rng(1).permutation(8)
    for in_memory in range(9):
        with spilling(make, folder, 1 << 30, n=8) as store:
            store.fill(order[:in_memory], make)
            fill_memory(store)
            store.fill(order[in_memory:], make)
            assert on_disk(store) == sorted(order[in_memory:].tolist())
            wanted = np.concatenate([order[::2], order, order[:3]])  # some more than once
            found = store.read(wanted)
            assert found is not None
            assert [i for i, got in zip(wanted, found, strict=True) if difference(got, make(int(i)))] == []


def test_what_was_read_from_the_disk_is_the_readers_own(folder: Path) -> None:
    with spilling(samples.small_float, folder) as store:
        store.fill(ALL, samples.small_float)
        for _ in range(2):
            found = store.read(ids(5, 5))
            assert found is not None
            equal_batches(found, [samples.small_float(5)] * 2)
            found[0].zero_()
            assert found[1].any()


def test_a_clear_waits_for_what_is_written_to_a_spill_that_keeps_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would come there after it would be served after a reboot."""
    cleared: list[bool] = []
    write = Spill.write

    def clear_and_write(*arguments: Any) -> Any:
        cleared.append(other.clear(timeout=0.0))
        return write(*arguments)

    with spilling(samples.ragged, folder, MIB, keeps_all=True) as store, attached(store) as other:
        assert store.spill is not None
        monkeypatch.setattr(Spill, "write", clear_and_write)
        store.fill(ids(3), samples.ragged)
        assert cleared == [False]
        assert other.clear()
        assert int(store.spill.segment.index.max()) == 0


def test_a_spill_that_keeps_all_has_what_memory_has_too(folder: Path) -> None:
    with spilling(samples.ragged, folder, MIB, keeps_all=True) as store:
        store.fill(ALL, samples.ragged)
        assert store.spill is not None
        assert on_disk(store) == []
        assert (store.spill.segment.index >= PRESENT).all()
        assert store.check() == []
        store.segment.index[:] = store.spill.segment.index | ON_DISK
        assert wrong(stored(store), samples.ragged) == {}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("make", "limit"),
    [(samples.image_and_label, "2kB"), (samples.mapping, "10kB"), (samples.poster_and_label, "4MiB")],
    ids=["fixed", "tails", "large"],
)
def test_batches_are_what_torchs_loader_gives_without_a_cache(
    make: Make, limit: str, workers: int, folder: Path
) -> None:
    options: Any = {"batch_size": 7, "shuffle": True}
    seed_everything()
    loader = DataLoader(Samples(make, 2 * N), **options)
    expected = [list(loader) for _ in range(2)]
    with hotset.cache(Samples(make, 2 * N), memory=limit, spill=folder) as cached:
        seed_everything()
        loader = hotset.DataLoader(cached, num_workers=workers, **options)
        for epoch in expected:
            equal_batches(list(loader), epoch)
        stats = cached.stats()
        assert stats.cached == 2 * N
        assert 0 < stats.spilled < 2 * N
        assert cached.check() == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_live_part_draws_what_it_would_have_drawn(workers: int, folder: Path) -> None:
    found = []
    for memory, spill in (("1MiB", None), ("1kB", folder)):
        source = Samples(samples.image_and_label, N)
        seed_everything()
        with hotset.cache(source, transform=[draw_all], memory=memory, spill=spill) as cached:
            loader = hotset.DataLoader(cached, batch_size=5, num_workers=workers, shuffle=True)
            found.append([list(loader) for _ in range(2)])
            assert (cached.stats().spilled > 0) == (spill is not None)
    equal_batches(found[1], found[0])


def test_indices_that_are_not_numbers_need_no_prefetch(folder: Path) -> None:
    """The dataset answers them, batch by batch, whether or not later batches can be looked up on the disk."""
    order: Any = [[0, 1, 2], [3, (4,), 5], [6, 7, 8]]
    expected = list(DataLoader(ByTuple(), batch_sampler=order))
    with hotset.cache(ByTuple(), memory="1kB", spill=folder) as cached:
        cached.fill()
        equal_batches(list(hotset.DataLoader(cached, batch_sampler=order, num_workers=2)), expected)


class ByTuple(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.full((64,), float(index[0] if isinstance(index, tuple) else index))


# As a dict


class SpillMachine(StoreMachine):
    """The store with a second tier, whose disk may be full at any moment."""

    def _open(self, limit: int, keeps_all: bool) -> None:
        schema = Schema.infer([version(0, 0), version(1, 0)], keep_order=True)
        self.limit, self.is_full = limit, False
        self.views = [
            Store.create(schema, MACHINE_N, limit, about={}, spill=SpillTo("/tmp", keeps_all=keeps_all))
        ]

    @initialize(limit=st.sampled_from([0, 100, 1000, 5000, 1 << 20]), keeps_all=st.booleans())
    def create(self, limit: int, keeps_all: bool) -> None:
        self._open(limit, keeps_all)

    @rule(is_full=st.booleans())
    def others_fill_the_disk_or_clean_it(self, is_full: bool) -> None:
        self.is_full = is_full

    @precondition(lambda self: not self.is_full)
    @rule(view=st.integers(0, 2))
    def fill_all(self, view: int) -> None:
        StoreMachine.fill(self, view, list(range(MACHINE_N)), False)
        assert set(self.model) == {i for i in range(MACHINE_N) if fits(i)}

    @invariant()
    def nothing_is_wrong(self) -> None:
        StoreMachine.nothing_is_wrong(self)
        for view in self.views:
            assert view.spill is not None
            view.spill.allocator.reopen()  # as after half a second
            view.spill.allocator._free = no_room if self.is_full else view.spill._free

    @rule(view=st.integers(0, 2))
    def clear(self, view: int) -> None:
        assert self.views[view % len(self.views)].clear()
        self.model.clear()
        assert used(self.first) == 0
        assert self.first.spill is not None
        assert self.first.spill.segment.taken == 0


TestSpillMachine = SpillMachine.TestCase
TestSpillMachine.settings = settings(
    max_examples=often(10, 60), stateful_step_count=20, deadline=None, database=None
)


# Damage


def flip(store: Store, at: int) -> None:
    assert store.spill is not None
    fd = store.spill.segment.fd
    byte = os.pread(fd, 1, at)[0]
    os.pwrite(fd, bytes([byte ^ 0x40]), at)


def flip_in_the_row(store: Store) -> None:
    flip(store, row_at(store, 2) + store.segment.geometry.stride - 9)


def flip_in_the_header(store: Store) -> None:
    flip(store, row_at(store, 2) + 5)


def flip_where_the_tail_is_said_to_be(store: Store) -> None:
    flip(store, row_at(store, 2) + RECORD_HEADER + 4)


def flip_in_the_tail(store: Store) -> None:
    assert store.spill is not None
    segment = store.spill.segment
    place = int.from_bytes(os.pread(segment.fd, 8, row_at(store, 2) + RECORD_HEADER), "little")
    flip(store, segment.geometry.lines_at + (place >> 24) * 256 + 3)


def wipe(store: Store) -> None:
    assert store.spill is not None
    os.pwrite(store.spill.segment.fd, bytes(store.segment.geometry.stride), row_at(store, 2))


def another_samples_record(store: Store) -> None:
    assert store.spill is not None
    fd = store.spill.segment.fd
    os.pwrite(fd, os.pread(fd, store.segment.geometry.stride, row_at(store, 3)), row_at(store, 2))


def another_samples_word(store: Store) -> None:
    store.segment.index[2] = store.segment.index[3]


def a_row_that_there_is_not(store: Store) -> None:
    store.segment.index[2] = PRESENT | ON_DISK | ROW_MASK


def cut_off(store: Store) -> None:
    assert store.spill is not None
    os.ftruncate(store.spill.segment.fd, row_at(store, 2) + 8)


DAMAGE = [
    flip_in_the_row, flip_in_the_header, flip_where_the_tail_is_said_to_be, flip_in_the_tail, wipe,
    another_samples_record, another_samples_word, a_row_that_there_is_not, cut_off,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_record_is_never_served_told_of_once_and_stored_again(
    damage: Callable[[Store], None], folder: Path
) -> None:
    make = samples.big_image_and_label if damage is cut_off else samples.text  # whose tails lie last
    with spilling(make, folder) as store, attached(store) as other:
        store.fill(ids(0), make)
        for sample in (1, 3, 4, 2):  # sample 2 lies last: behind it a file can be cut off
            store.fill(ids(sample), make)
        damage(store)
        with pytest.warns(HotsetWarning, match="sample 2 is damaged on the disk") as told:
            assert store.read(ids(1, 2, 3)) is None
        assert len(told) == 1
        assert is_a_sentence(str(told[0].message))
        assert store.present(ids(range(5))).tolist() == [True, True, False, True, True]
        assert store.read(ids(2)) is None
        reads: list[int] = []
        store.fill(ids(range(5)), lambda i: reads.append(i) or make(i))  # type: ignore[func-returns-value]
        assert reads == [2]
        for view in (store, other):
            assert wrong(stored(view), make) == {}
            assert count(view) == 5
        if damage is cut_off:
            return  # nobody new finds a file of the right size any more
        flip(store, row_at(store, 2) + 5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with attached(store) as late, pytest.raises(HotsetWarning, match="sample 2"):
                late.read(ids(2))  # another process finds it, and says so itself


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_goes_on_over_damage(workers: int, folder: Path) -> None:
    make = samples.image_and_label
    expected = list(DataLoader(Samples(make, N), batch_size=6))
    with hotset.cache(Samples(make, N), memory=0, spill=folder) as cached:
        store_of(cached).fill(ALL, make)
        flip(store_of(cached), row_at(store_of(cached), 7) + 40)
        loader = hotset.DataLoader(cached, batch_size=6, num_workers=workers)
        with pytest.warns(HotsetWarning, match="sample 7 is damaged"):
            equal_batches(list(loader), expected)
        equal_batches(list(loader), expected)
        assert cached.stats().cached == N
        assert cached.check() == []


def test_the_check_finds_damage_in_both_tiers(folder: Path) -> None:
    make = samples.small_float
    with spilling(make, folder, 1 << 30) as store:
        store.fill(ids(0, 1), make)
        fill_memory(store)
        store.fill(ids(2, 3), make)
        assert store.check() == []
        flip(store, row_at(store, 3) + 20)
        store.rows[int(store.segment.index[0] & ROW_MASK), 17] ^= 1
        problems = store.check()
        assert [problem.partition(":")[0] for problem in problems] == ["sample 0", "sample 3"]


# What is not so yet is looked at inside a function: a traceback would hold on to the store's memory.


@pytest.mark.parametrize("damage", [another_samples_word, a_row_that_there_is_not])
def test_the_check_finds_words_that_disagree(damage: Callable[[Store], None], folder: Path) -> None:
    def problems() -> list[str]:
        with spilling(samples.small_float, folder) as store:
            store.fill(ALL, samples.small_float)
            damage(store)
            return store.check()

    assert problems() != []


def test_the_check_of_a_file_that_was_cut_off_is_no_sigbus(folder: Path) -> None:
    def look() -> None:
        faulthandler.disable()
        with spilling(samples.constant_row, folder) as store:
            store.fill(ALL, samples.constant_row)
            assert store.spill is not None
            os.ftruncate(store.spill.segment.fd, store.spill.segment.geometry.rows_at + 4096)
            assert len(store.check()) >= N - 2

    assert ended(child(look)) == 0


def test_a_damaged_length_takes_no_memory(folder: Path) -> None:
    def largest_block() -> int:
        sizes: list[int] = []
        with spilling(samples.text, folder) as store:
            store.fill(ALL, samples.text)
            assert store.spill is not None
            fd, at = store.spill.segment.fd, row_at(store, 2) + RECORD_HEADER
            place = int.from_bytes(os.pread(fd, 8, at), "little") >> 24 << 24 | 1 << 18
            os.pwrite(fd, place.to_bytes(8, "little"), at)
            block = store._block

            def noting(size: int) -> Any:
                sizes.append(size)
                return block(size)

            store._block = noting
            with pytest.warns(HotsetWarning, match="sample 2"):
                store.read(ids(1, 2))
            store._block = block
        return max(sizes)

    assert largest_block() < MIB


@pytest.mark.parametrize("end", ["clear", "invalidate"])
def test_a_clear_under_a_reader_is_no_damage(end: str, folder: Path) -> None:
    def told() -> list[str]:
        with spilling(samples.small_float, folder) as store, attached(store) as other:
            store.fill(ALL, samples.small_float)
            assert other.spill is not None
            file = other.spill.segment
            read = file.read

            def meanwhile(offset: int, into: memoryview) -> bool:
                store.clear()
                if end == "invalidate":
                    store.invalidate()
                return read(offset, into)

            file.read = meanwhile  # type: ignore[method-assign]
            with recorded() as caught:
                assert other.read(ids(3, 4)) is None
            del file.read, file
        return [str(one.message) for one in caught]

    assert told() == []


def test_a_batch_of_both_tiers_that_a_clear_overtakes_is_none(folder: Path) -> None:
    """What was read from the disk is sound, and what memory holds is another record's by then."""

    def first(index: int) -> torch.Tensor:
        return torch.full((300 * (index == 0),), 1.0)

    def second(index: int) -> torch.Tensor:
        return first(index) + 1

    schema = Schema.infer([first(0), first(1)], keep_order=True)
    lines = schema.prepare(first(0)).tail_lines
    with (
        spilling(first, folder, 3 * schema.stride + lines * LINE) as store,
        attached(store) as other,
    ):
        for index in range(N):
            store.fill(ids(index), first)
        spilled = on_disk(store)
        assert 0 not in spilled
        assert other.spill is not None
        file = other.spill.segment
        read = file.read

        def overtaken(offset: int, into: memoryview) -> bool:
            done = read(offset, into)
            assert store.clear()
            store.fill(ids(0), second)
            return done

        file.read = overtaken  # type: ignore[method-assign]
        assert other.read(ids(0, spilled[0])) is None
        del file.read, file
        assert wrong(stored(other, ids(0)), second) == {}


@pytest.mark.parametrize("make", [samples.small_float, samples.text], ids=["a row", "row and tail"])
def test_a_record_from_before_a_clear_is_damage(make: Make, folder: Path) -> None:
    """As it is there if the disk has lost what was written last: whole, and not the one that is meant."""
    with spilling(make, folder) as store:
        store.fill(ids(2), make)
        assert store.spill is not None
        file, at, stride = store.spill.segment.fd, row_at(store, 2), store.segment.geometry.stride
        before = os.pread(file, stride, at)
        store.clear()
        store.fill(ids(2), lambda sample: make(sample + 1))
        assert row_at(store, 2) == at
        os.pwrite(file, before, at)
        with pytest.warns(HotsetWarning, match="sample 2 is damaged on the disk"):
            assert store.read(ids(2)) is None


def test_a_row_that_cannot_be_read_costs_no_neighbours(folder: Path) -> None:
    def left() -> list[int]:
        with spilling(samples.small_float, folder) as store:
            for sample in (0, 1, 3, 2):
                store.fill(ids(sample), samples.small_float)
            cut_off(store)
            with pytest.warns(HotsetWarning, match="is damaged on the disk"):
                store.read(ids(0, 1, 2, 3))
            return [int(i) for i in np.flatnonzero(store.present(ALL))]

    assert left() == [0, 1, 3]


def test_a_record_that_is_stored_again_counts_once(folder: Path) -> None:
    def bytes_before_and_after() -> tuple[int, int]:
        with spilling(samples.small_float, folder) as store:
            store.fill(ALL, samples.small_float)
            before = store.stored_bytes
            flip_in_the_row(store)
            with pytest.warns(HotsetWarning, match="sample 2"):
                store.read(ids(2))
            store.fill(ids(2), samples.small_float)
            return before, store.stored_bytes

    before, after = bytes_before_and_after()
    assert before == after


# A disk that is full, fails, or cannot do what others can


def failing(store: Store, monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Have this call fail on the file on the disk, from now on."""
    assert store.spill is not None
    fd, call = store.spill.segment.fd, getattr(os, name)

    def fail(where: int, *arguments: Any) -> Any:
        if where == fd:
            raise OSError(number, os.strerror(number))
        return call(where, *arguments)

    monkeypatch.setattr(os, name, fail)


def test_what_cannot_be_read_comes_from_the_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = samples.mapping
    with spilling(make, folder) as store:
        store.fill(ALL, make)
        with monkeypatch.context() as broken:
            failing(store, broken, "preadv", errno.EIO)
            with pytest.warns(HotsetWarning, match="cannot be read"):
                assert store.read(ids(2, 3)) is None
        assert wrong(store.fill(ALL, make), make) == {}
        assert wrong(stored(store), make) == {}


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("pwrite", errno.EIO), ("pwrite", errno.ENOSPC), ("posix_fallocate", errno.ENOSPC),
        ("posix_fallocate", errno.EIO),
    ],
)  # fmt: skip
def test_what_cannot_be_written_comes_from_the_source(
    call: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = samples.mapping
    with spilling(make, folder) as store:
        store.fill(ids(0, 1), make)
        with monkeypatch.context() as broken:
            failing(store, broken, call, number)
            store.spill.allocator._left.clear()  # type: ignore[union-attr]
            store.spill.participant.row[2:6] = 0  # type: ignore[union-attr]
            uncached = store.fill(ALL, make)
        assert sorted(uncached) == list(range(2, N))
        assert wrong(uncached, make) == {}
        assert store.why_full is not None
        assert wrong(stored(store), make) == {}
        assert count(store) == 2
        store.spill.allocator.reopen()  # type: ignore[union-attr]
        store.fill(ALL, make)
        assert count(store) == N
        assert store.check() == []


def test_a_disk_that_is_read_only_by_now_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> str | None:
        with spilling(samples.mapping, folder) as store:
            failing(store, monkeypatch, "posix_fallocate", errno.EROFS)
            try:
                uncached = store.fill(ALL, samples.mapping)
            except OSError as error:
                return str(error)
            assert wrong(uncached, samples.mapping) == {}
            return None

    assert read() is None


def test_a_full_disk_is_told_with_a_knob_that_can_be_turned(folder: Path) -> None:
    def told() -> str:
        with hotset.cache(Samples(samples.mapping, N), memory=0, spill=folder) as cached:
            store_of(cached).spill.allocator._free = no_room
            with pytest.warns(HotsetWarning) as caught:
                equal_batches([cached[i] for i in range(N)], [samples.mapping(i) for i in range(N)])
        (message,) = (str(one.message) for one in caught)
        return message

    assert "lower `spill=`" not in told()


@pytest.mark.parametrize(
    "make",
    rarely([samples.kilobyte, samples.jpeg_like, samples.big_image_and_label], samples.big_image_and_label),
)
def test_a_file_that_outgrows_the_disk_is_no_sigbus(make: Make, folder: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "hotset-test", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        with spilling(make, folder, n=6000) as store:

            def fill() -> None:
                assert store.spill is not None
                assert store.spill.segment.geometry.size > 2 * MIB
                store.spill.allocator._free = lambda: Headroom(1 << 40, 1 << 40, "nothing")
                for start in range(0, 6000, 500):
                    store.fill(np.arange(start, start + 500), make, keep=False)
                assert 0 < count(store) < 6000
                assert wrong(stored(store), make) == {}
                assert store.check() == []
                assert store.why_full is not None

            in_child(fill)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_hundredth_of_the_disk_is_left_to_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        f_blocks, f_frsize, f_bavail = 1 << 20, 1 << 20, 11 << 10

    with spilling(samples.number, folder) as store:
        assert store.spill is not None
        monkeypatch.setattr(os, "fstatvfs", lambda fd: Disk)
        left = store.spill._free().bytes - store.spill.segment.geometry.rows_at
        assert left == (11 << 30) - (1 << 40) // 100


def test_a_disk_larger_than_its_largest_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        f_blocks, f_frsize, f_bavail = 100 << 30, 4096, 90 << 30

    monkeypatch.setattr(os, "statvfs", lambda path: Disk)
    with hotset.cache(Samples(samples.text, N), memory=0, spill=folder) as cached:
        assert current_of(cached).store is not None


def test_no_file_on_the_disk_is_no_reason_to_cache_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segment_module, "_open_nameless", full)
    with pytest.warns(HotsetWarning, match="spill") as told:
        cached = hotset.cache(Samples(samples.mapping, N), memory="1MiB", spill=folder)
    with cached:
        assert len(told) == 1
        assert current_of(cached).store is not None


def test_a_file_system_that_punches_no_holes_can_be_cleared(folder: Path) -> None:
    def refuse(offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    def cleared() -> bool:
        with spilling(samples.number, folder) as store:
            store.fill(ALL, samples.number)
            assert store.spill is not None
            store.spill.segment.discard = refuse  # type: ignore[method-assign]
            try:
                store.clear()
                store.fill(ALL, samples.number)
            except OSError:
                return False
            return wrong(stored(store), samples.number) == {}

    assert cleared()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
def test_a_file_system_without_nameless_files_gets_one_without_a_name(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return really(path, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    with spilling(samples.mapping, folder) as store:
        assert os.listdir(folder) == []
        store.fill(ALL, samples.mapping)
        with attached(store) as other:
            assert wrong(stored(other), samples.mapping) == {}
            assert count(other) == N


# Other processes


def test_a_killed_process_leaves_nothing_in_the_folder(folder: Path) -> None:
    def fill() -> None:
        cached = hotset.cache(Samples(samples.half_megabyte, N), memory=0, spill=folder)
        for i in range(N // 2):
            cached[i]
        assert cached.stats().spilled == N // 2
        os.kill(os.getpid(), signal.SIGKILL)

    own = spills.spill_path(str(folder))
    assert ended(child(fill)) == -signal.SIGKILL
    assert own.stat().st_mode & 0o777 == 0o700
    assert os.listdir(own) == []


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.chaos)])
def test_other_processes_reach_the_disk_too(method: str, folder: Path, tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(samples.ragged, N, log), memory="3kB", spill=folder) as cached:
        for i in range(N):
            cached[i]
        assert 0 < cached.stats().spilled < N
        log.reset()
        walkers = Walkers(cached, [range(N)] * 2, samples.ragged, method)
        walkers.go()
        walkers.finish()
        again = pickle.loads(pickle.dumps(cached))
        equal_batches(again[3], samples.ragged(3))
        again.close()
        assert log.total() == 0
        assert cached.check() == []


def test_processes_fill_the_two_tiers_together(folder: Path, tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(samples.jpeg_like, 150, log), memory="20kB", spill=folder) as cached:
        log.reset()
        orders = [np.random.default_rng(seed).permutation(150).tolist() for seed in range(3)]
        walkers = Walkers(cached, orders, samples.jpeg_like)
        walkers.go()
        walkers.finish()
        assert set(log.counts().values()) == {1}
        assert cached.stats().cached == 150
        assert 0 < cached.stats().spilled < 150
        assert cached.check() == []


def test_ranks_share_the_two_tiers(folder: Path, tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    source = Samples(samples.mapping, N)

    def rank(number: int) -> Any:
        os.environ.update(LOCAL_RANK=str(number), MASTER_PORT="29500")
        return hotset.cache(source, memory="2kB", spill=folder, key="one")

    def first() -> None:
        held.append(rank(0))
        equal_batches([held[0][i] for i in range(N)], [samples.mapping(i) for i in range(N)])

    def second() -> None:
        cached = rank(1)
        current_of(cached).source.dataset.make = None
        equal_batches([cached[i] for i in range(N)], [samples.mapping(i) for i in range(N)])
        assert 0 < cached.stats().spilled < N
        log.add(1)

    held: list[Any] = []
    with lingering(first):
        in_child(second)
    assert log.total() == 1


def test_a_fork_verifies_by_itself_and_holds_no_slot_of_its_parents(folder: Path) -> None:
    with spilling(samples.mapping, folder) as store:
        store.fill(ALL, samples.mapping)
        assert store.spill is not None
        parents = store.spill.participant.slot

        def body() -> None:
            assert wrong(stored(store), samples.mapping) == {}
            assert store.spill is not None
            assert store.spill.participant.slot != parents
            store.fill(ALL, samples.mapping)

        in_child(body)
        assert store.check() == []


def test_the_folder_is_refused_in_words_and_memory_goes_on(folder: Path) -> None:
    os.symlink("/tmp", spills.spill_path(str(folder)))
    with pytest.warns(HotsetWarning, match="is a symlink") as told:
        cached = hotset.cache(Samples(samples.mapping, N), memory="1MiB", spill=folder)
    with cached:
        assert is_a_sentence(str(told[0].message))
        cached[1]
        assert cached.stats().cached == 1


def test_the_record_header_is_what_the_tests_think(folder: Path) -> None:
    with spilling(samples.small_float, folder) as store:
        store.fill(ids(2), samples.small_float)
        assert store.spill is not None
        length, generation, _ = RECORD.unpack(os.pread(store.spill.segment.fd, 16, row_at(store, 2)))
        assert (length, generation) == (store.segment.geometry.stride - RECORD_HEADER, 0)
        assert store.segment.live[Live.CLEAR_GENERATION] == 0
