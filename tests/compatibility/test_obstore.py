"""obstore over an object server: requests in threads of its own, which no fork keeps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import hotset
from hotset.determinism.fingerprint.fingerprint import fingerprint

from .harness import SPAWNED, Compatibility, Program, numbers_of, write_objects
from .object_server import served

obstore = pytest.importorskip("obstore", reason="the programs over obstore need obstore")
stores = pytest.importorskip("obstore.store", reason="the programs over obstore need obstore")

pytestmark = pytest.mark.compatibility


class Objects(Dataset[Any]):
    def __init__(self, address: str) -> None:
        self.store = stores.HTTPStore.from_url(address, client_options={"allow_http": True})
        self.length = int(bytes(obstore.get(self.store, "count").bytes()))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return numbers_of(obstore.get(self.store, f"{index:05}.bin").bytes())


class Versioned(Objects):
    def __hotset_version__(self) -> list[Any]:
        return [obstore.head(self.store, f"{number:05}.bin")["e_tag"] for number in range(len(self))]


class Lazy(Objects):
    """Makes its store when it reads first, so that this process has no thread of the library's."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.store: Any = None
        self.length = 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.store is None:
            self.store = stores.HTTPStore.from_url(self.address, client_options={"allow_http": True})
        return super().__getitem__(index)


class TestObstore(Compatibility):
    programs = [
        Program(
            "obstore over HTTP, 10 ms a request",
            write_objects,
            Objects,
            samples=100,
            place=served,
            loader=SPAWNED,
            needs='`multiprocessing_context="spawn"` where there are workers',
        ),
        Program(
            "obstore over HTTP, 10 ms a request, `concurrency=16`",
            write_objects,
            Objects,
            samples=200,
            place=served,
            loader=SPAWNED,
            cache={"concurrency": 16},
            needs='`multiprocessing_context="spawn"` where there are workers',
        ),
    ]


def test_an_object_that_has_changed_is_another_dataset(tmp_path: Path) -> None:
    write_objects(tmp_path, 4)
    with served(tmp_path, 0.0) as address:
        before = fingerprint(Versioned(address))
        assert not before.unknowns
        assert fingerprint(Versioned(address)).digest == before.digest
        os.utime(tmp_path / "00002.bin", ns=(1, 1))
        assert fingerprint(Versioned(address)).digest != before.digest


def test_forked_workers_would_wait_for_threads_and_the_user_is_told(tmp_path: Path) -> None:
    """Planning reads in the main process; with torch's loader nothing is read there.

    The last test: after a fork the library may wait for its threads for ever in this process, too.
    """
    write_objects(tmp_path, 4)
    with served(tmp_path, 0.0) as address, hotset.cache(Lazy(address), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=2, num_workers=1, timeout=2)
        with (
            pytest.warns(hotset.HotsetWarning, match='multiprocessing_context="spawn"'),
            pytest.raises(RuntimeError, match="timed out"),
        ):
            list(loader)
