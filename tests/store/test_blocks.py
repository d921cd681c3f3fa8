"""Blocks: free again exactly when the last view dies, never before, in whatever thread, cycle or process."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import in_threads, is_a_sentence, memory_files
from kills import child, ended, in_child

from hotset.store.blocks import BlockPool, SharedBlocks, making_workers
from hotset.store.segment import Address

SIZE = 1 << 16


@pytest.fixture(params=["private", "shared"])
def pool(request: pytest.FixtureRequest) -> BlockPool:
    return BlockPool(SIZE, shared=request.param == "shared")


def tensor(array: Any) -> torch.Tensor:
    return torch.frombuffer(array, dtype=torch.uint8)


def lent(pool: BlockPool, value: int = 0) -> tuple[int, torch.Tensor]:
    """A block in use, filled with a number; its only view is the tensor."""
    number = pool.take()
    view = tensor(pool.new_array(number))
    view.fill_(value)
    return number, view


def is_free(pool: BlockPool, number: int) -> bool:
    """Whether the block would be the next one to be given out."""
    other = pool.take()
    pool.give_back(other)
    return other == number


# When is a block free again?

VIEWS: dict[str, Callable[[Any], Any]] = {
    "the array itself": lambda array: array,
    "a tensor": tensor,
    "a slice": lambda array: tensor(array)[100:200],
    "one element": lambda array: tensor(array)[0],
    "an empty slice": lambda array: tensor(array)[:0],
    "another dtype and shape": lambda array: tensor(array).view(torch.float32).view(-1, 64).t(),
    "a numpy view of a tensor": lambda array: tensor(array)[7:].numpy()[::2],
    "a numpy view of the block": lambda array: np.frombuffer(array, np.int16)[3:],
    "a storage": lambda array: tensor(array).untyped_storage(),
    "a tensor over a storage": lambda array: torch.empty(0, dtype=torch.uint8).set_(
        tensor(array).untyped_storage()
    ),
    "a memoryview": lambda array: memoryview(array)[5:9],
    "a memoryview of a numpy view": lambda array: memoryview(np.frombuffer(array, np.uint8).data)[1:],
    "a detached tensor": lambda array: tensor(array).detach(),
    "a tensor in a list in a dict": lambda array: {"x": [tensor(array)]},
    "a ctypes object inside it": lambda array: ctypes.c_int.from_buffer(array, 16),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_block_is_free_again_exactly_when_its_last_view_dies(kind: str, pool: BlockPool) -> None:
    number = pool.take()
    array = pool.new_array(number)
    view = VIEWS[kind](array)
    del array
    gc.collect()
    assert not is_free(pool, number)
    del view
    assert is_free(pool, number)


def test_every_one_of_several_views_keeps_it(pool: BlockPool) -> None:
    number, view = lent(pool)
    views = [view[10:], view.numpy(), view.view(torch.int64), memoryview(view.numpy().data)]
    del view
    while views:
        assert not is_free(pool, number)
        views.pop(0)
    assert is_free(pool, number)


def test_a_copy_keeps_nothing(pool: BlockPool) -> None:
    number, view = lent(pool, 7)
    copy, array = view.clone(), view.numpy().copy()
    del view
    assert is_free(pool, number)
    lent(pool, 8)
    assert int(copy[0]) == int(array[0]) == 7


def test_a_view_in_a_reference_cycle_keeps_it_until_the_cycle_is_collected(pool: BlockPool) -> None:
    number, view = lent(pool)
    cycle: list[Any] = [view]
    cycle.append(cycle)
    del view, cycle
    assert not is_free(pool, number)
    gc.collect()
    assert is_free(pool, number)


def test_a_block_that_dies_in_a_collection_inside_take_is_not_lost(pool: BlockPool) -> None:
    """Finalizers run in the midst of any allocation, also of the pool's own."""
    seen = set()
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(300):
            number, view = lent(pool)
            seen.add(number)
            cycle: list[Any] = [view]
            cycle.append(cycle)
            del view
    finally:
        gc.set_threshold(*thresholds)
    made = 1 + max(seen)
    del cycle
    gc.collect()
    assert {pool.take() for _ in range(made)} == set(range(made))


def test_an_exceptions_traceback_keeps_it_for_as_long_as_it_lives(pool: BlockPool) -> None:
    def fail() -> None:
        _, view = lent(pool)
        raise KeyError(int(view[0]))

    with pytest.raises(KeyError) as caught:
        fail()
    assert not is_free(pool, 0)
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert is_free(pool, 0)


# Which block, and whose?


