"""Loose records: batches gathered from a store and from records beside it are those of the whole store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import torch
from helpers import difference, equal_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import Make, ids, opened
from test_gather import Used, arrays, as_it_is, empties, gather_for, permuted, plain
from torch.utils.data import default_collate

from hotset.collate import pad, ragged
from hotset.store.record_batch import RecordBatch
from hotset.store.spill import SpillTo
from hotset.store.store import Store

pytest.importorskip("zmq", reason="pyzmq, which carries records between machines, is not installed")

from hotset.cluster.store_service import StoreService

N = 12
SOME = [
    (samples.mapping, default_collate),
    (samples.text, default_collate),
    (permuted, default_collate),
    (arrays, default_collate),
    (empties, default_collate),
    (samples.ragged_pair, ragged),
    (samples.ragged_two_ways, pad(0)),
]


def sent(store: Store, wanted: Sequence[int]) -> RecordBatch:
    """Records of a store as another machine would get them."""
    numbers = np.unique(ids(wanted))
    found = StoreService(store, bytes(16)).take(numbers, np.empty(1 << 23, np.uint8))
    assert (found.generations >= 0).all()
    rows, tails = found.batch.rows.copy(), found.batch.tails.copy()
    rows.flags.writeable = tails.flags.writeable = False  # as frames are
    return RecordBatch(numbers, found.batch.lines, rows, tails)


def mixed(
    whole: Store, here: Store, collate: Any, wanted: Sequence[int], parts: Sequence[Sequence[int]]
) -> Any:
    """The batch, of what is here and of these loose parts; None if it is not gathered."""
    gather, _ = gather_for(here, collate)
    copy = gather.prepare(ids(wanted), lambda size: Used(), [sent(whole, part) for part in parts])
    if copy is None:
        return None
    copy.run()
    return gather.finish(copy, as_it_is)


@contextlib.contextmanager
def two(make: Make, here: Sequence[int], keep_order: bool) -> Iterator[tuple[Store, Store]]:
    """A store with all samples, and one that has only some."""
    with opened(make, N, keep_order=keep_order) as whole, opened(make, N, keep_order=keep_order) as part:
        whole.fill(np.arange(N), make)
        part.fill(ids(here), make)
        yield whole, part


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SOME),
    st.booleans(),
    st.permutations(range(N)),
    st.lists(st.integers(0, 3), min_size=N, max_size=N),
)
def test_a_batch_of_both_is_the_collate_functions(
    kind: tuple[Make, Callable[[list[Any]], Any]], keep_order: bool, order: list[int], where: list[int]
) -> None:
    make, collate = kind
    places = {number: [sample for sample in range(N) if where[sample] == number] for number in range(4)}
    here = sorted({0, *places[0]})  # one of them is compared with the collate function
    parts = [[sample for sample in places[number] if sample != 0] for number in (1, 2, 3)]
    with two(make, here, keep_order) as (whole, store):
        found = mixed(whole, store, collate, order, [part for part in parts if part])
        _, collated = gather_for(whole, collate)
        equal_batches(plain(found), plain(collated([make(i) for i in order])))


@pytest.mark.parametrize("make", [samples.mapping, samples.text])
def test_a_batch_of_nothing_but_loose_records(make: Make) -> None:
    with two(make, [0], True) as (whole, store):
        found = mixed(whole, store, default_collate, [7, 3, 9], [[9], [3, 7]])
        equal_batches(found, default_collate([make(i) for i in (7, 3, 9)]))


@pytest.mark.parametrize("make", [samples.half_megabyte, samples.jpeg_like])
def test_what_is_here_may_lie_on_a_disk(make: Make, tmp_path: Path) -> None:
    collate = default_collate if make is samples.half_megabyte else ragged
    with opened(make, N) as whole:
        whole.fill(np.arange(N), make)
        limit, spill = whole.stored_bytes // 4, SpillTo(str(tmp_path))
        with contextlib.closing(
            Store.create(whole.schema, N, limit, about={"name": "test"}, spill=spill)
        ) as store:
            store.fill(np.arange(6), make)
            assert store.on_disk(store.words(ids(range(6))))
            order = [8, 5, 0, 11, 3]
            _, collated = gather_for(whole, collate)
            found = mixed(whole, store, collate, order, [[8, 11]])
            equal_batches(plain(found), plain(collated([make(i) for i in order])))


def test_what_has_come_to_be_here_meanwhile_does_not_matter() -> None:
    with two(samples.mapping, [0, 3, 4], True) as (whole, store):
        found = mixed(whole, store, default_collate, [4, 0, 3], [[3]])
        equal_batches(found, default_collate([samples.mapping(i) for i in (4, 0, 3)]))


def test_what_is_not_gathered() -> None:
    with two(samples.mapping, [0, 1], True) as (whole, store):

        def gathered(order: Sequence[int], *parts: Sequence[int]) -> bool:
            return mixed(whole, store, default_collate, order, parts) is not None

        assert gathered([0, 5, 1], [5])
        assert not gathered([0, 5, 6], [5]), "one is missing"
        assert not gathered([0, 5, 1, 5], [5]), "a record goes to one place"


def test_their_memory_is_theirs() -> None:
    """A batch is a copy: what it was made of may go, and is not written to."""
    with two(samples.kilobyte, [0], True) as (whole, store):
        loose = sent(whole, [3, 4])
        before = loose.rows.copy()
        gather, _ = gather_for(store, default_collate)
        copy = gather.prepare(ids(4, 3), lambda size: Used(), [loose])
        assert copy is not None
        copy.run()
        batch = gather.finish(copy, as_it_is)
        assert isinstance(batch, torch.Tensor)
        batch += 1
        assert np.array_equal(loose.rows, before)
        for sample, value in loose.samples(store.schema).items():
            assert difference(value, samples.kilobyte(sample)) is None
            value.zero_()
        assert np.array_equal(loose.rows, before)
