"""Sparse update: train biases of the top blocks and some input channels of some weights, chosen by gain.

Lin et al., "On-Device Training Under 256KB Memory", arXiv 2206.15472. The paper's contribution analysis
measures how much an update of only the biases of the last k layers gains, and how much an update of only a
share r of the channels of one layer's weight. The scheme is the choice of k, layers and shares with the
largest sum of gains within the memory limit. As in the published code, the channels are the input channels
with the largest norms, and the bias of a layer whose weight is updated is updated too.

Choices made here: k counts blocks; a gain is the decrease of the loss on held-out training rows after a few
steps, where the paper uses accuracy after a whole training; memory is the measured size of the tensors that
autograd saves at and above the deepest updated block, plus gradients; the limit is a share of a full
update's memory. The search is greedy, by gain per byte for every deepest block, or evolutionary as in the
paper (allocation.py). Norms, embeddings and head stay frozen. A model without biases, such as Llama, has none
to update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from prge.errors import ConfigError
from prge.objectives.examples import Example
from server_export.adapter.layers import replace_module
from server_export.adapter.repeated_blocks import block_names
from server_export.evidence.baselines.allocation import AllocationProblem, Depth, Option, choose
from server_export.evidence.baselines.backpropagation import Backpropagation
from server_export.evidence.baselines.layers import (
    block_linears,
    merge_layers,
    record_inputs,
    shuffled_batches,
)
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BaselineSettings

# Shares of a layer's input channels that may be trained.
SHARES = (0.25, 1.0)
# Steps and learning rate of each trial, and the maximum number of held-out rows that measure it.
ANALYSIS_STEPS, ANALYSIS_RATE, HELD_OUT = 4, 1e-4, 32


@dataclass(frozen=True)
class Scheme:
    """Parameters to update: biases of blocks from `depth` up, and `weights`, a share of channels by layer."""

    depth: int
    weights: Mapping[str, float] = field(default_factory=dict)
    biases: bool = True


@dataclass(frozen=True)
class Memory:
    """Memory that a step holds, in bytes.

    Attributes:
        saved: bytes that autograd saves in every block, and last, after the blocks; without weights and
            inputs of linear layers whose weights are trained.
        biases: bytes of the gradients of every block's biases.
        tokens: number of vectors that each linear layer reads, by layer name.
    """

    saved: tuple[int, ...]
    biases: tuple[int, ...]
    tokens: Mapping[str, int]

    def from_block(self, depth: int) -> int:
        """Return the bytes of a backward pass that ends at a block and updates the biases from there up."""
        return sum(self.saved[depth:]) + sum(self.biases[depth:])

    def of_weight(self, name: str, layer: nn.Linear, share: float) -> int:
        """Return the bytes of a share of a layer's input and weight gradient, f32."""
        return 4 * count_channels(layer, share) * (self.tokens[name] + layer.out_features)


class _SparseProduct(torch.autograd.Function):
    """x [..., in] times a weight: `trained` [out, k] for some channels, `frozen` [out, in] zero for them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, trained: torch.Tensor, frozen: torch.Tensor, channels: torch.Tensor
    ) -> torch.Tensor:
        selected = x.index_select(-1, channels)
        ctx.save_for_backward(selected, trained, frozen, channels)
        return F.linear(x, frozen) + F.linear(selected, trained)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_output,) = gradients
        selected, trained, frozen, channels = ctx.saved_tensors
        grad_input = grad_trained = None
        if ctx.needs_input_grad[0]:
            grad_input = grad_output @ frozen
            grad_input.index_add_(-1, channels, grad_output @ trained)
        if ctx.needs_input_grad[1]:
            grad_trained = grad_output.flatten(0, -2).T @ selected.flatten(0, -2)
        return grad_input, grad_trained, None, None


class SparseLinear(nn.Module):
    """A linear layer that trains some input channels and saves only these for the backward pass.

    Args:
        layer: the layer; its weight is copied, its bias shared.
        channels: i64 [k], the input channels to train, in ascending order.
    """

    frozen: torch.Tensor
    channels: torch.Tensor

    def __init__(self, layer: nn.Linear, channels: torch.Tensor) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.trained = nn.Parameter(weight[:, channels].clone())
        self.bias = layer.bias
        self.register_buffer("frozen", weight.index_fill(1, channels, 0.0))
        self.register_buffer("channels", channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x [..., in]; return [..., out]."""
        product = _SparseProduct.apply(x, self.trained, self.frozen, self.channels)
        return product if self.bias is None else product + self.bias


def prepare(problem: ModelProblem, settings: BaselineSettings) -> Backpropagation:
    """Choose a scheme, change the problem's model in place, and return the training of its parameters.

    Raises:
        ConfigError: the model has no list of blocks, there are too few rows to hold some out, or no update
            within the memory limit lowers the loss.
    """
    scheme, forward_passes = choose_scheme(problem, settings)
    return Backpropagation(problem, settings, apply_scheme(problem.model, scheme), forward_passes)


