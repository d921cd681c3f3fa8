"""Datasets and samplers that the tests share: counting, misbehaving, random, batched, streamed.

``Samples(make, n)[i]`` is ``make(i)``, so that any test can make the expected sample without a dataset. Each
class that misbehaves does so only once it is armed, because building a cache may read any sample.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from samples import image_and_label
from torch.utils.data import Dataset, Sampler, get_worker_info


class Samples(Dataset[Any]):
    """``n`` samples, number i being ``make(i)``; negative and out-of-range indices as in a list."""

    def __init__(self, make: Callable[[int], Any], n: int = 40) -> None:
        self.make = make
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(range(self.n)[index])


class Transformed(Dataset[Any]):
    """The samples of ``hotset.cache(source, transform=[...])``, made without a cache."""

    def __init__(self, source: Dataset[Any], transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.source = source
        self.transforms = list(transforms)

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        sample = self.source[index]
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class ReadLog:
    """Reads counted across processes: eight bytes appended to one file for each, which never tear."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self.reset()

    def reset(self) -> None:
        Path(self.path).write_bytes(b"")

    def add(self, index: int) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, struct.pack("<q", index))
        finally:
            os.close(fd)

    def order(self) -> list[int]:
        data = Path(self.path).read_bytes()
        return [index for (index,) in struct.iter_unpack("<q", data)]

    def counts(self) -> Counter[int]:
        return Counter(self.order())

    def total(self) -> int:
        return len(self.order())


class Counting(Dataset[Any]):
    """Samples whose every read is written to a :class:`ReadLog`; ``seconds`` makes each read take a while."""

    def __init__(self, make: Callable[[int], Any], n: int, log: ReadLog, seconds: float = 0.0) -> None:
        self.make = make
        self.n = n
        self.log = log
        self.seconds = seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        index = range(self.n)[index]
        self.log.add(index)
        if self.seconds:
            time.sleep(self.seconds)
        return self.make(index)


class Armed(Dataset[Any]):
    """Samples that misbehave at ``index`` in some way, once a marker file says so.

    Disarmed while a cache is built on it, because building one may read any sample.
    """

    def __init__(self, make: Callable[[int], Any], n: int, index: int, marker: Path | str) -> None:
        self.make = make
        self.n = n
        self.index = index
        self.marker = str(marker)

    def arm(self) -> None:
        Path(self.marker).write_text("armed")

    def disarm(self) -> None:
        Path(self.marker).unlink()

    def armed(self) -> bool:
        return os.path.exists(self.marker)

    def misbehave(self) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        index = range(self.n)[index]
        if index == self.index and self.armed():
            self.misbehave()
        return self.make(index)


class PlainError(ValueError):
    """An exception of the user's own."""


class TwoArgumentError(Exception):
    """An exception that cannot be made again from one message: torch turns it into a RuntimeError."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


class Raising(Armed):
    """Raises the user's own exception at its index."""

    error: str = "plain"

    def misbehave(self) -> None:
        if self.error == "key":
            raise KeyError(f"sample {self.index} is broken")
        if self.error == "two":
            raise TwoArgumentError(f"sample {self.index}", "is broken")
        raise PlainError(f"sample {self.index} is broken")


class RaisingKey(Raising):
    error = "key"


class RaisingTwo(Raising):
    error = "two"


class KillsItsWorker(Armed):
    """SIGKILLs the worker that reads its index, never the main process."""

    def misbehave(self) -> None:
        if get_worker_info() is not None:
            os.kill(os.getpid(), 9)


class SlowInWorkers(Armed):
    """Is at its index for as long as it is armed, in a worker only."""

    def misbehave(self) -> None:
        while get_worker_info() is not None and self.armed():
            time.sleep(0.01)


