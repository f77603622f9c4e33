"""A model as a chain of blocks computes what the model computes, with any adapter, rows and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from server_export.lower.sizes import Size, dynamic_program
from server_export.model.attention import padding_mask
from server_export.model.chain import Chain, build_chain
from server_export.model.files import find_files
from server_export.model.loading import load_model, outline_model
from server_export.model.lora_fa import convert_conv1d, default_target_modules, match_target_modules
from server_export.model.traced import BATCH, COPIES, TOKENS
from tests.tiers import rest
from tests.tiny_models import VOCABULARY, save_model

RANK, LONGEST = 4, 64
COPIES_HERE, ROWS, LENGTH = 3, 2, 7
SIZES = {
    "copies": Size(COPIES, 3, 1, 8),
    "batch": Size(BATCH, 2, 1, 8),
    "tokens": Size(TOKENS, 5, 2, LONGEST),
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", request.param)


def chain_of(folder: Path, **settings: Any) -> Chain:
    outline = outline_model(str(folder))
    with torch.device("meta"):
        convert_conv1d(twin := outline_model(str(folder)).model)
    names = match_target_modules(twin, default_target_modules(twin))
    generator = torch.Generator().manual_seed(0)
    lora_a = {
        name: torch.randn(RANK, twin.get_submodule(name).in_features, generator=generator) * 0.1
        for name in names
    }
    return build_chain(outline, find_files(str(folder)), lora_a, longest=LONGEST, **settings)


def answers(
    chain: Chain, tokens: torch.Tensor, beside: torch.Tensor, lora_b: dict[str, torch.Tensor]
) -> torch.Tensor:
    """What the blocks compute one after the other, of rows [copies x rows, ...]."""
    programs = {
        number: dynamic_program(kind.graph_module, SIZES).module(check_guards=False)
        for number, kind in chain.kinds.items()
    }

    def by_copies(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(COPIES_HERE, ROWS, *tensor.shape[1:])

    state = tokens
    for number, block in enumerate(chain.blocks):
        program = programs[chain.kind_of[number]]
        for name, tensor in chain.tensors(number).items():
            parent, _, child = name.rpartition(".")
            owner = program.get_submodule(parent) if parent else program
            delattr(owner, child)
            owner.register_buffer(child, tensor)
        inputs = []
        for node in block.graph_module.graph.find_nodes(op="placeholder"):
            name = str(node.target)
            if name in ("tokens", "state"):
                inputs.append(by_copies(state))
            elif name == "beside":
                inputs.append(by_copies(beside))
            elif name == "shift":
                inputs.append(torch.zeros(COPIES_HERE, ROWS, LENGTH, 1))
            elif name.startswith("table_"):
                table = chain.tables.all[block.tables[int(name.removeprefix("table_"))]]
                inputs.append(table.of(LENGTH))
            else:
                inputs.append(lora_b[chain.adapter[name].of])
        (state,) = program(*inputs)
        state = state.reshape(COPIES_HERE * ROWS, *state.shape[-2:]) if state.dim() > 2 else state
    return state


@pytest.mark.parametrize(
    "folder", ["llama", "bert", *rest("qwen3", "gemma3", "gpt2", "opt", "roberta")], indirect=True
)
def test_its_blocks_compute_what_the_model_computes(folder: Path) -> None:
    chain = chain_of(folder)
    is_decoder = chain.is_decoder
    generator = torch.Generator().manual_seed(1)
    rows = COPIES_HERE * ROWS
    tokens = torch.randint(3, 100, (rows, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (rows, 1), generator=generator)).long()
    targets = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    lora_b = {
        module.name: torch.randn(COPIES_HERE, module.rank, module.out_features, generator=generator) * 0.3
        for module in chain.modules
    }
    beside = targets if is_decoder else padding_mask(mask.float())
    found = answers(chain, tokens, beside, lora_b).reshape(rows, LENGTH, -1)

    for copy in range(COPIES_HERE):
        model = load_model(str(folder)).model
        convert_conv1d(model)
        for name, matrix in lora_b.items():
            model.get_submodule(name).weight.data += matrix[copy].T @ chain.lora_a[name]
        here = slice(copy * ROWS, (copy + 1) * ROWS)
        with torch.no_grad():
            output: Any = model(input_ids=tokens[here], attention_mask=mask[here])
        if is_decoder:
            chosen = output.logits.gather(-1, targets[here].unsqueeze(-1))
            expected = torch.cat([chosen, output.logits.exp().sum(-1, keepdim=True)], -1)
        else:
            expected = output.last_hidden_state
        told = mask[here].bool()
        assert torch.allclose(found[here][told], expected[told], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("folder", ["bert", "gpt2"], indirect=True)
def test_layers_have_no_bias_of_their_own(folder: Path) -> None:
    chain = chain_of(folder, scheme="8da8w")
    for kind in chain.kinds.values():
        layers = kind.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
        assert all(len(layer.args) == 2 for layer in layers)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_quantized_layers_are_codes_and_scales(folder: Path) -> None:
    chain = chain_of(folder, scheme="8da4w")
    block, head = chain.tensors(1), chain.tensors(len(chain.blocks) - 1)
    codes = {name: tensor for name, tensor in block.items() if tensor.dtype == torch.int8}
    layers = [tensor for name, tensor in codes.items() if name.endswith("_codes")]
    assert len(layers) == 7
    assert all(int(tensor.min()) >= -8 and int(tensor.max()) <= 7 for tensor in layers)
    assert not any("lora_a_codes" in name for name in block)
    for number, tensors in ((1, block), (len(chain.blocks) - 1, head)):
        graph_module = chain.kinds[chain.kind_of[number]].graph_module
        read = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
        assert set(tensors) == {name for name in read if not name.startswith("constant_")}
    assert max(int(tensor.max()) for name, tensor in head.items() if name.endswith("_codes")) > 100
