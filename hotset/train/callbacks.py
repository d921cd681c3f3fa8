"""Callbacks: which events of a training run they are called for, and when.

::

    on_train_begin
    ├─ on_epoch_begin
    │   ├─ a sink: 1 step without sinking, K steps with it
    │   │   ├─ on_step_end      for each of its steps, in order, with that step's counts and loss
    │   │   └─ on_sink_end      once; a stop that was requested is honoured after it
    │   ├─ on_eval_begin, on_eval_end      in fit(), where the epoch is over
    │   └─ on_epoch_end
    on_train_end

The host hears of K steps at once: with sinking ``on_step_end`` comes when the sink has ended, and while
counts and loss are those of the step, the network is at the sink's end already. A callback that reads the
network does so in ``on_sink_end``.

An epoch that a stop cut short has no ``on_epoch_end``. After an exception there is no
``on_train_end`` either: the caller of ``train`` closes what must be closed then.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotset._progress import import_rich, progress_bar
from hotset._warnings import warn
from hotset.errors import ArgumentError, LossNotFinite
from hotset.train.checkpoint import UNFINISHED
from hotset.train.run_state import RunState, rank_of_job

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = [
    "Bar",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "LossMonitor",
    "ModelCheckpoint",
    "TimeMonitor",
    "bars",
    "positive",
]

_BETWEEN_LOSSES = 0.25  # seconds between two losses that the bar reads: reading one waits for the device


class Callback:
    """Base of all callbacks: a method for each event, which does nothing until it is overridden.

    A method that is named like an event and is none (``step_end``, ``on_batch_end``) is an error where
    training begins.

    The state of a callback with ``state_dict()`` and ``load_state_dict(state)`` is saved in checkpoints and
    put back, as that of the learning rate's scheduler in the example.

    Attributes:
        last: whether it is called after all callbacks that are not ``last``, so that it sees what they did.

    Example:
        >>> class Schedule(Callback):
        ...     def __init__(self, scheduler):
        ...         self.scheduler = scheduler
        ...         self.state_dict = scheduler.state_dict
        ...         self.load_state_dict = scheduler.load_state_dict
        ...     def on_epoch_end(self, run):
        ...         self.scheduler.step()
    """

    last = False

    def on_train_begin(self, run: RunState) -> None:
        """Training is about to begin, or to go on."""

    def on_train_end(self, run: RunState) -> None:
        """All epochs are over, or a stop was requested."""

    def on_epoch_begin(self, run: RunState) -> None:
        """Epoch ``run.epoch`` is about to begin, or to go on."""

    def on_epoch_end(self, run: RunState) -> None:
        """Epoch ``run.epoch`` is over, and evaluated if it is to be."""

    def on_step_end(self, run: RunState) -> None:
        """The host has heard of step ``run.step``, whose loss is ``run.loss``."""

    def on_sink_end(self, run: RunState) -> None:
        """``len(run.losses)`` steps have ended, the last of which is ``run.step``."""

    def on_eval_begin(self, run: RunState) -> None:
        """An evaluation is about to begin."""

    def on_eval_end(self, run: RunState) -> None:
        """An evaluation has ended with ``run.metrics``."""


_LIKE_EVENTS = re.compile(r"on_\w+|(\w+_)?(begin|start|end)")  # of other frameworks: step_end, on_train_start


def _require_events(kind: type) -> None:
    """Refuse a callback with a method that would never be called."""
    for cls in kind.__mro__[: kind.__mro__.index(Callback)]:
        for name in vars(cls) if issubclass(cls, Callback) else ():
            if _LIKE_EVENTS.fullmatch(name) and callable(vars(cls)[name]) and not hasattr(Callback, name):
                events = ", ".join(each for each in vars(Callback) if each.startswith("on_"))
                raise ArgumentError(
                    f"{cls.__name__}.{name} is named like an event and is none, so it would never be called; "
                    f"the events are {events}. Give it one of these names, or one with an underscore first."
                )


class CallbackList:
    """Tells callbacks of events: in their order, the last ones last.

    Args:
        callbacks: a callback, several, or None.
        first: callbacks of our own, told before them.

    Raises:
        ArgumentError: one of them is not a callback, or has a method that is named like an event and is none.
    """

    def __init__(self, callbacks: Any, first: Iterable[Callback] = ()) -> None:
        given = [callbacks] if isinstance(callbacks, Callback) else callbacks or []
        if not isinstance(given, Iterable) or isinstance(given, (str, bytes)):
            raise ArgumentError(f"callbacks must be a list of hotset.Callback objects, got {callbacks!r}.")
        everything: list[Any] = [*first, *given]
        for one in everything:
            if not isinstance(one, Callback):
                kind = one.__name__ if isinstance(one, type) else type(one).__name__
                made = ", a class: make one of it" if isinstance(one, type) else ""
                raise ArgumentError(
                    f"callbacks hold a {kind}{made}; give objects derived from hotset.Callback."
                )
            _require_events(type(one))
        self.callbacks: list[Callback] = sorted(everything, key=lambda one: one.last)
        self._of_steps = [one for one in self.callbacks if type(one).on_step_end is not Callback.on_step_end]

    def __call__(self, event: str, run: RunState) -> None:
        """Tell all of an event."""
        for one in self.callbacks:
            getattr(one, event)(run)

    def steps(self, run: RunState) -> None:
        """Tell of each step of the sink that has ended; leaves the run at its last one."""
        if not self._of_steps:
            return
        for number in range(len(run.losses)):
            run.look_at(number)
            for one in self._of_steps:
                one.on_step_end(run)

    def states(self) -> list[list[Any]]:
        """The states of the callbacks that have one, each with its class's name."""
        return [[type(one).__qualname__, one.state_dict()] for one in self._with_states()]

    def load(self, states: Iterable[Any]) -> None:
        """Put back states: to the first callback of a class that of the first, and so on."""
        waiting = self._with_states()
        for name, state in states:
            found = next((one for one in waiting if type(one).__qualname__ == name), None)
            if found is None:
                warn(
                    f"the checkpoint holds the state of a {name}, which is not among the callbacks; give it "
                    "too, if the run is to go on as it was."
                )
                continue
            waiting.remove(found)
            found.load_state_dict(state)

    def _with_states(self) -> list[Any]:
        both = ("state_dict", "load_state_dict")
        return [one for one in self.callbacks if all(hasattr(one, name) for name in both)]


