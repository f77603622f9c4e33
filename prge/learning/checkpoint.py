"""What a run knows after some steps, and its checkpoints on disk.

checkpoints/step-000120/    a PEFT folder
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
from prge.files.adapter import Adapter
from prge.files.curves import merit_of
from prge.files.documents import read_json
from prge.files.journal import Journal, Record, decode_array
from prge.files.peft import HEAD, read_arrays, read_peft, write_peft
from prge.files.run_folder import CHECKPOINTS
from prge.learning.head import Classifier, CrossFittedHeads, Head
from prge.learning.optimizers import Optimizer

OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
_NAME = re.compile("step-([0-9]{6}|[1-9][0-9]{6,17})")
_LEFTOVER = re.compile(rf"\.{_NAME.pattern}\.[0-9]+-\w+\.partial")


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
    best_loss: float | None = None

    def count_step(self, loss: float) -> None:
        """Take note of a step and its loss."""
        before = self.smoothed_loss
        self.smoothed_loss = loss if before is None else 0.9 * before + 0.1 * loss
        if self.first_loss is None:
            self.first_loss = loss
        self.step += 1

    def judge(self, record: Record) -> bool:
        """Take note of an evaluation; whether it is the best so far. Judging twice changes nothing.

        Of equal values the one with the lower loss is the best. Only a higher value begins the count of
        evaluations that patience looks at anew.
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
        # A checkpoint of an earlier version knows no loss: of equal ones its step stays the best.
        loss = -math.inf if self.best_loss is None else self.best_loss
        return merit_of({"value": self.best_value, "loss": loss})

    @classmethod
    def read(cls, path: Path) -> Progress:
        """What a checkpoint's state.json says; raises OSError, ValueError or TypeError if no run says so."""
        progress = cls(**read_json(path))
        counts = (progress.step, progress.judged, progress.best_step, progress.evaluations_since_best)
        losses = (
            *(progress.best_value, progress.best_loss),
            *(progress.first_loss, progress.smoothed_loss),
        )
        if not all(type(count) is int and -1 <= count <= progress.step + 1 for count in counts):
            raise ValueError("its steps and counts are none of a run")
        if not all(loss is None or isinstance(loss, float) for loss in losses):
            raise ValueError("its losses are no numbers")
        return progress


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
        """Take the step that a journal record describes, along the gradient made from it.

        Raises:
            ValueError: the gradient is not of this adapter.
        """
        if gradient.shape != self.adapter.values.shape:
            raise ValueError(f"the gradient has shape {gradient.shape}, not {self.adapter.values.shape}")
        self.optimizer.update(self.adapter.values, gradient, record["learning_rate"])
        if "head_gradient" in record and self.head is not None and self.head_optimizer is not None:
            head_gradient = decode_array(record["head_gradient"])
            self.head_optimizer.update(self.head.values, head_gradient, record["head_learning_rate"])
        self.progress.count_step(float(record["loss"]))

    def copy(self) -> TrainingState:
        """Another state whose steps leave this one alone; the head, which theirs don't train, is the same."""
        progress = replace(self.progress)
        optimizer = deepcopy(self.optimizer)
        return replace(self, adapter=self.adapter.copy(), optimizer=optimizer, progress=progress)

    def overflow(self) -> str:
        """What is no longer finite, in words; empty if everything is."""
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
        """Take note of an evaluation; see Progress.judge."""
        return self.progress.judge(record)


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return checkpoints / f"step-{step:06d}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Steps that have a checkpoint, in order; folders with other names are none of ours."""
    named = (_NAME.fullmatch(folder.name) for folder in checkpoints.glob("step-*"))
    return sorted(int(match[1]) for match in named if match)


def save_checkpoint(checkpoints: Path, state: TrainingState, template: Path) -> Path:
    """Write the state as `step-N`, whole or not at all; a whole one that is there already stays.

    Raises:
        RunError: no space left, or the storage refuses.
    """
    folder = checkpoint_folder(checkpoints, state.step)
    if folder.exists() and _is_whole(folder, state):
        return folder
    extra: dict[str, Any] = {OPTIMIZER: optimizer_arrays(state)}
    if state.head is not None:
        extra[HEAD] = head_arrays(state.head)
    extra[STATE] = (json.dumps(asdict(state.progress), indent=1) + "\n").encode()
    write_peft(folder, state.adapter, template, extra, overwrite=True)
    return folder


def write_result(folder: Path, state: TrainingState, template: Path, overwrite: bool = False) -> None:
    """Write the adapter, an encoder's with its head, as a PEFT folder; see `write_peft`."""
    extra = {} if state.head is None else {HEAD: head_arrays(state.head)}
    write_peft(folder, state.adapter, template, extra, overwrite=overwrite)


