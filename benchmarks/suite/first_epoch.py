"""First and later epochs over what people train from, each against torch's DataLoader over the same dataset.

======================  ==================================================================================
HF rows                 rows of 128 token ids of a Hugging Face dataset, as lists, batches of 64
HF images               a Hugging Face dataset of JPEGs, RandomResizedCrop under ``with_transform``
photographs             JPEGs of 500x375, RandomResizedCrop in the dataset's ``transform``
rows of 210 B           a source that costs next to nothing
20 ms a read            an object store; ``concurrency=16``
5 % stragglers          5 ms a read, and 50 ms for every twentieth; without and with ``concurrency=16``
======================  ==================================================================================

Each figure begins with nothing: a new cache, a new loader, new workers, which is what a training's first
epoch is. What ``hotset.cache`` itself takes is not in it. Before anything is timed, one first and one later
epoch are compared with torch's under the same seed, value by value.

Figures are times as multiples of torch's. A row that is behind its target shows it.
"""

from __future__ import annotations

import gc
import io
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import data
from benchmarks.harness import Outcome, Target, Unfit, compare
from benchmarks.operators import define_torchvision_operators
from benchmarks.settings import Settings
from benchmarks.truth import WrongData

__all__ = ["first_epochs"]

TORCH = "torch's DataLoader"
FIRST = "hotset, first epoch"
LATER = "hotset, later epochs"
_DIFFERENT = 100  # photographs; they are read again and again under other indices


class _Kind(NamedTuple):
    """One dataset: its loader's arguments, and the targets, as multiples of torch's time; None for none."""

    title: str
    dataset: Callable[[Settings], Any]
    batch: int
    workers: int
    first: float | None
    later: float | None = None
    options: Mapping[str, Any] = MappingProxyType({})  # of hotset.cache


def first_epochs(settings: Settings) -> Outcome:
    """All kinds in one run; medians of pairs."""
    outcome = Outcome()
    for kind in _KINDS:
        found = _measured(kind, settings)
        outcome.comparisons += found.comparisons
        outcome.targets += found.targets
        gc.collect()
    return outcome


def _measured(kind: _Kind, settings: Settings) -> Outcome:
    title = f"{kind.title}, {kind.workers} workers"
    pair = _Pair(kind, settings)
    contestants = {TORCH: pair.torch, FIRST: pair.first, LATER: pair.later}
    found = compare(
        contestants,
        TORCH,
        settings.pairs,
        title=title,
        unit="seconds",
        subjects=(FIRST, LATER),
        lower_is_better=True,
        warm_up=False,
    )
    wanted = [(FIRST, kind.first), (LATER, kind.later)]
    targets = [
        Target(
            f"{title}: {name}, time as a multiple of torch's",
            found.ratio(name, TORCH),
            bound,
            at_least=False,
            reason=found.rows[name].unfit or found.rows[TORCH].unfit,
        )
        for name, bound in wanted
        if bound is not None
    ]
    return Outcome([found], targets)


class _Pair:
    """The contestants of one kind. hotset's first and later epochs are two figures of one training."""

    def __init__(self, kind: _Kind, settings: Settings) -> None:
        self._kind = kind
        self._settings = settings
        self._made: Any = None
        self._left: dict[str, float] = {}

    @property
    def _dataset(self) -> Any:
        if self._made is None:
            self._made = self._kind.dataset(self._settings)
            self._verify()
        return self._made

    def torch(self) -> float:
        return _seconds(self._loader(DataLoader, self._dataset))

    def first(self) -> float:
        return self._hotset(FIRST)

    def later(self) -> float:
        return self._hotset(LATER)

    def _hotset(self, which: str) -> float:
        from hotset import DataLoader as Ours
        from hotset import cache

        if which not in self._left:
            with cache(self._dataset, **self._kind.options) as cached:
                loader = self._loader(Ours, cached)
                self._left = {FIRST: _seconds(loader), LATER: _seconds(loader)}
                if cached.stats().cached != len(cached):
                    raise Unfit("some samples are not cached")
        return self._left.pop(which)

    def _loader(self, loader: Any, dataset: Any) -> Any:
        return loader(dataset, self._kind.batch, shuffle=True, num_workers=self._kind.workers)

    def _verify(self) -> None:
        """Compare two epochs with torch's.

        Raises:
            WrongData: a batch differs.
        """
        from hotset import DataLoader as Ours
        from hotset import cache

        plain = self._loader(DataLoader, self._made)
        with cache(self._made, **self._kind.options) as cached:
            ours = self._loader(Ours, cached)
            for seed in range(2):
                torch.manual_seed(seed)
                wanted = iter(plain)
                digests = [_digest(batch) for batch in wanted]
                torch.manual_seed(seed)
                for number, batch in enumerate(ours):
                    if _digest(batch) != digests[number]:
                        raise WrongData(f"batch {number} of epoch {seed} is not torch's")


