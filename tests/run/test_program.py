"""``hotset run`` ends as its program ends, and a signal reaches the program once."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers import eventually, is_a_sentence

# Without what the command adds: no store, no report, and no torch to wait for.
START = """
import os, sys
from hotset.run.program import die_as, run_program
die_as(run_program(sys.argv[1:], os.environ, lambda sentence: sys.stderr.write(sentence + "\\n")))
"""
# Writes a line for each signal, in the program and in a process that it started, until a file is there.
COUNTS = """
import os, signal, subprocess, sys, time
place, name = sys.argv[1:3]
def note(number, frame):
    with open(f"{place}/{name}", "a") as file: file.write(f"{number}\\n")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1): signal.signal(number, note)
if name == "parent": child = subprocess.Popen([sys.executable, __file__, place, "child"])
open(f"{place}/{name}-ready", "w").close()
while not os.path.exists(f"{place}/end"): time.sleep(0.02)
if name == "parent": child.wait()
"""


def start(*command: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", START, *command], **options)  # type: ignore[call-overload,no-any-return]


def python(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_the_exit_code_is_the_programs(code: int) -> None:
    assert start(*python(f"raise SystemExit({code})")).wait(60) == code


@pytest.mark.parametrize("redirection", ["2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-", "2>/dev/full"])
def test_the_exit_code_is_the_programs_where_nobody_reads_the_report(redirection: str) -> None:
    command = shlex.join([sys.executable, "-m", "hotset", "run", "--", *python("raise SystemExit(7)")])
    assert subprocess.run(["sh", "-c", f"{command} {redirection}"], check=False).returncode == 7


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGINT])
def test_a_program_that_a_signal_kills_takes_us_with_it(number: signal.Signals) -> None:
    assert start(*python(f"import os; os.kill(os.getpid(), {int(number)})")).wait(60) == -number


def test_what_it_reads_and_writes_passes_untouched() -> None:
    code = "import sys; sys.stdout.write(sys.stdin.read().upper()); sys.stderr.write('err')"
    done = subprocess.run(
        [sys.executable, "-c", START, *python(code)], input=b"in\xc3\xa4", capture_output=True
    )
    assert (done.stdout, done.stderr) == ("INÄ".encode(), b"err")


def test_a_program_that_is_not_there_is_a_sentence_and_127(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", START, "no-such-program"], capture_output=True, text=True)
    assert done.returncode == 127
    assert "no-such-program" in done.stderr
    assert is_a_sentence(done.stderr.strip())
    there = tmp_path / "there"
    there.write_text("not executable")
    done = subprocess.run([sys.executable, "-c", START, str(there)], capture_output=True, text=True)
    assert done.returncode == 126
    assert is_a_sentence(done.stderr.strip())


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A program with a child, both of which count signals, in a group as a shell makes them."""
    script = tmp_path / "counts.py"
    script.write_text(COUNTS)
    process = start(sys.executable, str(script), str(tmp_path), "parent", process_group=0)
    assert eventually(lambda: (tmp_path / "child-ready").exists() and (tmp_path / "parent-ready").exists())
    yield process, tmp_path
    (tmp_path / "end").touch()
    assert process.wait(60) == 0


def counted(place: Path, number: int) -> dict[str, int]:
    return {
        name: (place / name).read_text().split().count(str(int(number))) if (place / name).exists() else 0
        for name in ("parent", "child")
    }


@pytest.mark.skipif(sys.version_info < (3, 11), reason="process_group")
@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_each_process_of_the_program_once(
    counting: tuple[subprocess.Popen[bytes], Path], number: signal.Signals, to_group: bool
) -> None:
    process, place = counting
    (os.killpg if to_group else os.kill)(process.pid, number)
    assert eventually(lambda: counted(place, number) == {"parent": 1, "child": 1})
    time.sleep(0.3)  # a second one would be there by now
    assert counted(place, number) == {"parent": 1, "child": 1}


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    code = "import signal; raise SystemExit(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    done = subprocess.run(["nohup", sys.executable, "-c", START, *python(code)], capture_output=True)
    assert done.returncode == 1


def test_the_program_gets_signals_as_a_shell_gives_them() -> None:
    """Python ignores SIGPIPE for itself; the program must not inherit that."""
    shell = "cat /proc/self/status"
    plain = subprocess.run(["sh", "-c", shell], capture_output=True, text=True).stdout
    ours = subprocess.run(
        [sys.executable, "-c", START, "sh", "-c", shell], capture_output=True, text=True
    ).stdout

    def masks(text: str) -> list[int]:
        """Without the two signals of the C library's own, which Python 3.13 sets in what it starts."""
        lines = [line.split() for line in text.splitlines() if line.startswith(("SigIgn", "SigBlk"))]
        return [int(mask, 16) & ~(0b11 << 31) for _, mask in lines]

    assert masks(ours) == masks(plain) != []


def test_a_kill_of_ours_kills_the_program(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    process = start(
        *python(f"import os, time; open({str(place)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    )
    assert eventually(lambda: place.exists() and place.read_text())
    process.kill()
    process.wait(60)
    assert eventually(lambda: not psutil.pid_exists(int(place.read_text())))


# A terminal


class Terminal:
    """A shell's part: a session with a terminal, in which a command is started in the foreground."""

    def __init__(self, *command: str) -> None:
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-c", START, *command])
        self.said = b""

    def type(self, keys: bytes) -> None:
        os.write(self.end, keys)

    def says(self, text: bytes) -> bool:
        return eventually(lambda: text in self._read())

    def _read(self) -> bytes:
        while select.select([self.end], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                got = os.read(self.end, 4096)
                if got:
                    self.said += got
                    continue
            break
        return self.said


SESSION = """
import os, signal, sys, time
count = 0
def note(number, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, note)
print("name?", flush=True)
print("hello", input(), flush=True)
while not count: time.sleep(0.02)
time.sleep(0.2)
print("interrupts", count, flush=True)
print("again?", flush=True)
print("bye", input(), flush=True)
"""


def test_in_a_terminal_keys_and_interrupts_reach_the_program() -> None:
    terminal = Terminal(sys.executable, "-c", SESSION)
    try:
        assert terminal.says(b"name?")
        terminal.type(b"you\n")
        assert terminal.says(b"hello you")
        terminal.type(b"\x03")
        assert terminal.says(b"interrupts 1")
        assert terminal.says(b"again?")
        # Ctrl-Z stops both; a shell's `fg` gives the terminal back and continues the one that it knows.
        terminal.type(b"\x1a")
        assert os.waitpid(terminal.pid, os.WUNTRACED)[1] & 0xFF == 0x7F
        os.kill(terminal.pid, signal.SIGCONT)
        time.sleep(0.2)
        terminal.type(b"now\n")
        assert terminal.says(b"bye now")
        assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(terminal.pid, signal.SIGKILL)
        os.close(terminal.end)
