"""From hidden states to what is asked of them: log-probabilities of tokens, or an encoder's pooled states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from prge.errors import ConfigError
from server_export.adapter.layers import replace_module
from server_export.checkpoint.loading import LoadedModel
from server_export.settings import ExportConfig

Pooling = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def at_positions(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """states [rows, length, width], positions i64 [rows, count] -> [rows, count, width]."""
    rows, length, width = states.shape
    starts = torch.arange(0, rows * length, length).reshape(rows, 1)
    picked = states.reshape(rows * length, width).index_select(0, (positions + starts).reshape(-1))
    return picked.reshape(rows, positions.shape[1], width)


def log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits [rows, count, tokens], targets i64 [rows, count] -> log p(target) [rows, count]."""
    return torch.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def pool_mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of states [rows, length, width] over the tokens that mask float [rows, length] marks with 1."""
    rows, length = mask.shape
    row = mask.reshape(rows, 1, length)
    # Ones times themselves are a sum that stays in the delegate, without a constant as long as a row.
    count = torch.bmm(row, mask.reshape(rows, length, 1)).reshape(rows, 1)
    total = torch.bmm(row, states).reshape(rows, states.shape[-1])
    return total / count


def pool_first(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """State of the first token of every row."""
    return states[:, 0]


def pooling_of(name: str | None) -> Pooling:
    """The pooling of that name; the mean where there is none."""
    return pool_mean if name in (None, "mean") else pool_first


def _head_name(model: nn.Module) -> str:
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


def cut_head(model: nn.Module, rows: int) -> str:
    """Leave the vocabulary head of a model without weights so many rows; returns its name."""
    name = _head_name(model)
    head: nn.Linear = model.get_submodule(name)
    cut = nn.Linear(head.in_features, rows, bias=head.bias is not None, device="meta")
    replace_module(model, name, cut)
    return name


def readout_of(config: ExportConfig, loaded: LoadedModel) -> str:
    """What a program answers; raises ConfigError for a readout that the model hasn't."""
    if not loaded.is_decoder:
        if config.readout not in (None, "pooled"):
            raise ConfigError(
                "the readout doesn't fit the model:",
                [
                    f"{loaded.name_or_path} is an encoder ({loaded.config.model_type}), "
                    "it has the readout pooled only"
                ],
                code="readout-does-not-fit",
            )
        return "pooled"
    return "logprobs"
