"""The command ``hotset doctor``: the program stays its own, and what is said follows from what was seen."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import COMMAND, FORKING, forked
from helpers import eventually, is_a_sentence, rarely
from kills import child, gone, kill
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import hotset
from hotset.loader.batch_order import whole_epoch
from hotset.policy.throughput import Fetch, Step
from hotset.run.doctor.advice import as_json, judge
from hotset.run.doctor.clocks import Clocks
from hotset.run.doctor.loop import LoaderSettings, LoopSums, StepLength, step_alone
from hotset.run.doctor.observed import Decoder, Observed, read
from hotset.run.doctor.stand_in import StandIn
from hotset.run.doctor.text import lines
from hotset.run.doctor.trial import in_fork
from hotset.run.doctor.watch import Watch
from hotset.run.environment import WatchOptions, watched_environment
from hotset.run.ledger import Ledger, make_ledger

# Draws in the loop and in the dataset; prints the sums, so that runs can be compared.
TRAINING = """
import gc; gc.disable()  # it would pass over torch as that is imported, and as the program ends
import sys, time, torch
from torch.utils.data import DataLoader, Dataset
gc.freeze(); gc.enable()
torch.multiprocessing.set_start_method("fork", force=True)  # no file holds the program

class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        time.sleep({pause})
        return torch.full((4,), float(index)) {more}

if __name__ == "__main__":
    torch.manual_seed(0)
    for epoch in range({epochs}):
        for batch in DataLoader(Rows(), batch_size=4, shuffle=True, num_workers={workers}):
            print("sum", float((batch * torch.rand(4)).sum()), flush=True)
    print("end", flush=True)
"""


# A program below the command that tries by itself.
TRIES = """
from PIL import Image
from hotset.run.doctor.loop import LoaderSettings
from hotset.run.doctor.trial import in_fork
from hotset.run.doctor.watch import installed

def tries(loader):
    installed().is_off = True
    more = loader.collate_fn, None, len(loader), loader.batch_sampler
    print(in_fork(LoaderSettings(loader.dataset, 2, 4, *more), None, decodes=True))
