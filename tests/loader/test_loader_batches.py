"""A batch does not change for as long as the caller keeps any part of it, in any process.

Blocks are recycled, so each of these tests runs on for epochs after it kept something: a block given back too
early would be overwritten by then (FFCV overwrites batches that the user holds).
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from helpers import check_from_queue, difference, equal_batches, finish, leaves, rarely, scribble
from kills import in_child
from live import draw_all
from samples import big_image_and_label, image_and_label, mapping, named, poster_and_label, ragged
from sources import Counting, ReadLog, Samples
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, default_collate

import hotset

N = 64
BATCH = 8


@pytest.fixture(params=["in process", "in a thread", "in process, live", "after workers", "live suffix"])
def loader(request: pytest.FixtureRequest) -> Iterator[DataLoader[Any]]:
    """A loader over N images, for each way of making a batch, after its first epoch."""
    suffix = [_negative] if "live" in request.param else None
    make = poster_and_label if request.param in ("in a thread", "in process, live") else big_image_and_label
    workers = 0 if request.param.startswith("in ") else 2
    with hotset.cache(Samples(make, N), transform=suffix) as cached:
        made = hotset.DataLoader(cached, batch_size=BATCH, shuffle=True, num_workers=workers)
        for batch in made:
            check(batch)
        yield made


def _negative(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    image, label = sample
    return image.neg_().neg_(), label


def check(batch: Any) -> None:
    """Check a batch against its labels (with numpy: torch's threads are slow on a busy machine)."""
    images, labels = batch
    assert (type(batch), type(images), type(labels)) == (list, torch.Tensor, torch.Tensor)
    assert (images.dtype, labels.dtype, len(images)) == (torch.uint8, torch.int64, len(labels))
    assert images.is_contiguous()
    assert len(set(labels.tolist())) == len(labels)
    make = poster_and_label if images.shape[-1] == 320 else big_image_and_label
    for image, label in zip(images.numpy(), labels.tolist(), strict=True):
        assert np.array_equal(image, make(label)[0].numpy()), f"image {label} is another"


class Held:
    """A batch that is kept, and its labels at that time.

    A block that is recycled too early often holds another batch later, which is right in itself.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.labels = batch[1].tolist()

    def check(self) -> None:
        assert self.batch[1].tolist() == self.labels, "another batch is in its place"
        check(self.batch)


def run_on(loader: DataLoader[Any], epochs: int = 3) -> None:
    for _ in range(epochs):
        for batch in loader:
            check(batch)


def test_batches_kept_in_a_list_stay_right_unlike_ffcvs(loader: DataLoader[Any]) -> None:
    kept = [Held(batch) for _ in range(3) for batch in loader]
    run_on(loader, 1)
    for held in kept:
        held.check()
    assert sorted(label for held in kept for label in held.labels) == sorted([*range(N)] * 3)


def test_batches_of_the_first_epoch_stay_right_too() -> None:
    for workers in (0, 2):
        with hotset.cache(Samples(big_image_and_label, N)) as cached:
            loader = hotset.DataLoader(cached, batch_size=BATCH, num_workers=workers)
            kept = [Held(batch) for batch in loader]
            run_on(loader, 2)
            for held in kept:
                held.check()


def test_any_part_of_a_batch_keeps_it_right(loader: DataLoader[Any]) -> None:
    kept: list[Callable[[], Any]] = []
    expected = []
    for number, batch in enumerate(loader):
        images = batch[0]
        part: Any = [
            images[3],
            images[:, 1, ::2].transpose(0, 1),
            images.numpy()[2:5],
            images.view(-1)[7:],
            memoryview(images.numpy()[1]),
            images.untyped_storage(),
            images.unbind(0)[5],
            batch[1][1:2],
        ][number]
        expected.append(_values(part).copy())
        kept.append(part)
        del batch, images, part
    run_on(loader)
    for part, values in zip(kept, expected, strict=True):
        assert np.array_equal(_values(part), values)


def _values(part: Any) -> np.ndarray[Any, Any]:
    if isinstance(part, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8).set_(part).numpy()
    return np.asarray(part)


def test_batches_in_reference_cycles_stay_right_and_hang_nothing(loader: DataLoader[Any]) -> None:
    class Node:
        def __init__(self, batch: Any) -> None:
            self.held = Held(batch)
            self.itself = self

    gc.disable()
    try:
        alive = []
        for epoch in range(4):
            for number, batch in enumerate(loader):
                node = Node(batch)
                if number == epoch:
                    alive.append(node)
                del node, batch
            gc.collect(0)
        for node in alive:
            node.held.check()
        gc.collect()
        run_on(loader, 1)
        for node in alive:
            node.held.check()
    finally:
        gc.enable()


def test_batches_freed_by_the_collector_inside_an_allocation_hang_nothing(loader: DataLoader[Any]) -> None:
    """A finalizer that waits for a lock of the interrupted code would hang here for ever."""
    before = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        for _ in range(3):
            for batch in loader:
                cycle: list[Any] = [batch]
                cycle.append(cycle)
                check(batch)
                del cycle, batch
    finally:
        gc.set_threshold(*before)


def test_batches_stay_right_across_a_fork(loader: DataLoader[Any], request: pytest.FixtureRequest) -> None:
    kept = [Held(batch) for batch in loader][:4]
    from_workers = "live suffix" in request.node.name

    def child() -> None:
        for held in kept:
            held.check()
            if not from_workers:  # batches from workers are shared with children by torch itself
                scribble(held.batch)
        kept.clear()  # a child that gives its copies up must not give the parent's blocks back
        gc.collect()

    in_child(child)
    run_on(loader)
    for held in kept:
        held.check()


def test_a_child_may_keep_batches_that_its_parent_drops(loader: DataLoader[Any]) -> None:
    kept = [Held(batch) for batch in loader][:4]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)  # until the parent has run on
        try:
            for held in kept:
                held.check()
            os._exit(0)
        finally:
            os._exit(1)
    kept.clear()
    run_on(loader)
    os.write(writing, b"x")
    _, status = os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    assert status == 0, "the child's batches were written over"


def test_a_forked_child_reads_the_cache_and_runs_loaders_of_its_own() -> None:
    with hotset.cache(Samples(big_image_and_label, N)) as cached:
        loader = hotset.DataLoader(cached, batch_size=BATCH, shuffle=True)
        run_on(loader, 2)
        iterator = iter(loader)
        held = Held(next(iterator))

        def child() -> None:
            held.check()
            run_on(hotset.DataLoader(cached, batch_size=BATCH, shuffle=True), 2)
            run_on(hotset.DataLoader(cached, batch_size=BATCH, shuffle=True, num_workers=1), 1)
            run_on(loader, 2)
            equal_batches(cached[5], big_image_and_label(5))

        in_child(child)
        for batch in iterator:
            check(batch)
        held.check()
        run_on(loader, 1)
        assert cached.check() == []


@pytest.mark.parametrize("live", [False, True])
def test_batches_through_a_multiprocessing_queue_are_right(live: bool) -> None:
    """torch moves a tensor that it sends into shared memory of its own: both sides have to stay right."""
    context = torch.multiprocessing.get_context("fork")
    queue, answers = context.Queue(), context.Queue()
    consumer = context.Process(target=check_from_queue, args=(queue, answers, big_image_and_label))
    consumer.start()
    with hotset.cache(Samples(big_image_and_label, N), transform=[_negative] if live else None) as cached:
        loader = hotset.DataLoader(cached, batch_size=BATCH, shuffle=True, num_workers=2)
        kept = []
        for _ in range(3):
            for number, batch in enumerate(loader):
                queue.put((batch[1].tolist(), batch))
                if number % 2:
                    kept.append(Held(batch))
                del batch
        queue.put(None)
        run_on(loader, 1)
        count, wrong = answers.get(timeout=60)
        for held in kept:
            held.check()
    finish(consumer)
    for channel in (queue, answers):
        channel.close()
        channel.join_thread()
    assert count == 3 * N // BATCH
    assert wrong == []


def test_saving_a_label_writes_the_label_and_not_its_block(loader: DataLoader[Any]) -> None:
    for batch in loader:
        image, labels = batch
        file = io.BytesIO()
        torch.save(labels, file)
        plain = io.BytesIO()
        torch.save(labels.clone(), plain)
        assert file.tell() <= plain.tell() + 512
        assert len(pickle.dumps(labels)) <= len(pickle.dumps(labels.clone())) + 512
        assert labels.untyped_storage().nbytes() == labels.nbytes
        file.seek(0)
        equal_batches(torch.load(file), labels.clone())
        equal_batches(copy.deepcopy(batch), [image.clone(), labels.clone()])
        assert len(pickle.dumps(image)) <= image.nbytes + 4096


def test_batches_take_part_in_training(loader: DataLoader[Any]) -> None:
    """Autograd keeps parts of a batch; a block given back before ``backward`` makes wrong gradients."""
    gradients = []
    for batch in loader:
        image = batch[0].view(len(batch[0]), -1)[:, :64]
        weight = torch.ones(64, requires_grad=True)
        loss = (image * weight).sum()
        expected = image.sum(0).to(torch.float32)
        gradients.append((loss, weight, expected))
        del batch, image
    for loss, weight, expected in gradients:
        loss.backward()
        assert weight.grad is not None
        equal_batches(weight.grad, expected)


@pytest.mark.parametrize(
    ("make", "workers", "live"),
    rarely(
        itertools.product([image_and_label, mapping, named], [0, 2], [False, True]),
        (image_and_label, 2, True),
        (mapping, 2, False),
        (named, 2, True),
    ),
)
def test_changing_a_batch_in_place_never_reaches_the_cache_unlike_stocaching(
    make: Callable[[int], Any], workers: int, live: bool
) -> None:
    expected = list(DataLoader(Samples(make, N), batch_size=BATCH))
    with hotset.cache(Samples(make, N), transform=[_unchanged] if live else None) as cached:
        loader = hotset.DataLoader(cached, batch_size=BATCH, num_workers=workers)
        for _ in range(4):
            for number, batch in enumerate(loader):
                equal_batches(batch, expected[number])
                assert scribble(batch) > 0
                assert difference(batch, expected[number]) is not None
        assert cached.check() == []


def _unchanged(sample: Any) -> Any:
    return sample


def test_changing_a_sample_in_place_in_the_suffix_never_reaches_the_cache() -> None:
    expected = list(DataLoader(Samples(image_and_label, N), batch_size=BATCH, collate_fn=_scribbled))
    with hotset.cache(Samples(image_and_label, N), transform=[_scribble_all]) as cached:
        for workers in (0, 2):
            loader = hotset.DataLoader(cached, batch_size=BATCH, num_workers=workers)
            for _ in range(2):
                equal_batches(list(loader), expected)


def _scribble_all(sample: Any) -> Any:
    scribble(sample)
    return sample


def _scribbled(samples: list[Any]) -> Any:
    return default_collate([_scribble_all(sample) for sample in samples])


def test_no_leaf_of_a_batch_is_read_only_or_shares_memory_with_another() -> None:
    with hotset.cache(Samples(mapping, N)) as cached:
        loader = hotset.DataLoader(cached, batch_size=BATCH)
        for _ in range(2):
            spans = []
            kept = list(loader)
            for leaf in (leaf for batch in kept for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)):
                assert leaf.numpy().flags.writeable
                spans.append((leaf.data_ptr(), leaf.data_ptr() + leaf.nbytes))
            spans.sort()
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("make", [image_and_label, ragged])
def test_small_batches_that_are_gathered_together_are_apart(make: Callable[[int], Any]) -> None:
    """They are copied as one, but each tensor has a storage of its own and can be written to."""
    collate = hotset.collate.ragged if make is ragged else default_collate
    source = Samples(make, 50)
    with hotset.cache(source) as cached:
        loader = hotset.DataLoader(cached, batch_size=6, collate_fn=collate)
        list(loader)
        expected = list(DataLoader(source, batch_size=6, collate_fn=collate))
        for batch, true in zip(loader, expected, strict=True):
            equal_batches(batch, true)
            for leaf in leaves(batch):
                if make is image_and_label and leaf.numel():
                    assert leaf.untyped_storage().nbytes() == leaf.nbytes
            scribble(batch)
        assert cached.stats().hits == 100 - 50


def test_a_clear_between_small_batches_takes_effect() -> None:
    with hotset.cache(Samples(image_and_label, 60)) as cached:
        loader = hotset.DataLoader(cached, batch_size=4)
        list(loader)
        got = []
        for number, batch in enumerate(loader):
            got.append(batch)
            if number == 3:
                cached.clear()
                before = cached.stats().misses
        equal_batches(got, list(DataLoader(Samples(image_and_label, 60), batch_size=4)))
        assert cached.stats().misses - before == 60 - 16, "what comes after the clear is read anew"


@pytest.mark.parametrize("make", [image_and_label, poster_and_label])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_another_batch_size_that_is_set_in_mid_epoch_counts_from_the_batch_from_which_it_does_for_torch(
    make: Callable[[int], Any], drop_last: bool, workers: int
) -> None:
    def sizes(loader: DataLoader[Any]) -> Iterator[Any]:
        cutter: Any = loader.batch_sampler
        for _ in range(2):
            for number, batch in enumerate(loader):
                yield batch
                if number % 3 == 2:
                    cutter.batch_size = 11 - cutter.batch_size  # 3, 8, 3, ...

    def order() -> BatchSampler:
        return BatchSampler(SequentialSampler(range(N)), 3, drop_last)

    with hotset.cache(Samples(make, N)) as cached:
        cached.fill()
        got = list(sizes(hotset.DataLoader(cached, batch_sampler=order(), num_workers=workers)))
        plain = DataLoader(Samples(make, N), batch_sampler=order(), num_workers=workers)
        equal_batches(got, list(sizes(plain)))


def test_what_was_gathered_ahead_of_one_batch_of_another_size_is_not_used_after_it() -> None:
    def batches(make: Any, dataset: Any) -> Iterator[Any]:
        order = BatchSampler(SequentialSampler(range(60)), 2, False)
        for number, batch in enumerate(make(dataset, batch_sampler=order)):
            yield batch
            order.batch_size = 32 if number == 1 else 2

    source = TensorDataset(torch.arange(60 * 16384.0).view(60, -1))
    with hotset.cache(source, memory="10MiB") as cached:
        cached.fill()
        equal_batches(list(batches(hotset.DataLoader, cached)), list(batches(DataLoader, source)))


def test_indices_of_a_sampler_of_the_users_are_gathered_together_where_they_are_known() -> None:
    with hotset.cache(Samples(image_and_label, 30)) as cached:
        list(hotset.DataLoader(cached, batch_size=5))
        order = [[3, 1], [4], [1, 5, 9], [-1, 2]]
        got = list(hotset.DataLoader(cached, batch_sampler=order, num_workers=2))
        equal_batches(got, list(DataLoader(Samples(image_and_label, 30), batch_sampler=order)))


def test_batches_that_the_user_holds_stay_valid_after_close() -> None:
    for live in (False, True):
        cached = hotset.cache(Samples(big_image_and_label, N), transform=[_negative] if live else None)
        loader = hotset.DataLoader(cached, batch_size=BATCH, num_workers=2)
        kept = [Held(batch) for batch in (*loader, *loader)]
        sample = cached[3]
        cached.close()
        del cached, loader
        gc.collect()
        for held in kept:
            held.check()
            scribble(held.batch)
        equal_batches(sample, big_image_and_label(3))


def test_batches_outlive_the_loader_and_the_cache_that_made_them() -> None:
    loader = hotset.DataLoader(hotset.cache(Samples(big_image_and_label, N)), batch_size=BATCH, shuffle=True)
    kept = [Held(batch) for batch in (*loader, *loader)]
    del loader
    gc.collect()
    for held in kept:
        held.check()


def test_memory_does_not_grow_from_epoch_to_epoch(loader: DataLoader[Any]) -> None:
    """Blocks are recycled: the tenth epoch needs no more memory than the fourth."""

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    run_on(loader, 4)
    before = resident()
    run_on(loader, 10)
    size = next(iter(loader))[0].nbytes
    assert resident() - before < 10 * N // BATCH * size / 2


def _blocks() -> dict[int, int]:
    """Bytes that each pool of blocks for workers' batches occupies, by its inode."""
    gc.collect()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    pools = [os.stat(link) for link in links if os.path.exists(link) and "hotset-blocks" in os.readlink(link)]
    return {pool.st_ino: pool.st_blocks * 512 for pool in pools}


def _drawn(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    return sample[0] + torch.zeros((), dtype=torch.uint8).random_(0, 1), sample[1]


@pytest.mark.parametrize("to_the_end", [True, False])
def test_blocks_stay_between_epochs_and_go_with_the_loader(to_the_end: bool) -> None:
    """New workers find the last epoch's blocks; a batch that outlives the loader keeps its own alone."""
    with hotset.cache(Samples(big_image_and_label, N), transform=[_drawn]) as cached:
        before = _blocks()
        loader = hotset.DataLoader(cached, batch_size=BATCH, num_workers=2)
        list(itertools.islice(loader, None if to_the_end else 3))
        size = BATCH * big_image_and_label(0)[0].nbytes
        (inode,) = _blocks().keys() - before.keys()
        assert _blocks()[inode] >= 2 * size
        iterator = iter(loader)
        kept = Held(next(iterator))
        assert _blocks().keys() - before.keys() == {inode}
        del loader, iterator
        assert size <= _blocks()[inode] < 2 * size
        kept.check()
        del kept
        assert inode not in _blocks()


def test_no_more_than_a_bound_stays_between_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.loader.worker_process._KEPT_BETWEEN_EPOCHS", 16 << 20)
    with hotset.cache(_Large(), transform=[_drawn]) as cached:
        before = _blocks()
        loader = hotset.DataLoader(cached, batch_size=2, num_workers=2, prefetch_factor=3)
        held = list(loader)
        (inode,) = _blocks().keys() - before.keys()
        assert _blocks()[inode] > 20 << 20
        del held
        for _ in loader:
            pass
        assert 0 < _blocks()[inode] <= 16 << 20


class _Large(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((1 << 20,), index, dtype=torch.uint8), index


def test_ragged_batches_kept_stay_right() -> None:
    with hotset.cache(Samples(ragged, 40)) as cached:
        loader = hotset.DataLoader(cached, batch_size=5, collate_fn=hotset.collate.ragged)
        expected = [{**batch, **{k: list(batch[k]) for k in ("positions", "charges")}} for batch in loader]
        expected = copy.deepcopy(expected)
        kept = [batch for _ in range(3) for batch in loader]
        for _ in loader:
            pass
        for batch in kept:
            batch.update({name: list(batch[name]) for name in ("positions", "charges")})
        equal_batches(kept, expected * 3)


def test_a_dropped_loader_leaves_the_source_unread(tmp_path: Any) -> None:
    """Making and dropping loaders and iterators of a warm cache reads nothing and leaves nothing running."""
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(image_and_label, N, log), transform=[draw_all]) as cached:
        list(hotset.DataLoader(cached, batch_size=BATCH))
        log.reset()
        for workers in (0, 2):
            iterator = iter(hotset.DataLoader(cached, batch_size=BATCH, num_workers=workers))
            next(iterator)
            del iterator
        assert log.total() == 0
