"""Behaviour cloning on a LeRobot dataset: frames of a camera, and the next actions at each of them.

The dataset is LeRobot's own, with pictures in place of a video. What it returns for an index is the same in
each epoch, decoded frame and all; noise on the state runs anew.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from common import Epochs, arguments

# isort: split
import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from torch import nn
from torch.utils.data import DataLoader

import hotset

CAMERA, STATE, ACTION = "observation.images.top", "observation.state", "action"
FEATURES = {
    CAMERA: {"dtype": "image", "shape": (240, 320, 3), "names": ["height", "width", "channels"]},
    STATE: {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    ACTION: {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
}
EPISODE = 32


def recorded(folder: Path, frames: int) -> Any:
    """Episodes of pushing something that is not there."""
    root = folder / f"robot-{frames}"
    if not (root / "done").exists():
        shutil.rmtree(root, ignore_errors=True)
        made = LeRobotDataset.create("local/push", fps=10, features=FEATURES, root=root, use_videos=False)
        rng = np.random.default_rng(0)
        for _ in range(max(frames // EPISODE, 1)):
            for _ in range(EPISODE):
                coarse = rng.integers(0, 255, (24, 32, 3), np.uint8)
                place = rng.normal(size=2).astype(np.float32)
                frame = {
                    CAMERA: np.kron(coarse, np.ones((10, 10, 1), np.uint8)),
                    STATE: place,
                    ACTION: place / 2,
                }
                made.add_frame({**frame, "task": "push"})
            made.save_episode()
        made.finalize()
        (root / "done").touch()
    return LeRobotDataset("local/push", root=root, delta_timestamps={ACTION: [0.0, 0.1, 0.2]})


class Policy(nn.Module):
    """From a picture and a state to the next three actions."""

    def __init__(self) -> None:
        super().__init__()
        self.eye = nn.Sequential(
            nn.AvgPool2d(8), nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(16)
        )
        self.head = nn.Linear(18, 6)
        self(torch.zeros(1, 3, 240, 320), torch.zeros(1, 2))

    def forward(self, picture: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.eye(picture), state], 1)).view(-1, 3, 2)  # type: ignore[no-any-return]


def main() -> None:
    given, told = arguments(), Epochs()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dataset = recorded(given.folder, given.samples)
    if given.hotset:
        dataset = hotset.cache(dataset)
    torch.manual_seed(0)
    loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=given.workers)
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), 0.01)
    for _ in range(given.epochs):
        told.begin()
        for batch in loader:
            state = batch[STATE] + 0.01 * torch.randn(batch[STATE].shape)
            loss = nn.functional.mse_loss(policy(batch[CAMERA], state), batch[ACTION])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            told.step(loss.item())
        told.end()


if __name__ == "__main__":
    main()