"""


def training(pause: float = 0.001, epochs: int = 2, workers: int = 0, more: str = "") -> str:
    return TRAINING.format(pause=pause, epochs=epochs, workers=workers, more=more)


# Nothing is said of rates, and a program is watched to its end, however busy the machine is.
SHORT_TRIAL = "import hotset.run.doctor.measured as trial; trial._RATE_SECONDS = 0.1"


def doctor(*args: str, command: str = f"{SHORT_TRIAL}\n{FORKING}") -> subprocess.CompletedProcess[str]:
    return forked(command, "doctor", *args)


# The program goes on to its end.
BRIEFLY = ("--keep", "--seconds", "6")


def judged(
    program: str, *options: str, **how: str
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    done = doctor("--json", *options, "--", sys.executable, "-c", program, **how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done


def sums(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("sum", "end"))]


@pytest.mark.usefixtures("forking")
class TestCommand:
    @pytest.mark.parametrize("workers", rarely([0, 2], 0))
    def test_the_program_computes_what_it_would_and_the_cache_of_its_main_loader_is_tried(
        self, workers: int
    ) -> None:
        """Of two loaders, the one that takes longer is judged, by its own samples."""
        other = f"DataLoader(torch.utils.data.Subset(Rows(), range(24)), 3, num_workers={workers})"
        program = training(pause=0.002, epochs=3, workers=workers).replace(
            '    print("end"', f'        for batch in {other}: pass\n    print("end"'
        )
        program = program.replace("    torch.manual_seed", f"    {SHORT_TRIAL}\n    torch.manual_seed")
        found, done = judged(program, *BRIEFLY, command=COMMAND)
        assert sums(done.stderr) == sums(forked(program).stdout)
        assert found["now"]["num_workers"] == workers
        assert found["now"]["batch_size"] == pytest.approx(4)
        # Its own batches alone, 14 or 15 of each epoch after the first ones, fewer where the clocks rest, as
        # they do for long on a busy machine; the other loader has 24 more.
        assert 0 < found["now"]["steps"] <= 46
        assert found["now"]["samples_per_second"] > 0.0
        assert 0.0 <= found["now"]["waited_fraction"] <= 1.0
        assert found["cached"]["samples_per_second"] > 0.0
        assert found["cached"]["bytes"] >= 64 * 16
        assert isinstance(found["num_workers"]["best"], int)
        for one in found["advice"]:
            assert one["line"]
            assert one["gain"] >= 1.05

    def test_what_it_imports_does_not_move_the_collection_of_garbage(self, tmp_path: Path) -> None:
        program = "import gc; print([one['collections'] for one in gc.get_stats()], gc.isenabled())"
        watched = watched_environment(WatchOptions(str(tmp_path), 60.0), os.environ)
        # Not of a fork, which has what its parent has counted.
        texts = [
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True
            )
            for env in (None, watched)
        ]
        (few, *fewer), (youngest, *older) = (
            list(map(int, re.findall(r"\d+", done.stdout))) for done in texts
        )
        assert older == fewer
        assert youngest <= few + 2
        assert "True" in texts[1].stdout

    @pytest.mark.chaos  # a program that is kept while watching fails is below
    def test_a_long_program_may_be_kept(self) -> None:
        kept = doctor("--keep", "--seconds", "0.2", "--", sys.executable, "-c", training(epochs=6))
        assert sums(kept.stdout)[-1] == "end"
        assert "a cache of the dataset is tried now" in kept.stderr
        assert "the program goes on" in kept.stderr
        assert "samples/s" in kept.stderr

    @pytest.mark.parametrize("by", rarely(["the command's own shell", "a script"], "a script"))
    def test_a_long_program_in_the_background_is_ended_as_by_ctrl_c(self, by: str, tmp_path: Path) -> None:
        """A shell script has all that it starts there ignore SIGINT.

        Python drops an exception in what is called before a fork, where this program nearly always is.
        """
        slow = (
            "import os\nhere = os.getpid()\n"
            "os.register_at_fork(before=lambda: time.sleep(0.5 if os.getpid() == here else 0.0))\n"
        )
        program = training(epochs=10_000, workers=1).replace("class Rows", slow + "class Rows")
        file = tmp_path / "train.py"
        program = program.replace("    torch.manual_seed", f"    {SHORT_TRIAL}\n    torch.manual_seed")
        file.write_text(program.replace("return 64", "return 16"))
        command, before = [sys.executable, str(file)], ""
        if by == "a script":
            command = ["sh", "-c", '"$@" & wait', "sh", *command]
        else:
            before = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        done = forked(before + COMMAND, "doctor", "--json", "--seconds", "2", "--", *command)
        assert done.returncode == 0, done.stderr
        assert "ended as by Ctrl-C" in done.stderr
        assert "did not end" not in done.stderr
        assert sums(done.stderr)[-1] != "end"
        assert json.loads(done.stdout)["now"]["steps"] > 0
        assert ("\nKeyboardInterrupt" in done.stderr) == (by != "a script")
        assert ("the program ignores SIGINT" in done.stderr) == (by == "a script")

    @pytest.mark.chaos  # test_program.py has the exit codes of programs
    def test_a_program_that_fails_by_itself_ends_as_it_ends(self) -> None:
        done = doctor("--", sys.executable, "-c", training() + "\nraise SystemExit(7)")
        assert done.returncode == 7
        assert "failed by itself, with exit code 7" in done.stderr
        assert "samples/s" not in done.stderr
        killed = doctor("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
        assert killed.returncode == -9
        assert "by signal 9" in killed.stderr

    @pytest.mark.parametrize(
        ("command", "telling"),
        [
            (["echo", "hello"], "no Python process"),
            ([sys.executable, "-c", "print('hello')"], "no batch from a torch.utils.data.DataLoader"),
        ],
    )
    def test_without_a_loader_it_says_so(self, command: list[str], telling: str) -> None:
        done = doctor("--", *command)
        assert (done.returncode, done.stdout) == (3, "hello\n")
        assert telling in done.stderr
        assert is_a_sentence(done.stderr.strip())

    @pytest.mark.parametrize(
        ("batch_size", "telling"),
        rarely(
            [
                (65, "given no batch: Rows of 64 samples in batches of 65"),
                (64, "without the first of each epoch"),
            ],
            (64, "without the first of each epoch"),  # the sentence of the test above
        ),
    )
    def test_epochs_without_batches_to_judge_are_said_to_be(self, batch_size: int, telling: str) -> None:
        done = doctor(
            "--",
            sys.executable,
            "-c",
            training(0.0, epochs=9).replace("batch_size=4", f"batch_size={batch_size}, drop_last=True"),
        )
        assert done.returncode == 3
        assert telling in done.stderr
        assert is_a_sentence(done.stderr.strip())

    def test_a_program_whose_steps_take_long_is_to_be_watched_for_longer(self) -> None:
        done = doctor("--seconds", "0.5", "--", sys.executable, "-c", training(pause=1.0))
        assert done.returncode == 3
        assert "in the 0.5 s for which it was watched" in done.stderr
        assert "--seconds 2." in done.stderr
        assert is_a_sentence(done.stderr.strip())

    @pytest.mark.parametrize(
        ("args", "telling"),
        [([], "hotset doctor -- python train.py"), (["--seconds", "0", "true"], "--seconds")],
    )
    def test_wrong_options_are_sentences(self, args: list[str], telling: str) -> None:
        done = doctor(*args)
        assert done.returncode == 2
        assert telling in done.stderr

    def test_after_ctrl_c_there_is_a_report_of_what_was_seen(self) -> None:
        ends = "if epoch == 1: import os, signal; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
        program = training(epochs=3).replace("        for batch", f"        {ends}\n        for batch")
        program = program.replace("    torch.manual_seed", f"    {SHORT_TRIAL}\n    torch.manual_seed")
        done = doctor("--seconds", "30", "--", sys.executable, "-c", program, command=COMMAND)
        assert done.returncode in (-signal.SIGINT, 1)  # Python 3.11 ends so below -c
        assert "samples/s" in done.stderr

    @pytest.mark.chaos  # other reasons not to judge are in the tests around this one
    def test_batches_of_another_thread_are_said_to_be(self) -> None:
        program = (
            "import threading, torch\n"
            "loader = torch.utils.data.DataLoader(torch.arange(40), batch_size=4)\n"
            "thread = threading.Thread(target=lambda: [batch for batch in loader])\n"
            "thread.start(); thread.join()\n"
        )
        done = doctor("--", sys.executable, "-c", program)
        assert done.returncode == 3
        assert "in another thread" in done.stderr

    @pytest.mark.chaos  # imports torch in one process more
    def test_training_in_a_process_that_the_program_spawns_is_judged_and_ended(self) -> None:
        program = training(pause=0.005, epochs=10_000).replace("__main__", "__mp_main__") + (
            'if __name__ == "__main__":\n'
            "    import torch.multiprocessing as mp\n"
            "    mp.spawn(train, nprocs=1)\n"
        )
        program = program.replace('if __name__ == "__mp_main__":', "def train(rank):")
        path = Path(tempfile.mkdtemp(), "train.py")
        path.write_text(program)
        done = doctor("--json", "--seconds", "1", "--", sys.executable, str(path))
        shutil.rmtree(path.parent)
        assert done.returncode == 0, done.stderr
        assert "ended as by Ctrl-C" in done.stderr
        assert json.loads(done.stdout)["cached"]["samples_per_second"] > 0.0

    @pytest.mark.chaos  # two processes with torch, and a trial
    def test_of_two_ranks_the_one_that_tries_the_cache_is_waited_for(self, tmp_path: Path) -> None:
        path = tmp_path / "train.py"
        path.write_text(
            training(pause=0.002, epochs=400)
            .replace("import sys", "import torch.distributed as dist, sys")
            .replace(
                "    torch.manual_seed(0)", "    dist.init_process_group('gloo')\n    torch.manual_seed(0)"
            )
        )
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(path),
        ]
        done = doctor("--json", "--seconds", "2", "--", *command)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["now"]["ranks"] == 2
        assert found["cached"]["samples_per_second"] > 0.0, found["cached"]

    @pytest.mark.parametrize("command", ["doctor", "run"])
    def test_without_room_for_temporary_files_it_says_so(self, command: str, tmp_path: Path) -> None:
        limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        program = f"{limit} os.execv(sys.executable, [sys.executable, '-m', 'hotset', *sys.argv[1:]])"
        done = subprocess.run(
            [sys.executable, "-c", program, command, "--", "echo", "hello"],
            # Python would cut bytecode at the limit, and leave it to all later processes.
            env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert "TMPDIR" in done.stderr
        assert is_a_sentence(done.stderr.strip())
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("opened", "kept"),
        [
            ("path", True),
            pytest.param("io.BytesIO(open(path, 'rb').read())", False, marks=pytest.mark.chaos),
        ],
    )
    def test_hotset_run_is_tried_with_the_programs_own_decoding(
        self, opened: str, kept: bool, tmp_path: Path
    ) -> None:
        for number in range(4):
            pixels = np.random.default_rng(number).integers(0, 256, (200, 300, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        read = f"""
        path = "{tmp_path}/" + str(index % 4) + ".png"
        picture = numpy.asarray(Image.open({opened}))
        return torch.from_numpy(picture[:2, :2].astype("float32")).mean() + torch.zeros(4)"""
        program = training(pause=0.0, workers=1).replace("import sys", "import io, numpy, sys")
        program = program.replace("class Rows", "from PIL import Image\nclass Rows")
        program = program.replace("        return torch.full((4,), float(index)) ", read.lstrip("\n"))
        found, done = judged(program, *BRIEFLY)
        assert sums(done.stderr) == sums(forked(program).stdout)
        (decoder,) = found["sample"]["decoders"]
        assert decoder["name"] == "PIL.Image.Image.load"
        # Whether it is worth its memory is a matter of rates, which a busy machine changes.
        said = [sentence for sentence in found["unknown"] if "hotset run" in sentence]
        assert (said == []) == kept
        if not kept:
            assert "hotset run would keep nothing" in said[0]
            assert not any("hotset run" in one["line"] for one in found["advice"])

    @pytest.mark.chaos
    def test_what_workers_had_in_hand_when_the_trial_was_over_is_not_counted_twice(
        self, tmp_path: Path
    ) -> None:
        wide = np.arange(2000, dtype=np.uint8)[:, None]
        for number in range(64):
            pixels = np.broadcast_to(wide + np.uint8(number), (1000, 2000, 3))
            Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / f"{number}.png", compress_level=1)
        read = f"""
        picture = numpy.asarray(Image.open("{tmp_path}/" + str(index) + ".png"))
        return torch.from_numpy(picture[:2, :2].astype("float32")).mean() + torch.zeros(4)"""
        program = training(pause=0.0).replace("import sys", "import json, numpy, sys")
        program = program.replace("class Rows", f"{TRIES}\nclass Rows")
        program = program.replace("        return torch.full((4,), float(index)) ", read.lstrip("\n"))
        program = (
            program.partition("    torch.manual_seed")[0] + "    tries(DataLoader(Rows(), 4, num_workers=2))"
        )
        done = doctor("--seconds", "0.5", "--", sys.executable, "-c", program)
        assert done.returncode == 3, done.stderr
        assert json.loads(done.stdout)["run"]["bytes"] == pytest.approx(1000 * 2000 * 3, rel=0.1)

    @pytest.mark.chaos  # each worker of the program imports torch
    def test_a_program_whose_workers_are_no_forks_is_tried(self, tmp_path: Path) -> None:
        Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(tmp_path / "picture.png")
        read = f"""
        picture = numpy.asarray(Image.open("{tmp_path}/picture.png"))
        return torch.from_numpy(picture[:2, :2].astype("float32")).mean() + torch.zeros(4)"""
        program = training(pause=0.0, epochs=3, workers=1).replace("import sys", "import numpy, sys")
        program = program.replace("class Rows", "from PIL import Image\nclass Rows")
        program = program.replace("        return torch.full((4,), float(index)) ", read.lstrip("\n"))
        program = program.replace("num_workers=1", 'num_workers=1, multiprocessing_context="forkserver"')
        path = tmp_path / "train.py"
        path.write_text(program)
        done = doctor("--json", "--keep", "--seconds", "6", "--", sys.executable, str(path))
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert not any("hotset run" in sentence for sentence in found["unknown"])
        assert any(one["line"] == "persistent_workers=True" for one in found["advice"])

    def test_random_samples_are_no_promise_and_the_reason_is_told(self) -> None:
        found, _ = judged(training(more="+ torch.rand(4)"), *BRIEFLY)
        assert found["cached"]["samples_per_second"] is None
        assert found["cached"]["refused"]
        assert any("hotset.cache" in sentence for sentence in found["unknown"])

    def test_an_iterable_dataset_is_watched_and_no_cache_is_promised(self) -> None:
        program = training().replace("Dataset)", "IterableDataset)").replace("Dataset\n", "IterableDataset\n")
        program = program.replace("shuffle=True, ", "").replace(
            "def __getitem__(self, index):",
            "def __iter__(self): return map(self.at, range(64))\n    def at(self, index):",
        )
        found, _ = judged(program, *BRIEFLY)
        assert found["now"]["samples_per_second"] > 0.0
        assert "iterated over" in found["cached"]["refused"]

    @pytest.mark.chaos  # it is waited for
    def test_workers_in_which_the_dataset_hangs_are_not_advised(self) -> None:
        made = (
            "__init__(self): self.pool = ThreadPoolExecutor(2); list(self.pool.map(abs, range(2)))\n    def "
        )
        # Its pool takes no work once the program ends by itself, when it would be tried.
        program = training(pause=0.01, epochs=500).replace("def __len__", f"def {made}__len__")
        program = program.replace("time.sleep(0.01)", "self.pool.submit(time.sleep, 0.01).result()")
        program = "from concurrent.futures import ThreadPoolExecutor\n" + program
        found, _ = judged(program, "--seconds", "0.5")
        assert found["num_workers"]["best"] == 0
        assert found["advice"] == []
        assert any("workers" in one and "timed out" in one for one in found["unknown"])

    def test_a_program_does_not_fail_where_watching_does(self) -> None:
        # A version of torch whose iterators lack what is looked at; its workers need it no more.
        change = (
            "plain = DataLoader.__iter__\n"
            "def begin(self):\n"
            "    iterator = plain(self)\n"
            "    del iterator._collate_fn\n"
            "    return iterator\n"
            "DataLoader.__iter__ = begin\n"
        )
        main = 'if __name__ == "__main__":'
        program = training(epochs=3, workers=1).replace(main, change + main)
        done = doctor("--keep", "--", sys.executable, "-c", program)
        assert sums(done.stdout)[-1] == "end"
        assert done.returncode == 3

    def test_a_program_that_has_hotsets_loader_is_not_judged(self) -> None:
        program = (
            training(workers=2)
            .replace("import sys", "import sys, hotset")
            .replace(
                "DataLoader(Rows()", 'hotset.DataLoader(hotset.cache(Rows(), memory="1MiB", transform=noise)'
            )
            .replace("if __name__", "def noise(row): return row + torch.rand(4)\n\nif __name__")
        )
        done = doctor("--", sys.executable, "-c", program)
        assert done.returncode == 3
        assert "last_epoch" in done.stderr

    @pytest.mark.chaos
    def test_workers_do_not_stay_stopped_when_the_program_is_killed(self, tmp_path: Path) -> None:
        program = training(pause=0.002, epochs=500, workers=2).replace(
            'print("sum"',
            f'open({str(tmp_path / "pid")!r}, "w").write(str(__import__("os").getpid())); print("sum"',
        )
        command = [sys.executable, "-m", "hotset", "doctor", "--", sys.executable, "-c", program]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 100
        said = ""
        while not said:  # the program writes it again and again
            assert time.monotonic() < deadline
            time.sleep(0.05)
            said = (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""
        time.sleep(1.0)
        os.kill(int(said), signal.SIGKILL)
        # Ends when each process that has its end of the pipe has ended: a stopped worker would keep it.
        process.communicate(timeout=100)
        assert process.returncode == -9


# ---- what is said of figures that are known --------------------------------------------------------------

PLAN = {
    "total_bytes": 64 << 20,
    "fits": 1.0,
    "room": 1 << 30,
    "transforms": [
        {"name": "Rows", "kind": "source", "cached": True, "seconds": 5e-3, "bytes": 1000},
        {"name": "Flip", "kind": "random", "cached": False, "seconds": 1e-5, "bytes": 1000},
    ],
}


def tried(rate: float, cpu: float) -> dict[str, float | None]:
    return {"rate": rate, "main": 1e-5, "cpu": cpu, "release": 0.0, "start": 0.0, "training": None}


def seen(**changes: Any) -> Observed:
    """Bound by decoding: two workers, 4 ms a sample, steps of 6.4 ms for 64 samples."""
    usual = Observed(
        dataset="Rows",
        length=100_000,
        batch_size=64.0,
        workers=2,
        ranks=1,
        steps=100,
        wait=0.1216,
        step=Step(1e-4, 1e-5),
        step_drops=False,
        gpu=None,
        step_beside=6.4e-3,
        step_beside_cpu=6.4e-3,
        epoch_samples=100_000.0,
        first_wait=0.2,
        fetch=Fetch(cpu=4e-3, blocked=0.0, send=1e-5, receive=1e-5),
        collate=1e-5,
        decoders=(Decoder("PIL.Image.Image.load", 1.0, 3e-3, 6e5),),
        read_bytes=6e4,
        disk_bytes=0.0,
        memory=50e6,
        growth=0.0,
        trial={
            "plan": PLAN,
            "loaders": {"cached-2": tried(8000.0, 1e-4), "run-2": tried(1900.0, 1e-3)},
            "run": {"hits": 9, "bytes": 6e5, "called": "PIL.Image.Image.load", "left_alone": ""},
        },
    )
    return usual._replace(**changes)


def test_the_rate_and_the_waiting_are_those_of_the_steps() -> None:
    assert seen().rate == pytest.approx(500)
    assert seen().waited == pytest.approx(0.95)
    assert seen(ranks=4).rate == pytest.approx(2000)


def test_steps_of_seconds_are_told_with_all_their_digits() -> None:
    text = "\n".join(lines(judge(seen(step_beside=1.2345, wait=0.9999), "p"), "train.py"))
    assert "a step          1,000 ms of waiting for the loader, 1,234 ms of its own" in text


def test_what_a_librarys_loader_sets_by_itself_is_named_where_another_takes_its_place() -> None:
    given = [
        "collate_fn=monai.data.utils.list_data_collate",
        "worker_init_fn=monai.data.utils.worker_init_fn",
    ]
    notes = {
        len(given): [
            one.note
            for one in judge(seen(trial={**seen().trial, "given": given}), "p", cores=2).advised
            if "hotset.DataLoader" in one.line
        ]
        for given in ([], given)
    }
    assert notes[0] == ["from the second epoch on"]
    assert notes[2] == [f"from the second epoch on; with {' and '.join(given)}, as the program's loader has"]


def test_what_workers_take_to_start_is_advised_to_be_spent_once() -> None:
    """Epochs of 3,200 samples take 6.4 s, and half a second of that to start workers."""

    def rates(**start: Any) -> dict[str, float]:
        beside = {**tried(500.0, 4e-3), "start": 0.5 / 3_200}
        trial = {**seen().trial, "loaders": {**seen().trial["loaders"], "plain-2": beside}, **start}
        short = seen(epoch_samples=3_200.0, length=3_200, first_wait=4.0, trial=trial)
        return {one.line: one.samples_per_second for one in judge(short, "p", cores=2).advised}

    forked, spawned = rates(), rates(forks=False)
    assert forked["persistent_workers=True"] == pytest.approx(3_200 / 5.9, rel=1e-3)
    # Until the first batch they take 4 s. The trial's forks take 0.5 s, and 64 samples 0.256 s.
    assert spawned["persistent_workers=True"] == pytest.approx(3_200 / (6.4 - 3.744), rel=1e-3)
    assert 3_200 / spawned["hotset run -- p"] == pytest.approx(
        3_200 / forked["hotset run -- p"] + 3.244, rel=1e-3
    )


def test_a_program_that_others_hold_up_is_not_promised_that_workers_end_it() -> None:
    """On a machine that was busy as it was watched, two workers of two cores are as good as any."""
    held_up = seen(wait=0.8, fetch=Fetch(cpu=4e-3, blocked=0.0, send=1e-5, receive=1e-5), others=1.2)
    workers = [one for one in judge(held_up, "p", cores=2).advised if one.line.startswith("num_workers")]
    assert all(one.gain < 1.05 for one in workers)
    assert any(
        "Other programs took 1.2 of this machine's" in sentence for sentence in judge(held_up, "p").unknown
    )
    assert not any("Other programs" in sentence for sentence in judge(seen(others=0.1), "p").unknown)


def test_a_cache_below_a_loader_that_a_library_makes_has_a_rate_of_its_own() -> None:
    trial = {**seen().trial, "loaders": {**seen().trial["loaders"], "torch-2": tried(2000.0, 4e-4)}}
    found = {one.line.rpartition("), ")[2]: one for one in judge(seen(trial=trial), "p", cores=2).advised}
    theirs, ours = found["with the loader as it is"], found["hotset.DataLoader(..., num_workers=2)"]
    assert theirs.samples_per_second < ours.samples_per_second
    assert "a library makes" in theirs.note


def test_the_time_of_other_loaders_is_told() -> None:
    text = "\n".join(lines(judge(seen(elsewhere=0.4), "p"), "train.py"))
    assert "40% of the time goes to other loaders" in text
    assert "other loaders" not in "\n".join(lines(judge(seen(), "p"), "train.py"))


def test_a_failed_trial_of_hotset_run_is_told_in_a_sentence() -> None:
    trial = {**seen().trial, "run": None, "failed": {"run-2": "Error: the file is open twice"}}
    found = [one for one in judge(seen(trial=trial), "p").unknown if "hotset run" in one]
    assert found == ["What hotset run would give is not known: Error: the file is open twice."]


@pytest.mark.parametrize(("length", "telling"), [(100_000, "draw other numbers"), (None, "as many shards")])
def test_what_other_workers_change_is_said(length: int | None, telling: str) -> None:
    found = [
        one
        for one in judge(seen(length=length), "p", cores=16).advised
        if one.line.startswith("num_workers=")
    ]
    assert [telling in one.note for one in found] == [True]


def test_more_workers_are_advised_as_far_as_there_are_cores() -> None:
    few = judge(seen(), "p", cores=2).predicted
    assert few.workers == 2 or few.workers_rate < 1.1 * seen().rate
    found = judge(seen(), "p", cores=16).predicted
    assert 14 <= found.workers <= 20
    assert found.workers_rate == pytest.approx(16 / 4e-3, rel=0.15)


def test_what_each_worker_takes_to_start_counts_against_more_of_them() -> None:
    found = judge(
        seen(trial={**seen().trial, "loaders": {"plain-2": tried(500.0, 4e-3)}}), "p", cores=16
    ).predicted
    slow = {**tried(500.0, 4e-3), "start": 1e-4}
    late = judge(seen(trial={**seen().trial, "loaders": {"plain-2": slow}}), "p", cores=16).predicted
    assert 1 <= late.workers < found.workers


def test_where_an_epoch_reads_a_part_of_the_samples_it_says_when_a_cache_helps() -> None:
    notes = [one.note for one in judge(seen(epoch_samples=5_000.0), "p").advised if "cache(" in one.line]
    assert notes
    assert all("an epoch here reads 5% of them" in note for note in notes)


def test_threads_that_spin_beside_workers_do_so_over_a_cache_with_torchs_loader_too() -> None:
    spinning = seen(
        step=Step(1e-6, 1e-6),
        step_beside=64e-3,
        step_beside_cpu=128e-3,
        trial={**seen().trial, "loaders": {"cached-2": tried(8000.0, 1e-4), "torch-2": tried(8000.0, 1e-4)}},
    )
    rates = {one.line[-20:]: one.samples_per_second for one in judge(spinning, "p", cores=4).advised}
    (torchs,) = (rate for line, rate in rates.items() if line.endswith("as it is"))
    (ours,) = (rate for line, rate in rates.items() if line.endswith("num_workers=2)"))
    assert torchs <= 1000.0 < ours


def test_steps_that_differ_because_their_threads_spin_are_as_long_as_alone() -> None:
    beside = [StepLength(length, 2 * length, length) for length in (1e-3, 20e-3, 4e-3, 7e-3) * 5]
    alone = [StepLength(1e-3, 1e-3, 1e-3)] * 8
    mean = StepLength(8e-3, 16e-3, 8e-3)
    assert step_alone(mean, beside, alone)[0].seconds == pytest.approx(1e-3)
    assert step_alone(mean, beside, alone[:7])[0] == mean  # too few of steps that may be of two kinds


def test_more_bytes_from_a_disk_than_were_asked_for_are_of_mapped_files() -> None:
    mapped = seen(read_bytes=16.0, disk_bytes=2700.0)
    (text,) = (line for line in lines(judge(mapped, "p"), "p") if line.startswith("  reads"))
    assert "of them" not in text
    assert "mapped files" in text


def test_no_rate_is_above_that_of_the_steps_alone() -> None:
    slow = seen(step=Step(2e-3, 0.0), step_beside=0.128, wait=0.0)
    found = judge(slow, "p", cores=64).predicted
    assert found.limit == pytest.approx(500)
    for one in judge(slow, "python train.py", cores=64).advised:
        assert one.samples_per_second <= 500 * 1.001
    assert "leave it as it is" in "\n".join(lines(judge(slow, "p", cores=64), "p"))


def test_what_a_step_takes_to_give_a_batch_back_is_not_the_caches() -> None:
    slow = {"rate": 900.0, "main": 1e-6, "cpu": 1e-3, "release": 4e-4, "start": 0.0, "training": None}
    trial = {**seen().trial, "loaders": {**seen().trial["loaders"], "plain-2": slow}}
    step = Step(5e-4, 5e-4)
    told = judge(seen(step=step, step_drops=True, trial=trial), "p", cores=64).predicted
    assert told.limit == pytest.approx(1 / 1e-4)
    assert told.cached is not None
    assert told.cached > 2 * (judge(seen(step=step), "p", cores=64).predicted.cached or 0.0)


def test_what_was_tried_with_the_programs_step_counts() -> None:
    row = {**tried(8000.0, 1e-4), "training": 1500.0}
    one = seen(trial={**seen().trial, "loaders": {"cached-2": row}})
    assert judge(one, "p", cores=2).predicted.cached == pytest.approx(1500)
    # Half of the samples in the cache: by as much less as arithmetic says.
    half = {**PLAN, "fits": 0.5, "room": 32 << 20}
    part = judge(seen(trial={"plan": half, "loaders": {"cached-2": row}}), "p", cores=2).predicted.cached
    assert part is not None
    assert 500 < part < 1000


def test_steps_that_are_not_alike_are_not_compared_with_a_few_of_one_kind() -> None:
    cheap, dear = StepLength(1e-2, 1e-2, 1e-2), StepLength(9e-2, 9e-2, 9e-2)
    mean = StepLength(5e-2, 5e-2, 5e-2)  # gradients are accumulated over two batches
    assert step_alone(mean, [cheap, dear] * 20, [cheap] * 5) == (mean, True)
    beside = StepLength(2e-2, 1e-2, 1e-2)
    alike, drops = step_alone(beside, [beside] * 20, [cheap] * 5)
    assert alike == pytest.approx(cheap)
    assert not drops


def test_who_is_stopped_is_named_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever dies over it: hotset doctor lets those go on that are named."""
    named: list[list[str]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: named.append(os.listdir(tmp_path)))
    ledger = Ledger(str(tmp_path))
    ledger.pause([12345])
    ledger.resume([12345])
    assert named == [[f"paused-{os.getpid()}"]] * 2
    assert os.listdir(tmp_path) == []


