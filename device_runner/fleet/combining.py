"""What a round's answers amount to: which count, which are shortened, and what lies in their middle.

Medians and trimmed means, number by number: Yin et al. 2018, arXiv 1803.01498.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from device_runner.fleet.agreement import Agreement, Plan
from device_runner.fleet.messages import Answer, RefusedError
from prge.engine import FloatArray

# No honest derivative or change is larger.
LARGEST_VALUE = 1e6
LARGEST_LOSS = 1e4
_COLUMNS = 1 << 16
# A cosine below this share of the usual one, negative, speaks against a device: in deviations of chance, to
# which earlier rounds add less and less. The sum of chance alone deviates by 1.7.
_ASIDE, _MOST_CHANCES, _KEPT, _AGAINST = 0.25, 4.0, 0.8, -3.5


def values_of(plan: Plan, size: int) -> int:
    """How many values an answer has, where the adapter has `size`."""
    return plan.local_steps * int(np.prod(plan.shape)) if plan.by_scalars else size


def checked(answer: Answer, agreement: Agreement, size: int) -> None:
    """Raise RefusedError unless an answer is of this agreement and has finite numbers of the right count.

    Args:
        answer: what a device sent.
        agreement: of the fleet.
        size: of the adapter.
    """
    plan = agreement.plan
    if answer.sha256 != agreement.sha256:
        raise RefusedError(
            "has another agreement: another bundle, task or plan", code="answer-of-other-agreement"
        )
    found, wanted = (len(answer.values), len(answer.losses)), (values_of(plan, size), plan.local_steps)
    if found != wanted:
        raise RefusedError(
            f"has {found[0]} values of {found[1]} steps, must have {wanted[0]} of {wanted[1]}",
            code="answer-of-other-shape",
        )
    if answer.examples != plan.examples * plan.local_steps:
        raise RefusedError(f"says that it took {answer.examples} examples", code="answer-of-other-examples")
    for name, values, most in (
        ("value", answer.values, LARGEST_VALUE),
        ("loss", answer.losses, LARGEST_LOSS),
    ):
        if not np.isfinite(values).all():
            raise RefusedError(f"has a {name} that is not finite", code="answer-not-finite")
        if np.abs(values).max() > most:
            raise RefusedError(
                f"has a {name} of {np.abs(values).max():.3g}, no honest one is above {most:g}",
                code="answer-out-of-bounds",
            )
    if not 0 <= answer.privacy_epsilon <= (plan.most_privacy_epsilon or np.inf):
        raise RefusedError(
            f"says that it has spent a privacy_epsilon of {answer.privacy_epsilon:g}",
            code="answer-epsilon-out-of-bounds",
        )


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


def opposed_answers(
    answers: Mapping[int, Answer], plan: Plan, before: Mapping[int, float]
) -> tuple[list[int], dict[int, float]]:
    """Whose answers are against the others', less than a third of all, and what speaks for each device.

    Where single numbers are mostly noise, a lie about their sign is not at their edges: it shows in the whole
    answer, as in Krum (Blanchard et al. 2017, arXiv 1703.02757), and over rounds. An honest device with rows
    of its own kind is beside the others, seldom against them.

    Args:
        answers: of a round.
        plan: of the fleet.
        before: what spoke for devices until this round.
    """
    if plan.combine == "mean" or len(answers) < 4:
        return [], {}
    table = np.array([answer.values for answer in answers.values()])
    table /= np.maximum(np.linalg.norm(table, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    # Of each device with the one in the middle of the others.
    cosines = [float(np.median(np.delete(row, own))) for own, row in enumerate(table @ table.T)]
    aside = _ASIDE * float(np.median(cosines))
    chances = (np.array(cosines) + aside) * np.sqrt(table.shape[1])
    spoken = {
        node: _KEPT * before.get(node, 0.0) + float(chance)
        for node, chance in zip(answers, chances.clip(-_MOST_CHANCES, _MOST_CHANCES), strict=True)
    }
    worst = sorted(spoken, key=lambda node: spoken[node])[: (len(answers) - 1) // 3]
    return [node for node in worst if spoken[node] < _AGAINST], spoken


def middle(table: FloatArray, plan: Plan) -> FloatArray:
    """Of devices' numbers [devices, ...] their mean, trimmed mean or median, f32 [...]."""
    flat = table.reshape(len(table), -1)
    found = np.empty(flat.shape[1], np.float32)
    cut = (len(table) - 1) // 3 if plan.combine == "trimmed" else 0
    for start in range(0, flat.shape[1], _COLUMNS):
        part = flat[:, start : start + _COLUMNS].astype(np.float64)
        if plan.combine == "median":
            found[start : start + _COLUMNS] = np.median(part, 0)
        else:
            kept = np.sort(part, 0)[cut : len(part) - cut] if cut else part
            found[start : start + _COLUMNS] = kept.mean(0)
    return found.reshape(table.shape[1:])


def combined_scalars(scalars: FloatArray, plan: Plan) -> FloatArray:
    """The common scalars, f32 [n], of devices' scalars [devices, n].

    A scalar is mostly noise of its rows, and each has a direction of its own. So what a liar does is bounded
    by the length of its answer, and a mean without every number's edges would lose more of honest answers:
    `trimmed` is the mean of answers that are no longer than the middle one. Clipping around zero: Karimireddy
    et al. 2021, arXiv 2012.10333.
    """
    if plan.combine != "trimmed":
        return middle(scalars, plan)
    lengths = np.linalg.norm(scalars.astype(np.float64), axis=1)
    shares = np.minimum(1.0, np.median(lengths) / np.maximum(lengths, np.finfo(np.float32).tiny))
    return np.asarray((scalars * shares[:, None]).mean(0), np.float32)
