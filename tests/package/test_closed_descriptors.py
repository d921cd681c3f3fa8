"""A program may close all descriptors once it has a cache, as one that becomes a daemon does.

What it opens next gets the numbers that the cache's had. Samples stay right, nothing hangs, and forked
workers and children keep what the program has opened.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import rarely
from programs import Programs

PROGRAM = """
import os, sys
import torch
os.environ["HOTSET_RUNTIME_DIR"] = os.path.join(sys.argv[1], "run")  # the next program frees what stays in it
from torch.utils.data import DataLoader, Dataset

import hotset


class Squares(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((100,), index)


def close_all():
    os.closerange(3, 256)
    return [open(os.path.join(sys.argv[1], str(number)), "w") for number in range(60)]


def passes(loader):
    for batches in range(2):
        got = torch.cat(list(loader))
        assert torch.equal(got[:, 0], torch.arange(32)), got[:, 0]


loader_class, workers, filled = {loader}, {workers}, {filled}
cached = hotset.cache(Squares(), memory="1MiB")
if filled:
    cached.fill()
elif not workers:
    cached[3]  # with the locks that a process takes as it fills
files = close_all()
passes(loader_class(cached, batch_size=4, num_workers=workers))
child = os.fork()
if not child:
    code = 1
    try:
        for file in files:
            print("a child's", file=file, flush=True)
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
print("whole", flush=True)
os._exit(0)
"""


CASES = [
    (loader, workers, filled)
    for loader in ("DataLoader", "hotset.DataLoader")
    for workers in (0, 2)
    for filled in (False, True)
]


@pytest.mark.parametrize(("loader", "workers", "filled"), rarely(CASES, *CASES[:3], CASES[5], CASES[7]))
def test_samples_are_right_and_nothing_hangs(
    loader: str, workers: int, filled: bool, programs: Programs, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(loader=loader, workers=workers, filled=filled))
    done = programs.run([str(program), str(tmp_path)], tmp_path)
    assert (done.stdout, done.returncode) == ("whole\n", 0), done.stderr


def test_workers_of_the_next_pass_find_memory_for_their_batches(programs: Programs, tmp_path: Path) -> None:
    """The blocks of the pass before are in memory that no new worker finds any more."""
    before = PROGRAM.partition("files = close_all()")[0].format(loader=None, workers=2, filled=True)
    program = tmp_path / "program.py"
    program.write_text(f"""{before}
live = hotset.cache(Squares(), memory="1MiB", transform=hotset.nondeterministic(abs))
loader = hotset.DataLoader(live, batch_size=4, num_workers=2)
passes(loader)
files = close_all()
passes(loader)
print("whole", flush=True)
os._exit(0)
""")
    done = programs.run([str(program), str(tmp_path)], tmp_path)
    assert (done.stdout, done.returncode) == ("whole\n", 0), done.stderr


def test_another_process_reads_the_source(programs: Programs, tmp_path: Path) -> None:
    """One that is not forked opens the cache by its descriptor."""
    before = PROGRAM.partition("files = close_all()")[0].format(loader=None, workers=0, filled=True)
    program = tmp_path / "program.py"
    program.write_text(f"""{before}
import pickle, warnings

close_all()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    theirs = pickle.loads(pickle.dumps(cached))
print(told[0].message, flush=True)
assert torch.equal(torch.stack([theirs[index] for index in range(32)])[:, 0], torch.arange(32))
assert theirs.stats().cached == 0
print("whole", flush=True)
os._exit(0)
""")
    done = programs.run([str(program), str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    said, whole = done.stdout.splitlines()
    assert said.startswith("the cache of Squares cannot be sent to another process, so there samples come")
    assert whole == "whole"


WITHOUT_STANDARD = """
import os, sys
import torch
os.environ["HOTSET_RUNTIME_DIR"] = os.path.join(sys.argv[1], "run")
from torch.utils.data import Dataset

import hotset
from hotset.dataset.parent_death import parent_death_signal
from hotset.session import sessions


class Loud(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        for number in range(3):
            try:
                os.write(number, b"what a library prints" * 100)
            except OSError:
                pass
        return torch.full((100,), index)


def passes(cached):
    for _ in range(2):
        got = torch.cat(list(hotset.DataLoader(cached, batch_size=4)))
        assert torch.equal(got[:, 0], torch.arange(32)), got[:, 0]
    assert (cached.stats().cached, cached.stats().hits) == (32, 32), cached.stats()


passes(hotset.cache(Loud(), memory="1MiB"))
assert parent_death_signal().fd > 2
passes(hotset.cache(Loud(), memory="1KiB", spill=sys.argv[1]))
session = sessions.create("loud", memory=1 << 20)
passes(hotset.cache(Loud(), session="loud"))
sessions.destroy(session)
with open(os.path.join(sys.argv[1], "whole"), "x"):
    pass
"""


def test_what_is_printed_without_standard_output_does_not_reach_what_is_cached(tmp_path: Path) -> None:
    """The first files that a daemon opens get the numbers of standard input, output and error."""
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_STANDARD)
    shell = 'exec "$0" "$@" 0<&- 1>&- 2>&-'
    subprocess.run(["sh", "-c", shell, sys.executable, str(program), str(tmp_path)], check=True, timeout=60)
    assert (tmp_path / "whole").exists()