def test_the_last_one_that_came_back_is_the_first_to_be_used_again(pool: BlockPool) -> None:
    blocks = [lent(pool) for _ in range(4)]
    order = [number for number, _ in blocks]
    for place in (2, 0, 3, 1):
        blocks[place] = (0, torch.empty(0))
    assert [pool.take() for _ in range(4)] == [order[place] for place in (1, 3, 0, 2)]


def test_a_pool_never_waits_and_every_block_is_memory_of_its_own(pool: BlockPool) -> None:
    blocks = [lent(pool, value) for value in range(200)]
    assert len({number for number, _ in blocks}) == 200
    for value, (_, view) in enumerate(blocks):
        assert len(view) == SIZE
        assert view.eq(value).all()


def test_a_steady_consumer_lives_on_few_blocks(pool: BlockPool) -> None:
    held: list[torch.Tensor] = []
    seen = set()
    for value in range(100):
        number, view = lent(pool, value)
        seen.add(number)
        held = [*held[-2:], view]
    assert len(seen) <= 4


def test_sizes_are_rounded_up_to_pages() -> None:
    assert [BlockPool(size).block_bytes for size in (0, 1, 4096, 4097)] == [4096, 4096, 4096, 8192]
    for shared in (False, True):
        view = tensor((pool := BlockPool(1, shared=shared)).new_array(pool.take()))
        assert view.data_ptr() % 4096 == 0


def test_a_block_that_was_taken_and_not_lent_can_be_given_back_once(pool: BlockPool) -> None:
    number = pool.take()
    pool.give_back(number)
    pool.give_back(number)
    assert pool.take() == number
    assert pool.take() != number


def test_a_block_that_was_lent_is_not_given_back_by_hand(pool: BlockPool) -> None:
    number, view = lent(pool)
    pool.give_back(number)
    assert not is_free(pool, number)
    del view
    assert is_free(pool, number)
    pool.give_back(12345)
    assert {pool.take(), pool.take()} == {number, number + 1}


def test_adopting_gives_the_same_memory_or_lends_it(pool: BlockPool) -> None:
    number = pool.take()
    array = pool.array_of(number)
    again = pool.array_of(number)
    assert ctypes.addressof(array) == ctypes.addressof(again)
    pool.give_back(number)
    del array
    assert not is_free(pool, number)
    del again
    assert is_free(pool, number)


def test_a_block_that_is_adopted_is_nobody_elses(pool: BlockPool) -> None:
    number, view = lent(pool)
    del view
    late = pool.array_of(number)
    assert pool.take() != number
    del late


def test_more_blocks_than_a_shared_pool_holds_is_an_error_with_a_sentence() -> None:
    pool = BlockPool(1 << 38, shared=True)
    for _ in range(64):
        pool.take()
    with pytest.raises(MemoryError) as caught:
        pool.take()
    assert is_a_sentence(str(caught.value))
    assert ".clone()" in str(caught.value)


def test_views_outlive_their_pool() -> None:
    for shared in (False, True):
        pool = BlockPool(SIZE, shared=shared)
        number, view = lent(pool, 5)
        gone = weakref.ref(pool)
        del pool
        assert gone() is None
        assert view.eq(5).all()
        del view
    assert number == 0


def test_a_shared_pools_descriptor_is_closed_with_it() -> None:
    before = memory_files()
    pool = BlockPool(SIZE, shared=True)
    _, view = lent(pool, 5)
    assert memory_files() > before
    del pool
    assert view.eq(5).all()
    del view
    assert memory_files() == before


def test_threads_that_share_a_pool_never_share_a_block(pool: BlockPool) -> None:
    def work(mine: int) -> None:
        held: list[torch.Tensor] = []
        for turn in range(200):
            _, view = lent(pool, mine)
            held.append(view)
            if turn % 7 == 0:
                held.clear()
            assert all(one.eq(mine).all() for one in held[-3:])
            del view

    in_threads(6, work)


