"""``hotset.ModelCheckpoint``: which checkpoints are written, and which of them are kept.

They are told apart by the number of their step, which is in their names, and by nothing else: not by the
times of the files, which a copy of the folder changes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from hotset._warnings import warn
from hotset.errors import ArgumentError
from hotset.train.callbacks import Callback
from hotset.train.checkpoint import UNFINISHED
from hotset.train.distributed import rank_of_job
from hotset.train.run_state import RunState
from hotset.train.validation import positive

__all__ = ["ModelCheckpoint"]


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
        ArgumentError: an argument is not what it may be.
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
            raise ArgumentError(f"prefix={prefix!r} is no name; give letters, digits, '-', '_' and '.'.")
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
