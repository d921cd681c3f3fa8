"""A program that has called ``torch.set_default_device("cuda")``, on a machine without one.

Every tensor that is made without a device is then one on the GPU: those that ``default_collate`` makes of
numbers and arrays, and, if hotset does not name the CPU, those in which it looks for bytes. No device of a
CPU-only torch can do what torch's loader does there (it draws a seed). So a mode stands in for the default
device: what torch's collating makes is on the device ``meta``, and a tensor that hotset makes without naming
a device fails the test. Only what torch's loader draws is drawn as torch draws it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import rarely
from live import draw_torch
from samples import clip_and_label, image_and_label, mapping, number, poster_and_label, text
from sources import Samples, Transformed
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import _utils as loader_utils

import hotset

N = 22
HOTSET = str(Path(hotset.__file__).parent)


class OnAnotherDevice(TorchFunctionMode):
    """Stands in for a default device; ``unnamed`` are the lines of hotset that left the device out."""

    def __init__(self) -> None:
        super().__init__()
        self.unnamed: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            caller = sys._getframe(1)
            file = caller.f_code.co_filename
            if file == loader_utils.collate.__file__:
                kwargs["device"] = "meta"
            elif file.startswith(HOTSET) and not file.endswith("batch_order.py"):  # which draws as torch does
                self.unnamed.add(f"{file}:{caller.f_lineno}")
        return func(*args, **kwargs)


@pytest.fixture
def default_device() -> Iterator[None]:
    with OnAnotherDevice() as mode:
        yield
    assert not mode.unnamed


def numbers_and_array(index: int) -> Any:
    return {"index": index, "half": index / 2, "array": np.full((3, 2), index), "text": f"{index}"}


def picture(index: int) -> torch.Tensor:
    return poster_and_label(index)[0]


def described(batch: Any) -> Any:
    """Devices, dtypes, shapes and layout of a batch, and its values, where it has any."""
    if isinstance(batch, torch.Tensor):
        values = batch.tolist() if batch.device.type == "cpu" else None
        return str(batch.device), batch.dtype, batch.shape, batch.stride(), values
    if isinstance(batch, dict):
        return {key: described(part) for key, part in batch.items()}
    return [described(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


@pytest.mark.usefixtures("default_device")
class TestDefaultDevice:
    @pytest.mark.parametrize(
        ("make", "live"),
        rarely(
            itertools.product(
                [image_and_label, number, mapping, text, numbers_and_array, poster_and_label, clip_and_label],
                [False, True],
            ),
            *((make, True) for make in (number, mapping, text, numbers_and_array)),
        ),
    )
    def test_batches_are_where_torch_has_them(self, make: Callable[[int], Any], live: bool) -> None:
        suffix: list[Callable[[Any], Any]] = [draw_torch] if live else []

        def recorded(loader: DataLoader[Any]) -> list[Any]:
            torch.manual_seed(3)
            return [[described(batch) for batch in loader] for _ in range(3)]

        options: dict[str, Any] = {"batch_size": 8, "shuffle": True}
        expected = recorded(DataLoader(Transformed(Samples(make, N), suffix), **options))
        with hotset.cache(Samples(make, N), transform=suffix or None, memory="64MiB") as cached:
            assert recorded(hotset.DataLoader(cached, **options)) == expected

    @pytest.mark.parametrize("collate", [hotset.collate.pad(0), hotset.collate.ragged])
    def test_samples_of_different_shapes(self, collate: Callable[[list[Any]], Any]) -> None:
        def make(index: int) -> torch.Tensor:
            return torch.full((1 + index % 3, 2), index, device="cpu")

        with hotset.cache(Samples(make, N), memory="1MiB") as cached:
            for _ in range(2):
                for number_, batch in enumerate(hotset.DataLoader(cached, batch_size=3, collate_fn=collate)):
                    assert [row.flatten()[0].item() for row in batch] == [*range(N)][3 * number_ :][:3]

    def test_validation_in_inference_mode(self) -> None:
        """Of pictures alone: labels, which torch puts on the device, are not gathered."""
        with hotset.cache(Samples(picture, N), memory="64MiB") as cached:
            loader = hotset.DataLoader(cached, batch_size=8)
            for _ in range(2):
                with torch.inference_mode():
                    assert all(pictures.is_inference() for pictures in loader)

    def test_filling_a_window_and_a_shared_cache(self) -> None:
        with hotset.cache(Samples(image_and_label, N), memory="1MiB") as cached:
            cached.fill()
            assert cached.check() == []
        window = hotset.Window(resident=8, replace=0.25)
        with hotset.cache(Samples(image_and_label, N), memory="1MiB", window=window) as moving:
            for _ in range(2):
                assert len(list(hotset.DataLoader(moving, batch_size=4))) == 2
        shared = hotset.SharedCache(0.001, 4, (2, 2), dtype=torch.float32)
        shared.set_slot(1, torch.ones(2, 2, device="cpu"))
        assert shared.get_slot(1).device.type == "cpu"

    def test_a_stream(self) -> None:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                return map(image_and_label, range(N))

        with hotset.cache(Stream(), memory="1MiB") as cached:
            for _ in range(3):
                assert sum(len(images) for images, _ in hotset.DataLoader(cached, batch_size=4)) == N
