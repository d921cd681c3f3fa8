"""Transfers to a device: a batch is whole when a step reads it, and the host's memory waits for its copy.

There is no graphics card here: ``cards.py`` stands for one whose copies and steps are as late as can be.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cards import Card
from helpers import equal_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import Opaque, Pair, half_megabyte
from sources import Samples
from torch.utils.data import default_collate

import hotset
from hotset.device.transfer import HostTransfer, StreamTransfer, resolve_device, transfer_to
from hotset.device.trees import map_tensors, tensors_of
from hotset.store.blocks import BlockPool

N, BATCH = 12, 2  # 1 MiB: each batch has a block of its own, and is gathered when it is asked for
EXPECTED = [default_collate([half_megabyte(i) for i in range(at, at + BATCH)]) for at in range(0, N, BATCH)]


def transfer_of(card: Card) -> StreamTransfer:
    return StreamTransfer(card.device, api=card)


class Recycled:
    """Batches made in blocks that are lent again the moment that nothing refers to them."""

    def __init__(self, size: int = 4096) -> None:
        self.pool = BlockPool(size)
        self.numbers: set[int] = set()

    def batch(self, value: int) -> list[torch.Tensor]:
        number = self.pool.take()
        self.numbers.add(number)
        array = self.pool.new_array(number)
        made = [torch.frombuffer(array, dtype=torch.uint8, count=64, offset=at) for at in (0, 64)]
        for tensor in made:
            tensor.fill_(value)
        return made


def reads(card: Card, batch: Any, seen: list[Any]) -> None:
    """A step that reads a batch, as late as the card gets to it."""
    card.steps.issue(lambda: seen.append(map_tensors(torch.clone, batch)))


def loop(card: Card, queue: Any, pace: Iterator[tuple[int, int]]) -> list[Any]:
    """Train on a queue's batches; the card does so many copies and so many steps after each batch."""
    seen: list[Any] = []
    for batch in queue:
        reads(card, batch, seen)
        copied, stepped = next(pace, (0, 0))
        card.copies[-1].run(card.copies[-1].done + copied)
        card.steps.run(card.steps.done + stepped)
        del batch
    card.steps.run()
    return seen


