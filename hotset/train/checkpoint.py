"""Checkpoints: all that a training needs to go on as if it had never stopped, in one file.

::

    {"format": 1,
     "network": its state_dict,      "optimizer": its state_dict,
     "run": {"epochs": over, "step_in_epoch": of the next, "step": of all,
             "trained": True, if of the next epoch only the evaluation is left},
     "data": where the sink stands,  "callbacks": [[class, state], ...],
     "random": {"random", "numpy.random", "torch", and the network's accelerator if it is on one}}

Everything is a tensor or a plain value: ``torch.load(path, weights_only=True)`` reads it, and runs no code
from the file. Numbers of numpy, such as a learning rate that a program has computed, are written as Python's.
What would not be read again is not written. With several ranks each writes its own: their data and draws
differ.

A file appears under its name complete and on the disk, or not at all: it is written under another one,
flushed, and renamed.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from hotset.determinism.draws.rng import Generators
from hotset.errors import StateError
from hotset.loader.rng_state import DAMAGE, damaged, pack, restore

__all__ = ["UNFINISHED", "put_random_states", "random_states", "read", "with_random_states", "write"]

_FORMAT = 1
UNFINISHED = ".{}.unfinished"

_ACCELERATOR = "accelerator"
_PARTS = {"network", "optimizer", "run", "data", "callbacks", "random"}


def write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write a checkpoint, atomically.

    Raises:
        StateError: it holds something that :func:`read` would refuse.
        OSError, RuntimeError: it cannot be written (torch raises the latter for a full disk).
    """
    target = Path(path)
    # In the same folder, as a file cannot be renamed to another file system.
    unfinished = target.with_name(UNFINISHED.format(target.name))
    try:
        with unfinished.open("wb") as file:
            torch.save(_plain({"format": _FORMAT, **content}), file)
            file.flush()
            os.fsync(file.fileno())
        refused = get_unsafe_globals_in_checkpoint(unfinished)
        if refused:
            raise StateError(
                f"{target} must hold tensors and plain values, as nothing else is read again, got "
                f"{', '.join(sorted(refused))}; have each callback's state_dict(), and the optimizer's, "
                "give these."
            )
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def _plain(value: Any) -> Any:
    """A tree with Python's numbers in place of numpy's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: _plain(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def _flush_folder(path: Path) -> None:
    """Make the names in a folder as durable as the files, where its file system can do that."""
    try:
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC):  # the disk's; others say that it cannot be asked for
            raise


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint, with its tensors on the CPU.

    Raises:
        StateError: it is damaged, or no checkpoint of this format.
        OSError: there is none, or it cannot be read.
    """
    with Path(path).open("rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged archive raises half a dozen kinds
            sentence = (str(error) or type(error).__name__).splitlines()[0]
            raise StateError(
                f"{path} cannot be read as a checkpoint ({sentence}); load an earlier one."
            ) from error
    if not isinstance(content, dict) or not _PARTS.issubset(content):
        raise StateError(
            f"{path} must be a checkpoint of hotset.Model, and is another file; load the network's own "
            "files with torch.load."
        )
    if content.get("format") != _FORMAT:
        raise StateError(
            f"{path} has format {content.get('format')!r}, and this hotset reads format {_FORMAT}; load it "
            "with the version of hotset that wrote it."
        )
    return content


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all global generators, in plain values, and of the accelerator that ``device`` is."""
    states = pack(Generators([]).states())
    if device.type != "cpu":
        states[_ACCELERATOR] = torch.get_device_module(device).get_rng_state(device)
    return dict(states)


def with_random_states(data: dict[str, Any], states: dict[str, Any]) -> dict[str, Any]:
    """A sink's state whose loader, if it puts back the global generators as it goes on, sets them so."""
    loader = data.get("loader")
    drawn = loader.get("in_process") if isinstance(loader, dict) else None
    if not isinstance(loader, dict) or not isinstance(drawn, dict):
        return data
    now = {name: states.get(name, state) for name, state in drawn.items()}
    return {**data, "loader": {**loader, "in_process": now}}


def put_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Put the global generators back to their states.

    Raises:
        StateError: the states are damaged.
    """
    try:
        on_device = states.get(_ACCELERATOR)
        restore(Generators([]), {name: state for name, state in states.items() if name != _ACCELERATOR})
        if on_device is not None and device.type != "cpu":
            torch.get_device_module(device).set_rng_state(on_device, device)
    except DAMAGE as error:
        raise damaged(error) from error
