"""Runs the tests in environments of their own: the oldest and the newest of what pyproject.toml promises.

    python tests/matrix.py [NAME=INTERPRETER ...]

``make matrix`` runs it. Each environment is a Python and a file of constraints for pip, in ``constraints/``;
it lies in ``.venv-matrix/NAME``. One whose Python is not at hand is left out, and a sentence says so. At the
end come the failures, what was skipped and why, and a table. The exit code is 0 if all that ran passed.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

__all__ = ["ENVIRONMENTS", "Environment", "pythons"]

ROOT = Path(__file__).parents[1]


class Environment(NamedTuple):
    """A Python, and the constraints for pip."""

    python: tuple[int, int]
    constraints: str


ENVIRONMENTS = {
    "oldest": Environment((3, 10), "tests/constraints/oldest.txt"),
    "newest": Environment((3, 14), "tests/constraints/newest.txt"),
}


def pythons(oldest: tuple[int, int]) -> dict[tuple[int, int], str]:
    """The installed interpreters from a version on: this one, and of each other the first that runs."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    home = os.path.expanduser("~")
    folders += glob.glob(f"{os.environ.get('PYENV_ROOT', home + '/.pyenv')}/versions/*/bin")
    folders += glob.glob(f"{home}/.local/share/uv/python/*/bin")
    found = {sys.version_info[:2]: sys.executable}
    for folder in folders:
        for path in glob.glob(f"{glob.escape(folder)}/python3.[0-9]*"):
            name = re.fullmatch(r"python3\.(\d+)", os.path.basename(path))
            version = (3, int(name[1])) if name else (0, 0)
            if version >= oldest and version not in found and _version(path) == version:
                found[version] = path
    return found


def _version(path: str) -> tuple[int, ...] | None:
    """The version that an interpreter states: pyenv's are scripts whose version may be missing."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([path, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return tuple(int(part) for part in done.stdout.split()) or None


def _run(name: str, python: str) -> list[str] | None:
    """Run the tests in one environment; returns its row of the table, None where it could not be made."""
    folder = f".venv-matrix/{name}"
    make = ["make", f"VENV={folder}", f"PYTHON={python}", f"CONSTRAINTS={ENVIRONMENTS[name].constraints}"]
    if subprocess.run([*make, f"{folder}/.installed"], cwd=ROOT).returncode:
        return None
    reports = [ROOT / folder / report for report in ("tests.xml", "integrations.xml")]
    for report in reports:
        report.unlink(missing_ok=True)
    # With -i the second part of the tests runs also after a failure in the first; the reports show it.
    subprocess.run([*make, "-i", "test"], cwd=ROOT)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    print(f"\n{name}:")
    for report in reports:
        if not report.exists():
            print(f"  FAILED: pytest wrote no {report.name}")
            counts["failed"] += 1
            continue
        for case in ElementTree.parse(report).iter("testcase"):
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                counts["failed"] += 1
                print(f"  FAILED: {case.get('classname')}.{case.get('name')}")
            elif skipped is not None:
                counts["skipped"] += 1
                message = skipped.get("message", "")
                # Of a file that is skipped as a whole, the message does not give the reason.
                reasons[skipped.text or message if message == "collection skipped" else message] += 1
            else:
                counts["passed"] += 1
    for reason, count in reasons.items():
        print(f"  {count} skipped: {reason}")
    code = (
        "import platform, torch, numpy\n"
        "print(platform.python_version(), torch.__version__, numpy.__version__)"
    )
    shown = subprocess.run([f"{folder}/bin/python", "-c", code], cwd=ROOT, capture_output=True, text=True)
    versions = shown.stdout.split() or ["", "", ""]
    return [name, *versions, *(str(counts[outcome]) for outcome in ("passed", "failed", "skipped"))]


def main(given: dict[str, str]) -> int:
    """Run the tests in all environments whose Python is given or at hand; return the exit code."""
    found = pythons(min(environment.python for environment in ENVIRONMENTS.values()))
    rows: list[list[str]] = [["", "python", "torch", "numpy", "passed", "failed", "skipped"]]
    sentences = []
    for name, (version, _) in ENVIRONMENTS.items():
        python = given.get(name) or found.get(version)
        if python is None:
            wanted = ".".join(map(str, version))
            sentences.append(
                f"Python {wanted} is not at hand, so the {name} environment was left out; "
                f"to name an interpreter: make matrix {name.upper()}=/path/to/python{wanted}"
            )
            continue
        row = _run(name, python)
        if row is None:
            sentences.append(f"The {name} environment could not be made with {python}; the reason is above.")
        rows.append(row or [name, "", "", "", "0", "1", "0"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n" + "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))
    print("\n".join(sentences))
    return int(len(rows) == 1 or any(row[5] != "0" for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(main(dict(argument.split("=", 1) for argument in sys.argv[1:])))
