"""Quantized training changes int8 codes with gradients scaled as those of floats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from server_export.evidence.baselines.quantized import QuantizedLinear, input_scales, prepare
from tests.server_export.evidence.baselines.problems import (
    changed,
    method_settings,
    outputs,
    tiny_problem,
    values_of,
)
from tests.tiny_models import ARCHITECTURES

INPUT_SCALE = 1 / 64
SETTINGS = method_settings("quantized-training")


def test_scaled_gradients_have_the_float_models_ratio_to_their_weights() -> None:
    torch.manual_seed(0)
    source, x = nn.Linear(16, 5), torch.randn(7, 16, dtype=torch.float64)
    with torch.no_grad():
        # Rows of very different sizes have very different scales.
        source.weight.mul_(torch.tensor([0.01, 0.1, 1.0, 10.0, 100.0]).unsqueeze(1))
    layer = QuantizedLinear(source, INPUT_SCALE).double()
    assert layer.bias is not None
    layer(x).square().sum().backward()
    units = layer.scale.unsqueeze(1)
    weight = (layer.weight * units).detach().requires_grad_()
    bias = (layer.bias * layer.scale * INPUT_SCALE).detach().requires_grad_()
    F.linear(x, weight, bias).square().sum().backward()
    # The gradient of codes is that of floats times their unit; the formula divides by the unit's square.
    assert weight.grad is not None and bias.grad is not None
    torch.testing.assert_close(layer.weight.grad, weight.grad / units)
    torch.testing.assert_close(layer.bias.grad, bias.grad / (layer.scale * INPUT_SCALE))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_of_every_architecture_are_within_half_a_code(tmp_path: Path, architecture: str) -> None:
    problem = tiny_problem(tmp_path, architecture)
    before = outputs(problem)
    original = {
        name: (layer.weight, layer.bias)
        for name, layer in problem.model.named_modules()
        if isinstance(layer, nn.Linear)
    }
    prepare(problem, SETTINGS)
    for name, layer in problem.model.named_modules():
        if isinstance(layer, QuantizedLinear):
            weight, bias = original[name]
            units = layer.scale.unsqueeze(1)
            assert ((layer.weight * units - weight).abs() <= 0.501 * units).all()
            assert (layer.bias is None) == (bias is None)
    assert 0 < (outputs(problem) - before).norm() < 0.05 * before.norm()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "distilbert"])
def test_parameters_stay_codes_and_nothing_else_changes(tmp_path: Path, architecture: str) -> None:
    problem = tiny_problem(tmp_path, architecture)
    method = prepare(problem, SETTINGS)
    before = values_of(problem)
    method.step(problem.train, 10.0)
    result = {dict(problem.model.named_parameters())[name] for name in changed(problem, before)}
    assert result and result <= set(method.trained)
    assert all(value.equal(value.round()) for value in method.trained)
    assert method.layers and all(layer.weight.abs().max() <= 127 for layer in method.layers)


def test_stochastic_rounding_keeps_small_steps_on_average() -> None:
    layer = QuantizedLinear(nn.Linear(4096, 1), INPUT_SCALE)
    with torch.no_grad():
        layer.weight.fill_(10.2)
    layer.round_codes(torch.Generator().manual_seed(0))
    assert set(layer.weight.unique().tolist()) == {10.0, 11.0}
    assert layer.weight.mean().item() == pytest.approx(10.2, abs=0.03)


def test_input_scales_span_the_largest_input(tmp_path: Path) -> None:
    problem = tiny_problem(tmp_path, "llama")
    name = "model.layers.0.self_attn.q_proj"
    layer = problem.model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    inputs: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    scales = input_scales(problem, {name: layer}, problem.train[:3])
    assert scales[name] * 127 == pytest.approx(inputs[0].abs().max().item())
    assert prepare(problem, SETTINGS).prior_passes == len(problem.train)
