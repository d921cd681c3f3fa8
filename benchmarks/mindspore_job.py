"""A job that runs epochs of one pipeline: ``python -m benchmarks.mindspore_job``, in either interpreter.

A question names the engine (``mindspore``, with a session or without; ``torch``; ``hotset``), the data and
how many epochs; the answer has the seconds that opening and each epoch took, and if asked for the checksums
of all samples. Opening is what a program says before its first batch: building the pipeline,
``hotset.cache(...)``.

Pipelines are what each library's documentation has for such data, with two workers. Images: JPEG files
decoded, their shorter side resized to 256, the middle 224x224 cut out, normalised, float32 ``(3, 224, 224)``.
Rows: 210 bytes. mindspore reads those from its own record format, since its cache refuses samples that come
from Python; its format has no bytes, so they are 32-bit integers there, and cast. Its cache lies on the last
``map``. torch has them in memory.
"""

from __future__ import annotations

import gc
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.jobs import serve

__all__ = ["BATCH", "WORKERS", "answer"]

WORKERS = 2
BATCH = {"images": 32, "rows": 256}
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Epoch = Callable[[], Iterable[Any]]


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Open a pipeline, run its epochs, close it."""
    if question.get("do") == "write":
        _write_records(Path(question["folder"]))
        return {}
    epochs, whole = int(question["epochs"]), bool(question["whole"])
    with ExitStack() as stack:
        start = time.perf_counter()
        engine = _mindspore if question["engine"] == "mindspore" else _torch
        epoch = engine(stack, question, epochs + whole)
        opening = time.perf_counter() - start
        seconds, count, last = [], 0, None
        for _ in range(epochs):
            start = time.perf_counter()
            count = 0
            for last in epoch():
                count += len(last[0])
            seconds.append(time.perf_counter() - start)
        # Batches are let go one by one: mindspore's are views into what it will use again.
        sums = [s for batch in epoch() for s in _sums(batch)] if whole else []
        last = None
    gc.collect()
    return {"opening": opening, "seconds": seconds, "count": count, "sums": sums}


def _sums(batch: Any) -> list[int]:
    return [zlib.crc32(np.ascontiguousarray(sample).data) for sample in np.asarray(batch[0])]


def _mindspore(stack: ExitStack, question: dict[str, Any], epochs: int) -> Epoch:
    import mindspore.dataset as ds  # type: ignore[import-not-found]
    from mindspore import dtype
    from mindspore.dataset import transforms, vision

    cache = None
    if question["session"] is not None:
        # One megabyte is less than the machine has in use, which is what `size` limits: all is spilled.
        size = 1 if question["spills"] else 0
        cache = ds.DatasetCache(
            int(question["session"]), size=size, spilling=question["spills"], port=question["port"]
        )
    if question["data"] == "images":
        data = ds.ImageFolderDataset(question["folder"], shuffle=False, num_parallel_workers=WORKERS)
        scaled = [[255 * x for x in values] for values in (_MEAN, _DEVIATION)]
        chain = [
            vision.Decode(),
            vision.Resize(256),
            vision.CenterCrop(224),
            vision.Normalize(*scaled),
            vision.HWC2CHW(),
        ]
        data = data.map(chain, "image", num_parallel_workers=WORKERS, cache=cache)
    else:
        path = str(Path(question["folder"]) / "rows.mindrecord")
        data = ds.MindDataset(path, ["x", "y"], shuffle=False, num_parallel_workers=WORKERS)
        cast = [transforms.TypeCast(dtype.uint8)]
        data = data.map(cast, "x", num_parallel_workers=WORKERS, cache=cache)
    data = data.batch(BATCH[question["data"]])
    made: list[Iterable[Any]] = []

    def epoch() -> Iterable[Any]:
        # Made with the first epoch, which so pays for starting the pipeline, as torch's pays for its workers.
        if not made:
            made.append(data.create_tuple_iterator(num_epochs=epochs, output_numpy=True))
        return iter(made[0])

    stack.callback(made.clear)
    return epoch


def _write_records(folder: Path) -> None:
    from mindspore.mindrecord import FileWriter  # type: ignore[import-not-found]

    rows = np.load(folder / "rows.npy")
    writer = FileWriter(str(folder / "rows.mindrecord"), 1, overwrite=True)
    writer.add_schema({"x": {"type": "int32", "shape": [rows.shape[1]]}, "y": {"type": "int64"}})
    writer.write_raw_data([{"x": row.astype(np.int32), "y": i} for i, row in enumerate(rows)])
    writer.commit()


def _torch(stack: ExitStack, question: dict[str, Any], epochs: int) -> Epoch:
    import torch
    from torch.utils.data import DataLoader

    import hotset
    from benchmarks.data import Samples
    from benchmarks.peers import closing

    torch.set_num_threads(1)
    folder = Path(question["folder"])
    dataset: Any
    if question["data"] == "images":
        dataset = _image_folder(folder)
    else:
        dataset = Samples(torch.from_numpy(np.load(folder / "rows.npy")))
    library: Any = DataLoader
    if question["engine"] == "hotset":
        dataset = stack.enter_context(hotset.cache(dataset, session=question["session"]))
        library = hotset.DataLoader
    batch = BATCH[question["data"]]
    return closing(stack, library(dataset, batch, num_workers=WORKERS, persistent_workers=True))


def _image_folder(folder: Path) -> Any:
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        # torch for processors alone has not loaded torchvision's library, and misses two operators of it.
        global _fragment
        _fragment = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            _fragment.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

    chain = [Resize(256), CenterCrop(224), ToTensor(), Normalize(_MEAN, _DEVIATION)]
    return ImageFolder(str(folder), Compose(chain))


_fragment: Any = None

if __name__ == "__main__":
    serve(answer)