class LossMonitor(Callback):
    """Prints the loss: ``epoch: 1 step: 1000, loss is 0.23``, the step being that of the epoch.

    After an epoch that :meth:`Model.fit` evaluated the metrics follow, in a line of their own.

    Args:
        per_print_times: steps between two lines, at least. With sinking there is at most one line for a sink,
            with its last step's loss.

    Raises:
        ArgumentError: ``per_print_times`` is not a whole number, 1 or more.
        LossNotFinite: (in training) a loss that was to be printed is NaN or infinite. Training ends with it,
            before good checkpoints are replaced by bad ones.

    Note:
        After Mindspore's ``LossMonitor``.

    Example:
        >>> from hotset.train.model import Model
        >>> import torch
        >>> network = torch.nn.Linear(1, 1)
        >>> model = Model(network, torch.nn.functional.mse_loss, torch.optim.SGD(network.parameters()))
        >>> model.train(1, [(torch.zeros(2, 1), torch.zeros(2, 1))], LossMonitor())  # doctest: +ELLIPSIS
        epoch: 1 step: 1, loss is ...
    """

    def __init__(self, per_print_times: int = 1) -> None:
        self.per_print_times = positive(per_print_times, "per_print_times")
        self._printed = 0

    def on_train_begin(self, run: RunState) -> None:
        self._printed = run.step

    def on_sink_end(self, run: RunState) -> None:
        if run.step - self._printed < self.per_print_times:
            return
        self._printed = run.step
        loss = run.loss
        if not math.isfinite(loss):
            raise LossNotFinite(
                f"the loss is {loss} at epoch {run.epoch}, step {run.step_in_epoch}: a smaller learning rate "
                "may keep it finite, or clipped gradients; the batch may hold bad values too."
            )
        print(f"epoch: {run.epoch} step: {run.step_in_epoch}, loss is {loss}", flush=True)

    def on_epoch_end(self, run: RunState) -> None:
        if run.metrics:
            print(f"Eval result: epoch {run.epoch}, metrics: {run.metrics}", flush=True)


