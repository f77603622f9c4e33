"""What a baseline is given and what it returns: `Problem` and `Method`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from prge.contract import AdaptedModule
from prge.learning.examples import Example


class Problem(Protocol):
    """A model and the rows to train it on, the same for every method.

    `model` is the transformers model without adapters; its linear layers hold the values of the frozen base,
    those of the quantized one where the bundle is quantized. A method changes it in place. `modules` are the
    layers that the bundle adapts, `lora_a` f32 [rank, in] by module name its frozen matrices, unscaled,
    `lora_b` f32 [out, rank] where training starts, and `scales` alpha / rank by module name. `batch_size` are
    the sequences of a step.
    """

    model: nn.Module
    modules: tuple[AdaptedModule, ...]
    lora_a: dict[str, torch.Tensor]
    lora_b: dict[str, torch.Tensor]
    scales: dict[str, float]
    train: Sequence[Example]
    batch_size: int
    seed: int

    def loss(self, examples: Sequence[Example]) -> torch.Tensor:
        """Mean loss of training examples, a scalar with a graph behind it where autograd is on."""
        ...

    def rows(self, examples: Sequence[Example]) -> int:
        """Rows that one forward of these examples computes."""
        ...


@dataclass(frozen=True)
class StepResult:
    """Mean loss of a step's examples, and the rows that it computed: a backward counts as two forwards."""

    loss: float
    rows: int


class Method(Protocol):
    """A way to train a problem's model in place.

    `prior_rows` are those that it computed before its first step, such as a priming's.
    """

    prior_rows: int

    def parameters(self) -> list[nn.Parameter]:
        """What it trains."""
        ...

    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """Take one step on some training examples."""
        ...


@runtime_checkable
class Saving(Protocol):
    """A method whose result has a format of its own."""

    def save(self, folder: Path) -> None:
        """Write the trained parameters into an empty folder."""
        ...


@runtime_checkable
class Planned(Protocol):
    """A method whose memory between forward and backward isn't autograd's."""

    @property
    def activation_bytes(self) -> int:
        """Bytes that it plans for one step."""
        ...
