"""Files that ended servers have left, removed by ``hotset gc``.

A process that is alone with a port's files knows that its server has ended. The server's sessions stay: they
hold samples for running jobs and for the next server on the port. As long as there are any, the quota of
their common limit stays too. The log, which says why the server ended, stays for a day.
"""

from __future__ import annotations

import contextlib
import os
import re
import time

from hotset.server.pidfile import ServerError, alone
from hotset.session import server_quota, sessions
from hotset.session.runtime_dir import runtime

__all__ = ["collect"]

_FILE = re.compile(r"server-(\d{1,5})\.(json|token|log|ledger)")
_LOG_SECONDS = 86400.0


def collect() -> list[str]:
    """Remove the files of servers that have ended; return a sentence for each file.

    Raises:
        FolderError: the runtime folder is not safely this user's own.
    """
    sentences = []
    with runtime() as folder:
        before = set(os.listdir(folder))
        for port in sorted({int(found[1]) for file in before if (found := _FILE.fullmatch(file))}):
            with contextlib.suppress(ServerError), alone(port):  # its end removes two of the files
                log = f"server-{port}.log"
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - os.stat(log, dir_fd=folder).st_mtime > _LOG_SECONDS:
                        os.unlink(log, dir_fd=folder)
                if all(session.server != port for session in sessions.sessions()):
                    server_quota.drop(port)
        after = set(os.listdir(folder))
    for file in sorted(before - after):
        if found := _FILE.fullmatch(file):
            sentences.append(f"Removed {file}: the server on port {found[1]} has ended.")
    return sentences
