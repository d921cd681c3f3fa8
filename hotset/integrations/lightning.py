"""Lightning: checkpoints of an epoch's last batch that do not cost the next epoch.

Lightning's Trainer takes a :class:`hotset.DataLoader` as it is. It injects ``DistributedSampler`` by building
the loader again from its attributes, and saves and loads its state with its own checkpoints, so that the
rest of an interrupted epoch is bit for bit what it would have been. What it does with that state by moment:

================================  =========================================================================
checkpoint in the midst           loaded: the rest of the epoch follows
at the last batch                 loaded: no batch is left, but Lightning counts a whole epoch for it
at the end of validation or of    not loaded: the next epoch begins as in a new process
the epoch
================================  =========================================================================

The middle row silently loses an epoch, with any loader that has a state (torchdata's too): Lightning has
closed the books of that epoch, while the loader has not. A state of a loader that has nothing left says
nothing that the next epoch needs, so :class:`EpochEnds` leaves it out, and the last two rows become one.

What the next epoch's order is then up to the sampler. Lightning tells ``DistributedSampler`` the number of
the epoch, with one rank too, so that it goes on in all rows without workers. With workers the first epoch
after such a checkpoint has the order of epoch 0, with torch's loader too: Lightning begins the loader before
it tells the number, and workers are sent their first tasks at once.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["EpochEnds"]


class EpochEnds(Callback):
    """Give it to the Trainer where a checkpoint may be saved at the last batch of an epoch.

    That is whenever ``ModelCheckpoint(every_n_train_steps=n)`` meets an epoch's end, ``limit_train_batches``
    included.

    Example:
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> callbacks = [EpochEnds(), ModelCheckpoint(every_n_train_steps=1000)]
    """

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.is_last_batch:
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
