"""MeZO: two forward passes, parameters changed in place, noise from seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server_export.evidence.baselines.mezo import MeZO
from tests.rows import bigram_completions, random_completions
from tests.server_export.evidence.baselines.problems import build_problem, method_settings

ROWS = random_completions(4, 100)
SETTINGS = method_settings("mezo")


def values(method: MeZO) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in method.trained])


def test_a_step_without_a_rate_restores_the_parameters(tmp_path: Path) -> None:
    problem, _, _ = build_problem(tmp_path, "llama", ROWS)
    method = MeZO(problem, SETTINGS)
    before = values(method)
    result = method.step(ROWS, 0.0)
    assert torch.allclose(values(method), before, rtol=0, atol=1e-6)
    assert result.forward_passes == 2 * len(ROWS)


def test_projected_gradient_is_the_derivative_along_the_noise(tmp_path: Path) -> None:
    problem, _, _ = build_problem(tmp_path, "llama", ROWS)
    method = MeZO(problem, SETTINGS)
    before = values(method)
    method.step(ROWS, 1.0)
    # The step's change is the projected gradient times the noise.
    noise = (before - values(method)) / method.projected_gradient
    assert noise.mean() == pytest.approx(0, abs=0.02) and noise.std() == pytest.approx(1, abs=0.02)
    losses = []
    for sign in (1, -1):
        torch.nn.utils.vector_to_parameters(before + sign * 1e-3 * noise, problem.model.parameters())
        losses.append(problem.loss(ROWS).item())
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(method.projected_gradient, abs=2e-3)


def test_every_step_has_its_own_noise(tmp_path: Path) -> None:
    problem, _, _ = build_problem(tmp_path, "llama", ROWS)
    method = MeZO(problem, SETTINGS)
    moves = []
    for _ in range(2):
        before = values(method)
        method.step(ROWS, 1.0)
        moves.append((before - values(method)) / method.projected_gradient)
    assert abs(torch.corrcoef(torch.stack(moves))[0, 1]) < 0.05


def test_mezo_keeps_no_residuals_and_no_second_copy(tmp_path: Path) -> None:
    problem, _, _ = build_problem(tmp_path, "llama", ROWS, model={"intermediate_size": 20_000})
    method = MeZO(problem, SETTINGS)
    method.step(ROWS, 1e-6)
    addresses = [parameter.data_ptr() for parameter in method.trained]
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        method.step(ROWS, 1e-6)
    assert [parameter.data_ptr() for parameter in method.trained] == addresses
    model_bytes = 4 * sum(parameter.numel() for parameter in method.trained)
    held = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    assert 0 < highest < 0.25 * model_bytes


def test_mezo_learns(tmp_path: Path) -> None:
    rows = bigram_completions(8)
    problem, _, _ = build_problem(tmp_path, "llama", rows)
    method = MeZO(problem, SETTINGS)
    with torch.no_grad():
        before = problem.loss(rows).item()
    for _ in range(150):
        method.step(rows, 3e-5)
    with torch.no_grad():
        assert problem.loss(rows).item() < before - 0.1
