"""Mixture-of-experts modules of a model, and the parameters that stack their experts' weights."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

_STACKED_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
# Attributes that transformers' decorator for experts sets on a module.
_EXPERT_ATTRIBUTES = ("is_transposed", "has_gate", "has_bias", "has_post_expert_norm")


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """Return a model's modules of experts that can be exported, by name.

    These are the modules that transformers calls through its common interface for experts, and dense ones
    (see `is_dense_experts`), which get the attributes of that interface.
    """
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if is_dense_experts(module):
            module.is_transposed = True
            module.has_gate, module.has_bias, module.has_post_expert_norm = True, False, False
        if all(hasattr(module, attribute) for attribute in _EXPERT_ATTRIBUTES):
            layers[name] = module
    return layers


def is_dense_experts(module: Any) -> bool:
    """Return whether every expert of a module computes every token.

    The weights of such a module are `gate_up_proj` [experts, in, 2 x inner] and `down_proj`
    [experts, inner, out].
    """
    if {name for name, _ in module.named_parameters(recurse=False)} != {"gate_up_proj", "down_proj"}:
        return False
    gate_up, down = module.gate_up_proj.shape, module.down_proj.shape
    arguments = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    are_stacks = len(gate_up) == len(down) == 3 and gate_up[0] == down[0]
    return len(arguments) == 1 and are_stacks and gate_up[2] == 2 * down[1] and hasattr(module, "act_fn")


def weight_names(module: Any) -> list[str]:
    """Return the names of the parameters that stack the weights of all experts of a module."""
    count = module.down_proj.shape[0]
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if name.removesuffix("_bias") in _STACKED_WEIGHTS and parameter.shape[0] == count
    ]
