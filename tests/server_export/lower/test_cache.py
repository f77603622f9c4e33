"""Programs of earlier exports: taken where all that they follow from is the same, else lowered."""

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
from prge.files.signatures import Port
from server_export.ir.block import Block
from server_export.ir.rewriting import rewritten_graph
from server_export.lower import cache
from server_export.lower.cache import ProgramCache
from server_export.lower.kind import LoweredKind
from server_export.lower.sizes import Method, Size
from tests.refusals import raises

WIDTH = 16
SIZE = Size(10007, 3, 1, 8)


class Layer(nn.Module):
    """A layer, and a number that becomes a part of the program."""

    def __init__(self, seed: int = 0, slope: float = 0.5, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(width, WIDTH)
        self.slope = slope

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(state) * self.slope)


def methods(layer: Layer, name: str = "stack", size: Size = SIZE) -> dict[str, Method]:
    with FakeTensorMode():
        state = torch.empty(10007, layer.layer.in_features)
    graph_module = rewritten_graph(layer.eval().requires_grad_(False), (state,))
    (node,) = graph_module.graph.find_nodes(op="placeholder")
    node.meta["port"] = Port("state")
    return {name: Method(Block(graph_module, (Port("state"),)), {"rows": size})}


def lower(
    folder: Path, programs: Mapping[str, Method], in_pieces: Collection[str] = ()
) -> tuple[LoweredKind, int]:
    """A kind by a cache of this folder, and how many it took from there."""
    programs_of = ProgramCache(folder)
    return programs_of.lower(programs, {}, in_pieces), programs_of.taken


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoweredKind]:
    folder = tmp_path_factory.mktemp("made")
    kind, taken = lower(folder, methods(Layer()))
    assert taken == 0
    return folder, kind


@pytest.fixture
def filled(made: tuple[Path, LoweredKind], tmp_path: Path) -> LoweredKind:
    """The kind in the file of `tmp_path / "cache"`."""
    shutil.copytree(made[0], tmp_path / "cache")
    return made[1]


def test_the_same_graph_with_other_weights_is_taken(
    filled: LoweredKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even torch.export traces it."""
    monkeypatch.setattr(cache, "lower_kind", None)
    monkeypatch.setattr(Method, "program", None)
    block = Layer(seed=1)
    kind, taken = lower(tmp_path / "cache", methods(block))
    assert taken == 1 and kind.program == filled.program
    tensors = {f"layer.{name}": value for name, value in block.layer.named_parameters()}
    for number, each in enumerate((filled, kind)):
        each.weights.write(tmp_path / str(number), tensors)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


@pytest.mark.parametrize(
    ("block", "name", "changes"),
    [
        (Layer(slope=0.25), "stack", {}),
        (Layer(width=2 * WIDTH), "stack", {}),
        (Layer(), "other", {}),
        (Layer(), "stack", {"size": Size(10007, 3, 1, 9)}),
        (Layer(), "stack", {"in_pieces": ("stack",)}),
    ],
    ids=["number", "width", "name", "bound", "pieces"],
)
def test_what_a_program_follows_from_makes_another(
    filled: LoweredKind,
    tmp_path: Path,
    block: Layer,
    name: str,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "lower_kind", lambda *_: filled)
    programs = methods(block, name, changes.get("size", SIZE))
    assert lower(tmp_path / "cache", programs, changes.get("in_pieces", ())) == (filled, 0)
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def test_another_version_of_what_lowers_makes_another(
    filled: LoweredKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "lowering_code", lambda: "another")
    monkeypatch.setattr(cache, "lower_kind", lambda *_: filled)
    assert lower(tmp_path / "cache", methods(Layer())) == (filled, 0)


def test_the_code_that_lowers_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of every room that is named, which has some."""
    root = Path(cache.__file__).resolve().parents[1]
    hashed = list[Path]()

    def watched(path: Path) -> str:
        hashed.append(path)
        return path.name

    monkeypatch.setattr(cache, "file_sha256", watched)
    cache.lowering_code.__wrapped__()
    assert {path.relative_to(root).parts[0] for path in hashed} == {*cache.LOWERING_ROOMS}
    assert root / "ir" / "rewriting.py" in hashed and root / "lower" / "kind.py" in hashed


@pytest.mark.parametrize("damage", ["hash", "header", "end", "torn", "empty"])
def test_a_damaged_file_is_made_again(
    filled: LoweredKind, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    content = bytearray(whole)
    if damage in ("torn", "empty"):
        del content[50 if damage == "torn" else 0 :]
    else:
        content[{"hash": 0, "header": 40, "end": -1}[damage]] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr(cache, "lower_kind", lambda *_: filled)
    assert lower(tmp_path / "cache", methods(Layer())) == (filled, 0)
    assert path.read_bytes() == whole


def test_a_folder_that_cant_be_written_costs_time_alone(
    filled: LoweredKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "lower_kind", lambda *_: filled)
    (tmp_path / "file").touch()
    assert lower(tmp_path / "file" / "cache", methods(Layer())) == (filled, 0)


def test_no_weight_is_kept(tmp_path: Path) -> None:
    block = Layer()
    block.layer.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1234))
    lower(tmp_path / "cache", methods(block))
    (path,) = (tmp_path / "cache").iterdir()
    assert block.layer.weight.detach().numpy().tobytes()[:16] not in path.read_bytes()


def test_a_block_of_another_shape_is_refused_as_ever(filled: LoweredKind, tmp_path: Path) -> None:
    kind, _ = lower(tmp_path / "cache", methods(Layer()))
    with raises(Refusal, "constant-of-another-shape", saying="layer.weight"):
        kind.weights.write(
            tmp_path / "x.ptd", {"layer.weight": torch.zeros(1, 1), "layer.bias": torch.zeros(1)}
        )