def test_a_thread_that_makes_a_block_slowly_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping memory lets other threads in: their blocks must be theirs, and ours ours."""
    pool, real, inside, go = BlockPool(SIZE), mmap.mmap, threading.Event(), threading.Event()

    def slow(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go.wait(60)
        return real(*arguments, **named)

    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(lent(pool, 1)[1]))
    monkeypatch.setattr(mmap, "mmap", slow)
    thread.start()
    assert inside.wait(60)
    _, mine = lent(pool, 2)
    go.set()
    thread.join(60)
    assert found[0].eq(1).all()
    assert mine.eq(2).all()


# Forks


def _fork_with(
    held: list[torch.Tensor], value: int, meanwhile: Callable[[], None], writes: int | None = None
) -> None:
    """Fork a child that finds ``value`` in what is held, and again after the parent has done something."""
    read, tell = os.pipe()
    ready, say = os.pipe()

    def look() -> None:
        os.close(tell)  # whether it is told, or its parent has failed: the read below comes to an end
        assert held[0].eq(value).all()
        os.write(say, b"r")
        os.read(read, 1)
        assert held[0].eq(value).all()
        if writes is not None:
            held[0].fill_(writes)

    pid = child(look)
    os.close(read)
    os.close(say)
    try:
        assert os.read(ready, 1) == b"r", "the child has failed"
        meanwhile()
    finally:
        os.close(tell)
        os.close(ready)
        code = ended(pid)
    assert code == 0


def test_after_a_fork_private_blocks_are_each_processs_own() -> None:
    pool = BlockPool(SIZE)
    held = [lent(pool, 1)[1]]

    def meanwhile() -> None:
        held[0].fill_(2)

    _fork_with(held, 1, meanwhile, writes=3)
    assert held[0].eq(2).all()
    assert not is_free(pool, 0)
    held.clear()
    assert is_free(pool, 0)


def test_what_a_child_drops_is_not_free_in_its_parent(pool: BlockPool) -> None:
    held = [lent(pool, 4)]

    def drop() -> None:
        held.clear()
        gc.collect()

    in_child(drop)
    number, view = held[0]
    assert not is_free(pool, number)
    assert view.eq(4).all()


def test_a_pool_is_its_makers_alone(pool: BlockPool) -> None:
    assert pool.is_ours

    def look() -> None:
        assert not pool.is_ours

    in_child(look)


def test_a_shared_block_that_was_lent_at_a_fork_is_never_used_again() -> None:
    """The child may go on reading a batch that its parent has dropped."""
    pool = BlockPool(SIZE, shared=True)
    held = [lent(pool, 6)[1]]

    def meanwhile() -> None:
        held.clear()
        gc.collect()
        for _ in range(5):
            another, view = lent(pool, 9)
            assert another != 0
            del view

    _fork_with(held, 6, meanwhile)


def test_a_shared_block_that_was_free_at_a_fork_is_used_again() -> None:
    pool = BlockPool(SIZE, shared=True)
    number = lent(pool)[0]
    in_child(lambda: None)
    assert is_free(pool, number)


def test_a_fork_that_makes_workers_retires_nothing() -> None:
    pool = BlockPool(SIZE, shared=True)
    number, view = lent(pool)
    with making_workers():
        in_child(lambda: None)
    del view
    assert is_free(pool, number)
    number, view = lent(pool)
    with pytest.raises(KeyError), making_workers():
        raise KeyError
    in_child(lambda: None)
    del view
    assert not is_free(pool, number)


# Workers


def test_what_a_worker_writes_to_a_block_arrives() -> None:
    pool = BlockPool(SIZE, shared=True)
    pool.take()
    number = pool.take()

    def worker() -> None:
        blocks = SharedBlocks(pool.address, pool.block_bytes)
        tensor(blocks.array(number)).copy_(torch.arange(SIZE) % 251)

    in_child(worker)
    assert tensor(pool.array_of(number)).equal((torch.arange(SIZE) % 251).to(torch.uint8))


def test_a_worker_of_a_pool_that_is_gone_is_told() -> None:
    pool = BlockPool(SIZE, shared=True)
    pid, fd, inode, nonce = pool.address
    with pytest.raises(OSError, match="has closed its pool"):
        SharedBlocks(Address(pid, fd, inode + 1, nonce), SIZE)
    del pool
    with pytest.raises(OSError, match="No such file"):
        SharedBlocks(Address(pid, fd, inode, nonce), SIZE)


def test_trimming_gives_memory_of_free_blocks_back_and_leaves_lent_ones_alone() -> None:
    pool = BlockPool(SIZE, shared=True)
    blocks = [lent(pool, value) for value in range(8)]
    fd = pool.address.fd
    assert os.fstat(fd).st_blocks * 512 == 8 * SIZE
    kept = blocks[3][1]
    del blocks
    pool.trim()
    assert os.fstat(fd).st_blocks * 512 == SIZE
    assert kept.eq(3).all()
    number, view = lent(pool, 9)
    assert view.eq(9).all()
    assert number != 3


@pytest.mark.parametrize(("kept_bytes", "blocks"), [(0, 0), (3 * SIZE, 3), (4 * SIZE - 1, 3), (99 * SIZE, 8)])
def test_trimming_keeps_memory_of_the_blocks_that_are_taken_next(kept_bytes: int, blocks: int) -> None:
    pool = BlockPool(SIZE, shared=True)
    made = [lent(pool, value) for value in range(8)]
    del made
    pool.trim(kept_bytes)
    fd = pool.address.fd
    assert os.fstat(fd).st_blocks * 512 == blocks * SIZE
    again = [lent(pool, value) for value in range(blocks)]
    assert os.fstat(fd).st_blocks * 512 == len(again) * SIZE
