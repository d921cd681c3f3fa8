"""Parquet through pyarrow: a table in memory, and row groups that are read from the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from .harness import Compatibility, Program

arrow = pytest.importorskip("pyarrow", reason="the programs over Parquet need pyarrow")
parquet = pytest.importorskip("pyarrow.parquet", reason="the programs over Parquet need pyarrow")

pytestmark = pytest.mark.compatibility

ROWS = 16


def write(folder: Path, count: int) -> None:
    drawn = np.random.default_rng(0)
    table = arrow.table(
        {
            "features": list(drawn.random((count, 64), np.float32)),
            "text": [f"sample {number}" for number in range(count)],
        }
    )
    parquet.write_table(table, folder / "samples.parquet", row_group_size=ROWS)


def sample(row: dict[str, Any]) -> dict[str, Any]:
    return {"features": torch.tensor(row["features"]), "text": row["text"]}


class InMemory(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.table = parquet.read_table(folder / "samples.parquet")

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(self.table.slice(index, 1).to_pylist()[0])


class RowGroups(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.file = parquet.ParquetFile(folder / "samples.parquet")

    def __len__(self) -> int:
        return int(self.file.metadata.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = self.file.read_row_group(index // ROWS, use_threads=False)
        return sample(group.slice(index % ROWS, 1).to_pylist()[0])


class TestParquet(Compatibility):
    programs = [
        Program("Parquet through pyarrow, table in memory", write, InMemory, samples=4000),
        Program("Parquet through pyarrow, a row group read for each sample", write, RowGroups),
    ]
