"""The gradient of single blocks by PyTorch's autograd, beside what a step on the engine computed there.

A block of transformers' own model gets the weights of the model's folder, with the values that quantization
leaves, and its adapter; activations are rounded to int8 where the engine rounds them, derivatives pass by. It
takes the state that entered the engine's block, and the slope of what left it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from timing import least_memory, timed_step
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from prge.engine import Array
from prge.files.chain import GRADIENT, LORA_B
from prge.files.peft import PeftAdapter, read_lora
from prge.files.signatures import BACK
from server_export.model.quantization import quantize_layers

Call = tuple[Mapping[str, Array], Mapping[str, Array]]


def gradient_cosine(model: Path, bundle: Path, scheme: str, rows: int, tokens: int, blocks: int) -> float:
    """The least cosine of any gradient and slope of some blocks of a step, the first and the last with them.

    Args:
        model: folder of a decoder whose blocks take states and rotary positions, such as a Llama.
        bundle: exported from it.
        scheme: of its frozen layers.
        rows, tokens: of the step, on random tokens.
        blocks: how many are compared.
    """
    count = AutoConfig.from_pretrained(model).num_hidden_layers
    numbers = sorted({round(number) for number in np.linspace(1, count, blocks)})
    calls = step_on_engine(bundle, rows, tokens, numbers)
    adapter = read_lora(bundle / "adapter")
    return min(
        cosine
        for number in numbers
        for cosine in cosines_of(model, number - 1, scheme, adapter, calls[number])
    )


def step_on_engine(bundle: Path, rows: int, tokens: int, numbers: Sequence[int]) -> dict[int, Call]:
    """Inputs and outputs of the way back of some blocks, copied while a step runs."""
    step = timed_step(bundle, "exact", rows, tokens, memory=least_memory(bundle))
    blocks: Any = step.engines.step._blocks  # type: ignore[attr-defined]
    run = blocks.run
    calls: dict[int, Call] = {}

    def recorded(number: int, role: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        found: dict[str, Array] = run(number, role, inputs)
        if role == BACK and number in numbers:
            calls[number] = (_copied(inputs), _copied(found))
        return found

    blocks.run = recorded
    step()
    return calls


def _copied(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array.copy() for name, array in arrays.items()}


def cosines_of(model: Path, layer: int, scheme: str, adapter: PeftAdapter, call: Call) -> list[float]:
    """Cosines of the slope of the state and of every adapted module's gradient."""
    given, found = call
    block, rotary = block_of(model, layer)
    adapted = adapt(block, f"model.layers.{layer}.", scheme, adapter)
    state = torch.from_numpy(given["state"]).requires_grad_()
    positions = rotary(state, torch.arange(state.shape[1])[None])
    for index, lora in enumerate(adapted):
        lora.lora_b = torch.from_numpy(given[f"{LORA_B}{index}"]).requires_grad_()
    answer = block(state, attention_mask=None, position_embeddings=positions)
    leaves = [state, *(lora.lora_b for lora in adapted)]
    wanted = torch.autograd.grad(answer, leaves, torch.from_numpy(given["slope"]))
    ours = [found["slope"], *(found[f"{GRADIENT}{index}"] for index in range(len(adapted)))]
    return [cosine(one.numpy(), other) for one, other in zip(wanted, ours, strict=True)]


class Layer(nn.Module):
    """A frozen layer with rounded activations, which derivatives pass by, and its adapter if it has one."""

    def __init__(self, base: nn.Module, lora_a: torch.Tensor | None) -> None:
        super().__init__()
        weight = base.weight
        self.is_quantized = hasattr(weight, "dequantize") and type(weight) is not nn.Parameter
        self.weight = weight.dequantize() if self.is_quantized else weight
        self.bias, self.lora_a, self.lora_b = base.bias, lora_a, torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        base = F.linear(x + (rounded(x) - x).detach() if self.is_quantized else x, self.weight, self.bias)
        return base if self.lora_a is None else base + F.linear(x, self.lora_a) @ self.lora_b


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Values as int8 codes with a scale and a zero point for each token leave them."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)
    zero = (-128 - torch.round(low / scale)).clamp(-128, 127)
    return (torch.clamp(torch.round(x / scale) + zero, -128, 127) - zero) * scale


def block_of(folder: Path, layer: int) -> tuple[nn.Module, nn.Module]:
    """One block of a model with its weights, and what makes rotary positions."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    block, prefix = model.model.layers[layer], f"model.layers.{layer}."
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    weights = {}
    for name in (name for name in index if name.startswith(prefix)):
        with safe_open(folder / index[name], "pt") as file:
            weights[name.removeprefix(prefix)] = file.get_tensor(name).float()
    block.load_state_dict(weights, assign=True)
    return block.eval().requires_grad_(False), type(model.model.rotary_emb)(config)


def adapt(block: nn.Module, prefix: str, scheme: str, adapter: PeftAdapter) -> list[Layer]:
    """Put `Layer` in the place of a block's linear layers; those that are adapted, by the adapter's order."""
    if scheme != "fp32":
        quantize_layers(block, scheme)
    found = {}
    for name, layer in [*block.named_modules()]:
        if isinstance(layer, nn.Linear):
            lora_a, scaled = adapter.lora_a.get(prefix + name), None
            if lora_a is not None:
                scaled = torch.from_numpy(lora_a * np.float32(adapter.scale_of(prefix + name)))
            found[name] = Layer(layer, scaled)
            parent, _, child = name.rpartition(".")
            setattr(block.get_submodule(parent), child, found[name])
    return [layer for layer in found.values() if layer.lora_a is not None]


def cosine(one: Array, other: Array) -> float:
    """Of two arrays as vectors."""
    one, other = one.ravel().astype(np.float64), other.ravel().astype(np.float64)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
