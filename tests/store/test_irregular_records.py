"""Forms of their own: samples with optional fields, missing keys and lists of any length are cached too.

Programs as users write them: a dataset whose samples differ, ``hotset.cache``, a loader with a collate
function that knows what to do with None. Each sample is a hit from the second epoch on, equal to its miss.
"""

from __future__ import annotations

import contextlib
import enum
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import all_pairs, difference, equal_batches, is_a_sentence, often, rarely, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from kills import in_child
from samples import Colour, Opaque, Pair, Record
from session_places import reboot
from sources import Counting, ReadLog, Samples
from stores import attached, clear_and_meanwhile, count, ids, store_of, stored, wrong
from test_schema import trees
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate_fn_map

import hotset
from hotset import HotsetWarning
from hotset.determinism.equality import differs
from hotset.session import sessions
from hotset.store.format import LINE, ON_DISK, OWN_FORM, RECORD, ROW_MASK, Live
from hotset.store.leaves.schema import Schema
from hotset.store.spill import SpillTo
from hotset.store.store import Store

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),  # of trees that failed
]
N = 300
Make = Callable[[int], Any]


def image(i: int) -> torch.Tensor:
    return torch.full((3, 4, 4), i, dtype=torch.int16)


def sometimes_none(i: int) -> Any:
    """A caption that most samples have not got."""
    return {"image": image(i), "caption": f"picture {i}" if i % 9 == 0 else None, "label": i}


def sometimes_missing(i: int) -> Any:
    sample = {"image": image(i), "label": i}
    return sample if i % 3 else {**sample, "mask": torch.ones(i % 5, 4, dtype=torch.bool), "by": "hand"}


def boxes(i: int) -> Any:
    """A list of dicts, of another length each time."""
    found = [{"box": torch.arange(4.0) * j, "class": f"c{j}", "score": j / 3} for j in range(i * 7 % 6)]
    return {"image": np.full((2, 1 + i % 3), i, np.float32), "boxes": found, "crowd": [i] * (i % 4)}


def mixed_dtypes(i: int) -> Any:
    x = torch.arange(i, i + 6)
    return x.to((torch.float32, torch.float64, torch.int8, torch.bfloat16)[i % 4]).view(2, 3), i


def int_or_text(i: int) -> Any:
    return image(i), (i if i % 4 else f"class {i}")


def sometimes_large(i: int) -> Any:
    """Where most samples are small, and some have an array of many lines."""
    return {"x": i, "extra": torch.full((50, 1 + i), i) if i % 10 == 3 else None}


def nested(i: int) -> Any:
    inner = (
        Pair(np.arange(i % 4), i),
        Record(torch.full((2,), i), "r"),
        Colour.RED,
        (),
        {"deep": [None, [i]]},
    )
    return [i, {"a": inner[i % 5]}] if i % 7 else (i, b"bytes", None)


MAKERS = [
    *(sometimes_none, sometimes_missing, boxes, mixed_dtypes, int_or_text, sometimes_large, nested),
]


def of_any_form(samples: list[Any]) -> Any:
    """A collate function as users write them: what cannot be stacked stays a list."""
    return {"count": len(samples), "samples": samples}


def is_quiet(run: Callable[[], Any]) -> Any:
    with recorded() as caught:
        result = run()
    assert [str(w.message) for w in caught] == []
    return result


# What users see


@pytest.mark.parametrize("make", MAKERS)
def test_all_are_cached_and_hits_equal_misses(make: Make, tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "log")

    def run() -> None:
        with hotset.cache(Counting(make, N, log), memory="64MiB") as cached:
            assert "all of them fit" in str(cached.plan)
            for i in range(N):
                equal_batches(cached[i], make(i), f"miss {i}")
            assert (cached.stats().cached, cached.stats().uncached) == (N, 0)
            before = log.total()
            for i in range(N):
                equal_batches(cached[i], make(i), f"hit {i}")
            equal_batches(cached.__getitems__(list(range(N))), [make(i) for i in range(N)])
            # The audit may read a sample now and then.
            assert log.total() - before <= 2
            assert cached.check() == []

    is_quiet(run)


