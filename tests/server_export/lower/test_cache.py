"""Cached programs are used if everything that they depend on is equal; else block types are lowered."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from prge.errors import Refusal
from prge.formats.signatures import Port
from server_export.ir.block import Block
from server_export.ir.rewriting import rewritten_graph
from server_export.lower import cache
from server_export.lower.block_type import LoweredBlockType
from server_export.lower.cache import ProgramCache
from server_export.lower.sizes import Size, SizedMethod
from tests.refusals import raises

WIDTH = 16
SIZE = Size(10007, 3, 1, 8)


class Layer(nn.Module):
    """A layer, and a factor that becomes a part of the program."""

    def __init__(self, seed: int = 0, factor: float = 0.5, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(width, WIDTH)
        self.factor = factor

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(state) * self.factor)


def methods(layer: Layer, name: str = "forward", size: Size = SIZE) -> dict[str, SizedMethod]:
    with FakeTensorMode():
        state = torch.empty(10007, layer.layer.in_features)
    graph_module = rewritten_graph(layer.eval().requires_grad_(False), (state,))
    (node,) = graph_module.graph.find_nodes(op="placeholder")
    node.meta["port"] = Port("hidden_states")
    return {name: SizedMethod(Block(graph_module, (Port("hidden_states"),)), {"rows": size})}


def lower(
    folder: Path, programs: Mapping[str, SizedMethod], split_methods: Collection[str] = ()
) -> tuple[LoweredBlockType, int]:
    """Lower a block type with a cache in this folder, and return it with the number of hits."""
    program_cache = ProgramCache(folder)
    return program_cache.lower(programs, {}, split_methods), program_cache.hits


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoweredBlockType]:
    folder = tmp_path_factory.mktemp("cached")
    block_type, hits = lower(folder, methods(Layer()))
    assert hits == 0
    return folder, block_type


@pytest.fixture
def filled(cached: tuple[Path, LoweredBlockType], tmp_path: Path) -> LoweredBlockType:
    """Return the block type in the cache `tmp_path / "cache"`."""
    shutil.copytree(cached[0], tmp_path / "cache")
    return cached[1]


def test_the_same_graph_with_other_weights_is_a_hit(
    filled: LoweredBlockType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cached program, torch.export doesn't even trace the block."""
    monkeypatch.setattr(cache, "lower_block_type", None)
    monkeypatch.setattr(SizedMethod, "program", None)
    block = Layer(seed=1)
    block_type, hits = lower(tmp_path / "cache", methods(block))
    assert hits == 1 and block_type.program == filled.program
    tensors = {f"layer.{name}": value for name, value in block.layer.named_parameters()}
    for number, each in enumerate((filled, block_type)):
        each.weights.write(tmp_path / str(number), tensors)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


@pytest.mark.parametrize(
    ("block", "name", "changes"),
    [
        (Layer(factor=0.25), "forward", {}),
        (Layer(width=2 * WIDTH), "forward", {}),
        (Layer(), "other", {}),
        (Layer(), "forward", {"size": Size(10007, 3, 1, 9)}),
        (Layer(), "forward", {"split_methods": ("forward",)}),
    ],
    ids=["number", "width", "name", "bound", "split methods"],
)
def test_a_program_is_lowered_again_if_something_it_depends_on_changes(
    filled: LoweredBlockType,
    tmp_path: Path,
    block: Layer,
    name: str,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "lower_block_type", lambda *_: filled)
    programs = methods(block, name, changes.get("size", SIZE))
    assert lower(tmp_path / "cache", programs, changes.get("split_methods", ())) == (filled, 0)
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def test_a_program_is_lowered_again_by_another_version_of_the_code(
    filled: LoweredBlockType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "lowering_code", lambda: "another")
    monkeypatch.setattr(cache, "lower_block_type", lambda *_: filled)
    assert lower(tmp_path / "cache", methods(Layer())) == (filled, 0)


def test_the_code_that_lowers_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of all listed packages are hashed."""
    root = Path(cache.__file__).resolve().parents[1]
    hashed = list[Path]()

    def watched(path: Path) -> str:
        hashed.append(path)
        return path.name

    monkeypatch.setattr(cache, "file_sha256", watched)
    cache.lowering_code.__wrapped__()
    assert {path.relative_to(root).parts[0] for path in hashed} == {*cache.LOWERING_ROOMS}
    assert root / "ir" / "rewriting.py" in hashed and root / "lower" / "block_type.py" in hashed


@pytest.mark.parametrize("damage", ["hash", "header", "end", "torn", "empty"])
def test_a_damaged_file_is_written_again(
    filled: LoweredBlockType, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    content = bytearray(whole)
    if damage in ("torn", "empty"):
        del content[50 if damage == "torn" else 0 :]
    else:
        content[{"hash": 0, "header": 40, "end": -1}[damage]] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr(cache, "lower_block_type", lambda *_: filled)
    assert lower(tmp_path / "cache", methods(Layer())) == (filled, 0)
    assert path.read_bytes() == whole


def test_a_folder_that_cant_be_written_only_costs_time(
    filled: LoweredBlockType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "lower_block_type", lambda *_: filled)
    (tmp_path / "file").touch()
    assert lower(tmp_path / "file" / "cache", methods(Layer())) == (filled, 0)


def test_the_cache_has_no_weights(tmp_path: Path) -> None:
    block = Layer()
    block.layer.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1234))
    lower(tmp_path / "cache", methods(block))
    (path,) = (tmp_path / "cache").iterdir()
    assert block.layer.weight.detach().numpy().tobytes()[:16] not in path.read_bytes()


def test_a_block_of_another_shape_is_refused(filled: LoweredBlockType, tmp_path: Path) -> None:
    block_type, _ = lower(tmp_path / "cache", methods(Layer()))
    with raises(Refusal, "constant-of-another-shape", containing="layer.weight"):
        block_type.weights.write(
            tmp_path / "x.ptd", {"layer.weight": torch.zeros(1, 1), "layer.bias": torch.zeros(1)}
        )
