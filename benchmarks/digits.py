"""Does a window cost accuracy? A small network on scikit-learn's digits, with full passes and with windows.

1,347 pictures of 8 x 8 are trained on, 450 are kept for the test. *Full passes* go through all of them in a
new order each time. A *window* holds 30 % of them, and a tenth, a twentieth, or none of those give way to
others after each of its shorter epochs. All trainings take the same number of steps, and for one seed begin
with the same weights.

``wait=True`` makes every boundary wait for what is to go in. So the table depends on the seeds alone. In a
training that waits for nothing, what is late goes in later.

``python -m benchmarks.digits [--plot digits.png]`` takes a minute; docs/window.md has what it gave.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import hotset

SHARE = 0.3  # of the training data that a window holds
BATCH = 32
FULL = "full passes"
RATES = (0.1, 0.05, 0.0)

# The test's accuracy after each so many steps, one list for each seed.
Curves = dict[str, list[list[float]]]


def pictures() -> tuple[TensorDataset, TensorDataset]:
    """All to train on, and all to test with; which is which never changes."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.from_numpy(pixels).float()[order] / 16, torch.from_numpy(labels).long()[order]
    held_out = len(y) // 4 + 1
    return TensorDataset(x[held_out:], y[held_out:]), TensorDataset(x[:held_out], y[:held_out])


def loader_of(train: TensorDataset, rate: float | None, seed: int) -> hotset.DataLoader[Any]:
    """Full passes where ``rate`` is None, else a window."""
    if rate is None:
        order = torch.Generator().manual_seed(seed)
        return hotset.DataLoader(train, batch_size=BATCH, shuffle=True, drop_last=True, generator=order)
    window = hotset.Window(SHARE, replace=rate, seed=seed, wait=True)
    return hotset.DataLoader(hotset.cache(train, window=window), batch_size=BATCH, drop_last=True)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def train_once(loader: Iterable[Any], test: TensorDataset, seed: int, steps: int, every: int) -> list[float]:
    """Train, and return the accuracy on the test after each ``every`` steps."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    batches, accuracies = endless(loader), []
    for step in range(1, steps + 1):
        x, y = next(batches)
        loss = nn.functional.cross_entropy(net(x), y)
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
        if step % every == 0:
            net.eval()
            with torch.no_grad():
                right = net(test.tensors[0]).argmax(1) == test.tensors[1]
            net.train()
            accuracies.append(float(right.float().mean()))
    return accuracies


def all_curves(steps: int, every: int, seeds: int) -> Curves:
    train, test = pictures()
    curves: Curves = {}
    for rate in (None, *RATES):
        name = FULL if rate is None else f"window, replace={rate:g}"
        curves[name] = []
        for seed in range(seeds):
            loader: Any = loader_of(train, rate, seed)
            curves[name].append(train_once(loader, test, seed, steps, every))
            if rate is not None:
                loader.dataset.close()
    return curves


def print_table(curves: Curves, every: int) -> None:
    """Print means and standard deviations over the seeds, a quarter, half, and all of the way."""
    length = len(next(iter(curves.values()))[0])
    places = [length // 4 - 1, length // 2 - 1, length - 1]
    headings = "".join(f" | after {(place + 1) * every:,} steps" for place in places)
    print(f"| test accuracy, %{headings} |\n|---{'|---' * len(places)}|")
    for name, seeds in curves.items():
        cells = []
        for place in places:
            at = [100 * one[place] for one in seeds]
            cells.append(f"{statistics.fmean(at):.1f} ± {statistics.stdev(at) if len(at) > 1 else 0:.1f}")
        print(f"| {name} | {' | '.join(cells)} |")


def draw(curves: Curves, every: int, path: Path) -> None:
    """Save the plot: for each way the mean over the seeds, and a band from the lowest to the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=80, layout="constrained")
    axes = figure.subplots()
    for (name, seeds), colour in zip(
        curves.items(), ("#4d4d4d", "#d9480f", "#2166ac", "#b8860b"), strict=True
    ):
        after = [every * (place + 1) for place in range(len(seeds[0]))]
        columns = [[100 * value for value in column] for column in zip(*seeds, strict=True)]
        axes.plot(after, [statistics.fmean(column) for column in columns], color=colour, label=name)
        axes.fill_between(after, [*map(min, columns)], [*map(max, columns)], color=colour, alpha=0.15)
    axes.set_xlabel("steps")
    axes.set_ylabel("test accuracy, %")
    axes.set_ylim(80, 100)
    axes.set_title(f"digits: mean of {len(seeds)} seeds, lowest to highest", fontsize=10)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description="accuracy of windows and of full passes, step by step")
    parser.add_argument("--steps", type=int, default=1600, help="of each training")
    parser.add_argument("--every", type=int, default=40, help="steps between two tests")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="save a plot there, a PNG")
    words = parser.parse_args()
    torch.set_num_threads(1)
    curves = all_curves(words.steps, words.every, words.seeds)
    print_table(curves, words.every)
    if words.plot is not None:
        draw(curves, words.every, words.plot)


if __name__ == "__main__":
    main()
