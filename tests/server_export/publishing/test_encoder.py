"""An encoder's program answers what its model answers, in float and quantized."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from prge.errors import BundleError
from prge.formats.bundle import file_sha256, manifest_sha256, open_bundle
from server_export.bundle import write_manifest
from server_export.checkpoint.loading import prepare_model
from server_export.lower.program import write_program
from server_export.publishing import encoder
from server_export.publishing.encoder import build_encoder
from server_export.publishing.program import (
    CHANGED,
    FLIPPED,
    FLOAT_TOLERANCE,
    METHOD,
    PROGRAM,
    Built,
    check_exact,
    check_quantized,
)
from tests.tiers import rest
from tests.tiny_models import LENGTH, SHALLOW, make_model

torch.set_num_threads(1)


def build(folder: Path, scheme: str = "fp32") -> Built:
    model = make_model("bert", **SHALLOW["bert"])
    return build_encoder(folder, prepare_model(model, "bert", False), LENGTH, "mean", scheme)


@pytest.mark.parametrize("scheme", ["8da4w", *rest("fp32", "8da8w")])
def test_a_program_is_held_against_its_model(tmp_path: Path, scheme: str) -> None:
    built = build(tmp_path, scheme)
    if scheme == "fp32":
        assert built.checks["max_absolute_difference"] < built.checks["tolerance"] / 10
    else:
        # The engine rounds as the eager model does: what both differ by from the float model is the same.
        assert built.checks["quantized_difference"] < built.checks["quantized_tolerance"] / 10
        assert built.checks["quantized_tolerance"] < 0.04
        ratio = (built.checks["float_tolerance"] - FLOAT_TOLERANCE) / built.checks["float_difference"]
        assert ratio == pytest.approx(CHANGED, rel=1e-3)
    # Embeddings are portable; every product is XNNPACK's.
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
        norm = changed.get_submodule("model.encoder.layer.0.output.LayerNorm")
        norm.weight = torch.nn.Parameter(norm.weight * 1.05, requires_grad=False)
        write_program(path, {METHOD: (changed, inputs)})

    monkeypatch.setattr(encoder, "write_program", write_another)
    with pytest.raises(BundleError, match="differ"):
        build(tmp_path, scheme)


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
