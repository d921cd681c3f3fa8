"""timm's create_loader sets the transform of a cached dataset: batches equal those without the cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import all_pairs, equal_batches, recorded
from PIL import Image

import hotset

timm_data = pytest.importorskip("timm.data")

COUNT = 13

# timm leaves it to the garbage collection to close its files.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("jpegs")
    draws = np.random.default_rng(3)
    for number in range(COUNT):
        kind = root / f"class{number % 3}"
        kind.mkdir(exist_ok=True)
        coarse = draws.integers(0, 255, (5 + number % 2, 6, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((60, 50 + number)).save(kind / f"{number:02}.jpg", quality=90)
    return root


def epochs(dataset: Any, **how: Any) -> list[Any]:
    """The batches of two epochs and the random states after each, through timm's create_loader."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    loader = timm_data.create_loader(
        dataset, input_size=(3, 32, 32), batch_size=4, device=torch.device("cpu"), **how
    )
    found: list[Any] = []
    for _ in range(2):
        found += [[x.clone(), y.clone()] for x, y in loader]
        found.append([torch.get_rng_state(), torch.tensor(random.random()), torch.tensor(np.random.rand())])
    return found


@pytest.mark.parametrize(
    ("is_training", "prefetcher", "workers"), all_pairs([True, False], [False, True], [0, 2])
)
def test_create_loader_gives_the_same_batches_as_without_the_cache(
    folder: Path, is_training: bool, prefetcher: bool, workers: int
) -> None:
    how: dict[str, Any] = {
        "is_training": is_training,
        "use_prefetcher": prefetcher,
        "num_workers": workers,
        "persistent_workers": False,
        "re_prob": 0.3 if is_training else 0.0,
        "auto_augment": "rand-m9-mstd0.5-inc1" if is_training and prefetcher else None,
    }
    expected = epochs(timm_data.ImageDataset(str(folder)), **how)
    with recorded() as told, hotset.cache(timm_data.ImageDataset(str(folder)), memory="64MiB") as cached:
        found = epochs(cached, **how)
        stats, plan = cached.stats(), cached.plan
    assert [w for w in told if w.category is not ResourceWarning] == []
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        equal_batches(one, other)
    assert stats.cached >= 12, "an epoch of training drops the last, smaller batch"
    assert stats.hits >= 11, "of the second epoch only one sample may be another"
    if is_training:
        assert any("RandomResizedCrop" in name for name in plan.live), "its draws are not frozen"
        assert plan.cached == ("ImageDataset",)
    else:
        assert not plan.live, "resize, crop and conversion are cached, too"
        assert stats.cached == COUNT


def test_batches_for_mixed_splits_are_equal(folder: Path) -> None:
    """timm's AugMixDataset sets the first of three transforms on the dataset that it wraps."""

    def wrapped(dataset: Any) -> Any:
        return timm_data.AugMixDataset(dataset, num_splits=2)

    how: dict[str, Any] = {
        "is_training": True,
        "num_aug_splits": 2,
        "use_prefetcher": True,
        "num_workers": 0,
        "auto_augment": "augmix-m5-w4-d2",
    }
    expected = epochs(wrapped(timm_data.ImageDataset(str(folder))), **how)
    with hotset.cache(timm_data.ImageDataset(str(folder)), memory="64MiB") as cached:
        found = epochs(wrapped(cached), **how)
    for one, other in zip(found, expected, strict=True):
        equal_batches(one, other)
