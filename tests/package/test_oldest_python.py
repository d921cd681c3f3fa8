"""The oldest Python that hotset promises imports every module, if it is installed here.

The machines that run these tests have the dependencies for one Python alone, so in another one they are
stubs (tests/import_all.py). Tested are hotset's own syntax and its use of the standard library while modules
are imported, which is where newer features fail. Without another Python, this one imports them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import pythons

import hotset

ROOT = Path(hotset.__file__).parent.parent
SCRIPT = Path(__file__).parents[1] / "import_all.py"
PROMISED = (3, 10)


def imported_by(python: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [python, "-I", "-S", str(SCRIPT), str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


@pytest.mark.chaos  # `make matrix` runs all tests with it
def test_every_module_can_be_imported_by_the_oldest_python_here() -> None:
    found = pythons(PROMISED)
    done = imported_by(found[min(found)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) modules imported, 0 failures", done.stdout)[0]) > 150, done.stdout


def test_the_oldest_python_is_the_one_that_is_promised() -> None:
    said = re.search(r'^requires-python = ">=(\d+)\.(\d+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert said is not None
    assert (int(said[1]), int(said[2])) == PROMISED


def test_names_that_an_older_python_lacks_are_reported(tmp_path: Path) -> None:
    """Otherwise the test above would test nothing."""
    (tmp_path / "hotset").mkdir()
    (tmp_path / "hotset/__init__.py").write_text("import torch\nclass A(torch.nn.Module): pass\n")
    (tmp_path / "hotset/newer.py").write_text("from os import not_in_any_python_yet\n")
    (tmp_path / "hotset/broken.py").write_text("if True print(1)\n")
    done = imported_by(sys.executable, tmp_path)
    assert done.returncode == 1
    assert "--- hotset.newer" in done.stdout
    assert "--- hotset.broken" in done.stdout
    assert "1 modules imported, 2 failures" in done.stdout
