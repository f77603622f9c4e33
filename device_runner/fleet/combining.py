"""What a round's answers amount to: which count, which are shortened, and their mean or median."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors.numpy

from device_runner.fleet.agreement import Agreement, Plan
from device_runner.fleet.messages import Answer, RefusedError
from prge.atomic import write_file
from prge.engine import FloatArray
from prge.peft import read_arrays

# No honest derivative or change is larger.
LARGEST_VALUE = 1e6
LARGEST_LOSS = 1e4
_MOMENTS = "averaging-{:06d}.safetensors"


def checked(answer: Answer, agreement: Agreement, size: int) -> None:
    """Raise RefusedError unless an answer is of this agreement and has finite numbers of the right count.

    Args:
        answer: what a device sent.
        agreement: of the fleet.
        size: of the adapter.
    """
    plan = agreement.plan
    if answer.sha256 != agreement.sha256:
        raise RefusedError("has another agreement: another bundle, task or plan")
    steps, scalars = plan.local_steps, plan.local_steps * int(np.prod(plan.shape))
    wanted = scalars if plan.by_scalars else max(1, round(plan.largest * size))
    found = (len(answer.values), len(answer.losses))
    if found != (wanted, steps):
        raise RefusedError(f"has {found[0]} values of {found[1]} steps, must have {wanted} of {steps}")
    places = answer.places
    if (places is not None) != (not plan.by_scalars and wanted < size):
        raise RefusedError("names places of its values, or doesn't, where it mustn't")
    if places is not None and (np.any(np.diff(places.astype(np.int64)) <= 0) or places[-1] >= size):
        raise RefusedError("names places that are not in order or not of the adapter")
    if answer.examples != plan.examples * plan.local_steps:
        raise RefusedError(f"says that it took {answer.examples} examples")
    for name, values, most in (
        ("value", answer.values, LARGEST_VALUE),
        ("loss", answer.losses, LARGEST_LOSS),
        ("epsilon", np.array([answer.epsilon], np.float32), np.inf),
    ):
        if not np.isfinite(values).all():
            raise RefusedError(f"has a {name} that is not finite")
        if np.abs(values).max() > most:
            raise RefusedError(f"has a {name} of {np.abs(values).max():.3g}, no honest one is above {most:g}")


def shortened_answers(answers: Mapping[int, Answer], plan: Plan) -> tuple[dict[int, Answer], list[int]]:
    """The answers with those that are far longer than the others shortened, and whose they are.

    It takes three: of two nobody can say which one is too long.
    """
    norms = {
        node: float(np.linalg.norm(answer.values.astype(np.float64))) for node, answer in answers.items()
    }
    limit = plan.outlier * float(np.median(list(norms.values())))
    if len(answers) < 3 or not limit:
        return dict(answers), []
    long = [node for node, norm in norms.items() if norm > limit]
    cut = dict(answers)
    for node in long:
        cut[node] = replace(answers[node], values=answers[node].values * np.float32(limit / norms[node]))
    return cut, long


def combined_scalars(answers: Sequence[Answer], plan: Plan) -> FloatArray:
    """Scalars of common steps, f32 [steps, 1, scalars]; along own directions [steps, devices, scalars]."""
    table = np.array([answer.values for answer in answers]).reshape(len(answers), plan.local_steps, -1)
    if plan.directions == "own":
        return np.ascontiguousarray(table.swapaxes(0, 1))
    middle = np.median if plan.combine == "median" else np.mean
    return np.asarray(middle(table.astype(np.float64), 0)[:, None], np.float32)


def combined_change(
    answers: Sequence[Answer], plan: Plan, values: FloatArray, folder: Path, step: int
) -> FloatArray:
    """The common adapter's change, f32 [size], by Flower's strategy of the plan.

    What the strategy remembers is read from a file of the step and written into one of the next step.
    """
    from device_runner.fleet.averaging import Averaging

    averaging = Averaging(plan)
    if (path := folder / _MOMENTS.format(step)).is_file():
        averaging.arrays = read_arrays(path)
    dense = [(_dense(answer, len(values)), answer.examples) for answer in answers]
    change: FloatArray = averaging(values, dense, step + 1) - values
    if arrays := averaging.arrays:
        write_file(folder / _MOMENTS.format(step + 1), safetensors.numpy.save(arrays))
        (folder / _MOMENTS.format(step - 1)).unlink(missing_ok=True)
    return change


def _dense(answer: Answer, size: int) -> FloatArray:
    if answer.places is None:
        return answer.values
    change = np.zeros(size, np.float32)
    change[answer.places] = answer.values
    return change
