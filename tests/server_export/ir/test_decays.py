"""Decays of a recurrent state, shared by all elements of a key or separate for each element."""

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


def random_inputs(tokens: int, has_own_decays: bool, strongest: float) -> list[Any]:
    """Return inputs of a recurrence with the delta rule; decays go down to the logarithm -`strongest`."""
    torch.manual_seed(tokens)
    query, key = torch.randn(2, ROWS, tokens, WIDTH)
    key = torch.nn.functional.normalize(key, dim=-1)
    value, strength = torch.randn(ROWS, tokens, VALUE), torch.rand(ROWS, tokens)
    decay = (
        -strongest * torch.rand(ROWS, tokens, WIDTH)
        if has_own_decays
        else -strongest * torch.rand(ROWS, tokens)
    )
    tables = [torch.from_numpy(relation("behind", tokens, first, None)) for first in (0, 1)]
    halves, meeting = (
        [torch.from_numpy(relation(table_type, tokens, size, None)) for size in SIZES]
        for table_type in ("halves", "meeting")
    )
    return [query, key, value, decay, strength, *tables, halves, meeting if has_own_decays else []]


def at_once(values: list[Any]) -> torch.Tensor:
    """Return the output of the recurrence as `expand` writes it."""
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
    placeholders_left = {str(node.target) for node in module.graph.find_nodes(op="placeholder")}
    result: torch.Tensor = module(
        *(v for name, v in zip(read, flat, strict=True) if name in placeholders_left)
    )
    return result


@pytest.mark.parametrize("has_own_decays", [False, True])
@pytest.mark.parametrize("tokens", [2, 7, 16])
def test_all_tokens_at_once_equal_one_token_at_a_time(has_own_decays: bool, tokens: int) -> None:
    values = random_inputs(tokens, has_own_decays, 2.0)
    np.testing.assert_allclose(at_once(values), recurrence(*values), atol=2e-5)


@pytest.mark.parametrize("has_own_decays", [False, True])
def test_strong_decays_leave_finite_values(has_own_decays: bool) -> None:
    """Sums of 16 decays exceed the exponents of float32 in both directions."""
    values = random_inputs(16, has_own_decays, 60.0)
    output = at_once(values)
    assert bool(torch.isfinite(output).all())
    np.testing.assert_allclose(output, recurrence(*values), atol=2e-5)


def test_tokens_decay_up_to_the_boundary_of_the_halves() -> None:
    expected = [
        [0, 1, 0, 0, 0],  # first half (tokens 0 and 1): the tokens after token 0
        [0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0],  # second half (tokens 2 and 3): the tokens up to token 2, inclusive
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(relation("meeting", 5, 2, None)[0], expected)
