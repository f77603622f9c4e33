"""Whole programs with tangents: in eager mode against PyTorch, in the engine against eager mode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("executorch")

import torch

from prge.bundle import open_bundle
from prge.contract import V_PREFIX
from prge.errors import BundleError, ConfigError
from server_export.check import verification
from server_export.check.verification import FP32_TOLERANCE, run_program, verify
from server_export.export import export
from server_export.lower.lowering import LoweringReport, lower
from server_export.lower.method_graphs import export_programs
from server_export.model.program import SCORE_METHOD, STEP_METHOD, BuiltProgram, build_program, example_inputs
from server_export.model.reference import exact_answers
from tests.server_export.derive.tangent.graphs import (
    Tensors,
    program_with_tangents,
    relative_difference,
    tangents_by_gradients,
)
from tests.server_export.lower.test_lowering import OUTSIDE
from tests.server_export.programs import build, make_export_config
from tests.tiny_models import ARCHITECTURES, SHALLOW, save_model

torch.set_num_threads(1)

EAGER_TOLERANCE = 1e-5

Programs = dict[str, torch.export.ExportedProgram]
Small = tuple[BuiltProgram, Programs]


@pytest.fixture(scope="module")
def small() -> Small:
    built = build("llama", SHALLOW["llama"], estimator="tangent")
    return built, export_programs(built)


def eager(program: torch.export.ExportedProgram, inputs: Tensors) -> Tensors:
    """What a graph answers in eager mode."""
    with torch.no_grad():
        answers = program.module(check_guards=False)(*inputs)
    return answers if isinstance(answers, tuple) else (answers,)


def check_graph(built: BuiltProgram) -> None:
    """The graph's answers and tangents in eager mode against PyTorch's own forward mode."""
    inputs = example_inputs(built.contract, lora_b_scale=0.1)
    with torch.no_grad():
        found = program_with_tangents(built)(*inputs)
    for ours, theirs in zip(found, exact_answers(built.module, built.contract, inputs), strict=True):
        assert relative_difference(ours, theirs) < EAGER_TOLERANCE


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_usual_targets(architecture: str) -> None:
    check_graph(build(architecture, SHALLOW[architecture], estimator="tangent"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_linear_layer(architecture: str) -> None:
    check_graph(build(architecture, SHALLOW[architecture], estimator="tangent", target_modules="all-linear"))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"label_tokens": (7, 90, 3)}),
        ("llama", {"readout": "pooled", "pooling": "mean"}),
        ("bert", {"pooling": "first"}),
        ("gpt2", {"queries": 1, "batch_size": 1, "positions": 1}),
    ],
    ids=["verbalizer", "pooled decoder", "first token", "one of everything"],
)
def test_readouts(architecture: str, changes: dict[str, Any]) -> None:
    check_graph(build(architecture, estimator="tangent", **changes))


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_reference_is_what_backpropagation_says(architecture: str) -> None:
    built = build(architecture, estimator="tangent", target_modules="all-linear")
    inputs = example_inputs(built.contract, lora_b_scale=0.1)
    _, tangents = exact_answers(built.module, built.contract, inputs)
    assert relative_difference(tangents, tangents_by_gradients(built, inputs)) < EAGER_TOLERANCE


def test_thirty_layers() -> None:
    built = build("llama", {"num_hidden_layers": 30}, estimator="tangent", positions=1, queries=1)
    inputs = example_inputs(built.contract, lora_b_scale=0.1)
    with torch.no_grad():
        _, tangents = program_with_tangents(built)(*inputs)
    assert bool(torch.isfinite(tangents).all())
    assert relative_difference(tangents, tangents_by_gradients(built, inputs)) < 1e-4


def test_methods_are_of_their_contracts(small: Small) -> None:
    built, programs = small
    assert list(programs) == [STEP_METHOD, SCORE_METHOD]
    assert built.contracts[SCORE_METHOD].rows == built.contracts[STEP_METHOD].computed_rows == 8
    for method, contract in built.contracts.items():
        values = [node.meta["val"] for node in programs[method].graph.nodes if node.op == "placeholder"]
        values = values[-len(contract.inputs) :]
        assert [tuple(value.shape) for value in values] == [spec.shape for spec in contract.inputs]
        answers = eager(programs[method], example_inputs(contract))
        assert [tuple(answer.shape) for answer in answers] == [spec.shape for spec in contract.outputs]


def test_the_other_estimator_has_one_method() -> None:
    assert list(build("llama", SHALLOW["llama"]).contracts) == [STEP_METHOD]


# Settings


def test_rows_of_the_score_program_can_be_chosen() -> None:
    built = build("llama", SHALLOW["llama"], estimator="tangent", score_batch_size=5)
    assert built.contracts[SCORE_METHOD].rows == 5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"estimator": "tangent", "copies": 2},
            "copies belongs to estimator antithetic, but estimator is tangent",
        ),
        (
            {"estimator": "antithetic", "score_batch_size": 2},
            "score_batch_size belongs to estimator tangent or exact, but estimator is antithetic",
        ),
    ],
)
def test_settings_of_the_other_estimator_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_export_config("llama", **changes)
    assert error.value.problems == [problem]


# Verification, with the graphs in eager mode in the engine's place


def in_place_of_the_engine(programs: Programs, monkeypatch: pytest.MonkeyPatch, **damage: float) -> None:
    """Let `run_program` answer with the graphs, the last output of a method times 1 + damage."""

    def run(path: Path, inputs: Tensors, method: str = STEP_METHOD, *_: object) -> Tensors:
        *others, last = eager(programs[method], inputs)
        return (*others, last * (1 + damage.get(method, 0.0)))

    monkeypatch.setattr(verification, "run_program", run)


def test_verification_measures_answers_and_tangents(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    built, programs = small
    in_place_of_the_engine(programs, monkeypatch)
    found = verify(Path("unused"), built, programs)
    assert found.rows == built.contract.rows
    assert found.max_absolute_difference < EAGER_TOLERANCE
    assert found.tangent_difference is not None and found.tangent_difference < EAGER_TOLERANCE
    assert found.tolerance == found.tangent_tolerance == FP32_TOLERANCE


@pytest.mark.parametrize(
    ("method", "message"),
    [(STEP_METHOD, "differs from the model by 0.001 in dlogprobs"), (SCORE_METHOD, r"by .* in logprobs")],
)
def test_verification_refuses_what_differs(
    small: Small, monkeypatch: pytest.MonkeyPatch, method: str, message: str
) -> None:
    built, programs = small
    in_place_of_the_engine(programs, monkeypatch, **{method: 1e-3})
    with pytest.raises(BundleError, match=message):
        verify(Path("unused"), built, programs)


def test_verification_refuses_what_is_not_finite(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    built, programs = small
    in_place_of_the_engine(programs, monkeypatch, **{STEP_METHOD: float("nan")})
    with pytest.raises(BundleError, match=r"dlogprobs .* aren't finite"):
        verify(Path("unused"), built, programs)


def test_verification_refuses_an_adapter_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last layer's queries of the first token can't reach a readout of the first token.
    settings = {"readout": "pooled", "pooling": "first", "target_modules": ["q_proj"]}
    built = build("llama", SHALLOW["llama"], estimator="tangent", **settings)
    programs = export_programs(built)
    in_place_of_the_engine(programs, monkeypatch)
    with pytest.raises(BundleError, match=r"the tangents \[0, 1, 2\] of the lowered program are zero"):
        verify(Path("unused"), built, programs)


# In the engine


@dataclass(frozen=True)
class Lowered:
    """A program with tangents, its graphs and its file."""

    built: BuiltProgram
    programs: Programs
    path: Path
    reports: dict[str, LoweringReport]

    @property
    def is_quantized(self) -> bool:
        """Whether its base is."""
        return bool(self.built.float_answers)


LOWERED = [("llama", "fp32"), ("qwen3", "8da4w"), ("bert", "8da8w"), ("gpt2", "fp32")]


@pytest.fixture(scope="module", params=LOWERED, ids="-".join)
def lowered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    architecture, scheme = request.param
    changes = {"estimator": "tangent", "quantize": scheme, "target_modules": "all-linear"}
    built = build(architecture, SHALLOW[architecture], **changes)
    programs = export_programs(built)
    result = lower(programs)
    path = tmp_path_factory.mktemp("tangent") / "program.pte"
    path.write_bytes(result.buffer)
    return Lowered(built, programs, path, result.reports)


@pytest.mark.export
def test_engine_is_the_eager_graph(lowered: Lowered) -> None:
    for method, contract in lowered.built.contracts.items():
        for seed in range(3):
            inputs = example_inputs(contract, seed)
            found = run_program(lowered.path, inputs, method)
            for ours, theirs in zip(found, eager(lowered.programs[method], inputs), strict=True):
                difference = (ours - theirs).abs() / theirs.abs().max()
                # Where a code of an activation is rounded the other way, one step of int8 shows.
                assert difference.median() < FP32_TOLERANCE
                assert difference.max() < (0.05 if lowered.is_quantized else FP32_TOLERANCE)


@pytest.mark.export
def test_verification_accepts_the_program(lowered: Lowered) -> None:
    found = verify(lowered.path, lowered.built, lowered.programs)
    assert found.max_absolute_difference <= found.tolerance
    assert found.tangent_difference is not None and found.tangent_tolerance is not None
    assert found.tangent_difference <= found.tangent_tolerance


@pytest.mark.export
def test_tangents_stay_in_the_delegates(lowered: Lowered) -> None:
    contract = lowered.built.contract
    outside = OUTSIDE[contract.readout]
    # A decoder's lookups are spread over the tangents.
    outside |= set() if contract.is_encoder else {"expand_copy"}
    for method, report in lowered.reports.items():
        assert set(report.outside) <= outside
        assert report.delegated_products == 1.0
        assert report.delegated_share > 0.9
        # One more than a P-RGE program: where positions are picked, primal and tangents are apart.
        assert report.delegates <= (1 if contract.is_encoder else 5), method
        assert report.planned_memory_bytes > 0


@pytest.mark.export
def test_weights_are_stored_once(lowered: Lowered) -> None:
    (alone,) = lower({SCORE_METHOD: lowered.programs[SCORE_METHOD]}).reports.values()
    assert len({report.constant_bytes for report in lowered.reports.values()}) == 1
    # Every adapted layer of another width has zeros for slot 0, beside its seeds and its directions.
    contract = lowered.built.contract
    zeros = {4 * contract.rows * (contract.sequence_length + m.out_features) for m in contract.modules}
    # A product of two values that depend on the adapter has a number for every row of every slot.
    program = lowered.programs[STEP_METHOD]
    masks = sum(
        tensor.nbytes
        for tensor in {**program.state_dict, **program.constants}.values()
        if tensor.ndim > 2
        and tensor.shape[0] == 1 + contract.queries
        and tensor.shape[-2:] == (contract.sequence_length, 1)
    )
    # The step's other constants are padded biases and rows of ones.
    assert lowered.reports[STEP_METHOD].constant_bytes - sum(zeros) - masks < 1.06 * alone.constant_bytes


@pytest.mark.export
@pytest.mark.parametrize("scale", [2.0**10, 2.0**-10])
def test_tangents_are_linear_in_the_directions(lowered: Lowered, scale: float) -> None:
    """To the last bit for powers of 2, in quantized programs too: a tangent's rows have their own scales."""
    contract = lowered.built.contract
    inputs = example_inputs(contract)
    scaled = tuple(
        tensor * scale if spec.name.startswith(V_PREFIX) else tensor
        for spec, tensor in zip(contract.inputs, inputs, strict=True)
    )
    answer, tangents = run_program(lowered.path, inputs)
    other, found = run_program(lowered.path, scaled)
    assert torch.equal(answer, other)
    assert torch.equal(found, tangents * scale)


