"""Experts are blocks: what the blocks of a mixture compute is what transformers' model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from server_export.check.model import compare_with_model
from server_export.checkpoint import stored
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import outline_model
from server_export.model.chain import ModelChain
from server_export.pipeline import build_chain
from tests.tiers import rest
from tests.tiny_models import EXPERTS, make_model, save_model

RANK = 2


def chain_of(folder: Path, architecture: str, scheme: str = "fp32") -> ModelChain:
    path = str(save_model(folder, architecture))
    outline = outline_model(path)
    lora_a = {
        name: torch.zeros(RANK, module.in_features)
        for name, module in outline.model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith("q_proj")
    }
    return build_chain(outline, find_files(path), lora_a, longest=16, scheme=scheme)


@pytest.mark.parametrize("architecture", ["olmoe", *rest(*(name for name in EXPERTS if name != "olmoe"))])
def test_the_blocks_of_a_mixture_are_the_model(architecture: str, tmp_path: Path) -> None:
    chain = chain_of(tmp_path, architecture)
    experts = [number for number, block in enumerate(chain.blocks) if block.is_expert]
    layers = chain.turns(chain.end)
    assert {len(turn) for turn in layers} == {1, 8} and len(
        {chain.kind_of[number] for number in experts}
    ) == 1
    assert compare_with_model(chain, str(tmp_path), None).difference < 1e-5


def test_one_expert_is_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers stores the layers of each expert as tensors of their own, and has them stacked."""
    chain = chain_of(tmp_path, "olmoe")
    number = next(number for number, block in enumerate(chain.blocks) if block.is_expert) + 3
    model: Any = make_model("olmoe")
    stacked = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    read: list[str] = []

    def watched(path: str, **named: Any) -> Any:
        reader = safe_open(path, **named)

        class Watched:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None: ...

            def get_tensor(self, name: str) -> Any:
                read.append(name)
                return reader.get_tensor(name)

        return Watched()

    monkeypatch.setattr(stored, "safe_open", watched)
    tensors = chain.tensors(number)
    assert any(torch.equal(tensor, stacked[3]) for tensor in tensors.values())
    assert len(read) == 3 and all(".experts.3." in name for name in read)


@pytest.mark.parametrize("scheme", ["8da8w", "8da4w"])
def test_an_experts_layers_are_quantized_and_a_routers_is_not(scheme: str, tmp_path: Path) -> None:
    chain = chain_of(tmp_path, "olmoe", scheme)
    kinds = [chain.kinds[chain.kind_of[turn.start]] for turn in chain.turns(chain.end)]
    layers = [set(kind.frozen.layers) for kind in kinds]
    assert len(layers[2]) == 2 and all(".experts." in name for name in layers[2])
    assert not any("mlp.gate" in name for name in layers[1])
