"""A program that was watched for long enough is ended as by Ctrl-C, and with it each process that trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from helpers import eventually
from kills import gone

from hotset.run.doctor.ending import end_program

WAITS = "import os, signal, sys, time\n{before}\nopen(sys.argv[1], 'w').write(str(os.getpid()))\n{then}"
SLEEP = "time.sleep(600)"
IGNORES = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
SAVES = (
    "def save(number, frame):\n    open(sys.argv[1] + '-saved', 'w').close()\n    raise SystemExit\n"
    "signal.signal(signal.SIGTERM, save)"
)
# The program's first process, which starts another and ends by SIGINT before that does.
STARTS = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
subprocess.Popen([sys.executable, *sys.argv[2:]], start_new_session=sys.argv[1] == "True").wait()
"""


def waits(before: str = "", then: str = SLEEP) -> str:
    return WAITS.format(before=before, then=then)


@contextmanager
def running(place: Path, *command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A program in a group of its own, and the process that has written its number to ``place``."""
    program = subprocess.Popen([sys.executable, *command], start_new_session=True, stderr=subprocess.DEVNULL)
    pid = program.pid
    try:
        assert eventually(lambda: place.exists() and place.read_text())
        pid = int(place.read_text())
        yield program, pid
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
        program.kill()
        program.wait()


def end(program: subprocess.Popen[bytes], *training: int) -> list[str]:
    """End it as the command does, which meanwhile waits for it; what was said."""
    said: list[str] = []
    waiting = threading.Thread(target=program.wait)
    waiting.start()
    end_program(program.pid, lambda: training, said.append, lambda: None)
    waiting.join()
    return said


def test_a_program_ends_by_its_own_keyboard_interrupt(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    with running(place, "-c", waits(), str(place)) as (program, _):
        assert end(program) == []
        assert program.returncode in (-signal.SIGINT, 1)  # Python 3.11 ends so below -c


def test_a_program_that_ignores_sigint_ends_by_sigterm_at_once(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    with running(place, "-c", waits(f"{SAVES}\n{IGNORES}"), str(place)) as (program, _):
        assert end(program) == ["the program ignores SIGINT."]
        assert program.returncode == 0
        assert (tmp_path / "pid-saved").exists()


def test_a_program_that_ignores_further_signals_while_it_ends_is_given_time(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    then = f"try: {SLEEP}\nexcept KeyboardInterrupt: {IGNORES}; time.sleep(0.5); raise SystemExit(7)"
    with running(place, "-c", waits(SAVES, then), str(place)) as (program, _):
        assert end(program) == []
        assert program.returncode == 7
        assert not (tmp_path / "pid-saved").exists()


def test_sigterm_does_not_reach_workers_whose_death_would_be_a_failure(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    worker = "child = subprocess.Popen(['sleep', '600'])"
    then = (
        f"try: {SLEEP}\nfinally: print(child.poll(), file=open(sys.argv[1] + '-worker', 'w')); child.kill()"
    )
    before = f"import subprocess\n{SAVES}\n{IGNORES}\n{worker}"
    with running(place, "-c", waits(before, then), str(place)) as (program, _):
        end(program)
        assert (tmp_path / "pid-worker").read_text() == "None\n"


@pytest.mark.parametrize("apart", [False, True])
def test_training_that_outlives_the_programs_first_process_is_ended(tmp_path: Path, apart: bool) -> None:
    place = tmp_path / "pid"
    before = "" if apart else IGNORES  # as what a shell script starts in the background
    command = ("-c", STARTS, str(apart), "-c", waits(before), str(place))
    with running(place, *command) as (program, pid):
        said = end(program, pid)
        assert said == ([] if apart else ["the program ignores SIGINT."])
        assert gone(pid)


def test_a_server_that_the_program_leaves_is_left(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    command = ("-c", STARTS, "True", "-c", waits(), str(place))
    with running(place, *command) as (program, pid):
        assert end(program) == []
        assert program.returncode == -signal.SIGINT
        assert not gone(pid)


def test_training_in_a_session_of_its_own_may_be_ended_by_its_launcher(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    launcher = STARTS.replace("SIG_DFL", "default_int_handler").replace(
        ".wait()", "\ntry: child.wait()\nfinally: child.terminate(); child.wait()"
    )
    launcher = launcher.replace("subprocess.Popen", "child = subprocess.Popen")
    with running(place, "-c", launcher, "True", "-c", waits(SAVES), str(place)) as (program, pid):
        assert end(program, pid) == []
        assert gone(pid)
        assert (tmp_path / "pid-saved").exists()  # by SIGTERM
