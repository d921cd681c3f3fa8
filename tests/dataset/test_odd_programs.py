"""Programs that do odd things with datasets: with a cache they get, bit for bit, what they get without."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import all_pairs, recorded, seed_everything
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

import hotset
from hotset.determinism.equality import differs

N = 18


class Rows(Dataset[Any]):
    def __init__(self, count: int = N) -> None:
        self.count, self.scale, self.table = count, 2.0, np.arange(count) * 3

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), index * self.scale), int(self.table[index])


class Program(NamedTuple):
    """Attributes: what makes the dataset, from a folder; what follows each epoch; a loader's arguments."""

    make: Callable[[Path], Any]
    after: Callable[[Any], None] = lambda _: None
    sampler: Any = None
    worker_init_fn: Callable[[int], None] | None = None


class Delegates(Dataset[Any]):
    def __init__(self) -> None:
        self.inner = Rows()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Remembers(Rows):
    __getitem__ = functools.lru_cache(maxsize=None)(Rows.__getitem__)  # type: ignore[assignment]


class OpensInAProperty(Rows):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.read = functools.partial(np.fromfile, dtype=np.uint8)
        self.path, self._file = folder / "numbers", None
        self.path.write_bytes(bytes(range(N)))

    @property
    def file(self) -> Any:
        if self._file is None:
            self._file = self.path.open("rb")
        return self._file

    def __getitem__(self, index: int) -> Any:
        self.file.seek(index)
        return self.file.read(1), self.read(self.path, count=index + 1).sum()

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


class Node:
    def __init__(self, number: int) -> None:
        self.number = number


