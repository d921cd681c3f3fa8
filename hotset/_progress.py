"""The progress bar of hotset's long operations: how much is done, and how fast."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task
    from rich.text import Text

__all__ = ["counting_bar", "filling_bar", "import_rich", "progress_bar"]


def import_rich() -> None:
    """Import rich, which draws from Python's global generator as it is imported: that is put back.

    Not at the top, as it takes a while, and most processes show no bar.
    """
    state = random.getstate()
    importlib.import_module("rich.progress")
    random.setstate(state)


def progress_bar(console: Console, unit: str, period: float, *fields: str) -> Progress:
    """Return a progress bar with a rate.

    Args:
        console: where it is shown.
        unit: of what is counted: the rate is ``1,234 <unit>/s``.
        period: seconds over which the rate is measured.
        fields: names of a task's fields, each shown in a column of its own. With ``"size"`` the time that is
            left is shown, and not the time that has passed.
    """
    import_rich()
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f} {unit}/s", style="cyan")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        Rate(),
        *(TextColumn(f"{{task.fields[{name}]}}") for name in fields),
        TimeRemainingColumn() if "size" in fields else TimeElapsedColumn(),
        console=console,
        speed_estimate_period=period,
    )


@contextlib.contextmanager
def counting_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error if that is a terminal; yields what takes how many samples are done."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    import_rich()
    from rich.console import Console

    with progress_bar(Console(stderr=True, highlight=False), "samples", 5.0) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextlib.contextmanager
def filling_bar(what: str, total: int | None, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error; yields a function that takes how many are done, and their bytes.

    Without a total it counts.
    """
    if not shown or sys.stderr is None:
        yield lambda done, size: None
        return
    import_rich()
    from rich.console import Console

    with progress_bar(Console(stderr=True, highlight=False), "samples", 30.0, "size") as progress:
        task = progress.add_task(what, total=total, size="")
        yield lambda done, size: progress.update(task, completed=done, size=f"{size / (1 << 20):,.0f} MiB")
