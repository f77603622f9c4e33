"""Slices of tensors whose other dimensions are dynamic are in a delegate, and right for every size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from executorch.runtime import Runtime
from torch import nn
from torch.export import Dim

from server_export.lower.program import lower_programs

torch.set_num_threads(1)

ROWS, TOKENS, WIDTH = 3, 5, 6


class SwappedHalves(nn.Module):
    """Puts the second half of the last dimension before the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        return torch.cat([doubled[..., 3:], doubled[..., :3]], -1) * x


class Tail(nn.Module):
    """Leaves the first row out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2)[1:] * 3


def lowered(
    module: nn.Module, x: torch.Tensor, folder: Path, *dynamic: int, least: int = 2
) -> tuple[list[str], Any]:
    """Lower a module with dynamic dimensions; return the slices outside of delegates, and the method."""
    dimensions = {index: Dim(f"size_{index}", min=least) for index in dynamic}
    exported = torch.export.export(module, (x,), dynamic_shapes=(dimensions,), strict=False)
    program = lower_programs({"forward": exported.run_decompositions({})})
    nodes = program.exported_program("forward").graph.nodes
    outside = [str(node.target) for node in nodes if "slice" in str(node.target)]
    path = folder / "program.pte"
    path.write_bytes(program.buffer)
    return outside, Runtime.get().load_program(path).load_method("forward")


def test_a_slice_takes_whole_dimensions_of_any_size(tmp_path: Path) -> None:
    module = SwappedHalves()
    outside, method = lowered(module, torch.randn(ROWS, 2, TOKENS, WIDTH), tmp_path, 0, 2)
    assert not outside
    for rows, tokens in ((ROWS, TOKENS), (2, 2), (2, TOKENS), (ROWS, 3)):
        x = torch.randn(rows, 2, tokens, WIDTH)
        assert torch.equal(method.execute([x])[0], module(x))


def test_a_slice_along_a_dynamic_dimension_is_in_no_delegate(tmp_path: Path) -> None:
    outside, method = lowered(Tail(), torch.randn(ROWS, WIDTH), tmp_path, 0, least=ROWS)
    assert len(outside) == 1
    x = torch.randn(ROWS, WIDTH)
    assert torch.equal(method.execute([x])[0], Tail()(x))
