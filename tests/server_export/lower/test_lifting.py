"""An exported program made of a graph, against the one that torch.export traces."""

from __future__ import annotations

import pytest

pytest.importorskip("executorch")

import torch
from torch import nn
from torch.export.graph_signature import InputKind

from server_export.lower.lifting import exported_program, interpret
from server_export.lower.lowering import rewritten_graph
from server_export.model.program import example_inputs
from tests.server_export.programs import build
from tests.tiny_models import SHALLOW

torch.set_num_threads(1)


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_it_is_the_program_that_tracing_gives(architecture: str) -> None:
    built = build(architecture, model=SHALLOW[architecture])
    inputs = example_inputs(built.contract)
    graph_module = rewritten_graph(built.module, inputs)
    lifted = exported_program(graph_module, inputs)
    with torch.no_grad():
        traced = torch.export.export(graph_module, inputs, strict=False)
    operators, expected = (
        [
            (node.target, node.meta["val"].shape)
            for node in program.graph.nodes
            if node.op == "call_function" and "assert" not in str(node.target)
        ]
        for program in (lifted, traced)
    )
    assert operators == expected
    assert {tensor.data_ptr() for tensor in lifted.state_dict.values()} == {
        tensor.data_ptr() for tensor in [*traced.state_dict.values(), *traced.constants.values()]
    }
    (answer,) = lifted.module(check_guards=False)(*inputs)
    torch.testing.assert_close(answer, built.module(*inputs))
    (interpreted,) = interpret(lifted, inputs)
    assert torch.equal(interpreted, answer)


def test_constants_become_buffers_and_come_first() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(3))

        def forward(self, source: torch.Tensor) -> torch.Tensor:
            return source + self.shift + self.shift

    inputs = (torch.zeros(2, 3),)
    program = exported_program(rewritten_graph(Shifted(), inputs), inputs)
    kinds = [spec.kind for spec in program.graph_signature.input_specs]
    assert kinds == [InputKind.BUFFER, InputKind.USER_INPUT]
    assert list(program.graph_signature.buffers) == ["shift"]
    assert [str(node.target) for node in program.graph.nodes][:2] == ["b_shift", "source"]


def test_answers_are_a_tuple() -> None:
    graph = torch.fx.Graph()
    source = graph.placeholder("source")
    graph.output((source, graph.call_function(torch.ops.aten.neg.default, (source,))))
    program = exported_program(torch.fx.GraphModule(nn.Module(), graph), [torch.ones(2)])
    answers = program.module(check_guards=False)(torch.ones(2))
    assert isinstance(answers, tuple)
    torch.testing.assert_close(answers, (torch.ones(2), -torch.ones(2)))