@pytest.fixture(scope="module")
def cached() -> Iterator[Any]:
    with hotset.cache(Samples(half_megabyte, N)) as made:
        list(hotset.DataLoader(made, batch_size=BATCH))
        yield made


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A card to which every queue sends."""
    with Card() as card:
        monkeypatch.setattr(
            "hotset.device.queue.transfer_to",
            lambda device, depth: StreamTransfer(card.device, depth + 2, card),
        )
        yield card


# ---- the host's memory --------------------------------------------------------------------------------


def test_a_block_is_not_lent_again_before_its_copy_has_ended() -> None:
    with Card() as card:
        transfer, memory, seen = transfer_of(card), Recycled(), list[Any]()
        for value in range(6):
            batch = memory.batch(value)
            sent = transfer.send(batch)
            del batch
            reads(card, transfer.receive(sent), seen)
        assert len(memory.numbers) == 6, "a block was lent again though no copy has been made"
        card.steps.run()
        assert [batch[1].tolist() for batch in seen] == [[value] * 64 for value in range(6)]
        for value in range(6, 12):
            batch = memory.batch(value)
            sent = transfer.send(batch)
            del batch
            transfer.receive(sent)
            card.copies[0].run()
        assert len(memory.numbers) <= 8, "blocks are not lent again though their copies have ended"
        transfer.close()


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3)), max_size=12), st.integers(1, 4)
)
def test_whatever_the_cards_pace(story: list[tuple[bool, int, int]], ahead: int) -> None:
    """Batches sent up to so many ahead, received, and the card doing a little of its work in between."""
    with Card() as card:
        transfer, memory, seen = transfer_of(card), Recycled(), list[Any]()
        sent: list[Any] = []
        count = 0
        for sends, copied, stepped in [*story, *[(False, 0, 0)] * ahead]:
            if sends:
                sent.append(transfer.send(memory.batch(count)))
                count += 1
            if sent and (len(sent) > ahead or not sends):
                reads(card, transfer.receive(sent.pop(0)), seen)
            card.copies[0].run(card.copies[0].done + copied)
            card.steps.run(card.steps.done + stepped)
        for one in sent:
            reads(card, transfer.receive(one), seen)
        card.steps.run()
        assert [[part.tolist() for part in batch] for batch in seen] == [
            [[value] * 64] * 2 for value in range(count)
        ]


@pytest.mark.parametrize("end", ["close", "drop"])
def test_the_end_of_a_transfer_waits_for_its_copies(end: str) -> None:
    with Card() as card:
        transfer, memory = transfer_of(card), Recycled()
        moved = [transfer.send(memory.batch(value)).batch for value in range(3)]
        assert moved[2][0].tolist() == [0xA5] * 64, "the card is not as late as it should be"
        if end == "close":
            transfer.close()
        else:
            del transfer
        for _ in range(3):
            memory.batch(99)
        assert [batch[1].tolist() for batch in moved] == [[value] * 64 for value in range(3)]
        assert len(memory.numbers) == 3, "the blocks were not given back"


def test_a_copy_that_fails_leaves_those_before_it_their_memory() -> None:
    with Card() as card:
        transfer, memory = transfer_of(card), Recycled()
        card.room = 1
        try:
            transfer.send(memory.batch(5))
        except torch.OutOfMemoryError as error:
            error.__traceback__ = None
        assert len(card.copies[0].left) == 1
        memory.batch(99)
        assert memory.numbers == {0, 1}, "the block was lent again"
        transfer.close()
        memory.batch(98)
        assert memory.numbers == {0, 1}


def test_the_host_waits_for_nothing_and_lets_go_of_what_has_ended() -> None:
    with Card() as card:
        transfer = transfer_of(card)
        batches = [torch.full((8,), value) for value in range(4)]
        alive = [weakref.ref(batch) for batch in batches]
        sent = [transfer.send(batches.pop(0)) for _ in range(3)]
        assert [one() is not None for one in alive[:3]] == [True] * 3
        card.copies[0].run(2)
        transfer.receive(sent[0])
        assert [one() is not None for one in alive[:3]] == [False, False, True]
        transfer.send(batches.pop(0))
        card.copies[0].run()
        transfer.send(torch.zeros(1))
        assert [one() is not None for one in alive] == [False] * 4
        assert sum(one.event.waits for one in sent) == 0
        transfer.close()


# ---- how far the host runs ahead ----------------------------------------------------------------------


class Slow:
    """Steps that the card never gets to by itself, and the batches that are on it meanwhile."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.alive: list[weakref.ref[torch.Tensor]] = []

    def step(self, batch: torch.Tensor) -> None:
        self.card.used.clear()
        self.alive.append(weakref.ref(batch))
        self.card.steps.issue(lambda: batch.sum())  # the step holds its batch until it ends

    @property
    def held(self) -> int:
        return sum(one() is not None for one in self.alive)


