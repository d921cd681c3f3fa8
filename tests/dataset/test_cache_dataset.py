"""A hit is indistinguishable from a miss: every kind of leaf in every kind of container.

Two independent comparisons have to agree: the library's own ``hotset.determinism.equality.differs``, and
the tests' ``difference``, which looks at strides and byte order too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import equal_batches, failure, is_a_sentence, leaves, recorded, scribble
from live import draw_all
from samples import (
    arrays,
    bfloat_and_half,
    dtypes_that_are_no_numbers,
    every_dtype,
    huge_int,
    huge_int_sometimes,
    image_and_label,
    jpeg_like,
    mapping,
    named,
    nested,
    none_inside,
    number,
    numpy_scalars,
    object_array,
    odd_arrays,
    odd_numpy_scalars,
    opaque,
    ordered_mapping,
    permuted,
    ragged,
    ragged_two_ways,
    same_content,
    scalars,
    small_float,
    strange,
    strided,
    text,
    zero_d_and_empty,
)
from sources import Batched, Counting, ReadLog, Samples, SeedsItself
from torch.utils.data import ConcatDataset, Dataset, Subset

import hotset
from hotset.determinism.equality import differs

N = 24


def indistinguishable(got: Any, expected: Any, where: str = "sample") -> None:
    equal_batches(got, expected, where)
    assert differs(got, expected) is None, f"{where}: {differs(got, expected)}"


def served_right(source: Dataset[Any], make: Callable[[int], Any], n: int = N) -> int:
    """Read each sample as a miss and as a hit, in different orders; returns how many were cached."""
    with hotset.cache(source, memory="64MiB") as cached:
        for i in range(n - 1, -1, -1):
            indistinguishable(cached[i], make(i), f"miss {i}")
        for _ in range(2):
            for i in range(n):
                indistinguishable(cached[i], make(i), f"hit {i}")
        for i, sample in enumerate(cached.__getitems__(list(range(n)))):
            indistinguishable(sample, make(i), f"hit {i} of many")
        assert cached.check() == []
        return int(cached.stats().cached)


def hits_equal_misses(make: Callable[[int], Any], n: int = N) -> int:
    return served_right(Samples(make, n), make, n)


def with_at_most_one_warning(run: Callable[[], int]) -> int:
    """Run where samples may stay uncached, with one warning at most."""
    with recorded() as caught:
        cached = run()
    assert [w.category for w in caught] in ([], [hotset.HotsetWarning])
    return cached


CACHEABLE = [
    image_and_label, mapping, ordered_mapping, named, nested, none_inside, number, small_float, text, ragged,
    ragged_two_ways, jpeg_like, bfloat_and_half, zero_d_and_empty, permuted, same_content, every_dtype,
    scalars, numpy_scalars, arrays,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("make", CACHEABLE)
def test_a_hit_is_indistinguishable_from_a_miss(make: Callable[[int], Any]) -> None:
    assert hits_equal_misses(make) == N


@pytest.mark.parametrize("make", [
    odd_numpy_scalars, odd_arrays, object_array, strange, opaque, huge_int, dtypes_that_are_no_numbers,
])  # fmt: skip
def test_samples_that_no_schema_holds_are_served_unchanged(make: Callable[[int], Any]) -> None:
    """The codec decides whether these are cached; they must be served in any case."""
    with_at_most_one_warning(lambda: hits_equal_misses(make))


def test_tensor_subclasses_keep_their_type_and_attributes() -> None:
    from subclasses import boxes_and_masks, boxes_that_vary, meta_tensors

    for make in (boxes_and_masks, meta_tensors):
        make(0)  # libraries draw as they are imported
        assert hits_equal_misses(make, 6) == 6
    with_at_most_one_warning(lambda: hits_equal_misses(boxes_that_vary, 9))


class Boxes(torch.Tensor):
    """A tensor of a user's class, which torch's functions keep, as those of fastai's do."""

    canvas: tuple[int, int]

    def __new__(cls, rows: Any, canvas: tuple[int, int]) -> Boxes:
        made = torch.as_tensor(rows).as_subclass(cls)
        made.canvas = canvas
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol)


