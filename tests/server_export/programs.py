"""Programs of tiny models for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server_export.model.loading import prepare_model
from server_export.model.program import BuiltProgram, build_program
from server_export.settings import ExportConfig
from tests.tiny_models import DECODERS, LENGTH, make_model


def make_export_config(model: str, out: Path = Path("unused"), **changes: Any) -> ExportConfig:
    """Settings of a small program: 3 copies of 2 rows, or 2 rows with 3 tangents each, or back."""
    settings = {
        "estimator": "antithetic",
        "rank": 4,
        "batch_size": 2,
        "sequence_length": LENGTH,
        "positions": 3,
    }
    of_estimator = {"tangent": {"queries": 3}, "exact": {"classes": 3}}
    settings |= of_estimator.get(changes.get("estimator", ""), {"copies": 3})
    settings |= changes
    return ExportConfig(model=model, out=out, **settings)


def build(architecture: str, model: dict[str, Any] | None = None, **changes: Any) -> BuiltProgram:
    """The program of a tiny model; `model` changes its transformers configuration."""
    is_decoder = architecture in DECODERS and changes.get("readout") != "pooled"
    tiny = make_model(architecture, head=is_decoder, **(model or {}))
    loaded = prepare_model(tiny, architecture, is_decoder)
    label_tokens = changes.pop("label_tokens", ())
    return build_program(make_export_config(architecture, **changes), loaded, label_tokens)
