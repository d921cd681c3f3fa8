"""Samples that are dicts go through albumentations as keywords, and are those without a cache."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal_batches, rarely, recorded
from library_tables import need
from torch.utils.data import get_worker_info

import hotset


class Segmentation(torch.utils.data.Dataset[dict[str, Any]]):
    """Pictures with masks and names; with a chain, it calls the chain itself, as is done without hotset."""

    def __init__(self, aug: Any = None) -> None:
        self.aug = aug

    def __len__(self) -> int:
        return 12

    def read(self, index: int) -> dict[str, Any]:
        image = np.random.default_rng(index).integers(0, 256, (40, 40, 3)).astype(np.uint8)
        return {"image": image, "mask": image[..., 0] // 64, "name": f"{index}.png"}

    def __getitem__(self, index: int) -> Any:
        made = self.read(index)
        if self.aug is None:
            return made
        return {**self.aug(image=made["image"], mask=made["mask"]), "name": made["name"]}


def _flat(A: Any, to_tensor: Any) -> Any:
    parts = [A.Resize(32, 32), A.RandomCrop(16, 16), A.HorizontalFlip(), A.Normalize(), to_tensor()]
    return A.Compose(parts, seed=3)


def _nested(A: Any, to_tensor: Any) -> Any:
    inner = A.Compose([A.CenterCrop(20, 20), A.VerticalFlip()])
    chosen = A.OneOf([A.RandomBrightnessContrast(p=1), A.GaussNoise(p=1)])
    return A.Compose([A.Resize(32, 32), inner, chosen], seed=3)


def _of_one_generator(A: Any, to_tensor: Any) -> Any:
    chain = _flat(A, to_tensor)
    chain.set_random_state(np.random.default_rng(7), random.Random(7))
    return chain


def _nothing_random(A: Any, to_tensor: Any) -> Any:
    return A.Compose([A.Resize(32, 32), A.Normalize()], seed=3)


def _alone(A: Any, to_tensor: Any) -> Any:
    return A.Resize(32, 32)


CHAINS: dict[Callable[..., Any], int] = {
    _flat: 1,
    _nested: 2,
    _of_one_generator: 1,
    _nothing_random: 2,
    _alone: 1,
}


def batches(loader: Any) -> list[Any]:
    """Two epochs, shuffled."""
    torch.manual_seed(1)
    return [
        (batch["image"].tolist(), batch["mask"].tolist(), batch["name"]) for _ in range(2) for batch in loader
    ]


# Workers do with one chain what they do with another.
@pytest.mark.parametrize(
    ("make", "workers"),
    rarely(itertools.product(CHAINS, [0, 2]), *((make, 2) for make in CHAINS if make is not _flat)),
)
def test_batches_are_those_of_a_dataset_that_calls_the_chain(make: Callable[..., Any], workers: int) -> None:
    A, to_tensor = need("albumentations"), need("albumentations.pytorch").ToTensorV2
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    expected = batches(torch.utils.data.DataLoader(Segmentation(make(A, to_tensor)), **options))
    with hotset.cache(Segmentation(), memory="4MiB", transform=make(A, to_tensor)) as cached:
        assert [row.cached for row in cached.plan.rows[1:]].count(True) == CHAINS[make]
        assert batches(hotset.DataLoader(cached, **options)) == expected
        assert cached.stats().hits == 12


def test_a_class_of_the_users_with_a_call_of_its_own_gets_the_sample() -> None:
    A = need("albumentations")

    class OfSamples(A.Compose):  # type: ignore[misc, name-defined]
        def __call__(self, sample: dict[str, Any]) -> Any:
            made = super().__call__(image=sample["image"])
            return {**sample, "image": made["image"]}

    chain = OfSamples([A.Resize(32, 32)])
    expected = chain(Segmentation()[3])["image"]
    with hotset.cache(Segmentation(), memory="4MiB", transform=chain) as cached:
        assert np.array_equal(cached[3]["image"], expected)


def test_what_albumentations_raises_is_the_users_to_see() -> None:
    A = need("albumentations")
    with pytest.raises(ValueError, match="name"):
        hotset.cache(Segmentation(), memory="4MiB", transform=A.Compose([A.Resize(8, 8)], strict=True))


@pytest.mark.parametrize("workers", rarely([0, 2], 2))
def test_a_dataset_that_calls_a_chain_with_nothing_random_in_it_is_cached(workers: int) -> None:
    """Such a Compose draws whether it is applied, and nothing depends on that."""
    A, to_tensor = need("albumentations"), need("albumentations.pytorch").ToTensorV2
    chain = A.Compose([A.Resize(32, 32), A.Compose([A.Normalize()]), to_tensor()])
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    expected = batches(torch.utils.data.DataLoader(Segmentation(chain), **options))
    with hotset.cache(Segmentation(chain), memory="4MiB") as cached:
        assert batches(hotset.DataLoader(cached, **options)) == expected
        assert cached.stats().cached == 12


class OfDict(Segmentation):
    """Returns what its chain returns."""

    def __getitem__(self, index: int) -> Any:
        made = self.read(index)
        return self.aug(image=made["image"], mask=made["mask"])


class OfTwo(Segmentation):
    """Takes what it needs out of what its chain returns."""

    def __getitem__(self, index: int) -> Any:
        made = self.read(index)
        augmented = self.aug(image=made["image"], mask=made["mask"])
        return augmented["image"], augmented["mask"], index


class OfViews(Segmentation):
    """Calls its chain for each of two views."""

    def __getitem__(self, index: int) -> Any:
        image = self.read(index)["image"]
        return [self.aug(image=image)["image"] for _ in range(2)], index


class SomeWithoutMask(Segmentation):
    """A few pictures have no mask."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        made = self.read(index)
        if index in (5, 17, 29):
            return self.aug(image=made["image"])["image"], np.zeros((16, 16), np.uint8)
        augmented = self.aug(image=made["image"], mask=made["mask"])
        return augmented["image"], augmented["mask"]