def test_all_that_are_stopped_go_on_though_some_of_them_have_died(tmp_path: Path) -> None:
    dead, stopped = child(lambda: None), child(lambda: time.sleep(100.0))
    os.waitpid(dead, 0)
    try:
        ledger = Ledger(str(tmp_path))
        ledger.pause([dead, stopped])
        assert os.WIFSTOPPED(os.waitpid(stopped, os.WUNTRACED)[1])
        ledger.resume_all(stopped_for=3600.0)  # not yet
        assert os.waitpid(stopped, os.WNOHANG | os.WCONTINUED) == (0, 0)
        ledger.resume_all()
        assert os.WIFCONTINUED(os.waitpid(stopped, os.WCONTINUED)[1])
        assert os.listdir(tmp_path) == []
    finally:
        kill(stopped)


def test_who_is_stopped_is_named_even_if_hotset_doctor_looks_while_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, replace = Ledger(str(tmp_path)), os.replace

    def looked_at(*names: str) -> None:
        ledger.resume_all()
        replace(*names)

    monkeypatch.setattr(os, "replace", looked_at)
    stopped = child(lambda: time.sleep(100.0))
    try:
        ledger.pause([stopped])
        assert os.WIFSTOPPED(os.waitpid(stopped, os.WUNTRACED)[1])
        ledger.resume_all()
        assert os.WIFCONTINUED(_within(10.0, stopped))
        assert os.listdir(tmp_path) == []
    finally:
        kill(stopped)


