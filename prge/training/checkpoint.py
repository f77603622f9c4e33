"""The state of a training run, and its checkpoints on disk.

checkpoints/step-000120/    a PEFT folder with these further files
    optimizer.safetensors   the optimizer's arrays
    head.safetensors        an encoder's classification head
    state.json              step, best evaluation so far, smoothed loss
"""

from __future__ import annotations

import json
import math
import re
import shutil
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from prge.engine import Array, FloatArray
from prge.errors import AdapterError
from prge.formats.adapter import Adapter
from prge.formats.curves import merit_of
from prge.formats.documents import read_json
from prge.formats.journal import Journal, Record, decode_array
from prge.formats.peft import HEAD, read_arrays, read_peft, write_peft
from prge.formats.run_folder import CHECKPOINTS
from prge.objectives.classification_head import Classifier, CrossFittedHeads, Head
from prge.training.optimizers import Optimizer

OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
_NAME = re.compile("step-([0-9]{6}|[1-9][0-9]{6,17})")
_LEFTOVER = re.compile(rf"\.{_NAME.pattern}\.[0-9]+-\w+\.partial")


@dataclass
class TrainingProgress:
    """Counts and losses of a run; a checkpoint stores them as `state.json`.

    Attributes:
        step: number of steps taken.
        judged: step of the latest evaluation; -1 before the first one.
        best_step: step of the best evaluation; -1 before the first one.
        best_value: value of the best evaluation.
        evaluations_since_best: evaluations since the value last improved.
        first_loss: loss of the first step.
        smoothed_loss: exponential moving average of the losses.
        best_loss: loss of the best evaluation; None in checkpoints of earlier versions.
    """

    step: int = 0
    judged: int = -1
    best_step: int = -1
    best_value: float | None = None
    evaluations_since_best: int = 0
    first_loss: float | None = None
    smoothed_loss: float | None = None
    best_loss: float | None = None

    def count_step(self, loss: float) -> None:
        """Count a step and add its loss to the moving average."""
        smoothed = self.smoothed_loss
        self.smoothed_loss = loss if smoothed is None else 0.9 * smoothed + 0.1 * loss
        if self.first_loss is None:
            self.first_loss = loss
        self.step += 1

    def judge(self, record: Record) -> bool:
        """Record an evaluation; return whether it is the best so far.

        Among equal values, the evaluation with the lower loss is the best. Only a higher value resets the
        count of evaluations for patience. Recording an evaluation again changes nothing.
        """
        step, value = int(record["step"]), float(record["value"])
        if step <= self.judged:
            return step == self.best_step
        self.judged = step
        is_higher = self.best_value is None or value > self.best_value
        is_best = is_higher or merit_of(record) > self._best_merit
        self.evaluations_since_best = 0 if is_higher else self.evaluations_since_best + 1
        if is_best:
            self.best_step, self.best_value, self.best_loss = step, value, float(record["loss"])
        return is_best

    @property
    def _best_merit(self) -> tuple[float, float]:
        # Checkpoints of earlier versions have no loss: their step stays the best among equal values.
        loss = -math.inf if self.best_loss is None else self.best_loss
        return merit_of({"value": self.best_value, "loss": loss})

    @classmethod
    def read(cls, path: Path) -> TrainingProgress:
        """Read a checkpoint's `state.json`; raises OSError, ValueError or TypeError if it is invalid."""
        progress = cls(**read_json(path))
        counts = (progress.step, progress.judged, progress.best_step, progress.evaluations_since_best)
        losses = (
            *(progress.best_value, progress.best_loss),
            *(progress.first_loss, progress.smoothed_loss),
        )
        if not all(type(count) is int and -1 <= count <= progress.step + 1 for count in counts):
            raise ValueError("its steps and counts are inconsistent")
        if not all(loss is None or isinstance(loss, float) for loss in losses):
            raise ValueError("its losses are not numbers")
        return progress


