"""Optimizers of one flat parameter vector, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np

from prge.engine import Array, FloatArray

ScheduleName = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["sgd", "momentum", "adam"]

_WARMUP_SHARE, _MIN_WARMUP, _MAX_WARMUP_SHARE = 0.1, 8, 1 / 3


class Optimizer(Protocol):
    """Updates values with a gradient; `state` holds the arrays that a checkpoint must store, by name."""

    state: dict[str, Array]

    def update(self, values: FloatArray, gradient: FloatArray, learning_rate: float) -> None:
        """Update `values` in place."""
        ...


class SGD:
    """Gradient descent: values -= learning_rate * gradient."""

    def __init__(self) -> None:
        self.state: dict[str, Array] = {}

    def update(self, values: FloatArray, gradient: FloatArray, learning_rate: float) -> None:
        """Update `values` in place."""
        values -= np.float32(learning_rate) * gradient


class Momentum:
    """Heavy-ball momentum: velocity = momentum * velocity + gradient; values -= learning_rate * velocity."""

    def __init__(self, size: int, momentum: float = 0.9) -> None:
        self.momentum = np.float32(momentum)
        self.state: dict[str, Array] = {"velocity": np.zeros(size, np.float32)}

    def update(self, values: FloatArray, gradient: FloatArray, learning_rate: float) -> None:
        """Update `values` in place."""
        velocity = self.state["velocity"]
        velocity *= self.momentum
        velocity += gradient
        values -= np.float32(learning_rate) * velocity


class Adam:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) with bias correction."""

    def __init__(self, size: int, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> None:
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.state: dict[str, Array] = {
            "first_moment": np.zeros(size, np.float32),
            "second_moment": np.zeros(size, np.float32),
            "updates": np.zeros(1, np.int64),
        }

    def update(self, values: FloatArray, gradient: FloatArray, learning_rate: float) -> None:
        """Update `values` in place."""
        first, updates = self.state["first_moment"], self.state["updates"]
        updates += 1
        count = int(updates[0])
        first *= np.float32(self.beta1)
        first += np.float32(1 - self.beta1) * gradient
        second = self.state["second_moment"]
        second *= np.float32(self.beta2)
        second += np.float32(1 - self.beta2) * gradient * gradient
        rate = np.float32(learning_rate / (1 - self.beta1**count))
        deviation = np.sqrt(second / np.float32(1 - self.beta2**count))
        deviation += np.float32(self.epsilon)
        values -= rate * first / deviation


class PerValueRates:
    """Multiplies the updates of another optimizer by a factor for each value, as LoRA+ does.

    Args:
        inner: the other optimizer.
        rates: factor of each value, f32 [size].
    """

    def __init__(self, inner: Optimizer, rates: FloatArray) -> None:
        self.inner, self.rates = inner, rates
        self.state = inner.state

    def update(self, values: FloatArray, gradient: FloatArray, learning_rate: float) -> None:
        """Update `values` in place."""
        updated = values.copy()
        self.inner.update(updated, gradient, learning_rate)
        values += self.rates * (updated - values)


class DecoupledDecay:
    """Decoupled weight decay before the updates of another optimizer: values *= 1 - learning_rate * decay.

    With Adam, this is AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) as PyTorch implements it.
    """

    def __init__(self, inner: Optimizer, decay: float) -> None:
        self.inner, self.decay = inner, decay
        self.state = inner.state

    def update(self, values: FloatArray, gradient: FloatArray, learning_rate: float) -> None:
        """Update `values` in place."""
        values *= np.float32(1 - learning_rate * self.decay)
        self.inner.update(values, gradient, learning_rate)


def make_optimizer(
    name: OptimizerName,
    size: int,
    momentum: float = 0.9,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Construct an optimizer by name.

    Args:
        name: name of the optimizer.
        size: number of values.
        momentum: coefficient of `momentum`.
        beta1: first coefficient of `adam`.
        beta2: second coefficient of `adam`.
        weight_decay: decoupled weight decay of all values.
    """
    optimizer: Optimizer
    if name == "sgd":
        optimizer = SGD()
    elif name == "momentum":
        optimizer = Momentum(size, momentum)
    else:
        optimizer = Adam(size, beta1, beta2)
    return DecoupledDecay(optimizer, weight_decay) if weight_decay else optimizer


def default_warmup_steps(steps: int) -> int:
    """Return the default number of warm-up steps, in which Adam learns the size of gradients."""
    return min(max(round(_WARMUP_SHARE * steps), _MIN_WARMUP), int(_MAX_WARMUP_SHARE * steps))


def schedule(name: ScheduleName, peak: float, steps: int, warmup_steps: int = 0) -> Callable[[int], float]:
    """Return a function from a step, counted from 0, to its learning rate.

    The learning rate rises linearly to `peak` during the warm-up, and then stays constant or falls to 0.
    """

    def rate(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(steps - warmup_steps, 1)
        if name == "linear":
            return peak * (1 - progress)
        if name == "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * progress))
        return peak

    return rate
