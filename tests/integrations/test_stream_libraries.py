"""Streams of libraries, recorded: WebDataset, Hugging Face's streaming, torchdata's nodes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import equal_batches, recorded
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset

import hotset

# Readers of tar files leave them open until the garbage collector comes.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
N = 48


def pixels(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture))


def flipped(sample: Any) -> Any:
    picture, label = sample
    return picture.flip(0) if random.random() < 0.5 else picture, label


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"twice": row["x"] * 2}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six shards of eight pictures, with their numbers as labels."""
    wds = pytest.importorskip("webdataset")
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(6):
        with wds.TarWriter(f"{folder}/{shard}.tar") as writer:
            for number in range(8 * shard, 8 * shard + 8):
                noise = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
                writer.write({"__key__": f"{number:04d}", "png": Image.fromarray(noise), "cls": number})
    return f"{folder}/{{0..5}}.tar"


def pictures(shards: str, shuffle: int = 0) -> Any:
    wds = pytest.importorskip("webdataset")
    stream = wds.WebDataset(shards, shardshuffle=shuffle or False)
    stream = stream.shuffle(shuffle) if shuffle else stream
    return stream.decode("pil").to_tuple("png", "cls").map_tuple(pixels, int)


def labels(batches: Any) -> list[int]:
    return [label for batch in batches for label in batch[-1].tolist()]


class TestWebDataset:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_the_first_pass_is_torchs(self, shards: str, workers: int) -> None:
        expected = list(DataLoader(pictures(shards), batch_size=4, num_workers=workers))
        with hotset.cache(pictures(shards), memory="10MiB") as stream:
            loader = hotset.DataLoader(stream, batch_size=4, num_workers=workers)
            equal_batches(list(loader), expected)
            assert stream.recorded
            assert sorted(labels(loader)) == list(range(N))

    def test_shuffled_shards_are_one_content_in_a_session_too(self, shards: str) -> None:
        one, other = (hotset.cache(pictures(shards, 100), memory="10MiB") for _ in range(2))
        assert one.plan.fingerprint == other.plan.fingerprint
        assert "its shuffles were left out" in str(one.plan), "which draw"
        first = labels(hotset.DataLoader(one, batch_size=4))
        assert sorted(first) == list(range(N))
        assert first != sorted(first)
        with pytest.warns(hotset.HotsetWarning, match="shuffle=True"):
            assert labels(hotset.DataLoader(one, batch_size=4)) == first
        one.close()
        other.close()

    @pytest.mark.parametrize("seed", [None, 5])
    def test_a_shuffle_without_a_seed_is_warned_of_as_a_pass_goes_on(
        self, shards: str, seed: int | None
    ) -> None:
        shuffled = pictures(shards).shuffle(8, seed=seed)
        with warnings.catch_warnings(record=True) as told, hotset.cache(shuffled, memory="10MiB") as stream:
            warnings.simplefilter("always")
            loader, other = (hotset.DataLoader(stream, batch_size=4) for _ in range(2))
            batches = iter(loader)
            consumed = labels([next(batches)])
            other.load_state_dict(loader.state_dict())
            rest = labels(other)
        assert any("may give some samples twice" in str(each.message) for each in told) is (seed is None)
        assert seed is None or sorted(consumed + rest) == list(range(N))

    def test_random_transforms_within_it_are_refused(self, shards: str) -> None:
        with pytest.raises(hotset.NotCacheable, match=r"transform=\[...\]"):
            hotset.cache(pictures(shards, 100).map(flipped), memory="10MiB")
        with hotset.cache(
            pictures(shards), transform=hotset.nondeterministic(flipped), memory="10MiB"
        ) as stream:
            assert stream.plan.live == ("flipped",)
            assert sorted(labels(hotset.DataLoader(stream, batch_size=4))) == list(range(N))

    def test_batches_that_a_loader_makes_batches_of_are_said(self, shards: str) -> None:
        with (
            hotset.cache(pictures(shards).batched(4), memory="4MiB") as stream,
            pytest.warns(hotset.HotsetWarning, match="gives batches of 4 samples"),
        ):
            next(iter(hotset.DataLoader(stream, batch_size=2)))

    def test_a_pipeline_with_a_loader_of_its_own(self, shards: str) -> None:
        wds = pytest.importorskip("webdataset")
        expected = [*wds.WebLoader(pictures(shards), batch_size=4, num_workers=1)]
        with hotset.cache(
            wds.WebLoader(pictures(shards), batch_size=4, num_workers=1), memory="10MiB"
        ) as stream:
            loader = hotset.DataLoader(stream, batch_size=None)
            for _ in range(2):
                equal_batches([list(batch) for batch in loader], [list(batch) for batch in expected])


