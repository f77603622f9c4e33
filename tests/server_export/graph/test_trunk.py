"""Trunk and step of a cut program are together the program that was cut, in eager mode and in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("executorch")

import torch
from torch import nn
from torch.fx import GraphModule

from prge.bundle import SCORE_METHOD, TRUNK_METHOD, UPPER_METHOD, open_bundle
from prge.contract import TRUNK_PREFIX
from prge.errors import BundleError, ConfigError
from server_export.check import verification
from server_export.check.verification import run_program, verify
from server_export.derive.tangent.transform import RankOne, differentiate
from server_export.export import export
from server_export.graph.row_sharing import share_rows
from server_export.graph.trunk import split
from server_export.lower.lowering import LoweredProgram, lower, rewritten_graph
from server_export.lower.method_graphs import cut_of, export_programs
from server_export.model.program import BuiltProgram, example_inputs
from server_export.model.reference import exact_answers
from tests.server_export.programs import build, make_export_config
from tests.tiny_models import ARCHITECTURES, LENGTH, WIDTH, save_model

torch.set_num_threads(1)

Answers = tuple[torch.Tensor, ...]
UPPER = {"adapt_layers": "top:1", "trunk_cache": True, "target_modules": "all-linear"}


def placeholders(graph_module: GraphModule) -> list[str]:
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]


def cut_graphs(built: BuiltProgram) -> tuple[GraphModule, GraphModule]:
    """Trunk and step of all rows, before tangents."""
    plain = replace(built.contract, kind="stack", queries=0, shared_rows=False)
    graph_module = rewritten_graph(built.module, example_inputs(plain))
    names = placeholders(graph_module)
    return split(graph_module, names[: 2 if plain.is_encoder else 1], names[-len(plain.modules) :])


def adapter_of(step: GraphModule, built: BuiltProgram) -> list[str]:
    return placeholders(step)[-len(built.contract.modules) :]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_cut_at_one_tensor(architecture: str) -> None:
    """With copies and with tangents; the step takes no tokens."""
    tangent = build(architecture, estimator="tangent", **UPPER)
    trunk, step = cut_graphs(tangent)
    stack = build(architecture, **UPPER)
    shared = tuple(
        share_rows(part, adapter, 3)
        for part, adapter in zip(cut_graphs(stack), ((), adapter_of(step, stack)), strict=True)
    )
    seeds = dict.fromkeys(adapter_of(step, tangent), RankOne(tangent.contract.rows))
    for built, below, above in (
        (stack, *shared),
        (tangent, trunk, differentiate(step, seeds, tangent.contract.queries)),
    ):
        contract = built.contract
        inputs = example_inputs(contract, lora_b_scale=0.1)
        count = 2 if contract.is_encoder else 1
        assert "tokens" not in placeholders(above)
        with torch.no_grad():
            (states,) = below(*inputs[:count])
            found = above(states, *inputs[1:])
        assert states.shape == (contract.batch_size, LENGTH, WIDTH)
        for ours, theirs in zip(found, exact_answers(built.module, contract, inputs), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


class Branches(nn.Module):
    """Tokens reach the adapted layer on two ways, so that no single value cuts it off."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
        left, right = self.first(self.table(tokens)), self.second(self.table(tokens + 0))
        return left * adapter + right * (adapter + 1)


def test_without_a_single_value_every_crossing_one_is_the_cut() -> None:
    module = Branches().eval()
    tokens, adapter = torch.tensor([[0, 1], [2, 3]]), torch.randn(3)
    graph_module = rewritten_graph(module, (tokens, adapter))
    trunk, step = split(graph_module, ["tokens"], ["adapter"])
    with torch.no_grad():
        states = trunk(tokens)
        (found,) = step(*states, adapter)
        assert [state.shape for state in states] == [(2, 2, 3)] * 2
        torch.testing.assert_close(found, module(tokens, adapter))