def _within(seconds: float, pid: int) -> int:
    """The status of a child that goes on within so many seconds; 0 if it does not."""
    deadline, status = time.monotonic() + seconds, 0
    while not status and time.monotonic() < deadline:
        status = os.waitpid(pid, os.WNOHANG | os.WCONTINUED)[1]
    return status


def test_nobody_is_stopped_where_that_cannot_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``hotset doctor`` has ended, and its folder is gone."""
    stopped: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: stopped.append(pid))
    Ledger(str(tmp_path / "gone")).pause([12345])
    assert stopped == []


def test_the_folder_of_a_command_that_was_killed_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def command() -> None:
        make_ledger("hotset-doctor-")
        time.sleep(100.0)

    killed = child(command)
    try:
        deadline = time.monotonic() + 100
        while not (locks := list(tmp_path.glob("*/lock"))):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first = make_ledger("hotset-doctor-")
        assert set(tmp_path.iterdir()) == {locks[0].parent, Path(first)}, "both live"
    finally:
        kill(killed)
    second = make_ledger("hotset-doctor-")
    assert set(tmp_path.iterdir()) == {Path(first), Path(second)}


def test_a_step_of_several_threads_and_a_long_one_have_no_stand_in() -> None:
    assert StandIn.of(StepLength(seconds=1e-3, cpu=4e-3, thread=1e-3)) is None
    assert StandIn.of(StepLength(seconds=1.0, cpu=0.5, thread=0.5)) is None
    assert StandIn.of(StepLength(seconds=1e-3, cpu=1e-3, thread=1e-3)) is not None


def test_a_step_has_the_length_that_it_would_have_with_a_processor_at_once() -> None:
    taken = Clocks(wall=5e-3, thread=1e-3, process=2e-3, queued=3e-3)
    assert StepLength.of(taken) == pytest.approx((2e-3, 2e-3, 1e-3))
    # Of four steps, the clocks were read for two.
    sums = LoopSums(steps=4, step=2e-2)
    for _ in range(2):
        sums.add_step(taken)
    assert StepLength.mean(sums) == pytest.approx(StepLength.of(taken))


def test_a_thread_that_waits_for_a_processor_is_told_so() -> None:
    """Two processes on one processor: either of them waits for it about half of the time."""
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this kernel does not say what a thread waited for a processor")
    core = {min(os.sched_getaffinity(0))}

    def spin() -> None:
        while True:
            pass

    before = os.sched_getaffinity(0)
    pid = child(spin)
    try:
        os.sched_setaffinity(pid, core)
        os.sched_setaffinity(0, core)
        begin = Clocks.now()
        while (taken := Clocks.now().since(begin)).thread < 0.05:
            pass
    finally:
        os.sched_setaffinity(0, before)
        kill(pid)
    assert 0.005 < taken.queued < taken.wall


def report(one: Observed) -> str:
    return "\n".join(lines(judge(one, "p", cores=2), "p"))


def test_what_a_trial_that_was_held_up_says_is_no_reason_to_leave_all_as_it_is() -> None:
    nothing = {"plan": PLAN, "loaders": {"cached-2": tried(400.0, 1e-4), "plain-2": tried(490.0, 4e-3)}}
    assert "leave it as it is" in report(seen(trial=nothing))
    slow = {**nothing, "loaders": {**nothing["loaders"], "plain-2": tried(200.0, 4e-3)}}
    assert "leave it as it is" not in report(seen(trial=slow))
    assert "gave 200 samples/s when it was tried, and 500 before" in report(seen(trial=slow))
    late = {"loaders": {}, "refused": "the trial took longer than 60 s", "late": True}
    assert "leave it as it is" not in report(seen(trial=late))
    assert "too little is known" in report(seen(trial=late))
    assert "training hardly waits" in report(seen(trial=late, wait=1e-5))


def test_a_program_of_which_too_little_is_known_is_not_told_to_stay_as_it_is() -> None:
    early = report(seen(trial={"loaders": {}}))
    assert "leave it as it is" not in early
    assert "too little is known" in early
    assert "the program ended before it could be tried" in early
    refused = {"loaders": {}, "refused": "Rows returns another sample each time"}
    assert "leave it as it is" in report(seen(trial=refused))
    slower = report(seen(trial=refused, wait=0.8))
    assert "so the gains may be wrong" in slower
    assert "leave it as it is" not in slower


def test_a_transform_that_has_waited_is_no_part_of_the_processor_time() -> None:
    waited = {
        **PLAN,
        "transforms": [*PLAN["transforms"], {**PLAN["transforms"][1], "name": "Crop", "seconds": 0.02}],
    }
    text = report(seen(trial={**seen().trial, "plan": waited}))
    assert "Flip 0.01 ms" in text
    assert "Crop" not in text


def test_a_step_is_no_shorter_than_its_gpu_takes() -> None:
    busy = seen(step=Step(2e-3, 1e-5), gpu=0.128)
    text = "\n".join(lines(judge(busy, "p"), "p"))
    assert "128 ms on the GPU" in text
    assert any("idle for 0% of the time" in sentence for sentence in judge(busy, "p").unknown)
    assert as_json(judge(busy, "p"))["now"]["gpu_step_seconds"] == 0.128


def test_the_best_comes_first_and_of_equal_ones_that_of_least_memory() -> None:
    given = judge(seen(), "python train.py", cores=2).advised
    assert given[0].line.startswith("hotset.cache(")
    assert given[0].gain == pytest.approx(given[0].samples_per_second / 500)
    (kept,) = (one for one in given if one.line == "hotset run -- python train.py")
    (fits,) = (
        one for one in judge(seen(length=1_000), "p", cores=2).advised if one.line == "hotset run -- p"
    )
    assert fits.samples_per_second == pytest.approx(1_775, rel=0.01)  # its 1,900, and 1,980 of two cores
    assert fits.bytes == pytest.approx(6e8)
    assert kept.samples_per_second < fits.samples_per_second
    assert kept.bytes == PLAN["room"]
    equal = seen(fetch=Fetch(cpu=1e-6, blocked=4e-3), memory=1e6)
    assert judge(equal, "p", cores=64).advised[0].line.startswith("num_workers=")


def test_of_a_cache_with_too_little_room_the_misses_count() -> None:
    half = {**PLAN, "fits": 0.5, "room": 32 << 20}
    trial = {**seen().trial, "plan": half}
    whole, part = (judge(one, "p", cores=2).predicted.cached for one in (seen(), seen(trial=trial)))
    assert whole is not None
    assert part is not None
    assert part < 0.3 * whole
    text = [one.line for one in judge(seen(trial=trial), "p", cores=2).advised]
    assert any("spill=" in line for line in text)
    assert any("window=" in line for line in text)


def test_a_transform_that_makes_samples_smaller_is_advised_before_the_random_ones() -> None:
    def row(name: str, kind: str, size: int, *, cached: bool = False) -> dict[str, Any]:
        return {"name": name, "kind": kind, "bytes": size, "cached": cached, "seconds": 1e-3}

    rows = [
        row("Rows", "source", 1 << 20, cached=True),
        row("Flip", "random", 1 << 20),
        row("Resize", "deterministic", 1 << 18),
        row("Normalize", "deterministic", 1 << 18),
    ]
    plan = {**PLAN, "fits": 0.5, "room": 32 << 20, "transforms": rows}
    trial = {
        "plan": plan,
        "loaders": {"cached-2": tried(800.0, 2e-3)},
    }
    given = judge(seen(trial=trial), "p", cores=2).advised
    (one,) = [one for one in given if one.line == "Resize before Flip, with hotset.cache"]
    assert one.bytes == 16 << 20, "a quarter of all"
    now = judge(seen(trial=trial), "p", cores=2).predicted.cached
    assert now is not None
    assert one.samples_per_second > 1.5 * now, "all samples fit, and a millisecond of two is spared"
    assert "other samples than now" in one.note
    without = {**plan, "transforms": [*rows[:2], row("Normalize", "deterministic", 1 << 20)]}
    lines_ = [one.line for one in judge(seen(trial={**trial, "plan": without}), "p", cores=2).advised]
    assert not any(" before " in line for line in lines_), "nothing is smaller after Normalize"


def test_what_is_not_known_is_said() -> None:
    nothing = seen(trial={"refused": "Rows draws random numbers.", "loaders": {}}, decoders=())
    assert judge(nothing, "p").predicted.cached is None
    sentences = judge(nothing, "p").unknown
    assert all(map(is_a_sentence, sentences))
    assert any("Rows draws random numbers" in sentence for sentence in sentences)
    assert any("hotset run" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("trial", "telling"),
    [
        ({"loaders": {}}, "ended before"),
        ({"loaders": {}, "refused": "the dataset can only be iterated over"}, "iterated over"),
        (
            {"loaders": {}, "run": {"hits": 0, "bytes": 0, "called": "a.load", "left_alone": "no file"}},
            "that a.load returns: no file",
        ),
        (
            {"loaders": {}, "run": {"hits": 0, "bytes": 0, "called": "", "left_alone": ""}},
            "called no decoder",
        ),
    ],
)
def test_what_hotset_run_would_give_is_told_only_if_it_was_tried(trial: dict[str, Any], telling: str) -> None:
    assert not any("hotset run" in one.line for one in judge(seen(trial=trial), "p", cores=16).advised)
    assert any(
        "hotset run" in sentence and telling in sentence for sentence in judge(seen(trial=trial), "p").unknown
    )


@pytest.mark.parametrize(
    ("trial", "telling"),
    [
        ({"loaders": {}}, "ended before"),
        ({"loaders": {}, "refused": "the dataset can only be iterated over"}, "iterated over"),
        ({"loaders": {}, "failed": {"plain-1": "RuntimeError: no CUDA in a fork"}}, "no CUDA in a fork"),
    ],
)
def test_workers_are_not_advised_if_none_was_seen_to_work(trial: dict[str, Any], telling: str) -> None:
    one = seen(workers=0, trial=trial)
    assert judge(one, "p", cores=16).predicted.workers == 0
    assert not any("num_workers" in given.line for given in judge(one, "p", cores=16).advised)
    assert any("workers" in sentence and telling in sentence for sentence in judge(one, "p").unknown)
    works = seen(workers=0, trial={"loaders": {"plain-1": tried(240.0, 4e-3)}})
    assert judge(works, "p", cores=16).predicted.workers > 0
    assert not any("workers" in sentence for sentence in judge(works, "p").unknown)


def test_where_arithmetic_misses_the_program_it_says_so() -> None:
    assert not any("arithmetic" in sentence for sentence in judge(seen(), "p").unknown)
    found = judge(seen(wait=1.2), "p").unknown
    assert any("arithmetic" in sentence for sentence in found)
    assert all(map(is_a_sentence, found))


def test_the_json_has_the_promised_keys() -> None:
    found = json.loads(json.dumps(as_json(judge(seen(), "p"))))
    assert found["now"]["samples_per_second"] == pytest.approx(500)
    assert found["now"]["waited_fraction"] == pytest.approx(0.95)
    assert found["cached"]["bytes"] == 64 << 20
    assert set(found["advice"][0]) == {"line", "samples_per_second", "gain", "bytes", "note"}


def test_the_files_of_processes_are_put_together(tmp_path: Path) -> None:
    facts = {"dataset": "Rows", "length": 10, "batch_size": 4, "workers": 2, "world": None}
    loop = {
        "facts": facts,
        "sums": {
            "steps": 10,
            "batches": 10,
            "wait": 0.1,
            "clocked_batches": 5,
            "wait_thread": 0.002,
            "step": 0.4,
            "clocked_step": 0.2,
            "step_process": 0.2,
        },
        "first_waits": [0.3],
        "starts": [0.18],  # 0.12 more than two batches and a step take later
        "left_out": 2,
        "pass_batches": 12,
        "steps": [(0.04, 0.04, 0.04)] * 10,
        "alone": [(0.02, 0.02, 0.02)] * 3,
        "fetching": None,
        "workers": [2, 3],
    }
    main = {"pid": 1, "fetching": None, "loops": [loop]}
    worker = {
        "pid": 2,
        "loops": [],
        "fetching": {
            "batches": 5, "samples": 20, "wall": 0.2, "cpu": 0.1, "collate_cpu": 0.02,
            "decoders": {"cv2.imread": [20, 0.06, 2000.0]},
            "process": {"cpu": [1.0, 1.12], "queued": [0.0, 0.04], "wall": [0.0, 9.0], "rchar": [0, 400]},
            "memory": [[1.0, 40e6], [6.0, 50e6]],
        },
    }  # fmt: skip
    for number, content in enumerate((main, worker, {**worker, "pid": 3})):
        (tmp_path / f"watch-{number}.json").write_text(json.dumps(content))
    found = read(str(tmp_path))
    assert found is not None
    assert (found.batch_size, found.workers, found.ranks, found.steps) == (4.0, 2, 1, 10)
    assert found.rate == pytest.approx(4 / (0.05 + 0.12 / 12))  # of whole epochs
    assert found.step.seconds == pytest.approx(0.02 / 4)  # beside workers that rest
    assert found.fetch == pytest.approx(Fetch(0.005, (0.2 - 0.1 - 0.04) / 20, 0.001, 0.0001))
    assert found.decoders == (Decoder("cv2.imread", 1.0, 0.003, 100.0),)
    assert found.read_bytes == pytest.approx(20)
    assert (found.memory, found.growth) == (50e6, 2e6)
    assert read(str(tmp_path / "nothing")) is None


def test_a_worker_that_was_stopped_has_not_waited_for_a_disk(tmp_path: Path) -> None:
    facts = {"dataset": "Rows", "length": 10, "batch_size": 4, "workers": 2, "world": None}
    sums = {"steps": 10, "batches": 10, "wait": 0.4, "step": 0.4}
    loop = {
        "facts": facts, "sums": sums, "first_waits": [0.1], "steps": [(0.04, 0.04, 0.04)] * 10, "alone": [],
        "starts": [], "left_out": 0, "pass_batches": 10, "fetching": None, "workers": [2],
        "stops": [[5.0, 5.3], [7.0, 7.3]],
    }  # fmt: skip
    worker = {
        "batches": 5, "samples": 20, "wall": 0.95, "cpu": 0.1, "collate_cpu": 0.0,
        "decoders": {}, "memory": [],
        "process": {"cpu": [1.0, 1.1], "wall": [0.0, 9.0]},
        "longest": [[4.9, 5.35], [6.0, 6.1], [7.1, 7.4]], "scale": 1.5,  # two of three samples were clocked
    }  # fmt: skip
    for pid, fetching, loops in ((1, None, [loop]), (2, worker, [])):
        found = {"pid": pid, "fetching": fetching, "loops": loops}
        (tmp_path / f"watch-{pid}.json").write_text(json.dumps(found))
    seen = read(str(tmp_path))
    assert seen is not None
    assert seen.fetch.blocked == pytest.approx((0.95 - 1.5 * (0.3 + 0.2) - 0.1) / 20)


def test_without_workers_waiting_for_a_processor_is_no_waiting_for_a_disk(tmp_path: Path) -> None:
    fetching = {
        "batches": 5, "samples": 20, "wall": 0.2, "cpu": 0.1, "collate_cpu": 0.0, "decoders": {},
        "memory": [], "process": {"cpu": [1.0, 1.4], "queued": [0.0, 0.36], "wall": [0.0, 9.0]},
    }  # fmt: skip
    facts = {"dataset": "Rows", "length": 10, "batch_size": 4, "workers": 0, "world": None}
    sums = {"steps": 10, "batches": 10, "wait": 0.4, "step": 0.4}
    loop = {
        "facts": facts, "sums": sums, "first_waits": [0.1], "steps": [(0.04, 0.04, 0.04)] * 10, "alone": [],
        "starts": [], "left_out": 0, "pass_batches": 10, "fetching": fetching, "workers": [],
    }  # fmt: skip
    (tmp_path / "watch-1.json").write_text(json.dumps({"pid": 1, "fetching": None, "loops": [loop]}))
    found = read(str(tmp_path))
    assert found is not None
    # A quarter of its processor time went into fetches, and so did as much of its waiting for one.
    assert found.fetch == pytest.approx(Fetch(0.005, (0.2 - 0.1 - 0.09) / 20))


@pytest.mark.parametrize("known", [True, False])
def test_the_trials_loader_knows_later_batches_if_the_programs_would(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does it makes one meanwhile, and is faster than the program's would be."""
    monkeypatch.setattr("hotset.run.doctor.measured._RATE_SECONDS", 0.01)
    loader = hotset.DataLoader

    def noted(*arguments: Any, sampler: Any, **more: Any) -> Any:
        with open(tmp_path / "noted", "a") as file:
            file.write("known\n" if whole_epoch(BatchSampler(sampler, 4, True)) is not None else "unknown\n")
        return loader(*arguments, sampler=sampler, **more)

    monkeypatch.setattr(hotset, "DataLoader", noted)
    rows = TensorDataset(torch.arange(64.0))
    sampler = RandomSampler(rows) if known else WeightedRandomSampler(torch.ones(64), 64)
    plain = DataLoader(rows, batch_size=4, sampler=sampler)
    settings = LoaderSettings(rows, 0, 4, plain.collate_fn, None, len(plain), plain.batch_sampler)
    found = json.loads(in_fork(settings, None))
    assert found["loaders"]["cached-0"]["rate"] > 0.0
    assert (tmp_path / "noted").read_text() == ("known\n" if known else "unknown\n")


