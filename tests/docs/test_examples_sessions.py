"""The examples of sessions, at small size: what they count and compare, and that nothing of them is left.

Each runs as a user runs it, in folders of its own. Times are printed by them and not looked at here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import eventually, rarely
from programs import Programs
from server_process import environment_in, free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 250
SMALL_EVALUATION = "--train 32 --evaluate 96 --size 80 --epochs 2 --workers 1"
# Reads of each of 96 samples: one, and for all of them those few that decide what can be cached.
ONCE = 1 + 48 / 96
# With a chain of the dataset's own that is cut: whether it may be is tried eight times on four samples.
ONCE_CUT = ONCE + 64 / 96


@dataclass
class Place:
    """A user of their own: folders for everything, a port, and this Python first on the path."""

    folder: Path
    environment: dict[str, str]

    @property
    def cwd(self) -> Path:
        return self.folder / "cwd"

    def attempt(self, *program: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program in this place."""
        return subprocess.run(
            [str(word) for word in program],
            cwd=self.cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def run(self, *program: str | Path) -> str:
        """Run a program that ends well; return what it printed."""
        done = self.attempt(*program)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def command(self, name: str, shell: str) -> None:
        """Put a command before all others of that name."""
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{shell}\n")
        file.chmod(0o755)

    def python(self, example: str, options: str) -> str:
        return self.run(sys.executable, EXAMPLES / f"{example}.py", *options.split())

    def processes(self) -> list[psutil.Process]:
        """Processes of this place that live: the daemon is nobody's child."""
        mark = f"HOTSET_RUNTIME_DIR={self.environment['HOTSET_RUNTIME_DIR']}"
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if mark in Path(f"/proc/{process.pid}/environ").read_text(errors="replace").split("\0"):
                    found.append(process)
        return found

    def files(self) -> set[str]:
        """Files below this place; the log of a server stays, for people."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)) for path in paths if path.suffix != ".log"}


@pytest.fixture
def place(short_folder: Path) -> Iterator[Place]:
    """After the test no process of the place lives, and all that it left are plots."""
    for name in ("cwd", "temporary", "bin", "put"):
        (short_folder / name).mkdir()
    environment = environment_in(short_folder) | {
        "PORT": str(free_port()),
        "PATH": f"{short_folder / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(short_folder / "temporary"),
        "PYTHONWARNINGS": "error",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(short_folder / "temporary"),
    }
    place = Place(short_folder, environment)
    place.command("python", f'exec {sys.executable} "$@"')
    place.command("hotset", f'exec {sys.executable} -c "from hotset.cli.main import main; main()" "$@"')
    yield place
    gone = eventually(lambda: not place.processes())
    for process in (left_over := place.processes()):
        process.kill()
    assert gone, left_over
    left = {file for file in place.files() if not file.startswith(("bin/", "put/"))}
    assert all(file.startswith("cwd/session-") and file.endswith(".png") for file in left), left


def rows_of(table: str) -> dict[str, list[float]]:
    """The lines of a table that end in numbers, by their name."""
    rows = {}
    for line in table.splitlines():
        name, *cells = re.split(r"\s{2,}", line.strip())
        with contextlib.suppress(ValueError):
            rows[name] = [float(cell.rstrip("x")) for cell in cells]
    return rows


def is_a_plot(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.chaos  # tests below run the script, with a training that fails
def test_the_quick_start_goes_step_by_step(place: Place) -> None:
    folder = place.folder / "put"
    rng = np.random.default_rng(0)
    rng.integers(0, 10, (7, 3073), dtype=np.uint8).tofile(folder / "data_batch_1.bin")
    said = place.run(EXAMPLES / "quickstart_session.sh", folder).splitlines()
    assert said[0] == "Cache server startup completed successfully!"
    created = next(line for line in said if line.startswith("Session created"))
    number = created.split()[-1]
    shapes = [line for line in said if "image shape" in line]
    assert shapes == [f"{i} image shape: (32, 32, 3)" for i in range(5)]
    at = said.index(f"Listing sessions for server on port {place.environment['PORT']}")
    session, _, in_memory, on_disk, mean, read = said[at + 3].split()
    assert (session, in_memory, on_disk, read) == (number, "5", "n/a", "5")
    assert 4 * 3072 <= int(mean) < 4 * 3072 + 100  # float32 and a label
    assert said[at + 4 :] == [
        f"Drop session successfully for server on port {place.environment['PORT']}",
        f"Cache server on port {place.environment['PORT']} has been stopped successfully.",
    ]


def test_the_quick_start_writes_and_reads_the_binary_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record is the label, then the planes of red, green and blue; a sample has the colours last."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("quickstart_session")
    rows = example.Cifar10(example.write_cifar10(tmp_path, 12), num_samples=10)
    raw = (tmp_path / "data_batch_1.bin").read_bytes()
    assert len(raw) == 12 * 3073
    assert len(rows) == 10
    for i in range(10):
        row, record = rows[i], raw[i * 3073 : (i + 1) * 3073]
        assert row["label"] == record[0] == i // 2  # two of each of the six photographs
        for y, x, c in ((0, 0, 0), (5, 17, 1), (31, 31, 2)):
            assert row["image"][y, x, c] == record[1 + 1024 * c + 32 * y + x]
        scaled = example.rescale(row)["image"]
        assert scaled.shape == (32, 32, 3)
        assert -1 <= scaled.min() < scaled.max() <= 0


@pytest.mark.chaos
def test_evaluation_is_cached_after_its_last_transform(place: Place) -> None:
    said = place.run(EXAMPLES / "evaluation_session.sh", *SMALL_EVALUATION.split())
    assert re.findall(r"^(cached|live) +(\w+)", said, re.MULTILINE) == [
        ("cached", name) for name in ("Pictures", "decode", "resize", "centre_crop", "normalise")
    ]
    epochs = re.findall(r"^epoch: \d, loss: [\d.]+, acc: [\d.]+, eval_cost: [\d.]+$", said, re.MULTILINE)
    assert len(epochs) == 2 * 2
    assert "losses and accuracies with and without: equal" in said
    assert {"first", "later, mean"} <= rows_of(said).keys()
    in_memory, read = said.splitlines()[-2].split()[2::3]
    assert (in_memory, read) == ("96", str(2 * 96))
    assert said.splitlines()[-1].endswith("has been stopped successfully.")
    assert is_a_plot(place.cwd / "session-evaluation.png")


@pytest.mark.parametrize(
    "script", rarely(["quickstart_session.sh", "evaluation_session.sh"], "evaluation_session.sh")
)
def test_the_server_is_stopped_when_training_fails(place: Place, script: str) -> None:
    place.command("python", "exit 3")
    done = place.attempt(EXAMPLES / script)
    assert done.returncode == 3
    assert done.stdout.endswith("has been stopped successfully.\n")


@pytest.mark.chaos
@pytest.mark.parametrize("ranks", [2])
def test_slow_storage_is_read_once_and_crops_stay_random(place: Place, ranks: int) -> None:
    options = "--samples 96 --size 48 --epochs 2 --workers 1 --mb-per-second 100 --latency 0.1"
    said = place.python("slow_storage", f"{options} --ranks {ranks}")
    assert re.findall(r"^(cached|live) +(\w+)", said, re.MULTILINE) == [
        ("cached", "Pictures"),
        ("live", "random_crop"),
    ]
    assert "losses with and without: equal" in said
    without, cached = rows_of(said)["reads of each file"]
    assert without == 2
    assert 1 <= cached <= ONCE_CUT
    assert is_a_plot(place.cwd / "session-storage.png")


@pytest.mark.chaos
def test_jobs_of_a_sweep_read_the_source_once_together(place: Place) -> None:
    said = place.python("sweep_session", "--jobs 2 --samples 96 --size 48 --epochs 2 --workers 0")
    assert "losses of the jobs, all three ways: equal" in said
    rows = re.findall(r"^(no cache|a cache each|one session) +[\d.]+ +([\d.]+) +(.+)$", said, re.MULTILINE)
    reads, sizes = {way: float(n) for way, n, _ in rows}, {way: size for way, _, size in rows}
    assert reads["no cache"] == 2 * 2
    assert 2 <= reads["a cache each"] <= 2 * ONCE
    assert 1 <= reads["one session"] <= ONCE
    assert sizes["a cache each"] != sizes["one session"] != sizes["no cache"] == "0 B"
    assert is_a_plot(place.cwd / "session-sweep.png")


def test_programs_of_the_page_run(place: Place, programs: Programs) -> None:
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sessions.md").read_text(), re.DOTALL)
    assert len(found) == 3
    # In one process; each begins with what it imports itself.
    file = place.folder / "put" / "programs.py"
    file.write_text("\n".join(found))
    done = programs.run([str(file)], place.cwd, place.environment)
    assert done.returncode == 0, done.stdout + done.stderr
