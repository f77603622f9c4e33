"""`prge export` from a folder to a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prge.errors import BundleError, ConfigError, RunError
from prge.formats.bundle import open_bundle
from prge.formats.signatures import ROLES
from server_export.export import ExportConfig, export, main
from server_export.lower.block_type import WeightsLayout
from tests.refusals import raises, refusal
from tests.tiny_models import SHALLOW, save_model
from tests.workshop import FolderBuilder

torch.set_num_threads(1)


def config(model: object, out: Path = Path("unused"), **changes: Any) -> ExportConfig:
    """Return the settings of a small export with the forward role only."""
    return ExportConfig(model=str(model), out=out, **{"roles": ["forward"], "rank": 4, **changes})


@pytest.fixture(scope="session")
def llama_folder(made_once: FolderBuilder) -> Path:
    return made_once("exported-model", lambda folder: save_model(folder, "llama", **SHALLOW["llama"]))


@pytest.fixture(scope="session")
def llama_bundle(llama_folder: Path, made_once: FolderBuilder) -> Path:
    settings = {"quantize": "8da4w", "roles": ["forward", "jvp"], "seed": 5}
    folder_of_bundle = made_once(
        "exported", lambda folder: export(config(llama_folder, folder / "bundle", **settings))
    )
    return folder_of_bundle / "bundle"


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_bundle_opens_with_its_description(llama_bundle: Path, llama_folder: Path) -> None:
    bundle = open_bundle(llama_bundle)
    manifest = bundle.manifest
    assert bundle.chain.roles == ("forward", "jvp")
    # The model's number of positions.
    assert bundle.chain.bounds.tokens == 64
    assert manifest["lora"] == {
        "adapter": "lora-fa",
        "rank": 4,
        "alpha": 16.0,
        "target_modules": ["q_proj", "v_proj"],
        "seed": 5,
        "source": None,
        "init": "random",
    }
    assert manifest["model"]["architecture"] == "LlamaForCausalLM"
    assert manifest["model"]["name_or_path"] == str(llama_folder)
    assert manifest["quantization"]["scheme"] == "8da4w"
    rounding = manifest["quantization"]["rounding"]
    assert (rounding["method"], rounding["tokens"]) == ("gptq", 4096) and 4 <= rounding["weight_bits"] <= 4.25
    differences = manifest["verification"]["differences"]
    assert set(differences) == {"forward", "jvp"}
    assert max(differences.values()) <= manifest["verification"]["tolerance"]
    assert files(llama_bundle) == [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "layers.json",
        "manifest.json",
        *(f"programs/{name}.pte" for name in ("block", "embedding", "head")),
        "tables.safetensors",
        "tokenizer/tokenizer.json",
        *(f"weights/{name}.ptd" for name in ("000", "embedding", "head")),
    ]


def test_all_roles_are_the_default() -> None:
    assert ExportConfig(model="m", out=Path("b")).roles == list(ROLES)


def test_explicit_target_modules_are_not_reported_as_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def enough(*_: object) -> None:
        raise BundleError("enough", code="enough")

    monkeypatch.setattr("server_export.lower.chain.lower_chain", enough)
    model = save_model(tmp_path / "model", "qwen3_5")
    with raises(BundleError, "enough"):
        export(config(model, tmp_path / "bundle", target_modules=None))
    assert "default target modules" not in capsys.readouterr().out


def test_an_existing_folder_is_kept_without_overwrite(llama_bundle: Path, llama_folder: Path) -> None:
    before = (llama_bundle / "manifest.json").read_bytes()
    with raises(RunError, "folder-exists", containing=str(llama_bundle)):
        export(config(llama_folder, llama_bundle))
    assert (llama_bundle / "manifest.json").read_bytes() == before


def test_failed_verification_leaves_nothing(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WeightsLayout.write

    def other(self: WeightsLayout, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        moved = {
            n: t * 1.01 if n not in self.fixed and t.is_floating_point() else t for n, t in tensors.items()
        }
        write(self, path, moved)

    monkeypatch.setattr(WeightsLayout, "write", other)
    with refusal("differs-from-graph"):
        export(config(llama_folder, tmp_path / "bundle"))
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_with_its_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model", "bert", **SHALLOW["bert"])
    argv = ["--model", str(folder), "--out", str(tmp_path / "bundle"), "--sequence-length", "8"]
    assert main([*argv, "--pooling", "first", "--roles", "forward"]) == 0
    bundle = open_bundle(tmp_path / "bundle")
    assert (bundle.chain.readout, bundle.chain.width, bundle.pooling) == ("pooled", 64, "first")
    assert bundle.chain.bounds.tokens == 8
    output = capsys.readouterr().out
    for word in ("tracing", "comparing", "lowering", "verifying", "writing", "readout pooled"):
        assert word in output


def test_a_decoder_can_be_exported_with_pooled_states(llama_folder: Path, tmp_path: Path) -> None:
    bundle = open_bundle(export(config(llama_folder, tmp_path / "bundle", readout="pooled")))
    assert bundle.chain.is_encoder and bundle.pooling == "mean"


def test_rows_that_are_longer_than_the_model_has_positions_are_refused(
    llama_folder: Path, tmp_path: Path
) -> None:
    with raises(ConfigError, "positions-too-few", containing="sequence_length is 65"):
        export(config(llama_folder, tmp_path / "bundle", sequence_length=65))
    assert list(tmp_path.iterdir()) == []


def test_settings_are_checked_together() -> None:
    with raises(ConfigError, "settings-unusable") as error:
        config("llama", rank=0, roles=["score"], quantize="8w")
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"init": "eva"}, "init_rows"),
        ({"init_rows": Path("rows.jsonl")}, "init_rows"),
        ({"init_task": "sst2"}, "init_task"),
        ({"spread_ranks": True}, "spread_ranks"),
        (
            {"init": "eva", "init_rows": Path("r"), "start_adapter": Path("a")},
            "start_adapter",
        ),
    ],
)
def test_settings_of_another_init_are_refused(changes: dict[str, Any], value: str) -> None:
    with raises(ConfigError, "settings-unusable", containing=value):
        config("llama", **changes)


def test_a_model_without_default_target_modules_adapts_all_layers_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model", "persimmon", num_hidden_layers=1)
    bundle = open_bundle(export(config(model, tmp_path / "bundle")))
    assert len(bundle.chain.modules) == 4
    message = (
        "no default target modules for persimmon, so all linear layers of the blocks are adapted (4 layers)"
    )
    assert message in capsys.readouterr().out
