"""Trained adapters of a model: what publishing begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prge.formats.peft import read_lora, write_peft
from prge.model_spec import AdaptedModule
from tests.templates import random_adapter

RANK = 4


def trained_folder(
    folder: Path,
    modules: tuple[AdaptedModule, ...],
    template: Path,
    head: Mapping[str, Any] | None = None,
    size: float = 0.2,
) -> Path:
    """Write an adapter that changes the answers, a lot unless `size` is less, and return its folder."""
    adapter = random_adapter(modules, 1, size)
    extra = {"state.json": b"{}", **({"head.safetensors": head} if head else {})}
    write_peft(folder, adapter, template, extra)
    return folder


def trained_adapter(
    base: Path, folder: Path, head: Mapping[str, Any] | None = None, size: float = 0.2
) -> Path:
    """Write such an adapter for the model in `base`, without a bundle, and return its folder."""
    from server_export.adapter.initial_adapter import start_adapter
    from server_export.adapter.layers import convert_conv1d
    from server_export.bundle import write_adapter
    from server_export.checkpoint.loading import load_model
    from server_export.settings import ExportConfig

    start = folder.with_name(f"{folder.name}-start")
    loaded = load_model(str(base))
    config = ExportConfig(str(base), folder.with_name("unused"), rank=RANK)
    write_adapter(start, start_adapter(config, loaded, convert_conv1d(loaded.model) > 0))
    return trained_folder(folder, read_lora(start).modules, start, head, size)
