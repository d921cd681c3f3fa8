"""Volumes in NIfTI files, MONAI's transforms, and two ways to keep a window of them: hotset's and MONAI's.

A volume's image is noise; its label holds each voxel's place, so that a random crop tells where it was cut,
and can be compared with the original there. Loading and scaling are deterministic, the crop is live.

MONAI's ``SmartCacheDataset`` is used as its documentation says: ``start()`` before the first epoch,
``update_cache()`` before every later one, ``shutdown()`` at the end, workers that do not persist, because
with others it does not work. It is given what served it best: as many threads as the loader has workers, no
copies of cached items (``copy_cache=False``, as the crop does not write to them), torch's collate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, get_worker_info

from benchmarks.peers import Epoch, closing
from benchmarks.truth import WrongData

__all__ = ["BATCH", "RATE", "VolumeTruth", "monai_window", "plain", "running_window", "volumes", "write"]

RATE = 0.1
BATCH = 2
_KEYS = ("image", "label")
_LOW, _HIGH = -1000, 1000

Item = dict[str, Any]


def write(folder: Path, count: int, side: int) -> list[Item]:
    """Write ``count`` volumes of ``(side, side, side * 3 // 4)`` voxels; return their paths and numbers."""
    import nibabel

    shape = (side, side, side * 3 // 4)
    places = nibabel.Nifti1Image(np.arange(np.prod(shape), dtype=np.int32).reshape(shape), np.eye(4))
    items = []
    for number in range(count):
        noise = np.random.default_rng(number).integers(_LOW, _HIGH, shape, dtype=np.int16)
        item = {key: str(folder / f"{key}{number}.nii") for key in _KEYS}
        nibabel.save(nibabel.Nifti1Image(noise, np.eye(4)), item["image"])
        nibabel.save(places, item["label"])
        items.append({**item, "number": number})
    return items


def volumes(items: Sequence[Item], crop: int) -> Dataset[Any]:
    """The dataset without a cache: dicts of ``image`` and ``label``, float32 crops, and ``number``."""
    from monai.data.dataset import Dataset as MonaiDataset

    made: Dataset[Any] = MonaiDataset(items, _chain(crop))
    return made


def _chain(crop: int) -> Any:
    from monai import transforms as mt

    return mt.Compose(
        [
            mt.LoadImaged(_KEYS),
            mt.EnsureChannelFirstd(_KEYS),
            mt.ScaleIntensityRanged("image", _LOW, _HIGH, 0, 1),
            mt.EnsureTyped(_KEYS, track_meta=False),
            mt.RandSpatialCropd(_KEYS, (crop, crop, crop), random_size=False),
            mt.EnsureTyped(_KEYS, track_meta=False),
        ]
    )


def _seed_crops(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = getattr(info.dataset, "dataset", info.dataset)
    dataset.transform.set_random_state(info.seed % 2**32)


def plain(items: Sequence[Item], crop: int, workers: int) -> Epoch:
    """torch's DataLoader, no cache."""
    made = DataLoader(
        volumes(items, crop),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_seed_crops,
    )
    return lambda: made


def running_window(stack: ExitStack, cached: Any, workers: int) -> Epoch:
    """hotset.DataLoader over a window."""
    from hotset import DataLoader as HotsetLoader

    made = HotsetLoader(
        cached,
        BATCH,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_seed_crops,
    )
    return closing(stack, made)


def monai_window(
    stack: ExitStack, items: Sequence[Item], crop: int, resident: int, workers: int
) -> tuple[Epoch, Any]:
    """MONAI's SmartCacheDataset under torch's DataLoader; the dataset comes along."""
    from monai.data.dataset import SmartCacheDataset

    window = SmartCacheDataset(
        items,
        _chain(crop),
        replace_rate=RATE,
        cache_num=resident,
        num_init_workers=max(workers, 1),
        num_replace_workers=max(workers, 1),
        progress=False,
        copy_cache=False,
    )
    stack.callback(window.shutdown)
    loader = DataLoader(window, BATCH, shuffle=True, num_workers=workers, worker_init_fn=_seed_crops)
    begin = closing(stack, loader)

    def epoch() -> Iterator[Any]:
        if window.is_started():
            window.update_cache()
        else:
            window.start()
        return iter(begin())

    return epoch, window


class VolumeTruth:
    """Batches of :func:`volumes`' samples, compared with what lies in the files."""

    def __init__(self, items: Sequence[Item], crop: int) -> None:
        self._items = items
        self._crop = crop
        self.size = len(items)

    def check(self, batch: Any) -> list[int]:
        import nibabel

        ids: list[int] = batch["number"].tolist()
        for image, label, i in zip(batch["image"].numpy(), batch["label"].numpy(), ids, strict=True):
            original = np.asarray(nibabel.load(self._items[i]["image"]).dataobj)
            begin = np.unravel_index(int(label[0, 0, 0, 0]), original.shape)
            cut = original[tuple(slice(first, first + self._crop) for first in begin)]
            scaled = (cut.astype(np.float32) - _LOW) / (_HIGH - _LOW)
            if image.shape != (1, *cut.shape) or not np.allclose(image[0], scaled, rtol=0, atol=1e-6):
                raise WrongData(f"volume {i} is not a crop of its original")
        return ids
