"""A graph in edge operators against ExecuTorch's own conversion, in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("executorch")

import torch
import torch.nn.functional as F
from torch import nn

from server_export.check.verification import run_program
from server_export.graph.log_softmax import GATHER_LOG_SOFTMAX
from server_export.lower.edge import edge_program, to_core
from server_export.lower.lowering import lower

torch.set_num_threads(1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        gate = F.silu(self.layer(source)) * 2 + 1.5
        scores = torch.softmax(gate @ source.transpose(-1, -2), -1)
        picked = (1 - scores).reshape(-1, scores.shape[-1]).index_select(0, index + 1)
        return torch.log_softmax(picked, -1)


INPUTS = (torch.linspace(-1, 1, 48).reshape(2, 3, 8), torch.tensor([0, 3]))


def core_program(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    traced = torch.export.export(module, inputs, strict=False).module(check_guards=False)
    return torch.export.export(to_core(traced), inputs, strict=False)


def engine_answer(buffer: bytes, folder: Path) -> torch.Tensor:
    path = folder / "program.pte"
    path.write_bytes(buffer)
    return run_program(path, INPUTS)[0]


def test_engine_answers_what_executorch_s_own_conversion_answers(tmp_path: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    module = Gated().eval()
    plain = torch.export.export(module, INPUTS, strict=False)
    theirs = to_edge_transform_and_lower(plain, partitioner=[XnnpackPartitioner()]).to_executorch().buffer
    ours = lower({"forward": core_program(module, INPUTS)}).buffer
    expected = module(*INPUTS).detach()
    torch.testing.assert_close(engine_answer(bytes(theirs), tmp_path), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(engine_answer(ours, tmp_path), expected, atol=1e-5, rtol=0)


def test_numbers_among_tensors_are_constants_of_the_same_type() -> None:
    program = core_program(Gated().eval(), INPUTS)
    constants = {str(value): value.dtype for name, value in program.named_buffers() if "number" in name}
    assert constants == {
        "tensor(2.)": torch.float32,
        "tensor(1.5000)": torch.float32,
        "tensor(1.)": torch.float32,
        "tensor(1)": torch.int64,
    }


def test_equal_operators_are_computed_once() -> None:
    class Twice(nn.Module):
        def forward(self, source: torch.Tensor) -> torch.Tensor:
            return torch.exp(source * 3) + torch.exp(source * 3)

    program = core_program(Twice(), INPUTS[:1])
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("aten.exp.default") == 1


def test_operators_without_an_edge_name_are_decomposed(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return torch.square(source).masked_fill(source > 0.5, -1.0) + index[:1].to(torch.float32)

    module = Masked()
    buffer = lower({"forward": core_program(module, INPUTS)}).buffer
    torch.testing.assert_close(engine_answer(buffer, tmp_path), module(*INPUTS), atol=1e-6, rtol=0)


def test_the_program_it_is_made_from_stays_as_it_is() -> None:
    from executorch.exir import EdgeCompileConfig

    module = Gated().eval()
    program = core_program(module, INPUTS)
    edge = edge_program(program, EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True))
    assert all("aten" in str(node.target) for node in program.graph.nodes if node.op == "call_function")
    assert "edge" in str(type(next(n for n in edge.graph.nodes if n.op == "call_function").target))
    torch.testing.assert_close(program.module(check_guards=False)(*INPUTS), module(*INPUTS))


class Readout(nn.Module):
    def forward(self, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return GATHER_LOG_SOFTMAX(logits, index)


def test_logarithms_are_taken_of_chosen_probabilities_alone(tmp_path: Path) -> None:
    logits = 10 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    index = torch.arange(0, 48, 12).reshape(4, 1)
    program = core_program(Readout(), (logits, index))
    operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [name.split(".")[1] for name in operators] == ["_softmax", "gather", "clamp", "log"]
    path = tmp_path / "program.pte"
    path.write_bytes(lower({"forward": program}).buffer)
    expected = torch.log_softmax(logits, -1).gather(-1, index)
    torch.testing.assert_close(run_program(path, (logits, index))[0], expected, atol=1e-5, rtol=0)


def test_a_probability_below_the_least_float_has_the_logarithm_of_that(tmp_path: Path) -> None:
    logits = torch.tensor([[0.0, 200.0, -200.0]]).repeat(3, 1)
    index = torch.tensor([[0], [1], [2]])
    path = tmp_path / "program.pte"
    path.write_bytes(lower({"forward": core_program(Readout(), (logits, index))}).buffer)
    (answer,) = run_program(path, (logits, index))
    torch.testing.assert_close(answer, torch.tensor([[-87.3365], [0.0], [-87.3365]]), atol=1e-4, rtol=0)
