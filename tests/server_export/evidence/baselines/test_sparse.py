"""The sparse update trains some channels of some layers, chosen by gain under a memory limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prge.errors import ConfigError
from server_export.adapter.repeated_blocks import block_names
from server_export.evidence.baselines.layers import block_linears, merge_layers
from server_export.evidence.baselines.settings import SearchName
from server_export.evidence.baselines.sparse import (
    Scheme,
    SparseLinear,
    apply_scheme,
    choose_scheme,
    largest_channels,
    measure_memory,
    prepare,
)
from tests.refusals import raises
from tests.rows import bigram_completions
from tests.server_export.evidence.baselines.problems import (
    build_problem,
    changed,
    method_settings,
    outputs,
    tiny_problem,
    values_of,
)
from tests.server_export.evidence.baselines.saved import saved_storages
from tests.tiny_models import DECODERS

SETTINGS = method_settings("sparse-bp", memory_share=0.9)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let analyses take one step, at a rate that changes a model with random weights."""
    monkeypatch.setattr("server_export.evidence.baselines.sparse.ANALYSIS_STEPS", 1)
    monkeypatch.setattr("server_export.evidence.baselines.sparse.ANALYSIS_RATE", 1e-3)


def test_gradients_are_the_dense_ones_on_the_channels_that_learn() -> None:
    layer = nn.Linear(6, 4)
    channels = torch.tensor([1, 4])
    sparse = SparseLinear(layer, channels)
    x = torch.randn(2, 3, 6, requires_grad=True)
    seed = torch.randn(2, 3, 4)
    dense_y, sparse_y = layer(x), sparse(x)
    torch.testing.assert_close(sparse_y, dense_y)
    dense_x, dense_weight = torch.autograd.grad(dense_y, [x, layer.weight], seed)
    sparse_x, sparse_weight = torch.autograd.grad(sparse_y, [x, sparse.trained], seed)
    torch.testing.assert_close(sparse_x, dense_x)
    torch.testing.assert_close(sparse_weight, dense_weight[:, channels])


def test_channels_of_the_largest_norms_learn() -> None:
    layer = nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -5.0, 0.0, 3.0], [1.0, 0.0, 2.0, 0.0]]))
    assert largest_channels(layer, 0.5).tolist() == [1, 3]
    assert largest_channels(layer, 0.01).tolist() == [1]


def test_only_the_channels_that_learn_are_saved() -> None:
    sparse = SparseLinear(nn.Linear(64, 8), torch.arange(16))
    x = torch.randn(5, 3, 64, requires_grad=True)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*sparse.parameters(), *sparse.buffers()]}
    saved = saved_storages(lambda: sparse(x))
    assert sum(size for address, size in saved.items() if address not in own) == 5 * 3 * 16 * 4


# An encoder's rows are noise, from which nothing can be learned.
@pytest.mark.parametrize("architecture", DECODERS)
def test_the_analysis_and_the_scheme_do_not_change_the_model(tmp_path: Path, architecture: str) -> None:
    problem = tiny_problem(tmp_path, architecture)
    before, values = outputs(problem), values_of(problem)
    scheme, _ = choose_scheme(problem, SETTINGS)
    assert not changed(problem, values)
    assert all(not value.requires_grad and value.grad is None for value in problem.model.parameters())
    apply_scheme(problem.model, scheme)
    torch.testing.assert_close(outputs(problem), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "distilbert"])
def test_nothing_below_the_deepest_updated_layer_has_a_graph(tmp_path: Path, architecture: str) -> None:
    problem = tiny_problem(tmp_path, architecture)
    problem.prepare_heads()
    name = list(block_linears(problem.model)[1])[-1]
    trained = apply_scheme(problem.model, Scheme(1, {name: 0.25}))
    for parameter in trained:
        parameter.requires_grad_()
    graphs: list[bool] = []

    def note(block: nn.Module, args: Any, output: Any) -> None:
        graphs.append((output[0] if isinstance(output, tuple) else output).requires_grad)

    for name in block_names(problem.model):
        problem.model.get_submodule(name).register_forward_hook(note)
    problem.loss(problem.train).backward()
    assert graphs == [False, True]
    assert trained and all(parameter.grad is not None for parameter in trained)


@pytest.mark.parametrize("architecture", ["llama", "opt", "bert"])
def test_the_memory_is_that_of_the_tensors_that_autograd_saves(tmp_path: Path, architecture: str) -> None:
    problem = tiny_problem(tmp_path, architecture)
    problem.prepare_heads()
    memory = measure_memory(problem, problem.train)
    # Biases of the top block's first layers: the whole block takes part, except the norm before them.
    for name, layer in block_linears(problem.model)[1].items():
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "query", "key", "value")):
            layer.bias = nn.Parameter(torch.zeros(layer.out_features))
    known = {tensor.untyped_storage().data_ptr() for tensor in problem.model.parameters()}
    known |= {tensor.untyped_storage().data_ptr() for tensor in problem.model.buffers()}
    saved = saved_storages(lambda: problem.loss(problem.train))
    actual = sum(size for address, size in saved.items() if address not in known)
    assert 0.85 * sum(memory.saved[1:]) <= actual <= sum(memory.saved[1:])


@pytest.mark.parametrize("search", ["greedy", "evolutionary"])
def test_the_chosen_scheme_fits_into_the_measured_memory(tmp_path: Path, search: SearchName) -> None:
    problem = tiny_problem(tmp_path, "llama")
    scheme, _ = choose_scheme(problem, method_settings("sparse-bp", memory_share=0.5, search=search))
    memory = measure_memory(problem, problem.train[: problem.batch_size])
    layers = merge_layers(block_linears(problem.model))
    full = memory.from_block(0) + sum(memory.of_weight(name, layer, 1.0) for name, layer in layers.items())
    needed = memory.from_block(scheme.depth)
    needed += sum(memory.of_weight(name, layers[name], share) for name, share in scheme.weights.items())
    assert scheme.weights and needed <= 0.5 * full


def test_only_parameters_of_the_scheme_change_and_the_analysis_is_counted(tmp_path: Path) -> None:
    problem = tiny_problem(tmp_path, "gpt2")
    method = prepare(problem, SETTINGS)
    # Memory, the loss before, a trial of the biases of each depth, and two of each of eight weights.
    assert method.prior_passes == 4 + 4 + (2 + 2 * 8) * (3 * 4 + 4)
    before = values_of(problem)
    buffers = {name: value.clone() for name, value in problem.model.named_buffers()}
    method.step(problem.train, 1e-2)
    result = {dict(problem.model.named_parameters())[name] for name in changed(problem, before)}
    assert result and result <= set(method.trained)
    assert all(value.equal(buffers[name]) for name, value in problem.model.named_buffers())


def test_models_that_cannot_be_analysed_are_refused(tmp_path: Path) -> None:
    problem, _, _ = build_problem(tmp_path, "llama", bigram_completions(1))
    with raises(ConfigError, "rows-too-few", containing="1 training rows"):
        prepare(problem, SETTINGS)
    with raises(ConfigError, "nothing-to-update"):
        prepare(tiny_problem(tmp_path / "b", "llama"), method_settings("sparse-bp", memory_share=0.01))