class Stalling(Armed):
    """The first process to read the index stays inside the read for as long as the marker exists.

    It leaves its pid in ``<marker>.pid``. Later processes read at once.
    """

    def misbehave(self) -> None:
        try:
            fd = os.open(self.marker + ".pid", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(fd, str(os.getpid()).encode())
        os.close(fd)
        while self.armed():
            time.sleep(0.005)

    def stalled_pid(self, within: float = 60.0) -> int:
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            path = Path(self.marker + ".pid")
            if path.exists() and path.read_text():
                return int(path.read_text())
            time.sleep(0.005)
        raise AssertionError("nobody began to read the stalling sample")


class Closed(Counting):
    """Samples that are read at once if they are ``open``, and else only while there is no marker file."""

    def __init__(self, make: Callable[[int], Any], n: int, log: ReadLog, marker: Path) -> None:
        super().__init__(make, n, log)
        self.open: frozenset[int] = frozenset()
        self.marker = str(marker)

    def __getitem__(self, index: int) -> Any:
        while range(self.n)[index] not in self.open and os.path.exists(self.marker):
            time.sleep(0.005)
        return super().__getitem__(index)


class FolderLike(Dataset[Any]):
    """The shape of torchvision's folders: ``(self.transform(image), label)``, ``transform`` may be None."""

    def __init__(self, n: int = 40, transform: Callable[[Any], Any] | None = None) -> None:
        self.n = n
        self.transform = transform

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = image_and_label(range(self.n)[index])
        return (image if self.transform is None else self.transform(image)), label


class TextFiles(Dataset[Any]):
    """One small file a sample, read anew each time: the bytes as a uint8 tensor, and the index."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        data = self.files[index].read_bytes()
        return torch.tensor(list(data), dtype=torch.uint8), range(len(self.files))[index]


class Batched(Samples):
    """A source that reads whole batches at once through ``__getitems__``, as Arrow tables do."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(range(self.n)[i]) for i in indices]


class Streamed(torch.utils.data.IterableDataset[int]):
    """An IterableDataset split over its workers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.n, step))


# Sources that must not be cached: each moves an RNG, or gives another sample each time.


class DrawsRandom(Samples):
    def __getitem__(self, index: int) -> Any:
        return self.make(range(self.n)[index]), random.random()


class DrawsNumpy(Samples):
    def __getitem__(self, index: int) -> Any:
        return self.make(range(self.n)[index]), float(np.random.rand())


class DrawsTorch(Samples):
    def __getitem__(self, index: int) -> Any:
        return self.make(range(self.n)[index]), torch.rand(())


class DrawsButDiscards(Samples):
    """Moves an RNG without any effect on the sample: caching it would change all later draws."""

    def __getitem__(self, index: int) -> Any:
        torch.rand(())
        return self.make(range(self.n)[index])


class HoldsRandom(Samples):
    def __init__(self, make: Callable[[int], Any], n: int = 40) -> None:
        super().__init__(make, n)
        self.held = random.Random(3)

    def __getitem__(self, index: int) -> Any:
        return self.make(range(self.n)[index]), self.held.random() < 1e-12


class HoldsNumpy(Samples):
    """The generator sits in a list in an object, not on the dataset itself."""

    def __init__(self, make: Callable[[int], Any], n: int = 40) -> None:
        super().__init__(make, n)
        self.held = {"augmenters": [Noise(1e-12)]}

    def __getitem__(self, index: int) -> Any:
        return self.make(range(self.n)[index]), self.held["augmenters"][0]()


class Noise:
    def __init__(self, below: float) -> None:
        self.rng = np.random.default_rng(5)
        self.below = below

    def __call__(self) -> bool:
        return bool(self.rng.random() < self.below)


class HoldsTorchOnItsClass(Samples):
    generator = torch.Generator().manual_seed(7)

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand((), generator=self.generator).item()
        return self.make(range(self.n)[index]), drawn < 1e-12


class CountsItsCalls(Samples):
    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.make(range(self.n)[index]), self.calls


class ReadsUrandom(Samples):
    """No RNG state to watch: only its outputs give it away."""

    def __getitem__(self, index: int) -> Any:
        return self.make(range(self.n)[index]), os.urandom(8)


class SeedsItself(Samples):
    """Random-looking but a function of the index: a generator of its own, made anew for each sample."""

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(range(self.n)[index])
        return torch.randn(3, 8, generator=generator), range(self.n)[index]


# Samplers


class GlobalDraws(Sampler[int]):
    """Draws each index from the global RNGs in turn, when the index is requested."""

    def __init__(self, n: int, count: int) -> None:
        self.n = n
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for i in range(self.count):
            if i % 3 == 0:
                yield random.randrange(self.n)
            elif i % 3 == 1:
                yield int(np.random.randint(self.n))
            else:
                yield int(torch.randint(self.n, ()))


class Listed(Sampler[Any]):
    """Yields the given indices as they are, whatever their type."""

    def __init__(self, indices: Sequence[Any]) -> None:
        self.indices = list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)


class ListedBatches(Sampler[list[int]]):
    def __init__(self, batches: Sequence[Sequence[int]]) -> None:
        self.batches = [list(batch) for batch in batches]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class Handle:
    """An open file, which cannot be pickled, and is closed with its last reference."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")

    def __del__(self) -> None:
        os.close(self.descriptor)
