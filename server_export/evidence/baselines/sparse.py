"""Sparse update: biases of the top blocks and some input channels of some weights, chosen by what they yield.

Lin et al., "On-Device Training Under 256KB Memory", arXiv 2206.15472. Its contribution analysis asks how much
updating the biases of the last k layers alone gains, and how much a share r of the channels of one layer's
weight alone. The scheme is the choice of k, layers and shares with the largest sum of gains that fits into
memory. As in the published code, the channels are the input channels of the largest norms, and a layer whose
weight is updated has its bias updated too.

Chosen here: k counts blocks; a gain is the fall of the loss on held-out training rows after a few steps,
where the paper takes accuracy after a training; memory is what autograd saves at and above the deepest
updated block, as measured, with the gradients, and its limit a share of a full update's. The choice is
searched greedily, by gain per byte for every deepest block, or by evolution, as in the paper
(allocation.py). Norms, embeddings and head stay frozen. A model without biases, as Llama, has none to update.
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
from prge.learning.examples import Example
from server_export.adapter.blocks import block_names
from server_export.adapter.layers import replace_module
from server_export.evidence.baselines.allocation import Depth, Option, Question, choose
from server_export.evidence.baselines.backpropagation import Backpropagation
from server_export.evidence.baselines.layers import block_linears, inputs_noted, merged, shuffled_batches
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BaselineSettings

# Shares of its input channels that a layer may learn with.
SHARES = (0.25, 1.0)
# What every candidate is tried for, and how many training rows judge it at most.
ANALYSIS_STEPS, ANALYSIS_RATE, HELD_OUT = 4, 1e-4, 32


@dataclass(frozen=True)
class Scheme:
    """What is updated: biases of the blocks from `depth` up, and `weights`, a share of channels by layer."""

    depth: int
    weights: Mapping[str, float] = field(default_factory=dict)
    biases: bool = True


@dataclass(frozen=True)
class Memory:
    """What a step keeps, in bytes.

    `saved` is what autograd saves in every block and, at its end, after the last, weights and the inputs of
    linear layers whose weights learn not counted; `biases` the gradients of every block's biases; `tokens`
    how many vectors each linear layer reads.
    """

    saved: tuple[int, ...]
    biases: tuple[int, ...]
    tokens: Mapping[str, int]

    def from_block(self, depth: int) -> int:
        """Bytes of a backward that ends at a block and updates the biases from there."""
        return sum(self.saved[depth:]) + sum(self.biases[depth:])

    def of_weight(self, name: str, layer: nn.Linear, share: float) -> int:
        """Bytes of a share of a layer's input and weight gradient, f32."""
        return 4 * kept_channels(layer, share) * (self.tokens[name] + layer.out_features)


