"""The position ids of a model's rows, and the number of positions that a model supports."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from prge.errors import ConfigError
from server_export.checkpoint.loading import LoadedModel
from server_export.settings import DEFAULT_CONTEXT, DEFAULT_LENGTH

# RoPE types whose frequencies depend on the sequence length.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
# Names of position embeddings, and of buffers with position ids.
POSITION_EMBEDDINGS = ("position_embedding", "position_embeddings")
POSITION_IDS = "position_ids"


def first_position(model: nn.Module) -> int:
    """Return the first position id of a row; RoBERTa-like models count from after the padding token."""
    padding = (getattr(module, "padding_idx", None) for module in _position_tables(model))
    return next((int(index) + 1 for index in padding if index is not None), _first_row_of_own_ids(model))


def _first_row_of_own_ids(model: nn.Module) -> int:
    """Return how many rows of a position embedding precede those of the model's own position ids."""
    for module in model.modules():
        position_ids = _own_position_ids(module)
        tables = (getattr(module, name, None) for name in POSITION_EMBEDDINGS)
        for table in tables:
            if position_ids is not None and isinstance(table, nn.Embedding):
                return max(0, table.num_embeddings - position_ids.shape[-1])
    return 0


def _own_position_ids(module: nn.Module) -> torch.Tensor | None:
    return dict(module.named_buffers(recurse=False)).get(POSITION_IDS)


def _position_tables(model: nn.Module) -> Iterator[nn.Module]:
    """Yield position embeddings, and the modules that compute position ids in older models."""
    for name, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids") or name.endswith(POSITION_EMBEDDINGS):
            yield module


def resolve_sequence_length(loaded: LoadedModel, requested: int | None) -> int:
    """Return the requested sequence length, or by default the usual one within the positions of the model.

    Raises:
        ConfigError: the model has fewer positions than requested.
    """
    return _within(loaded, "sequence_length", requested, DEFAULT_LENGTH, position_count(loaded))


def resolve_context_length(loaded: LoadedModel, requested: int | None, longest: int) -> int:
    """Return the longest text that the model may generate, at least as long as the longest training row.

    RoPE types that depend on the length use the frequencies of a row, so the context of such a model is
    limited to the length that it was trained with before its positions were extended.

    Raises:
        ConfigError: the model has fewer positions than requested.
    """
    limit = position_count(loaded)
    parameters = getattr(loaded.config, "rope_parameters", None) or {}
    trained_length = parameters.get("original_max_position_embeddings") or limit
    if parameters.get("rope_type") in _LENGTH_DEPENDENT and trained_length is not None:
        limit = max(trained_length, longest)
    return max(longest, _within(loaded, "context", requested, DEFAULT_CONTEXT, limit))


def position_count(loaded: LoadedModel) -> int | None:
    """Return how many positions a row may have, or None if the number is unlimited."""
    limit = getattr(loaded.config, "max_position_embeddings", None) or 0
    # Some models use -1 for no limit.
    model = loaded.model
    return limit + _first_row_of_own_ids(model) - first_position(model) if limit > 0 else None


def _within(loaded: LoadedModel, name: str, requested: int | None, default: int, limit: int | None) -> int:
    if requested is None:
        return default if limit is None else min(default, limit)
    if limit is not None and requested > limit:
        raise ConfigError(
            f"The {name.replace('_', ' ')} exceeds the positions of the model:",
            [f"{name} is {requested}, but {loaded.name_or_path} has {limit} positions"],
            code="positions-too-few",
        )
    return requested


def position_numbers(loaded: LoadedModel, length: int) -> torch.Tensor:
    """Return the position ids i64 [1, length] of a right-padded row.

    Raises:
        ConfigError: the model has fewer positions.
    """
    first = first_position(loaded.model)
    return torch.arange(first, first + resolve_sequence_length(loaded, length)).reshape(1, -1)
