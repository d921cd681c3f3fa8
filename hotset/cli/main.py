"""``hotset``: the demo, and a look after the caches on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from hotset.errors import HotsetError

__all__ = ["app", "main"]

app = typer.Typer(
    name="hotset",
    help="Keeps accelerators fed: a shared-memory cache and loader for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# typer reads annotations at run time, and on Python 3.10 it needs Optional[X] in place of X | None there.
Folder = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Argument(help="Class subfolders of images; without it, photographs are built and removed again."),
]


@app.command()
def demo(
    folder: Folder = None,
    epochs: Annotated[int, typer.Option(help="Epochs of each run.")] = 4,
    workers: Annotated[int, typer.Option(help="Worker processes of each loader.")] = 2,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch.")] = 64,
    plot: Annotated[Path, typer.Option(help="Where the plot goes, a PNG.")] = Path("hotset-demo.png"),
    count: Annotated[int, typer.Option(help="How many photographs to build.")] = 2000,
) -> None:
    """Train a small CNN twice, with torch's DataLoader and with hotset, and compare."""
    from hotset.demo.run import demo as run

    raise typer.Exit(
        run(folder, epochs=epochs, workers=workers, batch_size=batch_size, plot=plot, count=count)
    )


@app.command()
def explain(
    place: Annotated[
        str, typer.Argument(metavar="MODULE:OBJECT", help="A data set, or a function that makes one.")
    ],
    memory: Annotated[str, typer.Option(help="What the cache may take.")] = "auto",
    resident: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Of a window: how many samples, which fraction, or how much memory."),
    ] = None,
    replace: Annotated[
        str, typer.Option(help='Of a window: the share replaced after an epoch, or "auto".')
    ] = "0.1",
    strict: Annotated[bool, typer.Option(help="Leave live what is only known by its trial.")] = False,
    cut: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="How many transforms are cached."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 64,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="How many steps you want to train."),
    ] = None,
) -> None:
    """Tell what would be cached of a data set, what stays live, and why; a few samples are read."""
    from hotset.cli.explain import explained, load

    dataset = load(place)
    typer.echo(
        explained(
            dataset,
            memory=memory,
            resident=resident,
            replace=replace,
            strict=strict,
            cut=cut,
            batch_size=batch_size,
            steps=steps,
        )
    )


@app.command()
def check() -> None:
    """List the caches on this machine and verify every record in them; exit code 1 if one is damaged."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hotset.session.care import reports
    from hotset.units import format_bytes

    table = Table("cache", "state", "process", "samples", "cached", "memory", "of")
    problems: list[str] = []
    count = 0
    for report in reports():
        count += 1
        entry = report.entry
        opened = report.state in ("ok", "damaged") and report.samples > 0
        table.add_row(
            Text(_printable(entry.name or entry.file)),
            report.state,
            str(entry.at[0] if entry.at else entry.pid) if entry.pid > 0 else "",
            f"{report.samples:,}" if opened else "",
            f"{report.cached:,}" if opened else "",
            format_bytes(report.bytes) if opened else "",
            format_bytes(report.limit) if opened else "",
        )
        problems += [_printable(f"{entry.name or entry.file}: {problem}") for problem in report.problems]
    console = Console()
    if count == 0:
        console.print("There are no caches on this machine.")
        return
    console.print(table)
    for problem in problems:
        console.print(Text(problem, "red"))
    if problems:
        raise typer.Exit(1)


@app.command()
def gc() -> None:
    """Free what dead processes left; what any process still holds, in whatever container, is left alone."""
    from hotset.session import registry

    freed = registry.gc()
    for sentence in freed:
        typer.echo(sentence)
    if not freed:
        typer.echo("There is nothing to free.")


def _printable(text: str) -> str:
    """A label as it can be shown: whoever gave it, it must not move the cursor or colour the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def main() -> None:
    """Run the command line; an error of hotset's is one sentence and exit code 2."""
    try:
        app()
    except HotsetError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
