"""`prge estimate`: numbers from a configuration, held against an export of the same model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from prge.bundle import PROGRAM
from prge.contract import Contract
from prge.errors import BundleError, ConfigError
from server_export.estimate import announce, estimate, estimate_of, main
from server_export.export import export
from server_export.model.loading import load_model
from server_export.settings import EstimateConfig
from tests.server_export.programs import make_export_config
from tests.tiny_models import save_model


@pytest.fixture
def outline_folder(tmp_path: Path) -> Path:
    """A folder with a configuration and nothing else."""
    model = save_model(tmp_path / "model", "llama")
    folder = tmp_path / "outline"
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    return folder


def test_a_configuration_is_enough(outline_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(outline_folder), "--no-calibrate", "--sequence-length", "8"]) == 0
    text = capsys.readouterr().out
    for words in ("parameters in", "20 rows of 8 tokens", "memory of a run", "while loading", "--calibrate"):
        assert words in text, words


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "gemma3"])
@pytest.mark.parametrize("estimator", ["tangent", "antithetic"])
def test_weights_make_no_difference(architecture: str, estimator: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", architecture)
    config = make_export_config(str(folder), tmp_path / "bundle", estimator=estimator)
    outline = estimate(config)
    assert outline == estimate_of(config, load_model(str(folder)))
    assert outline.outline.parameters > 0


@pytest.mark.export
def test_size_contract_and_memory_are_those_of_the_export(tmp_path: Path) -> None:
    # Wide enough for the weights to be most of it.
    model = save_model(
        tmp_path / "model", "llama", num_hidden_layers=2, hidden_size=256, intermediate_size=768, head_dim=64
    )
    config = make_export_config(str(model), tmp_path / "bundle", quantize="8da4w", queries=2)
    found = estimate(config)
    folder = export(config)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert found.contract == Contract.from_json(manifest["contract"])
    assert found.weights.stored == pytest.approx(manifest["lowering"]["constant_bytes"], rel=0.05)
    assert found.program_bytes == pytest.approx((folder / PROGRAM).stat().st_size, rel=0.05)
    (workspace,) = manifest["verification"]["workspace_bytes"].values()
    memory = found.memory("native")
    assert memory.workspace is not None
    assert abs(memory.workspace - workspace) < 1 << 20


@pytest.mark.export
def test_calibration_gives_seconds(outline_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quantize", "8da4w", "--sequence-length", "8", "--estimator", "antithetic", "--copies", "4"]
    assert main(["--model", str(outline_folder), "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step"]["calls"] == 2
    assert report["step"]["rows"] == 2 * 4 * 4
    assert all(rate > 0 for rate in report["rates"].values())
    assert 0 < report["step"]["seconds"] < 1


def test_a_trunk_cache_makes_steps_cheaper(outline_folder: Path) -> None:
    config = EstimateConfig(model=str(outline_folder), adapt_layers="top:1", trunk_cache=True)
    step = estimate(config).to_json(None)["step"]
    assert step["cached_operations"] < step["operations"]


def test_what_an_export_refuses_is_refused(outline_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="there is no folder"):
        main(["--model", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="must be one of fp32"):
        main(["--model", str(outline_folder), "--quantize", "int3"])
    with pytest.raises(ConfigError, match="positions"):
        main(["--model", str(outline_folder), "--sequence-length", "100000"])


def test_an_export_is_announced(outline_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    announce(EstimateConfig(model=str(outline_folder)))
    assert "of memory at the peak of the export" in capsys.readouterr().out
    # What can't be estimated is no reason not to try.
    announce(EstimateConfig(model=str(outline_folder / "none")))
    assert capsys.readouterr().out == ""
