"""An inference program answers what its model answers: of every kind of position, in float and quantized."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from prge.errors import BundleError
from prge.files.bundle import file_sha256, manifest_sha256, open_bundle
from server_export.bundle import write_manifest
from server_export.check.engine import loaded_method
from server_export.lower.program import write_program
from server_export.model.loading import LoadedModel, prepare_model
from server_export.publishing import inference
from server_export.publishing.inference import (
    CHANGED,
    FLIPPED,
    FLOAT_TOLERANCE,
    METHOD,
    PROGRAM,
    BuiltInference,
    InferenceSpec,
    build_inference,
    check_exact,
    check_quantized,
)
from tests.tiers import rest
from tests.tiny_models import DECODERS, LENGTH, SHALLOW, make_model

torch.set_num_threads(1)

LONG_FACTORS = [1 + 0.3 * index for index in range(8)]
SCALED: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": LONG_FACTORS,
        "original_max_position_embeddings": 8,
    },
}


def tiny(architecture: str = "llama", **changes: Any) -> LoadedModel:
    model = make_model(architecture, **{**SHALLOW[architecture], **changes})
    return prepare_model(model, architecture, architecture in DECODERS)


def build(folder: Path, loaded: LoadedModel, scheme: str = "fp32") -> BuiltInference:
    return build_inference(folder, loaded, InferenceSpec(LENGTH, "mean", scheme))


@pytest.mark.parametrize("kind", sorted(SCALED))
@pytest.mark.parametrize("position", [0, LENGTH - 1])
def test_frequencies_that_depend_on_positions_are_those_of_the_model(
    tmp_path: Path, kind: str, position: int
) -> None:
    loaded = tiny(rope_parameters={"rope_theta": 10_000.0, **SCALED[kind]})
    tokens = torch.randint(3, 128, (1, LENGTH), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = copy.deepcopy(loaded.model)(input_ids=tokens).logits[:, position]
        plain = tiny().model(input_ids=tokens).logits[:, position]
    build(tmp_path, loaded)
    (answers,) = loaded_method(tmp_path / PROGRAM, METHOD, [tokens, torch.tensor([[position]])])()
    torch.testing.assert_close(answers, expected, atol=1e-4, rtol=0)
    # Long factors matter, but at no row's first token; dynamic ones are for rows that no program has.
    assert torch.allclose(plain, expected, atol=1e-3) == (position == 0 or kind == "dynamic")


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        ("llama", "fp32"),
        ("bert", "8da4w"),
        *rest(("gpt2", "fp32"), ("bert", "fp32"), *((name, "8da8w") for name in ("llama", "gpt2", "bert"))),
        *rest(("llama", "8da4w"), ("gpt2", "8da4w")),
    ],
)
def test_a_program_is_held_against_its_models(tmp_path: Path, architecture: str, scheme: str) -> None:
    built = build(tmp_path, tiny(architecture), scheme)
    if scheme == "fp32":
        assert built.checks["max_absolute_difference"] < built.checks["tolerance"] / 10
    else:
        # The engine rounds as the eager model does: what both differ by from the float model is the same.
        assert built.checks["quantized_difference"] < built.checks["quantized_tolerance"] / 10
        assert built.checks["quantized_tolerance"] < 0.04
        ratio = (built.checks["float_tolerance"] - FLOAT_TOLERANCE) / built.checks["float_difference"]
        assert ratio == pytest.approx(CHANGED, rel=1e-3)
    # Embeddings and what picks a position are portable; every product is XNNPACK's.
    operators = {*re.findall(rb"aten::\w+", (tmp_path / PROGRAM).read_bytes())}
    assert operators <= {b"aten::embedding", b"aten::index_select", b"aten::add", b"aten::_to_copy"}
    manifest = write_manifest(tmp_path, {**built.to_json(), "model": {"name_or_path": "tiny"}})
    assert manifest["kind"] == "inference" and manifest["manifest_sha256"] == manifest_sha256(manifest)
    assert manifest["verification"] == {**built.checks, "rows": 3}
    assert manifest["files"][PROGRAM]["sha256"] == file_sha256(tmp_path / PROGRAM)
    with pytest.raises(BundleError, match="has format 1"):
        open_bundle(tmp_path)


@pytest.mark.parametrize("scheme", ["8da4w", *rest("fp32", "8da8w")])
def test_a_program_with_a_wrong_layer_is_refused(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm that answers a twentieth too much changes answers by far less than four bits do."""

    def write_another(path: Path, methods: Any) -> None:
        changed, inputs = copy.deepcopy(methods[METHOD])
        norm = changed.get_submodule("model.model.norm")
        norm.weight = torch.nn.Parameter(norm.weight * 1.05, requires_grad=False)
        write_program(path, {METHOD: (changed, inputs)})

    monkeypatch.setattr(inference, "write_program", write_another)
    with pytest.raises(BundleError, match="differ"):
        build(tmp_path, tiny(), scheme)


def test_answers_that_are_not_finite_are_refused() -> None:
    answers, ones, exact = torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2), torch.tensor([[0.0, 1.0]])
    with pytest.raises(BundleError, match="differ by nan"):
        check_exact("program", answers, ones)
    with pytest.raises(BundleError, match="differ from the quantized model's by nan"):
        check_quantized(answers, ones, exact, exact)


def test_what_rounding_changes_says_what_an_engine_may() -> None:
    exact, *noise = torch.randn(5, 3, 100, generator=torch.Generator().manual_seed(0))
    smooth = exact + 0.1 * noise[0]
    expected = smooth + 0.01 * noise[1]

    def check(by: float) -> dict[str, float]:
        return check_quantized(expected + by * noise[2], expected, smooth, exact)

    checks = check(0.001)
    assert checks["quantized_difference"] == pytest.approx(0.001, rel=0.2)
    assert checks["quantized_tolerance"] == pytest.approx(FLIPPED * 0.01, rel=0.2)
    assert checks["float_difference"] == pytest.approx(0.1, rel=0.2)
    with pytest.raises(BundleError, match="differ from the quantized model's"):
        check(0.03)
    # As near to the quantized model as its own rounding, and on the far side of it.
    away = (expected - exact) * 0.6
    with pytest.raises(BundleError, match="differ from the float model's"):
        check_quantized(expected + away, expected, expected + 2.5 * away, exact)
