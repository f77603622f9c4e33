"""The readout of a model: log-probabilities of tokens, or the pooled hidden states of an encoder."""

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
    """Gather states [rows, length, width] at positions i64 [rows, count]; return [rows, count, width]."""
    rows, length, width = states.shape
    starts = torch.arange(0, rows * length, length).reshape(rows, 1)
    gathered = states.reshape(rows * length, width).index_select(0, (positions + starts).reshape(-1))
    return gathered.reshape(rows, positions.shape[1], width)


def log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return log p(target) [rows, count] from logits [rows, count, tokens] and targets i64 [rows, count]."""
    return torch.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def pool_mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of states [rows, length, width] over tokens with a mask float [rows, length] of 1."""
    rows, length = mask.shape
    row = mask.reshape(rows, 1, length)
    # The product of the mask with itself counts the tokens within the delegate, without a constant per
    # length.
    count = torch.bmm(row, mask.reshape(rows, length, 1)).reshape(rows, 1)
    total = torch.bmm(row, states).reshape(rows, states.shape[-1])
    return total / count


def pool_first(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the hidden state of the first token of every row."""
    return states[:, 0]


def pooling_of(name: str | None) -> Pooling:
    """Return the pooling function with this name; None means the mean."""
    return pool_mean if name in (None, "mean") else pool_first


def _head_name(model: nn.Module) -> str:
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


def shorten_head(model: nn.Module, rows: int) -> str:
    """Replace the head of a model without weights by one with fewer rows; return the name of the head."""
    name = _head_name(model)
    head: nn.Linear = model.get_submodule(name)
    shortened = nn.Linear(head.in_features, rows, bias=head.bias is not None, device="meta")
    replace_module(model, name, shortened)
    return name


def readout_of(config: ExportConfig, loaded: LoadedModel) -> str:
    """Return the readout of a model's programs.

    Raises:
        ConfigError: the model doesn't have the configured readout.
    """
    if not loaded.is_decoder:
        if config.readout not in (None, "pooled"):
            raise ConfigError(
                "The readout doesn't fit the model:",
                [
                    f"{loaded.name_or_path} is an encoder ({loaded.config.model_type}), "
                    "it has the readout pooled only"
                ],
                code="readout-does-not-fit",
            )
        return "pooled"
    return "logprobs"
