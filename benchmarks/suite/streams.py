"""Streams: the pass that records them, later passes, and how fast a loader resumes.

======================  ==================================================================================
WebDataset              tar files of JPEGs of 500x375, decoded and resized, 3 workers
HF streaming            a Hugging Face ``IterableDataset`` of JPEGs, the same, 3 workers
HF rows                 rows of 128 token ids, streamed, 2 workers: the samples cost next to nothing
======================  ==================================================================================

*Recording* is the first pass of ``hotset.DataLoader`` over the cached stream, as a multiple of the time of
torch's loader over the stream itself; both begin with new loaders and workers, and the recording pass with an
empty cache. *The second pass* is compared with one over a map-style cache of the same samples, filled before,
with the same loader arguments; there the streams are eight times as long, as a pass of a thousand cached
samples takes 15 ms, one of which is its beginning. Before anything is timed the first pass is compared with
torch's, value by value. *Resuming* is the time from ``iter()`` of a new loader, with a state from 90 % of an
epoch, to its first batch; of several trials the median.
"""

from __future__ import annotations

import gc
import io
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import data
from benchmarks.harness import Outcome, Spread, Target, compare
from benchmarks.settings import Settings
from benchmarks.truth import WrongData

__all__ = ["streams"]

TORCH = "torch's DataLoader"
RECORDING = "hotset, recording"
MAPPED = "a map-style cache"
LATER = "hotset, second pass"
_BATCH = 32
_DIFFERENT = 100  # photographs; they are given again and again
_SHARDS = 12
_RESUMED = 5
_LONGER = 8
# A pass that decodes varies by a tenth from one set of workers to the next, which is twice what is asked.
_MORE_PAIRS = 4


class _Kind(NamedTuple):
    """A stream, how many workers read it, and what a recording pass may take, as a multiple of torch's.

    ``make`` takes how often the pictures, or rows, are to be in it.
    """

    title: str
    make: Callable[[Settings, int], Callable[[], Any]]
    workers: int
    bound: float | None


def streams(settings: Settings) -> Outcome:
    """All kinds in one run; medians of pairs."""
    outcome = Outcome()
    for kind in _KINDS:
        make = kind.make(settings, 1)
        _verify(make, kind.workers)
        longer = kind.make(settings, 1 if settings.quick else _LONGER)
        for found in (_recorded(kind, make, settings), _second(kind, longer, settings), _resumed(kind, make)):
            outcome.comparisons += found.comparisons
            outcome.targets += found.targets
        gc.collect()
    return outcome


def _recorded(kind: _Kind, make: Callable[[], Any], settings: Settings) -> Outcome:
    def recording() -> float:
        from hotset import DataLoader as Ours
        from hotset import cache

        with cache(make()) as stream:
            return _seconds(Ours(stream, _BATCH, num_workers=kind.workers))

    def torchs() -> float:
        return _seconds(DataLoader(make(), _BATCH, num_workers=kind.workers))

    found = compare(
        {TORCH: torchs, RECORDING: recording},
        TORCH,
        settings.pairs * (1 if settings.quick else _MORE_PAIRS),
        title=f"Recording {kind.title}, {kind.workers} workers",
        unit="seconds",
        subjects=(RECORDING,),
        lower_is_better=True,
        warm_up=False,
    )
    if kind.bound is None:
        return Outcome([found])
    text = f"{kind.title}, {kind.workers} workers: recording, time as a multiple of torch's"
    return Outcome([found], [Target(text, found.ratio(RECORDING, TORCH), kind.bound, at_least=False)])


