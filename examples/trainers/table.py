"""Each trainer without hotset and with it, in turn; prints a table.

    python examples/trainers/table.py [NAME ...] [--pairs 3] [--ranks 4] [--samples 256] [--folder FOLDER]
                                      [--rows FILE]

Two of the trainers change by no line: they run below ``hotset run``. The others change by one, which their
file has under ``if given.hotset``. Of each, ``--pairs`` runs without and with hotset follow each other; times
are medians of the ratios of a pair. Losses are compared bit for bit, over all runs. Memory is that of
``--ranks`` processes, started together as ranks of one job, with all of their workers: the sum of their
proportional set sizes at its largest. A trainer whose library is missing is left out, and a sentence says so.
With ``--rows`` what was measured is added to a file, and the table is of all that this has: so a pair at a
time can be measured, when the machine is quiet.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["TRAINERS", "Epoch", "Row", "Trainer", "joined", "main", "shown"]

HERE = Path(__file__).parent
TREE = HERE.parents[1]


class Trainer(NamedTuple):
    """One of the programs.

    Attributes:
        title: as people know it.
        file: its name here.
        needs: the modules that it imports, besides torch.
        changes: how many lines hotset takes; with none the program runs below ``hotset run``.
    """

    title: str
    file: str
    needs: tuple[str, ...]
    changes: int


TRAINERS = {
    "ultralytics": Trainer("Ultralytics, mosaics", "ultralytics_detect.py", ("ultralytics",), 0),
    "transformers": Trainer(
        "transformers' Trainer", "transformers_trainer.py", ("datasets", "transformers"), 0
    ),
    "timm": Trainer("timm", "timm_train.py", ("timm",), 1),
    "lightning": Trainer("Lightning", "lightning_fit.py", ("lightning", "torchvision"), 1),
    "monai": Trainer("MONAI, volumes", "monai_segment.py", ("monai", "nibabel"), 1),
    "lerobot": Trainer("LeRobot", "lerobot_clone.py", ("lerobot",), 1),
    "tokens": Trainer("tokens, packed", "token_packing.py", (), 1),
}


class Epoch(NamedTuple):
    """An epoch of one run."""

    seconds: float
    losses: list[float]


class Row(NamedTuple):
    """What came of a trainer.

    Attributes:
        title, changes: see :class:`Trainer`.
        first, second: for each pair, the time of the first and second epoch as a multiple of the plain
        program's.
        memory: bytes of all ranks without hotset and with it; 0 where not measured.
        equal: whether all losses were those of the plain program.
        losses: a hash of them; empty if nothing was trained.
    """

    title: str
    changes: int
    first: list[float]
    second: list[float]
    memory: tuple[int, int]
    equal: bool
    losses: str = ""


def joined(one: Row, other: Row) -> Row:
    """What came of a trainer in two calls.

    Example:
        >>> joined(Row("X", 1, [1.1], [0.5], (2, 3), True, "a"), Row("X", 1, [1.2], [0.6], (0, 0), True, "b"))
        Row(title='X', changes=1, first=[1.1, 1.2], second=[0.5, 0.6], memory=(2, 3), equal=False, losses='b')
    """
    losses = {one.losses, other.losses} - {""}
    return other._replace(
        first=one.first + other.first,
        second=one.second + other.second,
        memory=other.memory if other.memory[0] else one.memory,
        equal=one.equal and other.equal and len(losses) < 2,
        losses=other.losses or one.losses,
    )


def main(words: Sequence[str] | None = None) -> None:
    given = _parser().parse_args(words)
    with tempfile.TemporaryDirectory() as place:
        folder = given.folder or Path(place)
        known = _read(given.rows)
        for name in given.names or TRAINERS:
            trainer = TRAINERS[name]
            missing = [need for need in trainer.needs if importlib.util.find_spec(need) is None]
            if missing:
                say(
                    f"{trainer.title} is left out, as {missing[0]} is not installed; pip install "
                    f"{missing[0]}."
                )
                continue
            row = _row(trainer, folder, given, is_warm=name in known)
            known[name] = joined(known[name], row) if name in known else row
            if given.rows:
                given.rows.write_text(json.dumps({one: found._asdict() for one, found in known.items()}))
        print("\n".join(shown([known[name] for name in TRAINERS if name in known], given.ranks)), flush=True)


def _read(file: Path | None) -> dict[str, Row]:
    """The rows of earlier calls, by the trainers' names."""
    if file is None or not file.exists():
        return {}
    return {name: Row(**row) for name, row in json.loads(file.read_text()).items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(TRAINERS)}; all if none")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4, help="processes whose memory is measured; 0 for none")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where data are made; a temporary folder by default")
    parser.add_argument("--rows", type=Path, help="a file to which what is measured is added")
    return parser


