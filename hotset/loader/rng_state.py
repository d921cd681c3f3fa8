"""States of random number generators as plain values, and the state that a pass begins from.

A state in a checkpoint must survive ``json`` and ``torch.load(weights_only=True)``, so it consists of dicts
with text for keys, lists, numbers and text. Each generator's state is *packed* into these, and unpacked when
it is restored. A sampler's own state, which may hold anything, is packed as well. The process that takes a
state packs it, a worker too, so that saving a loader's state after every batch copies almost nothing.
"""

from __future__ import annotations

import array
import base64
import binascii
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from hotset.determinism.draws.rng import GLOBAL, Generators, access
from hotset.errors import StateError

__all__ = ["DAMAGE", "Beginning", "LocalGenerators", "damaged", "pack", "restore", "unpack", "unpack_states"]

# Errors that damaged values lead to.
DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)

# A dict with one of these keys stands for something other than a plain value.
_TAGS = {"torch", "numpy", "random", "bytes", "tuple", "items"}


def pack(value: Any) -> Any:
    """Return a generator's state, as its module gives it, or a sampler's, as plain values.

    The result shares nothing with ``value``. A part that is neither a plain value nor a tensor, an array,
    bytes or a container of these is copied as it is.

    Example:
        >>> import json, random
        >>> unpack(json.loads(json.dumps(pack(random.getstate())))) == random.getstate()
        True
        >>> unpack(pack({"at": (3, b"x"), 5: None}))
        {'at': (3, b'x'), 5: None}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        packed = {"torch": _text(flat.flatten().view(torch.uint8).numpy().tobytes())}
        plain = flat.dtype is torch.uint8 and flat.ndim == 1
        return packed if plain else {**packed, "dtype": str(flat.dtype)[6:], "shape": list(flat.shape)}
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OV":
        packed = {"numpy": value.dtype.str, "bytes": _text(value.tobytes())}
        return packed if value.ndim == 1 else {**packed, "shape": list(value.shape)}
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], tuple) and len(value[1]) == 625:
        version, words, gauss = value
        return {"random": version, "words": _text(array.array("I", words).tobytes()), "gauss": gauss}
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": _text(value)}
    if type(value) is tuple:
        return {"tuple": [pack(part) for part in value]}
    if type(value) is list:
        return [pack(part) for part in value]
    if isinstance(value, Mapping):
        if all(type(key) is str and key not in _TAGS for key in value):
            return {key: pack(part) for key, part in value.items()}
        return {"items": [[pack(key), pack(part)] for key, part in value.items()]}
    return copy.deepcopy(value)


def unpack(packed: Any) -> Any:
    """Return the value that :func:`pack` was given.

    Raises:
        KeyError, TypeError, ValueError: it is not a packed state.
    """
    if isinstance(packed, list):
        return [unpack(part) for part in packed]
    if not isinstance(packed, dict):
        return packed
    if "torch" in packed:
        data = torch.frombuffer(bytearray(_bytes(packed["torch"])) or bytearray(1), dtype=torch.uint8)
        data = data if packed["torch"] else data[:0]
        return data.view(_dtype(packed["dtype"])).view(packed["shape"]) if "dtype" in packed else data
    if "numpy" in packed:
        values = np.frombuffer(_bytes(packed["bytes"]), np.dtype(packed["numpy"])).copy()
        return values.reshape(packed["shape"]) if "shape" in packed else values
    if "random" in packed:
        gauss = packed["gauss"]
        if not (gauss is None or isinstance(gauss, float)):
            raise TypeError(f"gauss must be a float or None, got {gauss!r}")
        return packed["random"], tuple(array.array("I", _bytes(packed["words"]))), gauss
    if "bytes" in packed:
        return _bytes(packed["bytes"])
    if "tuple" in packed:
        return tuple(unpack(part) for part in packed["tuple"])
    if "items" in packed:
        return {unpack(key): unpack(part) for key, part in packed["items"]}
    return {name: unpack(part) for name, part in packed.items()}


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype must be the name of one of torch's, got {name!r}")
    return found


def _text(data: Any) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


# The largest positions in the buffers of numpy's generators (MT19937, Philox): numpy does not check them.
_LAST_POSITIONS = {"pos": 624, "buffer_pos": 4}


def unpack_states(packed: Any) -> Any:
    """Unpack a generator's state, or several by name, and check what numpy would use unchecked.

    Raises:
        as :func:`unpack`.
    """

    def check(value: Any) -> None:
        for name, part in value.items() if isinstance(value, dict) else ():
            if name in _LAST_POSITIONS and not 0 <= part <= _LAST_POSITIONS[name]:
                raise ValueError(f"{name} must be from 0 to {_LAST_POSITIONS[name]}, got {part}")
            check(part)

    state = unpack(packed)
    for one in (state, *(state.values() if isinstance(state, dict) else ())):
        if isinstance(one, list):  # numpy 1 looks at its first element, also of an empty one
            raise TypeError("a generator's state must not be a list")
    check(state)
    return state


def restore(generators: Generators, packed: Any, *, held_only: bool = False) -> None:
    """Set generators to their packed states.

    Args:
        held_only: leave the global generators as they are.

    Raises:
        StateError: the states are damaged.
    """
    try:
        generators.put(unpack_states(_held_of(packed) if held_only else packed))
    except DAMAGE as error:
        raise damaged(error) from error


def damaged(error: Exception) -> StateError:
    """The error to raise instead of one that a damaged state has led to."""
    return StateError(f"the state is damaged ({type(error).__name__}: {error}); load an earlier one.")


class Beginning:
    """The state that a loader's pass begins from: everything that decides the order of its samples.

    It consists of the global generators, the loader's own, those that its samplers hold, the epoch that a
    sampler was set to, and the state of a sampler that has one (``state_dict``, ``load_state_dict``); and
    whether there are workers, with which torch calls a sampler's ``iter()`` twice.
    Samplers and generators in a sampler's attributes count too. An iterable dataset counts as a sampler, as
    it decides the order.

    Args:
        held: generators that the dataset and its transforms hold in this process, if they are used here.

    Attributes:
        globals: the three global generators.
    """

    def __init__(self, loader: Any, held: Generators | None = None) -> None:
        self.globals = Generators([])
        # The loader itself is not kept: this object may be reached from its workers' sampler, and a cycle
        # would keep a dropped loader's workers running until the next garbage collection.
        self._generator: torch.Generator | None = loader.generator
        self._samplers = _samplers_of(loader)
        self._held = held
        self._has_workers = loader.num_workers > 0

    def take(self) -> dict[str, Any]:
        """The present state, as plain values."""
        return {
            "globals": pack(self.globals.states()),
            "generators": [pack(get()) for get, _ in self._generators()],
            "samplers": self.sampler_states(),
            "workers": self._has_workers,
            "held": pack(_held_of(self._held.states())) if self._held is not None else None,
        }

    def sampler_states(self) -> list[dict[str, Any]]:
        """The samplers' part of :meth:`take`."""
        return [_sampler_state(sampler) for sampler in self._samplers]

    def restore_generators(self, state: Any, *, with_globals: bool) -> None:
        """Set the generators to their states at :meth:`take`.

        Raises:
            KeyError, RuntimeError, TypeError, ValueError: the state is not from a loader like this one.
        """
        if with_globals:
            self.globals.put(unpack_states(state["globals"]))
        for (_, set_), packed in zip(self._generators(), state["generators"], strict=True):
            set_(unpack_states(packed))
        if self._held is not None and state["held"] is not None:
            self._held.put(unpack_states(_held_of(state["held"])))

    def restore_samplers(self, state: Any) -> None:
        """Restore the samplers' epochs and own states.

        Raises:
            as :meth:`restore_generators`.
        """
        for sampler, own in zip(self._samplers, state["samplers"], strict=True):
            if "epoch" in own:
                sampler.set_epoch(own["epoch"])
            if "state" in own:  # after the epoch, as set_epoch() may reset the state
                sampler.load_state_dict(unpack(own["state"]))

    def _generators(self) -> Iterator[Any]:
        if self._generator is not None:
            yield access(self._generator)
        for sampler in self._samplers:
            for value in list(getattr(sampler, "__dict__", {}).values()):
                found = access(value)
                if found is not None:
                    yield found


