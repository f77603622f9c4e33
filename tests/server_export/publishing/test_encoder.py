"""An encoder's program runs the model's chain of blocks, and computes the outputs of the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from prge.errors import BundleError, ConfigError
from prge.formats.bundle import file_sha256, manifest_sha256, open_bundle
from prge.formats.peft import PeftAdapter, read_lora
from server_export.bundle import write_manifest
from server_export.checkpoint.loading import load_model
from server_export.lower.program import write_program
from server_export.publishing import encoder
from server_export.publishing.encoder import EncoderSpec, build_encoder, encoder_chain
from server_export.publishing.program import (
    CHANGED,
    FLIPPED,
    FLOAT_TOLERANCE,
    METHOD,
    PROGRAM,
    BuiltProgram,
    check_exact,
    check_quantized,
)
from server_export.quantize.quantization import BundleLayers, Int4Weight
from tests.refusals import raises, refusal
from tests.server_export.adapters import trained_adapter
from tests.tiers import second_tier
from tests.tiny_models import LENGTH, SHALLOW, save_model
from tests.tiny_types import make_classifier, make_tiny

torch.set_num_threads(1)

NO_ADAPTER = PeftAdapter({}, {}, {})
QUERY, DOWN = "encoder.layer.0.attention.self.query", "encoder.layer.0.output.dense"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a `model`, and an adapter of it, `trained`."""
    folder = tmp_path_factory.mktemp("encoder")
    trained_adapter(save_model(folder / "model", "bert", **SHALLOW["bert"]), folder / "trained", size=0.1)
    return folder


def build(base: Path, folder: Path, spec: EncoderSpec) -> BuiltProgram:
    adapter = read_lora(base / "trained")
    loaded = load_model(str(base / "model"))
    for name, lora_b in adapter.lora_b.items():
        layer: Any = loaded.model.get_submodule(name)
        layer.weight += torch.from_numpy(lora_b @ adapter.lora_a[name] * adapter.scale_of(name))
    return build_encoder(folder, loaded, adapter, spec)


@pytest.mark.parametrize("scheme", ["8da4w", *second_tier("fp32", "8da8w")])
def test_a_program_is_compared_with_its_model(base: Path, tmp_path: Path, scheme: str) -> None:
    built = build(base, tmp_path, EncoderSpec(LENGTH, scheme=scheme))
    if scheme == "fp32":
        assert built.checks["max_absolute_difference"] < built.checks["tolerance"] / 10
    else:
        # Engine and eager model round equally, so both have the same difference from the float model.
        assert built.checks["quantized_difference"] < built.checks["quantized_tolerance"] / 10
        assert built.checks["quantized_tolerance"] < 0.04
        ratio = (built.checks["float_tolerance"] - FLOAT_TOLERANCE) / built.checks["float_difference"]
        assert ratio == pytest.approx(CHANGED, rel=1e-3)
    # Embeddings are portable operators; XNNPACK computes all matrix products.
    operators = {*re.findall(rb"aten::\w+", (tmp_path / PROGRAM).read_bytes())}
    assert operators <= {b"aten::embedding", b"aten::index_select", b"aten::add", b"aten::_to_copy"}
    manifest = write_manifest(tmp_path, {**built.to_json(), "model": {"name_or_path": "tiny"}})
    assert manifest["type"] == "inference" and manifest["manifest_sha256"] == manifest_sha256(manifest)
    assert manifest["verification"] == {**built.checks, "rows": 3}
    assert manifest["files"][PROGRAM]["sha256"] == file_sha256(tmp_path / PROGRAM)
    with raises(BundleError, "bundle-format", containing="has format 1"):
        open_bundle(tmp_path)


