"""Room: the limit holds to the byte, nothing reserved is lost for good, and no full memory ends a process.

A full file system is SIGBUS to who touches memory that was not reserved, a full control group SIGKILL. So
what may end that way runs in a child, whose end is looked at.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import eventually, is_a_sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from kills import child, ended, in_child, kill, lingering
from sources import Samples
from stores import attached, count, ids, opened, stored, wrong
from test_memory_limits import control_group

import hotset
from hotset.store import memory_limits as memory
from hotset.store.format import LINE, PRESENT, ROW_MASK, Live, Slot
from hotset.store.leaves.schema import Schema
from hotset.store.memory_limits import Headroom
from hotset.store.store import Store

MIB = 1 << 20


def row(i: int) -> torch.Tensor:
    """With its header 256 bytes."""
    return torch.full((29,), i)


def text(i: int) -> tuple[int, str]:
    """A tail of one to five lines."""
    return i, f"{i} " * (1 + i * 37 % 300)


def used(store: Store) -> int:
    return store.segment.taken


def rows_of(store: Store) -> list[int]:
    words = store.segment.index[store.segment.index >= PRESENT]
    return sorted((words & ROW_MASK).tolist())


class Budget:
    """Other caches' budget: has room without end, and frees nothing."""

    def __init__(self) -> None:
        self.held = 0
        self.asked = 0

    def left(self) -> int:
        return 1 << 40

    def take(self, total: int) -> bool:
        self.held = total
        return True

    def make_room(self, total: int, more: int = 0) -> str | None:
        self.asked += 1
        return ""


# The cache's own limit


def later(store: Store) -> None:
    """Half a second later: room that was refused is asked for again."""
    store.allocator.reopen()


@settings(max_examples=40, deadline=None, database=None)
@given(st.integers(0, 200), st.integers(0, 255))
def test_the_limit_holds_to_the_byte(fit: int, rest: int) -> None:
    with opened(row, 250, 256 * fit + rest) as store:
        uncached = store.fill(np.arange(250), row)
        assert sorted(uncached) == list(range(250))
        assert count(store) == min(fit, 250)
        assert used(store) <= 256 * fit + rest
        assert store.check() == []
        if fit < 250:
            assert store.allocator.why_full is not None
            assert "`memory=`" in store.allocator.why_full
        assert wrong(stored(store), row) == {}


@settings(max_examples=40, deadline=None, database=None)
@given(st.integers(0, 100_000))
def test_the_limit_holds_for_rows_and_tails_together(limit: int) -> None:
    with opened(text, 150, limit) as store:
        store.fill(np.arange(150), text)
        assert used(store) <= limit
        assert store.check() == []
        assert wrong(stored(store), text) == {}
        live = store.segment.live
        assert (
            used(store) == int(live[Live.ROWS_NEXT]) * store.schema.stride + int(live[Live.LINES_NEXT]) * LINE
        )


