"""What ``hotset.cache()`` takes before training begins: judging the chain, trying it, reading a few samples.

Ordinary chains of torchvision on JPEG files and of MONAI on volumes. Beside them what the same dataset takes
for eight readings, so that the machine's and the data's own speed can be told from ours.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import data, volumes
from benchmarks.harness import Outcome, compare
from benchmarks.operators import define_torchvision_operators
from benchmarks.settings import Settings
from benchmarks.suite.contest import speed

__all__ = ["planning"]

_SECONDS = 2.0
_READINGS = 8


def planning(settings: Settings) -> Outcome:
    """The probe adds under two seconds to start-up, on ordinary chains."""
    define_torchvision_operators()
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        items = volumes.write(Path(folder), settings.volumes, settings.volume_side)
        files = data.photographs(settings.out, settings.photographs)
        for title, make in (
            ("JPEG files, torchvision", lambda: _pictures(files)),
            ("volumes, MONAI", lambda: volumes.volumes(items, settings.volume_side // 2)),
        ):
            cache, read = "hotset.cache()", f"{_READINGS} readings"
            found = compare(
                {read: _reading(make()), cache: _caching(make())},
                read,
                settings.pairs,
                title=f"Start-up of a cache: {title}",
                unit="s",
                subjects=(cache,),
                limits=(read,),
                lower_is_better=True,
            )
            outcome.comparisons.append(found)
            outcome.targets.append(speed(f"{title}: hotset.cache() in under 2 s", found, cache, _SECONDS))
    return outcome


def _pictures(files: list[Path]) -> Any:
    from torchvision.transforms import v2

    chain = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomResizedCrop(96, antialias=True)])
    return _Folder(files, v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(224), chain]))


class _Folder:
    """As torchvision's ``ImageFolder``: a chain for the picture, and a label beside it."""

    def __init__(self, files: list[Path], transform: Callable[[Any], Any]) -> None:
        self.files = [str(file) for file in files]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return self.transform(data.decode(self.files[index])), index


def _reading(dataset: Any) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        for place in range(_READINGS):
            dataset[place * len(dataset) // _READINGS]
        return time.perf_counter() - start

    return measure


def _caching(dataset: Any) -> Callable[[], float]:
    import hotset

    def measure() -> float:
        start = time.perf_counter()
        cached = hotset.cache(dataset, memory="1GiB")
        elapsed = time.perf_counter() - start
        cached.close()
        return elapsed

    return measure
