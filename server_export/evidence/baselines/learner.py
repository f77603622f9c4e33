"""A baseline's method as what the loop of prge/learning/training.py trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from prge.errors import DivergenceError
from prge.files.journal import Record
from prge.files.run_folder import reported
from prge.learning.checkpoint import Progress
from prge.learning.estimators.protocol import Measurement
from prge.learning.examples import Example, token_count
from prge.learning.training import loss_has_risen
from server_export.evidence.baselines.activations import SavedActivations
from server_export.evidence.baselines.method import Method, Planned, StepResult


@dataclass
class BaselineLearner:
    """Implements prge.learning.training.Learner: parameters of a model, by a method in PyTorch.

    Args:
        method: ready for its first step.
        batch: the training examples of a step.
        rate: the learning rate of a step.
        divergence_ratio: see TrainingFlags.
        best_file: where the parameters of the best step are kept.
        constants: tensors that are no activations: parameters, frozen weights, buffers.
        score: scores development rows: `loss`, the metric, and `value`, where more is better.

    `rows` are those that were computed; `best` is the evaluation of the best step.
    """

    method: Method
    batch: Callable[[int], Sequence[Example]]
    rate: Callable[[int], float]
    divergence_ratio: float
    best_file: Path
    constants: Callable[[], Iterable[torch.Tensor]]
    score: Callable[[], Record] | None = None
    progress: Progress = field(default_factory=Progress)
    rows: int = 0
    activation_bytes: int = 0
    best: Record | None = None
    # Padded tokens of the largest step whose activations were counted.
    _widest: int = 0

    def __post_init__(self) -> None:
        self.rows = self.method.prior_rows

    def step(self) -> tuple[Record, Measurement]:
        """See Learner."""
        number = self.progress.step
        rate, begin = self.rate(number), time.perf_counter()
        examples = self.batch(number)
        result = self._counted(examples, rate)
        seconds = time.perf_counter() - begin
        self.rows += result.rows
        if not math.isfinite(result.loss):
            problem = f"step {number}: the loss is {result.loss}"
        else:
            self.progress.count_step(result.loss)
            problem = loss_has_risen(self.progress, self.divergence_ratio)
        if problem:
            raise DivergenceError(problem, remedy="start a new run with a lower learning rate")
        figures = {"tokens": token_count(examples), "loss": result.loss, "learning_rate": rate}
        record = {"kind": "step", "step": number, **figures}
        return record, Measurement(result.loss, np.zeros(0), None, seconds, result.rows)

    def evaluate(self) -> tuple[Record, bool] | None:
        """See Learner."""
        if self.score is None:
            return None
        record = {"step": self.progress.step, **self.score()}
        before = self.progress.best_value
        if before is None or record["value"] > before:
            self.best = {name: figure for name, figure in record.items() if name != "value"}
        return record, True

    def save(self, best: bool = False) -> None:
        """See Learner; nothing but the best parameters is kept."""
        if best:
            with reported(self.best_file):
                torch.save([parameter.detach() for parameter in self.method.parameters()], self.best_file)

    def take_best(self) -> None:
        """Give the method the best parameters, if there are any."""
        if self.best is not None:
            stored = torch.load(self.best_file, weights_only=True, mmap=True)
            for parameter, value in zip(self.method.parameters(), stored, strict=True):
                parameter.data.copy_(value)
            self.best_file.unlink()

    def _counted(self, examples: Sequence[Example], rate: float) -> StepResult:
        """A step; what it saves for the backward is counted if it is wider than all before it."""
        sequences = [sequence for example in examples for sequence in example.sequences]
        width = len(sequences) * max(len(sequence.tokens) for sequence in sequences)
        if width <= self._widest:
            return self.method.step(examples, rate)
        with SavedActivations(self.constants()) as saved:
            result = self.method.step(examples, rate)
        planned = self.method.activation_bytes if isinstance(self.method, Planned) else saved.peak_bytes
        self._widest = width
        self.activation_bytes = max(self.activation_bytes, planned)
        return result
