"""``hotset explain module:object``: what would be cached of a data set, and why, without filling a cache."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

from hotset.errors import ArgumentError

__all__ = ["explained", "load"]


def load(place: str) -> Any:
    """Import what ``module:object`` or ``file.py:object`` names; a function without arguments is called.

    Raises:
        ArgumentError: there is no such module or object.
        Exception: what the module raises when it is imported, or the function when it is called.
    """
    module, colon, path = place.partition(":")
    if not colon or not module or not path:
        raise ArgumentError(f"{place!r} names no object; write module:object, or file.py:object.")
    if module.endswith(".py"):
        file = Path(module)
        if not file.is_file():
            raise ArgumentError(f"there is no file {module!r} here; look at the path.")
        sys.path.insert(0, str(file.parent.resolve()))
        module = file.stem
    else:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # something that the module itself needs
        raise ArgumentError(f"there is no module {module!r} here; look at the path, or install it.") from None
    for name in path.split("."):
        if not hasattr(found, name):
            raise ArgumentError(f"{module!r} has no {path!r}; name something that it defines.")
        found = getattr(found, name)
    makes_one = callable(found) and not hasattr(found, "__getitem__")
    return found() if makes_one else found


def explained(
    dataset: Any,
    *,
    memory: str,
    resident: str | None,
    replace: str,
    strict: bool,
    cut: int | None,
    batch_size: int,
    steps: int | None,
) -> str:
    """The plan of a data set as text, with what follows from the batch size.

    Raises:
        HotsetError: see :func:`hotset.cache`.
    """
    import hotset

    window = None
    if resident is not None:
        window = hotset.Window(_number(resident), _number(replace))
    if isinstance(dataset, hotset.CachedDataset):
        plan = dataset.plan
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hotset.HotsetWarning)  # the plan's notes say the same
            with hotset.cache(dataset, memory=memory, window=window, strict=strict, cut=cut) as cached:
                plan = cached.plan
    lines = [
        str(plan),
        f"steps        {plan.steps_per_epoch(batch_size):,} an epoch, in batches of {batch_size:,}",
    ]
    if steps is not None:
        lines.append(f"{'':<12} {steps:,} steps are {plan.epochs_for(steps, batch_size):.3g} epochs")
    return "\n".join(lines)


def _number(text: str) -> float | str:
    """A count, a fraction, or an amount of memory, as it was meant: ``50``, ``0.5``, ``20GiB``."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
