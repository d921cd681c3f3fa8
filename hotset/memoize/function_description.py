"""What a memoised function is described as, in one process, and whether it still is that.

Its results are kept under a digest of the code and of the objects that it reaches, or of the ``key=`` that
the user gives instead. A name that it reads may be bound anew: each call notices that (:class:`Bindings`),
and the function is described again. An object that it reaches may be changed in place: only another
description tells, which takes a twentieth of the time at most. Until then, what has been stored is unsure.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

from hotset._warnings import warn
from hotset.determinism.fingerprint.fingerprint import fingerprint
from hotset.determinism.objects.bindings import Bindings

__all__ = ["FunctionDescription"]

_MOST_CHANGES = 20


class FunctionDescription:
    """The description of one function.

    Args:
        name: what warnings call it.
        key: what it computes, as the user says; None to describe what it reaches.
        view: whether callers get views: such results have a form of their own.

    Attributes:
        digest: 16 bytes; empty until the function is described.
        bindings: what the names that it reads stood for then; None with a key.
    """

    __slots__ = (
        "_changes",
        "_described",
        "_function",
        "_key",
        "_name",
        "_seconds",
        "_unsure",
        "_view",
        "_warned",
        "bindings",
        "digest",
    )

    def __init__(self, function: Callable[..., Any], name: str, key: str | None, view: bool) -> None:
        self._function, self._name, self._key, self._view = function, name, key, view
        self.digest = b""
        self.bindings: Bindings | None = None
        self._seconds = 0.0  # that describing it took
        self._changes = 0  # how often names were bound anew
        self._warned = False
        self._described = 0.0  # when it was described last
        self._unsure: list[int] = []  # what was stored since

    def begin(self) -> bytes:
        """Describe the function, unless that was done, before results are stored; returns the digest."""
        if not self.digest:
            self._describe()
        self._described, self._unsure = time.monotonic(), []
        return self.digest

    def drop(self) -> bool:
        """Drop the digest, as names were bound anew; False if that happens too often."""
        self.digest = b""
        self._changes += 1
        return self._changes <= _MOST_CHANGES  # more: a global that counts the calls, for example

    def wrong_results(self, sample: int) -> list[int]:
        """What was stored under a description that does not hold any more, as far as there is time to ask.

        Args:
            sample: the result that is stored next; it is among those that are returned, if there are any.
        """
        if self.bindings is None or not self.bindings.mutable:
            return []
        self._unsure.append(sample)
        if time.monotonic() - self._described < 20 * self._seconds:
            return []
        before, unsure = self.digest, self._unsure
        self._describe()
        self._described, self._unsure = time.monotonic(), []
        return unsure if self.digest != before else []

    def _describe(self) -> None:
        if self._key is not None:
            text = f"key {self._key}"
        else:
            begun = time.monotonic()
            self.bindings = Bindings(self._function)
            found = fingerprint(self._function)
            self._seconds = time.monotonic() - begun
            if found.unknowns:
                self.bindings.mutable = False  # described twice, it has two fingerprints
                if not self._warned:
                    self._warned = True
                    warn(
                        f"results of {self._name} are shared with forked processes alone: "
                        f"{found.unknowns[0]}. Give it a key= that names what it computes."
                    )
            text = found.digest
        self.digest = hashlib.blake2b(f"{self._view} {text}".encode(), digest_size=16).digest()
