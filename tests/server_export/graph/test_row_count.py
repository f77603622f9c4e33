"""A graph traced with one number of rows, and made into one of another, against the eager program."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("executorch")

import torch
from torch import nn

from server_export.graph.row_count import TRACED_ROWS, with_rows
from server_export.lower import method_graphs
from server_export.lower.lifting import exported_program
from server_export.lower.lowering import rewritten_graph
from server_export.lower.method_graphs import export_programs
from server_export.model.program import example_inputs
from tests.server_export.programs import build
from tests.tiny_models import ARCHITECTURES, SHALLOW

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("architecture", "scheme"), [*((name, "fp32") for name in ARCHITECTURES), ("llama", "8da4w")]
)
def test_answers_are_those_of_the_model(architecture: str, scheme: str) -> None:
    built = build(architecture, model=SHALLOW[architecture], quantize=scheme, copies=1)
    traced = rewritten_graph(built.module, example_inputs(replace(built.contract, batch_size=TRACED_ROWS)))
    for rows in (1, 3):
        inputs = example_inputs(replace(built.contract, batch_size=rows))
        graph_module = with_rows(traced, rows)
        assert graph_module is not None
        with torch.no_grad():
            (found,) = graph_module(*inputs)
            expected = built.module(*inputs)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert (
            found.shape
            == exported_program(graph_module, inputs).graph.output_node().args[0][0].meta["val"].shape
        )


def test_a_tangent_program_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []

    def counted(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.fx.GraphModule:
        traces.append(inputs[0].shape[0])
        return rewritten_graph(module, inputs)

    monkeypatch.setattr(method_graphs, "rewritten_graph", counted)
    export_programs(build("llama", model=SHALLOW["llama"], estimator="tangent", copies=None))
    assert traces == [TRACED_ROWS]


def test_a_graph_whose_shapes_do_not_follow_its_rows_is_refused() -> None:
    class Flattened(nn.Module):
        def forward(self, source: torch.Tensor) -> torch.Tensor:
            return source + torch.ones(2 * TRACED_ROWS, 1)[::2]

    traced = rewritten_graph(Flattened(), (torch.zeros(TRACED_ROWS, 4),))
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            setattr(traced, str(node.target), torch.ones(TRACED_ROWS + 1, 1))
    assert with_rows(traced, 2) is None
