"""Rotary embeddings become products with one matrix per position, which turn as the model does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("executorch")

import torch

from server_export.graph import rotation
from server_export.graph.rotation import find_rotations, turn_by_layers
from server_export.lower.lowering import export_graph
from server_export.lower.method_graphs import export_programs
from server_export.model.program import example_inputs
from server_export.model.reference import exact_answers
from tests.server_export.programs import build
from tests.tiny_models import DECODERS

torch.set_num_threads(1)

LAYERS = 2
# Their queries and keys are turned by position; the others add a table to the embedding.
ROTARY = sorted(set(DECODERS) - {"opt", "gpt2"})


def operators(program: torch.export.ExportedProgram) -> Counter[str]:
    return Counter(
        str(node.target).split(".")[1] for node in program.graph.nodes if node.op == "call_function"
    )


def exported(architecture: str, **changes: Any) -> tuple[torch.export.ExportedProgram, Any]:
    built = build(architecture, **changes)
    return export_graph(built.module, example_inputs(built.contract)), built


@pytest.mark.parametrize("architecture", ROTARY)
def test_every_layer_turns_queries_and_keys_by_a_product(architecture: str) -> None:
    program, built = exported(architecture)
    found = operators(program)
    assert found["neg"] == found["cat"] == 0
    adapted = len(built.contract.modules)
    assert found["bmm"] == adapted + LAYERS * (2 + 2)


@pytest.mark.parametrize("architecture", sorted(DECODERS))
def test_answers_are_the_models(architecture: str) -> None:
    program, built = exported(architecture)
    for seed in range(2):
        inputs = example_inputs(built.contract, seed)
        with torch.no_grad():
            expected = built.module(*inputs)
            (actual,) = program.module(check_guards=False)(*inputs)
        assert (actual - expected).abs().max() < 2e-5


@pytest.mark.parametrize("architecture", ROTARY)
def test_tangents_are_turned_too(architecture: str) -> None:
    built = build(architecture, estimator="tangent", queries=3)
    program = export_programs(built)["forward"]
    assert operators(program)["neg"] == 0
    inputs = example_inputs(built.contract)
    with torch.no_grad():
        actual = program.module(check_guards=False)(*inputs)
    for ours, theirs in zip(actual, exact_answers(built.module, built.contract, inputs), strict=True):
        assert (ours - theirs).abs().max() < 2e-5 * max(1.0, float(theirs.abs().max()))


def test_the_form_does_not_depend_on_the_rows() -> None:
    one, many = (operators(exported("llama", copies=copies, batch_size=1)[0]) for copies in (1, 8))
    # Shapes with a dimension of 1 need fewer operators that only move numbers.
    computing = {"linear", "bmm", "mul", "add", "neg", "cat", "softmax", "slice"}
    assert {name: one[name] for name in computing} == {name: many[name] for name in computing}


def test_large_matrices_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "_LARGEST_ROTATION", 100)
    assert operators(exported("llama")[0])["neg"] == 2 * LAYERS


def test_matrices_are_the_rotation_and_its_scale() -> None:
    class Turning(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos", torch.randn(5, 4))
            self.register_buffer("sin", torch.randn(5, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = torch.cat((-x[..., 2:], x[..., :2]), dim=-1)
            return (x * self.cos + turned * self.sin) * 0.5

    x = torch.randn(2, 3, 5, 4)
    module = Turning()
    graph_module = torch.export.export(module, (x,)).module()
    (rotation,) = find_rotations(graph_module)
    expected = module(x)
    actual = torch.einsum("rhtw,twv->rhtv", x, rotation.matrices())
    assert (actual - expected).abs().max() < 1e-6
    assert rotation.scale == 0.5


def test_halves_are_turned_by_a_layer() -> None:
    class Rotary(torch.nn.Module):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            turned = torch.cat([-x[..., 3:], x[..., :3]], -1)
            return x * cos + turned * sin

    inputs = torch.randn(2, 3, 5, 6), torch.randn(5, 6), torch.randn(5, 6)
    graph_module = torch.export.export(Rotary(), inputs, strict=False).module(check_guards=False)
    turn_by_layers(graph_module)
    names = Counter(
        str(node.target).split(".")[1] for node in graph_module.graph.nodes if "aten" in str(node.target)
    )
    assert names == {"mul": 2, "linear": 1, "add": 1}
    assert torch.equal(graph_module(*inputs), Rotary()(*inputs))


@pytest.mark.parametrize("parts", [(0, 3, 3, 6), (3, 6, 3, 6), (2, 6, 0, 2)])
def test_what_turns_no_halves_stays(parts: tuple[int, int, int, int]) -> None:
    class Other(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c, d = parts
            return torch.cat([-x[..., a:b], x[..., c:d]], -1)

    x = torch.randn(2, 3, 5, 6)
    graph_module = torch.export.export(Other(), (x,), strict=False).module(check_guards=False)
    turn_by_layers(graph_module)
    assert not graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
