"""A model cut into blocks, lowered by kinds, on the stock engine: any shape and adapter, the same numbers."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from device_runner.engines.native.engine import NativeEngine
from device_runner.engines.native.runtime import Arena, Method, Program, WeightsFile
from server_export.lower.kind import lower_kind
from server_export.lower.sizes import Size, dynamic_program
from server_export.model.chain import Chain, build_chain
from server_export.model.files import find_files
from server_export.model.loading import load_model, outline_model
from server_export.model.lora_fa import match_target_modules
from server_export.model.traced import BATCH, COPIES, TOKENS
from tests.tiny_models import VOCABULARY, WIDTH, save_model

pytestmark = [pytest.mark.export, pytest.mark.slow]

MOST_COPIES, MOST_ROWS, LONGEST = 8, 4, 32
SIZES = {
    "copies": Size(COPIES, 3, 1, MOST_COPIES),
    "batch": Size(BATCH, 2, 1, MOST_ROWS),
    "tokens": Size(TOKENS, 5, 2, LONGEST),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("chain") / "model", "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def chain(model_folder: Path) -> Chain:
    outline = outline_model(str(model_folder))
    names = match_target_modules(outline.model, ["q_proj", "v_proj"])
    generator = torch.Generator().manual_seed(0)
    lora_a = {name: torch.randn(4, WIDTH, generator=generator) * 0.1 for name in names}
    return build_chain(outline, find_files(str(model_folder)), lora_a, longest=LONGEST)


@pytest.fixture(scope="module")
def methods(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> list[Method]:
    """A loaded method for every block: programs by kind, weights by block, one arena."""
    folder = tmp_path_factory.mktemp("lowered")
    NativeEngine.prepare()
    programs = {}
    for number, kind in chain.kinds.items():
        lowered = lower_kind({"stack": dynamic_program(kind.graph_module, SIZES)})
        assert len(lowered.program) < 50_000
        path = folder / f"{number}.pte"
        path.write_bytes(lowered.program)
        programs[number] = Program(path)
        rules = {
            name: tensor for name, tensor in kind.graph_module.named_buffers() if name.startswith("constant_")
        }
        for block in (block for block, of in enumerate(chain.kind_of) if of == number):
            lowered.weights.write(folder / f"{block}.ptd", {**chain.tensors(block), **rules})
    arena = Arena(max(program.arena_bytes("stack") for program in programs.values()))
    return [
        programs[kind].load("stack", weights=WeightsFile(folder / f"{block}.ptd"), arena=arena)
        for block, kind in enumerate(chain.kind_of)
    ]


@pytest.mark.parametrize(("copies", "rows", "length"), [(2, 3, 17), (1, 1, 32), (5, 2, 9)])
def test_one_program_of_a_kind_serves_every_block_and_shape(
    chain: Chain, methods: list[Method], model_folder: Path, copies: int, rows: int, length: int
) -> None:
    assert chain.kind_of == [0, 1, 1, 1, 4]
    generator = torch.Generator().manual_seed(length)
    tokens, targets = (
        torch.randint(0, VOCABULARY, (copies * rows, length), generator=generator) for _ in range(2)
    )
    lora_b = {
        module.name: torch.randn(copies, module.rank, module.out_features, generator=generator) * 0.3
        for module in chain.modules
    }
    state = tokens.numpy().reshape(copies, rows, length)
    for number, (block, method) in enumerate(zip(chain.blocks, methods, strict=True)):
        inputs = []
        for node in block.graph_module.graph.find_nodes(op="placeholder"):
            name = str(node.target)
            if name in ("tokens", "state"):
                inputs.append(state)
            elif name == "beside":
                inputs.append(targets.numpy().reshape(copies, rows, length))
            elif name.startswith("table_"):
                table = chain.tables.all[block.tables[int(name.removeprefix("table_"))]]
                inputs.append(np.ascontiguousarray(table.of(length).numpy()))
            else:
                inputs.append(lora_b[chain.adapter[name]].numpy())
        output = np.empty(MOST_COPIES * MOST_ROWS * LONGEST * WIDTH, np.float32)
        (shape,) = method.run(inputs, [output])
        state = output[: int(np.prod(shape))].reshape(shape)
        if number < len(methods) - 1:
            state = state.reshape(copies, rows, length, WIDTH)

    whole = load_model(str(model_folder)).model
    for index in range(copies):
        model = copy.deepcopy(whole)
        for name, matrix in lora_b.items():
            model.get_submodule(name).weight.data += matrix[index].T @ chain.lora_a[name]
        here = slice(index * rows, (index + 1) * rows)
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=tokens[here]).logits, -1)
        expected = logprobs.gather(-1, targets[here].unsqueeze(-1)).squeeze(-1).numpy()
        found = state.reshape(copies * rows, length)[here]
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-5)