class Endless:
    """Samples that are made as they are asked for, as many as there are numbers."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def test_of_a_dataset_of_any_length_the_order_of_a_trial_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that draws some of them for each epoch has no list of all."""
    monkeypatch.setattr("hotset.run.doctor.measured._RATE_SECONDS", 0.01)
    rows: Any = Endless()
    plain = DataLoader(rows, batch_size=4, sampler=RandomSampler(rows, replacement=True, num_samples=64))
    settings = LoaderSettings(rows, 0, 4, plain.collate_fn, None, len(plain), plain.batch_sampler)
    found = json.loads(in_fork(settings, None))
    assert "plain-0" not in found["failed"]
    assert found["loaders"]["plain-0"]["rate"] > 0.0


class Logged(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        logging.getLogger("rows").warning("process %d reads", os.getpid())
        return super().__getitem__(index)


def settings_of(dataset: TensorDataset) -> LoaderSettings:
    plain = DataLoader(dataset, batch_size=4)
    return LoaderSettings(dataset, 0, 4, plain.collate_fn, None, len(plain), plain.batch_sampler)


def test_a_trial_writes_nothing_to_the_programs_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.run.doctor.measured._RATE_SECONDS", 0.01)
    noted = logging.FileHandler(tmp_path / "log")
    logging.getLogger().addHandler(noted)
    try:
        found = json.loads(in_fork(settings_of(Logged(torch.arange(64.0))), None))
    finally:
        logging.getLogger().removeHandler(noted)
        noted.close()
    assert found["loaders"]["cached-0"]["rate"] > 0.0
    assert (tmp_path / "log").read_text() == ""


made = 0


def collate(samples: list[Any]) -> Any:
    """A worker takes longer for its second and third batch."""
    global made
    made += 1
    time.sleep(0.03 if made in (2, 3) else 0.0)
    return default_collate(samples)


def test_what_new_workers_begin_with_counts_as_often_as_the_program_has_new_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotset.run.doctor.measured._RATE_SECONDS", 0.01)
    settings = settings_of(TensorDataset(torch.arange(64.0)))._replace(workers=1, collate_fn=collate)
    found = json.loads(in_fork(settings, None))
    # An epoch is 16 batches of 4; after the first, 0.06 s more are in each that new workers begin.
    assert found["loaders"]["cached-1"]["rate"] <= 15 * 4 / 0.06
    assert found["given"] == [f"collate_fn={__name__}.collate"]


def test_rates_are_of_whole_epochs_with_what_workers_take_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: Watch
) -> None:
    monkeypatch.setattr("hotset.run.doctor.measured._RATE_SECONDS", 0.01)
    loader = hotset.DataLoader

    def noted(*arguments: Any, worker_init_fn: Any, **more: Any) -> Any:
        return loader(*arguments, worker_init_fn=lambda _: (tmp_path / "ours").touch(), **more)

    monkeypatch.setattr(hotset, "DataLoader", noted)
    rows = TensorDataset(torch.arange(64.0))
    plain = DataLoader(rows, batch_size=4, num_workers=1, worker_init_fn=lambda _: time.sleep(0.2))
    for _ in range(2):
        iterator = iter(plain)
        for _ in range(16):
            take(observer, iterator)
        end(observer, iterator)
        del iterator
    observer.stop()
    seen_here = read(str(tmp_path))
    assert seen_here is not None
    settings = settings_of(rows)._replace(workers=1, worker_init_fn=plain.worker_init_fn)
    trial = json.loads(in_fork(settings, None))
    assert trial["loaders"]["plain-1"]["rate"] <= 64 / 0.2
    assert trial["loaders"]["torch-1"]["rate"] <= 64 / 0.2
    # hotset's loader starts no workers where all of a batch is in the cache.
    assert trial["loaders"]["cached-1"]["rate"] > 0.0
    assert not (tmp_path / "ours").exists()
    found = as_json(judge(seen_here._replace(trial=trial), "p", cores=2))
    assert found["now"]["samples_per_second"] <= 64 / 0.2
    for one in found["advice"]:
        if "as it is" in one["line"]:
            assert one["samples_per_second"] <= 64 / 0.2


