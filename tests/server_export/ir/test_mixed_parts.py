"""Attention over what came before a piece and over the piece: one operator, whose forms compute the same."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server_export.ir.core import write_core_operators
from server_export.ir.mixed_parts import MIXED_PARTS, MixedParts
from server_export.ir.rewriting import rewritten_graph
from server_export.ir.shapes import fill_in_values
from tests.server_export.derive.jvp.graphs import Function, random

SIZE = st.integers(1, 5)
SIZES = st.tuples(SIZE, SIZE, SIZE, SIZE, SIZE)
SOME = settings(derandomize=True)
Drawn = list[torch.Tensor]


def drawn(sizes: tuple[int, ...]) -> Drawn:
    """Scores of both parts, and the values of both."""
    heads, queries, past, tokens, width = sizes
    shapes = (heads, queries, past), (heads, queries, tokens), (heads, past, width), (heads, tokens, width)
    return [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def by_pytorch(
    before: torch.Tensor, within: torch.Tensor, past_values: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    weights = torch.softmax(torch.cat([before, within], -1), -1)
    return weights @ torch.cat([past_values, values], 1)


@given(SIZES)
@SOME
def test_all_forms_are_one_attention_over_both(sizes: tuple[int, ...]) -> None:
    inputs = drawn(sizes)
    core = rewritten_graph(Function(MIXED_PARTS), tuple(inputs))
    fill_in_values(core)
    write_core_operators(core)
    for form in (MIXED_PARTS, MixedParts.apply, core):
        torch.testing.assert_close(form(*inputs), by_pytorch(*inputs))


@given(SIZES)
@SOME
def test_its_backward_pass_is_that_of_autograd(sizes: tuple[int, ...]) -> None:
    inputs = [each.requires_grad_() for each in drawn(sizes)]
    slope = random(sizes[0], sizes[1], sizes[4], seed=9)
    for ours, theirs in zip(
        torch.autograd.grad(MixedParts.apply(*inputs), inputs, slope),
        torch.autograd.grad(by_pytorch(*inputs), inputs, slope),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_what_a_mask_hides_has_no_slope() -> None:
    before, within, past_values, values = (each.requires_grad_() for each in drawn((2, 3, 4, 3, 5)))
    mixed = MixedParts.apply(before - 3e4, within, past_values, values)
    by_before, by_past = torch.autograd.grad(mixed.sum(), (before, past_values))
    assert not by_before.any() and not by_past.any()
