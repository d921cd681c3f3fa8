"""Samples that are dicts go through albumentations as keywords, and are those without a cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from library_tables import need

import hotset


class Segmentation(torch.utils.data.Dataset[dict[str, Any]]):
    """Pictures with masks and names; with a chain, it calls the chain itself, as is done without hotset."""

    def __init__(self, aug: Any = None) -> None:
        self._aug = aug

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = np.random.default_rng(index).integers(0, 256, (40, 40, 3)).astype(np.uint8)
        mask, name = image[..., 0] // 64, f"{index}.png"
        if self._aug is None:
            return {"image": image, "mask": mask, "name": name}
        return {**self._aug(image=image, mask=mask), "name": name}


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", CHAINS)
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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_calls_a_chain_with_nothing_random_in_it_is_cached(workers: int) -> None:
    """Such a Compose draws whether it is applied, and nothing depends on that."""
    A, to_tensor = need("albumentations"), need("albumentations.pytorch").ToTensorV2
    chain = A.Compose([A.Resize(32, 32), A.Compose([A.Normalize()]), to_tensor()])
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    expected = batches(torch.utils.data.DataLoader(Segmentation(chain), **options))
    with hotset.cache(Segmentation(chain), memory="4MiB") as cached:
        assert batches(hotset.DataLoader(cached, **options)) == expected
        assert cached.stats().cached == 12


@pytest.mark.parametrize("random_part", ["HorizontalFlip", "OneOf", "p"])
def test_a_dataset_that_calls_a_random_chain_is_not(random_part: str) -> None:
    A = need("albumentations")
    parts, options = [A.Resize(32, 32)], {}
    if random_part == "HorizontalFlip":
        parts.append(A.HorizontalFlip())
    elif random_part == "OneOf":
        parts.append(A.OneOf([A.Normalize(), A.Transpose(p=1)], p=1))
    else:
        options["p"] = 0.9
    with pytest.raises(hotset.NotCacheable):
        hotset.cache(Segmentation(A.Compose(parts, **options)), memory="4MiB")


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