@dataclass
class TrainingState:
    """Everything that a step changes. Only `apply` changes it, for new steps and for steps from the journal.

    Attributes:
        adapter: the trained adapter.
        optimizer: optimizer of the adapter's values.
        head: classification head of an encoder.
        head_optimizer: optimizer of the head; None if the head isn't trained.
        cross_fitted: heads that score the training rows in place of `head`, unless the head is trained.
        progress: counts and losses.
    """

    adapter: Adapter
    optimizer: Optimizer
    head: Head | None = None
    head_optimizer: Optimizer | None = None
    cross_fitted: CrossFittedHeads | None = None
    progress: TrainingProgress = field(default_factory=TrainingProgress)

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.progress.step

    @property
    def training_classifier(self) -> Classifier | None:
        """The classifier of the training rows; None for a decoder."""
        return self.head if self.head_optimizer or self.cross_fitted is None else self.cross_fitted

    @property
    def trained_head(self) -> Head | None:
        """The classification head if it is trained; else None."""
        return self.head if self.head_optimizer else None

    def apply(self, record: Record, gradient: FloatArray) -> None:
        """Take a step.

        Args:
            record: the step's journal record, with its loss, its learning rates and the gradient of a trained
                head.
            gradient: gradient of the adapter, f32 [size].

        Raises:
            ValueError: the gradient has the size of another adapter.
        """
        if gradient.shape != self.adapter.values.shape:
            raise ValueError(f"the gradient has shape {gradient.shape}, not {self.adapter.values.shape}")
        self.optimizer.update(self.adapter.values, gradient, record["learning_rate"])
        if "head_gradient" in record and self.head is not None and self.head_optimizer is not None:
            head_gradient = decode_array(record["head_gradient"])
            self.head_optimizer.update(self.head.values, head_gradient, record["head_learning_rate"])
        self.progress.count_step(float(record["loss"]))

    def copy(self) -> TrainingState:
        """Return a copy with its own adapter, optimizer and progress; the head is shared."""
        progress = replace(self.progress)
        optimizer = deepcopy(self.optimizer)
        return replace(self, adapter=self.adapter.copy(), optimizer=optimizer, progress=progress)

    def overflow(self) -> str:
        """Return a message about values that are no longer finite; an empty string if all are finite."""
        arrays: dict[str, Array] = {"the adapter": self.adapter.values}
        if self.trained_head:
            arrays["the head"] = self.trained_head.values
        arrays |= {f"the optimizer's {name}": array for name, array in optimizer_arrays(self).items()}
        return "; ".join(
            f"{name} has {int(np.count_nonzero(~np.isfinite(array)))} values that are not finite"
            for name, array in arrays.items()
            if not np.isfinite(array).all()
        )

    def judge(self, record: Record) -> bool:
        """Record an evaluation; see TrainingProgress.judge."""
        return self.progress.judge(record)


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return checkpoints / f"step-{step:06d}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Return the steps that have a checkpoint, in ascending order; folders with other names are ignored."""
    matches = (_NAME.fullmatch(folder.name) for folder in checkpoints.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def save_checkpoint(checkpoints: Path, state: TrainingState, template: Path) -> Path:
    """Write the state as folder `step-N`, atomically; an intact checkpoint of the same step stays as it is.

    Args:
        checkpoints: folder of the run's checkpoints.
        state: the state to save.
        template: PEFT folder of the bundle's adapter.

    Returns:
        The folder of the checkpoint.

    Raises:
        RunError: the folder can't be written.
    """
    folder = checkpoint_folder(checkpoints, state.step)
    if folder.exists() and _is_intact(folder, state):
        return folder
    extra: dict[str, Any] = {OPTIMIZER: optimizer_arrays(state)}
    if state.head is not None:
        extra[HEAD] = head_arrays(state.head)
    extra[STATE] = (json.dumps(asdict(state.progress), indent=1) + "\n").encode()
    write_peft(folder, state.adapter, template, extra, overwrite=True)
    return folder


def write_result(folder: Path, state: TrainingState, template: Path, overwrite: bool = False) -> None:
    """Write the adapter, and the head of an encoder, as a PEFT folder; see `write_peft`."""
    extra = {} if state.head is None else {HEAD: head_arrays(state.head)}
    write_peft(folder, state.adapter, template, extra, overwrite=overwrite)


def save_and_prune(
    folder: Path, state: TrainingState, template: Path, journal: Journal, every: int, keep_gradients: bool
) -> None:
    """Save a checkpoint, and remove checkpoints and journaled gradients that are no longer needed.

    Args:
        folder: the run folder.
        state: the state to save.
        template: PEFT folder of the bundle's adapter.
        journal: the run's journal.
        every: steps between checkpoints.
        keep_gradients: whether the journal keeps the gradients of steps before the checkpoint.
    """
    checkpoints = folder / CHECKPOINTS
    save_checkpoint(checkpoints, state, template)
    journal.sync()
    if not keep_gradients:
        journal.forget_gradients(state.step)
    prune_checkpoints(checkpoints, kept_steps(state.progress, every))


def kept_steps(progress: TrainingProgress, save_steps: int) -> set[int]:
    """Return the steps whose checkpoints are kept: the current, the last regular and the best one.

    The result doesn't depend on interruptions of the run.
    """
    due = (progress.step - 1) // save_steps * save_steps if save_steps else 0
    return {progress.step, progress.best_step, *([due] if due > 0 else [])}


def prune_checkpoints(checkpoints: Path, keep: set[int]) -> None:
    """Remove all checkpoints except those of the steps in `keep`, and incomplete checkpoints."""
    for step in set(saved_steps(checkpoints)) - keep:
        shutil.rmtree(checkpoint_folder(checkpoints, step), ignore_errors=True)
    for leftover in checkpoints.glob(".step-*.partial"):
        if _LEFTOVER.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)


