"""What the server does every two seconds: it cleans up, and records the history.

A chore that fails is logged, once for each new reason, and tried again two seconds later: no failure here
ends the server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hotset.server.history import INTERVAL, History
from hotset.server.session_service import SessionService

__all__ = ["Housekeeper"]

_log = logging.getLogger(__name__)


class Housekeeper:
    """A thread that does the chores for as long as the ``with`` block runs."""

    def __init__(self, keeper: SessionService, history: History) -> None:
        self._keeper, self._history = keeper, history
        self._over = threading.Event()
        self._reasons: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="hotset chores", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.do("cleaning", self._keeper.clean)
            self.do("looking at the sessions", lambda: self._history.add(self._keeper.look()))
            if self._over.wait(INTERVAL):
                return

    def do(self, what: str, chore: Callable[[], object]) -> None:
        """Do one chore; what it raises is logged."""
        try:
            chore()
        except Exception as error:
            reason = repr(error)
            if self._reasons.get(what) != reason:
                _log.exception("%s failed, and is tried again", what)
            self._reasons[what] = reason
        else:
            self._reasons.pop(what, None)
