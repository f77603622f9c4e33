"""A model in numbers, taken from its configuration: what the arithmetic of costs starts from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from prge.contract import Contract
from prge.costs import Layer, Outline
from server_export.graph.rotation import rotates_by_product
from server_export.model.blocks import block_names
from server_export.model.loading import LoadedModel, parameter_count


def outline_of(
    loaded: LoadedModel, contract: Contract, blocks_below: int, shorter: Sequence[int] = ()
) -> Outline:
    """The outline of a model, with or without its weights, as the program of a contract uses it.

    `shorter` are the lengths that the program has methods for besides; each has its own tables of positions.

    Raises:
        ConfigError: it has no list of blocks.
    """
    model, config = loaded.model, loaded.config
    blocks = block_names(model)
    head = model.get_output_embeddings() if loaded.is_decoder else None
    table = model.get_input_embeddings().weight
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }
    weights = {id(layer.weight) for layer in [*layers.values(), *([head] if head is not None else [])]}
    other = sum(
        parameter.numel()
        for parameter in model.parameters()
        if id(parameter) not in weights and parameter is not table
    )
    heads = int(getattr(config, "num_attention_heads", 1))
    head_width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    lengths = (*shorter, contract.sequence_length)
    return Outline(
        width=int(config.hidden_size),
        blocks=len(blocks),
        blocks_below=blocks_below,
        heads=heads,
        head_width=head_width,
        layers=_grouped(layers, blocks[:blocks_below]),
        head=_shape(head) if isinstance(head, nn.Linear) else None,
        table_numbers=table.numel(),
        other_numbers=other + sum(_position_numbers(model, length, head_width) for length in lengths),
        parameters=parameter_count(model),
    )


def _position_numbers(model: nn.Module, length: int, width: int) -> int:
    """What a mask and the rotations of queries and keys take: tables of cosines and sines, or matrices."""
    if not any("rotary" in name for name, _ in model.named_modules()):
        return length * length
    return length * length + 2 * length * width * (width if rotates_by_product(length, width) else 1)


def _grouped(layers: dict[str, nn.Linear], below: Sequence[str]) -> tuple[Layer, ...]:
    """Layers of one shape together."""
    prefixes = tuple(f"{block}." for block in below)
    shapes = Counter(_shape(layer, name.startswith(prefixes)) for name, layer in layers.items())
    return tuple(
        Layer(shape.inputs, shape.outputs, count, shape.bias, shape.below) for shape, count in shapes.items()
    )


def _shape(layer: nn.Linear, below: bool = False) -> Layer:
    return Layer(layer.in_features, layer.out_features, 1, layer.bias is not None, below)
