"""Graphs of fixed sizes become programs with dynamic sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram

from prge.errors import Refusal
from server_export.lower.sizes import Size, dynamic_program
from tests.refusals import raises, refusal

torch.set_num_threads(1)

ROWS = Size(10007, 3, 1, 8)
TOKENS = Size(10009, 5, 1, 16)
COPIES = Size(10037, 2, 1, 4)
WIDTH, HEADS = 12, 3


class Attention(nn.Module):
    """A block with reshapes to heads, an attention mask, and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = state.shape
        heads = self.layer(state).reshape(rows, tokens, HEADS, -1).transpose(1, 2)
        heads = heads.reshape(rows * HEADS, tokens, -1)
        scores = torch.softmax(torch.bmm(heads, heads.transpose(1, 2)) + mask, -1)
        mixed = torch.bmm(scores, heads).reshape(rows, HEADS, tokens, -1)
        return state + mixed.transpose(1, 2).reshape(rows, tokens, width)


def traced(module: nn.Module, *shapes: tuple[int, ...]) -> torch.fx.GraphModule:
    """Return a static graph, traced on the meta device."""
    with torch.device("meta"):
        inputs = tuple(torch.empty(shape) for shape in shapes)
    program = torch.export.export(module.to("meta"), inputs, strict=False)
    return program.module(check_guards=False)


def with_weights(graph_module: torch.fx.GraphModule, seed: int = 0) -> torch.fx.GraphModule:
    """Return the graph with random constants in memory."""
    random = torch.Generator().manual_seed(seed)
    graph_module.to_empty(device="cpu")
    for tensor in (*graph_module.parameters(), *graph_module.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=random)
    return graph_module


def output_of(program: ExportedProgram, *inputs: torch.Tensor) -> torch.Tensor:
    """Return the only output of a program."""
    (output,) = program.module()(*inputs)
    return output


def operators(program: ExportedProgram) -> list[object]:
    return [
        node.target
        for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and "sym_size" not in str(node.target)
        and "assert" not in str(node.target)
    ]


@pytest.fixture(scope="module")
def attention() -> torch.fx.GraphModule:
    shapes = (ROWS.marker, TOKENS.marker, WIDTH), (TOKENS.marker, TOKENS.marker)
    return with_weights(traced(Attention(), *shapes))


def test_the_program_equals_that_of_torch_export_with_dynamic_sizes(attention: torch.fx.GraphModule) -> None:
    program = dynamic_program(attention, {"rows": ROWS, "tokens": TOKENS})
    module = Attention()
    module.load_state_dict(dict(attention.state_dict()))
    rows, tokens = Dim("rows", min=1), Dim("tokens", min=1)
    direct = torch.export.export(
        module,
        (torch.zeros(3, 5, WIDTH), torch.zeros(5, 5)),
        dynamic_shapes=({0: rows, 1: tokens}, {0: tokens, 1: tokens}),
        strict=False,
    )
    assert operators(program) == operators(direct)
    assert list(program.range_constraints.values()) == list(direct.range_constraints.values())
    for shape in ((3, 5), (1, 2), (8, 16), (2, 7)):
        inputs = torch.randn(*shape, WIDTH), torch.randn(shape[1], shape[1])
        assert torch.equal(output_of(program, *inputs), direct.module()(*inputs))


def test_a_dimension_that_is_a_product_becomes_two() -> None:
    class Stack(nn.Module):
        def forward(self, state: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
            copies = lora_b.shape[0]
            return torch.bmm(state.reshape(copies, -1, WIDTH), lora_b).reshape(*state.shape[:2], -1)

    sizes = {"copies": COPIES, "batch": ROWS, "tokens": TOKENS}
    shapes = (COPIES.marker * ROWS.marker, TOKENS.marker, WIDTH), (COPIES.marker, WIDTH, 7)
    program = dynamic_program(traced(Stack(), *shapes), sizes)
    for copies, batch, tokens in ((2, 3, 5), (1, 4, 9), (4, 1, 1)):
        state, lora_b = torch.randn(copies, batch, tokens, WIDTH), torch.randn(copies, WIDTH, 7)
        expected = Stack()(state.reshape(copies * batch, tokens, WIDTH), lora_b)
        torch.testing.assert_close(output_of(program, state, lora_b), expected)


def test_a_size_that_no_input_has_is_refused() -> None:
    class Spread(nn.Module):
        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return state.expand(ROWS.marker, WIDTH)

    with raises(Refusal, "size-without-input", containing="rows"):
        dynamic_program(traced(Spread(), (1, WIDTH)), {"rows": ROWS})


@pytest.mark.parametrize("end", [TOKENS.marker - 1, TOKENS.marker + 1, 2 * TOKENS.marker - 3])
def test_a_number_that_markers_dont_explain_is_refused(end: int) -> None:
    class Shifted(nn.Module):
        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return F.pad(state, (0, 3))[:, :end]

    with refusal("number-not-of-input-sizes"):
        dynamic_program(traced(Shifted(), (ROWS.marker, TOKENS.marker)), {"rows": ROWS, "tokens": TOKENS})


@pytest.mark.parametrize("scale", [TOKENS.marker * 2.0, 1 / TOKENS.marker])
def test_a_size_in_a_float_is_refused(scale: float) -> None:
    class Mean(nn.Module):
        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return state * scale

    with refusal("size-in-fraction"):
        dynamic_program(traced(Mean(), (ROWS.marker, TOKENS.marker)), {"rows": ROWS, "tokens": TOKENS})


def test_a_constant_with_a_size_is_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(TOKENS.marker))

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return state + self.mask

    with raises(Refusal, "constant-with-size", containing="mask"):
        dynamic_program(traced(Masked(), (ROWS.marker, TOKENS.marker)), {"rows": ROWS, "tokens": TOKENS})
