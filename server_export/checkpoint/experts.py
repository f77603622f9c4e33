"""A model's modules of experts, and the weights that each expert has a part of."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_TRAITS = ("is_transposed", "has_gate", "has_bias", "has_post_expert_norm")


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """The modules of experts that transformers calls by such a function, or with all tokens, by name."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if is_dense_experts(module):
            module.is_transposed = True
            module.has_gate, module.has_bias, module.has_post_expert_norm = True, False, False
        if all(hasattr(module, trait) for trait in _TRAITS):
            found[name] = module
    return found


def is_dense_experts(module: Any) -> bool:
    """Whether experts see all tokens; weights are [experts, in, 2 x inner] and [experts, inner, out]."""
    if {name for name, _ in module.named_parameters(recurse=False)} != {"gate_up_proj", "down_proj"}:
        return False
    wide, narrow = module.gate_up_proj.shape, module.down_proj.shape
    taken = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    are_stacks = len(wide) == len(narrow) == 3 and wide[0] == narrow[0]
    return len(taken) == 1 and are_stacks and wide[2] == 2 * narrow[1] and hasattr(module, "act_fn")


def weight_names(module: Any) -> list[str]:
    """Names of the parameters that stack the weights of all experts of a module."""
    count = module.down_proj.shape[0]
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if name.removesuffix("_bias") in _WEIGHTS and parameter.shape[0] == count
    ]
