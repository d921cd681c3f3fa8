"""The gather: batches equal to the collate function's to the last bit and stride, or a reason why not.

Whatever memory a batch goes to holds something else before, so that a byte that was not copied shows.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import subclasses
import torch
from helpers import difference, equal_batches, often
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import Make, attached, clear_and_meanwhile, ids, opened
from torch.utils.data import default_collate

from hotset.collate import Ragged, pad, ragged
from hotset.loader.collate import bound
from hotset.store.batch_layout import NotGathered
from hotset.store.blocks import BlockPool
from hotset.store.format import PRESENT
from hotset.store.gather import Copy, Gather
from hotset.store.leaves.tensor_leaf import TORCH_DTYPES
from hotset.store.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
N = 12
ORDERS = [range(N), [3], [7, 7, 0, 7], [*reversed(range(N))], [11, 2, 5]]


class Used:
    """Memory that held something else before."""

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        return torch.full((size,), 0xA5, dtype=torch.uint8)


class InBlock:
    """Memory in a block, as a loader has it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.array, dtype=torch.uint8, count=size, offset=offset)


def as_it_is(done: torch.Tensor, offset: int) -> torch.Tensor:
    return done


def gather_for(
    store: Store, collate: Callable[[list[Any]], Any]
) -> tuple[Gather, Callable[[list[Any]], Any]]:
    """A gather, compared with its collate function once as a loader does it, and that function."""
    collate, variable = bound(collate, store.schema)
    gather = Gather(store, collate, variable)
    gather.compare(0)
    return gather, collate


def gathered(gather: Gather, wanted: Sequence[int]) -> Any:
    copy = gather.prepare(ids(wanted), lambda size: Used())
    assert copy is not None
    copy.run()
    return gather.finish(copy, as_it_is)


def plain(batch: Any) -> Any:
    """The batch with ragged ones as lists, for comparing."""
    if isinstance(batch, Ragged):
        return ["ragged", batch.dtype, list(batch)]
    if isinstance(batch, dict):
        return type(batch)((key, plain(value)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(plain, batch))
    return [*map(plain, batch)] if isinstance(batch, list) else batch


def check(
    make: Make, collate: Callable[[list[Any]], Any] = default_collate, first: Sequence[int] = (0, 1)
) -> None:
    """Fail unless gathered batches of these samples are the collate function's, stored in either way."""
    for keep_order in (True, False):
        with opened(make, N, first=first, keep_order=keep_order) as store:
            store.fill(np.arange(N), make)
            gather, collate_ = gather_for(store, collate)
            for order in ORDERS:
                expected = collate_([make(i) for i in order])
                equal_batches(plain(gathered(gather, order)), plain(expected))


def not_gathered(make: Make, collate: Callable[[list[Any]], Any] = default_collate) -> str:
    """Why batches of these samples are not gathered; fails if they are."""
    with opened(make, N) as store:
        store.fill(np.arange(N), make)
        with pytest.raises(NotGathered) as caught:
            gather_for(store, collate)
        return str(caught.value)


# Equal to the collate function


def two_tensors(i: int) -> Any:
    return samples.bfloat_and_half(i)


def numbers(i: int) -> Any:
    return [i, i / 3, i % 2 == 0, np.float32(i / 7), np.int64(-i), np.float64(i), np.bool_(i % 3 == 0)]


def containers(i: int) -> Any:
    image = torch.full((2, 3), i)
    return OrderedDict(b=samples.Pair(image, (i, [image + 1])), a={"x": image * 2, "empty": [[], (), {}]})


def arrays(i: int) -> Any:
    return [np.full((3, 2), i, dtype) for dtype in ("u1", "<i2", "<i8", "<f2", "<f4", "<f8", "<c8", "?")]


def empties(i: int) -> Any:
    return [
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.int16),
        np.empty((2, 0), np.float32),
        torch.tensor(i),
    ]


