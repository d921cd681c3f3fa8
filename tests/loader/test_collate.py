"""``hotset.collate.ragged`` and ``hotset.collate.pad``: batches of samples whose shapes vary.

A leaf of varying shape becomes a sequence of tensors (ragged) or one padded tensor (pad); every other leaf is
as in ``default_collate``. Whether a sample came from the source or the cache must not show.
"""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import difference, equal_batches, failure
from live import draw_all
from samples import image_and_label, jpeg_like, mapping, ragged, ragged_pair, ragged_two_ways
from sources import Counting, ListedBatches, ReadLog, Samples
from torch.utils.data import DataLoader, default_collate

import hotset
from hotset.collate import Ragged

N = 26
BATCH = 5


def listed(batch: Any) -> Any:
    """The batch with a plain list in place of each sequence of tensors that behaves like one."""
    if isinstance(batch, dict):
        return {name: listed(part) for name, part in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, (str, list, tuple)):
        assert [batch[i - len(batch)] is not None for i in range(len(batch))] == [True] * len(batch)
        return list(batch)
    return type(batch)(listed(part) for part in batch) if type(batch) in (list, tuple) else batch


def batches_of(count: int) -> list[list[int]]:
    return [list(range(first, min(first + BATCH, count))) for first in range(0, count, BATCH)]