def choose_scheme(problem: ModelProblem, settings: BaselineSettings) -> tuple[Scheme, int]:
    """Return the scheme that the contribution analysis selects, and the forward passes that it took."""
    if len(problem.train) < 2:
        raise ConfigError(
            "Cannot measure contributions:",
            [f"there are {len(problem.train)} training rows, and at least 2 are needed"],
            remedy="Give more rows: some are trained on, the others measure the gain.",
            code="rows-too-few",
        )
    problem.model.requires_grad_(False)
    blocks, example_batch = block_linears(problem.model), problem.train[: problem.batch_size]
    memory, analysis = measure_memory(problem, example_batch), _Analysis(problem, settings)
    depths = tuple(
        Depth(analysis.gain(Scheme(depth)) if any(memory.biases) else 0.0, memory.from_block(depth))
        for depth in range(len(blocks))
    )
    options = tuple(
        Option(
            name,
            depth,
            share,
            analysis.gain(Scheme(depth, {name: share}, biases=False)),
            memory.of_weight(name, layer, share),
        )
        for depth, layers in enumerate(blocks)
        for name, layer in layers.items()
        for share in SHARES
    )
    full = memory.from_block(0)
    full += sum(memory.of_weight(name, layer, 1.0) for name, layer in merge_layers(blocks).items())
    limit = int(settings.memory_share * full)
    choice = choose(AllocationProblem(depths, options, limit), settings.search, settings.seed)
    if choice is None:
        raise ConfigError(
            "There is nothing to update:",
            [f"no update of biases or weights within {limit} bytes lowers the loss"],
            remedy="Raise --memory-share.",
            code="nothing-to-update",
        )
    weights = {option.part: option.level for option in choice.options}
    return Scheme(choice.depth, weights), analysis.forward_passes + problem.forward_passes(example_batch)


def apply_scheme(model: nn.Module, scheme: Scheme) -> list[nn.Parameter]:
    """Insert the sparse layers of a scheme in place and return the parameters to update."""
    parameters: list[nn.Parameter] = []
    for name, layer in merge_layers(block_linears(model)[scheme.depth :]).items():
        share = scheme.weights.get(name)
        if share == 1.0:
            parameters.append(layer.weight)
        elif share is not None:
            sparse = SparseLinear(layer, largest_channels(layer, share))
            replace_module(model, name, sparse)
            parameters.append(sparse.trained)
        if scheme.biases and layer.bias is not None:
            parameters.append(layer.bias)
    return parameters


def count_channels(layer: nn.Linear, share: float) -> int:
    """Return the number of input channels in a share of a layer, at least one."""
    return max(1, int(share * layer.in_features))


def largest_channels(layer: nn.Linear, share: float) -> torch.Tensor:
    """Return the input channels with the largest L2 norms, i64 [k] in ascending order."""
    norms = layer.weight.detach().norm(dim=0)
    return norms.topk(count_channels(layer, share)).indices.sort().values


def measure_memory(problem: ModelProblem, examples: Sequence[Example]) -> Memory:
    """Measure the memory of a step on some examples if every block takes part in the backward pass."""
    problem.prepare_heads()
    model, layers = problem.model, block_linears(problem.model)
    blocks = [model.get_submodule(name) for name in block_names(model)]
    constants = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    current_block = 0
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in constants:
            # A tensor that several blocks share belongs to the topmost one: the pass always saves it.
            saved[address] = (current_block, tensor)
        return tensor

    def enter(depth: int) -> Callable[..., Any]:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal current_block
            current_block = depth
            if depth > 0:
                return None
            if args:
                return (args[0].detach().requires_grad_(), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"].detach().requires_grad_()}

        return hook

    def leave(*_: Any) -> None:
        nonlocal current_block
        current_block = len(blocks)

    hooks = [
        block.register_forward_pre_hook(enter(depth), with_kwargs=True) for depth, block in enumerate(blocks)
    ]
    hooks.append(blocks[-1].register_forward_hook(leave))
    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    try:
        with saving, record_inputs(merge_layers(layers), lambda x: x.numel() // x.shape[-1]) as tokens:
            problem.loss(examples)
    finally:
        for hook in hooks:
            hook.remove()
    sizes = [0] * (len(blocks) + 1)
    for depth, tensor in saved.values():
        sizes[depth] += tensor.untyped_storage().nbytes()
    biases = (
        sum(4 * layer.out_features for layer in block.values() if layer.bias is not None) for block in layers
    )
    return Memory(tuple(sizes), tuple(biases), {name: int(count) for name, count in tokens.items()})


class _Analysis:
    """Measures the gain of each scheme, trained on the same batches from the model's initial values."""

    def __init__(self, problem: ModelProblem, settings: BaselineSettings) -> None:
        self.problem = problem
        self.settings = settings
        held_out = min(HELD_OUT, len(problem.train) // 2)
        self._held_out = problem.train[-held_out:]
        batches = shuffled_batches(problem.train[:-held_out], problem.batch_size, problem.seed)
        self._batches = [next(batches) for _ in range(ANALYSIS_STEPS)]
        self.forward_passes = 0
        self._before = self._loss()

    def gain(self, scheme: Scheme) -> float:
        """Return the decrease of the held-out loss, -inf on divergence; the model is restored."""
        model = self.problem.model
        layers = merge_layers(block_linears(model)[scheme.depth :])
        if not scheme.biases:
            layers = {name: layers[name] for name in scheme.weights}
        initial = {
            name: [parameter.detach().clone() for parameter in layer.parameters()]
            for name, layer in layers.items()
        }
        training = Backpropagation(self.problem, self.settings, apply_scheme(model, scheme))
        for batch in self._batches:
            self.forward_passes += training.step(batch, ANALYSIS_RATE).forward_passes
        after = self._loss()
        for name, layer in layers.items():
            replace_module(model, name, layer)
            for parameter, value in zip(layer.parameters(), initial[name], strict=True):
                parameter.data.copy_(value)
                parameter.requires_grad_(False)
                parameter.grad = None
        return self._before - after if math.isfinite(after) else -math.inf

    def _loss(self) -> float:
        self.forward_passes += self.problem.forward_passes(self._held_out)
        with torch.no_grad():
            return self.problem.loss(self._held_out).item()
