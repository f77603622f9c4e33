"""The common state of a fleet: what server and devices have after so many steps, and its form in messages."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace

import numpy as np
import safetensors.numpy

from device_runner.fleet.agreement import Plan
from device_runner.fleet.messages import MessageError, Steps
from prge.engine import Array
from prge.files.adapter import Adapter
from prge.files.journal import Record
from prge.learning.checkpoint import Progress, TrainingState, optimizer_arrays
from prge.learning.encoder_heads import Heads
from prge.learning.estimators.protocol import Estimator
from prge.learning.head import Head
from prge.model_spec import AdaptedModule
from prge.running.recipe import Recipe

ADAPTER, HEAD, PROGRESS = "adapter", "head", "progress"
# Floats hardly shrink; more effort is for nothing.
_LEVEL = 1
_MOST_HEADER = 1 << 16


def common_recipe(plan: Plan) -> Recipe:
    """The recipe of the common steps.

    Where devices send changes, a round is one step, to where the server's average lies.
    """
    return plan.recipe if plan.by_scalars else replace(plan.recipe, optimizer="sgd")


def first_state(plan: Plan, adapter: Adapter, head: Head | None = None) -> TrainingState:
    """The common state before the first step."""
    return common_recipe(plan).new_state(adapter, Heads(head))


def replayer(plan: Plan) -> Estimator:
    """What makes the gradient of a common step again from its scalars."""
    return common_recipe(plan).new_estimator()


def replay_steps(
    state: TrainingState,
    missed: Iterable[Steps],
    plan: Plan,
    estimator: Estimator,
    number: int,
    stopped: Callable[[], bool],
) -> bool:
    """Take the steps of rounds that a device missed, from where it is; False if it was stopped between two.

    Raises:
        MessageError: a round is missing, isn't of the plan, or leads to what isn't finite.
    """
    for steps in missed:
        if steps.first < state.step:
            continue
        if stopped():
            return False
        if steps.first != state.step or not plan.by_scalars:
            raise MessageError(
                f"steps from {steps.first} on, the state is at step {state.step}", code="steps-out-of-order"
            )
        if problem := take_steps(state, steps.records(number, plan.seed, plan.shape), estimator):
            raise MessageError(f"steps from {steps.first} on after which {problem}", code="steps-not-finite")
    return True


def take_steps(state: TrainingState, records: Iterable[Record], estimator: Estimator) -> str:
    """Take common steps; what is no longer finite after them, in words, empty if all is."""
    with np.errstate(over="ignore", invalid="ignore"):
        for record in records:
            gradient = estimator.gradient(record, record["seed"], state.step, state.adapter.modules)
            state.apply(record, gradient)
    return state.overflow()


def start_sha256(state: TrainingState) -> str:
    """Of what a fleet begins with, where that isn't the bundle's own."""
    head = b"" if state.head is None else state.head.values.tobytes()
    return hashlib.sha256(state.adapter.values.tobytes() + head).hexdigest()


def pack_state(state: TrainingState) -> bytes:
    """A state as safetensors, compressed: where a fleet begins, most of it is zeros."""
    arrays = {name: np.ascontiguousarray(array) for name, array in _arrays(state).items()}
    content = safetensors.numpy.save(arrays, {PROGRESS: json.dumps(asdict(state.progress))})
    return zlib.compress(content, _LEVEL)


def unpack_state(
    content: bytes, plan: Plan, modules: Sequence[AdaptedModule], width: int, classes: int
) -> TrainingState:
    """Inverse of `pack_state`.

    Args:
        content: what a message holds.
        plan: of the fleet.
        modules: of the device's bundle.
        width: of an encoder's states.
        classes: of its head; 0 without one.

    Raises:
        MessageError: it is no state of this fleet.
    """
    try:
        state = first_state(plan, Adapter.zeros(modules), Head(classes, width) if classes else None)
        wanted = _arrays(state)
        content = _unpacked(content, most=sum(array.nbytes for array in wanted.values()) + _MOST_HEADER)
        arrays = safetensors.numpy.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        said = json.loads(header["__metadata__"][PROGRESS])
        step, losses = said["step"], (said["first_loss"], said["smoothed_loss"])
        if type(step) is not int or step < 0 or not all(isinstance(loss, float | None) for loss in losses):
            raise ValueError(f"its step is {step!r}, its losses {losses!r}")
        shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        if shapes != {name: (target.shape, target.dtype) for name, target in wanted.items()}:
            raise ValueError(f"arrays {sorted(arrays)} that don't fit")
        for name, target in wanted.items():
            if not np.isfinite(arrays[name]).all():
                raise ValueError(f"{name} is not finite")
            target[:] = arrays[name]
        return replace(state, progress=Progress(step, first_loss=losses[0], smoothed_loss=losses[1]))
    except (
        *(AttributeError, LookupError, TypeError, ValueError),
        *(safetensors.SafetensorError, zlib.error),
    ) as error:
        raise MessageError(f"a state that doesn't fit the bundle: {error}", code="state-unusable") from None


def _unpacked(content: bytes, most: int) -> bytes:
    """What was compressed; ValueError where it would have more than `most` bytes."""
    reader = zlib.decompressobj()
    found = reader.decompress(content, most)
    if not reader.eof:
        raise ValueError(f"it is cut off, or has more than {most} bytes")
    return found


def _arrays(state: TrainingState) -> dict[str, Array]:
    """The arrays of a state, which are its own."""
    head = {} if state.head is None else {HEAD: state.head.values}
    optimizer = {f"optimizer.{name}": array for name, array in optimizer_arrays(state).items()}
    return {ADAPTER: state.adapter.values, **head, **optimizer}
