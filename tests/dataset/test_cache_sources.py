"""What may be cached and what may not: random sources, live transforms, declarations, and odd arguments.

Nothing is frozen that should be random. The peers' faults here: a ``Lambda`` that hides ``np.random`` is
frozen without a word (MONAI), Python randomness is not detected, also in a map below the cached one
(MindSpore), a function is known by its name so that another one gets its results (MindSpore).
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import difference, equal_batches, failure, is_a_sentence, recorded, rng_states, seed_everything
from live import (
    Compose,
    HeldGenerator,
    LoggedCalls,
    draw_all,
    draw_random,
    draw_torch,
    halve,
    image_jitter,
    image_to_float,
)
from samples import image_and_label, number
from sources import (
    Counting,
    CountsItsCalls,
    DrawsButDiscards,
    DrawsNumpy,
    DrawsRandom,
    DrawsTorch,
    FolderLike,
    HoldsNumpy,
    HoldsRandom,
    HoldsTorchOnItsClass,
    ReadLog,
    ReadsUrandom,
    Samples,
    TextFiles,
    Transformed,
)
from torch.utils.data import Dataset

import hotset

N = 30
RANDOM_SOURCES = [
    DrawsRandom, DrawsNumpy, DrawsTorch, DrawsButDiscards, HoldsRandom, HoldsNumpy, HoldsTorchOnItsClass,
    CountsItsCalls, ReadsUrandom,
]  # fmt: skip


def epochs(dataset: Any, count: int = 3) -> list[Any]:
    """All samples of some epochs and the RNG states after each, always from the same seeds."""
    seed_everything(99)
    return [([dataset[i] for i in range(len(dataset))], rng_states()) for _ in range(count)]


# Refused


@pytest.mark.parametrize("kind", RANDOM_SOURCES)
def test_a_random_source_is_refused_with_what_to_do(kind: type[Samples]) -> None:
    before = rng_states()
    found = failure(lambda: hotset.cache(kind(image_and_label, N)))
    assert found.kind is hotset.NotCacheable
    assert is_a_sentence(found.text), found.text
    assert "transform" in found.text
    assert "deterministic" in found.text
    assert rng_states() == before


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (DrawsRandom, "random"),
        (DrawsNumpy, "numpy"),
        (DrawsTorch, "torch"),
        (HoldsRandom, "held"),
        (HoldsNumpy, "rng"),
        (HoldsTorchOnItsClass, "generator"),
    ],
)
def test_the_refusal_names_the_generator_that_moved(kind: type[Samples], named: str) -> None:
    assert named in failure(lambda: hotset.cache(kind(image_and_label, N))).text


def test_held_generators_are_left_as_they_were() -> None:
    source = HoldsRandom(image_and_label, N)
    before = source.held.getstate()
    failure(lambda: hotset.cache(source))
    assert source.held.getstate() == before


def test_a_lambda_that_hides_numpys_rng_is_never_frozen_unlike_monais() -> None:
    hiding = lambda sample: (sample, np.random.rand())  # noqa: E731
    frozen = failure(lambda: hotset.cache(Samples(lambda i: hiding(number(i)), N)))
    assert frozen.kind is hotset.NotCacheable
    with hotset.cache(Samples(number, N), transform=hiding) as cached:
        equal_batches(epochs(cached), epochs(Transformed(Samples(number, N), [hiding])))


def test_a_source_declared_nondeterministic_is_refused_though_nothing_shows() -> None:
    found = failure(lambda: hotset.cache(hotset.nondeterministic(Samples(number, N))))
    assert found.kind is hotset.NotCacheable
    assert is_a_sentence(found.text)


@pytest.mark.parametrize("kind", RANDOM_SOURCES)
def test_a_declared_random_source_is_accepted_frozen_and_the_plan_says_so(kind: type[Samples]) -> None:
    with hotset.cache(hotset.deterministic(kind(image_and_label, N))) as cached:
        first = [cached[i] for i in range(N)]
        second = [cached[i] for i in range(N)]
        equal_batches(second, first)
        assert cached.stats().cached == N
        if kind in (DrawsRandom, DrawsNumpy, DrawsTorch, DrawsButDiscards):
            assert "draw" in str(cached.plan).lower()


# Live


def test_transforms_are_applied_in_order_whatever_is_cached() -> None:
    for transforms in (
        [halve, draw_all],
        [hotset.deterministic(halve), draw_all],
        [hotset.deterministic(halve)],
        [draw_random, draw_torch],
    ):
        expected = epochs(Transformed(Samples(image_and_label, N), transforms))
        with hotset.cache(Samples(image_and_label, N), transform=transforms) as cached:
            equal_batches(epochs(cached), expected)


def test_one_transform_need_not_be_in_a_list() -> None:
    with hotset.cache(Samples(image_and_label, N), transform=draw_all) as cached:
        equal_batches(epochs(cached), epochs(Transformed(Samples(image_and_label, N), [draw_all])))


def test_a_declared_prefix_runs_once_per_sample(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "calls")
    prefix = hotset.deterministic(LoggedCalls(log))
    with hotset.cache(Samples(image_and_label, N), transform=[prefix, draw_all]) as cached:
        log.reset()
        epochs(cached, 3)
        assert log.total() <= N
        log.reset()
        epochs(cached, 1)
        assert log.total() == 0


@pytest.mark.parametrize("strict", [False, True])
def test_a_transform_that_passes_its_trial_is_cached_unless_strict(tmp_path: Path, strict: bool) -> None:
    log = ReadLog(tmp_path / "calls")
    with hotset.cache(Samples(image_and_label, N), transform=[LoggedCalls(log)], strict=strict) as cached:
        log.reset()
        epochs(cached, 3)
        assert log.total() == (3 * N if strict else N)


def test_a_declared_transform_after_a_live_one_is_live_unlike_mindspores_map_below(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "calls")
    after = hotset.deterministic(LoggedCalls(log))
    with hotset.cache(Samples(image_and_label, N), transform=[_jitter, after]) as cached:
        log.reset()
        got = epochs(cached)
        assert log.total() == 3 * N
        equal_batches(got, epochs(Transformed(Samples(image_and_label, N), [_jitter, after])))
        assert difference(got[0][0], got[1][0]) is not None


def _jitter(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    return sample[0] + random.randrange(50), sample[1]


def test_a_transform_declared_nondeterministic_stays_live(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "calls")
    live = hotset.nondeterministic(LoggedCalls(log))
    with hotset.cache(Samples(image_and_label, N), transform=[live, hotset.deterministic(_same)]) as cached:
        log.reset()
        epochs(cached, 2)
        assert log.total() == 2 * N


def _same(sample: Any) -> Any:
    return sample


def test_a_declared_container_is_cached_whole_unlike_monais_nested_compose(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "calls")
    container = hotset.deterministic(Compose([LoggedCalls(log), _same]))
    with hotset.cache(Samples(image_and_label, N), transform=[container, draw_all]) as cached:
        epochs(cached, 1)
        log.reset()
        equal_batches(epochs(cached), epochs(Transformed(Samples(image_and_label, N), [halve, draw_all])))
        assert log.total() == 0


def test_a_live_transforms_own_generator_draws_as_without_the_cache() -> None:
    expected = epochs(Transformed(Samples(image_and_label, N), [HeldGenerator()]))
    with hotset.cache(Samples(image_and_label, N), transform=[HeldGenerator()]) as cached:
        equal_batches(epochs(cached), expected)


# ``dataset.transform``


@pytest.mark.parametrize(
    "transform",
    [
        None,
        image_jitter,
        image_to_float,
        hotset.deterministic(Compose([image_to_float])),
        Compose([hotset.deterministic(image_to_float), image_jitter]),
        Compose([image_jitter, hotset.deterministic(image_to_float)]),
        Compose([]),
    ],
)
def test_the_datasets_own_transform_is_cut_like_any_other(transform: Any) -> None:
    expected = epochs(FolderLike(N, transform))
    source = FolderLike(N, transform)
    with hotset.cache(source) as cached:
        equal_batches(epochs(cached), expected)
        with warnings.catch_warnings():
            assert source.transform is transform
        equal_batches(epochs(source), expected, "the user's own dataset afterwards")


class _LoggedImage:
    def __init__(self, log: ReadLog) -> None:
        self.log = log

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        self.log.add(0)
        return image_to_float(image)


def test_the_declared_part_of_the_datasets_own_transform_runs_once_per_sample(tmp_path: Path) -> None:
    from torchvision.transforms import Compose as TorchvisionCompose

    log = ReadLog(tmp_path / "calls")
    transform = TorchvisionCompose([hotset.deterministic(_LoggedImage(log)), image_jitter])
    with hotset.cache(FolderLike(N, transform)) as cached:
        log.reset()
        epochs(cached, 3)
        assert log.total() <= N


def test_the_datasets_own_transform_and_another_after_it() -> None:
    own = Compose([hotset.deterministic(image_to_float), image_jitter])
    expected = epochs(Transformed(FolderLike(N, own), [hotset.deterministic(_same), draw_all]))
    with hotset.cache(FolderLike(N, own), transform=[hotset.deterministic(_same), draw_all]) as cached:
        equal_batches(epochs(cached), expected)


def test_a_transform_that_draws_unused_numbers_stays_live() -> None:
    """A dropout with p=0 is deterministic, but still moves a generator."""
    from torchvision.transforms import RandomHorizontalFlip

    never = RandomHorizontalFlip(p=0.0)

    def both(i: int) -> Any:
        return image_and_label(i)[0]

    pictures = [both(i) for i in range(8)]

    def epoch(dataset: Any) -> Any:
        seed_everything(5)
        batches = list(hotset.DataLoader(dataset, batch_size=4))
        return batches, rng_states()

    with hotset.cache(pictures, transform=[never], memory="1MiB") as cached:  # type: ignore[arg-type]
        assert cached.plan.live == ("RandomHorizontalFlip",)
        epoch(cached)
        batches, states = epoch(cached)
    plain, plain_states = epoch(_Applied(pictures, never))
    equal_batches(batches, plain)
    assert difference(states, plain_states) is None


class _Applied(Dataset[Any]):
    def __init__(self, samples: Any, transform: Any) -> None:
        self._samples = samples
        self.apply = transform

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> Any:
        return self.apply(self._samples[i])


class CallsItsOwnWay:
    """A dataset that does not call its transform with exactly one value."""

    def __init__(self, transform: Any, by_name: bool) -> None:
        self.transform = transform
        self.by_name = by_name

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return self.transform(a=i, b=1) if self.by_name else self.transform(i, 1)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_transform_with_another_call_signature_stays_whole(by_name: bool) -> None:
    with hotset.cache(CallsItsOwnWay(lambda a, b: a + b, by_name), memory="1MiB") as cached:  # type: ignore[arg-type]
        assert [cached[i] for i in range(4)] == [1, 2, 3, 4]
        assert cached.plan.live == ()
        assert any("cannot be cut" in note for note in cached.plan.notes) == by_name


@pytest.mark.parametrize("by_name", [False, True])
def test_a_random_transform_that_makes_one_value_of_two_cannot_be_cut_off(by_name: bool) -> None:
    source = CallsItsOwnWay(lambda a, b: a + b + random.random(), by_name)
    found = failure(lambda: hotset.cache(source, memory="1MiB"))  # type: ignore[arg-type]
    assert found.kind is hotset.NotCacheable
    assert is_a_sentence(found.text), found.text


def test_torchvisions_folders_and_fake_data(tmp_path: Path) -> None:
    """FakeData seeds torch by the index and puts the state back: no RNG moves."""
    from torchvision.datasets import FakeData, ImageFolder
    from torchvision.transforms import v2

    fake = FakeData(size=8, image_size=(3, 8, 8), num_classes=3)
    for i in range(8):
        folder = tmp_path / f"class{i % 2}"
        folder.mkdir(exist_ok=True)
        fake[i][0].save(folder / f"{i}.png")
    augment = v2.Compose([v2.PILToTensor(), v2.RandomHorizontalFlip(0.5), v2.RandomCrop(4)])
    for make in (
        lambda: FakeData(size=8, image_size=(3, 8, 8), num_classes=3),
        lambda: ImageFolder(str(tmp_path)),
        lambda: ImageFolder(str(tmp_path), transform=augment),
        lambda: ImageFolder(str(tmp_path), transform=v2.PILToTensor(), target_transform=str),
    ):
        with hotset.cache(make()) as cached:
            equal_batches(epochs(cached), epochs(make()))


# Identity


def _scaling(factor: int) -> Callable[[int], int]:
    return lambda index: index * factor


def test_two_functions_of_one_name_never_get_each_others_results_unlike_mindspores() -> None:
    with hotset.cache(Samples(_scaling(2), N)) as twice, hotset.cache(Samples(_scaling(3), N)) as thrice:
        for _ in range(2):
            for i in range(N):
                assert (twice[i], thrice[i]) == (2 * i, 3 * i)
    scale = [hotset.deterministic(lambda x: x + 1), hotset.deterministic(lambda x: x + 2)]
    for step, transform in enumerate(scale, 1):
        with hotset.cache(Samples(number, N), transform=[transform]) as cached:
            assert [cached[i] for i in range(N)] * 2 == [number(i) + step for i in range(N)] * 2


def test_a_changed_added_or_deleted_file_never_gives_another_files_content(tmp_path: Path) -> None:
    """MindSpore serves old or wrong images in this case."""
    files = [tmp_path / f"{i}" for i in range(6)]

    def check() -> None:
        present = [path for path in files if path.exists()]
        with hotset.cache(TextFiles(present)) as cached:
            for _ in range(2):
                for i, path in enumerate(present):
                    equal_batches(cached[i], (torch.tensor(list(path.read_bytes()), dtype=torch.uint8), i))

    for i, path in enumerate(files[:4]):
        path.write_bytes(bytes([i] * 5))
    check()
    files[2].write_bytes(bytes([77] * 5))
    check()
    files[1].unlink()
    files[4].write_bytes(b"added")
    check()


# Arguments


@pytest.mark.parametrize("memory", ["12 parsecs", "-1GiB", -1, "", "GiB", "1..5GiB", "64 GiBs"])
def test_a_memory_that_is_not_an_amount_is_refused_with_a_sentence(memory: Any) -> None:
    found = failure(lambda: hotset.cache(Samples(number, N), memory=memory))
    assert found.kind is hotset.QuantityError
    assert is_a_sentence(found.text), found.text
    assert repr(memory) in found.text


def test_an_empty_dataset_is_refused_with_a_sentence() -> None:
    found = failure(lambda: hotset.cache(Samples(number, 0)))
    assert issubclass(found.kind, hotset.HotsetError)
    assert issubclass(found.kind, ValueError)
    assert is_a_sentence(found.text), found.text


@pytest.mark.parametrize("source", [42, None])
def test_an_object_that_is_no_dataset_is_refused_with_a_sentence(source: Any) -> None:
    found = failure(lambda: hotset.cache(source))
    assert issubclass(found.kind, hotset.HotsetError)
    assert is_a_sentence(found.text), found.text


def test_a_transform_that_cannot_be_called_is_refused_with_a_sentence() -> None:
    found = failure(lambda: hotset.cache(Samples(number, N), transform=[3]))  # type: ignore[list-item]
    assert issubclass(found.kind, hotset.HotsetError)
    assert is_a_sentence(found.text), found.text


def test_anything_with_a_length_and_items_is_a_dataset() -> None:
    items: Any = [torch.full((3,), i) for i in range(N)]
    with hotset.cache(items) as cached:
        for _ in range(2):
            equal_batches([cached[i] for i in range(N)], [torch.full((3,), i) for i in range(N)])


def test_errors_belong_to_the_documented_classes() -> None:
    assert issubclass(hotset.NotCacheable, TypeError)
    assert issubclass(hotset.QuantityError, ValueError)
    assert issubclass(hotset.HotsetWarning, UserWarning)


# The plan


def test_the_plan_says_what_is_cached_and_what_stays_live() -> None:
    transforms = [hotset.deterministic(halve), draw_all]
    with hotset.cache(Samples(image_and_label, N), transform=transforms, memory="64MiB") as cached:
        plan = str(cached.plan)
        assert "halve" in plan
        assert "draw_all" in plan
        assert "Samples" in plan
        assert plan.index("halve") < plan.index("draw_all")
        assert any(unit in plan for unit in ("KiB", "MiB", " B"))


def test_building_reads_only_a_few_samples(tmp_path: Path) -> None:
    log = ReadLog(tmp_path / "reads")
    with hotset.cache(Counting(image_and_label, 500, log)):
        assert 0 < len(log.counts()) <= 16


def test_optional_attributes_of_a_dataset_are_not_needed() -> None:
    class Bare(Dataset[int]):
        __slots__ = ()

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            return (10, 11, 12, 13, 14)[index]

    with hotset.cache(Bare()) as cached:
        assert [cached[i] for i in range(5)] * 2 == [10, 11, 12, 13, 14] * 2


class _BatchesOtherwise(Samples):
    """A source that reads batches by another function than samples."""

    def __init__(self, many: Callable[[list[Any]], list[Any]]) -> None:
        super().__init__(number, 6)
        self.many = many

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return self.many([self.make(i) for i in indices])


@pytest.mark.parametrize(
    "many",
    [
        lambda samples: [sample + random.random() for sample in samples],
        lambda samples: [sample * 2 for sample in samples],
        lambda samples: [sample - sum(samples) / len(samples) for sample in samples],
        lambda samples: random.sample(samples, len(samples)),
    ],
    ids=["draws", "doubles", "centres", "shuffles"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_getitems_that_returns_other_samples_is_refused(many: Any, nested: bool) -> None:
    """torch's loader reads whole batches if a dataset has ``__getitems__``, also through a ``Subset``."""
    source: Any = _BatchesOtherwise(many)
    given = torch.utils.data.Subset(source, [1, 2, 3, 5]) if nested else source
    state = random.getstate()
    found = failure(lambda: hotset.cache(given, memory="1MiB"))
    assert found.kind is hotset.NotCacheable
    assert "__getitems__" in found.text
    assert is_a_sentence(found.text), found.text
    assert random.getstate() == state


