"""`prge export` from a folder to a bundle."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("executorch")

import torch

from prge.bundle import open_bundle
from prge.errors import BundleError, ConfigError, RunError
from server_export.check.verification import run_program
from server_export.export import export, main
from server_export.lower import lowering
from server_export.model.program import build_program, example_inputs
from tests.server_export.programs import make_export_config
from tests.tiny_models import SHALLOW, save_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama", **SHALLOW["llama"])


@pytest.fixture(scope="session")
def llama_bundle(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "llama"
    return export(make_export_config(str(llama_folder), out, quantize="8da4w", queries=2, seed=5))


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.export
def test_bundle_opens_and_says_what_it_is(llama_bundle: Path, llama_folder: Path) -> None:
    bundle = open_bundle(llama_bundle)
    manifest = bundle.manifest
    assert bundle.contract.rows == 6
    assert manifest["queries"] == 2
    assert manifest["lora"] == {
        "rank": 4,
        "alpha": 16.0,
        "target_modules": ["q_proj", "v_proj"],
        "seed": 5,
        "source": None,
    }
    assert manifest["model"]["architecture"] == "LlamaForCausalLM"
    assert manifest["model"]["name_or_path"] == str(llama_folder)
    assert manifest["quantization"]["scheme"] == "8da4w"
    assert manifest["verification"]["max_absolute_difference"] <= manifest["verification"]["tolerance"]
    assert manifest["lowering"]["delegated_products"] == 1.0
    assert files(llama_bundle) == [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "manifest.json",
        "program.pte",
        "tokenizer/tokenizer.json",
    ]


@pytest.mark.export
def test_bundle_holds_the_program_that_was_asked_for(llama_bundle: Path, llama_folder: Path) -> None:
    built = build_program(make_export_config(str(llama_folder), quantize="8da4w", seed=5))
    assert built.contract == open_bundle(llama_bundle).contract
    inputs = example_inputs(built.contract, seed=9)
    with torch.no_grad():
        expected = built.module(*inputs)
    (actual,) = run_program(llama_bundle / "program.pte", inputs)
    torch.testing.assert_close(actual, expected, atol=0.02, rtol=0)


@pytest.mark.export
def test_existing_folder_is_kept_unless_overwriting_is_asked_for(
    llama_bundle: Path, llama_folder: Path
) -> None:
    before = (llama_bundle / "manifest.json").read_bytes()
    with pytest.raises(RunError, match="exists already"):
        export(make_export_config(str(llama_folder), llama_bundle))
    assert (llama_bundle / "manifest.json").read_bytes() == before


@pytest.mark.export
@pytest.mark.parametrize("estimator", ["antithetic", "tangent"])
def test_failed_verification_leaves_nothing(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimator: str
) -> None:
    def lower_another(
        programs: Mapping[str, torch.export.ExportedProgram],
    ) -> lowering.LoweredProgram:
        # The graphs share the module's weights, which the verification is to find unharmed.
        weights = {
            weight.data_ptr(): weight
            for graph in programs.values()
            for weight in graph.state_dict.values()
            if weight.is_floating_point()
        }
        for weight in weights.values():
            weight.mul_(1.01)
        lowered = lowering_function(programs)
        for weight in weights.values():
            weight.div_(1.01)
        return lowered

    lowering_function = lowering.lower
    monkeypatch.setattr(lowering, "lower", lower_another)
    with pytest.raises(BundleError, match="differs from the model by"):
        export(make_export_config(str(llama_folder), tmp_path / "bundle", estimator=estimator))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.export
def test_copies_that_make_no_difference_are_refused(tmp_path: Path) -> None:
    # The last layer's queries of the first token can't reach a readout of the first token.
    folder = save_model(tmp_path / "model", "llama", **SHALLOW["llama"])
    settings = {"readout": "pooled", "pooling": "first", "target_modules": ["q_proj"]}
    with pytest.raises(BundleError, match="return what copy 0 returns"):
        export(make_export_config(str(folder), tmp_path / "bundle", **settings))


@pytest.mark.export
def test_encoder_with_chat_of_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model", "bert", **SHALLOW["bert"])
    argv = ["--model", str(folder), "--out", str(tmp_path / "bundle"), "--sequence-length", "8"]
    assert main([*argv, "--queries", "1", "--batch-size", "2", "--pooling", "first"]) == 0
    bundle = open_bundle(tmp_path / "bundle")
    assert bundle.contract.readout == "pooled"
    assert (bundle.contract.kind, bundle.contract.queries, bundle.contract.width) == ("tangent", 1, 64)
    assert bundle.manifest["score"]["batch_size"] == bundle.contract.computed_rows == 4
    assert bundle.manifest["readout"]["pooling"] == "first"
    output = capsys.readouterr().out
    for word in ("loading", "lowering", "verifying", "writing", "delegates", "readout pooled"):
        assert word in output


@pytest.mark.export
def test_verbalizer(llama_folder: Path, tmp_path: Path) -> None:
    config = make_export_config(str(llama_folder), tmp_path / "bundle", label_words=[" yes", " no"])
    bundle = open_bundle(export(config))
    assert bundle.contract.readout == "verbalizer"
    assert len(bundle.contract.label_tokens) == 2
    assert bundle.manifest["readout"]["label_words"] == [" yes", " no"]


def test_label_words_of_several_tokens_stop_the_export(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'maybe' is 5 tokens"):
        export(make_export_config(str(llama_folder), tmp_path / "bundle", label_words=["maybe", " no"]))
    assert list(tmp_path.iterdir()) == []


def test_settings_are_checked_together() -> None:
    with pytest.raises(ConfigError) as error:
        make_export_config("llama", rank=0, copies=0, quantize="8w")
    assert len(error.value.problems) == 3


def test_copies_default_to_a_whole_step() -> None:
    assert make_export_config("llama", copies=None, queries=3).stack_copies == 6


def test_settings_need_no_torch() -> None:
    code = (
        "import sys, server_export.export; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