class TestHuggingFace:
    @pytest.fixture
    def rows(self) -> Callable[..., Any]:
        datasets = pytest.importorskip("datasets")
        # Its bars would start a thread that stays.
        pytest.importorskip("tqdm").tqdm.monitor_interval = 0
        table = {"x": list(range(N)), "text": [f"row {number} " * (number % 5) for number in range(N)]}
        return lambda shards=4: datasets.Dataset.from_dict(table).to_iterable_dataset(num_shards=shards)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_the_first_pass_is_torchs(self, rows: Callable[..., Any], workers: int) -> None:
        for make in (rows, lambda: rows().shuffle(seed=3, buffer_size=10).map(doubled).with_format("torch")):
            expected = list(DataLoader(make(), batch_size=4, num_workers=workers))
            with hotset.cache(make(), memory="10MiB") as stream:
                loader = hotset.DataLoader(stream, batch_size=4, shuffle=True, num_workers=workers)
                with recorded():
                    equal_batches(list(loader), expected)
                got = [x for batch in loader for x in batch["x"].tolist()]
                assert sorted(got) == list(range(N))

    def test_a_shuffle_by_epochs_that_recording_ends_is_said(self, rows: Callable[..., Any]) -> None:
        shuffled = rows().map(doubled).shuffle(seed=3, buffer_size=10)
        for stream in (rows(), rows(1), shuffled):
            orders = set()
            for epoch in range(3):  # newer versions shuffle shards by the epoch, in any stream
                stream.set_epoch(epoch)
                orders.add(tuple(row["x"] for row in stream))
            stream.set_epoch(0)
            with hotset.cache(stream, memory="10MiB") as cached:
                loader = hotset.DataLoader(cached, batch_size=4)
                with recorded() as warnings:
                    for epoch in range(3):
                        cached.set_epoch(epoch)
                        assert len(list(loader)) == N // 4
            told = ["shuffle=True" in str(each.message) for each in warnings]
            assert told == [True] * (len(orders) > 1)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_all_samples_come_in_each_epoch_where_a_part_fits(
        self, rows: Callable[..., Any], workers: int
    ) -> None:
        with recorded(), hotset.cache(rows(), memory=2000) as stream:
            for epoch in range(4):
                stream.set_epoch(epoch)
                loader = hotset.DataLoader(stream, batch_size=4, num_workers=workers)
                assert sorted(x for batch in loader for x in batch["x"].tolist()) == list(range(N))
            assert 0 < stream.stats().cached < N

    def test_ranks_have_one_content(self, rows: Callable[..., Any]) -> None:
        from datasets.distributed import split_dataset_by_node

        streams = [split_dataset_by_node(rows(), rank=rank, world_size=2) for rank in range(2)]
        plain = [[row["x"] for row in stream] for stream in streams]
        one, other = (hotset.cache(stream, memory="10MiB") for stream in streams)
        assert one.plan.fingerprint == other.plan.fingerprint
        numbers = [[row["x"] for row in stream] for stream in (one, other)]
        assert numbers == plain
        assert sorted(numbers[0] + numbers[1]) == list(range(N))
        one.close()
        other.close()


class Epochs(IterableDataset[Any]):
    """As a StreamingDataset of MosaicML's: shuffled by a count of epochs that all of its processes share."""

    def __init__(self) -> None:
        self.count = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.lock = threading.Lock()  # with which it cannot be copied

    @property
    def next_epoch(self) -> int:
        return int(self.count)

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self.count.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(N, generator=torch.Generator().manual_seed(self.next_epoch))
        self.next_epoch += 1
        yield from order.tolist()


@pytest.mark.filterwarnings("ignore:Epochs may give:hotset.HotsetWarning")
def test_a_look_at_a_stream_of_mosaicml_is_no_epoch_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Epochs, "__module__", "streaming.base.dataset")
    expected = list(DataLoader(Epochs(), batch_size=4))
    with hotset.cache(Epochs(), memory="1MiB", key="epochs") as stream:
        equal_batches(list(hotset.DataLoader(stream, batch_size=4)), expected)


class TestNodes:
    def test_nodes_of_torchdata_run_in_one_worker(self) -> None:
        nodes = pytest.importorskip("torchdata.nodes")
        made = nodes.Mapper(nodes.IterableWrapper(range(N)), lambda number: (torch.tensor([number]), number))
        with hotset.cache(made, memory="10MiB", key="nodes") as stream:
            loader = hotset.DataLoader(stream, batch_size=4, num_workers=2)
            assert labels(loader) == list(range(N))
            assert labels(loader) == list(range(N))
            assert stream.recorded


def test_a_stream_of_hugging_face_is_one_content_in_all_processes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"x": {number}}}\n' for number in range(20)))
    options = f"'json', data_files={str(rows)!r}, split='train', streaming=True, cache_dir={str(tmp_path)!r}"
    program = (
        f"import datasets, hotset\nstream = datasets.load_dataset({options})\n"
        "with hotset.cache(stream, memory='1MiB') as cached: print(cached.plan.fingerprint)\n"
    )
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    stream = datasets.load_dataset(
        "json", data_files=str(rows), split="train", streaming=True, cache_dir=str(tmp_path)
    )
    with hotset.cache(stream, memory="1MiB") as cached:
        assert done.stdout.strip() == cached.plan.fingerprint
