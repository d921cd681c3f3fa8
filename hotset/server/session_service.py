"""The sessions of a server, under one memory limit, from its start to its end.

Everything that a session holds is in the runtime folder, in shared memory and in the spill folders, so the
service has hardly any state: a killed server loses nothing, and the next server on its port continues.

Changes are made one at a time, under a lock of this process; the session layer excludes other processes.
Readers take no lock: a session that is destroyed while they look is left out of their report.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import asdict
from typing import Any

import hotset
from hotset._warnings import printable
from hotset.errors import HotsetError, SessionError
from hotset.server.options import Options
from hotset.server.parsing import parse_seconds
from hotset.server.pidfile import Place
from hotset.server.views import resized_view, session_view
from hotset.session import catalog, recovery, reports, server_quota, sessions
from hotset.session.session_definition import Session

__all__ = ["Refusal", "SessionService"]

_log = logging.getLogger(__name__)


class Refusal(HotsetError):
    """An error of a request, with its HTTP status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class SessionService:
    """The sessions of one server; see the module's description."""

    def __init__(self, options: Options, log: str | None) -> None:
        self.options = options
        self._started = time.time()
        self._changing = threading.Lock()
        self._ended = False
        self.place = Place(os.getpid(), options.host, options.port, log, options.level)

    def begin(self) -> None:
        """Set the sessions' common limit, and take over what an earlier server on this port left.

        Raises:
            HotsetError: the runtime folder cannot be used.
        """
        server_quota.set_limit(self.options.port, self.options.memory)
        for sentence in recovery.recover():
            _log.info("%s", sentence)

    def end(self) -> None:
        """Destroy the sessions of this server, and create no more; it may be called again.

        A session that cannot be destroyed is logged, and stays for the next server on this port.
        """
        with self._changing:
            self._ended = True
            for session in sessions.sessions():
                if session.server != self.options.port:
                    continue
                try:
                    freed = sessions.destroy(session)
                except OSError as error:  # SessionError is one: gone since it was listed
                    _log.warning("session %s was not destroyed at the end: %s", session.name, error)
                else:
                    _log.info("destroyed session %s at the end: %d bytes freed", session.name, freed)
            server_quota.drop(self.options.port)

    def status(self) -> dict[str, Any]:
        """Return what ``GET /api/status`` answers."""
        options, found = self.options, reports.report_all()
        own = [report for report in found if report.session.server == options.port]
        return {
            "version": hotset.__version__,
            "pid": self.place.pid,
            "host": options.host,
            "port": options.port,
            "started": self._started,
            "log": self.place.log,
            "memory": {"limit": options.memory, "used": sum(report.memory for report in own)},
            "spill": self._spill(own),
            "sessions": [session_view(report) for report in found],
            "jobs": [asdict(cache) for cache in reports.report_jobs()],
        }

    def find(self, which: str) -> Session:
        """Return a session by name or number.

        Raises:
            Refusal: there is none.
        """
        try:
            return sessions.find(which)
        except HotsetError as error:
            raise Refusal(404, str(error)) from error

    def show(self, which: str) -> dict[str, Any]:
        """Return one session as the API answers it.

        Raises:
            Refusal: there is none.
        """
        try:
            return session_view(reports.report(self.find(which)))
        except SessionError as error:
            raise Refusal(404, str(error)) from error

    def create(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Create a session that this server owns.

        ``wanted`` may hold name, memory, spill, ttl and persist; without spill, the server's folder is used.

        Raises:
            Refusal: 409 for a name that is taken or a server that is ending.
            HotsetError: it cannot be created as requested.
        """
        name, ttl = wanted.get("name"), wanted.get("ttl")
        with self._changing:
            if self._ended:
                raise Refusal(409, "The server is stopping and creates no more sessions; start it again.")
            try:
                session = sessions.create(
                    name,
                    memory=wanted.get("memory"),
                    spill=_folder(wanted.get("spill", self.options.spill)),
                    ttl=None if ttl is None else parse_seconds(ttl),
                    persist=bool(wanted.get("persist", False)),
                    server=self.options.port,
                )
            except SessionError as error:
                status = 409 if name is not None and _is_there(name) else 400
                raise Refusal(status, str(error)) from error
        _log.info("made session %s (%d)", session.name, session.number)
        return session_view(reports.report(session))

    def resize(self, which: str, memory: int | str) -> dict[str, Any]:
        """Change a session's memory limit, also while jobs use it.

        Raises:
            Refusal: there is none.
            HotsetError: it cannot have that limit.
        """
        with self._changing:
            resized = sessions.resize(self.find(which), memory)
        session = resized.session
        _log.info("session %s (%d) may hold %d bytes", session.name, session.number, session.memory)
        return resized_view(resized)

    def destroy(self, which: str) -> int:
        """Destroy a session; jobs that use it read from their source. Returns the bytes freed.

        Raises:
            Refusal: there is none.
        """
        with self._changing:
            session = self.find(which)
            freed = sessions.destroy(session)
        _log.info("destroyed session %s (%d): %d bytes freed", session.name, session.number, freed)
        return freed

    def clean(self) -> None:
        """Destroy what has expired, and free what dead processes left."""
        with self._changing:
            for sentence in [*sessions.expire(), *catalog.gc()]:
                _log.info("%s", sentence)

    def _spill(self, own: list[reports.SessionReport]) -> dict[str, Any] | None:
        folder = self.options.spill
        if folder is None:
            return None
        used = sum(report.disk for report in own if report.session.spill == folder)
        free = None
        with contextlib.suppress(OSError):  # unmounted, say
            status = os.statvfs(folder)
            free = status.f_bavail * status.f_frsize
        return {"folder": folder, "used": used, "free": free}


def _is_there(name: str) -> bool:
    with contextlib.suppress(HotsetError):
        sessions.find(name)
        return True
    return False


def _folder(spill: str | None) -> str | None:
    if spill is not None and not (spill.startswith("/") and spill.isprintable() and len(spill) < 1000):
        raise Refusal(
            400, f"spill must be an absolute path of printable characters, got {printable(spill)!r}."
        )
    return spill
