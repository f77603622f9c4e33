"""Problems of tiny models for the tests of this folder, and the programs that a driver would call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prge.adapter import Adapter
from prge.bundle import Bundle
from prge.examples import Example
from server_export.baselines.problem import ModelProblem
from server_export.bundle import write_adapter
from server_export.model.loading import prepare_model
from server_export.model.program import BuiltProgram
from tests.rows import classified
from tests.server_export.programs import build
from tests.tiny_models import DECODERS, make_model


def build_problem(
    folder: Path,
    architecture: str,
    train: Sequence[Example],
    lora_b: float = 0.0,
    model: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[ModelProblem, BuiltProgram, Adapter]:
    """A problem on a tiny model, the program of the same model, and the adapter that both start from.

    `lora_b` is the deviation of the adapter's values, `changes` are settings of the export.
    """
    built = build(architecture, model, **{"batch_size": 4, **changes})
    generator = torch.Generator().manual_seed(1)
    for matrix in built.lora_b.values():
        matrix.copy_(torch.randn(matrix.shape, generator=generator) * lora_b)
    adapter = Adapter.zeros(built.contract.modules)
    for name, view in adapter.named().items():
        view[...] = built.lora_b[name].numpy().T
    write_adapter(folder / "adapter", built)
    manifest = {
        "quantization": built.quantization.to_json(),
        "readout": {"pooling": changes.get("pooling")},
        "files": {"program.pte": {"sha256": ""}},
        "model": {},
    }
    bundle = Bundle(folder, built.contract, manifest, built.score_contract)
    tiny = make_model(architecture, head=not built.contract.is_encoder, **(model or {}))
    loaded = prepare_model(tiny, architecture, architecture in DECODERS)
    return ModelProblem(bundle, loaded, train, 0, 4, 7, head_folds=3), built, adapter


def classified_rows(count: int = 200) -> list[Example]:
    """Rows of two classes that can't be told apart, of different lengths."""
    random = np.random.default_rng(0)
    return [
        classified(
            row + 1, random.integers(3, 100, random.integers(3, 12)).tolist(), 2, int(random.integers(2))
        )
        for row in range(count)
    ]
