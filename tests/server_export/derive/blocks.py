"""The blocks of a tiny model, each as a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from server_export.lower.lowering import rewritten_graph
from server_export.model import attention
from server_export.model.lora_fa import CallInputs
from server_export.model.program import BuiltProgram, example_inputs
from server_export.model.readout import log_probabilities, pool_mean
from tests.server_export.derive.sizes import Sizes
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
        """state [rows, tokens, width], mask i64 [rows, tokens] -> f32 [rows, width]."""
        return pool_mean(state, mask.to(state.dtype))


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

    def graph(self, sizes: Sizes | None = None) -> GraphModule:
        """state, tables_<name>, lora_b_<module> -> state, traced with other sizes than its own if given."""
        inputs = self.state, self.tables, self.lora_b
        return rewritten_graph(self.module, tree_map(_copied(self.state, sizes), inputs))

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
            if masks:
                tables["mask"] = masks[0]
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

    @property
    def states(self) -> int:
        """Second to last dimension of what the head takes: a decoder's picked states, an encoder's tokens."""
        picked = self.contract.rows * self.contract.positions
        return self.state.shape[1] if self.contract.is_encoder else picked

    def head_graph(self, sizes: Sizes | None = None) -> GraphModule:
        """state, targets -> logprobs, or state, mask -> pooled"""
        state, other = self.state, self.inputs.get("attention_mask")
        if other is None:
            state, other = self.at_positions(state), self.inputs["targets"].flatten()
        copied = _copied(state if self.contract.is_encoder else state[None], sizes)
        return rewritten_graph(self.head, (copied(state), copied(other)))

    def head_inputs(self) -> Tensors:
        """What the head takes beside the state."""
        if self.contract.is_encoder:
            return {"mask": self.inputs["attention_mask"]}
        return {"targets": self.inputs["targets"].flatten()}

    def at_positions(self, state: torch.Tensor) -> torch.Tensor:
        """States [..., rows, tokens, width] -> [..., rows x positions, width], as a host picks them."""
        rows = torch.arange(self.contract.rows).unsqueeze(1)
        return state[..., rows, self.inputs["positions"], :].flatten(-3, -2)

    def from_positions(self, slope: torch.Tensor) -> torch.Tensor:
        """Slopes of the picked states added at their places, [rows, tokens, width]."""
        rows = torch.arange(self.contract.rows).repeat_interleave(self.contract.positions)
        places = rows, self.inputs["positions"].flatten()
        return torch.zeros_like(self.state).index_put(places, slope, accumulate=True)


def call(graph_module: GraphModule, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a graph answers for inputs by name; more may be given than it takes."""
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        found = graph_module(*(values[name] for name in names))
    return found if isinstance(found, tuple) else (found,)


def _copied(state: torch.Tensor, sizes: Sizes | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes of a block's input one of its own, or one without memory of other rows and tokens."""
    if sizes is None:
        return torch.clone
    rows, tokens = state.shape[:2]
    mode, other = FakeTensorMode(), {rows: sizes.rows, tokens: sizes.tokens}

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            shape = [other.get(size, size) for size in tensor.shape]
            return torch.empty(shape, dtype=tensor.dtype)

    return empty


def _key(name: str) -> str:
    return name.replace(".", "_")
