"""The lowered program in the stock engine against the eager program, and what stays outside the delegates."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("executorch")

import torch

from server_export.check.verification import FP32_TOLERANCE, run_program
from server_export.lower.lowering import export_graph, lower
from server_export.lower.method_graphs import export_programs
from server_export.model.program import STEP_METHOD, example_inputs
from tests.server_export.programs import build
from tests.tiny_models import ARCHITECTURES, DECODERS, SHALLOW

torch.set_num_threads(1)

# All that a program may leave to portable kernels: table lookups, the cast of a mask.
OUTSIDE = {
    "logprobs": {"embedding", "add", "view_copy", "index_select", "gather"},
    "pooled": {"embedding", "_to_copy"},
}


@pytest.mark.export
@pytest.mark.parametrize("scheme", ["fp32", "8da8w", "8da4w"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_engine_is_the_eager_program(architecture: str, scheme: str, tmp_path: Path) -> None:
    built = build(architecture, model=SHALLOW[architecture], quantize=scheme)
    lowered = lower(export_programs(built))
    path = tmp_path / "program.pte"
    path.write_bytes(lowered.buffer)
    for seed in range(3):
        inputs = example_inputs(built.contract, seed)
        with torch.no_grad():
            expected = built.module(*inputs)
        difference = (run_program(path, inputs)[0] - expected).abs()
        if scheme == "fp32":
            assert difference.max() < FP32_TOLERANCE
        else:
            # Most rows agree to the last digits; where a code of an activation is rounded the other way,
            # one step of int8 shows.
            assert difference.median() < FP32_TOLERANCE
            assert difference.max() < 0.05 * float(expected.std())
    report = lowered.reports[STEP_METHOD]
    assert set(report.outside) <= OUTSIDE[built.contract.readout]
    assert report.delegated_products == 1.0
    assert report.delegated_share > 0.9
    # A decoder: up to the states, the picked states, the head, its soft cap, the shape of the answer.
    assert report.delegates <= (5 if architecture in DECODERS else 1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graph_computes_no_masks_or_tables(architecture: str) -> None:
    built = build(architecture)
    graph = export_graph(built.module, example_inputs(built.contract)).graph
    operators = {str(node.target).split(".")[1] for node in graph.nodes if node.op == "call_function"}
    allowed = {"embedding", "index_select", "gather", "clamp", "log", "linear", "bmm", "_softmax"}
    allowed |= {"add", "sub", "mul", "div", "neg", "rsqrt", "tanh", "sigmoid", "gelu", "relu"}
    allowed |= {"reshape", "view", "transpose", "slice", "cat", "permute", "to", "_assert_tensor_metadata"}
    assert operators <= allowed


def test_memory_and_size_are_reported() -> None:
    built = build("bert", model=SHALLOW["bert"])
    lowered = lower(export_programs(built))
    weights = sum(buffer.numel() * 4 for buffer in built.module.model.parameters())
    assert lowered.reports[STEP_METHOD].program_bytes == len(lowered.buffer)
    assert 0.8 * weights < lowered.reports[STEP_METHOD].constant_bytes < len(lowered.buffer)
    assert lowered.reports[STEP_METHOD].planned_memory_bytes > 0
