"""What must hold once all have ended: what is left can be used, can be removed, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from hotset.session import catalog, recovery, sessions
from hotset.session.spill_dirs import spill_path

from .director import Director
from .jobs import MAKERS, reader
from .processes import PATIENCE, Processes, children, command_line


def look_after(director: Director) -> None:
    """Use, check and remove all that is left; what is wrong goes to the failures of the processes."""
    processes = director.processes
    _hotset(processes, "check")
    for known in sessions.sessions():
        for kind in sorted(MAKERS):
            processes.start("reader", lambda name=known.name, kind=kind: reader(name, kind))  # type: ignore[misc]
        processes.wait()
    _hotset(processes, "check")
    director.serve()
    processes.wait()
    if processes.daemon is None:
        processes.failures.append("the server does not start any more")
    for known in sessions.sessions():
        if known.server is None:
            _hotset(processes, "session", "destroy", known.name)
    processes.daemon = None
    _hotset(processes, "stop", "--port", str(director.port))
    _end_what_is_left(processes)
    # What is young is left alone, as somebody may be making it; here nobody is left.
    catalog._YOUNG_SECONDS = recovery._YOUNG_SECONDS = 0.0
    print(*recovery.gc(), sep="\n")
    (director.runtime.folder / f"server-{director.port}.log").unlink()  # it stays, for people
    for folder in (director.runtime.folder, spill_path(str(director.disk.folder))):
        processes.failures += [f"{file.name} is left" for file in folder.iterdir()]


def _end_what_is_left(processes: Processes) -> None:
    until = time.monotonic() + PATIENCE / 4
    while children() and time.monotonic() < until:
        processes.reap()
        time.sleep(0.01)
    for pid in children():
        where = _stack(pid)
        if "hotset/" in where or "queues.py" not in where:
            processes.failures.append(f"process {pid} is left: {command_line(pid)!r}\n{where}")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _stack(pid: int) -> str:
    """Where a process is that does not end; it writes that to its log.

    A worker that is killed in the midst of sending holds torch's queue for ever, and another worker of that
    job, once the job itself is killed, waits at its end for its turn with it: that is torch's, and no frame
    of it is hotset's.
    """
    with open(f"/proc/{pid}/fd/2", "rb") as log:
        log.seek(0, os.SEEK_END)
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1)
        return log.read().decode(errors="replace")


def _hotset(processes: Processes, *arguments: str) -> None:
    """``hotset ...`` as a process, which must end well; where it is if it does not end."""
    program = [sys.executable, "-X", "faulthandler", "-c", "from hotset.cli.main import main; main()"]
    with subprocess.Popen(
        [*program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            said, _ = process.communicate()
    if process.returncode:
        processes.failures.append(f"`hotset {' '.join(arguments)}` ends with {process.returncode}:\n{said}")
