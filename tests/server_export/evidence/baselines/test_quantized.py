"""Quantized training moves int8 codes along gradients that are scaled as those of floats would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from prge.errors import ConfigError
from server_export.evidence.baselines.quantized import (
    QuantizedLinear,
    input_scales,
    prepare,
)
from tests.server_export.evidence.baselines.tiny_problem import TinyProblem, method_settings
from tests.tiny_models import ARCHITECTURES

torch.set_num_threads(1)
INPUT_SCALE = 1 / 64


def make_layer() -> nn.Linear:
    """Rows of very different sizes, so that their scales are too."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 5)
    with torch.no_grad():
        layer.weight.mul_(torch.tensor([0.01, 0.1, 1.0, 10.0, 100.0]).unsqueeze(1))
    return layer


def float_gradients(layer: QuantizedLinear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Weight, bias and their gradients of the float layer with a quantized layer's values."""
    assert layer.bias is not None
    weight = (layer.weight * layer.scale.unsqueeze(1)).detach().requires_grad_()
    bias = (layer.bias * layer.scale * INPUT_SCALE).detach().requires_grad_()
    F.linear(x, weight, bias).square().sum().backward()
    return weight, bias, weight.grad, bias.grad


@pytest.mark.parametrize("latent", [False, True])
def test_gradients_of_codes_are_those_of_floats_times_the_units(latent: bool) -> None:
    x = torch.randn(7, 16, dtype=torch.float64)
    layer = QuantizedLinear(make_layer(), INPUT_SCALE, latent=latent).double()
    layer(x).square().sum().backward()
    _, _, weight_gradient, bias_gradient = float_gradients(layer, x)
    units = layer.scale.unsqueeze(1)
    torch.testing.assert_close(layer.weight.grad, weight_gradient * units)
    torch.testing.assert_close(layer.bias.grad, bias_gradient * layer.scale * INPUT_SCALE)
    layer.scale_gradients()
    # The formula: G_codes / s_W^2 and g_codes / (s_W s_x)^2
    torch.testing.assert_close(layer.weight.grad, weight_gradient * units / units**2)
    bias_units = layer.scale * INPUT_SCALE
    torch.testing.assert_close(layer.bias.grad, bias_gradient * bias_units / bias_units**2)


def test_scaled_gradients_have_the_float_models_ratio_to_their_weights() -> None:
    x = torch.randn(7, 16, dtype=torch.float64)
    layer = QuantizedLinear(make_layer(), INPUT_SCALE).double()
    layer(x).square().sum().backward()
    weight, bias, weight_gradient, bias_gradient = float_gradients(layer, x)
    expected = weight.norm(dim=1) / weight_gradient.norm(dim=1)
    unscaled = layer.weight.norm(dim=1) / layer.weight.grad.norm(dim=1)
    assert (unscaled / expected).max() / (unscaled / expected).min() > 1e6
    layer.scale_gradients()
    torch.testing.assert_close(layer.weight.norm(dim=1) / layer.weight.grad.norm(dim=1), expected)
    torch.testing.assert_close(layer.bias / layer.bias.grad, bias / bias_gradient)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_of_every_architecture_are_within_half_a_code(architecture: str) -> None:
    problem = TinyProblem(architecture)
    before = problem.hidden(problem.train)
    original = {
        name: (layer.weight, layer.bias)
        for name, layer in problem.model.named_modules()
        if isinstance(layer, nn.Linear)
    }
    prepare(problem, method_settings("quantized-training"))
    for name, layer in problem.model.named_modules():
        if isinstance(layer, QuantizedLinear):
            weight, bias = original[name]
            units = layer.scale.unsqueeze(1)
            assert ((layer.weight * units - weight).abs() <= 0.501 * units).all()
            assert (layer.bias is None) == (bias is None)
    difference = problem.hidden(problem.train).detach() - before
    assert 0 < difference.norm() < 0.05 * before.norm()


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "distilbert"])
def test_parameters_stay_codes_and_nothing_else_changes(architecture: str, rounding: Any) -> None:
    problem = TinyProblem(architecture)
    method = prepare(problem, method_settings("quantized-training", rounding=rounding))
    before = {name: value.detach().clone() for name, value in problem.model.named_parameters()}
    method.step(problem.train, 10.0)
    trained = {id(parameter) for parameter in method.parameters()}
    for name, value in problem.model.named_parameters():
        assert value.equal(value.round()) if id(value) in trained else value.equal(before[name])
    assert all(layer.weight.abs().max() <= 127 for layer in method.layers)
    assert any(not value.equal(before[name]) for name, value in problem.model.named_parameters())


def test_stochastic_rounding_keeps_small_steps_on_average_and_nearest_loses_them() -> None:
    layer = QuantizedLinear(nn.Linear(4096, 1), INPUT_SCALE)
    with torch.no_grad():
        layer.weight.fill_(10.2)
    generator = torch.Generator().manual_seed(0)
    layer.round_codes(generator)
    assert set(layer.weight.unique().tolist()) == {10.0, 11.0}
    assert layer.weight.mean().item() == pytest.approx(10.2, abs=0.03)
    with torch.no_grad():
        layer.weight.fill_(10.2)
    layer.round_codes(None)
    assert set(layer.weight.unique().tolist()) == {10.0}


def test_latent_step_is_that_of_floats() -> None:
    problem = TinyProblem("opt")
    method = prepare(problem, method_settings("quantized-training", rounding="latent"))
    layer = method.layers[-1]
    problem.loss(problem.train).backward()
    gradient = layer.weight.grad / layer.scale.unsqueeze(1)
    before = layer.weight.detach().clone()
    method.step(problem.train, 0.1)
    moved = (layer.weight.detach() - before) * layer.scale.unsqueeze(1)
    # The largest codes have no room to grow.
    free = (before.abs() < 127).nonzero(as_tuple=True)
    torch.testing.assert_close(moved[free], -0.1 * gradient[free], rtol=1e-2, atol=1e-5)


def test_input_scale_spans_the_inputs_and_its_rows_count() -> None:
    problem = TinyProblem("bert")
    name = "encoder.layer.0.attention.self.query"
    layer = problem.model.get_submodule(name)
    inputs: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    scales = input_scales(problem, {name: layer}, problem.train[:3])
    assert scales[name] * 127 == pytest.approx(inputs[0].abs().max().item())
    assert prepare(problem, method_settings("quantized-training", calibration_rows=3)).prior_rows == 3


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="--calibration-rows is 0"):
        method_settings("quantized-training", calibration_rows=0)
