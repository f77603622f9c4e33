"""What the baselines change of a model, found by structure: the linear layers of its blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from prge.errors import ConfigError
from prge.learning.examples import Example
from server_export.adapter.blocks import block_names

Linears = Mapping[str, nn.Linear]


def block_linears(model: nn.Module) -> list[Linears]:
    """The linear layers of every block by path, blocks from bottom to top, layers in module order.

    Raises:
        ConfigError: the model has no list of blocks.
    """
    return [
        {
            f"{block}.{name}": module
            for name, module in model.get_submodule(block).named_modules()
            if isinstance(module, nn.Linear)
        }
        for block in block_names(model)
    ]


def feed_forward_linears(model: nn.Module) -> list[Linears]:
    """The linear layers of every block's feed-forward network by path: all that aren't below an attention.

    Raises:
        ConfigError: the model has no blocks, or a block has no feed-forward network.
    """
    blocks: list[Linears] = [
        # Widths don't tell them apart: an attention's may be wider than the model.
        {name: layer for name, layer in layers.items() if "att" not in name.rpartition(".")[0].lower()}
        for layers in block_linears(model)
    ]
    if not all(len(layers) > 1 for layers in blocks):
        raise ConfigError(
            "the model's feed-forward networks can't be found:",
            [f"a block of {type(model).__name__} has fewer than two linear layers outside its attention"],
            remedy="compare with another method",
            code="unknown-feed-forward",
        )
    return blocks


def merged(blocks: Iterable[Linears]) -> dict[str, nn.Linear]:
    """The layers of some blocks in one mapping."""
    return {name: layer for layers in blocks for name, layer in layers.items()}


@contextmanager
def inputs_noted(layers: Linears, figure: Callable[[torch.Tensor], float]) -> Iterator[dict[str, float]]:
    """Inside the block, the largest figure of the inputs that each layer had."""
    largest = dict.fromkeys(layers, 0.0)

    def note(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            largest[name] = max(largest[name], figure(args[0]))

        return hook

    hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def shuffled_batches(examples: Sequence[Example], batch_size: int, seed: int) -> Iterator[Sequence[Example]]:
    """Batches of some examples without end, in a new order on every pass; of all where they are fewer."""
    order = list(range(len(examples)))
    draw = random.Random(seed)
    size = min(batch_size, len(order))
    while True:
        draw.shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            yield [examples[index] for index in order[start : start + size]]
