"""What a memory keeps from token to token, where all numbers of a key decay alike and each for itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.fx import Graph, GraphModule

from prge.formats.relations import relation
from server_export.ir.recurrences import RECURRENCE, expand, recurrence

ROWS, WIDTH, VALUE = 2, 3, 4
SIZES = (1, 2, 4, 8)


def given(tokens: int, own: bool, strongest: float) -> list[Any]:
    """Inputs of a recurrence by the delta rule, whose decays go down to the logarithm -`strongest`."""
    torch.manual_seed(tokens)
    query, key = torch.randn(2, ROWS, tokens, WIDTH)
    key = torch.nn.functional.normalize(key, dim=-1)
    value, strength = torch.randn(ROWS, tokens, VALUE), torch.rand(ROWS, tokens)
    decay = -strongest * torch.rand(ROWS, tokens, WIDTH) if own else -strongest * torch.rand(ROWS, tokens)
    tables = [torch.from_numpy(relation("behind", tokens, first, None)) for first in (0, 1)]
    halves, meeting = (
        [torch.from_numpy(relation(kind, tokens, size, None)) for size in SIZES]
        for kind in ("halves", "meeting")
    )
    return [query, key, value, decay, strength, *tables, halves, meeting if own else []]


def at_once(values: list[Any]) -> torch.Tensor:
    """The recurrence as `expand` writes it."""
    graph, flat = Graph(), list[torch.Tensor]()

    def placeholder(value: Any) -> Any:
        if isinstance(value, list):
            return [placeholder(each) for each in value]
        node = graph.placeholder(f"table_{len(flat)}")
        node.meta["val"] = value.to("meta")
        flat.append(value)
        return node

    node = graph.call_function(RECURRENCE, tuple(map(placeholder, values)))
    node.meta["val"] = values[2].to("meta")
    graph.output(node)
    module = GraphModule(torch.nn.Module(), graph)
    read = [str(node.target) for node in graph.find_nodes(op="placeholder")]
    expand(module)
    kept = {str(node.target) for node in module.graph.find_nodes(op="placeholder")}
    result: torch.Tensor = module(*(v for name, v in zip(read, flat, strict=True) if name in kept))
    return result


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tokens", [2, 7, 16])
def test_all_tokens_at_once_are_those_one_after_the_other(own: bool, tokens: int) -> None:
    values = given(tokens, own, 2.0)
    np.testing.assert_allclose(at_once(values), recurrence(*values), atol=2e-5)


@pytest.mark.parametrize("own", [False, True])
def test_what_decays_to_nothing_leaves_finite_numbers(own: bool) -> None:
    """Sums of 16 decays are far below the exponents that float32 has, in both directions."""
    values = given(16, own, 60.0)
    found = at_once(values)
    assert bool(torch.isfinite(found).all())
    np.testing.assert_allclose(found, recurrence(*values), atol=2e-5)


def test_tokens_decay_up_to_the_place_where_the_halves_meet() -> None:
    expected = [
        [0, 1, 0, 0, 0],  # of tokens 0 and 1 | 2 and 3: what is behind token 0 in its half
        [0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0],  # in the second half up to token 2, with itself
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(relation("meeting", 5, 2, None)[0], expected)
