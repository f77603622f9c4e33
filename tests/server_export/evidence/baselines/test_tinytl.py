"""TinyTL trains biases and small branches, and saves no input of a frozen linear layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.tinytl import LiteResidual, pool_tokens, prepare
from tests.server_export.evidence.baselines.problems import (
    changed,
    method_settings,
    outputs,
    tiny_problem,
    values_of,
)
from tests.server_export.evidence.baselines.saved import saved_storages
from tests.tiny_models import ARCHITECTURES, LENGTH, WIDTH

BIASES = method_settings("tinytl-biases")
BRANCHES = method_settings("tinytl-lite-residual")


def linears_with_saved_inputs(problem: ModelProblem) -> set[str]:
    """Return the names of linear layers whose input autograd saves, for any reason."""
    problem.prepare_heads()
    inputs: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        return lambda module, args: inputs.__setitem__(name, args[0])

    hooks = [
        module.register_forward_pre_hook(note(name))
        for name, module in problem.model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    saved = saved_storages(lambda: problem.loss(problem.train))
    for hook in hooks:
        hook.remove()
    return {name for name, x in inputs.items() if x.untyped_storage().data_ptr() in saved}


@pytest.mark.parametrize("settings", [BIASES, BRANCHES], ids=["biases", "branches"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_is_unchanged_before_training(tmp_path: Path, architecture: str, settings: Any) -> None:
    problem = tiny_problem(tmp_path, architecture)
    before = outputs(problem)
    prepare(problem, settings)
    torch.testing.assert_close(outputs(problem), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_linear_input_is_saved_for_biases(tmp_path: Path, architecture: str) -> None:
    problem = tiny_problem(tmp_path, architecture)
    prepare(problem, BIASES)
    # ReLU saves its own result, which is the input of OPT's second feed-forward layer.
    kept = {f"model.decoder.layers.{index}.fc2" for index in range(2)} if architecture == "opt" else set()
    assert linears_with_saved_inputs(problem) == kept


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_branches_save_their_own_inputs_only(tmp_path: Path, architecture: str) -> None:
    problem = tiny_problem(tmp_path, architecture)
    prepare(problem, BRANCHES)
    saved = linears_with_saved_inputs(problem)
    assert len(saved) == 4 and all(".lite_residual." in name for name in saved)


@pytest.mark.parametrize("settings", [BIASES, BRANCHES], ids=["biases", "branches"])
@pytest.mark.parametrize("architecture", ["llama", "opt", "distilbert"])
def test_biases_and_branches_change_and_nothing_else_does(
    tmp_path: Path, architecture: str, settings: Any
) -> None:
    problem = tiny_problem(tmp_path, architecture)
    method = prepare(problem, settings)
    before = values_of(problem)
    for _ in range(2):
        method.step(problem.train, 1e-2)
    result = changed(problem, before)
    for name in before:
        trained = name.endswith(".bias") or ".lite_residual." in name
        # A bias that all keys share doesn't change attention.
        assert (name in result) == trained or name.endswith((".k_proj.bias", ".k_lin.bias")), name


def test_every_linear_layer_of_a_block_has_a_bias_afterwards(tmp_path: Path) -> None:
    assert len(prepare(tiny_problem(tmp_path, "qwen2"), BIASES).trained) == 2 * 7


def test_pooled_tokens_are_means_of_earlier_ones() -> None:
    x = torch.arange(5.0).reshape(1, 5, 1)
    assert pool_tokens(x).flatten().tolist() == [0.0, 1.5, 3.5]


def test_a_branch_does_not_look_ahead() -> None:
    branch = LiteResidual(WIDTH, seed=0)
    nn.init.normal_(branch.expand.weight)
    x = torch.randn(1, LENGTH, WIDTH)
    for position in range(LENGTH):
        later = x.clone()
        later[:, position:] += 1
        assert branch(later)[:, :position].equal(branch(x)[:, :position])