@pytest.mark.parametrize(
    ("make", "loader_type", "workers"),
    rarely(
        all_pairs([sometimes_none, boxes, mixed_dtypes], [hotset.DataLoader, DataLoader], [0, 2]),
        (mixed_dtypes, DataLoader, 2),
        (boxes, hotset.DataLoader, 2),
    ),
)
def test_a_users_collate_function_gets_the_same_in_each_epoch(
    make: Make, loader_type: Any, workers: int
) -> None:
    options: dict[str, Any] = {"batch_size": 16, "num_workers": workers, "collate_fn": of_any_form}
    expected = list(DataLoader(Samples(make, N), **options))
    with hotset.cache(Samples(make, N), memory="64MiB") as cached:
        for _ in range(2):
            equal_batches(list(loader_type(cached, **options)), expected)
        assert cached.stats().cached == N


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_one_form_are_stacked_whichever_that_is(workers: int) -> None:
    """Some batches are gathered, and some are all of another form than most."""
    options: dict[str, Any] = {"batch_size": 5, "num_workers": workers}
    make = _another_dtype_in_whole_batches
    expected = list(DataLoader(Samples(make, N), **options))
    with hotset.cache(Samples(make, N), memory="64MiB") as cached:
        for _ in range(3):
            equal_batches(list(hotset.DataLoader(cached, **options)), expected)
        assert cached.stats().cached == N
        assert cached.check() == []