def _seconds(loader: Any) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def _digest(batch: Any) -> list[Any]:
    return [(key, part.dtype, part.shape, part.numpy().tobytes()) for key, part in _parts(batch)]


def _parts(batch: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """The tensors of a batch, each with its key or place."""
    if isinstance(batch, torch.Tensor):
        yield None, batch
        return
    for key, part in batch.items() if isinstance(batch, dict) else enumerate(batch):
        for inner, tensor in _parts(part):
            yield (key, inner), tensor


# ---- the datasets ----------------------------------------------------------------------------------------


def _datasets() -> Any:
    """Hugging Face's library, which may be missing."""
    import datasets

    datasets.disable_progress_bars()
    return datasets


def _hf_rows(count: int, quick: int) -> Callable[[Settings], Any]:
    def made(settings: Settings) -> Any:
        shape = (quick if settings.quick else count, 128)
        ids = np.random.default_rng(0).integers(0, 50_000, shape)
        return _datasets().Dataset.from_dict({"input_ids": ids.tolist()})

    return made


def _augmentation() -> Any:
    define_torchvision_operators()
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.ToImage()]
    return v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True)])


def _jpegs(settings: Settings) -> list[bytes]:
    """JPEGs of 500x375, with the statistics of photographs."""
    from PIL import Image

    found = []
    for file in data.photographs(settings.out, min(_DIFFERENT, settings.photographs)):
        into = io.BytesIO()
        with Image.open(file) as picture:
            picture.convert("RGB").resize((500, 375)).save(into, "JPEG", quality=88)
        found.append(into.getvalue())
    return found


def _hf_images(settings: Settings) -> Any:
    library, files, transform = _datasets(), _jpegs(settings), _augmentation()
    rows = [files[i % len(files)] for i in range(_pictures(settings))]
    features = library.Features({"image": library.Image(), "label": library.Value("int64")})
    columns = {"image": [{"bytes": row, "path": None} for row in rows], "label": list(range(len(rows)))}

    def augmented(batch: dict[str, Any]) -> dict[str, Any]:
        pictures = [transform(picture.convert("RGB")) for picture in batch["image"]]
        return {"pixel_values": pictures, "label": batch["label"]}

    return library.Dataset.from_dict(columns, features=features).with_transform(augmented)


def _pictures(settings: Settings) -> int:
    return settings.photographs * 3 // 4


class _Pictures(Dataset[Any]):
    def __init__(self, settings: Settings) -> None:
        self._files = _jpegs(settings)
        self._count = _pictures(settings)
        self.transform = _augmentation()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(io.BytesIO(self._files[index % len(self._files)])) as file:
            picture = file.convert("RGB")
        return self.transform(picture), index


class _Waiting(data.Samples):
    """Rows of 210 B that take some milliseconds each."""

    def __init__(self, count: int, seconds: float, stragglers: float) -> None:
        super().__init__(data.byte_rows(count))
        self._times = seconds, stragglers

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._times[index % 20 == 7])
        return super().__getitem__(index)


def _waiting(seconds: float, stragglers: float) -> Callable[[Settings], Any]:
    return lambda settings: _Waiting(64 if settings.quick else 1600, seconds, stragglers)


def _rows(settings: Settings) -> Any:
    return data.Samples(data.byte_rows(settings.small_rows))


_AT_ONCE: dict[str, Any] = {"concurrency": 16}
_KINDS = (
    _Kind("HF rows of 128 ints", _hf_rows(20_000, 500), 64, 0, 1.05, 0.2),
    _Kind("HF rows of 128 ints", _hf_rows(4_000, 500), 64, 2, 1.05, 0.2),
    _Kind("HF images, with_transform", _hf_images, 32, 2, 1.05, 1 / 1.5),
    _Kind("photographs, RandomResizedCrop", _Pictures, 32, 0, 1.03),
    _Kind("photographs, RandomResizedCrop", _Pictures, 32, 2, 1.03),
    _Kind("rows of 210 B", _rows, 64, 0, 1.05),
    _Kind("rows of 210 B", _rows, 64, 2, 1.05),
    _Kind("20 ms a read, concurrency=16", _waiting(0.02, 0.02), 32, 2, 0.1, options=_AT_ONCE),
    _Kind("5 % stragglers", _waiting(0.005, 0.05), 32, 2, 1.0),
    _Kind("5 % stragglers, concurrency=16", _waiting(0.005, 0.05), 32, 2, 1 / 3, options=_AT_ONCE),
)
