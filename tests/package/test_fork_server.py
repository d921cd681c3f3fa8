"""The fork server of ``multiprocessing``, which starts workers by default from Python 3.14 on.

It imports the main module before it forks a worker. Before 3.14 the programs here name what it imports.
"""

from __future__ import annotations

from pathlib import Path

from programs import Programs

READERS = """
import sys
import hotset


@hotset.memo(memory="1MiB")
def square(number):
    return number * number


class Squares:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return square(index % 5)


class Loaded:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return "hotset.dataset.build" in sys.modules and "hotset.loader.loader" in sys.modules
"""

PROGRAM = """
import multiprocessing
import readers
from torch.utils.data import DataLoader

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["readers"])
    workers = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    print(next(iter(DataLoader(readers.Loaded(), batch_size=None, **workers))))
    assert sum(DataLoader(readers.Squares(), batch_size=None, **workers)) == 4 * 30
    made = readers.square.stats()
    print(made.calls, made.computed)
    assert readers.square(4) == 16
    print(readers.square.stats().computed)
"""


def test_what_the_server_imports_is_loaded_once_and_shares_the_programs_results(
    programs: Programs, tmp_path: Path
) -> None:
    (tmp_path / "readers.py").write_text(READERS)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = programs.run([str(program)], tmp_path)
    assert (run.stdout, run.stderr) == ("True\n20 5\n5\n", "")


DIES = """
import multiprocessing
import torch
from torch.utils.data import TensorDataset
import hotset

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["raises"])
    with hotset.cache(TensorDataset(torch.arange(8)), window=hotset.Window(4)) as window:
        loader = hotset.DataLoader(window, batch_size=2)
        print(sum(len(numbers) for _ in range(2) for (numbers,) in loader))
"""


def test_a_server_that_dies_as_it_imports_is_named_where_prefetch_workers_cannot_start(
    programs: Programs, tmp_path: Path
) -> None:
    (tmp_path / "raises.py").write_text("raise RuntimeError('no main guard')\n")
    program = tmp_path / "program.py"
    program.write_text(DIES)
    run = programs.run([str(program)], tmp_path)
    assert run.stdout == "8\n"
    assert "RuntimeError: no main guard" in run.stderr
    assert "The fork server has ended, and its output on stderr says why" in run.stderr
    assert "ulimit" not in run.stderr