def test_getitems_that_returns_samples_in_the_order_of_the_file_is_refused() -> None:
    class Sorts(Samples):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self.make(i) for i in sorted(indices)]

    found = failure(lambda: hotset.cache(Sorts(number, 6), memory="1MiB"))
    assert found.kind is hotset.NotCacheable
    assert "__getitems__" in found.text


def test_getitems_that_returns_the_same_samples_is_cached() -> None:
    with hotset.cache(_BatchesOtherwise(list), memory="1MiB") as cached:
        batch = next(iter(torch.utils.data.DataLoader(cached, batch_size=6)))
        assert batch.tolist() == [number(i) for i in range(6)]


class _BeginsThread(Samples):
    """Begins a thread of this name when a sample is first read, as a library in Rust begins its pool."""

    def __init__(self, name: bytes) -> None:
        super().__init__(number, N)
        self.name, self.thread, self.end = name, None, threading.Event()

    def begin(self) -> None:
        named = threading.Event()

        def run() -> None:
            ctypes.CDLL(None).prctl(15, self.name, 0, 0, 0)  # PR_SET_NAME
            named.set()
            self.end.wait()

        self.thread = threading.Thread(target=run)
        self.thread.start()
        named.wait()

    def __getitem__(self, index: int) -> Any:
        if self.thread is None:
            self.begin()
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("name", "before", "told"), [(b"polars-0", 0, 1), (b"polars-0", 1, 0), (b"ours-0", 0, 0)]
)
def test_threads_that_reading_begins_and_a_fork_loses_are_said(name: bytes, before: int, told: int) -> None:
    source = hotset.deterministic(_BeginsThread(name))
    if before:
        source.begin()
    try:
        with recorded() as caught, hotset.cache(source, memory="1MiB", key="threads") as cached:
            assert [cached[i] for i in range(N)] == [number(i) for i in range(N)]
    finally:
        source.end.set()
        source.thread.join()
    assert ["forkserver" in str(each.message) for each in caught] == [True] * told


class _ByName(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: str) -> int:
        return {"a": 1, "b": 2, "c": 3}[name]


class _OpenedInWorkers(Dataset[str]):
    """A worker_init_fn opens its file."""

    file: Any = None

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> str:
        return self.file.readline()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("source", "error", "told"),
    [
        (_ByName(), KeyError, "hotset.memo"),
        (_OpenedInWorkers(), AttributeError, "what a worker_init_fn opens"),
    ],
)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")
def test_the_error_of_a_dataset_that_cannot_be_read_by_number_here_has_a_note_with_what_to_do(
    source: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error) as caught:
        hotset.cache(source, memory="1MiB")
    assert any(told in note for note in caught.value.__notes__)