class TimeMonitor(Callback):
    """Prints how long an epoch's training took: ``Train epoch time: 1234.500 ms, per step time: 1.234 ms``.

    It waits for the device to do the epoch's last step, as without that only the launching would be timed.
    The evaluation after the epoch is not counted.

    Note:
        After Mindspore's ``TimeMonitor``.

    Example:
        >>> monitor = TimeMonitor()
    """

    def __init__(self) -> None:
        self._began, self._first = 0.0, 0
        self._took: float | None = None

    def on_epoch_begin(self, run: RunState) -> None:
        self._began, self._first, self._took = time.perf_counter(), run.step, None

    def on_eval_begin(self, run: RunState) -> None:
        self._stop(run)

    def on_epoch_end(self, run: RunState) -> None:
        seconds = self._stop(run)
        each = seconds / max(run.step - self._first, 1)
        print(f"Train epoch time: {seconds * 1e3:.3f} ms, per step time: {each * 1e3:.3f} ms", flush=True)

    def _stop(self, run: RunState) -> float:
        """The seconds that the epoch's training took, until this was called first."""
        if self._took is None:
            _ = run.loss
            self._took = time.perf_counter() - self._began
        return self._took


class EarlyStopping(Callback):
    """Stops :meth:`Model.fit` once a metric has not become better for some epochs in a row.

    Args:
        monitor: the metric's name in the model's ``metrics``.
        mode: whether smaller (``"min"``) or larger (``"max"``) values are better.
        patience: epochs without a better value after which training stops, at least 1.
        min_delta: by how much a value must be better to count as such. NaN is never better.

    Raises:
        ArgumentError: an argument is not valid; (in training) there is no such metric, or it is not
            one number.

    Example:
        >>> stopping = EarlyStopping("accuracy", mode="max", patience=2)
    """

    def __init__(
        self, monitor: str, *, mode: Literal["min", "max"] = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise ArgumentError(f'mode must be "min" or "max", got {mode!r}.')
        if isinstance(min_delta, bool) or not isinstance(min_delta, (int, float)) or not min_delta >= 0:
            raise ArgumentError(f"min_delta must be a number, 0 or more, got {min_delta!r}.")
        self.monitor = monitor
        self.mode = mode
        self.patience = positive(patience, "patience")
        self.min_delta = float(min_delta)
        self._best: float | None = None
        self._waited = 0

    def on_train_begin(self, run: RunState) -> None:
        self._best, self._waited = None, 0

    def on_epoch_end(self, run: RunState) -> None:
        value = run.metrics.get(self.monitor)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            there = ", ".join(map(repr, run.metrics)) or "none, as fit() has no valid_dataset"
            raise ArgumentError(
                f"EarlyStopping's metric {self.monitor!r} must be a number, got {value!r}; the metrics are "
                f"{there}."
            )
        if self._is_better(value):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            run.request_stop()

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self._best is None:
            return True
        gain = self._best - value if self.mode == "min" else value - self._best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and for how many epochs there was no better one."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._best, self._waited = state["best"], state["waited"]


class ModelCheckpoint(Callback):
    """Saves checkpoints ``<prefix>-<step>.pt`` in a folder, and removes the oldest.

    A run that goes on from one equals, bit for bit, one that was never interrupted::

        saving = hotset.ModelCheckpoint("checkpoints", save_steps=1000)
        model.train(10, loader, saving, resume=saving.latest)

    the first time from the beginning, and after that from the newest checkpoint. It is told of events after
    the other callbacks, so that their states are saved as they are after this step or epoch.

    With several ranks each writes its own, ``<prefix>-<step>-rank<r>.pt``.

    Args:
        folder: where; made if it is not there.
        save_steps: steps after which one is saved, at the end of the sink that reaches them; None: at the end
            of each epoch. The last step is saved in any case.
        keep: how many are kept, those of the highest steps; None: all.
        prefix: of their names.

    Raises:
        ArgumentError: an argument is not valid.
        StateError: (when training begins) the loader cannot say where it stands.
        OSError, RuntimeError: (in training) a checkpoint cannot be written.

    Example:
        >>> import tempfile
        >>> saving = ModelCheckpoint(tempfile.mkdtemp(), save_steps=100, keep=2)
        >>> print(saving.latest)
        None
    """

    last = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        save_steps: int | None = None,
        keep: int | None = 5,
        prefix: str = "model",
    ) -> None:
        if not isinstance(prefix, str) or not re.fullmatch(r"\w[\w.-]*", prefix):
            raise ArgumentError(
                f"prefix must be a name of letters, digits, '-', '_' and '.', got {prefix!r}."
            )
        self.folder = Path(folder)
        self.save_steps = positive(save_steps, "save_steps") if save_steps is not None else None
        self.keep = positive(keep, "keep") if keep is not None else None
        self.prefix = prefix
        self._saved = 0

    @property
    def latest(self) -> Path | None:
        """This rank's checkpoint of the highest step in the folder; None if there is none."""
        found = self._found()
        return found[max(found)] if found else None

    def on_train_begin(self, run: RunState) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self._found(unfinished=True).values():  # by a process that was killed
            left.unlink(missing_ok=True)
        run.checkpoint()  # what would fail at the first save should fail now
        self._saved = run.step
        later = [step for step in self._found() if step > run.step]
        if later:
            warn(
                f"{self.folder} holds a checkpoint of step {max(later)}, and this run begins at {run.step}: "
                "the other one stays the latest; give another folder or prefix, or resume from it."
            )

    def on_sink_end(self, run: RunState) -> None:
        if self.save_steps is not None and run.step - self._saved >= self.save_steps:
            self._save(run)

    def on_epoch_end(self, run: RunState) -> None:
        if self.save_steps is None:
            self._save(run)

    def on_train_end(self, run: RunState) -> None:
        if run.step != self._saved:
            self._save(run)

    def _save(self, run: RunState) -> None:
        run.save_checkpoint(self.folder / self._name(str(run.step)))
        self._saved = run.step
        if self.keep is None:
            return
        # Those of later steps are another run's, which went further: neither counted nor removed.
        found = self._found()
        for step in sorted(step for step in found if step <= run.step)[: -self.keep]:
            found[step].unlink(missing_ok=True)

    def _found(self, *, unfinished: bool = False) -> dict[int, Path]:
        """This rank's checkpoints in the folder, by step; or those that were not written to their end."""
        name = self._name(r"(\d+)", re.escape)
        pattern = re.compile(UNFINISHED.replace(".", r"\.").format(name) if unfinished else name)
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        matches = [pattern.fullmatch(name) for name in names]
        return {int(match[1]): self.folder / match[0] for match in matches if match}

    def _name(self, step: str, quote: Callable[[str], str] = str) -> str:
        rank, ranks = rank_of_job()
        return quote(f"{self.prefix}-") + step + quote(f"-rank{rank}.pt" if ranks > 1 else ".pt")


