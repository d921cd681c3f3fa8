"""Ultralytics' YOLO from scratch, with its mosaics of four pictures, on boxes at random. No line is about
hotset.

Run it below ``hotset run``: what `cv2.imread` returns is kept, once for all workers and ranks. Mosaics stay
random, as the pictures are kept and not the samples.
"""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp(prefix="yolo-"))
os.environ["YOLO_OFFLINE"] = "True"


from common import Epochs, arguments, pictures

# isort: split
import torch
import ultralytics


def labelled(files: list[Path], place: Path) -> Path:
    """A dataset in Ultralytics' format: links to the pictures, a box in each, and a file that names both."""
    rng = random.Random(0)
    (place / "images").mkdir()
    (place / "labels").mkdir()
    for number, path in enumerate(files):
        (place / "images" / f"{number:05}.jpg").symlink_to(path.resolve())
        box = " ".join(f"{rng.uniform(0.3, 0.7):.4f}" for _ in range(4))
        (place / "labels" / f"{number:05}.txt").write_text(f"{number % 2} {box}\n")
    (place / "data.yaml").write_text(
        f"path: {place}\ntrain: images\nval: images\nnames:\n  0: cat\n  1: dog\n"
    )
    return place / "data.yaml"


def main() -> None:
    given, told = arguments(), Epochs()

    def end(trainer: Any) -> None:
        told.end()
        if trainer.epoch + 1 == given.epochs:
            os._exit(0)  # its evaluation needs compiled operators of torchvision's

    with tempfile.TemporaryDirectory() as place:
        model = ultralytics.YOLO("yolo11n.yaml", verbose=False)
        model.add_callback("on_train_epoch_start", told.begin)
        model.add_callback("on_train_batch_end", lambda trainer: told.step(trainer.loss.item()))
        model.add_callback("on_train_epoch_end", end)
        torch.set_num_threads(1)
        model.train(
            data=str(labelled(pictures(given.folder, given.samples), Path(place))),
            epochs=given.epochs,
            imgsz=64,
            batch=16,
            workers=given.workers,
            device="cpu",
            seed=0,
            pretrained=False,
            amp=False,
            plots=False,
            val=False,
            save=False,
            close_mosaic=0,
            verbose=False,
            project=place,
        )


if __name__ == "__main__":
    main()
