"""The least that a step can cost: its matrix products on its rows, and nothing else, in the engine.

Every linear layer of the model with the quantization of its activations, both products of attention, those
of the adapters, and the vocabulary head at the target tokens. A product reads inputs of the right shape
instead of what the model would have computed before it, and all of its answer but one row is thrown away. A
block's program is loaded once for every block, so that weights come from memory as a step's do.
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
    """What one call computes: values of each of `rows` x `tokens` tokens, copies or a value and its tangents.

    With tangents attention has a product for the values, and two for every tangent. On the way back layers
    are transposed, in int8 at least, and each product of attention has two.
    """

    values: int
    rows: int
    tokens: int
    is_tangent: bool = False
    is_back: bool = False

    @property
    def attention_products(self) -> int:
        """How often attention multiplies rows by rows."""
        return 2 * self.values - 1 if self.is_tangent else self.values * (2 if self.is_back else 1)


class BlockProducts(nn.Module):
    """The products of one block; the layers of equal width read the same input.

    Args:
        layers: widths (in, out) of its linear layers.
        adapted: those with an adapter.
        rank: of the adapter.
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
        answers = [layer(by_width[layer.in_features]) for layer in (*self.layers, *self.lora_a)]
        scores = torch.bmm(q, k)
        answers += [scores, torch.bmm(scores, q), *(torch.bmm(low, matrix) for matrix in lora_b)]
        return tuple(answer[:1, :1] for answer in answers)


@dataclass(frozen=True)
class Products:
    """Loaded programs of all blocks and of the head."""

    programs: tuple[Any, ...]

    def __call__(self) -> float:
        """Compute all products; seconds."""
        begin = time.perf_counter()
        for program in self.programs:
            program()
        return time.perf_counter() - begin


def load_products(
    model: str, layers: int | None, scheme: str, call: Call, adapted: Sequence[str], rank: int, folder: Path
) -> Products:
    """Lower and load the products of a call of an architecture.

    Args:
        model: of CONFIGURATIONS.
        layers: makes it shallower.
        scheme: of the frozen layers.
        call: what is computed.
        adapted: endings of the names of adapted layers.
        rank: of the adapter.
        folder: for the programs.
    """
    config = random_model_config(model, layers)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    named = [(n, m) for n, m in outline.model.layers[0].named_modules() if isinstance(m, nn.Linear)]
    way = -1 if call.is_back else 1
    widths = [(layer.in_features, layer.out_features)[::way] for _, layer in named]
    chosen = [pair for (name, _), pair in zip(named, widths, strict=True) if name.endswith(tuple(adapted))]
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = BlockProducts(widths, chosen, rank)
    attention = call.attention_products * call.rows * config.num_attention_heads
    inputs = [torch.randn(call.values * call.rows, call.tokens, width) for width in block.widths]
    inputs += [
        torch.randn(attention, call.tokens, head_width),
        torch.randn(attention, head_width, call.tokens),
    ]
    inputs.append(torch.randn(call.values, call.rows * call.tokens, rank))
    inputs += [torch.randn(call.values, rank, outer) for _, outer in chosen]
    head = BlockProducts([(config.hidden_size, config.vocab_size)[::way]], [], rank).layers[0]
    asked = call.rows * (call.tokens - 1)
    states = (torch.randn(1, call.values * asked, head.in_features),)
    programs = []
    for name, module, given, count in (
        ("block", block, tuple(inputs), config.num_hidden_layers),
        ("head", _OneRow(head), states, 1),
    ):
        module.eval().requires_grad_(False)
        if scheme != "fp32":
            # Vocabulary heads and the way back stay int8, as in an export.
            quantize_layers(module, "8da8w" if name == "head" or call.is_back else scheme)
        path = folder / f"{name}.pte"
        write_program(path, {"forward": (module, given)})
        programs += [bind_method(path, "forward", given) for _ in range(count)]
    return Products(tuple(programs))


class _OneRow(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(states)[:, :1]
        return answer
