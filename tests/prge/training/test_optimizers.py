"""Optimizers against torch's, schedules against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from prge.training.optimizers import OptimizerName, default_warmup_steps, make_optimizer, schedule

TORCH = {
    "sgd": lambda p: torch.optim.SGD([p], lr=0.1),
    "momentum": lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam([p], lr=0.1),
}


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_steps_equal_torch(name: OptimizerName) -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=20).astype(np.float32)
    parameter = torch.nn.Parameter(torch.tensor(values))
    reference = TORCH[name](parameter)
    optimizer = make_optimizer(name, 20)
    for _ in range(30):
        gradient = random.normal(size=20).astype(np.float32)
        parameter.grad = torch.tensor(gradient)
        reference.step()
        optimizer.update(values, gradient, 0.1)
    np.testing.assert_allclose(values, parameter.detach(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("decay", [0.01, 0.5])
def test_weight_decay_is_that_of_adamw(decay: float) -> None:
    """PyTorch multiplies the decay by the learning rate and by the values before the update."""
    random = np.random.default_rng(0)
    values = random.normal(size=20).astype(np.float32)
    parameter = torch.nn.Parameter(torch.tensor(values))
    reference = torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.98), weight_decay=decay)
    optimizer = make_optimizer("adam", 20, beta2=0.98, weight_decay=decay)
    for step in range(30):
        gradient = random.normal(size=20).astype(np.float32)
        parameter.grad = torch.tensor(gradient)
        rate = 0.1 / (step + 1)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        optimizer.update(values, gradient, rate)
    np.testing.assert_allclose(values, parameter.detach(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_an_optimizer_is_restored_from_its_state(name: OptimizerName, decay: float) -> None:
    gradients = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    whole, first, second = (make_optimizer(name, 5, weight_decay=decay) for _ in range(3))
    values, resumed = np.ones(5, np.float32), np.ones(5, np.float32)
    for gradient in gradients:
        whole.update(values, gradient, 0.01)
    for gradient in gradients[:3]:
        first.update(resumed, gradient, 0.01)
    for key, array in first.state.items():
        second.state[key][:] = array
    for gradient in gradients[3:]:
        second.update(resumed, gradient, 0.01)
    assert values.tobytes() == resumed.tobytes()


def test_schedules() -> None:
    constant, linear, cosine = (schedule(name, 2.0, 10) for name in ("constant", "linear", "cosine"))
    assert [constant(step) for step in (0, 9)] == [2.0, 2.0]
    assert [linear(step) for step in (0, 5, 10)] == [2.0, 1.0, 0.0]
    assert cosine(0) == 2.0
    assert cosine(5) == pytest.approx(1.0)
    assert cosine(9) == pytest.approx(1 + math.cos(math.pi * 0.9))


def test_warm_up_reaches_the_peak_and_then_decays() -> None:
    rate = schedule("linear", 1.0, 12, warmup_steps=2)
    assert [rate(step) for step in (0, 1, 2, 7)] == [0.5, 1.0, 1.0, 0.5]


@pytest.mark.parametrize(("steps", "rising"), [(1, 0), (5, 1), (25, 8), (75, 8), (300, 30), (1_500, 150)])
def test_default_warmup_steps(steps: int, rising: int) -> None:
    assert default_warmup_steps(steps) == rising