def strided(i: int) -> Any:
    return [samples.strided(i)[place] for place in (0, 1, 2, 3, 4, 6)]


def permuted(i: int) -> Any:
    found = samples.permuted(i)
    return [*found[:2], *found[4:]]  # two are stacked in the order that they have in memory


def text(i: int) -> Any:
    return {**samples.text(i), "name": f"näme {i} \ud800" * (i % 3), "raw": bytes([i]) * i}


def tv_tensors(i: int) -> Any:
    found = subclasses.boxes_and_masks(i)
    return {key: found[key] for key in ("image", "mask", "video", "label")}


SCHEMAS = [
    *(
        samples.image_and_label,
        samples.kilobyte,
        samples.number,
        samples.small_float,
        samples.ordered_mapping,
    ),
    *(samples.named, samples.constant_row, two_tensors, numbers, containers, arrays, empties, strided, text),
    samples.token_ids,
    *(permuted, tv_tensors, samples.same_content, samples.mapping),
]


@pytest.mark.parametrize("make", SCHEMAS, ids=lambda make: make.__name__)
def test_a_gathered_batch_is_default_collates(make: Make) -> None:
    check(make)


def test_every_dtype_is_gathered_where_torch_stacks_it() -> None:
    gathered_ones = []
    for name, dtype in TORCH_DTYPES.items():

        def make(i: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            raw = ((torch.arange(48) * 7 + i) % 113).to(torch.uint8)
            return raw % 2 == 0 if dtype is torch.bool else raw.view(dtype).reshape(3, -1)

        with contextlib.suppress(RuntimeError, NotImplementedError):
            default_collate([make(0), make(1)])
            gathered_ones.append(name)
        if name in gathered_ones:
            check(make)
    assert {"bool", "uint8", "int64", "uint16", "float16", "bfloat16", "complex64"} <= set(gathered_ones)


def molecule(i: int) -> Any:
    return {
        "positions": torch.full((i * 5 % 13, 3), i / 2),
        "label": i,
        "name": "m" * i,
        "cell": torch.eye(3) * i,
    }


def jpeg(i: int) -> Any:
    return np.full(100 + i * 37 % 900, i, np.uint8), i


def pictures(i: int) -> Any:
    pixels = torch.full((3, 1 + i % 4, 1 + i % 3), i, dtype=torch.uint8)
    return [pixels, np.full((i % 5,), i, np.float64)]


@pytest.mark.parametrize("collate", [ragged, pad(-1), pad()], ids=["ragged", "pad(-1)", "pad()"])
@pytest.mark.parametrize("make", [molecule, jpeg, pictures, samples.ragged, samples.ragged_pair])
def test_a_gathered_batch_of_variable_shapes_is_the_collate_functions(make: Make, collate: Any) -> None:
    check(make, collate, first=range(4))


@pytest.mark.parametrize("collate", [ragged, pad(3)], ids=["ragged", "pad"])
def test_a_batch_of_nothing_but_empty_tails_is_gathered(collate: Any) -> None:
    def make(i: int) -> Any:
        return torch.zeros(0 if i < 9 else i, 2), ""

    with opened(make, N, first=(0, 10)) as store:
        store.fill(np.arange(N), make)
        gather, collate_ = gather_for(store, collate)
        for order in ([1, 2, 3], [0], [1, 10], range(N)):
            equal_batches(plain(gathered(gather, order)), plain(collate_([make(i) for i in order])))


def test_tails_of_many_lines_are_gathered() -> None:
    def make(i: int) -> Any:
        return torch.arange(i * 100 % 1700), "x" * (i * 331 % 2000), torch.full((3, i % 4), i)

    check(make, ragged, first=range(4))


def test_samples_stored_as_they_lie_are_gathered_as_they_count() -> None:
    """A picture that is read as HWC and permuted to CHW keeps that alone; a batch lies as torch stacks it."""

    def make(i: int) -> Any:
        image = torch.arange(24).reshape(3, 4, 2) + i
        return image.permute(2, 0, 1), np.asfortranarray(np.full((2, 5), i))

    with opened(make, N) as store:
        store.fill(np.arange(N), make)
        alone = store.read(ids(3))
        assert alone is not None
        assert difference(alone[0], make(3)) is None
        assert not alone[0][0].is_contiguous()
        gather, _ = gather_for(store, default_collate)
        assert next(iter(gathered(gather, [3, 4]))).is_contiguous()
    check(make)


def test_batches_that_torch_stacks_in_channels_last_are_the_same_or_refused() -> None:
    """``torch.stack`` keeps that order for tensors of four dimensions, and no other."""

    def make(i: int) -> torch.Tensor:
        return torch.full((2, 3, 4, 5), i).to(memory_format=torch.channels_last)

    with contextlib.suppress(NotGathered):
        check(make)


def test_what_another_process_has_stored_is_gathered() -> None:
    with opened(samples.mapping, N) as store, attached(store) as other:
        store.fill(np.arange(N), samples.mapping)
        gather, _ = gather_for(other, default_collate)
        equal_batches(gathered(gather, [5, 1]), default_collate([samples.mapping(5), samples.mapping(1)]))


@settings(max_examples=often(30, 120), deadline=None, database=None)
@given(
    st.lists(st.sampled_from(["uint8", "int64", "float16", "complex64", "bool"]), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=5, max_size=5),
    st.lists(st.integers(0, N - 1), min_size=1, max_size=20),
)
def test_random_columns_are_gathered(dtypes: list[str], shapes: list[list[int]], order: list[int]) -> None:
    def make(i: int) -> Any:
        zipped = zip(dtypes, shapes, strict=False)
        columns = [torch.full(shape, i % 2).to(getattr(torch, name)) for name, shape in zipped]
        return {"columns": [i, *columns], "text": f"{i}"}

    with opened(make, N) as store:
        store.fill(np.arange(N), make)
        gather, _ = gather_for(store, default_collate)
        equal_batches(gathered(gather, order), default_collate([make(i) for i in order]))


# Where a batch lies


def test_a_batch_lies_in_a_block_that_is_free_again_when_its_last_tensor_dies() -> None:
    with opened(samples.mapping, N) as store:
        store.fill(np.arange(N), samples.mapping)
        gather, _ = gather_for(store, default_collate)
        pool = BlockPool(1 << 16)
        number = pool.take()
        copy = gather.prepare(ids(range(4)), lambda size: InBlock(pool.new_array(number)))
        assert copy is not None
        copy.run()
        batch: Any = gather.finish(copy, as_it_is)
        del copy
        equal_batches(batch, default_collate([samples.mapping(i) for i in range(4)]))
        image = batch["image"]
        del batch
        assert pool.take() != number
        del image
        assert pool.take() == number


def test_memory_is_asked_for_once_in_full_and_its_parts_do_not_overlap() -> None:
    parts: list[tuple[int, int]] = []
    asked: list[int] = []

    class Recorded(Used):
        def tensor(self, offset: int, size: int) -> torch.Tensor:
            parts.append((offset, offset + size))
            return super().tensor(offset, size)

    def memory(size: int) -> Recorded:
        asked.append(size)
        return Recorded()

    with opened(molecule, N, first=range(4)) as store:
        store.fill(np.arange(N), molecule)
        gather, _ = gather_for(store, ragged)
        assert gather.prepare(ids(range(7)), memory) is not None
    assert len(asked) == 1
    spans = sorted(part for part in parts if part[0] != part[1])
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
    assert spans[-1][1] <= asked[0]
    assert all(begin % 16 == 0 for begin, _ in spans)


def test_each_tensor_of_a_batch_is_writable_and_the_stores_own_bytes_stay() -> None:
    with opened(samples.image_and_label, N) as store:
        store.fill(np.arange(N), samples.image_and_label)
        gather, _ = gather_for(store, default_collate)
        for _ in range(2):
            image, label = gathered(gather, [1, 2])
            equal_batches([image, label], default_collate([samples.image_and_label(i) for i in (1, 2)]))
            image.zero_()
            label.zero_()
        assert store.check() == []


# Nothing, where there is nothing to gather


def _prepared(gather: Gather, wanted: Sequence[int]) -> Copy | None:
    return gather.prepare(ids(wanted), lambda size: Used())


def test_a_batch_with_an_absent_sample_is_none() -> None:
    with opened(samples.number, N) as store:
        store.fill(ids(0, 1, 2), samples.number)
        gather, _ = gather_for(store, default_collate)
        assert _prepared(gather, [0, 1, 3]) is None
        assert _prepared(gather, []) is None
        assert gathered(gather, [2, 0]).tolist() == [6, 0]


def test_without_memory_a_batch_is_none() -> None:
    with opened(samples.number, N) as store:
        store.fill(np.arange(N), samples.number)
        gather, _ = gather_for(store, default_collate)
        assert gather.prepare(ids(1, 2), lambda size: None) is None


def _another(i: int) -> Any:
    """Other shapes and other text than :func:`molecule`'s, larger ones."""
    positions = torch.full((40 + i, 3), -1.0)
    return {"positions": positions, "label": -i, "name": "é" * 700, "cell": torch.zeros(3, 3)}


@pytest.mark.parametrize("collate", [ragged, pad()], ids=["ragged", "pad"])
@pytest.mark.parametrize("when", ["before it runs", "after it ran"])
def test_a_batch_that_a_clear_overtakes_is_none(when: str, collate: Any) -> None:
    """Also where the rows hold other samples by then, of larger shapes than the batch has memory for."""
    with opened(molecule, N, first=range(4)) as store, attached(store) as other:
        store.fill(np.arange(N), molecule)
        gather, _ = gather_for(store, collate)
        copy = _prepared(gather, range(N))
        assert copy is not None
        if when == "after it ran":
            copy.run()
        assert other.clear()
        other.fill(np.arange(N)[::-1], _another)
        if when == "before it runs":
            copy.run()
        assert gather.finish(copy, as_it_is) is None
        equal_batches(plain(gathered(gather, [1, 2])), plain(collate([_another(1), _another(2)])))


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A file that lies in memory, of whose pages the kernel tells how many there are."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder, "store")


def _blocks(file: Path) -> int:
    return file.stat().st_blocks


def test_a_copy_of_what_a_clear_gave_back_touches_none_of_it(in_memory: Path) -> None:
    """To read a page that was given back takes it anew, and where there is none left the kernel kills."""
    with opened(samples.kilobyte, 64, path=in_memory) as store, attached(in_memory) as other:
        store.fill(np.arange(64), samples.kilobyte)
        gather = Gather(store, default_collate)
        copy = _prepared(gather, range(64))
        assert copy is not None
        assert other.clear()
        before = _blocks(in_memory)
        copy.run()
        assert _blocks(in_memory) == before
        assert gather.finish(copy, as_it_is) is None


@pytest.mark.parametrize("reads", [True, False])
def test_a_clear_gives_no_page_back_under_a_reader(
    reads: bool, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotset.store.store._READERS_SECONDS", 0.1)
    with opened(samples.kilobyte, 64, path=in_memory) as store, attached(in_memory) as other:
        store.fill(np.arange(64), samples.kilobyte)
        before = _blocks(in_memory)
        with other.participant.reading if reads else contextlib.nullcontext():
            assert store.clear()
            assert (_blocks(in_memory) == before) is reads


def test_a_batch_that_is_prepared_in_the_midst_of_a_clear_is_none() -> None:
    """The clear generation is the new one already, the words are the old ones still."""
    with opened(samples.constant_row, N) as store:
        store.fill(ids(1), samples.constant_row)
        gather = Gather(store, default_collate)
        copies: list[Copy | None] = []
        clear_and_meanwhile(store, lambda: copies.append(_prepared(gather, [1])))
        store.fill(ids(2), samples.constant_row)
        if copies[0] is not None:
            copies[0].run()
            assert gather.finish(copies[0], as_it_is) is None


# Reasons why not


def picture(i: int) -> Any:
    return subclasses.fixed_image(i)


def none_inside(i: int) -> Any:
    return samples.none_inside(i)


REASONS: list[tuple[Make, Any, str]] = [
    (samples.ragged_pair, default_collate, "its shapes vary"),
    (none_inside, default_collate, "it holds NoneLeaf"),
    (picture, default_collate, "it holds PIL.Image:Image"),
    (lambda i: samples.Record(torch.zeros(2), i), default_collate, "it holds an object of Record"),
    (lambda i: np.zeros(3, ">f4"), default_collate, "it holds numpy's >f4"),
    (lambda i: np.full(2, "abc"), default_collate, "it holds numpy's <U3"),
    (lambda i: np.zeros(2, "M8[s]"), default_collate, "it holds numpy's <M8[s]"),
    (lambda i: samples.Colour.RED, default_collate, "it holds EnumLeaf"),
    (lambda i: complex(i), default_collate, "collating raises TypeError"),
    pytest.param(subclasses.meta_tensors, default_collate, "it holds monai", marks=pytest.mark.chaos),
]


@pytest.mark.parametrize(("make", "collate", "reason"), REASONS, ids=[reason for _, _, reason in REASONS])
def test_what_is_not_gathered_says_why(make: Make, collate: Any, reason: str) -> None:
    assert reason in not_gathered(make, collate)


def test_a_collate_function_that_raises_is_left_to_raise_it() -> None:
    def broken(batch: list[Any]) -> Any:
        raise KeyError("my own")

    assert "KeyError" in not_gathered(samples.number, broken)


@pytest.mark.parametrize(
    "collate",
    [
        lambda batch: default_collate(batch)[0],
        lambda batch: [image.float() for image in default_collate(batch)],
        lambda batch: tuple(default_collate(batch)),
        lambda batch: [default_collate(batch)[0] + 1, default_collate(batch)[1]],
        lambda batch: [default_collate(batch)[0].mT.contiguous().mT, default_collate(batch)[1]],
        lambda batch: batch,
    ],
    ids=["another tree", "another dtype", "another type", "other values", "other strides", "no batch"],
)  # fmt: skip
def test_a_collate_function_that_makes_other_batches_is_found_out(collate: Any) -> None:
    assert "other batches" in not_gathered(samples.image_and_label, collate)


def test_a_type_that_the_user_has_taught_default_collate_is_found_out() -> None:
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[int] = lambda batch, *, collate_fn_map=None: list(batch)
    try:
        assert "other batches" in not_gathered(samples.image_and_label)
    finally:
        from torch.utils.data._utils.collate import collate_int_fn

        default_collate_fn_map[int] = collate_int_fn


def test_comparing_waits_for_a_sample_that_is_present() -> None:
    with opened(samples.number, N) as store:
        gather = Gather(store, lambda batch: "something else")
        gather.compare(3)
        store.fill(np.arange(N), samples.number)
        with pytest.raises(NotGathered, match="other batches"):
            gather.compare(3)


def test_damaged_records_of_a_file_are_not_gathered(tmp_path: Any) -> None:
    with opened(samples.kilobyte, N, path=tmp_path / "segment") as store:
        store.fill(np.arange(N), samples.kilobyte)
        row = int(store.segment.index[5]) - PRESENT
        store.segment.buffer[store.segment.geometry.rows_at + row * store.schema.stride + 100] ^= 1
    with attached(tmp_path / "segment") as store, contextlib.ExitStack() as stack:
        gather = Gather(store, default_collate)
        assert _prepared(gather, [4, 6]) is not None
        stack.enter_context(pytest.warns(match="sample 5"))
        assert _prepared(gather, [4, 5]) is None
