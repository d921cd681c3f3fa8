"""Frames of a video by their times, as LeRobot reads them with PyAV: from the key frame before, in order."""

from __future__ import annotations

import av
import torch


def decode_video_frames(video_path: str, timestamps: tuple[float, ...], tolerance_s: float) -> torch.Tensor:
    """Frames of shape ``(times, 3, height, width)``, uint8: the nearest to each time."""
    first, last = min(timestamps), max(timestamps)
    frames, times = [], []
    with av.open(video_path) as container:
        stream = container.streams.video[0]
        container.seek(int(first / stream.time_base), stream=stream, backward=True)
        for frame in container.decode(stream):
            frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
            times.append(frame.time)
            if frame.time >= last:
                break
    distances = torch.cdist(torch.tensor(timestamps)[:, None], torch.tensor(times)[:, None], p=1)
    nearest, which = distances.min(1)
    assert bool((nearest < tolerance_s).all())
    return torch.stack([frames[number] for number in which]).permute(0, 3, 1, 2)
