"""Measuring: what a sample takes at some point of its chain, in time and in bytes, without a trace left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hotset.determinism.trial import once

__all__ = ["size_of", "tried"]


def tried(step: Callable[..., Any], value: Any) -> tuple[Any, float | None]:
    """What a live transform makes of a value, and how long it takes; it is not its turn to raise."""
    try:
        return once(step, value)
    except Exception:
        return None, None


def size_of(value: Any) -> float:
    """About the bytes that a value takes when it is stored."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(size_of, value))
    if hasattr(value, "getbands") and hasattr(value, "size"):  # a PIL image
        width, height = value.size
        deep = {"1": 1, "I": 4, "F": 4, "I;16": 2}.get(value.mode, len(value.getbands()))
        return float(width * height * deep)
    return 8