class Restoring(Boxes):
    """One of which pickle keeps something else."""

    def __setstate__(self, state: Any) -> None:
        self.canvas = (0, 0)


class Slotted(Boxes):
    __slots__ = ("seen",)


def _boxes(index: int) -> dict[str, Any]:
    return {"boxes": Boxes([[0.0, 1.0, index]] * (index % 3 + 1), (4, index)), "label": Boxes(index, (1, 1))}


def _mask(index: int, **known: Any) -> Any:
    from PIL import Image
    from subclasses import Mask

    mask = Image.new("L", (4 + index % 2, 3), index)
    mask.__class__ = Mask
    vars(mask).update(known)
    return mask


def _plain_picture(index: int) -> Any:
    from PIL import Image

    picture = Image.new("L", (4, 3), index)
    vars(picture).update(category="road", map={"road": index}, _codes=(1, index))
    return picture


class CopiesElements(Boxes):
    """One whose own copy lacks the attributes."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self.clone()


def test_tensors_and_pictures_of_a_users_classes_are_cached() -> None:
    makes: list[Callable[[int], Any]] = [
        _boxes,
        _mask,
        lambda index: _mask(index, _codes=("road", index), scale=0.5, category="road", map={"a": index}),
        _plain_picture,
        lambda index: CopiesElements([index], (4, index)),
    ]
    for make in makes:
        assert hits_equal_misses(make, 6) == 6
    with hotset.cache(Samples(_plain_picture, 6), memory="1MiB") as cached:
        for _ in range(2):
            found = vars(cached[3])
            assert (found["category"], found["map"], found["_codes"]) == ("road", {"road": 3}, (1, 3))
    with hotset.cache(Samples(makes[-1], 6), memory="1MiB") as cached:
        assert [cached[3].canvas for _ in range(2)] == [(4, 3)] * 2


class Word(str):
    pass


@pytest.mark.parametrize("make", [
    lambda index: Restoring([index], (1, 2)),
    lambda index: Slotted([index], (1, 2)),
    lambda index: torch.nn.Parameter(torch.tensor([float(index)]), requires_grad=False),
    lambda index: _mask(index, codes=object),
    lambda index: _mask(index, words=[Word("road")]),
    lambda index: _mask(index, scale=np.float64(0.5)),
])  # fmt: skip
def test_those_that_are_more_than_their_elements_and_attributes_are_served_unchanged(
    make: Callable[[int], Any],
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hotset.cache(Samples(make, 6), memory="1MiB") as cached:
            for _ in range(2):
                assert all(differs(cached[index], make(index)) is None for index in range(6))
            assert not cached.stats().hits
    assert any("nothing of Samples can be cached" in str(each.message) for each in caught)


class Scan:
    def __init__(self, index: int) -> None:
        self.voxels, self.spacing = torch.full((2,), float(index)), (1, 1, 3)


def _scan_without_spacing(voxels: Any) -> Scan:
    made = Scan(0)
    made.voxels = voxels
    made.spacing = (1, 1, 1)
    return made


def test_a_codec_that_forgets_a_part_caches_nothing_and_is_told_so() -> None:
    hotset.register_codec(Scan, lambda scan: scan.voxels, _scan_without_spacing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hotset.cache(Samples(Scan, 6), memory="1MiB") as cached:
            assert [cached[index].spacing for _ in range(2) for index in range(6)] == [(1, 1, 3)] * 12
    assert any(
        "nothing of Samples can be cached" in str(each.message)
        and "would not come back from the cache as it was (at .spacing[2]: 3 and 1)" in str(each.message)
        for each in caught
    )


class Reading:
    """It is taken apart by a function that knows all of them but one."""

    def __init__(self, number: int) -> None:
        self.number = number


def _number_of(reading: Reading) -> int:
    if reading.number == 700:
        raise KeyError("no such reading")
    return reading.number


def test_a_codec_that_raises_for_a_sample_leaves_that_one_to_the_source() -> None:
    hotset.register_codec(Reading, _number_of, Reading)
    with hotset.cache(Samples(Reading, 900), memory="1MiB") as cached:
        assert [each.number for each in cached.__getitems__([*range(650, 750)])] == [*range(650, 750)]
        assert [cached[index].number for index in (699, 700, 701)] == [699, 700, 701]
        assert cached.stats().cached == 99


def _reading_of(number: int) -> Reading:
    if number == 700:
        raise KeyError("no such reading")
    return Reading(number)


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_a_codec_that_raises_for_a_hit_leaves_that_one_to_the_source(workers: int | None) -> None:
    hotset.register_codec(Reading, lambda reading: reading.number, _reading_of)
    with recorded() as caught, hotset.cache(Samples(Reading, 900), memory="1MiB") as cached:
        wanted = range(690, 710)
        loader = hotset.DataLoader(
            cached, batch_size=10, sampler=wanted, num_workers=workers or 0, collate_fn=list
        )
        for _ in range(2):
            batches = loader if workers is not None else [cached.__getitems__([*wanted])]
            assert [each.number for batch in batches for each in batch] == [*wanted]
    if not workers:
        assert any("cannot be put together again (KeyError: 'no such" in str(each.message) for each in caught)


def _with_spacing(index: int, memory: torch.Tensor) -> torch.Tensor:
    memory.spacing = (1, 1, index)  # type: ignore[attr-defined]
    return memory


def test_attributes_of_a_plain_tensor_are_there_in_each_epoch_and_for_transforms() -> None:
    def spacing(tensor: Any) -> Any:
        return tensor.spacing

    @hotset.nondeterministic
    def live(tensor: Any) -> Any:
        return tensor.spacing

    for memory in (torch.zeros(3), torch.from_numpy(np.zeros(3))):
        rows = [_with_spacing(index, memory.clone() if index else memory) for index in range(6)]
        kept = [torch.from_numpy(row.numpy()) for row in rows]
        for index, row in enumerate(kept):
            _with_spacing(index, row)
        for source, steps in itertools.product((rows, kept), ([], [spacing], [live])):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", hotset.HotsetWarning)  # that such tensors are not cached
                with hotset.cache(source, transform=steps, memory="1MiB") as cached:
                    found = [cached[5] for _ in range(2)]
            assert [tensor if steps else tensor.spacing for tensor in found] == [(1, 1, 5)] * 2


class Size(NamedTuple):
    """What :class:`Made` is made of."""

    size: int


class Made(Size):
    """A named tuple whose constructor changes what it is given."""

    __slots__ = ()

    def __new__(cls, size: int) -> Made:
        return super().__new__(cls, 2 * size)


def test_a_named_tuple_comes_back_without_its_constructor() -> None:
    class Source(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Made:
            return Made(index)

    with hotset.cache(Source(), memory="1MiB") as cached:
        for _ in range(2):
            assert [cached[index].size for index in range(6)] == [0, 2, 4, 6, 8, 10]
            assert type(cached[3]) is Made
        assert cached.stats().hits


def test_attributes_are_the_datasets_own() -> None:
    names = ("records", "numbers", "insert", "read", "prepare", "spills", "served", "holds", "classes")
    source = Samples(mapping, 4)
    for name in names:
        setattr(source, name, [name])
    with hotset.cache(source) as cached:
        assert [getattr(cached, name) for name in names] == [[name] for name in names]
        assert not hasattr(cached, "no_such")


def test_images_of_every_mode_and_of_varying_size() -> None:
    from subclasses import fixed_image, images

    assert hits_equal_misses(fixed_image) == N
    assert hits_equal_misses(images, 9) == 9


def test_image_files_that_were_opened_but_not_decoded_are_pictures(tmp_path: Path) -> None:
    from PIL import Image
    from subclasses import fixed_image

    for i in range(4):
        fixed_image(i)[0].save(tmp_path / f"{i}.jpg")

    class Files(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            data = io.BytesIO((tmp_path / f"{range(4)[index]}.jpg").read_bytes())
            return Image.open(data)

    cached = with_at_most_one_warning(lambda: served_right(Files(), Files().__getitem__, 4))
    assert cached == 4


def _dense(sample: Sequence[Any]) -> list[Any]:
    return [
        part.contiguous() if isinstance(part, torch.Tensor) else np.ascontiguousarray(part) for part in sample
    ]


def test_views_that_are_not_dense_keep_their_values() -> None:
    with hotset.cache(Samples(strided, N)) as cached:
        for _ in range(3):
            for i in range(N):
                equal_batches(_dense(cached[i]), _dense(strided(i)))
        assert cached.stats().cached == N


def test_an_int_of_more_than_64_bits_leaves_only_its_own_sample_uncached() -> None:
    assert huge_int_sometimes(1)[1] > 2**64
    cached = with_at_most_one_warning(lambda: hits_equal_misses(huge_int_sometimes))
    assert cached == sum(huge_int_sometimes(i)[1] < 2**63 for i in range(N))


@pytest.mark.parametrize("make", [named, mapping, text, ragged, permuted, zero_d_and_empty, every_dtype])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_changing_a_sample_does_not_change_the_cache_unlike_monais(
    make: Callable[[int], Any],
) -> None:
    with hotset.cache(Samples(make, N)) as cached:
        for i in (20, 20, 20, 3, 3):  # a miss, then hits
            first, second = cached[i], cached[i]
            _overwrite(first)
            indistinguishable(second, make(i))
            many = cached.__getitems__([i, i, 4])
            _overwrite(many[0])
            indistinguishable(many[1], make(i))
        indistinguishable(cached[20], make(20))
        assert cached.check() == []


@pytest.mark.parametrize("make", [mapping, jpeg_like])
def test_a_sample_that_a_batch_reads_twice_is_two_objects(
    make: Callable[[int], Any],
) -> None:
    with hotset.cache(Samples(make, N)) as cached:
        for i in (20, 21):
            first, second = cached.__getitems__([i, i])
            _overwrite(first)
            indistinguishable(second, make(i))


def _overwrite(sample: Any) -> None:
    for leaf in leaves(sample):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            leaf.view(torch.uint8).zero_().add_(93) if leaf.dim() and leaf.is_contiguous() else leaf.fill_(1)
        elif isinstance(leaf, np.ndarray):
            assert leaf.flags.writeable
            leaf[...] = 93
    for container in (sample, *(sample.values() if isinstance(sample, dict) else ())):
        if isinstance(container, list):
            container.clear()
    if isinstance(sample, dict):
        sample.clear()


def test_changing_an_image_does_not_change_the_cache() -> None:
    from subclasses import fixed_image

    with hotset.cache(Samples(fixed_image, N)) as cached:
        for i in (20, 20, 3):
            first, second = cached[i], cached[i]
            scribble(first)
            indistinguishable(second, fixed_image(i))
            indistinguishable(cached[i], fixed_image(i))


def test_two_hits_share_no_memory() -> None:
    with hotset.cache(Samples(mapping, N)) as cached:
        kept = [cached[i] for _ in range(3) for i in range(N)]
        pointers = [s["image"].data_ptr() for s in kept] + [s["meta"]["points"].ctypes.data for s in kept]
        assert len(set(pointers)) == len(pointers)
        assert len({id(s["meta"]) for s in kept}) == len(kept)


def test_a_hit_can_be_saved_and_copied() -> None:
    with hotset.cache(Samples(image_and_label, N)) as cached:
        for _ in range(2):
            image = cached[5][0]
            file = io.BytesIO()
            torch.save(image, file)
            assert file.tell() < 4096
            equal_batches(copy.deepcopy(image), image_and_label(5)[0])


def test_indices_of_every_kind() -> None:
    source = Samples(image_and_label, N)
    kinds: list[Any] = [5, -1, -N, np.int64(7), np.int32(-3), np.uint8(2), torch.tensor(9), True]
    with hotset.cache(source) as cached:
        for _ in range(2):
            for index in kinds:
                indistinguishable(cached[index], source[index], repr(index))
            ids = [3, 3, -1, N - 1, 0, 3]
            for sample, index in zip(cached.__getitems__(ids), ids, strict=True):
                indistinguishable(sample, source[index])
        assert cached.stats().cached >= len(({range(N)[int(i)] for i in kinds} | {3, N - 1, 0}) - {1})


def test_an_index_that_the_source_refuses_raises_the_same_error() -> None:
    source = Samples(image_and_label, N)
    with hotset.cache(source) as cached:
        wrong: list[Any] = ["five", 2.5, None, N, -N - 1]
        for index in wrong:
            theirs = failure(partial(source.__getitem__, index))
            assert failure(partial(cached.__getitem__, index)).kind is theirs.kind


def test_samples_of_equal_content_are_kept_apart_unlike_monais_hash_as_key(tmp_path: Path) -> None:
    """Five different samples, each four times: keyed by content, some would come back for others."""
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(same_content, 20, log)) as cached:
        for _ in range(2):
            for i in (7, 3, 19, 0, 12, 3, 8, 13, 18, 2):
                indistinguishable(cached[i], same_content(i))
        joined: ConcatDataset[Any] = ConcatDataset([cached, Subset(cached, [19, 0]), cached])
        for i in range(len(joined)):
            indistinguishable(joined[i], same_content([*range(20), 19, 0, *range(20)][i]))


def test_a_source_that_reads_whole_batches_gives_the_same_samples_one_by_one() -> None:
    with hotset.cache(Batched(image_and_label, N)) as cached:
        for _ in range(2):
            ids = [4, 9, 4, 17, -1]
            for sample, index in zip(cached.__getitems__(ids), ids, strict=True):
                indistinguishable(sample, image_and_label(range(N)[index]))
            indistinguishable(cached[4], image_and_label(4))


def test_a_source_random_by_design_but_seeded_by_the_index_is_cached() -> None:
    source = SeedsItself(number, N)
    with hotset.cache(source) as cached:
        for _ in range(2):
            for i in range(N):
                indistinguishable(cached[i], source[i])
        assert cached.stats().cached == N


def test_samples_of_many_megabytes() -> None:
    with hotset.cache(Samples(_large, 3), memory="200MB") as cached:
        for _ in range(2):
            for i in range(3):
                indistinguishable(cached[i], _large(i))
        assert cached.stats().cached == 3
        assert cached.stats().bytes >= 3 * 30_000_000


def _large(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((30_000_000,), index, dtype=torch.uint8), torch.arange(1 + index)


def test_it_is_a_torch_dataset_and_a_context_manager() -> None:
    with hotset.cache(Samples(image_and_label, N)) as cached:
        assert isinstance(cached, Dataset)
        assert isinstance(cached, hotset.CachedDataset)
        assert len(cached) == N


class Wrapped(Dataset[Any]):
    """What samplers and others look through, for the dataset within."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


