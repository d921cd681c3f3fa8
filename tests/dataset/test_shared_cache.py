"""SharedCache: stocaching's interface without torn samples, aliases, racing workers that raise, and SIGBUS.

The first part tests what stocaching 0.2.1's own seven tests do; the rest tests what it does not promise.
Writers and readers are real processes, and those that die are killed.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import difference, in_threads, is_a_sentence, often, recorded, scribble
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kills import child, die, ended, in_child, lingering, stop
from sources import ReadLog
from stores import resident
from test_allocator import oom_kills, run_in
from test_memory_limits import control_group
from torch.utils.data import DataLoader, Dataset

from hotset.dataset.shared_cache import SharedCache, get_shm_size
from hotset.errors import ArgumentError, HotsetWarning, QuantityError, SegmentError
from hotset.session import reports
from hotset.store import locks, slots
from hotset.store import memory_limits as memory
from hotset.store.claims import Claims, Participant
from hotset.store.format import Live
from hotset.store.memory_limits import Headroom
from hotset.store.segment import Segment

pytestmark = pytest.mark.usefixtures("patient")

GIB = 1 << 30
DIMS = (3, 8, 8)


def slots_of(cache: SharedCache) -> slots.Slots:
    """What is under a cache: tests damage it, fill it up, and look at the memory that it takes."""
    found = cache._slots
    assert found is not None
    return found


def picture(i: int, dims: tuple[int, ...] = DIMS, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.full(dims, i % 251, dtype=dtype)


def molecule(i: int, size: int = 30) -> torch.Tensor:
    """Of one to three dimensions, and of up to some lines."""
    return torch.full([(1 + i * 37 % size, 3), (i % size,), (2, 1 + i % 5, 4)][i % 3], float(i))


def room_for(count: int, dims: tuple[int, ...] = DIMS, samples: int = 0) -> float:
    """A limit in GiB with room for this many samples of this size, of ``samples`` in the dataset."""
    return (count * int(np.prod(dims)) + (samples or count)) / GIB


def small(samples: int = 20, dims: tuple[int, ...] | None = DIMS, **more: Any) -> SharedCache:
    return SharedCache(0.01, samples, dims, **more)


def any_shape(samples: int = 20, gib: float = 0.01) -> SharedCache:
    return SharedCache(gib, samples, None, torch.float32)


def same(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return found is not None and difference(found, expected) is None


def sound() -> None:
    """Fail unless every cache of this process is found, and found sound, by ``hotset check``."""
    checked = list(reports.check_caches())
    assert [cache.problems for cache in checked] == [()] * len(checked)
    assert {cache.state for cache in checked} == {"ok"}


def told(run: Callable[[], object]) -> list[str]:
    """The warnings that ``run`` gives; each must be a sentence of hotset's."""
    with recorded() as caught:
        run()
    assert {warning.category for warning in caught} <= {HotsetWarning}
    said = [str(warning.message) for warning in caught]
    assert all(is_a_sentence(sentence) for sentence in said)
    return said


# What stocaching's own tests hold


def test_array_has_the_length_shape_and_dtype_of_the_cache() -> None:
    cache = SharedCache(room_for(10, samples=50), 50, DIMS, dtype=torch.uint8)
    assert cache.array.shape == (10, *DIMS) == (len(cache), *DIMS)
    assert cache.array.dtype == torch.uint8


def test_aux_array_tells_empty_set_and_outside_slots() -> None:
    cache = SharedCache(room_for(10, samples=12), 12, DIMS)
    cache.set_slot(3, picture(3))
    cache.set_slot(11, picture(11))
    states = torch.tensor([0, 0, 0, 1] + 6 * [0] + [2, 2], dtype=torch.uint8)
    assert same(cache.aux_array, states)
    cache.clear()
    assert same(cache.aux_array, torch.where(states == 1, 0, states).to(torch.uint8))


@pytest.mark.parametrize("gib", [0.001, 0.0031])
@pytest.mark.parametrize("dims", [(3, 32, 32), (7,), ()])
def test_there_are_as_many_slots_as_the_limit_has_room_for(gib: float, dims: tuple[int, ...]) -> None:
    size = int(np.prod(dims))
    samples = int(1.3 * gib * GIB) // (size + 1)
    cache = SharedCache(gib, samples, dims)
    assert len(cache) == (int(gib * GIB) - samples) // size
    assert cache.array.shape == (len(cache), *dims)
    assert len(cache.aux_array) == samples


def test_set_slot() -> None:
    cache = SharedCache(room_for(10, samples=50), 50, DIMS)
    cache.set_slot(4, picture(1), allow_oob_idx=False, allow_overwrite=False)
    assert same(cache[4], picture(1))
    cache.set_slot(4, picture(2), allow_overwrite=True)
    assert same(cache[4], picture(2))
    with pytest.raises(RuntimeError, match="set already"):
        cache.set_slot(4, picture(3), allow_overwrite=False)
    assert same(cache[4], picture(2))
    with pytest.raises(IndexError, match="no slot"):
        cache.set_slot(10, picture(4), allow_oob_idx=False)
    cache.set_slot(10, picture(4), allow_oob_idx=True)
    for outside in (50, 51, -1):
        with pytest.raises(IndexError, match="out of range"):
            cache.set_slot(outside, picture(5), allow_oob_idx=True)


