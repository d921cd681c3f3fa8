"""fsspec over an object server: a sample is a request, and a process may wait for several at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import hotset
from hotset.determinism.fingerprint.fingerprint import fingerprint

from .harness import Compatibility, Program, numbers_of, write_objects
from .object_server import served

fsspec = pytest.importorskip("fsspec", reason="the programs over fsspec need fsspec")
pytest.importorskip("aiohttp", reason="the programs over fsspec need aiohttp")

pytestmark = pytest.mark.compatibility


class Objects(Dataset[Any]):
    """Makes its file system when it reads first: one of fsspec's for HTTP is of one process."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.files: Any = None
        self.length = int(fsspec.filesystem("http").cat_file(f"{address}/count"))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.files is None:
            self.files = fsspec.filesystem("http")
        return numbers_of(self.files.cat_file(f"{self.address}/{index:05}.bin"))


class Files(Dataset[Any]):
    """Holds fsspec's files, which hotset asks for their versions."""

    def __init__(self, address: str) -> None:
        self.files = [fsspec.open(f"{address}/{number:05}.bin") for number in range(4)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.files[index] as file:
            return numbers_of(file.read())


class TestFsspec(Compatibility):
    programs = [
        Program(
            "fsspec over HTTP, 10 ms a request, file system made when it is read first",
            write_objects,
            Objects,
            samples=300,
            place=served,
        ),
        Program(
            "fsspec over HTTP, 10 ms a request, `concurrency=16`",
            write_objects,
            Objects,
            samples=800,
            place=served,
            cache={"concurrency": 16},
        ),
    ]


def test_an_object_that_has_changed_is_another_dataset(tmp_path: Path) -> None:
    write_objects(tmp_path, 4)
    with served(tmp_path) as address:
        before = fingerprint(Files(address))
        assert not before.unknowns
        assert fingerprint(Files(address)).digest == before.digest
        os.utime(tmp_path / "00002.bin", ns=(1, 1))
        assert fingerprint(Files(address)).digest != before.digest
        with hotset.cache(Files(address), memory="1MiB") as cached:
            assert float(cached[3][0, 0]) == 3