class Chooses(Segmentation):
    """Has two chains, and calls one."""

    def __init__(self, chain: Any) -> None:
        super().__init__()
        self.train, self.for_training, self.for_tests = True, chain, need("albumentations").Compose([])

    def __getitem__(self, index: int) -> Any:
        chain = self.for_training if self.train else self.for_tests
        return chain(image=self.read(index)["image"])["image"]


KINDS = (Segmentation, OfDict, OfTwo, OfViews, SomeWithoutMask, Chooses)


@pytest.mark.parametrize(
    ("kind", "workers"),
    rarely(itertools.product(KINDS, [0, 2]), *((kind, 2) for kind in KINDS if kind is not OfTwo)),
)
def test_the_chain_that_a_dataset_calls_is_cut_before_its_first_random_transform(
    kind: type[Segmentation], workers: int
) -> None:
    A = need("albumentations")

    def read(dataset: Any, loader: Any) -> list[Any]:
        torch.manual_seed(1)
        made = loader(dataset, batch_size=4, shuffle=True, num_workers=workers)
        return [list(made) for _ in range(3)]

    def chain() -> Any:
        return A.Compose([A.Resize(32, 32), A.RandomCrop(16, 16), A.HorizontalFlip()], seed=3)

    expected = read(kind(chain()), torch.utils.data.DataLoader)
    with recorded(), hotset.cache(kind(chain()), memory="4MiB") as cached:
        assert [row.name for row in cached.plan.rows if row.cached] == [kind.__name__, "Resize"]
        equal_batches(read(cached, hotset.DataLoader), expected)
        assert cached.stats().hits


@pytest.mark.parametrize("seeded_by", ["worker", "epoch"])
def test_a_chain_that_is_seeded_anew_draws_what_it_draws_without_a_cache(seeded_by: str) -> None:
    A = need("albumentations")

    def seed(_: int) -> None:
        chain = get_worker_info().dataset.aug  # type: ignore[union-attr]
        chain.set_random_state(np.random.default_rng(5), random.Random(5))

    def read(dataset: Any, loader: Any) -> list[Any]:
        torch.manual_seed(1)
        workers = {"num_workers": 1, "worker_init_fn": seed} if seeded_by == "worker" else {}
        made, found = loader(dataset, batch_size=4, shuffle=True, **workers), []
        for epoch in range(3):
            if not workers:
                dataset.aug.set_random_seed(epoch)
            found.append(list(made))
        return found

    def chain() -> Any:
        return A.Compose([A.Resize(32, 32), A.RandomCrop(16, 16), A.HorizontalFlip()], seed=3)

    expected = read(OfTwo(chain()), torch.utils.data.DataLoader)
    with recorded(), hotset.cache(OfTwo(chain()), memory="4MiB") as cached:
        equal_batches(read(cached, hotset.DataLoader), expected)


@pytest.mark.parametrize("why", ["boxes", "further"])
def test_a_random_chain_that_cannot_be_cut_is_refused(why: str) -> None:
    A = need("albumentations")

    class Further(Segmentation):
        def __getitem__(self, index: int) -> Any:
            made = super().__getitem__(index)
            return made["image"], made["mask"] + (why == "further")

    boxes = {"bbox_params": A.BboxParams("coco", label_fields=[])} if why == "boxes" else {}
    with pytest.raises(hotset.NotCacheable, match="processes the results of its aug further"):
        hotset.cache(Further(A.Compose([A.Resize(32, 32), A.Transpose()], **boxes)), memory="4MiB")


def test_a_generator_that_a_chain_shares_with_its_dataset_counts() -> None:
    A = need("albumentations")

    class Sharing(Segmentation):
        def __init__(self) -> None:
            self.rng = random.Random(7)
            chain = A.Compose([A.Resize(32, 32)])
            chain.set_random_state(np.random.default_rng(7), self.rng)
            super().__init__(chain)

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.rng.random()
            return super().__getitem__(index)

    with pytest.raises(hotset.NotCacheable, match=r"Sharing\.rng"):
        hotset.cache(Sharing(), memory="4MiB")
