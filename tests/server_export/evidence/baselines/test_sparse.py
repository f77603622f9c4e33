"""The sparse update trains some channels of some layers, chosen by their gains under a memory limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from prge.errors import ConfigError
from prge.verbs.bounds import flag
from server_export.evidence.baselines.allocation import Depth, Option, Part, Question
from server_export.evidence.baselines.layers import block_linears
from server_export.evidence.baselines.settings import SearchName
from server_export.evidence.baselines.sparse import (
    Scheme,
    SparseLinear,
    apply_scheme,
    choose_scheme,
    largest_channels,
    measure_memory,
    prepare,
    select,
)
from server_export.model.blocks import block_names
from tests.server_export.evidence.baselines.saved import saved_storages
from tests.server_export.evidence.baselines.tiny_problem import TinyProblem, method_settings
from tests.tiny_models import ARCHITECTURES, LENGTH

torch.set_num_threads(1)
SETTINGS = method_settings(
    "sparse-bp",
    memory_share=0.6,
    analysis_steps=1,
    held_out=4,
    analysis_learning_rate=1e-3,
    top_blocks=1,
    channel_fractions=[0.25],
)


def test_gradients_are_the_dense_ones_on_the_channels_that_learn() -> None:
    layer = nn.Linear(6, 4)
    channels = torch.tensor([1, 4])
    sparse = SparseLinear(layer, channels)
    x = torch.randn(2, 3, 6, requires_grad=True)
    seed = torch.randn(2, 3, 4)
    dense_y, sparse_y = layer(x), sparse(x)
    torch.testing.assert_close(sparse_y, dense_y)
    dense_x, dense_weight = torch.autograd.grad(dense_y, [x, layer.weight], seed)
    sparse_x, sparse_weight = torch.autograd.grad(sparse_y, [x, sparse.kept], seed)
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scheme_leaves_the_model_as_it_was(architecture: str) -> None:
    problem = TinyProblem(architecture)
    before = problem.hidden(problem.train)
    prepare(problem, SETTINGS)
    torch.testing.assert_close(problem.hidden(problem.train).detach(), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "distilbert"])
def test_analysis_leaves_no_trace(architecture: str) -> None:
    problem = TinyProblem(architecture)
    before = {name: value.detach().clone() for name, value in problem.model.named_parameters()}
    choose_scheme(problem, SETTINGS)
    after = dict(problem.model.named_parameters())
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert value.equal(before[name]) and not value.requires_grad and value.grad is None


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "distilbert"])
def test_nothing_below_the_deepest_updated_layer_has_a_graph(architecture: str) -> None:
    problem = TinyProblem(architecture)
    blocks = block_linears(problem.model)
    scheme = Scheme(1, {list(blocks[1])[-1]: 0.25})
    trained = apply_scheme(problem.model, scheme)
    for parameter in trained:
        parameter.requires_grad_()
    graphs: list[bool] = []
    for name in block_names(problem.model):
        problem.model.get_submodule(name).register_forward_hook(
            lambda block, args, output: graphs.append(
                (output[0] if isinstance(output, tuple) else output).requires_grad
            )
        )
    problem.loss(problem.train).backward()
    assert graphs == [False, True]
    assert all(parameter.grad is not None for parameter in trained)


@pytest.mark.parametrize("architecture", ["llama", "opt", "bert"])
def test_memory_is_what_autograd_saves(architecture: str) -> None:
    problem = TinyProblem(architecture)
    memory = measure_memory(problem, problem.train)
    assert set(memory.tokens.values()) == {len(problem.train) * LENGTH}
    # Biases of the top block's first layers: the whole block takes part, its norm before them doesn't.
    layers = block_linears(problem.model)[1]
    for name, layer in layers.items():
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "query", "key", "value")):
            layer.bias = nn.Parameter(torch.zeros(layer.out_features))
    known = {tensor.untyped_storage().data_ptr() for tensor in problem.model.parameters()}
    known |= {tensor.untyped_storage().data_ptr() for tensor in problem.model.buffers()}
    saved = saved_storages(lambda: problem.loss(problem.train))
    actual = sum(size for address, size in saved.items() if address not in known)
    assert 0.85 * (memory.above + memory.blocks[1]) <= actual <= memory.above + memory.blocks[1]


def question(limit: int, *parts: Part, biases: float = 0.5, lowest: int = 0) -> Question:
    """Two blocks: a way back to the lower one takes 220 bytes, to the upper one 115; both gain as much."""
    depths = (Depth(biases, 220), Depth(biases, 115))
    return Question(depths, parts, limit, lowest)


def part(name: str, block: int, *options: tuple[float, float, int]) -> Part:
    return Part(name, block, tuple(Option(level, gain, size) for level, gain, size in options))


def test_selection_takes_gains_per_byte_within_the_limit() -> None:
    parts = (
        part("top.dear", 1, (1.0, 3.0, 60), (0.5, 2.0, 20)),
        part("top.useless", 1, (1.0, -1.0, 1)),
        part("bottom.good", 0, (1.0, 9.0, 10)),
    )
    for search in ("greedy", "evolutionary"):
        assert select(question(150, *parts), [True, True], search) == Scheme(1, {"top.dear": 0.5})
        both = Scheme(0, {"bottom.good": 1.0, "top.dear": 0.5})
        assert select(question(250, *parts), [True, True], search) == both
        assert select(question(250, *parts, lowest=1), [True, True], search).depth == 1
        with pytest.raises(ConfigError, match="fits into 100 bytes"):
            select(question(100, *parts), [True, True], search)


def test_least_bad_is_selected_where_nothing_gains() -> None:
    parts = (part("top", 1, (1.0, -2.0, 1)), part("bottom", 0, (1.0, -1.0, 1)))
    assert select(question(300, *parts, biases=0.0), [False, False]) == Scheme(0, {"bottom": 1.0})
    assert select(question(200, *parts, biases=0.0), [False, False]) == Scheme(1, {"top": 1.0})


@pytest.mark.parametrize("search", ["greedy", "evolutionary"])
def test_what_is_chosen_fits_into_the_memory_that_was_measured(search: SearchName) -> None:
    problem = TinyProblem("llama")
    settings = replace(SETTINGS, search=search, top_blocks=0, memory_share=0.5)
    scheme, _ = choose_scheme(problem, settings)
    memory = measure_memory(problem, problem.train[: problem.batch_size])
    layers = {name: layer for block in block_linears(problem.model) for name, layer in block.items()}
    full = memory.from_block(0) + sum(memory.of_weight(name, layer, 1.0) for name, layer in layers.items())
    taken = memory.from_block(scheme.depth)
    taken += sum(memory.of_weight(name, layers[name], share) for name, share in scheme.weights.items())
    assert scheme.weights and taken <= 0.5 * full


def test_only_what_the_scheme_has_changes_and_the_analysis_counts() -> None:
    problem = TinyProblem("bert")
    method = prepare(problem, SETTINGS)
    # Memory, the loss before, one trial of the biases, one of each of six weights.
    assert method.prior_rows == 4 + 4 + 7 * (3 * 4 + 4)
    before = {name: value.detach().clone() for name, value in problem.model.named_parameters()}
    buffers = {name: value.clone() for name, value in problem.model.named_buffers()}
    trained = {id(parameter) for parameter in method.parameters()}
    method.step(problem.train, 1e-2)
    for name, value in problem.model.named_parameters():
        assert value.equal(before[name]) or id(value) in trained
    assert all(value.equal(buffers[name]) for name, value in problem.model.named_buffers())
    assert any(not value.equal(before[name]) for name, value in problem.model.named_parameters())


@pytest.mark.parametrize("changes", [{"memory_share": 0.0}, {"channel_fractions": []}, {"held_out": 0}])
def test_bad_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=flag(next(iter(changes)))):
        method_settings("sparse-bp", **changes)


def test_one_row_is_too_few() -> None:
    with pytest.raises(ConfigError, match="1 training rows"):
        prepare(TinyProblem("bert", examples=1), SETTINGS)
