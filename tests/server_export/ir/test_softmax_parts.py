"""The contribution of a vocabulary shard to log-probabilities: all forms of the operator compute the same."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import array_shapes

from server_export.ir.softmax_parts import SOFTMAX_PARTS, SoftmaxParts

SHAPES = array_shapes(min_dims=1, max_dims=3, max_side=5)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Inputs:
    """Return logits of a shape, a shift and an index [..., 1] into the last dimension."""
    generator = torch.Generator().manual_seed(sum(shape))
    one = (*shape[:-1], 1)
    logits, shift = (5 * torch.randn(s, generator=generator, dtype=dtype) for s in (shape, one))
    return logits, shift, torch.randint(shape[-1], one, generator=generator)


def by_pytorch(logits: torch.Tensor, shift: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    total = torch.exp(torch.logsumexp(logits - shift, -1, keepdim=True))
    return torch.cat([logits.gather(-1, index) - shift, total], -1)


@given(SHAPES)
@settings(derandomize=True)
def test_all_forms_return_the_logit_at_the_index_and_the_sum(shape: tuple[int, ...]) -> None:
    inputs = random_inputs(shape)
    for form in (SOFTMAX_PARTS, SoftmaxParts.apply):
        torch.testing.assert_close(form(*inputs), by_pytorch(*inputs))


@given(SHAPES)
@settings(derandomize=True)
def test_the_backward_pass_is_that_of_autograd(shape: tuple[int, ...]) -> None:
    logits, shift, index = random_inputs(shape)
    logits.requires_grad_()
    grad_outputs = torch.randn((*index.shape[:-1], 2), dtype=logits.dtype)
    expected, actual = (
        torch.autograd.grad(form(logits, shift, index), logits, grad_outputs)[0]
        for form in (by_pytorch, SoftmaxParts.apply)
    )
    torch.testing.assert_close(actual, expected)


def test_with_the_log_of_the_sum_as_shift_it_has_the_gradient_of_a_log_probability() -> None:
    logits, _, index = random_inputs((3, 5))
    logits.requires_grad_()
    total = torch.logsumexp(logits, -1, keepdim=True)
    grad_output = torch.tensor([1.0, -1.0], dtype=logits.dtype).expand(3, 2)
    parts = SoftmaxParts.apply(logits, total.detach(), index)
    (actual,) = torch.autograd.grad(parts, logits, grad_output)
    (expected,) = torch.autograd.grad(torch.log_softmax(logits, -1).gather(-1, index).sum(), logits)
    torch.testing.assert_close(actual, expected)


def test_a_traced_graph_keeps_the_operator_whole() -> None:
    class Readout(torch.nn.Module):
        def forward(self, logits: torch.Tensor, shift: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return SOFTMAX_PARTS(logits * 2, shift, index)

    program = torch.export.export(Readout(), random_inputs((2, 5)))
    assert len(program.graph.find_nodes(op="call_function", target=SOFTMAX_PARTS)) == 1


def test_pytorch_computes_jvps_of_many_directions_at_once() -> None:
    logits, shift, index = random_inputs((3, 5))
    directions = torch.randn(4, 3, 5, dtype=logits.dtype)

    def along(direction: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda shifted: SOFTMAX_PARTS(shifted, shift, index), (logits,), (direction,))[
            1
        ]

    selected = torch.stack([direction.gather(-1, index) for direction in directions])
    total = (directions * torch.exp(logits - shift)).sum(-1, keepdim=True)
    torch.testing.assert_close(torch.func.vmap(along)(directions), torch.cat([selected, total], -1))
