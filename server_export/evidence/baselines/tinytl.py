"""TinyTL on transformers: train biases and small branches parallel to the blocks; weights stay frozen.

Cai et al., "TinyTL: Reduce Memory, Not Parameters for Efficient On-Device Learning", arXiv 2007.11622: the
gradient of a bias needs no input of its layer, so that the inputs of frozen linear layers aren't saved. The
tensors of nonlinear layers (attention, softmax, activations, norms) are still saved; convolutional networks
with ReLU have fewer of them.

    tinytl-biases          the biases of linear layers and norms
    tinytl-lite-residual   these, and a branch of few channels on few tokens parallel to every block

The paper's branch: pooling by 2, a convolution in 2 groups, ReLU, a convolution of width 1, a norm whose
weight begins at zero, upsampling. Choices made here for transformers: tokens are pooled; the bottleneck is
narrow instead of grouped, since there is no reason to save many channels; the last projection, instead of the
norm, begins at zero; linear layers of the blocks without a bias, such as Llama's, get one of zeros. The head
stays frozen, as in all methods compared here; the paper trains it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from server_export.adapter.repeated_blocks import block_names
from server_export.evidence.baselines.backpropagation import Backpropagation
from server_export.evidence.baselines.layers import block_linears, merge_layers
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BaselineSettings

# Tokens that a branch pools into one, and its width as a share of the model's width.
POOL, WIDTH_SHARE = 2, 1 / 8


class LiteResidual(nn.Module):
    """A bottleneck on pooled tokens whose output is zero before training.

    Args:
        channels: width of the model.
        seed: seed of the first projection's values.
    """

    def __init__(self, channels: int, seed: int) -> None:
        super().__init__()
        bottleneck = max(1, round(WIDTH_SHARE * channels))
        self.reduce = nn.Linear(channels, bottleneck, bias=False)
        self.expand = nn.Linear(bottleneck, channels, bias=False)
        generator = torch.Generator().manual_seed(seed)
        nn.init.kaiming_uniform_(self.reduce.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(self.expand.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the branch to x [rows, length, channels]; return the same shape."""
        reduced = self.expand(F.relu(self.reduce(pool_tokens(x))))
        return reduced.repeat_interleave(POOL, dim=1)[:, : x.shape[1]]

    def add(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Add the branch's output to the block's output, as a forward hook."""
        states = args[0] if args else kwargs["hidden_states"]
        if isinstance(output, tuple):
            return (output[0] + self(states), *output[1:])
        return output + self(states)


def pool_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return causal means of tokens [rows, length, channels] -> [rows, ceil(length / POOL), channels].

    Group j serves the tokens from j x POOL on and is the mean of the POOL tokens that end at j x POOL: no
    token sees later tokens or the padding after them. Before the first token, the first token is repeated.
    """
    rows, length, channels = x.shape
    groups = -(-length // POOL)
    padded = torch.cat([x[:, :1].expand(-1, POOL - 1, -1), x], dim=1)[:, : groups * POOL]
    return padded.reshape(rows, groups, POOL, channels).mean(dim=2)


def prepare(problem: ModelProblem, settings: BaselineSettings) -> Backpropagation:
    """Add biases, and branches if asked for, to the problem's model in place, and return their training.

    Raises:
        ConfigError: the model has no list of blocks.
    """
    trained = train_biases(problem.model)
    if settings.method == "tinytl-lite-residual":
        trained += add_branches(problem.model, problem.seed)
    return Backpropagation(problem, settings, trained)


def train_biases(model: nn.Module) -> list[nn.Parameter]:
    """Return all biases but the head's; linear layers of the blocks without a bias get one of zeros."""
    for layer in merge_layers(block_linears(model)).values():
        if layer.bias is None:
            layer.bias = nn.Parameter(torch.zeros(layer.out_features))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    frozen = set() if head is None else {id(parameter) for parameter in head.parameters()}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2] == "bias" and id(parameter) not in frozen
    ]


def add_branches(model: nn.Module, seed: int) -> list[nn.Parameter]:
    """Add a branch parallel to every block, in place, and return the branches' parameters."""
    parameters: list[nn.Parameter] = []
    for depth, name in enumerate(block_names(model)):
        block = model.get_submodule(name)
        branch = LiteResidual(model.config.hidden_size, seed + depth)
        block.add_module("lite_residual", branch)
        # A hook instead of a wrapper: models read attributes of their blocks.
        block.register_forward_hook(branch.add, with_kwargs=True)
        parameters.extend(branch.parameters())
    return parameters
