"""A cache that a dataset fills and reads by hand, as with stocaching: change one import.

Run it: python examples/shared_cache.py
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

from hotset import SharedCache  # instead of: from stocaching import SharedCache


class Pictures(Dataset[torch.Tensor]):
    """Pictures that are slow to load, each loaded once for all workers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.cache = SharedCache(size_limit_gib=1, dataset_len=count, data_dims=(3, 64, 64))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        picture = self.cache.get_slot(index)
        if picture is None:  # not there yet, or without a slot
            picture = load(index)
            self.cache.set_slot(index, picture)
        return picture


def load(index: int) -> torch.Tensor:
    return torch.full((3, 64, 64), index % 256, dtype=torch.uint8)


def main() -> None:
    pictures = Pictures(500)
    for epoch in range(2):
        before = int((pictures.cache.aux_array == 1).sum())
        for batch in DataLoader(pictures, batch_size=50, shuffle=True, num_workers=2):
            assert batch.shape == (50, 3, 64, 64)
        print(f"epoch {epoch + 1}: {before} of {len(pictures.cache)} pictures were cached before it")

    # What stocaching has no way to hold: molecules of different sizes, in half precision.
    molecules = SharedCache(size_limit_gib=0.01, dataset_len=100, data_dims=None, dtype=torch.bfloat16)
    for index in range(100):
        molecules[index] = torch.zeros(3 + index % 20, 3, dtype=torch.bfloat16)
    print("molecules:", molecules[0].shape, molecules[19].shape)


if __name__ == "__main__":
    main()
