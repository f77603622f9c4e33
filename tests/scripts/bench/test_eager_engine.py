"""The eager engine: the oracle must itself be right."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from eager_engine import EagerEngine

from prge.errors import EngineError
from server_export.model.program import example_inputs
from tests.server_export.programs import build


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_gradients_are_the_differences_of_answers(architecture: str) -> None:
    built = build(architecture, target_modules="all-linear")
    engine = EagerEngine(built.module, built.contract, torch.float64)
    tensors = example_inputs(built.contract, lora_b_scale=0.1)
    names = [spec.name for spec in built.contract.inputs]
    inputs = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    output = built.contract.outputs[0]
    random = np.random.default_rng(0)
    weights = random.standard_normal(output.shape)
    gradients = engine.gradients(inputs, weights)
    assert set(gradients) == {module.input_name for module in built.contract.modules}
    directions = {name: random.standard_normal(gradient.shape) for name, gradient in gradients.items()}

    def value(step: float) -> float:
        moved = {name: inputs[name].astype(np.float64) + step * z for name, z in directions.items()}
        return float((engine.forward({**inputs, **moved})[output.name] * weights).sum())

    exact = sum(float((gradients[name] * z).sum()) for name, z in directions.items())
    assert (value(1e-5) - value(-1e-5)) / 2e-5 == pytest.approx(exact, rel=1e-6)


def test_wrong_inputs_are_named() -> None:
    built = build("llama")
    engine = EagerEngine(built.module, built.contract)
    tensors = example_inputs(built.contract)
    names = [spec.name for spec in built.contract.inputs]
    inputs = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    assert engine.forward(inputs)["logprobs"].dtype == np.float32
    with pytest.raises(EngineError, match="positions is missing"):
        engine.forward({name: array for name, array in inputs.items() if name != "positions"})
    with pytest.raises(EngineError, match="tokens is int32"):
        engine.forward({**inputs, "tokens": inputs["tokens"].astype(np.int32)})
