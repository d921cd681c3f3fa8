"""A policy on single frames of a video, the next action its target, as LeRobot trains them; two workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import robot_frames
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.programs.training_loop import train

FPS = 10


class Episode(Dataset[Any]):
    def __init__(self, video: str, count: int) -> None:
        self.video, self.count = video, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        frames = robot_frames.decode_video_frames(self.video, (index / FPS,), 0.04)
        noise = 1 + 0.1 * torch.randn(3, 1, 1)  # colours vary
        return frames[0].float() / 255 * noise, torch.tensor([index / self.count, 1.0])


def main(video: str, epochs: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = nn.Sequential(
        nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2)
    )
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    with robot_frames.av.open(video) as container:
        count = container.streams.video[0].frames
    loader = DataLoader(Episode(video, count), batch_size=8, shuffle=True, num_workers=2)
    train(policy, optimizer, nn.functional.mse_loss, loader, epochs)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
