"""Freeze and reconfigure (FAR): train only the feed-forward nodes that a short priming moves most.

Vucetic et al., "Efficient Fine-Tuning of BERT Models on the Edge", arXiv 2205.01541. A node is an output row
of a feed-forward linear layer, with its bias. Priming fine-tunes the whole model for a few percent of the
steps; a node's score is the L1 norm of the change of its weights. The nodes with the highest scores are
trained: every feed-forward linear layer becomes a learner and a frozen layer, whose outputs are concatenated
and put back in order.

Choices that summaries of the paper leave open: scores are compared within a layer, so that equal layers keep
equal shapes; the down projection is split by its output rows like the other projections; biases don't count
in scores; attention, norms, embeddings and head are frozen. The initial values are restored after the
priming, so that all methods start from the same values. In the paper the training seems to go on from the
primed values, as it does with `keep_primed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from server_export.adapter.layers import replace_module
from server_export.evidence.baselines.backpropagation import Backpropagation
from server_export.evidence.baselines.layers import (
    Linears,
    feed_forward_linears,
    merge_layers,
    shuffled_batches,
)
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BaselineSettings

# Steps of the priming as a share of all steps, and their learning rate.
PRIMING_SHARE, PRIMING_RATE = 0.05, 2e-5


class SplitLinear(nn.Module):
    """A linear layer, split by output rows into a trained and a frozen layer.

    The trained part saves the layer's whole input for its gradient, however few rows it has.

    Args:
        layer: the layer to split; its values are copied.
        learning: i64 [k], the output rows to train, 1 <= k <= out.
    """

    order: torch.Tensor

    def __init__(self, layer: nn.Linear, learning: torch.Tensor) -> None:
        super().__init__()
        rest = torch.ones(layer.out_features, dtype=torch.bool)
        rest[learning] = False
        frozen = rest.nonzero().flatten()
        self.learner = _rows(layer, learning)
        self.frozen = _rows(layer, frozen).requires_grad_(False)
        self.register_buffer("order", torch.argsort(torch.cat([learning, frozen])), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x [..., in]; return [..., out]."""
        return torch.cat([self.learner(x), self.frozen(x)], dim=-1).index_select(-1, self.order)


def prepare(problem: ModelProblem, settings: BaselineSettings) -> Backpropagation:
    """Choose nodes, split the layers of the problem's model in place, and return a training of the learners.

    Raises:
        ConfigError: the model's feed-forward networks can't be found.
    """
    scores, prior_passes = prime(problem, merge_layers(feed_forward_linears(problem.model)), settings)
    learners = reconfigure(problem.model, scores, settings.retention)
    return Backpropagation(problem, settings, learners, prior_passes)


def prime(
    problem: ModelProblem, layers: Linears, settings: BaselineSettings, rate: float = PRIMING_RATE
) -> tuple[dict[str, torch.Tensor], int]:
    """Fine-tune the whole model for a few steps, then restore it unless `keep_primed` is set.

    Returns:
        The L1 change of every layer's nodes, f32 [out] by layer name, and the number of forward passes.
    """
    parameters = list(problem.model.parameters())
    initial = {id(parameter): parameter.detach().clone() for parameter in parameters}
    training = Backpropagation(problem, settings, parameters)
    batches = shuffled_batches(problem.train, problem.batch_size, problem.seed)
    forward_passes = 0
    for _ in range(max(1, round(PRIMING_SHARE * settings.steps))):
        forward_passes += training.step(next(batches), rate).forward_passes
    scores = {
        name: (layer.weight.detach() - initial[id(layer.weight)]).abs().sum(dim=1)
        for name, layer in layers.items()
    }
    for parameter in parameters:
        if not settings.keep_primed:
            parameter.data.copy_(initial[id(parameter)])
        parameter.grad = None
    return scores, forward_passes


def reconfigure(model: nn.Module, scores: Mapping[str, torch.Tensor], retention: float) -> list[nn.Parameter]:
    """Split the layers named in `scores`, f32 [out] each, and return the learners' parameters."""
    parameters: list[nn.Parameter] = []
    for name, score in scores.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        learning = score.topk(math.ceil(retention * layer.out_features)).indices.sort().values
        split = SplitLinear(layer, learning)
        replace_module(model, name, split)
        parameters.extend(split.learner.parameters())
    return parameters


def _rows(layer: nn.Linear, rows: torch.Tensor) -> nn.Linear:
    """Return a new layer with some output rows of another."""
    part = nn.Linear(layer.in_features, len(rows), bias=layer.bias is not None, device="meta")
    part.weight = nn.Parameter(layer.weight.detach()[rows].clone())
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias.detach()[rows].clone())
    return part