class _Rows(Dataset[Any]):
    """The samples of a stream as a map-style dataset."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def _second(kind: _Kind, make: Callable[[], Any], settings: Settings) -> Outcome:
    from hotset import DataLoader as Ours
    from hotset import cache

    with cache(make()) as stream:
        stream.fill(num_workers=kind.workers)
        with cache(_Rows([stream[index] for index in range(len(stream))])) as mapped:
            mapped.fill()
            loaders = {
                name: Ours(cached, _BATCH, shuffle=True, num_workers=kind.workers)
                for name, cached in ((MAPPED, mapped), (LATER, stream))
            }
            found = compare(
                {
                    name: lambda loader=loader: _speed(loader, len(stream), settings.seconds)
                    for name, loader in loaders.items()
                },
                MAPPED,
                settings.pairs,
                title=f"The second pass over {kind.title}, {kind.workers} workers",
                subjects=(LATER,),
            )
    text = f"{kind.title}: second pass, speed as a multiple of a map-style cache's"
    return Outcome([found], [Target(text, found.ratio(LATER, MAPPED), 0.9)])


def _resumed(kind: _Kind, make: Callable[[], Any]) -> Outcome:
    from hotset import DataLoader as Ours
    from hotset import cache

    outcome = Outcome()
    with cache(make()) as stream:
        stream.fill()
        for workers, bound in ((0, 0.05), (2, 1.0)):
            loader = Ours(stream, _BATCH, shuffle=True, num_workers=workers)
            batches = iter(loader)
            for _ in range(len(loader) * 9 // 10):
                next(batches)
            state, rest = loader.state_dict(), next(batches)
            spent = []
            for _ in range(_RESUMED):
                resumed = Ours(stream, _BATCH, shuffle=True, num_workers=workers)
                resumed.load_state_dict(state)
                start = time.perf_counter()
                first = next(iter(resumed))
                spent.append(time.perf_counter() - start)
                if _digest(first) != _digest(rest):
                    raise WrongData("the first batch after resuming is another")
            text = f"{kind.title}: first batch after resuming at 90 %, {workers} workers"
            outcome.targets.append(Target(text, Spread.of(spent), bound, at_least=False, unit=" s"))
            del batches
    return outcome


def _verify(make: Callable[[], Any], workers: int) -> None:
    """Compare a recording pass with torch's.

    Raises:
        WrongData: a batch differs, or the recorded samples do.
    """
    from hotset import DataLoader as Ours
    from hotset import cache

    wanted = list(map(_digest, DataLoader(make(), _BATCH, num_workers=workers)))
    with cache(make()) as stream:
        loader = Ours(stream, _BATCH, num_workers=workers)
        if list(map(_digest, loader)) != wanted:
            raise WrongData("the recording pass gives other batches than torch's loader")
        if not stream.recorded:
            raise WrongData("some samples are not recorded")


def _speed(loader: Any, samples: int, seconds: float) -> float:
    """Samples a second, over as many passes as take so long at least."""
    spent, passes = 0.0, 0
    while spent < seconds:
        spent += _seconds(loader)
        passes += 1
    return passes * samples / spent


def _seconds(loader: Any) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def _digest(batch: Any) -> list[Any]:
    parts = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return [
        (key, part.dtype, part.shape, part.numpy().tobytes())
        for key, each in parts
        for part in (each if isinstance(each, list) else [each])
    ]


# ---- the streams -----------------------------------------------------------------------------------------


def _jpegs(settings: Settings, times: int) -> list[bytes]:
    """JPEGs of 500x375, with the statistics of photographs; as many as there are samples."""
    from PIL import Image

    found = []
    for file in data.photographs(settings.out, min(_DIFFERENT, settings.photographs)):
        into = io.BytesIO()
        with Image.open(file) as picture:
            picture.convert("RGB").resize((500, 375)).save(into, "JPEG", quality=88)
        found.append(into.getvalue())
    return [found[number % len(found)] for number in range(times * settings.photographs * 3 // 4)]


def _small(picture: Any) -> torch.Tensor:
    """A decoded picture as a tensor of 224x224."""
    return torch.from_numpy(np.asarray(picture.convert("RGB").resize((224, 224))).copy())


def _web_dataset(settings: Settings, times: int) -> Callable[[], Any]:
    import webdataset as wds

    files = _jpegs(settings, times)
    folder = settings.out / f"shards-{times}"
    folder.mkdir(exist_ok=True)
    for shard in range(_SHARDS):
        with wds.TarWriter(str(folder / f"{shard:02d}.tar")) as writer:
            for number in range(shard, len(files), _SHARDS):
                writer.write({"__key__": f"{number:06d}", "jpg": files[number], "cls": number})
    shards = sorted(map(str, folder.glob("*.tar")))

    def made() -> Any:
        return (
            wds.WebDataset(shards, shardshuffle=False)
            .decode("pil")
            .to_tuple("jpg", "cls")
            .map_tuple(_small, int)
        )

    return made


def _hf_streaming(settings: Settings, times: int) -> Callable[[], Any]:
    import datasets

    datasets.disable_progress_bars()
    files = _jpegs(settings, times)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": [{"bytes": file, "path": None} for file in files], "label": list(range(len(files)))}
    rows = datasets.Dataset.from_dict(columns, features=features)

    def small(row: dict[str, Any]) -> dict[str, Any]:
        return {"pixels": _small(row["image"]), "label": row["label"]}

    return lambda: rows.to_iterable_dataset(num_shards=_SHARDS).map(small, remove_columns=["image"])


def _hf_rows(settings: Settings, times: int) -> Callable[[], Any]:
    import datasets

    ids = np.random.default_rng(0).integers(0, 50_000, (times * settings.small_rows // 3, 128))
    rows = datasets.Dataset.from_dict({"input_ids": list(ids)})
    return lambda: rows.to_iterable_dataset(num_shards=_SHARDS).with_format("torch")


_KINDS = (
    _Kind("WebDataset of JPEGs", _web_dataset, 3, 1.05),
    _Kind("HF streaming of JPEGs", _hf_streaming, 3, 1.05),
    _Kind("HF streaming of token rows", _hf_rows, 2, None),
)
