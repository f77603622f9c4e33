"""What a baseline is: a way to train a problem's model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from prge.learning.examples import Example
from server_export.evidence.baselines.problem import ModelProblem

PARAMETERS = "parameters.safetensors"


@dataclass(frozen=True)
class StepResult:
    """Mean loss of a step's examples, and the rows that it computed: a backward counts as two forwards."""

    loss: float
    rows: int


class Method(ABC):
    """A way to train a problem's model in place.

    Args:
        problem: whose model it changes.
        trained: the parameters that it changes, of the model as the method left it.
        prior_rows: rows that it computed before its first step, such as a priming's.
    """

    def __init__(self, problem: ModelProblem, trained: Sequence[nn.Parameter], prior_rows: int = 0) -> None:
        self.problem = problem
        self.trained = list(trained)
        self.prior_rows = prior_rows

    @abstractmethod
    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """Take one step on some training examples."""

    def save(self, folder: Path) -> None:
        """Write what is trained into an empty folder, by the names that the model has for it."""
        names = {id(parameter): name for name, parameter in self.problem.model.named_parameters()}
        values = {names[id(parameter)]: parameter.detach().contiguous() for parameter in self.trained}
        save_file(values, folder / PARAMETERS)
