"""Find the linear layers of a model's blocks by structure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from prge.errors import ConfigError
from prge.objectives.examples import Example
from server_export.adapter.repeated_blocks import block_names

Linears = Mapping[str, nn.Linear]


def block_linears(model: nn.Module) -> list[Linears]:
    """Return the linear layers of every block by path, from the bottom block up, in module order.

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
    """Return the linear layers of every block's feed-forward network by path: all outside its attention.

    Raises:
        ConfigError: the model has no blocks, or a block has no feed-forward network.
    """
    blocks: list[Linears] = [
        # Widths don't distinguish them: an attention may be wider than the model.
        {name: layer for name, layer in layers.items() if "att" not in name.rpartition(".")[0].lower()}
        for layers in block_linears(model)
    ]
    if not all(len(layers) > 1 for layers in blocks):
        raise ConfigError(
            "Cannot find the model's feed-forward networks:",
            [f"a block of {type(model).__name__} has fewer than two linear layers outside its attention"],
            remedy="Use another method.",
            code="unknown-feed-forward",
        )
    return blocks


def merge_layers(blocks: Iterable[Linears]) -> dict[str, nn.Linear]:
    """Return the layers of several blocks in one mapping."""
    return {name: layer for layers in blocks for name, layer in layers.items()}


@contextmanager
def record_inputs(layers: Linears, measure: Callable[[torch.Tensor], float]) -> Iterator[dict[str, float]]:
    """Record the largest value of a function of each layer's inputs while the context is open."""
    largest = dict.fromkeys(layers, 0.0)

    def record(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            largest[name] = max(largest[name], measure(args[0]))

        return hook

    hooks = [layer.register_forward_pre_hook(record(name)) for name, layer in layers.items()]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def shuffled_batches(examples: Sequence[Example], batch_size: int, seed: int) -> Iterator[Sequence[Example]]:
    """Yield batches of examples without end, shuffled anew in every epoch.

    A batch has all examples if there are fewer than `batch_size`.
    """
    order = list(range(len(examples)))
    rng = random.Random(seed)
    size = min(batch_size, len(order))
    while True:
        rng.shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            yield [examples[index] for index in order[start : start + size]]