class LocalGenerators:
    """The generators of this process that a loader's samplers and, without workers, live parts draw from.

    Args:
        live: the generators that live parts draw from in this process; None if live parts run elsewhere.
    """

    def __init__(self, loader: Any, live: Generators | None) -> None:
        self._live = live
        samplers = [sampler for sampler in _samplers_of(loader) if sampler is not loader.dataset]
        torch_only = all(type(one).__module__.startswith(_DRAW_FROM_TORCH) for one in samplers)
        self._samplers = None if torch_only else Generators([])
        self._last = b""
        self._text = ""

    def states(self, *, only_samplers: bool) -> dict[str, Any]:
        """The present states, as plain values by name.

        Args:
            only_samplers: in this pass no live part draws, and no sample is read.
        """
        generators = self._samplers if self._live is None or only_samplers else self._live
        if generators is not None:
            packed: dict[str, Any] = pack(generators.states())
            return packed
        # This runs after every batch; encoding takes most of its time, and often nothing was drawn since.
        state = torch.get_rng_state().numpy().tobytes()
        if state != self._last:
            self._last, self._text = state, _text(state)
        return {_TORCH_GENERATOR: {"torch": self._text}}


# Packages whose samplers draw from torch's global generator only, and the name of that among Generators.
_DRAW_FROM_TORCH = ("torch.utils.data.", "torchdata.", "builtins")
_TORCH_GENERATOR = GLOBAL[2]


def _held_of(states: dict[str, Any]) -> dict[str, Any]:
    return {name: state for name, state in states.items() if name not in GLOBAL}


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
        # Batch samplers of other libraries keep any iterable under this name.
        queue += [value for name, value in own.items() if isinstance(value, Sampler) or name == "sampler"]
    return found


def _sampler_state(sampler: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    # A DistributedSampler draws from its seed and epoch only. If one has a state (torchdata's), it is how far
    # it has come, which before a pass is the end of the last one: that must not be restored.
    stateful = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
    if stateful and not isinstance(sampler, DistributedSampler):
        state["state"] = pack(sampler.state_dict())
    if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
        state["epoch"] = sampler.epoch
    return state
