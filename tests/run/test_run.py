"""The command ``hotset run`` as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from decoding import COMMAND, calls, forked, run
from helpers import is_a_sentence

pytestmark = pytest.mark.usefixtures("forking")


def hotset(*args: str) -> subprocess.CompletedProcess[str]:
    return forked(COMMAND, "run", *args)


def test_the_output_is_the_programs_and_the_report_goes_to_stderr() -> None:
    done = hotset("--memory", "64MiB", "--", sys.executable, "-c", "print('mine'); raise SystemExit(5)")
    assert (done.returncode, done.stdout) == (5, "mine\n")
    assert done.stderr.startswith("hotset: ")
    assert "Nothing was decoded by functions that hotset knows" in done.stderr


WAITS = """
import time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, index): time.sleep(0.01); return index
for batch in torch.utils.data.DataLoader(Slow(), batch_size=4): pass
"""


def test_the_reports_sentences_end() -> None:
    done = hotset("--memory", "64MiB", "--", sys.executable, "-c", WAITS)
    assert done.stderr.endswith("`hotset doctor` says what hotset.cache(dataset) would give.\n")


def test_a_traceback_is_the_programs() -> None:
    command = [sys.executable, "-c", "import json; json.loads('{')"]
    plain = subprocess.run(command, capture_output=True, text=True)
    done = hotset("--", *command)
    assert done.returncode == plain.returncode == 1
    assert done.stderr.startswith(plain.stderr)


def test_a_program_that_is_no_python_runs() -> None:
    done = hotset("echo", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "No Python process was reached" in done.stderr


@pytest.mark.parametrize(
    ("options", "telling"),
    [
        (["--memory", "12 parsecs"], "amount of memory"),
        (["--evict", "random"], "--evict"),
        (["--memo", "nothing"], "module:function"),
        (["--spill", "/no/such/folder"], "--spill"),
        (["--spill", ""], "--spill"),
    ],
)
def test_wrong_options_are_sentences(options: list[str], telling: str) -> None:
    done = hotset(*options, "--", "echo", "hello")
    assert (done.returncode, done.stdout) == (2, "")
    assert telling in done.stderr
    assert is_a_sentence(done.stderr.strip())


def test_a_program_that_empties_the_temporary_folder_ends_as_it_ends() -> None:
    program = "import os, shutil; shutil.rmtree(os.environ['HOTSET_LEDGER']); raise SystemExit(7)"
    done = hotset("--", sys.executable, "-c", program)
    assert done.returncode == 7, done.stderr
    assert "ran for" in done.stderr


def test_a_function_of_a_module_that_nobody_imports_is_named() -> None:
    program = "import json; json.loads('[1]')"
    done = hotset("--memo", "nosuch:read", "--memo", "json:loads", "--", sys.executable, "-c", program)
    assert "nosuch:read" in done.stderr
    assert "no process imported this module" in done.stderr
    assert "left alone: json:loads" not in done.stderr


def test_a_function_that_is_called_by_another_name_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "readers.py").write_text(
        "import json\ndef read(path): return open(path).read()\njson.read = read\nclass Kind:\n    pass\n"
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    program += "import json, readers; json.read(readers.__file__)"
    places = [part for name in ("read", "Kind", "nothing") for part in ("--memo", f"readers:{name}")]
    done = hotset(*places, "--", sys.executable, "-c", program)
    said = {
        line.split("readers:")[1].split(",")[0]: line
        for line in done.stderr.splitlines()
        if "readers:" in line
    }
    assert said.keys() == {"read", "Kind", "nothing"}, done.stderr
    assert [name for name, line in said.items() if "nothing called it by this name" in line] == ["read"]


def test_without_a_program_it_says_what_to_write() -> None:
    done = hotset()
    assert done.returncode == 2
    assert "hotset run -- python train.py" in done.stderr


def test_nothing_stays_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert hotset("--", sys.executable, "-c", "import sys, os; os.kill(os.getpid(), 9)").returncode == -9
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("hotset-run-")] == []


def test_a_session_keeps_pictures_for_the_next_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cv2")
    monkeypatch.setenv("HOTSET_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir(mode=0o700)
    create = [sys.executable, "-m", "hotset", "session", "create", "mine", "--memory", "64MiB"]
    subprocess.run(create, check=True, capture_output=True)
    program = (
        "import cv2, torch, numpy, time, sys, os\n"
        "path = sys.argv[1] + '/a.png'\n"
        "if not os.path.exists(path): cv2.imwrite(path, numpy.ones((50, 50, 3), 'u1')); time.sleep(0.2)\n"
        "for _ in range(3): assert cv2.imread(path).sum() == 7500\n"
    )
    counted = [
        calls(run(program, str(tmp_path), hotset=("--session", "mine")).report, "cv2.imread")
        for _ in range(2)
    ]
    assert counted == [(3, 2), (3, 3)]
    assert hotset("--session", "none", "--", "echo").returncode == 2


def test_a_spill_folder_is_made_where_the_command_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may go to another folder before it decodes."""
    pytest.importorskip("cv2")
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path)
    program = (
        "import cv2, torch, numpy, time, os\n"
        f"path = {str(tmp_path / 'a.png')!r}\n"
        "cv2.imwrite(path, numpy.ones((50, 50, 3), 'u1')); time.sleep(0.2)\n"
        "os.chdir('/')\n"
        "for _ in range(3): assert cv2.imread(path).sum() == 7500\n"
    )
    ran = run(program, hotset=("--memory", "64MiB", "--spill", "disk/new"))
    assert calls(ran.report, "cv2.imread") == (3, 2), ran.report
    assert (tmp_path / "disk" / "new").is_dir()


WAITS = """
import time, torch, traceback, warnings, json, sys
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        time.sleep(0.05)
        if index == 7: raise ValueError("mine")
        return index
try:
    for batch in torch.utils.data.DataLoader(Slow(), batch_size=2): pass
except ValueError as error:
    frames = traceback.extract_tb(error.__traceback__)
    print(json.dumps([frame.name for frame in frames]))
"""


def test_the_loaders_wait_is_measured_without_a_line_in_a_traceback() -> None:
    plain, ours = run(WAITS, hotset=None), run(WAITS)
    assert ours.said == plain.said != []
    assert "DataLoader: the loop waited" in ours.report
    assert "for 3 batches" in ours.report


def test_a_program_that_may_no_longer_look_into_the_ledger_does_not_wait_for_it() -> None:
    pytest.importorskip("cv2")
    program = """
import cv2, hotset, numpy, os, tempfile, time, torch
hotset.memo  # is imported, where that other user may read no libraries
folder = tempfile.mkdtemp()
path = os.path.join(folder, "picture.png")
cv2.imwrite(path, numpy.zeros((8, 8, 3), "u1"))
os.chmod(folder, 0o777)
time.sleep(0.1)
if os.getuid():
    os.chmod(os.environ["HOTSET_LEDGER"], 0)
else:
    os.setuid(65534)
for _ in range(200):
    assert cv2.imread(path) is not None
os.unlink(path)
"""
    done = hotset("--memory", "64MiB", "--", "timeout", "45", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