def keep_state(
    folder: Path, state: TrainingState, template: Path, journal: Journal, every: int, keep_gradients: bool
) -> None:
    """Save a checkpoint into a run folder, and drop what nobody needs any more of it and its journal.

    Args:
        folder: of the run.
        state: after its newest step.
        template: PEFT folder of the bundle's adapter.
        journal: of the run.
        every: steps between checkpoints.
        keep_gradients: whether the journal keeps those before the checkpoint.
    """
    checkpoints = folder / CHECKPOINTS
    save_checkpoint(checkpoints, state, template)
    journal.sync()
    if not keep_gradients:
        journal.forget_gradients(state.step)
    prune_checkpoints(checkpoints, kept_steps(state.progress, every))


def kept_steps(progress: Progress, checkpoint_every: int) -> set[int]:
    """Which checkpoints stay, however the run came here: the present, the one due before it, the best."""
    due = (progress.step - 1) // checkpoint_every * checkpoint_every if checkpoint_every else 0
    return {progress.step, progress.best_step, *([due] if due > 0 else [])}


def prune_checkpoints(checkpoints: Path, keep: set[int]) -> None:
    """Remove every checkpoint but those of the given steps, and what killed processes left of any."""
    for step in set(saved_steps(checkpoints)) - keep:
        shutil.rmtree(checkpoint_folder(checkpoints, step), ignore_errors=True)
    for leftover in checkpoints.glob(".step-*.partial"):
        if _LEFTOVER.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)


def load_checkpoint(folder: Path, state: TrainingState) -> None:
    """Read a checkpoint into a freshly made state of the same run.

    Raises:
        AdapterError: a file is missing, damaged, or of another run.
    """
    saved = _read_checkpoint(folder, state)
    state.adapter.values[:] = saved.adapter.values
    for name, target in optimizer_arrays(state).items():
        target[:] = saved.optimizer[name]
    if state.head is not None and saved.head is not None:
        state.head.values[:] = saved.head.values
    state.progress = saved.progress


def load_best(checkpoints: Path, state: TrainingState) -> None:
    """Go back to the best step, where there is one; see `load_checkpoint`."""
    best = state.progress.best_step
    if best not in (-1, state.step):
        load_checkpoint(checkpoint_folder(checkpoints, best), state)


def load_latest(checkpoints: Path, state: TrainingState, newest: int) -> None:
    """Read the newest whole checkpoint of at most `newest` steps; without one the state stays as it is.

    A damaged checkpoint is passed over: the journal makes up for it.
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
class _Saved:
    adapter: Adapter
    optimizer: dict[str, Array]
    progress: Progress
    head: Head | None


def _read_checkpoint(folder: Path, state: TrainingState) -> _Saved:
    """What a checkpoint of the same run as `state` holds; AdapterError as `load_checkpoint`."""
    adapter = read_peft(folder, state.adapter.modules)
    arrays = read_arrays(folder / OPTIMIZER)
    targets = optimizer_arrays(state)
    if arrays.keys() != targets.keys() or any(
        (arrays[name].shape, arrays[name].dtype) != (target.shape, target.dtype)
        or not np.isfinite(arrays[name]).all()
        for name, target in targets.items()
    ):
        raise AdapterError(
            f"{folder / OPTIMIZER} belongs to another optimizer",
            [f"it holds {sorted(arrays)}, this run needs {sorted(targets)}"],
            remedy="resume with the settings of the run",
            code="optimizer-differs",
        )
    try:
        progress = Progress.read(folder / STATE)
        if folder.name != checkpoint_folder(folder.parent, progress.step).name:
            raise ValueError(f"its step is {progress.step}")
    except (OSError, ValueError, TypeError) as error:
        raise AdapterError(
            f"{folder / STATE} is damaged",
            [str(error)],
            remedy="remove this checkpoint",
            code="checkpoint-damaged",
        ) from None
    head = None
    if state.head is not None:
        head = Head(*state.head.weight.shape)
        read_head(folder / HEAD, head)
    return _Saved(adapter, arrays, progress, head)


def _is_whole(folder: Path, state: TrainingState) -> bool:
    try:
        _read_checkpoint(folder, state)
    except AdapterError:
        return False
    return True


def head_arrays(head: Head) -> dict[str, Array]:
    """A head as named arrays for `head.safetensors`."""
    return {"weight": head.weight, "bias": head.bias}


def head_at(folder: Path, classes: int, width: int) -> Head | None:
    """The head beside an adapter; None where there is none. Raises AdapterError as `read_head`."""
    if not (folder / HEAD).is_file():
        return None
    head = Head(classes, width)
    read_head(folder / HEAD, head)
    return head


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
        raise AdapterError(
            f"{path} doesn't fit the task",
            problems,
            remedy="give the head of this task",
            code="head-does-not-fit",
        )
    head.weight[:], head.bias[:] = arrays["weight"], arrays["bias"]


def optimizer_arrays(state: TrainingState) -> dict[str, Array]:
    """The arrays of a state's optimizers by name, which `TrainingState.apply` changes in place."""
    arrays = {f"adapter.{name}": array for name, array in state.optimizer.state.items()}
    if state.head_optimizer is not None:
        arrays.update({f"head.{name}": array for name, array in state.head_optimizer.state.items()})
    return arrays