@pytest.mark.parametrize("scheme", ["8da4w", *second_tier("fp32", "8da8w")])
def test_a_program_with_a_wrong_layer_is_refused(
    base: Path, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm whose outputs are 5 % too large has a far smaller effect than int4 rounding."""
    correct: Any = load_model(str(base / "model")).model.get_submodule("encoder.layer.0.output.LayerNorm")

    def write_changed_program(path: Path, methods: Any) -> None:
        module, inputs = methods[METHOD]
        (norm,) = (tensor for tensor in module.buffers() if torch.equal(tensor, correct.weight))
        norm *= 1.05
        write_program(path, {METHOD: (module, inputs)})

    monkeypatch.setattr(encoder, "write_program", write_changed_program)
    codes = ["differs-from-model"] if scheme == "fp32" else ["differs-from-quantized-model"]
    with raises(BundleError, *codes):
        build(base, tmp_path, EncoderSpec(LENGTH, scheme=scheme))


def test_an_adapter_that_is_not_the_models_is_refused(base: Path, tmp_path: Path) -> None:
    """The blocks have the adapter, but the model that they are compared with lacks it."""
    with raises(BundleError, "differs-from-model"):
        build_encoder(
            tmp_path, load_model(str(base / "model")), read_lora(base / "trained"), EncoderSpec(LENGTH)
        )
    assert not (tmp_path / PROGRAM).exists()


def chain_with(base: Path, layers: BundleLayers) -> Any:
    spec = EncoderSpec(LENGTH, scheme="8da4w", layers=layers)
    return encoder_chain(load_model(str(base / "model")), read_lora(base / "trained"), spec)


def test_layers_are_rounded_as_the_bundle_has_them(base: Path) -> None:
    codes = torch.arange(64 * 64).reshape(64, 64).remainder(16).sub(8).to(torch.int8)
    int4_weight = Int4Weight(codes, torch.full((64, 2), 0.5).bfloat16())
    chain = chain_with(base, BundleLayers({DOWN}, {QUERY: int4_weight}))
    block_tensors = [chain.tensors(number) for number in range(len(chain.blocks))]
    tensors = {
        name: tensor for block in block_tensors for name, tensor in block.items() if name.endswith("_codes")
    }
    (adapted,) = (tensor for name, tensor in tensors.items() if "self_query" in name)
    (int8,) = (tensor for name, tensor in tensors.items() if "0_output_dense" in name)
    assert torch.equal(adapted, codes)
    assert int(int8.abs().max()) > 8
    assert chain.quantization.per_channel == (DOWN,)


def test_a_layer_of_another_shape_than_the_bundles_is_refused(base: Path) -> None:
    int4_weight = Int4Weight(torch.zeros(64, 32, dtype=torch.int8), torch.ones(64, 1).bfloat16())
    chain = chain_with(base, BundleLayers((), {QUERY: int4_weight}))
    with raises(
        BundleError, "layer-of-another-shape", containing=f"{QUERY} is [64, 32] in the bundle, [64, 64]"
    ):
        for number in range(len(chain.blocks)):
            chain.tensors(number)


def test_rows_that_are_longer_than_the_models_positions_are_refused(base: Path, tmp_path: Path) -> None:
    with raises(ConfigError, "positions-too-few", containing="sequence_length is 65"):
        build(base, tmp_path, EncoderSpec(65))


def test_a_model_with_experts_is_refused(tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "model", "qwen3_moe"))
    with refusal("experts-in-one-program"):
        encoder_chain(load_model(model, pooled=True), NO_ADAPTER, EncoderSpec(LENGTH))


# Model types and their peculiarities; some of the compared rows have padding.
_TYPES = {
    "albert": "one layer that is used several times",
    "big_bird": "a type of attention that depends on the length of the first row",
    "convbert": "convolutions and sliding windows",
    "deberta-v2": "attention scores by distances, and masks of its own",
    "distilbert": "no token types",
    "electra": "projected embeddings",
    "modernbert": "local attention and rotary embeddings",
    "mpnet": "attention biases by distances",
    "roberta": "positions that begin after the index of the padding token",
    "t5": "RMS norms, and the encoder of an encoder-decoder model",
    "xmod": "layers of one of two languages",
}


@pytest.mark.parametrize(
    "model_type", ["roberta", *second_tier(*(name for name in _TYPES if name != "roberta"))]
)
@pytest.mark.parametrize("scheme", ["fp32", *second_tier("8da8w")])
def test_encoders_of_other_types_are_published(tmp_path: Path, model_type: str, scheme: str) -> None:
    make_tiny(model_type).save_pretrained(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"), pooled=True)
    built = build_encoder(tmp_path, loaded, NO_ADAPTER, EncoderSpec(LENGTH, "first", scheme))
    assert built.facts["outputs"][0]["name"] == "pooled"


@pytest.mark.whole
@pytest.mark.parametrize("model_type", ["roberta", "modernbert", "deberta-v2"])
def test_the_layers_of_a_checkpoints_own_head(tmp_path: Path, model_type: str) -> None:
    make_classifier(model_type, 3).save_pretrained(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"))
    assert loaded.classifier is not None
    head = {name: value.numpy() for name, value in loaded.classifier.linear.state_dict().items()}
    built = build_encoder(tmp_path, loaded, NO_ADAPTER, EncoderSpec(LENGTH, "first", head=head))
    assert built.facts["outputs"] == [{"name": "scores", "dtype": "float32", "shape": (1, 3)}]


def test_outputs_that_are_not_finite_are_refused() -> None:
    outputs, ones, exact = torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2), torch.tensor([[0.0, 1.0]])
    with raises(BundleError, "differs-from-model", containing="nan"):
        check_exact("program", outputs, ones)
    with raises(BundleError, "differs-from-quantized-model", containing="nan"):
        check_quantized(outputs, ones, exact, exact)


def test_the_effect_of_rounding_determines_the_tolerances() -> None:
    exact, *noise = torch.randn(5, 3, 100, generator=torch.Generator().manual_seed(0))
    unrounded = exact + 0.1 * noise[0]
    expected = unrounded + 0.01 * noise[1]

    def check(by: float) -> dict[str, float]:
        return check_quantized(expected + by * noise[2], expected, unrounded, exact)

    checks = check(0.001)
    assert checks["quantized_difference"] == pytest.approx(0.001, rel=0.2)
    assert checks["quantized_tolerance"] == pytest.approx(FLIPPED * 0.01, rel=0.2)
    assert checks["float_difference"] == pytest.approx(0.1, rel=0.2)
    with raises(BundleError, "differs-from-quantized-model"):
        check(0.03)
    # As far from the quantized model as its rounding error, in the direction away from the float model.
    away = (expected - exact) * 0.6
    with raises(BundleError, "differs-from-float-model"):
        check_quantized(expected + away, expected, expected + 2.5 * away, exact)
