"""Molecules: each sample has another number of atoms. Padded batches, and ragged ones.

Run it: python examples/variable_shapes.py
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

import hotset


class Molecules(Dataset[dict[str, object]]):
    """Positions of a few to a few dozen atoms, and a name."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> dict[str, object]:
        generator = torch.Generator().manual_seed(index)
        atoms = 3 + index % 40
        return {"name": f"molecule {index}", "positions": torch.randn(atoms, 3, generator=generator)}


def main() -> None:
    cached = hotset.cache(Molecules(), memory="16MiB")
    padded = hotset.DataLoader(cached, batch_size=32, collate_fn=hotset.collate.pad(float("nan")))
    for batch in padded:
        positions = batch["positions"]
        assert positions.shape[0] == len(batch["name"])
    print("padded:", tuple(positions.shape))

    ragged = hotset.DataLoader(cached, batch_size=32, collate_fn=hotset.collate.ragged)
    for batch in ragged:
        values, offsets = batch["positions"].packed()
        assert values.shape == (int(offsets[-1]), 3)
    print("ragged:", len(batch["positions"]), "molecules,", tuple(values.shape), "atoms in all")
    print(cached.stats())


if __name__ == "__main__":
    main()
