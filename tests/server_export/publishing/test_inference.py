"""An inference program answers what its model answers: of every kind of position, in float and quantized."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from prge.bundle import PROGRAM, file_sha256, read_manifest  # noqa: E402
from prge.contract import AdaptedModule  # noqa: E402
from prge.errors import BundleError  # noqa: E402
from server_export.bundle import write_manifest  # noqa: E402
from server_export.check.verification import run_program  # noqa: E402
from server_export.model.loading import LoadedModel, prepare_model  # noqa: E402
from server_export.publishing import inference  # noqa: E402
from server_export.publishing.inference import (  # noqa: E402
    FLOAT_TOLERANCES,
    QUANTIZED_TOLERANCE,
    BuiltInference,
    InferenceSpec,
    build_inference,
    check_exact,
    check_quantized,
)
from tests.tiny_models import DECODERS, LENGTH, SHALLOW, make_model  # noqa: E402

torch.set_num_threads(1)
pytestmark = pytest.mark.export

MODULES = (AdaptedModule("any", 1, 1, 1),)
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
    return build_inference(folder, loaded, InferenceSpec(LENGTH, MODULES, "mean", scheme))


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
    (answers,) = run_program(tmp_path / PROGRAM, [tokens, torch.tensor([[position]])])
    torch.testing.assert_close(answers, expected, atol=1e-4, rtol=0)
    # Long factors matter, but at no row's first token; dynamic ones are for rows that no program has.
    assert torch.allclose(plain, expected, atol=1e-3) == (position == 0 or kind == "dynamic")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("scheme", ["8da8w", "8da4w"])
def test_a_quantized_program_is_held_against_both_models(
    tmp_path: Path, architecture: str, scheme: str
) -> None:
    built = build(tmp_path, tiny(architecture), scheme)
    assert built.checks["quantized_difference"] < QUANTIZED_TOLERANCE / 5
    assert 0 < built.checks["float_difference"] < FLOAT_TOLERANCES[scheme]
    write_manifest(tmp_path, {**built.to_json(), "model": {"name_or_path": "tiny"}})
    manifest = read_manifest(tmp_path)
    assert manifest["verification"] == {**built.checks, "rows": 3}
    assert manifest["files"][PROGRAM]["sha256"] == file_sha256(tmp_path / PROGRAM)
    assert json.loads((tmp_path / "manifest.json").read_bytes())["kind"] == "inference"


@pytest.mark.parametrize("scheme", ["fp32", "8da8w", "8da4w"])
def test_a_program_with_a_wrong_layer_is_refused(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm that answers a fifth too much changes every answer by less than a deviation."""
    export_graph = inference.export_graph

    def wrong(module: Any, inputs: Any) -> Any:
        changed = copy.deepcopy(module)
        norm = changed.get_submodule("model.model.norm")
        norm.weight = torch.nn.Parameter(norm.weight * 1.2, requires_grad=False)
        return export_graph(changed, inputs)

    monkeypatch.setattr(inference, "export_graph", wrong)
    with pytest.raises(BundleError, match="differ"):
        build(tmp_path, tiny(), scheme)


def test_answers_that_are_not_finite_are_refused() -> None:
    answers = torch.tensor([[1.0, float("nan")]])
    with pytest.raises(BundleError, match="differ by nan"):
        check_exact("program", answers, torch.ones(1, 2))
    with pytest.raises(BundleError, match="differ from the quantized model's by nan"):
        check_quantized(answers, torch.ones(1, 2), torch.tensor([[0.0, 1.0]]), "8da8w")


def test_what_quantization_may_change_depends_on_the_scheme() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(3, 100, generator=generator)
    quantized = exact + 0.3 * torch.randn(3, 100, generator=generator)
    checks = check_quantized(quantized, quantized, exact, "8da4w")
    assert checks["quantized_difference"] == 0 and checks["float_difference"] == pytest.approx(0.3, rel=0.3)
    with pytest.raises(BundleError, match="differ from the float model's"):
        check_quantized(quantized, quantized, exact, "8da8w")
    unrelated = torch.randn(3, 100, generator=generator)
    for scheme in FLOAT_TOLERANCES:
        with pytest.raises(BundleError, match="differ from the quantized model's"):
            check_quantized(unrelated, quantized, exact, scheme)
