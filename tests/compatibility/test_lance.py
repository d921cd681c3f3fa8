"""Lance: rows taken from a dataset on disk, in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from .harness import SPAWNED, Compatibility, Program

lance = pytest.importorskip("lance", reason="the programs over Lance need pylance")
arrow = pytest.importorskip("pyarrow", reason="the programs over Lance need pyarrow")

# Lance warns in each forked process.
pytestmark = [pytest.mark.compatibility, pytest.mark.filterwarnings("ignore:lance is not fork-safe")]


def write(folder: Path, count: int) -> None:
    values = arrow.array(np.random.default_rng(0).random(count * 64, np.float32))
    table = arrow.table(
        {"features": arrow.FixedSizeListArray.from_arrays(values, 64), "label": list(range(count))}
    )
    lance.write_dataset(table, str(folder / "samples.lance"))


class Rows(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "samples.lance")
        self.length = lance.dataset(self.path).count_rows()
        self.rows: Any = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        if self.rows is None:
            self.rows = lance.dataset(self.path)
        taken = self.rows.take(indices)
        features = np.stack(taken["features"].to_numpy(zero_copy_only=False))
        return [
            {"features": torch.from_numpy(row.copy()), "label": label}
            for row, label in zip(features, taken["label"].to_pylist(), strict=True)
        ]


class TestLance(Compatibility):
    programs = [
        Program(
            "Lance, `take` in `__getitems__`, spawned workers",
            write,
            Rows,
            samples=2000,
            loader=SPAWNED,
        )
    ]
