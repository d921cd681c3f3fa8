"""In a container without ``/proc``, programs run without a cache, and a warning says why.

Where it is there, but a process may not look into another's files, workers send batches as torch's do.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import rarely
from programs import Programs

WITHOUT_PROC = """
import builtins
import os
import pickle
import sys
import warnings

import torch
from torch.utils.data import Dataset

import hotset


def hide(module, name):
    real = getattr(module, name)

    def call(path, *arguments, **named):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *arguments, **named)

    setattr(module, name, call)


def hide_proc():
    for name in ("open", "stat", "lstat", "readlink", "listdir", "scandir"):
        hide(os, name)
    hide(builtins, "open")


class Squares(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((8,), float(i * i))


def check(cached, **how):
    for _ in range(2):
        got = torch.cat(list(hotset.DataLoader(cached, batch_size=8, **how)))
        assert torch.equal(got, torch.stack([Squares()[i] for i in range(64)]))
"""

TRAINING = (
    WITHOUT_PROC
    + """
if "elsewhere" not in sys.argv:
    hide_proc()  # in each spawned worker as well

if __name__ == "__main__":
    kinds = [
        {"memory": "1MiB"},
        {"session": "one"},
        {"memory": "1KiB", "spill": sys.argv[1]},
        {"memory": "64KiB", "window": hotset.Window(resident=64)},
    ]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for kind in kinds:
            cached = hotset.cache(Squares(), **kind)
            check(cached)
            check(cached, num_workers=1)
            cached.close()
        if "spawn" in sys.argv:
            check(hotset.cache(Squares(), memory="1MiB"), num_workers=1, multiprocessing_context="spawn")
    sentences = [str(one.message) for one in told if one.category is hotset.HotsetWarning]
    assert len(sentences) == 4 + ("spawn" in sys.argv), sentences
    assert all("not cached" in sentence and "/proc is not mounted" in sentence for sentence in sentences)
    print("trained")
"""
)

JOINING = (
    WITHOUT_PROC
    + """
if __name__ == "__main__":
    cached = hotset.cache(Squares(), memory="1MiB")
    check(cached)
    sent = pickle.dumps(cached)
    pid = os.fork()  # stands for a worker in a container of its own: it only has what it was sent
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print("joined")
    else:
        hide_proc()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            check(pickle.loads(sent))
        assert len(told) == 1 and "cannot be attached to" in str(told[0].message), told
        sys.stdout.flush()
        os._exit(0)
"""
)

# A process that gave up its rights (`setuid`), or that `prctl` protects, shows its files to itself alone.
PROTECTED = (
    WITHOUT_PROC
    + """
def protect(worker):
    real = os.open

    def call(path, *arguments, **named):
        if str(path).startswith(f"/proc/{os.getppid()}/"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *arguments, **named)

    os.open = call


if __name__ == "__main__":
    cached = hotset.cache(Squares(), memory="1MiB", transform=[hotset.nondeterministic(lambda x: x)])
    check(cached, num_workers=1, worker_init_fn=protect)
    print("trained")
"""
)


def run(programs: Programs, program: str, folder: Path, *arguments: str) -> str:
    path = folder / "program.py"
    path.write_text(program)
    done = programs.run([str(path), str(folder / "spill"), *arguments], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments", rarely([[], ["spawn"]], ["spawn"]))
def test_without_proc_a_program_runs_uncached_with_a_warning(
    arguments: list[str], programs: Programs, runtime: Path, tmp_path: Path
) -> None:
    assert run(programs, TRAINING, tmp_path, *arguments) == "trained\n"


def test_a_proc_of_another_namespace_is_none(runtime: Path, tmp_path: Path) -> None:
    inside = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if shutil.which(inside[0]) is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a namespace of processes")
    path = tmp_path / "program.py"
    path.write_text(TRAINING)
    command = [*inside, sys.executable, str(path), str(tmp_path / "spill"), "elsewhere"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("trained\n", 0), done.stderr


def test_a_worker_without_proc_reads_the_source(programs: Programs, runtime: Path, tmp_path: Path) -> None:
    assert run(programs, JOINING, tmp_path) == "joined\n"


def test_a_worker_that_may_not_reach_its_parents_memory_sends_batches_as_torch_does(
    programs: Programs, runtime: Path, tmp_path: Path
) -> None:
    assert run(programs, PROTECTED, tmp_path) == "trained\n"
