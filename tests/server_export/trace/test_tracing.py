"""What stops a trace: a model that decides by numbers is refused, and a defect keeps its traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.llama import modeling_llama

from tests.refusals import refusal
from tests.server_export.trace.graphs import chain_in
from tests.tiny_models import save_model


class Deciding(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Wrong(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward([x][1])


def test_a_model_that_decides_by_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "llama")
    monkeypatch.setattr(modeling_llama, "LlamaMLP", Deciding)
    with refusal("data-dependent-control-flow"):
        chain_in(tmp_path)


def test_a_defect_is_not_told_as_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "llama")
    monkeypatch.setattr(modeling_llama, "LlamaMLP", Wrong)
    with pytest.raises(IndexError, match="list index out of range"):
        chain_in(tmp_path)
