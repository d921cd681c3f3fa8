"""``python -m tests.compatibility``: run the programs as tests, measure them, write docs/compatibility.md.

Each module is tested and measured in processes of its own, so that no library meets another's threads.
``python -m tests.compatibility test_lmdb`` does that for one module, and keeps the page's other rows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- rows -->", "<!-- end of the rows -->"
MACHINE = re.compile(r"<!-- machine -->.*?<!-- end of the machine -->", re.DOTALL)
HEAD = (
    "| program | verdict | first epoch | later epochs | torch, us a sample | planning, s |\n"
    "|---|---|---|---|---|---|"
)
LIBRARIES = (
    *("torch", "torchvision", "datasets", "timm", "monai", "pyarrow", "zarr", "h5py", "lmdb", "pylance"),
    *("av", "fsspec", "obstore"),
)


def modules() -> list[str]:
    return sorted(path.stem for path in HERE.glob("test_*.py"))


def rows_of(page: str) -> dict[str, str]:
    """The rows of the page, by program."""
    lines = page.split(BEGIN)[1].split(END)[0].splitlines()
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}


def measure(name: str) -> None:
    """Print one row, as JSON, for each of a module's programs."""
    sys.path.insert(0, str(ROOT / "tests"))
    import pytest
    import torch

    harness = importlib.import_module("compatibility.harness")
    try:
        module = importlib.import_module(f"compatibility.{name}")
    except pytest.skip.Exception as why:
        print(f"{name}: {why}", file=sys.stderr)
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for program in harness.programs_of(module):
        with tempfile.TemporaryDirectory() as folder:
            found = harness.measured(program, Path(folder))
        print(json.dumps({"program": program.name, "needs": program.needs, **asdict(found)}), flush=True)


def row(found: dict[str, str | float]) -> str:
    verdict = f"needs {found['needs']}" if found["needs"] else "works as it is"
    numbers = (
        f"{found['first']:.2f}x | {found['later']:.3f}x | {found['torch_us']:,.0f} | {found['plan']:.1f}"
    )
    return f"| {found['program']} | {verdict} | {numbers} |"


def run(name: str) -> list[str] | None:
    """The rows of a module whose tests pass; None if they fail."""
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "compatibility", f"tests/compatibility/{name}.py"]
    # 5: the library is missing, and all is skipped
    if subprocess.run([*tests, "-p", "no:cacheprovider"], cwd=ROOT).returncode not in (0, 5):
        return None
    command = [sys.executable, "-m", "tests.compatibility", "--measure", name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return None
    return [row(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def machine() -> str:
    found = []
    for library in LIBRARIES:
        try:
            found.append(f"{library} {version(library).partition('+')[0]}")
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    processor = names[0].partition(": ")[2] if names else platform.machine()
    versions = ", ".join((f"Python {platform.python_version()}", *found))
    return f"<!-- machine -->{cores} cores ({processor}), {versions}.<!-- end of the machine -->"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "modules", nargs="*", default=modules(), help="test modules, by name; all by default"
    )
    options.add_argument("--measure", metavar="MODULE", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        measure(given.measure)
        return 0
    failed = []
    for name in given.modules:
        found = run(name)
        if found is None:
            failed.append(name)
            continue
        page = PAGE.read_text()
        rows = rows_of(page) | rows_of(f"{BEGIN}\n" + "\n".join(found) + f"\n{END}")
        rows.pop("program", None)
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        table = "\n".join((HEAD, *(rows[program] for program in sorted(rows, key=str.lower))))
        PAGE.write_text(MACHINE.sub(lambda _: machine(), before) + f"{BEGIN}\n{table}\n{END}" + after)
    for name in failed:
        print(f"{name}: failed; its rows are as they were")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