def padded(tensors: list[torch.Tensor], value: float) -> torch.Tensor:
    """The expected result, made one element at a time."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    whole = torch.full((len(tensors), *shape), value, dtype=tensors[0].dtype)
    for row, tensor in zip(whole, tensors, strict=True):
        row[tuple(slice(size) for size in tensor.shape)] = tensor
    return whole


def molecules(ids: list[int], join: Callable[[list[torch.Tensor]], Any]) -> Any:
    samples = [ragged(i) for i in ids]
    fixed = default_collate([{name: s[name] for name in ("energy", "cell")} for s in samples])
    varying = {name: join([s[name] for s in samples]) for name in ("positions", "charges")}
    return {**varying, **fixed}


@pytest.mark.parametrize("workers", [0, 2])
def test_ragged_leaves_become_lists_of_tensors(workers: int) -> None:
    with hotset.cache(Samples(ragged, N)) as cached:
        loader = hotset.DataLoader(cached, BATCH, num_workers=workers, collate_fn=hotset.collate.ragged)
        for state in ("cold", "warm", "warm again"):
            equal_batches(listed(list(loader)), [molecules(ids, list) for ids in batches_of(N)], state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("value", [0, -1, 7])
def test_padding_fills_up_to_the_longest_of_the_batch(value: int, workers: int) -> None:
    with hotset.cache(Samples(ragged, N)) as cached:
        loader = hotset.DataLoader(cached, BATCH, num_workers=workers, collate_fn=hotset.collate.pad(value))
        expected = [molecules(ids, lambda tensors: padded(tensors, value)) for ids in batches_of(N)]
        for state in ("cold", "warm", "warm again"):
            equal_batches(list(loader), expected, state)


@pytest.mark.parametrize("length", [3, 5000])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2, torch.bool])
def test_padding_fills_dtypes_of_which_torch_selects_no_elements(dtype: torch.dtype, length: int) -> None:
    """Token ids, for example. Whether the tensors are short or long, too."""
    one, other = torch.zeros(length).to(dtype), torch.zeros(length + 2).to(dtype)
    batch = hotset.collate.pad(1)([one, other])
    assert (batch.dtype, batch.shape) == (dtype, (2, length + 2))
    assert batch.float().tolist() == [[0.0] * length + [1.0] * 2, [0.0] * (length + 2)]


@pytest.mark.parametrize("length", [3, 5000])
def test_a_value_that_the_dtype_cannot_hold_is_an_error(length: int) -> None:
    samples = [torch.zeros(length, dtype=torch.float16), torch.zeros(length + 1, dtype=torch.float16)]
    assert "overflow" in failure(lambda: hotset.collate.pad(1e10)(samples)).text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_that_is_set_between_two_passes_counts(workers: int) -> None:
    rows = [torch.ones(1 + index % 3) for index in range(9)]
    collates = [hotset.collate.pad(0), hotset.collate.pad(-1), hotset.collate.ragged, hotset.collate.pad(0)]
    with hotset.cache(rows, memory="1MiB") as cached:
        cached.fill()
        loader = hotset.DataLoader(cached, batch_size=3, num_workers=workers)
        for collate in collates:
            loader.collate_fn = collate
            expected = DataLoader(rows, batch_size=3, collate_fn=collate)
            equal_batches(list(map(listed, loader)), list(map(listed, expected)))


def test_padding_in_two_dimensions_at_once() -> None:
    with hotset.cache(Samples(ragged_two_ways, N)) as cached:
        loader = hotset.DataLoader(cached, BATCH, collate_fn=hotset.collate.pad(-3))
        expected = [padded([ragged_two_ways(i) for i in ids], -3) for ids in batches_of(N)]
        for state in ("cold", "warm"):
            equal_batches(list(loader), expected, state)


def test_tuples_are_collated_as_by_default_collate() -> None:
    with hotset.cache(Samples(ragged_pair, N)) as cached:
        for _ in range(2):
            lists = listed(list(hotset.DataLoader(cached, BATCH, collate_fn=hotset.collate.ragged)))
            pads = list(hotset.DataLoader(cached, BATCH, collate_fn=hotset.collate.pad(9)))
            for ids, row, filled in zip(batches_of(N), lists, pads, strict=True):
                tensors = [ragged_pair(i)[0] for i in ids]
                equal_batches(row, [tensors, torch.tensor(ids)])
                equal_batches(filled, [padded(tensors, 9), torch.tensor(ids)])


class Fields(dict[str, Any]):
    pass


class Parts(list[Any]):
    pass


@pytest.mark.parametrize("kind", [OrderedDict, Fields, UserDict, Parts])
def test_containers_of_other_classes_are_collated_as_by_default_collate(kind: Any) -> None:
    def of(values: torch.Tensor, index: int) -> Any:
        return kind([values, index]) if kind is Parts else kind(values=values, index=index)

    def sample(index: int) -> Any:
        return of(torch.full((index % 3 + 1,), float(index)), index)

    values = 0 if kind is Parts else "values"
    samples = Samples(sample, 5 * BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hotset.HotsetWarning)  # not all of these classes can be cached
        with hotset.cache(samples, memory="1MiB") as cached:
            for collate in (hotset.collate.pad(9), hotset.collate.ragged):
                expected = list(DataLoader(samples, BATCH, collate_fn=collate))
                for ids, batch in zip(batches_of(5 * BATCH), expected, strict=True):
                    stacked = default_collate([of(torch.ones(1), index) for index in ids])
                    assert type(batch) is type(stacked) is kind
                    tensors = [sample(index)[values] for index in ids]
                    joined = padded(tensors, 9) if collate is not hotset.collate.ragged else tensors
                    equal_batches(listed(batch[values]), joined)
                for _ in range(2):
                    found = list(hotset.DataLoader(cached, BATCH, collate_fn=collate))
                    assert [type(batch) for batch in found] == [kind] * len(expected)
                    for batch, wanted in zip(found, expected, strict=True):
                        equal_batches(listed(batch[values]), listed(wanted[values]))


def test_arrays_of_varying_length_come_with_the_right_values() -> None:
    with hotset.cache(Samples(jpeg_like, N)) as cached:
        for _ in range(2):
            for ids, (data, labels) in zip(
                batches_of(N), hotset.DataLoader(cached, BATCH, collate_fn=hotset.collate.ragged), strict=True
            ):
                assert labels.tolist() == ids
                assert [np.asarray(d).tolist() for d in data] == [jpeg_like(i)[0].tolist() for i in ids]


@pytest.mark.parametrize("make", [mapping, image_and_label])
def test_samples_of_one_shape_are_as_in_default_collate(make: Callable[[int], Any]) -> None:
    expected = list(DataLoader(Samples(make, N), BATCH))
    with hotset.cache(Samples(make, N)) as cached:
        for collate in (hotset.collate.ragged, hotset.collate.pad(1)):
            for _ in range(2):
                equal_batches(list(hotset.DataLoader(cached, BATCH, collate_fn=collate)), expected)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("make", [ragged, ragged_pair, ragged_two_ways, jpeg_like])
def test_hits_and_misses_give_the_same_also_where_shapes_happen_to_agree(
    make: Callable[[int], Any], live: bool
) -> None:
    """Some of these batches have equal shapes by chance, which must not make them another kind of batch."""
    batches = ListedBatches([[0], [0, 13], [0, 132], [3, 3, 3], [1, 2], [25, 4, 8]])
    for collate in (hotset.collate.ragged, hotset.collate.pad(5)):
        stories = []
        for warm in (False, True):
            with hotset.cache(Samples(make, 133), transform=[_unchanged] if live else None) as cached:
                if warm:
                    for i in range(133):
                        cached[i]
                loader = hotset.DataLoader(cached, batch_sampler=batches, collate_fn=collate)
                stories += [list(loader), list(loader)]
        for other in stories[1:]:
            equal_batches(other, stories[0])


def _unchanged(sample: Any) -> Any:
    return sample


def every_third_alike(index: int) -> torch.Tensor:
    return torch.full((1 + index % 3, 2), index)


def test_a_leaf_of_which_the_first_samples_read_were_alike_is_ragged_where_it_varies() -> None:
    """22 samples, of which eight are read at first, each third one."""
    with hotset.cache(Samples(every_third_alike, 22), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=2, collate_fn=hotset.collate.ragged)
        for _ in range(2):
            assert [part.shape[0] for batch in loader for part in batch] == [1 + i % 3 for i in range(22)]


def test_ragged_samples_are_cached_and_read_once(tmp_path: Any) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(ragged, N, log)) as cached:
        loader = hotset.DataLoader(cached, BATCH, collate_fn=hotset.collate.ragged, num_workers=2)
        list(loader)
        log.reset()
        list(loader)
        assert log.total() == 0
        assert cached.stats().cached == N
        assert cached.check() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_live_transforms_run_before_the_ragged_collate(workers: int) -> None:
    with hotset.cache(Samples(ragged, 25), transform=[draw_all]) as cached:
        loader = hotset.DataLoader(cached, BATCH, num_workers=workers, collate_fn=hotset.collate.ragged)
        for _ in range(2):
            for ids, batch in zip(batches_of(25), loader, strict=True):
                equal_batches(listed(batch["sample"]["sample"]["sample"]), molecules(ids, list))


def test_pad_and_ragged_work_with_torchs_loader_and_an_uncached_dataset() -> None:
    for collate, join in (
        (hotset.collate.ragged, list),
        (hotset.collate.pad(4), lambda tensors: padded(tensors, 4)),
    ):
        loader = DataLoader(Samples(ragged, 25), BATCH, collate_fn=collate)
        equal_batches(listed(list(loader)), [molecules(ids, join) for ids in batches_of(25)])


def test_pad_and_ragged_can_be_pickled_for_spawned_workers() -> None:
    samples = [ragged(i) for i in range(3)]
    for collate in (hotset.collate.ragged, hotset.collate.pad(6)):
        equal_batches(pickle.loads(pickle.dumps(collate))(samples), collate(samples))


def test_padding_tensors_of_different_dimensions_is_refused_with_a_sentence() -> None:
    found = failure(lambda: hotset.collate.pad(0)([torch.ones(2), torch.ones(2, 2)]))
    assert issubclass(found.kind, (ValueError, RuntimeError, TypeError))
    assert "dimension" in found.text


def test_a_ragged_batch_is_a_sequence_that_moves_as_a_whole() -> None:
    tensors = [torch.ones(2, 3), torch.zeros(0, 3), torch.full((1, 3), 7.0)]
    batch = Ragged.of(tensors)
    assert difference(batch[1:], tensors[1:]) is None
    assert difference(list(batch.to("cpu", non_blocking=True)), tensors) is None
    assert "3 tensors of torch.float32" in repr(batch)
    with pytest.raises(TypeError, match="one dtype and one number of dimensions"):
        Ragged.of([torch.ones(2), torch.ones(2, 1)])


@pytest.mark.parametrize("to", [torch.float64, torch.ones(1)])
def test_a_ragged_batch_does_not_take_its_bytes_for_numbers(to: Any) -> None:
    with pytest.raises(hotset.ArgumentError, match="takes a device and no dtype"):
        Ragged.of([torch.ones(2)]).to(to)
