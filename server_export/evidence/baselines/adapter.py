"""The bundle's adapter in a model's layers, for methods that train it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from prge.files.peft import WEIGHTS, read_config, weight_name, write_config
from server_export.adapter.layers import replace_module
from server_export.evidence.baselines.problem import ModelProblem


class AdaptedLinear(nn.Module):
    """A linear layer with `lora_a` [rank, in] and `lora_b` [out, rank] to train, as PEFT computes it."""

    def __init__(self, base: nn.Module, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(lora_a.clone())
        self.lora_b = nn.Parameter(lora_b.clone())
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale


def insert_adapter(problem: ModelProblem) -> dict[str, AdaptedLinear]:
    """Put the bundle's adapter into the model, in place; returns the adapted layers in module order."""
    layers = {}
    for module in problem.modules:
        name = module.name
        matrices = problem.lora_a[name], problem.lora_b[name]
        layers[name] = AdaptedLinear(problem.model.get_submodule(name), *matrices, problem.scales[name])
        replace_module(problem.model, name, layers[name])
    return layers


def save_adapter(problem: ModelProblem, folder: Path) -> None:
    """Write the adapter of a model that has one into an empty folder, as a PEFT folder like the bundle's."""
    values = {}
    for module in problem.modules:
        layer = problem.model.get_submodule(module.name)
        assert isinstance(layer, AdaptedLinear)
        values[weight_name(module.name, "A")] = layer.lora_a.detach()
        values[weight_name(module.name, "B")] = layer.lora_b.detach().contiguous()
    save_file(values, folder / WEIGHTS)
    write_config(folder, read_config(problem.bundle.adapter))
