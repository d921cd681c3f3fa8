"""A program ends silently, whatever it still holds and whatever keeps its main module alive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import Programs

PROGRAM = """
{first}
import torch
from torch.utils.data import Dataset, IterableDataset

import hotset
from hotset.session import sessions


class Squares(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((8, 8), float(i * i)), i


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.full((8, 8), float(i)) for i in range(64))


def noise(sample):
    return sample[0] + torch.rand(()), sample[1]


def begin(loader):
    batches = iter(loader)
    next(batches)
    return batches


if __name__ == "__main__":
    cached = hotset.cache(Squares(), memory="1MiB")
    loader = hotset.DataLoader(cached, batch_size=8)
    local = begin(loader)
    workers = begin(hotset.DataLoader(cached, batch_size=8, num_workers=1))
    persistent = begin(hotset.DataLoader(cached, batch_size=8, num_workers=1, persistent_workers=True))
    queue = begin(hotset.DeviceQueue(loader, device="cpu"))
    read_ahead = begin(hotset.DeviceQueue([torch.zeros(2)] * 9, device="cpu"))
    sessions.create("one", memory=4 << 20)
    shared = hotset.cache(Squares(), session="one")
    batches = begin(hotset.DataLoader(shared, batch_size=8))
    slots = hotset.SharedCache(size_limit_gib=0.001, dataset_len=8, data_dims=(2,), dtype=torch.float32)
    slots.set_slot(0, torch.ones(2))
    window = hotset.cache(Squares(), memory="64KiB", window=hotset.Window(resident=16))
    moving = begin(hotset.DataLoader(window, batch_size=4))
    recorded = begin(hotset.DataLoader(hotset.cache(Stream(), memory="1MiB"), batch_size=4))
    circle = [cached, local, shared, slots, window]
    circle.append(circle)
    print("whole")
"""


@pytest.mark.parametrize("first", ["", pytest.param("import dill", marks=pytest.mark.chaos)])
def test_a_program_that_closes_nothing_ends_silently(first: str, tmp_path: Path) -> None:
    """dill keeps the main module alive, so its objects die after the modules that they need."""
    if first:
        pytest.importorskip("dill")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(first=first))
    places = {"PYTHONPATH": os.pathsep.join(sys.path), "HOTSET_RUNTIME_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("whole\n", "", 0)


CLOSES_ALL = """
import os, sys, torch
os.environ["HOTSET_RUNTIME_DIR"] = sys.argv[1]  # what stays in it is freed by the next program
import hotset
from torch.utils.data import TensorDataset

cached = hotset.cache(TensorDataset(torch.arange(8)), memory="1MiB")
assert [int(x) for x, in cached] == list(range(8))
os.closerange(3, 300)
print("whole")
"""


def test_a_program_that_closes_all_descriptors_ends_silently(programs: Programs, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(CLOSES_ALL)
    done = programs.run([str(program), str(tmp_path / "run")], tmp_path, ends_whole=True)
    assert (done.stdout, done.stderr, done.returncode) == ("whole\n", "", 0)