def test_what_has_no_rows_is_no_cut() -> None:
    class Mixing(nn.Module):
        def forward(self, tokens: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
            return tokens.sum() * adapter

    graph_module = rewritten_graph(Mixing(), (torch.ones(2, 3), torch.ones(3)))
    with pytest.raises(ConfigError, match="isn't float32 states of 2 rows"):
        split(graph_module, ["tokens"], ["adapter"])


def test_adapters_from_the_first_block_on_leave_no_trunk() -> None:
    with pytest.raises(ConfigError, match="no block lies below the first adapted layer"):
        build("llama", trunk_cache=True)


# In the engine

CASES = {
    "stack": ("llama", {"copies": 3}),
    "one copy": ("llama", {"copies": 1}),
    "tangent": ("llama", {"estimator": "tangent"}),
    "quantized": ("qwen3", {"copies": 3, "quantize": "8da4w"}),
    "quantized tangent": ("llama", {"estimator": "tangent", "quantize": "8da8w"}),
    "encoder": ("bert", {"copies": 3}),
}


class Cut:
    """A program in three methods, its graphs and its file."""

    def __init__(self, built: BuiltProgram, folder: Path) -> None:
        self.built = built
        self.programs = export_programs(built)
        self.lowered: LoweredProgram = lower(self.programs)
        self.path = folder / "program.pte"
        self.path.write_bytes(self.lowered.buffer)


@pytest.fixture(scope="module", params=CASES)
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cut:
    architecture, changes = CASES[request.param]
    return Cut(build(architecture, **UPPER, **changes), tmp_path_factory.mktemp("cut"))


@pytest.mark.export
def test_verification_runs_both_parts_as_one(cut: Cut) -> None:
    found = verify(cut.path, cut.built, cut.programs)
    assert found.max_absolute_difference <= found.tolerance
    if cut.built.contract.is_tangent:
        assert found.tangent_difference is not None and found.tangent_tolerance is not None
        assert found.tangent_difference <= found.tangent_tolerance


@pytest.mark.export
def test_verification_refuses_a_trunk_that_differs(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(path: Path, inputs: Sequence[torch.Tensor], method: str, *_: object) -> Answers:
        answers = run_program(path, inputs, method)
        return tuple(answer * 2 for answer in answers) if method == TRUNK_METHOD else answers

    # Normalizations undo a factor, up to the residual states that they are added to.
    monkeypatch.setattr(verification, "run_program", damaged)
    with pytest.raises(BundleError, match="differs from the model by"):
        verify(cut.path, cut.built, cut.programs)


@pytest.mark.export
def test_weights_are_stored_once(cut: Cut) -> None:
    (alone,) = lower({SCORE_METHOD: cut.programs[SCORE_METHOD]}).reports.values()
    assert cut.lowered.reports[TRUNK_METHOD].constant_bytes < 1.08 * alone.constant_bytes
    assert list(cut.lowered.reports) == [TRUNK_METHOD, UPPER_METHOD, SCORE_METHOD]
    assert all(report.delegated_products == 1.0 for report in cut.lowered.reports.values())
    assert cut.lowered.reports[TRUNK_METHOD].delegates == 1


@pytest.mark.export
def test_a_row_of_the_trunk_has_the_same_bits_in_any_company(cut: Cut) -> None:
    """A cache may then compute rows in whatever groups they come."""
    contract, _ = cut.built.contract.divided(cut_of(cut.programs, cut.built))
    inputs, others = example_inputs(contract), example_inputs(contract, seed=1)
    swapped = [value.flip(0) for value in inputs]
    accompanied = [torch.cat([value[:1], other[1:]]) for value, other in zip(inputs, others, strict=True)]
    (states,) = run_program(cut.path, inputs, TRUNK_METHOD)
    (turned,) = run_program(cut.path, swapped, TRUNK_METHOD)
    (mixed,) = run_program(cut.path, accompanied, TRUNK_METHOD)
    assert torch.equal(turned.flip(0), states)
    assert torch.equal(mixed[0], states[0])


@pytest.mark.export
def test_an_exported_bundle_describes_its_methods(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama")
    config = make_export_config(str(folder), tmp_path / "bundle", adapt_layers="top:1", trunk_cache=True)
    bundle = open_bundle(export(config))
    assert list(bundle.methods) == [TRUNK_METHOD, UPPER_METHOD, SCORE_METHOD]
    assert bundle.trunk is not None and bundle.trunk.kind == "trunk"
    (crossing,) = bundle.trunk.outputs
    assert (crossing.name, crossing.shape) == (f"{TRUNK_PREFIX}0", (2, LENGTH, WIDTH))
    assert bundle.contract.inputs[0] == crossing
    assert bundle.contract.shared_rows and bundle.contract.copies == 3
    assert bundle.score_contract.can_score
    assert bundle.manifest["trunk_lowering"]["delegates"] == 1
    assert bundle.manifest["lora"]["target_modules"] == [module.name for module in bundle.contract.modules]
    for method, contract in bundle.methods.items():
        answers = run_program(bundle.program, example_inputs(contract), method)
        assert [tuple(answer.shape) for answer in answers] == [spec.shape for spec in contract.outputs]
