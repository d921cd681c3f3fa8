"""An object of your own in a sample: two functions make it cacheable.

Run it: python examples/own_types.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

import hotset


class Box:
    """A box in a picture, by two corners."""

    def __init__(self, corners: torch.Tensor, kind: str) -> None:
        self.corners = corners
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and torch.equal(self.corners, other.corners) and self.kind == other.kind


hotset.register_codec(Box, lambda box: (box.corners, box.kind), lambda tree: Box(*tree))


class Boxes(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"box": Box(torch.tensor([0, 0, index, index]), "cat" if index % 2 else "dog"), "id": index}


def corners(samples: list[dict[str, Any]]) -> torch.Tensor:
    """A collate function of one's own works as with torch's loader."""
    return default_collate([sample["box"].corners for sample in samples])


def main() -> None:
    cached = hotset.cache(Boxes(), memory="1MiB")
    for batch in hotset.DataLoader(cached, batch_size=25, collate_fn=corners):
        assert batch.shape == (25, 4)
    assert cached[7]["box"] == Boxes()[7]["box"]
    print(cached.stats())


if __name__ == "__main__":
    main()
