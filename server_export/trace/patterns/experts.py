"""Mixtures of experts: each expert becomes a block with its own slice of the layer's stacked weights.

transformers calls a registered function for the experts of a layer, as it does for attention. The computation
of an expert follows from the attributes that transformers' own functions read of a module of experts: which
weights it has, their layout, and `_apply_gate`, a private name that all of them call. For experts that see
all tokens it follows from the shapes of their weights. It is verified when blocks are compared with the
model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from server_export.checkpoint.experts import expert_layers, is_dense_experts, weight_names
from server_export.ir.decomposition import decompose
from server_export.ir.markers import TOKENS
from server_export.ir.modules import remove_unused_attributes
from server_export.trace.cutting import ModelBlock, whole_block
from server_export.trace.experts import EXPERTS
from server_export.trace.model_graph import WHOLE_PREFIX, TracedModel
from server_export.trace.patterns import Pattern, register

NAME = "prge"


def _prepare(traced: TracedModel) -> None:
    """Make a model's experts operators of its graph, in place."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    layers = [*expert_layers(traced.model).values()]
    ALL_EXPERTS_FUNCTIONS.register(NAME, _call_experts)
    for number, module in enumerate(layers):
        module.number = number
    if any(not is_dense_experts(module) for module in layers):
        traced.model.set_experts_implementation(NAME)


def _call_experts(
    module: Any, states: torch.Tensor, index: torch.Tensor, shares: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Return the output of the experts of a module, as an operator of the graph."""
    output: torch.Tensor = EXPERTS(states, shares, index.float(), module.number, width_of(module))
    return output


def width_of(module: Any) -> int:
    """Return the output width of an expert."""
    return int(module.down_proj.shape[-1 if module.is_transposed else -2])


class _Expert(nn.Module):
    """One expert of a layer: [..., in + 1] -> [..., out]; the last input element is the share.

    The output is multiplied by the share; if experts see all tokens, the input is multiplied instead. The
    weights have the names of the layer's weights, followed by the number of the expert.
    """

    def __init__(self, name: str, module: Any, number: int) -> None:
        super().__init__()
        self.experts, self.path, self.number = [module], name, number
        for weight in weight_names(module):
            self._submodule(f"{name}.{weight}").register_parameter(
                str(number), nn.Parameter(torch.empty(module.get_parameter(weight).shape[1:], device="meta"))
            )
        if module.has_post_expert_norm:
            self._submodule(name).add_module("post_expert_norm", module.post_expert_norm)

    def _submodule(self, path: str) -> nn.Module:
        module: nn.Module = self
        for part in path.split("."):
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        (module,) = self.experts
        expert_input, share = hidden[..., :-1], hidden[..., -1:]
        if is_dense_experts(module):
            gate, up = self._linear("gate_up_proj", expert_input * share).chunk(2, -1)
            return self._linear("down_proj", module.act_fn(gate) * up)
        intermediate = self._linear("gate_up_proj" if module.has_gate else "up_proj", expert_input)
        intermediate = module._apply_gate(intermediate) if module.has_gate else module.act_fn(intermediate)
        output = self._linear("down_proj", intermediate)
        if module.has_post_expert_norm:
            output = module.post_expert_norm(output)
        return output * share

    def _linear(self, name: str, source: torch.Tensor) -> torch.Tensor:
        weight = self.get_parameter(f"{self.path}.{name}.{self.number}")
        bias = f"{self.path}.{name}_bias.{self.number}"
        return F.linear(
            source,
            weight.t() if self.experts[0].is_transposed else weight,
            self.get_parameter(bias) if self.experts[0].has_bias else None,
        )


def expert_blocks(name: str, module: Any, rows: int, tokens: int) -> Iterator[ModelBlock]:
    """Yield the blocks of a layer's experts in order; all have the same graph.

    Args:
        name: the name of the module in graphs.
        module: the module of the experts.
        rows, tokens: the sizes of the hidden states.
    """
    width = module.get_parameter(weight_names(module)[0]).shape[-2 if module.is_transposed else -1]
    hidden = torch.empty(rows, tokens, width + 1, device="meta")
    with torch.device("meta"), torch.no_grad():
        exported = torch.export.export(_Expert(name, module, 0).eval(), (hidden,), strict=False)
    graph_module = exported.module(check_guards=False)
    decompose(graph_module)
    remove_unused_attributes(graph_module)
    output = graph_module.graph.output_node()
    output.args = (tuple(output.args[0]),)
    first = replace(whole_block(graph_module), is_expert=True)
    for number in range(module.down_proj.shape[0]):
        # All experts share the norm after them, whose name has no number.
        names = (re.sub(r"\.0$", f".{number}", weight) for weight in first.weights)
        yield replace(first, weights=tuple(names))


def _with_experts(model: Any, blocks: Sequence[ModelBlock], rows: int) -> list[ModelBlock]:
    """Insert the blocks of experts after the blocks that route to them."""
    layers = [*expert_layers(model).items()]
    result = list[ModelBlock]()
    for block in blocks:
        result.append(block)
        if block.experts is not None:
            name, module = layers[block.experts]
            result += expert_blocks(WHOLE_PREFIX + name, module, rows, TOKENS)
    return result


register(
    Pattern(
        "experts",
        serves="mixtures of experts, each of which is a block of its own",
        model_types=tuple(
            """
            afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3
            deepseek_v32 dots1 dots3_note dots3_note_text ernie4_5_moe exaone_moe flex_olmo glm4_moe
            glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid
            granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 inkling2_text inkling_text jamba kimi_linear
            kolibri1 laguna lfm2_moe mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text mixtral
            nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next
            qwen4_exp qwen4_exp_text solar_open
            """.split()
        ),
        example="olmoe",
        attributes=("has_post_expert_norm", "gate_up_proj"),
        matches=lambda traced: bool(expert_layers(traced.model)),
        unadapted=expert_layers,
        prepare=_prepare,
        blocks=_with_experts,
    )
)
