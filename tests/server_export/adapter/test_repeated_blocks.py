"""The blocks of a model, and the blocks that `--adapt-layers` selects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from prge.errors import ConfigError
from server_export.adapter.layers import convert_conv1d
from server_export.adapter.repeated_blocks import block_names, blocks_below, in_top_blocks
from server_export.bundle import write_adapter
from server_export.settings import ExportConfig
from tests.refusals import raises
from tests.server_export.model.starts import start
from tests.tiny_models import ARCHITECTURES, make_model

torch.set_num_threads(1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_of_every_architecture_are_located(architecture: str) -> None:
    model = make_model(architecture)
    convert_conv1d(model)
    names = block_names(model)
    # ALBERT has one layer, which is reused.
    assert len(names) == {"albert": 1, "modernbert": 4}.get(architecture, 2)
    blocks = [model.get_submodule(name) for name in names]
    assert len({type(block) for block in blocks}) == 1
    inside = sum(isinstance(module, nn.Linear) for block in blocks for module in block.modules())
    others = sum(isinstance(module, nn.Linear) for module in model.modules()) - inside
    # The vocabulary head, and the projections around OPT's blocks.
    assert others <= (3 if architecture == "opt" else 1)
    assert inside >= 4 * len(blocks)


def test_a_model_without_blocks_is_refused() -> None:
    with raises(ConfigError, "layers-not-countable", containing="Sequential"):
        block_names(nn.Sequential(nn.Linear(2, 2)))


def test_the_outer_of_nested_lists_has_the_blocks() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])])
    assert block_names(model) == ["layers.0"]


NAMES = [f"model.layers.{block}.self_attn.{projection}_proj" for block in (0, 1) for projection in "qv"]


def test_top_blocks_are_the_last_ones() -> None:
    model = make_model("llama")
    assert in_top_blocks(model, NAMES, "top:1") == NAMES[2:]
    assert in_top_blocks(model, NAMES, "top:2") == NAMES
    # A block's number is not a prefix of another's.
    deep = make_model("llama", num_hidden_layers=11)
    assert in_top_blocks(deep, [*NAMES, "model.layers.10.self_attn.q_proj"], "top:1") == [
        "model.layers.10.self_attn.q_proj"
    ]


@pytest.mark.parametrize(
    ("choice", "code"),
    [
        ("top:0", "adapt-layers-out-of-range"),
        ("top:-1", "adapt-layers-out-of-range"),
        ("top:3", "adapt-layers-out-of-range"),
        ("top", "adapt-layers-malformed"),
        ("bottom:1", "adapt-layers-malformed"),
        ("top:1.5", "adapt-layers-malformed"),
        ("", "adapt-layers-malformed"),
    ],
)
def test_a_choice_without_blocks_is_refused(choice: str, code: str) -> None:
    with raises(ConfigError, code, containing=choice):
        in_top_blocks(make_model("llama"), NAMES, choice)


def test_targets_outside_the_selected_blocks_are_refused() -> None:
    with raises(ConfigError, "adapt-layers-without-targets"):
        in_top_blocks(make_model("llama"), NAMES[:2], "top:1")


def test_whole_blocks_below_some_layers_are_counted() -> None:
    model = make_model("llama")
    assert blocks_below(model, NAMES) == 0
    assert blocks_below(model, NAMES[2:]) == 1
    assert blocks_below(model, ["embed_out", *NAMES[2:]]) == 0


def test_a_start_adapter_excludes_adapt_layers() -> None:
    with raises(ConfigError, "settings-unusable", containing="adapt_layers is top:1"):
        ExportConfig(model="llama", out=Path("unused"), start_adapter=Path("adapter"), adapt_layers="top:1")


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [("llama", None), ("llama", "all-linear"), ("gpt2", None), ("bert", [r".*\.(query|dense)"])],
)
def test_peft_adapts_the_same_layers(
    architecture: str, targets: str | list[str] | None, tmp_path: Path
) -> None:
    from peft import PeftModel

    begun = start(architecture, adapt_layers="top:1", target_modules=targets)
    blocks = block_names(begun.loaded.model)
    assert all(name.startswith(f"{blocks[-1]}.") for name in begun.lora_a)
    write_adapter(tmp_path / "adapter", begun)
    loaded = PeftModel.from_pretrained(make_model(architecture), str(tmp_path / "adapter"))
    adapted = {
        name.removeprefix("base_model.model."): module
        for name, module in loaded.named_modules()
        if hasattr(module, "lora_A")
    }
    assert set(adapted) == set(begun.lora_a)
    for name, module in adapted.items():
        assert torch.equal(module.lora_A["default"].weight, begun.lora_a[name])
        assert (
            module.scaling["default"] == begun.alpha / begun.rank
            and not module.lora_B["default"].weight.any()
        )
