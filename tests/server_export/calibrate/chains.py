"""Int4 chains of tiny models, and rows to calibrate them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from server_export.model.chain import ModelChain
from server_export.settings import ExportConfig
from server_export.source import open_source
from tests.tiny_models import LENGTH, save_model

ROWS = [
    torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (LENGTH, 12, 1, 15, *[LENGTH] * 12)
]


def int4_chain(folder: Path, architecture: str, **changes: Any) -> ModelChain:
    """Return the chain of a random model, whose layers have correlated inputs."""
    model = save_model(folder / "model", architecture, **changes)
    config = ExportConfig(str(model), folder / "out", quantize="8da4w", target_modules="all-linear")
    return open_source(config).with_weights().chain("8da4w", 64)