def test_get_slot() -> None:
    cache = SharedCache(room_for(10, samples=50), 50, DIMS)
    with pytest.raises(RuntimeError, match="is empty"):
        cache.get_slot(9, allow_oob_idx=False, allow_empty_slot=False)
    assert cache.get_slot(9, allow_oob_idx=False, allow_empty_slot=True) is None
    cache.set_slot(9, picture(9), allow_overwrite=False)
    assert same(cache.get_slot(9, allow_oob_idx=False, allow_empty_slot=False), picture(9))
    with pytest.raises(IndexError, match="no slot"):
        cache.get_slot(10, allow_oob_idx=False)
    assert cache.get_slot(10, allow_oob_idx=True) is None
    for outside in (50, 51, -1):
        with pytest.raises(IndexError, match="out of range"):
            cache.get_slot(outside)


def test_clear() -> None:
    cache = small()
    cache.set_slot(4, picture(1), allow_oob_idx=False, allow_overwrite=False)
    with pytest.raises(RuntimeError, match="set already"):
        cache.set_slot(4, picture(2), allow_overwrite=False)
    cache.clear()
    with pytest.raises(RuntimeError, match="is empty"):
        cache.get_slot(4, allow_empty_slot=False)
    assert cache.get_slot(4) is None
    assert not cache.array.any()
    cache.set_slot(4, picture(2), allow_overwrite=False)
    assert same(cache[4], picture(2))
    sound()


def test_samples_set_in_some_processes_are_read_in_others() -> None:
    cache = small()
    for i in (3, 17):
        in_child(lambda i=i: cache.set_slot(i, picture(i), allow_overwrite=True, allow_oob_idx=False))
    for i in (3, 17):
        in_child(lambda i=i: _check(same(cache.get_slot(i, False, False), picture(i))))
    assert same(cache.get_slot(17), picture(17))
    sound()


def _check(true: bool) -> None:
    assert true


# As a list of slots


def test_item_assignment_sets_and_overwrites() -> None:
    cache = small()
    for value in (1, 2, 3):
        cache[5] = picture(value)
        assert same(cache[5], picture(value))
        assert same(cache.get_slot(5), picture(value))
        assert int(cache.aux_array[5]) == 1
    cache[-1] = picture(19)
    assert same(cache[19], picture(19))
    assert same(cache[np.int64(-1)], picture(19))
    for outside in (20, -21):
        with pytest.raises(IndexError, match="no slot"):
            cache[outside]
        with pytest.raises(IndexError, match="no slot"):
            cache[outside] = picture(0)
    sound()


def test_an_empty_slot_is_never_taken_for_a_sample() -> None:
    with pytest.raises(RuntimeError, match="is empty"):
        small()[3]


@pytest.mark.parametrize("make", [picture, molecule])
def test_changing_a_read_sample_does_not_change_the_cache(make: Callable[[int], torch.Tensor]) -> None:
    cache = small() if make is picture else any_shape()
    given = make(7)
    cache[7] = given
    scribble(given)
    for _ in range(2):
        found = cache.get_slot(7)
        assert same(found, make(7))
        scribble(found)
        scribble(cache[7])
    sound()


def test_array_is_the_shared_memory_itself() -> None:
    cache = small(dtype=torch.int32)
    for i in range(20):
        cache[i] = picture(i, dtype=torch.int32)
    array = cache.array
    assert array.equal(torch.stack([picture(i, dtype=torch.int32) for i in range(20)]))
    array[3] = -1

    def write() -> None:
        array[4] = -2

    in_child(write)
    assert same(cache[3], torch.full(DIMS, -1, dtype=torch.int32))
    assert same(cache[4], torch.full(DIMS, -2, dtype=torch.int32))
    del cache
    assert int(array[19].sum()) == 19 * 192  # outlives the cache


def test_there_is_no_array_of_samples_of_any_shape() -> None:
    with pytest.raises(ArgumentError) as caught:
        any_shape().array  # noqa: B018
    assert is_a_sentence(str(caught.value))


# What it holds

DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16"]
DTYPES += ["bfloat16", "float32", "float64", "float8_e4m3fn", "complex32", "complex64", "complex128"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("dims", [(3, 5), (), (0, 4), None])
def test_every_dtype_comes_back_bit_by_bit(name: str, dims: tuple[int, ...] | None) -> None:
    dtype = getattr(torch, name)
    cache = small(4, dims, dtype=dtype)
    shapes = [dims] * 4 if dims is not None else [(), (5,), (2, 0), (2, 3, 4)]
    generator = np.random.default_rng(0)
    for i, shape in enumerate(shapes):
        noise = generator.bytes(int(np.prod(shape)) * dtype.itemsize)
        value = torch.zeros(shape, dtype=dtype)
        if noise and dtype != torch.bool:
            value = torch.frombuffer(bytearray(noise), dtype=dtype).view(shape)
        cache[i] = value
        assert same(cache[i], value)
        if dims is not None and value.numel():
            assert cache.array[i].reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))
    sound()


def test_samples_of_any_shape_and_number_of_dimensions() -> None:
    cache = any_shape(60)
    for i in range(60):
        cache.set_slot(i, molecule(i))
    assert len({molecule(i).ndim for i in range(60)}) > 1
    for i in range(60):
        assert same(cache.get_slot(i), molecule(i))
    sound()


def test_large_samples_are_whole() -> None:
    big = torch.arange(500_000, dtype=torch.float32)
    cache, loose = SharedCache(0.01, 3, (500_000,), torch.float32), any_shape(3)
    for holder in (cache, loose):
        for i in range(3):
            holder[i] = big + i
        assert all(same(holder[i], big + i) for i in range(3))
    sound()


def test_tensors_that_are_not_plain_are_stored_plain() -> None:
    cache = small(4, (2, 3), dtype=torch.float32)
    base = torch.arange(6.0).view(3, 2)
    cache[0] = base.t()  # neither contiguous
    cache[1] = torch.nn.Parameter(base.view(2, 3))  # nor without a gradient
    cache[2] = base.view(2, 3).numpy()  # type: ignore[assignment]
    assert same(cache[0], base.t().contiguous())
    assert same(cache[1], base.view(2, 3))
    assert same(cache[2], base.view(2, 3))


