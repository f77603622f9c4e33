"""The base class of baselines: methods that train a problem's model."""

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
    """Result of a step.

    Attributes:
        loss: mean over the step's examples.
        forward_passes: forward passes of the step; a backward pass counts as two forward passes.
    """

    loss: float
    forward_passes: int


class TrainingMethod(ABC):
    """A method that trains a problem's model in place.

    Args:
        problem: the model to train and its rows.
        trained: the parameters to train: parameters of the prepared model, or the adapter's values.
        prior_passes: forward passes before the first step, such as a priming's.
    """

    def __init__(self, problem: ModelProblem, trained: Sequence[nn.Parameter], prior_passes: int = 0) -> None:
        self.problem = problem
        self.trained = list(trained)
        self.prior_passes = prior_passes

    @abstractmethod
    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """Take one step on a batch of training examples."""

    def write(self, folder: Path) -> None:
        """Write the trained values, and an encoder's head, into a new folder.

        An adapter becomes a PEFT folder; other parameters have the model's names for them.
        """
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
