"""Log-probabilities of chosen tokens: one operator, whose forms are all what PyTorch says."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import array_shapes

from server_export.graph.log_softmax import GATHER_LOG_SOFTMAX, GatherLogSoftmax

SHAPES = array_shapes(min_dims=1, max_dims=3, max_side=5)


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a shape, and an index [..., 1] into their last dimension."""
    generator = torch.Generator().manual_seed(sum(shape))
    logits = 5 * torch.randn(shape, generator=generator, dtype=dtype)
    return logits, torch.randint(shape[-1], (*shape[:-1], 1), generator=generator)


def by_pytorch(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1).gather(-1, index)


@given(SHAPES)
@settings(deadline=None, derandomize=True)
def test_all_forms_are_the_log_softmax_at_the_index(shape: tuple[int, ...]) -> None:
    logits, index = drawn(shape)
    for form in (GATHER_LOG_SOFTMAX, GatherLogSoftmax.apply):
        torch.testing.assert_close(form(logits, index), by_pytorch(logits, index))


@given(SHAPES)
@settings(deadline=None, derandomize=True)
def test_its_backward_pass_is_that_of_autograd(shape: tuple[int, ...]) -> None:
    logits, index = drawn(shape)
    logits.requires_grad_()
    slopes = torch.randn(index.shape, dtype=logits.dtype)
    expected, found = (
        torch.autograd.grad(form(logits, index), logits, slopes)[0]
        for form in (by_pytorch, GatherLogSoftmax.apply)
    )
    torch.testing.assert_close(found, expected)


def test_its_backward_pass_is_right_where_the_engine_sees_no_probability_any_more() -> None:
    logits, index = torch.tensor([0.0, 200.0]).requires_grad_(), torch.tensor([0])
    answer = GatherLogSoftmax.apply(logits, index)
    assert answer.item() == pytest.approx(-87.3365, abs=1e-4)
    (slopes,) = torch.autograd.grad(answer, logits, torch.ones(1))
    assert slopes.tolist() == [1.0, -1.0]


def test_a_traced_graph_keeps_it_whole() -> None:
    class Readout(torch.nn.Module):
        def forward(self, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return GATHER_LOG_SOFTMAX(logits * 2, index)

    program = torch.export.export(Readout(), drawn((2, 5)))
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert calls == [torch.ops.aten.mul.Tensor, GATHER_LOG_SOFTMAX]


def test_pytorch_differentiates_it_forward_for_many_directions_at_once() -> None:
    logits, index = drawn((3, 5))
    directions = torch.randn(4, 3, 5, dtype=logits.dtype)

    def along(direction: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda moved: GATHER_LOG_SOFTMAX(moved, index), (logits,), (direction,))[1]

    expected = torch.stack([direction.gather(-1, index) for direction in directions])
    expected -= (directions * torch.softmax(logits, -1)).sum(-1, keepdim=True)
    torch.testing.assert_close(torch.func.vmap(along)(directions), expected)
