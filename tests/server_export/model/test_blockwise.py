"""Inputs of adapted layers, block by block, compared with those of the model's own layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from server_export.adapter.layers import ALL_LINEAR, convert_conv1d, match_target_modules
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import load_meta_model, load_model
from server_export.model.blockwise import watch_inputs
from server_export.model.chain import ModelChain
from server_export.pipeline import build_chain
from tests.tiny_models import save_model

LONGEST = 32
ROWS = [
    torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 12, 1, 12, 7)
]


def rank1_chain(folder: Path, names: Sequence[str]) -> ModelChain:
    """Return a chain in float32 with an adapter of rank 1 on some layers."""
    meta_model = load_meta_model(str(folder))
    with torch.device("meta"):
        convert_conv1d(linear_model := load_meta_model(str(folder)).model)
    lora_a = {name: torch.zeros(1, linear_model.get_submodule(name).in_features) for name in names}
    return build_chain(meta_model, find_files(str(folder)), lora_a, longest=LONGEST)


def linear_layers(folder: Path) -> list[str]:
    model = load_model(str(folder)).model
    convert_conv1d(model)
    # OPT's projections before and after its blocks can't be adapted.
    return [name for name in match_target_modules(model, ALL_LINEAR) if "project_" not in name]


def expected_inputs(folder: Path, names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
    """Return the inputs of the model's own layers, by layer and row."""
    model = load_model(str(folder)).model
    convert_conv1d(model)
    inputs_by_layer: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: inputs_by_layer[name].append(args[0].reshape(-1, args[0].shape[-1]))
        )
    with torch.no_grad():
        for row in ROWS:
            model(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.long))
    return inputs_by_layer


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma3", "gpt2", "opt", "bert", "roberta", "qwen2_moe", "olmoe"]
)
def test_inputs_equal_those_of_the_models_own_layers(architecture: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, architecture)
    names = linear_layers(folder)
    watched: dict[str, torch.Tensor] = {}

    def watch(layers: Sequence[str], states: torch.Tensor) -> None:
        for name in layers:
            watched[name] = torch.cat([watched[name], states]) if name in watched else states.clone()

    assert len(list(watch_inputs(rank1_chain(folder, names), ROWS, watch))) >= 2
    expected = expected_inputs(folder, names)
    assert watched.keys() == expected.keys()
    # Rows are computed in descending order of length.
    order = sorted(range(len(ROWS)), key=lambda row: -len(ROWS[row]))
    for name in names:
        rows = torch.cat([expected[name][row] for row in order])
        assert torch.allclose(watched[name], rows, rtol=1e-4, atol=1e-4), name


def test_layers_with_the_same_input_share_a_call(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama")
    calls: list[Sequence[str]] = []
    chain = rank1_chain(folder, linear_layers(folder))
    for _ in watch_inputs(chain, ROWS, lambda names, states: calls.append(list(names))):
        pass
    endings = [[name.rpartition(".")[2] for name in names] for names in calls]
    assert endings == 2 * [
        ["q_proj", "k_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
        ["down_proj"],
    ]


def test_blocks_above_the_last_adapter_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path, "llama")
    chain = rank1_chain(folder, ["model.layers.0.self_attn.q_proj"])
    read: list[int] = []
    tensors: Any = chain.tensors

    def read_tensors(number: int) -> Any:
        read.append(number)
        return tensors(number)

    monkeypatch.setattr(chain, "tensors", read_tensors)
    for _ in watch_inputs(chain, ROWS, lambda names, states: None):
        pass
    assert read == [0, 1]
