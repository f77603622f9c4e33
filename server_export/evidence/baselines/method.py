"""What a baseline is given and what it returns: `Problem`, `Method`, and training by backpropagation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from prge.contract import ROWS_OF_A_WAY_BACK, AdaptedModule
from prge.learning.examples import Example
from server_export.evidence.baselines.methods import ADAM, Optimizer


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
class Stateful(Protocol):
    """A method that keeps more than its parameters between steps."""

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold besides the parameters."""
        ...

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what `state` gave; called after the parameters were restored."""
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


class Backpropagation:
    """Steps along exact gradients of some of a model's parameters; the others are frozen."""

    def __init__(
        self,
        problem: Problem,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer = ADAM,
        prior_rows: int = 0,
    ) -> None:
        self.problem = problem
        self.prior_rows = prior_rows
        self._trained = list(parameters)
        chosen = {id(parameter) for parameter in self._trained}
        for parameter in problem.model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        self._optimizer = make_torch_optimizer(optimizer, self._trained)

    def parameters(self) -> list[nn.Parameter]:
        """What it trains."""
        return self._trained

    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """One forward, one backward, one optimizer step."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad()
        loss = self.problem.loss(examples)
        torch.autograd.backward(loss)
        self.shape_gradients()
        self._optimizer.step()
        return StepResult(loss.item(), ROWS_OF_A_WAY_BACK * self.problem.rows(examples))

    def shape_gradients(self) -> None:
        """Called between the backward and the optimizer, for methods that change gradients."""

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors."""
        return {
            f"{index}.{name}": value
            for index, values in self._optimizer.state_dict()["state"].items()
            for name, value in values.items()
            if value is not None
        }

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Give the optimizer the tensors that `state` told."""
        values: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            index, _, name = key.partition(".")
            values.setdefault(int(index), {})[name] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": values, "param_groups": groups})


def make_torch_optimizer(chosen: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a name; its learning rate is set before every step."""
    if chosen.name == "sgd":
        return torch.optim.SGD(parameters, lr=0.0)
    if chosen.name == "momentum":
        return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    kind = torch.optim.Adam if chosen.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=0.0, betas=(0.9, chosen.beta2))
