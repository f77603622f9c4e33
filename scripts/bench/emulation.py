"""The gradient of an adapter whose frozen quantized layers go back by one weight or another, in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F
from torch import nn

from server_export.model.loading import load_model
from server_export.model.lora_fa import CallInputs, initial_lora_a, insert_lora, replace_module
from server_export.model.quantization import GROUP_SIZE, int4_weight, int8_weight, quantize_layers

ROUND = torch.ops.quantized_decomposed
INT8 = (-128, 127, torch.int8)
WAYS = {
    "8da4w": ("int8", "int4", "exact + slopes", "int8 + slopes", "int4 + slopes"),
    "8da8w": ("int8", "exact + slopes", "int8 + slopes", "forward's + slopes"),
}


def rounded(slope: torch.Tensor) -> torch.Tensor:
    """To int8 by token, and back."""
    chosen = ROUND.choose_qparams_per_token_asymmetric.default(slope, torch.int8)
    codes = ROUND.quantize_per_token.default(slope, *chosen, *INT8)
    answer: torch.Tensor = ROUND.dequantize_per_token.default(codes, *chosen, *INT8, torch.float32)
    return answer


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    """Of all numbers."""
    return F.cosine_similarity(first.double().flatten(), second.double().flatten(), dim=0).item()


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, back: Any) -> torch.Tensor:
        ctx.back = back
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        return ctx.back(*slopes), None, None


class Emulated(nn.Module):
    """A frozen layer: forwards as it is, and back as `way` says."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight, self.way = weight, "exact"
        values = weight.dequantize().t().contiguous()
        # XNNPACK takes int4 in groups only, and what is int8 forwards stays so.
        is_int4 = weight.scale.shape[1] > 1 and values.shape[1] % GROUP_SIZE == 0
        int8 = int8_weight(values).dequantize()
        self.backs = {"exact": values, "int8": int8}
        self.backs["int4"] = int4_weight(values).dequantize() if is_int4 else int8
        self.backs["forward's"] = weight.qdata.t().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = _There.apply(x, self.weight, self._back)
        return answer

    def _back(self, slope: torch.Tensor) -> torch.Tensor:
        name, _, slopes = self.way.partition(" + ")
        matrix = self.backs[name]
        if name == "forward's":
            slope = slope * self.weight.scale.flatten()
        if slopes:
            # PyTorch has a least scale that is larger than some slopes; the engine's is far smaller.
            peak = slope.abs().amax(-1, keepdim=True).clamp_min(torch.finfo().tiny)
            slope = rounded(slope / peak) * peak
        return F.linear(slope, matrix)


def gradient_figures(model_name: str, scheme: str, rows: int, tokens: int) -> dict[str, dict[str, float]]:
    """Every way back of all layers of a model, with an adapter of rank 8 on queries and values."""
    torch.manual_seed(0)
    model: Any = load_model(model_name).model
    start = torch.full((rows, 1), model.config.bos_token_id)
    drawn = model.generate(start, do_sample=True, min_new_tokens=tokens - 1, max_new_tokens=tokens - 1)
    quantize_layers(model, scheme)
    adapted = [name for name, _ in model.named_modules() if name.endswith(("q_proj", "v_proj"))]
    inputs = CallInputs()
    for module in insert_lora(model, initial_lora_a(model, adapted, 8, 0), inputs):
        inputs.adapter[f"lora_b.{module.name}"] = (
            torch.randn(1, 8, module.out_features) * 0.01
        ).requires_grad_()
    layers = {n: Emulated(m.weight.data) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, layer in layers.items():
        replace_module(model, name, layer)

    def gradient(way: str) -> tuple[torch.Tensor, ...]:
        for layer in layers.values():
            layer.way = way
        return torch.autograd.grad(model(drawn, labels=drawn).loss, list(inputs.adapter.values()))

    exact, figures = gradient("exact"), {}
    for way in WAYS[scheme]:
        found = gradient(way)
        figures[way] = {
            "cosine": cosine(*(torch.cat([part.flatten() for part in parts]) for parts in (found, exact))),
            "worst_module": min(map(cosine, found, exact)),
        }
    return figures
