"""What a baseline is: a way to train a problem's model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import save_file
from torch import nn

from prge.engine import Array
from prge.formats.peft import HEAD, write_peft
from prge.objectives.examples import Example
from prge.system.atomic import new_folder
from prge.training.checkpoint import head_arrays
from server_export.evidence.baselines.problem import ModelProblem

PARAMETERS = "parameters.safetensors"


@dataclass(frozen=True)
class StepResult:
    """Mean loss of a step's examples, and the rows that it computed: a backward counts as two forwards."""

    loss: float
    rows: int


class TrainingMethod(ABC):
    """A way to train a problem's model in place.

    Args:
        problem: whose model it changes.
        trained: the parameters that it changes: of the model as the method left it, or the adapter's values.
        prior_rows: rows that it computed before its first step, such as a priming's.
    """

    def __init__(self, problem: ModelProblem, trained: Sequence[nn.Parameter], prior_rows: int = 0) -> None:
        self.problem = problem
        self.trained = list(trained)
        self.prior_rows = prior_rows

    @abstractmethod
    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """Take one step on some training examples."""

    def write(self, folder: Path) -> None:
        """Write what is trained as a new folder, with an encoder's head: an adapter as PEFT does, other
        parameters by the names that the model has for them."""
        problem, files = self.problem, dict[str, dict[str, Array]]()
        if problem.heads.head is not None:
            files[HEAD] = head_arrays(problem.heads.head)
        if problem.values is not None:
            write_peft(folder, problem.adapter, problem.bundle.adapter, files, overwrite=True)
            return
        names = {id(parameter): name for name, parameter in problem.model.named_parameters()}
        files[PARAMETERS] = {names[id(each)]: each.detach().contiguous().numpy() for each in self.trained}
        with new_folder(folder, overwrite=True) as partial:
            for name, arrays in files.items():
                save_file(arrays, partial / name)