@pytest.mark.parametrize(
    ("dtype", "number", "stored"),
    [(torch.int64, 7, 7), (torch.uint8, True, 1), (torch.float32, 0.1, 0.1), (torch.int16, np.int64(-3), -3)],
)
def test_numbers_are_samples_without_dimensions(dtype: torch.dtype, number: Any, stored: Any) -> None:
    cache = small(4, (), dtype=dtype)
    cache.set_slot(2, number)
    assert same(cache.get_slot(2), torch.tensor(stored, dtype=dtype))


# What is wrong is said

WRONG_SAMPLES: list[tuple[Any, str]] = [
    (torch.zeros(DIMS), "float32"),
    (torch.zeros(3, 8, 9, dtype=torch.uint8), r"\(3, 8, 9\)"),
    (torch.zeros((), dtype=torch.uint8), r"\(\)"),
    (torch.zeros(DIMS, dtype=torch.uint8).to_sparse(), "Sparse"),
    (np.zeros(DIMS), "float64"),
    (np.array(["text"]), "ndarray"),
    (300, "300"),
    (0.5, r"0\.5"),
    ("text", "str"),
    (None, "NoneType"),
]


@pytest.mark.parametrize(("sample", "names"), WRONG_SAMPLES)
def test_a_wrong_sample_is_refused_with_a_sentence(sample: Any, names: str) -> None:
    cache = small()
    cache[3] = picture(3)
    for index in (2, 3):
        with pytest.raises(ArgumentError, match=names) as caught:
            cache.set_slot(index, sample, allow_overwrite=True)
        assert is_a_sentence(str(caught.value))
    assert cache.get_slot(2) is None
    assert same(cache.get_slot(3), picture(3))
    sound()


@pytest.mark.parametrize("index", [1.0, "1", None, slice(1, 2), (1, 2)])
def test_an_index_that_is_not_an_integer_is_refused_with_a_sentence(index: Any) -> None:
    cache = small()
    for use in (
        lambda: cache.get_slot(index),
        lambda: cache.set_slot(index, picture(1)),
        lambda: cache[index],
        lambda: cache.__setitem__(index, picture(1)),
    ):
        with pytest.raises(TypeError, match="must be an int") as caught:
            use()
        assert is_a_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ((-1, 10, DIMS), QuantityError, "size_limit_gib= must .* got -1"),
        (("1", 10, DIMS), QuantityError, "size_limit_gib= must .* got '1'"),
        ((float("nan"), 10, DIMS), QuantityError, "nan"),
        ((float("inf"), 10, DIMS), QuantityError, "inf"),
        ((True, 10, DIMS), QuantityError, "True"),
        ((1, 0, DIMS), ArgumentError, "dataset_len= must .* got 0"),
        ((1, -5, DIMS), ArgumentError, "dataset_len= must .* got -5"),
        ((1, 1.5, DIMS), ArgumentError, r"dataset_len= must .* got 1\.5"),
        ((1, 10, (3, -1)), ArgumentError, "data_dims"),
        ((1, 10, 3), ArgumentError, "data_dims= must .* got 3"),
        ((1, 10, (1 << 20, 1 << 12)), ArgumentError, "2 GiB"),
        ((1, 10, DIMS, "uint8"), ArgumentError, "dtype= must .* got 'uint8'"),
        ((1, 10, DIMS, torch.bits8), ArgumentError, "bits8"),
        ((1, 10, None, torch.bits8), ArgumentError, "bits8"),
    ],
)
def test_a_wrong_argument_is_refused_with_a_sentence(arguments: Any, error: Any, names: str) -> None:
    with pytest.raises(error, match=names) as caught:
        SharedCache(*arguments)
    assert is_a_sentence(str(caught.value))


def test_a_sample_of_two_gib_is_refused_before_it_is_touched() -> None:
    cache = SharedCache(4, 2, None)
    with pytest.raises(ArgumentError, match="cannot hold this sample: more than 2 GiB") as caught:
        cache.set_slot(0, torch.empty(1 << 31, dtype=torch.uint8))
    assert is_a_sentence(str(caught.value))
    assert cache.get_slot(0) is None


# Limits


@pytest.mark.parametrize("dims", [DIMS, None])
def test_a_limit_of_nothing_caches_nothing(dims: Any) -> None:
    cache = SharedCache(0, 10, dims)
    assert len(cache) == 0
    cache.set_slot(3, picture(3))
    assert cache.get_slot(3) is None
    assert cache.aux_array.tolist() == [2] * 10
    if dims is not None:
        assert cache.array.shape == (0, *DIMS)
    cache.clear()


@pytest.mark.parametrize("dims", [DIMS, None])
def test_a_limit_too_small_for_one_sample_says_so(dims: Any) -> None:
    """stocaching gives a negative length."""
    found: list[SharedCache] = []
    (sentence,) = told(lambda: found.append(SharedCache(1e-8, 10, dims)))
    assert "size_limit_gib" in sentence
    assert len(found[0]) == 0
    assert found[0].get_slot(3) is None


def test_creating_a_cache_far_larger_than_the_machine_touches_nothing() -> None:
    """stocaching touches every page."""
    small()  # what the first cache of a process loads
    before = resident()
    cache = SharedCache(100_000, 10_000_000, (3, 300, 300), torch.float32)
    assert len(cache) == 10_000_000
    assert resident() - before < 8_000_000
    cache[0], cache[9_999_999] = torch.ones(2, 3, 300, 300)
    assert same(cache[9_999_999], torch.ones(3, 300, 300))
    assert resident() - before < 16_000_000
    assert _taken(cache) < 3_000_000