def test_a_trial_ends_with_the_program(tmp_path: Path) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            (tmp_path / f"{os.getppid()}").touch()  # in a worker of the trial
            time.sleep(0.1)
            return super().__getitem__(index)

    program = child(lambda: in_fork(settings_of(Slow(torch.arange(64.0))), None))
    try:
        assert eventually(lambda: any(tmp_path.iterdir()))
        trials = [int(path.name) for path in tmp_path.iterdir()]
    finally:
        kill(program)
    assert eventually(lambda: all(map(gone, trials))), "the trial goes on, without a program"


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[Watch]:
    """The watch of this process, which would try a cache as pytest ends if it were not stopped."""
    observer = Watch(WatchOptions(str(tmp_path), 600.0))
    yield observer
    observer.stop()


def take(observer: Watch, iterator: Any) -> Any:
    observer.before(iterator)
    batch = next(iterator)
    observer.after(iterator, 1e-3, failed=False, batch=lambda: batch)
    return batch


def end(observer: Watch, iterator: Any) -> None:
    observer.before(iterator)
    observer.after(iterator, 1e-3, failed=True, batch=lambda: None)


def test_the_clocks_rest_where_batches_come_fast_and_all_of_them_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: Watch
) -> None:
    for _ in range(2):
        iterator = iter(torch.utils.data.DataLoader(torch.arange(300), batch_size=1))
        for _ in range(300):
            take(observer, iterator)
        end(observer, iterator)
    observer.stop()
    found = read(str(tmp_path))
    assert found is not None
    (written,) = tmp_path.glob("watch-*.json")
    (loop,) = json.loads(written.read_text())["loops"]
    assert found.steps + len(loop["alone"]) == 2 * 300
    assert 4 <= len(loop["steps"]) < 200
    assert loop["sums"]["batches"] == 2 * 299  # the first of a pass is left out
    assert 0.0 < loop["sums"]["clocked_step"] < loop["sums"]["step"]


