"""FAR trains the feed-forward nodes that priming moves most; the others stay frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server_export.evidence.baselines.far import SplitLinear, prepare, prime, reconfigure
from server_export.evidence.baselines.layers import feed_forward_linears
from tests.server_export.evidence.baselines.problems import (
    changed,
    method_settings,
    outputs,
    tiny_problem,
    values_of,
)
from tests.server_export.evidence.baselines.saved import saved_storages
from tests.tiny_models import ARCHITECTURES

SETTINGS = method_settings("far", steps=40)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_splitting_feed_forward_layers_does_not_change_the_model(tmp_path: Path, architecture: str) -> None:
    problem = tiny_problem(tmp_path, architecture)
    before, layers = outputs(problem), sum(map(len, feed_forward_linears(problem.model)))
    assert prepare(problem, SETTINGS).prior_passes == 2 * 3 * 4
    torch.testing.assert_close(outputs(problem), before, rtol=0, atol=1e-6)
    split = [module for module in problem.model.modules() if isinstance(module, SplitLinear)]
    assert len(split) == layers
    # 0.4 of 96 hidden nodes, of 192 where gate and up are one layer, and of 64 output nodes
    assert {module.learner.out_features for module in split} <= {39, 77, 26}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "distilbert"])
def test_only_learners_change(tmp_path: Path, architecture: str) -> None:
    problem = tiny_problem(tmp_path, architecture)
    method = prepare(problem, SETTINGS)
    before = values_of(problem)
    method.step(problem.train, 1e-2)
    assert changed(problem, before) == {name for name in before if ".learner." in name}


def test_rows_that_moved_most_learn() -> None:
    layer = torch.nn.Linear(3, 4)
    model = torch.nn.ModuleDict({"layer": layer})
    weight, bias = reconfigure(model, {"layer": torch.tensor([1.0, 4.0, 2.0, 3.0])}, 0.5)
    assert weight.equal(layer.weight[[1, 3]]) and bias.equal(layer.bias[[1, 3]])


def test_scores_are_sums_of_absolute_changes_and_parameters_are_restored(tmp_path: Path) -> None:
    problem = tiny_problem(tmp_path, "llama")
    problem.batch_size = 8
    (layers, _) = feed_forward_linears(problem.model)
    before = values_of(problem)
    settings = method_settings("far", steps=10, optimizer="sgd")
    scores, rows = prime(problem, layers, settings, rate=0.5)
    assert not changed(problem, before)
    problem.loss(problem.train).backward()
    for name, layer in layers.items():
        assert layer.weight.grad is not None
        torch.testing.assert_close(scores[name], 0.5 * layer.weight.grad.abs().sum(1), rtol=1e-3, atol=1e-6)
    assert rows == 3 * 8


def test_primed_values_can_be_kept(tmp_path: Path) -> None:
    problem = tiny_problem(tmp_path, "llama")
    before = outputs(problem)
    prepare(problem, method_settings("far", steps=40, keep_primed=True))
    assert not outputs(problem).equal(before)


def test_a_frozen_layer_saves_no_input() -> None:
    x = torch.randn(5, 3, requires_grad=True) * 1
    split = SplitLinear(torch.nn.Linear(3, 4), torch.tensor([2]))
    address = x.untyped_storage().data_ptr()
    assert address in saved_storages(lambda: split.learner(x))
    assert address not in saved_storages(lambda: split.frozen(x))
