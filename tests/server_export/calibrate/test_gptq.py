"""Rounding to int4 that compensates its errors, compared with the paper's algorithm column by column."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server_export.calibrate import gptq as module
from server_export.calibrate.gptq import SecondMoment, gptq, round_to_nearest, search_scale
from server_export.quantize.quantization import GROUP_SIZE, int4_weight

INPUTS, OUTPUTS, TOKENS = 96, 24, 400


def layer(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight f32 [out, in], and states f32 [tokens, in] with correlated values."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.05
    mixing = torch.randn(INPUTS, INPUTS, generator=generator) * torch.linspace(0.02, 1, INPUTS)
    return weight, torch.randn(TOKENS, INPUTS, generator=generator) @ mixing


def moment_of(states: torch.Tensor) -> SecondMoment:
    moment = SecondMoment(states.shape[1])
    for chunk in states.split(150):
        moment.add(chunk)
    return moment


def error(weight: torch.Tensor, rounded: torch.Tensor, states: torch.Tensor) -> float:
    """Return the mean squared error of the layer's outputs relative to their mean square."""
    return float((states @ (rounded - weight).T).square().mean() / (states @ weight.T).square().mean())


def test_codes_equal_those_of_the_papers_column_by_column_algorithm() -> None:
    """The reference updates the inverse by Gaussian elimination after each column (equation 3), in
    float64."""
    weight, states = layer()
    rounded = gptq(weight, moment_of(states))
    remaining = weight.double().numpy().copy()
    second_moment = (states.double().T @ states.double() / TOKENS).numpy()
    second_moment += 0.01 * np.mean(np.diag(second_moment)) * np.eye(INPUTS)
    inverse = np.linalg.inv(second_moment)
    differing = 0
    for column in range(INPUTS):
        scale = rounded.scale[:, column // GROUP_SIZE].double().numpy()
        codes = np.clip(np.round(remaining[:, column] / scale), -8, 7)
        differing += int((codes != rounded.codes[:, column].numpy()).sum())
        # float32 may resolve ties differently: the reference continues with the code that was chosen.
        errors = remaining[:, column] - rounded.codes[:, column].numpy() * scale
        remaining[:, column:] -= np.outer(errors / inverse[column, column], inverse[column, column:])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    assert differing <= 2


def test_outputs_are_closer_than_with_independent_rounding() -> None:
    weight, states = layer()
    compensated_error = error(weight, gptq(weight, moment_of(states)).dequantize(), states)
    fitted: torch.Tensor = int4_weight(weight).dequantize()
    assert compensated_error < 0.8 * min(
        error(weight, fitted, states), error(weight, round_to_nearest(weight).dequantize(), states)
    )


def test_columns_of_uncorrelated_inputs_are_rounded_independently() -> None:
    weight, _ = layer()
    moment = moment_of(torch.eye(INPUTS))
    rounded, expected = gptq(weight, moment), round_to_nearest(weight)
    assert torch.equal(rounded.codes, expected.codes) and torch.equal(rounded.scale, expected.scale)


def test_inputs_that_are_always_zero_are_rounded_to_nearest() -> None:
    weight, states = layer()
    states[:, 5] = 0
    rounded = gptq(weight, moment_of(states))
    assert bool(torch.isfinite(rounded.dequantize()).all())
    column = round_to_nearest(weight).scale.float()[:, 0].max()
    assert float((rounded.dequantize() - weight)[:, 5].abs().max()) <= 8 * float(column)


def test_inputs_of_wide_layers_are_compensated_in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each range is rounded as a layer of its own."""
    weight, states = layer()
    monkeypatch.setattr(module, "MAX_INPUTS", 64)
    rounded = gptq(weight, moment_of(states))
    parts = [(0, 32), (32, 96)]
    monkeypatch.undo()
    for start, end in parts:
        part = gptq(weight[:, start:end].contiguous(), moment_of(states[:, start:end].contiguous()))
        assert torch.equal(rounded.codes[:, start:end], part.codes)
    whole = error(weight, gptq(weight, moment_of(states)).dequantize(), states)
    assert whole < error(weight, rounded.dequantize(), states)


@given(st.integers(0, 10_000), st.floats(1e-6, 1e3))
def test_a_searched_scale_is_no_worse_than_one_that_covers_all_weights(seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(3, GROUP_SIZE, generator=generator) * size
    importance = torch.rand(GROUP_SIZE, generator=generator) + 0.01
    scale = search_scale(weights, importance)
    assert torch.equal(scale, scale.bfloat16().float())

    def cost(scale: torch.Tensor) -> torch.Tensor:
        codes = torch.round(weights / scale.unsqueeze(1)).clamp(-8, 7)
        return (weights - codes * scale.unsqueeze(1)).square() @ importance

    widest = torch.maximum(weights.amax(1) / 7, weights.amin(1) / -8).bfloat16().float()
    assert bool((cost(scale) <= cost(widest) * (1 + 1e-6)).all())
