"""Whole numbers that people give: how many epochs, steps, files."""

from __future__ import annotations

from typing import Any

from hotset.errors import ArgumentError

__all__ = ["positive"]


def positive(value: Any, name: str) -> int:
    """``value``, if it is a whole number of at least 1.

    Raises:
        ArgumentError: it is not; names the argument.

    Example:
        >>> positive(3, "epoch")
        3
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name}={value!r} is no whole number of at least 1.")
    return value