def test_what_default_collate_was_taught_is_found_though_the_first_sample_is_odd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def halves(batch: list[int], *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.tensor(batch) / 2

    monkeypatch.setitem(default_collate_fn_map, int, halves)
    make = _another_dtype_in_whole_batches
    expected = list(DataLoader(Samples(make, N), batch_size=5))
    with hotset.cache(Samples(make, N), memory="64MiB") as cached:
        for _ in range(3):
            equal_batches(list(hotset.DataLoader(cached, batch_size=5)), expected)


def _another_dtype_in_whole_batches(i: int) -> tuple[torch.Tensor, int]:
    # The first batch too: it is not the one that decides how batches are made.
    return torch.full((4, 3), i, dtype=torch.float64 if i // 5 % 7 == 0 else torch.int32), i


def test_a_live_transform_gets_the_same_samples() -> None:
    def caption(sample: Any) -> Any:
        return {**sample, "caption": sample["caption"] or "no caption", "image": sample["image"].float()}

    live = hotset.nondeterministic(caption)
    with hotset.cache(Samples(sometimes_none, N), transform=[live], memory="64MiB") as cached:
        for _ in range(2):
            found = [sample for batch in hotset.DataLoader(cached, collate_fn=list) for sample in batch]
            equal_batches(found, [caption(sometimes_none(i)) for i in range(N)])
        assert cached.stats().cached == N


def test_what_was_handed_out_is_the_users_own() -> None:
    with hotset.cache(Samples(boxes, N), memory="64MiB") as cached:
        for _ in range(3):
            for i in range(0, N, 7):
                got = cached[i]
                equal_batches(got, boxes(i))
                got["image"][:] = -1
                for box in got["boxes"]:
                    box["box"].zero_()
                got["boxes"].clear()


def test_another_process_has_hits_too(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "log")
    with hotset.cache(Counting(nested, N, log), memory="64MiB") as cached:
        for i in range(N):
            cached[i]
        before = log.total()
        in_child(lambda: equal_batches([cached[i] for i in range(N)], [nested(i) for i in range(N)]))
        assert log.total() - before <= 2


# Which form is the common one


def test_the_common_form_is_that_of_most() -> None:
    """The first sample has a caption, and nearly no other."""
    several = [sometimes_none(i) for i in range(8)]
    assert (
        Schema.infer(several, keep_order=True).to_json()
        == Schema.infer(several[1:], keep_order=True).to_json()
    )
    # Of those that differ in shapes only, one form is made.
    shapes = [torch.zeros(2, 3), {"x": 1}, torch.zeros(4, 3), {"x": 2}, torch.zeros(5, 3)]
    assert [leaf.fixed_bytes for leaf in Schema.infer(shapes, keep_order=True).leaves] == [None]
    # Of several with as many samples, the first.
    assert Schema.infer([1, "a"], keep_order=True).to_json() == Schema.infer([1], keep_order=True).to_json()
    assert (
        Schema.infer([Opaque(1), 1, "a"], keep_order=True).to_json()
        == Schema.infer([1], keep_order=True).to_json()
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_default_batches_are_gathered_though_the_first_sample_is_odd(workers: int) -> None:
    def make(i: int) -> Any:
        return (torch.full((30,), i), "first") if i == 0 else (torch.full((30,), i), i)

    with hotset.cache(Samples(make, N), memory="64MiB") as cached:
        indices = list(range(1, N))
        loader = hotset.DataLoader(
            torch.utils.data.Subset(cached, indices), batch_size=13, num_workers=workers
        )
        for _ in range(2):
            got = list(loader)
        expected = list(DataLoader(torch.utils.data.Subset(Samples(make, N), indices), batch_size=13))
        equal_batches(got, expected)
        assert store_of(cached).schema.to_json() == Schema.infer([make(1)], keep_order=False).to_json()


# What cannot be cached


def _sometimes_opaque(i: int) -> Any:
    return {"x": i, "more": Opaque(i) if i % 2 else None}


def test_what_cannot_be_cached_is_named_and_the_plan_counts_it() -> None:
    with hotset.cache(Samples(_sometimes_opaque, N), memory="64MiB") as cached:
        text = str(cached.plan)
        assert "all of them fit" not in text
        assert 0.0 < cached.plan.fits < 1.0
        assert f"{cached.plan.fits:.0%} of them fit" in text
        assert "samples that were read cannot be cached" in text
        assert "register_codec" in text
        with recorded() as caught:
            for i in range(N):
                assert difference(cached[i], _sometimes_opaque(i)) is None
        (told,) = {str(w.message) for w in caught}
        assert "cannot be cached: ['more']: an object of samples.Opaque; hotset.register_codec" in told
        assert is_a_sentence(told)
        assert cached.stats().cached == N // 2
        assert cached.check() == []


class _Node:
    """Refers to others, as a node of a graph does."""

    def __init__(self, *others: Any) -> None:
        self.others = others


@pytest.mark.parametrize("same", [_Node, lambda: {"weight": 1}, lambda: [1]])
def test_a_sample_with_one_object_twice_comes_from_the_source_though_the_first_have_two(same: Any) -> None:
    def make(i: int) -> _Node:
        one = same()
        return _Node(one, one if i % 2 else same())

    with recorded() as caught, hotset.cache(Samples(make, N), memory="64MiB") as cached:
        for _ in range(2):
            for i, sample in enumerate([cached[i] for i in range(N)]):
                assert (sample.others[0] is sample.others[1]) == (i % 2 == 1)
        assert cached.stats().cached == N // 2
    (told,) = {str(w.message) for w in caught}
    assert "the same object of" in told


class _Handle:
    """Holds something that can be compared and pickled by nobody, as objects of a library in C do."""

    def __init__(self, i: int) -> None:
        self.number, self.handle = i, iter((i,))


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_cannot_be_compared_come_from_the_source(workers: int) -> None:
    """Two readings of one differ, which is nothing that a cache could freeze: none of them is stored."""
    source = Samples(_Handle, N)
    with recorded() as caught, hotset.cache(source, memory="64MiB") as cached:
        loader = hotset.DataLoader(
            cached, batch_size=4, num_workers=workers, collate_fn=lambda samples: [s.number for s in samples]
        )
        assert [number for _ in range(2) for batch in loader for number in batch] == [*range(N)] * 2
        assert cached.stats().cached == 0
    (told,) = {str(w.message) for w in caught}
    assert told.startswith("nothing of Samples can be cached, so samples come from the source")
    with pytest.raises(hotset.NotCacheable, match="random's global state moved"):
        hotset.cache(Samples(lambda i: (_Handle(i), random.random()), N), memory="64MiB")


class _Described(_Handle):
    """The same, with a codec."""


def test_a_codec_makes_samples_comparable_that_nobody_else_can_compare() -> None:
    hotset.register_codec(_Described, lambda value: value.number, _Described)
    with hotset.cache(Samples(_Described, N), memory="64MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=10, collate_fn=list)
        for _ in range(3):
            assert [sample.number for batch in loader for sample in batch] == list(range(N))
        assert loader.last_epoch is not None
        assert loader.last_epoch.hit_rate == 1.0
    with pytest.raises(hotset.NotCacheable, match="returns another sample each time"):
        hotset.cache(Samples(lambda i: _Described(next(_counted)), N), memory="64MiB")


_counted = iter(range(10_000))


def test_a_class_that_cannot_be_found_by_name_is_not_kept() -> None:
    class Local(enum.Enum):
        A = 1

    def make(i: int) -> Any:
        return {"x": i, "kind": Local.A if i % 5 == 4 else None}

    with hotset.cache(Samples(make, 40), memory="64MiB") as cached:
        for _ in range(2):
            equal_batches([cached[i] for i in range(40)], [make(i) for i in range(40)])
        assert cached.stats().cached == 32


# Room


def test_they_count_as_bytes_and_keep_to_the_limit() -> None:
    def large(i: int) -> Any:
        return {"x": torch.full((1000,), i)} if i % 3 == 0 else {"x": torch.full((1000 + i,), i), "y": None}

    with hotset.cache(Samples(large, N), memory="64MiB") as cached:
        list(hotset.DataLoader(cached, batch_size=10, collate_fn=list))
        everything = cached.stats().bytes
        assert cached.stats().cached == N
        assert everything >= sum(large(i)["x"].nbytes for i in range(N))
    limit = 500_000
    with hotset.cache(Samples(large, N), memory=limit) as cached, recorded() as caught:
        for _ in range(2):
            batches = list(hotset.DataLoader(cached, batch_size=10, collate_fn=list))
            equal_batches(batches, list(DataLoader(Samples(large, N), batch_size=10, collate_fn=list)))
        assert 0 < cached.stats().cached < N
        assert cached.stats().bytes <= limit
        assert cached.check() == []
    (told,) = caught
    assert "memory limit is reached" in str(told.message)


def test_after_a_clear_they_come_anew() -> None:
    with hotset.cache(Samples(boxes, N), memory="64MiB") as cached:
        for _ in range(3):
            for i in range(N):
                equal_batches(cached[i], boxes(i))
            assert cached.stats().cached == N
            cached.clear()
            assert (cached.stats().cached, cached.stats().bytes) == (0, 0)


# Sessions, disks


@pytest.mark.parametrize("make", rarely(MAKERS, sometimes_missing, mixed_dtypes, int_or_text))
def test_what_memory_has_no_room_for_lies_on_the_disk(make: Make, tmp_path: Path) -> None:
    with hotset.cache(Samples(make, N), memory="8KiB", spill=str(tmp_path)) as cached:
        for _ in range(2):
            for i in range(N):
                equal_batches(cached[i], make(i))
        equal_batches(cached.__getitems__(list(range(N))), [make(i) for i in range(N)])
        found = cached.stats()
        assert found.cached == N
        assert 0 < found.spilled < N
        assert cached.check() == []


@pytest.mark.parametrize("make", [sometimes_none, nested])
def test_the_next_job_of_a_session_and_one_after_a_reboot_have_hits(
    make: Make, tmp_path: Path, disk: str, runtime: Path
) -> None:
    log = ReadLog(tmp_path / "log")
    sessions.create("a", memory=1 << 20, spill=disk, persist=True)
    for job in range(4):
        if job == 2:
            reboot(runtime)
        before = log.total()
        with hotset.cache(Counting(make, N, log), session="a", key="forms") as cached:
            equal_batches([cached[i] for i in range(N)], [make(i) for i in range(N)])
            assert cached.stats().cached == N
            assert cached.check() == []
        assert job == 0 or log.total() - before <= 20, "what is probed, and audited"


@pytest.mark.filterwarnings("ignore:.*were not ready:hotset.HotsetWarning")  # of a machine that is busy
def test_a_window_has_them_too() -> None:
    def make(i: int) -> Any:
        return {"x": torch.full((50,), i), "note": f"{i}" if i % 4 == 1 else None}

    window = hotset.Window(100, replace=0.2)
    with hotset.cache(Samples(make, N), window=window, memory="64MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=10, collate_fn=list)
        for _ in range(6):
            for batch in loader:
                for sample in batch:
                    equal_batches(sample, make(int(sample["x"][0])))
            assert cached.stats().cached == 100
        assert cached.check() == []


# Damage


def _odd_record(store: Store, i: int) -> tuple[int, int]:
    """Where a sample's row is, and its tail."""
    geometry = store.segment.geometry
    assert store.segment.index[i] & OWN_FORM
    row = geometry.rows_at + int(store.segment.index[i] & ROW_MASK) * geometry.stride
    place = int(np.frombuffer(store.segment.buffer, "<u8", 1, row + 16)[0])
    return row, geometry.lines_at + (place >> 24) * LINE


@contextlib.contextmanager
def filled(make: Make = boxes, n: int = 24, **options: Any) -> Any:
    schema = Schema.infer([make(i) for i in range(n)], keep_order=True)
    with contextlib.closing(Store.create(schema, n, 1 << 20, about={}, **options)) as store:
        store.fill(np.arange(n), make)
        yield store


@pytest.mark.parametrize("part", ["row", "tail", "kind", "stamp"])
def test_a_damaged_record_is_found(part: str) -> None:
    with filled() as store:
        odd = next(i for i in range(24) if store.segment.index[i] & OWN_FORM)
        row, tail = _odd_record(store, odd)
        assert store.check() == []
        if part == "kind":
            store.segment.index[odd] &= ~OWN_FORM
        else:
            store.segment.buffer[{"row": row + 24, "tail": tail, "stamp": row + 6}[part]] ^= 32
        (problem,) = store.check()
        assert f"sample {odd}" in problem
        if part != "stamp":
            common = next(i for i in range(24) if i != odd and not store.segment.index[i] & OWN_FORM)
            store.segment.index[common] |= OWN_FORM
            assert len(store.check()) == 2


def test_a_damaged_record_on_a_disk_is_read_again(tmp_path: Path) -> None:
    schema = Schema.infer([boxes(i) for i in range(24)], keep_order=True)
    spill = SpillTo(str(tmp_path))
    with contextlib.closing(Store.create(schema, 24, 0, about={}, spill=spill)) as store:
        store.fill(np.arange(24), boxes)
        assert (store.segment.index & ON_DISK != 0).all()
        assert store.spill is not None
        odd = next(i for i in range(24) if store.segment.index[i] & OWN_FORM)
        geometry = store.spill.segment.geometry
        row = geometry.rows_at + int(store.segment.index[odd] & ROW_MASK) * geometry.stride
        byte = os.pread(store.spill.segment.fd, 1, row + 30)
        os.pwrite(store.spill.segment.fd, bytes([byte[0] ^ 1]), row + 30)
        assert len(store.check()) == 1
        with pytest.warns(HotsetWarning, match=f"sample {odd} is damaged on the disk"):
            assert store.read(ids(odd)) is None
        store.fill(ids(odd), boxes)
        assert wrong(stored(store), boxes) == {}
        assert store.check() == []


def test_a_forged_form_is_no_sample_and_ends_nothing() -> None:
    """Whatever lies in a record's body, reading it reaches nothing outside, and raises nothing."""
    rng = np.random.default_rng(0)
    with filled(nested) as store, recorded():
        odd = next(i for i in range(24) if store.segment.index[i] & OWN_FORM)
        row, _ = _odd_record(store, odd)
        stride = store.segment.geometry.stride
        kept = bytes(store.segment.buffer[row : row + stride])
        for _ in range(300):
            at = row + 24 + int(rng.integers(stride - 24))
            store.segment.buffer[at] = int(rng.integers(256))
            found = store.read(ids(odd))
            assert found is None or len(found) == 1
            if rng.random() < 0.3:
                store.segment.buffer[row : row + stride] = kept
        length, stamp, crc = RECORD.unpack_from(kept)
        for forged in (0, 1, length - 1, length + 1, 1 << 31, (1 << 32) - 1):
            store.segment.buffer[row : row + stride] = kept
            RECORD.pack_into(store.segment.buffer, row, forged, stamp, crc)
            found = store.read(ids(odd))
            assert found is None or len(found) == 1


def test_between_the_leaves_of_a_row_are_zeros() -> None:
    def make(i: int) -> Any:
        return {"x": i % 2 == 0, "more": "x" * 40} if i < 5 else {"x": i % 2 == 0}

    with filled(make, 40) as store:
        assert store.clear()
        for i in (0, 39):  # laid out in the same memory, one after the other
            store.fill(ids(i), make)
        row = store.segment.geometry.rows_at + int(store.segment.index[39] & ROW_MASK) * store.schema.stride
        assert bytes(store.segment.buffer[row + 16 : row + store.schema.stride]) == bytes(16)


def test_a_clear_in_the_midst_of_a_reading_shows() -> None:
    with filled() as store, attached(store) as other:
        seen: list[Any] = []
        clear_and_meanwhile(store, lambda: seen.append(other.read(np.arange(24))))
        assert seen == [None]
        assert count(store) == 0


# Anything that can be cached at all is cached, beside anything else


@settings(max_examples=often(50, 200), deadline=None, database=None)
@given(st.lists(trees, min_size=2, max_size=6), st.booleans(), st.sampled_from([400, 1 << 20]))
def test_random_trees_lie_side_by_side(several: list[Any], keep_order: bool, limit: int) -> None:
    schema = Schema.infer(several, keep_order=keep_order)
    with contextlib.closing(Store.create(schema, len(several), limit, about={})) as store:
        store.fill(np.arange(len(several)), several.__getitem__)
        assert store.check() == []
        assert store.segment.live[Live.ROWS_NEXT] * schema.stride <= limit
        with attached(store) as other:
            found = stored(other)
        assert [differs(value, several[i]) for i, value in found.items()] == [None] * len(found)
        if limit == 1 << 20:
            together = store.read(np.arange(len(several)))
            assert together is not None
            assert [differs(*pair) for pair in zip(together, several, strict=True)] == [None] * len(several)
