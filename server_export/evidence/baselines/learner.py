"""A baseline's method as what the loop of prge/learning/training.py trains, and its checkpoints.

    checkpoint/   parameters, what the method keeps besides, state.json
    best/         parameters of the best step so far

A run that was killed goes on from its newest checkpoint and ends in the same numbers.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from prge.errors import DivergenceError, RunError
from prge.files.documents import read_json
from prge.files.journal import Record
from prge.host.atomic import new_folder
from prge.learning.checkpoint import Progress
from prge.learning.estimators.protocol import Measurement
from prge.learning.examples import Example, token_count
from prge.learning.training import loss_has_risen
from server_export.evidence.baselines.activations import SavedActivations
from server_export.evidence.baselines.method import Method, Planned, Stateful, StepResult

CHECKPOINT, BEST = "checkpoint", "best"
_TENSORS, _STATE = "tensors.pt", "state.json"


@dataclass
class BaselineState:
    """What a run knows besides its parameters.

    `rows` are those that were computed; `widest` is the largest step whose `activation_bytes` were counted,
    in padded tokens; `best` is the evaluation of the best step.
    """

    progress: Progress = field(default_factory=Progress)
    rows: int = 0
    activation_bytes: int = 0
    widest: int = 0
    best: Record | None = None


class Checkpoints:
    """A run's checkpoint and its best parameters, each written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def step(self) -> int:
        """Steps that the checkpoint has; 0 without one."""
        path = self.folder / CHECKPOINT / _STATE
        return self._read_state(path).progress.step if path.is_file() else 0

    def save(self, method: Method, state: BaselineState) -> None:
        """Replace the checkpoint."""
        kept = method.state() if isinstance(method, Stateful) else {}
        with new_folder(self.folder / CHECKPOINT, overwrite=True) as partial:
            torch.save({"parameters": _values(method), "state": kept}, partial / _TENSORS)
            (partial / _STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")

    def load(self, method: Method) -> BaselineState:
        """Give a freshly prepared method the checkpoint, if there is one; returns the state to go on from."""
        folder = self.folder / CHECKPOINT
        if not folder.is_dir():
            return BaselineState()
        state = self._read_state(folder / _STATE)
        kept = self._restore(method, folder)
        if isinstance(method, Stateful):
            method.load_state(kept)
        return state

    def save_best(self, method: Method) -> None:
        """Keep the parameters as the best ones."""
        with new_folder(self.folder / BEST, overwrite=True) as partial:
            torch.save({"parameters": _values(method)}, partial / _TENSORS)

    def load_best(self, method: Method) -> None:
        """Give the method the best parameters, if there are any."""
        if (self.folder / BEST).is_dir():
            self._restore(method, self.folder / BEST)

    def _read_state(self, path: Path) -> BaselineState:
        try:
            content = read_json(path)
            return BaselineState(**{**content, "progress": Progress(**content["progress"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunError(
                f"{path} is damaged: {error}", remedy=f"remove {path.parent} to begin again"
            ) from None

    def _restore(self, method: Method, folder: Path) -> dict[str, torch.Tensor]:
        """Read parameters into the method's own; returns what it kept besides."""
        path = folder / _TENSORS
        try:
            stored = torch.load(path, weights_only=True, mmap=True)
            parameters = list(method.parameters())
            if [p.shape for p in parameters] != [value.shape for value in stored["parameters"]]:
                raise ValueError("it holds other parameters than the method trains")
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise RunError(f"{path} can't be read: {error}", remedy=f"remove {folder}") from None
        for parameter, value in zip(parameters, stored["parameters"], strict=True):
            parameter.data.copy_(value)
        # Read now: the file behind mapped tensors is replaced by the next checkpoint.
        return {name: value.clone() for name, value in stored.get("state", {}).items()}


@dataclass(frozen=True)
class BaselineLearner:
    """Implements prge.learning.training.Learner: parameters of a model, by a method in PyTorch.

    `batch` gives the training examples of a step and `rate` its learning rate; `constants` are tensors that
    are no activations: parameters, frozen weights, buffers; `score` scores development rows: `loss`, the
    metric, and `value`, where more is better.
    """

    method: Method
    batch: Callable[[int], Sequence[Example]]
    rate: Callable[[int], float]
    state: BaselineState
    divergence_ratio: float
    checkpoints: Checkpoints
    constants: Callable[[], Iterable[torch.Tensor]]
    score: Callable[[], Record] | None = None

    @property
    def progress(self) -> Progress:
        """See Learner."""
        return self.state.progress

    def step(self) -> tuple[Record, Measurement]:
        """See Learner."""
        number = self.progress.step
        rate, begin = self.rate(number), time.perf_counter()
        examples = self.batch(number)
        result = self._counted(examples, rate)
        seconds = time.perf_counter() - begin
        self.state.rows += result.rows
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
        """See Learner; a step that was judged before a resume is not scored again."""
        step = self.progress.step
        if self.score is None or step <= self.progress.judged:
            return None
        record = {"step": step, **self.score()}
        best = self.progress.best_value
        if best is None or record["value"] > best:
            self.state.best = {name: figure for name, figure in record.items() if name != "value"}
        return record, True

    def save(self, best: bool = False) -> None:
        """See Learner."""
        if best:
            self.checkpoints.save_best(self.method)
        else:
            self.checkpoints.save(self.method, self.state)

    def _counted(self, examples: Sequence[Example], rate: float) -> StepResult:
        """A step; what it saves for the backward is counted if it is wider than all before it."""
        sequences = [sequence for example in examples for sequence in example.sequences]
        width = len(sequences) * max(len(sequence.tokens) for sequence in sequences)
        if width <= self.state.widest:
            return self.method.step(examples, rate)
        with SavedActivations(self.constants()) as saved:
            result = self.method.step(examples, rate)
        planned = self.method.activation_bytes if isinstance(self.method, Planned) else saved.peak_bytes
        self.state.widest = width
        self.state.activation_bytes = max(self.state.activation_bytes, planned)
        return result


def _values(method: Method) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in method.parameters()]