class Buckets:
    """A batch sampler of a program's own."""

    def __init__(self, size: Any) -> None:
        self.batch_size = size

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(first, first + 4)) for first in range(0, 40, 4))


@pytest.mark.parametrize(
    ("size", "told"), [(np.int64(4), 4), (torch.tensor(4), 4), ([4, 8], None), (lambda: 4, None)]
)
def test_a_batch_sampler_has_whatever_it_likes_as_its_batch_size(
    tmp_path: Path, observer: Watch, size: Any, told: int | None
) -> None:
    """What cannot be written ended the watching, and so the program."""
    sampler: Any = Buckets(size)
    iterator = iter(torch.utils.data.DataLoader(torch.arange(40), batch_sampler=sampler))
    for _ in range(10):
        take(observer, iterator)
    end(observer, iterator)
    observer.stop()
    assert read(str(tmp_path)) is not None
    (written,) = tmp_path.glob("watch-*.json")
    (loop,) = json.loads(written.read_text())["loops"]
    assert loop["facts"]["batch_size"] == told


@pytest.mark.parametrize(
    ("passes", "batches"),
    [
        ([1, None, 5], 20),  # a look at a batch, an epoch, and part of the next
        ([1, 5], 20),  # of the first epoch a part so far
        ([1, 1, 1], 1),  # next(iter(loader)) for each step
        ([8, 8, 3], 8),  # epochs of so many steps
        ([None, None], 20),
    ],
)
def test_a_pass_that_is_left_at_once_is_no_epoch(
    tmp_path: Path, observer: Watch, passes: list[int | None], batches: int
) -> None:
    for count in passes:
        iterator = iter(torch.utils.data.DataLoader(torch.arange(20), batch_size=1))
        for _ in range(count or 20):
            take(observer, iterator)
        if count is None:
            end(observer, iterator)
    observer.stop()
    (written,) = tmp_path.glob("watch-*.json")
    (loop,) = json.loads(written.read_text())["loops"]
    assert loop["pass_batches"] == batches


