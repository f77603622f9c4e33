"""Rounding to int4 that compensates its errors, against the paper's own algorithm column by column."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server_export.calibrate import gptq as module
from server_export.calibrate.gptq import SecondMoment, gptq, nearest, searched_scale
from server_export.quantize.quantization import GROUP_SIZE, int4_weight

INPUTS, OUTPUTS, TOKENS = 96, 24, 400


def layer(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight f32 [out, in], and states f32 [tokens, in] whose numbers are correlated."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.05
    mixing = torch.randn(INPUTS, INPUTS, generator=generator) * torch.linspace(0.02, 1, INPUTS)
    return weight, torch.randn(TOKENS, INPUTS, generator=generator) @ mixing


def moment_of(states: torch.Tensor) -> SecondMoment:
    moment = SecondMoment(states.shape[1])
    for piece in states.split(150):
        moment.add(piece)
    return moment


def error(weight: torch.Tensor, rounded: torch.Tensor, states: torch.Tensor) -> float:
    """Mean square of what rounding changes in the layer's answer, relative to the answer's."""
    return float((states @ (rounded - weight).T).square().mean() / (states @ weight.T).square().mean())


def test_codes_are_those_of_the_paper_column_by_column() -> None:
    """The inverse is updated after each column by Gaussian elimination (equation 3), in float64."""
    weight, states = layer()
    found = gptq(weight, moment_of(states))
    left = weight.double().numpy().copy()
    second = (states.double().T @ states.double() / TOKENS).numpy()
    second += 0.01 * np.mean(np.diag(second)) * np.eye(INPUTS)
    inverse = np.linalg.inv(second)
    differing = 0
    for column in range(INPUTS):
        scale = found.scale[:, column // GROUP_SIZE].double().numpy()
        codes = np.clip(np.round(left[:, column] / scale), -8, 7)
        differing += int((codes != found.codes[:, column].numpy()).sum())
        # A code at a tie may go either way in float32: go on from the one that was taken.
        lost = left[:, column] - found.codes[:, column].numpy() * scale
        left[:, column:] -= np.outer(lost / inverse[column, column], inverse[column, column:])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    assert differing <= 2


def test_a_layer_answers_better_than_by_weights_rounded_alone() -> None:
    weight, states = layer()
    found = error(weight, gptq(weight, moment_of(states)).dequantize(), states)
    fitted: torch.Tensor = int4_weight(weight).dequantize()
    assert found < 0.8 * min(
        error(weight, fitted, states), error(weight, nearest(weight).dequantize(), states)
    )


def test_inputs_that_are_not_correlated_are_rounded_each_for_itself() -> None:
    weight, _ = layer()
    moment = moment_of(torch.eye(INPUTS))
    found, expected = gptq(weight, moment), nearest(weight)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scale, expected.scale)


def test_inputs_that_are_always_zero_change_nothing() -> None:
    weight, states = layer()
    states[:, 5] = 0
    found = gptq(weight, moment_of(states))
    assert bool(torch.isfinite(found.dequantize()).all())
    column = nearest(weight).scale.float()[:, 0].max()
    assert float((found.dequantize() - weight)[:, 5].abs().max()) <= 8 * float(column)


def test_of_wide_layers_inputs_are_compensated_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece as a layer of its own."""
    weight, states = layer()
    monkeypatch.setattr(module, "MOST_INPUTS", 64)
    found = gptq(weight, moment_of(states))
    parts = [(0, 32), (32, 96)]
    monkeypatch.undo()
    for start, end in parts:
        part = gptq(weight[:, start:end].contiguous(), moment_of(states[:, start:end].contiguous()))
        assert torch.equal(found.codes[:, start:end], part.codes)
    whole = error(weight, gptq(weight, moment_of(states)).dequantize(), states)
    assert whole < error(weight, found.dequantize(), states)


@given(st.integers(0, 10_000), st.floats(1e-6, 1e3))
def test_a_searched_scale_costs_no_more_than_one_that_holds_all_weights(seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(3, GROUP_SIZE, generator=generator) * size
    importance = torch.rand(GROUP_SIZE, generator=generator) + 0.01
    scale = searched_scale(weights, importance)
    assert torch.equal(scale, scale.bfloat16().float())

    def cost(scale: torch.Tensor) -> torch.Tensor:
        codes = torch.round(weights / scale.unsqueeze(1)).clamp(-8, 7)
        return (weights - codes * scale.unsqueeze(1)).square() @ importance

    widest = torch.maximum(weights.amax(1) / 7, weights.amin(1) / -8).bfloat16().float()
    assert bool((cost(scale) <= cost(widest) * (1 + 1e-6)).all())