@pytest.mark.export
def test_bundle_of_a_tangent_program(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama", **SHALLOW["llama"])
    config = make_export_config(
        str(folder), tmp_path / "bundle", estimator="tangent", quantize="8da4w", score_batch_size=3
    )
    bundle = open_bundle(export(config))
    manifest, contract = bundle.manifest, build_program(config).contract
    assert bundle.contract == contract
    assert (contract.kind, contract.queries, contract.copies, contract.rows) == ("tangent", 3, 1, 2)
    assert manifest["queries"] == contract.queries
    assert (
        manifest["lowering"]["delegated_products"] == manifest["score_lowering"]["delegated_products"] == 1.0
    )
    assert manifest["score"]["kind"] == "stack"
    assert manifest["score"]["batch_size"] == 3
    assert manifest["score"]["modules"] == manifest["contract"]["modules"]
    assert manifest["verification"]["tangent_difference"] <= manifest["verification"]["tangent_tolerance"]
    assert manifest["verification"]["max_absolute_difference"] <= manifest["verification"]["tolerance"]
    for method, block in ((STEP_METHOD, "contract"), (SCORE_METHOD, "score")):
        inputs = example_inputs(build_program(config).contracts[method])
        answers = run_program(bundle.folder / "program.pte", inputs, method)
        shapes = [tuple(spec["shape"]) for spec in manifest[block]["outputs"]]
        assert [tuple(answer.shape) for answer in answers] == shapes
