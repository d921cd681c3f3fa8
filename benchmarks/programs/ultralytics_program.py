"""Ultralytics' YOLO, from scratch, with its mosaics; the pictures are photographs with boxes at random."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp(prefix="hotset-bench-"))
os.environ["YOLO_OFFLINE"] = "True"

from benchmarks.operators import define_torchvision_operators

define_torchvision_operators()  # for a torchvision beside a torch without CUDA

import torch  # noqa: E402
import ultralytics  # noqa: E402


def labelled(folder: str, place: Path) -> Path:
    """A dataset in Ultralytics' format: links to the pictures, a box in each, and a file that names both."""
    rng = random.Random(0)
    (place / "images").mkdir()
    (place / "labels").mkdir()
    for number, path in enumerate(sorted(Path(folder).rglob("*.jpg"))):
        (place / "images" / f"{number:05}.jpg").symlink_to(path.resolve())
        box = " ".join(f"{rng.uniform(0.3, 0.7):.4f}" for _ in range(4))
        (place / "labels" / f"{number:05}.txt").write_text(f"{number % 2} {box}\n")
    names = "\n".join(f"  {number}: thing{number}" for number in range(2))
    (place / "data.yaml").write_text(f"path: {place}\ntrain: images\nval: images\nnames:\n{names}\n")
    return place / "data.yaml"


def main(folder: str, epochs: int) -> None:
    state: dict[str, Any] = {"losses": []}

    def begin(trainer: Any) -> None:
        state["start"] = time.perf_counter()

    def step(trainer: Any) -> None:
        state["losses"].append(trainer.loss.item())

    def end(trainer: Any) -> None:
        seconds, losses, state["losses"] = time.perf_counter() - state["start"], state["losses"], []
        print(json.dumps({"seconds": seconds, "losses": losses}), flush=True)
        if trainer.epoch + 1 == epochs:
            os._exit(0)  # its evaluation needs operators of torchvision's own

    with tempfile.TemporaryDirectory() as place:
        model = ultralytics.YOLO("yolo11n.yaml", verbose=False)
        model.add_callback("on_train_epoch_start", begin)
        model.add_callback("on_train_batch_end", step)
        model.add_callback("on_train_epoch_end", end)
        torch.set_num_threads(1)
        model.train(
            data=str(labelled(folder, Path(place))),
            epochs=epochs,
            imgsz=64,
            batch=16,
            workers=2,
            device="cpu",
            seed=0,
            deterministic=True,
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
    main(sys.argv[1], int(sys.argv[2]))
