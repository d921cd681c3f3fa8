"""torchvision beside a torch without CUDA.

It looks for two operators as it is imported. Its own library defines them, and cannot be loaded where CUDA's
are missing: then they are declared here, and nothing that is measured or tested calls them.
"""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import torch

__all__ = ["define_torchvision_operators"]

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call] # it must live on


def define_torchvision_operators() -> None:
    """Have ``import torchvision`` succeed, with any build of torch; nothing happens without a torchvision."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    for library in Path(found.origin).parent.glob("_C*.so"):
        with contextlib.suppress(OSError):
            torch.ops.load_library(library)
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
