"""Starts a program and ends as it ends: its exit code, or its signal.

The program gets a process group of its own, and the terminal where this process had it. So Ctrl-C reaches the
program once, from the terminal; a signal that is sent to this process is passed on to the group, once; and a
signal to this process's group reaches the program through this one alone. Ctrl-Z stops both, and ``fg``
continues both. If this process is killed, the kernel kills the program (not what the program started: it
would live on without us, too).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType

from hotset._warnings import printable
from hotset.store.standard_streams import beyond_standard

__all__ = ["die_as", "run_program", "tell", "tell_lines"]

_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)
_PR_SET_PDEATHSIG = 1
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_LONGEST_LINE = 1000  # characters: a reason or an advice that is cut tells nothing


def run_program(
    command: Sequence[str],
    environment: Mapping[str, str],
    say: Callable[[str], None],
    meanwhile: Callable[[int], None] = lambda group: None,
    *,
    stdout: int = 1,
    takes_sigint: bool = False,
) -> int:
    """Run ``command`` until it ends, and call ``meanwhile`` with its group of processes once it runs.

    Args:
        say: is called with a sentence if it cannot be run.
        meanwhile: returns soon.
        stdout: the descriptor that is its standard output.
        takes_sigint: SIGINT reaches it even if this process ignores that, as in the background of a shell
            script.

    Returns:
        A status as that of :func:`os.waitpid`.
    """
    terminal = _terminal()
    with beyond_standard():
        reader, writer = os.pipe()  # both ends close as a program is executed
    caught: list[int] = []
    with _catching(caught.append):
        pid = os.fork()
        if pid == 0:
            _become(command, environment, terminal, writer, stdout, takes_sigint)
        os.close(writer)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # in both processes, as either may be first
        with open(reader, "rb") as file:
            failure = file.read()
        if failure:
            os.waitpid(pid, 0)
            _take(terminal)
            return _say_failure(command[0], int(failure), say)

        def pass_on(number: int) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

        with _catching(pass_on):
            for number in caught:
                pass_on(number)
            meanwhile(pid)
            status = _wait(pid, terminal)
    _take(terminal)
    return status


def _become(
    command: Sequence[str],
    environment: Mapping[str, str],
    terminal: int | None,
    writer: int,
    stdout: int,
    takes_sigint: bool,
) -> None:
    """In the child: be the program."""
    try:
        parent = os.getppid()
        os.setpgid(0, 0)
        _take(terminal)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        # What Python ignores for itself is the program's to decide; what was ignored before stays so.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, *([signal.SIGINT] if takes_sigint else [])):
            signal.signal(number, signal.SIG_DFL)
        if stdout != 1:
            os.dup2(stdout, 1)
        os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        os.write(writer, str(error.errno or 1).encode())
    finally:
        os._exit(_NOT_FOUND)


def _say_failure(name: str, errno: int, say: Callable[[str], None]) -> int:
    found = errno not in (2, 20)  # ENOENT, ENOTDIR
    if found:
        say(f"{name!r} cannot be run: {os.strerror(errno)}.")
    else:
        say(f"there is no program {name!r}; check the name, or the PATH.")
    return (_NOT_EXECUTABLE if found else _NOT_FOUND) << 8


@contextlib.contextmanager
def _catching(act: Callable[[int], object]) -> Iterator[None]:
    """Call ``act`` with each signal that is passed on; one that is ignored stays ignored."""

    def handle(number: int, frame: FrameType | None) -> None:
        act(number)

    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handler)


def _wait(pid: int, terminal: int | None) -> int:
    """Wait until the program ends; stop when it stops, and continue it when this process is continued."""
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return status
        _take(terminal)
        # By SIGSTOP: the shell that waits for this process sees that it has stopped.
        os.kill(os.getpid(), signal.SIGSTOP)
        if _in_foreground(terminal):
            _give(terminal, pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGCONT)


# The terminal


def _terminal() -> int | None:
    """The descriptor of the terminal that this process's group has, or None."""
    for file in (0, 1, 2):
        with contextlib.suppress(OSError):
            if os.isatty(file) and os.tcgetpgrp(file) == os.getpgrp():
                return file
    return None


def _in_foreground(terminal: int | None) -> bool:
    try:
        return terminal is not None and os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False


def _take(terminal: int | None) -> None:
    _give(terminal, os.getpgrp())


def _give(terminal: int | None, group: int) -> None:
    """Make ``group`` the one that reads the terminal and gets its signals."""
    if terminal is None:
        return
    # The kernel stops a process in the background that does this, unless it ignores the signal.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(terminal, group)
    finally:
        signal.signal(signal.SIGTTOU, before)


def tell(text: str) -> None:
    """Write to standard error. Where that is closed or full, the command ends as the program did anyway."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # AttributeError: it was closed as this process began
        sys.stderr = None  # or the interpreter tries once more, and exits with 120


def tell_lines(lines: Iterable[str]) -> None:
    """Tell these lines of a report, each as one that can be printed."""
    tell("".join(f"{printable(line, _LONGEST_LINE)}\n" for line in lines))


def die_as(status: int) -> None:
    """End this process as the program ended: with its exit code, or by its signal."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    sys.exit(os.waitstatus_to_exitcode(status))
