"""Experts as transformers calls them, and each as a block: its own part of the layer's stacked weights.

transformers asks a registered function for what the experts of a layer say, as it does for attention. What an
expert computes is told by what its own such functions read of a module of experts: which weights it has, how
they lie, and `_apply_gate`, a private name that they all call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from server_export.graph.cutting import ModelBlock, whole_block
from server_export.graph.experts import EXPERTS
from server_export.graph.modules import remove_unused_attributes
from server_export.graph.plain import take_apart

NAME = "prge"
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_TRAITS = ("is_transposed", "has_gate", "has_bias", "has_post_expert_norm")


def register() -> None:
    """Make the function known to transformers as `prge`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _asked)


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """The modules of experts that transformers calls by such a function, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, trait) for trait in _TRAITS)
    }


def _asked(
    module: Any, states: torch.Tensor, index: torch.Tensor, shares: torch.Tensor, **_: Any
) -> torch.Tensor:
    """What the experts of a module say, an operator of the graph."""
    out = module.down_proj.shape[-1 if module.is_transposed else -2]
    said: torch.Tensor = EXPERTS(states, shares, index.float(), module.number, out)
    return said


class _Expert(nn.Module):
    """One expert of a layer: [..., in + 1] -> [..., out], what it says times the share behind what it sees.

    Its weights have the names of the layer's and the expert's number.
    """

    def __init__(self, name: str, module: Any, number: int) -> None:
        super().__init__()
        self.experts, self.path, self.number = [module], name, number
        for weight in weight_names(module):
            self._place(f"{name}.{weight}").register_parameter(
                str(number), nn.Parameter(torch.empty(module.get_parameter(weight).shape[1:], device="meta"))
            )
        if module.has_post_expert_norm:
            self._place(name).add_module("post_expert_norm", module.post_expert_norm)

    def _place(self, path: str) -> nn.Module:
        module: nn.Module = self
        for part in path.split("."):
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        (module,) = self.experts
        seen, share = state[..., :-1], state[..., -1:]
        wide = self._layer("gate_up_proj" if module.has_gate else "up_proj", seen)
        wide = module._apply_gate(wide) if module.has_gate else module.act_fn(wide)
        said = self._layer("down_proj", wide)
        if module.has_post_expert_norm:
            said = module.post_expert_norm(said)
        return said * share

    def _layer(self, name: str, source: torch.Tensor) -> torch.Tensor:
        weight = self.get_parameter(f"{self.path}.{name}.{self.number}")
        bias = f"{self.path}.{name}_bias.{self.number}"
        return F.linear(
            source,
            weight.t() if self.experts[0].is_transposed else weight,
            self.get_parameter(bias) if self.experts[0].has_bias else None,
        )


def weight_names(module: Any) -> list[str]:
    """Names of the weights that each expert of a module has a part of."""
    count = module.down_proj.shape[0]
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if name.removesuffix("_bias") in _WEIGHTS and parameter.shape[0] == count
    ]


def expert_blocks(name: str, module: Any, rows: int, tokens: int) -> Iterator[ModelBlock]:
    """The blocks of a layer's experts, in order; all are of one graph.

    Args:
        name: of the module, as graphs have it.
        module: of the experts.
        rows, tokens: of a state.
    """
    seen = module.get_parameter(weight_names(module)[0]).shape[-2 if module.is_transposed else -1]
    state = torch.empty(rows, tokens, seen + 1, device="meta")
    with torch.device("meta"), torch.no_grad():
        exported = torch.export.export(_Expert(name, module, 0).eval(), (state,), strict=False)
    graph_module = exported.module(check_guards=False)
    take_apart(graph_module)
    remove_unused_attributes(graph_module)
    output = graph_module.graph.output_node()
    output.args = (tuple(output.args[0]),)
    first = replace(whole_block(graph_module), is_expert=True)
    for number in range(module.down_proj.shape[0]):
        # A norm behind all experts is one, and has no number.
        names = (re.sub(r"\.0$", f".{number}", weight) for weight in first.weights)
        yield replace(first, weights=tuple(names))
