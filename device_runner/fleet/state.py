"""The global state of a fleet, which server and devices share after each step, and its encoding."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace

import numpy as np
import safetensors.numpy

from device_runner.fleet.agreement import Plan
from device_runner.fleet.messages import MessageError, RoundSteps
from prge.engine import Array
from prge.formats.adapter import Adapter
from prge.formats.journal import Record
from prge.model_spec import AdaptedModule
from prge.objectives.classification_head import Head
from prge.training.checkpoint import TrainingProgress, TrainingState, optimizer_arrays
from prge.training.encoder_heads import Heads
from prge.training.estimators.protocol import Estimator
from prge.training.recipe import Recipe

ADAPTER, HEAD, PROGRESS = "adapter", "head", "progress"
# Floats hardly compress, so that a higher level only costs time.
_LEVEL = 1
_MAX_HEADER = 1 << 16


def global_recipe(plan: Plan) -> Recipe:
    """Return the recipe of the global steps.

    If devices send adapter changes, a round is one SGD step to the aggregated adapter.
    """
    return plan.recipe if plan.sends_projected_gradients else replace(plan.recipe, optimizer="sgd")


def initial_state(plan: Plan, adapter: Adapter, head: Head | None = None) -> TrainingState:
    """Return the global state before the first step."""
    return global_recipe(plan).new_state(adapter, Heads(head))


def replay_estimator(plan: Plan) -> Estimator:
    """Return the estimator that restores the gradient of a global step from its projected gradients."""
    return global_recipe(plan).new_estimator()


def replay_steps(
    state: TrainingState,
    missed: Iterable[RoundSteps],
    plan: Plan,
    estimator: Estimator,
    number: int,
    stopped: Callable[[], bool],
) -> bool:
    """Apply the steps of the rounds that a device missed.

    Args:
        state: the state, which is changed.
        missed: steps of one round each.
        plan: the plan of the fleet.
        estimator: the estimator that restores gradients; see `replay_estimator`.
        number: the number of the present round.
        stopped: whether to give up, asked before each round.

    Returns:
        False if the replay was stopped between two rounds.

    Raises:
        MessageError: a round is missing, does not follow the plan, or leads to a state that is not finite.
    """
    for steps in missed:
        if steps.first < state.step:
            continue
        if stopped():
            return False
        if steps.first != state.step or not plan.sends_projected_gradients:
            raise MessageError(
                f"steps from {steps.first} on, but the state is at step {state.step}",
                code="steps-out-of-order",
            )
        if problem := apply_steps(state, steps.records(number, plan.seed, plan.shape), estimator):
            raise MessageError(f"steps from {steps.first} on after which {problem}", code="steps-not-finite")
    return True


def apply_steps(state: TrainingState, records: Iterable[Record], estimator: Estimator) -> str:
    """Apply global steps to the state; return what is no longer finite after them, or an empty string."""
    with np.errstate(over="ignore", invalid="ignore"):
        for record in records:
            gradient = estimator.gradient(record, record["seed"], state.step, state.adapter.modules)
            state.apply(record, gradient)
    return state.overflow()


def start_sha256(state: TrainingState) -> str:
    """Return the SHA-256 of a fleet's initial adapter and head."""
    head = b"" if state.head is None else state.head.values.tobytes()
    return hashlib.sha256(state.adapter.values.tobytes() + head).hexdigest()


def pack_state(state: TrainingState) -> bytes:
    """Encode a state as compressed safetensors; at the start of a fleet most of it is zeros."""
    arrays = {name: np.ascontiguousarray(array) for name, array in _arrays(state).items()}
    content = safetensors.numpy.save(arrays, {PROGRESS: json.dumps(asdict(state.progress))})
    return zlib.compress(content, _LEVEL)


def unpack_state(
    content: bytes, plan: Plan, modules: Sequence[AdaptedModule], width: int, classes: int
) -> TrainingState:
    """Decode what `pack_state` encoded.

    Args:
        content: the bytes from a message.
        plan: the plan of the fleet.
        modules: adapted modules of the device's bundle.
        width: the width of an encoder's hidden states.
        classes: the number of classes of an encoder's head; 0 without one.

    Raises:
        MessageError: the bytes are not a state of this fleet.
    """
    try:
        state = initial_state(plan, Adapter.zeros(modules), Head(classes, width) if classes else None)
        expected = _arrays(state)
        content = _unpacked(content, max_bytes=sum(array.nbytes for array in expected.values()) + _MAX_HEADER)
        arrays = safetensors.numpy.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        progress = json.loads(header["__metadata__"][PROGRESS])
        step, losses = progress["step"], (progress["first_loss"], progress["smoothed_loss"])
        if type(step) is not int or step < 0 or not all(isinstance(loss, float | None) for loss in losses):
            raise ValueError(f"its step is {step!r}, its losses {losses!r}")
        shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        if shapes != {name: (target.shape, target.dtype) for name, target in expected.items()}:
            raise ValueError(f"its arrays {sorted(arrays)} do not fit")
        for name, target in expected.items():
            if not np.isfinite(arrays[name]).all():
                raise ValueError(f"{name} is not finite")
            target[:] = arrays[name]
        return replace(state, progress=TrainingProgress(step, first_loss=losses[0], smoothed_loss=losses[1]))
    except (
        *(AttributeError, LookupError, TypeError, ValueError),
        *(safetensors.SafetensorError, zlib.error),
    ) as error:
        raise MessageError(f"a state that does not fit the bundle: {error}", code="state-unusable") from None


def _unpacked(content: bytes, max_bytes: int) -> bytes:
    """Decompress bytes; raises ValueError if they would be more than `max_bytes` bytes."""
    reader = zlib.decompressobj()
    decompressed = reader.decompress(content, max_bytes)
    if not reader.eof:
        raise ValueError(f"it is truncated, or has more than {max_bytes} bytes")
    return decompressed


def _arrays(state: TrainingState) -> dict[str, Array]:
    """Return the arrays of a state by name; they share its memory."""
    head = {} if state.head is None else {HEAD: state.head.values}
    optimizer = {f"optimizer.{name}": array for name, array in optimizer_arrays(state).items()}
    return {ADAPTER: state.adapter.values, **head, **optimizer}
