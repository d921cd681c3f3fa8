"""Programs that are forked from a process that has imported torch, which takes longer than most of them run.

Not for tests of what an interpreter does from its start: those start one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

# Said at its end by a library of torch's, which the server has imported and few programs would.
_LEAKS = re.compile(r"^nanobind: leaked .*?^See https://nanobind[^\n]*\n?", re.MULTILINE | re.DOTALL)


class Programs:
    """Runs programs one after another, each as the main program of a process of its own.

    They are forked from a server, which is no child of this process: tests look at their children.
    """

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._server.wait() == 0
        assert self._answer() == 0  # it has imported torch

    def __enter__(self) -> Programs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)  # with a program that runs too long
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.read()  # it has ended
        self._server.stdout.close()

    def _answer(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def run(
        self,
        program: list[str],
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        *,
        trains: bool = False,
        ends_whole: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a file with its arguments; as ``subprocess.run`` with captured output.

        Args:
            program: finds the modules that this process finds.
            cwd: its working directory.
            environment: variables besides this process's, or in place of them.
            trains: whether it makes an optimizer: the first one imports as much as torch itself.
            ends_whole: whether it takes all modules apart as it ends, which takes longer than most programs.
        """
        assert self._server.stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("stdout", "stderr")]
            order = {
                "program": program,
                "cwd": str(cwd),
                "environment": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})},
                "trains": trains,
                "ends_whole": ends_whole,
                "files": list(map(str, files)),
            }
            print(json.dumps(order), file=self._server.stdin, flush=True)
            code = self._answer()
            said, warned = (file.read_text() for file in files)
        return subprocess.CompletedProcess(program, code, said, _LEAKS.sub("", warned))


def fork_by_default() -> None:
    """Let the start method be fork where none is set: from Python 3.14 on it is forkserver.

    Most tests' datasets are classes within a function, and most of their programs run as they are imported.
    """
    multiprocessing.context._default_context._default_context = (  # type: ignore[attr-defined]
        multiprocessing.get_context("fork")
    )


def _next_order() -> dict[str, Any]:
    """Read orders, and answer each with the exit code of a child; returns the order in that child."""
    print(0, flush=True)
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        if order["trains"]:
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
        gc.freeze()  # else the collector passes over all of torch as a program ends, which takes a second
        pid = os.fork()
        if pid == 0:
            return order
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


def _become(order: dict[str, Any]) -> None:
    """Take over what a process that is started with the order's program has, and run it."""
    for descriptor, path in enumerate([os.devnull, *order["files"]]):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    sys.argv = order["program"]
    places = order["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(Path(sys.argv[0]).parent), *filter(None, places), *sys.path[1:]]
    if order["environment"].get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    code: object = None
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ending:
        if order["ends_whole"]:
            raise
        code = ending.code
    if not order["ends_whole"]:
        end(code)


def end(code: object) -> NoReturn:
    """End this process as after :func:`sys.exit`, but leave its modules as they are."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    import torch.utils.data
    from large_pages import use_large_pages

    use_large_pages()
    fork_by_default()
    _become(_next_order())
