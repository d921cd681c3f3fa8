"""What several examples need besides hotset: a session to use, a step of training, a table, a plot.

All that is about caching is in the examples themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from hotset.session import sessions

COLOURS = ("#8c8c8c", "#d9480f")


@contextlib.contextmanager
def session_for(given: str | None) -> Iterator[str]:
    """The session that was given, or one that is destroyed in the end."""
    if given is not None:
        yield given
        return
    made = sessions.create(ttl=3600)  # `hotset session create NAME --ttl 1h` does the same
    try:
        yield str(made.number)
    finally:
        sessions.destroy(made)


def descend(net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, rate: float) -> float:
    """One step of gradient descent; return the loss.

    By hand, because the first of torch's optimizers to be made imports torch's compiler, which takes seconds.
    """
    loss = nn.functional.cross_entropy(net(inputs), labels)
    net.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
    return loss.item()


def print_table(heading: str, columns: Iterable[str], rows: Mapping[str, Iterable[str]]) -> None:
    """Print texts below the columns' names, right-aligned."""
    print()
    for name, cells in {heading: columns, **rows}.items():
        print(f"{name:<22}" + "".join(f"{cell:>20}" for cell in cells))


def draw_epochs(seconds: Mapping[str, list[float]], xlabel: str, form: str, path: Path) -> None:
    """Save a plot of two runs, their bars side by side: seconds of each epoch, labelled in ``form``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    for side, colour, (name, heights) in zip((-1, 1), COLOURS, seconds.items(), strict=True):
        places = [number + side * 0.2 for number in range(1, len(heights) + 1)]
        bars = axes.bar(places, heights, 0.38, color=colour, label=name)
        axes.bar_label(bars, fmt=form, padding=2, fontsize=9)
    axes.set_xticks(range(1, len(heights) + 1))
    axes.set_xlabel(xlabel)
    axes.set_ylabel("seconds")
    axes.margins(y=0.14)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=2, loc="outside upper center")
    figure.savefig(path, format="png")
