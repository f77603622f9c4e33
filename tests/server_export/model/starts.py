"""Adapters that training of tiny models starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server_export.adapter.initial_adapter import StartAdapter, start_adapter
from server_export.adapter.layers import convert_conv1d
from server_export.checkpoint.loading import prepare_model
from server_export.settings import ExportConfig
from tests.tiny_models import DECODERS, make_model


def start(architecture: str, **changes: Any) -> StartAdapter:
    """Return the adapter of rank 4 of an export with these settings."""
    is_decoder = architecture in DECODERS
    loaded = prepare_model(make_model(architecture, head=is_decoder), architecture, is_decoder)
    had_conv1d = convert_conv1d(loaded.model) > 0
    config = ExportConfig(model=architecture, out=Path("unused"), **{"rank": 4, **changes})
    return start_adapter(config, loaded, had_conv1d)
