"""Experts are blocks, and the blocks of a mixture compute the same as transformers' model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from server_export.check.model import compare_with_model
from server_export.checkpoint import stored
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import load_meta_model
from server_export.model.chain import ModelChain
from server_export.pipeline import build_chain
from tests.tiers import second_tier
from tests.tiny_models import EXPERTS, make_model, save_model

RANK = 2


def chain_of(folder: Path, architecture: str, scheme: str = "fp32") -> ModelChain:
    path = str(save_model(folder, architecture))
    outline = load_meta_model(path)
    lora_a = {
        name: torch.zeros(RANK, module.in_features)
        for name, module in outline.model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith("q_proj")
    }
    return build_chain(outline, find_files(path), lora_a, longest=16, scheme=scheme)


@pytest.mark.parametrize(
    "architecture", ["olmoe", *second_tier(*(name for name in EXPERTS if name != "olmoe"))]
)
def test_the_blocks_of_a_mixture_compute_the_model(architecture: str, tmp_path: Path) -> None:
    chain = chain_of(tmp_path, architecture)
    experts = [number for number, block in enumerate(chain.blocks) if block.is_expert]
    layers = chain.block_groups(chain.head_start)
    assert {len(turn) for turn in layers} == {1, 8} and len(
        {chain.type_of[number] for number in experts}
    ) == 1
    assert compare_with_model(chain, str(tmp_path), None).difference < 1e-5


def test_one_expert_is_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoint files have separate tensors for each expert, which transformers stacks."""
    chain = chain_of(tmp_path, "olmoe")
    number = next(number for number, block in enumerate(chain.blocks) if block.is_expert) + 3
    model: Any = make_model("olmoe")
    stacked = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    names_read: list[str] = []

    def watched(path: str, **named: Any) -> Any:
        reader = safe_open(path, **named)

        class Watched:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None: ...

            def get_tensor(self, name: str) -> Any:
                names_read.append(name)
                return reader.get_tensor(name)

        return Watched()

    monkeypatch.setattr(stored, "safe_open", watched)
    tensors = chain.tensors(number)
    assert any(torch.equal(tensor, stacked[3]) for tensor in tensors.values())
    assert len(names_read) == 3 and all(".experts.3." in name for name in names_read)


@pytest.mark.parametrize("scheme", ["8da8w", "8da4w"])
def test_layers_of_experts_are_quantized_and_the_router_is_not(scheme: str, tmp_path: Path) -> None:
    chain = chain_of(tmp_path, "olmoe", scheme)
    types = [chain.block_types[chain.type_of[turn.start]] for turn in chain.block_groups(chain.head_start)]
    layers = [set(of_type.frozen.layers) for of_type in types]
    assert len(layers[2]) == 2 and all(".experts." in name for name in layers[2])
    assert not any("mlp.gate" in name for name in layers[1])
