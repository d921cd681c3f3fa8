"""Randomness that can be kept: states of generators as plain values, and what a pass begins from.

A state that goes into a checkpoint must survive ``torch.load(weights_only=True)`` and json-minded tools, so
it is made of dicts, lists, numbers, strings and bytes: each generator's state is *packed*, and unpacked when
it is put back. Packing happens where the state is taken, in a worker too, so that saving a loader's state
after every batch copies nothing.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hotset.split.generators import Generators, access

__all__ = ["Beginning", "pack", "unpack"]


def pack(state: Any) -> Any:
    """A generator's state, as its module gives it, in plain values.

    Example:
        >>> import random
        >>> unpack(pack(random.getstate())) == random.getstate()
        True
    """
    if isinstance(state, torch.Tensor):
        return {"torch": state.numpy().tobytes()}
    if isinstance(state, np.ndarray):
        return {"numpy": state.dtype.str, "bytes": state.tobytes()}
    if isinstance(state, tuple) and len(state) == 3 and isinstance(state[1], tuple):
        version, words, gauss = state
        return {"random": version, "words": array.array("I", words).tobytes(), "gauss": gauss}
    if isinstance(state, Mapping):
        return {name: pack(part) for name, part in state.items()}
    return int(state) if isinstance(state, np.integer) else state


def unpack(packed: Any) -> Any:
    """What :func:`pack` was given.

    Raises:
        KeyError, TypeError, ValueError: that is no packed state.
    """
    if not isinstance(packed, dict):
        return packed
    if "torch" in packed:
        return torch.frombuffer(bytearray(packed["torch"]), dtype=torch.uint8)
    if "numpy" in packed:
        return np.frombuffer(packed["bytes"], np.dtype(packed["numpy"])).copy()
    if "random" in packed:
        return packed["random"], tuple(array.array("I", packed["words"])), packed["gauss"]
    return {name: unpack(part) for name, part in packed.items()}


class Beginning:
    """What a loader's pass begins from: everything that decides the order of its samples.

    The global generators, the loader's own, those that its samplers hold, the epoch that a sampler was told,
    and the state of a sampler that can be asked for one (``state_dict``, ``load_state_dict``).

    Args:
        loader: any of torch's loaders.

    Attributes:
        globals: the three global generators.
    """

    def __init__(self, loader: Any) -> None:
        self.globals = Generators([])
        self._loader = loader

    def take(self) -> dict[str, Any]:
        """All of it as it is now, in plain values."""
        return {
            "globals": pack(self.globals.states()),
            "generators": [pack(get()) for get, _ in self._generators()],
            "samplers": self.sampler_states(),
        }

    def sampler_states(self) -> list[dict[str, Any]]:
        """The samplers' part of :meth:`take`."""
        return [_sampler_state(sampler) for sampler in self._samplers()]

    def put_generators(self, state: Any, *, with_globals: bool) -> None:
        """Put the generators back to what they were at :meth:`take`.

        Raises:
            KeyError, RuntimeError, TypeError, ValueError: it was not :meth:`take` of such a loader.
        """
        if with_globals:
            self.globals.put(unpack(state["globals"]))
        for (_, set_), packed in zip(self._generators(), state["generators"], strict=True):
            set_(unpack(packed))

    def put_samplers(self, state: Any) -> None:
        """Put the samplers' epochs and own states back.

        Raises:
            as :meth:`put_generators`.
        """
        for sampler, own in zip(self._samplers(), state["samplers"], strict=True):
            if "state" in own:
                sampler.load_state_dict(own["state"])
            if "epoch" in own:
                sampler.set_epoch(own["epoch"])

    def _samplers(self) -> Iterator[Any]:
        for owner, name in ((self._loader, "batch_sampler"), (self._loader, "sampler")):
            sampler = getattr(owner, name, None)
            if sampler is not None:
                yield sampler
        inner = getattr(getattr(self._loader, "batch_sampler", None), "sampler", None)
        if inner is not None and inner is not self._loader.sampler:
            yield inner

    def _generators(self) -> Iterator[Any]:
        if self._loader.generator is not None:
            yield access(self._loader.generator)
        for sampler in self._samplers():
            for value in list(getattr(sampler, "__dict__", {}).values()):
                found = access(value)
                if found is not None:
                    yield found


def _sampler_state(sampler: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
        state["state"] = sampler.state_dict()
    if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
        state["epoch"] = sampler.epoch
    return state
