"""Whether this process is the fork server of ``multiprocessing``, from which a program's workers are forked.

From Python 3.14 on, loaders start their workers by it unless told otherwise. It imports the program's main
module first (and what :func:`multiprocessing.set_forkserver_preload` names), so what that module does is done
in the server, before there is a worker. It does not have the key that the program's processes share: each
worker is given that after it was forked.
"""

from __future__ import annotations

import sys

__all__ = ["is_below_fork_server", "is_fork_server"]


def is_below_fork_server() -> bool:
    """Whether this process is the fork server, or was forked from it."""
    return any("from multiprocessing.forkserver import main" in word for word in sys.orig_argv)


def is_fork_server() -> bool:
    """Whether this process is the fork server itself."""
    if not is_below_fork_server():
        return False
    from multiprocessing import forkserver

    # A worker is given these as it is forked.
    server = getattr(forkserver, "_forkserver", None)
    return getattr(server, "_forkserver_alive_fd", None) is None
