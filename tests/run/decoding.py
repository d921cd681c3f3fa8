"""What the tests of decoders share: a job's environment in this process, and programs below ``hotset run``.

A decoder is replaced in a process of its own, as nobody can put back what other modules have imported. The
command itself and programs without it are forked from a process that has imported torch. What the command
starts imports it anew, as a user's program does, where the command is :data:`COMMAND`; below :data:`FORKING`
it has imported torch when the hooks are installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from programs import Programs

COMMAND = "from hotset.cli.main import main; main()"

# Where a process would become an interpreter, it runs the program itself: importing torch is most of what
# programs of these tests take.
FORKING = """
import gc, os, programs, signal, sys, types
execute = os.execvpe

def become(file, command, environment):
    if command[:2] != [sys.executable, "-c"]:
        execute(file, command, environment)
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number > 2 and not os.get_inheritable(number): os.close(number)
        except OSError:
            pass  # that of the list itself
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)): signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.excepthook = ["-c", *command[3:]], sys.__excepthook__
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code = None
    try:
        from hotset.run.start import start
        start()
        gc.freeze()
        exec(compile(command[2], "<string>", "exec"), vars(main))
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    programs.end(code)

os.execvpe = become
from hotset.cli.main import main; main()
"""


programs: Programs = None  # type: ignore[assignment]  # set by the fixture ``forking``


def forked(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run Python code as a program."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program.py")
        file.write_text(program)
        return programs.run([str(file), *args], Path.cwd())


class Ran(NamedTuple):
    """What a program printed, line by line as JSON, and the report on its stderr."""

    said: list[Any]
    report: str
    code: int


def run(
    program: str,
    *args: str,
    hotset: tuple[str, ...] | None = ("--memory", "256MiB"),
    command: str = FORKING,
) -> Ran:
    """Run Python code below ``hotset run`` with these options, or without it if they are None."""
    if hotset is None:
        done = forked(program, *args)
    else:
        done = forked(command, "run", *hotset, "--", sys.executable, "-c", program, *args)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("[", "{", '"'))]
    return Ran([json.loads(line) for line in lines], done.stderr, done.returncode)


def calls(report: str, name: str) -> tuple[int, int]:
    """Calls and hits of a function in a report; none if it is not there."""
    for line in report.splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1].replace(",", "")), int(words[2].replace(",", ""))
    return 0, 0


# Each program prints digests of what it gets in several rounds; they are compared with those of a plain run.
PRELUDE = """
LINES = 1
import gc; gc.disable()  # it would pass over torch as that is imported, and as the program ends
import hashlib, json, os, re, sys, threading, torch, multiprocessing
gc.freeze(); gc.enable()

def digest(value):
    import numpy, torch
    if isinstance(value, numpy.ndarray):
        flags = value.flags
        content = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
        facts = (str(value.dtype), value.shape, value.strides, flags.owndata, flags.writeable, flags.aligned,
                 type(value).__name__, hashlib.sha256(content).hexdigest()[:16])
        return repr(facts)
    if isinstance(value, torch.Tensor):
        return repr((str(value.dtype), tuple(value.shape), value.stride(), type(value).__name__,
                     hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]))
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *map(digest, value)]
    return repr(value)

def outcome(function, *args, **keywords):
    import traceback
    try:
        return digest(function(*args, **keywords))
    except Exception as error:
        frames = [f.name for f in traceback.extract_tb(error.__traceback__)
                  if "hotset" in f.filename and "/tests/" not in f.filename]
        said = re.sub("0x[0-9a-f]+", "", str(error))
        # A wrapped function that calls a wrapped function has two lines.
        return [type(error).__name__, said, repr(error.__context__), len(frames) <= LINES]

def say(value):
    print(json.dumps(value), flush=True)
"""
