"""Lowering a chain writes a few programs without weights, and a weights file for each block."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prge.errors import Refusal
from prge.formats.chain import Bounds, TensorSpec
from prge.formats.signatures import BACKWARD, FORWARD, JVP, RESIDUAL_ROLES
from server_export.check.chain import FLOAT_TOLERANCE, check_specs, verify_chain
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import load_meta_model
from server_export.lower.chain import LoweredChain, lower_chain
from server_export.model.chain import ModelChain
from server_export.pipeline import build_chain
from tests.refusals import raises, refusal
from tests.tiny_models import WIDTH, save_model

pytestmark = pytest.mark.whole

LONGEST = 16
LAYERS = 3


@dataclass(frozen=True)
class WrittenChain:
    """A chain and its lowered files."""

    chain: ModelChain
    lowered: LoweredChain
    folder: Path


def write_chain(model: Path, folder: Path, adapted: list[int], roles: list[str]) -> WrittenChain:
    """Lower a model with adapters on the queries of some blocks."""
    outline = load_meta_model(str(model))
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in adapted]
    generator = torch.Generator().manual_seed(0)
    lora_a = {name: torch.randn(4, WIDTH, generator=generator) * 0.1 for name in names}
    chain = build_chain(outline, find_files(str(model)), lora_a, longest=LONGEST)
    folder.mkdir()
    return WrittenChain(chain, lower_chain(chain, folder, roles, Bounds(tokens=LONGEST)), folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def upper(model: Path, tmp_path_factory: pytest.TempPathFactory) -> WrittenChain:
    """Return a model with adapters only in its last block."""
    return write_chain(model, tmp_path_factory.mktemp("upper") / "bundle", [LAYERS - 1], [JVP, BACKWARD])


def test_every_block_has_a_weights_file_and_the_program_of_its_type(upper: WrittenChain) -> None:
    programs = [program.file for program in upper.lowered.programs]
    assert programs == [f"programs/{name}.pte" for name in ("embedding", "block", "block-2", "head")]
    assert [block.program for block in upper.lowered.blocks] == [0, 1, 1, 2, 3]
    assert [block.weights for block in upper.lowered.blocks] == [
        f"weights/{name}.ptd" for name in ("embedding", "000", "001", "002", "head")
    ]
    assert all((upper.folder / name).stat().st_size < 200_000 for name in programs)


def test_blocks_below_the_lowest_adapter_have_no_derivatives(upper: WrittenChain) -> None:
    roles = [set(program.methods) for program in upper.lowered.programs]
    above = {FORWARD, JVP, BACKWARD, *RESIDUAL_ROLES}
    assert roles == [{FORWARD}, {FORWARD}, above, above]
    assert [block.modules for block in upper.lowered.blocks] == [(), (), (), (0,), ()]
    # Without a backward pass, a block needs no transposed weights.
    light, heavy = ((upper.folder / upper.lowered.blocks[number].weights).stat().st_size for number in (2, 3))
    assert heavy > 1.8 * light


def test_rotary_tables_have_a_file_of_their_own(upper: WrittenChain) -> None:
    tables = [table.type for table in upper.lowered.tables]
    assert tables.count("causal") == 1 and tables.count("rotary") == 2
    values = load_file(upper.folder / "tables.safetensors")
    assert sorted(values) == [str(number) for number, table in enumerate(tables) if table == "rotary"]
    assert all(value.shape[0] == LONGEST for value in values.values())


def test_engine_and_graphs_agree(upper: WrittenChain) -> None:
    verification = verify_chain(upper.chain, upper.lowered, upper.folder, "fp32")
    assert set(verification.differences) == {FORWARD, JVP, BACKWARD, *RESIDUAL_ROLES}
    assert max(verification.differences.values()) < FLOAT_TOLERANCE / 10


@pytest.mark.parametrize("number", [2, 3])
def test_a_damaged_weights_file_is_detected(upper: WrittenChain, tmp_path: Path, number: int) -> None:
    folder = Path(shutil.copytree(upper.folder, tmp_path / "bundle"))
    path = folder / upper.lowered.blocks[number].weights
    content = bytearray(path.read_bytes())
    # Change exponents of a few hundred floats, far after the file's header.
    for position in range(len(content) // 2 + 3, len(content) // 2 + 1200, 4):
        content[position] ^= 0x04
    path.write_bytes(content)
    with refusal("differs-from-graph"):
        verify_chain(upper.chain, upper.lowered, folder, "fp32")


def test_a_program_that_the_engine_refuses_is_an_error(upper: WrittenChain, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(upper.folder, tmp_path / "bundle"))
    shutil.copy(folder / upper.lowered.programs[0].file, folder / upper.lowered.programs[1].file)
    with raises(Refusal, "refused-by-engine", containing="block.pte in the role forward"):
        verify_chain(upper.chain, upper.lowered, folder, "fp32")


def test_a_program_whose_tensors_differ_from_its_specs_is_refused(upper: WrittenChain) -> None:
    described = upper.lowered.programs[1]
    method = described.methods[FORWARD]
    program = upper.folder / described.file
    check_specs(program, described)
    for spec in (TensorSpec("float32", (8, 4, 16, 32)), TensorSpec("int64", (8, 4, 16, WIDTH))):
        other = replace(method, input_specs=(spec, *method.input_specs[1:]))
        with raises(Refusal, "other-tensors", containing="block.pte"):
            check_specs(program, replace(described, methods={FORWARD: other}))
