"""The adapter that a bundle starts from: which layers it is on, and its matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from prge.errors import ConfigError
from prge.files.peft import PeftAdapter, lora_scale, read_lora
from server_export.adapter.blocks import in_top_blocks
from server_export.adapter.layers import (
    ALL_LINEAR,
    default_target_modules,
    initial_lora_a,
    match_start_adapter,
    match_target_modules,
    normal_targets,
    read_by_rows,
    refused_by_peft,
)
from server_export.checkpoint.loading import LoadedModel, parameter_count
from server_export.settings import ExportConfig


@dataclass(frozen=True)
class StartAdapter:
    """The adapter that a bundle starts from, and the model that it belongs to.

    `lora_a` f32 [rank, in] and `lora_b` f32 [out, rank] are unscaled, and of each layer's own rank. `rank`
    and `alpha` are what PEFT's configuration says of layers that it doesn't name; `alphas` has every layer's.
    `trains_a`: LoRA, and not LoRA-FA; `by_root`: the scale is alpha over the root of the rank.
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
    by_root: bool = False

    @property
    def scales(self) -> dict[str, float]:
        """What each layer's product of both matrices is multiplied by."""
        return {
            name: lora_scale(self.alphas[name], len(matrix), self.by_root)
            for name, matrix in self.lora_a.items()
        }

    def scaled_lora_a(self) -> dict[str, torch.Tensor]:
        """`lora_a` f32 [rank, in] by layer, the scale folded in."""
        scales = self.scales
        return {name: matrix * scales[name] for name, matrix in self.lora_a.items()}

    def starting_from(self, lora_a: Mapping[str, torch.Tensor]) -> StartAdapter:
        """An untrained adapter of the same layers with other `lora_a`, of any ranks; the scale stays."""
        unit = lora_scale(1.0, self.rank, self.by_root)
        return replace(
            self,
            lora_a=lora_a,
            lora_b={name: torch.zeros(len(self.lora_b[name]), len(a)) for name, a in lora_a.items()},
            alphas={
                name: self.alpha * unit / lora_scale(1.0, len(a), self.by_root) for name, a in lora_a.items()
            },
        )


def start_adapter(
    config: ExportConfig, outline: LoadedModel, had_conv1d: bool, unread: Collection[str] = ()
) -> StartAdapter:
    """The adapter that `config` asks for, of a model that may lack its weights.

    Args:
        config: of an export.
        outline: the model.
        had_conv1d: whether its linear layers were GPT-2's.
        unread: names of modules whose layers no adapter is for, unless they are named.

    Raises:
        PrgeError: the adapter or settings can't be used.
    """
    parameters = parameter_count(outline.model)
    start = read_lora(config.start_adapter) if config.start_adapter is not None else None
    rank, alpha, targets, names = _adapted_layers(config, outline, start, unread)
    lora_a, lora_b = _matrices(config, outline.model, start, names)
    alphas = {ours: alpha if start is None else start.alpha_of(theirs) for ours, theirs in names.items()}
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
        by_root=config.rs_lora if start is None else bool(start.config.get("use_rslora")),
    )


def _adapted_layers(
    config: ExportConfig, outline: LoadedModel, start: PeftAdapter | None, unread: Collection[str]
) -> tuple[int, float, str | list[str], dict[str, str]]:
    """Rank, alpha, target modules, and layers in module order with the names that `start` has for them."""
    model = outline.model
    if start is not None:
        return start.rank, start.alpha, start.target_modules, match_start_adapter(model, start)
    targets = normal_targets(config.target_modules or default_target_modules(model, unread))
    names = match_target_modules(model, targets, unread)
    refused = refused_by_peft(model, names)
    kept = [name for name in names if name not in refused]
    is_named = bool(config.target_modules) and targets != ALL_LINEAR
    if refused and (is_named or not kept):
        raise ConfigError(
            "these target modules can't be adapted:",
            [f"PEFT doesn't load an adapter of {name} with a {model.config.model_type}" for name in refused],
            code="target-modules-refused-by-peft",
        )
    if not is_named and (read := read_by_rows(model, kept) or kept) != names:
        targets = names = read
    if config.adapt_layers is not None:
        # Whole names mean the same layers to PEFT, however the targets were chosen.
        targets = names = in_top_blocks(model, names, config.adapt_layers)
    if outline.part_of is not None:
        # PEFT would find layers of other parts by the ends of their names.
        targets = names
    return config.rank, config.alpha, targets, {name: name for name in names}


def _matrices(
    config: ExportConfig, model: nn.Module, start: PeftAdapter | None, names: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """`lora_a` and `lora_b` to start from."""
    if start is not None:
        lora_a, lora_b = (
            {ours: torch.from_numpy(matrices[theirs]) for ours, theirs in names.items()}
            for matrices in (start.lora_a, start.lora_b)
        )
        return lora_a, lora_b
    lora_a = initial_lora_a(model, list(names), config.rank, config.seed)
    return lora_a, {n: torch.zeros(model.get_submodule(n).out_features, config.rank) for n in names}
