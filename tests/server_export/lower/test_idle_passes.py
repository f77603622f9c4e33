"""Passes of ExecuTorch that would change nothing are left out; the programs are the same."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from server_export.lower import idle_passes, program
from server_export.lower.idle_passes import _NEEDED, idle_passes_left_out, write_views_as_copies


class Plain(nn.Module):
    """Products and sums of one type, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values).transpose(0, 1).unsqueeze(0) + values.t()


class Mixed(Plain):
    """The same with a number, another type, and a size in the place of tensors."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found = super().forward(values) * 2
        return found + torch.arange(6)[:, None] + torch.full_like(found, values.shape[0])


def exported(module: nn.Module) -> ExportedProgram:
    torch.manual_seed(0)
    return torch.export.export(module, (torch.ones(3, 6),), dynamic_shapes=({0: Dim("rows", min=2, max=9)},))


@pytest.mark.parametrize("kind", [Plain, Mixed])
def test_programs_are_the_same_to_the_byte(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = kind()
    with monkeypatch.context() as patch:
        patch.setattr(idle_passes, "idle_passes_left_out", nullcontext)
        whole = bytes(program.lowered({"forward": exported(module)}).buffer)
    assert bytes(program.lowered({"forward": exported(module)}).buffer) == whole


def test_passes_are_left_out_where_nothing_asks_for_them() -> None:
    plain, mixed = (exported(kind()).graph_module for kind in (Plain, Mixed))
    asked = {
        each.__name__: [any(map(needed, graph.graph.nodes)) for graph in (plain, mixed)]
        for each, needed in _NEEDED.items()
    }
    assert asked["ScalarToTensorPass"] == [False, True]
    assert asked["RemoveMixedTypeOperators"] == [False, True]
    assert asked["ReplaceViewOpsWithViewCopyOpsPass"] == [True, True]
    write_views_as_copies(plain.graph)
    assert not any(needed(node) for needed in _NEEDED.values() for node in plain.graph.nodes)


def test_passes_are_as_before_afterwards() -> None:
    before = {each: each.call for each in _NEEDED}
    with pytest.raises(ValueError, match="no"), idle_passes_left_out():
        assert all(each.call is not call for each, call in before.items())
        raise ValueError("no")
    assert {each: each.call for each in _NEEDED} == before