class HoldsWeakly(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = [Node(number) for number in range(N)]
        self.known = weakref.WeakValueDictionary(enumerate(self.nodes))
        self.references, self.me = [weakref.ref(node) for node in self.nodes], weakref.proxy(self)

    def __getitem__(self, index: int) -> int:
        return self.known[index].number + self.references[index]().number + self.me.count  # type: ignore[union-attr]


class HasStateOfThreads(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.here, self.lock, self.numbers = threading.local(), threading.Lock(), iter(range(100))

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            if not hasattr(self.here, "first"):
                self.here.first = next(self.numbers) * 0
            return index + self.here.first


class KnowsEpochs(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.active = 0, list(range(6))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.active.append(len(self.active))

    def __len__(self) -> int:
        return len(self.active)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(self.active[index])


class BestFirst(Sampler[int]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        yield from sorted(range(len(self)), key=lambda index: -int(self.dataset[index][1]))


class Adds(Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return (*super().__getitem__(index), f"number {index}")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class DrawsSometimes(Rows):
    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand(()) if index % 6 == 0 else random.random() if index % 7 == 0 else 0
        return super().__getitem__(index)[0] + drawn


class Fields(NamedTuple):
    picture: torch.Tensor
    about: Any


class OddValues(Rows):
    def __getitem__(self, index: int) -> Any:
        number = np.float32(index)
        nested = {0: {(1, 2): np.array(index)}, 2.5: [None if index % 2 else index, "x" * index]}
        record = np.array([(index, b"ab")], dtype=[("a", "i4"), ("b", "S3")]).view(np.recarray)
        several = (torch.eye(2).mul(index).t(), torch.tensor(index, dtype=torch.bfloat16), number)
        return Fields(torch.arange(index), (nested, record, several, collections.Counter(a=index), 2**80))


class RunsInWorkers(Rows):
    def __getitem__(self, index: int) -> Any:
        dataset = self if get_worker_info() is None else get_worker_info().dataset  # type: ignore[union-attr]
        return torch.tensor(dataset.table[index])


class Bilevel(Rows):
    """Pictures of one bit a pixel, of which torchvision makes bools whose bytes are 0 and 255."""

    def __init__(self, folder: Path) -> None:
        from torchvision.transforms import v2

        super().__init__()
        self.folder, self.transform = folder, v2.Compose([v2.RandomHorizontalFlip(), v2.PILToTensor()])
        for index in range(N):
            Image.fromarray(np.eye(8, 9, index % 8, np.uint8) * 255).convert("1").save(
                folder / f"{index}.png"
            )

    def __getitem__(self, index: int) -> Any:
        return self.transform(Image.open(self.folder / f"{index}.png")), index


def edited(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.scale = 7.0  # type: ignore[attr-defined]
    info.dataset.table[:] = 5  # type: ignore[attr-defined]


def change_scale(dataset: Any) -> None:
    dataset.scale = dataset.inner.scale = 5.0


def change_node(dataset: Any) -> None:
    dataset.nodes[3].number = 70


def mixed(_: Path) -> Any:
    rows = TensorDataset(torch.zeros(4, 4), torch.arange(4))
    return ConcatDataset([Rows(5), rows, [(torch.ones(4), 7)] * 3, Subset(Rows(), [2, 2])])


PROGRAMS: dict[str, Program] = {
    "delegates": Program(lambda _: Delegates(), change_scale),
    "remembers": Program(lambda _: Remembers()),
    "opens in a property": Program(OpensInAProperty),
    "holds weakly": Program(lambda _: HoldsWeakly(), change_node),
    "state of threads": Program(lambda _: HasStateOfThreads()),
    "knows epochs": Program(lambda _: KnowsEpochs(), lambda dataset: dataset.set_epoch(dataset.epoch + 1)),
    "a sampler looks": Program(lambda _: Rows(), sampler=BestFirst),
    "a subset adds": Program(lambda _: Adds(Rows(), [3, 5, 7, 1, 1, 9, 0])),
    "parts of several kinds": Program(mixed),
    "draws sometimes": Program(lambda _: DrawsSometimes()),
    "odd values": Program(lambda _: OddValues()),
    "runs in workers": Program(lambda _: RunsInWorkers()),
    "bilevel": Program(Bilevel),
    "edited in workers": Program(lambda _: Rows(), worker_init_fn=edited),
}


def epochs(kind: Any, program: Program, dataset: Any, workers: int) -> list[Any]:
    seed_everything()
    loader = kind(
        dataset,
        batch_size=4,
        num_workers=workers,
        collate_fn=as_they_are,
        worker_init_fn=program.worker_init_fn,
        sampler=program.sampler(dataset) if program.sampler is not None else None,
        shuffle=None if program.sampler is not None else True,
    )
    found = []
    for _ in range(2 if workers else 3):  # processes take long to start
        found += [list(loader), torch.rand(()), random.random()]
        program.after(dataset)
    return found


def as_they_are(samples: list[Any]) -> list[Any]:
    """The samples themselves; a collate function of the program's, so that workers run in each epoch."""
    return samples


@pytest.mark.parametrize(
    ("name", "workers", "kind"), all_pairs(PROGRAMS, [0, 2], [hotset.DataLoader, DataLoader])
)
def test_what_a_program_gets_is_what_it_gets_without_a_cache(
    name: str, workers: int, kind: Any, tmp_path: Path
) -> None:
    program = PROGRAMS[name]
    expected = epochs(DataLoader, program, program.make(tmp_path), workers)
    with recorded(), hotset.cache(program.make(tmp_path), memory="4MiB") as cached:
        found = epochs(kind, program, cached, workers)
        assert cached.check() == []
    assert differs(found, expected, across=True) is None
    del cached
    with warnings.catch_warnings():
        # A program leaves its file open. If it is part of a cycle, the file may die before what closes it.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_a_working_folder_that_was_removed_is_none_of_the_caches_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    (tmp_path / "job").rmdir()
    rows = [{"folder": ".", "number": number} for number in range(8)]
    with hotset.cache(rows, memory="1MiB") as cached:
        for _ in range(2):
            numbers = [batch["number"].tolist() for batch in hotset.DataLoader(cached, batch_size=4)]
            assert numbers == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert cached.stats().hits == 8


class Doubled(list[int]):
    """Its elements are twice what iterating over it gives."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(super().__getitem__(index)) * 2


class Scans(Rows):
    """Says itself what is in it: Hugging Face's, which is a table, does so too."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Holds(Rows):
    def __contains__(self, value: object) -> bool:
        return value == "all"


class Endless(Rows):
    """By its indices alone it has no end, as none of them is an IndexError."""

    def __getitem__(self, index: int) -> Any:
        return index


@pytest.mark.parametrize("make", [lambda: Doubled(range(N)), Scans, Holds, Endless])
def test_a_dataset_is_iterated_over_and_asked_as_its_class_says(make: Callable[[], Any]) -> None:
    def asked(dataset: Any) -> list[Any]:
        found = [list(itertools.islice(dataset, 2 * N)) for _ in range(2)]
        return [found, 5 in dataset if make is not Holds else "all" in dataset]

    with recorded(), hotset.cache(make(), memory="1MiB") as cached:
        assert differs(asked(cached), asked(make())) is None


def test_with_a_transform_it_is_iterated_over_by_index() -> None:
    with hotset.cache(Scans(), transform=lambda sample: sample[1], memory="1MiB") as cached:
        assert len(list(itertools.islice(cached, N))) == N
        assert 51 in cached


class Vocabulary:
    def __init__(self) -> None:
        self.words = [f"w{number}" for number in range(5_000)]


class Sentence:
    def __init__(self, ids: Any, vocabulary: Vocabulary) -> None:
        self.ids, self.vocabulary = ids, vocabulary


class Sentences(Dataset[Any]):
    """Its samples are objects that refer to a large one."""

    def __init__(self) -> None:
        self.vocabulary = Vocabulary()
        self.made = [Sentence([number], self.vocabulary) for number in range(N)]

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.made[index]


class SentencesTogether(Sentences):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self.made[index] for index in indices]


@pytest.mark.parametrize("make", [Sentences, SentencesTogether])
@pytest.mark.parametrize("loader", [DataLoader, hotset.DataLoader])
def test_where_nothing_can_be_cached_samples_are_the_datasets_own_objects(make: Any, loader: Any) -> None:
    with recorded() as told, hotset.cache(make(), memory="1MiB") as cached:
        for _ in range(2):
            for number, (sentence,) in enumerate(loader(cached, collate_fn=list)):
                assert sentence is cached.made[number]
    assert "more than 1,000 values" in str(told[0].message)


def test_where_nothing_can_be_cached_a_transform_gets_a_copy() -> None:
    def changed(sentence: Sentence) -> Sentence:
        sentence.ids[0] += 1
        return sentence

    with recorded(), hotset.cache(Sentences(), transform=[changed], memory="1MiB") as cached:
        for _ in range(2):
            assert [sentence.ids[0] for sentence in DataLoader(cached, batch_size=None)] == [*range(1, N + 1)]
