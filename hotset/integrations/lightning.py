"""Lightning: a checkpoint at an epoch's last batch must not make Lightning skip the next epoch.

Lightning's Trainer takes a :class:`hotset.DataLoader` as it is. It injects ``DistributedSampler`` by building
the loader again from its attributes, and saves and loads the loader's state with its own checkpoints, so that
the rest of an interrupted epoch is bit for bit what it would have been. What Lightning does with that state
depends on when the checkpoint was saved:

================================  =========================================================================
in the midst of an epoch          It loads the state, and the rest of the epoch follows.
at its last batch                 It loads the state, and no batch is left: Lightning counts that as an
                                  epoch.
at the end of validation or of    It does not load the state: the next epoch begins as in a new process.
the epoch
================================  =========================================================================

The middle row silently loses an epoch, with any loader that has a state (torchdata's too): for Lightning the
epoch has ended, for the loader it has not. The next epoch needs nothing from the state of a loader that has
no batch left, so :class:`EpochEnds` leaves that state out, and the second row becomes like the third.

The sampler then decides the order of the next epoch. Lightning sets the epoch of a ``DistributedSampler``,
with one rank too, so without workers the order is right in all rows. With workers the first epoch after such
a checkpoint has the order of epoch 0, with torch's loader too: Lightning begins the loader before it sets the
epoch, and workers are sent their first tasks at once.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["EpochEnds"]


class EpochEnds(Callback):
    """Give this to the Trainer if a checkpoint may be saved at the last batch of an epoch.

    That happens if a step of ``ModelCheckpoint(every_n_train_steps=n)`` is an epoch's last, also where
    ``limit_train_batches`` ends the epoch.

    Example:
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> callbacks = [EpochEnds(), ModelCheckpoint(every_n_train_steps=1000)]
    """

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.is_last_batch:
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
