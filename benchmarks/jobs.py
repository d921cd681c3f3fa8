"""Processes that measure for a benchmark: questions and answers, a line of JSON each.

A job is a program of its own (``python -m benchmarks.session_job``), in whichever interpreter: nothing is
inherited from who asks, no page table and no import. It answers one line for each line that it reads, and
ends when its input does. What it or its libraries print goes to a file, of which only the last words are
ever looked at: why it ended. A measurement that needs nothing kept between its questions is one program, run
once for each: :func:`run_once`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Unfit, explain

__all__ = ["Job", "run_once", "serve"]

_ROOT = Path(__file__).parents[1]
_PATIENCE_SECONDS = 180.0

Content = dict[str, Any]


class Job:
    """A process that answers questions; use it as a context manager.

    Args:
        module: what it runs; it calls :func:`serve`.
        python: its interpreter, this one's by default.
        environment: what is set in its environment besides ours.
    """

    def __init__(
        self, module: str, python: str = sys.executable, environment: dict[str, str] | None = None
    ) -> None:
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed with the job)
        self._process = subprocess.Popen(
            [python, "-m", module],
            cwd=_ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._unread = b""

    def ask(self, **question: Any) -> Content:
        """Send a question and wait for its answer; see :meth:`receive`."""
        self.send(**question)
        return self.receive()

    def send(self, **question: Any) -> None:
        """Send a question.

        Raises:
            Unfit: the job has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Unfit(self._last_words()) from None

    def receive(self) -> Content:
        """Wait for the answer to the oldest question that has none.

        Raises:
            Unfit: the job has ended, hangs, or could not do what it was asked for.
        """
        answer: Content = json.loads(self._line())
        if "unfit" in answer:
            raise Unfit(answer["unfit"])
        return answer

    def _line(self) -> bytes:
        # Not by readline: what its buffer has taken of the next answer, select would wait for in vain.
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([fd], [], [], _PATIENCE_SECONDS)[0]:
                raise Unfit(f"a job gave no answer in {_PATIENCE_SECONDS:g} s")
            part = os.read(fd, 1 << 16)
            if not part:
                raise Unfit(self._last_words())
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    def _last_words(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        return f"a job ended with status {status}: {said}"


def run_once(module: str, *words: str) -> Content:
    """Run ``python -m module words``; return the JSON of the last line that it prints.

    Raises:
        Unfit: it failed; its last words.
        subprocess.TimeoutExpired: it hung.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode != 0:
        raise Unfit(done.stderr.strip().rpartition("\n")[2])
    answer: Content = json.loads(done.stdout.splitlines()[-1])
    return answer


def serve(answers: Callable[[Content], Content]) -> None:
    """Answer questions until there are no more: the main function of a job's module."""
    # The libraries print what they like; the answers get a descriptor of their own.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = answers(json.loads(line))
        except Exception as error:
            answer = {"unfit": explain(error)}
        out.write(json.dumps(answer) + "\n")
        out.flush()