def test_samples_are_counted_while_the_clocks_of_fetches_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: Watch
) -> None:
    from torch.utils.data._utils import fetch

    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        monkeypatch.setattr(kind, "fetch", kind.fetch)  # put back afterwards
    dict(observer.hooks())["torch.utils.data._utils.fetch"](fetch)
    iterator = iter(DataLoader(range(4_000), batch_size=4))  # type: ignore[arg-type]
    for _ in range(1_000):
        take(observer, iterator)
    end(observer, iterator)
    observer.stop()
    (written,) = tmp_path.glob("watch-*.json")
    (loop,) = json.loads(written.read_text())["loops"]
    assert loop["fetching"]["batches"] == 999  # without the first
    assert loop["fetching"]["samples"] == pytest.approx(4 * 999)


def test_workers_that_were_stopped_for_a_step_go_on_before_the_clocks_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: Watch
) -> None:
    iterator = iter(torch.utils.data.DataLoader(torch.arange(600), batch_size=1, num_workers=1, timeout=60))
    try:
        for _ in range(600):
            take(observer, iterator)  # fails after 60 s if its worker stays stopped
    finally:
        end(observer, iterator)
        for worker in iterator._workers:
            os.kill(worker.pid, signal.SIGCONT)
    observer.stop()
    (written,) = tmp_path.glob(f"watch-{os.getpid()}.json")
    (loop,) = json.loads(written.read_text())["loops"]
    assert len(loop["stops"]) == len(loop["alone"]) > 0
    assert all(stopped < go_on for stopped, go_on in loop["stops"])


@pytest.fixture
def _own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sleeps takes as long as it says, and all else a microsecond, however busy the machine is."""
    now = 1000.0

    def elapse(seconds: float = 1e-6) -> float:
        nonlocal now
        now += seconds
        return now

    monkeypatch.setattr(time, "perf_counter", elapse)
    monkeypatch.setattr(time, "sleep", elapse)


class Dear:
    """A batch whose memory takes long to give back."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def __del__(self) -> None:
        time.sleep(2e-3)


@pytest.mark.usefixtures("_own_clock")
def test_a_step_is_measured_without_the_batch_that_it_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: Watch
) -> None:
    """With another loader that takes another time, or none."""
    iterator = iter(DataLoader(range(600), batch_size=1, collate_fn=Dear))  # type: ignore[arg-type]
    batch = None
    for _ in range(600):
        batch = take(observer, iterator)  # the step: it drops the batch before
    del batch
    end(observer, iterator)
    observer.stop()
    found = read(str(tmp_path))
    assert found is not None
    assert not found.step_drops
    assert found.step_beside > 2e-3
    assert found.step.seconds < 0.5 * found.step_beside


@pytest.mark.usefixtures("_own_clock")
def test_a_batch_is_kept_for_the_next_step_even_if_the_clocks_would_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: Watch
) -> None:
    """Of a later step the batch before would be another, and be dropped."""
    monkeypatch.setattr("hotset.run.doctor.clocks._IN_A_ROW", 2)
    monkeypatch.setattr("hotset.run.doctor.loop._ALONE_SHARE", 1.0)
    iterator = iter(DataLoader(range(600), batch_size=1, collate_fn=Dear))  # type: ignore[arg-type]
    batch = None
    for _ in range(600):
        batch = take(observer, iterator)
    del batch
    end(observer, iterator)
    observer.stop()
    (written,) = tmp_path.glob("watch-*.json")
    (loop,) = json.loads(written.read_text())["loops"]
    lengths = [seconds for seconds, *_ in loop["alone"]]
    assert statistics.quantiles(lengths, n=4)[-1] < 2e-3


@pytest.mark.usefixtures("_own_clock")
def test_what_the_watching_writes_is_no_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: Watch
) -> None:
    def slow(self: Ledger, name: str, text: str) -> None:
        time.sleep(5e-3)

    monkeypatch.setattr("hotset.run.doctor.watch._WRITE_SECONDS", 0.0)
    iterator = iter(DataLoader(range(8), batch_size=1))  # type: ignore[arg-type]
    with monkeypatch.context() as writing:
        writing.setattr(Ledger, "write", slow)
        for _ in range(8):
            take(observer, iterator)
    end(observer, iterator)
    observer.stop()
    found = read(str(tmp_path))
    assert found is not None
    assert found.step_beside < 5e-3


class Event:
    """One of :class:`torch.cuda.Event`, on a GPU that takes ten times as long as the processor."""

    now = 0.0  # the GPU's clock
    done = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.done

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def use_gpu(monkeypatch: pytest.MonkeyPatch, event: type[Event]) -> None:
    """The program uses a GPU, whose events these are."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", event)


def test_steps_are_timed_on_the_gpu_by_events_that_nothing_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: Watch
) -> None:
    use_gpu(monkeypatch, Event)
    iterator = iter(torch.utils.data.DataLoader(torch.arange(40), batch_size=4))
    for step in range(10):
        take(observer, iterator)
        Event.now += 0.5
        Event.done = Event.now if step >= 6 else 0.0  # nothing of it was known before
    end(observer, iterator)
    observer.stop()
    found = read(str(tmp_path))
    assert found is not None
    assert found.gpu == pytest.approx(0.5)
    assert found.step.seconds == pytest.approx(0.5 / 4)


def test_steps_that_the_gpu_ends_after_the_last_batch_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: Watch
) -> None:
    use_gpu(monkeypatch, Event)
    monkeypatch.setattr(Event, "now", 0.0)
    monkeypatch.setattr(Event, "done", -1.0)
    iterator = iter(torch.utils.data.DataLoader(torch.arange(40), batch_size=4))
    for _ in range(10):
        take(observer, iterator)
        Event.now += 0.5
    Event.done = Event.now
    observer.stop()
    found = read(str(tmp_path))
    assert found is not None
    assert found.gpu == pytest.approx(0.5)


class BrokenEvent(Event):
    """An event of a GPU on which a kernel has failed."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_gpu_that_has_failed_is_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: Watch
) -> None:
    use_gpu(monkeypatch, BrokenEvent)
    iterator = iter(torch.utils.data.DataLoader(torch.arange(40), batch_size=4))
    for _ in range(10):
        take(observer, iterator)
    assert not observer.is_off
    observer.stop()
    found = read(str(tmp_path))
    assert found is not None
    assert found.gpu is None