class _SparseProduct(torch.autograd.Function):
    """x [..., in] times a weight of which `kept` [out, k] learns and `frozen` [out, in] is zero there."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, kept: torch.Tensor, frozen: torch.Tensor, channels: torch.Tensor
    ) -> torch.Tensor:
        chosen = x.index_select(-1, channels)
        ctx.save_for_backward(chosen, kept, frozen, channels)
        return F.linear(x, frozen) + F.linear(chosen, kept)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        chosen, kept, frozen, channels = ctx.saved_tensors
        to_input = to_kept = None
        if ctx.needs_input_grad[0]:
            to_input = gradient @ frozen
            to_input.index_add_(-1, channels, gradient @ kept)
        if ctx.needs_input_grad[1]:
            to_kept = gradient.flatten(0, -2).T @ chosen.flatten(0, -2)
        return to_input, to_kept, None, None


class SparseLinear(nn.Module):
    """A linear layer of which some input channels learn; no other channel is saved for the backward.

    Args:
        layer: the layer; its weight is copied, its bias shared.
        channels: i64 [k], the input channels that learn, in rising order.
    """

    frozen: torch.Tensor
    channels: torch.Tensor

    def __init__(self, layer: nn.Linear, channels: torch.Tensor) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.kept = nn.Parameter(weight[:, channels].clone())
        self.bias = layer.bias
        self.register_buffer("frozen", weight.index_fill(1, channels, 0.0))
        self.register_buffer("channels", channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        product = _SparseProduct.apply(x, self.kept, self.frozen, self.channels)
        return product if self.bias is None else product + self.bias


def prepare(problem: ModelProblem, settings: BaselineSettings) -> Backpropagation:
    """Choose what is updated, change the problem's model in place, and train that.

    Raises:
        ConfigError: the model has no list of blocks, there are too few rows to hold some out, or nothing that
            fits into the memory limit lowers the loss.
    """
    scheme, rows = choose_scheme(problem, settings)
    return Backpropagation(problem, settings, apply_scheme(problem.model, scheme), rows)


def choose_scheme(problem: ModelProblem, settings: BaselineSettings) -> tuple[Scheme, int]:
    """The scheme that the contribution analysis finds, and the rows that this took."""
    if len(problem.train) < 2:
        raise ConfigError(
            "no contributions can be measured:",
            [f"there are {len(problem.train)} training rows, must be 2 or more"],
            remedy="one part of them trains, the other measures",
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
    full += sum(memory.of_weight(name, layer, 1.0) for name, layer in merged(blocks).items())
    limit = int(settings.memory_share * full)
    choice = choose(Question(depths, options, limit), settings.search, settings.seed)
    if choice is None:
        raise ConfigError(
            "there is nothing to update:",
            [f"no bias or weight that fits into {limit} bytes lowers the loss"],
            remedy="raise --memory-share",
            code="nothing-to-update",
        )
    weights = {option.part: option.level for option in choice.options}
    return Scheme(choice.depth, weights), analysis.rows + problem.rows(example_batch)


def apply_scheme(model: nn.Module, scheme: Scheme) -> list[nn.Parameter]:
    """Put sparse layers where the scheme has them, in place; returns the parameters that it updates."""
    parameters: list[nn.Parameter] = []
    for name, layer in merged(block_linears(model)[scheme.depth :]).items():
        share = scheme.weights.get(name)
        if share == 1.0:
            parameters.append(layer.weight)
        elif share is not None:
            sparse = SparseLinear(layer, largest_channels(layer, share))
            replace_module(model, name, sparse)
            parameters.append(sparse.kept)
        if scheme.biases and layer.bias is not None:
            parameters.append(layer.bias)
    return parameters


def kept_channels(layer: nn.Linear, share: float) -> int:
    """How many input channels of a layer a share is, at least one."""
    return max(1, int(share * layer.in_features))


def largest_channels(layer: nn.Linear, share: float) -> torch.Tensor:
    """The input channels of the largest weights by L2 norm, i64 [k] in rising order."""
    norms = layer.weight.detach().norm(dim=0)
    return norms.topk(kept_channels(layer, share)).indices.sort().values


def measure_memory(problem: ModelProblem, examples: Sequence[Example]) -> Memory:
    """What a step on some examples keeps where every block takes part in the backward."""
    problem.prepare_heads()
    model, layers = problem.model, block_linears(problem.model)
    blocks = [model.get_submodule(name) for name in block_names(model)]
    constants = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    place = 0
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in constants:
            # What several blocks share belongs to the topmost: it is there wherever the backward ends.
            saved[address] = (place, tensor)
        return tensor

    def enter(depth: int) -> Callable[..., Any]:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal place
            place = depth
            if depth > 0:
                return None
            if args:
                return (args[0].detach().requires_grad_(), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"].detach().requires_grad_()}

        return hook

    def leave(*_: Any) -> None:
        nonlocal place
        place = len(blocks)

    hooks = [
        block.register_forward_pre_hook(enter(depth), with_kwargs=True) for depth, block in enumerate(blocks)
    ]
    hooks.append(blocks[-1].register_forward_hook(leave))
    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    try:
        with saving, inputs_noted(merged(layers), lambda x: x.numel() // x.shape[-1]) as tokens:
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
    """Gains of schemes, each trained alone on the same few batches from the model's initial values."""

    def __init__(self, problem: ModelProblem, settings: BaselineSettings) -> None:
        self.problem = problem
        self.settings = settings
        held_out = min(HELD_OUT, len(problem.train) // 2)
        self._held_out = problem.train[-held_out:]
        batches = shuffled_batches(problem.train[:-held_out], problem.batch_size, problem.seed)
        self._batches = [next(batches) for _ in range(ANALYSIS_STEPS)]
        self.rows = 0
        self._before = self._loss()

    def gain(self, scheme: Scheme) -> float:
        """By how much a scheme lowers the held-out loss, -inf where it diverges; no trace is left."""
        model = self.problem.model
        layers = merged(block_linears(model)[scheme.depth :])
        if not scheme.biases:
            layers = {name: layers[name] for name in scheme.weights}
        initial = {
            name: [parameter.detach().clone() for parameter in layer.parameters()]
            for name, layer in layers.items()
        }
        training = Backpropagation(self.problem, self.settings, apply_scheme(model, scheme))
        for batch in self._batches:
            self.rows += training.step(batch, ANALYSIS_RATE).rows
        after = self._loss()
        for name, layer in layers.items():
            replace_module(model, name, layer)
            for parameter, value in zip(layer.parameters(), initial[name], strict=True):
                parameter.data.copy_(value)
                parameter.requires_grad_(False)
                parameter.grad = None
        return self._before - after if math.isfinite(after) else -math.inf

    def _loss(self) -> float:
        self.rows += self.problem.rows(self._held_out)
        with torch.no_grad():
            return self.problem.loss(self._held_out).item()
