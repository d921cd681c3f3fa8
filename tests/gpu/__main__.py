"""All checks and figures: ``python -m tests.gpu``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .checks import CHECKS, LAST, LIMITS
from .figures import FIGURES, line, machine, measure
from .runner import Item, Report, run

_LIMIT, _FIGURE_LIMIT = 30.0, 150.0  # seconds


def _machine(device: str) -> Iterator[Any]:
    yield {"kind": "machine", **machine(device)}


def items_of(device: str, tiny: bool, only: list[str]) -> list[Item]:
    """The machine; then, of all checks and figures, those whose names hold one of these words."""

    def checks(chosen: list[Callable[[str], None]]) -> list[Item]:
        return [
            Item(f"checks/{one.__name__}", partial(one, device), LIMITS.get(one, _LIMIT)) for one in chosen
        ]

    figures = [
        Item(f"figures/{one.__name__}", partial(measure, one, device, tiny), _FIGURE_LIMIT) for one in FIGURES
    ]
    found = [*checks(CHECKS), *figures, *checks(LAST)]
    if device == "cpu":  # the limits are a GPU's
        found = [item._replace(limit=10 * item.limit) for item in found]
    chosen = [item for item in found if not only or any(word in item.name for word in only)]
    return [Item("machine", partial(_machine, device)), *chosen]


def _line(value: Any) -> str | None:
    if value["kind"] == "figure":
        return line(value)
    return "  ".join(f"{key}: {one}" for key, one in value.items() if key != "kind")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="figures at small sizes, to try the code")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="checks/, figures/, parts of names"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it")
    parser.add_argument("--out", type=Path, help="where to write what was found, JSON, after each item")
    parser.add_argument("--list", action="store_true", help="print the names alone")
    options = parser.parse_args()
    items = items_of(options.device, options.tiny, options.only)
    if options.list:
        print(*(item.name for item in items), sep="\n")
        return 0
    if options.device != "cpu" and not _has_gpu():
        print("there is no GPU here, so nothing was tested on one; --device cpu --tiny tries the code.")
        return 0
    report = Report(options.out, _line)
    run(items, report, options.seconds)
    print()
    for outcome in report.outcomes:
        for value in outcome.values:
            print(_line(value))
    bad = [one for one in report.outcomes if one.state != "ok"]
    for one in bad:
        print(f"{one.state:8} {one.name}  {one.why}")
    print(f"{len(report.outcomes) - len(bad)} of {len(report.outcomes)} ok")
    return 1 if bad else 0


def _has_gpu() -> bool:
    """Asked in a process of its own: in those that are forked from one that has asked, no GPU can be used."""
    quiet = Report(None, lambda value: None)
    run([Item("a GPU", lambda: [torch.cuda.is_available()])], quiet)
    return quiet.outcomes[0].values == [True]


if __name__ == "__main__":
    sys.exit(main())
