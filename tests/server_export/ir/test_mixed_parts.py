"""Attention over past tokens and over a chunk: all forms of the operator compute the same."""

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
Tensors = list[torch.Tensor]


def random_inputs(sizes: tuple[int, ...]) -> Tensors:
    """Return the scores and the values of both parts."""
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
def test_all_forms_compute_one_attention_over_both_parts(sizes: tuple[int, ...]) -> None:
    inputs = random_inputs(sizes)
    core = rewritten_graph(Function(MIXED_PARTS), tuple(inputs))
    fill_in_values(core)
    write_core_operators(core)
    for form in (MIXED_PARTS, MixedParts.apply, core):
        torch.testing.assert_close(form(*inputs), by_pytorch(*inputs))


@given(SIZES)
@SOME
def test_the_backward_pass_is_that_of_autograd(sizes: tuple[int, ...]) -> None:
    inputs = [each.requires_grad_() for each in random_inputs(sizes)]
    grad_output = random(sizes[0], sizes[1], sizes[4], seed=9)
    for actual, expected in zip(
        torch.autograd.grad(MixedParts.apply(*inputs), inputs, grad_output),
        torch.autograd.grad(by_pytorch(*inputs), inputs, grad_output),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


def test_masked_tokens_have_no_gradient() -> None:
    before, within, past_values, values = (each.requires_grad_() for each in random_inputs((2, 3, 4, 3, 5)))
    mixed = MixedParts.apply(before - 3e4, within, past_values, values)
    grad_before, grad_past = torch.autograd.grad(mixed.sum(), (before, past_values))
    assert not grad_before.any() and not grad_past.any()
