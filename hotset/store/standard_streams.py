"""Descriptors of hotset's files are none of standard input, output and error.

A program that was started without these, as a daemon is, gives their numbers to the first files that it
opens. What a library written in C then prints goes into such a file: it would overwrite what is cached. To
map a file takes a further descriptor, which Python keeps with the mapping. So where hotset opens or maps a
file that others read, all three numbers are taken meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["beyond_standard"]

_LAST = 2


@contextlib.contextmanager
def beyond_standard() -> Iterator[None]:
    """A block, or a function, in which no file that is opened becomes standard input, output or error.

    Raises:
        OSError: no descriptor is left.

    Example:
        >>> with beyond_standard():
        ...     fd = os.open("/dev/null", os.O_RDONLY)
        >>> fd > 2
        True
        >>> os.close(fd)
    """
    taken: list[int] = []
    try:
        while (fd := os.memfd_create("hotset-none", os.MFD_CLOEXEC)) <= _LAST:
            taken.append(fd)
        os.close(fd)
        yield
    finally:
        for each in taken:
            os.close(each)
