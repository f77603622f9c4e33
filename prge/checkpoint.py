"""What a run knows after some steps, and its checkpoints on disk.

checkpoints/step-000120/    a PEFT folder
    optimizer.safetensors   the optimizer's arrays
    head.safetensors        an encoder's classification head
    state.json              step, best evaluation so far, smoothed loss
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prge.adapter import Adapter
from prge.documents import read_json
from prge.engine import Array, FloatArray
from prge.errors import AdapterError
from prge.head import Classifier, CrossFittedHeads, Head
from prge.journal import Record, decode_array
from prge.optimizers import Optimizer
from prge.peft import read_arrays, read_peft, write_peft

OPTIMIZER = "optimizer.safetensors"
HEAD = "head.safetensors"
STATE = "state.json"


@dataclass
class Progress:
    """The part of a run's state that is a few numbers."""

    step: int = 0
    judged: int = -1
    best_step: int = -1
    best_value: float | None = None
    evaluations_since_best: int = 0
    first_loss: float | None = None
    smoothed_loss: float | None = None

    def count_step(self, loss: float) -> None:
        """Take note of a step and its loss."""
        before = self.smoothed_loss
        self.smoothed_loss = loss if before is None else 0.9 * before + 0.1 * loss
        if self.first_loss is None:
            self.first_loss = loss
        self.step += 1

    def judge(self, step: int, value: float) -> bool:
        """Take note of an evaluation; whether it is the best so far. Judging twice changes nothing."""
        if step <= self.judged:
            return step == self.best_step
        self.judged = step
        if self.best_value is None or value > self.best_value:
            self.best_step, self.best_value, self.evaluations_since_best = step, value, 0
            return True
        self.evaluations_since_best += 1
        return False


@dataclass
class TrainingState:
    """Everything that a step changes; `apply` is the only way to change it, live or from the journal.

    `cross_fitted`, where there are any, stand in for `head` on the training rows, unless the head is trained.
    """

    adapter: Adapter
    optimizer: Optimizer
    head: Head | None = None
    head_optimizer: Optimizer | None = None
    cross_fitted: CrossFittedHeads | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self.progress.step

    @property
    def training_classifier(self) -> Classifier | None:
        """What scores an encoder's states of the training rows."""
        return self.head if self.head_optimizer or self.cross_fitted is None else self.cross_fitted

    @property
    def trained_head(self) -> Head | None:
        """The head, if it is trained."""
        return self.head if self.head_optimizer else None

    def apply(self, record: Record, gradient: FloatArray) -> None:
        """Take the step that a journal record describes, along the gradient made from it."""
        self.optimizer.update(self.adapter.values, gradient, record["learning_rate"])
        if "head_gradient" in record and self.head is not None and self.head_optimizer is not None:
            head_gradient = decode_array(record["head_gradient"])
            self.head_optimizer.update(self.head.values, head_gradient, record["head_learning_rate"])
        self.progress.count_step(record["loss"])

    def overflow(self) -> str:
        """What is no longer finite, in words; empty if everything is."""
        arrays: dict[str, Array] = {"the adapter": self.adapter.values}
        if self.trained_head:
            arrays["the head"] = self.trained_head.values
        arrays |= {f"the optimizer's {name}": array for name, array in _optimizer_arrays(self).items()}
        return "; ".join(
            f"{name} has {int(np.count_nonzero(~np.isfinite(array)))} values that are not finite"
            for name, array in arrays.items()
            if not np.isfinite(array).all()
        )

    def judge(self, record: Record) -> bool:
        """Take note of an evaluation; see Progress.judge."""
        return self.progress.judge(record["step"], record["value"])


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return checkpoints / f"step-{step:06d}"


def save_checkpoint(checkpoints: Path, state: TrainingState, template: Path) -> Path:
    """Write the state as `step-N`, whole or not at all; one that is there already has the same content.

    Raises:
        RunError: no space left, or the storage refuses.
    """
    folder = checkpoint_folder(checkpoints, state.step)
    if not folder.exists():
        extra: dict[str, Any] = {OPTIMIZER: _optimizer_arrays(state)}
        if state.head is not None:
            extra[HEAD] = head_arrays(state.head)
        extra[STATE] = (json.dumps(asdict(state.progress), indent=1) + "\n").encode()
        write_peft(folder, state.adapter, template, extra)
    return folder


def prune_checkpoints(checkpoints: Path, keep: set[int]) -> None:
    """Remove every checkpoint but those of the given steps."""
    kept = {checkpoint_folder(checkpoints, step).name for step in keep}
    for folder in checkpoints.glob("step-*"):
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(folder: Path, state: TrainingState) -> None:
    """Read a checkpoint into a freshly made state of the same run.

    Raises:
        AdapterError: a file is missing, damaged, or of another run.
    """
    adapter = read_peft(folder, state.adapter.modules)
    arrays = read_arrays(folder / OPTIMIZER)
    targets = _optimizer_arrays(state)
    if arrays.keys() != targets.keys() or any(arrays[name].shape != targets[name].shape for name in targets):
        raise AdapterError(
            f"{folder / OPTIMIZER} belongs to another optimizer",
            [f"it holds {sorted(arrays)}, this run needs {sorted(targets)}"],
            remedy="resume with the settings of the run",
        )
    try:
        progress = Progress(**read_json(folder / STATE))
    except (OSError, ValueError, TypeError) as error:
        raise AdapterError(
            f"{folder / STATE} is damaged", [str(error)], remedy="remove this checkpoint"
        ) from None
    if state.head is not None:
        read_head(folder / HEAD, state.head)
    state.adapter.values[:] = adapter.values
    for name, target in targets.items():
        target[:] = arrays[name]
    state.progress = progress


def load_latest(checkpoints: Path, state: TrainingState, newest: int) -> None:
    """Read the newest whole checkpoint of at most `newest` steps; without one the state stays as it is.

    A damaged checkpoint is passed over: the journal makes up for it.
    """
    for folder in sorted(checkpoints.glob("step-*"), reverse=True):
        if int(folder.name.split("-")[1]) > newest:
            continue
        try:
            load_checkpoint(folder, state)
            return
        except AdapterError:
            continue


def head_arrays(head: Head) -> dict[str, Array]:
    """A head as named arrays for `head.safetensors`."""
    return {"weight": head.weight, "bias": head.bias}


def read_head(path: Path, head: Head) -> None:
    """Read `head.safetensors` into a head of the same shape.

    Raises:
        AdapterError: missing, damaged, or of other classes or width.
    """
    arrays = read_arrays(path)
    expected = {name: array.shape for name, array in head_arrays(head).items()}
    problems = [
        f"{name} has shape {arrays[name].shape if name in arrays else None}, must be {shape}"
        for name, shape in expected.items()
        if name not in arrays or arrays[name].shape != shape or not np.isfinite(arrays[name]).all()
    ]
    if problems:
        raise AdapterError(f"{path} doesn't fit the task", problems, remedy="give the head of this task")
    head.weight[:], head.bias[:] = arrays["weight"], arrays["bias"]


def _optimizer_arrays(state: TrainingState) -> dict[str, Array]:
    arrays = {f"adapter.{name}": array for name, array in state.optimizer.state.items()}
    if state.head_optimizer is not None:
        arrays.update({f"head.{name}": array for name, array in state.head_optimizer.state.items()})
    return arrays
