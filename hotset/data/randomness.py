"""Randomness that can be kept: states of generators as plain values, and what a pass begins from.

A state that goes into a checkpoint must survive ``torch.load(weights_only=True)`` and json-minded tools, so
it is made of dicts, lists, numbers, strings and bytes: each generator's state is *packed*, and unpacked when
it is put back. Packing happens where the state is taken, in a worker too, so that saving a loader's state
after every batch copies nothing.
"""

from __future__ import annotations

import array
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from hotset.determinism.generators import Generators, access
from hotset.errors import StateError

__all__ = ["DAMAGE", "Beginning", "damaged", "pack", "put", "unpack"]

# What comes of values that are not what they were.
DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


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
        return torch.frombuffer(bytearray(_bytes(packed["torch"])), dtype=torch.uint8)
    if "numpy" in packed:
        return np.frombuffer(_bytes(packed["bytes"]), np.dtype(packed["numpy"])).copy()
    if "random" in packed:
        gauss = packed["gauss"]
        if not (gauss is None or isinstance(gauss, float)):
            raise TypeError(f"{gauss!r} is no normal deviate")
        return packed["random"], tuple(array.array("I", _bytes(packed["words"]))), gauss
    for name, most in _PLACES.items():
        if name in packed and not 0 <= packed[name] <= most:
            raise ValueError(f"a generator of numpy's cannot be at {name} {packed[name]}")
    return {name: unpack(part) for name, part in packed.items()}


# Where in its buffer a generator of numpy's is (MT19937, Philox). numpy takes any number, and reads there.
_PLACES = {"pos": 624, "buffer_pos": 4}


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):  # bytearray(10**12) is a terabyte of zeros
        raise TypeError(f"bytes expected, not {type(value).__name__}")
    return value


def put(generators: Generators, packed: Any) -> None:
    """Put generators to their packed states.

    Raises:
        StateError: the states are damaged.
    """
    try:
        generators.put(unpack(packed))
    except DAMAGE as error:
        raise damaged(error) from error


def damaged(error: Exception) -> StateError:
    """The error to raise for one that a damaged state has led to."""
    return StateError(f"the state is damaged ({type(error).__name__}: {error}); load an earlier one.")


class Beginning:
    """What a loader's pass begins from: everything that decides the order of its samples.

    The global generators, the loader's own, those that its samplers hold, the epoch that a sampler was told,
    and the state of a sampler that can be asked for one (``state_dict``, ``load_state_dict``). Of what lies
    behind a sampler, samplers and generators on its attributes are found. An iterable data set is a sampler
    too: it decides the order.

    Args:
        loader: any of torch's loaders.
        held: generators that the data set and its transforms hold in this process, where they matter.

    Attributes:
        globals: the three global generators.
    """

    def __init__(self, loader: Any, held: Generators | None = None) -> None:
        self.globals = Generators([])
        # Not the loader itself: what is made of this may live in its workers' sampler, and a cycle would keep
        # the workers of a dropped loader until the next garbage collection.
        self._generator: torch.Generator | None = loader.generator
        self._samplers = _samplers_of(loader)
        self._held = held

    def take(self) -> dict[str, Any]:
        """All of it as it is now, in plain values."""
        return {
            "globals": pack(self.globals.states()),
            "generators": [pack(get()) for get, _ in self._generators()],
            "samplers": self.sampler_states(),
            "held": pack(self._held.states()) if self._held is not None else None,
        }

    def sampler_states(self) -> list[dict[str, Any]]:
        """The samplers' part of :meth:`take`."""
        return [_sampler_state(sampler) for sampler in self._samplers]

    def put_generators(self, state: Any, *, with_globals: bool) -> None:
        """Put the generators back to what they were at :meth:`take`.

        Raises:
            KeyError, RuntimeError, TypeError, ValueError: it was not :meth:`take` of such a loader.
        """
        if with_globals:
            self.globals.put(unpack(state["globals"]))
        for (_, set_), packed in zip(self._generators(), state["generators"], strict=True):
            set_(unpack(packed))
        if self._held is not None and state["held"] is not None:
            self._held.put(unpack(state["held"]))

    def put_samplers(self, state: Any) -> None:
        """Put the samplers' epochs and own states back.

        Raises:
            as :meth:`put_generators`.
        """
        for sampler, own in zip(self._samplers, state["samplers"], strict=True):
            if "epoch" in own:
                sampler.set_epoch(own["epoch"])
            if "state" in own:  # after the epoch: set_epoch() may well begin that anew
                sampler.load_state_dict(copy.deepcopy(own["state"]))

    def _generators(self) -> Iterator[Any]:
        if self._generator is not None:
            yield access(self._generator)
        for sampler in self._samplers:
            for value in list(getattr(sampler, "__dict__", {}).values()):
                found = access(value)
                if found is not None:
                    yield found


def _samplers_of(loader: Any) -> list[Any]:
    found: list[Any] = []
    queue = [loader.batch_sampler, loader.sampler]
    if isinstance(loader.dataset, IterableDataset):
        queue.append(loader.dataset)
    for sampler in queue:
        if sampler is None or any(sampler is known for known in found):
            continue
        found.append(sampler)
        own = getattr(sampler, "__dict__", {})
        # Batch samplers of other makers keep any iterable under this name.
        queue += [value for name, value in own.items() if isinstance(value, Sampler) or name == "sampler"]
    return found


def _sampler_state(sampler: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    # A DistributedSampler draws from its seed and epoch alone. What one that has a state (torchdata's) says
    # of itself is how far it has come, before a pass: to the end of the last one.
    stateful = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
    if stateful and not isinstance(sampler, DistributedSampler):
        state["state"] = copy.deepcopy(sampler.state_dict())
    if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
        state["epoch"] = sampler.epoch
    return state
