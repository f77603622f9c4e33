"""How a model numbers the positions of a row, and how many it has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from prge.errors import ConfigError
from server_export.checkpoint.loading import LoadedModel
from server_export.settings import DEFAULT_CONTEXT, DEFAULT_LENGTH

# Rotations whose frequencies depend on the length of a text.
_CHANGING = ("dynamic", "longrope")
# What tables of positions are called, and buffers that number them.
TABLES = ("position_embedding", "position_embeddings")
NUMBERS = "position_ids"


def first_position(model: nn.Module) -> int:
    """The number of a row's first position: RoBERTa's family counts from after the padding token."""
    padding = (getattr(module, "padding_idx", None) for module in _position_tables(model))
    return next((int(index) + 1 for index in padding if index is not None), _rows_before(model))


def _rows_before(model: nn.Module) -> int:
    """Rows of a table of positions that come before those which the model's own numbers look up."""
    for module in model.modules():
        numbers = _own_numbers(module)
        tables = (getattr(module, name, None) for name in TABLES)
        for table in tables:
            if numbers is not None and isinstance(table, nn.Embedding):
                return max(0, table.num_embeddings - numbers.shape[-1])
    return 0


def _own_numbers(module: nn.Module) -> torch.Tensor | None:
    return dict(module.named_buffers(recurse=False)).get(NUMBERS)


def _position_tables(model: nn.Module) -> Iterator[nn.Module]:
    """Tables of embeddings of positions, and what numbers them in older models."""
    for name, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids") or name.endswith(TABLES):
            yield module


def longest_row(loaded: LoadedModel, asked: int | None) -> int:
    """Tokens of the longest row: what was asked for, or what is usual and the model has positions for.

    Raises:
        ConfigError: the model has fewer positions than were asked for.
    """
    return _within(loaded, "sequence_length", asked, DEFAULT_LENGTH, position_count(loaded))


def longest_context(loaded: LoadedModel, asked: int | None, longest: int) -> int:
    """Tokens of the longest text that the model writes, at least those of the longest row.

    Rotations that change with the length of a text are those of a row: such a model writes no longer texts
    than it was trained on before its positions were stretched.

    Raises:
        ConfigError: the model has fewer positions than were asked for.
    """
    most = position_count(loaded)
    parameters = getattr(loaded.config, "rope_parameters", None) or {}
    trained = parameters.get("original_max_position_embeddings") or most
    if parameters.get("rope_type") in _CHANGING and trained is not None:
        most = max(trained, longest)
    return max(longest, _within(loaded, "context", asked, DEFAULT_CONTEXT, most))


def position_count(loaded: LoadedModel) -> int | None:
    """Positions that a row may have; None: any number."""
    limit = getattr(loaded.config, "max_position_embeddings", None) or 0
    # Some say -1 for any number.
    model = loaded.model
    return limit + _rows_before(model) - first_position(model) if limit > 0 else None


def _within(loaded: LoadedModel, name: str, asked: int | None, usual: int, most: int | None) -> int:
    if asked is None:
        return usual if most is None else min(usual, most)
    if most is not None and asked > most:
        raise ConfigError(
            f"the {name.replace('_', ' ')} doesn't fit the model:",
            [f"{name} is {asked}, {loaded.name_or_path} has {most} positions"],
            code="positions-too-few",
        )
    return asked


def position_numbers(loaded: LoadedModel, length: int) -> torch.Tensor:
    """Position numbers i64 [1, length] of a right-padded row; raises ConfigError if there are fewer."""
    first = first_position(loaded.model)
    return torch.arange(first, first + longest_row(loaded, length)).reshape(1, -1)
