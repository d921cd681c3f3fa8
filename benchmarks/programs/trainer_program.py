"""A small vision transformer, trained by transformers' Trainer on a Hugging Face dataset of pictures."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch

from benchmarks.operators import define_torchvision_operators

define_torchvision_operators()  # for a torchvision beside a torch without CUDA

import transformers  # noqa: E402

from benchmarks.programs.trainer_pictures import batch  # noqa: E402


class Epochs(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        seconds, losses, self.losses = time.perf_counter() - self.start, self.losses, []
        print(json.dumps({"seconds": seconds, "losses": losses}), flush=True)


def main(folder: str, epochs: int) -> None:
    torch.set_num_threads(1)
    files = sorted(str(path) for path in Path(folder).rglob("*.jpg"))
    table = datasets.Dataset.from_dict({"image": files, "label": [i % 10 for i in range(len(files))]})
    table = table.cast_column("image", datasets.Image()).with_transform(batch)
    transformers.set_seed(0)
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=10,
    )
    with tempfile.TemporaryDirectory() as place:
        arguments = transformers.TrainingArguments(
            place,
            num_train_epochs=epochs,
            per_device_train_batch_size=16,
            dataloader_num_workers=2,
            remove_unused_columns=False,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        )
        transformers.Trainer(
            transformers.ViTForImageClassification(config),
            arguments,
            train_dataset=table,
            callbacks=[Epochs()],
        ).train()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(sys.argv[1], int(sys.argv[2]))
