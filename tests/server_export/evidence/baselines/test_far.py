"""FAR trains the feed-forward nodes that priming moves most, beside a frozen rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from prge.errors import ConfigError
from server_export.evidence.baselines.far import SplitLinear, prepare, prime, reconfigure
from server_export.evidence.baselines.layers import feed_forward_linears
from tests.server_export.evidence.baselines.tiny_problem import TinyProblem, method_settings
from tests.tiny_models import ARCHITECTURES

torch.set_num_threads(1)
SETTINGS = method_settings("far", priming_share=0.25, steps=8, priming_learning_rate=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reconfigured_model_equals_the_original(architecture: str) -> None:
    problem = TinyProblem(architecture)
    before = problem.hidden(problem.train)
    prepare(problem, SETTINGS)
    torch.testing.assert_close(problem.hidden(problem.train).detach(), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_feed_forward_layers_of_every_architecture_are_split(architecture: str) -> None:
    problem = TinyProblem(architecture)
    per_block = {len(layers) for layers in feed_forward_linears(problem.model)}
    assert per_block <= {2, 3}
    prepare(problem, SETTINGS)
    split = [module for module in problem.model.modules() if isinstance(module, SplitLinear)]
    assert len(split) == 2 * per_block.pop()
    # 0.4 of 96 hidden nodes, of 192 where gate and up are one layer, and of 64 output nodes
    assert {module.learner.out_features for module in split} <= {39, 77, 26}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "distilbert"])
def test_only_learners_change(architecture: str) -> None:
    problem = TinyProblem(architecture)
    method = prepare(problem, SETTINGS)
    before = {name: value.detach().clone() for name, value in problem.model.named_parameters()}
    method.step(problem.train, 1e-2)
    changed = {name for name, value in problem.model.named_parameters() if not value.equal(before[name])}
    assert changed == {name for name in before if ".learner." in name}
    assert {id(value) for value in method.parameters()} == {
        id(value) for name, value in problem.model.named_parameters() if name in changed
    }


def test_rows_that_moved_most_learn() -> None:
    layer = torch.nn.Linear(3, 4)
    model = torch.nn.ModuleDict({"layer": layer})
    weight, bias = reconfigure(model, {"layer": torch.tensor([1.0, 4.0, 2.0, 3.0])}, 0.5)
    assert weight.equal(layer.weight[[1, 3]]) and bias.equal(layer.bias[[1, 3]])


def test_score_is_the_sum_of_a_rows_absolute_changes_after_which_all_is_restored() -> None:
    problem = TinyProblem("bert", batch_size=8)
    (layers, _) = feed_forward_linears(problem.model)
    before = {name: value.detach().clone() for name, value in problem.model.named_parameters()}
    settings = method_settings("far", priming_share=0.1, steps=10, priming_learning_rate=0.5, optimizer="sgd")
    scores, rows = prime(problem, layers, settings)
    for name, value in problem.model.named_parameters():
        assert value.equal(before[name])
    problem.model.requires_grad_(True)
    problem.loss(problem.train).backward()
    for name, layer in layers.items():
        torch.testing.assert_close(scores[name], 0.5 * layer.weight.grad.abs().sum(1), rtol=1e-3, atol=1e-6)
    assert rows == 3 * 8


def test_primed_values_can_be_kept() -> None:
    problem = TinyProblem("bert")
    before = problem.model.encoder.layer[0].output.dense.weight.detach().clone()
    prepare(problem, replace(SETTINGS, keep_primed=True))
    split = problem.model.encoder.layer[0].output.dense
    after = torch.cat([split.learner.weight, split.frozen.weight])[split.order]
    assert after.shape == before.shape and not after.equal(before)


def test_a_primings_rows_count_and_random_nodes_need_none() -> None:
    assert prepare(TinyProblem("opt"), SETTINGS).prior_rows == 2 * 3 * 4
    assert prepare(TinyProblem("opt"), method_settings("far", nodes="random")).prior_rows == 0


def test_a_frozen_layer_saves_no_input() -> None:
    x = torch.randn(5, 3, requires_grad=True) * 1
    split = SplitLinear(torch.nn.Linear(3, 4), torch.tensor([2]))

    def saves_input(layer: torch.nn.Module) -> bool:
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            layer(x)
        return any(tensor.data_ptr() == x.data_ptr() for tensor in saved)

    assert saves_input(split.learner) and not saves_input(split.frozen)


@pytest.mark.parametrize("changes", [{"retention": 0.0}, {"retention": 1.5}, {"priming_share": 1.0}])
def test_bad_settings_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(changes.values())))):
        method_settings("far", **changes)