def test_no_memory_lies_outside_of_what_was_reserved() -> None:
    with opened(row, 12_000, 2 * MIB) as store:
        store.fill(np.arange(12_000), row)
        geometry = store.segment.geometry
        pages = -(-2 * MIB // 4096) * 4096
        assert os.fstat(store.segment.fd).st_blocks * 512 <= geometry.rows_at + pages
        assert count(store) == 2 * MIB // 256


@pytest.mark.parametrize("stored_rows", [1, 10, 100, 1000])
def test_a_small_cache_takes_little_more_than_its_data(stored_rows: int) -> None:
    with opened(row, 100_000, 100 * MIB) as store:
        store.fill(np.arange(stored_rows), row)
        assert 256 * stored_rows <= used(store) <= 256 * (stored_rows + stored_rows // 4 + 16)


def test_extents_are_taken_far_less_often_than_rows() -> None:
    with opened(row, 12_000, 100 * MIB) as store:
        extended = []
        reserve = store.segment.reserve
        store.segment.reserve = lambda *run: bool(extended.append(run) or reserve(*run))  # type: ignore[func-returns-value, method-assign]
        store.fill(np.arange(12_000), row)
        assert count(store) == 12_000
        assert 5 < len(extended) < 100
        assert max(length for _, length in extended) <= 8 * MIB
        assert sum(length for _, length in extended) == used(store)


def test_room_that_is_freed_by_a_clear_is_used_again() -> None:
    with opened(text, 150, 30_000) as store:
        for _ in range(3):
            store.fill(np.arange(150), text)
            assert 0 < count(store) < 150
            assert store.clear()
            assert used(store) == 0
            assert store.check() == []
            later(store)


def test_after_the_limit_was_hit_smaller_tails_still_find_room() -> None:
    def large_or_small(i: int) -> str:
        return "x" * (100_000 if i % 2 else 10) + str(i)

    with opened(large_or_small, 8, 50_000) as store:
        for sample in range(8):
            later(store)
            store.fill(ids(sample), large_or_small)
        assert stored(store).keys() == {0, 2, 4, 6}
        assert store.check() == []


def test_room_is_there_until_it_was_refused() -> None:
    stride = Schema.infer([row(0), row(1)], keep_order=True).stride
    with opened(row, 40, 10 * stride) as store, attached(store) as other:
        for sample in range(10):
            assert store.has_room()
            assert used(store) <= 10 * stride
            assert store.fill(ids(sample), row, keep=False) == {}
        assert not store.has_room()
        assert not other.has_room(), "another process has not met it"
        assert list(store.fill(ids(10), row, keep=False)) == [10]
        assert store.clear()
        assert other.has_room()


def test_where_a_large_record_found_no_room_there_is_none_for_a_small_one() -> None:
    """It is to be looked for where it was stored instead, and that is the same place for all who look."""
    with opened(text, 40, 6000) as store:
        large, small = (1, "x" * 4000), (2, "x")
        values = {0: large, 1: large, 2: small}
        store.fill(ids(0), values.__getitem__)
        assert store.has_room()
        assert list(store.fill(ids(1), values.__getitem__, keep=False)) == [1]
        later(store)
        with attached(store) as other:
            store.segment.live[Live.LIMIT] = used(store) + 50
            assert not other.has_room()
            store.segment.live[Live.LIMIT] += 1 << 20
            assert other.has_room(), "a part is free again"
            store.segment.live[Live.LIMIT] = used(store) + 50
            assert other.has_room(), "nobody was refused since, and it has rows and lines of its own"


def test_samples_whose_tails_find_no_room_take_none() -> None:
    def large(i: int) -> str:
        return "x" * 100_000

    with opened(large, 100, 50_000) as store:
        for sample in range(100):
            later(store)
            store.fill(ids(sample), large)
        assert count(store) == 0
        assert used(store) <= 16 * store.schema.stride


# Several processes


@pytest.mark.parametrize("limit", [64 << 10, MIB])
def test_processes_that_fill_together_use_the_limit_to_93_percent(limit: int) -> None:
    n = 3 * limit // 256
    with opened(row, n, limit) as store:

        def fill(seed: int) -> None:
            order = np.random.default_rng(seed).permutation(n)
            for begin in range(0, n, 32):
                store.fill(order[begin : begin + 32], row)

        children = [child(lambda seed=seed: fill(seed)) for seed in range(4)]  # type: ignore[misc]
        assert [ended(pid) for pid in children] == [0] * 4
        assert 0.93 * limit <= 256 * count(store) <= used(store) <= limit
        assert store.check() == []
        assert len(set(rows_of(store))) == count(store)
        assert wrong(stored(store), row) == {}


def test_processes_that_fill_tails_together_use_the_limit_to_93_percent() -> None:
    with opened(text, 6000, MIB) as store:

        def fill(seed: int) -> None:
            order = np.random.default_rng(seed).permutation(6000)
            for begin in range(0, 6000, 32):
                store.fill(order[begin : begin + 32], text)

        children = [child(lambda seed=seed: fill(seed)) for seed in range(4)]  # type: ignore[misc]
        assert [ended(pid) for pid in children] == [0] * 4
        assert int(store.segment.slots[:, Slot.STORED_BYTES].sum()) >= 0.93 * MIB
        assert store.check() == []
        assert wrong(stored(store), text) == {}


def test_what_a_dead_process_had_reserved_passes_to_its_slots_next_holder() -> None:
    with opened(text, 100) as store:
        store.fill(ids(0), text)  # this process has the first slot
        with lingering(lambda: store.fill(ids(1), text)) as pid:
            before = used(store)
            kill(pid)
        in_child(lambda: store.fill(ids(2), text))
        assert used(store) == before
        assert store.segment.slots[2:, Slot.INCARNATION].sum() == 0
        assert wrong(stored(store), text) == {}
        assert stored(store).keys() == {0, 1, 2}
        assert store.check() == []


def test_processes_that_die_one_after_the_other_lose_no_room() -> None:
    with opened(row, 40, 256 * 40) as store:
        for number in range(40):
            in_child(lambda number=number: store.fill(ids(number), row))  # type: ignore[misc]
        assert count(store) == 40
        assert used(store) == 256 * 40


def test_a_row_that_found_no_room_for_its_tail_is_not_shared_with_a_forked_child() -> None:
    """What the parent keeps of its extent after a tail did not fit is the parent's alone."""

    def some_large(i: int) -> str:
        return ("x" * 100_000 if i == 9 else "small") + str(i)

    with opened(some_large, 10, 50_000) as store:
        store.fill(ids(9), some_large)
        later(store)
        in_child(lambda: store.fill(ids(2), some_large))
        store.fill(ids(4), some_large)
        assert store.check() == []
        assert wrong(stored(store), some_large) == {}
        assert stored(store).keys() == {2, 4}


def test_a_row_that_found_no_room_for_its_tail_is_not_used_after_another_processs_clear() -> None:
    def some_large(i: int) -> str:
        return ("x" * 100_000 if i == 9 else "small") + str(i)

    with opened(some_large, 10, 50_000) as store, attached(store) as other:
        store.fill(ids(9), some_large)
        assert other.clear()
        other.fill(ids(2), some_large)
        later(store)
        store.fill(ids(4), some_large)
        assert store.check() == []
        assert wrong(stored(store), some_large) == {}
        assert stored(store).keys() == {2, 4}


# The machine's memory


def test_extents_stop_where_the_headroom_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(row, 10_000, 100 * MIB) as store:
        left = MIB

        def headroom() -> Headroom:
            return Headroom(left - used(store), 10 * MIB, "control group /job (memory.max)")

        monkeypatch.setattr(memory, "headroom", headroom)
        store.fill(np.arange(10_000), row)
        # The index, which is touched as samples come, is spoken for.
        assert count(store) == (MIB - store.segment.geometry.rows_at) // 256
        assert store.allocator.why_full is not None
        assert "control group /job (memory.max)" in store.allocator.why_full
        left = 2 * MIB  # a neighbour has ended
        assert eventually(lambda: not store.allocator.is_full)
        store.fill(np.arange(10_000), row)
        assert count(store) == (2 * MIB - store.segment.geometry.rows_at) // 256
        assert store.check() == []


# A full file system


@contextlib.contextmanager
def small_tmpfs(folder: Path, size: int) -> Iterator[Path]:
    """A tmpfs of that size, or a skipped test."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "hotset-test", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _fill_in_child(store: Store, order: Any, make: Any) -> int:
    """Fill in steps of 16 and look after it, in a child that may get a signal; returns how it ended."""

    def body() -> None:
        for begin in range(0, len(order), 16):
            some = order[begin : begin + 16]
            uncached = store.fill(some, make)
            assert wrong(uncached, make) == {}
            assert wrong(stored(store, some), make) == {}
        assert store.allocator.why_full is not None
        assert "file system" in store.allocator.why_full
        assert store.segment.slots[:, Slot.STORED_BYTES].sum() <= used(store)
        assert store.check() == []
        store.close()

    return ended(child(body))


@pytest.mark.parametrize("make", [row, text])
def test_a_full_tmpfs_is_no_sigbus(tmp_path: Path, make: Any) -> None:
    with (
        small_tmpfs(tmp_path, 2 * MIB) as folder,
        opened(make, 10_000, 64 * MIB, path=folder / "segment") as store,
    ):
        assert _fill_in_child(store, np.arange(10_000), make) == 0
        assert used(store) > MIB


def test_a_tmpfs_that_others_have_filled_is_no_sigbus(tmp_path: Path) -> None:
    with (
        small_tmpfs(tmp_path, 2 * MIB) as folder,
        opened(row, 5000, 64 * MIB, path=folder / "segment") as store,
    ):
        with contextlib.suppress(OSError), (folder / "hog").open("wb", buffering=0) as hog:
            while hog.write(bytes(4096)):
                pass
        assert _fill_in_child(store, np.arange(5000), row) == 0
        (folder / "hog").unlink()
        store.fill(np.arange(5000), row)
        assert count(store) == 5000
        assert store.check() == []


def test_a_tmpfs_too_small_for_the_index_is_no_sigbus(tmp_path: Path) -> None:
    """The index too is memory that is touched: where there is none for all of it, no segment is made."""
    with small_tmpfs(tmp_path, 2 * MIB) as folder:
        with pytest.raises(OSError, match="space"), opened(row, 1_000_000, 64 * MIB, path=folder / "segment"):
            pass
        assert list(folder.iterdir()) == []


def test_a_tmpfs_without_room_for_a_segment_is_an_os_error_that_leaves_nothing(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, 8192) as folder:
        (folder / "hog").write_bytes(bytes(8192))
        with pytest.raises(OSError, match="No space"), opened(row, 10, path=folder / "segment"):
            pass
        assert [path.name for path in folder.iterdir()] == ["hog"]


@pytest.mark.filterwarnings("ignore::hotset.HotsetWarning")
@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_AS"])
def test_under_a_limit_of_the_shell_samples_still_come(limit: str) -> None:
    """``ulimit -v`` and ``ulimit -f``, which batch systems set: no room, and not an error of the user's."""

    def body() -> None:
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        most = MIB if limit == "RLIMIT_FSIZE" else address_space + 256 * MIB
        resource.setrlimit(getattr(resource, limit), (most, most))
        with hotset.cache(Samples(row, 4_000_000), memory="8GiB") as cached:
            for i in range(100):
                assert torch.equal(cached[i], row(i))

    in_child(body)


def test_the_memory_that_is_taken_by_default_fits_into_a_limited_address_space() -> None:
    def body() -> None:
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (address_space + (2 << 30),) * 2)
        with hotset.cache(Samples(row, 100)) as cached:
            for _ in range(2):
                for i in range(100):
                    assert torch.equal(cached[i], row(i))
            assert cached.stats().hits == 100

    in_child(body)


# A real control group

_PRELUDE = """
import os, sys, warnings
sys.path[:0] = [TESTS]
import numpy as np, torch
torch.set_num_threads(1)
warnings.simplefilter("always")
def image(i):
    return torch.full((KIB << 10,), i % 251, dtype=torch.uint8)
"""

_STORE = (
    _PRELUDE
    + """
from hotset.store.leaves.schema import Schema
from hotset.store.store import Store
store = Store.create(Schema.infer([image(0)], keep_order=True), 360, 4 << 30, about={})
def right(i, value):
    return value[0] == i % 251 and bool((value == value[0]).all())
for epoch in range(2):
    for begin in range(0, 360, 8):
        some = np.arange(begin, begin + 8)
        uncached = store.fill(some, image)
        assert all(right(i, value) for i, value in uncached.items())
        there = some[store.present(some)]
        assert all(right(i, v) for i, v in zip(there.tolist(), store.read(there) if len(there) else []))
print(int((store.segment.index != 0).sum()), store.allocator.why_full, sep="|")
"""
)

_INDEX = (
    _PRELUDE
    + """
from hotset.store.leaves.schema import Schema
from hotset.store.store import Store
n = 20_000_000
def image(i):
    return torch.full((512,), i)
try:
    store = Store.create(Schema.infer([image(0)], keep_order=True), n, 4 << 30, about={})
except OSError as error:
    print(error)
    sys.exit(0 if "memory" in str(error) else 1)
order = np.random.default_rng(0).permutation(n)
for begin in range(0, 160_000, 4096):
    some = order[begin : begin + 4096]
    uncached = store.fill(some, lambda i: image(i))
    assert all(int(value[7]) == i for i, value in list(uncached.items())[:50])
for begin in range(0, n, 1 << 16):
    store.present(order[begin : begin + (1 << 16)])
print(int(store.allocator.why_full is not None), store.allocator.why_full, sep="|")
"""
)

_CACHE = (
    _PRELUDE
    + """
import hotset
from sources import Samples
n = 448 * 1024 // KIB
cached = hotset.cache(Samples(image, n), memory="4GiB")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for epoch in range(2):
        seen = 0
        for batch in hotset.DataLoader(cached, batch_size=BATCH, num_workers=WORKERS):
            expected = (torch.arange(seen, seen + BATCH) % 251).to(torch.uint8)
            assert torch.equal(batch[:, 0], expected) and torch.equal(batch[:, -1], expected)
            seen += BATCH
        assert seen == n
said = [str(w.message) for w in caught]
print(cached.stats().cached, len(said), said, sep="|")
assert cached.check() == []
cached.close()
"""
)


def run_in(group: Path, code: str, **constants: int) -> str:
    """Run Python code by a process inside the group; returns what it prints."""
    constants_ = "".join(f"{name} = {value}\n" for name, value in constants.items())
    code = f"TESTS = {str(Path(__file__).parents[1])!r}\n{constants_}{code}"
    enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", enter, str(group), sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"ended with {done.returncode}, {oom_kills(group)} OOM kills\n{done.stderr}"
    return done.stdout


def oom_kills(group: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            words = (group / name).read_text().split()
            return int(words[words.index("oom_kill") + 1])
    return 0


# A torch for CUDA takes more for itself.
TORCHS_OWN = 256 * MIB if torch.version.cuda is not None else 0


@pytest.mark.chaos  # a loader in a control group of that size, below, fills the same store
def test_a_control_group_too_small_for_the_data_kills_nobody() -> None:
    with control_group(400 * MIB + TORCHS_OWN) as group:
        cached, why = run_in(group, _STORE, KIB=1024).split("|")
        assert oom_kills(group) == 0
        assert 20 < int(cached) < 360
        assert group.name in why


@pytest.mark.chaos
def test_a_control_group_too_small_for_the_data_and_a_large_index_kills_nobody() -> None:
    """The index of 20 million samples is 160 MB, which random indices touch everywhere."""
    with control_group(512 * MIB + TORCHS_OWN) as group:
        run_in(group, _INDEX, KIB=0)
        assert oom_kills(group) == 0


@pytest.mark.parametrize(
    ("workers", "kib", "batch", "size"),
    [
        pytest.param(0, 128, 16, 480, marks=pytest.mark.chaos),
        pytest.param(2, 128, 16, 480, marks=pytest.mark.chaos),
        pytest.param(2, 256, 32, 480, marks=pytest.mark.chaos),
        (2, 1024, 32, 700),  # batches in flight take more than the margin
    ],
)
def test_a_loader_in_a_control_group_too_small_for_the_data_goes_on_with_one_warning(
    workers: int, kib: int, batch: int, size: int
) -> None:
    with control_group(size * MIB + TORCHS_OWN) as group:
        out = run_in(group, _CACHE, WORKERS=workers, KIB=kib, BATCH=batch)
        cached, warned, said = out.split("|", 2)
        assert oom_kills(group) == 0
        assert 20 < int(cached) < 448 * 1024 // kib
        assert int(warned) == 1, said
        assert is_a_sentence(said.strip()[2:-2])
        assert "memory" in said


def test_an_extent_that_is_not_as_this_process_left_it_is_not_used() -> None:
    with opened(row, 40) as store:
        store.fill(np.arange(10), row)
        store.participant.row[Slot.ROW_NEXT] = 0
        store.fill(np.arange(10, 40), row)
        assert wrong(stored(store), row) == {}
        assert store.check() == []


# The budget that caches share


def test_a_budget_has_back_what_a_full_file_system_refused() -> None:
    with opened(row, 10) as store:
        store.allocator.allowance = budget = Budget()
        store.segment.reserve = lambda start, size: False  # type: ignore[method-assign]
        assert sorted(store.fill(ids(1, 2), row)) == [1, 2]
        assert budget.held == 0
        del store.segment.reserve


def test_caches_that_give_the_machine_nothing_back_are_dropped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory may be charged to another control group than the one that is full."""
    with opened(row, 10) as store:
        store.allocator.allowance = budget = Budget()
        monkeypatch.setattr(memory, "headroom", lambda: Headroom(0, MIB, "the machine"))
        for sample in range(3):
            store.fill(ids(sample), row)
            later(store)
        assert count(store) == 0
        assert budget.asked == 1
