"""``python -m benchmarks [NAME ...] [--quick] [--peer-python PATH] [--out FOLDER]``."""

from __future__ import annotations

import argparse
import compileall
import sys
import time
import traceback
from pathlib import Path

import torch
from rich.console import Console

import hotset
from benchmarks.machine import describe
from benchmarks.report import Report
from benchmarks.settings import Settings
from benchmarks.suite import BENCHMARKS

# Columns of a table in a file or a pipe, where there is no window to ask for its width.
_FILE_WIDTH = 170


def main(words: list[str] | None = None) -> int:
    """Run what the command line asks for (``sys.argv`` where ``words`` is None); return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.names if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark {unknown[0]!r}; the names are {', '.join(BENCHMARKS)}.")
    settings = Settings(arguments.out, arguments.peer_python, arguments.quick)
    settings.out.mkdir(parents=True, exist_ok=True)
    # As where a user has installed it; with PYTHONDONTWRITEBYTECODE, each process would compile it.
    compileall.compile_dir(Path(hotset.__file__).parent, quiet=2)
    # One thread for everyone who gathers in this process: see the package's first page.
    torch.set_num_threads(1)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    report = Report(console, describe(), settings.quick)
    report.print_machine()
    for name in arguments.names or BENCHMARKS:
        console.rule(name)
        start = time.perf_counter()
        try:
            report.add(name, BENCHMARKS[name](settings))
        except Exception as error:
            # One benchmark that breaks must not cost the figures of the others.
            report.broken[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        console.print(f"{name} took {time.perf_counter() - start:.0f} s", style="dim")
        report.save_json(settings.out / "results.json")
    report.print_targets()
    report.save_plot(settings.out / "results.png")
    console.print(f"saved {settings.out / 'results.json'} and {settings.out / 'results.png'}")
    return 1 if report.broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="hotset beside its peers")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(BENCHMARKS)}; all if none")
    parser.add_argument(
        "--quick", action="store_true", help="tiny data: shows that it runs, measures nothing"
    )
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="PATH",
        help="the interpreter that has FFCV and TensorFlow (see benchmarks/outside.py)",
    )
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="where results go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
