"""The blocks of a tiny model as graphs of their own, and a chain of them that computes what the model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.fx import GraphModule

from server_export.lower.lowering import rewritten_graph
from server_export.model import attention
from server_export.model.lora_fa import CallInputs
from server_export.model.program import BuiltProgram, example_inputs
from server_export.model.readout import log_probabilities, pool_mean
from tests.server_export.programs import build

# The linear layers inside of blocks, of every architecture.
IN_BLOCKS = (
    r".*(layers|layer|h)\.\d+\..*(_proj|c_attn|c_fc|fc1|fc2|query|key|value|dense|[qkvt]_lin|lin1|lin2)"
)
_LAST_NORMS = ("model.norm", "model.decoder.final_layer_norm", "transformer.ln_f")

Tensors = dict[str, torch.Tensor]


class BlockModule(nn.Module):
    """One of the model's blocks, with what it takes beside the state as inputs."""

    def __init__(self, layer: nn.Module, names: Sequence[str], inputs: CallInputs) -> None:
        super().__init__()
        self.layer = layer
        self.names = names
        self.inputs = inputs
        self.causal = [module for module in layer.modules() if getattr(module, "is_causal", False)]

    def forward(self, state: torch.Tensor, tables: Tensors, lora_b: Tensors) -> torch.Tensor:
        """state [rows, tokens, width], lora_b by name [copies, rank, out] -> state."""
        self.inputs.lora_b = {name: lora_b[_key(name)] for name in self.names}
        rotary = {"position_embeddings": (tables["cos"], tables["sin"])} if "cos" in tables else {}
        for module in self.causal:
            module.is_causal = False
        found = self.layer(state, attention_mask=tables["mask"], **rotary)
        for module in self.causal:
            module.is_causal = True
        return found[0] if isinstance(found, tuple) else found


class DecoderHead(nn.Module):
    """Log-probabilities of targets after the last block."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        modules = dict(model.named_modules())
        self.norm = next(modules[name] for name in _LAST_NORMS if name in modules)
        self.project = modules.get("model.decoder.project_out", nn.Identity())
        self.head = model.get_output_embeddings().head
        self.cap = getattr(model.config, "final_logit_softcapping", None)

    def forward(self, state: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """state [n, width], targets i64 [n] -> f32 [n]."""
        logits = self.head(self.project(self.norm(state)))
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return log_probabilities(logits, targets)


class EncoderHead(nn.Module):
    """Mean of the states after the last block."""

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """state [rows, tokens, width], mask f32 [rows, tokens] -> f32 [rows, width]."""
        return pool_mean(state, mask)


@dataclass(frozen=True)
class Block:
    """A block as a torch module, its tables and its adapter [1, rank, out] by input name."""

    module: BlockModule
    state: torch.Tensor
    tables: Tensors
    lora_b: Tensors

    @property
    def adapter(self) -> list[str]:
        """Names of the graph's inputs that are the adapter's."""
        return [f"lora_b_{key}" for key in self.lora_b]

    def graph(self) -> GraphModule:
        """state, tables_<name>, lora_b_<module> -> state"""
        tables = {name: table.clone() for name, table in self.tables.items()}
        return rewritten_graph(self.module, (self.state, tables, self.lora_b))

    def inputs(self) -> Tensors:
        """Tables and adapter as the graphs of roles take them."""
        tables = {f"tables_{name}": table for name, table in self.tables.items()}
        return tables | {f"lora_b_{key}": matrix[0] for key, matrix in self.lora_b.items()}


class Blocks:
    """A tiny model of an estimator, taken apart; `inputs` are its program's, `state` what enters block 0."""

    def __init__(self, architecture: str, estimator: str, **changes: Any) -> None:
        settings = {"target_modules": [IN_BLOCKS], **changes}
        self.built: BuiltProgram = build(architecture, estimator=estimator, **settings)
        self.contract = self.built.contract
        values = example_inputs(self.contract, seed=3, lora_b_scale=0.1)
        self.inputs = {spec.name: value for spec, value in zip(self.contract.inputs, values, strict=True)}
        self.values = values
        model = self.built.module.model
        layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        calls = self._calls(layers)
        self.state = calls[0][0]
        prefix = next(name for name, module in model.named_modules() if module is layers)
        self.blocks = [
            self._block(layer, f"{prefix}.{number}.", *call)
            for number, (layer, call) in enumerate(zip(layers, calls, strict=True))
        ]
        self.head = EncoderHead() if self.contract.is_encoder else DecoderHead(model)

    def _calls(self, layers: nn.ModuleList) -> list[tuple[torch.Tensor, Tensors]]:
        """What every block is called with in the whole model."""
        calls: list[tuple[torch.Tensor, Tensors]] = []
        make_mask = attention.causal_mask

        def before(module: nn.Module, arguments: Any, named: Any) -> None:
            tables = {}
            rest = [*arguments[1:], *named.values()]
            if "position_embeddings" in named:
                tables = dict(zip(("cos", "sin"), named["position_embeddings"], strict=True))
            masks = [value for value in rest if isinstance(value, torch.Tensor) and value.dim() == 4]
            tables |= {"mask": mask for mask in masks}
            calls.append((arguments[0], tables))

        def causal_mask(*arguments: Any) -> torch.Tensor:
            calls[-1][1]["mask"] = make_mask(*arguments)
            return calls[-1][1]["mask"]

        hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
        stack = self.built.module.contract
        with torch.no_grad(), patch.object(attention, "causal_mask", causal_mask):
            adapter = [matrix[None] for name, matrix in self.inputs.items() if name.startswith("lora_b.")]
            self.built.module(*self.values[: len(stack.inputs) - len(adapter)], *adapter)
        for hook in hooks:
            hook.remove()
        return calls

    def _block(self, layer: nn.Module, prefix: str, state: torch.Tensor, tables: Tensors) -> Block:
        names = [module.name for module in self.contract.modules if module.name.startswith(prefix)]
        lora_b = {_key(name): self.inputs[f"lora_b.{name}"][None] for name in names}
        return Block(BlockModule(layer, names, self.built.module.inputs), state, tables, lora_b)

    def head_graph(self, count: int) -> GraphModule:
        """The head's graph for `count` states of a decoder; an encoder's has all rows."""
        if self.contract.is_encoder:
            return rewritten_graph(self.head, (self.state, self.inputs["attention_mask"].float()))
        state = torch.zeros(count, self.state.shape[-1])
        return rewritten_graph(self.head, (state, torch.zeros(count, dtype=torch.int64)))

    def at_positions(self, state: torch.Tensor) -> torch.Tensor:
        """States [..., rows, tokens, width] -> [..., rows x positions, width], as a host picks them."""
        rows = torch.arange(self.contract.rows).unsqueeze(1)
        return state[..., rows, self.inputs["positions"], :].flatten(-3, -2)


def call(graph_module: GraphModule, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a graph answers for inputs by name; it takes all of its own and needn't take all that are given."""
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        found = graph_module(*(values[name] for name in names))
    return found if isinstance(found, tuple) else (found,)


def _key(name: str) -> str:
    return name.replace(".", "_")
