"""LeNet-5 in plain JAX on handwritten digits: the cache feeds one scan for each pass over them.

The network, batch 32 and momentum SGD (0.01, 0.9) are those of the sinking mode's usual example. It is
initialised by He's rule: with that example's normal(0.02) the loss stands still longer than the few bundled
digits last.

Run it: python examples/lenet_jax.py [--data FOLDER] [--epochs 10] [--sink-size STEPS]
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from mnist import CLASSES, open_digits

import hotset
from hotset.integrations.jax import JaxSink

BATCH, RATE, MOMENTUM = 32, 0.01, 0.9
KERNELS = {"conv1": (6, 1, 5, 5), "conv2": (16, 6, 5, 5)}
LAYERS = {"fc1": (400, 120), "fc2": (120, 84), "fc3": (84, CLASSES)}


def initial(seed: int) -> dict[str, Any]:
    """The parameters: kernels (out, in, 5, 5), and layers of a matrix (in, out) and a bias (out)."""
    random = np.random.default_rng(seed)

    def normal(shape: tuple[int, ...], inputs: int) -> Any:
        return random.normal(0, math.sqrt(2 / inputs), shape).astype(np.float32)

    kernels = {name: normal(shape, math.prod(shape[1:])) for name, shape in KERNELS.items()}
    layers = {
        name: (normal(shape, shape[0]), np.zeros(shape[1], np.float32)) for name, shape in LAYERS.items()
    }
    return kernels | layers


def lenet(parameters: dict[str, Any], pictures: jax.Array) -> jax.Array:
    """Logits (B, 10) of pictures (B, 1, 32, 32)."""
    x = pictures
    for name in KERNELS:
        x = jax.nn.relu(lax.conv(x, parameters[name], (1, 1), "VALID"))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    for name in LAYERS:
        weights, bias = parameters[name]
        x = x @ weights + bias
        x = jax.nn.relu(x) if name != "fc3" else x
    return x


def cross_entropy(parameters: dict[str, Any], pictures: jax.Array, labels: jax.Array) -> jax.Array:
    chances = jax.nn.log_softmax(lenet(parameters, pictures))
    return -jnp.take_along_axis(chances, labels[:, None], axis=1).mean()


def train_step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
    """One step of SGD with momentum, on (parameters, velocity); gives the loss."""
    parameters, velocity = carry
    loss, slopes = jax.value_and_grad(cross_entropy)(parameters, *batch)
    velocity = jax.tree.map(lambda v, slope: MOMENTUM * v + slope, velocity, slopes)
    parameters = jax.tree.map(lambda p, v: p - RATE * v, parameters, velocity)
    return (parameters, velocity), loss


def count_step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
    """Count what is recognised, in (parameters, count)."""
    parameters, right = carry
    pictures, labels = batch
    right = right + (lenet(parameters, pictures).argmax(axis=1) == labels).sum()
    return (parameters, right), right


def main() -> None:
    parser = argparse.ArgumentParser(description="LeNet-5 in JAX, from the cache")
    parser.add_argument("--data", help="a folder of MNIST's files; without it scikit-learn's digits are used")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sink-size", type=int, help="steps of a call; as many as a pass has without it")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    train, test = (hotset.cache(digits) for digits in open_digits(arguments.data))
    loader = hotset.DataLoader(train, batch_size=BATCH, shuffle=True, drop_last=True)
    size = arguments.sink_size or len(loader)

    parameters = initial(seed=0)
    standing = jax.tree.map(np.zeros_like, parameters)
    sink = JaxSink(train_step, (parameters, standing), loader, sink_size=size)
    start = time.perf_counter()
    for number in range(1, arguments.epochs + 1):
        (parameters, _), loss = sink()
        print(f"epoch: {number} step: {size}, loss is {float(loss)}")
    print(f"{sink.steps / (time.perf_counter() - start):.0f} steps/s, the compilation included")

    tests = hotset.DataLoader(test, batch_size=BATCH)
    (_, right), _ = JaxSink(count_step, (parameters, 0), tests, sink_size=len(tests))()
    print(f"accuracy: {int(right) / len(test):.3f}")


if __name__ == "__main__":
    main()