def load_checkpoint(folder: Path, state: TrainingState) -> None:
    """Load a checkpoint into a state of the same run, in place.

    Raises:
        AdapterError: a file is missing, damaged, or belongs to another run.
    """
    saved = _read_checkpoint(folder, state)
    state.adapter.values[:] = saved.adapter.values
    for name, target in optimizer_arrays(state).items():
        target[:] = saved.optimizer[name]
    if state.head is not None and saved.head is not None:
        state.head.values[:] = saved.head.values
    state.progress = saved.progress


def load_best(checkpoints: Path, state: TrainingState) -> None:
    """Load the checkpoint of the best step, if the run has one; see `load_checkpoint`."""
    best = state.progress.best_step
    if best not in (-1, state.step):
        load_checkpoint(checkpoint_folder(checkpoints, best), state)


def load_latest(checkpoints: Path, state: TrainingState, newest: int) -> None:
    """Load the newest intact checkpoint of at most `newest` steps; without one, the state isn't changed.

    Damaged checkpoints are skipped: their steps are replayed from the journal.
    """
    for step in reversed(saved_steps(checkpoints)):
        if step > newest:
            continue
        try:
            load_checkpoint(checkpoint_folder(checkpoints, step), state)
            return
        except AdapterError:
            continue


@dataclass(frozen=True)
class _SavedState:
    """The contents of a checkpoint."""

    adapter: Adapter
    optimizer: dict[str, Array]
    progress: TrainingProgress
    head: Head | None


def _read_checkpoint(folder: Path, state: TrainingState) -> _SavedState:
    """Read a checkpoint of the run that `state` belongs to; raises AdapterError, see `load_checkpoint`."""
    adapter = read_peft(folder, state.adapter.modules)
    arrays = read_arrays(folder / OPTIMIZER)
    targets = optimizer_arrays(state)
    if arrays.keys() != targets.keys() or any(
        (arrays[name].shape, arrays[name].dtype) != (target.shape, target.dtype)
        or not np.isfinite(arrays[name]).all()
        for name, target in targets.items()
    ):
        raise AdapterError(
            f"{folder / OPTIMIZER} belongs to another optimizer:",
            [f"it holds {sorted(arrays)}, this run needs {sorted(targets)}"],
            remedy="Resume with the settings of the run.",
            code="optimizer-differs",
        )
    try:
        progress = TrainingProgress.read(folder / STATE)
        if folder.name != checkpoint_folder(folder.parent, progress.step).name:
            raise ValueError(f"its step is {progress.step}")
    except (OSError, ValueError, TypeError) as error:
        raise AdapterError(
            f"{folder / STATE} is damaged:",
            [str(error)],
            remedy="Remove this checkpoint.",
            code="checkpoint-damaged",
        ) from None
    head = None
    if state.head is not None:
        head = Head(*state.head.weight.shape)
        read_head(folder / HEAD, head)
    return _SavedState(adapter, arrays, progress, head)


def _is_intact(folder: Path, state: TrainingState) -> bool:
    try:
        _read_checkpoint(folder, state)
    except AdapterError:
        return False
    return True


def head_arrays(head: Head) -> dict[str, Array]:
    """Return the arrays of a head by their names in `head.safetensors`."""
    return {"weight": head.weight, "bias": head.bias}


def read_folder_head(folder: Path, classes: int, width: int) -> Head | None:
    """Read the head in an adapter's folder; None if there is none. Raises AdapterError, see `read_head`."""
    if not (folder / HEAD).is_file():
        return None
    head = Head(classes, width)
    read_head(folder / HEAD, head)
    return head


def read_head(path: Path, head: Head) -> None:
    """Read `head.safetensors` into a head of the same shape, in place.

    Raises:
        AdapterError: the file is missing or damaged, or has another number of classes or another width.
    """
    arrays = read_arrays(path)
    expected = {name: array.shape for name, array in head_arrays(head).items()}
    problems = [
        f"{name} has shape {arrays[name].shape if name in arrays else None}, must be {shape}"
        for name, shape in expected.items()
        if name not in arrays or arrays[name].shape != shape or not np.isfinite(arrays[name]).all()
    ]
    if problems:
        raise AdapterError(
            f"{path} doesn't fit the task:",
            problems,
            remedy="Use the head of a run on this task.",
            code="head-does-not-fit",
        )
    head.weight[:], head.bias[:] = arrays["weight"], arrays["bias"]


def optimizer_arrays(state: TrainingState) -> dict[str, Array]:
    """Return the arrays of a state's optimizers by name; `TrainingState.apply` changes them in place."""
    arrays = {f"adapter.{name}": array for name, array in state.optimizer.state.items()}
    if state.head_optimizer is not None:
        arrays.update({f"head.{name}": array for name, array in state.head_optimizer.state.items()})
    return arrays
