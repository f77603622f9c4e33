"""A chain becomes a few programs without weights, and a weights file for every block."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prge.errors import Refusal
from prge.files.chain import Bounds, TensorSpec
from prge.files.signatures import BACK, OF_BACK, STACK, TANGENT
from server_export.check.chain import FLOAT_TOLERANCE, check_specs, verify_chain
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import outline_model
from server_export.lower.chain import LoweredChain, lower_chain
from server_export.model.chain import ModelChain
from server_export.pipeline import build_chain
from tests.refusals import raises, refusal
from tests.tiny_models import WIDTH, save_model

pytestmark = pytest.mark.whole

LONGEST = 16
LAYERS = 3


@dataclass(frozen=True)
class Written:
    """A chain and what was written of it."""

    chain: ModelChain
    lowered: LoweredChain
    folder: Path


def written(model: Path, folder: Path, adapted: list[int], roles: list[str]) -> Written:
    """A model with adapters on the queries of some blocks, as files."""
    outline = outline_model(str(model))
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in adapted]
    generator = torch.Generator().manual_seed(0)
    lora_a = {name: torch.randn(4, WIDTH, generator=generator) * 0.1 for name in names}
    chain = build_chain(outline, find_files(str(model)), lora_a, longest=LONGEST)
    folder.mkdir()
    return Written(chain, lower_chain(chain, folder, roles, Bounds(tokens=LONGEST)), folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def upper(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Adapters in the last block alone."""
    return written(model, tmp_path_factory.mktemp("upper") / "bundle", [LAYERS - 1], [TANGENT, BACK])


def test_every_block_has_a_weights_file_and_its_kinds_program(upper: Written) -> None:
    programs = [kind.program for kind in upper.lowered.kinds]
    assert programs == [f"programs/{name}.pte" for name in ("embedding", "block", "block-2", "head")]
    assert [block.kind for block in upper.lowered.blocks] == [0, 1, 1, 2, 3]
    assert [block.weights for block in upper.lowered.blocks] == [
        f"weights/{name}.ptd" for name in ("embedding", "000", "001", "002", "head")
    ]
    assert all((upper.folder / name).stat().st_size < 200_000 for name in programs)


def test_blocks_below_the_lowest_adapter_have_no_derivatives(upper: Written) -> None:
    roles = [set(kind.methods) for kind in upper.lowered.kinds]
    above = {STACK, TANGENT, BACK, *OF_BACK}
    assert roles == [{STACK}, {STACK}, above, above]
    assert [block.modules for block in upper.lowered.blocks] == [(), (), (), (0,), ()]
    # Without the way back a block needs no transposed weights.
    light, heavy = ((upper.folder / upper.lowered.blocks[number].weights).stat().st_size for number in (2, 3))
    assert heavy > 1.8 * light


def test_rotations_lie_in_a_file_of_their_own(upper: Written) -> None:
    tables = [table.kind for table in upper.lowered.tables]
    assert tables.count("causal") == 1 and tables.count("rotary") == 2
    values = load_file(upper.folder / "tables.safetensors")
    assert sorted(values) == [str(number) for number, kind in enumerate(tables) if kind == "rotary"]
    assert all(value.shape[0] == LONGEST for value in values.values())


def test_engine_and_graphs_agree(upper: Written) -> None:
    verification = verify_chain(upper.chain, upper.lowered, upper.folder, "fp32")
    assert set(verification.differences) == {STACK, TANGENT, BACK, *OF_BACK}
    assert max(verification.differences.values()) < FLOAT_TOLERANCE / 10


@pytest.mark.parametrize("number", [2, 3])
def test_a_weights_file_of_another_content_is_found(upper: Written, tmp_path: Path, number: int) -> None:
    folder = Path(shutil.copytree(upper.folder, tmp_path / "bundle"))
    path = folder / upper.lowered.blocks[number].weights
    content = bytearray(path.read_bytes())
    # The exponents of a few hundred floats, far behind the file's head.
    for place in range(len(content) // 2 + 3, len(content) // 2 + 1200, 4):
        content[place] ^= 0x04
    path.write_bytes(content)
    with refusal("differs-from-graph"):
        verify_chain(upper.chain, upper.lowered, folder, "fp32")


def test_a_program_that_the_engine_refuses_is_told(upper: Written, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(upper.folder, tmp_path / "bundle"))
    shutil.copy(folder / upper.lowered.kinds[0].program, folder / upper.lowered.kinds[1].program)
    with raises(Refusal, "refused-by-engine", saying="block.pte in the role stack"):
        verify_chain(upper.chain, upper.lowered, folder, "fp32")


def test_a_program_of_other_tensors_than_the_specs_say_is_told(upper: Written) -> None:
    kind = upper.lowered.kinds[1]
    method = kind.methods[STACK]
    program = upper.folder / kind.program
    check_specs(program, kind)
    for spec in (TensorSpec("float32", (8, 4, 16, 32)), TensorSpec("int64", (8, 4, 16, WIDTH))):
        other = replace(method, input_specs=(spec, *method.input_specs[1:]))
        with raises(Refusal, "other-tensors", saying="block.pte"):
            check_specs(program, replace(kind, methods={STACK: other}))
