"""A small vision transformer by Hugging Face's Trainer, on a dataset of pictures. No line is about hotset.

Run it below ``hotset run``: the pictures that the dataset's ``Image`` feature decodes are kept, once for all
workers and ranks. The random crop in ``with_transform`` runs anew for each use.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from common import Epochs, arguments, pictures

# isort: split
import datasets
import numpy as np
import torch
import transformers
from PIL import Image


def cropped(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The rows with a random square of each picture, of 32x32 pixels."""
    found = []
    for picture in rows["image"]:
        side = int(torch.randint(150, min(picture.size), ()))
        small = picture.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR, (0, 0, side, side))
        found.append(torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255)
    return {"pixel_values": found, "labels": rows["label"]}


class Told(transformers.TrainerCallback):  # type: ignore[misc]
    """Prints each epoch."""

    def __init__(self) -> None:
        self.epochs = Epochs()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.epochs.begin()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.epochs.step(logs["loss"])

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.epochs.end()


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    files = pictures(given.folder, given.samples)
    table = datasets.Dataset.from_dict(
        {"image": list(map(str, files)), "label": [i % 2 for i in range(len(files))]}
    )
    table = table.cast_column("image", datasets.Image()).with_transform(cropped)
    transformers.set_seed(0)
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=2
    )
    with tempfile.TemporaryDirectory() as place:
        settings = transformers.TrainingArguments(
            place,
            num_train_epochs=given.epochs,
            per_device_train_batch_size=16,
            dataloader_num_workers=given.workers,
            remove_unused_columns=False,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        )
        model = transformers.ViTForImageClassification(config)
        transformers.Trainer(model, settings, train_dataset=table, callbacks=[Told()]).train()


if __name__ == "__main__":
    main()