def bars(progress: bool, held: ExitStack) -> list[Callback]:
    """The bar, which ``held`` closes, on rank 0 of a job whose standard output is a terminal."""
    shown = progress and rank_of_job()[0] == 0 and sys.stdout is not None and sys.stdout.isatty()
    return [held.enter_context(Bar())] if shown else []


class Bar(Callback):
    """One bar for the epoch under way: its number, steps, steps a second, the last loss.

    It stands on the terminal that is ``sys.stdout``; what is printed meanwhile comes above it.
    """

    def __init__(self) -> None:
        import_rich()
        from rich.console import Console

        self._progress = progress_bar(Console(highlight=False), "steps", 5.0, "loss")
        self._task: TaskID | None = None
        self._loss = ""
        self._read = 0.0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_epoch_begin(self, run: RunState) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(
            f"epoch {run.epoch}/{run.epochs}",
            total=run.steps_in_epoch,
            completed=run.step_in_epoch,
            loss=self._loss,
        )

    def on_sink_end(self, run: RunState) -> None:
        now = time.monotonic()
        if now - self._read > _BETWEEN_LOSSES:
            self._loss = f"loss {run.loss:.4g}"
            self._read = time.monotonic()
        assert self._task is not None
        self._progress.update(self._task, completed=run.step_in_epoch, loss=self._loss)

    def on_epoch_end(self, run: RunState) -> None:
        assert self._task is not None
        self._loss = f"loss {run.loss:.4g}"
        self._progress.update(self._task, total=run.step_in_epoch, loss=self._loss)


def positive(value: Any, name: str) -> int:
    """``value``, if it is a whole number, 1 or more.

    Raises:
        ArgumentError: it is not; names the argument.

    Example:
        >>> positive(3, "epoch")
        3
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} must be a whole number, 1 or more, got {value!r}.")
    return value
