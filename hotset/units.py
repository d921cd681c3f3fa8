"""Amounts of memory, from ``"64GiB"`` or ``"50%"`` to bytes and back, and times for people to read.

Binary suffixes (KiB, MiB, GiB, TiB) are powers of 1,024, decimal ones (KB, MB, GB, TB) powers of 1,000;
a bare number is bytes. Case does not matter: ``64gib`` never means bits.

The caller decides what a percentage is of; that amount is looked up only when needed:

=============================================  ==========================================================
``hotset.cache(memory=)``, ``explain``         the memory that is free under the machine's and every control
                                               group's limit: ``"auto"`` is 50 % of it
the same in a session                          the session's memory
``Window(resident=)``                          as ``memory=``
``DeviceQueue(resident=)``                     the device's free memory
``hotset start``, ``session create, resize``   the machine's memory, or its control group's limit
=============================================  ==========================================================
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable

from hotset.errors import QuantityError

__all__ = ["format_bytes", "format_ms", "format_seconds", "parse_bytes"]

_FACTORS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(quantity: int | str, *, name: str = "memory", whole: Callable[[], int] | None = None) -> int:
    """Return ``quantity`` in bytes.

    Args:
        quantity: an int (bytes) or a string such as ``"64GiB"``, ``"500MB"`` or ``"1.5 TiB"``.
        name: the argument's name, for the error message.
        whole: returns the bytes of which ``"50%"`` is half; None if percentages are not allowed.

    Raises:
        QuantityError: it is not an int or a string of that form, or below zero; or it is a percentage that is
            not allowed here, or not above 0 and at most 100.

    Example:
        >>> parse_bytes("1.5KiB"), parse_bytes("2MB"), parse_bytes(7), parse_bytes("50%", whole=lambda: 30)
        (1536, 2000000, 7, 15)
    """
    if isinstance(quantity, int) and not isinstance(quantity, bool):
        if quantity < 0:
            raise QuantityError(f"{name} must be zero or more bytes, got {quantity}.")
        return quantity
    if isinstance(quantity, str) and len(quantity) < 60 and (share := _SHARE.fullmatch(quantity)):
        if whole is None:
            raise QuantityError(f"{name} must be an amount of memory here, not a share, got {quantity!r}.")
        if not 0 < float(share[1]) <= 100:
            raise QuantityError(f"{name} must be above 0 % and at most 100 %, got {quantity!r}.")
        return math.floor(float(share[1]) * whole() / 100)
    # Longer strings are refused, as Python limits the digits that it converts.
    match = _PATTERN.fullmatch(quantity) if isinstance(quantity, str) and len(quantity) < 60 else None
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise QuantityError(
            f"{name} must be an amount of memory, got {reprlib.repr(quantity)}; give bytes as an int, "
            'or a string such as "64GiB" or "500MB"'
            + ("." if whole is None else ', or a share such as "50%".')
        )
    return round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * int(factor)


def format_bytes(count: float) -> str:
    """Return ``count`` bytes for a person to read, in binary units with three digits.

    Example:
        >>> format_bytes(301_056_000), format_bytes(512)
        ('287 MiB', '512 B')
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.3g} {unit}"


def format_ms(seconds: float) -> str:
    """Return a time as a number of milliseconds, with three digits or all before the point.

    Example:
        >>> format_ms(0.00001234), format_ms(0.2649), format_ms(1.1), format_ms(0.9999)
        ('0.0123', '265', '1,100', '1,000')
    """
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """Return a time for a person to read, with two digits; at least "under 1 ms".

    Example:
        >>> format_seconds(0.0), format_seconds(0.0123), format_seconds(2.649), format_seconds(131.2)
        ('under 1 ms', '12 ms', '2.6 s', '131 s')
    """
    if seconds < 1e-3:
        return "under 1 ms"
    value, unit = (seconds * 1e3, "ms") if seconds < 0.9995 else (seconds, "s")
    return f"{value:,.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
