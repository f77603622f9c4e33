"""The adapter that a bundle's training starts from: its layers and its matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from prge.errors import ConfigError
from prge.formats.peft import PeftAdapter, lora_scale, read_lora
from server_export.adapter.layers import (
    ALL_LINEAR,
    default_target_modules,
    initial_lora_a,
    match_start_adapter,
    match_target_modules,
    normalize_target_modules,
    per_token_layers,
    refused_by_peft,
)
from server_export.adapter.repeated_blocks import in_top_blocks
from server_export.checkpoint.loading import LoadedModel, parameter_count
from server_export.settings import ExportConfig


@dataclass(frozen=True)
class StartAdapter:
    """The adapter that a bundle's training starts from, and its model.

    Attributes:
        loaded: the model, which may lack its weights.
        rank: the default rank in PEFT's configuration.
        alpha: the default alpha in PEFT's configuration.
        target_modules: PEFT's target modules.
        lora_a: f32 [rank, in] by layer, without the scale, of each layer's own rank.
        lora_b: f32 [out, rank] by layer.
        alphas: the alpha of each layer.
        had_conv1d: whether the model's linear layers were GPT-2's Conv1D.
        parameters: the number of the model's parameters.
        trains_a: whether lora_a is trained (LoRA) or frozen (LoRA-FA).
        use_rslora: whether the scale is alpha / sqrt(rank) instead of alpha / rank.
    """

    loaded: LoadedModel
    rank: int
    alpha: float
    target_modules: str | list[str]
    lora_a: Mapping[str, torch.Tensor]
    lora_b: Mapping[str, torch.Tensor]
    alphas: Mapping[str, float]
    had_conv1d: bool
    parameters: int
    trains_a: bool = False
    use_rslora: bool = False

    @property
    def scales(self) -> dict[str, float]:
        """The scale of each layer's low-rank product."""
        return {
            name: lora_scale(self.alphas[name], len(matrix), self.use_rslora)
            for name, matrix in self.lora_a.items()
        }

    def scaled_lora_a(self) -> dict[str, torch.Tensor]:
        """Return `lora_a` f32 [rank, in] by layer, multiplied by the scale."""
        scales = self.scales
        return {name: matrix * scales[name] for name, matrix in self.lora_a.items()}

    def starting_from(self, lora_a: Mapping[str, torch.Tensor]) -> StartAdapter:
        """Return an untrained adapter of the same layers and scale with another `lora_a`, of any ranks."""
        unit_scale = lora_scale(1.0, self.rank, self.use_rslora)
        return replace(
            self,
            lora_a=lora_a,
            lora_b={name: torch.zeros(len(self.lora_b[name]), len(a)) for name, a in lora_a.items()},
            alphas={
                name: self.alpha * unit_scale / lora_scale(1.0, len(a), self.use_rslora)
                for name, a in lora_a.items()
            },
        )


def start_adapter(
    config: ExportConfig, outline: LoadedModel, had_conv1d: bool, unadapted: Collection[str] = ()
) -> StartAdapter:
    """Return the adapter of an export's settings, for a model with or without weights.

    Args:
        config: the export's settings.
        outline: the model.
        had_conv1d: whether its linear layers were GPT-2's Conv1D.
        unadapted: names of modules whose layers are only adapted if they are named.

    Raises:
        PrgeError: the adapter or the settings can't be used.
    """
    parameters = parameter_count(outline.model)
    start = read_lora(config.start_adapter) if config.start_adapter is not None else None
    rank, alpha, targets, names = _adapted_layers(config, outline, start, unadapted)
    lora_a, lora_b = _matrices(config, outline.model, start, names)
    alphas = {
        name: alpha if start is None else start.alpha_of(adapter_name) for name, adapter_name in names.items()
    }
    return StartAdapter(
        outline,
        rank,
        alpha,
        targets,
        lora_a,
        lora_b,
        alphas,
        had_conv1d,
        parameters,
        trains_a=config.adapter == "lora",
        use_rslora=config.use_rslora if start is None else bool(start.config.get("use_rslora")),
    )


def _adapted_layers(
    config: ExportConfig, outline: LoadedModel, start: PeftAdapter | None, unadapted: Collection[str]
) -> tuple[int, float, str | list[str], dict[str, str]]:
    """Return rank, alpha, target modules, and the adapter's name of each adapted layer, in module order."""
    model = outline.model
    if start is not None:
        return start.rank, start.alpha, start.target_modules, match_start_adapter(model, start)
    targets = normalize_target_modules(config.target_modules or default_target_modules(model, unadapted))
    names = match_target_modules(model, targets, unadapted)
    refused = refused_by_peft(model, names)
    loadable = [name for name in names if name not in refused]
    is_named = bool(config.target_modules) and targets != ALL_LINEAR
    if refused and (is_named or not loadable):
        raise ConfigError(
            "Cannot adapt these target modules:",
            [f"PEFT can't load an adapter of {name} for {model.config.model_type}" for name in refused],
            code="target-modules-refused-by-peft",
        )
    if not is_named and (per_token := per_token_layers(model, loadable) or loadable) != names:
        targets = names = per_token
    if config.adapt_layers is not None:
        # Full names select the same layers in PEFT, whatever the original targets were.
        targets = names = in_top_blocks(model, names, config.adapt_layers)
    if outline.part_of is not None:
        # PEFT matches suffixes, which would also select layers of the other parts.
        targets = names
    return config.rank, config.lora_alpha, targets, {name: name for name in names}


def _matrices(
    config: ExportConfig, model: nn.Module, start: PeftAdapter | None, names: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the initial `lora_a` and `lora_b` by layer."""
    if start is not None:
        lora_a, lora_b = (
            {name: torch.from_numpy(matrices[adapter_name]) for name, adapter_name in names.items()}
            for matrices in (start.lora_a, start.lora_b)
        )
        return lora_a, lora_b
    lora_a = initial_lora_a(model, list(names), config.rank, config.seed)
    return lora_a, {n: torch.zeros(model.get_submodule(n).out_features, config.rank) for n in names}
