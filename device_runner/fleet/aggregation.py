"""Aggregation of a round's results: which ones count, which are scaled down, and how they are combined.

Medians and trimmed means of each value: Yin et al. 2018, arXiv 1803.01498.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from device_runner.fleet.agreement import Agreement, Plan
from device_runner.fleet.messages import RoundResult, TaskRefusedError
from prge.engine import FloatArray

# Larger values are never honest.
LARGEST_VALUE = 1e6
LARGEST_LOSS = 1e4
_COLUMNS = 1 << 16
# A result whose negative cosine exceeds _OPPOSITION_SHARE times the median cosine lowers the device's trust,
# measured in standard deviations of chance. Earlier rounds decay by _TRUST_DECAY; chance alone gives a
# deviation of 1.7.
_OPPOSITION_SHARE, _LARGEST_CHANGE, _TRUST_DECAY, _MIN_TRUST = 0.25, 4.0, 0.8, -3.5


def count_values(plan: Plan, size: int) -> int:
    """Return the number of values in a result, for an adapter of `size` values."""
    return plan.local_steps * int(np.prod(plan.shape)) if plan.sends_projected_gradients else size


def check_result(result: RoundResult, agreement: Agreement, size: int) -> None:
    """Check that a result belongs to an agreement and has finite values of the right shape.

    Args:
        result: the result of a device.
        agreement: the agreement of the fleet.
        size: the number of values of the adapter.

    Raises:
        TaskRefusedError: the result does not.
    """
    plan = agreement.plan
    if result.sha256 != agreement.sha256:
        raise TaskRefusedError(
            "has another agreement: another bundle, task or plan", code="answer-of-other-agreement"
        )
    shape, expected = (
        (len(result.values), len(result.losses)),
        (count_values(plan, size), plan.local_steps),
    )
    if shape != expected:
        raise TaskRefusedError(
            f"has {shape[0]} values of {shape[1]} steps, must have {expected[0]} of {expected[1]}",
            code="answer-of-other-shape",
        )
    if result.examples != plan.examples * plan.local_steps:
        raise TaskRefusedError(
            f"claims that it took {result.examples} examples", code="answer-of-other-examples"
        )
    for name, values, most in (
        ("value", result.values, LARGEST_VALUE),
        ("loss", result.losses, LARGEST_LOSS),
    ):
        if not np.isfinite(values).all():
            raise TaskRefusedError(f"has a {name} that is not finite", code="answer-not-finite")
        if np.abs(values).max() > most:
            raise TaskRefusedError(
                f"has a {name} of {np.abs(values).max():.3g}, the limit is {most:g}",
                code="answer-out-of-bounds",
            )
    if not 0 <= result.privacy_epsilon <= (plan.most_privacy_epsilon or np.inf):
        raise TaskRefusedError(
            f"claims that it has spent a privacy_epsilon of {result.privacy_epsilon:g}",
            code="answer-epsilon-out-of-bounds",
        )


def shorten_outliers(
    results: Mapping[int, RoundResult], plan: Plan
) -> tuple[dict[int, RoundResult], list[int]]:
    """Scale down results that are much longer than the median.

    Needs at least three results: of two, neither can be called too long.

    Args:
        results: the results by device.
        plan: the plan of the fleet.

    Returns:
        The results, and the devices whose results were scaled down.
    """
    norms = {
        node: float(np.linalg.norm(result.values.astype(np.float64))) for node, result in results.items()
    }
    limit = plan.outlier * float(np.median(list(norms.values())))
    if len(results) < 3 or not limit:
        return dict(results), []
    outliers = [node for node, norm in norms.items() if norm > limit]
    scaled = dict(results)
    for node in outliers:
        scaled[node] = replace(results[node], values=results[node].values * np.float32(limit / norms[node]))
    return scaled, outliers


def find_opposed_results(
    results: Mapping[int, RoundResult], plan: Plan, previous_trust: Mapping[int, float]
) -> tuple[list[int], dict[int, float]]:
    """Find devices whose results oppose the others', fewer than a third of all.

    If single values are mostly noise, a lie about their sign is not an outlier of any value. It shows in the
    whole result, as in Krum (Blanchard et al. 2017, arXiv 1703.02757), and over several rounds. An honest
    device with unusual rows is roughly orthogonal to the others, and seldom opposes them.

    Args:
        results: the results of a round, by device.
        plan: the plan of the fleet.
        previous_trust: trust of the devices before this round.

    Returns:
        The devices that oppose the others, and the trust (running agreement score) of each device.
    """
    if plan.combine == "mean" or len(results) < 4:
        return [], {}
    directions = np.array([result.values for result in results.values()])
    directions /= np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    # Median cosine of each device with the others.
    cosines = [float(np.median(np.delete(row, own))) for own, row in enumerate(directions @ directions.T)]
    aside = _OPPOSITION_SHARE * float(np.median(cosines))
    chances = (np.array(cosines) + aside) * np.sqrt(directions.shape[1])
    trust = {
        node: _TRUST_DECAY * previous_trust.get(node, 0.0) + float(chance)
        for node, chance in zip(results, chances.clip(-_LARGEST_CHANGE, _LARGEST_CHANGE), strict=True)
    }
    worst = sorted(trust, key=lambda node: trust[node])[: (len(results) - 1) // 3]
    return [node for node in worst if trust[node] < _MIN_TRUST], trust


def aggregate(table: FloatArray, plan: Plan) -> FloatArray:
    """Aggregate values [devices, ...] by mean, trimmed mean or median, as the plan says, f32 [...]."""
    flat = table.reshape(len(table), -1)
    result = np.empty(flat.shape[1], np.float32)
    cut = (len(table) - 1) // 3 if plan.combine == "trimmed" else 0
    for start in range(0, flat.shape[1], _COLUMNS):
        part = flat[:, start : start + _COLUMNS].astype(np.float64)
        if plan.combine == "median":
            result[start : start + _COLUMNS] = np.median(part, 0)
        else:
            middle_values = np.sort(part, 0)[cut : len(part) - cut] if cut else part
            result[start : start + _COLUMNS] = middle_values.mean(0)
    return result.reshape(table.shape[1:])


def aggregate_projected_gradients(projected_gradients: FloatArray, plan: Plan) -> FloatArray:
    """Aggregate projected gradients [devices, n] to f32 [n].

    A projected gradient is mostly noise of its rows, and each has a direction of its own. The influence of a
    malicious device is therefore bounded by the length of its result, and a trimmed mean of each value would
    lose more of the honest results. `trimmed` is the mean of results that are clipped to the median length.
    Clipping around zero: Karimireddy et al. 2021, arXiv 2012.10333.
    """
    if plan.combine != "trimmed":
        return aggregate(projected_gradients, plan)
    lengths = np.linalg.norm(projected_gradients.astype(np.float64), axis=1)
    shares = np.minimum(1.0, np.median(lengths) / np.maximum(lengths, np.finfo(np.float32).tiny))
    return np.asarray((projected_gradients * shares[:, None]).mean(0), np.float32)
