"""Attributes in slots count like those in a ``__dict__``: their changes are followed, reading is put back."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import all_pairs, equal_batches, rarely, recorded
from sources import Handle
from torch.utils.data import DataLoader, Dataset, Subset

import hotset

N = 12
LOADERS: dict[str, Any] = {"torch": DataLoader, "hotset": hotset.DataLoader}


@dataclass(slots=True)
class Config:
    size: int = 1


@dataclass(slots=True, frozen=True)
class Frozen:
    size: int = 1


class Base:
    __slots__ = ("__shift", "unset")

    def __init__(self) -> None:
        self.__shift = 1

    def shift(self, by: int) -> None:
        self.__shift += by

    @property
    def total(self) -> int:
        return self.__shift + getattr(self, "unset", 0)


class Derived(Base):
    __slots__ = ("__dict__", "__weakref__", "names")

    def __init__(self) -> None:
        super().__init__()
        self.names, self.free = ["a"], 1


class Slotted:
    """All that samples depend on is in slots; it has no ``__dict__``."""

    __slots__ = ("config", "derived", "frozen", "rows", "scale")

    def __init__(self) -> None:
        self.scale, self.rows = 1, [1, 2]
        self.config, self.frozen, self.derived = Config(), Frozen(), Derived()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        held = self.config.size + 10 * self.frozen.size + 100 * self.derived.total + self.derived.free
        return torch.ones(2) * index * self.scale * self.rows[1] * held, self.derived.names[-1]


class WithDict(Slotted, Dataset[Any]):
    """The same with a ``__dict__`` beside its slots."""


def scale(dataset: Any) -> None:
    dataset.scale += 1


def rows(dataset: Any) -> None:
    dataset.rows[1] += 1


def size(dataset: Any) -> None:
    dataset.config.size += 1


def frozen(dataset: Any) -> None:
    object.__setattr__(dataset.frozen, "size", dataset.frozen.size + 1)


def private(dataset: Any) -> None:
    dataset.derived.shift(1)


def unset(dataset: Any) -> None:
    dataset.derived.unset = getattr(dataset.derived, "unset", 0) + 1


def beside(dataset: Any) -> None:
    dataset.derived.free += 1


def name(dataset: Any) -> None:
    dataset.derived.names.append("b")


CHANGES = (scale, rows, size, frozen, private, unset, beside, name)
WAYS: dict[str, Callable[[], Any]] = {
    "slots": Slotted,
    "both": WithDict,
    "wrapped": lambda: Subset(WithDict(), range(N)),
    "wrapped slots": lambda: Subset(Slotted(), range(N)),  # type: ignore[arg-type]
}


CASES = all_pairs(CHANGES, WAYS, LOADERS, [0, 2])
IN_WORKERS = [case for case in CASES if case[-1]]


@pytest.mark.parametrize(
    ("change", "way", "made_by", "workers"),
    rarely(CASES, *(case for case in IN_WORKERS if case[0] not in (rows, unset))),
)
def test_a_change_in_slots_takes_effect_from_the_next_pass_on(
    change: Any, way: str, made_by: str, workers: int
) -> None:
    plain, held = WAYS[way](), WAYS[way]()
    with recorded() as told, hotset.cache(held, memory="1MiB") as cached:
        loader = LOADERS[made_by](cached, batch_size=5, num_workers=workers)
        for epoch in range(3):
            expected = list(DataLoader(plain, batch_size=5))
            equal_batches(list(loader), expected)
            equal_batches(list(loader), expected)
            if epoch == 0:
                assert cached.stats().cached == N
            for dataset in (plain, held):
                change(getattr(dataset, "dataset", dataset))
    words = [str(each.message) for each in told]
    assert words
    assert all("has changed" in each for each in words), words


class Opens:
    """Opens its file, makes a counter and marks what it holds when it is read first."""

    __slots__ = ("config", "file", "path", "reads")

    def __init__(self, path: Path) -> None:
        self.path, self.file, self.config = path, None, Frozen(0)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        if self.file is None:
            self.file = Handle(self.path)  # type: ignore[assignment]
            object.__setattr__(self.config, "size", 7)
        self.reads = getattr(self, "reads", 0) + 1
        return int(os.pread(self.file.descriptor, 1, index)[0])  # type: ignore[attr-defined]


def test_planning_leaves_what_reading_sets_in_slots_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    path.write_bytes(bytes(range(N)))
    dataset = Opens(path)
    with hotset.cache(dataset, memory="1MiB") as cached:
        assert dataset.file is None
        assert not hasattr(dataset, "reads")
        assert dataset.config.size == 0
        pickle.loads(pickle.dumps(cached)).close()
        for _ in range(2):
            found = torch.cat(list(hotset.DataLoader(cached, batch_size=4, num_workers=2)))
            assert found.tolist() == list(range(N))
        assert cached.stats().cached == N


class Draws:
    """Makes its generator when it first needs it."""

    __slots__ = ("is_ready", "rng")

    def __init__(self) -> None:
        self.rng: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> float:
        if self.rng is None:
            self.rng, self.is_ready = random.Random(5), True
        return index + float(self.rng.random() if index % 2 else 0)


def test_a_generator_that_reading_makes_in_a_slot_draws_as_without_a_cache() -> None:
    plain = Draws()
    with recorded(), hotset.cache(Draws(), memory="1MiB") as cached:
        for _ in range(2):
            expected = torch.cat(list(DataLoader(plain, batch_size=4)))  # type: ignore[arg-type]
            assert torch.equal(torch.cat(list(hotset.DataLoader(cached, batch_size=4))), expected)


class Counts:
    __slots__ = ("calls",)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return value + self.calls


def test_a_transform_that_counts_in_a_slot_is_not_cached_and_planning_leaves_it_as_it_was() -> None:
    step = Counts()
    with recorded(), hotset.cache(WithDict(), transform=[lambda sample: sample[0], step]) as cached:
        assert cached.plan.live == ("Counts",)
        assert not hasattr(step, "calls")


@hotset.deterministic
class Believed(WithDict):
    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(super().__getitem__(index)[0])


def test_what_is_set_in_a_slot_reaches_the_copy_that_samples_are_read_from() -> None:
    dropout = torch.nn.Dropout(0.5)
    dataset = Believed(torch.nn.Sequential(torch.nn.Hardtanh(-1e9, 1e9), dropout))
    with recorded(), hotset.cache(dataset, memory="1MiB") as cached:
        assert cached.plan.live == ("Dropout",)
        dropout.p = 0.0
        assert torch.equal(cached[3], dataset[3])
        dataset.scale, dataset.derived = 7, Derived()
        dataset.derived.unset = 5
        cached.clear()
        assert torch.equal(cached[3], dataset[3])
        del dataset.scale
        with pytest.raises(AttributeError, match="scale"):
            cached[4]


def jitter(value: torch.Tensor) -> torch.Tensor:
    return value * random.random() + torch.rand(())


@dataclass(slots=True)
class Transformed(Dataset[Any]):
    transform: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        value = torch.full((2,), float(index))
        return value if self.transform is None else self.transform(value)


@dataclass(slots=True, frozen=True)
class FrozenTransformed(Dataset[Any]):
    transform: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((2,), float(index)))


def _seeded_passes(loader: Any, dataset: Any, workers: int) -> list[Any]:
    random.seed(5)
    torch.manual_seed(5)
    batches = loader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    return [*(batch for _ in range(2) for batch in batches), torch.rand(1), random.random()]


@pytest.mark.parametrize(
    ("kind", "made_by", "workers"), all_pairs([Transformed, FrozenTransformed], LOADERS, [0, 2])
)
def test_a_random_transform_in_a_slot_stays_live(kind: Any, made_by: str, workers: int) -> None:
    import torchvision

    transform = [lambda value: value + 1, jitter]
    chain = torchvision.transforms.Compose(transform)
    with hotset.cache(kind(chain), memory="1MiB") as cached:
        assert cached.plan.live == ("jitter",)
        expected = _seeded_passes(DataLoader, kind(chain), workers)
        equal_batches(_seeded_passes(LOADERS[made_by], cached, workers), expected)
        assert cached.stats().hits == N


@pytest.mark.parametrize("on_the_cache", [True, False])
def test_a_transform_that_is_set_in_a_slot_later_is_followed(on_the_cache: bool) -> None:
    dataset = Transformed()
    with hotset.cache(dataset, memory="1MiB") as cached:
        cached.fill()
        (cached if on_the_cache else dataset).transform = jitter
        assert dataset.transform is jitter
        equal_batches(
            _seeded_passes(hotset.DataLoader, cached, 0), _seeded_passes(DataLoader, Transformed(jitter), 0)
        )
        assert cached.plan.live == ("jitter",)