@pytest.mark.parametrize("depth", [0, 2])
def test_slow_steps_hold_no_more_batches_than_a_few(
    depth: int, on_card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a sink of a hundred steps has a hundred batches on the device."""
    monkeypatch.setattr("hotset.device.transfer._PENDING_BYTES", 1000)
    slow, held = Slow(on_card), []
    with hotset.DeviceQueue([torch.ones(100)] * 40, depth, "cpu") as queue:  # 400 bytes each
        for batch in queue:
            slow.step(batch)
            del batch
            held.append(slow.held)
    # Those that wait for their step, the last two handed over, and at the end those that were sent ahead.
    assert max(held) <= (depth + 2) + 2 + depth


def test_small_batches_run_far_ahead(on_card: Card) -> None:
    """The host waits for nothing as long as the device has work, and room for its batches."""
    slow = Slow(on_card)
    with hotset.DeviceQueue([torch.ones(100)] * 40, 2, "cpu") as queue:
        for batch in queue:
            slow.step(batch)
            del batch
        assert slow.held == 40
    on_card.steps.run()
    assert slow.held == 0


def test_the_host_waits_for_bytes_not_for_batches(on_card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.device.transfer._PENDING_BYTES", 4000)
    slow, held = Slow(on_card), []
    with hotset.DeviceQueue([torch.ones(100)] * 40, 0, "cpu") as queue:
        for batch in queue:
            slow.step(batch)
            del batch
            held.append(slow.held)
    assert max(held) == 12  # ten of 400 bytes, the one that goes over it, and the one at hand


def test_copies_to_a_device_share_a_stream() -> None:
    with Card() as card:
        transfers = [transfer_of(card) for _ in range(3)]
        assert len(card.copies) == 1
        for transfer in transfers:
            transfer.close()


# ---- what is copied, and what is not ------------------------------------------------------------------


def test_memory_that_is_not_page_locked_is_brought_to_memory_that_is() -> None:
    with Card(pinned=False) as card:
        transfer, memory = transfer_of(card), Recycled()
        locked = torch.full((4,), 7).pin_memory()
        batch = [*memory.batch(1), locked, torch.empty(0, 3)]
        sent = transfer.send(batch)
        del batch
        memory.batch(99)
        assert memory.numbers == {0}, "nothing reads the block any more, and it was not given back"
        assert (len(card.locked), card.pageable) == (3, 0)
        moved = transfer.receive(sent)
        card.steps.run()
        assert [one.tolist() for one in moved] == [[1] * 64, [1] * 64, [7] * 4, []]
        assert tuple(moved[3].shape) == (0, 3)
        transfer.close()


def test_what_is_on_the_device_and_what_is_no_tensor_stays_as_it_is() -> None:
    with Card() as card:
        transfer = transfer_of(card)
        there = transfer.receive(transfer.send(torch.ones(3)))
        note = Opaque(1)
        batch = {"there": there, "pair": Pair("text", [note, torch.zeros(2)])}
        copies = len(card.copies[0].left)
        got = transfer.receive(transfer.send(batch))
        assert got["there"] is there
        assert got["pair"].image == "text"
        assert got["pair"].label[0] is note
        assert len(card.copies[0].left) == copies + 1
        assert isinstance(batch["pair"], Pair)
        assert batch["pair"].label[1].device.type == "cpu", "the batch itself was changed"
        transfer.close()


def test_a_batch_that_is_on_the_device_waits_for_no_copies() -> None:
    with Card() as card:
        transfer = transfer_of(card)
        there = transfer.receive(transfer.send([torch.ones(3)]))
        card.copies[0].run()
        card.steps.run()
        transfer.send(torch.zeros(3))
        got = transfer.receive(transfer.send(there))
        assert got[0] is there[0]
        assert got is not there, "the consumer may change its list"
        card.steps.run()
        assert len(card.copies[0].left) == 1
        assert [tensor is there[0] for tensor, _ in card.used] == [True, True]
        transfer.close()


def test_what_is_received_is_said_to_be_used_by_the_consumers_stream() -> None:
    """Else the allocator gives its memory to the next copy while the step reads it."""
    with Card() as card:
        transfer = transfer_of(card)
        sent = transfer.send({"x": torch.ones(3), "y": [torch.ones(2)]})
        assert card.used == []
        with card.stream(other := card.Stream(card.device)):
            got = transfer.receive(sent)
        assert [(id(tensor), stream) for tensor, stream in card.used] == [
            (id(tensor), other) for tensor in tensors_of(got)
        ]
        assert len(other.left) == 1
        assert card.steps.left == []
        other.run()
        equal_batches(map_tensors(torch.clone, got), {"x": torch.ones(3), "y": [torch.ones(2)]})
        transfer.close()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_used_by_the_consumers_stream_with_all_that_it_is_made_of() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    sparse = [dense.to_sparse(), dense.to_sparse_csr()]
    with Card() as card:
        transfer = transfer_of(card)
        moved = transfer.receive(transfer.send(sparse))
        assert [one.to_dense().tolist() for one in moved] == [dense.tolist()] * 2
        assert [tensor.shape for tensor, _ in card.used] == [(2, 2), (2,), (3,), (2,), (2,)]
        assert transfer._last_size == sum(tensor.nbytes for tensor, _ in card.used)
        transfer.close()


def test_the_thread_that_reads_ahead_is_on_the_consumers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, bool]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "a stream of the third GPU")
    here = threading.get_ident()
    monkeypatch.setattr(
        torch.cuda, "set_stream", lambda stream: said.append((stream, threading.get_ident() == here))
    )
    with hotset.DeviceQueue(iter([torch.ones(2)]), 2, "cpu") as queue:
        assert len(list(queue)) == 1
    assert said == [("a stream of the third GPU", False)]


# ---- the whole queue ----------------------------------------------------------------------------------


def test_a_queue_over_the_caches_blocks_whatever_the_pace(cached: Any, on_card: Card) -> None:
    loader = hotset.DataLoader(cached, batch_size=BATCH)

    @settings(max_examples=8, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=N // BATCH), st.integers(0, 3))
    def at_this_pace(pace: list[tuple[int, int]], depth: int) -> None:
        with hotset.DeviceQueue(loader, depth, "cpu") as queue:
            equal_batches(loop(on_card, queue, iter(pace)), EXPECTED)

    at_this_pace()


def test_blocks_are_recycled_while_the_card_keeps_up(cached: Any, on_card: Card) -> None:
    loader = hotset.DataLoader(cached, batch_size=BATCH)
    places = set()

    def counted() -> Iterator[Any]:
        for batch in loader:
            places.add(batch.data_ptr())
            yield batch

    with hotset.DeviceQueue(counted(), 0, "cpu") as queue:
        equal_batches(loop(on_card, queue, iter([(9, 9)] * 99)), EXPECTED)
    assert len(places) <= 3


def test_batches_that_are_kept_stay_as_they_were(cached: Any, on_card: Card) -> None:
    loader = hotset.DataLoader(cached, batch_size=BATCH)
    with hotset.DeviceQueue(loader, 2, "cpu") as queue:
        kept = [batch for _ in range(2) for batch in queue]
    on_card.steps.run()
    equal_batches([batch.clone() for batch in kept], EXPECTED * 2)


@pytest.mark.parametrize("end", ["close", "drop", "again"])
def test_breaking_off_waits_for_the_copies(end: str, cached: Any, on_card: Card) -> None:
    loader = hotset.DataLoader(cached, batch_size=BATCH)
    queue: Any = hotset.DeviceQueue(loader, 2, "cpu")
    seen: list[Any] = []
    for batch in queue:
        reads(on_card, batch, seen)
        break
    if end == "close":
        queue.close()
        assert on_card.copies[-1].left == []
    elif end == "drop":
        gc.disable()
        try:
            copies = on_card.copies[-1]
            del queue
            assert copies.left == []
        finally:
            gc.enable()
    else:
        equal_batches(loop(on_card, queue, iter([(1, 1)] * 99)), EXPECTED)
        queue.close()
    for _ in loader:
        pass
    on_card.steps.run()
    equal_batches(seen[0], EXPECTED[0])


def test_a_full_card_is_told_when_the_batch_is_due(on_card: Card) -> None:
    """Those that were sent before come first, and those after it go on."""
    batches = [torch.full((4,), value) for value in range(6)]
    on_card.room = 3
    with hotset.DeviceQueue(batches, 2, "cpu") as queue:
        iterator = iter(queue)
        kept = [next(iterator) for _ in range(3)]
        with pytest.raises(torch.OutOfMemoryError):
            next(iterator)
        on_card.room = 9
        kept += list(iterator)
    on_card.steps.run()
    assert [int(batch[0]) for batch in kept] == [0, 1, 2, 4, 5]


# ---- the host's transfer, and which it is -----------------------------------------------------------------


def test_on_the_host_a_batch_is_handed_over_as_it_is() -> None:
    transfer = HostTransfer(torch.device("cpu"))
    batch = {"x": [torch.ones(2), "text"]}
    assert transfer.receive(transfer.send(batch)) is batch
    assert not transfer.ahead


def test_a_device_without_streams_of_ours_gets_copies() -> None:
    transfer = HostTransfer(torch.device("meta"))
    batch = Pair(torch.ones(2), {"name": "text", "y": [torch.zeros(3)]})
    got = transfer.receive(transfer.send(batch))
    assert [one.device.type for one in tensors_of(got)] == ["meta", "meta"]
    assert (type(got), got.label["name"]) == (Pair, "text")
    transfer.close()


def test_which_device_and_which_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device(None) == torch.device("cpu")
    assert resolve_device("meta") == torch.device("meta")
    assert resolve_device("cuda:3") == torch.device("cuda", 3)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        assert resolve_device("cuda") == torch.device("cuda", 1)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        assert resolve_device(None) == torch.device("cuda", 1)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        assert type(transfer_to(torch.device("cuda", 1))) is StreamTransfer
    assert type(transfer_to(torch.device("cpu"))) is HostTransfer
    assert type(transfer_to(torch.device("meta"))) is HostTransfer
