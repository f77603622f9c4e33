"""The sizes of a model by its configuration, from which costs are computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from prge.model_spec import AdaptedModule
from prge.training.costs import LayerShape, ModelSizes
from server_export.adapter.initial_adapter import StartAdapter
from server_export.adapter.repeated_blocks import block_names, blocks_below
from server_export.checkpoint.experts import expert_layers, weight_names
from server_export.checkpoint.loading import parameter_count

# Names of the activation function in configurations.
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")


def model_sizes_of(start: StartAdapter, longest: int) -> ModelSizes:
    """Return the sizes of an adapter's model, with or without weights.

    Args:
        start: the adapter and its model, whose layers are linear.
        longest: the number of tokens of the longest row.

    Raises:
        ConfigError: the model has no list of blocks.
    """
    model, config = start.loaded.model, start.loaded.config
    blocks = block_names(model)
    head = model.get_output_embeddings() if start.loaded.is_decoder else None
    tables = _tables(model)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }
    weights = {id(layer.weight) for layer in [*layers.values(), *([head] if head is not None else [])]}
    biases = {id(layer.bias) for layer in layers.values()}
    experts = [*_expert_layers(model, blocks_below(model, list(start.lora_a)))]
    other = sum(
        parameter.numel()
        for parameter in model.parameters()
        if id(parameter) not in weights | biases | {*map(id, tables)}
    ) - sum(layer.numbers for layer in experts)
    heads = _largest(config, "num_attention_heads") or 1
    head_width = _largest(config, "head_dim") or config.hidden_size // heads
    below = blocks_below(model, list(start.lora_a))
    head_shape = _shape(head) if isinstance(head, nn.Linear) else None
    return ModelSizes(
        width=int(config.hidden_size),
        blocks=len(blocks),
        blocks_below=below,
        heads=heads,
        head_width=head_width,
        key_width=(_largest(config, "num_key_value_heads") or heads) * head_width,
        gelu=any("gelu" in str(getattr(config, name, "")) for name in _ACTIVATIONS),
        layers=(*_grouped_layers(layers, blocks[:below]), *experts),
        head=head_shape,
        modules=tuple(
            AdaptedModule(name, len(matrix), matrix.shape[1], len(start.lora_b[name]), start.trains_a)
            for name, matrix in start.lora_a.items()
        ),
        table_numbers=sum(table.numel() for table in tables),
        other_numbers=other,
        parameters=parameter_count(model),
        longest=longest,
    )


def _tables(model: nn.Module) -> list[torch.Tensor]:
    """Return the tables of tokens: the embedding, and others with more than half as many rows as it has."""
    table = model.get_input_embeddings().weight
    others = (module.weight for module in model.modules() if isinstance(module, nn.Embedding))
    return [table, *(other for other in others if other is not table and 2 * len(other) > len(table))]


def _expert_layers(model: nn.Module, below: int) -> Iterator[LayerShape]:
    """Yield the layers of experts, with equal shapes counted together."""
    prefixes = tuple(f"{block}." for block in block_names(model)[:below])
    shapes = Counter[LayerShape]()
    for name, module in expert_layers(model).items():
        for weight in weight_names(module):
            count, *shape = module.get_parameter(weight).shape
            if len(shape) == 2:
                outputs, inputs = reversed(shape) if module.is_transposed else shape
                shapes[LayerShape(inputs, outputs, 1, False, name.startswith(prefixes), True)] += count
    return (replace(layer, count=count) for layer, count in shapes.items())


def _largest(config: Any, name: str) -> int:
    """Return a number of a configuration, the largest if layers have their own; 0 if it has none."""
    is_per_layer = name in (getattr(config, "per_layer_attributes", None) or ())
    return max(
        int(getattr(each, name, None) or 0)
        for each in (config.per_layer_config if is_per_layer else [config])
    )


def _grouped_layers(layers: dict[str, nn.Linear], below: Sequence[str]) -> tuple[LayerShape, ...]:
    """Return layers with equal shapes counted together."""
    prefixes = tuple(f"{block}." for block in below)
    shapes = Counter(_shape(layer, name.startswith(prefixes)) for name, layer in layers.items())
    return tuple(
        LayerShape(shape.inputs, shape.outputs, count, shape.bias, shape.below)
        for shape, count in shapes.items()
    )


def _shape(layer: nn.Linear, below: bool = False) -> LayerShape:
    return LayerShape(layer.in_features, layer.out_features, 1, layer.bias is not None, below)
