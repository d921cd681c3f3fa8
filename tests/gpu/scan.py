"""LeNet-5's training step in JAX, many of them in one scan, over samples that are on the device."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

# Before JAX is imported, which would take most of the device's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["lenet_scan"]

_KERNELS = ((6, 1, 5, 5), (16, 6, 5, 5))
_LAYERS = ((400, 120), (120, 84), (84, 10))


def lenet_scan(images: Any, labels: Any, steps: int, batch: int = 32) -> Callable[[], None]:
    """Returns what trains so many steps on random samples of these arrays, and waits for the device."""
    pictures, classes = jax.device_put(images), jax.device_put(labels.astype(np.int32))
    drawn = np.random.default_rng(7)
    parameters = [
        (
            drawn.normal(0, 1 / math.sqrt(np.prod(shape[1:])), shape).astype(np.float32),
            np.zeros(bias, np.float32),
        )
        for shape, bias in (*((one, one[0]) for one in _KERNELS), *((one, one[1]) for one in _LAYERS))
    ]
    state = [jax.device_put((parameters, jax.tree.map(np.zeros_like, parameters)))]
    many = jax.jit(_many, donate_argnums=0)

    def run() -> None:
        rows = drawn.integers(len(images), size=(steps, batch), dtype=np.int32)
        state[0], losses = many(state[0], pictures, classes, jax.device_put(rows))
        losses.block_until_ready()

    return run


def _many(state: Any, pictures: Any, classes: Any, rows: Any) -> Any:
    return lax.scan(functools.partial(_step, pictures, classes), state, rows)


def _step(pictures: Any, classes: Any, state: Any, rows: Any) -> Any:
    parameters, velocity = state
    loss, gradient = jax.value_and_grad(_loss)(parameters, pictures[rows], classes[rows])
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
    parameters = jax.tree.map(lambda p, v: p - 0.01 * v, parameters, velocity)
    return (parameters, velocity), loss


def _loss(parameters: Any, pictures: Any, classes: Any) -> Any:
    x = (pictures.astype(jnp.float32) / 255 - 0.1307) / 0.3081
    for kernel, bias in parameters[: len(_KERNELS)]:
        x = jax.nn.relu(lax.conv(x, kernel, (1, 1), "VALID") + bias[:, None, None])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    for number, (weights, bias) in enumerate(parameters[len(_KERNELS) :]):
        x = x @ weights + bias
        x = jax.nn.relu(x) if number < len(_LAYERS) - 1 else x
    return -jnp.take_along_axis(jax.nn.log_softmax(x), classes[:, None], 1).mean()
