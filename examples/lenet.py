"""LeNet-5 on handwritten digits, sunk: through Model.train, then through data_sink in its three ways.

The reference's network, batch of 32 and momentum SGD (0.01, 0.9). Its dataset has 1,875 batches and its
sinks 1,000 steps; ten epochs are ten sinks, each of which goes on where the last one stopped. Without MNIST's
files scikit-learn's digits are trained on, of which a pass has 45 batches: a sink of 1,000 steps goes round
them 22 times. The network is initialised by torch's own rule: with the reference's normal(0.02) the loss
stands still longer than a few passes over so few digits last.

Run it: python examples/lenet.py [--data FOLDER] [--epochs 10] [--sink-size 1000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from mnist import CLASSES, open_digits
from torch import nn

import hotset
from hotset import Accuracy, LossMonitor, Model

BATCH, RATE, MOMENTUM = 32, 0.01, 0.9


def lenet() -> nn.Module:
    """Pictures (B, 1, 32, 32) to logits (B, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, CLASSES),
    )


def momentum(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=RATE, momentum=MOMENTUM)


def through_model(train: hotset.DataLoader, test: hotset.DataLoader, epochs: int, sink_size: int) -> None:
    torch.manual_seed(0)
    network = lenet()
    model = Model(network, nn.CrossEntropyLoss(), momentum(network), metrics={"accuracy": Accuracy()})
    begun = time.perf_counter()
    model.train(
        epochs, train, callbacks=[LossMonitor()], dataset_sink_mode=True, sink_size=sink_size, progress=False
    )
    seconds = time.perf_counter() - begun
    accuracy = model.eval(test)["accuracy"]
    print(f"{model.steps} steps at {model.steps / seconds:,.0f} a second, accuracy {accuracy:.1%}")


def step_of(network: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    optimizer = momentum(network)

    def step(pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(pictures), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def through_sinks(train: hotset.DataLoader, epochs: int) -> None:
    """One step a call, a pass a call, everything in one call: the losses at the end are the same."""
    length = len(train)
    for words, sink_size in (("1 step", 1), ("1 epoch", length), (f"{epochs} epochs", epochs * length)):
        torch.manual_seed(0)
        queue = hotset.DeviceQueue(train)
        sink = hotset.data_sink(step_of(lenet().to(queue.device)), queue, sink_size)
        begun = time.perf_counter()
        for _ in range(epochs * length // sink_size):
            loss = sink()
        value, seconds = loss.item(), time.perf_counter() - begun
        sink.close()
        print(
            f"{words} for each call: loss {value:.6f} after {sink.steps} steps, {sink.steps / seconds:,.0f}/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="LeNet-5, sunk")
    parser.add_argument("--data", help="a folder of MNIST's files; without it scikit-learn's digits are used")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sink-size", type=int, default=1000)
    words = parser.parse_args()
    torch.set_num_threads(1)  # so small a network gains nothing from more, where it is trained on a CPU

    digits, held_out = (hotset.cache(part) for part in open_digits(words.data))
    with digits, held_out:
        train = hotset.DataLoader(digits, batch_size=BATCH, shuffle=True, drop_last=True)
        test = hotset.DataLoader(held_out, batch_size=BATCH)
        print("============== Starting Training ==============")
        through_model(train, test, words.epochs, words.sink_size)
        through_sinks(train, words.epochs)


if __name__ == "__main__":
    main()
