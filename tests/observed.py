"""What a program observes of a loader, batches and states of generators: recorded, and compared."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

from helpers import equal_batches, rng_states, seed_everything
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 3


def record(
    make_loader: Callable[[], DataLoader[Any]], epochs: int | None = None
) -> list[tuple[str, Any, Any]]:
    """Record all that can be observed of some epochs: ``(moment, RNG states, batch)``, from equal seeds.

    Three are enough, a cold one and two warm ones; two of workers that end with each of them.
    """
    seed_everything(4321)
    random.random()
    loader = make_loader()
    epochs = epochs or (2 if loader.num_workers and not loader.persistent_workers else EPOCHS)
    observed: list[tuple[str, Any, Any]] = [("making the loader", rng_states(), len(loader))]

    def observe(moment: str, batch: Any = None) -> None:
        own = loader.generator
        own_state = None if own is None else hashlib.sha256(own.get_state().numpy().tobytes()).hexdigest()
        observed.append((moment, (*rng_states(), own_state), batch))

    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        iterator = iter(loader)
        observe(f"epoch {epoch}, iter()")
        for count, batch in enumerate(iterator):
            observe(f"epoch {epoch}, batch {count}", batch)
        observe(f"epoch {epoch}, its end")
    return observed


def compare(got: list[tuple[str, Any, Any]], expected: list[tuple[str, Any, Any]]) -> None:
    for (moment, states, batch), (true_moment, true_states, true_batch) in zip(got, expected, strict=False):
        assert moment == true_moment
        equal_batches(batch, true_batch, moment)
        for name, state, true_state in zip(
            ("random", "numpy", "torch", "generator="), states, true_states, strict=False
        ):
            assert state == true_state, f"after {moment} the state of {name} is another than with torch's"
    assert len(got) == len(expected)