def _taken(cache: SharedCache) -> int:
    """Bytes that a cache's memory takes on the machine."""
    return os.fstat(slots_of(cache).segment.fd).st_blocks * 512


def test_samples_of_any_shape_stay_under_the_limit() -> None:
    cache = any_shape(1000, gib=300_000 / GIB)

    def fill() -> None:
        for i in np.random.default_rng(0).permutation(1000).tolist():
            cache.set_slot(i, molecule(i, 200))

    (sentence,) = told(fill)
    assert "size_limit_gib" in sentence
    held = int((cache.aux_array == 1).sum())
    assert 100 < held < 1000
    (report,) = reports.check_caches()
    assert report.counts is not None
    assert 250_000 < report.counts.memory <= report.counts.limit <= 300_000
    for i in range(1000):
        found = cache.get_slot(i)
        assert found is None or same(found, molecule(i, 200))
    sound()


def test_a_record_overwritten_without_room_is_no_longer_served() -> None:
    cache = any_shape(4, gib=20_000 / GIB)
    cache[0] = torch.ones(100)
    cache[1] = torch.ones(100)
    assert len(told(lambda: cache.__setitem__(0, torch.ones(20_000)))) == 1
    assert cache.get_slot(0) is None
    assert same(cache.get_slot(1), torch.ones(100))
    slots_of(cache).store.allocator.reopen()  # as after half a second
    cache[0] = torch.ones(50)
    assert same(cache.get_slot(0), torch.ones(50))
    sound()


def test_a_tail_that_grows_leaves_its_neighbours_alone() -> None:
    cache = any_shape(3)
    for i in range(3):
        cache[i] = torch.full((10,), float(i))
    cache[0] = torch.full((1000,), 7.0)
    cache[1] = torch.full((0,), 7.0)
    cache[1] = torch.full((1000,), 8.0)
    assert same(cache[0], torch.full((1000,), 7.0))
    assert same(cache[1], torch.full((1000,), 8.0))
    assert same(cache[2], torch.full((10,), 2.0))
    sound()


def test_a_tail_is_written_over_the_old_one_where_it_fits() -> None:
    cache = any_shape(4, gib=20_000 / GIB)
    for i in range(200):
        cache[0] = torch.full((100 + i % 20,), float(i))
        assert same(cache[0], torch.full((100 + i % 20,), float(i)))
    sound()