@functools.singledispatch
def labels(dataset: Any) -> str:
    """As samplers that balance classes find them: by the dataset's class."""
    return "unknown"


@labels.register
def _(dataset: Samples) -> str:
    return f"of {len(dataset)} samples"


@pytest.mark.parametrize(
    "again",
    [lambda it: it, copy.copy, lambda it: pickle.loads(pickle.dumps(it))],
    ids=["itself", "a copy", "pickled"],
)
def test_programs_that_ask_for_the_datasets_class_find_it(again: Callable[[Any], Any]) -> None:
    with hotset.cache(Samples(image_and_label, N)) as cached, contextlib.closing(again(cached)) as one:
        assert isinstance(one, Samples)
        assert not isinstance(one, Wrapped)
        assert labels(one) == f"of {N} samples"
        assert type(one) is hotset.CachedDataset
        assert differs(one[3], Samples(image_and_label, N)[3]) is None


class OfNoBase:
    """A dataset as libraries of their own kind have them (fastai's Datasets): it has torch's methods only."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([range(N)[index]])

    def __call__(self, word: str) -> str:
        return word * 2


def test_the_class_of_a_dataset_that_is_not_derived_from_torchs_is_found_too() -> None:
    with hotset.cache(OfNoBase(), memory="1MiB") as cached:
        assert isinstance(cached, OfNoBase)
        assert isinstance(cached, Dataset)
        called: Any = cached
        assert called("no") == "nono"
        assert [int(cached[index]) for index in range(N)] == list(range(N))


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(Samples(image_and_label, N), range(4)),
        ConcatDataset([Samples(image_and_label, N), Samples(image_and_label, N)]),
        Wrapped(Samples(image_and_label, N)),
        [image_and_label(index) for index in range(N)],
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_what_programs_take_apart_is_not_found_as_they_would_read_past_the_cache(dataset: Any) -> None:
    with hotset.cache(dataset) as cached:
        assert not isinstance(cached, type(dataset))
        assert isinstance(cached, hotset.CachedDataset)


def test_a_cache_that_is_dropped_without_close_frees_its_memory() -> None:
    """The check after each test would find memory that remains."""
    cached = hotset.cache(Samples(image_and_label, N), transform=[draw_all])
    for i in range(N):
        equal_batches(cached[i]["sample"]["sample"]["sample"], image_and_label(i))
    sample = cached[3]
    del cached
    gc.collect()
    equal_batches(sample["sample"]["sample"]["sample"], image_and_label(3))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"session": None}, 'write session="..."'),
        ({"session": 7}, 'write session="..."'),
        ({"window": hotset.Window(10)}, "own torch.utils.data.Subset"),
        ({"window": hotset.Window(10), "session": None}, "own torch.utils.data.Subset"),
        ({"window": hotset.Window(10), "cluster": None}, "window= and session= cannot be combined"),
        ({"spill": "/nowhere"}, "leave out spill="),
        ({"cluster": None, "session": None, "replicate": True}, "replicate= is for"),
        ({"cluster": 5}, "got 5."),
        ({"cluster": ""}, "got ''."),
    ],
)
def test_what_does_not_go_together_is_a_sentence(arguments: dict[str, Any], says: str) -> None:
    given = {"cluster": "auto", "session": "none", **arguments}
    found = failure(lambda: hotset.cache(Samples(number), **given))
    assert found.kind is hotset.ArgumentError
    assert says in found.text
    assert is_a_sentence(found.text)


@pytest.mark.parametrize("dataset", [None, 3, Samples, int])
def test_what_is_no_dataset_is_a_sentence(dataset: Any) -> None:
    found = failure(lambda: hotset.cache(dataset))
    assert found.kind is hotset.ArgumentError
    assert is_a_sentence(found.text)


class ByCuts(Dataset[Any]):
    """Takes lists of cuts as indices, as lhotse's datasets do."""

    def __getitem__(self, cuts: list[str]) -> Any:
        return torch.zeros(len(cuts))


def test_a_dataset_without_a_length_is_refused_with_what_to_do() -> None:
    found = failure(lambda: hotset.cache(ByCuts()))
    assert found.kind is hotset.ArgumentError
    assert "hotset.memo" in found.text
    assert is_a_sentence(found.text)


class Large(Dataset[Any]):
    """Pictures of many sizes, a megabyte a few of them, with texts, and one in a form of its own."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        draw = np.random.default_rng(index)
        picture = Image.fromarray(draw.integers(0, 256, (300 + 10 * index, 300, 3), np.uint8))
        more = {"odd": [1, "two"]} if index == 5 else {}
        return {"picture": picture, "name": f"{index}" * (index + 1), **more}


@pytest.mark.parametrize("order", [range(8), [6, 1, 5, 5, 0, 7, 2], [3]])
def test_hits_of_a_batch_that_are_large_together_are_those_asked_for(order: Sequence[int]) -> None:
    with recorded(), hotset.cache(Large(), memory="64MiB") as cached:
        cached.fill()
        assert cached.stats().cached == 8
        indistinguishable(cached.__getitems__(list(order)), [Large()[index] for index in order])
