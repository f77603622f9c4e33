"""How a model numbers the positions of a row, and how many it has."""

from __future__ import annotations

import torch
from torch import nn

from prge.errors import ConfigError
from server_export.model.loading import LoadedModel
from server_export.settings import DEFAULT_LENGTH


def first_position(model: nn.Module) -> int:
    """The number of a row's first position: RoBERTa's family counts from after the padding token."""
    numbering = (
        module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids")
    )
    first = next(numbering, None)
    return 0 if first is None else int(first.padding_idx) + 1


def longest_row(loaded: LoadedModel, asked: int | None) -> int:
    """Tokens of the longest row: what was asked for, or what is usual and the model has positions for.

    Raises:
        ConfigError: the model has fewer positions than were asked for.
    """
    limit = getattr(loaded.config, "max_position_embeddings", None)
    most = None if limit is None else limit - first_position(loaded.model)
    if asked is None:
        return DEFAULT_LENGTH if most is None else min(DEFAULT_LENGTH, most)
    if most is not None and asked > most:
        raise ConfigError(
            "the sequence length doesn't fit the model:",
            [f"sequence_length is {asked}, {loaded.name_or_path} has {most} positions"],
        )
    return asked


def position_numbers(loaded: LoadedModel, length: int) -> torch.Tensor:
    """Position numbers i64 [1, length] of a right-padded row; raises ConfigError if there are fewer."""
    first = first_position(loaded.model)
    return torch.arange(first, first + longest_row(loaded, length)).reshape(1, -1)
