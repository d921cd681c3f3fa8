"""MONAI's own DataLoader over a cached dataset, and the inverse of cached transforms in another process.

The loader seeds random transforms by walking through the dataset.
"""

from __future__ import annotations

import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal_batches, rarely
from library_tables import need

import hotset
from hotset.session import sessions
from hotset.store.leaves import codecs

KEYS = ["image"]
VOLUMES = [
    {"image": np.random.default_rng(number).normal(size=(6, 6, 6)).astype(np.float32)} for number in range(8)
]


def volumes() -> Any:
    """Volumes with random crops, flips and noise."""
    transforms = need("monai.transforms")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chain = transforms.Compose(
            [
                transforms.EnsureChannelFirstd(KEYS, channel_dim="no_channel"),
                transforms.ScaleIntensityd(KEYS),
                transforms.RandSpatialCropd(KEYS, (4, 4, 4), random_size=False),
                transforms.RandFlipd(KEYS, prob=0.5),
                transforms.RandGaussianNoised(KEYS, prob=0.5),
            ]
        )
        return need("monai.data").Dataset(VOLUMES, chain)


def epochs(dataset: Any, workers: int) -> list[Any]:
    need("monai.utils").set_determinism(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = need("monai.data").DataLoader(dataset, batch_size=2, shuffle=True, num_workers=workers)
        return [batch["image"].as_tensor() for _ in range(2) for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_it_seeds_what_it_would_seed_without_a_cache(workers: int) -> None:
    expected = epochs(volumes(), workers)
    with hotset.cache(volumes(), memory="1MiB") as cached:
        assert cached.plan.live == ("RandSpatialCropd", "RandFlipd", "RandGaussianNoised")
        equal_batches(epochs(cached, workers), expected)


def flipped() -> Any:
    transforms = need("monai.transforms")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chain = transforms.Compose(
            [
                transforms.EnsureChannelFirstd(KEYS, channel_dim="no_channel"),
                transforms.Flipd(KEYS, spatial_axis=0),
                transforms.Orientationd(KEYS, "LPS", labels=None),
            ]
        )
        return need("monai.data").Dataset(VOLUMES, chain)


def inverted(session: str) -> tuple[int, list[Any]]:
    """How many samples are read, and what the inverse of the chain makes of what the cache returns."""
    dataset = flipped()
    with hotset.cache(dataset, session=session) as cached:
        found = [dataset.transform.inverse(cached[i])["image"].as_tensor() for i in range(len(VOLUMES))]
        return cached.stats().misses, found


def has_addresses_of_its_own() -> None:
    """As a job that is started has; a forked process is taken to have its parent's."""
    vars(codecs)["_ADDRESS_SPACE"] = 1


# MONAI takes five seconds to import.
@pytest.mark.parametrize("method", rarely(["fork", "spawn"], "spawn"))
def test_a_later_job_finds_the_cache_and_inverts_its_transforms(method: str) -> None:
    session = sessions.create("volumes", memory=1 << 20)
    with ProcessPoolExecutor(1, multiprocessing.get_context(method), has_addresses_of_its_own) as pool:
        assert pool.submit(inverted, "volumes").result()[0] == len(VOLUMES)
    misses, found = inverted("volumes")
    assert misses == len(VOLUMES)  # counted for all jobs: this one has read no more
    equal_batches(found, [torch.from_numpy(volume["image"])[None] for volume in VOLUMES])
    sessions.destroy(session)