@pytest.mark.parametrize("make", [picture, molecule])
def test_without_memory_slots_stay_empty_after_one_warning(
    make: Callable[[int], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = small(2000) if make is picture else any_shape(2000)
    other = pickle.loads(pickle.dumps(cache))
    left = slots_of(cache).store.segment.geometry.rows_at + 50_000

    def headroom() -> Headroom:
        return Headroom(max(left - _taken(cache), 0), GIB, "control group /job (memory.max)")

    monkeypatch.setattr(memory, "headroom", headroom)

    def fill() -> None:
        for i in range(2000):
            cache.set_slot(i, make(i))
            other.set_slot(i, make(i))

    (sentence,) = told(fill)
    assert "size_limit_gib" in sentence
    assert "control group /job (memory.max)" in sentence
    held = int((cache.aux_array == 1).sum())
    assert 50 < held < 2000
    assert all(same(cache.get_slot(i), make(i)) for i in range(2000) if cache.aux_array[i] == 1)
    monkeypatch.undo()
    slots_of(other).store.allocator.reopen()  # as after half a second
    for i in range(2000):
        other.set_slot(i, make(i))
    assert all(same(cache.get_slot(i), make(i)) for i in range(2000))
    sound()


def test_memory_that_the_kernel_refuses_is_no_sigbus() -> None:
    cache, loose = small(100, (100_000,)), any_shape(100)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
        for holder, make in (
            (cache, lambda i: picture(i, (100_000,))),
            (loose, lambda i: torch.full((50_000,), float(i))),
        ):
            said = told(lambda holder=holder, make=make: [holder.set_slot(i, make(i)) for i in range(100)])
            assert len(said) == 1
            held = [i for i in range(100) if holder.get_slot(i) is not None]
            assert 3 < len(held) < 40
            assert all(same(holder[i], make(i)) for i in held)

    in_child(fill)
    sound()


_IN_A_GROUP = """
import os, sys, warnings
sys.path.insert(0, TESTS)
import torch
from hotset.dataset.shared_cache import SharedCache
cache = SharedCache(1, 1000, (1 << 20,))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for epoch in range(2):
        for i in range(0, 1000, 2):
            sample = cache.get_slot(i)
            if sample is None:
                cache.set_slot(i, torch.full((1 << 20,), i % 251, dtype=torch.uint8))
            else:
                assert int(sample[0]) == int(sample[-1]) == i % 251
print(int((cache.aux_array == 1).sum()), len(caught), caught[0].message, sep="|")
"""


@pytest.mark.chaos  # `store/test_allocator.py` has a loader in such a group
def test_a_control_group_too_small_for_the_limit_kills_nobody() -> None:
    with control_group(400 << 20) as group:
        held, warned, sentence = run_in(group, _IN_A_GROUP).split("|")
        assert oom_kills(group) == 0
        assert 20 < int(held) < 400
        assert int(warned) == 1
        assert "size_limit_gib" in sentence
        assert group.name in sentence


def test_a_cache_that_cannot_be_made_is_empty() -> None:
    def body() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        found: list[SharedCache] = []
        (sentence,) = told(lambda: found.append(small()))
        assert "ulimit" in sentence
        (cache,) = found
        cache.set_slot(3, picture(3))
        assert cache.get_slot(3) is None
        assert len(cache) == 20
        assert cache.aux_array.tolist() == [0] * 20
        cache.clear()
        with pytest.raises(SegmentError):
            cache.array  # noqa: B018
        with pytest.raises(ArgumentError):
            cache.set_slot(3, torch.zeros(3))

    in_child(body)


def test_a_clear_gives_memory_back() -> None:
    cache = small(80, (100_000,))
    for i in range(80):
        cache[i] = picture(i, (100_000,))
    assert _taken(cache) > 8_000_000
    in_child(cache.clear)
    assert _taken(cache) < 1_000_000
    assert not (cache.aux_array == 1).any()


# Several workers at one slot


def test_the_second_writer_returns_and_the_first_sample_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """stocaching raises, and with it the loader's worker."""
    cache = small()
    other = pickle.loads(pickle.dumps(cache))
    assert cache.get_slot(3) is None
    assert other.get_slot(3) is None
    cache.set_slot(3, picture(1))
    other.set_slot(3, picture(2))
    assert same(other.get_slot(3), picture(1))
    with monkeypatch.context() as patch:  # the other one looked before the first sample was there
        patch.setattr(slots.Slots, "word", lambda self, sample: 0)
        other.set_slot(3, picture(2))
    assert same(other.get_slot(3), picture(1))
    for who in (cache, other):  # who has set it or read it knows better
        with pytest.raises(RuntimeError, match="set already") as caught:
            who.set_slot(3, picture(2))
        assert is_a_sentence(str(caught.value))


def test_threads_that_missed_the_same_slot_both_return() -> None:
    cache = small()
    both = threading.Barrier(2)

    def body(number: int) -> None:
        for i in range(20):
            assert cache.get_slot(i) is None
            both.wait(60)
            cache.set_slot(i, picture(100 * number + i))

    in_threads(2, body)
    for i in range(20):
        assert same(cache[i], picture(i)) or same(cache[i], picture(100 + i))
    sound()


def test_a_sample_may_be_set_after_another_process_cleared() -> None:
    cache = small()
    cache.set_slot(3, picture(1))

    def body() -> None:
        cache.clear()
        cache.set_slot(3, picture(2))

    in_child(body)
    cache.set_slot(3, picture(3))
    assert same(cache[3], picture(2))


def test_processes_that_fill_the_same_slots_all_return_and_leave_whole_samples() -> None:
    cache = small(64, (20_000,))

    def body(number: int) -> None:
        for i in range(64):
            cache.set_slot(i, torch.full((20_000,), number, dtype=torch.uint8))

    children = [child(lambda number=number: body(number)) for number in (1, 2, 3)]
    assert [ended(pid) for pid in children] == [0, 0, 0]
    for i in range(64):
        found = cache[i]
        assert int(found[0]) in (1, 2, 3)
        assert (found == found[0]).all()
    sound()


@pytest.mark.parametrize("shapes", ["one", "any"])
def test_a_reader_gets_the_old_sample_or_the_new_one_and_never_a_mix(shapes: str) -> None:
    """stocaching: 56 of 4,000 samples were torn."""
    cache = SharedCache(0.01, 2, (60_000,), torch.float32) if shapes == "one" else any_shape(2)
    sizes = [60_000] if shapes == "one" else [60_000, 59_000, 200]
    cache[0] = torch.full((60_000,), 1.0)
    enough = multiprocessing.get_context("fork").Event()  # many were read, however slowly

    def write(number: int) -> None:
        for i in itertools.count():
            if i >= 400 and enough.is_set():
                break
            value = float(2 * i + number)
            cache.set_slot(0, torch.full((sizes[i % len(sizes)],), value), allow_overwrite=True)
            time.sleep(5e-4)

    children = [child(lambda number=number: write(number)) for number in (0, 1)]
    values = set()
    try:
        while any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in children):
            found = cache.get_slot(0)
            assert found is not None, "a sample that is being replaced was there before"
            assert len(found) in sizes
            assert (found == found[0]).all(), "a torn sample"
            values.add(float(found[0]))
            if len(values) > 20:
                enough.set()
    finally:
        enough.set()
        codes = [ended(pid) for pid in children]
    assert codes == [0, 0]
    sound()


def test_a_sample_whose_writer_publishes_as_it_leaves_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small()
    cache[3] = picture(1)
    index, participant = slots_of(cache).segment.index, Participant(slots_of(cache).segment)
    word = int(index[3])
    is_alive = Participant.is_alive
    assert Claims(participant).take_one(3, overwrite=True) == word

    def publish_and_leave(self: Participant, slot: int) -> bool:
        index[3] = word
        participant.leave()
        return is_alive(self, slot)

    monkeypatch.setattr(Participant, "is_alive", publish_and_leave)
    assert same(cache.get_slot(3), picture(1))


def test_a_sample_replaced_while_it_is_copied_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, loose = small(), any_shape()
    for holder, old, new in ((cache, picture(1), picture(2)), (loose, torch.ones(9), torch.zeros(400))):
        holder[0] = old
        other = pickle.loads(pickle.dumps(holder))
        replaced: list[bool] = []

        def empty(*args: Any, other: Any = other, new: Any = new, replaced: Any = replaced) -> Any:
            if not replaced:
                replaced.append(True)
                other[0] = new
            return np.zeros(*args)

        monkeypatch.setattr(slots.np, "empty", empty)
        found = holder.get_slot(0)
        monkeypatch.undo()
        assert replaced
        assert same(found, new)


def test_a_sample_cleared_and_set_again_while_it_is_copied_is_copied_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new record has the old one's index word: only the clear generation tells them apart."""
    cache = any_shape()
    for _ in range(3):
        cache[0] = torch.ones(9)
    other = pickle.loads(pickle.dumps(cache))
    before = slots_of(cache).word(0)
    cleared: list[bool] = []

    def empty(*args: Any) -> Any:
        if not cleared:
            cleared.append(True)
            other.clear()
            other[0] = torch.zeros(400)
        return np.zeros(*args)

    monkeypatch.setattr(slots.np, "empty", empty)
    found = cache.get_slot(0)
    monkeypatch.undo()
    assert slots_of(cache).word(0) == before
    assert same(found, torch.zeros(400))


def test_an_overwriting_process_waits_for_another_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the sample that stays could be one that was to be replaced."""
    cache = small()
    other = pickle.loads(pickle.dumps(cache))
    real, inside, go_on = Segment.write, threading.Event(), threading.Event()

    def slow(self: Segment, data: memoryview, offset: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(60)
        real(self, data, offset)

    def waiting(seconds: float) -> None:
        go_on.set()
        time.sleep(seconds)

    monkeypatch.setattr(Segment, "write", slow)
    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waiting))
    writer = threading.Thread(target=other.__setitem__, args=(0, picture(1)))
    writer.start()
    try:
        assert inside.wait(60)
        cache[0] = picture(2)
        assert go_on.is_set(), "it has not waited"
    finally:
        go_on.set()
        writer.join(60)
    assert same(cache[0], picture(2))
    sound()


# Deaths


def _dying_at(line: int, body: Callable[[], None]) -> Callable[[], None]:
    """A body that is killed before it runs this line of the store's own steps, counted as it runs."""
    folder = Path(slots.__file__).parent
    files = {str(folder / name) for name in ("slots.py", "claims.py", "room.py", "segment.py")}
    left = line

    def tracing(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                die()
        return tracing

    def run() -> None:
        sys.settrace(tracing)
        try:
            body()
        finally:
            sys.settrace(None)

    return run


@pytest.mark.parametrize("shapes", ["one", "any"])
def test_a_writer_killed_anywhere_leaves_old_new_or_nothing(shapes: str) -> None:
    cache = small(dims=(100,), dtype=torch.float32) if shapes == "one" else any_shape()
    old = torch.full((100,), 1.0)
    new = torch.full((100,), 2.0) if shapes == "one" else torch.full((300,), 2.0)

    def write() -> None:
        cache[0] = new
        cache.set_slot(1, new)

    deaths, states = 0, set()
    while True:
        cache.clear()
        cache[0] = old
        end = ended(child(_dying_at(often(11, 7) * deaths, write)))
        first, second = cache.get_slot(0), cache.get_slot(1)
        assert first is None or same(first, old) or same(first, new)
        assert second is None or same(second, new)
        states.add((first is None, second is None, first is not None and same(first, new)))
        sound()
        cache[0] = old
        cache.set_slot(1, new, allow_overwrite=True)
        assert same(cache[0], old)
        assert same(cache[1], new)
        if end == 0:
            break
        assert end == -signal.SIGKILL
        deaths += 1
    assert deaths > often(12, 20)
    assert states >= {(False, True, False), (True, True, False), (False, True, True), (False, False, True)}


@pytest.mark.parametrize("half", ["one", "any"])
def test_a_writer_killed_within_its_write_leaves_an_empty_slot(
    half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = small(dims=(10_000,), dtype=torch.float32) if half == "one" else any_shape()
    cache[0] = torch.ones(10_000)

    def write_half(self: Segment, data: memoryview, offset: int) -> None:
        os.pwrite(self.fd, data[: len(data) // 2], offset)
        die()

    def body() -> None:
        monkeypatch.setattr(Segment, "write", write_half)
        cache[0] = torch.zeros(10_000)

    assert ended(child(body)) == -signal.SIGKILL
    assert cache.get_slot(0) is None
    assert int(cache.aux_array[0]) == 0
    sound()
    cache.set_slot(0, torch.zeros(10_000))
    assert same(cache.get_slot(0), torch.zeros(10_000))
    sound()


def test_an_interrupted_clear_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small()
    cache[0], cache[1] = picture(0), picture(1)

    def body() -> None:
        monkeypatch.setattr(Segment, "discard", lambda *_: die())
        cache.clear()

    assert ended(child(body)) == -signal.SIGKILL
    assert cache.get_slot(0) is None
    assert not (cache.aux_array == 1).any()
    cache.set_slot(1, picture(2))
    assert same(cache.get_slot(1), picture(2))
    assert cache.get_slot(0) is None
    sound()


def test_a_process_that_has_closed_all_descriptors_reads_what_is_set(tmp_path: Path) -> None:
    """It cannot tell whether a writer is at work: a sample that one replaces counts as missing."""
    cache = small()
    for index in range(2):
        cache[index] = picture(index)
    participant = slots_of(cache).store.participant
    assert Claims(participant).take_one(0, overwrite=True) is not None

    def run() -> None:
        assert slots_of(cache).store.participant.slot >= 0
        os.closerange(3, 256)
        files = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(60)]
        assert cache.get_slot(0) is None
        assert same(cache.get_slot(1), picture(1))
        assert not any(os.fstat(file).st_size for file in files)

    in_child(run)


@pytest.mark.parametrize("there", [True, False])
def test_waiting_for_a_stopped_writer_is_bounded(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    monkeypatch.setattr(slots, "_PATIENCE_SECONDS", 0.2)
    cache = small()
    if there:
        cache[0] = picture(1)

    def claim() -> None:
        assert Claims(slots_of(cache).store.participant).take_one(0, overwrite=True) is not None

    with lingering(claim) as pid:
        stop(pid)
        assert cache.get_slot(0) is None
        if there:
            assert sum(slept) == pytest.approx(0.2, abs=0.01)
        else:
            assert slept == [], "only a sample that was there is worth waiting for"
        cache.set_slot(0, picture(2))
        cache.set_slot(0, picture(2), allow_overwrite=True)
        assert cache.get_slot(0) is None
    cache.set_slot(0, picture(3))
    assert same(cache.get_slot(0), picture(3))
    sound()


def test_a_slot_stays_set_that_is_set_as_another_process_finishes_an_interrupted_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = small()
    other = pickle.loads(pickle.dumps(cache))
    slots_of(cache).segment.live[Live.CLEAR_GENERATION] |= 1  # as a process leaves it that dies over a clear
    short_lock = Participant.short_lock

    def set_before(self: Participant) -> Any:
        monkeypatch.setattr(Participant, "short_lock", short_lock)
        other.set_slot(2, picture(2))
        return short_lock(self)

    monkeypatch.setattr(Participant, "short_lock", set_before)
    cache.set_slot(1, picture(1))
    assert same(cache.get_slot(2), picture(2))
    assert same(cache.get_slot(1), picture(1))


def test_a_clear_waits_for_writers_and_gives_up_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small()
    cache[1] = picture(1)
    store = slots_of(cache).store
    monkeypatch.setattr(store, "clear", lambda: type(store).clear(store, timeout=0.1))

    def claim() -> None:
        assert Claims(store.participant).take_one(0, overwrite=False) is not None

    with lingering(claim), pytest.raises(SegmentError) as caught:
        cache.clear()
    assert is_a_sentence(str(caught.value))
    assert same(cache[1], picture(1))
    cache.clear()
    assert cache.get_slot(1) is None


# Processes


class Cached(Dataset[torch.Tensor]):
    """The example of stocaching's README, with a log of what it loads."""

    def __init__(self, n: int, log: ReadLog, limit: float = 1, dims: tuple[int, ...] | None = DIMS) -> None:
        self.n = n
        self.log = log
        self.cache = SharedCache(size_limit_gib=limit, dataset_len=n, data_dims=dims, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, idx: int) -> torch.Tensor:
        x = self.cache.get_slot(idx)
        if x is None:
            self.log.add(idx)
            x = picture(idx)
            self.cache.set_slot(idx, x)
        return x


@pytest.mark.parametrize(
    ("method", "workers", "persistent"),
    [
        (None, 0, False),
        ("fork", 2, False),
        ("fork", 2, True),
        pytest.param("spawn", 1, True, marks=pytest.mark.chaos),
        pytest.param("forkserver", 1, True, marks=pytest.mark.chaos),
    ],
)
def test_a_loader_loads_each_sample_once(
    method: str | None, workers: int, persistent: bool, tmp_path: Path
) -> None:
    log = ReadLog(tmp_path / "reads")
    data = Cached(40, log, dims=None if persistent else DIMS)
    loader = DataLoader(
        data, batch_size=4, num_workers=workers, multiprocessing_context=method, persistent_workers=persistent
    )
    expected = torch.stack([picture(i) for i in range(40)])
    for _ in range(2):
        assert torch.cat(list(loader)).equal(expected)
    assert sorted(log.order()) == list(range(40))
    assert (data.cache.aux_array == 1).all()
    assert same(data.cache[39], picture(39))
    sound()


def test_a_loader_over_more_than_fits_loads_the_rest_each_time(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    data = Cached(40, log, room_for(10, samples=40))
    assert len(data.cache) == 10
    for _ in range(3):
        batches = list(DataLoader(data, batch_size=4, num_workers=2))
        assert torch.cat(batches).equal(torch.stack([picture(i) for i in range(40)]))
    assert log.total() == 10 + 3 * 30


def _as_rank(number: int, key: str | None, dims: tuple[int, ...], tell: int, both: Any) -> None:
    os.environ.update(LOCAL_RANK=str(number), MASTER_PORT="29500")
    cache = small(4, dims, key=key)
    cache.set_slot(number, picture(number, dims))
    both.wait(60)
    os.write(tell, f"{int((cache.aux_array == 1).sum())}".encode())
    both.wait(60)  # neither has gone when the other looks
    cache.__del__()


@pytest.mark.parametrize(
    ("keys", "dims", "held"),
    [
        (("all", "all"), (DIMS, DIMS), "22"),
        ((None, None), (DIMS, DIMS), "11"),
        (("one", "two"), (DIMS, DIMS), "11"),
        (("one", "one"), (DIMS, (3, 64)), "11"),
    ],
)
def test_ranks_share_what_has_one_key_and_nothing_else(keys: Any, dims: Any, held: str) -> None:
    hear, tell = os.pipe()
    both = multiprocessing.get_context("fork").Barrier(2)
    ranks = [
        child(lambda number=number: _as_rank(number, keys[number], dims[number], tell, both))
        for number in (0, 1)
    ]
    assert [ended(pid) for pid in ranks] == [0, 0]
    os.close(tell)
    assert os.read(hear, 100).decode() == held
    os.close(hear)


def test_a_copy_is_the_same_cache_and_outlives_the_original() -> None:
    cache = small()
    cache[3] = picture(3)
    copied = copy.deepcopy(cache)
    del cache
    assert same(copied[3], picture(3))
    copied[4] = picture(4)
    again = pickle.loads(pickle.dumps(copied))
    assert same(again[4], picture(4))
    assert slots_of(again).store.check() == []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_cache_stays_listed_as_long_as_a_copy_is_used(copied: Callable[[Any], Any]) -> None:
    """For ranks that make it later, and for `hotset check`."""
    before = len(list(reports.check_caches()))
    cache = small()
    other = copied(cache)
    other[3] = picture(3)
    del cache
    assert len(list(reports.check_caches())) == before + 1
    del other
    assert len(list(reports.check_caches())) == before


def test_a_cache_whose_processes_are_gone_is_empty_with_a_warning() -> None:
    cache = small()
    sent = pickle.dumps(cache)
    del cache
    found: list[SharedCache] = []
    (sentence,) = told(lambda: found.append(pickle.loads(sent)))
    assert "cannot be attached to" in sentence
    assert len(found[0]) == 20
    found[0].set_slot(3, picture(3))
    assert found[0].get_slot(3) is None


def test_a_child_keeps_the_cache_when_its_parent_lets_go() -> None:
    cache = small()
    cache[3] = picture(3)
    ready, tell = os.pipe()
    let_go = multiprocessing.get_context("fork").Event()

    def body() -> None:
        assert same(cache[3], picture(3))
        os.write(tell, b"k")
        assert let_go.wait(60)
        assert same(cache[3], picture(3))
        assert [report.state for report in reports.check_caches()] in (["ok"], ["out of reach"])
        cache.__del__()

    pid = child(body)
    os.read(ready, 1)
    cache.__del__()
    let_go.set()
    assert ended(pid) == 0
    os.close(ready)
    os.close(tell)
    assert list(reports.check_caches()) == []


# Where the processor may reorder stores, every record is verified


@pytest.mark.parametrize("make", [picture, molecule])
def test_with_verification_a_damaged_record_counts_as_missing(
    make: Callable[[int], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "FULL_CHECK", True)
    cache = small() if make is picture else any_shape()
    for i in range(20):
        cache[i] = make(i)
        assert same(cache.get_slot(i), make(i))
    store = slots_of(cache).store
    (store.rows[3] if make is picture else store.lines[3])[17] ^= 1
    damaged = [i for i in range(20) if cache.get_slot(i) is None]
    assert len(damaged) == 1
    cache.set_slot(damaged[0], make(damaged[0]), allow_overwrite=True)
    assert same(cache.get_slot(damaged[0]), make(damaged[0]))


def test_get_shm_size_is_in_whole_gib() -> None:
    status = os.statvfs("/dev/shm")
    assert get_shm_size() == int(status.f_blocks * status.f_frsize / GIB)


# Anything, in any order


class Model(RuleBasedStateMachine):
    """Two processes' views of one cache, a dict that models it, and what each process has seen."""

    @initialize(fixed=st.booleans(), slots=st.integers(1, 6))
    def make(self, fixed: bool, slots: int) -> None:
        self.fixed = fixed
        self.samples = 6
        limit = slots * 24 + self.samples if fixed else slots * (32 + 256)
        if fixed and slots == self.samples:
            limit += 24
        self.cache = SharedCache(limit / GIB, self.samples, (3,) if fixed else None, torch.float64)
        self.views = [self.cache, pickle.loads(pickle.dumps(self.cache))]
        self.held: dict[int, tuple[int, torch.Tensor]] = {}
        self.seen: list[dict[int, int]] = [{}, {}]
        self.version = 0
        self.length = len(self.cache)
        if fixed:
            assert self.length == slots

    def value(self, number: int) -> torch.Tensor:
        self.version += 1
        return torch.full((3,) if self.fixed else (number % 4, 2), float(self.version), dtype=torch.float64)

    @rule(who=st.integers(0, 1), i=st.integers(0, 5), number=st.integers(0, 7), overwrite=st.booleans())
    def set_slot(self, who: int, i: int, number: int, overwrite: bool) -> None:
        value = self.value(number)
        if i in self.held and not overwrite and self.seen[who].get(i) == self.held[i][0]:
            with pytest.raises(RuntimeError):
                self.views[who].set_slot(i, value)
            return
        self.views[who].set_slot(i, value, allow_overwrite=overwrite)
        if i < self.length and (overwrite or i not in self.held):
            self.held[i] = (self.version, value)
            self.seen[who][i] = self.version

    @rule(who=st.integers(0, 1), i=st.integers(-6, 5))
    def get_item(self, who: int, i: int) -> None:
        slot = i if i >= 0 else i + self.length
        if not 0 <= slot < self.length:
            with pytest.raises(IndexError):
                self.views[who][i]
        elif slot not in self.held:
            with pytest.raises(RuntimeError):
                self.views[who][i]
        else:
            assert same(self.views[who][i], self.held[slot][1])
            self.seen[who][slot] = self.held[slot][0]

    @rule(who=st.integers(0, 1), i=st.integers(0, 5), number=st.integers(0, 7))
    def set_item(self, who: int, i: int, number: int) -> None:
        value = self.value(number)
        if i >= self.length:
            with pytest.raises(IndexError):
                self.views[who][i] = value
            return
        self.views[who][i] = value
        self.held[i] = (self.version, value)
        self.seen[who][i] = self.version

    @precondition(lambda self: self.held)
    @rule(who=st.integers(0, 1))
    def clear(self, who: int) -> None:
        self.views[who].clear()
        self.held = {}

    @rule(who=st.integers(0, 1))
    def get_all(self, who: int) -> None:
        for i in range(self.samples):
            found = self.views[who].get_slot(i)
            if i in self.held:
                assert same(found, self.held[i][1])
                self.seen[who][i] = self.held[i][0]
            else:
                assert found is None

    @invariant()
    def states(self) -> None:
        if hasattr(self, "views"):
            expected = [1 if i in self.held else 0 if i < self.length else 2 for i in range(6)]
            assert [view.aux_array.tolist() for view in self.views] == [expected, expected]

    def teardown(self) -> None:
        if hasattr(self, "views"):
            assert slots_of(self.cache).store.check() == []
            for view in self.views:
                view.__del__()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=often(25, 200), stateful_step_count=20, deadline=None)
