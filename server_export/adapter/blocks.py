"""The repeated blocks of a model, found without knowing its architecture."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from prge.errors import ConfigError

_TOP = re.compile(r"top:(-?\d+)")


def block_names(model: nn.Module) -> list[str]:
    """Paths of a model's blocks from bottom to top: the entries of its largest list of modules.

    Raises:
        ConfigError: it has no such list.
    """
    lists = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and any(isinstance(inner, nn.Linear) for inner in module.modules())
    }
    if not lists:
        raise ConfigError(
            "the model's layers can't be counted:",
            [f"{type(model).__name__} has no list of blocks with linear layers"],
            remedy="leave --adapt-layers out and choose layers with --target-modules",
            code="layers-not-countable",
        )
    # Of a list and one inside its blocks, the outer one comes first and has at least as many parameters.
    largest = max(lists, key=lambda name: lists[name])
    return [f"{largest}.{index}" for index in range(len(model.get_submodule(largest)))]


def in_top_blocks(model: nn.Module, names: Sequence[str], choice: str) -> list[str]:
    """Those of some layers that lie in the blocks that `choice`, `top:k`, means.

    Raises:
        ConfigError: `choice` is malformed, the model has fewer blocks, or none of the layers lies in them.
    """
    title = "these layers can't be adapted:"
    match = _TOP.fullmatch(choice)
    if match is None:
        raise ConfigError(
            title,
            [f"adapt_layers is {choice!r}, must be top:k, for example top:4"],
            code="adapt-layers-malformed",
        )
    count, blocks = int(match.group(1)), block_names(model)
    if not 1 <= count <= len(blocks):
        raise ConfigError(
            title,
            [f"adapt_layers is {choice}, k must be 1 to {len(blocks)}"],
            code="adapt-layers-out-of-range",
        )
    top = tuple(f"{block}." for block in blocks[-count:])
    chosen = [name for name in names if name.startswith(top)]
    if not chosen:
        raise ConfigError(
            title,
            [f"none of the target modules lies in the top {count} blocks"],
            code="adapt-layers-without-targets",
        )
    return chosen


def blocks_below(model: nn.Module, names: Sequence[str]) -> int:
    """How many whole blocks come before the first of some layers; 0 if one lies outside all blocks."""
    try:
        blocks = block_names(model)
    except ConfigError:
        return 0
    depths = [
        next((depth for depth, block in enumerate(blocks) if name.startswith(f"{block}.")), 0)
        for name in names
    ]
    return min(depths)
