"""Parse amounts of memory and times: ``80%``, ``120GiB``, ``24h``.

Text that reaches a terminal or a log is made printable, because any client may have sent it.
"""

from __future__ import annotations

import math
import re

from hotset._warnings import printable
from hotset.errors import ArgumentError
from hotset.units import format_bytes, parse_bytes

__all__ = ["parse_seconds", "parse_share"]

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([smhd]?)\s*", re.IGNORECASE)


def parse_share(amount: str, whole: int) -> int:
    """Return an amount of memory in bytes, given as an amount or as a percentage of ``whole`` bytes.

    Raises:
        QuantityError: it is neither, or a percentage beyond 100.
        ArgumentError: it is zero, or more than the whole.

    Example:
        >>> parse_share("80%", 1000), parse_share("1KiB", 4096)
        (800, 1024)
    """
    count = parse_bytes(amount, whole=lambda: whole)
    if not 0 < count <= whole:
        raise ArgumentError(
            f"memory must be above 0 and at most {format_bytes(whole)}, got {amount!r}; "
            'use "80%" for example.'
        )
    return count


def parse_seconds(time: float | str) -> float:
    """Return a time to live in seconds: a number of them, or ``"90s"``, ``"30m"``, ``"24h"``, ``"7d"``.

    Raises:
        ArgumentError: it is not a time, or not above zero.

    Example:
        >>> parse_seconds("24h"), parse_seconds("1.5m"), parse_seconds(7)
        (86400.0, 90.0, 7.0)
    """
    match = _TIME.fullmatch(time) if isinstance(time, str) else None
    if match:
        seconds = float(match[1]) * _SECONDS[match[2].lower() or "s"]
    else:
        seconds = math.nan if isinstance(time, str) else float(time)
    if not 0 < seconds < math.inf:
        shown = printable(repr(time))
        raise ArgumentError(f'ttl must be positive seconds, or "90s", "30m", "24h", "7d", got {shown}.')
    return seconds
