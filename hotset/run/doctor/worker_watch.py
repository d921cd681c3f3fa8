"""What a process does to make batches, as a worker of a loader, or for a loop without workers.

The clocks of :mod:`~hotset.run.doctor.fetching` are around each fetch and each decoder in it.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

from hotset.run.doctor.fetching import Fetching

__all__ = ["Resting", "WorkerWatch"]


@dataclasses.dataclass(slots=True)
class Resting:
    """The fetcher that has made a batch last, while its clocks rest: there is only counting to do.

    To call all that is below would take 1 % of batches of 2 ms, as the processor has forgotten it since the
    last one.
    """

    fetcher: Callable[[], Any]  # a weak reference
    fetching: Fetching
    until: float


class WorkerWatch:
    """Watches each fetch.

    Attributes:
        fetching: what is known of a worker's own, which are all of one loader.
        resting: the last fetcher whose clocks rested; None if there was none.
    """

    def __init__(self, write_soon: Callable[[], bool]) -> None:
        self.fetching = Fetching()
        self.resting: Resting | None = None
        self._write_soon = write_soon
        self._of_loops: weakref.WeakKeyDictionary[Any, Fetching] = weakref.WeakKeyDictionary()
        self._inside: Fetching | None = None  # a fetch whose clocks are read

    def count_for(self, fetching: Fetching, fetcher: Any) -> None:
        """What ``fetcher`` does is a loop's that has no workers."""
        self._of_loops[fetcher] = fetching

    def fetch(self, fetcher: Any, plain: Callable[[Any, Any], Any], indices: Any, begun: float) -> Any:
        """A fetch, which was called at this time."""
        if threading.current_thread() is not threading.main_thread():
            return plain(fetcher, indices)
        outer, fetching = self._inside, self._of_loops.get(fetcher, self.fetching)
        try:
            # Where samples are small, contextlib.suppress takes as much as the clocks.
            try:  # noqa: SIM105
                self._inside = fetching if fetching.begin(fetcher, begun) else None
            except Exception:  # watching that fails
                pass
            value = plain(fetcher, indices)
            try:
                fetching.end(fetcher, indices)
                self._write_soon()
                if fetching.rests.now(begun):
                    self.resting = Resting(weakref.ref(fetcher), fetching, fetching.rests.until)
            except Exception:
                pass
            return value
        finally:
            self._inside = outer

    def decode(self, name: str, call: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """A decoder is called; see :data:`~.decoding.Decode`."""
        return call() if self._inside is None else self._inside.decode(name, call, size)
