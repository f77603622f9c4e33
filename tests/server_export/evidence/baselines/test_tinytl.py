"""TinyTL trains biases and small branches, and saves no input of a frozen linear layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from prge.errors import ConfigError
from server_export.evidence.baselines.tinytl import (
    LiteResidual,
    pool_tokens,
    prepare,
)
from tests.server_export.evidence.baselines.saved import saved_storages
from tests.server_export.evidence.baselines.tiny_problem import TinyProblem, method_settings
from tests.tiny_models import ARCHITECTURES, LENGTH, WIDTH

torch.set_num_threads(1)
VARIANTS = ("tinytl-biases", "tinytl-lite-residual")


def linears_with_saved_inputs(problem: TinyProblem) -> set[str]:
    """Names of linear layers whose input autograd keeps, whoever asked for it."""
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
    assert len(inputs) == len(hooks) or not problem.decodes
    return {name for name, x in inputs.items() if x.untyped_storage().data_ptr() in saved}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_is_unchanged_before_training(architecture: str, variant: Any) -> None:
    problem = TinyProblem(architecture)
    before = problem.hidden(problem.train)
    prepare(problem, method_settings(variant))
    torch.testing.assert_close(problem.hidden(problem.train).detach(), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_linear_input_is_saved_for_biases(architecture: str) -> None:
    problem = TinyProblem(architecture)
    prepare(problem, method_settings("tinytl-biases"))
    # ReLU keeps its own result, which is what OPT's second feed-forward layer reads.
    kept = {f"model.decoder.layers.{index}.fc2" for index in range(2)} if architecture == "opt" else set()
    assert linears_with_saved_inputs(problem) == kept


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_branches_save_their_own_inputs_only(architecture: str) -> None:
    problem = TinyProblem(architecture)
    prepare(problem, method_settings("tinytl-lite-residual"))
    saved = linears_with_saved_inputs(problem)
    assert len(saved) == 4 and all(".lite_residual." in name for name in saved)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_biases_save_less_than_full_fine_tuning(architecture: str) -> None:
    problem = TinyProblem(architecture)
    prepare(problem, method_settings("tinytl-biases"))
    biases = sum(saved_storages(lambda: problem.loss(problem.train)).values())
    problem.model.requires_grad_(True)
    assert biases < 0.9 * sum(saved_storages(lambda: problem.loss(problem.train)).values())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", ["llama", "opt", "distilbert"])
def test_biases_and_branches_change_and_nothing_else_does(architecture: str, variant: Any) -> None:
    problem = TinyProblem(architecture)
    method = prepare(problem, method_settings(variant))
    before = {name: value.detach().clone() for name, value in problem.model.named_parameters()}
    for _ in range(2):
        method.step(problem.train, 1e-2)
    for name, value in problem.model.named_parameters():
        trained = name.endswith(".bias") or ".lite_residual." in name
        # A bias that all keys share changes no attention.
        assert trained != value.equal(before[name]) or name.endswith((".k_proj.bias", ".k_lin.bias")), name
    assert method.prior_rows == 0


def test_every_linear_layer_of_a_block_has_a_bias_afterwards() -> None:
    problem = TinyProblem("qwen2")
    method = prepare(problem, method_settings("tinytl-biases"))
    layers = problem.model.model.layers
    assert all(layer.bias is not None for layer in layers.modules() if isinstance(layer, nn.Linear))
    assert len(method.parameters()) == 2 * 7


def test_pooled_tokens_are_means_of_earlier_ones() -> None:
    x = torch.arange(5.0).reshape(1, 5, 1)
    assert pool_tokens(x, 2).flatten().tolist() == [0.0, 1.5, 3.5]
    assert pool_tokens(x, 3).flatten().tolist() == [0.0, 2.0]
    assert pool_tokens(x, 1) is x


def test_a_branch_does_not_look_ahead() -> None:
    branch = LiteResidual(WIDTH, 8, 2, seed=0)
    nn.init.normal_(branch.expand.weight)
    x = torch.randn(1, LENGTH, WIDTH)
    for position in range(LENGTH):
        changed = x.clone()
        changed[:, position:] += 1
        assert branch(changed)[:, :position].equal(branch(x)[:, :position])


@pytest.mark.parametrize("changes", [{"branch_pool": 0}, {"branch_width": 2.0}])
def test_bad_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(changes.values())))):
        method_settings("tinytl-lite-residual", **changes)
