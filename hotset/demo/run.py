"""The demo: the same training with torch's DataLoader and with hotset's, and a comparison of the two.

torch's goes first. The photographs that the demo builds are in the page cache by then, so neither run reads
from a disk. With a folder of the user's, the first run may bring files into the page cache for the second,
and the demo says so.

Only the plot is left. The photographs are built in a temporary folder, which is removed when the demo
returns, fails, is interrupted or is terminated.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset._progress import progress_bar
from hotset.errors import ArgumentError, HotsetError

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from hotset.demo.photographs import Photographs
    from hotset.demo.report import Comparison
    from hotset.demo.training import EpochResult

__all__ = ["demo"]


def demo(
    folder: Path | None = None,
    *,
    epochs: int = 4,
    workers: int = 2,
    batch_size: int = 64,
    plot: Path = Path("hotset-demo.png"),
    count: int = 2000,
) -> int:
    """Train with both loaders, print the comparison, save its plot, and return an exit code.

    Args:
        folder: class subfolders of images; by default photographs are built, and removed at the end.
        epochs: of each run, at least 1. The first hits are in the second.
        workers: of each loader, 0 or more.
        batch_size: samples in a batch, at least 1.
        plot: where to save the plot, a PNG.
        count: how many photographs to build; not used with a ``folder``.

    Returns:
        0 if the two runs' losses are identical, 1 if they are not; 2 if an argument, the folder, an image in
        it or the installation is at fault, with one sentence on stderr; 130 after Ctrl-C.

    Raises:
        SystemExit: 143, on SIGTERM.

    Example:
        >>> demo(Path("photographs"), epochs=2)
        0
    """
    from rich.console import Console

    from hotset.demo.report import table

    console = Console(highlight=False)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        _check(folder, epochs, workers, batch_size, plot, count)
        with _terminable():
            comparison = _compare(folder, epochs, workers, batch_size, count, console)
        console.print(table(comparison))
        if folder is not None:
            console.print("torch's run was first: hotset's found in memory the files that it had read.")
        _save(comparison, plot, console)
        return 0 if comparison.identical else 1
    except HotsetError as error:
        errors.print(_sentence(error), style="red", markup=False)
        # An exception that torch brought from a worker refers to a frame that refers to the exception. The
        # frames, the loader and its workers would live on until the next garbage collection.
        error.__traceback__ = None
        return 2
    except KeyboardInterrupt:
        errors.print("Interrupted; nothing is left behind.")
        return 130


def _sentence(error: HotsetError) -> str:
    """The error's own sentence; if it was raised in a worker, its message is a traceback that ends in it."""
    kind = type(error)
    return str(error).rstrip().splitlines()[-1].removeprefix(f"{kind.__module__}.{kind.__qualname__}: ")


def _check(folder: Path | None, epochs: int, workers: int, batch_size: int, plot: Path, count: int) -> None:
    """Refuse arguments that would otherwise fail at the end, after minutes of training."""
    for name, value, least in (
        ("epochs", epochs, 1),
        ("workers", workers, 0),
        ("batch_size", batch_size, 1),
        ("count", count, 1),
    ):
        if value < least:
            raise ArgumentError(f"{name} must be at least {least}, got {value}.")
    if not plot.parent.is_dir() or plot.is_dir():
        raise ArgumentError(f"The plot cannot be saved as {plot}; name a file in a folder that exists.")
    needed = {"PIL": "Pillow", "matplotlib": "matplotlib"}
    if folder is None:
        needed |= {"sklearn": "scikit-learn", "skimage": "scikit-image"}
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        raise ArgumentError(f'The demo needs {", ".join(missing)}: pip install "hotset[demo]"')


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM raise SystemExit: by default it ends Python at once, and leaves the temporary folder."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set a handler
        return

    def leave(number: int, frame: object) -> None:
        # The workers were probably sent the same signal. At their death, torch's handler would raise an error
        # in the midst of the cleanup.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _compare(
    folder: Path | None, epochs: int, workers: int, batch_size: int, count: int, console: Console
) -> Comparison:
    """Train with both loaders, with a progress bar for each."""
    # Imported here: these import torch, which would delay `hotset --help`.
    from hotset.demo.photographs import Photographs
    from hotset.demo.training import steady

    with _images_folder(folder) as images, progress_bar(console, "samples", 2.0) as bar:
        if folder is None:
            _build(images, count, bar)
        photographs = Photographs(images)
        with steady():
            return _train_both(photographs, epochs, workers, batch_size, bar)


@contextmanager
def _images_folder(folder: Path | None) -> Iterator[Path]:
    """The user's folder, or a temporary one."""
    if folder is not None:
        yield folder
        return
    name = tempfile.mkdtemp(prefix="hotset-demo-")
    try:
        yield Path(name)
    finally:
        # In a thread, as a second Ctrl-C raises in the main thread; Python waits for this one at its exit.
        remover = threading.Thread(target=shutil.rmtree, args=(name, True))
        remover.start()
        remover.join()


def _build(folder: Path, count: int, bar: Progress) -> None:
    from hotset.demo.photographs import build

    task = bar.add_task("building photographs", total=count)
    try:
        build(folder, count, progress=lambda done: bar.update(task, completed=done))
    except OSError as error:
        raise ArgumentError(
            f"The photographs cannot be written ({error}); set TMPDIR to a folder with room."
        ) from error


def _train_both(
    photographs: Photographs, epochs: int, workers: int, batch_size: int, bar: Progress
) -> Comparison:
    import torch

    import hotset
    from hotset.demo.report import Comparison
    from hotset.demo.training import Decoded, flip_and_crop, load_resized, train

    classes = len(photographs.classes)
    total = epochs * len(photographs)
    arguments: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}

    def results(name: str, loader: Iterable[list[torch.Tensor]]) -> Iterator[EpochResult]:
        task = bar.add_task(f"training, {name}", total=total)
        return train(
            loader, classes=classes, epochs=epochs, on_batch=lambda samples: bar.advance(task, samples)
        )

    plain = list(results("torch", torch.utils.data.DataLoader(Decoded(photographs), **arguments)))
    cached: list[EpochResult] = []
    lookups: list[tuple[int, int]] = []
    with hotset.cache(photographs, transform=[load_resized, flip_and_crop]) as data:
        before = data.stats()
        for result in results("hotset", hotset.DataLoader(data, **arguments)):
            after = data.stats()
            cached.append(result)
            lookups.append((after.hits - before.hits, after.misses - before.misses))
            before = after
    title = f"{len(photographs):,} photographs, {classes} classes, batches of {batch_size}, {workers} workers"
    return Comparison(title, len(photographs), plain, cached, lookups, before.cached, before.bytes)


def _save(comparison: Comparison, plot: Path, console: Console) -> None:
    from hotset.demo.report import draw

    try:
        draw(comparison, plot)
    except OSError as error:
        raise ArgumentError(f"The plot cannot be saved as {plot} ({error}); name another file.") from error
    console.print(f"Plot saved as {plot}.", markup=False, soft_wrap=True)
