"""The lower bound of a step's time: only its matrix products, in the engine.

These are all linear layers of the model with quantized activations, both products of attention, those of the
adapters, and the vocabulary head at the target tokens. A product reads random inputs of the right shape, and
all of its output but one row is discarded. A block's program is loaded once for every block, so that weights
come from memory as in a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from server_export.check.engine import bind_method
from server_export.checkpoint.random_models import random_model_config
from server_export.lower.program import write_program
from server_export.quantize.quantization import quantize_layers


@dataclass(frozen=True)
class Call:
    """A call: values of each of `rows` x `tokens` tokens, for copies, or for a value and its tangents.

    With tangents, attention has one product for the value and two for every tangent. In the backward pass,
    layers are transposed and at least int8, and each product of attention becomes two.
    """

    values: int
    rows: int
    tokens: int
    is_tangent: bool = False
    is_backward: bool = False

    @property
    def attention_products(self) -> int:
        """Number of products of rows by rows in attention."""
        return 2 * self.values - 1 if self.is_tangent else self.values * (2 if self.is_backward else 1)


class BlockProducts(nn.Module):
    """The products of one block; layers of equal width read the same input.

    Args:
        layers: widths (in, out) of its linear layers.
        adapted: widths of the adapted layers.
        rank: rank of the adapter.
    """

    def __init__(
        self, layers: Sequence[tuple[int, int]], adapted: Sequence[tuple[int, int]], rank: int
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*widths, bias=False) for widths in layers)
        self.lora_a = nn.ModuleList(nn.Linear(inner, rank, bias=False) for inner, _ in adapted)
        self.widths = sorted({inner for inner, _ in layers})

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_width = dict(zip(self.widths, inputs, strict=False))
        q, k, low, *lora_b = inputs[len(self.widths) :]
        outputs = [layer(by_width[layer.in_features]) for layer in (*self.layers, *self.lora_a)]
        scores = torch.bmm(q, k)
        outputs += [scores, torch.bmm(scores, q), *(torch.bmm(low, matrix) for matrix in lora_b)]
        return tuple(output[:1, :1] for output in outputs)


@dataclass(frozen=True)
class Products:
    """The loaded programs of all blocks and of the head."""

    programs: tuple[Any, ...]

    def __call__(self) -> float:
        """Compute all products and return the seconds."""
        begin = time.perf_counter()
        for program in self.programs:
            program()
        return time.perf_counter() - begin


def load_products(
    model: str, layers: int | None, scheme: str, call: Call, adapted: Sequence[str], rank: int, folder: Path
) -> Products:
    """Lower and load the products of a call of an architecture.

    Args:
        model: name in CONFIGURATIONS.
        layers: number of layers, to make the model shallower.
        scheme: quantization of the frozen layers.
        call: the call to compute.
        adapted: endings of the names of adapted layers.
        rank: rank of the adapter.
        folder: folder for the programs.
    """
    config = random_model_config(model, layers)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    linears = [(n, m) for n, m in outline.model.layers[0].named_modules() if isinstance(m, nn.Linear)]
    step = -1 if call.is_backward else 1
    widths = [(layer.in_features, layer.out_features)[::step] for _, layer in linears]
    adapted_widths = [
        pair for (name, _), pair in zip(linears, widths, strict=True) if name.endswith(tuple(adapted))
    ]
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = BlockProducts(widths, adapted_widths, rank)
    attention = call.attention_products * call.rows * config.num_attention_heads
    inputs = [torch.randn(call.values * call.rows, call.tokens, width) for width in block.widths]
    inputs += [
        torch.randn(attention, call.tokens, head_width),
        torch.randn(attention, head_width, call.tokens),
    ]
    inputs.append(torch.randn(call.values, call.rows * call.tokens, rank))
    inputs += [torch.randn(call.values, rank, outer) for _, outer in adapted_widths]
    head = BlockProducts([(config.hidden_size, config.vocab_size)[::step]], [], rank).layers[0]
    target_count = call.rows * (call.tokens - 1)
    states = (torch.randn(1, call.values * target_count, head.in_features),)
    programs = []
    for name, module, inputs_of_module, count in (
        ("block", block, tuple(inputs), config.num_hidden_layers),
        ("head", _OneRow(head), states, 1),
    ):
        module.eval().requires_grad_(False)
        if scheme != "fp32":
            # Vocabulary heads and the backward pass stay int8, as in an export.
            quantize_layers(module, "8da8w" if name == "head" or call.is_backward else scheme)
        path = folder / f"{name}.pte"
        write_program(path, {"forward": (module, inputs_of_module)})
        programs += [bind_method(path, "forward", inputs_of_module) for _ in range(count)]
    return Products(tuple(programs))


class _OneRow(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(states)[:, :1]
        return output
