"""The inverse of triangular matrices: all forms agree, and the derivative is autograd's."""

from __future__ import annotations

import pytest
import torch

from prge.formats.relations import relation
from server_export.ir.core import write_core_operators
from server_export.ir.rewriting import rewritten_graph
from server_export.ir.shapes import fill_in_values
from server_export.ir.unit_inverse import UNIT_INVERSE, UnitInverse
from tests.server_export.derive.jvp.graphs import Function, random


def tables(count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the diagonal matrix of ones, and the masks of the halves of blocks of up to `count` rows."""
    sizes = [2**power for power in range(max(1, (count - 1).bit_length()))]
    halves = [torch.from_numpy(relation("halves", count, size, None)) for size in sizes]
    return torch.from_numpy(relation("behind", count, 0, 1)), halves


def exact(below: torch.Tensor) -> torch.Tensor:
    one = torch.eye(below.shape[-1], dtype=torch.float64)
    return torch.linalg.solve_triangular(one + below.double(), one, upper=False)


@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_all_forms_compute_the_inverse(count: int) -> None:
    below = random(3, count, count).float().tril(-1)
    one, halves = tables(count)
    core = rewritten_graph(Function(lambda x: UNIT_INVERSE(x, one, halves)), (below,))
    fill_in_values(core)
    write_core_operators(core)
    for result in (UNIT_INVERSE(below, one, halves), UnitInverse.apply(below, one, halves), core(below)):
        torch.testing.assert_close(result.double(), exact(below), rtol=1e-4, atol=1e-4)


def test_equal_tokens_lose_no_precision() -> None:
    """Powers of this matrix have elements of 1e37, its inverse has elements of 1."""
    below = torch.ones(1, 128, 128).tril(-1)
    result = UNIT_INVERSE(below, *tables(128))
    torch.testing.assert_close(result.double(), exact(below), atol=1e-6, rtol=0)


def test_the_derivative_is_that_of_autograd() -> None:
    below, grad_output = random(2, 6, 6).tril(-1).requires_grad_(), random(2, 6, 6, seed=1)
    one, halves = tables(6)
    double_tables = one.double(), [half.double() for half in halves]
    (result,) = torch.autograd.grad(UnitInverse.apply(below, *double_tables), below, grad_output)
    (expected,) = torch.autograd.grad(exact(below), below, grad_output)
    torch.testing.assert_close(result.tril(-1), expected.tril(-1))