def shown(rows: list[Row], ranks: int) -> list[str]:
    """The table, as lines of Markdown.

    Example:
        >>> print(shown([Row("X", 1, [1.1], [0.5, 0.7], (2 << 20, 3 << 20), True)], 4)[2])
        | X | 1 | 1.10x (1.10 to 1.10) | 0.60x (0.50 to 0.70) | 2 MiB / 3 MiB | yes |
    """
    lines = [
        f"| trainer | lines changed | epoch 1, time | epoch 2, time | memory of {ranks} ranks, without / "
        "with | "
        "losses equal |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory = " / ".join(f"{size / (1 << 20):,.0f} MiB" for size in row.memory) if row.memory[0] else "-"
        times = " | ".join(map(_ratio, (row.first, row.second)))
        lines.append(
            f"| {row.title} | {row.changes} | {times} | {memory} | {'yes' if row.equal else '**no**'} |"
        )
    return lines


def _ratio(found: list[float]) -> str:
    if not found:
        return "-"
    return f"{statistics.median(found):.2f}x ({min(found):.2f} to {max(found):.2f})"


def _row(trainer: Trainer, folder: Path, given: argparse.Namespace, *, is_warm: bool) -> Row:
    first, second = [], []
    losses: list[list[list[float]]] = []
    # The first makes the data, and does not count.
    for number in range(1 if is_warm else 0, given.pairs + 1):
        say(f"{trainer.title}: pair {number} of {given.pairs}" if number else f"{trainer.title}: warming up")
        plain, ours = (_epochs(trainer, folder, given, with_hotset=which) for which in (False, True))
        losses += [[epoch.losses for epoch in run] for run in (plain, ours)]
        if number:
            first.append(ours[0].seconds / plain[0].seconds)
            second.append(ours[1].seconds / plain[1].seconds)
    memory = (0, 0)
    if given.ranks:
        say(f"{trainer.title}: memory of {given.ranks} ranks")
        memory = (_memory(trainer, folder, given, False), _memory(trainer, folder, given, True))
    equal = all(run == losses[0] and run[0] for run in losses)
    told = hashlib.sha256(json.dumps(losses[0]).encode()).hexdigest() if losses else ""
    return Row(trainer.title, trainer.changes, first, second, memory, equal, told)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _command(trainer: Trainer, folder: Path, given: argparse.Namespace, with_hotset: bool) -> list[str]:
    options = ["--samples", str(given.samples), "--workers", str(given.workers)]
    program = [sys.executable, str(HERE / trainer.file), str(folder), *options]
    if not with_hotset:
        return program
    if trainer.changes:
        return [*program, "--hotset"]
    return [sys.executable, "-m", "hotset", "run", "--", *program]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(TREE), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def _epochs(trainer: Trainer, folder: Path, given: argparse.Namespace, *, with_hotset: bool) -> list[Epoch]:
    """The epochs of one run.

    Raises:
        RuntimeError: the program failed; with the end of what it said.
    """
    command = _command(trainer, folder, given, with_hotset)
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or len(lines) < 2:
        raise RuntimeError(f"{trainer.title} failed with {done.returncode}: {done.stderr[-2000:]}")
    return [Epoch(line["seconds"], line["losses"]) for line in lines]


def _memory(trainer: Trainer, folder: Path, given: argparse.Namespace, with_hotset: bool) -> int:
    """The largest sum of proportional set sizes of so many ranks of one job."""
    command = _command(trainer, folder, given, with_hotset)
    run, program = command[: command.index("--") + 1] if "--" in command else [], command
    if run:
        program = command[len(run) :]
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
    whole = [*run, sys.executable, *launched, *program[1:]]
    job = subprocess.Popen(whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment())
    largest, root = 0, psutil.Process(job.pid)
    while job.poll() is None:
        largest = max(largest, _proportional([root, *root.children(recursive=True)]))
        time.sleep(0.3)
    return largest


def _proportional(processes: list[psutil.Process]) -> int:
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended meanwhile
            continue
    return total


if __name__ == "__main__":
    main()
